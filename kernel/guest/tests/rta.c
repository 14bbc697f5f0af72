// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * A periodic real-time application that knows nothing of Ontime: rta POLICY RUNTIME PERIOD WORK JOBS (us; POLICY
 * deadline, forks or other). Each job computes for WORK us of an idle CPU and is to be done within its period. JOBS 0:
 * only holds its reservation; forks is deadline with SCHED_FLAG_RESET_ON_FORK, and a child that stays. Says "refused:
 * EBUSY" (status 16), "refused: " and another error's text (status 1), "holds" or "holds, child PID", or "jobs N missed
 * M worst US". rta leave PID: has another one leave SCHED_DEADLINE; rta change PID RUNTIME PERIOD (us) has it ask for
 * something else, and says "changed" or "refused: ...".
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct attr {
	uint32_t size, policy;
	uint64_t flags;
	int32_t nice;
	uint32_t priority;
	uint64_t runtime, deadline, period;
};

static uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static void burn(uint64_t loops)
{
	while (loops--)
		__asm__ volatile("");
}

/* Loops a millisecond: the best of many short tries, as others may have the CPU meanwhile. */
static uint64_t calibrate(void)
{
	const uint64_t loops = 20000;
	uint64_t best = UINT64_MAX;
	int i;

	for (i = 0; i < 200; i++) {
		uint64_t start = now(), took;

		burn(loops);
		took = now() - start;
		if (took < best)
			best = took;
	}
	return loops * 1000000 / best;
}

static int refused(void)
{
	printf("refused: %s\n", errno == EBUSY ? "EBUSY" : strerror(errno));
	return errno == EBUSY ? 16 : 1;
}

static void ask_for(struct attr *attr, const char *runtime, const char *period)
{
	attr->runtime = strtoull(runtime, NULL, 10) * 1000;
	attr->deadline = attr->period = strtoull(period, NULL, 10) * 1000;
}

int main(int argc, char **argv)
{
	struct attr attr = { .size = sizeof(attr), .policy = 6 };
	uint64_t period, release, loops, worst = 0;
	unsigned long jobs, missed = 0, i;
	int forks;

	if (argc == 3 && !strcmp(argv[1], "leave")) {
		attr.policy = 0;
		return !!syscall(SYS_sched_setattr, atoi(argv[2]), &attr, 0);
	}
	if (argc == 5 && !strcmp(argv[1], "change")) {
		ask_for(&attr, argv[3], argv[4]);
		if (syscall(SYS_sched_setattr, atoi(argv[2]), &attr, 0))
			return refused();
		printf("changed\n");
		return 0;
	}
	if (argc != 6)
		return 2;
	setvbuf(stdout, NULL, _IOLBF, 0);
	mlockall(MCL_CURRENT | MCL_FUTURE);
	ask_for(&attr, argv[2], argv[3]);
	period = attr.period;
	jobs = strtoul(argv[5], NULL, 10);
	loops = jobs ? calibrate() * strtoull(argv[4], NULL, 10) / 1000 : 0;
	forks = !strcmp(argv[1], "forks");
	attr.flags = forks ? 1 : 0; /* SCHED_FLAG_RESET_ON_FORK */
	if (strcmp(argv[1], "other") && syscall(SYS_sched_setattr, 0, &attr, 0))
		return refused();
	if (!jobs) {
		pid_t child = forks ? fork() : 0;

		if (child)
			printf("holds, child %d\n", child);
		else if (!forks)
			printf("holds\n");
		for (;;)
			pause();
	}
	release = now() + period;
	for (i = 0; i < jobs; i++, release += period) {
		struct timespec at = { release / 1000000000, release % 1000000000 };
		uint64_t took;

		while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &at, NULL))
			;
		burn(loops);
		took = now() - release;
		missed += took > period;
		if (took > worst)
			worst = took;
	}
	printf("jobs %lu missed %lu worst %lu\n", jobs, missed, (unsigned long)(worst / 1000));
	return 0;
}
