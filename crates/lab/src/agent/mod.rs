//! Commands for the emulated host, over a virtio-serial port: JSON, a line a message.
//!
//! ```text
//! lab (outside)                                 agent (inside)
//!    |  <------------- Ready { kernel } -----------  |   once, when user land is up
//!    |  <------------- Beat ----------------------   |   every 2 s of the host's time
//!    |  -- Run { id, argv, environment, ahead } --->  |
//!    |  <-- Output { id, stream, bytes } ----------  |   as it comes
//!    |  <-- Exit { id, status } -------------------  |   status as a shell gives it: 128 + N for signal N
//!    |  -- Kill { id } ---------------------------->  |   SIGKILL to the command's process group
//!    |  -- PowerOff ------------------------------->  |
//! ```

pub mod inside;
pub mod outside;

use serde::{Deserialize, Serialize};

/// The port's name in `/sys/class/virtio-ports/*/name`.
pub const PORT: &str = "ontime.agent";
/// Seconds of the emulated host's time between heartbeats.
pub const BEAT_SECONDS: u64 = 2;

/// To the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// Runs a command in `/lab`, in a process group of its own.
    Run {
        /// Names it in the answers.
        id: u64,
        /// Program and arguments.
        argv: Vec<String>,
        /// Added to the agent's own environment.
        environment: Vec<(String, String)>,
        /// Whether it goes, like the agent itself, before whatever else is at normal priority (nice -20), and what it
        /// starts too; else at nice 0.
        ahead: bool,
    },
    /// Kills a command and what it started.
    Kill {
        /// Which.
        id: u64,
    },
    /// Ends the emulated host.
    PowerOff,
}

/// Which output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// From the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// User land is up.
    Ready {
        /// `uname -rv`.
        kernel: String,
    },
    /// Alive.
    Beat,
    /// Some output of a command.
    Output {
        /// Which command.
        id: u64,
        /// Which output.
        stream: Stream,
        /// The bytes, base64.
        bytes: String,
    },
    /// A command ended.
    Exit {
        /// Which command.
        id: u64,
        /// As a shell gives it; 127 where it could not be started.
        status: i32,
    },
}
