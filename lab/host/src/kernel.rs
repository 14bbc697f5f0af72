//! The kernels of an emulated host.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The emulated host's kernel. All kernels are Debian's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kernel {
    /// 7.2 with PREEMPT_RT (trixie-backports).
    #[serde(rename = "7.2-rt")]
    Rt72,
    /// 7.2 without PREEMPT_RT (trixie-backports).
    #[serde(rename = "7.2")]
    Plain72,
    /// 6.12 with PREEMPT_RT (trixie).
    #[serde(rename = "6.12-rt")]
    Rt612,
}

impl Kernel {
    /// All of them.
    pub const ALL: [Kernel; 3] = [Kernel::Rt72, Kernel::Plain72, Kernel::Rt612];

    /// Whether this kernel's softirqs share a lock on each CPU, so that the host module shortens an RT packet's wait.
    pub fn takes_host_module(self) -> bool {
        self == Kernel::Rt612
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kernel::Rt72 => "7.2-rt",
            Kernel::Plain72 => "7.2",
            Kernel::Rt612 => "6.12-rt",
        })
    }
}

impl FromStr for Kernel {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Kernel::ALL
            .into_iter()
            .find(|kernel| kernel.to_string() == text)
            .ok_or_else(|| format!("kernel '{text}' is not one of 7.2-rt, 7.2, 6.12-rt"))
    }
}
