//! The RT guest's own CPU load of experiment `xen-arm`, and the times that belong to its requests.

use std::net::SocketAddr;
use std::time::Duration;

use crate::client::{self, ClientError};
use crate::error::MeasureError;
use crate::host::Host;
use crate::server;

/// Time from an answer to the next request, us: uniform, as in the paper.
pub(crate) const GAPS_US: (u64, u64) = (0, 40_000);
/// Delay from which the paper counts a spike, ns.
pub(crate) const SPIKE_NS: u64 = 1_000_000;
/// The guest's port for its load.
const LOAD_PORT: u16 = 11_112;
/// Number of tries for an answer about the load, 2 s of real time each.
const TRIES: u32 = 60;

/// Sets the load in the RT guest.
pub(crate) fn set_load(host: &mut Host, percent: u8) -> Result<(), MeasureError> {
    let address = SocketAddr::from((server::ADDRESS, LOAD_PORT));
    let failed = |source| ClientError::Socket { what: "set a receive timeout for", address, source };
    let socket = client::connected(address)?;
    socket.set_read_timeout(Some(Duration::from_secs(2))).map_err(failed)?;
    let wanted = format!("load {percent}");
    let mut heard = [0; 32];
    for _ in 0..TRIES {
        host.alive()?;
        // The send fails while the guest is not up yet; then the next try follows.
        let _ = socket.send(percent.to_string().as_bytes());
        if let Ok(length) = socket.recv(&mut heard) {
            if heard.get(..length) == Some(wanted.as_bytes()) {
                return Ok(());
            }
        }
    }
    let said = format!("no answer from {address} about its load in {TRIES} tries");
    Err(MeasureError::Program { program: "the RT guest's load".to_owned(), said })
}
