//! The callers and the called: two stock SIPp (`sipp -sn uac`, `-sn uas`) beside the emulated host.
//!
//! In: how many calls. Out: calls through the proxy at random rates of 17 to 167 a second of the host's time. The paper changed SIPp
//! for that; here its control port is told a new rate after every few calls, on the clock of the host under test.

use std::fs::File;
use std::net::{SocketAddr, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::clock::{Clock, RealClock, VirtualClock};
use crate::host::{Host, MeasureError, size};
use crate::schema;

/// Calls a second of the host's time (IV-G 1): 100 to 1,000 forwarded messages.
const RATES: std::ops::RangeInclusive<f64> = 17.0..=167.0;
/// Calls at one rate, before the next one is drawn.
const CALLS_A_RATE: f64 = 4.0;
/// The first guess of real seconds a second of the emulated host's.
const SCALE: f64 = 5.0;
/// Ports of the caller and the called.
const CALLER: u16 = 5_080;
const CALLED: u16 = 5_070;
/// The caller's control port. The called one takes SIPp's own (8888), as any does that is told none.
const CONTROL: u16 = 8_960;
/// Real time for the proxy to come up, and without a packet of a call.
const LIMIT: Duration = Duration::from_secs(300);
/// Exit statuses of SIPp that say how calls went: all well, or some failed. The wire says which.
const WENT: [i32; 2] = [0, 1];

/// What is called, and how.
#[derive(Debug, Clone)]
pub struct Calls {
    /// The proxy.
    pub proxy: SocketAddr,
    /// So many calls.
    pub count: u64,
    /// Seed of the rates.
    pub seed: u64,
    /// Captures whose stamps are the host's clock, the RT NIC's first.
    pub captures: Vec<PathBuf>,
    /// Where SIPp's words go.
    pub dir: PathBuf,
}

/// Waits until the proxy answers (OPTIONS, RFC 3261, 11).
///
/// # Errors
/// It does not in `LIMIT`; the host is no more.
pub fn wait_for(host: &mut Host, proxy: SocketAddr) -> Result<(), MeasureError> {
    let failed = |said: String| MeasureError::Program { program: "the SIP proxy".into(), said };
    let socket = UdpSocket::bind(("0.0.0.0", 0)).map_err(|error| failed(error.to_string()))?;
    socket.connect(proxy).map_err(|error| failed(error.to_string()))?;
    socket.set_read_timeout(Some(Duration::from_secs(1))).map_err(|error| failed(error.to_string()))?;
    let own = socket.local_addr().map_err(|error| failed(error.to_string()))?;
    let start = Instant::now();
    let mut number = 0;
    while start.elapsed() < LIMIT {
        host.lab.alive()?;
        number += 1;
        let request = format!(
            "OPTIONS sip:{proxy} SIP/2.0\r\nVia: SIP/2.0/UDP {own};branch=z9hG4bK-{number}\r\nFrom: <sip:bench@{own}>;tag=1\r\n\
             To: <sip:{proxy}>\r\nCall-ID: {number}@{own}\r\nCSeq: {number} OPTIONS\r\nMax-Forwards: 70\r\nContent-Length: 0\r\n\r\n"
        );
        // "Port unreachable" comes back from a host whose proxy is not up yet.
        let _ = socket.send(request.as_bytes());
        let asked = Instant::now();
        match socket.recv(&mut [0; 2_048]) {
            Ok(_) => return Ok(()),
            Err(_) => std::thread::sleep(Duration::from_secs(1).saturating_sub(asked.elapsed())),
        }
    }
    Err(failed(format!("{proxy} does not answer OPTIONS")))
}

/// Has all calls made, and ends with the last one.
///
/// # Errors
/// SIPp is missing or fails; no packet passes for `LIMIT`; the host is no more.
pub fn call(host: &mut Host, calls: &Calls, name: &str, progress: &mut dyn FnMut(&str)) -> Result<(), MeasureError> {
    let mut clock: Box<dyn Clock> = match host.clock {
        schema::Clock::Virtual => Box::new(VirtualClock::open(&calls.captures, SCALE)?),
        _ => Box::new(RealClock::default()),
    };
    let own = UdpSocket::bind(("0.0.0.0", 0)).and_then(|socket| {
        socket.connect(calls.proxy)?;
        Ok((socket.local_addr()?.ip().to_string(), socket))
    });
    let (own, control) = own.map_err(|error| failed(error.to_string()))?;
    control.connect((own.as_str(), CONTROL)).map_err(|error| failed(error.to_string()))?;
    let called = ["-sn", "uas", "-i", &own, "-p", &CALLED.to_string()].map(str::to_owned);
    let _called = Sipp::start(&called, &calls.dir.join("sipp-called.log"))?;
    let mut rates = ChaCha8Rng::seed_from_u64(calls.seed);
    let mut rate = rates.random_range(RATES);
    let caller = [
        ("-sn", "uac".to_owned()),
        ("-i", own.clone()),
        ("-p", CALLER.to_string()),
        ("-rsa", calls.proxy.to_string()),
        ("-m", calls.count.to_string()),
        ("-r", (rate / clock.scale()).to_string()),
        // More than are ever open: by its own limit SIPp would stop calling while the proxy is slow.
        ("-l", "10000".to_owned()),
        ("-ci", own.clone()),
        ("-cp", CONTROL.to_string()),
    ];
    let mut caller: Vec<String> = caller.into_iter().flat_map(|(option, value)| [option.to_owned(), value]).collect();
    caller.push(format!("{own}:{CALLED}"));
    let mut caller = Sipp::start(&caller, &calls.dir.join("sipp-caller.log"))?;
    let mut due_ns = clock.now_ns()?;
    let (mut told, mut grown) = (Instant::now(), (0, Instant::now()));
    let rt = calls.captures.first();
    loop {
        if let Some(status) = caller.ended()? {
            return if WENT.contains(&status) { Ok(()) } else { Err(caller.said(status)) };
        }
        host.lab.alive()?;
        let now_ns = clock.now_ns()?;
        if now_ns >= due_ns {
            due_ns = now_ns + (CALLS_A_RATE / rate * 1e9) as u64;
            // A datagram that is lost leaves the rate as it was.
            let _ = control.send(format!("cset rate {:.3}", rate / clock.scale()).as_bytes());
            rate = rates.random_range(RATES);
        }
        let bytes = rt.map_or(0, |path| size(path));
        if bytes > grown.0 {
            grown = (bytes, Instant::now());
        } else if grown.1.elapsed() > LIMIT {
            return Err(failed(format!("no packet of a call for {} s", LIMIT.as_secs())));
        }
        if told.elapsed() > Duration::from_secs(5) {
            told = Instant::now();
            progress(&format!("{name}: calls are made (a second takes {:.1} s)", clock.scale()));
        }
        let left = Duration::from_nanos((due_ns.saturating_sub(now_ns) as f64 * clock.scale()) as u64);
        std::thread::sleep(left.clamp(Duration::from_millis(1), Duration::from_millis(20)));
    }
}

fn failed(said: String) -> MeasureError {
    MeasureError::Program { program: "sipp".to_owned(), said }
}

/// A SIPp, which ends with its value.
struct Sipp {
    child: Child,
    log: PathBuf,
}

impl Sipp {
    fn start(arguments: &[String], log: &Path) -> Result<Self, MeasureError> {
        let errors = File::create(log).map_err(|source| MeasureError::File { path: log.to_owned(), source })?;
        // It draws its screen on any terminal, also on none.
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

    /// Its exit status, once it has ended.
    fn ended(&mut self) -> Result<Option<i32>, MeasureError> {
        let status = self.child.try_wait().map_err(|error| failed(error.to_string()))?;
        Ok(status.map(|status| status.code().unwrap_or(-1)))
    }

    fn said(&self, status: i32) -> MeasureError {
        let text = std::fs::read_to_string(&self.log).unwrap_or_default();
        let last: Vec<&str> = text.lines().rev().take(5).collect();
        failed(format!("it ended with status {status}: {}", last.into_iter().rev().collect::<Vec<_>>().join("; ")))
    }
}

impl Drop for Sipp {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
