//! Bulk traffic of the experiments, from the clients' side: iperf3, whose server runs in the bulk VMs, or bare
//! datagrams where iperf3's own control connection would starve.
//!
//! In: the VMs, the kind of traffic, and the capture that shows it. Out: a running [`Flood`], which [`Flood::stop`] or
//! dropping ends. Senders outside (on the real clock) send less on a busy machine than the host could receive.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ontime_lab::isolate;
use rustix::process::{Pid, Signal, kill_process};

use crate::client_side::Order;
use crate::datagrams;
use crate::error::MeasureError;
use crate::hardware::HardwareError;
use crate::host::{Host, size};

/// Limit of the real time to wait for a server that is busy with the previous test, or for a slow VM.
const LIMIT: Duration = Duration::from_secs(120);

/// The traffic between the clients' side and a bulk VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
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
    /// The VM receives UDP datagrams, [`datagrams::RATE`] per second: more than an emulated host can
    /// receive.
    ReceiveUdp {
        /// Size of the payload, bytes: [`datagrams::SMALL`] or [`datagrams::LARGE`].
        bytes: u16,
    },
    /// The VM sends UDP datagrams.
    SendUdp {
        /// Size of the payload, bytes: [`datagrams::SMALL`] or [`datagrams::LARGE`].
        bytes: u16,
        /// Datagrams per second of the VM's time; `None` for as fast as possible.
        rate: Option<u32>,
    },
}

/// Traffic to or from bulk VMs.
pub(crate) struct Flood {
    flows: Vec<(String, Flow)>,
}

enum Flow {
    /// A process of the clients' side in the emulated machine; its process id there.
    Inside(String),
    /// A test that runs until it is stopped.
    Iperf3(Child),
    /// A thread that sends until `stop` is set.
    Datagrams { stop: Arc<AtomicBool>, sender: JoinHandle<()> },
}

impl Flood {
    /// Starts a flow for each VM (name and address), one after the other. Each must appear in the network's capture
    /// before the next starts.
    pub(crate) fn start(
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
            match flowing(host, &capture, kind, (vm.as_ref(), address.as_ref())) {
                Ok(flow) => flood.flows.push((vm.as_ref().to_owned(), flow)),
                Err(error) => {
                    flood.end(host);
                    return Err(error);
                }
            }
        }
        Ok(flood)
    }

    /// Ends the flood. It is an error if a flow has ended earlier.
    pub(crate) fn stop(mut self, host: &mut Host) -> Result<(), MeasureError> {
        let mut ended = None;
        for (vm, flow) in &mut self.flows {
            if flow.has_ended(host)? {
                ended.get_or_insert(vm.clone());
            }
        }
        match ended.and_then(|vm| self.flows.iter().position(|(of, _)| *of == vm)) {
            None => {
                self.end(host);
                Ok(())
            }
            Some(at) => {
                let (vm, flow) = self.flows.swap_remove(at);
                self.end(host);
                Err(flow.failure(host, &vm))
            }
        }
    }

    fn end(mut self, host: &mut Host) {
        for (_, flow) in std::mem::take(&mut self.flows) {
            flow.end(Some(host));
        }
    }
}

/// A flow to this VM (name and address), after the capture has shown it.
fn flowing(host: &mut Host, capture: &Path, kind: Kind, (vm, address): (&str, &str)) -> Result<Flow, MeasureError> {
    let (before, start) = (size(capture), Instant::now());
    let mut flow = Flow::start(host, kind, address)?;
    while size(capture) < before + kind.flowing() {
        if let Err(error) = host.alive() {
            flow.end(Some(host));
            return Err(error);
        }
        if start.elapsed() > LIMIT {
            return Err(flow.failure(host, vm));
        }
        // A server that has not yet noticed the end of the previous test is busy: try again.
        if flow.has_ended(host)? {
            pause(host, Duration::from_millis(500))?;
            flow = Flow::start(host, kind, address)?;
        }
        pause(host, Duration::from_millis(50))?;
    }
    Ok(flow)
}

/// Lets time pass: that of the senders. If they are in the emulated machine, its time stands still while no command
/// runs in it.
fn pause(host: &mut Host, time: Duration) -> Result<(), MeasureError> {
    if host.has_client_cpu() {
        return host.ask(&format!("sleep {}", time.as_secs_f64())).map(drop);
    }
    thread::sleep(time);
    Ok(())
}

impl Drop for Flood {
    fn drop(&mut self) {
        for (_, flow) in std::mem::take(&mut self.flows) {
            flow.end(None);
        }
    }
}

impl Kind {
    /// The growth of the capture, bytes, from which the flow counts as running.
    fn flowing(self) -> u64 {
        match self {
            Kind::Receive { .. } | Kind::Send { .. } => 2_000_000,
            Kind::ReceiveUdp { .. } | Kind::SendUdp { .. } => 200_000,
        }
    }
}

impl Flow {
    fn start(host: &mut Host, kind: Kind, address: &str) -> Result<Self, MeasureError> {
        let own = match kind {
            Kind::Receive { streams } => vec!["-P".to_owned(), streams.to_string()],
            Kind::Send { streams } => vec!["-R".to_owned(), "-P".to_owned(), streams.to_string()],
            Kind::SendUdp { bytes, rate } => {
                // iperf3 counts bits of the payload; 0 is no limit.
                let bits = rate.map_or(0, |rate| u64::from(rate) * u64::from(bytes) * 8);
                ["-R", "-u", "-b", &bits.to_string(), "-l", &bytes.to_string()].map(str::to_owned).into()
            }
            Kind::ReceiveUdp { bytes } if host.has_client_cpu() => {
                return inside(host, &Order::Flood { address: address.to_owned(), bytes }.command()?);
            }
            Kind::ReceiveUdp { bytes } => return send_datagrams(address, bytes),
        };
        let mut words = ["iperf3", "-c", address, "-t", "86400", "-i", "0", "--connect-timeout", "30000"]
            .map(str::to_owned)
            .to_vec();
        words.extend(own);
        if host.has_client_cpu() {
            words.insert(0, "lab-client".to_owned());
            return inside(host, &words);
        }
        iperf3(&words)
    }

    fn has_ended(&mut self, host: &mut Host) -> Result<bool, MeasureError> {
        Ok(match self {
            Flow::Inside(pid) => host.ask(&format!("kill -0 {pid} 2> /dev/null && echo runs || true"))?.is_empty(),
            Flow::Iperf3(client) => client.try_wait().ok().flatten().is_some(),
            Flow::Datagrams { sender, .. } => sender.is_finished(),
        })
    }

    /// Ends the flow. A flow inside the emulated machine ends with the machine if no host is given.
    fn end(self, host: Option<&mut Host>) {
        match self {
            Flow::Inside(pid) => {
                // SIGINT makes iperf3 end the test with its server. A shell has its background commands ignore it.
                let end = format!("kill -INT -{pid} 2> /dev/null; sleep 0.2; kill -KILL -{pid} 2> /dev/null; true");
                let told = host.map(|host| host.ask(&end));
                // If the host has ended, the next operation on it reports that.
                drop(told);
            }
            Flow::Iperf3(mut client) => {
                // SIGINT makes iperf3 end the test with its server.
                let _ = kill_process(Pid::from_child(&client), Signal::INT);
                let _ = client.wait();
            }
            Flow::Datagrams { stop, sender } => {
                stop.store(true, Ordering::Relaxed);
                let _ = sender.join();
            }
        }
    }

    /// The error for a flow that does not run. Ends the flow.
    fn failure(self, host: &mut Host, vm: &str) -> MeasureError {
        let said = match self {
            Flow::Inside(pid) => {
                let said = host.ask(&format!("kill -KILL -{pid} 2> /dev/null; cat /run/flow-{pid}"));
                format!("it said: {}", said.unwrap_or_else(|error| error.to_string()).trim())
            }
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
                self.end(None);
                "nothing was captured".to_owned()
            }
        };
        MeasureError::Flood { vm: vm.to_owned(), said }
    }
}

/// Starts a command of the clients' side in the emulated machine, as the leader of a process group.
fn inside(host: &mut Host, words: &[String]) -> Result<Flow, MeasureError> {
    let words: Vec<String> = words.iter().map(|word| format!("'{word}'")).collect();
    let start =
        format!("setsid sh -c 'exec > /run/flow-$$ 2>&1 < /dev/null; exec \"$@\"' sh {} & echo $!", words.join(" "));
    Ok(Flow::Inside(host.shell(&start)?.trim().to_owned()))
}

fn iperf3(words: &[String]) -> Result<Flow, MeasureError> {
    let (program, arguments) = words.split_first().map_or(("", words), |(program, rest)| (program.as_str(), rest));
    let mut client = Command::new(program);
    client.args(arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
    // On a real host's network nothing else would end the process.
    let client = isolate::end_with_parent(&mut client, Signal::KILL).spawn();
    client.map(Flow::Iperf3).map_err(|source| MeasureError::File { path: "iperf3".into(), source })
}

/// No receiver is needed: the load is on the path to the VM and on the VM's network stack.
fn send_datagrams(address: &str, bytes: u16) -> Result<Flow, MeasureError> {
    let failed = |source| MeasureError::File { path: format!("UDP to {address}").into(), source };
    let socket = datagrams::socket(address).map_err(failed)?;
    let stop = Arc::new(AtomicBool::new(false));
    let told = Arc::clone(&stop);
    let flood = move || datagrams::send(&socket, bytes, || told.load(Ordering::Relaxed));
    let sender = thread::Builder::new().name("flood".to_owned()).spawn(flood);
    sender.map(|sender| Flow::Datagrams { stop, sender }).map_err(failed)
}
