//! A client of the daemon: HTTP over its Unix socket.

use std::io;
use std::path::Path;
use std::time::Duration;

use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Bytes;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use serde::Serialize;
use serde::de::DeserializeOwned;
use thiserror::Error;

use crate::api;

/// Added to the daemon's own time limit, so that the client receives the daemon's error message and not a time-out.
const MARGIN: Duration = Duration::from_secs(10);
/// The largest accepted answer, bytes.
const ANSWER_MAX: usize = 64 << 20;

/// Why the daemon gave no answer.
#[derive(Debug, Error)]
pub(crate) enum ClientError {
    /// No daemon listens.
    #[error("no daemon at {socket}: {source}; start it: systemctl start ontimed")]
    NoDaemon {
        socket: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The socket may not be used.
    #[error(
        "{socket}: {source}: whether a daemon runs cannot be seen; run as root or as a member of the socket's group"
    )]
    Denied {
        socket: String,
        /// The kernel's error.
        source: io::Error,
    },
    /// The daemon refused.
    #[error("the daemon answers: {message}")]
    Refused {
        /// HTTP status.
        status: u16,
        message: String,
    },
    /// The answer is late, incomplete, or not one of a daemon of this version.
    #[error("{socket}: {why}; see the daemon's log: journalctl -u ontimed")]
    Broken { socket: String, why: String },
}

/// Sends GET `path`; the answer is JSON.
///
/// # Errors
/// See [`ClientError`].
pub(crate) fn get<T: DeserializeOwned>(socket: &Path, path: &str) -> Result<T, ClientError> {
    decode(socket, &call(socket, Method::GET, path, Vec::new())?)
}

/// Sends GET `path`; the answer is text: the daemon's metrics.
///
/// # Errors
/// See [`ClientError`].
pub(crate) fn get_text(socket: &Path, path: &str) -> Result<String, ClientError> {
    let body = call(socket, Method::GET, path, Vec::new())?;
    String::from_utf8(body.into()).map_err(|error| broken(socket, error))
}

/// Sends POST `path` with `body`.
///
/// # Errors
/// See [`ClientError`].
pub(crate) fn post<T: DeserializeOwned>(socket: &Path, path: &str, body: &impl Serialize) -> Result<T, ClientError> {
    let body = serde_json::to_vec(body).map_err(|error| broken(socket, error))?;
    decode(socket, &call(socket, Method::POST, path, body)?)
}

fn decode<T: DeserializeOwned>(socket: &Path, body: &[u8]) -> Result<T, ClientError> {
    serde_json::from_slice(body).map_err(|error| broken(socket, format!("an answer of another version: {error}")))
}

fn broken(socket: &Path, why: impl ToString) -> ClientError {
    ClientError::Broken { socket: socket.display().to_string(), why: why.to_string() }
}

fn call(socket: &Path, method: Method, path: &str, body: Vec<u8>) -> Result<Bytes, ClientError> {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(|error| broken(socket, error))?;
    let patience = if method == Method::GET { api::PATIENCE } else { api::PATIENCE_CHANGE } + MARGIN;
    runtime.block_on(async {
        tokio::time::timeout(patience, exchange(socket, method, path, body))
            .await
            .map_err(|_| broken(socket, format!("no answer within {} s", patience.as_secs())))?
    })
}

async fn exchange(socket: &Path, method: Method, path: &str, body: Vec<u8>) -> Result<Bytes, ClientError> {
    let name = socket.display().to_string();
    let stream = tokio::net::UnixStream::connect(socket).await.map_err(|source| match source.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => {
            ClientError::NoDaemon { socket: name.clone(), source }
        }
        io::ErrorKind::PermissionDenied => ClientError::Denied { socket: name.clone(), source },
        _ => broken(socket, source),
    })?;
    let (mut sender, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| broken(socket, error))?;
    let connection = tokio::spawn(connection);
    let request = Request::builder()
        .method(method)
        .uri(path)
        .header("host", "ontime")
        .header("content-type", "application/json")
        .body(Full::new(Bytes::from(body)))
        .map_err(|error| broken(socket, error))?;
    let response = sender.send_request(request).await.map_err(|error| broken(socket, error))?;
    let status = response.status();
    let body = Limited::new(response.into_body(), ANSWER_MAX)
        .collect()
        .await
        .map_err(|error| broken(socket, error))?
        .to_bytes();
    connection.abort();
    if status == StatusCode::OK {
        return Ok(body);
    }
    let message = serde_json::from_slice::<api::Error>(&body)
        .map_or_else(|_| String::from_utf8_lossy(&body).into_owned(), |error| error.error);
    Err(ClientError::Refused { status: status.as_u16(), message })
}
