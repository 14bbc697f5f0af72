//! Adaptive polling: decides when a NIC's RT queues poll and when they use interrupts, within a limit of CPU time. Does
//! no I/O.
//!
//! In: packet counts of NICs, read at intervals. Out: the NICs that must not poll, and the CPU time saved compared with
//! permanent polling (KBP, IEICE'22, section 4.1, names the polling thread's CPU as its cost).
//!
//! The limit is a token bucket. Credit grows by `bound` per unit of time, up to the amount for [`WINDOW`], and polling
//! consumes one per unit of time. If a check is late, the credit may become negative, and must be earned first. So over
//! any time T, polling takes at most `bound` x (T + [`WINDOW`]) plus the time between two checks.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// The time for which credit accumulates at most.
pub(crate) const WINDOW: Duration = Duration::from_secs(10);
/// Interval between reads of packet counts. A queue starts to poll at most this long after its first packet. Until then
/// its packets come by interrupt, as under `partitioned`.
pub const LOOK: Duration = Duration::from_millis(100);
/// After polling has ended for lack of credit, it restarts with this share of the full credit, so that it does not
/// toggle.
const RESTART: f64 = 0.1;

/// The administrator's settings.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Settings {
    /// Limit of a NIC's polling time on average, as a share of one CPU, above 0 and at most 1.
    pub bound: f64,
    /// Time for which polling continues after the last packet.
    pub linger: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { bound: 1.0, linger: Duration::from_secs(1) }
    }
}

/// Polling times of a NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Account {
    /// Whether the NIC is polled now.
    pub polling: bool,
    /// Time of polling, which uses a whole CPU.
    pub polled: Duration,
    /// Time with interrupts, during which that CPU was saved.
    pub rested: Duration,
    /// Number of times that polling started.
    pub starts: u64,
    /// Number of times that polling stopped because of the limit, while packets arrived.
    pub bounded: u64,
}

#[derive(Debug, Clone)]
struct Nic {
    packets: u64,
    quiet: Duration,
    /// Remaining polling time, s; negative after a late check.
    credit: f64,
    /// Credit is used up; ends when [`RESTART`] of the full credit is back.
    exhausted: bool,
    account: Account,
}

/// State of all NICs that poll under the method.
#[derive(Debug, Clone, Default)]
pub struct Adaptive {
    nics: BTreeMap<u32, Nic>,
}

impl Adaptive {
    /// Takes the received packets of each NIC, by interface index, `elapsed` after the previous call. Returns the NICs
    /// that must not poll. A new NIC does not poll before its first packet; a NIC that is not in `packets` is removed.
    pub fn look(&mut self, settings: Settings, elapsed: Duration, packets: &BTreeMap<u32, u64>) -> BTreeSet<u32> {
        self.nics.retain(|nic, _| packets.contains_key(nic));
        for (nic, count) in packets {
            match self.nics.get_mut(nic) {
                Some(nic) => nic.look(settings, elapsed, *count),
                None => {
                    let credit = WINDOW.as_secs_f64() * settings.bound;
                    let quiet = settings.linger;
                    let account = Account::default();
                    self.nics.insert(*nic, Nic { packets: *count, quiet, credit, exhausted: false, account });
                }
            }
        }
        self.nics.iter().filter(|(_, nic)| !nic.account.polling).map(|(index, _)| *index).collect()
    }

    /// Polling times of each NIC, by interface index.
    pub fn accounts(&self) -> impl Iterator<Item = (u32, Account)> + '_ {
        self.nics.iter().map(|(index, nic)| (*index, nic.account))
    }
}

impl Nic {
    fn look(&mut self, settings: Settings, elapsed: Duration, packets: u64) {
        let full = WINDOW.as_secs_f64() * settings.bound;
        let seconds = elapsed.as_secs_f64();
        if self.account.polling {
            self.account.polled += elapsed;
            self.credit -= seconds;
        } else {
            self.account.rested += elapsed;
        }
        self.credit = (self.credit + seconds * settings.bound).min(full);
        // A counter that decreased was reset by its driver. That counts as an arrival too.
        let came = packets != self.packets;
        self.packets = packets;
        self.quiet = if came { Duration::ZERO } else { self.quiet + elapsed };
        let busy = self.quiet < settings.linger;
        let bounded = settings.bound < 1.0;
        if bounded && self.account.polling && self.credit <= 0.0 {
            self.exhausted = true;
            self.account.bounded += u64::from(busy);
        } else if self.exhausted && self.credit >= full * RESTART {
            self.exhausted = false;
        }
        let polls = busy && !self.exhausted;
        self.account.starts += u64::from(polls && !self.account.polling);
        self.account.polling = polls;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NIC: u32 = 3;

    /// Checks every 100 ms for `seconds`. Packets arrive in the tenths for which `comes` is true. Returns the account.
    fn run(adaptive: &mut Adaptive, settings: Settings, seconds: u64, comes: impl Fn(u64) -> bool) -> Account {
        let mut count = adaptive.nics.get(&NIC).map_or(0, |nic| nic.packets);
        for tenth in 0..seconds * 10 {
            count += u64::from(comes(tenth));
            adaptive.look(settings, LOOK, &BTreeMap::from([(NIC, count)]));
        }
        adaptive.accounts().next().unwrap().1
    }

    #[test]
    fn a_quiet_nic_rests_and_a_busy_one_polls_at_once_and_lingers() {
        let settings = Settings { bound: 1.0, linger: Duration::from_millis(500) };
        let mut adaptive = Adaptive::default();
        let idle = run(&mut adaptive, settings, 10, |_| false);
        assert!(!idle.polling);
        assert_eq!((idle.polled, idle.starts), (Duration::ZERO, 0));
        // One packet: polling starts at that check and continues for half a second.
        let once = run(&mut adaptive, settings, 10, |tenth| tenth == 0);
        assert_eq!((once.polled, once.starts, once.polling), (Duration::from_millis(500), 1, false));
        // Packets in every interval: polls all the time.
        let busy = run(&mut adaptive, settings, 10, |_| true);
        assert!(busy.polling);
        assert_eq!((busy.starts, busy.bounded), (2, 0));
        assert_eq!(busy.polled, once.polled + Duration::from_millis(9900));
    }

    #[test]
    fn the_bound_holds_however_much_comes() {
        for bound in [0.05, 0.3, 0.5, 0.9] {
            let settings = Settings { bound, ..Settings::default() };
            let mut adaptive = Adaptive::default();
            let seconds = 600;
            let account = run(&mut adaptive, settings, seconds, |_| true);
            let most = (Duration::from_secs(seconds) + WINDOW).mul_f64(bound) + LOOK;
            assert!(account.polled <= most, "{bound}: {account:?}");
            // The limit is used almost fully.
            assert!(account.polled >= Duration::from_secs(seconds).mul_f64(bound * 0.8), "{bound}: {account:?}");
            assert!(account.bounded > 0);
            // At most one start per second: polling does not toggle.
            assert!(account.starts <= seconds, "{bound}: {account:?}");
            assert_eq!(account.polled + account.rested, Duration::from_secs(seconds) - LOOK);
        }
    }

    #[test]
    fn a_nic_that_went_is_forgotten() {
        let mut adaptive = Adaptive::default();
        let settings = Settings::default();
        assert_eq!(adaptive.look(settings, LOOK, &BTreeMap::from([(1, 5), (2, 5)])), BTreeSet::from([1, 2]));
        assert_eq!(adaptive.look(settings, LOOK, &BTreeMap::from([(1, 6), (2, 5)])), BTreeSet::from([2]));
        assert_eq!(adaptive.look(settings, LOOK, &BTreeMap::from([(2, 9)])), BTreeSet::new());
        assert_eq!(adaptive.accounts().count(), 1);
    }

    proptest::proptest! {
        #[test]
        fn any_traffic_and_any_pause_keep_the_bound(
            bound in 0.01..1.0f64,
            steps in proptest::collection::vec((1u64..5_000, proptest::bool::ANY), 1..300),
        ) {
            let settings = Settings { bound, linger: Duration::from_millis(50) };
            let mut adaptive = Adaptive::default();
            let (mut count, mut total, mut longest) = (0, Duration::ZERO, Duration::ZERO);
            for (ms, comes) in steps {
                let elapsed = Duration::from_millis(ms);
                count += u64::from(comes);
                adaptive.look(settings, elapsed, &BTreeMap::from([(NIC, count)]));
                total += elapsed;
                longest = longest.max(elapsed);
            }
            let (_, account) = adaptive.accounts().next().unwrap();
            let most = (total + WINDOW).mul_f64(bound) + longest;
            proptest::prop_assert!(account.polled <= most + Duration::from_micros(1), "{account:?}");
        }
    }
}
