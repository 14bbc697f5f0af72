/* A process of a hostile user. It passes for a VM with many vCPUs by its threads' names, and holds many descriptors;
   hostile.sh gives it the name of a monitor and a long command line. It writes a byte to standard output when it is
   complete, and waits to be killed. A duplicate of a descriptor costs its reader as much as an open file, and this
   machine nothing. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { DESCRIPTORS = 19900, THREADS = 200, STACK = 64 << 10 };

static void *vcpu(void *number)
{
	char name[16];

	snprintf(name, sizeof(name), "CPU %d/KVM", (int)(long)number);
	prctl(PR_SET_NAME, name);
	for (;;)
		pause();
	return 0;
}

int main(void)
{
	int file = open("/dev/null", O_RDONLY);
	pthread_attr_t small;
	pthread_t thread;

	/* The lowest free number is taken, so the last number tells how many there are. */
	for (int last = file; last < DESCRIPTORS - 1; last = dup(file))
		if (last < 0) {
			perror("hostile: descriptors");
			return 1;
		}
	if (pthread_attr_init(&small) || pthread_attr_setstacksize(&small, STACK))
		return 1;
	for (long i = 0; i < THREADS; i++)
		if (pthread_create(&thread, &small, vcpu, (void *)i)) {
			fprintf(stderr, "hostile: only %ld threads\n", i);
			return 1;
		}
	if (write(STDOUT_FILENO, ".", 1) != 1)
		return 1;
	for (;;)
		pause();
}
