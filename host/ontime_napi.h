/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * What the module's parts share.
 *
 *   main.c    the interfaces' files, /sys/class/net/X/ontime/, their coming and going
 *   poll.c    threads that poll an interface's NAPI
 *   weight.c  how many packets an interface's NAPI takes at a time
 */
#ifndef ONTIME_NAPI_H
#define ONTIME_NAPI_H

#include <linux/netdevice.h>

/*
 * All of these are called under rtnl, which guards net_device.napi_list until 6.13 (net/core/dev.c, dev_set_threaded).
 */

/* 0: as the driver set it. */
int ontime_weight_set(struct net_device *dev, int weight);
/* For sysfs: the number of bytes written to buf. */
int ontime_weight_show(struct net_device *dev, char *buf);
/* Instances that a driver made since have their weight from here on. */
void ontime_weight_renew(struct net_device *dev);

/* Whether threads poll its NAPI. -EOPNOTSUPP for an interface without a device. */
int ontime_poll_set(struct net_device *dev, bool on);
int ontime_poll_show(struct net_device *dev, char *buf);
/* It goes down: no thread may hold an instance that its driver waits for. */
void ontime_poll_down(struct net_device *dev);
void ontime_poll_up(struct net_device *dev);

#endif
