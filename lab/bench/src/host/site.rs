//! The description of an experiment's host before it starts: the machine, its directory, the VMs.

use std::path::PathBuf;

use ontime_lab::images::Images;
use ontime_lab::{Kernel, Lab, LabError, Machine, Programs};

use super::{Host, LIMIT};
use crate::error::MeasureError;
use crate::hardware::Target;
use crate::progress::progress;

/// Number of boots of a VM before it counts as failed: under emulated SVM some guests hang (docs/design/lab.md).
const BOOTS: u32 = 6;

/// A VM to start: its name, role, network and address (`lab-vm`, docs/design/lab.md).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vm<'a> {
    /// Name; `rt` is the RT VM.
    pub name: &'a str,
    /// The program that it runs: `rt` or `bulk`.
    pub role: &'a str,
    /// `rt` or `bulk`; `sockets:rt` or `sockets:bulk` for a VM without a NIC, with sockets on that network.
    pub net: &'a str,
    /// Address.
    pub address: &'a str,
}

/// The RT VM with sockperf's server and a NIC. Others differ in role or network. The rules make it RT.
pub(crate) const RT_VM: Vm<'static> = Vm { name: "rt", role: "rt", net: "rt", address: "10.1.0.2" };
/// The bulk VMs on the bulk network.
pub(crate) const BULK_VMS: [Vm<'static>; 2] = [
    Vm { name: "bulk1", role: "bulk", net: "bulk", address: "10.2.0.2" },
    Vm { name: "bulk2", role: "bulk", net: "bulk", address: "10.2.0.3" },
];

/// Virtual time per instruction in experiments, ns, as a power of two: 1 ns, as some thousand million instructions per
/// second on a present CPU. At 4 ns, which the lab's own tests use, ticks would take a tenth of the CPU, and time
/// slices, which are fixed, would be short compared with paths.
const ICOUNT_SHIFT: u8 = 0;

/// The machine of an experiment.
pub(crate) fn machine(clock: ontime_lab::Clock, kernel: Kernel) -> Machine {
    Machine { icount_shift: ICOUNT_SHIFT, ..Machine::new(clock, kernel) }
}

/// An emulated host for an experiment.
#[derive(Debug, Clone)]
pub struct Site {
    /// The host.
    pub machine: Machine,
    /// Directory of captures and logs.
    pub dir: PathBuf,
    /// The programs for the host: the product and the agent.
    pub programs: Programs,
}

/// Huge pages per VM of an experiment.
const VM_PAGES: u32 = 96;
/// Memory of the emulated host itself, and of its VMs' VMMs, MiB.
const OWN_MIB: u32 = 3_072;

impl Site {
    /// Gives the host memory for this number of VMs.
    pub(crate) fn with_room_for(mut self, vms: u32) -> Self {
        self.machine.huge_pages = vms * VM_PAGES;
        self.machine.memory_mib = self.machine.memory_mib.max(self.machine.huge_pages * 2 + OWN_MIB);
        self
    }
}

/// The host for an experiment, before it starts.
pub(crate) enum PlannedHost<'a> {
    /// An emulated host, to be booted.
    Emulated(&'a Site, &'a Images),
    /// A real host.
    Real(Box<Target>),
}

impl PlannedHost<'_> {
    /// Starts the host with these VMs and files for `/etc/ontime`. On a real host both are its owner's.
    pub(crate) fn start(self, vms: &[Vm<'_>], config: &[(&str, &str)]) -> Result<Host, MeasureError> {
        match self {
            PlannedHost::Emulated(site, images) => Host::start(site, images, vms, config),
            PlannedHost::Real(target) => Host::real(target),
        }
    }
}

/// Starts a VM and waits for its server. A guest that fails under emulated SVM is started again, and a message reports
/// that.
pub(crate) fn boot_vm(lab: &mut Lab, vm: &Vm<'_>) -> Result<(), MeasureError> {
    let Vm { name, role, net, address } = *vm;
    for boot in 1.. {
        progress(format_args!("booting the VM {name} in it (boot {boot})"));
        lab.check(&["lab-vm", "start", name, role, net, address], LIMIT)?;
        match lab.check(&["lab-vm", "wait", name], LIMIT) {
            Ok(_) => break,
            Err(LabError::Timeout { .. } | LabError::Command { .. }) if boot < BOOTS => {
                lab.check(&["lab-vm", "stop", name], LIMIT)?;
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}
