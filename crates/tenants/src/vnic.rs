//! Virtual NICs: from a VM's open files to the host's interfaces, and from those to the physical NICs below.
//!
//! Input: `/proc/PID/fd`, `/proc/PID/fdinfo`, `/sys/class/net`. Output: [`Vnic`]s. Source: `drivers/net/tun.c`
//! (`tun_chr_show_fdinfo` prints `iff:`), `net/core/dev.c` (`lower_*` links), `net/bridge/br_sysfs_br.c`.

use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use rustix::fs::CWD;

use crate::files;
use crate::model::Vnic;
use crate::wait_limit::limit_waits;
use crate::{peers, proc};

/// The host's interfaces, read at the first use.
#[derive(Debug)]
pub struct Network {
    root: PathBuf,
    by_index: OnceCell<HashMap<u32, String>>,
    /// The kernel's table of interfaces below others; empty if it cannot be read.
    carriers: OnceCell<HashMap<(u32, String), Option<u32>>>,
    /// The interfaces below those that have a device, each read once.
    carrying: RefCell<HashMap<String, Vec<String>>>,
}

impl Network {
    /// The interfaces below `root` (`/sys/class/net` on a real host).
    pub fn at(root: &Path) -> Self {
        let (by_index, carriers) = (OnceCell::new(), OnceCell::new());
        Self { root: root.to_owned(), by_index, carriers, carrying: RefCell::default() }
    }

    /// Whether the host has the interface (in this network namespace).
    pub fn has(&self, ifname: &str) -> bool {
        is_interface_name(ifname) && self.root.join(ifname).exists()
    }

    /// The interface with this index.
    pub fn name_of(&self, index: u32) -> Option<&str> {
        let table = self.by_index.get_or_init(|| {
            names_in(&self.root).into_iter().filter_map(|name| Some((self.number(&name, "ifindex")?, name))).collect()
        });
        table.get(&index).map(String::as_str)
    }

    /// The virtual NIC for an interface, with the physical NICs below it.
    pub fn vnic(&self, ifname: &str) -> Vnic {
        let mut physical = BTreeSet::new();
        let mut seen = BTreeSet::new();
        self.descend(ifname, &mut seen, &mut physical);
        let below = self.below(&physical);
        Vnic { ifname: ifname.to_owned(), lower: physical.into_iter().collect(), below }
    }

    /// The interfaces with a device through which these send, which have one, too; without these themselves.
    fn below(&self, devices: &BTreeSet<String>) -> Vec<String> {
        let mut found = BTreeSet::new();
        let mut open: Vec<String> = devices.iter().cloned().collect();
        while let Some(upper) = open.pop() {
            for one in self.directly_below(&upper) {
                if !devices.contains(&one) && found.insert(one.clone()) {
                    open.push(one);
                }
            }
        }
        found.into_iter().filter(|name| self.is_physical(name)).collect()
    }

    /// The NIC of a switch's port (`iflink`), the interfaces of a failover or Hyper-V pair (`lower_*`), a representor's
    /// uplink.
    fn directly_below(&self, ifname: &str) -> Vec<String> {
        if let Some(known) = self.carrying.borrow().get(ifname) {
            return known.clone();
        }
        let mut found = self.lower_of(ifname);
        found.extend(self.carrier(ifname).map(str::to_owned).or_else(|| self.uplink(ifname)));
        self.carrying.borrow_mut().insert(ifname.to_owned(), found.clone());
        found
    }

    fn lower_of(&self, ifname: &str) -> Vec<String> {
        let names = names_in(&self.root.join(ifname));
        names.iter().filter_map(|name| name.strip_prefix("lower_").map(str::to_owned)).collect()
    }

    /// The interface of the NIC to which a representor belongs: on the same switch and of the same physical function,
    /// or the only one of that switch.
    fn uplink(&self, representor: &str) -> Option<String> {
        let port = self.text(representor, "phys_port_name")?;
        let function = represented(&port)?;
        let switch = self.text(representor, "phys_switch_id").filter(|id| !id.is_empty())?;
        let port_of = |name: &String| self.text(name, "phys_port_name").unwrap_or_default();
        let is_uplink = |name: &String| {
            self.is_physical(name)
                && represented(&port_of(name)).is_none()
                && self.text(name, "phys_switch_id").as_ref() == Some(&switch)
        };
        let uplinks: Vec<String> = names_in(&self.root).into_iter().filter(is_uplink).collect();
        let of_function = uplinks.iter().find(|name| port_of(name).strip_prefix('p') == Some(function));
        let only = || uplinks.first().filter(|_| uplinks.len() == 1);
        of_function.or_else(only).cloned()
    }

    /// Follows lower devices, the bridge of a port, a tunnel's carrier, a veth pair within this namespace, and a
    /// representor to which its driver gives no device (bnxt, nfp, sfc).
    fn descend(&self, ifname: &str, seen: &mut BTreeSet<String>, physical: &mut BTreeSet<String>) {
        if !seen.insert(ifname.to_owned()) {
            return;
        }
        if self.is_physical(ifname) {
            physical.insert(ifname.to_owned());
            return;
        }
        let mut next = self.lower_of(ifname);
        next.extend(self.bridge_of(ifname));
        next.extend(self.veth_peer(ifname).or_else(|| self.carrier(ifname)).map(str::to_owned));
        next.extend(self.uplink(ifname));
        for one in next {
            self.descend(&one, seen, physical);
        }
    }

    /// The bridge of which an interface is a port. Another kind of master does not tell by which ports the packets
    /// leave: a VRF routes them, and an Open vSwitch datapath (`ovs-system`) is the master of the ports of all its
    /// bridges (`net/openvswitch/vport-netdev.c`, `ovs_netdev_link`).
    fn bridge_of(&self, ifname: &str) -> Option<String> {
        let master = std::fs::read_link(self.root.join(ifname).join("master")).ok()?;
        let name = master.file_name()?.to_string_lossy().into_owned();
        self.root.join(&name).join("bridge").exists().then_some(name)
    }

    fn is_physical(&self, ifname: &str) -> bool {
        self.root.join(ifname).join("device").exists()
    }

    /// The other end of a veth pair, if both ends are here and refer to each other.
    fn veth_peer(&self, ifname: &str) -> Option<&str> {
        let (own, link) = (self.number(ifname, "ifindex")?, self.number(ifname, "iflink")?);
        let peer = self.name_of(link).filter(|_| link != own)?;
        (self.number(peer, "iflink") == Some(own)).then_some(peer)
    }

    /// The interface that carries a tunnel's packets (`ip link add gre1 type gretap ... dev eth0`). Unlike a VLAN's, it
    /// is only in `iflink`, where a veth has the index of its other end, which may be in another namespace. The
    /// kernel's table tells them apart. For an interface that is not in this table, an index counts if it is a physical
    /// NIC's.
    fn carrier(&self, ifname: &str) -> Option<&str> {
        let (own, link) = (self.number(ifname, "ifindex")?, self.number(ifname, "iflink")?);
        let below = self.name_of(link).filter(|_| link != own)?;
        let table = self.carriers.get_or_init(|| peers::carriers().inspect_err(files::note).unwrap_or_default());
        let carries = match table.get(&(own, ifname.to_owned())) {
            Some(known) => *known == Some(link),
            None => self.is_physical(below),
        };
        carries.then_some(below)
    }

    /// The character device of a macvtap or ipvtap interface, `MAJOR:MINOR`.
    fn tap_device(&self, ifname: &str, index: u32) -> Option<String> {
        let mut files = ["macvtap/", "ipvtap/", ""].iter().map(|class| format!("{ifname}/{class}tap{index}/dev"));
        let device = files.find_map(|file| text_of(&self.root.join(file)))?;
        Some(device.trim().to_owned())
    }

    fn number(&self, ifname: &str, attribute: &str) -> Option<u32> {
        self.text(ifname, attribute)?.parse().ok()
    }

    fn text(&self, ifname: &str, attribute: &str) -> Option<String> {
        Some(text_of(&self.root.join(ifname).join(attribute))?.trim().to_owned())
    }
}

/// The text of a file. None also if it cannot be read: [`files::exhausted`] tells whether that was for want of a
/// descriptor.
fn text_of(file: &Path) -> Option<String> {
    std::fs::read_to_string(file).inspect_err(files::note).ok()
}

/// The number of the physical function whose representor has this `phys_port_name`: `pf1vf3` and `c2pf1sf40` belong to
/// 1 (`net/devlink/port.c`, `__devlink_port_phys_port_name_get`).
pub fn represented(port: &str) -> Option<&str> {
    fn after_number(text: &str) -> &str {
        text.trim_start_matches(|c: char| c.is_ascii_digit())
    }
    let own = port.strip_prefix('c').map_or(port, after_number);
    // sfc adds the port in front: `p0pf0vf1`.
    let at_port = own.strip_prefix('p').map(after_number);
    let function = at_port.filter(|rest| rest.starts_with("pf")).unwrap_or(own).strip_prefix("pf")?;
    function.get(..function.len() - after_number(function).len()).filter(|digits| !digits.is_empty())
}

fn names_in(directory: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(directory).inspect_err(files::note).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// The kernel's rule (`dev_valid_name`), so that an external name cannot leave the directory.
fn is_interface_name(name: &str) -> bool {
    (1..=15).contains(&name.len())
        && name != "."
        && name != ".."
        && !name.contains(|c: char| c == '/' || c == ':' || c.is_ascii_whitespace())
}

/// The device number behind an open file. A process with its own mount namespace chooses the file's path. The file
/// system, which may be the process's own, is not asked.
fn device_at(path: &Path) -> Option<String> {
    let flags = rustix::fs::AtFlags::STATX_DONT_SYNC;
    let file = limit_waits(|| rustix::fs::statx(CWD, path, flags, rustix::fs::StatxFlags::TYPE)).ok()?;
    let kind = rustix::fs::FileType::from_raw_mode(file.stx_mode.into());
    kind.is_char_device().then(|| format!("{}:{}", file.stx_rdev_major, file.stx_rdev_minor))
}

/// Open files of a process.
#[derive(Debug)]
pub struct OpenFiles {
    process: PathBuf,
    /// Descriptors and their targets, as far as used here: devices and anonymous files such as KVM's.
    pub targets: Vec<(String, String)>,
    /// Number of descriptors that were read.
    pub looked_at: usize,
    /// Whether these are all.
    pub whole: bool,
}

/// The first `limit` open files of a process.
///
/// # Errors
/// If `/proc/PID/fd` cannot be listed, which needs root for other users' processes.
pub(crate) fn open_files(process: &Path, limit: usize) -> std::io::Result<OpenFiles> {
    limit_waits(|| first_files(process, limit))
}

fn first_files(process: &Path, limit: usize) -> std::io::Result<OpenFiles> {
    let open = files::directory(process.join("fd"))?;
    let (descriptors, whole) = files::names(&open, limit);
    let looked_at = descriptors.len();
    let target = |fd: String| Some((files::link_at(&open, fd.as_str()).ok()?, fd));
    let targets = descriptors.into_iter().filter_map(target).map(|(target, fd)| (fd, target));
    let matters = |target: &str| target.contains("/dev/") || target.starts_with("anon_inode:");
    let targets = targets.filter(|(_, target)| matters(target)).collect();
    Ok(OpenFiles { process: process.to_owned(), targets, looked_at, whole })
}

impl OpenFiles {
    /// The interfaces behind the tap and macvtap files, and whether each is one of the host's; a jail has a `/dev` of
    /// its own. A process may have any file at `/dev/tap2`, and interface 2 may be a NIC. So the kernel must confirm
    /// that the device belongs to the interface. Only a tap's file has a line `iff`, with a name in the tap's network
    /// namespace: `is_here` tells of a descriptor whether that is the host's.
    pub fn interfaces(&self, network: &Network, is_here: impl Fn(&str) -> bool) -> BTreeMap<String, bool> {
        let mut found = BTreeMap::new();
        for (fd, target) in &self.targets {
            let Some((_, device)) = target.rsplit_once("/dev/") else { continue };
            if device == "net/tun" {
                let info = files::read_at(CWD, self.process.join("fdinfo").join(fd)).unwrap_or_default();
                if let Some(name) = proc::status_value(&info, "iff").filter(|name| is_interface_name(name)) {
                    found.entry(name.to_owned()).or_insert_with(|| network.has(name) && is_here(fd));
                }
            } else if let Some(index) = device.strip_prefix("tap").and_then(|number| number.parse().ok()) {
                let is_its = |ifname: &&str| {
                    let device = network.tap_device(ifname, index);
                    device.is_some() && device == device_at(&self.process.join("fd").join(fd))
                };
                found.extend(network.name_of(index).filter(is_its).map(|name| (name.to_owned(), true)));
            }
        }
        found
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    struct Tree(tempfile::TempDir);

    impl Tree {
        fn new(names: &[(&str, u32, u32)]) -> Self {
            let tree = Self(tempfile::tempdir().unwrap());
            for (name, index, link) in names {
                let dir = tree.0.path().join(name);
                std::fs::create_dir(&dir).unwrap();
                std::fs::write(dir.join("ifindex"), format!("{index}\n")).unwrap();
                std::fs::write(dir.join("iflink"), format!("{link}\n")).unwrap();
            }
            tree
        }
        fn link(&self, from: &str, to: &str) {
            symlink(format!("../{to}"), self.0.path().join(from)).unwrap();
        }
        /// An interface with a device on a bus.
        fn physical(&self, ifname: &str) {
            std::fs::create_dir(self.0.path().join(ifname).join("device")).unwrap();
        }
        fn port(&self, master: &str, port: &str) {
            self.link(&format!("{master}/lower_{port}"), port);
            self.link(&format!("{port}/master"), master);
        }
        fn bridge(&self, name: &str, ports: &[&str]) {
            std::fs::create_dir(self.0.path().join(name).join("bridge")).unwrap();
            ports.iter().for_each(|port| self.port(name, port));
        }
        fn lower(&self, ifname: &str) -> Vec<String> {
            Network::at(self.0.path()).vnic(ifname).lower
        }
    }

    #[test]
    fn macvtap_and_bridges_and_bonds_lead_to_the_physical_nics() {
        let tree = Tree::new(&[
            ("eth0", 1, 1),
            ("eth1", 2, 2),
            ("bond0", 3, 3),
            ("br0", 4, 4),
            ("tap0", 5, 5),
            ("tap1", 6, 6),
            ("macvtap0", 7, 1),
            ("lonely", 8, 8),
        ]);
        for nic in ["eth0", "eth1"] {
            tree.physical(nic);
            tree.port("bond0", nic);
        }
        tree.link("macvtap0/lower_eth0", "eth0");
        tree.bridge("br0", &["bond0", "tap0", "tap1"]);
        assert_eq!(tree.lower("macvtap0"), ["eth0"]);
        assert_eq!(tree.lower("tap0"), ["eth0", "eth1"]);
        assert!(tree.lower("lonely").is_empty());
        assert!(tree.lower("gone").is_empty());
    }

    #[test]
    fn vlans_lead_to_the_nic_or_the_bonds_nics_below_them() {
        let tree = Tree::new(&[
            ("eth0", 1, 1),
            ("eth1", 2, 2),
            ("eth2", 3, 3),
            ("bond0", 4, 4),
            ("eth2.5", 5, 3),
            ("bond0.7", 6, 4),
            ("br5", 7, 7),
            ("br7", 8, 8),
            ("tap5", 9, 9),
            ("tap7", 10, 10),
            ("macvtap0", 11, 6),
        ]);
        ["eth0", "eth1", "eth2"].iter().for_each(|nic| tree.physical(nic));
        ["eth0", "eth1"].iter().for_each(|nic| tree.port("bond0", nic));
        tree.link("eth2.5/lower_eth2", "eth2");
        tree.link("bond0.7/lower_bond0", "bond0");
        tree.link("macvtap0/lower_bond0.7", "bond0.7");
        tree.bridge("br5", &["eth2.5", "tap5"]);
        tree.bridge("br7", &["bond0.7", "tap7"]);
        assert_eq!(tree.lower("tap5"), ["eth2"]);
        assert_eq!(tree.lower("tap7"), ["eth0", "eth1"]);
        assert_eq!(tree.lower("macvtap0"), ["eth0", "eth1"]);
    }

    #[test]
    fn open_vswitchs_datapath_and_a_vrf_lead_nowhere() {
        let tree = Tree::new(&[
            ("eth0", 1, 1),
            ("eth1", 2, 2),
            ("ovs-system", 3, 3),
            ("tap0", 4, 4),
            ("tap1", 5, 5),
            ("qbr1", 6, 6),
            ("qvb1", 7, 8),
            ("qvo1", 8, 7),
            ("red", 9, 9),
            ("tap2", 10, 10),
        ]);
        ["eth0", "eth1"].iter().for_each(|nic| tree.physical(nic));
        // eth0 and tap0 are ports of one bridge, eth1 and qvo1 of another. The kernel does not show this.
        ["eth0", "tap0", "eth1", "qvo1"].iter().for_each(|port| tree.port("ovs-system", port));
        tree.bridge("qbr1", &["tap1", "qvb1"]);
        tree.port("red", "tap2");
        tree.link("red/lower_eth0", "eth0");
        for tap in ["tap0", "tap1", "tap2"] {
            assert!(tree.lower(tap).is_empty(), "{tap}: {:?}", tree.lower(tap));
        }
    }

    #[test]
    fn a_veth_pair_between_two_bridges_is_followed() {
        let tree = Tree::new(&[
            ("eth0", 1, 1),
            ("br0", 2, 2),
            ("br1", 3, 3),
            ("va", 4, 5),
            ("vb", 5, 4),
            ("tap0", 6, 6),
            ("vc", 7, 4),
        ]);
        tree.physical("eth0");
        tree.bridge("br0", &["tap0", "va"]);
        tree.bridge("br1", &["vb", "eth0"]);
        assert_eq!(tree.lower("tap0"), ["eth0"]);
        assert!(tree.lower("vc").is_empty(), "its peer is in another namespace; the number only looks alike");
    }

    #[test]
    fn a_tunnel_leads_to_the_nic_that_carries_it() {
        let tree = Tree::new(&[
            ("eno1", 1, 1),
            ("br0", 2, 2),
            ("erspan4", 3, 1),
            ("tap0", 4, 4),
            ("br1", 5, 5),
            ("vlan9", 6, 6),
            ("tap1", 7, 7),
            ("anywhere", 8, 0),
            ("gone", 9, 77),
        ]);
        tree.physical("eno1");
        tree.bridge("br0", &["erspan4", "tap0"]);
        tree.bridge("br1", &["anywhere", "gone", "tap1"]);
        assert_eq!(tree.lower("tap0"), ["eno1"]);
        assert!(tree.lower("tap1").is_empty(), "tunnels by the routing table, and over an interface that is not here");
    }

    /// Drivers differ in whether a representor has a device, and in how they number ports and functions.
    #[test]
    fn a_representor_without_a_device_leads_to_the_uplink_of_its_switch() {
        let tree = Tree::new(&[
            ("ens3f0", 1, 1),
            ("ens3f1", 2, 2),
            ("ens5", 3, 3),
            ("rep0", 4, 4),
            ("rep1", 5, 5),
            ("rep2", 6, 6),
            ("rep3", 7, 7),
            ("br0", 8, 8),
            ("tap0", 9, 9),
        ]);
        ["ens3f0", "ens3f1", "ens5"].iter().for_each(|nic| tree.physical(nic));
        for (name, port, switch) in [
            ("ens3f0", "p0", "aa"),
            ("ens3f1", "p1", "aa"),
            ("ens5", "p2", "bb"),
            ("rep0", "pf1vf0", "aa"),
            ("rep1", "pf0vf4", "bb"),
            ("rep2", "pf7vf4", "aa"),
            ("rep3", "pf0vf1", ""),
        ] {
            for (attribute, text) in [("phys_port_name", port), ("phys_switch_id", switch)] {
                std::fs::write(tree.0.path().join(name).join(attribute), format!("{text}\n")).unwrap();
            }
        }
        assert_eq!(tree.lower("rep0"), ["ens3f1"]);
        assert_eq!(tree.lower("rep1"), ["ens5"], "the only one of its switch");
        assert!(tree.lower("rep2").is_empty(), "either one may carry it");
        assert!(tree.lower("rep3").is_empty());
        tree.bridge("br0", &["rep0", "tap0"]);
        assert_eq!(tree.lower("tap0"), ["ens3f1"]);
    }

    #[test]
    fn below_an_interface_with_a_device_is_the_one_by_which_it_sends() {
        let tree = Tree::new(&[
            ("cpu0", 1, 1),
            ("lan3", 2, 1),
            ("syn0", 3, 3),
            ("vf0", 4, 4),
            ("up1", 5, 5),
            ("rep2", 6, 6),
            ("other", 7, 7),
            ("br0", 8, 8),
            ("tap0", 9, 9),
        ]);
        for (name, port, switch) in [
            ("cpu0", "", ""),
            ("lan3", "p3", "aa"),
            ("syn0", "", ""),
            ("vf0", "", ""),
            ("up1", "p1", "bb"),
            ("rep2", "c1pf1vf2", "bb"),
            ("other", "p1", "cc"),
        ] {
            tree.physical(name);
            for (attribute, text) in [("phys_port_name", port), ("phys_switch_id", switch)] {
                std::fs::write(tree.0.path().join(name).join(attribute), format!("{text}\n")).unwrap();
            }
        }
        tree.link("syn0/lower_vf0", "vf0");
        tree.bridge("br0", &["lan3", "syn0", "rep2", "tap0"]);
        let found = Network::at(tree.0.path()).vnic("tap0");
        assert_eq!(found.lower, ["lan3", "rep2", "syn0"]);
        assert_eq!(found.below, ["cpu0", "up1", "vf0"]);
        let network = Network::at(tree.0.path());
        assert!(["cpu0", "vf0", "up1", "other"].iter().all(|nic| network.vnic(nic).below.is_empty()));
    }

    /// In the test's own network namespace, where the kernel's table has the interfaces.
    #[test]
    fn the_kernel_tells_a_tunnel_from_a_pair_whose_other_end_has_a_nics_number() {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: needs root");
            return;
        }
        let ip = |arguments: &str| {
            std::process::Command::new("ip").args(arguments.split(' ')).status().is_ok_and(|status| status.success())
        };
        std::thread::scope(|scope| {
            scope.spawn(|| {
                use rustix::thread::{UnshareFlags, unshare_unsafe};
                // SAFETY: only this thread, which ends with the test, changes its namespace; memory and descriptors
                // stay shared as before.
                unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.unwrap();
                // A process of its own namespace takes the far end.
                let mut inside = std::process::Command::new("unshare").args(["--net", "sleep", "60"]).spawn().unwrap();
                let namespace = |task: String| std::fs::read_link(format!("/proc/{task}/ns/net")).unwrap();
                let here = format!("{}/task/{}", std::process::id(), rustix::thread::gettid().as_raw_nonzero());
                while namespace(inside.id().to_string()) == namespace(here.clone()) {
                    std::thread::sleep(std::time::Duration::from_millis(5));
                }
                let far = format!("netns {}", inside.id());
                let made = ip("link add uplink index 200 type veth peer name otherend")
                    && ip(&format!("link add near index 201 type veth peer name eth0 index 200 {far}"))
                    // The tree shows it like a tunnel, which not every kernel has.
                    && ip("link add link uplink index 202 name gre8 type macvlan");
                if made {
                    let names = [("uplink", 200, 200), ("near", 201, 200), ("gre8", 202, 200), ("new", 203, 200)];
                    let tree = Tree::new(&names);
                    tree.physical("uplink");
                    let found = names.map(|(name, ..)| tree.lower(name));
                    let uplink = vec!["uplink".to_owned()];
                    assert_eq!(found, [uplink.clone(), vec![], uplink.clone(), uplink]);
                } else {
                    println!("SKIPPED: no macvlan or veth here");
                }
                inside.kill().unwrap();
                inside.wait().unwrap();
            });
        });
    }

    #[test]
    fn open_files_name_their_interfaces() {
        let tree = Tree::new(&[("tap3", 3, 3), ("tap4", 4, 4), ("macvtap9", 9, 1)]);
        let process = tempfile::tempdir().unwrap();
        for dir in ["fd", "fdinfo"] {
            std::fs::create_dir(process.path().join(dir)).unwrap();
        }
        for (fd, target, info) in [
            ("3", "/dev/net/tun", "pos:\t0\nflags:\t0100002\niff:\ttap3\n"),
            ("4", "/dev/tap9", "pos:\t0\n"),
            ("5", "/dev/tap77", "pos:\t0\n"),
            ("6", "/dev/net/tun", "pos:\t0\niff:\t../x\n"),
            ("7", "socket:[5]", ""),
            ("8", "/dev/net/tun", "pos:\t0\n"),
            // In the jail of a monitor, which is a directory of the host.
            ("9", "/srv/jailer/firecracker/7c9e/root/dev/net/tun", "pos:\t0\niff:\ttap4\n"),
        ] {
            symlink(target, process.path().join("fd").join(fd)).unwrap();
            std::fs::write(process.path().join("fdinfo").join(fd), info).unwrap();
        }
        let network = Network::at(tree.0.path());
        let open = open_files(process.path(), 100).unwrap();
        let named = |is_here: &dyn Fn(&str) -> bool| Vec::from_iter(open.interfaces(&network, is_here));
        let of = |is_here: bool| [("tap3".to_owned(), is_here), ("tap4".to_owned(), false)];
        // Nothing says that /dev/tap9 is the interface's.
        assert_eq!(named(&|fd| fd == "3"), of(true));
        assert_eq!(named(&|_| false), of(false), "it has the name of an interface here, and is none");
        assert_eq!((open.looked_at, open.whole), (7, true));
        let first = open_files(process.path(), 2).unwrap();
        assert_eq!((first.looked_at, first.whole), (2, false));
    }

    /// In its own mount namespace a process may have any file at `/dev/tap9`.
    #[test]
    fn a_path_of_a_macvtaps_device_is_not_the_device() {
        let tree = Tree::new(&[("macvtap9", 9, 1)]);
        let class = tree.0.path().join("macvtap9/macvtap/tap9");
        std::fs::create_dir_all(&class).unwrap();
        std::fs::write(class.join("dev"), "238:9\n").unwrap();
        let process = tempfile::tempdir().unwrap();
        std::fs::create_dir(process.path().join("fd")).unwrap();
        symlink("/dev/tap9", process.path().join("fd/4")).unwrap();
        let open = open_files(process.path(), 100).unwrap();
        assert_eq!(open.targets.len(), 1);
        assert!(open.interfaces(&Network::at(tree.0.path()), |_| true).is_empty());
        assert_eq!(device_at(Path::new("/dev/null")).as_deref(), Some("1:3"));
        assert_eq!(device_at(Path::new("/proc/self/exe")), None);
    }

    #[test]
    fn names_that_would_leave_the_directory_are_no_interfaces() {
        let network = Network::at(Path::new("/sys/class/net"));
        assert!(network.has("lo"));
        for name in ["", ".", "..", "../net/lo", "a/b", "sixteen-bytes-xx", "a b"] {
            assert!(!network.has(name), "{name}");
        }
        assert!(network.vnic("lo").lower.is_empty());
    }
}
