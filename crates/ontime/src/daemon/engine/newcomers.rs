//! Places new processes and threads of real-time tenants at once, without a pass, and also while a pass reads the host.
//!
//! In: their numbers from the [`Watcher`](ontime_tenants::watch::Watcher), which has the owners of processes take
//! turns. They alone are read, and planned as in a pass beside what the last pass found; only the settings of their
//! threads are made. What else they require (their network devices, reserved CPU time, protections off again) is left
//! to the pass that the same events request. That pass reads them again, so it neither undoes nor repeats these
//! settings. Until a vCPU has its reserved time, it is behind all that have theirs, with a cap.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::rc::Rc;
use std::time::Instant;

use ontime_hostnet::{self as hostnet, Done, Inventory, Knob, Plan, Setting};
use ontime_tenants::budget::Account;
use ontime_tenants::watch::Change;
use ontime_tenants::{Discovery, ThreadId, discover_between, newcomers};

use super::caps::{Capping, CappingState, charge_guardian, charge_meanwhile};
use super::look::{Known, Look};
use super::{Engine, values};
use crate::api;
use crate::daemon::watches::Watches;

/// How often newcomers are looked at in one go: once, and once more for threads that they have created before their
/// events reached the watcher.
const LOOKS: usize = 2;

impl Engine {
    /// Processes tenants' events: places newcomers. Returns why a pass is due, if one is.
    ///
    /// # Errors
    /// Errors of the watcher's descriptors.
    pub(crate) fn tenants_changed(&mut self) -> io::Result<Option<Change>> {
        let change = self.watcher.take()?;
        self.place_newcomers();
        Ok(change)
    }

    /// Places the newcomers of which events have come by now. A pass calls this between any two processes that it
    /// reads.
    pub(super) fn serve_newcomers(&mut self) {
        if self.state == api::State::Applied {
            if let Err(error) = self.watcher.gather() {
                tracing::debug!("tenants' events: {error}");
            }
            self.place_newcomers();
        }
    }

    /// Has the watcher follow the processes of the last look's tenants.
    pub(crate) fn follow_tenants(&mut self) {
        if let Err(error) = self.watcher.follow(&self.look.found, &self.config.rules) {
            // The watcher's own rescan finds tenants that it fails to follow here.
            tracing::debug!("following tenants: {error}");
        }
    }

    /// All tenants. Newcomers are placed meanwhile.
    pub(super) fn discover(&mut self) -> Discovery {
        self.late.clear();
        let (sources, rules) = (Rc::clone(&self.sources), self.config.rules.clone());
        discover_between(&sources, &rules, &mut || self.serve_newcomers())
    }

    /// Facts about the host. Newcomers are placed meanwhile.
    pub(super) fn scan(&mut self) -> Inventory {
        Inventory::scan_between(&self.paths.roots(), &mut || self.serve_newcomers())
    }

    /// Adds the newcomers that were placed while these tenants were read, as they are now.
    pub(super) fn with_newcomers(&mut self, mut found: Discovery) -> Discovery {
        let late = std::mem::take(&mut self.late);
        if !late.is_empty() {
            found.take_in(newcomers(&self.sources, &self.config.rules, &found, &late));
            found.incomplete =
                found.incomplete.or_else(|| Some(format!("/proc: {}", ontime_base::files::exhausted()?)));
        }
        found
    }

    fn place_newcomers(&mut self) {
        for _ in 0..LOOKS {
            let news = self.watcher.newcomers();
            let knows_host = self.state == api::State::Applied && !self.look.is_none() && self.caps.is_ok();
            if news.is_empty() || !knows_host {
                return;
            }
            let start = Instant::now();
            self.look_at_newcomers(&news);
            self.watcher.charge(news.values(), start.elapsed());
        }
    }

    fn look_at_newcomers(&mut self, news: &BTreeMap<i32, Account>) {
        let start = Instant::now();
        let pids: BTreeSet<i32> = news.keys().copied().collect();
        let new = newcomers(&self.sources, &self.config.rules, &self.look.found, &pids);
        self.metrics.discovered(&new.costs);
        if new.tenants.is_empty() {
            return;
        }
        let mut found = self.look.found.clone();
        found.take_in(new);
        let placed = self.place(&found, &pids);
        self.late.extend(pids);
        self.follow_tenants();
        tracing::debug!("{placed} new threads placed in {:?}", start.elapsed());
    }

    /// Places the threads of these processes, and caps them. Returns how many got another policy.
    fn place(&mut self, found: &Discovery, pids: &BTreeSet<i32>) -> usize {
        let (paused, pauses) = (self.paused(), self.pauses());
        let known = Known {
            found: Some(found),
            inventory: Some(&self.look.inventory),
            excess: &self.look.excess,
            method: self.method,
            journal: Some(&self.journal),
            caps: self.in_force,
            resting: Some(&self.traffic.resting),
            paused: &paused,
            pauses: Some(&pauses),
            keeper: Some(&self.keeper),
            held_only: true,
        };
        let mut look = Look::at(&self.sources, &self.config, &self.paths, known);
        let is_new = |setting: &&Setting| match &setting.knob {
            Knob::ThreadPolicy { thread, .. } => {
                pids.contains(&thread.pid)
                    && !look.intent.reserved.contains_key(thread)
                    && self.applied.get(&setting.knob.key()) != Some(&setting.value)
            }
            _ => false,
        };
        let settings: Vec<Setting> = look.plan.settings.iter().filter(is_new).cloned().collect();
        let plan = Plan { settings, ..Plan::default() };
        // Other threads that were seen by the way get their places, and with them their caps, from a pass. With them in
        // `look`, the end of a pass in progress could place them without a cap, and switch protections off.
        let seen = self.look.found.tenants.iter().flat_map(|tenant| &tenant.threads);
        let before: BTreeSet<ThreadId> = seen.map(|thread| thread.id).collect();
        let is_left = |id: ThreadId| !before.contains(&id) && !pids.contains(&id.pid);
        for tenants in [&mut look.found.tenants, &mut look.intent.tenants] {
            tenants.iter_mut().for_each(|tenant| tenant.threads.retain(|thread| !is_left(thread.id)));
            tenants.retain(|tenant| !tenant.threads.is_empty());
        }
        let watches = Watches::of(&plan, &look.found.tenants, &look.intent, self.config.daemon.cap_cpu_share);
        (self.look.found, self.look.excess) = (look.found, look.excess);
        self.look.intent.tenants = look.intent.tenants;
        if plan.settings.is_empty() {
            return 0;
        }
        // A pass switches them off again.
        if self.protections_off() {
            self.protect();
        }
        let of = |setting: &Setting| match setting.knob {
            Knob::ThreadPolicy { thread, .. } => Some(thread),
            _ => None,
        };
        let ids: BTreeSet<ThreadId> = plan.settings.iter().filter_map(of).collect();
        self.watches.replace(watches, &ids);
        let (place, period) = (self.guardian_place(), self.cap_period());
        let Self { host, journal, caps, watches, keeper, guardian, alarm, look, paths, repeats, .. } = self;
        let lost = caps.as_mut().ok().and_then(|caps| caps.release(&watches.list).err());
        let charge = charge_meanwhile(&watches.list, period, &look.inventory, (&*host, &*journal), guardian.as_ref());
        let _ = charge_guardian((guardian, alarm), &paths.run_dir, repeats, place, charge);
        let state = CappingState { caps, watches, pauses, lost };
        let capping = Capping { host, paced: keeper.planned_policies(), state: RefCell::new(state) };
        let added = hostnet::add(&capping, &plan.settings, journal);
        if let Some(error) = capping.state.into_inner().lost {
            self.caps_lost(&error.to_string());
        }
        let report = match added {
            Ok(report) => report,
            Err(error) => {
                self.error("journal", &error);
                return 0;
            }
        };
        for item in report.items.iter().filter(|item| matches!(item.done, Done::Changed | Done::Failed(_))) {
            let rule = item.rule.map_or("none", hostnet::RuleId::name);
            self.metrics.knob(rule, item.done == Done::Changed);
        }
        self.log_changes(&report);
        let made = values(&plan);
        self.look.plan.settings.retain(|setting| !made.contains_key(&setting.knob.key()));
        self.look.plan.settings.extend(plan.settings);
        self.look.plan.settings.sort_by_key(|setting| setting.stage);
        self.applied.extend(made);
        report.counts().changed
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;
    use std::path::Path;
    use std::process::{Child, Command};
    use std::time::Duration;

    use ontime_hostnet::LiveHost;
    use ontime_tenants::{Policy, Sources, Watcher};

    use super::*;
    use crate::daemon::config::{Config, Mode};
    use crate::paths::Paths;

    /// An engine whose host has these processes alone, and which knows one CPU and no tenant. None: it cannot watch or
    /// cap here.
    fn engine(dir: &Path) -> Option<Engine> {
        let mut engine = bare(dir);
        engine.start_caps();
        let why =
            engine.watcher.rescan_reasons().next().map(str::to_owned).or_else(|| engine.caps.as_ref().err().cloned());
        why.iter().for_each(|why| println!("SKIPPED: {why}"));
        why.is_none().then_some(engine)
    }

    /// The same, without caps.
    fn bare(dir: &Path) -> Engine {
        let at = |name: &str| dir.join(name);
        let paths = Paths { run_dir: at("run"), state_dir: at("state"), config_dir: at("etc"), debugfs: at("debug") };
        for name in ["run", "state", "etc", "host/proc"] {
            fs::create_dir_all(at(name)).unwrap();
        }
        fs::write(at("etc/tenants.toml"), "[[tenant]]\ncgroup = \"/rt/**\"\nclass = \"rt\"\n").unwrap();
        let mut config = Config::load(&paths.config_dir).unwrap();
        config.daemon.mode = Mode::Observe;
        let mut engine = Engine::new(paths, config, crate::daemon::nice::MainNice::default()).unwrap();
        engine.host = LiveHost::default();
        engine.sources = Rc::new(Sources::below(&at("host")));
        engine.watcher = Watcher::new(&engine.sources).unwrap();
        engine.look.inventory.cpus.online = [0].into_iter().collect();
        engine.state = api::State::Applied;
        engine
    }

    /// Writes a VM `plc` with one vCPU, in an RT cgroup, onto the engine's host.
    fn vm(dir: &Path, pid: i32, uid: u32) {
        let process = dir.join(format!("host/proc/{pid}"));
        let stat = fs::read_to_string("/proc/self/stat").unwrap();
        let fields = stat.rsplit_once(") ").unwrap().1;
        for (tid, comm) in [(pid, "qemu-system-x86"), (pid + 1, "CPU 0/KVM")] {
            let thread = process.join(format!("task/{tid}"));
            fs::create_dir_all(&thread).unwrap();
            fs::write(thread.join("stat"), format!("{tid} ({comm}) {fields}")).unwrap();
            fs::write(thread.join("status"), format!("Name:\t{comm}\nCpus_allowed_list:\t0\n")).unwrap();
        }
        fs::copy(process.join(format!("task/{pid}/stat")), process.join("stat")).unwrap();
        fs::write(process.join("status"), format!("Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")).unwrap();
        fs::write(process.join("cgroup"), format!("0::/rt/{pid}\n")).unwrap();
        fs::write(process.join("cmdline"), "qemu-system-x86_64\0-name\0plc\0").unwrap();
        symlink("/usr/bin/qemu-system-x86_64", process.join("exe")).unwrap();
    }

    #[test]
    fn a_newcomer_with_the_name_of_roots_vm_takes_no_reserved_time_from_it() {
        let dir = tempfile::tempdir().unwrap();
        let mut engine = bare(dir.path());
        let declared = "[[reservation]]\nname = \"plc\"\nbudget = \"1ms\"\nperiod = \"10ms\"\n";
        engine.config.sched.add(&ontime_tenants::config::Text::new("sched.toml", declared)).unwrap();
        vm(dir.path(), 1_000_100, 0);
        let found = engine.discover();
        // It starts while the pass reads the host.
        vm(dir.path(), 1_000_200, 1000);
        engine.late.insert(1_000_200);
        let found = engine.with_newcomers(found);
        assert_eq!(found.tenants.len(), 2);
        let settled = engine.keeper.settle(&engine.config.sched, &found.tenants, &engine.look.inventory.cpus.online);
        let reserved: Vec<i32> = settled.vcpus.iter().map(|vcpu| vcpu.id.pid).collect();
        assert_eq!((reserved, settled.refused), (vec![1_000_100], vec![]));
    }

    /// Starts a real program, which the engine's host has in an RT container.
    fn starts(dir: &Path, container: u32) -> (Child, ThreadId) {
        let child = Command::new("sleep").arg("600").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let (of_host, real) = (dir.join(format!("host/proc/{pid}")), Path::new("/proc").join(pid.to_string()));
        fs::create_dir_all(of_host.join(format!("task/{pid}"))).unwrap();
        for file in ["stat", "status", &format!("task/{pid}/stat"), &format!("task/{pid}/status")] {
            fs::write(of_host.join(file), fs::read(real.join(file)).unwrap()).unwrap();
        }
        fs::write(of_host.join("cgroup"), format!("0::/rt/docker-{container:064x}.scope\n")).unwrap();
        symlink("/bin/sleep", of_host.join("exe")).unwrap();
        (child, ThreadId::of(pid, pid).unwrap())
    }

    #[test]
    fn a_program_that_starts_while_a_pass_reads_the_host_has_its_place_before_the_pass_ends() {
        let dir = tempfile::tempdir().unwrap();
        let Some(mut engine) = engine(dir.path()) else { return };
        let (mut child, thread) = starts(dir.path(), 1);
        let before = thread.policy().unwrap();
        // Events of the machine's other processes come, too, and the watcher rests after some.
        let (mut found, mut place) = (engine.discover(), thread.policy().unwrap());
        for _ in 0..1000 {
            if place != before {
                break;
            }
            std::thread::sleep(Duration::from_millis(5));
            (found, place) = (engine.discover(), thread.policy().unwrap());
        }
        let found = engine.with_newcomers(found);
        let key = Knob::ThreadPolicy { thread, comm: String::new() }.key();
        let threads = found.tenants.iter().flat_map(|tenant| &tenant.threads).filter(|of| of.id == thread).count();
        let made = (engine.passes, engine.journal.entries().len(), threads, engine.applied.contains_key(&key));
        // The number passes to a program that is no tenant's.
        fs::write(dir.path().join(format!("host/proc/{}/cgroup", thread.pid)), "0::/bulk\n").unwrap();
        thread.set_policy(before).unwrap();
        engine.look_at_newcomers(&[(thread.pid, Account::System)].into());
        let after = thread.policy().unwrap();
        engine.undo();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(matches!(place, Policy::Fifo(_)), "{place}");
        assert_eq!(made, (0, 1, 1, true), "one journal entry, and the pass knows the thread once");
        assert_eq!(after, before);
    }

    #[test]
    fn a_thread_that_is_seen_beside_newcomers_is_left_to_a_pass() {
        let dir = tempfile::tempdir().unwrap();
        let Some(mut engine) = engine(dir.path()) else { return };
        let [(mut child, thread), (mut other, _)] = [1, 2].map(|container| starts(dir.path(), container));
        let found = ontime_tenants::discover(&engine.sources, &engine.config.rules);
        let placed = engine.place(&found, &[thread.pid].into());
        let ids = |tenants: &[ontime_tenants::Tenant]| -> Vec<ThreadId> {
            tenants.iter().flat_map(|tenant| &tenant.threads).map(|thread| thread.id).collect()
        };
        let known = [ids(&engine.look.found.tenants), ids(&engine.look.intent.tenants)];
        engine.undo();
        for child in [&mut child, &mut other] {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        assert_eq!((placed, known), (1, [vec![thread], vec![thread]]));
    }
}
