//! Adaptive polling under method `busypoll`: reads how many packets NICs have received, and decides when a pass is due
//! because a NIC has to begin or end polling. The decision itself is pure ([`ontime_hostnet::adaptive`]).

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use ontime_hostnet::NicId;
use ontime_hostnet::adaptive::{Adaptive, LOOK, Settings};

use super::Engine;
use crate::api;

/// What is known about the traffic of NICs that poll.
#[derive(Debug, Default)]
pub(super) struct Traffic {
    adaptive: Adaptive,
    last: Option<Instant>,
    /// Interface indexes of NICs that wait for interrupts now instead of polling.
    pub(super) resting: BTreeSet<u32>,
}

impl Engine {
    fn adaptive(&self) -> Option<Settings> {
        self.config.host.adaptive.filter(|_| self.state == api::State::Applied && !self.look.polls.is_empty())
    }

    /// The time until traffic must be looked at (while NICs poll adaptively), or a census is due (while protections are
    /// off), or a look at the daemon's own threads (while it caps or paces a thread). None: no timer is needed.
    pub(crate) fn look_in(&self) -> Option<Duration> {
        let traffic = || self.traffic.last.map_or(Duration::ZERO, |last| LOOK.saturating_sub(last.elapsed()));
        self.adaptive().map(|_| traffic()).into_iter().chain(self.census_in()).chain(self.own_in()).min()
    }

    /// Looks at the traffic if it is time. Returns whether a pass is due, because a NIC has to begin or end polling.
    pub(crate) fn look_at_traffic(&mut self) -> bool {
        let Some(settings) = self.adaptive() else {
            self.traffic.last = None;
            return !std::mem::take(&mut self.traffic.resting).is_empty();
        };
        let elapsed = self.traffic.last.map(|last| last.elapsed());
        if elapsed.is_some_and(|elapsed| elapsed < LOOK) {
            return false;
        }
        self.traffic.last = Some(Instant::now());
        let packets = self.received();
        let resting = self.traffic.adaptive.look(settings, elapsed.unwrap_or_default(), &packets);
        let changed = resting != self.traffic.resting;
        self.traffic.resting = resting;
        changed
    }

    /// The number of packets that each polling NIC has received. A NIC that is gone is left out.
    fn received(&self) -> BTreeMap<u32, u64> {
        let net = self.host.roots().sys.join("class/net");
        let received = |nic: &NicId| {
            let text = std::fs::read_to_string(net.join(&nic.name).join("statistics/rx_packets")).ok()?;
            Some((nic.ifindex, text.trim().parse().ok()?))
        };
        self.look.polls.iter().filter_map(received).collect()
    }

    /// The CPU time that adaptive polling has taken and saved so far, by NIC.
    pub(super) fn polling(&self) -> Vec<api::Polling> {
        if self.adaptive().is_none() {
            return Vec::new();
        }
        let name = |index| self.look.inventory.nic_by_index(index).map(|nic| nic.id.name.clone());
        self.traffic
            .adaptive
            .accounts()
            .filter_map(|(index, account)| {
                Some(api::Polling {
                    nic: name(index)?,
                    polling: account.polling,
                    polled_seconds: account.polled.as_secs_f64(),
                    saved_seconds: account.rested.as_secs_f64(),
                    starts: account.starts,
                    bounded: account.bounded,
                })
            })
            .collect()
    }

    pub(super) fn account_traffic(&mut self) {
        let polling = self.polling();
        self.metrics.polling(&polling);
    }
}
