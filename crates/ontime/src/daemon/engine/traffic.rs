//! Adaptive polling under method `busypoll`: reads how many packets NICs have received, and decides when a pass is due
//! because a NIC has to begin or end polling. The decision itself is pure ([`ontime_hostnet::adaptive`]).

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;
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
    /// Packets of each NIC at the last look, by interface index.
    packets: BTreeMap<u32, u64>,
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
            self.traffic.packets.clear();
            return !std::mem::take(&mut self.traffic.resting).is_empty();
        };
        let elapsed = self.traffic.last.map(|last| last.elapsed());
        if elapsed.is_some_and(|elapsed| elapsed < LOOK) {
            return false;
        }
        self.traffic.last = Some(Instant::now());
        self.traffic.packets = self.received();
        let resting = self.traffic.adaptive.look(settings, elapsed.unwrap_or_default(), &self.traffic.packets);
        let changed = resting != self.traffic.resting;
        self.traffic.resting = resting;
        changed
    }

    /// The number of packets that each polling NIC has received. A NIC that is gone is left out.
    fn received(&self) -> BTreeMap<u32, u64> {
        let net = self.host.roots().sys.join("class/net");
        let received = |nic: &NicId| {
            let last = self.traffic.packets.get(&nic.ifindex).copied();
            Some((nic.ifindex, packets(&net.join(&nic.name).join("statistics/rx_packets"), last)?))
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

/// The number in a NIC's counter; None if the NIC is gone. Where the counter cannot be read, as for want of a
/// descriptor, its `last` value: a NIC that was forgotten would poll beyond its bound when it is seen again.
fn packets(counter: &Path, last: Option<u64>) -> Option<u64> {
    match std::fs::read_to_string(counter) {
        Ok(text) => text.trim().parse().ok().or(last),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(_) => last,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_that_cannot_be_read_is_not_that_of_a_nic_that_is_gone() {
        let dir = tempfile::tempdir().unwrap();
        let counter = dir.path().join("rx_packets");
        std::fs::write(&counter, "5120\n").unwrap();
        assert_eq!((packets(&counter, None), packets(&counter, Some(4_000))), (Some(5_120), Some(5_120)));
        // A directory can be opened, and its reading fails.
        assert_eq!((packets(dir.path(), Some(4_000)), packets(dir.path(), None)), (Some(4_000), None));
        std::fs::remove_file(&counter).unwrap();
        assert_eq!(packets(&counter, Some(4_000)), None);
    }
}
