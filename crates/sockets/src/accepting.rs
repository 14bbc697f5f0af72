//! Accepts connections of a Unix socket, for as long as the process lives.

use std::os::unix::net::{UnixListener, UnixStream};
use std::time::Duration;

/// Delay before the next accept if there was no descriptor for a connection.
const NO_DESCRIPTOR: Duration = Duration::from_millis(100);

/// Accepted connections, one at a time. If there is no descriptor for a connection, retries after a delay: accept(2)
/// fails at once in that case, even if no client is waiting.
pub(crate) fn connections(listener: &UnixListener) -> impl Iterator<Item = UnixStream> {
    listener.incoming().filter_map(|stream| stream.inspect_err(|_| std::thread::sleep(NO_DESCRIPTOR)).ok())
}
