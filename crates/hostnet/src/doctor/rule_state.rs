//! The state of one rule on this host: its planned values compared with the knobs' values.

use std::collections::BTreeSet;

use ontime_tenants::text::counted;

use super::{Check, Refused, State};
use crate::intent::Intent;
use crate::inventory::Inventory;
use crate::knob::Obstacle;
use crate::knob::{Host, KnobError};
use crate::rule::{Finding, Refusal, Rule, RuleId, Severity};

/// What a check found whose rule plans no setting.
pub(super) const NOTHING: &str = "nothing on this host to set";

/// Number of differing knobs that are named; the rest is counted.
const NAMED: usize = 3;

#[derive(Default)]
struct Comparison {
    as_wanted: usize,
    differing: Vec<String>,
    /// Number of differing knobs that a daemon failed to set, or that have an obstacle.
    refused: usize,
    obstacles: Vec<Obstacle>,
    unreadable: Vec<String>,
}

/// The check, and the obstacles to the missing settings.
pub(super) fn check(
    host: &dyn Host,
    inventory: &Inventory,
    intent: &Intent,
    refused: &Refused,
    rule: &Rule,
) -> (Check, Vec<Obstacle>) {
    let outcome = (rule.plan)(inventory, intent);
    let mut comparison = Comparison::default();
    for setting in &outcome.settings {
        match host.read(&setting.knob) {
            // The component to which the knob was handed on changes it.
            Ok(_) if setting.handed_on => comparison.as_wanted += 1,
            Ok(found) if found == setting.value => comparison.as_wanted += 1,
            Ok(found) => {
                let mut told = format!("{}: {found}, wanted {}", setting.knob, setting.value);
                if let Some(why) = refused.get(&setting.knob.to_string()) {
                    comparison.refused += 1;
                    told.push_str(&format!(", which the daemon could not set: {why}"));
                } else if let Some(obstacle) = host.foresee(&setting.knob, &setting.value) {
                    comparison.refused += 1;
                    told.push_str(&format!(", which cannot be set: {}", obstacle.cause));
                }
                comparison.obstacles.extend(host.foresee(&setting.knob, &setting.value));
                comparison.differing.push(told);
            }
            // An object that ended since the inventory needs no setting, and a knob that this kernel lacks cannot be
            // set.
            Err(KnobError::Gone(_) | KnobError::Unsupported { .. }) => {}
            Err(error) => comparison.unreadable.push(error.to_string()),
        }
    }
    let unthreaded = if rule.id == RuleId::NapiThread { without_thread(inventory) } else { 0 };
    let mut found = describe(&comparison);
    if unthreaded > 0 {
        let (these, have) = (counted(unthreaded, "NAPI instance"), if unthreaded == 1 { "has" } else { "have" });
        found.push(format!("{these} {have} no thread to place: see napi-threaded"));
    }
    found.extend(outcome.findings.iter().map(|finding| format!("{}: {}", finding.object, finding.found)));
    let mut state = worst(&comparison, &outcome.findings, differing_state(rule.id, intent));
    if unthreaded > 0 {
        state = state.max(State::Warning);
    }
    let mut check = Check::new(rule.id.name(), rule.title, state, found.join("; "));
    check.ontime_can_apply = comparison.differing.len() > comparison.refused;
    if state != State::Ok {
        check = check.costs(rule.cost.delay_us, rule.cost.text, rule.cost.source).remedy(remedies(
            &comparison,
            unthreaded,
            rule,
            &outcome.findings,
        ));
    }
    (check, comparison.obstacles)
}

/// If one of the first two rules is not applied, the guarantee itself does not hold, once there is an RT tenant.
fn differing_state(rule: RuleId, intent: &Intent) -> State {
    let at_stake = intent.rt_tenants().next().is_some();
    match rule {
        RuleId::NapiThreaded | RuleId::IrqThread if at_stake => State::Critical,
        _ => State::Warning,
    }
}

fn worst(comparison: &Comparison, findings: &[Finding], differing: State) -> State {
    let mut state = State::Ok;
    if !comparison.unreadable.is_empty() {
        state = State::Unknown;
    }
    if !comparison.differing.is_empty() {
        state = state.max(differing);
    }
    findings.iter().fold(state, |state, finding| state.max(state_of(finding)))
}

fn state_of(finding: &Finding) -> State {
    match (finding.severity, finding.refusal) {
        (Severity::Info, _) => State::Ok,
        (_, Some(Refusal::Unreadable)) => State::Unknown,
        (Severity::Warning, _) => State::Warning,
        (Severity::Critical, _) => State::Critical,
    }
}

fn describe(comparison: &Comparison) -> Vec<String> {
    let total = comparison.as_wanted + comparison.differing.len() + comparison.unreadable.len();
    let mut found = Vec::new();
    if total == 0 {
        found.push(NOTHING.to_owned());
    } else if comparison.differing.is_empty() && comparison.unreadable.is_empty() {
        found.push(format!("{total} of {total} as wanted"));
    }
    if !comparison.differing.is_empty() {
        found.push(format!(
            "{} of {total} not as wanted ({})",
            comparison.differing.len(),
            named(&comparison.differing)
        ));
    }
    if !comparison.unreadable.is_empty() {
        found.push(format!("{} cannot be read ({})", comparison.unreadable.len(), named(&comparison.unreadable)));
    }
    found
}

fn named(all: &[String]) -> String {
    let first = all.iter().take(NAMED).cloned().collect::<Vec<_>>().join("; ");
    if all.len() > NAMED { format!("{first}; ...") } else { first }
}

fn without_thread(inventory: &Inventory) -> usize {
    inventory.nics.iter().flat_map(|nic| &nic.napis).filter(|napi| napi.pid.is_none()).count()
}

fn remedies(comparison: &Comparison, unthreaded: usize, rule: &Rule, findings: &[Finding]) -> String {
    let mut remedies: Vec<String> = Vec::new();
    // Ontime's own setting is not a remedy if Ontime cannot make it.
    if comparison.differing.len() > comparison.refused {
        remedies.push(rule.cure.to_owned());
    } else if comparison.obstacles.is_empty() && comparison.refused > 0 {
        remedies.push(format!("remove the cause that is named with each of them; the daemon then sets: {}", rule.cure));
    }
    remedies.extend(comparison.obstacles.iter().map(|obstacle| obstacle.remedy.clone()));
    let told = findings.iter().filter(|finding| finding.severity > Severity::Info);
    remedies.extend(told.map(|finding| finding.remedy.clone()));
    if !comparison.unreadable.is_empty() {
        remedies.push("remove the cause that is named with each knob that cannot be read, and look again".to_owned());
    }
    if unthreaded > 0 {
        remedies.push("see row napi-threaded: its remedy creates these threads".to_owned());
    }
    let mut known = BTreeSet::new();
    remedies.retain(|remedy| known.insert(remedy.clone()));
    remedies.join("; ")
}
