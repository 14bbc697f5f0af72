//! The callers and the called party: two stock SIPp with their own scenarios (`sipp -sd uac`, `-sd uas`) beside the
//! emulated host.
//!
//! In: the number of calls. Out: calls through the proxy at random rates of 17 to 167 per second of the host's time,
//! the same for every method. The paper changed SIPp for that. Here the caller's scenario begins with SIPp's
//! third-party command (`recvCmd`, `-3pcc`), so that each call starts when this process orders it, on the clock of the
//! host under test, however long calls take.

use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::net::{SocketAddr, TcpStream, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::client::{ClientError, Peer, ReplyOutcome, connected};
use crate::clock::{Clock, RealClock, VirtualClock};
use crate::error::MeasureError;
use crate::host::{Host, size};
use crate::progress::progress;
use crate::schema;

/// Calls per second of the host's time (IV-G 1): 100 to 1,000 forwarded messages.
const RATES: std::ops::RangeInclusive<f64> = 17.0..=167.0;
/// SIP's T1 of the host's time, s (RFC 3261, 17.1.1.1).
const T1: f64 = 0.5;
/// Real time for learning the host's clock before the first call.
const LEARN: Duration = Duration::from_secs(1);
/// Initial estimate of real seconds per second of the emulated host's time.
const SCALE: f64 = 5.0;
/// Ports of the caller and the called party.
const CALLER: u16 = 5_080;
const CALLED: u16 = 5_070;
/// The port on which the caller receives orders for calls.
const COMMANDS: u16 = 8_960;
/// Limit of the real time until the proxy is up, and of the real time without a packet of a call.
const LIMIT: Duration = Duration::from_secs(300);
/// Exit statuses of SIPp after calls: all succeeded, or some failed. The capture shows which.
const WENT: [i32; 2] = [0, 1];

/// The calls to make.
#[derive(Debug, Clone)]
pub struct Calls {
    /// The proxy.
    pub proxy: SocketAddr,
    /// Number of calls.
    pub count: u64,
    /// Seed of the rates.
    pub seed: u64,
    /// Captures whose time stamps are the host's clock; the RT NIC's is the first.
    pub captures: Vec<PathBuf>,
    /// Directory for SIPp's output.
    pub dir: PathBuf,
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

/// Waits until the proxy answers.
///
/// # Errors
/// The proxy does not answer within `LIMIT`; the host has ended.
pub fn wait_for(host: &mut Host, proxy: SocketAddr) -> Result<(), MeasureError> {
    let failed = |said: String| MeasureError::Program { program: "the SIP proxy".into(), said };
    let mut asker = Asker::open(proxy)?;
    let start = Instant::now();
    let mut number = 0;
    while start.elapsed() < LIMIT {
        host.alive()?;
        number += 1;
        let asked = Instant::now();
        // A host whose proxy is not up yet answers "port unreachable".
        asker.ask(number)?;
        match asker.wait_reply(number, Duration::from_secs(1))? {
            ReplyOutcome::Answer | ReplyOutcome::Late => return Ok(()),
            _ => std::thread::sleep(Duration::from_secs(1).saturating_sub(asked.elapsed())),
        }
    }
    Err(failed(format!("{proxy} does not answer OPTIONS")))
}

/// Makes all calls, and returns after the last one.
///
/// # Errors
/// SIPp is missing or fails; no packet passes for `LIMIT`; the host has ended.
pub fn call(host: &mut Host, calls: &Calls, name: &str) -> Result<(), MeasureError> {
    let mut clock: Box<dyn Clock> = match host.clock {
        schema::Clock::Virtual => Box::new(VirtualClock::open(&calls.captures, SCALE)?),
        _ => Box::new(RealClock::default()),
    };
    let own = connected(calls.proxy)?.local_addr().map_err(|error| failed(error.to_string()))?.ip().to_string();
    let start = Instant::now();
    while start.elapsed() < LEARN {
        clock.now_ns()?;
        std::thread::sleep(Duration::from_millis(10));
    }
    let t1_ms = (T1 * clock.scale() * 1e3).max(1.0) as u64;
    let scenario = |name: &str, change: fn(&str) -> Option<String>| {
        let text = change(&own_scenario(name)?)
            .and_then(|text| with_t1(&text, t1_ms))
            .ok_or_else(|| failed(format!("its scenario {name} is not as SIPp 3.6's: install Debian's sip-tester")))?;
        let path = calls.dir.join(format!("sipp-{name}.xml"));
        fs::write(&path, text).map_err(|source| MeasureError::File { path: path.clone(), source })?;
        Ok::<_, MeasureError>(path.to_string_lossy().into_owned())
    };
    let (uac, uas) = (scenario("uac", when_told)?, scenario("uas", |text| Some(text.to_owned()))?);
    let called = ["-sf", &uas, "-i", &own, "-p", &CALLED.to_string()].map(str::to_owned);
    let _called = Sipp::start(&called, &calls.dir.join("sipp-called.log"))?;
    let caller = [
        ("-sf", uac),
        ("-i", own.clone()),
        ("-p", CALLER.to_string()),
        ("-rsa", calls.proxy.to_string()),
        ("-m", calls.count.to_string()),
        ("-3pcc", format!("{own}:{COMMANDS}")),
    ];
    let mut caller: Vec<String> = caller.into_iter().flat_map(|(option, value)| [option.to_owned(), value]).collect();
    caller.push(format!("{own}:{CALLED}"));
    let mut caller = Sipp::start(&caller, &calls.dir.join("sipp-caller.log"))?;
    let mut commands = caller.commands(&own)?;
    let mut gaps = gaps(calls.seed);
    let mut due_ns = clock.now_ns()?;
    let mut made = 0;
    let (mut told, mut grown) = (Instant::now(), (0, Instant::now()));
    let rt = calls.captures.first();
    loop {
        if let Some(status) = caller.ended()? {
            return if WENT.contains(&status) { Ok(()) } else { Err(caller.status_error(status)) };
        }
        host.alive()?;
        let now_ns = clock.now_ns()?;
        // Counted from the due time, not from the actual time: a delay here does not reduce the rate.
        while made < calls.count && now_ns >= due_ns {
            commands.call(made, &own).map_err(|error| failed(format!("it takes no calls: {error}")))?;
            made += 1;
            due_ns += gaps.next().unwrap_or_default();
        }
        let bytes = rt.map_or(0, |path| size(path));
        if bytes > grown.0 {
            grown = (bytes, Instant::now());
        } else if grown.1.elapsed() > LIMIT {
            return Err(failed(format!("no packet of a call for {} s", LIMIT.as_secs())));
        }
        if told.elapsed() > Duration::from_secs(5) {
            told = Instant::now();
            progress(format_args!(
                "{name}: {made} calls of {} are made (a second takes {:.1} s)",
                calls.count,
                clock.scale()
            ));
        }
        let left = Duration::from_nanos((due_ns.saturating_sub(now_ns) as f64 * clock.scale()) as u64);
        std::thread::sleep(left.clamp(Duration::from_millis(1), Duration::from_millis(20)));
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
fn own_scenario(name: &str) -> Result<String, MeasureError> {
    let said = Command::new("sipp").args(["-sd", name]).env("TERM", "xterm").stdin(Stdio::null()).output();
    let said = said.map_err(|source| failed(format!("{source}; install Debian's sip-tester")))?;
    Ok(String::from_utf8_lossy(&said.stdout).into_owned())
}

/// The caller's scenario, with a command at its beginning.
fn when_told(scenario: &str) -> Option<String> {
    let (before, rest) = scenario.split_at_checked(scenario.find("<send")?)?;
    Some(format!("{before}<recvCmd/>\n\n  {rest}"))
}

/// The scenario with another T1, ms.
fn with_t1(scenario: &str, t1_ms: u64) -> Option<String> {
    let own = "retrans=\"500\"";
    scenario.contains(own).then(|| scenario.replace(own, &format!("retrans=\"{t1_ms}\"")))
}

fn failed(said: String) -> MeasureError {
    MeasureError::Program { program: "sipp".to_owned(), said }
}

/// A SIPp process, which ends with the value.
struct Sipp {
    child: Child,
    log: PathBuf,
}

impl Sipp {
    fn start(arguments: &[String], log: &Path) -> Result<Self, MeasureError> {
        let errors = File::create(log).map_err(|source| MeasureError::File { path: log.to_owned(), source })?;
        // SIPp draws its screen even without a terminal.
        let child = Command::new("sipp")
            .args(arguments)
            .args(["-nostdin", "-timer_resol", "1"])
            .env("TERM", "xterm")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors)
            .spawn()
            .map_err(|source| failed(format!("{source}; install Debian's sip-tester")))?;
        Ok(Self { child, log: log.to_owned() })
    }

    /// Opens the connection for orders of calls.
    fn commands(&mut self, own: &str) -> Result<Commands, MeasureError> {
        let start = Instant::now();
        loop {
            match TcpStream::connect((own, COMMANDS)) {
                Ok(stream) => return Ok(Commands(stream)),
                Err(error) if start.elapsed() > LIMIT => return Err(failed(error.to_string())),
                Err(_) => std::thread::sleep(Duration::from_millis(50)),
            }
            if let Some(status) = self.ended()? {
                return Err(self.status_error(status));
            }
        }
    }

    /// SIPp's exit status, if it has ended.
    fn ended(&mut self) -> Result<Option<i32>, MeasureError> {
        let status = self.child.try_wait().map_err(|error| failed(error.to_string()))?;
        Ok(status.map(|status| status.code().unwrap_or(-1)))
    }

    fn status_error(&self, status: i32) -> MeasureError {
        let text = fs::read_to_string(&self.log).unwrap_or_default();
        let last: Vec<&str> = text.lines().rev().take(5).collect();
        failed(format!("it ended with status {status}: {}", last.into_iter().rev().collect::<Vec<_>>().join("; ")))
    }
}

/// SIPp's third-party commands: the Call-ID of the call to start, and an end mark.
struct Commands(TcpStream);

impl Commands {
    fn call(&mut self, number: u64, own: &str) -> std::io::Result<()> {
        self.0.write_all(format!("Call-ID: {number}@{own}\r\n\r\n\x1b").as_bytes())
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
    fn the_callers_scenario_waits_for_a_command_and_t1_is_ours() {
        let stock = "<scenario name=\"a\">\n  <send retrans=\"500\">INVITE</send>\n  <send retrans=\"500\">BYE</send>";
        let changed = with_t1(&when_told(stock).unwrap(), 4_000).unwrap();
        assert_eq!(
            changed,
            "<scenario name=\"a\">\n  <recvCmd/>\n\n  <send retrans=\"4000\">INVITE</send>\n  <send \
             retrans=\"4000\">BYE</send>"
        );
        assert_eq!((when_told("no scenario"), with_t1("no scenario", 1)), (None, None));
    }
}
