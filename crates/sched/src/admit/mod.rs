//! Admission: which reservations hold on this host, and how much more each guest may claim. Pure.
//!
//! | file | content |
//! |---|---|
//! | `request` | what guests request for their deadline tasks, and what the host must supply for that |
//! | `offer` | what a guest may claim without asking the daemon |
//! | `reservations` | the result of an admission |
//! | `candidate` | a vCPU that may get a reservation, and on which CPUs |
//! | `pacing` | the pacers' own time |
//! | `fit` | the admission test of `ontime_plan`, with the reserve of each CPU |
//! | `distribution` | how free CPU time is divided among offers |
//! | `lease` | what the tenants of a lease get of it, and what is kept |
//! | `admission` | the admission of the running VMs and of leases |

mod admission;
mod candidate;
mod distribution;
mod fit;
mod lease;
mod offer;
pub(crate) mod pacing;
mod request;
mod reservations;

pub use admission::admit;
pub use fit::{Capacity, fit_beside};
pub use offer::Offer;
pub use pacing::pacers_of_declared;
pub use request::{Ask, Asks, GuestNeed, Taking, needs};
pub use reservations::{Held, LeaseState, Refused, Reservations, Reserved};
