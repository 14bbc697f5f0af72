// SPDX-License-Identifier: GPL-2.0-or-later
/* What applications meet seldom: bad addresses, stamps, error queues, urgent data, odd lengths of options. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/errqueue.h>
#include <linux/sockios.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "conform.h"

#define SETTLE_US 20000

static int datagrams(int family, int pair[2])
{
	struct sockaddr_storage addr;
	socklen_t len;

	pair[1] = udp_bound(family, &addr, &len);
	pair[0] = socket(family, SOCK_DGRAM, 0);
	return connect(pair[0], (struct sockaddr *)&addr, len);
}

static void quiet(int fd)
{
	int value = -1;
	socklen_t len = sizeof(value);

	show_poll("bits", fd, POLLIN | POLLPRI | POLLRDHUP, 0);
	getsockopt(fd, SOL_SOCKET, SO_ERROR, &value, &len);
	show("SO_ERROR", value);
}

/* Of a stream nothing is lost where the buffer is bad; a datagram is, as in Linux. */
static void bad_addresses(int family)
{
	static const size_t rooms[] = { 4, 1500, 9000 };
	static char text[6000], in[9000];
	int pair[2];
	unsigned int i;

	tcp_pair(family, pair);
	for (i = 0; i < 3; i++) {
		say("bad, nothing there", recv(pair[0], (void *)1, rooms[i], MSG_DONTWAIT));
		send(pair[1], "abc", 3, 0);
		usleep(SETTLE_US);
		say("bad", recv(pair[0], (void *)1, rooms[i], MSG_DONTWAIT));
		say("bad, peeked at", recv(pair[0], (void *)1, rooms[i], MSG_DONTWAIT | MSG_PEEK));
		quiet(pair[0]);
		say("good", recv(pair[0], in, rooms[i], MSG_DONTWAIT));
		show("first", in[0]);
		say("none left", recv(pair[0], in, rooms[i], MSG_DONTWAIT));
	}
	memset(text, 'x', sizeof(text));
	text[0] = 'a';
	send(pair[1], text, sizeof(text), 0);
	usleep(SETTLE_US);
	say("bad, large", recv(pair[0], (void *)1, sizeof(in), MSG_DONTWAIT));
	say("good, large", recv(pair[0], in, sizeof(in), MSG_WAITALL | MSG_DONTWAIT) > 0 ? 1 : -1);
	show("first", in[0]);
	close(pair[0]);
	close(pair[1]);

	datagrams(family, pair);
	for (i = 0; i < 3; i++) {
		say("bad, nothing there", recv(pair[1], (void *)1, rooms[i], MSG_DONTWAIT));
		send(pair[0], "abc", 3, 0);
		send(pair[0], "def", 3, 0);
		usleep(SETTLE_US);
		say("bad", recv(pair[1], (void *)1, rooms[i], MSG_DONTWAIT));
		say("good", recv(pair[1], in, rooms[i], MSG_DONTWAIT));
		show("first", in[0]);
		say("none left", recv(pair[1], in, rooms[i], MSG_DONTWAIT));
	}
	say("bad send", send(pair[0], (void *)1, 3, 0));
	close(pair[0]);
	close(pair[1]);
}

/* A send from bad memory: what is wrong with the socket or the size is told first. */
static void bad_sends(int family)
{
	static const size_t sizes[] = { 3, 9000, 70000 };
	struct linger abort = { 1, 0 };
	static char large[70000];
	struct sockaddr_storage name = { .ss_family = family };
	int datagram = socket(family, SOCK_DGRAM, 0), stream = socket(family, SOCK_STREAM, 0), pair[2];
	unsigned int i;

	for (i = 0; i < 3; i++) {
		say("bad, unconnected", send(stream, (void *)1, sizes[i], MSG_NOSIGNAL));
		say("bad, to nobody", send(datagram, (void *)1, sizes[i], 0));
		say("short name", sendto(datagram, large, sizes[i], 0, (struct sockaddr *)&name, 3));
		say("urgent, short name", sendto(datagram, large, sizes[i], MSG_OOB, (struct sockaddr *)&name, 3));
		tcp_pair(family, pair);
		say("bad, connected", send(pair[0], (void *)1, sizes[i], MSG_NOSIGNAL));
		shutdown(pair[0], SHUT_WR);
		say("bad, shut", send(pair[0], (void *)1, sizes[i], MSG_NOSIGNAL));
		close(pair[0]);
		close(pair[1]);
		tcp_pair(family, pair);
		setsockopt(pair[1], SOL_SOCKET, SO_LINGER, &abort, sizeof(abort));
		close(pair[1]);
		show_poll("reset", pair[0], POLLIN, 2000);
		say("bad, reset", send(pair[0], (void *)1, sizes[i], MSG_NOSIGNAL));
		say("bad, after that", send(pair[0], (void *)1, sizes[i], MSG_NOSIGNAL));
		close(pair[0]);
		datagrams(family, pair);
		say("bad datagram", send(pair[0], (void *)1, sizes[i], 0));
		say("good datagram", send(pair[0], large, sizes[i], 0));
		shutdown(pair[0], SHUT_WR);
		say("bad datagram, shut", send(pair[0], (void *)1, sizes[i], 0));
		close(pair[0]);
		close(pair[1]);
	}
	close(datagram);
	close(stream);
}

/* Memory that the kernel can copy and cannot pin, as that of many devices; and room whose end nothing is written to. */
static void odd_memory(int family)
{
	enum { SECRET = 16384, SENT = 5000, MAPPED = 8192, RW = PROT_READ | PROT_WRITE };
	static const int types[] = { SOCK_STREAM, SOCK_DGRAM };
	/* memfd_secret(), which a kernel may lack. */
	int file = syscall(447, 0), pair[2], i, j;
	bool there = file >= 0 && !ftruncate(file, SECRET);
	char *own = mmap(NULL, 16 * MAPPED, RW, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	char *secret = mmap(NULL, SECRET, RW, there ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS, there ? file : -1, 0);
	struct iovec out[] = { { own, 3 }, { secret, SENT } };
	struct iovec in[] = { { own + 8, 3 }, { secret + SECRET - SENT, SENT } };
	struct iovec ends[] = { { own, 2000 }, { own + MAPPED, 4000 } };

	show("memfd_secret()", there);
	if (say("mapped", own == MAP_FAILED || secret == MAP_FAILED ? -1 : 0))
		return;
	mprotect(own + MAPPED, 15 * MAPPED, PROT_NONE);
	for (i = 0; i < 2; i++) {
		if (types[i] == SOCK_STREAM)
			tcp_pair(family, pair);
		else
			datagrams(family, pair);
		memset(secret, 0, SECRET);
		for (j = 0; j < SENT; j++)
			secret[j] = j * 7 + 1;
		say("from it", send(pair[0], secret, SENT, 0));
		say("to it", recv(pair[1], secret + SECRET - SENT, SENT, MSG_WAITALL));
		show("same", !memcmp(secret, secret + SECRET - SENT, SENT));
		say("from two parts", writev(pair[0], out, 2));
		say("to two parts", readv(pair[1], in, 2));
		send(pair[0], "abc", 3, 0);
		say("to less than it says", recv(pair[1], own, 15 * MAPPED, 0));
		show("first", own[0]);
		send(pair[0], "def", 3, 0);
		say("to the first part", readv(pair[1], ends, 2));
		show("first", own[0]);
		close(pair[0]);
		close(pair[1]);
	}
	munmap(own, 16 * MAPPED);
	munmap(secret, SECRET);
	if (there)
		close(file);
}

static volatile bool stopped;

static void receive_badly(int fd)
{
	char *none = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	unsigned int i;

	for (i = 0; !stopped; i++) {
		recv(fd, i % 2 ? none : (void *)1, i % 3 ? 64 : 4000, MSG_DONTWAIT);
		usleep(300);
	}
}

static void *send_bytes(void *fd)
{
	unsigned int i;
	char byte;

	for (i = 0; i < 600; i++) {
		byte = i;
		send(*(int *)fd, &byte, 1, 0);
		/* One by one at times, at others several together. */
		if (i / 32 % 2)
			usleep(500);
	}
	return NULL;
}

/* A thread that has a bad buffer takes nothing from another one. */
static void bad_beside_good(int family)
{
	unsigned int i = 0, wrong = 0;
	pthread_t sender;
	int pair[2], got;
	char in[64];

	tcp_pair(family, pair);
	stopped = false;
	later(0, receive_badly, pair[0]);
	pthread_create(&sender, NULL, send_bytes, &pair[1]);
	while (i < 600 && (got = recv(pair[0], in, sizeof(in), 0)) > 0)
		for (int j = 0; j < got; j++)
			wrong += in[j] != (char)i++;
	stopped = true;
	later_join();
	pthread_join(sender, NULL);
	show("bytes", i);
	show("out of order", wrong);
	close(pair[0]);
	close(pair[1]);
}

static void shut_reading(int fd)
{
	shutdown(fd, SHUT_RD);
}

/* SO_ACCEPTCONN says whether the socket listens, also after two threads began and ended that at the same time. */
static void listen_beside_shutdown(int family)
{
	struct sockaddr_storage addr;
	socklen_t len, size = sizeof(int);
	int fd = tcp_listener(family, &addr, &len), round, told, wrong = 0;

	fcntl(fd, F_SETFL, O_NONBLOCK);
	for (round = 0; round < 100; round++) {
		later(0, shut_reading, fd);
		listen(fd, 1);
		later_join();
		getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &told, &size);
		errno = 0;
		accept(fd, NULL, NULL);
		wrong += told != (errno == EAGAIN);
	}
	show("SO_ACCEPTCONN wrong", wrong);
	close(fd);
}

/* A stamp that comes with the message is not kept. */
static void stamps_beside(int pair[2])
{
	struct timeval before = {}, stamp = {};
	char in[4];
	int on;

	ioctl(pair[1], SIOCGSTAMP, &before);
	for (on = 1; on >= 0; on--) {
		setsockopt(pair[1], SOL_SOCKET, SO_TIMESTAMP, &on, sizeof(on));
		usleep(SETTLE_US);
		send(pair[0], "x", 1, 0);
		recv(pair[1], in, sizeof(in), 0);
		say("SIOCGSTAMP beside SO_TIMESTAMP", ioctl(pair[1], SIOCGSTAMP, &stamp));
		show("another", memcmp(&stamp, &before, sizeof(stamp)) != 0);
	}
}

static void stamps(int family)
{
	struct timeval then = {}, stamp = {};
	char in[4];
	int pair[2], i, one = 1;

	datagrams(family, pair);
	setsockopt(pair[1], SOL_SOCKET, SO_TIMESTAMP, &one, sizeof(one));
	send(pair[0], "x", 1, 0);
	recv(pair[1], in, sizeof(in), 0);
	say("SIOCGSTAMP, none was kept", ioctl(pair[1], SIOCGSTAMP, &stamp));
	close(pair[0]);
	close(pair[1]);

	datagrams(family, pair);
	say("SIOCGSTAMP at first", ioctl(pair[1], SIOCGSTAMP, &stamp));
	for (i = 0; i < 2; i++) {
		gettimeofday(&then, NULL);
		send(pair[0], "x", 1, 0);
		recv(pair[1], in, sizeof(in), 0);
	}
	say("SIOCGSTAMP", ioctl(pair[1], SIOCGSTAMP, &stamp));
	show("of the second", labs(stamp.tv_sec - then.tv_sec) < 5);
	say("SIOCGSTAMPNS", ioctl(pair[1], SIOCGSTAMPNS, &stamp));
	stamps_beside(pair);
	close(pair[0]);
	close(pair[1]);
}

/* Control messages without room for them. */
static void no_room(int family)
{
	int level = family == AF_INET ? IPPROTO_IP : IPPROTO_IPV6, name = family == AF_INET ? IP_PKTINFO : IPV6_RECVPKTINFO;
	char in[8], control[8];
	struct iovec iov = { in, sizeof(in) };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1 };
	int pair[2], one = 1;

	datagrams(family, pair);
	setsockopt(pair[1], level, name, &one, sizeof(one));
	send(pair[0], "abc", 3, 0);
	say("no room", recvmsg(pair[1], &msg, 0));
	show("flags", msg.msg_flags);
	send(pair[0], "abc", 3, 0);
	msg.msg_control = control;
	msg.msg_controllen = sizeof(control);
	say("too little", recvmsg(pair[1], &msg, 0));
	show("flags", msg.msg_flags);
	close(pair[0]);
	close(pair[1]);
}

static void queued_error(int fd)
{
	char in[8], control[512];
	struct iovec iov = { in, sizeof(in) };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };

	say("from the queue", recvmsg(fd, &msg, MSG_ERRQUEUE));
	quiet(fd);
}

/* An error that was read from the queue is not the socket's any more; the next one in the queue is. */
static void error_queue(int family)
{
	int level = family == AF_INET ? IPPROTO_IP : IPPROTO_IPV6, name = family == AF_INET ? IP_RECVERR : IPV6_RECVERR;
	struct sockaddr_storage gone;
	socklen_t len;
	int closed = udp_bound(family, &gone, &len), fd = socket(family, SOCK_DGRAM, 0), one = 1;
	char in[4];

	close(closed);
	setsockopt(fd, level, name, &one, sizeof(one));
	say("empty", recv(fd, in, sizeof(in), MSG_ERRQUEUE));
	say("to nobody", sendto(fd, "x", 1, 0, (struct sockaddr *)&gone, len));
	usleep(SETTLE_US);
	queued_error(fd);
	say("recv", recv(fd, in, sizeof(in), MSG_DONTWAIT));
	say("to nobody", sendto(fd, "x", 1, 0, (struct sockaddr *)&gone, len));
	usleep(SETTLE_US);
	say("to nobody, told", sendto(fd, "y", 1, 0, (struct sockaddr *)&gone, len));
	say("to nobody, again", sendto(fd, "y", 1, 0, (struct sockaddr *)&gone, len));
	usleep(SETTLE_US);
	queued_error(fd);
	queued_error(fd);
	say("recv", recv(fd, in, sizeof(in), MSG_DONTWAIT));
	say("to nobody", sendto(fd, "z", 1, 0, (struct sockaddr *)&gone, len));
	usleep(SETTLE_US);
	say("recv without control", recv(fd, in, sizeof(in), MSG_ERRQUEUE));
	say("recv", recv(fd, in, sizeof(in), MSG_DONTWAIT));
	say("SO_SELECT_ERR_QUEUE", setsockopt(fd, SOL_SOCKET, SO_SELECT_ERR_QUEUE, &one, sizeof(one)));
	say("to nobody", sendto(fd, "z", 1, 0, (struct sockaddr *)&gone, len));
	show_poll("an error to select", fd, POLLPRI, 2000);
	close(fd);
}

static volatile sig_atomic_t urgent;

static void on_urgent(int signal)
{
	(void)signal;
	urgent++;
}

static void at_mark(int fd)
{
	int mark = -1;

	say("SIOCATMARK", ioctl(fd, SIOCATMARK, &mark));
	show("at the mark", mark);
}

static void marks(int family)
{
	struct epoll_event event = { .events = EPOLLIN | EPOLLPRI }, got;
	int pair[2], ep = epoll_create1(0), one = 1, round;
	char in[16];

	signal(SIGURG, on_urgent);
	for (round = 0; round < 2; round++) {
		tcp_pair(family, pair);
		fcntl(pair[0], F_SETOWN, getpid());
		if (round)
			setsockopt(pair[0], SOL_SOCKET, SO_OOBINLINE, &one, sizeof(one));
		epoll_ctl(ep, EPOLL_CTL_ADD, pair[0], &event);
		urgent = 0;
		send(pair[1], "hello", 5, MSG_OOB);
		send(pair[1], "world", 5, 0);
		usleep(5 * SETTLE_US);
		show("SIGURG", urgent);
		say("epoll", epoll_wait(ep, &got, 1, 500));
		show("events", got.events);
		at_mark(pair[0]);
		say("urgent", recv(pair[0], in, 1, MSG_OOB));
		say("to the mark", recv(pair[0], in, sizeof(in), MSG_DONTWAIT));
		at_mark(pair[0]);
		say("epoll behind it", epoll_wait(ep, &got, 1, 500));
		show("events", got.events);
		say("behind it", recv(pair[0], in, sizeof(in), MSG_DONTWAIT));
		say("nothing more", recv(pair[0], in, sizeof(in), MSG_DONTWAIT));
		say("epoll", epoll_wait(ep, &got, 1, 0));
		send(pair[1], "z", 1, MSG_OOB);
		usleep(5 * SETTLE_US);
		show("SIGURG", urgent);
		epoll_ctl(ep, EPOLL_CTL_DEL, pair[0], NULL);
		close(pair[0]);
		close(pair[1]);
	}
	signal(SIGURG, SIG_DFL);
	close(ep);
}

static volatile sig_atomic_t codes;

static void on_code(int signal, siginfo_t *info, void *context)
{
	(void)signal;
	(void)context;
	codes |= 1 << info->si_code;
}

static void watch_by_signal(int fd)
{
	fcntl(fd, F_SETOWN, getpid());
	fcntl(fd, F_SETSIG, SIGRTMIN);
	fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_ASYNC);
	codes = 0;
}

/* A bit for each code: POLL_IN, POLL_OUT and so on. A signal ends a pause. */
static void show_codes(const char *name)
{
	long since = now_ms();

	while (now_ms() - since < 200)
		usleep(SETTLE_US);
	show(name, codes);
	codes = 0;
}

/* Why a signal comes, where the application asks for the reason by F_SETSIG. */
static void signal_codes(int family)
{
	struct sigaction action = { .sa_sigaction = on_code, .sa_flags = SA_SIGINFO | SA_RESTART };
	struct linger abort = { 1, 0 };
	struct sockaddr_storage addr;
	int pair[2], fd;
	socklen_t len;
	char in[4];

	sigaction(SIGRTMIN, &action, NULL);
	tcp_pair(family, pair);
	watch_by_signal(pair[0]);
	send(pair[1], "x", 1, 0);
	show_codes("data");
	recv(pair[0], in, sizeof(in), 0);
	shutdown(pair[1], SHUT_WR);
	show_codes("the other end sends no more");
	close(pair[0]);
	close(pair[1]);

	tcp_pair(family, pair);
	shutdown(pair[0], SHUT_WR);
	watch_by_signal(pair[0]);
	shutdown(pair[1], SHUT_WR);
	show_codes("nor does this one");
	close(pair[0]);
	close(pair[1]);

	tcp_pair(family, pair);
	watch_by_signal(pair[0]);
	setsockopt(pair[1], SOL_SOCKET, SO_LINGER, &abort, sizeof(abort));
	close(pair[1]);
	show_codes("reset");
	close(pair[0]);

	pair[0] = tcp_listener(family, &addr, &len);
	fd = socket(family, SOCK_STREAM, 0);
	watch_by_signal(pair[0]);
	connect(fd, (struct sockaddr *)&addr, len);
	show_codes("a connection");
	close(fd);
	close(pair[0]);

	datagrams(family, pair);
	watch_by_signal(pair[1]);
	send(pair[0], "x", 1, 0);
	show_codes("a datagram");
	close(pair[1]);
	watch_by_signal(pair[0]);
	send(pair[0], "x", 1, 0);
	show_codes("refused");
	close(pair[0]);
	signal(SIGRTMIN, SIG_IGN);
}

/* MSG_DONTWAIT gives all that is there. */
static void at_once(int family)
{
	int pair[2], i, got, wrong = 0;
	char in[64];

	datagrams(family, pair);
	for (i = 0; i < 40; i++)
		send(pair[0], &i, sizeof(i), 0);
	usleep(5 * SETTLE_US);
	for (got = 0; recv(pair[1], in, sizeof(in), MSG_DONTWAIT) > 0; got++)
		wrong += memcmp(in, &got, sizeof(got)) != 0;
	show("datagrams", got);
	show("out of order", wrong);
	close(pair[0]);
	close(pair[1]);
	tcp_pair(family, pair);
	for (i = 0; i < 40; i++)
		send(pair[1], &i, sizeof(i), 0);
	usleep(5 * SETTLE_US);
	for (got = 0; recv(pair[0], in, sizeof(i), MSG_DONTWAIT) > 0; got++)
		wrong += memcmp(in, &got, sizeof(got)) != 0;
	show("messages", got);
	show("out of order", wrong);
	close(pair[0]);
	close(pair[1]);
}

static void accepted_priority(int family)
{
	struct sockaddr_storage addr;
	socklen_t len, size = sizeof(int);
	int listener = tcp_listener(family, &addr, &len), fd = socket(family, SOCK_STREAM, 0), child, value = 5;

	say("SO_PRIORITY", setsockopt(listener, SOL_SOCKET, SO_PRIORITY, &value, sizeof(value)));
	connect(fd, (struct sockaddr *)&addr, len);
	child = accept(listener, NULL, NULL);
	getsockopt(child, SOL_SOCKET, SO_PRIORITY, &value, &size);
	show("accepted", value);
	close(child);
	close(fd);
	close(listener);
}

static void peek_offset(int family)
{
	int pair[2], kind, value;
	socklen_t len;
	char in[8];

	for (kind = 0; kind < 2; kind++) {
		if (kind)
			datagrams(family, pair);
		else
			tcp_pair(family, pair);
		value = 1;
		say("SO_PEEK_OFF", setsockopt(pair[1], SOL_SOCKET, SO_PEEK_OFF, &value, sizeof(value)));
		send(pair[0], "abcdef", 6, 0);
		usleep(SETTLE_US);
		memset(in, 0, sizeof(in));
		say("peek", recv(pair[1], in, 2, MSG_PEEK | MSG_DONTWAIT));
		show("from", in[0]);
		len = sizeof(value);
		getsockopt(pair[1], SOL_SOCKET, SO_PEEK_OFF, &value, &len);
		show("offset", value);
		say("recv", recv(pair[1], in, 2, MSG_DONTWAIT));
		show("from", in[0]);
		getsockopt(pair[1], SOL_SOCKET, SO_PEEK_OFF, &value, &len);
		show("offset", value);
		close(pair[0]);
		close(pair[1]);
	}
}

/* How long the port of a connection is kept that is closed first, while the other end stays open: TCP_LINGER2. */
static void closed_first(int family)
{
	int listener, fd = socket(family, SOCK_STREAM, 0), again = socket(family, SOCK_STREAM, 0), child, seconds = 1, i;
	struct sockaddr_storage addr, own;
	socklen_t len, size = sizeof(own);

	listener = tcp_listener(family, &addr, &len);
	say("TCP_LINGER2", setsockopt(fd, IPPROTO_TCP, TCP_LINGER2, &seconds, sizeof(seconds)));
	connect(fd, (struct sockaddr *)&addr, len);
	child = accept(listener, NULL, NULL);
	getsockname(fd, (struct sockaddr *)&own, &size);
	close(fd);
	say("bind at once", bind(again, (struct sockaddr *)&own, size));
	/* The kernel's own time is 60 s. */
	for (i = 0; i < 200 && bind(again, (struct sockaddr *)&own, size); i++)
		usleep(100000);
	show("bound later", i < 200);
	close(again);
	close(child);
	close(listener);
}

static void send_much(int fd)
{
	static char out[600000];

	send(fd, out, sizeof(out), 0);
}

/* More than one call to the device takes: there is one control message. */
static void told_once(int family)
{
	enum { INQ = 36 };
	static char in[600000];
	char control[256];
	struct iovec iov = { in, sizeof(in) };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };
	struct cmsghdr *told;
	int pair[2], one = 1;

	tcp_pair(family, pair);
	say("TCP_INQ", setsockopt(pair[0], IPPROTO_TCP, INQ, &one, sizeof(one)));
	later(0, send_much, pair[1]);
	say("in parts", recvmsg(pair[0], &msg, MSG_WAITALL));
	later_join();
	show("flags", msg.msg_flags);
	for (told = CMSG_FIRSTHDR(&msg); told; told = CMSG_NXTHDR(&msg, told))
		show("message", told->cmsg_type);
	close(pair[0]);
	close(pair[1]);
}

static void save_syn(int family)
{
	struct sockaddr_storage addr;
	socklen_t len, size = 256;
	int listener = tcp_listener(family, &addr, &len), fd = socket(family, SOCK_STREAM, 0), child, one = 1;
	char syn[256];

	say("TCP_SAVE_SYN", setsockopt(listener, IPPROTO_TCP, TCP_SAVE_SYN, &one, sizeof(one)));
	connect(fd, (struct sockaddr *)&addr, len);
	child = accept(listener, NULL, NULL);
	say("TCP_SAVED_SYN", getsockopt(child, IPPROTO_TCP, TCP_SAVED_SYN, syn, &size));
	show("starts an IP header", (syn[0] & 0xf0) >> 4);
	size = sizeof(syn);
	say("TCP_SAVED_SYN again", getsockopt(child, IPPROTO_TCP, TCP_SAVED_SYN, syn, &size));
	show("length", size);
	close(child);
	close(fd);
	close(listener);
}

static void sources(int family)
{
	struct group_source_req req = { .gsr_interface = 1 };
	struct sockaddr_in *group = (struct sockaddr_in *)&req.gsr_group, *source = (struct sockaddr_in *)&req.gsr_source;
	struct ip_mreq_source old = {};
	struct {
		struct ip_msfilter filter;
		struct in_addr more[3];
	} filter = {};
	socklen_t len = sizeof(filter);
	int fd;

	if (family != AF_INET)
		return;
	fd = socket(family, SOCK_DGRAM, 0);
	group->sin_family = source->sin_family = AF_INET;
	group->sin_addr.s_addr = htonl(0xe8010203);
	source->sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	say("join a source", setsockopt(fd, IPPROTO_IP, MCAST_JOIN_SOURCE_GROUP, &req, sizeof(req)));
	say("join it again", setsockopt(fd, IPPROTO_IP, MCAST_JOIN_SOURCE_GROUP, &req, sizeof(req)));
	say("block", setsockopt(fd, IPPROTO_IP, MCAST_BLOCK_SOURCE, &req, sizeof(req)));
	filter.filter.imsf_multiaddr.s_addr = group->sin_addr.s_addr;
	filter.filter.imsf_interface.s_addr = htonl(INADDR_LOOPBACK);
	filter.filter.imsf_numsrc = 4;
	say("IP_MSFILTER", getsockopt(fd, IPPROTO_IP, IP_MSFILTER, &filter, &len));
	show("sources", filter.filter.imsf_numsrc);
	show("mode", filter.filter.imsf_fmode);
	say("leave a source", setsockopt(fd, IPPROTO_IP, MCAST_LEAVE_SOURCE_GROUP, &req, sizeof(req)));
	say("join the group", setsockopt(fd, IPPROTO_IP, MCAST_JOIN_GROUP, &req, sizeof(struct group_req)));
	old.imr_multiaddr = group->sin_addr;
	old.imr_interface.s_addr = htonl(INADDR_LOOPBACK);
	old.imr_sourceaddr = source->sin_addr;
	say("block", setsockopt(fd, IPPROTO_IP, IP_BLOCK_SOURCE, &old, sizeof(old)));
	say("unblock", setsockopt(fd, IPPROTO_IP, IP_UNBLOCK_SOURCE, &old, sizeof(old)));
	say("too short", setsockopt(fd, IPPROTO_IP, IP_BLOCK_SOURCE, &old, 4));
	close(fd);
}

/* What arrives of two datagrams that @from sends to a group; -1: nothing within a while. */
static void to_group(const char *name, int from, int to, const struct sockaddr_storage *group, socklen_t len)
{
	struct pollfd one = { .fd = to, .events = POLLIN };
	char in[4];

	say("send to the group", sendto(from, name, 1, 0, (const struct sockaddr *)group, len));
	say(name, poll(&one, 1, 300) > 0 ? recv(to, in, sizeof(in), MSG_DONTWAIT) : 0);
}

/* Datagrams of a group arrive from the sources that a member lets in. */
static void let_in(int family)
{
	struct group_source_req req = { .gsr_interface = 1 };
	struct sockaddr_storage name, group = { .ss_family = family };
	int level = family == AF_INET ? IPPROTO_IP : IPPROTO_IPV6, from, to = socket(family, SOCK_DGRAM, 0), lo = 1;
	struct ip_mreqn interface = { .imr_ifindex = 1 };
	socklen_t len;
	struct {
		struct group_filter filter;
		struct sockaddr_storage more[2];
	} filter = { .filter = { .gf_interface = 1 } };
	socklen_t size = sizeof(filter);

	/* The sender's own name is the source. */
	from = udp_bound(family, &name, &len);
	req.gsr_source = name;
	if (family == AF_INET) {
		inet_pton(family, "232.1.2.4", &((struct sockaddr_in *)&group)->sin_addr);
		say("interface", setsockopt(from, level, IP_MULTICAST_IF, &interface, sizeof(interface)));
	} else {
		inet_pton(family, "ff01::7c", &((struct sockaddr_in6 *)&group)->sin6_addr);
		((struct sockaddr_in6 *)&group)->sin6_scope_id = 1;
		say("interface", setsockopt(from, level, IPV6_MULTICAST_IF, &lo, sizeof(lo)));
	}
	req.gsr_group = filter.filter.gf_group = group;
	say("bind", bind(to, (struct sockaddr *)&group, len));
	getsockname(to, (struct sockaddr *)&group, &len);
	to_group("no member", from, to, &group, len);
	say("join", setsockopt(to, level, MCAST_JOIN_SOURCE_GROUP, &req, sizeof(req)));
	to_group("its source", from, to, &group, len);
	say("leave", setsockopt(to, level, MCAST_LEAVE_SOURCE_GROUP, &req, sizeof(req)));
	to_group("left", from, to, &group, len);
	say("join all", setsockopt(to, level, MCAST_JOIN_GROUP, &req, sizeof(struct group_req)));
	to_group("any source", from, to, &group, len);
	say("block", setsockopt(to, level, MCAST_BLOCK_SOURCE, &req, sizeof(req)));
	to_group("blocked", from, to, &group, len);
	filter.filter.gf_numsrc = 2;
	say("MCAST_MSFILTER", getsockopt(to, level, MCAST_MSFILTER, &filter, &size));
	show("sources", filter.filter.gf_numsrc);
	show("mode", filter.filter.gf_fmode);
	say("unblock", setsockopt(to, level, MCAST_UNBLOCK_SOURCE, &req, sizeof(req)));
	to_group("unblocked", from, to, &group, len);
	filter.filter.gf_fmode = MCAST_INCLUDE;
	filter.filter.gf_numsrc = 0;
	say("let none in", setsockopt(to, level, MCAST_MSFILTER, &filter, GROUP_FILTER_SIZE(0)));
	to_group("none let in", from, to, &group, len);
	close(from);
	close(to);
}

/* What each option adds to a datagram: kinds and sizes of messages, and small numbers, which are the same each time. */
static void received_with(int family)
{
	/* IP_RECVFRAGSIZE; IPV6_2292PKTINFO, IPV6_2292HOPLIMIT; UDP_GRO */
	static const struct {
		int level, name, of;
	} options[] = {
		{ SOL_SOCKET, SO_TIMESTAMP, 0 }, { SOL_SOCKET, SO_TIMESTAMPNS, 0 }, { SOL_SOCKET, SO_RXQ_OVFL, 0 },
		{ IPPROTO_UDP, 104, 0 }, { IPPROTO_IP, IP_PKTINFO, AF_INET }, { IPPROTO_IP, IP_RECVTTL, AF_INET },
		{ IPPROTO_IP, IP_RECVTOS, AF_INET }, { IPPROTO_IP, IP_RECVOPTS, AF_INET }, { IPPROTO_IP, IP_RETOPTS, AF_INET },
		{ IPPROTO_IP, IP_ORIGDSTADDR, AF_INET }, { IPPROTO_IP, 25, AF_INET },
		{ IPPROTO_IPV6, IPV6_RECVPKTINFO, AF_INET6 }, { IPPROTO_IPV6, IPV6_RECVHOPLIMIT, AF_INET6 },
		{ IPPROTO_IPV6, IPV6_RECVTCLASS, AF_INET6 }, { IPPROTO_IPV6, IPV6_RECVORIGDSTADDR, AF_INET6 },
		{ IPPROTO_IPV6, IPV6_RECVFRAGSIZE, AF_INET6 }, { IPPROTO_IPV6, 2, AF_INET6 }, { IPPROTO_IPV6, 8, AF_INET6 },
	};
	unsigned int i;

	for (i = 0; i < sizeof(options) / sizeof(*options); i++) {
		union {
			struct cmsghdr head;
			char bytes[256];
		} control = {};
		char in[4], text[32];
		struct iovec iov = { in, sizeof(in) };
		struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control,
				      .msg_controllen = sizeof(control) };
		struct cmsghdr *cmsg;
		int pair[2], one = 1;

		if (options[i].of && options[i].of != family)
			continue;
		datagrams(family, pair);
		snprintf(text, sizeof(text), "with %d/%d", options[i].level, options[i].name);
		say(text, setsockopt(pair[1], options[i].level, options[i].name, &one, sizeof(one)));
		send(pair[0], "abc", 3, 0);
		say("recvmsg", recvmsg(pair[1], &msg, 0));
		show("flags", msg.msg_flags);
		for (cmsg = CMSG_FIRSTHDR(&msg); cmsg; cmsg = CMSG_NXTHDR(&msg, cmsg)) {
			show("level", cmsg->cmsg_level);
			show("type", cmsg->cmsg_type);
			show("bytes", cmsg->cmsg_len);
			if (cmsg->cmsg_len == CMSG_LEN(1) || cmsg->cmsg_len == CMSG_LEN(sizeof(int)))
				show("first", CMSG_DATA(cmsg)[0]);
		}
		close(pair[0]);
		close(pair[1]);
	}
}

/* Every option that is passed on, with values of odd lengths, and read back with odd room. */
void test_lengths(int family)
{
	static const struct {
		int level, name, of;
	} options[] = {
#define ALL(l, n) { l, n, 0 }
		ALL(SOL_SOCKET, SO_DEBUG), ALL(SOL_SOCKET, SO_REUSEADDR), ALL(SOL_SOCKET, SO_DONTROUTE),
		ALL(SOL_SOCKET, SO_BROADCAST), ALL(SOL_SOCKET, SO_KEEPALIVE), ALL(SOL_SOCKET, SO_OOBINLINE),
		ALL(SOL_SOCKET, SO_NO_CHECK), ALL(SOL_SOCKET, SO_PRIORITY), ALL(SOL_SOCKET, SO_LINGER), ALL(SOL_SOCKET, 14),
		ALL(SOL_SOCKET, SO_REUSEPORT), ALL(SOL_SOCKET, SO_PASSCRED), ALL(SOL_SOCKET, SO_RCVLOWAT),
		ALL(SOL_SOCKET, SO_RCVTIMEO), ALL(SOL_SOCKET, SO_SNDTIMEO), ALL(SOL_SOCKET, SO_TIMESTAMP),
		ALL(SOL_SOCKET, SO_TIMESTAMPNS), ALL(SOL_SOCKET, SO_RXQ_OVFL), ALL(SOL_SOCKET, SO_PEEK_OFF),
		ALL(SOL_SOCKET, SO_BUSY_POLL), ALL(SOL_SOCKET, SO_INCOMING_CPU), ALL(SOL_SOCKET, SO_MAX_PACING_RATE),
		ALL(SOL_SOCKET, SO_CNX_ADVICE), ALL(SOL_SOCKET, SO_SELECT_ERR_QUEUE), ALL(SOL_SOCKET, SO_DETACH_FILTER),
		ALL(SOL_SOCKET, SO_SNDLOWAT), ALL(SOL_SOCKET, SO_TYPE), ALL(SOL_SOCKET, 9999), ALL(SOL_SOCKET, SO_MARK),
		ALL(SOL_SOCKET, SO_SNDBUFFORCE), ALL(SOL_SOCKET, SO_RCVBUFFORCE), ALL(SOL_SOCKET, SO_BINDTODEVICE),
		ALL(SOL_SOCKET, 62),
		{ IPPROTO_IP, IP_TOS, AF_INET }, { IPPROTO_IP, IP_TTL, AF_INET }, { IPPROTO_IP, IP_PKTINFO, AF_INET },
		{ IPPROTO_IP, IP_MTU_DISCOVER, AF_INET }, { IPPROTO_IP, IP_RECVERR, AF_INET },
		{ IPPROTO_IP, IP_RECVTTL, AF_INET },
		{ IPPROTO_IP, IP_RECVTOS, AF_INET }, { IPPROTO_IP, IP_RECVOPTS, AF_INET }, { IPPROTO_IP, IP_RETOPTS, AF_INET },
		{ IPPROTO_IP, IP_ORIGDSTADDR, AF_INET }, { IPPROTO_IP, IP_MINTTL, AF_INET },
		{ IPPROTO_IP, IP_CHECKSUM, AF_INET },
		{ IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, AF_INET }, { IPPROTO_IP, 25, AF_INET }, { IPPROTO_IP, 26, AF_INET },
		{ IPPROTO_IP, IP_MULTICAST_TTL, AF_INET }, { IPPROTO_IP, IP_MULTICAST_LOOP, AF_INET },
		{ IPPROTO_IP, IP_MULTICAST_ALL, AF_INET }, { IPPROTO_IP, IP_ADD_MEMBERSHIP, AF_INET },
		{ IPPROTO_IP, 51, AF_INET }, { IPPROTO_IP, 12345, AF_INET }, { IPPROTO_IPV6, IPV6_ADDRFORM, AF_INET6 },
		{ IPPROTO_IPV6, IPV6_V6ONLY, AF_INET6 }, { IPPROTO_IPV6, IPV6_UNICAST_HOPS, AF_INET6 },
		{ IPPROTO_IPV6, IPV6_MULTICAST_HOPS, AF_INET6 }, { IPPROTO_IPV6, IPV6_MULTICAST_LOOP, AF_INET6 },
		{ IPPROTO_IPV6, IPV6_RECVPKTINFO, AF_INET6 }, { IPPROTO_IPV6, IPV6_2292PKTINFO, AF_INET6 },
		{ IPPROTO_IPV6, IPV6_RECVHOPLIMIT, AF_INET6 }, { IPPROTO_IPV6, IPV6_RECVTCLASS, AF_INET6 },
		{ IPPROTO_IPV6, IPV6_TCLASS, AF_INET6 }, { IPPROTO_IPV6, IPV6_DONTFRAG, AF_INET6 },
		{ IPPROTO_IPV6, IPV6_RECVERR, AF_INET6 }, { IPPROTO_IPV6, IPV6_MTU_DISCOVER, AF_INET6 },
		{ IPPROTO_IPV6, IPV6_RECVORIGDSTADDR, AF_INET6 }, { IPPROTO_IPV6, IPV6_RECVFRAGSIZE, AF_INET6 },
		{ IPPROTO_IPV6, IPV6_AUTOFLOWLABEL, AF_INET6 }, { IPPROTO_IPV6, IPV6_MINHOPCOUNT, AF_INET6 },
		{ IPPROTO_IPV6, IPV6_RECVPATHMTU, AF_INET6 }, { IPPROTO_IPV6, 12345, AF_INET6 },
		ALL(IPPROTO_TCP, TCP_NODELAY), ALL(IPPROTO_TCP, TCP_MAXSEG), ALL(IPPROTO_TCP, TCP_CORK),
		ALL(IPPROTO_TCP, TCP_KEEPIDLE), ALL(IPPROTO_TCP, TCP_SYNCNT), ALL(IPPROTO_TCP, TCP_LINGER2),
		ALL(IPPROTO_TCP, TCP_DEFER_ACCEPT), ALL(IPPROTO_TCP, TCP_USER_TIMEOUT), ALL(IPPROTO_TCP, TCP_SAVE_SYN),
		ALL(IPPROTO_TCP, TCP_FASTOPEN), ALL(IPPROTO_TCP, 34), ALL(IPPROTO_TCP, 17), ALL(IPPROTO_TCP, 12345),
		ALL(IPPROTO_UDP, 1), ALL(IPPROTO_UDP, 101), ALL(IPPROTO_UDP, 102), ALL(IPPROTO_UDP, 103), ALL(IPPROTO_UDP, 104),
	};
	static const int sizes[] = { 0, 1, 2, 3, 4, 5, 8, 16, 64, 2000, 4000 };
	static const int types[] = { SOCK_STREAM, SOCK_DGRAM };
	static char value[4096];
	unsigned int i, j, k;
	char text[64];

	for (i = 0; i < sizeof(options) / sizeof(*options); i++) {
		if (options[i].of && options[i].of != family)
			continue;
		for (j = 0; j < 2; j++) {
			for (k = 0; k < sizeof(sizes) / sizeof(*sizes); k++) {
				int fd = socket(family, types[j], 0);
				socklen_t len = sizes[k];

				memset(value, 0, sizeof(value));
				value[0] = 1;
				snprintf(text, sizeof(text), "%d %d/%d of %d", types[j], options[i].level, options[i].name, sizes[k]);
				say(text, setsockopt(fd, options[i].level, options[i].name, value, sizes[k]));
				memset(value, 0x55, sizeof(value));
				if (!say("get", getsockopt(fd, options[i].level, options[i].name, value, &len)))
					printf("%d bytes, %02x %02x %02x %02x %02x\n", len, value[0] & 0xff, value[1] & 0xff,
					       value[2] & 0xff, value[3] & 0xff, value[4] & 0xff);
				close(fd);
			}
		}
	}
}

static void sent_with(int family);

/* What a user without rights is told of options that need them. */
static void without_rights(int family)
{
	static const struct {
		int level, name;
	} options[] = {
		{ SOL_SOCKET, SO_MARK }, { SOL_SOCKET, SO_SNDBUFFORCE }, { SOL_SOCKET, SO_RCVBUFFORCE },
		{ SOL_SOCKET, SO_DEBUG }, { IPPROTO_IP, IP_TRANSPARENT }, { IPPROTO_IP, IP_XFRM_POLICY },
		{ IPPROTO_IPV6, IPV6_TRANSPARENT }, { IPPROTO_IPV6, IPV6_HOPOPTS }, { IPPROTO_IPV6, IPV6_DSTOPTS },
		{ IPPROTO_TCP, TCP_REPAIR }, { IPPROTO_TCP, TCP_TIMESTAMP },
	};
	static const struct ipv6_mreq anycast;
	unsigned int i;
	char text[32];

	fflush(stdout);
	if (fork()) {
		wait(NULL);
		return;
	}
	if (setuid(65534))
		_exit(1);
	for (i = 0; i < sizeof(options) / sizeof(*options); i++) {
		int stream = socket(family, SOCK_STREAM, 0), datagram = socket(family, SOCK_DGRAM, 0), one = 1;

		snprintf(text, sizeof(text), "no right %d/%d", options[i].level, options[i].name);
		say(text, setsockopt(stream, options[i].level, options[i].name, &one, sizeof(one)));
		say(text, setsockopt(datagram, options[i].level, options[i].name, &one, sizeof(one)));
		close(stream);
		close(datagram);
	}
	i = socket(family, SOCK_DGRAM, 0);
	say("no right, anycast", setsockopt(i, IPPROTO_IPV6, IPV6_JOIN_ANYCAST, &anycast, sizeof(anycast)));
	say("no right, to lo", setsockopt(i, SOL_SOCKET, SO_BINDTODEVICE, "lo", 2));
	say("no right, to none", setsockopt(i, SOL_SOCKET, SO_BINDTODEVICE, "", 0));
	sent_with(family);
	_exit(0);
}

static void read_back(int fd, int level, int name)
{
	int value = 0x55555555;
	socklen_t len = sizeof(value);

	say("get", getsockopt(fd, level, name, &value, &len));
	show("value", value);
	show("length", len);
}

/* What outsourced sockets do not have is off: it can be switched off, and read. */
static void switched_off(int family)
{
	static const struct {
		int level, name, of;
	} options[] = {
		{ IPPROTO_IP, IP_FREEBIND, AF_INET }, { IPPROTO_IP, IP_TRANSPARENT, AF_INET }, { IPPROTO_IP, IP_PASSSEC, AF_INET },
		{ IPPROTO_IPV6, IPV6_TRANSPARENT, AF_INET6 }, { IPPROTO_IPV6, IPV6_FREEBIND, AF_INET6 },
		/* IPV6_ROUTER_ALERT_ISOLATE, IPV6_FLOWINFO_SEND, TCP_TX_DELAY, UDP_ENCAP, SO_RCVMARK */
		{ IPPROTO_IPV6, 30, AF_INET6 }, { IPPROTO_IPV6, 33, AF_INET6 }, { IPPROTO_TCP, 37, 0 }, { IPPROTO_UDP, 100, 0 },
		{ SOL_SOCKET, SO_MARK, 0 }, { SOL_SOCKET, 75, 0 },
	}, headers[] = {
		{ IPPROTO_IP, IP_OPTIONS, AF_INET }, { IPPROTO_IPV6, IPV6_HOPOPTS, AF_INET6 },
		{ IPPROTO_IPV6, IPV6_RTHDR, AF_INET6 }, { IPPROTO_IPV6, IPV6_DSTOPTS, AF_INET6 },
	}, repair[] = { { IPPROTO_TCP, TCP_REPAIR_QUEUE, 0 }, { IPPROTO_TCP, TCP_TIMESTAMP, 0 } };
	static const int types[] = { SOCK_STREAM, SOCK_DGRAM };
	unsigned int i, j;
	int value = 0;
	char text[32];

	for (j = 0; j < 2; j++) {
		int fd = socket(family, types[j], 0);

		for (i = 0; i < sizeof(options) / sizeof(*options); i++) {
			if (options[i].of && options[i].of != family)
				continue;
			snprintf(text, sizeof(text), "%d off %d/%d", types[j], options[i].level, options[i].name);
			say(text, setsockopt(fd, options[i].level, options[i].name, &value, sizeof(value)));
			read_back(fd, options[i].level, options[i].name);
			say("one byte", setsockopt(fd, options[i].level, options[i].name, &value, 1));
		}
		for (i = 0; i < sizeof(headers) / sizeof(*headers); i++) {
			if (headers[i].of != family)
				continue;
			snprintf(text, sizeof(text), "%d none %d/%d", types[j], headers[i].level, headers[i].name);
			say(text, setsockopt(fd, headers[i].level, headers[i].name, NULL, 0));
		}
		for (i = 0; i < sizeof(repair) / sizeof(*repair); i++) {
			snprintf(text, sizeof(text), "%d %d/%d", types[j], repair[i].level, repair[i].name);
			say(text, setsockopt(fd, repair[i].level, repair[i].name, &value, sizeof(value)));
		}
		say("to no device", setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, "", 1));
		say("to a missing device", setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, "none0", 5));
		say("short, unknown", setsockopt(fd, j ? IPPROTO_UDP : IPPROTO_TCP, 12345, &value, 2));
		close(fd);
	}
}

/* An option without a value. For IPv6 that is the number 0, but not for structures. */
static void without_a_value(int family)
{
	static const struct {
		int level, name, of, set, least;
	} options[] = {
		{ IPPROTO_IP, IP_TOS, AF_INET, 8, 0 }, { IPPROTO_IP, IP_RECVTTL, AF_INET, 1, 0 },
		{ IPPROTO_IPV6, IPV6_TCLASS, AF_INET6, 8, 0 }, { IPPROTO_IPV6, IPV6_UNICAST_HOPS, AF_INET6, 9, 0 },
		{ IPPROTO_IPV6, IPV6_RECVPKTINFO, AF_INET6, 1, 0 }, { IPPROTO_IPV6, IPV6_ADD_MEMBERSHIP, AF_INET6, 0, 200 },
		{ IPPROTO_IPV6, MCAST_JOIN_GROUP, AF_INET6, 0, 200 },
		{ IPPROTO_IPV6, IPV6_JOIN_ANYCAST, AF_INET6, 0, 200 },
		{ IPPROTO_IPV6, IPV6_LEAVE_ANYCAST, AF_INET6, 0, 200 }, { IPPROTO_UDP, 1, 0, 0, 0 },
		{ SOL_SOCKET, SO_KEEPALIVE, 0, 1, 0 },
	};
	static const int lengths[] = { 0, 2, 4, 8, 200 };
	void *volatile nothing = NULL;
	unsigned int i, j;
	char text[32];

	for (i = 0; i < sizeof(options) / sizeof(*options); i++) {
		int fd = socket(family, SOCK_DGRAM, 0);

		for (j = 0; j < sizeof(lengths) / sizeof(*lengths) && (!options[i].of || options[i].of == family); j++) {
			if (lengths[j] < options[i].least)
				continue;
			setsockopt(fd, options[i].level, options[i].name, &options[i].set, sizeof(options[i].set));
			snprintf(text, sizeof(text), "no value %d/%d", options[i].level, options[i].name);
			say(text, setsockopt(fd, options[i].level, options[i].name, nothing, lengths[j]));
			read_back(fd, options[i].level, options[i].name);
		}
		close(fd);
	}
}

/* Options that are read into no memory, or into less than the length says. */
static void read_badly(int family)
{
	static const struct {
		int level, name;
	} options[] = {
		{ IPPROTO_IP, IP_TTL }, { IPPROTO_IP, 12345 }, { IPPROTO_TCP, TCP_NODELAY }, { IPPROTO_TCP, 12345 },
		{ IPPROTO_IPV6, IPV6_UNICAST_HOPS }, { IPPROTO_IPV6, 12345 }, { 12345, 1 },
	};
	char *end = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) + 4096, text[32];
	int fd = socket(family, SOCK_STREAM, 0);
	void *volatile nothing = NULL;
	socklen_t len;
	unsigned int i;

	mprotect(end, 4096, PROT_NONE);
	for (i = 0; i < sizeof(options) / sizeof(*options); i++) {
		snprintf(text, sizeof(text), "get %d/%d", options[i].level, options[i].name);
		len = 64;
		say(text, getsockopt(fd, options[i].level, options[i].name, end - 4, &len));
		show("length", len);
		len = 4;
		say("into nothing", getsockopt(fd, options[i].level, options[i].name, nothing, &len));
		say("without a length", getsockopt(fd, options[i].level, options[i].name, end - 4, nothing));
	}
	close(fd);
}

/* Options of other sockets than these, and those that say what was received last. */
static void other_options(int family)
{
	/* MRT_INIT, MRT_VERSION, IP_ROUTER_ALERT, TCP_REPAIR, IP_PKTOPTIONS, IPV6_2292PKTOPTIONS */
	static const struct {
		int level, name;
	} options[] = {
		{ IPPROTO_IP, 200 }, { IPPROTO_IP, 206 }, { IPPROTO_IPV6, 200 }, { IPPROTO_IPV6, 206 },
		{ IPPROTO_IP, 5 }, { IPPROTO_TCP, 19 }, { IPPROTO_IP, 9 }, { IPPROTO_IPV6, 6 },
	};
	static const char header[24] = { 0, 2, 77, 1 };
	static const int types[] = { SOCK_STREAM, SOCK_DGRAM };
	char value[256] = "", text[32];
	unsigned int i, j;
	socklen_t size;
	int one = 1;

	for (j = 0; j < 2; j++) {
		int fd = socket(family, types[j], 0);

		size = 16;
		for (i = 0; i < 5; i++) {
			snprintf(text, sizeof(text), "%d set %d/%d", types[j], options[i].level, options[i].name);
			say(text, setsockopt(fd, options[i].level, options[i].name, &one, sizeof(one)));
		}
		setsockopt(fd, IPPROTO_IP, IP_RECVTTL, &one, sizeof(one));
		setsockopt(fd, IPPROTO_IPV6, IPV6_RECVHOPLIMIT, &one, sizeof(one));
		for (i = 0; i < sizeof(options) / sizeof(*options); i++) {
			socklen_t len = sizeof(value);

			snprintf(text, sizeof(text), "%d get %d/%d", types[j], options[i].level, options[i].name);
			say(text, getsockopt(fd, options[i].level, options[i].name, value, &len));
			show("length", len);
		}
		/* The length depends on who has used a key. */
		say("TCP_FASTOPEN_KEY", getsockopt(fd, IPPROTO_TCP, TCP_FASTOPEN_KEY, value, &size));
		say("TCP_ULP of no protocol", setsockopt(fd, IPPROTO_TCP, TCP_ULP, "none0", 5));
		say("TCP_ULP of no name", setsockopt(fd, IPPROTO_TCP, TCP_ULP, "none0", 0));
		say("IPV6_2292PKTOPTIONS, none", setsockopt(fd, IPPROTO_IPV6, 6, value, 0));
		memset(value, 0, sizeof(value));
		say("IPV6_RTHDR of no type", setsockopt(fd, IPPROTO_IPV6, IPV6_RTHDR, header, sizeof(header)));
		say("IPV6_PKTINFO, none", setsockopt(fd, IPPROTO_IPV6, IPV6_PKTINFO, value, 20));
		say("IPV6_PKTINFO, short", setsockopt(fd, IPPROTO_IPV6, IPV6_PKTINFO, value, 4));
		say("IPV6_JOIN_ANYCAST, short", setsockopt(fd, IPPROTO_IPV6, IPV6_JOIN_ANYCAST, value, 19));
		say("IPV6_LEAVE_ANYCAST, short", setsockopt(fd, IPPROTO_IPV6, IPV6_LEAVE_ANYCAST, value, 19));
		say("IPV6_LEAVE_ANYCAST of none", setsockopt(fd, IPPROTO_IPV6, IPV6_LEAVE_ANYCAST, value, 20));
		/* SO_RESERVE_MEM */
		for (i = 0; i < 3; i++) {
			int memory = (int)i - 1;

			say("reserve memory", setsockopt(fd, SOL_SOCKET, 73, &memory, sizeof(memory)));
			read_back(fd, SOL_SOCKET, 73);
		}
		close(fd);
	}
}

/* Control messages of one number. */
static void sent_with(int family)
{
	/* IPV6_2292HOPLIMIT */
	static const int messages[][3] = {
		{ SOL_SOCKET, SO_MARK, 5 },
		{ IPPROTO_IPV6, IPV6_DONTFRAG, 1 }, { IPPROTO_IPV6, IPV6_DONTFRAG, 2 }, { IPPROTO_IPV6, 8, 5 },
		{ IPPROTO_IPV6, 8, 256 }, { IPPROTO_IPV6, IPV6_HOPLIMIT, 256 }, { IPPROTO_IP, IP_TTL, 256 },
	};
	union {
		struct cmsghdr head;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control;
	struct iovec iov = { "x", 1 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control,
			      .msg_controllen = sizeof(control) };
	unsigned int i;
	int pair[2];

	datagrams(family, pair);
	for (i = 0; i < sizeof(messages) / sizeof(*messages); i++) {
		memset(&control, 0, sizeof(control));
		control.head.cmsg_len = CMSG_LEN(sizeof(int));
		control.head.cmsg_level = messages[i][0];
		control.head.cmsg_type = messages[i][1];
		memcpy(CMSG_DATA(&control.head), &messages[i][2], sizeof(int));
		say("sent with", sendmsg(pair[0], &msg, 0));
	}
	close(pair[0]);
	close(pair[1]);
}

/* A flow label of IPv6 that the application chooses. */
static void flow_labels(int family)
{
	/* IPV6_FLOWINFO_SEND, IPV6_FLOWINFO, IPV6_ROUTER_ALERT_ISOLATE */
	enum { SEND = 33, RECEIVE = 11, ISOLATE = 30, LABEL = 0x12345 };
	union {
		struct cmsghdr head;
		char bytes[CMSG_SPACE(sizeof(int))];
	} control = {};
	char in[4];
	struct iovec iov = { in, sizeof(in) };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control,
			      .msg_controllen = sizeof(control) };
	struct sockaddr_storage addr;
	int to, from, one = 1, label = 0;
	socklen_t len;

	if (family != AF_INET6)
		return;
	to = udp_bound(family, &addr, &len);
	from = socket(family, SOCK_DGRAM, 0);
	say("isolate", setsockopt(from, IPPROTO_IPV6, ISOLATE, &one, sizeof(one)));
	read_back(from, IPPROTO_IPV6, ISOLATE);
	say("to receive", setsockopt(to, IPPROTO_IPV6, RECEIVE, &one, sizeof(one)));
	say("to send", setsockopt(from, IPPROTO_IPV6, SEND, &one, sizeof(one)));
	read_back(from, IPPROTO_IPV6, SEND);
	((struct sockaddr_in6 *)&addr)->sin6_flowinfo = htonl(LABEL);
	say("send", sendto(from, "abc", 3, 0, (struct sockaddr *)&addr, len));
	say("recv", recvmsg(to, &msg, 0));
	show("message", control.head.cmsg_type);
	memcpy(&label, CMSG_DATA(&control.head), sizeof(label));
	show("label", ntohl(label) == LABEL);
	close(from);
	close(to);
}

/* IP_LOCAL_PORT_RANGE: the kernel chooses among a few ports. */
static void port_range(int family, int type)
{
	enum { PORT_RANGE = 51, LOW = 41000, HIGH = 41009 };
	int fds[] = { socket(family, type, 0), socket(family, type, 0) }, other, i;
	unsigned int range = (unsigned int)HIGH << 16 | LOW, wrong = (unsigned int)LOW << 16 | HIGH;
	struct sockaddr_storage addr;
	socklen_t len;

	for (i = 0; i < 2; i++) {
		say("port range", setsockopt(fds[i], IPPROTO_IP, PORT_RANGE, &range, sizeof(range)));
		say("upside down", setsockopt(fds[i], IPPROTO_IP, PORT_RANGE, &wrong, sizeof(wrong)));
		say("short", setsockopt(fds[i], IPPROTO_IP, PORT_RANGE, &range, 2));
		read_back(fds[i], IPPROTO_IP, PORT_RANGE);
	}
	other = type == SOCK_STREAM ? tcp_listener(family, &addr, &len) : udp_bound(family, &addr, &len);
	say("connect", connect(fds[0], (struct sockaddr *)&addr, len));
	((struct sockaddr_in *)&addr)->sin_port = 0;
	say("bind", bind(fds[1], (struct sockaddr *)&addr, len));
	for (i = 0; i < 2; i++) {
		getsockname(fds[i], (struct sockaddr *)&addr, &len);
		show("within", port_of(&addr) >= LOW && port_of(&addr) <= HIGH);
		close(fds[i]);
	}
	close(other);
}

static int to_interface(int fd, int index)
{
	return setsockopt(fd, SOL_SOCKET, SO_BINDTOIFINDEX, &index, sizeof(index));
}

static void read_interface(int fd)
{
	char name[32] = "";
	socklen_t len = sizeof(name);

	say("SO_BINDTODEVICE", getsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, name, &len));
	show("length", len);
	show("lo", !strcmp(name, "lo"));
	read_back(fd, SOL_SOCKET, SO_BINDTOIFINDEX);
	read_back(fd, SOL_SOCKET, SO_MARK);
}

/* Sockets of one name that are bound to the loopback interface, and to one that carries nothing. */
static void interfaces(int family, int type)
{
	enum { LOOPBACK = 1, OTHER = 77777 };
	struct sockaddr none = { .sa_family = AF_UNSPEC };
	int fds[4], tries[3], child, mark = 77, i;
	struct sockaddr_storage addr;
	socklen_t len;
	char in[4];

	for (i = 0; i < 4; i++)
		fds[i] = socket(family, type, 0);
	for (i = 0; i < 3; i++)
		tries[i] = socket(family, type, 0);
	read_interface(fds[0]);
	say("part of a name", setsockopt(fds[0], SOL_SOCKET, SO_BINDTODEVICE, "lo", 1));
	say("to a negative one", to_interface(fds[0], -1));
	say("to another", to_interface(fds[0], OTHER));
	say("to none", to_interface(fds[0], 0));
	say("to loopback", setsockopt(fds[0], SOL_SOCKET, SO_BINDTODEVICE, "lo", 2));
	say("mark", setsockopt(fds[0], SOL_SOCKET, SO_MARK, &mark, sizeof(mark)));
	close(udp_bound(family, &addr, &len));
	((struct sockaddr_in *)&addr)->sin_port = 0;
	say("bind", bind(fds[0], (struct sockaddr *)&addr, len));
	getsockname(fds[0], (struct sockaddr *)&addr, &len);
	read_interface(fds[0]);
	to_interface(fds[1], OTHER);
	to_interface(fds[2], OTHER);
	say("bind beside", bind(fds[1], (struct sockaddr *)&addr, len));
	say("bind again", bind(fds[2], (struct sockaddr *)&addr, len));
	say("bind without", bind(fds[3], (struct sockaddr *)&addr, len));
	to_interface(tries[1], LOOPBACK);
	to_interface(tries[2], OTHER);
	if (type == SOCK_STREAM) {
		say("listen", listen(fds[0], 4));
		say("listen beside", listen(fds[1], 4));
	}
	for (i = 0; i < 3; i++) {
		say("connect", connect(tries[i], (struct sockaddr *)&addr, len));
		if (type == SOCK_DGRAM)
			say("send", sendto(tries[i], "abc", 3, 0, (struct sockaddr *)&addr, len));
		show_poll("loopback", fds[0], POLLIN, i < 2 ? 2000 : 0);
		show_poll("other", fds[1], POLLIN, 0);
		if (type == SOCK_DGRAM) {
			say("recv", recv(fds[0], in, sizeof(in), MSG_DONTWAIT));
		} else if (i < 2) {
			child = accept(fds[0], NULL, NULL);
			read_interface(child);
			close(child);
		}
		say("dissolve", connect(tries[i], &none, sizeof(none)));
		read_interface(tries[i]);
		close(tries[i]);
	}
	for (i = 0; i < 4; i++)
		close(fds[i]);
}

static void say_family(const char *name, int fd)
{
	struct sockaddr_storage addr = {};
	socklen_t len = sizeof(addr), size = sizeof(int);
	int domain = -1;

	getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size);
	say(name, getsockname(fd, (struct sockaddr *)&addr, &len));
	show("SO_DOMAIN", domain);
	show("of its name", addr.ss_family);
	show("of its length", len);
	len = sizeof(addr);
	say("peer", getpeername(fd, (struct sockaddr *)&addr, &len));
	show("of its length", len);
}

/* IPV6_ADDRFORM: a socket of IPv6 becomes one of IPv4. */
static void family_changes(int type)
{
	struct sockaddr_in6 mapped = { .sin6_family = AF_INET6 };
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	struct sockaddr none = { .sa_family = AF_UNSPEC };
	int first = socket(AF_INET6, type, 0), other = socket(AF_INET, type, 0), fd = first;
	int v4 = AF_INET, v6 = AF_INET6, value = -1;
	socklen_t len = sizeof(mapped), size = sizeof(int);
	char in[4];

	inet_pton(AF_INET6, "::ffff:127.0.0.1", &mapped.sin6_addr);
	say("unconnected", setsockopt(first, IPPROTO_IPV6, IPV6_ADDRFORM, &v4, sizeof(v4)));
	bind(first, (struct sockaddr *)&mapped, sizeof(mapped));
	getsockname(first, (struct sockaddr *)&mapped, &len);
	addr.sin_port = mapped.sin6_port;
	if (type == SOCK_STREAM) {
		listen(first, 1);
		say("listening", setsockopt(first, IPPROTO_IPV6, IPV6_ADDRFORM, &v4, sizeof(v4)));
		connect(other, (struct sockaddr *)&addr, sizeof(addr));
		fd = accept(first, NULL, NULL);
	} else {
		connect(other, (struct sockaddr *)&addr, sizeof(addr));
		len = sizeof(addr);
		getsockname(other, (struct sockaddr *)&addr, &len);
		mapped.sin6_port = addr.sin_port;
		connect(fd, (struct sockaddr *)&mapped, sizeof(mapped));
	}
	say_family("before", fd);
	say("get", getsockopt(fd, IPPROTO_IPV6, IPV6_ADDRFORM, &value, &size));
	show("value", value);
	say("to IPv6", setsockopt(fd, IPPROTO_IPV6, IPV6_ADDRFORM, &v6, sizeof(v6)));
	say("short", setsockopt(fd, IPPROTO_IPV6, IPV6_ADDRFORM, &v4, 2));
	say("to IPv4", setsockopt(fd, IPPROTO_IPV6, IPV6_ADDRFORM, &v4, sizeof(v4)));
	say_family("after", fd);
	say("again", setsockopt(fd, IPPROTO_IPV6, IPV6_ADDRFORM, &v4, sizeof(v4)));
	say("get", getsockopt(fd, IPPROTO_IPV6, IPV6_ADDRFORM, &value, &size));
	say("send", send(fd, "abc", 3, 0));
	say("recv", recv(other, in, sizeof(in), 0));
	say("dissolve", connect(fd, &none, sizeof(none)));
	memset(&addr, 0, sizeof(addr));
	addr.sin_family = AF_INET;
	if (type == SOCK_STREAM) {
		say("bind", bind(fd, (struct sockaddr *)&addr, sizeof(addr)));
		say("listen", listen(fd, 1));
	}
	len = sizeof(addr);
	getsockname(fd, (struct sockaddr *)&addr, &len);
	addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	close(other);
	other = socket(AF_INET, type, 0);
	say("connect", connect(other, (struct sockaddr *)&addr, sizeof(addr)));
	if (type == SOCK_STREAM) {
		value = accept(fd, NULL, NULL);
		say_family("accepted", value);
		close(value);
	}
	say("to IPv6 again", connect(fd, (struct sockaddr *)&mapped, sizeof(mapped)));
	close(other);
	if (fd != first)
		close(fd);
	close(first);
}

/* Sizes of buffers: the smallest, and what the kernel gives a connection. */
static void buffers(int family)
{
	int pair[2], fresh = socket(family, SOCK_STREAM, 0), smallest = -1, large = 3000000, before, after;
	struct sockaddr_storage addr;
	socklen_t len = sizeof(int);

	getsockopt(fresh, SOL_SOCKET, SO_SNDBUF, &before, &len);
	tcp_pair(family, pair);
	getsockopt(pair[0], SOL_SOCKET, SO_SNDBUF, &after, &len);
	show("SO_SNDBUF connected is larger", after > before);
	getsockopt(pair[1], SOL_SOCKET, SO_SNDBUF, &after, &len);
	show("SO_SNDBUF accepted is larger", after > before);
	say("SO_SNDBUFFORCE", setsockopt(fresh, SOL_SOCKET, SO_SNDBUFFORCE, &smallest, sizeof(smallest)));
	read_back(fresh, SOL_SOCKET, SO_SNDBUF);
	say("SO_RCVBUFFORCE", setsockopt(fresh, SOL_SOCKET, SO_RCVBUFFORCE, &smallest, sizeof(smallest)));
	read_back(fresh, SOL_SOCKET, SO_RCVBUF);
	/* What was forced stays. */
	say("SO_SNDBUFFORCE", setsockopt(fresh, SOL_SOCKET, SO_SNDBUFFORCE, &large, sizeof(large)));
	say("SO_RCVBUFFORCE", setsockopt(fresh, SOL_SOCKET, SO_RCVBUFFORCE, &large, sizeof(large)));
	setsockopt(fresh, SOL_SOCKET, SO_RCVLOWAT, &before, sizeof(before));
	close(pair[0]);
	pair[0] = tcp_listener(family, &addr, &len);
	connect(fresh, (struct sockaddr *)&addr, len);
	read_back(fresh, SOL_SOCKET, SO_SNDBUF);
	read_back(fresh, SOL_SOCKET, SO_RCVBUF);
	say("SO_SNDBUF", setsockopt(fresh, SOL_SOCKET, SO_SNDBUF, &smallest, sizeof(smallest)));
	read_back(fresh, SOL_SOCKET, SO_RCVBUF);
	close(fresh);
	close(pair[0]);
	close(pair[1]);
}

/*
 * What the error queue says of sends with MSG_ZEROCOPY: on the loopback all are copies, of which one
 * notification tells.
 */
static void zero_copy(int family)
{
	char control[512], in[4000], out[3000] = "";
	struct iovec iov = { in, sizeof(in) };
	struct sock_extended_err *error;
	struct msghdr msg;
	int pair[2], kind, one = 1, i;

	for (kind = 0; kind < 2; kind++) {
		if (kind)
			datagrams(family, pair);
		else
			tcp_pair(family, pair);
		say("not set", send(pair[0], out, 10, MSG_ZEROCOPY));
		quiet(pair[0]);
		say("SO_ZEROCOPY", setsockopt(pair[0], SOL_SOCKET, SO_ZEROCOPY, &one, sizeof(one)));
		say("nothing", send(pair[0], out, 0, MSG_ZEROCOPY));
		say("bad", send(pair[0], (void *)1, 10, MSG_ZEROCOPY));
		for (i = 0; i < 3; i++)
			say("send", send(pair[0], out, i ? sizeof(out) : 10, MSG_ZEROCOPY));
		while (recv(pair[1], in, sizeof(in), MSG_DONTWAIT) > 0)
			usleep(SETTLE_US);
		usleep(SETTLE_US);
		show_poll("told", pair[0], POLLIN | POLLPRI, 1000);
		for (i = 0; i < 4; i++) {
			msg = (struct msghdr){ .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control,
					       .msg_controllen = sizeof(control) };
			if (say("from the queue", recvmsg(pair[0], &msg, MSG_ERRQUEUE)) < 0)
				break;
			show("flags", msg.msg_flags);
			show("control", msg.msg_controllen);
			error = (struct sock_extended_err *)CMSG_DATA(CMSG_FIRSTHDR(&msg));
			show("errno", error->ee_errno);
			show("origin", error->ee_origin);
			show("code", error->ee_code);
			show("first", error->ee_info);
			show("last", error->ee_data);
		}
		quiet(pair[0]);
		close(pair[0]);
		close(pair[1]);
	}
}

/* Of a peer without a cookie: connections as any other, by connect() and by sendto(). */
static void fast_open(int family)
{
	struct sockaddr_storage addr;
	socklen_t len, size = sizeof(int);
	int listener = tcp_listener(family, &addr, &len), fd, child, value, way;
	char in[8];

	for (way = 0; way < 4; way++) {
		fd = socket(family, SOCK_STREAM, 0);
		value = 1;
		if (way % 2)
			say("TCP_FASTOPEN_CONNECT", setsockopt(fd, IPPROTO_TCP, TCP_FASTOPEN_CONNECT, &value, sizeof(value)));
		say("no address", send(fd, "abc", 3, MSG_FASTOPEN));
		if (way < 2)
			say("connect", connect(fd, (struct sockaddr *)&addr, len));
		say("sendto", sendto(fd, "abc", 3, way < 2 ? 0 : MSG_FASTOPEN, (struct sockaddr *)&addr, len));
		/* Where connect() has asked for a cookie Linux says EALREADY here, for as long as the connection is there. */
		if (way != 1)
			say("again", sendto(fd, "abc", 3, MSG_FASTOPEN, (struct sockaddr *)&addr, len));
		say("set", setsockopt(fd, IPPROTO_TCP, TCP_FASTOPEN_CONNECT, &value, sizeof(value)));
		value = 77;
		say("get", getsockopt(fd, IPPROTO_TCP, TCP_FASTOPEN_CONNECT, &value, &size));
		show("value", value);
		child = accept(listener, NULL, NULL);
		say("recv", recv(child, in, sizeof(in), 0));
		close(child);
		close(fd);
	}
	close(listener);
	fd = socket(family, SOCK_STREAM, 0);
	say("to nobody", sendto(fd, "abc", 3, MSG_FASTOPEN | MSG_NOSIGNAL, (struct sockaddr *)&addr, len));
	addr.ss_family = AF_UNSPEC;
	say("to no family", sendto(fd, "abc", 3, MSG_FASTOPEN | MSG_NOSIGNAL, (struct sockaddr *)&addr, len));
	close(fd);
	fd = socket(family, SOCK_DGRAM, 0);
	say("a datagram", send(fd, "abc", 3, MSG_FASTOPEN));
	close(fd);
}

void test_kinds(int family)
{
	without_rights(family);
	bad_addresses(family);
	bad_sends(family);
	odd_memory(family);
	bad_beside_good(family);
	listen_beside_shutdown(family);
	stamps(family);
	no_room(family);
	error_queue(family);
	marks(family);
	signal_codes(family);
	at_once(family);
	accepted_priority(family);
	peek_offset(family);
	closed_first(family);
	told_once(family);
	save_syn(family);
	sources(family);
	let_in(family);
	received_with(family);
	switched_off(family);
	without_a_value(family);
	read_badly(family);
	other_options(family);
	sent_with(family);
	flow_labels(family);
	port_range(family, SOCK_STREAM);
	port_range(family, SOCK_DGRAM);
	interfaces(family, SOCK_STREAM);
	interfaces(family, SOCK_DGRAM);
	if (family == AF_INET6) {
		family_changes(SOCK_STREAM);
		family_changes(SOCK_DGRAM);
	}
	buffers(family);
	zero_copy(family);
	fast_open(family);
}
