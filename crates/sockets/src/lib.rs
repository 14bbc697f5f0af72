//! The host side of outsourced sockets: one device process for one VM.
//!
//! In: calls of the guest's module through virtqueues (docs/device.md), the administrator's policy (docs/sockets.md).
//! Out: system calls on host sockets in the VM's network namespace; answers and readiness into guest memory.
//! Everything from the guest is checked in the pure files; what runs on a real-time thread allocates nothing.
//!
//! | file | |
//! |---|---|
//! | `abi`, `name`, `request`, `control`, `options` | pure: the contract, addresses, calls, control messages, socket options |
//! | `policy`, `config` | pure: what a VM may do; its TOML |
//! | `memory`, `call`, `table` | guest memory as buffers; calls in flight; which id is which host socket |
//! | `host` | system calls |
//! | `engine`, `calls`, `data`, `readiness`, `notify` | a thread that owns sockets; its queue; its calls on sockets; their readiness; waking and interrupting the vCPU |
//! | `guard` | has wake-ups without effect sent again |
//! | `closing`, `free`, `held`, `bucket` | what bounds a guest's effect on the host: connections that are closed and not gone; kernel switches that stay on; how often |
//! | `channel`, `wait` | a channel's real-time thread; what it waits by |
//! | `vring`, `turns` | a queue whose doorbell is not read; whether a thread is at work |
//! | `worker`, `orders`, `room`, `control_queue` | calls that may block; what channels are told of that; calls about the VM |
//! | `deadlines` | bandwidth that the guest asks for, and the daemon that admits it |
//! | `fuzzing` | private parts as the crate `ontime-fuzz` needs them |
//! | `device`, `process`, `peer`, `sandbox`, `status` | vhost-user; the process; who may connect to it; what it gives up; what it tells |

pub mod abi;
mod atomic;
mod bucket;
mod call;
mod calls;
mod channel;
mod closing;
pub mod config;
mod control;
mod control_queue;
mod data;
pub mod deadlines;
mod device;
mod engine;
mod free;
#[doc(hidden)]
pub mod fuzzing;
mod guard;
mod held;
mod host;
mod mail;
mod memory;
pub mod name;
mod notify;
mod options;
mod orders;
mod peer;
pub mod policy;
pub mod process;
mod readiness;
pub mod request;
mod room;
pub mod sandbox;
mod shared;
pub mod status;
mod table;
mod turns;
mod vring;
mod wait;
mod worker;

pub use process::{Options, Paths, run};
