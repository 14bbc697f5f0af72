//! The nice values of the daemon's threads at SCHED_OTHER. No thread keeps the value that it inherited by chance.
//!
//! While a method is applied, real-time tenants run above these threads, and a polling NAPI thread may leave only 5 %
//! of a CPU to all threads without real-time priority. The threads of bulk NICs at nice -20 compete for that, and
//! requests shall be answered even then, so the main thread and `ontime-http` have [`APPLYING`]. While nothing is
//! applied, and as soon as a reset has ended the caps, vCPUs are ordinary threads beside the daemon, so both have
//! [`ORDINARY`]: a reset takes its time from VMs as another thread would, and yet ends soon beside bulk work. Beside
//! threads that poll until the reset itself restores them, it might not, so after [`PATIENCE`] it hurries
//! ([`Hurrying`]). Threads that only hand data to the main thread stay at [`APPLYING`].

use std::cell::RefCell;
use std::time::{Duration, Instant};

use ontime_hostnet::{Host, Knob, KnobError, Value};
use ontime_tenants::remedy;
use rustix::process::{Pid, setpriority_process};

use crate::daemon::config::Mode;

/// The nice value while a method is applied. [`Due`](super::due::Due) makes sure that bulk work gets its part.
pub(super) const APPLYING: i32 = -20;
/// The nice value otherwise, and of threads that serve everybody or free memory.
pub(super) const ORDINARY: i32 = 0;

/// How long a reset restores settings at [`ORDINARY`]. Usually it takes a fraction of this; systemd's watchdog waits
/// for 60 s.
const PATIENCE: Duration = Duration::from_secs(5);

/// Gives the calling thread a nice value of its own. Lowering it again needs no privilege; without the privilege to
/// raise it, the thread works on, as the main thread's warning says.
pub(super) fn of_this_thread(nice: i32) {
    if let Err(error) = setpriority_process(None, nice) {
        tracing::debug!("taking nice {nice}: {error}");
    }
}

/// The nice value of the main thread, and of the thread `ontime-http`, which follows it.
#[derive(Debug, Default)]
pub(crate) struct MainNice {
    /// None: not set yet.
    value: Option<i32>,
    http: Option<Pid>,
}

impl MainNice {
    /// The value with which a daemon in this mode starts.
    pub(super) fn in_mode(mode: Mode) -> Self {
        let mut nice = Self::default();
        nice.take(match mode {
            Mode::Enforce => APPLYING,
            Mode::Observe => ORDINARY,
        });
        nice
    }

    /// `ontime-http` is this thread.
    pub(super) fn followed_by(&mut self, http: Pid) {
        self.http = Some(http);
        let value = self.value.unwrap_or(ORDINARY);
        if let Err(error) = setpriority_process(self.http, value) {
            tracing::debug!("nice {value} for ontime-http: {error}");
        }
    }

    /// Gives both threads this value, also if it was changed from outside since.
    pub(super) fn take(&mut self, value: i32) {
        let is_new = self.value.replace(value) != Some(value);
        let threads = std::iter::once(None).chain(self.http.map(Some));
        let Some(error) = threads.filter_map(|thread| setpriority_process(thread, value).err()).next() else { return };
        if is_new {
            let why = remedy(&error.into());
            tracing::warn!("taking nice {value}: {error}; answers may take long beside bulk work; {why}");
        }
    }
}

/// The host during a reset. The main thread takes [`APPLYING`] again at the first knob after [`PATIENCE`].
pub(super) struct Hurrying<'a> {
    host: &'a dyn Host,
    nice: RefCell<&'a mut MainNice>,
    end: Instant,
}

impl<'a> Hurrying<'a> {
    /// A reset begins now.
    pub(super) fn new(host: &'a dyn Host, nice: &'a mut MainNice, now: Instant) -> Self {
        Self { host, nice: RefCell::new(nice), end: now + PATIENCE }
    }

    fn hurry(&self) {
        let mut nice = self.nice.borrow_mut();
        if Instant::now() > self.end && nice.value != Some(APPLYING) {
            nice.take(APPLYING);
        }
    }
}

impl Host for Hurrying<'_> {
    fn read(&self, knob: &Knob) -> Result<Value, KnobError> {
        self.hurry();
        self.host.read(knob)
    }

    fn write(&self, knob: &Knob, value: &Value) -> Result<(), KnobError> {
        self.hurry();
        self.host.write(knob, value)
    }
}

#[cfg(test)]
mod tests {
    use ontime_hostnet::Root;
    use rustix::process::getpriority_process;

    use super::*;

    struct NoHost;

    impl Host for NoHost {
        fn read(&self, knob: &Knob) -> Result<Value, KnobError> {
            Err(KnobError::Gone(knob.to_string()))
        }

        fn write(&self, knob: &Knob, _: &Value) -> Result<(), KnobError> {
            Err(KnobError::Gone(knob.to_string()))
        }
    }

    #[test]
    fn a_reset_hurries_only_after_its_patience() {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: this test needs root");
            return;
        }
        let knob = Knob::HostFile { root: Root::Sys, path: "of/x".to_owned() };
        let mut nice = MainNice::default();
        nice.take(ORDINARY);
        let after_a_read = |start: Instant, nice: &mut MainNice| {
            assert!(Hurrying::new(&NoHost, nice, start).read(&knob).is_err());
            getpriority_process(None).unwrap()
        };
        assert_eq!(after_a_read(Instant::now(), &mut nice), ORDINARY);
        let long_ago = Instant::now().checked_sub(2 * PATIENCE).unwrap();
        assert_eq!(after_a_read(long_ago, &mut nice), APPLYING);
        nice.take(ORDINARY);
        assert_eq!(getpriority_process(None).unwrap(), ORDINARY);
    }
}
