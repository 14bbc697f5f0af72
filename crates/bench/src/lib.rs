//! The experiments and their report: what an experiment needs besides the host it measures.
//!
//! In: captures of the RT NIC and the bulk NIC (from the lab's monitors or a real host's), the papers' figures.
//! Out: a [`schema::Report`], as JSON, CSV, a terminal table, an HTML page, rtla's and HDR's histograms.
//!
//! ```text
//! client  --requests-->  host under test  <--bulk--        (client, clock, sockperf)
//!                 |              |
//!              rt.pcap       bulk.pcap                      (pcap, frame)
//!                 |              |
//!           wire::analyse   bulk::analyse
//!                 \              /
//!            MethodResult::new(&Run { .. })                 (ontime_figures, histogram, schema)
//!                        |
//!      Report { results, paper: Experiment::paper, goals: goals::evaluate }
//!                        |
//!      Report::to_json, report::{terminal, csv, html, rtla, hgrm, goals}
//! ```
//!
//! - [`client::run`] sends the paper's load from outside the host. [`clock::VirtualClock`] follows an emulated host's
//!   clock in its captures.
//! - [`wire::analyse`] gives the response times and books every request; [`bulk::analyse`] gives goodput.
//! - [`schema::MethodResult::new`] summarises a run; [`schema::Report`] is the one schema of every experiment.
//! - [`goals::evaluate`] judges, [`paper::Figures`] compares, [`report`] shows.
//!
//! [`experiments`] has a file for each experiment: each starts an emulated host ([`host`], [`ontime_lab`]) and runs its
//! load ([`trial`], [`flood`], [`client`], [`paced`], [`hours`]) against it; [`segments`] traces it meanwhile.
//! [`server`] is where the RT server runs: in a VM, in one with outsourced sockets, in a container, on the host;
//! [`workload`] what it is and who asks it: sockperf, memcached ([`memcached`]), Kamailio between two SIPp ([`voip`]),
//! a subscriber of raw frames ([`sampled`]). `experiments::rta` has no wire: real-time applications in guests say
//! themselves how they met their deadlines.
//!
//! [`path`] has no times: it counts the instructions of requests, function by function.
//!
//! [`hardware`] is what stands for the emulated host where `--hardware` names a real one: the same experiments, its
//! owner's VMs.
//!
//! Definitions are in `docs/bench.md`. Nothing but the experiments, the client and the two file readers does I/O.

pub mod bulk;
pub mod client;
mod client_side;
pub mod clock;
mod command;
pub mod experiments;
mod flood;
mod frame;
pub mod goals;
mod hardware;
mod histogram;
mod host;
mod hours;
pub mod memcached;
mod paced;
pub mod paper;
mod path;
pub mod pcap;
pub mod report;
mod sampled;
pub mod schema;
mod segments;
mod server;
pub mod sockperf;
mod tcp;
mod trial;
pub mod voip;
pub mod wire;
mod workload;

pub use command::main;
