//! Commands for the emulated host, over a virtio-serial port: JSON, a line a message.
//!
//! ```text
//! lab (outside)                                 agent (inside)
//!    |  <-- Ready { kernel, idle } ----------------  |   once, when user land is up
//!    |  <------------- Beat ----------------------   |   every 2 s of the host's time
//!    |  -- Run { id, argv, environment, ahead } --->  |
//!    |  <-- Output { id, stream, bytes } ----------  |   as it comes
//!    |  <-- Exit { id, status, idle } -------------  |   status as a shell gives it: 128 + N for signal N
//!    |  -- Kill { id } ---------------------------->  |   SIGKILL to the command's process group
//!    |  -- PowerOff ------------------------------->  |
//! ```
//!
//! `idle`: no command runs. With the clients inside, the emulator looks for `"idle":true}}` at a message's end, and the
//! machine's time then stands still until the next request (`emulator/patches/0008-serial-port-stops.patch`). So a
//! command begins at the same instruction in every run, however long the lab takes. `idle` is the last field.

pub mod inside;
pub mod outside;

use serde::{Deserialize, Serialize};

/// The port's name in `/sys/class/virtio-ports/*/name`.
pub const PORT: &str = "ontime.agent";
/// Seconds of the emulated host's time between heartbeats.
pub(crate) const BEAT_SECONDS: u64 = 2;

/// A message to the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Request {
    /// Runs a command in `/lab`, in its own process group.
    Run {
        /// Identifies the command in the answers.
        id: u64,
        /// Program and arguments.
        argv: Vec<String>,
        /// Variables added to the agent's environment.
        environment: Vec<(String, String)>,
        /// Whether the command and its children run at nice -20 like the agent, before all threads of normal priority.
        /// Otherwise they run at nice 0.
        ahead: bool,
    },
    /// Kills a command and its children.
    Kill {
        /// The command.
        id: u64,
    },
    /// Ends the emulated host.
    PowerOff,
}

/// An output of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Stream {
    /// Standard output.
    Out,
    /// Standard error.
    Err,
}

/// A message from the agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reply {
    /// User land is up.
    Ready {
        /// `uname -rv`.
        kernel: String,
        /// Always true.
        idle: bool,
    },
    /// A sign of life.
    Beat,
    /// Some output of a command.
    Output {
        /// The command.
        id: u64,
        /// The output.
        stream: Stream,
        /// The bytes, base64.
        bytes: String,
    },
    /// A command ended.
    Exit {
        /// The command.
        id: u64,
        /// Exit status as in a shell; 127 if the command could not be started.
        status: i32,
        /// Whether no other command runs.
        idle: bool,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The emulator's patch has the same text.
    #[test]
    fn the_end_of_an_idle_message_is_the_one_that_stops_the_machine() {
        let patch = include_str!("../emulator/patches/0008-serial-port-stops.patch");
        let end = r#"\"idle\":true}}\n"#;
        assert!(patch.contains(&format!("+static const char idle[] = \"{end}\";")));
        let end = end.replace("\\\"", "\"").replace("\\n", "");
        for idle in [true, false] {
            for reply in [Reply::Ready { kernel: "k".into(), idle }, Reply::Exit { id: 7, status: -1, idle }] {
                let text = serde_json::to_string(&reply).unwrap();
                assert_eq!(text.ends_with(&end), idle, "{text}");
            }
        }
        let output = Reply::Output { id: 1, stream: Stream::Out, bytes: String::new() };
        assert!(!serde_json::to_string(&output).unwrap().ends_with(&end));
    }
}
