//! A knob: one setting of the running host that a rule may change, with a stable identity.
//!
//! In: a [`Knob`] and, to write it, a [`Value`]. Out: its present value, or why it cannot be read. A knob identifies an
//! object, not a path: a NIC by ifindex (it may be renamed), a thread by start time (its number may be reused), an
//! interrupt by its place in the interrupt controller (its number may be reused). An object that no longer exists is
//! [`KnobError::Gone`], never an error of the host.

use std::fmt;

use ontime_tenants::{Policy, ThreadId};
use serde::{Deserialize, Serialize};

use crate::cpus::CpuSet;

/// A network interface. The index identifies it; the name is the one at the time of reading.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NicId {
    /// Interface index, unique in its network namespace as long as the interface lives.
    pub ifindex: u32,
    /// The name at the time of reading.
    pub name: String,
}

/// An interrupt: its number, and the fields that distinguish a new owner of the number from the old one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct IrqId {
    /// Linux interrupt number.
    pub irq: u32,
    /// `/sys/kernel/irq/N/chip_name`.
    pub chip: String,
    /// `/sys/kernel/irq/N/hwirq`: for MSI this is the device's place on the bus and the vector's index.
    pub hwirq: String,
}

/// The file system of a host-wide file. Tests replace it with a directory of their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Root {
    /// `/proc`.
    Proc,
    /// `/sys`.
    Sys,
    /// `/sys/kernel/debug`.
    Debug,
}

/// The packets that a steering filter sends to the RT queue.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SteerFrom {
    /// Packets received on this interface (a tap or veth on the same bridge).
    Interface(NicId),
    /// Packets with this source address (those of a macvtap have no ingress interface).
    SourceMac([u8; 6]),
}

/// One setting of the running host.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "knob")]
pub enum Knob {
    /// A thread's scheduling policy and priority.
    ThreadPolicy {
        /// The thread, told from a later thread with the same number by its start time.
        thread: ThreadId,
        /// Its name, for people.
        comm: String,
    },
    /// The CPUs a thread may run on.
    ThreadAffinity {
        /// The thread, told from a later thread with the same number by its start time.
        thread: ThreadId,
        /// Its name, for people.
        comm: String,
    },
    /// The CPUs an interrupt may be delivered to.
    IrqAffinity {
        /// The interrupt, told from a later interrupt with the same number by its chip and `hwirq`.
        irq: IrqId,
    },
    /// A host-wide file with one value: a sysctl, a module parameter, debugfs.
    HostFile {
        /// The file system.
        root: Root,
        /// The path below it, without a leading slash.
        path: String,
    },
    /// A host-wide file with a mask of CPUs: `/proc/irq/default_smp_affinity`.
    HostCpus {
        /// The file system.
        root: Root,
        /// The path below it, without a leading slash.
        path: String,
    },
    /// A file with one value below `/sys/class/net/NAME/`: `threaded`, `queues/tx-0/byte_queue_limits/limit_max`.
    NicFile {
        /// The interface, told from a later interface with the same name by its index.
        nic: NicId,
        /// The path below the NIC's directory.
        path: String,
    },
    /// The CPUs whose packets leave by a transmit queue (`queues/tx-N/xps_cpus`).
    XpsCpus {
        /// The interface, told from a later interface with the same name by its index.
        nic: NicId,
        /// The transmit queue.
        queue: u32,
    },
    /// How one NAPI instance is polled: 0 in softirq, 1 by its thread (6.17), 2 by its thread without interrupts
    /// (6.19).
    NapiThreaded {
        /// The interface, told from a later interface with the same name by its index.
        nic: NicId,
        /// NAPI id, as netlink family `netdev` reports it.
        napi: u32,
    },
    /// How long a NIC may hold a receive interrupt back (`ethtool -C`, netlink family `ethtool`).
    Moderation {
        /// The interface, told from a later interface with the same name by its index.
        nic: NicId,
    },
    /// A feature that `ethtool -K` switches (netlink family `ethtool`), by the kernel's name: `on` or `off`.
    Feature {
        /// The interface, told from a later interface with the same name by its index.
        nic: NicId,
        /// `rx-gro`, `tx-tcp-segmentation`.
        feature: String,
    },
    /// A feature of the other end of a veth pair, which is in a tenant's network namespace.
    PeerFeature {
        /// The end in this namespace.
        nic: NicId,
        /// A process in the other end's namespace.
        process: ThreadId,
        /// Interface index of the other end, in its namespace.
        peer: u32,
        /// As in [`Knob::Feature`].
        feature: String,
    },
    /// The clsact qdisc, which holds filters beside the root qdisc. It is removed only while it has no filters.
    Clsact {
        /// The interface, told from a later interface with the same name by its index.
        nic: NicId,
    },
    /// A clsact egress filter that puts packets of one source on a transmit queue (`skbedit queue_mapping`).
    TxSteer {
        /// The interface, told from a later interface with the same name by its index.
        nic: NicId,
        /// The transmit queue.
        queue: u16,
        /// The source of the packets: a tap or veth, or an address.
        from: SteerFrom,
    },
    /// The root qdisc: `default` for the kernel's default, or `noqueue`. Replacing it drops the packets queued in it.
    RootQdisc {
        /// The interface, told from a later interface with the same name by its index.
        nic: NicId,
    },
    /// Whether a VM's packets leave its tap in batches ([`crate::tap`]). vhost sends batches if the send buffer has no
    /// limit.
    TapBatch {
        /// The tap of the VM.
        nic: NicId,
        /// The VMM, which has the tap open.
        process: ThreadId,
    },
    /// Bytes of a VM's packets that may be in flight from its tap before its sender waits ([`crate::tap`]).
    SendBuffer {
        /// The tap of the VM.
        nic: NicId,
        /// The VMM, which has the tap open.
        process: ThreadId,
    },
}

impl Knob {
    /// The process through whose namespace or open file the knob is reached. Several processes may reach the same knob.
    pub fn process(&self) -> Option<ThreadId> {
        match self {
            Knob::PeerFeature { process, .. } | Knob::SendBuffer { process, .. } | Knob::TapBatch { process, .. } => {
                Some(*process)
            }
            _ => None,
        }
    }

    /// The interface that has this setting.
    pub fn nic(&self) -> Option<&NicId> {
        match self {
            Knob::ThreadPolicy { .. }
            | Knob::ThreadAffinity { .. }
            | Knob::IrqAffinity { .. }
            | Knob::HostFile { .. }
            | Knob::HostCpus { .. } => None,
            Knob::NicFile { nic, .. }
            | Knob::XpsCpus { nic, .. }
            | Knob::NapiThreaded { nic, .. }
            | Knob::Moderation { nic }
            | Knob::Feature { nic, .. }
            | Knob::PeerFeature { nic, .. }
            | Knob::Clsact { nic }
            | Knob::TxSteer { nic, .. }
            | Knob::RootQdisc { nic }
            | Knob::TapBatch { nic, .. }
            | Knob::SendBuffer { nic, .. } => Some(nic),
        }
    }

    /// The identity of the knob. Names, and processes through which it is reached, may change and are not part of the
    /// key.
    pub fn key(&self) -> String {
        match self {
            Knob::ThreadPolicy { thread, .. } => format!("{}/policy", thread_key(*thread)),
            Knob::ThreadAffinity { thread, .. } => format!("{}/affinity", thread_key(*thread)),
            Knob::IrqAffinity { irq } => format!("irq:{}:{}:{}", irq.irq, irq.chip, irq.hwirq),
            Knob::HostFile { root, path } | Knob::HostCpus { root, path } => format!("{root}/{path}"),
            Knob::NicFile { nic, path } => format!("nic:{}/{path}", nic.ifindex),
            Knob::XpsCpus { nic, queue } => format!("nic:{}/xps:{queue}", nic.ifindex),
            Knob::NapiThreaded { nic, napi } => format!("nic:{}/napi:{napi}", nic.ifindex),
            Knob::Moderation { nic } => format!("nic:{}/moderation", nic.ifindex),
            Knob::Feature { nic, feature } => format!("nic:{}/feature:{feature}", nic.ifindex),
            Knob::PeerFeature { nic, peer, feature, .. } => format!("nic:{}/peer:{peer}:{feature}", nic.ifindex),
            Knob::Clsact { nic } => format!("nic:{}/clsact", nic.ifindex),
            Knob::TxSteer { nic, queue, from } => format!("nic:{}/steer:{queue}:{}", nic.ifindex, source_key(from)),
            Knob::RootQdisc { nic } => format!("nic:{}/root-qdisc", nic.ifindex),
            Knob::SendBuffer { nic, .. } => format!("nic:{}/send-buffer", nic.ifindex),
            Knob::TapBatch { nic, .. } => format!("nic:{}/tap-batch", nic.ifindex),
        }
    }
}

fn source_key(from: &SteerFrom) -> String {
    match from {
        SteerFrom::Interface(source) => format!("if{}", source.ifindex),
        SteerFrom::SourceMac(mac) => mac_text(mac),
    }
}

fn thread_key(thread: ThreadId) -> String {
    format!("thread:{}:{}", thread.tid, thread.start_time)
}

/// A hardware address in the usual notation.
pub(crate) fn mac_text(mac: &[u8; 6]) -> String {
    mac.map(|byte| format!("{byte:02x}")).join(":")
}

impl fmt::Display for SteerFrom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SteerFrom::Interface(source) => f.write_str(&source.name),
            SteerFrom::SourceMac(mac) => f.write_str(&mac_text(mac)),
        }
    }
}

impl fmt::Display for Root {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Root::Proc => "/proc",
            Root::Sys => "/sys",
            Root::Debug => "/sys/kernel/debug",
        })
    }
}

impl fmt::Display for Knob {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Knob::ThreadPolicy { thread, comm } => write!(f, "policy of thread {} ({comm})", thread.tid),
            Knob::ThreadAffinity { thread, comm } => write!(f, "CPUs of thread {} ({comm})", thread.tid),
            Knob::IrqAffinity { irq } => write!(f, "CPUs of interrupt {} ({})", irq.irq, irq.chip),
            Knob::HostFile { root, path } | Knob::HostCpus { root, path } => write!(f, "{root}/{path}"),
            Knob::NicFile { nic, path } => write!(f, "{} {path}", nic.name),
            Knob::XpsCpus { nic, queue } => write!(f, "{} XPS CPUs of transmit queue {queue}", nic.name),
            Knob::NapiThreaded { nic, napi } => write!(f, "{} threading of NAPI {napi}", nic.name),
            Knob::Moderation { nic } => write!(f, "{} receive interrupt moderation", nic.name),
            Knob::Feature { nic, feature } => write!(f, "{} {feature}", nic.name),
            Knob::PeerFeature { nic, process, feature, .. } => {
                write!(f, "{feature} of the other end of {}, in the namespace of process {}", nic.name, process.pid)
            }
            Knob::Clsact { nic } => write!(f, "{} clsact qdisc", nic.name),
            Knob::TxSteer { nic, queue, from } => {
                write!(f, "{} filter: from {from} to transmit queue {queue}", nic.name)
            }
            Knob::RootQdisc { nic } => write!(f, "{} root qdisc", nic.name),
            Knob::SendBuffer { nic, process } => {
                write!(f, "{} send buffer, bytes, by process {}", nic.name, process.pid)
            }
            Knob::TapBatch { nic, process } => write!(f, "{} batches of packets, by process {}", nic.name, process.pid),
        }
    }
}

/// Receive interrupt moderation of a NIC: the NIC delays interrupts, so that one interrupt serves several packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moderation {
    /// Longest delay of an interrupt after a packet, us; 0 for no delay. Some drivers give small numbers a special
    /// meaning (e1000e and igb: 1 and 3 are adaptive).
    pub rx_usecs: u32,
    /// Whether the driver adapts the delay to the traffic; `None` if it has no such switch.
    pub adaptive: Option<bool>,
}

impl Moderation {
    /// The values to write in order to reach this one, in sequence. While the delay is adaptive, or is being made
    /// adaptive, some drivers accept no new delay (`drivers/net/ethernet/intel/ice/ice_ethtool.c`,
    /// `ice_set_rc_coalesce`; `drivers/net/virtio_net.c`, `virtnet_send_rx_notf_coal_cmds`).
    pub fn steps(self) -> impl Iterator<Item = Self> {
        let fixed = Self { adaptive: Some(false), ..self };
        (self.adaptive == Some(true)).then_some(fixed).into_iter().chain([self])
    }

    /// A different value that every driver accepts, with a short delay.
    pub fn other(self) -> Self {
        Self { rx_usecs: if self.rx_usecs == 10 { 20 } else { 10 }, ..self }
    }
}

impl fmt::Display for Moderation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let adaptive = if self.adaptive == Some(true) { ", adaptive" } else { "" };
        write!(f, "rx-usecs {}{adaptive}", self.rx_usecs)
    }
}

/// A knob's value.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Value {
    /// For [`Knob::ThreadPolicy`].
    Policy(Policy),
    /// For [`Knob::ThreadAffinity`], [`Knob::IrqAffinity`], [`Knob::XpsCpus`], [`Knob::HostCpus`].
    Cpus(CpuSet),
    /// For [`Knob::HostFile`] and [`Knob::NicFile`], without surrounding white space; for [`Knob::RootQdisc`],
    /// [`Knob::SendBuffer`], [`Knob::Feature`] and [`Knob::PeerFeature`].
    Text(String),
    /// For [`Knob::NapiThreaded`].
    Threaded(u32),
    /// For [`Knob::Moderation`].
    Moderation(Moderation),
    /// For [`Knob::Clsact`], [`Knob::TxSteer`] and [`Knob::TapBatch`]: whether the object exists.
    Present(bool),
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Policy(policy) => policy.fmt(f),
            Value::Cpus(cpus) if cpus.is_empty() => f.write_str("no CPU"),
            Value::Cpus(cpus) => write!(f, "CPUs {cpus}"),
            Value::Text(text) => f.write_str(text),
            Value::Threaded(mode) => mode.fmt(f),
            Value::Moderation(moderation) => moderation.fmt(f),
            Value::Present(true) => f.write_str("present"),
            Value::Present(false) => f.write_str("absent"),
        }
    }
}

/// Why a knob could not be read or written. The text names the knob, the cause and the remedy.
#[derive(Debug)]
pub enum KnobError {
    /// The thread ended, the NIC was unplugged or the interrupt was freed: there is nothing to set or restore.
    Gone(String),
    /// This kernel, driver or device has no such knob, or another program holds it.
    Unsupported {
        /// The knob, as `Display` of [`Knob`] writes it.
        knob: String,
        /// The cause and the remedy.
        why: String,
    },
    /// The kernel refused or failed, for a cause that Ontime does not know.
    Os {
        /// The knob, as `Display` of [`Knob`] writes it.
        knob: String,
        /// The operation that failed.
        what: &'static str,
        /// The kernel's error.
        source: std::io::Error,
    },
    /// The kernel refused, for a known cause that can be removed.
    Refused {
        /// The knob, as `Display` of [`Knob`] writes it.
        knob: String,
        /// The operation that failed.
        what: &'static str,
        /// The kernel's error.
        source: std::io::Error,
        /// The cause, with the cgroup or file.
        cause: String,
        /// What the administrator can do about the cause.
        remedy: String,
    },
    /// The kernel reported, or a rule planned, a value that this knob cannot have.
    Value {
        /// The knob, as `Display` of [`Knob`] writes it.
        knob: String,
        /// Why the value is wrong.
        why: String,
    },
}

impl KnobError {
    /// The cause and the remedy, for output that names the knob itself.
    pub fn why(&self) -> String {
        match self {
            KnobError::Gone(_) => {
                "no longer there: its thread, interface, queue or interrupt has ended; nothing to do".to_owned()
            }
            KnobError::Unsupported { why, .. } => why.clone(),
            KnobError::Os { what, source, .. } => format!(
                "{what}: {source}; Ontime knows no cause: see the kernel's log (journalctl -k), and if it stays, \
                 report it with the output of `ontime report`"
            ),
            KnobError::Refused { what, source, cause, remedy, .. } => format!("{what}: {source}: {cause}; {remedy}"),
            KnobError::Value { why, .. } => {
                format!("{why}, a defect of Ontime or the kernel; report it with the output of `ontime report`")
            }
        }
    }
}

impl fmt::Display for KnobError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (KnobError::Gone(knob)
        | KnobError::Unsupported { knob, .. }
        | KnobError::Os { knob, .. }
        | KnobError::Refused { knob, .. }
        | KnobError::Value { knob, .. }) = self;
        write!(f, "{knob}: {}", self.why())
    }
}

impl std::error::Error for KnobError {}

/// The obstacle to a setting.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle {
    /// The cause, with the cgroup or file.
    pub cause: String,
    /// What the administrator can do about the cause.
    pub remedy: String,
    /// The obstacle stays as long as this kernel runs with the modules as loaded.
    pub lasting: bool,
}

impl Obstacle {
    pub(crate) fn new(cause: String, remedy: String) -> Self {
        Self { cause, remedy, lasting: false }
    }
}

/// A host whose knobs can be read and written. [`crate::LiveHost`] is the running host.
pub trait Host {
    /// The knob's present value.
    ///
    /// # Errors
    /// See [`KnobError`].
    fn read(&self, knob: &Knob) -> Result<Value, KnobError>;

    /// Sets the knob. Writing the value it already has is allowed and harmless.
    ///
    /// # Errors
    /// See [`KnobError`].
    fn write(&self, knob: &Knob, value: &Value) -> Result<(), KnobError>;

    /// The obstacle to setting the knob, as far as the host's files show it without trying.
    fn foresee(&self, _knob: &Knob, _value: &Value) -> Option<Obstacle> {
        None
    }
}
