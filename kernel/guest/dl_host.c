// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * The bandwidth that the host holds for deadline tasks. The host is told whole needs of vCPUs. So
 * what was lost on the way (after a task's end, a failed change, a restart of the device process)
 * is repaired by telling them again: dl_settle().
 *
 * With the parameter deadline_spare, the host holds that much more than its need for each vCPU. A
 * task that fits into the spare bandwidth is admitted without asking, and the host is told
 * afterwards.
 */
#include <linux/module.h>
#include <linux/virtio.h>

#include "dl.h"

/* Interval of retries if the host has no room for spare bandwidth, jiffies. */
#define DL_SPARE_AGAIN (10 * HZ)

/*
 * What the host holds, and the generation of its device process (0: none). A budget above the
 * period: not known.
 */
static struct place_need dl_told[ONTIME_VCPUS_MAX];
static u64 dl_generation;
/* A device was set up since. It holds nothing, even if its process is the same as before. */
static bool dl_anew;
/* The spare bandwidth of each vCPU; runtime 0: none. */
static struct place_task dl_spare;

static bool dl_more(const struct place_need *need, const struct place_need *than)
{
	/* budget / period; the ABI's limits keep the products within 64 bits. */
	return need->budget * (than->period ?: 1) > than->budget * (need->period ?: 1);
}

/*
 * Whether the host's spare bandwidth covers the first @count tasks of dl_set, so that it need not
 * be asked.
 */
bool dl_covers(unsigned int count)
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
	for (vcpu = 0; covers && vcpu < dl_vcpus(); vcpu++) {
		struct place_need need = place_need(dl_set, count, vcpu), *told = &dl_told[vcpu];

		/* Bandwidth in a longer period may come too late for a shorter one. */
		covers = !need.budget || (told->budget <= told->period && told->period <= need.period && !dl_more(&need, told));
	}
	return covers;
}

/*
 * Has the host hold the needs of the first @count tasks of dl_set. -EBUSY: it refuses, and holds
 * what it held.
 */
int dl_tell(unsigned int count)
{
	struct ontime_bw entries[ONTIME_VCPUS_MAX];
	unsigned int changed = 0, vcpu, i;
	bool more = false, known = true;
	struct ontime_chan *main = NULL;
	struct ontime_dev *dev;
	int err = -ENODEV;
	u16 op;

	/* Before the device is looked up: so that device is the new one, or one still newer. */
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
		dl_next_tell(main);
	}
	for (vcpu = 0; vcpu < dl_vcpus(); vcpu++) {
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

/* Appends the spare bandwidth to the first @count entries of dl_set; returns the new count. */
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

/* Tells the host the present needs; if it does not accept them, again later. */
void dl_settle(void)
{
	unsigned int count = dl_gather(NULL), with = dl_add_spare(count);
	int err = dl_tell(with);

	/* Without the spare bandwidth: what was promised to tasks has precedence. */
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

/* The same, but does not wait for the host if that holds spare bandwidth. */
void dl_settle_soon(void)
{
	if (dl_spare.runtime)
		dl_work_now();
	else
		dl_settle();
}

/* A new device has not been told anything yet. */
void dl_host_anew(void)
{
	smp_store_release(&dl_anew, true);
}

/* Format: "RUNTIME/PERIOD" in us; "0": nothing. */
static int spare_set(const char *value, const struct kernel_param *param)
{
	unsigned long long runtime = 0, period = 0;
	char rest;

	if (sscanf(value, "%llu/%llu %c", &runtime, &period, &rest) != 2 &&
	    (sscanf(value, "%llu %c", &runtime, &rest) != 1 || runtime))
		return -EINVAL;
	if (runtime && (runtime > period || period < ONTIME_BW_PERIOD_MIN / NSEC_PER_USEC ||
			period > ONTIME_BW_PERIOD_MAX / NSEC_PER_USEC))
		return -EINVAL;
	mutex_lock(&dl_mutex);
	dl_spare = (struct place_task){ .runtime = runtime * NSEC_PER_USEC, .period = period * NSEC_PER_USEC };
	/* Otherwise with the first device. */
	if (dl_hooked && !dl_ended)
		dl_work_now();
	mutex_unlock(&dl_mutex);
	return 0;
}

static int spare_get(char *buffer, const struct kernel_param *param)
{
	int length;

	mutex_lock(&dl_mutex);
	length = dl_spare.runtime ? sysfs_emit(buffer, "%llu/%llu\n", dl_spare.runtime / NSEC_PER_USEC,
						dl_spare.period / NSEC_PER_USEC) :
				    sysfs_emit(buffer, "0\n");
	mutex_unlock(&dl_mutex);
	return length;
}

static const struct kernel_param_ops spare_ops = { .set = spare_set, .get = spare_get };
module_param_cb(deadline_spare, &spare_ops, NULL, 0644);
MODULE_PARM_DESC(deadline_spare,
		 "RUNTIME/PERIOD (us) that each vCPU has the host hold for deadline tasks to come; 0: nothing (default)");
