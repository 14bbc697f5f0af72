// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Publishes each vCPU's next deadlines (struct ontime_next_vcpu) at every switch from or to a
 * deadline task: the host ends its slices there. This needs the host's clock
 * (KVM_HC_CLOCK_PAIRING). Without it nothing is published, and the host reserves more instead.
 */
#include <linux/kvm_para.h>
#include <linux/math64.h>
#include <linux/percpu.h>
#include <linux/sched/clock.h>
#include <linux/slab.h>

#include "dl.h"

#define DL_NEXT_BYTES (ONTIME_VCPUS_MAX * sizeof(struct ontime_next_vcpu))
/*
 * How often the host's clock is read while there are deadline tasks. The clocks drift apart by up
 * to 500 us a second while NTP slews the host's clock.
 */
#define DL_PAIR_AGAIN HZ
/* A release may be later than stolen time explains by this much, ns. */
#define DL_LATE 100000

static struct ontime_next_vcpu *dl_next;
/* The task of each entry, NULL: none. With dl_lock. */
static const struct dl_task *dl_next_of[ONTIME_VCPUS_MAX][ONTIME_NEXT_TASKS];
static struct kvm_clock_pairing *dl_pairing;
/* The host's CLOCK_REALTIME less local_clock(), ns; and how often the host's clock was read. */
static s64 dl_ahead;
static u64 dl_paired;
/* This CPU's stolen time when it last published, ns. */
static DEFINE_PER_CPU(u64, dl_stolen);

/*
 * Reads the host's clock. The shortest of several tries counts: the host may preempt the vCPU
 * during a try.
 */
static bool dl_pair(void)
{
	u64 best = U64_MAX;
	s64 ahead = 0;
	int i;

	if (!kvm_para_available())
		return false;
	for (i = 0; i < 8; i++) {
		unsigned long flags;
		u64 before, took;
		long err;

		local_irq_save(flags);
		before = local_clock();
		err = kvm_hypercall2(KVM_HC_CLOCK_PAIRING, __pa(dl_pairing), KVM_CLOCK_PAIRING_WALLCLOCK);
		took = local_clock() - before;
		local_irq_restore(flags);
		if (err)
			return false;
		if (took >= best)
			continue;
		best = took;
		ahead = dl_pairing->sec * NSEC_PER_SEC + dl_pairing->nsec - (s64)(before + took / 2);
	}
	WRITE_ONCE(dl_ahead, ahead);
	WRITE_ONCE(dl_paired, dl_paired + 1);
	return true;
}

/*
 * The deadline of @t. The kernel counts a job's deadline from its wake-up. That is late if the vCPU
 * had to wait for the host, by at most the time that was stolen meanwhile. In this case the
 * deadline is a period after the one before, as for a periodic task.
 */
static u64 dl_due(struct dl_task *t, u64 stolen)
{
	u64 deadline = READ_ONCE(t->task->dl.deadline), period = READ_ONCE(t->task->dl.dl_period);
	u64 expected = t->due + period, late;

	if (deadline == t->seen)
		return t->due;
	t->seen = deadline;
	if (t->due && period && deadline >= expected) {
		div64_u64_rem(deadline - expected, period, &late);
		if (late <= stolen + DL_LATE) {
			t->due = deadline - late;
			return t->due;
		}
	}
	t->due = deadline - min(stolen, period / 4);
	return t->due;
}

/*
 * The next deadline after @now of a task with the deadline @due. Deadlines are compared by this, so
 * that sleeping tasks do not displace running ones.
 */
static u64 dl_soon(u64 due, u64 period, u64 now)
{
	u64 past;

	if (due > now || !period)
		return due;
	div64_u64_rem(now - due, period, &past);
	return now - past + period;
}

/*
 * Sets @t's deadline in the kernel to @due, too. If a period of its CBS server begins late, it ends
 * late; then the next job, if it comes in time, has only the rest of the last job's runtime, and is
 * throttled. @t is next on its CPU, and that runqueue's lock is held: @t's deadline is the earliest
 * there, and an earlier one keeps the order. Code that pushes and pulls tasks sees the later
 * deadline, but tasks here are pinned.
 */
static void dl_advance(struct dl_task *t, u64 due, u64 now)
{
	if (due >= t->task->dl.deadline || due <= now)
		return;
	WRITE_ONCE(t->task->dl.deadline, due);
	t->seen = due;
}

/* With dl_lock, on the vCPU's CPU, which switches to @to. */
static void dl_publish(struct ontime_next_vcpu *page, unsigned int cpu, const struct task_struct *to)
{
	u64 stolen = ontime_steal_now(), since = stolen - this_cpu_read(dl_stolen), now = local_clock();
	u64 soon[ONTIME_NEXT_TASKS];
	unsigned int count = 0, vcpu, i, latest;
	struct dl_task *t;

	this_cpu_write(dl_stolen, stolen);
	list_for_each_entry(t, &dl_tasks, link) {
		struct ontime_next next;
		u64 due, period;

		if (READ_ONCE(t->gone) || t->task->policy != SCHED_DEADLINE)
			continue;
		vcpu = READ_ONCE(t->place.vcpu);
		if (t->task == to && vcpu != PLACE_NONE && !READ_ONCE(t->changing) &&
		    (vcpu != cpu || to->nr_cpus_allowed != 1))
			dl_stray_seen();
		if (vcpu != cpu)
			continue;
		due = dl_due(t, since);
		if (t->task == to)
			dl_advance(t, due, now);
		period = t->task->dl.dl_period;
		next.deadline = cpu_to_le64(due + READ_ONCE(dl_ahead));
		next.period = cpu_to_le64(period);
		if (count < ONTIME_NEXT_TASKS) {
			latest = count++;
		} else {
			for (latest = 0, i = 1; i < count; i++)
				if (soon[i] > soon[latest])
					latest = i;
			if (dl_soon(due, period, now) >= soon[latest])
				continue;
		}
		soon[latest] = dl_soon(due, period, now);
		page->next[latest] = next;
		dl_next_of[cpu][latest] = t;
	}
	for (; count < ONTIME_NEXT_TASKS; count++) {
		page->next[count].deadline = 0;
		dl_next_of[cpu][count] = NULL;
	}
	WRITE_ONCE(page->paired, cpu_to_le64(READ_ONCE(dl_paired)));
}

/*
 * With the runqueue's lock. The holder of dl_lock may be waiting for that lock, so this only tries
 * to take dl_lock. What is left out now is published at the next switch.
 */
void dl_next_switch(void *unused, bool preempt, struct task_struct *prev, struct task_struct *next,
		    unsigned int prev_state)
{
	unsigned int cpu = smp_processor_id();

	if ((prev->policy != SCHED_DEADLINE && next->policy != SCHED_DEADLINE) || cpu >= ONTIME_VCPUS_MAX ||
	    !raw_spin_trylock(&dl_lock))
		return;
	dl_publish(&dl_next[cpu], cpu, next);
	raw_spin_unlock(&dl_lock);
}

/*
 * Takes back what is published of @t for a vCPU that it has left. If it sleeps, it is not switched from.
 * With dl_mutex, after dl_tasks says that it has left: so no switch publishes it there again.
 */
void dl_next_forget(const struct dl_task *t, unsigned int vcpu)
{
	unsigned int i;

	if (vcpu == PLACE_NONE)
		return;
	raw_spin_lock_irq(&dl_lock);
	for (i = 0; i < ONTIME_NEXT_TASKS; i++)
		if (dl_next_of[vcpu][i] == t) {
			WRITE_ONCE(dl_next[vcpu].next[i].deadline, 0);
			dl_next_of[vcpu][i] = NULL;
		}
	raw_spin_unlock_irq(&dl_lock);
}

static void pair_work(struct work_struct *work);
static DECLARE_DELAYED_WORK(dl_pair_work, pair_work);

static void pair_work(struct work_struct *work)
{
	bool some;

	mutex_lock(&dl_mutex);
	some = dl_count && !dl_ended && dl_paired;
	if (some)
		dl_pair();
	mutex_unlock(&dl_mutex);
	if (some)
		queue_delayed_work(dl_wq, &dl_pair_work, DL_PAIR_AGAIN);
}

/* There is one more deadline task. */
void dl_next_some(void)
{
	if (dl_paired)
		queue_delayed_work(dl_wq, &dl_pair_work, 0);
}

/*
 * Names the pages to a device process. If it does not read them, it reserves more. With dl_mutex.
 */
void dl_next_tell(struct ontime_chan *main)
{
	if (dl_paired || dl_pair())
		ontime_ctl_next(main, virt_to_phys(dl_next));
}

int dl_next_init(void)
{
	dl_next = alloc_pages_exact(DL_NEXT_BYTES, GFP_KERNEL | __GFP_ZERO);
	dl_pairing = kzalloc(sizeof(*dl_pairing), GFP_KERNEL);
	if (dl_next && dl_pairing)
		return 0;
	if (dl_next)
		free_pages_exact(dl_next, DL_NEXT_BYTES);
	kfree(dl_pairing);
	return -ENOMEM;
}

/* To be called when tracepoints are unregistered and no device is left. */
void dl_next_free(void)
{
	cancel_delayed_work_sync(&dl_pair_work);
	free_pages_exact(dl_next, DL_NEXT_BYTES);
	kfree(dl_pairing);
}
