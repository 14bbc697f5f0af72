//! What an experiment runs on before it runs: the machine, its directory, the VMs to start.

use std::path::PathBuf;

use ontime_lab::images::Images;
use ontime_lab::{Kernel, Lab, LabError, Machine, Programs};

use super::{Host, LIMIT, MeasureError};
use crate::hardware::Target;

/// Boots of a VM before it is given up: emulated SVM hangs a few guests (docs/lab.md).
const BOOTS: u32 = 6;

/// A VM to start: its name, its role, the network it is on and its address there (`lab-vm`, docs/lab.md).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vm<'a> {
    /// Its name; `rt` is the RT one.
    pub name: &'a str,
    /// What it runs: `rt` or `bulk`.
    pub role: &'a str,
    /// `rt` or `bulk`; `sockets:rt` or `sockets:bulk` for a VM without a NIC whose sockets are on that network.
    pub net: &'a str,
    /// Its address.
    pub address: &'a str,
}

/// The RT VM with sockperf's server and a NIC; others differ in role or network. The rules make it RT.
pub const RT_VM: Vm<'static> = Vm { name: "rt", role: "rt", net: "rt", address: "10.1.0.2" };
/// The bulk VMs on the bulk network.
pub const BULK_VMS: [Vm<'static>; 2] = [
    Vm { name: "bulk1", role: "bulk", net: "bulk", address: "10.2.0.2" },
    Vm { name: "bulk2", role: "bulk", net: "bulk", address: "10.2.0.3" },
];

/// Nanoseconds of virtual time an instruction takes in experiments, as a power of two: 1 ns, some thousand million
/// instructions a second as a CPU of today has. At 4 ns, which the lab's own tests run at, ticks take a tenth of the
/// CPU, and time slices, which are fixed, are short beside paths.
const ICOUNT_SHIFT: u8 = 0;

/// The machine of an experiment.
pub fn machine(clock: ontime_lab::Clock, kernel: Kernel) -> Machine {
    Machine { icount_shift: ICOUNT_SHIFT, ..Machine::new(clock, kernel) }
}

/// Where an experiment runs.
#[derive(Debug, Clone)]
pub struct Site {
    /// The host.
    pub machine: Machine,
    /// Where the captures and logs go.
    pub dir: PathBuf,
    /// What runs in the host: the product and the agent.
    pub programs: Programs,
}

/// Huge pages of an experiment's VM.
const VM_PAGES: u32 = 96;
/// The emulated host's own memory, and its VMs' emulators', MiB.
const OWN_MIB: u32 = 3_072;

impl Site {
    /// Gives the host memory for so many VMs.
    pub fn with_room_for(mut self, vms: u32) -> Self {
        self.machine.huge_pages = vms * VM_PAGES;
        self.machine.memory_mib = self.machine.memory_mib.max(self.machine.huge_pages * 2 + OWN_MIB);
        self
    }
}

/// What an experiment runs on.
pub enum Ground<'a> {
    /// An emulated host, which it boots.
    Emulated(&'a Site, &'a Images),
    /// A real one.
    Real(Box<Target>),
}

impl Ground<'_> {
    /// The host: booted with these VMs and files of `/etc/ontime`; of a real one both are its owner's.
    pub fn start(
        self,
        vms: &[Vm<'_>],
        config: &[(&str, &str)],
        progress: &mut dyn FnMut(&str),
    ) -> Result<Host, MeasureError> {
        match self {
            Ground::Emulated(site, images) => Host::start(site, images, vms, config, progress),
            Ground::Real(target) => Host::real(target),
        }
    }
}

/// Starts a VM and waits for its server; a guest that fails under the emulated SVM is started again, and that is said.
pub fn boot_vm(lab: &mut Lab, vm: &Vm<'_>, progress: &mut dyn FnMut(&str)) -> Result<(), MeasureError> {
    let Vm { name, role, net, address } = *vm;
    for boot in 1.. {
        progress(&format!("booting the VM {name} in it (boot {boot})"));
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
