// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Readiness of sockets: the last report of the device, and the threads that it wakes.
 *
 * Reports come as events and with every completed call, in no order among each other; sequence
 * numbers show which is newer. Each report is the whole state.
 */
#include <linux/poll.h>
#include <linux/sched/signal.h>

#include "ontime.h"

/* The bits of an error, or of the end of a connection or of one direction. */
static u32 sock_ends(u32 fresh)
{
	return fresh & (ONTIME_READY_ERR | ONTIME_READY_HUP | ONTIME_READY_RDHUP);
}

/*
 * SIGIO, with the reasons that Linux gives: sock_def_error_report(), tcp_fin(), sock_def_readable(). The FIN that ends
 * a connection is told by both of the latter.
 */
static void sock_signal(struct socket_wq *wq, u32 news, u32 ends)
{
	if (ends & ONTIME_READY_ERR) {
		sock_wake_async(wq, SOCK_WAKE_IO, POLL_ERR);
		return;
	}
	if (ends & ONTIME_READY_HUP)
		sock_wake_async(wq, SOCK_WAKE_WAITD, POLL_HUP);
	if (ends || news & ONTIME_READY_IN)
		sock_wake_async(wq, SOCK_WAKE_WAITD, POLL_IN);
}

/*
 * Wakes those who wait for these bits: those that are new, or may stand for another arrival. A bit that was reported
 * before and is no news would wake edge-triggered and exclusive pollers for nothing. The key says what is there, and
 * io_uring takes it for the answer of a poll. When a connection ends and for an error (@ends) there is none, as in
 * sock_def_wakeup(): who waits looks again.
 */
static void sock_wake(struct sock *sk, u32 news, u32 ends)
{
	__poll_t mask = 0;
	struct socket_wq *wq;

	if (news & ONTIME_READY_IN)
		mask |= EPOLLIN | EPOLLRDNORM;
	if (news & ONTIME_READY_OUT)
		mask |= EPOLLOUT | EPOLLWRNORM | EPOLLWRBAND;
	if (news & ONTIME_READY_PRI)
		mask |= EPOLLPRI | EPOLLRDBAND;
	if (news & ONTIME_READY_ERR)
		mask |= EPOLLERR;

	rcu_read_lock();
	wq = rcu_dereference(sk->sk_wq);
	if (skwq_has_sleeper(wq) && ends)
		wake_up_interruptible_all(&wq->wait);
	else if (skwq_has_sleeper(wq))
		wake_up_interruptible_poll(&wq->wait, mask);
	if (sock_flag(sk, SOCK_FASYNC) && wq)
		sock_signal(wq, news, ends);
	rcu_read_unlock();
}

/* Room to send. A stream that is not connected, or not any more, has HUP as well. */
static bool has_room(u32 ready)
{
	return (ready & (ONTIME_READY_OUT | ONTIME_READY_HUP)) == ONTIME_READY_OUT;
}

/*
 * SIGIO for room to send that was not there before: the connection stands, or a send would have had
 * to wait.
 */
static void sock_room(struct sock *sk)
{
	struct socket_wq *wq;

	rcu_read_lock();
	wq = rcu_dereference(sk->sk_wq);
	if (sock_flag(sk, SOCK_FASYNC) && wq)
		sock_wake_async(wq, SOCK_WAKE_IO, POLL_OUT);
	rcu_read_unlock();
}

/*
 * Sends SIGURG to the process of F_SETOWN. The socket's file exists while the lock is held and the
 * socket is not orphaned.
 */
void ontime_sock_urgent_work(struct work_struct *work)
{
	struct sock *sk = (struct sock *)container_of(work, struct ontime_sock, urgent);

	read_lock_bh(&sk->sk_callback_lock);
	if (sk->sk_socket)
		sk_send_sigurg(sk);
	read_unlock_bh(&sk->sk_callback_lock);
	sock_put(sk);
}

/* New urgent data: SIGURG is sent by a worker, which may take the lock. Under the RCU read lock. */
static void sock_urgent(struct sock *sk)
{
	if (refcount_inc_not_zero(&sk->sk_refcnt) && !ontime_queue_work(&ontime_sk(sk)->urgent))
		sock_put(sk);
}

/*
 * Applies a report if it is newer than the known one, or the first. @fresh: the bits that are new, without END, for
 * which no thread waits.
 */
static bool sock_report(struct ontime_sock *os, u32 seq, u32 ready, u32 *fresh)
{
	s64 old = atomic64_read(&os->ready);
	bool room;
	u32 known;

	if (!seq)
		return false;
	do {
		known = (u64)old >> 32;
		if (known && (s32)(seq - known) <= 0)
			return false;
		*fresh = ready & ~(u32)old & ~ONTIME_READY_END;
		room = has_room(ready) && !has_room(old);
		if (room)
			*fresh |= ONTIME_READY_OUT;
	} while (!atomic64_try_cmpxchg(&os->ready, &old, (s64)((u64)seq << 32 | ready)));
	/* The first report is no change. */
	if (unlikely(room) && known)
		sock_room((struct sock *)os);
	if (unlikely(*fresh & ONTIME_READY_PRI))
		sock_urgent((struct sock *)os);
	return true;
}

/*
 * Bits of a report that may stand for another arrival although they were known before: data, urgent data, an entry of
 * the error queue. No data follows the end of a stream, and poll() goes on saying IN; this side's own shutdown() does
 * not keep data from coming.
 */
static u32 sock_arrivals(struct ontime_sock *os, u32 ready, u32 fresh)
{
	bool ended = ready & ~fresh & ONTIME_READY_RDHUP && !READ_ONCE(os->shut_read);

	if (ended && ((struct sock *)os)->sk_type == SOCK_STREAM)
		return ready & ONTIME_READY_ERR;
	return ready & (ONTIME_READY_IN | ONTIME_READY_PRI | ONTIME_READY_ERR);
}

/* Handles an event, in any context, under the RCU read lock. */
void ontime_sock_event(struct ontime_chan *chan, const struct ontime_event *event)
{
	struct ontime_dev *dev = ontime_dev_rcu(chan->generation);
	u32 id = le32_to_cpu(event->sock), ready = le32_to_cpu(event->ready), fresh, news = 0;
	struct ontime_sock *os = dev ? xa_load(&dev->socks, id & (ONTIME_SOCKETS_MAX - 1)) : NULL;
	u16 error = le16_to_cpu(event->error);
	struct sock *sk = (struct sock *)os;

	if (!os || os->id != id)
		return;
	/* Set before readiness: a thread that sees the end of a connection also sees the reason. */
	if (error && error < MAX_ERRNO) {
		WRITE_ONCE(os->error_seq, le32_to_cpu(event->seq));
		/*
		 * A thread that sees the error also sees its sequence number: recv_error() in io.c.
		 */
		smp_wmb();
		WRITE_ONCE(sk->sk_err, error);
		WRITE_ONCE(os->told, true);
	}
	/* A report without anything new, such as after another thread's receive, must not wake edge-triggered pollers. */
	if (sock_report(os, le32_to_cpu(event->seq), ready, &fresh))
		news = fresh | sock_arrivals(os, ready, fresh);
	else
		fresh = 0;
	if (news || error)
		sock_wake(sk, news, sock_ends(fresh) | (error ? ONTIME_READY_ERR : 0));
}

/*
 * A receive ahead has completed; @holds: with something. Under the RCU read lock, in any context.
 */
void ontime_sock_arrived(struct sock *sk, struct ontime_rpc *rpc, bool holds)
{
	u32 fresh;

	if (!rpc->answered ||
	    !sock_report(ontime_sk(sk), le32_to_cpu(rpc->in->done.seq), le32_to_cpu(rpc->in->done.ready), &fresh))
		fresh = 0;
	/* The receiver that waits for it is woken in any case. */
	sock_wake(sk, fresh | (holds ? ONTIME_READY_IN : ontime_sock_ready(ontime_sk(sk))),
		  sock_ends(fresh) | (!holds && READ_ONCE(sk->sk_err) ? ONTIME_READY_ERR : 0));
}

/* An answer told the error that the call left on the host's socket. */
void ontime_sock_failed(struct sock *sk, int error)
{
	ontime_sock_keep_error(sk, error);
	sock_wake(sk, 0, ONTIME_READY_ERR);
}

/* The device is gone. Under the RCU read lock. */
void ontime_sock_die(struct ontime_sock *os)
{
	struct sock *sk = (struct sock *)os;

	WRITE_ONCE(sk->sk_err, ECONNRESET);
	WRITE_ONCE(os->dead, true);
	sock_wake(sk, ONTIME_READY_IN | ONTIME_READY_OUT, ONTIME_READY_ERR);
}

/* Takes used buffers that are there already, without waiting for an interrupt. */
void ontime_sock_reap(struct sock *sk)
{
	struct ontime_sock *os = ontime_sk(sk);
	struct ontime_chan *chan = ontime_chan_get(READ_ONCE(os->chan), os->dev->generation);

	if (!chan)
		return;
	ontime_reap(chan);
	ontime_chan_put(chan);
}

/*
 * Whether the host must be asked for the socket's readiness: nothing was reported yet, or a receive
 * left the report out because readiness had never been asked for (io.c). Such a receive sees
 * @polled, or is seen here.
 */
static bool sock_must_ask(struct ontime_sock *os)
{
	if (!READ_ONCE(os->polled)) {
		WRITE_ONCE(os->polled, true);
		smp_mb();
		if (READ_ONCE(os->blind))
			return true;
	}
	return !(atomic64_read(&os->ready) >> 32);
}

__poll_t ontime_poll(struct file *file, struct socket *sock, struct poll_table_struct *wait)
{
	struct sock *sk = sock->sk;
	struct ontime_sock *os = ontime_sk(sk);
	__poll_t mask = 0;
	u32 ready;

	sock_poll_wait(file, sock, wait);
	/*
	 * Events that have arrived count even if the interrupt did not come. Before the first
	 * report the host is asked.
	 */
	ontime_sock_reap(sk);
	if (sock_must_ask(os) && !READ_ONCE(os->dead))
		ontime_simple(sk, ONTIME_OP_POLL, 0, 0);
	ready = ontime_sock_ready(os);
	if (unlikely(ontime_filtered(sk)) && !READ_ONCE(os->dead))
		ready = ontime_filter_ready(sk, ready);
	if (ontime_ahead_holds(os))
		ready |= ONTIME_READY_IN;
	else if (!(ready & ONTIME_READY_IN))
		ontime_ahead_flush(os);
	if (READ_ONCE(os->dead))
		ready |= ONTIME_READY_IN | ONTIME_READY_OUT | ONTIME_READY_HUP;
	else if (READ_ONCE(sk->sk_state) == TCP_LISTEN)
		/* A pending error from before listen() is left to SO_ERROR. */
		return ready & ONTIME_READY_IN ? EPOLLIN | EPOLLRDNORM : 0;
	if (ready & ONTIME_READY_IN)
		mask |= EPOLLIN | EPOLLRDNORM;
	if (ready & ONTIME_READY_OUT)
		mask |= EPOLLOUT | EPOLLWRNORM | (sk->sk_type == SOCK_DGRAM ? EPOLLWRBAND : 0);
	if (ready & ONTIME_READY_PRI)
		mask |= EPOLLPRI;
	if (ready & ONTIME_READY_RDHUP)
		mask |= EPOLLRDHUP | EPOLLIN | EPOLLRDNORM;
	if (ready & ONTIME_READY_HUP)
		mask |= EPOLLHUP;
	/* The queue here has notifications of MSG_ZEROCOPY sends. */
	if (ready & ONTIME_READY_ERR || READ_ONCE(sk->sk_err) || !skb_queue_empty_lockless(&sk->sk_error_queue))
		mask |= EPOLLERR | (sk->sk_type == SOCK_DGRAM && sock_flag(sk, SOCK_SELECT_ERR_QUEUE) ? EPOLLPRI : 0);
	return mask;
}

static bool sock_is_ready(struct sock *sk, u32 mask, u32 gone)
{
	struct ontime_sock *os = ontime_sk(sk);

	if (mask && ontime_sock_ready(os) & (mask | ONTIME_READY_HUP))
		return true;
	/* It has come; or another thread has taken it since. */
	if (!(mask & ONTIME_READY_OUT) && (ontime_ahead_ended(os) || READ_ONCE(os->ahead_gone) != gone))
		return true;
	return READ_ONCE(sk->sk_err) || READ_ONCE(os->dead);
}

static int sock_wait(struct sock *sk, u32 mask, u32 gone, long *timeout)
{
	DEFINE_WAIT_FUNC(wait, woken_wake_function);
	int err = 0;

	add_wait_queue(sk_sleep(sk), &wait);
	for (;;) {
		ontime_sock_reap(sk);
		if (sock_is_ready(sk, mask, gone))
			break;
		err = -EAGAIN;
		if (!*timeout)
			break;
		err = -ERESTARTSYS;
		if (signal_pending(current))
			break;
		err = 0;
		*timeout = wait_woken(&wait, TASK_INTERRUPTIBLE, *timeout);
		/* The context that woke this thread has looked at the queues: most often nothing is left to do. */
		if (sock_is_ready(sk, mask, gone))
			break;
	}
	remove_wait_queue(sk_sleep(sk), &wait);
	return err;
}

/*
 * Waits until one of @mask is reported, or an error or a receive ahead has come (@mask 0: only
 * these). Returns 0, -EAGAIN after *timeout (jiffies), or -ERESTARTSYS.
 */
int ontime_sock_wait_ready(struct sock *sk, u32 mask, long *timeout)
{
	return sock_wait(sk, mask, READ_ONCE(ontime_sk(sk)->ahead_gone), timeout);
}

/*
 * The same until the receive ahead has come that was there when @gone was read with ahead_lock, or
 * an error, or until that receive is not there any more.
 */
int ontime_sock_wait_ahead(struct sock *sk, u32 gone, long *timeout)
{
	return sock_wait(sk, 0, gone, timeout);
}

/* Applies the readiness that a completed call reports. */
void ontime_sock_done(struct sock *sk, struct ontime_rpc *rpc)
{
	u32 seq, ready, fresh;

	if (!rpc->answered)
		return;
	seq = le32_to_cpu(rpc->in->done.seq);
	ready = le32_to_cpu(rpc->in->done.ready);
	if (sock_report(ontime_sk(sk), seq, ready, &fresh)) {
		if (fresh)
			sock_wake(sk, fresh, sock_ends(fresh));
	} else if (seq && !(ready & ONTIME_READY_OUT) && has_room(ontime_sock_ready(ontime_sk(sk)))) {
		/*
		 * The call found no room, and the event about room was applied before its answer:
		 * nothing was fresh in it, but it is news to the caller.
		 */
		sock_wake(sk, ONTIME_READY_OUT, 0);
		sock_room(sk);
	}
}
