// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * RT socket outsourcing (Access'18, III-C): an arriving message makes its receiver runnable from
 * the idle loop, without an interrupt.
 *
 * Each channel belongs to a vCPU. The vCPU tells the host in a shared word whether it halts, checks
 * its queues, or runs a thread, and at which priority (docs/reference/device.md, "The vCPU word and
 * notifications"). The word is written here: by the idle loop, which is a cpuidle driver, and at
 * every context switch. The channel's interrupt is turned into one that ends a halt and injects
 * nothing (wake.c).
 */
#include <linux/cpu.h>
#include <linux/cpuhotplug.h>
#include <linux/cpuidle.h>
#include <linux/irq_work.h>
#include <linux/kthread.h>
#include <linux/percpu.h>
#include <linux/sched.h>
#include <linux/sched/clock.h>
#include <linux/sched/rt.h>
#include <linux/slab.h>
#include <linux/tracepoint.h>
#include <linux/virtio_ring.h>
#include <trace/events/sched.h>
#include <uapi/linux/sched/types.h>

#include "ontime.h"

/*
 * The channel that belongs to this CPU; the channel whose word this CPU writes, NULL while it is
 * offline.
 */
static DEFINE_PER_CPU(struct ontime_chan *, vcpu_bound);
static DEFINE_PER_CPU(struct ontime_chan *, vcpu_chan);

static void word_set(struct ontime_chan *chan, u32 state)
{
	WRITE_ONCE(chan->word->state, cpu_to_le32(state));
}

static u32 task_word(const struct task_struct *task)
{
	return ONTIME_VCPU_RUN | ontime_prio(task) << ONTIME_VCPU_PRIO_SHIFT;
}

/*
 * Whether the device has used buffers that were not taken yet. The caller needs a full barrier
 * before.
 */
static bool chan_has_used(struct ontime_chan *chan)
{
	return virtqueue_poll(chan->callq, READ_ONCE(chan->seen[ONTIME_VQ_CALL])) ||
	       virtqueue_poll(chan->eventq, READ_ONCE(chan->seen[ONTIME_VQ_EVENT]));
}

/*
 * Gives a thread that takes used buffers the highest FIFO priority. Otherwise a thread that
 * computes, with a priority between this one and a receiver's, would delay the receiver. The thread
 * replaces an interrupt that preempts all of them: it copies nothing and does a few steps for each
 * completion and event, and the threads that it wakes run at their own priority. Only
 * SCHED_DEADLINE is above it.
 */
void ontime_thread_first(struct task_struct *thread)
{
	const struct sched_attr attr = { .sched_policy = SCHED_FIFO, .sched_priority = MAX_RT_PRIO - 1 };
	int err = sched_setattr_nocheck(thread, &attr);

	if (err)
		pr_warn("%s does not run before all others: %d\n", thread->comm, err);
}

/*
 * Called by the idle loop or in an interrupt. Takes used buffers; on PREEMPT_RT by a thread,
 * because locks and epoll's wake-ups may sleep there.
 */
static void chan_look(struct ontime_chan *chan)
{
	if (IS_ENABLED(CONFIG_PREEMPT_RT))
		wake_up_process(chan->thread);
	else
		ontime_reap(chan);
}

static void chan_irq_work(struct irq_work *work)
{
	chan_look(container_of(work, struct ontime_chan, look));
}

static int chan_thread(void *data)
{
	struct ontime_chan *chan = data;

	while (!kthread_should_stop()) {
		set_current_state(TASK_INTERRUPTIBLE);
		if (chan_has_used(chan)) {
			__set_current_state(TASK_RUNNING);
			ontime_reap(chan);
		} else {
			schedule();
		}
	}
	__set_current_state(TASK_RUNNING);
	return 0;
}

/* ---- The idle loop ---- */

/*
 * How long after the last message the tick stays on, ns. Stopping the tick for a sleep and starting
 * it again takes two writes to the local APIC before a receiver runs, and each is a VM exit.
 */
#define KEEP_TICK (50 * NSEC_PER_MSEC)

/* When this CPU's channel last had used buffers, by local_clock(). */
static DEFINE_PER_CPU(u64, vcpu_told);

static void vcpu_told_now(void)
{
	this_cpu_write(vcpu_told, local_clock());
}

/*
 * cpuidle governors keep the tick on in a state with the polling flag, whatever the state does, and
 * may stop the tick in other states. Both states here are the same halt; the second one is disabled
 * for KEEP_TICK after a message.
 */
static void idle_keep_tick(struct cpuidle_device *device, bool told)
{
	unsigned long long *disable = &device->states_usage[1].disable;

	if (told || local_clock() - this_cpu_read(vcpu_told) < KEEP_TICK)
		*disable |= CPUIDLE_STATE_DISABLED_BY_DRIVER;
	else
		*disable &= ~(unsigned long long)CPUIDLE_STATE_DISABLED_BY_DRIVER;
}

static int idle_enter(struct cpuidle_device *device, struct cpuidle_driver *driver, int index)
{
	struct ontime_chan *chan = this_cpu_read(vcpu_chan);
	bool told = false;

	if (chan) {
		word_set(chan, ONTIME_VCPU_HALTING);
		smp_mb();
		if (chan_has_used(chan)) {
			word_set(chan, ONTIME_VCPU_LOOKING);
			vcpu_told_now();
			chan_look(chan);
			return index;
		}
	}
	ct_cpuidle_enter();
	native_safe_halt();
	raw_local_irq_disable();
	ct_cpuidle_exit();
	/*
	 * RCU did not wait for this CPU while it halted: the CPU may have another channel by now,
	 * or none.
	 */
	chan = this_cpu_read(vcpu_chan);
	if (chan) {
		word_set(chan, ONTIME_VCPU_LOOKING);
		smp_mb();
		told = chan_has_used(chan);
		if (told) {
			vcpu_told_now();
			chan_look(chan);
		}
	}
	idle_keep_tick(device, told);
	return index;
}

#define IDLE_STATE(NAME, DESC, FLAGS) \
	{ \
		.name = NAME, .desc = DESC, .enter = idle_enter, .exit_latency = 1, .target_residency = 1, \
		.flags = CPUIDLE_FLAG_RCU_IDLE | (FLAGS), \
	}

/*
 * Without an owner: otherwise cpuidle would hold a reference to the module while the driver is
 * registered, and rmmod would fail.
 */
static struct cpuidle_driver idle_driver = {
	.name = "ontime",
	.states = {
		IDLE_STATE("halt", "halt; looks at Ontime's queues", CPUIDLE_FLAG_POLLING),
		IDLE_STATE("halt, no tick", "the same with the tick stopped", 0),
	},
	.state_count = 2,
};

/* ---- Context switches ---- */

static void on_switch(void *unused, bool preempt, struct task_struct *prev, struct task_struct *next,
		      unsigned int prev_state)
{
	struct ontime_chan *chan = this_cpu_read(vcpu_chan);
	u32 before, now;

	if (!chan)
		return;
	if (is_idle_task(next)) {
		/*
		 * The idle loop checks before it halts. Until the next thread runs, a message is
		 * found there, not here.
		 */
		word_set(chan, ONTIME_VCPU_LOOKING);
		chan->running = U32_MAX;
		return;
	}
	before = chan->running;
	now = task_word(next);
	chan->running = now;
	word_set(chan, now);
	/*
	 * A message for a thread below the one that ran was left in the queue. Nothing may be woken
	 * here.
	 */
	if (now < before || now == ONTIME_VCPU_RUN) {
		smp_mb();
		if (chan_has_used(chan))
			irq_work_queue(&chan->look);
	}
}

/* ---- CPUs that go offline and come back ---- */

/*
 * In state RUN at priority 0 the device notifies of every message, by MAIN's interrupt: right for
 * an offline CPU.
 */
static int cpu_goes(unsigned int cpu)
{
	struct ontime_chan *chan = per_cpu(vcpu_bound, cpu);

	if (!chan)
		return 0;
	preempt_disable();
	per_cpu(vcpu_chan, cpu) = NULL;
	word_set(chan, ONTIME_VCPU_RUN);
	preempt_enable();
	smp_mb();
	ontime_reap(chan);
	return 0;
}

static int cpu_comes(unsigned int cpu)
{
	struct ontime_chan *chan = per_cpu(vcpu_bound, cpu);

	if (!chan)
		return 0;
	chan->running = U32_MAX;
	per_cpu(vcpu_chan, cpu) = chan;
	return 0;
}

static enum cpuhp_state cpu_state;

/* ---- Context switches: registering ---- */

static struct tracepoint *switch_point;

static void find_switch(struct tracepoint *point, void *unused)
{
	if (!strcmp(point->name, "sched_switch"))
		switch_point = point;
}

/* ---- Around a call ---- */

/*
 * Rings the doorbell. If it is this vCPU's own channel, the host knows that the caller checks the
 * queue at once.
 */
void ontime_ring(struct ontime_chan *chan)
{
	bool own;

	preempt_disable();
	own = this_cpu_read(vcpu_chan) == chan;
	if (own)
		word_set(chan, ONTIME_VCPU_LOOKING);
	virtqueue_notify(chan->callq);
	if (own) {
		word_set(chan, task_word(current));
		smp_mb();
	}
	preempt_enable();
}

/* ---- Binding a channel to its vCPU ---- */

static DEFINE_MUTEX(idle_lock);
static unsigned int idle_users;

static int idle_start(void)
{
	int err;

	if (idle_users++)
		return 0;
	for_each_kernel_tracepoint(find_switch, NULL);
	err = switch_point ? tracepoint_probe_register(switch_point, on_switch, NULL) : -ENOENT;
	if (err)
		goto err_users;
	err = cpuhp_setup_state_nocalls(CPUHP_AP_ONLINE_DYN, "ontime:vcpu", cpu_comes, cpu_goes);
	if (err < 0)
		goto err_probe;
	cpu_state = err;
	err = cpuidle_register(&idle_driver, NULL);
	if (err)
		goto err_state;
	return 0;

err_state:
	cpuhp_remove_state_nocalls(cpu_state);
err_probe:
	tracepoint_probe_unregister(switch_point, on_switch, NULL);
	tracepoint_synchronize_unregister();
err_users:
	idle_users--;
	return err;
}

static void idle_stop(void)
{
	if (--idle_users)
		return;
	cpuidle_unregister(&idle_driver);
	cpuhp_remove_state_nocalls(cpu_state);
	tracepoint_probe_unregister(switch_point, on_switch, NULL);
	tracepoint_synchronize_unregister();
}

static int chan_start_thread(struct ontime_chan *chan)
{
	struct task_struct *thread;

	if (!IS_ENABLED(CONFIG_PREEMPT_RT))
		return 0;
	thread = kthread_create(chan_thread, chan, "ontime/%u", chan->number);
	if (IS_ERR(thread))
		return PTR_ERR(thread);
	kthread_bind(thread, chan->cpu);
	ontime_thread_first(thread);
	chan->thread = thread;
	wake_up_process(thread);
	return 0;
}

static void chan_set_cpu(struct ontime_chan *chan, struct ontime_chan *value)
{
	cpus_read_lock();
	per_cpu(vcpu_bound, chan->cpu) = value;
	per_cpu(vcpu_chan, chan->cpu) = cpu_online(chan->cpu) ? value : NULL;
	cpus_read_unlock();
	/* The idle loop and the context switch read it with preemption disabled. */
	synchronize_rcu();
}

/*
 * Binds channel @chan to its vCPU, so that it wakes that vCPU's idle loop. If that is not possible,
 * nothing changes: the channel interrupts. @main: the channel whose control queue tells the host.
 */
int ontime_idle_bind(struct ontime_chan *chan, struct ontime_chan *main)
{
	int err;

	mutex_lock(&idle_lock);
	chan->cpu = chan->number - 1;
	err = chan->cpu < nr_cpu_ids && cpu_online(chan->cpu) ? 0 : -ENODEV;
	if (err)
		goto out;
	chan->word = kzalloc(sizeof(*chan->word), GFP_KERNEL);
	err = chan->word ? idle_start() : -ENOMEM;
	if (err)
		goto err_word;
	chan->look = IRQ_WORK_INIT_HARD(chan_irq_work);
	err = chan_start_thread(chan);
	if (err)
		goto err_idle;
	err = ontime_wake_arm(chan);
	if (err)
		goto err_thread;
	chan_set_cpu(chan, chan);
	err = ontime_ctl_vcpu(main, chan->number, chan->cpu, virt_to_phys(chan->word));
	if (err)
		goto err_armed;
	chan->bound = true;
	ontime_reap(chan);
	mutex_unlock(&idle_lock);
	return 0;

err_armed:
	chan_set_cpu(chan, NULL);
	ontime_wake_disarm(chan);
err_thread:
	if (chan->thread)
		kthread_stop(chan->thread);
	chan->thread = NULL;
err_idle:
	idle_stop();
err_word:
	/* A host that did not answer may still write to the word: then its memory is not freed. */
	if (err != -ETIMEDOUT)
		kfree(chan->word);
	chan->word = NULL;
out:
	mutex_unlock(&idle_lock);
	dev_warn(&chan->vdev->dev, "channel %u interrupts, it does not wake the idle loop: %d\n", chan->number, err);
	return err;
}

/*
 * Makes the channel interrupt again. The host releases the word first, if @main's control queue is
 * there to ask it.
 */
void ontime_idle_unbind(struct ontime_chan *chan, struct ontime_chan *main)
{
	int err;

	mutex_lock(&idle_lock);
	if (!chan->bound)
		goto out;
	err = main ? ontime_ctl_vcpu(main, chan->number, chan->cpu, 0) : -ECONNRESET;
	chan->bound = false;
	chan_set_cpu(chan, NULL);
	irq_work_sync(&chan->look);
	if (chan->thread)
		kthread_stop(chan->thread);
	chan->thread = NULL;
	ontime_wake_disarm(chan);
	idle_stop();
	/* A host that did not answer may still write to the word: then its memory is not freed. */
	if (!err)
		kfree(chan->word);
	chan->word = NULL;
out:
	mutex_unlock(&idle_lock);
}
