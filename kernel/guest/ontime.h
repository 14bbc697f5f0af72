/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Declarations that the module's files share. The contract with the device process is
 * ../abi/ontime_abi.h.
 *
 *   steer.c     which new sockets are outsourced
 *   proto.c     their protocols for AF_INET and AF_INET6
 *   sock.c      sockets: creation, names, connections, release
 *   ready.c     readiness: the device's reports, poll
 *   io.c        sending and receiving
 *   ahead.c     receiving the next small message before the application asks for it
 *   opt.c       options and ioctls
 *   filter.c    socket filters of datagram sockets
 *   list.c      /proc/net/ontime
 *   rpc.c       calls to the device process
 *   idle.c      the idle loop that checks the queues, and the vCPU word that the host reads
 *   wake.c      the interrupt that only ends a halt
 *   queue.c     used buffers: completed calls, events
 *   dl.c        deadline tasks: registered and placed on vCPUs (place.h)
 *   dl_host.c   their bandwidth requested from the host
 *   dl_next.c   their next deadlines published
 *   dl_stray.c  deadline tasks that were moved off their vCPU
 *   steal.c     stolen time is not charged to deadline tasks
 *   watch.c     detects a device that does not answer any more
 *   dev.c       the virtio devices: probe and remove
 */
#ifndef ONTIME_H
#define ONTIME_H

#include <linux/atomic.h>
#include <linux/idr.h>
#include <linux/in.h>
#include <linux/irq_work.h>
#include <linux/kref.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/net.h>
#include <linux/refcount.h>
#include <linux/scatterlist.h>
#include <linux/sched/prio.h>
#include <linux/spinlock.h>
#include <linux/tcp.h>
#include <linux/udp.h>
#include <linux/version.h>
#include <linux/timer.h>
#include <linux/virtio.h>
#include <linux/wait.h>
#include <linux/workqueue.h>
#include <linux/xarray.h>
#include <net/sock.h>
#include <net/ipv6.h>

#include "ontime_abi.h"

#ifdef pr_fmt
#undef pr_fmt
#endif
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#if LINUX_VERSION_CODE < KERNEL_VERSION(6, 19, 0)
#define sockaddr_unsized sockaddr
#endif

/*
 * Protocol number of steered sockets: one for experiments (RFC 3692), registered beside TCP and
 * UDP.
 */
#define ONTIME_PROTOCOL 253

/* Limit for messages that travel in the call itself, bytes; larger ones use the caller's pages. */
#define ONTIME_SMALL 1536
/* After this many small messages in a row, the next one is expected to be small. */
#define ONTIME_STREAK 4
/* Receiving ahead of datagrams stops after this many receives in a row that found no datagram. */
#define ONTIME_BUSY 8
/* Limits for sends with MSG_MORE that are posted one after the other: calls, and bytes. */
#define ONTIME_MORE 32
#define ONTIME_MORE_BYTES 1400
/* Room in an answer for a number that it tells: ontime_told(). */
#define ONTIME_TOLD_SIZE (sizeof(struct ontime_control) + sizeof(__le32))
/* Limits for the caller's memory in one call: pages and bytes. */
#define ONTIME_CHUNK_PAGES 256
#define ONTIME_CHUNK_BYTES (ONTIME_CHUNK_PAGES << 10)

/* "Repeat the call", within the module; not an errno of a host. */
#define ONTIME_AGAIN ERESTARTNOINTR

/* ---- dev.c ---- */

/*
 * One virtio device: a channel. Channel 0 belongs to MAIN and takes every call. Each other channel
 * belongs to a vCPU and takes the calls of sockets that were moved there. The structure lives until
 * the last call on it is freed.
 */
struct ontime_chan {
	struct kref ref;
	struct rcu_head rcu;
	struct virtio_device *vdev;
	u32 number;
	u64 generation;
	u32 calls_max, pages_max, bytes_max;
	struct virtqueue *callq, *eventq;
	struct ontime_event *events;
	atomic_t waiting;		/* calls that wait in the device */
	wait_queue_head_t room;		/* callers that found the queue full */
	struct timer_list bell;		/* rings for posted sends that no other call follows */

	spinlock_t lock;		/* protects the members below and the queues */
	bool up;
	bool restarting;		/* the device process was restarted; setup is in progress */
	bool silent;			/* the device does not answer: watch.c */
	bool quiet;			/* the call queue holds calls without a doorbell */
	bool hints;			/* ONTIME_F_HINTS */
	bool urgent;			/* real-time threads wait for its interrupt */
	unsigned int sleepers;		/* callers that need an interrupt, and receives ahead */
	unsigned int in_flight;
	struct list_head calls;
	struct list_head idle;		/* receives ahead that no caller waits for, the oldest first */
	u64 aheads;			/* how many receives ahead were posted or refused */
	u16 seen[ONTIME_VQS_CHANNEL];	/* used indices up to which buffers were taken */

	/* Only in MAIN's channel. */
	struct virtqueue *controlq;
	struct ontime_dev *dev;
	bool deadlines;			/* ONTIME_F_DEADLINE */
	struct delayed_work watch;
	struct ontime_rpc *ping;	/* not known to be answered */
	unsigned long asked;		/* time of the ping, jiffies */

	/* Waking the idle loop, while bound to a vCPU: idle.c. */
	bool wake, bound;		/* the host requests it; it is in effect */
	unsigned int cpu;
	u32 running;			/* vCPU word of the thread that runs there */
	struct ontime_vcpu *word;
	struct irq_work look;
	struct task_struct *thread;	/* PREEMPT_RT */
};

/* The VM's view of one device process: from MAIN's probe until the last socket is gone. */
struct ontime_dev {
	struct kref ref;
	struct rcu_head rcu;
	u64 generation;
	u32 sockets_max;
	struct ida indices;		/* of sockets, until the device has closed them */
	atomic_t used;			/* number of indices in use */
	struct xarray socks;		/* index -> struct ontime_sock, for events */
	atomic_t socket_generation;	/* part of socket ids */
	/* The host's default buffer sizes for STREAM and DGRAM sockets; 0: not queried yet. */
	int sndbuf[2], rcvbuf[2];
};

int ontime_dev_init(void);
void ontime_dev_exit(void);
bool ontime_device_ready(void);
struct ontime_dev *ontime_dev_get(void);
void ontime_dev_put(struct ontime_dev *dev);
struct ontime_dev *ontime_dev_rcu(u64 generation);
struct ontime_chan *ontime_chan_get(u32 number, u64 generation);
void ontime_chan_put(struct ontime_chan *chan);
u32 ontime_chan_wanted(u64 generation);
void ontime_restart(struct ontime_chan *chan);
void ontime_dev_silent(struct ontime_chan *main);
void ontime_dev_answers(struct ontime_chan *main);

/* ---- watch.c ---- */

void ontime_watch_start(struct ontime_chan *main);
void ontime_watch_stop(struct ontime_chan *main);

/* ---- queue.c ---- */

int ontime_post_events(struct ontime_chan *chan);
bool ontime_rearm(struct ontime_chan *chan, struct virtqueue *vq, unsigned int index);
void ontime_reap(struct ontime_chan *chan);
void ontime_queues_clear(struct ontime_chan *chan);
void ontime_chan_fail(struct ontime_chan *chan);
void ontime_chan_silence(struct ontime_chan *chan);
bool ontime_chan_answers(struct ontime_chan *main);

/* ---- idle.c, wake.c ---- */

int ontime_idle_bind(struct ontime_chan *chan, struct ontime_chan *main);
void ontime_idle_unbind(struct ontime_chan *chan, struct ontime_chan *main);
void ontime_ring(struct ontime_chan *chan);
void ontime_thread_first(struct task_struct *thread);
int ontime_wake_arm(struct ontime_chan *chan);
void ontime_wake_disarm(struct ontime_chan *chan);
void ontime_irq_first(struct ontime_chan *chan);

/* ---- rpc.c ---- */

/* The device's answer: in the body control messages, then small data. */
struct ontime_reply {
	struct ontime_done done;
	u8 body[];
};

/*
 * One call. It belongs to its caller and, while in flight, also to the queue. Its memory is
 * initialized once and reused.
 */
struct ontime_rpc {
	refcount_t refs;
	struct ontime_chan *chan;
	struct ontime_dev *dev;
	struct list_head link;
	struct list_head idle_link;	/* in chan->idle, or empty */
	struct work_struct free_work;
	struct scatterlist out_sg, in_sg;
	struct ontime_reply *in;	/* the answer: in_own, or a larger allocation */
	u32 in_max;			/* room for small data, bytes */
	/* For one use; zeroed before each. */
	struct_group(use,
		bool done;		/* the result is complete; the caller may free the call */
		struct task_struct *sleeper;/* the sleeping caller; with the channel's lock */
		int closes;		/* the socket index that is free after this call, or -1 */
		u32 abandoned;		/* ACCEPT: the new socket, if the caller left before the answer */
		s32 result;
		bool control;		/* goes to the control queue */
		bool ahead;		/* a receive ahead, which no caller waits for: ahead.c */
		u64 posted;		/* chan->aheads when it was posted */
		bool more;		/* a posted send, which no caller waits for: io.c */
		bool quiet;		/* needs no doorbell of its own */
		bool answered;		/* by the device: in->done is valid */
		bool lost;		/* the caller got an error without an answer; still in the queue */
		/* The caller's pages, for large transfers. */
		struct sg_table pages;
		bool pinned, dirty;	/* user pages; written by the device */
		void *gathered;		/* a copy, of memory that cannot be pinned or is too scattered */
		u32 out_small, in_small;/* bytes of small data */
	);
	/* What the device reads; and its answer, if that is small. The bodies are not zeroed. */
	struct {
		struct ontime_call call;
		u8 body[ONTIME_CONTROL_MAX + ONTIME_SMALL];
	} out __aligned(8);
	struct {
		struct ontime_done done;
		u8 body[ONTIME_CONTROL_MAX + ONTIME_SMALL];
	} in_own __aligned(8);
};

struct ontime_sock;

int ontime_rpc_init(void);
void ontime_rpc_exit(void);
struct ontime_rpc *ontime_rpc_new(struct ontime_dev *dev, u32 chan, u16 op, u32 sock);
void ontime_rpc_put(struct ontime_rpc *rpc);
bool ontime_rpc_rest(struct ontime_rpc *rpc);
void ontime_rpc_begin(struct ontime_rpc *rpc, u16 op, u32 sock);
void ontime_rpc_put_later(struct ontime_rpc *rpc);
bool ontime_queue_work(struct work_struct *work);
int ontime_rpc_post(struct ontime_rpc *rpc, u64 *refused);
int ontime_rpc_post_send(struct ontime_rpc *rpc);
void ontime_rpc_bell(struct timer_list *timer);
void ontime_rpc_wanted(struct ontime_rpc *rpc, bool wanted);
void ontime_rpc_kick(struct ontime_chan *chan);
void ontime_rpc_cancel(struct ontime_rpc *rpc);
bool ontime_rpc_grow(struct ontime_rpc *rpc, size_t length);
int ontime_rpc_pages(struct ontime_rpc *rpc, struct iov_iter *iter, size_t length);
int ontime_rpc_run(struct ontime_rpc *rpc);
int ontime_rpc_wait(struct ontime_rpc *rpc, long *timeout);
void ontime_rpc_close(struct ontime_dev *dev, u32 number, u32 id, u32 index, u32 how);
struct ontime_rpc *ontime_ctl_ping(struct ontime_chan *main);
s64 ontime_ctl_took(struct ontime_chan *main);
int ontime_ctl_vcpu(struct ontime_chan *main, u32 number, u32 cpu, u64 address);
int ontime_ctl_next(struct ontime_chan *main, u64 address);
int ontime_ctl_bw(struct ontime_chan *main, u16 op, const struct ontime_bw *entries, unsigned int count);
bool ontime_rpc_may_wait(struct ontime_chan *chan);
void ontime_rpc_finish(struct ontime_rpc *rpc, s32 result);
void ontime_rpc_complete(struct ontime_rpc *rpc, s32 result);
bool ontime_rpc_abandon(struct ontime_rpc *rpc, u32 id);

/*
 * Urgency of a thread in the host's scale: 0 for a normal thread, 1 to 99 for a real-time thread; a
 * deadline thread counts as 99.
 */
static inline u32 ontime_prio(const struct task_struct *task)
{
	return task->prio < MAX_RT_PRIO ? min(MAX_RT_PRIO - 1 - task->prio, MAX_RT_PRIO - 1) : 0;
}

static inline bool ontime_rpc_done(const struct ontime_rpc *rpc)
{
	return smp_load_acquire(&rpc->done);
}

/* The small data, which follow the control messages. */
static inline u8 *ontime_rpc_out(struct ontime_rpc *rpc)
{
	return rpc->out.body + le16_to_cpu(rpc->out.call.control_len);
}

static inline u8 *ontime_rpc_in(struct ontime_rpc *rpc)
{
	return rpc->in->body + le16_to_cpu(rpc->out.call.control_room);
}

/* ---- proto.c ---- */

/* The name that a socket was bound to, an IPv4 address mapped; port 0: not bound. */
struct ontime_bound {
	__be16 port;
	bool only_v6;
	struct in6_addr addr;
};

/*
 * The kernel treats a socket with IPPROTO_TCP as a tcp_sock, and one with IPPROTO_UDP as a
 * udp_sock. So both are here, zeroed.
 */
struct ontime_sock {
	union {
		struct tcp_sock tcp;
		struct udp_sock udp;
	};
	struct ontime_dev *dev;
	u32 id;
	u32 chan;			/* the channel for its calls */
	u32 wanted;			/* the channel of the vCPU that it was moved for, or 0 */
	atomic64_t ready;		/* sequence number << 32 | ONTIME_READY_* */
	u32 error_seq;			/* sequence number of the last event with an error; 0: none */
	bool dead;			/* its device is gone */
	bool abort;			/* close with a reset */
	bool polled;			/* its readiness was asked for */
	bool blind;			/* reports may say IN wrongly: a receive skipped that check */
	bool controls;			/* received messages may come with control messages */
	bool stamped;			/* a message was received: SIOCGSTAMP has an answer */
	bool corked;			/* TCP_CORK or UDP_CORK is set */
	bool shut_write;		/* a stream: shutdown() was called to write */
	atomic_t more;			/* posted sends whose answers were not taken */
	u32 more_bytes;			/* of posted sends since the last other one */
	bool shut_read;			/* a stream: shutdown() was called to read, on this or an earlier connection */
	struct ontime_rpc *spare[2];	/* completed calls of its channel, for reuse */
	u32 streak;			/* small messages received in a row */
	atomic_t receivers;		/* receives of datagrams in progress; whether the last one waited */
	bool waited;
	u32 busy;			/* receives ahead left until a datagram is found at once again */
	/* The receive posted ahead: ahead.c. */
	struct mutex ahead_lock;
	struct ontime_rpc *ahead;
	u32 ahead_state;
	u32 ahead_at;			/* bytes of it that were read */
	u32 ahead_gone;			/* how many of them are not there any more */
	u64 ahead_refused;		/* chan->aheads when a receive ahead was refused last */
	bool ahead_off;
	bool told;			/* an error event has come since the last connect began */
	bool sized;			/* the connection's SO_SNDBUF is known */
	int device;			/* the host's socket is bound to this interface of the guest */
	struct work_struct urgent;	/* SIGURG: ready.c */
	/*
	 * Held while the host binds. Of a stream: also while the host's socket and sk_state begin or
	 * end to listen. Of datagrams: also while filter.c fetches.
	 */
	struct mutex call_lock;
	bool shares;			/* SO_REUSEPORT was requested, perhaps for a while only */
	bool only_v6;			/* IPV6_V6ONLY */
	struct ontime_bound bound;	/* with ports_lock of sock.c */
	struct ontime_bound trying;	/* a bind() that was not answered; with ports_lock */
	u16 peer_len, local_len;
	u8 peer[ONTIME_ADDR_MAX];	/* of an accepted socket */
	u8 local[ONTIME_ADDR_MAX];	/* of a socket with a filter */
};

struct ontime6_sock {
	struct ontime_sock sock;
	struct ipv6_pinfo inet6;
};

static inline struct ontime_sock *ontime_sk(const struct sock *sk)
{
	return (struct ontime_sock *)sk;
}

int ontime_proto_init(void);
void ontime_proto_exit(void);
struct sock *ontime_sk_child(struct sock *parent);
void ontime_sk_to_v4(struct socket *sock);

/* ---- sock.c ---- */

int ontime_sock_init(struct sock *sk);
void ontime_sock_destroy(struct sock *sk);
int ontime_release(struct socket *sock);
int ontime_bind(struct socket *sock, struct sockaddr_unsized *addr, int length);
int ontime_connect(struct socket *sock, struct sockaddr_unsized *addr, int length, int flags);
int ontime_accept(struct socket *sock, struct socket *newsock, struct proto_accept_arg *arg);
int ontime_getname(struct socket *sock, struct sockaddr *addr, int peer);
int ontime_listen(struct socket *sock, int backlog);
int ontime_shutdown(struct socket *sock, int how);
int ontime_addr_in(struct sock *sk, const void *addr, int length, struct ontime_call *call);
int ontime_addr_out(const struct ontime_done *done, void *addr);
bool ontime_told(const struct ontime_rpc *rpc, u32 name, u32 *number);
int ontime_sock_call(struct sock *sk, struct ontime_rpc *rpc);
int ontime_sock_run(struct sock *sk, struct ontime_rpc *rpc, long *timeout, u32 ready);
struct ontime_rpc *ontime_sock_rpc(struct sock *sk, u16 op);
void ontime_sock_rpc_put(struct sock *sk, struct ontime_rpc *rpc);
void ontime_sock_place(struct sock *sk);
int ontime_simple(struct sock *sk, u16 op, u32 arg0, u32 arg1);
void ontime_index_free(struct ontime_dev *dev, u32 index);
bool ontime_sock_reserved(void);

/* ---- ready.c ---- */

__poll_t ontime_poll(struct file *file, struct socket *sock, struct poll_table_struct *wait);
int ontime_sock_wait_ready(struct sock *sk, u32 mask, long *timeout);
int ontime_sock_wait_ahead(struct sock *sk, u32 gone, long *timeout);
void ontime_sock_done(struct sock *sk, struct ontime_rpc *rpc);
void ontime_sock_failed(struct sock *sk, int error);
void ontime_sock_event(struct ontime_chan *chan, const struct ontime_event *event);
void ontime_sock_die(struct ontime_sock *os);
void ontime_sock_arrived(struct sock *sk, struct ontime_rpc *rpc, bool holds);
void ontime_sock_reap(struct sock *sk);
void ontime_sock_urgent_work(struct work_struct *work);

static inline u32 ontime_sock_ready(struct ontime_sock *os)
{
	return (u32)atomic64_read(&os->ready);
}

/*
 * Keeps an error from an answer for the next call. A pending error stays: a newer event may have
 * set it.
 */
static inline void ontime_sock_keep_error(struct sock *sk, int error)
{
	cmpxchg(&sk->sk_err, 0, error);
}

/* ---- io.c ---- */

int ontime_sendmsg(struct socket *sock, struct msghdr *msg, size_t length);
int ontime_recvmsg(struct socket *sock, struct msghdr *msg, size_t length, int flags);
void ontime_splice_eof(struct socket *sock);
void ontime_more_done(struct ontime_rpc *rpc);
bool ontime_more_settle(struct sock *sk, bool end);
size_t ontime_datagram_max(struct ontime_rpc *rpc);
void ontime_recv_control(struct ontime_rpc *rpc, struct msghdr *msg);

/* ---- ahead.c ---- */

bool ontime_ahead_holds(struct ontime_sock *os);
bool ontime_ahead_ended(struct ontime_sock *os);
u32 ontime_ahead_unread(struct ontime_sock *os);
void ontime_ahead_done(struct ontime_rpc *rpc);
bool ontime_ahead_end(struct ontime_sock *os);
void ontime_ahead_flush(struct ontime_sock *os);
void ontime_ahead_next(struct sock *sk, size_t received, size_t room, bool plain);
void ontime_ahead_never(struct sock *sk);
bool ontime_ahead_vacant(struct ontime_sock *os);
int ontime_ahead_recv(struct sock *sk, struct msghdr *msg, int flags, long *timeout);
void ontime_ahead_keep(struct sock *sk, struct ontime_rpc *rpc, u32 length);

/* ---- opt.c ---- */

int ontime_setsockopt(struct socket *sock, int level, int name, sockptr_t value, unsigned int length);
int ontime_getsockopt(struct socket *sock, int level, int name, char __user *value, int __user *length);
int ontime_ioctl(struct socket *sock, unsigned int cmd, unsigned long arg);
int ontime_compat_ioctl(struct socket *sock, unsigned int cmd, unsigned long arg);
int ontime_sk_ioctl(struct sock *sk, int cmd, int *number);
int ontime_set_peek_off(struct sock *sk, int value);
void ontime_opt_defaults(struct sock *sk);
void ontime_opt_connected(struct sock *sk);
int ontime_opt_uncork(struct sock *sk);
int ontime_opt_device(struct sock *sk);

/* ---- filter.c ---- */

bool ontime_filtered(const struct sock *sk);
int ontime_filter_pull(struct sock *sk);
int ontime_filter_wait(struct sock *sk, long *timeout);
u32 ontime_filter_ready(struct sock *sk, u32 ready);

/* ---- list.c ---- */

int ontime_list_init(void);
void ontime_list_exit(void);

/* ---- dl.c and its parts (dl.h), steal.c ---- */

int ontime_dl_init(void);
void ontime_dl_exit(void);
void ontime_dl_free(void);
void ontime_dl_device(void);
int ontime_steal_start(void);
void ontime_steal_here(void);
u64 ontime_steal_now(void);
void ontime_steal_stop(void);

/* ---- steer.c ---- */

bool ontime_steer_may(const struct net *net);
u32 ontime_steer_bypassed(void);
int ontime_steer_init(void);
void ontime_steer_exit(void);
void ontime_steer_free(void);

#endif
