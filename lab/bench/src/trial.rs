//! One measured stretch: requests from outside under a load on the bulk VMs.
//!
//! In: a [`Trial`] and the host. Out: a [`MethodResult`] from the captures of the NICs. The RT VM and the bulk VMs have
//! separate networks. The experiment decides on the host's settings, and on the server's place.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ontime_lab::isolate;
use serde::{Deserialize, Serialize};

use crate::bulk::{self, BulkFlows};
use crate::datagrams;
use crate::error::MeasureError;
use crate::flood::{Flood, Kind};
use crate::host::{Host, size};
use crate::paced::Paced;
use crate::progress::progress;
use crate::schema::{Load, MethodResult, Run};
use crate::workload::{self, Workload};

/// Counts the cases of a measurement, and estimates the remaining time.
#[derive(Debug)]
pub(crate) struct CaseCount {
    total: usize,
    /// Number of cases that are measured at the same time.
    at_once: usize,
    begun: usize,
    start: Instant,
}

impl CaseCount {
    pub(crate) fn new(total: usize, at_once: usize) -> Self {
        Self { total, at_once, begun: 0, start: Instant::now() }
    }

    /// Counts the start of a case. Returns the progress message.
    pub(crate) fn begin(&mut self, name: &str) -> String {
        self.begin_after(name, self.start.elapsed())
    }

    /// As [`Self::begin`], `elapsed` after the first case began. The remaining cases are expected to take as long as
    /// the others.
    fn begin_after(&mut self, name: &str, elapsed: Duration) -> String {
        self.begun += 1;
        let line = format!("case {} of {}: {name}", self.begun, self.total);
        let ended = self.begun.saturating_sub(self.at_once);
        if ended == 0 {
            return line;
        }
        let left = elapsed.as_secs_f64() * self.total.saturating_sub(ended) as f64 / ended as f64;
        if left < 90.0 {
            format!("{line}; about {left:.0} s left")
        } else {
            format!("{line}; about {:.0} min left", left / 60.0)
        }
    }
}

/// The results of a host's cases, and the cases without one.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct CaseResults<R = MethodResult> {
    pub(crate) results: Vec<R>,
    /// Cases that failed, and why.
    pub(crate) missing: Vec<String>,
}

impl<R> Default for CaseResults<R> {
    fn default() -> Self {
        Self { results: Vec::new(), missing: Vec::new() }
    }
}

impl<R> CaseResults<R> {
    /// Notes why a case has no result.
    pub(crate) fn lacks(&mut self, case: &str, error: MeasureError) {
        self.missing.push(format!("{case}: not measured: {error}"));
    }
}

/// As [`each_of`]; tells the number and name of each case, and the remaining time.
pub(crate) fn each<C, R>(
    host: Host,
    cases: impl IntoIterator<Item = C>,
    name: impl Fn(&C) -> String,
    mut measure: impl FnMut(&mut Host, &C) -> Result<R, MeasureError>,
) -> Result<CaseResults<R>, MeasureError> {
    each_with_several(host, cases, name, |host, case, results| {
        results.push(measure(host, case)?);
        Ok(())
    })
}

/// As [`each`]; a case may have several results.
pub(crate) fn each_with_several<C, R>(
    host: Host,
    cases: impl IntoIterator<Item = C>,
    name: impl Fn(&C) -> String,
    mut measure: impl FnMut(&mut Host, &C, &mut Vec<R>) -> Result<(), MeasureError>,
) -> Result<CaseResults<R>, MeasureError> {
    let cases: Vec<C> = cases.into_iter().collect();
    let mut count = CaseCount::new(cases.len(), 1);
    each_of(host, cases, &name, |host, case, results| {
        progress(count.begin(&name(case)));
        measure(host, case, results)
    })
}

/// Measures cases on one host, then ends the host. If a case fails, the remaining cases are measured while the host
/// lives. Results from before the host's end count.
pub(crate) fn each_of<C, R>(
    mut host: Host,
    cases: impl IntoIterator<Item = C>,
    name: impl Fn(&C) -> String,
    mut measure: impl FnMut(&mut Host, &C, &mut Vec<R>) -> Result<(), MeasureError>,
) -> Result<CaseResults<R>, MeasureError> {
    let mut found = CaseResults::default();
    let mut cases = cases.into_iter();
    while let Some(case) = cases.next() {
        let Err(error) = measure(&mut host, &case, &mut found.results) else { continue };
        let Err(dead) = host.alive() else {
            found.lacks(&name(&case), error);
            continue;
        };
        if found.results.is_empty() {
            return Err(dead);
        }
        isolate::keep(&host.dir);
        found.lacks(&name(&case), dead);
        cases.for_each(|case| found.lacks(&name(&case), MeasureError::NoHost));
        return Ok(found);
    }
    if let Err(error) = host.leave() {
        found.lacks("the method that was in force before", error);
    }
    Ok(found)
}

/// Number of TCP connections to each bulk VM.
const STREAMS: u8 = 4;

/// The requests and their timing.
#[derive(Debug, Clone)]
pub(crate) enum Requests {
    /// By the workload's client, at its own pace.
    Client {
        /// The server and its client.
        workload: Workload,
        /// Minimum number of requests.
        count: u64,
        /// Seed of everything random.
        seed: u64,
    },
    /// sockperf's requests, at a steady rate.
    Paced(Paced),
}

impl Requests {
    /// The workload, the number of requests and their seed. At a steady rate nothing is random.
    fn workload(&self) -> (Workload, u64, u64) {
        match self {
            Requests::Client { workload, count, seed } => (*workload, *count, *seed),
            Requests::Paced(Paced { message_bytes, .. }) => {
                (Workload::Sockperf { message_bytes: *message_bytes }, 0, 0)
            }
        }
    }
}

/// Starts the traffic to these bulk VMs (names and addresses), if the load is one.
pub(crate) fn flood(load: Load, vms: &[(String, String)], host: &mut Host) -> Result<Option<Flood>, MeasureError> {
    let kind = match load {
        Load::None => return Ok(None),
        Load::Tcp => Kind::Receive { streams: STREAMS },
        Load::SmallPackets => Kind::ReceiveUdp { bytes: datagrams::SMALL },
        Load::LargePackets => Kind::ReceiveUdp { bytes: datagrams::LARGE },
    };
    Flood::start(host, "bulk", vms, kind).map(Some)
}

/// A shell command for the host after the last datagram of a steady rate: waits for the last replies.
pub(crate) const SETTLED: &str = "sleep 0.3";

/// Data about the host during a stretch of requests.
pub(crate) struct Stretch<const N: usize> {
    /// Size of each capture before the stretch, bytes.
    pub from: [u64; N],
    /// Busy share of the CPUs, 0 to 1.
    pub cpu_share: Option<f64>,
    /// Notes for the reader.
    pub notes: Vec<String>,
}

/// Runs `ask` while the flood flows, then ends the flood.
pub(crate) fn stretch<const N: usize>(
    host: &mut Host,
    captures: [PathBuf; N],
    flood: Option<Flood>,
    ask: impl FnOnce(&mut Host) -> Result<(), MeasureError>,
) -> Result<Stretch<N>, MeasureError> {
    let from = captures.map(|path| size(&path));
    let (on_clients, before, missed) = (host.clients_cpu()?, host.cpu_time()?, host.missed());
    let link = host.link_losses()?;
    let asked = ask(host);
    let after = host.cpu_time()?;
    let complaints = host.clients_cpu()?.complaints(&on_clients);
    let link = host.link_losses()?.notes(&link);
    if let Some(flood) = flood {
        flood.stop(host)?;
    }
    asked?;
    host.catch_up()?;
    let notes = host.notes(missed).into_iter().chain(complaints).chain(link).collect();
    Ok(Stretch { from, cpu_share: after.share_since(&before, host.cpus), notes })
}

/// The parameters of a measurement.
#[derive(Debug)]
pub(crate) struct Trial<'a> {
    /// The method's name in results.
    pub method: &'a str,
    /// The method in words.
    pub label: &'a str,
    /// Traffic of the bulk VMs.
    pub load: Load,
    /// The requests, including the warm-up.
    pub requests: Requests,
    /// Requests at the start that do not count: they fill caches and resolve ARP.
    pub warmup: u64,
}

impl Trial<'_> {
    /// Runs the measurement. The cuts of the captures are put into the host's directory; only that of the RT NIC is
    /// kept.
    pub(crate) fn run(&self, host: &mut Host) -> Result<MethodResult, MeasureError> {
        let dir = &host.dir.clone();
        let captures = [host.capture("rt"), host.capture("bulk")];
        let (workload, requests, seed) = self.requests.workload();
        let client = workload.ready(host, seed)?;
        let flood = flood(self.load, &host.bulk(), host)?;
        let name = format!("{}, {}", self.method, self.load.description());
        let stretch = stretch(host, captures.clone(), flood, |host| match self.requests.clone() {
            Requests::Client { .. } => {
                let load = workload::Load { requests, seed, dir, name: &name };
                workload.send(client, host, &load)
            }
            // Requests that are in flight at the last one are answered meanwhile.
            Requests::Paced(paced) => host.paced(&paced).and_then(|()| host.shell(SETTLED).map(|_| ())),
        })?;
        let cut = |capture: &Path, from, nic: &str| {
            let cut = dir.join(format!("{}-{}-{nic}.pcap", self.method, self.load.name()));
            host.cut(capture, from, &cut).map(|()| cut)
        };
        let ([rt_all, bulk_all], [rt_from, bulk_from]) = (&captures, stretch.from);
        let rt_capture = cut(rt_all, rt_from, "rt")?;
        let bulk_capture = cut(bulk_all, bulk_from, "bulk")?;
        let (wire, notes) = workload.analyse(&rt_capture, workload.on(host).port(), self.warmup, (requests, seed))?;
        let flows = BulkFlows { ports: vec![datagrams::PORT], window: wire.span_ns };
        let bulk = if self.load == Load::Tcp { Some(bulk::analyse(&bulk_capture, flows)?) } else { None };
        // The capture of a flood is large, and its sums are in the result.
        let _ = fs::remove_file(&bulk_capture);
        let mut result = MethodResult::new(&Run {
            load: self.load,
            wire: &wire,
            bulk: bulk.as_ref(),
            cpu_share: stretch.cpu_share,
            late_ns: workload.late_ns(),
            ..host.run(self.method, self.label)
        });
        result.notes.extend(notes);
        result.notes.extend(stretch.notes);
        Ok(result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_case_is_told_with_its_number_and_the_time_that_is_left() {
        let mut count = CaseCount::new(18, 1);
        let mut begin = |seconds| count.begin_after("vanilla", Duration::from_secs(seconds));
        assert_eq!(begin(0), "case 1 of 18: vanilla");
        assert_eq!(begin(60), "case 2 of 18: vanilla; about 17 min left");
        let told: Vec<String> = (3..=18).map(|case| begin((case - 1) * 60)).collect();
        assert_eq!(told[4], "case 7 of 18: vanilla; about 12 min left");
        assert_eq!(told[15], "case 18 of 18: vanilla; about 60 s left");
        // With two hosts side by side, the first case has ended when the third begins.
        let mut count = CaseCount::new(4, 2);
        let mut begin = |seconds| count.begin_after("threaded", Duration::from_secs(seconds));
        assert_eq!([begin(0), begin(1)], ["case 1 of 4: threaded", "case 2 of 4: threaded"]);
        assert_eq!(begin(60), "case 3 of 4: threaded; about 3 min left");
    }
}
