//! Threads that a placed thread created while its runtime cap paused it. A fork passes SCHED_IDLE on (sched(7)), so
//! such a thread never had the policy that it would have without Ontime, and looks as if its program had chosen
//! SCHED_IDLE. This file does no I/O.
//!
//! In: the tenants as found, and the threads that had been placed and paused ([`Paused`]). Out: for each such thread
//! the original policy of its parent ([`Inherited`]), from which the rules start, and which the journal stores. Only
//! containers' threads are handled: a tenant does not create vCPU threads itself. A real-time policy is not inherited
//! (`ThreadId::set_policy_alone`).

use std::collections::BTreeMap;

use ontime_tenants::{Policy, Tenant, TenantThread, ThreadId, ThreadRole};

use crate::journal::Originals;
use crate::knob::{Knob, Value};
use crate::plan::Plan;

/// A container's thread that Ontime placed and a cap has paused. It may have ended since.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paused {
    /// The paused thread.
    pub id: ThreadId,
    /// Name of its container.
    pub tenant: String,
    /// Its policy before it was placed.
    pub original: Policy,
}

impl Paused {
    /// The threads of these tenants that are in the journal and have been paused.
    pub fn of(tenants: &[Tenant], journal: &Originals, paused: impl Fn(ThreadId) -> bool) -> Vec<Self> {
        let placed = |tenant: &Tenant, thread: &TenantThread| match journal.original(&knob(thread)) {
            Some(Value::Policy(original)) => {
                Some(Self { id: thread.id, tenant: tenant.name.clone(), original: *original })
            }
            _ => None,
        };
        tenants
            .iter()
            .flat_map(|tenant| containers(tenant).filter_map(move |thread| placed(tenant, thread)))
            .filter(|placed| paused(placed.id) && placed.original != Policy::Idle)
            .collect()
    }
}

/// Threads that inherited a pause, with the policy that they would have without it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Inherited(BTreeMap<ThreadId, Policy>);

impl Inherited {
    /// Finds them in `tenants`: threads at SCHED_IDLE that are not in the journal, in a container with a paused thread.
    pub fn find(tenants: &[Tenant], paused: &[Paused], journal: &Originals) -> Self {
        let mut inherited = BTreeMap::new();
        for tenant in tenants {
            let new = |thread: &&TenantThread| thread.policy == Policy::Idle && !journal.has(&knob(thread));
            for thread in containers(tenant).filter(new) {
                let makers = || paused.iter().filter(|paused| paused.tenant == tenant.name);
                let maker = makers().find(|paused| paused.id.pid == thread.id.pid).or_else(|| makers().next());
                inherited.extend(maker.map(|maker| (thread.id, maker.original)));
            }
        }
        Self(inherited)
    }

    /// Sets, in these facts, the policy that the threads would have.
    pub fn put_right(&self, tenants: &mut [Tenant]) {
        for thread in tenants.iter_mut().flat_map(|tenant| &mut tenant.threads) {
            if let Some(original) = self.0.get(&thread.id) {
                thread.policy = *original;
            }
        }
    }

    /// Sets, in a plan, the originals that the journal must store for them.
    pub fn note(&self, plan: &mut Plan) {
        for setting in &mut plan.settings {
            if let Knob::ThreadPolicy { thread, .. } = &setting.knob {
                setting.original = self.0.get(thread).map(|original| Value::Policy(*original));
            }
        }
    }
}

fn containers(tenant: &Tenant) -> impl Iterator<Item = &TenantThread> {
    tenant.threads.iter().filter(|thread| thread.role == ThreadRole::Container)
}

fn knob(thread: &TenantThread) -> Knob {
    Knob::ThreadPolicy { thread: thread.id, comm: thread.comm.clone() }
}

#[cfg(test)]
mod tests {
    use ontime_tenants::model::LibvirtTuning;
    use ontime_tenants::{Class, ClassSource, Kind, Level, Namer};

    use super::*;
    use crate::journal::{Journal, Original};

    const NICE: Policy = Policy::Other { nice: 5 };

    fn thread(pid: i32, tid: i32, policy: Policy) -> TenantThread {
        TenantThread {
            id: ThreadId { pid, tid, start_time: 9 },
            role: ThreadRole::Container,
            comm: "server".to_owned(),
            policy,
            affinity: "0".to_owned(),
            last_cpu: 0,
            libvirt: LibvirtTuning::default(),
        }
    }

    fn container(name: &str, threads: Vec<TenantThread>) -> Tenant {
        Tenant {
            name: name.to_owned(),
            uuid: None,
            kind: Kind::Container,
            owner: 0,
            namer: Namer::User(0),
            process: ThreadId { pid: 1, tid: 1, start_time: 9 },
            cgroup: None,
            class: Class::Rt(Level::HIGHEST),
            class_source: ClassSource::Default,
            runtime_cap: 0.95,
            threads,
            vnics: Vec::new(),
            attached: Vec::new(),
        }
    }

    #[test]
    fn what_a_paused_thread_makes_has_its_makers_original() {
        let dir = tempfile::tempdir().unwrap();
        let mut journal = Journal::open(&dir.path().join("journal"), "boot").unwrap();
        let (first, second) = (thread(10, 10, Policy::Fifo(47)), thread(20, 20, Policy::Fifo(47)));
        let originals = [(&first, Policy::BULK), (&second, NICE)]
            .map(|(thread, policy)| Original { knob: knob(thread), value: Value::Policy(policy) });
        journal.store(originals.to_vec()).unwrap();
        let before = [container("box", vec![first, second])];
        // The thread's parent may have ended. The parent of another process's thread is any paused thread of the
        // container.
        let mut now = [
            container("box", vec![thread(20, 21, Policy::Idle), thread(30, 30, Policy::Idle), thread(40, 40, NICE)]),
            container("other", vec![thread(70, 70, Policy::Idle)]),
        ];
        let paused = Paused::of(&before, &journal, |_| true);
        let found = Inherited::find(&now, &paused, &journal);
        found.put_right(&mut now);
        let policies = |tenant: &Tenant| tenant.threads.iter().map(|thread| thread.policy).collect::<Vec<_>>();
        assert_eq!(policies(&now[0]), [NICE, Policy::BULK, NICE]);
        assert_eq!(policies(&now[1]), [Policy::Idle], "its own choice");
        assert!(Paused::of(&before, &journal, |_| false).is_empty());
    }
}
