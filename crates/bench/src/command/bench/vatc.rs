//! `ontime-lab bench vatc` and `vatc-network`: VATC, sections IV-B and IV-C.

use std::process::ExitCode;

use clap::ValueEnum;

use super::{Measured, Output, Whose, noted, say};
use crate::host::Ground;
use crate::vatc::{self, Beside, Interval};
use crate::workload::HEADERS;

/// What both have.
#[derive(Debug, clap::Args)]
struct Common {
    /// Methods: prio, fq_codel, vanilla, partitioned, vatc, vatc-qdisc (vatc where packets go through the NIC's qdisc);
    /// default: prio, fq_codel, vanilla, vatc
    #[arg(long = "method", value_name = "METHOD", value_delimiter = ',')]
    methods: Vec<String>,
    #[command(flatten)]
    whose: Whose,
    /// Times between two interrupts of the NIC, a case each: 0 (none), 10 to 10000 us, dynamic (14 to 250 us) or
    /// conservative (50 to 250); default: as its driver has it
    #[arg(long = "interval", value_name = "US", value_delimiter = ',')]
    intervals: Vec<Interval>,
    /// Counted requests a case (1000 in the paper)
    #[arg(long, default_value_t = 1000)]
    requests: u64,
    #[command(flatten)]
    output: Output,
}

#[derive(Debug, clap::Args)]
pub struct Vatc {
    /// Numbers of bulk VMs that send
    #[arg(long, default_value = "0,1,2,3,4", value_delimiter = ',',
          value_parser = clap::value_parser!(u8).range(0..=i64::from(vatc::STREAMS_MAX)))]
    streams: Vec<u8>,
    /// Packets a second of all bulk VMs together (Fig. 11); default: as many as they can
    #[arg(long, value_name = "PACKETS", value_parser = clap::value_parser!(u32).range(100..=10_000_000))]
    total_rate: Option<u32>,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, clap::Args)]
pub struct Network {
    /// What the bulk VM sends
    #[arg(long, value_enum, default_value = "none,udp,tcp", value_delimiter = ',')]
    stream: Vec<Stream>,
    #[command(flatten)]
    common: Common,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Stream {
    /// Nothing
    None,
    /// UDP datagrams that fill a frame, as fast as it can
    Udp,
    /// One TCP connection
    Tcp,
}

impl From<Stream> for Beside {
    fn from(stream: Stream) -> Self {
        match stream {
            Stream::None => Beside::Small(0),
            Stream::Udp => Beside::LargeUdp,
            Stream::Tcp => Beside::Tcp,
        }
    }
}

/// Measures every method with every number of streams on one host.
pub fn run(args: &Vatc) -> anyhow::Result<ExitCode> {
    let beside = args.streams.iter().copied().map(Beside::Small).collect();
    let mut words = vec![
        "paper (VATC, IV-B, its hardware): with two streams the 95th percentile of prio is 8 times VATC's on Linux \
         3.10 and 40 times on 3.18; VATC's does not depend on the number of streams"
            .to_owned(),
    ];
    if let Some(rate) = args.total_rate {
        words.push(format!(
            "bulk VMs were told to send {rate} packets a second together; the paper's Figure 11, its hardware: worst \
             160 ms"
        ));
    }
    measure("vatc", beside, args.total_rate, &args.common, words)
}

/// Measures every method beside every kind of large packets on one host.
pub fn network(args: &Network) -> anyhow::Result<ExitCode> {
    let beside = args.stream.iter().copied().map(Beside::from).collect();
    let words = vec![
        "paper (VATC, IV-C, its hardware): the link is saturated, what waits waits in the NIC, and VATC has little or \
         no advantage"
            .to_owned(),
        "an emulated NIC has no speed of its own: what is saturated there is the CPU".to_owned(),
    ];
    measure("vatc-network", beside, None, &args.common, words)
}

fn measure(
    experiment: &'static str,
    beside: Vec<Beside>,
    total_rate: Option<u32>,
    common: &Common,
    words: Vec<String>,
) -> anyhow::Result<ExitCode> {
    let defaults = ["prio", "fq_codel", "vanilla", "vatc"];
    let methods = common.whose.hardware.methods(&common.methods, &defaults, &vatc::METHODS)?;
    let mut missing = Vec::new();
    let intervals = common.intervals.clone();
    let plan = vatc::Plan { methods, beside, total_rate, intervals, requests: common.requests };
    let measure = |ground: Ground<'_>| vatc::measure(&plan, ground, &mut say, &mut noted(&mut missing));
    let (results, mut notes) = common.whose.measure(HEADERS, |site| site, measure)?;
    notes.extend(words);
    notes.push(
        "a request comes from outside and is answered in the VM; the paper's comes from the VM and is answered \
         outside: both ways pass the host in either"
            .to_owned(),
    );
    let measured = Measured { experiment, seed: 1, results, missing, notes };
    measured.report(&common.output)
}

#[cfg(test)]
mod tests {
    use crate::goals;

    use super::*;

    #[test]
    fn the_goals_name_cases_that_the_experiment_makes() {
        let beside = (0..=vatc::STREAMS_MAX).map(Beside::Small);
        let all: Vec<String> = beside
            .flat_map(|beside| vatc::METHODS.map(|method| vatc::Case { method, beside, interval: None }.to_string()))
            .collect();
        let specs = goals::of_experiment("vatc");
        assert!(!specs.is_empty());
        for spec in specs {
            for case in spec.measure.cases() {
                assert!(all.iter().any(|name| name == case.method), "{} names no case", case.method);
                assert_eq!(case.load.floods(), !case.method.ends_with("-0"), "{}", case.method);
            }
        }
    }
}
