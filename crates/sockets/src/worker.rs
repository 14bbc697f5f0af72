//! The worker: executes all calls that can block. It owns the sockets of channel 0 and opens and closes the sockets of
//! all channels. It runs on main's queues at normal priority. It does not sleep: a call whose rate is limited waits for
//! a timer, and other calls of the guest run meanwhile.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use ontime_base::bucket::{Bucket, REFILL};
use ontime_tenants::Repeats;
use rustix::time::{Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec};
use vm_memory::GuestMemoryAtomic;

use crate::abi::*;
use crate::call::{Call, List, Reply};
use crate::closing;
use crate::counters::count;
use crate::engine::{BELL_EVENT, Engine, Outcome};
use crate::host;
use crate::limits::QUEUE_MAX;
use crate::mail::{Ask, Order, Released};
use crate::memory::Memory;
use crate::name::{self, Name};
use crate::options::{self, Access, Group};
use crate::orders::Orders;
use crate::request::{Family, Protocol, Request};
use crate::shared::Shared;
use crate::status::SocketStatus;
use crate::table::{NOBODY, Socket, place};
use crate::vring::Vring;
use crate::wait::Wait;

/// What to do after a channel has released a socket.
enum After {
    Close {
        abort: bool,
    },
    Move {
        channel: u32,
    },
    /// The channel has released all its sockets: close them.
    Forget {
        channel: u32,
    },
}

struct Ticket {
    after: After,
    index: u32,
    /// The call to answer. None if the guest's driver was reset in the meantime.
    call: Option<Box<Call>>,
}

/// The worker; see the module's comment.
pub(crate) struct Worker {
    engine: Engine,
    epoll: RawFd,
    orders: Orders,
    asked: Option<Receiver<Ask>>,
    tickets: Vec<Option<Ticket>>,
    value: Vec<u8>,
    /// Listeners and their granted backlogs: (socket id, connections).
    backlogs: Vec<(u32, u32)>,
    /// Rate limit for options that take the host-wide `rtnl` lock: changes of multicast groups and of the family.
    groups: Bucket,
    /// Calls that wait for a token of `groups`, how many there are, and the timer that rings when there is one.
    limited: List,
    limited_count: usize,
    timer: Option<OwnedFd>,
    refused: u64,
    said: Option<Instant>,
    /// For other log lines that the guest causes.
    repeats: Repeats,
}

/// Event number of the timer of limited calls.
const TIMER_EVENT: u16 = BELL_EVENT + 1;
/// The most calls that wait for a token. The others' answer is ENOBUFS, as where the kernel's own limits on groups are
/// reached, so that they do not fill the queue.
const LIMITED_MAX: usize = QUEUE_MAX / 4;
/// Refusals are logged at most this often.
const SAY_EVERY: Duration = Duration::from_secs(10);

impl Worker {
    /// The worker of a VM.
    pub(crate) fn new(shared: Arc<Shared>, memory: GuestMemoryAtomic<Memory>) -> Self {
        let (channels, asked) = shared.mail.take_worker().map(|ends| (ends.channels, ends.asked)).unzip();
        Self {
            orders: Orders::new(channels.unwrap_or_default()),
            asked,
            // Replaced in `attach`.
            engine: Engine::new(shared, 0, memory, Wait::by(-1)),
            epoll: -1,
            tickets: Vec::new(),
            value: vec![0; ONTIME_OPTION_MAX as usize],
            backlogs: Vec::new(),
            groups: Bucket::default(),
            limited: List::default(),
            limited_count: 0,
            timer: None,
            refused: 0,
            said: None,
            repeats: Repeats::default(),
        }
    }

    /// Uses this epoll from now on.
    ///
    /// # Errors
    /// The errno of epoll_ctl(2) or timerfd_create(2).
    pub(crate) fn attach(&mut self, epoll: RawFd) -> Result<(), Errno> {
        self.engine.sockets.wait = Wait::by(epoll);
        self.epoll = epoll;
        let flags = TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC;
        let timer = rustix::time::timerfd_create(TimerfdClockId::Monotonic, flags);
        let timer = timer.map_err(|error| Errno(error.raw_os_error()))?;
        host::watch(epoll, timer.as_raw_fd(), u64::from(TIMER_EVENT), libc::EPOLLIN as u32)?;
        self.timer = Some(timer);
        host::watch(epoll, self.shared().mail.bell(0), u64::from(BELL_EVENT), libc::EPOLLIN as u32)
    }

    fn shared(&self) -> &Shared {
        &self.engine.shared
    }

    /// Handles an event. For a socket, `ready` holds its EPOLL* bits.
    pub(crate) fn handle(&mut self, event: u16, ready: u32, vrings: &[Vring]) {
        let Some([calls, events]) = vrings.first_chunk() else { return };
        let guard = self.engine.memory();
        let memory = &*guard;
        if self.engine.restarted(calls, events) {
            self.reset();
        }
        self.mail(memory, calls);
        self.engine.catch_up(memory, calls);
        self.engine.event(memory, vrings, event, ready);
        if event == TIMER_EVENT {
            self.run_limited(memory, calls);
        }
        if let Some(vring) = vrings.get(usize::from(event)) {
            vring.wait_by_edge(self.epoll, event);
        }
        let mut left = QUEUE_MAX;
        while let Some(mut call) = self.engine.queue.next(memory, calls, &mut left) {
            match self.engine.queue.parse(&mut call) {
                Ok(request) if is_limited(request) => self.limit(memory, calls, call, request),
                Ok(request) => self.run(memory, calls, call, request),
                Err(error) => self.engine.queue.malformed(memory, calls, call, error),
            }
        }
        self.engine.finish(memory, vrings);
        self.say_refusals();
    }

    /// Runs a call whose rate is limited, or has it wait for its turn.
    fn limit(&mut self, memory: &Memory, calls: &Vring, call: Box<Call>, request: Request) {
        // The kernel is not asked for a group that the policy refuses, so that call takes no token from others. The
        // value is not read again: the guest may have changed it by then.
        if let Err(error) = self.check_group(memory, &call, request) {
            return self.engine.complete(memory, calls, call, &error.into(), None);
        }
        if self.limited.is_empty() && self.groups.take() {
            return self.run(memory, calls, call, request);
        }
        let index = place(call.words.sock);
        let refused = match self.limited_count {
            LIMITED_MAX.. => Some(call),
            _ => self.engine.queue.pool.wait(&mut self.limited, index, call),
        };
        if let Some(call) = refused {
            return self.engine.complete(memory, calls, call, &Errno(libc::ENOBUFS).into(), None);
        }
        self.limited_count += 1;
        if self.limited_count == 1 {
            self.set_timer();
        }
    }

    /// Refuses a call that sets an option with a group which the policy does not allow.
    fn check_group(&mut self, memory: &Memory, call: &Call, request: Request) -> Result<(), Errno> {
        let Request::SetOpt { level, name } = request else { return Ok(()) };
        let Some(Access::Group(group) | Access::Filter(group)) = options::access(level, name) else { return Ok(()) };
        let value = self.value.get_mut(..call.parts.data).ok_or(Errno(libc::EINVAL))?;
        call.buffers.readable.read(memory, call.data_at(), value)?;
        may_join(&self.engine.shared, group, value)
    }

    /// Runs the calls for which there are tokens.
    fn run_limited(&mut self, memory: &Memory, calls: &Vring) {
        if let Some(timer) = &self.timer {
            // It has rung, or was set anew by a call since: then the next ring follows.
            let _ = rustix::io::read(timer, &mut [0; 8]);
        }
        while !self.limited.is_empty() && self.groups.take() {
            let Some(call) = self.engine.queue.pool.first(&mut self.limited) else { break };
            self.limited_count -= 1;
            let request = call.request;
            self.run(memory, calls, call, request);
        }
        if !self.limited.is_empty() {
            self.set_timer();
        }
    }

    /// Has the timer ring when there is the next token.
    fn set_timer(&self) {
        let Some(timer) = &self.timer else { return };
        let at = Timespec { tv_sec: 0, tv_nsec: REFILL.as_nanos() as i64 };
        let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: at };
        // It cannot fail for a timer and a valid time.
        let _ = rustix::time::timerfd_settime(timer, TimerfdTimerFlags::empty(), &once);
    }

    /// Logs refused calls, those of the channels included: this thread has no deadline.
    fn say_refusals(&mut self) {
        let shared = &self.engine.shared;
        let refused = shared.counters.refusals();
        if refused == self.refused || self.said.is_some_and(|said| said.elapsed() < SAY_EVERY) {
            return;
        }
        self.refused = refused;
        self.said = Some(Instant::now());
        let counts = shared.counters.named(shared.closing.count());
        tracing::warn!(
            vm = shared.name,
            ?counts,
            "calls of the guest were refused; if it is to make them, allow them in its table [vm.{}] of sockets.toml",
            shared.name
        );
    }

    /// The guest's driver was reset: closes all its sockets.
    fn reset(&mut self) {
        self.engine.forget();
        (self.limited, self.limited_count) = (List::default(), 0);
        for ticket in self.tickets.iter_mut().flatten() {
            if let Some(call) = ticket.call.take() {
                self.engine.queue.pool.put(call);
            }
        }
        for channel in 1..self.shared().channels() {
            self.withdraw(channel);
            let _ = self.ticket(After::Forget { channel }, 0, None, channel, |ticket| Order::Forget { ticket });
        }
        self.close_ownerless();
        let vm = &self.engine.shared.name;
        self.repeats.info(&format!("VM {vm}: the guest's driver was set up again, so its sockets are closed"));
    }

    /// Withdraws orders that were not sent to a channel yet. After a reset the channel releases all its sockets anyway.
    fn withdraw(&mut self, channel: u32) {
        for order in self.orders.withdraw(channel) {
            match order {
                Order::Adopt { index } => self.shared().table.set_owner(index, NOBODY),
                Order::Release { ticket, .. } | Order::Forget { ticket } => {
                    self.tickets.get_mut(ticket as usize).map(Option::take);
                }
                Order::Look { .. } => {}
                #[cfg(test)]
                Order::Meanwhile(_) => {}
            }
        }
    }

    /// Closes sockets that have no owner and are not being moved.
    fn close_ownerless(&self) {
        let table = &self.shared().table;
        for index in 0..table.len() as u32 {
            // A channel may be closing the socket; see [`Table::find`].
            let held = table.hold(index);
            let socket = table.at(index).filter(|socket| held.is_some() && socket.owner == NOBODY);
            if socket.is_some() && !self.in_transit(index) {
                self.close(index, false);
            }
        }
    }

    fn in_transit(&self, index: u32) -> bool {
        let moves = |ticket: &Ticket| !matches!(ticket.after, After::Forget { .. }) && ticket.index == index;
        self.tickets.iter().flatten().any(moves)
    }

    /// Sends an order whose answer carries a ticket. Returns the call if the order cannot be sent.
    fn ticket(
        &mut self,
        after: After,
        index: u32,
        call: Option<Box<Call>>,
        channel: u32,
        order: impl FnOnce(u32) -> Order,
    ) -> Result<(), Option<Box<Call>>> {
        let number = self.tickets.iter().position(Option::is_none).unwrap_or(self.tickets.len());
        if self.order(channel, order(number as u32)).is_err() {
            return Err(call);
        }
        let ticket = Some(Ticket { after, index, call });
        match self.tickets.get_mut(number) {
            Some(place) => *place = ticket,
            None => self.tickets.push(ticket),
        }
        Ok(())
    }

    /// Processes messages from the other threads.
    fn mail(&mut self, memory: &Memory, calls: &Vring) {
        while let Some(Released { ticket, result }) = self.orders.released() {
            let Some(ticket) = self.tickets.get_mut(ticket as usize).and_then(Option::take) else { continue };
            let result = result.and_then(|()| self.released(&ticket));
            if let Some(call) = ticket.call {
                self.engine.complete(memory, calls, call, &Reply::number(result.map(|()| 0)), None);
            }
        }
        self.orders.flush(&self.engine.shared.mail);
        while let Some(Ok(answer)) = self.asked.as_ref().map(Receiver::try_recv) {
            // The requester may have given up.
            drop(answer.try_send(self.sockets()));
        }
    }

    /// Sends an order to a channel.
    ///
    /// # Errors
    /// EINVAL if the channel does not exist.
    fn order(&mut self, channel: u32, order: Order) -> Result<(), Errno> {
        self.orders.send(&self.engine.shared.mail, channel, order)
    }

    fn released(&mut self, ticket: &Ticket) -> Result<(), Errno> {
        match ticket.after {
            After::Close { abort } => {
                self.close(ticket.index, abort);
                Ok(())
            }
            // The driver that requested the move was reset: the socket is not needed any more.
            After::Move { .. } if ticket.call.is_none() => {
                self.close(ticket.index, false);
                Ok(())
            }
            After::Move { channel } => self.give(ticket.index, channel),
            After::Forget { channel } => {
                self.close_ownerless();
                tracing::debug!(channel, "forgotten");
                Ok(())
            }
        }
    }

    /// Gives a socket without an owner to a channel.
    fn give(&mut self, index: u32, channel: u32) -> Result<(), Errno> {
        if channel == 0 {
            return self.engine.adopt(index);
        }
        self.shared().table.set_owner(index, channel);
        self.order(channel, Order::Adopt { index }).inspect_err(|_| self.shared().table.set_owner(index, NOBODY))
    }

    fn close(&self, index: u32, abort: bool) {
        let shared = self.shared();
        let Some(socket) = shared.table.at(index) else { return };
        let Some(fd) = shared.table.take(index) else { return };
        // Most closed connections leave no data behind, so the guest gets its descriptor back at once.
        let lives = || closing::leaves_an_orphan(host::tcp_state(fd)) && host::unread(fd) == 0;
        if abort || socket.protocol == Protocol::Udp {
            if abort {
                host::abort_at_close(fd);
            }
            host::close(fd);
        } else if lives() && host::shutdown(fd, libc::SHUT_RDWR).is_ok() && lives() {
            shared.leave(fd);
        } else {
            closing::end(fd);
        }
    }

    fn run(&mut self, memory: &Memory, calls: &Vring, call: Box<Call>, request: Request) {
        if matches!(request, Request::Name { .. } | Request::Query(_)) {
            return self.query(memory, calls, call, request);
        }
        if request.is_fast() {
            return self.engine.parsed(memory, calls, call, request);
        }
        if let Request::Socket { family: Family::V6, .. } = request {
            if !self.shared().ipv6 {
                return self.engine.complete(memory, calls, call, &Errno(libc::EAFNOSUPPORT).into(), None);
            }
        }
        if let Request::Socket { family, protocol, channel } = request {
            // A channel may have closed a socket that still has a release pending: that order would apply to the new
            // socket.
            let free = if self.in_transit(place(call.words.sock)) { Err(Errno(libc::EBUSY)) } else { Ok(()) };
            let made = free.and_then(|()| self.shared().table.claim(call.words.sock)).and_then(|index| {
                let made = self.open(family, protocol).inspect_err(|_| self.shared().table.unclaim(index))?;
                self.shared().table.set(index, made, family, protocol, NOBODY);
                self.give(index, channel).inspect_err(|_| self.shared().table.close(index)).map(|()| index)
            });
            if made.is_err() {
                count(&self.shared().counters.refused_limit);
            }
            let place = made.ok().filter(|_| channel == 0);
            return self.engine.complete(memory, calls, call, &Reply::number(made.map(|_| 0)), place);
        }
        // The owning channel must not close the socket during the call. It may have closed it already.
        let shared = self.engine.shared.clone();
        let (socket, _held) = match shared.table.held(call.words.sock) {
            Ok(held) => held,
            Err(error) => return self.engine.complete(memory, calls, call, &error.into(), None),
        };
        match request {
            Request::Close { abort } => return self.let_go(memory, calls, call, &socket, After::Close { abort }),
            Request::Channel { channel } if channel != socket.owner => {
                return self.let_go(memory, calls, call, &socket, After::Move { channel });
            }
            _ => {}
        }
        let ours = socket.owner == 0;
        let reply = match request {
            Request::Channel { .. } => Ok(Reply::done()),
            Request::Bind(name) => self.bind(&socket, name),
            Request::Listen { backlog } => self.listen(&socket, backlog),
            Request::Connect(name) => self.connect(memory, &call, &socket, name),
            Request::SetOpt { level, name } => self.set_option(memory, &call, &socket, level, name),
            Request::GetOpt { level, name } => self.get_option(memory, &call, &socket, level, name),
            _ => Err(Errno(libc::EOPNOTSUPP)),
        };
        if ours {
            self.engine.look(&socket);
        } else if matches!(request, Request::Listen { .. } | Request::Connect(_) | Request::Bind(_)) {
            // A socket without an owner is examined when its next owner adopts it.
            let _ = self.order(socket.owner, Order::Look { index: socket.index });
        }
        let reply = reply.unwrap_or_else(Reply::from);
        self.engine.complete(memory, calls, call, &reply, ours.then_some(socket.index));
    }

    /// Answers a query of any thread's socket. Holding another thread's socket prevents its close meanwhile.
    fn query(&mut self, memory: &Memory, calls: &Vring, mut call: Box<Call>, request: Request) {
        let shared = self.engine.shared.clone();
        if shared.table.find(call.words.sock).is_ok_and(|socket| self.engine.sockets.owns(&socket)) {
            return self.engine.parsed(memory, calls, call, request);
        }
        let reply = match shared.table.held(call.words.sock) {
            Ok((socket, _held)) => match self.engine.attempt(memory, &mut call, &socket) {
                Outcome::Done(reply) => reply,
                Outcome::Wait | Outcome::Again => Errno(libc::EAGAIN).into(),
            },
            Err(error) => error.into(),
        };
        self.engine.complete(memory, calls, call, &reply, None);
    }

    /// Opens a host socket with the configured buffer sizes. Connections accepted from a listener inherit them.
    fn open(&self, family: Family, protocol: Protocol) -> Result<RawFd, Errno> {
        let fd = host::socket(family, protocol)?;
        if let Some(size) = self.shared().vm.policy.limits.fixed_buffer() {
            for name in [libc::SO_SNDBUF, libc::SO_RCVBUF] {
                host::set_option(fd, libc::SOL_SOCKET, name, &size.to_ne_bytes()).inspect_err(|_| host::close(fd))?;
            }
        }
        Ok(fd)
    }

    /// CLOSE and CHANNEL: the owner releases the socket first.
    fn let_go(&mut self, memory: &Memory, calls: &Vring, call: Box<Call>, socket: &Socket, after: After) {
        let force = matches!(after, After::Close { .. });
        let index = socket.index;
        if self.in_transit(index) || socket.owner == NOBODY && !force {
            return self.engine.complete(memory, calls, call, &Errno(libc::EBUSY).into(), None);
        }
        if socket.owner == 0 || socket.owner == NOBODY {
            let ticket = Ticket { after, index, call: Some(call) };
            let result = self.engine.release(memory, calls, index, force).and_then(|()| self.released(&ticket));
            if let Some(call) = ticket.call {
                self.engine.complete(memory, calls, call, &Reply::number(result.map(|()| 0)), None);
            }
            return;
        }
        let id = socket.id;
        let sent = self.ticket(after, index, Some(call), socket.owner, |ticket| Order::Release { id, ticket, force });
        if let Err(Some(call)) = sent {
            self.engine.complete(memory, calls, call, &Errno(libc::EBUSY).into(), None);
        }
    }

    fn bind(&self, socket: &Socket, name: Name) -> Result<Reply, Errno> {
        let Name::Inet(address) = name else { return Err(Errno(libc::EINVAL)) };
        let address = self.may_bind(socket, address)?;
        if self.shared().host_network && !options::binds_to_no_interface(address) {
            count(&self.shared().counters.refused_bind);
            // As for an interface that does not exist.
            return Err(Errno(libc::ENODEV));
        }
        let free = !host::has_port(socket.fd);
        let shares = socket.shares && free && address.port() != 0;
        if shares {
            host::share_port(socket.fd, true)?;
        }
        let done = host::bind(socket.fd, &host::Address::from(&address));
        if shares && done.is_err() {
            host::share_port(socket.fd, false)?;
            // A send on the socket's channel may have had the kernel choose a port meanwhile.
            host::give_up_port(socket.fd)?;
        }
        done?;
        if host::has_port(socket.fd) {
            self.shared().table.set_bound(socket.index, true);
            if socket.shares {
                host::share_port(socket.fd, true)?;
            }
        }
        Ok(Reply::done().named(self.local_name(socket)))
    }

    /// Sets a datagram socket's SO_REUSEPORT. The host sees one user for all sockets of the VM, and gives a socket with
    /// this option also the port of another that has it (`udp_lib_lport_inuse`), which may be another user's. So the
    /// host's socket has it only while its port is one that the guest chose or was told by a bind: the guest's module
    /// knows whose these are.
    fn share(&self, socket: &Socket, may: bool) -> Result<(), Errno> {
        self.shared().table.set_shares(socket.index, may);
        host::share_port(socket.fd, may && socket.bound)
    }

    fn may_bind(&self, socket: &Socket, address: SocketAddr) -> Result<SocketAddr, Errno> {
        self.shared()
            .vm
            .policy
            .bind(socket.protocol, address)
            .inspect_err(|_| count(&self.shared().counters.refused_bind))
    }

    fn local_name(&self, socket: &Socket) -> Option<SocketAddr> {
        let name = host::name(socket.fd, false).ok()?.get()?;
        Some(self.engine.seen(socket.protocol, name))
    }

    fn listen(&mut self, socket: &Socket, backlog: i32) -> Result<Reply, Errno> {
        if !socket.bound && socket.protocol == Protocol::Tcp {
            // listen(2) on an unbound socket makes the kernel choose a port.
            self.may_bind(socket, (Ipv4Addr::UNSPECIFIED, 0).into())?;
        }
        self.shared().table.set_more(socket.index);
        let [before, granted] = self.grant(socket, backlog);
        host::listen(socket.fd, granted as i32)?;
        // Connections that are queued already stay queued if the backlog becomes smaller.
        self.backlogs.retain(|(id, _)| *id != socket.id);
        self.backlogs.push((socket.id, granted.max(before)));
        self.shared().table.set_bound(socket.index, true);
        Ok(Reply::done().named(self.local_name(socket)))
    }

    /// The backlog that a listener had and the one that it gets. Connections in a backlog also use host sockets. All
    /// listeners together may queue about as many connections as the VM may have sockets, and no listener gets more
    /// than half of the rest.
    fn grant(&mut self, socket: &Socket, backlog: i32) -> [u32; 2] {
        let shared = self.engine.shared.clone();
        let listens = |id: u32| {
            let held = shared.table.hold(place(id));
            // `run` holds the slot of `socket`. A channel may hold another one: then this counts as a listener still.
            if held.is_none() && place(id) != socket.index {
                return true;
            }
            shared.table.find(id).is_ok_and(|of| host::tcp_state(of.fd) == host::tcp::LISTEN)
        };
        self.backlogs.retain(|(id, _)| listens(*id));
        let own = self.backlogs.iter().find(|(id, _)| *id == socket.id);
        let before = own.map_or(0, |(_, granted)| *granted);
        let limits = shared.vm.policy.limits;
        let taken = self.backlogs.iter().map(|(_, granted)| *granted).sum::<u32>() - before;
        let fair = (limits.sockets.saturating_sub(taken) / 2).max(1);
        // As an unsigned number, a negative backlog is very large, as it is for the kernel.
        [before, (backlog as u32).min(limits.backlog as u32).min(fair)]
    }

    fn connect(&self, memory: &Memory, call: &Call, socket: &Socket, name: Name) -> Result<Reply, Errno> {
        let address = match name {
            Name::None => return Err(Errno(libc::EINVAL)),
            Name::Unspec => host::Address::unspec(),
            Name::Inet(address) => host::Address::from(&self.shared().reach(socket, address)?),
        };
        // A port that the kernel chose is given up with a datagram socket's connection.
        let gives_up = matches!(name, Name::Unspec) && socket.protocol == Protocol::Udp;
        let shares = gives_up && socket.shares;
        if shares {
            host::share_port(socket.fd, false)?;
        }
        let before = host::port(socket.fd);
        let connected = host::connect(socket.fd, &address);
        if gives_up {
            // A send on the socket's channel may have had the kernel choose another port meanwhile.
            let bound = socket.bound && host::has_port(socket.fd) && host::port(socket.fd) == before;
            self.shared().table.set_bound(socket.index, bound);
            if shares {
                host::share_port(socket.fd, bound)?;
            }
        }
        let result = match connected {
            Ok(()) => Ok(0),
            Err(Errno(libc::EINPROGRESS)) => Err(Errno(libc::EINPROGRESS)),
            Err(error) => return Err(error),
        };
        let near = matches!(name, Name::Inet(address) if name::is_near(address));
        self.shared().table.set_near(socket.index, near && socket.protocol == Protocol::Udp);
        // A connection within this host stands already.
        let asked = call.words.control_room > 0 && socket.protocol == Protocol::Tcp;
        let stands = asked && host::ready(socket.fd) & (ONTIME_READY_OUT | ONTIME_READY_HUP) == ONTIME_READY_OUT;
        let control = if stands { call.tell_send_buffer(memory, socket.fd) } else { 0 };
        Ok(Reply { control, ..Reply::number(result).named(self.local_name(socket)) })
    }

    fn set_option(
        &mut self,
        memory: &Memory,
        call: &Call,
        socket: &Socket,
        level: i32,
        name: i32,
    ) -> Result<Reply, Errno> {
        let access = self.access(level, name)?;
        let value = self.value.get_mut(..call.parts.data).ok_or(Errno(libc::EINVAL))?;
        call.buffers.readable.read(memory, call.data_at(), value)?;
        let shared = &self.engine.shared;
        match access {
            Access::Get => return Err(Errno(libc::ENOPROTOOPT)),
            Access::Buffer => {
                // The kernel refuses a value of fewer than 4 bytes and takes a negative size as a very large one.
                if let Some(wanted) = value.first_chunk_mut::<4>() {
                    *wanted =
                        u32::from_ne_bytes(*wanted).min(shared.vm.policy.limits.largest_buffer() as u32).to_ne_bytes();
                }
            }
            Access::BufferForce => {
                let wanted = value.first_chunk_mut::<4>().ok_or(Errno(libc::EINVAL))?;
                // The kernel takes a negative size as the smallest one.
                let size = i32::from_ne_bytes(*wanted).clamp(0, shared.vm.policy.limits.largest_buffer());
                *wanted = size.to_ne_bytes();
                let name = if name == libc::SO_SNDBUFFORCE { libc::SO_SNDBUF } else { libc::SO_RCVBUF };
                host::set_option(socket.fd, level, name, wanted)?;
                return Ok(Reply::number(Ok(size as u32)));
            }
            Access::BufferLock => {
                if let Some(lock) = value.first_chunk_mut::<4>().filter(|_| shared.vm.policy.limits.memory.is_some()) {
                    *lock = (u32::from_ne_bytes(*lock) | host::BUFFERS_LOCKED).to_ne_bytes();
                }
            }
            Access::Share if socket.protocol == Protocol::Udp => {
                // The kernel refuses a value of fewer than 4 bytes.
                if let Some(wanted) = value.first_chunk::<4>() {
                    let may = i32::from_ne_bytes(*wanted) != 0;
                    return self.share(socket, may).map(|()| Reply::done());
                }
            }
            Access::Stamps => options::limit_stamps(value)?,
            Access::Both | Access::Share | Access::Rtnl => {}
            Access::Backlog => {
                if let Some(wanted) = value.first_chunk_mut::<4>() {
                    *wanted = i32::from_ne_bytes(*wanted).min(shared.vm.policy.limits.backlog).to_ne_bytes();
                }
            }
            Access::Interface | Access::Route => {
                if !options::may_choose_interface(access, value, shared.host_network) {
                    count(&shared.counters.refused_option);
                    return Err(Errno(libc::ENOPROTOOPT));
                }
            }
            Access::LocalPorts => {
                // The kernel refuses a shorter value; 0 is any port.
                let range = value.first_chunk::<4>().map_or(0, |range| u32::from_ne_bytes(*range));
                if range != 0 {
                    let (lowest, highest) = (range as u16, (range >> 16) as u16);
                    let allowed = shared.vm.policy.bind_among(socket.protocol, lowest, highest);
                    allowed.inspect_err(|_| count(&shared.counters.refused_bind))?;
                }
            }
            Access::Group(group) | Access::Filter(group) => {
                may_join(shared, group, value)?;
                // Closing a socket that is a member of a group waits for `rtnl`.
                shared.table.set_more(socket.index);
            }
        }
        host::set_option(socket.fd, level, name, value)?;
        Ok(Reply::done())
    }

    fn get_option(
        &mut self,
        memory: &Memory,
        call: &Call,
        socket: &Socket,
        level: i32,
        name: i32,
    ) -> Result<Reply, Errno> {
        let access = self.access(level, name)?;
        if matches!(access, Access::Group(_)) {
            return Err(Errno(libc::ENOPROTOOPT));
        }
        let room = call.parts.room.min(self.value.len());
        let value = self.value.get_mut(..room).ok_or(Errno(libc::EINVAL))?;
        value.fill(0);
        let given = value.get_mut(..call.parts.data).ok_or(Errno(libc::EINVAL))?;
        call.buffers.readable.read(memory, call.data_at(), given)?;
        if let Access::Filter(group) = access {
            group.limit_sources(value)?;
        }
        let len = host::get_option(socket.fd, level, name, value)?;
        if access == Access::Share && socket.protocol == Protocol::Udp {
            let shares = i32::from(socket.shares).to_ne_bytes();
            value.iter_mut().zip(shares).for_each(|(to, from)| *to = from);
        }
        call.buffers.writable.write(memory, call.room_at(), value.get(..len).unwrap_or_default())?;
        Ok(Reply { data: len, ..Reply::number(Ok(len as u32)) })
    }

    fn access(&self, level: i32, name: i32) -> Result<Access, Errno> {
        options::access(level, name)
            .ok_or(Errno(libc::ENOPROTOOPT))
            .inspect_err(|_| count(&self.shared().counters.refused_option))
    }

    fn sockets(&self) -> Vec<SocketStatus> {
        let table = &self.shared().table;
        let status = |index| {
            // Hold the socket before the lookup: a socket that its channel is closing is skipped.
            let _held = table.hold(index)?;
            Some(SocketStatus::of(&table.at(index)?, &self.shared().vm.policy))
        };
        (0..table.len() as u32).filter_map(status).collect()
    }
}

/// Whether the policy allows the group in an option's value.
fn may_join(shared: &Shared, group: Group, value: &[u8]) -> Result<(), Errno> {
    // The kernel refuses a value that is too short to contain a group.
    if value.len() < group.shortest() {
        return Ok(());
    }
    let group = group_address(group, value).ok_or(Errno(libc::EINVAL))?;
    // The kernel refuses what is no group.
    if !group.is_multicast() {
        return Ok(());
    }
    shared.vm.policy.join(group).inspect_err(|_| count(&shared.counters.refused_reach))
}

/// The multicast group in an option's value.
fn group_address(group: Group, value: &[u8]) -> Option<IpAddr> {
    match group {
        Group::V4First => Some(IpAddr::V4(Ipv4Addr::from(*value.first_chunk::<4>()?))),
        Group::V6First => Some(IpAddr::V6(Ipv6Addr::from(*value.first_chunk::<16>()?))),
        Group::Storage => {
            let mut bytes = [0; name::ROOM];
            let storage = value.get(8..)?;
            let len = storage.len().min(bytes.len());
            bytes.get_mut(..len)?.copy_from_slice(storage.get(..len)?);
            match name::parse(&bytes, len) {
                Ok(Name::Inet(address)) => Some(address.ip()),
                _ => None,
            }
        }
    }
}

/// Whether a call takes the host-wide `rtnl` lock, so that its rate is limited: joining or leaving a group, which also
/// updates the NICs' receive filters, changing the family, and reading a source filter (`getsockopt_needs_rtnl`).
fn is_limited(request: Request) -> bool {
    match request {
        Request::SetOpt { level, name } => {
            matches!(options::access(level, name), Some(Access::Rtnl | Access::Group(_) | Access::Filter(_)))
        }
        Request::GetOpt { level, name } => matches!(options::access(level, name), Some(Access::Filter(_))),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::net::{TcpListener, TcpStream, UdpSocket};
    use std::os::fd::IntoRawFd;

    use vhost_user_backend::VringT;

    use super::*;
    use crate::channel_calls::ChannelCalls;
    use crate::config::Vm;
    use crate::log_lines::count_lines;
    use crate::mail::ROOM;
    use crate::policy::Ports;
    use crate::wait::{Events, Ring};

    /// A channel whose thread did not run for a while still gets all its sockets.
    #[test]
    fn no_socket_is_lost_to_a_channel_that_is_kept_from_running() {
        let shared = Arc::new(Shared::new("a", Vm { channels: 1, ..Vm::default() }, 1, None).unwrap());
        let mut worker = Worker::new(shared.clone(), GuestMemoryAtomic::new(Memory::new()));
        let mut end = shared.mail.take_channel(1).unwrap();
        let all = ROOM as u32 + 20;
        for id in 0..all {
            let index = shared.table.claim(id).unwrap();
            let made = host::socket(Family::V4, Protocol::Udp).unwrap();
            shared.table.set(index, made, Family::V4, Protocol::Udp, NOBODY);
            assert_eq!(worker.give(index, 1), Ok(()), "socket {id}");
        }
        let mut adopted = Vec::new();
        while let Ok(Order::Adopt { index }) = end.orders.pop() {
            adopted.push(index);
            worker.orders.flush(&shared.mail);
        }
        assert_eq!(adopted, (0..all).collect::<Vec<_>>());
        // The guest reboots while the channel's thread does not run. Sockets whose order was not sent are closed at
        // once, the others after the channel has released them.
        for index in 0..all {
            worker.order(1, Order::Adopt { index }).unwrap();
        }
        worker.reset();
        assert_eq!(shared.table.open(), ROOM as u32);
        let forgets = std::iter::from_fn(|| {
            let order = end.orders.pop().ok();
            worker.orders.flush(&shared.mail);
            order
        });
        assert_eq!(forgets.filter(|order| matches!(order, Order::Forget { .. })).count(), 1);
    }

    /// A worker and two channels, all on the test's thread, with a ring that never runs. Answers are kept in order.
    struct Bench {
        shared: Arc<Shared>,
        worker: Worker,
        channels: [ChannelCalls; 2],
        ring: Vring,
    }

    impl Bench {
        fn new() -> Self {
            Self::of(Shared::new("a", Vm { channels: 2, ..Vm::default() }, 1, None).unwrap())
        }

        fn without_ipv6() -> Self {
            let mut shared = Shared::new("a", Vm { channels: 2, ..Vm::default() }, 1, None).unwrap();
            shared.ipv6 = false;
            Self::of(shared)
        }

        fn of(shared: Shared) -> Self {
            let shared = Arc::new(shared);
            let memory = GuestMemoryAtomic::new(Memory::new());
            let worker = Worker::new(shared.clone(), memory.clone());
            let wait = || Wait::new(None, 2000).unwrap();
            let engine = |channel| Engine::new(shared.clone(), channel, memory.clone(), wait());
            let channels = [1, 2].map(|channel| ChannelCalls::new(engine(channel)));
            Self { shared, worker, channels, ring: Vring::new(memory, 1).unwrap() }
        }

        /// A connection that a channel has accepted.
        fn accepted(&mut self, id: u32, channel: u32) -> Socket {
            let table = &self.shared.table;
            let index = opened(&self.shared, id, channel);
            table.set_accepted(index);
            self.channels[channel as usize - 1].engine.adopt(index).unwrap();
            table.find(id).unwrap()
        }

        fn call(&mut self, id: u32, request: Request) {
            let mut call = self.worker.engine.queue.pool.take().unwrap();
            call.words.sock = id;
            self.worker.run(&Memory::new(), &self.ring, call, request);
        }

        fn answers(&mut self) -> Vec<Result<u32, Errno>> {
            for channel in &mut self.channels {
                channel.orders(&Memory::new(), &self.ring);
            }
            self.worker.mail(&Memory::new(), &self.ring);
            self.worker.engine.queue.owed.drain(..).map(|owed| owed.reply.result).collect()
        }
    }

    const CLOSE: Request = Request::Close { abort: false };
    /// The next id in the slot of id 7.
    const NEXT: u32 = 7 | 1 << ONTIME_SOCK_INDEX_BITS;

    /// The slot of a new TCP socket that this channel owns but has not adopted.
    fn opened(shared: &Shared, id: u32, channel: u32) -> u32 {
        let index = shared.table.claim(id).unwrap();
        let fd = host::socket(Family::V4, Protocol::Tcp).unwrap();
        shared.table.set(index, fd, Family::V4, Protocol::Tcp, channel);
        index
    }

    /// The kernel may choose one port only, which another socket has and shares.
    #[test]
    fn a_port_that_the_kernel_chooses_is_no_other_sockets() {
        const IP_LOCAL_PORT_RANGE: i32 = 51;
        let mut vm = Vm { channels: 2, ..Vm::default() };
        vm.policy.bind = vec![Ports { protocol: Protocol::Udp, first: 0, last: u16::MAX }];
        let bench = Bench::of(Shared::new("a", vm, 1, None).unwrap());
        let local = |port: u16| Name::Inet((Ipv4Addr::LOCALHOST, port).into());
        let sharing = |id| {
            let table = &bench.shared.table;
            let index = table.claim(id).unwrap();
            table.set(index, host::socket(Family::V4, Protocol::Udp).unwrap(), Family::V4, Protocol::Udp, 0);
            bench.worker.share(&table.find(id).unwrap(), true).unwrap();
            table.find(id).unwrap()
        };
        let first = sharing(1);
        bench.worker.bind(&first, local(0)).unwrap();
        let port = host::name(first.fd, false).unwrap().get().unwrap().port();
        let second = sharing(2);
        let only = (u32::from(port) << 16 | u32::from(port)).to_ne_bytes();
        if host::set_option(second.fd, libc::IPPROTO_IP, IP_LOCAL_PORT_RANGE, &only).is_err() {
            println!("SKIPPED: before Linux 6.3 a socket has no range of ports");
            return;
        }
        assert_eq!(bench.worker.bind(&second, local(0)).err(), Some(Errno(libc::EADDRINUSE)));
        assert!(bench.worker.bind(&second, local(port)).is_ok(), "the guest's module has allowed it");
    }

    #[test]
    fn refused_calls_are_logged_at_intervals() {
        let mut bench = Bench::new();
        let mut refuse = || {
            for _ in 0..100 {
                count(&bench.shared.counters.refused_bind);
                bench.worker.say_refusals();
            }
        };
        assert_eq!(count_lines(&mut refuse), 1);
        assert_eq!(count_lines(&mut refuse), 0);
        bench.worker.said = Instant::now().checked_sub(SAY_EVERY);
        assert_eq!(count_lines(|| bench.worker.say_refusals()), 1, "the others are counted");
        assert_eq!(count_lines(|| bench.worker.say_refusals()), 0);
    }

    /// The kernel binds a socket to the interface of a link-local address also if the host has no such address.
    #[test]
    fn no_bind_chooses_an_interface_of_the_hosts_own_network() {
        let mut vm = Vm { channels: 2, ..Vm::default() };
        vm.policy.bind = vec![Ports { protocol: Protocol::Udp, first: 0, last: u16::MAX }];
        let mut shared = Shared::new("a", vm, 1, None).unwrap();
        shared.host_network = true;
        let bench = Bench::of(shared);
        let Ok(fd) = host::socket(Family::V6, Protocol::Udp) else {
            println!("SKIPPED: no IPv6");
            return;
        };
        let table = &bench.shared.table;
        let index = table.claim(7).unwrap();
        table.set(index, fd, Family::V6, Protocol::Udp, 0);
        let bind =
            |address: &str| bench.worker.bind(&table.find(7).unwrap(), Name::Inet(address.parse().unwrap())).err();
        for address in ["[fe80::dead:beef%2]:0", "[ff02::fb%2]:0"] {
            assert_eq!(bind(address), Some(Errno(libc::ENODEV)), "{address}");
            let mut interface = [0; 4];
            host::get_option(fd, libc::SOL_SOCKET, options::SO_BINDTOIFINDEX, &mut interface).unwrap();
            assert_eq!(interface, [0; 4], "{address}");
        }
        assert_eq!(bind("[::]:0"), None);
    }

    /// A bind that fails gives up a port that a send may have got meanwhile, and with that the kernel would forget the
    /// interface.
    #[test]
    fn a_bind_that_fails_leaves_the_interface() {
        let mut vm = Vm { channels: 2, ..Vm::default() };
        vm.policy.bind = vec![Ports { protocol: Protocol::Udp, first: 0, last: u16::MAX }];
        let bench = Bench::of(Shared::new("a", vm, 1, None).unwrap());
        let other = UdpSocket::bind("127.0.0.1:0").unwrap();
        let table = &bench.shared.table;
        let index = table.claim(7).unwrap();
        table.set(index, host::socket(Family::V4, Protocol::Udp).unwrap(), Family::V4, Protocol::Udp, 0);
        let loopback = 1i32.to_ne_bytes();
        let socket = table.find(7).unwrap();
        host::set_option(socket.fd, libc::SOL_SOCKET, options::SO_BINDTOIFINDEX, &loopback).unwrap();
        bench.worker.share(&socket, true).unwrap();
        let taken = Name::Inet(other.local_addr().unwrap());
        assert_eq!(bench.worker.bind(&table.find(7).unwrap(), taken).err(), Some(Errno(libc::EADDRINUSE)));
        let mut interface = [0; 4];
        host::get_option(socket.fd, libc::SOL_SOCKET, options::SO_BINDTOIFINDEX, &mut interface).unwrap();
        assert_eq!(interface, loopback);
    }

    /// A channel looks a socket up for a call, and only then adopts it, releases it, and adopts the next socket in its
    /// slot.
    #[test]
    fn a_call_does_not_reach_the_next_socket_in_its_slot() {
        let mut bench = Bench::new();
        let index = opened(&bench.shared, 7, 1);
        let reopen = |shared: &Shared| {
            shared.table.close(7);
            opened(shared, NEXT, 1);
        };
        let release = Order::Release { id: 7, ticket: 0, force: true };
        for order in [Order::Adopt { index }, release, Order::Meanwhile(reopen), Order::Adopt { index }] {
            bench.worker.order(1, order).unwrap();
        }
        let channel = &mut bench.channels[0];
        let mut answer = |id| {
            let mut call = channel.engine.queue.pool.take().unwrap();
            call.words.sock = id;
            call.request = Request::Name { peer: false };
            let request = call.request;
            channel.parsed(&Memory::new(), &bench.ring, call, request);
            channel.engine.queue.owed.pop_front().unwrap().reply.result
        };
        assert_eq!([7, NEXT].map(&mut answer), [Err(Errno(libc::EBADF)), Ok(0)]);
    }

    /// For each socket of a missing address family, the kernel would try to load its module.
    #[test]
    fn a_host_without_ipv6_is_not_asked_for_it() {
        let mut bench = Bench::without_ipv6();
        for (id, family) in [(1, Family::V6), (2, Family::V4)] {
            bench.call(id, Request::Socket { family, protocol: Protocol::Udp, channel: 1 });
        }
        assert_eq!(bench.answers(), [Err(Errno(libc::EAFNOSUPPORT)), Ok(0)]);
    }

    #[test]
    fn a_socket_that_is_closed_twice_is_closed_once() {
        let mut bench = Bench::new();
        bench.accepted(7, 1);
        bench.call(7, CLOSE);
        bench.call(7, CLOSE);
        assert_eq!(bench.answers(), [Err(Errno(libc::EBUSY)), Ok(0)]);
        assert_eq!(bench.shared.table.open(), 0);
    }

    /// Watching a socket fails where the kernel's memory or a user's epoll watches are used up.
    #[test]
    fn a_socket_that_cannot_be_watched_keeps_no_slot() {
        let mut bench = Bench::new();
        let shared = bench.shared.clone();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let index = shared.table.claim(7).unwrap();
        shared.table.set(index, listener.into_raw_fd(), Family::V4, Protocol::Tcp, 1);
        bench.channels[0].engine.adopt(index).unwrap();
        let channels = bench.channels.iter_mut().map(|channel| &mut channel.engine);
        for engine in channels.chain([&mut bench.worker.engine]) {
            engine.sockets.wait = Wait::by(-1);
        }
        // A connection that its listener's channel cannot watch.
        let _client = TcpStream::connect(address).unwrap();
        let channel = &mut bench.channels[0];
        let mut call = channel.engine.queue.pool.take().unwrap();
        call.words.sock = 7;
        let request = Request::Accept { new: 8 };
        call.request = request;
        channel.parsed(&Memory::new(), &bench.ring, call, request);
        assert!(channel.engine.queue.owed.pop_front().unwrap().reply.result.is_err());
        assert_eq!(shared.table.open(), 1, "the listener only");
        // Sockets that are new, for the worker itself and for a channel, which has told the guest by then.
        let socket = |channel| Request::Socket { family: Family::V4, protocol: Protocol::Udp, channel };
        for (id, channel, made) in [(9, 0, false), (10, 2, true), (11, 2, true)] {
            bench.call(id, socket(channel));
            assert_eq!(bench.answers()[0].is_ok(), made);
        }
        assert_eq!(shared.table.open(), 3);
        bench.call(10, CLOSE);
        assert_eq!(bench.answers(), [Ok(0)]);
        // The guest boots anew.
        bench.worker.reset();
        bench.answers();
        assert_eq!(shared.table.open(), 0);
    }

    /// The worker closes a socket that a channel has released, before the channel's next wait. No poll of the channel
    /// may keep the socket open: the channel's real-time thread would then end the queued connections.
    #[test]
    fn a_released_listener_is_closed_before_its_channel_waits_again() {
        let Ok(ring) = Ring::new().inspect_err(|error| println!("SKIPPED: no io_uring: {error}")) else { return };
        let mut bench = Bench::new();
        let shared = bench.shared.clone();
        bench.channels[0].engine.sockets.wait = Wait::new(Some(ring), 2000).unwrap();
        bench.channels[0].engine.sockets.wait.begin();
        for reset in [false, true] {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            let address = listener.local_addr().unwrap();
            let index = shared.table.claim(7).unwrap();
            shared.table.set(index, listener.into_raw_fd(), Family::V4, Protocol::Tcp, 1);
            bench.channels[0].engine.adopt(index).unwrap();
            let _queued = TcpStream::connect(address).unwrap();
            let mut events = Events::default();
            while events.is_empty() {
                bench.channels[0].engine.sockets.wait.wait(&mut events).unwrap();
            }
            if reset {
                bench.worker.reset()
            } else {
                bench.call(7, CLOSE)
            }
            bench.answers();
            assert_eq!(shared.table.open(), 0);
            assert!(TcpStream::connect(address).is_err(), "it still listens, reset: {reset}");
        }
    }

    /// The worker makes a listener of a connection, or uses it, after the channel has looked it up for a CLOSE. The
    /// guest then sends CLOSE to main.
    #[test]
    fn a_channel_closes_no_connection_that_has_become_more() {
        let mut bench = Bench::new();
        let [listener, used] = [7, 8].map(|id| bench.accepted(id, 1));
        bench.shared.table.set_more(listener.index);
        let shared = bench.shared.clone();
        let _used = shared.table.hold(used.index);
        for socket in [listener, used] {
            let closed = bench.channels[0].close(&Memory::new(), &bench.ring, &socket, false);
            assert_eq!(closed, Err(Errno(libc::EOPNOTSUPP)));
        }
        assert_eq!(shared.table.open(), 2);
    }

    /// The descriptor of a socket that a channel is closing may be another file's at any time. And a channel that tries
    /// to close a listener must not make the worker forget the listener's backlog.
    #[test]
    fn a_backlog_counts_while_a_channel_holds_its_socket() {
        let mut bench = Bench::new();
        let [other, socket] = [7, 8].map(|id| bench.accepted(id, 1));
        let mut backlogs = |held| {
            bench.worker.backlogs = vec![(7, 100), (8, 50), (NEXT, 20)];
            let _listener = bench.shared.table.hold(socket.index);
            let _other = bench.shared.table.hold(other.index).filter(|_| held);
            bench.worker.grant(&socket, 10);
            bench.worker.backlogs.clone()
        };
        assert_eq!(backlogs(true), [(7, 100), (NEXT, 20)]);
        assert_eq!(backlogs(false), []);
        for socket in [other, socket] {
            host::listen(socket.fd, 1).unwrap();
        }
        assert_eq!(backlogs(true), [(7, 100), (8, 50), (NEXT, 20)]);
        assert_eq!(backlogs(false), [(7, 100), (8, 50)]);
    }

    /// A look-up that overlaps with the close by a channel finds the id and the descriptor, but no owner any more. The
    /// worker must not take that for a socket without an owner: the next socket in the slot may be another channel's.
    #[test]
    fn a_socket_that_its_channel_is_closing_is_left_to_it() {
        let mut bench = Bench::new();
        let index = bench.accepted(7, 1).index;
        bench.channels[0].engine.sockets.locals[index as usize].owned = false;
        bench.shared.table.set_owner(index, NOBODY);
        let shared = bench.shared.clone();
        let closing = shared.table.hold(index).unwrap();
        bench.call(7, CLOSE);
        bench.call(7, Request::Channel { channel: 2 });
        assert_eq!(bench.answers(), [Err(Errno(libc::EBADF)), Err(Errno(libc::EBADF))]);
        bench.worker.reset();
        assert_eq!((bench.answers(), shared.table.open()), (Vec::new(), 1));
        drop(closing);
        bench.worker.reset();
        assert_eq!((bench.answers(), shared.table.open()), (Vec::new(), 0), "now nobody has it");
    }

    /// The guest closes one connection through main and through its channel; either may come first.
    #[test]
    fn who_comes_to_a_closed_sockets_place_stays() {
        let mut bench = Bench::new();
        for again in [7, NEXT] {
            let socket = bench.accepted(7, 1);
            bench.call(7, CLOSE);
            bench.channels[0].close(&Memory::new(), &bench.ring, &socket, false).unwrap();
            // The worker must not close it while its order refers to the earlier socket.
            bench.call(again, Request::Socket { family: Family::V4, protocol: Protocol::Udp, channel: 1 });
            let next = bench.accepted(again, 2);
            assert_eq!(bench.answers(), [Err(Errno(libc::EBUSY)), Err(Errno(libc::EBADF))]);
            assert_eq!(bench.shared.table.find(again), Ok(next), "id {again:#x}");
            bench.call(again, CLOSE);
            assert_eq!(bench.answers(), [Ok(0)]);
            assert_eq!(bench.shared.table.open(), 0);
        }
    }
}
