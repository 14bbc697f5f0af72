//! The papers' methods, as sets of rules: Access'18, section IV; KBP, section 4; VATC, sections III and IV.
//!
//! A method is the set of rules that are in force. Few rules depend on the method beyond that.

use std::str::FromStr;

use serde::{Deserialize, Serialize};
use strum::{Display, IntoStaticStr, VariantArray};
use thiserror::Error;

use crate::rule_id::RuleId;

/// A method of the papers, on present kernels.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize, Display, IntoStaticStr, VariantArray,
)]
#[serde(try_from = "String", into = "String")]
#[strum(serialize_all = "kebab-case")]
pub enum Method {
    /// Table 2's priorities of vCPU and vNIC threads. Interrupts and softirqs have the kernel's defaults.
    Vanilla,
    /// As `vanilla`, with Table 2's priorities of interrupt threads (needs PREEMPT_RT or `threadirqs`). NAPI is not
    /// threaded.
    Threaded,
    /// As `threaded`, with one CPU reserved for the RT group.
    Exclusive,
    /// Separate softirq work for RT and bulk: every core rule.
    #[default]
    Partitioned,
    /// As `partitioned`, with a polling thread per RT receive queue: no interrupt, no softirq (KBP, IEICE'22).
    Busypoll,
    /// A thread per priority level processes that level's packets in both directions, and receive threads run before
    /// them (VATC).
    Vatc,
    /// As `partitioned`; among vCPUs of one level, those with a pending interrupt run first (Xen-ARM, APSys'11).
    InterruptContext,
}

/// Why a text is not a method of this version.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MethodError {
    /// A method of the papers that does not concern the packet path.
    #[error("'outsourcing' is no method of the packet path: it is `partitioned` and an `ontime device` for the VM; \
        methods are {names}", names = Method::names())]
    Outsourcing,
    /// An unknown method.
    #[error("'{0}' is not a method; this version has {names}", names = Method::names())]
    Unknown(String),
}

/// Every core rule.
const PARTITIONED: [RuleId; 18] = [
    RuleId::HostConfig,
    RuleId::NapiThreaded,
    RuleId::IrqThread,
    RuleId::NapiThread,
    RuleId::NapiWeight,
    RuleId::TapBatch,
    RuleId::DeviceIrq,
    RuleId::Backlog,
    RuleId::Veth,
    RuleId::SoftirqThreads,
    RuleId::Moderation,
    RuleId::VcpuPlace,
    RuleId::VnicPlace,
    RuleId::VmmPlace,
    RuleId::RtTxQueue,
    RuleId::SkbDefer,
    RuleId::HaltPoll,
    RuleId::RtProtections,
];

impl Method {
    /// All methods of this version.
    pub const ALL: &[Method] = Method::VARIANTS;

    /// The method's name.
    pub fn name(self) -> &'static str {
        self.into()
    }

    /// All names, for messages.
    pub fn names() -> String {
        Method::ALL.iter().map(|method| method.name()).collect::<Vec<_>>().join(", ")
    }

    /// Whether the method includes a rule.
    pub fn has(self, rule: RuleId) -> bool {
        use RuleId as Id;
        match self {
            Method::Vanilla => matches!(rule, Id::HostConfig | Id::VcpuPlace | Id::VnicPlace),
            Method::Threaded => rule == Id::IrqThread || Method::Vanilla.has(rule),
            Method::Exclusive => rule == Id::ExclusiveCpu || Method::Threaded.has(rule),
            Method::Partitioned => PARTITIONED.contains(&rule),
            Method::Busypoll => rule == Id::BusyPoll || PARTITIONED.contains(&rule),
            Method::InterruptContext => rule == Id::InterruptContext || PARTITIONED.contains(&rule),
            Method::Vatc => {
                let own = matches!(rule, Id::NapiThreaded | Id::NapiThread | Id::RtTxQueue | Id::QdiscBypass);
                own || Method::Threaded.has(rule)
            }
        }
    }
}

impl FromStr for Method {
    type Err = MethodError;
    fn from_str(text: &str) -> Result<Self, MethodError> {
        if let Some(method) = Method::ALL.iter().find(|method| method.name() == text) {
            return Ok(*method);
        }
        Err(if text == "outsourcing" { MethodError::Outsourcing } else { MethodError::Unknown(text.to_owned()) })
    }
}

impl TryFrom<String> for Method {
    type Error = MethodError;
    fn try_from(text: String) -> Result<Self, MethodError> {
        text.parse()
    }
}

impl From<Method> for String {
    fn from(method: Method) -> String {
        method.name().to_owned()
    }
}

impl RuleId {
    /// Whether `without` in `host.toml` may name this rule. Excluded: the rule that always runs, and rules that are not
    /// part of [`Method::Partitioned`].
    pub fn may_be_left_out(self) -> bool {
        self != RuleId::HostConfig && Method::Partitioned.has(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_round_and_others_say_so() {
        for &method in Method::ALL {
            assert_eq!(method.name().parse(), Ok(method));
        }
        assert_eq!("outsourcing".parse::<Method>(), Err(MethodError::Outsourcing));
        assert_eq!("Vanilla".parse::<Method>(), Err(MethodError::Unknown("Vanilla".to_owned())));
    }

    #[test]
    fn every_method_places_the_rt_vcpu_and_those_of_the_core_thread_napi() {
        for &method in Method::ALL {
            assert!(method.has(RuleId::VcpuPlace) && method.has(RuleId::VnicPlace));
            let threads =
                matches!(method, Method::Partitioned | Method::Busypoll | Method::Vatc | Method::InterruptContext);
            assert_eq!(method.has(RuleId::NapiThreaded), threads);
            assert_eq!(method.has(RuleId::BusyPoll), method == Method::Busypoll);
        }
    }
}
