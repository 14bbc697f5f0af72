//! Cuts a request out of the instructions of the whole host.
//!
//! In: the log's bytes of one stretch, in which one request arrived and was answered. Out: its [`Run`]s: functions in
//! order, each with the number of its instructions before another function's.
//!
//! A request begins after the last idle instruction before the NIC's driver handles the arrival. It includes the
//! interrupt's work for it, and the work that kept the CPU busy then. It ends with the last instruction with which the
//! NIC's driver sends the reply, where an interrupt (of the NIC that has sent) or the driver's caller continues. Only
//! runs are kept, and at most [`LONGEST`] of them.

use super::line::{self, Line};
use super::symbols::{Function, Mark, Names};

/// Limit of a request's runs: some hundred times the usual number.
pub(crate) const LONGEST: usize = 1 << 20;
/// Limit of a line, bytes. A longer line is ignored.
const LINE: usize = 512;

/// A function with the number of instructions that it executed in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// Number of the function ([`Names`]).
    pub function: u32,
    /// Number of instructions.
    pub count: u64,
}

/// Why a stretch contains no complete request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub(crate) enum Incomplete {
    /// The log started while the host was busy.
    #[error("the host was not idle when the trace began")]
    Busy,
    /// The beginning is missing.
    #[error("the NIC's driver was not told of an arrival by an interrupt of its own")]
    NoBegin,
    /// The end is missing.
    #[error("the NIC's driver sent no reply")]
    NoEnd,
    /// The client gave the request up.
    #[error("it was not answered in time")]
    Unanswered,
    /// The request has too many runs.
    #[error("it has more than {LONGEST} runs of functions")]
    TooLong,
}

/// Progress within a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// Before the first idle instruction.
    Unknown,
    /// After an idle instruction.
    Before,
    /// The driver has handled an arrival.
    Inside,
    /// The driver is sending; the function that called it.
    Sending(u32),
    /// The request has been sent.
    Done,
    /// More runs than are kept.
    TooLong,
}

/// Cuts the request out of a stretch while its lines arrive.
#[derive(Debug)]
pub(crate) struct Cutter {
    at: At,
    runs: Vec<Run>,
    /// Index of the first run after idle instructions within a request.
    after_idle: Option<usize>,
    /// The last instruction. The next line shows whether it was executed.
    pending: Option<u32>,
    /// The beginning of a line whose end has not arrived.
    partial: Vec<u8>,
}

impl Default for Cutter {
    fn default() -> Self {
        Self { at: At::Unknown, runs: Vec::new(), after_idle: None, pending: None, partial: Vec::new() }
    }
}

impl Cutter {
    /// Takes the log's next bytes.
    pub(crate) fn read(&mut self, bytes: &[u8], names: &mut Names) {
        let mut rest = bytes;
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            let (line, behind) = rest.split_at(end);
            rest = behind.get(1..).unwrap_or_default();
            if self.partial.is_empty() {
                self.line(line, names);
            } else {
                let mut whole = std::mem::take(&mut self.partial);
                whole.extend_from_slice(line);
                self.line(&whole, names);
            }
        }
        if self.partial.len() + rest.len() <= LINE {
            self.partial.extend_from_slice(rest);
        }
    }

    /// Whether an idle instruction has been seen, so that the beginning of a following request is known.
    pub(crate) fn saw_idle(&self) -> bool {
        self.at != At::Unknown
    }

    /// The request, after it was answered and the stretch has ended.
    pub(crate) fn finish(mut self, names: &Names) -> Result<Vec<Run>, Incomplete> {
        self.settle(names);
        let ends_in_driver = || {
            let last = self.runs.last().and_then(|run| names.get(run.function));
            last.is_some_and(|function| function.mark == Mark::Transmit)
        };
        match self.at {
            At::Unknown => Err(Incomplete::Busy),
            At::Before => Err(Incomplete::NoBegin),
            // The reply has been sent, and the log was off before the next instruction.
            At::Sending(_) if ends_in_driver() => Ok(self.runs),
            At::Inside | At::Sending(_) => Err(Incomplete::NoEnd),
            At::TooLong => Err(Incomplete::TooLong),
            At::Done => Ok(self.runs),
        }
    }

    fn line(&mut self, line: &[u8], names: &mut Names) {
        match line::parse(line) {
            Some(Line::Instruction(address, level)) => {
                self.settle(names);
                self.pending = Some(names.of(address, level));
            }
            Some(Line::Stopped) => self.pending = None,
            None => {}
        }
    }

    /// Counts the last instruction as executed.
    fn settle(&mut self, names: &Names) {
        if let Some(number) = self.pending.take() {
            if let Some(function) = names.get(number) {
                self.push(number, function);
            }
        }
    }

    fn push(&mut self, number: u32, function: &Function) {
        match (self.at, &function.mark) {
            (At::Done | At::TooLong, _) => return,
            (At::Unknown | At::Before, Mark::Idle) => {
                self.runs.clear();
                self.at = At::Before;
                return;
            }
            (At::Unknown, _) => return,
            (At::Before, Mark::Receive) => self.at = At::Inside,
            // The earlier arrival was not the request: it had no result.
            (At::Inside, Mark::Receive) => {
                if let Some(from) = self.after_idle.take() {
                    self.runs.drain(..from.min(self.runs.len()));
                }
            }
            (At::Inside, Mark::Transmit) => self.at = At::Sending(self.runs.last().map_or(number, |run| run.function)),
            (At::Sending(caller), mark) if number == caller || *mark == Mark::Interrupt => {
                self.at = At::Done;
                return;
            }
            _ => {}
        }
        let kept = self.runs.len();
        match self.runs.last_mut() {
            Some(last) if last.function == number => last.count += 1,
            _ if kept >= LONGEST => {
                self.at = At::TooLong;
                self.runs = Vec::new();
            }
            _ => self.runs.push(Run { function: number, count: 1 }),
        }
        if self.at == At::Inside && function.mark == Mark::Idle {
            self.after_idle = Some(self.runs.len());
        }
    }
}
