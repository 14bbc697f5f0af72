//! The list of all tests.

use ontime_lab::{Clients, Kernel};

use crate::cases::{
    builds, busypoll, cap, clients, cpus, deadlines, deadlines_vcpus, degraded, determinism, device, host_poll,
    hotplug, laboratory, levels, link, lockdown, missed, napi_wait, napi_weight, path, pending, podman, pods, qdiscs,
    reservations, tenants, trace, traffic, twin, vmm,
};
use crate::emulated::{HOST, Host};
use crate::test::{TEST, Test};

/// The tests of `make test`. The first one is alone, because it counts the machine's network namespaces; then the
/// longest come first, two at a time.
pub(crate) const EVERYDAY: &[Test] = &[
    Test { name: "nothing_stays_behind", alone: true, outside: laboratory::nothing_stays_behind, ..TEST },
    Test { name: "tenants_are_found_placed_and_followed", inside: Some(tenants::tenants), ..TEST },
    Test {
        name: "a_run_repeats_exactly",
        inside: Some(determinism::repeat),
        host: Host { clients: Clients::Inside, events: true, ..HOST },
        outside: determinism::a_run_repeats_exactly,
        ..TEST
    },
    Test {
        name: "path_holds_under_traffic_and_faults",
        inside: Some(path::path),
        host: Host { client: Some("./ontime-lab-tests program path_holds_under_traffic_and_faults client"), ..HOST },
        programs: &[("client", traffic::client)],
        outside: builds::path_holds_under_traffic_and_faults,
        ..TEST
    },
    Test { name: "rt_requests_do_not_grow", outside: builds::rt_requests_do_not_grow, ..TEST },
    Test { name: "public_suites_agree", outside: builds::public_suites_agree, ..TEST },
    Test {
        name: "a_vcpu_does_not_wait_for_its_vmm",
        inside: Some(vmm::vmm),
        programs: &[("monitor", vmm::monitor)],
        outside: builds::a_vcpu_does_not_wait_for_its_vmm,
        ..TEST
    },
    Test {
        name: "a_device_process_is_capped",
        inside: Some(device::cap),
        host: Host { guest_module: true, client: Some(device::CLIENT), ..HOST },
        programs: &[("client", device::client)],
        ..TEST
    },
    Test {
        name: "interrupts_of_a_device_process_raise_its_vcpu",
        inside: Some(device::pending),
        host: Host { guest_module: true, client: Some(device::CLIENT), ..HOST },
        programs: &[("share", device::share)],
        ..TEST
    },
    Test {
        name: "a_spinning_vm_leaves_the_rest",
        inside: Some(cap::cap),
        programs: &[("gap", cap::gap), ("kill-when", cap::kill_when)],
        ..TEST
    },
    Test {
        name: "kernels_boot_and_missing_features_are_reported",
        inside: Some(degraded::degraded),
        host: Host { kernel: Kernel::Rt612, ..HOST },
        outside: builds::kernels_boot_and_missing_features_are_reported,
        ..TEST
    },
    Test {
        name: "a_podman_container_has_its_place",
        inside: Some(podman::podman),
        outside: builds::a_podman_container_has_its_place,
        ..TEST
    },
    Test { name: "a_hang_is_reported", outside: laboratory::a_hang_is_reported, ..TEST },
    Test { name: "a_killed_emulator_is_reported", outside: laboratory::a_killed_emulator_is_reported, ..TEST },
    Test { name: "a_disk_that_fills_up_is_reported", outside: laboratory::a_disk_that_fills_up_is_reported, ..TEST },
    Test { name: "levels_have_their_places", inside: Some(levels::levels), ..TEST },
    Test { name: "pods_have_what_each_reserves", inside: Some(pods::pods), ..TEST },
    Test {
        name: "a_reused_thread_number_is_not_left_changed",
        host: Host { cpus: Some(2), ..HOST },
        outside: builds::a_reused_thread_number_is_not_left_changed,
        ..TEST
    },
    Test {
        name: "lockdown_is_reported",
        inside: Some(lockdown::lockdown),
        host: Host { append: Some("lockdown=integrity"), ..HOST },
        ..TEST
    },
    Test { name: "qdiscs_are_set_and_given_back", inside: Some(qdiscs::qdiscs), ..TEST },
    Test { name: "status_and_files_come_back", outside: laboratory::status_and_files_come_back, ..TEST },
    Test { name: "a_timeout_is_reported", outside: laboratory::a_timeout_is_reported, ..TEST },
    Test { name: "a_panic_is_reported", outside: laboratory::a_panic_is_reported, ..TEST },
    Test { name: "an_interrupted_lab_leaves_nothing", outside: laboratory::an_interrupted_lab_leaves_nothing, ..TEST },
    Test { name: "a_full_disk_is_reported", outside: laboratory::a_full_disk_is_reported, ..TEST },
    Test {
        name: "an_interrupted_build_leaves_no_process",
        outside: laboratory::an_interrupted_build_leaves_no_process,
        ..TEST
    },
];

/// Tests that are long, need a build of their own, or have the real clock (`make thorough`: about an hour). No test has
/// guests on the real clock, where several emulated CPUs run side by side: such a host may hang by the emulator's fault
/// (CONTRIBUTING.md).
pub(crate) const BY_NAME: &[Test] = &[
    Test { name: "guest_sockets_are_the_hosts", outside: builds::guest_sockets_are_the_hosts, ..TEST },
    Test {
        name: "trace_names_the_inversions",
        inside: Some(trace::trace),
        host: Host { client: Some("./ontime-lab-tests program trace_names_the_inversions client"), ..HOST },
        programs: &[
            ("client", trace::client),
            ("ask", trace::ask),
            ("flood", trace::flood),
            ("serve", trace::serve),
            ("measure", trace::measure),
        ],
        ..TEST
    },
    Test {
        name: "trace_follows_a_vm",
        inside: Some(trace::trace_vm),
        host: Host { client: Some("./ontime-lab-tests program trace_names_the_inversions client"), ..HOST },
        ..TEST
    },
    // It needs the binary of `make sched-ext`.
    Test {
        name: "reserved_cpu_time_is_kept_by_sched_ext",
        inside: Some(reservations::reservations),
        host: Host { environment: &[("BACKEND", "sched_ext")], ..HOST },
        ..TEST
    },
    Test {
        name: "a_vcpu_with_a_pending_interrupt_runs_first",
        inside: Some(pending::pending),
        outside: builds::a_vcpu_with_a_pending_interrupt_runs_first,
        ..TEST
    },
    Test {
        name: "a_libvirt_host_has_a_twin",
        inside: Some(twin::libvirt_host),
        outside: twin::a_libvirt_host_has_a_twin,
        ..TEST
    },
    Test {
        name: "a_cpu_may_go_and_come",
        inside: Some(hotplug::hotplug),
        host: Host { cpus: Some(2), ..HOST },
        ..TEST
    },
    Test {
        name: "pods_on_two_cpus_have_what_each_reserves",
        inside: Some(pods::on_two_cpus),
        host: Host { cpus: Some(2), instruction: 1, ..HOST },
        ..TEST
    },
    Test {
        name: "deadline_tasks_have_their_vcpus",
        inside: Some(deadlines_vcpus::deadlines_vcpus),
        host: Host { cpus: Some(2), ..HOST },
        outside: builds::with_deadlines,
        ..TEST
    },
    Test {
        name: "reserved_cpu_time_is_kept",
        inside: Some(reservations::reservations),
        programs: &[("periods", reservations::periods)],
        ..TEST
    },
    Test {
        name: "polls_are_short_on_an_old_kernel",
        inside: Some(napi_weight::napi_weight),
        host: Host { kernel: Kernel::Rt612, host_module: true, clients: Clients::Inside, ..HOST },
        ..TEST
    },
    Test {
        name: "deadlines_of_a_guest_are_kept",
        inside: Some(deadlines::deadlines),
        outside: builds::with_deadlines,
        ..TEST
    },
    Test {
        name: "cpus_take_turns_on_the_virtual_clock",
        inside: Some(cpus::cpus),
        host: Host { cpus: Some(2), ..HOST },
        programs: &[("rounds", cpus::rounds)],
        outside: builds::cpus_take_turns_on_the_virtual_clock,
        ..TEST
    },
    Test {
        name: "clients_have_a_cpu_of_the_hosts_time",
        inside: Some(clients::clients),
        host: Host { clients: Clients::Inside, ..HOST },
        ..TEST
    },
    Test {
        name: "a_link_has_its_rate_and_its_delay",
        inside: Some(link::link),
        host: Host { clients: Clients::Inside, link: Some(link::LINK), instruction: 1, ..HOST },
        outside: link::a_link_has_its_rate_and_its_delay,
        ..TEST
    },
    Test {
        name: "frames_without_a_buffer_are_counted",
        inside: Some(missed::missed),
        host: Host { clients: Clients::Inside, instruction: 1, ..HOST },
        ..TEST
    },
    Test {
        name: "busypoll_takes_no_interrupts",
        inside: Some(busypoll::busypoll),
        host: Host { cpus: Some(2), clients: Clients::Inside, ..HOST },
        programs: &[("ping", busypoll::requests)],
        ..TEST
    },
    Test {
        name: "a_send_waits_for_short_polls_only",
        inside: Some(napi_wait::napi_wait),
        programs: &[("send", napi_wait::send), ("client", napi_wait::client)],
        host: Host {
            kernel: Kernel::Rt612,
            host_module: true,
            client: Some("./ontime-lab-tests program a_send_waits_for_short_polls_only client"),
            ..HOST
        },
        ..TEST
    },
    Test {
        name: "rt_queues_are_polled_on_an_old_kernel",
        inside: Some(host_poll::host_poll),
        host: Host { kernel: Kernel::Rt612, host_module: true, cpus: Some(2), clients: Clients::Inside, ..HOST },
        ..TEST
    },
    Test { name: "real_clock_has_two_cpus", outside: laboratory::real_clock_has_two_cpus, ..TEST },
];

pub(crate) fn all() -> impl Iterator<Item = &'static Test> {
    EVERYDAY.iter().chain(BY_NAME)
}

pub(crate) fn find(name: &str) -> Option<&'static Test> {
    all().find(|test| test.name == name)
}

/// The tests that are named, each once: `everyday` (also if nothing is named), `by-name`, or names of tests.
///
/// # Errors
/// No test has such a name: then its name is returned.
pub(crate) fn chosen(names: &[String]) -> Result<Vec<&'static Test>, &String> {
    let mut chosen: Vec<&'static Test> = Vec::new();
    let mut add = |tests: &'static [Test]| {
        for test in tests {
            if chosen.iter().all(|other| other.name != test.name) {
                chosen.push(test);
            }
        }
    };
    for name in names {
        match name.as_str() {
            "everyday" => add(EVERYDAY),
            "by-name" => add(BY_NAME),
            one => add(std::slice::from_ref(find(one).ok_or(name)?)),
        }
    }
    if names.is_empty() {
        add(EVERYDAY);
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn each_test_and_each_of_its_programs_has_a_name_of_its_own() {
        let mut names = BTreeSet::from(["everyday", "by-name", "inside", "program"]);
        for test in all() {
            assert!(names.insert(test.name), "{} is there twice", test.name);
            let programs: BTreeSet<_> = test.programs.iter().map(|(name, _)| name).collect();
            assert_eq!(programs.len(), test.programs.len(), "{}: a program is there twice", test.name);
        }
    }

    #[test]
    fn tests_are_chosen_by_kind_and_by_name_and_each_once() {
        let chosen = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            chosen(&names).map(|tests| tests.iter().map(|test| test.name).collect::<Vec<_>>()).map_err(Clone::clone)
        };
        assert_eq!(chosen(&[]).unwrap().len(), EVERYDAY.len());
        assert_eq!(chosen(&["by-name", "everyday"]).unwrap().len(), all().count());
        let two = ["reserved_cpu_time_is_kept", "a_panic_is_reported"];
        assert_eq!(chosen(&[two[0], two[1], two[0]]).unwrap(), two);
        assert_eq!(chosen(&["a_panic_is_reported", "no_such_test"]).unwrap_err(), "no_such_test");
    }
}
