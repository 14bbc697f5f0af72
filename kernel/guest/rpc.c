// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Calls to the device process (the paper's VMRPC).
 *
 * A caller puts its call into the queue, rings the doorbell, and checks for the result at once. If
 * the device's thread shares the vCPU's CPU, it has run by then, and no interrupt is needed.
 * Otherwise the caller asks for an interrupt and sleeps, without a lock. A call belongs to the
 * queue as well as to its caller, so that a killed caller can leave.
 *
 * A call is large, because small messages travel in it. So its memory is not zeroed for each use,
 * and sockets on a channel keep calls for reuse.
 */
#include <linux/delay.h>
#include <linux/mm.h>
#include <linux/sched/signal.h>
#include <linux/slab.h>
#include <linux/uio.h>
#include <linux/virtio_config.h>
#include <linux/workqueue.h>

#include "ontime.h"

static struct kmem_cache *rpc_cache;
static struct workqueue_struct *rpc_wq;

static void rpc_own_reply(struct ontime_rpc *rpc)
{
	rpc->in = (struct ontime_reply *)&rpc->in_own;
	rpc->in_max = ONTIME_SMALL;
	sg_set_buf(&rpc->in_sg, rpc->in, sizeof(rpc->in_own));
}

/*
 * Initializes a call once for all its uses. With a constructor, the kernel does not zero the whole
 * object on allocation (init_on_alloc).
 */
static void rpc_make(void *memory)
{
	struct ontime_rpc *rpc = memory;

	memset(rpc, 0, sizeof(*rpc));
	INIT_LIST_HEAD(&rpc->link);
	INIT_LIST_HEAD(&rpc->idle_link);
	sg_init_one(&rpc->out_sg, &rpc->out, sizeof(rpc->out));
	sg_init_table(&rpc->in_sg, 1);
	rpc_own_reply(rpc);
}

int ontime_rpc_init(void)
{
	const unsigned int bodies = offsetof(struct ontime_rpc, out);

	/* Messages are copied between user space and the bodies. */
	rpc_cache = kmem_cache_create_usercopy("ontime_rpc", sizeof(struct ontime_rpc), 0, SLAB_HWCACHE_ALIGN, bodies,
					       sizeof(struct ontime_rpc) - bodies, rpc_make);
	if (!rpc_cache)
		return -ENOMEM;
	rpc_wq = alloc_workqueue("ontime", WQ_UNBOUND, 0);
	if (!rpc_wq) {
		kmem_cache_destroy(rpc_cache);
		return -ENOMEM;
	}
	return 0;
}

/* To be called when no call is in flight any more. */
void ontime_rpc_exit(void)
{
	destroy_workqueue(rpc_wq);
	kmem_cache_destroy(rpc_cache);
}

/* Begins a use of a call. The bodies are not cleared: they are written before they are read. */
void ontime_rpc_begin(struct ontime_rpc *rpc, u16 op, u32 sock)
{
	struct ontime_call *call = &rpc->out.call;

	memset(&rpc->use, 0, sizeof(rpc->use));
	memset(call, 0, sizeof(*call));
	memset(&rpc->in->done, 0, sizeof(rpc->in->done));
	rpc->closes = -1;
	rpc->abandoned = ONTIME_SOCK_NONE;
	call->op = cpu_to_le16(op);
	call->sock = cpu_to_le32(sock);
	/* The address is unique among calls in flight. */
	call->id = cpu_to_le64((uintptr_t)rpc);
	call->prio = cpu_to_le16(ontime_prio(current));
}

static struct ontime_rpc *rpc_alloc(struct ontime_dev *dev, u32 number, u16 op, u32 sock, gfp_t gfp)
{
	struct ontime_chan *chan = ontime_chan_get(number, dev->generation);
	struct ontime_rpc *rpc;

	if (!chan)
		return ERR_PTR(-ECONNRESET);
	rpc = kmem_cache_alloc(rpc_cache, gfp);
	if (!rpc) {
		ontime_chan_put(chan);
		return ERR_PTR(-ENOBUFS);
	}
	refcount_set(&rpc->refs, 1);
	kref_get(&dev->ref);
	rpc->dev = dev;
	rpc->chan = chan;
	ontime_rpc_begin(rpc, op, sock);
	return rpc;
}

/* A new call on channel @number. -ECONNRESET: its device is gone, and with it the host's socket. */
struct ontime_rpc *ontime_rpc_new(struct ontime_dev *dev, u32 number, u16 op, u32 sock)
{
	return rpc_alloc(dev, number, op, sock, GFP_KERNEL);
}

static void rpc_unpin(struct ontime_rpc *rpc)
{
	struct scatterlist *sg;
	unsigned int i;

	for (i = 0, sg = rpc->pages.sgl; rpc->pinned && i < rpc->pages.nents; i++, sg++) {
		struct page *page = sg_page(sg);

		unpin_user_pages_dirty_lock(&page, 1, rpc->dirty);
	}
	if (!rpc->pages.sgl && !rpc->gathered)
		return;
	kfree(rpc->pages.sgl);
	kvfree(rpc->gathered);
	rpc->pages = (struct sg_table) {};
	rpc->pinned = false;
	rpc->gathered = NULL;
}

/* Size of an answer with @length bytes of small data. */
static size_t rpc_reply_size(size_t length)
{
	return PAGE_ALIGN(sizeof(struct ontime_reply) + ONTIME_CONTROL_MAX + length);
}

static void rpc_shrink(struct ontime_rpc *rpc)
{
	if (rpc->in_max == ONTIME_SMALL)
		return;
	free_pages_exact(rpc->in, rpc_reply_size(rpc->in_max));
	rpc_own_reply(rpc);
}

/*
 * Makes room for @length bytes of small data in the answer, in one piece of memory, from a call
 * that was just begun to the end of its life. False if there is no memory; then the call is
 * unchanged.
 */
bool ontime_rpc_grow(struct ontime_rpc *rpc, size_t length)
{
	size_t size = rpc_reply_size(length);
	struct ontime_reply *reply;

	if (length <= rpc->in_max)
		return true;
	reply = alloc_pages_exact(size, GFP_KERNEL_ACCOUNT | __GFP_NORETRY | __GFP_NOWARN);
	if (!reply)
		return false;
	memset(&reply->done, 0, sizeof(reply->done));
	rpc_shrink(rpc);
	rpc->in = reply;
	rpc->in_max = length;
	sg_set_buf(&rpc->in_sg, reply, size);
	return true;
}

/* A caller has left this ACCEPT. If a connection was accepted all the same, it is closed. */
static void rpc_end_abandoned(struct ontime_rpc *rpc)
{
	u32 index = rpc->abandoned & (ONTIME_SOCKETS_MAX - 1);

	if (rpc->abandoned == ONTIME_SOCK_NONE)
		return;
	if (rpc->answered && !rpc->result)
		ontime_rpc_close(rpc->dev, 0, rpc->abandoned, index, ONTIME_CLOSE_GRACEFUL);
	else
		ontime_index_free(rpc->dev, index);
}

static void rpc_free(struct ontime_rpc *rpc)
{
	rpc_unpin(rpc);
	rpc_shrink(rpc);
	rpc_end_abandoned(rpc);
	ontime_chan_put(rpc->chan);
	ontime_dev_put(rpc->dev);
	kmem_cache_free(rpc_cache, rpc);
}

static void rpc_free_work(struct work_struct *work)
{
	rpc_free(container_of(work, struct ontime_rpc, free_work));
}

void ontime_rpc_put(struct ontime_rpc *rpc)
{
	if (refcount_dec_and_test(&rpc->refs))
		rpc_free(rpc);
}

/*
 * Prepares a completed call for reuse: frees all but its channel. False if the queue still has it.
 */
bool ontime_rpc_rest(struct ontime_rpc *rpc)
{
	if (refcount_read(&rpc->refs) > 1)
		return false;
	smp_acquire__after_ctrl_dep();
	rpc_unpin(rpc);
	return true;
}

/* Completes a call for its caller, and wakes that. With chan->lock. */
void ontime_rpc_finish(struct ontime_rpc *rpc, s32 result)
{
	struct task_struct *sleeper = rpc->sleeper;

	rpc->result = result;
	if (sleeper) {
		rpc->sleeper = NULL;
		rpc->chan->sleepers--;
	}
	/*
	 * From here on the caller may free the call and exit. Its task_struct stays valid: RCU
	 * waits for lock holders.
	 */
	smp_store_release(&rpc->done, true);
	if (sleeper)
		wake_up_process(sleeper);
}

/*
 * The queue returns a call: with chan->lock, possibly in an interrupt. If the caller was killed, a
 * worker frees the call, because pages cannot be unpinned here.
 */
void ontime_rpc_complete(struct ontime_rpc *rpc, s32 result)
{
	list_del_init(&rpc->link);
	rpc->chan->in_flight--;
	if (rpc->ahead) {
		list_del_init(&rpc->idle_link);
		rpc->chan->sleepers--;
		atomic_dec(&rpc->chan->waiting);
	} else if (rpc->more) {
		atomic_dec(&rpc->chan->waiting);
	}
	/* If a channel refuses to close a socket, MAIN closes it. */
	if (rpc->closes >= 0 && !(rpc->chan->number && result == -EOPNOTSUPP))
		ontime_index_free(rpc->dev, rpc->closes);
	if (!rpc->lost)
		ontime_rpc_finish(rpc, result);
	ontime_rpc_put_later(rpc);
}

/* May be called in atomic context. The module is unloaded only after the work has run. */
bool ontime_queue_work(struct work_struct *work)
{
	return queue_work(rpc_wq, work);
}

/* May be called in atomic context. */
void ontime_rpc_put_later(struct ontime_rpc *rpc)
{
	if (!refcount_dec_and_test(&rpc->refs))
		return;
	/* Here, not once for all uses: the kernel forgets a work item with the memory that it lies in. */
	INIT_WORK(&rpc->free_work, rpc_free_work);
	queue_work(rpc_wq, &rpc->free_work);
}

/*
 * A killed caller leaves an ACCEPT that the device may still answer with socket @id. From then on
 * the socket and its index belong to the call. False if the call is not in flight.
 */
bool ontime_rpc_abandon(struct ontime_rpc *rpc, u32 id)
{
	unsigned long flags;
	bool in_flight;

	spin_lock_irqsave(&rpc->chan->lock, flags);
	in_flight = !list_empty(&rpc->link);
	if (in_flight)
		rpc->abandoned = id;
	spin_unlock_irqrestore(&rpc->chan->lock, flags);
	return in_flight;
}

/*
 * Pins up to @length bytes of the caller's memory for the call. Returns how many; the iterator
 * moves past them.
 */
int ontime_rpc_pages(struct ontime_rpc *rpc, struct iov_iter *iter, size_t length)
{
	unsigned int pages = max(iov_iter_npages(iter, rpc->chan->pages_max), 1);
	ssize_t got;

	rpc->pages.sgl = kmalloc_array(pages, sizeof(struct scatterlist), GFP_KERNEL);
	if (!rpc->pages.sgl)
		return -ENOMEM;
	sg_init_table(rpc->pages.sgl, pages);
	rpc->dirty = iov_iter_rw(iter) == READ;
	rpc->pinned = true;
	got = extract_iter_to_sg(iter, min_t(size_t, length, rpc->chan->bytes_max), &rpc->pages, pages, 0);
	if (got <= 0) {
		rpc->pages.nents = 0;
		return got ? got : -EFAULT;
	}
	sg_mark_end(&rpc->pages.sgl[rpc->pages.nents - 1]);
	return got;
}

/* With chan->lock. */
static int rpc_add(struct ontime_rpc *rpc, struct virtqueue *vq)
{
	struct scatterlist *sgs[4];
	unsigned int out = 0, in = 0;

	rpc->out_sg.length = sizeof(rpc->out.call) + le16_to_cpu(rpc->out.call.control_len) + rpc->out_small;
	rpc->in_sg.length = sizeof(rpc->in->done) + le16_to_cpu(rpc->out.call.control_room) + rpc->in_small;
	sgs[out++] = &rpc->out_sg;
	if (rpc->pages.nents && !rpc->dirty)
		sgs[out++] = rpc->pages.sgl;
	sgs[out + in++] = &rpc->in_sg;
	if (rpc->pages.nents && rpc->dirty)
		sgs[out + in++] = rpc->pages.sgl;
	return virtqueue_add_sgs(vq, sgs, out, in, rpc, GFP_ATOMIC);
}

/* A call that cancels a waiting call. */
static struct ontime_rpc *rpc_cancel_new(struct ontime_rpc *rpc, gfp_t gfp)
{
	u64 id = le64_to_cpu(rpc->out.call.id);
	struct ontime_rpc *cancel;

	cancel = rpc_alloc(rpc->dev, rpc->chan->number, ONTIME_OP_CANCEL, le32_to_cpu(rpc->out.call.sock), gfp);
	if (!IS_ERR(cancel)) {
		cancel->out.call.arg[0] = cpu_to_le32(lower_32_bits(id));
		cancel->out.call.arg[1] = cpu_to_le32(upper_32_bits(id));
	}
	return cancel;
}

static int rpc_try_submit(struct ontime_rpc *rpc)
{
	struct ontime_chan *chan = rpc->chan;
	unsigned long flags;
	struct virtqueue *vq;
	bool notify = false, missed = false;
	int err = -ECONNRESET;

	/* Until the doorbell has rung, because ontime_remove() waits for it. */
	rcu_read_lock();
	spin_lock_irqsave(&chan->lock, flags);
	if (chan->up) {
		vq = rpc->control ? chan->controlq : chan->callq;
		err = rpc->control || chan->in_flight < chan->calls_max ? rpc_add(rpc, vq) : -ENOSPC;
		if (!err) {
			refcount_inc(&rpc->refs);
			list_add_tail(&rpc->link, &chan->calls);
			chan->in_flight++;
		}
		if (!err && rpc->ahead) {
			/* The next doorbell covers it; until then no caller waits for it. */
			chan->quiet = true;
			chan->sleepers++;
			rpc->posted = ++chan->aheads;
			list_add_tail(&rpc->idle_link, &chan->idle);
			missed = ontime_rearm(chan, vq, ONTIME_VQ_CALL);
		} else if (!err && rpc->quiet) {
			chan->quiet = true;
		} else if (!err) {
			notify = virtqueue_kick_prepare(vq);
			chan->quiet &= rpc->control;
		}
	}
	spin_unlock_irqrestore(&chan->lock, flags);
	if (notify && rpc->control)
		virtqueue_notify(vq);
	else if (notify)
		ontime_ring(chan);
	rcu_read_unlock();
	/* The device has used buffers meanwhile. */
	if (missed)
		ontime_reap(chan);
	return err;
}

/*
 * Whether one more call may wait in the device. Half of the places are kept for calls that do not
 * wait.
 */
bool ontime_rpc_may_wait(struct ontime_chan *chan)
{
	return atomic_read(&chan->waiting) < chan->calls_max / 2;
}

/* Marks whether a caller waits for a receive ahead. One that is waited for is not called off. */
void ontime_rpc_wanted(struct ontime_rpc *rpc, bool wanted)
{
	struct ontime_chan *chan = rpc->chan;
	unsigned long flags;

	spin_lock_irqsave(&chan->lock, flags);
	if (wanted)
		list_del_init(&rpc->idle_link);
	else if (list_empty(&rpc->idle_link) && !rpc->done)
		list_add_tail(&rpc->idle_link, &chan->idle);
	spin_unlock_irqrestore(&chan->lock, flags);
}

/*
 * Returns the oldest receive ahead, with a reference, if its socket is less busy than the asking
 * socket: that one was refused once since the oldest was posted. So if more sockets than places
 * take turns, they do not each call off the receive of the next one. NULL: the asking socket is
 * refused.
 */
static struct ontime_rpc *rpc_oldest(struct ontime_chan *chan, u64 *refused)
{
	struct ontime_rpc *oldest;
	unsigned long flags;

	spin_lock_irqsave(&chan->lock, flags);
	oldest = list_first_entry_or_null(&chan->idle, struct ontime_rpc, idle_link);
	if (oldest && oldest->posted < *refused) {
		list_del_init(&oldest->idle_link);
		refcount_inc(&oldest->refs);
	} else {
		oldest = NULL;
		*refused = ++chan->aheads;
	}
	spin_unlock_irqrestore(&chan->lock, flags);
	return oldest;
}

/*
 * Makes room for a receive ahead: calls off an older one, which ends with what it has received, or
 * nothing. The doorbell for the new receive also covers the CANCEL.
 */
static int rpc_call_off_oldest(struct ontime_chan *chan, u64 *refused)
{
	struct ontime_rpc *oldest = ontime_rpc_may_wait(chan) ? rpc_oldest(chan, refused) : NULL, *cancel;
	int err;

	if (!oldest)
		return -EBUSY;
	cancel = rpc_cancel_new(oldest, GFP_KERNEL);
	err = PTR_ERR_OR_ZERO(cancel);
	if (!err) {
		cancel->quiet = true;
		err = rpc_try_submit(cancel);
		ontime_rpc_put(cancel);
	}
	if (err)
		ontime_rpc_wanted(oldest, false);
	ontime_rpc_put(oldest);
	return err;
}

/*
 * Posts a receive that waits in the device from the next doorbell on; ontime_ahead_done() gets its
 * completion. @refused belongs to the socket: it is compared at the next attempt if there is no
 * place now.
 */
int ontime_rpc_post(struct ontime_rpc *rpc, u64 *refused)
{
	struct ontime_chan *chan = rpc->chan;
	int err = 0;

	if (!chan->hints)
		return -EOPNOTSUPP;
	/* Sockets that only might receive must not take the places of waiting callers. */
	if (atomic_inc_return(&chan->waiting) > chan->calls_max / 4)
		err = rpc_call_off_oldest(chan, refused);
	if (!err) {
		rpc->out.call.flags |= cpu_to_le16(ONTIME_CALL_WAIT | ONTIME_CALL_AHEAD);
		rpc->ahead = true;
		err = rpc_try_submit(rpc);
	}
	if (err)
		atomic_dec(&chan->waiting);
	return err;
}

/*
 * Posts a send that no caller waits for: the next doorbell announces it, or a timer. It may wait in
 * the device for room, and comes before the socket's later sends in any case.
 */
int ontime_rpc_post_send(struct ontime_rpc *rpc)
{
	struct ontime_chan *chan = rpc->chan;
	int err = -EBUSY;

	atomic_inc(&chan->waiting);
	if (ontime_rpc_may_wait(chan)) {
		rpc->out.call.flags |= cpu_to_le16(ONTIME_CALL_WAIT);
		rpc->more = true;
		rpc->quiet = true;
		err = rpc_try_submit(rpc);
	}
	if (err)
		atomic_dec(&chan->waiting);
	else if (!timer_pending(&chan->bell))
		mod_timer(&chan->bell, jiffies + max(HZ / 100, 1));
	return err;
}

/* Rings the doorbell for calls that were posted without one. */
void ontime_rpc_kick(struct ontime_chan *chan)
{
	unsigned long flags;
	bool notify = false;

	rcu_read_lock();
	spin_lock_irqsave(&chan->lock, flags);
	if (chan->up && chan->quiet) {
		chan->quiet = false;
		notify = virtqueue_kick_prepare(chan->callq);
	}
	spin_unlock_irqrestore(&chan->lock, flags);
	if (notify)
		ontime_ring(chan);
	rcu_read_unlock();
}

/* Calls were posted a while ago. In an interrupt. */
void ontime_rpc_bell(struct timer_list *timer)
{
	ontime_rpc_kick(container_of(timer, struct ontime_chan, bell));
}

static bool rpc_room(struct ontime_chan *chan)
{
	return !READ_ONCE(chan->up) || READ_ONCE(chan->in_flight) < chan->calls_max;
}

/*
 * Submits a call, waiting while the queue is full. @killable: a fatal signal ends the wait with
 * -EINTR.
 */
static int rpc_submit(struct ontime_rpc *rpc, bool killable)
{
	struct ontime_chan *chan = rpc->chan;
	int err;

	while ((err = rpc_try_submit(rpc)) == -ENOSPC) {
		/*
		 * The queue may be smaller than calls_max. Then a descriptor is missing, and a
		 * completion frees one.
		 */
		wait_event_timeout(chan->room, rpc_room(chan), max(HZ / 100, 1));
		ontime_reap(chan);
		if (killable && fatal_signal_pending(current))
			return -EINTR;
	}
	return err;
}

/*
 * True if the caller may sleep: the device will interrupt, and the thread that takes the completion
 * wakes the caller.
 */
static bool rpc_sleep_begin(struct ontime_rpc *rpc)
{
	struct ontime_chan *chan = rpc->chan;
	unsigned long flags;
	bool may;

	spin_lock_irqsave(&chan->lock, flags);
	may = !rpc->done && (!chan->up || !ontime_rearm(chan, chan->callq, ONTIME_VQ_CALL));
	if (may) {
		rpc->sleeper = current;
		chan->sleepers++;
	}
	spin_unlock_irqrestore(&chan->lock, flags);
	return may;
}

/* The caller gives up. False if the call was completed meanwhile. */
static bool rpc_sleep_end(struct ontime_rpc *rpc)
{
	struct ontime_chan *chan = rpc->chan;
	unsigned long flags;
	bool asleep;

	spin_lock_irqsave(&chan->lock, flags);
	asleep = rpc->sleeper;
	rpc->sleeper = NULL;
	chan->sleepers -= asleep;
	spin_unlock_irqrestore(&chan->lock, flags);
	return asleep;
}

/*
 * Sleeps until the call is completed. Returns the rest of the timeout, 0 after it, -ERESTARTSYS
 * after a signal.
 */
static long rpc_sleep(struct ontime_rpc *rpc, unsigned int state, long timeout)
{
	do {
		ontime_reap(rpc->chan);
		if (ontime_rpc_done(rpc))
			return max(timeout, 1L);
	} while (!rpc_sleep_begin(rpc));
	for (;;) {
		set_current_state(state);
		if (ontime_rpc_done(rpc) || !timeout || signal_pending_state(state, current))
			break;
		timeout = schedule_timeout(timeout);
	}
	__set_current_state(TASK_RUNNING);
	if (ontime_rpc_done(rpc) || !rpc_sleep_end(rpc))
		return max(timeout, 1L);
	return timeout ? -ERESTARTSYS : 0;
}

/*
 * Runs a call that the device completes without waiting for the network. Returns its result, or
 * -errno. Only a fatal signal ends the wait early: then the queue keeps the call and its pages
 * until the device is done with them.
 */
int ontime_rpc_run(struct ontime_rpc *rpc)
{
	int err = rpc_submit(rpc, true);

	if (!err && rpc_sleep(rpc, TASK_KILLABLE, MAX_SCHEDULE_TIMEOUT) < 0)
		err = -EINTR;
	return err ? err : rpc->result;
}

/*
 * Closes a host socket. Its index is free when the device has closed the socket, also if the caller
 * is killed. Channel @number closes it if it may (an accepted connection), or else MAIN, after the
 * channel's thread has released the socket.
 */
void ontime_rpc_close(struct ontime_dev *dev, u32 number, u32 id, u32 index, u32 how)
{
	struct ontime_rpc *rpc = rpc_alloc(dev, number, ONTIME_OP_CLOSE, id, GFP_KERNEL | __GFP_NOFAIL);
	bool refused = false;

	if (IS_ERR(rpc)) {
		/* The device is gone, and its sockets with it. */
		ontime_index_free(dev, index);
		return;
	}
	rpc->out.call.arg[0] = cpu_to_le32(how);
	rpc->closes = index;
	if (rpc_submit(rpc, false) < 0) {
		ontime_index_free(dev, index);
	} else {
		rpc_sleep(rpc, number ? TASK_UNINTERRUPTIBLE : TASK_KILLABLE, MAX_SCHEDULE_TIMEOUT);
		refused = number && rpc->result == -EOPNOTSUPP;
	}
	ontime_rpc_put(rpc);
	if (refused)
		ontime_rpc_close(dev, 0, id, index, how);
}

/*
 * Cancels a call. The call's own completion comes before CANCEL's, in the same queue. A killed
 * caller cancels too: otherwise the call would wait in the device as long as the socket exists,
 * with its pages pinned.
 */
void ontime_rpc_cancel(struct ontime_rpc *rpc)
{
	struct ontime_rpc *cancel = rpc_cancel_new(rpc, GFP_KERNEL | __GFP_NOFAIL);

	if (IS_ERR(cancel))
		return;
	if (!rpc_submit(cancel, false))
		rpc_sleep(cancel, TASK_KILLABLE, MAX_SCHEDULE_TIMEOUT);
	ontime_rpc_put(cancel);
}

/*
 * Runs a call that the device completes when there is a result. The caller leaves only after the
 * device has given the call up, so that no result is lost and nothing is written later: a result
 * that came meanwhile is returned. -EAGAIN after *timeout (jiffies), -ERESTARTSYS after a signal.
 */
int ontime_rpc_wait(struct ontime_rpc *rpc, long *timeout)
{
	int err;
	long left;

	rpc->out.call.flags |= cpu_to_le16(ONTIME_CALL_WAIT);
	atomic_inc(&rpc->chan->waiting);
	err = rpc_submit(rpc, true);
	if (err)
		goto out;
	left = rpc_sleep(rpc, TASK_INTERRUPTIBLE, *timeout);
	/*
	 * After a signal *timeout keeps its value, so that a call without a time limit is
	 * restarted.
	 */
	if (left >= 0)
		*timeout = left;
	if (left <= 0) {
		err = left ? -ERESTARTSYS : -EAGAIN;
		ontime_rpc_cancel(rpc);
		if (rpc_sleep(rpc, TASK_KILLABLE, MAX_SCHEDULE_TIMEOUT) < 0 || rpc->result == -ECANCELED)
			goto out;
	}
	err = rpc->result;
out:
	atomic_dec(&rpc->chan->waiting);
	return err;
}

static struct ontime_rpc *ctl_new(struct ontime_chan *main, u16 op)
{
	struct ontime_rpc *rpc = ontime_rpc_new(main->dev, 0, op, ONTIME_SOCK_NONE);

	if (!IS_ERR(rpc))
		rpc->control = true;
	return rpc;
}

/*
 * Asks the device for a sign of life; the answer completes the call. NULL if that is not possible
 * now.
 */
struct ontime_rpc *ontime_ctl_ping(struct ontime_chan *main)
{
	struct ontime_rpc *rpc = ctl_new(main, ONTIME_CTL_PING);

	if (IS_ERR(rpc))
		return NULL;
	if (virtio_has_feature(main->vdev, ONTIME_F_LOCAL))
		rpc->out.call.arg[0] = cpu_to_le32(ontime_steer_bypassed());
	if (rpc_try_submit(rpc)) {
		ontime_rpc_put(rpc);
		return NULL;
	}
	return rpc;
}

/*
 * Runs a call on the control queue, and frees it. That queue does not interrupt: the answer, which
 * takes some hundred microseconds, is polled, at growing intervals. The caller may hold locks that
 * are needed to remove a device that does not answer. So waiting is limited; a full queue (-ENOSPC)
 * is full of calls that were given up.
 */
static int ctl_run(struct ontime_chan *main, struct ontime_rpc *rpc)
{
	int err = rpc_try_submit(rpc), tries;
	unsigned long nap = 50;

	for (tries = 0; !err && !ontime_rpc_done(rpc); tries++) {
		if (tries == 5000)
			err = -ETIMEDOUT;
		usleep_range(nap / 2, nap);
		nap = min(nap + nap / 2, 1000UL);
		ontime_reap(main);
	}
	if (!err)
		err = rpc->result;
	ontime_rpc_put(rpc);
	return err;
}

/* Duration of a control call that does nothing, with all calls ahead of it, ns; or an error. */
s64 ontime_ctl_took(struct ontime_chan *main)
{
	struct ontime_rpc *rpc = ctl_new(main, ONTIME_CTL_PING);
	u64 begun = ktime_get_ns();
	int err;

	if (IS_ERR(rpc))
		return PTR_ERR(rpc);
	err = ctl_run(main, rpc);
	return err ?: ktime_get_ns() - begun;
}

/* Names the address of channel @number's word, and the vCPU that writes it. */
int ontime_ctl_vcpu(struct ontime_chan *main, u32 number, u32 cpu, u64 address)
{
	struct ontime_rpc *rpc = ctl_new(main, ONTIME_CTL_VCPU);
	__le64 value = cpu_to_le64(address);

	if (IS_ERR(rpc))
		return PTR_ERR(rpc);
	rpc->out.call.arg[0] = cpu_to_le32(number);
	rpc->out.call.arg[1] = cpu_to_le32(cpu);
	memcpy(rpc->out.body, &value, sizeof(value));
	rpc->out_small = sizeof(value);
	return ctl_run(main, rpc);
}

/* Names the address at which next deadlines are published. */
int ontime_ctl_next(struct ontime_chan *main, u64 address)
{
	struct ontime_rpc *rpc = ctl_new(main, ONTIME_CTL_NEXT);
	__le64 value = cpu_to_le64(address);

	if (IS_ERR(rpc))
		return PTR_ERR(rpc);
	memcpy(rpc->out.body, &value, sizeof(value));
	rpc->out_small = sizeof(value);
	return ctl_run(main, rpc);
}

/*
 * Has the host hold these needs of vCPUs, in place of what it held. -EBUSY: the host refuses, and
 * holds what it held. After any other error it is unknown which of the two it holds.
 */
int ontime_ctl_bw(struct ontime_chan *main, u16 op, const struct ontime_bw *entries, unsigned int count)
{
	struct ontime_rpc *rpc = ctl_new(main, op);

	if (IS_ERR(rpc))
		return PTR_ERR(rpc);
	rpc->out_small = count * sizeof(*entries);
	memcpy(rpc->out.body, entries, rpc->out_small);
	return ctl_run(main, rpc);
}
