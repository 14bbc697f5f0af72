//! Which threads are held to a cap: every thread at real-time priority that belongs to a tenant, and every interrupt
//! and NAPI thread that Ontime placed there. Nearly pure: only the affinity of kernel threads is read from the kernel.
//!
//! The list also has tenants' threads whose priority libvirt or the tenant itself has set: while the kernel's
//! protections are off, nothing else limits them.

use std::collections::{BTreeMap, BTreeSet};

use ontime_hostnet::{CpuSet, Intent, Knob, Plan, RuleId, Setting, Value};
use ontime_tenants::{
    Class, ClassSource, Policy, PriorityTable, Role, RuntimeCap, Tenant, TenantThread, ThreadId, ThreadRole, ownership,
};

use super::cap::{Followed, Rank, Share, SharedCap, Watch};
use super::census::{RealTime, priority};
use super::view::Owned;

/// The threads to watch, and their owners.
#[derive(Debug, Default)]
pub(super) struct Watches {
    /// For the cap watcher.
    pub list: Vec<Watch>,
    /// The owner of each thread, for reports and metrics.
    pub of: BTreeMap<ThreadId, Owned>,
    /// VMs whose vCPUs are put ahead while an interrupt is pending.
    pub followed: Vec<Followed>,
}

impl Watches {
    /// The threads of these tenants, read as if none were paused. `kernel` is the share of threads without a cap of
    /// their own. Threads with reserved time are left out, because their back end holds them to their budget.
    pub(super) fn of(plan: &Plan, tenants: &[Tenant], intent: &Intent, kernel: Share) -> Self {
        let mut watches = Self::default();
        let (places, table) = (planned(plan), intent.table);
        for tenant in tenants {
            let mut followed = Followed::default();
            for thread in tenant.threads.iter().filter(|thread| !intent.reserved.contains_key(&thread.id)) {
                let planned = places.get(&thread.id).copied();
                let ahead = planned.and_then(|place| ahead(tenant, thread, intent, place));
                if let (Some(_), ThreadRole::Vcpu(number)) = (ahead, thread.role) {
                    followed.vcpus.push((number, thread.id));
                }
                if let Some(place) = planned.or_else(|| place(tenant, thread, table)) {
                    // Bulk tenants have no cap of their own.
                    let share = if tenant.class == Class::Bulk { kernel } else { share(tenant, thread) };
                    let cpus = CpuSet::from_list(&thread.affinity).unwrap_or_default().iter().collect();
                    let owned = Owned { name: tenant.name.clone(), class: tenant.class.to_string() };
                    let rank = match thread.role {
                        _ if tenant.class == Class::Bulk && place == PriorityTable::SHARED_SENDER => Rank::Poller,
                        ThreadRole::Vhost | ThreadRole::KvmPit | ThreadRole::Device => Rank::Backend,
                        ThreadRole::Emulator | ThreadRole::Iothread => Rank::Monitor,
                        ThreadRole::Vcpu(_) | ThreadRole::Container => Rank::Guest,
                    };
                    let shared = shared(tenant, thread);
                    watches.add(Watch { id: thread.id, place, share, cpus, rank, ahead, shared }, owned);
                }
            }
            if !followed.vcpus.is_empty() {
                followed.threads = tenant.threads.iter().map(|thread| thread.id.tid).collect();
                watches.followed.push(followed);
            }
        }
        for setting in &plan.settings {
            let tells = setting.rule == RuleId::InterruptContext;
            let of_kernel = tells || matches!(setting.rule, RuleId::IrqThread | RuleId::NapiThread | RuleId::BusyPoll);
            if let (true, Knob::ThreadPolicy { thread, comm }, Value::Policy(place)) =
                (of_kernel && is_real_time(&setting.value), &setting.knob, &setting.value)
            {
                let cpus = thread.affinity().map(|cpus| cpus.iter().collect()).unwrap_or_default();
                // A thread's name contains the interface and an id that may change at every ifup: too many names for
                // metrics.
                let name = match comm {
                    _ if tells => "irq_work threads",
                    comm if comm.starts_with("irq/") => "irq threads",
                    _ => "napi threads",
                };
                let owned = Owned { name: name.to_owned(), class: "rt".to_owned() };
                let last = [PriorityTable::POLLER, PriorityTable::SHARED_COMPLETIONS].contains(place);
                let rank = match last {
                    _ if tells => Rank::Teller,
                    true => Rank::Poller,
                    false => Rank::Backend,
                };
                let (id, place, share) = (*thread, *place, kernel);
                watches.add(Watch { id, place, share, cpus, rank, ahead: None, shared: None }, owned);
            }
        }
        watches
    }

    /// Adds threads of device processes that serve no tenant, because their VM has not started or has ended. `before`:
    /// the watches until now, because a thread that its cap has just paused has no real-time policy at the moment.
    pub(super) fn add_devices(&mut self, found: &[RealTime], before: &Self, share: Share) {
        let owned = Owned { name: "device processes".to_owned(), class: "rt".to_owned() };
        for thread in found.iter().filter(|thread| thread.is_device() && priority(thread.policy).is_some()) {
            let cpus = thread.id.affinity().map(|cpus| cpus.iter().collect()).unwrap_or_default();
            let (id, place, rank) = (thread.id, thread.policy, Rank::Backend);
            self.add(Watch { id, place, share, cpus, rank, ahead: None, shared: None }, owned.clone());
        }
        for watch in before.list.iter().filter(|watch| before.of.get(&watch.id) == Some(&owned)) {
            if watch.id.policy().is_ok_and(|policy| policy == Policy::Idle) {
                self.add(watch.clone(), owned.clone());
            }
        }
    }

    /// Takes over the watches of these threads.
    pub(super) fn replace(&mut self, mut others: Self, ids: &BTreeSet<ThreadId>) {
        self.list.retain(|watch| !ids.contains(&watch.id));
        self.of.retain(|id, _| !ids.contains(id));
        for watch in others.list.into_iter().filter(|watch| ids.contains(&watch.id)) {
            if let Some(owned) = others.of.remove(&watch.id) {
                self.add(watch, owned);
            }
        }
    }

    /// Why a thread with this policy is not at its place, if the cap watcher has moved it.
    pub(super) fn moved(&self, id: ThreadId, read: &str) -> Option<Moved> {
        let watch = self.list.iter().find(|watch| watch.id == id)?;
        let is = |policy: Policy| policy.to_string() == read;
        match watch.ahead {
            _ if is(Policy::Idle) => Some(Moved::Paused),
            Some(ahead) if is(ahead) => Some(Moved::Ahead),
            _ => None,
        }
    }

    fn add(&mut self, watch: Watch, owned: Owned) {
        if self.of.insert(watch.id, owned).is_none() {
            self.list.push(watch);
        }
    }
}

/// How the cap watcher has moved a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Moved {
    /// Over its cap.
    Paused,
    /// Put ahead, because an interrupt is pending or it has slept since the last one.
    Ahead,
}

/// The cap of a thread of an RT tenant. A VMM chooses which threads it names as a vCPU, and by which number, so threads
/// with the same vCPU number share one cap in equal parts. The cap by a reservation is that of one of its vCPUs; a
/// thread that serves all of them may take what is reserved for all, up to the default cap.
fn share(tenant: &Tenant, thread: &TenantThread) -> Share {
    // The configuration refuses a cap outside its range. If there were one, the default is used.
    let default = Share::NINETY_FIVE.fraction();
    let one = Share::new(tenant.runtime_cap).map_or(default, |_| tenant.runtime_cap);
    let own = match (thread.role, &tenant.class_source) {
        (ThreadRole::Vcpu(_), _) => {
            one / tenant.threads.iter().filter(|other| other.role == thread.role).count().max(1) as f64
        }
        (ThreadRole::Container, _) => one,
        (_, ClassSource::Reservation { vcpus, .. }) => (one * f64::from(*vcpus)).min(default).max(one),
        _ => one,
    };
    Share::new(own.max(RuntimeCap::LEAST)).unwrap_or(Share::NINETY_FIVE)
}

/// What was reserved for the tenant, which its programs' threads share: the threads of a container, or of a pod's
/// containers, and vCPUs that do not have the reserved time. Threads of a VMM are not vCPUs, for which it was reserved.
fn shared(tenant: &Tenant, thread: &TenantThread) -> Option<SharedCap> {
    let ClassSource::Reservation { name, vcpus: vcpus @ 1.. } = &tenant.class_source else { return None };
    matches!(thread.role, ThreadRole::Container | ThreadRole::Vcpu(_)).then_some(())?;
    Some(SharedCap { reservation: name.clone(), share: Share::new(tenant.runtime_cap)?.times(*vcpus) })
}

/// A tenant with more threads at real-time priority than can be capped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OverQuota {
    /// The tenant's name.
    pub tenant: String,
    /// The threads beyond the quota, which must not be at real-time priority.
    pub threads: Vec<ThreadId>,
}

/// Removes threads beyond the quotas from the tenants. The quota is `most` for each tenant, and less where all together
/// need more than `capacity`. Then the capacity is divided fairly: a tenant that needs no more than an equal part gets
/// all that it needs, and the rest is divided among the others. So a tenant with too many threads takes nothing from
/// another.
pub(super) fn limit(tenants: &mut [Tenant], table: PriorityTable, capacity: usize, most: usize) -> Vec<OverQuota> {
    let wants = |tenant: &Tenant, thread: &TenantThread| place(tenant, thread, table).is_some();
    let count = |tenant: &Tenant| tenant.threads.iter().filter(|thread| wants(tenant, thread)).count();
    let mut counts: Vec<usize> = tenants.iter().map(count).collect();
    counts.sort_unstable();
    let mut left = capacity;
    let mut quota = most;
    for (before, count) in counts.iter().enumerate() {
        let equal = left / (counts.len() - before);
        if *count > equal {
            quota = quota.min(equal);
            break;
        }
        left -= count;
    }
    let over = |tenant: &mut Tenant| {
        let mut all: Vec<&TenantThread> = tenant.threads.iter().filter(|thread| wants(tenant, thread)).collect();
        // Threads that Ontime places come first, however many other threads the tenant raises.
        all.sort_by_key(|thread| ownership::wanted(tenant, thread, &table).is_none());
        let threads: Vec<ThreadId> = all.iter().skip(quota).map(|thread| thread.id).collect();
        let beyond: BTreeSet<ThreadId> = threads.iter().copied().collect();
        tenant.threads.retain(|thread| !beyond.contains(&thread.id));
        (!threads.is_empty()).then(|| OverQuota { tenant: tenant.name.clone(), threads })
    };
    tenants.iter_mut().filter_map(over).collect()
}

/// The place of a vCPU while an interrupt is pending, if the vCPU is at the entitled place and the method has the rule.
fn ahead(tenant: &Tenant, thread: &TenantThread, intent: &Intent, place: Policy) -> Option<Policy> {
    let at = |role| intent.table.policy(tenant.class, role);
    let is_vcpu = matches!(thread.role, ThreadRole::Vcpu(_));
    let waits = intent.has(RuleId::InterruptContext) && is_vcpu && place == at(Role::VcpuEntitled);
    waits.then(|| at(Role::VcpuPlanned))
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
    use ontime_hostnet::{Method, Stage};
    use ontime_tenants::model::LibvirtTuning;
    use ontime_tenants::rules::RUNTIME_CAP;
    use ontime_tenants::{Kind, Level, Namer, ThreadRole};

    use super::*;

    fn tenant(class: Class, threads: Vec<TenantThread>) -> Tenant {
        Tenant {
            name: "vm".to_owned(),
            uuid: None,
            kind: Kind::Qemu,
            owner: 0,
            namer: Namer::User(0),
            process: ThreadId { pid: 1, tid: 1, start_time: 0 },
            cgroup: None,
            class,
            class_source: ClassSource::Default,
            // As the rules set it by default.
            runtime_cap: if class == Class::Bulk { 1.0 } else { RUNTIME_CAP },
            threads,
            vnics: Vec::new(),
            attached: Vec::new(),
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
        let intent = Intent { reserved, ..Intent::default() };
        let all = Watches::of(&Plan::default(), &[tenant], &intent, Share::NINETY_FIVE);
        all.list.iter().map(|watch| (watch.id.tid, watch.place)).collect()
    }

    #[test]
    fn rt_tenants_are_watched_at_their_place_wherever_they_are_now() {
        let rt = Class::Rt(Level::HIGHEST);
        let threads = vec![
            thread(1, ThreadRole::Emulator, Policy::BULK),
            thread(2, ThreadRole::Vcpu(0), Policy::BULK),
            thread(3, ThreadRole::Vhost, Policy::Idle),
            thread(4, ThreadRole::Emulator, Policy::BULK),
            thread(5, ThreadRole::Device, Policy::Fifo(30)),
            thread(6, ThreadRole::Device, Policy::BULK),
            thread(77, ThreadRole::Vcpu(1), Policy::Fifo(47)),
        ];
        let places = [(1, Policy::Fifo(3)), (2, Policy::Fifo(47)), (3, Policy::Fifo(48)), (5, Policy::Fifo(30))];
        assert_eq!(watched(tenant(rt, threads)), places);
    }

    #[test]
    fn vcpus_at_the_entitled_place_are_put_ahead_under_interrupt_context() {
        let vm = tenant(
            Class::Rt(Level::HIGHEST),
            vec![
                thread(2, ThreadRole::Vcpu(0), Policy::BULK),
                thread(3, ThreadRole::Vhost, Policy::BULK),
                thread(4, ThreadRole::Emulator, Policy::BULK),
                thread(5, ThreadRole::Device, Policy::Fifo(48)),
            ],
        );
        let watches = |method| {
            let tenants = vec![vm.clone()];
            let intent = Intent { method, tenants: tenants.clone(), ..Intent::default() };
            let plan = ontime_hostnet::plan(&ontime_hostnet::Inventory::default(), &intent);
            Watches::of(&plan, &tenants, &intent, Share::NINETY_FIVE)
        };
        let all = watches(Method::InterruptContext);
        let vcpu = all.list.iter().find(|watch| watch.id.tid == 2).unwrap();
        assert_eq!((vcpu.place, vcpu.ahead, vcpu.rank), (Policy::Fifo(46), Some(Policy::Fifo(47)), Rank::Guest));
        let vhost = all.list.iter().find(|watch| watch.id.tid == 3).unwrap();
        assert_eq!((vhost.place, vhost.ahead, vhost.rank), (Policy::Fifo(48), None, Rank::Backend));
        assert_eq!(all.followed, [Followed { threads: vec![2, 3, 4, 5], vcpus: vec![(0, vcpu.id)] }]);
        let all = watches(Method::Partitioned);
        assert!(all.followed.is_empty() && all.list.iter().all(|watch| watch.ahead.is_none()));
    }

    #[test]
    fn no_class_leaves_its_threads_unwatched_by_default() {
        let vhost = thread(3, ThreadRole::Vhost, Policy::BULK);
        let knob = Knob::ThreadPolicy { thread: vhost.id, comm: vhost.comm.clone() };
        let sends = Value::Policy(PriorityTable::SHARED_SENDER);
        let by_vatc = Setting::new(RuleId::RtTxQueue, Stage::Place, knob, sends);
        let plan = Plan { settings: vec![by_vatc], ..Plan::default() };
        let kernel = Share::new(0.9).unwrap();
        for (class, share, rank) in
            [(Class::Bulk, kernel, Rank::Poller), (Class::Rt(Level::HIGHEST), Share::NINETY_FIVE, Rank::Backend)]
        {
            let tenants = [tenant(class, vec![vhost.clone()])];
            let all = Watches::of(&plan, &tenants, &Intent::default(), kernel).list;
            let of: Vec<_> = all.iter().map(|watch| (watch.share, watch.rank)).collect();
            assert_eq!(of, [(share, rank)], "{class}");
        }
        // A policy that a container's program has chosen itself.
        let own = [tenant(Class::Bulk, vec![thread(2, ThreadRole::Container, Policy::Rr(5))])];
        let all = Watches::of(&Plan::default(), &own, &Intent::default(), kernel).list;
        assert_eq!((all[0].share, all[0].rank), (kernel, Rank::Guest));
    }

    #[test]
    fn threads_that_call_themselves_one_vcpu_have_one_cap_together() {
        let rt = Class::Rt(Level::HIGHEST);
        let vcpu = |tid, number| thread(tid, ThreadRole::Vcpu(number), Policy::BULK);
        let mut threads: Vec<_> = (10..110).map(|tid| vcpu(tid, 0)).collect();
        threads.extend([vcpu(2, 1), vcpu(3, 2), thread(4, ThreadRole::Vhost, Policy::BULK)]);
        let mut vm = tenant(rt, threads);
        vm.runtime_cap = 0.5;
        let all = Watches::of(&Plan::default(), &[vm.clone()], &Intent::default(), Share::NINETY_FIVE).list;
        let of = |tid: i32| all.iter().find(|watch| watch.id.tid == tid).unwrap().share;
        assert_eq!(of(10), Share::new(0.005).unwrap());
        assert!([2, 3, 4].map(of) == [Share::HALF; 3]);
        // However many there are, each has a cap.
        vm.runtime_cap = RuntimeCap::LEAST;
        let all = Watches::of(&Plan::default(), &[vm], &Intent::default(), Share::NINETY_FIVE).list;
        assert!(all.iter().all(|watch| watch.share == Share::new(RuntimeCap::LEAST).unwrap()));
    }

    #[test]
    fn threads_that_serve_all_vcpus_of_a_reservation_may_take_what_is_reserved_for_all() {
        let roles = [
            ThreadRole::Vcpu(0),
            ThreadRole::Vcpu(1),
            ThreadRole::Container,
            ThreadRole::Vhost,
            ThreadRole::Iothread,
            ThreadRole::Emulator,
            ThreadRole::KvmPit,
            ThreadRole::Device,
        ];
        let threads = (2..).zip(roles).map(|(tid, role)| thread(tid, role, Policy::Fifo(5))).collect();
        let mut vm = tenant(Class::Rt(Level::HIGHEST), threads);
        for (cap, vcpus, of_devices) in [(0.25, 3, 0.75), (0.25, 1, 0.25), (0.5, 256, 0.95), (1.0, 2, 1.0)] {
            vm.runtime_cap = cap;
            vm.class_source = ClassSource::Reservation { name: "r".to_owned(), vcpus };
            let all = Watches::of(&Plan::default(), &[vm.clone()], &Intent::default(), Share::NINETY_FIVE).list;
            let shares: Vec<Share> = all.iter().map(|watch| watch.share).collect();
            let [own, devices] = [cap, of_devices].map(|share| Share::new(share).unwrap());
            assert_eq!(shares, [own, own, own, devices, devices, devices, devices, devices], "{cap} x {vcpus}");
            let together = SharedCap { reservation: "r".to_owned(), share: own.times(vcpus) };
            let shared: Vec<bool> = all.iter().map(|watch| watch.shared.as_ref() == Some(&together)).collect();
            assert_eq!(shared, [true, true, true, false, false, false, false, false]);
        }
        // A reservation of a class alone has no CPU time that threads could share.
        vm.class_source = ClassSource::Reservation { name: "r".to_owned(), vcpus: 0 };
        let all = Watches::of(&Plan::default(), &[vm], &Intent::default(), Share::NINETY_FIVE).list;
        assert!(all.iter().all(|watch| watch.shared.is_none()));
    }

    #[test]
    fn what_one_tenant_has_too_much_of_takes_no_place_from_another() {
        let rt = Class::Rt(Level::HIGHEST);
        let many = |class, from: i32, count: i32, policy| {
            let role = if class == rt { ThreadRole::Vhost } else { ThreadRole::Container };
            tenant(class, (from..from + count).map(|tid| thread(tid, role, policy)).collect())
        };
        let tenants = || {
            vec![
                many(Class::Bulk, 1000, 5000, Policy::Fifo(1)),
                many(rt, 1, 20, Policy::BULK),
                many(rt, 100, 300, Policy::BULK),
                many(Class::Bulk, 10_000, 9000, Policy::BULK),
            ]
        };
        let left = |tenants: &[Tenant]| tenants.iter().map(|tenant| tenant.threads.len()).collect::<Vec<_>>();
        let table = PriorityTable::default();
        let mut limited = tenants();
        let excess = limit(&mut limited, table, 4096, 1024);
        assert_eq!(left(&limited), [1024, 20, 300, 9000], "threads without real-time priority take no place");
        assert_eq!(excess.iter().map(|of| of.threads.len()).collect::<Vec<_>>(), [3976]);
        // A pool that is too small for all is divided.
        let mut limited = tenants();
        let excess = limit(&mut limited, table, 300, 1024);
        assert_eq!(left(&limited), [140, 20, 140, 9000]);
        assert_eq!(excess.iter().map(|of| of.threads.len()).collect::<Vec<_>>(), [4860, 160]);
        // Threads with a place in the table come first.
        let mut raised = [many(rt, 1, 30, Policy::BULK)];
        raised[0].threads.splice(0..0, (100..120).map(|tid| thread(tid, ThreadRole::Iothread, Policy::Fifo(9))));
        let excess = limit(&mut raised, table, 4096, 30);
        assert!(excess[0].threads.iter().map(|id| id.tid).eq(100..120) && raised[0].threads.len() == 30);
        let mut limited = tenants();
        assert!(limit(&mut limited, table, 9000, 5000).is_empty() && limited == tenants());
    }

    #[test]
    fn who_tells_of_interrupts_is_watched_but_goes_on() {
        let teller = thread(9, ThreadRole::Emulator, Policy::Fifo(1)).id;
        let knob = Knob::ThreadPolicy { thread: teller, comm: "irq_work/0".to_owned() };
        let place = Value::Policy(PriorityTable::default().teller());
        let plan = Plan {
            settings: vec![Setting::new(RuleId::InterruptContext, Stage::Place, knob, place)],
            ..Plan::default()
        };
        let all = Watches::of(&plan, &[], &Intent::default(), Share::NINETY_FIVE);
        assert_eq!(all.list.iter().map(|watch| (watch.id, watch.rank)).collect::<Vec<_>>(), [(teller, Rank::Teller)]);
    }

    #[test]
    fn who_is_paused_or_ahead_has_not_drifted() {
        let rt = Class::Rt(Level::HIGHEST);
        let tenants = [tenant(rt, vec![thread(2, ThreadRole::Vcpu(0), Policy::BULK)])];
        let moved = |method| {
            let intent = Intent { method, tenants: tenants.to_vec(), ..Intent::default() };
            let plan = ontime_hostnet::plan(&ontime_hostnet::Inventory::default(), &intent);
            let watches = Watches::of(&plan, &tenants, &intent, Share::NINETY_FIVE);
            let id = tenants[0].threads[0].id;
            [Policy::Idle, Policy::Fifo(47), Policy::Fifo(46), Policy::BULK]
                .map(|read| watches.moved(id, &read.to_string()))
        };
        assert_eq!(moved(Method::InterruptContext), [Some(Moved::Paused), Some(Moved::Ahead), None, None]);
        assert_eq!(moved(Method::Partitioned), [Some(Moved::Paused), None, None, None]);
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
