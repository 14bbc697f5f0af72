//! What the configuration chooses among: the back ends, and the policy of vCPUs without budget.

use serde::Deserialize;

/// The kinds of back ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BackendKind {
    /// By pacers: in the order of deadlines if no vCPU has to migrate, or else by slices.
    #[default]
    Paced,
    /// By pacers, always by DP-WRAP's slices.
    DpWrap,
    /// By pacers, through a `sched_ext` scheduler.
    #[serde(rename = "sched_ext")]
    SchedExt,
    /// By SCHED_DEADLINE.
    Deadline,
}

impl BackendKind {
    /// The name in the configuration file.
    pub fn name(self) -> &'static str {
        match self {
            BackendKind::Paced => "paced",
            BackendKind::DpWrap => "dp-wrap",
            BackendKind::SchedExt => "sched_ext",
            BackendKind::Deadline => "deadline",
        }
    }

    /// How its pacers plan vCPUs.
    pub(crate) fn pacing(self) -> Pacing {
        match self {
            BackendKind::Paced | BackendKind::SchedExt => Pacing::Best,
            BackendKind::DpWrap => Pacing::Slices,
            BackendKind::Deadline => Pacing::None,
        }
    }
}

/// How pacers plan vCPUs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Pacing {
    /// There are no pacers.
    #[default]
    None,
    /// In the order of deadlines where no vCPU migrates, or else by slices.
    Best,
    /// By slices.
    Slices,
}

/// The policy of a vCPU that has used up its share.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Beyond {
    /// SCHED_IDLE: it runs only when no other thread needs the CPU.
    #[default]
    Idle,
    /// SCHED_OTHER: it competes with bulk tenants.
    Other,
}
