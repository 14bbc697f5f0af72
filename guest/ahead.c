// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Receiving ahead: a receive for the next small message of a real-time socket waits in the device before the
 * application asks for it. The message comes with its data, so that neither readiness nor the receive costs a call:
 * they are in the guest when the receiver runs.
 *
 * The receive is posted after a few small ones, without a doorbell: the call that answers the message brings it along.
 * One a socket, taken out of the places for calls that wait; where none is left, the oldest is called off that nobody
 * waits for, if its socket is less busy. What it brought counts as unread: it is readable, peeked at,
 * counted by FIONREAD; a stream that is closed with it is reset.
 *
 * For datagrams it has room for the largest. It is posted while receives mostly find something there: one that waits
 * costs no call on the way of its message. And only while nobody else receives: what it brought would lie there while
 * who posted it is busy and another waits behind it in the device.
 */
#include <linux/rcupdate.h>

#include "ontime.h"

enum ahead_state {
	AHEAD_NONE,
	AHEAD_POSTED,	/* the device has it, or finds it at the next doorbell */
	AHEAD_HOLDS,	/* it has come back: data, the end of the stream, or an error */
	AHEAD_VOID,	/* it has come back with nothing: the host is to be asked */
};

/* From AHEAD_POSTED only ontime_ahead_done() leads on, from the others only the holder of ahead_lock. */
static u32 ahead_state(struct ontime_sock *os)
{
	return smp_load_acquire(&os->ahead_state);
}

bool ontime_ahead_holds(struct ontime_sock *os)
{
	return ahead_state(os) == AHEAD_HOLDS;
}

/* Nobody need wait for it any more. */
bool ontime_ahead_ended(struct ontime_sock *os)
{
	return ahead_state(os) >= AHEAD_HOLDS;
}

/* Unread bytes; what another thread does meanwhile may not be seen. */
u32 ontime_ahead_unread(struct ontime_sock *os)
{
	u32 bytes = 0;

	mutex_lock(&os->ahead_lock);
	if (ontime_ahead_holds(os) && os->ahead->result > 0)
		bytes = os->ahead->result - os->ahead_at;
	mutex_unlock(&os->ahead_lock);
	return bytes;
}

/* The device is done with it. From whatever looks at the queue; the call is held. */
void ontime_ahead_done(struct ontime_rpc *rpc)
{
	u32 id = le32_to_cpu(rpc->out.call.sock);
	struct ontime_sock *os;
	s32 result = rpc->result;
	bool holds = result >= 0 || (result != -ECANCELED && result != -EBUSY && result != -EXDEV && result != -EIO);

	rcu_read_lock();
	os = xa_load(&rpc->dev->socks, id & (ONTIME_SOCKETS_MAX - 1));
	/* The call's address is not another's while it is held. */
	if (os && os->id == id && READ_ONCE(os->ahead) == rpc) {
		/* A datagram socket's error is for whatever is called next. */
		if (holds && result < 0 && ((struct sock *)os)->sk_type == SOCK_DGRAM) {
			ontime_sock_keep_error((struct sock *)os, -result);
			holds = false;
		}
		smp_store_release(&os->ahead_state, holds ? AHEAD_HOLDS : AHEAD_VOID);
		ontime_sock_arrived((struct sock *)os, rpc, holds);
	}
	rcu_read_unlock();
}

/* With ahead_lock. */
static void ahead_drop(struct ontime_sock *os)
{
	struct ontime_rpc *rpc = os->ahead;

	os->ahead_state = AHEAD_NONE;
	WRITE_ONCE(os->ahead, NULL);
	ontime_sock_rpc_put((struct sock *)os, rpc);
}

/*
 * The socket goes; whether bytes are lost with it that were not read. What is still in the device ends with the host's
 * socket.
 */
bool ontime_ahead_end(struct ontime_sock *os)
{
	bool unread = ontime_ahead_unread(os) > 0;

	mutex_lock(&os->ahead_lock);
	if (os->ahead)
		ahead_drop(os);
	mutex_unlock(&os->ahead_lock);
	return unread;
}

/* Whether a caller waits for it. */
static void ahead_wanted(struct ontime_sock *os, bool wanted)
{
	mutex_lock(&os->ahead_lock);
	if (os->ahead)
		ontime_rpc_wanted(os->ahead, wanted);
	mutex_unlock(&os->ahead_lock);
}

/* Has the device know of what was posted, before somebody waits for it. */
void ontime_ahead_flush(struct ontime_sock *os)
{
	struct ontime_chan *chan;

	if (ahead_state(os) != AHEAD_POSTED)
		return;
	chan = ontime_chan_get(READ_ONCE(os->chan), os->dev->generation);
	if (!chan)
		return;
	if (READ_ONCE(chan->quiet)) {
		ontime_rpc_kick(chan);
		ontime_reap(chan);
	}
	ontime_chan_put(chan);
}

/* Whether a stream's next message is worth it, of which the last had so many bytes of those there was room for. */
static bool ahead_of_stream(struct ontime_sock *os, size_t received, size_t room, bool plain)
{
	if (!plain || received >= min_t(size_t, room, ONTIME_SMALL)) {
		WRITE_ONCE(os->streak, 0);
		return false;
	}
	if (READ_ONCE(os->streak) < ONTIME_STREAK) {
		WRITE_ONCE(os->streak, os->streak + 1);
		return false;
	}
	return true;
}

/* Whether the next datagram is. */
static bool ahead_of_datagrams(struct ontime_sock *os, bool plain)
{
	u32 busy = READ_ONCE(os->busy);

	if (!READ_ONCE(os->waited))
		busy = ONTIME_BUSY;
	else if (busy)
		busy--;
	WRITE_ONCE(os->busy, busy);
	return busy && plain && READ_ONCE(os->streak) >= ONTIME_STREAK && atomic_read(&os->receivers) == 1;
}

/* Room for one: what a stream has more stays where it is, a datagram would be cut. */
static bool ahead_room(struct sock *sk, struct ontime_rpc *rpc)
{
	size_t most = sk->sk_type == SOCK_STREAM ? ONTIME_SMALL : ontime_datagram_max(rpc);

	if (!ontime_rpc_grow(rpc, most))
		return false;
	rpc->in_small = most;
	return true;
}

/* One that waits comes back with nothing. */
static void ahead_call_off(struct ontime_sock *os)
{
	struct ontime_rpc *rpc;

	mutex_lock(&os->ahead_lock);
	rpc = ahead_state(os) == AHEAD_POSTED ? os->ahead : NULL;
	if (rpc)
		refcount_inc(&rpc->refs);
	mutex_unlock(&os->ahead_lock);
	if (!rpc)
		return;
	ontime_rpc_cancel(rpc);
	ontime_rpc_put(rpc);
}

/* A receive gave so many bytes of those it had room for: has the next one wait in the device where that is worth it. */
void ontime_ahead_next(struct sock *sk, size_t received, size_t room, bool plain)
{
	struct ontime_sock *os = ontime_sk(sk);
	struct ontime_rpc *rpc;

	if (!READ_ONCE(os->chan) || READ_ONCE(os->ahead_off))
		return;
	if (sk->sk_type == SOCK_STREAM ? !ahead_of_stream(os, received, room, plain) : !ahead_of_datagrams(os, plain))
		return;
	mutex_lock(&os->ahead_lock);
	if (os->ahead || READ_ONCE(os->ahead_off) || READ_ONCE(os->dead))
		goto out;
	rpc = ontime_sock_rpc(sk, ONTIME_OP_RECV);
	if (IS_ERR(rpc))
		goto out;
	if (!ahead_room(sk, rpc)) {
		ontime_sock_rpc_put(sk, rpc);
		goto out;
	}
	os->ahead_at = 0;
	smp_store_release(&os->ahead_state, AHEAD_POSTED);
	WRITE_ONCE(os->ahead, rpc);
	if (ontime_rpc_post(rpc, &os->ahead_refused))
		ahead_drop(os);
out:
	mutex_unlock(&os->ahead_lock);
	/* A receiver that came meanwhile sees it, or is seen here: it would wait behind it. */
	smp_mb();
	if (sk->sk_type == SOCK_DGRAM && atomic_read(&os->receivers) > 1)
		ahead_call_off(os);
}

/* Whether there is none, not even an empty one that came back. */
bool ontime_ahead_vacant(struct ontime_sock *os)
{
	bool vacant;

	mutex_lock(&os->ahead_lock);
	if (ahead_state(os) == AHEAD_VOID)
		ahead_drop(os);
	vacant = !os->ahead;
	mutex_unlock(&os->ahead_lock);
	return vacant;
}

/* Never again on this socket: for options that a receive ahead would not honour. What has come ahead stays. */
void ontime_ahead_never(struct sock *sk)
{
	struct ontime_sock *os = ontime_sk(sk);

	WRITE_ONCE(os->ahead_off, true);
	ahead_call_off(os);
}

/*
 * Bytes that were received and not taken: as if they had come ahead, so that the next receive finds them. A filter
 * looks at them first; or they are a stream's and could not be written to the application's memory, which could be read
 * (recv_room() in io.c). Then, where another thread's receive ahead has the place, they are lost.
 */
void ontime_ahead_keep(struct sock *sk, struct ontime_rpc *rpc, u32 length)
{
	struct ontime_sock *os = ontime_sk(sk);

	mutex_lock(&os->ahead_lock);
	if (!os->ahead) {
		refcount_inc(&rpc->refs);
		rpc->result = length;
		os->ahead_at = 0;
		WRITE_ONCE(os->ahead, rpc);
		smp_store_release(&os->ahead_state, AHEAD_HOLDS);
	}
	mutex_unlock(&os->ahead_lock);
}

/* With ahead_lock, of one that has come back with a datagram: as recvmsg(2). */
static int ahead_take_datagram(struct ontime_sock *os, struct msghdr *msg, int flags)
{
	struct ontime_rpc *rpc = os->ahead;
	size_t whole = rpc->result, length = min_t(size_t, whole, msg_data_left(msg));
	int result = flags & MSG_TRUNC ? whole : length;

	if (length < whole)
		msg->msg_flags |= MSG_TRUNC;
	if (copy_to_iter(ontime_rpc_in(rpc), length, &msg->msg_iter) != length)
		result = -EFAULT;
	else if (msg->msg_name)
		msg->msg_namelen = ontime_addr_out(&rpc->in->done, msg->msg_name);
	/* Of a socket with a filter. */
	if (result >= 0)
		ontime_recv_control(rpc, msg);
	if (whole > ONTIME_SMALL)
		WRITE_ONCE(os->streak, 0);
	if (!(flags & MSG_PEEK))
		ahead_drop(os);
	return result;
}

/* With ahead_lock, of one that has come back: as recvmsg(2); -ONTIME_AGAIN where the host is to be asked. */
static int ahead_take(struct ontime_sock *os, struct msghdr *msg, int flags)
{
	struct ontime_rpc *rpc = os->ahead;
	int result = rpc->result;
	size_t length;

	if (result <= 0) {
		ahead_drop(os);
		/* The end of the stream the host says again. */
		return result ? result : -ONTIME_AGAIN;
	}
	length = min_t(size_t, result - os->ahead_at, msg_data_left(msg));
	if (flags & MSG_TRUNC)
		iov_iter_advance(&msg->msg_iter, length);
	else if (copy_to_iter(ontime_rpc_in(rpc) + os->ahead_at, length, &msg->msg_iter) != length)
		return -EFAULT;
	if (msg->msg_name)
		msg->msg_namelen = 0;
	if (flags & MSG_PEEK)
		return length;
	os->ahead_at += length;
	if (os->ahead_at == result)
		ahead_drop(os);
	return length;
}

/*
 * A receive that does not wait, and the device has said that there is something: either the one that is posted gets it,
 * or it has been taken. The device takes calls in their order: behind a POLL the one that is posted has come back, or
 * the socket is empty, or an arrival is about to complete it.
 */
static void ahead_settle(struct sock *sk)
{
	struct ontime_sock *os = ontime_sk(sk);
	long patience = max(HZ / 10, 1);
	bool answered;

	if (ahead_state(os) != AHEAD_POSTED)
		return;
	WRITE_ONCE(os->polled, true);
	if (ontime_simple(sk, ONTIME_OP_POLL, 0, 0))
		return;
	/* Another CPU may have taken both out of the queue, and be about to say so. */
	mutex_lock(&os->ahead_lock);
	answered = os->ahead && ontime_rpc_done(os->ahead);
	mutex_unlock(&os->ahead_lock);
	if (answered || ontime_sock_ready(os) & ONTIME_READY_IN)
		ontime_sock_wait_ready(sk, 0, &patience);
}

/*
 * A receive where one is posted or has come back: waits for it up to *timeout (jiffies). -ONTIME_AGAIN: there
 * is none, the host is to be asked.
 */
int ontime_ahead_recv(struct sock *sk, struct msghdr *msg, int flags, long *timeout)
{
	struct ontime_sock *os = ontime_sk(sk);
	bool stream = sk->sk_type == SOCK_STREAM, tells;
	int result, err;

	while (READ_ONCE(os->ahead) && !READ_ONCE(os->dead)) {
		ontime_sock_reap(sk);
		/* Readiness that was reported beside it: the device did not know of it then. */
		if (*timeout || ontime_sock_ready(os) & (ONTIME_READY_IN | ONTIME_READY_HUP | ONTIME_READY_RDHUP)) {
			ontime_ahead_flush(os);
			if (!*timeout)
				ahead_settle(sk);
		}
		mutex_lock(&os->ahead_lock);
		result = os->ahead ? -EAGAIN : -ONTIME_AGAIN;
		if (ontime_ahead_holds(os)) {
			result = stream ? ahead_take(os, msg, flags) : ahead_take_datagram(os, msg, flags);
		} else if (ahead_state(os) == AHEAD_VOID) {
			ahead_drop(os);
			result = -ONTIME_AGAIN;
		}
		mutex_unlock(&os->ahead_lock);
		/* Of a stream after its data. An error that another thread took is not the stream's end. */
		tells = stream ? result == -EAGAIN && *timeout : result == -EAGAIN || result == -ONTIME_AGAIN;
		err = tells ? sock_error(sk) : 0;
		if (err)
			return err;
		if (result != -EAGAIN || !*timeout)
			return result;
		WRITE_ONCE(os->waited, true);
		ahead_wanted(os, true);
		result = ontime_sock_wait_ready(sk, 0, timeout);
		if (result) {
			ahead_wanted(os, false);
			return result;
		}
	}
	return -ONTIME_AGAIN;
}
