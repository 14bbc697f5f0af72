//! `ontime daemon`: keeps every thread of the path at its place.
//!
//! In: events (`events`), configuration (`config`), requests (`http`). Out: the host set up as planned (`engine`),
//! runtime caps (`cap`), protections restored if the daemon dies (`guardian`), metrics (`metrics`).
//!
//! | thread | priority | does | waits in |
//! |---|---|---|---|
//! | main | SCHED_OTHER, nice -20 or 0 (`nice`) | passes over the host, answers | epoll: `events` |
//! | `ontime-cap` | FIFO base + 5 (55) | caps: pauses spinning threads | epoll: orders, interrupts; time-out |
//! | `ontime-sight` | SCHED_OTHER, nice -20 | reads for the cap watcher (`cap::sight`) | futex |
//! | `ontime-pace/CPU` | FIFO base + 4 (54) | reserved CPU time: changes vCPUs' places | futex with time-out |
//! | `ontime-read/CPU` | FIFO base + 3 (53) | reads for a pacer (`sched::run::reader`) | futex |
//! | `ontime-http` | SCHED_OTHER, nice as main | HTTP on the Unix socket | epoll (tokio) |
//! | `ontime-metrics` | SCHED_OTHER, nice 0 | metrics over TCP (`metrics::listener`) | epoll (tokio) |
//! | `ontime-guest` | SCHED_OTHER, nice -20 | receives from a device process (`guests::receiver`) | poll |
//! | `ontime-close` | SCHED_OTHER, nice 0 | closes files of others | futex |
//! | `ontime-ask` | SCHED_OTHER, nice as main, which waits for it | asks a QEMU's monitor (`tenants::qmp`) | poll |
//! | `ontime-life` | FIFO base + 6 (56) | nothing; shows the guardian that the daemon lives (`life`) | read of a pipe |
//! | guardian (a process) | FIFO base + 6 (56) | restores protections when the daemon dies | poll of two pipes |
//! | `ontime-change` of the guardian | FIFO base + 5 (55) | changes threads' policies for the guardian | channel |
//!
//! Pacers exist from the first reservation on. Their readers are at SCHED_OTHER while a read takes long.
//! `ontime-metrics` exists where daemon.toml has a port. `ontime-guest` and `ontime-ask` have descriptor tables of
//! their own. These two, `ontime-read`, `ontime-sight` and `ontime-change` are abandoned if they do not end.
//!
//! Only these poll: the caps and the pacers, while a thread is at real-time priority; the look at the daemon's own
//! threads (`own`), once a second, while it caps or paces a thread; the census of real-time threads, once a second,
//! while the kernel's protections are off; adaptive busy polling, where it is configured, ten times a
//! second. A host without RT tenants costs one look every `rescan-seconds`.

pub(crate) mod cap;
mod census;
pub(crate) mod config;
pub(crate) mod demoted;
mod due;
pub(crate) mod engine;
mod ethtool;
mod events;
pub mod fuzzing;
pub(crate) mod guardian;
pub(crate) mod guests;
mod held;
mod http;
pub(crate) mod keeper;
mod life;
mod lock;
pub(crate) mod metrics;
mod nice;
mod own;
pub(crate) mod protections;
mod request_queue;
mod requested;
pub(crate) mod view;
mod watches;

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use ontime_hostnet::Report;
use ontime_tenants::remedy;
use rustix::event::EventfdFlags;
use sd_notify::NotifyState;

use self::config::Config;
use self::due::Due;
use self::engine::Engine;
use self::events::{Event, Events};
use self::guests::{Guests, Question};
use self::http::{Ask, Asked, Loop};
use self::metrics::Server;
use self::request_queue::{RequestQueue, request_queue};
use crate::api;
use crate::exit::{Doing, Exit};
use crate::paths::Paths;

/// `ontime daemon`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// The most requests answered in one round of events, so that clients which ask again at once do not delay passes,
/// signals and the watchdog.
const ANSWERS: usize = 8;

/// Runs the daemon until SIGTERM or SIGINT.
///
/// # Errors
/// Where another daemon runs, the configuration is wrong, or a directory cannot be used.
pub(crate) fn run(_args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    preflight()?;
    crate::log::start();
    raise_file_limit();
    std::fs::create_dir_all(&paths.run_dir)
        .doing(format_args!("{}: making the run directory", paths.run_dir.display()))?;
    let lock = lock::take(&paths.lock())?;
    let config = Config::load(&paths.config_dir)?;
    // What a former daemon has applied may still be there.
    let nice = nice::MainNice::in_mode(config.daemon.mode);
    // From here on SIGTERM ends the daemon in an orderly way.
    let bell = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let events = Events::new(&paths.poke(), bell.try_clone()?).doing("setting up events")?;
    let (asks, asked) = sync_channel(request_queue::BACKLOG);
    guardian::wait_for_former(paths);
    let mut engine = Engine::new(paths.clone(), config, nice)?;
    // A client that connects before this gets `no daemon` at once.
    let socket = paths.socket();
    let listener = http::bind(&socket).doing(format_args!("{}: listening", socket.display()))?;
    events.add(engine.watcher(), Event::Tenants)?;
    let to = Loop::new(asks, bell);
    engine.serve_by(http::serve(listener, to.clone()).doing("starting the HTTP server")?);
    for why in events.rescan_reasons() {
        tracing::warn!("events: {why}");
    }
    let due = Due::new(Instant::now());
    let scrapes = (Server::default(), to);
    let (requests, guests) = (request_queue(), Guests::default());
    let mut daemon =
        Daemon { engine, events, asked, requests, scrapes, guests, due, followed: 0, told: BTreeSet::new() };
    daemon.serve_metrics();
    daemon.pass("start");
    notify(&[NotifyState::Ready, NotifyState::Status(daemon.engine.word())]);
    let result = daemon.run();
    notify(&[NotifyState::Stopping]);
    daemon.engine.stop();
    let _ = std::fs::remove_file(&socket);
    drop(lock);
    result.map(|()| ExitCode::SUCCESS)
}

/// Refuses to start where the daemon could do nothing at all.
fn preflight() -> anyhow::Result<()> {
    if !rustix::process::geteuid().is_root() {
        anyhow::bail!(
            "the daemon places other users' and the kernel's threads: run it as root (systemctl start ontimed)"
        );
    }
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease")
        .doing("/proc/sys/kernel/osrelease: reading the kernel's version")?;
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(|n| n.parse::<u32>().unwrap_or(0));
    let version = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
    if version < OLDEST {
        let message = format!(
            "Linux {} has no pidfds, without which a thread cannot be named safely; boot Linux {}.{} or newer",
            release.trim(),
            OLDEST.0,
            OLDEST.1
        );
        return Err(Exit::unknown(message).into());
    }
    Ok(())
}

/// Raises the limit of open files: every capped thread takes three descriptors. A shell's soft limit is 1024, and its
/// hard limit may be the kernel's default, 4096. More takes CAP_SYS_RESOURCE, which root has outside the unit (the
/// unit's own limit is enough).
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let most = limit.maximum.map(|hard| hard.max(config::DESCRIPTORS_MOST as u64));
    let raised = setrlimit(Resource::Nofile, Rlimit { current: most, maximum: most })
        .or_else(|_| setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }));
    if let Err(error) = raised {
        tracing::debug!("raising the limit of open files: {error}");
    }
}

/// pidfd_open(2) exists from this version on.
const OLDEST: (u32, u32) = (5, 3);

struct Daemon {
    engine: Engine,
    events: Events,
    asked: Receiver<Asked>,
    requests: RequestQueue<Asked>,
    /// The server of metrics over TCP, and how it asks the main loop.
    scrapes: (Server, Loop),
    guests: Guests,
    due: Due,
    /// The number of passes that have been followed up.
    followed: u64,
    /// The watcher's reasons for rescans that have been logged.
    told: BTreeSet<String>,
}

impl Daemon {
    fn run(&mut self) -> anyhow::Result<()> {
        loop {
            self.arm();
            let events: BTreeSet<Event> = self.events.wait().doing("waiting for events")?.into_iter().collect();
            for event in events {
                match event {
                    Event::Stop => return Ok(()),
                    Event::Reload => drop(self.reload()),
                    Event::Cpus => {
                        self.engine.cpus_changed();
                        self.want(event);
                    }
                    Event::Links | Event::Queues | Event::Poked => self.want(event),
                    Event::Tenants => {
                        if self.engine.tenants_changed().doing("waiting for tenants' events")?.is_some() {
                            self.want(event);
                        }
                    }
                    Event::Guests => self.answer_guests(),
                    Event::Request | Event::Clock | Event::Lease => {}
                }
            }
            self.answer();
            if self.engine.end_leases() {
                self.want(Event::Lease);
            }
            self.pass_if_due();
            if self.engine.look_at_traffic() {
                self.pass("traffic");
            }
            if self.engine.look_at_real_time() {
                self.pass("threads");
            }
            if self.engine.look_at_own_threads() {
                self.pass("threads");
            }
            if watchdog().is_some() {
                notify(&[NotifyState::Watchdog]);
            }
        }
    }

    /// Requests a pass soon.
    fn want(&mut self, event: Event) {
        self.due.want(event, self.engine.last_pass(), Instant::now());
    }

    fn pass_if_due(&mut self) {
        let (event, at) = self.due.next(self.engine.rescan());
        if at <= Instant::now() {
            self.pass(event.word());
        }
    }

    fn arm(&self) {
        let (_, at) = self.due.next(self.engine.rescan());
        let wait = at.saturating_duration_since(Instant::now());
        let others = watchdog().into_iter().chain(self.engine.look_in()).chain(self.engine.lease_ends_in());
        let others = others.chain(self.requests.due_in(Instant::now()));
        let soonest = others.fold(wait, Duration::min);
        self.events.wake_in(soonest);
    }

    fn pass(&mut self, reason: &str) -> Report {
        self.due.begins(Instant::now());
        let report = self.engine.pass(reason);
        self.passed();
        report
    }

    /// Follows up a pass, including one that a request caused.
    fn passed(&mut self) {
        for why in untold(self.engine.watcher().rescan_reasons(), &mut self.told) {
            tracing::warn!("tenants: {why}");
        }
        if self.engine.passes() == self.followed {
            return;
        }
        // Read this first: the code below may run another pass.
        let needs_second_write = self.engine.needs_second_write();
        self.engine.follow_tenants();
        let wanted = self.engine.asking();
        for gone in self.guests.follow(&wanted, self.engine.run_dir(), &self.events) {
            self.engine.guest_gone(&gone);
        }
        // Bandwidth remembered from an earlier daemon is given up if the VM's device process is not connected.
        for vm in self.engine.asked_for() {
            if !self.guests.has(&vm) && !self.engine.looks_again() {
                self.engine.guest_gone(&vm);
            }
        }
        self.followed = self.engine.passes();
        self.due.ended(
            self.engine.looks_again(),
            needs_second_write || self.engine.needs_second_write(),
            Instant::now(),
        );
    }

    /// Answers guests' requests for bandwidth, at most one of each VM. One that needs a pass makes the VM's next one
    /// wait ([`Guests::charge`]), so no guest floods this loop.
    fn answer_guests(&mut self) {
        for Question { vm, seq, ask } in self.guests.take() {
            let start = Instant::now();
            let refused = seq.map(|seq| (seq, self.engine.guest_asks(&vm, ask).err()));
            if refused.is_none_or(|(seq, refused)| self.guests.answer(&vm, seq, refused.as_deref())) {
                self.engine.guest_gone(&vm);
            }
            self.guests.charge(&vm, start.elapsed());
        }
        self.passed();
    }

    fn reload(&mut self) -> Result<api::Report, api::RefusedConfiguration> {
        let reloading = NotifyState::monotonic_usec_now().map(|now| notify(&[NotifyState::Reloading, now]));
        let done = match self.engine.reload() {
            Ok(()) => {
                self.serve_metrics();
                let report = self.pass(Event::Reload.word());
                tracing::info!("configuration reloaded");
                notify(&[NotifyState::Status(self.engine.word())]);
                Ok(self.engine.reloaded(&report))
            }
            Err(refused) => {
                tracing::error!("configuration not reloaded, the former one stays in force: {refused}");
                let status = format!("{}; the new configuration was refused: {refused}", self.engine.word());
                notify(&[NotifyState::Status(&status)]);
                Err(refused)
            }
        };
        if reloading.is_ok() {
            notify(&[NotifyState::Ready]);
        }
        done
    }

    /// Serves metrics over TCP if the configuration says so.
    fn serve_metrics(&mut self) {
        let (server, to) = &mut self.scrapes;
        let address = self.engine.metrics_address();
        let done = server.follow(address, to).map_err(|error| match address {
            Some(address) => {
                format!("not served at {address} (metrics.port in daemon.toml): {error}; {}", remedy(&error))
            }
            None => format!("{error}; {}", remedy(&error)),
        });
        self.engine.metrics_served(done.err());
    }

    /// Answers waiting requests; those beyond [`ANSWERS`], and those of users whose part of the time is used up, wait
    /// for a later round.
    fn answer(&mut self) {
        for asked in self.asked.try_iter() {
            self.requests.push(asked.user, asked);
        }
        for _ in 0..ANSWERS {
            let start = Instant::now();
            let Some((user, Asked { ask, waiting, .. })) = self.requests.next(start) else { return };
            self.answer_one(ask);
            drop(waiting);
            let end = Instant::now();
            self.requests.charge(user, end - start, end);
        }
        self.events.wake_for_requests();
    }

    /// Answers a request. A client may have gone; then its answer is dropped.
    fn answer_one(&mut self, ask: Ask) {
        match ask {
            Ask::Tenants(answer) => drop(answer.send(self.engine.tenants())),
            Ask::Status(answer) => drop(answer.send(self.engine.status())),
            Ask::Nics(answer) => drop(answer.send(self.engine.nics())),
            Ask::Reservations(answer) => drop(answer.send(self.engine.reservations())),
            Ask::Reserve { name, request, uid, answer } => {
                drop(answer.send(self.engine.reserve(&name, request, uid)));
                self.passed();
            }
            Ask::Unreserve { name, uid, answer } => {
                drop(answer.send(self.engine.unreserve(&name, uid)));
                self.passed();
            }
            Ask::Metrics(answer) => drop(answer.send(self.engine.metrics_text())),
            Ask::Apply(request, answer) => {
                drop(answer.send(self.engine.apply_request(&request)));
                self.passed();
            }
            Ask::Reload(answer) => drop(answer.send(self.reload())),
            Ask::Reset(answer) => drop(answer.send(self.engine.reset())),
        }
    }
}

/// The reasons that are not among those `told`, which are added to them.
fn untold<'a>(reasons: impl Iterator<Item = &'a str>, told: &mut BTreeSet<String>) -> Vec<&'a str> {
    reasons.filter(|why| told.insert((*why).to_owned())).collect()
}

/// Half of systemd's watchdog time, if the unit sets one.
fn watchdog() -> Option<Duration> {
    let mut usec = 0;
    sd_notify::watchdog_enabled(false, &mut usec).then(|| Duration::from_micros(usec / 2))
}

/// Notifies systemd, if the daemon runs under systemd.
fn notify(states: &[NotifyState]) {
    if let Err(error) = sd_notify::notify(false, states) {
        tracing::debug!("sd_notify: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_that_comes_later_is_told_and_each_once() {
        let mut told = BTreeSet::new();
        assert_eq!(untold(["no events"].into_iter(), &mut told), ["no events"]);
        assert_eq!(untold(["no events", "not watched"].into_iter(), &mut told), ["not watched"]);
        assert!(untold(["not watched"].into_iter(), &mut told).is_empty());
    }
}
