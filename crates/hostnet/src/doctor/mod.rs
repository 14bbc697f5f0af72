//! The checks of `ontime doctor`: what on this host delays RT packets, the cost, and the remedy.
//!
//! In: facts, intent, discovery's problems, the host (read only), and results of tests ([`Probes`]). Out: a
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
use serde::{Serialize, Serializer};

use crate::intent::Intent;
use crate::inventory::{Inventory, Note};
use crate::knob::Host;
use crate::kvm::KvmProbe;
use crate::method::Method;
use crate::placement::ByNode;
use crate::rules::RULES;
use crate::smi::SmiCount;

/// Result of a check, ordered from best to worst.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// As it should be.
    Ok,
    /// The check could not be made.
    Unknown,
    /// RT packets wait longer than necessary.
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

/// Knobs that a daemon failed to set, by their text, with the reason.
pub type Refused = BTreeMap<String, String>;

/// A delay without a limit: a guest that does not start.
pub const ENDLESS: u32 = u32::MAX;

fn finite<S: Serializer>(delay_us: &u32, serializer: S) -> Result<S::Ok, S::Error> {
    Some(*delay_us).filter(|us| *us != ENDLESS).serialize(serializer)
}

/// One question to the host, and its answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Check {
    /// Stable name: a rule's name, or `kernel`, `preempt-rt`, `kvm`, ...
    pub id: String,
    /// The subject of the check, in one line.
    pub title: String,
    /// How bad the answer is.
    pub state: State,
    /// What was found on this host, with names and values.
    pub found: String,
    /// How late a packet may be if the result is not ok, us: the largest latency in `cost`, or an estimate if it has
    /// none. Findings are ranked by it. [`ENDLESS`] is null in JSON.
    #[serde(serialize_with = "finite")]
    pub delay_us: u32,
    /// The cost if the result is not ok, with figures; otherwise empty.
    pub cost: String,
    /// Source of the figures: kernel, clock. Empty if there are none.
    pub cost_source: String,
    /// The remedy; empty if none is needed.
    pub remedy: String,
    /// Whether `ontime` can apply the remedy, as far as known. False if a daemon has tried everything that is missing
    /// and failed.
    pub ontime_can_apply: bool,
}

impl Check {
    fn new(id: &str, title: &str, state: State, found: impl Into<String>) -> Self {
        Self {
            id: id.to_owned(),
            title: title.to_owned(),
            state,
            found: found.into(),
            delay_us: 0,
            cost: String::new(),
            cost_source: String::new(),
            remedy: String::new(),
            ontime_can_apply: false,
        }
    }

    fn costs(mut self, delay_us: u32, text: &str, source: &str) -> Self {
        self.delay_us = delay_us;
        text.clone_into(&mut self.cost);
        source.clone_into(&mut self.cost_source);
        self
    }

    fn remedy(mut self, text: impl Into<String>) -> Self {
        self.remedy = text.into();
        self
    }
}

/// The output of `ontime doctor`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Diagnosis {
    /// `uname -r`.
    pub kernel: String,
    /// The worst state of all checks that count. Unknown SMIs do not count on a host that is itself a guest.
    pub state: State,
    /// One for each check that was made.
    pub checks: Vec<Check>,
    /// Facts that could not be read.
    pub notes: Vec<Note>,
}

/// Tests that take time, and data of tenants' processes, which are collected before the examination.
#[derive(Debug, Clone)]
pub struct Probes {
    /// Whether KVM can run a guest.
    pub kvm: KvmProbe,
    /// Number of system management interrupts.
    pub smi: SmiCount,
    /// Location of RT tenants' memory, by process.
    pub memory: BTreeMap<ThreadId, Result<ByNode, String>>,
}

impl From<KvmProbe> for Probes {
    /// Only KVM's test.
    fn from(kvm: KvmProbe) -> Self {
        Self { kvm, smi: SmiCount::Unknown("they were not counted".to_owned()), memory: BTreeMap::new() }
    }
}

impl Diagnosis {
    /// For a process that could not see all tenants: a rule that planned nothing may have missed some, so its check is
    /// not ok but unknown.
    pub fn doubt_absence(&mut self) {
        // Root is not told to become root.
        let remedy = match rustix::process::geteuid().is_root() {
            true => "remove what hides tenants from root: standard error names it after `not seen:`",
            false => "run this as root",
        };
        for check in &mut self.checks {
            if check.state == State::Ok && check.found == rule_state::NOTHING {
                check.state = State::Unknown;
                "nothing to set for what could be seen; not all tenants could be seen".clone_into(&mut check.found);
                remedy.clone_into(&mut check.remedy);
                let rule = RULES.iter().find(|rule| rule.id.name() == check.id);
                check.delay_us = rule.map_or(0, |rule| rule.cost.delay_us);
            }
        }
        self.state = self.state.max(State::Unknown);
    }
}

/// Examines the host and changes nothing. With the probes already made, it takes some milliseconds.
///
/// Every rule of the table is checked as under method `partitioned`, whatever the intent's method. Only `busypoll`,
/// which is `partitioned` with polling, is checked as `busypoll`, so that its polling threads are not a fault. Of the
/// rules that only the intent's method has, the obstacles are reported.
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
    for rule in RULES.iter().filter(|rule| intent.method.has(rule.id) && !everything.method.has(rule.id)) {
        let (_, found) = rule_state::check(host, inventory, intent, refused, rule);
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
    checks.push(hardware::budget_timer(inventory, intent));
    checks.push(hardware::lockdown(inventory));
    checks.push(hardware::conflicts(inventory, intent));
    // A guest cannot read its host's SMIs, so that is not a fault of this host.
    let counts = |check: &&Check| check.id != "smi" || !inventory.kernel.hypervisor || check.state != State::Unknown;
    let state = checks.iter().filter(counts).map(|check| check.state).max().unwrap_or(State::Ok);
    Diagnosis { kernel: inventory.kernel.release.clone(), state, checks, notes: inventory.notes.clone() }
}
