//! Sets of CPUs in the kernel's list form (`0-3,8`), as `/proc`, sysfs and libvirt write them.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

/// The highest CPU number of a set: the largest `CONFIG_NR_CPUS` of distribution kernels.
pub const CPU_MAX: u32 = 8191;

/// A set of CPU numbers, 0 to [`CPU_MAX`].
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CpuList(BTreeSet<u32>);

impl CpuList {
    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a CPU is in the set.
    pub fn contains(&self, cpu: u32) -> bool {
        self.0.contains(&cpu)
    }

    /// Whether the sets have a common CPU.
    pub fn overlaps(&self, other: &CpuList) -> bool {
        !self.0.is_disjoint(&other.0)
    }

    /// The CPUs, ascending.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// From the kernel's bit mask, lowest CPU in the lowest bit of the first byte.
    pub fn from_mask(mask: &[u8]) -> Self {
        let bits = mask
            .iter()
            .zip(0u32..)
            .flat_map(|(byte, at)| (0..8u32).filter(move |bit| byte & (1u8 << bit) != 0).map(move |bit| at * 8 + bit));
        Self(bits.collect())
    }

    /// As the kernel's bit mask, long enough for [`CPU_MAX`].
    pub fn to_mask(&self) -> Vec<u8> {
        let mut mask = vec![0u8; (CPU_MAX as usize + 1) / 8];
        for cpu in &self.0 {
            if let Some(byte) = mask.get_mut(*cpu as usize / 8) {
                *byte |= 1 << (cpu % 8);
            }
        }
        mask
    }
}

impl FromIterator<u32> for CpuList {
    fn from_iter<I: IntoIterator<Item = u32>>(cpus: I) -> Self {
        Self(cpus.into_iter().filter(|cpu| *cpu <= CPU_MAX).collect())
    }
}

impl fmt::Display for CpuList {
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

impl FromStr for CpuList {
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
            assert_eq!(input.parse::<CpuList>().unwrap().to_string(), output);
        }
    }

    #[test]
    fn bad_lists_are_refused_by_name() {
        for bad in ["a", "3-1", "0-8192", "-1", "1-", "99999999999", "^x"] {
            let error = bad.parse::<CpuList>().unwrap_err();
            assert!(error.contains("CPU list"), "{bad}: {error}");
        }
    }

    #[test]
    fn masks_go_both_ways() {
        let list: CpuList = "0,7-9,64,8191".parse().unwrap();
        assert_eq!(CpuList::from_mask(&list.to_mask()), list);
    }
}
