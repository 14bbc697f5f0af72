// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Steering: which of the guest's new sockets are outsourced.
 *
 * The kernel calls update_socket_protocol() with the arguments of socket(2), for user space only, and takes what it
 * returns for the protocol. The handler below runs at that function's entry and exchanges its third argument, so that
 * sockets that the kernel makes for itself never come here. It changes an argument and not the instruction pointer:
 * a livepatch or a BPF program on the same function goes on working.
 */
#include <linux/cgroup.h>
#include <linux/ftrace.h>
#include <linux/module.h>
#include <linux/mutex.h>
#include <linux/net.h>
#include <linux/nsproxy.h>
#include <linux/slab.h>
#include <linux/string.h>
#include <net/net_namespace.h>

#include "ontime.h"

#define STEER_HOOK "update_socket_protocol"
#define STEER_CGROUPS 16

enum steer_policy { STEER_NONE, STEER_ALL, STEER_CGROUP };

static const char * const steer_names[] = {
	[STEER_NONE] = "none",
	[STEER_ALL] = "all",
	[STEER_CGROUP] = "cgroup",
};

/* The control groups whose sockets are steered; replaced as a whole. */
struct steer_list {
	struct rcu_head rcu;
	unsigned int count;
	struct cgroup *cgroup[STEER_CGROUPS];
	char paths[];
};

static int steer_policy = STEER_ALL;
static struct steer_list __rcu *steer_list;
static DEFINE_MUTEX(steer_lock);

static bool steer_in_list(void)
{
	struct steer_list *list;
	bool found = false;
	unsigned int i;

	rcu_read_lock();
	list = rcu_dereference(steer_list);
	for (i = 0; list && i < list->count && !found; i++)
		found = cgroup_is_descendant(task_dfl_cgroup(current), list->cgroup[i]);
	rcu_read_unlock();
	return found;
}

/*
 * A network namespace of its own is a wall around its sockets, and the host's stack lies beyond it: only a control
 * group that is named takes such sockets out.
 */
static bool steer_wanted(void)
{
	switch (READ_ONCE(steer_policy)) {
	case STEER_ALL:
		return net_eq(current->nsproxy->net_ns, &init_net);
	case STEER_CGROUP:
		return steer_in_list();
	default:
		return false;
	}
}

/* Whether such a socket may be made there: who names its protocol himself passes the hook by, and the wall is there all the same. */
bool ontime_steer_may(const struct net *net)
{
	return net_eq(net, &init_net) || (READ_ONCE(steer_policy) == STEER_CGROUP && steer_in_list());
}

static bool steer_kind(int family, int type, int protocol)
{
	if (family != AF_INET && family != AF_INET6)
		return false;
	switch (type & SOCK_TYPE_MASK) {
	case SOCK_STREAM:
		return protocol == 0 || protocol == IPPROTO_TCP;
	case SOCK_DGRAM:
		return protocol == 0 || protocol == IPPROTO_UDP;
	default:
		return false;
	}
}

static void notrace steer_hook(unsigned long ip, unsigned long parent_ip, struct ftrace_ops *ops,
			       struct ftrace_regs *fregs)
{
	struct pt_regs *regs = ftrace_get_regs(fregs);

	if (!regs || !ontime_device_ready())
		return;
	/* di, si, dx: family, type, protocol. */
	if (steer_kind((int)regs->di, (int)regs->si, (int)regs->dx) && steer_wanted())
		regs->dx = ONTIME_PROTOCOL;
}

static struct ftrace_ops steer_ops = {
	.func = steer_hook,
	.flags = FTRACE_OPS_FL_SAVE_REGS | FTRACE_OPS_FL_RECURSION | FTRACE_OPS_FL_PERMANENT,
};

static void steer_list_free(struct steer_list *list)
{
	unsigned int i;

	if (!list)
		return;
	for (i = 0; i < list->count; i++)
		cgroup_put(list->cgroup[i]);
	kfree(list);
}

static void steer_list_replace(struct steer_list *list)
{
	struct steer_list *old;

	mutex_lock(&steer_lock);
	old = rcu_replace_pointer(steer_list, list, lockdep_is_held(&steer_lock));
	mutex_unlock(&steer_lock);
	synchronize_rcu();
	steer_list_free(old);
}

static int steer_set(const char *value, const struct kernel_param *param)
{
	int policy = sysfs_match_string(steer_names, value);

	if (policy < 0) {
		pr_err("steer: not one of none, all, cgroup\n");
		return policy;
	}
	WRITE_ONCE(steer_policy, policy);
	return 0;
}

static int steer_get(char *buffer, const struct kernel_param *param)
{
	return sysfs_emit(buffer, "%s\n", steer_names[READ_ONCE(steer_policy)]);
}

static const struct kernel_param_ops steer_param_ops = { .set = steer_set, .get = steer_get };

module_param_cb(steer, &steer_param_ops, NULL, 0644);
MODULE_PARM_DESC(steer, "whose new sockets are outsourced: all (of the initial network namespace), none, cgroup");

/* A comma-separated list of paths below the root of cgroup v2, "/system.slice/memcached.service" for instance. */
static int cgroups_set(const char *value, const struct kernel_param *param)
{
	struct steer_list *list;
	char *copy, *rest, *path;
	size_t size;
	int err = 0;

	size = strlen(value) + 1;
	list = kzalloc(struct_size(list, paths, size), GFP_KERNEL);
	copy = kstrdup(value, GFP_KERNEL);
	if (!list || !copy) {
		err = -ENOMEM;
		goto out;
	}
	strim(copy);
	strscpy(list->paths, copy, size);
	rest = copy;
	while ((path = strsep(&rest, ",")) && *path) {
		struct cgroup *cgroup;

		if (list->count == STEER_CGROUPS) {
			pr_err("cgroups: more than %d paths\n", STEER_CGROUPS);
			err = -E2BIG;
			goto out;
		}
		cgroup = cgroup_get_from_path(path);
		if (IS_ERR(cgroup)) {
			pr_err("cgroups: no cgroup v2 '%s'\n", path);
			err = PTR_ERR(cgroup);
			goto out;
		}
		list->cgroup[list->count++] = cgroup;
	}
	steer_list_replace(list);
	list = NULL;
out:
	steer_list_free(list);
	kfree(copy);
	return err;
}

static int cgroups_get(char *buffer, const struct kernel_param *param)
{
	struct steer_list *list;
	int length;

	rcu_read_lock();
	list = rcu_dereference(steer_list);
	length = sysfs_emit(buffer, "%s\n", list ? list->paths : "");
	rcu_read_unlock();
	return length;
}

static const struct kernel_param_ops cgroups_param_ops = { .set = cgroups_set, .get = cgroups_get };

module_param_cb(cgroups, &cgroups_param_ops, NULL, 0644);
MODULE_PARM_DESC(cgroups, "for steer=cgroup: comma-separated cgroup v2 paths; groups below them are included");

int ontime_steer_init(void)
{
	int err;

	err = ftrace_set_filter(&steer_ops, STEER_HOOK, strlen(STEER_HOOK), 1);
	if (err) {
		pr_err("cannot find " STEER_HOOK "() to steer by: %d\n", err);
		return err;
	}
	err = register_ftrace_function(&steer_ops);
	if (err) {
		pr_err("cannot attach to " STEER_HOOK "() (is kernel.ftrace_enabled 0?): %d\n", err);
		ftrace_free_filter(&steer_ops);
	}
	return err;
}

/* Parameters are set before the first initializer and outlive a failed one. */
void ontime_steer_exit(void)
{
	unregister_ftrace_function(&steer_ops);
	ftrace_free_filter(&steer_ops);
}

void ontime_steer_free(void)
{
	steer_list_replace(NULL);
}
