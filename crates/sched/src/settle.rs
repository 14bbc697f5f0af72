//! Which of the declared reservations hold on this host, for the VMs that run now. Pure.
//!
//! In: the configuration, the tenants, the CPUs online, what held before. Out: admitted vCPUs with what the planner needs,
//! and everybody refused with the reason. A VM is admitted whole or not at all. Who was admitted stays admitted whoever comes or goes, and
//! stays on its CPU if it may; among others the VM that started first is first.
//!
//! The reserve is kept on *each* CPU, not of all together: a thread of the kernel that is bound to a CPU has nowhere else to go. The
//! planner sees it as one more vCPU, pinned there, that nobody is.

use std::collections::{BTreeMap, BTreeSet};

use ontime_plan::{Admission, Admitted, Bandwidth, Nanos, Refusal, Reservation};
use ontime_tenants::{Class, CpuList, Tenant, TenantThread, ThreadId, ThreadRole};

use crate::backend::BackendKind;
use crate::config::SchedConfig;
use crate::guest::{self, Ask, Asks, GuestNeed};
use crate::published::Page;

/// What the planner's rounding takes of a CPU that a reserve and a vCPU share.
const ROUNDING_PPM: u64 = 12;

/// A vCPU with a reservation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reserved {
    /// Its thread.
    pub id: ThreadId,
    /// Its VM.
    pub tenant: String,
    /// The VM's class.
    pub class: Class,
    /// Its number in the VM.
    pub vcpu: u32,
    /// CPU time in each period.
    pub budget: Nanos,
    /// The period.
    pub period: Nanos,
    /// Budget over period.
    pub bandwidth: Bandwidth,
    /// What of that its guest's deadline tasks asked for.
    pub guest: Option<GuestNeed>,
    /// Where these publish their next deadlines.
    pub page: Option<Page>,
    /// The CPU that the plan keeps it on, an index of [`Settled::cpus`]; None if it may wrap.
    pub home: Option<u32>,
}

/// A VM whose reservation does not hold.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refused {
    /// The VM.
    pub tenant: String,
    /// Why, and what to do.
    pub why: String,
}

/// What holds.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Settled {
    /// In the order of admission.
    pub vcpus: Vec<Reserved>,
    /// Whose does not.
    pub refused: Vec<Refused>,
    /// The host's CPUs for reservations, by number; the planner calls them 0, 1, 2...
    pub cpus: Vec<u32>,
    /// Of each of these: whether vCPUs without a home run there.
    pub shared: Vec<bool>,
    /// What is kept of each for others.
    pub reserve: Bandwidth,
}

impl Settled {
    /// What is reserved in all, in CPUs.
    pub fn total(&self) -> Bandwidth {
        self.vcpus.iter().map(|vcpu| vcpu.bandwidth).sum()
    }

    /// The host's CPU that the plan keeps one of its vCPUs on; None if it may wrap.
    pub fn cpu(&self, vcpu: &Reserved) -> Option<u32> {
        self.cpus.get(usize::try_from(vcpu.home?).ok()?).copied()
    }

    /// Refuses each VM with a vCPU that is not `held`, whole.
    pub fn keep_only(&mut self, held: impl Fn(ThreadId) -> bool, why: &str) {
        let unheld = self.vcpus.iter().filter(|vcpu| !held(vcpu.id));
        let refused: BTreeSet<String> = unheld.map(|vcpu| vcpu.tenant.clone()).collect();
        self.vcpus.retain(|vcpu| !refused.contains(&vcpu.tenant));
        self.refused.extend(refused.into_iter().map(|tenant| Refused { tenant, why: why.to_owned() }));
    }

    /// Whether a guest has what it asks for.
    ///
    /// # Errors
    /// Why not.
    pub fn has(&self, tenant: &str, needs: &[GuestNeed]) -> Result<(), String> {
        let has = |need: &GuestNeed| {
            self.vcpus.iter().any(|vcpu| vcpu.tenant == tenant && vcpu.vcpu == need.vcpu && vcpu.guest == Some(*need))
        };
        if needs.iter().all(has) {
            return Ok(());
        }
        let refused = self.refused.iter().find(|refused| refused.tenant == tenant);
        Err(refused.map_or_else(|| "its VM is not there any more".to_owned(), |refused| refused.why.clone()))
    }

    /// The threads.
    pub fn ids(&self) -> BTreeSet<ThreadId> {
        self.vcpus.iter().map(|vcpu| vcpu.id).collect()
    }
}

/// Settles whose reservations hold. Where what a guest asks for beside does not, its VM has what is declared, and is named all the same.
pub fn settle(config: &SchedConfig, tenants: &[Tenant], online: &CpuList, before: &Settled, asks: &Asks) -> Settled {
    let cpus: Vec<u32> =
        online.iter().filter(|cpu| config.cpus.as_ref().is_none_or(|only| only.contains(*cpu))).collect();
    let place = |cpu: u32| (0..).zip(&cpus).find(|(_, one)| **one == cpu).map(|(at, _)| at);
    let held: BTreeMap<ThreadId, Option<u32>> =
        before.vcpus.iter().map(|vcpu| (vcpu.id, before.cpu(vcpu).and_then(place))).collect();
    let mut settled = Settled { cpus, reserve: config.reserve, ..Settled::default() };
    let is_rt = |tenant: &&Tenant| tenant.class != Class::Bulk;
    let mut names: BTreeMap<&str, usize> = BTreeMap::new();
    for tenant in tenants.iter().filter(is_rt) {
        *names.entry(&tenant.name).or_default() += 1;
    }
    // Any user may start a process with any name: one of class bulk has no part in a name that an RT tenant has.
    let means = |tenant: &&Tenant| config.names(&tenant.name) && (is_rt(tenant) || !names.contains_key(&*tenant.name));
    let mut order: Vec<&Tenant> = tenants.iter().filter(means).collect();
    let is_new = |tenant: &Tenant| !tenant.threads.iter().any(|thread| held.contains_key(&thread.id));
    order.sort_by_key(|tenant| (is_new(tenant), tenant.process.start_time, tenant.process.pid));
    for tenant in order {
        let several = names.get(tenant.name.as_str()).is_some_and(|count| *count > 1);
        let mut admit = |ask: &Ask| {
            if several {
                return Err("several tenants have this name; give them different names".to_owned());
            }
            let asked = asked(config, tenant, &settled.cpus, &held, ask)?;
            admit(&mut settled, tenant, asked)
        };
        let nothing = Ask::default();
        let ask = asks.get(&tenant.name).unwrap_or(&nothing);
        let mut admitted = admit(ask);
        if let (Err(why), false) = (&mut admitted, ask.needs.is_empty()) {
            *why = match admit(&nothing) {
                Ok(()) => format!("its guest's deadline tasks: {why}"),
                Err(declared) => declared,
            };
        }
        if let Err(why) = admitted {
            settled.refused.push(Refused { tenant: tenant.name.clone(), why });
        }
    }
    settled
}

impl SchedConfig {
    fn names(&self, tenant: &str) -> bool {
        self.reservations.iter().any(|declared| declared.name == tenant)
    }
}

/// A vCPU of a VM that a reservation is declared for.
struct Asked {
    id: ThreadId,
    vcpu: u32,
    bandwidth: Bandwidth,
    period: Nanos,
    guest: Option<GuestNeed>,
    page: Option<Page>,
    /// The CPUs it may run on; None: all.
    affinity: Option<BTreeSet<u32>>,
    /// That of these which it had.
    home: Option<u32>,
}

fn asked(
    config: &SchedConfig,
    tenant: &Tenant,
    cpus: &[u32],
    held: &BTreeMap<ThreadId, Option<u32>>,
    ask: &Ask,
) -> Result<Vec<Asked>, String> {
    if tenant.class == Class::Bulk {
        // Who may have CPU time ahead of others is decided in one place, which knows who chose the VM's name.
        return Err(
            "it is of class bulk; reservations are for class rt: say so in tenants.toml or its metadata".to_owned()
        );
    }
    // The other back end does not read them.
    let page = ask.page.as_ref().filter(|_| config.backend != BackendKind::Deadline);
    let mut asked = Vec::new();
    for declared in config.reservations.iter().filter(|declared| declared.name == tenant.name) {
        let mut found = BTreeSet::new();
        for thread in &tenant.threads {
            let ThreadRole::Vcpu(number) = thread.role else { continue };
            if declared.vcpus.as_ref().is_some_and(|only| !only.contains(&number)) {
                continue;
            }
            if let Some(sched) = thread.libvirt.sched {
                return Err(format!(
                    "vCPU {number} has {sched} by the domain's <vcpusched>, which stays libvirt's; remove it"
                ));
            }
            found.insert(number);
            let affinity = affinity(number, thread, cpus)?;
            let had = held.get(&thread.id).copied().flatten();
            let mut one = Asked {
                id: thread.id,
                vcpu: number,
                bandwidth: declared.bandwidth,
                period: declared.period,
                guest: None,
                page: None,
                home: had.filter(|home| affinity.as_ref().is_some_and(|cpus| cpus.contains(home))),
                affinity,
            };
            if let Some(need) = ask.needs.iter().find(|need| need.vcpu == number) {
                let most = declared.deadlines.ok_or("`deadlines` in sched.toml does not allow it any")?;
                let (more, period) = guest::bandwidth(need, page.is_some()).ok_or_else(|| {
                    format!("vCPU {number} would need more than a CPU for {} in {}", need.budget, need.period)
                })?;
                if more > most {
                    return Err(format!(
                        "vCPU {number} needs {more} of a CPU for {} in {}, and `deadlines` in sched.toml allows it {most}",
                        need.budget, need.period
                    ));
                }
                if need.period < declared.deadline_period {
                    return Err(format!(
                        "vCPU {number} asks for a period of {}, and `deadline-period` in sched.toml allows {} at the least",
                        need.period, declared.deadline_period
                    ));
                }
                one.bandwidth = one.bandwidth + more;
                one.period = one.period.min(period);
                one.guest = Some(*need);
                one.page = page.cloned();
            }
            asked.push(one);
        }
        if let Some(missing) = declared.vcpus.iter().flatten().find(|number| !found.contains(number)) {
            return Err(format!("it has no vCPU {missing}; correct `vcpus`"));
        }
    }
    if let Some(need) = ask.needs.iter().find(|need| !asked.iter().any(|one| one.vcpu == need.vcpu)) {
        return Err(format!("vCPU {} has no reservation that its deadlines could be added to", need.vcpu));
    }
    if asked.is_empty() {
        return Err("it has no vCPU threads that are known; see `ontime ps`".to_owned());
    }
    Ok(asked)
}

/// As indices of `cpus`.
fn affinity(number: u32, thread: &TenantThread, cpus: &[u32]) -> Result<Option<BTreeSet<u32>>, String> {
    let allowed: CpuList = thread.affinity.parse().unwrap_or_default();
    let within: BTreeSet<u32> = (0..).zip(cpus).filter(|(_, cpu)| allowed.contains(**cpu)).map(|(at, _)| at).collect();
    if within.is_empty() {
        return Err(format!(
            "vCPU {number} may run on CPUs {} only, none of which is for reservations; widen its pinning, or `cpus` in sched.toml",
            thread.affinity
        ));
    }
    Ok((within.len() < cpus.len()).then_some(within))
}

fn admit(settled: &mut Settled, tenant: &Tenant, asked: Vec<Asked>) -> Result<(), String> {
    let mut all = settled.vcpus.clone();
    // A home once given stays: moving it is harmless to its own guarantee, but not to its caches, nor to who has a home on the other CPU.
    let only = |home: u32| BTreeSet::from([home]);
    let mut stay: Vec<Option<BTreeSet<u32>>> = settled.vcpus.iter().map(|vcpu| vcpu.home.map(only)).collect();
    let mut free = stay.clone();
    for one in asked {
        all.push(Reserved {
            id: one.id,
            tenant: tenant.name.clone(),
            class: tenant.class,
            vcpu: one.vcpu,
            budget: one.bandwidth.of(one.period),
            period: one.period,
            bandwidth: one.bandwidth,
            guest: one.guest,
            page: one.page,
            home: None,
        });
        stay.push(one.home.map(only).or_else(|| one.affinity.clone()));
        free.push(one.affinity);
    }
    let fit = |wishes| fit(settled.reserve, &settled.cpus, &all, wishes);
    let admitted = fit(&stay).or_else(|_| fit(&free))?;
    let mut homes = admitted.home.into_iter().skip(settled.cpus.len());
    for vcpu in &mut all {
        vcpu.home = homes.next().flatten();
    }
    settled.vcpus = all;
    settled.shared = admitted.shared;
    Ok(())
}

/// Admits the reserves of these CPUs and these vCPUs.
fn fit(
    reserve: Bandwidth,
    cpus: &[u32],
    vcpus: &[Reserved],
    wishes: &[Option<BTreeSet<u32>>],
) -> Result<Admitted, String> {
    let count = cpus.len();
    let number = u32::try_from(count).unwrap_or(u32::MAX);
    let name = |at: usize| vcpus.get(at).map_or_else(String::new, |one| format!("vCPU {} of {}", one.vcpu, one.tenant));
    let want = |vcpu: &Reserved, wish: &Option<BTreeSet<u32>>| Reservation {
        bandwidth: vcpu.bandwidth,
        affinity: wish.clone(),
    };
    let asked: Vec<Reservation> = vcpus.iter().zip(wishes).map(|(vcpu, wish)| want(vcpu, wish)).collect();
    let beside = reserve + Bandwidth::ppm(ROUNDING_PPM);
    if let Some(at) = vcpus.iter().position(|vcpu| vcpu.bandwidth + beside > Bandwidth::ONE) {
        return Err(format!(
            "{} asks for more of a CPU than is left beside the reserve ({reserve} of each CPU); ask for less, or reserve less",
            name(at)
        ));
    }
    let kept: Bandwidth = std::iter::repeat_n(reserve, count).sum();
    let total: Bandwidth = asked.iter().map(|ask| ask.bandwidth).sum();
    if total + kept > Bandwidth::cpus(count) {
        return Err(Refusal::Full { total, reserve: kept, cpus: number }.to_string());
    }
    let reserves = (0..number).map(|cpu| Reservation { bandwidth: reserve, affinity: Some(BTreeSet::from([cpu])) });
    let all: Vec<Reservation> = reserves.chain(asked).collect();
    Admission::new(number, Bandwidth::ZERO).admit(&all).map_err(|refusal| match refusal {
        Refusal::Affinity { vcpu, bandwidth } => match (vcpu.checked_sub(count), cpus.get(vcpu)) {
            (None, Some(cpu)) => format!(
                "CPU {cpu} would have less than its reserve ({reserve} of each CPU) left; widen the pinning to it"
            ),
            (at, _) => format!(
                "{} asks for {bandwidth} of a CPU, and no CPU that it may run on has that room; widen its pinning",
                name(at.unwrap_or_default())
            ),
        },
        // What is left of whole CPUs is less than rounding takes.
        Refusal::Full { .. } => "it would fill the CPUs to less than the planner's rounding (10 millionths of a CPU \
                                 for each vCPU); ask for a little less"
            .to_owned(),
        other => other.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use ontime_tenants::config::Text;
    use ontime_tenants::{ClassSource, Kind, Level, LibvirtTuning, Policy};

    use super::*;

    fn vm(name: &str, started: u64, vcpus: u32, affinity: &str) -> Tenant {
        let pid = i32::try_from(started).unwrap();
        let thread = |number: u32| TenantThread {
            id: ThreadId { pid, tid: pid * 100 + i32::try_from(number).unwrap(), start_time: started },
            role: ThreadRole::Vcpu(number),
            comm: format!("CPU {number}/KVM"),
            policy: Policy::BULK,
            affinity: affinity.to_owned(),
            last_cpu: 0,
            libvirt: LibvirtTuning::default(),
        };
        Tenant {
            name: name.to_owned(),
            uuid: None,
            kind: Kind::Qemu,
            owner: 0,
            process: ThreadId { pid, tid: pid, start_time: started },
            cgroup: None,
            class: Class::Rt(Level::HIGHEST),
            class_source: ClassSource::Default,
            runtime_cap: 0.95,
            threads: (0..vcpus).map(thread).collect(),
            vnics: Vec::new(),
        }
    }

    fn config(reservations: &[(&str, u64)]) -> SchedConfig {
        let mut config = SchedConfig::default();
        let one = |(name, budget): &(&str, u64)| {
            format!("[[reservation]]\nname = \"{name}\"\nbudget = \"{budget}us\"\nperiod = \"10ms\"\n")
        };
        let text: String = reservations.iter().map(one).collect();
        config.add(&Text::new("sched.toml", text)).unwrap();
        config
    }

    fn online(count: u32) -> CpuList {
        (0..count).collect()
    }

    fn who(settled: &Settled) -> Vec<(&str, u32)> {
        settled.vcpus.iter().map(|vcpu| (vcpu.tenant.as_str(), vcpu.vcpu)).collect()
    }

    #[test]
    fn the_one_that_does_not_fit_is_named_and_the_others_stay() {
        let config = config(&[("a", 3_000), ("b", 4_000), ("c", 3_000), ("d", 2_000)]);
        let tenants = [vm("c", 30, 1, "0"), vm("a", 10, 1, "0"), vm("b", 20, 1, "0"), vm("d", 40, 1, "0")];
        let settled = settle(&config, &tenants, &online(1), &Settled::default(), &Asks::new());
        assert_eq!(who(&settled), [("a", 0), ("b", 0), ("d", 0)]);
        assert_eq!(settled.refused.len(), 1);
        assert_eq!(settled.refused[0].tenant, "c");
        assert!(settled.refused[0].why.contains("1.000 CPUs asked, 0.050 kept for bulk"), "{:?}", settled.refused);
        // d came, c had been there before it: who holds a reservation keeps it.
        let before = settle(&config, &tenants[..1], &online(1), &Settled::default(), &Asks::new());
        let settled = settle(&config, &tenants, &online(1), &before, &Asks::new());
        assert_eq!(who(&settled), [("c", 0), ("a", 0), ("d", 0)]);
        assert_eq!(settled.refused[0].tenant, "b");
    }

    #[test]
    fn who_stays_has_its_cpu_when_another_ends() {
        let three = config(&[("v1", 4_500), ("v2", 5_000), ("v3", 4_500)]);
        let tenants = [vm("v1", 10, 1, "0-1"), vm("v2", 20, 1, "0-1"), vm("v3", 30, 1, "1")];
        let homes = |settled: &Settled| settled.vcpus.iter().map(|vcpu| settled.cpu(vcpu)).collect::<Vec<_>>();
        let mut settled = Settled::default();
        for some in 1..=3 {
            settled = settle(&three, &tenants[..some], &online(3), &settled, &Asks::new());
        }
        assert_eq!(homes(&settled), [Some(1), Some(0), Some(1)]);
        let rest = settle(&three, &tenants[1..], &online(3), &settled, &Asks::new());
        assert_eq!((homes(&rest), rest.refused), (vec![Some(0), Some(1)], vec![]));
        // CPU 0 goes: v2 may be on 1 only, with v1 or v3.
        let without = settle(&three, &tenants[1..], &[1, 2].into_iter().collect(), &settled, &Asks::new());
        assert_eq!((who(&without), homes(&without)), (vec![("v2", 0)], vec![Some(1)]));
        let why = &without.refused[0].why;
        assert!(why.contains("CPU 1 would have less than its reserve (0.050"), "{why}");

        // One that started before the other, and was declared after it.
        let two = config(&[("x", 6_000), ("y", 5_000)]);
        let tenants = [vm("x", 20, 1, "1"), vm("y", 10, 1, "0-1")];
        let first = settle(&two, &tenants[..1], &online(3), &Settled::default(), &Asks::new());
        let both = settle(&two, &tenants, &online(3), &first, &Asks::new());
        let again = settle(&two, &tenants, &online(3), &both, &Asks::new());
        assert_eq!(who(&again), [("y", 0), ("x", 0)]);
    }

    #[test]
    fn a_vm_is_admitted_whole_or_not_at_all_and_pins_are_honoured() {
        let config = config(&[("a", 6_000), ("b", 5_000)]);
        let tenants = [vm("a", 10, 2, "0-1"), vm("b", 20, 2, "1")];
        let settled = settle(&config, &tenants, &online(2), &Settled::default(), &Asks::new());
        assert_eq!(who(&settled), [("a", 0), ("a", 1)]);
        assert!(settled.refused[0].why.contains("more than the 2 there are"), "{:?}", settled.refused);
        let settled = settle(&config, &tenants[1..], &online(2), &Settled::default(), &Asks::new());
        assert!(settled.refused[0].why.contains("vCPU 1 of b asks for 0.500"), "{:?}", settled.refused);
        let settled = settle(&config, &tenants, &online(4), &Settled::default(), &Asks::new());
        assert_eq!(settled.refused.len(), 1, "both vCPUs of b need CPU 1: {settled:?}");
    }

    #[test]
    fn a_vm_with_a_vcpu_that_cannot_be_had_is_refused_whole() {
        let tenants = [vm("a", 10, 2, "0-1"), vm("b", 20, 2, "0-1")];
        let mut settled =
            settle(&config(&[("a", 1_000), ("b", 1_000)]), &tenants, &online(2), &Settled::default(), &Asks::new());
        let lost = settled.vcpus[1].id;
        settled.keep_only(|id| id != lost, "no room");
        assert_eq!(who(&settled), [("b", 0), ("b", 1)]);
        assert_eq!(settled.refused, [Refused { tenant: "a".to_owned(), why: "no room".to_owned() }]);
    }

    #[test]
    fn what_cannot_be_reserved_is_said() {
        let config = config(&[("a", 9_600), ("bulk", 100), ("twin", 100), ("lv", 100), ("far", 100)]);
        let bulk = Tenant { class: Class::Bulk, ..vm("bulk", 20, 1, "0") };
        let mut lv = vm("lv", 30, 1, "0");
        lv.threads[0].libvirt.sched = Some(Policy::Fifo(1));
        let tenants =
            [vm("a", 10, 1, "0"), bulk, vm("twin", 40, 1, "0"), vm("twin", 50, 1, "0"), lv, vm("far", 60, 1, "7")];
        let settled = settle(&config, &tenants, &online(2), &Settled::default(), &Asks::new());
        assert!(settled.vcpus.is_empty(), "{settled:?}");
        let why: Vec<&str> = settled.refused.iter().map(|refused| refused.why.as_str()).collect();
        for (why, word) in
            why.iter().zip(["beside the reserve", "class bulk", "<vcpusched>", "this name", "this name", "7 only"])
        {
            assert!(why.contains(word), "{why}\n{word}");
        }
        assert_eq!(why.len(), 6);
    }

    #[test]
    fn a_bulk_tenant_with_an_rt_ones_name_changes_nothing() {
        let config = config(&[("a", 4_000)]);
        let asks = Asks::new();
        let (rt, impostor) = (vm("a", 10, 1, "0"), Tenant { class: Class::Bulk, ..vm("a", 5, 1, "0") });
        let alone = settle(&config, std::slice::from_ref(&rt), &online(1), &Settled::default(), &asks);
        let beside = settle(&config, &[impostor, rt], &online(1), &alone, &asks);
        assert_eq!(who(&beside), [("a", 0)]);
        assert_eq!(beside, alone);
    }

    #[test]
    fn a_guest_has_what_fits_and_else_what_is_declared() {
        let mut config = config(&[("a", 1_000), ("b", 4_000)]);
        config.reservations[0].deadlines = Some(Bandwidth::ppm(700_000));
        let tenants = [vm("a", 10, 1, "0"), vm("b", 20, 1, "0")];
        let need =
            |vcpu, budget| GuestNeed { vcpu, budget: Nanos::from_micros(budget), period: Nanos::from_millis(20) };
        let settled = |vm: &str, needs: Vec<GuestNeed>| {
            let asks = Asks::from([(vm.to_owned(), Ask { needs, page: None })]);
            settle(&config, &tenants, &online(1), &Settled::default(), &asks)
        };
        let fits = settled("a", vec![need(0, 6_000)]);
        assert!(fits.refused.is_empty(), "{fits:?}");
        assert_eq!(fits.vcpus[0].guest, Some(need(0, 6_000)));
        assert_eq!((fits.vcpus[0].period, fits.vcpus[0].budget.0 / 1_000), (Nanos::from_micros(2_500), 1_143));
        assert_eq!(settled("a", vec![]), settle(&config, &tenants, &online(1), &Settled::default(), &Asks::new()));
        for (vm, needs, why) in [
            ("a", vec![need(0, 14_000)], "`deadlines` in sched.toml allows it 0.700"),
            ("b", vec![need(0, 1_000)], "does not allow it any"),
            (
                "a",
                vec![GuestNeed { budget: Nanos(10_000), period: Nanos::from_millis(3), ..need(0, 0) }],
                "asks for a period of 3 ms, and `deadline-period` in sched.toml allows 4 ms at the least",
            ),
            ("a", vec![need(1, 1_000)], "vCPU 1 has no reservation"),
            ("a", vec![GuestNeed { budget: Nanos(2), period: Nanos(1), ..need(0, 0) }], "more than a CPU"),
        ] {
            let settled = settled(vm, needs);
            let refused = settled.refused.iter().find(|refused| refused.tenant == vm).unwrap();
            assert!(refused.why.contains(why) && refused.why.contains("deadline tasks"), "{refused:?}");
            assert_eq!(who(&settled), [("a", 0), ("b", 0)], "what is declared holds all the same");
        }
        // Among all: a's guest would take what b has; the daemon refuses that (`guest_asks`).
        let full = settled("a", vec![need(0, 10_000)]);
        assert_eq!(full.refused[0].tenant, "b");
    }

    #[test]
    fn what_a_guest_publishes_counts_for_who_reads_it() {
        let memory = std::fs::File::from(rustix::fs::memfd_create("vm", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        memory.set_len(8_192).unwrap();
        let Ok(page) = Page::new(memory, 0) else {
            println!("SKIPPED: memory may be swapped out here");
            return;
        };
        let needs = vec![GuestNeed { vcpu: 0, budget: Nanos::from_micros(6_000), period: Nanos::from_millis(20) }];
        let asks = Asks::from([("a".to_owned(), Ask { needs, page: Some(page.clone()) })]);
        for (backend, read) in [(BackendKind::Paced, true), (BackendKind::DpWrap, true), (BackendKind::Deadline, false)]
        {
            let mut config = SchedConfig { backend, ..config(&[("a", 1_000)]) };
            config.reservations[0].deadlines = Some(Bandwidth::ppm(700_000));
            let settled = settle(&config, &[vm("a", 10, 1, "0")], &online(1), &Settled::default(), &asks);
            assert_eq!(settled.vcpus[0].page, read.then(|| page.clone()), "{backend:?}");
            let exact = settled.vcpus[0].bandwidth == Bandwidth::ppm(400_000);
            assert_eq!(exact, read, "{backend:?}: {:?}", settled.vcpus[0].bandwidth);
        }
    }

    #[test]
    fn a_cpu_that_goes_offline_takes_the_reservation_that_does_not_fit_and_gives_it_back() {
        let config = config(&[("a", 6_000), ("b", 5_000)]);
        let tenants = [vm("a", 10, 1, "0-1"), vm("b", 20, 1, "0-1")];
        let both = settle(&config, &tenants, &online(2), &Settled::default(), &Asks::new());
        assert_eq!(who(&both), [("a", 0), ("b", 0)]);
        let one = settle(&config, &tenants, &online(1), &both, &Asks::new());
        assert_eq!((who(&one), one.cpus.as_slice()), (vec![("a", 0)], &[0][..]));
        assert_eq!(one.refused[0].tenant, "b");
        assert_eq!(settle(&config, &tenants, &online(2), &one, &Asks::new()), both);
        // A number in the middle that goes: the planner's numbers are still 0 and 1.
        let gap = settle(&config, &tenants, &[0, 2].into_iter().collect(), &both, &Asks::new());
        assert_eq!((gap.vcpus.len(), gap.cpus.as_slice()), (1, &[0, 2][..]), "both are pinned to 0-1: {gap:?}");
    }

    #[test]
    fn with_no_cpu_left_everybody_is_refused() {
        let mut config = config(&[("a", 100)]);
        config.cpus = Some([9].into_iter().collect());
        let settled = settle(&config, &[vm("a", 10, 1, "0")], &online(1), &Settled::default(), &Asks::new());
        assert!(settled.vcpus.is_empty() && settled.refused.len() == 1, "{settled:?}");
    }
}
