/* The threads of a VM, by name, and no more: hundred.sh runs it as qemu-system-x86_64. */
#include <pthread.h>
#include <sys/prctl.h>
#include <unistd.h>

static void *named(void *name)
{
	prctl(PR_SET_NAME, name);
	for (;;)
		pause();
	return 0;
}

int main(void)
{
	static char *names[] = { "CPU 0/KVM", "CPU 1/KVM", "CPU 2/KVM", "CPU 3/KVM", "IO iothread1", "worker" };
	pthread_t thread;

	for (unsigned i = 0; i < sizeof(names) / sizeof(*names); i++)
		if (pthread_create(&thread, 0, named, names[i]))
			return 1;
	named("qemu-system-x86");
}
