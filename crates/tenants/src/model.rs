//! A tenant and its threads as found on the host.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::class::{Class, Policy};
use crate::thread::ThreadId;

/// The kind of a tenant.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Kind {
    /// A QEMU process that libvirt started.
    Libvirt,
    /// A QEMU process started otherwise.
    Qemu,
    /// A VM of another monitor, such as Cloud Hypervisor, Firecracker or crosvm.
    Vmm,
    /// A container, or another cgroup that a rule names.
    Container,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Kind::Libvirt => "libvirt",
            Kind::Qemu => "qemu",
            Kind::Vmm => "vmm",
            Kind::Container => "container",
        })
    }
}

/// The origin of a tenant's name. A user must not get real-time priority by choosing a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Namer {
    /// A user of the host. Root (0) may choose any name.
    User(u32),
    /// A process inside a container, whose user numbers have no meaning outside.
    #[default]
    Container,
}

/// The source of a tenant's class.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ClassSource {
    /// `<metadata>` of the libvirt domain.
    Metadata,
    /// A rule, as `FILE:LINE`.
    Rule(String),
    /// A reservation that a program requested from the daemon.
    Reservation {
        /// The name in the URL of the request.
        name: String,
        /// How many vCPUs it is for; 0 where it is a class without reserved CPU time.
        vcpus: u32,
    },
    /// No rule applies: bulk.
    Default,
}

/// The role of a tenant's thread.
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
    /// A thread of the process that serves the VM's outsourced sockets and deadlines (`ontime device`).
    Device,
    /// A thread of a container's process.
    Container,
}

/// The settings of a thread in the domain's `<cputune>`. Ontime does not change them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct LibvirtTuning {
    /// The policy of `<vcpusched>`, `<iothreadsched>` or `<emulatorsched>`.
    pub sched: Option<Policy>,
    /// The CPUs of `<vcpupin>`, `<iothreadpin>` or `<emulatorpin>`, as libvirt writes them (`0-3,^2`).
    pub cpus: Option<String>,
}

/// A thread of a tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantThread {
    /// The thread's identity, safe against reuse of its number.
    pub id: ThreadId,
    /// What the thread does for its tenant.
    pub role: ThreadRole,
    /// Its name, which the kernel truncates to 15 bytes.
    pub comm: String,
    /// Its policy at the time of discovery.
    pub policy: Policy,
    /// The CPUs that it may run on, in the kernel's list form (`0-3,8`).
    pub affinity: String,
    /// The CPU it last ran on.
    pub last_cpu: u32,
    /// libvirt's settings for it; empty except for libvirt's VMs.
    #[serde(default)]
    pub libvirt: LibvirtTuning,
}

/// A tenant's virtual NIC with a known interface on the host.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Vnic {
    /// The host's interface: a tap, macvtap or veth.
    pub ifname: String,
    /// The physical NICs that it reaches through macvtap's lower device or a bridge's ports, in order of names: several
    /// below a bond, none if the interface leads nowhere.
    #[serde(default)]
    pub lower: Vec<String>,
    /// The NICs through which those of `lower` send: of a switch's port, a failover or Hyper-V pair, or a representor.
    #[serde(default)]
    pub below: Vec<String>,
}

/// An interface in a container's network namespace that sends through one of the host's interfaces: macvlan, ipvlan or
/// VLAN. It has no counterpart on the host.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attached {
    /// Its name in that namespace.
    pub name: String,
    /// Its MAC address, if its packets on the NIC can be told apart by it.
    pub mac: Option<[u8; 6]>,
    /// The physical NICs that it reaches, as in [`Vnic::lower`].
    pub lower: Vec<String>,
    /// As in [`Vnic::below`].
    #[serde(default)]
    pub below: Vec<String>,
}

/// A virtual machine or container on this host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Tenant {
    /// The name of the domain, guest or container.
    pub name: String,
    /// Its UUID, if any.
    pub uuid: Option<String>,
    /// Whether libvirt or another monitor runs it as a VM, or it is a container.
    pub kind: Kind,
    /// The user who controls the tenant, and with it its name: 0 for libvirt's system instance and for system
    /// containers, else the process's real user or the owner of the user slice.
    #[serde(default)]
    pub owner: u32,
    /// Who chose its name.
    #[serde(default)]
    pub namer: Namer,
    /// Its main process.
    pub process: ThreadId,
    /// Its own cgroup (v2 path below the mount), if any.
    pub cgroup: Option<String>,
    /// Real-time with a level, or bulk.
    pub class: Class,
    /// The source of its class.
    pub class_source: ClassSource,
    /// Most CPU time that a vCPU thread may take at RT priority, as a fraction of one CPU (0 to 1).
    pub runtime_cap: f64,
    /// Its threads at the time of the scan, with their roles.
    pub threads: Vec<TenantThread>,
    /// Its virtual NICs.
    pub vnics: Vec<Vnic>,
    /// Interfaces in its own network namespace that are on top of the host's interfaces.
    #[serde(default)]
    pub attached: Vec<Attached>,
}
