//! A set of CPUs, in the two forms the kernel writes: the list (`0-3,8`) and the mask (`ff,ffffffff`).
//!
//! Source: `lib/bitmap-str.c` (`bitmap_print_to_pagebuf`, `bitmap_parse`, `bitmap_parselist`).

use std::collections::BTreeSet;
use std::fmt;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// CPUs by number, 0 to [`CpuSet::MAX`]; may be empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CpuSet(BTreeSet<u32>);

/// Why a text is no set of CPUs.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("'{text}' is not a set of CPUs ({form}, CPUs 0 to {max}): {why}", max = CpuSet::MAX)]
pub struct CpuSetError {
    text: String,
    form: &'static str,
    why: &'static str,
}

impl CpuSet {
    /// The highest CPU number taken: the kernel's own limit (`NR_CPUS` with `CONFIG_MAXSMP`) is 8192 CPUs.
    pub const MAX: u32 = 8191;

    /// No CPU.
    pub fn new() -> Self {
        Self::default()
    }

    /// Reads the kernel's list form, `0-3,8`; an empty text is an empty set.
    ///
    /// # Errors
    /// Where the text is not such a list, or names a CPU above [`CpuSet::MAX`].
    pub fn from_list(text: &str) -> Result<Self, CpuSetError> {
        let bad = |why| CpuSetError { text: text.to_owned(), form: "a list as in 0-3,8", why };
        let trimmed = text.trim();
        let mut set = BTreeSet::new();
        if trimmed.is_empty() {
            return Ok(Self(set));
        }
        for part in trimmed.split(',') {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let first = parse_cpu(first).ok_or_else(|| bad("a part is not a CPU number"))?;
            let last = parse_cpu(last).ok_or_else(|| bad("a part is not a CPU number"))?;
            if first > last {
                return Err(bad("a range runs backwards"));
            }
            set.extend(first..=last);
        }
        Ok(Self(set))
    }

    /// Reads the kernel's mask form: hexadecimal words of 32 bits, most significant first, joined by commas.
    ///
    /// # Errors
    /// Where the text is not such a mask, or names a CPU above [`CpuSet::MAX`].
    pub fn from_mask(text: &str) -> Result<Self, CpuSetError> {
        let bad = |why| CpuSetError { text: text.to_owned(), form: "a mask as in ff,ffffffff", why };
        let mut set = BTreeSet::new();
        for (index, word) in text.trim().rsplit(',').enumerate() {
            if word.is_empty() || word.len() > 8 || !word.bytes().all(|b| b.is_ascii_hexdigit()) {
                return Err(bad("a word is not 1 to 8 hexadecimal digits"));
            }
            let bits = u32::from_str_radix(word, 16).map_err(|_| bad("a word is not hexadecimal"))?;
            let base = u32::try_from(index).ok().and_then(|i| i.checked_mul(32)).ok_or_else(|| bad("too long"))?;
            for bit in (0..32).filter(|bit| bits & (1 << bit) != 0) {
                if base + bit > Self::MAX {
                    return Err(bad("a CPU number is too high"));
                }
                set.insert(base + bit);
            }
        }
        Ok(Self(set))
    }

    /// The mask form, without leading zero words.
    pub fn to_mask(&self) -> String {
        let highest = self.0.last().map_or(0, |cpu| cpu / 32);
        (0..=highest)
            .rev()
            .map(|word| {
                let bits = self.0.range(word * 32..(word + 1) * 32).fold(0u32, |bits, cpu| bits | 1 << (cpu % 32));
                if word == highest { format!("{bits:x}") } else { format!("{bits:08x}") }
            })
            .collect::<Vec<_>>()
            .join(",")
    }

    /// Whether this CPU is in the set.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// Whether every CPU of this set is in the other.
    pub fn is_subset(&self, other: &CpuSet) -> bool {
        self.0.is_subset(&other.0)
    }

    /// Whether the set has no CPU.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many CPUs it has.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// The CPUs, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// The set without this CPU.
    #[must_use]
    pub fn without(&self, cpu: u32) -> Self {
        Self(self.0.iter().copied().filter(|other| *other != cpu).collect())
    }

    /// The CPUs that are in both.
    #[must_use]
    pub fn intersection(&self, other: &CpuSet) -> Self {
        Self(self.0.intersection(&other.0).copied().collect())
    }
}

fn parse_cpu(text: &str) -> Option<u32> {
    // `str::parse` would take "+3", the kernel does not.
    if text.is_empty() || !text.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    text.parse().ok().filter(|cpu| *cpu <= CpuSet::MAX)
}

impl FromIterator<u32> for CpuSet {
    /// Numbers above [`CpuSet::MAX`] are left out.
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        Self(cpus.into_iter().filter(|cpu| *cpu <= CpuSet::MAX).collect())
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for cpu in self.iter() {
            match ranges.last_mut() {
                Some((_, last)) if *last + 1 == cpu => *last = cpu,
                _ => ranges.push((cpu, cpu)),
            }
        }
        for (index, (first, last)) in ranges.iter().enumerate() {
            let comma = if index == 0 { "" } else { "," };
            if first == last { write!(f, "{comma}{first}")? } else { write!(f, "{comma}{first}-{last}")? }
        }
        Ok(())
    }
}

impl TryFrom<String> for CpuSet {
    type Error = CpuSetError;
    fn try_from(text: String) -> Result<Self, CpuSetError> {
        Self::from_list(&text)
    }
}

impl From<CpuSet> for String {
    fn from(set: CpuSet) -> String {
        set.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_forms_are_read_and_written() {
        let set = CpuSet::from_list("0-3,8,64\n").unwrap();
        assert_eq!(set.len(), 6);
        assert_eq!(set.to_string(), "0-3,8,64");
        assert_eq!(set.to_mask(), "1,00000000,0000010f");
        assert_eq!(CpuSet::from_mask("00000001,00000000,0000010f\n").unwrap(), set);
        assert_eq!(CpuSet::from_list("\n").unwrap(), CpuSet::new());
        assert_eq!(CpuSet::new().to_mask(), "0");
        assert_eq!(CpuSet::from_mask("0").unwrap(), CpuSet::new());
    }

    #[test]
    fn what_is_no_set_is_refused() {
        for text in ["a", "1-", "-1", "3-1", "1,,2", "+1", "0-8192", "0-4294967295", "1 2"] {
            assert!(CpuSet::from_list(text).is_err(), "{text} taken as a list");
        }
        for text in ["", "g", "123456789", "1,,2", "-1", "0x1"] {
            assert!(CpuSet::from_mask(text).is_err(), "{text} taken as a mask");
        }
        let beyond = format!("1{}", ",0".repeat(256));
        assert!(CpuSet::from_mask(&beyond).is_err());
    }
}
