//! The experiments and their report.
pub mod bulk;
pub mod client;
pub mod clock;
pub mod frame;
pub mod histogram;
pub mod pcap;
pub mod sockperf;
pub mod stats;
pub mod wire;
