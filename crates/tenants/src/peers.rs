//! The host's interfaces that lead into a container: the host ends of veth (and netkit) pairs, and the interfaces below
//! a container's macvlan, ipvlan or VLAN.
//!
//! Input: the kernel's link table, and a process of the container. Output: interface names. No file of the container is
//! read, because the container could put anything there. The kernel reports the network namespace of each pair's other
//! end (`IFLA_LINK_NETNSID`) and that namespace's number (`RTM_GETNSID`). Source: `net/core/rtnetlink.c`,
//! `net/core/net_namespace.c`.
//!
//! A macvlan has no host end, and its NIC does not list it. So the kernel is asked from within the container's
//! namespace, where it reports the lower interface of each link and that interface's namespace. The container cannot
//! forge this: without rights outside, a process cannot put an interface on top of an outside one (`rtnl_newlink`
//! requires CAP_NET_ADMIN there, `net/core/rtnetlink.c`).

use std::collections::HashMap;
use std::io;

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{InfoKind, LinkAttribute, LinkInfo, LinkMessage};
use netlink_packet_route::nsid::{NsidAttribute, NsidMessage};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};

use crate::namespace;
use crate::thread::ThreadId;

/// Host ends by the number of the namespace that they lead into.
#[derive(Debug)]
pub(crate) struct Peers {
    socket: Socket,
    by_namespace: HashMap<i32, Vec<String>>,
}

impl Peers {
    /// Reads the host's link table.
    pub(crate) fn read() -> io::Result<Self> {
        let socket = connected()?;
        let mut by_namespace: HashMap<i32, Vec<String>> = HashMap::new();
        for link in links(&socket, usize::MAX)?.0 {
            if let Some(namespace) = link.namespace {
                by_namespace.entry(namespace).or_default().push(link.name);
            }
        }
        Ok(Self { socket, by_namespace })
    }

    /// The host ends of the pairs that lead into a thread's network namespace, in order of names.
    pub(crate) fn of_thread(&self, tid: i32) -> Vec<String> {
        let namespace = number_of(&self.socket, tid).unwrap_or(None);
        let mut names = namespace.and_then(|number| self.by_namespace.get(&number)).cloned().unwrap_or_default();
        names.sort();
        names
    }
}

/// The interface of this namespace below each interface, by index and name; none for the end of a pair, for a child of
/// IPoIB, which has rings of its own, and for an interface on top of one in another namespace.
///
/// # Errors
/// The kernel's error.
pub(crate) fn carriers() -> io::Result<HashMap<(u32, String), Option<u32>>> {
    let of = |link: Link| {
        let by_itself = matches!(link.kind, Some(InfoKind::Veth | InfoKind::Netkit | InfoKind::Ipoib));
        let below = link.lower.filter(|_| !by_itself && link.namespace.is_none());
        ((link.index, link.name), below)
    };
    Ok(links(&connected()?, usize::MAX)?.0.into_iter().map(of).collect())
}

/// A container's interface on top of one of the host's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UpperInterface {
    /// Its name in the container.
    pub name: String,
    /// Its MAC address, if it has its own.
    pub mac: Option<[u8; 6]>,
    /// Index of the host's interface below it.
    pub on: u32,
}

/// The interfaces in a thread's network namespace that are on top of this thread's interfaces, in order of names; none
/// if the namespaces are the same. At most `limit` interfaces are read. Also returns how many were read and whether
/// these are all.
///
/// # Errors
/// `ESRCH` if the process ended, `EPERM` without CAP_SYS_ADMIN.
pub(crate) fn standing(thread: ThreadId, limit: usize) -> io::Result<(usize, bool, Vec<UpperInterface>)> {
    let host = rustix::thread::gettid().as_raw_nonzero().get();
    namespace::inside(thread, || {
        let socket = connected()?;
        // The kernel assigns a namespace's number when it reports the first link that leads there, so read the links
        // first.
        let (links, whole) = links(&socket, limit)?;
        let looked_at = links.len();
        // With a partly read table, its rest would precede the answer on the old socket.
        let socket = connected()?;
        let Some(host) = number_of(&socket, host)? else { return Ok((looked_at, whole, Vec::new())) };
        let stands = |link: Link| {
            let own_address = match link.kind? {
                InfoKind::MacVlan | InfoKind::MacVtap => true,
                // These have the MAC address of the interface below.
                InfoKind::IpVlan | InfoKind::IpVtap | InfoKind::Vlan => false,
                _ => return None,
            };
            let mac = link.address.filter(|_| own_address);
            Some(UpperInterface { name: link.name, mac, on: link.lower.filter(|_| link.namespace == Some(host))? })
        };
        let mut found: Vec<UpperInterface> = links.into_iter().filter_map(stands).collect();
        found.sort_by(|one, other| one.name.cmp(&other.name));
        Ok((looked_at, whole, found))
    })
}

/// A socket in this thread's namespace.
fn connected() -> io::Result<Socket> {
    let mut socket = Socket::new(NETLINK_ROUTE)?;
    socket.bind_auto()?;
    socket.connect(&SocketAddr::new(0, 0))?;
    Ok(socket)
}

/// The attributes of an interface that are used here.
#[derive(Debug, Default)]
struct Link {
    index: u32,
    name: String,
    kind: Option<InfoKind>,
    address: Option<[u8; 6]>,
    /// Index of its peer or of the interface below it, in that one's namespace.
    lower: Option<u32>,
    /// The number of that namespace if it is another one.
    namespace: Option<i32>,
}

/// The first `limit` named interfaces of the socket's namespace, and whether these are all.
fn links(socket: &Socket, limit: usize) -> io::Result<(Vec<Link>, bool)> {
    let request = RouteNetlinkMessage::GetLink(LinkMessage::default());
    let replies = ask(socket, request, NLM_F_REQUEST | NLM_F_DUMP, limit)?;
    let whole = replies.len() <= limit;
    let links = replies.into_iter().filter_map(|reply| match reply {
        RouteNetlinkMessage::NewLink(message) => Some(link(message)),
        _ => None,
    });
    Ok((links.filter(|link| !link.name.is_empty()).take(limit).collect(), whole))
}

fn link(message: LinkMessage) -> Link {
    let mut link = Link { index: message.header.index, ..Link::default() };
    for attribute in message.attributes {
        match attribute {
            LinkAttribute::IfName(name) => link.name = name,
            LinkAttribute::Address(bytes) => link.address = bytes.try_into().ok(),
            LinkAttribute::Link(index) => link.lower = Some(index),
            LinkAttribute::LinkNetNsId(number) => link.namespace = Some(number),
            LinkAttribute::LinkInfo(infos) => {
                link.kind = infos.into_iter().find_map(|info| match info {
                    LinkInfo::Kind(kind) => Some(kind),
                    _ => None,
                });
            }
            _ => {}
        }
    }
    link
}

/// The number that the socket's namespace assigns to the namespace of a process or thread. `None`: no number is
/// assigned, so no link leads there.
fn number_of(socket: &Socket, pid: i32) -> io::Result<Option<i32>> {
    let mut message = NsidMessage::default();
    message.attributes.push(NsidAttribute::Pid(u32::try_from(pid).map_err(io::Error::other)?));
    for reply in ask(socket, RouteNetlinkMessage::GetNsId(message), NLM_F_REQUEST, 1)? {
        let RouteNetlinkMessage::NewNsId(answer) = reply else { continue };
        let number = answer.attributes.iter().find_map(|attribute| match attribute {
            NsidAttribute::Id(number) => Some(*number),
            _ => None,
        });
        return Ok(number.filter(|number| *number >= 0));
    }
    Ok(None)
}

/// Sends a request and reads the answer, until it has more than `limit` messages.
fn ask(
    socket: &Socket,
    request: RouteNetlinkMessage,
    flags: u16,
    limit: usize,
) -> io::Result<Vec<RouteNetlinkMessage>> {
    let mut packet = NetlinkMessage::new(NetlinkHeader::default(), NetlinkPayload::from(request));
    packet.header.flags = flags;
    packet.finalize();
    let mut bytes = vec![0; packet.buffer_len()];
    packet.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
    let mut replies = Vec::new();
    loop {
        let (datagram, _) = socket.recv_from_full()?;
        let is_over = read_datagram(&datagram, &mut replies)? || flags & NLM_F_DUMP != NLM_F_DUMP;
        if is_over || replies.len() > limit {
            return Ok(replies);
        }
    }
}

/// The named interfaces in a datagram.
///
/// # Errors
/// The kernel's error in the datagram.
#[doc(hidden)]
pub fn names_in(datagram: &[u8]) -> io::Result<Vec<String>> {
    let mut replies = Vec::new();
    read_datagram(datagram, &mut replies)?;
    let links = replies.into_iter().filter_map(|reply| match reply {
        RouteNetlinkMessage::NewLink(message) => Some(link(message).name),
        _ => None,
    });
    Ok(links.filter(|name| !name.is_empty()).collect())
}

/// Parses the messages of one datagram. True: end of a dump.
fn read_datagram(datagram: &[u8], replies: &mut Vec<RouteNetlinkMessage>) -> io::Result<bool> {
    let mut rest = datagram;
    while let Some(length) = rest.get(..4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_ne_bytes) {
        let length = usize::try_from(length).map_err(io::Error::other)?;
        let Some(message) = rest.get(..length).filter(|message| message.len() >= 16) else { break };
        // A link with attributes that this version cannot parse is skipped.
        if let Ok(message) = NetlinkMessage::<RouteNetlinkMessage>::deserialize(message) {
            match message.payload {
                NetlinkPayload::InnerMessage(reply) => replies.push(reply),
                NetlinkPayload::Done(_) => return Ok(true),
                // Not `to_io()`, which overflows for the smallest number.
                NetlinkPayload::Error(error) => {
                    return Err(io::Error::from_raw_os_error(error.raw_code().saturating_neg()));
                }
                _ => {}
            }
        }
        // Messages are aligned to four bytes.
        rest = rest.get(length.next_multiple_of(4)..).unwrap_or_default();
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};
    use std::time::{Duration, Instant};

    use super::*;

    fn ip(arguments: &str) -> bool {
        Command::new("ip")
            .args(arguments.split(' '))
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
    }

    /// A process in its own network namespace. It ends with the test and takes its pair along.
    struct Contained(Child);

    impl Contained {
        fn start() -> Option<Self> {
            let child = Command::new("unshare").args(["--net", "sleep", "60"]).spawn().ok()?;
            let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net")).ok();
            let deadline = Instant::now() + Duration::from_secs(60);
            while namespace(&child.id().to_string()) == namespace("self") && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(5));
            }
            Some(Self(child))
        }
    }

    impl Drop for Contained {
        fn drop(&mut self) {
            let _ = self.0.kill();
            let _ = self.0.wait();
        }
    }

    #[test]
    fn a_pair_that_leads_into_a_process_is_found_and_no_other() {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: needs root");
            return;
        }
        let (Some(inside), Some(alone)) = (Contained::start(), Contained::start()) else {
            println!("SKIPPED: unshare is not installed");
            return;
        };
        let near = format!("otv{}", std::process::id());
        if !ip(&format!("link add {near} type veth peer name eth0 netns {}", inside.0.id())) {
            println!("SKIPPED: no veth here, or no ip command");
            return;
        }
        let peers = Peers::read().unwrap();
        let of = |pid: u32| peers.of_thread(i32::try_from(pid).unwrap());
        assert_eq!(of(inside.0.id()), [near]);
        assert!(of(alone.0.id()).is_empty());
        assert!(of(std::process::id()).is_empty(), "the host's own namespace");
        assert!(peers.of_thread(i32::MAX).is_empty());
    }

    /// Removes both ends of a pair at the end of the test.
    struct Pair(String);

    impl Drop for Pair {
        fn drop(&mut self) {
            ip(&format!("link del {}", self.0));
        }
    }

    #[test]
    fn a_macvlan_in_a_container_is_found_with_what_it_stands_on() {
        if !rustix::process::geteuid().is_root() {
            println!("SKIPPED: needs root");
            return;
        }
        let (Some(inside), Some(alone)) = (Contained::start(), Contained::start()) else {
            println!("SKIPPED: unshare is not installed");
            return;
        };
        let (nic, far) = (format!("otm{}", std::process::id()), format!("otn{}", std::process::id()));
        if !ip(&format!("link add {nic} type veth peer name {far}")) {
            println!("SKIPPED: no veth here, or no ip command");
            return;
        }
        let _pair = Pair(nic.clone());
        let address = "02:00:00:00:0a:01";
        if !ip(&format!("link add link {nic} name eth0 netns {} address {address} type macvlan", inside.0.id())) {
            println!("SKIPPED: no macvlan here");
            return;
        }
        // A macvlan on an interface of the container itself, whose index is likely that of a host NIC.
        for own in ["name va type veth peer name vb", "link va name on-own type macvlan"] {
            let enter = format!("-t {} -n ip link add {own}", inside.0.id());
            assert!(Command::new("nsenter").args(enter.split(' ')).status().unwrap().success(), "{own}");
        }
        let of = |pid: u32| {
            let pid = i32::try_from(pid).unwrap();
            standing(ThreadId::of(pid, pid).unwrap(), 100).unwrap().2
        };
        let on = std::fs::read_to_string(format!("/sys/class/net/{nic}/ifindex")).unwrap().trim().parse().unwrap();
        let mac = Some([2, 0, 0, 0, 0x0a, 1]);
        assert_eq!(of(inside.0.id()), [UpperInterface { name: "eth0".to_owned(), mac, on }]);
        assert!(of(alone.0.id()).is_empty());
        assert!(of(std::process::id()).is_empty(), "the host's own namespace");
        // A container decides how many interfaces its namespace has.
        let pid = i32::try_from(inside.0.id()).unwrap();
        let (looked_at, whole, _) = standing(ThreadId::of(pid, pid).unwrap(), 2).unwrap();
        assert_eq!((looked_at, whole), (2, false));
    }

    #[test]
    fn broken_datagrams_end_the_reading() {
        let mut replies = Vec::new();
        for bytes in [&[][..], &[0, 0, 0, 0, 1, 2], &[255; 40], &[16, 0, 0, 0, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9, 9]] {
            assert!(matches!(read_datagram(bytes, &mut replies), Ok(false)));
        }
        assert!(replies.is_empty());
    }
}
