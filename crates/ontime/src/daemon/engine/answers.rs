//! The engine's answers to requests: status, tenants, NICs, metrics, and what an apply would do. Nothing here changes
//! the host.

use ontime_hostnet::{self as hostnet, Knob, Method};
use ontime_tenants::{ThreadRole, discover};

use super::Engine;
use super::caps::UnpausedHost;
use super::look::{Known, Look};
use super::observe;
use super::reservations::UNRESERVED;
use crate::api;
use crate::daemon::cap::Pauses;
use crate::daemon::view::{self, Owned};
use crate::daemon::watches::Moved;

impl Engine {
    /// What an apply would change, with this method if one is given.
    pub(super) fn dry_run(&self, method: Option<Method>) -> api::Report {
        let (paused, pauses) = (self.paused(), self.pauses());
        let known = Known {
            method,
            journal: Some(&self.journal),
            caps: self.in_force,
            resting: Some(&self.traffic.resting),
            paused: &paused,
            pauses: Some(&pauses),
            keeper: Some(&self.keeper),
            ..Known::default()
        };
        let look = match self.state {
            api::State::Applied => {
                let mut look = Look::at(&self.sources, &self.config, &self.paths, known);
                look.reserves_nothing();
                look
            }
            api::State::Reset | api::State::Observing => {
                observe::to_be(&self.config, &self.paths, method, &self.journal, &self.keeper)
            }
        };
        observe::would(&look, &UnpausedHost { pauses, ..self.without_pacers() }, &self.journal, &self.look.settled)
    }

    /// The tenants as they are now.
    pub(crate) fn tenants(&self) -> api::Tenants {
        let found = discover(&self.sources, &self.config.rules);
        let mut shown: Vec<_> = found.tenants.iter().map(|tenant| view::tenant(tenant, self.table())).collect();
        let planned = self.keeper.planned_policies();
        for setting in &self.look.plan.settings {
            let Knob::ThreadPolicy { thread: id, .. } = &setting.knob else { continue };
            let threads = shown.iter_mut().filter(|tenant| tenant.pid == id.pid).flat_map(|tenant| &mut tenant.threads);
            for thread in threads.filter(|thread| thread.tid == id.tid) {
                thread.wanted = (!planned.moves(*id)).then(|| setting.value.to_string());
            }
        }
        api::Tenants { schema_version: api::SCHEMA_VERSION, tenants: shown, unseen: view::unseen(&found) }
    }

    fn without_pacers(&self) -> UnpausedHost<'_> {
        UnpausedHost { host: &self.host, pauses: Pauses::default(), paced: self.keeper.planned_policies() }
    }

    /// The NICs as the last pass found them.
    pub(crate) fn nics(&self) -> api::Nics {
        let look = &self.look;
        view::nics(&look.inventory, &look.intent, &look.plan, &|setting| self.knob_state(setting), self.unseen())
    }

    /// What the last pass could not read.
    fn unseen(&self) -> Vec<api::Problem> {
        let of_host = self.errors.iter().filter(|error| self.looks_again && error.subject == super::HOST);
        view::unseen(&self.look.found).into_iter().chain(of_host.cloned()).collect()
    }

    /// Metrics, brought up to date, as text.
    pub(crate) fn metrics_text(&mut self) -> String {
        self.catch_up();
        self.account_caps();
        self.account_reservations();
        self.account_traffic();
        self.account_steal();
        let states: Vec<api::KnobState> = self.knob_states();
        self.metrics.knobs(states.iter().map(|knob| knob.state.as_str()));
        self.metrics.text()
    }

    /// Updates the stolen time of the vCPUs of the last look.
    fn account_steal(&mut self) {
        let vcpus = self.look.found.tenants.iter().flat_map(|tenant| {
            let owned = Owned { name: tenant.name.clone(), class: tenant.class.to_string() };
            let vcpus = tenant.threads.iter().filter(|thread| matches!(thread.role, ThreadRole::Vcpu(_)));
            vcpus.map(move |thread| (thread.id, owned.clone()))
        });
        // Limited, because a VMM may name any number of threads.
        let vcpus = vcpus.take(self.config.daemon.cap_threads);
        let waited = vcpus.filter_map(|(id, owned)| Some((id, (owned, id.wait_time().ok()?)))).collect();
        self.metrics.stolen(&waited);
    }

    fn knob_states(&self) -> Vec<api::KnobState> {
        self.look.plan.settings.iter().map(|setting| self.knob_state(setting)).collect()
    }

    /// Why this method is in force.
    pub(super) fn method_by(&self) -> &'static str {
        match (self.method, self.config.host.method) {
            (Some(_), _) => "request",
            (None, Some(_)) => "configuration",
            (None, None) => "default",
        }
    }

    /// The status: the value that the plan gives each knob, and the value that was read now.
    pub(crate) fn status(&self) -> api::Status {
        let mut knobs = self.knob_states();
        if self.state == api::State::Observing {
            knobs.extend(self.would_reserve());
        }
        let mut problems: Vec<api::Problem> = self.look.found.problems.iter().map(view::problem).collect();
        problems.extend(self.errors.iter().cloned());
        let unserved = |why: &String| api::Problem { subject: "metrics".to_owned(), message: why.clone() };
        problems.extend(self.unserved.iter().map(unserved));
        let fault = |why: &str| api::Problem { subject: "reservations".to_owned(), message: why.to_owned() };
        problems.extend(self.requested.fault().map(fault));
        api::Status {
            schema_version: api::SCHEMA_VERSION,
            version: crate::version().to_owned(),
            pid: std::process::id(),
            kernel: self.look.inventory.kernel.release.clone(),
            state: self.state,
            method: self.look.intent.method.name().to_owned(),
            method_by: self.method_by().to_owned(),
            passes: self.passes,
            last_pass_seconds: self.last_pass.as_secs_f64(),
            caps: self.caps_status(),
            polling: self.polling(),
            drift: knobs.iter().filter(|knob| knob.state == "drifted").count(),
            knobs,
            findings: self.look.plan.findings.iter().map(view::finding).collect(),
            problems,
            unseen: self.unseen(),
            refused_configuration: self.refused.clone(),
            requested: self.requested.len(),
        }
    }

    /// The CPU time that would be reserved, as knobs.
    fn would_reserve(&self) -> impl Iterator<Item = api::KnobState> + '_ {
        let foreseen = &self.look.foreseen;
        foreseen.vcpus.iter().map(|vcpu| {
            let (knob, wanted) = view::reservation(foreseen, vcpu);
            let (rule, state) = (view::RESERVATION.to_owned(), "would-change".to_owned());
            api::KnobState { rule, knob, wanted, actual: None, state, why: Some(UNRESERVED.to_owned()) }
        })
    }

    fn knob_state(&self, setting: &hostnet::Setting) -> api::KnobState {
        let mut known = view::knob_state(&self.without_pacers(), setting);
        if known.state != "drifted" {
            return known;
        }
        let moved = match (&setting.knob, &known.actual) {
            (Knob::ThreadPolicy { thread, .. }, Some(actual)) => self.watches.moved(*thread, actual),
            _ => None,
        };
        let (state, why) = match self.failures.get(&setting.knob.key()) {
            _ if self.state == api::State::Reset => {
                ("not-applied", "`ontime reset` was called; nothing is applied until `ontime apply`".to_owned())
            }
            _ if self.state == api::State::Observing => {
                let foreseen = view::foreseen(&self.host, setting).unwrap_or(("would-change", None));
                (foreseen.0, foreseen.1.unwrap_or_else(|| "mode observe: nothing is set".to_owned()))
            }
            _ if moved == Some(Moved::Paused) => ("paused", "over its runtime cap this moment".to_owned()),
            _ if moved == Some(Moved::Ahead) => ("ahead", "put ahead of its level because of an interrupt".to_owned()),
            Some((state, why)) => (*state, why.clone()),
            None => ("drifted", "changed by another program since; set again at the next pass".to_owned()),
        };
        state.clone_into(&mut known.state);
        known.why = Some(why);
        known
    }

    fn caps_status(&self) -> api::Caps {
        let (threads, why) = match &self.caps {
            Ok(caps) => {
                let report = caps.report();
                let open = report.iter().find(|used| !used.cover.holds());
                let open = open.or_else(|| report.iter().find(|used| used.refused + used.escaped > 0));
                let why = open.map(|used| view::cap_thread(used, &self.watches.of)).map(|thread| {
                    let cause = thread.watched.strip_prefix("not: ").unwrap_or(&thread.watched);
                    format!("thread {} of {} is not held to its runtime cap: {cause}", thread.tid, thread.of)
                });
                let why = why.or_else(|| caps.escaped_since().map(view::escaped));
                let why = why.or_else(|| self.why_uncapped().map(|(found, remedy)| format!("{found}; {remedy}")));
                let by_plan = "vCPUs with reserved CPU time are held to that; kernel protections stay on beside them";
                let why = why.or_else(|| (!self.look.settled.vcpus.is_empty()).then(|| by_plan.to_owned()));
                (report.iter().map(|used| view::cap_thread(used, &self.watches.of)).collect(), why)
            }
            Err(why) => (Vec::new(), Some(why.clone())),
        };
        api::Caps { in_force: self.in_force, why, protections_off: self.protections_off(), threads }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;
    use std::path::Path;
    use std::sync::mpsc;

    use ontime_hostnet::{LiveHost, Plan, Root, Roots, RuleId, Setting, Stage, Value};
    use ontime_tenants::{Policy, Problem, ProblemKind, ThreadId};
    use rustix::process::{Resource, getpid, getrlimit};
    use rustix::thread::{CapabilitySet, capabilities, gettid, set_capabilities};

    use super::*;
    use crate::daemon::config::{Config, Mode};
    use crate::paths::Paths;
    use crate::{exit, status};

    const PLACE: Policy = Policy::Fifo(47);

    /// A setting that the kernel refuses on a host with these files.
    struct Case {
        files: Vec<(String, &'static str)>,
        setting: Setting,
        /// Its state after a try, and in mode `observe`.
        states: [&'static str; 2],
        /// The kernel's own words after a try.
        error: &'static str,
        /// Cause, place and remedy.
        words: [&'static str; 3],
    }

    /// Threads without real-time budget (by cgroup v1 and v2) and without a right, an affinity, a module's parameter.
    fn cases(thread: ThreadId) -> [Case; 6] {
        let proc = |file: &str| format!("proc/{file}");
        let cgroup = || proc(&format!("{}/task/{}/cgroup", thread.pid, thread.tid));
        let limit = || (proc("sys/kernel/sched_rt_runtime_us"), "950000\n");
        let budget = |path: &str, us| (format!("sys/fs/cgroup/{path}/cpu.rt_runtime_us"), us);
        let root = || (proc("self/status"), "Name:\tontime\nCapEff:\t000001ffffffffff\n");
        let comm = || "CPU 0/KVM".to_owned();
        let place = |files, foreseen, words| {
            let knob = Knob::ThreadPolicy { thread, comm: comm() };
            let setting = Setting::new(RuleId::VcpuPlace, Stage::Place, knob, Value::Policy(PLACE));
            Case { files, setting, states: ["failed", foreseen], error: "Operation not permitted", words }
        };
        let other = |rule, files, knob, value, states, error, words| Case {
            files,
            setting: Setting::new(rule, Stage::Place, knob, value),
            states,
            error,
            words,
        };
        let cause = "the kernel has RT group scheduling (CONFIG_RT_GROUP_SCHED)";
        let v1 = "6:memory:/vm\n4:cpu,cpuacct:/machine/rtvm.libvirt-qemu\n0::/vm\n";
        let parameter = "module/kvm/parameters/halt_poll_ns";
        [
            place(
                vec![(cgroup(), v1), limit(), budget("cpu,cpuacct/machine/rtvm.libvirt-qemu", "0\n")],
                "would-fail",
                [
                    cause,
                    "cgroup /machine/rtvm.libvirt-qemu of controller cpu",
                    "sys/fs/cgroup/cpu,cpuacct/machine/rtvm.libvirt-qemu/cpu.rt_runtime_us; or boot with \
                     rt_group_sched=0",
                ],
            ),
            place(
                vec![(cgroup(), "3:cpu:/kubepods/pod7/0a1b\n"), budget("cpu/kubepods/pod7/0a1b", "0\n"), root()],
                "would-fail",
                [cause, "cgroup /kubepods/pod7/0a1b of controller cpu", "after the cgroups above it: echo 900000 > "],
            ),
            place(
                vec![(cgroup(), "0::/machine.slice/machine-plc.scope\n"), root()],
                "would-change",
                [
                    "CONFIG_RT_GROUP_SCHED",
                    "the thread is in cgroup /machine.slice/machine-plc.scope",
                    "boot with rt_group_sched=0 (6.14), or a kernel without that option",
                ],
            ),
            place(
                vec![
                    (cgroup(), "2:cpu:/vm\n"),
                    budget("cpu/vm", "1000\n"),
                    (proc("self/status"), "Name:\tontime\nCapEff:\t0000000000000000\n"),
                ],
                "would-change",
                ["this process has no CAP_SYS_NICE", "setting its policy", "run it as root"],
            ),
            other(
                RuleId::ExclusiveCpu,
                vec![
                    (cgroup(), "0::/edge.slice/plc.scope\n"),
                    ("sys/fs/cgroup/edge.slice/plc.scope/cpuset.cpus.effective".to_owned(), "0-1\n"),
                ],
                Knob::ThreadAffinity { thread, comm: comm() },
                Value::Cpus([1023].into_iter().collect()),
                ["failed", "would-fail"],
                "Invalid argument",
                [
                    "lets its threads run on CPUs 0-1 only, not on 1023",
                    "the cpuset of cgroup /edge.slice/plc.scope",
                    "add 1023 to cpuset.cpus of that cgroup",
                ],
            ),
            other(
                RuleId::HaltPoll,
                vec![(format!("sys/{parameter}"), "200000\n")],
                Knob::HostFile { root: Root::Sys, path: parameter.to_owned() },
                Value::Text("0".to_owned()),
                ["unsupported", "unsupported"],
                "",
                [
                    "/sys/module/kvm/parameters/halt_poll_ns is read-only in this kernel",
                    "options kvm halt_poll_ns=0 in /etc/modprobe.d",
                    "to accept it as it is: without = [\"halt-poll\"] in /etc/ontime/host.toml",
                ],
            ),
        ]
    }

    /// An engine that has looked at nothing yet, with directories and a host of its own.
    fn engine(dir: &Path) -> Engine {
        let at = |name: &str| dir.join(name);
        let paths = Paths { run_dir: at("run"), state_dir: at("state"), config_dir: at("etc"), debugfs: at("debug") };
        fs::create_dir_all(&paths.run_dir).unwrap();
        let mut config = Config::load(&paths.config_dir).unwrap();
        config.daemon.mode = Mode::Observe;
        let mut engine = Engine::new(paths, config, crate::daemon::nice::MainNice::default()).unwrap();
        engine.host = LiveHost::with_roots(Roots { proc: at("proc"), sys: at("sys"), ..Roots::default() });
        engine
    }

    #[test]
    fn what_a_look_missed_is_in_the_answers_about_status_and_nics() {
        let dir = tempfile::tempdir().unwrap();
        let mut engine = engine(dir.path());
        let subjects = |engine: &Engine| {
            [engine.status().unseen, engine.nics().unseen]
                .map(|unseen| unseen.into_iter().map(|one| one.subject).collect::<Vec<_>>())
        };
        let of = |subjects: &[&str]| [(); 2].map(|()| subjects.iter().map(ToString::to_string).collect::<Vec<_>>());
        engine.error("journal", &"it is full");
        assert_eq!(subjects(&engine), of(&[]), "settings are not stored, but all was seen");
        engine.error(super::super::HOST, &"an earlier look");
        assert_eq!(subjects(&engine), of(&[]));
        engine.looks_again = true;
        assert_eq!(subjects(&engine), of(&["host"]));
        for (subject, kind) in [
            ("/docker/07", ProblemKind::CgroupV1(2)),
            ("plc", ProblemKind::SameName),
            ("/proc", ProblemKind::Unreadable("denied".to_owned())),
        ] {
            engine.look.found.problems.push(Problem { subject: subject.to_owned(), kind });
        }
        assert_eq!(subjects(&engine), of(&["/docker/07", "/proc", "host"]));
    }

    /// Otherwise a program that adds up reservations would see a host with no CPU and another kernel.
    #[test]
    fn nothing_can_be_reserved_before_the_first_look_and_the_answer_says_why() {
        let dir = tempfile::tempdir().unwrap();
        let mut engine = engine(dir.path());
        engine.state = api::State::Applied;
        let why = engine.reservations().off.unwrap();
        assert!(why.contains("the host could not be read yet; `ontime status` tells why"), "{why}");
        engine.look.inventory.cpus.online = ontime_hostnet::CpuSet::from_list("0-1").unwrap();
        assert_eq!(engine.reservations().off, None);
    }

    /// An engine that has tried to make a setting. The kernel's answer is real; the files that tell the cause are in
    /// `dir`.
    fn tried(dir: &Path, case: &Case) -> (Engine, hostnet::Report) {
        for (file, text) in &case.files {
            let path = dir.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            let mode = if file.contains("/parameters/") { 0o444 } else { 0o644 };
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
        }
        let mut engine = engine(dir);
        engine.look.plan = Plan { settings: vec![case.setting.clone()], ..Plan::default() };
        let mut report = hostnet::apply(&engine.host, &engine.look.plan, &mut engine.journal).unwrap();
        engine.state = api::State::Applied;
        engine.note_changes(&mut report, &BTreeMap::new());
        (engine, report)
    }

    /// Under CONFIG_RT_GROUP_SCHED the kernel refuses every place, also to root: with EPERM, as without CAP_SYS_NICE.
    #[test]
    fn what_the_kernel_refuses_is_in_the_status_with_cause_place_and_remedy() {
        if getrlimit(Resource::Rtprio).current != Some(0) {
            println!("SKIPPED: RLIMIT_RTPRIO lets every process have real-time priority");
            return;
        }
        let (to_test, from_thread) = mpsc::channel();
        let (end, ended) = mpsc::channel::<()>();
        let vcpu = std::thread::spawn(move || {
            to_test.send(ThreadId::of(getpid().as_raw_pid(), gettid().as_raw_pid()).unwrap()).unwrap();
            let _ = ended.recv();
        });
        let thread = from_thread.recv().unwrap();
        // A thread of its own, because it gives up rights.
        let test = std::thread::spawn(move || {
            let mut rights = capabilities(None).unwrap();
            rights.effective -= CapabilitySet::SYS_NICE | CapabilitySet::DAC_OVERRIDE;
            set_capabilities(None, rights).unwrap();
            for case in cases(thread) {
                let dir = tempfile::tempdir().unwrap();
                let (mut engine, report) = tried(dir.path(), &case);
                let told = engine.status();
                let [knob] = told.knobs.as_slice() else { panic!("{:?}", told.knobs) };
                let [state, foreseen] = case.states;
                assert_eq!((knob.state.as_str(), knob.rule.as_str()), (state, case.setting.rule.name()), "{knob:?}");
                assert_eq!(status::verdict(&told), if state == "failed" { exit::WARNING } else { exit::OK });
                let mut text = Vec::new();
                status::show(&mut text, &told, false).unwrap();
                let text = String::from_utf8(text).unwrap();
                let line = text.lines().find(|line| line.starts_with(state)).unwrap();
                assert!(line.contains(&case.setting.knob.to_string()) && line.contains(case.error), "{line}");
                let applied = view::report(&report, "partitioned", false);
                for word in case.words {
                    assert!(line.contains(word), "{word}: {text}");
                    assert!(applied.changes[0].why.as_ref().unwrap().contains(word), "{word}: {applied:?}");
                }
                // Before anything is tried, the files alone tell what cannot be set.
                engine.state = api::State::Observing;
                let told = engine.status();
                let why = told.knobs[0].why.as_ref().unwrap();
                assert_eq!(told.knobs[0].state, foreseen);
                assert_eq!(case.words.iter().all(|word| why.contains(word)), foreseen != "would-change", "{why}");
                assert_eq!(status::verdict(&told), if foreseen == "would-fail" { exit::WARNING } else { exit::OK });
            }
            assert_ne!(thread.policy().unwrap(), PLACE);
        });
        let outcome = test.join();
        drop(end);
        vcpu.join().unwrap();
        outcome.unwrap();
    }
}
