//! `rt-server`: Access'18, IV-A and B. A simple RT server in a VM, beside two VMs that receive TCP at full speed.
//!
//! In: which [`Case`]s on which emulated host. Out: a [`MethodResult`] for each. One [`measure`] is one boot of the
//! host: three VMs are started as a user would (QEMU, vhost-net, bridges), `ontime daemon` runs, and each case is a
//! method that `ontime apply` switches to, and a place of the server ([`crate::server`]). Requests come from outside; so does
//! the flood ([`crate::flood`]); so do all times. `ablation` is the same with other cases, `memcached` and `voip` with another
//! [`Workload`].

use std::fs;
use std::path::Path;

use ontime_lab::images::Images;

use crate::bulk::{self, BulkFlows};
use crate::flood::{self, Flood, Kind};
use crate::host::{Host, MeasureError, Site, Vm, size, slice};
use crate::schema::{Load, MethodResult, Run};
use crate::server::{self, Place, Seat, Wake};
use crate::workload::{self, Workload};

/// The bulk VMs' names and addresses on the bulk network.
const BULK_VMS: [(&str, &str); 2] = [("bulk1", "10.2.0.2"), ("bulk2", "10.2.0.3")];
/// TCP connections to each bulk VM.
const STREAMS: u8 = 4;
/// Requests at the start of each case that do not count: caches, ARP, the client learning the clock.
const WARM_UP: u64 = 20;

/// What can be measured: methods of `ontime apply`; `rt-default`, which is `vanilla` on an RT kernel; outsourced sockets; the
/// limit.
pub const CASES: [&str; 9] = [
    "vanilla",
    "rt-default",
    "threaded",
    "exclusive",
    "partitioned",
    "outsourcing",
    "outsourcing-interrupt",
    "outsourcing-only",
    "host-process",
];

/// A method under a load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// The name in results: one of [`CASES`].
    pub name: String,
    /// What the bulk VMs receive.
    pub load: Load,
}

impl Case {
    /// The method of `ontime apply` that it is measured under.
    fn method(&self) -> &str {
        match self.name.as_str() {
            "rt-default" => "vanilla",
            "outsourcing" | "outsourcing-interrupt" | "host-process" => "partitioned",
            "outsourcing-only" => "threaded",
            method => method,
        }
    }

    /// Whether it needs the guest module.
    pub fn is_outsourced(&self) -> bool {
        matches!(self.place(), Place::Outsourced(_))
    }

    /// Where the server runs.
    fn place(&self) -> Place {
        match self.name.as_str() {
            "outsourcing" | "outsourcing-only" => Place::Outsourced(Wake::Idle),
            "outsourcing-interrupt" => Place::Outsourced(Wake::Interrupt),
            "host-process" => Place::Process,
            _ => Place::Vm,
        }
    }

    fn label(&self) -> String {
        let words = match self.name.as_str() {
            "vanilla" => "stock kernel without PREEMPT_RT, RT vCPU and vNIC threads at FIFO",
            "rt-default" => "PREEMPT_RT kernel with its defaults, RT vCPU and vNIC threads at FIFO",
            "threaded" => "the paper's threaded interrupt handling: Table 2's priorities, NAPI not threaded",
            "exclusive" => "the paper's exclusive CPU: one CPU for the RT group, everything else on the rest",
            "partitioned" => "Ontime: every NAPI threaded, one priority table for the whole path",
            "outsourcing" => "Ontime: as partitioned, and the VM's sockets are the host's; its halt ends, no interrupt",
            "outsourcing-interrupt" => "as outsourcing, but arrivals interrupt the guest",
            "outsourcing-only" => "outsourced sockets on the host path of threaded",
            "host-process" => "the same server as a process of the host, under partitioned: the limit",
            other => other,
        };
        words.to_owned()
    }
}

/// What to measure on one emulated host.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The host.
    pub site: Site,
    /// What answers, and who asks.
    pub workload: Workload,
    /// In this order.
    pub cases: Vec<Case>,
    /// Counted requests a case, at least.
    pub requests: u64,
    /// Seed of the gaps between requests.
    pub seed: u64,
}

/// Boots the host, starts the VMs and measures every case. A case that fails is passed to `missing` with its name, and the
/// rest is measured, as long as the host lives.
///
/// # Errors
/// The host or a bulk VM does not come up.
pub fn measure(
    plan: &Plan,
    images: &Images,
    progress: &mut dyn FnMut(&str),
    missing: &mut dyn FnMut(&str, MeasureError),
) -> Result<Vec<MethodResult>, MeasureError> {
    let outsourced = plan.cases.iter().any(Case::is_outsourced);
    let mut seat = Seat::new(plan.workload.server(), &plan.site, images, outsourced, progress)?;
    let bulk = BULK_VMS.map(|(name, address)| Vm { name, role: "bulk", net: "bulk", address });
    let mut host = Host::start(&plan.site, images, &bulk, &server::CONFIG, progress)?;
    let mut results = Vec::new();
    for case in &plan.cases {
        let seated = seat.put(&mut host, case.place(), progress);
        match seated.and_then(|()| measure_case(&mut host, plan, case, progress)) {
            Ok(result) => results.push(result),
            Err(error) => {
                host.lab.alive()?;
                host.lab.stamp_arrivals(false)?;
                missing(&case.name, error);
            }
        }
    }
    host.lab.power_off()?;
    Ok(results)
}

/// Measures one case.
fn measure_case(
    host: &mut Host,
    plan: &Plan,
    case: &Case,
    progress: &mut dyn FnMut(&str),
) -> Result<MethodResult, MeasureError> {
    let name = format!("{}, {}", case.name, case.load.words());
    progress(&format!("{name}: applying"));
    host.apply(case.method())?;
    let captures = [host.lab.capture("rt"), host.lab.capture("bulk")];
    let kind = match case.load {
        Load::None => None,
        Load::Tcp => Some(Kind::Receive { streams: STREAMS }),
        Load::SmallPackets => Some(Kind::ReceiveSmall),
    };
    let client = plan.workload.ready(host, plan.seed)?;
    let flood = match kind {
        Some(kind) => Some(Flood::start(&mut host.lab, &captures[1], &BULK_VMS, kind)?),
        None => None,
    };
    host.lab.stamp_arrivals(true)?;
    let offsets = captures.clone().map(|path| size(&path));
    let before = host.cpu_time()?;
    let load = workload::Load {
        requests: plan.requests + WARM_UP,
        seed: plan.seed,
        captures: &captures,
        dir: &plan.site.dir,
        name: &name,
    };
    plan.workload.send(client, host, &load, progress)?;
    let after = host.cpu_time()?;
    host.lab.stamp_arrivals(false)?;
    if let Some(flood) = flood {
        flood.stop()?;
    }
    let cut = |capture: &Path, from, nic: &str| {
        let cut = plan.site.dir.join(format!("{}-{}-{nic}.pcap", case.name, case.load.name()));
        slice(capture, from, &cut).map(|()| cut)
    };
    let ([rt_all, bulk_all], [rt_from, bulk_from]) = (&captures, offsets);
    let rt_capture = cut(rt_all, rt_from, "rt")?;
    let bulk_capture = cut(bulk_all, bulk_from, "bulk")?;
    let (wire, notes) = plan.workload.analyse(&rt_capture, WARM_UP)?;
    let flows = BulkFlows { ports: vec![flood::PORT], window: wire.span_ns };
    let bulk = if case.load == Load::Tcp { Some(bulk::analyse(&bulk_capture, flows)?) } else { None };
    // A flood's capture is large, and its sums are in the result.
    let _ = fs::remove_file(&bulk_capture);
    let mut result = MethodResult::new(&Run {
        method: &case.name,
        label: &case.label(),
        kernel: &host.kernel,
        clock: host.clock,
        cpus: u32::from(host.cpus),
        load: case.load,
        wire: &wire,
        bulk: bulk.as_ref(),
        cpu_share: after.share_since(&before, host.cpus),
    });
    result.notes.extend(notes);
    Ok(result)
}
