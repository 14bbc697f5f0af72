//! When the next pass is due, and why. Pure.
//!
//! In: events, and what each pass leaves to do later. Out: the earliest reason. A later pass that is scheduled never
//! delays an event's pass.

use std::time::{Duration, Instant};

use super::events::Event;

/// The time from the first event of a burst to the pass for the whole burst.
const DEBOUNCE: Duration = Duration::from_millis(50);
/// Passes take at most one part in this of the time, so that a storm of events costs no more.
const SHARE: u32 = 5;
/// The same for passes that hooks request.
const HOOKS_SHARE: u32 = 2;
/// The longest rest after a pass. Without this limit, a single slow pass would delay the next change for four times as
/// long.
const REST: Duration = Duration::from_secs(3);
/// The time after which a knob is set once more that a driver may have overwritten. e1000e overwrites it at an
/// interrupt, which happens at least every 2 s.
const SECOND_WRITE: Duration = Duration::from_secs(3);
/// The time from a look that failed to the next one.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// The passes that are due.
#[derive(Debug)]
pub(super) struct Due {
    /// The first event since the last pass, and when its pass is due.
    wanted: Option<(Event, Instant)>,
    /// When to look again after a look that failed.
    again: Option<Instant>,
    /// When to set a knob once more.
    second_write: Option<Instant>,
    last_end: Instant,
}

impl Due {
    /// Nothing is due but the rescan.
    pub(super) fn new(now: Instant) -> Self {
        Self { wanted: None, again: None, second_write: None, last_end: now }
    }

    /// An event requests a pass, after [`DEBOUNCE`] so that it covers the whole burst, and not too soon after the last
    /// pass, which took `last_pass`. Any user may cause passes, and make them slow; only root's hooks cause
    /// [`Event::Poked`], so a VM that root starts does not wait for the long rest.
    pub(super) fn want(&mut self, event: Event, last_pass: Duration, now: Instant) {
        let share = if event == Event::Poked { HOOKS_SHARE } else { SHARE };
        let rest = (last_pass * (share - 1)).min(REST);
        let at = (now + DEBOUNCE).max(self.last_end + rest);
        if self.wanted.is_none_or(|(_, wanted)| at < wanted) {
            self.wanted = Some((event, at));
        }
    }

    /// Why and when the next pass is due. `rescan` is the longest time without a pass.
    pub(super) fn next(&self, rescan: Duration) -> (Event, Instant) {
        let later = [self.again, self.second_write].into_iter().flatten().min();
        let later = later.or(self.wanted.is_none().then_some(self.last_end + rescan)).map(|at| (Event::Clock, at));
        let all = self.wanted.into_iter().chain(later);
        all.min_by_key(|(_, at)| *at).unwrap_or((Event::Clock, self.last_end + rescan))
    }

    /// A pass begins, for everything that is due.
    pub(super) fn begins(&mut self, now: Instant) {
        (self.wanted, self.again) = (None, None);
        self.second_write = self.second_write.filter(|at| *at > now);
    }

    /// A pass has ended. `looks_again`: it could not read the whole host. `needs_second_write`: it has set a knob that
    /// must be set once more.
    pub(super) fn ended(&mut self, looks_again: bool, needs_second_write: bool, now: Instant) {
        self.last_end = now;
        if looks_again {
            self.again = Some(now + LOOK_AGAIN);
        }
        if needs_second_write {
            self.second_write = Some(now + SECOND_WRITE);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESCAN: Duration = Duration::from_secs(30);
    const PASS: Duration = Duration::from_millis(20);

    #[test]
    fn a_burst_is_one_pass_and_passes_rest() {
        let start = Instant::now();
        let mut due = Due::new(start);
        assert_eq!(due.next(RESCAN), (Event::Clock, start + RESCAN));
        let now = start + RESCAN / 2;
        due.want(Event::Links, PASS, now);
        due.want(Event::Tenants, PASS, now + DEBOUNCE / 2);
        assert_eq!(due.next(RESCAN), (Event::Links, now + DEBOUNCE));
        due.begins(now + DEBOUNCE);
        due.ended(false, false, now + DEBOUNCE + PASS);
        due.want(Event::Tenants, PASS, now + DEBOUNCE + PASS);
        assert_eq!(due.next(RESCAN).1, now + DEBOUNCE + PASS + PASS * 4);
        due.begins(now);
        due.want(Event::Tenants, Duration::from_secs(60), now);
        assert_eq!(
            due.next(Duration::from_secs(1)).1,
            now + DEBOUNCE + PASS + REST,
            "a rescan does not cut the rest short"
        );
    }

    /// Hostile processes make passes slow and frequent; root starts a VM.
    #[test]
    fn a_hook_does_not_wait_for_the_rest_after_a_pass_of_others() {
        let (start, slow) = (Instant::now(), Duration::from_millis(400));
        for first in [Event::Tenants, Event::Links, Event::Queues, Event::Lease] {
            let mut due = Due::new(start);
            due.want(first, slow, start);
            assert_eq!(due.next(RESCAN), (first, start + slow * 4));
            due.want(Event::Poked, slow, start + PASS);
            assert_eq!(due.next(RESCAN), (Event::Poked, start + slow));
            // What comes later delays it no more, neither others' events nor more hooks.
            due.want(first, slow, start + PASS * 2);
            due.want(Event::Poked, slow, start + slow);
            assert_eq!(due.next(RESCAN), (Event::Poked, start + slow));
        }
        // Hooks alone leave half of the time.
        let mut due = Due::new(start);
        due.want(Event::Poked, slow, start);
        let begins = due.next(RESCAN).1;
        due.begins(begins);
        due.ended(false, false, begins + slow);
        due.want(Event::Poked, slow, begins + slow);
        assert_eq!(due.next(RESCAN).1, begins + slow * 2);
    }

    #[test]
    fn an_event_does_not_wait_for_what_is_set_again_and_that_is_set_all_the_same() {
        let start = Instant::now();
        let mut due = Due::new(start);
        due.ended(false, true, start);
        assert_eq!(due.next(RESCAN), (Event::Clock, start + SECOND_WRITE));
        due.want(Event::Tenants, PASS, start + PASS);
        let (event, at) = due.next(RESCAN);
        assert_eq!((event, at < start + Duration::from_millis(200)), (Event::Tenants, true));
        due.begins(at);
        due.ended(false, false, at + PASS);
        assert_eq!(due.next(RESCAN), (Event::Clock, start + SECOND_WRITE));
        due.begins(start + SECOND_WRITE);
        due.ended(false, false, start + SECOND_WRITE);
        assert_eq!(due.next(RESCAN), (Event::Clock, start + SECOND_WRITE + RESCAN));
    }

    #[test]
    fn a_look_that_failed_is_soon_another_and_keeps_no_event_waiting() {
        let start = Instant::now();
        let mut due = Due::new(start);
        due.ended(true, false, start);
        assert_eq!(due.next(RESCAN), (Event::Clock, start + LOOK_AGAIN));
        due.want(Event::Poked, PASS, start + PASS);
        assert_eq!(due.next(RESCAN).0, Event::Poked);
        due.begins(start + LOOK_AGAIN);
        assert_eq!(due.next(RESCAN), (Event::Clock, start + RESCAN));
    }
}
