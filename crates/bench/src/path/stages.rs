//! Where the instructions of one request went.
//!
//! In: its [`Run`]s. Out: a [`Request`]: its instructions by stage, and by function. A stage is a phase, a thread and a
//! level. All three are told from functions alone:
//!
//! - The thread changes at `__switch_to_asm`, which counts for the one that goes. Who came is told by the first
//!   function that only one kind of thread has: its main function, to which it comes back from where it waited, a
//!   guest, or a program.
//! - The server's side is the guest, where there is one in the request, else the last program. What is before its first
//!   instruction is host receive, what is behind its last is host send.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::line::Level;
use super::symbols::{Function, Mark, Names, Thread};
use super::window::Run;

/// A part of the way, as in `ontime-lab bench segments`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Phase {
    /// Up to the first instruction of the server's side.
    HostReceive,
    /// Between its first and its last.
    Server,
    /// Behind its last.
    HostSend,
}

impl Phase {
    /// As it stands in tables.
    pub fn words(self) -> &'static str {
        match self {
            Phase::HostReceive => "host receive",
            Phase::Server => "server",
            Phase::HostSend => "host send",
        }
    }
}

/// What belongs together.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Stage {
    /// Part of the way.
    pub phase: Phase,
    /// Whose thread.
    pub thread: Thread,
    /// Kernel or program, host or guest.
    pub level: Level,
}

/// A run with its place.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Step {
    /// Where it belongs.
    pub stage: Stage,
    /// The function.
    pub function: String,
    /// Instructions.
    pub count: u64,
}

/// One request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Request {
    /// Its instructions in all.
    pub instructions: u64,
    /// By stage, in the order of their first instructions.
    pub stages: Vec<(Stage, u64)>,
    /// By function.
    pub functions: BTreeMap<(Level, String), u64>,
    /// In order.
    pub steps: Vec<Step>,
}

impl Request {
    /// Of these runs, whose functions `names` knows.
    pub fn of(runs: &[Run], names: &Names) -> Self {
        let known: Vec<(&Function, u64)> =
            runs.iter().filter_map(|run| Some((names.get(run.function)?, run.count))).collect();
        let (threads, phases) = (threads(&known), phases(&known));
        let mut request = Self::default();
        for ((&(function, count), thread), phase) in known.iter().zip(threads).zip(phases) {
            request.add(Stage { phase, thread, level: function.level }, function, count);
        }
        request
    }

    fn add(&mut self, stage: Stage, function: &Function, count: u64) {
        self.instructions += count;
        match self.stages.iter_mut().find(|(known, _)| *known == stage) {
            Some((_, sum)) => *sum += count,
            None => self.stages.push((stage.clone(), count)),
        }
        *self.functions.entry((function.level, function.name.clone())).or_default() += count;
        self.steps.push(Step { stage, function: function.name.clone(), count });
    }
}

/// The thread of every run.
fn threads(runs: &[(&Function, u64)]) -> Vec<Thread> {
    let mut threads = Vec::with_capacity(runs.len());
    for turn in runs.split_inclusive(|(function, _)| function.mark == Mark::Switch) {
        // The first one interrupts idleness, and shows nothing of itself.
        let unknown = if threads.is_empty() { Thread::Interrupt } else { Thread::Other };
        let told = turn.iter().find_map(|(function, _)| match &function.mark {
            Mark::Thread(thread) => Some(thread.clone()),
            Mark::Idle => Some(Thread::Idle),
            _ => None,
        });
        let thread = told.unwrap_or(unknown);
        threads.extend(std::iter::repeat_n(thread, turn.len()));
    }
    threads
}

/// The phase of every run.
fn phases(runs: &[(&Function, u64)]) -> Vec<Phase> {
    let has_guest = runs.iter().any(|(function, _)| function.level.in_guest());
    // What runs before is another's: the daemon's, say.
    let of_program =
        |(function, _): &&(&Function, u64)| function.level == Level::HostUser && function.mark != Mark::Idle;
    let server = runs.iter().rfind(of_program).map(|(function, _)| &function.mark);
    let is_server = |run: &(&Function, u64)| match has_guest {
        true => run.0.level.in_guest(),
        false => of_program(&run) && server == Some(&run.0.mark),
    };
    let first = runs.iter().position(is_server).unwrap_or(runs.len());
    let last = runs.iter().rposition(is_server).unwrap_or(runs.len());
    let phase = |at: usize| match at {
        _ if at < first => Phase::HostReceive,
        _ if at <= last => Phase::Server,
        _ => Phase::HostSend,
    };
    (0..runs.len()).map(phase).collect()
}
