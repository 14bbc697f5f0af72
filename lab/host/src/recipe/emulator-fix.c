/*
 * Preloaded into the lab's emulator: mends two faults of QEMU's emulated SVM (target/i386/tcg, seg_helper.c and
 * sysemu/svm_helper.c) and two of its e1000e (hw/net/e1000e_core.c).
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
 * 3. e1000e keeps the time that the driver asks between two interrupts of a vector, and sends one that came
 * earlier when the time is over (e1000e_intrmgr_on_msix_throttling_timer). It does not forget that it has sent it: once one was
 * held back, every later one is sent a second time, in the middle of the request whose packet it was for. The test of
 * eitr_intr_pending becomes one that clears it.
 *
 * 4. And it keeps at least 128 us, whatever the driver asks (E1000E_MIN_XITR), so that one that asks for no moderation has it all the
 * same. Hardware takes multiples of 256 ns from 0, which is none: the datasheet (Intel 82574, 10.2.4.2) has 500 of them, and the 7,813
 * interrupts a second that make 128 us, as an example. The least interval becomes 0.
 *
 * Where the code of these two is not found, the NIC stays as it is, and the emulator's log says so.
 *
 * And one thing that it lacks and every AMD CPU has had for over fifteen years: the address of the next instruction in the VMCB of
 * an exit (NRIPS; AMD64 Architecture Programmer's Manual, volume 2, 15.7.1). Without it KVM has its software decoder find the
 * length of each HLT, RDMSR and WRMSR that left the guest, thousands of instructions an exit that no machine in use executes, and
 * none of its fast paths for exits is taken. cpu_vmexit is where an intercepted instruction ends: its last lines also write that
 * address now, for the intercepts whose instruction has one length; the feature is offered where that code is found. An INT n or
 * INT3 that KVM injects again, because its delivery met a nested page fault, is not covered (its return address is KVM's nRIP,
 * which helper_vmrun does not read).
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
static void (*store)(void *cpu, uint64_t address, uint64_t value);
static uint64_t (*load)(void *cpu, uint64_t address);
static void (*end_with_exception)(void *cpu);
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

static unsigned char *only_in(struct text text, const void *bytes, size_t count)
{
	unsigned char *found = text.at ? memmem(text.at, text.size, bytes, count) : NULL;

	if (found && memmem(found + 1, text.size - (size_t)(found + 1 - text.at), bytes, count))
		return NULL;
	return found;
}

static void moderate_interrupts_as_asked(void)
{
	/* cmpb $0, eitr_intr_pending(%rax,%rdx); je: and shrb eitr_intr_pending(%rax,%rdx); nop; jnc */
	static const unsigned char test[] = { 0x80, 0xbc, 0x10, 0x28, 0x04, 0x02, 0, 0, 0x74 };
	static const unsigned char take[] = { 0xd0, 0xac, 0x10, 0x28, 0x04, 0x02, 0, 0x90, 0x73 };
	/* e1000e_set_itr: mov $E1000E_MIN_XITR, %eax; mov %ebp, itr_guest_value(%r12) */
	static const unsigned char itr[] = { 0xb8, 0xf4, 1, 0, 0, 0x41, 0x89, 0xac, 0x24, 0x30, 0x04, 0x02, 0 };
	/* e1000e_set_eitr: mov $E1000E_MIN_XITR, %eax; mov %ebp, eitr_guest_value(%r12,%r13,4) */
	static const unsigned char eitr[] = { 0xb8, 0xf4, 1, 0, 0, 0x43, 0x89, 0xac, 0xac, 0x34, 0x04, 0x02, 0 };
	static const unsigned char none[] = { 0xb8, 0, 0, 0, 0 };
	struct text text = { 0 };
	unsigned char *sent, *least, *least_of_vector;

	dl_iterate_phdr(executable_text, &text);
	sent = only_in(text, test, sizeof(test));
	least = only_in(text, itr, sizeof(itr));
	least_of_vector = only_in(text, eitr, sizeof(eitr));
	if (!sent || !least || !least_of_vector) {
		fprintf(stderr, "emulator-fix: e1000e is not as expected: its interrupts may come twice, 128 us apart at least\n");
		return;
	}
	patch(sent, take, sizeof(take));
	patch(least, none, sizeof(none));
	patch(least_of_vector, none, sizeof(none));
}

/* The emulated CPU behind `cpu`, in QEMU 7.2's layout: the patterns of offer_next_rip() hold these numbers, too. */
enum {
	ENV = 0x13b0, /* ArchCPU.env */
	ENV_EIP = 0x80,
	ENV_OLD_EXCEPTION = 0x33f0,
	ENV_VM_VMCB = 0x33f8,
};

/* AMD64 APM, volume 2, appendix B. */
enum {
	VMCB_EXIT_CODE = 0x70,
	VMCB_NEXT_RIP = 0xc8,
};

/* Bytes of the instruction that an exit code stands for, or 0 where it stands for none or for several (appendix C). */
static unsigned int instruction_length(uint64_t exit_code)
{
	switch (exit_code) {
	case 0x78: /* HLT */
		return 1;
	case 0x6e: /* RDTSC */
	case 0x6f: /* RDPMC */
	case 0x72: /* CPUID */
	case 0x77: /* PAUSE */
	case 0x7c: /* RDMSR, WRMSR */
	case 0x89: /* WBINVD */
		return 2;
	case 0x81: /* VMMCALL */
	case 0x8d: /* XSETBV */
		return 3;
	default:
		return 0;
	}
}

/* Instead of the last lines of cpu_vmexit: no pending exception, and out of the block. */
static void end_exit(void *cpu)
{
	char *env = (char *)cpu + ENV;
	uint64_t vmcb = *(uint64_t *)(env + ENV_VM_VMCB);
	unsigned int length = instruction_length(load(cpu, vmcb + VMCB_EXIT_CODE));

	store(cpu, vmcb + VMCB_NEXT_RIP, length ? *(uint64_t *)(env + ENV_EIP) + length : 0);
	*(int *)(env + ENV_OLD_EXCEPTION) = -1;
	end_with_exception(cpu);
}

/* QEMU 7.2's FeatureWordInfo (target/i386/cpu.h), as far as it is read here. */
struct feature_word {
	int type;
	const char *names[64];
	uint32_t where[4];
	uint64_t tcg;
	uint64_t other[3];
};

static void offer_next_rip(void)
{
	/* mov %r12, %rdi; movl $-1, old_exception(%rbx); call cpu_loop_exit */
	static const unsigned char end[] = { 0x4c, 0x89, 0xe7, 0xc7, 0x83, 0xf0, 0x33, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xe8 };
	/* lea -ENV(%rdi), %r12; mov vm_vmcb(%rbx), %rax */
	static const unsigned char cpu[] = { 0x4c, 0x8d, 0xa7, 0x50, 0xec, 0xff, 0xff };
	static const unsigned char vmcb[] = { 0x48, 0x8b, 0x83, 0xf8, 0x33, 0, 0, 0x89, 0xea };
	/* movabs $end_exit, %r11; call *%r11 */
	unsigned char call[] = { 0x49, 0xbb, 0, 0, 0, 0, 0, 0, 0, 0, 0x41, 0xff, 0xd3 };
	struct feature_word *word = need("feature_word_info");
	void *vmexit = need("cpu_vmexit");
	uintptr_t to = (uintptr_t)end_exit;

	store = need("x86_stq_phys");
	load = need("x86_ldq_phys");
	end_with_exception = need("cpu_loop_exit");
	only(vmexit, "CPU in cpu_vmexit", cpu, sizeof(cpu));
	only(vmexit, "VMCB in cpu_vmexit", vmcb, sizeof(vmcb));
	memcpy(call + 2, &to, sizeof(to));
	patch(only(vmexit, "end of cpu_vmexit", end, sizeof(end)) + 3, call, sizeof(call));
	for (int i = 0; i < 36; i++, word++) {
		if (word->names[3] && !strcmp(word->names[3], "nrip-save")) {
			word->tcg |= 1 << 3;
			return;
		}
	}
	not_ours("feature nrip-save");
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
	moderate_interrupts_as_asked();
	offer_next_rip();
}
