// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * The sched_ext scheduler of back end `sched_ext`. vCPUs with reservations run by the places that pacers write into a
 * table, all other threads by weight, in virtual time.
 *
 * A vCPU with an entry always waits in its own queue, whatever its place. The place is read when a CPU chooses its next
 * thread, so a place that changed meanwhile counts. Every dispatch has SCX_ENQ_IMMED: when the pacer (SCHED_FIFO)
 * preempts the CPU, the kernel gives the thread that ran there back (SCX_ENQ_REENQ) instead of continuing it first
 * (kernel/sched/ext.c, Linux 7.1 and later). A vCPU that wakes preempts a thread with a lower place.
 *
 * Functions that Debian's BTF describes wrongly are not used (scx_bpf_kick_cpu(), scx_bpf_dsq_nr_queued(),
 * scx_bpf_select_cpu_dfl() on 7.2). So this scheduler cannot make a CPU choose again: a change of place takes effect
 * when another thread preempts that CPU. The pacer there does so by running.
 */
#include <linux/types.h>
#include <linux/bpf.h>
#include <bpf/bpf_helpers.h>
#include <bpf/bpf_tracing.h>

typedef __u32 u32;
typedef __s32 s32;
typedef __u64 u64;
typedef __s64 s64;

#define ENTRIES 128
/* A power of two; CPUs with higher numbers share entries. */
#define CPUS 1024
#define ON(cpu) ((cpu) & (CPUS - 1))
#define SAID 128

/* As in the table of places; the same as in ext/mod.rs. */
enum place { BEYOND, ENTITLED, PLANNED };

/* include/linux/sched/ext.h, kernel/sched/ext_internal.h */
#define SCX_DSQ_LOCAL_ON 0xc000000000000000ULL
#define SCX_ENQ_WAKEUP 1ULL
#define SCX_ENQ_PREEMPT (1ULL << 32)
#define SCX_ENQ_IMMED (1ULL << 33)
#define SCX_ENQ_REENQ (1ULL << 40)
#define SCX_OPS_ENQ_MIGRATION_DISABLED 16ULL
#define SCX_TASK_QUEUED 1U

/* Queues: one for all threads without an entry, by virtual time, and one for each entry. */
#define OTHERS 1ULL
#define ENTRY_QUEUE(number) (0x100ULL + (number))

/* Time slices, ns, which end at a tick. A vCPU within its share keeps its position when its slice ends. */
#define SLICE 2000000ULL
#define ENTRY_SLICE 20000000ULL

/* The kernel's own types, with the members that are used. */
#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct cpumask {
	unsigned long bits[1];
};
struct sched_ext_entity {
	u32 flags;
	u32 weight;
	u64 dsq_vtime;
};
struct sched_entity {
	u64 sum_exec_runtime;
};
struct task_struct {
	s32 pid;
	u64 start_boottime;
	/*
	 * Not const, as the kernel has it: clang 14 and later describe what only a member points to as a forward
	 * declaration, and would then do so in scx_bpf_select_cpu_and() too, which libbpf refuses (func_proto
	 * incompatible with vmlinux).
	 */
	struct cpumask *cpus_ptr;
	struct sched_entity se;
	struct sched_ext_entity scx;
};
struct scx_exit_info {
	char *msg;
	const char *reason;
};
#pragma clang attribute pop

struct sched_ext_ops {
	s32 (*select_cpu)(struct task_struct *p, s32 prev, u64 flags);
	void (*enqueue)(struct task_struct *p, u64 flags);
	void (*dispatch)(s32 cpu, struct task_struct *prev);
	void (*running)(struct task_struct *p);
	void (*stopping)(struct task_struct *p, _Bool runnable);
	void (*enable)(struct task_struct *p);
	s32 (*init)(void);
	void (*exit)(struct scx_exit_info *info);
	u64 flags;
	char name[128];
};

struct bpf_iter_scx_dsq {
	u64 opaque[6];
};

int bpf_iter_scx_dsq_new(struct bpf_iter_scx_dsq *iter, u64 dsq, u64 flags) __ksym;
struct task_struct *bpf_iter_scx_dsq_next(struct bpf_iter_scx_dsq *iter) __ksym;
void bpf_iter_scx_dsq_destroy(struct bpf_iter_scx_dsq *iter) __ksym;
s32 scx_bpf_create_dsq(u64 dsq, s32 node) __ksym;
void scx_bpf_dsq_insert(struct task_struct *p, u64 dsq, u64 slice, u64 flags) __ksym;
void scx_bpf_dsq_insert_vtime(struct task_struct *p, u64 dsq, u64 slice, u64 vtime, u64 flags) __ksym;
/* libbpf ignores the part of a name after the last ___. */
_Bool scx_bpf_dsq_move_to_local___v2___kernel(u64 dsq, u64 flags) __ksym;
s32 scx_bpf_select_cpu_and(struct task_struct *p, s32 prev, u64 wake_flags, const struct cpumask *allowed,
			   u64 flags) __ksym;
s32 scx_bpf_task_cpu(const struct task_struct *p) __ksym;
_Bool scx_bpf_task_set_slice(struct task_struct *p, u64 slice) __ksym;
_Bool scx_bpf_task_set_dsq_vtime(struct task_struct *p, u64 vtime) __ksym;

/* vCPUs with entries, by thread number. The start time distinguishes a thread from a later one with the same number. */
struct entry {
	u64 number;
	u64 started; /* clock ticks of 10 ms since the boot, as in /proc/PID/stat */
};
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, ENTRIES);
	__type(key, u32);
	__type(value, struct entry);
} entries SEC(".maps");

/* The place of each entry; mapped by the daemon, whose pacers write it. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(max_entries, ENTRIES);
	__type(key, u32);
	__type(value, u64);
} places SEC(".maps");

/* Why the kernel ended the scheduler; empty while it has not. */
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, char[SAID]);
} fate SEC(".maps");

/* The weight of a vCPU beyond its share, as in EEVDF: 3 like SCHED_IDLE, 1,024 like SCHED_OTHER. Set before loading. */
const volatile u64 beyond_weight = 3;

static u64 now;		      /* the least virtual time in the queue when a thread was last taken from it */
static u64 vtimes[ENTRIES];     /* of entries beyond their shares */
static u64 arrivals;	      /* arrivals so far */
static u64 arrived[ENTRIES];    /* the number of the vCPU's arrival at its place */
static u32 place_at[ENTRIES];   /* that place */
static u32 waits_on[ENTRIES];   /* the vCPU's CPU plus 1 while it waits (each is pinned to one), else 0 */
static u32 place_on[CPUS];    /* place of the running thread */
static s32 runs_on[CPUS];     /* number of the running thread */
static u64 ran_before[CPUS];  /* run time of the running thread when it began to run */

static _Bool before(u64 one, u64 other)
{
	return (s64)(one - other) < 0;
}

/* The thread's entry; ENTRIES if it has none. */
static u32 entry_of(const struct task_struct *p)
{
	u32 tid = p->pid;
	const struct entry *entry = bpf_map_lookup_elem(&entries, &tid);

	if (!entry || entry->started != p->start_boottime / 10000000 || entry->number >= ENTRIES)
		return ENTRIES;
	return entry->number;
}

static u32 place_of(u32 entry)
{
	u64 *place = entry < ENTRIES ? bpf_map_lookup_elem(&places, &entry) : NULL;

	return place ? *(volatile u64 *)place : BEYOND;
}

SEC("struct_ops/select_cpu")
s32 BPF_PROG(ontime_select_cpu, struct task_struct *p, s32 prev, u64 flags)
{
	s32 idle = scx_bpf_select_cpu_and(p, prev, flags, p->cpus_ptr, 0);

	return idle < 0 ? prev : idle;
}

SEC("struct_ops/enqueue")
void BPF_PROG(ontime_enqueue, struct task_struct *p, u64 flags)
{
	u32 entry = entry_of(p);
	u32 cpu = scx_bpf_task_cpu(p);
	u64 vtime = p->scx.dsq_vtime;

	if (entry < ENTRIES) {
		u32 place = place_of(entry);

		/* An interrupted vCPU stays ahead of vCPUs that arrived later, as in SCHED_FIFO. */
		if (flags & SCX_ENQ_WAKEUP || place != place_at[entry])
			arrived[entry] = __sync_fetch_and_add(&arrivals, 1);
		place_at[entry] = place;
		/* After SCX_ENQ_REENQ a thread of a higher class has the CPU: a dispatch would be given back again. */
		if (!(flags & SCX_ENQ_REENQ) && place > place_on[ON(cpu)]) {
			scx_bpf_dsq_insert(p, SCX_DSQ_LOCAL_ON | cpu, ENTRY_SLICE, SCX_ENQ_PREEMPT | SCX_ENQ_IMMED);
			return;
		}
		waits_on[entry] = cpu + 1;
		scx_bpf_dsq_insert(p, ENTRY_QUEUE(entry), place > BEYOND ? ENTRY_SLICE : SLICE, 0);
		return;
	}
	/* A thread that slept is at most one slice ahead. */
	if (before(vtime, now - SLICE))
		vtime = now - SLICE;
	scx_bpf_dsq_insert_vtime(p, OTHERS, SLICE, vtime, 0);
}

/*
 * The first vCPU that waits for a CPU at this place; ENTRIES: none. Of vCPUs beyond their shares, only one whose turn
 * it is by virtual time, or with `any` all. Not static: so the verifier checks the function once, and not for each
 * caller's state.
 */
__attribute__((noinline)) u32 first(u32 cpu, u32 place, u32 any)
{
	u32 found = ENTRIES;
	u64 at = ~0ULL;

	for (u32 entry = 0; entry < ENTRIES; entry++) {
		if (waits_on[entry] != cpu + 1 || arrived[entry] >= at || place_of(entry) != place)
			continue;
		if (place == BEYOND && !any && !before(vtimes[entry], now))
			continue;
		found = entry;
		at = arrived[entry];
	}
	return found;
}

static _Bool take(u32 cpu, u32 place, _Bool any)
{
	u32 entry = first(cpu, place, any);

	if (entry >= ENTRIES)
		return 0;
	if (scx_bpf_dsq_move_to_local___v2___kernel(ENTRY_QUEUE(entry), SCX_ENQ_IMMED))
		return 1;
	/* It was removed from its queue otherwise, for example because it was stopped. */
	waits_on[entry] = 0;
	return 0;
}

/* Whether a thread without an entry waits whose virtual time is below this. */
static _Bool other_is_due(u64 vtime)
{
	struct bpf_iter_scx_dsq iter;
	struct task_struct *least;
	_Bool due = 0;

	if (!bpf_iter_scx_dsq_new(&iter, OTHERS, 0)) {
		least = bpf_iter_scx_dsq_next(&iter);
		due = least && before(least->scx.dsq_vtime, vtime);
	}
	bpf_iter_scx_dsq_destroy(&iter);
	return due;
}

/* CPU time since the thread began to run. (The rest of its slice does not show that: a preempted thread has none.) */
static u64 used_by(const struct task_struct *p, u32 cpu)
{
	return runs_on[ON(cpu)] == p->pid ? p->se.sum_exec_runtime - ran_before[ON(cpu)] : 0;
}

/* The thread's virtual time, with that CPU time. */
static u64 vtime_of(const struct task_struct *p, u32 cpu)
{
	return p->scx.dsq_vtime + used_by(p, cpu) * 100 / (p->scx.weight ?: 100);
}

/*
 * Chooses the next thread of a CPU. The running thread, if it could go on, is in no queue. It is compared with the
 * waiting threads: otherwise two threads would alternate whatever their weights.
 */
SEC("struct_ops/dispatch")
void BPF_PROG(ontime_dispatch, s32 cpu, struct task_struct *prev)
{
	_Bool stays = prev && prev->scx.flags & SCX_TASK_QUEUED;
	u32 entry = stays ? entry_of(prev) : ENTRIES;
	u32 place = place_of(entry);

	if (entry < ENTRIES && place > BEYOND) {
		waits_on[entry] = cpu + 1;
		if ((place == PLANNED || first(cpu, PLANNED, 0) == ENTRIES) && first(cpu, place, 0) == entry) {
			waits_on[entry] = 0;
			scx_bpf_task_set_slice(prev, ENTRY_SLICE);
			return;
		}
		waits_on[entry] = 0;
	}
	if (take(cpu, PLANNED, 0) || take(cpu, ENTITLED, 0))
		return;
	if (stays && entry == ENTRIES) {
		u64 vtime = vtime_of(prev, cpu);

		if (!other_is_due(vtime)) {
			if (before(now, vtime))
				now = vtime;
			if (!take(cpu, BEYOND, 0))
				scx_bpf_task_set_slice(prev, SLICE);
			return;
		}
	}
	if (take(cpu, BEYOND, 0) || scx_bpf_dsq_move_to_local___v2___kernel(OTHERS, SCX_ENQ_IMMED))
		return;
	take(cpu, BEYOND, 1);
}

SEC("struct_ops/running")
void BPF_PROG(ontime_running, struct task_struct *p)
{
	u32 entry = entry_of(p);
	u32 cpu = scx_bpf_task_cpu(p);

	place_on[ON(cpu)] = place_of(entry);
	runs_on[ON(cpu)] = p->pid;
	ran_before[ON(cpu)] = p->se.sum_exec_runtime;
	if (entry >= ENTRIES) {
		if (before(now, p->scx.dsq_vtime))
			now = p->scx.dsq_vtime;
		return;
	}
	waits_on[entry] = 0;
	/* It may have used up its share while it was queued. */
	if (place_of(entry) == BEYOND)
		scx_bpf_task_set_slice(p, SLICE);
}

SEC("struct_ops/stopping")
void BPF_PROG(ontime_stopping, struct task_struct *p, _Bool runnable)
{
	u32 entry = entry_of(p);
	u32 cpu = scx_bpf_task_cpu(p);

	place_on[ON(cpu)] = BEYOND;
	if (entry >= ENTRIES) {
		scx_bpf_task_set_dsq_vtime(p, vtime_of(p, cpu));
	} else if (place_of(entry) == BEYOND) {
		if (before(vtimes[entry], now))
			vtimes[entry] = now;
		vtimes[entry] += used_by(p, cpu) * 1024 / (beyond_weight ?: 1024);
	}
}

SEC("struct_ops/enable")
void BPF_PROG(ontime_enable, struct task_struct *p)
{
	scx_bpf_task_set_dsq_vtime(p, now);
}

SEC("struct_ops.s/init")
s32 BPF_PROG(ontime_init)
{
	s32 error = scx_bpf_create_dsq(OTHERS, -1);

	for (u32 entry = 0; !error && entry < ENTRIES; entry++)
		error = scx_bpf_create_dsq(ENTRY_QUEUE(entry), -1);
	return error;
}

SEC("struct_ops/exit")
void BPF_PROG(ontime_exit, struct scx_exit_info *info)
{
	u32 one = 0;
	char *said = bpf_map_lookup_elem(&fate, &one);

	if (!said)
		return;
	/* The kernel's message, or at least the kind of end. */
	if (bpf_probe_read_kernel_str(said, SAID, info->msg) <= 1)
		bpf_probe_read_kernel_str(said, SAID, info->reason);
}

SEC(".struct_ops.link")
struct sched_ext_ops ontime_ops = {
	.select_cpu = (void *)ontime_select_cpu,
	.enqueue = (void *)ontime_enqueue,
	.dispatch = (void *)ontime_dispatch,
	.running = (void *)ontime_running,
	.stopping = (void *)ontime_stopping,
	.enable = (void *)ontime_enable,
	.init = (void *)ontime_init,
	.exit = (void *)ontime_exit,
	/*
	 * Without this, threads that may not migrate (on PREEMPT_RT most preempted in the kernel) would bypass enqueue.
	 */
	.flags = SCX_OPS_ENQ_MIGRATION_DISABLED,
	.name = "ontime",
};

char LICENSE[] SEC("license") = "GPL";
