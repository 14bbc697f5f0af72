/*
 * Preloaded into the lab's emulator: mends two faults of QEMU's emulated SVM (target/i386/tcg, seg_helper.c and
 * sysemu/svm_helper.c) and one of its e1000e (hw/net/e1000e_core.c).
 *
 * 1. helper_vmrun delivers an injected interrupt at once and leaves its vector in cpu->exception_index. If the emulated
 * CPU is asked to stop before the guest's next exit (with -icount: at every timer of the virtual clock), the main loop
 * takes that for an exception still to be delivered and interrupts the guest a second time, also where it has interrupts
 * off. Guests then hang on a lock that they hold themselves. do_interrupt_x86_hardirq is the function that does the
 * delivery. Its replacement does the same and then, where it was called by helper_vmrun (the big lock is not held there),
 * ends the block with no exception pending, which is what the main loop does itself after every other interrupt.
 *
 * 2. do_interrupt_all, having delivered an exception in a guest, clears the valid bit of EVENTINJ and leaves vector and
 * type, which the next exit copies to EXITINTINFO. Hardware leaves nothing, and KVM (svm_check_emulate_instruction) looks
 * at the type alone: where that next exit is the guest's first access to a device page, it takes the access for one that
 * cannot be emulated ("KVM internal error. Suberror: 3") and the VM stops. The mask that keeps vector and type becomes 0.
 *
 * 3. e1000e keeps at least 128 us between two interrupts of a vector, whatever the driver asks, and sends one that came
 * earlier when the time is over (e1000e_intrmgr_on_msix_throttling_timer). It forgets that it has sent it: once one was
 * held back, every later one is sent a second time, in the middle of the request whose packet it was for. The test of
 * eitr_intr_pending becomes one that clears it. Where the code is not found, the NIC stays as it is.
 *
 * Another fault, of CMPXCHG16B's flags, is avoided by not offering the instruction (lab/src/qemu.rs).
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
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

static void not_ours(const char *what)
{
	fprintf(stderr, "emulator-fix: this emulator has no %s: it is not the QEMU 7.2 that the lab installs\n", what);
	exit(3);
}

static void *need(const char *name)
{
	void *symbol = dlsym(executable, name);

	if (!symbol)
		not_ours(name);
	return symbol;
}

static void patch(unsigned char *at, const void *bytes, size_t count)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)at & ~(page - 1);

	if (mprotect((void *)start, 2 * page, PROT_READ | PROT_WRITE | PROT_EXEC)) {
		perror("emulator-fix: mprotect");
		exit(3);
	}
	memcpy(at, bytes, count);
	mprotect((void *)start, 2 * page, PROT_READ | PROT_EXEC);
}

/* The one place in a function that holds these bytes. */
static unsigned char *only(void *function, const char *name, const void *bytes, size_t count)
{
	unsigned char *code = function, *end, *found;
	const ElfW(Sym) *symbol;
	Dl_info info;

	if (!dladdr1(function, &info, (void **)&symbol, RTLD_DL_SYMENT) || !symbol)
		not_ours(name);
	end = code + symbol->st_size;
	found = memmem(code, (size_t)(end - code), bytes, count);
	if (!found || memmem(found + 1, (size_t)(end - found - 1), bytes, count))
		not_ours(name);
	return found;
}

struct text {
	unsigned char *at;
	size_t size;
};

/* dl_iterate_phdr: the executable comes first. */
static int executable_text(struct dl_phdr_info *info, size_t size, void *found)
{
	struct text *text = found;

	(void)size;
	for (int i = 0; i < info->dlpi_phnum; i++) {
		const ElfW(Phdr) *header = &info->dlpi_phdr[i];

		if (header->p_type == PT_LOAD && header->p_flags & PF_X) {
			text->at = (unsigned char *)(info->dlpi_addr + header->p_vaddr);
			text->size = header->p_memsz;
		}
	}
	return 1;
}

static void forget_sent_interrupts(void)
{
	/* cmpb $0, eitr_intr_pending(%rax,%rdx); je: and shrb eitr_intr_pending(%rax,%rdx); nop; jnc */
	static const unsigned char test[] = { 0x80, 0xbc, 0x10, 0x28, 0x04, 0x02, 0, 0, 0x74 };
	static const unsigned char take[] = { 0xd0, 0xac, 0x10, 0x28, 0x04, 0x02, 0, 0x90, 0x73 };
	struct text text = { 0 };
	unsigned char *found;

	dl_iterate_phdr(executable_text, &text);
	found = text.at ? memmem(text.at, text.size, test, sizeof(test)) : NULL;
	if (found && !memmem(found + 1, text.size - (size_t)(found + 1 - text.at), test, sizeof(test)))
		patch(found, take, sizeof(take));
	else
		fprintf(stderr, "emulator-fix: e1000e is not as expected; its interrupts may come twice\n");
}

__attribute__((constructor)) static void mend(void)
{
	/* movabs $deliver, %r11; jmp *%r11 */
	unsigned char jump[] = { 0x49, 0xbb, 0, 0, 0, 0, 0, 0, 0, 0, 0x41, 0xff, 0xe3 };
	/* and $~SVM_EVTINJ_VALID, %edx; and $0, %edx */
	static const unsigned char keep[] = { 0x81, 0xe2, 0xff, 0xff, 0xff, 0x7f }, none[] = { 0x81, 0xe2, 0, 0, 0, 0 };
	uintptr_t to = (uintptr_t)deliver;

	executable = dlopen(NULL, RTLD_NOW);
	if (!executable || !dlsym(executable, "qemu_init"))
		return; /* some other program that was started with the same environment */
	do_interrupt_all = need("do_interrupt_all");
	big_lock_held = need("qemu_mutex_iothread_locked");
	end_block = need("cpu_loop_exit_noexc");
	need("current_cpu");
	memcpy(jump + 2, &to, sizeof(to));
	patch(need("do_interrupt_x86_hardirq"), jump, sizeof(jump));
	patch(only(do_interrupt_all, "mask of EVENTINJ in do_interrupt_all", keep, sizeof(keep)), none, sizeof(none));
	forget_sent_interrupts();
}
