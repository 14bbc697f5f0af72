//! Interrupts with a handler.
//!
//! Source: `/sys/kernel/irq` (`kernel/irq/irqdesc.c`, 4.9), `/proc/irq` (`kernel/irq/proc.c`), `/sys/bus/pci/devices`.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use super::Irq;
use super::nics::own_irqs;
use super::scan::read;
use crate::cpus::CpuSet;
use crate::knob::IrqId;
use crate::live::Roots;

pub(super) fn scan(roots: &Roots) -> Vec<Irq> {
    let Ok(entries) = fs::read_dir(roots.sys.join("kernel/irq")) else { return Vec::new() };
    let network = of_network_controllers(roots);
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
            Some(Irq {
                id: IrqId {
                    irq,
                    chip: read(&dir.join("chip_name")).unwrap_or_default(),
                    hwirq: read(&dir.join("hwirq")).unwrap_or_default(),
                },
                actions: actions.split(',').map(str::to_owned).collect(),
                affinity: CpuSet::from_list(&affinity).unwrap_or_default(),
                settable,
                network: network.contains(&irq),
            })
        })
        .collect();
    irqs.sort_by_key(|irq| irq.id.irq);
    irqs
}

/// Interrupts of PCI functions of base class 02, network controller (`include/linux/pci_ids.h`). An interface that was moved to
/// another network namespace is seen by nothing else.
fn of_network_controllers(roots: &Roots) -> BTreeSet<u32> {
    let Ok(entries) = fs::read_dir(roots.sys.join("bus/pci/devices")) else { return BTreeSet::new() };
    let is_network = |dir: &PathBuf| read(&dir.join("class")).is_some_and(|class| class.starts_with("0x02"));
    entries.filter_map(Result::ok).map(|entry| entry.path()).filter(is_network).flat_map(|dir| own_irqs(&dir)).collect()
}

#[cfg(test)]
mod tests {
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
        let found: Vec<_> = scan(&roots).into_iter().map(|irq| (irq.id.irq, irq.network)).collect();
        assert_eq!(found, [(10, true), (24, true), (25, false)]);
    }
}
