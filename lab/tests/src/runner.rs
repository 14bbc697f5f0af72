//! Runs tests, two at a time, and reports their results.
//!
//! Standard output gets a line when a test begins and one when it ends, the figures of a test that succeeded, and the
//! last lines of the log of one that failed. A file of results gets a line for each test, `ok NAME` or `failed NAME`;
//! the log of a failed test is kept beside it as `NAME.log`.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::inside::command::tail;
use crate::outside::{Commands, Outside, Tools};
use crate::test::Test;

/// Tests at a time: as many as the machine has cores that they are planned for.
const LANES: usize = 2;
/// Lines of a failed test's log that are shown.
const SHOWN: usize = 60;

struct Runner {
    tools: Arc<Tools>,
    commands: Arc<Commands>,
    work: PathBuf,
    results: Option<PathBuf>,
    counts: Mutex<Counts>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Counts {
    passed: usize,
    failed: usize,
}

/// Runs the tests. Status 1 if one failed; 128 + N if signal N interrupted the run, which then leaves nothing. The
/// files of failed tests are kept.
pub(crate) fn run(tests: &[&'static Test], tools: Tools, results: Option<PathBuf>) -> Result<ExitCode> {
    if let Some(results) = &results {
        fs::write(results, "").with_context(|| format!("writing {}", results.display()))?;
    }
    let work = tempfile::Builder::new().prefix("ontime-lab-tests-").tempdir().context("making a directory")?;
    let runner = Runner {
        tools: Arc::new(tools),
        commands: Arc::default(),
        // As it is in the command lines of the labs' processes.
        work: work.path().canonicalize().context("finding the directory of the tests")?,
        results,
        counts: Mutex::default(),
    };
    let mut signals = Signals::new([SIGINT, SIGTERM, SIGHUP]).context("catching signals")?;
    let handle = signals.handle();
    let (alone, others): (Vec<_>, Vec<_>) = tests.iter().copied().partition(|test| test.alone);
    thread::scope(|scope| {
        let commands = &runner.commands;
        scope.spawn(move || signals.forever().for_each(|signal| commands.interrupt(signal)));
        runner.lanes(1, alone);
        runner.lanes(LANES, others);
        handle.close();
    });
    if let Some(signal) = runner.commands.interrupted() {
        work.close().context("removing the directory of the tests")?;
        return Ok(ExitCode::from(u8::try_from(128 + signal).unwrap_or(1)));
    }
    let Counts { passed, failed } = runner.counts();
    say(&format!("emulated host: {passed} tests passed, {failed} failed\n"));
    if failed > 0 {
        say(&format!("their files: {}\n", work.keep().display()));
    }
    Ok(ExitCode::from(u8::from(failed > 0)))
}

impl Runner {
    fn counts(&self) -> Counts {
        *self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs tests in their order, so many at a time.
    fn lanes(&self, count: usize, tests: Vec<&'static Test>) {
        let queue = Mutex::new(tests.into_iter());
        let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).next();
        let lane = || {
            while let Some(test) = next() {
                self.one(test);
            }
        };
        thread::scope(|scope| {
            let lanes: Vec<_> = (0..count).map(|_| scope.spawn(lane)).collect();
            for lane in lanes {
                if lane.join().is_err() {
                    // The test's own message has been printed.
                    self.counts.lock().unwrap_or_else(PoisonError::into_inner).failed += 1;
                }
            }
        });
    }

    fn one(&self, test: &Test) {
        if self.commands.interrupted().is_some() {
            return;
        }
        let Test { name, host, inside, .. } = *test;
        say(&format!("lab test {name} ...\n"));
        let (dir, began) = (self.work.join(name), Instant::now());
        let started = Outside::new(
            name,
            host,
            inside.is_some(),
            dir.clone(),
            Arc::clone(&self.tools),
            Arc::clone(&self.commands),
        );
        let outcome = started.and_then(|outside| (test.outside)(&outside));
        let seconds = began.elapsed().as_secs();
        if self.commands.interrupted().is_some() {
            return;
        }
        let log = Outside::log_in(&dir);
        let mut text = String::from_utf8_lossy(&fs::read(&log).unwrap_or_default()).into_owned();
        let mut said = match &outcome {
            Ok(()) => {
                let figures = text.lines().filter(|line| line.starts_with("figures: "));
                let figures: String = figures.map(|line| format!("{line}\n")).collect();
                format!("lab test {name} ok ({seconds} s)\n{figures}")
            }
            Err(error) => {
                text.push_str(&format!("FAILED: {error:#}\n{}", last_words(&dir)));
                format!("lab test {name} FAILED ({seconds} s)\n{}", tail(&text, SHOWN))
            }
        };
        let kept = self.keep(name, outcome.is_ok(), &text);
        if let Err(error) = &kept {
            said.push_str(&format!("lab test {name}: its result is not kept: {error:#}\n"));
        }
        say(&said);
        let passed = outcome.is_ok() && kept.is_ok();
        if passed {
            // What cannot be removed now is removed at the end.
            let _ = fs::remove_dir_all(&dir);
        }
        let mut counts = self.counts.lock().unwrap_or_else(PoisonError::into_inner);
        if passed { counts.passed += 1 } else { counts.failed += 1 }
    }

    /// Writes a result, and the log of a failed test.
    fn keep(&self, name: &str, passed: bool, log: &str) -> Result<()> {
        let Some(results) = &self.results else { return Ok(()) };
        if !passed {
            let path = results.with_file_name(format!("{name}.log"));
            fs::write(&path, log).with_context(|| format!("writing {}", path.display()))?;
        }
        let line = format!("{} {name}\n", if passed { "ok" } else { "failed" });
        let file = OpenOptions::new().append(true).open(results);
        // In one write, so that the lines of two tests do not mix.
        let written = file.and_then(|mut file| file.write_all(line.as_bytes()));
        written.with_context(|| format!("writing {}", results.display()))
    }
}

/// The last lines of the daemon's logs below a directory, and the names of the consoles: the emulated host's, and that
/// of a guest that guest-test.sh has booted.
fn last_words(dir: &Path) -> String {
    let mut found = Vec::new();
    files(dir, &mut found);
    found.sort();
    let mut said = String::new();
    for path in found {
        let is_console = path.ends_with("console.log") || path.ends_with("out/console");
        if is_console {
            said.push_str(&format!("its console: {}\n", path.display()));
        } else if path.ends_with("daemon.log") {
            let text = fs::read(&path).unwrap_or_default();
            said.push_str(&format!("the daemon's last words:\n{}", tail(&String::from_utf8_lossy(&text), 5)));
        }
    }
    said
}

/// All files below a directory. Links are not followed.
fn files(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            files(&entry.path(), found);
        } else {
            found.push(entry.path());
        }
    }
}

/// Prints text at once, so that the lines of two tests do not mix.
fn say(text: &str) {
    let mut out = io::stdout().lock();
    // If nobody reads, the tests still run.
    let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use anyhow::ensure;

    use super::*;
    use crate::test::TEST;

    const PASSES: Test = Test {
        name: "passes",
        outside: |test| {
            test.note("figures: 7")?;
            ensure!(
                test.run(Command::new("sh").args(["-c", "echo $0 > kept", "x"]).current_dir(test.dir()))?.status == 0
            );
            Ok(())
        },
        ..TEST
    };
    const FAILS: Test = Test {
        name: "fails",
        outside: |test| {
            fs::write(test.files()?.join("daemon.log"), "before\nits last line\n")?;
            let said = test.run(Command::new("sh").args(["-c", "echo one; echo two >&2; exit 9"]))?.expect(0)?;
            test.note(said)
        },
        ..TEST
    };
    const LASTS: Test = Test {
        name: "lasts",
        outside: |test| test.run(Command::new("sh").args(["-c", "sleep 6000; true"]))?.expect(0).map(drop),
        ..TEST
    };

    fn runner(dir: &Path) -> Runner {
        let [ontime, lab, own, tree] = ["ontime", "ontime-lab", "ontime-lab-tests", "tree"].map(|name| dir.join(name));
        let results = dir.join("results");
        fs::write(&results, "").unwrap();
        Runner {
            tools: Arc::new(Tools { ontime, lab, own, tree }),
            commands: Arc::default(),
            work: dir.join("work"),
            results: Some(results),
            counts: Mutex::default(),
        }
    }

    #[test]
    fn results_and_the_log_of_a_failed_test_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let runner = runner(dir.path());
        runner.lanes(1, vec![&PASSES, &FAILS]);
        assert_eq!(runner.counts(), Counts { passed: 1, failed: 1 });
        assert_eq!(fs::read_to_string(dir.path().join("results")).unwrap(), "ok passes\nfailed fails\n");
        let log = fs::read_to_string(dir.path().join("fails.log")).unwrap();
        for wanted in
            ["one\ntwo\n", "FAILED: ended with 9, wanted 0", "the daemon's last words:\nbefore\nits last line\n"]
        {
            assert!(log.contains(wanted), "{log}");
        }
        assert!(!runner.work.join("passes").exists() && runner.work.join("fails/files/daemon.log").exists());
        assert!(!dir.path().join("passes.log").exists());
    }

    #[test]
    fn an_interrupted_run_ends_its_commands_and_starts_no_more() {
        let dir = tempfile::tempdir().unwrap();
        let runner = runner(dir.path());
        thread::scope(|scope| {
            let lanes = scope.spawn(|| runner.lanes(2, vec![&LASTS, &PASSES, &LASTS, &PASSES]));
            // Both lanes are at a test that lasts.
            while fs::read_to_string(dir.path().join("results")).unwrap() != "ok passes\n"
                || !Outside::log_in(&runner.work.join("lasts")).exists()
            {
                thread::sleep(std::time::Duration::from_millis(10));
            }
            runner.commands.interrupt(SIGTERM);
            lanes.join().unwrap();
        });
        assert_eq!(runner.commands.interrupted(), Some(SIGTERM));
        // The tests that were interrupted did not fail, and the last one did not run.
        assert_eq!(runner.counts(), Counts { passed: 1, failed: 0 });
    }
}
