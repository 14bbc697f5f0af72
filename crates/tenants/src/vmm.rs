//! Virtual machine monitors: their executables, and the roles of their threads, by name.
//!
//! Pure. A name alone proves nothing, because a process may choose its threads' names. A thread gets a priority above
//! its vCPUs (vhost, kvm-pit) only if it also has the kernel's own flag, which user space cannot set.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::model::ThreadRole;
use crate::proc::{Stat, printable};

/// A virtual machine monitor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vmm {
    /// QEMU: `qemu-system-*`, `qemu-kvm`, `kvm`.
    Qemu,
    /// Another monitor.
    Other(&'static OtherVmm),
}

/// A monitor other than QEMU.
#[derive(Debug, PartialEq, Eq)]
pub struct OtherVmm {
    /// File names of its program; the first one is its name in messages.
    programs: &'static [&'static str],
    /// Its name for the thread of vCPU number N.
    vcpu: &'static str,
}

/// Sources: cloud-hypervisor `vmm/src/cpu.rs`, firecracker `src/vmm/src/vstate/vcpu.rs`, crosvm
/// `src/crosvm/sys/linux/vcpu.rs`, StratoVirt `cpu/src/lib.rs`, libkrun `src/vmm/src/linux/vstate.rs`, kvmtool
/// `builtin-run.c`, VirtualBox `src/VBox/VMM/VMMR3/VM.cpp`.
static OTHERS: [OtherVmm; 7] = [
    OtherVmm { programs: &["cloud-hypervisor"], vcpu: "vcpuN" },
    OtherVmm { programs: &["firecracker"], vcpu: "fc_vcpu N" },
    OtherVmm { programs: &["crosvm"], vcpu: "crosvm_vcpuN" },
    OtherVmm { programs: &["stratovirt"], vcpu: "CPU N/KVM" },
    // Programs that are linked to libkrun. With crun, the container is the tenant.
    OtherVmm { programs: &["krunvm", "muvm", "krun", "msb", "msbrun", "msbserver"], vcpu: "fc_vcpu N" },
    OtherVmm { programs: &["lkvm", "kvmtool"], vcpu: "kvm-vcpu-N" },
    OtherVmm { programs: &["VBoxHeadless", "VirtualBoxVM", "VBoxSDL"], vcpu: "EMT-N" },
];

/// A program of unknown name that has KVM's descriptors and has run a guest.
static UNNAMED: OtherVmm = OtherVmm { programs: &["its monitor"], vcpu: "vcpuN" };

/// Prefixes before a vCPU's number in thread names, for all monitors. Some put a separator between the two (`vcpu_0`).
const VCPU_PREFIXES: [&str; 6] = ["CPU ", "vcpu", "fc_vcpu", "crosvm_vcpu", "kvm-vcpu", "EMT-"];

/// The vCPU number in a monitor's thread name, if any.
pub fn vcpu_number(comm: &str) -> Option<u32> {
    if comm == "EMT" || comm.starts_with("ALL CPUs/") {
        return Some(0);
    }
    let number =
        |prefix: &&str| comm.strip_prefix(*prefix)?.split('/').next()?.trim_start_matches([' ', '-', '_']).parse().ok();
    VCPU_PREFIXES.iter().find_map(number)
}

/// How certainly a program's file name shows that a process is a monitor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NameMatch {
    /// It is the monitor's name, possibly with a version or an architecture.
    Sure,
    /// It only begins like a monitor's name (`firecracker-containerd`): the process is a monitor if it has vCPU threads
    /// or KVM's descriptors.
    IfItRunsAGuest,
}

impl Vmm {
    /// The monitor for an executable, from the target of `/proc/PID/exe`.
    pub fn of_executable(target: &str) -> Option<(Vmm, NameMatch)> {
        let name = file_name(target)?;
        let is_system = |rest: &str| rest.starts_with("system-") || rest.contains("-system-");
        if name.strip_prefix("qemu-").is_some_and(is_system) {
            return Some((Vmm::Qemu, NameMatch::Sure));
        }
        if let Some(sure) = ["qemu-kvm", "kvm"].iter().find_map(|program| named_after(name, program)) {
            return Some((Vmm::Qemu, sure));
        }
        OTHERS.iter().find_map(|other| {
            let sure = other.programs.iter().find_map(|program| named_after(name, program))?;
            Some((Vmm::Other(other), sure))
        })
    }

    /// The monitor of an unknown program, by its threads' names.
    pub(crate) fn of_threads<'a>(mut names: impl Iterator<Item = &'a str>) -> Vmm {
        let is_qemus = |name: &str| name.starts_with("CPU ") && vcpu_number(name).is_some();
        if names.any(is_qemus) { Vmm::Qemu } else { Vmm::Other(&UNNAMED) }
    }

    /// How to make the monitor name its vCPU threads.
    pub fn naming(self) -> String {
        match self {
            Vmm::Qemu => "start QEMU with -name guest=NAME,debug-threads=on".to_owned(),
            Vmm::Other(OtherVmm { programs, vcpu }) => {
                let program = programs.first().copied().unwrap_or_default();
                format!(
                    "start its guest, if it has none yet: {program} itself names the vCPUs of one that runs `{vcpu}` \
                     and has no option for it. If it has, take a version of {program} that does"
                )
            }
        }
    }

    /// The role of a thread of its process.
    pub fn role(self, stat: &Stat) -> ThreadRole {
        if stat.is_user_worker() {
            // A vhost worker since Linux 6.4. io_uring's workers have this flag, too, and belong to the emulator.
            return if stat.comm.starts_with("vhost-") { ThreadRole::Vhost } else { ThreadRole::Emulator };
        }
        self.role_of_name(&stat.comm)
    }

    /// The role of a user thread of this name.
    pub(crate) fn role_of_name(self, comm: &str) -> ThreadRole {
        match self {
            Vmm::Qemu => qemu_role(comm),
            Vmm::Other(_) => vcpu_number(comm).map_or(ThreadRole::Emulator, ThreadRole::Vcpu),
        }
    }
}

/// Whether an executable, the target of `/proc/PID/exe`, may be a device process.
pub fn may_serve(executable: &str) -> bool {
    file_name(executable) == Some("ontime")
}

/// The VM that `ontime device --vm NAME` serves, by its arguments.
pub fn served(arguments: &[String]) -> Option<&str> {
    let mut rest = arguments.iter().map(String::as_str).skip(1).skip_while(|word| *word != "device");
    rest.next()?;
    while let Some(word) = rest.next() {
        match word.strip_prefix("--vm") {
            Some("") => return rest.next(),
            Some(value) => return value.strip_prefix('='),
            None => {}
        }
    }
    None
}

/// The file name in the target of `/proc/PID/exe`, also if the program's file was replaced by an upgrade.
pub(crate) fn file_name(target: &str) -> Option<&str> {
    let name = target.strip_suffix(" (deleted)").unwrap_or(target).rsplit('/').next()?;
    // A program that runs from memory has a name that its loader chose.
    Some(unwrapped(name.strip_prefix("memfd:").unwrap_or(name)))
}

/// The name of a program behind a wrapper, which is a hidden file beside it: `.NAME-wrapped` on NixOS (with a `_` for
/// each further wrapper; nixpkgs `make-wrapper.sh`), `.NAME-real` on Guix (`guix/build/utils.scm`, `wrap-program`).
fn unwrapped(name: &str) -> &str {
    let hidden = name.strip_prefix('.').map(|hidden| hidden.trim_end_matches('_'));
    let own = hidden.and_then(|hidden| ["-wrapped", "-real"].iter().find_map(|word| hidden.strip_suffix(word)));
    own.map_or(name, unwrapped)
}

/// Whether a file has a program's name, possibly with a suffix.
fn named_after(name: &str, program: &str) -> Option<NameMatch> {
    let rest = name.strip_prefix(program)?;
    if rest.is_empty() {
        return Some(NameMatch::Sure);
    }
    let more = rest.strip_prefix(['-', '.', '_'])?;
    // Versions, architectures, and words of builds and packages.
    let says_nothing = |word: &str| {
        let word = word.strip_prefix('v').unwrap_or(word);
        word.starts_with(|c: char| c.is_ascii_digit())
            || matches!(
                word,
                "x86"
                    | "aarch64"
                    | "arm64"
                    | "amd64"
                    | "riscv64"
                    | "static"
                    | "musl"
                    | "gnu"
                    | "linux"
                    | "debug"
                    | "release"
                    | "bin"
                    | "orig"
                    | "real"
                    | "wrapped"
                    | "distrib"
            )
    };
    let sure = more.split(['-', '.', '_']).all(says_nothing);
    Some(if sure { NameMatch::Sure } else { NameMatch::IfItRunsAGuest })
}

/// QEMU's thread names, as with `-name debug-threads=on`. Source: QEMU `accel/kvm/kvm-accel-ops.c`,
/// `accel/tcg/tcg-accel-ops-*.c`, `iothread.c`.
fn qemu_role(comm: &str) -> ThreadRole {
    if let Some(number) = vcpu_number(comm).filter(|_| comm.starts_with("CPU ") || comm.starts_with("ALL CPUs/")) {
        return ThreadRole::Vcpu(number);
    }
    match comm.strip_prefix("IO ") {
        Some("mon_iothread") | None => ThreadRole::Emulator,
        Some(_) => ThreadRole::Iothread,
    }
}

/// A kernel thread that works for a VM, and the thread or process number in its name.
///
/// `vhost-N` before Linux 6.4 (`drivers/vhost/vhost.c`), `kvm-pit/N` (`arch/x86/kvm/i8254.c`).
pub fn kernel_thread(comm: &str) -> Option<(ThreadRole, i32)> {
    let (role, number) = match comm.strip_prefix("vhost-") {
        Some(number) => (ThreadRole::Vhost, number),
        None => (ThreadRole::KvmPit, comm.strip_prefix("kvm-pit/")?),
    };
    Some((role, number.parse().ok()?))
}

/// Values from QEMU's command line.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct QemuArguments {
    /// The guest's name.
    pub name: Option<String>,
    /// `-uuid`, or that of `-smbios type=1`.
    pub uuid: Option<String>,
    /// Unix sockets on which QEMU listens for QMP.
    pub qmp_sockets: Vec<String>,
    /// Interfaces in `ifname=`.
    pub interfaces: Vec<String>,
}

/// QEMU's options without their dashes, each with the following argument.
fn options(arguments: &[String]) -> impl Iterator<Item = (&str, &str)> {
    let pairs = arguments.iter().zip(arguments.iter().skip(1));
    pairs.filter_map(|(option, value)| {
        let option = option.strip_prefix('-')?;
        Some((option.strip_prefix('-').unwrap_or(option), value.as_str()))
    })
}

/// Parses QEMU's arguments. Options have one or two dashes; a doubled comma in a value is a comma.
pub fn qemu_arguments(arguments: &[String]) -> QemuArguments {
    let mut found = QemuArguments::default();
    // QEMU uses this as the guest's UUID if there is no -uuid; Proxmox VE starts QEMU this way.
    let mut smbios = None;
    // A monitor may be named before its character device.
    let (mut sockets, mut monitors) = (BTreeMap::new(), Vec::new());
    for (option, value) in options(arguments) {
        match option {
            "name" => found.name = option_value(value, "guest", true).or(found.name),
            "uuid" => found.uuid = Some(value.to_ascii_lowercase()),
            "smbios" if option_value(value, "type", false).as_deref() == Some("1") => {
                smbios = option_value(value, "uuid", false).map(|uuid| uuid.to_ascii_lowercase()).or(smbios);
            }
            "qmp" | "qmp-pretty" => match value.strip_prefix("chardev:") {
                Some(device) => monitors.push(device.to_owned()),
                None => found.qmp_sockets.extend(qmp_socket(value)),
            },
            "mon" if option_value(value, "mode", false).as_deref() == Some("control") => {
                monitors.extend(option_value(value, "chardev", true));
            }
            "chardev" => sockets.extend(listening_socket(value)),
            "netdev" | "nic" | "net" => found.interfaces.extend(option_value(value, "ifname", false)),
            _ => {}
        }
    }
    found.uuid = found.uuid.or(smbios);
    found.qmp_sockets.extend(monitors.iter().filter_map(|device| sockets.remove(device)));
    found
}

/// QEMU options that delay the guest's requests at any priority of its threads.
///
/// `kernel-irqchip=split` is not one: interrupts of devices with MSI-X still use irqfd (`target/i386/kvm/kvm.c`,
/// `kvm_arch_init_irq_routing`), and many vCPUs or a guest IOMMU require it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Delay {
    /// `kernel-irqchip=off`: there is no irqfd.
    NoIrqchip,
    /// A device without MSI-X (`vectors=0`): irqfd works with MSI-X only (`hw/virtio/virtio-pci.c`,
    /// `virtio_pci_set_guest_notifiers`).
    NoVectors(String),
    /// A device whose doorbell is handled by the vCPU's own thread (`ioeventfd=off`).
    NoDoorbell(String),
    /// `-overcommit cpu-pm=on`: the guest halts without a VM exit.
    HiddenIdle,
}

impl Delay {
    /// The option to leave out at the next start.
    pub fn remedy(&self) -> String {
        match self {
            Delay::NoIrqchip => "take kernel-irqchip=off out of -machine or -accel".to_owned(),
            Delay::NoVectors(device) => format!("take vectors=0 out of -device {device}"),
            Delay::NoDoorbell(device) => {
                format!(
                    "take ioeventfd=off out of -device {device} (libvirt: <driver ioeventfd='on'/> of the interface)"
                )
            }
            Delay::HiddenIdle => "take cpu-pm=on out of -overcommit (libvirt: <qemu:commandline>)".to_owned(),
        }
    }
}

impl fmt::Display for Delay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Delay::NoIrqchip => f.write_str(
                "KVM does not keep its interrupt controllers (kernel-irqchip=off): each interrupt goes through QEMU's \
                 main thread and lock",
            ),
            Delay::NoVectors(device) => write!(
                f,
                "device {device} has no MSI-X (vectors=0): KVM cannot be given its interrupts directly (irqfd), so \
                 each goes through QEMU's main thread and lock"
            ),
            Delay::NoDoorbell(device) => write!(
                f,
                "device {device} has no ioeventfd: its vCPU leaves the guest for QEMU with each packet, and vhost is \
                 not used"
            ),
            Delay::HiddenIdle => f.write_str(
                "its vCPUs halt without leaving the guest (-overcommit cpu-pm=on): to the host they compute all the \
                 time, so that an idle one keeps others of its level waiting and is paused by its runtime cap, and a \
                 device process cannot wake it (wake = \"idle\")",
            ),
        }
    }
}

/// Whether QEMU's arguments ask for no machine. libvirt starts such a process for a moment, to learn QEMU's features
/// (`src/qemu/qemu_process.c`, `qemuProcessQMPLaunch`). The last type counts.
pub(crate) fn has_no_machine(arguments: &[String]) -> bool {
    let machines = options(arguments).filter(|(option, _)| matches!(*option, "machine" | "M"));
    machines.filter_map(|(_, value)| option_value(value, "type", true)).last().as_deref() == Some("none")
}

/// The options in QEMU's arguments that delay its guest's requests.
pub fn delays(arguments: &[String]) -> Vec<Delay> {
    let mut found = BTreeSet::new();
    for (option, value) in options(arguments) {
        match option {
            "machine" | "M" | "accel" => {
                let named = ["kernel-irqchip", "kernel_irqchip"].iter().find_map(|key| option_value(value, key, false));
                if named.is_some_and(|word| is_off(&word)) {
                    found.insert(Delay::NoIrqchip);
                }
            }
            "device" => {
                let driver = option_value(value, "driver", true).filter(|driver| is_virtio(driver));
                let says = |key| option_value(value, key, false);
                found.extend(driver.iter().flat_map(|driver| of_device(driver, says("vectors"), says("ioeventfd"))));
            }
            "global" => {
                // DRIVER.PROPERTY=VALUE
                let Some(((driver, property), word)) =
                    value.split_once('=').and_then(|(name, word)| Some((name.split_once('.')?, word.to_owned())))
                else {
                    continue;
                };
                let says = |key| (property == key).then(|| word.clone());
                found.extend(
                    is_virtio(driver)
                        .then(|| of_device(driver, says("vectors"), says("ioeventfd")))
                        .into_iter()
                        .flatten(),
                );
            }
            "overcommit" if option_value(value, "cpu-pm", false).is_some_and(|word| is_on(&word)) => {
                found.insert(Delay::HiddenIdle);
            }
            _ => {}
        }
    }
    found.into_iter().collect()
}

/// A network card's driver, or one for a device process.
fn is_virtio(driver: &str) -> bool {
    driver.starts_with("virtio-net") || driver.starts_with("vhost-user")
}

fn of_device(driver: &str, vectors: Option<String>, ioeventfd: Option<String>) -> impl Iterator<Item = Delay> {
    let none = vectors.is_some_and(|number| number.parse() == Ok(0u32));
    let driver = || printable(driver.as_bytes());
    let vectors = none.then(|| Delay::NoVectors(driver()));
    let doorbell = ioeventfd.is_some_and(|word| is_off(&word)).then(|| Delay::NoDoorbell(driver()));
    vectors.into_iter().chain(doorbell)
}

/// QEMU's words for "off" (`qapi/qapi-util.c`, `qapi_bool_parse`).
fn is_off(word: &str) -> bool {
    matches!(word, "off" | "no" | "false" | "n")
}

fn is_on(word: &str) -> bool {
    matches!(word, "on" | "yes" | "true" | "y")
}

/// The VM's name on another monitor's command line, if any.
pub fn other_name(arguments: &[String]) -> Option<String> {
    // `--id NAME` (Firecracker), `--name NAME` (kvmtool), `-name NAME` (StratoVirt), `--comment NAME` (VirtualBox).
    let names = ["--id", "--name", "-name", "--comment"];
    arguments.iter().enumerate().find_map(|(at, option)| match option.split_once('=') {
        Some((option, value)) if names.contains(&option) => Some(value.to_owned()),
        _ if names.contains(&option.as_str()) => arguments.get(at + 1).cloned(),
        _ => None,
    })
}

/// The VM's UUID on another monitor's command line, if any: `-uuid UUID` (StratoVirt, as QEMU), `--platform uuid=UUID`
/// (Cloud Hypervisor), `--startvm UUID` (VirtualBox, which also takes a name there).
pub(crate) fn other_uuid(arguments: &[String]) -> Option<String> {
    let words = arguments.iter().zip(arguments.iter().skip(1));
    let pairs = arguments
        .iter()
        .filter_map(|word| word.split_once('='))
        .chain(words.map(|(word, next)| (word.as_str(), next.as_str())));
    let of_option = |(option, value): (&str, &str)| match option {
        "--platform" => option_value(value, "uuid", false),
        "--startvm" | "-startvm" | "-s" => Some(value.to_owned()),
        _ => None,
    };
    let own = pairs.filter_map(of_option).find(|value| is_uuid(value)).map(|uuid| uuid.to_ascii_lowercase());
    own.or_else(|| qemu_arguments(arguments).uuid)
}

/// Whether a text has the form of a UUID.
pub(crate) fn is_uuid(text: &str) -> bool {
    let groups = text.split('-').map(str::len);
    groups.eq([8, 4, 4, 4, 12]) && text.chars().all(|c| c == '-' || c.is_ascii_hexdigit())
}

/// The value of a key in `a=b,c=d`, or in JSON. With `implied` the first item may be the bare value.
fn option_value(text: &str, key: &str, implied: bool) -> Option<String> {
    if text.starts_with('{') {
        let object: serde_json::Value = serde_json::from_str(text).ok()?;
        return match object.get(key)? {
            serde_json::Value::String(text) => Some(text.clone()),
            serde_json::Value::Bool(on) => Some(if *on { "on" } else { "off" }.to_owned()),
            serde_json::Value::Number(number) => Some(number.to_string()),
            _ => None,
        };
    }
    let items = split_options(text);
    let named = items.iter().find_map(|item| item.strip_prefix(key)?.strip_prefix('=').map(str::to_owned));
    named.or_else(|| items.first().filter(|first| implied && !first.contains('=') && !first.is_empty()).cloned())
}

fn split_options(text: &str) -> Vec<String> {
    let mut items = vec![String::new()];
    let mut rest = text.chars().peekable();
    while let Some(c) = rest.next() {
        if c == ',' && rest.next_if_eq(&',').is_none() {
            items.push(String::new());
        } else if let Some(item) = items.last_mut() {
            item.push(c);
        }
    }
    items
}

/// The path in `unix:PATH,server=on,wait=off`, only if QEMU listens.
fn qmp_socket(value: &str) -> Option<String> {
    let address = value.strip_prefix("unix:")?;
    let path = split_options(address).into_iter().next()?;
    (listens(address) && !path.is_empty()).then_some(path)
}

/// The identifier and the path of `-chardev socket,id=ID,path=PATH,server=on,wait=off`, if QEMU listens there.
fn listening_socket(value: &str) -> Option<(String, String)> {
    let is_socket = option_value(value, "backend", true).as_deref() == Some("socket");
    let path = option_value(value, "path", false).filter(|path| is_socket && listens(value) && !path.is_empty())?;
    Some((option_value(value, "id", false)?, path))
}

/// Whether QEMU listens on a socket with a path, by the socket's options.
fn listens(options: &str) -> bool {
    let says = |key| option_value(options, key, false).is_some_and(|word| is_on(&word));
    (says("server") || split_options(options).iter().any(|item| item == "server")) && !says("abstract")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::class::Policy;

    fn stat(comm: &str, flags: u32) -> Stat {
        Stat {
            tid: 1,
            comm: comm.to_owned(),
            state: 'S',
            ppid: 1,
            flags,
            start_time: 1,
            last_cpu: 0,
            guest_time: 0,
            policy: Policy::BULK,
        }
    }

    #[test]
    fn the_last_machine_counts() {
        let has_none = |line: &str| {
            let line: Vec<String> = line.split(' ').map(str::to_owned).collect();
            has_no_machine(&line)
        };
        assert!(has_none("qemu -M q35 -nographic -machine none,accel=kvm:tcg"));
        assert!(has_none("qemu -machine type=none -machine accel=kvm"));
        assert!(!has_none("qemu -machine none -machine q35"));
        assert!(!has_none("qemu -machine none --machine type=pc,accel=kvm -name none"));
        assert!(!has_none("qemu -name machine -cpu none"));
    }

    #[test]
    fn a_device_process_says_whom_it_serves() {
        let served_by = |line: &str| {
            let arguments: Vec<String> = line.split(' ').map(str::to_owned).collect();
            served(&arguments).map(str::to_owned)
        };
        assert_eq!(served_by("ontime device --vm a"), Some("a".to_owned()));
        assert_eq!(served_by("/usr/bin/ontime --run-dir /r device --netns n --vm=b"), Some("b".to_owned()));
        for other in [
            "ontime",
            "ontime device",
            "ontime device --vm",
            "ontime device --vms a",
            "ontime trace --vm a",
            "device --vm a",
        ] {
            assert_eq!(served_by(other), None, "{other}");
        }
        assert!(may_serve("/usr/bin/ontime (deleted)") && !may_serve("/usr/bin/ontime-old") && !may_serve(""));
    }

    #[test]
    fn executables_are_known_by_name_also_after_an_upgrade() {
        for path in [
            "/usr/bin/qemu-system-x86_64",
            "/usr/bin/qemu-system-aarch64 (deleted)",
            "/usr/libexec/qemu-kvm",
            "/usr/bin/kvm",
        ] {
            assert_eq!(Vmm::of_executable(path), Some((Vmm::Qemu, NameMatch::Sure)), "{path}");
        }
        for path in ["/usr/bin/qemu-img", "/usr/bin/kvmd", "/bin/bash", "/usr/bin/vm", ""] {
            assert_eq!(Vmm::of_executable(path), None, "{path}");
        }
    }

    /// Releases and packages of other monitors have suffixes; names of other programs only begin like a monitor's.
    #[test]
    fn monitors_are_known_by_the_stem_of_their_names() {
        for path in [
            "/nix/store/x/bin/.qemu-kvm-wrapped",
            "/nix/store/x/bin/.qemu-system-ppc64-wrapped__",
            "/nix/store/x/bin/..qemu-kvm-wrapped-wrapped",
            "/gnu/store/x/bin/.qemu-system-riscv64-real (deleted)",
            "/usr/bin/qemu-lite-system-x86_64",
            "/opt/kata/bin/qemu-virtiofs-system-aarch64",
            "/usr/libexec/qemu-kvm.distrib",
            "/usr/bin/kvm.real (deleted)",
        ] {
            assert_eq!(Vmm::of_executable(path), Some((Vmm::Qemu, NameMatch::Sure)), "{path}");
        }
        for path in [
            "/opt/firecracker",
            "/srv/firecracker-v1.7.0-aarch64",
            "/srv/jail/firecracker_debug",
            "/usr/bin/cloud-hypervisor-v44.0",
            "/usr/bin/.cloud-hypervisor-wrapped",
            "/usr/bin/stratovirt",
            "/usr/bin/lkvm-static",
            "/usr/lib/virtualbox/VBoxHeadless",
            "/usr/lib/virtualbox/VBoxSDL",
            "/usr/bin/muvm",
        ] {
            let found = Vmm::of_executable(path);
            assert!(matches!(found, Some((Vmm::Other(_), NameMatch::Sure))), "{path}: {found:?}");
        }
        for path in ["/usr/bin/firecracker-containerd", "/usr/bin/kvm-ok", "/usr/bin/crosvm-tool", "/bin/krun.sh"] {
            let found = Vmm::of_executable(path);
            assert!(matches!(found, Some((_, NameMatch::IfItRunsAGuest))), "{path}: {found:?}");
        }
    }

    #[test]
    fn threads_are_told_by_name_and_what_the_kernel_runs_by_its_flag() {
        let role = |comm, flags| Vmm::Qemu.role(&stat(comm, flags));
        assert_eq!(role("CPU 0/KVM", 0), ThreadRole::Vcpu(0));
        assert_eq!(role("CPU 12/TCG", 0), ThreadRole::Vcpu(12));
        assert_eq!(role("ALL CPUs/TCG", 0), ThreadRole::Vcpu(0));
        assert_eq!(role("IO iothread1", 0), ThreadRole::Iothread);
        assert_eq!(role("IO mon_iothread", 0), ThreadRole::Emulator);
        assert_eq!(role("worker", 0), ThreadRole::Emulator);
        assert_eq!(role("CPU x/KVM", 0), ThreadRole::Emulator);
        assert_eq!(role("vhost-4242", 0x4000), ThreadRole::Vhost);
        assert_eq!(role("vhost-4242", 0), ThreadRole::Emulator, "a name anybody can take");
        assert_eq!(role("iou-wrk-4242", 0x4010), ThreadRole::Emulator);
        let (firecracker, _) = Vmm::of_executable("/firecracker").unwrap();
        assert_eq!(firecracker.role(&stat("fc_vcpu 3", 0)), ThreadRole::Vcpu(3));
        assert_eq!(firecracker.role(&stat("fc_api", 0)), ThreadRole::Emulator);
    }

    #[test]
    fn every_monitors_vcpus_are_known() {
        for (comm, number) in [
            ("CPU 3/KVM", Some(3)),
            ("vcpu12", Some(12)),
            ("fc_vcpu 0", Some(0)),
            ("crosvm_vcpu7", Some(7)),
            ("kvm-vcpu-2", Some(2)),
            ("EMT-1", Some(1)),
            ("EMT", Some(0)),
            ("fc_vcpu2", Some(2)),
            ("vcpu_4", Some(4)),
            ("vcpu-11", Some(11)),
            ("ALL CPUs/TCG", Some(0)),
            ("vcpu", None),
            ("vcpu_throttle", None),
            ("fc_api", None),
            ("EMT-x", None),
            ("CPU", None),
        ] {
            assert_eq!(vcpu_number(comm), number, "{comm}");
        }
        let of_threads = |names: &[&str]| Vmm::of_threads(names.iter().copied());
        assert_eq!(of_threads(&["worker", "CPU 0/KVM"]), Vmm::Qemu);
        assert!(matches!(of_threads(&["vcpu0"]), Vmm::Other(_)));
    }

    #[test]
    fn kernel_threads_name_their_vm() {
        assert_eq!(kernel_thread("vhost-4242"), Some((ThreadRole::Vhost, 4242)));
        assert_eq!(kernel_thread("kvm-pit/77"), Some((ThreadRole::KvmPit, 77)));
        assert_eq!(kernel_thread("vhost-x"), None);
        assert_eq!(kernel_thread("kworker/0:1"), None);
    }

    fn read(line: &[&str]) -> QemuArguments {
        qemu_arguments(&line.iter().map(|s| (*s).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn names_come_in_every_form_qemu_takes() {
        for (value, name) in [
            ("guest=rt1,debug-threads=on", Some("rt1")),
            ("debug-threads=on,guest=rt1", Some("rt1")),
            ("plain", Some("plain")),
            ("plain,process=x", Some("plain")),
            ("a,,b", Some("a,b")),
            ("debug-threads=on", None),
            ("", None),
        ] {
            assert_eq!(read(&["qemu", "-name", value]).name.as_deref(), name, "{value}");
            assert_eq!(read(&["qemu", "--name", value]).name.as_deref(), name, "{value}");
        }
        assert_eq!(read(&["qemu", "-name"]).name, None);
    }

    #[test]
    fn the_uuid_is_smbios_where_there_is_no_other() {
        let (own, smbios) =
            ("0d6fb2e5-aaaa-4bbb-8ccc-1234567890ab", "type=1,manufacturer=x,uuid=0D6FB2E5-0000-4bbb-8ccc-1234567890ab");
        let uuid = |line: &[&str]| read(line).uuid;
        assert_eq!(uuid(&["kvm", "-smbios", smbios]).as_deref(), Some("0d6fb2e5-0000-4bbb-8ccc-1234567890ab"));
        assert_eq!(uuid(&["kvm", "-uuid", own, "-smbios", smbios]).as_deref(), Some(own));
        assert_eq!(uuid(&["kvm", "-smbios", smbios, "--uuid", own]).as_deref(), Some(own));
        assert_eq!(uuid(&["kvm", "-smbios", "type=0,vendor=x", "-smbios", "type=2,uuid=z"]), None);
    }

    #[test]
    fn other_monitors_vms_have_the_name_that_they_were_given() {
        let name = |line: &str| other_name(&line.split(' ').map(str::to_owned).collect::<Vec<_>>());
        for (line, expected) in [
            ("firecracker --id a --api-sock x", Some("a")),
            ("lkvm run --name b", Some("b")),
            ("stratovirt -machine q35 -name c", Some("c")),
            ("VBoxHeadless --comment d --startvm 1", Some("d")),
            ("crosvm run --name=e x", Some("e")),
            ("cloud-hypervisor --api-socket x", None),
            ("firecracker --id", None),
        ] {
            assert_eq!(name(line).as_deref(), expected, "{line}");
        }
    }

    #[test]
    fn monitors_count_only_where_qemu_listens() {
        let sockets = |value| read(&["qemu", "-qmp", value]).qmp_sockets;
        assert_eq!(sockets("unix:/run/a.sock,server=on,wait=off"), ["/run/a.sock"]);
        assert_eq!(sockets("unix:/run/a.sock,server,nowait"), ["/run/a.sock"]);
        assert!(sockets("unix:/run/a.sock").is_empty());
        assert!(sockets("tcp:localhost:4444,server").is_empty());
        assert!(sockets("stdio").is_empty());
        assert!(sockets("unix:@name,server=on,abstract=on").is_empty());
    }

    #[test]
    fn monitors_are_found_by_the_character_device_that_they_use() {
        let socket = "socket,id=ctl,path=/run/cell.sock,server=on,wait=off";
        for (line, wanted) in [
            (&["-chardev", socket, "-mon", "chardev=ctl,mode=control"][..], Some("/run/cell.sock")),
            (&["-mon", "ctl,mode=control,pretty=on", "-chardev", socket], Some("/run/cell.sock")),
            (&["--chardev", "socket,path=/run/m,,1,server,nowait,id=m", "--mon", "m,mode=control"], Some("/run/m,1")),
            (&["-chardev", "backend=socket,id=m,server=yes,path=/run/m", "-qmp", "chardev:m"], Some("/run/m")),
            (&["-qmp-pretty", "unix:/run/p,server=on,wait=off"], Some("/run/p")),
            // The human monitor, another monitor's device, another kind of device, a socket that does not listen,
            // libvirt's descriptors.
            (&["-chardev", socket, "-mon", "chardev=ctl,mode=readline"], None),
            (&["-chardev", socket, "-mon", "chardev=ctl"], None),
            (&["-chardev", socket, "-mon", "chardev=other,mode=control"], None),
            (&["-chardev", socket], None),
            (&["-chardev", "pipe,id=m,path=/run/m,server=on", "-mon", "m,mode=control"], None),
            (&["-chardev", "socket,id=m,path=/run/m,server=off", "-mon", "m,mode=control"], None),
            (&["-chardev", "socket,id=m,fd=31,server=on,wait=off", "-mon", "m,mode=control"], None),
        ] {
            let found = read(&[&["qemu"], line].concat()).qmp_sockets;
            assert_eq!(found, Vec::from_iter(wanted), "{line:?}");
        }
        let both = ["-mon", "ctl,mode=control", "-qmp", "unix:/run/q,server=on", "-chardev", socket];
        assert_eq!(read(&[&["qemu"], &both[..]].concat()).qmp_sockets, ["/run/q", "/run/cell.sock"]);
    }

    #[test]
    fn interfaces_are_read_from_both_forms() {
        let line =
            ["qemu", "-netdev", "tap,id=n0,ifname=tap7,script=no", "-netdev", r#"{"type":"tap","ifname":"tap8"}"#];
        assert_eq!(read(&line).interfaces, ["tap7", "tap8"]);
        assert!(read(&["qemu", "-netdev", "{broken"]).interfaces.is_empty());
    }

    #[test]
    fn what_delays_a_guest_is_read_from_every_form() {
        let card = || "virtio-net-pci".to_owned();
        for (option, value, delay) in [
            ("-machine", "q35,accel=kvm,kernel-irqchip=off", Some(Delay::NoIrqchip)),
            ("-M", "pc,kernel_irqchip=off", Some(Delay::NoIrqchip)),
            ("-accel", "kvm,kernel-irqchip=no", Some(Delay::NoIrqchip)),
            ("-machine", "q35,kernel_irqchip=split", None),
            ("-machine", "q35,kernel-irqchip=on", None),
            ("-machine", "kernel-irqchip", None),
            ("-device", "virtio-net-pci,netdev=n0,vectors=0", Some(Delay::NoVectors(card()))),
            ("--device", "virtio-net-pci,netdev=n0,vectors=4", None),
            ("-device", r#"{"driver":"virtio-net-pci","netdev":"n0","vectors":0}"#, Some(Delay::NoVectors(card()))),
            (
                "-device",
                r#"{"driver":"virtio-net-pci","ioeventfd":false,"vectors":4}"#,
                Some(Delay::NoDoorbell(card())),
            ),
            ("-device", "driver=virtio-net-pci,ioeventfd=off", Some(Delay::NoDoorbell(card()))),
            (
                "-device",
                "vhost-user-test-device-pci,vectors=0",
                Some(Delay::NoVectors("vhost-user-test-device-pci".to_owned())),
            ),
            ("-device", "virtio-balloon-pci,vectors=0,ioeventfd=off", None),
            ("-device", "{broken", None),
            ("-global", "virtio-net-pci.vectors=0", Some(Delay::NoVectors(card()))),
            ("-global", "virtio-net-pci.ioeventfd=off", Some(Delay::NoDoorbell(card()))),
            ("-global", "driver=virtio-net-pci,property=vectors,value=2", None),
            ("-overcommit", "mem-lock=on,cpu-pm=on", Some(Delay::HiddenIdle)),
            ("-overcommit", "mem-lock=on,cpu-pm=off", None),
            ("-overcommit", "mem-lock=on", None),
        ] {
            let line = ["qemu", option, value].map(str::to_owned);
            assert_eq!(delays(&line), Vec::from_iter(delay), "{option} {value}");
        }
        let many = ["qemu", "-device", "virtio-net,vectors=0", "-device", "virtio-net,vectors=0,ioeventfd=off"]
            .map(str::to_owned);
        assert_eq!(delays(&many).len(), 2, "one each, however many such devices there are");
    }

    proptest! {
        #[test]
        fn no_arguments_make_it_panic(
            line in proptest::collection::vec(
                "-{0,2}(name|uuid|platform|startvm|qmp|mon|chardev|netdev|device|global|accel|\\PC{0,20})",
                0..12,
            ),
        ) {
            let _ = qemu_arguments(&line);
            let _ = delays(&line);
            let _ = (other_name(&line), other_uuid(&line));
        }

        #[test]
        fn no_name_makes_it_panic(comm in "\\PC{0,15}") {
            let _ = Vmm::Qemu.role(&stat(&comm, 0));
            let _ = kernel_thread(&comm);
            let _ = Vmm::of_executable(&comm);
        }
    }
}
