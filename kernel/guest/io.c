// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Sending and receiving. Small messages travel in the call. Larger ones are copied once, between
 * the host's socket and the application's pages, one chunk for each call. A blocking call waits in
 * the device: its completion is the result.
 *
 * Before a message has come, only the size of the caller's buffer is known. It is often large even
 * if messages are small, and pinning all its pages is most of the work of such a call. So a
 * datagram socket on a channel whose messages are small receives all messages in the call, which
 * has room for the largest. A large message is then copied once more, and the ones after it go to
 * the application's pages again.
 *
 * A device that has gone silent may still write to pages that it was given, so these are pinned.
 * Memory that cannot be pinned (a splice, buffers registered with io_uring, memory of a device) is
 * copied through memory of the call.
 */
#include <linux/capability.h>
#include <linux/delay.h>
#include <linux/errqueue.h>
#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/socket.h>
#include <linux/uio.h>
#include <linux/vmalloc.h>
#include <net/tcp.h>

#include "ontime.h"

#define SEND_FLAGS (MSG_OOB | MSG_DONTROUTE | MSG_MORE | MSG_EOR | MSG_CONFIRM | MSG_PROBE)
#define RECV_FLAGS (MSG_OOB | MSG_PEEK | MSG_TRUNC | MSG_WAITALL | MSG_ERRQUEUE)
/* Calls with these flags never wait, not on the host either. */
#define RECV_AT_ONCE (MSG_OOB | MSG_ERRQUEUE)

static bool io_gathered(struct sock *sk, struct ontime_rpc *rpc, struct iov_iter *iter)
{
	if (!iov_iter_extract_will_pin(iter))
		return true;
	/* A datagram in too many pieces for one call. */
	return sk->sk_type == SOCK_DGRAM && iov_iter_npages(iter, rpc->chan->pages_max + 1) > rpc->chan->pages_max;
}

/* Room for the longest datagram. */
size_t ontime_datagram_max(struct ontime_rpc *rpc)
{
	return min_t(size_t, rpc->chan->bytes_max, U16_MAX + 1);
}

/* For a stream, a size that can be allocated while memory is fragmented. */
static size_t io_gather_max(struct sock *sk, struct ontime_rpc *rpc)
{
	if (sk->sk_type == SOCK_DGRAM)
		return ontime_datagram_max(rpc);
	return min_t(size_t, rpc->chan->bytes_max, PAGE_SIZE << PAGE_ALLOC_COSTLY_ORDER);
}

/* Memory of the call. While memory is fragmented, a large piece consists of single pages. */
static int io_gather(struct ontime_rpc *rpc, size_t length)
{
	unsigned int pieces = 1, i;
	struct scatterlist *sg;

	/* Pinning may have failed before. */
	kfree(rpc->pages.sgl);
	rpc->pages = (struct sg_table) {};
	rpc->pinned = false;
	rpc->gathered = kvmalloc(length, GFP_KERNEL);
	if (is_vmalloc_addr(rpc->gathered))
		pieces = DIV_ROUND_UP(length, PAGE_SIZE);
	/* The device may take fewer pieces in one call. */
	if (!rpc->gathered || pieces > rpc->chan->pages_max)
		return -ENOBUFS;
	rpc->pages.sgl = kmalloc_array(pieces, sizeof(struct scatterlist), GFP_KERNEL);
	if (!rpc->pages.sgl)
		return -ENOBUFS;
	sg_init_table(rpc->pages.sgl, pieces);
	rpc->pages.nents = pieces;
	if (!is_vmalloc_addr(rpc->gathered)) {
		sg_set_buf(rpc->pages.sgl, rpc->gathered, length);
		return 0;
	}
	for_each_sg(rpc->pages.sgl, sg, pieces, i) {
		size_t at = i * PAGE_SIZE;

		sg_set_page(sg, vmalloc_to_page(rpc->gathered + at), min_t(size_t, length - at, PAGE_SIZE), 0);
	}
	return 0;
}

/*
 * An error after bytes were moved: this call returns the bytes. The next one returns the error if
 * it was the socket's own (the connection's end, or what ICMP told), which the host has forgotten.
 */
static void io_keep_error(struct sock *sk, int err)
{
	switch (err) {
	case -ECONNRESET:
	case -ECONNREFUSED:
	case -ECONNABORTED:
	case -ETIMEDOUT:
	case -EHOSTUNREACH:
	case -ENETUNREACH:
	case -EHOSTDOWN:
	case -ENONET:
	case -ENOPROTOOPT:
	case -EPROTO:
		ontime_sock_keep_error(sk, -err);
	}
}

/* ---- Sending ---- */

/*
 * Whether Linux ignores a control message to send: sock_cmsg_send(), udp_cmsg_send(),
 * ip_cmsg_send(), ip6_datagram_send_ctl().
 */
static bool send_ignores(const struct sock *sk, const struct cmsghdr *cmsg)
{
	switch (cmsg->cmsg_level) {
	case SOL_SOCKET:
		return cmsg->cmsg_type == SCM_RIGHTS || cmsg->cmsg_type == SCM_CREDENTIALS;
	case SOL_IP:
	case SOL_UDP:
		return sk->sk_type == SOCK_STREAM;
	case SOL_IPV6:
		return sk->sk_type == SOCK_STREAM || sk->sk_family != AF_INET6;
	default:
		return true;
	}
}

/* The mark of one send is not passed on, as that of the socket: no outsourced packet has one. */
static int send_mark(const struct cmsghdr *cmsg)
{
	if (!capable(CAP_NET_RAW) && !capable(CAP_NET_ADMIN))
		return -EPERM;
	return cmsg->cmsg_len == CMSG_LEN(sizeof(u32)) ? 0 : -EINVAL;
}

/* Puts the control messages that Linux would not ignore into the call. */
static int send_control(struct sock *sk, struct ontime_rpc *rpc, struct msghdr *msg)
{
	struct cmsghdr *cmsg;
	size_t length = 0;
	int err;

	for_each_cmsghdr(cmsg, msg) {
		size_t left = msg->msg_controllen - ((u8 *)cmsg - (u8 *)msg->msg_control), size;

		if (!CMSG_OK(msg, cmsg))
			return -EINVAL;
		if (send_ignores(sk, cmsg))
			continue;
		if (cmsg->cmsg_level == SOL_SOCKET && cmsg->cmsg_type == SO_MARK) {
			err = send_mark(cmsg);
			if (err)
				return err;
			continue;
		}
		/* The last one need not be padded. */
		size = min_t(size_t, CMSG_ALIGN(cmsg->cmsg_len), left);
		if (size > ONTIME_CONTROL_MAX - length)
			return -ENOBUFS;
		memcpy(rpc->out.body + length, cmsg, size);
		length += size;
	}
	rpc->out.call.control_len = cpu_to_le16(length);
	return 0;
}

static int send_head(struct sock *sk, struct ontime_rpc *rpc, struct msghdr *msg)
{
	struct ontime_call *call = &rpc->out.call;
	int err;

	call->arg[0] = cpu_to_le32(msg->msg_flags & SEND_FLAGS);
	if (sk->sk_type == SOCK_DGRAM)
		call->control_room = cpu_to_le16(ONTIME_TOLD_SIZE);
	/* udp_sendmsg() looks at these before it looks at the address. */
	if (sk->sk_type == SOCK_DGRAM && sk->sk_family == AF_INET) {
		if (msg_data_left(msg) > U16_MAX)
			return -EMSGSIZE;
		if (msg->msg_flags & MSG_OOB)
			return -EOPNOTSUPP;
	}
	if (msg->msg_controllen) {
		err = send_control(sk, rpc, msg);
		if (err)
			return err;
	}
	/* A stream's peer is fixed, so the address is ignored, as in TCP. */
	if (!msg->msg_name || sk->sk_type == SOCK_STREAM)
		return 0;
	return ontime_addr_in(sk, msg->msg_name, msg->msg_namelen, call);
}

/* Copies up to @chunk bytes into memory of the call. */
static int send_gathered(struct sock *sk, struct ontime_rpc *rpc, struct iov_iter *iter, size_t *chunk)
{
	int err;

	*chunk = min(*chunk, io_gather_max(sk, rpc));
	err = io_gather(rpc, *chunk);
	if (!err && !copy_from_iter_full(rpc->gathered, *chunk, iter))
		err = -EFAULT;
	return err;
}

static int send_data(struct sock *sk, struct ontime_rpc *rpc, struct msghdr *msg, size_t *chunk)
{
	struct iov_iter *iter = &msg->msg_iter;
	bool fits;
	int got;

	*chunk = msg_data_left(msg);
	if (*chunk <= ONTIME_SMALL) {
		rpc->out_small = *chunk;
		return copy_from_iter_full(ontime_rpc_out(rpc), *chunk, iter) ? 0 : -EFAULT;
	}
	fits = sk->sk_type == SOCK_STREAM || *chunk <= io_gather_max(sk, rpc);
	if (io_gathered(sk, rpc, iter))
		return fits ? send_gathered(sk, rpc, iter, chunk) : -EMSGSIZE;
	got = ontime_rpc_pages(rpc, iter, *chunk);
	if (unlikely(got == -EFAULT) && fits) {
		/* Memory that cannot be pinned, or bad memory; the first part of it may have been pinned. */
		iov_iter_revert(iter, *chunk - iov_iter_count(iter));
		return send_gathered(sk, rpc, iter, chunk);
	}
	if (got < 0)
		return got;
	if (sk->sk_type == SOCK_DGRAM && got < *chunk)
		return -EMSGSIZE;
	*chunk = got;
	return 0;
}

/* The error of a send from bad memory: as in Linux, one of the socket's state comes first. */
static int send_fault(struct sock *sk, const struct msghdr *msg, size_t length)
{
	int err;

	if (sk->sk_type == SOCK_STREAM) {
		/* Without data. */
		err = ontime_simple(sk, ONTIME_OP_SEND, 0, 0);
		return err < 0 && err != -EAGAIN ? err : -EFAULT;
	}
	if (!msg->msg_name && ontime_simple(sk, ONTIME_OP_NAME, ONTIME_NAME_PEER, 0) == -ENOTCONN)
		return -EDESTADDRREQ;
	if (length > U16_MAX)
		return -EMSGSIZE;
	return READ_ONCE(sk->sk_shutdown) & SEND_SHUTDOWN ? -EPIPE : -EFAULT;
}

/*
 * A datagram to a port of this host that no socket has is refused before its send returns, as in Linux: SO_ERROR and
 * poll() say so from then on.
 */
static void send_refused(struct sock *sk, const struct ontime_rpc *rpc)
{
	u32 error;

	if (unlikely(ontime_told(rpc, SO_ERROR, &error)) && error && error < MAX_ERRNO)
		ontime_sock_failed(sk, error);
}

/* Sends what fits into one call; returns the bytes sent. */
static int send_chunk(struct sock *sk, struct msghdr *msg, long *timeout)
{
	struct ontime_rpc *rpc = ontime_sock_rpc(sk, ONTIME_OP_SEND);
	size_t before = msg_data_left(msg);
	size_t chunk = 0;
	int result;

	if (IS_ERR(rpc))
		return PTR_ERR(rpc);
	result = send_head(sk, rpc, msg);
	if (!result)
		result = send_data(sk, rpc, msg, &chunk);
	if (unlikely(result == -EFAULT))
		result = send_fault(sk, msg, before);
	if (!result)
		result = ontime_sock_run(sk, rpc, timeout, ONTIME_READY_OUT);
	if (sk->sk_type == SOCK_DGRAM && result >= 0)
		send_refused(sk, rpc);
	/* What was not sent is for the next call. */
	iov_iter_revert(&msg->msg_iter, before - msg_data_left(msg) - clamp_t(int, result, 0, chunk));
	ontime_sock_rpc_put(sk, rpc);
	return result;
}

/*
 * MSG_ZEROCOPY: adds the kernel's own notification of a send to the socket's error queue. It says
 * that the data were copied, so that the application may reuse its memory as soon as the send
 * returns. io_uring has its own notifications.
 */
static int send_notice(struct sock *sk, struct msghdr *msg, struct ubuf_info **notice)
{
	if (likely(!(msg->msg_flags & MSG_ZEROCOPY)) || !sock_flag(sk, SOCK_ZEROCOPY) || msg->msg_ubuf)
		return 0;
	/* For an empty datagram there is a notification as well. */
	if (sk->sk_type == SOCK_STREAM && !msg_data_left(msg))
		return 0;
#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 16, 0)
	*notice = msg_zerocopy_realloc(sk, msg_data_left(msg), NULL);
#else
	*notice = msg_zerocopy_realloc(sk, msg_data_left(msg), NULL, false);
#endif
	if (!*notice)
		return -ENOBUFS;
	uarg_to_msgzc(*notice)->zerocopy = 0;
	return 0;
}

/*
 * MSG_FASTOPEN: connects first. Linux does the same if it has no cookie of the peer, and this
 * kernel never has one: the host socket connects.
 */
static int send_fastopen(struct socket *sock, struct msghdr *msg)
{
	const struct sockaddr *addr = msg->msg_name;

	if (!(READ_ONCE(sock_net(sock->sk)->ipv4.sysctl_tcp_fastopen) & TFO_CLIENT_ENABLE) ||
	    (addr && msg->msg_namelen >= (int)sizeof(sa_family_t) && addr->sa_family == AF_UNSPEC))
		return -EOPNOTSUPP;
	if (!addr)
		return sock->state == SS_CONNECTED ? -EISCONN : -EINVAL;
	return ontime_connect(sock, msg->msg_name, msg->msg_namelen, msg->msg_flags & MSG_DONTWAIT ? O_NONBLOCK : 0);
}

/*
 * Whether a send is posted: part of a stream's segment, of which MSG_MORE announces more, if it would
 * not wait and nothing is known that it could fail by. The answer says no more than that it was
 * sent, so the caller does not wait for it, and the call needs no doorbell of its own. A sender that
 * must not wait, or only for a time, is told at once if there is no room. Linux holds back less than
 * a segment, too.
 */
static bool send_may_post(struct socket *sock, struct msghdr *msg, long timeout)
{
	struct ontime_sock *os = ontime_sk(sock->sk);
	const u32 ends = ONTIME_READY_HUP | ONTIME_READY_ERR;

	return (msg->msg_flags & ~(MSG_NOSIGNAL | MSG_CMSG_COMPAT)) == MSG_MORE && timeout == MAX_SCHEDULE_TIMEOUT &&
	       sock->sk->sk_type == SOCK_STREAM && sock->state == SS_CONNECTED && !msg->msg_controllen &&
	       msg_data_left(msg) && msg_data_left(msg) <= ONTIME_MORE_BYTES &&
	       READ_ONCE(os->more_bytes) + msg_data_left(msg) <= ONTIME_MORE_BYTES && !READ_ONCE(os->shut_write) &&
	       !READ_ONCE(os->dead) && (ontime_sock_ready(os) & (ONTIME_READY_OUT | ends)) == ONTIME_READY_OUT;
}

/* Posts a send; returns the bytes sent, or 0: it has to be sent as others are. */
static int send_post(struct sock *sk, struct msghdr *msg)
{
	struct ontime_sock *os = ontime_sk(sk);
	struct ontime_rpc *rpc;
	size_t chunk = 0;
	int err = -EBUSY;

	/* The count is visible before the check: sock_move(). */
	if (atomic_inc_return(&os->more) > ONTIME_MORE || (READ_ONCE(os->wanted) && !READ_ONCE(os->chan)))
		goto out;
	rpc = ontime_sock_rpc(sk, ONTIME_OP_SEND);
	err = PTR_ERR_OR_ZERO(rpc);
	if (err)
		goto out;
	err = send_head(sk, rpc, msg) ?: send_data(sk, rpc, msg, &chunk);
	if (!err) {
		err = ontime_rpc_post_send(rpc);
		if (err)
			iov_iter_revert(&msg->msg_iter, chunk);
		else
			WRITE_ONCE(os->more_bytes, os->more_bytes + chunk);
	}
	ontime_rpc_put(rpc);
out:
	if (err)
		atomic_dec(&os->more);
	return err ? 0 : chunk;
}

/* The device has answered a posted send; the caller's reference keeps the call. In any context. */
void ontime_more_done(struct ontime_rpc *rpc)
{
	u32 id = le32_to_cpu(rpc->out.call.sock);
	struct ontime_sock *os;

	rcu_read_lock();
	os = xa_load(&rpc->dev->socks, id & (ONTIME_SOCKETS_MAX - 1));
	if (os && os->id == id) {
		/* Its error is that of the next call. */
		if (rpc->result < 0)
			io_keep_error((struct sock *)os, rpc->result);
		ontime_sock_done((struct sock *)os, rpc);
		atomic_dec(&os->more);
	}
	rcu_read_unlock();
}

/*
 * How long to wait for posted sends, jiffies: for a moment before a call that goes another way, and in
 * a process that was killed; before the socket's end (@end), which ends calls that wait in the device,
 * as long as a peer that takes nothing keeps a closed connection. A process that ends has its sockets
 * closed one after the other and cannot be killed meanwhile: shorter.
 */
static unsigned long settle_limit(bool end)
{
	bool exits = current->flags & PF_EXITING;

	if (!end || fatal_signal_pending(current) || (exits && current->exit_code & 0x7f))
		return max(HZ / 50, 2);
	return exits ? HZ : 60 * HZ;
}

/* Waits until the device has sent what was posted (settle_limit()). False: something is left. */
bool ontime_more_settle(struct sock *sk, bool end)
{
	unsigned long since = jiffies;
	struct ontime_sock *os = ontime_sk(sk);
	struct ontime_chan *chan;

	if (likely(!atomic_read(&os->more)))
		return true;
	chan = ontime_chan_get(READ_ONCE(os->chan), os->dev->generation);
	if (!chan)
		return true;
	for (;;) {
		ontime_rpc_kick(chan);
		ontime_reap(chan);
		if (!atomic_read(&os->more) || READ_ONCE(os->dead) || !READ_ONCE(chan->up) ||
		    jiffies - since > settle_limit(end))
			break;
		usleep_range(50, 200);
	}
	ontime_chan_put(chan);
	return !atomic_read(&os->more);
}

int ontime_sendmsg(struct socket *sock, struct msghdr *msg, size_t length)
{
	struct sock *sk = sock->sk;
	bool stream = sk->sk_type == SOCK_STREAM;
	long timeout = sock_sndtimeo(sk, msg->msg_flags & MSG_DONTWAIT);
	struct ubuf_info *notice = NULL;
	size_t sent = 0;
	int result;

	if (unlikely(msg->msg_flags & MSG_FASTOPEN) && stream) {
		result = send_fastopen(sock, msg);
		if (result)
			return result;
	}
	result = sock_error(sk) ?: ontime_opt_device(sk);
	if (!result)
		result = send_notice(sk, msg, &notice);
	if (result)
		goto out;
	if (unlikely(msg->msg_flags & MSG_MORE) && send_may_post(sock, msg, timeout))
		sent = send_post(sk, msg);
	if (sent)
		goto out;
	WRITE_ONCE(ontime_sk(sk)->more_bytes, 0);
	do {
		result = send_chunk(sk, msg, &timeout);
		if (result == -ONTIME_AGAIN)
			continue;
		if (result < 0)
			break;
		sent += result;
		/* Control messages of a stream belong to its first byte. */
		msg->msg_controllen = 0;
	} while (result == -ONTIME_AGAIN || (stream && msg_data_left(msg) && (result || timeout)));
out:
	if (unlikely(notice)) {
		if (sent || result >= 0)
			net_zcopy_put(notice);
		else
			msg_zerocopy_put_abort(notice, true);
	}
	if (sent)
		io_keep_error(sk, result);
	if (sent || result >= 0)
		return sent;
	if (result == -ERESTARTSYS)
		return sock_intr_errno(timeout);
	if (result == -EPIPE && stream && !(msg->msg_flags & MSG_NOSIGNAL))
		send_sig(SIGPIPE, current, 0);
	return result;
}

/*
 * sendfile(2) came to the end of its file. It has sent the last part with MSG_MORE, because it was
 * asked for more than there is. As in inet_splice_eof(), what is held back is sent now, unless the
 * application holds it back by an option.
 */
void ontime_splice_eof(struct socket *sock)
{
	if (!READ_ONCE(ontime_sk(sock->sk)->corked))
		ontime_opt_uncork(sock->sk);
}

/* ---- Receiving ---- */

/* A socket on a channel has received a message of this size. */
static void recv_seen(struct sock *sk, size_t received)
{
	struct ontime_sock *os = ontime_sk(sk);
	u32 streak = READ_ONCE(os->streak);

	if (received > ONTIME_SMALL)
		WRITE_ONCE(os->streak, 0);
	else if (streak < ONTIME_STREAK)
		WRITE_ONCE(os->streak, streak + 1);
}

/* If the next datagram is likely to be small, has the call itself take it, whatever its size. */
static bool recv_small(struct sock *sk, struct ontime_rpc *rpc, size_t *chunk)
{
	struct ontime_sock *os = ontime_sk(sk);
	size_t most = min(*chunk, io_gather_max(sk, rpc));

	if (sk->sk_type != SOCK_DGRAM || !rpc->chan->number || READ_ONCE(os->streak) < ONTIME_STREAK)
		return false;
	if (!ontime_rpc_grow(rpc, most)) {
		WRITE_ONCE(os->streak, 0);
		return false;
	}
	*chunk = most;
	return true;
}

/* Whether a stream loses no data if the application's memory cannot be written. */
static bool recv_keeps(const struct sock *sk, int flags)
{
	return sk->sk_type == SOCK_STREAM && !(flags & RECV_AT_ONCE) && READ_ONCE(sk->sk_peek_off) < 0;
}

/*
 * As in Linux, bad addresses are detected when there is data to copy, however little. The data
 * comes in the call; a stream is only peeked at. Of a datagram the call takes all that may be copied.
 */
static int recv_bad_room(struct sock *sk, struct ontime_rpc *rpc, size_t *chunk, int *flags)
{
	size_t most = sk->sk_type == SOCK_DGRAM ? min(*chunk, io_gather_max(sk, rpc)) : ONTIME_SMALL;

	*flags &= ~MSG_WAITALL;
	*chunk = most;
	if (!ontime_rpc_grow(rpc, most)) {
		/* Less room would cut a datagram off. */
		rpc->dirty = true;
		return io_gather(rpc, most);
	}
	if (recv_keeps(sk, *flags))
		*flags |= MSG_PEEK;
	rpc->in_small = most;
	return 0;
}

/*
 * Memory that cannot be pinned. What a stream brings is received in the call, up to memory that cannot be written:
 * where that begins nothing may be to copy.
 */
static int recv_unpinned(struct sock *sk, struct ontime_rpc *rpc, struct iov_iter *iter, size_t *chunk, int *flags)
{
	size_t most = min(*chunk, io_gather_max(sk, rpc));

	/* The first part of it may have been pinned. */
	iov_iter_revert(iter, *chunk - iov_iter_count(iter));
	if (sk->sk_type == SOCK_STREAM)
		most -= fault_in_iov_iter_writeable(iter, most);
	if (sk->sk_type == SOCK_DGRAM || !most)
		return recv_bad_room(sk, rpc, chunk, flags);
	/* While memory is fragmented, less in one call; the call itself has room for a small message. */
	while (!ontime_rpc_grow(rpc, most))
		most /= 2;
	*chunk = most;
	rpc->in_small = most;
	return 0;
}

/*
 * Room for the data: in the call, or the application's pages. Bytes of a stream that are to be
 * dropped (MSG_TRUNC) do not use the application's pages, which need not even exist.
 */
static int recv_room(struct sock *sk, struct ontime_rpc *rpc, struct msghdr *msg, size_t *chunk, bool discard, int *flags)
{
	struct iov_iter *iter = &msg->msg_iter;
	int got;

	*chunk = msg_data_left(msg);
	if (*chunk && *chunk <= ONTIME_SMALL && !discard && recv_keeps(sk, *flags)) {
		/* Up to a page that cannot be accessed. */
		*chunk -= fault_in_iov_iter_readable(iter, *chunk);
		if (!*chunk)
			return recv_bad_room(sk, rpc, chunk, flags);
	}
	if (*chunk <= ONTIME_SMALL || recv_small(sk, rpc, chunk)) {
		rpc->in_small = *chunk;
		return 0;
	}
	if (discard || io_gathered(sk, rpc, iter)) {
		*chunk = min(*chunk, io_gather_max(sk, rpc));
		rpc->dirty = true;
		return io_gather(rpc, *chunk);
	}
	got = ontime_rpc_pages(rpc, iter, *chunk);
	if (unlikely(got == -EFAULT))
		return recv_unpinned(sk, rpc, iter, chunk, flags);
	if (got < 0)
		return got;
	*chunk = got;
	return 0;
}

/* Copies a completed call's data to their destination, and moves the iterator behind them. */
static int recv_data(struct ontime_rpc *rpc, struct msghdr *msg, size_t chunk, size_t length, bool discard)
{
	const void *from = rpc->gathered ? rpc->gathered : ontime_rpc_in(rpc);

	if (discard) {
		iov_iter_advance(&msg->msg_iter, length);
		return 0;
	}
	if (!rpc->gathered && rpc->pages.nents) {
		iov_iter_revert(&msg->msg_iter, chunk - length);
		return 0;
	}
	return copy_to_iter(from, length, &msg->msg_iter) == length ? 0 : -EFAULT;
}

void ontime_recv_control(struct ontime_rpc *rpc, struct msghdr *msg)
{
	size_t length = min_t(size_t, le16_to_cpu(rpc->in->done.control_len), le16_to_cpu(rpc->out.call.control_room));
	size_t at = 0;

	while (at + sizeof(struct ontime_control) <= length) {
		struct ontime_control *control = (struct ontime_control *)(rpc->in->body + at);
		u64 size = le64_to_cpu(control->len);

		if (size < sizeof(*control) || size > length - at)
			break;
		put_cmsg(msg, le32_to_cpu(control->level), le32_to_cpu(control->type), size - sizeof(*control), control + 1);
		at += ALIGN(size, 8);
	}
}

/* Where the next control message goes. */
struct recv_place {
	void *control;
	size_t left;
};

static struct recv_place recv_place(const struct msghdr *msg)
{
	return (struct recv_place) { .control = msg->msg_control, .left = msg->msg_controllen };
}

static void recv_go_to(struct msghdr *msg, struct recv_place place)
{
	msg->msg_control = place.control;
	msg->msg_controllen = place.left;
}

/*
 * A receive that waits need not report what is left in the socket, if no thread polls the socket:
 * that saves a system call on the host before the answer. A thread that begins to poll sees @blind
 * (ready.c), or is seen here.
 */
static void recv_blind(struct sock *sk, struct ontime_rpc *rpc)
{
	struct ontime_sock *os = ontime_sk(sk);

	if (sk->sk_type != SOCK_DGRAM || !rpc->chan->hints || READ_ONCE(os->polled) || sock_flag(sk, SOCK_FASYNC))
		return;
	WRITE_ONCE(os->blind, true);
	smp_mb();
	if (!READ_ONCE(os->polled))
		rpc->out.call.flags |= cpu_to_le16(ONTIME_CALL_BLIND);
}

/*
 * An error that was read from the error queue is no longer the socket's error, as in
 * sock_dequeue_err_skb(). @error was pending on the host at that time, or is 0. An error that an
 * event reported since is newer, and stays.
 */
static void recv_error(struct sock *sk, struct ontime_rpc *rpc, int error)
{
	int was = READ_ONCE(sk->sk_err);
	u32 seq;

	/* Pairs with ontime_sock_event(). */
	smp_rmb();
	seq = READ_ONCE(ontime_sk(sk)->error_seq);
	if (!seq || (s32)(seq - le32_to_cpu(rpc->in->done.seq)) <= 0)
		cmpxchg(&sk->sk_err, was, error);
}

/* Receives what fits into one call; returns the bytes received, as recvmsg(2) counts them. */
static int recv_chunk(struct sock *sk, struct msghdr *msg, int flags, long *timeout)
{
	struct ontime_rpc *rpc = ontime_sock_rpc(sk, ONTIME_OP_RECV);
	bool discard = sk->sk_type == SOCK_STREAM && (flags & (MSG_TRUNC | MSG_ERRQUEUE)) == MSG_TRUNC;
	bool peek = flags & MSG_PEEK, bad;
	size_t chunk = 0;
	int result, err;

	if (IS_ERR(rpc))
		return PTR_ERR(rpc);
	/* If the application has no room for control messages, it sees MSG_CTRUNC. */
	if ((msg->msg_control && msg->msg_controllen) || READ_ONCE(ontime_sk(sk)->controls) || flags & MSG_ERRQUEUE)
		rpc->out.call.control_room = cpu_to_le16(ONTIME_CONTROL_MAX);
	if (*timeout)
		recv_blind(sk, rpc);
	result = recv_room(sk, rpc, msg, &chunk, discard, &flags);
	bad = !peek && flags & MSG_PEEK;
	rpc->out.call.arg[0] = cpu_to_le32(flags & RECV_FLAGS);
	if (!result)
		result = ontime_sock_run(sk, rpc, timeout, ONTIME_READY_IN | ONTIME_READY_RDHUP);
	if (bad)
		err = result > 0 ? -EFAULT : 0;
	else
		err = recv_data(rpc, msg, chunk, clamp_t(int, result, 0, chunk), discard);
	if (err && result > 0 && sk->sk_type == SOCK_STREAM && !(flags & (RECV_AT_ONCE | MSG_PEEK)))
		ontime_ahead_keep(sk, rpc, result);
	if (result >= 0) {
		u32 told = le32_to_cpu(rpc->in->done.msg_flags);

		msg->msg_flags |= told & ~(MSG_CMSG_CLOEXEC | MSG_CMSG_COMPAT | ONTIME_MSG_WAITED | ONTIME_MSG_ERROR |
					   ONTIME_MSG_ERRNO_MASK);
		if (unlikely(told & ONTIME_MSG_ERROR))
			recv_error(sk, rpc, (told & ONTIME_MSG_ERRNO_MASK) >> ONTIME_MSG_ERRNO_SHIFT);
		if (msg->msg_name)
			msg->msg_namelen = ontime_addr_out(&rpc->in->done, msg->msg_name);
		ontime_recv_control(rpc, msg);
		if (sk->sk_type == SOCK_DGRAM && rpc->chan->number)
			recv_seen(sk, result);
		if (told & ONTIME_MSG_WAITED)
			WRITE_ONCE(ontime_sk(sk)->waited, true);
		if (err)
			result = err;
	}
	ontime_sock_rpc_put(sk, rpc);
	return result;
}

/* A peek at data that was received ahead continues with the data behind them. */
static int recv_peek_on(struct sock *sk, struct msghdr *msg, int flags, int seen, long *timeout)
{
	long at_once = 0;
	int more = 0;

	while (msg_data_left(msg)) {
		more = recv_chunk(sk, msg, flags, flags & MSG_WAITALL ? timeout : &at_once);
		if (more != -ONTIME_AGAIN)
			break;
	}
	return more > 0 ? seen + more : seen;
}

/*
 * SO_RCVLOWAT above 1: takes what is there, if that is not enough (@target) waits until there is
 * as much as the option says, and after the time takes what came meanwhile. The host's poll says
 * nothing about fewer bytes. A peek begins at the same byte each time.
 */
static int recv_low(struct sock *sk, struct msghdr *msg, int flags, long *timeout, size_t target)
{
	long at_once = 0;
	int result = recv_chunk(sk, msg, flags, &at_once), waited;

	if (!*timeout || (result != -EAGAIN && !(flags & MSG_PEEK && result > 0 && result < target)))
		return result;
	if (result > 0)
		iov_iter_revert(&msg->msg_iter, result);
	waited = recv_chunk(sk, msg, flags & MSG_PEEK ? flags : flags & ~MSG_WAITALL, timeout);
	if (waited != -EAGAIN && waited != -ERESTARTSYS)
		return waited;
	result = recv_chunk(sk, msg, flags, &at_once);
	return result == -EAGAIN ? waited : result;
}

/*
 * SIOCGSTAMP, as in sock_recv_timestamp(): a stamp that comes with the message is not kept. The time is that of the
 * receive.
 */
static void recv_stamp(struct sock *sk)
{
	const u32 stamps = SOF_TIMESTAMPING_SOFTWARE | SOF_TIMESTAMPING_RAW_HARDWARE;
	u32 wanted = READ_ONCE(sk->sk_tsflags);
	struct ontime_sock *os = ontime_sk(sk);

	if (unlikely(sock_flag(sk, SOCK_RCVTSTAMP) || (wanted & stamps && wanted & SOF_TIMESTAMPING_RX_SOFTWARE)))
		return;
	if (unlikely(sock_flag(sk, SOCK_TIMESTAMP)))
		sock_write_timestamp(sk, ktime_get_real());
	else if (unlikely(!READ_ONCE(os->stamped)))
		sock_write_timestamp(sk, 0);
	else
		return;
	WRITE_ONCE(os->stamped, true);
}

/*
 * SO_PEEK_OFF: the next peek begins behind this one; data that were read are not counted any more.
 */
static void recv_peeked(struct sock *sk, int flags, int length)
{
	s32 offset = READ_ONCE(sk->sk_peek_off), next;

	/* Without the socket's lock, which SO_PEEK_OFF holds while it asks the host. */
	do {
		if (likely(offset < 0))
			return;
		next = flags & MSG_PEEK ? offset + length : max(offset - length, 0);
	} while (!try_cmpxchg(&sk->sk_peek_off, &offset, next));
}

/* Receives a datagram. A pending error is reported first. */
static int recv_datagram(struct sock *sk, struct msghdr *msg, int flags, long *timeout, bool plain)
{
	struct ontime_sock *os = ontime_sk(sk);
	int result = flags & MSG_ERRQUEUE ? 0 : sock_error(sk);
	bool ended = unlikely(READ_ONCE(sk->sk_shutdown) & RCV_SHUTDOWN) && *timeout;

	if (result)
		return result;
	/* After shutdown() a receive does not wait: it returns what is there, then 0. */
	if (ended)
		*timeout = 0;
	atomic_inc(&os->receivers);
	/* The count must be visible before the check for a posted receive (ontime_ahead_next()). */
	smp_mb__after_atomic();
	WRITE_ONCE(os->waited, false);
	do {
		result = flags & RECV_AT_ONCE ? -ONTIME_AGAIN : ontime_ahead_recv(sk, msg, flags, timeout);
		if (result == -ONTIME_AGAIN && unlikely(ontime_filtered(sk)) && !(flags & RECV_AT_ONCE))
			result = ontime_filter_wait(sk, timeout);
		else if (result == -ONTIME_AGAIN)
			result = recv_chunk(sk, msg, flags, timeout);
	} while (result == -ONTIME_AGAIN);
	if (result >= 0 && !(flags & RECV_AT_ONCE)) {
		ontime_ahead_next(sk, result, 0, plain);
		recv_stamp(sk);
		recv_peeked(sk, flags, result);
	}
	atomic_dec(&os->receivers);
	if (ended && result == -EAGAIN)
		return 0;
	return result == -ERESTARTSYS ? sock_intr_errno(*timeout) : result;
}

/*
 * MSG_ERRQUEUE: a notification of send_notice(), in the form of ip_recv_error(). The rest of the
 * queue is on the host.
 */
static bool recv_notice(struct sock *sk, struct msghdr *msg)
{
	struct {
		struct sock_extended_err error;
		struct sockaddr_in6 offender;
	} told = {};
	bool v4 = sk->sk_family == AF_INET;
	struct sk_buff *skb = sock_dequeue_err_skb(sk);

	if (!skb)
		return false;
	told.error = SKB_EXT_ERR(skb)->ee;
	put_cmsg(msg, v4 ? SOL_IP : SOL_IPV6, v4 ? IP_RECVERR : IPV6_RECVERR,
		 v4 ? offsetof(typeof(told), offender) + sizeof(struct sockaddr_in) : sizeof(told), &told);
	msg->msg_flags |= MSG_ERRQUEUE;
	consume_skb(skb);
	return true;
}

/*
 * The error of a stream that a receive reports behind the data. EPIPE is a reset that came after the end of the stream
 * (tcp_reset()): a receive goes on returning 0, and the next send or SO_ERROR takes the error.
 */
static int recv_own_error(struct sock *sk)
{
	return READ_ONCE(sk->sk_err) == EPIPE ? 0 : sock_error(sk);
}

/*
 * A receive during which the connection was dissolved ends with EPIPE, as by sk_wait_event(). The
 * error that the dissolved connection leaves is not its own.
 */
static int recv_dissolved(struct sock *sk, int err)
{
	if (err == -ECONNRESET)
		ontime_sock_keep_error(sk, ECONNRESET);
	return err == -ECONNRESET || err == -ENOTCONN ? -EPIPE : err;
}

/* Whether the host has reported that the stream has ended and all its data was received. */
static bool recv_at_end(struct sock *sk, int flags)
{
	return !(flags & RECV_AT_ONCE) && ontime_sock_ready(ontime_sk(sk)) & ONTIME_READY_END && !READ_ONCE(sk->sk_err);
}

/*
 * What io_uring asks after a receive, as tcp_inq_hint(): the bytes that are left, or 1 for the end of the stream. The
 * socket's channel is asked, so that a real-time thread does not wait for the device's worker.
 */
static int recv_left(struct sock *sk)
{
	struct ontime_sock *os = ontime_sk(sk);
	struct ontime_rpc *rpc;
	int left = 0;

	if (ontime_sock_ready(os) & ONTIME_READY_IN) {
		rpc = ontime_rpc_new(os->dev, READ_ONCE(os->chan), ONTIME_OP_QUERY, os->id);
		if (!IS_ERR(rpc)) {
			rpc->out.call.arg[0] = cpu_to_le32(ONTIME_QUERY_INQ);
			left = max(ontime_sock_call(sk, rpc), 0);
			ontime_rpc_put(rpc);
		}
	}
	/* A receive ahead goes before the question. */
	left += ontime_ahead_unread(os);
	return left ? left : !!(ontime_sock_ready(os) & ONTIME_READY_RDHUP);
}

int ontime_recvmsg(struct socket *sock, struct msghdr *msg, size_t length, int flags)
{
	struct sock *sk = sock->sk;
	long timeout;
	bool plain, low = false;
	const struct recv_place first = recv_place(msg);
	int disconnects = READ_ONCE(sk->sk_disconnects);
	size_t received = 0, target;
	struct recv_place before;
	int result;

	/* Datagrams have no urgent data: the flag has no effect. */
	if (sk->sk_type == SOCK_DGRAM)
		flags &= ~MSG_OOB;
	timeout = flags & RECV_AT_ONCE ? 0 : sock_rcvtimeo(sk, flags & MSG_DONTWAIT);
	plain = !(flags & RECV_FLAGS) && !(msg->msg_control && msg->msg_controllen);
	ontime_sock_place(sk);
	if (unlikely(flags & MSG_ERRQUEUE) && recv_notice(sk, msg))
		return 0;
	if (sk->sk_type == SOCK_DGRAM)
		return recv_datagram(sk, msg, flags, &timeout, plain);
	/* Each peek moves SO_PEEK_OFF, so it is not repeated. */
	if (flags & MSG_PEEK && READ_ONCE(sk->sk_peek_off) >= 0)
		flags &= ~MSG_WAITALL;
	else
		low = READ_ONCE(sk->sk_rcvlowat) > 1 && !(flags & RECV_AT_ONCE);
	target = sock_rcvlowat(sk, flags & MSG_WAITALL, msg_data_left(msg));
	do {
		/* If a receive takes several calls, the control messages of the last one that brought data count. */
		before = recv_place(msg);
		recv_go_to(msg, first);
		result = flags & RECV_AT_ONCE ? -ONTIME_AGAIN : ontime_ahead_recv(sk, msg, flags, &timeout);
		if (result > 0 && flags & MSG_PEEK)
			result = recv_peek_on(sk, msg, flags, result, &timeout);
		else if (result == -ONTIME_AGAIN && recv_at_end(sk, flags))
			result = 0;
		else if (result == -ONTIME_AGAIN)
			result = low ? recv_low(sk, msg, flags, &timeout, target) : recv_chunk(sk, msg, flags, &timeout);
		if (result <= 0 && received)
			recv_go_to(msg, before);
		if (result == -ONTIME_AGAIN)
			continue;
		if (result <= 0)
			break;
		received += result;
	} while (result == -ONTIME_AGAIN ||
		 (!(flags & MSG_PEEK) && timeout && received < target && msg_data_left(msg)));
	if (received) {
		io_keep_error(sk, result);
		ontime_ahead_next(sk, received, length, plain);
		recv_peeked(sk, flags, received);
		result = received;
	} else if ((!result || result == -EAGAIN || result == -ENOTCONN) && READ_ONCE(sk->sk_err) &&
		   !(flags & MSG_ERRQUEUE)) {
		/*
		 * A stream reports its error after its data. An error that another thread took is
		 * not its end.
		 */
		result = recv_own_error(sk) ?: result;
	}
	if (unlikely(result < 0 && READ_ONCE(sk->sk_disconnects) != disconnects))
		result = recv_dissolved(sk, result);
	if (unlikely(msg->msg_get_inq) && result >= 0 && sk->sk_type == SOCK_STREAM)
		msg->msg_inq = recv_left(sk);
	return result == -ERESTARTSYS ? sock_intr_errno(timeout) : result;
}
