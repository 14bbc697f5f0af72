//! What the tenants of a lease get of it: each vCPU below its `count` has a part. What no vCPU has is kept. Pure.

use std::collections::{BTreeMap, BTreeSet};

use ontime_plan::Nanos;
use ontime_tenants::{Tenant, TenantThread, ThreadId, ThreadRole};

use crate::admit::candidate::{Candidate, Had, Wanted, affinity, refuse_unpinned, refuse_vcpusched};
use crate::admit::pacing::Source;
use crate::admit::reservations::Kept;
use crate::config::SchedConfig;
use crate::lease::Lease;

/// The vCPUs of these tenants that get a part, and what is kept. If a vCPU cannot have its part, no vCPU of its tenant
/// has one. Tenants that have a part already come first, then those that run for the longest.
///
/// # Errors
/// A CPU of the lease is not one for reservations.
pub(crate) fn leased<'a>(
    config: &SchedConfig,
    lease: &Lease,
    tenants: &[&'a Tenant],
    cpus: &[u32],
    held: &BTreeMap<ThreadId, Had>,
) -> Result<Wanted<'a>, String> {
    let homes = homes(lease, cpus)?;
    let mut wanted = Wanted::default();
    let has_part = |tenant: &Tenant| tenant.threads.iter().any(|thread| held.contains_key(&thread.id));
    let mut tenants = tenants.to_vec();
    tenants.sort_by_key(|tenant| (!has_part(tenant), tenant.process.start_time, tenant.process.pid));
    let mut left_out = Vec::new();
    for tenant in tenants {
        match candidates(config, lease, tenant, cpus, &homes, held, &wanted.candidates) {
            Ok(more) => wanted.candidates.extend(more),
            Err(why) => left_out.push(format!("{}: {why}", tenant.name)),
        }
    }
    let why = (!left_out.is_empty()).then(|| left_out.join("; "));
    if wanted.candidates.is_empty() {
        wanted.why = why;
    } else {
        wanted.left_out = why;
    }
    let kept = |(number, cpu): (u32, &Option<u32>)| {
        let has_thread = wanted.candidates.iter().any(|one| one.vcpu == number);
        (!has_thread).then(|| Kept { lease: lease.name.clone(), bandwidth: lease.bandwidth(), cpu: *cpu })
    };
    let kept = (0..).zip(&homes).filter_map(kept).collect();
    // Where a vCPU without a home pins itself, its home is chosen anew.
    let is_new = |one: &Candidate<'_>| {
        let was = |had: &Had| had.home == one.home && [one.period, Nanos::ZERO].contains(&had.period);
        let chooses = one.affinity.is_some() && one.home.is_none();
        chooses || !held.get(&one.id).is_some_and(was)
    };
    let is_new = wanted.candidates.iter().any(is_new);
    // A new one takes no time that the pacers of sched.toml's VMs need. One that holds its bandwidth keeps it.
    let sources: &[Source] = match (lease.admitted, wanted.candidates.is_empty()) {
        (false, false) => &[Source::Unreserved, Source::Reserve],
        (false, true) => &[Source::Unreserved],
        (true, false) => &[Source::Reserve],
        (true, true) => &[],
    };
    Ok(Wanted { kept, sources, is_new, ..wanted })
}

/// The CPU on which each vCPU of the lease stays, as an index of `cpus`.
fn homes(lease: &Lease, cpus: &[u32]) -> Result<Vec<Option<u32>>, String> {
    let place = |cpu: u32| {
        let place = (0..).zip(cpus).find(|(_, one)| **one == cpu).map(|(at, _)| Some(at));
        place.ok_or_else(|| {
            format!("CPU {cpu} is offline, or `cpus` in sched.toml leaves it out; ask for another CPU, or change that")
        })
    };
    match &lease.cpus {
        None => Ok((0..lease.count).map(|_| None).collect()),
        Some(pinned) => pinned.iter().map(|cpu| place(*cpu)).collect(),
    }
}

/// The vCPUs of a tenant beside those of `others`.
fn candidates<'a>(
    config: &SchedConfig,
    lease: &Lease,
    tenant: &'a Tenant,
    cpus: &[u32],
    homes: &[Option<u32>],
    held: &BTreeMap<ThreadId, Had>,
    others: &[Candidate<'a>],
) -> Result<Vec<Candidate<'a>>, String> {
    if config.is_for(tenant) {
        return Err("sched.toml has a [[reservation]] for it too; remove one of the two".to_owned());
    }
    let mut candidates: Vec<Candidate<'a>> = Vec::new();
    for thread in &tenant.threads {
        let ThreadRole::Vcpu(number) = thread.role else { continue };
        let Some(home) = homes.get(number as usize) else { continue };
        if others.iter().chain(&candidates).any(|one| one.vcpu == number) {
            return Err("another VM has the reservation; give each VM its own".to_owned());
        }
        refuse_vcpusched(number, thread)?;
        refuse_unpinned(config.backend, number, thread)?;
        let affinity = allowed(number, thread, cpus, *home)?;
        let had = held.get(&thread.id).and_then(|had| had.home);
        candidates.push(Candidate {
            tenant,
            id: thread.id,
            vcpu: number,
            bandwidth: lease.bandwidth(),
            period: lease.period,
            guest: None,
            page: None,
            offer: None,
            leased: true,
            home: home.or_else(|| had.filter(|had| affinity.as_ref().is_some_and(|cpus| cpus.contains(had)))),
            affinity,
        });
    }
    Ok(candidates)
}

/// The CPUs of a vCPU, which are the one of its reservation if that is pinned.
fn allowed(
    number: u32,
    thread: &TenantThread,
    cpus: &[u32],
    home: Option<u32>,
) -> Result<Option<BTreeSet<u32>>, String> {
    let allowed = affinity(number, thread, cpus)?;
    let Some(home) = home else { return Ok(allowed) };
    let only = BTreeSet::from([home]);
    if allowed.as_ref().is_some_and(|cpus| *cpus == only) || cpus.len() == 1 {
        return Ok(Some(only));
    }
    let cpu = cpus.get(home as usize).copied().unwrap_or(home);
    Err(format!(
        "vCPU {number} may run on CPUs {}, and its reservation is for CPU {cpu}; pin it there",
        thread.affinity
    ))
}
