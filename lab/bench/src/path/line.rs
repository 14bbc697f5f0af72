//! Lines of the emulator's log (QEMU 7.2, `-d exec` with one instruction per block).
//!
//! In: a line. Out: the instruction that was executed, or that the previous line's instruction was not.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Where an instruction is: of the host or of a guest, of the kernel or of a program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Level {
    /// The host's kernel.
    HostKernel,
    /// A program of the host.
    HostUser,
    /// The guest's kernel.
    GuestKernel,
    /// A program of the guest.
    GuestUser,
}

impl Level {
    /// The name in tables.
    pub(crate) fn description(self) -> &'static str {
        match self {
            Level::HostKernel => "host kernel",
            Level::HostUser => "host user",
            Level::GuestKernel => "guest kernel",
            Level::GuestUser => "guest user",
        }
    }

    /// Whether the level is in a guest.
    pub(crate) fn in_guest(self) -> bool {
        matches!(self, Level::GuestKernel | Level::GuestUser)
    }

    /// The level, from the flags of a translated block (`target/i386/cpu.h`: bits 0 and 1 are the privilege level,
    /// HF_GUEST is bit 21).
    fn of(flags: u64) -> Self {
        let (guest, user) = (flags >> 21 & 1 == 1, flags & 3 == 3);
        match (guest, user) {
            (false, false) => Level::HostKernel,
            (false, true) => Level::HostUser,
            (true, false) => Level::GuestKernel,
            (true, true) => Level::GuestUser,
        }
    }
}

/// The meaning of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Line {
    /// This CPU will execute the instruction at this address.
    Instruction {
        /// The CPU's number.
        cpu: usize,
        /// Virtual address.
        address: u64,
        level: Level,
    },
    /// The previous line's instruction was not executed: its CPU stopped before it, and a later line logs it again.
    Stopped,
}

/// Parses one line. `None` for other lines, and for lines that were cut off.
pub(crate) fn parse(line: &[u8]) -> Option<Line> {
    if line.starts_with(b"Stopped execution of TB chain before ") {
        return Some(Line::Stopped);
    }
    let fields = line.strip_prefix(b"Trace ")?;
    let cpu = fields.get(..fields.iter().position(|byte| *byte == b':')?)?;
    let cpu = std::str::from_utf8(cpu).ok()?.parse().ok()?;
    let open = fields.iter().position(|byte| *byte == b'[')?;
    let fields = fields.get(open + 1..)?;
    let fields = fields.get(..fields.iter().position(|byte| *byte == b']')?)?;
    // [code segment's base/address/flags/flags of the translation]
    let mut fields = fields.split(|byte| *byte == b'/').skip(1).map(hexadecimal);
    let (address, flags) = (fields.next()??, fields.next()??);
    Some(Line::Instruction { cpu, address, level: Level::of(flags) })
}

/// Parses up to 16 digits, with or without `0x`.
fn hexadecimal(text: &[u8]) -> Option<u64> {
    let digits = text.strip_prefix(b"0x").unwrap_or(text);
    if digits.is_empty() || digits.len() > 16 {
        return None;
    }
    digits.iter().try_fold(0, |value, digit| Some(value << 4 | u64::from(char::from(*digit).to_digit(16)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_tells_cpu_address_and_level() {
        let line = |flags: &str| {
            format!("Trace 3: 0x7f0a4c0a2b40 [0000000000000000/ffffffff8129f6e0/{flags}/ff020701] __switch_to_asm")
        };
        let level = |flags: &str| match parse(line(flags).as_bytes()) {
            Some(Line::Instruction { cpu: 3, address: 0xffff_ffff_8129_f6e0, level }) => level,
            other => panic!("{other:?}"),
        };
        assert_eq!(level("0x0040c0b0"), Level::HostKernel);
        assert_eq!(level("0x0040c0b3"), Level::HostUser);
        assert_eq!(level("0x0060c0b0"), Level::GuestKernel);
        assert_eq!(level("0060c0b3"), Level::GuestUser);
    }

    #[test]
    fn an_instruction_that_was_not_reached_is_taken_back() {
        let line = b"Stopped execution of TB chain before 0x7f0a4c0a2b40 [ffffffff8129f6e0] ";
        assert_eq!(parse(line), Some(Line::Stopped));
    }

    #[test]
    fn odd_lines_are_none() {
        for line in [
            "",
            "Trace ",
            "Trace 0x0: 0x1 [0/1/0]",
            "Trace -1: 0x1 [0/1/0]",
            "Trace : 0x1 [0/1/0]",
            "Trace 0: [",
            "Trace 0: []",
            "Trace 0: [0/1]",
            "Trace 0: [0/xyz/3/4]",
            "Trace 0: [0//3/4]",
            "IN: ",
            "Trace 0: [0/11112222333344445/3/4]",
            "Trace 0: 0x1 [0/1/0x",
        ] {
            assert_eq!(parse(line.as_bytes()), None, "{line}");
        }
    }
}
