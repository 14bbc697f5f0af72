// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Options and ioctls. The host socket has the options. Those that the kernel answers itself (all of
 * SOL_SOCKET) are copied into struct sock when the host has accepted them.
 */
#include <linux/capability.h>
#include <linux/compat.h>
#include <linux/mroute.h>
#include <linux/mroute6.h>
#include <linux/netdevice.h>
#include <linux/slab.h>
#include <linux/sockios.h>
#include <linux/uaccess.h>
#include <asm/ioctls.h>
#include <net/inet_common.h>
#include <net/ipv6.h>
#include <net/tcp.h>

#include "ontime.h"

/* The longest value of an option, bytes. */
#define OPTION_MAX (ONTIME_CONTROL_MAX + ONTIME_SMALL)

/* A call about an option, with @value. */
static struct ontime_rpc *option_rpc(struct sock *sk, u16 op, int level, int name, const void *value, unsigned int length)
{
	struct ontime_rpc *rpc = ontime_sock_rpc(sk, op);

	if (IS_ERR(rpc))
		return rpc;
	rpc->out.call.arg[0] = cpu_to_le32(level);
	rpc->out.call.arg[1] = cpu_to_le32(name);
	memcpy(rpc->out.body, value, length);
	rpc->out_small = length;
	return rpc;
}

/* Writes what getsockopt(2) returns on the host into @value; returns its length. */
static int host_getsockopt(struct sock *sk, int level, int name, void *value, unsigned int length)
{
	struct ontime_rpc *rpc = option_rpc(sk, ONTIME_OP_GETOPT, level, name, value, length);
	int result;

	if (IS_ERR(rpc))
		return PTR_ERR(rpc);
	rpc->in_small = length;
	result = ontime_sock_call(sk, rpc);
	if (result > 0)
		memcpy(value, rpc->in->body, min_t(unsigned int, result, length));
	ontime_rpc_put(rpc);
	return result;
}

static int host_setsockopt(struct sock *sk, int level, int name, const void *value, unsigned int length)
{
	struct ontime_rpc *rpc = option_rpc(sk, ONTIME_OP_SETOPT, level, name, value, length);
	int result;

	if (IS_ERR(rpc))
		return PTR_ERR(rpc);
	result = ontime_sock_call(sk, rpc);
	ontime_rpc_put(rpc);
	return result;
}

/* Copies what the host's socket has for an option of SOL_SOCKET. */
static void mirror_number(struct sock *sk, int name, int *copy)
{
	int number = 0;

	if (host_getsockopt(sk, SOL_SOCKET, name, &number, sizeof(number)) == sizeof(number))
		WRITE_ONCE(*copy, number);
}

/*
 * The application has set a buffer's size. @forced: the size that the policy allows of one that may go beyond the
 * host's sysctls; the application reads that, counted twice as by the kernel.
 */
static void mirror_buffer(struct sock *sk, int name, int *copy, u8 lock, int forced)
{
	/* SO_BUF_LOCK shows it. */
	lock_sock(sk);
	sk->sk_userlocks |= lock;
	release_sock(sk);
	mirror_number(sk, name, copy);
	forced = min(forced, INT_MAX / 2) * 2;
	if (READ_ONCE(*copy) < forced)
		WRITE_ONCE(*copy, forced);
}

/* A connection was made whose send buffer the answer did not tell: sock.c. */
void ontime_opt_connected(struct sock *sk)
{
	if (!(sk->sk_userlocks & SOCK_SNDBUF_LOCK))
		mirror_number(sk, SO_SNDBUF, &sk->sk_sndbuf);
}

/* A new socket's buffer sizes are the host's defaults, which are queried once. */
void ontime_opt_defaults(struct sock *sk)
{
	struct ontime_dev *dev = ontime_sk(sk)->dev;
	int kind = sk->sk_type == SOCK_DGRAM;

	if (!READ_ONCE(dev->sndbuf[kind])) {
		mirror_number(sk, SO_SNDBUF, &sk->sk_sndbuf);
		mirror_number(sk, SO_RCVBUF, &sk->sk_rcvbuf);
		WRITE_ONCE(dev->rcvbuf[kind], sk->sk_rcvbuf);
		WRITE_ONCE(dev->sndbuf[kind], sk->sk_sndbuf);
	}
	WRITE_ONCE(sk->sk_sndbuf, READ_ONCE(dev->sndbuf[kind]));
	WRITE_ONCE(sk->sk_rcvbuf, READ_ONCE(dev->rcvbuf[kind]));
}

/*
 * Checks the caller's capabilities as the guest's kernel would; the host's kernel sees only the
 * device process. The network belongs to the VM, so capabilities in the initial user namespace
 * count.
 */
static int opt_permitted(int name, int value)
{
	switch (name) {
	case SO_PRIORITY:
		if (value >= 0 && value <= 6)
			return 0;
		fallthrough;
	case SO_RCVMARK:
		return capable(CAP_NET_RAW) || capable(CAP_NET_ADMIN) ? 0 : -EPERM;
	case SO_SNDBUFFORCE:
	case SO_RCVBUFFORCE:
		return capable(CAP_NET_ADMIN) ? 0 : -EPERM;
	default:
		return 0;
	}
}

/* Not by sock_setsockopt(): that would enable timestamps for the guest's own packets. */
static void mirror_timestamp(struct sock *sk, int name, int value)
{
	bool ns = name == SO_TIMESTAMPNS_OLD || name == SO_TIMESTAMPNS_NEW;
	bool new = name == SO_TIMESTAMP_NEW || name == SO_TIMESTAMPNS_NEW;

	lock_sock(sk);
	sock_valbool_flag(sk, SOCK_RCVTSTAMP, value);
	sock_valbool_flag(sk, SOCK_RCVTSTAMPNS, value && ns);
	sock_valbool_flag(sk, SOCK_TSTAMP_NEW, value && new);
	release_sock(sk);
}

/*
 * Binds the host's socket to the interface, before it gets a name. The process on the host may do that once, so until
 * then a change is kept here only. The host has the loopback interface; instead of another one of the guest, which no
 * outsourced packet passes, it takes one that it does not have.
 */
int ontime_opt_device(struct sock *sk)
{
	struct ontime_sock *os = ontime_sk(sk);
	int device, host, err = 0;

	if (likely(READ_ONCE(sk->sk_bound_dev_if) == READ_ONCE(os->device)))
		return 0;
	if (mutex_lock_killable(&os->call_lock))
		return -EINTR;
	device = READ_ONCE(sk->sk_bound_dev_if);
	host = device > LOOPBACK_IFINDEX ? device | BIT(30) : device;
	if (device != os->device)
		err = host_setsockopt(sk, SOL_SOCKET, SO_BINDTOIFINDEX, &host, sizeof(host));
	if (!err)
		WRITE_ONCE(os->device, device);
	mutex_unlock(&os->call_lock);
	return err;
}

static int set_device_index(struct socket *sock, int device)
{
	int before = READ_ONCE(sock->sk->sk_bound_dev_if), err;
	struct sockaddr_storage name;

	err = sock_setsockopt(sock, SOL_SOCKET, SO_BINDTOIFINDEX, KERNEL_SOCKPTR(&device), sizeof(device));
	if (err || device == before)
		return err;
	/* sin_port and sin6_port are at the same offset. */
	if (ontime_getname(sock, (struct sockaddr *)&name, 0) > 0 && ((struct sockaddr_in *)&name)->sin_port)
		err = ontime_opt_device(sock->sk);
	if (err)
		WRITE_ONCE(sock->sk->sk_bound_dev_if, before);
	else if (device > LOOPBACK_IFINDEX)
		pr_warn_ratelimited("%s: its socket is bound to interface %d, which outsourced packets do not pass\n",
				    current->comm, device);
	return err;
}

static int set_device(struct socket *sock, const u8 *value, unsigned int length)
{
	const struct net_device *device;
	char name[IFNAMSIZ] = "";
	int index = 0;

	memcpy(name, value, min_t(unsigned int, length, IFNAMSIZ - 1));
	if (name[0]) {
		rcu_read_lock();
		device = dev_get_by_name_rcu(sock_net(sock->sk), name);
		if (device)
			index = device->ifindex;
		rcu_read_unlock();
		if (!device)
			return -ENODEV;
	}
	return set_device_index(sock, index);
}

/* @value has at least 4 bytes, except for SO_BINDTODEVICE: opt_is_number(). */
static int set_sol_socket(struct socket *sock, int name, u8 *value, unsigned int length)
{
	struct sock *sk = sock->sk;
	int number, err;

	if (name == SO_BINDTODEVICE)
		return set_device(sock, value, length);
	memcpy(&number, value, sizeof(number));
	switch (name) {
	case SO_BINDTOIFINDEX:
		return set_device_index(sock, number);
	case SO_RCVTIMEO_OLD:
	case SO_RCVTIMEO_NEW:
	case SO_SNDTIMEO_OLD:
	case SO_SNDTIMEO_NEW:
	case SO_LINGER:
		/* Waiting is done in the guest. */
	case SO_DEBUG:
	case SO_BSDCOMPAT:
	case SO_PASSCRED:
	case SO_PASSSEC:
	case SO_WIFI_STATUS:
	case SO_NOFCS:
	case SO_SELECT_ERR_QUEUE:
	case SO_CNX_ADVICE:
	case SO_TXREHASH:
	case SO_LOCK_FILTER:
	case SO_PASSPIDFD:
	case SO_MARK:
#ifdef SO_PASSRIGHTS
	case SO_PASSRIGHTS:
#endif
#ifdef SO_INQ
	case SO_INQ:
#endif
	case SO_INCOMING_CPU:
	case SO_BUSY_POLL:
	case SO_PREFER_BUSY_POLL:
	case SO_BUSY_POLL_BUDGET:
		/*
		 * Hints, and options about the guest's own network stack: not for the host socket.
		 */
		return sock_setsockopt(sock, SOL_SOCKET, name, KERNEL_SOCKPTR(value), length);
	case SO_PEEK_OFF:
		/* By way of ontime_set_peek_off(). */
	case SO_ZEROCOPY:
		/* For send_notice(): the data is copied. */
		return sock_setsockopt(sock, SOL_SOCKET, name, KERNEL_SOCKPTR(value), length);
	case SO_TYPE:
	case SO_PROTOCOL:
	case SO_DOMAIN:
	case SO_ERROR:
		return -ENOPROTOOPT;
	case SO_ATTACH_FILTER:
	case SO_ATTACH_BPF:
		if (sk->sk_type == SOCK_DGRAM)
			ontime_ahead_never(sk);
		else if (sock->state != SS_UNCONNECTED || READ_ONCE(sk->sk_state) == TCP_LISTEN)
			/* It would see segments, which only the host has: sock_cannot_filter(). */
			return -EOPNOTSUPP;
		fallthrough;
	case SO_DETACH_FILTER:
		return sock_setsockopt(sock, SOL_SOCKET, name, KERNEL_SOCKPTR(value), length);
	case SO_DETACH_REUSEPORT_BPF:
		return sk->sk_reuseport ? -ENOENT : -EINVAL;
	case SO_RESERVE_MEM:
		/*
		 * As where no control group accounts for the memory of sockets. The kernel's own code would take this
		 * for a socket of TCP.
		 */
		return number < 0 ? -EINVAL : -EOPNOTSUPP;
	case SO_ATTACH_REUSEPORT_CBPF:
	case SO_ATTACH_REUSEPORT_EBPF:
		/* The host chooses which socket of a port receives. */
		return -EOPNOTSUPP;
	}
	err = opt_permitted(name, number);
	/* No packet has a mark. */
	if (!err && !number && name == SO_RCVMARK)
		return 0;
	/* Before the host has it: sock.c. */
	if (name == SO_REUSEPORT && number)
		WRITE_ONCE(ontime_sk(sk)->shares, true);
	if (!err)
		err = host_setsockopt(sk, SOL_SOCKET, name, value, length);
	if (err < 0)
		return err;
	switch (name) {
	case SO_SNDBUF:
	case SO_SNDBUFFORCE:
		mirror_buffer(sk, SO_SNDBUF, &sk->sk_sndbuf, SOCK_SNDBUF_LOCK, err);
		return 0;
	case SO_RCVBUF:
	case SO_RCVBUFFORCE:
		mirror_buffer(sk, SO_RCVBUF, &sk->sk_rcvbuf, SOCK_RCVBUF_LOCK, err);
		return 0;
	case SO_TIMESTAMP_OLD:
	case SO_TIMESTAMP_NEW:
	case SO_TIMESTAMPNS_OLD:
	case SO_TIMESTAMPNS_NEW:
		mirror_timestamp(sk, name, number);
		return 0;
	case SO_TIMESTAMPING_OLD:
	case SO_TIMESTAMPING_NEW:
		lock_sock(sk);
		sock_valbool_flag(sk, SOCK_TSTAMP_NEW, name == SO_TIMESTAMPING_NEW);
		release_sock(sk);
		WRITE_ONCE(sk->sk_tsflags, number);
		return 0;
	case SO_RCVLOWAT:
		/* The host limits it by the buffer, or makes the buffer larger. */
		mirror_number(sk, name, &sk->sk_rcvlowat);
		if (!(sk->sk_userlocks & SOCK_RCVBUF_LOCK))
			mirror_number(sk, SO_RCVBUF, &sk->sk_rcvbuf);
		return 0;
	default:
		return sock_setsockopt(sock, SOL_SOCKET, name, KERNEL_SOCKPTR(value), length);
	}
}

struct opt_name {
	int level, name;
};

static bool opt_among(const struct opt_name *options, unsigned int count, int level, int name)
{
	unsigned int i;

	for (i = 0; i < count; i++)
		if (options[i].level == level && options[i].name == name)
			return true;
	return false;
}

/* Options that affect when a receive returns and where it begins. */
static bool opt_of_receiving(int level, int name)
{
	static const struct opt_name options[] = {
		{ SOL_SOCKET, SO_RCVLOWAT }, { SOL_SOCKET, SO_OOBINLINE }, { SOL_SOCKET, SO_PEEK_OFF },
	};

	return opt_among(options, ARRAY_SIZE(options), level, name);
}

/* Options that add control messages to received data. */
static bool opt_of_control(int level, int name)
{
	static const struct opt_name options[] = {
		{ SOL_SOCKET, SO_RXQ_OVFL },
		{ SOL_SOCKET, SO_TIMESTAMP_OLD }, { SOL_SOCKET, SO_TIMESTAMP_NEW },
		{ SOL_SOCKET, SO_TIMESTAMPNS_OLD }, { SOL_SOCKET, SO_TIMESTAMPNS_NEW },
		{ SOL_SOCKET, SO_TIMESTAMPING_OLD }, { SOL_SOCKET, SO_TIMESTAMPING_NEW },
		{ SOL_TCP, TCP_INQ }, { SOL_UDP, UDP_GRO },
		{ SOL_IP, IP_PKTINFO }, { SOL_IP, IP_RECVTTL }, { SOL_IP, IP_RECVTOS }, { SOL_IP, IP_RECVOPTS },
		{ SOL_IP, IP_RETOPTS }, { SOL_IP, IP_RECVORIGDSTADDR }, { SOL_IP, IP_CHECKSUM },
		{ SOL_IP, IP_RECVFRAGSIZE },
		{ SOL_IPV6, IPV6_RECVPKTINFO }, { SOL_IPV6, IPV6_RECVHOPLIMIT }, { SOL_IPV6, IPV6_RECVTCLASS },
		{ SOL_IPV6, IPV6_2292PKTINFO }, { SOL_IPV6, IPV6_2292HOPLIMIT }, { SOL_IPV6, IPV6_2292HOPOPTS },
		{ SOL_IPV6, IPV6_2292DSTOPTS }, { SOL_IPV6, IPV6_2292RTHDR },
		{ SOL_IPV6, IPV6_RECVHOPOPTS }, { SOL_IPV6, IPV6_RECVDSTOPTS }, { SOL_IPV6, IPV6_RECVRTHDR },
		{ SOL_IPV6, IPV6_RECVPATHMTU }, { SOL_IPV6, IPV6_FLOWINFO }, { SOL_IPV6, IPV6_RECVORIGDSTADDR },
		{ SOL_IPV6, IPV6_RECVFRAGSIZE },
	};

	return opt_among(options, ARRAY_SIZE(options), level, name);
}

/*
 * SO_PEEK_OFF, called by sock_setsockopt(). Such a peek must not begin at a message that was
 * received ahead. If the host refuses, the value stays. As in Linux the value is kept here too,
 * where the application reads it.
 */
int ontime_set_peek_off(struct sock *sk, int value)
{
	int err = host_setsockopt(sk, SOL_SOCKET, SO_PEEK_OFF, &value, sizeof(value));

	return err ? err : sk_set_peek_off(sk, value);
}

/* Whether the socket has options of this level; otherwise Linux does not look at the value. */
static bool opt_level_exists(const struct sock *sk, int level)
{
	return level == SOL_SOCKET || level == SOL_IP || (level == SOL_IPV6 && sk->sk_family == AF_INET6) ||
	       level == sk->sk_protocol;
}

/* Options of multicast routers, which only raw sockets have. */
static bool opt_of_router(const struct sock *sk, int level, int name)
{
	return (level == SOL_IP && ip_mroute_opt(name)) ||
	       (level == SOL_IPV6 && sk->sk_family == AF_INET6 && ip6_mroute_opt(name));
}

/*
 * The error for an option that the host does not accept: callers without the needed capability get
 * EPERM, as in Linux.
 */
static int opt_refused(struct sock *sk, int level, int name)
{
	static const struct opt_name privileged[] = {
		{ SOL_IP, IP_IPSEC_POLICY }, { SOL_IP, IP_XFRM_POLICY }, { SOL_IP, IP_TRANSPARENT },
		{ SOL_IPV6, IPV6_IPSEC_POLICY }, { SOL_IPV6, IPV6_XFRM_POLICY }, { SOL_IPV6, IPV6_TRANSPARENT },
		{ SOL_IPV6, IPV6_HOPOPTS }, { SOL_IPV6, IPV6_RTHDRDSTOPTS }, { SOL_IPV6, IPV6_DSTOPTS },
		{ SOL_IPV6, IPV6_JOIN_ANYCAST }, { SOL_TCP, TCP_REPAIR },
	};
	static const struct opt_name repair[] = {
		{ SOL_TCP, TCP_REPAIR_QUEUE }, { SOL_TCP, TCP_REPAIR_WINDOW }, { SOL_TCP, TCP_TIMESTAMP },
	};

	if (opt_of_router(sk, level, name))
		return -EOPNOTSUPP;
	/* Of routing headers Linux does not know each type. */
	if ((level == SOL_IP && name == IP_ROUTER_ALERT) ||
	    (level == SOL_IPV6 && name == IPV6_RTHDR && sk->sk_family == AF_INET6))
		return -EINVAL;
	/* No socket is in repair mode. */
	if (level == sk->sk_protocol && opt_among(repair, ARRAY_SIZE(repair), level, name))
		return -EPERM;
	if (opt_level_exists(sk, level) && opt_among(privileged, ARRAY_SIZE(privileged), level, name) &&
	    !capable(CAP_NET_ADMIN))
		return -EPERM;
	return -ENOPROTOOPT;
}

/*
 * TCP_FASTOPEN_CONNECT: a connect() that waits for data needs the peer's cookie. Without one Linux
 * connects at once, as the host socket does.
 */
static bool opt_fastopen_connect(const struct sock *sk, int level, int name)
{
	return level == SOL_TCP && name == TCP_FASTOPEN_CONNECT && sk->sk_type == SOCK_STREAM;
}

static int set_fastopen_connect(struct socket *sock, const void *from)
{
	struct sock *sk = sock->sk;
	int value;

	memcpy(&value, from, sizeof(value));
	if (value < 0 || value > 1)
		return -EINVAL;
	if (!(READ_ONCE(sock_net(sk)->ipv4.sysctl_tcp_fastopen) & TFO_CLIENT_ENABLE))
		return -EOPNOTSUPP;
	if (sock->state != SS_UNCONNECTED || READ_ONCE(sk->sk_state) == TCP_LISTEN)
		return -EINVAL;
	lock_sock(sk);
	ontime_sk(sk)->tcp.fastopen_connect = value;
	release_sock(sk);
	return 0;
}

/* Options that the host refuses to set, so that they have no value. */
static bool opt_is_empty(const struct sock *sk, int level, int name)
{
	static const struct opt_name options[] = {
		{ SOL_IP, IP_OPTIONS }, { SOL_IPV6, IPV6_HOPOPTS }, { SOL_IPV6, IPV6_RTHDR }, { SOL_IPV6, IPV6_DSTOPTS },
		{ SOL_IPV6, IPV6_RTHDRDSTOPTS },
	};

	return (level == SOL_TCP && (name == TCP_ULP || name == TCP_FASTOPEN_KEY) && sk->sk_type == SOCK_STREAM) ||
	       opt_among(options, ARRAY_SIZE(options), level, name);
}

/* The value 0. */
static bool opt_is_off(const struct sock *sk, int level, int name)
{
	static const struct opt_name options[] = {
		{ SOL_IP, IP_FREEBIND }, { SOL_IP, IP_PASSSEC }, { SOL_IP, IP_TRANSPARENT }, { SOL_IPV6, IPV6_TRANSPARENT },
		{ SOL_IPV6, IPV6_FREEBIND }, { SOL_TCP, TCP_TX_DELAY }, { SOL_UDP, UDP_ENCAP },
	};

	return opt_level_exists(sk, level) && opt_among(options, ARRAY_SIZE(options), level, name);
}

static bool opt_is_zero(const struct sock *sk, int level, int name)
{
	return opt_is_off(sk, level, name) ||
	       (level == SOL_IP && (name == IP_HDRINCL || name == IP_NODEFRAG || name == IP_ROUTER_ALERT)) ||
	       (level == SOL_TCP && name == TCP_REPAIR && sk->sk_type == SOCK_STREAM);
}

/*
 * Sets such an option to what it is: off, or without a header, which as in Linux needs CAP_NET_RAW for most of them.
 * -ENOPROTOOPT for all else.
 */
static int opt_set_nothing(const struct sock *sk, int level, int name, const void *value, unsigned int length)
{
	int number = 0;

	if (opt_is_off(sk, level, name)) {
		if (length < (level == SOL_IP ? 1 : sizeof(number)))
			return -EINVAL;
		/* As in do_ip_setsockopt(), a short value is one byte. */
		memcpy(&number, value, length < sizeof(number) ? 1 : sizeof(number));
		return number ? -ENOPROTOOPT : 0;
	}
	if (!length && level != SOL_TCP && opt_level_exists(sk, level) && opt_is_empty(sk, level, name) &&
	    (level == SOL_IP || name == IPV6_RTHDR || capable(CAP_NET_RAW)))
		return 0;
	/* As where the kernel has no such protocol. */
	if (level == SOL_TCP && name == TCP_ULP && sk->sk_type == SOCK_STREAM)
		return length ? -ENOENT : -EINVAL;
	if (level != SOL_IPV6 || sk->sk_family != AF_INET6)
		return -ENOPROTOOPT;
	if (!length && name == IPV6_2292PKTOPTIONS)
		return 0;
	if ((name == IPV6_JOIN_ANYCAST || name == IPV6_LEAVE_ANYCAST) && length < sizeof(struct ipv6_mreq))
		return -EINVAL;
	/* No socket has joined any. */
	if (name == IPV6_LEAVE_ANYCAST)
		return -ENOENT;
	if (name == IPV6_PKTINFO && length < sizeof(struct in6_pktinfo))
		return -EINVAL;
	return name == IPV6_PKTINFO && !memchr_inv(value, 0, sizeof(struct in6_pktinfo)) ? 0 : -ENOPROTOOPT;
}

/* IPV6_ADDRFORM: as in do_ipv6_setsockopt(), a socket whose peer has an IPv4 address becomes one of IPv4. */
static bool opt_changes_family(const struct sock *sk, int level, int name)
{
	return level == SOL_IPV6 && name == IPV6_ADDRFORM && sk->sk_family == AF_INET6;
}

static int set_family(struct socket *sock, const void *from, unsigned int length)
{
	int family, err;

	if (length < sizeof(family))
		return -EINVAL;
	memcpy(&family, from, sizeof(family));
	if (family != PF_INET)
		return -EINVAL;
	err = host_setsockopt(sock->sk, SOL_IPV6, IPV6_ADDRFORM, &family, sizeof(family));
	if (!err)
		ontime_sk_to_v4(sock);
	return err;
}

static int opt_get(struct sock *sk, int level, int name, void *value, unsigned int length)
{
	int number = 0;

	if (opt_of_router(sk, level, name))
		return -EOPNOTSUPP;
	if (opt_is_empty(sk, level, name))
		return 0;
	if (opt_fastopen_connect(sk, level, name))
		number = ontime_sk(sk)->tcp.fastopen_connect;
	else if (!opt_is_zero(sk, level, name))
		return host_getsockopt(sk, level, name, value, length);
	/* As in do_ip_getsockopt(), a small number fits into one byte. */
	length = level == SOL_IP && length < sizeof(number) ? min(length, 1U) :
		 min_t(unsigned int, length, sizeof(number));
	memcpy(value, &number, length);
	return length;
}

/* What the host has changed with an option, for the copies here. */
static void opt_changed(struct sock *sk, int level, int name, const void *value)
{
	/* The priority follows from the type of service. */
	if (level == SOL_IP && name == IP_TOS)
		mirror_number(sk, SO_PRIORITY, (int *)&sk->sk_priority);
	else if (level == SOL_IPV6 && name == IPV6_V6ONLY)
		WRITE_ONCE(ontime_sk(sk)->only_v6, *(const int *)value != 0);
	else if (sk->sk_type == SOCK_STREAM ? level == SOL_TCP && name == TCP_CORK : level == SOL_UDP && name == UDP_CORK)
		WRITE_ONCE(ontime_sk(sk)->corked, *(const int *)value != 0);
}

/* Sends what is held back for more data: io.c. */
int ontime_opt_uncork(struct sock *sk)
{
	bool stream = sk->sk_type == SOCK_STREAM;
	int off = 0;

	return host_setsockopt(sk, stream ? SOL_TCP : SOL_UDP, stream ? TCP_CORK : UDP_CORK, &off, sizeof(off));
}

/* Options whose length the kernel checks before it reads the value, and before their name. */
static bool opt_is_number(const struct sock *sk, int level, int name)
{
	if (level == SOL_SOCKET)
		return name != SO_BINDTODEVICE;
	if (level != sk->sk_protocol)
		return false;
	return level == SOL_UDP || (name != TCP_CONGESTION && name != TCP_ULP && name != TCP_FASTOPEN_KEY);
}

/* Options of IPv6: as in do_ipv6_setsockopt() no value means the number 0, except for structures. */
static bool opt_may_be_null(const struct sock *sk, int level, int name)
{
	return level == SOL_IPV6 && sk->sk_family == AF_INET6 && name != IPV6_ADD_MEMBERSHIP &&
	       name != IPV6_DROP_MEMBERSHIP && name != IPV6_JOIN_ANYCAST && name != IPV6_LEAVE_ANYCAST &&
	       (name < MCAST_JOIN_GROUP || name > MCAST_MSFILTER);
}

/*
 * Options of which Linux reads a number and nothing behind it, however long the value is said to
 * be. Of others the length has a meaning, or the value is a structure.
 */
static bool opt_reads_number(int level, int name)
{
	static const struct opt_name options[] = {
		{ SOL_SOCKET, SO_REUSEADDR }, { SOL_SOCKET, SO_REUSEPORT }, { SOL_SOCKET, SO_KEEPALIVE },
		{ SOL_SOCKET, SO_BROADCAST }, { SOL_SOCKET, SO_OOBINLINE }, { SOL_SOCKET, SO_PRIORITY },
		{ SOL_SOCKET, SO_SNDBUF }, { SOL_SOCKET, SO_RCVBUF }, { SOL_SOCKET, SO_RCVLOWAT },
		{ SOL_IP, IP_TOS }, { SOL_IP, IP_TTL }, { SOL_IP, IP_RECVERR }, { SOL_IP, IP_MTU_DISCOVER },
		{ SOL_IP, IP_PKTINFO }, { SOL_IP, IP_RECVTTL }, { SOL_IP, IP_RECVTOS },
		{ SOL_IPV6, IPV6_V6ONLY }, { SOL_IPV6, IPV6_UNICAST_HOPS }, { SOL_IPV6, IPV6_RECVERR },
		{ SOL_IPV6, IPV6_RECVPKTINFO }, { SOL_IPV6, IPV6_TCLASS },
		{ SOL_TCP, TCP_NODELAY }, { SOL_TCP, TCP_CORK }, { SOL_TCP, TCP_KEEPIDLE }, { SOL_TCP, TCP_KEEPINTVL },
		{ SOL_TCP, TCP_KEEPCNT }, { SOL_TCP, TCP_QUICKACK }, { SOL_TCP, TCP_USER_TIMEOUT },
		{ SOL_UDP, UDP_CORK }, { SOL_UDP, UDP_SEGMENT }, { SOL_UDP, UDP_GRO },
	};

	return opt_among(options, ARRAY_SIZE(options), level, name);
}

int ontime_setsockopt(struct socket *sock, int level, int name, sockptr_t value, unsigned int length)
{
	u8 small[64] __aligned(sizeof(int)), *copy = small;
	int err, unread;

	if (length < sizeof(int) && opt_is_number(sock->sk, level, name))
		return -EINVAL;
	/* No option that is passed on is longer; the kernel does not read further either. */
	length = min_t(unsigned int, length, OPTION_MAX);
	if (length > sizeof(small)) {
		copy = kmalloc(length, GFP_KERNEL);
		if (!copy)
			return -ENOMEM;
	}
	if (opt_of_control(level, name))
		WRITE_ONCE(ontime_sk(sock->sk)->controls, true);
	if (opt_of_receiving(level, name) || opt_of_control(level, name))
		ontime_ahead_never(sock->sk);
	if (sockptr_is_null(value) && opt_may_be_null(sock->sk, level, name)) {
		memset(copy, 0, length);
		unread = 0;
	} else {
		unread = copy_from_sockptr(copy, value, length);
	}
	if (unread && length - unread >= sizeof(int) && opt_reads_number(level, name)) {
		length = sizeof(int);
		unread = 0;
	}
	if (unread)
		err = opt_level_exists(sock->sk, level) ? -EFAULT : -ENOPROTOOPT;
	else if (level == SOL_SOCKET)
		err = set_sol_socket(sock, name, copy, length);
	else if (opt_fastopen_connect(sock->sk, level, name))
		err = set_fastopen_connect(sock, copy);
	else if (opt_changes_family(sock->sk, level, name))
		err = set_family(sock, copy, length);
	else
		err = opt_set_nothing(sock->sk, level, name, copy, length);
	if (err == -ENOPROTOOPT && !unread && level != SOL_SOCKET)
		err = host_setsockopt(sock->sk, level, name, copy, length);
	if (!err)
		opt_changed(sock->sk, level, name, copy);
	if (copy != small)
		kfree(copy);
	return err == -ENOPROTOOPT ? opt_refused(sock->sk, level, name) : err;
}

/* All levels except SOL_SOCKET, which the kernel answers from struct sock. */
int ontime_getsockopt(struct socket *sock, int level, int name, char __user *value, int __user *length)
{
	struct sock *sk = sock->sk;
	int size, result;
	u8 *copy;

	/* As in ip_getsockopt() and ipv6_getsockopt(). */
	if (!opt_level_exists(sk, level))
		return sk->sk_family == AF_INET ? -EOPNOTSUPP : -ENOPROTOOPT;
	if (get_user(size, length))
		return -EFAULT;
	if (size < 0)
		return -EINVAL;
	size = min_t(int, size, OPTION_MAX);
	copy = kzalloc(max(size, 1), GFP_KERNEL);
	if (!copy)
		return -ENOMEM;
	/* Source filters have an argument in the buffer. Of others less may be there than @length says. */
	if (copy_from_user(copy, value, size) && (name == IP_MSFILTER || name == MCAST_MSFILTER))
		result = -EFAULT;
	else
		result = opt_get(sk, level, name, copy, size);
	if (result >= 0) {
		size = min(result, size);
		result = copy_to_user(value, copy, size) || put_user(size, length) ? -EFAULT : 0;
	}
	kfree(copy);
	return result;
}

/*
 * Data that was received ahead is unread too, and before the mark. For datagrams only the first one
 * counts.
 */
static int opt_query(struct sock *sk, u32 which)
{
	bool filtered = which == ONTIME_QUERY_INQ && ontime_filtered(sk);
	int unread, result;
	bool next;

	if (filtered)
		ontime_filter_pull(sk);
	next = sk->sk_type == SOCK_DGRAM && which == ONTIME_QUERY_INQ && ontime_ahead_holds(ontime_sk(sk));
	unread = ontime_ahead_unread(ontime_sk(sk));
	result = next || filtered ? 0 : ontime_simple(sk, ONTIME_OP_QUERY, which, 0);

	if (result >= 0 && which == ONTIME_QUERY_INQ)
		result += unread;
	else if (result > 0 && which == ONTIME_QUERY_ATMARK && unread)
		result = 0;
	return result;
}

static int opt_query_user(struct socket *sock, u32 which, int __user *number)
{
	int result = opt_query(sock->sk, which);

	return result < 0 ? result : put_user(result, number);
}

/* Called by io_uring (SOCKET_URING_OP_SIOCINQ, _SIOCOUTQ). */
int ontime_sk_ioctl(struct sock *sk, int cmd, int *number)
{
	int result;

	if (cmd != SIOCINQ && cmd != SIOCOUTQ)
		return -ENOIOCTLCMD;
	result = opt_query(sk, cmd == SIOCINQ ? ONTIME_QUERY_INQ : ONTIME_QUERY_OUTQ);
	if (result < 0)
		return result;
	*number = result;
	return 0;
}

/* Ioctls about interfaces and routes refer to the guest's own network. */
int ontime_ioctl(struct socket *sock, unsigned int cmd, unsigned long arg)
{
	int __user *number = (int __user *)arg;

	switch (cmd) {
	case SIOCINQ:
		return opt_query_user(sock, ONTIME_QUERY_INQ, number);
	case SIOCOUTQ:
		return opt_query_user(sock, ONTIME_QUERY_OUTQ, number);
	case SIOCOUTQNSD:
		return opt_query_user(sock, ONTIME_QUERY_OUTQNSD, number);
	case SIOCATMARK:
		return opt_query_user(sock, ONTIME_QUERY_ATMARK, number);
	default:
		return sock->sk->sk_family == AF_INET6 ? inet6_ioctl(sock, cmd, arg) : inet_ioctl(sock, cmd, arg);
	}
}

#ifdef CONFIG_COMPAT
int ontime_compat_ioctl(struct socket *sock, unsigned int cmd, unsigned long arg)
{
	switch (cmd) {
	case SIOCINQ:
	case SIOCOUTQ:
	case SIOCOUTQNSD:
	case SIOCATMARK:
		return ontime_ioctl(sock, cmd, (unsigned long)compat_ptr(arg));
	default:
		return -ENOIOCTLCMD;
	}
}
#endif
