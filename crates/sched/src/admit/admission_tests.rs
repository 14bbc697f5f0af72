//! Which VMs are admitted, and on which CPUs.

use ontime_plan::{Bandwidth, Nanos};
use ontime_tenants::config::Text;
use ontime_tenants::{Kind, Level, LibvirtTuning, Namer, Policy, TenantThread};
use proptest::prelude::*;

use super::*;
use crate::admit::fit::Capacity;
use crate::admit::pacing::{self, Source};
use crate::admit::request::GuestNeed;
use crate::guest_page::Page;
use crate::model::Pacing;

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
        namer: Namer::User(0),
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

fn online(count: u32) -> CpuSet {
    (0..count).collect()
}

fn admitted_vcpus(reservations: &Reservations) -> Vec<(&str, u32)> {
    reservations.vcpus.iter().map(|vcpu| (vcpu.tenant.as_str(), vcpu.vcpu)).collect()
}

#[test]
fn a_container_of_a_vms_name_does_not_take_its_reservation() {
    let pod = Tenant { kind: Kind::Container, threads: Vec::new(), ..vm("web", 1, 0, "0-3") };
    let (config, tenants) = (config(&[("web", 3_000)]), [pod, vm("web", 2, 1, "0-3")]);
    let reservations = admit(&config, &tenants, &online(4), &Reservations::default(), &Asks::new());
    assert_eq!(admitted_vcpus(&reservations), [("web", 0)]);
    assert!(reservations.refused.is_empty(), "{:?}", reservations.refused);
}

#[test]
fn a_vm_that_does_not_fit_is_named_and_the_others_stay() {
    let config = config(&[("a", 3_000), ("b", 4_000), ("c", 3_000), ("d", 2_000)]);
    let tenants = [vm("c", 30, 1, "0"), vm("a", 10, 1, "0"), vm("b", 20, 1, "0"), vm("d", 40, 1, "0")];
    let reservations = admit(&config, &tenants, &online(1), &Reservations::default(), &Asks::new());
    assert_eq!(admitted_vcpus(&reservations), [("a", 0), ("b", 0), ("d", 0)]);
    assert_eq!(reservations.refused.len(), 1);
    assert_eq!(reservations.refused[0].tenant, "c");
    assert!(
        reservations.refused[0].why.contains("1.000 CPUs asked, 0.050 kept for bulk"),
        "{:?}",
        reservations.refused
    );
    // d came when c had a reservation: c keeps it.
    let before = admit(&config, &tenants[..1], &online(1), &Reservations::default(), &Asks::new());
    let reservations = admit(&config, &tenants, &online(1), &before, &Asks::new());
    assert_eq!(admitted_vcpus(&reservations), [("c", 0), ("a", 0), ("d", 0)]);
    assert_eq!(reservations.refused[0].tenant, "b");
}

#[test]
fn remaining_vcpus_keep_their_cpus_when_another_vm_ends() {
    let three = config(&[("v1", 4_500), ("v2", 5_000), ("v3", 4_500)]);
    let tenants = [vm("v1", 10, 1, "0-1"), vm("v2", 20, 1, "0-1"), vm("v3", 30, 1, "1")];
    let homes =
        |reservations: &Reservations| reservations.vcpus.iter().map(|vcpu| reservations.cpu(vcpu)).collect::<Vec<_>>();
    let mut reservations = Reservations::default();
    for some in 1..=3 {
        reservations = admit(&three, &tenants[..some], &online(3), &reservations, &Asks::new());
    }
    assert_eq!(homes(&reservations), [Some(1), Some(0), Some(1)]);
    let rest = admit(&three, &tenants[1..], &online(3), &reservations, &Asks::new());
    assert_eq!((homes(&rest), rest.refused), (vec![Some(0), Some(1)], vec![]));
    // CPU 0 goes away. v2 may run on CPU 1 only, together with v1 or v3.
    let without = admit(&three, &tenants[1..], &[1, 2].into_iter().collect(), &reservations, &Asks::new());
    assert_eq!((admitted_vcpus(&without), homes(&without)), (vec![("v2", 0)], vec![Some(1)]));
    let why = &without.refused[0].why;
    assert!(why.contains("CPU 1 would have less than its reserve (0.050"), "{why}");

    // y started before x, and is declared after it.
    let two = config(&[("x", 6_000), ("y", 5_000)]);
    let tenants = [vm("x", 20, 1, "1"), vm("y", 10, 1, "0-1")];
    let first = admit(&two, &tenants[..1], &online(3), &Reservations::default(), &Asks::new());
    let both = admit(&two, &tenants, &online(3), &first, &Asks::new());
    let again = admit(&two, &tenants, &online(3), &both, &Asks::new());
    assert_eq!(admitted_vcpus(&again), [("y", 0), ("x", 0)]);
}

#[test]
fn a_vm_is_admitted_whole_or_not_at_all_and_pins_are_honoured() {
    let config = config(&[("a", 6_000), ("b", 5_000)]);
    let tenants = [vm("a", 10, 2, "0-1"), vm("b", 20, 2, "1")];
    let reservations = admit(&config, &tenants, &online(2), &Reservations::default(), &Asks::new());
    assert_eq!(admitted_vcpus(&reservations), [("a", 0), ("a", 1)]);
    assert!(reservations.refused[0].why.contains("more than the 2 there are"), "{:?}", reservations.refused);
    let reservations = admit(&config, &tenants[1..], &online(2), &Reservations::default(), &Asks::new());
    assert!(reservations.refused[0].why.contains("vCPU 1 of b asks for 0.500"), "{:?}", reservations.refused);
    let reservations = admit(&config, &tenants, &online(4), &Reservations::default(), &Asks::new());
    assert_eq!(reservations.refused.len(), 1, "both vCPUs of b need CPU 1: {reservations:?}");
}

/// Twelve VMs with 20 us in 1.5 ms fill a sixth of the CPU; their windows would take most of the rest.
#[test]
fn the_pacers_time_is_admitted_with_the_reservations() {
    let names: Vec<String> = (0..12).map(|number| format!("v{number}")).collect();
    let tenants: Vec<Tenant> = names.iter().zip(1..).map(|(name, started)| vm(name, started, 1, "0-1")).collect();
    let text = |backend: &str| {
        let one =
            |name: &String| format!("[[reservation]]\nname = \"{name}\"\nbudget = \"20us\"\nperiod = \"1500us\"\n");
        let mut config = SchedConfig::default();
        let all = format!("backend = \"{backend}\"\n{}", names.iter().map(one).collect::<String>());
        config.add(&Text::new("sched.toml", all)).unwrap();
        config
    };
    let admitted = |backend: &str| {
        let reservations = admit(&text(backend), &tenants, &online(1), &Reservations::default(), &Asks::new());
        let pacers = |count: usize| {
            let on = Reservations { pacing: Pacing::Best, ..reservations.clone() };
            pacing::check(
                &on,
                &reservations.vcpus[..count],
                &[],
                &vec![None; count],
                Source::Unreserved,
                Present::default(),
            )
        };
        assert_eq!(pacers(reservations.vcpus.len()), Ok(()), "{backend}");
        reservations
    };
    let paced = admitted("paced");
    assert!((6..12).contains(&paced.vcpus.len()), "{:?}", paced.vcpus.len());
    let why = &paced.refused.last().unwrap().why;
    assert!(why.contains("windows a second") && why.contains("the shortest period is 1.5 ms, of vCPU 0 of v"), "{why}");
    let without = admit(&text("deadline"), &tenants, &online(1), &Reservations::default(), &Asks::new());
    assert!(without.refused.is_empty(), "SCHED_DEADLINE needs no pacer: {:?}", without.refused);
    // What was admitted stays so.
    let again = admit(&text("paced"), &tenants, &online(1), &paced, &Asks::new());
    assert_eq!(admitted_vcpus(&again), admitted_vcpus(&paced));
}

#[test]
fn a_vm_with_a_vcpu_that_cannot_be_had_is_refused_whole() {
    let tenants = [vm("a", 10, 2, "0-1"), vm("b", 20, 2, "0-1")];
    let mut reservations =
        admit(&config(&[("a", 1_000), ("b", 1_000)]), &tenants, &online(2), &Reservations::default(), &Asks::new());
    let lost = reservations.vcpus[1].id;
    reservations.keep_only(|id| id != lost, "no room");
    assert_eq!(admitted_vcpus(&reservations), [("b", 0), ("b", 1)]);
    assert_eq!(reservations.refused, [Refused { tenant: "a".to_owned(), why: "no room".to_owned() }]);
}

#[test]
fn what_cannot_be_reserved_is_said() {
    let config = config(&[("a", 9_600), ("bulk", 100), ("twin", 100), ("lv", 100), ("far", 100)]);
    let bulk = Tenant { class: Class::Bulk, ..vm("bulk", 20, 1, "0") };
    let mut lv = vm("lv", 30, 1, "0");
    lv.threads[0].libvirt.sched = Some(Policy::Fifo(1));
    let tenants =
        [vm("a", 10, 1, "0"), bulk, vm("twin", 40, 1, "0"), vm("twin", 50, 1, "0"), lv, vm("far", 60, 1, "7")];
    let reservations = admit(&config, &tenants, &online(2), &Reservations::default(), &Asks::new());
    assert!(reservations.vcpus.is_empty(), "{reservations:?}");
    let why: Vec<&str> = reservations.refused.iter().map(|refused| refused.why.as_str()).collect();
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
    let alone = admit(&config, std::slice::from_ref(&rt), &online(1), &Reservations::default(), &asks);
    let beside = admit(&config, &[impostor, rt], &online(1), &alone, &asks);
    assert_eq!(admitted_vcpus(&beside), [("a", 0)]);
    assert_eq!(beside, alone);
}

#[test]
fn a_guest_has_what_fits_and_else_what_is_declared() {
    let mut config = config(&[("a", 1_000), ("b", 4_000)]);
    config.reservations[0].deadlines = Some(Bandwidth::ppm(700_000));
    let tenants = [vm("a", 10, 1, "0"), vm("b", 20, 1, "0")];
    let need = |vcpu, budget| GuestNeed { vcpu, budget: Nanos::from_micros(budget), period: Nanos::from_millis(20) };
    let reservations = |vm: &str, needs: Vec<GuestNeed>| {
        let asks = Asks::from([(vm.to_owned(), Ask { needs, ..Ask::default() })]);
        admit(&config, &tenants, &online(1), &Reservations::default(), &asks)
    };
    let fits = reservations("a", vec![need(0, 6_000)]);
    assert!(fits.refused.is_empty(), "{fits:?}");
    assert_eq!(fits.vcpus[0].guest, Some(need(0, 6_000)));
    assert_eq!((fits.vcpus[0].period, fits.vcpus[0].budget.0 / 1_000), (Nanos::from_micros(2_500), 1_143));
    assert_eq!(reservations("a", vec![]), admit(&config, &tenants, &online(1), &Reservations::default(), &Asks::new()));
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
        let reservations = reservations(vm, needs);
        let refused = reservations.refused.iter().find(|refused| refused.tenant == vm).unwrap();
        assert!(refused.why.contains(why) && refused.why.contains("deadline tasks"), "{refused:?}");
        assert_eq!(admitted_vcpus(&reservations), [("a", 0), ("b", 0)], "what is declared holds all the same");
    }
    // In an admission of all, a's guest would take the time of b; the daemon refuses that (`guest_asks`).
    let full = reservations("a", vec![need(0, 10_000)]);
    assert_eq!(full.refused[0].tenant, "b");
}

#[test]
fn published_deadlines_count_only_for_back_ends_that_read_them() {
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
        let reservations = admit(&config, &[vm("a", 10, 1, "0")], &online(1), &Reservations::default(), &asks);
        assert_eq!(reservations.vcpus[0].page, read.then(|| page.clone()), "{backend:?}");
        let exact = reservations.vcpus[0].bandwidth == Bandwidth::ppm(400_000);
        assert_eq!(exact, read, "{backend:?}: {:?}", reservations.vcpus[0].bandwidth);
    }
}

#[test]
fn a_cpu_that_goes_offline_takes_the_reservation_that_does_not_fit_and_gives_it_back() {
    let config = config(&[("a", 6_000), ("b", 5_000)]);
    let tenants = [vm("a", 10, 1, "0-1"), vm("b", 20, 1, "0-1")];
    let both = admit(&config, &tenants, &online(2), &Reservations::default(), &Asks::new());
    assert_eq!(admitted_vcpus(&both), [("a", 0), ("b", 0)]);
    let one = admit(&config, &tenants, &online(1), &both, &Asks::new());
    assert_eq!((admitted_vcpus(&one), one.cpus.as_slice()), (vec![("a", 0)], &[0][..]));
    assert_eq!(one.refused[0].tenant, "b");
    assert_eq!(admit(&config, &tenants, &online(2), &one, &Asks::new()), both);
    // A CPU in the middle goes away: the planner's numbers are still 0 and 1.
    let gap = admit(&config, &tenants, &[0, 2].into_iter().collect(), &both, &Asks::new());
    assert_eq!((gap.vcpus.len(), gap.cpus.as_slice()), (1, &[0, 2][..]), "both are pinned to 0-1: {gap:?}");
}

#[test]
fn with_no_cpu_left_all_vms_are_refused() {
    let mut config = config(&[("a", 100)]);
    config.cpus = Some([9].into_iter().collect());
    let reservations = admit(&config, &[vm("a", 10, 1, "0")], &online(1), &Reservations::default(), &Asks::new());
    assert!(reservations.vcpus.is_empty() && reservations.refused.len() == 1, "{reservations:?}");
}

/// After a restart of the daemon. Otherwise v3 would be on CPU 0 by best fit, and VMs would be in the order of their
/// start.
#[test]
fn a_remembered_reservation_keeps_its_cpu() {
    let config = config(&[("v1", 4_500), ("v2", 5_000), ("v3", 4_000), ("v4", 4_000)]);
    let tenants = [vm("v1", 10, 1, "0-1"), vm("v2", 20, 1, "0-1"), vm("v3", 30, 1, "0-1"), vm("v4", 40, 1, "1")];
    let some = |names: &[&str]| -> Vec<Tenant> {
        tenants.iter().filter(|vm| names.contains(&vm.name.as_str())).cloned().collect()
    };
    let reservations =
        |names: &[&str], before: &Reservations| admit(&config, &some(names), &online(3), before, &Asks::new());
    let mut before = Reservations::default();
    for names in [&["v2"][..], &["v2", "v3"], &["v2", "v3", "v4"], &["v3", "v4"], &["v1", "v3", "v4"]] {
        before = reservations(names, &before);
    }
    let restarted = Reservations::remembered(&before.held());
    let names = ["v1", "v3", "v4"];
    let homes = |reservations: &Reservations| {
        let mut homes: Vec<_> =
            reservations.vcpus.iter().map(|vcpu| (vcpu.tenant.clone(), reservations.cpu(vcpu))).collect();
        homes.sort();
        (homes, reservations.refused.clone())
    };
    assert_eq!(homes(&reservations(&names, &restarted)), homes(&before));
    assert_ne!(homes(&reservations(&names, &Reservations::default())), homes(&before), "it makes a difference");
    assert!(Reservations::remembered(&[]) == Reservations::default());
}

/// Any user may give a VM any name.
#[test]
fn a_reservation_is_for_vms_of_root_and_of_its_user() {
    let named_by = |namer, started| Tenant { namer, ..vm("plc", started, 1, "0-1") };
    let [a, b] = [(1000, 20), (1001, 10)].map(|(user, started)| named_by(Namer::User(user), started));
    let [root, inside] = [named_by(Namer::User(0), 30), named_by(Namer::Container, 40)];
    let mut config = config(&[("plc", 4_000)]);
    let found = |config: &SchedConfig, tenants: &[&Tenant]| {
        let tenants: Vec<Tenant> = tenants.iter().copied().cloned().collect();
        let found = admit(config, &tenants, &online(2), &Reservations::default(), &Asks::new());
        let why: Vec<String> = found.refused.into_iter().map(|refused| refused.why).collect();
        (found.vcpus.iter().map(|vcpu| vcpu.id.pid).collect::<Vec<_>>(), why.join("; "))
    };
    let (admitted, why) = found(&config, &[&b]);
    assert!(admitted.is_empty() && why.contains("user 1001 named it") && why.contains("`user = 1001`"), "{why}");
    assert_eq!(found(&config, &[&root]), (vec![30], String::new()));
    config.reservations[0].user = Some(1000);
    for tenants in [&[&a][..], &[&a, &b], &[&b, &inside, &a]] {
        assert_eq!(found(&config, tenants), (vec![20], String::new()));
    }
    assert_eq!(found(&config, &[&root]), (vec![30], String::new()));
    for (tenant, word) in [(&b, "of root and user 1000"), (&inside, "named in a container")] {
        let (admitted, why) = found(&config, &[tenant]);
        assert!(admitted.is_empty() && why.contains(word), "{why}");
    }
}

/// A lease of `count` parts of so many thousandths of a CPU.
fn lease(name: &str, thousandths: u64, count: u32, cpus: Option<&[u32]>, admitted: bool) -> Lease {
    Lease {
        name: name.to_owned(),
        ppm: thousandths * 1_000,
        period: Nanos::from_millis(10),
        count,
        cpus: cpus.map(<[u32]>::to_vec),
        admitted,
    }
}

fn leased_vm(name: &str, started: u64, vcpus: u32, affinity: &str, reservation: &str) -> Tenant {
    let class_source = ClassSource::Reservation { name: reservation.to_owned(), vcpus };
    Tenant { class_source, ..vm(name, started, vcpus, affinity) }
}

/// Each lease: whether it is held, and why its tenants do not have it.
fn states(reservations: &Reservations) -> Vec<(&str, bool, &str)> {
    let leases = reservations.leases.iter();
    leases.map(|(name, state)| (name.as_str(), state.held, state.why.as_deref().unwrap_or_default())).collect()
}

#[test]
fn a_lease_holds_its_bandwidth_before_its_tenant_runs_and_gives_it_to_the_vcpus() {
    let mut config = config(&[("file", 6_000)]);
    let first = vm("file", 10, 1, "0-1");
    config.leases = vec![lease("l", 700, 2, None, true)];
    let waiting = admit(&config, &[], &online(2), &Reservations::default(), &Asks::new());
    assert_eq!(
        (waiting.kept.len(), waiting.total(), states(&waiting)),
        (2, Bandwidth::ppm(1_400_000), vec![("l", true, "")])
    );
    // A VM that starts later finds no room beside it.
    let both = admit(&config, std::slice::from_ref(&first), &online(2), &waiting, &Asks::new());
    assert_eq!((both.refused.len(), both.refused[0].tenant.as_str()), (1, "file"));
    // The VM of the lease has one vCPU now: the other part is still kept.
    let small = [first.clone(), leased_vm("cell", 20, 1, "0-1", "l")];
    let bound = admit(&config, &small, &online(2), &both, &Asks::new());
    assert_eq!((admitted_vcpus(&bound), bound.kept.len(), bound.total()), (vec![("cell", 0)], 1, waiting.total()));
    assert_eq!(bound.vcpus[0].budget, Nanos::from_millis(7));
    // With more vCPUs than the lease has parts, the rest has no reservation.
    let large = admit(&config, &[leased_vm("cell", 20, 3, "0-1", "l")], &online(2), &bound, &Asks::new());
    assert_eq!((admitted_vcpus(&large), large.kept.len()), (vec![("cell", 0), ("cell", 1)], 0));
    // It ends: all is kept again. The lease ends: there is room.
    assert_eq!(admit(&config, &[], &online(2), &large, &Asks::new()).kept, waiting.kept);
    config.leases.clear();
    assert_eq!(admitted_vcpus(&admit(&config, &[first], &online(2), &large, &Asks::new())), [("file", 0)]);
}

#[test]
fn a_lease_that_does_not_fit_is_refused_with_the_reason_and_takes_nothing_from_others() {
    let mut config = config(&[("file", 6_000)]);
    let first = [vm("file", 10, 1, "0-1")];
    let before = admit(&config, &first, &online(2), &Reservations::default(), &Asks::new());
    for (old, new, why) in [
        (200, lease("new", 700, 2, None, false), "more than the 2 there are"),
        (200, lease("new", 960, 1, None, false), "reservation new asks for more of a CPU than is left"),
        (200, lease("new", 500, 2, Some(&[1, 1]), false), "reservation new asks for 0.500"),
        (200, lease("new", 100, 1, Some(&[7]), false), "CPU 7 is offline"),
        (300, lease("new", 840, 1, Some(&[1]), false), "unpinned vCPUs ask for 1.000"),
    ] {
        config.leases = vec![lease("old", old, 1, None, true), new];
        let after = admit(&config, &first, &online(2), &before, &Asks::new());
        assert_eq!(admitted_vcpus(&after), [("file", 0)]);
        let [("new", false, said), ("old", true, "")] = states(&after)[..] else { panic!("{after:?}") };
        assert!(said.contains(why), "{said}\n{why}");
        assert_eq!(after.refused[0].tenant, "reservation new");
    }
    // What was admitted goes before what is new, also before a VM that started earlier.
    config.leases = vec![lease("old", 700, 1, None, true), lease("older", 700, 1, None, true)];
    let after = admit(&config, &first, &online(2), &Reservations::default(), &Asks::new());
    assert_eq!((after.refused[0].tenant.as_str(), after.kept.len()), ("file", 2));
    // CPUs that go away take the last one's bandwidth, which comes back with them.
    let less = admit(&config, &[], &online(1), &after, &Asks::new());
    assert_eq!(states(&less).iter().map(|(_, held, _)| *held).collect::<Vec<_>>(), [true, false]);
    assert_eq!(admit(&config, &[], &online(2), &less, &Asks::new()).kept.len(), 2);
}

#[test]
fn a_tenant_that_cannot_have_its_lease_does_not_lose_the_bandwidth() {
    let mut config = config(&[("both", 1_000)]);
    let mut scheduled = leased_vm("a", 10, 1, "0-1", "l");
    scheduled.threads[0].libvirt.sched = Some(Policy::Fifo(1));
    for (tenants, pinned, why) in [
        (vec![leased_vm("a", 10, 1, "0-1", "l")], true, "a: vCPU 0 may run on CPUs 0-1"),
        (vec![leased_vm("a", 10, 1, "0", "l")], true, "a: vCPU 0 may run on CPUs 0,"),
        (vec![leased_vm("a", 10, 1, "7", "l")], false, "none of which is for reservations"),
        (vec![leased_vm("a", 10, 1, "", "l")], false, "vCPU 0 may run could not be read"),
        (vec![scheduled], false, "<vcpusched>"),
        (vec![leased_vm("both", 10, 1, "0-1", "l")], false, "remove one of the two"),
    ] {
        config.leases = vec![lease("l", 300, 1, pinned.then_some(&[1][..]), true)];
        let after = admit(&config, &tenants, &online(2), &Reservations::default(), &Asks::new());
        let [("l", true, said)] = states(&after)[..] else { panic!("{after:?}") };
        assert!(said.contains(why), "{said}\n{why}");
        assert_eq!(after.kept.len(), 1, "{after:?}");
        assert!(after.vcpus.iter().all(|vcpu| vcpu.tenant == "both"), "{after:?}");
    }
    // Pinned where the lease says so.
    let tenant = [leased_vm("a", 10, 1, "1", "l")];
    config.leases = vec![lease("l", 300, 1, Some(&[1]), true)];
    let after = admit(&config, &tenant, &online(2), &Reservations::default(), &Asks::new());
    assert_eq!((after.kept.len(), after.cpu(&after.vcpus[0]), states(&after)), (0, Some(1), vec![("l", true, "")]));
    // Without a pin, on a CPU that another lease fills: the bandwidth is kept elsewhere.
    config.leases = vec![lease("full", 900, 1, Some(&[1]), true), lease("l", 300, 1, None, true)];
    let after = admit(&config, &tenant, &online(2), &Reservations::default(), &Asks::new());
    assert_eq!((after.vcpus.len(), after.kept.len()), (0, 2));
    assert!(after.leases["l"].held && after.leases["l"].why.is_some(), "{after:?}");
    // A container has no vCPU threads.
    let mut container = leased_vm("c", 10, 1, "0-1", "l");
    container.threads[0].role = ThreadRole::Container;
    config.leases = vec![lease("l", 300, 1, None, true)];
    let after = admit(&config, &[container], &online(2), &Reservations::default(), &Asks::new());
    assert_eq!((after.kept.len(), states(&after)), (1, vec![("l", true, "")]));
}

/// VMs with leases on CPU 1 of two, each with a vCPU of this period, us, and next to no bandwidth.
fn short_leases(periods: &[u64]) -> (Vec<Lease>, Vec<Tenant>) {
    let named = || (0_u64..).zip(periods).map(|(number, period)| (format!("l{number}"), number, *period));
    let leases = named()
        .map(|(name, _, period)| Lease { period: Nanos::from_micros(period), ..lease(&name, 2, 1, Some(&[1]), true) });
    let tenants = named().map(|(name, number, _)| leased_vm(&format!("v{number}"), 10 + number, 1, "1", &name));
    (leases.collect(), tenants.collect())
}

/// The VMs that are paced.
fn paced(reservations: &Reservations) -> BTreeSet<&str> {
    reservations.vcpus.iter().map(|vcpu| vcpu.tenant.as_str()).collect()
}

/// Seven vCPUs with 1 us in 500 us take next to no bandwidth, and their pacers more than a CPU.
#[test]
fn what_pacers_of_leases_take_has_a_bound_and_the_other_vcpus_are_capped() {
    let mut config = config(&[("file", 1_000)]);
    let (leases, mut tenants) = short_leases(&[500, 501, 502, 5_000, 503, 504, 505, 506]);
    config.leases = leases;
    let after = admit(&config, &tenants, &online(2), &Reservations::default(), &Asks::new());
    assert_eq!((paced(&after), after.kept.len()), (BTreeSet::from(["v3"]), 7), "{after:?}");
    assert!(after.leases.values().all(|state| state.held), "the sum decides whether it is held");
    let why = after.leases["l4"].why.as_deref().unwrap();
    assert!(why.contains("windows a second") && why.contains("half of the reserve of 0.050"), "{why}");

    // It stays so beside a VM of sched.toml, and after a restart of the daemon, but not with a shorter period.
    tenants.push(vm("file", 30, 1, "1"));
    let both = admit(&config, &tenants, &online(2), &after, &Asks::new());
    let again = admit(&config, &tenants, &online(2), &both, &Asks::new());
    assert_eq!(paced(&again), BTreeSet::from(["v3", "file"]));
    let restarted = admit(&config, &tenants, &online(2), &Reservations::remembered(&again.held()), &Asks::new());
    assert_eq!(paced(&restarted), paced(&again));
    config.leases[3].period = Nanos::from_micros(600);
    assert_eq!(paced(&admit(&config, &tenants, &online(2), &again, &Asks::new())), BTreeSet::from(["file"]));
}

#[test]
fn in_whatever_order_vms_come_or_move_their_pacers_take_no_more() {
    let mut config = config(&[]);
    let (leases, mut tenants) = short_leases(&[8_000; 6]);
    config.leases = leases;
    // Names in the opposite order, one in each pass: who is paced stays so, and further ones are not.
    let mut before = Reservations::default();
    for first in (0..tenants.len()).rev() {
        before = admit(&config, &tenants[first..], &online(2), &before, &Asks::new());
    }
    assert_eq!(paced(&before), BTreeSet::from(["v5", "v4"]));
    // They are on a CPU each, and all move to one.
    for (tenant, cpu) in tenants.iter_mut().zip(0..) {
        tenant.threads[0].affinity = format!("{cpu}");
    }
    config.leases.iter_mut().for_each(|lease| lease.cpus = None);
    let spread = admit(&config, &tenants, &online(6), &Reservations::default(), &Asks::new());
    assert_eq!(paced(&spread).len(), 6, "{spread:?}");
    tenants.iter_mut().for_each(|tenant| tenant.threads[0].affinity = "2".to_owned());
    let moved = admit(&config, &tenants, &online(6), &spread, &Asks::new());
    assert_eq!(paced(&moved), BTreeSet::from(["v2", "v0"]), "who was there stays");
    // Two without a pin, which the tenant then pins to the CPU of two others.
    tenants.truncate(4);
    config.leases.truncate(4);
    let pin = |tenants: &mut [Tenant], affinity: &str| {
        tenants.iter_mut().for_each(|tenant| tenant.threads[0].affinity = affinity.to_owned());
    };
    pin(&mut tenants[..2], "0-1");
    pin(&mut tenants[2..], "1");
    let two = admit(&config, &tenants, &online(2), &Reservations::default(), &Asks::new());
    assert_eq!(paced(&two), BTreeSet::from(["v0", "v1", "v2", "v3"]), "{two:?}");
    pin(&mut tenants, "1");
    let pinned = admit(&config, &tenants, &online(2), &two, &Asks::new());
    assert_eq!(paced(&pinned), BTreeSet::from(["v2", "v3"]));
}

/// The CPU on which most bandwidth is taken suits each vCPU best, until its pacer has no time for more windows.
#[test]
fn a_vcpu_with_a_choice_is_where_its_pacer_has_time() {
    let mut config = config(&[]);
    let (leases, mut tenants) = short_leases(&[8_000; 7]);
    config.leases = leases.into_iter().map(|lease| Lease { cpus: None, ..lease }).collect();
    tenants.iter_mut().for_each(|tenant| tenant.threads[0].affinity = "0-2".to_owned());
    let after = admit(&config, &tenants, &online(4), &Reservations::default(), &Asks::new());
    let mut homes: Vec<Option<u32>> = after.vcpus.iter().map(|vcpu| vcpu.home).collect();
    homes.sort_unstable();
    assert_eq!(homes, [0, 0, 1, 1, 2, 2].map(Some), "{after:?}");
    assert!(after.leases["l6"].why.as_ref().unwrap().contains("half of the reserve"), "{after:?}");
}

/// Containers are capped, not paced.
#[test]
fn leases_without_vcpus_keep_no_vm_from_starting_for_their_pacers_sake() {
    let mut config = config(&[("file", 1_000)]);
    let many = |number: u64| Lease {
        period: Nanos::from_micros(500 + number),
        ..lease(&format!("l{number}"), 10, 1, None, true)
    };
    config.leases = (0..20).map(many).collect();
    let after = admit(&config, &[vm("file", 30, 1, "1")], &online(2), &Reservations::default(), &Asks::new());
    assert_eq!((admitted_vcpus(&after), after.refused.len()), (vec![("file", 0)], 0), "{after:?}");
}

#[test]
fn where_the_back_end_pins_each_vcpu_only_the_vm_that_is_not_pinned_is_refused() {
    let mut config = config(&[("a", 1_000), ("b", 1_000)]);
    config.leases = vec![lease("l", 100, 1, None, true)];
    config.backend = BackendKind::SchedExt;
    let tenants = [vm("a", 1, 1, "0-1"), vm("b", 2, 1, "2"), leased_vm("c", 3, 1, "1-2", "l")];
    let after = admit(&config, &tenants, &online(4), &Reservations::default(), &Asks::new());
    assert_eq!(admitted_vcpus(&after), [("b", 0)]);
    let whys: Vec<&str> = after.refused.iter().map(|refused| refused.why.as_str()).collect();
    assert!(whys.len() == 2 && whys.iter().all(|why| why.contains("pin it (libvirt: vcpupin)")), "{whys:?}");
    assert!(after.leases["l"].held);
}

/// 12 % of CPU 0 by sched.toml in periods of 10 ms, whose pacer takes some 0.9 %, and the CPUs' reserve.
fn beside_file() -> (SchedConfig, Tenant) {
    (config(&[("file", 1_200), ("other", 1_200)]), vm("file", 1, 1, "0"))
}

#[test]
fn a_new_lease_takes_no_time_that_pacers_of_sched_toml_need_and_an_old_one_keeps_its_own() {
    let (mut config, file) = beside_file();
    let before = admit(&config, std::slice::from_ref(&file), &online(2), &Reservations::default(), &Asks::new());
    let pacers = pacing::pacers_of_declared(&before)[&0];
    assert!(pacers > 4_000 && pacing::pacers_of_declared(&before)[&1] == 0, "{pacers}");
    let mut held = |leases: Vec<Lease>| {
        config.leases = leases;
        let after = admit(&config, std::slice::from_ref(&file), &online(2), &before, &Asks::new());
        assert_eq!(admitted_vcpus(&after), [("file", 0)]);
        (after.leases["l"].held, after.leases["l"].why.clone().unwrap_or_default())
    };
    let on = |cpus: Option<&[u32]>, ppm: u64, admitted| Lease { ppm, ..lease("l", 1, 1, cpus, admitted) };
    // On its CPU.
    // Less what the planner may round.
    let left = 1_000_000 - 120_000 - 50_000 - 100_000 - 24;
    assert!(held(vec![on(Some(&[0]), left - pacers, false)]).0);
    let (is_held, why) = held(vec![on(Some(&[0]), left, false)]);
    assert!(!is_held && why.contains("windows a second") && why.contains("of CPU 0, beside 0.850 reserved"), "{why}");
    assert_eq!(held(vec![on(Some(&[0]), left, true)]), (true, String::new()));
    // Without a pin, beside another one that takes all of CPU 1.
    let full = || lease("full", 849, 1, Some(&[1]), true);
    assert!(held(vec![full(), on(None, left - pacers, false)]).0);
    let (is_held, why) = held(vec![full(), on(None, left, false)]);
    assert!(!is_held && why.contains("of CPU 0, and all pacers 0.0") && why.contains("of 2 CPUs"), "{why}");
    assert_eq!(held(vec![full(), on(None, left, true)]), (true, String::new()));
}

#[test]
fn pacers_that_lack_time_on_one_cpu_keep_no_vm_from_another() {
    let (mut config, file) = beside_file();
    let before = admit(&config, std::slice::from_ref(&file), &online(2), &Reservations::default(), &Asks::new());
    config.leases = vec![lease("full", 829, 1, Some(&[0]), true)];
    let both = [file, vm("other", 2, 1, "1")];
    let after = admit(&config, &both, &online(2), &before, &Asks::new());
    assert_eq!((admitted_vcpus(&after), after.refused.len()), (vec![("file", 0), ("other", 0)], 0), "{after:?}");
    // On the same CPU it would have no time.
    let both = [both[0].clone(), vm("other", 2, 1, "0")];
    config.leases = vec![lease("full", 709, 1, Some(&[0]), true)];
    let after = admit(&config, &both, &online(2), &before, &Asks::new());
    assert_eq!(admitted_vcpus(&after), [("file", 0)]);
    assert!(after.refused[0].tenant == "other" && after.refused[0].why.contains("of CPU 0"), "{after:?}");
}

/// The watcher may take a tenth of a CPU from what depends on its caps, on any CPU. What VMs of sched.toml have on
/// another CPU is no reason against that.
#[test]
fn beside_leases_the_cap_watchers_time_is_kept() {
    let mut config = config(&[("file", 9_200)]);
    let file = [vm("file", 1, 1, "0")];
    let mut refused = |tenants: &[Tenant], cpus: u32, leases: Vec<Lease>| {
        config.leases = leases;
        let after = admit(&config, tenants, &online(cpus), &Reservations::default(), &Asks::new());
        after.refused.into_iter().map(|refused| refused.why).collect::<Vec<_>>()
    };
    let none: Vec<String> = Vec::new();
    assert_eq!(refused(&[], 1, vec![lease("a", 849, 1, None, false)]), none);
    assert!(refused(&[], 2, vec![lease("a", 851, 1, None, false)])[0].contains("0.050 of each CPU, and 0.100 for the"));
    assert!(refused(&[], 1, vec![lease("a", 430, 2, None, false)])[0].contains("of these 0.100 for the cap watcher"));
    assert_eq!(refused(&[], 2, vec![lease("a", 599, 3, None, false)]), none);
    assert_eq!(refused(&[], 2, vec![lease("a", 601, 3, None, false)]).len(), 1);
    assert_eq!(refused(&[], 2, vec![lease("a", 849, 2, Some(&[0, 1]), false)]), none);
    let why = refused(&[], 2, vec![lease("a", 430, 2, Some(&[1, 1]), false)]);
    assert!(why[0].starts_with("CPU 1 would have less left than its reserve (0.050"), "{why:?}");
    assert_eq!(refused(&file, 2, vec![lease("a", 849, 1, None, false)]), none);
    assert_eq!(refused(&file, 2, vec![lease("a", 849, 1, Some(&[1]), false)]), none);
    assert_eq!(refused(&file, 2, vec![lease("a", 20, 1, Some(&[0]), false)]).len(), 1, "beside 0.92 on its CPU");
    // Containers have no more of a CPU than the runtime caps leave them.
    config.uncapped = Bandwidth::ppm(200_000);
    let mut refused = |ppm: u64| {
        config.leases = vec![Lease { ppm, ..lease("a", 1, 1, None, false) }];
        admit(&config, &[], &online(1), &Reservations::default(), &Asks::new()).refused.len()
    };
    assert_eq!((refused(699_980), refused(700_010)), (0, 1));
}

/// Several tenants may have VMs in a cgroup that a lease is for.
#[test]
fn a_vm_that_cannot_have_a_part_of_a_lease_takes_none_from_another() {
    let mut config = config(&[]);
    config.leases = vec![lease("l", 300, 2, None, true)];
    let old = leased_vm("old", 10, 1, "0-1", "l");
    let mut scheduled = leased_vm("scheduled", 5, 2, "0-1", "l");
    scheduled.threads[0].libvirt.sched = Some(Policy::Fifo(1));
    let mut second = leased_vm("second", 30, 2, "0-1", "l");
    second.threads.remove(0);
    let before = admit(&config, std::slice::from_ref(&old), &online(2), &Reservations::default(), &Asks::new());
    for before in [&Reservations::default(), &before] {
        let new = leased_vm("new", 20, 1, "0-1", "l");
        let tenants = [new, second.clone(), scheduled.clone(), old.clone()];
        let after = admit(&config, &tenants, &online(2), before, &Asks::new());
        assert_eq!((admitted_vcpus(&after), states(&after)), (vec![("old", 0), ("second", 1)], vec![("l", true, "")]));
        let [Refused { tenant, why }] = after.refused.as_slice() else { panic!("{after:?}") };
        assert!(tenant == "reservation l" && why.contains("new: another VM has"), "{why}");
        assert!(why.contains("scheduled: "), "{why}");
    }
    // One that has its part keeps it from an older one that comes later.
    let older = leased_vm("older", 5, 1, "0-1", "l");
    assert_eq!(admitted_vcpus(&admit(&config, &[older, old], &online(2), &before, &Asks::new())), [("old", 0)]);
}

/// Nor does it keep a new lease from another CPU.
#[test]
fn what_was_admitted_beside_less_refuses_no_new_lease_elsewhere() {
    let mut config = config(&[]);
    let mut refused = |new: Lease| {
        config.leases = vec![lease("old", 900, 1, Some(&[0]), true), new];
        let after = admit(&config, &[], &online(2), &Reservations::default(), &Asks::new());
        after.refused.into_iter().map(|refused| refused.tenant).collect::<Vec<_>>()
    };
    assert!(refused(lease("new", 100, 1, Some(&[1]), false)).is_empty());
    assert!(refused(lease("new", 100, 1, None, false)).is_empty());
    assert_eq!(refused(lease("new", 20, 1, Some(&[0]), false)), ["reservation new"]);
    assert_eq!(refused(lease("new", 860, 1, Some(&[1]), false)), ["reservation new"]);
}

/// An earlier version, or a higher `cap.cpu-share`, left the watcher and others less.
#[test]
fn what_was_admitted_beside_less_stays_admitted() {
    let one = |ppm: u64, cpus: Option<&[u32]>, admitted| Lease { ppm, ..lease("l", 1, 1, cpus, admitted) };
    let many = |admitted| (10..28).map(|n| lease(&format!("l{n}"), 105, 1, None, admitted)).collect::<Vec<_>>();
    let vms =
        |cpus: &[&str]| cpus.iter().enumerate().map(|(n, cpu)| vm(&format!("v{n}"), 1, 1, cpu)).collect::<Vec<_>>();
    let refused = |uncapped: u64, tenants: &[Tenant], cpus: u32, leases: Vec<Lease>| {
        let mut config = config(&[("v0", 9_200), ("v1", 9_200), ("v2", 9_200), ("v3", 9_200)]);
        (config.uncapped, config.leases) = (Bandwidth::ppm(uncapped), leases);
        let after = admit(&config, tenants, &online(cpus), &Reservations::default(), &Asks::new());
        assert_eq!(after.beside, Beside { reserve: config.reserve, watcher: Bandwidth::ZERO });
        after.refused.into_iter().map(|refused| refused.tenant).collect::<Vec<_>>()
    };
    for admitted in [true, false] {
        let found = [
            refused(50_000, &[], 1, vec![one(900_000, None, admitted)]),
            refused(50_000, &[], 2, vec![one(949_000, Some(&[1]), admitted)]),
            refused(50_000, &[], 2, many(admitted)),
            refused(200_000, &[], 4, vec![one(850_000, None, admitted)]),
            refused(50_000, &vms(&["0"]), 1, vec![one(20_000, None, admitted)]),
            refused(50_000, &vms(&["0", "1", "2", "3"]), 4, vec![one(20_000, None, admitted)]),
        ];
        assert!(found.iter().all(|refused| refused.is_empty() == admitted), "{admitted}: {found:?}");
        assert!(found.iter().flatten().all(|name| name.starts_with("reservation ")), "no VM: {found:?}");
    }
}

proptest! {
    /// Neither as many as a pinned CPU is said to hold, nor what is left of another one, are ever refused.
    #[test]
    fn what_a_pinned_cpu_is_said_to_hold_it_holds(parts in proptest::collection::vec(1u64..30_000, 1..=64)) {
        let mut config = config(&[]);
        let capacity = Capacity::beside(config.beside_leases());
        let mut left = capacity.pinned;
        let mut part = |n: usize, most: u64| {
            let ppm = if n + 1 == parts.len() { left } else { most.min(left) };
            left -= ppm;
            Lease { ppm, ..lease(&format!("p{n:02}"), 1, 1, Some(&[1]), false) }
        };
        config.leases = parts.iter().enumerate().map(|(n, most)| part(n, *most)).filter(|one| one.ppm > 0).collect();
        let rest = (capacity.unpinned - capacity.watcher).min(capacity.largest);
        config.leases.push(Lease { ppm: rest, ..lease("rest", 1, 1, None, false) });
        let after = admit(&config, &[], &online(2), &Reservations::default(), &Asks::new());
        prop_assert!(after.refused.is_empty(), "{:?}", after);
    }

    /// The sum that a program outside adds up, in whole millionths of a CPU, decides exactly.
    #[test]
    fn for_leases_without_pins_the_sum_decides(
        parts in proptest::collection::vec((1u64..850, 1u32..3), 0..12),
        cpus in 1u32..5,
        fill in proptest::bool::ANY,
    ) {
        let mut config = config(&[]);
        let capacity = Capacity::beside(config.beside_leases());
        let room = u64::from(cpus) * capacity.unpinned - capacity.watcher;
        let mut leases: Vec<Lease> =
            (0..).zip(&parts).map(|(n, (part, count))| lease(&format!("l{n}"), *part, *count, None, false)).collect();
        let cost = |one: &Lease| one.ppm * u64::from(one.count);
        let sum = |leases: &[Lease]| leases.iter().map(cost).sum::<u64>();
        // The last one fills the host to the millionth, if that much is allowed to one vCPU.
        let left = room.saturating_sub(sum(&leases));
        if fill && (1..=capacity.largest).contains(&left) {
            leases.push(Lease { ppm: left, ..lease("last", 1, 1, None, false) });
        }
        config.leases = leases;
        let after = admit(&config, &[], &online(cpus), &Reservations::default(), &Asks::new());
        prop_assert_eq!(after.refused.is_empty(), sum(&config.leases) <= room, "{:?}", after);
        let held: u64 = config.leases.iter().filter(|one| after.leases[&one.name].held).map(cost).sum();
        prop_assert_eq!(after.total(), Bandwidth::ppm(held));
        // One millionth more than is left is refused.
        let more = Lease { ppm: (room - held + 1).min(capacity.largest), ..lease("more", 1, 1, None, false) };
        let is_too_much = more.ppm > room - held;
        config.leases.retain(|one| after.leases[&one.name].held);
        config.leases.iter_mut().for_each(|one| one.admitted = true);
        config.leases.push(more);
        let after = admit(&config, &[], &online(cpus), &after, &Asks::new());
        prop_assert_eq!(after.leases["more"].held, !is_too_much);
    }

    /// As the driver of Kubernetes counts: a CPU that is a vCPU's home gives nothing to leases without a pin, and what
    /// VMs of sched.toml and their pacers have of the others is taken away.
    #[test]
    fn beside_vms_of_sched_toml_the_rest_is_for_leases(
        // Budget in 10 ms, and the affinity.
        vms in proptest::collection::vec((100u64..4_000, 0usize..4), 0..6),
        parts in proptest::collection::vec(1u64..1_000, 1..8),
        cpus in 2u32..5,
    ) {
        let names: Vec<String> = (0..vms.len()).map(|n| format!("vm{n}")).collect();
        let of = names.iter().zip(&vms);
        let declared: Vec<(&str, u64)> = of.clone().map(|(name, (budget, _))| (name.as_str(), *budget)).collect();
        let mut config = config(&declared);
        let affinities = ["0-7", "0-7", "0", "0-1"];
        let tenants: Vec<Tenant> =
            of.zip(1..).map(|((name, (_, allowed)), started)| vm(name, started, 1, affinities[*allowed])).collect();
        let before = admit(&config, &tenants, &online(cpus), &Reservations::default(), &Asks::new());
        let capacity = Capacity::beside(config.beside_leases());
        let homes: BTreeSet<u32> = before.vcpus.iter().filter_map(|vcpu| before.cpu(vcpu)).collect();
        let unpinned: Bandwidth =
            before.vcpus.iter().filter(|vcpu| vcpu.home.is_none()).map(|vcpu| vcpu.bandwidth).sum();
        let pacers = pacing::pacers_of_declared(&before);
        let of_others: u64 = pacers.iter().filter(|(cpu, _)| !homes.contains(cpu)).map(|(_, needs)| needs).sum();
        let room = (u64::from(cpus) - homes.len() as u64) * capacity.unpinned;
        let room = room.saturating_sub(unpinned.whole_ppm() + of_others + capacity.watcher);
        // All of it, in these proportions.
        let sum: u64 = parts.iter().sum();
        let ppm = |part: u64| (room * part / sum).min(capacity.largest);
        let leases =
            (0..).zip(&parts).map(|(n, part)| Lease { ppm: ppm(*part), ..lease(&format!("l{n}"), 1, 1, None, false) });
        config.leases = leases.filter(|lease| lease.ppm > 0).collect();
        let after = admit(&config, &tenants, &online(cpus), &before, &Asks::new());
        prop_assert_eq!(&after.refused, &before.refused, "{:?}", after);
        prop_assert_eq!(admitted_vcpus(&after), admitted_vcpus(&before));
        prop_assert_eq!(pacing::pacers_of_declared(&after), pacers);
    }

    #[test]
    fn all_at_once_is_as_one_after_the_other(
        // Budget in 10 ms, number and affinity of vCPUs, and for a lease the period, us.
        vms in proptest::collection::vec(
            (1u64..1_400, 1u32..4, 0usize..6, proptest::option::weighted(0.4, 500u64..20_000)),
            0..8,
        ),
        cpus in 1u32..5,
        some in 0usize..8,
    ) {
        let names: Vec<String> = (0..vms.len()).map(|n| format!("vm{n}")).collect();
        let all = || names.iter().zip(&vms).zip(1..);
        let declared = all().filter(|((_, vm), _)| vm.3.is_none());
        let reservations: Vec<(&str, u64)> =
            declared.map(|((name, (budget, ..)), _)| (name.as_str(), *budget * 5)).collect();
        let mut config = config(&reservations);
        config.leases = all().filter_map(|((name, (budget, vcpus, _, period)), _)| {
            let ppm = budget * 500;
            Some(Lease { ppm, period: Nanos::from_micros((*period)?), ..lease(name, 0, *vcpus, None, true) })
        }).collect();
        let affinities = ["0-7", "0-7", "0-1", "1-3", "0", "2"];
        let tenants: Vec<Tenant> = all().map(|((name, (_, vcpus, affinity, period)), started)| {
            let affinity = affinities[*affinity];
            match period {
                Some(_) => leased_vm(name, started, *vcpus, affinity, name),
                None => vm(name, started, *vcpus, affinity),
            }
        }).collect();
        let reservations = |tenants: &[Tenant], before: &Reservations| {
            let [shortcut, slow] = [admit_at_once as Shortcut, |_, _| false]
                .map(|shortcut| admit_by(shortcut, &config, tenants, &online(cpus), before, &Asks::new()));
            (shortcut, slow)
        };
        let (some, slow) = reservations(&tenants[..some.min(tenants.len())], &Reservations::default());
        prop_assert_eq!(&some, &slow);
        let (all, slow) = reservations(&tenants, &some);
        prop_assert_eq!(&all, &slow);
        let (again, slow) = reservations(&tenants, &all);
        prop_assert_eq!(&again, &slow);
        // VMs of sched.toml that came after others' leases precede them from the next pass on. Then nothing changes.
        let passes = std::iter::successors(Some(again), |before| Some(reservations(&tenants, before).0));
        let last: Vec<Reservations> = passes.skip(3).take(2).collect();
        prop_assert_eq!(paced(&last[0]), paced(&last[1]));
        let Reservations { vcpus, kept, .. } = &last[1];
        let homes: Vec<_> = vcpus.iter().map(|vcpu| vcpu.home).chain(kept.iter().map(|kept| kept.cpu)).collect();
        prop_assert_eq!(pacing::check(&last[1], vcpus, kept, &homes, Source::Reserve, Present::default()), Ok(()));
    }
}
