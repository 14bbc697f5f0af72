//! The host under measurement: VMs on it, `ontime daemon` in it, and what every experiment needs of it.
//!
//! In: a [`Ground`] and the VMs. Out: a [`Host`] that switches methods, sends requests from outside and reads its CPU
//! use. On an emulated host VMs are started as a user would (QEMU, vhost-net, bridges); a real one
//! ([`crate::hardware`]) has its owner's. An experiment does not know which it has, but where it changes the host's
//! inside: that asks for [`Host::lab`]. `site`: what there is before; `cpu`: CPU time.

mod cpu;
mod site;

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ontime_lab::images::Images;
use ontime_lab::module::HOST;
use ontime_lab::network::RT_TAP;
use ontime_lab::{Lab, LabError};
use thiserror::Error;

pub use self::cpu::CpuTime;
pub use self::site::{BULK_VMS, Ground, RT_VM, Site, Vm, boot_vm, machine};
use crate::client::{self, ClientConfig, ClientError, Peer};
use crate::client_side::Order;
use crate::hardware::{HardwareError, Target};
use crate::paced::{Pace, Paced};
use crate::pcap::{HEADER, PcapError};
use crate::schema::Clock;
use crate::workload::Workload;

/// Real time that a command in the emulated host may take.
const LIMIT: Duration = Duration::from_secs(900);
/// Not a method: whatever is in force on a real host stays.
pub const AS_IS: &str = "as-is";

/// Rules that make the VMs named `rt` and `rt2`, and what runs in the cgroup `rt.scope`, known to the daemon as RT.
const TENANTS: &str = "[[tenant]]\nname = \"rt\"\nclass = \"rt\"\nlevel = 0\n[[tenant]]\nname = \"rt2\"\nclass \
    = \"rt\"\nlevel = 0\nruntime-cap = 0.5\n[[tenant]]\ncgroup = \"/rt.scope\"\nclass = \"rt\"\nlevel = 0\n";

/// A real-time server on the host itself is no tenant: without this it would keep the kernel's protections on.
const TRUSTED: &str = "[cap]\nuncapped = [\"/trusted\"]\n";

/// Why a measurement failed.
#[derive(Debug, Error)]
pub enum MeasureError {
    /// The emulated host.
    #[error(transparent)]
    Lab(#[from] LabError),
    /// The host ended while something else was measured on it.
    #[error("the host had ended before")]
    NoHost,
    /// The real host.
    #[error(transparent)]
    Hardware(#[from] HardwareError),
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
    #[error("the flood to {vm} does not flow: {said}")]
    Flood {
        /// To which VM.
        vm: String,
        /// What is known of it.
        said: String,
    },
    /// A program that the load needs.
    #[error("{program} failed: {said}")]
    Program {
        /// Which.
        program: String,
        /// What is known of it.
        said: String,
    },
    /// The host's CPU accounting.
    #[error("the host's CPU use cannot be read from {0:?}")]
    Accounting(String),
    /// The trace in the host.
    #[error("{path}: not a report of ontime trace: {what}", path = path.display())]
    Trace {
        /// Its report.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// `ontime doctor` in the host.
    #[error("ontime doctor in the emulated host: {0}")]
    Doctor(String),
}

/// The host.
pub struct Host {
    under: Under,
    /// Where captures and logs go.
    pub dir: PathBuf,
    /// Its kernel's release.
    pub kernel: String,
    /// Its clock.
    pub clock: Clock,
    /// Its CPUs, without the clients' own.
    pub cpus: u16,
    /// Whether the clients' side is in the emulated machine ([`crate::client_side`]).
    client_cpu: bool,
}

enum Under {
    Lab(Box<Lab>),
    Real(Box<Target>),
}

impl Host {
    /// Boots it, its VMs one after the other, and the daemon with `config`, files of `/etc/ontime`, besides the rules.
    pub fn start(
        site: &Site,
        images: &Images,
        vms: &[Vm<'_>],
        config: &[(&str, &str)],
        progress: &mut dyn FnMut(&str),
    ) -> Result<Self, MeasureError> {
        let kernel = images.kernel_version(site.machine.kernel)?;
        let with_module = site.machine.kernel.takes_host_module();
        if with_module {
            HOST.bring(&kernel, &site.dir, progress)?;
        }
        progress("booting the emulated host");
        let mut lab = Lab::start(&site.machine, images, &site.dir, &site.programs)?;
        if with_module {
            lab.check(&["insmod", "/lab/ontime_napi.ko"], LIMIT)?;
        }
        for vm in vms {
            boot_vm(&mut lab, vm, progress)?;
        }
        let settings = site.dir.join("files/etc");
        fs::create_dir_all(&settings).map_err(|source| MeasureError::File { path: settings.clone(), source })?;
        for (name, text) in config.iter().chain(&[("tenants.toml", TENANTS), ("daemon.toml", TRUSTED)]) {
            let path = settings.join(name);
            fs::write(&path, text).map_err(|source| MeasureError::File { path, source })?;
        }
        let start = "mkdir -p /etc/ontime && cp /lab/etc/* /etc/ontime/ && \
                     { ontime daemon > /lab/daemon.log 2>&1 & } && \
                     for try in $(seq 100); do ontime status > /dev/null 2>&1; [ $? -le 2 ] && exit 0; sleep 0.1; \
                     done; cat /lab/daemon.log; exit 1";
        lab.check(&["sh", "-c", start], LIMIT)?;
        let clock = match site.machine.clock {
            ontime_lab::Clock::Virtual => Clock::Virtual,
            ontime_lab::Clock::Real => Clock::Real,
        };
        let (dir, cpus) = (site.dir.clone(), u16::from(site.machine.cpus));
        let client_cpu = site.machine.client_cpu;
        Ok(Self { under: Under::Lab(Box::new(lab)), dir, kernel, clock, cpus, client_cpu })
    }

    /// A real host as it stands.
    fn real(mut target: Box<Target>) -> Result<Self, MeasureError> {
        let said = target.shell("uname -r; nproc")?;
        let mut lines = said.lines();
        let (kernel, cpus) = (lines.next().unwrap_or_default().to_owned(), lines.next().unwrap_or_default().parse());
        let cpus = cpus.map_err(|_| MeasureError::Accounting(said.clone()))?;
        // Without a device behind the client's NICs there is no hardware to speak of.
        let clock = if target.is_hardware() { Clock::Hardware } else { Clock::Real };
        Ok(Self { dir: target.dir().to_owned(), under: Under::Real(target), kernel, clock, cpus, client_cpu: false })
    }

    /// The emulated host, for what only that can do.
    pub fn lab(&mut self) -> Result<&mut Lab, MeasureError> {
        match &mut self.under {
            Under::Lab(lab) => Ok(lab),
            Under::Real(_) => {
                let said = "this takes VMs of the experiment's own, and those of a real host are its owner's";
                Err(HardwareError::NotHere(said.to_owned()).into())
            }
        }
    }

    /// Whether the clients' side is in the emulated machine, on a CPU of its own.
    pub fn has_client_cpu(&self) -> bool {
        self.client_cpu
    }

    /// Refuses what only clients outside can do.
    pub(crate) fn needs_clients_outside(&self, what: &str) -> Result<(), MeasureError> {
        if self.client_cpu {
            return Err(LabError::Machine(format!("{what} has clients outside only; leave out --client-cpu")).into());
        }
        Ok(())
    }

    /// The real host, where it is one.
    pub fn target(&self) -> Option<&Target> {
        match &self.under {
            Under::Lab(_) => None,
            Under::Real(target) => Some(target),
        }
    }

    /// The capture of the RT network (`rt`) or the bulk network (`bulk`).
    pub fn capture(&self, network: &str) -> PathBuf {
        match &self.under {
            Under::Lab(lab) => lab.capture(network),
            Under::Real(target) => target.capture(network),
        }
    }

    /// Whether it can still be measured.
    pub fn alive(&mut self) -> Result<(), MeasureError> {
        match &mut self.under {
            Under::Lab(lab) => Ok(lab.alive()?),
            Under::Real(target) => Ok(target.alive()?),
        }
    }

    /// Has arrivals on the RT NIC stamped exactly from now on, or no longer: a real monitor always does.
    pub fn stamp_arrivals(&mut self, on: bool) -> Result<(), MeasureError> {
        match &mut self.under {
            Under::Lab(lab) => Ok(lab.stamp_arrivals(on)?),
            Under::Real(_) => Ok(()),
        }
    }

    /// As `Lab::release_every`; a real wire has no such steps.
    fn release_every(&self, us: Option<u32>) -> Result<(), MeasureError> {
        match &self.under {
            Under::Lab(lab) => Ok(lab.release_every(us)?),
            Under::Real(_) => Ok(()),
        }
    }

    /// Frames that a real host's monitor has missed so far.
    pub fn missed(&self) -> u64 {
        self.target().map_or(0, Target::missed)
    }

    /// What was captured since `from`, all that has passed until now, as a file of its own: [`slice`].
    pub fn cut(&self, capture: &Path, from: u64, cut: &Path) -> Result<(), MeasureError> {
        // The emulator's has all at once.
        self.catch_up()?;
        slice(capture, from, cut)
    }

    /// Waits until the captures have all that has passed.
    pub fn catch_up(&self) -> Result<(), MeasureError> {
        Ok(self.target().map_or(Ok(()), Target::settle)?)
    }

    /// What a reader must know of a stretch that was measured here, before which the monitor had missed so many frames.
    pub fn notes(&self, missed: u64) -> Vec<String> {
        let Some(target) = self.target() else {
            let inside = "the clients' side is a CPU of the emulated machine: its load is in the host's time";
            return self.client_cpu.then(|| inside.to_owned()).into_iter().collect();
        };
        let missed = target.missed().saturating_sub(missed);
        let lacks =
            format!("the monitor itself missed {missed} frames: some of those that are lost here may be its own");
        let mut notes = vec![target.stamps()];
        notes.extend((missed > 0).then_some(lacks));
        notes
    }

    /// Where the server of a workload answers.
    pub fn server(&self, workload: Workload) -> SocketAddr {
        self.target().map_or_else(|| workload.address(), |target| target.site().rt.server)
    }

    /// Names and addresses of the bulk VMs.
    pub fn bulk(&self) -> Vec<(String, String)> {
        match &self.under {
            Under::Lab(_) => BULK_VMS.map(|vm| (vm.name.to_owned(), vm.address.to_owned())).into(),
            Under::Real(target) => {
                let tenants = target.site().bulk.iter().flat_map(|of| &of.tenants);
                tenants.map(|(name, address)| (name.clone(), address.to_string())).collect()
            }
        }
    }

    /// The client's interface on the RT network.
    pub fn client_nic(&self) -> &str {
        self.target().map_or(RT_TAP, |target| &target.site().rt.nic)
    }

    /// Runs a shell command in the host, which must succeed.
    pub fn shell(&mut self, command: &str) -> Result<String, MeasureError> {
        match &mut self.under {
            Under::Lab(lab) => Ok(lab.check(&["sh", "-c", command], LIMIT)?),
            Under::Real(target) => Ok(target.shell(command)?),
        }
    }

    /// As [`Self::shell`], ahead of whatever else the emulated host has at normal priority: for short questions while
    /// it is busy.
    pub(crate) fn ask(&mut self, command: &str) -> Result<String, MeasureError> {
        match &mut self.under {
            Under::Lab(lab) => Ok(lab.ask(&["sh", "-c", command], LIMIT)?),
            Under::Real(target) => Ok(target.shell(command)?),
        }
    }

    /// Switches to a method. What it said, and the threads then, stay in the lab's files.
    pub fn apply(&mut self, method: &str) -> Result<(), MeasureError> {
        let apply = format!(
            "ontime apply --method {method} > /lab/{method}.applied 2>&1; status=$?; ontime ps > \
             /lab/{method}.threads; [ $status -le 2 ] || {{ cat /lab/{method}.applied; exit $status; }}"
        );
        match &mut self.under {
            Under::Lab(_) => self.ask(&apply).map(|_| ()),
            Under::Real(_) if method == AS_IS => Ok(()),
            Under::Real(target) => Ok(target.apply(method)?),
        }
    }

    /// Gives an emulated host's daemon another `host.toml`.
    pub fn configure(&mut self, text: &str) -> Result<(), MeasureError> {
        // The signal is taken before a request that comes a second later.
        self.shell(&format!(
            "printf '%s' '{text}' > /etc/ontime/host.toml; kill -HUP $(pgrep -x -f 'ontime daemon'); sleep 1"
        ))
        .map(|_| ())
    }

    /// Waits until all that was applied holds: the daemon sets a NIC's moderation twice, 3 s apart (rule `moderation`).
    /// For requests that may come sooner after another than a moderated interrupt does.
    pub fn settle(&mut self) -> Result<(), MeasureError> {
        self.shell("sleep 4").map(|_| ())
    }

    /// Undoes whatever is applied.
    pub fn reset(&mut self) -> Result<(), MeasureError> {
        match &mut self.under {
            Under::Lab(_) => self.ask("ontime reset > /lab/reset 2>&1 || { cat /lab/reset; exit 1; }").map(|_| ()),
            Under::Real(target) => Ok(target.reset()?),
        }
    }

    /// Ends the measurement: an emulated host ends, a real one has its method back.
    pub fn leave(self) -> Result<(), MeasureError> {
        match self.under {
            // What was measured is read and outside: it need not end in order.
            Under::Lab(_) => Ok(()),
            Under::Real(mut target) => Ok(target.leave()?),
        }
    }

    /// Sends sockperf's requests from this process's namespace by the host's clock, which these captures carry, and
    /// watches the host meanwhile.
    pub fn requests(
        &mut self,
        config: ClientConfig,
        captures: &[PathBuf],
        name: &str,
        progress: &mut dyn FnMut(&str),
    ) -> Result<(), MeasureError> {
        if self.client_cpu {
            return Order::Requests(config).run(self.lab()?, &mut |line| progress(&format!("{name}: {line}")));
        }
        let mut peer = client::sockperf(&config)?;
        self.requests_to(&mut peer, config, captures, name, progress)
    }

    /// As [`Host::requests`], to another server.
    pub fn requests_to(
        &mut self,
        peer: &mut dyn Peer,
        mut config: ClientConfig,
        captures: &[PathBuf],
        name: &str,
        progress: &mut dyn FnMut(&str),
    ) -> Result<(), MeasureError> {
        self.needs_clients_outside("this server")?;
        if self.clock == Clock::Virtual {
            config.captures = captures.to_vec();
            config.scale = 5.0;
        }
        let mut failure = None;
        let mut told = Instant::now();
        let outcome = client::run_with(&config, peer, |at| {
            if let Err(error) = self.alive() {
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
            Some(error) => Err(error),
            None => Ok(outcome.map(|_| ())?),
        }
    }

    /// Sends a steady rate of datagrams from this process's namespace, by the host's clock, and watches the host
    /// meanwhile.
    pub fn paced(&mut self, load: &Paced) -> Result<(), MeasureError> {
        if self.client_cpu {
            load.check()?;
            return Order::Paced(load.clone()).run(self.lab()?, &mut |_| {});
        }
        self.paced_while(load, &mut || ControlFlow::Continue(()))
    }

    /// As [`Self::paced`], while `go_on` says so, which is asked some times a second of real time.
    pub fn paced_while(
        &mut self,
        load: &Paced,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<(), MeasureError> {
        load.check()?;
        self.needs_clients_outside("a load of no certain end")?;
        self.release_every(Some(Pace::of(load.rate).every_us))?;
        let nic = (self.clock == Clock::Virtual).then(|| self.capture("rt"));
        let sent = self.send_paced(load, nic.as_deref(), go_on);
        self.release_every(None)?;
        sent
    }

    /// `nic` is the capture of an emulated host's NIC, which keeps the rate.
    fn send_paced(
        &mut self,
        load: &Paced,
        nic: Option<&Path>,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<(), MeasureError> {
        let mut failure = None;
        let mut looked = Instant::now();
        let each = |_| {
            if looked.elapsed() < Duration::from_millis(200) {
                return ControlFlow::Continue(());
            }
            looked = Instant::now();
            match self.alive() {
                Ok(()) => go_on(),
                Err(error) => {
                    failure = Some(error);
                    ControlFlow::Break(())
                }
            }
        };
        match nic {
            Some(nic) => load.send_by_releases(nic, each),
            None => load.send(each),
        }?;
        failure.map_or(Ok(()), Err)
    }

    /// CPU time that something other than the lab's own spinner used, and the host's uptime.
    pub fn cpu_time(&mut self) -> Result<CpuTime, MeasureError> {
        let text = self.ask(cpu::READ)?;
        CpuTime::parse(&text).ok_or(MeasureError::Accounting(text))
    }
}

/// Bytes of a capture so far.
pub fn size(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |data| data.len())
}

/// What was captured since `from`, with the capture's own header. The emulator appends whole records.
fn slice(capture: &Path, from: u64, cut: &Path) -> Result<(), MeasureError> {
    let copy = || -> std::io::Result<()> {
        let mut capture = File::open(capture)?;
        let mut header = [0; HEADER];
        capture.read_exact(&mut header)?;
        let mut cut = File::create(cut)?;
        cut.write_all(&header)?;
        capture.seek(SeekFrom::Start(from.max(HEADER as u64)))?;
        std::io::copy(&mut capture, &mut cut).map(|_| ())
    };
    copy().map_err(|source| MeasureError::File { path: capture.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use super::*;

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
