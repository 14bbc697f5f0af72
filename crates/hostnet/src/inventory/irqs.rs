//! Interrupts with a handler.
//!
//! Source: `/sys/kernel/irq` (`kernel/irq/irqdesc.c`, 4.9), `/proc/irq` (`kernel/irq/proc.c`).

use std::fs;
use std::os::unix::fs::PermissionsExt;

use super::Irq;
use super::scan::read;
use crate::cpus::CpuSet;
use crate::knob::IrqId;
use crate::live::Roots;

pub(super) fn scan(roots: &Roots) -> Vec<Irq> {
    let Ok(entries) = fs::read_dir(roots.sys.join("kernel/irq")) else { return Vec::new() };
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
            })
        })
        .collect();
    irqs.sort_by_key(|irq| irq.id.irq);
    irqs
}
