//! What `ontime sockets` shows: a VM's sockets as `ss` would, and what was refused.

use std::sync::atomic::Ordering;

use serde::{Deserialize, Serialize};

use crate::deadlines::Need;
use crate::host;
use crate::policy::Policy;
use crate::request::Protocol;
use crate::shared::{Counters, Shared};
use crate::table::Socket;

/// One socket.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SocketStatus {
    /// tcp or udp.
    pub protocol: String,
    /// As `ss` names it.
    pub state: String,
    /// Bytes to read.
    pub recv_queue: u32,
    /// Bytes sent and not acknowledged.
    pub send_queue: u32,
    /// On the host.
    pub local: String,
    /// As the guest sees it, where its port is mapped.
    pub guest: Option<String>,
    /// The other end.
    pub peer: Option<String>,
    /// The channel that owns it; none while it is handed over.
    pub channel: Option<u32>,
    /// The guest's name for it.
    pub id: u32,
}

/// Everything.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Status {
    /// The VM.
    pub vm: String,
    /// Its sockets.
    pub sockets: Vec<SocketStatus>,
    /// What deadline tasks of the guest have asked for, and hold.
    pub deadlines: Vec<Need>,
    /// Counts since the process started.
    pub counters: Vec<(String, u64)>,
}

impl SocketStatus {
    /// Asks the kernel.
    pub fn of(socket: &Socket, policy: &Policy) -> Self {
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

/// The counters by name, and how many connections are closed and not gone.
pub fn counters(shared: &Shared) -> Vec<(String, u64)> {
    let Counters {
        calls,
        malformed,
        refused_bind,
        refused_reach,
        refused_option,
        refused_limit,
        reset_limit,
        stayed_local,
        wakes,
        rewakes,
        attentions,
        deadlines,
        refused_deadlines,
    } = &shared.counters;
    [
        ("calls", calls),
        ("malformed", malformed),
        ("refused_bind", refused_bind),
        ("refused_reach", refused_reach),
        ("refused_option", refused_option),
        ("refused_limit", refused_limit),
        ("reset_limit", reset_limit),
        ("stayed_local", stayed_local),
        ("wakes", wakes),
        ("rewakes", rewakes),
        ("attentions", attentions),
        ("deadlines", deadlines),
        ("refused_deadlines", refused_deadlines),
    ]
    .map(|(name, counter)| (name.to_owned(), counter.load(Ordering::Relaxed)))
    .into_iter()
    .chain([("closing".to_owned(), shared.closing.count() as u64)])
    .collect()
}

/// How many calls were refused or malformed.
pub fn refusals(shared: &Shared) -> u64 {
    let Counters { malformed, refused_bind, refused_reach, refused_option, refused_limit, refused_deadlines, .. } =
        &shared.counters;
    [malformed, refused_bind, refused_reach, refused_option, refused_limit, refused_deadlines]
        .iter()
        .map(|counter| counter.load(Ordering::Relaxed))
        .sum()
}
