// SPDX-License-Identifier: GPL-2.0-or-later
/* Making sockets, streams and connecting. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <unistd.h>

#include "conform.h"

static int option(int fd, int level, int name)
{
	int value = -1;
	socklen_t len = sizeof(value);

	if (getsockopt(fd, level, name, &value, &len))
		return -errno;
	return value;
}

void test_create(void)
{
	static const int cases[][3] = {
		{ AF_INET, SOCK_STREAM, 0 }, { AF_INET, SOCK_STREAM, IPPROTO_TCP }, { AF_INET, SOCK_DGRAM, 0 },
		{ AF_INET, SOCK_DGRAM, IPPROTO_UDP }, { AF_INET, SOCK_STREAM, IPPROTO_UDP }, { AF_INET, SOCK_DGRAM, IPPROTO_TCP },
		{ AF_INET6, SOCK_STREAM, 0 }, { AF_INET6, SOCK_DGRAM, IPPROTO_UDP }, { AF_INET, SOCK_SEQPACKET, 0 },
		{ AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0 }, { AF_INET, SOCK_STREAM, 1000 },
		{ AF_UNIX, SOCK_STREAM, 0 },
	};
	unsigned int i;
	int fd, pair[2];

	section("create");
	for (i = 0; i < sizeof(cases) / sizeof(*cases); i++) {
		fd = socket(cases[i][0], cases[i][1], cases[i][2]);
		if (say("socket", fd < 0 ? -1 : 0) < 0)
			continue;
		show("SO_DOMAIN", option(fd, SOL_SOCKET, SO_DOMAIN));
		show("SO_TYPE", option(fd, SOL_SOCKET, SO_TYPE));
		show("SO_PROTOCOL", option(fd, SOL_SOCKET, SO_PROTOCOL));
		show("SO_ACCEPTCONN", option(fd, SOL_SOCKET, SO_ACCEPTCONN));
		show("O_NONBLOCK", !!(fcntl(fd, F_GETFL) & O_NONBLOCK));
		show("FD_CLOEXEC", fcntl(fd, F_GETFD));
		show_poll("fresh", fd, POLLIN | POLLOUT, 0);
		close(fd);
	}
	say("socketpair", socketpair(AF_INET, SOCK_STREAM, 0, pair));
}

static void stream_errors(int family)
{
	struct sockaddr_storage addr;
	socklen_t len;
	char byte;
	int fd = socket(family, SOCK_STREAM, 0), listener;

	say("recv unconnected", recv(fd, &byte, 1, MSG_DONTWAIT));
	say("send unconnected", send(fd, "x", 1, MSG_NOSIGNAL));
	say("accept not listening", accept(fd, NULL, NULL));
	say("shutdown unconnected", shutdown(fd, SHUT_WR));
	say("shutdown bad", shutdown(fd, 7));
	say("getpeername unconnected", getpeername(fd, (struct sockaddr *)&addr, &len));
	len = sizeof(addr);
	say("getsockname unbound", getsockname(fd, (struct sockaddr *)&addr, &len));
	show("port unbound", port_of(&addr));
	show("name length", len);
	say("bind short", bind(fd, (struct sockaddr *)&addr, 3));
	addr.ss_family = AF_UNIX;
	say("bind family", bind(fd, (struct sockaddr *)&addr, len));
	addr.ss_family = family == AF_INET ? AF_INET6 : AF_INET;
	say("bind other family", bind(fd, (struct sockaddr *)&addr, sizeof(addr)));
	say("connect other family", connect(fd, (struct sockaddr *)&addr, sizeof(addr)));
	addr.ss_family = AF_UNSPEC;
	say("bind no family", bind(fd, (struct sockaddr *)&addr, len));
	close(fd);

	listener = tcp_listener(family, &addr, &len);
	fd = socket(family, SOCK_STREAM, 0);
	say("bind in use", bind(fd, (struct sockaddr *)&addr, len));
	say("bind again", bind(listener, (struct sockaddr *)&addr, len));
	show("SO_ACCEPTCONN", option(listener, SOL_SOCKET, SO_ACCEPTCONN));
	say("connect a listener", connect(listener, (struct sockaddr *)&addr, len));
	say("connect a listener, short", connect(listener, (struct sockaddr *)&addr, 3));
	say("connect a listener, shorter", connect(listener, (struct sockaddr *)&addr, 1));
	fcntl(listener, F_SETFL, O_NONBLOCK);
	say("accept nobody", accept(listener, NULL, NULL));
	show_poll("listener", listener, POLLIN | POLLOUT, 0);
	say("recv on listener", recv(listener, &byte, 1, MSG_DONTWAIT));
	close(fd);
	close(listener);
	/* The port is free at once. */
	fd = socket(family, SOCK_STREAM, 0);
	say("bind after close", bind(fd, (struct sockaddr *)&addr, len));
	close(fd);
}

static void stream_data(int family)
{
	char in[64] = "", *parts[] = { "one", "two", "three" };
	struct iovec iov[3];
	int pair[2], i, queued;
	/* Bytes that are dropped need no place. */
	void *volatile nowhere = NULL;

	tcp_pair(family, pair);
	show_poll("connected", pair[0], POLLIN | POLLOUT, 0);
	say("send", send(pair[0], "hello", 5, 0));
	show_poll("data", pair[1], POLLIN | POLLRDHUP, 2000);
	say("FIONREAD", ioctl(pair[1], FIONREAD, &queued));
	show("queued", queued);
	say("peek", recv(pair[1], in, 3, MSG_PEEK));
	say("recv", recv(pair[1], in, sizeof(in), 0));
	show("same", !memcmp(in, "hello", 5));
	show_poll("drained", pair[1], POLLIN, 0);
	say("recv nothing", recv(pair[1], in, sizeof(in), MSG_DONTWAIT));
	for (i = 0; i < 3; i++)
		iov[i] = (struct iovec){ parts[i], strlen(parts[i]) };
	say("writev", writev(pair[0], iov, 3));
	say("waitall", recv(pair[1], in, 11, MSG_WAITALL));
	show("same", !memcmp(in, "onetwothree", 11));
	say("send trunc", send(pair[0], "discard me", 10, 0));
	show_poll("data", pair[1], POLLIN, 2000);
	memset(in, 'z', sizeof(in));
	say("recv trunc", recv(pair[1], in, 7, MSG_TRUNC));
	show("untouched", in[0] == 'z');
	say("recv rest", recv(pair[1], in, sizeof(in), 0));
	say("send trunc all", send(pair[0], "discard me, too", 15, 0));
	memset(in, 'z', sizeof(in));
	say("peek trunc", recv(pair[1], in, 11, MSG_PEEK | MSG_TRUNC));
	say("recv trunc waitall", recv(pair[1], in, 12, MSG_TRUNC | MSG_WAITALL));
	show("untouched", in[0] == 'z');
	say("recv rest", recv(pair[1], in, sizeof(in), 0));
	say("send nowhere", send(pair[0], "nowhere", 7, 0));
	show_poll("data", pair[1], POLLIN, 2000);
	say("recv nowhere", recv(pair[1], nowhere, 100000, MSG_TRUNC));
	say("recv nothing", recv(pair[1], in, sizeof(in), MSG_DONTWAIT));
	say("send 0", send(pair[0], "", 0, 0));
	say("send oob", send(pair[0], "!", 1, MSG_OOB));
	show_poll("oob", pair[1], POLLPRI, 2000);
	say("recv oob", recv(pair[1], in, 1, MSG_OOB));
	say("ioctl SIOCATMARK", ioctl(pair[1], 0x8905, &queued));
	show("at mark", queued);

	say("shutdown write", shutdown(pair[0], SHUT_WR));
	say("send after", send(pair[0], "x", 1, MSG_NOSIGNAL));
	show_poll("half closed", pair[1], POLLIN | POLLRDHUP, 2000);
	say("recv end", recv(pair[1], in, sizeof(in), 0));
	say("send back", send(pair[1], "back", 4, 0));
	say("recv back", recv(pair[0], in, sizeof(in), 0));
	close(pair[1]);
	show_poll("closed", pair[0], POLLIN | POLLRDHUP, 2000);
	say("recv closed", recv(pair[0], in, sizeof(in), 0));
	close(pair[0]);
}

static void stream_reset(int family)
{
	struct linger abort = { .l_onoff = 1, .l_linger = 0 };
	char in[8];
	int pair[2];

	tcp_pair(family, pair);
	say("linger 0", setsockopt(pair[1], SOL_SOCKET, SO_LINGER, &abort, sizeof(abort)));
	close(pair[1]);
	show_poll("reset", pair[0], POLLIN | POLLRDHUP, 2000);
	say("recv reset", recv(pair[0], in, sizeof(in), 0));
	say("recv after reset", recv(pair[0], in, sizeof(in), 0));
	say("send after reset", send(pair[0], "x", 1, MSG_NOSIGNAL));
	close(pair[0]);

	tcp_pair(family, pair);
	setsockopt(pair[1], SOL_SOCKET, SO_LINGER, &abort, sizeof(abort));
	close(pair[1]);
	show_poll("reset", pair[0], POLLIN, 2000);
	show("SO_ERROR", option(pair[0], SOL_SOCKET, SO_ERROR));
	show("SO_ERROR again", option(pair[0], SOL_SOCKET, SO_ERROR));
	say("recv", recv(pair[0], in, sizeof(in), 0));
	close(pair[0]);
}

static volatile sig_atomic_t pipes;

static void on_pipe(int signal)
{
	(void)signal;
	pipes++;
}

static void stream_sigpipe(int family)
{
	int pair[2];

	signal(SIGPIPE, on_pipe);
	tcp_pair(family, pair);
	shutdown(pair[0], SHUT_WR);
	say("write after shutdown", write(pair[0], "x", 1));
	show("SIGPIPE", pipes);
	say("send nosignal", send(pair[0], "x", 1, MSG_NOSIGNAL));
	show("SIGPIPE", pipes);
	pipes = 0;
	signal(SIGPIPE, SIG_DFL);
	close(pair[0]);
	close(pair[1]);
}

static void stream_accept4(int family)
{
	struct sockaddr_storage addr, peer, local;
	socklen_t len, peer_len = sizeof(peer), local_len = sizeof(local);
	int listener = tcp_listener(family, &addr, &len), fd = socket(family, SOCK_STREAM, 0), child;

	connect(fd, (struct sockaddr *)&addr, len);
	getsockname(fd, (struct sockaddr *)&local, &local_len);
	child = accept4(listener, (struct sockaddr *)&peer, &peer_len, SOCK_NONBLOCK | SOCK_CLOEXEC);
	say("accept4", child < 0 ? -1 : 0);
	show("peer length", peer_len);
	show("peer is client", port_of(&peer) == port_of(&local) && peer.ss_family == family);
	show("O_NONBLOCK", !!(fcntl(child, F_GETFL) & O_NONBLOCK));
	show("FD_CLOEXEC", fcntl(child, F_GETFD));
	show("SO_PROTOCOL", option(child, SOL_SOCKET, SO_PROTOCOL));
	show("SO_ACCEPTCONN", option(child, SOL_SOCKET, SO_ACCEPTCONN));
	local_len = sizeof(local);
	say("getsockname child", getsockname(child, (struct sockaddr *)&local, &local_len));
	show("child is at the listener's port", port_of(&local) == port_of(&addr));
	peer_len = sizeof(peer);
	say("getpeername", getpeername(fd, (struct sockaddr *)&peer, &peer_len));
	show("peer is listener", port_of(&peer) == port_of(&addr));
	close(child);
	close(fd);
	close(listener);
}

void test_stream(int family)
{
	stream_errors(family);
	stream_data(family);
	stream_reset(family);
	stream_sigpipe(family);
	stream_accept4(family);
}

static void connect_nonblocking(int family)
{
	struct sockaddr_storage addr;
	socklen_t len;
	int listener = tcp_listener(family, &addr, &len), fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK, 0);
	int result = connect(fd, (struct sockaddr *)&addr, len);

	/* On loopback either is right, by the family's luck. */
	show("in progress or done", !result || errno == EINPROGRESS);
	show_poll("connecting", fd, POLLOUT, 2000);
	show("SO_ERROR", option(fd, SOL_SOCKET, SO_ERROR));
	connect(fd, (struct sockaddr *)&addr, len);
	say("connect again", connect(fd, (struct sockaddr *)&addr, len));
	close(fd);
	close(listener);
}

static void connect_refused(int family)
{
	struct sockaddr_storage addr;
	socklen_t len;
	int listener = tcp_listener(family, &addr, &len), fd;

	close(listener);
	fd = socket(family, SOCK_STREAM, 0);
	say("connect refused", connect(fd, (struct sockaddr *)&addr, len));
	show("SO_ERROR", option(fd, SOL_SOCKET, SO_ERROR));
	say("connect refused again", connect(fd, (struct sockaddr *)&addr, len));
	close(fd);

	fd = socket(family, SOCK_STREAM | SOCK_NONBLOCK, 0);
	show("in progress or refused", connect(fd, (struct sockaddr *)&addr, len) &&
				       (errno == EINPROGRESS || errno == ECONNREFUSED));
	show_poll("refused", fd, POLLIN | POLLOUT, 2000);
	show("SO_ERROR", option(fd, SOL_SOCKET, SO_ERROR));
	show("SO_ERROR again", option(fd, SOL_SOCKET, SO_ERROR));
	close(fd);
}

/* Without its scope an IPv6 address is as long as it was at first. */
static void connect_without_scope(void)
{
	const socklen_t short_len = offsetof(struct sockaddr_in6, sin6_scope_id);
	struct sockaddr_storage addr;
	socklen_t len;
	int listener = tcp_listener(AF_INET6, &addr, &len), fd = socket(AF_INET6, SOCK_STREAM, 0);

	say("connect without scope", connect(fd, (struct sockaddr *)&addr, short_len));
	close(fd);
	close(listener);
	fd = socket(AF_INET6, SOCK_STREAM, 0);
	say("bind without scope", bind(fd, (struct sockaddr *)&addr, short_len));
	say("bind too short", bind(fd, (struct sockaddr *)&addr, short_len - 1));
	close(fd);
}

/* A connection that was accepted is dissolved, and its socket connects to another peer. */
static void connect_accepted(int family)
{
	struct sockaddr none = { .sa_family = AF_UNSPEC };
	struct sockaddr_storage addr, name;
	socklen_t len, name_len = sizeof(name);
	int pair[2], listener;

	tcp_pair(family, pair);
	listener = tcp_listener(family, &addr, &len);
	say("dissolve accepted", connect(pair[1], &none, sizeof(none)));
	say("getpeername dissolved", getpeername(pair[1], (struct sockaddr *)&name, &name_len));
	say("connect accepted", connect(pair[1], (struct sockaddr *)&addr, len));
	name_len = sizeof(name);
	say("getpeername", getpeername(pair[1], (struct sockaddr *)&name, &name_len));
	show("another peer", port_of(&name) == port_of(&addr));
	close(listener);
	close(pair[0]);
	close(pair[1]);
}

/* What was said of a dissolved connection is not said of the next one, however soon that is made. */
static void connect_anew(int family)
{
	struct sockaddr none = { .sa_family = AF_UNSPEC };
	struct sockaddr_storage addr;
	socklen_t len;
	int listener = tcp_listener(family, &addr, &len), fd = socket(family, SOCK_STREAM, 0);
	int i, failed = 0, left = 0, wrong = 0, taken;
	char in;

	for (i = 0; i < 50; i++) {
		failed += !!connect(fd, (struct sockaddr *)&addr, len);
		taken = accept(listener, NULL, NULL);
		failed += send(taken, "x", 1, 0) != 1 || recv(fd, &in, 1, 0) != 1;
		usleep(i * 20);
		left += !!option(fd, SOL_SOCKET, SO_ERROR);
		close(taken);
		failed += !!connect(fd, &none, sizeof(none));
		/* Half of them take the word, half leave it. */
		wrong += i % 2 && option(fd, SOL_SOCKET, SO_ERROR) != ECONNRESET;
	}
	show("connections that failed", failed);
	show("errors left", left);
	show("dissolved without a word", wrong);
	close(fd);
	close(listener);
}

/* An attempt that does not begin leaves the error of the connection before; one that begins clears it. */
static void connect_in_vain(int family)
{
	struct sockaddr none = { .sa_family = AF_UNSPEC };
	struct sockaddr_storage addr, strange;
	socklen_t len;
	int listener = tcp_listener(family, &addr, &len), fd, i;

	strange = addr;
	strange.ss_family = AF_UNIX;
	for (i = 0; i < 4; i++) {
		fd = socket(family, SOCK_STREAM, 0);
		say("connect", connect(fd, (struct sockaddr *)&addr, len));
		say("dissolve", connect(fd, &none, sizeof(none)));
		if (i == 0)
			say("connect to a strange family", connect(fd, (struct sockaddr *)&strange, len));
		else if (i == 1)
			say("connect to a short address", connect(fd, (struct sockaddr *)&addr, 8));
		else if (i == 2)
			say("shutdown", shutdown(fd, SHUT_RDWR));
		else
			say("listen", listen(fd, 1));
		if (i < 2)
			show_poll("after it", fd, POLLIN | POLLOUT, 0);
		say("connect again", i < 2 ? connect(fd, (struct sockaddr *)&strange, len) : 0);
		show("error", option(fd, SOL_SOCKET, SO_ERROR));
		show("error read", option(fd, SOL_SOCKET, SO_ERROR));
		close(fd);
	}
	fd = socket(family, SOCK_STREAM, 0);
	say("connect", connect(fd, (struct sockaddr *)&addr, len));
	say("dissolve", connect(fd, &none, sizeof(none)));
	say("connect to a strange family", connect(fd, (struct sockaddr *)&strange, len));
	say("connect for good", connect(fd, (struct sockaddr *)&addr, len));
	show("no error", option(fd, SOL_SOCKET, SO_ERROR));
	close(fd);
	close(listener);
}

void test_connect(int family)
{
	struct sockaddr_storage addr;
	struct sockaddr none = { .sa_family = AF_UNSPEC };
	socklen_t len;
	char in[4];
	int listener, fd;

	connect_nonblocking(family);
	connect_refused(family);
	connect_accepted(family);
	connect_anew(family);
	connect_in_vain(family);
	if (family == AF_INET6)
		connect_without_scope();
	listener = tcp_listener(family, &addr, &len);
	fd = socket(family, SOCK_STREAM, 0);
	say("connect short", connect(fd, (struct sockaddr *)&addr, 3));
	say("connect", connect(fd, (struct sockaddr *)&addr, len));
	say("connect connected", connect(fd, (struct sockaddr *)&addr, len));
	say("connect connected, shorter", connect(fd, (struct sockaddr *)&addr, 1));
	say("dissolve", connect(fd, &none, sizeof(none)));
	say("recv dissolved", recv(fd, in, sizeof(in), MSG_DONTWAIT));
	say("connect anew", connect(fd, (struct sockaddr *)&addr, len));
	close(fd);
	close(listener);
}
