// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * The virtio devices of docs/reference/device.md: their queues and interrupts, probe and remove.
 *
 * QEMU gives a device one MSI-X vector. No queue asks virtio_pci for a callback, so virtio_pci uses
 * the vector for configuration changes and does not fall back to a shared INTx line. Then the
 * queues get the same vector, and every interrupt arrives as a "configuration change".
 */
#include <linux/lockdep.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/pci.h>
#include <linux/sched/rt.h>
#include <linux/slab.h>
#include <linux/virtio_config.h>
#include <linux/virtio_pci.h>
#include <linux/virtio_ring.h>

#include "ontime.h"

/* Written with dev_lock, read under RCU. */
static DEFINE_MUTEX(dev_lock);
static struct ontime_dev __rcu *main_dev;
static struct ontime_chan __rcu *chans[ONTIME_CHANNELS_MAX];

/* ---- Lookup ---- */

bool ontime_device_ready(void)
{
	return rcu_access_pointer(main_dev);
}

struct ontime_dev *ontime_dev_get(void)
{
	struct ontime_dev *dev;

	rcu_read_lock();
	dev = rcu_dereference(main_dev);
	if (dev && !kref_get_unless_zero(&dev->ref))
		dev = NULL;
	rcu_read_unlock();
	return dev;
}

/* The device of a generation, under the RCU read lock; NULL if it is gone. */
struct ontime_dev *ontime_dev_rcu(u64 generation)
{
	struct ontime_dev *dev = rcu_dereference(main_dev);

	return dev && dev->generation == generation ? dev : NULL;
}

static void dev_free(struct kref *ref)
{
	struct ontime_dev *dev = container_of(ref, struct ontime_dev, ref);

	ida_destroy(&dev->indices);
	xa_destroy(&dev->socks);
	kfree_rcu(dev, rcu);
}

void ontime_dev_put(struct ontime_dev *dev)
{
	kref_put(&dev->ref, dev_free);
}

struct ontime_chan *ontime_chan_get(u32 number, u64 generation)
{
	struct ontime_chan *chan;

	rcu_read_lock();
	chan = number < ONTIME_CHANNELS_MAX ? rcu_dereference(chans[number]) : NULL;
	if (chan && (chan->generation != generation || !kref_get_unless_zero(&chan->ref)))
		chan = NULL;
	rcu_read_unlock();
	return chan;
}

/*
 * The channel for a socket of this thread: for a real-time thread the channel of its vCPU, if there
 * is one. It does not matter whether that channel wakes or interrupts.
 */
u32 ontime_chan_wanted(u64 generation)
{
	u32 number = raw_smp_processor_id() + 1;
	struct ontime_chan *chan = NULL;

	if (!rt_task(current))
		return 0;
	chan = ontime_chan_get(number, generation);
	if (!chan)
		return 0;
	if (chan->silent)
		number = 0;
	ontime_chan_put(chan);
	return number;
}

static void chan_free(struct kref *ref)
{
	struct ontime_chan *chan = container_of(ref, struct ontime_chan, ref);

	kfree(chan->events);
	kfree_rcu(chan, rcu);
}

void ontime_chan_put(struct ontime_chan *chan)
{
	kref_put(&chan->ref, chan_free);
}

/* ---- Restart ---- */

/*
 * The device process was restarted, and its sockets are gone. A work item that belongs to no
 * channel takes the driver off the device and probes it again.
 */
struct restart {
	struct work_struct work;
	struct virtio_device *vdev;
};

static struct workqueue_struct *restart_wq;

static void restart_work(struct work_struct *work)
{
	struct restart *restart = container_of(work, struct restart, work);
	int err = device_reprobe(&restart->vdev->dev);

	if (err < 0)
		dev_err(&restart->vdev->dev, "cannot set the device up again: %d\n", err);
	put_device(&restart->vdev->dev);
	kfree(restart);
}

/*
 * Called in any context that takes used buffers; acts once. Without memory, the next event repeats
 * it.
 */
void ontime_restart(struct ontime_chan *chan)
{
	struct restart *restart = kmalloc(sizeof(*restart), GFP_ATOMIC);

	if (!restart || xchg(&chan->restarting, true)) {
		kfree(restart);
		return;
	}
	dev_warn(&chan->vdev->dev, "set up anew, the device process has lost its sockets\n");
	INIT_WORK(&restart->work, restart_work);
	get_device(&chan->vdev->dev);
	restart->vdev = chan->vdev;
	queue_work(restart_wq, &restart->work);
}

/* ---- Setup ---- */

/* MAIN's interrupt is also that of channels whose vCPU runs a less urgent thread. */
static void dev_attention(void)
{
	struct ontime_chan *chan;
	unsigned int i;

	rcu_read_lock();
	for (i = 1; i < ONTIME_CHANNELS_MAX; i++) {
		chan = rcu_dereference(chans[i]);
		if (!chan || !READ_ONCE(chan->bound) || !READ_ONCE(chan->word->attention))
			continue;
		WRITE_ONCE(chan->word->attention, 0);
		smp_mb();
		ontime_reap(chan);
	}
	rcu_read_unlock();
}

/* The interrupt handler. */
static void ontime_config_changed(struct virtio_device *vdev)
{
	struct ontime_chan *chan = vdev->priv;

	if (!chan)
		return;
	/* Channels first: their receivers are real-time threads. */
	if (!chan->number)
		dev_attention();
	ontime_reap(chan);
}

/* Assigns the device's only vector to its first @count queues. */
static int dev_set_vectors(struct virtio_device *vdev, unsigned int count)
{
	struct pci_dev *pdev = to_pci_dev(vdev->dev.parent);
	struct virtio_pci_common_cfg __iomem *common;
	u8 cap, type, bar;
	u32 offset;
	unsigned int i;
	int err = 0;

	if (!pdev->msix_enabled) {
		dev_err(&vdev->dev, "no MSI-X vector; give the device one (vectors=1 or more)\n");
		return -ENODEV;
	}
	for (cap = pci_find_capability(pdev, PCI_CAP_ID_VNDR); cap;
	     cap = pci_find_next_capability(pdev, cap, PCI_CAP_ID_VNDR)) {
		pci_read_config_byte(pdev, cap + offsetof(struct virtio_pci_cap, cfg_type), &type);
		if (type == VIRTIO_PCI_CAP_COMMON_CFG)
			break;
	}
	if (!cap)
		return -ENODEV;
	pci_read_config_byte(pdev, cap + offsetof(struct virtio_pci_cap, bar), &bar);
	pci_read_config_dword(pdev, cap + offsetof(struct virtio_pci_cap, offset), &offset);
	common = pci_iomap_range(pdev, bar, offset, sizeof(*common));
	if (!common)
		return -ENOMEM;
	for (i = 0; i < count && !err; i++) {
		iowrite16(i, &common->queue_select);
		iowrite16(0, &common->queue_msix_vector);
		if (ioread16(&common->queue_msix_vector) != 0)
			err = -EBUSY;
	}
	pci_iounmap(pdev, common);
	return err;
}

/*
 * Reads the configuration; the role and the number of sockets are returned, the rest goes into the
 * channel.
 */
static int chan_read_config(struct ontime_chan *chan, u32 *role, u32 *sockets_max)
{
	struct virtio_device *vdev = chan->vdev;
	u32 magic, version, segments, data, wake, channels;

	virtio_cread_le(vdev, struct ontime_config, magic, &magic);
	virtio_cread_le(vdev, struct ontime_config, version, &version);
	virtio_cread_le(vdev, struct ontime_config, generation, &chan->generation);
	virtio_cread_le(vdev, struct ontime_config, role, role);
	virtio_cread_le(vdev, struct ontime_config, channel, &chan->number);
	virtio_cread_le(vdev, struct ontime_config, channels, &channels);
	virtio_cread_le(vdev, struct ontime_config, wake, &wake);
	virtio_cread_le(vdev, struct ontime_config, sockets_max, sockets_max);
	virtio_cread_le(vdev, struct ontime_config, calls_max, &chan->calls_max);
	virtio_cread_le(vdev, struct ontime_config, segments_max, &segments);
	virtio_cread_le(vdev, struct ontime_config, data_max, &data);
	if (magic != ONTIME_MAGIC)
		return -ENODEV;
	if (version != ONTIME_VERSION) {
		dev_err(&vdev->dev, "the device speaks version %u, this module %u; update the older one\n", version,
			ONTIME_VERSION);
		return -ENODEV;
	}
	if (!*sockets_max || chan->calls_max < 4 || segments < 8 || data < ONTIME_SMALL ||
	    chan->number >= ONTIME_CHANNELS_MAX || !chan->number != (*role == ONTIME_ROLE_MAIN)) {
		dev_err(&vdev->dev, "impossible limits: %u sockets, %u calls, %u segments, %u bytes, channel %u\n",
			*sockets_max, chan->calls_max, segments, data, chan->number);
		return -EINVAL;
	}
	chan->wake = *role == ONTIME_ROLE_CHANNEL && wake == ONTIME_WAKE_IDLE;
	chan->urgent = channels > 1;
	*sockets_max = min_t(u32, *sockets_max, ONTIME_SOCKETS_MAX);
	/*
	 * Besides pages, a call has two descriptors (rpc_add()), whichever direction the pages
	 * have.
	 */
	chan->pages_max = min_t(u32, segments - 4, ONTIME_CHUNK_PAGES);
	chan->bytes_max = min_t(u32, data, ONTIME_CHUNK_BYTES);
	return 0;
}

static struct ontime_chan *chan_alloc(struct virtio_device *vdev)
{
	struct ontime_chan *chan = kzalloc(sizeof(*chan), GFP_KERNEL);

	if (!chan)
		return NULL;
	kref_init(&chan->ref);
	chan->vdev = vdev;
	init_waitqueue_head(&chan->room);
	spin_lock_init(&chan->lock);
	INIT_LIST_HEAD(&chan->calls);
	INIT_LIST_HEAD(&chan->idle);
	timer_setup(&chan->bell, ontime_rpc_bell, 0);
	return chan;
}

/*
 * Of the lock of the sockets' array, which process context alone takes. Without it lockdep takes that lock and the one
 * of the indices, which interrupts take under chan->lock, for one: the same inline function initialises both.
 */
static struct lock_class_key dev_socks_class;

static struct ontime_dev *dev_alloc(u64 generation, u32 sockets_max)
{
	struct ontime_dev *dev = kzalloc(sizeof(*dev), GFP_KERNEL);

	if (!dev)
		return NULL;
	kref_init(&dev->ref);
	dev->generation = generation;
	dev->sockets_max = sockets_max;
	ida_init(&dev->indices);
	xa_init(&dev->socks);
	lockdep_set_class(&dev->socks.xa_lock, &dev_socks_class);
	return dev;
}

static int chan_start(struct ontime_chan *chan, unsigned int queues)
{
	struct virtqueue_info info[ONTIME_VQS_MAIN] = {
		[ONTIME_VQ_CALL] = { .name = "call" },
		[ONTIME_VQ_EVENT] = { .name = "event" },
		[ONTIME_VQ_CONTROL] = { .name = "control" },
	};
	struct virtqueue *vqs[ONTIME_VQS_MAIN];
	struct virtio_device *vdev = chan->vdev;
	int err;

	err = virtio_find_vqs(vdev, queues, vqs, info, NULL);
	if (err)
		return err;
	chan->callq = vqs[ONTIME_VQ_CALL];
	chan->eventq = vqs[ONTIME_VQ_EVENT];
	chan->controlq = queues > ONTIME_VQ_CONTROL ? vqs[ONTIME_VQ_CONTROL] : NULL;
	err = dev_set_vectors(vdev, queues);
	if (!err)
		err = ontime_post_events(chan);
	if (err) {
		virtio_reset_device(vdev);
		ontime_queues_clear(chan);
		vdev->config->del_vqs(vdev);
		return err;
	}
	if (chan->urgent)
		ontime_irq_first(chan);
	vdev->priv = chan;
	virtio_device_ready(vdev);
	virtqueue_enable_cb(chan->eventq);
	chan->up = true;
	virtqueue_kick(chan->eventq);
	/* An interrupt before chan->up was set had no effect. */
	ontime_reap(chan);
	return 0;
}

/*
 * The devices of one VM come in any order: binds the channels that now have all they need. With
 * dev_lock.
 */
static void dev_bind_channels(void)
{
	struct ontime_chan *main = rcu_dereference_protected(chans[0], lockdep_is_held(&dev_lock)), *chan;
	unsigned int i;

	/* A channel's vCPU has the channel's number less one. */
	if (!main || !virtio_has_feature(main->vdev, ONTIME_F_CHANNELS))
		return;
	for (i = 1; i < ONTIME_CHANNELS_MAX; i++) {
		chan = rcu_dereference_protected(chans[i], lockdep_is_held(&dev_lock));
		if (chan && chan->wake && !chan->bound && chan->generation == main->generation && ontime_idle_bind(chan, main))
			chan->wake = false;
	}
}

/* How long the host is asked, for all channels together, to release their vCPU words. */
#define DEV_UNBIND (5 * HZ)

/*
 * Unbinds a channel before it is removed, or all channels with MAIN. With dev_lock; so a host that
 * answers late or not at all is not asked for each channel. Words that the host may still write to
 * are not freed.
 */
static void dev_unbind_channels(struct ontime_chan *going)
{
	unsigned long end = jiffies + DEV_UNBIND;
	struct ontime_chan *main = rcu_dereference_protected(chans[0], lockdep_is_held(&dev_lock)), *chan;
	unsigned int i;

	if (main && main->generation != going->generation)
		main = NULL;
	for (i = 1; i < ONTIME_CHANNELS_MAX; i++) {
		chan = rcu_dereference_protected(chans[i], lockdep_is_held(&dev_lock));
		if (chan && (chan == going || (!going->number && chan->generation == going->generation)))
			ontime_idle_unbind(chan, time_after(jiffies, end) ? NULL : main);
	}
}

static int ontime_probe(struct virtio_device *vdev)
{
	struct ontime_chan *chan, *old;
	struct ontime_dev *dev = NULL;
	u32 role, sockets_max;
	bool taken;
	int err;

	if (!virtio_has_feature(vdev, VIRTIO_F_VERSION_1) || !dev_is_pci(vdev->dev.parent))
		return -ENODEV;
	chan = chan_alloc(vdev);
	if (!chan)
		return -ENOMEM;
	err = chan_read_config(chan, &role, &sockets_max);
	if (err)
		goto err_chan;
	if (role == ONTIME_ROLE_MAIN) {
		err = -ENOMEM;
		dev = dev_alloc(chan->generation, sockets_max);
		if (!dev)
			goto err_chan;
	}
	chan->dev = dev;
	chan->hints = virtio_has_feature(vdev, ONTIME_F_HINTS);
	chan->deadlines = dev && virtio_has_feature(vdev, ONTIME_F_DEADLINE);
	mutex_lock(&dev_lock);
	/* A silent device makes room for another. */
	old = rcu_dereference_protected(chans[chan->number], lockdep_is_held(&dev_lock));
	taken = old && !old->silent;
	err = taken ? -EBUSY : chan_start(chan, dev ? ONTIME_VQS_MAIN : ONTIME_VQS_CHANNEL);
	if (!err) {
		rcu_assign_pointer(chans[chan->number], chan);
		if (dev) {
			rcu_assign_pointer(main_dev, dev);
			ontime_watch_start(chan);
		}
		dev_bind_channels();
	}
	mutex_unlock(&dev_lock);
	if (taken)
		dev_err(&vdev->dev, "a second device for channel %u\n", chan->number);
	if (err)
		goto err_dev;
	if (chan->deadlines)
		ontime_dl_device();
	dev_info(&vdev->dev, "channel %u: %u sockets, %u calls\n", chan->number, sockets_max, chan->calls_max);
	return 0;

err_dev:
	if (dev)
		ontime_dev_put(dev);
err_chan:
	ontime_chan_put(chan);
	return err;
}

/* No new sockets are made on this device from now on. With dev_lock. */
static void dev_hide(struct ontime_chan *main)
{
	if (main->dev && rcu_access_pointer(main_dev) == main->dev)
		RCU_INIT_POINTER(main_dev, NULL);
}

/*
 * Ends all sockets of MAIN, or those on the channel; applications keep their descriptors until they
 * close them.
 */
static void dev_end_sockets(struct ontime_chan *chan)
{
	struct ontime_sock *os;
	struct ontime_dev *dev;
	unsigned long index;

	rcu_read_lock();
	dev = chan->dev ?: ontime_dev_rcu(chan->generation);
	if (dev)
		xa_for_each(&dev->socks, index, os)
			if (chan->dev || READ_ONCE(os->chan) == chan->number)
				ontime_sock_die(os);
	rcu_read_unlock();
}

/* The device process does not answer. */
void ontime_dev_silent(struct ontime_chan *main)
{
	struct ontime_chan *chan;
	unsigned int i;

	dev_warn(&main->vdev->dev,
		 "the device process does not answer: its sockets fail, new ones are the guest's own until it does\n");
	mutex_lock(&dev_lock);
	dev_hide(main);
	for (i = 0; i < ONTIME_CHANNELS_MAX; i++) {
		chan = rcu_dereference_protected(chans[i], lockdep_is_held(&dev_lock));
		if (chan && chan->generation == main->generation)
			ontime_chan_silence(chan);
	}
	/* After the channels are silent: so the device is not asked to release the vCPU words. */
	dev_unbind_channels(main);
	mutex_unlock(&dev_lock);
	dev_end_sockets(main);
}

/* The device process was only slow, or stopped: all its devices are set up again. */
void ontime_dev_answers(struct ontime_chan *main)
{
	struct ontime_chan *chan;
	unsigned int i;

	mutex_lock(&dev_lock);
	for (i = 0; i < ONTIME_CHANNELS_MAX; i++) {
		chan = rcu_dereference_protected(chans[i], lockdep_is_held(&dev_lock));
		if (chan && chan->generation == main->generation)
			ontime_restart(chan);
	}
	mutex_unlock(&dev_lock);
}

static void ontime_remove(struct virtio_device *vdev)
{
	struct ontime_chan *chan = vdev->priv;

	if (chan->dev)
		ontime_watch_stop(chan);
	mutex_lock(&dev_lock);
	dev_hide(chan);
	dev_unbind_channels(chan);
	if (rcu_access_pointer(chans[chan->number]) == chan)
		RCU_INIT_POINTER(chans[chan->number], NULL);
	mutex_unlock(&dev_lock);
	spin_lock_irq(&chan->lock);
	chan->up = false;
	spin_unlock_irq(&chan->lock);
	/* Callers between adding a call and ringing the doorbell hold the RCU read lock. */
	synchronize_rcu();
	/* It is not started any more. */
	timer_shutdown_sync(&chan->bell);
	virtio_reset_device(vdev);
	ontime_chan_fail(chan);
	dev_end_sockets(chan);
	if (chan->dev)
		ontime_dev_put(chan->dev);
	vdev->config->del_vqs(vdev);
	vdev->priv = NULL;
	ontime_chan_put(chan);
}

static const struct virtio_device_id ontime_ids[] = {
	{ ONTIME_VIRTIO_ID, VIRTIO_DEV_ANY_ID },
	{ 0 },
};
MODULE_DEVICE_TABLE(virtio, ontime_ids);

static const unsigned int ontime_features[] = {
	ONTIME_F_SOCKETS, ONTIME_F_CHANNELS, ONTIME_F_DEADLINE, ONTIME_F_HINTS, ONTIME_F_LOCAL,
};

static struct virtio_driver ontime_driver = {
	.driver.name = KBUILD_MODNAME,
	.feature_table = ontime_features,
	.feature_table_size = ARRAY_SIZE(ontime_features),
	.id_table = ontime_ids,
	.probe = ontime_probe,
	.remove = ontime_remove,
	.config_changed = ontime_config_changed,
};

int ontime_dev_init(void)
{
	int err;

	restart_wq = alloc_ordered_workqueue("ontime-restart", 0);
	if (!restart_wq)
		return -ENOMEM;
	err = register_virtio_driver(&ontime_driver);
	if (err)
		destroy_workqueue(restart_wq);
	return err;
}

void ontime_dev_exit(void)
{
	unregister_virtio_driver(&ontime_driver);
	/* A pending restart finds no driver any more. */
	destroy_workqueue(restart_wq);
	rcu_barrier();
}
