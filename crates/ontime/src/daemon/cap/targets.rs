//! Maps an interrupt to the vCPU that it is for. Pure.

use ontime_trace::interrupts::Interrupt;

use super::table::SlotIndex;

/// A VM whose vCPUs are put ahead while an interrupt is pending.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Vm {
    /// Threads that make interrupts of this VM pending: those of the VMM, with its vCPU and vhost threads, and those of
    /// its device process.
    pub threads: Vec<i32>,
    /// Its watched vCPUs: number, thread, slot.
    pub vcpus: Vec<(u32, i32, SlotIndex)>,
}

/// All such VMs, as sorted tables that can be searched without allocating.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct InterruptTargets {
    threads: Vec<(i32, usize)>,
    vcpus: Vec<((usize, u32), (i32, SlotIndex))>,
}

impl InterruptTargets {
    /// Builds the tables.
    pub(crate) fn new(vms: &[Vm]) -> Self {
        let mut targets = Self::default();
        for (number, vm) in vms.iter().enumerate() {
            targets.threads.extend(vm.threads.iter().map(|thread| (*thread, number)));
            targets.vcpus.extend(vm.vcpus.iter().map(|(vcpu, thread, slot)| ((number, *vcpu), (*thread, *slot))));
        }
        targets.threads.sort_unstable();
        targets.vcpus.sort_unstable();
        targets
    }

    /// All threads that make interrupts pending.
    pub(crate) fn threads(&self) -> Vec<i32> {
        self.threads.iter().map(|(thread, _)| *thread).collect()
    }

    /// The threads of the vCPUs that may be put ahead.
    pub(crate) fn vcpus(&self) -> impl Iterator<Item = i32> {
        self.vcpus.iter().map(|(_, (thread, _))| *thread)
    }

    /// The slot of the vCPU that this interrupt is for, and whether that vCPU raised it itself and so takes it now.
    pub(crate) fn find(&self, interrupt: Interrupt) -> Option<(SlotIndex, bool)> {
        let vm = self.threads.binary_search_by_key(&interrupt.by, |(thread, _)| *thread).ok()?;
        let (_, vm) = self.threads.get(vm)?;
        let vcpu = self.vcpus.binary_search_by_key(&(*vm, interrupt.vcpu), |(vcpu, _)| *vcpu).ok()?;
        let (_, (thread, slot)) = self.vcpus.get(vcpu)?;
        Some((*slot, *thread == interrupt.by))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_interrupt_is_its_threads_vms() {
        let vm = |first: i32, slot| Vm {
            threads: vec![first, first + 1, first + 2, first + 3],
            vcpus: vec![(1, first + 3, slot + 1), (0, first + 2, slot)],
        };
        let targets = InterruptTargets::new(&[vm(100, 4), vm(50, 8)]);
        let find = |by, vcpu| targets.find(Interrupt { by, vcpu, at: 0 });
        assert_eq!(find(100, 0), Some((4, false)));
        assert_eq!(find(103, 1), Some((5, true)));
        assert_eq!(find(103, 0), Some((4, false)), "from one vCPU to another");
        assert_eq!(find(52, 0), Some((8, true)));
        assert_eq!(find(99, 0), None);
        assert_eq!(find(50, 2), None);
        assert_eq!(InterruptTargets::default().find(Interrupt { by: 1, vcpu: 0, at: 0 }), None);
        assert_eq!(targets.threads(), [50, 51, 52, 53, 100, 101, 102, 103]);
    }
}
