//! Measures the cost of a probe on this machine.
//!
//! An ignored signal to the own process passes exactly one tracepoint (`signal_generate`, `kernel/signal.c`) and has no
//! other effect. The same system call is timed with the tracepoint off and on, alternately, and the fastest round of
//! each is used. The difference is the cost of one record with filter and time stamp, as in a trace.

use std::path::Path;

use ontime_base::clock::now;
use rustix::process::{Signal, getpid, kill_process};

use crate::tracefs::{Instance, TraceError};

/// Calls per round.
const CALLS: u64 = 1_000;
/// Rounds of each kind. The fastest one is used, so that other load on the machine does not matter.
const TURNS: usize = 20;

/// The cost of one probe's record, ns.
///
/// # Errors
/// If tracefs cannot be used.
pub fn of_a_probe(root: &Path) -> Result<f64, TraceError> {
    let instance = Instance::create(Instance::place(root, "cost")?)?;
    let probe = "events/signal/signal_generate";
    instance.write("buffer_size_kb", "256")?;
    instance.write(&format!("{probe}/filter"), &format!("common_pid=={}", getpid().as_raw_nonzero()))?;
    let (mut off, mut on) = (u64::MAX, u64::MAX);
    for _ in 0..TURNS {
        instance.write(&format!("{probe}/enable"), "0")?;
        off = off.min(turn());
        instance.write(&format!("{probe}/enable"), "1")?;
        on = on.min(turn());
    }
    Ok(on.saturating_sub(off) as f64 / CALLS as f64)
}

fn turn() -> u64 {
    let (start, own) = (now(), getpid());
    for _ in 0..CALLS {
        let _ = kill_process(own, Signal::URG);
    }
    now() - start
}
