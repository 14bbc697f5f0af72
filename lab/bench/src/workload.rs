//! The RT servers and their clients: the server program, the client, and the analysis of the capture.
//!
//! In: a [`Workload`] and the host. Out: requests on the wire, and response times from its capture. [`crate::server`]
//! decides on the server's place, in the same way for all workloads.

use std::net::{IpAddr, SocketAddr};
use std::ops::ControlFlow;
use std::path::Path;
use std::time::{Duration, Instant};

use ontime_figures::number;
use ontime_figures::stats::Summary;

use crate::client::{self, ClientConfig};
use crate::client_side::Order;
use crate::cpu_load;
use crate::error::MeasureError;
use crate::host::Host;
use crate::memcached;
use crate::pcap::PcapError;
use crate::progress::progress;
use crate::sampled;
use crate::sampled::publisher::Publisher;
use crate::server::{self, Server};
use crate::voip;
use crate::voip::sipp::{self, Calls};
use crate::wire::{self, RtFlow, WireAnalysis};

/// Number of requests until a real host's server without answers counts as missing: 3 s.
const PROBES: u64 = 30;
/// Limit of a request's time over TCP on the host's clock, us: retransmissions begin at 0.2 s and double.
const TCP_TIMEOUT_US: u64 = 10_000_000;
/// Bytes of a frame that contain a whole SIP message.
const WHOLE_FRAME: u32 = 2_048;
/// Bytes of a frame that contain its headers.
pub(crate) const HEADERS: u32 = 96;

/// A server and its load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Workload {
    /// `sockperf server`, UDP (Access'18, IV-A).
    Sockperf {
        /// Size of a message, [`crate::sockperf::HEADER`] to [`crate::sockperf::LONGEST`].
        message_bytes: usize,
    },
    /// memcached, TCP (IV-G 2; RTVirt, section 4.4).
    Memcached {
        traffic: memcached::Traffic,
        /// Number of the client's connections. Requests use them in turn.
        connections: u8,
    },
    /// Kamailio, UDP, between two SIPp (IV-G 1).
    Voip,
    /// `sockperf server`, UDP, in a VM with its own CPU load (`xen-arm`).
    Loaded {
        /// CPU load, percent.
        percent: u8,
    },
    /// A subscriber of raw Ethernet frames in a VM ([`crate::sampled`]); it has no address.
    SampledValues,
}

/// sockperf with the client's own messages.
pub(crate) const SOCKPERF: Workload = Workload::Sockperf { message_bytes: client::MESSAGE_BYTES };

/// A client that is ready: the server is up.
pub(crate) enum Client {
    /// The client for sockperf. Its first request is the first that the server receives.
    Sockperf {
        /// As in [`Workload::Sockperf`].
        message_bytes: usize,
    },
    /// Every key has a value.
    Memcached {
        traffic: memcached::Traffic,
        /// As in [`Workload::Memcached`].
        connections: u8,
        /// Connected; `None` if the client is in the emulated machine, where it connects before its first request.
        outside: Option<Box<memcached::client::Client>>,
    },
    /// The guest has its CPU load.
    Loaded,
    /// The proxy has answered.
    Voip,
    /// The publisher's socket is open; `None` if the publisher is in the emulated machine.
    SampledValues(Option<Publisher>),
}

/// One measured stretch.
#[derive(Debug)]
pub(crate) struct Load<'a> {
    /// Number of requests, including those that do not count.
    pub requests: u64,
    /// Seed of everything random.
    pub seed: u64,
    /// Directory for logs.
    pub dir: &'a Path,
    /// Name of the case, for progress messages.
    pub name: &'a str,
}

impl Workload {
    /// The server program.
    pub(crate) fn server(self) -> Server {
        match self {
            Workload::Sockperf { .. } => server::SOCKPERF,
            Workload::Memcached { .. } => server::MEMCACHED,
            Workload::Voip => server::KAMAILIO,
            Workload::Loaded { .. } => server::LOADED_SOCKPERF,
            Workload::SampledValues => server::SUBSCRIBER,
        }
    }

    /// Address of the server on an emulated host's RT network.
    pub(crate) fn address(self) -> SocketAddr {
        SocketAddr::new(IpAddr::from(server::ADDRESS), self.server().port)
    }

    /// Address of the server on this host.
    pub(crate) fn on(self, host: &Host) -> SocketAddr {
        host.target().map_or_else(|| self.address(), |target| target.site().rt.server)
    }

    /// Bytes of a frame that the RT NIC's capture must contain.
    pub(crate) fn captured(self) -> u32 {
        if self == Workload::Voip { WHOLE_FRAME } else { HEADERS }
    }

    /// Prepares the client, before the measurement.
    pub(crate) fn ready(self, host: &mut Host, seed: u64) -> Result<Client, MeasureError> {
        match self {
            Workload::Sockperf { message_bytes } => {
                // An experiment has checked that its own VM answers; a real host's may not.
                if host.target().is_some() {
                    client::run(&ClientConfig::probe(self.on(host), PROBES), |_| ControlFlow::Continue(()))?;
                }
                Ok(Client::Sockperf { message_bytes })
            }
            Workload::Loaded { percent } => {
                let address = SocketAddr::from((server::ADDRESS, cpu_load::PORT));
                if host.has_client_cpu() {
                    Order::CpuLoad { address, percent }.run(host.lab()?, &mut |_| {})?;
                } else {
                    cpu_load::set(address, percent, || host.alive())?;
                }
                Ok(Client::Loaded)
            }
            Workload::Voip => voip::wait_for_proxy(host, self.address()).map(|()| Client::Voip),
            Workload::SampledValues => {
                let outside = !host.has_client_cpu();
                Ok(Client::SampledValues(outside.then(|| Publisher::open(host.client_nic())).transpose()?))
            }
            Workload::Memcached { traffic, connections } if host.has_client_cpu() => {
                Order::Store { server: self.address(), traffic }.run(host.lab()?, &mut |_| {})?;
                Ok(Client::Memcached { traffic, connections, outside: None })
            }
            Workload::Memcached { traffic, connections } => {
                let go_on = || host.alive();
                let client =
                    memcached::client::Client::open_when_up(self.address(), traffic, connections, seed, go_on)?;
                Ok(Client::Memcached { traffic, connections, outside: Some(Box::new(client)) })
            }
        }
    }

    /// Sends the load.
    pub(crate) fn send(self, client: Client, host: &mut Host, load: &Load<'_>) -> Result<(), MeasureError> {
        let config = ClientConfig::new(self.on(host), load.requests, load.seed);
        match client {
            Client::Sockperf { message_bytes } => host.requests(ClientConfig { message_bytes, ..config }, load.name),
            Client::Memcached { traffic, connections, outside } => {
                let (min_gap_us, max_gap_us) = traffic.gaps_us;
                let config = ClientConfig {
                    requests: Some(traffic.requests(load.requests)),
                    timeout_us: TCP_TIMEOUT_US,
                    give_up_after: 3,
                    min_gap_us,
                    max_gap_us,
                    normal_gaps: traffic.normal_gaps,
                    ..config
                };
                match outside {
                    Some(mut client) => host.requests_to(client.as_mut(), &config, load.name),
                    None => Order::Memcached { config, traffic, connections }
                        .run(host.lab()?, &mut |line| progress(format_args!("{}: {line}", load.name))),
                }
            }
            Client::Loaded => {
                let (min_gap_us, max_gap_us) = cpu_load::GAPS_US;
                let config = ClientConfig { min_gap_us, max_gap_us, ..config };
                host.requests(config, load.name)
            }
            Client::Voip => {
                let (count, seed) = (voip::calls(load.requests), load.seed);
                let calls = Calls { proxy: self.address(), count, seed };
                voip::make_calls(host, &calls, load.dir, load.name)
            }
            Client::SampledValues(publisher) => {
                publish(publisher, host, load)?;
                // Frames in flight are answered meanwhile.
                host.shell("sleep 0.3").map(|_| ())
            }
        }
    }

    /// Response times of `requests` with this `seed` to this `port`, and notes for the reader.
    pub(crate) fn analyse(
        self,
        capture: &Path,
        port: u16,
        warmup: u64,
        (requests, seed): (u64, u64),
    ) -> Result<(WireAnalysis, Vec<String>), PcapError> {
        match self {
            Workload::Sockperf { .. } | Workload::Loaded { .. } => {
                Ok((wire::analyse(capture, RtFlow { warmup, ..RtFlow::new(port) })?, Vec::new()))
            }
            Workload::Memcached { traffic, connections } => {
                let memcached::wire::Analysis { gets, sets } =
                    memcached::wire::analyse(capture, port, traffic, warmup)?;
                if traffic.set_of.is_none() {
                    return Ok((gets, Vec::new()));
                }
                let asked = format!(
                    "GETs over {connections} TCP connections; {} SETs between them have no response time here, as in \
                     the paper",
                    number::count(sets)
                );
                Ok((gets, vec![asked]))
            }
            Workload::Voip => {
                let analysis = voip::wire::analyse(capture, port, warmup)?;
                let mut notes = vec![analysis.kept_up(sipp::offered(seed, voip::calls(requests)))];
                let voip::wire::Analysis { forwards, invites_ns, .. } = analysis;
                if let Some(invites) = Summary::of(&invites_ns) {
                    let us = |ns: u64| number::us(ns as f64 / 1e3);
                    notes.push(format!(
                        "INVITE alone: {} of them, p50 {}, p99 {}, max {} us",
                        invites_ns.len(),
                        us(invites.p50),
                        us(invites.p99),
                        us(invites.max)
                    ));
                }
                Ok((forwards, notes))
            }
            Workload::SampledValues => {
                let wire = sampled::wire::analyse(capture, warmup)?;
                let gaps = wire.intervals_ns.iter().filter(|gap| **gap > sampled::GAP_NS).count();
                let note =
                    format!("before {gaps} of {} frames, a period passed without a frame", wire.intervals_ns.len());
                Ok((wire, if gaps > 0 { vec![note] } else { Vec::new() }))
            }
        }
    }

    /// Command-line options that select this workload.
    pub(crate) fn options(self) -> Vec<String> {
        match self {
            Workload::Memcached { connections, .. } => vec!["--connections".to_owned(), connections.to_string()],
            Workload::Sockperf { .. } | Workload::Loaded { .. } | Workload::Voip | Workload::SampledValues => {
                Vec::new()
            }
        }
    }

    /// Time after which an answer is late, ns; `None` for never.
    pub(crate) fn late_ns(self) -> Option<u64> {
        match self {
            Workload::SampledValues => Some(sampled::LATE_NS),
            Workload::Loaded { .. } => Some(cpu_load::SPIKE_NS),
            Workload::Memcached { traffic, .. } => traffic.late_ns,
            Workload::Sockperf { .. } | Workload::Voip => None,
        }
    }
}

/// Publishes `load.requests` frames.
fn publish(publisher: Option<Publisher>, host: &mut Host, load: &Load<'_>) -> Result<(), MeasureError> {
    let Some(publisher) = publisher else {
        let order = Order::SampledValues { nic: host.client_nic().to_owned(), frames: load.requests };
        return order.run(host.lab()?, &mut |line| progress(format_args!("{}: {line}", load.name)));
    };
    let (mut looked, mut told) = (Instant::now(), Instant::now());
    publisher.run(load.requests, |frames: u64| {
        if looked.elapsed() > Duration::from_millis(200) {
            looked = Instant::now();
            host.alive()?;
        }
        if told.elapsed() > Duration::from_secs(5) {
            told = Instant::now();
            progress(format_args!("{}: {frames} frames", load.name));
        }
        Ok(())
    })
}
