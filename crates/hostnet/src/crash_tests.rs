//! Tests of the journal under `kill -9`: a process is killed at every point of apply, of a change of plans and of
//! reset, and then a reset by another process restores every knob.
//!
//! The victim is this test program, started again with the point at which it kills itself. The knobs are real files.

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::journal::crash;
use crate::{
    Journal, Knob, LiveHost, Originals, Plan, Report, Root, Roots, RuleId, Setting, Stage, Value, apply, reset,
};

const BOOT: &str = "5bd2c4f2-boot";
const FILES: usize = 6;

fn host(dir: &Path) -> LiveHost {
    LiveHost::with_roots(Roots { sys: dir.join("sys"), ..Roots::default() })
}

fn journal(dir: &Path) -> Journal {
    Journal::open(&dir.join("state/originals"), BOOT).unwrap()
}

fn knob(number: usize) -> Knob {
    Knob::HostFile { root: Root::Sys, path: format!("knob{number}") }
}

fn value_of(dir: &Path) -> Vec<String> {
    (0..FILES).map(|number| fs::read_to_string(dir.join(format!("sys/knob{number}"))).unwrap()).collect()
}

fn fresh() -> (tempfile::TempDir, Vec<String>) {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("sys")).unwrap();
    for number in 0..FILES {
        fs::write(dir.path().join(format!("sys/knob{number}")), format!("original{number}")).unwrap();
    }
    let values = value_of(dir.path());
    (dir, values)
}

/// Sets these knobs. The first has an earlier stage, and overwrites the last.
fn plan(numbers: &[usize], word: &str) -> Plan {
    let setting = |number: &usize| {
        let stage = if *number == 0 { Stage::Thread } else { Stage::Host };
        let mut setting = Setting::new(RuleId::SkbDefer, stage, knob(*number), Value::Text(word.to_owned()));
        if *number == 0 {
            setting.overwrites = vec![knob(FILES - 1)];
        }
        setting
    };
    Plan { settings: numbers.iter().map(setting).collect(), findings: Vec::new() }
}

fn act(dir: &Path, what: &str) -> Report {
    let host = host(dir);
    let mut journal = journal(dir);
    match what {
        "apply" => apply(&host, &plan(&[0, 1, 2, 3], "ours"), &mut journal).unwrap(),
        "switch" => apply(&host, &plan(&[2, 3, 4], "theirs"), &mut journal).unwrap(),
        "reset" => reset(&host, &mut journal).unwrap(),
        other => panic!("no action {other}"),
    }
}

/// The victim: does nothing unless it was started as a victim.
#[test]
fn victim() {
    let (Ok(dir), Ok(what), Ok(point)) =
        (std::env::var("ONTIME_CRASH_DIR"), std::env::var("ONTIME_CRASH_ACT"), std::env::var("ONTIME_CRASH_AT"))
    else {
        return;
    };
    crash::testing::arm(point.parse().unwrap());
    act(Path::new(&dir), &what);
}

/// Starts a victim. Returns true if it was killed, false if it ended normally.
fn kill_at(dir: &Path, what: &str, point: i64) -> bool {
    let status = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "crash_tests::victim", "--test-threads=1"])
        .env("ONTIME_CRASH_DIR", dir)
        .env("ONTIME_CRASH_ACT", what)
        .env("ONTIME_CRASH_AT", point.to_string())
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .status()
        .unwrap();
    assert!(status.success() || status.signal() == Some(9), "the victim failed: {status}");
    !status.success()
}

fn killed_everywhere(before: &[&str], what: &str, at_least: i64) {
    let mut points = 0;
    loop {
        let (dir, original) = fresh();
        for action in before {
            act(dir.path(), action);
        }
        let killed = kill_at(dir.path(), what, points);
        act(dir.path(), "reset");
        assert_eq!(value_of(dir.path()), original, "killed at point {points} of {what}");
        assert!(journal(dir.path()).entries().is_empty(), "the journal still has entries");
        if !killed {
            break;
        }
        points += 1;
    }
    assert!(points >= at_least, "only {points} points of {what} were passed");
}

#[test]
fn killed_at_any_point_of_apply() {
    // Four points of one journal write, and four knobs.
    killed_everywhere(&[], "apply", 8);
}

#[test]
fn killed_at_any_point_of_switching() {
    // Two journal writes (keep, forget), two knobs restored and one overwritten, three set.
    killed_everywhere(&["apply"], "switch", 14);
}

#[test]
fn killed_at_any_point_of_reset() {
    killed_everywhere(&["apply", "switch"], "reset", 7);
}

#[test]
fn killed_again_and_again() {
    let (dir, original) = fresh();
    for point in [2, 5, 3, 6, 7, 1] {
        kill_at(dir.path(), "apply", point);
        kill_at(dir.path(), "switch", point);
        kill_at(dir.path(), "reset", point - 1);
    }
    act(dir.path(), "reset");
    assert_eq!(value_of(dir.path()), original);
}

#[test]
fn the_first_original_wins_and_the_second_apply_changes_nothing() {
    let (dir, original) = fresh();
    assert_eq!(act(dir.path(), "apply").counts().changed, 4);
    let second = act(dir.path(), "apply").counts();
    assert_eq!((second.changed, second.already), (0, 4));
    // Another program changes a knob. It is set again, and a reset still restores the first original.
    fs::write(dir.path().join("sys/knob1"), "admin").unwrap();
    let found = crate::drift(&host(dir.path()), &plan(&[0, 1, 2, 3], "ours"), &journal(dir.path()));
    assert_eq!(found.len(), 1);
    assert!(found[0].was_applied && found[0].found == Value::Text("admin".to_owned()));
    assert_eq!(act(dir.path(), "apply").counts().changed, 1);
    act(dir.path(), "reset");
    assert_eq!(value_of(dir.path()), original);
}

#[test]
fn some_knobs_are_given_back_and_still_kept() {
    let (dir, original) = fresh();
    act(dir.path(), "apply");
    let kept = journal(dir.path());
    let report = crate::give_back(&host(dir.path()), &kept, |other| other.key() == knob(1).key());
    assert_eq!((report.items.len(), report.counts().restored), (1, 1));
    let values = value_of(dir.path());
    assert_eq!((&values[1], values[2].as_str()), (&original[1], "ours"));
    assert!(kept.has(&knob(1)) && kept.entries().len() == 5);
}

/// A small tmpfs, unmounted at the end.
struct Tmpfs(PathBuf);

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[test]
fn a_full_disk_refuses_before_anything_is_changed() {
    let (dir, original) = fresh();
    let state = dir.path().join("state");
    fs::create_dir(&state).unwrap();
    let options = c"size=16k,nr_inodes=20";
    if let Err(error) =
        rustix::mount::mount("tmpfs", &state, "tmpfs", rustix::mount::MountFlags::empty(), Some(options))
    {
        println!("SKIPPED: a full disk needs root to mount a tmpfs: {error}");
        return;
    }
    let _unmount = Tmpfs(state.clone());
    let mut kept = journal(dir.path());
    let filler = state.join("filler");
    let mut full = fs::File::create(&filler).unwrap();
    while std::io::Write::write_all(&mut full, &[1; 4096]).is_ok() {}
    let refused = apply(&host(dir.path()), &plan(&[0, 1, 2], "ours"), &mut kept).unwrap_err();
    assert!(refused.to_string().contains("free some space"), "{refused}");
    assert_eq!(value_of(dir.path()), original);
    assert!(kept.entries().is_empty() && !state.join("originals.new").exists());
    // With free space again, the same journal works.
    drop(full);
    fs::remove_file(filler).unwrap();
    assert_eq!(apply(&host(dir.path()), &plan(&[0, 1, 2], "ours"), &mut kept).unwrap().counts().changed, 3);
    reset(&host(dir.path()), &mut kept).unwrap();
    assert_eq!(value_of(dir.path()), original);
}

#[test]
fn who_only_reads_the_originals_needs_no_lock_and_leaves_no_trace() {
    let (dir, _) = fresh();
    let state = dir.path().join("state");
    let path = state.join("originals");
    let read = |boot: &str| Originals::read(&path, boot);
    assert!(read(BOOT).unwrap().entries().is_empty() && !state.exists());
    act(dir.path(), "apply");
    let held = journal(dir.path());
    let listed = || {
        let entries = fs::read_dir(&state).unwrap().map(|entry| entry.unwrap());
        let mut all: Vec<_> =
            entries.map(|entry| (entry.file_name(), entry.metadata().unwrap().modified().unwrap())).collect();
        all.sort();
        all
    };
    let (before, text) = (listed(), fs::read(&path).unwrap());
    assert_eq!(read(BOOT).unwrap().entries(), held.entries());
    assert!(!held.entries().is_empty() && read("another-boot").unwrap().entries().is_empty());
    assert_eq!((listed(), fs::read(&path).unwrap()), (before, text));
    fs::write(&path, "{}").unwrap();
    assert!(matches!(read(BOOT), Err(crate::JournalError::Damaged { .. })));
    fs::remove_file(&path).unwrap();
    fs::create_dir(&path).unwrap();
    let unread = read(BOOT).unwrap_err().to_string();
    assert!(unread.contains("as if the administrator had set it") && unread.contains("move away what"), "{unread}");
}

#[test]
fn two_processes_and_earlier_boots_and_damage_are_noticed() {
    let (dir, _) = fresh();
    let path = dir.path().join("state/originals");
    let first = journal(dir.path());
    assert!(matches!(Journal::open(&path, BOOT), Err(crate::JournalError::Held { .. })));
    drop(first);
    act(dir.path(), "apply");
    let later = Journal::open(&path, "another-boot").unwrap();
    assert_eq!((later.stale(), later.entries().len()), (5, 0));
    drop(later);
    let text = fs::read_to_string(&path).unwrap();
    let torn = text.get(..text.len() - 20).unwrap().to_owned();
    let edited = text.replace("original1", "original9");
    let cut = text.lines().take(3).collect::<Vec<_>>().join("\n") + "\n";
    for damaged in [torn, edited, cut, "\n".to_owned(), "{}".to_owned(), "{}\n".to_owned()] {
        fs::write(&path, &damaged).unwrap();
        let error = Journal::open(&path, BOOT).unwrap_err();
        assert!(matches!(error, crate::JournalError::Damaged { .. }), "{error}");
        assert!(error.to_string().contains("move the file away"), "{error}");
        assert_eq!(fs::read_to_string(&path).unwrap(), damaged, "a damaged journal was touched");
    }
    fs::write(&path, [0xff, 0xfe, 0x00]).unwrap();
    assert!(matches!(Journal::open(&path, BOOT), Err(crate::JournalError::Damaged { .. })));
}
