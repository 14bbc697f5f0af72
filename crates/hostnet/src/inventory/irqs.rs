//! Interrupts with a handler.
//!
//! Source: `/sys/kernel/irq` (`kernel/irq/irqdesc.c`, 4.9), `/proc/irq` (`kernel/irq/proc.c`), `/sys/bus/pci/devices`.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::Irq;
use super::devices::{is_word_of, on_other_buses, on_pci};
use super::scan::read;
use crate::cpus::CpuSet;
use crate::knob::IrqId;
use crate::live::Roots;

pub(super) fn scan(roots: &Roots) -> Vec<Irq> {
    let Ok(entries) = fs::read_dir(roots.sys.join("kernel/irq")) else { return Vec::new() };
    let pci = on_pci(&roots.sys);
    let others = on_other_buses(&roots.sys);
    let mut irqs: Vec<Irq> = entries
        .filter_map(Result::ok)
        .filter_map(|entry| {
            let irq: u32 = entry.file_name().to_str()?.parse().ok()?;
            let dir = entry.path();
            let actions = read(&dir.join("actions"))?;
            if actions.is_empty() || actions == "(null)" {
                return None;
            }
            let file = roots.proc.join(format!("irq/{irq}/smp_affinity_list"));
            let affinity = read(&file)?;
            let settable = fs::metadata(&file).is_ok_and(|file| file.permissions().mode() & 0o222 != 0);
            // The name is used only if the device tree has no information.
            let named = || others.iter().find(|(device, _)| is_word_of(&actions, device)).cloned();
            let (device, network) = pci.get(&irq).cloned().or_else(named).unzip();
            let virtual_of = device.as_deref().and_then(|device| virtual_of(&roots.sys, device));
            Some(Irq {
                id: IrqId {
                    irq,
                    chip: read(&dir.join("chip_name")).unwrap_or_default(),
                    hwirq: read(&dir.join("hwirq")).unwrap_or_default(),
                },
                actions: actions.split(',').map(str::to_owned).collect(),
                affinity: CpuSet::from_list(&affinity).unwrap_or_default(),
                settable,
                device,
                network: network.unwrap_or_default(),
                virtual_of,
            })
        })
        .collect();
    irqs.sort_by_key(|irq| irq.id.irq);
    irqs
}

/// The physical function of a PCI virtual function (`physfn`): its interface if it has one here, otherwise its name.
fn virtual_of(sys: &Path, device: &str) -> Option<String> {
    let function = sys.join("bus/pci/devices").join(device).join("physfn");
    let mut interfaces = fs::read_dir(function.join("net")).into_iter().flatten().flatten();
    let name = interfaces.next().map(|entry| entry.file_name());
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
        put(roots.sys.join("kernel/irq/26/actions"), "\n");
        let pci = roots.sys.join("bus/pci/devices");
        put(pci.join("0000:01:00.0/class"), "0x020000\n");
        put(pci.join("0000:01:00.0/msi_irqs/24"), "msix");
        put(pci.join("0000:01:00.0/irq"), "11");
        put(pci.join("0000:02:00.0/class"), "0x010601\n");
        put(pci.join("0000:02:00.0/msi_irqs/25"), "msi");
        put(pci.join("0000:03:00.0/class"), "0x028000\n");
        put(pci.join("0000:03:00.0/irq"), "10");
        // On other buses the handler's name is that of the device.
        for (irq, handler) in [(30, "virtio3-requests"), (31, "virtio4-input.0"), (32, "1a2b0000.ethernet")] {
            put(roots.sys.join(format!("kernel/irq/{irq}/actions")), handler);
            put(roots.proc.join(format!("irq/{irq}/smp_affinity_list")), "0-1");
        }
        put(roots.sys.join("bus/virtio/devices/virtio3/device"), "0x0002\n");
        put(roots.sys.join("bus/virtio/devices/virtio4/device"), "0x0001\n");
        put(roots.sys.join("bus/platform/devices/1a2b0000.ethernet/of_node/name"), "ethernet\0");
        let found: Vec<_> = scan(&roots).into_iter().map(|irq| (irq.id.irq, irq.device, irq.network)).collect();
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
        let found: Vec<_> = scan(&roots).into_iter().filter_map(|irq| Some((irq.id.irq, irq.virtual_of?))).collect();
        assert_eq!(found, [(10, "0000:08:00.1".to_owned()), (24, "wan1".to_owned())]);
    }
}
