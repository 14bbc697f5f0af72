//! The papers' methods, as presets of the same knobs.
//!
//! A method is the set of rules that are in force; what each rule does does not depend on the method.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::rule::RuleId;

/// A method of Access'18, section IV, on today's kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Method {
    /// Table 2's priorities of vCPU and vNIC threads; interrupts and softirqs as the kernel has them.
    Vanilla,
    /// Also Table 2's priorities of interrupt threads (needs PREEMPT_RT or `threadirqs`); NAPI not threaded.
    Threaded,
    /// As `threaded`, and one CPU kept for the RT group.
    Exclusive,
    /// RT and bulk softirq work kept apart: every core rule.
    #[default]
    Partitioned,
}

/// Why a text names no method of this version.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum MethodError {
    /// A method of the papers that a later version will have.
    #[error("method '{0}' is not in this version; it has vanilla, threaded, exclusive, partitioned")]
    NotInThisVersion(&'static str),
    /// No method.
    #[error("'{0}' is not a method; this version has vanilla, threaded, exclusive, partitioned")]
    Unknown(String),
}

impl Method {
    /// All methods of this version.
    pub const ALL: [Method; 4] = [Method::Vanilla, Method::Threaded, Method::Exclusive, Method::Partitioned];
    /// Methods whose names are kept for later versions.
    pub const RESERVED: [&'static str; 3] = ["vatc", "busypoll", "outsourcing"];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Method::Vanilla => "vanilla",
            Method::Threaded => "threaded",
            Method::Exclusive => "exclusive",
            Method::Partitioned => "partitioned",
        }
    }

    /// The rules in force under it.
    pub fn rules(self) -> &'static [RuleId] {
        match self {
            Method::Vanilla => &[RuleId::VcpuPlace, RuleId::VnicPlace],
            Method::Threaded => &[RuleId::IrqThread, RuleId::VcpuPlace, RuleId::VnicPlace],
            Method::Exclusive => &[RuleId::IrqThread, RuleId::VcpuPlace, RuleId::VnicPlace, RuleId::ExclusiveCpu],
            Method::Partitioned => &[
                RuleId::NapiThreaded,
                RuleId::IrqThread,
                RuleId::NapiThread,
                RuleId::Backlog,
                RuleId::SoftirqThreads,
                RuleId::VcpuPlace,
                RuleId::VnicPlace,
                RuleId::RtTxQueue,
                RuleId::SkbDefer,
                RuleId::HaltPoll,
                RuleId::RtProtections,
            ],
        }
    }

    /// Whether a rule is in force under it.
    pub fn has(self, rule: RuleId) -> bool {
        self.rules().contains(&rule)
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Method {
    type Err = MethodError;
    fn from_str(text: &str) -> Result<Self, MethodError> {
        if let Some(method) = Method::ALL.into_iter().find(|method| method.name() == text) {
            return Ok(method);
        }
        match Method::RESERVED.into_iter().find(|name| *name == text) {
            Some(name) => Err(MethodError::NotInThisVersion(name)),
            None => Err(MethodError::Unknown(text.to_owned())),
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_go_round_and_reserved_ones_say_so() {
        for method in Method::ALL {
            assert_eq!(method.name().parse(), Ok(method));
        }
        assert_eq!("vatc".parse::<Method>(), Err(MethodError::NotInThisVersion("vatc")));
        assert_eq!("Vanilla".parse::<Method>(), Err(MethodError::Unknown("Vanilla".to_owned())));
    }

    #[test]
    fn every_method_places_the_rt_vcpu_and_only_partitioned_threads_napi() {
        for method in Method::ALL {
            assert!(method.has(RuleId::VcpuPlace) && method.has(RuleId::VnicPlace));
            assert_eq!(method.has(RuleId::NapiThreaded), method == Method::Partitioned);
        }
    }
}
