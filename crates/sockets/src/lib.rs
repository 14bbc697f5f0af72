//! The host side of outsourced sockets: one device process per VM.
//!
//! Input: the guest module's calls, through virtqueues (docs/reference/device.md), and the administrator's policy
//! (docs/design/sockets.md). Output: system calls on host sockets in the VM's network namespace; answers and readiness
//! events in guest memory. The files marked "pure" validate all guest input. Code that runs on a real-time thread does
//! not allocate memory.
//!
//! | file | |
//! |---|---|
//! | `abi`, `name`, `request`, `control`, `options` | pure: ABI, addresses, calls, control messages, socket options |
//! | `policy`, `config` | pure: what a VM may do; its TOML files |
//! | `memory`, `call`, `table` | guest memory as buffers; calls in flight; host socket and owner of each socket id |
//! | `host` | system calls |
//! | `call_queue`, `owned_sockets`, `reports` | what a thread serves: its calls, its sockets, their readiness |
//! | `engine`, `calls`, `data`, `readiness` | a thread with these three: its calls on its sockets |
//! | `notify` | vCPU wake-ups and interrupts |
//! | `guard` | sends lost vCPU wake-ups again |
//! | `closing`, `free` | connections that the guest has closed and that still have data to send |
//! | `held` | protection of the host: static keys that stay on |
//! | `channel`, `channel_calls`, `wait` | a channel's real-time thread; what it does; how it waits for events |
//! | `vring`, `busy_counter` | a queue whose doorbell is not read; whether a thread is processing an event |
//! | `worker`, `control_queue` | calls that may block; calls about the VM |
//! | `mail`, `orders`, `room` | messages between the threads; orders that wait for room in a channel's ring |
//! | `shared` | state that a VM's threads share |
//! | `deadlines` | bandwidth that the guest requests and the daemon admits |
//! | `device`, `process` | the vhost-user devices; the process |
//! | `peer`, `entrance` | which process may connect; no message of another process is read |
//! | `sandbox`, `status` | dropped privileges; status output |
//! | `fuzzing` | private functions for the crate `ontime-fuzz` |

pub mod abi;
mod accepting;
mod atomic;
mod busy_counter;
mod call;
mod call_queue;
mod calls;
mod channel;
mod channel_calls;
mod closing;
pub mod config;
mod control;
mod control_queue;
mod counters;
mod data;
pub mod deadlines;
mod device;
mod engine;
mod entrance;
mod free;
#[doc(hidden)]
pub mod fuzzing;
mod guard;
mod guard_thread;
mod held;
mod host;
mod limits;
#[cfg(test)]
mod log_lines;
mod mail;
mod memory;
pub mod name;
mod notify;
mod options;
mod orders;
mod owned_sockets;
mod peer;
pub mod policy;
pub mod process;
mod readiness;
mod reports;
pub mod request;
mod room;
pub mod sandbox;
mod shared;
pub mod status;
mod table;
mod vring;
mod wait;
mod worker;

pub use process::{Options, Paths, run};
