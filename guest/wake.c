// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * The wake-up: a channel's MSI of delivery mode 3 (remote read). KVM takes it for "end the halt" and injects nothing, so
 * that no handler runs; on hardware the mode is reserved.
 */
#include <linux/interrupt.h>
#include <linux/io.h>
#include <linux/irq.h>
#include <linux/msi.h>
#include <linux/pci.h>

#include "ontime.h"

#define MSI_DATA_MODE 0x700
#define MSI_DATA_WAKE 0x300
/* In the address: a remappable format message, whose data are an index. */
#define MSI_ADDRESS_REMAPPED BIT(4)

/*
 * After each write of the message by the kernel: with the vector masked, so that the VMM, which looks at unmasking, takes
 * the new message over.
 */
static void wake_write(struct msi_desc *desc, void *unused)
{
	void __iomem *entry = desc->pci.mask_base + desc->msi_index * PCI_MSIX_ENTRY_SIZE;
	u32 control = readl(entry + PCI_MSIX_ENTRY_VECTOR_CTRL);

	writel(control | PCI_MSIX_ENTRY_CTRL_MASKBIT, entry + PCI_MSIX_ENTRY_VECTOR_CTRL);
	writel((desc->msg.data & ~MSI_DATA_MODE) | MSI_DATA_WAKE, entry + PCI_MSIX_ENTRY_DATA);
	writel(control, entry + PCI_MSIX_ENTRY_VECTOR_CTRL);
	readl(entry + PCI_MSIX_ENTRY_VECTOR_CTRL);
}

/* Points the channel's vector at its vCPU. */
int ontime_wake_aim(struct ontime_chan *chan)
{
	int irq = pci_irq_vector(to_pci_dev(chan->vdev->dev.parent), 0);

	return irq < 0 ? irq : irq_set_affinity(irq, cpumask_of(chan->cpu));
}

/* Makes it a wake-up of that one. */
int ontime_wake_arm(struct ontime_chan *chan)
{
	int irq = pci_irq_vector(to_pci_dev(chan->vdev->dev.parent), 0), err;
	struct msi_desc *desc;

	if (irq < 0)
		return irq;
	err = ontime_wake_aim(chan);
	if (err)
		return err;
	desc = irq_get_msi_desc(irq);
	if (!desc || desc->msg.address_lo & MSI_ADDRESS_REMAPPED)
		return -EOPNOTSUPP;
	desc->write_msi_msg = wake_write;
	wake_write(desc, NULL);
	return 0;
}

void ontime_wake_disarm(struct ontime_chan *chan)
{
	int irq = pci_irq_vector(to_pci_dev(chan->vdev->dev.parent), 0);
	struct msi_desc *desc = irq < 0 ? NULL : irq_get_msi_desc(irq);

	if (!desc)
		return;
	desc->write_msi_msg = NULL;
	/* Writes the message anew. */
	irq_set_affinity(irq, cpu_online_mask);
}
