// SPDX-License-Identifier: GPL-2.0-or-later
/* Socket filters of datagram sockets: what the program drops or trims is seen by nothing that looks at the socket. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/bpf.h>
#include <linux/filter.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <unistd.h>

#include "conform.h"

#define SETTLE_US 20000
/* Of the UDP header, with which a packet begins. */
#define HEADER 8

#define COUNT(code) (sizeof(code) / sizeof(*(code)))

/* A datagram that begins with a: its first four bytes; with b: whole; else nothing. */
static struct sock_filter choose[] = {
	BPF_STMT(BPF_LD | BPF_B | BPF_ABS, HEADER),
	BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 'a', 0, 1),
	BPF_STMT(BPF_RET | BPF_K, HEADER + 4),
	BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 'b', 0, 1),
	BPF_STMT(BPF_RET | BPF_K, 0xffffffff),
	BPF_STMT(BPF_RET | BPF_K, 0),
};

static int attach(int fd, struct sock_filter *code, unsigned int count)
{
	struct sock_fprog program = { .len = count, .filter = code };

	return setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program));
}

/* [0] sends to [1]. */
static void pair_of(int family, int pair[2], int *port)
{
	struct sockaddr_storage addr;
	socklen_t len;

	pair[0] = udp_bound(family, &addr, &len);
	if (port)
		*port = port_of(&addr);
	pair[1] = udp_bound(family, &addr, &len);
	if (connect(pair[0], (struct sockaddr *)&addr, len))
		perror("connect");
}

static void both_close(int pair[2])
{
	close(pair[0]);
	close(pair[1]);
}

static void waiting(int fd)
{
	int bytes = -1;

	show_poll("in", fd, POLLIN, 0);
	say("FIONREAD", ioctl(fd, FIONREAD, &bytes));
	show("bytes", bytes);
}

static void send_all(int fd)
{
	send(fd, "xyz", 3, 0);
	send(fd, "abcdefgh", 8, 0);
	send(fd, "", 0, 0);
	send(fd, "bcd", 3, 0);
	send(fd, "a", 1, 0);
	usleep(SETTLE_US);
}

static void chosen(int family)
{
	struct sockaddr_storage from;
	socklen_t len = sizeof(from);
	char in[9000] = "";
	int pair[2], port;

	pair_of(family, pair, &port);
	say("attach", attach(pair[1], choose, COUNT(choose)));
	waiting(pair[1]);
	send_all(pair[0]);
	waiting(pair[1]);
	say("peek", recv(pair[1], in, sizeof(in), MSG_PEEK));
	say("peek at two", recv(pair[1], in, 2, MSG_PEEK | MSG_TRUNC));
	say("trimmed", recvfrom(pair[1], in, sizeof(in), 0, (struct sockaddr *)&from, &len));
	show("first", in[0]);
	show("name", len);
	show("sender", port_of(&from) == port);
	waiting(pair[1]);
	say("cut", recv(pair[1], in, 2, MSG_TRUNC));
	say("short", recv(pair[1], in, 1, 0));
	waiting(pair[1]);
	say("none", recv(pair[1], in, sizeof(in), MSG_DONTWAIT));
	send(pair[0], "x", 1, 0);
	send(pair[0], "y", 1, 0);
	usleep(SETTLE_US);
	waiting(pair[1]);
	say("none to peek at", recv(pair[1], in, sizeof(in), MSG_DONTWAIT | MSG_PEEK));
	send_all(pair[0]);
	say("bad address", recv(pair[1], (void *)1, 8, MSG_DONTWAIT));
	say("the next", recv(pair[1], in, sizeof(in), MSG_DONTWAIT));
	show("first", in[0]);
	both_close(pair);
}

static void send_late(int fd)
{
	send(fd, "x", 1, 0);
	usleep(SETTLE_US);
	send(fd, "bcd", 3, 0);
}

static void shut(int fd)
{
	shutdown(fd, SHUT_RD);
}

static void waits(int family)
{
	struct timeval time = { .tv_usec = 200000 };
	struct epoll_event event = { .events = EPOLLIN | EPOLLET };
	int pair[2], epoll = epoll_create1(0);
	char in[16];

	pair_of(family, pair, NULL);
	attach(pair[1], choose, COUNT(choose));
	epoll_ctl(epoll, EPOLL_CTL_ADD, pair[1], &event);
	later(100, send_late, pair[0]);
	say("blocked", recv(pair[1], in, sizeof(in), 0));
	later_join();
	say("epoll, read", epoll_wait(epoll, &event, 1, 0) >= 0);
	send(pair[0], "x", 1, 0);
	say("epoll, dropped", epoll_wait(epoll, &event, 1, 100));
	later(100, send_late, pair[0]);
	say("epoll", epoll_wait(epoll, &event, 1, 2000));
	later_join();
	say("read", recv(pair[1], in, sizeof(in), MSG_DONTWAIT));
	setsockopt(pair[1], SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time));
	send(pair[0], "x", 1, 0);
	say("for a while", recv(pair[1], in, sizeof(in), 0));
	time.tv_usec = 0;
	time.tv_sec = 20;
	setsockopt(pair[1], SOL_SOCKET, SO_RCVTIMEO, &time, sizeof(time));
	later(100, shut, pair[1]);
	say("shut down", recv(pair[1], in, sizeof(in), 0));
	later_join();
	close(epoll);
	both_close(pair);
}

/* What the program reads, as the length that it leaves; of what differs from run to run only whether it is right. */
static void packet(int family)
{
	static const struct {
		const char *name;
		struct sock_filter load;
	} loads[] = {
		{ "length", BPF_STMT(BPF_LD | BPF_W | BPF_LEN, 0) },
		{ "length of UDP", BPF_STMT(BPF_LD | BPF_H | BPF_ABS, 4) },
		{ "type", BPF_STMT(BPF_LD | BPF_H | BPF_ABS, SKF_LL_OFF + 12) },
		{ "protocol", BPF_STMT(BPF_LD | BPF_H | BPF_ABS, SKF_AD_OFF + SKF_AD_PROTOCOL) },
		{ "packet type", BPF_STMT(BPF_LD | BPF_B | BPF_ABS, SKF_AD_OFF + SKF_AD_PKTTYPE) },
		{ "version", BPF_STMT(BPF_LD | BPF_B | BPF_ABS, SKF_NET_OFF) },
		{ "last of IP", BPF_STMT(BPF_LD | BPF_B | BPF_ABS, SKF_NET_OFF + 19) },
		{ "payload", BPF_STMT(BPF_LD | BPF_W | BPF_ABS, SKF_AD_OFF + SKF_AD_PAY_OFFSET) },
		{ "behind the end", BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 5000) },
	};
	struct sock_filter code[2] = { [1] = BPF_STMT(BPF_RET | BPF_A, 0) };
	static char out[4000], in[5000];
	int pair[2], port, at = family == AF_INET ? 9 : 6;
	unsigned int i;

	pair_of(family, pair, &port);
	for (i = 0; i < COUNT(loads); i++) {
		code[0] = loads[i].load;
		attach(pair[1], code, 2);
		send(pair[0], out, sizeof(out), 0);
		usleep(SETTLE_US);
		say(loads[i].name, recv(pair[1], in, sizeof(in), MSG_DONTWAIT));
	}
	struct sock_filter names[] = {
		BPF_STMT(BPF_LD | BPF_H | BPF_ABS, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, port, 0, 3),
		BPF_STMT(BPF_LD | BPF_B | BPF_ABS, SKF_NET_OFF + at),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, IPPROTO_UDP, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, 0xffff),
		BPF_STMT(BPF_RET | BPF_K, 0),
	};
	attach(pair[1], names, COUNT(names));
	send(pair[0], out, 7, 0);
	usleep(SETTLE_US);
	say("source port", recv(pair[1], in, sizeof(in), MSG_DONTWAIT));
	struct sockaddr_storage addr;
	socklen_t len = sizeof(addr);
	getsockname(pair[1], (struct sockaddr *)&addr, &len);
	names[0] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_H | BPF_ABS, 2);
	names[1].k = port_of(&addr);
	attach(pair[1], names, COUNT(names));
	send(pair[0], out, 7, 0);
	usleep(SETTLE_US);
	say("port", recv(pair[1], in, sizeof(in), MSG_DONTWAIT));
	both_close(pair);
}

static void taken_off(int family)
{
	struct sock_filter bad = BPF_STMT(BPF_LD | BPF_W | BPF_LEN, 0), back[16];
	socklen_t len = COUNT(back);
	int pair[2], one = 1;
	char in[16];

	pair_of(family, pair, NULL);
	say("detach none", setsockopt(pair[1], SOL_SOCKET, SO_DETACH_FILTER, &one, sizeof(one)));
	say("no program", attach(pair[1], &bad, 1));
	say("empty program", attach(pair[1], &bad, 0));
	say("bad pointer", attach(pair[1], (void *)1, 1));
	say("short", setsockopt(pair[1], SOL_SOCKET, SO_ATTACH_FILTER, &one, sizeof(one)));
	say("no descriptor", setsockopt(pair[1], SOL_SOCKET, SO_ATTACH_BPF, &one, sizeof(one)));
	say("get none", getsockopt(pair[1], SOL_SOCKET, SO_GET_FILTER, back, &len));
	show("instructions", len);
	attach(pair[1], choose, COUNT(choose));
	len = COUNT(back);
	say("get", getsockopt(pair[1], SOL_SOCKET, SO_GET_FILTER, back, &len));
	show("instructions", len);
	show("same", !memcmp(back, choose, sizeof(choose)));
	send_all(pair[0]);
	show_poll("in", pair[1], POLLIN, 0);
	say("detach", setsockopt(pair[1], SOL_SOCKET, SO_DETACH_FILTER, &one, sizeof(one)));
	say("of before", recv(pair[1], in, sizeof(in), MSG_DONTWAIT));
	while (recv(pair[1], in, sizeof(in), MSG_DONTWAIT) >= 0)
		;
	send(pair[0], "xyz", 3, 0);
	usleep(SETTLE_US);
	say("of after", recv(pair[1], in, sizeof(in), MSG_DONTWAIT));
	attach(pair[1], choose, COUNT(choose));
	say("lock", setsockopt(pair[1], SOL_SOCKET, SO_LOCK_FILTER, &one, sizeof(one)));
	say("detach locked", setsockopt(pair[1], SOL_SOCKET, SO_DETACH_FILTER, &one, sizeof(one)));
	say("attach locked", attach(pair[1], choose, COUNT(choose)));
	both_close(pair);
}

static void extended(int family)
{
	struct bpf_insn code[] = {
		{ .code = BPF_ALU64 | BPF_MOV | BPF_X, .dst_reg = 6, .src_reg = 1 },
		{ .code = BPF_LD | BPF_ABS | BPF_B, .imm = HEADER },
		{ .code = BPF_JMP | BPF_JNE | BPF_K, .dst_reg = 0, .off = 2, .imm = 'b' },
		{ .code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = 0, .imm = HEADER + 2 },
		{ .code = BPF_JMP | BPF_EXIT },
		{ .code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = 0 },
		{ .code = BPF_JMP | BPF_EXIT },
	};
	union bpf_attr attr = { .prog_type = BPF_PROG_TYPE_SOCKET_FILTER, .insn_cnt = COUNT(code),
				.insns = (unsigned long)code, .license = (unsigned long)"GPL" };
	int program = syscall(SYS_bpf, BPF_PROG_LOAD, &attr, sizeof(attr)), pair[2];
	char in[16];

	say("load", program >= 0);
	pair_of(family, pair, NULL);
	say("attach", setsockopt(pair[1], SOL_SOCKET, SO_ATTACH_BPF, &program, sizeof(program)));
	close(program);
	send_all(pair[0]);
	waiting(pair[1]);
	say("recv", recv(pair[1], in, sizeof(in), MSG_DONTWAIT));
	say("none", recv(pair[1], in, sizeof(in), MSG_DONTWAIT));
	both_close(pair);
}

/* With what comes beside the data; and errors. */
static void beside(int family)
{
	int level = family == AF_INET ? IPPROTO_IP : IPPROTO_IPV6, name = family == AF_INET ? IP_PKTINFO : IPV6_RECVPKTINFO;
	char control[256], in[16];
	struct iovec iov = { in, sizeof(in) };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };
	struct cmsghdr *first;
	int pair[2], one = 1;

	pair_of(family, pair, NULL);
	attach(pair[1], choose, COUNT(choose));
	setsockopt(pair[1], level, name, &one, sizeof(one));
	send_all(pair[0]);
	say("recvmsg", recvmsg(pair[1], &msg, 0));
	first = CMSG_FIRSTHDR(&msg);
	show("type", first ? first->cmsg_type : -1);
	show("flags", msg.msg_flags);
	msg.msg_controllen = 0;
	say("no room", recvmsg(pair[1], &msg, 0));
	show("flags", msg.msg_flags);
	attach(pair[0], choose, COUNT(choose));
	close(pair[1]);
	send(pair[0], "bcd", 3, 0);
	usleep(SETTLE_US);
	show_poll("refused", pair[0], POLLIN, 0);
	say("refused", recv(pair[0], in, sizeof(in), MSG_DONTWAIT));
	show_poll("told", pair[0], POLLIN, 0);
	close(pair[0]);
}

/* Of a stream, as long as it is not connected. */
static void of_a_stream(int family)
{
	int fd = socket(family, SOCK_STREAM, 0), none = 0;

	say("detach none", setsockopt(fd, SOL_SOCKET, SO_DETACH_FILTER, &none, sizeof(none)));
	say("attach to a stream", attach(fd, choose, COUNT(choose)));
	say("attach none", attach(fd, choose, 0));
	say("detach", setsockopt(fd, SOL_SOCKET, SO_DETACH_FILTER, &none, sizeof(none)));
	say("detach again", setsockopt(fd, SOL_SOCKET, SO_DETACH_FILTER, &none, sizeof(none)));
	close(fd);
}

void test_filters(int family)
{
	of_a_stream(family);
	chosen(family);
	waits(family);
	packet(family);
	taken_off(family);
	extended(family);
	beside(family);
}
