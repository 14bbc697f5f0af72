// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * How many packets an interface's NAPI takes in a round.
 *
 * On PREEMPT_RT before 6.18, code between local_bh_disable() and local_bh_enable() holds a lock of
 * its CPU (kernel/softirq.c, softirq_ctrl.lock), also for each round of a NAPI thread
 * (net/core/dev.c, napi_threaded_poll_loop). So an RT packet waits for a round in progress:
 * napi_struct.weight packets of a bulk NIC, 64. Outside of the kernel the weight cannot be set.
 *
 * A round reads the weight once (__napi_poll), so a change applies to the next round, and no packet
 * is affected. The module only lowers the driver's weight, because a driver may have sized its
 * structures by it.
 */
#include <linux/rculist.h>
#include <linux/rtnetlink.h>
#include <linux/slab.h>
#include <linux/sysfs.h>

#include "ontime_napi.h"

/*
 * An instance and its driver's weight. The pointer is only compared with those in napi_list, never
 * followed.
 */
struct known {
	struct napi_struct *napi;
	int weight;
};

/* An interface whose weight is set. Other interfaces have no such entry. */
struct limit {
	struct list_head list;
	struct net_device *dev;
	int weight;
	unsigned int count;
	struct known known[];
};

static LIST_HEAD(limits);

static struct limit *find(struct net_device *dev)
{
	struct limit *limit;

	ASSERT_RTNL();
	list_for_each_entry(limit, &limits, list)
		if (limit->dev == dev)
			return limit;
	return NULL;
}

/*
 * An instance's weight by its driver. If the present weight is not the one that was set, another
 * instance has this address now, or other code has changed the weight: then the present weight
 * counts.
 */
static int original(const struct limit *limit, const struct napi_struct *napi)
{
	int weight = READ_ONCE(napi->weight);
	unsigned int i;

	for (i = 0; limit && i < limit->count; i++)
		if (limit->known[i].napi == napi && weight == min(limit->weight, limit->known[i].weight))
			return limit->known[i].weight;
	return weight;
}

static void drop(struct limit *limit)
{
	struct napi_struct *napi;

	rcu_read_lock();
	list_for_each_entry_rcu(napi, &limit->dev->napi_list, dev_list)
		WRITE_ONCE(napi->weight, original(limit, napi));
	rcu_read_unlock();
	list_del(&limit->list);
	kfree(limit);
}

int ontime_weight_set(struct net_device *dev, int weight)
{
	struct limit *old = find(dev), *new;
	struct napi_struct *napi;
	unsigned int count = 0;

	if (!weight) {
		if (old)
			drop(old);
		return 0;
	}
	rcu_read_lock();
	list_for_each_entry_rcu(napi, &dev->napi_list, dev_list)
		count++;
	rcu_read_unlock();
	new = kzalloc(struct_size(new, known, count), GFP_KERNEL);
	if (!new)
		return -ENOMEM;
	new->dev = dev;
	new->weight = weight;
	new->count = count;
	/*
	 * Drivers that make instances without rtnl can only add to the list: new ones are left for
	 * ontime_weight_renew().
	 */
	count = 0;
	rcu_read_lock();
	list_for_each_entry_rcu(napi, &dev->napi_list, dev_list) {
		if (count == new->count)
			break;
		new->known[count].napi = napi;
		new->known[count].weight = original(old, napi);
		WRITE_ONCE(napi->weight, min(weight, new->known[count].weight));
		count++;
	}
	rcu_read_unlock();
	if (old)
		list_replace(&old->list, &new->list);
	else
		list_add(&new->list, &limits);
	kfree(old);
	return 0;
}

void ontime_weight_renew(struct net_device *dev)
{
	struct limit *limit = find(dev);

	if (limit && ontime_weight_set(dev, limit->weight))
		netdev_warn(dev, "no memory: new NAPI instances keep their driver's weight\n");
}

int ontime_weight_show(struct net_device *dev, char *buf)
{
	struct limit *limit = find(dev);
	struct napi_struct *napi;
	bool all = true;

	if (!limit)
		return sysfs_emit(buf, "default\n");
	rcu_read_lock();
	list_for_each_entry_rcu(napi, &dev->napi_list, dev_list)
		all &= READ_ONCE(napi->weight) <= limit->weight;
	rcu_read_unlock();
	return sysfs_emit(buf, all ? "%d\n" : "%d, not of all\n", limit->weight);
}
