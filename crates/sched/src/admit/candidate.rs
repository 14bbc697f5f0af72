//! A vCPU that may get a reservation, and on which CPUs.

use std::collections::BTreeSet;

use ontime_plan::{Bandwidth, Nanos};
use ontime_tenants::{CpuSet, Tenant, TenantThread, ThreadId};

use crate::admit::offer::Offer;
use crate::admit::pacing::Source;
use crate::admit::request::GuestNeed;
use crate::admit::reservations::{Kept, Reserved};
use crate::guest_page::Page;
use crate::model::BackendKind;

/// What is admitted whole or not at all: vCPUs, and what is kept for a lease besides.
#[derive(Default)]
pub(crate) struct Wanted<'a> {
    pub(crate) candidates: Vec<Candidate<'a>>,
    pub(crate) kept: Vec<Kept>,
    /// Why the tenants of a lease do not have what is kept.
    pub(crate) why: Option<String>,
    /// Why some of its tenants have nothing of it, while others do.
    pub(crate) left_out: Option<String>,
    /// What must have the pacers' time; nothing where they take no more than before.
    pub(crate) sources: &'static [Source],
    /// Whether the lease has a vCPU that was not paced before, or with another period, or on another CPU.
    pub(crate) is_new: bool,
}

/// What a vCPU had before.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Had {
    /// Its home CPU, an index of the CPUs for reservations.
    pub(crate) home: Option<u32>,
    /// Zero where only its thread and its CPU were remembered over a restart.
    pub(crate) period: Nanos,
}

/// A vCPU for which a reservation is declared or requested, before admission.
pub(crate) struct Candidate<'a> {
    pub(crate) tenant: &'a Tenant,
    pub(crate) id: ThreadId,
    pub(crate) vcpu: u32,
    pub(crate) bandwidth: Bandwidth,
    pub(crate) period: Nanos,
    pub(crate) guest: Option<GuestNeed>,
    pub(crate) page: Option<Page>,
    pub(crate) offer: Option<Offer>,
    pub(crate) leased: bool,
    /// The CPUs that the vCPU may run on; None: all.
    pub(crate) affinity: Option<BTreeSet<u32>>,
    /// The one of these CPUs that the vCPU had before.
    pub(crate) home: Option<u32>,
}

impl Candidate<'_> {
    fn is_pinned(&self) -> bool {
        let thread = self.tenant.threads.iter().find(|thread| thread.id == self.id);
        thread.is_some_and(is_pinned)
    }

    pub(crate) fn reserved(&self) -> Reserved {
        Reserved {
            id: self.id,
            tenant: self.tenant.name.clone(),
            class: self.tenant.class,
            vcpu: self.vcpu,
            budget: self.bandwidth.of(self.period),
            period: self.period,
            bandwidth: self.bandwidth,
            guest: self.guest,
            page: self.page.clone(),
            offer: self.offer.clone(),
            home: None,
            pinned: self.is_pinned(),
            leased: self.leased,
        }
    }
}

/// Refuses a vCPU that may run on several CPUs where the back end takes each to be pinned to one.
pub(crate) fn refuse_unpinned(backend: BackendKind, number: u32, thread: &TenantThread) -> Result<(), String> {
    if backend != BackendKind::SchedExt || is_pinned(thread) {
        return Ok(());
    }
    Err(format!(
        "vCPU {number} may run on CPUs {}, and back end sched_ext takes each to be on one; pin it (libvirt: vcpupin), \
         or use backend = \"paced\" in sched.toml",
        thread.affinity
    ))
}

fn is_pinned(thread: &TenantThread) -> bool {
    thread.affinity.parse::<CpuSet>().is_ok_and(|cpus| cpus.len() == 1)
}

/// Refuses a vCPU whose policy libvirt sets.
pub(crate) fn refuse_vcpusched(number: u32, thread: &TenantThread) -> Result<(), String> {
    match thread.libvirt.sched {
        Some(sched) => Err(format!(
            "vCPU {number} has {sched} by the domain's <vcpusched>, which Ontime leaves as it is; remove <vcpusched> \
             from the domain"
        )),
        None => Ok(()),
    }
}

/// The allowed CPUs as indices of `cpus`; None: all of them.
pub(crate) fn affinity(number: u32, thread: &TenantThread, cpus: &[u32]) -> Result<Option<BTreeSet<u32>>, String> {
    let allowed = thread.affinity.parse::<CpuSet>().ok().filter(|allowed| !allowed.is_empty());
    let allowed = allowed.ok_or_else(|| {
        format!(
            "the CPUs on which vCPU {number} may run could not be read; if this stays, see the daemon's log: \
             journalctl -u ontimed"
        )
    })?;
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
