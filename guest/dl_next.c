// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Each vCPU's next deadlines, published (struct ontime_next_vcpu) at every switch from or to a deadline task: the host
 * ends its slices there. Without the host's clock (KVM_HC_CLOCK_PAIRING) none are, and the host reserves more instead.
 */
#include <linux/kvm_para.h>
#include <linux/math64.h>
#include <linux/percpu.h>
#include <linux/sched/clock.h>
#include <linux/slab.h>

#include "dl.h"

#define DL_NEXT_BYTES (ONTIME_VCPUS_MAX * sizeof(struct ontime_next_vcpu))
/*
 * How often the host's clock is read while there are deadline tasks: the two drift apart by up to 500
 * us a second where NTP slews the host's.
 */
#define DL_PAIR_AGAIN HZ
/* A release that comes later than this without stolen time is no late one, ns. */
#define DL_LATE 100000

static struct ontime_next_vcpu *dl_next;
static struct kvm_clock_pairing *dl_pairing;
/* The host's CLOCK_REALTIME less local_clock(), and how often it was read. */
static s64 dl_ahead;
static u64 dl_paired;
/* What was stolen when a CPU last published. */
static DEFINE_PER_CPU(u64, dl_stolen);

/* Reads the host's clock. The best of some tries: the host may run something else in the midst of one. */
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
 * When @t is due. Its kernel counts a job's deadline from when it woke, which is late where the vCPU had to wait for
 * the host: by what was stolen meanwhile, at most. Then it is due a period after it was due before, as a periodic task
 * is.
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
 * The next deadline after @now of one that was due at @due: what counts to the host, so that tasks
 * that sleep do not crowd out who runs.
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
 * Has @t's kernel hold it due when it is, too: a server's period that begins late ends late, and the next job, should
 * that come in time, finds what the last one left of its runtime, and is throttled. @t is next on its CPU, whose run
 * queue's lock is held: its deadline is the earliest there, and an earlier one keeps their order. Who pushes and pulls
 * tasks sees the later one: those here are pinned.
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
		if (t->task == to && vcpu != PLACE_NONE && (vcpu != cpu || to->nr_cpus_allowed != 1))
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
	}
	for (; count < ONTIME_NEXT_TASKS; count++)
		page->next[count].deadline = 0;
	WRITE_ONCE(page->paired, cpu_to_le64(READ_ONCE(dl_paired)));
}

/*
 * With the run queue's lock: whoever holds dl_lock may want that one. What is left out now is
 * published at the next switch.
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

/* There is a deadline task more. */
void dl_next_some(void)
{
	if (dl_paired)
		queue_delayed_work(dl_wq, &dl_pair_work, 0);
}

/* Tells a device process where they lie. One that does not read them reserves more. With dl_mutex. */
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

/* Nobody switches, and no device is there any more. */
void dl_next_free(void)
{
	cancel_delayed_work_sync(&dl_pair_work);
	free_pages_exact(dl_next, DL_NEXT_BYTES);
	kfree(dl_pairing);
}
