// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * The protocols for AF_INET and AF_INET6 to which steered sockets belong.
 *
 * After creation such a socket has IPPROTO_TCP or IPPROTO_UDP, as the application expects.
 */
#include <linux/module.h>
#include <net/inet_common.h>
#include <net/protocol.h>
#include <net/transp_v6.h>

#include "ontime.h"

/* Called by sk_common_release(); these sockets are in no hash table. */
static void ontime_unhash(struct sock *sk)
{
}

static struct proto ontime_prot = {
	.name = "ONTIME",
	.owner = THIS_MODULE,
	.obj_size = sizeof(struct ontime_sock),
	.init = ontime_sock_init,
	.destroy = ontime_sock_destroy,
	.unhash = ontime_unhash,
	.ioctl = ontime_sk_ioctl,
};

static struct proto ontime6_prot = {
	.name = "ONTIMEv6",
	.owner = THIS_MODULE,
	.obj_size = sizeof(struct ontime6_sock),
	.ipv6_pinfo_offset = offsetof(struct ontime6_sock, inet6),
	.init = ontime_sock_init,
	.destroy = ontime_sock_destroy,
	.unhash = ontime_unhash,
	.ioctl = ontime_sk_ioctl,
};

#ifdef CONFIG_COMPAT
#define ONTIME_COMPAT .compat_ioctl = ontime_compat_ioctl,
#else
#define ONTIME_COMPAT
#endif

#define ONTIME_OPS(fam)					\
	.family = fam,					\
	.owner = THIS_MODULE,				\
	.release = ontime_release,			\
	.bind = ontime_bind,				\
	.connect = ontime_connect,			\
	.socketpair = sock_no_socketpair,		\
	.getname = ontime_getname,			\
	.poll = ontime_poll,				\
	.ioctl = ontime_ioctl,				\
	ONTIME_COMPAT					\
	.gettstamp = sock_gettstamp,			\
	.shutdown = ontime_shutdown,			\
	.setsockopt = ontime_setsockopt,		\
	.getsockopt = ontime_getsockopt,		\
	.sendmsg = ontime_sendmsg,			\
	.recvmsg = ontime_recvmsg,			\
	.set_peek_off = ontime_set_peek_off,		\
	.splice_eof = ontime_splice_eof,		\
	.mmap = sock_no_mmap

#define ONTIME_STREAM(fam)				\
	ONTIME_OPS(fam),				\
	.accept = ontime_accept,			\
	.listen = ontime_listen

#define ONTIME_DGRAM(fam)				\
	ONTIME_OPS(fam),				\
	.accept = sock_no_accept,			\
	.listen = sock_no_listen

static const struct proto_ops ontime_stream_ops = { ONTIME_STREAM(PF_INET) };
static const struct proto_ops ontime_dgram_ops = { ONTIME_DGRAM(PF_INET) };
static const struct proto_ops ontime6_stream_ops = { ONTIME_STREAM(PF_INET6) };
static const struct proto_ops ontime6_dgram_ops = { ONTIME_DGRAM(PF_INET6) };

#define ONTIME_SW(kind, p, o) { .type = kind, .protocol = ONTIME_PROTOCOL, .prot = p, .ops = o }

static struct inet_protosw ontime_sw[] = {
	ONTIME_SW(SOCK_STREAM, &ontime_prot, &ontime_stream_ops),
	ONTIME_SW(SOCK_DGRAM, &ontime_prot, &ontime_dgram_ops),
};

static struct inet_protosw ontime6_sw[] = {
	ONTIME_SW(SOCK_STREAM, &ontime6_prot, &ontime6_stream_ops),
	ONTIME_SW(SOCK_DGRAM, &ontime6_prot, &ontime6_dgram_ops),
};

/* Copies what an accepted socket inherits from its listener, in the guest's copy of the options. */
static void sk_inherit(struct sock *sk, const struct sock *parent)
{
	static const enum sock_flags flags[] = {
		SOCK_KEEPOPEN, SOCK_LINGER, SOCK_URGINLINE, SOCK_BROADCAST, SOCK_LOCALROUTE, SOCK_RCVTSTAMP,
		SOCK_RCVTSTAMPNS, SOCK_TSTAMP_NEW, SOCK_ZEROCOPY, SOCK_DBG, SOCK_RXQ_OVFL, SOCK_SELECT_ERR_QUEUE,
		SOCK_WIFI_STATUS, SOCK_NOFCS, SOCK_FILTER_LOCKED,
	};
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(flags); i++)
		if (sock_flag(parent, flags[i]))
			sock_set_flag(sk, flags[i]);
	sk->sk_lingertime = parent->sk_lingertime;
	sk->sk_reuse = parent->sk_reuse;
	sk->sk_reuseport = parent->sk_reuseport;
	sk->sk_mark = parent->sk_mark;
	sk->sk_bound_dev_if = parent->sk_bound_dev_if;
	sk->sk_rcvbuf = parent->sk_rcvbuf;
	sk->sk_sndbuf = parent->sk_sndbuf;
	sk->sk_rcvtimeo = parent->sk_rcvtimeo;
	sk->sk_sndtimeo = parent->sk_sndtimeo;
	sk->sk_rcvlowat = parent->sk_rcvlowat;
	sk->sk_userlocks |= parent->sk_userlocks & SOCK_BUF_LOCK_MASK;
	sk->sk_max_pacing_rate = parent->sk_max_pacing_rate;
	sk->sk_tsflags = parent->sk_tsflags;
	sk->sk_no_check_tx = parent->sk_no_check_tx;
	sk->sk_txrehash = parent->sk_txrehash;
	sk->sk_peek_off = parent->sk_peek_off;
#ifdef CONFIG_NET_RX_BUSY_POLL
	sk->sk_ll_usec = parent->sk_ll_usec;
	sk->sk_prefer_busy_poll = parent->sk_prefer_busy_poll;
	sk->sk_busy_poll_budget = parent->sk_busy_poll_budget;
#endif
	ontime_sk(sk)->device = ontime_sk(parent)->device;
	ontime_sk(sk)->ahead_off = ontime_sk(parent)->ahead_off;
	ontime_sk(sk)->controls = ontime_sk(parent)->controls;
	ontime_sk(sk)->corked = ontime_sk(parent)->corked;
}

/*
 * A socket for accept(2), without a host socket yet. It is grafted onto its struct socket when
 * there is a connection.
 */
struct sock *ontime_sk_child(struct sock *parent)
{
	/* The family of the protocol, which decides the size: another thread may change the parent's. */
	struct proto *prot = READ_ONCE(parent->sk_prot);
	int family = prot == &ontime6_prot ? PF_INET6 : PF_INET;
	struct sock *sk = sk_alloc(sock_net(parent), family, GFP_KERNEL, prot, 0);

	if (!sk)
		return NULL;
	sock_init_data(NULL, sk);
	sk->sk_type = parent->sk_type;
	sk->sk_protocol = parent->sk_protocol;
	sk->sk_destruct = family == PF_INET6 ? parent->sk_destruct : inet_sock_destruct;
	if (family == PF_INET6)
		inet_sk(sk)->pinet6 = &((struct ontime6_sock *)sk)->inet6;
	sk_inherit(sk, parent);
	return sk;
}

/* An IPv6 socket goes on as one of IPv4: its host socket does already. Its memory is still the other protocol's. */
void ontime_sk_to_v4(struct socket *sock)
{
	struct sock *sk = sock->sk;

	lock_sock(sk);
	if (sk->sk_family == PF_INET6) {
		sock_prot_inuse_add(sock_net(sk), sk->sk_prot, -1);
		sock_prot_inuse_add(sock_net(sk), &ontime_prot, 1);
		WRITE_ONCE(sk->sk_prot, &ontime_prot);
		WRITE_ONCE(sock->ops, sk->sk_type == SOCK_STREAM ? &ontime_stream_ops : &ontime_dgram_ops);
		WRITE_ONCE(sk->sk_family, PF_INET);
	}
	/* The names that are known here are of IPv6. */
	WRITE_ONCE(ontime_sk(sk)->peer_len, 0);
	WRITE_ONCE(ontime_sk(sk)->local_len, 0);
	release_sock(sk);
}

int ontime_proto_init(void)
{
	unsigned int i;
	int err;

	err = proto_register(&ontime_prot, 1);
	if (err)
		return err;
	err = proto_register(&ontime6_prot, 1);
	if (err)
		goto err_prot;
	for (i = 0; i < ARRAY_SIZE(ontime6_sw); i++) {
		err = inet6_register_protosw(&ontime6_sw[i]);
		if (err)
			goto err_sw;
	}
	for (i = 0; i < ARRAY_SIZE(ontime_sw); i++)
		inet_register_protosw(&ontime_sw[i]);
	return 0;

err_sw:
	while (i--)
		inet6_unregister_protosw(&ontime6_sw[i]);
	proto_unregister(&ontime6_prot);
err_prot:
	proto_unregister(&ontime_prot);
	return err;
}

void ontime_proto_exit(void)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(ontime_sw); i++)
		inet_unregister_protosw(&ontime_sw[i]);
	for (i = 0; i < ARRAY_SIZE(ontime6_sw); i++)
		inet6_unregister_protosw(&ontime6_sw[i]);
	/* Closed sockets are freed after a grace period. */
	rcu_barrier();
	proto_unregister(&ontime6_prot);
	proto_unregister(&ontime_prot);
}
