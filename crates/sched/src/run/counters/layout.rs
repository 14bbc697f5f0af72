//! A thread's counter: its words, which the programs write, and the states of a thread.

/// The most threads with a counter. Further ones are read in /proc.
pub(super) const COUNTERS: usize = 1024;
/// Bytes of a counter, a power of two, and its words: the time of the last event and the state since then; ns that the
/// thread has run, and has waited for a CPU, up to that event, since its start; the address in its process at which its
/// guest publishes, or 0; whether what is there was copied when it left its CPU; and the copy.
pub(super) const BYTES: usize = 256;
pub(super) const WORDS: usize = BYTES / size_of::<u64>();
pub(super) const WORD: usize = 0;
pub(super) const RAN: usize = 1;
pub(super) const WAITED: usize = 2;
pub(super) const ADDRESS: usize = 3;
pub(super) const COPIED: usize = 4;
pub(super) const LINE_AT: usize = 8;

/// The state's bits in [`WORD`]; the time is above them.
pub(super) const STATE_BITS: i32 = 3;

/// What a thread does since its last event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum State {
    /// There was no event since it has its counter, whose times are those of then.
    Unknown = 0,
    /// Runs on a CPU.
    Running = 1,
    /// Is runnable, and waits for a CPU.
    Waits = 2,
    /// Sleeps, or is stopped.
    Asleep = 3,
    /// Waits for a lock of the kernel, or for a device.
    Blocked = 4,
    /// Has ended.
    Ended = 5,
}

impl State {
    /// The state in a word.
    pub(super) fn of(word: u64) -> Self {
        let all = [Self::Running, Self::Waits, Self::Asleep, Self::Blocked, Self::Ended];
        let state = word & ((1 << STATE_BITS) - 1);
        all.into_iter().find(|one| *one as u64 == state).unwrap_or(Self::Unknown)
    }

    /// The word of this state since a time.
    pub(super) fn since(self, time: u64) -> u64 {
        time << STATE_BITS | self as u64
    }
}
