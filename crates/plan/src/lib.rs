//! Will these tenants fit, and who runs when: admission, planning and analysis of CPU time, without any I/O.
//!
//! In: the needs of real-time applications (RTAs), the vCPUs they run on, the host's CPUs. Out: admission or the reason
//! against it, the plan of each slice of time, the bandwidth that other analyses would ask for, and a simulation that
//! runs on the same planner. No decision uses floating point.
//!
//! | module | what it is | source |
//! |---|---|---|
//! | [`units`] | nanoseconds and exact bandwidth | |
//! | [`model`] | RTA, vCPU, tenant | RTVirt, sections 3.1 and 3.3 |
//! | [`edf`] | which vCPU of a guest an RTA goes to | RTVirt, section 3.2 |
//! | [`admission`] | whether vCPUs fit the host, and where pinned ones go | RTVirt, section 3.3 |
//! | [`dpwrap`] (and `wrap`) | the plan of one slice | Levin et al., "DP-FAIR", ECRTS 2010; RTVirt, section 3.3 |
//! | [`compositional`] | what RT-Xen with CARTS would reserve | Shin and Lee 2003; Easwaran et al. 2009; Xu et al. 2013 |
//! | [`simulate`] | the planner at work on a set of tenants | |

pub mod admission;
pub mod compositional;
pub mod dpwrap;
pub mod edf;
pub mod model;
pub mod simulate;
pub mod units;
mod wrap;

pub use admission::{Admission, Admitted, Refusal, Reservation};
pub use dpwrap::{Demand, Planner, Segment, VcpuId};
pub use model::{Arrivals, ModelError, Rta, Tenant, Vcpu};
pub use units::{Bandwidth, Nanos};
