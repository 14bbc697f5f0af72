//! From a tracepoint's raw record to an [`Event`], by the running kernel's format file.
//!
//! Input: `events/SYSTEM/NAME/format` and record bytes. Output: events. No offset is hard-coded, because fields moved
//! between Linux 6.1 and 7.2. If a kernel's record lacks a required field, the error names that field.

use std::collections::HashMap;

use crate::event::{Event, EventKind, Name, Task};

/// A tracepoint that this crate can read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "each is the tracepoint of its name")]
pub enum Probe {
    IrqEntry,
    IrqExit,
    SoftirqEntry,
    SoftirqExit,
    NapiPoll,
    Receive,
    Queue,
    StartXmit,
    Xmit,
    Switch,
    Waking,
    KvmEntry,
    KvmExit,
    Interrupt,
    TimerStart,
    TimerExpire,
    VectorEntry(Vector),
    VectorExit(Vector),
}

/// An interrupt of x86 that `/proc/interrupts` names by letters, and that no handler is registered for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs, reason = "each is the tracepoint of its name")]
pub enum Vector {
    LocalTimer,
    Reschedule,
    CallFunction,
    CallFunctionSingle,
    IrqWork,
}

impl Vector {
    /// All of them.
    pub(crate) const ALL: [Vector; 5] =
        [Self::LocalTimer, Self::Reschedule, Self::CallFunction, Self::CallFunctionSingle, Self::IrqWork];

    /// As `/proc/interrupts` names it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::LocalTimer => "LOC",
            Self::Reschedule => "RES",
            Self::CallFunction | Self::CallFunctionSingle => "CAL",
            Self::IrqWork => "IWI",
        }
    }
}

impl Probe {
    /// The probes of a trace: all except [`Probe::Interrupt`] and [`Probe::vectors`].
    pub const ALL: [Probe; 15] = [
        Probe::IrqEntry,
        Probe::IrqExit,
        Probe::SoftirqEntry,
        Probe::SoftirqExit,
        Probe::NapiPoll,
        Probe::Receive,
        Probe::Queue,
        Probe::StartXmit,
        Probe::Xmit,
        Probe::Switch,
        Probe::Waking,
        Probe::KvmEntry,
        Probe::KvmExit,
        Probe::TimerStart,
        Probe::TimerExpire,
    ];

    /// Entry and exit of each [`Vector`].
    pub fn vectors() -> impl Iterator<Item = Probe> {
        Vector::ALL.into_iter().flat_map(|vector| [Probe::VectorEntry(vector), Probe::VectorExit(vector)])
    }

    /// Whether kernels of other architectures lack it.
    pub(crate) fn may_be_missing(self) -> bool {
        matches!(self, Probe::VectorEntry(_) | Probe::VectorExit(_))
    }

    /// Its directory below `events`.
    pub fn path(self) -> &'static str {
        match self {
            Probe::IrqEntry => "irq/irq_handler_entry",
            Probe::IrqExit => "irq/irq_handler_exit",
            Probe::SoftirqEntry => "irq/softirq_entry",
            Probe::SoftirqExit => "irq/softirq_exit",
            Probe::NapiPoll => "napi/napi_poll",
            Probe::Receive => "net/netif_receive_skb",
            Probe::Queue => "net/net_dev_queue",
            Probe::StartXmit => "net/net_dev_start_xmit",
            Probe::Xmit => "net/net_dev_xmit",
            Probe::Switch => "sched/sched_switch",
            Probe::Waking => "sched/sched_waking",
            Probe::KvmEntry => "kvm/kvm_entry",
            Probe::KvmExit => "kvm/kvm_exit",
            Probe::Interrupt => "kvm/kvm_apic_accept_irq",
            Probe::TimerStart => "timer/hrtimer_start",
            Probe::TimerExpire => "timer/hrtimer_expire_entry",
            Probe::VectorEntry(Vector::LocalTimer) => "irq_vectors/local_timer_entry",
            Probe::VectorExit(Vector::LocalTimer) => "irq_vectors/local_timer_exit",
            Probe::VectorEntry(Vector::Reschedule) => "irq_vectors/reschedule_entry",
            Probe::VectorExit(Vector::Reschedule) => "irq_vectors/reschedule_exit",
            Probe::VectorEntry(Vector::CallFunction) => "irq_vectors/call_function_entry",
            Probe::VectorExit(Vector::CallFunction) => "irq_vectors/call_function_exit",
            Probe::VectorEntry(Vector::CallFunctionSingle) => "irq_vectors/call_function_single_entry",
            Probe::VectorExit(Vector::CallFunctionSingle) => "irq_vectors/call_function_single_exit",
            Probe::VectorEntry(Vector::IrqWork) => "irq_vectors/irq_work_entry",
            Probe::VectorExit(Vector::IrqWork) => "irq_vectors/irq_work_exit",
        }
    }

    /// The fields that are read.
    fn fields(self) -> &'static [&'static str] {
        match self {
            Probe::IrqEntry => &["irq", "name"],
            Probe::IrqExit => &["irq"],
            Probe::SoftirqEntry | Probe::SoftirqExit => &["vec"],
            Probe::NapiPoll => &["dev_name", "work"],
            Probe::Receive => &["skbaddr", "len", "name"],
            Probe::Queue => &["skbaddr", "name"],
            Probe::StartXmit => &["skbaddr", "protocol", "name"],
            Probe::Xmit => &["skbaddr", "rc", "name"],
            Probe::Switch => {
                &["prev_comm", "prev_pid", "prev_prio", "prev_state", "next_comm", "next_pid", "next_prio"]
            }
            Probe::Waking => &["pid", "prio"],
            Probe::KvmEntry => &[],
            Probe::KvmExit => &["exit_reason"],
            Probe::Interrupt => &["apicid"],
            Probe::TimerStart => &["hrtimer", "expires"],
            Probe::TimerExpire => &["hrtimer"],
            Probe::VectorEntry(_) | Probe::VectorExit(_) => &["vector"],
        }
    }
}

/// An unusable format file.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum FormatError {
    /// It has no ID.
    #[error("tracepoint {0}: its format has no ID; report it with the kernel's version (`ontime report` collects it)")]
    NoId(&'static str),
    /// A field is missing.
    #[error(
        "tracepoint {probe}: this kernel's record has no field {field}; ontime trace does not know this kernel's \
         form; report it (`ontime report` collects the kernel's version)"
    )]
    NoField {
        /// The name of the tracepoint.
        probe: &'static str,
        /// The name of the field in its format file.
        field: &'static str,
    },
}

/// The position of a field in a record.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Field {
    offset: usize,
    size: usize,
    /// `__data_loc`: the field holds offset and length of the text within the record.
    located: bool,
    /// `__rel_loc`: the same, with the offset relative to the field's end.
    relative: bool,
}

/// The record format of a tracepoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Format {
    probe: Probe,
    id: u16,
    pid: Field,
    fields: Vec<Field>,
}

impl Format {
    /// Parses a format file.
    ///
    /// # Errors
    /// A required field is missing.
    pub fn parse(probe: Probe, text: &str) -> Result<Self, FormatError> {
        let id = text.lines().find_map(|line| line.strip_prefix("ID:")?.trim().parse().ok());
        let id = id.ok_or(FormatError::NoId(probe.path()))?;
        let known: HashMap<&str, Field> = text.lines().filter_map(field).collect();
        let find = |name: &'static str| {
            known.get(name).copied().ok_or(FormatError::NoField { probe: probe.path(), field: name })
        };
        let fields = probe.fields().iter().map(|name| find(name)).collect::<Result<_, _>>()?;
        Ok(Self { probe, id, pid: find("common_pid")?, fields })
    }

    /// The tracepoint's number, `common_type` of its records.
    pub fn id(&self) -> u16 {
        self.id
    }
}

/// Parses a line of a format file: declaration, offset, size, signedness, each ended by a semicolon.
fn field(line: &str) -> Option<(&str, Field)> {
    let mut parts = line.trim().strip_prefix("field:")?.split(';');
    let declaration = parts.next()?;
    let mut value = |key: &str| parts.next()?.trim().strip_prefix(key)?.parse::<usize>().ok();
    let (offset, size) = (value("offset:")?, value("size:")?);
    let name = declaration.split_whitespace().last()?;
    let name = name.split('[').next()?;
    let located = declaration.starts_with("__data_loc");
    let relative = declaration.starts_with("__rel_loc");
    Some((name, Field { offset, size, located, relative }))
}

/// Decodes records of all probes.
#[derive(Debug, Clone, Default)]
pub struct Decoder {
    formats: HashMap<u16, Format>,
}

impl Decoder {
    /// A decoder of these formats.
    pub fn new(formats: impl IntoIterator<Item = Format>) -> Self {
        Self { formats: formats.into_iter().map(|format| (format.id, format)).collect() }
    }

    /// The event of a record. `None` if the record is of another probe or damaged.
    pub fn decode(&self, time: u64, cpu: u32, record: &[u8]) -> Option<Event> {
        let id = u16::from_ne_bytes(record.get(..2)?.try_into().ok()?);
        let format = self.formats.get(&id)?;
        let pid = number(record, format.pid)? as i32;
        Some(Event { time, cpu, pid, what: event_kind(format, record)? })
    }
}

fn event_kind(format: &Format, record: &[u8]) -> Option<EventKind> {
    let get = |index: usize| number(record, *format.fields.get(index)?);
    let word = |index: usize| get(index).map(|value| value as u32);
    let signed = |index: usize| get(index).map(|value| value as i32);
    let text = |index: usize| Some(Name::new(bytes(record, *format.fields.get(index)?)?));
    let task = |at: [usize; 3]| Some(Task { comm: text(at[0])?, pid: signed(at[1])?, prio: signed(at[2])? });
    Some(match format.probe {
        Probe::IrqEntry => EventKind::IrqEntry { irq: word(0)?, name: text(1)? },
        Probe::IrqExit => EventKind::IrqExit { irq: word(0)? },
        Probe::SoftirqEntry => EventKind::SoftirqEntry { vec: word(0)? },
        Probe::SoftirqExit => EventKind::SoftirqExit { vec: word(0)? },
        Probe::NapiPoll => EventKind::NapiPoll { dev: text(0)?, work: signed(1)? },
        Probe::Receive => EventKind::Receive { skb: get(0)?, len: word(1)?, dev: text(2)? },
        Probe::Queue => EventKind::Queue { skb: get(0)?, dev: text(1)? },
        Probe::StartXmit => EventKind::StartXmit { skb: get(0)?, protocol: get(1)? as u16, dev: text(2)? },
        Probe::Xmit => EventKind::Xmit { skb: get(0)?, rc: signed(1)?, dev: text(2)? },
        Probe::Switch => {
            EventKind::Switch { prev: task([0, 1, 2])?, preempted: still_runnable(get(3)?), next: task([4, 5, 6])? }
        }
        Probe::Waking => EventKind::Waking { pid: signed(0)?, prio: signed(1)? },
        Probe::KvmEntry => EventKind::KvmEntry,
        Probe::KvmExit => EventKind::KvmExit { reason: word(0)? },
        Probe::Interrupt => EventKind::Interrupt { vcpu: word(0)? },
        Probe::TimerStart => EventKind::TimerStart { timer: get(0)?, expires: get(1)? },
        Probe::TimerExpire => EventKind::TimerExpire { timer: get(0)? },
        Probe::VectorEntry(vector) => EventKind::IrqEntry { irq: word(0)?, name: vector.name().into() },
        Probe::VectorExit(_) => EventKind::IrqExit { irq: word(0)? },
    })
}

/// `prev_state` of `sched_switch` (`include/trace/events/sched.h`): 0 is running; 0x100 (TASK_REPORT_MAX) is preempted
/// in any state.
fn still_runnable(state: u64) -> bool {
    state == 0 || state & 0x100 != 0
}

/// A number of 1, 2, 4 or 8 bytes in the host's byte order.
fn number(record: &[u8], field: Field) -> Option<u64> {
    let bytes = record.get(field.offset..field.offset.checked_add(field.size)?)?;
    Some(match field.size {
        1 => u64::from(*bytes.first()?),
        2 => u64::from(u16::from_ne_bytes(bytes.try_into().ok()?)),
        4 => u64::from(u32::from_ne_bytes(bytes.try_into().ok()?)),
        8 => u64::from_ne_bytes(bytes.try_into().ok()?),
        _ => return None,
    })
}

/// Text: in place, or at the position in a locator (offset in the low half, length in the high half).
fn bytes(record: &[u8], field: Field) -> Option<&[u8]> {
    if !field.located && !field.relative {
        return record.get(field.offset..field.offset.checked_add(field.size)?);
    }
    let locator = number(record, field)?;
    let base = if field.relative { field.offset + field.size } else { 0 };
    let start = base + (locator & 0xffff) as usize;
    record.get(start..start + (locator >> 16 & 0xffff) as usize)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const COMMON: &str = "\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;\n\
        \tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;\n";

    fn format(probe: Probe, id: u16, rest: &str) -> Format {
        Format::parse(probe, &format!("name: x\nID: {id}\nformat:\n{COMMON}\n{rest}")).unwrap()
    }

    fn napi() -> Format {
        let fields = "\tfield:__data_loc char[] dev_name;\toffset:16;\tsize:4;\tsigned:0;\n\
            \tfield:int work;\toffset:20;\tsize:4;\tsigned:1;\n";
        format(Probe::NapiPoll, 7, fields)
    }

    #[test]
    fn a_located_name_and_a_number_are_read() {
        let mut record = vec![0; 28];
        record[..2].copy_from_slice(&7_u16.to_ne_bytes());
        record[4..8].copy_from_slice(&42_i32.to_ne_bytes());
        record[16..20].copy_from_slice(&(28 | 4_u32 << 16).to_ne_bytes());
        record[20..24].copy_from_slice(&64_i32.to_ne_bytes());
        record.extend(b"rt0\0");
        let event = Decoder::new([napi()]).decode(5, 1, &record).unwrap();
        assert_eq!(
            event,
            Event { time: 5, cpu: 1, pid: 42, what: EventKind::NapiPoll { dev: "rt0".into(), work: 64 } }
        );
    }

    #[test]
    fn a_missing_field_is_named() {
        let error = Format::parse(Probe::NapiPoll, &format!("ID: 7\n{COMMON}")).unwrap_err();
        assert!(error.to_string().contains("napi/napi_poll: this kernel's record has no field dev_name"), "{error}");
        assert_eq!(Format::parse(Probe::NapiPoll, COMMON), Err(FormatError::NoId("napi/napi_poll")));
    }

    #[test]
    fn preemption_is_told_from_sleep() {
        assert!(still_runnable(0) && still_runnable(0x100));
        assert!(!still_runnable(1) && !still_runnable(2) && !still_runnable(0x80));
    }

    proptest! {
        #[test]
        fn any_record_is_read_without_harm(
            mut record in prop::collection::vec(any::<u8>(), 0..64),
            time in any::<u64>(),
        ) {
            if record.len() >= 2 {
                record[..2].copy_from_slice(&7_u16.to_ne_bytes());
            }
            let _ = Decoder::new([napi()]).decode(time, 0, &record);
        }

        #[test]
        fn any_format_file_is_read_without_harm(text in "(ID: \
            [0-9]{0,8}\n|\tfield:[a-z_ \\[\\]]{0,12};\toffset:[0-9]{0,22};\tsize:[0-9]{0,3};\n|\\PC{0,20}\n){0,8}") {
            if let Ok(format) = Format::parse(Probe::SoftirqEntry, &text) {
                let _ = Decoder::new([format]).decode(0, 0, &[0; 32]);
            }
        }
    }
}
