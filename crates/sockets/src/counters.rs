//! What a device process counts, for `ontime sockets` and the log.

use std::sync::atomic::{AtomicU64, Ordering};

/// Counters since the process started.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Calls executed.
    pub calls: AtomicU64,
    /// Malformed calls.
    pub malformed: AtomicU64,
    /// Binds refused by the policy.
    pub refused_bind: AtomicU64,
    /// Connects, sends and group joins refused by the policy.
    pub refused_reach: AtomicU64,
    /// Options that are not passed to the host.
    pub refused_option: AtomicU64,
    /// Calls beyond a limit: sockets or waiting calls.
    pub refused_limit: AtomicU64,
    /// Connections reset at their close because too many closed connections still had data.
    pub reset_limit: AtomicU64,
    /// Sockets that were to be outsourced and stayed in the guest's own stack; counted by the guest.
    pub stayed_local: AtomicU64,
    /// Wake-ups sent to halted vCPUs.
    pub wakes: AtomicU64,
    /// Wake-ups sent again by the guard.
    pub rewakes: AtomicU64,
    /// Interrupts sent because a more urgent thread waits.
    pub attentions: AtomicU64,
    /// Changes of deadline bandwidth.
    pub deadlines: AtomicU64,
    /// Changes of deadline bandwidth that the host refused.
    pub refused_deadlines: AtomicU64,
}

impl Counters {
    /// The counters by name, and the number of closed connections that still have data.
    pub(crate) fn named(&self, closing: usize) -> Vec<(String, u64)> {
        let Counters {
            calls,
            malformed,
            refused_bind,
            refused_reach,
            refused_option,
            refused_limit,
            reset_limit,
            stayed_local,
            wakes,
            rewakes,
            attentions,
            deadlines,
            refused_deadlines,
        } = self;
        [
            ("calls", calls),
            ("malformed", malformed),
            ("refused_bind", refused_bind),
            ("refused_reach", refused_reach),
            ("refused_option", refused_option),
            ("refused_limit", refused_limit),
            ("reset_limit", reset_limit),
            ("stayed_local", stayed_local),
            ("wakes", wakes),
            ("rewakes", rewakes),
            ("attentions", attentions),
            ("deadlines", deadlines),
            ("refused_deadlines", refused_deadlines),
        ]
        .map(|(name, counter)| (name.to_owned(), counter.load(Ordering::Relaxed)))
        .into_iter()
        .chain([("closing".to_owned(), closing as u64)])
        .collect()
    }

    /// Number of refused or malformed calls.
    pub(crate) fn refusals(&self) -> u64 {
        let Counters {
            malformed, refused_bind, refused_reach, refused_option, refused_limit, refused_deadlines, ..
        } = self;
        [malformed, refused_bind, refused_reach, refused_option, refused_limit, refused_deadlines]
            .iter()
            .map(|counter| counter.load(Ordering::Relaxed))
            .sum()
    }
}

/// Increments a counter.
pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
