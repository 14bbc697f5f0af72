//! Sets of CPUs, in the kernel's two text formats: the list (`0-3,8`) and the mask (`ff,ffffffff`), and as its system
//! calls take them. Source: `lib/bitmap-str.c` (`bitmap_print_to_pagebuf`, `bitmap_parse`).

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// The highest CPU number of a set: the largest `CONFIG_NR_CPUS` of distribution kernels.
pub const CPU_MAX: u32 = 8191;

/// CPUs by number, 0 to [`CPU_MAX`]; may be empty.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct CpuSet(BTreeSet<u32>);

/// Why a text is not a set of CPUs.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum CpuSetError {
    /// The text is not a list.
    #[error("{0}")]
    List(String),
    /// The text is not a mask.
    #[error("'{text}' is not a mask of CPUs as in ff,ffffffff (CPUs 0 to {max}): {why}", max = CpuSet::MAX)]
    Mask {
        /// The text that was read.
        text: String,
        /// What makes it no mask.
        why: &'static str,
    },
}

impl CpuSet {
    /// The highest valid CPU number.
    pub const MAX: u32 = CPU_MAX;

    /// An empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Parses the kernel's list format, `0-3,8`. An empty text is an empty set.
    ///
    /// # Errors
    /// If the text is not such a list, or names a CPU above [`CpuSet::MAX`].
    pub fn from_list(text: &str) -> Result<Self, CpuSetError> {
        text.parse().map_err(CpuSetError::List)
    }

    /// Parses the kernel's mask format: hexadecimal words of 32 bits, most significant first, separated by commas.
    ///
    /// # Errors
    /// If the text is not such a mask, or names a CPU above [`CpuSet::MAX`].
    pub fn from_mask(text: &str) -> Result<Self, CpuSetError> {
        let bad = |why| CpuSetError::Mask { text: text.to_owned(), why };
        let mut set = Vec::new();
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
                set.push(base + bit);
            }
        }
        Ok(set.into_iter().collect())
    }

    /// The mask format, without leading zero words.
    pub fn to_mask(&self) -> String {
        let highest = self.iter().last().map_or(0, |cpu| cpu / 32);
        (0..=highest)
            .rev()
            .map(|word| {
                let bits = self.iter().filter(|cpu| cpu / 32 == word).fold(0u32, |bits, cpu| bits | 1 << (cpu % 32));
                if word == highest { format!("{bits:x}") } else { format!("{bits:08x}") }
            })
            .collect::<Vec<_>>()
            .join(",")
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Number of CPUs.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether a CPU is in the set.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// Whether every CPU of this set is in the other.
    pub fn is_subset(&self, other: &CpuSet) -> bool {
        self.iter().all(|cpu| other.contains(cpu))
    }

    /// The set without this CPU.
    #[must_use]
    pub fn without(&self, cpu: u32) -> Self {
        self.iter().filter(|other| *other != cpu).collect()
    }

    /// The CPUs that are in both.
    #[must_use]
    pub fn intersection(&self, other: &CpuSet) -> Self {
        self.iter().filter(|cpu| other.contains(*cpu)).collect()
    }

    /// Whether the sets have a common CPU.
    pub fn overlaps(&self, other: &CpuSet) -> bool {
        !self.0.is_disjoint(&other.0)
    }

    /// The CPUs, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// From the bit mask of a system call, lowest CPU in the lowest bit of the first byte.
    pub fn from_bits(mask: &[u8]) -> Self {
        let bits = mask
            .iter()
            .zip(0u32..)
            .flat_map(|(byte, at)| (0..8u32).filter(move |bit| byte & (1u8 << bit) != 0).map(move |bit| at * 8 + bit));
        Self(bits.collect())
    }

    /// As the bit mask of a system call, long enough for [`CPU_MAX`].
    pub fn to_bits(&self) -> Vec<u8> {
        let mut mask = vec![0u8; (CPU_MAX as usize + 1) / 8];
        for cpu in &self.0 {
            if let Some(byte) = mask.get_mut(*cpu as usize / 8) {
                *byte |= 1 << (cpu % 8);
            }
        }
        mask
    }
}

impl FromIterator<u32> for CpuSet {
    /// Numbers above [`CPU_MAX`] are left out.
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        Self(cpus.into_iter().filter(|cpu| *cpu <= CPU_MAX).collect())
    }
}

impl fmt::Display for CpuSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut rest = self.0.iter().copied().peekable();
        let mut first = true;
        while let Some(start) = rest.next() {
            let mut end = start;
            while let Some(next) = rest.next_if(|next| *next == end + 1) {
                end = next;
            }
            if !std::mem::take(&mut first) {
                f.write_str(",")?;
            }
            if start == end { write!(f, "{start}")? } else { write!(f, "{start}-{end}")? }
        }
        Ok(())
    }
}

impl FromStr for CpuSet {
    type Err = String;

    /// Parses `0-3,8`, including libvirt's exclusion `^2`.
    fn from_str(text: &str) -> Result<Self, String> {
        let number = |digits: &str| match digits.trim().parse::<u32>() {
            Ok(cpu) if cpu <= CPU_MAX => Ok(cpu),
            _ => Err(format!("`{digits}` in the CPU list `{text}` is not a CPU number from 0 to {CPU_MAX}")),
        };
        let mut cpus = BTreeSet::new();
        for part in text.trim().split(',').map(str::trim).filter(|part| !part.is_empty()) {
            if let Some(excluded) = part.strip_prefix('^') {
                cpus.remove(&number(excluded)?);
            } else if let Some((low, high)) = part.split_once('-') {
                let (low, high) = (number(low)?, number(high)?);
                if low > high {
                    return Err(format!("`{part}` in the CPU list `{text}` runs backwards; write the lower CPU first"));
                }
                cpus.extend(low..=high);
            } else {
                cpus.insert(number(part)?);
            }
        }
        Ok(Self(cpus))
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
    fn lists_are_read_and_written_in_the_kernels_form() {
        for (input, output) in [
            ("0-3,8", "0-3,8"),
            ("8,0,1,2,3", "0-3,8"),
            ("0-7,^3", "0-2,4-7"),
            ("", ""),
            (" 5 \n", "5"),
            ("0,2,4", "0,2,4"),
        ] {
            assert_eq!(input.parse::<CpuSet>().unwrap().to_string(), output);
        }
    }

    #[test]
    fn bad_lists_are_refused_by_name() {
        for bad in ["a", "3-1", "0-8192", "-1", "1-", "99999999999", "^x"] {
            let error = bad.parse::<CpuSet>().unwrap_err();
            assert!(error.contains("CPU list"), "{bad}: {error}");
        }
    }

    #[test]
    fn bits_go_both_ways() {
        let set: CpuSet = "0,7-9,64,8191".parse().unwrap();
        assert_eq!(CpuSet::from_bits(&set.to_bits()), set);
    }

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
        for text in ["a", "1-", "-1", "3-1", "0-8192", "0-4294967295", "1 2"] {
            assert!(CpuSet::from_list(text).is_err(), "{text} taken as a list");
        }
        for text in ["", "g", "123456789", "1,,2", "-1", "0x1"] {
            assert!(CpuSet::from_mask(text).is_err(), "{text} taken as a mask");
        }
        let beyond = format!("1{}", ",0".repeat(256));
        assert!(CpuSet::from_mask(&beyond).is_err());
    }

    proptest::proptest! {
        #[test]
        fn both_forms_give_back_the_set(cpus in proptest::collection::btree_set(0..=CpuSet::MAX, 0..80)) {
            let set: CpuSet = cpus.iter().copied().collect();
            proptest::prop_assert_eq!(&CpuSet::from_list(&set.to_string()).unwrap(), &set);
            proptest::prop_assert_eq!(&CpuSet::from_mask(&set.to_mask()).unwrap(), &set);
            proptest::prop_assert_eq!(set.iter().collect::<Vec<_>>(), cpus.into_iter().collect::<Vec<_>>());
        }

        #[test]
        fn any_text_is_a_set_or_an_error(text in "[0-9a-f,\\-^ \n]{0,40}|\\PC{0,20}") {
            for set in [CpuSet::from_list(&text), CpuSet::from_mask(&text)].into_iter().flatten() {
                proptest::prop_assert!(set.iter().all(|cpu| cpu <= CpuSet::MAX));
            }
        }
    }
}
