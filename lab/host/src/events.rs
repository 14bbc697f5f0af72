//! The first event in which two runs differ, from the emulator's logs of them ([`crate::Machine::events`]).
//!
//! A line of a log is an event that is to come at the same instruction in every run: the virtual clock (ns), the kind,
//! the CPU or `-`, two numbers (hexadecimal), and a sum over CPU, instruction counter and program counter at the end of
//! all turns so far. Lines that begin with `#` may differ. `emulator/patches/0009-icount-log.patch` writes it.
//!
//! | kind | the numbers |
//! |---|---|
//! | `vector` | vector that an APIC accepts; whether it is level-triggered |
//! | `interrupt` | vector that the CPU takes; program counter |
//! | `vmexit` | SVM's exit code; the guest's program counter |
//! | `disk` | sector of the last request; bytes written to the guest |
//! | `9p` | message; bytes of the answer |
//! | `message` | bytes from the agent |
//! | `line`, `unawaited` | bytes to the agent while the clock stood still; at any instruction |
//! | `packet` | hub; bytes |
//! | `jump` | ns by which the clock jumped, because all CPUs were halted |
//! | `turn` | program counter at the end of a turn; instructions that it left to the next |
//! | `end` | none: the host asks to be switched off; the last line |

use std::collections::VecDeque;
use std::fmt::{self, Display, Formatter};
use std::fs::File;
use std::io::{self, BufRead, BufReader, Lines};
use std::path::Path;
use std::str::FromStr;

use crate::error::{LabError, file};

/// Name of the log in a lab's directory.
pub const EVENTS: &str = "events.log";
/// Lines that are shown before the first difference.
const CONTEXT: usize = 15;

/// The turns that a log has: those that end from one time of the virtual clock on, ns, and before another. Each CPU has
/// a million turns a second, at 1 ns an instruction.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Turns {
    /// The first time.
    pub from: u64,
    /// The time at which no more turns are logged.
    pub to: u64,
}

impl FromStr for Turns {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let times: Option<(u64, u64)> =
            text.split_once('-').and_then(|(from, to)| Some((from.parse().ok()?, to.parse().ok()?)));
        match times {
            Some((from, to)) if from <= to => Ok(Self { from, to }),
            _ => Err(format!("'{text}' is not FROM-TO, two times of the virtual clock in ns")),
        }
    }
}

/// What two logs have in common.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Comparison {
    /// Number of events at the beginning that are the same.
    pub same: u64,
    /// Whether they are all, up to the end of the host's run. The log of an emulator that was killed ends before.
    pub complete: bool,
    /// Where the logs part.
    pub difference: Option<Difference>,
}

/// The first event that differs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// In each run the lines before, and the event, or nothing if the log ends.
    runs: [(Vec<String>, Option<String>); 2],
    /// Virtual time of the last event that is the same, ns.
    after: u64,
}

impl Difference {
    /// Whether the same event came at the same time, after turns that differ.
    fn is_of_turns(&self) -> bool {
        let event = |run: &(Vec<String>, Option<String>)| {
            run.1.as_deref().and_then(|line| line.rsplit_once(' ')).map(|(event, _)| event.to_owned())
        };
        let [first, second] = self.runs.each_ref().map(event);
        first.is_some() && first == second
    }

    /// The turns between the last event that is the same and the first one that differs.
    fn turns(&self) -> Turns {
        let times = self.runs.iter().filter_map(|(_, event)| event.as_deref().and_then(time));
        let to = times.max().unwrap_or(self.after).saturating_add(1);
        Turns { from: self.after, to }
    }
}

impl Display for Difference {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        for (name, (before, event)) in ["first", "second"].iter().zip(&self.runs) {
            writeln!(f, "{name} run:")?;
            before.iter().try_for_each(|line| writeln!(f, "    {line}"))?;
            writeln!(f, "  > {}", event.as_deref().unwrap_or("(the log ends)"))?;
        }
        if self.is_of_turns() {
            writeln!(f, "The event is the same, but a CPU took another path before it.")?;
        }
        let Turns { from, to } = self.turns();
        write!(f, "Run both again with --events={from}-{to} for each turn between the two events.")
    }
}

/// The virtual time of an event.
fn time(line: &str) -> Option<u64> {
    line.split(' ').next()?.parse().ok()
}

/// A log, and the last lines that were read from it.
struct Log<R> {
    lines: Lines<R>,
    recent: VecDeque<String>,
}

impl<R: BufRead> Log<R> {
    fn new(log: R) -> Self {
        Self { lines: log.lines(), recent: VecDeque::new() }
    }

    fn remember(&mut self, line: String) {
        if self.recent.len() == CONTEXT {
            self.recent.pop_front();
        }
        self.recent.push_back(line);
    }

    /// The next event; the lines before it that may differ are remembered.
    fn event(&mut self) -> io::Result<Option<String>> {
        while let Some(line) = self.lines.next().transpose()? {
            if !line.starts_with('#') {
                return Ok(Some(line));
            }
            self.remember(line);
        }
        Ok(None)
    }
}

fn compare_logs(first: impl BufRead, second: impl BufRead) -> io::Result<Comparison> {
    let (mut first, mut second) = (Log::new(first), Log::new(second));
    let (mut same, mut after, mut complete) = (0, 0, false);
    loop {
        match (first.event()?, second.event()?) {
            (None, None) => return Ok(Comparison { same, complete, difference: None }),
            (Some(event), Some(other)) if event == other => {
                same += 1;
                after = time(&event).unwrap_or(after);
                complete = event.split(' ').nth(1) == Some("end");
                first.remember(event);
                second.remember(other);
            }
            (event, other) => {
                let runs = [(first.recent.into(), event), (second.recent.into(), other)];
                return Ok(Comparison { same, complete: false, difference: Some(Difference { runs, after }) });
            }
        }
    }
}

/// Compares the logs of two runs, up to the first event that differs.
///
/// # Errors
/// A log cannot be read.
pub fn compare(first: &Path, second: &Path) -> Result<Comparison, LabError> {
    let open = |path: &Path| File::open(path).map(BufReader::new).map_err(file("read", path));
    compare_logs(open(first)?, open(second)?).map_err(file("compare the events of", first))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn compared(first: &str, second: &str) -> Comparison {
        compare_logs(first.as_bytes(), second.as_bytes()).unwrap()
    }

    const BEGIN: &str = "100 vector 0 ec 0 00000000000000aa\n104 interrupt 0 ec ffffffff81000010 00000000000000ab\n";

    #[test]
    fn logs_that_differ_in_remarks_alone_are_the_same() {
        let other = BEGIN.replacen('\n', "\n# 101 kick by another thread\n", 1);
        assert_eq!(compared(BEGIN, &other), Comparison { same: 2, complete: false, difference: None });
    }

    #[test]
    fn logs_that_break_off_at_the_same_event_are_told_from_whole_ones() {
        assert_eq!(compared("", ""), Comparison { same: 0, complete: false, difference: None });
        let whole = format!("{BEGIN}120 end - 0 0 00000000000000ac\n# 130 kick by another thread\n");
        assert_eq!(compared(&whole, &whole), Comparison { same: 3, complete: true, difference: None });
        assert!(!compared(&whole, BEGIN).complete);
    }

    #[test]
    fn the_first_difference_is_told_with_what_came_before_it() {
        let disk = |time: u64| format!("{BEGIN}# 105 kick\n{time} disk - 80 1000 00000000000000ac\n");
        let found = compared(&(disk(230) + "900 jump - 5 0 00\n"), &disk(231));
        let difference = found.difference.unwrap();
        assert_eq!((found.same, difference.turns()), (2, Turns { from: 104, to: 232 }));
        let said = difference.to_string();
        for line in ["    # 105 kick\n", "  > 230 disk - 80 1000 00000000000000ac\n", "  > 231 disk", "=104-232 "] {
            assert!(said.contains(line), "{said}");
        }
        assert!(!said.contains("another path") && !said.contains("jump"), "{said}");
    }

    #[test]
    fn another_sum_is_another_path_and_a_log_may_end_before_the_other() {
        let exit = |sum: &str| format!("{BEGIN}110 vmexit 1 78 ffffffff81096048 {sum}\n");
        let said = compared(&exit("00000000000000ac"), &exit("00000000000000ad")).difference.unwrap().to_string();
        assert!(said.contains("another path"), "{said}");
        let said = compared(BEGIN, &exit("00000000000000ac")).difference.unwrap().to_string();
        assert!(said.contains("  > (the log ends)\n") && said.contains("--events=104-111 "), "{said}");
    }

    #[test]
    fn few_lines_are_shown_of_a_long_log() {
        let long: String = (0..1000).map(|time| format!("{time} jump - 1 0 00\n")).collect();
        let difference = compared(&long, &(long.clone() + "1000 jump - 1 0 00\n")).difference.unwrap();
        assert!(difference.runs.iter().all(|(before, _)| before.len() == CONTEXT));
        assert!(difference.to_string().contains("    999 jump"));
    }

    #[test]
    fn turns_are_two_times_in_order() {
        assert_eq!("5-9".parse(), Ok(Turns { from: 5, to: 9 }));
        for bad in ["", "5", "9-5", "-5", "5-", "a-b", "1-2-3"] {
            assert!(bad.parse::<Turns>().unwrap_err().contains("FROM-TO"), "{bad}");
        }
    }

    /// The emulator's patch writes these kinds.
    #[test]
    fn every_kind_of_the_emulators_log_is_described() {
        let patch = include_str!("emulator/patches/0009-icount-log.patch");
        let description = include_str!("events.rs");
        let kinds: Vec<&str> = patch
            .lines()
            .filter(|line| line.starts_with('+'))
            .filter_map(|line| line.split_once("icount_log(\"").or_else(|| line.split_once("icount_log_event(\"")))
            .filter_map(|(_, rest)| rest.split('"').next())
            .collect();
        assert!(kinds.len() >= 11, "{kinds:?}");
        for kind in kinds {
            let told = format!("`{kind}`");
            assert!(description.lines().any(|line| line.starts_with("//! | ") && line.contains(&told)), "{kind}");
        }
    }
}
