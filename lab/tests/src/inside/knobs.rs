//! Everything that the daemon may change on a host, before and after.

use anyhow::{Result, ensure};

use super::command::{attempt, files, read};
use super::thread::{all, cpus, name, place, resets_on_fork};

/// Beginnings of the names of the threads that the daemon may change.
const THREADS: [&str; 11] = [
    "irq/",
    "irq_work/",
    "napi/",
    "ksoftirqd/",
    "ktimers/",
    "rcuc/",
    "backlog_napi/",
    "vhost-",
    "CPU",
    "kvm-pit",
    "qemu-system",
];

/// Files that the daemon may change.
const FILES: [&str; 9] = [
    "/sys/class/net/*/threaded",
    "/sys/class/net/*/queues/tx-*/xps_cpus",
    "/proc/sys/net/core/skb_defer_max",
    "/proc/sys/net/core/dev_weight",
    "/proc/irq/default_smp_affinity",
    "/proc/sys/kernel/sched_rt_runtime_us",
    "/sys/module/kvm/parameters/halt_poll_ns",
    "/proc/irq/*/smp_affinity_list",
    "/sys/kernel/debug/sched/*_server/cpu*/runtime",
];

/// Every knob that the daemon may change, a line each. Threads are named without their numbers, and only those that are
/// there before and after can be compared.
pub(crate) fn snapshot() -> Result<Vec<String>> {
    // A thread may have ended meanwhile.
    let mut lines: Vec<String> = all().into_iter().filter_map(|tid| of_thread(tid).ok().flatten()).collect();
    lines.sort();
    // Some files cannot be read, e.g. the CPUs of a NIC's only queue.
    let of_file = |file: String| format!("{file} {}", read(&file).unwrap_or_default());
    lines.extend(FILES.iter().flat_map(|pattern| files(pattern)).map(of_file));
    for nic in files("/sys/class/net/*") {
        let nic = nic.rsplit('/').next().unwrap_or_default();
        lines.extend(qdiscs(nic)?);
        for side in ["ingress", "egress"] {
            let filters = attempt(format!("tc filter show dev {nic} {side}"))?.stdout;
            lines.extend(filters.lines().map(|line| format!("{nic} {side} {line}")));
        }
        let coalescing = attempt(format!("ethtool -c {nic}"))?.stdout;
        lines.extend(
            coalescing.lines().filter(|line| line.starts_with("rx-usecs:")).map(|line| format!("{nic} {line}")),
        );
    }
    Ok(lines)
}

fn of_thread(tid: i32) -> Result<Option<String>> {
    let name = name(tid)?;
    if !THREADS.iter().any(|beginning| name.starts_with(beginning)) || is_of_clients(&name) {
        return Ok(None);
    }
    let children = if resets_on_fork(tid)? { ", its children SCHED_OTHER" } else { "" };
    Ok(Some(format!("{name} {}{children}, CPUs {}", place(tid)?, cpus(tid)?)))
}

/// Whether this is the thread of an interrupt of the clients' NICs, `irq/36-rt-tx-0`. The kernel moves it to their CPU
/// at the first interrupt. The host's NICs are `rt0` and `bulk0`.
fn is_of_clients(name: &str) -> bool {
    name.starts_with("irq/") && name.split('-').nth(1).is_some_and(|nic| ["rt", "bulk"].contains(&nic))
}

/// The qdiscs of an interface, without their handles: the kernel gives another one to a qdisc that comes back.
pub(crate) fn qdiscs(nic: &str) -> Result<Vec<String>> {
    let shown = attempt(format!("tc qdisc show dev {nic}"))?.stdout;
    let without_handle = |line: &str| {
        let words = line.split_whitespace().enumerate();
        let kept = words.filter(|(at, word)| !(*at == 2 && word.ends_with(':'))).map(|(_, word)| word);
        format!("{nic} {}", kept.collect::<Vec<_>>().join(" "))
    };
    Ok(shown.lines().map(without_handle).collect())
}

/// The kind of the root qdisc of an interface.
pub(crate) fn root_qdisc(nic: &str) -> Result<String> {
    let root = qdiscs(nic)?.into_iter().find(|line| line.split(' ').any(|word| word == "root"));
    Ok(root.and_then(|line| line.split(' ').nth(2).map(str::to_owned)).unwrap_or_default())
}

/// The lines of a snapshot that begin with one of these names of threads, each once.
pub(crate) fn of_threads(snapshot: &[String], names: &[&str]) -> Vec<String> {
    let mut lines = snapshot.to_vec();
    lines.retain(|line| names.iter().any(|name| line.starts_with(name)));
    lines.dedup();
    lines
}

/// Fails with the lines that differ.
pub(crate) fn expect_same(what: &str, before: &[String], after: &[String]) -> Result<()> {
    let only = |sign: char, of: &[String], other: &[String]| -> Vec<String> {
        of.iter().filter(|line| !other.contains(line)).map(|line| format!("{sign} {line}")).collect()
    };
    let lines = [only('-', before, after), only('+', after, before)].concat().join("\n");
    let (before_lines, after_lines) = (before.len(), after.len());
    ensure!(before == after, "{what}: not as before ({before_lines} lines, now {after_lines}):\n{lines}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_with_one_place_are_one_line() {
        let lines = ["CPU 0/KVM x", "CPU 0/KVM x", "CPU 0/KVM y", "irq/1 x", "irq_work/0 x", "irq_work/1 x"];
        let kept = of_threads(&lines.map(str::to_owned), &["CPU 0/KVM", "irq_work/"]);
        assert_eq!(kept, ["CPU 0/KVM x", "CPU 0/KVM y", "irq_work/0 x", "irq_work/1 x"]);
        assert!(of_threads(&kept, &[]).is_empty());
    }

    #[test]
    fn interrupts_of_the_clients_nics_are_told_from_the_hosts() {
        assert!(["irq/36-rt-tx-0", "irq/42-bulk-rx-0", "irq/44-bulk"].into_iter().all(is_of_clients));
        assert!(
            !["irq/38-bulk0-rx-0", "irq/40-rt0", "irq/9-acpi", "vhost-rt", "CPU 0/KVM"].into_iter().any(is_of_clients)
        );
    }

    #[test]
    fn what_differs_is_shown_and_also_a_line_that_comes_twice() {
        let lines = |text: &str| text.split(' ').map(str::to_owned).collect::<Vec<_>>();
        expect_same("knobs", &lines("a b"), &lines("a b")).unwrap();
        let error = expect_same("knobs", &lines("a b c"), &lines("a x c")).unwrap_err().to_string();
        assert!(error.ends_with(":\n- b\n+ x"), "{error}");
        let error = expect_same("knobs", &lines("a b"), &lines("a b b")).unwrap_err().to_string();
        assert!(error.contains("2 lines, now 3"), "{error}");
    }
}
