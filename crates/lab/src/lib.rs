//! An emulated host in a box: for machines without usable KVM, and for CI.
//!
//! QEMU's software emulation runs Debian 13 with a stock kernel as the *host*, with an RT NIC and a bulk NIC; in it run
//! real VMs on real KVM (emulated SVM). In: a [`Machine`] and commands. Out: their exit status and output, the files
//! they leave in `/lab`, a capture of each NIC made outside the emulated host (the papers' hardware monitor), a console
//! log.
//!
//! - [`images`] builds the disks and kernels once, from Debian's packages, `emulator` the emulator of several CPUs from
//!   Debian's source; [`cache`] keeps them by content.
//! - [`module`] builds the guest's kernel module for the lab's guests, once for each state of its sources.
//! - [`isolate`] puts the whole lab into namespaces of its own, so that nothing can stay behind.
//! - [`network`] makes the taps and addresses of the clients' side; [`qemu`] (pure) writes the emulator's command line.
//! - [`agent`] runs commands inside; [`Lab`] starts, watches and ends the emulated host.
//! - [`InstructionLog`] has the emulator tell every instruction.
//!
//! Clocks: [`Clock::Virtual`] counts instructions (4 ns each where nothing else is said) and repeats on any machine;
//! its CPUs take turns. [`Clock::Real`] is this machine's time, with several CPUs in parallel and its noise.

pub mod agent;
pub mod cache;
mod emulator;
mod error;
pub mod images;
pub mod isolate;
mod lab;
pub mod module;
mod monitor;
pub mod network;
pub mod qemu;
pub mod role;

pub use error::LabError;
pub use lab::{Lab, Outcome, Programs};
pub use monitor::InstructionLog;
pub use qemu::{Clock, Console, Kernel, Machine};
