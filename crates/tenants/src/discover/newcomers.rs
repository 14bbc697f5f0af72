//! A look at new processes alone: their tenants and threads, found as a whole discovery finds them.
//!
//! In: their numbers, and the last discovery. Out: the real-time tenants among them, for [`Discovery::take_in`]. What
//! such a look does not tell is left to the next whole discovery: bulk tenants, network interfaces, problems, VMs that
//! libvirt is starting, VMs whose vCPUs have no names, and KVM's timer threads.

use std::collections::BTreeSet;

use super::{Discovery, Finder, keep_names_of_roots_tenants, sort};
use crate::class::Class;
use crate::container;
use crate::host::{Processes, Sources};
use crate::model::{Kind, Tenant, ThreadRole};
use crate::proc::{self, Stat};
use crate::rules::{Namer, Rules};
use crate::thread::ThreadId;
use crate::vmm;

/// Reads these processes and kernel threads, and of the others only those that tell whose they are.
pub fn newcomers(sources: &Sources, rules: &Rules, known: &Discovery, pids: &BTreeSet<i32>) -> Discovery {
    let identities = |sources: &Sources| pids.iter().filter_map(|pid| sources.identity(*pid)).collect::<BTreeSet<_>>();
    let before = identities(sources);
    let mut between = || ();
    let mut found = Finder::new(sources, rules, &mut between);
    found.unclear = Some(BTreeSet::new());
    let by_root = known.tenants.iter().filter(|tenant| tenant.namer == Namer::User(0));
    found.taken = by_root.map(|tenant| tenant.name.clone()).collect();
    found.run(Processes::of(sources, &with_context(sources, known, pids)));
    let costs = found.budget.costs();
    let Finder { mut tenants, unclear, .. } = found;
    let unclear = unclear.unwrap_or_default();
    // A number that another process got meanwhile may have parts of both.
    let stayed: BTreeSet<i32> = before.intersection(&identities(sources)).map(|id| id.pid).collect();
    let is_same = |id: ThreadId| !pids.contains(&id.pid) || stayed.contains(&id.pid);
    for tenant in &mut tenants {
        if let Some(known) = known.tenants.iter().find(|known| is_one(known, tenant)) {
            tenant.class = known.class;
        }
        tenant.threads.retain(|thread| is_same(thread.id));
    }
    let is_starting = |tenant: &Tenant| {
        let cgroup = sources.cgroup(tenant.process.pid);
        tenant.kind == Kind::Qemu && cgroup.as_deref().and_then(container::libvirt_scope).is_some()
    };
    tenants.retain(|tenant| {
        let is_clear = tenant.kind == Kind::Container
            || !unclear.contains(&tenant.process.pid) && !is_starting(tenant) && is_same(tenant.process);
        tenant.class != Class::Bulk && !tenant.threads.is_empty() && is_clear
    });
    Discovery { tenants, costs, ..Discovery::default() }
}

/// Whether two looks have found the same tenant.
fn is_one(one: &Tenant, other: &Tenant) -> bool {
    match (one.kind, other.kind) {
        (Kind::Container, Kind::Container) => one.cgroup == other.cgroup,
        (Kind::Container, _) | (_, Kind::Container) => false,
        _ => one.process == other.process,
    }
}

/// The processes, their parents, the container daemons, and the VMs that they may belong to.
fn with_context(sources: &Sources, known: &Discovery, pids: &BTreeSet<i32>) -> BTreeSet<i32> {
    let mut all = pids | &known.runtimes;
    let vms = || known.tenants.iter().filter(|tenant| tenant.kind != Kind::Container);
    for pid in pids {
        let Some(stat) = sources.read(*pid, "stat").and_then(|text| proc::parse_stat(&text)) else { continue };
        if stat.is_kthread() {
            let works_for = |vm: &&Tenant| is_for(vm, &stat);
            all.extend(vms().filter(works_for).map(|vm| vm.process.pid));
            continue;
        }
        all.insert(stat.ppid);
        let Some(own) = sources.cgroup(*pid).filter(|path| path != "/") else { continue };
        let is_beside = |vm: &&Tenant| {
            let of_vm = sources.cgroup(vm.process.pid).unwrap_or_default();
            let shares = |part: fn(&str) -> Option<String>| part(&own).is_some_and(|own| part(&of_vm) == Some(own));
            own == of_vm
                || shares(container::pod_of)
                || shares(|path| Some(container::innermost(path)?.cgroup))
                || shares(|path| container::unit_of(path).map(str::to_owned))
        };
        all.extend(vms().filter(is_beside).map(|vm| vm.process.pid));
    }
    all
}

/// Whether a kernel thread works for a VM, by its name.
fn is_for(vm: &Tenant, kernel: &Stat) -> bool {
    match vmm::kernel_thread(&kernel.comm) {
        Some((ThreadRole::KvmPit, _)) => false,
        Some((_, number)) => vm.process.pid == number || vm.threads.iter().any(|thread| thread.id.tid == number),
        None => false,
    }
}

impl Discovery {
    /// Adds what a look at new processes has found since.
    pub fn take_in(&mut self, news: Discovery) {
        let threads = news.tenants.iter().flat_map(|tenant| &tenant.threads);
        let fresh: BTreeSet<(i32, i32)> = threads.map(|thread| (thread.id.pid, thread.id.tid)).collect();
        for tenant in &mut self.tenants {
            // Also threads that had these numbers before, and threads of a process that has become another tenant's.
            tenant.threads.retain(|thread| !fresh.contains(&(thread.id.pid, thread.id.tid)));
        }
        for new in news.tenants {
            match self.tenants.iter_mut().find(|known| is_one(known, &new)) {
                Some(known) => {
                    let has_ended = known.process.pid == new.process.pid && known.process != new.process;
                    known.process = if has_ended { new.process } else { known.process };
                    known.threads.extend(new.threads);
                }
                None => self.tenants.push(new),
            }
        }
        self.tenants.retain(|tenant| !tenant.threads.is_empty());
        self.problems.extend(keep_names_of_roots_tenants(&mut self.tenants, &BTreeSet::new()));
        sort(&mut self.tenants);
    }
}

#[cfg(test)]
#[path = "newcomers_tests.rs"]
mod tests;
