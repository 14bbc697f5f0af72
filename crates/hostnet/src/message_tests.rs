//! Every error names its object, its cause and its remedy.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // a test that cannot go on fails

use std::fs;
use std::io;
use std::path::Path;

use ontime_tenants::{Policy, ThreadId};

use crate::apply::{Done, apply, reset};
use crate::journal::{BOOT_ID, Journal, JournalError, Original, Originals};
use crate::knob::{Host, IrqId, Knob, KnobError, NicId, Root, SteerFrom, Value};
use crate::live::meaning;
use crate::obstacle::{explain, file_error, netlink_error};
use crate::plan::{Plan, contradiction};
use crate::roots::Roots;
use crate::rule::{RuleId, Setting, Stage};

const THREAD: ThreadId = ThreadId { pid: 811, tid: 812, start_time: 5 };
const CODES: [i32; 16] = [
    libc::EPERM,
    libc::EACCES,
    libc::EROFS,
    libc::EBUSY,
    libc::ENOSPC,
    libc::ENODEV,
    libc::ENOENT,
    libc::EINVAL,
    libc::EOPNOTSUPP,
    libc::EIO,
    libc::ENOMEM,
    libc::EMFILE,
    libc::ENFILE,
    libc::EAGAIN,
    libc::EAFNOSUPPORT,
    libc::E2BIG,
];

fn nic() -> NicId {
    NicId { ifindex: 4, name: "ens9".to_owned() }
}

fn file(root: Root, path: &str) -> Knob {
    Knob::HostFile { root, path: path.to_owned() }
}

fn place() -> Knob {
    Knob::ThreadPolicy { thread: THREAD, comm: "irq/9-ens9".to_owned() }
}

fn cpus() -> Knob {
    Knob::ThreadAffinity { thread: THREAD, comm: "irq/9-ens9".to_owned() }
}

/// One knob of each kind, with a possible value.
fn knobs() -> Vec<(Knob, Value)> {
    let (text, on) = (|| Value::Text("0".to_owned()), || Value::Present(true));
    let two = || Value::Cpus([2].into_iter().collect());
    let irq = IrqId { irq: 33, chip: "PCI-MSI".to_owned(), hwirq: "7".to_owned() };
    let feature = || "rx-gro".to_owned();
    let from = || SteerFrom::SourceMac([2, 0, 0, 0, 0, 9]);
    vec![
        (place(), Value::Policy(Policy::Fifo(47))),
        (place(), Value::Policy(Policy::Deadline { runtime: 1, deadline: 2, period: 2 })),
        (cpus(), two()),
        (Knob::IrqAffinity { irq }, two()),
        (file(Root::Proc, "sys/net/core/skb_defer_max"), text()),
        (file(Root::Debug, "sched/fair_server/cpu3/runtime"), text()),
        (Knob::HostCpus { root: Root::Proc, path: "irq/default_smp_affinity".to_owned() }, two()),
        (Knob::NicFile { nic: nic(), path: "threaded".to_owned() }, text()),
        (Knob::XpsCpus { nic: nic(), queue: 1 }, two()),
        (Knob::NapiThreaded { nic: nic(), napi: 8 }, Value::Threaded(1)),
        (Knob::Moderation { nic: nic() }, Value::Moderation(crate::Moderation { rx_usecs: 0, adaptive: None })),
        (Knob::Feature { nic: nic(), feature: feature() }, text()),
        (Knob::PeerFeature { nic: nic(), process: THREAD, peer: 2, feature: feature() }, text()),
        (Knob::Clsact { nic: nic() }, on()),
        (Knob::TxSteer { nic: nic(), queue: 3, from: from() }, on()),
        (Knob::RootQdisc { nic: nic() }, text()),
        (Knob::TapBatch { nic: nic(), process: THREAD }, on()),
        (Knob::SendBuffer { nic: nic(), process: THREAD }, text()),
    ]
}

/// A process's capabilities: all, none, or unknown.
fn roots(dir: &Path, rights: Option<u64>) -> Roots {
    let proc = dir.join("proc");
    fs::create_dir_all(proc.join("self")).unwrap();
    if let Some(rights) = rights {
        fs::write(proc.join("self/status"), format!("Name:\tontime\nCapEff:\t{rights:016x}\n")).unwrap();
    }
    Roots { proc, sys: dir.join("sys"), ..Roots::default() }
}

fn met(roots: &Roots, knob: &Knob, value: Option<&Value>, code: i32) -> KnobError {
    explain(roots, knob, value, meaning(knob, io::Error::from_raw_os_error(code)))
}

/// What an operator can do: a command, a configuration line, a kernel, an event to wait for.
const REMEDIES: [&str; 26] = [
    "run it as root",
    "run Ontime on the host",
    "allow it in that module's policy",
    "let it run on all of them",
    "give it another policy",
    "end or lower SCHED_DEADLINE threads",
    "put one online",
    "nothing to do",
    "wait until it is up: ip link show dev ens9",
    "see its messages: journalctl -k -g ens9",
    "free memory",
    "LimitNOFILE=",
    "sysctl fs.file-max",
    "journalctl -k -g 'blocked for more than'",
    "let RestrictAddressFamilies=",
    "report it with the output of `ontime report`",
    "boot with",
    "fewer queues",
    "a kernel that",
    "a kernel or NIC whose driver does",
    "a kernel package that has it",
    "ethtool -L ens9 combined 2",
    "Linux 6.17 or later",
    "give it that right",
    "ls -l /proc/811/fd",
    "-netdev tap,sndbuf=2147483646",
];

fn is_complete(text: &str, thing: &str, remedies: &[&str]) {
    let rest = text.strip_prefix(&format!("{thing}: ")).unwrap_or_else(|| panic!("{text} does not begin with {thing}"));
    let at = remedies.iter().filter_map(|remedy| rest.find(remedy)).min();
    let at = at.unwrap_or_else(|| panic!("{text} has no remedy"));
    assert!(at > 10, "{text} has no cause before its remedy");
    for word in ["somebody", "someone", "nobody", "whoever"] {
        assert!(!text.contains(word), "{text} says {word}");
    }
    assert!(text.len() < 420, "{text} is too long");
}

#[test]
fn every_refusal_of_every_knob_names_it_the_cause_and_a_remedy() {
    for rights in [None, Some(0), Some(u64::MAX)] {
        let dir = tempfile::tempdir().unwrap();
        let roots = roots(dir.path(), rights);
        for (knob, value) in knobs() {
            for code in CODES {
                for value in [Some(&value), None] {
                    let own = "take qdisc_bypass out of";
                    is_complete(
                        &met(&roots, &knob, value, code).to_string(),
                        &knob.to_string(),
                        &[&REMEDIES[..], &[own]].concat(),
                    );
                }
            }
        }
    }
}

#[test]
fn a_cause_that_is_known_has_the_remedy_that_ends_it() {
    let server = || file(Root::Debug, "sched/fair_server/cpu3/runtime");
    let irq = || Knob::IrqAffinity { irq: IrqId { irq: 33, chip: "PCI-MSI".to_owned(), hwirq: "7".to_owned() } };
    let moderation = || Knob::Moderation { nic: nic() };
    let (all, none) = (Some(u64::MAX), Some(0));
    for (knob, code, rights, cause, remedy) in [
        (cpus(), libc::EPERM, none, "no CAP_SYS_NICE", "run it as root"),
        (cpus(), libc::EPERM, all, "user namespace", "on the host, not in a container"),
        (place(), libc::EACCES, all, "a security module", "ausearch -m avc"),
        (place(), libc::EBUSY, all, "hold the CPU time", "ps -eLo tid,cls,comm"),
        (server(), libc::EBUSY, all, "hold the CPU time", "SCHED_DEADLINE threads"),
        (server(), libc::EPERM, all, "lockdown denies debugfs", "Secure Boot"),
        (cpus(), libc::EBUSY, all, "runs on all CPUs of its root domain", "chrt"),
        (cpus(), libc::EINVAL, all, "none of these CPUs is online", "/sys/devices/system/cpu/cpuN/online"),
        (irq(), libc::EINVAL, all, "none of these CPUs is online", "/etc/ontime/host.toml"),
        (irq(), libc::EIO, all, "keeps the affinity", "isolcpus=managed_irq"),
        (irq(), libc::ENOSPC, all, "no interrupt vector left", "ethtool -L"),
        (
            file(Root::Proc, "sys/net/core/skb_defer_max"),
            libc::EROFS,
            all,
            "mounted read-only",
            "ProtectKernelTunables=",
        ),
        (
            file(Root::Proc, "sys/net/core/skb_defer_max"),
            libc::EINVAL,
            all,
            "does not take that value",
            "a kernel that",
        ),
        (file(Root::Proc, "sys/net/core/skb_defer_max"), libc::EACCES, none, "no CAP_DAC_OVERRIDE", "run it as root"),
        (moderation(), libc::EPERM, none, "no CAP_NET_ADMIN", "ontimed.service"),
        (moderation(), libc::EBUSY, all, "busy, asleep or being reset", "ip link show dev ens9"),
        (moderation(), libc::ENODEV, all, "busy, asleep or being reset", "wait until it is up"),
        (moderation(), libc::EIO, all, "firmware fails", "journalctl -k -g ens9"),
        (moderation(), libc::EOPNOTSUPP, all, "driver does not let this be set", "ethtool -c"),
        (Knob::Feature { nic: nic(), feature: "rx-gro".to_owned() }, libc::EINVAL, all, "driver", "ethtool -k"),
        (Knob::Clsact { nic: nic() }, libc::ENOENT, all, "without sch_ingress", "modinfo"),
        (Knob::RootQdisc { nic: nic() }, libc::ENOENT, all, "without packet scheduling", "modinfo"),
        (Knob::Clsact { nic: nic() }, libc::EADDRINUSE, all, "in use", "tc filter show dev ens9 egress"),
        (Knob::Clsact { nic: nic() }, libc::EAGAIN, all, "did not answer in 2 s", "blocked for more than"),
        (Knob::TapBatch { nic: nic(), process: THREAD }, libc::ENODEV, all, "tap open", "sndbuf=2147483646"),
        (Knob::SendBuffer { nic: nic(), process: THREAD }, libc::EPERM, all, "CAP_SYS_PTRACE", "qdisc_bypass"),
        (Knob::SendBuffer { nic: nic(), process: THREAD }, libc::EACCES, none, "CAP_SYS_PTRACE", "run it as root"),
    ] {
        let dir = tempfile::tempdir().unwrap();
        let text = met(&roots(dir.path(), rights), &knob, None, code).to_string();
        is_complete(&text, &knob.to_string(), &[remedy]);
        assert!(text.contains(cause), "{knob} {code}: {text}");
    }
}

#[test]
fn errors_without_a_known_cause_end_at_a_report() {
    let unknown =
        KnobError::Os { knob: "x".to_owned(), what: "writing", source: io::Error::from_raw_os_error(libc::E2BIG) };
    is_complete(&unknown.to_string(), "x", &["journalctl -k"]);
    assert!(unknown.to_string().contains("Argument list too long"), "{unknown}");
    let value = KnobError::Value { knob: "x".to_owned(), why: "'a' is not a mask of CPUs".to_owned() };
    is_complete(&value.to_string(), "x", &["report it with the output of `ontime report`"]);
    is_complete(&KnobError::Gone("x".to_owned()).to_string(), "x", &["nothing to do"]);
    let dir = tempfile::tempdir().unwrap();
    let clsact = Knob::Clsact { nic: nic() };
    let changing = || io::Error::new(io::ErrorKind::Interrupted, "the kernel's table went on changing");
    let busy = explain(&roots(dir.path(), None), &clsact, None, meaning(&clsact, changing()));
    is_complete(&busy.to_string(), &clsact.to_string(), &["wait until that ends; ip monitor"]);
    let right = ontime_tenants::remedy(&io::Error::from_raw_os_error(libc::EPERM));
    for (code, netlink, file) in [
        (libc::EMFILE, "LimitNOFILE=", "LimitNOFILE="),
        (libc::ENOBUFS, "free memory", "free memory"),
        (libc::EPERM, right, right),
        (libc::EIO, "journalctl -k", "journalctl -k"),
        (libc::EAGAIN, "blocked for more than", "see the kernel's log"),
    ] {
        let error = io::Error::from_raw_os_error(code);
        is_complete(&netlink_error("rtnetlink", &error), "rtnetlink", &[netlink]);
        is_complete(&file_error("/proc/9/status", &error), "/proc/9/status", &[file]);
    }
}

#[test]
fn every_error_of_the_journal_names_the_file_the_cause_and_a_remedy() {
    let path = Path::new("/var/lib/ontime/originals");
    let io = |path: &Path, code| JournalError::Io {
        path: path.to_owned(),
        what: "writing",
        source: io::Error::from_raw_os_error(code),
        effect: "no setting was changed",
    };
    for (code, remedy) in [
        (libc::EPERM, "chattr -i"),
        (libc::EACCES, "run it as root"),
        (libc::EROFS, "mount -o remount,rw"),
        (libc::EBUSY, "ls -ld /var/lib/ontime"),
        (libc::ENOSPC, "free some space there (df /var/lib/ontime"),
        (libc::EDQUOT, "free some space"),
        (libc::ENODEV, "journalctl -k"),
        (libc::ENOENT, "ls -ld"),
        (libc::EINVAL, "ls -ld"),
        (libc::EOPNOTSUPP, "ls -ld"),
        (libc::EIO, "--state-dir DIR"),
        (libc::ENOTDIR, "move away"),
        (libc::EISDIR, "move away"),
        (libc::EMFILE, "LimitNOFILE="),
        (libc::ENOMEM, "free memory"),
    ] {
        is_complete(&io(path, code).to_string(), "/var/lib/ontime/originals", &[remedy]);
    }
    is_complete(&io(Path::new(BOOT_ID), libc::ENOENT).to_string(), BOOT_ID, &["mount -t proc proc /proc"]);
    let of = |why: &str| (path.to_owned(), why.to_owned());
    let (path, why) = of("line 2: unknown field cgroup");
    let other = JournalError::OtherVersion { path, why };
    is_complete(&other.to_string(), "/var/lib/ontime/originals", &["run `ontime reset` of that version"]);
    let (path, why) = of("its checksum does not match");
    let damaged = JournalError::Damaged { path: path.clone(), why };
    is_complete(&damaged.to_string(), "/var/lib/ontime/originals", &["mv /var/lib/ontime/originals "]);
    let held = JournalError::Held { path };
    is_complete(&held.to_string(), "/var/lib/ontime/originals", &["systemctl stop ontimed"]);
}

#[test]
fn a_journal_that_cannot_be_read_says_what_follows_for_a_look_and_for_a_change() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("originals");
    fs::create_dir(&path).unwrap();
    let look = Originals::read(&path, "boot").unwrap_err().to_string();
    assert!(look.contains("is shown as if the administrator had set it; move away"), "{look}");
    let change = Journal::open(&path, "boot").unwrap_err().to_string();
    assert!(change.contains("no setting was changed") && change.contains("move away"), "{change}");
}

/// No two rules of the table do this.
#[test]
fn two_rules_that_want_different_values_are_named_with_a_remedy() {
    let on = |rule, priority| Setting::new(rule, Stage::Place, place(), Value::Policy(Policy::Fifo(priority)));
    let found = contradiction(&on(RuleId::IrqThread, 50), &on(RuleId::DeviceIrq, 2));
    assert_eq!((found.object, found.rule), (place().to_string(), RuleId::DeviceIrq));
    assert_eq!(found.found, "irq-thread wants FIFO 50, device-irq wants FIFO 2");
    assert!(found.remedy.starts_with("give it one class in /etc/ontime"), "{}", found.remedy);
}

/// A host on which each write fails.
struct Fails(i32);

impl Host for Fails {
    fn read(&self, _: &Knob) -> Result<Value, KnobError> {
        Ok(Value::Text("1".to_owned()))
    }
    fn write(&self, knob: &Knob, value: &Value) -> Result<(), KnobError> {
        let dir = tempfile::tempdir().unwrap();
        Err(met(&roots(dir.path(), Some(u64::MAX)), knob, Some(value), self.0))
    }
}

#[test]
fn a_report_says_when_a_failed_knob_is_tried_again_and_how_to_live_without_an_unsupported_one() {
    let dir = tempfile::tempdir().unwrap();
    let mut journal = Journal::open(&dir.path().join("originals"), "boot").unwrap();
    let knob = Knob::NicFile { nic: nic(), path: "threaded".to_owned() };
    let setting = Setting::new(RuleId::NapiThreaded, Stage::Thread, knob.clone(), Value::Text("0".to_owned()));
    let needing = Setting { needs: vec![knob.clone()], ..setting.clone() };
    let plan = |settings| Plan { settings, findings: Vec::new() };
    let report = apply(&Fails(libc::EBUSY), &plan(vec![setting.clone()]), &mut journal).unwrap();
    let Done::Failed(why) = &report.items[0].done else { panic!("{report:?}") };
    assert!(why.ends_with("; the next pass tries again") && !why.contains(&knob.to_string()), "{why}");
    let mut kept = Journal::open(&dir.path().join("kept"), "boot").unwrap();
    kept.store(vec![Original { knob: knob.clone(), value: Value::Text("0".to_owned()) }]).unwrap();
    for code in [libc::EBUSY, libc::EOPNOTSUPP] {
        let report = reset(&Fails(code), &mut kept).unwrap();
        let (Done::Failed(why) | Done::Unsupported(why)) = &report.items[0].done else { panic!("{report:?}") };
        assert!(why.ends_with("stays in the journal, and `ontime reset` tries again"), "{why}");
    }
    let report = apply(&Fails(libc::EOPNOTSUPP), &plan(vec![setting]), &mut journal).unwrap();
    let Done::Unsupported(why) = &report.items[0].done else { panic!("{report:?}") };
    assert!(why.ends_with("for every NIC: without = [\"napi-threaded\"] in /etc/ontime/host.toml"), "{why}");
    let mut accepted = String::new();
    for (at, (knob, value)) in knobs().into_iter().enumerate() {
        let mut journal = Journal::open(&dir.path().join(at.to_string()), "boot").unwrap();
        let setting = Setting::new(RuleId::DeviceIrq, Stage::Place, knob, value);
        let report = apply(&Fails(libc::EROFS), &plan(vec![setting]), &mut journal).unwrap();
        let Done::Unsupported(why) = &report.items[0].done else { continue };
        let ends = why.ends_with(": without = [\"device-irq\"] in /etc/ontime/host.toml");
        assert_eq!(ends, !report.items[0].knob.to_string().contains("of thread "), "{why}");
        accepted += why;
    }
    for kind in ["for every interrupt of this rule:", "for every NIC:", "as it is:"] {
        assert!(accepted.contains(kind), "{accepted}");
    }
    let other = Knob::Clsact { nic: nic() };
    let other = Setting { knob: other, ..needing };
    let first = Setting::new(RuleId::NapiThreaded, Stage::Thread, knob, Value::Text("0".to_owned()));
    let report = apply(&Fails(libc::EBUSY), &plan(vec![first, other]), &mut journal).unwrap();
    let Done::Unsupported(why) = &report.items[1].done else { panic!("{report:?}") };
    assert!(why.contains("end the cause that stands there"), "{why}");
}
