//! Log lines that another party can cause: a line that was logged within the last minute is left out and counted.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use crate::text::counted;

/// Lines that were logged recently, so that a repeated error does not fill the journal.
#[derive(Debug, Default)]
pub struct Repeats {
    said: HashMap<String, (Instant, u64)>,
}

/// The same line is logged at most once in this time.
const EVERY: Duration = Duration::from_secs(60);
/// The most different lines that are remembered.
const KEPT: usize = 1024;

impl Repeats {
    /// Whether to log this line, or a line of this kind, now. Returns how often it was left out since it was last
    /// logged, or `None` to leave it out. Lines beyond [`KEPT`] different ones in a minute are left out too.
    pub fn say(&mut self, line: &str, now: Instant) -> Option<u64> {
        if let Some((at, left_out)) = self.said.get_mut(line) {
            if now.duration_since(*at) < EVERY {
                *left_out += 1;
                return None;
            }
            *at = now;
            return Some(std::mem::take(left_out));
        }
        if self.said.len() >= KEPT {
            self.said.retain(|_, (at, _)| now.duration_since(*at) < EVERY);
        }
        if self.said.len() >= KEPT {
            return None;
        }
        self.said.insert(line.to_owned(), (now, 0));
        Some(0)
    }

    /// Logs a warning, unless it was logged within the last minute.
    pub fn warn(&mut self, line: &str) {
        self.warn_of(line, line);
    }

    /// Logs a warning, unless a warning of the same kind was logged within the last minute. For lines with numbers or
    /// reasons that another party chooses.
    pub fn warn_of(&mut self, kind: &str, line: &str) {
        match self.say(kind, Instant::now()) {
            Some(0) => tracing::warn!("{line}"),
            Some(more) => tracing::warn!("{line} (and {} since)", counted(more, "time")),
            None => {}
        }
    }

    /// Logs a message at level info, unless it was logged within the last minute.
    pub fn info(&mut self, line: &str) {
        self.info_of(line, line);
    }

    /// Logs a message at level info, unless one of the same kind was logged within the last minute.
    pub fn info_of(&mut self, kind: &str, line: &str) {
        if self.say(kind, Instant::now()).is_some() {
            tracing::info!("{line}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_said_once_a_minute_with_its_count() {
        let mut repeats = Repeats::default();
        let start = Instant::now();
        assert_eq!(repeats.say("a", start), Some(0));
        assert_eq!(repeats.say("a", start + Duration::from_secs(1)), None);
        assert_eq!(repeats.say("b", start + Duration::from_secs(1)), Some(0));
        assert_eq!(repeats.say("a", start + Duration::from_secs(2)), None);
        assert_eq!(repeats.say("a", start + Duration::from_secs(61)), Some(2));
        let said = (0..5000).filter(|n| repeats.say(&format!("line {n}"), start + Duration::from_secs(62)).is_some());
        assert!(said.count() <= KEPT, "a flood of different lines is a flood, too");
        assert!(repeats.said.len() <= KEPT);
        assert_eq!(repeats.say("line 4999", start + Duration::from_secs(123)), Some(0));
    }
}
