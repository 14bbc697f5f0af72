// SPDX-License-Identifier: GPL-2.0-or-later
/* Sockets by io_uring, without a library; and whose a socket is, however it was made. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/bpf.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "conform.h"

#define ENTRIES 8
#define PROT (PROT_READ | PROT_WRITE)
#define MAP (MAP_SHARED | MAP_POPULATE)
#ifndef IPPROTO_MPTCP
#define IPPROTO_MPTCP 262
#endif

static struct {
	int fd;
	unsigned int *sq_tail, *sq_mask, *sq_array, *sq_flags, *cq_head, *cq_tail, *cq_mask;
	struct io_uring_sqe *sqes;
	struct io_uring_cqe *cqes;
} ring;

static bool ring_open(unsigned int flags)
{
	struct io_uring_params params = { .flags = flags, .sq_thread_idle = 100 };
	char *sq, *cq;

	ring.fd = syscall(SYS_io_uring_setup, ENTRIES, &params);
	if (ring.fd < 0)
		return false;
	sq = mmap(NULL, params.sq_off.array + params.sq_entries * 4, PROT, MAP, ring.fd, IORING_OFF_SQ_RING);
	cq = mmap(NULL, params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe), PROT, MAP, ring.fd,
		  IORING_OFF_CQ_RING);
	ring.sqes = mmap(NULL, params.sq_entries * sizeof(struct io_uring_sqe), PROT, MAP, ring.fd,
			 IORING_OFF_SQES);
	if (sq == MAP_FAILED || cq == MAP_FAILED || ring.sqes == MAP_FAILED)
		return false;
	ring.sq_tail = (void *)(sq + params.sq_off.tail);
	ring.sq_mask = (void *)(sq + params.sq_off.ring_mask);
	ring.sq_array = (void *)(sq + params.sq_off.array);
	ring.sq_flags = (void *)(sq + params.sq_off.flags);
	ring.cq_head = (void *)(cq + params.cq_off.head);
	ring.cq_tail = (void *)(cq + params.cq_off.tail);
	ring.cq_mask = (void *)(cq + params.cq_off.ring_mask);
	ring.cqes = (void *)(cq + params.cq_off.cqes);
	return true;
}

static void submit(const struct io_uring_sqe *sqe)
{
	unsigned int tail = *ring.sq_tail, at = tail & *ring.sq_mask;

	ring.sqes[at] = *sqe;
	ring.sq_array[at] = at;
	__atomic_store_n(ring.sq_tail, tail + 1, __ATOMIC_RELEASE);
	__sync_synchronize();
	syscall(SYS_io_uring_enter, ring.fd, 1, 0,
		*ring.sq_flags & IORING_SQ_NEED_WAKEUP ? IORING_ENTER_SQ_WAKEUP : 0, NULL, 0);
}

struct result {
	int res;
	unsigned int flags;
};

/* The next completion within 3 s; ETIME where none comes. */
static struct result completion(void)
{
	struct pollfd one = { .fd = ring.fd, .events = POLLIN };
	struct result none = { .res = -ETIME }, got;
	unsigned int head = *ring.cq_head;

	if (head == __atomic_load_n(ring.cq_tail, __ATOMIC_ACQUIRE) && poll(&one, 1, 3000) <= 0)
		return none;
	if (head == __atomic_load_n(ring.cq_tail, __ATOMIC_ACQUIRE))
		return none;
	got.res = ring.cqes[head & *ring.cq_mask].res;
	got.flags = ring.cqes[head & *ring.cq_mask].flags;
	__atomic_store_n(ring.cq_head, head + 1, __ATOMIC_RELEASE);
	return got;
}

static struct result run(const struct io_uring_sqe *sqe)
{
	submit(sqe);
	return completion();
}

static long tell(const char *name, int result)
{
	errno = -result;
	return say(name, result < 0 ? -1 : result);
}

static int connect_by(int fd, struct sockaddr_storage *addr, socklen_t len)
{
	struct io_uring_sqe sqe = { .opcode = IORING_OP_CONNECT, .fd = fd, .addr = (unsigned long)addr, .off = len };

	return run(&sqe).res;
}

static void connects(int family)
{
	struct sockaddr_storage addr;
	socklen_t len;
	int listener = tcp_listener(family, &addr, &len), fd = socket(family, SOCK_STREAM, 0), round;

	for (round = 0; round < 3; round++) {
		close(listener);
		tell("connect refused", connect_by(fd, &addr, len));
		show_poll("refused", fd, POLLIN | POLLOUT | POLLRDHUP, 0);
		listener = socket(family, SOCK_STREAM, 0);
		setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &(int){ 1 }, sizeof(int));
		bind(listener, (struct sockaddr *)&addr, len);
		listen(listener, 1);
		tell("connect again", connect_by(fd, &addr, len));
		tell("connect connected", connect_by(fd, &addr, len));
		close(fd);
		fd = socket(family, SOCK_STREAM | (round ? SOCK_NONBLOCK : 0), 0);
	}
	close(fd);
	close(listener);
}

/* Whether another connection waits. */
static void accepts_of_two(int family)
{
	struct sockaddr_storage addr;
	socklen_t len;
	int listener = tcp_listener(family, &addr, &len), fds[2], i;
	struct io_uring_sqe sqe = { .opcode = IORING_OP_ACCEPT, .fd = listener };
	struct result cqe;

	for (i = 0; i < 2; i++) {
		fds[i] = socket(family, SOCK_STREAM, 0);
		connect(fds[i], (struct sockaddr *)&addr, len);
	}
	show_poll("two wait", listener, POLLIN, 2000);
	for (i = 0; i < 2; i++) {
		cqe = run(&sqe);
		tell("accept", cqe.res < 0 ? cqe.res : 0);
		show("NONEMPTY", !!(cqe.flags & IORING_CQE_F_SOCK_NONEMPTY));
		close(cqe.res);
		close(fds[i]);
	}
	close(listener);
}

static void accepts(int family)
{
	struct sockaddr_storage addr;
	socklen_t len;
	int listener = tcp_listener(family, &addr, &len), fd = socket(family, SOCK_STREAM, 0), child;
	struct io_uring_sqe sqe = { .opcode = IORING_OP_ACCEPT, .fd = listener };
	char in[4];

	submit(&sqe);
	connect(fd, (struct sockaddr *)&addr, len);
	child = completion().res;
	tell("accept", child < 0 ? child : 0);
	send(fd, "ab", 2, 0);
	say("recv accepted", recv(child, in, sizeof(in), 0));
	close(child);
	close(fd);
	sqe = (struct io_uring_sqe) { .opcode = IORING_OP_ACCEPT, .fd = listener, .ioprio = IORING_ACCEPT_MULTISHOT };
	submit(&sqe);
	fd = socket(family, SOCK_STREAM, 0);
	connect(fd, (struct sockaddr *)&addr, len);
	child = completion().res;
	tell("accept, multishot", child < 0 ? child : 0);
	close(child);
	close(fd);
	close(listener);
	accepts_of_two(family);
}

/* A poll tells what is there, and not what might be. */
static void polls(int family)
{
	struct io_uring_sqe sqe = { .opcode = IORING_OP_POLL_ADD, .poll32_events = POLLIN | POLLRDHUP };
	struct sockaddr_storage gone;
	int pair[2], fd = socket(family, SOCK_DGRAM, 0), closed;
	socklen_t len;
	char in[4];

	tcp_pair(family, pair);
	sqe.fd = pair[0];
	submit(&sqe);
	usleep(20000);
	send(pair[1], "a", 1, 0);
	tell("poll, data", completion().res);
	recv(pair[0], in, sizeof(in), 0);
	submit(&sqe);
	usleep(20000);
	shutdown(pair[1], SHUT_WR);
	tell("poll, end", completion().res);
	close(pair[0]);
	close(pair[1]);
	closed = udp_bound(family, &gone, &len);
	connect(fd, (struct sockaddr *)&gone, len);
	close(closed);
	sqe.fd = fd;
	submit(&sqe);
	usleep(20000);
	send(fd, "a", 1, 0);
	tell("poll, error", completion().res);
	close(fd);
}

static void receives(int family)
{
	struct io_uring_sqe sqe = { .opcode = IORING_OP_RECV };
	struct sockaddr_storage addr;
	struct result cqe;
	char in[4], more[64];
	socklen_t len;
	int pair[2];

	pair[0] = udp_bound(family, &addr, &len);
	pair[1] = socket(family, SOCK_DGRAM, 0);
	sendto(pair[1], "ab", 2, 0, (struct sockaddr *)&addr, len);
	sendto(pair[1], "cd", 2, 0, (struct sockaddr *)&addr, len);
	show_poll("datagrams", pair[0], POLLIN, 2000);
	sqe.fd = pair[0];
	sqe.addr = (unsigned long)in;
	sqe.len = sizeof(in);
	cqe = run(&sqe);
	tell("recv one", cqe.res);
	show("NONEMPTY", !!(cqe.flags & IORING_CQE_F_SOCK_NONEMPTY));
	close(pair[0]);
	close(pair[1]);
	tcp_pair(family, pair);
	send(pair[1], "abcdef", 6, 0);
	show_poll("there", pair[0], POLLIN, 2000);
	sqe.fd = pair[0];
	cqe = run(&sqe);
	tell("recv some", cqe.res);
	show("NONEMPTY", !!(cqe.flags & IORING_CQE_F_SOCK_NONEMPTY));
	cqe = run(&sqe);
	tell("recv rest", cqe.res);
	show("NONEMPTY", !!(cqe.flags & IORING_CQE_F_SOCK_NONEMPTY));
	submit(&sqe);
	usleep(20000);
	send(pair[1], "gh", 2, 0);
	cqe = completion();
	tell("recv waited", cqe.res);
	/* Into buffers that the ring chooses, several by one request. */
	sqe = (struct io_uring_sqe) { .opcode = IORING_OP_PROVIDE_BUFFERS, .fd = 4, .addr = (unsigned long)more, .len = 16,
				      .buf_group = 7 };
	tell("buffers", run(&sqe).res);
	sqe = (struct io_uring_sqe) { .opcode = IORING_OP_RECV, .fd = pair[0], .flags = IOSQE_BUFFER_SELECT, .buf_group = 7,
				      .ioprio = IORING_RECV_MULTISHOT };
	submit(&sqe);
	send(pair[1], "i", 1, 0);
	cqe = completion();
	tell("multishot", cqe.res);
	show("goes on", !!(cqe.flags & IORING_CQE_F_MORE));
	send(pair[1], "jk", 2, 0);
	cqe = completion();
	tell("multishot", cqe.res);
	show("goes on", !!(cqe.flags & IORING_CQE_F_MORE));
	shutdown(pair[1], SHUT_WR);
	cqe = completion();
	tell("multishot, end", cqe.res);
	show("goes on", !!(cqe.flags & IORING_CQE_F_MORE));
	close(pair[0]);
	close(pair[1]);
}

/* Into many buffers by one request: what is left decides how many of them the next receive takes. */
static void receives_bundle(int family)
{
	enum { BUFFERS = 512, SENT = 300 };
	struct io_uring_buf_ring *buffers = mmap(NULL, BUFFERS * sizeof(struct io_uring_buf), PROT,
						 MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct io_uring_buf_reg reg = { .ring_addr = (unsigned long)buffers, .ring_entries = BUFFERS, .bgid = 9 };
	struct io_uring_sqe sqe = { .opcode = IORING_OP_RECV, .flags = IOSQE_BUFFER_SELECT, .buf_group = 9,
				    .ioprio = IORING_RECV_MULTISHOT | IORING_RECVSEND_BUNDLE };
	static char in[SENT], out[SENT];
	int pair[2], got = 0, i, queued = 0;
	struct result cqe;

	if (say("buffer ring", syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_PBUF_RING, &reg, 1)) < 0)
		return;
	for (i = 0; i < SENT; i++)
		buffers->bufs[i] = (struct io_uring_buf) { .addr = (unsigned long)&in[i], .len = 1, .bid = i };
	__atomic_store_n(&buffers->tail, SENT, __ATOMIC_RELEASE);
	for (i = 0; i < SENT; i++)
		out[i] = i;
	tcp_pair(family, pair);
	send(pair[1], out, SENT, 0);
	for (i = 0; i < 200 && !ioctl(pair[0], FIONREAD, &queued) && queued < SENT; i++)
		usleep(10000);
	sqe.fd = pair[0];
	submit(&sqe);
	do {
		cqe = completion();
		tell("bundle", cqe.res);
		got += cqe.res;
	} while (cqe.res > 0 && got < SENT);
	show("same", !memcmp(in, out, SENT));
	close(pair[0]);
	close(pair[1]);
}

/* A send without a copy, then the notice that its buffer is free. */
static void sends(int family)
{
	struct io_uring_sqe sqe = { .opcode = IORING_OP_SEND_ZC, .addr = (unsigned long)"abc", .len = 3,
				    .ioprio = IORING_SEND_ZC_REPORT_USAGE };
	struct result cqe;
	char in[8];
	int pair[2];

	tcp_pair(family, pair);
	sqe.fd = pair[0];
	cqe = run(&sqe);
	tell("send", cqe.res);
	show("a notice comes", !!(cqe.flags & IORING_CQE_F_MORE));
	say("recv", recv(pair[1], in, sizeof(in), 0));
	if (cqe.flags & IORING_CQE_F_MORE) {
		cqe = completion();
		show("notice", !!(cqe.flags & IORING_CQE_F_NOTIF));
		show("copied", !!((unsigned int)cqe.res & IORING_NOTIF_USAGE_ZC_COPIED));
	}
	send(pair[0], "defg", 4, 0);
	show_poll("there", pair[1], POLLIN, 2000);
	sqe = (struct io_uring_sqe) { .opcode = IORING_OP_URING_CMD, .fd = pair[1], .cmd_op = SOCKET_URING_OP_SIOCINQ };
	tell("SIOCINQ", run(&sqe).res);
	sqe.cmd_op = SOCKET_URING_OP_SIOCOUTQ;
	tell("SIOCOUTQ", run(&sqe).res);
	close(pair[0]);
	close(pair[1]);
}

void test_uring(int family)
{
	if (!ring_open(0)) {
		say("io_uring", -1);
		return;
	}
	connects(family);
	accepts(family);
	polls(family);
	receives(family);
	sends(family);
	receives_bundle(family);
	close(ring.fd);
}

/* Whether the guest's own stack has it: a bound socket is in its table. */
static bool own(int fd, bool stream)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof(addr);
	char line[256], port[16];
	bool found = false;
	FILE *table;

	bind(fd, (struct sockaddr *)&addr, len);
	if (stream)
		listen(fd, 1);
	getsockname(fd, (struct sockaddr *)&addr, &len);
	snprintf(port, sizeof(port), ":%04X ", ntohs(addr.sin_port));
	table = fopen(stream ? "/proc/net/tcp" : "/proc/net/udp", "r");
	while (table && fgets(line, sizeof(line), table))
		found |= strstr(line, port) != NULL;
	if (table)
		fclose(table);
	return found;
}

static void whose_is(const char *name, int fd, bool stream)
{
	printf("%s: %s\n", name, fd < 0 ? "none" : own(fd, stream) ? "own" : "outsourced");
	close(fd);
}

/* Attaches a program that lets everything pass to what a control group sends; it stays there with the group. */
int filtered(const char *group)
{
	static const struct bpf_insn program[] = {
		{ .code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = BPF_REG_0, .imm = 1 }, { .code = BPF_JMP | BPF_EXIT },
	};
	union bpf_attr attr = { .prog_type = BPF_PROG_TYPE_CGROUP_SKB, .insns = (unsigned long)program, .insn_cnt = 2,
				.license = (unsigned long)"GPL", .expected_attach_type = BPF_CGROUP_INET_EGRESS };
	int fd = syscall(SYS_bpf, BPF_PROG_LOAD, &attr, sizeof(attr)), dir = open(group, O_RDONLY | O_DIRECTORY);

	memset(&attr, 0, sizeof(attr));
	attr.target_fd = dir;
	attr.attach_bpf_fd = fd;
	attr.attach_type = BPF_CGROUP_INET_EGRESS;
	if (fd < 0 || dir < 0 || syscall(SYS_bpf, BPF_PROG_ATTACH, &attr, sizeof(attr))) {
		perror("no program is attached");
		return 1;
	}
	return 0;
}

/* Whether a port below 1024 may be bound. */
int low_port(void)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_port = htons(81) };
	int fd = socket(AF_INET, SOCK_DGRAM, 0);

	say("low port", bind(fd, (struct sockaddr *)&addr, sizeof(addr)));
	close(fd);
	return 0;
}

/* A socket of each way there is to make one. */
int whose(void)
{
	static const struct {
		const char *name;
		unsigned int flags, sqe;
	} ways[] = { { "submitter", 0, 0 }, { "worker", 0, IOSQE_ASYNC }, { "poller", IORING_SETUP_SQPOLL, 0 } };
	struct io_uring_sqe sqe = { .opcode = IORING_OP_SOCKET, .fd = AF_INET, .off = SOCK_DGRAM };
	unsigned int i;

	whose_is("stream", socket(AF_INET, SOCK_STREAM, 0), true);
	whose_is("datagram", socket(AF_INET, SOCK_DGRAM, 0), false);
	whose_is("mptcp", socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, IPPROTO_MPTCP), true);
	for (i = 0; i < 3; i++) {
		if (!ring_open(ways[i].flags))
			continue;
		sqe.flags = ways[i].sqe;
		whose_is(ways[i].name, run(&sqe).res, false);
		close(ring.fd);
	}
	return 0;
}
