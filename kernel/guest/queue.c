// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Used buffers: completed calls and events. The first context that checks a queue takes all of
 * them: a caller after it has rung the doorbell, a waiter before it sleeps, or the interrupt.
 */
#include <linux/slab.h>
#include <linux/virtio_ring.h>

#include "ontime.h"

static int post_event(struct ontime_chan *chan, struct ontime_event *event)
{
	struct scatterlist sg;

	sg_init_one(&sg, event, sizeof(*event));
	return virtqueue_add_inbuf(chan->eventq, &sg, 1, event, GFP_ATOMIC);
}

/* Fills the event queue, before the device is started. */
int ontime_post_events(struct ontime_chan *chan)
{
	unsigned int count = virtqueue_get_vring_size(chan->eventq), i;
	int err = 0;

	chan->events = kcalloc(count, sizeof(*chan->events), GFP_KERNEL);
	if (!chan->events)
		return -ENOMEM;
	for (i = 0; i < count && !err; i++)
		err = post_event(chan, &chan->events[i]);
	return err;
}

/*
 * Enables the interrupt for the next used buffer, and notes how far the queue was taken. True if
 * there is a used buffer already.
 */
bool ontime_rearm(struct ontime_chan *chan, struct virtqueue *vq, unsigned int index)
{
	unsigned int seen = virtqueue_enable_cb_prepare(vq);

	WRITE_ONCE(chan->seen[index], seen);
	return virtqueue_poll(vq, seen);
}

/*
 * Takes one event out of the queue and returns its buffer to the device. False if there is none;
 * then the next one interrupts.
 */
static bool next_event(struct ontime_chan *chan, struct ontime_event *event)
{
	struct ontime_event *buffer;
	unsigned long flags;
	unsigned int length;
	bool got = false;

	spin_lock_irqsave(&chan->lock, flags);
	buffer = chan->up ? virtqueue_get_buf(chan->eventq, &length) : NULL;
	if (buffer) {
		got = true;
		*event = *buffer;
		if (length < sizeof(*event))
			event->type = 0;
		post_event(chan, buffer);
		virtqueue_kick(chan->eventq);
	} else if (chan->up && ontime_rearm(chan, chan->eventq, ONTIME_VQ_EVENT)) {
		/* An event came in between: the next call takes it. */
		got = true;
		event->type = 0;
	}
	spin_unlock_irqrestore(&chan->lock, flags);
	return got;
}

/*
 * A check that finds nothing more notes how far the queue was taken, and enables the interrupt.
 * After that there is nothing to do until the device has used more buffers. The queue exists while
 * RCU readers see chan->up.
 */
static void reap_events(struct ontime_chan *chan)
{
	struct ontime_event event;
	bool any;

	rcu_read_lock();
	any = READ_ONCE(chan->up) && virtqueue_poll(chan->eventq, READ_ONCE(chan->seen[ONTIME_VQ_EVENT]));
	while (any && next_event(chan, &event)) {
		switch (le16_to_cpu(event.type)) {
		case ONTIME_EVENT_READY:
			ontime_sock_event(chan, &event);
			break;
		case ONTIME_EVENT_START:
			if (le64_to_cpu(event.generation) != chan->generation)
				ontime_restart(chan);
			break;
		}
	}
	rcu_read_unlock();
}

/*
 * With chan->lock. Adds receives ahead and posted sends to @posted, with a reference: what their
 * sockets learn, they learn without the lock.
 */
static bool reap_calls(struct virtqueue *vq, struct list_head *posted)
{
	struct ontime_rpc *rpc;
	unsigned int length;
	bool any = false, held;

	while ((rpc = virtqueue_get_buf(vq, &length))) {
		any = true;
		/* After completion, a call that is not held may be freed or reused. */
		held = rpc->ahead || rpc->more;
		if (held)
			refcount_inc(&rpc->refs);
		rpc->answered = length >= sizeof(rpc->in->done) && rpc->in->done.id == rpc->out.call.id;
		ontime_rpc_complete(rpc, rpc->answered ? (s32)le32_to_cpu(rpc->in->done.result) : -EIO);
		if (held)
			list_add_tail(&rpc->link, posted);
	}
	return any;
}

/* Takes all used buffers, events first. May be called in any context. */
void ontime_reap(struct ontime_chan *chan)
{
	struct ontime_rpc *rpc, *next;
	unsigned long flags;
	LIST_HEAD(posted);
	bool freed = false;

	reap_events(chan);
	spin_lock_irqsave(&chan->lock, flags);
	while (chan->up) {
		freed |= reap_calls(chan->callq, &posted);
		if (chan->controlq)
			reap_calls(chan->controlq, &posted);
		if (!chan->sleepers && !chan->word) {
			virtqueue_disable_cb(chan->callq);
			break;
		}
		if (!ontime_rearm(chan, chan->callq, ONTIME_VQ_CALL))
			break;
	}
	spin_unlock_irqrestore(&chan->lock, flags);
	if (!freed)
		return;
	/*
	 * An error that the host reported before it completed a call must be known before the
	 * caller goes on.
	 */
	reap_events(chan);
	list_for_each_entry_safe(rpc, next, &posted, link) {
		list_del_init(&rpc->link);
		if (rpc->more) {
			ontime_more_done(rpc);
			/* It has no pages. */
			ontime_rpc_put(rpc);
			continue;
		}
		ontime_ahead_done(rpc);
		ontime_rpc_put_later(rpc);
	}
	if (wq_has_sleeper(&chan->room))
		wake_up(&chan->room);
}

/*
 * The device does not answer, but may still use what it was given. Callers get an error; calls and
 * their pages stay in the queue until the device is reset.
 */
void ontime_chan_silence(struct ontime_chan *chan)
{
	struct ontime_rpc *rpc;

	spin_lock_irq(&chan->lock);
	chan->up = false;
	chan->silent = true;
	list_for_each_entry(rpc, &chan->calls, link) {
		if (rpc->lost)
			continue;
		rpc->lost = true;
		ontime_rpc_finish(rpc, -ECONNRESET);
	}
	spin_unlock_irq(&chan->lock);
	wake_up_all(&chan->room);
}

/* Whether a silent device has answered after all. */
bool ontime_chan_answers(struct ontime_chan *main)
{
	bool answers;

	spin_lock_irq(&main->lock);
	answers = virtqueue_poll(main->controlq, virtqueue_enable_cb_prepare(main->controlq));
	spin_unlock_irq(&main->lock);
	return answers;
}

/*
 * Takes the buffers that a reset device did not use out of its queues. This frees the descriptor tables and the DMA
 * mappings that virtqueue_add_sgs() made, which del_vqs() does not. No other thread uses the queues at this time.
 */
void ontime_queues_clear(struct ontime_chan *chan)
{
	struct virtqueue *queues[] = { chan->callq, chan->eventq, chan->controlq };
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(queues); i++)
		while (queues[i] && virtqueue_detach_unused_buf(queues[i]))
			;
}

/* The device is reset and has no buffers any more: all calls in flight end with an error. */
void ontime_chan_fail(struct ontime_chan *chan)
{
	struct ontime_rpc *rpc, *next;

	ontime_queues_clear(chan);
	spin_lock_irq(&chan->lock);
	list_for_each_entry_safe(rpc, next, &chan->calls, link)
		ontime_rpc_complete(rpc, -ECONNRESET);
	spin_unlock_irq(&chan->lock);
	wake_up_all(&chan->room);
}
