//! Guests of the emulated host, by its command `lab-vm` (lab/host/src/overlay/lab-vm.sh has its roles and networks).

use anyhow::Result;
use rustix::process::Signal;

use super::command::{read_number, run, signal};
use super::thread::{thread, threads};

/// A guest. It continues to run if this value is dropped.
#[derive(Debug, Clone)]
pub(crate) struct Vm {
    name: String,
}

impl Vm {
    /// Starts a guest with 192 MiB of memory, and does not wait until it is up.
    pub(crate) fn start(name: &str, role: &str, net: &str, address: &str) -> Result<Self> {
        run(format!("lab-vm start {name} {role} {net} {address}"))?;
        Ok(Self { name: name.to_owned() })
    }

    /// As [`Self::start`], with 128 MiB.
    pub(crate) fn start_small(name: &str, role: &str, net: &str, address: &str) -> Result<Self> {
        run(format!("env LAB_VM_MB=128 lab-vm start {name} {role} {net} {address}"))?;
        Ok(Self { name: name.to_owned() })
    }

    /// As [`Self::start_small`], with all of its threads on one CPU.
    pub(crate) fn start_on(cpu: usize, name: &str, role: &str, net: &str, address: &str) -> Result<Self> {
        run(format!("env LAB_VM_MB=128 taskset -c {cpu} lab-vm start {name} {role} {net} {address}"))?;
        Ok(Self { name: name.to_owned() })
    }

    /// A guest that `lab-libvirt` has defined.
    pub(crate) fn of_libvirt(name: &str) -> Self {
        Self { name: name.to_owned() }
    }

    /// Waits until its server is up.
    pub(crate) fn wait(&self) -> Result<()> {
        run(format!("lab-vm wait {}", self.name)).map(drop)
    }

    /// Kills it, and removes its interface.
    pub(crate) fn stop(self) -> Result<()> {
        run(format!("lab-vm stop {}", self.name)).map(drop)
    }

    pub(crate) fn pid(&self) -> Result<i32> {
        read_number(format!("/run/lab-vm/{}.pid", self.name))
    }

    /// Sends a signal to QEMU. A stopped guest takes no CPU time from the others, which would boot slowly beside it.
    pub(crate) fn signal(&self, of: Signal) -> Result<()> {
        signal(self.pid()?, of)
    }

    /// The thread of vCPU 0.
    pub(crate) fn vcpu(&self) -> Result<i32> {
        thread(self.pid()?, "CPU 0/KVM")
    }

    /// The threads of its vCPUs.
    pub(crate) fn vcpus(&self) -> Result<Vec<i32>> {
        threads(self.pid()?, "CPU *")
    }

    /// The vhost thread of its only NIC.
    pub(crate) fn vhost(&self) -> Result<i32> {
        thread(self.pid()?, "vhost-*")
    }
}
