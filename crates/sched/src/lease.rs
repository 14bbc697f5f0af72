//! Reservations that programs requested from the daemon. The daemon keeps the list; [`crate::admit`] admits each beside
//! the reservations of `sched.toml`, and holds its bandwidth whether its tenants run or not.

use ontime_plan::{Bandwidth, Nanos};

/// A reservation that ends unless its owner renews it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lease {
    /// Its name, which [`ontime_tenants::ClassSource::Reservation`] repeats for its tenants.
    pub name: String,
    /// The bandwidth of each vCPU, in millionths of a CPU. A sum of whole millionths is exact, also that of another
    /// program that decides where tenants are placed.
    pub ppm: u64,
    /// The length of the interval in which each vCPU has that bandwidth.
    pub period: Nanos,
    /// How many vCPUs have this bandwidth.
    pub count: u32,
    /// The CPU on which each of them stays; None: they are not pinned.
    pub cpus: Option<Vec<u32>>,
    /// Whether it was admitted before. Then it has precedence over what is new.
    pub admitted: bool,
}

impl Lease {
    /// The bandwidth of each vCPU.
    pub fn bandwidth(&self) -> Bandwidth {
        Bandwidth::ppm(self.ppm)
    }
}
