//! Reused thread numbers. In a PID namespace in which all numbers but three are taken, a freed number is reused at
//! once. Threads of one process get policies while they end. Threads of another process, which get the same numbers,
//! must not stay changed.
#![allow(missing_docs, clippy::unwrap_used)]

use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use ontime_tenants::{Policy, ThreadError, ThreadId};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::Timespec;

const PLACE: Policy = Policy::Fifo(7);
const PID_MAX: &str = "/proc/sys/kernel/pid_max";
const RUN: Duration = Duration::from_secs(3);
/// How long a machine may take until a thread was placed and another was gone.
const PATIENCE: Duration = Duration::from_secs(60);

/// From Linux 6.14 `pid_max` belongs to the PID namespace. Before, it belongs to the whole host, and a test must not
/// change it.
fn can_run() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap();
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|number| number.parse::<u32>().ok());
    let new_enough = (numbers.next(), numbers.next()) >= (Some(6), Some(14));
    let able = new_enough && rustix::process::geteuid().is_root();
    if !able {
        println!("SKIPPED: needs root and Linux 6.14");
    }
    able
}

fn again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--ignored", "--nocapture", "--test-threads=1"]);
    command
}

#[test]
fn a_reused_number_is_never_left_changed() {
    if !can_run() {
        return;
    }
    let before = std::fs::read_to_string(PID_MAX).unwrap();
    let inner = again("inside_the_namespace");
    let mut unshare = Command::new("unshare");
    unshare.args(["--pid", "--fork", "--mount-proc", "--kill-child"]).arg(inner.get_program()).args(inner.get_args());
    let output = unshare.output().unwrap();
    let after = std::fs::read_to_string(PID_MAX).unwrap();
    if before != after {
        std::fs::write(PID_MAX, &before).unwrap();
        panic!("the namespace changed the host's pid_max; put back");
    }
    let said = String::from_utf8_lossy(&output.stdout);
    println!("{}", said.lines().find(|line| line.contains("placed")).unwrap_or_default());
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(said.contains("placed"), "{said}");
}

/// Threads that end while their policy is set.
#[test]
#[ignore = "run by a_reused_number_is_never_left_changed"]
fn inside_the_namespace() {
    assert_eq!(std::process::id(), 1, "in a namespace of its own");
    std::fs::write(PID_MAX, "340").unwrap();
    let strangers = again("strangers").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    std::thread::sleep(Duration::from_millis(300));
    let (tell, told) = mpsc::sync_channel::<ThreadId>(1);
    let make_victims = move || {
        let mut ended = 0u64;
        loop {
            let tell = tell.clone();
            let victim = std::thread::Builder::new().spawn(move || {
                let tid = rustix::thread::gettid().as_raw_nonzero().get();
                ThreadId::of(1, tid).is_ok_and(|id| tell.send(id).is_ok())
            });
            // No free number: the other process has all of them for a moment.
            let Ok(victim) = victim else { continue };
            if !victim.join().unwrap() {
                return ended;
            }
            ended += 1;
        }
    };
    let victims = std::thread::spawn(make_victims);
    let _parked = take_all_numbers_but(3);
    let (mut placed, mut gone, start) = (0u64, 0u64, Instant::now());
    while start.elapsed() < RUN || (placed.min(gone) == 0 && start.elapsed() < PATIENCE) {
        let id = told.recv().unwrap();
        // From immediately to after its end.
        let wait = Instant::now() + Duration::from_micros((placed + gone) % 64);
        while Instant::now() < wait {
            std::hint::spin_loop();
        }
        match id.set_policy(PLACE) {
            Ok(()) => placed += 1,
            Err(ThreadError::Gone(_)) => gone += 1,
            Err(error) => panic!("{error}"),
        }
    }
    drop(told);
    let ended = victims.join().unwrap();
    // Closes its standard input, so that it ends.
    let output = strangers.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}");
    let line = said.lines().find(|line| line.contains("strangers")).unwrap();
    println!("placed {placed}, gone {gone}, victims {ended}, {line}");
    assert!(placed > 0 && gone > 0 && ended > 0, "placed {placed}, gone {gone}, victims {ended}: no race to speak of");
}

/// Creates threads that only take numbers, until the returned value is dropped.
fn take_all_numbers_but(free: usize) -> Vec<mpsc::Sender<()>> {
    let mut parked = Vec::new();
    let mut misses = 0;
    // The other process's threads take numbers now and then, so one failure does not mean that all are taken.
    while misses < 200 {
        let (keep, kept) = mpsc::channel::<()>();
        match std::thread::Builder::new().stack_size(64 << 10).spawn(move || kept.recv().is_ok()) {
            Ok(_) => parked.push(keep),
            Err(_) => misses += 1,
        }
    }
    parked.truncate(parked.len().saturating_sub(free));
    parked
}

/// Threads that get the numbers and check their own policy, until standard input is closed.
#[test]
#[ignore = "run by inside_the_namespace"]
fn strangers() {
    let (mut lived, mut touched, input) = (0u64, 0u64, std::io::stdin());
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    while poll(&mut [PollFd::new(&input, PollFlags::IN)], Some(&now)).unwrap() == 0 {
        let stranger = std::thread::Builder::new().spawn(|| {
            let me = i32::try_from(std::process::id()).unwrap();
            let Ok(id) = ThreadId::of(me, rustix::thread::gettid().as_raw_nonzero().get()) else { return false };
            std::thread::sleep(Duration::from_micros(300));
            if id.policy().unwrap() != PLACE {
                return false;
            }
            // Between a change and its undoing; the undoing thread may have to wait for a CPU.
            let undone = (0..500).any(|_| {
                std::thread::sleep(Duration::from_millis(20));
                id.policy().unwrap() != PLACE
            });
            assert!(undone, "a stranger was left at the place of another thread");
            true
        });
        let Ok(stranger) = stranger else { continue };
        touched += u64::from(stranger.join().unwrap());
        lived += 1;
    }
    println!("strangers {lived}, of them seen touched for a moment {touched}");
}
