//! Logs to journald if systemd started the program, else to standard error.

use std::time::Instant;

use ontime_hostnet::{Knob, Value};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::{Directive, LevelFilter};
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// The filter if `ONTIME_LOG` has none, or one that is not used.
const DEFAULT: &str = "info";

/// Starts logging, at level `info` unless `ONTIME_LOG` sets another (`ONTIME_LOG=debug`).
pub(crate) fn start() {
    let said = std::env::var_os("ONTIME_LOG").map(|said| said.to_string_lossy().into_owned());
    let refused = said.as_deref().and_then(refusal);
    let filter = filter(said);
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
    if let Some(why) = refused {
        tracing::warn!("{why}");
    }
}

/// Why a filter is not used.
fn refusal(said: &str) -> Option<String> {
    let error = parse(said).err()?;
    Some(format!("ONTIME_LOG={said}: {error}; level info is in force; write a level, such as debug"))
}

/// Parses a filter. A word that is no level would be the name of a crate whose messages alone are logged: a misspelt
/// level would switch off the log. So a crate is named with its level, except Ontime's own. An empty filter, as in
/// `Environment=ONTIME_LOG=`, would leave errors alone: it counts as none.
fn parse(said: &str) -> Result<EnvFilter, String> {
    let is_misspelt = |word: &&str| {
        let is_crate = word.contains(['=', '[']) || word.starts_with("ontime");
        !word.is_empty() && !is_crate && word.parse::<LevelFilter>().is_err()
    };
    if let Some(word) = said.split(',').map(str::trim).find(is_misspelt) {
        return Err(format!("'{word}' is no level"));
    }
    let said = if said.split(',').all(|word| word.trim().is_empty()) { DEFAULT } else { said };
    EnvFilter::try_new(said).map_err(|error| error.to_string())
}

/// The log filter. It drops all messages of crate virtio-queue: a guest can cause any number of them, on real-time
/// threads of its device process.
fn filter(said: Option<String>) -> EnvFilter {
    let filter = said.and_then(|said| parse(&said).ok()).unwrap_or_else(|| EnvFilter::new(DEFAULT));
    let quiet: Option<Directive> = "virtio_queue=off".parse().ok();
    quiet.into_iter().fold(filter, EnvFilter::add_directive)
}

/// The log line of a knob's change: old value, new value, rule.
pub(crate) fn change_line(knob: &Knob, from: Option<&Value>, to: &Value, rule: &str) -> String {
    let from = from.map_or_else(|| "unknown".to_owned(), ToString::to_string);
    format!("knob {knob}: {from} -> {to} ({rule})")
}

/// Limits log lines about changes. Tenants may start and end any number of threads, and journald drops all lines of a
/// service that logs too much.
#[derive(Debug)]
pub(crate) struct LineQuota {
    left: f64,
    refilled: Instant,
}

impl LineQuota {
    /// Lines at once: sufficient for the first pass over a host with some hundred VMs.
    const MOST: f64 = 4096.0;
    /// Lines per second in the long run.
    const REFILL: f64 = 20.0;

    /// A full quota.
    pub(crate) fn new(now: Instant) -> Self {
        Self { left: Self::MOST, refilled: now }
    }

    /// Whether one more line may be logged.
    pub(crate) fn take(&mut self, now: Instant) -> bool {
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
    use std::time::Duration;

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
    fn an_empty_filter_does_not_switch_off_the_log() {
        for said in ["", " ", ",", " , "] {
            assert_eq!(refusal(said), None, "{said:?}");
            let logs = tracing_subscriber::registry().with(filter(Some(said.to_owned())));
            tracing::subscriber::with_default(logs, || {
                assert!(tracing::enabled!(target: "ontime_hostnet::apply", tracing::Level::INFO), "{said:?}");
            });
        }
    }

    #[test]
    fn a_filter_that_is_not_used_is_told() {
        for said in ["debug", "warn,ontime_sched=trace", "off", "INFO,ontime_hostnet", "mio=warn,error"] {
            assert_eq!(refusal(said), None, "{said}");
        }
        for said in ["ontime_sched==trace", "debgu", "warn,vebose", "warning", "debug\u{fffd}"] {
            let why = refusal(said).unwrap();
            assert!(why.starts_with(&format!("ONTIME_LOG={said}: ")) && why.contains("info is in force"), "{why}");
            let logs = tracing_subscriber::registry().with(filter(Some(said.to_owned())));
            tracing::subscriber::with_default(logs, || {
                assert!(tracing::enabled!(target: "ontime_sched::run", tracing::Level::INFO), "{said}");
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
}
