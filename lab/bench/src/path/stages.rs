//! Assigns the instructions of one request to stages.
//!
//! In: its [`Run`]s. Out: a [`Request`]: its instructions by stage, and by function. A stage is a phase, a CPU, a
//! thread and a level. Phase and thread are found from functions alone:
//!
//! - A CPU's thread changes at `__switch_to_asm`, which counts for the thread that is switched out. The new thread is
//!   identified by the first function that only one kind of thread runs: its main function, to which it returns from a
//!   wait, a guest's function, or a program's.
//! - The server's side is the guest, if one runs within the request, otherwise the last program. Instructions before
//!   its first one are host receive; instructions after its last one are host send.

use std::collections::{BTreeMap, BTreeSet};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::line::Level;
use super::symbols::{Function, Mark, Names, Thread};
use super::window::Run;

/// A part of the way, as in `ontime-lab bench segments`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Phase {
    /// Up to the first instruction of the server's side.
    HostReceive,
    /// Between its first and its last.
    Server,
    /// Behind its last.
    HostSend,
}

impl Phase {
    /// The name in tables.
    pub(crate) fn description(self) -> &'static str {
        match self {
            Phase::HostReceive => "host receive",
            Phase::Server => "server",
            Phase::HostSend => "host send",
        }
    }
}

/// A phase, a CPU, a thread and a level.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Stage {
    /// Part of the way.
    pub phase: Phase,
    /// The CPU's number.
    pub cpu: usize,
    /// Kind of thread.
    pub thread: Thread,
    /// Kernel or program, host or guest.
    pub level: Level,
}

/// A run with its stage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Step {
    pub stage: Stage,
    /// The function's name.
    pub function: String,
    /// Number of instructions.
    pub count: u64,
}

/// The instructions of one request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Request {
    /// Number of all instructions.
    pub instructions: u64,
    /// Instructions by stage, in the order of their first instructions.
    pub stages: Vec<(Stage, u64)>,
    /// Instructions by function.
    pub functions: BTreeMap<(Level, String), u64>,
    /// The runs in order.
    pub steps: Vec<Step>,
}

impl Request {
    /// Builds the request from these runs, with the functions in `names`.
    pub(crate) fn of(runs: &[Run], names: &Names) -> Self {
        let known: Vec<(usize, &Function, u64)> =
            runs.iter().filter_map(|run| Some((run.cpu, names.get(run.function)?, run.count))).collect();
        let (threads, phases) = (threads(&known), phases(&known));
        let mut request = Self::default();
        for ((&(cpu, function, count), thread), phase) in known.iter().zip(threads).zip(phases) {
            request.add(Stage { phase, cpu, thread, level: function.level }, function, count);
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
fn threads(runs: &[(usize, &Function, u64)]) -> Vec<Thread> {
    let mut threads = vec![Thread::Other; runs.len()];
    for cpu in runs.iter().map(|(cpu, ..)| *cpu).collect::<BTreeSet<_>>() {
        let of_cpu: Vec<usize> = (0..runs.len()).filter(|at| runs.get(*at).is_some_and(|run| run.0 == cpu)).collect();
        let mark = |at: &usize| runs.get(*at).map_or(&Mark::None, |(_, function, _)| &function.mark);
        for (number, stretch) in of_cpu.split_inclusive(|at| *mark(at) == Mark::Switch).enumerate() {
            let told = stretch.iter().find_map(|at| match mark(at) {
                Mark::Thread(thread) => Some(thread.clone()),
                _ => None,
            });
            let thread = match told {
                // What interrupts the idle process and wakes a thread.
                None | Some(Thread::Idle) if number == 0 => Thread::Interrupt,
                None => Thread::Other,
                Some(thread) => thread,
            };
            for at in stretch {
                if let Some(place) = threads.get_mut(*at) {
                    place.clone_from(&thread);
                }
            }
        }
    }
    threads
}

/// The phase of every run.
fn phases(runs: &[(usize, &Function, u64)]) -> Vec<Phase> {
    let has_guest = runs.iter().any(|(_, function, _)| function.level.in_guest());
    // A program that runs earlier is not the server; it may be the daemon.
    let of_program = |function: &Function| function.level == Level::HostUser;
    let server = runs.iter().rfind(|(_, function, _)| of_program(function)).map(|(_, function, _)| &function.mark);
    let is_server = |(_, function, _): &(usize, &Function, u64)| match has_guest {
        true => function.level.in_guest(),
        false => of_program(function) && server == Some(&function.mark),
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
