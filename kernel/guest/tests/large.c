// SPDX-License-Identifier: GPL-2.0-or-later
/* Large transfers, and sockets across processes. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/uio.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include "conform.h"

#define LARGE (3 << 20)

static char *pattern;

static uint32_t sum(const char *data, size_t length)
{
	uint32_t value = 2166136261u;
	size_t i;

	for (i = 0; i < length; i++)
		value = (value ^ (uint8_t)data[i]) * 16777619u;
	return value;
}

struct reader {
	int fd;
	size_t piece, got;
	uint32_t sum;
};

/* Reads to the end in pieces. */
static void *read_all(void *arg)
{
	struct reader *reader = arg;
	char *all = malloc(LARGE + 1);
	ssize_t got;

	while ((got = recv(reader->fd, all + reader->got,
			   reader->piece < LARGE + 1 - reader->got ? reader->piece : LARGE + 1 - reader->got, 0)) > 0)
		reader->got += got;
	reader->sum = sum(all, reader->got);
	free(all);
	return NULL;
}

static void transfer(int family, size_t piece, int how)
{
	struct reader reader = { .piece = piece };
	struct iovec iov[1024];
	struct pollfd writable;
	pthread_t thread;
	size_t sent = 0;
	ssize_t result;
	int pair[2], file, i;
	off_t at = 0;

	tcp_pair(family, pair);
	reader.fd = pair[1];
	pthread_create(&thread, NULL, read_all, &reader);
	switch (how) {
	case 0:
		say("send", send(pair[0], pattern, LARGE, 0));
		break;
	case 1:
		for (i = 0; i < 1024; i++)
			iov[i] = (struct iovec){ pattern + i * (LARGE / 1024), LARGE / 1024 };
		say("writev", writev(pair[0], iov, 1024));
		break;
	case 2:
		file = memfd_create("file", 0);
		result = write(file, pattern, LARGE);
		while (at < LARGE && (result = sendfile(pair[0], file, &at, LARGE - at)) > 0)
			;
		say("sendfile", at);
		close(file);
		break;
	case 3:
		fcntl(pair[0], F_SETFL, O_NONBLOCK);
		writable = (struct pollfd){ pair[0], POLLOUT, 0 };
		while (sent < LARGE && poll(&writable, 1, 5000) == 1) {
			result = send(pair[0], pattern + sent, LARGE - sent, 0);
			if (result < 0 && errno != EAGAIN)
				break;
			sent += result > 0 ? result : 0;
		}
		show("sent without blocking", sent);
		break;
	}
	shutdown(pair[0], SHUT_WR);
	pthread_join(thread, NULL);
	show("received", reader.got);
	show("same", reader.sum == sum(pattern, LARGE));
	close(pair[0]);
	close(pair[1]);
}

void test_large(int family)
{
	size_t i;

	pattern = malloc(LARGE);
	for (i = 0; i < LARGE; i++)
		pattern[i] = i * 31 + i / 4099;
	transfer(family, 1000, 0);
	transfer(family, 65536, 0);
	transfer(family, LARGE, 0);
	transfer(family, 65536, 1);
	transfer(family, 65536, 2);
	transfer(family, 100000, 3);
	free(pattern);
}

/* A socket in two processes is closed when the last one closes it. */
static void forked(int family)
{
	int pair[2], status, copy;
	char in[8];
	pid_t child;

	tcp_pair(family, pair);
	child = fork();
	if (!child) {
		send(pair[0], "child", 5, 0);
		_exit(0);
	}
	waitpid(child, &status, 0);
	say("recv from child", recv(pair[1], in, sizeof(in), 0));
	show_poll("still open", pair[1], POLLIN | POLLRDHUP, 100);
	copy = dup(pair[0]);
	close(pair[0]);
	say("send dup", send(copy, "dup", 3, 0));
	say("recv dup", recv(pair[1], in, sizeof(in), 0));
	close(copy);
	say("recv end", recv(pair[1], in, sizeof(in), 0));
	close(pair[1]);
}

/* A descriptor sent to another process through AF_UNIX. */
static void passed(int family)
{
	union {
		struct cmsghdr header;
		char room[CMSG_SPACE(sizeof(int))];
	} control;
	char byte = 'x';
	struct iovec iov = { &byte, 1 };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof(control) };
	struct cmsghdr *c;
	int local[2], pair[2], fd, status;
	char in[8];
	pid_t child;

	tcp_pair(family, pair);
	say("socketpair", socketpair(AF_UNIX, SOCK_STREAM, 0, local));
	child = fork();
	if (!child) {
		close(pair[0]);
		close(pair[1]);
		if (recvmsg(local[1], &msg, 0) != 1)
			_exit(1);
		c = CMSG_FIRSTHDR(&msg);
		memcpy(&fd, CMSG_DATA(c), sizeof(fd));
		_exit(send(fd, "passed", 6, 0) == 6 ? 0 : 2);
	}
	c = CMSG_FIRSTHDR(&msg);
	*c = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS };
	memcpy(CMSG_DATA(c), &pair[0], sizeof(int));
	say("pass", sendmsg(local[0], &msg, 0));
	close(pair[0]);
	waitpid(child, &status, 0);
	show("child", WEXITSTATUS(status));
	say("recv passed", recv(pair[1], in, sizeof(in), 0));
	say("recv end", recv(pair[1], in, sizeof(in), 0));
	close(pair[1]);
	close(local[0]);
	close(local[1]);
}

/* A process that is killed while it waits leaves nothing behind: its peer sees the end. */
static void killed(int family)
{
	int pair[2], status;
	char in[8];
	pid_t child;

	tcp_pair(family, pair);
	child = fork();
	if (!child) {
		close(pair[1]);
		recv(pair[0], in, sizeof(in), 0);
		_exit(0);
	}
	close(pair[0]);
	usleep(100000);
	kill(child, 9);
	waitpid(child, &status, 0);
	show("killed", WIFSIGNALED(status));
	say("recv end", recv(pair[1], in, sizeof(in), 0));
	close(pair[1]);
}

void test_process(int family)
{
	forked(family);
	passed(family);
	killed(family);
}
