//! An emulated host, for machines without usable KVM and for CI.
//!
//! QEMU's software emulation runs Debian 13 with a stock kernel as the *host*, which has an RT NIC and a bulk NIC. In
//! it, real VMs run on real KVM (emulated SVM). In: a [`Machine`] and commands. Out: the commands' exit status and
//! output, the files that they leave in `/lab`, a capture of each NIC made outside the emulated host (the papers'
//! hardware monitor), and a console log.
//!
//! - [`images`] builds the disks and kernels once, from Debian's packages; `emulator` builds the emulator
//!   from Debian's source; [`cache`] stores both by content.
//! - [`module`] builds the kernel modules for the lab, once for each state of their sources.
//! - [`isolate`] puts the whole lab into separate namespaces, so that nothing stays behind.
//! - [`network`] makes the taps and addresses of clients outside; [`Link`] is the link to clients inside; [`qemu`]
//!   builds the emulator's command line.
//! - [`agent`] runs commands inside; [`Lab`] starts, watches and ends the emulated host.
//! - [`clients`] tells what else ran on the clients' CPU.
//! - [`Lab::log_instructions`] makes the emulator log every instruction; [`events`] finds where two runs part.
//!
//! Clocks: [`Clock::Virtual`] counts instructions (4 ns each by default) and gives the same results on any machine; its
//! CPUs take turns. [`Clock::Real`] is this machine's time, with several CPUs in parallel and noise.

pub mod agent;
pub mod cache;
pub mod clients;
mod emulator;
mod error;
pub mod events;
pub mod images;
pub mod isolate;
mod kernel;
mod lab;
mod link;
pub mod module;
mod monitor;
pub mod network;
pub mod qemu;
pub mod role;

pub use error::LabError;
pub use kernel::Kernel;
pub use lab::{Lab, Outcome, Programs};
pub use link::{Link, Way};
pub use qemu::{Clients, Clock, Console, Machine};
