// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * The states of a socket and what leads from each to the next: every operation in every state, and every two operations
 * one after the other, then what the socket says of itself. A line an edge: what the operations gave, the poll bits,
 * SO_ERROR, SO_ACCEPTCONN, the poll bits after that, and what a receive gives.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include "conform.h"

#define SETTLE_US 10000
#define COUNT(array) (sizeof(array) / sizeof(*(array)))
/* No server has this port, and no socket gets it by chance. */
#define NOBODYS_PORT 9

/* What an edge is made of: the socket itself, its peer or another socket in a state's way, a listener to connect to. */
struct place {
	int family, type, fd, peer, more, listener;
	struct sockaddr_storage addr, gone;
	socklen_t len;
};

static void other_listener(struct place *place)
{
	place->listener = tcp_listener(place->family, &place->addr, &place->len);
	place->gone = place->addr;
	/* The port is at the same place for both families. */
	((struct sockaddr_in *)&place->gone)->sin_port = htons(NOBODYS_PORT);
}

static short polled(int fd)
{
	struct pollfd one = { .fd = fd, .events = POLLIN | POLLPRI | POLLOUT | POLLRDHUP };

	poll(&one, 1, 0);
	return one.revents;
}

/* Waits until one of these poll bits is set, for at most two seconds. */
static void await(int fd, short bits)
{
	int i;

	for (i = 0; i < 2000000 / SETTLE_US && !(polled(fd) & bits); i++)
		usleep(SETTLE_US);
}

static void fresh(struct place *place)
{
	place->fd = socket(place->family, place->type, 0);
}

static void bound(struct place *place)
{
	struct sockaddr_storage addr;
	socklen_t len;

	place->fd = place->type == SOCK_STREAM ? tcp_listener(place->family, &addr, &len) :
						 udp_bound(place->family, &addr, &len);
}

static void connected(struct place *place)
{
	int pair[2];

	if (place->type == SOCK_STREAM) {
		tcp_pair(place->family, pair);
		place->fd = pair[0];
		place->peer = pair[1];
		return;
	}
	place->fd = socket(place->family, place->type, 0);
	place->peer = udp_bound(place->family, &place->addr, &place->len);
	connect(place->fd, (struct sockaddr *)&place->addr, place->len);
}

static void with_data(struct place *place)
{
	struct sockaddr_storage addr;
	socklen_t len = sizeof(addr);

	connected(place);
	getsockname(place->fd, (struct sockaddr *)&addr, &len);
	sendto(place->peer, "abc", 3, 0, place->type == SOCK_DGRAM ? (struct sockaddr *)&addr : NULL,
	       place->type == SOCK_DGRAM ? len : 0);
}

static void dissolve(int fd)
{
	struct sockaddr none = { .sa_family = AF_UNSPEC };

	connect(fd, &none, sizeof(none));
}

static void dissolved(struct place *place)
{
	connected(place);
	dissolve(place->fd);
}

static void shut(struct place *place, int how)
{
	connected(place);
	shutdown(place->fd, how);
}

static void shut_read(struct place *place)
{
	shut(place, SHUT_RD);
}

static void shut_write(struct place *place)
{
	shut(place, SHUT_WR);
}

static void shut_both(struct place *place)
{
	shut(place, SHUT_RDWR);
}

static void fresh_shut(struct place *place)
{
	fresh(place);
	shutdown(place->fd, SHUT_RDWR);
}

/* A socket of IPv6 that has become one of IPv4. */
static void of_ipv4(struct place *place)
{
	struct sockaddr_in6 addr = { .sin6_family = AF_INET6 };
	socklen_t len = sizeof(addr);
	int v4 = AF_INET, server;

	if (place->family != AF_INET6) {
		connected(place);
		return;
	}
	inet_pton(AF_INET6, "::ffff:127.0.0.1", &addr.sin6_addr);
	server = socket(AF_INET6, place->type, 0);
	bind(server, (struct sockaddr *)&addr, len);
	getsockname(server, (struct sockaddr *)&addr, &len);
	listen(server, 1);
	place->fd = socket(AF_INET6, place->type, 0);
	connect(place->fd, (struct sockaddr *)&addr, len);
	setsockopt(place->fd, IPPROTO_IPV6, IPV6_ADDRFORM, &v4, sizeof(v4));
	place->peer = server;
	if (place->type == SOCK_STREAM) {
		place->peer = accept(server, NULL, NULL);
		close(server);
	}
}

static void pending(struct place *place)
{
	struct sockaddr_storage addr;
	socklen_t len;

	place->fd = tcp_listener(place->family, &addr, &len);
	place->peer = socket(place->family, SOCK_STREAM, 0);
	connect(place->peer, (struct sockaddr *)&addr, len);
}

static void listener_shut(struct place *place)
{
	bound(place);
	shutdown(place->fd, SHUT_RD);
}

static void listener_dissolved(struct place *place)
{
	pending(place);
	dissolve(place->fd);
}

static void refused(struct place *place)
{
	fresh(place);
	connect(place->fd, (struct sockaddr *)&place->gone, place->len);
}

/* The application has not seen the error yet. */
static void refused_unseen(struct place *place)
{
	fresh(place);
	fcntl(place->fd, F_SETFL, O_NONBLOCK);
	connect(place->fd, (struct sockaddr *)&place->gone, place->len);
	fcntl(place->fd, F_SETFL, 0);
}

static void refused_read(struct place *place)
{
	int value;
	socklen_t len = sizeof(value);

	refused_unseen(place);
	await(place->fd, POLLERR);
	getsockopt(place->fd, SOL_SOCKET, SO_ERROR, &value, &len);
}

static void peer_closed(struct place *place)
{
	with_data(place);
	close(place->peer);
	place->peer = -1;
}

static void peer_shut(struct place *place)
{
	connected(place);
	shutdown(place->peer, SHUT_WR);
}

static void reset(int fd)
{
	struct linger abort = { 1, 0 };

	setsockopt(fd, SOL_SOCKET, SO_LINGER, &abort, sizeof(abort));
	close(fd);
}

static void peer_reset(struct place *place)
{
	connected(place);
	reset(place->peer);
	place->peer = -1;
}

static void reset_before_accept(struct place *place)
{
	int listener;

	pending(place);
	reset(place->peer);
	place->peer = -1;
	usleep(SETTLE_US);
	listener = place->fd;
	place->fd = accept(listener, NULL, NULL);
	close(listener);
}

/* What is sent after the peer's end is answered by a reset. */
static void reset_after_end(struct place *place)
{
	connected(place);
	close(place->peer);
	place->peer = -1;
	usleep(SETTLE_US);
	send(place->fd, "x", 1, MSG_NOSIGNAL);
}

/* To a listener whose queue is full: no answer comes. */
static void connecting(struct place *place)
{
	struct sockaddr_storage addr;
	socklen_t len;

	place->more = tcp_listener(place->family, &addr, &len);
	listen(place->more, 0);
	place->peer = socket(place->family, SOCK_STREAM, 0);
	connect(place->peer, (struct sockaddr *)&addr, len);
	place->fd = socket(place->family, SOCK_STREAM | SOCK_NONBLOCK, 0);
	connect(place->fd, (struct sockaddr *)&addr, len);
}

/* ICMP says that nobody is there. */
static void told_of_nobody(struct place *place)
{
	connected(place);
	close(place->peer);
	place->peer = -1;
	send(place->fd, "x", 1, 0);
}

/* @until: poll bits that show the state, if it comes later than the call that leads to it. */
struct state {
	const char *name;
	void (*make)(struct place *place);
	short until;
};

static const struct state streams[] = {
	{ "fresh", fresh, 0 }, { "fresh, shut", fresh_shut, 0 }, { "listening", bound, 0 },
	{ "listening, one waits", pending, POLLIN },
	{ "listener shut", listener_shut, 0 }, { "listener dissolved", listener_dissolved, 0 }, { "connected", connected, 0 },
	{ "with data", with_data, POLLIN }, { "dissolved", dissolved, 0 }, { "shut to read", shut_read, 0 },
	{ "shut to write", shut_write, 0 }, { "shut", shut_both, 0 }, { "refused", refused, 0 },
	{ "refused, unseen", refused_unseen, POLLERR }, { "refused, read", refused_read, 0 },
	{ "peer closed", peer_closed, POLLRDHUP }, { "peer shut", peer_shut, POLLRDHUP },
	{ "peer reset", peer_reset, POLLERR }, { "reset before accept", reset_before_accept, 0 },
	{ "connecting", connecting, 0 }, { "reset after the end", reset_after_end, POLLERR },
	{ "of IPv4", of_ipv4, 0 },
};

static const struct state datagrams[] = {
	{ "fresh", fresh, 0 }, { "fresh, shut", fresh_shut, 0 }, { "bound", bound, 0 }, { "connected", connected, 0 },
	{ "with data", with_data, POLLIN }, { "dissolved", dissolved, 0 }, { "shut to read", shut_read, 0 },
	{ "shut to write", shut_write, 0 }, { "shut", shut_both, 0 }, { "told of nobody", told_of_nobody, POLLERR },
	{ "of IPv4", of_ipv4, 0 },
};

static long op_nothing(struct place *place)
{
	(void)place;
	return 0;
}

static long op_recv(struct place *place)
{
	char in[2];

	return recv(place->fd, in, sizeof(in), MSG_DONTWAIT);
}

static long op_peek(struct place *place)
{
	char in[2];

	return recv(place->fd, in, sizeof(in), MSG_DONTWAIT | MSG_PEEK);
}

static long op_urgent(struct place *place)
{
	char in[2];

	return recv(place->fd, in, sizeof(in), MSG_DONTWAIT | MSG_OOB);
}

static long op_send(struct place *place)
{
	return send(place->fd, "x", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
}

static long op_connect(struct place *place)
{
	return connect(place->fd, (struct sockaddr *)&place->addr, place->len);
}

static long op_connect_to_nobody(struct place *place)
{
	return connect(place->fd, (struct sockaddr *)&place->gone, place->len);
}

static long op_dissolve(struct place *place)
{
	struct sockaddr none = { .sa_family = AF_UNSPEC };

	return connect(place->fd, &none, sizeof(none));
}

static long op_bind(struct place *place)
{
	struct sockaddr_storage any = { .ss_family = place->family };

	return bind(place->fd, (struct sockaddr *)&any, place->len);
}

static long op_bind_unspec(struct place *place)
{
	struct sockaddr_storage any = { .ss_family = AF_UNSPEC };

	return bind(place->fd, (struct sockaddr *)&any, place->len);
}

static long op_listen(struct place *place)
{
	return listen(place->fd, 4);
}

static long op_accept(struct place *place)
{
	int child, flags = fcntl(place->fd, F_GETFL);

	fcntl(place->fd, F_SETFL, flags | O_NONBLOCK);
	child = accept(place->fd, NULL, NULL);
	if (child >= 0)
		close(child);
	fcntl(place->fd, F_SETFL, flags);
	return child < 0 ? -1 : 0;
}

static long op_shut_read(struct place *place)
{
	return shutdown(place->fd, SHUT_RD);
}

static long op_shut_write(struct place *place)
{
	return shutdown(place->fd, SHUT_WR);
}

static long op_shut(struct place *place)
{
	return shutdown(place->fd, SHUT_RDWR);
}

static long op_peer(struct place *place)
{
	struct sockaddr_storage name;
	socklen_t len = sizeof(name);

	return getpeername(place->fd, (struct sockaddr *)&name, &len);
}

static long op_unread(struct place *place)
{
	int number = -1;

	return ioctl(place->fd, FIONREAD, &number) ? -1 : number;
}

/* Whether the socket is the same after an operation; whether datagram sockets refuse it, or take it for "recv". */
#define ASKS 1
#define OF_STREAMS 2

static const struct {
	const char *name;
	long (*run)(struct place *place);
	int kind;
} ops[] = {
	{ "nothing", op_nothing, ASKS }, { "recv", op_recv, 0 }, { "peek", op_peek, 0 }, { "urgent", op_urgent, OF_STREAMS },
	{ "send", op_send, 0 }, { "connect", op_connect, 0 }, { "connect to nobody", op_connect_to_nobody, 0 },
	{ "dissolve", op_dissolve, 0 }, { "bind", op_bind, 0 }, { "bind unspec", op_bind_unspec, 0 },
	{ "listen", op_listen, OF_STREAMS }, { "accept", op_accept, OF_STREAMS }, { "shut read", op_shut_read, 0 },
	{ "shut write", op_shut_write, 0 }, { "shut", op_shut, 0 }, { "peer's name", op_peer, ASKS },
	{ "unread", op_unread, ASKS },
};

static const char *said(char *text, size_t size, long result)
{
	if (result < 0)
		return strerrorname_np(errno);
	snprintf(text, size, "%ld", result);
	return text;
}

static int number_of(int fd, int name)
{
	int value = -1;
	socklen_t len = sizeof(value);

	getsockopt(fd, SOL_SOCKET, name, &value, &len);
	return value;
}

/* What operations give one after the other in a state, and what the socket says then; to be freed. For any thread. */
static char *sequence(int family, int type, const struct state *state, const unsigned int *steps, unsigned int count,
		      unsigned int settle_us)
{
	struct place place = { .family = family, .type = type, .fd = -1, .peer = -1, .more = -1, .listener = -1 };
	char *text = NULL, got[24];
	size_t length = 0;
	FILE *out = open_memstream(&text, &length);
	short before, after;
	unsigned int i;
	int error;

	other_listener(&place);
	state->make(&place);
	usleep(settle_us);
	if (state->until)
		await(place.fd, state->until);
	fprintf(out, "%d %s %s", family, type == SOCK_STREAM ? "stream" : "datagram", state->name);
	for (i = 0; i < count; i++)
		fprintf(out, ", %s", ops[steps[i]].name);
	fputs(": ", out);
	for (i = 0; i < count; i++) {
		fprintf(out, "%s, ", said(got, sizeof(got), ops[steps[i]].run(&place)));
		usleep(settle_us);
	}
	before = polled(place.fd);
	error = number_of(place.fd, SO_ERROR);
	after = polled(place.fd);
	fprintf(out, "%#x, %s, %d, %#x, ", before, error ? strerrorname_np(error) : "0",
		number_of(place.fd, SO_ACCEPTCONN), after);
	fputs(said(got, sizeof(got), op_recv(&place)), out);
	fclose(out);
	close(place.fd);
	close(place.peer);
	close(place.more);
	close(place.listener);
	return text;
}

static void edge(int family, int type, const struct state *state, unsigned int op)
{
	char *text = sequence(family, type, state, &op, 1, SETTLE_US);

	printf("edge %s\n", text);
	fflush(stdout);
	free(text);
}

/* Two operations, one after the other, in a state. */
struct pair {
	unsigned int number;
	int family, type;
	const struct state *state;
	unsigned int steps[2];
	char *text;
};

static struct pair pairs[(COUNT(streams) + COUNT(datagrams)) * COUNT(ops) * COUNT(ops)];
static unsigned int pair_count, pair_settle_us;
static atomic_uint pair_next;

static void *pair_worker(void *unused)
{
	unsigned int i;

	while ((i = atomic_fetch_add(&pair_next, 1)) < pair_count) {
		struct pair *pair = &pairs[i];

		pair->text = sequence(pair->family, pair->type, pair->state, pair->steps, 2, pair_settle_us);
	}
	return unused;
}

static unsigned int number_from(const char *variable, unsigned int otherwise)
{
	const char *value = getenv(variable);

	return value && atoi(value) > 0 ? (unsigned int)atoi(value) : otherwise;
}

/* Whether a file has a line with this number. */
static bool listed(const char *path, unsigned int number)
{
	FILE *file = fopen(path, "r");
	unsigned int line;
	bool found = false;

	while (file && !found && fscanf(file, "%u", &line) == 1)
		found = line == number;
	if (file)
		fclose(file);
	return found;
}

/*
 * Adds the pairs of a kind of sockets. An operation that only asks leaves the state as it is, so none of these comes
 * first; "nothing" does not come second: the edges have both.
 */
static void add_pairs(int family, int type, const struct state *states, unsigned int count, unsigned int *number)
{
	const char *only = getenv("PAIRS_ONLY");
	unsigned int one_in = number_from("PAIRS", 9), i, first, second;

	for (i = 0; i < count; i++) {
		/* For IPv4 this is "connected". */
		if (states[i].make == of_ipv4 && family == AF_INET)
			continue;
		for (first = 0; first < COUNT(ops); first++) {
			for (second = 1; second < COUNT(ops); second++) {
				if (ops[first].kind & ASKS)
					continue;
				if (type == SOCK_DGRAM && (ops[first].kind | ops[second].kind) & OF_STREAMS)
					continue;
				++*number;
				if (only ? !listed(only, *number) : *number % one_in != 0)
					continue;
				pairs[pair_count++] = (struct pair) {
					.number = *number, .family = family, .type = type, .state = &states[i],
					.steps = { first, second },
				};
			}
		}
	}
}

/*
 * One in $PAIRS of the pairs (9; a number without a common divisor with those of operations, so that the states have
 * different ones). They are mostly pauses, so some run at the same time. $PAIRS_ONLY: a file with the numbers of those
 * to run, each alone.
 */
void test_pairs(int family)
{
	/* Each family has its own numbers. */
	unsigned int number = family == AF_INET ? 0 : 100000, alone = getenv("PAIRS_ONLY") != NULL, i;
	pthread_t threads[8];

	pair_count = 0;
	atomic_store(&pair_next, 0);
	pair_settle_us = (alone ? 5 : 2) * SETTLE_US * number_from("SLOW", 1);
	add_pairs(family, SOCK_STREAM, streams, COUNT(streams), &number);
	add_pairs(family, SOCK_DGRAM, datagrams, COUNT(datagrams), &number);
	for (i = 0; i < (alone ? 1 : COUNT(threads)); i++)
		pthread_create(&threads[i], NULL, pair_worker, NULL);
	for (i = 0; i < (alone ? 1 : COUNT(threads)); i++)
		pthread_join(threads[i], NULL);
	for (i = 0; i < pair_count; i++) {
		printf("pair %u %s\n", pairs[i].number, pairs[i].text);
		free(pairs[i].text);
	}
	fflush(stdout);
}

/* How a wait ends, beside shutdown()'s numbers. */
enum { DISSOLVED = -1, PEER_CLOSES = -2, PEER_RESETS = -3 };

/* What waits ends as the socket changes in another thread, or as its peer does. */
struct waiting {
	int fd;
	void *(*wait)(void *fd);
	long result;
	int error;
};

static struct waiting now;

static void *waits(void *unused)
{
	char in[4];
	struct pollfd one = { .fd = now.fd, .events = POLLIN };

	if (now.wait == NULL)
		now.result = recv(now.fd, in, sizeof(in), 0);
	else if (now.wait == (void *)poll)
		now.result = poll(&one, 1, 3000) > 0 ? one.revents : -1;
	else
		now.result = accept(now.fd, NULL, NULL);
	now.error = errno;
	return unused;
}

static const char *ended_by(int how)
{
	switch (how) {
	case DISSOLVED:
		return "dissolved";
	case PEER_CLOSES:
		return "peer closes";
	case PEER_RESETS:
		return "peer resets";
	case SHUT_RD:
		return "shut to read";
	default:
		return "shut";
	}
}

static void end_by(struct place *place, int how)
{
	switch (how) {
	case DISSOLVED:
		dissolve(place->fd);
		return;
	case PEER_CLOSES:
		close(place->peer);
		break;
	case PEER_RESETS:
		reset(place->peer);
		break;
	default:
		shutdown(place->fd, how);
		return;
	}
	place->peer = -1;
}

static void ends(int family, int type, const char *what, void (*make)(struct place *place), void *wait, int how)
{
	struct place place = { .family = family, .type = type, .fd = -1, .peer = -1, .more = -1, .listener = -1 };
	pthread_t thread;
	char got[24];
	int error;

	other_listener(&place);
	make(&place);
	now = (struct waiting) { .fd = place.fd, .wait = wait };
	pthread_create(&thread, NULL, waits, NULL);
	usleep(100000);
	end_by(&place, how);
	pthread_join(thread, NULL);
	errno = now.error;
	printf("ends %d %d %s, %s: %s", family, type, what, ended_by(how), said(got, sizeof(got), now.result));
	error = number_of(place.fd, SO_ERROR);
	printf(", then %s\n", error ? strerrorname_np(error) : "0");
	fflush(stdout);
	close(place.fd);
	close(place.peer);
	close(place.more);
	close(place.listener);
}

/* What a blocking connect() of a socket that is connecting gives in two threads, when a third one ends the attempt. */
struct connector {
	int fd, error;
	struct sockaddr_storage addr;
	socklen_t len;
};

static void *connects(void *arg)
{
	struct connector *connector = arg;

	connector->error = connect(connector->fd, (struct sockaddr *)&connector->addr, connector->len) ? errno : 0;
	return NULL;
}

/*
 * Only one of them is told why; for the other it was aborted: ECONNABORTED, or EPIPE (newer kernels, of local sockets).
 * Neither begins a second attempt.
 */
static void connect_ended(int family)
{
	struct place place = { .family = family, .type = SOCK_STREAM, .fd = -1, .peer = -1, .more = -1 };
	struct connector two[2] = {};
	pthread_t threads[2];
	int i, reset_ones = 0, aborted = 0;

	connecting(&place);
	fcntl(place.fd, F_SETFL, 0);
	for (i = 0; i < 2; i++) {
		two[i].fd = place.fd;
		two[i].len = sizeof(two[i].addr);
		getsockname(place.more, (struct sockaddr *)&two[i].addr, &two[i].len);
		pthread_create(&threads[i], NULL, connects, &two[i]);
	}
	usleep(100000);
	shutdown(place.fd, SHUT_RDWR);
	for (i = 0; i < 2; i++) {
		pthread_join(threads[i], NULL);
		reset_ones += two[i].error == ECONNRESET;
		aborted += two[i].error == ECONNABORTED || two[i].error == EPIPE;
		if (two[i].error == EINPROGRESS)
			printf("connect ended %d: a second attempt\n", family);
	}
	printf("connect ended %d: %d reset, %d aborted, then %#x\n", family, reset_ones, aborted, polled(place.fd));
	fflush(stdout);
	close(place.fd);
	close(place.peer);
	close(place.more);
}

/* What poll says at once, without waiting for anything: of an attempt without an answer, and of a connection. */
static void polled_at_once(int family)
{
	short going = 0, stands = 0;
	int i;

	for (i = 0; i < 50; i++) {
		struct place place = { .family = family, .type = SOCK_STREAM, .fd = -1, .peer = -1, .more = -1 };
		int listener, fd;

		connecting(&place);
		going |= polled(place.fd);
		close(place.fd);
		close(place.peer);
		close(place.more);
		listener = tcp_listener(family, &place.addr, &place.len);
		fd = socket(family, SOCK_STREAM, 0);
		connect(fd, (struct sockaddr *)&place.addr, place.len);
		stands |= polled(fd);
		close(fd);
		close(listener);
	}
	printf("polled at once %d: %#x, %#x\n", family, going, stands);
	fflush(stdout);
}

void test_edges(int family)
{
	static const int hows[] = { SHUT_RD, SHUT_RDWR }, others[] = { DISSOLVED, PEER_CLOSES, PEER_RESETS };
	unsigned int i, j;

	for (i = 0; i < COUNT(streams); i++)
		for (j = 0; j < COUNT(ops); j++)
			edge(family, SOCK_STREAM, &streams[i], j);
	for (i = 0; i < COUNT(datagrams); i++)
		for (j = 0; j < COUNT(ops); j++)
			edge(family, SOCK_DGRAM, &datagrams[i], j);
	for (i = 0; i < COUNT(hows); i++) {
		ends(family, SOCK_STREAM, "recv", connected, NULL, hows[i]);
		ends(family, SOCK_STREAM, "poll", connected, poll, hows[i]);
		ends(family, SOCK_STREAM, "accept", bound, accept, hows[i]);
		ends(family, SOCK_STREAM, "poll of a listener", bound, poll, hows[i]);
		ends(family, SOCK_DGRAM, "recv", connected, NULL, hows[i]);
		ends(family, SOCK_DGRAM, "recv without a name", fresh, NULL, hows[i]);
		ends(family, SOCK_DGRAM, "recv bound", bound, NULL, hows[i]);
		ends(family, SOCK_DGRAM, "poll", connected, poll, hows[i]);
	}
	for (i = 0; i < COUNT(others); i++) {
		ends(family, SOCK_STREAM, "recv", connected, NULL, others[i]);
		ends(family, SOCK_STREAM, "poll", connected, poll, others[i]);
	}
	ends(family, SOCK_STREAM, "accept", bound, accept, DISSOLVED);
	connect_ended(family);
	polled_at_once(family);
}
