//! The clients' side inside the emulated machine, on its own CPU ([`ontime_lab::Clients::Inside`]).
//!
//! In: an [`Order`] from the lab. Out: packets, paced by the emulated machine's own clock. Each order is a process of
//! the hidden command `ontime-lab client`, which `lab-client` starts in the clients' namespace and on their CPU. The
//! code is the same as for sending from outside.

use std::fs::File;
use std::io::{self, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use ontime_lab::agent::Stream;
use ontime_lab::role::SYMBOLS_PORT;
use ontime_lab::{Lab, LabError};
use serde::{Deserialize, Serialize};

use crate::client::{self, ClientConfig, ClientError, Progress};
use crate::connections::Connecting;
use crate::cpu_load;
use crate::datagrams;
use crate::error::MeasureError;
use crate::memcached::{self, Traffic};
use crate::paced::Paced;
use crate::sampled::publisher::Publisher;
use crate::voip::sipp::{self, Asker, Calls};

/// Name of the command.
pub(crate) const COMMAND: &str = "client";
/// Limit of the real time for an order. If the host hangs, the lab notices it earlier.
const LIMIT: Duration = Duration::from_secs(86_400);
/// Interval between progress lines.
const TELL: Duration = Duration::from_secs(1);
/// Limit of the time until a guest connects to send its symbols, and of the time until it sends more.
const SYMBOLS_LIMIT: Duration = Duration::from_secs(30);
/// Time between two looks for a guest that connects.
const SYMBOLS_LOOK: Duration = Duration::from_millis(10);
/// Limit of a guest's symbols, bytes: ten times what a guest sends.
const SYMBOLS_BYTES: u64 = 64 << 20;
/// FIFO priority of a sender that keeps a steady rate: above the interrupt threads (50) of the clients' NICs, so that a
/// flood which the same CPU sends delays no frame.
const STEADY_PRIORITY: &str = "60";

/// The load that one process of the clients' side sends.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Order {
    /// Sends requests to a `sockperf server`, each after the answer to the last.
    Requests(ClientConfig),
    /// Sends requests to several of them at the same time.
    ToSeveral {
        /// Number and times of the requests to each. The seed is that of the first server; each other has the next.
        config: ClientConfig,
        servers: Vec<SocketAddr>,
    },
    /// Waits until memcached listens, and stores a value for every key.
    Store {
        server: SocketAddr,
        /// Sizes of keys and values.
        traffic: Traffic,
    },
    /// Sends GETs and SETs of stored keys, each after the answer to the last.
    Memcached {
        /// Server, number and times of the requests.
        config: ClientConfig,
        traffic: Traffic,
        /// Number of connections. Requests use them in turn.
        connections: u8,
    },
    /// Makes TCP connections with one request each.
    Connecting(Connecting),
    /// Sets the RT guest's own CPU load.
    CpuLoad {
        /// The guest's socket for it.
        address: SocketAddr,
        /// Percent.
        percent: u8,
    },
    /// Publishes frames of Sampled Values.
    SampledValues {
        nic: String,
        /// Number of frames.
        frames: u64,
    },
    /// Asks a SIP server's state, each time after the answer to the last question.
    SipOptions(ClientConfig),
    /// Receives what a guest's addresses mean (`ontime_lab::role::SYMBOLS`), by one connection.
    GuestSymbols {
        /// Where it is written.
        file: PathBuf,
    },
    /// Sends datagrams at a steady rate.
    Paced {
        /// The datagrams and their number.
        load: Paced,
        /// Time after which the load ends, even before its last datagram.
        length: Option<Duration>,
    },
    /// Waits until a SIP proxy answers.
    AwaitProxy(SocketAddr),
    /// Makes calls through a SIP proxy.
    Calls(Calls),
    /// Sends datagrams to this IP address at [`datagrams::RATE`], until the process is killed.
    Flood {
        /// The VM's address.
        address: String,
        /// Size of the payload, bytes.
        bytes: u16,
    },
}

impl Order {
    /// The command line for this order.
    pub(crate) fn command(&self) -> Result<Vec<String>, ClientError> {
        let order = serde_json::to_string(self).map_err(|error| ClientError::Config(error.to_string()))?;
        let mut words = vec!["lab-client"];
        if matches!(self, Order::SampledValues { .. } | Order::Paced { .. }) {
            words.extend(["chrt", "--fifo", STEADY_PRIORITY]);
        }
        words.extend(["ontime-lab", COMMAND, &order]);
        Ok(words.into_iter().map(str::to_owned).collect())
    }

    /// Runs the order in the emulated machine. `tell` gets progress lines.
    pub(crate) fn run(&self, lab: &mut Lab, tell: &mut dyn FnMut(&str)) -> Result<(), MeasureError> {
        self.run_by(tell, |argv, sink| lab.run(argv, &[], LIMIT, sink).map(Some))
    }

    /// As [`Self::run`], without a limit: `go_on` is called several times per second of real time. When it breaks, the
    /// order's process is killed.
    pub(crate) fn run_while(
        &self,
        lab: &mut Lab,
        tell: &mut dyn FnMut(&str),
        go_on: &mut dyn FnMut() -> ControlFlow<()>,
    ) -> Result<(), MeasureError> {
        self.run_by(tell, |argv, sink| lab.run_while(argv, sink, go_on))
    }

    /// `run` runs a command and passes on its output. It returns no status if it killed the command.
    fn run_by(
        &self,
        tell: &mut dyn FnMut(&str),
        run: impl FnOnce(&[&str], &mut dyn FnMut(Stream, &[u8])) -> Result<Option<i32>, LabError>,
    ) -> Result<(), MeasureError> {
        let command = self.command()?;
        let argv: Vec<&str> = command.iter().map(String::as_str).collect();
        let mut said = Vec::new();
        let status = run(&argv, &mut |stream, bytes| match stream {
            Stream::Out => String::from_utf8_lossy(bytes).lines().for_each(&mut *tell),
            Stream::Err => said.extend_from_slice(bytes),
        })?;
        if status.is_none_or(|status| status == 0) {
            return Ok(());
        }
        let said = String::from_utf8_lossy(&said).trim().to_owned();
        Err(MeasureError::Program { program: format!("the clients' side ({COMMAND})"), said })
    }

    /// Executes the order in this process.
    pub(crate) fn carry_out(&self) -> Result<(), ClientError> {
        let mut told = Instant::now();
        let mut tell = |line: &dyn std::fmt::Display| {
            if told.elapsed() > TELL {
                told = Instant::now();
                println!("{line}");
            }
            ControlFlow::Continue(())
        };
        match self {
            Order::Requests(config) => client::run(config, |at| tell(at)).map(|_| ()),
            Order::ToSeveral { config, servers } => to_several(config, servers, |at| tell(at)),
            Order::Store { server, traffic } => {
                memcached::client::Client::open_when_up(*server, *traffic, 1, 0, || Ok(())).map(|_| ())
            }
            Order::Memcached { config, traffic, connections } => {
                let mut peer = memcached::client::Client::connect(config.server, *traffic, *connections, config.seed)?;
                client::run_with(config, &mut peer, |at| tell(at)).map(|_| ())
            }
            Order::SipOptions(config) => {
                client::run_with(config, &mut Asker::open(config.server)?, |at| tell(at)).map(|_| ())
            }
            Order::GuestSymbols { file } => guest_symbols(file),
            Order::Connecting(connections) => connections.make(),
            Order::CpuLoad { address, percent } => cpu_load::set(*address, *percent, || Ok(())),
            Order::SampledValues { nic, frames } => Publisher::open(nic)?.run(*frames, |published| {
                // Progress never ends the load.
                let _ = tell(&format!("{published} frames"));
                Ok(())
            }),
            Order::Paced { load, length } => {
                let start = Instant::now();
                load.send(|sent| match length {
                    Some(length) if start.elapsed() >= *length => ControlFlow::Break(()),
                    _ => tell(&sent),
                })
            }
            Order::AwaitProxy(proxy) => sipp::wait_for(*proxy, || Ok(())),
            Order::Calls(calls) => {
                let error = |source| ClientError::Told(format!("a directory for SIPp's files: {source}"));
                let dir = tempfile::tempdir().map_err(error)?;
                calls.make(dir.path(), |progress| {
                    // Progress never ends the load.
                    let _ = tell(progress);
                    Ok(())
                })
            }
            Order::Flood { address, bytes } => {
                let error = |source| ClientError::Told(format!("UDP to {address}: {source}"));
                datagrams::send(&datagrams::socket(address).map_err(error)?, *bytes, || false);
                Ok(())
            }
        }
    }
}

/// Waits [`SYMBOLS_LIMIT`] for a guest, which connects once its server is up, and writes to `file` what it sends. If no
/// guest connects, the file is empty.
fn guest_symbols(file: &Path) -> Result<(), ClientError> {
    let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, SYMBOLS_PORT));
    let failed = |what| move |source| ClientError::Socket { what, address, source };
    let listener = TcpListener::bind(address).map_err(failed("bind to"))?;
    listener.set_nonblocking(true).map_err(failed("use"))?;
    let mut text = File::create(file).map_err(|error| ClientError::Told(format!("{}: {error}", file.display())))?;
    let start = Instant::now();
    while start.elapsed() < SYMBOLS_LIMIT {
        match listener.accept() {
            Ok((guest, _)) => {
                guest
                    .set_nonblocking(false)
                    .and_then(|()| guest.set_read_timeout(Some(SYMBOLS_LIMIT)))
                    .map_err(failed("use"))?;
                // Half of a text has no end.
                let _ = io::copy(&mut guest.take(SYMBOLS_BYTES), &mut text);
                return Ok(());
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => thread::sleep(SYMBOLS_LOOK),
            Err(error) => return Err(failed("accept a guest at")(error)),
        }
    }
    Ok(())
}

/// Sends requests to each server from a thread of its own; `tell` gets the progress of the first.
fn to_several(
    config: &ClientConfig,
    servers: &[SocketAddr],
    tell: impl FnMut(&Progress) -> ControlFlow<()>,
) -> Result<(), ClientError> {
    let mut configs = (0..).zip(servers).map(|(number, server)| {
        let (server, seed) = (*server, config.seed.wrapping_add(number));
        ClientConfig { server, seed, ..config.clone() }
    });
    let Some(first) = configs.next() else { return Ok(()) };
    thread::scope(|scope| {
        let client = |config| scope.spawn(move || client::run(&config, |_| ControlFlow::Continue(())).map(|_| ()));
        let others: Vec<_> = configs.map(client).collect();
        let ended = client::run(&first, tell).map(|_| ());
        let panicked = |_| Err(ClientError::Told("a client's thread panicked; this is a defect of Ontime".to_owned()));
        others.into_iter().map(|other| other.join().unwrap_or_else(panicked)).fold(ended, Result::and)
    })
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;

    use super::*;

    #[test]
    fn an_order_arrives_as_it_was_given() {
        let server = "10.1.0.2:11111".parse().unwrap();
        let paced = Paced { server, message_bytes: 64, rate: 123.5, count: 9 };
        let orders = [
            Order::Requests(ClientConfig { min_gap_us: 7, ..ClientConfig::new(server, 20_000, 3) }),
            Order::ToSeveral { config: ClientConfig::new(server, 20, 3), servers: vec![server; 100] },
            Order::Store { server, traffic: memcached::RTVIRT },
            Order::Memcached { config: ClientConfig::new(server, 9, 4), traffic: memcached::ACCESS, connections: 4 },
            Order::Connecting(Connecting { server, count: 1_000, clients: 8 }),
            Order::CpuLoad { address: server, percent: 80 },
            Order::SampledValues { nic: "rt".to_owned(), frames: 4_100 },
            Order::Paced { load: paced.clone(), length: None },
            Order::Paced { load: Paced { count: u64::MAX, ..paced }, length: Some(Duration::from_secs(43_200)) },
            Order::AwaitProxy(server),
            Order::Calls(Calls { proxy: server, count: 170, seed: u64::MAX }),
            Order::Flood { address: "10.2.0.2".to_owned(), bytes: datagrams::SMALL },
        ];
        for order in orders {
            let command = order.command().unwrap();
            assert_eq!(command.first().map(String::as_str), Some("lab-client"));
            assert_eq!(serde_json::from_str::<Order>(command.last().unwrap()).unwrap(), order);
            let is_steady = matches!(order, Order::SampledValues { .. } | Order::Paced { .. });
            assert_eq!(command.iter().any(|word| word == "chrt"), is_steady, "{command:?}");
        }
    }

    #[test]
    fn several_servers_have_a_client_each() {
        let sockets: Vec<UdpSocket> = (0..3).map(|_| UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
        let servers: Vec<SocketAddr> = sockets.iter().map(|socket| socket.local_addr().unwrap()).collect();
        let config = ClientConfig {
            min_gap_us: 0,
            max_gap_us: 100,
            timeout_us: 5_000_000,
            give_up_after: 2,
            ..ClientConfig::new(servers[0], 5, 1)
        };
        thread::scope(|scope| {
            for socket in &sockets {
                scope.spawn(move || {
                    for _ in 0..5 {
                        let mut message = [0; 64];
                        let (length, client) = socket.recv_from(&mut message).unwrap();
                        // A reply is the request without the client's flag.
                        message[9] &= !1;
                        socket.send_to(&message[..length], client).unwrap();
                    }
                });
            }
            // The seed that follows the largest one is 0.
            let config = ClientConfig { seed: u64::MAX, ..config.clone() };
            Order::ToSeveral { config, servers: servers.clone() }.carry_out().unwrap();
        });
        // One that is not there fails the whole, whichever it is.
        drop(sockets);
        let quick = ClientConfig { timeout_us: 1_000, ..config };
        assert!(Order::ToSeveral { config: quick.clone(), servers }.carry_out().is_err());
        assert!(Order::ToSeveral { config: quick, servers: Vec::new() }.carry_out().is_ok());
    }

    #[test]
    fn a_steady_load_ends_after_its_time() {
        let server = UdpSocket::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let load = Paced { server, message_bytes: 64, rate: 100.0, count: u64::MAX };
        Order::Paced { load, length: Some(Duration::from_millis(50)) }.carry_out().unwrap();
    }

    #[test]
    fn a_server_that_is_not_there_is_told() {
        let nobody = ClientConfig {
            timeout_us: 1_000,
            give_up_after: 2,
            ..ClientConfig::new("127.0.0.1:9".parse().unwrap(), 3, 1)
        };
        let error = Order::Requests(nobody.clone()).carry_out().unwrap_err().to_string();
        assert!(error.contains("127.0.0.1:9") && error.contains("did not answer"), "{error}");
        let to_memcached = Order::Memcached { config: nobody, traffic: memcached::ACCESS, connections: 2 };
        let error = to_memcached.carry_out().unwrap_err().to_string();
        assert!(error.contains("127.0.0.1:9") && error.contains("connect to"), "{error}");
        let nowhere = Order::SampledValues { nic: "no-such-nic".to_owned(), frames: 1 };
        assert!(nowhere.carry_out().is_err());
    }
}
