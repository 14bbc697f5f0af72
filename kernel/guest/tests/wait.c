// SPDX-License-Identifier: GPL-2.0-or-later
/* Waiting: timeouts, signals, other threads, poll, select, epoll. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include "conform.h"

static void send_x(int fd)
{
	send(fd, "x", 1, MSG_NOSIGNAL);
}

static void end(int fd)
{
	shutdown(fd, SHUT_RDWR);
}

static pthread_t main_thread;

static void interrupt(int signal)
{
	pthread_kill(main_thread, signal);
}

static void ignore(int signal)
{
	(void)signal;
}

/* "about MS": whether a wait took as long as it was to. */
static void took(const char *name, long since, long ms)
{
	long time = now_ms() - since;

	show(name, time >= ms - 20 && time < ms + 1500);
}

static void timeouts(int family)
{
	struct timeval timeout = { 0, 200000 };
	struct sockaddr_storage addr;
	socklen_t len;
	int pair[2], listener = tcp_listener(family, &addr, &len), udp = udp_bound(family, &addr, &len);
	static char large[1 << 20];
	long start;
	char byte;

	tcp_pair(family, pair);
	setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
	setsockopt(pair[0], SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
	setsockopt(listener, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
	setsockopt(udp, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
	start = now_ms();
	say("recv", recv(pair[0], &byte, 1, 0));
	took("in time", start, 200);
	start = now_ms();
	say("accept", accept(listener, NULL, NULL));
	took("in time", start, 200);
	start = now_ms();
	say("recv udp", recv(udp, &byte, 1, 0));
	took("in time", start, 200);
	fill(pair[0], 0);
	start = now_ms();
	say("send full", send(pair[0], large, sizeof(large), 0));
	took("in time", start, 200);
	show_poll("full", pair[0], POLLOUT, 0);
	close(pair[0]);
	close(pair[1]);
	close(listener);
	close(udp);
}

static void wakes(int family)
{
	int pair[2];
	char in[8];

	tcp_pair(family, pair);
	later(100, send_x, pair[1]);
	say("recv wakes", recv(pair[0], in, sizeof(in), 0));
	later_join();
	later(100, send_x, pair[1]);
	show_poll("wakes", pair[0], POLLIN, 5000);
	later_join();
	say("recv", recv(pair[0], in, sizeof(in), 0));
	/* A blocked reader is no wall for a writer. */
	later(100, send_x, pair[0]);
	say("recv other way", recv(pair[1], in, sizeof(in), 0));
	later_join();
	later(100, end, pair[0]);
	say("recv ended by shutdown", recv(pair[0], in, sizeof(in), 0));
	later_join();
	close(pair[0]);
	close(pair[1]);
}

static void accept_wakes_connect(int port)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(port),
				    .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	connect(fd, (struct sockaddr *)&addr, sizeof(addr));
	close(fd);
}

static void accepts(int family)
{
	struct sockaddr_storage addr;
	socklen_t len;
	int listener, child;

	if (family != AF_INET)
		return;
	listener = tcp_listener(family, &addr, &len);
	later(100, accept_wakes_connect, port_of(&addr));
	child = accept(listener, NULL, NULL);
	say("accept wakes", child < 0 ? -1 : 0);
	later_join();
	close(child);
	close(listener);
}

static void signals(int family)
{
	struct sigaction action = { .sa_handler = ignore };
	struct timeval timeout = { 5, 0 };
	int pair[2];
	char in[8];

	main_thread = pthread_self();
	sigaction(SIGUSR1, &action, NULL);
	action.sa_flags = SA_RESTART;
	sigaction(SIGUSR2, &action, NULL);
	tcp_pair(family, pair);
	later(100, interrupt, SIGUSR1);
	say("recv interrupted", recv(pair[0], in, sizeof(in), 0));
	later_join();
	/* Nothing was lost by it. */
	send_x(pair[1]);
	say("recv after", recv(pair[0], in, sizeof(in), 0));
	later(100, interrupt, SIGUSR1);
	show_poll("interrupted", pair[0], POLLIN, 5000);
	later_join();
	setsockopt(pair[0], SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
	later(100, interrupt, SIGUSR2);
	say("recv with a timeout is not restarted", recv(pair[0], in, sizeof(in), 0));
	later_join();
	close(pair[0]);
	close(pair[1]);
}

static void *restarted(void *arg)
{
	usleep(100000);
	pthread_kill(main_thread, SIGUSR2);
	usleep(100000);
	send(*(int *)arg, "y", 1, 0);
	return NULL;
}

static void restarts(int family)
{
	pthread_t thread;
	int pair[2];
	char in[8];

	tcp_pair(family, pair);
	pthread_create(&thread, NULL, restarted, &pair[1]);
	say("recv restarted", recv(pair[0], in, sizeof(in), 0));
	pthread_join(thread, NULL);
	close(pair[0]);
	close(pair[1]);
}

static void waitalls(int family)
{
	int pair[2];
	char in[8];

	tcp_pair(family, pair);
	send(pair[1], "abc", 3, 0);
	later(100, send_x, pair[1]);
	say("waitall", recv(pair[0], in, 4, MSG_WAITALL));
	later_join();
	send(pair[1], "abc", 3, 0);
	later(100, send_x, pair[1]);
	say("waitall trunc", recv(pair[0], in, 4, MSG_WAITALL | MSG_TRUNC));
	later_join();
	send(pair[1], "abc", 3, 0);
	later(100, end, pair[1]);
	say("waitall ended", recv(pair[0], in, 8, MSG_WAITALL));
	later_join();
	close(pair[0]);
	close(pair[1]);
}

static void selects(int family)
{
	struct timeval timeout = { 2, 0 };
	fd_set in, out;
	int pair[2];

	tcp_pair(family, pair);
	send_x(pair[1]);
	show_poll("ready", pair[0], POLLIN, 2000);
	FD_ZERO(&in);
	FD_ZERO(&out);
	FD_SET(pair[0], &in);
	FD_SET(pair[1], &in);
	FD_SET(pair[1], &out);
	say("select", select(pair[1] + 1, &in, &out, NULL, &timeout));
	show("readable", FD_ISSET(pair[0], &in));
	show("not readable", FD_ISSET(pair[1], &in));
	show("writable", FD_ISSET(pair[1], &out));
	close(pair[0]);
	close(pair[1]);
}

void test_wait(int family)
{
	timeouts(family);
	wakes(family);
	accepts(family);
	signals(family);
	restarts(family);
	waitalls(family);
	selects(family);
}

static void epoll_once(const char *name, int ep, int timeout)
{
	struct epoll_event event = {};
	int result = epoll_wait(ep, &event, 1, timeout);

	say(name, result);
	show("events", result > 0 ? event.events : 0);
}

static void epolls(int family, unsigned int edge)
{
	struct epoll_event event = { .events = EPOLLIN | EPOLLRDHUP | edge };
	int ep = epoll_create1(0), pair[2];
	char in[8];

	tcp_pair(family, pair);
	say("add", epoll_ctl(ep, EPOLL_CTL_ADD, pair[0], &event));
	epoll_once("nothing", ep, 0);
	send(pair[1], "ab", 2, 0);
	epoll_once("data", ep, 2000);
	epoll_once("same data", ep, 100);
	send(pair[1], "cd", 2, 0);
	epoll_once("more data", ep, 2000);
	say("recv some", recv(pair[0], in, 1, 0));
	epoll_once("rest", ep, 100);
	say("recv rest", recv(pair[0], in, sizeof(in), MSG_WAITALL | MSG_DONTWAIT));
	epoll_once("drained", ep, 100);
	shutdown(pair[1], SHUT_WR);
	epoll_once("half closed", ep, 2000);
	event.events = EPOLLOUT | edge;
	say("mod", epoll_ctl(ep, EPOLL_CTL_MOD, pair[0], &event));
	epoll_once("writable", ep, 2000);
	epoll_once("still writable", ep, 100);
	close(pair[0]);
	close(pair[1]);
	close(ep);
}

/* Receives all that was sent. */
static void drain(int fd)
{
	static char bytes[65536];
	struct pollfd one = { .fd = fd, .events = POLLIN };

	while (poll(&one, 1, 500) > 0 && recv(fd, bytes, sizeof(bytes), MSG_DONTWAIT) > 0)
		;
}

/*
 * An edge-triggered poller is woken by what it waits for and by nothing else: not by room to send after the other end
 * has said that it sends no more, and not by data while it waits for room.
 */
static void edges_of_one_kind(int family)
{
	struct epoll_event event = { .events = EPOLLIN | EPOLLRDHUP | EPOLLET };
	int ep = epoll_create1(0), pair[2];

	tcp_pair(family, pair);
	say("add for data", epoll_ctl(ep, EPOLL_CTL_ADD, pair[0], &event));
	shutdown(pair[1], SHUT_WR);
	epoll_once("the end", ep, 2000);
	fill(pair[0], 0);
	epoll_once("full", ep, 100);
	drain(pair[1]);
	show_poll("room", pair[0], POLLOUT, 2000);
	epoll_once("room behind the end", ep, 300);
	close(pair[0]);
	close(pair[1]);
	tcp_pair(family, pair);
	event.events = EPOLLOUT | EPOLLET;
	say("add for room", epoll_ctl(ep, EPOLL_CTL_ADD, pair[0], &event));
	epoll_once("room", ep, 2000);
	send(pair[1], "ab", 2, 0);
	show_poll("data", pair[0], POLLIN, 2000);
	epoll_once("data and no room", ep, 300);
	shutdown(pair[0], SHUT_RD);
	event.events = EPOLLIN | EPOLLET;
	say("mod for data", epoll_ctl(ep, EPOLL_CTL_MOD, pair[0], &event));
	epoll_once("data after shutdown", ep, 2000);
	send(pair[1], "cd", 2, 0);
	epoll_once("more data after shutdown", ep, 2000);
	close(pair[0]);
	close(pair[1]);
	close(ep);
}

void test_epoll(int family)
{
	edges_of_one_kind(family);
	epolls(family, 0);
	epolls(family, EPOLLET);
	epolls(family, EPOLLONESHOT);
}
