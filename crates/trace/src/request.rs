//! From events to requests: assigns events to requests of a path, with the time at each station.
//!
//! Input: events in time order. Output: [`Request`]s, and [`Counts`] of what could not be assigned.
//!
//! The segments are those of Access'18, IV-D (Fig. 10): **host receive** from the interrupt to the VM entry, **guest**
//! from there to the VM exit that sends, **host send** from there to the NIC. For a container, entry and exit are
//! replaced by: its thread is switched in, and it passes a packet to an interface.
//!
//! A packet is identified by its `sk_buff`. A reply belongs to the oldest open request. So overlapping requests of a
//! path are distinguished only by their order, and packets that are no answers would shift it (except ARP, which is
//! recognised by its ethertype). Such packets are counted where they show.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::event::{Event, EventKind, Name};
use crate::path::{Path, PathRole};

/// Most packets remembered per path and direction.
const REMEMBERED: usize = 1_024;
/// Time after which a request without a reply is given up, ns.
const GIVE_UP: u64 = 1_000_000_000;
/// A resumed polling thread has checked the NIC's ring after this time, ns: packets that it finds later arrived later.
const FIRST_POLL: u64 = 10_000;
/// Ethertype of ARP, which is no request.
const ARP: u16 = 0x0806;

/// The stations of a request in their order; all CLOCK_MONOTONIC, ns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// The path's index in the watch.
    pub path: usize,
    /// The interrupt. If the NIC was already being polled: the reception, or the time when the polling thread was
    /// preempted just before it.
    pub begin: u64,
    /// The stack received it from the NIC.
    pub received: u64,
    /// The CPU of the reception.
    pub receive_cpu: u32,
    /// It was passed to the virtual NIC, or its receiver was woken.
    pub handed: u64,
    /// VM entry, or the container's thread ran.
    pub entered: u64,
    /// VM exit that sends, or the container's thread passed the packet on.
    pub left: u64,
    /// The reply was passed to the NIC's qdisc.
    pub queued: u64,
    /// The driver received it.
    pub driver: u64,
    /// The driver returned.
    pub done: u64,
    /// The CPU of the transmission.
    pub send_cpu: u32,
    /// Whether VM entry and exit were traced. Otherwise the guest ran all the time, and the host's stations replace
    /// them.
    pub exact: bool,
}

/// A segment of the path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Segment {
    /// From the interrupt to the VM entry.
    HostReceive,
    /// From the VM entry to the VM exit that sends.
    Guest,
    /// From that exit to the NIC.
    HostSend,
}

impl Segment {
    /// All, in order.
    pub const ALL: [Segment; 3] = [Segment::HostReceive, Segment::Guest, Segment::HostSend];

    /// The name in the paper.
    pub fn name(self) -> &'static str {
        match self {
            Segment::HostReceive => "host receive",
            Segment::Guest => "guest",
            Segment::HostSend => "host send",
        }
    }
}

impl Request {
    /// From begin to done, ns.
    pub fn total(&self) -> u64 {
        self.done - self.begin
    }

    /// A segment's time, ns.
    pub fn segment(&self, segment: Segment) -> u64 {
        match segment {
            Segment::HostReceive => self.entered - self.begin,
            Segment::Guest => self.left - self.entered,
            Segment::HostSend => self.done - self.left,
        }
    }

    /// The segment that contains a time.
    pub fn at(&self, time: u64) -> Segment {
        match time {
            time if time < self.entered => Segment::HostReceive,
            time if time < self.left => Segment::Guest,
            _ => Segment::HostSend,
        }
    }
}

/// Counters of requests, and of what could not be assigned.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counts {
    /// Requests with all stations.
    pub requests: u64,
    /// Requests whose VM entry or exit was not traced because the guest ran all the time.
    pub inexact: u64,
    /// Requests given up after a second without a reply, or because 1,024 newer ones waited.
    pub unanswered: u64,
    /// Sent packets that belong to no request.
    pub unasked: u64,
    /// Open requests dropped because events were lost.
    pub dropped: u64,
}

#[derive(Debug, Clone, Copy)]
struct Arrival {
    skb: u64,
    begin: u64,
    received: u64,
    cpu: u32,
    pid: i32,
}

/// A NAPI thread that was preempted while runnable: packets that arrive meanwhile stay in the NIC's ring without an
/// interrupt.
#[derive(Debug, Clone, Copy)]
struct PreemptedPoll {
    since: u64,
    /// When it ran again.
    back: Option<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Open {
    arrival: Arrival,
    handed: u64,
    /// Whether the vhost thread has run since: a later VM entry delivers the request.
    told: bool,
    entered: Option<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Reply {
    skb: u64,
    /// The interface where it was first seen: the same buffer seen there again is another packet.
    first: Name,
    /// When the tenant's packet was first seen.
    seen: u64,
    /// VM exits that may have sent it: the last one before the vhost thread ran, and the last one.
    exits: [Option<u64>; 2],
    queued: Option<u64>,
    driver: Option<u64>,
}

/// Assembles one path's requests.
#[derive(Debug, Default)]
pub struct Assembler {
    interrupt: Option<u64>,
    /// NAPI threads of the path.
    preempted_polls: BTreeMap<i32, PreemptedPoll>,
    arrivals: VecDeque<Arrival>,
    open: VecDeque<Open>,
    /// Packets that arrived while a receiver was awake. They are requests if it answers them before it sleeps, else
    /// other traffic.
    perhaps: VecDeque<Open>,
    replies: VecDeque<Reply>,
    /// vhost threads that are running.
    moving: BTreeSet<i32>,
    /// Receivers that are not asleep: a packet for them causes no wake-up.
    awake: BTreeSet<i32>,
    last_exit: Option<u64>,
    exit_before_vhost: Option<u64>,
    counts: Counts,
}

fn push<T>(queue: &mut VecDeque<T>, value: T) {
    if queue.len() == REMEMBERED {
        queue.pop_front();
    }
    queue.push_back(value);
}

impl Assembler {
    /// The counters so far.
    pub fn counts(&self) -> Counts {
        self.counts
    }

    /// Processes an event and returns the request that it completes.
    pub fn step(&mut self, index: usize, path: &Path, event: &Event) -> Option<Request> {
        let now = event.time;
        match event.what {
            EventKind::IrqEntry { irq, .. } if path.irqs.contains(&irq) => {
                self.interrupt.get_or_insert(now);
            }
            // The poll has processed what the interrupt announced.
            EventKind::NapiPoll { dev, .. } if path.nics.contains(&dev) => self.interrupt = None,
            EventKind::Receive { dev, skb, .. } if path.nics.contains(&dev) => self.arrive(path, event, skb),
            EventKind::Receive { dev, skb, .. } if path.vnics.contains(&dev) => self.answer(dev, skb, now),
            EventKind::StartXmit { dev, skb, protocol } if path.vnics.contains(&dev) && protocol != ARP => {
                self.hand_over(path, skb, now)
            }
            EventKind::Waking { pid, .. } => self.waking(path, event, pid),
            EventKind::Switch { prev, preempted, next } => {
                if !preempted && self.awake.remove(&prev.pid) && self.awake.is_empty() {
                    self.perhaps.clear();
                }
                if path.threads.get(&prev.pid) == Some(&PathRole::Napi) {
                    if preempted {
                        self.preempted_polls.insert(prev.pid, PreemptedPoll { since: now, back: None });
                    } else {
                        self.preempted_polls.remove(&prev.pid);
                    }
                }
                if let Some(poll) = self.preempted_polls.get_mut(&next.pid) {
                    poll.back = Some(now);
                }
                self.switch(path, now, prev.pid, next.pid);
            }
            // A thread that took a packet in its own softirq processes it when that ends.
            EventKind::SoftirqExit { .. } if path.threads.get(&event.pid) == Some(&PathRole::App) => self.enter(now),
            EventKind::KvmEntry if path.threads.contains_key(&event.pid) => {
                self.waiting().filter(|open| open.told).for_each(|open| open.entered = Some(now));
            }
            EventKind::KvmExit { .. } if path.threads.contains_key(&event.pid) => self.last_exit = Some(now),
            EventKind::Queue { dev, skb } => self.queue(path, event, dev, skb),
            EventKind::StartXmit { dev, skb, protocol } if path.nics.contains(&dev) => self.driver(skb, now, protocol),
            EventKind::Xmit { dev, skb, rc } if path.nics.contains(&dev) => return self.finish(index, event, skb, rc),
            EventKind::Lost { .. } => self.lost(),
            _ => {}
        }
        None
    }

    /// Since when a packet that is received now may have been in the ring because the polling thread did not run.
    fn unpolled_since(&self, event: &Event) -> Option<u64> {
        let poll = self.preempted_polls.get(&event.pid)?;
        poll.back.filter(|back| event.time.saturating_sub(*back) <= FIRST_POLL).map(|_| poll.since)
    }

    fn arrive(&mut self, path: &Path, event: &Event, skb: u64) {
        let now = event.time;
        let begin = self.interrupt.take().or_else(|| self.unpolled_since(event)).unwrap_or(now);
        let arrival = Arrival { skb, begin, received: now, cpu: event.cpu, pid: event.pid };
        push(&mut self.arrivals, arrival);
        while self.open.front().is_some_and(|open| open.arrival.received + GIVE_UP < now) {
            self.open.pop_front();
            self.counts.unanswered += 1;
        }
        // The buffer of a packet that no receiver took is reused.
        self.perhaps.retain(|open| open.arrival.skb != skb);
        if !path.seen_at_vnic && !self.awake.is_empty() {
            push(&mut self.perhaps, Open { arrival, handed: now, told: !self.moving.is_empty(), entered: None });
        }
        // A NIC without a known tenant: every packet counts as a request.
        if !path.seen_at_vnic && !path.has(PathRole::App) && !path.has(PathRole::Vhost) {
            self.ask(Open { arrival, handed: now, told: true, entered: Some(now) });
        }
    }

    /// Adds a request that waits for its reply. If too many wait, the oldest is given up early.
    fn ask(&mut self, open: Open) {
        self.counts.unanswered += u64::from(self.open.len() == REMEMBERED);
        push(&mut self.open, open);
    }

    fn hand_over(&mut self, path: &Path, skb: u64, now: u64) {
        let Some(at) = self.arrivals.iter().rposition(|arrival| arrival.skb == skb) else { return };
        // Earlier packets that were not for this tenant are not needed any more.
        let Some(arrival) = self.arrivals.drain(..=at).next_back() else { return };
        // If the vhost thread's switches are not traced, the next entry delivers it.
        let told = path.segments_only || !self.moving.is_empty();
        self.ask(Open { arrival, handed: now, told, entered: None });
    }

    /// For packets that cannot be traced at the virtual NIC: the context that received the packet wakes the tenant.
    fn waking(&mut self, path: &Path, event: &Event, pid: i32) {
        if path.seen_at_vnic || !path.receives(pid) {
            return;
        }
        self.awake.insert(pid);
        let here = |arrival: &&Arrival| arrival.cpu == event.cpu && arrival.pid == event.pid;
        let Some(arrival) = self.arrivals.back().filter(here).copied() else { return };
        self.arrivals.clear();
        self.perhaps.retain(|open| open.arrival.skb != arrival.skb);
        self.ask(Open { arrival, handed: event.time, told: false, entered: None });
    }

    /// Requests and possible requests that wait for their receiver.
    fn waiting(&mut self) -> impl Iterator<Item = &mut Open> {
        self.open.iter_mut().chain(&mut self.perhaps).filter(|open| open.entered.is_none())
    }

    fn switch(&mut self, path: &Path, now: u64, prev: i32, next: i32) {
        self.moving.remove(&prev);
        match path.threads.get(&next) {
            Some(PathRole::Vhost) => {
                self.moving.insert(next);
                self.exit_before_vhost = self.last_exit;
                self.waiting().for_each(|open| open.told = true);
            }
            Some(PathRole::App) => self.enter(now),
            _ => return,
        }
        self.awake.insert(next);
    }

    /// A container's thread runs.
    fn enter(&mut self, now: u64) {
        self.waiting().for_each(|open| open.entered = Some(now));
    }

    /// The tenant's packet is seen on the host.
    fn answer(&mut self, dev: Name, skb: u64, now: u64) {
        if let Some(at) = self.replies.iter().position(|reply| reply.skb == skb) {
            // The packet is further on its way. If seen again at the same interface, the earlier packet never left and
            // its buffer was reused.
            if self.replies.get(at).is_some_and(|reply| reply.first != dev) {
                return;
            }
            self.replies.remove(at);
        }
        let exits = [self.exit_before_vhost, self.last_exit];
        push(&mut self.replies, Reply { skb, first: dev, seen: now, exits, queued: None, driver: None });
    }

    fn queue(&mut self, path: &Path, event: &Event, dev: Name, skb: u64) {
        let at_nic = path.nics.contains(&dev);
        let by_tenant = path.threads.get(&event.pid) == Some(&PathRole::App);
        let bare = !path.seen_at_vnic && !path.has(PathRole::App) && !path.has(PathRole::Vhost);
        // macvtap and macvlan pass the packet to the lower device from the vhost thread or the container's own thread.
        let direct = !path.seen_at_vnic && path.threads.get(&event.pid) == Some(&PathRole::Vhost);
        if by_tenant || (at_nic && (bare || direct)) {
            self.answer(dev, skb, event.time);
        }
        if let Some(reply) = self.replies.iter_mut().rev().find(|reply| at_nic && reply.skb == skb) {
            reply.queued.get_or_insert(event.time);
        }
    }

    fn driver(&mut self, skb: u64, now: u64, protocol: u16) {
        if protocol == ARP {
            self.replies.retain(|reply| reply.skb != skb);
        } else if let Some(reply) = self.replies.iter_mut().rev().find(|reply| reply.skb == skb) {
            reply.driver.get_or_insert(now);
        }
    }

    fn finish(&mut self, index: usize, event: &Event, skb: u64, rc: i32) -> Option<Request> {
        let at = self.replies.iter().rposition(|reply| reply.skb == skb && reply.driver.is_some())?;
        if rc != 0 {
            // The driver was busy; the packet is sent again.
            return None;
        }
        let reply = self.replies.remove(at)?;
        let asked = |open: &&Open| open.handed <= reply.seen;
        let sure = self.open.front().is_some_and(|open| asked(&open));
        let known = if sure { &mut self.open } else { &mut self.perhaps };
        let Some(open) = known.front().filter(asked).copied() else {
            self.counts.unasked += 1;
            return None;
        };
        known.pop_front();
        let request = request(index, event, &open, &reply);
        self.counts.requests += 1;
        self.counts.inexact += u64::from(!request.exact);
        Some(request)
    }

    fn lost(&mut self) {
        self.counts.dropped += self.open.len() as u64;
        *self = Self { counts: self.counts, ..Self::default() };
    }
}

fn request(path: usize, event: &Event, open: &Open, reply: &Reply) -> Request {
    let seen = reply.seen.max(open.handed);
    let entered = open.entered.filter(|entered| *entered <= seen);
    let start = entered.unwrap_or(open.handed);
    let exit = reply.exits.into_iter().flatten().find(|exit| (start..=seen).contains(exit));
    let left = exit.unwrap_or(seen);
    let driver = reply.driver.unwrap_or(event.time).clamp(left, event.time);
    Request {
        path,
        begin: open.arrival.begin,
        received: open.arrival.received,
        receive_cpu: open.arrival.cpu,
        handed: open.handed,
        entered: start,
        left,
        queued: reply.queued.unwrap_or(driver).clamp(left, driver),
        driver,
        done: event.time,
        send_cpu: event.cpu,
        exact: entered.is_some(),
    }
}
