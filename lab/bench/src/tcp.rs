//! TCP's counters in captures: 32 bits that wrap.
//!
//! In: sequence numbers in the order of capture. Out: 64-bit positions in a byte stream.

/// A 32-bit TCP counter unwrapped to 64 bits, with its range.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Counter {
    /// The lowest value.
    pub first: u64,
    /// The highest value.
    pub last: u64,
}

impl Counter {
    /// A counter at `start`.
    pub(crate) fn at(start: u64) -> Self {
        Self { first: start, last: start }
    }

    /// A counter that begins at a 32-bit value. Its 64-bit value is far from 0, so that a value from before the start
    /// (reordering) does not become negative.
    pub(crate) fn begin(value: u32) -> Self {
        Self::at((1 << 32) + u64::from(value))
    }

    /// The 64-bit value nearest to the highest one so far. Steps of 2 GiB or more look like steps back; TCP's window is
    /// at most 1 GiB (RFC 7323).
    pub(crate) fn unwrap(self, value: u32) -> u64 {
        let step = value.wrapping_sub(self.last as u32) as i32;
        self.last.saturating_add_signed(i64::from(step))
    }

    /// The distance from the lowest to the highest value.
    pub(crate) fn advance(self) -> u64 {
        self.last - self.first
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_wraps_forward_and_steps_back() {
        let counter = Counter::begin(u32::MAX - 1);
        assert_eq!(counter.unwrap(3) - counter.last, 5);
        assert_eq!(counter.last - counter.unwrap(u32::MAX - 11), 10);
        let counter = Counter { last: counter.unwrap(3), ..counter };
        assert_eq!(counter.advance(), 5);
    }
}
