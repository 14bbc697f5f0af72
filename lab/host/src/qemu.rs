//! The emulator's command line for an emulated host. No file is opened here.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::emulator::{CPU, TURN};
use crate::error::LabError;
use crate::events::{EVENTS, Turns};
use crate::images::Images;
use crate::kernel::Kernel;
use crate::link::{Link, Way};
use crate::network::{BULK_TAP, RT_TAP};

/// Default virtual time per instruction, ns, as a power of two: 4 ns.
const ICOUNT_SHIFT: u8 = 2;
/// Also sets the invariant TSC flag. TCG does not offer it although its TSC is invariant, and KVM of an RT kernel does
/// not load without it. From 6.15 on, the kernel parameter `setcpuid` sets it.
const INVARIANT_TSC: &str = ",+invtsc,x-force-features=on";
/// The emulator's random numbers on the virtual clock (RDRAND, the kernel's random seed): the same in every boot, and
/// with them addresses and the keys of hash tables.
const SEED: &str = "1";
/// Date of the emulated host's real-time clock at its start on the virtual clock. From then on it counts instructions.
const DATE: &str = "base=2026-01-01,clock=vm";
/// Range of [`Machine::cpus`], which the emulator's self-test covers.
const CPUS: std::ops::RangeInclusive<u8> = 1..=8;
/// Range of [`Machine::silence_seconds`]: the agent sends a heartbeat every 2 s of the host's time; the maximum is a
/// day.
const SILENCE: std::ops::RangeInclusive<u64> = 30..=86_400;

/// The emulated host's time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Clock {
    /// The number of executed instructions; several CPUs take turns. Results are the same on every machine.
    Virtual,
    /// This machine's time: CPUs run in parallel, and results are noisy.
    Real,
}

impl fmt::Display for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Clock::Virtual => "virtual",
            Clock::Real => "real",
        })
    }
}

impl FromStr for Clock {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "virtual" => Ok(Self::Virtual),
            "real" => Ok(Self::Real),
            _ => Err(format!("clock '{text}' is not one of virtual, real")),
        }
    }
}

/// The clients' side of the emulated host's NICs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Clients {
    /// In the emulated machine, on one more CPU, with its own NICs and in the machine's time (virtual clock).
    Inside,
    /// In this process's namespace and this machine's time (real clock).
    Outside,
    /// There is none, and nothing arrives at the NICs.
    None,
}

impl Clients {
    /// All of them.
    pub const ALL: [Clients; 3] = [Clients::Inside, Clients::Outside, Clients::None];

    /// Those of a machine with this clock for which nothing else is asked.
    pub fn of(clock: Clock) -> Self {
        match clock {
            Clock::Virtual => Clients::Inside,
            Clock::Real => Clients::Outside,
        }
    }
}

impl fmt::Display for Clients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Clients::Inside => "inside",
            Clients::Outside => "outside",
            Clients::None => "none",
        })
    }
}

impl FromStr for Clients {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let named = Clients::ALL.into_iter().find(|clients| clients.to_string() == text);
        named.ok_or_else(|| format!("'{text}' is not one of inside, outside, none"))
    }
}

/// Destination of the emulated host's console.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Console {
    /// To `console.log` in the lab's directory.
    Log,
    /// To this terminal, with a shell on it (real clock).
    Terminal,
}

/// An emulated host.
#[derive(Debug, Clone)]
pub struct Machine {
    /// Clock of the machine.
    pub clock: Clock,
    /// Number of CPUs, 1 to 8.
    pub cpus: u8,
    /// Memory, MiB.
    pub memory_mib: u32,
    /// Number of 2 MiB pages of that memory for guests, 96 per guest.
    pub huge_pages: u32,
    /// Kernel of the host.
    pub kernel: Kernel,
    /// Words added to the kernel's command line.
    pub kernel_arguments: Vec<String>,
    /// Destination of the console.
    pub console: Console,
    /// Real seconds without a sign of life after which the host counts as hung, 30 to 86,400.
    pub silence_seconds: u64,
    /// Bytes captured of each frame of the RT NIC, at most. The bulk NIC's capture has headers only.
    pub captured_bytes: u32,
    /// Virtual time per instruction, ns, as a power of two. 2 (4 ns) runs fastest, and is sufficient if time is not
    /// measured; experiments use 0 (1 ns).
    pub icount_shift: u8,
    /// The clients' side.
    pub clients: Clients,
    /// The link of each NIC to clients inside, if not the usual one ([`Link::default`]).
    pub link: Option<Link>,
    /// Number of the host's last CPUs that its kernel isolates (`isolcpus`), as it does the clients' CPU. One CPU is
    /// never isolated.
    pub isolated_cpus: u8,
    /// Whether the emulator logs what enters the CPUs, in `events.log`, and the turns that it logs
    /// ([`crate::events`]). For CPUs that take turns.
    pub events: Option<Turns>,
}

/// Bytes of a frame that contain its headers.
const HEADERS: u32 = 96;

impl Machine {
    /// A machine with this clock and kernel: 4 GiB; on the virtual clock one CPU and clients inside, on the real clock
    /// two CPUs and clients outside.
    pub fn new(clock: Clock, kernel: Kernel) -> Self {
        let cpus = if clock == Clock::Virtual { 1 } else { 2 };
        Self {
            clock,
            cpus,
            memory_mib: 4096,
            huge_pages: 480,
            kernel,
            kernel_arguments: Vec::new(),
            console: Console::Log,
            silence_seconds: 180,
            captured_bytes: HEADERS,
            icount_shift: ICOUNT_SHIFT,
            clients: Clients::of(clock),
            link: None,
            isolated_cpus: 0,
            events: None,
        }
    }

    /// # Errors
    /// A sentence with the allowed range.
    pub fn check(&self) -> Result<(), LabError> {
        if !SILENCE.contains(&self.silence_seconds) {
            let (least, most) = SILENCE.into_inner();
            return Err(LabError::Machine(format!("--silence {}: {least} to {most} seconds", self.silence_seconds)));
        }
        let clients = self.clients;
        let wrong = match self.clock {
            Clock::Real if self.has_client_cpu() => Some("clients inside are in virtual time"),
            Clock::Virtual if clients == Clients::Outside => Some("clients outside are in this machine's time"),
            _ => None,
        };
        if let Some(wrong) = wrong {
            let other = if self.clock == Clock::Real { "leave out --clock real" } else { "add --clock real" };
            return Err(LabError::Machine(format!("{wrong}: leave out --clients {clients}, or {other}")));
        }
        let (least, most) = (*CPUS.start(), CPUS.end() - u8::from(self.has_client_cpu()));
        if !(least..=most).contains(&self.cpus) {
            let beside = if self.has_client_cpu() { ", beside that of clients inside" } else { "" };
            return Err(LabError::Machine(format!("--cpus {}: {least} to {most} CPUs{beside}", self.cpus)));
        }
        if self.link.is_some() && !self.has_client_cpu() {
            let said = "--link is between the host and clients inside (virtual clock), which this host does not have";
            return Err(LabError::Machine(said.into()));
        }
        if self.events.is_some() && (self.clock == Clock::Real || self.emulated_cpus() == 1) {
            let said = "--events: several CPUs on the virtual clock have this log: --clients inside, or --cpus 2";
            return Err(LabError::Machine(said.into()));
        }
        Ok(())
    }

    /// Whether one more CPU is the clients'.
    pub fn has_client_cpu(&self) -> bool {
        self.clients == Clients::Inside
    }

    /// The link of each NIC to clients inside; none to others.
    pub fn link(&self) -> Option<Link> {
        self.has_client_cpu().then(|| self.link.unwrap_or_default())
    }

    /// The number of emulated CPUs: the host's, and the last one for clients if they have one.
    fn emulated_cpus(&self) -> u8 {
        self.cpus.saturating_add(self.has_client_cpu().into())
    }

    /// Whether the host's time stands still while no command of the agent runs.
    pub(crate) fn time_stops(&self) -> bool {
        self.clock == Clock::Virtual
    }

    fn command_line(&self) -> String {
        let mut words = vec![
            "console=ttyS0".to_owned(),
            "quiet".into(),
            "panic=-1".into(),
            "ontime.root=/dev/vda".into(),
            "init=/usr/local/bin/lab-init".into(),
            // Without it, KVM marks the TSC unstable, and guests lose their clock.
            "setcpuid=constant_tsc".into(),
            "tsc=reliable".into(),
            // On the real clock of a loaded machine, ten ticks may fail to arrive while the kernel waits for four, and
            // it panics.
            "no_timer_check".into(),
            "mitigations=off".into(),
            // Guests' memory: few nested page faults, as on a host set up for RT VMs.
            format!("hugepages={}", self.huge_pages),
        ];
        if self.has_client_cpu() {
            words.push(format!("ontime.clients={}", self.cpus));
        }
        // The host's processes and interrupts do not use these CPUs. The kernel takes one list of them.
        let first = self.cpus.saturating_sub(self.isolated_cpus).max(1);
        let beyond = self.emulated_cpus();
        if first < beyond {
            let last = beyond - 1;
            words.push(format!("isolcpus=domain,managed_irq,{first}-{last}"));
            words.push(format!("irqaffinity=0-{}", first - 1));
            words.push(format!("rcu_nocbs={first}-{last}"));
        }
        if self.console == Console::Terminal {
            words.push("ontime.shell".into());
        }
        words.extend(self.kernel_arguments.iter().cloned());
        words.join(" ")
    }

    /// The emulator's command line for this machine, with its sockets, logs and captures in `dir`.
    pub fn arguments(&self, images: &Images, dir: &Path, initrd: &Path) -> Vec<String> {
        let mut line = Line(images.emulator());
        let at = |name: &str| dir.join(name).to_string_lossy().into_owned();
        line.flag("-nodefaults").flag("-no-user-config").flag("-no-reboot");
        let old = self.kernel == Kernel::Rt612;
        let cpu = if old { format!("{CPU}{INVARIANT_TSC}") } else { CPU.to_owned() };
        line.option("-machine", "q35").option("-cpu", &cpu);
        line.option("-m", &self.memory_mib.to_string()).option("-smp", &self.emulated_cpus().to_string());
        match self.clock {
            Clock::Virtual => {
                line.option("-accel", "tcg,thread=single");
                // The emulator takes two commas for one of the path.
                let log = self.events.map_or_else(String::new, |Turns { from, to }| {
                    format!(",log={},log-from={from},log-to={to}", at(EVENTS).replace(',', ",,"))
                });
                line.option("-icount", &format!("shift={},sleep=off,turn={TURN}{log}", self.icount_shift));
                line.option("-seed", SEED).option("-rtc", DATE)
            }
            Clock::Real => line.option("-accel", "tcg,thread=multi"),
        };
        line.option("-kernel", &images.kernel(self.kernel)).option("-initrd", &initrd.to_string_lossy());
        line.option("-append", &self.command_line());
        for (disk, keep) in [(images.host_disk(), "snapshot=on"), (images.guest_disk(), "readonly=on")] {
            line.option("-drive", &format!("file={disk},if=virtio,format=raw,{keep}"));
        }
        line.option("-virtfs", &format!("local,path={},mount_tag=lab,security_model=none", at("files")));
        line.option("-device", "virtio-serial-pci");
        // The host starts when the lab has connected: a later connection would be an event at any instruction. A
        // machine with a shell has no connection.
        let wait = if self.console == Console::Log { "on" } else { "off" };
        line.option("-chardev", &format!("socket,id=agent,path={},server=on,wait={wait}", at("agent.sock")));
        let stops = if self.time_stops() { ",stops=on" } else { "" };
        line.option("-device", &format!("virtserialport,chardev=agent,name=ontime.agent{stops}"));
        line.option("-qmp", &format!("unix:{},server=on,wait=off", at("qmp.sock")));
        for (nic, tap, number, bytes) in [("rt", RT_TAP, 1, self.captured_bytes), ("bulk", BULK_TAP, 2, HEADERS)] {
            let hub = |id: &str| format!("hubport,id={id},hubid={number}");
            let device = |id: &str, side: u8| format!("e1000e,netdev={id},mac=52:54:00:00:00:{side}{number},romfile=");
            let outside = format!("tap,id={nic},ifname={tap},script=no,downscript=no,vnet_hdr=off");
            line.option("-netdev", &if self.clients == Clients::Outside { outside } else { hub(nic) });
            line.option("-device", &device(nic, 0));
            // Before the capture, which stamps frames when they arrive at the host's NIC and when they leave it.
            for (link, way) in self.link().iter().flat_map(|link| Way::ALL.map(|way| (link, way))) {
                line.option("-object", &link.options(nic, way, dir));
            }
            let capture = at(&format!("{nic}.pcap"));
            line.option("-object", &format!("filter-dump,id={nic}-dump,netdev={nic},file={capture},maxlen={bytes}"));
            if self.has_client_cpu() {
                let client = format!("client-{nic}");
                line.option("-netdev", &hub(&client)).option("-device", &device(&client, 1));
            }
        }
        match self.console {
            Console::Log => line.option("-display", "none").option("-serial", &format!("file:{}", at("console.log"))),
            Console::Terminal => line.flag("-nographic").option("-serial", "mon:stdio"),
        };
        line.0
    }
}

/// The path of a capture in a lab's directory.
pub fn capture(dir: &Path, nic: &str) -> PathBuf {
    dir.join(format!("{nic}.pcap"))
}

struct Line(Vec<String>);

impl Line {
    fn flag(&mut self, flag: &str) -> &mut Self {
        self.0.push(flag.to_owned());
        self
    }

    fn option(&mut self, option: &str, value: &str) -> &mut Self {
        self.flag(option).flag(value)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_out_of_their_bounds_are_refused_on_both_clocks() {
        for (clock, clients) in [(Clock::Virtual, Clients::None), (Clock::Real, Clients::Outside)] {
            let mut machine = Machine { clients, ..Machine::new(clock, Kernel::Rt72) };
            for cpus in 1..=8 {
                machine.cpus = cpus;
                assert!(machine.check().is_ok(), "{cpus}");
            }
            for cpus in [0, 9, u8::MAX] {
                machine.cpus = cpus;
                let message = machine.check().unwrap_err().to_string();
                assert!(message.contains(&format!("--cpus {cpus}: 1 to 8")), "{message}");
            }
        }
        let mut machine = Machine::new(Clock::Virtual, Kernel::Rt72);
        assert!(machine.check().is_ok());
        machine.cpus = 8;
        assert!(machine.check().unwrap_err().to_string().contains("1 to 7 CPUs, beside that of clients inside"));
        for (clock, clients, said) in [
            (Clock::Real, Clients::Inside, "virtual time: leave out --clients inside, or leave out --clock real"),
            (Clock::Virtual, Clients::Outside, "this machine's time: leave out --clients outside, or add --clock real"),
        ] {
            let machine = Machine { clients, ..Machine::new(clock, Kernel::Rt72) };
            assert!(machine.check().unwrap_err().to_string().contains(said), "{said}");
        }
        let mut machine = Machine::new(Clock::Virtual, Kernel::Rt72);
        for silence in [29, 86_401, u64::MAX] {
            machine.silence_seconds = silence;
            assert!(machine.check().is_err(), "{silence}");
        }
    }

    #[test]
    fn the_clients_cpu_and_isolated_ones_are_in_one_list() {
        for (cpus, clients, isolated_cpus, list) in [
            (1, Clients::None, 0, None),
            (2, Clients::None, 0, None),
            (1, Clients::Inside, 0, Some("1-1")),
            (2, Clients::Inside, 1, Some("1-2")),
            (4, Clients::Inside, 2, Some("2-4")),
            (4, Clients::None, 3, Some("1-3")),
            // The first CPU stays the host's.
            (2, Clients::Inside, 2, Some("1-2")),
        ] {
            let machine = Machine { cpus, clients, isolated_cpus, ..Machine::new(Clock::Virtual, Kernel::Rt72) };
            let line = machine.command_line();
            let found = line.split(' ').find_map(|word| word.strip_prefix("isolcpus=domain,managed_irq,"));
            assert_eq!(found, list, "{line}");
        }
    }

    #[test]
    fn the_virtual_clock_has_no_random_number_and_no_date_of_this_machine() {
        let arguments = |clock| {
            let machine = Machine::new(clock, Kernel::Rt72);
            let line = machine.arguments(&Images::at("/i"), Path::new("/d"), Path::new("/d/initrd"));
            line.join(" ")
        };
        let (exact, real) = (arguments(Clock::Virtual), arguments(Clock::Real));
        assert!(exact.contains("-seed 1 -rtc base=2026-01-01,clock=vm"), "{exact}");
        assert!(!real.contains("-seed") && !real.contains("-rtc"), "{real}");
        assert!(exact.contains("agent.sock,server=on,wait=on"), "{exact}");
    }

    #[test]
    fn events_are_logged_where_cpus_take_turns_and_on_request() {
        let clients = Clients::None;
        let mut machine = Machine { cpus: 2, clients, ..Machine::new(Clock::Virtual, Kernel::Rt72) };
        let icount = |machine: &Machine| {
            let line = machine.arguments(&Images::at("/i"), Path::new("/d,e"), Path::new("/d/initrd"));
            line.into_iter().skip_while(|word| word != "-icount").nth(1).unwrap()
        };
        assert_eq!(icount(&machine), format!("shift=2,sleep=off,turn={TURN}"));
        machine.events = Some(Turns { from: 5, to: 9 });
        assert!(machine.check().is_ok());
        assert_eq!(icount(&machine), format!("shift=2,sleep=off,turn={TURN},log=/d,,e/events.log,log-from=5,log-to=9"));
        machine.cpus = 1;
        assert!(machine.check().unwrap_err().to_string().contains("--events"));
        let real = Machine { cpus: 2, events: machine.events, ..Machine::new(Clock::Real, Kernel::Rt72) };
        assert!(real.check().unwrap_err().to_string().contains("--events"));
    }

    #[test]
    fn a_link_is_before_the_capture_and_only_to_clients_inside() {
        let link = Some("1gbit,5us,256".parse().unwrap());
        let without = Machine { link, clients: Clients::None, ..Machine::new(Clock::Virtual, Kernel::Rt72) };
        assert!(without.check().unwrap_err().to_string().contains("--link"));
        let inside = Machine { clients: Clients::Inside, ..without };
        assert!(inside.check().is_ok());
        let line = inside.arguments(&Images::at("/i"), Path::new("/d"), Path::new("/d/initrd")).join(" ");
        for nic in ["rt", "bulk"] {
            let place = |object: String| line.find(&object).unwrap_or_else(|| panic!("{object}: {line}"));
            let links = ["tx", "rx"].map(|way| place(format!("id=link-{nic}-{way},netdev={nic},queue={way}")));
            assert!(links.iter().all(|at| *at < place(format!("filter-dump,id={nic}-dump"))), "{line}");
        }
        let usual = Machine { link: None, ..inside.clone() };
        let of = |machine: Machine| machine.arguments(&Images::at("/i"), Path::new("/d"), Path::new("/i")).join(" ");
        assert!(of(usual).contains("rate=10000000000,delay=5000,packets=1000"));
        assert!(!of(Machine { link: None, clients: Clients::None, ..inside }).contains("link"));
    }

    #[test]
    fn names_read_back() {
        for kernel in Kernel::ALL {
            assert_eq!(kernel.to_string().parse::<Kernel>(), Ok(kernel));
        }
        assert!("5.10".parse::<Kernel>().unwrap_err().contains("6.12-rt"));
        for clients in Clients::ALL {
            assert_eq!(clients.to_string().parse::<Clients>(), Ok(clients));
        }
        assert!("in".parse::<Clients>().unwrap_err().contains("inside, outside, none"));
    }
}
