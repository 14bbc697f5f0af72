//! Kernel threads on the packet path, and services by name, from one pass over `/proc`.

use std::fs;
use std::path::Path;

use ontime_base::files::note;
use ontime_tenants::proc::{Stat, parse_stat};
use ontime_tenants::{ThreadId, limit_waits};

use super::{KernelThread, KernelThreadKind};
use crate::roots::entries;

/// The result of one pass over `/proc`.
#[derive(Debug, Default)]
pub(super) struct Found {
    pub(super) threads: Vec<KernelThread>,
    /// Names and ids of processes other than kernel threads.
    pub(super) services: Vec<(String, i32)>,
}

pub(super) fn scan(proc: &Path, between: &mut dyn FnMut()) -> Found {
    let mut found = Found::default();
    for entry in entries(proc) {
        between();
        let name = entry.file_name();
        if !name.as_encoded_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        let line = limit_waits(|| fs::read(entry.path().join("stat"))).inspect_err(note);
        let stat = line.ok().and_then(|line| parse_stat(&line));
        // A service that has ended but was not reaped changes nothing.
        let Some(stat) = stat.filter(|stat| !stat.has_ended()) else { continue };
        if !stat.is_kthread() {
            found.services.push((stat.comm, stat.tid));
        } else if let Some(kind) = kind_of(&stat.comm) {
            found.threads.push(kernel_thread(stat, kind));
        }
    }
    found.threads.sort_by_key(|thread| thread.id.tid);
    found
}

fn kernel_thread(stat: Stat, kind: KernelThreadKind) -> KernelThread {
    let id = ThreadId { pid: stat.tid, tid: stat.tid, start_time: stat.start_time };
    KernelThread { id, kind, comm: stat.comm, policy: stat.policy }
}

/// The first kernel that shows the whole name of a kernel thread (`fs/proc/array.c`, `proc_task_name`).
pub(super) const WHOLE_NAMES: (u32, u32) = (5, 17);
/// Number of bytes of the name that older kernels show.
pub(super) const CUT: usize = 15;

/// The purpose of a kernel thread, from its name. User space cannot create kernel threads, so the name is reliable.
fn kind_of(comm: &str) -> Option<KernelThreadKind> {
    let (family, rest) = comm.split_once('/')?;
    let cpu = || rest.parse().ok();
    match family {
        // irq/38-virtio2-input.0, or irq/38-s-NAME for the second half of a handler that has a second thread.
        "irq" => rest.split_once('-')?.0.parse().ok().map(KernelThreadKind::Irq),
        // napi/NIC-ID. The NIC's name may contain dashes.
        "napi" => {
            let id = rest.rsplit_once('-').and_then(|(_, id)| id.parse().ok());
            id.map(KernelThreadKind::Napi).or((comm.len() == CUT).then_some(KernelThreadKind::NapiCut))
        }
        "napi-poll" => rest.rsplit_once('-')?.1.parse().ok().map(KernelThreadKind::NapiPoll),
        "ksoftirqd" => cpu().map(KernelThreadKind::Ksoftirqd),
        "ktimers" => cpu().map(KernelThreadKind::Ktimers),
        "rcuc" => cpu().map(KernelThreadKind::Rcuc),
        "backlog_napi" => cpu().map(KernelThreadKind::BacklogNapi),
        "irq_work" => cpu().map(KernelThreadKind::IrqWork),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_say_what_a_thread_is_for() {
        for (name, kind) in [
            ("irq/38-virtio2-input.0", Some(KernelThreadKind::Irq(38))),
            ("irq/7-s-acpi", Some(KernelThreadKind::Irq(7))),
            ("napi/eth-0-8193", Some(KernelThreadKind::Napi(8193))),
            ("napi-poll/eth-0-8193", Some(KernelThreadKind::NapiPoll(8193))),
            ("ksoftirqd/12", Some(KernelThreadKind::Ksoftirqd(12))),
            ("ktimers/0", Some(KernelThreadKind::Ktimers(0))),
            ("rcuc/1", Some(KernelThreadKind::Rcuc(1))),
            ("backlog_napi/1", Some(KernelThreadKind::BacklogNapi(1))),
            ("irq_work/3", Some(KernelThreadKind::IrqWork(3))),
            ("kworker/0:1", None),
            ("irq/x-y", None),
            ("napi/eth0", None),
            ("napi/enp129s0f1", Some(KernelThreadKind::NapiCut)),
            ("napi/ens2f1-820", Some(KernelThreadKind::Napi(820))),
            ("ksoftirqd/", None),
            ("", None),
        ] {
            assert_eq!(kind_of(name), kind, "{name}");
        }
    }

    #[test]
    fn what_has_ended_and_was_not_reaped_is_no_service() {
        let proc = tempfile::tempdir().unwrap();
        for (number, state) in [("7", 'Z'), ("8", 'S'), ("9", 'X'), ("10", 'R')] {
            fs::create_dir(proc.path().join(number)).unwrap();
            let line = fs::read_to_string("/proc/self/stat").unwrap();
            let fields = line.rsplit_once(')').unwrap().1.trim_start().split_once(' ').unwrap().1;
            let line = format!("{number} (irqbalance) {state} {fields}");
            fs::write(proc.path().join(number).join("stat"), line).unwrap();
        }
        let mut running: Vec<i32> =
            scan(proc.path(), &mut || ()).services.into_iter().map(|(_, number)| number).collect();
        running.sort_unstable();
        assert_eq!(running, [8, 10]);
    }

    proptest::proptest! {
        #[test]
        fn any_name_is_read_without_harm(name in "(irq|napi|ktimers|rcuc)/[0-9a-z.:\\-]{0,20}|\\PC{0,20}") {
            if let Some(KernelThreadKind::Napi(id)) = kind_of(&name) {
                proptest::prop_assert!(name.ends_with(&id.to_string()) || name.contains("-0") || name.contains("-+"));
            }
        }
    }
}
