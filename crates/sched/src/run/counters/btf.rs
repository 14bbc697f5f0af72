//! What the counters' programs need of the kernel's own description of its types (BTF, Documentation/bpf/btf.rst):
//! `/sys/kernel/btf/vmlinux`. The file is searched, not taken into tables: a library's tables of it take 40 MB, and the
//! daemon's memory is locked.

/// The least length of the header, and that of a type's fixed part.
const HEADER: usize = 24;
const TYPE: usize = 12;
const MAGIC: u16 = 0xeb9f;
/// Kinds of types (include/uapi/linux/btf.h).
const STRUCT: u32 = 4;
const TYPEDEF: u32 = 8;

/// A BTF file.
#[derive(Debug)]
pub(crate) struct Btf<'a> {
    types: &'a [u8],
    strings: &'a [u8],
}

/// A type: its fixed part, and what follows it.
struct Type<'a> {
    name: usize,
    kind: u32,
    more: &'a [u8],
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at.checked_add(4)?)?.try_into().ok().map(u32::from_ne_bytes)
}

impl<'a> Btf<'a> {
    /// None if these bytes are no BTF of this machine.
    pub(crate) fn new(bytes: &'a [u8]) -> Option<Self> {
        let magic = bytes.get(..2)?.try_into().ok().map(u16::from_ne_bytes)?;
        // Later kernels' headers are longer.
        let header = word(bytes, 4)? as usize;
        let part = |offset: usize, length: usize| {
            let from = header.checked_add(word(bytes, offset)? as usize)?;
            bytes.get(from..from.checked_add(word(bytes, length)? as usize)?)
        };
        let known = magic == MAGIC && header >= HEADER;
        known.then_some(Self { types: part(8, 12)?, strings: part(16, 20)? })
    }

    fn types(&self) -> impl Iterator<Item = Type<'a>> + use<'a> {
        let mut rest = self.types;
        std::iter::from_fn(move || {
            let info = word(rest, 4)?;
            let (kind, count) = (info >> 24 & 0x7f, info as usize & 0xff_ffff);
            let more = match kind {
                // A number, a variable, a tag of a declaration: one word.
                1 | 14 | 17 => 4,
                // An array.
                3 => 12,
                // Structures, unions, sections, enumerations of 64 bits.
                STRUCT | 5 | 15 | 19 => 12 * count,
                // Enumerations, prototypes.
                6 | 13 => 8 * count,
                // References, declarations without a body, floating point; later kinds are not known.
                2 | 7..=12 | 16 | 18 => 0,
                _ => return None,
            };
            let name = word(rest, 0)? as usize;
            let of = Type { name, kind, more: rest.get(TYPE..TYPE + more)? };
            rest = rest.get(TYPE + more..)?;
            Some(of)
        })
    }

    fn is_named(&self, at: usize, name: &str) -> bool {
        let named = self.strings.get(at..).unwrap_or_default();
        named.strip_prefix(name.as_bytes()).is_some_and(|rest| rest.first() == Some(&0))
    }

    /// The number of a typedef.
    pub(crate) fn typedef(&self, name: &str) -> Option<u32> {
        let at = self.types().position(|of| of.kind == TYPEDEF && self.is_named(of.name, name))?;
        u32::try_from(at + 1).ok()
    }

    /// The offset of a member in a structure, bytes.
    pub(crate) fn offset(&self, structure: &str, member: &str) -> Option<u32> {
        let of = self.types().find(|of| of.kind == STRUCT && self.is_named(of.name, structure))?;
        let mut members = of.more.chunks_exact(12);
        let bits = word(members.find(|one| word(one, 0).is_some_and(|name| self.is_named(name as usize, member)))?, 8)?;
        (bits % 8 == 0).then_some(bits / 8)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `int`, `struct task_struct {int state; int pid;}` with `pid` at this bit, `typedef int btf_trace_sched_switch`.
    fn example(bit: u32) -> Vec<u8> {
        let strings = b"\0int\0task_struct\0state\0pid\0btf_trace_sched_switch\0";
        let name =
            |wanted: &str| strings.windows(wanted.len()).position(|part| part == wanted.as_bytes()).unwrap() as u32;
        let types = [
            [name("int"), 1 << 24, 4].as_slice(),
            &[32],
            &[name("task_struct"), STRUCT << 24 | 2, 8],
            &[name("state"), 1, 0, name("pid"), 1, bit],
            &[name("btf_trace_sched_switch"), TYPEDEF << 24, 1],
        ]
        .concat();
        let length = types.len() as u32 * 4;
        let header = [u32::from(MAGIC) | 1 << 16, HEADER as u32, 0, length, length, strings.len() as u32];
        let words = header.iter().chain(&types).flat_map(|word| word.to_ne_bytes());
        words.chain(*strings).collect()
    }

    #[test]
    fn types_and_members_are_found() {
        let bytes = example(32);
        let btf = Btf::new(&bytes).unwrap();
        assert_eq!((btf.typedef("btf_trace_sched_switch"), btf.typedef("btf_trace_sched_wakeup")), (Some(3), None));
        assert_eq!((btf.offset("task_struct", "pid"), btf.offset("task_struct", "state")), (Some(4), Some(0)));
        assert_eq!((btf.offset("task_struct", "pi"), btf.offset("task", "pid")), (None, None));
        assert_eq!(btf.typedef("int"), None, "it is no typedef");
        let bytes = example(33);
        assert_eq!(Btf::new(&bytes).unwrap().offset("task_struct", "pid"), None, "a bit field");
    }

    /// Later kernels have more in the header. A kind that is not known ends the search.
    #[test]
    fn a_longer_header_is_passed_over_and_an_unknown_kind_is_not() {
        let mut bytes = example(32);
        bytes.splice(HEADER..HEADER, [0xff; 8]);
        bytes[4..8].copy_from_slice(&32_u32.to_ne_bytes());
        assert_eq!(Btf::new(&bytes).unwrap().typedef("btf_trace_sched_switch"), Some(3));
        let kind = 32 + 7;
        bytes[kind] = 0x55;
        assert_eq!(Btf::new(&bytes).unwrap().typedef("btf_trace_sched_switch"), None);
    }

    #[test]
    fn bytes_that_end_early_or_are_no_btf_give_nothing() {
        let bytes = example(32);
        for length in 0..bytes.len() {
            assert!(Btf::new(&bytes[..length]).is_none(), "{length}");
        }
        for at in 0..bytes.len() {
            let mut wrong = bytes.clone();
            wrong[at] ^= 0xff;
            if let Some(btf) = Btf::new(&wrong) {
                let _ = (btf.typedef("btf_trace_sched_switch"), btf.offset("task_struct", "pid"));
            }
        }
    }
}
