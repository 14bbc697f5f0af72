// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Socket filters of datagram sockets (SO_ATTACH_FILTER, SO_ATTACH_BPF). The kernel's own code attaches a program to
 * struct sock; here the program runs on each datagram that the guest receives.
 *
 * The program sees what a filter of UDP sees: a packet that begins with the UDP header, behind headers of Ethernet and
 * IP (SKF_LL_OFF, SKF_NET_OFF). The headers are made here from both names of the datagram.
 *
 * Whether a datagram is there is known once the program has taken it. So a socket with a filter fetches datagrams one
 * at a time, without waiting, until the program takes a datagram. That datagram is kept as if it had been received
 * ahead (ahead.c), where receives, peeks, poll and FIONREAD find it. A receive that waits waits for readiness.
 */
#include <linux/etherdevice.h>
#include <linux/filter.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <linux/sched/signal.h>
#include <linux/skbuff.h>

#include "ontime.h"

#define FILTER_HEADERS (ETH_HLEN + sizeof(struct ipv6hdr) + sizeof(struct udphdr))

/*
 * How many dropped datagrams end a search: more than a receive queue holds, so that only a flood is
 * cut short.
 */
#define FILTER_DROPS_MAX 1024

bool ontime_filtered(const struct sock *sk)
{
	return sk->sk_type == SOCK_DGRAM && rcu_access_pointer(sk->sk_filter);
}

/* The socket's name, queried once after each bind() and connect(). */
static void filter_local(struct sock *sk, struct sockaddr_storage *name)
{
	struct ontime_sock *os = ontime_sk(sk);
	struct ontime_rpc *rpc;

	memset(name, 0, sizeof(*name));
	if (READ_ONCE(os->local_len)) {
		memcpy(name, os->local, sizeof(os->local));
		return;
	}
	rpc = ontime_sock_rpc(sk, ONTIME_OP_NAME);
	if (IS_ERR(rpc))
		return;
	rpc->out.call.arg[0] = cpu_to_le32(ONTIME_NAME_LOCAL);
	if (!ontime_sock_call(sk, rpc) && ontime_addr_out(&rpc->in->done, name) > 0) {
		memcpy(os->local, name, sizeof(os->local));
		WRITE_ONCE(os->local_len, sizeof(os->local));
	}
	ontime_rpc_put(rpc);
}

static __be16 filter_port(const struct sockaddr_storage *name)
{
	/* sin_port and sin6_port are at the same offset. */
	return ((const struct sockaddr_in *)name)->sin_port;
}

/* An address of an IPv4 datagram; the socket may be IPv6. */
static __be32 filter_v4(const struct sockaddr_storage *name)
{
	return name->ss_family == AF_INET6 ? ((const struct sockaddr_in6 *)name)->sin6_addr.s6_addr32[3] :
					     ((const struct sockaddr_in *)name)->sin_addr.s_addr;
}

static void filter_put_ip(struct sk_buff *skb, const struct sockaddr_storage *from, const struct sockaddr_storage *to,
			  size_t length)
{
	struct iphdr *ip = skb_put_zero(skb, sizeof(*ip));

	ip->version = 4;
	ip->ihl = sizeof(*ip) / 4;
	ip->tot_len = htons(sizeof(*ip) + length);
	ip->ttl = IPDEFTTL;
	ip->protocol = IPPROTO_UDP;
	ip->saddr = filter_v4(from);
	ip->daddr = filter_v4(to);
	ip->check = ip_fast_csum(ip, ip->ihl);
	skb->protocol = htons(ETH_P_IP);
}

static void filter_put_ipv6(struct sk_buff *skb, const struct sockaddr_storage *from, const struct sockaddr_storage *to,
			    size_t length)
{
	struct ipv6hdr *ip = skb_put_zero(skb, sizeof(*ip));

	ip->version = 6;
	ip->payload_len = htons(length);
	ip->nexthdr = IPPROTO_UDP;
	ip->hop_limit = IPDEFTTL;
	ip->saddr = ((const struct sockaddr_in6 *)from)->sin6_addr;
	ip->daddr = ((const struct sockaddr_in6 *)to)->sin6_addr;
	skb->protocol = htons(ETH_P_IPV6);
}

/* Makes the packet for a received datagram of @length bytes. */
static struct sk_buff *filter_packet(struct sock *sk, struct ontime_rpc *rpc, size_t length)
{
	struct sk_buff *skb = alloc_skb(FILTER_HEADERS + length, GFP_KERNEL);
	struct sockaddr_storage from = {}, to;
	size_t whole = sizeof(struct udphdr) + length;
	struct udphdr *udp;
	struct ethhdr *eth;

	if (!skb)
		return NULL;
	filter_local(sk, &to);
	ontime_addr_out(&rpc->in->done, &from);
	eth = skb_put_zero(skb, ETH_HLEN);
	skb_reset_mac_header(skb);
	skb_set_network_header(skb, ETH_HLEN);
	if (from.ss_family == AF_INET6 && !ipv6_addr_v4mapped(&((struct sockaddr_in6 *)&from)->sin6_addr))
		filter_put_ipv6(skb, &from, &to, whole);
	else
		filter_put_ip(skb, &from, &to, whole);
	eth->h_proto = skb->protocol;
	skb_set_transport_header(skb, skb->len);
	udp = skb_put_zero(skb, sizeof(*udp));
	udp->source = filter_port(&from);
	udp->dest = filter_port(&to);
	udp->len = htons(min_t(size_t, whole, U16_MAX));
	skb_put_data(skb, ontime_rpc_in(rpc), length);
	__skb_pull(skb, skb_transport_offset(skb));
	skb->ip_summed = CHECKSUM_UNNECESSARY;
	return skb;
}

/*
 * Like sk_filter_trim_cap() for UDP: the bytes of @length that the program keeps; -EPERM: it drops
 * the datagram.
 */
static int filter_run(struct sock *sk, struct ontime_rpc *rpc, size_t length)
{
	struct sk_buff *skb = filter_packet(sk, rpc, length);
	struct sk_filter *filter;
	u32 left = U32_MAX;

	/* The kernel also drops a datagram for which it has no memory. */
	if (!skb)
		return -EPERM;
	rcu_read_lock();
	filter = rcu_dereference(sk->sk_filter);
	if (filter) {
		skb->sk = sk;
		left = bpf_prog_run_save_cb(filter->prog, skb);
		skb->sk = NULL;
	}
	rcu_read_unlock();
	consume_skb(skb);
	if (!left)
		return -EPERM;
	return min_t(size_t, length, max_t(size_t, left, sizeof(struct udphdr)) - sizeof(struct udphdr));
}

/*
 * Fetches a datagram that is there: 1 if it is kept, 0 if the program dropped it, or else an error
 * as of recvmsg(2).
 */
static int filter_fetch(struct sock *sk)
{
	struct ontime_rpc *rpc = ontime_sock_rpc(sk, ONTIME_OP_RECV);
	long at_once = 0;
	int result;

	if (IS_ERR(rpc))
		return PTR_ERR(rpc);
	if (READ_ONCE(ontime_sk(sk)->controls))
		rpc->out.call.control_room = cpu_to_le16(ONTIME_CONTROL_MAX);
	if (!ontime_rpc_grow(rpc, ontime_datagram_max(rpc))) {
		ontime_sock_rpc_put(sk, rpc);
		return -ENOBUFS;
	}
	rpc->in_small = ontime_datagram_max(rpc);
	result = ontime_sock_run(sk, rpc, &at_once, ONTIME_READY_IN);
	if (result >= 0) {
		result = filter_run(sk, rpc, min_t(size_t, result, rpc->in_small));
		if (result >= 0)
			ontime_ahead_keep(sk, rpc, result);
		result = result >= 0;
	} else if (result == -ONTIME_AGAIN) {
		result = 0;
	}
	ontime_sock_rpc_put(sk, rpc);
	return result;
}

/*
 * Fetches until a datagram is ready that the program keeps. 1: there is one; -EAGAIN: there is
 * none, or another error; 0: the program dropped FILTER_DROPS_MAX datagrams, and there may be more.
 */
int ontime_filter_pull(struct sock *sk)
{
	struct ontime_sock *os = ontime_sk(sk);
	unsigned int dropped = 0;
	int result;

	if (mutex_lock_interruptible(&os->call_lock))
		return -ERESTARTSYS;
	do {
		if (ontime_ahead_holds(os))
			result = 1;
		else if (!ontime_ahead_vacant(os))
			result = -EAGAIN;
		else
			result = filter_fetch(sk);
		cond_resched();
	} while (!result && ++dropped < FILTER_DROPS_MAX && !signal_pending(current));
	mutex_unlock(&os->call_lock);
	return !result && signal_pending(current) ? -ERESTARTSYS : result;
}

/* For a receive: waits up to *timeout (jiffies). -ONTIME_AGAIN if a datagram may be ready now. */
int ontime_filter_wait(struct sock *sk, long *timeout)
{
	int result = ontime_filter_pull(sk);

	if (result > 0 || (!result && *timeout))
		return -ONTIME_AGAIN;
	if (!result || result == -EAGAIN)
		result = sock_error(sk) ?: -EAGAIN;
	if (result != -EAGAIN || !*timeout)
		return result;
	if (READ_ONCE(sk->sk_shutdown) & RCV_SHUTDOWN)
		return 0;
	result = ontime_sock_wait_ready(sk, ONTIME_READY_IN | ONTIME_READY_RDHUP, timeout);
	return result ? result : -ONTIME_AGAIN;
}

/* For poll: readiness without datagrams that the program drops. */
u32 ontime_filter_ready(struct sock *sk, u32 ready)
{
	int result;

	if (ready & ONTIME_READY_IN && !ontime_ahead_holds(ontime_sk(sk))) {
		result = ontime_filter_pull(sk);
		if (!result)
			return ready;
		if (result < 0 && result != -EAGAIN && result != -ERESTARTSYS)
			ontime_sock_keep_error(sk, -result);
		ready = ontime_sock_ready(ontime_sk(sk));
	}
	return ready & ~ONTIME_READY_IN;
}
