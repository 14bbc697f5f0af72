//! What every crate of the product stands on. It knows nothing of tenants, NICs or reservations.
//!
//! | file | |
//! |---|---|
//! | `clock` | the kernel's clocks, and the CPU time of a process |
//! | `config` | strict TOML files, and errors that name place and remedy |
//! | `cpus` | sets of CPUs, in the kernel's formats |
//! | `remedy` | remedies for errors of the operating system |
//! | `repeats`, `text` | log lines that repeat; helpers for the text of messages |

pub mod clock;
pub mod config;
pub mod cpus;
pub mod remedy;
pub mod repeats;
pub mod text;

pub use clock::ProcessClock;
pub use config::ConfigError;
pub use cpus::CpuSet;
pub use remedy::remedy;
pub use repeats::Repeats;
