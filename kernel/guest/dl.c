// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Deadline tasks (RTVirt, section 3.2). An unmodified application asks for SCHED_DEADLINE. Its task
 * is placed on a vCPU, and that vCPU's need is requested from the host (dl_host.c). If the host
 * refuses, the application gets EBUSY; if the host finds the request invalid, EINVAL.
 *
 * All three system calls reach the kernel's __sched_setscheduler(), with a copy of the attributes
 * and without locks. Calls about deadline tasks are redirected to dl_setscheduler() below, by
 * ftrace, as a livepatch does. That function makes the kernel's own change with
 * sched_setattr_nocheck(). This goes through __sched_setscheduler() again; the hook lets it pass,
 * with all checks of a user's call.
 *
 * - The host admits first, then the kernel. What the kernel refuses is given back to the host.
 * - The kernel's own calls (SysRq n) come from any context and go on. dl_work() drops the tasks that
 *   they have demoted.
 * - A registered task runs on one vCPU. The kernel demands that a deadline task may run on all
 *   CPUs, so the affinity mask is widened for each change that the kernel may allow. A task that
 *   leaves SCHED_DEADLINE gets its earlier mask back, and so does a child that a deadline task
 *   forks.
 */
#include <linux/capability.h>
#include <linux/cpu.h>
#include <linux/cpumask.h>
#include <linux/ftrace.h>
#include <linux/kprobes.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/sched.h>
#include <linux/sched/task.h>
#include <linux/slab.h>
#include <linux/tracepoint.h>
#include <linux/wait.h>
#include <trace/events/sched.h>
#include <uapi/linux/sched/types.h>

#include "dl.h"

#define DL_HOOK "__sched_setscheduler"
/*
 * So often the tasks are looked at after the kernel itself began to demote one, each DL_AGAIN: the
 * change is made after the hook, and its caller may be preempted before.
 */
#define DL_LOOKS 4

/*
 * Children of deadline tasks, which are to get the earlier mask. An entry is free while its task is
 * NULL. With dl_lock.
 */
#define DL_CHILDREN 16
struct dl_child {
	struct task_struct *task;
	cpumask_t allowed;
};

DEFINE_MUTEX(dl_mutex);
LIST_HEAD(dl_tasks);
DEFINE_RAW_SPINLOCK(dl_lock);
unsigned int dl_count;
/*
 * Held by a user's call, also while the kernel makes its change. That may take for ever: SysRq n on Linux 6.12 leaves
 * the kernel's cpuset_mutex locked. So dl_mutex, which all other work needs, is taken after it, and not held meanwhile.
 */
static DEFINE_MUTEX(dl_call);
/* The holder of dl_call whose call passes the hook. */
static struct task_struct *dl_through;
/* dl_work() has left out a task because the kernel changes it. With dl_mutex. */
static bool dl_skipped;
struct place_task dl_set[DL_TASKS_MAX + 1 + ONTIME_VCPUS_MAX];
/* The tasks that the entries of dl_set belong to. */
static struct dl_task *dl_whose[DL_TASKS_MAX + 1];

bool dl_hooked, dl_ended;
static atomic_t dl_inside;
static DECLARE_WAIT_QUEUE_HEAD(dl_left);
struct workqueue_struct *dl_wq;
static void dl_work(struct work_struct *work);
DECLARE_DELAYED_WORK(dl_delayed, dl_work);
DECLARE_WORK(dl_now, dl_work);
static DECLARE_DELAYED_WORK(dl_demoted, dl_work);
/* How many of these looks are left. */
static unsigned int dl_looks;

/* ---- The set ---- */

static struct dl_task *dl_find(const struct task_struct *task)
{
	struct dl_task *t;

	list_for_each_entry(t, &dl_tasks, link)
		if (t->task == task)
			return t;
	return NULL;
}

/* Sets the CPUs that @t may have when it is not kept on one of them. */
void dl_allow(struct dl_task *t, const struct cpumask *mask)
{
	unsigned int cpu;

	/* on_fork() reads the mask. */
	raw_spin_lock_irq(&dl_lock);
	cpumask_copy(t->allowed, mask);
	raw_spin_unlock_irq(&dl_lock);
	t->place.allowed = 0;
	for_each_cpu(cpu, t->allowed)
		if (cpu < ONTIME_VCPUS_MAX)
			t->place.allowed |= 1ULL << cpu;
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
	t->place.vcpu = t->beside = PLACE_NONE;
	dl_allow(t, &task->cpus_mask);
	raw_spin_lock_irq(&dl_lock);
	list_add_tail(&t->link, &dl_tasks);
	dl_count++;
	raw_spin_unlock_irq(&dl_lock);
	dl_next_some();
	return t;
}

static void dl_drop(struct dl_task *t)
{
	raw_spin_lock_irq(&dl_lock);
	list_del(&t->link);
	dl_count--;
	raw_spin_unlock_irq(&dl_lock);
	dl_next_forget(t, t->place.vcpu);
	put_task_struct(t->task);
	free_cpumask_var(t->allowed);
	kfree(t);
}

/*
 * Restricts a deadline task to these CPUs. An offline CPU's runqueue is in a root domain without
 * active CPUs. If a task that sleeps there may no longer have that CPU, set_cpus_allowed_dl()
 * divides by the number of active CPUs of that root domain. So the task keeps that CPU in its mask;
 * dl_stray.c removes it when the task has run elsewhere. @beside: that CPU, or PLACE_NONE. With
 * dl_mutex.
 */
int dl_restrict(struct task_struct *p, const struct cpumask *mask, unsigned int *beside)
{
	static struct cpumask with;
	unsigned int cpu;
	int err;

	cpus_read_lock();
	cpu = task_cpu(p);
	if (beside)
		*beside = cpu_active(cpu) ? PLACE_NONE : cpu;
	if (!cpu_active(cpu)) {
		cpumask_copy(&with, mask);
		cpumask_set_cpu(cpu, &with);
		mask = &with;
	}
	err = set_cpus_allowed_ptr(p, mask);
	cpus_read_unlock();
	return err;
}

void dl_pin(struct dl_task *t)
{
	int err = dl_restrict(t->task, cpumask_of(t->place.vcpu), &t->beside);

	if (err)
		pr_warn_ratelimited("deadline task %d does not stay on vCPU %u: %d\n", task_pid_nr(t->task), t->place.vcpu, err);
}

/* Copies all placed tasks except @without into dl_set; returns how many. */
unsigned int dl_gather(const struct dl_task *without)
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

/* ---- A change ---- */

/* The vCPUs that deadline tasks may use: active, a bit each. */
u64 dl_usable(void)
{
	u64 usable = 0;
	unsigned int cpu;

	for_each_cpu(cpu, cpu_active_mask)
		if (cpu < ONTIME_VCPUS_MAX)
			usable |= 1ULL << cpu;
	return usable;
}

/*
 * Maps an error to one that sched_setattr(2) documents: these do not include a missing or silent
 * device.
 */
static int dl_refusal(int err)
{
	return err == -EINVAL || err == -EPERM ? err : -EBUSY;
}

/*
 * Finds a vCPU for @t with the need @want, and has the host hold the result. Tries @t's present
 * vCPU, then best fit, then a new placement of all tasks. -EBUSY: there is no room; -EINVAL or
 * -EPERM: from the host.
 */
int dl_place(struct dl_task *t, struct place_task want)
{
	unsigned int count = dl_gather(t), i;
	u64 usable = dl_usable();
	struct place_task *own = &dl_set[count];
	int err = -EBUSY;

	dl_whose[count] = t;
	*own = want;
	own->allowed = t->place.allowed;
	own->vcpu = t->place.vcpu;
	if (own->vcpu != PLACE_NONE &&
	    (!((usable & own->allowed) >> own->vcpu & 1) || place_load(dl_set, count + 1, own->vcpu) > PLACE_ROOM))
		own->vcpu = PLACE_NONE;
	/* The host may have room for one vCPU and not for another. */
	while (usable) {
		if (own->vcpu == PLACE_NONE)
			own->vcpu = place_best(dl_set, count, usable, own);
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
		return dl_refusal(err);
	for (i = 0; i <= count; i++) {
		struct dl_task *whose = dl_whose[i];
		unsigned int was = whose->place.vcpu;

		whose->place = dl_set[i];
		if (was == whose->place.vcpu)
			continue;
		dl_next_forget(whose, was);
		/* @t itself, and a task that the kernel changes, are pinned after that change. */
		if (whose != t && !whose->changing)
			dl_pin(whose);
	}
	return 0;
}

/* Makes the kernel's own change, with the kernel's checks. With dl_call only: it may never return. */
static int dl_kernel(struct task_struct *p, const struct sched_attr *attr)
{
	int err;

	WRITE_ONCE(dl_through, current);
	err = sched_setattr_nocheck(p, attr);
	WRITE_ONCE(dl_through, NULL);
	return err;
}

/*
 * The need that the attributes state. False if the kernel will refuse them, or if they are not for
 * SCHED_DEADLINE.
 */
static bool dl_wanted(const struct task_struct *p, const struct sched_attr *attr, struct place_task *want)
{
	/* Below 0: the policy stays (SCHED_FLAG_KEEP_POLICY, sched_setparam). */
	u32 policy = (s32)attr->sched_policy < 0 ? p->policy : attr->sched_policy;

	if (policy != SCHED_DEADLINE || !attr->sched_runtime || attr->sched_runtime > attr->sched_deadline ||
	    (attr->sched_period && attr->sched_deadline > attr->sched_period) || !capable(CAP_SYS_NICE))
		return false;
	/* A deadline before the period's end counts as a shorter period (density). */
	*want = (struct place_task){ .runtime = attr->sched_runtime, .period = attr->sched_deadline, .vcpu = PLACE_NONE };
	/* A longer period than the ABI allows: half the runtime in half the period. */
	while (want->period > ONTIME_BW_PERIOD_MAX) {
		want->period /= 2;
		want->runtime = want->runtime / 2 + 1;
	}
	return true;
}

/* A user's change of a task. */
struct dl_change {
	struct dl_task *t;		/* NULL: not about a task of this list */
	bool fresh;			/* the task was not in the list before */
	struct place_task before;
};

/* What comes before the kernel's change: the host holds what is asked for. With dl_mutex. */
static int dl_change_begin(struct dl_change *change, struct task_struct *p, const struct sched_attr *attr)
{
	struct place_task want;
	bool wanted = dl_wanted(p, attr, &want);
	struct dl_task *t = dl_find(p);
	int err;

	change->fresh = wanted && !t;
	if (change->fresh) {
		t = dl_new(p);
		if (!t)
			return -EBUSY;
	}
	change->t = t;
	if (!t)
		return 0;
	change->before = t->place;
	if (wanted) {
		err = dl_place(t, want);
		if (err) {
			if (change->fresh)
				dl_drop(t);
			dl_settle_soon();
			return err;
		}
	}
	WRITE_ONCE(t->changing, true);
	/*
	 * A change that the kernel will refuse (as without CAP_SYS_NICE) must not widen the mask:
	 * the task stays on its vCPU.
	 */
	if (wanted && change->before.vcpu != PLACE_NONE)
		dl_restrict(p, t->allowed, NULL);
	return 0;
}

/* What comes after the kernel's change. @err: its refusal, or 0. With dl_mutex. */
static void dl_change_end(struct dl_change *change, int err)
{
	struct place_task *before = &change->before;
	struct dl_task *t = change->t;
	struct task_struct *p = t->task;
	unsigned int vcpu = t->place.vcpu;

	WRITE_ONCE(t->changing, false);
	/*
	 * If the change was refused, the task may still be a deadline task from before the module,
	 * without a vCPU and with its own mask. It stays so.
	 */
	if (p->policy != SCHED_DEADLINE || p->flags & PF_EXITING || (err && change->fresh)) {
		if (before->vcpu != PLACE_NONE)
			dl_restrict(p, t->allowed, NULL);
		dl_drop(t);
	} else if (err && before->vcpu == PLACE_NONE) {
		/* It had no vCPU, and is tried again with its old need. */
		t->place = *before;
		dl_next_forget(t, vcpu);
		dl_work_now();
	} else {
		/*
		 * If the change was refused: other tasks may have moved meanwhile. It stays on its
		 * present vCPU if that still has room for its old need, or if no vCPU has.
		 */
		bool other = t->place.runtime != before->runtime || t->place.period != before->period;

		if (err && other && dl_place(t, *before)) {
			t->place.runtime = before->runtime;
			t->place.period = before->period;
		}
		dl_pin(t);
	}
	if (dl_skipped) {
		dl_skipped = false;
		dl_work_now();
	}
	dl_settle_soon();
}

static int dl_change(struct task_struct *p, const struct sched_attr *attr)
{
	struct dl_change change = {};
	int err = mutex_lock_killable(&dl_mutex);

	if (err)
		return err;
	err = dl_change_begin(&change, p, attr);
	mutex_unlock(&dl_mutex);
	if (err)
		return err;
	err = dl_kernel(p, attr);
	if (!change.t)
		return err;
	mutex_lock(&dl_mutex);
	dl_change_end(&change, err);
	mutex_unlock(&dl_mutex);
	return err;
}

/* Replaces the kernel's function, for users' calls about deadline tasks. */
static int dl_setscheduler(struct task_struct *p, const struct sched_attr *attr, bool user, bool pi)
{
	int err = mutex_lock_killable(&dl_call);

	if (!err) {
		err = dl_change(p, attr);
		mutex_unlock(&dl_call);
	}
	module_put(THIS_MODULE);
	if (atomic_dec_and_test(&dl_inside))
		wake_up(&dl_left);
	return err;
}

static void notrace dl_hook(unsigned long ip, unsigned long parent_ip, struct ftrace_ops *ops,
			    struct ftrace_regs *fregs)
{
	struct pt_regs *regs = ftrace_get_regs(fregs);
	const struct task_struct *p;
	const struct sched_attr *attr;

	if (!regs)
		return;
	/*
	 * Arguments in di, si, dx, cx: task, attributes, user's call, priority inheritance. SysRq n,
	 * which may interrupt the call that passes, is without the last.
	 */
	if (READ_ONCE(dl_through) == current && (u8)regs->cx) {
		regs->dx = true;
		return;
	}
	p = (const struct task_struct *)regs->di;
	attr = (const struct sched_attr *)regs->si;
	if (attr->sched_policy != SCHED_DEADLINE && p->policy != SCHED_DEADLINE)
		return;
	if (!(u8)regs->dx || !(u8)regs->cx) {
		/* Below 0: the policy stays. */
		if (attr->sched_policy != SCHED_DEADLINE && (s32)attr->sched_policy >= 0 && READ_ONCE(dl_count)) {
			WRITE_ONCE(dl_looks, DL_LOOKS);
			queue_delayed_work(dl_wq, &dl_demoted, DL_AGAIN);
		}
		return;
	}
	/*
	 * The module stays while a call is under way: the call returns through its code. While the
	 * module is removed, the kernel alone serves calls.
	 */
	if (!try_module_get(THIS_MODULE))
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

	/* For any policy: the kernel may have changed it (SysRq n). */
	if (!READ_ONCE(dl_count))
		return;
	raw_spin_lock_irqsave(&dl_lock, flags);
	t = dl_find(p);
	if (t) {
		WRITE_ONCE(t->gone, true);
		dl_work_now();
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
 * Only a task with SCHED_RESET_ON_FORK may fork. The child is no deadline task, but has its
 * parent's CPU. Nothing may be allocated here on PREEMPT_RT: if more children than entries come at
 * once, the others keep that CPU.
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
	/* Until they have left the code of this module. */
	synchronize_rcu_tasks();
	tracepoint_probe_unregister(exit_point, on_exit, NULL);
	tracepoint_probe_unregister(fork_point, on_fork, NULL);
	tracepoint_probe_unregister(switch_point, dl_next_switch, NULL);
	tracepoint_synchronize_unregister();
	ontime_steal_stop();
	dl_hooked = false;
}

/* Called with the first device that serves deadlines. Without such a device nothing is changed. */
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
	err = tracepoint_probe_register(switch_point, dl_next_switch, NULL);
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
	tracepoint_probe_unregister(switch_point, dl_next_switch, NULL);
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
	unsigned int looks = READ_ONCE(dl_looks);
	struct dl_task *t, *next;
	bool lost;
	int err;

	mutex_lock(&dl_mutex);
	if (dl_ended) {
		mutex_unlock(&dl_mutex);
		return;
	}
	if (work == &dl_demoted.work && looks > 1) {
		WRITE_ONCE(dl_looks, looks - 1);
		queue_delayed_work(dl_wq, &dl_demoted, DL_AGAIN);
	}
	err = dl_start_hook();
	if (err)
		pr_err("cannot attach to " DL_HOOK "(), deadlines are not the host's: %d\n", err);
	list_for_each_entry_safe(t, next, &dl_tasks, link) {
		if (t->changing)
			dl_skipped = true;
		if (t->changing || (!t->gone && t->task->policy == SCHED_DEADLINE))
			continue;
		if (!t->gone)
			dl_restrict(t->task, t->allowed, NULL);
		dl_drop(t);
	}
	/*
	 * Tasks without a vCPU are tried again. This comes last, because it sets the time of the
	 * next run.
	 */
	lost = dl_stray();
	dl_settle();
	if (lost)
		mod_delayed_work(dl_wq, &dl_delayed, DL_AGAIN);
	mutex_unlock(&dl_mutex);
}

/* A device that serves deadlines has appeared. */
void ontime_dl_device(void)
{
	dl_host_anew();
	dl_work_now();
}

int ontime_dl_init(void)
{
	int err = dl_next_init();

	if (err)
		return err;
	dl_wq = alloc_ordered_workqueue("ontime-dl", 0);
	if (!dl_wq) {
		err = -ENOMEM;
		goto err_next;
	}
	err = dl_stray_init();
	if (err)
		goto err_wq;
	return 0;

err_wq:
	destroy_workqueue(dl_wq);
err_next:
	dl_next_free();
	return err;
}

/*
 * Devices are still there, so the host is told that nothing is needed. Tasks stay deadline tasks,
 * without a guarantee.
 */
void ontime_dl_exit(void)
{
	struct dl_task *t, *next;

	mutex_lock(&dl_mutex);
	dl_ended = true;
	mutex_unlock(&dl_mutex);
	dl_unhook();
	dl_stray_exit();
	mutex_lock(&dl_mutex);
	list_for_each_entry_safe(t, next, &dl_tasks, link) {
		dl_restrict(t->task, t->allowed, NULL);
		dl_drop(t);
	}
	dl_tell(0);
	mutex_unlock(&dl_mutex);
}

/* To be called when the devices are gone. */
void ontime_dl_free(void)
{
	cancel_work_sync(&dl_now);
	cancel_delayed_work_sync(&dl_delayed);
	cancel_delayed_work_sync(&dl_demoted);
	dl_next_free();
	destroy_workqueue(dl_wq);
}
