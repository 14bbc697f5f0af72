//! Network interfaces: identity and shape from rtnetlink, NAPI from netlink family `netdev`, the rest from sysfs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::scan::{read, read_number};
use super::{Inventory, KernelThreadKind, Napi, Nic, Note, TxQueue};
use crate::cpus::CpuSet;
use crate::knob::NicId;
use crate::live::Roots;
use crate::netlink::Netlink;
use crate::netlink::ethtool::Ethtool;
use crate::netlink::link::{Link, links};
use crate::netlink::netdev::Netdev;
use crate::netlink::qdisc::{self, RootQdisc};
use crate::rules::{POLL_FILE, WEIGHT_FILE};

pub(super) fn scan(roots: &Roots, inventory: &mut Inventory) {
    let found = Netlink::open(netlink_sys::protocols::NETLINK_ROUTE).and_then(|mut netlink| links(&mut netlink));
    let roots_of =
        Netlink::open(netlink_sys::protocols::NETLINK_ROUTE).and_then(|mut netlink| qdisc::roots(&mut netlink));
    let mut qdiscs = roots_of.unwrap_or_else(|error| {
        let why = format!("rtnetlink: {error}");
        // Who chose them is not known then, and somebody's would be replaced for good.
        if !is_old(&error) {
            inventory.incomplete = Some(format!("root qdiscs: {why}"));
        }
        inventory.notes.push(note("root qdiscs", why));
        BTreeMap::new()
    });
    let found = match found {
        Ok(found) => found,
        Err(error) => {
            let why = format!("rtnetlink: {error}");
            inventory.incomplete = Some(format!("interfaces: {why}"));
            inventory.notes.push(note("interfaces", why));
            return;
        }
    };
    let mut napis = match Netdev::open().and_then(|mut netdev| netdev.napis()) {
        Ok(napis) => napis,
        Err(error) => {
            let why = if is_old(&error) {
                "this kernel does not list them (netlink family netdev, 6.8): those with a thread are known by its name"
                    .to_owned()
            } else {
                let why = format!("netlink family netdev: {error}");
                inventory.incomplete = Some(format!("NAPI instances: {why}"));
                why
            };
            inventory.notes.push(note("NAPI instances", why));
            napis_by_thread(inventory, &found)
        }
    };
    let mut ethtool = Ethtool::open();
    let mut moderations =
        said(inventory, "interrupt moderation", &found, with(&mut ethtool, Ethtool::moderations), |ifindex| {
            with(&mut ethtool, |ethtool| ethtool.moderation(ifindex))
        });
    let rings = said(inventory, "rings", &found, with(&mut ethtool, Ethtool::tx_rings), |ifindex| {
        with(&mut ethtool, |ethtool| ethtool.tx_ring(ifindex))
    });
    inventory.nics = found
        .into_iter()
        .filter(|link| !link.loopback)
        .map(|link| {
            let own = napis.remove(&link.ifindex).unwrap_or_default();
            let by_others = match qdiscs.remove(&link.ifindex) {
                Some(root @ RootQdisc::Others(..)) => Some(root.text()),
                _ => None,
            };
            let moderation = moderations.remove(&link.ifindex);
            let tx_ring = rings.get(&link.ifindex).copied();
            Nic { qdisc_by_others: by_others, moderation, tx_ring, ..nic(roots, inventory, link, own) }
        })
        .collect();
}

fn note(about: &str, why: String) -> Note {
    Note { about: about.to_owned(), why }
}

/// Asks by a socket that may not be open.
fn with<T>(ethtool: &mut io::Result<Ethtool>, ask: impl FnOnce(&mut Ethtool) -> io::Result<T>) -> io::Result<T> {
    match ethtool {
        Ok(ethtool) => ask(ethtool),
        Err(error) => Err(match error.raw_os_error() {
            Some(code) => io::Error::from_raw_os_error(code),
            None => io::Error::new(error.kind(), error.to_string()),
        }),
    }
}

/// What drivers say, by interface index; of kernels and drivers that do not say, no rule wants it. One device that is being reset ends the answer about
/// all (`net/ethtool/netlink.c`, `ethnl_default_dumpit`): then each is asked alone. What nobody could ask is a look that failed: else what was set would be
/// given back, to be set again at the next.
fn said<T>(
    inventory: &mut Inventory,
    about: &str,
    links: &[Link],
    all: io::Result<BTreeMap<u32, T>>,
    one: impl FnMut(u32) -> io::Result<T>,
) -> BTreeMap<u32, T> {
    let answer = match all {
        Err(error) if is_old(&error) => Ok(BTreeMap::new()),
        Err(error) if !is_ours(&error) => each(links, one),
        answer => answer,
    };
    answer.unwrap_or_else(|error| {
        let why = format!("netlink family ethtool: {error}");
        inventory.incomplete = Some(format!("{about}: {why}"));
        inventory.notes.push(note(about, why));
        BTreeMap::new()
    })
}

fn each<T>(links: &[Link], mut one: impl FnMut(u32) -> io::Result<T>) -> io::Result<BTreeMap<u32, T>> {
    let mut found = BTreeMap::new();
    for link in links {
        match one(link.ifindex) {
            Ok(said) => drop(found.insert(link.ifindex, said)),
            Err(error) if is_ours(&error) => return Err(error),
            Err(_) => {}
        }
    }
    Ok(found)
}

/// Whether it is this process or host that could not ask, not a device that does not answer.
fn is_ours(error: &io::Error) -> bool {
    !matches!(
        error.raw_os_error(),
        Some(libc::ENODEV | libc::EOPNOTSUPP | libc::EIO | libc::EINVAL | libc::EBUSY | libc::ETIMEDOUT)
    )
}

/// Whether the kernel has no such family, or the family no such question.
fn is_old(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOENT))
}

/// Before 6.8: NAPI instances that have a thread, by the interface name in the thread's name.
fn napis_by_thread(inventory: &Inventory, links: &[Link]) -> BTreeMap<u32, Vec<Napi>> {
    let mut found: BTreeMap<u32, Vec<Napi>> = BTreeMap::new();
    for thread in &inventory.threads {
        let KernelThreadKind::Napi(id) = thread.kind else { continue };
        let name = thread.comm.strip_prefix("napi/").and_then(|rest| Some(rest.rsplit_once('-')?.0));
        let Some(link) = links.iter().find(|link| Some(link.name.as_str()) == name) else { continue };
        found.entry(link.ifindex).or_default().push(Napi { id, pid: Some(thread.id.tid), ..Napi::default() });
    }
    found
}

fn nic(roots: &Roots, inventory: &Inventory, link: Link, napis: Vec<Napi>) -> Nic {
    let dir = roots.sys.join("class/net").join(&link.name);
    let device = dir.join("device");
    let physical = device.exists();
    let driver = fs::read_link(device.join("driver"))
        .ok()
        .and_then(|target| Some(target.file_name()?.to_string_lossy().into_owned()));
    let irqs = if physical { irqs_of(&device, &link.name, &napis, inventory) } else { Vec::new() };
    let (rx_queues, tx_queues) = queues(&dir, physical);
    Nic {
        id: NicId { ifindex: link.ifindex, name: link.name },
        physical,
        driver,
        kind: link.kind,
        up: link.up,
        carrier: link.carrier,
        mac: link.mac,
        link: link.link.filter(|other| *other != link.ifindex && *other != 0),
        peer: link.peer,
        controller: link.controller,
        qdisc: link.qdisc,
        qdisc_by_others: None,
        rx_queues,
        tx_queues,
        threaded: read_number(&dir.join("threaded")),
        napi_weight: read(&dir.join(WEIGHT_FILE)),
        busy_poll: read(&dir.join(POLL_FILE)),
        napis,
        irqs,
        moderation: None,
        tx_ring: None,
    }
}

/// Interrupts of a NIC: those that its NAPI or a handler's name ties to it, and its device's. A virtio NIC's belong to the PCI
/// function above it, a USB NIC's to the host controller further up. Where one function carries several interfaces, only those
/// that are tied to this one.
fn irqs_of(device: &Path, name: &str, napis: &[Napi], inventory: &Inventory) -> Vec<u32> {
    let mut irqs: BTreeSet<u32> = napis.iter().filter_map(|napi| napi.irq).collect();
    let named = inventory.irqs.iter().filter(|irq| irq.actions.iter().any(|action| names_nic(action, name)));
    irqs.extend(named.map(|irq| irq.id.irq));
    if let Ok(real) = fs::canonicalize(device) {
        let alone = fs::read_dir(real.join("net")).map_or(true, |entries| entries.count() <= 1);
        if alone {
            irqs.extend(owner_of_irqs(&real).iter().flat_map(|owner| own_irqs(owner)));
        }
    }
    irqs.into_iter().collect()
}

/// The nearest device that has interrupts: every PCI function says so, also one without.
fn owner_of_irqs(device: &Path) -> Option<PathBuf> {
    let has = |dir: &&Path| dir.join("msi_irqs").exists() || dir.join("irq").exists();
    device.ancestors().find(has).map(Path::to_owned)
}

/// A device's own interrupts: message-signalled ones, else its line.
pub(super) fn own_irqs(device: &Path) -> Vec<u32> {
    message_signalled(device).or_else(|| line(device)).unwrap_or_default()
}

fn message_signalled(owner: &Path) -> Option<Vec<u32>> {
    let entries = fs::read_dir(owner.join("msi_irqs")).ok()?;
    let irqs: Vec<u32> =
        entries.filter_map(Result::ok).filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    (!irqs.is_empty()).then_some(irqs)
}

fn line(owner: &Path) -> Option<Vec<u32>> {
    read_number::<u32>(&owner.join("irq")).filter(|irq| *irq != 0).map(|irq| vec![irq])
}

/// `eth1` is in `eth1-TxRx-3` and `mlx5_comp0@eth1`, and not in `eth10-TxRx-3`.
fn names_nic(action: &str, name: &str) -> bool {
    action.match_indices(name).any(|(at, _)| {
        let is_word = |c: char| c.is_ascii_alphanumeric();
        let before = action.get(..at).unwrap_or_default().chars().next_back();
        let after = action.get(at + name.len()..).unwrap_or_default().chars().next();
        !before.is_some_and(is_word) && !after.is_some_and(is_word)
    })
}

/// Queues in use, which sysfs has a directory for each of. XPS of virtual interfaces interests no rule.
fn queues(dir: &Path, physical: bool) -> (u32, Vec<TxQueue>) {
    let Ok(entries) = fs::read_dir(dir.join("queues")) else { return (0, Vec::new()) };
    let mut receive = 0;
    let mut transmit = BTreeMap::new();
    for path in entries.filter_map(Result::ok).map(|entry| entry.path()) {
        let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
        if name.starts_with("rx-") {
            receive += 1;
        } else if let Some(number) = name.strip_prefix("tx-").and_then(|number| number.parse::<u32>().ok()) {
            transmit.insert(number, if physical { tx_queue(&path) } else { TxQueue::default() });
        }
    }
    (receive, transmit.into_values().collect())
}

fn tx_queue(path: &Path) -> TxQueue {
    TxQueue {
        xps_cpus: read(&path.join("xps_cpus")).and_then(|text| CpuSet::from_mask(&text).ok()),
        bql_limit_max: read_number(&path.join("byte_queue_limits/limit_max")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nics_interrupts_are_its_devices_its_controllers_or_named_after_it() {
        let dir = tempfile::tempdir().unwrap();
        let devices = dir.path();
        let make = |path: &str| fs::create_dir_all(devices.join(path)).unwrap();
        // virtio below its PCI function; USB below its controller; a platform device that says nothing; two ports on one function.
        for path in
            ["pci/v/virtio1/net/eth0", "pci/v/msi_irqs/30", "pci/x/usb2/2-1/2-1:1.0/net/eth1", "pci/x/msi_irqs/31"]
        {
            make(path);
        }
        for path in ["platform/mac/net/eth2", "pci/two/net/eth3", "pci/two/net/eth4", "pci/two/msi_irqs/33"] {
            make(path);
        }
        make("pci/two/msi_irqs/34");
        let irq = |number: u32, handler: &str| crate::inventory::Irq {
            id: crate::knob::IrqId { irq: number, chip: String::new(), hwirq: String::new() },
            actions: vec![handler.to_owned()],
            affinity: CpuSet::default(),
            settable: true,
            network: false,
        };
        let irqs =
            vec![irq(30, "virtio1-input.0"), irq(31, "xhci_hcd"), irq(32, "eth2"), irq(33, "eth3"), irq(34, "eth4")];
        let inventory = Inventory { irqs, ..Inventory::default() };
        for (device, name, irq) in [
            ("pci/v/virtio1", "eth0", 30),
            ("pci/x/usb2/2-1/2-1:1.0", "eth1", 31),
            ("platform/mac", "eth2", 32),
            ("pci/two", "eth3", 33),
            ("pci/two", "eth4", 34),
        ] {
            assert_eq!(irqs_of(&devices.join(device), name, &[], &inventory), [irq], "{name}");
        }
    }

    #[test]
    fn one_device_that_does_not_answer_leaves_the_others_known_and_who_cannot_ask_has_not_looked() {
        let links: Vec<Link> = (1..=3).map(|ifindex| Link { ifindex, ..Link::default() }).collect();
        let fails = |code| io::Error::from_raw_os_error(code);
        let look = |all: Result<BTreeMap<u32, u32>, i32>, away: i32| {
            let mut inventory = Inventory::default();
            let one = |ifindex| if ifindex == 2 { Err(fails(away)) } else { Ok(ifindex * 10) };
            let found = said(&mut inventory, "rings", &links, all.map_err(fails), one);
            (found.into_iter().collect::<Vec<_>>(), inventory.incomplete.is_some(), inventory.notes.len())
        };
        let (all, others) = (vec![(2, 7)], vec![(1, 10), (3, 30)]);
        assert_eq!(look(Ok(all.iter().copied().collect()), libc::ENODEV), (all, false, 0));
        assert_eq!(look(Err(libc::ENODEV), libc::ENODEV), (others.clone(), false, 0));
        assert_eq!(look(Err(libc::EIO), libc::EOPNOTSUPP), (others, false, 0));
        assert_eq!(look(Err(libc::EOPNOTSUPP), libc::ENODEV), (vec![], false, 0), "the kernel does not tell");
        assert_eq!(look(Err(libc::EMFILE), libc::ENODEV), (vec![], true, 1));
        assert_eq!(look(Err(libc::ENODEV), libc::ENOBUFS), (vec![], true, 1));
    }

    #[test]
    fn a_handler_names_its_nic_as_a_word() {
        assert!(names_nic("eth1-TxRx-3", "eth1"));
        assert!(names_nic("mlx5_comp0@pci:eth1", "eth1"));
        assert!(names_nic("eth1", "eth1"));
        assert!(!names_nic("eth10-TxRx-3", "eth1"));
        assert!(!names_nic("veth1-rx", "eth1"));
    }
}
