//! Machine-wide delays that no probe shows: steal time and system management interrupts.
//!
//! Input: `/proc/stat`, `/dev/cpu/N/msr`. Output: the changes since the last read.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;

use ontime_tenants::remedy;
use ontime_tenants::text::counted;
use rustix::io::Errno;
use serde::Serialize;

/// MSR_SMI_COUNT: system management interrupts since boot (Intel SDM, volume 4).
const SMI_COUNT: u64 = 0x34;

/// The changes in an interval.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Hints {
    /// CPU time that a hypervisor below this host took from it, s, sum of all CPUs.
    pub stolen_s: f64,
    /// System management interrupts, sum of all watched CPUs. None if they cannot be counted.
    pub smis: Option<u64>,
    /// Why they cannot be counted, with the remedy.
    pub smis_unknown: Option<String>,
}

/// Reads the counters.
#[derive(Debug)]
pub struct Counters {
    msrs: Vec<File>,
    why: Option<String>,
    stolen: u64,
    smis: u64,
}

impl Counters {
    /// Counts on these CPUs from now on.
    pub fn new(cpus: &[u32]) -> Self {
        let mut why = None;
        let mut msrs = Vec::new();
        for cpu in cpus {
            let path = format!("/dev/cpu/{cpu}/msr");
            match File::open(&path).and_then(|file| read(&file).map(|_| file)) {
                Ok(file) => msrs.push(file),
                Err(error) => {
                    why = Some(uncounted(&path, &error));
                    msrs.clear();
                    break;
                }
            }
        }
        let mut counters = Self { msrs, why, stolen: 0, smis: 0 };
        counters.look();
        counters
    }

    /// The changes since the last call.
    pub fn look(&mut self) -> Hints {
        let stolen = fs::read_to_string("/proc/stat").ok().and_then(|text| stolen_ticks(&text)).unwrap_or(self.stolen);
        let smis: u64 = self.msrs.iter().filter_map(|file| read(file).ok()).sum();
        let hints = Hints {
            // USER_HZ is 100 on all supported architectures.
            stolen_s: stolen.saturating_sub(self.stolen) as f64 / 100.0,
            smis: self.why.is_none().then(|| smis.saturating_sub(self.smis)),
            smis_unknown: self.why.clone(),
        };
        (self.stolen, self.smis) = (stolen, smis);
        hints
    }
}

impl Hints {
    /// Adds a later interval.
    pub fn add(&mut self, later: Hints) {
        self.stolen_s += later.stolen_s;
        self.smis = later.smis.map(|smis| smis + self.smis.unwrap_or(0));
        self.smis_unknown = later.smis_unknown;
    }

    /// What may have delayed requests of this interval of a tenth of a second, with the remedy.
    pub fn words(&self) -> Option<String> {
        let mut words = Vec::new();
        if let Some(smis) = self.smis.filter(|smis| *smis > 0) {
            words.push(format!("{} within 0.1 s{BY_FIRMWARE}", counted(smis, "system management interrupt")));
        }
        if self.stolen_s > 0.0 {
            let stolen_ms = self.stolen_s * 1e3;
            words.push(format!("a hypervisor below this host took {stolen_ms:.0} ms of its CPUs within 0.1 s{BELOW}"));
        }
        (!words.is_empty()).then(|| words.join(". "))
    }

    /// What the whole trace had of such delays, a line each, with the remedy.
    pub fn lines(&self) -> impl Iterator<Item = String> {
        let stolen = (self.stolen_s > 0.0)
            .then(|| format!("a hypervisor below this host took {:.2} s of its CPUs{BELOW}", self.stolen_s));
        let smis = self.smis.filter(|smis| *smis > 0);
        let smis = smis.map(|smis| format!("{}{BY_FIRMWARE}", counted(smis, "system management interrupt")));
        stolen.into_iter().chain(smis)
    }
}

/// Cause and remedy of system management interrupts.
const BY_FIRMWARE: &str = ", in which the firmware stops every CPU; turn off legacy USB and power capping in the \
    firmware's set-up, and look for more with rtla hwnoise";
/// Remedy for stolen time.
const BELOW: &str = "; pin this host's vCPUs there, or run RT tenants on a host that is no guest";

fn uncounted(path: &str, error: &io::Error) -> String {
    let advice = match Errno::from_io_error(error) {
        Some(Errno::NOENT | Errno::NXIO | Errno::NODEV) => "load the driver: modprobe msr",
        Some(Errno::IO) => {
            "this processor has no such counter, which only Intel's have: `ontime doctor` counts AMD's by perf, and \
             rtla hwnoise finds gaps on any"
        }
        _ => remedy(error),
    };
    format!("{path}: {error}; {advice}")
}

fn read(file: &File) -> io::Result<u64> {
    let mut bytes = [0; 8];
    file.read_exact_at(&mut bytes, SMI_COUNT)?;
    // The upper half is reserved. The register is never written.
    Ok(u64::from_le_bytes(bytes) & 0xffff_ffff)
}

/// The eighth value of the first line: stolen ticks, all CPUs.
fn stolen_ticks(stat: &str) -> Option<u64> {
    stat.lines().next()?.split_whitespace().nth(8)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stolen_time_is_the_eighth_figure() {
        assert_eq!(stolen_ticks("cpu  1 2 3 4 5 6 7 88 9 10\ncpu0 1"), Some(88));
        assert_eq!(stolen_ticks("cpu  1 2"), None);
        assert_eq!(stolen_ticks(""), None);
    }

    #[test]
    fn looks_add_up_and_only_say_what_was() {
        let mut sum = Hints { smis: Some(0), ..Hints::default() };
        assert_eq!(sum.words(), None);
        sum.add(Hints { stolen_s: 0.02, smis: Some(2), smis_unknown: None });
        let said = sum.words().unwrap();
        assert!(said.contains("2 system management interrupts within 0.1 s") && said.contains("took 20 ms"), "{said}");
    }

    #[test]
    fn each_hint_has_a_cause_and_a_remedy() {
        let hints = |smis, stolen_s| Hints { smis: Some(smis), stolen_s, smis_unknown: None };
        for (hints, wanted) in [(hints(1, 0.0), "firmware's set-up"), (hints(0, 0.3), "pin this host's vCPUs")] {
            let lines: Vec<String> = hints.lines().chain(hints.words()).collect();
            assert_eq!(lines.len(), 2);
            for said in lines {
                assert!(said.split_once("; ").is_some_and(|(_, remedy)| remedy.contains(wanted)), "{said}");
            }
        }
        assert!(hints(1, 0.0).lines().all(|line| line.starts_with("1 system management interrupt,")));
        for (number, wanted) in [
            (Errno::NOENT, "modprobe msr"),
            (Errno::NXIO, "modprobe msr"),
            (Errno::ACCESS, "root"),
            (Errno::IO, "`ontime doctor`"),
            (Errno::MFILE, "LimitNOFILE="),
        ] {
            let said = uncounted("/dev/cpu/3/msr", &number.into());
            assert!(said.starts_with("/dev/cpu/3/msr: "), "{said}");
            assert!(said.split_once("; ").is_some_and(|(_, remedy)| remedy.contains(wanted)), "{said}");
        }
    }
}
