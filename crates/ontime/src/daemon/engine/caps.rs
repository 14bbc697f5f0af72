//! The engine's part for runtime caps, besides its steps in a pass: the watcher and its pauses, the guardian's charge,
//! and what happens when caps cannot be kept.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ontime_hostnet::{Host, Intent, Inventory, Journal, Knob, KnobError, LiveHost, Obstacle, Paused, Plan, Value};
use ontime_tenants::text::counted;
use ontime_tenants::{Policy, Repeats, Tenant, ThreadId};
use ontime_trace::tracefs::TRACEFS;

use super::Engine;
use super::look::{Look, planned};
use crate::daemon::cap::{CapError, Caps, FollowError, Pauses, Watch};
use crate::daemon::census::{Census, RealTime, ThreadHolders};
use crate::daemon::guardian::{Capped, Charge, Guardian};
use crate::daemon::keeper::PlannedPolicies;
use crate::daemon::own::{self, OwnThread};
use crate::daemon::protections;
use crate::daemon::view::Owned;
use crate::daemon::watches::{OverQuota, Watches};

impl Engine {
    pub(super) fn start_caps(&mut self) {
        self.in_force = false;
        // End the old watcher before the new one starts. Two would both change the same threads.
        self.caps = Err("being restarted".to_owned());
        let settings = self.config.daemon.caps(self.table());
        self.caps = Caps::start(settings, Arc::clone(&self.alarm)).map_err(|error| error.to_string());
        match &self.caps {
            Ok(caps) => tracing::info!("cap watcher is thread {}", caps.watcher_id.tid),
            Err(why) => self.repeats.warn(why),
        }
    }

    /// Threads of containers that caps have paused, among those of the last pass.
    pub(super) fn paused(&self) -> Vec<Paused> {
        let caps = self.caps.as_ref().map(Caps::report).unwrap_or_default();
        let paused: BTreeSet<ThreadId> = caps.iter().filter(|used| used.pauses > 0).map(|used| used.id).collect();
        Paused::of(&self.look.found.tenants, &self.journal, |id| paused.contains(&id))
    }

    pub(super) fn pauses(&self) -> Pauses {
        self.caps.as_ref().map(Caps::pauses).unwrap_or_default()
    }

    /// Caps every thread of the plan and charges the guardian. Sets `in_force` if both succeeded and every real-time
    /// thread is capped.
    pub(super) fn cap(&mut self) {
        if self.caps.is_err() {
            self.start_caps();
        }
        let set = match &mut self.caps {
            Ok(caps) => caps.set(&self.watches.list).map(|()| caps.complete()).map_err(|error| error.to_string()),
            Err(why) => Err(why.clone()),
        };
        let complete = set.unwrap_or_else(|why| {
            self.caps_lost(&why);
            false
        });
        self.follow_interrupts();
        // Threads may have ended since the pass began, and the pass has given others real-time priority.
        self.census = self.take_census();
        self.hold_to_quotas();
        for (tenant, threads) in self.count_demoted() {
            let message = format!(
                "it has {} at SCHED_OTHER instead of real-time priority, because no more of a tenant's threads can be \
                 capped; raise cap.threads and cap.threads-per-tenant in /etc/ontime/daemon.toml, or start fewer",
                counted(threads, "thread")
            );
            self.error(&tenant, &message);
        }
        self.uncapped = self.find_uncapped();
        if let Some((found, remedy)) = self.why_uncapped() {
            // One key for all such lines, because a user may start any number of threads.
            self.repeats.warn_of("uncapped threads", &format!("{found}; {remedy}"));
        }
        // Newcomers have got places during the census.
        let complete = complete && self.caps.as_ref().is_ok_and(Caps::complete);
        let complete = complete && self.uncapped.is_empty() && self.look.intent.reserved.is_empty();
        let intent = Intent { caps_in_force: complete, ..self.look.intent.clone() };
        let (plan, _) = planned(&self.look.inventory, &intent, Some(&self.journal));
        let charge = self.charge_for(&plan);
        self.in_force = match self.charge(charge) {
            Ok(()) => complete,
            Err(error) => {
                self.error("guardian", &format!("{}; kernel protections stay on", crate::exit::chain(&error)));
                false
            }
        };
    }

    pub(super) fn take_census(&mut self) -> Census {
        let (sources, own, most) = (Rc::clone(&self.sources), self.own_processes(), self.config.daemon.census());
        Census::take(&sources.proc, &own, most, &mut || self.serve_newcomers())
    }

    /// The real-time threads of device processes.
    pub(super) fn device_threads(&mut self) -> Vec<RealTime> {
        let (sources, own, most) = (Rc::clone(&self.sources), self.own_processes(), self.config.daemon.census());
        Census::of_devices(&sources.proc, &own, most, &mut || self.serve_newcomers()).threads
    }

    fn own_processes(&self) -> Vec<u32> {
        self.guardian.as_ref().map(Guardian::pid).into_iter().chain([std::process::id()]).collect()
    }

    /// Moves threads beyond their tenant's quota from real-time priority to SCHED_OTHER: no cap is left for them, and
    /// they would keep protections on for the whole host. These are the threads that
    /// [`limit`](crate::daemon::watches::limit) has removed from the tenant, the threads that discovery did not read
    /// because the tenant has too many, and threads that the same processes have created since. Threads that belong to
    /// the tenant as found are not touched, whether capped or not.
    fn hold_to_quotas(&mut self) {
        if self.caps.is_err() {
            return;
        }
        self.demoted.forget_ended();
        let before: BTreeSet<ThreadId> = self.demoted.ids().collect();
        let beyond = beyond_quotas(&self.look, &self.census, &before, self.config.daemon.cap_threads_per_tenant);
        if beyond.is_empty() {
            return;
        }
        match self.demoted.demote(&beyond) {
            Ok(done) => self.census.threads.retain(|thread| !done.contains(&thread.id)),
            Err(error) => self.error("threads beyond a quota", &error),
        }
    }

    /// The number of threads of each tenant that are at SCHED_OTHER because of its quota.
    fn count_demoted(&self) -> BTreeMap<String, usize> {
        let mut threads: BTreeMap<String, BTreeSet<ThreadId>> = BTreeMap::new();
        for OverQuota { tenant, threads: beyond } in &self.look.excess {
            threads.entry(tenant.clone()).or_default().extend(beyond);
        }
        for id in self.demoted.ids() {
            let is_its = |tenant: &&Tenant| tenant.threads.iter().any(|thread| thread.id.pid == id.pid);
            let tenant = self.look.found.tenants.iter().find(is_its);
            let name = tenant.map_or_else(|| format!("process {}", id.pid), |tenant| tenant.name.clone());
            threads.entry(name).or_default().insert(id);
        }
        threads.into_iter().map(|(tenant, threads)| (tenant, threads.len())).collect()
    }

    /// Threads that could monopolize a CPU if protections were off.
    fn find_uncapped(&self) -> Vec<String> {
        let capped = self.caps.as_ref().map(Caps::watched).unwrap_or_default();
        let watcher = self.table().watcher();
        let reserved = &self.look.intent.reserved;
        let held = ThreadHolders { capped: &capped, reserved, watcher, uncapped: &self.config.daemon.cap_uncapped };
        self.census.uncapped(&held).map(ToString::to_string).chain(self.census.incomplete.clone()).collect()
    }

    /// Why protections stay on although every thread of tenants is capped, and the remedy.
    pub(super) fn why_uncapped(&self) -> Option<(String, &'static str)> {
        self.census.why_protected(&self.uncapped)
    }

    /// Puts the thread that keeps protections on into the finding about them.
    pub(super) fn name_uncapped(&mut self) {
        let why = self.why_uncapped();
        self.look.name_uncapped(why);
    }

    /// When the next census is due; None while protections are on.
    pub(super) fn census_in(&self) -> Option<Duration> {
        let next = self.census.next().filter(|_| self.in_force && self.protections_off())?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    /// Takes a census if it is due, because a change of policy causes no event. If a thread has no cap, or has escaped
    /// from it, this restores the protections and returns true, and a pass is due.
    pub(crate) fn look_at_real_time(&mut self) -> bool {
        if self.census_in().is_none_or(|wait| !wait.is_zero()) {
            return false;
        }
        self.census = self.take_census();
        self.hold_to_quotas();
        if self.find_uncapped().is_empty() && self.caps.as_ref().is_ok_and(Caps::complete) {
            return false;
        }
        self.protect();
        true
    }

    /// Switches the kernel's protections on until a pass has capped every thread.
    pub(super) fn protect(&mut self) {
        self.in_force = false;
        for (knob, done) in protections::restore(&self.host, &self.journal) {
            self.put_back.insert(knob.key());
            if let Err(error) = done {
                self.error(&knob.to_string(), &protections::still_off(&error));
            }
        }
    }

    /// When the daemon's own threads are to be looked at; None while it neither caps nor paces a thread.
    pub(super) fn own_in(&self) -> Option<Duration> {
        let watches = self.caps.is_ok() && !self.watches.list.is_empty();
        (watches || self.keeper.own_threads().next().is_some())
            .then(|| self.own_seen.map_or(Duration::ZERO, |seen| own::EVERY.saturating_sub(seen.elapsed())))
    }

    /// Gives the daemon's own real-time threads their places back, if it is time to look at them, and notices threads
    /// that hang in a read. Returns whether a pass is due: one had lost its place, so tenants' threads may have lost
    /// theirs, too; or pacers have to be started anew.
    pub(crate) fn look_at_own_threads(&mut self) -> bool {
        if self.own_in().is_none_or(|wait| !wait.is_zero()) {
            return false;
        }
        self.own_seen = Some(Instant::now());
        self.caps.iter_mut().for_each(Caps::replace_stuck_reader);
        let watcher = self.caps.as_ref().ok().map(Caps::own);
        let guardian = self.guardian.iter().flat_map(Guardian::own);
        let all: Vec<OwnThread> = watcher.into_iter().chain(guardian).chain(self.keeper.own_threads()).collect();
        let mut changed = self.keeper.hangs();
        for own in all {
            match own::keep(own) {
                Ok(None) => {}
                Ok(Some(found)) => {
                    changed = true;
                    self.repeats.warn_of(own.name, &found.to_string());
                }
                Err(error) if Some(own) == watcher => self.caps_lost(&error.to_string()),
                Err(error) => self.repeats.warn_of(own.name, &format!("{}: {error}", own.name)),
            }
        }
        changed
    }

    /// Follows interrupts of the vCPUs that the plan puts ahead while an interrupt is pending.
    pub(super) fn follow_interrupts(&mut self) {
        let Ok(caps) = &mut self.caps else { return };
        let cpus: Vec<u32> = self.look.inventory.cpus.online.iter().collect();
        match caps.follow(Path::new(TRACEFS), &cpus, &self.watches.followed) {
            Ok(()) => {}
            Err(FollowError::Caps(lost)) => self.caps_lost(&lost.to_string()),
            Err(why) => self.error("interrupt-context", &why),
        }
    }

    /// What the guardian would have to do if this plan were applied and the daemon died.
    fn charge_for(&self, plan: &Plan) -> Charge {
        let roots = self.paths.roots();
        let mut files = protections::originals(&self.journal, &roots);
        for knob in protections::knobs(plan) {
            if let (Knob::HostFile { root, path }, None) = (knob, self.journal.original(knob)) {
                if let Ok(Value::Text(text)) = self.host.read(knob) {
                    files.push((roots.path(*root, path), text));
                }
            }
        }
        // The reverse order of switching off, as in a reset: Linux 6.12 accepts its RT limit only after its fair
        // servers.
        files.reverse();
        Charge {
            protections: files,
            then_protected: protections::kernel_protects(&self.host, &self.look.inventory, &self.journal),
            paced: self.paced_originals(),
            ..self.charge_for_caps_and_interrupts()
        }
    }

    /// [`Self::charge_for_caps`] while interrupts are followed, so that vCPUs may be ahead.
    pub(super) fn charge_for_caps_and_interrupts(&self) -> Charge {
        Charge {
            raised: self.watches.list.iter().filter(|of| of.ahead.is_some()).map(|of| (of.id, of.place)).collect(),
            instance: self.caps.as_ref().ok().and_then(Caps::instance),
            ..self.charge_for_caps()
        }
    }

    /// What the guardian would have to do for the present caps, if the daemon ended and the kernel's protections were
    /// on.
    pub(super) fn charge_for_caps(&self) -> Charge {
        charge_for(&self.watches.list, self.cap_period(), &self.look.inventory)
    }

    pub(super) fn cap_period(&self) -> Duration {
        self.config.daemon.caps(self.table()).period
    }

    /// One priority above the watcher, and so above every thread that the guardian may have to preempt.
    pub(super) fn guardian_place(&self) -> Policy {
        match self.table().watcher() {
            Policy::Fifo(priority) => Policy::Fifo(priority.saturating_add(1).min(99)),
            other => other,
        }
    }

    pub(super) fn charge(&mut self, charge: Charge) -> anyhow::Result<()> {
        let place = self.guardian_place();
        charge_guardian((&mut self.guardian, &self.alarm), &self.paths.run_dir, &mut self.repeats, place, charge)
    }

    /// If the guardian is dead, it could not act anyway.
    pub(super) fn charge_if_there(&mut self, charge: Charge) {
        if let Some(guardian) = &mut self.guardian {
            let _ = guardian.charge(charge);
        }
    }

    pub(super) fn caps_lost(&mut self, why: &str) {
        self.error("runtime caps", &why);
        self.in_force = false;
        if self.caps.is_ok() {
            self.caps = Err(why.to_owned());
        }
        for (knob, done) in protections::restore(&self.host, &self.journal) {
            if let Err(error) = done {
                self.error(&knob.to_string(), &protections::still_off(&error));
            }
        }
    }

    pub(super) fn account_caps(&mut self) {
        let domains: BTreeSet<Owned> = self.watches.of.values().cloned().collect();
        for gone in self.domains.difference(&domains) {
            self.metrics.forget(gone);
        }
        self.domains = domains;
        if let Ok(caps) = &self.caps {
            self.metrics.caps(&caps.report(), &self.watches.of);
        }
    }

    pub(super) fn protections_off(&self) -> bool {
        self.journal.entries().iter().any(|entry| protections::is_protection(&entry.knob))
    }
}

/// Threads of a census that are beyond their tenants' quotas, with their policies: threads that the daemon has demoted
/// before, and threads of large tenants' processes that the look did not find or has removed.
pub(super) fn beyond_quotas(
    look: &Look,
    census: &Census,
    demoted: &BTreeSet<ThreadId>,
    most: usize,
) -> BTreeMap<ThreadId, Policy> {
    let tenants = &look.found.tenants;
    let large = tenants.iter().filter(|tenant| tenant.threads.len() >= most);
    let over: BTreeSet<i32> = large
        .flat_map(|tenant| tenant.threads.iter().map(|thread| thread.id.pid))
        .chain(look.excess.iter().flat_map(|of| &of.threads).map(|id| id.pid))
        .chain(demoted.iter().map(|id| id.pid))
        .collect();
    let found: BTreeSet<_> = tenants.iter().flat_map(|tenant| &tenant.threads).map(|thread| thread.id).collect();
    let is_beyond = |id: &ThreadId| demoted.contains(id) || over.contains(&id.pid) && !found.contains(id);
    census.threads.iter().filter(|thread| is_beyond(&thread.id)).map(|thread| (thread.id, thread.policy)).collect()
}

/// What the guardian would have to do for these caps, if the daemon ended and the kernel's protections were on.
pub(super) fn charge_for(watched: &[Watch], period: Duration, inventory: &Inventory) -> Charge {
    Charge {
        then_protected: true,
        realtime: inventory.kernel.realtime,
        threads: watched.iter().map(|of| Capped { id: of.id, place: of.place, share: of.share }).collect(),
        period: period.as_nanos().try_into().unwrap_or(u64::MAX),
        ..Charge::default()
    }
}

/// What the guardian would have to do if the daemon were killed before a pass ends: threads that have been capped since
/// the last charge would stay at real-time priority.
pub(super) fn charge_meanwhile(
    watched: &[Watch],
    period: Duration,
    inventory: &Inventory,
    (host, journal): (&LiveHost, &Journal),
    guardian: Option<&Guardian>,
) -> Charge {
    let charge = Charge {
        protections: protections::files(journal, host.roots()),
        then_protected: protections::kernel_protects(host, inventory, journal),
        ..charge_for(watched, period, inventory)
    };
    charge.beside(guardian.map(Guardian::charged))
}

/// Charges the guardian. Starts one if none runs at this priority.
pub(super) fn charge_guardian(
    (slot, alarm): (&mut Option<Guardian>, &OwnedFd),
    run_dir: &Path,
    repeats: &mut Repeats,
    place: Policy,
    charge: Charge,
) -> anyhow::Result<()> {
    // A guardian at the priority of another table might not preempt the threads of this one.
    if let Some(guardian) = slot.as_mut().filter(|guardian| guardian.place() == place) {
        match guardian.charge(charge.clone()) {
            Ok(()) => return Ok(()),
            Err(error) => repeats.warn(&format!("{}; starting another", crate::exit::chain(&error))),
        }
    }
    // The old guardian must not carry out its charge beside the new one.
    if let Some(old) = slot.take() {
        old.relieve();
    }
    let mut guardian = Guardian::start(place, run_dir, alarm)?;
    guardian.charge(charge)?;
    tracing::info!("guardian is process {}", guardian.pid());
    *slot = Some(guardian);
    Ok(())
}

/// The host, with policies read as if no thread were paused, ahead, or moved by a pacer.
pub(super) struct UnpausedHost<'a> {
    pub(super) host: &'a LiveHost,
    pub(super) pauses: Pauses,
    pub(super) paced: PlannedPolicies,
}

impl Host for UnpausedHost<'_> {
    fn read(&self, knob: &Knob) -> Result<Value, KnobError> {
        read_planned(self.host, &self.pauses, &self.paced, knob)
    }

    fn write(&self, knob: &Knob, value: &Value) -> Result<(), KnobError> {
        self.host.write(knob, value)
    }

    fn foresee(&self, knob: &Knob, value: &Value) -> Option<Obstacle> {
        self.host.foresee(knob, value)
    }
}

/// The host, with each thread capped as soon as it gets its place. Until all are capped the kernel's protections are
/// on, but these serve threads at normal priority only: while a vCPU spins, RCU and timers do not proceed (on
/// PREEMPT_RT they run at FIFO 1 and 2), and some of what a pass sets or reads waits for them.
pub(super) struct Capping<'a> {
    pub(super) host: &'a LiveHost,
    pub(super) paced: PlannedPolicies,
    pub(super) state: RefCell<CappingState<'a>>,
}

/// State that changes while a pass applies a plan.
pub(super) struct CappingState<'a> {
    pub(super) caps: &'a mut Result<Caps, String>,
    /// The threads to be watched under the plan that is being applied.
    pub(super) watches: &'a mut Watches,
    /// A snapshot of the threads that are watched by now.
    pub(super) pauses: Pauses,
    pub(super) lost: Option<CapError>,
}

impl CappingState<'_> {
    fn placed(&mut self, thread: ThreadId, at: &Value) {
        let Ok(caps) = &mut *self.caps else { return };
        let is_there = |watch: &&Watch| watch.id == thread && Value::Policy(watch.place) == *at;
        let Some(watch) = self.watches.list.iter().find(is_there) else { return };
        self.lost = caps.start_watching(watch).err().or(self.lost.take());
        self.pauses = caps.pauses();
    }
}

impl Host for Capping<'_> {
    fn read(&self, knob: &Knob) -> Result<Value, KnobError> {
        read_planned(self.host, &self.state.borrow().pauses, &self.paced, knob)
    }

    fn write(&self, knob: &Knob, value: &Value) -> Result<(), KnobError> {
        self.host.write(knob, value)?;
        if let Knob::ThreadPolicy { thread, .. } = knob {
            self.state.borrow_mut().placed(*thread, value);
        }
        Ok(())
    }
}

fn read_planned(host: &LiveHost, pauses: &Pauses, paced: &PlannedPolicies, knob: &Knob) -> Result<Value, KnobError> {
    let value = host.read(knob)?;
    Ok(match (knob, value) {
        (Knob::ThreadPolicy { thread, .. }, Value::Policy(read)) => {
            Value::Policy(paced.planned(*thread, pauses.planned(*thread, read)))
        }
        (_, value) => value,
    })
}
