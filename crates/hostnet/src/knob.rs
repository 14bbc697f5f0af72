//! A knob: one setting of the running host that a rule may change, with the identity it keeps.
//!
//! In: a [`Knob`] and, to write it, a [`Value`]. Out: its present value, or why it has none.
//! A knob names a thing, not a path: a NIC by ifindex (it may be renamed), a thread by start time (its number may be
//! reused), an interrupt by its place in the interrupt controller (its number may be reused). A thing that ended is
//! [`KnobError::Gone`], never an error of the host.

use std::fmt;

use ontime_tenants::{Policy, ThreadId};
use serde::{Deserialize, Serialize};

use crate::cpus::CpuSet;
use crate::obstacle::Obstacle;

/// A network interface: the index decides, the name is what it was called when seen.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct NicId {
    /// Interface index, unique in its network namespace as long as the interface lives.
    pub ifindex: u32,
    /// Its name when it was seen.
    pub name: String,
}

/// An interrupt: its number, and what tells a new owner of the number from the old one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct IrqId {
    /// Linux interrupt number.
    pub irq: u32,
    /// `/sys/kernel/irq/N/chip_name`.
    pub chip: String,
    /// `/sys/kernel/irq/N/hwirq`: for MSI this is the device's place on the bus and the vector's index.
    pub hwirq: String,
}

/// Which file system a host-wide file lies in; tests put others in their place.
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

/// Which packets a steering filter sends to the RT queue.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SteerFrom {
    /// Those that came in by this interface (a tap or veth on the same bridge).
    Interface(NicId),
    /// Those with this source address (a macvtap's: they have no ingress interface).
    SourceMac([u8; 6]),
}

/// One setting of the running host.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", tag = "knob")]
pub enum Knob {
    /// A thread's scheduling policy and priority.
    ThreadPolicy {
        /// Which thread.
        thread: ThreadId,
        /// Its name, for people.
        comm: String,
    },
    /// The CPUs a thread may run on.
    ThreadAffinity {
        /// Which thread.
        thread: ThreadId,
        /// Its name, for people.
        comm: String,
    },
    /// The CPUs an interrupt may be delivered to.
    IrqAffinity {
        /// Which interrupt.
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
        /// Which NIC.
        nic: NicId,
        /// The path below the NIC's directory.
        path: String,
    },
    /// The CPUs whose packets leave by a transmit queue (`queues/tx-N/xps_cpus`).
    XpsCpus {
        /// Which NIC.
        nic: NicId,
        /// Which transmit queue.
        queue: u32,
    },
    /// How one NAPI instance is polled: 0 in softirq, 1 by its thread (6.17), 2 by its thread without interrupts
    /// (6.19).
    NapiThreaded {
        /// Which NIC.
        nic: NicId,
        /// NAPI id, as netlink family `netdev` gives it.
        napi: u32,
    },
    /// How long a NIC may hold a receive interrupt back (`ethtool -C`, netlink family `ethtool`).
    Moderation {
        /// Which NIC.
        nic: NicId,
    },
    /// A feature as `ethtool -K` switches it (netlink family `ethtool`), by the kernel's name for it: `on` or `off`.
    Feature {
        /// Which NIC.
        nic: NicId,
        /// `rx-gro`, `tx-tcp-segmentation`.
        feature: String,
    },
    /// A feature of a veth pair's other end, which a tenant has in a network namespace of its own.
    PeerFeature {
        /// The end that is here.
        nic: NicId,
        /// A process in the other end's namespace.
        process: ThreadId,
        /// The other end's index there.
        peer: u32,
        /// As [`Knob::Feature`]'s.
        feature: String,
    },
    /// The clsact qdisc, the place of filters that stands beside the root qdisc. Taken away only while it is empty.
    Clsact {
        /// Which NIC.
        nic: NicId,
    },
    /// A clsact egress filter that puts packets of one source on a transmit queue (`skbedit queue_mapping`).
    TxSteer {
        /// Which NIC.
        nic: NicId,
        /// The transmit queue.
        queue: u16,
        /// Which packets.
        from: SteerFrom,
    },
    /// A clsact egress filter that gives packets of one source the priority of a `prio` qdisc's first band.
    TxPriority {
        /// Which NIC.
        nic: NicId,
        /// Which packets.
        from: SteerFrom,
    },
    /// The root qdisc: `default` for what the kernel attaches by itself, or a kind. Replacing it drops what waits in
    /// it.
    RootQdisc {
        /// Which NIC.
        nic: NicId,
    },
    /// Whether a VM's packets come from its tap in batches ([`crate::tap`]): vhost makes them where the send buffer has
    /// no limit.
    TapBatch {
        /// The tap.
        nic: NicId,
        /// The monitor, which has it open.
        process: ThreadId,
    },
    /// Bytes of a VM's packets that may be on their way from its tap before its sender waits ([`crate::tap`]).
    SendBuffer {
        /// The tap.
        nic: NicId,
        /// The monitor, which has it open.
        process: ThreadId,
    },
}

impl Knob {
    /// The process that leads to it, by its namespace or an open file. Another one may lead to the same knob.
    pub fn process(&self) -> Option<ThreadId> {
        match self {
            Knob::PeerFeature { process, .. } | Knob::SendBuffer { process, .. } | Knob::TapBatch { process, .. } => {
                Some(*process)
            }
            _ => None,
        }
    }

    /// The interface that it is a setting of.
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
            | Knob::TxPriority { nic, .. }
            | Knob::RootQdisc { nic }
            | Knob::TapBatch { nic, .. }
            | Knob::SendBuffer { nic, .. } => Some(nic),
        }
    }

    /// What tells this knob from all others; names and processes that lead there, which may change, are no part of it.
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
            Knob::TxPriority { nic, from } => format!("nic:{}/priority:{}", nic.ifindex, source_key(from)),
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

/// A hardware address as people write it.
pub fn mac_text(mac: &[u8; 6]) -> String {
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
            Knob::TxPriority { nic, from } => write!(f, "{} filter: from {from} to the first band", nic.name),
            Knob::RootQdisc { nic } => write!(f, "{} root qdisc", nic.name),
            Knob::SendBuffer { nic, process } => {
                write!(f, "{} send buffer, bytes, by process {}", nic.name, process.pid)
            }
            Knob::TapBatch { nic, process } => write!(f, "{} batches of packets, by process {}", nic.name, process.pid),
        }
    }
}

/// How a NIC holds its receive interrupts back, to take several packets with one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Moderation {
    /// Microseconds an interrupt may wait after a packet; 0: none does. Some drivers give small numbers meanings of
    /// their own (e1000e and igb: 1 and 3 are adaptive).
    pub rx_usecs: u32,
    /// Whether the driver changes that by the traffic; `None` where it has no such switch.
    pub adaptive: Option<bool>,
}

impl Moderation {
    /// What a driver is told, one after the other, to have it. While it changes the interval by the traffic, or is to,
    /// some take no other one than they have (`drivers/net/ethernet/intel/ice/ice_ethtool.c`, `ice_set_rc_coalesce`;
    /// `drivers/net/virtio_net.c`, `virtnet_send_rx_notf_coal_cmds`).
    pub fn steps(self) -> impl Iterator<Item = Self> {
        let fixed = Self { adaptive: Some(false), ..self };
        (self.adaptive == Some(true)).then_some(fixed).into_iter().chain([self])
    }

    /// Some other one that every driver takes, with no packet held back for long.
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
    /// Of [`Knob::ThreadPolicy`].
    Policy(Policy),
    /// Of [`Knob::ThreadAffinity`], [`Knob::IrqAffinity`], [`Knob::XpsCpus`], [`Knob::HostCpus`].
    Cpus(CpuSet),
    /// Of [`Knob::HostFile`] and [`Knob::NicFile`], without white space around it, of [`Knob::RootQdisc`],
    /// [`Knob::SendBuffer`], [`Knob::Feature`] and [`Knob::PeerFeature`].
    Text(String),
    /// Of [`Knob::NapiThreaded`].
    Threaded(u32),
    /// Of [`Knob::Moderation`].
    Moderation(Moderation),
    /// Of [`Knob::Clsact`], [`Knob::TxSteer`], [`Knob::TxPriority`] and [`Knob::TapBatch`]: whether it is there.
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

/// Why a knob could not be read or written. Its text names the knob, the cause and the remedy.
#[derive(Debug)]
pub enum KnobError {
    /// The thread ended, the NIC was unplugged, the interrupt was freed: there is nothing to set or restore.
    Gone(String),
    /// This kernel, driver or device has no such knob, or others hold it.
    Unsupported {
        /// The knob.
        knob: String,
        /// The cause, and what to do.
        why: String,
    },
    /// The kernel refused or failed, and Ontime knows no cause.
    Os {
        /// The knob.
        knob: String,
        /// What was tried.
        what: &'static str,
        /// The kernel's word.
        source: std::io::Error,
    },
    /// The kernel refused, for a cause that is known and can be ended.
    Refused {
        /// The knob.
        knob: String,
        /// What was tried.
        what: &'static str,
        /// The kernel's word.
        source: std::io::Error,
        /// The cause, with the cgroup or file.
        cause: String,
        /// What to do.
        remedy: String,
    },
    /// The kernel gave, or a rule asked, a value this knob cannot have.
    Value {
        /// The knob.
        knob: String,
        /// What is wrong with the value.
        why: String,
    },
}

impl KnobError {
    /// The cause and the remedy, for a place that names the knob itself.
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

/// A host whose knobs can be read and written; the running one is [`crate::LiveHost`].
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

    /// What would stand against setting the knob, as far as the host's files tell without trying.
    fn foresee(&self, _knob: &Knob, _value: &Value) -> Option<Obstacle> {
        None
    }
}
