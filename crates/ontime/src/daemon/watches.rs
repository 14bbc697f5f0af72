//! Which threads are to be held to a cap: every thread at real-time priority that belongs to a tenant, and every interrupt and
//! NAPI thread that Ontime placed there. Nearly pure: a kernel thread's CPUs are asked of the kernel.
//!
//! Also those that libvirt or the tenant itself placed: while the kernel's protections are off, nothing else stops them.

use std::collections::BTreeMap;

use ontime_hostnet::{CpuSet, Knob, Plan, RuleId, Setting, Value};
use ontime_tenants::{Policy, PriorityTable, Tenant, TenantThread, ThreadId, ownership};

use super::cap::{Share, Watch};
use super::view::Owned;

/// The threads to watch, and whose they are.
#[derive(Debug, Default)]
pub struct Watches {
    /// For the cap watcher.
    pub list: Vec<Watch>,
    /// For reports and metrics.
    pub of: BTreeMap<ThreadId, Owned>,
}

impl Watches {
    /// Of tenants as they are but for pauses. Not of `reserved` threads: whoever keeps their share holds them to it.
    pub fn of(
        plan: &Plan,
        tenants: &[Tenant],
        table: PriorityTable,
        kernel: Share,
        reserved: &BTreeMap<ThreadId, Policy>,
    ) -> Self {
        let mut watches = Self::default();
        let planned = planned(plan);
        for tenant in tenants {
            for thread in tenant.threads.iter().filter(|thread| !reserved.contains_key(&thread.id)) {
                let planned = planned.get(&thread.id).copied();
                if let Some(place) = planned.or_else(|| place(tenant, thread, table)) {
                    // A cap outside its range cannot be: the configuration refuses it. If it were, the default holds.
                    let share = Share::new(tenant.runtime_cap).unwrap_or(Share::NINETY_FIVE);
                    let cpus = CpuSet::from_list(&thread.affinity).unwrap_or_default().iter().collect();
                    let owned = Owned { name: tenant.name.clone(), class: tenant.class.to_string() };
                    watches.add(Watch { id: thread.id, place, share, cpus }, owned);
                }
            }
        }
        for setting in &plan.settings {
            let of_kernel = matches!(setting.rule, RuleId::IrqThread | RuleId::NapiThread | RuleId::BusyPoll);
            if let (true, Knob::ThreadPolicy { thread, comm }, Value::Policy(place)) =
                (of_kernel && is_real_time(&setting.value), &setting.knob, &setting.value)
            {
                let cpus = thread.affinity().map(|cpus| cpus.iter().collect()).unwrap_or_default();
                // The name holds the interface and an id that may change at every ifup: too many names for metrics.
                let name = if comm.starts_with("irq/") { "irq threads" } else { "napi threads" };
                let owned = Owned { name: name.to_owned(), class: "rt".to_owned() };
                watches.add(Watch { id: *thread, place: *place, share: kernel, cpus }, owned);
            }
        }
        watches
    }

    fn add(&mut self, watch: Watch, owned: Owned) {
        if self.of.insert(watch.id, owned).is_none() {
            self.list.push(watch);
        }
    }
}

/// The real-time policies that the plan gives to threads.
fn planned(plan: &Plan) -> BTreeMap<ThreadId, Policy> {
    let place = |setting: &Setting| match (&setting.knob, &setting.value) {
        (Knob::ThreadPolicy { thread, .. }, Value::Policy(place @ (Policy::Fifo(_) | Policy::Rr(_)))) => {
            Some((*thread, *place))
        }
        _ => None,
    };
    plan.settings.iter().filter_map(place).collect()
}

fn place(tenant: &Tenant, thread: &TenantThread, table: PriorityTable) -> Option<Policy> {
    ownership::wanted(tenant, thread, &table)
        .or(thread.libvirt.sched)
        .into_iter()
        .chain([thread.policy])
        .find(|policy| matches!(policy, Policy::Fifo(_) | Policy::Rr(_)))
}

fn is_real_time(value: &Value) -> bool {
    matches!(value, Value::Policy(Policy::Fifo(_) | Policy::Rr(_)))
}

#[cfg(test)]
mod tests {
    use ontime_tenants::model::LibvirtTuning;
    use ontime_tenants::{Class, ClassSource, Kind, Level, ThreadRole};

    use super::*;

    fn tenant(class: Class, threads: Vec<TenantThread>) -> Tenant {
        Tenant {
            name: "vm".to_owned(),
            uuid: None,
            kind: Kind::Qemu,
            owner: 0,
            process: ThreadId { pid: 1, tid: 1, start_time: 0 },
            cgroup: None,
            class,
            class_source: ClassSource::Default,
            runtime_cap: 0.5,
            threads,
            vnics: Vec::new(),
        }
    }

    fn thread(tid: i32, role: ThreadRole, policy: Policy) -> TenantThread {
        TenantThread {
            id: ThreadId { pid: 1, tid, start_time: 7 },
            role,
            comm: "x".to_owned(),
            policy,
            affinity: "1,3".to_owned(),
            last_cpu: 1,
            libvirt: LibvirtTuning::default(),
        }
    }

    fn watched(tenant: Tenant) -> Vec<(i32, Policy)> {
        let reserved = BTreeMap::from([(ThreadId { pid: 1, tid: 77, start_time: 7 }, Policy::Fifo(47))]);
        let all = Watches::of(&Plan::default(), &[tenant], PriorityTable::default(), Share::NINETY_FIVE, &reserved);
        all.list.iter().map(|watch| (watch.id.tid, watch.place)).collect()
    }

    #[test]
    fn rt_tenants_are_watched_at_their_place_wherever_they_are_now() {
        let rt = Class::Rt(Level::HIGHEST);
        let threads = vec![
            thread(2, ThreadRole::Vcpu(0), Policy::BULK),
            thread(3, ThreadRole::Vhost, Policy::Idle),
            thread(4, ThreadRole::Emulator, Policy::BULK),
            thread(77, ThreadRole::Vcpu(1), Policy::Fifo(47)),
        ];
        assert_eq!(watched(tenant(rt, threads)), [(2, Policy::Fifo(47)), (3, Policy::Fifo(48))]);
    }

    #[test]
    fn who_is_at_real_time_by_others_doing_is_watched_too() {
        let own = thread(2, ThreadRole::Container, Policy::Rr(5));
        assert_eq!(watched(tenant(Class::Bulk, vec![own.clone()])), [(2, Policy::Rr(5))]);
        let idle = TenantThread { policy: Policy::Idle, ..own };
        assert!(watched(tenant(Class::Bulk, vec![idle])).is_empty());
        let by_libvirt = TenantThread {
            policy: Policy::BULK,
            libvirt: LibvirtTuning { sched: Some(Policy::Fifo(9)), cpus: None },
            ..thread(5, ThreadRole::Vcpu(0), Policy::BULK)
        };
        let rt = Class::Rt(Level::HIGHEST);
        assert_eq!(watched(tenant(rt, vec![by_libvirt])), [(5, Policy::Fifo(9))]);
    }
}
