//! Processors: which are there, and what makes them slow to answer.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use super::scan::{read, read_number};
use super::{Cpus, IdleState};
use crate::cpus::CpuSet;
use crate::live::Roots;

pub(super) fn scan(roots: &Roots) -> Cpus {
    let base = roots.sys.join("devices/system/cpu");
    let list = |name: &str| read(&base.join(name)).and_then(|text| CpuSet::from_list(&text).ok()).unwrap_or_default();
    let online = list("online");
    Cpus {
        smt_active: read(&base.join("smt/active")).map(|text| text == "1"),
        idle_states: idle_states(&base, &online),
        dma_latency_us: dma_latency(roots),
        governors: governors(&base, &online),
        clocksource: read(&roots.sys.join("devices/system/clocksource/clocksource0/current_clocksource"))
            .unwrap_or_default(),
        isolated: list("isolated"),
        // The kernel writes "(null)" where none are.
        nohz_full: list("nohz_full"),
        online,
    }
}

/// States of the same name on several CPUs are one, with the longest latency seen.
fn idle_states(base: &Path, online: &CpuSet) -> Vec<IdleState> {
    let mut states: BTreeMap<(u32, String), (u64, Vec<u32>)> = BTreeMap::new();
    for cpu in online.iter() {
        let Ok(entries) = fs::read_dir(base.join(format!("cpu{cpu}/cpuidle"))) else { continue };
        for path in entries.filter_map(Result::ok).map(|entry| entry.path()) {
            let Some(number) = path.file_name().and_then(|name| name.to_str()?.strip_prefix("state")?.parse().ok())
            else {
                continue;
            };
            let name = read(&path.join("name")).unwrap_or_default();
            let latency: u64 = read_number(&path.join("latency")).unwrap_or_default();
            let (longest, cpus) = states.entry((number, name)).or_default();
            *longest = latency.max(*longest);
            if read(&path.join("disable")).as_deref() == Some("0") {
                cpus.push(cpu);
            }
        }
    }
    let state = |((_, name), (latency_us, cpus)): (_, (u64, Vec<u32>))| IdleState {
        name,
        latency_us,
        enabled_on: cpus.into_iter().collect(),
    };
    states.into_iter().map(state).collect()
}

fn governors(base: &Path, online: &CpuSet) -> BTreeMap<String, CpuSet> {
    let mut by_name: BTreeMap<String, Vec<u32>> = BTreeMap::new();
    for cpu in online.iter() {
        if let Some(name) = read(&base.join(format!("cpu{cpu}/cpufreq/scaling_governor"))) {
            by_name.entry(name).or_default().push(cpu);
        }
    }
    by_name.into_iter().map(|(name, cpus)| (name, cpus.into_iter().collect())).collect()
}

/// Reading `/dev/cpu_dma_latency` gives the limit in force and asks for none (`kernel/power/qos.c`).
fn dma_latency(roots: &Roots) -> Option<i64> {
    let bytes = fs::read(roots.dev.join("cpu_dma_latency")).ok()?;
    let latency = i32::from_ne_bytes(*bytes.first_chunk()?);
    Some(i64::from(latency))
}
