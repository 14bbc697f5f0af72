//! The engine's part for reservations that programs request: admission beside all others, the end of leases, and the
//! answers of the API. The list itself is `requested`.
//!
//! All of it runs on the main thread (SCHED_OTHER). A request for CPU time costs an admission and a pass, a renewal
//! neither.

use ontime_sched::{Capacity, Lease, pacers_of_declared};
use ontime_tenants::ClassSource;

use super::Engine;
use crate::api;
use crate::daemon::requested::{self, Step, Unreserved, boot_time};

/// The kind of a line in the log. Names are the user's choice: all lines about users other than root are of one kind
/// for each user, so that none displaces what is told of others.
fn kind(uid: u32, line: &str) -> String {
    if uid == 0 { line.to_owned() } else { format!("reservations of user {uid}") }
}

impl Engine {
    /// Creates, renews or changes a reservation. Returns whether it is new, and what it is now.
    ///
    /// # Errors
    /// Why it was refused. Then a reservation of this name is as it was.
    pub(crate) fn reserve(
        &mut self,
        name: &str,
        request: api::ReserveRequest,
        uid: Option<u32>,
    ) -> Result<(bool, api::Requested), Unreserved> {
        let (uid, step) = self.requested.judge(name, &request, uid, &self.config.daemon)?;
        if step == Step::Renew {
            self.requested.put(name, request, uid, boot_time())?;
        } else {
            if let Some(why) = self.unreservable() {
                return Err(Unreserved::Refused(why));
            }
            let lease = requested::lease(name, &request, false);
            self.admit_request(name, lease, |requested| requested.put(name, request, uid, boot_time()))?;
            let line = format!("reservation {name} of user {uid} holds what it asked for");
            self.named.info_of(&kind(uid, &line), &line);
        }
        let requested = self.requested().into_iter().find(|one| one.name == name);
        let gone = || Unreserved::Refused("its lease ended meanwhile; ask again".to_owned());
        let requested = requested.ok_or_else(gone)?;
        if step == Step::Create && !requested.held {
            // The back end has failed when it was given the vCPUs.
            self.unreserve(name, Some(0))?;
            return Err(requested.why.map_or_else(gone, Unreserved::Refused));
        }
        Ok((step == Step::Create, requested))
    }

    /// Admits this lease, if there is one, in place of the one of this name, and puts it into the list.
    fn admit_request(
        &mut self,
        name: &str,
        lease: Option<Lease>,
        put: impl FnOnce(&mut requested::Requested) -> Result<(), Unreserved>,
    ) -> Result<(), Unreserved> {
        // What is free depends on what guests have claimed from their offers. They must not claim more while this is
        // decided.
        let claimed = self.withdraw();
        let admitted = lease.map_or(Ok(()), |lease| self.try_lease(name, lease).map_err(Unreserved::Refused));
        let kept = admitted.and_then(|()| put(&mut self.requested));
        self.config.set_requested(self.requested.leases(), self.requested.grants());
        if kept.is_err() {
            if claimed {
                self.hold_again();
            }
            self.offer();
            return kept;
        }
        self.pass("reservation");
        Ok(())
    }

    /// Whether this lease would be admitted in place of the one of this name, and no other reservation be lost.
    fn try_lease(&mut self, name: &str, lease: Lease) -> Result<(), String> {
        self.config.sched.leases = self.requested.leases_with(lease);
        let settled = self.settled_again();
        let state = settled.leases.get(name).cloned().unwrap_or_default();
        if !state.held {
            return Err(state.why.unwrap_or_else(|| "nothing is reserved".to_owned()));
        }
        let (own, before) = (format!("reservation {name}"), &self.look.settled.refused);
        let was = |tenant: &str| before.iter().any(|refused| refused.tenant == tenant);
        match settled.refused.iter().find(|refused| refused.tenant != own && !was(&refused.tenant)) {
            Some(loser) => Err(format!("{} would lose its reservation: {}", loser.tenant, loser.why)),
            None => Ok(()),
        }
    }

    /// Ends a reservation, if there is one of this name.
    ///
    /// # Errors
    /// Why this user may not.
    pub(crate) fn unreserve(&mut self, name: &str, uid: Option<u32>) -> Result<(), Unreserved> {
        let uid = self.requested.authorise(name, uid, &self.config.daemon)?;
        if self.requested.remove(name) {
            let line = format!("reservation {name} was released by user {uid}");
            self.named.info_of(&kind(uid, &line), &line);
            self.config.set_requested(self.requested.leases(), self.requested.grants());
            self.pass("reservation");
        }
        Ok(())
    }

    /// Ends the leases whose time is over. Returns whether there were any; then a pass is due.
    pub(crate) fn end_leases(&mut self) -> bool {
        let ended = self.requested.end(boot_time());
        for (name, uid) in &ended {
            let line = format!("reservation {name} of user {uid} has ended: its owner did not renew it");
            self.named.warn_of(&kind(*uid, &line), &line);
        }
        if !ended.is_empty() {
            self.config.set_requested(self.requested.leases(), self.requested.grants());
        }
        !ended.is_empty()
    }

    /// The time until the next lease ends.
    pub(crate) fn lease_ends_in(&self) -> Option<std::time::Duration> {
        self.requested.ends_in(boot_time())
    }

    /// What programs requested, for the API.
    pub(super) fn requested(&self) -> Vec<api::Requested> {
        let tenants = |name: &str| {
            let is_its =
                |source: &ClassSource| matches!(source, ClassSource::Reservation { name: of, .. } if of == name);
            let found = self.look.found.tenants.iter().filter(|tenant| is_its(&tenant.class_source));
            found.map(|tenant| tenant.name.clone()).collect::<Vec<String>>()
        };
        self.requested.show(&self.look.settled.leases, tenants, self.unreservable().as_deref(), boot_time())
    }

    /// What a program that adds up reservations may give out.
    pub(super) fn capacity(&self) -> api::Capacity {
        let Capacity { unpinned, largest, pinned, watcher } = Capacity::beside(self.config.sched.beside_leases());
        let settled = &self.look.settled;
        let is_held = |lease: &&Lease| settled.leases.get(&lease.name).is_some_and(|state| state.held);
        let leases = self.config.sched.leases.iter().filter(is_held);
        let leased: u64 = leases.map(|lease| lease.ppm.saturating_mul(u64::from(lease.count))).sum();
        api::Capacity {
            unpinned_micro_cpus_per_cpu: unpinned,
            largest_micro_cpus: largest,
            pinned_micro_cpus_per_cpu: pinned,
            watcher_micro_cpus: watcher,
            other_micro_cpus: settled.total().whole_ppm().saturating_sub(leased),
            pacers_micro_cpus: pacers_of_declared(settled),
            preempt_rt: self.look.inventory.kernel.realtime,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use ontime_tenants::Repeats;

    use super::kind;

    #[test]
    fn a_user_with_ever_new_names_displaces_no_other_line_of_the_log() {
        let (mut repeats, now) = (Repeats::default(), Instant::now());
        let mut say = |uid: u32, line: &str| repeats.say(&kind(uid, line), now).is_some();
        let said = (0..10_000).filter(|number| say(7, &format!("reservation {number} was given back"))).count();
        assert_eq!(said, 1);
        assert!(say(8, "reservation a has ended") && say(0, "reservation a has ended") && say(0, "reservation b"));
    }
}
