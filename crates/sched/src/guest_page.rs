//! The next deadlines that guests publish: slices have to end there (RTVirt, section 3.3).
//!
//! For each of its vCPUs, a guest writes its deadline tasks' next deadlines and periods into its own memory (`struct
//! ontime_next_vcpu` of kernel/abi/ontime_abi.h). A pacer reads them at the start of each slice. The guest may be
//! hostile, and may write anything. A slice is never shorter than the planner's minimum; in the long run a vCPU ends at
//! most [`CUTS`] slices in its period; and the published times decide only where slices end. How much CPU time the vCPU
//! has was admitted before, and is not read here.
//!
//! **Read, not mapped.** The process that holds the guest's memory may truncate it or punch holes into it. Through a
//! mapping that would be a SIGBUS in the daemon; a read returns zeros or less. A read takes the lock of the page, which
//! that process can hold: so a pacer does not read itself (`run::reader`), and does not read a page for a while
//! ([`REST`]) whose reads take long.
//!
//! Times in the page are ns of the host's CLOCK_REALTIME, which a guest can know exactly (KVM_HC_CLOCK_PAIRING).
//! `paired` counts the guest's readings of that clock. The distance to CLOCK_MONOTONIC is taken when `paired` changes,
//! so a later step of the clock moves no deadline.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use ontime_plan::dpwrap::SLICE_MIN;
use rustix::time::{ClockId, clock_gettime};

use crate::memory_file::{close_elsewhere, is_memory, stays_resident};
use crate::model::{self, Next};

/// Bytes of a vCPU's entries: `paired`, a reserved word, and [`ENTRIES`] pairs of deadline and period, little endian.
pub const LINE: usize = 128;
/// Deadline tasks that a vCPU can publish.
pub const ENTRIES: usize = 7;
/// vCPUs that have entries.
const VCPUS: u32 = model::VCPUS as u32;
/// How many slices may end for a vCPU in each of its periods: in the long run, and at once.
const CUTS: u64 = 8;
const BURST: u64 = 16;
/// A task whose deadline has not changed for this many periods counts as asleep.
const LIVE: u64 = 2;
/// How much longer than usual reads of a page may take together, ns, beyond one part in [`PART`] of the time. One read
/// that is late takes as much.
const EXCESS_MAX: u64 = 150_000;
const PART: u64 = 20;
/// How long the page is not read after that, ns.
const REST: u64 = 1_000_000_000;
/// The longest period of a task, ns (ONTIME_BW_PERIOD_MAX).
const PERIOD_MAX: u64 = 4_000_000_000;

/// Where a guest publishes: a part of the file that is its memory.
#[derive(Debug, Clone)]
pub struct Page(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    /// None only while this is dropped.
    file: Option<Arc<File>>,
    offset: u64,
    /// Not read before this time, ns of CLOCK_MONOTONIC.
    rests_until: AtomicU64,
    /// When the time that reads took beyond the usual will be one part in [`PART`] of all time.
    paid_at: AtomicU64,
    /// Device and inode.
    id: (u64, u64),
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.file.take().into_iter().for_each(close_elsewhere);
    }
}

impl PartialEq for Page {
    fn eq(&self, other: &Self) -> bool {
        (self.0.id, self.0.offset) == (other.0.id, other.0.offset)
    }
}

impl Eq for Page {}

impl Page {
    /// The entries at `offset` of a VM's memory.
    ///
    /// # Errors
    /// The pacer might have to wait for the file: it is neither of huge pages nor of memory on a host without swap. Or
    /// the offset is not valid.
    pub fn new(file: File, offset: u64) -> io::Result<Self> {
        if !is_memory(&file) {
            return Err(io::Error::other("its memory is no memory file"));
        }
        let stat = rustix::fs::fstat(&file)?;
        if !stays_resident(&file)? {
            return Err(io::Error::other("its memory may be swapped out; use huge pages, or no swap"));
        }
        let whole = u64::from(VCPUS) * LINE as u64;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        if offset % 4096 != 0 || offset.checked_add(whole).is_none_or(|end| end > size) {
            return Err(io::Error::other("its deadlines are not in its memory"));
        }
        Ok(Self::of(file, offset, id(&stat)))
    }

    fn of(file: File, offset: u64, id: (u64, u64)) -> Self {
        let [rests_until, paid_at] = [0, 0].map(AtomicU64::new);
        Self(Arc::new(Inner { file: Some(Arc::new(file)), offset, rests_until, paid_at, id }))
    }

    /// Whether this page is at `offset` of `file`, so that no new one is needed.
    pub fn is_at(&self, file: impl AsFd, offset: u64) -> bool {
        rustix::fs::fstat(file).is_ok_and(|stat| (id(&stat), offset) == (self.0.id, self.0.offset))
    }

    /// Device and inode of the file, and the offset of a vCPU's entries in it.
    pub(crate) fn entries(&self, vcpu: u32) -> ((u64, u64), u64) {
        (self.0.id, self.place(vcpu))
    }

    /// A vCPU's deadline tasks, the earliest deadline first, for display; None if they cannot be read. The values are
    /// the guest's own, and reading may block.
    pub(crate) fn tasks(&self, vcpu: u32) -> Option<Vec<Task>> {
        let now = clock_gettime(ClockId::Realtime);
        let now = i128::from(now.tv_sec) * 1_000_000_000 + i128::from(now.tv_nsec);
        self.read(vcpu).map(|line| tasks(&line, now))
    }

    /// A vCPU's entries; None if they cannot be read.
    fn read(&self, vcpu: u32) -> Option<[u8; LINE]> {
        let mut line = [0; LINE];
        (self.0.file.as_ref()?.read_at(&mut line, self.place(vcpu)).ok()? == LINE).then_some(line)
    }

    /// The offset of a vCPU's entries in the file.
    fn place(&self, vcpu: u32) -> u64 {
        self.0.offset + u64::from(vcpu.min(VCPUS - 1)) * LINE as u64
    }
}

#[allow(clippy::unnecessary_cast, reason = "their types differ between architectures")]
fn id(stat: &rustix::fs::Stat) -> (u64, u64) {
    (stat.st_dev as u64, stat.st_ino as u64)
}

/// A deadline task of a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Task {
    /// Its period, ns.
    pub period: u64,
    /// Time from now to its next deadline, ns; for a sleeping task, to the earliest deadline that it can have next.
    pub deadline_in: u64,
    /// Whether the task has run lately.
    pub live: bool,
}

/// The tasks in these entries, at `now` ns of CLOCK_REALTIME. Impossible entries are left out.
#[doc(hidden)]
pub fn tasks(line: &[u8; LINE], now: i128) -> Vec<Task> {
    let words: Vec<u64> = line.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes)).collect();
    let (Some((paired, [_, entries @ ..])), Ok(from)) = (words.split_first(), u64::try_from(now)) else {
        return Vec::new();
    };
    let task = |entry: &[u64]| {
        let [deadline, period] = *entry else { return None };
        let next = following(i128::from(deadline), period, from, deadline != 0)?;
        Some(Task { period, deadline_in: next.at.saturating_sub(from), live: next.live })
    };
    let mut tasks: Vec<Task> = entries.chunks_exact(2).filter(|_| *paired != 0).filter_map(task).collect();
    tasks.sort_by_key(|task| task.deadline_in);
    tasks
}

/// The deadlines of a vCPU, as its pacer reads them.
#[derive(Debug)]
pub(crate) struct Published {
    page: Page,
    vcpu: u32,
    follow: Follow,
}

impl Published {
    /// For a vCPU that was admitted with this period, ns.
    pub(crate) fn new(page: Page, vcpu: u32, period: u64) -> Self {
        Self { page, vcpu, follow: Follow::new(period) }
    }

    /// Sets another period than the admitted one, ns.
    pub(crate) fn set_period(&mut self, period: u64) {
        self.follow.set_period(period);
    }

    /// Takes over what `before`, of the same vCPU, knows: the guest's clock, and how many slices have ended for the
    /// vCPU.
    pub(crate) fn take_over(&mut self, before: &Published) {
        if (&self.page, self.vcpu) == (&before.page, before.vcpu) {
            self.follow = Follow { distance: self.follow.distance, ..before.follow };
        }
    }

    /// The file with the vCPU's entries, and their offset; None while the page is not to be read, at `now` ns of
    /// CLOCK_MONOTONIC.
    pub(crate) fn place(&self, now: u64) -> Option<(&Arc<File>, u64)> {
        let Inner { file, rests_until, .. } = &*self.page.0;
        let file = file.as_ref().filter(|_| rests_until.load(Ordering::Relaxed) <= now)?;
        Some((file, self.page.place(self.vcpu)))
    }

    /// A read took `excess` ns more than usual. If such times add up, the page is not read for [`REST`], for all vCPUs
    /// of the VM. Of two pacers at once one may go unnoticed.
    pub(crate) fn charge(&self, now: u64, excess: u64) {
        let Inner { rests_until, paid_at, .. } = &*self.page.0;
        if excess > 0 {
            let paid = paid_at.load(Ordering::Relaxed).max(now).saturating_add(excess.saturating_mul(PART));
            paid_at.store(paid, Ordering::Relaxed);
            if paid - now >= EXCESS_MAX * PART {
                rests_until.store(now.saturating_add(REST), Ordering::Relaxed);
            }
        }
    }

    /// The next deadline after `after` in the vCPU's entries. Called by a pacer: no system call, no allocation.
    pub(crate) fn next(&mut self, line: &[u8; LINE], after: u64) -> Option<Next> {
        let ns = |clock| {
            let time = clock_gettime(clock);
            i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
        };
        self.follow.next(line, after, ns(ClockId::Realtime) - ns(ClockId::Monotonic))
    }
}

/// The least time between two ends of slices for a vCPU with this period, in the long run, ns.
fn distance(period: u64) -> u64 {
    (period / CUTS).max(SLICE_MIN.0)
}

/// The pure part of [`Published`].
#[doc(hidden)]
#[derive(Debug, Clone, Copy)]
pub struct Follow {
    /// See [`distance`].
    distance: u64,
    paired: u64,
    /// CLOCK_REALTIME less CLOCK_MONOTONIC, ns, when `paired` changed last.
    ahead: i128,
    /// A token bucket for ends of slices: tokens left, the time up to which it was filled, and the last end.
    left: u64,
    given: u64,
    last: u64,
}

impl Follow {
    /// For a vCPU that was admitted with this period, ns.
    pub fn new(period: u64) -> Self {
        Self { distance: distance(period), paired: 0, ahead: 0, left: BURST, given: 0, last: 0 }
    }

    fn set_period(&mut self, period: u64) {
        self.distance = distance(period);
    }

    /// The next deadline after `after` in these entries; `ahead` is CLOCK_REALTIME less CLOCK_MONOTONIC now, ns.
    pub fn next(&mut self, line: &[u8; LINE], after: u64, ahead: i128) -> Option<Next> {
        let mut words = line.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes));
        let paired = words.next().filter(|paired| *paired != 0)?;
        let _reserved = words.next();
        if paired != self.paired {
            (self.paired, self.ahead) = (paired, ahead);
        }
        let mut found: Option<Next> = None;
        for _ in 0..ENTRIES {
            let (deadline, period) = (words.next()?, words.next()?);
            let Some(next) = following(i128::from(deadline) - self.ahead, period, after, deadline != 0) else {
                continue;
            };
            found = Some(found.map_or(next, |best| Next { at: best.at.min(next.at), live: best.live | next.live }));
        }
        let mut next = found?;
        next.at = self.limit(next.at, after);
        Some(next)
    }

    /// Delays a deadline if the vCPU has ended too many slices.
    fn limit(&mut self, at: u64, after: u64) -> u64 {
        if at == self.last {
            return at;
        }
        let more = after.saturating_sub(self.given) / self.distance;
        if more > 0 {
            self.left = self.left.saturating_add(more).min(BURST);
            self.given = after;
        }
        let soonest = after.saturating_add(self.distance);
        let mut granted = at;
        if self.left == 0 && at < soonest {
            (granted, self.given) = (soonest, soonest);
        }
        self.left = self.left.saturating_sub(1);
        self.last = granted;
        granted
    }
}

/// The first of `deadline`, `deadline + period`, ... after `after`: the earliest next deadline of a task whose deadline
/// has passed. None if no task can have these values.
fn following(deadline: i128, period: u64, after: u64, is: bool) -> Option<Next> {
    if !is || !(SLICE_MIN.0..=PERIOD_MAX).contains(&period) {
        return None;
    }
    let (length, from) = (i128::from(period), i128::from(after));
    if deadline > from {
        // A deadline is at most a period away, plus the error of the guest's clock.
        let at = u64::try_from(deadline).ok().filter(|_| deadline <= from + 2 * length)?;
        return Some(Next { at, live: true });
    }
    let late = from - deadline;
    let at = u64::try_from(deadline + (late / length + 1) * length).ok()?;
    Some(Next { at, live: late < i128::from(LIVE) * length })
}

/// The entries as a guest writes them.
#[cfg(test)]
pub(crate) fn line(paired: u64, entries: &[(u64, u64)]) -> [u8; LINE] {
    let mut line = [0; LINE];
    let words = [paired, 0].into_iter().chain(entries.iter().flat_map(|(deadline, period)| [*deadline, *period]));
    for (place, word) in line.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
    }
    line
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MS: u64 = 1_000_000;
    /// CLOCK_REALTIME less CLOCK_MONOTONIC, ns.
    const AHEAD: i128 = 1_700_000_000_000_000_000;

    fn real(ms: u64) -> u64 {
        u64::try_from(AHEAD).unwrap() + ms * MS
    }

    #[test]
    fn tasks_are_listed_and_impossible_entries_are_left_out() {
        let entries = [
            (real(130), 40 * MS),
            (real(50), 20 * MS),
            (real(130), 0),
            (u64::MAX, 20 * MS),
            (real(10_000), 20 * MS),
            (1, 20 * MS),
            (0, 20 * MS),
        ];
        let found = tasks(&line(1, &entries), i128::from(real(100)));
        let task = |period, deadline_in, live| Task { period: period * MS, deadline_in, live };
        assert_eq!(found.len(), 3, "{found:?}");
        assert_eq!(found.iter().find(|task| task.period == 40 * MS), Some(&task(40, 30 * MS, true)));
        assert!(found.contains(&task(20, 10 * MS, false)), "it sleeps since 50 ms: {found:?}");
        assert!(found.is_sorted_by_key(|task| task.deadline_in));
        assert!(tasks(&line(0, &entries), i128::from(real(100))).is_empty());
        assert!(tasks(&line(1, &entries), -1).is_empty());
    }

    #[test]
    fn a_page_that_cannot_be_read_is_not_one_without_tasks() {
        let memory = tempfile::tempfile().unwrap();
        memory.set_len(u64::from(VCPUS) * LINE as u64).unwrap();
        memory.write_all_at(&line(1, &[(1, 20 * MS)]), 2 * LINE as u64).unwrap();
        let id = id(&rustix::fs::fstat(&memory).unwrap());
        let page = Page::of(memory.try_clone().unwrap(), 0, id);
        let counted = || [2, 3].map(|vcpu| page.tasks(vcpu).map(|tasks| tasks.len()));
        assert_eq!(counted(), [Some(1), Some(0)]);
        // The process that holds the memory truncates it.
        memory.set_len(3 * LINE as u64 + 8).unwrap();
        assert_eq!(counted(), [Some(1), None]);
    }

    #[test]
    fn the_earliest_that_is_to_come_counts_and_sleepers_go_on_by_their_period() {
        let mut follow = Follow::new(20 * MS);
        let both = line(1, &[(real(130), 40 * MS), (real(120), 20 * MS)]);
        assert_eq!(follow.next(&both, 110 * MS, AHEAD), Some(Next { at: 120 * MS, live: true }));
        // No task has run since. The first task's next job has its deadline at 140, the other's deadline is at 130.
        assert_eq!(follow.next(&both, 120 * MS, AHEAD), Some(Next { at: 130 * MS, live: true }));
        assert_eq!(follow.next(&both, 130 * MS, AHEAD), Some(Next { at: 140 * MS, live: true }));
        assert_eq!(follow.next(&both, 1_000 * MS, AHEAD), Some(Next { at: 1_010 * MS, live: false }));
        assert_eq!(follow.next(&line(1, &[]), 110 * MS, AHEAD), None);
        assert_eq!(follow.next(&line(0, &[(real(120), 20 * MS)]), 110 * MS, AHEAD), None, "it never read the clock");
    }

    /// Pacers are replaced whenever a VM comes or goes. A guest gains nothing by that: a step of the clock before it
    /// moves no deadline, and the limit for ends of slices stays.
    #[test]
    fn a_new_reader_keeps_the_clock_and_the_limit_of_the_old_reader() {
        let file = tempfile::tempfile().unwrap();
        let whole = u64::from(VCPUS) * LINE as u64;
        file.set_len(whole).unwrap();
        let id = id(&rustix::fs::fstat(&file).unwrap());
        let page = Page::of(file, 0, id);
        let next = |published: &mut Published, ahead| {
            published.follow.next(&line(1, &[(real(120), 20 * MS)]), 110 * MS, ahead).unwrap().at
        };
        let mut before = Published::new(page.clone(), 0, 20 * MS);
        assert_eq!(next(&mut before, AHEAD), 120 * MS);
        before.follow.left = 3;
        let stepped = AHEAD + i128::from(3_600_007 * MS);
        for (vcpu, known) in [(0, true), (1, false)] {
            let mut after = Published::new(page.clone(), vcpu, 10 * MS);
            after.take_over(&before);
            assert_eq!((after.follow.left == 3, after.follow.distance), (known, distance(10 * MS)));
            assert_eq!(next(&mut after, stepped) == 120 * MS, known);
        }
    }

    #[test]
    fn a_page_that_could_not_be_read_in_time_rests_for_all_vcpus() {
        let file = tempfile::tempfile().unwrap();
        let id = id(&rustix::fs::fstat(&file).unwrap());
        let page = Page::of(file, 4096, id);
        let (one, two) = (Published::new(page.clone(), 0, 20 * MS), Published::new(page, 2, 20 * MS));
        assert_eq!(two.place(5 * MS).map(|(_, offset)| offset), Some(4096 + 2 * LINE as u64));
        one.charge(5 * MS, EXCESS_MAX);
        assert!(two.place(5 * MS + REST - 1).is_none() && one.place(5 * MS).is_none());
        assert!(two.place(5 * MS + REST).is_some());
    }

    /// None of the reads is late, but a pacer that reads at each check would lose a seventh of its CPU.
    #[test]
    fn a_page_that_is_slow_at_each_read_rests() {
        let slow = |every: u64, excess: u64| {
            let file = tempfile::tempfile().unwrap();
            let id = id(&rustix::fs::fstat(&file).unwrap());
            let page = Published::new(Page::of(file, 0, id), 0, 20 * MS);
            let mut lost = 0;
            for now in (1..=1_000).map(|number| number * every) {
                if page.place(now).is_some() {
                    lost += excess;
                    page.charge(now, excess);
                }
            }
            (lost, page.place(1_000 * every).is_none())
        };
        let (lost, rests) = slow(MS, 140_000);
        assert!(rests && lost <= 2 * EXCESS_MAX, "{lost} ns in a second");
        assert_eq!(slow(10 * MS, 140_000), (1_000 * 140_000, false), "now and then is no matter");
    }

    #[test]
    fn a_step_of_the_clock_moves_no_deadline() {
        let mut follow = Follow::new(20 * MS);
        let next = |follow: &mut Follow, paired, ms, ahead| {
            follow.next(&line(paired, &[(real(ms), 20 * MS)]), 110 * MS, ahead)
        };
        assert_eq!(next(&mut follow, 1, 120, AHEAD).unwrap().at, 120 * MS);
        let step = i128::from(3_600_000 * MS);
        assert_eq!(next(&mut follow, 1, 120, AHEAD + step).unwrap().at, 120 * MS);
        assert_eq!(next(&mut follow, 2, 3_600_120, AHEAD + step).unwrap().at, 120 * MS, "read anew");
    }

    #[test]
    fn deadlines_that_no_task_has_count_for_nothing() {
        let mut follow = Follow::new(20 * MS);
        for bad in [
            (u64::MAX, 20 * MS),
            (real(1_000), 20 * MS),
            (real(120), 0),
            (real(120), 1),
            (real(120), u64::MAX),
            (1, u64::MAX),
        ] {
            assert_eq!(follow.next(&line(1, &[bad]), 110 * MS, AHEAD), None, "{bad:?}");
        }
        // A deadline long ago: the next one is where the task's periods would end, and the task is asleep.
        assert!(!follow.next(&line(1, &[(1, 20 * MS)]), 110 * MS, AHEAD).unwrap().live);
    }

    #[test]
    fn a_guest_that_changes_its_deadlines_at_every_read_is_held_to_its_period() {
        let mut follow = Follow::new(20 * MS);
        let (mut now, mut slices) = (1_000 * MS, 0);
        while now < 2_000 * MS {
            let next = follow.next(&line(slices + 1, &[(real(now / MS), MS / 2), (real(0) + now + 1, MS)]), now, AHEAD);
            now = next.unwrap().at.max(now + SLICE_MIN.0);
            slices += 1;
        }
        assert!(slices <= 1_000 / 20 * CUTS + BURST + 1, "{slices} slices in 50 periods");
    }

    #[test]
    fn only_memory_that_stays_resident_is_read() {
        let swaps = std::fs::read_to_string("/proc/swaps").is_ok_and(|swaps| swaps.lines().count() > 1);
        let file = || File::from(rustix::fs::memfd_create("vm", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        let memory = file();
        memory.set_len(16_384).unwrap();
        memory.write_all_at(&line(7, &[]), 4096 + 3 * LINE as u64).unwrap();
        match Page::new(memory.try_clone().unwrap(), 4096) {
            Ok(page) => {
                assert_eq!(page.read(3).unwrap()[0], 7);
                assert_eq!(page, Page::new(memory.try_clone().unwrap(), 4096).unwrap());
                // The process that holds the memory truncates it meanwhile.
                memory.set_len(0).unwrap();
                assert_eq!(page.read(3), None);
            }
            Err(error) => assert!(swaps, "{error}"),
        }
        for (size, offset) in [(0, 0), (8_192, 4_096), (16_384, 8), (16_384, u64::MAX - 4_095)] {
            let memory = file();
            memory.set_len(size).unwrap();
            assert!(Page::new(memory, offset).is_err(), "{size} {offset}");
        }
        for other in ["/dev/null", "/proc/self/stat", "/"] {
            let other = File::open(other).unwrap();
            assert!(!is_memory(&other) && Page::new(other, 0).is_err());
        }
        assert!(is_memory(&memory));
    }

    proptest! {
        /// Whatever bytes are in the page, the next deadline is after `after`.
        #[test]
        fn any_bytes(
            bytes in proptest::array::uniform32(any::<u32>()),
            after in 0..u64::MAX / 2,
            period in any::<u64>(),
            ahead in any::<i64>(),
        ) {
            let mut line = [0; LINE];
            for (place, word) in line.chunks_exact_mut(4).zip(bytes) {
                place.copy_from_slice(&word.to_le_bytes());
            }
            let mut follow = Follow::new(period);
            if let Some(next) = follow.next(&line, after, i128::from(ahead)) {
                prop_assert!(next.at > after);
            }
        }
    }
}
