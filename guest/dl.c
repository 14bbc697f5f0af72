// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Deadline tasks (RTVirt, section 3.2): an unmodified application asks for SCHED_DEADLINE, is placed on a vCPU, and that vCPU's
 * need is asked of the host. What the host refuses the application sees as EBUSY.
 *
 * The kernel's __sched_setscheduler() is where all three system calls meet, with a copy of the attributes and no lock held. Calls
 * about deadline tasks are led to dl_setscheduler() below (ftrace, as a livepatch would); it makes the kernel's own change
 * with sched_setattr_nocheck(), whose way through the same function the hook lets pass, with all checks of a user's call.
 *
 *   - First the host admits, then the kernel; what the kernel refuses is given back.
 *   - A registered task runs on one vCPU. The kernel demands that a deadline task may run on all: the mask is widened
 *     for each change that it may allow. Who leaves, and what such a task forks, has the mask from before.
 *   - Each vCPU's next deadlines are published (struct ontime_next_vcpu) at every switch from or to a deadline task: the host ends its
 *     slices there. Without the host's clock (KVM_HC_CLOCK_PAIRING) none are, and the host reserves more instead.
 *   - The host is told whole needs of vCPUs, so that what was lost on the way is mended by telling them again (dl_settle()):
 *     after a task's end, a failed change, a device process that was restarted.
 *   - With the parameter deadline_spare each vCPU has the host hold that much beyond its need. What fits into it is admitted without
 *     asking, and the host is told afterwards.
 */
#include <linux/capability.h>
#include <linux/cpumask.h>
#include <linux/ftrace.h>
#include <linux/kprobes.h>
#include <linux/kvm_para.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/sched.h>
#include <linux/sched/clock.h>
#include <linux/sched/task.h>
#include <linux/slab.h>
#include <linux/tracepoint.h>
#include <linux/wait.h>
#include <trace/events/sched.h>
#include <uapi/linux/sched/types.h>

#include "ontime.h"
#include "place.h"

#define DL_HOOK "__sched_setscheduler"
/* Tasks with a guarantee at once; more get EBUSY. */
#define DL_TASKS_MAX 256
/* How often a host is asked again that does not take what it should hold. */
#define DL_AGAIN HZ
/* And one that has no room for what is only spare. */
#define DL_SPARE_AGAIN (10 * HZ)

struct dl_task {
	struct list_head link;
	struct task_struct *task;
	struct place_task place;
	cpumask_var_t allowed;		/* from before */
	bool gone;			/* it has ended, or will now */
	u64 seen, due;			/* its kernel's deadline when last looked at; what is published for it. local_clock() */
};

/* Children of such tasks, to be let off their vCPU. A place is free while its task is NULL; with dl_lock. */
#define DL_CHILDREN 16
struct dl_child {
	struct task_struct *task;
	cpumask_t allowed;
};

/* Whoever changes anything, for as long as the host is asked. */
static DEFINE_MUTEX(dl_mutex);
/* With dl_mutex; changed and, by tracepoints, read with dl_lock. */
static LIST_HEAD(dl_tasks);
static DEFINE_RAW_SPINLOCK(dl_lock);
static unsigned int dl_count;
/* The holder of dl_mutex whose call passes the hook. */
static struct task_struct *dl_through;
/* What the host holds, and of which device process (0: of none); a budget above the period where it is not known. */
static struct place_need dl_told[ONTIME_VCPUS_MAX];
static u64 dl_generation;
/* A device was set up since: it holds nothing, also where its process is the one from before. */
static bool dl_anew;
/* What each vCPU has the host hold beyond its need; runtime 0: nothing. With dl_mutex. */
static struct place_task dl_spare;
/* dl_mutex's holder's: a set to work on, and whose each of it is. Last, spares. */
static struct place_task dl_set[DL_TASKS_MAX + 1 + ONTIME_VCPUS_MAX];
static struct dl_task *dl_whose[DL_TASKS_MAX + 1];

static bool dl_hooked, dl_ended;
static atomic_t dl_inside;
static DECLARE_WAIT_QUEUE_HEAD(dl_left);
static struct workqueue_struct *dl_wq;

/* ---- Next deadlines ---- */

#define DL_NEXT_BYTES (ONTIME_VCPUS_MAX * sizeof(struct ontime_next_vcpu))
/* How often the host's clock is read while there are deadline tasks: the two drift apart by up to 500 us a second where NTP slews the host's. */
#define DL_PAIR_AGAIN HZ
/* A release that comes later than this without stolen time is no late one, ns. */
#define DL_LATE 100000

/* NULL: nothing is published. */
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

	if (!dl_next || !kvm_para_available())
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
 * When @t is due. Its kernel counts a job's deadline from when it woke, which is late where the vCPU had to wait for the host: by what was
 * stolen meanwhile, at most. Then it is due a period after it was due before, as a periodic task is.
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

/* The next deadline after @now of one that was due at @due: what counts to the host, so that tasks that sleep do not crowd out who runs. */
static u64 dl_soon(u64 due, u64 period, u64 now)
{
	u64 past;

	if (due > now || !period)
		return due;
	div64_u64_rem(now - due, period, &past);
	return now - past + period;
}

/*
 * Has @t's kernel hold it due when it is, too: a server's period that begins late ends late, and the next job, should that come in time, finds what the last one left of its
 * runtime, and is throttled. @t is next on its CPU, whose run queue's lock is held: its deadline is the earliest there, and an earlier one keeps their order. Who pushes
 * and pulls tasks sees the later one: those here are pinned.
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
	unsigned int count = 0, i, latest;
	struct dl_task *t;

	this_cpu_write(dl_stolen, stolen);
	list_for_each_entry(t, &dl_tasks, link) {
		struct ontime_next next;
		u64 due, period;

		if (READ_ONCE(t->place.vcpu) != cpu || READ_ONCE(t->gone) || t->task->policy != SCHED_DEADLINE)
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

/* With the run queue's lock: whoever holds dl_lock may want that one. What is left out now is published at the next switch. */
static void on_switch(void *unused, bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state)
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

/* ---- The set ---- */

static struct dl_task *dl_find(const struct task_struct *task)
{
	struct dl_task *t;

	list_for_each_entry(t, &dl_tasks, link)
		if (t->task == task)
			return t;
	return NULL;
}

static struct dl_task *dl_new(struct task_struct *task)
{
	struct dl_task *t;

	if (dl_count >= DL_TASKS_MAX)
		return NULL;
	t = kzalloc(sizeof(*t), GFP_KERNEL);
	if (!t || !alloc_cpumask_var(&t->allowed, GFP_KERNEL)) {
		kfree(t);
		return NULL;
	}
	t->task = get_task_struct(task);
	t->place.vcpu = PLACE_NONE;
	cpumask_copy(t->allowed, &task->cpus_mask);
	raw_spin_lock_irq(&dl_lock);
	list_add_tail(&t->link, &dl_tasks);
	dl_count++;
	raw_spin_unlock_irq(&dl_lock);
	if (dl_paired)
		queue_delayed_work(dl_wq, &dl_pair_work, 0);
	return t;
}

static void dl_drop(struct dl_task *t)
{
	raw_spin_lock_irq(&dl_lock);
	list_del(&t->link);
	dl_count--;
	raw_spin_unlock_irq(&dl_lock);
	put_task_struct(t->task);
	free_cpumask_var(t->allowed);
	kfree(t);
}

static void dl_pin(struct dl_task *t)
{
	int err = set_cpus_allowed_ptr(t->task, cpumask_of(t->place.vcpu));

	if (err)
		pr_warn_ratelimited("deadline task %d does not stay on vCPU %u: %d\n", task_pid_nr(t->task), t->place.vcpu, err);
}

/* All that are placed, but @without, into dl_set. */
static unsigned int dl_gather(const struct dl_task *without)
{
	unsigned int count = 0;
	struct dl_task *t;

	list_for_each_entry(t, &dl_tasks, link) {
		if (t == without || t->place.vcpu == PLACE_NONE || READ_ONCE(t->gone))
			continue;
		dl_whose[count] = t;
		dl_set[count++] = t->place;
	}
	return count;
}

/* ---- The host ---- */

static bool dl_more(const struct place_need *need, const struct place_need *than)
{
	/* budget / period; the ABI's limits keep the products within 64 bits. */
	return need->budget * (than->period ?: 1) > than->budget * (need->period ?: 1);
}

/* Whether the host holds what the first @count of dl_set need, as something spare: it does not have to be asked. */
static bool dl_covers(unsigned int count)
{
	struct ontime_dev *dev;
	unsigned int vcpu;
	bool covers;

	if (!dl_spare.runtime || READ_ONCE(dl_anew))
		return false;
	dev = ontime_dev_get();
	if (!dev)
		return false;
	covers = dl_generation == dev->generation;
	ontime_dev_put(dev);
	for (vcpu = 0; covers && vcpu < ONTIME_VCPUS_MAX; vcpu++) {
		struct place_need need = place_need(dl_set, count, vcpu), *told = &dl_told[vcpu];

		/* A share of a longer period may come too late for a shorter one. */
		covers = !need.budget || (told->budget <= told->period && told->period <= need.period && !dl_more(&need, told));
	}
	return covers;
}

/* Has the host hold what the first @count of dl_set need. -EBUSY: it refuses, and holds what it held. */
static int dl_tell(unsigned int count)
{
	struct ontime_bw entries[ONTIME_VCPUS_MAX];
	unsigned int changed = 0, vcpu, i;
	bool more = false, known = true;
	struct ontime_chan *main = NULL;
	struct ontime_dev *dev;
	int err = -ENODEV;
	u16 op;

	/* Before the device is looked for: it is the new one then, or one that is newer. */
	if (xchg(&dl_anew, false))
		dl_generation = 0;
	dev = ontime_dev_get();
	if (dev)
		main = ontime_chan_get(0, dev->generation);
	if (!main || !main->deadlines)
		goto out;
	if (dl_generation != dev->generation) {
		memset(dl_told, 0, sizeof(dl_told));
		dl_generation = dev->generation;
		/* One that does not read them reserves more. */
		if (dl_paired || dl_pair())
			ontime_ctl_next(main, virt_to_phys(dl_next));
	}
	for (vcpu = 0; vcpu < ONTIME_VCPUS_MAX; vcpu++) {
		struct place_need need = place_need(dl_set, count, vcpu), *told = &dl_told[vcpu];

		if (need.budget == told->budget && need.period == told->period)
			continue;
		if (told->budget > told->period)
			known = false;
		else
			more |= dl_more(&need, told);
		entries[changed++] = (struct ontime_bw){
			.vcpu = cpu_to_le32(vcpu), .budget = cpu_to_le64(need.budget), .period = cpu_to_le64(need.period),
		};
	}
	err = 0;
	if (!changed)
		goto out;
	op = changed > 1 ? ONTIME_CTL_INC_DEC_BW : more || !known ? ONTIME_CTL_INC_BW : ONTIME_CTL_DEC_BW;
	err = ontime_ctl_bw(main, op, entries, changed);
	for (i = 0; i < changed && err != -EBUSY; i++) {
		struct place_need *told = &dl_told[le32_to_cpu(entries[i].vcpu)];

		told->budget = err ? U64_MAX : le64_to_cpu(entries[i].budget);
		told->period = err ? 0 : le64_to_cpu(entries[i].period);
	}
out:
	if (main)
		ontime_chan_put(main);
	if (dev)
		ontime_dev_put(dev);
	return err;
}

static void dl_work(struct work_struct *work);
static DECLARE_DELAYED_WORK(dl_delayed, dl_work);

/* Adds to the first @count of dl_set what is to be spare. */
static unsigned int dl_add_spare(unsigned int count)
{
	unsigned int cpu;

	if (!dl_spare.runtime)
		return count;
	for_each_online_cpu(cpu)
		if (cpu < ONTIME_VCPUS_MAX) {
			dl_set[count] = dl_spare;
			dl_set[count++].vcpu = cpu;
		}
	return count;
}

/* Tells the host what is so, and again later where it does not take it. */
static void dl_settle(void)
{
	unsigned int count = dl_gather(NULL), with = dl_add_spare(count);
	int err = dl_tell(with);

	/* Without anything spare: what tasks were promised goes before. */
	if (err == -EBUSY && with != count) {
		err = dl_tell(count);
		if (!err)
			mod_delayed_work(dl_wq, &dl_delayed, DL_SPARE_AGAIN);
	}
	if (err == -EBUSY)
		pr_warn_ratelimited("the host does not hold what deadline tasks were promised\n");
	if (err && err != -ENODEV)
		mod_delayed_work(dl_wq, &dl_delayed, DL_AGAIN);
}

/* The same, by and by: the caller does not wait for the host where that holds something spare. */
static void dl_settle_soon(void)
{
	if (dl_spare.runtime)
		mod_delayed_work(dl_wq, &dl_delayed, 0);
	else
		dl_settle();
}

/* ---- A change ---- */

static u64 dl_usable(void)
{
	u64 usable = 0;
	unsigned int cpu;

	for_each_online_cpu(cpu)
		if (cpu < ONTIME_VCPUS_MAX)
			usable |= 1ULL << cpu;
	return usable;
}

/* Finds @t a place for @want: where it is, best fit, or all anew; and has the host hold it. -EBUSY: nowhere. */
static int dl_place(struct dl_task *t, struct place_task want)
{
	unsigned int count = dl_gather(t), i;
	u64 usable = dl_usable();
	struct place_task *own = &dl_set[count];
	int err = -EBUSY;

	dl_whose[count] = t;
	*own = want;
	own->vcpu = t->place.vcpu;
	if (own->vcpu != PLACE_NONE && place_load(dl_set, count + 1, own->vcpu) > PLACE_ROOM)
		own->vcpu = PLACE_NONE;
	/* The host may have room for one vCPU and not for another. */
	while (usable) {
		if (own->vcpu == PLACE_NONE)
			own->vcpu = place_best(dl_set, count, usable, &want);
		if (own->vcpu == PLACE_NONE)
			break;
		err = dl_covers(count + 1) ? 0 : dl_tell(count + 1);
		if (err != -EBUSY)
			break;
		usable &= ~(1ULL << own->vcpu);
		own->vcpu = PLACE_NONE;
	}
	if (err == -EBUSY && place_all(dl_set, count + 1, dl_usable()))
		err = dl_tell(count + 1);
	if (err)
		return -EBUSY;
	for (i = 0; i <= count; i++) {
		struct dl_task *whose = dl_whose[i];
		bool moved = whose->place.vcpu != dl_set[i].vcpu;

		whose->place = dl_set[i];
		/* The one that is changed is pinned after the kernel's change. */
		if (moved && whose != t)
			dl_pin(whose);
	}
	return 0;
}

/* The kernel's own change, with its own checks. */
static int dl_kernel(struct task_struct *p, const struct sched_attr *attr)
{
	int err;

	WRITE_ONCE(dl_through, current);
	err = sched_setattr_nocheck(p, attr);
	WRITE_ONCE(dl_through, NULL);
	return err;
}

/* What the attributes ask for; false where the kernel will refuse them, or they ask for none. */
static bool dl_wanted(const struct task_struct *p, const struct sched_attr *attr, struct place_task *want)
{
	/* Below 0: the policy is kept (SCHED_FLAG_KEEP_POLICY, sched_setparam). */
	u32 policy = (s32)attr->sched_policy < 0 ? p->policy : attr->sched_policy;

	if (policy != SCHED_DEADLINE || !attr->sched_runtime || attr->sched_runtime > attr->sched_deadline ||
	    (attr->sched_period && attr->sched_deadline > attr->sched_period) || !capable(CAP_SYS_NICE))
		return false;
	/* A deadline before the period's end is as good as a shorter period (density). */
	*want = (struct place_task){ attr->sched_runtime, attr->sched_deadline, PLACE_NONE };
	/* One that is longer than can be said: as much more often. */
	while (want->period > ONTIME_BW_PERIOD_MAX) {
		want->period /= 2;
		want->runtime = want->runtime / 2 + 1;
	}
	return true;
}

static int dl_change(struct task_struct *p, const struct sched_attr *attr)
{
	struct dl_task *t = dl_find(p);
	struct place_task want, before;
	bool wanted = dl_wanted(p, attr, &want);
	int err;

	if (!wanted && !t)
		return dl_kernel(p, attr);
	if (!t) {
		t = dl_new(p);
		if (!t)
			return -EBUSY;
	}
	before = t->place;
	if (wanted) {
		err = dl_place(t, want);
		if (err) {
			if (before.vcpu == PLACE_NONE)
				dl_drop(t);
			dl_settle_soon();
			return err;
		}
	}
	/* What the kernel will refuse, as to a caller without CAP_SYS_NICE, leaves the task on its vCPU. */
	if (wanted && before.vcpu != PLACE_NONE)
		set_cpus_allowed_ptr(p, t->allowed);
	err = dl_kernel(p, attr);
	if (p->policy != SCHED_DEADLINE || p->flags & PF_EXITING) {
		if (before.vcpu != PLACE_NONE)
			set_cpus_allowed_ptr(p, t->allowed);
		dl_drop(t);
	} else {
		/* Others may have moved meanwhile: it stays where it is now, with what it had. */
		if (err) {
			t->place.runtime = before.runtime;
			t->place.period = before.period;
		}
		dl_pin(t);
	}
	dl_settle_soon();
	return err;
}

/* In the place of the kernel's function, for users' calls about deadline tasks. */
static int dl_setscheduler(struct task_struct *p, const struct sched_attr *attr, bool user, bool pi)
{
	int err = mutex_lock_killable(&dl_mutex);

	if (!err) {
		err = dl_change(p, attr);
		mutex_unlock(&dl_mutex);
	}
	if (atomic_dec_and_test(&dl_inside))
		wake_up(&dl_left);
	return err;
}

static void notrace dl_hook(unsigned long ip, unsigned long parent_ip, struct ftrace_ops *ops, struct ftrace_regs *fregs)
{
	struct pt_regs *regs = ftrace_get_regs(fregs);
	const struct task_struct *p;
	const struct sched_attr *attr;

	if (!regs)
		return;
	/* di, si, dx, cx: task, attributes, whether a user's call, whether priorities may be inherited. */
	if (READ_ONCE(dl_through) == current) {
		regs->dx = true;
		return;
	}
	p = (const struct task_struct *)regs->di;
	attr = (const struct sched_attr *)regs->si;
	if (!(u8)regs->dx || !(u8)regs->cx || (attr->sched_policy != SCHED_DEADLINE && p->policy != SCHED_DEADLINE))
		return;
	atomic_inc(&dl_inside);
	regs->ip = (unsigned long)dl_setscheduler;
}

static struct ftrace_ops dl_ops = {
	.func = dl_hook,
	.flags = FTRACE_OPS_FL_SAVE_REGS | FTRACE_OPS_FL_RECURSION | FTRACE_OPS_FL_IPMODIFY | FTRACE_OPS_FL_PERMANENT,
};

/* ---- Tasks that end, and that fork ---- */

static void on_exit(void *unused, struct task_struct *p)
{
	struct dl_task *t;
	unsigned long flags;

	if (p->policy != SCHED_DEADLINE)
		return;
	raw_spin_lock_irqsave(&dl_lock, flags);
	t = dl_find(p);
	if (t) {
		WRITE_ONCE(t->gone, true);
		queue_delayed_work(dl_wq, &dl_delayed, 0);
	}
	raw_spin_unlock_irqrestore(&dl_lock, flags);
}

static struct dl_child dl_children[DL_CHILDREN];

static void child_work(struct work_struct *work)
{
	unsigned int i;

	for (i = 0; i < DL_CHILDREN; i++) {
		struct task_struct *task = READ_ONCE(dl_children[i].task);

		if (!task)
			continue;
		set_cpus_allowed_ptr(task, &dl_children[i].allowed);
		put_task_struct(task);
		smp_store_release(&dl_children[i].task, NULL);
	}
}
static DECLARE_WORK(dl_child_work, child_work);

/*
 * Only a task that asked for SCHED_RESET_ON_FORK may fork; the child is no deadline task, but has its CPU. Nothing may be
 * allocated here on PREEMPT_RT: beyond a few at once, children stay where they are.
 */
static void on_fork(void *unused, struct task_struct *parent, struct task_struct *p)
{
	struct dl_task *t;
	unsigned long flags;
	unsigned int i;

	if (parent->policy != SCHED_DEADLINE)
		return;
	raw_spin_lock_irqsave(&dl_lock, flags);
	t = dl_find(parent);
	for (i = 0; t && i < DL_CHILDREN; i++) {
		if (smp_load_acquire(&dl_children[i].task))
			continue;
		cpumask_copy(&dl_children[i].allowed, t->allowed);
		smp_store_release(&dl_children[i].task, get_task_struct(p));
		queue_work(dl_wq, &dl_child_work);
		break;
	}
	raw_spin_unlock_irqrestore(&dl_lock, flags);
}

static struct tracepoint *exit_point, *fork_point, *switch_point;

static void find_points(struct tracepoint *point, void *unused)
{
	if (!strcmp(point->name, "sched_process_exit"))
		exit_point = point;
	else if (!strcmp(point->name, "sched_process_fork"))
		fork_point = point;
	else if (!strcmp(point->name, "sched_switch"))
		switch_point = point;
}

/* ---- Beginning and end ---- */

static void dl_unhook(void)
{
	if (!dl_hooked)
		return;
	unregister_ftrace_function(&dl_ops);
	ftrace_free_filter(&dl_ops);
	wait_event(dl_left, !atomic_read(&dl_inside));
	/* Their last instructions here. */
	synchronize_rcu_tasks();
	tracepoint_probe_unregister(exit_point, on_exit, NULL);
	tracepoint_probe_unregister(fork_point, on_fork, NULL);
	tracepoint_probe_unregister(switch_point, on_switch, NULL);
	tracepoint_synchronize_unregister();
	ontime_steal_stop();
	dl_hooked = false;
}

/* With the first device that serves deadlines: without one nothing is changed. */
static int dl_start_hook(void)
{
	int err;

	if (dl_hooked)
		return 0;
	for_each_kernel_tracepoint(find_points, NULL);
	if (!exit_point || !fork_point || !switch_point)
		return -ENOENT;
	err = ontime_steal_start();
	if (err)
		return err;
	err = tracepoint_probe_register(exit_point, on_exit, NULL);
	if (err)
		goto err_steal;
	err = tracepoint_probe_register(fork_point, on_fork, NULL);
	if (err)
		goto err_exit;
	err = tracepoint_probe_register(switch_point, on_switch, NULL);
	if (err)
		goto err_forks;
	err = ftrace_set_filter(&dl_ops, DL_HOOK, strlen(DL_HOOK), 1);
	if (!err)
		err = register_ftrace_function(&dl_ops);
	if (err)
		goto err_fork;
	dl_hooked = true;
	pr_info("SCHED_DEADLINE is guaranteed by the host\n");
	return 0;

err_fork:
	ftrace_free_filter(&dl_ops);
	tracepoint_probe_unregister(switch_point, on_switch, NULL);
err_forks:
	tracepoint_probe_unregister(fork_point, on_fork, NULL);
err_exit:
	tracepoint_probe_unregister(exit_point, on_exit, NULL);
	tracepoint_synchronize_unregister();
err_steal:
	ontime_steal_stop();
	return err;
}

static void dl_work(struct work_struct *work)
{
	struct dl_task *t, *next;
	int err;

	mutex_lock(&dl_mutex);
	if (dl_ended) {
		mutex_unlock(&dl_mutex);
		return;
	}
	err = dl_start_hook();
	if (err)
		pr_err("cannot attach to " DL_HOOK "(), deadlines are not the host's: %d\n", err);
	list_for_each_entry_safe(t, next, &dl_tasks, link)
		if (t->gone)
			dl_drop(t);
	dl_settle();
	mutex_unlock(&dl_mutex);
}

/* "RUNTIME/PERIOD", us; "0": nothing. */
static int spare_set(const char *value, const struct kernel_param *param)
{
	unsigned long long runtime = 0, period = 0;
	char rest;

	if (sscanf(value, "%llu/%llu %c", &runtime, &period, &rest) != 2 && (sscanf(value, "%llu %c", &runtime, &rest) != 1 || runtime))
		return -EINVAL;
	if (runtime && (runtime > period || period < ONTIME_BW_PERIOD_MIN / NSEC_PER_USEC || period > ONTIME_BW_PERIOD_MAX / NSEC_PER_USEC))
		return -EINVAL;
	mutex_lock(&dl_mutex);
	dl_spare = (struct place_task){ runtime * NSEC_PER_USEC, period * NSEC_PER_USEC, PLACE_NONE };
	/* Else with the first device. */
	if (dl_hooked && !dl_ended)
		mod_delayed_work(dl_wq, &dl_delayed, 0);
	mutex_unlock(&dl_mutex);
	return 0;
}

static int spare_get(char *buffer, const struct kernel_param *param)
{
	int length;

	mutex_lock(&dl_mutex);
	length = dl_spare.runtime ? sysfs_emit(buffer, "%llu/%llu\n", dl_spare.runtime / NSEC_PER_USEC, dl_spare.period / NSEC_PER_USEC) :
				    sysfs_emit(buffer, "0\n");
	mutex_unlock(&dl_mutex);
	return length;
}

static const struct kernel_param_ops spare_ops = { .set = spare_set, .get = spare_get };
module_param_cb(deadline_spare, &spare_ops, NULL, 0644);
MODULE_PARM_DESC(deadline_spare, "RUNTIME/PERIOD (us) that each vCPU has the host hold for deadline tasks to come; 0: nothing (default)");

/* A device that serves deadlines is there. */
void ontime_dl_device(void)
{
	smp_store_release(&dl_anew, true);
	queue_delayed_work(dl_wq, &dl_delayed, 0);
}

int ontime_dl_init(void)
{
	dl_wq = alloc_ordered_workqueue("ontime-dl", 0);
	dl_next = alloc_pages_exact(DL_NEXT_BYTES, GFP_KERNEL | __GFP_ZERO);
	dl_pairing = kzalloc(sizeof(*dl_pairing), GFP_KERNEL);
	if (dl_wq && dl_next && dl_pairing)
		return 0;
	if (dl_wq)
		destroy_workqueue(dl_wq);
	if (dl_next)
		free_pages_exact(dl_next, DL_NEXT_BYTES);
	kfree(dl_pairing);
	return -ENOMEM;
}

/* Devices are still there: the host is told. Tasks stay deadline tasks, without a guarantee. */
void ontime_dl_exit(void)
{
	struct dl_task *t, *next;

	mutex_lock(&dl_mutex);
	dl_ended = true;
	mutex_unlock(&dl_mutex);
	dl_unhook();
	mutex_lock(&dl_mutex);
	list_for_each_entry_safe(t, next, &dl_tasks, link) {
		set_cpus_allowed_ptr(t->task, t->allowed);
		dl_drop(t);
	}
	dl_tell(0);
	mutex_unlock(&dl_mutex);
}

/* Devices are gone. */
void ontime_dl_free(void)
{
	cancel_delayed_work_sync(&dl_delayed);
	cancel_delayed_work_sync(&dl_pair_work);
	destroy_workqueue(dl_wq);
	free_pages_exact(dl_next, DL_NEXT_BYTES);
	kfree(dl_pairing);
}
