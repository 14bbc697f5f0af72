// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Outsourced sockets: creation, names, connections, release.
 *
 * The host's socket has the state that counts: the application gets its answers. Here is only what
 * the kernel reads without asking a protocol (errors, the copy of SOL_SOCKET options), and the
 * readiness that was reported last (ready.c).
 */
#include <linux/capability.h>
#include <linux/moduleparam.h>
#include <linux/sched/signal.h>
#include <net/inet_sock.h>
#include <net/ip.h>

#include "ontime.h"

/* ---- Calls ---- */

/* Whether an answer tells the value of this option of SOL_SOCKET, as a control message. */
bool ontime_told(const struct ontime_rpc *rpc, u32 name, u32 *number)
{
	const struct ontime_control *control = (const struct ontime_control *)rpc->in->body;
	__le32 value;

	if (!rpc->answered || le16_to_cpu(rpc->in->done.control_len) < ONTIME_TOLD_SIZE ||
	    le32_to_cpu(control->level) != SOL_SOCKET || le32_to_cpu(control->type) != name)
		return false;
	memcpy(&value, control + 1, sizeof(value));
	*number = le32_to_cpu(value);
	return true;
}

int ontime_sock_call(struct sock *sk, struct ontime_rpc *rpc)
{
	int result = ontime_rpc_run(rpc);

	ontime_sock_done(sk, rpc);
	return result;
}

/* Operations that a channel serves; MAIN serves the others (docs/reference/device.md, "Virtqueues"). */
static bool op_of_channel(u16 op)
{
	switch (op) {
	case ONTIME_OP_SEND:
	case ONTIME_OP_RECV:
	case ONTIME_OP_ACCEPT:
	case ONTIME_OP_SHUTDOWN:
	case ONTIME_OP_POLL:
		return true;
	default:
		return false;
	}
}

/* Spare calls belong to the socket's channel, because a socket is moved only once. */
struct ontime_rpc *ontime_sock_rpc(struct sock *sk, u16 op)
{
	struct ontime_sock *os = ontime_sk(sk);
	u32 number = op_of_channel(op) ? READ_ONCE(os->chan) : 0;
	struct ontime_rpc *rpc;
	unsigned int i;

	/* Only the calls of one queue are in order. A shutdown ends the sends that wait in the device. */
	if ((!number && READ_ONCE(os->chan)) || op == ONTIME_OP_SHUTDOWN)
		ontime_more_settle(sk, op == ONTIME_OP_SHUTDOWN);
	for (i = 0; number && i < ARRAY_SIZE(os->spare); i++) {
		rpc = READ_ONCE(os->spare[i]) ? xchg(&os->spare[i], NULL) : NULL;
		if (rpc) {
			ontime_rpc_begin(rpc, op, os->id);
			return rpc;
		}
	}
	return ontime_rpc_new(os->dev, number, op, os->id);
}

/* Releases a completed call, or keeps it as a spare for the socket's next call. */
void ontime_sock_rpc_put(struct sock *sk, struct ontime_rpc *rpc)
{
	struct ontime_sock *os = ontime_sk(sk);
	unsigned int i;

	if (rpc->chan->number && ontime_rpc_rest(rpc))
		for (i = 0; i < ARRAY_SIZE(os->spare); i++)
			if (!READ_ONCE(os->spare[i]) && !cmpxchg(&os->spare[i], NULL, rpc))
				return;
	ontime_rpc_put(rpc);
}

/*
 * Asks the host to move the socket to the channel that was chosen for it. If the socket is there
 * already, nothing changes.
 */
static int sock_move(struct sock *sk)
{
	struct ontime_sock *os = ontime_sk(sk);
	u32 wanted = READ_ONCE(os->wanted);
	int err = -EBUSY;

	/* A send that is posted sees @wanted, or is seen here: MAIN would refuse it. */
	if (ontime_more_settle(sk, false))
		err = ontime_simple(sk, ONTIME_OP_CHANNEL, wanted, 0);
	if (!err)
		WRITE_ONCE(os->chan, wanted);
	return err;
}

/*
 * To be called after a call. Once the host has moved the socket, MAIN refuses its calls with EXDEV.
 * The thread that moved it may not have set os->chan yet, or was killed. Then the call has to be
 * repeated on the other channel.
 */
static int sock_follow(struct sock *sk, struct ontime_rpc *rpc, int result)
{
	struct ontime_sock *os = ontime_sk(sk);
	int err;

	if (result != -EXDEV || rpc->chan->number || !READ_ONCE(os->wanted) || !op_of_channel(le16_to_cpu(rpc->out.call.op)))
		return result;
	err = READ_ONCE(os->chan) ? 0 : sock_move(sk);
	return err ? err : -ONTIME_AGAIN;
}

/*
 * Runs a call that may wait up to *timeout (jiffies), if that is not 0. It waits in the device; if
 * too many calls wait there, it waits for readiness, and -ONTIME_AGAIN says that it has to be
 * repeated.
 */
int ontime_sock_run(struct sock *sk, struct ontime_rpc *rpc, long *timeout, u32 ready)
{
	int result;

	if (*timeout && ontime_rpc_may_wait(rpc->chan)) {
		result = ontime_rpc_wait(rpc, timeout);
		ontime_sock_done(sk, rpc);
		result = sock_follow(sk, rpc, result);
		if (result != -EBUSY)
			return result;
	} else {
		result = sock_follow(sk, rpc, ontime_sock_call(sk, rpc));
		if (result != -EAGAIN || !*timeout)
			return result;
	}
	result = ontime_sock_wait_ready(sk, ready, timeout);
	return result ? result : -ONTIME_AGAIN;
}

/* A call with two numbers as arguments. */
int ontime_simple(struct sock *sk, u16 op, u32 arg0, u32 arg1)
{
	struct ontime_rpc *rpc;
	int result;

	do {
		rpc = ontime_sock_rpc(sk, op);
		if (IS_ERR(rpc))
			return PTR_ERR(rpc);
		rpc->out.call.arg[0] = cpu_to_le32(arg0);
		rpc->out.call.arg[1] = cpu_to_le32(arg1);
		result = sock_follow(sk, rpc, ontime_sock_call(sk, rpc));
		ontime_rpc_put(rpc);
	} while (result == -ONTIME_AGAIN);
	return result;
}

/* ---- Coming and going ---- */

static unsigned int reserve = 32;
module_param(reserve, uint, 0644);
MODULE_PARM_DESC(reserve, "number of the VM's sockets kept for CAP_NET_ADMIN and CAP_SYS_RESOURCE; at most a quarter");

/*
 * Whether only the last sockets are left, which are kept for privileged callers, and the caller has
 * no privilege.
 */
static bool sock_reserved(const struct ontime_dev *dev)
{
	u32 kept = min(READ_ONCE(reserve), dev->sockets_max / 4);

	return atomic_read(&dev->used) >= dev->sockets_max - kept && !ns_capable_noaudit(&init_user_ns, CAP_NET_ADMIN) &&
	       !ns_capable_noaudit(&init_user_ns, CAP_SYS_RESOURCE);
}

bool ontime_sock_reserved(void)
{
	struct ontime_dev *dev = ontime_dev_get();
	bool reserved = dev && sock_reserved(dev);

	if (dev)
		ontime_dev_put(dev);
	return reserved;
}

void ontime_index_free(struct ontime_dev *dev, u32 index)
{
	ida_free(&dev->indices, index);
	atomic_dec(&dev->used);
}

static int sock_take_id(struct ontime_sock *os, struct ontime_dev *dev)
{
	int index = sock_reserved(dev) ? -ENOSPC : ida_alloc_max(&dev->indices, dev->sockets_max - 1, GFP_KERNEL);
	int err;

	if (index < 0)
		return index == -ENOSPC ? -EMFILE : index;
	atomic_inc(&dev->used);
	/* The generation is never all ones, so that no id is ONTIME_SOCK_NONE. */
	os->id = index | ((u32)atomic_inc_return(&dev->socket_generation) % 0xfff) << ONTIME_SOCK_INDEX_BITS;
	err = xa_err(xa_store(&dev->socks, index, os, GFP_KERNEL));
	if (err)
		ontime_index_free(dev, index);
	return err;
}

/* What the device may still have of a socket that is released. */
enum sock_rest {
	REST_NOTHING,
	REST_SOCKET,	/* a host socket: the index is free when the device has closed it */
	REST_CALL,	/* a call that may still make a host socket: index and socket belong to the call */
};

static void sock_give_id(struct ontime_sock *os, enum sock_rest rest)
{
	u32 index = os->id & (ONTIME_SOCKETS_MAX - 1);

	xa_erase(&os->dev->socks, index);
	if (rest == REST_SOCKET) {
		struct sock *sk = (struct sock *)os;
		bool abort = sk->sk_type == SOCK_STREAM && os->abort;

		ontime_rpc_close(os->dev, os->peer_len ? os->chan : 0, os->id, index,
				 abort ? ONTIME_CLOSE_ABORT : ONTIME_CLOSE_GRACEFUL);
	} else if (rest == REST_NOTHING) {
		ontime_index_free(os->dev, index);
	}
}

/*
 * A socket from which a real-time thread receives goes to that thread's vCPU's channel, once. The
 * host refuses the move while calls wait on the socket.
 */
void ontime_sock_place(struct sock *sk)
{
	struct ontime_sock *os = ontime_sk(sk);
	u32 wanted = READ_ONCE(os->chan) || READ_ONCE(os->wanted) ? 0 : ontime_chan_wanted(os->dev->generation);

	if (wanted && !cmpxchg(&os->wanted, 0, wanted))
		sock_move(sk);
}

/* Ties a socket to the device; takes over the caller's reference to the device. */
static int sock_attach(struct sock *sk, struct ontime_dev *dev)
{
	struct ontime_sock *os = ontime_sk(sk);
	int err;

	sock_set_flag(sk, SOCK_RCU_FREE);
	mutex_init(&os->ahead_lock);
	mutex_init(&os->call_lock);
	INIT_WORK(&os->urgent, ontime_sock_urgent_work);
	os->dev = dev;
	err = sock_take_id(os, dev);
	if (err) {
		os->dev = NULL;
		ontime_dev_put(dev);
		return err;
	}
	sock_prot_inuse_add(sock_net(sk), sk->sk_prot, 1);
	return 0;
}

static void sock_detach(struct sock *sk, enum sock_rest rest)
{
	struct ontime_sock *os = ontime_sk(sk);

	sock_prot_inuse_add(sock_net(sk), sk->sk_prot, -1);
	sock_give_id(os, rest);
	ontime_dev_put(os->dev);
	os->dev = NULL;
}

/*
 * All socket options reach ontime_setsockopt(), and io_uring's zero-copy sends are accepted (and
 * copied).
 */
static void sock_own_flags(struct socket *sock)
{
	set_bit(SOCK_CUSTOM_SOCKOPT, &sock->flags);
	set_bit(SOCK_SUPPORT_ZC, &sock->flags);
}

/* socket(2), for any protocol number that leads to this protocol. */
int ontime_sock_init(struct sock *sk)
{
	struct ontime_dev *dev = ontime_steer_may(sock_net(sk)) ? ontime_dev_get() : NULL;
	struct ontime_sock *os = ontime_sk(sk);
	struct ontime_rpc *rpc;
	int err;

	if (!dev)
		return -EPROTONOSUPPORT;
	err = sock_attach(sk, dev);
	if (err)
		return err;
	sk->sk_protocol = sk->sk_type == SOCK_STREAM ? IPPROTO_TCP : IPPROTO_UDP;
	sock_own_flags(sk->sk_socket);
	rpc = ontime_sock_rpc(sk, ONTIME_OP_SOCKET);
	err = PTR_ERR_OR_ZERO(rpc);
	if (!err) {
		rpc->out.call.arg[0] = cpu_to_le32(sk->sk_family);
		rpc->out.call.arg[1] = cpu_to_le32(sk->sk_type);
		rpc->out.call.arg[2] = cpu_to_le32(sk->sk_protocol);
		os->chan = ontime_chan_wanted(dev->generation);
		rpc->out.call.arg[3] = cpu_to_le32(os->chan);
		err = ontime_sock_call(sk, rpc);
		ontime_rpc_put(rpc);
	}
	if (err) {
		/*
		 * A killed caller does not know whether there is a host socket. Closing a missing
		 * one does no harm.
		 */
		sock_detach(sk, err == -EINTR ? REST_SOCKET : REST_NOTHING);
		return err;
	}
	ontime_opt_defaults(sk);
	return 0;
}

/* Called by sk_common_release(). */
void ontime_sock_destroy(struct sock *sk)
{
	struct ontime_sock *os = ontime_sk(sk);
	unsigned int i;

	if (!os->dev)
		return;
	/* As in TCP, unread bytes cause a reset. */
	if (ontime_ahead_end(os))
		os->abort = true;
	ontime_more_settle(sk, !os->abort);
	for (i = 0; i < ARRAY_SIZE(os->spare); i++)
		if (os->spare[i])
			ontime_rpc_put(os->spare[i]);
	sock_detach(sk, REST_SOCKET);
}

/*
 * SO_LINGER with a time: sent data is to reach the peer before close() returns. The host socket
 * does not linger, because then a thread of the device process would wait. Instead the guest polls
 * the host's send queue.
 */
static void sock_linger(struct sock *sk)
{
	long left = sk->sk_lingertime, nap = 1;

	if (ontime_simple(sk, ONTIME_OP_SHUTDOWN, SHUT_WR, 0) < 0)
		return;
	while (left > 0 && !signal_pending(current) && ontime_simple(sk, ONTIME_OP_QUERY, ONTIME_QUERY_OUTQ, 0) > 0) {
		nap = min(nap, left);
		left -= nap - schedule_timeout_interruptible(nap);
		nap = min_t(long, nap * 2, max(HZ / 20, 1));
	}
}

int ontime_release(struct socket *sock)
{
	struct sock *sk = sock->sk;

	if (!sk)
		return 0;
	if (sock_flag(sk, SOCK_LINGER) && sk->sk_type == SOCK_STREAM) {
		if (!sk->sk_lingertime)
			ontime_sk(sk)->abort = true;
		else if (!(current->flags & PF_EXITING) && sk->sk_state != TCP_LISTEN)
			sock_linger(sk);
	}
	/* inet_sock_destruct() requires this state. */
	WRITE_ONCE(sk->sk_state, TCP_CLOSE);
	sock->sk = NULL;
	sk_common_release(sk);
	return 0;
}

/* ---- Names ---- */

/* Puts an application's address into a call, with the checks of the kernel's own protocols. */
int ontime_addr_in(struct sock *sk, const void *addr, int length, struct ontime_call *call)
{
	sa_family_t family = ((const struct sockaddr *)addr)->sa_family;
	u16 op = le16_to_cpu(call->op);
	/* An IPv6 datagram socket may also connect and send to IPv4 addresses. */
	bool v4 = sk->sk_family == AF_INET || (family == AF_INET && sk->sk_type == SOCK_DGRAM && op != ONTIME_OP_BIND);
	int whole = v4 ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6);

	if (length < (int)sizeof(family))
		return -EINVAL;
	/* AF_UNSPEC dissolves a connection, or means that a send has no address. */
	if (family == AF_UNSPEC && (op == ONTIME_OP_CONNECT || (op == ONTIME_OP_SEND && !v4))) {
		call->addr_len = cpu_to_le16(op == ONTIME_OP_CONNECT ? sizeof(family) : 0);
		return 0;
	}
	if (length < (v4 ? whole : SIN6_LEN_RFC2133))
		return -EINVAL;
	/*
	 * An IPv4 socket takes AF_UNSPEC as AF_INET: to send, or to bind to the unspecified
	 * address.
	 */
	if (family == AF_UNSPEC && v4 && (op == ONTIME_OP_SEND || !((const struct sockaddr_in *)addr)->sin_addr.s_addr))
		family = AF_INET;
	if (family != (v4 ? AF_INET : AF_INET6))
		return op == ONTIME_OP_SEND && !v4 ? -EINVAL : -EAFNOSUPPORT;
	/* An IPv6 address may come without its scope. */
	memcpy(call->addr, addr, min(length, whole));
	memcpy(call->addr, &family, sizeof(family));
	call->addr_len = cpu_to_le16(whole);
	return 0;
}

/* Copies a call's address into @addr, a struct sockaddr_storage; returns its length. */
int ontime_addr_out(const struct ontime_done *done, void *addr)
{
	int length = min_t(int, le16_to_cpu(done->addr_len), ONTIME_ADDR_MAX);

	memset(addr, 0, sizeof(struct sockaddr_in6));
	memcpy(addr, done->addr, length);
	return length;
}

/* Ports belong to the VM, so the caller's network namespace does not matter. */
static bool port_needs_privilege(const struct sockaddr *addr)
{
	/* sin_port and sin6_port are at the same offset. */
	unsigned short port = ntohs(((const struct sockaddr_in *)addr)->sin_port);

	return port && inet_port_requires_bind_service(&init_net, port) && !capable(CAP_NET_BIND_SERVICE);
}

/* Protects the names that sockets are bound to. Not held while the host binds. */
static DEFINE_MUTEX(ports_lock);

static struct ontime_bound port_name(const struct sock *sk, const void *name)
{
	const struct sockaddr_in6 *v6 = name;
	const struct sockaddr_in *v4 = name;
	struct ontime_bound bound = { .port = v4->sin_port, .only_v6 = READ_ONCE(ontime_sk(sk)->only_v6) };

	if (v6->sin6_family == AF_INET6)
		bound.addr = v6->sin6_addr;
	else
		ipv6_addr_set_v4mapped(v4->sin_addr.s_addr, &bound.addr);
	return bound;
}

/* Whether @one is an unspecified address that includes @two. */
static bool port_covers(const struct ontime_bound *one, const struct ontime_bound *two)
{
	bool v4 = ipv6_addr_v4mapped(&two->addr);

	if (ipv6_addr_any(&one->addr))
		return !(one->only_v6 && v4);
	return v4 && ipv6_addr_v4mapped(&one->addr) && !one->addr.s6_addr32[3];
}

/* As inet_rcv_saddr_equal(). */
static bool port_overlaps(const struct ontime_bound *one, const struct ontime_bound *two)
{
	return one->port && one->port == two->port &&
	       (port_covers(one, two) || port_covers(two, one) || ipv6_addr_equal(&one->addr, &two->addr));
}

/*
 * Whether two users' sockets may have one name by SO_REUSEADDR. Of streams only one may then listen, which the
 * host does not enforce if both share by SO_REUSEPORT.
 */
static bool port_reusable(const struct sock *sk, const struct sock *osk)
{
	if (!sk->sk_reuse || !osk->sk_reuse)
		return false;
	return sk->sk_type == SOCK_DGRAM || (READ_ONCE(osk->sk_state) != TCP_LISTEN &&
					     !READ_ONCE(ontime_sk(sk)->shares) && !READ_ONCE(ontime_sk(osk)->shares));
}

/*
 * Whether another user's socket has this name. With ports_lock; so no name changes, and the RCU read lock keeps
 * sockets that are being closed.
 */
static bool port_of_other_user(struct sock *sk, const struct ontime_bound *bound)
{
	struct ontime_sock *other;
	unsigned long index;
	bool found = false;

	rcu_read_lock();
	xa_for_each(&ontime_sk(sk)->dev->socks, index, other) {
		struct sock *osk = (struct sock *)other;

		found = osk != sk && osk->sk_type == sk->sk_type &&
			(port_overlaps(&other->bound, bound) || port_overlaps(&other->trying, bound)) &&
			!uid_eq(READ_ONCE(osk->sk_uid), READ_ONCE(sk->sk_uid)) && !port_reusable(sk, osk);
		if (found)
			break;
	}
	rcu_read_unlock();
	return found;
}

/*
 * Sockets share a port by SO_REUSEPORT only if they are of one user (inet_csk_bind_conflict(),
 * udp_lib_lport_inuse()). The host sees one user for the whole VM, so this is checked here, without
 * regard to SO_REUSEPORT: other threads may change that until the host binds. The name is recorded
 * before the host binds: so of two users at once, one finds the other.
 */
static int port_take(struct sock *sk, const void *name)
{
	struct ontime_sock *os = ontime_sk(sk);
	struct ontime_bound bound = port_name(sk, name);
	int err = 0;

	mutex_lock(&ports_lock);
	if (os->trying.port)
		/* A thread was killed while the host bound the socket. */
		err = -EINVAL;
	else if (bound.port && port_of_other_user(sk, &bound))
		err = -EADDRINUSE;
	else
		os->trying = bound;
	mutex_unlock(&ports_lock);
	return err;
}

/* The host has answered; if without an error, the answer has the name. */
static void port_taken(struct sock *sk, const struct ontime_rpc *rpc, int err)
{
	struct ontime_sock *os = ontime_sk(sk);

	mutex_lock(&ports_lock);
	if (!err && rpc->in->done.addr_len)
		os->bound = port_name(sk, rpc->in->done.addr);
	else if (!err && os->trying.port)
		os->bound = os->trying;
	os->trying = (struct ontime_bound) {};
	mutex_unlock(&ports_lock);
}

int ontime_bind(struct socket *sock, struct sockaddr_unsized *addr, int length)
{
	struct sock *sk = sock->sk;
	struct ontime_rpc *rpc = ontime_sock_rpc(sk, ONTIME_OP_BIND);
	struct ontime_sock *os = ontime_sk(sk);
	int err;

	if (IS_ERR(rpc))
		return PTR_ERR(rpc);
	err = ontime_addr_in(sk, addr, length, &rpc->out.call) ?: ontime_opt_device(sk);
	if (!err && port_needs_privilege((const struct sockaddr *)rpc->out.call.addr))
		err = -EACCES;
	if (!err)
		err = mutex_lock_killable(&os->call_lock);
	if (!err) {
		err = port_take(sk, rpc->out.call.addr);
		if (!err) {
			err = ontime_sock_call(sk, rpc);
			/* The caller was killed: the host may bind the socket still. */
			if (err != -EINTR)
				port_taken(sk, rpc, err);
		}
		mutex_unlock(&os->call_lock);
	}
	WRITE_ONCE(os->local_len, 0);
	ontime_rpc_put(rpc);
	return err;
}

/*
 * Whether the peer's address is known. An accepted socket keeps it while the connection lasts;
 * accept4() needs it in any case.
 */
static bool sock_peer_known(struct sock *sk, int peer)
{
	struct ontime_sock *os = ontime_sk(sk);

	if (!os->peer_len || !peer)
		return false;
	if (peer == 2)
		return true;
	ontime_sock_reap(sk);
	return !(ontime_sock_ready(os) & (ONTIME_READY_HUP | ONTIME_READY_ERR)) && !READ_ONCE(sk->sk_err) && !READ_ONCE(os->dead);
}

int ontime_getname(struct socket *sock, struct sockaddr *addr, int peer)
{
	struct sock *sk = sock->sk;
	struct ontime_sock *os = ontime_sk(sk);
	struct ontime_rpc *rpc;
	int result;

	if (sock_peer_known(sk, peer)) {
		memcpy(addr, os->peer, os->peer_len);
		return os->peer_len;
	}
	rpc = ontime_sock_rpc(sk, ONTIME_OP_NAME);
	if (IS_ERR(rpc))
		return PTR_ERR(rpc);
	rpc->out.call.arg[0] = cpu_to_le32(peer ? ONTIME_NAME_PEER : ONTIME_NAME_LOCAL);
	result = ontime_sock_call(sk, rpc);
	if (!result)
		result = ontime_addr_out(&rpc->in->done, addr);
	ontime_rpc_put(rpc);
	return result;
}

/* ---- Connections ---- */

/*
 * The kernel chooses the size of the send buffer when a connection is made. getsockopt() reads it from @sk, without
 * asking this module.
 */
static void sock_told(struct sock *sk, const struct ontime_rpc *rpc)
{
	u32 size;

	if (!ontime_told(rpc, SO_SNDBUF, &size))
		return;
	if (!(sk->sk_userlocks & SOCK_SNDBUF_LOCK))
		WRITE_ONCE(sk->sk_sndbuf, (int)size);
	WRITE_ONCE(ontime_sk(sk)->sized, true);
}

static int sock_connect_call(struct sock *sk, struct sockaddr_unsized *addr, int length)
{
	struct ontime_rpc *rpc = ontime_sock_rpc(sk, ONTIME_OP_CONNECT);
	int err;

	if (IS_ERR(rpc))
		return PTR_ERR(rpc);
	if (sk->sk_type == SOCK_STREAM)
		rpc->out.call.control_room = cpu_to_le16(ONTIME_TOLD_SIZE);
	err = ontime_addr_in(sk, addr, length, &rpc->out.call);
	if (!err)
		err = ontime_sock_call(sk, rpc);
	sock_told(sk, rpc);
	ontime_rpc_put(rpc);
	WRITE_ONCE(ontime_sk(sk)->local_len, 0);
	return err;
}

/*
 * The host says that this connection attempt was aborted. The device has taken the reason off the
 * host socket. If the event with the reason has not come yet, the application has not seen it: wait
 * for the event.
 */
static int sock_connect_reason(struct sock *sk)
{
	long patience = HZ;

	if (!READ_ONCE(ontime_sk(sk)->told))
		ontime_sock_wait_ready(sk, 0, &patience);
	return sock_error(sk) ?: -ECONNABORTED;
}

/*
 * MAIN's answers say nothing about the readiness of a channel's socket, and not every change of
 * readiness causes an event on the host. So readiness is queried.
 */
static void sock_refresh(struct sock *sk)
{
	if (READ_ONCE(ontime_sk(sk)->chan))
		ontime_simple(sk, ONTIME_OP_POLL, 0, 0);
}

/*
 * connect(2) reports a failed attempt. As in inet_stream_connect(), the socket is then as if never
 * connected, without an end of stream. The host socket does not know that its error was reported,
 * so it is disconnected here.
 */
static void sock_forget(struct sock *sk)
{
	static const struct sockaddr nobody = { .sa_family = AF_UNSPEC };

	sock_connect_call(sk, (struct sockaddr_unsized *)&nobody, sizeof(nobody));
	sock_refresh(sk);
}

/* Ends a connection or a listener; SO_ACCEPTCONN follows. */
static int sock_dissolve_call(struct sock *sk, struct sockaddr_unsized *addr, int length)
{
	struct ontime_sock *os = ontime_sk(sk);
	int err;

	if (mutex_lock_killable(&os->call_lock))
		return -EINTR;
	/* For receives that wait: recv_dissolved(). */
	WRITE_ONCE(sk->sk_disconnects, sk->sk_disconnects + 1);
	err = sock_connect_call(sk, addr, length);
	if (!err)
		WRITE_ONCE(sk->sk_state, TCP_CLOSE);
	mutex_unlock(&os->call_lock);
	return err;
}

/*
 * A connection was dissolved. If it was cut short, the kernel leaves ECONNRESET; the device takes
 * that error off the host socket and reports it by an event. The event has to arrive before a new
 * attempt clears errors, or the error would be taken for the new connection's. Without an error the
 * socket reports a hangup.
 */
static void sock_dissolved(struct sock *sk)
{
	long patience = HZ;

	ontime_sk(sk)->peer_len = 0;
	/* As in __udp_disconnect(). */
	if (sk->sk_type == SOCK_DGRAM) {
		WRITE_ONCE(sk->sk_bound_dev_if, 0);
		WRITE_ONCE(ontime_sk(sk)->device, 0);
	}
	sock_refresh(sk);
	if (sk->sk_type == SOCK_STREAM)
		ontime_sock_wait_ready(sk, ONTIME_READY_HUP, &patience);
}

/*
 * An attempt failed. Returns its error, or -ECONNABORTED if another thread takes the error first.
 * sock->state changes before the host socket does: see sock_connect_ask().
 */
static int sock_connect_failed(struct socket *sock)
{
	int err;

	WRITE_ONCE(sock->state, SS_UNCONNECTED);
	err = sock_error(sock->sk) ?: -ECONNABORTED;
	sock_forget(sock->sk);
	return err;
}

/*
 * Asks the host how an attempt ended. If another thread ended the attempt, or got its error, the
 * host socket is unconnected, and CONNECT would begin a second attempt without a request. Then this
 * thread's attempt counts as aborted. inet_stream_connect() returns the same, except that newer
 * kernels return EPIPE if another connect() dissolved the socket.
 */
static int sock_connect_ask(struct socket *sock, struct sockaddr_unsized *addr, int length)
{
	int err;

	if (READ_ONCE(sock->state) == SS_UNCONNECTED)
		return -ECONNABORTED;
	err = sock_connect_call(sock->sk, addr, length);
	if (err == -ECONNABORTED)
		return sock_connect_reason(sock->sk);
	/* Another thread got the success first. */
	return err == -EISCONN ? 0 : err;
}

/*
 * Waits for the outcome of an attempt in progress: for the event, or by asking the host if the
 * attempt may have ended. @going: the error if it is still in progress.
 */
static int sock_connect_wait(struct socket *sock, struct sockaddr_unsized *addr, int length, long *timeout, int going)
{
	const u32 ended = ONTIME_READY_OUT | ONTIME_READY_HUP;
	struct sock *sk = sock->sk;
	int err;

	if (ontime_sock_ready(ontime_sk(sk)) & ended && !READ_ONCE(sk->sk_err)) {
		err = sock_connect_ask(sock, addr, length);
		if (err != -EINPROGRESS && err != -EALREADY)
			return err;
	}
	err = ontime_sock_wait_ready(sk, ONTIME_READY_OUT, timeout);
	if (err)
		return err == -EAGAIN ? going : sock_intr_errno(*timeout);
	if (READ_ONCE(sk->sk_err))
		return sock_connect_failed(sock);
	if ((ontime_sock_ready(ontime_sk(sk)) & ended) == ONTIME_READY_OUT)
		return 0;
	/* The connection has already ended, or another thread got the error. */
	return sock_connect_ask(sock, addr, length);
}

/* A stream with a filter does not begin to receive segments: only the host has them. */
static bool sock_cannot_filter(const struct sock *sk)
{
	return sk->sk_type == SOCK_STREAM && rcu_access_pointer(sk->sk_filter);
}

/*
 * The host socket knows whether it is unconnected, connecting or connected, and answers like
 * connect(2) on a non-blocking socket; waiting is done here. The host's errors come as events, so
 * the host does not know which error the application has seen. If SO_ERROR has read the error of a
 * failed attempt, the host answers ECONNABORTED, as Linux does.
 */
int ontime_connect(struct socket *sock, struct sockaddr_unsized *addr, int length, int flags)
{
	struct sock *sk = sock->sk;
	struct ontime_sock *os = ontime_sk(sk);
	long timeout = sock_sndtimeo(sk, flags & O_NONBLOCK);
	bool dissolve = length >= (int)sizeof(sa_family_t) && ((struct sockaddr *)addr)->sa_family == AF_UNSPEC;
	int err, earlier = 0;

	if (length < (int)sizeof(sa_family_t))
		return -EINVAL;
	/* Whatever the address is. */
	if (sk->sk_type == SOCK_STREAM && !dissolve &&
	    (sock->state == SS_CONNECTED || READ_ONCE(sk->sk_state) == TCP_LISTEN))
		return -EISCONN;
	if (!dissolve && sock_cannot_filter(sk))
		return -EOPNOTSUPP;
	if (sock->state == SS_CONNECTING && READ_ONCE(sk->sk_err) && !dissolve)
		return sock_connect_failed(sock);
	/* A new attempt clears the end of the connection before, as in tcp_connect_init(). */
	if (sock->state == SS_UNCONNECTED && !dissolve && sk->sk_type == SOCK_STREAM) {
		earlier = sock_error(sk);
		WRITE_ONCE(os->told, false);
		WRITE_ONCE(os->sized, false);
	}
	err = dissolve ? sock_dissolve_call(sk, addr, length) :
			 ontime_opt_device(sk) ?: sock_connect_call(sk, addr, length);
	if (err == -ECONNABORTED)
		err = sock_connect_reason(sk);
	/* One that did not begin, such as to an address of another family, leaves it as it was. */
	if (earlier && err && err != -EINPROGRESS && err != -EALREADY) {
		ontime_sock_keep_error(sk, -earlier);
		WRITE_ONCE(os->told, true);
	}
	/* What was reported before says nothing about this attempt. */
	if (!dissolve && sk->sk_type == SOCK_STREAM)
		sock_refresh(sk);
	if (err == -EINPROGRESS || err == -EALREADY) {
		sock->state = SS_CONNECTING;
		if (!timeout)
			return err;
		err = sock_connect_wait(sock, addr, length, &timeout, err);
		if (err == -EINPROGRESS || err == -EALREADY || err == -EINTR || err == -ERESTARTSYS)
			return err;
	}
	if (!err && dissolve)
		sock_dissolved(sk);
	else if (!err && sk->sk_type == SOCK_STREAM && !READ_ONCE(os->sized))
		ontime_opt_connected(sk);
	if (!err)
		sock->state = dissolve ? SS_UNCONNECTED : SS_CONNECTED;
	else if (sock->state == SS_CONNECTING)
		sock->state = SS_UNCONNECTED;
	return err;
}

int ontime_listen(struct socket *sock, int backlog)
{
	struct sock *sk = sock->sk;
	struct ontime_sock *os = ontime_sk(sk);
	struct ontime_rpc *rpc;
	int err;

	if (sock_cannot_filter(sk))
		return -EOPNOTSUPP;
	rpc = ontime_sock_rpc(sk, ONTIME_OP_LISTEN);
	if (IS_ERR(rpc))
		return PTR_ERR(rpc);
	rpc->out.call.arg[0] = cpu_to_le32(backlog);
	err = ontime_opt_device(sk) ?: mutex_lock_killable(&os->call_lock);
	if (!err) {
		err = ontime_sock_call(sk, rpc);
		if (!err) {
			/* A socket that was not bound is bound now. */
			port_taken(sk, rpc, 0);
			/* SO_ACCEPTCONN */
			WRITE_ONCE(sk->sk_state, TCP_LISTEN);
		}
		mutex_unlock(&os->call_lock);
		sock_refresh(sk);
	}
	ontime_rpc_put(rpc);
	return err;
}

/*
 * Like inet_shutdown(): ends listening and connecting. For datagrams it also has an effect without
 * a peer.
 */
int ontime_shutdown(struct socket *sock, int how)
{
	struct sock *sk = sock->sk;
	bool stream = sk->sk_type == SOCK_STREAM;
	struct ontime_sock *os = ontime_sk(sk);
	int err;

	if (how < SHUT_RD || how > SHUT_RDWR)
		return -EINVAL;
	/*
	 * The host socket knows how a connection attempt ended. Threads that wait for the attempt
	 * wake up during this call: see sock_connect_ask().
	 */
	if (sock->state == SS_CONNECTING)
		WRITE_ONCE(sock->state, SS_UNCONNECTED);
	if (stream && mutex_lock_killable(&os->call_lock))
		return -EINTR;
	/* Before the report of the end that the call itself makes: sock_arrivals(). */
	if (stream && how != SHUT_WR)
		WRITE_ONCE(os->shut_read, true);
	if (stream && how != SHUT_RD)
		WRITE_ONCE(os->shut_write, true);
	err = ontime_simple(sk, ONTIME_OP_SHUTDOWN, how, 0);
	if (!stream && (!err || err == -ENOTCONN)) {
		/* The lock excludes another shutdown(); receivers read sk_shutdown without it. */
		lock_sock(sk);
		WRITE_ONCE(sk->sk_shutdown, sk->sk_shutdown | (how + 1));
		release_sock(sk);
	} else if (stream && !err && sk->sk_state == TCP_LISTEN && how != SHUT_WR) {
		WRITE_ONCE(sk->sk_state, TCP_CLOSE);
		sock->state = SS_UNCONNECTED;
	}
	if (stream)
		mutex_unlock(&os->call_lock);
	return err;
}

static int sock_accept_call(struct sock *sk, struct ontime_sock *child, long *timeout, enum sock_rest *rest)
{
	struct ontime_rpc *rpc = ontime_sock_rpc(sk, ONTIME_OP_ACCEPT);
	int err;

	if (IS_ERR(rpc))
		return PTR_ERR(rpc);
	rpc->out.call.arg[0] = cpu_to_le32(child->id);
	rpc->out.call.control_room = cpu_to_le16(ONTIME_TOLD_SIZE);
	WRITE_ONCE(child->chan, rpc->chan->number);
	err = ontime_sock_run(sk, rpc, timeout, ONTIME_READY_IN);
	if (!err) {
		u32 told = le32_to_cpu(rpc->in->done.msg_flags);

		child->peer_len = ontime_addr_out(&rpc->in->done, child->peer);
		sock_told((struct sock *)child, rpc);
		/* The connection was reset while it waited to be accepted. */
		if (told & ONTIME_MSG_ERROR)
			ontime_sock_keep_error((struct sock *)child,
					       (told & ONTIME_MSG_ERRNO_MASK) >> ONTIME_MSG_ERRNO_SHIFT);
	} else if (ontime_rpc_abandon(rpc, child->id))
		*rest = REST_CALL;
	else if (rpc->answered && !rpc->result)
		/* The answer came after the caller had given up. */
		*rest = REST_SOCKET;
	ontime_rpc_put(rpc);
	return err;
}

int ontime_accept(struct socket *sock, struct socket *newsock, struct proto_accept_arg *arg)
{
	struct sock *sk = sock->sk, *child;
	long timeout = sock_rcvtimeo(sk, arg->flags & O_NONBLOCK);
	struct ontime_dev *dev = ontime_sk(sk)->dev;
	enum sock_rest rest = REST_NOTHING;
	int err;

	ontime_sock_place(sk);
	child = ontime_sk_child(sk);
	if (!child)
		return -ENOBUFS;
	kref_get(&dev->ref);
	err = sock_attach(child, dev);
	if (err)
		goto err_child;
	do {
		err = sock_accept_call(sk, ontime_sk(child), &timeout, &rest);
	} while (err == -ONTIME_AGAIN);
	if (err) {
		sock_detach(child, rest);
		if (err == -ERESTARTSYS)
			err = sock_intr_errno(timeout);
		goto err_child;
	}
	/* For io_uring. */
	arg->is_empty = !(ontime_sock_ready(ontime_sk(sk)) & ONTIME_READY_IN);
	lock_sock(child);
	sock_graft(child, newsock);
	release_sock(child);
	newsock->state = SS_CONNECTED;
	sock_own_flags(newsock);
	return 0;

err_child:
	sk_common_release(child);
	return err;
}
