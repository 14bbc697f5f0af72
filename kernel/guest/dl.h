/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Declarations that dl.c, dl_host.c, dl_next.c and dl_stray.c share, and the locks that protect
 * them.
 */
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

/* The most tasks with a guarantee; further ones get EBUSY. */
#define DL_TASKS_MAX 256
/* Interval of retries if the host does not accept what it should hold, and of looks at demoted tasks, jiffies. */
#define DL_AGAIN HZ

struct dl_task {
	struct list_head link;
	struct task_struct *task;
	struct place_task place;	/* vcpu is PLACE_NONE if the task lost its vCPU: dl_stray.c */
	cpumask_var_t allowed;		/* the task's affinity, were it not pinned: dl_allow() */
	/* an offline CPU that stays in the mask, because the task sleeps there; or PLACE_NONE */
	unsigned int beside;
	bool gone;			/* it has ended or is about to end */
	/* The kernel changes it, without dl_mutex: it stays in the list, and its affinity as it is. */
	bool changing;
	u64 seen, due;			/* the kernel's deadline at the last check; the published one: local_clock() */
};

/* ---- dl.c ---- */

/* Serializes all changes, also while the host is asked, but not those that the kernel makes (changing). */
extern struct mutex dl_mutex;
/* Changed with dl_mutex and dl_lock; tracepoints read with dl_lock only. */
extern struct list_head dl_tasks;
extern raw_spinlock_t dl_lock;
extern unsigned int dl_count;
extern bool dl_hooked, dl_ended;
extern struct workqueue_struct *dl_wq;
/* Tell the host the present needs again: dl_settle(). Both run dl_work(), one after the other. */
extern struct delayed_work dl_delayed;
extern struct work_struct dl_now;
/* A set of tasks to work on, for the holder of dl_mutex. Spare bandwidth is at the end. */
extern struct place_task dl_set[DL_TASKS_MAX + 1 + ONTIME_VCPUS_MAX];

/*
 * Runs dl_work() at once, also if a later run is due (after a refusal by the host). If it is running,
 * it runs again: a run that sets the time of the next one cannot put this one off. May be called in
 * interrupts and with raw spinlocks held.
 */
static inline void dl_work_now(void)
{
	queue_work(dl_wq, &dl_now);
}

/* The number of possible vCPUs. */
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

/* ---- dl_host.c; with dl_mutex, except dl_host_anew() ---- */

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
void dl_next_forget(const struct dl_task *t, unsigned int vcpu);
void dl_next_switch(void *unused, bool preempt, struct task_struct *prev, struct task_struct *next,
		    unsigned int prev_state);

/* ---- dl_stray.c ---- */

int dl_stray_init(void);
void dl_stray_exit(void);
bool dl_stray(void);
void dl_stray_seen(void);

#endif
