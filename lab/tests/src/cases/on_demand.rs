//! Commands of the clients' side that run while the inner half of their test wants them: while a file is in `/lab`, the
//! clients' directory.

use std::path::Path;

use anyhow::Result;
use rustix::process::Signal;

use crate::inside::command::Running;

/// A command that runs while a file exists.
pub(crate) struct OnDemand {
    file: &'static str,
    /// What ends it.
    signal: Signal,
    running: Option<Running>,
}

impl OnDemand {
    pub(crate) const fn new(file: &'static str, signal: Signal) -> Self {
        Self { file, signal, running: None }
    }

    /// Starts the command if the file is there, and ends it if the file is gone. Whether it has ended it.
    pub(crate) fn follow(&mut self, start: impl FnOnce() -> Result<Running>) -> Result<bool> {
        let is_wanted = Path::new(self.file).exists();
        match (is_wanted, self.running.take()) {
            (true, None) => self.running = Some(start()?),
            (true, running) => self.running = running,
            (false, None) => {}
            (false, Some(mut running)) => {
                if !running.is_over()? {
                    running.end(self.signal)?;
                }
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// As [`Self::follow`], and starts a command again that has ended by itself.
    pub(crate) fn keep(&mut self, start: impl FnOnce() -> Result<Running>) -> Result<()> {
        let is_over = self.running.as_mut().map(Running::is_over).transpose()?;
        if is_over == Some(true) {
            self.running = None;
        }
        self.follow(start).map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inside::command::{start, within};

    #[test]
    fn a_command_runs_while_its_file_is_there() {
        let dir = tempfile::tempdir().unwrap();
        let file: &'static str = Box::leak(dir.path().join("wanted").to_str().unwrap().to_owned().into_boxed_str());
        let mut command = OnDemand::new(file, Signal::TERM);
        let sleeps = || start("sleep 60");
        assert!(!command.follow(sleeps).unwrap() && command.running.is_none());
        std::fs::write(file, "").unwrap();
        assert!(!command.follow(sleeps).unwrap());
        let first = command.running.as_ref().unwrap().pid();
        assert!(!command.follow(sleeps).unwrap());
        assert_eq!(command.running.as_ref().unwrap().pid(), first);
        // One that ends by itself.
        command.running.as_ref().unwrap().signal(Signal::KILL).unwrap();
        within(60, "it has ended", || command.running.as_mut().unwrap().is_over()).unwrap();
        assert!(!command.follow(sleeps).unwrap());
        assert_eq!(command.running.as_ref().unwrap().pid(), first);
        command.keep(sleeps).unwrap();
        assert_ne!(command.running.as_ref().unwrap().pid(), first);
        std::fs::remove_file(file).unwrap();
        assert!(command.follow(sleeps).unwrap() && command.running.is_none());
    }
}
