/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * The conformance program makes socket calls and prints what each gave: one line a call, without anything that differs
 * from run to run (ports, times, descriptor numbers). The same program on the guest's own stack and on outsourced
 * sockets must print the same.
 */
#ifndef CONFORM_H
#define CONFORM_H

#include <stdbool.h>
#include <netinet/in.h>
#include <sys/socket.h>

/* "NAME: RESULT" or "NAME: ERRNO"; the result is passed on. */
long say(const char *name, long result);
/* "NAME: VALUE" */
void show(const char *name, long value);
void show_poll(const char *name, int fd, short events, int timeout);
void section(const char *name);

/* Sockets on the loopback interface, family AF_INET or AF_INET6. */
int tcp_listener(int family, struct sockaddr_storage *addr, socklen_t *len);
void tcp_pair(int family, int pair[2]);
/* Fills the socket's buffers by sends with these flags, until nothing more can be sent for a while. */
void fill(int fd, int flags);
int udp_bound(int family, struct sockaddr_storage *addr, socklen_t *len);
int port_of(const struct sockaddr_storage *addr);
/* Milliseconds of a monotonic clock. */
long now_ms(void);
/* Runs @run in a thread after @ms milliseconds; join with later_join(). */
void later(int ms, void (*run)(int), int arg);
void later_join(void);

void test_create(void);
void test_stream(int family);
void test_connect(int family);
void test_dgram(int family);
void test_options(int family);
void test_wait(int family);
void test_epoll(int family);
void test_large(int family);
void test_process(int family);
void test_edges(int family);
void test_pairs(int family);
void test_kinds(int family);
void test_more(int family);
void test_lengths(int family);
void test_uring(int family);
void test_filters(int family);
int whose(void);
int filtered(const char *group);
int low_port(void);

#endif
