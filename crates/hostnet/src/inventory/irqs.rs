//! Interrupts with a handler.
//!
//! Source: `/sys/kernel/irq` (`kernel/irq/irqdesc.c`, 4.9; with CONFIG_SPARSE_IRQ), `/proc/irq` (`kernel/irq/proc.c`),
//! `/sys/bus/pci/devices`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use ontime_tenants::vnic::represented;

use super::Irq;
use super::devices::{BusDevice, Pci, on_other_buses};
use crate::cpus::CpuSet;
use crate::knob::IrqId;
use crate::roots::{Roots, entries, read};

pub(super) fn scan(roots: &Roots, pci: &Pci) -> Vec<Irq> {
    let others = on_other_buses(&roots.sys);
    let described = numbers_in(&roots.sys.join("kernel/irq"));
    let all = if described.is_empty() { numbers_in(&roots.proc.join("irq")) } else { described };
    let mut irqs: Vec<Irq> = all
        .into_iter()
        .filter_map(|irq| {
            let dir = roots.sys.join(format!("kernel/irq/{irq}"));
            let proc = roots.proc.join(format!("irq/{irq}"));
            let actions = match read(&dir.join("actions")) {
                Some(actions) if actions.is_empty() || actions == "(null)" => return None,
                Some(actions) => actions.split(',').map(str::to_owned).collect(),
                None => handlers_in(&proc),
            };
            if actions.is_empty() {
                return None;
            }
            // A kernel for one CPU has no such file.
            let file = proc.join("smp_affinity_list");
            let affinity = read(&file).unwrap_or_default();
            // Without the description it is not certain later that the number is still this interrupt's.
            let is_writable = || fs::metadata(&file).is_ok_and(|file| file.permissions().mode() & 0o222 != 0);
            let settable = dir.exists() && is_writable();
            let id = IrqId {
                irq,
                chip: read(&dir.join("chip_name")).unwrap_or_default(),
                hwirq: read(&dir.join("hwirq")).unwrap_or_default(),
            };
            let other = || BusDevice::of(&others, &id, &actions).map(|device| (device.name.clone(), device.network));
            let (device, network) = pci.owner(irq, &actions).or_else(other).unzip();
            let virtual_of = device.as_deref().and_then(|device| virtual_of(&roots.sys, device));
            Some(Irq {
                id,
                actions,
                affinity: CpuSet::from_list(&affinity).unwrap_or_default(),
                settable,
                device,
                network: network.unwrap_or_default(),
                virtual_of,
                elsewhere: None,
            })
        })
        .collect();
    irqs.sort_by_key(|irq| irq.id.irq);
    irqs
}

fn numbers_in(dir: &Path) -> Vec<u32> {
    entries(dir).filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// The handlers of an interrupt by the folders that `/proc/irq/N` has for them (`register_handler_proc`).
fn handlers_in(proc: &Path) -> Vec<String> {
    let folders = entries(proc).filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// The physical function of a PCI virtual function (`physfn`): its interface if it has one here, otherwise its name.
fn virtual_of(sys: &Path, device: &str) -> Option<String> {
    let function = sys.join("bus/pci/devices").join(device).join("physfn");
    // Where the NIC is a switch, the representors of its ports are there, too (5.8).
    let is_own = |entry: &fs::DirEntry| {
        read(&entry.path().join("phys_port_name")).is_none_or(|port| represented(&port).is_none())
    };
    let name = entries(&function.join("net")).filter(is_own).map(|entry| entry.file_name()).min();
    let name = name.or_else(|| Some(fs::read_link(&function).ok()?.file_name()?.to_owned()))?;
    Some(name.to_string_lossy().into_owned())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn put(path: PathBuf, text: &str) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    #[test]
    fn a_network_controllers_interrupts_are_known_without_its_interface() {
        let dir = tempfile::tempdir().unwrap();
        let roots = Roots { sys: dir.path().join("sys"), proc: dir.path().join("proc"), ..Roots::default() };
        for (irq, handler) in [(24, "mlx5_comp0@pci:0000:01:00.0"), (25, "ahci"), (10, "ne2k")] {
            put(roots.sys.join(format!("kernel/irq/{irq}/actions")), handler);
            put(roots.proc.join(format!("irq/{irq}/smp_affinity_list")), "0-1");
        }
        // Without a handler, and with one whose driver gave it no name (`kernel/irq/irqdesc.c`, `actions_show`).
        put(roots.sys.join("kernel/irq/26/actions"), "\n");
        put(roots.sys.join("kernel/irq/27/actions"), "(null)\n");
        let pci = roots.sys.join("bus/pci/devices");
        put(pci.join("0000:01:00.0/class"), "0x020000\n");
        put(pci.join("0000:01:00.0/msi_irqs/24"), "msix");
        put(pci.join("0000:01:00.0/irq"), "11");
        put(pci.join("0000:02:00.0/class"), "0x010601\n");
        put(pci.join("0000:02:00.0/msi_irqs/25"), "msi");
        put(pci.join("0000:03:00.0/class"), "0x028000\n");
        put(pci.join("0000:03:00.0/irq"), "10");
        std::os::unix::fs::symlink("../../drivers/ne2k-pci", pci.join("0000:03:00.0/driver")).unwrap();
        // On other buses the handler's name is that of the device.
        for (irq, handler) in [(30, "virtio3-requests"), (31, "virtio4-input.0"), (32, "1a2b0000.ethernet")] {
            put(roots.sys.join(format!("kernel/irq/{irq}/actions")), handler);
            put(roots.proc.join(format!("irq/{irq}/smp_affinity_list")), "0-1");
        }
        put(roots.sys.join("bus/virtio/devices/virtio3/device"), "0x0002\n");
        put(roots.sys.join("bus/virtio/devices/virtio4/device"), "0x0001\n");
        put(roots.sys.join("bus/platform/devices/1a2b0000.ethernet/of_node/name"), "ethernet\0");
        let found: Vec<_> =
            scan(&roots, &Pci::scan(&roots.sys)).into_iter().map(|irq| (irq.id.irq, irq.device, irq.network)).collect();
        let wanted = [
            (10, Some("0000:03:00.0"), true),
            (24, Some("0000:01:00.0"), true),
            (25, Some("0000:02:00.0"), false),
            (30, Some("virtio3"), false),
            (31, Some("virtio4"), true),
            (32, Some("1a2b0000.ethernet"), true),
        ];
        assert_eq!(found, wanted.map(|(irq, device, network)| (irq, device.map(str::to_owned), network)));
        // Virtual functions: one whose physical function has an interface here, and one whose has none.
        std::os::unix::fs::symlink("../0000:09:00.0", pci.join("0000:01:00.0/physfn")).unwrap();
        std::os::unix::fs::symlink("../0000:08:00.1", pci.join("0000:03:00.0/physfn")).unwrap();
        put(pci.join("0000:09:00.0/net/wan1/ifindex"), "5\n");
        for (name, port) in [("rep1", "pf0vf1\n"), ("wan1", "p0\n"), ("arep2", "c1pf0sf2\n")] {
            put(pci.join(format!("0000:09:00.0/net/{name}/phys_port_name")), port);
        }
        let found: Vec<_> = scan(&roots, &Pci::scan(&roots.sys))
            .into_iter()
            .filter_map(|irq| Some((irq.id.irq, irq.virtual_of?)))
            .collect();
        assert_eq!(found, [(10, "0000:08:00.1".to_owned()), (24, "wan1".to_owned())]);
    }

    /// A controller without MSI, its line, its driver and what is in its folder `net`.
    fn on_line(roots: &Roots, name: &str, (class, line, driver): (&str, u32, &str), net: &[(&str, &str)]) {
        let device = roots.sys.join("bus/pci/devices").join(name);
        put(device.join("class"), class);
        put(device.join("irq"), &line.to_string());
        if !driver.is_empty() {
            std::os::unix::fs::symlink(format!("../../drivers/{driver}"), device.join("driver")).unwrap();
        }
        for (interface, flags) in net {
            put(device.join("net").join(interface).join("flags"), flags);
        }
    }

    #[test]
    fn a_line_is_a_network_controllers_only_while_its_driver_may_have_a_handler() {
        let (network, sound) = ("0x020000", "0x040300");
        for (function, net, handlers, wanted) in [
            // Down: its driver requests the line, or takes MSI, when the interface comes up.
            ((network, 19, "e100"), &[("lan3", "0x1002")][..], "snd_hda_intel:card1", false),
            ((network, 19, "e100"), &[("lan3", "0x1003")], "lan3,snd_hda_intel:card1", true),
            // In another network namespace, and no handler or only the sound card's has the line.
            ((network, 19, "e100"), &[], "plc,snd_hda_intel:card1", true),
            ((network, 19, "e100"), &[], "snd-hda-intel:card1", false),
            // No driver, or another kind of function.
            ((network, 19, ""), &[], "mystery", false),
            (("0x0c0330", 19, "xhci_hcd"), &[], "xhci-hcd:usb1", false),
        ] {
            let dir = tempfile::tempdir().unwrap();
            let roots = Roots { sys: dir.path().join("sys"), proc: dir.path().join("proc"), ..Roots::default() };
            put(roots.sys.join("kernel/irq/19/actions"), handlers);
            on_line(&roots, "0000:04:00.0", function, net);
            on_line(&roots, "0000:00:1b.0", (sound, 19, "snd_hda_intel"), &[]);
            on_line(&roots, "0000:00:1c.0", (sound, 20, "mystery"), &[]);
            let found = scan(&roots, &Pci::scan(&roots.sys));
            let found: Vec<_> = found.iter().map(|irq| (irq.device.as_deref(), irq.network)).collect();
            assert_eq!(found, [(wanted.then_some("0000:04:00.0"), wanted)], "{function:?} {handlers}");
        }
    }

    #[test]
    fn without_descriptions_the_handlers_are_those_with_folders_in_proc() {
        let dir = tempfile::tempdir().unwrap();
        let roots = Roots { sys: dir.path().join("sys"), proc: dir.path().join("proc"), ..Roots::default() };
        // Without smp_affinity_list, as on a kernel for one CPU.
        fs::create_dir_all(roots.proc.join("irq/88/4a100000.ethernet")).unwrap();
        put(roots.proc.join("irq/88/spurious"), "count 0\n");
        put(roots.proc.join("irq/89/smp_affinity_list"), "0-1\n");
        fs::create_dir_all(roots.proc.join("irq/90/mmc2")).unwrap();
        put(roots.proc.join("irq/90/smp_affinity_list"), "1\n");
        put(roots.sys.join("bus/platform/devices/4a100000.ethernet/of_node/name"), "ethernet\0");
        let seen = || {
            let irqs = scan(&roots, &Pci::default()).into_iter();
            irqs.map(|irq| (irq.id.irq, irq.actions.join(","), irq.affinity.to_string(), irq.network))
                .collect::<Vec<_>>()
        };
        let wanted = [(88, "4a100000.ethernet", "", true), (90, "mmc2", "1", false)];
        assert_eq!(seen(), wanted.map(|(irq, name, cpus, net)| (irq, name.to_owned(), cpus.to_owned(), net)));
        // Where the kernel describes interrupts, the description counts.
        put(roots.sys.join("kernel/irq/88/actions"), "renamed\n");
        assert_eq!(seen(), [(88, "renamed".to_owned(), String::new(), false)]);
    }
}
