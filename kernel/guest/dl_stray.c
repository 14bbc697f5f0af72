// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Deadline tasks that were taken off their vCPU: by sched_setaffinity(), a change of their cpuset,
 * or because the vCPU goes offline. The kernel has no hook for that. It is noticed when such a task
 * is switched to, and when a vCPU goes offline. The task's new affinity is accepted, but it is kept
 * on one of those vCPUs: on its old one if that is among them, or else on another that has room and
 * that the host holds for it. The same call to the host gives back the old vCPU's need. A task
 * without room anywhere runs on without a guarantee, and is tried again.
 */
#include <linux/cpuhotplug.h>
#include <linux/irq_work.h>

#include "dl.h"

static enum cpuhp_state dl_cpu_state;

/* Whether the task's mask is still what dl_pin() set. */
static bool dl_is_kept(const struct dl_task *t)
{
	const struct cpumask *mask = &t->task->cpus_mask;
	bool beside = t->beside != PLACE_NONE;

	return t->place.vcpu != PLACE_NONE && cpumask_weight(mask) == 1 + beside && cpumask_test_cpu(t->place.vcpu, mask) &&
	       (!beside || cpumask_test_cpu(t->beside, mask));
}

/* With dl_mutex. Returns whether there are tasks without a vCPU. */
bool dl_stray(void)
{
	struct dl_task *t;
	bool lost = false;

	list_for_each_entry(t, &dl_tasks, link) {
		unsigned int was = t->place.vcpu;
		bool kept = dl_is_kept(t);

		if (READ_ONCE(t->gone) || t->changing || t->task->policy != SCHED_DEADLINE ||
		    (kept && t->beside == PLACE_NONE && dl_usable() >> was & 1))
			continue;
		if (!kept)
			dl_allow(t, &t->task->cpus_mask);
		if ((was != PLACE_NONE && (dl_usable() & t->place.allowed) >> was & 1) || !dl_place(t, t->place)) {
			dl_pin(t);
			continue;
		}
		lost = true;
		if (was == PLACE_NONE)
			continue;
		t->place.vcpu = PLACE_NONE;
		dl_next_forget(t, was);
		if (kept)
			dl_restrict(t->task, t->allowed, NULL);
		pr_warn_ratelimited("deadline task %d may not stay on vCPU %u, and no other has room: it has no guarantee\n",
				    task_pid_nr(t->task), was);
	}
	return lost;
}

static void stray_irq_work(struct irq_work *work)
{
	dl_work_now();
}
static struct irq_work dl_stray_work = IRQ_WORK_INIT(stray_irq_work);

/* Called during a context switch, whose runqueue lock a queued work would need. */
void dl_stray_seen(void)
{
	irq_work_queue(&dl_stray_work);
}

static int cpu_goes(unsigned int cpu)
{
	if (READ_ONCE(dl_hooked))
		dl_work_now();
	return 0;
}

/* Called on that CPU, before it becomes active; it is not used before. */
static int cpu_comes(unsigned int cpu)
{
	ontime_steal_here();
	if (READ_ONCE(dl_hooked))
		queue_delayed_work(dl_wq, &dl_delayed, DL_AGAIN);
	return 0;
}

int dl_stray_init(void)
{
	int err = cpuhp_setup_state_nocalls(CPUHP_AP_ONLINE_DYN, "ontime:deadlines", cpu_comes, cpu_goes);

	if (err < 0)
		return err;
	dl_cpu_state = err;
	return 0;
}

/* To be called when the switch tracepoint is unregistered; queued work then sees dl_ended. */
void dl_stray_exit(void)
{
	cpuhp_remove_state_nocalls(dl_cpu_state);
	irq_work_sync(&dl_stray_work);
}
