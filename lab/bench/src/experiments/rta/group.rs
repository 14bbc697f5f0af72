//! The groups of RTVirt's Tables 1 and 5 and the video applications of its Table 3, scaled to one CPU. Does no I/O.

use crate::paper::{Figures, Video};

/// The groups' names, in the table's order.
pub(crate) const NAMES: [&str; 6] = ["h-equiv", "h-dec", "h-inc", "nh-equiv", "nh-dec", "nh-inc"];

/// Divisor of the paper's slices: the groups need about two CPUs, and the virtual clock has one.
pub(crate) const SCALE: u64 = 4;

/// A real-time application: `slice` of CPU time within each `period`, us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rta {
    /// Requested CPU time, us.
    pub slice_us: u64,
    /// Period, us.
    pub period_us: u64,
}

impl Rta {
    /// The bandwidth, CPUs.
    pub(crate) fn bandwidth(self) -> f64 {
        self.slice_us as f64 / self.period_us as f64
    }
}

/// An application of a table in ms, with its slice divided by `scale`.
fn divided(&[slice, period]: &[u64; 2], scale: u64) -> Rta {
    Rta { slice_us: slice * 1_000 / scale.max(1), period_us: period * 1_000 }
}

/// The applications of a group, one per VM; `None` if there is no such group.
pub(crate) fn scaled(figures: &Figures, name: &str) -> Option<Vec<Rta>> {
    figures.rtvirt.table1_ms.group(name).map(|group| group.iter().map(|rta| divided(rta, SCALE)).collect())
}

/// The video applications of Table 3, by frame rate, with their slices divided by `scale`.
pub(crate) fn video(figures: &Figures, scale: u64) -> Vec<Rta> {
    let rta = |video: &Video| Rta { slice_us: video.slice * 1_000 / scale.max(1), period_us: video.period * 1_000 };
    figures.rtvirt.table3_video.rates().iter().map(rta).collect()
}

/// The applications of Table 5, one per group, with their slices divided by `scale`.
pub(crate) fn table5(figures: &Figures, scale: u64) -> Vec<Rta> {
    figures.rtvirt.table5_ms.groups.iter().map(|rta| divided(rta, scale)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_group_fits_one_cpu_and_leaves_some() {
        let figures = Figures::load().unwrap();
        for name in NAMES {
            let needed: f64 = scaled(&figures, name).unwrap().into_iter().map(Rta::bandwidth).sum();
            assert!((0.45..0.55).contains(&needed), "{name} needs {needed}");
        }
        // Table 1, NH-Dec: (23, 30).
        assert_eq!(scaled(&figures, "nh-dec").unwrap()[0], Rta { slice_us: 5_750, period_us: 30_000 });
        assert_eq!(scaled(&figures, "h-none"), None);
    }
}
