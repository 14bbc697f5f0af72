// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Detects a device process that is gone or stopped. QEMU does not report that, and calls would wait
 * for ever. So while there are sockets, the device is pinged from time to time on the control
 * queue, whose thread has nothing else to do. If no answer comes, sockets fail with ECONNRESET and
 * new ones stay with the guest's own stack, until the device answers or another one appears.
 *
 * The device itself is not touched meanwhile. QEMU waits for a stopped process when its device is
 * reset. And QEMU ends when the configuration of a device is read whose process is gone.
 */
#include <linux/moduleparam.h>
#include <linux/virtio_ring.h>

#include "ontime.h"

static unsigned int patience = 10;
module_param(patience, uint, 0644);
MODULE_PARM_DESC(patience, "seconds until a device that does not answer counts as gone; 0: never");

/* Duration of a ping now, ns: the bare way to the device process and back. */
static int ping_get(char *buffer, const struct kernel_param *param)
{
	struct ontime_dev *dev = ontime_dev_get();
	struct ontime_chan *main;
	s64 took = -ENODEV;

	if (!dev)
		return -ENODEV;
	main = ontime_chan_get(0, dev->generation);
	if (main) {
		took = ontime_ctl_took(main);
		ontime_chan_put(main);
	}
	ontime_dev_put(dev);
	return took < 0 ? took : sysfs_emit(buffer, "%lld\n", took);
}

static const struct kernel_param_ops ping_ops = { .get = ping_get };
module_param_cb(ping, &ping_ops, NULL, 0400);
MODULE_PARM_DESC(ping, "read: nanoseconds of a call on the control queue that asks for nothing");

static void watch_again(struct ontime_chan *main)
{
	unsigned int seconds = clamp(READ_ONCE(patience) / 2, 1U, 3600U);

	schedule_delayed_work(&main->watch, seconds * HZ);
}

/* Whether there are calls or sockets that could be lost. */
static bool watch_wanted(struct ontime_chan *main)
{
	return READ_ONCE(patience) && (READ_ONCE(main->in_flight) || !xa_empty(&main->dev->socks));
}

static void watch_ask(struct ontime_chan *main)
{
	main->ping = ontime_ctl_ping(main);
	main->asked = jiffies;
}

static void watch_work(struct work_struct *work)
{
	struct ontime_chan *main = container_of(to_delayed_work(work), struct ontime_chan, watch);

	if (main->silent) {
		if (ontime_chan_answers(main)) {
			ontime_dev_answers(main);
			return;
		}
	} else if (main->ping) {
		ontime_reap(main);
		if (ontime_rpc_done(main->ping)) {
			ontime_rpc_put(main->ping);
			main->ping = NULL;
		} else if (READ_ONCE(patience) && time_after(jiffies, main->asked + READ_ONCE(patience) * HZ)) {
			ontime_dev_silent(main);
		}
	}
	if (!main->silent && !main->ping && watch_wanted(main))
		watch_ask(main);
	watch_again(main);
}

/* Deferrable: an idle vCPU is not woken for this work. */
void ontime_watch_start(struct ontime_chan *main)
{
	INIT_DEFERRABLE_WORK(&main->watch, watch_work);
	watch_again(main);
}

void ontime_watch_stop(struct ontime_chan *main)
{
	cancel_delayed_work_sync(&main->watch);
	if (main->ping)
		ontime_rpc_put(main->ping);
	main->ping = NULL;
}
