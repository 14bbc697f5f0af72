//! Which VMs are admitted, and on which CPUs.

use ontime_tenants::config::Text;
use ontime_tenants::{ClassSource, Kind, Level, LibvirtTuning, Policy};
use proptest::prelude::*;

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
        attached: Vec::new(),
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
    // d came when c had a reservation: c keeps it.
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
    // CPU 0 goes away. v2 may run on CPU 1 only, together with v1 or v3.
    let without = settle(&three, &tenants[1..], &[1, 2].into_iter().collect(), &settled, &Asks::new());
    assert_eq!((who(&without), homes(&without)), (vec![("v2", 0)], vec![Some(1)]));
    let why = &without.refused[0].why;
    assert!(why.contains("CPU 1 would have less than its reserve (0.050"), "{why}");

    // y started before x, and is declared after it.
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
    let need = |vcpu, budget| GuestNeed { vcpu, budget: Nanos::from_micros(budget), period: Nanos::from_millis(20) };
    let settled = |vm: &str, needs: Vec<GuestNeed>| {
        let asks = Asks::from([(vm.to_owned(), Ask { needs, ..Ask::default() })]);
        settle(&config, &tenants, &online(1), &Settled::default(), &asks)
    };
    let fits = settled("a", vec![need(0, 6_000)]);
    assert!(fits.refused.is_empty(), "{fits:?}");
    assert_eq!(fits.vcpus[0].guest, Some(need(0, 6_000)));
    assert_eq!((fits.vcpus[0].period, fits.vcpus[0].budget.0 / 1_000), (Nanos::from_micros(2_500), 1_143));
    assert_eq!(settled("a", vec![]), settle(&config, &tenants, &online(1), &Settled::default(), &Asks::new()));
    for (vm, needs, why) in [
        ("a", vec![need(0, 14_000)], "`deadlines` in sched.toml allows it 0.700"),
        ("a", vec![need(0, 14_000)], "; raise that, or ask for less in the guest"),
        ("b", vec![need(0, 1_000)], "has no `deadlines`: set the share"),
        (
            "a",
            vec![GuestNeed { budget: Nanos(10_000), period: Nanos::from_millis(3), ..need(0, 0) }],
            "asks for a period of 3 ms, and `deadline-period` in sched.toml allows 4 ms at the least",
        ),
        (
            "a",
            vec![need(1, 1_000)],
            "vCPU 1 has no reservation that its deadlines could be added to; name the vCPU in `vcpus`",
        ),
        (
            "a",
            vec![GuestNeed { budget: Nanos(2), period: Nanos(1), ..need(0, 0) }],
            "more than a CPU for 2 ns in 1 ns; ask for less",
        ),
    ] {
        let settled = settled(vm, needs);
        let refused = settled.refused.iter().find(|refused| refused.tenant == vm).unwrap();
        assert!(refused.why.contains(why) && refused.why.contains("deadline tasks"), "{refused:?}");
        assert_eq!(who(&settled), [("a", 0), ("b", 0)], "what is declared holds all the same");
    }
    // In an admission of all, a's guest would take the time of b; the daemon refuses that (`guest_asks`).
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
    let asks = Asks::from([("a".to_owned(), Ask { needs, page: Some(page.clone()), published: true, taking: None })]);
    for (backend, read) in [(BackendKind::Paced, true), (BackendKind::DpWrap, true), (BackendKind::Deadline, false)] {
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
    // A CPU in the middle goes away: the planner's numbers are still 0 and 1.
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

/// After a restart of the daemon. Otherwise v3 would be on CPU 0 by best fit, and VMs would be in the order of their
/// start.
#[test]
fn who_held_a_reservation_holds_it_where_it_was() {
    let config = config(&[("v1", 4_500), ("v2", 5_000), ("v3", 4_000), ("v4", 4_000)]);
    let tenants = [vm("v1", 10, 1, "0-1"), vm("v2", 20, 1, "0-1"), vm("v3", 30, 1, "0-1"), vm("v4", 40, 1, "1")];
    let some = |names: &[&str]| -> Vec<Tenant> {
        tenants.iter().filter(|vm| names.contains(&vm.name.as_str())).cloned().collect()
    };
    let settled = |names: &[&str], before: &Settled| settle(&config, &some(names), &online(3), before, &Asks::new());
    let mut before = Settled::default();
    for names in [&["v2"][..], &["v2", "v3"], &["v2", "v3", "v4"], &["v3", "v4"], &["v1", "v3", "v4"]] {
        before = settled(names, &before);
    }
    let restarted = Settled::remembered(&before.held());
    let names = ["v1", "v3", "v4"];
    let homes = |settled: &Settled| {
        let mut homes: Vec<_> = settled.vcpus.iter().map(|vcpu| (vcpu.tenant.clone(), settled.cpu(vcpu))).collect();
        homes.sort();
        (homes, settled.refused.clone())
    };
    assert_eq!(homes(&settled(&names, &restarted)), homes(&before));
    assert_ne!(homes(&settled(&names, &Settled::default())), homes(&before), "it makes a difference");
    assert!(Settled::remembered(&[]) == Settled::default());
}

proptest! {
    #[test]
    fn all_at_once_is_as_one_after_the_other(
        vms in proptest::collection::vec((1u64..1_400, 1u32..4, 0usize..6), 0..8),
        cpus in 1u32..5,
        some in 0usize..8,
    ) {
        let names: Vec<String> = (0..vms.len()).map(|n| format!("vm{n}")).collect();
        let reservations: Vec<(&str, u64)> =
            names.iter().zip(&vms).map(|(name, (budget, ..))| (name.as_str(), *budget * 5)).collect();
        let config = config(&reservations);
        let affinities = ["0-7", "0-7", "0-1", "1-3", "0", "2"];
        let tenants: Vec<Tenant> = names
            .iter()
            .zip(&vms)
            .zip(1..)
            .map(|((name, (_, vcpus, affinity)), started)| vm(name, started, *vcpus, affinities[*affinity]))
            .collect();
        let settled = |tenants: &[Tenant], before: &Settled| {
            let [quick, slow] = [at_once as Quick, |_, _| false]
                .map(|quick| settle_by(quick, &config, tenants, &online(cpus), before, &Asks::new()));
            (quick, slow)
        };
        let (some, slow) = settled(&tenants[..some.min(tenants.len())], &Settled::default());
        prop_assert_eq!(&some, &slow);
        let (all, slow) = settled(&tenants, &some);
        prop_assert_eq!(&all, &slow);
        let (again, slow) = settled(&tenants, &all);
        prop_assert_eq!(&again, &slow);
    }
}
