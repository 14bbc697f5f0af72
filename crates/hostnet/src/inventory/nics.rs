//! Network interfaces: identity and shape from rtnetlink, NAPI from netlink family `netdev`, all else from sysfs.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::devices::{self, Pci, Port, is_word_of};
use super::threads::{CUT, WHOLE_NAMES};
use super::{Inventory, KernelThreadKind, Napi, Nic, Note, TxQueue};
use crate::cpus::CpuSet;
use crate::kernel_files::{POLL_FILE, WEIGHT_FILE};
use crate::knob::NicId;
use crate::netlink::Netlink;
use crate::netlink::ethtool::Ethtool;
use crate::netlink::link::{Link, links};
use crate::netlink::netdev::Netdev;
use crate::netlink::qdisc::{self, RootQdisc};
use crate::obstacle::netlink_error;
use crate::roots::{Roots, entries, read, read_number};

pub(super) fn scan(roots: &Roots, inventory: &mut Inventory, pci: &Pci) {
    let found = Netlink::open(netlink_sys::protocols::NETLINK_ROUTE).and_then(|mut netlink| links(&mut netlink));
    let roots_of =
        Netlink::open(netlink_sys::protocols::NETLINK_ROUTE).and_then(|mut netlink| qdisc::roots(&mut netlink));
    let mut qdiscs = roots_of.unwrap_or_else(|error| {
        let why = netlink_error("rtnetlink", &error);
        // Without this list, a qdisc that the administrator chose would be replaced and could not be restored.
        if !is_old(&error) {
            inventory.incomplete = Some(format!("root qdiscs: {why}"));
        }
        inventory.notes.push(note("root qdiscs", why));
        BTreeMap::new()
    });
    let found = match found {
        Ok(found) => found,
        Err(error) => {
            let why = netlink_error("rtnetlink", &error);
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
                let why = netlink_error("netlink family netdev", &error);
                inventory.incomplete = Some(format!("NAPI instances: {why}"));
                why
            };
            inventory.notes.push(note("NAPI instances", why));
            napis_by_thread(inventory, &found)
        }
    };
    let mut ethtool = Ethtool::open();
    let mut moderations =
        driver_values(inventory, "interrupt moderation", &found, with(&mut ethtool, Ethtool::moderations), |ifindex| {
            with(&mut ethtool, |ethtool| ethtool.moderation(ifindex))
        });
    let rings = driver_values(inventory, "rings", &found, with(&mut ethtool, Ethtool::tx_rings), |ifindex| {
        with(&mut ethtool, |ethtool| ethtool.tx_ring(ifindex))
    });
    let below = below(roots, &found);
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
            let Below { lower, carried } = below.get(&link.ifindex).cloned().unwrap_or_default();
            Nic { qdisc_by_others: by_others, moderation, tx_ring, lower, carried, ..nic(roots, link, own) }
        })
        .collect();
    let class = roots.sys.join("class/net");
    let devices: Vec<Option<PathBuf>> =
        inventory.nics.iter().map(|nic| fs::canonicalize(class.join(&nic.id.name).join("device")).ok()).collect();
    find_carried(inventory, &devices);
    find_irqs(inventory, &devices, &roots.sys, pci);
}

/// Finds out which interface has the rings, among interfaces that share a device or are above another.
fn find_carried(inventory: &mut Inventory, devices: &[Option<PathBuf>]) {
    let of_device: BTreeMap<u32, &PathBuf> = inventory
        .nics
        .iter()
        .zip(devices)
        .filter_map(|(nic, device)| Some((nic.id.ifindex, device.as_ref()?)))
        .collect();
    for nic in inventory.nics.iter_mut().filter(|nic| nic.physical) {
        let own = of_device.get(&nic.id.ifindex);
        let is_upper_of_pair = own.is_some() && nic.lower.iter().any(|lower| of_device.get(lower) == own);
        nic.carried |= is_upper_of_pair;
        nic.physical = !nic.carried;
    }
}

fn find_irqs(inventory: &mut Inventory, devices: &[Option<PathBuf>], sys: &Path, pci: &Pci) {
    let class = sys.join("class/net");
    let with_rings = || inventory.nics.iter().zip(devices).filter(|(nic, _)| nic.physical);
    let mut ports: Vec<Port> = with_rings()
        .map(|(nic, device)| Port {
            name: nic.id.name.clone(),
            driver: nic.driver.clone(),
            device: device.clone().unwrap_or_default(),
            up: nic.up,
            by_driver: nic.napis.iter().filter_map(|napi| napi.irq).collect(),
            representor: represented(&class.join(&nic.id.name)).is_some(),
        })
        .collect();
    let here = ports.len();
    ports.extend(devices::nics_elsewhere(sys));
    let mut found = devices::assign(&ports, &inventory.irqs, pci);
    let elsewhere = devices::has_interfaces_elsewhere(sys, &inventory.irqs);
    if !elsewhere {
        devices::assign_earlier_name(&ports, &inventory.irqs, &mut found);
    }
    let claimed: BTreeSet<u32> = found.iter().flatten().copied().collect();
    let of_interfaces: BTreeSet<u32> = found.iter().take(here).flatten().copied().collect();
    // The name of the first NIC is kept, which is more exact than that of a PCI function of which the NIC is a part.
    for (port, irqs) in ports.iter().zip(&found).skip(here).rev() {
        for irq in inventory.irqs.iter_mut().filter(|irq| irqs.contains(&irq.id.irq)) {
            if of_interfaces.contains(&irq.id.irq) {
                irq.elsewhere = Some(port.name.clone());
            } else {
                (irq.network, irq.device) = (true, Some(port.name.clone()));
            }
        }
    }
    // A handler with the name of a NIC's queue, but of a device that is not that NIC's: the interrupt is another NIC's,
    // perhaps in another network namespace.
    let is_queue = |action: &String| {
        let words = action.to_ascii_lowercase();
        let of_port = || ports.iter().any(|port| is_word_of(action, &port.name));
        ((words.contains("rx") || words.contains("tx")) && of_port()) || is_numbered_queue(&words)
    };
    // A switch's port, or a key, may be called `lan1`.
    let is_port = |action: &String| devices::is_interface_like(action) && (elsewhere || action.starts_with('e'));
    let is_network = |action: &String| is_queue(action) || is_port(action);
    for irq in inventory.irqs.iter_mut().filter(|irq| irq.device.is_none() && !claimed.contains(&irq.id.irq)) {
        irq.network |= irq.actions.iter().any(is_network);
    }
    for (nic, irqs) in inventory.nics.iter_mut().filter(|nic| nic.physical).zip(found) {
        nic.irqs = irqs.into_iter().collect();
    }
}

/// Whether a handler has a name that drivers give to queues, of any interface: `eth1-TxRx-3`, `end1:tx-0`.
fn is_numbered_queue(handler: &str) -> bool {
    let name = handler.trim_end_matches(|digit: char| digit.is_ascii_digit());
    name.len() < handler.len() && ["rx-", "tx-"].iter().any(|end| name.ends_with(end)) && !name.starts_with("dma")
}

/// The interfaces below an interface.
#[derive(Debug, Clone, Default)]
struct Below {
    lower: Vec<u32>,
    /// The interface is a port of a switch: its device is the switch, and the interface in its `iflink` has the
    /// interrupts (`net/dsa/user.c`, `dsa_user_get_iflink`). A child of IPoIB also has an `iflink`, but rings of its
    /// own; a veth's `iflink` is its other end. Or it is a representor without a device (bnxt, nfp, sfc).
    carried: bool,
}

/// The interfaces below each interface, by index.
fn below(roots: &Roots, links: &[Link]) -> BTreeMap<u32, Below> {
    let class = roots.sys.join("class/net");
    let index = |name: &str| links.iter().find(|link| link.name == name).map(|link| link.ifindex);
    let by_number = |number: u32| {
        let is = |link: &&Link| read_number(&class.join(&link.name).join("ifindex")).unwrap_or(link.ifindex) == number;
        links.iter().find(is).map(|link| link.ifindex)
    };
    let of = |link: &Link| {
        let dir = class.join(&link.name);
        let mut lower: BTreeSet<u32> =
            names_in(&dir).iter().filter_map(|name| index(name.strip_prefix("lower_")?)).collect();
        let mut carried = false;
        if dir.join("device").exists() {
            let iflink = read_number(&dir.join("iflink")).or(link.link).and_then(by_number);
            let on = iflink.filter(|index| *index != link.ifindex);
            carried = on.is_some() && !matches!(link.kind.as_deref(), Some("ipoib" | "veth"));
            lower.extend(on.filter(|_| carried));
        } else if link.kind.as_deref().is_some_and(|kind| !["veth", "netkit"].contains(&kind)) {
            // A tunnel has no `lower_*` link to the NIC that carries it.
            lower.extend(link.link.and_then(by_number));
        }
        let uplink = uplink_of(&class, &dir, links);
        carried |= uplink.is_some() && !dir.join("device").exists();
        lower.extend(uplink);
        lower.remove(&link.ifindex);
        Below { lower: lower.into_iter().collect(), carried }
    };
    links.iter().map(|link| (link.ifindex, of(link))).collect()
}

/// The interface of the NIC that a representor belongs to: on the same switch and of the same physical function, or the
/// only one of that switch.
fn uplink_of(class: &Path, representor: &Path, links: &[Link]) -> Option<u32> {
    let function = represented(representor)?;
    let switch = read(&representor.join("phys_switch_id")).filter(|id| !id.is_empty())?;
    let is_uplink = |link: &&Link| {
        let dir = class.join(&link.name);
        let is_of_switch = || read(&dir.join("phys_switch_id")).as_ref() == Some(&switch);
        dir.join("device").exists() && represented(&dir).is_none() && is_of_switch()
    };
    let uplinks: Vec<&Link> = links.iter().filter(is_uplink).collect();
    let is_of_function = |link: &&&Link| {
        let port = read(&class.join(&link.name).join("phys_port_name"));
        port.is_some_and(|name| name.strip_prefix('p') == Some(&function))
    };
    let only = || uplinks.first().filter(|_| uplinks.len() == 1);
    uplinks.iter().find(is_of_function).or_else(only).map(|link| link.ifindex)
}

/// The number of the physical function to which a representor belongs.
fn represented(dir: &Path) -> Option<String> {
    ontime_tenants::vnic::represented(&read(&dir.join("phys_port_name"))?).map(str::to_owned)
}

fn names_in(dir: &Path) -> Vec<String> {
    entries(dir).map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn note(about: &str, why: String) -> Note {
    Note { about: about.to_owned(), why }
}

/// Queries through a socket that may have failed to open.
fn with<T>(ethtool: &mut io::Result<Ethtool>, ask: impl FnOnce(&mut Ethtool) -> io::Result<T>) -> io::Result<T> {
    match ethtool {
        Ok(ethtool) => ask(ethtool),
        Err(error) => Err(match error.raw_os_error() {
            Some(code) => io::Error::from_raw_os_error(code),
            None => io::Error::new(error.kind(), error.to_string()),
        }),
    }
}

/// Values that drivers report, by interface index. If a kernel or driver does not report them, no rule needs them. One
/// device that is being reset ends the dump for all devices (`net/ethtool/netlink.c`, `ethnl_default_dumpit`); then
/// each device is queried alone. If the query itself fails, the inventory is incomplete. Otherwise Ontime would restore
/// settings in this pass and set them again in the next.
fn driver_values<T>(
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
        let why = netlink_error("netlink family ethtool", &error);
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

/// Whether the cause is this process or host, and not a device that does not answer.
fn is_ours(error: &io::Error) -> bool {
    !matches!(
        error.raw_os_error(),
        Some(libc::ENODEV | libc::EOPNOTSUPP | libc::EIO | libc::EINVAL | libc::EBUSY | libc::ETIMEDOUT)
    )
}

/// Whether the kernel lacks the netlink family, or the family lacks the request.
fn is_old(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::ENOENT))
}

/// Before 6.8: NAPI instances that have a thread, found by the interface name in the thread's name. If the kernel cut
/// that name, it may match several interfaces. Then the instance is in the list of each, and a note reports it.
fn napis_by_thread(inventory: &mut Inventory, links: &[Link]) -> BTreeMap<u32, Vec<Napi>> {
    let mut found: BTreeMap<u32, Vec<Napi>> = BTreeMap::new();
    let mut doubtful: BTreeMap<Vec<&str>, Vec<i32>> = BTreeMap::new();
    let cuts = inventory.kernel.version < WHOLE_NAMES;
    for thread in &inventory.threads {
        let id = match thread.kind {
            KernelThreadKind::NapiCut => 0,
            KernelThreadKind::Napi(_) if cuts && thread.comm.len() == CUT => 0,
            KernelThreadKind::Napi(id) => id,
            _ => continue,
        };
        let named: Vec<&Link> = links.iter().filter(|link| is_napi_of(&thread.comm, &link.name, id == 0)).collect();
        for link in &named {
            found.entry(link.ifindex).or_default().push(Napi { id, pid: Some(thread.id.tid), ..Napi::default() });
        }
        if named.len() > 1 {
            doubtful.entry(named.iter().map(|link| link.name.as_str()).collect()).or_default().push(thread.id.tid);
        }
    }
    let notes = doubtful.into_iter().map(|(names, threads)| {
        let threads: Vec<String> = threads.iter().map(i32::to_string).collect();
        let why = format!(
            "kernel {} shows 15 bytes of a thread's name, so NAPI threads {} are those of one of {}: each has the \
             class of the most urgent of these; rename all but one (ip link set NIC name SHORTER, while it is down), \
             or boot a kernel of 5.17 or later",
            inventory.kernel.release,
            threads.join(", "),
            names.join(", "),
        );
        note("NAPI threads", why)
    });
    let notes: Vec<Note> = notes.collect();
    inventory.notes.extend(notes);
    found
}

/// Whether a thread with this name may belong to an interface's NAPI instance. Its whole name is `napi/NIC-ID`.
fn is_napi_of(comm: &str, name: &str, cut: bool) -> bool {
    let whole = format!("napi/{name}-");
    match comm.strip_prefix(&whole) {
        Some(id) => id.bytes().all(|byte| byte.is_ascii_digit()),
        None => cut && whole.starts_with(comm),
    }
}

fn nic(roots: &Roots, link: Link, napis: Vec<Napi>) -> Nic {
    let dir = roots.sys.join("class/net").join(&link.name);
    let device = dir.join("device");
    let physical = device.exists();
    let driver = fs::read_link(device.join("driver"))
        .ok()
        .and_then(|target| Some(target.file_name()?.to_string_lossy().into_owned()));
    let (rx_queues, tx_queues) = queues(&dir, physical);
    Nic {
        id: NicId { ifindex: link.ifindex, name: link.name },
        altnames: link.altnames,
        physical,
        carried: false,
        lower: Vec::new(),
        driver,
        node: read_number(&device.join("numa_node")),
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
        irqs: Vec::new(),
        moderation: None,
        tx_ring: None,
    }
}

/// The queues in use: sysfs has a directory for each. XPS of virtual interfaces is not read; no rule needs it.
fn queues(dir: &Path, physical: bool) -> (u32, Vec<TxQueue>) {
    let mut receive = 0;
    let mut transmit = BTreeMap::new();
    for path in entries(&dir.join("queues")).map(|entry| entry.path()) {
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
    use ontime_tenants::{Policy, ThreadId};

    use super::*;
    use crate::inventory::KernelThread;

    #[test]
    fn one_device_that_does_not_answer_leaves_the_others_known_and_who_cannot_ask_has_not_looked() {
        let links: Vec<Link> = (1..=3).map(|ifindex| Link { ifindex, ..Link::default() }).collect();
        let fails = |code| io::Error::from_raw_os_error(code);
        let look = |all: Result<BTreeMap<u32, u32>, i32>, away: i32| {
            let mut inventory = Inventory::default();
            let one = |ifindex| if ifindex == 2 { Err(fails(away)) } else { Ok(ifindex * 10) };
            let found = driver_values(&mut inventory, "rings", &links, all.map_err(fails), one);
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

    fn threads(comms: &[&str]) -> Vec<KernelThread> {
        let numbered = (100..).zip(comms);
        let kind = |comm: &str| {
            let id = comm.rsplit_once('-').and_then(|(_, id)| id.parse().ok());
            id.map_or(KernelThreadKind::NapiCut, KernelThreadKind::Napi)
        };
        let thread = |(tid, comm): (i32, &&str)| KernelThread {
            id: ThreadId { pid: tid, tid, start_time: 1 },
            kind: kind(comm),
            comm: (*comm).to_owned(),
            policy: Policy::BULK,
        };
        numbered.map(thread).collect()
    }

    /// The threads that each of these interfaces gets, and the notes.
    fn by_thread(version: (u32, u32), names: &[&str], comms: &[&str]) -> (Vec<Vec<i32>>, Vec<String>) {
        let links: Vec<Link> = (1..)
            .zip(names)
            .map(|(ifindex, name)| Link { ifindex, name: (*name).to_owned(), ..Link::default() })
            .collect();
        let mut inventory = Inventory { threads: threads(comms), ..Inventory::default() };
        inventory.kernel.version = version;
        let found = napis_by_thread(&mut inventory, &links);
        let of = |link: &Link| found.get(&link.ifindex).into_iter().flatten().filter_map(|napi| napi.pid).collect();
        (links.iter().map(of).collect(), inventory.notes.into_iter().map(|note| note.why).collect())
    }

    #[test]
    fn threads_whose_names_are_cut_are_found_by_what_is_left_of_the_name() {
        let old = (5, 16);
        // Names cut within the interface's name, at its end, and within the id; and names that are not cut.
        let (found, notes) = by_thread(
            old,
            &["enp193s0f1np1", "enp65s0f0d", "ens12f1", "lan0"],
            &["napi/enp193s0f1", "napi/enp65s0f0d", "napi/ens12f1-83", "napi/ens12f1-84", "napi/lan0-8201"],
        );
        assert_eq!(found, [vec![100], vec![101], vec![102, 103], vec![104]]);
        assert!(notes.is_empty(), "{notes:?}");
        // An interface name that is only the beginning of another.
        let (found, notes) = by_thread(old, &["ens12f", "ens12f1"], &["napi/ens12f1-83", "napi/ens12f-831"]);
        assert_eq!((found, notes.len()), (vec![vec![101], vec![100]], 0));
    }

    #[test]
    fn two_interfaces_that_cut_names_do_not_tell_apart_are_named() {
        let names = ["enp193s0f1np0", "enp193s0f1np1", "enp193s0f0np0"];
        let (found, notes) = by_thread((5, 12), &names, &["napi/enp193s0f1", "napi/enp193s0f1", "napi/enp193s0f0"]);
        assert_eq!(found, [vec![100, 101], vec![100, 101], vec![102]]);
        assert_eq!(notes.len(), 1);
        assert!(notes[0].contains("threads 100, 101 are those of one of enp193s0f1np0, enp193s0f1np1"), "{notes:?}");
        // Kernels from 5.17 on show whole names. A name that does not match belongs to another interface.
        let (found, notes) = by_thread((5, 17), &names, &["napi/enp193s0f1np1-8197", "napi/enp193s0f-8198"]);
        assert_eq!((found, notes.len()), (vec![vec![], vec![100], vec![]], 0));
    }
}
