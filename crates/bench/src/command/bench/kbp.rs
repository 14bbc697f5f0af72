//! `ontime-lab bench kbp`: KBP, sections 5 and 6.

use std::process::ExitCode;

use ontime_cli::usage;

use super::{Measured, Output, Whose, chosen, noted, say};
use crate::host::Ground;
use crate::kbp;
use crate::workload::HEADERS;

#[derive(Debug, clap::Args)]
pub struct Kbp {
    /// Methods: napi (nothing applied), napi-tuned (the paper's baseline), partitioned (without polling), busypoll,
    /// busypoll-adaptive
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    /// Places of the server: vm, nat (a container behind a bridge with NAT, as Docker's), macvlan (a container)
    #[arg(long = "place", value_name = "PLACE", value_delimiter = ',')]
    places: Vec<String>,
    /// Frames, bytes with the check sequence: 64, 512, 1518
    #[arg(long = "frame", value_name = "BYTES", value_delimiter = ',')]
    frames: Vec<u16>,
    /// Counted requests of each closed loop
    #[arg(long, default_value_t = 300)]
    requests: u64,
    /// Frames a second of the open loop, on the host's clock
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    rate: u32,
    /// Frames of the open loop, and of each trial of the search for the highest rate without loss; 0: neither
    #[arg(long, default_value_t = 500)]
    frames_each: u64,
    /// Most trials of the search; 0: the open loop alone
    #[arg(long, default_value_t = kbp::TRIALS)]
    trials: u32,
    /// In place of all that: the open loop alone, for so many hours of the host's clock (the paper: 12); 0.01 for a
    /// trial
    #[arg(long, value_name = "HOURS", value_parser = hours, conflicts_with_all = ["requests", "frames_each", "trials"])]
    hours: Option<f64>,
    #[command(flatten)]
    whose: Whose,
    #[command(flatten)]
    output: Output,
}

/// Measures every method at every place with every frame on one emulated host.
pub fn run(args: &Kbp) -> anyhow::Result<ExitCode> {
    let methods = chosen("method", &args.methods, &kbp::METHODS)?;
    let real = args.whose.hardware.hardware.is_some();
    // A real host's server is where its owner has it.
    let places = chosen("place", &args.places, if real { &["vm"] } else { &kbp::PLACES })?;
    let frames = if args.frames.is_empty() { kbp::FRAMES.to_vec() } else { args.frames.clone() };
    if let Some(unknown) = frames.iter().find(|frame| !kbp::FRAMES.contains(frame)) {
        usage!("frames of {unknown} bytes are none of the paper's, {:?}", kbp::FRAMES);
    }
    let mut missing = Vec::new();
    let (requests, rate, frames_each) = (args.requests, f64::from(args.rate), args.frames_each);
    let plan =
        kbp::Plan { methods, places, frames, requests, rate, frames_each, trials: args.trials, hours: args.hours };
    let measure = |ground: Ground<'_>| kbp::measure(&plan, ground, &mut say, &mut noted(&mut missing));
    let (results, mut notes) = args.whose.measure(HEADERS, |site| site, measure)?;
    notes.extend([
        "paper (KBP, 5 and 6, its hardware): slowest round trip in a VM at 80 Mb/s under 200 us for KBP and \
         milliseconds for NAPI, 98.8 % less at 1 Gb/s with 1518 bytes; containers 21.1 to 96.1 % less; without loss \
         1.36, 1.75 and 3.28 times NAPI's rate in a VM at 64, 512 and 1518 bytes, up to 1.28 times in a container; in \
         12 hours none over 250 us for KBP in a VM, but at 1 Gb/s with 64 bytes"
            .to_owned(),
        "the paper has 60 s a trial and CPUs kept for polling; here a trial is a count of frames, and on the virtual \
         clock one CPU does all"
            .to_owned(),
    ]);
    let measured = Measured { experiment: "kbp", seed: 1, results, missing, notes };
    measured.report(&args.output)
}

/// The longest that may be asked for.
const MOST_HOURS: f64 = 1_000.0;

fn hours(text: &str) -> Result<f64, String> {
    let hours = text.parse().ok().filter(|hours| *hours > 0.0 && *hours <= MOST_HOURS);
    hours.ok_or_else(|| format!("'{text}' is no number of hours above 0 and up to {MOST_HOURS}"))
}

#[cfg(test)]
mod tests {
    use crate::goals;

    use super::*;

    #[test]
    fn the_goals_name_cases_that_the_experiment_makes() {
        let mut all = Vec::new();
        for method in kbp::METHODS {
            for place in kbp::PLACES {
                let closed = kbp::FRAMES.map(|frame| kbp::name(method, place, frame));
                all.extend(closed.iter().map(|case| kbp::fast(case)));
                all.extend(closed.iter().map(|case| kbp::long(case)));
                all.extend(closed);
            }
        }
        let specs = goals::of_experiment("kbp");
        assert!(!specs.is_empty());
        for spec in specs {
            for case in spec.measure.cases() {
                assert!(
                    all.iter().any(|name| name == case.method) && case.load.floods(),
                    "{} names no case",
                    case.method
                );
            }
        }
    }

    #[test]
    fn what_is_not_known_is_refused_by_name() {
        assert_eq!(chosen("place", &[], &kbp::PLACES).unwrap(), kbp::PLACES);
        let error = chosen("place", &["docker".to_owned()], &kbp::PLACES).unwrap_err().to_string();
        assert!(error.contains("docker") && error.contains("macvlan"), "{error}");
    }

    #[test]
    fn hours_stand_alone() {
        #[derive(Debug, clap::Parser)]
        struct Line {
            #[command(flatten)]
            kbp: Kbp,
        }
        let read = |line: &str| <Line as clap::Parser>::try_parse_from(line.split(' '));
        assert_eq!(read("kbp --hours 0.01 --rate 500").unwrap().kbp.hours, Some(0.01));
        assert_eq!(read("kbp --requests 10").unwrap().kbp.hours, None);
        for wrong in ["0", "-1", "nan", "inf", "1001", "a"] {
            assert!(read(&format!("kbp --hours={wrong}")).is_err(), "{wrong}");
        }
        for other in ["--requests", "--frames-each", "--trials"] {
            assert!(read(&format!("kbp --hours 1 {other} 5")).is_err(), "{other}");
        }
    }
}
