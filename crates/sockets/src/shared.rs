//! State that the threads of one VM's device share: the socket table, policy, counters, mail and vCPU words.

use std::net::SocketAddr;
use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ontime_sched::Ledger;

use crate::abi::{
    Errno, ONTIME_MAGIC, ONTIME_ROLE_CHANNEL, ONTIME_ROLE_MAIN, ONTIME_VERSION, ONTIME_WAKE_IDLE,
    ONTIME_WAKE_INTERRUPT, ontime_config, ontime_vcpu,
};
use crate::busy_counter::BusyCounter;
use crate::closing::Closing;
use crate::config::{Vm, Wake};
use crate::counters::{Counters, count};
use crate::deadlines::Deadlines;
use crate::guard::Guard;
use crate::host;
use crate::limits::{DATA_MAX, QUEUE_MAX, SEGMENTS_CHANNEL, SEGMENTS_MAIN};
use crate::mail::Mail;
use crate::options;
use crate::request::Family;
use crate::table::{Socket, Table};
use crate::vring::Vring;

/// How long the control queue waits for a channel's thread to stop using a withdrawn vCPU word. Shorter than the
/// driver's timeout.
const PATIENCE: Duration = Duration::from_secs(2);

/// The low bits of a vCPU word's address, which are 0.
const VCPU_COUNT: u64 = size_of::<ontime_vcpu>() as u64 - 1;

/// Shared state of one VM's device threads.
pub(crate) struct Shared {
    /// The VM's name.
    pub name: String,
    /// The VM's configuration.
    pub vm: Vm,
    /// The VM's sockets.
    pub table: Table,
    /// Closed connections that still have data.
    pub closing: Closing,
    /// Whether the host has IPv6 ([`crate::held::Held`]).
    pub ipv6: bool,
    /// Whether the sockets are in the host's own network namespace.
    pub host_network: bool,
    /// Counters.
    pub counters: Counters,
    /// Bandwidth of the guest's deadline tasks.
    pub deadlines: Deadlines,
    /// Messages between the threads.
    pub mail: Mail,
    /// Sends lost wake-ups again.
    pub guard: Guard,
    /// By channel; see [`Shared::vcpu_named`].
    vcpus: Vec<AtomicU64>,
    /// By channel, 0 is the worker: turns of the threads that use the vCPU words.
    busy: Vec<BusyCounter>,
    /// Main's control queue, whose notification uses main's vector. Set when the guest names a vCPU word.
    pub attention: OnceLock<Vring>,
    generation: u64,
}

impl Shared {
    /// Shared state for a VM. With a ledger, offered bandwidth can be claimed without the daemon.
    ///
    /// # Errors
    /// The errno of eventfd(2).
    pub(crate) fn new(name: &str, vm: Vm, generation: u64, ledger: Option<Ledger>) -> std::io::Result<Self> {
        let mail = Mail::new(vm.channels)?;
        Ok(Self {
            name: name.to_owned(),
            table: Table::new(vm.policy.limits.sockets),
            closing: Closing::new(vm.policy.limits.sockets),
            ipv6: true,
            host_network: false,
            vcpus: (0..=vm.channels).map(|_| AtomicU64::new(0)).collect(),
            busy: (0..=vm.channels).map(|_| BusyCounter::default()).collect(),
            guard: Guard::new(vm.channels),
            vm,
            counters: Counters::default(),
            deadlines: Deadlines::new(ledger),
            mail,
            attention: OnceLock::new(),
            generation,
        })
    }

    /// The host's address for a connect or a send.
    ///
    /// # Errors
    /// EPERM if no rule allows it, or it would be sent past the routes of the host's own network.
    pub(crate) fn reach(&self, socket: &Socket, address: SocketAddr) -> Result<SocketAddr, Errno> {
        let reached = self.vm.policy.reach(socket.protocol, address);
        let reached =
            reached.and_then(|to| if self.passes_routes(socket, to) { Err(Errno(libc::EPERM)) } else { Ok(to) });
        reached.inspect_err(|_| count(&self.counters.refused_reach))
    }

    /// Whether an earlier connect to an address of a link has bound the socket to the link's interface in the host's
    /// own network, and this address is none of a link. The kernel binds also if the connect fails, and gives the
    /// interface up only when a datagram socket's connection is dissolved.
    fn passes_routes(&self, socket: &Socket, to: SocketAddr) -> bool {
        let mut interface = [0; 4];
        self.host_network
            && socket.family == Family::V6
            && options::link_of(to).is_none()
            && host::get_option(socket.fd, libc::SOL_SOCKET, options::SO_BINDTOIFINDEX, &mut interface).is_ok()
            && !options::harmless_interface(i32::from_ne_bytes(interface))
    }

    /// Guest-physical address of a channel's `ontime_vcpu`, 0 for none.
    pub(crate) fn vcpu(&self, channel: u32) -> u64 {
        self.vcpu_named(channel) & !VCPU_COUNT
    }

    /// The same with a counter of the changes in the low bits, which are 0 in such an address: a new driver's word may
    /// have the old word's address.
    pub(crate) fn vcpu_named(&self, channel: u32) -> u64 {
        self.vcpus.get(channel as usize).map_or(0, |word| word.load(Ordering::SeqCst))
    }

    /// Sets a channel's `ontime_vcpu` address; 0 withdraws it. When this returns, the channel's thread no longer uses
    /// the previous word, which the guest may then free. The thread is woken to see the new word. Only for the control
    /// queue's thread.
    ///
    /// # Errors
    /// EBUSY if the thread's turn takes longer than [`PATIENCE`] because other threads preempt it. The channel then has
    /// no word, and the thread may still write to the previous one.
    pub(crate) fn name_vcpu(&self, channel: u32, address: u64) -> Result<(), Errno> {
        self.name_vcpu_within(PATIENCE, channel, address)
    }

    fn name_vcpu_within(&self, patience: Duration, channel: u32, address: u64) -> Result<(), Errno> {
        let (Some(word), Some(busy)) = (self.vcpus.get(channel as usize), self.busy_counter(channel)) else {
            return Ok(());
        };
        let count = word.load(Ordering::Relaxed).wrapping_add(1) & VCPU_COUNT;
        word.store(count, Ordering::SeqCst);
        if !busy.wait_idle(patience) {
            return Err(Errno(libc::EBUSY));
        }
        word.store(address | count, Ordering::SeqCst);
        self.mail.ring(channel);
        Ok(())
    }

    /// The turns of the first thread of a channel's device.
    pub(crate) fn busy_counter(&self, channel: u32) -> Option<&BusyCounter> {
        self.busy.get(channel as usize)
    }

    /// Withdraws a word unless another one was named since it was `seen`. For the channel's thread when its driver is
    /// gone.
    pub(crate) fn drop_vcpu(&self, channel: u32, seen: u64) {
        if let Some(word) = self.vcpus.get(channel as usize) {
            let _ = word.compare_exchange(seen, seen & VCPU_COUNT, Ordering::AcqRel, Ordering::Relaxed);
        }
    }

    /// Passes a connection whose FIN was sent to the thread that closes it. If no place is free, the connection is
    /// reset if the kernel still has data to send, and closed.
    pub(crate) fn leave(&self, fd: RawFd) {
        if self.closing.put(fd) {
            return;
        }
        if crate::closing::leaves_an_orphan(host::tcp_state(fd)) {
            count(&self.counters.reset_limit);
            host::abort_at_close(fd);
        }
        crate::closing::end(fd);
    }

    /// Number of channels, main included.
    pub(crate) fn channels(&self) -> u32 {
        self.mail.threads()
    }

    /// A number that differs after each start of the process.
    pub(crate) fn generation(&self) -> u64 {
        self.generation
    }

    /// Most descriptors of one call on a channel.
    pub(crate) fn segments(channel: u32) -> u32 {
        if channel == 0 { SEGMENTS_MAIN } else { SEGMENTS_CHANNEL }
    }

    /// The configuration space of a channel's device.
    pub(crate) fn config(&self, channel: u32) -> ontime_config {
        ontime_config {
            magic: ONTIME_MAGIC,
            version: ONTIME_VERSION,
            generation: self.generation,
            role: if channel == 0 { ONTIME_ROLE_MAIN } else { ONTIME_ROLE_CHANNEL },
            channel,
            channels: self.channels(),
            wake: if self.vm.wake == Wake::Idle && channel > 0 { ONTIME_WAKE_IDLE } else { ONTIME_WAKE_INTERRUPT },
            sockets_max: self.table.len() as u32,
            calls_max: QUEUE_MAX as u32,
            segments_max: Self::segments(channel),
            data_max: DATA_MAX,
            reserved: [0; 4],
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::mpsc::channel;

    use super::*;
    use crate::policy::Network;
    use crate::request::Protocol;

    const LONG: Duration = Duration::from_secs(60);

    /// The kernel binds a socket that connects to a link-local address, also if there is no such interface.
    #[test]
    fn a_socket_that_is_connected_to_a_link_sends_nowhere_else_in_the_hosts_own_network() {
        let mut vm = Vm { channels: 1, ..Vm::default() };
        let networks = [("fe80::", 10), ("2001:db8::", 32)];
        vm.policy.reach =
            networks.map(|(address, prefix)| Network::new(address.parse().unwrap(), prefix).unwrap()).into();
        let [link, other] = ["[fe80::1%2]:9", "[2001:db8::1]:9"].map(|text| text.parse::<SocketAddr>().unwrap());
        for host_network in [true, false] {
            let mut shared = Shared::new("a", vm.clone(), 1, None).unwrap();
            shared.host_network = host_network;
            let Ok(fd) = host::socket(Family::V6, Protocol::Udp) else {
                println!("SKIPPED: no IPv6");
                return;
            };
            let index = shared.table.claim(7).unwrap();
            shared.table.set(index, fd, Family::V6, Protocol::Udp, 0);
            let socket = shared.table.find(7).unwrap();
            assert_eq!(shared.reach(&socket, other), Ok(other));
            let _ = host::connect(fd, &host::Address::from(&shared.reach(&socket, link).unwrap()));
            assert_eq!(shared.reach(&socket, link), Ok(link));
            assert_eq!(shared.reach(&socket, other), if host_network { Err(Errno(libc::EPERM)) } else { Ok(other) });
            host::connect(fd, &host::Address::unspec()).unwrap();
            assert_eq!(shared.reach(&socket, other), Ok(other), "the connection is dissolved");
        }
    }

    /// The guest frees a vCPU word when the device answers that it no longer uses it.
    #[test]
    fn a_word_is_given_back_when_nobody_writes_to_it_any_more() {
        let vm = Vm { channels: 1, ..Vm::default() };
        let shared = Arc::new(Shared::new("a", vm, 1, None).unwrap());
        let word = 0x1000;
        shared.name_vcpu(1, word).unwrap();
        let busy = shared.busy_counter(1).unwrap();
        // The channel's thread is about to notify.
        busy.toggle();
        assert_eq!(shared.vcpu(1), word);
        let (tell, told) = channel();
        let other = shared.clone();
        let control = std::thread::spawn(move || tell.send(other.name_vcpu_within(LONG, 1, 0)));
        assert!(told.recv_timeout(Duration::from_millis(100)).is_err(), "it may still be written to");
        busy.toggle();
        assert_eq!(told.recv_timeout(LONG), Ok(Ok(())));
        control.join().unwrap().unwrap();
        assert_eq!(shared.vcpu(1), 0);
        // A turn that does not end: the guest gets EBUSY, and no word is named.
        busy.toggle();
        assert_eq!(shared.name_vcpu_within(Duration::ZERO, 1, word), Err(Errno(libc::EBUSY)));
        assert_eq!(shared.vcpu(1), 0);
    }
}
