//! `sampled-values`: frames of IEC 61850-9-2 into a VM, one every 250 us, beside bulk VMs ([`crate::sampled`]).
//!
//! In: methods and loads on one emulated host. Out: a `MethodResult` for each: the time from a frame's passage of the
//! RT NIC to that of its answer. A subscriber in the RT VM (raw socket, FIFO 50; `ontime_lab::role`) answers each
//! frame. The time includes the way of the answer, so a frame counts as late sooner than for a subscriber without
//! answers. The frames do not wait for answers.

use std::process::ExitCode;

use ontime_lab::role::SAMPLED_VALUES;

use super::{Experiment, HostArgs, Measured, Methods, Output, command};
use crate::error::MeasureError;
use crate::goals::{Figure, GoalSpec, goal, small};
use crate::host::{BULK_VMS, PlannedHost, RT_VM, Vm, boot_vm};
use crate::progress::progress;
use crate::schema::Load;
use crate::server;
use crate::trial::{self, CaseResults, Requests, Trial};
use crate::workload::{HEADERS, Workload};

/// `rt-default` is `vanilla` on this RT kernel, as in `rt-server`.
const METHODS: Methods = Methods(&[
    ("rt-default", "the RT kernel's defaults, RT vCPU and vNIC threads at FIFO"),
    ("threaded", "threaded interrupts (Access'18, Table 2), NAPI not threaded"),
    ("partitioned", "every NAPI threaded, one priority table for the whole path"),
]);
/// Frames at the start of each case that do not count: 25 ms.
const WARM_UP: u64 = 100;

/// Boots the host and its VMs and measures every method under every load. If a case fails, the remaining cases are
/// measured while the host lives.
fn measure(args: &Options, ground: PlannedHost<'_>) -> Result<CaseResults, MeasureError> {
    if let PlannedHost::Emulated(site, _) = &ground {
        SAMPLED_VALUES.bring(&site.dir.join("files"))?;
    }
    let mut host = ground.start(&BULK_VMS, &server::CONFIG)?;
    if host.target().is_none() {
        boot_vm(host.lab()?, &Vm { role: SAMPLED_VALUES.name, ..RT_VM })?;
    }
    let cases = args.methods.iter().flat_map(|method| args.loads.iter().map(move |load| (method, *load)));
    let name = |(method, load): &(&String, Load)| format!("{method} ({})", load.description());
    trial::each(host, cases, name, |host, &(method, load)| {
        progress(format_args!("{method}, {}: applying", load.description()));
        host.apply(if method == "rt-default" { "vanilla" } else { method })?;
        let trial = Trial {
            method,
            label: METHODS.description(method),
            load,
            requests: Requests::Client { workload: Workload::SampledValues, count: args.frames + WARM_UP, seed: 0 },
            warmup: WARM_UP,
        };
        trial.run(host)
    })
}

#[derive(Debug, Clone, clap::Args)]
struct Options {
    /// Methods: rt-default (the RT kernel's defaults), threaded, partitioned
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// What the bulk VMs receive: small-packets (UDP at full speed), tcp (at full speed), none
    #[arg(long = "load", value_name = "LOAD", value_delimiter = ',', default_value = "small-packets")]
    loads: Vec<Load>,
    /// Counted frames a case: 4,000 are a second of the host's time; the long form is 10,000,000
    #[arg(long, default_value_t = 4_000, value_parser = clap::value_parser!(u64).range(1..=100_000_000))]
    frames: u64,
    #[command(flatten)]
    host: HostArgs,
    #[command(flatten)]
    output: Output,
}

/// Measures every method under every load on one emulated host.
fn execute(args: &Options) -> anyhow::Result<ExitCode> {
    let methods = args.host.hardware.methods(&args.methods, &METHODS.names(), &METHODS.names())?;
    let args = &Options { methods, ..args.clone() };
    let measure = |ground: PlannedHost<'_>| measure(args, ground);
    let (found, notes) = args.host.measure(HEADERS, measure)?;
    Measured { experiment: "sampled-values", seed: 0, found, notes }.report(&args.output)
}

/// Sampled Values: a frame every 250 us.
#[derive(Debug)]
pub(super) struct SampledValues;

impl Experiment for SampledValues {
    command!(
        "sampled-values",
        "Frames of Sampled Values (IEC 61850-9-2), one every 250 us, into a VM beside two bulk VMs: how many are late",
        Options,
        execute
    );

    fn cases(&self) -> Vec<(String, Load)> {
        METHODS.under(&Load::ALL)
    }

    fn columns(&self) -> &'static [Figure] {
        &[Figure::Count, Figure::Lost, Figure::P50, Figure::P99, Figure::P99_99, Figure::Max]
    }

    fn meaning(&self) -> &'static str {
        "Late: answered later than the next frame came."
    }

    fn goals(&self) -> Vec<GoalSpec> {
        vec![
            goal("no-late-frame", "partitioned: no frame late or lost beside bulk VMs")
                .late(small("partitioned"))
                .at_most(0.0),
        ]
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use crate::pcap::crafted;
    use crate::sampled::{LATE_NS, frame, wire};
    use crate::schema::{Clock, LATE, MethodResult, Run};

    #[test]
    fn late_and_lost_frames_are_told_apart_by_the_capture() {
        let answer = |number| {
            let mut frame = frame::write(number);
            frame.copy_within(6..12, 0);
            frame
        };
        // Frame 0 is warm-up, 1 in time, 2 late, 3 lost, 4 in time. The capture continues for 0.2 s.
        let frames: Vec<(u32, Vec<u8>)> = [
            (0, frame::write(0)),
            (250, frame::write(1)),
            (500, answer(1)),
            (500, frame::write(2)),
            (750, frame::write(3)),
            (751, answer(2)),
            (1_250, frame::write(4)),
            (1_300, answer(4)),
            (200_000, vec![0; 60]),
        ]
        .into();
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("rt.pcap");
        fs::write(&path, crafted(&frames)).unwrap();
        let wire = wire::analyse(&path, 1).unwrap();
        assert_eq!(wire.intervals_ns, [250_000, 250_000, 500_000]);
        let result = MethodResult::new(&Run {
            wire: &wire,
            late_ns: Some(LATE_NS),
            ..Run::of("partitioned", "", "7.2", Clock::Virtual)
        });
        assert_eq!((result.count, result.lost, result.number(LATE)), (3, 1, Some(1.0)));
    }
}
