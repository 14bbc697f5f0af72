//! Threads beyond a tenant's quota of capped threads, which the daemon has put at SCHED_OTHER, and the policies that
//! they had.
//!
//! They are no part of the plan, so the journal does not have them. They are kept in a file of their own, which is
//! written before a thread is changed: a daemon that is killed leaves it to the next one, and to `ontime reset`. The
//! file is below the run directory, because it holds for this boot only. Entries that another version of Ontime wrote,
//! and that this version cannot read, stay in the file.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;

use ontime_tenants::{Policy, ThreadId, remedy};
use serde::Deserialize;

/// The threads, and the file.
#[derive(Debug)]
pub(crate) struct Demoted {
    path: PathBuf,
    threads: BTreeMap<ThreadId, Policy>,
    written: BTreeMap<ThreadId, Policy>,
    /// Entries of another version, as they were written.
    foreign: Vec<serde_json::Value>,
}

impl Demoted {
    /// Reads the threads that an earlier daemon of this boot has demoted and that still run, if the file can be read.
    pub(crate) fn open(path: PathBuf) -> Self {
        let read = match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice::<Vec<serde_json::Value>>(&text).map_err(io::Error::from),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        };
        let read = read.unwrap_or_else(|error| {
            tracing::warn!(
                "{}: {error}; threads beyond a quota keep SCHED_OTHER on reset; restart these tenants after one",
                path.display()
            );
            Vec::new()
        });
        let (mut written, mut foreign) = (BTreeMap::new(), Vec::new());
        for entry in read {
            match <(ThreadId, Policy)>::deserialize(&entry) {
                Ok((id, policy)) => _ = written.insert(id, policy),
                Err(_) => foreign.push(entry),
            }
        }
        if !foreign.is_empty() {
            let (path, count) = (path.display(), foreign.len());
            tracing::warn!(
                "{path}: {count} threads beyond a quota were recorded by another version: run `ontime reset` of that \
                 version, or restart these tenants"
            );
        }
        let mut demoted = Self { path, threads: written.clone(), written, foreign };
        demoted.forget_ended();
        demoted
    }

    /// Whether no thread is demoted.
    pub(crate) fn is_empty(&self) -> bool {
        self.threads.is_empty()
    }

    /// The demoted threads.
    pub(crate) fn ids(&self) -> impl Iterator<Item = ThreadId> {
        self.threads.keys().copied()
    }

    /// Forgets threads that have ended.
    pub(crate) fn forget_ended(&mut self) {
        self.threads.retain(|id, _| id.verify().is_ok());
    }

    /// Moves threads with these policies to SCHED_OTHER. Returns the threads for which that succeeded.
    ///
    /// # Errors
    /// The file cannot be written; then no thread was changed.
    pub(crate) fn demote(&mut self, threads: &BTreeMap<ThreadId, Policy>) -> io::Result<BTreeSet<ThreadId>> {
        let before = self.threads.clone();
        self.threads.extend(threads);
        if let Err(error) = self.keep() {
            self.threads = before;
            return Err(error);
        }
        let (done, refused): (BTreeSet<ThreadId>, BTreeSet<ThreadId>) =
            threads.keys().partition(|id| id.set_policy_alone(Policy::BULK).is_ok());
        self.threads.retain(|id, _| !refused.contains(id));
        Ok(done)
    }

    /// Restores the policies of all demoted threads. Returns for how many a policy was restored.
    pub(crate) fn give_back(&mut self) -> usize {
        let is_demoted = |id: &ThreadId| id.policy().is_ok_and(|now| now == Policy::BULK);
        let given = std::mem::take(&mut self.threads)
            .into_iter()
            // Skip threads that have ended, and those whose policy has been changed by another program.
            .filter(|(id, policy)| is_demoted(id) && id.set_policy_alone(*policy).is_ok())
            .count();
        if let Err(error) = self.keep() {
            let path = self.path.display();
            tracing::warn!("{path}: cannot be written: {error}; {}; or remove the file", remedy(&error));
        }
        given
    }

    /// Replaces the file atomically. It is valid for this boot only, so it need not be synced to a disk.
    fn keep(&mut self) -> io::Result<()> {
        if self.threads == self.written {
            return Ok(());
        }
        let new = self.path.with_extension("new");
        let own = self.threads.iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?;
        std::fs::write(&new, serde_json::to_vec(&[self.foreign.as_slice(), &own].concat())?)?;
        std::fs::rename(&new, &self.path)?;
        self.written.clone_from(&self.threads);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    /// Uses SCHED_BATCH for a thread that runs for the length of the test, because that policy needs no right.
    #[test]
    fn the_next_daemon_knows_what_a_killed_one_has_demoted() {
        let (tell, told) = channel();
        let (end, ended) = channel::<()>();
        let idle = std::thread::spawn(move || {
            let tid = rustix::thread::gettid().as_raw_nonzero().get();
            tell.send(ThreadId::of(i32::try_from(std::process::id()).unwrap(), tid).unwrap()).unwrap();
            let _ = ended.recv();
        });
        let own = told.recv().unwrap();
        let gone = ThreadId { start_time: own.start_time + 1, ..own };
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("demoted");
        let batch = Policy::Batch { nice: 0 };
        own.set_policy_alone(batch).unwrap();

        let mut first = Demoted::open(path.clone());
        assert!(first.is_empty());
        let threads = BTreeMap::from([(own, batch), (gone, Policy::Fifo(9))]);
        assert_eq!(first.demote(&threads).unwrap(), BTreeSet::from([own]));
        assert_eq!(own.policy().unwrap(), Policy::BULK);
        // A killed daemon writes nothing more.
        std::mem::forget(first);
        let mut next = Demoted::open(path.clone());
        assert!(next.ids().eq([own]), "a number that another thread has by now is none of them");
        assert_eq!((next.give_back(), own.policy().unwrap()), (1, batch));
        assert!(next.is_empty() && Demoted::open(path.clone()).is_empty());

        // A later version knows more policies; what it wrote is there after this version has used the file.
        let later = format!("[[{},{{\"ext\":{{\"slice\":7}}}}]]", serde_json::to_string(&gone).unwrap());
        std::fs::write(&path, &later).unwrap();
        own.set_policy_alone(batch).unwrap();
        let mut older = Demoted::open(path.clone());
        assert!(older.is_empty());
        assert_eq!(older.demote(&BTreeMap::from([(own, batch)])).unwrap(), BTreeSet::from([own]));
        assert_eq!((older.give_back(), own.policy().unwrap()), (1, batch));
        let json = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
        assert_eq!(json(&std::fs::read_to_string(&path).unwrap()), json(&later));

        std::fs::write(&path, "[").unwrap();
        assert!(Demoted::open(path).is_empty());
        // If the file cannot be written, no policy is changed.
        let mut nowhere = Demoted::open(dir.path().join("none/demoted"));
        assert!(nowhere.demote(&threads).is_err() && nowhere.is_empty());
        assert_eq!(own.policy().unwrap(), batch);
        drop(end);
        idle.join().unwrap();
    }
}
