//! Metrics over TCP, if `daemon.toml` has a port: `GET /metrics` and nothing else.
//!
//! In: connections of any client that can reach the address. Out: the main loop's metrics. Clients may be hostile. At
//! most [`CLIENTS`] connections are served at a time, [`OF_ONE`] of an address; each has [`HEAD`] for its request and
//! [`WHOLE`] in all. For a further connection of an address its oldest one is closed, because several programs may have
//! one address (a proxy's, 127.0.0.1); others wait in the kernel's backlog. However many clients ask, the main loop
//! gets one request at a time, and at most one in [`FRESH`]. The thread runs at SCHED_OTHER, at nice 0.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ACCEPT, ALLOW, CONTENT_TYPE};
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::sync::{Mutex, Semaphore, oneshot};
use tokio::task::AbortHandle;

use super::format::Format;
use crate::daemon::http::{Ask, Loop};
use crate::daemon::nice;

/// Connections served at a time.
const CLIENTS: usize = 16;
/// Connections of one address, of one IPv6 network of 64 bits, or of this host's loopback addresses together, that are
/// served at a time.
const OF_ONE: usize = 4;
/// The time limit for a request's head.
const HEAD: Duration = Duration::from_secs(2);
/// The time limit for a connection. An answer of the main loop takes at most [`crate::api::PATIENCE`].
const WHOLE: Duration = Duration::from_secs(30);
/// How long a text is reused for all clients.
const FRESH: Duration = Duration::from_secs(1);
/// The largest head of a request, bytes.
const HEAD_MAX: usize = 16 << 10;

/// The running listener, if any.
#[derive(Default)]
pub(crate) struct Server {
    running: Option<(SocketAddr, oneshot::Sender<()>)>,
}

impl Server {
    /// Listens at this address and no other; None: does not listen.
    ///
    /// # Errors
    /// The kernel's error. Then nothing listens, and the next call tries again.
    pub(crate) fn follow(&mut self, wanted: Option<SocketAddr>, to: &Loop) -> io::Result<()> {
        if self.running.as_ref().map(|(address, _)| *address) == wanted {
            return Ok(());
        }
        // Dropping the sender ends the old listener. If its port is still busy, `bind` below reports it.
        self.running = None;
        let Some(address) = wanted else { return Ok(()) };
        let (end, ended) = oneshot::channel();
        serve(bind(address)?, to.clone(), ended)?;
        self.running = Some((address, end));
        Ok(())
    }
}

fn bind(address: SocketAddr) -> io::Result<TcpListener> {
    let listener = TcpListener::bind(address)?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// Serves until `ended` resolves, on a thread of its own.
fn serve(listener: TcpListener, to: Loop, ended: oneshot::Receiver<()>) -> io::Result<()> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let listener = {
        let _in_runtime = runtime.enter();
        tokio::net::TcpListener::from_std(listener)?
    };
    std::thread::Builder::new().name("ontime-metrics".into()).stack_size(1 << 20).spawn(move || {
        // The main thread's nice -20 is meant for clients of the Unix socket, not for everybody.
        nice::of_this_thread(nice::ORDINARY);
        runtime.block_on(async {
            tokio::select! {
                () = accept(listener, Arc::new(Source { to, last: Mutex::new(None) })) => {}
                _ = ended => {}
            }
        });
    })?;
    Ok(())
}

async fn accept(listener: tokio::net::TcpListener, source: Arc<Source>) {
    let places = Arc::new(Semaphore::new(CLIENTS));
    let mut clients: BTreeMap<IpAddr, VecDeque<AbortHandle>> = BTreeMap::new();
    loop {
        let (stream, address) = match listener.accept().await {
            Ok(accepted) => accepted,
            // The client has left, or no descriptor is free. Wait a moment and go on.
            Err(error) => {
                tracing::debug!("metrics: {error}");
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        clients.retain(|_, connections| {
            connections.retain(|one| !one.is_finished());
            !connections.is_empty()
        });
        let connections = clients.entry(network(address.ip())).or_default();
        if connections.len() >= OF_ONE {
            connections.pop_front().iter().for_each(AbortHandle::abort);
        }
        let Ok(place) = Arc::clone(&places).acquire_owned().await else { return };
        let source = Arc::clone(&source);
        let served = tokio::spawn(async move {
            let service = hyper::service::service_fn(|request| answer(&source, request));
            let connection = hyper::server::conn::http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD)
                .max_buf_size(HEAD_MAX)
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            let _ = tokio::time::timeout(WHOLE, connection).await;
            drop(place);
        });
        connections.push_back(served.abort_handle());
    }
}

/// The addresses of one client. Every program of this host may use all loopback addresses.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        own if own.is_loopback() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() >> 64 << 64).into(),
        v4 @ IpAddr::V4(_) => v4,
    }
}

async fn answer(source: &Source, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    Ok(match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/metrics") => {
            let accept = request.headers().get(ACCEPT).and_then(|accept| accept.to_str().ok());
            let format = Format::accepted(accept);
            match source.text().await {
                Ok(text) => response(StatusCode::OK, format.content_type(), format.render(&text)),
                Err((status, why)) => response(status, PLAIN, why),
            }
        }
        (_, "/metrics") => {
            let mut refusal = response(StatusCode::METHOD_NOT_ALLOWED, PLAIN, "GET or HEAD\n".to_owned());
            refusal.headers_mut().insert(ALLOW, hyper::header::HeaderValue::from_static("GET, HEAD"));
            refusal
        }
        _ => response(StatusCode::NOT_FOUND, PLAIN, "only /metrics is served here\n".to_owned()),
    })
}

const PLAIN: &str = "text/plain; charset=utf-8";

fn response(status: StatusCode, kind: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, hyper::header::HeaderValue::from_static(kind));
    response
}

/// The text of the metrics, and when the main loop made it.
struct Source {
    to: Loop,
    last: Mutex<Option<(Instant, Arc<str>)>>,
}

impl Source {
    async fn text(&self) -> Result<Arc<str>, (StatusCode, String)> {
        // The lock is held during the request: clients that wait here get the same answer.
        let mut last = self.last.lock().await;
        if let Some((_, text)) = last.as_ref().filter(|(at, _)| at.elapsed() < FRESH) {
            return Ok(Arc::clone(text));
        }
        let text: Arc<str> =
            self.to.ask(None, Ask::Metrics).await.map_err(|refused| (refused.0, refused.1 + "\n"))?.into();
        *last = Some((Instant::now(), Arc::clone(&text)));
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use crate::daemon::http::Asked;

    /// A server, and a counter of requests to its main loop.
    fn server() -> (Server, SocketAddr, Arc<AtomicU32>) {
        let (asks, asked) = std::sync::mpsc::sync_channel(1);
        let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let to = Loop::new(asks, Arc::new(bell));
        let count = Arc::new(AtomicU32::new(0));
        let counted = Arc::clone(&count);
        std::thread::spawn(move || {
            while let Ok(Asked { ask, .. }) = asked.recv() {
                let Ask::Metrics(answer) = ask else { panic!("{ask:?} was asked") };
                counted.fetch_add(1, Ordering::SeqCst);
                let _ = answer.send("# TYPE ontime_x counter\nontime_x_total 1\n# EOF\n".to_owned());
            }
        });
        let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let mut server = Server::default();
        server.follow(Some(free), &to).unwrap();
        (server, free, count)
    }

    fn said(address: SocketAddr, request: &str) -> String {
        let mut stream = TcpStream::connect(address).unwrap();
        let _ = stream.write_all(request.as_bytes());
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer
    }

    #[test]
    fn metrics_are_all_that_is_served() {
        let (mut server, address, count) = server();
        let get = said(address, "GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n");
        assert!(get.starts_with("HTTP/1.1 200 "), "{get}");
        assert!(get.contains("content-type: text/plain; version=0.0.4"), "{get}");
        assert!(get.ends_with("# TYPE ontime_x_total counter\nontime_x_total 1\n"), "{get}");
        let open = said(address, "GET /metrics HTTP/1.1\r\nhost: x\r\naccept: application/openmetrics-text\r\n\r\n");
        assert!(open.contains("application/openmetrics-text; version=1.0.0") && open.ends_with("# EOF\n"), "{open}");
        assert!(said(address, "HEAD /metrics HTTP/1.0\r\n\r\n").ends_with("\r\n\r\n"));
        for (line, status) in [
            ("POST /metrics", "405"),
            ("DELETE /metrics", "405"),
            ("POST /v1/reset", "404"),
            ("GET /v1/status", "404"),
            ("GET /metrics/../v1/reset", "404"),
            ("BREW", "400"),
        ] {
            let answer = said(address, &format!("{line} HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"));
            assert_eq!(answer.split(' ').nth(1), Some(status), "{line}: {answer}");
        }
        let large = format!("GET /metrics HTTP/1.1\r\nhost: x\r\nx: {}\r\n\r\n", "x".repeat(HEAD_MAX * 2));
        assert!(!said(address, &large).starts_with("HTTP/1.1 200"));
        // Twenty requests within less than a second cause few requests to the main loop.
        for _ in 0..20 {
            said(address, "GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n");
        }
        assert!(count.load(Ordering::SeqCst) < 20, "{count:?}");
        let (asks, _asked) = std::sync::mpsc::sync_channel(1);
        let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        server.follow(None, &Loop::new(asks, Arc::new(bell))).unwrap();
        let end = Instant::now() + Duration::from_secs(60);
        while TcpStream::connect(address).is_ok() {
            assert!(Instant::now() < end, "it still listens");
            std::thread::sleep(Duration::from_millis(10));
        }
    }

    #[test]
    fn clients_that_say_nothing_keep_no_place() {
        let (_server, address, _) = server();
        let silent: Vec<TcpStream> = (0..CLIENTS + 4).map(|_| TcpStream::connect(address).unwrap()).collect();
        let get = "GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n";
        // A later connection is served in place of a silent one.
        let mut other = socket_of(Ipv4Addr::new(127, 0, 0, 2), address);
        other.write_all(get.as_bytes()).unwrap();
        let mut answer = String::new();
        other.read_to_string(&mut answer).unwrap();
        assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
        // So is one of the same address.
        assert!(said(address, get).starts_with("HTTP/1.1 200 "));
        drop(silent);
    }

    /// A connection from this address of the host.
    fn socket_of(from: Ipv4Addr, to: SocketAddr) -> TcpStream {
        use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
        let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
        bind(&socket, &SocketAddr::from((from, 0))).unwrap();
        connect(&socket, &to).unwrap();
        TcpStream::from(socket)
    }

    #[test]
    fn an_ipv6_network_is_one_client() {
        let of = |address: &str| network(address.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:0:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    }

    /// A program of the host has all of 127.0.0.0/8.
    #[test]
    fn programs_of_the_host_are_one_client() {
        let of = |address: &str| network(address.parse().unwrap());
        for last in 2..=5 {
            assert_eq!(of(&format!("127.0.0.{last}")), of("127.0.0.1"));
        }
        assert_eq!([of("127.1.2.3"), of("::ffff:127.0.0.9"), of("::1")], [of("127.0.0.1"); 3]);
        assert_ne!(of("127.0.0.1"), of("128.0.0.1"));
    }
}
