//! Which interrupts belong to which network interface, by the device tree.
//!
//! In: the interfaces with their place in `/sys/devices`, the PCI functions, and the interrupts with a handler. Out:
//! the interrupts of each interface. An interrupt that the driver links to a NAPI instance (netlink family `netdev`)
//! belongs to that instance's interface. Apart from that:
//!
//! 1. If the interface's own device lists interrupts with handlers, the interface has these: `msi_irqs` (PCI,
//!    platform), `irqs` (auxiliary devices, 6.11), `irq` (a PCI function's line).
//! 2. Otherwise the interface has the interrupts that the device tree gives its device ([`in_device_tree`]), those
//!    whose handlers have the name of its device (`30be0000.ethernet`), and those whose handlers have its own name
//!    (`eth0`), if there are none those with its driver's name (`enc28j60`). An interrupt that another device lists is
//!    not among them. A name is weak evidence: a driver keeps the name that the interface had when the driver requested
//!    the interrupt, and another interface may have that name by now.
//! 3. The nearest device above that lists interrupts, or whose name a handler has (`xhci-hcd:usb1`), is a fallback: a
//!    bridge, a function that demultiplexes or a bus controller also has interrupts for other purposes. Behind a bus
//!    that carries each packet (SPI, SDIO, USB), the controller's interrupts are always part of the packets' path.
//! 4. The interrupt of a PHY has the name of its MDIO bus, which many drivers derive from the NIC's device
//!    (`f8008000.ethernet-ffffffff:01`). The PHY receives no packet, so the interface has this interrupt in addition to
//!    others, never alone.
//! 5. If exactly one interface that is up has no interrupt by then, it has those that no device and no interface has
//!    and whose handlers have the name of one interface ([`assign_earlier_name`]).
//!
//! A NIC whose interfaces are in other network namespaces has interrupts by the same steps ([`nics_elsewhere`]). Those
//! that no interface here has are a network's, and no other device's; the others serve both ([`Irq::elsewhere`]).
//!
//! Some drivers receive packets through portals of the processor, or name handlers after nothing of the above. Their
//! interfaces share these interrupts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use ontime_base::files::note;

use super::Irq;
use crate::knob::IrqId;
use crate::roots::{entries, read, read_number};

/// A network interface that may have interrupts.
#[derive(Debug, Default)]
pub(super) struct Port {
    /// Name of the interface.
    pub(super) name: String,
    /// Path of its device, without symbolic links.
    pub(super) device: PathBuf,
    /// Name of its driver.
    pub(super) driver: Option<String>,
    /// Administratively up. While the interface is down, its driver may have no handler on the device's line.
    pub(super) up: bool,
    /// Interrupts that the driver links to the interface's NAPI instances.
    pub(super) by_driver: BTreeSet<u32>,
    /// The interface represents a port of a switch in the NIC (`phys_port_name` as `pf0vf1`), and the NIC's own
    /// interface has the interrupts.
    pub(super) representor: bool,
}

/// An interface's device, or a device above it, and the interrupts that are its own.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Owner {
    path: PathBuf,
    irqs: BTreeSet<u32>,
}

/// What the device tree and the handlers' names show about an interface.
#[derive(Debug, Default)]
struct Evidence {
    /// The interface's own device.
    own: Option<Owner>,
    /// The own device lists its interrupts. No name counts then, also while none of them has a handler.
    listed: bool,
    /// The nearest device above.
    above: Option<Owner>,
    /// Interrupts of PHYs on the device's MDIO bus.
    phys: BTreeSet<u32>,
    /// Interrupts with the name of the interface or of its driver.
    named: BTreeSet<u32>,
}

impl Evidence {
    fn is_silent(&self) -> bool {
        self.own.is_none() && self.named.is_empty()
    }

    fn owners(&self) -> impl Iterator<Item = &Owner> {
        self.own.iter().chain(&self.above)
    }
}

/// The interrupts of each of these interfaces. An interrupt that several interfaces of a device share is in each of
/// their sets.
pub(super) fn assign(ports: &[Port], irqs: &[Irq], pci: &Pci) -> Vec<BTreeSet<u32>> {
    let listed: Vec<Option<Owner>> = ports.iter().map(|port| lister(port, irqs, pci)).collect();
    // An interrupt that a device lists as its own belongs to no other device, whatever its handler's name is.
    let mut known: BTreeSet<u32> = listed.iter().flatten().flat_map(|owner| &owner.irqs).copied().collect();
    known.extend(ports.iter().flat_map(|port| &port.by_driver));
    let found = ports.iter().zip(listed).map(|(port, listed)| of_device(port, listed, irqs, &known));
    let mut all: Vec<Evidence> = found.collect();
    known.extend(all.iter().flat_map(Evidence::owners).flat_map(|owner| &owner.irqs));
    for (port, evidence) in ports.iter().zip(&mut all).filter(|(_, evidence)| !evidence.listed) {
        evidence.named = named_after_port(port, ports, irqs, &known);
    }
    known.extend(all.iter().flat_map(|evidence| &evidence.named));
    let nameless = |evidence: &Evidence| evidence.is_silent() && !evidence.listed;
    for (port, evidence) in ports.iter().zip(&mut all).filter(|(_, evidence)| nameless(evidence)) {
        evidence.named = named_after_driver(port, irqs, &known);
    }
    for (port, evidence) in ports.iter().zip(&mut all) {
        let needed = evidence.is_silent() || (!evidence.listed && is_behind_bus(&port.device));
        evidence.above.take_if(|_| !needed);
    }
    let found = ports.iter().zip(&all).map(|(port, evidence)| {
        let has = |owner: &Owner, irq: u32| is_of(port, owner, irq, ports, &all, irqs);
        let owned = evidence.owners().flat_map(|owner| owner.irqs.iter().copied().filter(|irq| has(owner, *irq)));
        let mut found: BTreeSet<u32> = owned.collect();
        found.extend(port.by_driver.iter().chain(&evidence.named));
        if !found.is_empty() {
            found.extend(&evidence.phys);
        }
        &found | &of_portals(port, irqs)
    });
    found.collect()
}

/// Gives the only interface without interrupts those that no device and no interface has and whose handlers have the
/// name of one interface. Its driver requested them when the interface had another name (which may change while the
/// interface is up since 6.2), or none yet (`eth%d`). Two names may mean two NICs. No other NIC's interface may be in
/// another network namespace.
pub(super) fn assign_earlier_name(ports: &[Port], irqs: &[Irq], found: &mut [BTreeSet<u32>]) {
    let may_lack = |port: &Port| {
        let has_files = || port.device.ancestors().any(has_interrupt_files);
        port.up && !port.representor && !is_behind_bus(&port.device) && !has_files()
    };
    let claimed: BTreeSet<u32> = found.iter().flatten().copied().collect();
    let mut lacking = ports.iter().zip(found).filter(|(port, own)| own.is_empty() && may_lack(port));
    let (Some((_, own)), None) = (lacking.next(), lacking.next()) else { return };
    let named = nobodys(irqs, &claimed)
        .filter_map(|irq| Some((irq.id.irq, irq.actions.iter().find_map(|action| interface_in(action))?)));
    let (numbers, names): (BTreeSet<u32>, BTreeSet<&str>) = named.unzip();
    if names.len() == 1 {
        own.extend(numbers);
    }
}

type IsNamed = fn(&str) -> bool;

/// Drivers whose interfaces share interrupts that are named after no interface and no device of theirs: portals of
/// NXP's DPAA2 (`drivers/soc/fsl/dpio`) and DPAA (`drivers/soc/fsl/qbman/qman.c`; an interface's device is the MAC or a
/// device `dpaa-ethernet`, by the kernel's version), and transmit channels of TI's ICSSG
/// (`drivers/net/ethernet/ti/icssg/icssg_common.c`, `prueth_init_tx_chns`: `txSLICE-CHANNEL`).
const SHARED: [(&str, IsNamed); 4] = [
    ("fsl_dpaa2_eth", |action| action.starts_with("dpio.")),
    ("fsl_dpa", is_qman_portal),
    ("fsl_dpaa_mac", is_qman_portal),
    ("icssg-prueth", |action| {
        let channel = action.strip_prefix("tx").and_then(|rest| rest.split_once('-'));
        channel.is_some_and(|(slice, channel)| slice.parse::<u8>().is_ok() && channel.parse::<u8>().is_ok())
    }),
];

fn is_qman_portal(action: &str) -> bool {
    action.starts_with("QMan portal ")
}

fn of_portals(port: &Port, irqs: &[Irq]) -> BTreeSet<u32> {
    let Some((_, is_shared)) = SHARED.iter().find(|(driver, _)| port.driver.as_deref() == Some(*driver)) else {
        return BTreeSet::new();
    };
    let shared = irqs.iter().filter(|irq| irq.device.is_none() && irq.actions.iter().any(|action| is_shared(action)));
    shared.map(|irq| irq.id.irq).collect()
}

/// Whether an interrupt of an interface's device belongs to this interface, and not to another interface of that
/// device.
fn is_of(port: &Port, owner: &Owner, irq: u32, ports: &[Port], all: &[Evidence], irqs: &[Irq]) -> bool {
    let has = |other: &Owner| other.irqs.contains(&irq);
    // A part of a function (a scalable function of mlx5) lists its interrupts more precisely than the function does.
    let deeper = |other: &Owner| other.path != owner.path && other.path.starts_with(&owner.path) && has(other);
    if all.iter().flat_map(Evidence::owners).any(deeper) {
        return false;
    }
    let beside = |other: &Evidence| other.owners().any(|other| other.path == owner.path);
    let group: Vec<&Port> = ports.iter().zip(all).filter(|(_, other)| beside(other)).map(|(port, _)| port).collect();
    if ports.iter().any(|other| other.by_driver.contains(&irq)) {
        return port.by_driver.contains(&irq);
    }
    let actions: Vec<&String> = irqs.iter().filter(|one| one.id.irq == irq).flat_map(|one| &one.actions).collect();
    // A scalable function's, before 6.11 (`mlx5_sf_comp3@pci:0000:81:00.0`).
    if actions.iter().any(|action| action.starts_with("mlx5_sf_")) && !name_of(&port.device).contains(".sf.") {
        return false;
    }
    let named: BTreeSet<&str> = actions.iter().filter_map(|action| longest_name(action, &group)).collect();
    // A USB controller's handler has the name of a bus.
    if !named.is_empty() && !is_behind_root_hub(&port.device) {
        return named.contains(port.name.as_str());
    }
    // Of a function with interfaces in several network namespaces: named as this one's queues, after another interface.
    // A NIC that was renamed while it was up has no queue of its present name.
    let owned = irqs.iter().filter(|one| owner.irqs.contains(&one.id.irq)).flat_map(|one| &one.actions);
    let own = owned.filter(|action| longest_name(action, &group) == Some(port.name.as_str()));
    let forms: Vec<(&str, &str)> = own.filter_map(|action| form(action, &port.name)).collect();
    let is_others = |action: &&String| forms.iter().any(|form| names_another(action, *form, ports));
    if !actions.is_empty() && actions.iter().all(is_others) {
        return false;
    }
    !port.representor || group.iter().all(|other| other.representor)
}

/// What is in the name of a queue's handler before and behind an interface's name: `ice-` and `-TxRx-` in
/// `ice-eth0-TxRx-3`.
fn form<'a>(action: &'a str, interface: &str) -> Option<(&'a str, &'a str)> {
    let (before, behind) = action.split_once(interface)?;
    let behind = behind.trim_end_matches(|c: char| c.is_ascii_digit());
    behind.contains(|c: char| c.is_ascii_alphabetic()).then_some((before, behind))
}

/// Whether a handler's name has this form with the name of an interface that is not here, and no address of a device.
fn names_another(action: &str, (before, behind): (&str, &str), ports: &[Port]) -> bool {
    let action = action.trim_end_matches(|c: char| c.is_ascii_digit());
    let word = action.strip_prefix(before).and_then(|rest| rest.strip_suffix(behind)).unwrap_or_default();
    !word.is_empty() && !word.contains([':', '@', '%', ' ']) && ports.iter().all(|other| other.name != word)
}

/// The nearest device, from the interface's own upwards, that has interrupt files, with the interrupts in them. Every
/// PCI function has such files, even without interrupts.
fn lister(port: &Port, irqs: &[Irq], pci: &Pci) -> Option<Owner> {
    let path = port.device.ancestors().find(|dir| has_interrupt_files(dir))?;
    let used = |irq: &u32| {
        let actions = irqs.iter().find(|one| one.id.irq == *irq).map_or(&[][..], |one| &one.actions);
        port.up && !pci.is_others(*irq, &name_of(path), actions)
    };
    let own = listed(path).unwrap_or_else(|| line(path).filter(used).into_iter().collect());
    Some(Owner { path: path.to_owned(), irqs: own.into_iter().collect() })
}

fn has_interrupt_files(device: &Path) -> bool {
    ["msi_irqs", "irqs", "irq"].iter().any(|name| device.join(name).exists())
}

/// A device's message-signalled interrupts.
fn listed(device: &Path) -> Option<Vec<u32>> {
    ["msi_irqs", "irqs"].iter().find_map(|folder| {
        let entries = entries(&device.join(folder));
        let irqs: Vec<u32> = entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
        (!irqs.is_empty()).then_some(irqs)
    })
}

/// The line to which a PCI function is wired. The function may share the line with others, and need not use it.
fn line(device: &Path) -> Option<u32> {
    read_number::<u32>(&device.join("irq")).filter(|irq| *irq != 0)
}

/// The evidence by the interface's device and the devices above it. `listed` is the nearest one with interrupt files;
/// nothing above it is looked at. Files that show only interrupts without a handler are no evidence.
fn of_device(port: &Port, listed: Option<Owner>, irqs: &[Irq], known: &BTreeSet<u32>) -> Evidence {
    let end = listed.as_ref().map(|owner| owner.path.clone());
    // Without any interrupt's description, the files are all there is.
    let is_handled = |irq: &u32| irqs.is_empty() || irqs.iter().any(|one| one.id.irq == *irq);
    let is_own = listed.as_ref().is_some_and(|owner| owner.path == port.device && !owner.irqs.is_empty());
    let listed = listed.filter(|owner| owner.irqs.iter().any(is_handled));
    if is_own {
        return Evidence { own: listed, listed: true, ..Evidence::default() };
    }
    let (mut own, phys) = named_after(&own_names(&name_of(&port.device)), irqs, known);
    own.extend(&in_device_tree(&port.device, irqs) - known);
    let own = (!own.is_empty()).then(|| Owner { path: port.device.clone(), irqs: own });
    let between = port.device.ancestors().skip(1);
    let between = between.take_while(|path| end.as_ref().is_none_or(|end| path.starts_with(end)));
    let above = listed.or_else(|| named_above(between, irqs, known));
    Evidence { own, above, phys, ..Evidence::default() }
}

/// The interrupts that the device tree gives a device at Arm's GIC. Those that the device needs for something else than
/// packets are among them.
fn in_device_tree(device: &Path, irqs: &[Irq]) -> BTreeSet<u32> {
    let (name, numbers) = (name_of(device), gic_numbers(device));
    let may_be = |irq: &&Irq| irq.device.as_ref().is_none_or(|other| *other == name);
    irqs.iter().filter(may_be).filter(|irq| is_at_gic(&irq.id, &numbers)).map(|irq| irq.id.irq).collect()
}

/// The numbers at Arm's GIC of a device's interrupts, by its node in the device tree. Each entry has three numbers of
/// 32 bits, or four: the kind (0 for a shared one, 1 for a CPU's own), the number within that kind, the trigger, and a
/// partition (`Documentation/devicetree/bindings/interrupt-controller/arm,gic-v3.yaml`). Entries of another form lead
/// to another controller.
fn gic_numbers(device: &Path) -> BTreeSet<u32> {
    let bytes = fs::read(device.join("of_node/interrupts")).inspect_err(note).unwrap_or_default();
    let cells = bytes.chunks_exact(4).filter_map(|cell| cell.try_into().ok().map(u32::from_be_bytes));
    let cells: Vec<u32> = cells.collect();
    let number = |entry: &[u32]| match entry {
        [0, shared, trigger, ..] if is_trigger(*trigger) => shared.checked_add(32),
        [1, own, trigger, ..] if is_trigger(*trigger) => own.checked_add(16),
        _ => None,
    };
    // A part of an entry at the end is none.
    let numbers = [3, 4].iter().find_map(|size| cells.chunks(*size).map(number).collect::<Option<BTreeSet<u32>>>());
    numbers.unwrap_or_default()
}

/// Whether an interrupt has one of these numbers at Arm's GIC.
fn is_at_gic(irq: &IrqId, numbers: &BTreeSet<u32>) -> bool {
    irq.chip.starts_with("GIC") && irq.hwirq.parse().is_ok_and(|number| numbers.contains(&number))
}

/// One edge, either edge, or a level, in the lower bits; above these are CPUs.
fn is_trigger(flags: u32) -> bool {
    flags <= 0xffff && matches!(flags & 0xf, 1 | 2 | 4 | 8)
}

/// The nearest of these devices whose name appears in a handler's name.
fn named_above<'a>(devices: impl Iterator<Item = &'a Path>, irqs: &[Irq], known: &BTreeSet<u32>) -> Option<Owner> {
    devices.into_iter().find_map(|path| {
        let name = path.file_name()?.to_str().filter(|name| is_device_name(name))?;
        let (path, names) = match path.parent().filter(|_| is_root_hub(name)) {
            Some(controller) => (controller, root_hubs(controller)),
            None => (path, vec![name.to_owned()]),
        };
        let (own, _) = named_after(&names, irqs, known);
        (!own.is_empty()).then(|| Owner { path: path.to_owned(), irqs: own })
    })
}

/// Interrupts whose handlers have a device's name, and those of PHYs on its MDIO bus.
fn named_after(names: &[String], irqs: &[Irq], known: &BTreeSet<u32>) -> (BTreeSet<u32>, BTreeSet<u32>) {
    let (mut own, mut phys) = (BTreeSet::new(), BTreeSet::new());
    let of_others = |device: &str| !names.iter().any(|name| name == device);
    let free = irqs.iter().filter(|irq| !known.contains(&irq.id.irq));
    for irq in free.filter(|irq| !irq.device.as_deref().is_some_and(of_others)) {
        let named = irq.actions.iter().filter(|action| names.iter().any(|name| is_word_of(action, name)));
        for action in named {
            let is_own = names.contains(action) || !is_phy(action);
            if is_own { &mut own } else { &mut phys }.insert(irq.id.irq);
        }
    }
    (own, phys)
}

/// Whether a handler has the name of a PHY: its MDIO bus, and two hexadecimal digits for the address on that bus
/// (`include/linux/phy.h`, `PHY_ID_FMT`). A device of ACPI may have such a name itself (`APMC0D05:00`).
pub(super) fn is_phy(action: &str) -> bool {
    action.rsplit_once(':').is_some_and(|(bus, address)| {
        !bus.is_empty() && address.len() == 2 && address.bytes().all(|digit| digit.is_ascii_hexdigit())
    })
}

/// The names that a device's own handlers may have. Xen's front end leaves the dash out: `vif0-q0-rx` is of `vif-0`.
fn own_names(device: &str) -> Vec<String> {
    let joined = device.split_once('-').filter(|(bus, number)| {
        let is_bus = !bus.is_empty() && bus.bytes().all(|byte| byte.is_ascii_alphabetic());
        is_bus && !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
    });
    let names = joined.map(|(bus, number)| format!("{bus}{number}")).into_iter();
    names.chain([device.to_owned()]).filter(|name| is_device_name(name)).collect()
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Whether a device is behind a bus whose controller handles each transfer.
fn is_behind_bus(device: &Path) -> bool {
    device.iter().filter_map(|name| name.to_str()).any(|name| ["spi_master", "mmc_host"].contains(&name))
        || is_behind_root_hub(device)
}

fn is_behind_root_hub(device: &Path) -> bool {
    device.iter().filter_map(|name| name.to_str()).any(is_root_hub)
}

/// `usb2`: a USB bus. A controller with two buses (USB 3) names its single interrupt after the first bus, also for
/// devices on the second (`drivers/usb/core/hcd.c`, `usb_hcd_request_irqs`).
fn is_root_hub(name: &str) -> bool {
    name.strip_prefix("usb").is_some_and(|number| number.parse::<u16>().is_ok())
}

fn root_hubs(controller: &Path) -> Vec<String> {
    let names = entries(controller).filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| is_root_hub(name)).collect()
}

/// Whether a folder's name in `/sys/devices` identifies one device. `soc` and `platform` do not, nor does a port of a
/// hub (`1-1`). The address of a virtual device of IBM's hypervisor has digits alone (`30000003`).
fn is_device_name(name: &str) -> bool {
    let has = |kind: fn(&u8) -> bool| name.bytes().any(|byte| kind(&byte));
    let is_address = name.len() >= 4 && name.bytes().all(|byte| byte.is_ascii_digit());
    is_address || (has(u8::is_ascii_digit) && has(u8::is_ascii_alphabetic))
}

/// Interrupts named after an interface, among those that no device has. Drivers of USB devices request no interrupt.
fn named_after_port(port: &Port, ports: &[Port], irqs: &[Irq], known: &BTreeSet<u32>) -> BTreeSet<u32> {
    if is_behind_root_hub(&port.device) {
        return BTreeSet::new();
    }
    let all: Vec<&Port> = ports.iter().collect();
    let is_own =
        |action: &String| may_name_port(action, port) && longest_name(action, &all) == Some(port.name.as_str());
    nobodys(irqs, known).filter(|irq| irq.actions.iter().any(is_own)).map(|irq| irq.id.irq).collect()
}

/// Interrupts named after an interface's driver, among those that no device and no other interface has.
fn named_after_driver(port: &Port, irqs: &[Irq], known: &BTreeSet<u32>) -> BTreeSet<u32> {
    let Some(driver) = port.driver.as_deref().filter(|driver| !driver.is_empty()) else { return BTreeSet::new() };
    let is_own = |action: &String| is_word_of(action, driver);
    nobodys(irqs, known).filter(|irq| irq.actions.iter().any(is_own)).map(|irq| irq.id.irq).collect()
}

fn nobodys<'a>(irqs: &'a [Irq], known: &BTreeSet<u32>) -> impl Iterator<Item = &'a Irq> {
    irqs.iter().filter(|irq| irq.device.is_none() && !known.contains(&irq.id.irq))
}

/// The interface whose name is in a handler's name; the longest if there are several.
fn longest_name<'a>(action: &str, ports: &[&'a Port]) -> Option<&'a str> {
    let named = ports.iter().map(|port| port.name.as_str()).filter(|name| is_word_of(action, name));
    named.max_by_key(|name| name.len())
}

/// `eth1` is in `eth1-TxRx-3` and `mlx5_comp0@eth1`, and not in `eth10-TxRx-3`.
pub(super) fn is_word_of(text: &str, word: &str) -> bool {
    around(text, word).next().is_some()
}

/// Words that drivers put behind an interface's name, with numbers, for queues, channels, parts and events of the NIC.
const PARTS: [&str; 46] = [
    "a", "admin", "aq", "async", "be", "ce", "ch", "cmd", "comp", "cq", "dma", "emac", "eq", "er", "err", "event",
    "fp", "g", "int", "irq", "link", "lpi", "lsc", "mac", "mbx", "mgmnt", "mgmt", "misc", "nc", "ntfy", "oob", "phy",
    "ptp", "q", "queue", "ring", "rx", "rxtx", "sfty", "stat", "status", "tr", "tx", "txrx", "ue", "wol",
];

/// Whether an interface's name may be meant by a word of a handler's name. Drivers put a colon before names of other
/// devices (`xhci-hcd:usb1`, `sdhci:wan-detect`), and a space beside words of a description (`gpio keys`). A name that
/// an administrator chose may also be a word of a line's description (`modem-wakeup`, `carrier-power`): it is meant
/// alone, at the beginning or behind the driver's name, or before names of a NIC's parts.
fn may_name_port(action: &str, port: &Port) -> bool {
    let driver = port.driver.as_deref().unwrap_or_default();
    around(action, &port.name).any(|(before, after)| {
        if before.ends_with([':', ' ']) || after.starts_with(' ') {
            return false;
        }
        let is_part = |word: &str| {
            let word = word.trim_matches(|c: char| c.is_ascii_digit()).to_ascii_lowercase();
            word.is_empty() || PARTS.contains(&word.as_str())
        };
        let begins = before.is_empty() || before.ends_with('@') || !driver.is_empty() && is_word_of(before, driver);
        let is_whole = begins || !after.is_empty();
        is_interface_like(&port.name) || is_whole && after.split(|c: char| !c.is_ascii_alphanumeric()).all(is_part)
    })
}

/// What is before and behind a word wherever it is in a text between characters that are neither letters nor digits.
fn around<'a>(text: &'a str, word: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
    let apart =
        text.match_indices(word).filter_map(move |(at, _)| Some((text.get(..at)?, text.get(at + word.len()..)?)));
    let is_word = |c: char| c.is_ascii_alphanumeric();
    apart.filter(move |(before, after)| !before.ends_with(is_word) && !after.starts_with(is_word))
}

/// The PCI functions' interrupts.
#[derive(Debug, Default)]
pub(super) struct Pci {
    /// Functions by message-signalled interrupt, and whether each is a network controller.
    listed: BTreeMap<u32, (String, bool)>,
    /// Functions by line.
    on_line: BTreeMap<u32, Vec<Function>>,
}

/// A PCI function that is wired to a line.
#[derive(Debug)]
struct Function {
    name: String,
    driver: Option<String>,
    /// A network controller whose driver may have a handler on the line: no interface of this function is here, or one
    /// is up.
    network: bool,
}

impl Pci {
    pub(super) fn scan(sys: &Path) -> Self {
        let mut found = Self::default();
        for entry in entries(&sys.join("bus/pci/devices")) {
            let (dir, name) = (entry.path(), entry.file_name().to_string_lossy().into_owned());
            // Base class 02 (`include/linux/pci_ids.h`).
            let network = read(&dir.join("class")).is_some_and(|class| class.starts_with("0x02"));
            if let Some(own) = listed(&dir) {
                found.listed.extend(own.into_iter().map(|irq| (irq, (name.clone(), network))));
            } else if let Some(line) = line(&dir) {
                let driver = fs::read_link(dir.join("driver")).ok().map(|driver| name_of(&driver));
                let network = network && driver.is_some() && may_be_up(&dir.join("net"));
                found.on_line.entry(line).or_default().push(Function { name, driver, network });
            }
        }
        found
    }

    /// The function that has an interrupt with these handlers, and whether it is a network controller. Of the functions
    /// on a line only network controllers count.
    pub(super) fn owner(&self, irq: u32, actions: &[String]) -> Option<(String, bool)> {
        let on_line = || {
            let functions = self.on_line.get(&irq)?.iter().filter(|function| function.network);
            let mut users = functions.filter(|function| !self.is_others(irq, &function.name, actions));
            Some((users.next()?.name.clone(), true))
        };
        self.listed.get(&irq).cloned().or_else(on_line)
    }

    /// Whether each handler on this line has the name of another function's driver.
    fn is_others(&self, irq: u32, function: &str, actions: &[String]) -> bool {
        let here = self.on_line.get(&irq).map_or(&[][..], Vec::as_slice);
        let own = here.iter().find(|one| one.name == function).and_then(|one| one.driver.as_ref());
        let others = || here.iter().filter_map(|one| one.driver.as_ref()).filter(|driver| Some(*driver) != own);
        // Driver xhci_hcd has handlers `xhci-hcd:usb1`.
        let plain = |name: &str| name.replace('_', "-");
        let is_others = |action: &String| others().any(|driver| is_word_of(&plain(action), &plain(driver)));
        !actions.is_empty() && actions.iter().all(is_others)
    }
}

/// Whether one of a function's interfaces is up (IFF_UP), or none is in this network namespace.
fn may_be_up(interfaces: &Path) -> bool {
    let flags = entries(interfaces).map(|entry| read(&entry.path().join("flags")).unwrap_or_default());
    let up: Vec<bool> = flags.map(|flags| is_up(&flags)).collect();
    up.is_empty() || up.contains(&true)
}

fn is_up(flags: &str) -> bool {
    flags.strip_prefix("0x").and_then(|digits| u32::from_str_radix(digits, 16).ok()).is_some_and(|bits| bits & 1 != 0)
}

/// A device on a bus other than PCI.
pub(super) struct BusDevice {
    /// Its name, which its handlers may have.
    pub(super) name: String,
    /// It is a network device: a virtio device of type 1 (`include/uapi/linux/virtio_ids.h`), or a NIC of the platform
    /// ([`is_platform_nic`]).
    pub(super) network: bool,
    /// Numbers of a network device's interrupts at Arm's GIC.
    gic: BTreeSet<u32>,
}

impl BusDevice {
    /// The device that has an interrupt with these handlers: by the device tree, else by the handlers' names. A PHY's
    /// interrupt is not the NIC's.
    pub(super) fn of<'a>(all: &'a [BusDevice], irq: &IrqId, actions: &[String]) -> Option<&'a BusDevice> {
        let names = |action: &String, name: &str| action == name || is_word_of(action, name) && !is_phy(action);
        let is_named = |one: &&BusDevice| actions.iter().any(|action| names(action, &one.name));
        all.iter().find(|one| is_at_gic(irq, &one.gic)).or_else(|| all.iter().find(is_named))
    }
}

/// The devices on the buses for virtio and for devices of the platform.
pub(super) fn on_other_buses(sys: &Path) -> Vec<BusDevice> {
    let virtio = devices_on(sys, "virtio").map(|path| (is_virtio_net(&path), path));
    let platform = devices_on(sys, "platform").map(|path| (is_platform_nic(&path), path));
    let all = virtio.chain(platform).map(|(network, path)| BusDevice {
        name: name_of(&path),
        network,
        gic: if network { gic_numbers(&path) } else { BTreeSet::new() },
    });
    all.filter(|device| is_device_name(&device.name)).collect()
}

fn devices_on(sys: &Path, bus: &str) -> impl Iterator<Item = PathBuf> {
    entries(&sys.join("bus").join(bus).join("devices")).map(|entry| entry.path())
}

fn is_virtio_net(device: &Path) -> bool {
    read(&device.join("device")).is_some_and(|id| id == "0x0001")
}

/// Whether a platform device is a NIC by its name in the device tree, `ethernet`, or because its interfaces are in
/// other network namespaces. Interfaces here have their own interrupts, or are a switch's ports, whose packets another
/// device receives.
fn is_platform_nic(device: &Path) -> bool {
    let node = read(&device.join("of_node/name"));
    node.is_some_and(|name| name.trim_end_matches('\0') == "ethernet") || has_empty_folder(device)
}

/// Whether a device has a folder for interfaces and none in it. The kernel keeps the folder while the interfaces are in
/// other network namespaces (`drivers/base/core.c`, `cleanup_glue_dir`).
fn has_empty_folder(device: &Path) -> bool {
    let interfaces = fs::read_dir(device.join("net")).inspect_err(note);
    interfaces.is_ok_and(|mut interfaces| interfaces.next().is_none())
}

/// Whether the interface of a platform NIC is not in this network namespace (the device's folder `net` is empty), and
/// no interrupt is known to be the device's. Its handlers may then have the name that the interface had when it was
/// brought up.
pub(super) fn has_interfaces_elsewhere(sys: &Path, irqs: &[Irq]) -> bool {
    devices_on(sys, "platform").filter(|device| is_platform_nic(device)).any(|device| {
        let (name, bound) = (name_of(&device), device.join("driver").is_symlink());
        let is_here = || entries(&device.join("net")).next().is_some();
        bound && !is_here() && irqs.iter().all(|irq| irq.device.as_ref() != Some(&name))
    })
}

/// The bus of scalable functions (mlx5).
const AUXILIARY: &str = "auxiliary";

/// Buses of NICs, without those whose devices tell which interrupts are a NIC's ([`Pci`], [`on_other_buses`]).
const BUSES: [&str; 10] = ["usb", "sdio", "spi", "thunderbolt", "fsl-mc", "xen", "vio", "bcma", "ssb", AUXILIARY];

/// NICs on these buses whose interfaces are in other network namespaces: they have a driver, and their folder for
/// interfaces is empty. Each port has the device's name, and counts as up: its flags cannot be read from here.
pub(super) fn nics_elsewhere(sys: &Path) -> Vec<Port> {
    // Before 6.11 a scalable function does not list its interrupts, and would seem to share its parent's.
    let tells = |bus: &str, device: &Path| bus != AUXILIARY || device.join("irqs").exists();
    let devices = |bus| devices_on(sys, bus).filter(move |device| tells(bus, device));
    let nics = BUSES.into_iter().flat_map(devices).filter(|device| has_empty_folder(device));
    let port = |device: PathBuf| {
        let driver = Some(name_of(&fs::read_link(device.join("driver")).ok()?));
        let (name, device) = (name_of(&device), fs::canonicalize(&device).ok()?);
        Some(Port { name, device, driver, up: true, ..Port::default() })
    };
    nics.filter_map(port).collect()
}

/// Whether a handler's name begins with an interface's, as the kernel and udev call them.
pub(super) fn is_interface_like(action: &str) -> bool {
    interface_in(action).is_some()
}

/// The name of an interface before it has one.
const UNNAMED: &str = "eth%d";

/// The name at the beginning of a handler's name that the kernel or udev gives to wired interfaces and common switch
/// ports: `eth1`, `end0-rx`, `enp1s0f1:tx`, or [`UNNAMED`].
fn interface_in(action: &str) -> Option<&str> {
    if action.starts_with(UNNAMED) {
        return Some(UNNAMED);
    }
    let word = action.split(|c: char| !c.is_ascii_alphanumeric()).next().unwrap_or_default();
    let letters = word.trim_end_matches(|c: char| c.is_ascii_digit());
    let numbered = letters.len() < word.len();
    // A number of the slot, or the address. `enable` and `encap` are words.
    let is_predictable = word.strip_prefix("en").is_some_and(|rest| match rest.as_bytes() {
        [b'x', address @ ..] => address.len() == 12 && address.iter().all(u8::is_ascii_hexdigit),
        [kind, number, ..] => b"abcdioPpsuv".contains(kind) && number.is_ascii_digit(),
        _ => false,
    });
    ((numbered && ["eth", "lan", "wan"].contains(&letters)) || is_predictable).then_some(word)
}
