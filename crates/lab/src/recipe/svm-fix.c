/*
 * Preloaded into the lab's emulator: mends one fault of QEMU's emulated SVM.
 *
 * helper_vmrun (target/i386/tcg/sysemu/svm_helper.c) delivers an injected interrupt at once and leaves its vector in
 * cpu->exception_index. If the emulated CPU is asked to stop before the guest's next exit (with -icount: at every
 * timer of the virtual clock), the main loop takes that for an exception still to be delivered and interrupts the
 * guest a second time, also where it has interrupts off. Guests then hang on a lock that they hold themselves.
 *
 * do_interrupt_x86_hardirq is the function that does the delivery. Its replacement does the same and then, where it
 * was called by helper_vmrun (the big lock is not held there), ends the block with no exception pending, which is what
 * the main loop does itself after every other interrupt.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static void (*do_interrupt_all)(void *cpu, int vector, int is_int, int error_code, uint64_t next_eip, int is_hw);
static bool (*big_lock_held)(void);
static void (*end_block)(void *cpu);
static void *executable;

static void deliver(void *env, int vector, int is_hw)
{
	/* current_cpu is thread-local: looked up once on each emulated CPU's own thread. */
	static __thread void **current_cpu;

	(void)env;
	if (!current_cpu)
		current_cpu = dlsym(executable, "current_cpu");
	do_interrupt_all(*current_cpu, vector, 0, 0, 0, is_hw);
	if (!big_lock_held())
		end_block(*current_cpu);
}

static void *need(const char *name)
{
	void *symbol = dlsym(executable, name);

	if (!symbol) {
		fprintf(stderr, "svm-fix: this emulator has no %s: it is not the QEMU 7.2 that the lab installs\n", name);
		exit(3);
	}
	return symbol;
}

__attribute__((constructor)) static void mend(void)
{
	/* movabs $deliver, %r11; jmp *%r11 */
	unsigned char jump[] = { 0x49, 0xbb, 0, 0, 0, 0, 0, 0, 0, 0, 0x41, 0xff, 0xe3 };
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start, to = (uintptr_t)deliver;
	unsigned char *entry;

	executable = dlopen(NULL, RTLD_NOW);
	if (!executable || !dlsym(executable, "qemu_init"))
		return; /* some other program that was started with the same environment */
	do_interrupt_all = need("do_interrupt_all");
	big_lock_held = need("qemu_mutex_iothread_locked");
	end_block = need("cpu_loop_exit_noexc");
	need("current_cpu");
	entry = need("do_interrupt_x86_hardirq");
	memcpy(jump + 2, &to, sizeof(to));
	start = (uintptr_t)entry & ~(page - 1);
	if (mprotect((void *)start, 2 * page, PROT_READ | PROT_WRITE | PROT_EXEC)) {
		perror("svm-fix: mprotect");
		exit(3);
	}
	memcpy(entry, jump, sizeof(jump));
	mprotect((void *)start, 2 * page, PROT_READ | PROT_EXEC);
}
