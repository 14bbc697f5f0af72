// SPDX-License-Identifier: GPL-2.0-or-later
/* Datagrams. */
#define _GNU_SOURCE
#include <errno.h>
#include <netinet/in.h>
#include <poll.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include "conform.h"

static void dgram_basic(int family)
{
	struct sockaddr_storage a, b, from;
	socklen_t alen, blen, from_len = sizeof(from);
	int left = udp_bound(family, &a, &alen), right = udp_bound(family, &b, &blen), queued;
	char in[64] = "";

	show("port given", port_of(&a) != 0);
	show_poll("idle", left, POLLIN | POLLOUT, 0);
	say("send nowhere", send(left, "x", 1, 0));
	say("sendto", sendto(left, "hello", 5, 0, (struct sockaddr *)&b, blen));
	show_poll("datagram", right, POLLIN, 2000);
	say("FIONREAD", ioctl(right, FIONREAD, &queued));
	show("queued", queued);
	say("peek", recvfrom(right, in, sizeof(in), MSG_PEEK, NULL, NULL));
	say("recvfrom short", recvfrom(right, in, 2, 0, (struct sockaddr *)&from, &from_len));
	show("from length", from_len);
	show("from sender", port_of(&from) == port_of(&a));
	say("recv nothing", recv(right, in, sizeof(in), MSG_DONTWAIT));
	sendto(left, "hello", 5, 0, (struct sockaddr *)&b, blen);
	say("recv trunc", recv(right, in, 2, MSG_TRUNC));
	sendto(left, "hello", 5, 0, (struct sockaddr *)&b, blen);
	say("recv trunc waitall", recv(right, in, 8, MSG_TRUNC | MSG_WAITALL));
	say("send empty", sendto(left, "", 0, 0, (struct sockaddr *)&b, blen));
	say("recv empty", recv(right, in, sizeof(in), 0));
	say("listen", listen(left, 1));
	say("accept", accept(left, NULL, NULL));
	say("sendto short name", sendto(left, "x", 1, 0, (struct sockaddr *)&b, 3));
	close(left);
	close(right);
}

/* Addresses whose family is another, or none: what that means depends on the socket's. */
static void dgram_families(int family)
{
	struct sockaddr_storage a, b;
	socklen_t alen, blen;
	int left = udp_bound(family, &a, &alen), right = udp_bound(family, &b, &blen);
	char in[8];

	say("sendto", sendto(left, "x", 1, 0, (struct sockaddr *)&b, sizeof(b)));
	say("recv", recv(right, in, sizeof(in), 0));
	if (family == AF_INET6) {
		say("sendto without scope", sendto(left, "x", 1, 0, (struct sockaddr *)&b,
						   offsetof(struct sockaddr_in6, sin6_scope_id)));
		say("recv without scope", recv(right, in, sizeof(in), MSG_DONTWAIT));
	}
	b.ss_family = AF_UNSPEC;
	say("sendto no family", sendto(left, "x", 1, 0, (struct sockaddr *)&b, blen));
	say("recv no family", recv(right, in, sizeof(in), MSG_DONTWAIT));
	say("sendto no family short", sendto(left, "x", 1, 0, (struct sockaddr *)&b, sizeof(b.ss_family)));
	b.ss_family = AF_UNIX;
	say("sendto family", sendto(left, "x", 1, 0, (struct sockaddr *)&b, blen));
	say("connect family", connect(left, (struct sockaddr *)&b, blen));
	b.ss_family = family;
	connect(left, (struct sockaddr *)&b, blen);
	b.ss_family = AF_UNSPEC;
	say("connected sendto no family", sendto(left, "x", 1, 0, (struct sockaddr *)&b, blen));
	say("recv connected", recv(right, in, sizeof(in), MSG_DONTWAIT));
	if (family == AF_INET) {
		b.ss_family = AF_INET6;
		say("sendto other family", sendto(left, "x", 1, 0, (struct sockaddr *)&b, sizeof(b)));
	}
	close(left);
	left = socket(family, SOCK_DGRAM, 0);
	memset(&a, 0, sizeof(a));
	say("bind any, no family", bind(left, (struct sockaddr *)&a, alen));
	close(left);
	close(right);
}

static void dgram_connected(int family)
{
	struct sockaddr_storage a, b, c, name;
	struct sockaddr none = { .sa_family = AF_UNSPEC };
	socklen_t alen, blen, clen, len = sizeof(name);
	int left = udp_bound(family, &a, &alen), right = udp_bound(family, &b, &blen), other = udp_bound(family, &c, &clen);
	char in[64];

	say("connect", connect(left, (struct sockaddr *)&b, blen));
	say("getpeername", getpeername(left, (struct sockaddr *)&name, &len));
	show("peer", port_of(&name) == port_of(&b));
	say("send", send(left, "hi", 2, 0));
	say("recv", recv(right, in, sizeof(in), 0));
	say("stranger", sendto(other, "no", 2, 0, (struct sockaddr *)&a, alen));
	say("friend", sendto(right, "yes", 3, 0, (struct sockaddr *)&a, alen));
	say("recv friend", recv(left, in, sizeof(in), 0));
	say("recv stranger", recv(left, in, sizeof(in), MSG_DONTWAIT));
	say("sendto elsewhere", sendto(left, "to c", 4, 0, (struct sockaddr *)&c, clen));
	say("recv elsewhere", recv(other, in, sizeof(in), 0));
	close(right);
	say("send to none", send(left, "x", 1, 0));
	show_poll("refused", left, POLLIN, 2000);
	say("recv refused", recv(left, in, sizeof(in), MSG_DONTWAIT));
	say("recv after", recv(left, in, sizeof(in), MSG_DONTWAIT));
	say("dissolve", connect(left, &none, sizeof(none)));
	len = sizeof(name);
	say("getpeername dissolved", getpeername(left, (struct sockaddr *)&name, &len));
	close(left);
	close(other);
}

static void dgram_messages(int family)
{
	struct sockaddr_storage a, b;
	socklen_t alen, blen;
	int left = udp_bound(family, &a, &alen), right = udp_bound(family, &b, &blen), on = 1, i;
	char in[4][16], control[256];
	struct iovec out_iov[4], in_iov[4];
	struct mmsghdr out[4] = {}, got[4] = {};
	struct cmsghdr *c;

	for (i = 0; i < 4; i++) {
		out_iov[i] = (struct iovec){ "datagram", 5 + i };
		out[i].msg_hdr = (struct msghdr){ &b, blen, &out_iov[i], 1, NULL, 0, 0 };
		in_iov[i] = (struct iovec){ in[i], sizeof(in[i]) };
		got[i].msg_hdr = (struct msghdr){ NULL, 0, &in_iov[i], 1, NULL, 0, 0 };
	}
	say("sendmmsg", sendmmsg(left, out, 4, 0));
	say("recvmmsg", recvmmsg(right, got, 4, 0, NULL));
	for (i = 0; i < 4; i++)
		show("length", got[i].msg_len);

	if (family == AF_INET)
		say("IP_PKTINFO", setsockopt(right, IPPROTO_IP, IP_PKTINFO, &on, sizeof(on)));
	else
		say("IPV6_RECVPKTINFO", setsockopt(right, IPPROTO_IPV6, IPV6_RECVPKTINFO, &on, sizeof(on)));
	say("SO_TIMESTAMP", setsockopt(right, SOL_SOCKET, SO_TIMESTAMP, &on, sizeof(on)));
	sendto(left, "info", 4, 0, (struct sockaddr *)&b, blen);
	got[0].msg_hdr = (struct msghdr){ &a, sizeof(a), in_iov, 1, control, sizeof(control), 0 };
	say("recvmsg", recvmsg(right, &got[0].msg_hdr, 0));
	show("flags", got[0].msg_hdr.msg_flags);
	show("control length", got[0].msg_hdr.msg_controllen);
	for (c = CMSG_FIRSTHDR(&got[0].msg_hdr); c; c = CMSG_NXTHDR(&got[0].msg_hdr, c)) {
		show("level", c->cmsg_level);
		show("type", c->cmsg_type);
		show("bytes", c->cmsg_len);
	}
	sendto(left, "info", 4, 0, (struct sockaddr *)&b, blen);
	got[0].msg_hdr = (struct msghdr){ NULL, 0, in_iov, 1, control, 8, 0 };
	say("recvmsg no room", recvmsg(right, &got[0].msg_hdr, 0));
	show("flags", got[0].msg_hdr.msg_flags);
	close(left);
	close(right);
}

static void dgram_sizes(int family)
{
	static const int sizes[] = { 1, 1472, 1536, 1537, 9000, 65000, 65508, 70000 };
	static char out[70000], in[70000];
	struct sockaddr_storage a, b;
	socklen_t alen, blen;
	int left = udp_bound(family, &a, &alen), right = udp_bound(family, &b, &blen);
	struct iovec iov[700];
	struct msghdr msg = { .msg_name = &b, .msg_namelen = blen, .msg_iov = iov, .msg_iovlen = 700 };
	unsigned int i;

	for (i = 0; i < sizeof(out); i++)
		out[i] = i * 7 + i / 251;
	for (i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
		show("size", sizes[i]);
		if (say("sendto", sendto(left, out, sizes[i], 0, (struct sockaddr *)&b, blen)) < 0)
			continue;
		memset(in, 0, sizeof(in));
		say("recv", recv(right, in, sizeof(in), 0));
		show("same", !memcmp(in, out, sizes[i]));
	}
	/* Many pieces, both ways. */
	for (i = 0; i < 700; i++)
		iov[i] = (struct iovec){ out + i * 20, 20 };
	say("sendmsg 700", sendmsg(left, &msg, 0));
	memset(in, 0, sizeof(in));
	for (i = 0; i < 700; i++)
		iov[i] = (struct iovec){ in + i * 20, 20 };
	msg.msg_name = NULL;
	say("recvmsg 700", recvmsg(right, &msg, 0));
	show("same", !memcmp(in, out, 14000));
	say("bad address", sendto(left, (void *)1, 100, 0, (struct sockaddr *)&b, blen));
	say("bad large address", sendto(left, (void *)1, 5000, 0, (struct sockaddr *)&b, blen));
	close(left);
	close(right);
}

static int waiting_sender;
static struct sockaddr_storage waiting_for;
static socklen_t waiting_len;

static void send_large(int size)
{
	static char out[70000];

	memset(out, 'w', sizeof(out));
	sendto(waiting_sender, out, size, 0, (struct sockaddr *)&waiting_for, waiting_len);
}

/*
 * Small ones for which there is much room, several in a row, are received in another way than large
 * ones; which come between them.
 */
static void dgram_streaks(int family)
{
	static const int sizes[] = { 14, 14, 1536, 14, 0, 14, 14, 65000, 14, 1537, 14, 14, 14, 14, 14, 5000,
				     14, 14, 14, 14, 65507, 14 };
	static char out[70000], in[70001];
	struct sockaddr_storage a;
	socklen_t alen;
	int left = udp_bound(family, &a, &alen), right = udp_bound(family, &waiting_for, &waiting_len);
	struct iovec iov[70];
	struct msghdr msg = { .msg_iov = iov, .msg_iovlen = 70 };
	unsigned int i;

	waiting_sender = left;
	for (i = 0; i < sizeof(out); i++)
		out[i] = 1 + (i * 11 + i / 241) % 255;
	for (i = 0; i < 70; i++)
		iov[i] = (struct iovec){ in + i * 1000, 1000 };
	for (i = 0; i < sizeof(sizes) / sizeof(*sizes); i++) {
		sendto(left, out, sizes[i], 0, (struct sockaddr *)&waiting_for, waiting_len);
		say("peek", recv(right, in, sizeof(in), MSG_PEEK));
		show("same", !memcmp(in, out, sizes[i]));
		memset(in, 0, sizeof(in));
		say("recv", i % 3 == 2 ? recvmsg(right, &msg, 0) : recv(right, in, sizeof(in), 0));
		show("same", !memcmp(in, out, sizes[i]) && !in[sizes[i]]);
		say("no more", recv(right, in, sizeof(in), MSG_DONTWAIT));
	}
	for (i = 0; i < 6; i++) {
		sendto(left, out, 14, 0, (struct sockaddr *)&waiting_for, waiting_len);
		say("small", recv(right, in, sizeof(in), 0));
	}
	/* Cut where there is not enough room; the rest is gone. */
	sendto(left, out, 5000, 0, (struct sockaddr *)&waiting_for, waiting_len);
	msg.msg_iovlen = 3;
	say("cut", recvmsg(right, &msg, MSG_TRUNC));
	show("flags", msg.msg_flags);
	say("no more", recv(right, in, sizeof(in), MSG_DONTWAIT));
	/* Waited for. */
	for (i = 0; i < 10; i++) {
		later(50, send_large, i == 7 ? 30000 : 20);
		say("waited", recv(right, in, sizeof(in), 0));
		later_join();
	}
	close(left);
	close(right);
}

/* That no socket of this host has the port is told as soon as the datagram was sent. */
static void dgram_refused(int family)
{
	int round, closed, fd, error, polled = 0, told = 0;
	socklen_t len, size = sizeof(error);
	struct sockaddr_storage gone;
	struct pollfd one;

	for (round = 0; round < 40; round++) {
		closed = udp_bound(family, &gone, &len);
		fd = socket(family, SOCK_DGRAM, 0);
		connect(fd, (struct sockaddr *)&gone, len);
		close(closed);
		if (round % 2)
			send(fd, "x", 1, 0);
		else
			sendto(fd, "x", 1, 0, (struct sockaddr *)&gone, len);
		one = (struct pollfd) { .fd = fd, .events = POLLIN };
		polled += poll(&one, 1, 0) == 1 && one.revents & POLLERR;
		getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
		told += error == ECONNREFUSED;
		close(fd);
	}
	/* A busy kernel is late at times. */
	show("polled at once", polled > 20);
	show("told at once", told > 20);
}

static void dgram_multicast(int family)
{
	struct ip_mreq group = { .imr_interface.s_addr = htonl(INADDR_LOOPBACK) };
	struct sockaddr_storage a;
	socklen_t alen;
	int fd = udp_bound(family, &a, &alen), one = 1;
	struct in_addr lo = { htonl(INADDR_LOOPBACK) };

	group.imr_multiaddr.s_addr = htonl(0xe9fc0101);
	if (family == AF_INET) {
		say("join", setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &group, sizeof(group)));
		say("join again", setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &group, sizeof(group)));
		say("interface", setsockopt(fd, IPPROTO_IP, IP_MULTICAST_IF, &lo, sizeof(lo)));
		say("loop", setsockopt(fd, IPPROTO_IP, IP_MULTICAST_LOOP, &one, sizeof(one)));
		say("leave", setsockopt(fd, IPPROTO_IP, IP_DROP_MEMBERSHIP, &group, sizeof(group)));
		say("leave again", setsockopt(fd, IPPROTO_IP, IP_DROP_MEMBERSHIP, &group, sizeof(group)));
	}
	close(fd);
}

void test_dgram(int family)
{
	dgram_basic(family);
	dgram_families(family);
	dgram_connected(family);
	dgram_refused(family);
	dgram_messages(family);
	dgram_sizes(family);
	dgram_streaks(family);
	dgram_multicast(family);
}
