//! Parses a page of the kernel's trace ring.
//!
//! Input: the result of a read of `per_cpu/cpuN/trace_pipe_raw`. Output: records with their times, and the number of
//! lost records. Source: `kernel/trace/ring_buffer.c`, `include/linux/ring_buffer.h`; `events/header_page`,
//! `events/header_event`. The page's layout has been the same since 2.6.30 on 64-bit little-endian machines.

/// Bytes before the data: time (8) and commit (8).
const HEADER: usize = 16;
/// Flag in commit: events were overwritten before this page.
const MISSED: u64 = 1 << 31;
/// Flag in commit: the number of lost events follows the data.
const MISSED_STORED: u64 = 1 << 30;
/// Length in commit.
const LENGTH: u64 = (1 << 20) - 1;
/// Bits of a time stamp in a record; the upper bits come from the page.
const STAMP: u64 = (1 << 59) - 1;

/// The records of a page.
#[derive(Debug, Clone)]
pub struct Page<'a> {
    data: &'a [u8],
    time: u64,
    lost: u64,
}

impl<'a> Page<'a> {
    /// Parses a page. `None` if it is shorter than its header says.
    pub fn new(bytes: &'a [u8]) -> Option<Self> {
        let time = word(bytes, 0)?;
        let commit = word(bytes, 8)?;
        let end = HEADER + (commit & LENGTH) as usize;
        let lost = match (commit & MISSED != 0, commit & MISSED_STORED != 0) {
            (false, _) => 0,
            (true, true) => word(bytes, end).unwrap_or(1).max(1),
            (true, false) => 1,
        };
        Some(Self { data: bytes.get(HEADER..end)?, time, lost })
    }

    /// Lower bound of the records lost before this page.
    pub fn lost(&self) -> u64 {
        self.lost
    }
}

impl<'a> Iterator for Page<'a> {
    /// Time (ns of the ring's clock) and the record.
    type Item = (u64, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        loop {
            let head = half(self.data, 0)?;
            let (kind, delta) = (head & 31, u64::from(head >> 5));
            let array = half(self.data, 4);
            let (start, end) = match kind {
                // End of the page, or a discarded record.
                29 if delta == 0 => return None,
                29 => (4, 4 + array? as usize),
                30 => {
                    self.time = self.time.wrapping_add((u64::from(array?) << 27) + delta);
                    self.data = self.data.get(8..)?;
                    continue;
                }
                31 => {
                    self.time = ((u64::from(array?) << 27) + delta) & STAMP | self.time & !STAMP;
                    self.data = self.data.get(8..)?;
                    continue;
                }
                0 => (8, 4 + array? as usize),
                words => (4, 4 + 4 * words as usize),
            };
            self.time = self.time.wrapping_add(delta);
            let record = self.data.get(start..end);
            self.data = self.data.get(end..).unwrap_or_default();
            if kind == 29 {
                continue;
            }
            return Some((self.time, record?));
        }
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

fn half(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn page(time: u64, commit: u64, data: &[u32]) -> Vec<u8> {
        let mut bytes = [time.to_ne_bytes(), commit.to_ne_bytes()].concat();
        bytes.extend(data.iter().flat_map(|word| word.to_ne_bytes()));
        bytes
    }

    #[test]
    fn every_kind_of_entry_is_taken() {
        let data = [
            1 | 10 << 5,
            0xaaaa, // one word, 10 ns later
            30 | 5 << 5,
            2, // 2 << 27 + 5 ns more
            29 | 7 << 5,
            4, // discarded, 7 ns later
            8 << 5,
            8,
            0xbbbb, // long form: eight bytes that count themselves
            31 | 3 << 5,
            1, // absolute
            2,
            0xcccc,
            0xdddd,
            29,
            99, // end of the page
            1 | 1 << 5,
            0xffff,
        ];
        let bytes = page(1_000, data.len() as u64 * 4, &data);
        let page = Page::new(&bytes).unwrap();
        assert_eq!(page.lost(), 0);
        let found: Vec<(u64, usize)> = page.map(|(time, record)| (time, record.len())).collect();
        let later = 1_010 + (2 << 27) + 5 + 7 + 8;
        assert_eq!(found.len(), 3);
        assert_eq!(found[0], (1_010, 4));
        assert_eq!(found[1], (later - 8 + 8, 4));
        assert_eq!(found[2], ((1 << 27) + 3, 8));
    }

    #[test]
    fn losses_are_counted() {
        let stored = page(0, 8 | MISSED | MISSED_STORED, &[1, 0, 17, 0]);
        assert_eq!(Page::new(&stored).unwrap().lost(), 17);
        let unknown = page(0, 8 | MISSED, &[1, 0]);
        assert_eq!(Page::new(&unknown).unwrap().lost(), 1);
        assert!(Page::new(&page(0, 64, &[1, 0])).is_none());
    }

    proptest! {
        #[test]
        fn any_bytes_end(bytes in prop::collection::vec(any::<u8>(), 0..256), length in 0_u64..256) {
            let mut bytes = bytes;
            if bytes.len() >= 16 {
                bytes[8..16].copy_from_slice(&length.to_ne_bytes());
            }
            if let Some(page) = Page::new(&bytes) {
                let total: usize = page.map(|(_, record)| record.len()).sum();
                prop_assert!(total <= bytes.len());
            }
        }
    }
}
