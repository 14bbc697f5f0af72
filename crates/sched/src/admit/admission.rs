//! Admission: which of the declared reservations hold on this host, for the VMs that run now, and which leases. Pure.
//!
//! In: the configuration, the tenants, the CPUs online, what held before. Out: the admitted vCPUs, with what the
//! planner needs, and the refused VMs with the reason. A VM is admitted whole or not at all. An admitted VM stays
//! admitted whatever other VMs come or go, and its vCPUs stay on their CPUs while their affinity allows that. Among new
//! VMs the one that started first has precedence. An admitted lease stays admitted as well; a new one comes after all
//! VMs.
//!
//! The reserve is kept on *each* CPU, not of all together: a kernel thread that is bound to a CPU cannot run elsewhere.
//! The planner sees the reserve as one more vCPU, pinned there, without a thread.

use std::collections::{BTreeMap, BTreeSet};

use ontime_plan::Bandwidth;
use ontime_tenants::{Class, ClassSource, CpuSet, Kind, Namer, Tenant, ThreadId, ThreadRole};

use crate::admit::candidate::{Candidate, Had, Wanted, affinity, refuse_unpinned, refuse_vcpusched};
use crate::admit::distribution::distribute;
use crate::admit::fit::fit;
use crate::admit::lease::leased;
use crate::admit::offer::Offer;
use crate::admit::pacing::Source;
use crate::admit::request::{self, Ask, Asks};
use crate::admit::reservations::{LeaseState, Present, Refused, Reservations, Reserved, Unfit};
use crate::beside::Beside;
use crate::config::SchedConfig;
use crate::lease::Lease;
use crate::model::{BackendKind, Share};

/// Decides which reservations hold. If a guest's request does not fit, its VM is admitted with the declared
/// reservation, and is also listed as refused.
pub fn admit(
    config: &SchedConfig,
    tenants: &[Tenant],
    online: &CpuSet,
    before: &Reservations,
    asks: &Asks,
) -> Reservations {
    let mut reservations = admit_by(admit_at_once, config, tenants, online, before, asks);
    distribute(&mut reservations, before);
    reservations
}

/// A way to admit all at once; false if it could not.
type Shortcut = fn(&mut Reservations, &[Result<Wanted<'_>, String>]) -> bool;

/// What is admitted as a whole.
enum Entry<'a> {
    /// A VM with reservations in sched.toml.
    Declared(&'a Tenant),
    /// A lease, and the tenants that it is for.
    Leased(&'a Lease, Vec<&'a Tenant>),
}

fn admit_by<'a>(
    shortcut: Shortcut,
    config: &'a SchedConfig,
    tenants: &'a [Tenant],
    online: &CpuSet,
    before: &Reservations,
    asks: &Asks,
) -> Reservations {
    let cpus = config.cpus_of(online);
    let place = |cpu: u32| (0..).zip(&cpus).find(|(_, one)| **one == cpu).map(|(at, _)| at);
    let had = |vcpu: &Reserved| Had { home: before.cpu(vcpu).and_then(place), period: vcpu.period };
    let held: BTreeMap<ThreadId, Had> = before.vcpus.iter().map(|vcpu| (vcpu.id, had(vcpu))).collect();
    // Only a new lease has to leave what [`SchedConfig::beside_leases`] says. VMs, and leases that were admitted beside
    // less, stay.
    let beside = Beside { reserve: config.reserve, watcher: Bandwidth::ZERO };
    let beside_of = |is_new_lease: bool| if is_new_lease { config.beside_leases() } else { beside };
    let is_new_lease = |entry: &Entry<'_>| matches!(entry, Entry::Leased(lease, _) if !lease.admitted);
    let pacing = config.backend.pacing();
    let mut reservations = Reservations { cpus, beside, pacing, ..Reservations::default() };
    // A container has no vCPUs, and a pod's user chooses its name.
    let may_have =
        |tenant: &&Tenant| tenant.class != Class::Bulk && tenant.kind != Kind::Container && config.is_for(tenant);
    let mut names: BTreeMap<&str, usize> = BTreeMap::new();
    for tenant in tenants.iter().filter(may_have) {
        *names.entry(&tenant.name).or_default() += 1;
    }
    // Any user may start a process with any name. So the name of an RT tenant that may have the reservation never means
    // another user's tenant, nor one of class bulk.
    let means =
        |tenant: &&Tenant| config.names(&tenant.name) && (may_have(tenant) || !names.contains_key(&*tenant.name));
    let is_new = |tenant: &Tenant| !tenant.threads.iter().any(|thread| held.contains_key(&thread.id));
    let mut entries: Vec<Entry<'a>> = tenants.iter().filter(means).map(Entry::Declared).collect();
    entries.extend(config.leases.iter().map(|lease| Entry::Leased(lease, tenants_of(lease, tenants))));
    let nothing = Ask::default();
    let ask = |tenant: &Tenant| asks.get(&tenant.name).unwrap_or(&nothing);
    let cpus = reservations.cpus.clone();
    let declared = |tenant: &'a Tenant, ask: &Ask| {
        if names.get(tenant.name.as_str()).is_some_and(|count| *count > 1) {
            return Err("several tenants have this name; give them different names".to_owned());
        }
        let candidates = candidates(config, tenant, &cpus, &held, ask)?;
        Ok(Wanted { candidates, sources: &[Source::Unreserved], ..Wanted::default() })
    };
    let leased = |lease: &Lease, tenants: &[&'a Tenant]| leased(config, lease, tenants, &cpus, &held);
    let want = |entry: Entry<'a>| {
        let wanted = match &entry {
            Entry::Declared(tenant) => declared(tenant, ask(tenant)),
            Entry::Leased(lease, tenants) => leased(lease, tenants),
        };
        (entry, wanted)
    };
    let mut all: Vec<(Entry<'a>, Result<Wanted<'a>, String>)> = entries.into_iter().map(want).collect();
    all.sort_by_key(|(entry, wanted)| match entry {
        Entry::Declared(tenant) => (is_new(tenant), false, tenant.process.start_time, tenant.process.pid),
        Entry::Leased(lease, _) => {
            (!lease.admitted, true, u64::from(wanted.as_ref().is_ok_and(|wanted| wanted.is_new)), 0)
        }
    });
    let (entries, wanted): (Vec<_>, Vec<_>) = all.into_iter().unzip();
    reservations.beside = beside_of(entries.iter().any(is_new_lease));
    let all_admitted = shortcut(&mut reservations, &wanted);
    for (entry, wanted) in entries.iter().zip(wanted) {
        reservations.beside = beside_of(is_new_lease(entry));
        match entry {
            Entry::Declared(_) if all_admitted => {}
            Entry::Declared(tenant) => {
                let mut admitted = wanted.and_then(|wanted| admit_whole(&mut reservations, wanted));
                if let (Err(why), false) = (&mut admitted, ask(tenant).needs.is_empty()) {
                    let without = declared(tenant, &nothing);
                    *why = match without.and_then(|wanted| admit_whole(&mut reservations, wanted)) {
                        Ok(()) => format!("its guest's deadline tasks: {why}"),
                        Err(declared) => declared,
                    };
                }
                if let Err(why) = admitted {
                    reservations.refused.push(Refused { tenant: tenant.name.clone(), why });
                }
            }
            Entry::Leased(lease, tenants) => {
                let mut admit = |wanted: Result<Wanted<'_>, String>| -> Result<Option<String>, String> {
                    let wanted = wanted?;
                    let (why, left_out) = (wanted.why.clone(), wanted.left_out.clone());
                    if !all_admitted {
                        admit_whole(&mut reservations, wanted)?;
                    }
                    let tenant = format!("reservation {}", lease.name);
                    reservations.refused.extend(left_out.map(|why| Refused { tenant, why }));
                    Ok(why)
                };
                // What does not fit with its vCPUs on their CPUs, or with their pacers' time, may fit without them.
                let admitted = admit(wanted).or_else(|why: String| match admit(leased(lease, &[])) {
                    Ok(_) if !tenants.is_empty() => Ok(Some(why)),
                    _ => Err(why),
                });
                let state = LeaseState { held: admitted.is_ok(), why: admitted.unwrap_or_else(Some) };
                if let Some(why) = state.why.clone() {
                    reservations.refused.push(Refused { tenant: format!("reservation {}", lease.name), why });
                }
                reservations.leases.insert(lease.name.clone(), state);
            }
        }
    }
    reservations.beside = beside;
    reservations
}

/// The tenants that a lease is for. A tenant's class says so, which only the system's names decide.
fn tenants_of<'a>(lease: &Lease, tenants: &'a [Tenant]) -> Vec<&'a Tenant> {
    let is_its = |tenant: &&Tenant| match &tenant.class_source {
        ClassSource::Reservation { name, .. } => *name == lease.name,
        _ => false,
    };
    tenants.iter().filter(is_its).collect()
}

fn candidates<'a>(
    config: &SchedConfig,
    tenant: &'a Tenant,
    cpus: &[u32],
    held: &BTreeMap<ThreadId, Had>,
    ask: &Ask,
) -> Result<Vec<Candidate<'a>>, String> {
    if tenant.class == Class::Bulk {
        // The class decides who may have reserved time, because its rules know who chose the VM's name.
        return Err(
            "it is of class bulk; reservations are for class rt: say so in tenants.toml or its metadata".to_owned()
        );
    }
    // Back end `deadline` does not read published deadlines.
    let reads = config.backend != BackendKind::Deadline;
    let page = ask.page.as_ref().filter(|_| reads);
    let published = page.is_some() || reads && ask.published;
    let mut candidates = Vec::new();
    let of_its_name = || config.reservations.iter().filter(|declared| declared.name == tenant.name);
    if !config.is_for(tenant) {
        return Err(not_for(tenant, of_its_name().find_map(|declared| declared.user)));
    }
    for declared in of_its_name().filter(|declared| declared.is_for(tenant)) {
        let mut found = BTreeSet::new();
        for thread in &tenant.threads {
            let ThreadRole::Vcpu(number) = thread.role else { continue };
            if declared.vcpus.as_ref().is_some_and(|only| !only.contains(&number)) {
                continue;
            }
            refuse_vcpusched(number, thread)?;
            refuse_unpinned(config.backend, number, thread)?;
            found.insert(number);
            let affinity = affinity(number, thread, cpus)?;
            let had = held.get(&thread.id).and_then(|had| had.home);
            let mut one = Candidate {
                tenant,
                id: thread.id,
                vcpu: number,
                bandwidth: declared.bandwidth,
                period: declared.period,
                guest: None,
                page: None,
                offer: None,
                leased: false,
                home: had.filter(|home| affinity.as_ref().is_some_and(|cpus| cpus.contains(home))),
                affinity,
            };
            let need = ask.needs.iter().find(|need| need.vcpu == number);
            if let (Some(taking), Some(most), Some(page)) = (&ask.taking, declared.deadlines, page) {
                // The guest may begin to publish when it claims from its offer.
                one.page = Some(page.clone());
                let share = Share { bandwidth: one.bandwidth, period: one.period.0 };
                let offer = Offer::new(taking.ledger.clone(), share, most, declared.deadline_period);
                one.offer = Some(offer).filter(|offer| need.is_none_or(|need| need.period.0 >= offer.offered.period));
            }
            if let Some(need) = need {
                let most = declared.deadlines.ok_or(
                    "its [[reservation]] in sched.toml has no `deadlines`: set the share of a CPU that they may have",
                )?;
                let (more, period) = request::bandwidth(need, published).ok_or_else(|| {
                    format!(
                        "vCPU {number} would need more than a CPU for {} in {}; ask for less runtime or a longer \
                         period in the guest",
                        need.budget, need.period
                    )
                })?;
                if more > most {
                    return Err(format!(
                        "vCPU {number} needs {more} of a CPU for {} in {}, and `deadlines` in sched.toml allows it \
                         {most}; raise that, or ask for less in the guest",
                        need.budget, need.period
                    ));
                }
                if need.period < declared.deadline_period {
                    return Err(format!(
                        "vCPU {number} asks for a period of {}, and `deadline-period` in sched.toml allows {} at the \
                         least; lower that, or ask for a longer period in the guest",
                        need.period, declared.deadline_period
                    ));
                }
                one.bandwidth = one.bandwidth + more;
                one.period = one.period.min(period);
                one.guest = Some(*need);
                one.page = page.cloned();
            }
            candidates.push(one);
        }
        if let Some(missing) = declared.vcpus.iter().flatten().find(|number| !found.contains(number)) {
            return Err(format!("it has no vCPU {missing}; correct `vcpus` in sched.toml"));
        }
    }
    if let Some(need) = ask.needs.iter().find(|need| !candidates.iter().any(|one| one.vcpu == need.vcpu)) {
        return Err(format!(
            "vCPU {} has no reservation that its deadlines could be added to; name the vCPU in `vcpus` of a \
             [[reservation]] with `deadlines` in sched.toml",
            need.vcpu
        ));
    }
    if candidates.is_empty() {
        return Err("it has no vCPU threads that are known; see `ontime ps`".to_owned());
    }
    Ok(candidates)
}

/// Why a reservation of its name, for VMs of root and perhaps of another user, is not for this tenant.
fn not_for(tenant: &Tenant, user: Option<u32>) -> String {
    let and = user.map_or_else(String::new, |user| format!(" and user {user}"));
    match tenant.namer {
        Namer::User(by) => format!(
            "user {by} named it, and its [[reservation]] in sched.toml is for VMs of root{and}; set `user = {by}` \
             there, or rename the VM"
        ),
        Namer::Container => format!(
            "it was named in a container, and its [[reservation]] in sched.toml is for VMs of root{and}; request \
             the time for its pod or cgroup, or rename the VM"
        ),
    }
}

/// Admits all at once, if no home CPU has to be chosen and all fit. The result is the same as admitting one after the
/// other, because each part of a fitting set fits too (the pacers' time of leases perhaps one pass later, if a VM of
/// sched.toml is new). But that takes longer by the number of entries, for each request of a guest.
fn admit_at_once(reservations: &mut Reservations, all: &[Result<Wanted<'_>, String>]) -> bool {
    if all.is_empty() {
        return true;
    }
    let (mut vcpus, mut wishes, mut kept) = (Vec::new(), Vec::new(), Vec::new());
    for wanted in all {
        let Ok(wanted) = wanted else { return false };
        for one in &wanted.candidates {
            if one.affinity.is_some() && one.home.is_none() {
                return false;
            }
            wishes.push(one.home.map(|home| BTreeSet::from([home])));
            vcpus.push(one.reserved());
        }
        kept.extend_from_slice(&wanted.kept);
    }
    let is_asked = |source: &Source| all.iter().flatten().any(|wanted| wanted.sources.contains(source));
    let sources: Vec<Source> = [Source::Unreserved, Source::Reserve].into_iter().filter(is_asked).collect();
    let fit = fit(reservations, &vcpus, &wishes, &kept, &sources, Present::default());
    let Ok(admitted) = fit else { return false };
    reservations.set_admitted(vcpus, kept, admitted);
    true
}

fn admit_whole(reservations: &mut Reservations, wanted: Wanted<'_>) -> Result<(), String> {
    let mut all = reservations.vcpus.clone();
    // A home CPU is kept: a move would do no harm to the vCPU's guarantee, but to its caches, and to vCPUs whose home
    // is the other CPU.
    let only = |home: u32| BTreeSet::from([home]);
    let mut stay: Vec<Option<BTreeSet<u32>>> = reservations.vcpus.iter().map(|vcpu| vcpu.home.map(only)).collect();
    let mut free = stay.clone();
    for one in wanted.candidates {
        all.push(one.reserved());
        stay.push(one.home.map(only).or_else(|| one.affinity.clone()));
        free.push(one.affinity);
    }
    let kept = [reservations.kept.as_slice(), &wanted.kept].concat();
    let present = Present { vcpus: reservations.vcpus.len(), kept: reservations.kept.len() };
    let fit = |wishes: &[_]| fit(reservations, &all, wishes, &kept, wanted.sources, present);
    let mut admitted = fit(&stay).or_else(|_| fit(&free));
    // The CPU that suits the bandwidths best may have no time for more windows. Each turn leaves out one CPU more.
    while let Err(Unfit { cpu: Some(cpu), .. }) = admitted {
        let new = free.iter_mut().skip(reservations.vcpus.len()).flatten();
        if new.fold(0, |left_out, cpus| left_out + usize::from(cpus.len() > 1 && cpus.remove(&cpu))) == 0 {
            break;
        }
        admitted = fit(&free);
    }
    reservations.set_admitted(all, kept, admitted.map_err(|unfit| unfit.why)?);
    Ok(())
}

#[cfg(test)]
#[path = "admission_tests.rs"]
mod tests;
