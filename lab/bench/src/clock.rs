//! The clock of the host under test, as far as the client outside can know it.
//!
//! In: captures that the emulator writes while it runs, with the virtual clock's time stamps. Out: an estimate of the
//! present virtual time and of the scale, in real seconds per virtual second. On a real machine the clock is the real
//! one.
//!
//! Between packets the estimate advances at the scale of the last two seconds, so its quality depends on the frequency
//! of packets: use the bulk NIC's capture too. The actual gaps are measured on the wire afterwards.

use std::collections::VecDeque;
use std::path::Path;
use std::time::{Duration, Instant};

use crate::pcap::{PcapError, Tail};

/// A clock by which the client waits.
pub trait Clock {
    /// The present time, ns since some start. It never decreases.
    ///
    /// # Errors
    /// [`PcapError`] if the clock's capture cannot be read.
    fn now_ns(&mut self) -> Result<u64, PcapError>;
    /// Real seconds per second of this clock, at present.
    fn scale(&self) -> f64;
    /// The longest real time to sleep before the clock must be read again.
    fn patience(&self) -> Duration;
}

/// The machine's monotonic clock.
#[derive(Debug)]
pub struct RealClock(Instant);

impl Default for RealClock {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl Clock for RealClock {
    fn now_ns(&mut self) -> Result<u64, PcapError> {
        Ok(nanos(self.0.elapsed()))
    }
    fn scale(&self) -> f64 {
        1.0
    }
    fn patience(&self) -> Duration {
        Duration::from_millis(50)
    }
}

/// Real time over which the scale is computed, ns.
const MEMORY_NS: u64 = 2_000_000_000;
/// Minimum virtual time for computing a scale, ns.
const LEAST_NS: u64 = 1_000_000;
/// Plausible scales.
const SCALES: std::ops::RangeInclusive<f64> = 1e-3..=1e4;

/// Estimates a virtual clock from pairs of (real, virtual) time, which the caller passes in.
#[derive(Debug)]
pub struct ClockModel {
    seen: VecDeque<(u64, u64)>,
    /// The first of all pairs.
    first: Option<(u64, u64)>,
    scale: f64,
    latest_ns: u64,
}

impl ClockModel {
    /// A model that assumes `scale` real seconds per virtual second until it has observations.
    pub fn new(scale: f64) -> Self {
        let scale = if scale.is_finite() { scale.clamp(*SCALES.start(), *SCALES.end()) } else { 1.0 };
        Self { seen: VecDeque::new(), first: None, scale, latest_ns: 0 }
    }

    /// Notes that at real time `real_ns` the virtual clock was at `virtual_ns` or later. Older observations are
    /// ignored.
    pub fn observe(&mut self, real_ns: u64, virtual_ns: u64) {
        if self.seen.back().is_some_and(|&(real, seen)| virtual_ns <= seen || real_ns < real) {
            return;
        }
        self.seen.push_back((real_ns, virtual_ns));
        self.first.get_or_insert((real_ns, virtual_ns));
        // One pair older than MEMORY_NS stays, so that the scale always covers at least that time.
        while self.seen.get(1).is_some_and(|&(real, _)| real_ns - real >= MEMORY_NS) {
            self.seen.pop_front();
        }
        if let Some(&(first_real, first_virtual)) = self.seen.front() {
            let (real, virtual_time) = (real_ns - first_real, virtual_ns - first_virtual);
            if virtual_time >= LEAST_NS {
                self.scale = (real as f64 / virtual_time as f64).clamp(*SCALES.start(), *SCALES.end());
            }
        }
    }

    /// The virtual time at real time `real_ns`, ns. It never decreases, and is 0 before the first observation.
    ///
    /// Without new observations it advances at the last scale, and after some time at the mean scale. The clock may
    /// have seemed to stand still in the last observation. A client that waits for it to advance, and is the only
    /// sender, would otherwise never see another packet.
    pub fn now_ns(&mut self, real_ns: u64) -> u64 {
        if let Some(&(real, virtual_ns)) = self.seen.back() {
            let since = real_ns.saturating_sub(real);
            let lately = since.min(MEMORY_NS);
            let passed = lately as f64 / self.scale + (since - lately) as f64 / self.scale.min(self.on_the_whole());
            self.latest_ns = self.latest_ns.max(virtual_ns.saturating_add(passed as u64));
        }
        self.latest_ns
    }

    /// Mean of real seconds per virtual second since the first observation; infinite if that time is too short.
    fn on_the_whole(&self) -> f64 {
        match (self.first, self.seen.back()) {
            (Some((first_real, first)), Some(&(real, last))) if last - first >= LEAST_NS => {
                ((real - first_real) as f64 / (last - first) as f64).max(*SCALES.start())
            }
            _ => f64::INFINITY,
        }
    }

    /// Real seconds per virtual second.
    pub fn scale(&self) -> f64 {
        self.scale
    }
}

/// The virtual clock of an emulated host, read from the captures that it writes.
#[derive(Debug)]
pub struct VirtualClock {
    tails: Vec<Tail>,
    model: ClockModel,
    start: Instant,
    looked: Option<Instant>,
    /// The first time stamp, and this clock's time then.
    origin: Option<(u64, u64)>,
}

impl VirtualClock {
    /// Minimum interval between reads of the captures.
    const LOOK: Duration = Duration::from_micros(500);

    /// Follows these captures. `scale` is the initial estimate.
    ///
    /// # Errors
    /// [`PcapError::Io`] if a capture cannot be opened.
    pub fn open<P: AsRef<Path>>(captures: &[P], scale: f64) -> Result<Self, PcapError> {
        let tails = captures.iter().map(|path| Tail::open(path.as_ref())).collect::<Result<_, _>>()?;
        Ok(Self { tails, model: ClockModel::new(scale), start: Instant::now(), looked: None, origin: None })
    }

    fn look(&mut self) -> Result<(), PcapError> {
        let mut latest = 0;
        for tail in &mut self.tails {
            tail.read_new(|record| latest = latest.max(record.at_ns))?;
        }
        if latest > 0 {
            let (first, stood) = *self.origin.get_or_insert((latest, self.model.latest_ns));
            self.model.observe(nanos(self.start.elapsed()), latest.saturating_sub(first).saturating_add(stood));
        }
        Ok(())
    }
}

impl Clock for VirtualClock {
    /// Before the first packet the virtual time is unknown, and the scaled real time replaces it.
    fn now_ns(&mut self) -> Result<u64, PcapError> {
        if self.looked.is_none_or(|looked| looked.elapsed() >= Self::LOOK) {
            self.look()?;
            self.looked = Some(Instant::now());
        }
        let real = nanos(self.start.elapsed());
        if self.origin.is_none() {
            self.model.latest_ns = (real as f64 / self.model.scale) as u64;
        }
        Ok(self.model.now_ns(real))
    }

    fn scale(&self) -> f64 {
        self.model.scale()
    }

    fn patience(&self) -> Duration {
        Duration::from_millis(2)
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_model_learns_a_slow_clock_and_runs_on_between_packets() {
        let mut model = ClockModel::new(1.0);
        // Ten real milliseconds per virtual millisecond.
        for step in 0..100_u64 {
            model.observe(step * 10_000_000, step * 1_000_000);
        }
        assert!((model.scale() - 10.0).abs() < 1e-9, "{}", model.scale());
        let last = 99 * 1_000_000;
        assert_eq!(model.now_ns(99 * 10_000_000), last);
        assert_eq!(model.now_ns(99 * 10_000_000 + 5_000_000), last + 500_000);
    }

    #[test]
    fn the_scale_follows_a_change_within_its_memory() {
        let mut model = ClockModel::new(1.0);
        let (mut real, mut virtual_ns) = (0, 0);
        for step in 0..1_000_u64 {
            real += 10_000_000;
            virtual_ns += if step < 500 { 10_000_000 } else { 1_000_000 };
            model.observe(real, virtual_ns);
        }
        assert!((model.scale() - 10.0).abs() < 0.2, "{}", model.scale());
    }

    #[test]
    fn a_clock_that_stood_still_when_it_was_seen_last_is_not_waited_for_for_ever() {
        let mut model = ClockModel::new(1.0);
        for step in 0..1_000_u64 {
            model.observe(step * 70_000_000, step * 10_000_000);
        }
        // The emulator gets no CPU for 20 s.
        let (real, seen) = (69_930_000_000 + 20_000_000_000, 9_990_000_000 + 2_000_000);
        model.observe(real, seen);
        assert!(model.scale() > 1_000.0, "{}", model.scale());
        let later = model.now_ns(real + 20_000_000_000) - seen;
        assert!(
            (1_500_000_000..2_500_000_000).contains(&later),
            "{later} ns in 20 s of a clock that takes 9 s a second on the whole"
        );
    }

    #[test]
    fn the_virtual_clock_follows_a_growing_capture() {
        use std::io::Write;
        let mut file = tempfile::NamedTempFile::new().unwrap();
        let mut clock = VirtualClock::open(&[file.path()], 1.0).unwrap();
        let before = clock.now_ns().unwrap();
        let header: Vec<u8> =
            [0xa1b2_c3d4_u32, 0x0004_0002, 0, 0, 96, 1].iter().flat_map(|v| v.to_le_bytes()).collect();
        file.write_all(&header).unwrap();
        let packet = |us: u32| [5, us, 0, 60].iter().flat_map(|v: &u32| v.to_le_bytes()).collect::<Vec<_>>();
        for step in 0..20 {
            file.write_all(&packet(step * 1_000)).unwrap();
            std::thread::sleep(Duration::from_millis(5));
            clock.now_ns().unwrap();
        }
        let now = clock.now_ns().unwrap();
        assert!(clock.scale() > 4.0, "5 ms or more of sleep a virtual ms, yet the scale is {}", clock.scale());
        assert!(now - before >= 19_000_000, "{now} {before}");
    }

    proptest! {
        #[test]
        fn time_never_goes_back(
            news in prop::collection::vec((any::<u64>(), any::<u64>(), any::<u64>()), 0..50),
            scale in any::<f64>(),
        ) {
            let mut model = ClockModel::new(scale);
            let mut before = 0;
            for (real, virtual_ns, ask) in news {
                model.observe(real, virtual_ns);
                let now = model.now_ns(ask);
                prop_assert!(now >= before);
                prop_assert!(SCALES.contains(&model.scale()));
                before = now;
            }
        }
    }
}
