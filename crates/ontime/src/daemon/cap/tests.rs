//! The caps on the running kernel: child processes that spin at SCHED_FIFO on one CPU, beside one that spins at
//! SCHED_OTHER.
//!
//! The tests compare shares of CPU time with wide margins, and no instants, because the machine has other work.

use std::process::{Child, Command};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ontime_tenants::{Policy, RuntimeCap, ThreadId};

use super::place::place_self;
use super::*;

/// Spinners of two tests on one CPU at one priority would wait for each other.
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Spinner(Child);

impl Spinner {
    fn start(cpu: usize) -> Self {
        // The limit ends the child if the test fails to.
        let child = Command::new("sh").args(["-c", "ulimit -t 20; while :; do :; done"]).spawn().unwrap();
        let spinner = Self(child);
        let mut set = rustix::thread::CpuSet::new();
        set.set(cpu);
        let pid = rustix::process::Pid::from_raw(spinner.pid()).unwrap();
        rustix::thread::sched_setaffinity(Some(pid), &set).unwrap();
        spinner
    }

    fn pid(&self) -> i32 {
        self.0.id() as i32
    }

    fn id(&self) -> ThreadId {
        ThreadId::of(self.pid(), self.pid()).unwrap()
    }

    fn place(&self, place: Policy) {
        PlacedThread::open(self.id(), place, None).unwrap().unwrap().take().unwrap();
    }

    fn policy(&self) -> i32 {
        // SAFETY: takes an integer, touches no memory.
        unsafe { libc::sched_getscheduler(self.pid()) }
    }

    /// CPU time taken so far, ns.
    fn ran(&self) -> u64 {
        let text = std::fs::read_to_string(format!("/proc/{}/schedstat", self.pid())).unwrap();
        text.split_whitespace().next().unwrap().parse().unwrap()
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        // A process must run to take a signal, and a spinner at the same FIFO priority could prevent that for ever.
        if let Ok(Some(place)) = PlacedThread::open(self.id(), Policy::Fifo(15), None) {
            let _ = place.take();
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

const PLACE: Policy = Policy::Fifo(10);

fn settings(cpu_share: f64) -> Settings {
    Settings {
        period: Duration::from_millis(3),
        cpu_share: Share::new(cpu_share).unwrap(),
        watcher: Policy::Fifo(20),
        capacity: 16,
        descriptors: 64,
    }
}

fn alarm() -> Arc<OwnedFd> {
    Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).unwrap())
}

fn start(cpu_share: f64) -> Result<Caps, CapError> {
    Caps::start(settings(cpu_share), alarm())
}

fn watch(spinner: &Spinner, share: f64, cpu: u32) -> Watch {
    Watch {
        id: spinner.id(),
        place: PLACE,
        share: Share::new(share).unwrap(),
        cpus: vec![cpu],
        rank: Rank::Guest,
        ahead: None,
        shared: None,
    }
}

#[test]
fn rivals_may_want_one_cpu_at_one_place() {
    let watch = |tid: i32, place, cpus: &[u32]| Watch {
        id: ThreadId { pid: 1, tid, start_time: 1 },
        place,
        share: Share::NINETY_FIVE,
        cpus: cpus.to_vec(),
        rank: Rank::Guest,
        ahead: None,
        shared: None,
    };
    let one = watch(2, PLACE, &[0, 1]);
    assert!(one.is_rival(&watch(3, PLACE, &[1, 2])));
    assert!(!one.is_rival(&watch(3, PLACE, &[2, 3])), "pinned elsewhere");
    assert!(!one.is_rival(&watch(3, Policy::Fifo(11), &[1])), "of another level");
    assert!(!one.is_rival(&one.clone()));
}

/// A thread with RLIMIT_RTPRIO or CAP_SYS_NICE can end its pause.
#[test]
fn a_thread_that_ends_its_pauses_is_not_held_to_its_cap() {
    if skipped() {
        return;
    }
    let _alone = alone();
    let spinner = Spinner::start(0);
    let place = PlacedThread::open(spinner.id(), PLACE, None).unwrap().unwrap();
    place.leave(false).unwrap();
    assert_eq!((place.take().unwrap(), spinner.policy()), (false, libc::SCHED_FIFO), "it stayed in its pause");
    place.leave(false).unwrap();
    spinner.id().set_policy(Policy::BULK).unwrap();
    assert!(!place.take().unwrap(), "it has left its pause, but cannot monopolize its CPU");
    place.leave(false).unwrap();
    spinner.id().set_policy(Policy::Rr(2)).unwrap();
    assert!(place.take().unwrap(), "it ran at real-time priority");
    let mut caps = start(0.95).unwrap();
    caps.set(&[watch(&spinner, 0.9, 0)]).unwrap();
    assert!(caps.complete());
    let entry = caps.entries.values().next().unwrap();
    entry.tally.escaped.fetch_add(1, Ordering::Relaxed);
    assert!(!caps.complete() && caps.report()[0].escaped == 1);
}

/// A thread that may set its policy could end its pause and begin it again before the end.
#[test]
fn a_thread_that_is_at_its_place_during_a_pause_is_noticed() {
    if skipped() {
        return;
    }
    let _alone = alone();
    let spinner = Spinner::start(0);
    spinner.place(PLACE);
    let alarm = alarm();
    let mut caps = Caps::start(settings(0.95), Arc::clone(&alarm)).unwrap();
    // After a tick of 1 ms or more, a pause of minutes: its end comes after that of the test.
    caps.set(&[watch(&spinner, RuntimeCap::LEAST, 0)]).unwrap();
    let (start, mut again) = (Instant::now(), false);
    while caps.report()[0].escaped == 0 {
        assert!(start.elapsed() < Duration::from_secs(60), "{:?}", caps.report());
        if spinner.id().policy().unwrap() == Policy::Idle {
            spinner.id().set_policy(PLACE).unwrap();
            std::thread::sleep(Duration::from_millis(200));
            again |= caps.report()[0].escaped > 0 && spinner.id().policy().unwrap() == Policy::Idle;
            spinner.id().set_policy(Policy::Idle).unwrap();
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(!caps.complete() && caps.report()[0].pauses == 1);
    assert!(again, "the watcher ends the escape");
    assert_eq!(rustix::io::read(&*alarm, &mut [0; 8]), Ok(8), "the guardian is alarmed");
    // A thread may choose its CPUs, and so have itself watched anew.
    caps.set(&[watch(&spinner, 0.9, 0)]).unwrap();
    assert_eq!(caps.report()[0].escaped, 0);
    assert!(!caps.complete(), "the thread that is watched anew is the one that ended its pause");
}

fn skipped() -> bool {
    let refused = std::thread::spawn(|| place_self(Policy::Fifo(1)).is_err()).join().unwrap();
    if refused {
        println!("SKIPPED: this test needs the right to SCHED_FIFO (CAP_SYS_NICE)");
    }
    refused
}

#[test]
fn ended_whole_and_wrong_threads_are_reported() {
    if skipped() {
        return;
    }
    let _alone = alone();
    let mut caps = start(0.95).unwrap();
    let gone = {
        let spinner = Spinner::start(0);
        spinner.id()
    };
    let alive = Spinner::start(0);
    let share = Share::new(0.9).unwrap();
    let reused = ThreadId { start_time: 1, ..alive.id() };
    let wanted = [
        Watch { id: gone, place: PLACE, share, cpus: vec![0], rank: Rank::Guest, ahead: None, shared: None },
        Watch { id: reused, place: PLACE, share, cpus: vec![0], rank: Rank::Guest, ahead: None, shared: None },
        Watch {
            id: ThreadId { tid: alive.pid(), ..alive.id() },
            place: Policy::BULK,
            share,
            cpus: vec![],
            rank: Rank::Guest,
            ahead: None,
            shared: None,
        },
    ];
    caps.set(&wanted).unwrap();
    let report = caps.report();
    let cover = |id: ThreadId| report.iter().find(|used| used.id == id).unwrap().cover.clone();
    assert_eq!(cover(gone), Cover::Gone);
    assert_eq!(cover(reused), Cover::Gone);
    assert_eq!(cover(alive.id()), Cover::Failed(Unwatched::NotRealTime(Policy::BULK)));
    assert!(!caps.complete());
    caps.set(&[Watch { share: Share::new(1.0).unwrap(), ..watch(&alive, 0.5, 0) }]).unwrap();
    assert_eq!(caps.report()[0].cover, Cover::Whole);
    assert!(!caps.complete());
    // A thread that ends while it is watched frees its slot.
    for _ in 0..40 {
        let spinner = Spinner::start(0);
        caps.set(&[watch(&spinner, 0.9, 0)]).unwrap();
        assert_eq!(caps.report()[0].cover, Cover::Watched);
    }
    assert!(caps.complete());
}

/// The results of these tests depend on how punctually this machine runs threads. `make thorough` runs them.
mod real_speed {
    use super::*;

    /// The share of one CPU that each spinner takes in 1.5 seconds.
    fn shares(spinners: &[&Spinner]) -> Vec<f64> {
        let before: Vec<u64> = spinners.iter().map(|s| s.ran()).collect();
        let start = Instant::now();
        std::thread::sleep(Duration::from_millis(1500));
        let length = start.elapsed().as_nanos() as f64;
        spinners.iter().zip(before).map(|(s, before)| (s.ran() - before) as f64 / length).collect()
    }

    #[test]
    #[ignore = "the machine's real speed decides: make thorough"]
    fn a_spinner_at_fifo_leaves_the_rest_of_its_cpu_to_others() {
        if skipped() {
            return;
        }
        let _alone = alone();
        let mut caps = start(0.95).unwrap();
        let (rt, other) = (Spinner::start(0), Spinner::start(0));
        rt.place(PLACE);
        let wanted = [watch(&rt, 0.5, 0)];
        caps.set(&wanted).unwrap();
        assert!(caps.complete());
        let taken = shares(&[&rt, &other]);
        // The capped thread gets half, plus what is left unused of the other half. The rest goes to the other thread,
        // less what further load on the machine takes. Without the cap, the first thread takes 95 to 100 %. How close
        // to half it comes depends on the machine's punctuality (if this is a VM whose host delays its vCPU, the
        // watcher wakes late), so the margin is wide.
        assert!((0.1..0.85).contains(&taken[0]), "the capped thread took {taken:?}");
        assert!(taken[1] > 0.0, "the other took {taken:?}");
        let report = caps.report();
        assert!(report[0].pauses > 50, "{report:?}");
        assert!(report[0].paused_ns > 100_000_000, "{report:?}");
        // The thread is no longer watched, so it stays at its place.
        caps.set(&[]).unwrap();
        assert_eq!(rt.policy(), libc::SCHED_FIFO);
    }

    /// The spinner goes on running in its pauses, because no other thread needs its CPU. The watcher keeps looking
    /// because of the other thread.
    #[test]
    #[ignore = "the machine's real speed decides: make thorough"]
    fn what_was_run_in_a_pause_hides_nothing_afterwards() {
        if skipped() {
            return;
        }
        let _alone = alone();
        let mut caps = start(0.95).unwrap();
        let (rt, calm) = (Spinner::start(1), Spinner(Command::new("sleep").arg("30").spawn().unwrap()));
        rt.place(PLACE);
        calm.place(PLACE);
        caps.set(&[watch(&rt, 0.2, 1), watch(&calm, 0.95, 0)]).unwrap();
        std::thread::sleep(Duration::from_secs(1));
        let used = || caps.report().into_iter().find(|used| used.id == rt.id()).unwrap();
        let (before, start) = (used(), Instant::now());
        std::thread::sleep(Duration::from_secs(3));
        let (after, length) = (used(), start.elapsed().as_nanos() as f64);
        let share = (after.ran_ns - before.ran_ns) as f64 / length;
        // With a share of 0.2, each tick of 4 ms is followed by a pause of 16 ms. If time that was run in a pause hid
        // later time, the thread would run for seconds and then pause for seconds.
        assert!(after.pauses - before.pauses > 20 && share < 0.6, "{share} of the CPU: {before:?}, {after:?}");
    }

    #[test]
    #[ignore = "the machine's real speed decides: make thorough"]
    fn two_spinners_on_one_cpu_are_held_to_the_cpus_share() {
        if skipped() {
            return;
        }
        let _alone = alone();
        let mut caps = start(0.6).unwrap();
        let (first, second, other) = (Spinner::start(1), Spinner::start(1), Spinner::start(1));
        first.place(PLACE);
        second.place(PLACE);
        caps.set(&[watch(&first, 0.5, 1), watch(&second, 0.5, 1)]).unwrap();
        let before = caps.report();
        let start = Instant::now();
        let taken = shares(&[&first, &second, &other]);
        let length = start.elapsed().as_nanos() as f64;
        // CPU time that they take while paused (SCHED_IDLE) does not count: with more load there would be none.
        let at_rt: u64 = caps.report().iter().zip(before).map(|(after, before)| after.ran_ns - before.ran_ns).sum();
        assert!((0.1..0.85).contains(&(at_rt as f64 / length)), "both took {at_rt} of {length} ns, {taken:?}");
        assert!(taken[2] > 0.0, "the other took {taken:?}");
        drop(caps);
        assert_eq!((first.policy(), second.policy()), (libc::SCHED_FIFO, libc::SCHED_FIFO));
    }

    #[test]
    #[ignore = "the machine's real speed decides: make thorough"]
    fn a_sleeper_is_seldom_looked_at() {
        if skipped() {
            return;
        }
        let _alone = alone();
        let mut caps = start(0.95).unwrap();
        let child = Spinner(Command::new("sleep").arg("30").spawn().unwrap());
        child.place(PLACE);
        caps.set(&[watch(&child, 0.95, 0)]).unwrap();
        let task = format!("/proc/self/task/{}/schedstat", caps.watcher_id.tid);
        let runs = || -> u64 {
            let text = std::fs::read_to_string(&task).unwrap();
            text.split_whitespace().nth(2).unwrap().parse().unwrap()
        };
        let before = runs();
        std::thread::sleep(Duration::from_secs(1));
        // One look in 4 x 0.95 x 3 ms (88 a second), after a few sooner ones. With one look in every period it would be
        // 330.
        let looks = runs() - before;
        assert!((1..=100).contains(&looks), "the watcher ran {looks} times for a thread that slept");
    }

    #[test]
    #[ignore = "the machine's real speed decides: make thorough"]
    fn a_pause_is_never_read_as_a_place() {
        if skipped() {
            return;
        }
        let _alone = alone();
        let mut caps = start(0.95).unwrap();
        let (rt, idle) = (Spinner::start(0), Spinner::start(0));
        rt.place(PLACE);
        caps.set(&[watch(&rt, 0.1, 0)]).unwrap();
        let end = Instant::now() + Duration::from_secs(20);
        let mut paused = 0;
        while paused < 20 {
            assert!(Instant::now() < end, "a spinner with a tenth of a CPU was seen paused {paused} times only");
            let pauses = caps.pauses();
            let read = rt.id().policy().unwrap();
            paused += u32::from(read == Policy::Idle);
            assert_eq!(pauses.planned(rt.id(), read), PLACE);
        }
        // A thread that is not watched and is at SCHED_IDLE is really at SCHED_IDLE.
        idle.id().set_policy(Policy::Idle).unwrap();
        assert_eq!(caps.pauses().planned(idle.id(), idle.id().policy().unwrap()), Policy::Idle);
        // The same holds for a thread that is no longer watched.
        caps.set(&[]).unwrap();
        rt.id().set_policy(Policy::Idle).unwrap();
        assert_eq!(caps.pauses().planned(rt.id(), rt.id().policy().unwrap()), Policy::Idle);
    }
}

#[test]
fn why_a_thread_is_not_watched_has_a_remedy() {
    for why in [
        Unwatched::Above { place: Policy::Fifo(90), watcher: Policy::Fifo(55) },
        Unwatched::NotRealTime(Policy::BULK),
        Unwatched::NoRoom(512),
    ] {
        let wanted = match why {
            Unwatched::Above { .. } => "priorities.base",
            Unwatched::NotRealTime(_) | Unwatched::Unreadable { .. } => "`ontime report`",
            Unwatched::NoRoom(_) => "raise that in /etc/ontime/daemon.toml",
        };
        let said = why.to_string();
        assert!(said.split_once("; ").is_some_and(|(_, remedy)| remedy.contains(wanted)), "{said}");
    }
    for (number, wanted) in [
        (libc::EMFILE, "LimitNOFILE="),
        (libc::EACCES, "root"),
        (libc::ENOMEM, "free memory"),
        (libc::EIO, "report it"),
    ] {
        let Cover::Failed(why) = refused(io::Error::from_raw_os_error(number)) else { panic!("{number}") };
        let said = why.to_string();
        assert!(said.split_once("; ").is_some_and(|(_, remedy)| remedy.contains(wanted)), "{said}");
    }
    assert_eq!(refused(io::Error::from_raw_os_error(libc::ESRCH)), Cover::Gone);
}

/// A daemon that runs out of descriptors could not even read the host.
#[test]
fn caps_that_would_take_more_descriptors_than_there_are_are_refused() {
    let most = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
    let Some(most) = most.and_then(|most| usize::try_from(most).ok()).and_then(|most| most.checked_add(1)) else {
        println!("SKIPPED: open files have no limit here");
        return;
    };
    let error = Caps::start(Settings { descriptors: most, ..settings(0.95) }, alarm()).unwrap_err();
    assert!(matches!(error, CapError::Descriptors { needed, .. } if needed == most), "{error}");
    let said = error.to_string();
    assert!(said.contains("cap.threads") && said.contains("LimitNOFILE") && said.contains("stay on"), "{said}");
}
