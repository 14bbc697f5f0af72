// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Wake-ups: a channel's MSI with delivery mode 3 (remote read). KVM ends the halt for it and
 * injects nothing, so no handler runs; on hardware the mode is reserved. And for channels that
 * interrupt: the priority of the interrupt's thread.
 */
#include <linux/delay.h>
#include <linux/interrupt.h>
#include <linux/io.h>
#include <linux/irq.h>
#include <linux/msi.h>
#include <linux/pci.h>
#include <asm/processor.h>

#include "ontime.h"

#define MSI_DATA_MODE 0x700
#define MSI_DATA_WAKE 0x300
/* Address bit of the remappable format, whose data is an index. */
#define MSI_ADDRESS_REMAPPED BIT(4)
/* Address of one vCPU by its local APIC ID, 8 bits; all ones would mean every vCPU. */
#define MSI_ADDRESS(APICID) (0xfee00000 | (APICID) << 12)
#define MSI_APICID_MAX 254

/* Masks the vector while writing, because the VMM reads the message when the vector is unmasked. */
static void wake_write_entry(struct msi_desc *desc, u32 high, u32 low, u32 data)
{
	void __iomem *entry = desc->pci.mask_base + desc->msi_index * PCI_MSIX_ENTRY_SIZE;
	u32 control = readl(entry + PCI_MSIX_ENTRY_VECTOR_CTRL);

	writel(control | PCI_MSIX_ENTRY_CTRL_MASKBIT, entry + PCI_MSIX_ENTRY_VECTOR_CTRL);
	writel(low, entry + PCI_MSIX_ENTRY_LOWER_ADDR);
	writel(high, entry + PCI_MSIX_ENTRY_UPPER_ADDR);
	writel(data, entry + PCI_MSIX_ENTRY_DATA);
	writel(control, entry + PCI_MSIX_ENTRY_VECTOR_CTRL);
	readl(entry + PCI_MSIX_ENTRY_VECTOR_CTRL);
}

/*
 * Called also after each write of the message by the kernel. The kernel's destination is not used:
 * irq_set_affinity() moves such a vector when its next interrupt is handled, and there is none any
 * more.
 */
static void wake_write(struct msi_desc *desc, void *data)
{
	struct ontime_chan *chan = data;

	wake_write_entry(desc, 0, MSI_ADDRESS(cpu_data(chan->cpu).topo.apicid),
			 (desc->msg.data & ~MSI_DATA_MODE) | MSI_DATA_WAKE);
}

static int wake_irq(struct ontime_chan *chan)
{
	return pci_irq_vector(to_pci_dev(chan->vdev->dev.parent), 0);
}

static struct msi_desc *wake_desc(struct ontime_chan *chan)
{
	int irq = wake_irq(chan);

	return irq < 0 ? NULL : irq_get_msi_desc(irq);
}

/* Turns the channel's interrupt into a wake-up of its vCPU. */
int ontime_wake_arm(struct ontime_chan *chan)
{
	struct msi_desc *desc = wake_desc(chan);

	if (!desc || desc->msg.address_lo & MSI_ADDRESS_REMAPPED || cpu_data(chan->cpu).topo.apicid > MSI_APICID_MAX)
		return -EOPNOTSUPP;
	desc->write_msi_msg_data = chan;
	desc->write_msi_msg = wake_write;
	wake_write(desc, chan);
	return 0;
}

/* Restores the kernel's own message. */
void ontime_wake_disarm(struct ontime_chan *chan)
{
	struct msi_desc *desc = wake_desc(chan);

	if (!desc)
		return;
	desc->write_msi_msg = NULL;
	wake_write_entry(desc, desc->msg.address_hi, desc->msg.address_lo, desc->msg.data);
}

/*
 * If interrupts are handled by threads (PREEMPT_RT, threadirqs), the kernel sets these to FIFO 50.
 * The device has been started, and its vector is not shared.
 */
void ontime_irq_first(struct ontime_chan *chan)
{
	int irq = wake_irq(chan);
	struct irq_data *data = irq < 0 ? NULL : irq_get_irq_data(irq);
	struct irqaction *action = data ? irq_data_to_desc(data)->action : NULL;
	struct task_struct *thread = action ? action->thread : NULL;
	unsigned int tries;

	if (!thread)
		return;
	/* The thread sets its own priority when it first runs. */
	for (tries = 0; READ_ONCE(thread->policy) != SCHED_FIFO && tries < 1000; tries++)
		msleep(1);
	ontime_thread_first(thread);
}
