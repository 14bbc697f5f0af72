//! Records of the kernel's tracepoints on the path, as plain data.
//!
//! [`Event`] is small and `Copy`, because a flood of packets causes a hundred thousand events per second.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A name in the kernel, at most 15 bytes: of a thread or an interface. The bytes before the terminating zeros.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Name([u8; 16]);

impl Name {
    /// The first 15 bytes, up to the first zero.
    pub fn new(bytes: &[u8]) -> Self {
        let mut name = [0; 16];
        for (to, from) in name.iter_mut().take(15).zip(bytes.iter().take_while(|byte| **byte != 0)) {
            *to = *from;
        }
        Self(name)
    }

    /// The bytes without the zeros behind them.
    pub fn bytes(&self) -> &[u8] {
        self.0.split(|byte| *byte == 0).next().unwrap_or_default()
    }

    /// As text. Invalid UTF-8 and control characters are replaced, because any user may name a thread.
    pub fn text(&self) -> String {
        let text = String::from_utf8_lossy(self.bytes());
        text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
    }

    /// Whether the name begins with `prefix`.
    pub fn starts_with(&self, prefix: &str) -> bool {
        self.bytes().starts_with(prefix.as_bytes())
    }
}

impl From<&str> for Name {
    fn from(text: &str) -> Self {
        Self::new(text.as_bytes())
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.text())
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text())
    }
}

impl Serialize for Name {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.text())
    }
}

impl<'de> Deserialize<'de> for Name {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Name::from(String::deserialize(deserializer)?.as_str()))
    }
}

/// A thread at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Task {
    /// Its number (TID); 0 is the idle thread.
    pub pid: i32,
    /// The kernel's priority number: 0 to 98 are SCHED_FIFO/RR 99 to 1, -1 is SCHED_DEADLINE, 100 and more are the fair
    /// classes. It includes priority inheritance.
    pub prio: i32,
    /// Its name, at most 15 bytes (`comm`).
    pub comm: Name,
}

impl Task {
    /// Whether its current priority is real-time (FIFO, RR or deadline).
    pub fn is_rt(&self) -> bool {
        self.prio < 99
    }

    /// The priority as in `chrt`: `FIFO 47`, `OTHER nice 0`.
    pub fn policy(&self) -> String {
        policy(self.prio)
    }
}

/// A kernel priority number as in `chrt`. It does not distinguish RR from FIFO: both are `FIFO`.
pub fn policy(prio: i32) -> String {
    match prio {
        ..0 => "DEADLINE".to_owned(),
        0..=98 => format!("FIFO {}", 99 - prio),
        120 | 99 => "OTHER".to_owned(),
        other => format!("OTHER nice {}", other - 120),
    }
}

/// A tracepoint's record.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Event {
    /// CLOCK_MONOTONIC, ns.
    pub time: u64,
    /// The CPU on which the record was written.
    pub cpu: u32,
    /// The thread that was current (`common_pid`).
    pub pid: i32,
    /// The tracepoint and its fields.
    pub what: EventKind,
}

/// What happened. Interface names are those in the interface's namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum EventKind {
    /// `irq_handler_entry`: a hard interrupt's handler begins.
    IrqEntry {
        /// The number in `/proc/interrupts`.
        irq: u32,
        /// The handler's name.
        name: Name,
    },
    /// `irq_handler_exit`.
    IrqExit {
        /// The number in `/proc/interrupts`.
        irq: u32,
    },
    /// `softirq_entry`: a softirq vector begins in the current thread.
    SoftirqEntry {
        /// The vector's number (`include/linux/interrupt.h`).
        vec: u32,
    },
    /// `softirq_exit`.
    SoftirqExit {
        /// The vector's number.
        vec: u32,
    },
    /// `napi_poll`: a poll of a NAPI instance has ended.
    NapiPoll {
        /// Its interface; `(no_device)` is the per-CPU backlog.
        dev: Name,
        /// Number of packets received.
        work: i32,
    },
    /// `netif_receive_skb`: the stack receives a packet from an interface.
    Receive {
        /// The name of the interface.
        dev: Name,
        /// The packet's kernel address, which stays the same while the packet is forwarded.
        skb: u64,
        /// Its length, bytes.
        len: u32,
    },
    /// `net_dev_queue`: a packet is passed to an interface's qdisc.
    Queue {
        /// The name of the interface.
        dev: Name,
        /// As in [`EventKind::Receive`].
        skb: u64,
    },
    /// `net_dev_start_xmit`: a packet is passed to the driver.
    StartXmit {
        /// The name of the interface.
        dev: Name,
        /// As in [`EventKind::Receive`].
        skb: u64,
        /// The ethertype of the packet, in host byte order.
        protocol: u16,
    },
    /// `net_dev_xmit`: the driver has returned.
    Xmit {
        /// The name of the interface.
        dev: Name,
        /// As in [`EventKind::Receive`].
        skb: u64,
        /// The driver's return code: 0 means accepted.
        rc: i32,
    },
    /// `sched_switch`.
    Switch {
        /// The previous thread.
        prev: Task,
        /// Whether the previous thread is still runnable.
        preempted: bool,
        /// The next thread.
        next: Task,
    },
    /// `sched_waking`: a thread becomes runnable.
    Waking {
        /// The number of the thread that is woken.
        pid: i32,
        /// Its kernel priority number.
        prio: i32,
    },
    /// `kvm_entry`: the current thread's vCPU enters the guest.
    KvmEntry,
    /// `kvm_exit`: the vCPU leaves the guest.
    KvmExit {
        /// The hardware's exit reason.
        reason: u32,
    },
    /// `kvm_apic_accept_irq`: an interrupt becomes pending for a vCPU of the VM to which the current thread belongs.
    Interrupt {
        /// The vCPU's number in its VM.
        vcpu: u32,
    },
    /// `hrtimer_start`: the current thread, or an interrupt in it, starts a timer.
    TimerStart {
        /// The timer's kernel address.
        timer: u64,
        /// When it is due, in the timer's clock, ns.
        expires: u64,
    },
    /// `hrtimer_expire_entry`: the timer's interrupt calls its function.
    TimerExpire {
        /// The timer's kernel address.
        timer: u64,
    },
    /// Not a tracepoint: the start of a gap in this CPU's events, and its end.
    Lost {
        /// Lower bound of the number of missing events from here on; 0 at the gap's end.
        count: u64,
    },
}

/// The backlog's name in `napi_poll`.
pub const BACKLOG: &str = "(no_device)";
/// Softirq vector of reception (`include/linux/interrupt.h`).
pub const NET_RX: u32 = 3;
/// Softirq vector of transmission.
pub(crate) const NET_TX: u32 = 2;

/// A softirq vector's name as in `/proc/softirqs`.
pub(crate) fn softirq_name(vec: u32) -> &'static str {
    ["HI", "TIMER", "NET_TX", "NET_RX", "BLOCK", "IRQ_POLL", "TASKLET", "SCHED", "HRTIMER", "RCU"]
        .get(vec as usize)
        .copied()
        .unwrap_or("softirq")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn priorities_are_told_as_chrt_does() {
        let cases = [
            (-1, "DEADLINE"),
            (0, "FIFO 99"),
            (52, "FIFO 47"),
            (98, "FIFO 1"),
            (120, "OTHER"),
            (100, "OTHER nice -20"),
        ];
        for (prio, text) in cases {
            assert_eq!(policy(prio), text);
        }
    }

    #[test]
    fn a_hostile_name_is_harmless() {
        assert_eq!(Name::from("a\x1b[2J").text(), "a\u{fffd}[2J");
        assert_eq!(Name::new(&[0xff, b'x', 0, b'y']).text(), "\u{fffd}x");
        assert_eq!(Name::from("0123456789abcdefgh").text().len(), 15);
    }
}
