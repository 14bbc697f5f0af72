//! The engine's part for reserved CPU time, besides its steps in a pass: the guardian's charge, restoring policies,
//! guests' requests for bandwidth, and the answer of the API.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use ontime_hostnet::{Knob, Value, apply};
use ontime_sched::account::Place;
use ontime_sched::{Ask, GuestNeed, Refused, Reserved, Settled, Task, guest};
use ontime_tenants::{Policy, ThreadId};

use super::Engine;
use crate::api;
use crate::daemon::guardian::Charge;
use crate::daemon::keeper::Keeper;

/// Why nothing is reserved in mode `observe`.
pub(super) const UNRESERVED: &str =
    "mode observe: nothing is set or reserved until daemon.toml says mode = \"enforce\"";

impl Engine {
    /// The recorded original policies of the threads that a back end moves, or is about to move.
    pub(super) fn paced_originals(&self) -> Vec<(ThreadId, Policy)> {
        if self.keeper.moves() { self.kept_originals() } else { Vec::new() }
    }

    /// The recorded original policies of the threads with reservations.
    fn kept_originals(&self) -> Vec<(ThreadId, Policy)> {
        let reserved = self.look.settled.ids();
        let of = |entry: &ontime_hostnet::Original| match (&entry.knob, &entry.value) {
            (Knob::ThreadPolicy { thread, .. }, Value::Policy(original)) if reserved.contains(thread) => {
                Some((*thread, *original))
            }
            _ => None,
        };
        self.journal.entries().iter().filter_map(of).collect()
    }

    /// Prepares a back end that is about to get threads: drops threads whose original policy is not recorded, and
    /// charges the guardian with those that the back end moves.
    pub(super) fn before_pacing(&mut self) {
        let kept: BTreeSet<ThreadId> = self.kept_originals().iter().map(|(id, _)| *id).collect();
        let why = "its vCPUs' original policies could not be kept, see `journal`; the next pass tries again";
        self.look.settled.keep_only(|id| kept.contains(&id), why);
        let paced = self.paced_originals();
        let last = self.guardian.as_ref().map(|guardian| guardian.charged().clone()).unwrap_or_default();
        if paced != last.paced {
            // If the guardian cannot be charged, `cap` reports it when it charges the full list.
            let _ = self.charge(Charge { paced, ..last });
        }
    }

    /// The daemon, and with it the pacers, end. Without pacers a vCPU at its present place could keep others waiting,
    /// so each gets its original policy.
    pub(super) fn give_back_paced(&self) {
        if !self.look.intent.planner_runs() {
            return;
        }
        let reserved = &self.look.intent.reserved;
        let is_paced = |knob: &Knob| matches!(knob, Knob::ThreadPolicy { thread, .. } if reserved.contains_key(thread));
        apply::give_back(&self.host, &self.journal, is_paced);
    }

    /// Reservations, the back end or the priority table have changed: the next pass places all vCPUs again and hands
    /// them over, and retries what failed. The pacers are ended only if the back end or its places have changed.
    pub(super) fn rebuild_keeper(&mut self) {
        let mut next = Keeper::new(&self.config.sched, self.table());
        if self.keeper.off().is_some() || !self.keeper.like(&next) {
            *next.asks() = std::mem::take(self.keeper.asks());
            // The pacers leave their vCPUs at some place when they end; this does not count as drift.
            let reserved = self.look.settled.ids();
            let knobs = self.look.plan.settings.iter().map(|setting| &setting.knob);
            let is_paced =
                |knob: &&Knob| matches!(knob, Knob::ThreadPolicy { thread, .. } if reserved.contains(thread));
            self.put_back.extend(knobs.filter(is_paced).map(Knob::key));
            self.keeper = next;
        }
    }

    /// CPUs went offline or came online. If the back end failed on the former CPUs, or on a CPU that went offline while
    /// its pacer started, it may work now.
    pub(crate) fn cpus_changed(&mut self) {
        if self.keeper.off().is_some() {
            self.rebuild_keeper();
        }
    }

    /// The directory of device processes.
    pub(crate) fn run_dir(&self) -> &Path {
        &self.paths.run_dir
    }

    /// VMs that run and whose reservation allows their guests to request bandwidth.
    pub(crate) fn asking(&self) -> BTreeSet<String> {
        let may = self.config.sched.reservations.iter().filter(|declared| declared.deadlines.is_some());
        let runs = |name: &str| self.look.found.tenants.iter().any(|tenant| tenant.name == name);
        may.map(|declared| declared.name.clone()).filter(|name| runs(name)).collect()
    }

    /// A guest requests this bandwidth in place of what it holds. If Ok, it holds the new bandwidth when this returns.
    ///
    /// # Errors
    /// Why it was refused. Then the guest keeps what it held.
    pub(crate) fn guest_asks(&mut self, vm: &str, mut ask: Ask) -> Result<(), String> {
        self.may_reserve()?;
        // The free bandwidth depends on what other guests have claimed from their offers. They must not claim more
        // while this is decided.
        let taken = self.withdraw();
        if let Some(taking) = &mut ask.taking {
            let known = self.keeper.asks().get(vm).and_then(|known| known.taking.as_ref());
            taking.offered = known.filter(|known| known.ledger == taking.ledger).map_or(0, |known| known.offered);
        }
        let needs = ask.needs.clone();
        let before = self.keeper.asks().insert(vm.to_owned(), ask);
        let admitted = self.admit(vm, &needs);
        self.count_asked(vm, admitted.is_ok(), 1);
        if let Err(why) = &admitted {
            match before {
                Some(before) => self.keeper.asks().insert(vm.to_owned(), before),
                None => self.keeper.asks().remove(vm),
            };
            if taken {
                self.hold_again();
            }
            // One key for all such lines, because a guest may request often and different things each time.
            let line = format!("{vm}: its guest does not have what it asks for: {why}");
            self.repeats.warn_of(&format!("{vm}: refused"), &line);
        }
        self.offer();
        admitted
    }

    /// Refuses where nothing is reserved whatever is requested.
    fn may_reserve(&self) -> Result<(), String> {
        match self.state {
            api::State::Applied => Ok(()),
            api::State::Reset => Err("`ontime reset` was called; nothing is reserved until `ontime apply`".to_owned()),
            api::State::Observing => Err(UNRESERVED.to_owned()),
        }
    }

    /// Why nothing can be reserved now.
    pub(super) fn unreservable(&self) -> Option<String> {
        let off = self.may_reserve().err();
        let unread = "the host could not be read yet; `ontime status` tells why; try again";
        off.or_else(|| self.keeper.why_off()).or_else(|| self.look.is_none().then(|| unread.to_owned()))
    }

    fn count_asked(&mut self, vm: &str, admitted: bool, times: u64) {
        let class = self.look.found.tenants.iter().find(|tenant| tenant.name == vm).map(|tenant| tenant.class);
        self.metrics.deadlines(vm, class.map_or_else(String::new, |class| class.to_string()), admitted, times);
    }

    /// Reads what guests have claimed from their offers. If no guest has claimed anything, offers stay as they are,
    /// because this also runs when a user only asks for the reservations.
    pub(super) fn catch_up(&mut self) {
        let is_news = |ask: &Ask| ask.taking.as_ref().is_some_and(|taking| taking.ledger.generation() > taking.known());
        // After a reset nothing is reserved, whatever a device process writes.
        if self.state != api::State::Applied || !self.keeper.asks().values().any(is_news) {
            return;
        }
        if self.withdraw() {
            self.hold_again();
        }
        self.offer();
    }

    /// Withdraws all offers, so that no guest can claim any more. Returns true if a guest has claimed something that
    /// was not known yet; its needs are updated.
    pub(super) fn withdraw(&mut self) -> bool {
        let mut news = Vec::new();
        for (vm, ask) in self.keeper.asks() {
            let Some(taking) = &mut ask.taking else { continue };
            let generation = taking.ledger.withdraw();
            let claims = generation.saturating_sub(taking.known());
            if claims == 0 {
                continue;
            }
            let held = taking.ledger.table(generation);
            taking.claimed = generation;
            // A table that exceeds the offer is ignored: the VM keeps what it held.
            if held.iter().zip(&self.look.settled.offers(vm)).all(|(held, offer)| held.fits(offer)) {
                ask.needs = guest::needs(&held);
                news.push((vm.clone(), claims));
            }
        }
        news.iter().for_each(|(vm, claims)| self.count_asked(vm, true, *claims));
        !news.is_empty()
    }

    /// Publishes the settled offers to all guests.
    pub(super) fn offer(&mut self) {
        self.withdraw();
        let settled = &self.look.settled;
        for (vm, ask) in self.keeper.asks() {
            let held = ask.held();
            let Some(taking) = &mut ask.taking else { continue };
            let offered = |vcpu: &Reserved| vcpu.tenant == *vm && vcpu.offer.is_some();
            if settled.vcpus.iter().any(offered) {
                taking.offered = taking.ledger.offer(&settled.offers(vm), &held);
            }
        }
    }

    fn admit(&mut self, vm: &str, needs: &[GuestNeed]) -> Result<(), String> {
        let settled = self.settled_again();
        // No other VM may lose its reservation for this.
        let was = |name: &str| self.look.settled.refused.iter().any(|refused| refused.tenant == name);
        let loses = settled.refused.iter().find(|refused| refused.tenant == vm || !was(&refused.tenant));
        if let Some(Refused { tenant, why }) = loses {
            return Err(if tenant == vm { why.clone() } else { format!("{tenant} would lose its reservation: {why}") });
        }
        self.hold(settled)?;
        // `hold` may have run a pass, which may have found that the reservation cannot be kept: an original policy
        // could not be recorded, or the VM has ended.
        self.look.settled.has(vm, needs)
    }

    /// A guest no longer holds any bandwidth: its device process has gone.
    pub(crate) fn guest_gone(&mut self, vm: &str) {
        let Some(gone) = self.keeper.asks().remove(vm) else { return };
        gone.taking.iter().for_each(|taking| _ = taking.ledger.withdraw());
        if self.state == api::State::Applied {
            self.hold_again();
        }
    }

    /// VMs whose guests hold bandwidth.
    pub(crate) fn asked_for(&mut self) -> Vec<String> {
        self.keeper.asks().keys().cloned().collect()
    }

    /// Stores what guests hold, for the next daemon.
    pub(super) fn keep_held(&mut self) {
        if let Err(error) = self.held.keep(&self.look.settled, self.keeper.asks()) {
            let path = self.paths.held();
            let (path, advice) = (path.display(), ontime_tenants::remedy(&error));
            self.repeats.warn(&format!(
                "{path}: which vCPUs have reserved CPU time cannot be written: {error}; {advice}; until then a daemon \
                 that is restarted admits them anew"
            ));
        }
    }

    pub(super) fn hold_again(&mut self) {
        let settled = self.settled_again();
        // The reason of a failure is in the keeper's `off`.
        let _ = self.hold(settled);
    }

    pub(super) fn settled_again(&self) -> Settled {
        let online = &self.look.inventory.cpus.online;
        self.keeper.settle(&self.config.sched, &self.look.found.tenants, online)
    }

    /// Puts a new settlement in force. If only budgets change, no pass is needed, because the threads have their places
    /// already.
    fn hold(&mut self, settled: Settled) -> Result<(), String> {
        if settled == self.look.settled {
            return Ok(());
        }
        let placed = self.keeper.places(&settled) == self.keeper.places(&self.look.settled);
        self.look.settled = settled;
        // A vCPU that no back end serves any more must also be placed at once.
        if !placed || !self.keeper.set(&self.look.settled) {
            self.pass("guests");
        }
        // A decrease is stored in passes only; here only what the stored state does not cover is written.
        if !self.held.covers(&self.look.settled, self.keeper.asks()) {
            self.keep_held();
        }
        self.keeper.off().map_or(Ok(()), |why| Err(why.to_owned()))
    }

    /// For Prometheus.
    pub(super) fn account_reservations(&mut self) {
        self.metrics.reservations(&self.look.settled, &self.keeper.uses());
    }

    /// Reserved CPU time of each vCPU, and how it is kept, for the API. In mode `observe`, what would be reserved.
    pub(crate) fn reservations(&mut self) -> api::Reservations {
        self.catch_up();
        let observing = self.state == api::State::Observing;
        let settled = if observing { &self.look.foreseen } else { &self.look.settled };
        let uses = self.keeper.uses();
        let shown = self.keeper.show();
        let standings: BTreeMap<ThreadId, (Place, u64)> = shown
            .iter()
            .flat_map(|shown| &shown.standings)
            .map(|standing| (standing.id, (standing.place, standing.deadline)))
            .collect();
        let now = shown.as_ref().map_or(0, |shown| shown.now);
        let names: BTreeMap<ThreadId, (&str, u32)> =
            settled.vcpus.iter().map(|vcpu| (vcpu.id, (vcpu.tenant.as_str(), vcpu.vcpu))).collect();
        let micros = |ns: u64| ns as f64 / 1e3;
        let vcpus = settled.vcpus.iter().map(|vcpu| {
            let used = uses.get(&vcpu.id).copied().unwrap_or_default();
            let standing = standings.get(&vcpu.id);
            api::ReservedVcpu {
                vm: vcpu.tenant.clone(),
                class: vcpu.class.to_string(),
                vcpu: vcpu.vcpu,
                tid: vcpu.id.tid,
                budget_us: micros(vcpu.budget.0),
                period_us: micros(vcpu.period.0),
                bandwidth: vcpu.bandwidth.as_f64(),
                guest: vcpu
                    .guest
                    .map(|need| api::Guest { budget_us: micros(need.budget.0), period_us: micros(need.period.0) }),
                tasks: vcpu.tasks().map(|tasks| tasks.into_iter().map(guest_task).collect()),
                cpu: settled.cpu(vcpu),
                place: standing.map(|(place, _)| place_name(*place).to_owned()),
                deadline_in_us: standing.map(|(_, deadline)| micros(deadline.saturating_sub(now))),
                ran_seconds: used.ran as f64 / 1e9,
                beyond_seconds: used.beyond as f64 / 1e9,
                overruns: used.overruns,
                periods: used.periods,
                misses: used.misses,
                changes: used.flips,
                refused: used.refused,
            }
        });
        let slice = shown.as_ref().map(|shown| api::Slice {
            calm: shown.calm,
            length_us: micros(shown.end.saturating_sub(shown.start)),
            elapsed_us: micros(shown.now.saturating_sub(shown.start)),
            slices: shown.slices,
            looks: shown.looks,
            plan: shown
                .plan
                .iter()
                .filter_map(|part| {
                    let (vm, vcpu) = names.get(&part.id)?;
                    Some(api::PlannedPart {
                        cpu: settled.cpus.get(part.cpu).copied()?,
                        vm: (*vm).to_owned(),
                        vcpu: *vcpu,
                        start_us: micros(part.start.saturating_sub(shown.start)),
                        end_us: micros(part.end.saturating_sub(shown.start)),
                    })
                })
                .collect(),
        });
        let refused =
            |refused: &Refused| api::Problem { subject: refused.tenant.clone(), message: refused.why.clone() };
        let running: BTreeSet<&str> = self.look.found.tenants.iter().map(|tenant| tenant.name.as_str()).collect();
        let absent = self.config.sched.reservations.iter().map(|declared| declared.name.as_str());
        let absent: BTreeSet<&str> = absent.filter(|name| !running.contains(name)).collect();
        api::Reservations {
            schema_version: api::SCHEMA_VERSION,
            backend: self.keeper.kind().name().to_owned(),
            foreseen: observing,
            off: self.unreservable(),
            uncounted: self.keeper.uncounted().map(str::to_owned),
            cpus: self.config.sched.cpus_of(&self.look.inventory.cpus.online),
            reserve: self.config.sched.reserve.as_f64(),
            reserved: settled.total().as_f64(),
            vcpus: vcpus.collect(),
            refused: settled.refused.iter().map(refused).collect(),
            absent: absent.into_iter().map(str::to_owned).collect(),
            requested: self.requested(),
            capacity: self.capacity(),
            slice,
        }
    }
}

fn guest_task(task: Task) -> api::GuestTask {
    let Task { period, deadline_in, live } = task;
    api::GuestTask { period_us: period as f64 / 1e3, deadline_in_us: deadline_in as f64 / 1e3, active: live }
}

fn place_name(place: Place) -> &'static str {
    match place {
        Place::Planned => "planned",
        Place::Entitled => "entitled",
        Place::Beyond => "beyond",
    }
}
