//! What delayed the threads of a measuring program: cyclictest and timerlat, whose threads a timer wakes, and oslat,
//! whose threads poll.
//!
//! Input: events of [`Watch::of_program`], in time order. Output: the longest [`Delay`]s with their [`Cause`]s and
//! cures, and a sum of the others beyond a limit.
//!
//! A wake-up's delay has three parts: until the timer's interrupt, until the thread runs, and interruptions after that
//! until the thread sleeps again. The last part may follow the program's reading of the clock.

use std::collections::{BTreeSet, HashMap, HashSet};

use ontime_figures::number;
use ontime_tenants::{Class, Level};

use crate::event::{Event, EventKind, Name, Task};
use crate::format::Vector;
use crate::inversion::{Cure, Inversion, Judge, Kind, Waiter, doing, same_work};
use crate::path::{Path, PathRole, Watch};
use crate::request::Segment;
use crate::timeline::{CpuContext, Slice, Timeline};
use crate::waits::Waits;

/// Most timers that are remembered; more than threads and CPUs have.
const TIMERS: usize = 16_384;
/// Causes shorter than this share of their delay are left out.
const SHARE: u64 = 20;
/// Most polling threads that are remembered; any process may have their name.
const POLLING: usize = 4_096;

/// What a thread may need to read the clock and sleep again, ns; more is an interruption that no probe shows.
const OWN: u64 = 20_000;

/// The cure of what no probe shows.
pub const UNSEEN: &str = "an interrupt without a probe, firmware, or a hypervisor below this host: a CPU of its own \
    (exclusive-cpu); rtla hwnoise finds the latter two";
const TICK: &str = "the CPU's own timer: the tick, which stops where nohz_full= names the CPU and one thread alone \
    runs there, or a timer that a thread of this CPU has set";
const CALL: &str = "a call by another CPU (a wake-up, a change of page tables or of kernel code): a CPU of its own \
    (exclusive-cpu); trace-cmd -e ipi shows who calls";
const IDLE: &str = "the CPU was idle: an idle state that takes long to leave (cpupower idle-set -D 10, or \
    /dev/cpu_dma_latency; ontime doctor, idle-states), or a hypervisor below this host that let another run";
const MASKED: &str = "interrupts were off on that CPU, or its time was taken by firmware or a hypervisor below this \
    host: a PREEMPT_RT kernel, or a CPU of its own (exclusive-cpu)";

/// How a thread was delayed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The interrupt of its timer was late.
    Timer,
    /// It was runnable and did not run.
    Waited,
    /// It ran, and was interrupted or preempted.
    Interrupted,
    /// It ran for longer than its own work takes, and no probe shows why.
    Unseen,
}

/// What a CPU did instead of running the thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cause {
    /// How the thread was delayed.
    pub part: Part,
    /// The thread that had the CPU; 0 is the idle thread.
    pub blocker: Task,
    /// What the CPU did for it.
    pub place: CpuContext,
    /// For how long, ns.
    pub ns: u64,
    /// The CPU. A timer's interrupt may come on another one than the thread's.
    pub cpu: u32,
    /// What to do about it.
    pub cure: Cure,
}

impl Cause {
    /// As one line.
    pub fn text(&self) -> String {
        let us = number::us(self.ns as f64 / 1e3);
        let idle = self.blocker.pid == 0 && self.place == CpuContext::Thread;
        let other = if idle { "the idle CPU".to_owned() } else { doing(&self.blocker, &self.place) };
        match self.part {
            Part::Timer => format!("its timer's interrupt on CPU {} came {us} us late, during {other}", self.cpu),
            Part::Waited => format!("waited {us} us for {other}"),
            Part::Interrupted => format!("was interrupted for {us} us by {other}"),
            Part::Unseen => format!("was interrupted for {us} us by what no probe shows"),
        }
    }
}

/// A delay of a thread.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delay {
    /// The thread.
    pub task: Task,
    /// Its CPU.
    pub cpu: u32,
    /// When it should have run, CLOCK_MONOTONIC, ns.
    pub due: u64,
    /// When it ran, ns.
    pub ran: u64,
    /// How long it was interrupted after that, ns.
    pub interrupted: u64,
    /// Its causes, longest first.
    pub causes: Vec<Cause>,
    /// Steal time or SMIs at that time.
    pub hint: Option<String>,
}

impl Delay {
    /// Until it ran, ns.
    pub fn late(&self) -> u64 {
        self.ran.saturating_sub(self.due)
    }

    /// With the interruptions after it ran, ns.
    pub fn ns(&self) -> u64 {
        self.late().saturating_add(self.interrupted)
    }
}

/// Delays beyond the limit that were too many to be kept.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Others {
    /// How many.
    pub delays: u64,
    /// The CPUs of their threads.
    pub cpus: BTreeSet<u32>,
    /// Their causes, by cure.
    pub by_cure: Vec<OfCure>,
}

/// The causes that have one cure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OfCure {
    /// How many delays had such a cause.
    pub delays: u64,
    /// Their sum, ns.
    pub ns: u64,
    /// The longest.
    pub longest: Cause,
}

impl Others {
    /// `causes`: those of one delay of a thread on `cpu`, each with its cure.
    fn add<'a>(&mut self, cpu: u32, causes: impl Iterator<Item = &'a Cause>) {
        self.delays += 1;
        self.cpus.insert(cpu);
        let mut counted = HashSet::new();
        for cause in causes {
            let is_first = counted.insert(cause.cure);
            match self.by_cure.iter_mut().find(|of| of.longest.cure == cause.cure) {
                Some(of) => {
                    of.delays += u64::from(is_first);
                    of.ns += cause.ns;
                    if cause.ns > of.longest.ns {
                        of.longest = *cause;
                    }
                }
                // There are as many as texts of cures.
                None => self.by_cure.push(OfCure { delays: 1, ns: cause.ns, longest: *cause }),
            }
        }
    }
}

/// A timer that was started.
#[derive(Debug, Clone, Copy)]
struct Timer {
    /// The thread that started it.
    owner: i32,
    due: u64,
    /// The CPU on which it was started.
    cpu: u32,
}

/// A wake-up in progress.
#[derive(Debug, Clone, Copy)]
struct WakeUp {
    due: u64,
    woken: u64,
    /// The CPU on which the timer was started, where the thread was then.
    start_cpu: u32,
    /// The CPU of the timer's interrupt.
    timer_cpu: u32,
    /// CPU and time at which the thread ran.
    ran: Option<(u32, u64, Task)>,
}

impl WakeUp {
    /// Whether events of this CPU tell of it.
    fn is_of(&self, cpu: u32) -> bool {
        self.start_cpu == cpu || self.timer_cpu == cpu || self.ran.is_some_and(|(ran, ..)| ran == cpu)
    }
}

/// Finds the longest delays in a stream of events.
#[derive(Debug)]
pub struct Delays {
    watch: Watch,
    polls: bool,
    keep: usize,
    limit: Option<u64>,
    timeline: Timeline,
    /// Timers by address.
    timers: HashMap<u64, Timer>,
    /// The timer whose interrupt a CPU handles.
    firing: HashMap<u32, u64>,
    wakeups: HashMap<i32, WakeUp>,
    /// Polling threads by CPU, and since when they do not run.
    polling: HashMap<u32, (Task, Option<u64>)>,
    /// The polling threads, by number.
    known: HashMap<i32, Task>,
    worst: Vec<Delay>,
    others: Others,
    lost: u64,
    /// The CPUs that have lost events.
    lossy: BTreeSet<u32>,
}

impl Delays {
    /// Keeps the `keep` longest delays, and sums up all others beyond `limit`, ns. The program's threads poll, or
    /// timers wake them.
    pub fn new(watch: Watch, polls: bool, keep: usize, limit: Option<u64>) -> Self {
        Self {
            watch,
            polls,
            keep,
            limit,
            timeline: Timeline::default(),
            timers: HashMap::new(),
            firing: HashMap::new(),
            wakeups: HashMap::new(),
            polling: HashMap::new(),
            known: HashMap::new(),
            worst: Vec::new(),
            others: Others::default(),
            lost: 0,
            lossy: BTreeSet::new(),
        }
    }

    /// The longest delays, longest first.
    pub fn worst(&self) -> &[Delay] {
        &self.worst
    }

    /// The other delays beyond the limit: of a wake-up's, only what came before the thread ran counts.
    pub fn others(&self) -> &Others {
        &self.others
    }

    /// Lower bound of lost events.
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// The CPUs that have lost events.
    pub fn lossy(&self) -> &BTreeSet<u32> {
        &self.lossy
    }

    /// Adds a hint about the cause to the delays in this time, ns.
    pub fn hint(&mut self, from: u64, to: u64, words: &str) {
        let inside = |delay: &&mut Delay| delay.ran >= from && delay.due <= to;
        self.worst.iter_mut().filter(inside).for_each(|delay| delay.hint = Some(words.to_owned()));
    }

    /// Processes an event.
    pub fn step(&mut self, event: &Event) {
        self.find_again(event);
        self.timeline.step(event);
        match event.what {
            EventKind::Lost { count } => {
                self.lost += count;
                self.lossy.insert(event.cpu);
                self.wakeups.retain(|_, wakeup| !wakeup.is_of(event.cpu));
                self.timers.retain(|_, timer| timer.cpu != event.cpu);
                self.firing.remove(&event.cpu);
                self.polling.remove(&event.cpu);
            }
            _ if self.polls => self.poll(event),
            EventKind::TimerStart { timer, expires } => {
                // Any process may have this name, and start timers that never wake it.
                if self.timers.len() >= TIMERS && !self.timers.contains_key(&timer) {
                    self.timers.clear();
                }
                self.timers.insert(timer, Timer { owner: event.pid, due: expires, cpu: event.cpu });
            }
            EventKind::TimerExpire { timer } => {
                self.firing.insert(event.cpu, timer);
            }
            EventKind::Waking { pid, .. } => {
                // An interrupt in the thread may have started another timer, which does not wake the thread.
                let Some(timer) = self.firing.get(&event.cpu) else { return };
                if self.timers.get(timer).is_none_or(|timer| timer.owner != pid) {
                    return;
                }
                if let Some(Timer { due, cpu: start_cpu, .. }) = self.timers.remove(timer) {
                    self.sleeps(pid, event.time);
                    let (woken, timer_cpu) = (event.time, event.cpu);
                    self.wakeups.insert(pid, WakeUp { due: due.min(woken), woken, start_cpu, timer_cpu, ran: None });
                }
            }
            EventKind::Switch { prev, preempted, next } => {
                if !preempted {
                    self.sleeps(prev.pid, event.time);
                }
                if let Some(wakeup) = self.wakeups.get_mut(&next.pid).filter(|wakeup| wakeup.ran.is_none()) {
                    wakeup.ran = Some((event.cpu, event.time, next));
                }
            }
            _ => {}
        }
    }

    /// After a loss, a CPU on which only a polling thread runs may never switch again: the thread's events show it.
    fn find_again(&mut self, event: &Event) {
        let is_switch = matches!(event.what, EventKind::Switch { .. } | EventKind::Lost { .. });
        let Some(task) = self.known.get(&event.pid).filter(|_| !is_switch) else { return };
        if self.timeline.context(event.cpu).is_none() {
            self.timeline.runs(event.cpu, *task, event.time);
            self.polling.retain(|_, (known, _)| known.pid != task.pid);
            self.polling.insert(event.cpu, (*task, None));
        }
    }

    /// A thread sleeps from `end` on: its last wake-up is over.
    fn sleeps(&mut self, pid: i32, end: u64) {
        let Some(wakeup) = self.wakeups.remove(&pid) else { return };
        // The program's main thread, which only waits for the others, has no real-time priority.
        let Some((cpu, ran, task)) = wakeup.ran.filter(|(_, _, task)| task.is_rt()) else { return };
        let own = |slice: &Slice| slice.task.pid == task.pid && slice.place == CpuContext::Thread;
        let WakeUp { due, woken, timer_cpu, .. } = wakeup;
        let parts =
            [(Part::Timer, timer_cpu, due, woken), (Part::Waited, cpu, woken, ran), (Part::Interrupted, cpu, ran, end)];
        let mut causes = Vec::new();
        for (part, cpu, from, to) in parts {
            // The interrupt that wakes the thread is no cause, but what delays it.
            let wakes = |slice: &Slice| matches!(slice.place, CpuContext::Irq { name, .. } if name == local_timer());
            let is_cause = |slice: &Slice| !own(slice) && (part == Part::Interrupted || !wakes(slice));
            self.timeline.slices(cpu, from, to).filter(is_cause).for_each(|slice| add(&mut causes, part, cpu, &slice));
        }
        let seen: u64 = causes.iter().filter(|cause| cause.part == Part::Interrupted).map(|cause| cause.ns).sum();
        let unseen = end.saturating_sub(ran).saturating_sub(seen).saturating_sub(OWN);
        if unseen > 0 {
            let (part, place, cure) = (Part::Unseen, CpuContext::Thread, Cure::other(UNSEEN));
            causes.push(Cause { part, blocker: task, place, ns: unseen, cpu, cure });
        }
        let interrupted = seen + unseen;
        self.keep(Delay { task, cpu, due, ran, interrupted, causes, hint: None });
    }

    /// An event on the CPU of a polling thread.
    fn poll(&mut self, event: &Event) {
        let Some((task, place)) = self.timeline.context(event.cpu) else { return };
        let own = task.is_rt() && place == CpuContext::Thread && self.is_of_program(&task);
        if let EventKind::Switch { prev, preempted, .. } = event.what {
            // Before and after its measurement a thread sleeps and moves.
            self.polling.retain(|cpu, (known, _)| match known.pid {
                pid if pid == prev.pid => preempted,
                pid => pid != task.pid || *cpu == event.cpu,
            });
        }
        match self.polling.get_mut(&event.cpu) {
            None if own => {
                self.polling.insert(event.cpu, (task, None));
                if self.known.len() < POLLING {
                    self.known.insert(task.pid, task);
                }
            }
            Some((known, since)) if own && known.pid == task.pid => {
                if let Some(due) = since.take() {
                    let (cpu, ran, mut causes) = (event.cpu, event.time, Vec::new());
                    let slices = self.timeline.slices(cpu, due, ran);
                    slices.for_each(|slice| add(&mut causes, Part::Interrupted, cpu, &slice));
                    self.keep(Delay { task, cpu, due, ran, interrupted: 0, causes, hint: None });
                }
            }
            Some((_, since)) if !own => drop(since.get_or_insert(event.time)),
            _ => {}
        }
    }

    fn is_of_program(&self, task: &Task) -> bool {
        let Some(program) = &self.watch.program else { return false };
        match program.strip_suffix('*') {
            Some(start) => task.comm.starts_with(start),
            None => task.comm.bytes() == program.as_bytes(),
        }
    }

    fn keep(&mut self, mut delay: Delay) {
        let place = self.worst.partition_point(|worse| worse.ns() >= delay.ns());
        let is_late = |delay: &Delay| self.limit.is_some_and(|limit| delay.late() > limit);
        if place >= self.keep && !is_late(&delay) {
            return;
        }
        let least = delay.ns() / SHARE;
        delay.causes.retain(|cause| cause.ns >= least);
        delay.causes.sort_by_key(|cause| std::cmp::Reverse(cause.ns));
        let (task, due) = (delay.task, delay.due);
        delay.causes.iter_mut().for_each(|cause| cause.cure = self.cure(task, due, cause));
        self.worst.insert(place, delay);
        if self.worst.len() <= self.keep {
            return;
        }
        let Some(shortest) = self.worst.pop().filter(is_late) else { return };
        // A program that a timer wakes reads the clock before it is interrupted.
        let counts = |cause: &&Cause| self.polls || matches!(cause.part, Part::Timer | Part::Waited);
        self.others.add(shortest.cpu, shortest.causes.iter().filter(counts));
    }

    /// As for a request whose thread waits.
    fn cure(&self, task: Task, start: u64, cause: &Cause) -> Cure {
        if let CpuContext::Irq { name, .. } = cause.place {
            match Vector::ALL.into_iter().find(|vector| name == Name::from(vector.name())) {
                Some(Vector::LocalTimer) => return Cure::other(TICK),
                Some(_) => return Cure::other(CALL),
                None => {}
            }
        }
        if cause.place == CpuContext::Thread {
            match cause.part {
                Part::Unseen => return cause.cure,
                _ if cause.blocker.pid == 0 => return Cure::other(IDLE),
                Part::Timer => return Cure::other(MASKED),
                _ => {}
            }
        }
        let path = Path {
            tenant: String::new(),
            class: Class::Rt(Level::HIGHEST),
            nics: [].into(),
            vnics: [].into(),
            seen_at_vnic: false,
            threads: [(task.pid, PathRole::App)].into(),
            irqs: [].into(),
            segments_only: false,
        };
        let inversion = Inversion {
            kind: Kind::Waited,
            segment: Segment::HostReceive,
            start,
            ns: cause.ns,
            cpu: cause.cpu,
            waiter: Some(Waiter { role: PathRole::App, task }),
            blocker: cause.blocker,
            place: cause.place,
            cure: Cure::other(""),
        };
        let judge = Judge { watch: &self.watch, timeline: &self.timeline, waits: &Waits::default(), floor: 0 };
        judge.cure(&path, &inversion)
    }
}

fn local_timer() -> Name {
    Name::from(Vector::LocalTimer.name())
}

/// Adds a slice. Slices of the same thread with the same work become one cause.
fn add(causes: &mut Vec<Cause>, part: Part, cpu: u32, slice: &Slice) {
    let (blocker, place, ns) = (slice.task, slice.place, slice.end - slice.start);
    let same =
        |cause: &&mut Cause| cause.part == part && cause.blocker.pid == blocker.pid && same_work(cause.place, place);
    match causes.iter_mut().find(same) {
        Some(cause) => {
            cause.ns += ns;
            // A poll is more specific than the softirq around it.
            if matches!(place, CpuContext::Napi(_)) {
                cause.place = place;
            }
        }
        None => causes.push(Cause { part, blocker, place, ns, cpu, cure: Cure::other("") }),
    }
}

#[cfg(test)]
mod tests {
    use ontime_hostnet::RuleId;
    use proptest::prelude::*;

    use super::*;
    use crate::event::NET_RX;

    const TIMER: u64 = 0xffff_0000;
    const TICK_TIMER: u64 = 0xffff_1000;

    fn task(pid: i32) -> Task {
        let (comm, prio) = match pid {
            0 => ("swapper/0", 120),
            7 => ("cyclictest", 4),
            8 => ("cyclictest", 120),
            9 => ("oslat", 98),
            20 => ("migration/0", -1),
            _ => ("make", 120),
        };
        Task { pid, prio, comm: comm.into() }
    }

    /// Analyses events on CPU 0: time in us, current thread, event.
    fn analysed(program: &str, polls: bool, events: &[(u64, i32, EventKind)]) -> Delays {
        let watch = Watch { program: Some(program.to_owned()), cpus: vec![0], ..Watch::default() };
        let mut delays = Delays::new(watch, polls, 100, None);
        for (us, pid, what) in events {
            delays.step(&Event { time: us * 1_000, cpu: 0, pid: *pid, what: *what });
        }
        delays
    }

    fn switch(prev: i32, preempted: bool, next: i32) -> EventKind {
        EventKind::Switch { prev: task(prev), preempted, next: task(next) }
    }

    fn start(timer: u64, due_us: u64) -> EventKind {
        EventKind::TimerStart { timer, expires: due_us * 1_000 }
    }

    fn waking(pid: i32) -> EventKind {
        EventKind::Waking { pid, prio: task(pid).prio }
    }

    const EXPIRE: EventKind = EventKind::TimerExpire { timer: TIMER };

    fn said(delay: &Delay) -> Vec<String> {
        delay.causes.iter().map(Cause::text).collect()
    }

    #[test]
    fn each_part_of_a_wake_ups_delay_has_its_cause_and_cure() {
        let irq = EventKind::IrqEntry { irq: 30, name: "eth0".into() };
        let delays = analysed(
            "cyclictest",
            false,
            &[
                (0, 0, switch(0, true, 7)),
                (1, 7, start(TIMER, 1_000)),
                // The tick's timer, started by an interrupt in the thread.
                (2, 7, start(TICK_TIMER, 1_001)),
                (3, 7, switch(7, false, 30)),
                // Interrupts are off until 1,030; then a softirq and a thread with a higher priority.
                (1_030, 30, EventKind::TimerExpire { timer: TICK_TIMER }),
                (1_031, 30, EXPIRE),
                (1_031, 30, waking(7)),
                (1_032, 30, EventKind::SoftirqEntry { vec: NET_RX }),
                (1_092, 30, EventKind::SoftirqExit { vec: NET_RX }),
                (1_092, 30, switch(30, true, 20)),
                (1_112, 20, switch(20, false, 7)),
                (1_113, 7, irq),
                (1_153, 7, EventKind::IrqExit { irq: 30 }),
                (1_155, 7, start(TIMER, 2_000)),
                (1_156, 7, switch(7, false, 0)),
            ],
        );
        let [delay] = delays.worst() else { panic!("{delays:?}") };
        assert_eq!((delay.task.pid, delay.cpu, delay.due, delay.ran), (7, 0, 1_000_000, 1_112_000));
        assert_eq!((delay.interrupted, delay.ns()), (40_000, 152_000));
        assert_eq!(
            said(delay),
            [
                "waited 60.0 us for make (30, OTHER) in softirq NET_RX",
                "was interrupted for 40.0 us by cyclictest (7, FIFO 95) in interrupt 30 (eth0)",
                "its timer's interrupt on CPU 0 came 31.0 us late, during make (30, OTHER) in its own code",
                "waited 20.0 us for migration/0 (20, DEADLINE) in its own code",
            ]
        );
        let rules: Vec<_> = delay.causes.iter().map(|cause| cause.cure.rule).collect();
        assert_eq!(rules, [Some(RuleId::NapiThreaded), Some(RuleId::ExclusiveCpu), None, None]);
        let cures: Vec<&str> = delay.causes.iter().skip(2).map(|cause| cause.cure.text()).collect();
        assert!(
            cures[0].starts_with("interrupts were off") && cures[1].contains("outside Ontime's table"),
            "{cures:?}"
        );
    }

    #[test]
    fn an_idle_cpu_is_a_cause_and_a_thread_without_priority_is_none() {
        let delays = analysed(
            "cyclictest",
            false,
            &[
                (0, 7, start(TIMER, 1_000)),
                (1, 7, switch(7, false, 0)),
                (1_090, 0, EXPIRE),
                (1_090, 0, waking(7)),
                (1_092, 0, switch(0, true, 7)),
                (1_095, 7, start(TIMER, 2_000)),
                (1_096, 7, switch(7, false, 8)),
                (1_097, 8, start(TICK_TIMER, 1_100)),
                (1_098, 8, switch(8, false, 0)),
                (1_500, 0, EventKind::TimerExpire { timer: TICK_TIMER }),
                (1_500, 0, waking(8)),
                (1_900, 0, switch(0, true, 8)),
                (1_901, 8, switch(8, false, 0)),
            ],
        );
        let [delay] = delays.worst() else { panic!("{delays:?}") };
        assert_eq!(said(delay), ["its timer's interrupt on CPU 0 came 90.0 us late, during the idle CPU"]);
        assert!(delay.causes[0].cure.text().contains("cpupower idle-set"));
    }

    #[test]
    fn a_polling_threads_interruptions_are_found() {
        let delays = analysed(
            "oslat",
            true,
            &[
                (0, 0, switch(0, true, 9)),
                (100, 9, switch(9, true, 20)),
                (130, 20, EventKind::SoftirqEntry { vec: 1 }),
                (131, 20, EventKind::SoftirqExit { vec: 1 }),
                (140, 20, switch(20, false, 9)),
                (200, 9, EventKind::IrqEntry { irq: 30, name: "eth0".into() }),
                (205, 9, EventKind::IrqExit { irq: 30 }),
                // It has ended: what runs then does not interrupt it.
                (300, 9, switch(9, false, 20)),
                (900, 20, switch(20, true, 0)),
            ],
        );
        let found: Vec<_> = delays.worst().iter().map(|delay| (delay.due, delay.ns(), said(delay))).collect();
        let [first, second] =
            ["migration/0 (20, DEADLINE) in its own code", "oslat (9, FIFO 1) in interrupt 30 (eth0)"]
                .map(|by| by.to_owned());
        let line = |us: f64, by: String| vec![format!("was interrupted for {us:.1} us by {by}")];
        assert_eq!(found, [(100_000, 40_000, line(39.0, first)), (200_000, 5_000, line(5.0, second))]);
    }

    #[test]
    fn a_polling_thread_that_slept_elsewhere_was_not_interrupted() {
        let mut delays = analysed("oslat", true, &[(0, 0, switch(0, true, 9)), (10, 9, switch(9, true, 0))]);
        for (us, cpu, pid, what) in [
            (20, 1, 0, switch(0, true, 9)),
            (30, 1, 9, switch(9, false, 0)),
            (1_000_030, 0, 0, switch(0, true, 9)),
            (1_000_040, 0, 9, switch(9, true, 20)),
            (1_000_050, 0, 20, switch(20, true, 9)),
        ] {
            delays.step(&Event { time: us * 1_000, cpu, pid, what });
        }
        assert_eq!(delays.worst().iter().map(Delay::ns).collect::<Vec<_>>(), [10_000]);
    }

    #[test]
    fn what_no_probe_shows_is_told() {
        let delays = analysed(
            "cyclictest",
            false,
            &[
                (0, 7, start(TIMER, 1_000)),
                (1, 7, switch(7, false, 0)),
                (1_001, 0, EXPIRE),
                (1_001, 0, waking(7)),
                (1_002, 0, switch(0, true, 7)),
                (1_322, 7, switch(7, false, 0)),
            ],
        );
        let [delay] = delays.worst() else { panic!("{delays:?}") };
        assert_eq!(
            (delay.interrupted, said(delay)),
            (300_000, vec!["was interrupted for 300 us by what no probe shows".to_owned()])
        );
        assert!(delay.causes[0].cure.text().contains("rtla hwnoise"));
    }

    #[test]
    fn after_a_loss_no_wake_up_is_judged_until_the_next() {
        let lost = EventKind::Lost { count: 3 };
        let delays = analysed(
            "cyclictest",
            false,
            &[
                (1, 7, start(TIMER, 1_000)),
                (2, 7, switch(7, false, 0)),
                (900, 0, lost),
                (1_500, 0, EXPIRE),
                (1_500, 0, waking(7)),
                (1_501, 0, switch(0, true, 7)),
                (1_502, 7, switch(7, false, 0)),
            ],
        );
        assert_eq!((delays.lost(), delays.worst().len()), (3, 0));
    }

    #[test]
    fn what_another_cpu_loses_costs_no_delay_of_this_one() {
        let found = |lossy: u32, at: u64| {
            let watch = Watch { program: Some("cyclictest".to_owned()), ..Watch::default() };
            let mut delays = Delays::new(watch, false, 100, None);
            for (us, pid, what) in [
                (1, 7, start(TIMER, 1_000)),
                (2, 7, switch(7, false, 0)),
                (1_499, 0, EXPIRE),
                (1_500, 0, waking(7)),
                (1_501, 0, switch(0, true, 7)),
                (1_510, 7, switch(7, false, 0)),
            ] {
                delays.step(&Event { time: us * 1_000, cpu: 0, pid, what });
                if us == at {
                    let what = EventKind::Lost { count: 3 };
                    delays.step(&Event { time: us * 1_000, cpu: lossy, pid: 0, what });
                }
            }
            assert_eq!((delays.lost(), delays.lossy()), (3, &BTreeSet::from([lossy])));
            delays.worst().iter().map(Delay::late).collect::<Vec<_>>()
        };
        for at in [1, 2, 1_500, 1_501] {
            assert_eq!(found(3, at), [501_000], "after {at} us");
            assert_eq!(found(0, at), [0; 0], "after {at} us");
        }
    }

    #[test]
    fn the_longest_are_kept_and_hints_go_to_those_of_their_time() {
        let watch = Watch { program: Some("cyclictest".to_owned()), ..Watch::default() };
        let mut delays = Delays::new(watch, false, 2, Some(25_000));
        for (number, late) in [30, 50, 10, 40, 29, 25].into_iter().enumerate() {
            let due = 1_000 * (number as u64 + 1);
            let events = [
                (due - 900, 7, start(TIMER, due)),
                (due - 899, 7, switch(7, false, 0)),
                (due + late, 0, EXPIRE),
                (due + late, 0, waking(7)),
                (due + late, 0, switch(0, true, 7)),
                (due + late + 1, 7, switch(7, false, 0)),
            ];
            let event = |(us, pid, what)| Event { time: us * 1_000, cpu: 0, pid, what };
            events.into_iter().for_each(|one| delays.step(&event(one)));
        }
        delays.hint(2_000_000, 2_100_000, "2 SMIs");
        let found: Vec<_> = delays.worst().iter().map(|delay| (delay.ns(), delay.hint.is_some())).collect();
        assert_eq!(found, [(50_000, true), (40_000, false)]);
        // Those of 30 and 29 us are beyond the limit, too.
        let Others { delays: others, cpus, by_cure } = delays.others();
        let [of] = by_cure.as_slice() else { panic!("{by_cure:?}") };
        assert_eq!(*cpus, BTreeSet::from([0]));
        assert_eq!((*others, of.delays, of.ns, of.longest.ns), (2, 2, 59_000, 30_000));
        assert!(of.longest.cure.text().contains("cpupower idle-set"));
    }

    #[test]
    fn a_timer_on_another_cpu_is_late_by_what_that_cpu_did() {
        let mut delays = analysed("cyclictest", false, &[(0, 7, start(TIMER, 1_000)), (1, 7, switch(7, false, 0))]);
        for (us, cpu, pid, what) in [
            (2, 1, 0, switch(0, true, 30)),
            (1_070, 1, 30, EventKind::IrqEntry { irq: 236, name: Vector::LocalTimer.name().into() }),
            (1_070, 1, 30, EXPIRE),
            (1_070, 1, 30, waking(7)),
            (1_071, 0, 0, switch(0, true, 7)),
            (1_072, 0, 7, switch(7, false, 0)),
        ] {
            delays.step(&Event { time: us * 1_000, cpu, pid, what });
        }
        let [delay] = delays.worst() else { panic!("{delays:?}") };
        let late = "its timer's interrupt on CPU 1 came 70.0 us late, during make (30, OTHER) in its own code";
        assert_eq!((delay.cpu, said(delay)), (0, vec![late.to_owned()]));
    }

    #[test]
    fn the_interrupt_that_wakes_a_thread_does_not_delay_it() {
        let delays = analysed(
            "cyclictest",
            false,
            &[
                (0, 7, start(TIMER, 1_000)),
                (1, 7, switch(7, false, 30)),
                (1_010, 30, EventKind::IrqEntry { irq: 236, name: Vector::LocalTimer.name().into() }),
                (1_013, 30, EXPIRE),
                (1_013, 30, waking(7)),
                (1_018, 30, EventKind::IrqExit { irq: 236 }),
                (1_025, 30, switch(30, true, 7)),
                (1_026, 7, switch(7, false, 0)),
            ],
        );
        let late = "its timer's interrupt on CPU 0 came 10.0 us late, during make (30, OTHER) in its own code";
        assert_eq!(said(&delays.worst()[0]), [late, "waited 7.0 us for make (30, OTHER) in its own code"]);
    }

    #[test]
    fn after_a_loss_a_polling_thread_is_found_by_its_next_event() {
        let tick = EventKind::IrqEntry { irq: 236, name: Vector::LocalTimer.name().into() };
        let call = EventKind::IrqEntry { irq: 251, name: Vector::CallFunction.name().into() };
        let delays = analysed(
            "oslat",
            true,
            &[
                (0, 0, switch(0, true, 9)),
                (100, 0, EventKind::Lost { count: 5 }),
                (150, 0, EventKind::Lost { count: 0 }),
                (200, 9, tick),
                (203, 9, EventKind::IrqExit { irq: 236 }),
                (300, 9, call),
                (305, 9, EventKind::IrqExit { irq: 251 }),
            ],
        );
        let found: Vec<_> =
            delays.worst().iter().map(|delay| (delay.due, delay.ns(), delay.causes[0].cure.text())).collect();
        assert_eq!(found, [(300_000, 5_000, CALL), (200_000, 3_000, TICK)]);
        assert_eq!(
            said(&delays.worst()[1]),
            ["was interrupted for 3.0 us by oslat (9, FIFO 1) in interrupt 236 (LOC)"]
        );
    }

    proptest! {
        #[test]
        fn no_stream_makes_a_cause_longer_than_its_delay(
            kinds in prop::collection::vec((0_u8..9, 0_usize..5, 0_usize..5, 0_u64..50), 0..300),
            polls in any::<bool>(),
        ) {
            let watch = Watch { program: Some("*".to_owned()), ..Watch::default() };
            let (mut delays, mut us) = (Delays::new(watch, polls, 8, Some(10_000)), 1_000);
            let pids = [0, 7, 8, 9, 20];
            for (kind, one, other, step) in kinds {
                us += step;
                let (pid, next) = (pids[one], pids[other]);
                let what = match kind {
                    0 | 1 => switch(pid, other % 2 == 0, next),
                    2 => start(TIMER, us + 20 * other as u64),
                    3 => EXPIRE,
                    4 => waking(next),
                    5 => EventKind::SoftirqEntry { vec: 1 },
                    6 => EventKind::SoftirqExit { vec: 1 },
                    7 => EventKind::IrqEntry { irq: 30, name: "eth0".into() },
                    _ => EventKind::Lost { count: 1 },
                };
                delays.step(&Event { time: us * 1_000, cpu: (one % 2) as u32, pid, what });
            }
            prop_assert!(delays.worst().len() <= 8 && delays.worst().is_sorted_by_key(|delay| u64::MAX - delay.ns()));
            for delay in delays.worst() {
                prop_assert!(delay.due <= delay.ran && delay.task.is_rt());
                prop_assert!(delay.causes.iter().map(|cause| cause.ns).sum::<u64>() <= delay.ns(), "{delay:?}");
            }
        }
    }

    #[test]
    fn only_what_a_measurement_needs_is_traced() {
        let watch = Watch { program: Some("timerlat*".to_owned()), ..Watch::default() };
        let filters: HashMap<&str, Option<String>> =
            watch.filters().into_iter().map(|(probe, filter)| (probe.path(), filter)).collect();
        assert_eq!(filters["timer/hrtimer_start"].as_deref(), Some("COMM~\"timerlat*\""));
        assert_eq!(filters["sched/sched_waking"].as_deref(), Some("comm~\"timerlat*\""));
        assert_eq!(filters["sched/sched_switch"], None);
        assert!(filters.contains_key("irq_vectors/local_timer_entry"));
        assert!(!filters.contains_key("kvm/kvm_entry") && !filters.contains_key("net/netif_receive_skb"));
    }
}
