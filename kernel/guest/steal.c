// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Stolen time is not charged to deadline tasks.
 *
 * Debian's kernels are built without PARAVIRT_TIME_ACCOUNTING: time in which the host does not run
 * the vCPU counts as run time of its current task, so a deadline task is throttled before it has
 * had its runtime. The kernel calls dl_scaled_delta_exec() for every charge. The hook here
 * subtracts, from the third argument, the time that KVM reports as stolen since the task was
 * switched in or last charged. The fair server (dl_server) is charged as before.
 *
 * The kernel reads its clock some microseconds before the hook runs. If the host schedules by
 * slices, it often preempts the vCPU in just that time, because the guest wakes its task at the
 * start of a slice. So time stolen in between is not dropped: what exceeds the charge is kept for
 * the next charge, and a task that is switched in starts with the stolen time since the clock
 * reading at which its execution starts.
 */
#include <linux/cpu.h>
#include <linux/ftrace.h>
#include <linux/module.h>
#include <linux/percpu.h>
#include <linux/sched.h>
#include <linux/sched/clock.h>
#include <linux/tracepoint.h>
#include <trace/events/sched.h>
#include <asm/msr.h>
#include <uapi/asm/kvm_para.h>

#include "ontime.h"

#define STEAL_HOOK "dl_scaled_delta_exec"
#define STEAL_ADDRESS_MASK (~0x3fULL)

/*
 * KVM's record of this CPU's stolen time, NULL if there is none; the stolen time at the last
 * charge, ns.
 */
static DEFINE_PER_CPU(struct kvm_steal_time *, steal_page);
static DEFINE_PER_CPU(u64, steal_seen);

static u64 notrace steal_now(void)
{
	struct kvm_steal_time *page = this_cpu_read(steal_page);

	/* The host writes it only while this vCPU does not run. */
	return page ? READ_ONCE(page->steal) : 0;
}

/* This CPU's stolen time, ns; 0 if KVM does not report it. */
u64 notrace ontime_steal_now(void)
{
	return steal_now();
}

static void notrace steal_hook(unsigned long ip, unsigned long parent_ip, struct ftrace_ops *ops,
			       struct ftrace_regs *fregs)
{
	struct pt_regs *regs = ftrace_get_regs(fregs);
	const struct sched_dl_entity *entity;
	u64 now;
	s64 stolen;

	if (!regs)
		return;
	/*
	 * Arguments in di, si, dx: runqueue, entity, time. With the runqueue's lock, nearly always
	 * on its CPU.
	 */
	entity = (const struct sched_dl_entity *)regs->si;
	if (entity->dl_server)
		return;
	now = steal_now();
	stolen = now - this_cpu_read(steal_seen);
	if (stolen > 0) {
		stolen = min_t(s64, stolen, max_t(s64, regs->dx, 0));
		regs->dx -= stolen;
		this_cpu_add(steal_seen, stolen);
	}
}

static struct ftrace_ops steal_ops = {
	.func = steal_hook,
	.flags = FTRACE_OPS_FL_SAVE_REGS | FTRACE_OPS_FL_RECURSION | FTRACE_OPS_FL_PERMANENT,
};

static void on_switch(void *unused, bool preempt, struct task_struct *prev, struct task_struct *next,
		      unsigned int prev_state)
{
	u64 now, late = 0;

	if (next->policy != SCHED_DEADLINE)
		return;
	now = steal_now();
	/*
	 * The task's first charge counts from exec_start, a reading of the runqueue's clock that
	 * may be as old as a wake-up. With IRQ_TIME_ACCOUNTING that clock lacks interrupt time and
	 * cannot be compared.
	 */
	if (!IS_ENABLED(CONFIG_IRQ_TIME_ACCOUNTING))
		late = max_t(s64, local_clock() - next->se.exec_start, 0);
	this_cpu_write(steal_seen, now - min(now - this_cpu_read(steal_seen), late));
}

static struct tracepoint *switch_point;

static void find_switch(struct tracepoint *point, void *unused)
{
	if (!strcmp(point->name, "sched_switch"))
		switch_point = point;
}

/* Called on each CPU. KVM's MSR holds the address that the kernel wrote there. */
static void steal_find(void *unused)
{
	u32 low = 0, high = 0;
	u64 value;

	if (rdmsr_safe(MSR_KVM_STEAL_TIME, &low, &high))
		return;
	value = (u64)high << 32 | low;
	if (value & KVM_MSR_ENABLED)
		this_cpu_write(steal_page, __va(value & STEAL_ADDRESS_MASK));
	this_cpu_write(steal_seen, steal_now());
}

/* Called on a CPU that has come online. */
void ontime_steal_here(void)
{
	steal_find(NULL);
}

int ontime_steal_start(void)
{
	bool told = true;
	int err;

	on_each_cpu(steal_find, NULL, 1);
	/* Such a kernel subtracts stolen time from its own clock. */
	if (IS_ENABLED(CONFIG_PARAVIRT_TIME_ACCOUNTING))
		return 0;
	if (!get_cpu_var(steal_page))
		told = false;
	put_cpu_var(steal_page);
	if (!told) {
		pr_info("no stolen time is told: it is charged to deadline tasks\n");
		return 0;
	}
	for_each_kernel_tracepoint(find_switch, NULL);
	if (!switch_point)
		return -ENOENT;
	err = tracepoint_probe_register(switch_point, on_switch, NULL);
	if (err)
		goto err_point;
	err = ftrace_set_filter(&steal_ops, STEAL_HOOK, strlen(STEAL_HOOK), 1);
	if (!err)
		err = register_ftrace_function(&steal_ops);
	if (err)
		goto err_probe;
	return 0;

err_probe:
	ftrace_free_filter(&steal_ops);
	tracepoint_probe_unregister(switch_point, on_switch, NULL);
	tracepoint_synchronize_unregister();
err_point:
	switch_point = NULL;
	pr_err("cannot attach to " STEAL_HOOK "(): %d\n", err);
	return err;
}

void ontime_steal_stop(void)
{
	if (!switch_point)
		return;
	unregister_ftrace_function(&steal_ops);
	ftrace_free_filter(&steal_ops);
	tracepoint_probe_unregister(switch_point, on_switch, NULL);
	tracepoint_synchronize_unregister();
	switch_point = NULL;
}
