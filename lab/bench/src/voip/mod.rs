//! A SIP proxy under the load of Access'18, IV-G 1 (Figure 14): Kamailio relays calls between two SIPp instances
//! ([`sipp`]), and the capture shows each message's delay in the proxy ([`wire`]).
//!
//! In: a host and the calls. Out: their packets, from SIPp inside the emulated machine, or outside.

use std::net::SocketAddr;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use self::sipp::{CallProgress, Calls};
use crate::client_side::Order;
use crate::error::MeasureError;
use crate::host::{Host, size};
use crate::progress::progress;

pub mod sipp;
pub mod wire;

/// Messages of a call that the proxy forwards: INVITE, 180, 200, ACK, BYE, 200.
const MESSAGES: u64 = 6;
/// Limit of the real time without a packet of a call.
const SILENCE: Duration = Duration::from_secs(300);

/// The number of calls that have at least this many forwarded messages.
pub fn calls(messages: u64) -> u64 {
    messages.div_ceil(MESSAGES)
}

/// Waits until the host's proxy answers.
///
/// # Errors
/// The proxy does not answer; the host has ended.
pub fn wait_for_proxy(host: &mut Host, proxy: SocketAddr) -> Result<(), MeasureError> {
    if host.has_client_cpu() {
        return Order::AwaitProxy(proxy).run(host.lab()?, &mut |_| {});
    }
    sipp::wait_for(proxy, || host.alive())
}

/// Makes all calls, and returns after the last one. Callers outside write SIPp's files to `dir`.
///
/// # Errors
/// SIPp is missing or fails; no packet passes for `SILENCE`; the host has ended.
pub fn make_calls(host: &mut Host, calls: &Calls, dir: &Path, name: &str) -> Result<(), MeasureError> {
    let mut growth = Growth::of(host.capture("rt"));
    let silent = || {
        let said = format!("no packet of a call for {} s", SILENCE.as_secs());
        Err(MeasureError::Program { program: "sipp".to_owned(), said })
    };
    if host.has_client_cpu() {
        let mut tell = |line: &str| progress(format_args!("{name}: {line}"));
        let mut hangs = false;
        let mut go_on = || {
            hangs = growth.is_silent();
            if hangs { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        };
        Order::Calls(calls.clone()).run_while(host.lab()?, &mut tell, &mut go_on)?;
        return if hangs { silent() } else { Ok(()) };
    }
    let mut told = Instant::now();
    calls.make(dir, |made: &CallProgress| {
        host.alive()?;
        if growth.is_silent() {
            return silent();
        }
        if told.elapsed() > Duration::from_secs(5) {
            told = Instant::now();
            progress(format_args!("{name}: {made}"));
        }
        Ok(())
    })
}

/// The growth of the RT NIC's capture.
struct Growth {
    capture: PathBuf,
    bytes: u64,
    /// Real time at which it last grew.
    at: Instant,
}

impl Growth {
    fn of(capture: PathBuf) -> Self {
        Self { capture, bytes: 0, at: Instant::now() }
    }

    /// Whether the capture has not grown for [`SILENCE`].
    fn is_silent(&mut self) -> bool {
        let bytes = size(&self.capture);
        if bytes > self.bytes {
            (self.bytes, self.at) = (bytes, Instant::now());
        }
        self.at.elapsed() > SILENCE
    }
}
