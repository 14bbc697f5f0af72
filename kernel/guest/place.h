/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * On which vCPU a deadline task is placed, and what that vCPU then needs from the host (RTVirt,
 * section 3.2): partitioned EDF with best fit; if the free bandwidth is fragmented, all tasks are
 * placed anew. Pure: it is also tested as a program (tests/place.c).
 *
 * Bandwidth is in 1 / 2^20 of a CPU, rounded up. Times are ns, periods at most
 * ONTIME_BW_PERIOD_MAX, so that the product of two fits 64 bits.
 */
#ifndef ONTIME_PLACE_H
#define ONTIME_PLACE_H

#include "ontime_abi.h"

#define PLACE_ONE (1u << 20)
/*
 * The most that deadline tasks may have of a vCPU: what the kernel's own admission allows
 * (sched_rt_runtime_us).
 */
#define PLACE_ROOM (PLACE_ONE / 20 * 19)
#define PLACE_NONE (~0u)

struct place_task {
	unsigned long long runtime, period;
	unsigned long long allowed;	/* the vCPUs that it may have, a bit each */
	unsigned int vcpu;		/* PLACE_NONE: not placed yet */
};

struct place_need {
	unsigned long long budget, period;	/* both 0: nothing */
};

static inline unsigned int place_bandwidth(const struct place_task *task)
{
	return (unsigned int)(((task->runtime << 20) + task->period - 1) / task->period);
}

static inline unsigned int place_load(const struct place_task *tasks, unsigned int count, unsigned int vcpu)
{
	unsigned int load = 0, i;

	for (i = 0; i < count; i++)
		if (tasks[i].vcpu == vcpu)
			load += place_bandwidth(&tasks[i]);
	return load;
}

/*
 * The fullest vCPU of @usable (a bit each) that @task may have and that has room for it; among
 * equally full ones the lowest.
 */
static inline unsigned int place_best(const struct place_task *tasks, unsigned int count, unsigned long long usable,
				      const struct place_task *task)
{
	unsigned int best = PLACE_NONE, most = 0, vcpu;

	usable &= task->allowed;
	for (vcpu = 0; vcpu < ONTIME_VCPUS_MAX && usable >> vcpu; vcpu++) {
		unsigned int filled;

		if (!(usable >> vcpu & 1))
			continue;
		filled = place_load(tasks, count, vcpu) + place_bandwidth(task);
		if (filled <= PLACE_ROOM && filled > most) {
			most = filled;
			best = vcpu;
		}
	}
	return best;
}

/*
 * Places all tasks anew, the largest first. Returns 0 if one does not fit; then their vcpu members
 * are not valid.
 */
static inline int place_all(struct place_task *tasks, unsigned int count, unsigned long long usable)
{
	unsigned int done, i;

	for (i = 0; i < count; i++)
		tasks[i].vcpu = PLACE_NONE;
	for (done = 0; done < count; done++) {
		struct place_task *largest = 0;

		for (i = 0; i < count; i++)
			if (tasks[i].vcpu == PLACE_NONE &&
			    (!largest || place_bandwidth(&tasks[i]) > place_bandwidth(largest)))
				largest = &tasks[i];
		largest->vcpu = place_best(tasks, count, usable, largest);
		if (largest->vcpu == PLACE_NONE)
			return 0;
	}
	return 1;
}

/*
 * What the host is asked for: the sum of the tasks' bandwidths, in the shortest of their periods
 * (section 3.2).
 */
static inline struct place_need place_need(const struct place_task *tasks, unsigned int count, unsigned int vcpu)
{
	struct place_need need = { 0, 0 };
	unsigned int i;

	for (i = 0; i < count; i++)
		if (tasks[i].vcpu == vcpu && (!need.period || tasks[i].period < need.period))
			need.period = tasks[i].period;
	for (i = 0; i < count; i++)
		if (tasks[i].vcpu == vcpu)
			need.budget += (tasks[i].runtime * need.period + tasks[i].period - 1) / tasks[i].period;
	if (need.budget > need.period)
		need.budget = need.period;
	return need;
}

#endif
