//! `ontime doctor`: finds what makes RT packets late on this host, what that costs, and the remedy. Changes nothing.
//!
//! The checks are those of `ontime_hostnet::doctor`. Here they are ranked: first those that concern the running RT
//! tenants; then by state, worst first; then by how late a packet may be.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::process::ExitCode;
use std::time::Duration;

use ontime_hostnet::doctor::{self, Check, Diagnosis, Refused, State};
use ontime_hostnet::inventory::Note;
use ontime_hostnet::smi::Counting;
use ontime_hostnet::{Intent, Inventory, LiveHost, Method, Originals, Probes, as_found, kvm, placement};
use ontime_sched::BackendKind;
use ontime_tenants::text::counted;
use ontime_tenants::{Class, Discovery, Kind, Policy, ProblemKind, Sources, Tenant, ThreadId, discover};
use textwrap::fill;

use crate::api;
use crate::client::{self, ClientError};
use crate::daemon::config::Config;
use crate::daemon::view;
use crate::paths::Paths;
use crate::table::{visible, wrapping};
use crate::unseen::Unseen;

/// `ontime doctor`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print JSON: every check, also those that are ok.
    #[arg(long)]
    json: bool,
    /// Show every check, not only the three most important findings.
    #[arg(long, short)]
    all: bool,
}

/// How long SMIs are counted, where that is possible.
const SMI_TIME: Duration = Duration::from_millis(500);

/// Examines the host. Exit status 0 ok, 1 warning, 2 critical, 3 where something could not be determined or not
/// everything could be seen.
///
/// # Errors
/// Where the configuration is wrong.
pub(crate) fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    let config = Config::load(&paths.config_dir)?;
    let (status, reserved, missed) = ask(&paths.socket());
    let caps = status.as_ref().is_some_and(|status| status.caps.in_force);
    let (method, missed) = in_force(status.as_ref(), missed);
    let polling = status.as_ref().map(|status| status.polling.clone()).unwrap_or_default();
    let tried = |knob: &api::KnobState| matches!(knob.state.as_str(), "failed" | "unsupported");
    let knobs = status.into_iter().flat_map(|status| status.knobs).filter(tried);
    let refused: Refused = knobs.map(|knob| (knob.knob, knob.why.unwrap_or_default())).collect();
    let roots = paths.roots();
    // The probe may take two seconds; the rest is read meanwhile.
    let device = roots.dev.join("kvm");
    let probe = std::thread::spawn(move || kvm::probe(&device));
    let mut inventory = Inventory::scan(&roots);
    let counting = Counting::start(&roots, &inventory);
    let originals = paths.originals().unwrap_or_else(|error| {
        inventory.notes.push(Note { about: "original values".to_owned(), why: error.to_string() });
        Originals::default()
    });
    let found = discover(&Sources::host(), &config.rules);
    let missed = inventory.incomplete.iter().fold(missed.and(&view::unseen(&found)), Unseen::also);
    inventory.notes.extend(unread(&found));
    let mut intent = Intent::new(&config.host, config.rules.table(), found.tenants, caps);
    intent.method = method.unwrap_or(intent.method);
    let rests = polling.iter().filter(|nic| !nic.polling);
    intent.resting = rests.filter_map(|nic| Some(inventory.nic(&nic.nic)?.id.ifindex)).collect();
    intent.deadline_backend = config.sched.backend == BackendKind::Deadline;
    intent.reserved = reserved.map(|reserved| kept(&reserved, &intent.tenants)).unwrap_or_default();
    let (inventory, intent) = as_found(inventory, intent, &originals);
    let stake = RtCounts::of(&intent.tenants, missed.is_none());
    let memory = placement::of_rt_tenants(&roots, &inventory, &intent);
    let smi = counting.map_or_else(|instead| instead, |counting| counting.finish(SMI_TIME));
    let kvm = probe.join().unwrap_or_else(|_| kvm::KvmProbe::Unknown("the probe ended early".to_owned()));
    let probes = Probes { kvm, smi, memory };
    let mut diagnosis =
        doctor::examine(&LiveHost::with_roots(roots), &inventory, &intent, &found.problems, &refused, &probes);
    if !missed.is_none() {
        diagnosis.doubt_absence();
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &api::Versioned::of(&diagnosis))?;
        writeln!(out)?;
    } else {
        let colour = std::io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none();
        Page { out: &mut out, colour }.write(&diagnosis, stake, args.all)?;
    }
    Ok(ExitCode::from(missed.print(diagnosis.state.exit_code())))
}

/// Asks the daemon, if one runs, for its status and reservations. Without the reservations, each vCPU whose policy a
/// back end has set would look like a thread with the wrong policy.
fn ask(socket: &Path) -> (Option<api::Status>, Option<api::Reservations>, Unseen) {
    let missed = Unseen::rights();
    let status = match client::get::<api::Status>(socket, "/v1/status") {
        Ok(status) => status,
        Err(ClientError::NoDaemon { .. }) => return (None, None, missed),
        Err(error) => return (None, None, missed.also(error)),
    };
    match client::get::<api::Reservations>(socket, "/v1/reservations") {
        Ok(reserved) => (Some(status), Some(reserved), missed),
        Err(error) => (Some(status), None, missed.also(format!("reserved CPU time: {error}"))),
    }
}

/// The method that the daemon has in force. A daemon of another version may have a method that this version does not
/// know; then the rules are examined by the configured one.
fn in_force(status: Option<&api::Status>, missed: Unseen) -> (Option<Method>, Unseen) {
    match status.map(|status| status.method.parse::<Method>()).transpose() {
        Ok(method) => (method, missed),
        Err(error) => {
            let what = "method of the daemon, so the rules are examined by the configured one";
            (None, missed.also(format!("{what}: {error}; restart ontimed, so that it has this version")))
        }
    }
}

/// Processes, records and cgroups that discovery could not read, or not to their end.
fn unread(found: &Discovery) -> impl Iterator<Item = Note> + '_ {
    let is_unread = |kind: &ProblemKind| {
        matches!(
            kind,
            ProblemKind::Unreadable(_)
                | ProblemKind::CgroupV1(_)
                | ProblemKind::NoOwnCgroup(_)
                | ProblemKind::NotRead(_)
                | ProblemKind::RecordUnread(_)
        )
    };
    let unread = found.problems.iter().filter(move |one| is_unread(&one.kind));
    unread.map(|one| Note { about: one.subject.clone(), why: format!("{}; {}", one.message(), one.remedy()) })
}

/// The vCPU threads with reserved CPU time. The daemon's back end moves them, so their present policy does not matter.
fn kept(reserved: &api::Reservations, tenants: &[Tenant]) -> BTreeMap<ThreadId, Policy> {
    let by_kernel = reserved.backend == BackendKind::Deadline.name();
    let policy = if by_kernel { Policy::Deadline { runtime: 0, deadline: 0, period: 0 } } else { Policy::BULK };
    let is_kept = |id: &ThreadId| !reserved.foreseen && reserved.vcpus.iter().any(|vcpu| vcpu.tid == id.tid);
    let threads = tenants.iter().flat_map(|tenant| &tenant.threads).map(|thread| thread.id);
    threads.filter(is_kept).map(|id| (id, policy)).collect()
}

/// The numbers of running RT tenants. Some findings matter only to VMs or only to containers.
#[derive(Debug, Clone, Copy)]
struct RtCounts {
    vms: usize,
    containers: usize,
    /// Whether all tenants could be seen.
    all: bool,
}

impl RtCounts {
    fn of(tenants: &[Tenant], all: bool) -> Self {
        let rt = tenants.iter().filter(|tenant| tenant.class != Class::Bulk);
        let (containers, vms) = rt.partition::<Vec<&Tenant>, _>(|tenant| tenant.kind == Kind::Container);
        Self { vms: vms.len(), containers: containers.len(), all }
    }

    /// Whether a check concerns one of them. Most checks concern the host's packet path, which all tenants use. Where
    /// no RT tenant runs, every check may concern the first one.
    fn has(self, check: &str) -> bool {
        match check {
            _ if self.vms + self.containers == 0 => true,
            "veth" => self.containers > 0,
            "kvm" | "vcpu-place" | "vnic-place" | "vmm-place" | "interrupt-context" | "tap-batch" | "halt-poll"
            | "kvm-upkeep" | "guest-memory" | "vmm-settings" | "budget-timer" => self.vms > 0,
            _ => true,
        }
    }
}

impl std::fmt::Display for RtCounts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self.vms, self.containers) {
            (0, 0) if self.all => f.write_str("no RT tenant runs"),
            (0, 0) => f.write_str("no RT tenant could be seen"),
            (vms, containers) => {
                write!(f, "{}, {}", counted(vms, "RT VM"), counted(containers, "RT container"))?;
                f.write_str(if self.all { "" } else { " could be seen" })
            }
        }
    }
}

/// The checks that are not ok: those that concern the running RT tenants first, of these the worst states, of these the
/// longest delays.
fn ranked(checks: &[Check], stake: RtCounts) -> Vec<&Check> {
    let mut found: Vec<&Check> = checks.iter().filter(|check| check.state != State::Ok).collect();
    found.sort_by_key(|check| Reverse((stake.has(&check.id), check.state, check.delay_us)));
    found
}

/// The number of findings that the summary shows in full.
const SHOWN: usize = 3;

struct Page<'a, W: Write> {
    out: &'a mut W,
    colour: bool,
}

impl<W: Write> Page<'_, W> {
    fn write(&mut self, diagnosis: &Diagnosis, stake: RtCounts, all: bool) -> std::io::Result<()> {
        let count = |state| diagnosis.checks.iter().filter(|check| check.state == state).count();
        self.text("", "", &format!("kernel {}; {stake}", diagnosis.kernel))?;
        let (ok, unknown) = (count(State::Ok), count(State::Unknown));
        let (critical, warnings) = (count(State::Critical), count(State::Warning));
        let warnings = counted(warnings, "warning");
        writeln!(self.out, "{critical} critical, {warnings}, {unknown} unknown, {ok} ok\n")?;
        if all {
            for check in &diagnosis.checks {
                self.check(check, "")?;
            }
            return diagnosis
                .notes
                .iter()
                .try_for_each(|note| self.text("not read  ", "          ", &format!("{}: {}", note.about, note.why)));
        }
        let found = ranked(&diagnosis.checks, stake);
        let (first, rest) = found.split_at(found.len().min(SHOWN));
        for (number, check) in (1..).zip(first) {
            self.check(check, &format!("{number}. "))?;
            writeln!(self.out)?;
        }
        let mut folded = Vec::new();
        if !rest.is_empty() {
            let named = |check: &&Check| match check.state {
                State::Critical => format!("{} (critical)", check.id),
                _ => check.id.clone(),
            };
            let names: Vec<String> = rest.iter().map(named).collect();
            folded.push(format!("{} more: {}.", rest.len(), names.join(", ")));
        }
        if !diagnosis.notes.is_empty() {
            folded.push(format!("{} could not be read.", counted(diagnosis.notes.len(), "fact")));
        }
        folded.push("All checks: ontime doctor --all".to_owned());
        self.text("", "", &folded.join(" "))
    }

    /// Shows a check. If it is not ok, also shows its cost and remedy.
    fn check(&mut self, check: &Check, number: &str) -> std::io::Result<()> {
        let (word, code) = match check.state {
            State::Ok => ("ok", "32"),
            State::Unknown => ("unknown", "36"),
            State::Warning => ("WARNING", "33"),
            State::Critical => ("CRITICAL", "31"),
        };
        let plain = format!("{number}{word:8}  ");
        let line = format!("{plain}{}: {}", check.id, visible(&check.found));
        let wrapped = fill(&line, wrapping().subsequent_indent("          "));
        let coloured = format!("{number}\x1b[{code}m{word:8}\x1b[0m  ");
        // The text is wrapped without escape sequences, because they take no column; they are inserted afterwards.
        writeln!(self.out, "{}", if self.colour { wrapped.replacen(&plain, &coloured, 1) } else { wrapped })?;
        if check.state == State::Ok {
            return Ok(());
        }
        let source = if check.cost_source.is_empty() { String::new() } else { format!(" [{}]", check.cost_source) };
        let who = if check.ontime_can_apply { " (ontime applies it)" } else { "" };
        let rows = [("cost", &check.cost, source.as_str()), ("remedy", &check.remedy, who)];
        for (name, text, end) in rows.into_iter().filter(|(_, text, _)| !text.is_empty()) {
            self.text(&format!("          {name:6}  "), "                  ", &format!("{text}{end}"))?;
        }
        Ok(())
    }

    fn text(&mut self, first: &str, rest: &str, text: &str) -> std::io::Result<()> {
        writeln!(self.out, "{}", fill(&visible(text), wrapping().initial_indent(first).subsequent_indent(rest)))
    }
}

#[cfg(test)]
#[path = "../../hostnet/tests/support/fleet.rs"]
mod fleet;

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::unix::net::UnixListener;

    use ontime_hostnet::inventory::{Conflict, CpuManager, IdleState, LinkPolicy, Lockdown};
    use ontime_hostnet::{CpuSet, Host, Knob, KnobError, Obstacle, RULES, Root, SmiCount, Value};
    use ontime_tenants::vmm::Delay;
    use ontime_tenants::{Problem, ThreadRole};
    use textwrap::core::display_width;

    use super::*;
    use crate::table::WIDTH;

    const NOBODY: RtCounts = RtCounts { vms: 0, containers: 0, all: true };

    fn check(id: &str, state: State, delay_us: u32) -> Check {
        Check {
            id: id.to_owned(),
            title: format!("title of {id}"),
            state,
            found: format!("what was found of {id}, in many words: {}", "word ".repeat(30)),
            delay_us,
            cost: format!("up to {delay_us} us"),
            cost_source: "a source".to_owned(),
            remedy: format!("/a/path/that/is/longer/than/the/page/{}", "x".repeat(90)),
            ontime_can_apply: true,
        }
    }

    /// What [`ask`] returns where a daemon gives these answers, each an HTTP status and a body, and then ends.
    fn asked(answers: &[(u16, String)]) -> (Option<api::Status>, Option<api::Reservations>, Unseen) {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("sock");
        let listener = UnixListener::bind(&path).unwrap();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                for (status, body) in answers {
                    let (mut stream, _) = listener.accept().unwrap();
                    let mut request = Vec::new();
                    while !request.ends_with(b"\r\n\r\n") {
                        let mut byte = [0];
                        stream.read_exact(&mut byte).unwrap();
                        request.extend(byte);
                    }
                    let length = body.len();
                    write!(stream, "HTTP/1.1 {status} x\r\ncontent-length: {length}\r\n\r\n{body}").unwrap();
                }
            });
            ask(&path)
        })
    }

    /// A daemon's answer.
    fn status() -> serde_json::Value {
        serde_json::json!({
            "version": "1", "pid": 7, "kernel": "6.12", "state": "applied", "method": "partitioned",
            "method_by": "default", "passes": 1, "last_pass_seconds": 0.1, "polling": [], "knobs": [], "drift": 0,
            "caps": { "in_force": true, "why": null, "protections_off": false, "threads": [] },
            "findings": [], "problems": [],
        })
    }

    #[test]
    fn reservations_that_the_daemon_did_not_tell_are_missed_and_not_taken_for_none() {
        for (code, said) in [(503, "the daemon's loop does not answer"), (200, "{}")] {
            let (status, reserved, missed) = asked(&[(200, status().to_string()), (code, said.to_owned())]);
            assert!(status.is_some_and(|status| status.pid == 7) && reserved.is_none());
            assert!(format!("{missed:?}").contains("reserved CPU time: "), "{missed:?}");
        }
        // A host without a daemon has no reservations.
        let directory = tempfile::tempdir().unwrap();
        let (status, reserved, missed) = ask(&directory.path().join("none"));
        assert!(status.is_none() && reserved.is_none());
        assert_eq!(format!("{missed:?}"), format!("{:?}", Unseen::rights()));
    }

    #[test]
    fn a_method_of_another_version_is_missed_and_not_taken_for_the_configured_one() {
        let of = |name: &str| {
            let status = api::Status { method: name.to_owned(), ..serde_json::from_value(status()).unwrap() };
            let (method, missed) = in_force(Some(&status), Unseen::default());
            (method, format!("{missed:?}"))
        };
        let none = format!("{:?}", Unseen::default());
        for &method in Method::ALL {
            assert_eq!(of(method.name()), (Some(method), none.clone()));
        }
        let (method, missed) = of("urgency");
        assert!(method.is_none() && missed.contains("'urgency' is not a method; this version has"), "{missed}");
        let (method, missed) = in_force(None, Unseen::default());
        assert!(method.is_none() && missed.is_none(), "a host without a daemon has the configured method");
    }

    fn diagnosis() -> Diagnosis {
        let checks = vec![
            check("kernel", State::Ok, 0),
            check("vnic-place", State::Warning, 21_876),
            check("idle-states", State::Warning, 133),
            check("veth", State::Warning, 1_067),
            check("preempt-rt", State::Critical, 225),
            check("smt", State::Unknown, 25),
            check("kvm", State::Critical, doctor::ENDLESS),
            check("napi-threaded", State::Critical, 6_182),
        ];
        let note = Note { about: "a file".to_owned(), why: "denied".to_owned() };
        Diagnosis { kernel: "7.2\x1b[2J".to_owned(), state: State::Critical, checks, notes: vec![note] }
    }

    fn page(stake: RtCounts, all: bool, colour: bool) -> String {
        let mut out = Vec::new();
        Page { out: &mut out, colour }.write(&diagnosis(), stake, all).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn findings_are_ranked_for_the_tenants_that_run_then_by_state_then_by_delay() {
        let order = |stake| -> Vec<String> {
            ranked(&diagnosis().checks, stake).iter().map(|check| check.id.clone()).collect()
        };
        let both = order(RtCounts { vms: 1, containers: 1, all: true });
        assert_eq!(both, ["kvm", "napi-threaded", "preempt-rt", "vnic-place", "veth", "idle-states", "smt"]);
        let containers = order(RtCounts { vms: 0, containers: 2, all: true });
        assert_eq!(containers, ["napi-threaded", "preempt-rt", "veth", "idle-states", "smt", "kvm", "vnic-place"]);
        let vms = order(RtCounts { vms: 3, containers: 0, all: true });
        assert_eq!(vms, ["kvm", "napi-threaded", "preempt-rt", "vnic-place", "idle-states", "smt", "veth"]);
        assert_eq!(order(NOBODY), both, "any may be the first tenant's");
    }

    #[test]
    fn the_summary_shows_three_and_names_the_rest() {
        let text = page(RtCounts { vms: 1, containers: 1, all: true }, false, false);
        assert!(text.contains("1 RT VM, 1 RT container\n3 critical, 3 warnings, 1 unknown, 1 ok\n"), "{text}");
        let shown: Vec<&str> = text.lines().filter(|line| line.contains(": what was found of ")).collect();
        assert_eq!(shown.len(), 3, "{text}");
        assert!(
            shown[0].starts_with("1. CRITICAL  kvm:") && shown[2].starts_with("3. CRITICAL  preempt-rt:"),
            "{text}"
        );
        assert!(text.contains("4 more: vnic-place, veth, idle-states, smt."), "{text}");
        assert!(text.contains("1 fact could not be read."), "{text}");
        assert!(text.contains("ontime doctor --all"), "{text}");
        let text = page(NOBODY, false, false);
        assert!(text.contains("no RT tenant runs"), "{text}");
        // What makes the exit status 2 is named, whomever it concerns.
        let text = page(RtCounts { vms: 0, containers: 1, all: true }, false, false);
        assert!(text.contains("4 more: idle-states, smt, kvm (critical), vnic-place."), "{text}");
    }

    /// A host on which every knob has another value. The kernel refuses all of them, and files in /sys fail.
    struct RefusingHost;

    impl Host for RefusingHost {
        fn read(&self, knob: &Knob) -> Result<Value, KnobError> {
            let source = std::io::Error::from_raw_os_error(5);
            match knob {
                Knob::HostFile { root: Root::Sys, .. } => {
                    Err(KnobError::Os { knob: knob.to_string(), what: "reading", source })
                }
                _ => Ok(Value::Text("otherwise".to_owned())),
            }
        }
        fn write(&self, knob: &Knob, _: &Value) -> Result<(), KnobError> {
            panic!("{knob} was written")
        }
        fn foresee(&self, knob: &Knob, _: &Value) -> Option<Obstacle> {
            let cgroup =
                format!("/kubepods.slice/{}.slice/cri-containerd-{}.scope", "pod7_".repeat(25), "0af9".repeat(16));
            let lasting = matches!(knob, Knob::HostFile { .. });
            Some(Obstacle {
                cause: format!("cgroup {cgroup} has no budget"),
                remedy: "give it one".to_owned(),
                lasting,
            })
        }
    }

    /// A host on which every row but the rules' is bad, with names as long as Linux, libvirt and Kubernetes allow them.
    fn worst(name: &str) -> Diagnosis {
        let (mut inventory, mut intent) = fleet::two_vms();
        let cpus = |text: &str| CpuSet::from_list(text).unwrap();
        let path = |dir: &str| format!("{dir}/{}", "x".repeat(255));
        let [far, nic] = ["enP65535p255s31", "enp129s0f0np0v1"];
        for (at, new) in [far, nic].into_iter().enumerate() {
            new.clone_into(&mut inventory.nics[at].id.name);
            intent.tenants[at].vnics[0].lower = vec![new.to_owned()];
        }
        name.clone_into(&mut intent.tenants[0].name);
        for vcpu in intent.tenants[0].threads.iter_mut().filter(|one| matches!(one.role, ThreadRole::Vcpu(_))) {
            "10-12".clone_into(&mut vcpu.affinity);
        }
        let kernel = &mut inventory.kernel;
        kernel.release = format!("6.12.48+deb13-{}", "rt".repeat(25));
        (kernel.version, kernel.realtime, kernel.threaded_irqs) = ((6, 12), false, false);
        (kernel.lockdown, kernel.pressure) = (Lockdown::Confidentiality, true);
        (kernel.hrtick_dl, intent.deadline_backend) = (None, true);
        let state =
            |number: u32| IdleState { name: format!("C{number}"), latency_us: Some(133), enabled_on: cpus("0-63") };
        inventory.cpus.idle_states = (1..9).map(state).collect();
        inventory.cpus.governors =
            [("conservative".to_owned(), cpus("0,2,4,6,8,10,12,14,16,18,20,22,24,26,28"))].into();
        inventory.cpus.clocksource = "hyperv_clocksource_msr".to_owned();
        inventory.cpus.smt_active = Some(true);
        inventory.cpus.siblings = (0..32).map(|core| cpus(&format!("{core},{}", core + 32))).collect();
        (inventory.cpus.isolated, inventory.cpus.nohz_full) = (cpus("8-11"), cpus("8"));
        let nodes = [(0, (cpus("0-31"), vec![10, 21])), (1, (cpus("32-63"), vec![21, 10]))];
        (inventory.cpus.nodes, inventory.nics[0].node) = (nodes.into(), Some(1));
        inventory.cpus.bpf_scheduler = Some(format!("lavd_{}", "1.0.19_".repeat(17)));
        inventory.udev.rules = vec![path("/etc/udev/rules.d"), path("/run/udev/rules.d")];
        let policy =
            LinkPolicy { file: path("/etc"), policy: "spread".to_owned(), among: "IRQAffinity=0-3".to_owned() };
        inventory.udev.links = [(nic.to_owned(), policy)].into();
        let sysctls = [("kernel/nmi_watchdog", "1"), ("vm/stat_interval", "1"), ("kernel/timer_migration", "0")];
        inventory.sysctls.extend(sysctls.map(|(name, value)| (name.to_owned(), value.to_owned())));
        (inventory.memory.merged, inventory.memory.balanced, inventory.memory.swap) = (true, true, true);
        inventory.memory.collapsed = Some("always".to_owned());
        (inventory.kvm.clock_sync, inventory.kvm.page_recovery) = (true, true);
        let beside = |service: &str| Conflict { service: service.to_owned(), pid: 4_194_304 };
        inventory.conflicts = ["irqbalance", "tuned", "kubelite", "ovs-vswitchd", "scx_loader"].map(beside).into();
        inventory.pollers = vec![("pmd-c63/id:9".to_owned(), cpus("10"))];
        let (policy, shared, exclusive) = ("static".to_owned(), cpus("0-4,10"), cpus("5"));
        inventory.cpu_manager = Some(CpuManager { policy, shared, exclusive });
        inventory.notes = vec![Note { about: "NAPI instances".to_owned(), why: path("/sys/class/net") }];
        let delays =
            [Delay::NoIrqchip, Delay::HiddenIdle, Delay::NoVectors("virtio-net-pci-non-transitional".to_owned())];
        let problem = |delay| Problem { subject: name.to_owned(), kind: ProblemKind::Delay(delay) };
        let memory = [(intent.tenants[0].process, Ok([(1, 9)].into()))].into();
        let smi = SmiCount::Counted { most: 12, cpu: 63, during: Duration::from_secs(1) };
        let probes = Probes { kvm: kvm::KvmProbe::Broken(path("/dev/kvm: ioctl")), smi, memory };
        doctor::examine(&RefusingHost, &inventory, &intent, &delays.map(problem), &Refused::new(), &probes)
    }

    /// Rows as doctor makes them: nothing of them is cut off, and nothing is beyond the page.
    #[test]
    fn the_longest_rows_that_doctor_can_have_fit_the_page_whole() {
        let joined = |text: &str| text.split_whitespace().collect::<String>();
        let label = "a123456789".repeat(25);
        let names = [label.clone(), "press line 4 ".repeat(19), "工場の制御装置".repeat(12), label[..63].to_owned()];
        for name in &names {
            let found = worst(name);
            let no_rule = |check: &&Check| !RULES.iter().any(|rule| rule.id.name() == check.id);
            let good: Vec<&str> = found
                .checks
                .iter()
                .filter(no_rule)
                .filter(|one| one.state == State::Ok)
                .map(|one| one.id.as_str())
                .collect();
            assert!(good.is_empty(), "{good:?} are not bad here");
            assert!(found.checks.iter().any(|check| check.state == State::Unknown));
            let stake = RtCounts { vms: 1, containers: 0, all: true };
            for (all, colour) in [(false, false), (true, false), (true, true)] {
                let mut out = Vec::new();
                Page { out: &mut out, colour }.write(&found, stake, all).unwrap();
                let coloured = String::from_utf8(out).unwrap();
                let codes = ["31", "32", "33", "36", "0"].map(|code| format!("\x1b[{code}m"));
                let text = codes.iter().fold(coloured, |text, code| text.replace(code, ""));
                let longest = text.lines().max_by_key(|line| display_width(line)).unwrap();
                assert!(display_width(longest) <= WIDTH, "{longest}");
                let whole = joined(&text);
                let shown = if all { found.checks.iter().collect() } else { ranked(&found.checks, stake) };
                for check in shown.iter().take(if all { usize::MAX } else { SHOWN }) {
                    let parts = [&check.found, &check.cost, &check.remedy];
                    let parts = if check.state == State::Ok { &parts[..1] } else { &parts[..] };
                    assert!(parts.iter().all(|part| whole.contains(&joined(part))), "{check:?} is not whole: {text}");
                }
                let named = shown.iter().all(|check| whole.contains(&check.id));
                assert!(named && (!all || whole.contains(&joined(&found.notes[0].why))), "{text}");
            }
        }
    }

    #[test]
    fn what_discovery_did_not_read_is_a_note_with_its_remedy() {
        let of = |kind: ProblemKind| {
            let problems = vec![Problem { subject: "/docker/3c1f".to_owned(), kind }];
            unread(&Discovery { problems, ..Discovery::default() }).map(|note| (note.about, note.why)).next()
        };
        let v1 = "boot with cgroup v2 alone (systemd.unified_cgroup_hierarchy=1 on the kernel's command line)";
        for (kind, words, remedy) in [
            (ProblemKind::CgroupV1(1), "1 process is in containers by cgroup v1 alone", v1),
            (ProblemKind::CgroupV1(41), "41 processes are in containers by cgroup v1 alone", v1),
            (ProblemKind::NoOwnCgroup("/plc/x".to_owned()), "runs in cgroup /plc/x", "start it with a cgroup"),
            (ProblemKind::RecordUnread("it has 7 MiB".to_owned()), "7 MiB", "give rules for these containers by"),
            (ProblemKind::NotRead("9 threads".to_owned()), "9 threads", "each has a quota"),
            (ProblemKind::Unreadable("denied".to_owned()), "denied", "on the host"),
        ] {
            let (about, why) = of(kind).unwrap();
            assert!(about == "/docker/3c1f" && why.contains(words) && why.contains(remedy), "{why}");
        }
        assert!(
            [ProblemKind::SameName, ProblemKind::RuntimeUnknown, ProblemKind::StaleDomain(3)]
                .map(of)
                .iter()
                .all(Option::is_none)
        );
    }

    #[test]
    fn no_line_is_longer_than_the_page_and_escapes_are_harmless() {
        for all in [false, true] {
            let text = page(NOBODY, all, false);
            let longest = text.lines().max_by_key(|line| line.chars().count()).unwrap();
            assert!(longest.chars().count() <= WIDTH, "{longest}");
            assert!(!text.contains('\x1b'), "{text}");
        }
        let (plain, coloured) = (page(NOBODY, true, false), page(NOBODY, true, true));
        assert!(coloured.contains("\x1b[31mCRITICAL\x1b[0m  kvm: "), "{coloured}");
        let uncoloured = ["31", "32", "33", "36", "0"]
            .iter()
            .fold(coloured, |text, code| text.replace(&format!("\x1b[{code}m"), ""));
        assert_eq!(uncoloured, plain);
        let count = |word: &str| plain.lines().filter(|line| line.starts_with(word)).count();
        assert_eq!(
            [count("CRITICAL"), count("WARNING"), count("unknown"), count("ok"), count("not read")],
            [3, 3, 1, 1, 1]
        );
    }
}
