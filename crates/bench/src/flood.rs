//! Bulk traffic of the experiments, from this process's namespace: iperf3, whose server runs in the bulk VMs; and bare
//! packets, under which iperf3's own control connection would starve.
//!
//! In: the VMs, what flows, the capture that shows it. Out: a [`Flood`] that flows, ended by [`Flood::stop`] or with
//! its value. Senders live in real time: a machine with other work thins a flood that the emulated host could still
//! take.

use std::io::Read;
use std::net::UdpSocket;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ontime_lab::isolate;
use rustix::process::{Pid, Signal, kill_process};

use crate::hardware::HardwareError;
use crate::host::{Host, MeasureError, size};

/// iperf3's port.
pub const PORT: u16 = 5_201;
/// Real time until a server that is busy with the last test, or a VM that is slow, is given up.
const LIMIT: Duration = Duration::from_secs(120);

/// What flows between the client's side and a bulk VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The VM receives TCP at full speed over this many connections.
    Receive {
        /// Connections.
        streams: u8,
    },
    /// The VM sends TCP at full speed over this many connections.
    Send {
        /// Connections.
        streams: u8,
    },
    /// The VM is sent UDP datagrams, [`RATE`] a second of real time: more than an emulated host can take.
    ReceiveUdp {
        /// Of so many bytes: [`SMALL`] or [`LARGE`].
        bytes: u16,
    },
    /// The VM sends UDP datagrams.
    SendUdp {
        /// Of so many bytes: [`SMALL`] or [`LARGE`].
        bytes: u16,
        /// So many a second of its own time; `None`: as fast as it can.
        rate: Option<u32>,
    },
}

/// Payload of a small datagram, bytes: iperf3 sends none of 1 byte, and both are the same frame of minimal length.
pub const SMALL: u16 = 16;
/// Payload of the largest datagram that an MTU of 1,500 takes in one frame, bytes.
pub const LARGE: u16 = 1_472;
/// Datagrams a second of real time to each VM.
pub const RATE: u32 = 200_000;
/// Datagrams in a row at most, between two sleeps of a millisecond: what a tap's queue takes. A sender that was kept
/// from running makes good for that much.
const BURST: u128 = 1_000;

/// Traffic to or from bulk VMs.
pub struct Flood {
    flows: Vec<(String, Flow)>,
}

enum Flow {
    /// A test that runs until it is stopped.
    Iperf3(Child),
    /// A thread that sends until it is told.
    Datagrams { stop: Arc<AtomicBool>, sender: JoinHandle<()> },
}

impl Flood {
    /// Starts a flow for each VM (name and address), one after the other, each seen in the network's capture before the
    /// next.
    pub fn start(
        host: &mut Host,
        network: &str,
        vms: &[(impl AsRef<str>, impl AsRef<str>)],
        kind: Kind,
    ) -> Result<Self, MeasureError> {
        let (mut flood, capture) = (Self { flows: Vec::new() }, host.capture(network));
        if vms.is_empty() {
            return Err(
                HardwareError::NotHere("this load takes bulk tenants: [bulk] in the site's file".to_owned()).into()
            );
        }
        for (vm, address) in vms {
            let (vm, address) = (vm.as_ref(), address.as_ref());
            let (before, start) = (size(&capture), Instant::now());
            let mut flow = Flow::start(kind, address)?;
            while size(&capture) < before + kind.flowing() {
                if let Err(error) = host.alive() {
                    flow.end();
                    return Err(error);
                }
                if start.elapsed() > LIMIT {
                    return Err(flow.said(vm));
                }
                // A server that has not yet noticed the end of the last test is busy: ask again.
                if flow.has_ended() {
                    thread::sleep(Duration::from_millis(500));
                    flow = Flow::start(kind, address)?;
                }
                thread::sleep(Duration::from_millis(50));
            }
            flood.flows.push((vm.to_owned(), flow));
        }
        Ok(flood)
    }

    /// Ends it; it must have flowed until now.
    pub fn stop(mut self) -> Result<(), MeasureError> {
        for (vm, mut flow) in std::mem::take(&mut self.flows) {
            if flow.has_ended() {
                return Err(flow.said(&vm));
            }
            flow.end();
        }
        Ok(())
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        for (_, flow) in std::mem::take(&mut self.flows) {
            flow.end();
        }
    }
}

impl Kind {
    /// Growth of the capture, bytes, that shows that it flows.
    fn flowing(self) -> u64 {
        match self {
            Kind::Receive { .. } | Kind::Send { .. } => 2_000_000,
            Kind::ReceiveUdp { .. } | Kind::SendUdp { .. } => 200_000,
        }
    }
}

impl Flow {
    fn start(kind: Kind, address: &str) -> Result<Self, MeasureError> {
        match kind {
            Kind::Receive { streams } => iperf3(address, &["-P", &streams.to_string()]),
            Kind::Send { streams } => iperf3(address, &["-R", "-P", &streams.to_string()]),
            Kind::SendUdp { bytes, rate } => {
                // iperf3 counts the payload's bits; 0 is without limit.
                let bits = rate.map_or(0, |rate| u64::from(rate) * u64::from(bytes) * 8);
                iperf3(address, &["-R", "-u", "-b", &bits.to_string(), "-l", &bytes.to_string()])
            }
            Kind::ReceiveUdp { bytes } => datagrams(address, bytes),
        }
    }

    fn has_ended(&mut self) -> bool {
        match self {
            Flow::Iperf3(client) => client.try_wait().ok().flatten().is_some(),
            Flow::Datagrams { sender, .. } => sender.is_finished(),
        }
    }

    fn end(self) {
        match self {
            Flow::Iperf3(mut client) => {
                // SIGINT, so that iperf3 takes leave of its server.
                let _ = kill_process(Pid::from_child(&client), Signal::INT);
                let _ = client.wait();
            }
            Flow::Datagrams { stop, sender } => {
                stop.store(true, Ordering::Relaxed);
                let _ = sender.join();
            }
        }
    }

    /// The error of a flow that does not flow; ends it.
    fn said(self, vm: &str) -> MeasureError {
        let said = match self {
            Flow::Iperf3(mut client) => {
                let _ = client.kill();
                let _ = client.wait();
                let mut said = String::new();
                if let Some(mut pipe) = client.stderr.take() {
                    let _ = pipe.read_to_string(&mut said);
                }
                format!("iperf3 said: {}", said.trim())
            }
            Flow::Datagrams { .. } => {
                self.end();
                "nothing was captured".to_owned()
            }
        };
        MeasureError::Flood { vm: vm.to_owned(), said }
    }
}

fn iperf3(address: &str, arguments: &[&str]) -> Result<Flow, MeasureError> {
    let mut client = Command::new("iperf3");
    client
        .args(["-c", address, "-t", "86400", "-i", "0", "--connect-timeout", "30000"])
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    // On a real host's network nothing else would end it.
    let client = isolate::end_with_parent(&mut client, Signal::KILL).spawn();
    client.map(Flow::Iperf3).map_err(|source| MeasureError::File { path: "iperf3".into(), source })
}

/// Nobody needs to listen: the path to the VM and the VM's stack are what is loaded.
fn datagrams(address: &str, bytes: u16) -> Result<Flow, MeasureError> {
    let failed = |source| MeasureError::File { path: format!("UDP to {address}").into(), source };
    let socket = UdpSocket::bind("0.0.0.0:0").map_err(failed)?;
    socket.connect((address, PORT)).map_err(failed)?;
    let payload = vec![0; usize::from(bytes)];
    let stop = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&stop);
    let sender = thread::Builder::new().name("flood".to_owned()).spawn(move || {
        let mut last = Instant::now();
        while !told.load(Ordering::Relaxed) {
            thread::sleep(Duration::from_millis(1));
            let due = last.elapsed().as_micros() * u128::from(RATE) / 1_000_000;
            last = Instant::now();
            for _ in 0..due.min(BURST) {
                // "Port unreachable" comes back from a VM that finds the time; a full queue drops. Neither ends a
                // flood.
                let _ = socket.send(&payload);
            }
        }
    });
    sender.map(|sender| Flow::Datagrams { stop, sender }).map_err(failed)
}
