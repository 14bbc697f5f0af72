//! Which of the host's interfaces lead into which container: the near ends of veth (and netkit) pairs.
//!
//! In: the kernel's link table, and a process of the container. Out: interface names. Nothing of the container is read, since
//! it could put anything there: the kernel says into which network namespace each pair leads (`IFLA_LINK_NETNSID`), and
//! which number that namespace has (`RTM_GETNSID`). Source: `net/core/rtnetlink.c`, `net/core/net_namespace.c`.
//!
//! A container on macvlan or ipvlan has no near end: its interface hangs off the host's NIC, and only the container's side tells.

use std::collections::HashMap;
use std::io;

use netlink_packet_core::{NLM_F_DUMP, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage, NetlinkPayload};
use netlink_packet_route::RouteNetlinkMessage;
use netlink_packet_route::link::{LinkAttribute, LinkMessage};
use netlink_packet_route::nsid::{NsidAttribute, NsidMessage};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};

/// Near ends by the number of the namespace they lead into.
#[derive(Debug)]
pub(crate) struct Peers {
    socket: Socket,
    by_namespace: HashMap<i32, Vec<String>>,
}

impl Peers {
    /// Reads the host's link table.
    pub(crate) fn read() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        let mut by_namespace: HashMap<i32, Vec<String>> = HashMap::new();
        let request = RouteNetlinkMessage::GetLink(LinkMessage::default());
        for reply in ask(&socket, request, NLM_F_REQUEST | NLM_F_DUMP)? {
            let RouteNetlinkMessage::NewLink(link) = reply else { continue };
            let (mut name, mut namespace) = (None, None);
            for attribute in link.attributes {
                match attribute {
                    LinkAttribute::IfName(given) => name = Some(given),
                    LinkAttribute::LinkNetNsId(number) => namespace = Some(number),
                    _ => {}
                }
            }
            if let (Some(name), Some(namespace)) = (name, namespace) {
                by_namespace.entry(namespace).or_default().push(name);
            }
        }
        Ok(Self { socket, by_namespace })
    }

    /// The near ends of the pairs that lead into a process's network namespace, in name order.
    pub(crate) fn of_process(&self, pid: i32) -> Vec<String> {
        let namespace = self.namespace_of(pid).unwrap_or(None);
        let mut names = namespace.and_then(|number| self.by_namespace.get(&number)).cloned().unwrap_or_default();
        names.sort();
        names
    }

    /// The number that this namespace has for a process's; `None` where it has none, so no pair leads there.
    fn namespace_of(&self, pid: i32) -> io::Result<Option<i32>> {
        let mut message = NsidMessage::default();
        message.attributes.push(NsidAttribute::Pid(u32::try_from(pid).map_err(io::Error::other)?));
        for reply in ask(&self.socket, RouteNetlinkMessage::GetNsId(message), NLM_F_REQUEST)? {
            let RouteNetlinkMessage::NewNsId(answer) = reply else { continue };
            let number = answer.attributes.iter().find_map(|attribute| match attribute {
                NsidAttribute::Id(number) => Some(*number),
                _ => None,
            });
            return Ok(number.filter(|number| *number >= 0));
        }
        Ok(None)
    }
}

/// Asks the kernel and reads its whole answer.
fn ask(socket: &Socket, request: RouteNetlinkMessage, flags: u16) -> io::Result<Vec<RouteNetlinkMessage>> {
    let mut packet = NetlinkMessage::new(NetlinkHeader::default(), NetlinkPayload::from(request));
    packet.header.flags = flags;
    packet.finalize();
    let mut bytes = vec![0; packet.buffer_len()];
    packet.serialize(&mut bytes);
    socket.send(&bytes, 0)?;
    let mut replies = Vec::new();
    loop {
        let (datagram, _) = socket.recv_from_full()?;
        if read_datagram(&datagram, &mut replies)? || flags & NLM_F_DUMP != NLM_F_DUMP {
            return Ok(replies);
        }
    }
}

/// Reads the messages of one datagram; true at the end of a dump.
fn read_datagram(datagram: &[u8], replies: &mut Vec<RouteNetlinkMessage>) -> io::Result<bool> {
    let mut rest = datagram;
    while let Some(length) = rest.get(..4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_ne_bytes) {
        let length = usize::try_from(length).map_err(io::Error::other)?;
        let Some(message) = rest.get(..length).filter(|message| message.len() >= 16) else { break };
        // A link with attributes this version cannot read is left out; the others are read.
        if let Ok(message) = NetlinkMessage::<RouteNetlinkMessage>::deserialize(message) {
            match message.payload {
                NetlinkPayload::InnerMessage(reply) => replies.push(reply),
                NetlinkPayload::Done(_) => return Ok(true),
                NetlinkPayload::Error(error) => return Err(error.to_io()),
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

    /// A process in a network namespace of its own, which ends, and takes its pair along, with the test.
    struct Contained(Child);

    impl Contained {
        fn start() -> Option<Self> {
            let child = Command::new("unshare").args(["--net", "sleep", "60"]).spawn().ok()?;
            let namespace = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/net")).ok();
            let deadline = Instant::now() + Duration::from_secs(5);
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
        let of = |pid: u32| peers.of_process(i32::try_from(pid).unwrap());
        assert_eq!(of(inside.0.id()), [near]);
        assert!(of(alone.0.id()).is_empty());
        assert!(of(std::process::id()).is_empty(), "the host's own namespace");
        assert!(peers.of_process(i32::MAX).is_empty());
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
