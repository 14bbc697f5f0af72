//! The experiments and their reports: everything that an experiment needs besides the host under test.
//!
//! In: captures of the RT NIC and the bulk NIC (from the lab's monitors or a real host's), and the papers' figures.
//! Out: a [`schema::Report`], as JSON, CSV, terminal table, HTML page, and histograms of rtla and HDR.
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
//! - [`client::run`] sends the paper's load from the clients' side.
//! - [`wire::analyse`] computes the response times and counts every request; [`bulk::analyse`] computes the goodput.
//! - [`schema::MethodResult::new`] summarises a run; [`schema::Report`] is the common schema of all experiments.
//! - [`goals::evaluate`] evaluates the goals, [`paper::Figures`] has the papers' figures, [`report`] formats reports.
//!
//! [`experiments`] has a file for each experiment. An experiment starts an emulated host ([`host`], [`ontime_lab`]) and
//! runs its load ([`trial`], [`several`], [`flood`], [`client`], [`paced`], [`hours`]) against it; [`segments`] traces
//! the host meanwhile. [`server`] runs the RT server: in a VM, in a VM with outsourced sockets, in a container, or on
//! the host.
//! [`workload`] has the servers and their clients: sockperf, memcached ([`memcached`]), Kamailio between two SIPp
//! ([`voip`]), a subscriber of raw frames ([`sampled`]). `experiments::rta` needs no network: real-time applications in
//! guests log how they met their deadlines.
//!
//! [`path`] has no times: it counts the instructions of requests per function. [`baseline`] compares results with those
//! of an earlier run.
//!
//! [`scenario`] reads the description of a host, its tenants and their load from a file.
//!
//! [`hardware`] replaces the emulated host if `--hardware` names a real one: the same experiments run with VMs of its
//! owner.
//!
//! Definitions are in `docs/results/bench.md`. Only the experiments, the client and the two file readers do I/O.

mod baseline;
pub mod bulk;
pub mod client;
mod client_side;
mod command;
mod connections;
mod cpu_load;
mod datagrams;
mod error;
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
mod progress;
pub mod report;
mod sampled;
mod scenario;
pub mod schema;
mod segments;
mod server;
mod several;
pub mod sockperf;
mod tcp;
mod trial;
mod twin;
pub mod voip;
pub mod wire;
mod workload;

pub use command::main;
