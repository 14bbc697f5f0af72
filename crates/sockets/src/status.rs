//! Data for `ontime sockets`: a VM's sockets as `ss` shows them, and the refusals.

use serde::{Deserialize, Serialize};

use crate::deadlines::Need;
use crate::host;
use crate::policy::Policy;
use crate::request::Protocol;
use crate::table::Socket;

/// An outsourced socket, as `ontime sockets` shows it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketStatus {
    /// tcp or udp.
    pub protocol: String,
    /// The state, as `ss` names it.
    pub state: String,
    /// Received bytes that are not read yet.
    pub recv_queue: u32,
    /// Sent bytes that are not acknowledged.
    pub send_queue: u32,
    /// Local address on the host.
    pub local: String,
    /// Local address as the guest sees it, if its port is mapped.
    pub guest: Option<String>,
    /// The remote address.
    pub peer: Option<String>,
    /// The owning channel. None while the socket is between two owners.
    pub channel: Option<u32>,
    /// The guest's id for the socket.
    pub id: u32,
}

/// The status of a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The VM's name.
    pub vm: String,
    /// The open sockets of the VM. None: the worker thread, which lists them, did not answer.
    pub sockets: Option<Vec<SocketStatus>>,
    /// Reserved bandwidth of the guest's deadline tasks.
    pub deadlines: Vec<Need>,
    /// Counters since the process started.
    pub counters: Vec<(String, u64)>,
}

impl SocketStatus {
    /// Reads a socket's status from the kernel.
    pub(crate) fn of(socket: &Socket, policy: &Policy) -> Self {
        let name = |peer| host::name(socket.fd, peer).ok().and_then(|name| name.get());
        let (local, peer) = (name(false), name(true));
        let guest = local.map(|local| policy.seen(socket.protocol, local)).filter(|seen| Some(*seen) != local);
        let number = |request| host::query(socket.fd, request).map_or(0, |number| number as u32);
        Self {
            protocol: if socket.protocol == Protocol::Tcp { "tcp" } else { "udp" }.to_owned(),
            state: state(socket, peer.is_some()).to_owned(),
            recv_queue: number(libc::FIONREAD as libc::Ioctl),
            send_queue: number(libc::TIOCOUTQ as libc::Ioctl),
            local: local.map_or_else(|| "*".to_owned(), |local| local.to_string()),
            guest: guest.map(|guest| guest.to_string()),
            peer: peer.map(|peer| peer.to_string()),
            channel: (socket.owner != crate::table::NOBODY).then_some(socket.owner),
            id: socket.id,
        }
    }
}

fn state(socket: &Socket, connected: bool) -> &'static str {
    const STATES: [&str; 12] = [
        "?",
        "ESTAB",
        "SYN-SENT",
        "SYN-RECV",
        "FIN-WAIT-1",
        "FIN-WAIT-2",
        "TIME-WAIT",
        "UNCONN",
        "CLOSE-WAIT",
        "LAST-ACK",
        "LISTEN",
        "CLOSING",
    ];
    if socket.protocol == Protocol::Udp {
        return if connected { "ESTAB" } else { "UNCONN" };
    }
    STATES.get(usize::from(host::tcp_state(socket.fd))).unwrap_or(&"?")
}
