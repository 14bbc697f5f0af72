//! What every crate of the product stands on. It knows nothing of tenants, NICs or reservations.
//!
//! | file | |
//! |---|---|
//! | `bucket` | limits on the rate of requests |
//! | `clock` | the kernel's clocks, and the CPU time of a process |
//! | `config` | strict TOML files, and errors that name place and remedy |
//! | `cpus` | sets of CPUs, in the kernel's formats |
//! | `policy`, `thread`, `sched` | a thread's identity; its policy and affinity, read and set |
//! | `proc`, `files` | the formats of `/proc`; reading many of its small files |
//! | `lock_file` | lock files that no other user can hold |
//! | `wait_limit` | a limit on waiting for sockets of a process whose files are read |
//! | `remedy` | remedies for errors of the operating system |
//! | `repeats`, `text` | log lines that repeat; helpers for the text of messages |

pub mod bucket;
pub mod clock;
pub mod config;
pub mod cpus;
pub mod files;
pub mod lock_file;
pub mod policy;
pub mod proc;
pub mod remedy;
pub mod repeats;
pub mod sched;
pub mod text;
pub mod thread;
pub mod wait_limit;

pub use bucket::Bucket;
pub use clock::ProcessClock;
pub use config::ConfigError;
pub use cpus::CpuSet;
pub use policy::Policy;
pub use remedy::remedy;
pub use repeats::Repeats;
pub use thread::{ThreadError, ThreadId};
pub use wait_limit::{limit_waits, refuse_descriptors};
