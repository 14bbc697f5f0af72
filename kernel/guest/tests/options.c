// SPDX-License-Identifier: GPL-2.0-or-later
/* Options: set, then read back. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#include "conform.h"

static const struct option {
	const char *name;
	int level, option, value;
	bool stream, dgram;
	int family;
} table[] = {
#define ANY(l, o, v) { #o, l, o, v, true, true, 0 }
#define TCP(o, v) { #o, IPPROTO_TCP, o, v, true, false, 0 }
#define IP4(o, v) { #o, IPPROTO_IP, o, v, true, true, AF_INET }
#define IP6(o, v) { #o, IPPROTO_IPV6, o, v, true, true, AF_INET6 }
	ANY(SOL_SOCKET, SO_REUSEADDR, 1), ANY(SOL_SOCKET, SO_REUSEPORT, 1), ANY(SOL_SOCKET, SO_KEEPALIVE, 1),
	ANY(SOL_SOCKET, SO_BROADCAST, 1), ANY(SOL_SOCKET, SO_OOBINLINE, 1), ANY(SOL_SOCKET, SO_PRIORITY, 5),
	ANY(SOL_SOCKET, SO_RCVLOWAT, 7), ANY(SOL_SOCKET, SO_TIMESTAMP, 1), ANY(SOL_SOCKET, SO_TIMESTAMPNS, 1),
	ANY(SOL_SOCKET, SO_SNDBUF, 30000), ANY(SOL_SOCKET, SO_RCVBUF, 30000), ANY(SOL_SOCKET, SO_DONTROUTE, 1),
	ANY(SOL_SOCKET, SO_ZEROCOPY, 1), ANY(SOL_SOCKET, SO_ZEROCOPY, 2),
	TCP(TCP_FASTOPEN_CONNECT, 1), TCP(TCP_FASTOPEN_CONNECT, 2),
	ANY(SOL_SOCKET, SO_ERROR, 1), ANY(SOL_SOCKET, SO_TYPE, 1), ANY(SOL_SOCKET, 9999, 1),
	TCP(TCP_NODELAY, 1), TCP(TCP_CORK, 1), TCP(TCP_KEEPIDLE, 77), TCP(TCP_KEEPINTVL, 7), TCP(TCP_KEEPCNT, 3),
	TCP(TCP_USER_TIMEOUT, 5000), TCP(TCP_QUICKACK, 1), TCP(TCP_DEFER_ACCEPT, 0), TCP(TCP_MAXSEG, 1000), TCP(TCP_SYNCNT, 3),
	IP4(IP_TOS, 0x10), IP4(IP_TTL, 33), IP4(IP_PKTINFO, 1), IP4(IP_RECVTOS, 1), IP4(IP_RECVTTL, 1),
	IP4(IP_MULTICAST_TTL, 5), IP4(IP_MULTICAST_LOOP, 0), IP4(IP_MTU_DISCOVER, 2),
	IP6(IPV6_V6ONLY, 1), IP6(IPV6_UNICAST_HOPS, 44), IP6(IPV6_RECVPKTINFO, 1), IP6(IPV6_TCLASS, 0x20),
	IP6(IPV6_MULTICAST_HOPS, 6), IP6(IPV6_MULTICAST_LOOP, 0),
};

static void one(int family, int type, const struct option *option)
{
	char text[80];
	int fd = socket(family, type, 0), value = option->value;
	socklen_t len = sizeof(value);

	snprintf(text, sizeof(text), "%d set %s", type, option->name);
	say(text, setsockopt(fd, option->level, option->option, &value, sizeof(value)));
	value = 0;
	snprintf(text, sizeof(text), "%d get %s", type, option->name);
	say(text, getsockopt(fd, option->level, option->option, &value, &len));
	show("length", len);
	show("value", value);
	snprintf(text, sizeof(text), "%d set short %s", type, option->name);
	say(text, setsockopt(fd, option->level, option->option, &value, 0));
	close(fd);
}

static void info(int family)
{
	struct tcp_info info;
	struct linger linger = { 1, 3 };
	struct timeval timeout = { 1, 500000 };
	socklen_t len = sizeof(info);
	char name[16] = "";
	int pair[2], number;

	tcp_pair(family, pair);
	memset(&info, 0, sizeof(info));
	say("TCP_INFO", getsockopt(pair[0], IPPROTO_TCP, TCP_INFO, &info, &len));
	show("state", info.tcpi_state);
	len = sizeof(name);
	say("TCP_CONGESTION", getsockopt(pair[0], IPPROTO_TCP, TCP_CONGESTION, name, &len));
	show("named", name[0] != 0);
	say("set SO_LINGER", setsockopt(pair[0], SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)));
	memset(&linger, 0, sizeof(linger));
	len = sizeof(linger);
	say("get SO_LINGER", getsockopt(pair[0], SOL_SOCKET, SO_LINGER, &linger, &len));
	show("on", linger.l_onoff);
	show("seconds", linger.l_linger);
	say("set SO_RCVTIMEO", setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout)));
	memset(&timeout, 0, sizeof(timeout));
	len = sizeof(timeout);
	say("get SO_RCVTIMEO", getsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &timeout, &len));
	show("seconds", timeout.tv_sec);
	len = sizeof(number);
	say("unknown level", getsockopt(pair[0], 12345, 1, &number, &len));
	say("unknown option", getsockopt(pair[0], IPPROTO_TCP, 12345, &number, &len));
	len = sizeof(number);
	say("bad address", getsockopt(pair[0], IPPROTO_TCP, TCP_NODELAY, (void *)8, &len));
	say("bad length", setsockopt(pair[0], IPPROTO_TCP, TCP_NODELAY, &number, -1));
	close(pair[0]);
	close(pair[1]);
}

/* What was set on the one that listens holds for the accepted. */
static void inherited(int family)
{
	struct sockaddr_storage addr;
	socklen_t len, size = sizeof(int);
	int listener = tcp_listener(family, &addr, &len), fd = socket(family, SOCK_STREAM, 0), child, value = 1;

	setsockopt(listener, SOL_SOCKET, SO_KEEPALIVE, &value, sizeof(value));
	setsockopt(listener, IPPROTO_TCP, TCP_NODELAY, &value, sizeof(value));
	connect(fd, (struct sockaddr *)&addr, len);
	child = accept(listener, NULL, NULL);
	value = 0;
	say("child SO_KEEPALIVE", getsockopt(child, SOL_SOCKET, SO_KEEPALIVE, &value, &size));
	show("value", value);
	say("child TCP_NODELAY", getsockopt(child, IPPROTO_TCP, TCP_NODELAY, &value, &size));
	show("value", value);
	close(child);
	close(fd);
	close(listener);
}

void test_options(int family)
{
	unsigned int i;

	for (i = 0; i < sizeof(table) / sizeof(*table); i++) {
		if (table[i].family && table[i].family != family)
			continue;
		if (table[i].stream)
			one(family, SOCK_STREAM, &table[i]);
		if (table[i].dgram)
			one(family, SOCK_DGRAM, &table[i]);
	}
	info(family);
	inherited(family);
}
