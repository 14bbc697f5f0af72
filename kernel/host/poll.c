// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * A thread for each NAPI instance of an interface that polls its ring all the time, for kernels
 * before 6.19, which have no such threads of their own (KBP, IEICE'22: a polling kernel thread in
 * place of NET_RX softirq).
 *
 * It uses the kernel's busy polling (net/core/dev.c, napi_busy_loop), like a process that waits for
 * a socket: the thread claims the instance, whose interrupt then stays off. It releases the
 * instance every STRETCH_US, because it is in an RCU read section until then. So that the interrupt
 * is not enabled each time, the interface defers it (napi_defer_hard_irqs, gro_flush_timeout:
 * "preferred busy polling", Documentation/networking/napi.rst); if the thread does not poll any
 * more, a timer ends that. Between two polls, timers and all other softirqs run.
 */
#include <linux/kthread.h>
#include <linux/netpoll.h>
#include <linux/rculist.h>
#include <linux/rtnetlink.h>
#include <linux/slab.h>
#include <linux/sysfs.h>
#include <net/busy_poll.h>

#include "ontime_napi.h"

/* The longest RCU read section, us. */
#define STRETCH_US 500
/*
 * The interrupt is enabled again if the instance is not polled for this time, ns: longer than a
 * stretch, and than the time in which the thread lets others run.
 */
#define OPEN_AFTER_NS (4 * NSEC_PER_MSEC)
/* Packets in a poll: the kernel's own BUSY_POLL_BUDGET. */
#define BUDGET 8
/* How long to wait, us, if the instance is gone or another context has it. */
#define AWAY_US 100

struct poller {
	struct net_device *dev;
	struct task_struct *task;
	unsigned int napi_id;
	unsigned long looks;
};

/* A polled interface. */
struct polled {
	struct list_head list;
	struct net_device *dev;
	u32 deferred;
	unsigned long timeout;
	unsigned int count;
	struct poller pollers[];
};

/* All polled interfaces; one that is down has no threads. Under rtnl. */
static LIST_HEAD(polled);

static struct polled *find(struct net_device *dev)
{
	struct polled *p;

	ASSERT_RTNL();
	list_for_each_entry(p, &polled, list)
		if (p->dev == dev)
			return p;
	return NULL;
}

/* The thread's instance, NULL if it is gone. Under RCU. */
static struct napi_struct *instance(const struct poller *poller)
{
	struct napi_struct *napi;

	list_for_each_entry_rcu(napi, &poller->dev->napi_list, dev_list)
		if (napi->napi_id == poller->napi_id)
			return napi;
	return NULL;
}

/*
 * Called after each poll, whether or not the instance could be claimed: so its GRO lists may be in
 * use elsewhere. Packets that wait to be merged (GRO) end the stretch.
 */
static bool enough(void *data, unsigned long since)
{
	struct poller *poller = data;
	struct napi_struct *napi;
	bool merged;

	poller->looks++;
	rcu_read_lock();
	napi = instance(poller);
	merged = napi && READ_ONCE(napi->gro_bitmask);
	rcu_read_unlock();
	return merged || kthread_should_stop() || busy_loop_current_time() - since > STRETCH_US;
}

/*
 * Passes on packets that wait to be merged (GRO). They would wait for a poll that finds no packets,
 * because the driver does not end its poll while the instance is polled. Another context that has
 * the instance flushes them itself. It is not made to poll again, as napi_schedule_prep() alone
 * would do.
 */
static void flush_merged(struct poller *poller)
{
	struct napi_struct *napi;
	void *lock;

	rcu_read_lock();
	local_bh_disable();
	napi = instance(poller);
	if (napi && READ_ONCE(napi->gro_bitmask) && !napi_is_scheduled(napi) && napi_schedule_prep(napi)) {
		lock = netpoll_poll_lock(napi);
		napi_gro_flush(napi, false);
		napi_complete_done(napi, 0);
		netpoll_poll_unlock(lock);
	}
	local_bh_enable();
	rcu_read_unlock();
}

static int poll(void *data)
{
	struct poller *poller = data;

	while (!kthread_should_stop()) {
		unsigned long before = poller->looks;

		napi_busy_loop(poller->napi_id, enough, poller, true, BUDGET);
		flush_merged(poller);
		if (poller->looks == before)
			usleep_range(AWAY_US, 2 * AWAY_US);
		/*
		 * The thread may never sleep. Code that removes a tracer or a probe waits for each
		 * task to pass a quiescent state (synchronize_rcu_tasks).
		 */
		cond_resched_tasks_rcu_qs();
	}
	return 0;
}

static void stop(struct polled *p)
{
	while (p->count)
		kthread_stop(p->pollers[--p->count].task);
	WRITE_ONCE(p->dev->napi_defer_hard_irqs, p->deferred);
	WRITE_ONCE(p->dev->gro_flush_timeout, p->timeout);
}

/* Starts the threads of an interface that is up. */
static struct polled *start(struct net_device *dev)
{
	struct napi_struct *napi;
	unsigned int count = 0, all;
	struct polled *p;
	int err = 0;

	rcu_read_lock();
	list_for_each_entry_rcu(napi, &dev->napi_list, dev_list)
		count++;
	rcu_read_unlock();
	p = kzalloc(struct_size(p, pollers, count), GFP_KERNEL);
	if (!p)
		return ERR_PTR(-ENOMEM);
	p->dev = dev;
	p->deferred = READ_ONCE(dev->napi_defer_hard_irqs);
	p->timeout = READ_ONCE(dev->gro_flush_timeout);
	if (!netif_running(dev))
		return p;
	all = count;
	count = 0;
	rcu_read_lock();
	list_for_each_entry_rcu(napi, &dev->napi_list, dev_list)
		/* Transmit-only instances have no ID by which they could be polled. */
		if (count < all && napi->napi_id >= MIN_NAPI_ID)
			p->pollers[count++].napi_id = napi->napi_id;
	rcu_read_unlock();
	WRITE_ONCE(dev->napi_defer_hard_irqs, 1);
	WRITE_ONCE(dev->gro_flush_timeout, OPEN_AFTER_NS);
	for (; p->count < count; p->count++) {
		struct poller *poller = &p->pollers[p->count];

		poller->dev = dev;
		poller->task = kthread_run(poll, poller, "napi-poll/%s-%u", dev->name, poller->napi_id);
		if (IS_ERR(poller->task)) {
			err = PTR_ERR(poller->task);
			break;
		}
	}
	if (err) {
		stop(p);
		kfree(p);
		return ERR_PTR(err);
	}
	return p;
}

int ontime_poll_set(struct net_device *dev, bool on)
{
	struct polled *p = find(dev);

	if (on == !!p)
		return 0;
	if (!on) {
		list_del(&p->list);
		stop(p);
		kfree(p);
		return 0;
	}
	/*
	 * Its packets come from threads of this host, and polling could only take the CPU from
	 * these.
	 */
	if (!dev->dev.parent)
		return -EOPNOTSUPP;
	p = start(dev);
	if (IS_ERR(p))
		return PTR_ERR(p);
	list_add(&p->list, &polled);
	return 0;
}

int ontime_poll_show(struct net_device *dev, char *buf)
{
	return sysfs_emit(buf, "%d\n", !!find(dev));
}

void ontime_poll_down(struct net_device *dev)
{
	struct polled *p = find(dev);

	/* Its instances may be different when it is up again. */
	if (p)
		stop(p);
}

void ontime_poll_up(struct net_device *dev)
{
	struct polled *p = find(dev), *new;

	if (!p)
		return;
	new = start(dev);
	if (IS_ERR(new)) {
		netdev_warn(dev, "its NAPI is not polled any more: %ld\n", PTR_ERR(new));
		ontime_poll_set(dev, false);
		return;
	}
	list_replace(&p->list, &new->list);
	kfree(p);
}
