//! What delayed the threads of a measuring program on this host: a trace beside it.
//!
//! In: a measurement's CPUs and tenants' classes. Out: its longest delays with their causes.

use std::collections::BTreeSet;
use std::path::Path;

use ontime_base::clock;
use ontime_hostnet::{CpuSet, Inventory};
use ontime_trace::delay::{Delay, Delays, Others};
use ontime_trace::hints::Counters;
use ontime_trace::tracefs::{self, Instance};
use ontime_trace::{Session, TraceError, Watch, cost};

use super::limits::Test;
use crate::daemon::config::Config;
use crate::paths::Paths;
use crate::trace::{Guard, intent};

/// How many of the longest delays are kept.
const KEPT: usize = 1_000;
/// Size of each CPU's ring in the kernel, KiB.
const RING_KIB: u32 = 8_192;

/// How long before a look an event may have been that is read at the next one, ns.
const EVENTS_LATE: u64 = 50_000_000;

/// The CPUs that are not measured.
fn others(inventory: &Inventory, measured: &CpuSet) -> Vec<u32> {
    inventory.cpus.online.iter().filter(|cpu| !measured.contains(*cpu)).collect()
}

fn uncounted(why: String) -> String {
    format!("system management interrupts were not counted: {why}")
}

/// The names of the threads that measure, and whether they poll; none for requests, which `ontime trace` follows.
fn threads(test: Test) -> Option<(&'static str, bool)> {
    match test {
        Test::Cyclictest => Some(("cyclictest", false)),
        Test::Timerlat => Some(("timerlat*", false)),
        Test::Oslat => Some(("oslat", true)),
        Test::Request => None,
    }
}

/// What the trace beside a measurement found.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Found {
    /// The longest delays, longest first.
    pub delays: Vec<Delay>,
    /// The other delays beyond the limit.
    pub others: Others,
    /// Lower bound of lost events.
    pub lost: u64,
    /// The CPUs that have lost some.
    pub lossy: BTreeSet<u32>,
    /// The cost of a probe, ns.
    pub probe_ns: f64,
    /// Why the trace ended too early.
    pub failure: Option<String>,
    /// What took time from the whole machine, or why that is not known.
    pub machine: Vec<String>,
}

/// A trace beside a measurement.
pub(super) struct Tracer {
    // The session is removed before its guard ends.
    session: Option<Session>,
    delays: Delays,
    counters: Counters,
    /// Where all CPUs are measured: read before and after the measurement.
    smis: Option<Counters>,
    from: u64,
    probe_ns: f64,
    failure: Option<String>,
    _guard: Guard,
}

impl Tracer {
    /// Starts the trace; none for a test that it does not know. `limit`: of its delays, us.
    ///
    /// # Errors
    /// Where this host cannot be traced.
    pub(super) fn start(
        test: Test,
        cpus: &CpuSet,
        limit: Option<f64>,
        inventory: &Inventory,
        paths: &Paths,
    ) -> anyhow::Result<Option<Self>> {
        let Some((program, polls)) = threads(test) else { return Ok(None) };
        let config = Config::load(&paths.config_dir)?;
        // The kernel moves timers of CPUs that the tick leaves alone (nohz_full) to other CPUs.
        let traced = if polls { cpus } else { &inventory.cpus.online };
        let watch = Watch::of_program(program, traced, inventory, &intent(&config).0);
        let root = Path::new(tracefs::TRACEFS);
        let probe_ns = cost::of_a_probe(root)?;
        let place = Instance::place(root, "verify")?;
        let guard = Guard::start(&place)?;
        let others = others(inventory, cpus);
        let first = cpus.iter().next().filter(|_| others.is_empty());
        Ok(Some(Self {
            session: Some(Session::start(root, place, &watch, RING_KIB)?),
            // Reading the SMI counter of a CPU interrupts it. An SMI stops all CPUs, so another one tells.
            counters: Counters::new(&others),
            smis: first.map(|cpu| Counters::new(&[cpu])),
            delays: Delays::new(watch, polls, KEPT, limit.map(|us| (us * 1e3) as u64)),
            from: clock::now(),
            probe_ns,
            failure: None,
            _guard: guard,
        }))
    }

    /// Reads what there is.
    pub(super) fn poll(&mut self) {
        let Some(session) = &mut self.session else { return };
        match session.poll() {
            Ok(events) => events.iter().for_each(|event| self.delays.step(event)),
            Err(error) => self.fail(&error),
        }
        self.hint();
    }

    /// Notes what took time from the whole machine since the last look, or shortly before: events come a little late.
    fn hint(&mut self) {
        let now = clock::now();
        if let Some(words) = self.counters.look().words() {
            self.delays.hint(self.from.saturating_sub(EVENTS_LATE), now, &words);
        }
        self.from = now;
    }

    fn fail(&mut self, error: &TraceError) {
        self.failure = Some(error.to_string());
        self.session = None;
    }

    /// Ends the trace.
    pub(super) fn finish(mut self) -> Found {
        match self.session.take().map(Session::finish) {
            Some(Ok((events, _))) => events.iter().for_each(|event| self.delays.step(event)),
            Some(Err(error)) => self.fail(&error),
            None => {}
        }
        self.hint();
        let machine = match &mut self.smis {
            Some(counters) => {
                let found = counters.look();
                found.smis_unknown.clone().map(uncounted).into_iter().chain(found.lines()).collect()
            }
            None => self.counters.look().smis_unknown.map(uncounted).into_iter().collect(),
        };
        let (lost, lossy) = (self.delays.lost(), self.delays.lossy().clone());
        let (probe_ns, failure) = (self.probe_ns, self.failure);
        let (delays, others) = (self.delays.worst().to_vec(), self.delays.others().clone());
        Found { delays, others, lost, lossy, probe_ns, failure, machine }
    }
}
