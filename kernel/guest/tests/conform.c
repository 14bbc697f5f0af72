// SPDX-License-Identifier: GPL-2.0-or-later
/* The conformance program: helpers and the order of its sections. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "conform.h"

static const char *current = "";

long say(const char *name, long result)
{
	int err = errno;

	if (result < 0)
		printf("%s %s: %s\n", current, name, strerrorname_np(err));
	else
		printf("%s %s: %ld\n", current, name, result);
	fflush(stdout);
	errno = err;
	return result;
}

void show(const char *name, long value)
{
	printf("%s %s = %ld\n", current, name, value);
	fflush(stdout);
}

void show_poll(const char *name, int fd, short events, int timeout)
{
	struct pollfd poll_fd = { .fd = fd, .events = events };
	int result = poll(&poll_fd, 1, timeout);

	printf("%s poll %s: %d, %#x\n", current, name, result, poll_fd.revents);
	fflush(stdout);
}

void section(const char *name)
{
	current = name;
}

static void must(const char *what, long result)
{
	if (result >= 0)
		return;
	printf("%s cannot go on: %s: %s\n", current, what, strerrorname_np(errno));
	exit(1);
}

static void loopback(int family, struct sockaddr_storage *addr, socklen_t *len)
{
	memset(addr, 0, sizeof(*addr));
	addr->ss_family = family;
	if (family == AF_INET) {
		((struct sockaddr_in *)addr)->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
		*len = sizeof(struct sockaddr_in);
	} else {
		((struct sockaddr_in6 *)addr)->sin6_addr = in6addr_loopback;
		*len = sizeof(struct sockaddr_in6);
	}
}

int port_of(const struct sockaddr_storage *addr)
{
	return ntohs(((const struct sockaddr_in *)addr)->sin_port);
}

static int bound(int family, int type, struct sockaddr_storage *addr, socklen_t *len)
{
	int fd = socket(family, type, 0);

	must("socket", fd);
	loopback(family, addr, len);
	must("bind", bind(fd, (struct sockaddr *)addr, *len));
	must("getsockname", getsockname(fd, (struct sockaddr *)addr, len));
	return fd;
}

int udp_bound(int family, struct sockaddr_storage *addr, socklen_t *len)
{
	return bound(family, SOCK_DGRAM, addr, len);
}

int tcp_listener(int family, struct sockaddr_storage *addr, socklen_t *len)
{
	int fd = bound(family, SOCK_STREAM, addr, len);

	must("listen", listen(fd, 16));
	return fd;
}

/* [0] connected to [1], which was accepted. */
void tcp_pair(int family, int pair[2])
{
	struct sockaddr_storage addr;
	socklen_t len;
	int listener = tcp_listener(family, &addr, &len);

	pair[0] = socket(family, SOCK_STREAM, 0);
	must("socket", pair[0]);
	must("connect", connect(pair[0], (struct sockaddr *)&addr, len));
	pair[1] = accept(listener, NULL, NULL);
	must("accept", pair[1]);
	close(listener);
}

void fill(int fd, int flags)
{
	static char bytes[65536];
	int tries;

	for (tries = 0; tries < 5; tries++) {
		while (send(fd, bytes, sizeof(bytes), flags | MSG_DONTWAIT | MSG_NOSIGNAL) > 0)
			tries = 0;
		usleep(10000);
	}
}

long now_ms(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

static struct {
	pthread_t thread;
	int ms, arg;
	void (*run)(int arg);
} pending;

static void *later_thread(void *unused)
{
	usleep(pending.ms * 1000);
	pending.run(pending.arg);
	return unused;
}

void later(int ms, void (*run)(int), int arg)
{
	pending.ms = ms;
	pending.run = run;
	pending.arg = arg;
	must("thread", -pthread_create(&pending.thread, NULL, later_thread, NULL));
}

void later_join(void)
{
	pthread_join(pending.thread, NULL);
}

/* The sections, or only those whose names are given. The long ones run only where they are named. */
static const struct {
	const char *name;
	void (*run)(int family);
	bool apart;
} sections[] = {
	{ "stream", test_stream, false }, { "connect", test_connect, false }, { "dgram", test_dgram, false },
	{ "options", test_options, false }, { "wait", test_wait, false }, { "epoll", test_epoll, false },
	{ "large", test_large, false }, { "process", test_process, false }, { "kinds", test_kinds, false },
	{ "uring", test_uring, false }, { "filters", test_filters, false }, { "more", test_more, false },
	{ "edges", test_edges, true }, { "pairs", test_pairs, true }, { "lengths", test_lengths, true },
};

static bool wanted(int argc, char **argv, const char *name)
{
	int i;

	for (i = 1; i < argc; i++)
		if (!strcmp(argv[i], name))
			return true;
	return false;
}

int main(int argc, char **argv)
{
	static const int families[] = { AF_INET, AF_INET6 };
	const char *slow = getenv("SLOW");
	char title[64];
	unsigned int f, i;

	/* What hangs is a difference too. A kernel that checks itself is slow. */
	alarm((argc == 1 ? 240 : 600) * (slow ? atoi(slow) : 1));
	if (argc == 2 && !strcmp(argv[1], "whose"))
		return whose();
	if (argc == 3 && !strcmp(argv[1], "filtered"))
		return filtered(argv[2]);
	if (argc == 2 && !strcmp(argv[1], "low-port"))
		return low_port();
	if (argc == 1 || wanted(argc, argv, "create"))
		test_create();
	for (f = 0; f < 2; f++) {
		for (i = 0; i < sizeof(sections) / sizeof(*sections); i++) {
			if (argc == 1 ? sections[i].apart : !wanted(argc, argv, sections[i].name))
				continue;
			snprintf(title, sizeof(title), "%s/%s", f ? "inet6" : "inet", sections[i].name);
			section(title);
			sections[i].run(families[f]);
		}
	}
	printf("end\n");
	return 0;
}
