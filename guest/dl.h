/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What dl.c, dl_host.c and dl_next.c share: the deadline tasks, and who may touch what of them. */
#ifndef ONTIME_DL_H
#define ONTIME_DL_H

#include <linux/cpumask.h>
#include <linux/list.h>
#include <linux/mutex.h>
#include <linux/sched.h>
#include <linux/spinlock.h>
#include <linux/workqueue.h>

#include "ontime.h"
#include "place.h"

/* Tasks with a guarantee at once; more get EBUSY. */
#define DL_TASKS_MAX 256

struct dl_task {
	struct list_head link;
	struct task_struct *task;
	struct place_task place;
	cpumask_var_t allowed;		/* from before */
	bool gone;			/* it has ended, or will now */
	u64 seen, due;			/* its kernel's deadline when last looked at; what is published for it. local_clock() */
};

/* ---- dl.c ---- */

/* Whoever changes anything, for as long as the host is asked. */
extern struct mutex dl_mutex;
/* With dl_mutex; changed and, by tracepoints, read with dl_lock. */
extern struct list_head dl_tasks;
extern raw_spinlock_t dl_lock;
extern unsigned int dl_count;
extern bool dl_hooked, dl_ended;
extern struct workqueue_struct *dl_wq;
/* Has the host told anew what is so: dl_settle(). */
extern struct delayed_work dl_delayed;
/* dl_mutex's holder's: a set to work on. Last, spares. */
extern struct place_task dl_set[DL_TASKS_MAX + 1 + ONTIME_VCPUS_MAX];

unsigned int dl_gather(const struct dl_task *without);

/* ---- dl_host.c; with dl_mutex, but for dl_host_anew() ---- */

bool dl_covers(unsigned int count);
int dl_tell(unsigned int count);
void dl_settle(void);
void dl_settle_soon(void);
void dl_host_anew(void);

/* ---- dl_next.c ---- */

int dl_next_init(void);
void dl_next_free(void);
void dl_next_tell(struct ontime_chan *main);
void dl_next_some(void);
void dl_next_switch(void *unused, bool preempt, struct task_struct *prev, struct task_struct *next, unsigned int prev_state);

#endif
