/* Keeps the emulated CPU from halting (SCHED_IDLE): a halted CPU makes the virtual clock jump to the next timer. */
void _start(void)
{
	for (;;)
		__asm__ volatile("");
}
