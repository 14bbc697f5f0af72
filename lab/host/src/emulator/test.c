/*
 * The first process of the emulator's self-test (test.sh): measures what the lab relies on in an emulated machine
 * without disk and network, whose clock counts instructions of 1 ns. Prints a line for each figure, which begins with
 * "FAIL" where the figure is out of its bounds. The same emulator prints the same bytes each time.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/kvm.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { CPUS_MAX = 8, SAMPLES = 1000 };

static int cpus;

/* Prints a figure, and marks it where it is out of its bounds. */
__attribute__((format(printf, 2, 3))) static void figure(bool good, const char *format, ...)
{
	va_list arguments;

	printf(good ? "ok   " : "FAIL ");
	va_start(arguments, format);
	vprintf(format, arguments);
	va_end(arguments);
	printf("\n");
	fflush(stdout);
}

static void need(bool good, const char *what)
{
	if (!good) {
		figure(false, "%s: %s", what, strerror(errno));
		reboot(RB_POWER_OFF);
	}
}

static int64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void sleep_until(int64_t ns)
{
	struct timespec t = { ns / 1000000000, ns % 1000000000 };

	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL))
		;
}

/* Keeps this thread on a CPU, at this SCHED_FIFO priority; 0: SCHED_OTHER. */
static void stay_on(int cpu, int priority)
{
	struct sched_param parameter = { .sched_priority = priority };
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	need(!sched_setaffinity(0, sizeof(set), &set), "sched_setaffinity");
	need(!sched_setscheduler(0, priority ? SCHED_FIFO : SCHED_OTHER, &parameter), "sched_setscheduler");
}

static int by_value(const void *a, const void *b)
{
	int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;

	return (x > y) - (x < y);
}

struct summary {
	int64_t p50, p99, max;
	uint64_t series; /* tells two series apart that have the same quantiles */
};

static struct summary summarise(int64_t *values, int count)
{
	struct summary of = { .series = 1469598103934665603u };

	for (int i = 0; i < count; i++)
		of.series = (of.series ^ (uint64_t)values[i]) * 1099511628211u;
	qsort(values, count, sizeof(*values), by_value);
	of.p50 = values[count / 2];
	of.p99 = values[count * 99 / 100];
	of.max = values[count - 1];
	return of;
}

/* Clock: an instruction takes 1 ns on each CPU. */
static void measure_rate(void)
{
	for (int cpu = 0; cpu < cpus; cpu++) {
		long rounds = 300000;
		int64_t start;
		double ns;

		stay_on(cpu, 50);
		start = now();
		__asm__ volatile("1: dec %0\n nop\n nop\n nop\n nop\n nop\n nop\n nop\n jnz 1b" : "+r"(rounds));
		ns = (double)(now() - start) / (300000 * 9.0);
		figure(ns > 0.99 && ns < 1.02, "clock, CPU %d: %.3f ns an instruction", cpu, ns);
	}
}

/* Clock: how far it jumps between two readings on one CPU, while the others have their turns. */
static void measure_gaps(void)
{
	static int64_t gaps[200000];

	for (int cpu = 0; cpu < cpus; cpu++) {
		int64_t end = now() + 5000000, last, t;
		int count = 0;

		stay_on(cpu, 90);
		for (last = now(); last < end && count < 200000; last = t) {
			t = now();
			gaps[count++] = t - last;
		}
		qsort(gaps, count, sizeof(*gaps), by_value);
		/* Beyond: interrupts. A CPU stands for the turns of the others, of 1,500 instructions at most. */
		figure(gaps[count * 999L / 1000] <= 2000, "clock, CPU %d: p99.9 of %d steps is %ld ns", cpu, count,
		       (long)gaps[count * 999L / 1000]);
	}
}

/* Fairness: all CPUs do the same work in the same time. */
static int64_t fair_start, fair_end;

static void *work_fairly(void *cpu)
{
	int64_t done = 0;

	stay_on((int)(intptr_t)cpu, 10);
	sleep_until(fair_start);
	while (now() < fair_end) {
		for (volatile int i = 0; i < 200; i++)
			;
		done++;
	}
	return (void *)(intptr_t)done;
}

static void measure_fairness(void)
{
	pthread_t threads[CPUS_MAX];
	int64_t least = INT64_MAX, most = 0;

	stay_on(0, 20);
	/* Threads are made in 10 ms each: their stacks are locked. */
	fair_start = now() + 20000000 + 15000000 * cpus;
	fair_end = fair_start + 50000000;
	for (intptr_t cpu = 0; cpu < cpus; cpu++)
		need(!pthread_create(&threads[cpu], NULL, work_fairly, (void *)cpu), "pthread_create");
	for (int cpu = 0; cpu < cpus; cpu++) {
		void *done;

		pthread_join(threads[cpu], &done);
		least = (int64_t)(intptr_t)done < least ? (int64_t)(intptr_t)done : least;
		most = (int64_t)(intptr_t)done > most ? (int64_t)(intptr_t)done : most;
	}
	figure(least > 20000 && (most - least) * 100 <= most, "fairness: %d CPUs did %ld to %ld rounds in 50 ms", cpus,
	       (long)least, (long)most);
}

/* TSC: read by one CPU after another, it never goes backwards. */
static atomic_int tsc_lock;
static uint64_t tsc_last;
static int64_t tsc_backwards;

static void *read_tsc(void *cpu)
{
	stay_on((int)(intptr_t)cpu, 0);
	for (int i = 0; i < 3000; i++) {
		int free = 0;
		uint32_t low, high;
		uint64_t tsc;

		while (!atomic_compare_exchange_weak(&tsc_lock, &free, 1))
			free = 0;
		__asm__ volatile("lfence; rdtsc" : "=a"(low), "=d"(high)::"memory");
		tsc = (uint64_t)high << 32 | low;
		tsc_backwards += tsc < tsc_last;
		tsc_last = tsc;
		atomic_store(&tsc_lock, 0);
	}
	return NULL;
}

static void measure_tsc(void)
{
	pthread_t threads[CPUS_MAX];

	for (intptr_t cpu = 0; cpu < cpus; cpu++)
		need(!pthread_create(&threads[cpu], NULL, read_tsc, (void *)cpu), "pthread_create");
	for (int cpu = 0; cpu < cpus; cpu++)
		pthread_join(threads[cpu], NULL);
	figure(tsc_backwards == 0, "TSC: %ld of %d readings on %d CPUs went backwards", (long)tsc_backwards,
	       3000 * cpus, cpus);
}

/* Timers: how late a thread wakes, on all CPUs at once. */
struct timer {
	int cpu;
	int64_t late[SAMPLES];
};

static void *wake_by_timer(void *argument)
{
	struct timer *timer = argument;
	int64_t next;

	stay_on(timer->cpu, 80);
	next = (now() / 1000000 + 2) * 1000000;
	for (int i = 0; i < SAMPLES; i++, next += 50000) {
		sleep_until(next);
		timer->late[i] = now() - next;
	}
	return NULL;
}

static void measure_timers(void)
{
	static struct timer timers[CPUS_MAX];
	pthread_t threads[CPUS_MAX];

	for (int cpu = 0; cpu < cpus; cpu++) {
		timers[cpu].cpu = cpu;
		need(!pthread_create(&threads[cpu], NULL, wake_by_timer, &timers[cpu]), "pthread_create");
	}
	for (int cpu = 0; cpu < cpus; cpu++) {
		struct summary late;

		pthread_join(threads[cpu], NULL);
		late = summarise(timers[cpu].late + 5, SAMPLES - 5);
		figure(late.p50 < 10000 && late.p99 < 30000,
		       "timer, CPU %d: late by p50 %ld, p99 %ld, max %ld ns, series %016lx", cpu, (long)late.p50,
		       (long)late.p99, (long)late.max, (unsigned long)late.series);
	}
}

/* IPI: membarrier(2) interrupts every CPU that runs a thread of this process, and waits for the answers. */
static atomic_bool spin_on;

static void *spin(void *cpu)
{
	stay_on((int)(intptr_t)cpu, 0);
	while (atomic_load(&spin_on))
		;
	return NULL;
}

static void measure_ipi(int from, int to)
{
	static int64_t took[SAMPLES];
	struct summary of;
	pthread_t thread;

	need(!syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0), "membarrier");
	atomic_store(&spin_on, true);
	need(!pthread_create(&thread, NULL, spin, (void *)(intptr_t)to), "pthread_create");
	stay_on(from, 50);
	sleep_until(now() + 20000000);
	for (int i = 0; i < SAMPLES; i++) {
		int64_t start = now();

		syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
		took[i] = now() - start;
		/* Not in step with the turns. */
		for (volatile int k = 0; k < 200 + i * 7919 % 1000; k++)
			;
	}
	atomic_store(&spin_on, false);
	pthread_join(thread, NULL);
	of = summarise(took + 10, SAMPLES - 10);
	figure(of.p50 > 500 && of.p50 < 4000 && of.p99 < 8000,
	       "IPI and its answer, CPU %d to %d: p50 %ld, p99 %ld, max %ld ns, series %016lx", from, to, (long)of.p50,
	       (long)of.p99, (long)of.max, (unsigned long)of.series);
}

/*
 * A virtual machine in real mode. Each round of its loop executes CPUID (which KVM handles) and HLT (which leaves
 * KVM_RUN). This program then injects an interrupt. The handler first writes to the page of FS, which is no memory for
 * the first interrupts. It counts itself, and how often it was interrupted by itself, though interrupts were off.
 */
enum {
	GUEST_SIZE = 0x10000,
	GUEST_CODE = 0x1000,
	GUEST_HANDLER = 0x2000,
	HANDLED = 0x500,
	NESTED = 0x504,
	INSIDE = 0x508,
	ROUNDS = 0x50c,
	VECTOR = 0x20,
	DEVICE = 0xa0000, /* what follows is no memory */
	DEVICE_PAGES = 64,
	INJECTIONS = 2000,
};

extern const char guest_code[], guest_code_end[], guest_handler[], guest_handler_end[];
__asm__(".pushsection .rodata\n"
	".code16\n"
	"guest_code:\n"
	"1:	incl 0x50c\n"
	"	xorl %eax, %eax\n"
	"	cpuid\n"
	"	sti\n"
	"	hlt\n"
	"	jmp 1b\n"
	"guest_code_end:\n"
	"guest_handler:\n"
	"	movb $1, %fs:0\n" /* FS: the device page, or ordinary memory */
	"	cmpl $0, 0x508\n"
	"	je 1f\n"
	"	incl 0x504\n"
	"1:	movl $1, 0x508\n"
	"	incl 0x500\n"
	"	movw $300, %cx\n"
	"2:	decw %cx\n"
	"	jnz 2b\n"
	"	movl $0, 0x508\n"
	"	iretw\n"
	"guest_handler_end:\n"
	".code64\n"
	".popsection\n");

/* Interrupts the CPU of the virtual machine at odd times. */
static void *interrupt_often(void *cpu)
{
	stay_on((int)(intptr_t)cpu, 80);
	for (int64_t next = now(); atomic_load(&spin_on); next += 17001)
		sleep_until(next);
	return NULL;
}

static void run_guest(int cpu)
{
	struct kvm_userspace_memory_region region = { .memory_size = GUEST_SIZE };
	struct kvm_interrupt interrupt = { .irq = VECTOR };
	struct kvm_regs regs = { .rip = GUEST_CODE, .rsp = 0xf000, .rflags = 2 };
	int kvm, vm, vcpu, injected = 0, device_writes = 0;
	int64_t start, elapsed;
	struct kvm_sregs sregs;
	struct kvm_run *run;
	pthread_t thread;
	uint32_t *word;
	char *memory;

	stay_on(cpu, 0);
	kvm = open("/dev/kvm", O_RDWR);
	need(kvm >= 0, "/dev/kvm");
	vm = ioctl(kvm, KVM_CREATE_VM, 0);
	need(vm >= 0, "KVM_CREATE_VM");
	memory = mmap(NULL, GUEST_SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	need(memory != MAP_FAILED, "memory of the virtual machine");
	memcpy(memory + GUEST_CODE, guest_code, guest_code_end - guest_code);
	memcpy(memory + GUEST_HANDLER, guest_handler, guest_handler_end - guest_handler);
	*(uint16_t *)(memory + 4 * VECTOR) = GUEST_HANDLER;
	region.userspace_addr = (uintptr_t)memory;
	need(!ioctl(vm, KVM_SET_USER_MEMORY_REGION, &region), "KVM_SET_USER_MEMORY_REGION");
	vcpu = ioctl(vm, KVM_CREATE_VCPU, 0);
	need(vcpu >= 0, "KVM_CREATE_VCPU");
	run = mmap(NULL, ioctl(kvm, KVM_GET_VCPU_MMAP_SIZE, 0), PROT_READ | PROT_WRITE, MAP_SHARED, vcpu, 0);
	need(run != MAP_FAILED, "the vCPU's page");
	need(!ioctl(vcpu, KVM_GET_SREGS, &sregs), "KVM_GET_SREGS");
	sregs.cs.base = sregs.cs.selector = 0;
	need(!ioctl(vcpu, KVM_SET_SREGS, &sregs), "KVM_SET_SREGS");
	need(!ioctl(vcpu, KVM_SET_REGS, &regs), "KVM_SET_REGS");

	word = (uint32_t *)memory;
	atomic_store(&spin_on, true);
	need(!pthread_create(&thread, NULL, interrupt_often, (void *)(intptr_t)cpu), "pthread_create");
	start = now();
	while (injected <= INJECTIONS) {
		if (ioctl(vcpu, KVM_RUN, 0) && errno != EINTR) {
			figure(false, "VM: KVM_RUN: %s", strerror(errno));
			break;
		}
		if (run->exit_reason == KVM_EXIT_MMIO) {
			device_writes++;
			continue;
		}
		if (run->exit_reason != KVM_EXIT_HLT) {
			bool error = run->exit_reason == KVM_EXIT_INTERNAL_ERROR;

			/* Error 3: an injected interrupt was left in EVENTINJ. */
			figure(false, "VM: exit %u (error %u) after %d interrupts, %d writes to a device",
			       run->exit_reason, error ? run->internal.suberror : 0, injected, device_writes);
			break;
		}
		/* Each of the first interrupts writes to a page of its own, later ones to memory. */
		need(!ioctl(vcpu, KVM_GET_SREGS, &sregs), "KVM_GET_SREGS");
		sregs.fs.base = injected < DEVICE_PAGES ? DEVICE + 0x1000 * injected : 0x600;
		sregs.fs.selector = sregs.fs.base >> 4;
		need(!ioctl(vcpu, KVM_SET_SREGS, &sregs), "KVM_SET_SREGS");
		if (injected++ < INJECTIONS)
			need(!ioctl(vcpu, KVM_INTERRUPT, &interrupt), "KVM_INTERRUPT");
	}
	elapsed = now() - start;
	atomic_store(&spin_on, false);
	pthread_join(thread, NULL);
	figure(injected == INJECTIONS + 1 && device_writes == DEVICE_PAGES,
	       "VM, CPU %d: %d interrupts injected, %d of %d writes to a device", cpu, injected - 1, device_writes,
	       DEVICE_PAGES);
	figure(word[HANDLED / 4] == INJECTIONS && word[NESTED / 4] == 0,
	       "VM, CPU %d: %u interrupts delivered, %u of them while interrupts were off", cpu, word[HANDLED / 4],
	       word[NESTED / 4]);
	figure(elapsed < (int64_t)INJECTIONS * 150000, "VM, CPU %d: %ld ns a round of CPUID, HLT and interrupt", cpu,
	       (long)(elapsed / INJECTIONS));
	close(vcpu);
	close(vm);
	close(kvm);
}

/* Whether the CPU says that exits save the next RIP (NRIPS), which KVM looks for: CPUID 8000_000A, EDX bit 3. */
static void check_next_rip(void)
{
	uint32_t eax = 0x8000000a, ebx, ecx = 0, edx;

	__asm__ volatile("cpuid" : "+a"(eax), "=b"(ebx), "+c"(ecx), "=d"(edx));
	figure(edx & 8, "VM: exits save the next RIP: %s", edx & 8 ? "yes" : "no");
}

static void load_modules(void)
{
	char path[32];
	int file;

	for (int i = 0; snprintf(path, sizeof(path), "/%d.ko", i), (file = open(path, O_RDONLY)) >= 0; i++) {
		need(!syscall(SYS_finit_module, file, "", 0), path);
		close(file);
	}
}

int main(void)
{
	mkdir("/dev", 0755);
	mount("devtmpfs", "/dev", "devtmpfs", 0, NULL);
	cpus = (int)sysconf(_SC_NPROCESSORS_ONLN);
	printf("self-test: %d CPUs\n", cpus);
	need(cpus <= CPUS_MAX, "at most 8 CPUs");
	mlockall(MCL_CURRENT | MCL_FUTURE);
	measure_rate();
	measure_gaps();
	measure_fairness();
	measure_tsc();
	measure_timers();
	if (cpus > 1) {
		measure_ipi(0, cpus - 1);
		measure_ipi(cpus - 1, 0);
	}
	load_modules();
	check_next_rip();
	run_guest(cpus - 1);
	printf("self-test: end at %ld ns\n", (long)now());
	fflush(stdout);
	reboot(RB_POWER_OFF);
	return 0;
}
