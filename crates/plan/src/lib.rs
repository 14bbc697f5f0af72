//! Admission, planning and analysis of CPU time, without any I/O.
//!
//! Input: the needs of real-time applications (RTAs), the vCPUs that run them, the host's CPUs. Output: admission or
//! the reason for a refusal, the plan of each time slice, the bandwidth that other analyses would reserve, and a
//! simulation with the same planner. No decision uses floating point.
//!
//! | module | purpose | source |
//! |---|---|---|
//! | [`units`] | nanoseconds and exact bandwidth | |
//! | [`model`] | RTA, vCPU, tenant | RTVirt, sections 3.1 and 3.3 |
//! | [`edf`] | assignment of RTAs to a guest's vCPUs | RTVirt, section 3.2 |
//! | [`admission`] | whether vCPUs fit the host, and the CPUs of pinned ones | RTVirt, section 3.3 |
//! | [`dpwrap`] (and `wrap`) | the plan of one slice | Levin et al., "DP-FAIR", ECRTS 2010; RTVirt, section 3.3 |
//! | [`compositional`] | reservations of RT-Xen with CARTS | Shin and Lee 2003; Easwaran et al. 2009; Xu et al. 2013 |
//! | [`simulate`] | simulation of a set of tenants with this planner | |

pub mod admission;
pub mod compositional;
pub mod dpwrap;
pub mod edf;
pub mod model;
mod segment;
pub mod simulate;
pub mod units;
mod wrap;

pub use admission::{Admission, Admitted, Filling, Refusal, Reservation};
pub use dpwrap::{Demand, Planner};
pub use model::{Arrivals, ModelError, Rta, Tenant, Vcpu};
pub use segment::{Segment, VcpuId};
pub use units::{Bandwidth, Nanos};
