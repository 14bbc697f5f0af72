// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * The guest's part of Ontime: sockets that the host's network stack serves, deadlines that its
 * scheduler guarantees.
 */
#include <linux/module.h>

#include "ontime.h"

static int __init ontime_init(void)
{
	int err;

	err = ontime_rpc_init();
	if (err)
		goto err_steer_list;
	err = ontime_proto_init();
	if (err)
		goto err_rpc;
	err = ontime_dl_init();
	if (err)
		goto err_proto;
	err = ontime_dev_init();
	if (err)
		goto err_dl;
	err = ontime_list_init();
	if (err)
		goto err_dev;
	err = ontime_steer_init();
	if (err)
		goto err_list;
	return 0;

err_list:
	ontime_list_exit();
err_dev:
	ontime_dl_exit();
	ontime_dev_exit();
err_dl:
	ontime_dl_free();
err_proto:
	ontime_proto_exit();
err_rpc:
	ontime_rpc_exit();
err_steer_list:
	ontime_steer_free();
	return err;
}

static void __exit ontime_exit(void)
{
	ontime_steer_exit();
	ontime_list_exit();
	ontime_dl_exit();
	ontime_dev_exit();
	ontime_dl_free();
	ontime_proto_exit();
	ontime_rpc_exit();
	ontime_steer_free();
}

module_init(ontime_init);
module_exit(ontime_exit);

MODULE_DESCRIPTION("Ontime: sockets executed by the host's network stack, deadlines kept by its scheduler");
MODULE_AUTHOR("The Ontime developers");
MODULE_LICENSE("GPL");
