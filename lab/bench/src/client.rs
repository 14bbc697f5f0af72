//! The RT client: sends a request, waits for the reply, waits 1 to 10 ms, and repeats.
//!
//! In: a [`ClientConfig`]. Out: requests on the wire, [`Progress`] while it runs, a [`ClientReport`]. The client
//! measures no latency; the monitor does ([`crate::wire`]). It waits by this process's clock: inside an emulated
//! machine that is the clock of the host under test.
//!
//! The load is that of Access'18, IV-A: netperf's UDP request/response, changed to random inter-arrival times of 1 to
//! 10 ms. Here the gaps are uniform, seeded, and start at the reply. The loop is closed: one request is in flight at a
//! time, so a slow reply delays later requests, as with the paper's client. The server is a stock `sockperf server`
//! (see [`crate::sockperf`]), or the server of another [`Peer`].

use std::fmt;
use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use ontime_figures::number;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use serde::{Deserialize, Serialize};

use crate::sockperf;

/// Default message size, bytes.
pub(crate) const MESSAGE_BYTES: usize = 16;

/// Configuration of the client.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientConfig {
    /// The server.
    pub server: SocketAddr,
    /// Message size, bytes, [`sockperf::HEADER`] to [`sockperf::LONGEST`].
    pub message_bytes: usize,
    /// Shortest time from a reply to the next request, us.
    pub min_gap_us: u64,
    /// Longest time from a reply to the next request, us.
    pub max_gap_us: u64,
    /// Gaps are about normally distributed around the middle of that range: each is the mean of twelve uniform values,
    /// so the standard deviation is a twelfth of the range. Otherwise gaps are uniform.
    pub normal_gaps: bool,
    /// Time after which a request without a reply counts as lost, us.
    pub timeout_us: u64,
    /// Number of answered requests after which the client ends.
    pub requests: Option<u64>,
    /// Number of lost requests in a row after which the client fails.
    pub give_up_after: u64,
    /// Seed of the gaps.
    pub seed: u64,
}

impl ClientConfig {
    /// The paper's load against `server`: gaps of 1 to 10 ms, messages of [`MESSAGE_BYTES`] bytes,
    /// `requests` replies.
    pub fn new(server: SocketAddr, requests: u64, seed: u64) -> Self {
        Self {
            server,
            message_bytes: MESSAGE_BYTES,
            min_gap_us: 1_000,
            max_gap_us: 10_000,
            normal_gaps: false,
            timeout_us: 1_000_000,
            requests: Some(requests),
            give_up_after: 100,
            seed,
        }
    }

    /// Sends a request every 0.1 s, `tries` times, until the server answers once. For waiting until a guest has booted.
    pub fn probe(server: SocketAddr, tries: u64) -> Self {
        let (min_gap_us, max_gap_us) = (1_000, 1_000);
        Self { min_gap_us, max_gap_us, timeout_us: 100_000, give_up_after: tries, ..Self::new(server, 1, 0) }
    }

    fn check(&self) -> Result<(), ClientError> {
        let wrong = |what: String| Err(ClientError::Config(what));
        if !(sockperf::HEADER..=sockperf::LONGEST).contains(&self.message_bytes) {
            let (least, most) = (sockperf::HEADER, sockperf::LONGEST);
            return wrong(format!("a message of {} bytes is not one of {least} to {most}", self.message_bytes));
        }
        if self.min_gap_us > self.max_gap_us || self.max_gap_us > 1_000_000_000 {
            return wrong(format!("gaps of {} to {} us are no range within 1000 s", self.min_gap_us, self.max_gap_us));
        }
        if self.timeout_us == 0 || self.give_up_after == 0 {
            return wrong("timeout_us and give_up_after must be at least 1".to_string());
        }
        Ok(())
    }
}

/// Why the client failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// The configuration is invalid.
    #[error("the RT client's configuration is wrong: {0}")]
    Config(String),
    /// A socket call failed.
    #[error("the RT client cannot {what} {address}: {source}; check the client's namespace, address and route")]
    Socket {
        /// The operation that failed.
        what: &'static str,
        /// The address.
        address: SocketAddr,
        /// The system's error.
        source: std::io::Error,
    },
    /// The server does not answer.
    #[error(
        "{server} did not answer {requests} requests in a row; check that the server (`sockperf server`, memcached) \
         runs there, by the guest's console"
    )]
    NoReply {
        /// The server.
        server: SocketAddr,
        /// Number of requests without a reply.
        requests: u64,
        /// The report so far.
        report: Box<ClientReport>,
    },
    /// The data received is not a reply of the expected server.
    #[error("{server} answered {said:?}, which is no answer to what was asked; check what runs there")]
    Answer {
        /// The server.
        server: SocketAddr,
        /// The beginning of the data.
        said: String,
    },
    /// A failure in the peer outside the requests, with the peer's own message.
    #[error("{0}")]
    Told(String),
}

/// Progress of a run.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Progress {
    /// Requests sent.
    pub sent: u64,
    /// Replies in time.
    pub answered: u64,
    /// Requests given up.
    pub lost: u64,
    /// Number of requests to be answered, if limited.
    pub requests: Option<u64>,
    /// Elapsed, us.
    pub elapsed_us: u64,
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", number::count(self.answered))?;
        if let Some(requests) = self.requests {
            write!(f, " of {}", number::count(requests))?;
        }
        let seconds = self.elapsed_us as f64 / 1e6;
        write!(f, " replies, {} lost, {seconds:.1} s of the host's time", number::count(self.lost))
    }
}

/// Counters of the client. They contain no latency.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct ClientReport {
    /// Requests sent.
    pub sent: u64,
    /// Replies in time.
    pub answered: u64,
    /// Requests given up after the timeout.
    pub lost: u64,
    /// Replies to requests that had been given up.
    pub late: u64,
    /// Datagrams that are not a reply to any request.
    pub foreign: u64,
    /// Sends or receives that failed with a system error (port closed, no route yet).
    pub refused: u64,
    /// Elapsed, us.
    pub elapsed_us: u64,
    /// The caller ended the run early.
    pub stopped: bool,
}

/// Longest time to sleep, or to wait for a reply, before the caller is told of progress.
const LOOK: Duration = Duration::from_millis(50);
/// Timeout of the last receive, which is to find only a reply that is already there.
const LAST_LOOK: Duration = Duration::from_micros(10);

/// The server side of the exchange: a protocol and its sockets.
pub trait Peer {
    /// Sends request number `sequence`, from 1. Returns false if the system refused to send it (port closed, no route
    /// yet).
    ///
    /// # Errors
    /// No further request can be sent.
    fn ask(&mut self, sequence: u64) -> Result<bool, ClientError>;

    /// Waits for the reply to request `sequence`, the last one sent, for at most `limit`.
    ///
    /// # Errors
    /// The data received cannot be a reply, or no other reply can come.
    fn wait_reply(&mut self, sequence: u64, limit: Duration) -> Result<ReplyOutcome, ClientError>;

    /// Gives up the last request. Its reply may still come.
    ///
    /// # Errors
    /// No further request can be sent.
    fn give_up(&mut self) -> Result<(), ClientError> {
        Ok(())
    }
}

/// The result of waiting for a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyOutcome {
    /// The reply.
    Answer,
    /// The reply to a request that had been given up.
    Late,
    /// Other data.
    Foreign,
    /// A system error: no socket listens there.
    Refused,
    /// Nothing, or an incomplete reply.
    Nothing,
}

/// Runs the load against a `sockperf server`. `progress` is called at least every 0.2 s and
/// may end the run.
///
/// # Errors
/// See [`ClientError`].
pub fn run(
    config: &ClientConfig,
    progress: impl FnMut(&Progress) -> ControlFlow<()>,
) -> Result<ClientReport, ClientError> {
    config.check()?;
    run_with(config, &mut sockperf(config)?, progress)
}

/// A peer for the configuration's `sockperf server`.
///
/// # Errors
/// [`ClientError::Socket`].
pub fn sockperf(config: &ClientConfig) -> Result<impl Peer + use<>, ClientError> {
    Sockperf::open(config)
}

/// As [`run`], against another server.
///
/// # Errors
/// See [`ClientError`].
pub fn run_with(
    config: &ClientConfig,
    peer: &mut dyn Peer,
    mut progress: impl FnMut(&Progress) -> ControlFlow<()>,
) -> Result<ClientReport, ClientError> {
    config.check()?;
    let mut client = Client::new(config, peer, &mut progress);
    client.load()?;
    Ok(client.finish())
}

/// Why a wait ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Wait {
    Replied,
    Passed,
    Stopped,
}

/// A UDP socket that sends to `server`, and receives only from it.
///
/// # Errors
/// [`ClientError::Socket`].
pub(crate) fn connected(server: SocketAddr) -> Result<UdpSocket, ClientError> {
    let any = match server {
        SocketAddr::V4(_) => SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
        SocketAddr::V6(_) => SocketAddr::from((Ipv6Addr::UNSPECIFIED, 0)),
    };
    let error = |what, address| move |source| ClientError::Socket { what, address, source };
    let socket = UdpSocket::bind(any).map_err(error("bind to", any))?;
    socket.connect(server).map_err(error("connect to", server))?;
    Ok(socket)
}

/// sockperf's protocol: one datagram per message.
struct Sockperf {
    socket: UdpSocket,
    server: SocketAddr,
    message: Vec<u8>,
}

impl Sockperf {
    fn open(config: &ClientConfig) -> Result<Self, ClientError> {
        let socket = connected(config.server)?;
        Ok(Self { socket, server: config.server, message: vec![0; config.message_bytes] })
    }
}

impl Peer for Sockperf {
    fn ask(&mut self, sequence: u64) -> Result<bool, ClientError> {
        sockperf::write_request(&mut self.message, sequence);
        // An ICMP error for the previous request also appears here.
        Ok(self.socket.send(&self.message).is_ok())
    }

    fn wait_reply(&mut self, sequence: u64, limit: Duration) -> Result<ReplyOutcome, ClientError> {
        let address = self.server;
        let error = |source| ClientError::Socket { what: "set a receive timeout for", address, source };
        self.socket.set_read_timeout(Some(limit)).map_err(error)?;
        let mut buffer = [0_u8; 2_048];
        Ok(match self.socket.recv(&mut buffer) {
            Ok(length) => match sockperf::read_reply(buffer.get(..length).unwrap_or_default()) {
                Some(reply) if reply == sequence => ReplyOutcome::Answer,
                Some(reply) if reply < sequence => ReplyOutcome::Late,
                _ => ReplyOutcome::Foreign,
            },
            Err(error) if is_timeout(&error) => ReplyOutcome::Nothing,
            Err(_) => ReplyOutcome::Refused,
        })
    }
}

struct Client<'a> {
    config: &'a ClientConfig,
    peer: &'a mut dyn Peer,
    progress: &'a mut dyn FnMut(&Progress) -> ControlFlow<()>,
    gaps: ChaCha8Rng,
    report: ClientReport,
    started: Instant,
    told: Instant,
}

impl<'a> Client<'a> {
    fn new(
        config: &'a ClientConfig,
        peer: &'a mut dyn Peer,
        progress: &'a mut dyn FnMut(&Progress) -> ControlFlow<()>,
    ) -> Self {
        Self {
            config,
            peer,
            progress,
            gaps: ChaCha8Rng::seed_from_u64(config.seed),
            report: ClientReport::default(),
            started: Instant::now(),
            told: Instant::now(),
        }
    }

    /// Sends requests until the run ends.
    fn load(&mut self) -> Result<(), ClientError> {
        let mut unanswered = 0;
        loop {
            let gap = Duration::from_micros(self.gap());
            if self.sleep_until(Instant::now() + gap) == Wait::Stopped {
                return Ok(());
            }
            match self.exchange()? {
                Wait::Stopped => return Ok(()),
                Wait::Replied => {
                    self.report.answered += 1;
                    unanswered = 0;
                }
                Wait::Passed => {
                    self.report.lost += 1;
                    unanswered += 1;
                }
            }
            if unanswered >= self.config.give_up_after {
                self.stamp();
                let (server, report) = (self.config.server, Box::new(self.report));
                return Err(ClientError::NoReply { server, requests: unanswered, report });
            }
            if self.config.requests.is_some_and(|requests| self.report.answered >= requests) {
                return Ok(());
            }
        }
    }

    /// The next gap, us.
    fn gap(&mut self) -> u64 {
        let range = self.config.min_gap_us..=self.config.max_gap_us;
        if !self.config.normal_gaps {
            return self.gaps.random_range(range);
        }
        (0..12).map(|_| self.gaps.random_range(range.clone())).sum::<u64>() / 12
    }

    /// Sends the next request and waits for its reply. A sequence number is never used twice.
    fn exchange(&mut self) -> Result<Wait, ClientError> {
        self.report.sent += 1;
        let sequence = self.report.sent;
        // A request that could not be sent is given up after its timeout too, so that a server which is not there yet
        // causes no tight loop.
        self.report.refused += u64::from(!self.peer.ask(sequence)?);
        let due = Instant::now() + Duration::from_micros(self.config.timeout_us);
        loop {
            let left = left(due);
            if self.report_progress() == Wait::Stopped {
                return Ok(Wait::Stopped);
            }
            // Look once more after the timeout: on a busy machine the reply arrived while this process waited for a
            // CPU.
            match (self.peer.wait_reply(sequence, left.unwrap_or(LAST_LOOK))?, left) {
                (ReplyOutcome::Answer, _) => return Ok(Wait::Replied),
                (_, None) => {
                    self.peer.give_up()?;
                    return Ok(Wait::Passed);
                }
                (outcome, Some(_)) => self.unwanted(outcome),
            }
        }
    }

    /// Counts results that are not the reply.
    fn unwanted(&mut self, outcome: ReplyOutcome) {
        match outcome {
            ReplyOutcome::Late => self.report.late += 1,
            ReplyOutcome::Foreign => self.report.foreign += 1,
            ReplyOutcome::Refused => {
                self.report.refused += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
            ReplyOutcome::Answer | ReplyOutcome::Nothing => {}
        }
    }

    fn sleep_until(&mut self, due: Instant) -> Wait {
        while let Some(left) = left(due) {
            if self.report_progress() == Wait::Stopped {
                return Wait::Stopped;
            }
            std::thread::sleep(left);
        }
        Wait::Passed
    }

    fn stamp(&mut self) {
        self.report.elapsed_us = u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX);
    }

    /// Reports progress to the caller, every 0.2 s.
    fn report_progress(&mut self) -> Wait {
        if self.told.elapsed() < Duration::from_millis(200) {
            return Wait::Passed;
        }
        self.told = Instant::now();
        self.stamp();
        let ClientReport { sent, answered, lost, elapsed_us, .. } = self.report;
        let now = Progress { sent, answered, lost, requests: self.config.requests, elapsed_us };
        if (self.progress)(&now).is_break() {
            self.report.stopped = true;
            return Wait::Stopped;
        }
        Wait::Passed
    }

    fn finish(mut self) -> ClientReport {
        self.stamp();
        self.report
    }
}

/// Time to sleep before the next check of whether `due` has come; `None` once it has.
fn left(due: Instant) -> Option<Duration> {
    let left = due.saturating_duration_since(Instant::now());
    (!left.is_zero()).then(|| left.clamp(Duration::from_micros(10), LOOK))
}

pub(crate) fn is_timeout(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}
