// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Receiving ahead: a receive for the next small message of a real-time socket waits in the device
 * before the application asks for it. The message then arrives with its data. So neither readiness
 * nor the receive costs a call: both are in the guest when the receiver runs.
 *
 * Such a receive is posted after a few small messages, without a doorbell: the next call's
 * doorbell, such as that of the answer to the message, covers it. Each socket has at most one. They
 * take places of calls that wait; if none is left, the oldest receive that no caller waits for is
 * called off, if its socket is less busy. Data that was received ahead counts as unread: it is
 * readable, can be peeked at and is counted by FIONREAD; closing a stream with such data resets it.
 *
 * For datagrams the receive has room for the largest one. It is posted while most receives find a
 * datagram at once; a receive that waits in the device costs no call on its message's way anyway.
 * And it is posted only while one thread receives: otherwise the datagram could lie here while its
 * receiver is busy and another thread waits in the device.
 */
#include <linux/rcupdate.h>

#include "ontime.h"

/* So often a receive that does not wait asks again because another thread was faster. */
#define AHEAD_TRIES 4

enum ahead_state {
	AHEAD_NONE,
	AHEAD_POSTED,	/* the device has it, or gets it with the next doorbell */
	AHEAD_HOLDS,	/* completed with data, the end of the stream, or an error */
	AHEAD_VOID,	/* completed with nothing: the host has to be asked */
};

/*
 * Only ontime_ahead_done() leaves AHEAD_POSTED; only the holder of ahead_lock leaves the other
 * states.
 */
static u32 ahead_state(struct ontime_sock *os)
{
	return smp_load_acquire(&os->ahead_state);
}

bool ontime_ahead_holds(struct ontime_sock *os)
{
	return ahead_state(os) == AHEAD_HOLDS;
}

/* Whether waiting for it has no use any more. */
bool ontime_ahead_ended(struct ontime_sock *os)
{
	return ahead_state(os) >= AHEAD_HOLDS;
}

/* Unread bytes. The value may be outdated if other threads receive. */
u32 ontime_ahead_unread(struct ontime_sock *os)
{
	u32 bytes = 0;

	mutex_lock(&os->ahead_lock);
	if (ontime_ahead_holds(os) && os->ahead->result > 0)
		bytes = os->ahead->result - os->ahead_at;
	mutex_unlock(&os->ahead_lock);
	return bytes;
}

/*
 * The device has completed the receive. Called by any thread that takes used buffers; the call is
 * referenced.
 */
void ontime_ahead_done(struct ontime_rpc *rpc)
{
	u32 id = le32_to_cpu(rpc->out.call.sock);
	struct ontime_sock *os;
	s32 result = rpc->result;
	bool holds = result >= 0 || (result != -ECANCELED && result != -EBUSY && result != -EXDEV && result != -EIO);

	rcu_read_lock();
	os = xa_load(&rpc->dev->socks, id & (ONTIME_SOCKETS_MAX - 1));
	/* While the call is referenced, its address is not reused. */
	if (os && os->id == id && READ_ONCE(os->ahead) == rpc) {
		/* A datagram socket reports an error to the next call of any kind. */
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

	/* Before the state: sock_is_ready() looks at that first. */
	WRITE_ONCE(os->ahead_gone, os->ahead_gone + 1);
	smp_store_release(&os->ahead_state, AHEAD_NONE);
	WRITE_ONCE(os->ahead, NULL);
	ontime_sock_rpc_put((struct sock *)os, rpc);
}

/*
 * The socket is released. Returns whether unread bytes are lost. A receive that is still in the
 * device ends with the host's socket.
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

/* The caller waits no more for the receive ahead. */
static void ahead_unwanted(struct ontime_sock *os)
{
	mutex_lock(&os->ahead_lock);
	if (os->ahead)
		ontime_rpc_wanted(os->ahead, false);
	mutex_unlock(&os->ahead_lock);
}

/* Rings the doorbell for a posted receive, before a caller waits for it. */
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

/*
 * Whether to receive a stream's next message ahead. The last one had @received bytes, with room for
 * @room.
 */
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

/* The same for the next datagram. */
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

/*
 * Room for one message. A stream's further bytes stay on the host; a datagram would be truncated.
 */
static bool ahead_room(struct sock *sk, struct ontime_rpc *rpc)
{
	size_t most = sk->sk_type == SOCK_STREAM ? ONTIME_SMALL : ontime_datagram_max(rpc);

	if (!ontime_rpc_grow(rpc, most))
		return false;
	rpc->in_small = most;
	return true;
}

/* Calls off a posted receive, which then completes with nothing. */
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

/*
 * After a receive of @received bytes, with room for @room: posts the next one ahead if that is
 * worth it.
 */
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
	/*
	 * A receiver that came meanwhile sees the posted receive, or is seen here. It would have to
	 * wait behind it.
	 */
	smp_mb();
	if (sk->sk_type == SOCK_DGRAM && atomic_read(&os->receivers) > 1)
		ahead_call_off(os);
}

/* Whether there is no receive ahead. One that completed with nothing is freed. */
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

/*
 * Stops receiving ahead on this socket, for options that a receive ahead would not obey. Data that
 * has come stays.
 */
void ontime_ahead_never(struct sock *sk)
{
	struct ontime_sock *os = ontime_sk(sk);

	WRITE_ONCE(os->ahead_off, true);
	ahead_call_off(os);
}

/*
 * Keeps bytes that were received and not taken, as if they had been received ahead, so that the
 * next receive finds them. They belong to a filter, which sees them first; or to a stream, if the
 * application's memory could be read but not written (recv_room() in io.c). In the latter case they
 * are lost if another thread's receive ahead has the place.
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

/* recvmsg(2) of a datagram that has come ahead. With ahead_lock. */
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
	/* For a socket with a filter. */
	if (result >= 0)
		ontime_recv_control(rpc, msg);
	if (whole > ONTIME_SMALL)
		WRITE_ONCE(os->streak, 0);
	if (!(flags & MSG_PEEK))
		ahead_drop(os);
	return result;
}

/*
 * recvmsg(2) of stream data that has come ahead. With ahead_lock. -ONTIME_AGAIN: the host has to be
 * asked.
 */
static int ahead_take(struct ontime_sock *os, struct msghdr *msg, int flags)
{
	struct ontime_rpc *rpc = os->ahead;
	int result = rpc->result;
	size_t length;

	if (result <= 0) {
		ahead_drop(os);
		/* The host reports the end of the stream again. */
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
 * For a receive that does not wait, on a socket that the device reported as readable: either the
 * posted receive gets the data, or another receive took them. The device handles calls in order. So
 * after a POLL the posted receive is completed, or the socket is empty, or an arrival is about to
 * complete the receive. If another thread takes that and posts the next one, this one asks again; a
 * thread that is overtaken several times finds nothing.
 */
static void ahead_settle(struct sock *sk)
{
	struct ontime_sock *os = ontime_sk(sk);
	long patience = max(HZ / 10, 1);
	bool posted, answered;
	int tries;
	u32 gone;

	for (tries = 0; tries < AHEAD_TRIES; tries++) {
		mutex_lock(&os->ahead_lock);
		posted = ahead_state(os) == AHEAD_POSTED;
		gone = os->ahead_gone;
		mutex_unlock(&os->ahead_lock);
		if (!posted)
			return;
		ontime_ahead_flush(os);
		WRITE_ONCE(os->polled, true);
		if (ontime_simple(sk, ONTIME_OP_POLL, 0, 0))
			return;
		/* Another CPU may have taken both from the queue, and be about to report them. */
		mutex_lock(&os->ahead_lock);
		answered = os->ahead && ontime_rpc_done(os->ahead);
		mutex_unlock(&os->ahead_lock);
		if (!answered && !(ontime_sock_ready(os) & ONTIME_READY_IN))
			return;
		ontime_sock_wait_ahead(sk, gone, &patience);
		if (READ_ONCE(os->ahead_gone) == gone)
			return;
	}
}

/*
 * A receive on a socket with a receive ahead: waits for that up to *timeout (jiffies).
 * -ONTIME_AGAIN: there is none, the host has to be asked. Another thread may take what this one
 * waits for, and post the next one without a doorbell, or none: then this one looks again.
 */
int ontime_ahead_recv(struct sock *sk, struct msghdr *msg, int flags, long *timeout)
{
	struct ontime_sock *os = ontime_sk(sk);
	bool stream = sk->sk_type == SOCK_STREAM, waits, tells;
	int result, err;
	u32 gone;

	while (READ_ONCE(os->ahead) && !READ_ONCE(os->dead)) {
		/* One that has come is taken at once, without a look at the queues. */
		if (!ontime_ahead_ended(os))
			ontime_sock_reap(sk);
		/* The device may have reported readiness before it knew of the posted receive. */
		if (!*timeout && ontime_sock_ready(os) & (ONTIME_READY_IN | ONTIME_READY_HUP | ONTIME_READY_RDHUP))
			ahead_settle(sk);
		mutex_lock(&os->ahead_lock);
		gone = os->ahead_gone;
		result = os->ahead ? -EAGAIN : -ONTIME_AGAIN;
		if (ontime_ahead_holds(os)) {
			result = stream ? ahead_take(os, msg, flags) : ahead_take_datagram(os, msg, flags);
		} else if (ahead_state(os) == AHEAD_VOID) {
			ahead_drop(os);
			result = -ONTIME_AGAIN;
		}
		waits = result == -EAGAIN && *timeout;
		/* The host's answer may have been -EAGAIN: then there is none, and the wait ends at once. */
		if (waits && os->ahead)
			ontime_rpc_wanted(os->ahead, true);
		mutex_unlock(&os->ahead_lock);
		/*
		 * A stream reports its error after its data. An error that another thread took is
		 * not the end of the stream.
		 */
		tells = stream ? waits : result == -EAGAIN || result == -ONTIME_AGAIN;
		err = tells ? sock_error(sk) : 0;
		if (!err && waits) {
			WRITE_ONCE(os->waited, true);
			/* What it waits for may have been posted since the loop began. */
			ontime_ahead_flush(os);
			err = ontime_sock_wait_ahead(sk, gone, timeout);
			if (!err)
				continue;
		}
		if (err && waits)
			ahead_unwanted(os);
		return err ? err : result;
	}
	return -ONTIME_AGAIN;
}
