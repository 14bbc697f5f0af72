// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Data that are held back, by MSG_MORE or by an option, and what sends them: the next send, an option, the end of the
 * socket or of its process, or time.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <netinet/udp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "conform.h"

#define MANY 2000
#define PIECE 97

static int set(int fd, int level, int name, int value)
{
	return setsockopt(fd, level, name, &value, sizeof(value));
}

static long more(int fd, const char *text)
{
	return send(fd, text, strlen(text), MSG_MORE | MSG_NOSIGNAL);
}

/* What arrives within two seconds, as far as it fits. */
static void arrives(const char *name, int fd)
{
	struct pollfd one = { .fd = fd, .events = POLLIN };
	char in[16];

	show(name, poll(&one, 1, 2000));
	say("received", recv(fd, in, sizeof(in), MSG_DONTWAIT));
}

static void end_of(int pair[2])
{
	close(pair[0]);
	close(pair[1]);
}

static void by_send(int pair[2])
{
	say("the rest", send(pair[0], "d", 1, 0));
}

static void by_nodelay(int pair[2])
{
	say("TCP_NODELAY", set(pair[0], IPPROTO_TCP, TCP_NODELAY, 1));
}

static void by_cork(int pair[2])
{
	say("TCP_CORK", set(pair[0], IPPROTO_TCP, TCP_CORK, 1));
	say("off", set(pair[0], IPPROTO_TCP, TCP_CORK, 0));
}

static void by_shutdown(int pair[2])
{
	say("shutdown", shutdown(pair[0], SHUT_WR));
	say("more after shutdown", more(pair[0], "x"));
}

static void by_close(int pair[2])
{
	close(pair[0]);
	pair[0] = -1;
}

static void by_time(int pair[2])
{
	(void)pair;
}

static const struct {
	const char *name;
	void (*send)(int pair[2]);
} ways[] = {
	{ "by a send", by_send }, { "by TCP_NODELAY", by_nodelay }, { "by TCP_CORK", by_cork },
	{ "by shutdown", by_shutdown }, { "by close", by_close }, { "by time", by_time },
};

/* A small part is held back, until it is sent in one of these ways. */
static void stream_ways(int family)
{
	unsigned int i, round, held;
	int pair[2], queued = -1;
	char in[16];

	for (i = 0; i < sizeof(ways) / sizeof(*ways); i++) {
		tcp_pair(family, pair);
		say("more", more(pair[0], "abc"));
		say("SIOCOUTQ", ioctl(pair[0], SIOCOUTQ, &queued));
		show("queued", queued);
		ways[i].send(pair);
		arrives(ways[i].name, pair[1]);
		show_poll("then", pair[1], POLLIN | POLLRDHUP, 100);
		end_of(pair);
	}
	/* A busy kernel is late at times. */
	for (held = 0, round = 0; round < 20; round++) {
		tcp_pair(family, pair);
		set(pair[0], IPPROTO_TCP, TCP_NODELAY, round % 2);
		more(pair[0], "abc");
		held += recv(pair[1], in, sizeof(in), MSG_DONTWAIT) < 0 && errno == EAGAIN;
		end_of(pair);
	}
	show("held back", held > 10);
}

/* Many parts are what they are in one: received by another thread, and unread till the last one was sent. */
static void *reads(void *arg)
{
	int fd = *(int *)arg;
	static char in[MANY * PIECE + 1];

	return (void *)recv(fd, in, sizeof(in), MSG_WAITALL);
}

static void stream_many(int family)
{
	char out[PIECE], in[PIECE];
	int pair[2], i, j, wrong, sent;
	pthread_t thread;
	void *got;

	tcp_pair(family, pair);
	pthread_create(&thread, NULL, reads, &pair[1]);
	memset(out, 'm', sizeof(out));
	for (sent = 0, i = 0; i < MANY; i++)
		sent += send(pair[0], out, PIECE, MSG_MORE);
	show("sent", sent);
	shutdown(pair[0], SHUT_WR);
	pthread_join(thread, &got);
	show("received", (long)got);
	end_of(pair);

	tcp_pair(family, pair);
	for (sent = 0, i = 0; i < 200; i++) {
		memset(out, i, sizeof(out));
		sent += send(pair[0], out, PIECE, i % 10 == 9 ? 0 : MSG_MORE);
	}
	show("sent", sent);
	for (wrong = 0, i = 0; i < 200; i++) {
		if (recv(pair[1], in, PIECE, MSG_WAITALL) != PIECE)
			break;
		for (j = 0; j < PIECE; j++)
			wrong += in[j] != (char)i;
	}
	show("parts", i);
	show("wrong", wrong);
	fill(pair[0], MSG_MORE);
	say("full", send(pair[0], out, PIECE, MSG_MORE | MSG_DONTWAIT));
	end_of(pair);
}

/* The peer resets the connection, or the process ends or is killed, while data are held back. */
static void stream_ends(int family)
{
	struct linger abort = { 1, 0 };
	int pair[2], how, status;
	pid_t child;

	tcp_pair(family, pair);
	say("more", more(pair[0], "abc"));
	setsockopt(pair[1], SOL_SOCKET, SO_LINGER, &abort, sizeof(abort));
	close(pair[1]);
	show_poll("reset", pair[0], POLLIN, 2000);
	say("more after reset", more(pair[0], "abc"));
	say("more after that", more(pair[0], "abc"));
	close(pair[0]);
	pair[0] = socket(family, SOCK_STREAM, 0);
	say("more, unconnected", more(pair[0], "abc"));
	close(pair[0]);
	for (how = 0; how < 3; how++) {
		tcp_pair(family, pair);
		child = fork();
		if (!child) {
			close(pair[1]);
			more(pair[0], "abc");
			if (how == 1)
				kill(getpid(), SIGKILL);
			if (how == 2)
				more(pair[0], "def");
			_exit(0);
		}
		close(pair[0]);
		waitpid(child, &status, 0);
		arrives("of a process that ended", pair[1]);
		arrives("its end", pair[1]);
		close(pair[1]);
	}
}

static void dgram_more(int family)
{
	struct sockaddr_storage a, b;
	socklen_t alen, blen;
	int right = udp_bound(family, &a, &alen), other = udp_bound(family, &b, &blen), left = socket(family, SOCK_DGRAM, 0);
	static char large[60000];
	struct iovec iov[2] = { { "ab", 2 }, { "cd", 2 } };
	struct mmsghdr two[2] = { { .msg_hdr = { .msg_iov = iov, .msg_iovlen = 1 } },
				  { .msg_hdr = { .msg_iov = iov + 1, .msg_iovlen = 1 } } };
	char in[16];
	int i, queued = -1;

	/* The first part says where they go. */
	say("more to", sendto(left, "abc", 3, MSG_MORE, (struct sockaddr *)&a, alen));
	say("nothing", recv(right, in, sizeof(in), MSG_DONTWAIT));
	say("rest to another", sendto(left, "d", 1, 0, (struct sockaddr *)&b, blen));
	arrives("one datagram", right);
	say("none there", recv(other, in, sizeof(in), MSG_DONTWAIT));
	connect(left, (struct sockaddr *)&a, alen);
	say("more", more(left, "abc"));
	say("SIOCOUTQ", ioctl(left, SIOCOUTQ, &queued));
	say("empty rest", send(left, "", 0, 0));
	arrives("one datagram", right);
	say("two messages", sendmmsg(left, two, 2, MSG_MORE));
	say("nothing", recv(right, in, sizeof(in), MSG_DONTWAIT));
	say("rest", send(left, "e", 1, 0));
	arrives("one datagram", right);
	/* Too much for one datagram: all of it is gone. */
	say("large", send(left, large, sizeof(large), MSG_MORE));
	say("too large", send(left, large, sizeof(large), MSG_MORE));
	say("small", send(left, "x", 1, 0));
	arrives("one datagram", right);
	say("UDP_CORK", set(left, IPPROTO_UDP, UDP_CORK, 1));
	for (i = 0; i < 3; i++)
		say("corked", send(left, "abc", 3, 0));
	say("nothing", recv(right, in, sizeof(in), MSG_DONTWAIT));
	say("off", set(left, IPPROTO_UDP, UDP_CORK, 0));
	arrives("one datagram", right);
	/* What is held back goes with the socket. */
	say("more", more(left, "abc"));
	close(left);
	usleep(300000);
	say("nothing", recv(right, in, sizeof(in), MSG_DONTWAIT));
	close(right);
	close(other);
}

void test_more(int family)
{
	stream_ways(family);
	stream_many(family);
	stream_ends(family);
	dgram_more(family);
}
