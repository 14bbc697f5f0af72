// SPDX-License-Identifier: GPL-2.0-or-later
/* Random sets of deadline tasks against what placement promises. place [SETS [SEED]] */
#include <stdio.h>
#include <stdlib.h>

#include "../place.h"

#define TASKS 24
#define FAIL(...) do { printf(__VA_ARGS__); exit(1); } while (0)

static unsigned long long state;

static unsigned long long any(unsigned long long below)
{
	state = state * 6364136223846793005ull + 1442695040888963407ull;
	return (state >> 33) % below;
}

static struct place_task random_task(void)
{
	/* One in four may have some vCPUs only. */
	struct place_task task = { .allowed = any(4) ? ~0ull : any(255) + 1, .vcpu = PLACE_NONE };

	task.period = (any(400) + 1) * 100000 * (any(10) ? 1 : 100);
	task.runtime = 1024 + any(1000) * task.period / 1100;
	return task;
}

/* By hand: best fit, the fragmented set, what a vCPU needs. */
static void known(void)
{
	struct place_task tasks[4] = {
		{ 5000000, 10000000, ~0ull, 0 }, { 3000000, 10000000, ~0ull, 1 }, { 6000000, 10000000, ~0ull, PLACE_NONE },
		{ 0, 1, ~0ull, PLACE_NONE },
	};
	struct place_task four = { 4000000, 10000000, ~0ull, PLACE_NONE };
	struct place_need need;

	if (place_best(tasks, 2, 3, &four) != 0)
		FAIL("best fit: the fuller one has room\n");
	if (place_best(tasks, 2, 2, &four) != 1)
		FAIL("best fit: only usable vCPUs\n");
	if (place_best(tasks, 2, 3, &tasks[2]) != 1)
		FAIL("best fit: only one has room\n");
	four.allowed = 2;
	if (place_best(tasks, 2, 3, &four) != 1)
		FAIL("best fit: only vCPUs that it may have\n");
	/* 0.5 and 0.3 on two vCPUs leave 0.45 and 0.65: one of 0.7 fits after both share one. */
	tasks[2].runtime = 7000000;
	if (place_best(tasks, 2, 3, &tasks[2]) != PLACE_NONE || !place_all(tasks, 3, 3))
		FAIL("a fragmented set is placed anew\n");
	if (tasks[0].vcpu != tasks[1].vcpu || tasks[2].vcpu == tasks[0].vcpu)
		FAIL("0.5 and 0.3 share a vCPU\n");
	tasks[0].vcpu = tasks[1].vcpu = 0;
	tasks[1].period = 15000000;
	need = place_need(tasks, 2, 0);
	if (need.period != 10000000 || need.budget != 7000000)
		FAIL("a vCPU's need: %llu in %llu\n", need.budget, need.period);
	need = place_need(tasks, 2, 5);
	if (need.period || need.budget)
		FAIL("an empty vCPU needs nothing\n");
}

static void one_set(unsigned int set)
{
	struct place_task tasks[TASKS], before[TASKS];
	unsigned int vcpus = any(8) + 1, count = 0, i;
	unsigned long long usable = (1ull << vcpus) - 1;

	for (i = 0; i < TASKS; i++) {
		struct place_task task = random_task();
		unsigned int vcpu = place_best(tasks, count, usable, &task), other;

		for (other = 0; other < vcpus; other++) {
			unsigned int load = place_load(tasks, count, other);

			if (load + place_bandwidth(&task) > PLACE_ROOM || !(task.allowed >> other & 1))
				continue;
			if (vcpu == PLACE_NONE)
				FAIL("set %u: vCPU %u has room, none is found\n", set, other);
			if (place_load(tasks, count, vcpu) < load)
				FAIL("set %u: vCPU %u is fuller than %u\n", set, other, vcpu);
		}
		if (vcpu == PLACE_NONE) {
			unsigned int j;

			for (j = 0; j < count; j++)
				before[j] = tasks[j];
			tasks[count] = task;
			if (!place_all(tasks, count + 1, usable)) {
				for (j = 0; j < count; j++)
					tasks[j] = before[j];
				continue;
			}
		} else {
			task.vcpu = vcpu;
			tasks[count] = task;
		}
		count++;
	}
	for (i = 0; i < count; i++)
		if (!(tasks[i].allowed >> tasks[i].vcpu & 1))
			FAIL("set %u: task %u is on vCPU %u, which it may not have\n", set, i, tasks[i].vcpu);
	for (i = 0; i < ONTIME_VCPUS_MAX; i++) {
		unsigned int load = place_load(tasks, count, i);
		struct place_need need = place_need(tasks, count, i);
		long double wanted = 0;
		unsigned int j;

		if (load > PLACE_ROOM || (load && !(usable >> i & 1)))
			FAIL("set %u: vCPU %u has %u\n", set, i, load);
		for (j = 0; j < count; j++) {
			if (tasks[j].vcpu != i)
				continue;
			wanted += (long double)tasks[j].runtime / tasks[j].period;
			if (need.period > tasks[j].period)
				FAIL("set %u: vCPU %u: a period above a task's\n", set, i);
		}
		if (need.budget + 1e-6L < wanted * need.period || need.budget > wanted * need.period + TASKS)
			FAIL("set %u: vCPU %u asks %llu of %llu\n", set, i, need.budget, need.period);
	}
}

int main(int argc, char **argv)
{
	unsigned int sets = argc > 1 ? atoi(argv[1]) : 20000, set;

	state = argc > 2 ? strtoull(argv[2], 0, 0) : 1;
	known();
	for (set = 0; set < sets; set++)
		one_set(set);
	printf("place: %u sets\n", sets);
	return 0;
}
