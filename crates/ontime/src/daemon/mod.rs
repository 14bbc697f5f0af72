//! `ontime daemon`: keeps every thread of the path at its place.
//!
//! In: events (`events`), configuration (`config`), requests (`http`). Out: the host as the plan wants it (`engine`),
//! runtime caps (`cap`), protections put back should we die (`guardian`), metrics (`metrics`).
//!
//! | thread | priority | does | waits in |
//! |---|---|---|---|
//! | main | SCHED_OTHER | passes over the host, answers | epoll: signals, links, tenants, hooks, requests, clock |
//! | `ontime-cap` | FIFO base + 5 (55) | caps: takes spinning threads off their place and back | epoll: orders; its time-out: looks, pauses' ends |
//! | `ontime-pace/CPU` | FIFO base + 4 (54) | shares of CPU time: changes vCPUs' places by the plan; there from the first reservation on | futex with time-out |
//! | `ontime-http` | SCHED_OTHER | HTTP on the Unix socket | epoll (tokio) |
//! | `ontime-metrics` | SCHED_OTHER, nice 0 | metrics over TCP, where daemon.toml has a port (`metrics::listener`) | epoll (tokio) |
//! | `ontime-guest` | SCHED_OTHER | receives from a device process, in a table of descriptors of its own (`guests::receiver`) | poll |
//! | `ontime-life` | FIFO base + 6 (56) | nothing; its end tells the guardian of the daemon's (`life`) | read of a pipe |
//! | guardian (a process) | FIFO base + 6 (56) | puts protections back when the daemon dies | poll of two pipes |
//!
//! Nothing polls but the caps, the pacers, while a thread is at real-time priority, the census of real-time threads
//! while the kernel's protections are off, once a second, and adaptive busy polling where it is configured, which
//! looks at its NICs ten times a second: a host without RT tenants costs a look every `rescan-seconds`.

pub mod cap;
mod census;
pub mod config;
pub mod demoted;
mod due;
pub mod engine;
mod ethtool;
mod events;
pub mod guardian;
pub mod guests;
mod held;
mod http;
pub mod keeper;
mod life;
mod lock;
pub mod metrics;
pub mod protections;
pub mod view;
mod watches;

use std::collections::BTreeSet;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, sync_channel};
use std::time::{Duration, Instant};

use ontime_hostnet::Report;
use ontime_tenants::remedy;
use ontime_tenants::watch::Watcher;
use rustix::event::EventfdFlags;
use sd_notify::NotifyState;

use self::config::Config;
use self::due::Due;
use self::engine::Engine;
use self::events::{Event, Events};
use self::guests::Guests;
use self::http::{Ask, Loop};
use self::metrics::Server;
use crate::api;
use crate::exit::{Doing, Exit};
use crate::paths::Paths;

/// `ontime daemon`
#[derive(Debug, clap::Args)]
pub struct Args {}

/// The most requests answered in one round of events: passes, signals and the watchdog have their turn beside those who
/// ask again as soon as they are answered.
const ANSWERS: usize = 8;

/// Runs the daemon until SIGTERM or SIGINT.
///
/// # Errors
/// Where another daemon runs, the configuration is wrong, or a directory cannot be used.
pub fn run(_args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    preflight()?;
    crate::log::start();
    raise_file_limit();
    stand_before_bulk();
    std::fs::create_dir_all(&paths.run_dir)
        .doing(format_args!("{}: making the run directory", paths.run_dir.display()))?;
    let lock = lock::take(&paths.lock())?;
    let config = Config::load(&paths.config_dir)?;
    // Signals first: from here on SIGTERM ends in an orderly way.
    let bell = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?);
    let events = Events::new(&paths.poke(), bell.try_clone()?).doing("setting up events")?;
    let (asks, asked) = sync_channel(http::BACKLOG);
    guardian::wait_for_former(paths);
    let engine = Engine::new(paths.clone(), config)?;
    // A client that asks before the engine is ready gets `no daemon` at once.
    let socket = paths.socket();
    let listener = http::bind(&socket).doing(format_args!("{}: listening", socket.display()))?;
    let watcher = Watcher::new(engine.sources()).doing("watching tenants")?;
    events.add(&watcher, Event::Tenants)?;
    let to = Loop::new(asks, bell);
    http::serve(listener, to.clone()).doing("starting the HTTP server")?;
    if let Some(why) = watcher.blind() {
        tracing::warn!("tenants: {why}");
    }
    let due = Due::new(Instant::now());
    let scrapes = (Server::default(), to);
    let mut daemon = Daemon { engine, events, watcher, asked, scrapes, guests: Guests::default(), due, followed: 0 };
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

/// Refuses where the daemon could do nothing at all.
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

/// Every capped thread takes three descriptors. A shell's soft limit is 1024, and its hard one may be the kernel's
/// default, 4096; beyond that it takes CAP_SYS_RESOURCE, which root has outside the unit (whose limit is enough).
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

/// The main and the HTTP thread (this one makes both): who asks is answered also where a polling NAPI thread leaves all
/// that is not real-time 5 %, and bulk NICs' threads at nice -20 take those. That bulk has its part is by [`Due`].
fn stand_before_bulk() {
    if let Err(error) = rustix::process::setpriority_process(None, -20) {
        tracing::warn!("taking nice -20: {error}; answers may take long beside bulk work; {}", remedy(&error.into()));
    }
}

/// pidfd_open(2).
const OLDEST: (u32, u32) = (5, 3);

struct Daemon {
    engine: Engine,
    events: Events,
    watcher: Watcher,
    asked: Receiver<Ask>,
    /// Metrics over TCP, and whom they come from.
    scrapes: (Server, Loop),
    guests: Guests,
    due: Due,
    /// The passes that were followed up.
    followed: u64,
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
                        if self.watcher.take().doing("waiting for tenants' events")?.is_some() {
                            self.want(event);
                        }
                    }
                    Event::Request => self.answer(),
                    Event::Guests => self.answer_guests(),
                    Event::Clock => {}
                }
            }
            self.pass_if_due();
            if self.engine.look_at_traffic() {
                self.pass("traffic");
            }
            if self.engine.look_at_real_time() {
                self.pass("threads");
            }
            if watchdog().is_some() {
                notify(&[NotifyState::Watchdog]);
            }
        }
    }

    /// Asks for a pass, soon.
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
        let soonest = watchdog().into_iter().chain(self.engine.look_in()).fold(wait, Duration::min);
        self.events.wake_in(soonest);
    }

    fn pass(&mut self, reason: &str) -> Report {
        self.due.begins(Instant::now());
        let report = self.engine.pass(reason);
        self.passed();
        report
    }

    /// Follows up what passes have found, if there was one: also one that an answer took.
    fn passed(&mut self) {
        if self.engine.passes() == self.followed {
            return;
        }
        // Of the pass before those that may follow here.
        let insists = self.engine.insists();
        if let Err(error) = self.watcher.follow(self.engine.found(), self.engine.rules()) {
            // Its own rescan still finds what this follow misses.
            tracing::debug!("following tenants: {error}");
        }
        let wanted = self.engine.asking();
        for gone in self.guests.follow(&wanted, self.engine.run_dir(), &self.events) {
            self.engine.guest_gone(&gone);
        }
        // Remembered of an earlier daemon, and nobody is there any more to say it.
        for vm in self.engine.asked_for() {
            if !self.guests.has(&vm) && !self.engine.looks_again() {
                self.engine.guest_gone(&vm);
            }
        }
        self.followed = self.engine.passes();
        self.due.ended(self.engine.looks_again(), insists || self.engine.insists(), Instant::now());
    }

    /// Admits what guests ask for, one after the other. Who asks often waits for the answer each time, and its device
    /// process has a limit.
    fn answer_guests(&mut self) {
        for question in self.guests.take() {
            let Some(seq) = question.seq else {
                self.engine.guest_gone(&question.vm);
                continue;
            };
            let refused = self.engine.guest_asks(&question.vm, question.ask).err();
            if self.guests.answer(&question.vm, seq, refused.as_deref()) {
                self.engine.guest_gone(&question.vm);
            }
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

    /// Metrics over TCP, as the configuration says.
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

    /// Answers what waits, the rest in the next round. An asker that went away meanwhile is nobody's loss.
    fn answer(&mut self) {
        for _ in 0..ANSWERS {
            let Ok(ask) = self.asked.try_recv() else { return };
            match ask {
                Ask::Tenants(answer) => drop(answer.send(self.engine.tenants())),
                Ask::Status(answer) => drop(answer.send(self.engine.status())),
                Ask::Nics(answer) => drop(answer.send(self.engine.nics())),
                Ask::Reservations(answer) => drop(answer.send(self.engine.reservations())),
                Ask::Metrics(answer) => drop(answer.send(self.engine.metrics_text())),
                Ask::Apply(request, answer) => {
                    drop(answer.send(self.engine.apply_request(&request)));
                    self.passed();
                }
                Ask::Reload(answer) => drop(answer.send(self.reload())),
                Ask::Reset(answer) => drop(answer.send(self.engine.reset())),
            }
        }
        self.events.wake_for_requests();
    }
}

/// Half of systemd's watchdog time, where it set one.
fn watchdog() -> Option<Duration> {
    let mut usec = 0;
    sd_notify::watchdog_enabled(false, &mut usec).then(|| Duration::from_micros(usec / 2))
}

/// Tells systemd, if it started us.
fn notify(states: &[NotifyState]) {
    if let Err(error) = sd_notify::notify(false, states) {
        tracing::debug!("sd_notify: {error}");
    }
}
