//! The conditions of a measurement: the clock, and the traffic of the bulk tenants.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a clock's seconds are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Clock {
    /// Emulated host, time is instructions executed, 1 ns each (4 ns in reports up to version 5). Shows queueing and
    /// path length, not caches.
    Virtual,
    /// Emulated host, or a real one that is joined to its client without hardware; time is the machine's; noisy.
    Real,
    /// A real host and a real NIC.
    Hardware,
}

impl Clock {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Clock::Virtual => "virtual",
            Clock::Real => "real",
            Clock::Hardware => "hardware",
        }
    }

    /// An explanation of figures on this clock.
    pub fn meaning(self) -> &'static str {
        match self {
            Clock::Virtual => {
                "The host is emulated and its clock counts the instructions it executed, 1 ns each. Figures show \
                 queueing, priorities and path length, and repeat well. Caches, memory, interrupts' hardware cost and \
                 speculation are not in them: a microsecond here is an instruction count, not a promise for a machine."
            }
            Clock::Real => {
                "The host is emulated, or joined to its client without hardware (the report's notes say so), and its \
                 clock is the machine's. Figures carry the emulator's and the machine's noise: read them as an \
                 indication, and compare only methods of one run."
            }
            Clock::Hardware => "A real host and a real NIC: figures are this machine's.",
        }
    }
}

/// What the bulk tenants do while requests are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Load {
    /// Nothing.
    None,
    /// TCP at full speed, as in the papers: it slows down where the host does not keep up.
    Tcp,
    /// Small UDP packets as fast as they can be sent: nothing slows them down but the host's own drops.
    SmallPackets,
    /// The same with packets of the size of the MTU.
    LargePackets,
}

impl Load {
    /// All of them.
    pub const ALL: [Load; 4] = [Load::None, Load::Tcp, Load::SmallPackets, Load::LargePackets];

    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Load::None => "none",
            Load::Tcp => "tcp",
            Load::SmallPackets => "small-packets",
            Load::LargePackets => "large-packets",
        }
    }

    /// A description for tables.
    pub fn description(self) -> &'static str {
        match self {
            Load::None => "no flood",
            Load::Tcp => "TCP flood",
            Load::SmallPackets => "small-packet flood",
            Load::LargePackets => "large-packet flood",
        }
    }

    /// Whether this is a load at all.
    pub fn floods(self) -> bool {
        self != Load::None
    }
}

impl std::str::FromStr for Load {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        Load::ALL
            .into_iter()
            .find(|load| load.name() == text)
            .ok_or_else(|| format!("load '{text}' is not one of none, tcp, small-packets, large-packets"))
    }
}

/// `7.2` of `7.2.12-rt-amd64`; the whole text if it does not begin with such a version.
pub fn kernel_series(release: &str) -> &str {
    let number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    let Some((major, rest)) = release.split_once('.') else { return release };
    let minor = rest.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default();
    if number(major) && number(minor) {
        release.get(..major.len() + 1 + minor.len()).unwrap_or(release)
    } else {
        release
    }
}
