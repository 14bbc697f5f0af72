//! The daemon's HTTP/JSON interface on its Unix socket, and the OpenAPI description of it.
//!
//! In: requests. Out: answers of the main loop, which is asked through a queue, so that nothing here touches the host.
//! The server runs on a thread of its own at SCHED_OTHER; a slow or hostile client delays no other client, and users
//! take turns (`request_queue`). Any client that may open the socket (mode 0660) may read; only root may change
//! anything, and users whom daemon.toml lists may change their own reservations. The kernel identifies the client
//! (SO_PEERCRED).

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::mpsc::{SyncSender, TrySendError, sync_channel};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Json;
use axum::extract::connect_info::Connected;
use axum::extract::rejection::{JsonRejection, PathRejection};
use axum::extract::{ConnectInfo, DefaultBodyLimit, Path, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::serve::{IncomingStream, Listener};
use ontime_tenants::{limit_waits, refuse_descriptors};
use rustix::process::Pid;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::oneshot;
use tokio::time::{Sleep, sleep};
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use super::engine::NotApplied;
use super::metrics::Format;
use super::request_queue::{User, UserCounts, UserGuard};
use super::requested::Unreserved;
use crate::api;

/// A request of a user, which counts as waiting until the main loop takes it.
#[derive(Debug)]
pub(crate) struct Asked {
    /// The client's user.
    pub user: User,
    pub ask: Ask,
    /// Counts the request as waiting until this is dropped.
    pub waiting: UserGuard,
}

/// A request to the main loop, with the channel for its answer.
#[derive(Debug)]
pub(crate) enum Ask {
    /// The tenants, now.
    Tenants(oneshot::Sender<api::Tenants>),
    /// The plan and the present state.
    Status(oneshot::Sender<api::Status>),
    Nics(oneshot::Sender<api::Nics>),
    /// Reserved CPU time.
    Reservations(oneshot::Sender<api::Reservations>),
    /// Create, renew or change a reservation.
    Reserve {
        name: String,
        /// What is requested.
        request: api::ReserveRequest,
        /// The client's user, if the kernel knows it.
        uid: Option<u32>,
        /// Whether it is new, and what it is now.
        answer: oneshot::Sender<Result<(bool, api::Requested), Unreserved>>,
    },
    /// End a reservation.
    Unreserve {
        name: String,
        /// The client's user, if the kernel knows it.
        uid: Option<u32>,
        /// Whether that user may.
        answer: oneshot::Sender<Result<(), Unreserved>>,
    },
    /// Metrics, as text.
    Metrics(oneshot::Sender<String>),
    Apply(api::ApplyRequest, oneshot::Sender<Result<api::Report, NotApplied>>),
    /// Read the configuration again.
    Reload(oneshot::Sender<Result<api::Report, api::RefusedConfiguration>>),
    Reset(oneshot::Sender<api::Report>),
}

/// The largest request body, bytes.
const BODY_MAX: usize = 16 << 10;
/// How long a client may take to read an answer, which the daemon keeps in its locked memory until then.
const UNREAD: Duration = Duration::from_secs(if cfg!(test) { 3 } else { 30 });

#[derive(OpenApi)]
#[openapi(info(
    title = "Ontime daemon",
    description = "Tenants, NICs and state of one host, over the Unix socket /run/ontime/ontime.sock. An unknown path \
                   is answered with 404, and a verb that a path does not have with 405; both have an Error as \
                   application/json.",
    license(name = "GPL-2.0-or-later", identifier = "GPL-2.0-or-later")
))]
struct Description;

/// What any call of the main loop may be answered with.
#[derive(utoipa::IntoResponses)]
#[expect(dead_code, reason = "only its description is used")]
enum Unanswered {
    /// the daemon is ending, or too many requests wait
    #[response(status = 503)]
    Ending(api::Error),
    /// no answer within 20 s, or 120 s for a change, which is made all the same
    #[response(status = 504)]
    Late(api::Error),
}

/// How HTTP handlers ask the main loop.
#[derive(Clone)]
pub(crate) struct Loop {
    /// The queue of requests.
    asks: SyncSender<Asked>,
    waiting: UserCounts,
    /// An eventfd that wakes the main loop; written after each request.
    bell: Arc<OwnedFd>,
    /// How long a request that reads, and one that changes something, may take.
    patience: (Duration, Duration),
}

/// Why a call was refused.
pub(crate) struct Refusal(pub StatusCode, pub String);

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.0, Json(api::Error { error: self.1 })).into_response()
    }
}

impl Loop {
    /// Requests go through this queue. `bell` wakes its reader.
    pub(crate) fn new(asks: SyncSender<Asked>, bell: Arc<OwnedFd>) -> Self {
        Self { asks, waiting: UserCounts::of_requests(), bell, patience: (api::PATIENCE, api::PATIENCE_CHANGE) }
    }

    /// Makes a request that changes nothing.
    pub(crate) async fn ask<T>(
        &self,
        user: User,
        question: impl FnOnce(oneshot::Sender<T>) -> Ask,
    ) -> Result<T, Refusal> {
        self.within(self.patience.0, "see its log", user, question).await
    }

    /// Makes a request for a change. The change is carried out even if the client no longer waits for it.
    async fn order<T>(&self, user: User, question: impl FnOnce(oneshot::Sender<T>) -> Ask) -> Result<T, Refusal> {
        let late = "RT threads leave this host little CPU time, or it hangs. What was asked for is still to be done: \
                    `ontime status` shows how far it is, the log why";
        self.within(self.patience.1, late, user, question).await
    }

    /// `late`: the text of the error if there is no answer in that time.
    async fn within<T>(
        &self,
        patience: Duration,
        late: &str,
        user: User,
        question: impl FnOnce(oneshot::Sender<T>) -> Ask,
    ) -> Result<T, Refusal> {
        let too_many = || Refusal(StatusCode::SERVICE_UNAVAILABLE, "too many requests wait; try again".to_owned());
        let waiting = self.waiting.take(user).ok_or_else(too_many)?;
        let (answer, answered) = oneshot::channel();
        self.asks.try_send(Asked { user, ask: question(answer), waiting }).map_err(|error| match error {
            TrySendError::Full(_) => too_many(),
            TrySendError::Disconnected(_) => ending(),
        })?;
        // An eventfd is full only after 2^64 - 1 writes.
        let _ = rustix::io::write(&self.bell, &1u64.to_ne_bytes());
        match tokio::time::timeout(patience, answered).await {
            Ok(answer) => answer.map_err(|_| ending()),
            Err(_) => {
                let said = format!("the daemon did not answer within {} s: {late}", patience.as_secs());
                Err(Refusal(StatusCode::GATEWAY_TIMEOUT, said))
            }
        }
    }
}

fn ending() -> Refusal {
    Refusal(StatusCode::SERVICE_UNAVAILABLE, "the daemon is ending".to_owned())
}

/// The client, as identified by the kernel.
#[derive(Clone, Debug)]
pub(super) struct Peer {
    pub uid: Option<u32>,
}

impl Connected<IncomingStream<'_, Clients>> for Peer {
    fn connect_info(stream: IncomingStream<'_, Clients>) -> Self {
        Self { uid: stream.io().stream.as_ref().and_then(user_of) }
    }
}

fn user_of(stream: &UnixStream) -> User {
    stream.peer_cred().ok().map(|peer| peer.uid())
}

/// Accepts [`Client`]s, so many of each user that no user takes the daemon's descriptors. Others are closed at once.
struct Clients {
    listener: UnixListener,
    open: UserCounts,
}

impl Listener for Clients {
    type Io = Client;
    type Addr = <UnixListener as Listener>::Addr;

    async fn accept(&mut self) -> (Client, Self::Addr) {
        loop {
            let (stream, address) = Listener::accept(&mut self.listener).await;
            match self.open.take(user_of(&stream)) {
                Some(open) => return (Client { stream: Some(stream), unread: None, _open: open }, address),
                None => limit_waits(|| drop(stream)),
            }
        }
    }

    fn local_addr(&self) -> io::Result<Self::Addr> {
        Listener::local_addr(&self.listener)
    }
}

/// A client's connection. Before Linux 6.16 a client may send descriptors along with a
/// request. This thread, which serves every client, closes them when it reads or closes the connection, and so limits
/// its waits.
struct Client {
    /// `None` while it is dropped.
    stream: Option<UnixStream>,
    /// When an answer that the client does not read is dropped.
    unread: Option<Pin<Box<Sleep>>>,
    /// Counts the connection as open.
    _open: UserGuard,
}

impl Client {
    fn stream(&mut self) -> io::Result<Pin<&mut UnixStream>> {
        self.stream.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        limit_waits(|| drop(self.stream.take()));
    }
}

impl AsyncRead for Client {
    fn poll_read(mut self: Pin<&mut Self>, context: &mut Context<'_>, to: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let stream = self.stream()?;
        limit_waits(|| stream.poll_read(context, to))
    }
}

impl AsyncWrite for Client {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = self.stream()?.poll_write(context, bytes);
        if written.is_ready() {
            return written;
        }
        let unread = self.unread.get_or_insert_with(|| Box::pin(sleep(UNREAD)));
        unread.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }

    /// hyper calls this when it has written all that it had.
    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.unread = None;
        self.stream()?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_shutdown(context)
    }
}

impl Peer {
    fn may_change(&self) -> Result<(), Refusal> {
        let own = rustix::process::geteuid().as_raw();
        match self.uid {
            Some(uid) if uid == 0 || uid == own => Ok(()),
            _ => Err(Refusal(
                StatusCode::FORBIDDEN,
                "only root may change what is applied, members of the socket's group may read; run the command as root"
                    .to_owned(),
            )),
        }
    }
}

/// Tenants of this host, with their threads.
#[utoipa::path(get, path = "/v1/tenants", responses(
    (status = 200, body = api::Tenants),
    Unanswered))]
async fn tenants(State(to): State<Loop>, ConnectInfo(peer): ConnectInfo<Peer>) -> Result<Json<api::Tenants>, Refusal> {
    to.ask(peer.uid, Ask::Tenants).await.map(Json)
}

/// What is wanted, what is, and why they differ.
#[utoipa::path(get, path = "/v1/status", responses(
    (status = 200, body = api::Status),
    Unanswered))]
async fn status(State(to): State<Loop>, ConnectInfo(peer): ConnectInfo<Peer>) -> Result<Json<api::Status>, Refusal> {
    to.ask(peer.uid, Ask::Status).await.map(Json)
}

/// Network interfaces, with class, NAPI instances and interrupts, as the last pass found them.
#[utoipa::path(get, path = "/v1/nics", responses(
    (status = 200, body = api::Nics),
    Unanswered))]
async fn nics(State(to): State<Loop>, ConnectInfo(peer): ConnectInfo<Peer>) -> Result<Json<api::Nics>, Refusal> {
    to.ask(peer.uid, Ask::Nics).await.map(Json)
}

/// Reserved CPU time: whose, how much of it was used, missed or overrun, and the plan of the present slice.
#[utoipa::path(get, path = "/v1/reservations", responses(
    (status = 200, body = api::Reservations),
    Unanswered))]
async fn reservations(
    State(to): State<Loop>,
    ConnectInfo(peer): ConnectInfo<Peer>,
) -> Result<Json<api::Reservations>, Refusal> {
    to.ask(peer.uid, Ask::Reservations).await.map(Json)
}

impl From<Unreserved> for Refusal {
    fn from(why: Unreserved) -> Self {
        let status = match &why {
            Unreserved::Wrong(_) => StatusCode::BAD_REQUEST,
            Unreserved::Forbidden(_) => StatusCode::FORBIDDEN,
            Unreserved::Refused(_) => StatusCode::CONFLICT,
            Unreserved::TooMany(_) => StatusCode::TOO_MANY_REQUESTS,
        };
        Refusal(status, why.to_string())
    }
}

/// Create, renew or change a reservation of CPU time, or of a class alone. The same request again renews its lease.
/// Root, and the users of `reservations.users` in daemon.toml, each of whom changes only its own.
#[utoipa::path(put, path = "/v1/reservations/{name}", request_body = api::ReserveRequest,
    params(("name" = String, Path, description = "1 to 128 letters, digits, `.`, `_` or `-`")), responses(
    (status = 200, body = api::Requested, description = "renewed or changed"),
    (status = 201, body = api::Requested, description = "created"),
    (status = 400, body = api::Error, description = "a field, or the name, is wrong"),
    (status = 403, body = api::Error, description = "this user may not, or the reservation is another user's"),
    (status = 409, body = api::Error, description = "not admitted, or nothing is reserved now; all is as it was"),
    (status = 429, body = api::Error, description = "a limit on reservations is reached"),
    Unanswered))]
async fn reserve(
    State(to): State<Loop>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    name: Result<Path<String>, PathRejection>,
    request: Result<Json<api::ReserveRequest>, JsonRejection>,
) -> Result<(StatusCode, Json<api::Requested>), Refusal> {
    let Path(name) = name.map_err(|error| Refusal(StatusCode::BAD_REQUEST, error.body_text()))?;
    let Json(request) = request.map_err(|error| Refusal(StatusCode::BAD_REQUEST, error.body_text()))?;
    let (is_new, requested) =
        to.order(peer.uid, |answer| Ask::Reserve { name, request, uid: peer.uid, answer }).await??;
    Ok((if is_new { StatusCode::CREATED } else { StatusCode::OK }, Json(requested)))
}

/// End a reservation. Without one of this name, nothing is done.
#[utoipa::path(delete, path = "/v1/reservations/{name}",
    params(("name" = String, Path, description = "as in PUT")), responses(
    (status = 204, description = "there is none of this name now"),
    (status = 400, body = api::Error, description = "the name is wrong"),
    (status = 403, body = api::Error, description = "this user may not, or the reservation is another user's"),
    Unanswered))]
async fn unreserve(
    State(to): State<Loop>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    name: Result<Path<String>, PathRejection>,
) -> Result<StatusCode, Refusal> {
    let Path(name) = name.map_err(|error| Refusal(StatusCode::BAD_REQUEST, error.body_text()))?;
    to.order(peer.uid, |answer| Ask::Unreserve { name, uid: peer.uid, answer }).await??;
    Ok(StatusCode::NO_CONTENT)
}

/// Apply: the method in force again, or another one. Root only.
#[utoipa::path(post, path = "/v1/apply", request_body = api::ApplyRequest, responses(
    (status = 200, body = api::Report),
    (status = 400, body = api::Error, description = "no such method, or no such request"),
    (status = 403, body = api::Error, description = "not root"),
    (status = 409, body = api::Error, description = "mode observe: nothing is to be set"),
    Unanswered))]
async fn apply(
    State(to): State<Loop>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    request: Result<Json<api::ApplyRequest>, JsonRejection>,
) -> Result<Json<api::Report>, Refusal> {
    let Json(request) = request.map_err(|error| Refusal(StatusCode::BAD_REQUEST, error.body_text()))?;
    if !request.dry_run {
        peer.may_change()?;
    }
    let dry_run = request.dry_run;
    let apply = |answer| Ask::Apply(request, answer);
    let done = if dry_run { to.ask(peer.uid, apply).await? } else { to.order(peer.uid, apply).await? };
    done.map(Json).map_err(|error| {
        let status = match &error {
            NotApplied::NoMethod(_) => StatusCode::BAD_REQUEST,
            NotApplied::Observing => StatusCode::CONFLICT,
        };
        Refusal(status, error.to_string())
    })
}

/// Read the configuration again and apply it; the answer comes after that. Root only.
#[utoipa::path(post, path = "/v1/reload", responses(
    (status = 200, body = api::Report),
    (status = 403, body = api::Error, description = "not root"),
    (status = 422, body = api::Error, description = "a file is wrong; the former configuration stays in force"),
    Unanswered))]
async fn reload(State(to): State<Loop>, ConnectInfo(peer): ConnectInfo<Peer>) -> Result<Json<api::Report>, Refusal> {
    peer.may_change()?;
    let done = to.order(peer.uid, Ask::Reload).await?;
    done.map(Json).map_err(|refused| Refusal(StatusCode::UNPROCESSABLE_ENTITY, refused.to_string()))
}

/// Give every knob its original value, and apply nothing more until asked. Root only.
#[utoipa::path(post, path = "/v1/reset", responses(
    (status = 200, body = api::Report),
    (status = 403, body = api::Error, description = "not root"),
    Unanswered))]
async fn reset(State(to): State<Loop>, ConnectInfo(peer): ConnectInfo<Peer>) -> Result<Json<api::Report>, Refusal> {
    peer.may_change()?;
    to.order(peer.uid, Ask::Reset).await.map(Json)
}

/// Metrics for Prometheus, in the format that the client accepts: the classic text format, or OpenMetrics.
#[utoipa::path(get, path = "/metrics", responses(
    (status = 200, content((String = "text/plain"), (String = "application/openmetrics-text"))), Unanswered))]
async fn metrics(
    State(to): State<Loop>,
    ConnectInfo(peer): ConnectInfo<Peer>,
    headers: HeaderMap,
) -> Result<Response, Refusal> {
    let text = to.ask(peer.uid, Ask::Metrics).await?;
    let format = Format::accepted(headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()));
    Ok(([(header::CONTENT_TYPE, format.content_type())], format.render(&text)).into_response())
}

/// This description.
#[utoipa::path(get, path = "/openapi.json", responses(
    (status = 200, description = "OpenAPI 3.1", body = Object, content_type = "application/json")))]
async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], description()).into_response()
}

async fn unknown() -> Refusal {
    Refusal(StatusCode::NOT_FOUND, "no such path; GET /openapi.json names all".to_owned())
}

async fn wrong_verb() -> Refusal {
    Refusal(StatusCode::METHOD_NOT_ALLOWED, "this path is not asked that way; GET /openapi.json says how".to_owned())
}

fn router() -> OpenApiRouter<Loop> {
    OpenApiRouter::with_openapi(Description::openapi())
        .routes(routes!(tenants))
        .routes(routes!(status))
        .routes(routes!(nics))
        .routes(routes!(reservations))
        .routes(routes!(reserve, unreserve))
        .routes(routes!(apply))
        .routes(routes!(reload))
        .routes(routes!(reset))
        .routes(routes!(metrics))
        .routes(routes!(openapi))
}

/// The OpenAPI description, generated from the code; `docs/reference/openapi.json` is a copy.
pub(super) fn description() -> String {
    let mut text = router().into_openapi().to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

/// Creates the socket, and removes one that a dead daemon left. The caller holds the daemon's lock, so no other daemon
/// listens there.
///
/// # Errors
/// The kernel's error.
pub(super) fn bind(path: &std::path::Path) -> io::Result<std::os::unix::net::UnixListener> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    // Between bind and chmod only root may connect.
    let mask = rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o177));
    let listener = std::os::unix::net::UnixListener::bind(path);
    rustix::process::umask(mask);
    let listener = listener?;
    // Older kernels cannot: see `Client`.
    let _ = refuse_descriptors(&listener);
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))?;
    listener.set_nonblocking(true)?;
    Ok(listener)
}

/// The handlers of all paths.
pub(super) fn service(to: Loop) -> axum::Router {
    let (router, _) = router().split_for_parts();
    router
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_verb)
        .layer(DefaultBodyLimit::max(BODY_MAX))
        .with_state(to)
}

/// Serves until the process ends, on a thread of its own, which is returned.
///
/// # Errors
/// Where the thread or its runtime cannot be started.
pub(super) fn serve(listener: std::os::unix::net::UnixListener, to: Loop) -> io::Result<Pid> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let listener = {
        let _in_runtime = runtime.enter();
        Clients { listener: UnixListener::from_std(listener)?, open: UserCounts::of_connections() }
    };
    let (tell, told) = sync_channel(1);
    std::thread::Builder::new().name("ontime-http".into()).stack_size(1 << 20).spawn(move || {
        let _ = tell.send(rustix::thread::gettid());
        let service = service(to).into_make_service_with_connect_info::<Peer>();
        if let Err(error) = runtime.block_on(async { axum::serve(listener, service).await }) {
            tracing::error!(
                "the HTTP server ended, so no command is answered: {error}; restart the daemon: systemctl \
                 restart ontimed"
            );
        }
    })?;
    told.recv().map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_committed_description_is_that_of_the_code() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/openapi.json");
        let now = description();
        if std::env::var_os("ONTIME_WRITE_OPENAPI").is_some() {
            std::fs::write(path, &now).unwrap();
        }
        let committed = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            committed == now,
            "docs/reference/openapi.json is not what the code says; write it: ONTIME_WRITE_OPENAPI=1 cargo test -p \
             ontime description"
        );
    }

    #[test]
    fn what_nobody_waits_for_any_more_is_still_asked() {
        let (asks, asked) = sync_channel(1);
        let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let to = Loop::new(asks, Arc::new(bell));
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let wait = || runtime.block_on(to.within(Duration::from_millis(1), "see its log", None, Ask::Reset));
        let Err(Refusal(status, said)) = wait() else { panic!("nobody has answered") };
        assert_eq!(status, StatusCode::GATEWAY_TIMEOUT);
        assert!(said.ends_with("see its log"), "{said}");
        // The abandoned request stays in the queue until the main loop reads it.
        assert!(matches!(wait(), Err(Refusal(StatusCode::SERVICE_UNAVAILABLE, _))));
        assert!(matches!(asked.try_recv(), Ok(Asked { ask: Ask::Reset(answer), .. }) if answer.is_closed()));
        drop(asked);
        assert!(matches!(wait(), Err(Refusal(StatusCode::SERVICE_UNAVAILABLE, _))));
    }

    #[test]
    fn what_is_not_to_be_had_is_said_in_a_body() {
        use std::io::{Read, Write};
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ontime.sock");
        let (asks, _asked) = sync_channel(1);
        let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        serve(bind(&path).unwrap(), Loop::new(asks, Arc::new(bell))).unwrap();
        for (line, status) in [("DELETE /v1/tenants", "405"), ("GET /v1/no", "404")] {
            let mut stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
            write!(stream, "{line} HTTP/1.1\r\nhost: ontime\r\nconnection: close\r\n\r\n").unwrap();
            let mut answer = String::new();
            stream.read_to_string(&mut answer).unwrap();
            let (head, body) = answer.split_once("\r\n\r\n").unwrap();
            assert_eq!(head.split(' ').nth(1), Some(status), "{line}: {answer}");
            let error: api::Error = serde_json::from_str(body).unwrap();
            assert!(error.error.contains("/openapi.json"), "{line}: {answer}");
        }
    }

    #[test]
    fn a_users_connections_leave_descriptors_for_others() {
        use std::io::{Read, Write};
        use std::os::unix::net::UnixStream;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ontime.sock");
        let (asks, _asked) = sync_channel(1);
        let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        serve(bind(&path).unwrap(), Loop::new(asks, Arc::new(bell))).unwrap();
        let is_served = || {
            let mut stream = UnixStream::connect(&path).unwrap();
            let _ = stream.write_all(b"GET /v1/no HTTP/1.1\r\nhost: o\r\nconnection: close\r\n\r\n");
            let mut answer = String::new();
            stream.read_to_string(&mut answer).is_ok() && answer.contains(" 404 ")
        };
        assert!(is_served());
        let idle: Vec<UnixStream> = (0..200).map(|_| UnixStream::connect(&path).unwrap()).collect();
        assert!(!is_served(), "{} connections are open", idle.len());
        drop(idle);
        // The server is told of their ends one after another.
        let end = std::time::Instant::now() + Duration::from_secs(60);
        while !is_served() {
            assert!(std::time::Instant::now() < end, "no connection is served any more");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn an_answer_that_is_not_read_is_not_kept() {
        use std::io::{Read, Write};
        const LENGTH: usize = 8 << 20;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ontime.sock");
        let (asks, asked) = sync_channel(1);
        let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        serve(bind(&path).unwrap(), Loop::new(asks, Arc::new(bell))).unwrap();
        std::thread::spawn(move || {
            while let Ok(Asked { ask: Ask::Metrics(answer), .. }) = asked.recv() {
                let _ = answer.send("x".repeat(LENGTH));
            }
        });
        let read_after = |pause: Duration| {
            let mut stream = std::os::unix::net::UnixStream::connect(&path).unwrap();
            stream.write_all(b"GET /metrics HTTP/1.1\r\nhost: o\r\nconnection: close\r\n\r\n").unwrap();
            std::thread::sleep(pause);
            let (mut answer, mut chunk) = (0, [0; 65_536]);
            while let Ok(count @ 1..) = stream.read(&mut chunk) {
                answer += count;
                // A client that reads on, but little at a time, gets no more time.
                std::thread::sleep(pause / 50);
            }
            answer
        };
        assert!(read_after(Duration::ZERO) >= LENGTH);
        assert!((1..LENGTH).contains(&read_after(2 * UNREAD)));
        assert!((1..LENGTH).contains(&read_after(UNREAD / 2)));
    }

    /// Sends a file along with these bytes.
    fn send_along(
        stream: &std::os::unix::net::UnixStream,
        bytes: &[u8],
        file: std::os::fd::BorrowedFd<'_>,
    ) -> rustix::io::Result<usize> {
        let files = [file];
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = rustix::net::SendAncillaryBuffer::new(&mut space);
        assert!(control.push(rustix::net::SendAncillaryMessage::ScmRights(&files)));
        let bytes = [io::IoSlice::new(bytes)];
        rustix::net::sendmsg(stream, &bytes, &mut control, rustix::net::SendFlags::empty())
    }

    #[test]
    fn a_client_cannot_send_descriptors_along() {
        use std::os::fd::AsFd;
        use std::os::unix::net::UnixStream;
        if refuse_descriptors(UnixStream::pair().unwrap().0).is_err() {
            println!("SKIPPED: before Linux 6.16 no socket refuses descriptors");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ontime.sock");
        let bound = bind(&path).unwrap();
        let stream = UnixStream::connect(&path).unwrap();
        assert_eq!(send_along(&stream, b"GET", bound.as_fd()), Err(rustix::io::Errno::PERM));
        let _accepted = bound.accept().unwrap();
        assert_eq!(send_along(&stream, b"GET", bound.as_fd()), Err(rustix::io::Errno::PERM));
    }

    /// Each client has sent a socket that lingers before it is served, and only its connection has a reference to it.
    /// The listener does not refuse that, as on older kernels.
    #[test]
    fn descriptors_that_a_client_sends_along_delay_no_other_client() {
        use std::io::{Read, Write};
        use std::net::{TcpListener, TcpStream};
        use std::os::fd::AsFd;
        use std::os::unix::net::UnixStream;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("ontime.sock");
        let (asks, _asked) = sync_channel(1);
        let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let bound = std::os::unix::net::UnixListener::bind(&path).unwrap();
        bound.set_nonblocking(true).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut clients = Vec::new();
        for request in ["GET /v1/no HTTP/1.1\r\n", "no request\r\n\r\n"] {
            let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            let far = listener.accept().unwrap().0;
            near.set_nonblocking(true).unwrap();
            while near.write(&[0; 65_536]).is_ok() {}
            near.set_nonblocking(false).unwrap();
            rustix::net::sockopt::set_socket_linger(&near, Some(Duration::from_secs(24 * 3600))).unwrap();
            let stream = UnixStream::connect(&path).unwrap();
            send_along(&stream, request.as_bytes(), near.as_fd()).unwrap();
            clients.push((stream, far));
        }
        serve(bound, Loop::new(asks, Arc::new(bell))).unwrap();
        let mut stream = UnixStream::connect(&path).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        stream.write_all(b"GET /v1/no HTTP/1.1\r\nhost: ontime\r\nconnection: close\r\n\r\n").unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        assert_eq!(answer.split(' ').nth(1), Some("404"), "{answer}");
    }

    /// Answers every request. If not `well`, refuses where a refusal is possible. The lease of a reservation's request
    /// chooses among the answers. Other users may not reserve.
    fn answer(ask: Ask, well: bool) {
        const REQUESTED: &str = r#"{"name": "a", "owner": "", "uid": 0, "for": {"vm": "a"}, "budget_us": null,
            "period_us": null, "count": 0, "cpus": null, "level": 0, "micro_cpus": 0, "lease_seconds": 10,
            "left_seconds": 1.5, "held": true, "state": "waiting", "tenants": [], "why": null}"#;
        const STATUS: &str = r#"{"version": "1", "pid": 1, "kernel": "7.2", "state": "applied", "method": "vatc",
            "method_by": "default", "passes": 1, "last_pass_seconds": 0.01, "polling": [], "knobs": [], "drift": 0,
            "caps": {"in_force": true, "why": null, "protections_off": true, "threads": []},
            "findings": [], "problems": []}"#;
        const RESERVATIONS: &str = r#"{"backend": "paced", "off": null, "cpus": [], "reserve": 0, "reserved": 0,
            "vcpus": [], "refused": [], "absent": [], "slice": null}"#;
        const REPORT: &str = r#"{"method": "vatc", "dry_run": false, "changes": [], "unchanged": 0, "findings": []}"#;
        let forbidden = || Unreserved::Forbidden("no".to_owned());
        let is_own = |uid| uid == Some(rustix::process::geteuid().as_raw());
        let report = || serde_json::from_str::<api::Report>(REPORT).unwrap();
        let wrong = || api::RefusedConfiguration { file: "a".to_owned(), line: None, reason: "b".to_owned() };
        match ask {
            Ask::Tenants(to) => drop(to.send(serde_json::from_str(r#"{"tenants": []}"#).unwrap())),
            Ask::Status(to) => drop(to.send(serde_json::from_str(STATUS).unwrap())),
            Ask::Nics(to) => {
                let schema_version = api::SCHEMA_VERSION;
                drop(to.send(api::Nics { schema_version, nics: vec![], findings: vec![], unseen: vec![] }));
            }
            Ask::Reservations(to) => drop(to.send(serde_json::from_str(RESERVATIONS).unwrap())),
            Ask::Reserve { name, request, uid, answer } => {
                let known = crate::daemon::requested::check_name(&name);
                drop(answer.send(match (known, request.lease_seconds) {
                    (Err(wrong), _) => Err(wrong),
                    _ if !is_own(uid) => Err(forbidden()),
                    (_, seconds) if well => Ok((seconds == 10, serde_json::from_str(REQUESTED).unwrap())),
                    (_, 10) => Err(Unreserved::Refused("full".to_owned())),
                    _ => Err(Unreserved::TooMany("many".to_owned())),
                }));
            }
            Ask::Unreserve { name, uid, answer } => {
                let known = crate::daemon::requested::check_name(&name);
                drop(answer.send(if is_own(uid) { known } else { Err(forbidden()) }));
            }
            Ask::Metrics(to) => drop(to.send("# EOF\n".to_owned())),
            Ask::Apply(asked, to) => drop(to.send(match asked.method {
                Some(method) => Err(NotApplied::NoMethod(method)),
                None if well => Ok(report()),
                None => Err(NotApplied::Observing),
            })),
            Ask::Reload(to) => drop(to.send(if well { Ok(report()) } else { Err(wrong()) })),
            Ask::Reset(to) => drop(to.send(report())),
        }
    }

    #[derive(Clone, Copy, PartialEq)]
    enum MainLoop {
        Answers,
        Refuses,
        Silent,
        Full,
        Ending,
    }

    fn main_loop(kind: MainLoop) -> Loop {
        let (asks, asked) = sync_channel(usize::from(kind != MainLoop::Full));
        let bell = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        let short = Duration::from_millis(20);
        let long = Duration::from_secs(600);
        let patience = if kind == MainLoop::Silent { (short, short) } else { (long, long) };
        std::thread::spawn(move || match kind {
            MainLoop::Answers | MainLoop::Refuses => {
                asked.iter().for_each(|asked: Asked| answer(asked.ask, kind == MainLoop::Answers))
            }
            // The requests are kept until the queue is closed, and none is answered.
            MainLoop::Silent => drop(asked.iter().collect::<Vec<Asked>>()),
            MainLoop::Full => std::thread::sleep(long),
            MainLoop::Ending => {}
        });
        Loop { patience, ..Loop::new(asks, Arc::new(bell)) }
    }

    /// Path, verb, status and content type of every answer.
    type Answers = std::collections::BTreeSet<(String, String, String, String)>;

    fn sent(all: &serde_json::Value) -> Answers {
        use axum::body::Body;
        use axum::extract::connect_info::MockConnectInfo;
        use tower::ServiceExt;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let mut sent = Answers::new();
        let own = rustix::process::geteuid().as_raw();
        for kind in [MainLoop::Answers, MainLoop::Refuses, MainLoop::Silent, MainLoop::Full, MainLoop::Ending] {
            for uid in [own, own + 1] {
                for (path, item) in all["paths"].as_object().unwrap() {
                    for verb in item.as_object().unwrap().keys() {
                        let (bad, large) = (r#"{"method": "no"}"#, " ".repeat(BODY_MAX + 1));
                        let reserve = |seconds: u32| format!(r#"{{"for": {{"vm": "a"}}, "lease_seconds": {seconds}}}"#);
                        let (short, long) = (reserve(10), reserve(11));
                        for body in ["{}", bad, "{", large.as_str(), short.as_str(), long.as_str()] {
                            // The second is also the literal text of the template, which is no name.
                            for (accept, name) in [("text/plain", "a"), ("application/openmetrics-text", "{name}")] {
                                let service = service(main_loop(kind)).layer(MockConnectInfo(Peer { uid: Some(uid) }));
                                let request = axum::http::Request::builder()
                                    .method(verb.to_uppercase().as_str())
                                    .uri(path.replace("{name}", name))
                                    .header("content-type", "application/json")
                                    .header("accept", accept)
                                    .body(Body::from(body.to_owned()))
                                    .unwrap();
                                let answer = runtime.block_on(service.oneshot(request)).unwrap();
                                let kind = answer.headers().get(header::CONTENT_TYPE);
                                let kind = kind.map_or("", |kind| kind.to_str().unwrap());
                                let kind = kind.split(';').next().unwrap().to_owned();
                                sent.insert((path.clone(), verb.clone(), answer.status().as_u16().to_string(), kind));
                            }
                        }
                    }
                }
            }
        }
        sent
    }

    #[test]
    fn every_status_and_content_type_that_is_sent_is_described_and_the_other_way_round() {
        let all: serde_json::Value = serde_json::from_str(&description()).unwrap();
        let mut described = Answers::new();
        for (path, item) in all["paths"].as_object().unwrap() {
            for (verb, operation) in item.as_object().unwrap() {
                for (status, response) in operation["responses"].as_object().unwrap() {
                    if response["content"].is_null() {
                        described.insert((path.clone(), verb.clone(), status.clone(), String::new()));
                    }
                    for kind in response["content"].as_object().into_iter().flatten() {
                        described.insert((path.clone(), verb.clone(), status.clone(), kind.0.clone()));
                    }
                }
            }
        }
        let sent = sent(&all);
        assert!(sent.len() > 30, "{sent:?}");
        let missing: Vec<_> = sent.difference(&described).collect();
        let untrue: Vec<_> = described.difference(&sent).collect();
        assert!(missing.is_empty() && untrue.is_empty(), "not described: {missing:?}; never sent: {untrue:?}");
    }
}
