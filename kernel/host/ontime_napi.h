/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Declarations that the module's files share.
 *
 *   main.c    the sysfs files of interfaces, /sys/class/net/X/ontime/
 *   poll.c    threads that poll an interface's NAPI
 *   weight.c  how many packets an interface's NAPI takes in a round
 */
#ifndef ONTIME_NAPI_H
#define ONTIME_NAPI_H

#include <linux/netdevice.h>

/*
 * All functions are called under rtnl, which guards net_device.napi_list until 6.13
 * (net/core/dev.c, dev_set_threaded).
 */

/* Weight 0: the driver's own. */
int ontime_weight_set(struct net_device *dev, int weight);
/* For sysfs: the number of bytes written to buf. */
int ontime_weight_show(struct net_device *dev, char *buf);
/* Applies the weight to instances that the driver has made since. */
void ontime_weight_renew(struct net_device *dev);

/* Starts or ends polling. -EOPNOTSUPP for an interface without a device (dev.parent). */
int ontime_poll_set(struct net_device *dev, bool on);
int ontime_poll_show(struct net_device *dev, char *buf);
/* The interface goes down: no thread may hold an instance that its driver waits for. */
void ontime_poll_down(struct net_device *dev);
void ontime_poll_up(struct net_device *dev);

#endif
