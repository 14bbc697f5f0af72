//! `rt-server`: Access'18, IV-A and B. A simple RT server in a VM, beside two VMs that receive TCP at full speed.
//!
//! In: which [`Case`]s on which emulated host. Out: a [`MethodResult`] for each. One [`measure`] is one boot of the
//! host: three VMs are started as a user would (QEMU, vhost-net, bridges), `ontime daemon` runs, and each case is a
//! method that `ontime apply` switches to. Requests come from outside; so does the flood (iperf3); so do all times.

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use ontime_lab::images::Images;
use ontime_lab::{Lab, LabError, Machine};
use thiserror::Error;

use crate::bulk::{self, BulkFlows};
use crate::client::{self, ClientConfig, ClientError};
use crate::pcap::PcapError;
use crate::schema::{Clock, MethodResult, Run};
use crate::wire::{self, RtFlow};

/// The RT server's port: sockperf's own default.
const RT_PORT: u16 = 11_111;
/// iperf3's port.
const BULK_PORT: u16 = 5_201;
/// The RT VM's address on the RT network.
const RT_VM: &str = "10.1.0.2";
/// The bulk VMs' names and addresses on the bulk network.
const BULK_VMS: [(&str, &str); 2] = [("bulk1", "10.2.0.2"), ("bulk2", "10.2.0.3")];
/// TCP connections to each bulk VM.
const STREAMS: &str = "4";
/// Real time that a command in the emulated host may take.
const LIMIT: Duration = Duration::from_secs(300);
/// Real time that a guest may take to boot, and how often it is tried: emulated SVM hangs some guests (docs/lab.md).
const BOOT_LIMIT: Duration = Duration::from_secs(45);
/// Boots of a VM before it is given up.
const BOOTS: u32 = 12;
/// Frames of the bulk capture that show the flood has started, bytes.
const FLOODING: u64 = 2_000_000;
/// Requests at the start of each case that do not count: caches, ARP, the client learning the clock.
const WARM_UP: u64 = 20;

/// Rules that make the RT VM's class known to the daemon.
const TENANTS: &str = "[[tenant]]\nname = \"rt\"\nclass = \"rt\"\nlevel = 0\n";

/// A method under a load.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Case {
    /// The name in results: a method of `ontime apply`, or `rt-default` (`vanilla` on an RT kernel).
    pub name: String,
    /// Whether the bulk VMs are flooded.
    pub flood: bool,
}

impl Case {
    fn method(&self) -> &str {
        if self.name == "rt-default" { "vanilla" } else { &self.name }
    }

    fn label(&self) -> String {
        let words = match self.name.as_str() {
            "vanilla" => "stock kernel without PREEMPT_RT, RT vCPU and vNIC threads at FIFO",
            "rt-default" => "PREEMPT_RT kernel with its defaults, RT vCPU and vNIC threads at FIFO",
            "threaded" => "the paper's threaded interrupt handling: Table 2's priorities, NAPI not threaded",
            "exclusive" => "the paper's exclusive CPU: one CPU for the RT group, everything else on the rest",
            "partitioned" => "Ontime: every NAPI threaded, one priority table for the whole path",
            other => other,
        };
        if self.flood { words.to_owned() } else { format!("{words}; no flood") }
    }
}

/// What to measure on one emulated host.
#[derive(Debug, Clone)]
pub struct Plan {
    /// The host.
    pub machine: Machine,
    /// In this order.
    pub cases: Vec<Case>,
    /// Counted requests a case, at least.
    pub requests: u64,
    /// Seed of the gaps between requests.
    pub seed: u64,
    /// Where the captures and logs go.
    pub dir: PathBuf,
    /// The `ontime` binary.
    pub binary: PathBuf,
}

/// Why a measurement failed.
#[derive(Debug, Error)]
pub enum RtServerError {
    /// The emulated host.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// The client.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A capture.
    #[error(transparent)]
    Capture(#[from] PcapError),
    /// A file.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// The system's word.
        source: std::io::Error,
    },
    /// The flood does not flow.
    #[error("the flood to {vm} does not flow: iperf3 said: {said}")]
    Flood {
        /// To which VM.
        vm: String,
        /// What iperf3 printed.
        said: String,
    },
    /// The host's CPU accounting.
    #[error("the emulated host's CPU use cannot be read from {0:?}")]
    Accounting(String),
}

/// Boots the host, starts the VMs and measures every case.
///
/// # Errors
/// The host or a VM does not come up, a method cannot be applied, the server does not answer.
pub fn measure(
    plan: &Plan,
    images: &Images,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<MethodResult>, RtServerError> {
    let mut host = Host::start(plan, images, progress)?;
    let mut results = Vec::new();
    for case in &plan.cases {
        results.push(host.measure(plan, case, progress)?);
    }
    host.lab.power_off()?;
    Ok(results)
}

struct Host {
    lab: Lab,
    kernel: String,
    clock: Clock,
    cpus: u8,
}

impl Host {
    fn start(plan: &Plan, images: &Images, progress: &mut dyn FnMut(&str)) -> Result<Self, RtServerError> {
        progress("booting the emulated host");
        let mut lab = Lab::start(&plan.machine, images, &plan.dir, &plan.binary)?;
        for (name, role, net, address) in [("rt", "rt", "rt", RT_VM)]
            .into_iter()
            .chain(BULK_VMS.map(|(name, address)| (name, "bulk", "bulk", address)))
        {
            boot_vm(&mut lab, [name, role, net, address], progress)?;
        }
        let rules = plan.dir.join("files/tenants.toml");
        fs::write(&rules, TENANTS).map_err(|source| RtServerError::File { path: rules, source })?;
        let start = "mkdir -p /etc/ontime && cp /lab/tenants.toml /etc/ontime/ && \
                     { ontime daemon > /lab/daemon.log 2>&1 & } && \
                     for try in $(seq 100); do ontime status > /dev/null 2>&1; [ $? -le 1 ] && exit 0; sleep 0.1; done; \
                     cat /lab/daemon.log; exit 1";
        lab.check(&["sh", "-c", start], LIMIT)?;
        let clock = match plan.machine.clock {
            ontime_lab::Clock::Virtual => Clock::Virtual,
            ontime_lab::Clock::Real => Clock::Real,
        };
        let kernel = images.kernel_version(plan.machine.kernel)?;
        Ok(Self { lab, kernel, clock, cpus: plan.machine.cpus })
    }

    fn measure(
        &mut self,
        plan: &Plan,
        case: &Case,
        progress: &mut dyn FnMut(&str),
    ) -> Result<MethodResult, RtServerError> {
        let name = if case.flood { case.name.clone() } else { format!("{} without flood", case.name) };
        progress(&format!("{name}: applying"));
        let apply = format!(
            "ontime apply --method {method} > /lab/{method}.applied 2>&1; status=$?; ontime ps > /lab/{method}.threads; \
             [ $status -le 1 ] || {{ cat /lab/{method}.applied; exit $status; }}",
            method = case.method()
        );
        self.lab.check(&["sh", "-c", &apply], LIMIT)?;
        let captures = [self.lab.capture("rt"), self.lab.capture("bulk")];
        let flood = if case.flood { Some(Flood::start(&mut self.lab)?) } else { None };
        self.lab.stamp_arrivals(true)?;
        let offsets = captures.clone().map(|path| size(&path));
        let before = self.cpu_time()?;
        self.requests(plan, &captures, &name, progress)?;
        let after = self.cpu_time()?;
        self.lab.stamp_arrivals(false)?;
        if let Some(flood) = flood {
            flood.stop()?;
        }
        let quiet = if case.flood { "" } else { "-quiet" };
        let cut = |capture: &Path, from, nic: &str| {
            let cut = plan.dir.join(format!("{}{quiet}-{nic}.pcap", case.name));
            slice(capture, from, &cut).map(|()| cut)
        };
        let ([rt_all, bulk_all], [rt_from, bulk_from]) = (&captures, offsets);
        let rt_capture = cut(rt_all, rt_from, "rt")?;
        let bulk_capture = cut(bulk_all, bulk_from, "bulk")?;
        let mut flow = RtFlow::new(RT_PORT);
        flow.warmup = WARM_UP;
        let wire = wire::analyse(&rt_capture, flow)?;
        let flows = BulkFlows { ports: vec![BULK_PORT], window: wire.span_ns };
        let bulk = if case.flood { Some(bulk::analyse(&bulk_capture, flows)?) } else { None };
        // A flood's capture is large, and its sums are in the result.
        let _ = fs::remove_file(&bulk_capture);
        Ok(MethodResult::new(&Run {
            method: &case.name,
            label: &case.label(),
            kernel: &self.kernel,
            clock: self.clock,
            cpus: u32::from(self.cpus),
            flood: case.flood,
            wire: &wire,
            bulk: bulk.as_ref(),
            cpu_share: after.share_since(&before, self.cpus),
        }))
    }

    /// Sends the requests from this process's namespace, and watches the host meanwhile.
    fn requests(
        &mut self,
        plan: &Plan,
        captures: &[PathBuf],
        name: &str,
        progress: &mut dyn FnMut(&str),
    ) -> Result<(), RtServerError> {
        let server: SocketAddr = SocketAddr::new(std::net::IpAddr::from([10, 1, 0, 2]), RT_PORT);
        let mut config = ClientConfig::new(server, plan.requests + WARM_UP, plan.seed);
        if self.clock == Clock::Virtual {
            config.captures = captures.to_vec();
            config.scale = 5.0;
        }
        let mut failure = None;
        let mut told = Instant::now();
        let outcome = client::run(&config, |at| {
            if let Err(error) = self.lab.alive() {
                failure = Some(error);
                return ControlFlow::Break(());
            }
            if told.elapsed() > Duration::from_secs(5) {
                told = Instant::now();
                progress(&format!("{name}: {at}"));
            }
            ControlFlow::Continue(())
        });
        match failure {
            Some(error) => Err(error.into()),
            None => Ok(outcome.map(|_| ())?),
        }
    }

    /// CPU time that something other than the lab's own spinner used, and the host's uptime.
    fn cpu_time(&mut self) -> Result<CpuTime, RtServerError> {
        let script = "read -r up idle < /proc/uptime; spin=0; pid=$(pgrep -x lab-spin) && read -r spin rest < /proc/$pid/schedstat; \
                      echo $up $idle $spin";
        let text = self.lab.check(&["sh", "-c", script], LIMIT)?;
        CpuTime::parse(&text).ok_or(RtServerError::Accounting(text))
    }
}

/// Starts a VM and waits for its server; a guest that fails under the emulated SVM is started again, and that is said.
fn boot_vm(lab: &mut Lab, vm: [&str; 4], progress: &mut dyn FnMut(&str)) -> Result<(), RtServerError> {
    let [name, role, net, address] = vm;
    for boot in 1.. {
        progress(&format!("booting the VM {name} in it (boot {boot})"));
        lab.check(&["lab-vm", "start", name, role, net, address], LIMIT)?;
        match lab.check(&["lab-vm", "wait", name], BOOT_LIMIT) {
            Ok(_) => break,
            Err(LabError::Timeout { .. } | LabError::Command { .. }) if boot < BOOTS => {
                lab.check(&["lab-vm", "stop", name], LIMIT)?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// `/proc/uptime`, and the run time of the process that stands for idleness on the virtual clock. Seconds.
struct CpuTime {
    uptime: f64,
    idle: f64,
}

impl CpuTime {
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace().map(|word| word.parse::<f64>().ok());
        let (uptime, idle, spin_ns) = (words.next()??, words.next()??, words.next()??);
        Some(Self { uptime, idle: idle + spin_ns / 1e9 })
    }

    fn share_since(&self, before: &Self, cpus: u8) -> Option<f64> {
        let elapsed = (self.uptime - before.uptime) * f64::from(cpus);
        (elapsed > 0.0).then(|| (1.0 - (self.idle - before.idle) / elapsed).clamp(0.0, 1.0))
    }
}

/// The heavy senders: an iperf3 for each bulk VM, in this process's namespace.
struct Flood {
    senders: Vec<(&'static str, Child)>,
}

impl Flood {
    fn start(lab: &mut Lab) -> Result<Self, RtServerError> {
        let capture = lab.capture("bulk");
        let capture = capture.as_path();
        let mut flood = Self { senders: Vec::new() };
        for (vm, address) in BULK_VMS {
            let before = size(capture);
            let start = Instant::now();
            // A server that has not yet noticed the end of the last test is busy: ask again.
            let mut sender = send(address)?;
            while size(capture) < before + FLOODING {
                lab.alive()?;
                if sender.try_wait().ok().flatten().is_some() {
                    if start.elapsed() > Duration::from_secs(60) {
                        return Err(said(vm, sender));
                    }
                    thread::sleep(Duration::from_millis(500));
                    sender = send(address)?;
                }
                thread::sleep(Duration::from_millis(50));
            }
            flood.senders.push((vm, sender));
        }
        Ok(flood)
    }

    /// Ends the flood; it must have flowed until now.
    fn stop(mut self) -> Result<(), RtServerError> {
        for (vm, mut sender) in self.senders.drain(..) {
            if sender.try_wait().ok().flatten().is_some() {
                return Err(said(vm, sender));
            }
            // SIGINT, so that iperf3 takes leave of its server.
            let _ =
                rustix::process::kill_process(rustix::process::Pid::from_child(&sender), rustix::process::Signal::INT);
            let _ = sender.wait();
        }
        Ok(())
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        for (_, sender) in &mut self.senders {
            let _ = sender.kill();
            let _ = sender.wait();
        }
    }
}

fn send(address: &str) -> Result<Child, RtServerError> {
    Command::new("iperf3")
        .args(["-c", address, "-t", "86400", "-i", "0", "-P", STREAMS, "--connect-timeout", "30000"])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(|source| RtServerError::File { path: "iperf3".into(), source })
}

fn said(vm: &str, mut sender: Child) -> RtServerError {
    let mut said = String::new();
    if let Some(mut pipe) = sender.stderr.take() {
        let _ = pipe.read_to_string(&mut said);
    }
    RtServerError::Flood { vm: vm.to_owned(), said: said.trim().to_owned() }
}

fn size(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |data| data.len())
}

/// What was captured since `from`, with the capture's own header. The emulator appends whole records.
fn slice(capture: &Path, from: u64, cut: &Path) -> Result<(), RtServerError> {
    let copy = || -> std::io::Result<()> {
        let mut capture = File::open(capture)?;
        let mut header = [0; 24];
        capture.read_exact(&mut header)?;
        let mut cut = File::create(cut)?;
        cut.write_all(&header)?;
        capture.seek(SeekFrom::Start(from.max(24)))?;
        std::io::copy(&mut capture, &mut cut).map(|_| ())
    };
    copy().map_err(|source| RtServerError::File { path: capture.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spinner_counts_as_idle() {
        let before = CpuTime::parse("100.0 1.0 5000000000").unwrap();
        let after = CpuTime::parse("110.0 1.0 7000000000").unwrap();
        assert!((after.share_since(&before, 1).unwrap() - 0.8).abs() < 1e-9);
        assert!(before.share_since(&before, 1).is_none());
        assert!(CpuTime::parse("1 2").is_none());
        assert!(CpuTime::parse("a b c").is_none());
    }

    #[test]
    fn a_slice_keeps_the_header_and_what_follows() {
        let dir = tempfile::tempdir().unwrap();
        let (whole, cut) = (dir.path().join("a"), dir.path().join("b"));
        let bytes: Vec<u8> = (0..100).collect();
        fs::write(&whole, &bytes).unwrap();
        slice(&whole, 60, &cut).unwrap();
        let expected: Vec<u8> = (0..24).chain(60..100).collect();
        assert_eq!(fs::read(&cut).unwrap(), expected);
        slice(&whole, 0, &cut).unwrap();
        assert_eq!(fs::read(&cut).unwrap(), bytes);
    }
}
