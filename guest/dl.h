/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What dl.c, dl_host.c, dl_next.c and dl_stray.c share: the deadline tasks, and who may touch what of them. */
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
/* How often a host is asked again that does not take what it should hold. */
#define DL_AGAIN HZ

struct dl_task {
	struct list_head link;
	struct task_struct *task;
	struct place_task place;	/* vcpu is PLACE_NONE of one that was lost: dl_stray.c */
	cpumask_var_t allowed;		/* what it may have, were it not kept on one: dl_allow() */
	/* a CPU that has gone and that it may have beside its vCPU, for it sleeps there; or PLACE_NONE */
	unsigned int beside;
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

/* vCPUs that there can be. */
static inline unsigned int dl_vcpus(void)
{
	return min_t(unsigned int, nr_cpu_ids, ONTIME_VCPUS_MAX);
}

unsigned int dl_gather(const struct dl_task *without);
u64 dl_usable(void);
void dl_allow(struct dl_task *t, const struct cpumask *mask);
int dl_place(struct dl_task *t, struct place_task want);
int dl_restrict(struct task_struct *p, const struct cpumask *mask, unsigned int *beside);
void dl_pin(struct dl_task *t);

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
void dl_next_switch(void *unused, bool preempt, struct task_struct *prev, struct task_struct *next,
		    unsigned int prev_state);

/* ---- dl_stray.c ---- */

int dl_stray_init(void);
void dl_stray_exit(void);
bool dl_stray(void);
void dl_stray_seen(void);

#endif
