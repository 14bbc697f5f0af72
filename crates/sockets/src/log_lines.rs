//! Counts the log's lines in tests.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use tracing::{Event, Metadata, Subscriber, span, subscriber};

struct Lines(Arc<AtomicUsize>);

impl Subscriber for Lines {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, _: &Event<'_>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}

/// How many lines this thread logs in `run`.
pub(crate) fn count_lines(run: impl FnOnce()) -> usize {
    let lines = Arc::new(AtomicUsize::new(0));
    subscriber::with_default(Lines(lines.clone()), run);
    lines.load(Ordering::Relaxed)
}
