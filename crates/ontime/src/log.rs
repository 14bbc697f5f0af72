//! Logs to journald if systemd started the program, else to standard error. Leaves out a line that was logged within
//! the last minute.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use ontime_tenants::text::counted;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::Directive;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// Starts logging, at level `info` unless `ONTIME_LOG` sets another (`ONTIME_LOG=debug`).
pub fn start() {
    let filter = filter(std::env::var("ONTIME_LOG").ok());
    let journal = std::env::var_os("JOURNAL_STREAM").and_then(|_| tracing_journald::layer().ok());
    let result = match journal {
        Some(journal) => tracing_subscriber::registry().with(filter).with(journal).try_init(),
        None => {
            let stderr =
                tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_target(false).with_ansi(false);
            tracing_subscriber::registry().with(filter).with(stderr).try_init()
        }
    };
    // An error means that logging was started before, as by tests in one process.
    let _ = result;
}

/// The log filter. It drops all messages of crate virtio-queue: a guest can cause any number of them, on real-time
/// threads of its device process.
fn filter(said: Option<String>) -> EnvFilter {
    let filter = said.and_then(|said| EnvFilter::try_new(said).ok()).unwrap_or_else(|| EnvFilter::new("info"));
    let quiet: Option<Directive> = "virtio_queue=off".parse().ok();
    quiet.into_iter().fold(filter, EnvFilter::add_directive)
}

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
        if self.say(line, Instant::now()).is_some() {
            tracing::info!("{line}");
        }
    }
}

/// Limits log lines about changes. Tenants may start and end any number of threads, and journald drops all lines of a
/// service that logs too much.
#[derive(Debug)]
pub struct LineQuota {
    left: f64,
    refilled: Instant,
}

impl LineQuota {
    /// Lines at once: sufficient for the first pass over a host with some hundred VMs.
    const MOST: f64 = 4096.0;
    /// Lines per second in the long run.
    const REFILL: f64 = 20.0;

    /// A full quota.
    pub fn new(now: Instant) -> Self {
        Self { left: Self::MOST, refilled: now }
    }

    /// Whether one more line may be logged.
    pub fn take(&mut self, now: Instant) -> bool {
        let since = now.saturating_duration_since(self.refilled).as_secs_f64();
        self.left = (self.left + since * Self::REFILL).min(Self::MOST);
        self.refilled = now;
        let may = self.left >= 1.0;
        if may {
            self.left -= 1.0;
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guest_cannot_make_virtio_queue_speak() {
        for said in [None, Some("debug"), Some("nonsense=="), Some("virtio_queue=trace")] {
            let logs = tracing_subscriber::registry().with(filter(said.map(str::to_owned)));
            tracing::subscriber::with_default(logs, || {
                assert!(!tracing::enabled!(target: "virtio_queue::queue", tracing::Level::ERROR), "{said:?}");
                let others = tracing::enabled!(target: "ontime_sockets::worker", tracing::Level::ERROR);
                assert_eq!(others, said != Some("virtio_queue=trace"), "{said:?}");
            });
        }
    }

    #[test]
    fn lines_about_changes_have_a_quota_that_refills() {
        let start = Instant::now();
        let mut quota = LineQuota::new(start);
        assert_eq!((0..10_000).filter(|_| quota.take(start)).count(), 4096);
        assert_eq!((0..100).filter(|_| quota.take(start + Duration::from_secs(2))).count(), 40);
        assert_eq!((0..10_000).filter(|_| quota.take(start + Duration::from_secs(86_400))).count(), 4096);
    }

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
