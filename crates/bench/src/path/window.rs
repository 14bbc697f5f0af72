//! A request cut out of the instructions of the whole host.
//!
//! In: the log's bytes of one stretch in which one request came and was answered. Out: its [`Run`]s: functions in
//! order, each with how many instructions it executed before another one did.
//!
//! A request begins behind the last instruction of idleness before the NIC's driver hears of it: what an interrupt does
//! for it, and what kept the CPU then. It ends with the last instruction with which the NIC's driver sends the reply:
//! where an interrupt (that of the NIC that has sent) or the driver's caller goes on. Only runs are kept, and no more
//! than [`LONGEST`] of them.

use super::line::{self, Line};
use super::symbols::{Function, Mark, Names};

/// Runs of a request, at most: some hundred times as long as one is.
pub const LONGEST: usize = 1 << 20;
/// Bytes of a line, at most; a longer one is none.
const LINE: usize = 512;

/// A function that executed so many instructions in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// Its number ([`Names`]).
    pub function: u32,
    /// Instructions.
    pub count: u64,
}

/// Why a stretch has no request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub enum Incomplete {
    /// The log went on in the middle of something.
    #[error("the host was not idle when the trace began")]
    Busy,
    /// Its begin is not there.
    #[error("the NIC's driver was not told of an arrival by an interrupt of its own")]
    NoBegin,
    /// Its end is not there.
    #[error("the NIC's driver sent no reply")]
    NoEnd,
    /// It was given up.
    #[error("it was not answered in time")]
    Unanswered,
    /// Too long.
    #[error("it has more than {LONGEST} runs of functions")]
    TooLong,
}

/// How far a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// Nothing is known of what runs.
    Unknown,
    /// Something runs since the CPU was idle last.
    Before,
    /// The driver has been told.
    Inside,
    /// The driver sends; this function called it.
    Sending(u32),
    /// It is sent.
    Done,
    /// There were more runs than are kept.
    TooLong,
}

/// Cuts the request out of a stretch, while its lines come.
#[derive(Debug)]
pub struct Cutter {
    at: At,
    runs: Vec<Run>,
    /// Where the runs begin that follow idleness inside of a request.
    after_idle: Option<usize>,
    /// The last instruction: whether it was executed, the next line tells.
    pending: Option<u32>,
    /// The begin of a line whose end has not come.
    partial: Vec<u8>,
}

impl Default for Cutter {
    fn default() -> Self {
        Self { at: At::Unknown, runs: Vec::new(), after_idle: None, pending: None, partial: Vec::new() }
    }
}

impl Cutter {
    /// The log's next bytes.
    pub fn read(&mut self, bytes: &[u8], names: &mut Names) {
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

    /// Whether the CPU was seen to be idle, so that whatever comes from now on has a begin.
    pub fn saw_idle(&self) -> bool {
        self.at != At::Unknown
    }

    /// The request, once it is answered and the stretch is over.
    pub fn finish(mut self, names: &Names) -> Result<Vec<Run>, Incomplete> {
        self.settle(names);
        let ends_in_driver = || {
            let last = self.runs.last().and_then(|run| names.get(run.function));
            last.is_some_and(|function| function.mark == Mark::Transmit)
        };
        match self.at {
            At::Unknown => Err(Incomplete::Busy),
            At::Before => Err(Incomplete::NoBegin),
            // The reply is out, and the log was off before the next instruction.
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

    /// The last instruction was executed.
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
            // What the driver was told of before was no request: it led to nothing.
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
