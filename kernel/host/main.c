// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * What kernels before 6.18 lack for RT packets beside bulk packets: two files for each interface in
 * every network namespace:
 *
 *   /sys/class/net/X/ontime/napi_weight   "default", or the most packets its NAPI takes in a round, 1 to 64
 *
 *   /sys/class/net/X/ontime/busy_poll     "1" while threads of this module, napi-poll/X-ID, poll its NAPI; else "0"
 *
 * A setting ends with the interface, with its move to another network namespace, and with the
 * module: then every instance has its driver's value again. Writing takes CAP_NET_ADMIN of the
 * host: a container owns its interface, but not the CPU.
 */
#include <linux/capability.h>
#include <linux/device.h>
#include <linux/kernfs.h>
#include <linux/module.h>
#include <linux/rtnetlink.h>
#include <linux/sched/signal.h>
#include <linux/sysfs.h>
#include <linux/version.h>

#include "ontime_napi.h"

#if LINUX_VERSION_CODE >= KERNEL_VERSION(6, 13, 0)
/*
 * From 6.13 on each NAPI instance defers its interrupt itself, and from 6.14 on napi_list has
 * another lock.
 */
#error "this module is for kernels before 6.13; from 6.19 on nothing here is needed"
#endif

static ssize_t napi_weight_show(struct device *device, struct device_attribute *attribute, char *buf)
{
	struct net_device *dev = to_net_dev(device);
	ssize_t length = -ENODEV;

	/*
	 * Must not wait for rtnl: the thread that unregisters the interface holds it, and waits for
	 * us (net/core/net-sysfs.c).
	 */
	if (!rtnl_trylock())
		return restart_syscall();
	if (dev->reg_state == NETREG_REGISTERED)
		length = ontime_weight_show(dev, buf);
	rtnl_unlock();
	return length;
}

static ssize_t napi_weight_store(struct device *device, struct device_attribute *attribute, const char *buf,
				 size_t length)
{
	struct net_device *dev = to_net_dev(device);
	int weight = 0, err;

	if (!capable(CAP_NET_ADMIN))
		return -EPERM;
	if (!sysfs_streq(buf, "default")) {
		err = kstrtoint(buf, 10, &weight);
		if (err)
			return err;
		if (weight < 1 || weight > NAPI_POLL_WEIGHT)
			return -ERANGE;
	}
	if (!rtnl_trylock())
		return restart_syscall();
	err = dev->reg_state == NETREG_REGISTERED ? ontime_weight_set(dev, weight) : -ENODEV;
	rtnl_unlock();
	return err ?: length;
}

static DEVICE_ATTR_RW(napi_weight);

static ssize_t busy_poll_show(struct device *device, struct device_attribute *attribute, char *buf)
{
	struct net_device *dev = to_net_dev(device);
	ssize_t length = -ENODEV;

	if (!rtnl_trylock())
		return restart_syscall();
	if (dev->reg_state == NETREG_REGISTERED)
		length = ontime_poll_show(dev, buf);
	rtnl_unlock();
	return length;
}

static ssize_t busy_poll_store(struct device *device, struct device_attribute *attribute, const char *buf,
			       size_t length)
{
	struct net_device *dev = to_net_dev(device);
	bool on;
	int err;

	if (!capable(CAP_NET_ADMIN))
		return -EPERM;
	err = kstrtobool(buf, &on);
	if (err)
		return err;
	if (!rtnl_trylock())
		return restart_syscall();
	err = dev->reg_state == NETREG_REGISTERED ? ontime_poll_set(dev, on) : -ENODEV;
	rtnl_unlock();
	return err ?: length;
}

static DEVICE_ATTR_RW(busy_poll);

static struct attribute *attributes[] = {
	&dev_attr_busy_poll.attr,
	&dev_attr_napi_weight.attr,
	NULL,
};

static const struct attribute_group group = {
	.name = "ontime",
	.attrs = attributes,
};

/*
 * The kernel repeats NETDEV_UNREGISTER for an interface that is still referenced after its own
 * directory is gone (netdev_wait_allrefs_any).
 */
static void remove_directory(struct net_device *dev)
{
	struct kernfs_node *parent = dev->dev.kobj.sd;
	struct kernfs_node *own = parent ? kernfs_find_and_get(parent, group.name) : NULL;

	if (!own)
		return;
	sysfs_remove_group(&dev->dev.kobj, &group);
	kernfs_put(own);
}

/*
 * When the notifier is registered, the kernel reports every existing interface; when it is
 * unregistered, an UNREGISTER for each (net/core/dev.c, call_netdevice_unregister_notifiers). All
 * under rtnl.
 */
static int on_event(struct notifier_block *block, unsigned long event, void *data)
{
	struct net_device *dev = netdev_notifier_info_to_dev(data);

	switch (event) {
	case NETDEV_REGISTER:
		if (sysfs_create_group(&dev->dev.kobj, &group))
			netdev_warn(dev, "no directory ontime in sysfs: its NAPI weight cannot be set\n");
		break;
	case NETDEV_UP:
		/* Many drivers make their NAPI instances in ndo_open. */
		ontime_weight_renew(dev);
		ontime_poll_up(dev);
		break;
	case NETDEV_GOING_DOWN:
		ontime_poll_down(dev);
		break;
	case NETDEV_UNREGISTER:
		ontime_poll_set(dev, false);
		ontime_weight_set(dev, 0);
		remove_directory(dev);
		break;
	}
	return NOTIFY_DONE;
}

static struct notifier_block notifier = { .notifier_call = on_event };

static int __init ontime_napi_init(void)
{
	return register_netdevice_notifier(&notifier);
}

static void __exit ontime_napi_exit(void)
{
	unregister_netdevice_notifier(&notifier);
}

module_init(ontime_napi_init);
module_exit(ontime_napi_exit);

MODULE_DESCRIPTION("Ontime: NAPI weight and polling threads by interface, for kernels that lack them");
MODULE_AUTHOR("The Ontime developers");
MODULE_LICENSE("GPL");
