//! Settings that the kernel refuses, by cause: a cgroup without real-time budget, a cpuset, a read-only parameter.

use std::collections::BTreeMap;

use super::{Check, State};
use crate::knob::Obstacle;
use crate::rule::RuleId;
use crate::rules::rule;

/// One row for all rules, because many settings have the same cause.
pub(super) fn check(obstacles: &[(RuleId, Obstacle)]) -> Check {
    let (id, title) = ("refusals", "settings that the kernel refuses");
    let mut causes: BTreeMap<&str, (&Obstacle, BTreeMap<RuleId, usize>)> = BTreeMap::new();
    for (rule, obstacle) in obstacles {
        let (_, rules) = causes.entry(&obstacle.cause).or_insert_with(|| (obstacle, BTreeMap::new()));
        *rules.entry(*rule).or_default() += 1;
    }
    if causes.is_empty() {
        return Check::new(id, title, State::Ok, "it refuses no setting that is missing");
    }
    let places =
        |rule: &RuleId| matches!(rule, RuleId::VcpuPlace | RuleId::VnicPlace | RuleId::IrqThread | RuleId::NapiThread);
    let state = if obstacles.iter().any(|(rule, _)| places(rule)) { State::Critical } else { State::Warning };
    let delays = obstacles.iter().filter_map(|(id, _)| Some(rule(*id)?.cost.delay_us));
    let delay_us = delays.max().unwrap_or_default();
    let found = causes.values().map(|(obstacle, rules)| {
        let rules: Vec<String> = rules.iter().map(|(rule, count)| format!("{rule} {count}")).collect();
        format!("{} (settings by rule: {})", obstacle.cause, rules.join(", "))
    });
    let remedies = causes.values().map(|(obstacle, rules)| {
        let left_out: Vec<String> = rules.keys().map(|rule| format!("\"{rule}\"")).collect();
        match obstacle.lasting {
            true => format!(
                "{}; or accept it: without = [{}] in /etc/ontime/host.toml",
                obstacle.remedy,
                left_out.join(", ")
            ),
            false => obstacle.remedy.clone(),
        }
    });
    Check::new(id, title, state, found.collect::<Vec<_>>().join("; "))
        .costs(delay_us, "as the rows of these rules say", "")
        .remedy(remedies.collect::<Vec<_>>().join("; "))
}
