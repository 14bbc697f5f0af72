//! `rt-server`: Access'18, IV-A and B. A simple RT server in a VM, beside two VMs that receive TCP at full speed.
//!
//! In: which [`Case`]s on which emulated host. Out: a [`MethodResult`] for each. One [`measure`] is one boot of the
//! host: three VMs are started as a user would (QEMU, vhost-net, bridges), `ontime daemon` runs, and each case is a
//! method that `ontime apply` switches to, and a place of the server ([`crate::server`]). Requests come from outside;
//! so does the flood ([`crate::flood`]); so do all times. `ablation` and `segments` are the same with other cases,
//! `memcached` and `voip` with another [`Workload`].

use std::fs;

use crate::hardware::HardwareError;
use crate::host::{AS_IS, BULK_VMS, Ground, Host, MeasureError, RT_VM, Site};
use crate::schema::{Load, MethodResult};
use crate::segments::{Depth, Trace};
use crate::server::{self, Place, Seat, Wake};
use crate::trial::{self, Requests, Trial};
use crate::workload::Workload;

/// Requests at the start of each case that do not count: caches, ARP, the client learning the clock.
const WARM_UP: u64 = 20;

/// What can be measured: methods of `ontime apply`; `rt-default`, which is `vanilla` on an RT kernel; outsourced
/// sockets; the limit; and whatever is in force on a real host.
pub const CASES: [&str; 10] = [
    "vanilla",
    "rt-default",
    "threaded",
    "exclusive",
    "partitioned",
    "outsourcing",
    "outsourcing-interrupt",
    "outsourcing-only",
    HOST_PROCESS,
    AS_IS,
];

/// The limit: the same server without a VM.
pub const HOST_PROCESS: &str = "host-process";

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
    pub(crate) fn method(&self) -> &str {
        match self.name.as_str() {
            "rt-default" => "vanilla",
            "outsourcing" | "outsourcing-interrupt" | HOST_PROCESS => "partitioned",
            "outsourcing-only" => "threaded",
            method => method,
        }
    }

    /// Whether it needs the guest module.
    pub fn is_outsourced(&self) -> bool {
        matches!(self.place(), Place::Outsourced(_))
    }

    /// Where the server runs.
    pub(crate) fn place(&self) -> Place {
        match self.name.as_str() {
            "outsourcing" | "outsourcing-only" => Place::Outsourced(Wake::Idle),
            "outsourcing-interrupt" => Place::Outsourced(Wake::Interrupt),
            HOST_PROCESS => Place::Process,
            _ => Place::Vm,
        }
    }

    pub(crate) fn label(&self) -> String {
        let words = match self.name.as_str() {
            "vanilla" => "stock kernel without PREEMPT_RT, RT vCPU and vNIC threads at FIFO",
            "rt-default" => "PREEMPT_RT kernel with its defaults, RT vCPU and vNIC threads at FIFO",
            "threaded" => "the paper's threaded interrupt handling: Table 2's priorities, NAPI not threaded",
            "exclusive" => "the paper's exclusive CPU: one CPU for the RT group, everything else on the rest",
            "partitioned" => "Ontime: every NAPI threaded, one priority table for the whole path",
            "outsourcing" => "Ontime: as partitioned, and the VM's sockets are the host's; its halt ends, no interrupt",
            "outsourcing-interrupt" => "as outsourcing, but arrivals interrupt the guest",
            "outsourcing-only" => "outsourced sockets on the host path of threaded",
            HOST_PROCESS => "the same server as a process of the host, under partitioned: the limit",
            AS_IS => "the host as it stands",
            other => other,
        };
        words.to_owned()
    }
}

/// What to measure on one host.
#[derive(Debug, Clone)]
pub struct Plan {
    /// What answers, and who asks.
    pub workload: Workload,
    /// Lines of the host's `host.toml`, above what names its NICs.
    pub settings: Vec<String>,
    /// Words for the command line of the RT guest's kernel (emulated hosts).
    pub appended: Vec<String>,
    /// In this order.
    pub cases: Vec<Case>,
    /// What `ontime trace` looks for in the host meanwhile ([`crate::segments`]); none where it does not run.
    pub traced: Option<Depth>,
    /// Counted requests a case, at least.
    pub requests: u64,
    /// Seed of the gaps between requests.
    pub seed: u64,
}

/// Boots the host, starts the VMs (a real one has both) and measures every case. A case that fails is passed to
/// `missing` with its name, and the rest is measured, as long as the host lives.
///
/// # Errors
/// The host or a bulk VM does not come up.
pub fn measure(
    plan: &Plan,
    ground: Ground<'_>,
    progress: &mut dyn FnMut(&str),
    missing: &mut dyn FnMut(&str, MeasureError),
) -> Result<Vec<MethodResult>, MeasureError> {
    let outsourced = plan.cases.iter().any(Case::is_outsourced);
    let mut seat = Seat::new(plan.workload.server(), &ground, outsourced, progress)?;
    let settings: String = plan.settings.iter().map(|line| format!("{line}\n")).collect();
    let config = server::CONFIG.map(|(name, text)| (name, format!("{settings}{text}")));
    let config: Vec<(&str, &str)> = config.iter().map(|(name, text)| (*name, text.as_str())).collect();
    if let Ground::Emulated(site, _) = &ground {
        append(site, &plan.appended)?;
    }
    let host = ground.start(&BULK_VMS, &config, progress)?;
    trial::each(
        host,
        &plan.cases,
        |case| case.name.clone(),
        missing,
        |host, case, results| {
            seat.put(host, case.place(), progress)?;
            let mut result = measure_case(host, plan, case, progress)?;
            result.notes.extend(plan.settings.iter().map(|line| format!("host.toml: {line}")));
            result.notes.extend(plan.appended.iter().map(|word| format!("the RT guest's kernel: {word}")));
            results.push(result);
            Ok(())
        },
    )
}

/// Has these words on the command line of the RT guest's kernel (`lab-vm`).
fn append(site: &Site, words: &[String]) -> Result<(), MeasureError> {
    let path = site.dir.join("files").join(format!("append-{}", RT_VM.name));
    let write = || {
        path.parent().map_or(Ok(()), fs::create_dir_all)?;
        fs::write(&path, words.join("\n"))
    };
    write().map_err(|source| MeasureError::File { path: path.clone(), source })
}

/// Measures one case.
fn measure_case(
    host: &mut Host,
    plan: &Plan,
    case: &Case,
    progress: &mut dyn FnMut(&str),
) -> Result<MethodResult, MeasureError> {
    let name = format!("{}-{}", case.name, case.load.name());
    progress(&format!("{}, {}: applying", case.name, case.load.words()));
    if case.name == "vanilla" && host.target().is_some() && host.shell("uname -v")?.contains("PREEMPT_RT") {
        let said = "vanilla is a kernel without PREEMPT_RT, and this host's has it: its defaults are rt-default";
        return Err(HardwareError::NotHere(said.to_owned()).into());
    }
    host.apply(case.method())?;
    let trial = Trial {
        method: &case.name,
        label: &case.label(),
        load: case.load,
        requests: Requests::Client { workload: plan.workload, count: plan.requests + WARM_UP, seed: plan.seed },
        warmup: WARM_UP,
    };
    let Some(depth) = plan.traced else {
        return trial.run(host, progress);
    };
    host.lab()?;
    let trace = Trace::start(host, &name, depth)?;
    let measured = trial.run(host, progress);
    // Now that the flood is over it has the time to write its report; and it must not be there in the next case.
    let segments = trace.finish(host);
    let mut result = measured?;
    segments?.add_to(&mut result);
    Ok(result)
}
