//! What a probe costs on this machine, measured.
//!
//! A signal to ourselves that is ignored passes exactly one tracepoint (`signal_generate`, `kernel/signal.c`) and does
//! nothing else. The same system call with the tracepoint off and on, in turns, the fastest turn of each: the
//! difference is one record with its filter and its time stamp, as ours have.

use std::path::Path;

use rustix::process::{Signal, getpid, kill_process};

use crate::tracefs::{Instance, TraceError, now};

/// Calls a turn.
const CALLS: u64 = 1_000;
/// Turns of each kind: the fastest counts, so that other load on the machine does not.
const TURNS: usize = 20;

/// What a record of one probe costs, ns.
///
/// # Errors
/// tracefs is not to be had.
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
