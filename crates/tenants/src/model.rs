//! A tenant and its threads, as found on the host.

use serde::{Deserialize, Serialize};

use crate::class::{Class, Policy};
use crate::thread::ThreadId;

/// What kind of thing a tenant is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A QEMU process that libvirt started.
    Libvirt,
    /// A QEMU process started otherwise.
    Qemu,
    /// A container, known by its cgroup.
    Container,
}

/// What decided a tenant's class.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClassSource {
    /// `<metadata>` of the libvirt domain.
    Metadata,
    /// A rule, as `FILE:LINE`.
    Rule(String),
    /// Nothing spoke for it: bulk.
    Default,
}

/// What a tenant's thread does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ThreadRole {
    /// Runs virtual CPU number n (`CPU n/KVM`).
    Vcpu(u32),
    /// Moves a virtual NIC's packets (`vhost-PID`).
    Vhost,
    /// A QEMU iothread.
    Iothread,
    /// QEMU's main loop and its helpers.
    Emulator,
    /// KVM's in-kernel timer thread (`kvm-pit/PID`).
    KvmPit,
    /// A thread of a container's process.
    Container,
}

/// One thread of a tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantThread {
    /// Which thread, safe against reuse of its number.
    pub id: ThreadId,
    /// What it does.
    pub role: ThreadRole,
    /// Its name, as the kernel cuts it to 15 bytes.
    pub comm: String,
    /// Its policy when it was found.
    pub policy: Policy,
    /// The CPUs it may run on, in the kernel's list form (`0-3,8`).
    pub affinity: String,
    /// The CPU it last ran on.
    pub last_cpu: u32,
}

/// A tenant's virtual NIC, where the host's side of it could be found.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Vnic {
    /// The host's interface: a tap, macvtap or veth.
    pub ifname: String,
    /// The physical NIC it reaches (through macvtap's lower device or a bridge's port), where it is one.
    pub lower: Option<String>,
}

/// A virtual machine or container on this host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Tenant {
    /// The domain's, guest's or container's name.
    pub name: String,
    /// Its UUID, where it has one.
    pub uuid: Option<String>,
    /// What kind of thing it is.
    pub kind: Kind,
    /// Its main process.
    pub process: ThreadId,
    /// Its cgroup (v2 path below the mount), where it has one of its own.
    pub cgroup: Option<String>,
    /// Its class.
    pub class: Class,
    /// What decided its class.
    pub class_source: ClassSource,
    /// Most CPU time a vCPU thread may take at RT priority, as a fraction of one CPU (0 to 1).
    pub runtime_cap: f64,
    /// Its threads.
    pub threads: Vec<TenantThread>,
    /// Its virtual NICs.
    pub vnics: Vec<Vnic>,
}
