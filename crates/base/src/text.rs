//! Helpers for the text of messages.

use std::fmt::Display;

/// A count with its noun: `1 thread`, `2 threads`.
pub fn counted<N: Display + PartialEq + From<u8>>(count: N, noun: &str) -> String {
    match (count == N::from(1), noun.ends_with('s')) {
        (true, _) => format!("{count} {noun}"),
        (false, true) => format!("{count} {noun}es"),
        (false, false) => format!("{count} {noun}s"),
    }
}

#[cfg(test)]
mod tests {
    use super::counted;

    #[test]
    fn one_is_not_many() {
        let all =
            [counted(0_u64, "knob"), counted(1_usize, "process"), counted(2_usize, "process"), counted(7_u8, "VM")];
        assert_eq!(all, ["0 knobs", "1 process", "2 processes", "7 VMs"]);
    }
}
