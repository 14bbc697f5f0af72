//! Whose work is next: owners take turns, and each has a part of one thread's time. Pure.
//!
//! In: items with their owners, and how long each took. Out: the next item, or when there is one. So an owner with many
//! items, or with items that take long, delays another owner's by one item.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

/// Waiting items, and the time that each owner's took.
#[derive(Debug)]
pub struct Turns<Owner, Item> {
    /// Of each owner in their order; the owner that is served next comes first.
    waiting: VecDeque<(Owner, VecDeque<Item>)>,
    /// When the time that an owner's items took will be one part in `part` of all time.
    paid_at: BTreeMap<Owner, Instant>,
    part: u32,
    burst: Duration,
    trusted: Option<Owner>,
}

impl<Owner: Ord + Clone, Item> Turns<Owner, Item> {
    /// An owner's items take at most one part in `part` of the time, once they have taken `burst`. `trusted`: an owner
    /// without a limit.
    pub fn new(part: u32, burst: Duration, trusted: Option<Owner>) -> Self {
        Self { waiting: VecDeque::new(), paid_at: BTreeMap::new(), part, burst, trusted }
    }

    /// Adds an item.
    pub fn push(&mut self, owner: Owner, item: Item) {
        match self.waiting.iter_mut().find(|(other, _)| *other == owner) {
            Some((_, items)) => items.push_back(item),
            None => self.waiting.push_back((owner, VecDeque::from([item]))),
        }
    }

    /// How many items wait: of this owner, and of all.
    pub fn waiting(&self, owner: &Owner) -> (usize, usize) {
        let of = |(other, items): &(Owner, VecDeque<Item>)| if other == owner { items.len() } else { 0 };
        (self.waiting.iter().map(of).sum(), self.waiting.iter().map(|(_, items)| items.len()).sum())
    }

    /// How long an owner has to wait for the next turn.
    fn wait(&self, owner: &Owner, now: Instant) -> Duration {
        let paid_at = self.paid_at.get(owner).filter(|_| self.trusted.as_ref() != Some(owner));
        paid_at.map_or(Duration::ZERO, |at| at.saturating_duration_since(now + self.burst * self.part))
    }

    /// Takes the next item of the owner that is served next.
    pub fn next(&mut self, now: Instant) -> Option<(Owner, Item)> {
        let at = self.waiting.iter().position(|(owner, _)| self.wait(owner, now).is_zero())?;
        let (owner, mut items) = self.waiting.remove(at)?;
        let item = items.pop_front()?;
        if !items.is_empty() {
            self.waiting.push_back((owner.clone(), items));
        }
        Some((owner, item))
    }

    /// An owner's item has taken this long.
    pub fn charge(&mut self, owner: Owner, took: Duration, now: Instant) {
        self.paid_at.retain(|_, at| *at > now);
        *self.paid_at.entry(owner).or_insert(now) += took * self.part;
    }

    /// The time until the next turn. None: nothing waits.
    pub fn due_in(&self, now: Instant) -> Option<Duration> {
        self.waiting.iter().map(|(owner, _)| self.wait(owner, now)).min()
    }
}
