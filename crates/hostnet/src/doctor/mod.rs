//! The checks behind `ontime doctor`: what on this host makes RT packets late, what it costs, what to do about it.
//!
//! In: facts, intent, what discovery has to say, the host (read only), what was tried out ([`Probes`]). Out: a
//! [`Diagnosis`] of [`Check`]s, in the order of the table.

mod hardware;
mod interrupts;
mod numa;
mod refusals;
mod rule_state;
mod upkeep;
mod vmm;

use std::collections::BTreeMap;

use ontime_tenants::{Problem, ThreadId};
use serde::Serialize;

use crate::intent::Intent;
use crate::inventory::{Inventory, Note};
use crate::knob::Host;
use crate::kvm::KvmProbe;
use crate::method::Method;
use crate::placement::ByNode;
use crate::rules::RULES;
use crate::smi::SmiCount;

/// How a check came out. Ordered from best to worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// As it should be.
    Ok,
    /// Could not be found out.
    Unknown,
    /// RT packets wait longer than they must.
    Warning,
    /// The class guarantee does not hold.
    Critical,
}

impl State {
    /// The exit status of `ontime doctor`: 0 ok, 1 warning, 2 critical, 3 unknown.
    pub fn exit_code(self) -> u8 {
        match self {
            State::Ok => 0,
            State::Warning => 1,
            State::Critical => 2,
            State::Unknown => 3,
        }
    }
}

/// Knobs that a daemon tried to set and could not, as they are shown, and why.
pub type Refused = BTreeMap<String, String>;

/// One check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Its name, stable: a rule's name, or `kernel`, `preempt-rt`, `kvm`, ...
    pub id: String,
    /// What is checked, in a line.
    pub title: String,
    /// How it came out.
    pub state: State,
    /// What was found.
    pub found: String,
    /// What it costs where it is not ok, with figures; empty where there is none.
    pub cost: String,
    /// Where the figures are from: kernel, clock. Empty where there are none.
    pub cost_source: String,
    /// What to do; empty where there is nothing to do.
    pub remedy: String,
    /// Whether `ontime` can do it, as far as is known: not where a daemon tried all that is missing and could not.
    pub ontime_can_apply: bool,
}

impl Check {
    fn new(id: &str, title: &str, state: State, found: impl Into<String>) -> Self {
        Self {
            id: id.to_owned(),
            title: title.to_owned(),
            state,
            found: found.into(),
            cost: String::new(),
            cost_source: String::new(),
            remedy: String::new(),
            ontime_can_apply: false,
        }
    }

    fn costs(mut self, text: &str, source: &str) -> Self {
        text.clone_into(&mut self.cost);
        source.clone_into(&mut self.cost_source);
        self
    }

    fn remedy(mut self, text: impl Into<String>) -> Self {
        self.remedy = text.into();
        self
    }
}

/// What `ontime doctor` shows.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Diagnosis {
    /// The kernel.
    pub kernel: String,
    /// The worst state of all checks that count: unknown SMIs do not where this host is a guest.
    pub state: State,
    /// The checks.
    pub checks: Vec<Check>,
    /// Facts that could not be read.
    pub notes: Vec<Note>,
}

/// What takes time, or is read of tenants' processes, and so is looked at before the examination.
#[derive(Debug, Clone)]
pub struct Probes {
    /// Whether KVM runs a guest.
    pub kvm: KvmProbe,
    /// How many system management interrupts came.
    pub smi: SmiCount,
    /// Where RT tenants' memory lies, by their processes.
    pub memory: BTreeMap<ThreadId, Result<ByNode, String>>,
}

impl From<KvmProbe> for Probes {
    /// KVM's alone.
    fn from(kvm: KvmProbe) -> Self {
        Self { kvm, smi: SmiCount::Unknown("they were not counted".to_owned()), memory: BTreeMap::new() }
    }
}

/// Examines the host. Changes nothing; with the probes made before, it takes some milliseconds.
///
/// Every rule of the table is checked, whatever the intent's method, as method `partitioned` would have it; under
/// `busypoll`, which is that and polling, as it does: what polls by it is no fault.
pub fn examine(
    host: &dyn Host,
    inventory: &Inventory,
    intent: &Intent,
    problems: &[Problem],
    refused: &Refused,
    probes: &Probes,
) -> Diagnosis {
    let kvm = hardware::kvm(inventory, &probes.kvm);
    let mut checks = vec![hardware::kernel(inventory), hardware::preempt_rt(inventory), kvm];
    let method = if intent.method == Method::Busypoll { Method::Busypoll } else { Method::Partitioned };
    let everything = Intent { method, ..intent.clone() };
    let mut obstacles = Vec::new();
    for rule in RULES.iter().filter(|rule| everything.method.has(rule.id)) {
        let (check, found) = rule_state::check(host, inventory, &everything, refused, rule);
        checks.push(check);
        obstacles.extend(found.into_iter().map(|obstacle| (rule.id, obstacle)));
    }
    checks.push(refusals::check(&obstacles));
    checks.push(hardware::idle_states(inventory));
    checks.push(hardware::governor(inventory));
    checks.push(hardware::clocksource(inventory));
    checks.push(hardware::smt(inventory));
    checks.push(upkeep::isolation(inventory, intent));
    checks.push(numa::check(inventory, intent, &probes.memory));
    checks.push(interrupts::smi(&probes.smi));
    checks.push(interrupts::irq_cpus(inventory, intent));
    checks.push(upkeep::periodic(inventory));
    checks.push(hardware::guest_memory(inventory));
    checks.push(upkeep::swap(inventory, intent));
    checks.push(vmm::settings(problems));
    checks.push(hardware::kvm_upkeep(inventory));
    checks.push(hardware::pressure(inventory));
    checks.push(hardware::lockdown(inventory));
    checks.push(hardware::conflicts(inventory, intent));
    // What no guest can know about its host is no lack of this host's.
    let counts = |check: &&Check| check.id != "smi" || !inventory.kernel.hypervisor || check.state != State::Unknown;
    let state = checks.iter().filter(counts).map(|check| check.state).max().unwrap_or(State::Ok);
    Diagnosis { kernel: inventory.kernel.release.clone(), state, checks, notes: inventory.notes.clone() }
}
