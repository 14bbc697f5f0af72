//! Cuts requests out of the instructions of the whole host.
//!
//! In: the log's bytes, in which requests arrived and were answered one after the other. Out: each request's [`Run`]s:
//! functions in order, each with its CPU and the number of its instructions before another function's on that CPU.
//!
//! A request begins with the interrupt in which the NIC's driver handles the arrival, or which wakes the thread that
//! does (PREEMPT_RT); what that interrupts is no part of it. On the host's other CPUs it includes all instructions from
//! the driver's first on. It ends with the last instruction with which the NIC's driver sends the reply, where an
//! interrupt (of the NIC that has sent) or the driver's caller continues. Only runs are kept, and at most [`LONGEST`]
//! of them.

use super::line::{self, Line};
use super::symbols::{Mark, Names, Thread};

/// Limit of a request's runs: some hundred times the usual number.
pub(crate) const LONGEST: usize = 1 << 20;
/// Limit of a line, bytes. A longer line is ignored.
const LINE: usize = 512;

/// A function with the number of instructions that a CPU executed of it in a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// The CPU's number.
    pub cpu: usize,
    /// Number of the function ([`Names`]).
    pub function: u32,
    /// Number of instructions.
    pub count: u64,
}

/// Why a request is not whole.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
pub(crate) enum Incomplete {
    /// The beginning is missing.
    #[error("the trace began within its interrupt")]
    NoBegin,
    /// The end is missing.
    #[error("the NIC's driver sent no reply")]
    NoEnd,
    /// The request has too many runs.
    #[error("it has more than {LONGEST} runs of functions")]
    TooLong,
}

/// The thread of an interrupt's handler.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum HandlerThread {
    /// None is waited for.
    #[default]
    None,
    /// An interrupt has woken it, and it has not run yet.
    Woken,
    /// It runs.
    Running,
}

/// A CPU of the host.
#[derive(Debug, Clone, Default)]
struct Cpu {
    /// Its last instruction was one with which an interrupt begins.
    at_interrupt: bool,
    /// The thread that an interrupt since the beginning below has woken.
    handler: HandlerThread,
    /// Outside of a request: what it has executed since that interrupt. None before the first.
    since_interrupt: Option<Vec<Run>>,
    /// Within a request: number of the request's first run since then.
    from: usize,
    /// It has halted since the driver handled the arrival.
    has_halted: bool,
}

/// Progress within a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// No arrival has been handled since the last request ended.
    Outside,
    /// The driver has handled an arrival.
    Inside,
    /// The driver is sending on a CPU.
    Sending {
        cpu: usize,
        /// The function that called the driver.
        caller: u32,
    },
}

/// Cuts requests out of the log while its lines arrive.
#[derive(Debug)]
pub(crate) struct Cutter {
    at: At,
    cpus: Vec<Cpu>,
    /// Of the request that has begun.
    runs: Vec<Run>,
    /// The last instruction, and its CPU. The next line shows whether it was executed.
    pending: Option<(usize, u32)>,
    /// The beginning of a line whose end has not arrived.
    partial: Vec<u8>,
    requests: Vec<Result<Vec<Run>, Incomplete>>,
}

impl Cutter {
    /// For a host with this number of CPUs. Instructions of CPUs beyond them, which are the clients', do not count.
    pub(crate) fn new(cpus: usize) -> Self {
        Self {
            at: At::Outside,
            cpus: vec![Cpu::default(); cpus],
            runs: Vec::new(),
            pending: None,
            partial: Vec::new(),
            requests: Vec::new(),
        }
    }

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

    /// The requests in the order of their arrivals, after the log has ended.
    pub(crate) fn finish(mut self, names: &Names) -> Vec<Result<Vec<Run>, Incomplete>> {
        self.settle(names);
        if self.at != At::Outside {
            self.requests.push(Err(Incomplete::NoEnd));
        }
        self.requests
    }

    fn line(&mut self, line: &[u8], names: &mut Names) {
        match line::parse(line) {
            Some(Line::Instruction { cpu, address, level }) => {
                self.settle(names);
                self.pending = (cpu < self.cpus.len()).then(|| (cpu, names.of(address, level)));
            }
            Some(Line::Stopped) => self.pending = None,
            None => {}
        }
    }

    /// Counts the last instruction as executed.
    fn settle(&mut self, names: &Names) {
        if let Some((cpu, number)) = self.pending.take() {
            if let Some(function) = names.get(number) {
                self.push(cpu, number, &function.mark);
            }
        }
    }

    fn push(&mut self, cpu: usize, number: u32, mark: &Mark) {
        let Some(of) = self.cpus.get_mut(cpu) else { return };
        match mark {
            Mark::Halt => (of.has_halted, of.handler) = (true, HandlerThread::None),
            Mark::WakesHandler => of.handler = HandlerThread::Woken,
            Mark::Thread(Thread::Irq) if of.handler == HandlerThread::Woken => of.handler = HandlerThread::Running,
            // It was another NIC's thread, or another device's: the next interrupt may be the request's.
            Mark::Switch if of.handler == HandlerThread::Running => of.handler = HandlerThread::None,
            // Until the handler's thread has run, another interrupt belongs to the same request.
            Mark::Interrupt if !of.at_interrupt && of.handler == HandlerThread::None => {
                of.since_interrupt = Some(Vec::new());
                of.from = self.runs.len();
            }
            _ => {}
        }
        of.at_interrupt = *mark == Mark::Interrupt;
        match (self.at, mark) {
            (At::Outside, Mark::Receive) => match of.since_interrupt.take() {
                Some(runs) => {
                    self.runs = runs;
                    self.at = At::Inside;
                    self.cpus.iter_mut().for_each(|of| (of.has_halted, of.handler) = (false, HandlerThread::None));
                }
                None => self.requests.push(Err(Incomplete::NoBegin)),
            },
            // The earlier arrival was not the request: it had no result.
            (At::Inside, Mark::Receive) if of.has_halted => {
                self.runs.drain(..of.from.min(self.runs.len()));
                self.cpus.iter_mut().for_each(|of| (of.from, of.has_halted) = (0, false));
            }
            (At::Inside, Mark::Transmit) => {
                let caller = self.runs.iter().rfind(|run| run.cpu == cpu).map_or(number, |run| run.function);
                self.at = At::Sending { cpu, caller };
            }
            (At::Sending { cpu: sender, caller }, mark)
                if cpu == sender && (number == caller || *mark == Mark::Interrupt) =>
            {
                let runs = std::mem::take(&mut self.runs);
                self.end(Ok(runs));
            }
            _ => {}
        }
        let runs = match (self.at, self.cpus.get_mut(cpu)) {
            (At::Outside, Some(Cpu { since_interrupt: Some(runs), .. })) => runs,
            (At::Outside, _) => return,
            _ => &mut self.runs,
        };
        let is_full = runs.len() >= LONGEST;
        match runs.last_mut() {
            Some(last) if (last.cpu, last.function) == (cpu, number) => last.count += 1,
            _ if is_full => self.end(Err(Incomplete::TooLong)),
            _ => runs.push(Run { cpu, function: number, count: 1 }),
        }
    }

    /// Ends the request, or what has become too long outside of one.
    fn end(&mut self, request: Result<Vec<Run>, Incomplete>) {
        if self.at != At::Outside {
            self.requests.push(request);
        }
        self.at = At::Outside;
        self.runs.clear();
        for of in &mut self.cpus {
            of.since_interrupt = of.at_interrupt.then(Vec::new);
            of.handler = HandlerThread::None;
        }
    }
}
