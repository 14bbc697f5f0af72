/* The threads of a VM, by name, and no more: the scripts here run it as qemu-system-x86_64. With ONTIME_BENCH_POKE=FILE
   it touches FILE once the threads exist, as libvirt's hook does, waits until each vCPU has real-time priority, prints
   how many microseconds that took, and ends. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { VCPUS = 4, THREADS = 6, PATIENCE_US = 30 * 1000 * 1000, LOOK_US = 200 };

/* The vCPUs come first. */
static char names[THREADS][16] = { "CPU 0/KVM", "CPU 1/KVM", "CPU 2/KVM", "CPU 3/KVM", "IO iothread1", "worker" };
static pid_t tids[THREADS];
static pthread_barrier_t named;

static void *run(void *name)
{
	prctl(PR_SET_NAME, name);
	tids[(char(*)[16])name - names] = gettid();
	pthread_barrier_wait(&named);
	for (;;)
		pause();
	return 0;
}

static long now_us(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000L + now.tv_nsec / 1000;
}

static int placed(void)
{
	for (unsigned i = 0; i < VCPUS; i++)
		if ((sched_getscheduler(tids[i]) & ~SCHED_RESET_ON_FORK) != SCHED_FIFO)
			return 0;
	return 1;
}

int main(void)
{
	const char *poke = getenv("ONTIME_BENCH_POKE");
	pthread_t thread;
	long start;

	if (pthread_barrier_init(&named, 0, THREADS + 1))
		return 1;
	for (unsigned i = 0; i < THREADS; i++)
		if (pthread_create(&thread, 0, run, names[i]))
			return 1;
	prctl(PR_SET_NAME, "qemu-system-x86");
	pthread_barrier_wait(&named);
	while (!poke)
		pause();

	start = now_us();
	if (utimensat(AT_FDCWD, poke, 0, 0)) {
		perror(poke);
		return 1;
	}
	while (!placed()) {
		if (now_us() - start > PATIENCE_US) {
			fprintf(stderr, "vm: after 30 s a vCPU still has no real-time priority\n");
			return 1;
		}
		usleep(LOOK_US);
	}
	printf("%ld\n", now_us() - start);
	return 0;
}
