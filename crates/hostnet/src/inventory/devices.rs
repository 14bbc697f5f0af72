//! Which interrupts belong to which network interface, by the device tree.
//!
//! In: the interfaces with their place in `/sys/devices`, and the interrupts with a handler. Out: the interrupts of
//! each interface. A name is the weakest evidence: a driver keeps the name that the interface had when the driver
//! requested the interrupt, and another interface may have that name by now. The evidence is therefore used in this
//! order, and a later item never takes an interrupt that an earlier item has assigned:
//!
//! 1. the driver, which links a NAPI instance to its interrupt (netlink family `netdev`);
//! 2. the nearest device above the interface that has interrupts of its own: `msi_irqs` (PCI, platform), `irqs`
//!    (auxiliary devices, 6.11), `irq` (a PCI function's line);
//! 3. the name of the interface's device, or of a device above it, in a handler's name: `30be0000.ethernet`,
//!    `virtio0-input.0`, `xhci-hcd:usb1`;
//! 4. the name of the interface, if none of the above gives a result;
//! 5. the name of its driver, if no interrupt has the interface's name (`enc28j60`).
//!
//! In addition, some drivers receive packets through portals of the processor. Their interfaces share the portals'
//! interrupts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::Irq;
use super::scan::{read, read_number};

/// A network interface that may have interrupts.
#[derive(Debug, Default)]
pub(super) struct Port {
    /// Name of the interface.
    pub(super) name: String,
    /// Path of its device, without symbolic links.
    pub(super) device: PathBuf,
    /// Name of its driver.
    pub(super) driver: Option<String>,
    /// Interrupts that the driver links to the interface's NAPI instances.
    pub(super) by_driver: BTreeSet<u32>,
    /// The interface represents a port of a switch in the NIC (`phys_port_name` as `pf0vf1`), and the NIC's own
    /// interface has the interrupts.
    pub(super) representor: bool,
}

/// A device above an interface, and the interrupts that are its own.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Owner {
    path: PathBuf,
    irqs: BTreeSet<u32>,
}

/// The interrupts of each of these interfaces. An interrupt that several interfaces of a device share is in each of
/// their sets.
pub(super) fn assign(ports: &[Port], irqs: &[Irq]) -> Vec<BTreeSet<u32>> {
    let by_driver: BTreeSet<u32> = ports.iter().flat_map(|port| &port.by_driver).copied().collect();
    let mut owners: Vec<Option<Owner>> = ports.iter().map(|port| of_device(&port.device)).collect();
    // An interrupt that a device lists as its own belongs to no other device, whatever its handler's name is.
    let mut known: BTreeSet<u32> = owners.iter().flatten().flat_map(|owner| &owner.irqs).copied().collect();
    known.extend(&by_driver);
    for (owner, port) in owners.iter_mut().zip(ports) {
        if owner.is_none() {
            *owner = named_after_device(&port.device, irqs, &known);
        }
    }
    known.extend(owners.iter().flatten().flat_map(|owner| &owner.irqs));
    let found = ports.iter().zip(&owners).map(|(port, owner)| {
        let others = match owner {
            Some(owner) => {
                owner.irqs.iter().copied().filter(|irq| is_of(port, owner, *irq, ports, &owners, irqs)).collect()
            }
            None => named_after_port(port, ports, irqs, &known),
        };
        &(&port.by_driver | &others) | &of_portals(port, irqs)
    });
    let mut found: Vec<BTreeSet<u32>> = found.collect();
    known.extend(found.iter().flatten());
    for ((port, _), own) in
        ports.iter().zip(&owners).zip(&mut found).filter(|((_, owner), own)| owner.is_none() && own.is_empty())
    {
        let driver = port.driver.as_deref().unwrap_or_default();
        let named = irqs.iter().filter(|irq| irq.device.is_none() && !known.contains(&irq.id.irq));
        let named =
            named.filter(|irq| !driver.is_empty() && irq.actions.iter().any(|action| is_word_of(action, driver)));
        own.extend(named.map(|irq| irq.id.irq));
    }
    found
}

/// Drivers whose interfaces receive packets through shared portals, with the beginning of the portals' handler names:
/// NXP's DPAA2 (`drivers/soc/fsl/dpio`) and DPAA (`drivers/soc/fsl/qbman/qman.c`).
const PORTALS: [(&str, &str); 2] = [("fsl_dpaa2_eth", "dpio."), ("fsl_dpa", "QMan portal ")];

fn of_portals(port: &Port, irqs: &[Irq]) -> BTreeSet<u32> {
    let Some((_, portal)) = PORTALS.iter().find(|(driver, _)| port.driver.as_deref() == Some(*driver)) else {
        return BTreeSet::new();
    };
    let is_portals = |irq: &&Irq| irq.actions.iter().any(|action| action.starts_with(portal));
    irqs.iter().filter(is_portals).map(|irq| irq.id.irq).collect()
}

/// Whether an interrupt of an interface's device belongs to this interface, and not to another interface of that
/// device.
fn is_of(port: &Port, owner: &Owner, irq: u32, ports: &[Port], owners: &[Option<Owner>], irqs: &[Irq]) -> bool {
    let has = |other: &Owner| other.irqs.contains(&irq);
    // A part of a function (a scalable function of mlx5) lists its interrupts more precisely than the function does.
    let deeper = |other: &Owner| other.path != owner.path && other.path.starts_with(&owner.path) && has(other);
    if owners.iter().flatten().any(deeper) {
        return false;
    }
    let beside = |other: &Option<Owner>| other.as_ref().is_some_and(|other| other.path == owner.path);
    let group: Vec<&Port> = ports.iter().zip(owners).filter(|(_, other)| beside(other)).map(|(port, _)| port).collect();
    if ports.iter().any(|other| other.by_driver.contains(&irq)) {
        return port.by_driver.contains(&irq);
    }
    let actions = irqs.iter().filter(|one| one.id.irq == irq).flat_map(|one| &one.actions);
    let named: BTreeSet<&str> = actions.filter_map(|action| longest_name(action, &group)).collect();
    if !named.is_empty() {
        return named.contains(port.name.as_str());
    }
    !port.representor || group.iter().all(|other| other.representor)
}

/// The nearest device, from the interface's own upwards, that has interrupt files. Every PCI function has such files,
/// even without interrupts.
fn of_device(device: &Path) -> Option<Owner> {
    let has = |dir: &&Path| ["msi_irqs", "irqs", "irq"].iter().any(|name| dir.join(name).exists());
    let path = device.ancestors().find(has)?;
    Some(Owner { path: path.to_owned(), irqs: own_irqs(path).into_iter().collect() })
}

/// A device's own interrupts: message-signalled ones, otherwise its line.
pub(super) fn own_irqs(device: &Path) -> Vec<u32> {
    ["msi_irqs", "irqs"]
        .iter()
        .find_map(|folder| listed(&device.join(folder)))
        .or_else(|| line(device))
        .unwrap_or_default()
}

fn listed(folder: &Path) -> Option<Vec<u32>> {
    let entries = fs::read_dir(folder).ok()?;
    let irqs: Vec<u32> =
        entries.filter_map(Result::ok).filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    (!irqs.is_empty()).then_some(irqs)
}

fn line(device: &Path) -> Option<Vec<u32>> {
    read_number::<u32>(&device.join("irq")).filter(|irq| *irq != 0).map(|irq| vec![irq])
}

/// Interrupts whose handlers are named after the interface's device, or after the nearest device above it whose name
/// appears in a handler's name.
fn named_after_device(device: &Path, irqs: &[Irq], known: &BTreeSet<u32>) -> Option<Owner> {
    device.ancestors().find_map(|path| {
        let name = path.file_name()?.to_str().filter(|name| is_device_name(name))?;
        let (path, names) = match path.parent().filter(|_| is_root_hub(name)) {
            Some(controller) => (controller, root_hubs(controller)),
            None => (path, vec![name.to_owned()]),
        };
        let names = || names.iter().map(String::as_str);
        let is_named = |irq: &Irq| irq.actions.iter().any(|action| names().any(|name| is_word_of(action, name)));
        let named = irqs.iter().filter(|irq| is_named(irq));
        let named = named.filter(|irq| irq.device.as_deref().is_none_or(|device| names().any(|name| name == device)));
        let own: BTreeSet<u32> = named.map(|irq| irq.id.irq).filter(|irq| !known.contains(irq)).collect();
        (!own.is_empty()).then(|| Owner { path: path.to_owned(), irqs: own })
    })
}

/// `usb2`: a USB bus. A controller with two buses (USB 3) names its single interrupt after the first bus, also for
/// devices on the second (`drivers/usb/core/hcd.c`, `usb_hcd_request_irqs`).
fn is_root_hub(name: &str) -> bool {
    name.strip_prefix("usb").is_some_and(|number| number.parse::<u16>().is_ok())
}

fn root_hubs(controller: &Path) -> Vec<String> {
    let entries = fs::read_dir(controller).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).filter(|name| is_root_hub(name)).collect()
}

/// Whether a folder's name in `/sys/devices` identifies one device. `soc` and `platform` do not, nor does a port of a
/// hub (`1-1`).
fn is_device_name(name: &str) -> bool {
    let has = |kind: fn(&u8) -> bool| name.bytes().any(|byte| kind(&byte));
    has(u8::is_ascii_digit) && has(u8::is_ascii_alphabetic)
}

/// Interrupts named after an interface, among those that have no other evidence.
fn named_after_port(port: &Port, ports: &[Port], irqs: &[Irq], known: &BTreeSet<u32>) -> BTreeSet<u32> {
    let all: Vec<&Port> = ports.iter().collect();
    let is_named = |irq: &&Irq| irq.actions.iter().any(|action| longest_name(action, &all) == Some(port.name.as_str()));
    let nobodys = irqs.iter().filter(|irq| irq.device.is_none() && !known.contains(&irq.id.irq));
    nobodys.filter(is_named).map(|irq| irq.id.irq).collect()
}

/// The interface whose name is in a handler's name; the longest if there are several.
fn longest_name<'a>(action: &str, ports: &[&'a Port]) -> Option<&'a str> {
    let named = ports.iter().map(|port| port.name.as_str()).filter(|name| is_word_of(action, name));
    named.max_by_key(|name| name.len())
}

/// `eth1` is in `eth1-TxRx-3` and `mlx5_comp0@eth1`, and not in `eth10-TxRx-3`.
pub(super) fn is_word_of(text: &str, word: &str) -> bool {
    text.match_indices(word).any(|(at, _)| {
        let is_word = |c: char| c.is_ascii_alphanumeric();
        let before = text.get(..at).unwrap_or_default().chars().next_back();
        let after = text.get(at + word.len()..).unwrap_or_default().chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

/// Devices with interrupts of their own, by interrupt, and whether they are network controllers: PCI functions of base
/// class 02 (`include/linux/pci_ids.h`). Other functions may share a function's line, so the line counts only for
/// network controllers.
pub(super) fn on_pci(sys: &Path) -> BTreeMap<u32, (String, bool)> {
    let mut found: BTreeMap<u32, (String, bool)> = BTreeMap::new();
    let Ok(entries) = fs::read_dir(sys.join("bus/pci/devices")) else { return found };
    for entry in entries.filter_map(Result::ok) {
        let dir = entry.path();
        let network = read(&dir.join("class")).is_some_and(|class| class.starts_with("0x02"));
        let own = if network { own_irqs(&dir) } else { listed(&dir.join("msi_irqs")).unwrap_or_default() };
        let name = entry.file_name().to_string_lossy().into_owned();
        found.extend(own.into_iter().map(|irq| (irq, (name.clone(), network))));
    }
    found
}

/// Names of devices on buses where handlers have the device's name, and whether they are network devices: virtio
/// devices of type 1 (`include/uapi/linux/virtio_ids.h`), and platform devices that the device tree calls `ethernet`.
pub(super) fn on_other_buses(sys: &Path) -> Vec<(String, bool)> {
    let devices = |bus: &str| fs::read_dir(sys.join("bus").join(bus).join("devices")).into_iter().flatten().flatten();
    let virtio = devices("virtio").map(|entry| (entry.file_name(), is_virtio_net(&entry.path())));
    let platform = devices("platform").map(|entry| (entry.file_name(), is_ethernet(&entry.path())));
    let named = virtio.chain(platform).map(|(name, network)| (name.to_string_lossy().into_owned(), network));
    named.filter(|(name, _)| is_device_name(name)).collect()
}

fn is_virtio_net(device: &Path) -> bool {
    read(&device.join("device")).is_some_and(|id| id == "0x0001")
}

fn is_ethernet(device: &Path) -> bool {
    read(&device.join("of_node/name")).is_some_and(|name| name.trim_end_matches('\0') == "ethernet")
}
