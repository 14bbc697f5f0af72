//! The callers and the called party: two stock SIPp with their own scenarios (`sipp -sd uac`, `-sd uas`), inside the
//! emulated machine or outside.
//!
//! In: the number of calls. Out: calls through the proxy at random rates of 17 to 167 per second of the host's time,
//! the same for every method. The paper changed SIPp for that. Here the caller's scenario begins with SIPp's
//! third-party command (`recvCmd`, `-3pcc`), so that each call starts when this process orders it, on the clock of the
//! host under test, however long calls take.

use std::fmt;
use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use ontime_lab::isolate;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};

use crate::client::{ClientError, Peer, ReplyOutcome, connected};

/// Calls per second of the host's time (IV-G 1): 100 to 1,000 forwarded messages.
const RATES: std::ops::RangeInclusive<f64> = 17.0..=167.0;
/// Ports of the caller and the called party.
const CALLER: u16 = 5_080;
const CALLED: u16 = 5_070;
/// The port on which the caller receives orders for calls.
const COMMANDS: u16 = 8_960;
/// Limit of the time until the proxy is up, and until SIPp is.
const LIMIT: Duration = Duration::from_secs(300);
/// Exit statuses of SIPp after calls: all succeeded, or some failed. The capture shows which.
const WENT: [i32; 2] = [0, 1];

/// The calls to make.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calls {
    /// The proxy.
    pub proxy: SocketAddr,
    /// Number of calls.
    pub count: u64,
    /// Seed of the rates.
    pub seed: u64,
}

/// Requests a SIP server's state (OPTIONS, RFC 3261, 11), one request at a time.
#[derive(Debug)]
pub struct Asker {
    socket: UdpSocket,
    server: SocketAddr,
    own: SocketAddr,
}

impl Asker {
    /// Opens a socket to this server.
    ///
    /// # Errors
    /// [`ClientError::Socket`].
    pub fn open(server: SocketAddr) -> Result<Self, ClientError> {
        let socket = connected(server)?;
        let error = |source| ClientError::Socket { what: "find the own address towards", address: server, source };
        let own = socket.local_addr().map_err(error)?;
        Ok(Self { socket, server, own })
    }
}

impl Peer for Asker {
    fn ask(&mut self, sequence: u64) -> Result<bool, ClientError> {
        let Self { server, own, .. } = self;
        let request = format!(
            "OPTIONS sip:{server} SIP/2.0\r\nVia: SIP/2.0/UDP {own};branch=z9hG4bK-{sequence}\r\nFrom: \
             <sip:bench@{own}>;tag=1\r\nTo: <sip:{server}>\r\nCall-ID: {sequence}@{own}\r\nCSeq: {sequence} \
             OPTIONS\r\nMax-Forwards: 70\r\nContent-Length: 0\r\n\r\n"
        );
        Ok(self.socket.send(request.as_bytes()).is_ok())
    }

    fn wait_reply(&mut self, sequence: u64, limit: Duration) -> Result<ReplyOutcome, ClientError> {
        let address = self.server;
        let error = |source| ClientError::Socket { what: "set a receive timeout for", address, source };
        self.socket.set_read_timeout(Some(limit)).map_err(error)?;
        let mut buffer = [0; 2_048];
        Ok(match self.socket.recv(&mut buffer) {
            Ok(length) => match answered(buffer.get(..length).unwrap_or_default()) {
                Some(number) if number == sequence => ReplyOutcome::Answer,
                Some(number) if number < sequence => ReplyOutcome::Late,
                _ => ReplyOutcome::Foreign,
            },
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => ReplyOutcome::Nothing,
            Err(_) => ReplyOutcome::Refused,
        })
    }
}

/// The number of the request that this message answers.
fn answered(message: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(message).ok()?.strip_prefix("SIP/2.0 ")?;
    let sequence = text.lines().find_map(|line| line.strip_prefix("CSeq:"))?;
    sequence.trim().strip_suffix(" OPTIONS")?.trim_end().parse().ok()
}

/// Waits until the proxy answers. `go_on` is called before each request.
///
/// # Errors
/// The proxy does not answer within `LIMIT`; what `go_on` returns.
pub fn wait_for<E: From<ClientError>>(proxy: SocketAddr, mut go_on: impl FnMut() -> Result<(), E>) -> Result<(), E> {
    let mut asker = Asker::open(proxy)?;
    let start = Instant::now();
    let mut number = 0;
    while start.elapsed() < LIMIT {
        go_on()?;
        number += 1;
        let asked = Instant::now();
        // A host whose proxy is not up yet answers "port unreachable".
        asker.ask(number)?;
        match asker.wait_reply(number, Duration::from_secs(1))? {
            ReplyOutcome::Answer | ReplyOutcome::Late => return Ok(()),
            _ => std::thread::sleep(Duration::from_secs(1).saturating_sub(asked.elapsed())),
        }
    }
    Err(ClientError::Told(format!("the SIP proxy {proxy} does not answer OPTIONS")).into())
}

/// Progress of the calls.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CallProgress {
    /// Number of calls that were started.
    pub made: u64,
    /// Number of calls to make.
    pub count: u64,
}

impl fmt::Display for CallProgress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{} calls of {} are made", self.made, self.count)
    }
}

impl Calls {
    /// Makes all calls, and returns after the last one. SIPp's scenarios and logs are written to `dir`. `go_on` is
    /// called at least every 20 ms.
    ///
    /// # Errors
    /// SIPp is missing or fails; what `go_on` returns.
    pub fn make<E: From<ClientError>>(
        &self,
        dir: &Path,
        mut go_on: impl FnMut(&CallProgress) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut parties = Parties::start(self, dir)?;
        let mut gaps = gaps(self.seed);
        let mut due = Instant::now();
        let mut made = 0;
        while !parties.have_ended()? {
            let now = Instant::now();
            // Counted from the due time, not from the actual time: a delay here does not reduce the rate.
            while made < self.count && now >= due {
                parties.call(made)?;
                made += 1;
                due += Duration::from_nanos(gaps.next().unwrap_or_default());
            }
            go_on(&CallProgress { made, count: self.count })?;
            let left = due.saturating_duration_since(now);
            std::thread::sleep(left.clamp(Duration::from_millis(1), Duration::from_millis(20)));
        }
        Ok(())
    }
}

/// Times between calls, ns of the host's time. A rate is drawn for each.
fn gaps(seed: u64) -> impl Iterator<Item = u64> {
    let mut rates = ChaCha8Rng::seed_from_u64(seed);
    std::iter::repeat_with(move || (1e9 / rates.random_range(RATES)) as u64)
}

/// The rate of this number of calls, per second of the host's time; `None` with fewer than two.
pub fn offered(seed: u64, calls: u64) -> Option<f64> {
    let between = usize::try_from(calls.checked_sub(1)?).ok()?;
    let span_ns: u64 = gaps(seed).take(between).sum();
    (between > 0).then(|| between as f64 * 1e9 / span_ns as f64)
}

/// A scenario that is included in SIPp.
fn own_scenario(name: &str) -> Result<String, ClientError> {
    let said = Command::new("sipp").args(["-sd", name]).env("TERM", "xterm").stdin(Stdio::null()).output();
    let said = said.map_err(|source| failed(format!("{source}; install Debian's sip-tester")))?;
    Ok(String::from_utf8_lossy(&said.stdout).into_owned())
}

/// Writes SIPp's scenario of a caller, which waits for a command, to `dir`. Returns its path.
fn write_caller(dir: &Path) -> Result<String, ClientError> {
    let text = when_told(&own_scenario("uac")?).ok_or_else(|| {
        failed("its scenario uac is not that of SIPp 3.6 or 3.7: install Debian's sip-tester".to_owned())
    })?;
    let path = dir.join("sipp-uac.xml");
    fs::write(&path, text).map_err(file(&path))?;
    Ok(path.to_string_lossy().into_owned())
}

/// The caller's scenario, with a command at its beginning.
fn when_told(scenario: &str) -> Option<String> {
    let (before, rest) = scenario.split_at_checked(scenario.find("<send")?)?;
    Some(format!("{before}<recvCmd/>\n\n  {rest}"))
}

fn failed(said: String) -> ClientError {
    ClientError::Told(format!("sipp failed: {said}"))
}

fn file(path: &Path) -> impl Fn(std::io::Error) -> ClientError {
    move |source| ClientError::Told(format!("{}: {source}; {}", path.display(), ontime_tenants::remedy(&source)))
}

/// The caller and the called party.
struct Parties {
    caller: Sipp,
    /// Answers the calls while the value lives.
    _called: Sipp,
    commands: Commands,
}

impl Parties {
    /// Starts both, for calls from the own address towards the proxy to the same address. The calls do not begin yet.
    fn start(calls: &Calls, dir: &Path) -> Result<Self, ClientError> {
        let own = connected(calls.proxy)?.local_addr().map_err(|error| failed(error.to_string()))?.ip().to_string();
        let uac = write_caller(dir)?;
        let called = ["-sn", "uas", "-i", &own, "-p", &CALLED.to_string()].map(str::to_owned);
        let called = Sipp::start(&called, &dir.join("sipp-called.log"))?;
        let caller = [
            ("-sf", uac),
            ("-i", own.clone()),
            ("-p", CALLER.to_string()),
            ("-rsa", calls.proxy.to_string()),
            ("-m", calls.count.to_string()),
            ("-3pcc", format!("{own}:{COMMANDS}")),
        ];
        let caller = caller.into_iter().flat_map(|(option, value)| [option.to_owned(), value]);
        let caller: Vec<String> = caller.chain([format!("{own}:{CALLED}")]).collect();
        let mut caller = Sipp::start(&caller, &dir.join("sipp-caller.log"))?;
        let commands = Commands::open(&mut caller, own)?;
        Ok(Self { caller, _called: called, commands })
    }

    /// Whether all calls have ended.
    fn have_ended(&mut self) -> Result<bool, ClientError> {
        match self.caller.ended()? {
            None => Ok(false),
            Some(status) if WENT.contains(&status) => Ok(true),
            Some(status) => Err(self.caller.status_error(status)),
        }
    }

    /// Starts a call.
    fn call(&mut self, number: u64) -> Result<(), ClientError> {
        self.commands.call(number).map_err(|error| failed(format!("it takes no calls: {error}")))
    }
}

/// A SIPp process, which ends with the value.
struct Sipp {
    child: Child,
    log: PathBuf,
}

impl Sipp {
    fn start(arguments: &[String], log: &Path) -> Result<Self, ClientError> {
        let errors = File::create(log).map_err(file(log))?;
        // SIPp draws its screen even without a terminal.
        let mut command = Command::new("sipp");
        command.args(arguments).args(["-nostdin", "-timer_resol", "1"]).env("TERM", "xterm");
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(errors);
        let child = isolate::end_with_parent(&mut command, Signal::KILL).spawn();
        let child = child.map_err(|source| failed(format!("{source}; install Debian's sip-tester")))?;
        Ok(Self { child, log: log.to_owned() })
    }

    /// SIPp's exit status, if it has ended.
    fn ended(&mut self) -> Result<Option<i32>, ClientError> {
        let status = self.child.try_wait().map_err(|error| failed(error.to_string()))?;
        Ok(status.map(|status| status.code().unwrap_or(-1)))
    }

    fn status_error(&self, status: i32) -> ClientError {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let last: Vec<&str> = text.lines().rev().take(5).collect();
        failed(format!("it ended with status {status}: {}", last.into_iter().rev().collect::<Vec<_>>().join("; ")))
    }
}

/// SIPp's third-party commands: the Call-ID of the call to start, and an end mark.
struct Commands {
    stream: TcpStream,
    /// The caller's address.
    own: String,
}

impl Commands {
    /// Opens the connection for orders of calls.
    fn open(caller: &mut Sipp, own: String) -> Result<Self, ClientError> {
        let start = Instant::now();
        loop {
            match TcpStream::connect((own.as_str(), COMMANDS)) {
                Ok(stream) => return Ok(Self { stream, own }),
                Err(error) if start.elapsed() > LIMIT => return Err(failed(error.to_string())),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
            if let Some(status) = caller.ended()? {
                return Err(caller.status_error(status));
            }
        }
    }

    fn call(&mut self, number: u64) -> std::io::Result<()> {
        self.stream.write_all(format!("Call-ID: {number}@{}\r\n\r\n\x1b", self.own).as_bytes())
    }
}

impl Drop for Sipp {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_known_by_its_number() {
        let answer = |head: &str, sequence: &str| {
            answered(
                format!("{head}\r\nVia: SIP/2.0/UDP 10.1.0.1:5060\r\n{sequence}\r\nContent-Length: 0\r\n\r\n")
                    .as_bytes(),
            )
        };
        assert_eq!(answer("SIP/2.0 200 OK", "CSeq: 17 OPTIONS"), Some(17));
        assert_eq!(answer("SIP/2.0 483 Too Many Hops", "CSeq:9 OPTIONS"), Some(9));
        assert_eq!(answer("OPTIONS sip:10.1.0.2 SIP/2.0", "CSeq: 17 OPTIONS"), None);
        for bad in ["CSeq: 17 INVITE", "CSeq: x OPTIONS", "Call-ID: 17 OPTIONS"] {
            assert_eq!(answer("SIP/2.0 200 OK", bad), None, "{bad}");
        }
        assert_eq!(answered(&[0xff, 0x00]), None);
    }

    #[test]
    fn the_same_calls_are_offered_for_the_same_seed() {
        let [a, b]: [Vec<u64>; 2] = [1, 1].map(|seed| gaps(seed).take(1_000).collect());
        assert_eq!(a, b);
        assert_ne!(a, gaps(2).take(1_000).collect::<Vec<_>>());
        assert!(a.iter().all(|gap| (5_988_023..=58_823_530).contains(gap)));
        // The mean of 1 / rate over the rates.
        let rate = offered(1, 100_000).unwrap();
        let expected = 150.0 / (167.0_f64 / 17.0).ln();
        assert!((rate / expected - 1.0).abs() < 0.02, "{rate}, expected {expected}");
        assert_eq!((offered(1, 0), offered(1, 1)), (None, None));
    }

    #[test]
    fn the_callers_scenario_waits_for_a_command() {
        let stock = "<scenario name=\"a\">\n  <send retrans=\"500\">INVITE</send>\n  <send retrans=\"500\">BYE</send>";
        assert_eq!(
            when_told(stock).unwrap(),
            "<scenario name=\"a\">\n  <recvCmd/>\n\n  <send retrans=\"500\">INVITE</send>\n  <send \
             retrans=\"500\">BYE</send>"
        );
        assert_eq!(when_told("no scenario"), None);
    }
}
