//! Admission: which of the declared reservations hold on this host, for the VMs that run now. Pure.
//!
//! In: the configuration, the tenants, the CPUs online, what held before. Out: the admitted vCPUs, with what the
//! planner needs, and the refused VMs with the reason. A VM is admitted whole or not at all. An admitted VM stays
//! admitted whatever other VMs come or go, and its vCPUs stay on their CPUs while their affinity allows that. Among new
//! VMs the one that started first has precedence.
//!
//! The reserve is kept on *each* CPU, not of all together: a kernel thread that is bound to a CPU cannot run elsewhere.
//! The planner sees the reserve as one more vCPU, pinned there, without a thread.

use std::collections::{BTreeMap, BTreeSet};

use ontime_plan::{Bandwidth, Nanos};
use ontime_tenants::{Class, CpuList, Tenant, TenantThread, ThreadId, ThreadRole};

use crate::admit::distribution::distribute;
use crate::admit::fit::fit;
use crate::admit::offer::Offer;
use crate::admit::request::{self, Ask, Asks, GuestNeed};
use crate::admit::reservations::{Refused, Reservations, Reserved};
use crate::config::SchedConfig;
use crate::guest_page::Page;
use crate::model::{BackendKind, Share};

/// Decides which reservations hold. If a guest's request does not fit, its VM is admitted with the declared
/// reservation, and is also listed as refused.
pub fn admit(
    config: &SchedConfig,
    tenants: &[Tenant],
    online: &CpuList,
    before: &Reservations,
    asks: &Asks,
) -> Reservations {
    let mut reservations = admit_by(admit_at_once, config, tenants, online, before, asks);
    distribute(&mut reservations, before);
    reservations
}

/// A way to admit all at once; false if it could not.
type Shortcut = fn(&mut Reservations, Vec<(&Tenant, Result<Vec<Candidate>, String>)>) -> bool;

fn admit_by(
    shortcut: Shortcut,
    config: &SchedConfig,
    tenants: &[Tenant],
    online: &CpuList,
    before: &Reservations,
    asks: &Asks,
) -> Reservations {
    let cpus: Vec<u32> =
        online.iter().filter(|cpu| config.cpus.as_ref().is_none_or(|only| only.contains(*cpu))).collect();
    let place = |cpu: u32| (0..).zip(&cpus).find(|(_, one)| **one == cpu).map(|(at, _)| at);
    let held: BTreeMap<ThreadId, Option<u32>> =
        before.vcpus.iter().map(|vcpu| (vcpu.id, before.cpu(vcpu).and_then(place))).collect();
    let (reserve, pacing) = (config.reserve, config.backend.pacing());
    let mut reservations = Reservations { cpus, reserve, pacing, ..Reservations::default() };
    let is_rt = |tenant: &&Tenant| tenant.class != Class::Bulk;
    let mut names: BTreeMap<&str, usize> = BTreeMap::new();
    for tenant in tenants.iter().filter(is_rt) {
        *names.entry(&tenant.name).or_default() += 1;
    }
    // Any user may start a process with any name. So a name of an RT tenant never means a tenant of class bulk.
    let means = |tenant: &&Tenant| config.names(&tenant.name) && (is_rt(tenant) || !names.contains_key(&*tenant.name));
    let mut order: Vec<&Tenant> = tenants.iter().filter(means).collect();
    let is_new = |tenant: &Tenant| !tenant.threads.iter().any(|thread| held.contains_key(&thread.id));
    order.sort_by_key(|tenant| (is_new(tenant), tenant.process.start_time, tenant.process.pid));
    let nothing = Ask::default();
    let ask = |tenant: &Tenant| asks.get(&tenant.name).unwrap_or(&nothing);
    let cpus = reservations.cpus.clone();
    let candidates = |tenant: &Tenant, ask: &Ask| {
        if names.get(tenant.name.as_str()).is_some_and(|count| *count > 1) {
            return Err("several tenants have this name; give them different names".to_owned());
        }
        candidates(config, tenant, &cpus, &held, ask)
    };
    if shortcut(&mut reservations, order.iter().map(|tenant| (*tenant, candidates(tenant, ask(tenant)))).collect()) {
        return reservations;
    }
    for tenant in order {
        let mut try_admit = |ask: &Ask| admit_vm(&mut reservations, tenant, candidates(tenant, ask)?);
        let ask = ask(tenant);
        let mut admitted = try_admit(ask);
        if let (Err(why), false) = (&mut admitted, ask.needs.is_empty()) {
            *why = match try_admit(&nothing) {
                Ok(()) => format!("its guest's deadline tasks: {why}"),
                Err(declared) => declared,
            };
        }
        if let Err(why) = admitted {
            reservations.refused.push(Refused { tenant: tenant.name.clone(), why });
        }
    }
    reservations
}

/// A vCPU with a declared reservation, before admission.
struct Candidate {
    id: ThreadId,
    vcpu: u32,
    bandwidth: Bandwidth,
    period: Nanos,
    guest: Option<GuestNeed>,
    page: Option<Page>,
    offer: Option<Offer>,
    /// The CPUs that the vCPU may run on; None: all.
    affinity: Option<BTreeSet<u32>>,
    /// The one of these CPUs that the vCPU had before.
    home: Option<u32>,
}

impl Candidate {
    fn reserved(&self, tenant: &Tenant) -> Reserved {
        Reserved {
            id: self.id,
            tenant: tenant.name.clone(),
            class: tenant.class,
            vcpu: self.vcpu,
            budget: self.bandwidth.of(self.period),
            period: self.period,
            bandwidth: self.bandwidth,
            guest: self.guest,
            page: self.page.clone(),
            offer: self.offer.clone(),
            home: None,
        }
    }
}

fn candidates(
    config: &SchedConfig,
    tenant: &Tenant,
    cpus: &[u32],
    held: &BTreeMap<ThreadId, Option<u32>>,
    ask: &Ask,
) -> Result<Vec<Candidate>, String> {
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
    for declared in config.reservations.iter().filter(|declared| declared.name == tenant.name) {
        let mut found = BTreeSet::new();
        for thread in &tenant.threads {
            let ThreadRole::Vcpu(number) = thread.role else { continue };
            if declared.vcpus.as_ref().is_some_and(|only| !only.contains(&number)) {
                continue;
            }
            if let Some(sched) = thread.libvirt.sched {
                return Err(format!(
                    "vCPU {number} has {sched} by the domain's <vcpusched>, which Ontime leaves as it is; remove \
                     <vcpusched> from the domain"
                ));
            }
            found.insert(number);
            let affinity = affinity(number, thread, cpus)?;
            let had = held.get(&thread.id).copied().flatten();
            let mut one = Candidate {
                id: thread.id,
                vcpu: number,
                bandwidth: declared.bandwidth,
                period: declared.period,
                guest: None,
                page: None,
                offer: None,
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

/// The allowed CPUs as indices of `cpus`; None: all of them.
fn affinity(number: u32, thread: &TenantThread, cpus: &[u32]) -> Result<Option<BTreeSet<u32>>, String> {
    let allowed: CpuList = thread.affinity.parse().unwrap_or_default();
    if cpus.iter().all(|cpu| allowed.contains(*cpu)) && !cpus.is_empty() {
        return Ok(None);
    }
    let within: BTreeSet<u32> = (0..).zip(cpus).filter(|(_, cpu)| allowed.contains(**cpu)).map(|(at, _)| at).collect();
    if within.is_empty() {
        return Err(format!(
            "vCPU {number} may run on CPUs {} only, none of which is for reservations; widen its pinning, or `cpus` in \
             sched.toml",
            thread.affinity
        ));
    }
    Ok(Some(within))
}

/// Admits all VMs at once, if no home CPU has to be chosen and all fit. The result is the same as admitting one VM
/// after the other, because each part of a fitting set fits too. But that takes longer by the number of VMs, for each
/// request of a guest.
fn admit_at_once(reservations: &mut Reservations, all: Vec<(&Tenant, Result<Vec<Candidate>, String>)>) -> bool {
    if all.is_empty() {
        return true;
    }
    let (mut vcpus, mut wishes) = (Vec::new(), Vec::new());
    for (tenant, candidates) in all {
        let Ok(candidates) = candidates else { return false };
        for one in candidates {
            if one.affinity.is_some() && one.home.is_none() {
                return false;
            }
            wishes.push(one.home.map(|home| BTreeSet::from([home])));
            vcpus.push(one.reserved(tenant));
        }
    }
    let Ok(admitted) = fit(reservations, &vcpus, &wishes) else { return false };
    reservations.set_admitted(vcpus, admitted);
    true
}

fn admit_vm(reservations: &mut Reservations, tenant: &Tenant, candidates: Vec<Candidate>) -> Result<(), String> {
    let mut all = reservations.vcpus.clone();
    // A home CPU is kept: a move would do no harm to the vCPU's guarantee, but to its caches, and to vCPUs whose home
    // is the other CPU.
    let only = |home: u32| BTreeSet::from([home]);
    let mut stay: Vec<Option<BTreeSet<u32>>> = reservations.vcpus.iter().map(|vcpu| vcpu.home.map(only)).collect();
    let mut free = stay.clone();
    for one in candidates {
        all.push(one.reserved(tenant));
        stay.push(one.home.map(only).or_else(|| one.affinity.clone()));
        free.push(one.affinity);
    }
    let fit = |wishes| fit(reservations, &all, wishes);
    let admitted = fit(&stay).or_else(|_| fit(&free))?;
    reservations.set_admitted(all, admitted);
    Ok(())
}

#[cfg(test)]
#[path = "admission_tests.rs"]
mod tests;
