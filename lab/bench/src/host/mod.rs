//! The host under test, with its VMs and `ontime daemon`, and the operations that every experiment needs.
//!
//! In: a [`PlannedHost`] and the VMs. Out: a [`Host`] that switches methods, sends requests from outside and reads its
//! CPU use. On an emulated host, VMs are started as a user would start them (QEMU, vhost-net, bridges). A real host
//! ([`crate::hardware`]) has VMs of its owner. An experiment does not depend on the kind of host, except where it
//! changes the host's inside: for that it calls [`Host::lab`]. `site` describes the host before it starts; `cpu` reads
//! CPU time, `link` what the link to clients inside has dropped.

mod cpu;
mod link;
mod site;

use std::fs::{self, File};
use std::io::{Read, Seek, SeekFrom, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ontime_lab::Lab;
use ontime_lab::clients::{self, Reading};
use ontime_lab::images::Images;
use ontime_lab::module::HOST;
use ontime_lab::network::RT_TAP;

pub(crate) use self::cpu::CpuTime;
use self::link::LinkLosses;
pub(crate) use self::site::{BULK_VMS, PlannedHost, RT_VM, Site, Vm, boot_vm, machine};
use crate::client::{self, ClientConfig, Peer};
use crate::client_side::Order;
use crate::error::MeasureError;
use crate::hardware::{HardwareError, NO_EXCLUSIVE_CPU, Target};
use crate::paced::Paced;
use crate::pcap::HEADER;
use crate::progress::progress;
use crate::schema::{CLIENTS_INSIDE, Clock, Run};

/// Limit of real time for a command in the emulated host.
const LIMIT: Duration = Duration::from_secs(900);
/// The pseudo-method that leaves a real host's settings as they are.
pub(crate) const AS_IS: &str = "as-is";

/// Rules that make the VMs `rt` and `rt2`, and the processes in cgroup `rt.scope`, RT tenants.
const TENANTS: &str = "[[tenant]]\nname = \"rt\"\nclass = \"rt\"\nlevel = 0\n[[tenant]]\nname = \"rt2\"\nclass \
    = \"rt\"\nlevel = 0\nruntime-cap = 0.5\n[[tenant]]\ncgroup = \"/rt.scope\"\nclass = \"rt\"\nlevel = 0\n";

/// A real-time server on the host itself is not a tenant. Without this setting the kernel's protections would stay on.
const TRUSTED: &str = "[cap]\nuncapped = [\"/trusted\"]\n";

/// The host.
pub struct Host {
    kind: HostKind,
    /// Directory of captures and logs.
    pub dir: PathBuf,
    /// Release of the kernel.
    pub kernel: String,
    /// The clock of all times.
    pub clock: Clock,
    /// Number of CPUs, without the clients' CPU.
    pub cpus: u16,
    /// Whether the clients' side is in the emulated machine ([`crate::client_side`]).
    has_client_cpu: bool,
}

enum HostKind {
    Lab(Box<Lab>),
    Real(Box<Target>),
}

impl Host {
    /// Boots the host, its VMs one after the other, and the daemon. `config` has files for `/etc/ontime`; without
    /// `tenants.toml` among them, the rules are [`TENANTS`].
    pub fn start(site: &Site, images: &Images, vms: &[Vm<'_>], config: &[(&str, &str)]) -> Result<Self, MeasureError> {
        let kernel = images.kernel_version(site.machine.kernel)?;
        let with_module = site.machine.kernel.takes_host_module();
        if with_module {
            HOST.bring(&kernel, &site.dir, &mut |line| progress(line))?;
        }
        progress("booting the emulated host");
        let mut lab = Lab::start(&site.machine, images, &site.dir, &site.programs)?;
        if with_module {
            lab.check(&["insmod", "/lab/ontime_napi.ko"], LIMIT)?;
        }
        for vm in vms {
            boot_vm(&mut lab, vm)?;
        }
        let settings = site.dir.join("files/etc");
        fs::create_dir_all(&settings).map_err(|source| MeasureError::File { path: settings.clone(), source })?;
        // A file of the experiment's own replaces one of these.
        let own = [("tenants.toml", TENANTS), ("daemon.toml", TRUSTED), ("host.toml", "")];
        for (name, text) in own.iter().chain(config) {
            let path = settings.join(name);
            let exclusive = exclusive_cpu(name, text, site.machine.cpus);
            fs::write(&path, format!("{exclusive}{text}")).map_err(|source| MeasureError::File { path, source })?;
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
        let has_client_cpu = site.machine.has_client_cpu();
        Ok(Self { kind: HostKind::Lab(Box::new(lab)), dir, kernel, clock, cpus, has_client_cpu })
    }

    /// A real host, unchanged.
    fn real(mut target: Box<Target>) -> Result<Self, MeasureError> {
        let said = target.shell("uname -r; nproc")?;
        let mut lines = said.lines();
        let (kernel, cpus) = (lines.next().unwrap_or_default().to_owned(), lines.next().unwrap_or_default().parse());
        let cpus = cpus.map_err(|_| MeasureError::Accounting(said.clone()))?;
        // If the client's NICs have no device, the host is not measured by hardware.
        let clock = if target.is_hardware() { Clock::Hardware } else { Clock::Real };
        let dir = target.dir().to_owned();
        Ok(Self { dir, kind: HostKind::Real(target), kernel, clock, cpus, has_client_cpu: false })
    }

    /// The emulated host, for operations that a real host does not allow.
    pub fn lab(&mut self) -> Result<&mut Lab, MeasureError> {
        match &mut self.kind {
            HostKind::Lab(lab) => Ok(lab),
            HostKind::Real(_) => {
                let said = "this takes VMs of the experiment's own, and those of a real host are its owner's";
                Err(HardwareError::NotHere(said.to_owned()).into())
            }
        }
    }

    /// Whether the clients' side is in the emulated machine, on its own CPU.
    pub(crate) fn has_client_cpu(&self) -> bool {
        self.has_client_cpu
    }

    /// The real host, if this is one.
    pub fn target(&self) -> Option<&Target> {
        match &self.kind {
            HostKind::Lab(_) => None,
            HostKind::Real(target) => Some(target),
        }
    }

    /// The capture of the RT network (`rt`) or the bulk network (`bulk`).
    pub fn capture(&self, network: &str) -> PathBuf {
        match &self.kind {
            HostKind::Lab(lab) => lab.capture(network),
            HostKind::Real(target) => target.capture(network),
        }
    }

    /// Checks that the host can still be measured.
    pub fn alive(&mut self) -> Result<(), MeasureError> {
        match &mut self.kind {
            HostKind::Lab(lab) => Ok(lab.alive()?),
            HostKind::Real(target) => Ok(target.alive()?),
        }
    }

    /// Frames that a real host's monitor has missed so far.
    pub fn missed(&self) -> u64 {
        self.target().map_or(0, Target::missed)
    }

    /// Copies the part of a capture from offset `from` up to now into the file `cut`, with the capture's header.
    pub fn cut(&self, capture: &Path, from: u64, cut: &Path) -> Result<(), MeasureError> {
        // The emulator writes each frame to the capture at once; a real monitor may be behind.
        self.catch_up()?;
        slice(capture, from, cut)
    }

    /// Waits until the captures contain all frames that have passed.
    pub fn catch_up(&self) -> Result<(), MeasureError> {
        Ok(self.target().map_or(Ok(()), Target::settle)?)
    }

    /// Notes for the reader of a measurement. `missed` is the monitor's count of missed frames before it.
    pub fn notes(&self, missed: u64) -> Vec<String> {
        let Some(target) = self.target() else {
            return self.has_client_cpu.then(|| CLIENTS_INSIDE.to_owned()).into_iter().collect();
        };
        let missed = target.missed().saturating_sub(missed);
        let lacks =
            format!("the monitor itself missed {missed} frames: some of those that are lost here may be its own");
        let mut notes = vec![target.stamps()];
        notes.extend((missed > 0).then_some(lacks));
        notes
    }

    /// A run on this host without load, of which nothing is known yet.
    pub(crate) fn run<'a>(&'a self, method: &'a str, label: &'a str) -> Run<'a> {
        Run { cpus: self.cpus.into(), ..Run::of(method, label, &self.kernel, self.clock) }
    }

    /// Names and addresses of the bulk VMs.
    pub fn bulk(&self) -> Vec<(String, String)> {
        match &self.kind {
            HostKind::Lab(_) => BULK_VMS.map(|vm| (vm.name.to_owned(), vm.address.to_owned())).into(),
            HostKind::Real(target) => {
                let tenants = target.site().bulk.iter().flat_map(|of| &of.tenants);
                tenants.map(|(name, address)| (name.clone(), address.to_string())).collect()
            }
        }
    }

    /// The client's interface on the RT network.
    pub(crate) fn client_nic(&self) -> &str {
        self.target().map_or(RT_TAP, |target| &target.site().rt.nic)
    }

    /// Runs a shell command in the host. A failure of the command is an error.
    pub fn shell(&mut self, command: &str) -> Result<String, MeasureError> {
        match &mut self.kind {
            HostKind::Lab(lab) => Ok(lab.check(&["sh", "-c", command], LIMIT)?),
            HostKind::Real(target) => Ok(target.shell(command)?),
        }
    }

    /// As [`Self::shell`], but on an emulated host the command runs before all threads of normal priority. For short
    /// commands while the host is busy.
    pub(crate) fn ask(&mut self, command: &str) -> Result<String, MeasureError> {
        match &mut self.kind {
            HostKind::Lab(lab) => Ok(lab.ask(&["sh", "-c", command], LIMIT)?),
            HostKind::Real(target) => Ok(target.shell(command)?),
        }
    }

    /// Switches to a method. The output of `ontime apply` and the list of threads are kept in the lab's files. A method
    /// `exclusive` without its CPU is an error.
    pub fn apply(&mut self, method: &str) -> Result<(), MeasureError> {
        let apply = format!(
            "ontime apply --method {method} > /lab/{method}.applied 2>&1; status=$?; ontime ps > \
             /lab/{method}.threads; [ $status -le 2 ] && ! grep '^{NO_EXCLUSIVE_CPU}' /lab/{method}.applied || \
             {{ cat /lab/{method}.applied; exit 1; }}"
        );
        match &mut self.kind {
            HostKind::Lab(_) => self.ask(&apply).map(|_| ()),
            HostKind::Real(_) if method == AS_IS => Ok(()),
            HostKind::Real(target) => Ok(target.apply(method)?),
        }
    }

    /// Gives the daemon of an emulated host another `host.toml`.
    pub fn configure(&mut self, text: &str) -> Result<(), MeasureError> {
        // The daemon handles the signal before a request that comes a second later.
        self.shell(&format!(
            "printf '%s' '{text}' > /etc/ontime/host.toml; kill -HUP $(pgrep -x -f 'ontime daemon'); sleep 1"
        ))
        .map(|_| ())
    }

    /// Waits until all applied settings are effective: the daemon sets a NIC's moderation twice, 3 s apart (rule
    /// `moderation`). For requests that may follow each other faster than a moderated interrupt.
    pub fn settle(&mut self) -> Result<(), MeasureError> {
        self.shell("sleep 4").map(|_| ())
    }

    /// Undoes the applied method.
    pub fn reset(&mut self) -> Result<(), MeasureError> {
        match &mut self.kind {
            HostKind::Lab(_) => self.ask("ontime reset > /lab/reset 2>&1 || { cat /lab/reset; exit 1; }").map(|_| ()),
            HostKind::Real(target) => Ok(target.reset()?),
        }
    }

    /// Ends the measurement: an emulated host is killed, a real host gets its method back.
    pub fn leave(self) -> Result<(), MeasureError> {
        match self.kind {
            // All results are already outside, so no orderly shutdown is needed.
            HostKind::Lab(_) => Ok(()),
            HostKind::Real(mut target) => Ok(target.leave()?),
        }
    }

    /// Sends sockperf's requests from the clients' side. Checks meanwhile that the host lives.
    pub fn requests(&mut self, config: ClientConfig, name: &str) -> Result<(), MeasureError> {
        if self.has_client_cpu {
            return Order::Requests(config).run(self.lab()?, &mut |line| progress(format_args!("{name}: {line}")));
        }
        let mut peer = client::sockperf(&config)?;
        self.requests_to(&mut peer, &config, name)
    }

    /// As [`Host::requests`], to another server, from clients outside.
    pub(crate) fn requests_to(
        &mut self,
        peer: &mut dyn Peer,
        config: &ClientConfig,
        name: &str,
    ) -> Result<(), MeasureError> {
        let mut failure = None;
        let mut told = Instant::now();
        let outcome = client::run_with(config, peer, |at| {
            if let Err(error) = self.alive() {
                failure = Some(error);
                return ControlFlow::Break(());
            }
            if told.elapsed() > Duration::from_secs(5) {
                told = Instant::now();
                progress(format_args!("{name}: {at}"));
            }
            ControlFlow::Continue(())
        });
        match failure {
            Some(error) => Err(error),
            None => Ok(outcome.map(|_| ())?),
        }
    }

    /// Sends datagrams at a steady rate from the clients' side. Checks meanwhile that the host lives.
    pub fn paced(&mut self, load: &Paced) -> Result<(), MeasureError> {
        self.paced_while(load, None, &mut || ControlFlow::Continue(()))
    }

    /// As [`Self::paced`], until `go_on` returns `Break`. It is called several times per second of real time. Clients
    /// inside also end after `length` of the host's time, by their own clock.
    pub(crate) fn paced_while(
        &mut self,
        load: &Paced,
        length: Option<Duration>,
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<(), MeasureError> {
        load.check()?;
        if self.has_client_cpu {
            return Order::Paced { load: load.clone(), length }.run_while(self.lab()?, &mut |_| {}, go_on);
        }
        let mut failure = None;
        let mut looked = Instant::now();
        load.send(|_| {
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
        })?;
        failure.map_or(Ok(()), Err)
    }

    /// What is on the clients' CPU; nothing if they have none.
    pub(crate) fn clients_cpu(&mut self) -> Result<Reading, MeasureError> {
        if !self.has_client_cpu {
            return Ok(Reading::default());
        }
        let cpu = self.cpus;
        Ok(Reading::parse(&self.ask(clients::READ)?, cpu))
    }

    /// The link to clients inside, and what it has dropped so far.
    pub(crate) fn link_losses(&self) -> Result<LinkLosses, MeasureError> {
        match &self.kind {
            HostKind::Lab(lab) => Ok(LinkLosses::read(lab)?),
            HostKind::Real(_) => Ok(LinkLosses::default()),
        }
    }

    /// CPU time of the host and its users, and the host's uptime.
    pub fn cpu_time(&mut self) -> Result<CpuTime, MeasureError> {
        let text = self.ask(&cpu::read(self.cpus))?;
        CpuTime::parse(&text).ok_or(MeasureError::Accounting(text))
    }
}

/// What a file for `/etc/ontime` of an emulated host begins with: `host.toml` names the last CPU for method
/// `exclusive`, unless it names one itself. Without a name, the method leaves everything where it is.
fn exclusive_cpu(name: &str, text: &str, cpus: u8) -> String {
    if name != "host.toml" || cpus < 2 || text.contains("exclusive_cpu") {
        return String::new();
    }
    format!("exclusive_cpu = {}\n", cpus - 1)
}

/// Present size of a capture, bytes.
pub(crate) fn size(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |data| data.len())
}

/// Copies the capture from offset `from` on, with the capture's own header. The emulator appends whole records.
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
    use ontime_hostnet::HostConfig;
    use ontime_tenants::config::Text;

    use super::*;

    #[test]
    fn a_host_of_several_cpus_has_one_for_method_exclusive() {
        let [(name, text)] = crate::server::CONFIG;
        for (name, text, cpus, wanted) in [
            (name, text, 1, None),
            (name, text, 2, Some(1)),
            (name, "", 7, Some(6)),
            (name, "exclusive_cpu = 0\n[nic.rt0]\nclass = \"rt\"\n", 4, Some(0)),
        ] {
            let mut config = HostConfig::default();
            let file = format!("{}{text}", exclusive_cpu(name, text, cpus));
            config.add(&Text::new("host.toml", file.as_str())).unwrap();
            assert_eq!(config.exclusive_cpu, wanted, "{file}");
        }
        assert_eq!(exclusive_cpu("tenants.toml", TENANTS, 2), "");
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
