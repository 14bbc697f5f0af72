// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Steering: which of the guest's new sockets are outsourced.
 *
 * For user space's socket(2) only, the kernel calls update_socket_protocol() with the three
 * arguments, and uses the returned protocol. io_uring's IORING_OP_SOCKET does not call it, but
 * __sys_socket_file() with the same arguments. The handler below runs at the entry of both
 * functions and replaces the third argument, so sockets of the kernel itself are never outsourced.
 * It changes an argument and not the instruction pointer: a livepatch or a BPF program on the same
 * function keeps working.
 *
 * A socket that the policy selects and that cannot be outsourced stays with the guest's own stack,
 * where it may have no network. It is counted by reason (parameter `bypassed`), and the kernel's
 * log names the program.
 */
#include <linux/bpf-cgroup.h>
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

#define STEER_CGROUPS 16

static const char * const steer_hooks[] = { "update_socket_protocol", "__sys_socket_file" };

enum steer_policy { STEER_NONE, STEER_ALL, STEER_CGROUP };

static const char * const steer_names[] = {
	[STEER_NONE] = "none",
	[STEER_ALL] = "all",
	[STEER_CGROUP] = "cgroup",
};

/* The cgroups whose sockets are steered; replaced as a whole. */
struct steer_list {
	struct rcu_head rcu;
	unsigned int count;
	struct cgroup *cgroup[STEER_CGROUPS];
	char paths[];
};

/* Why a selected socket is not outsourced. */
enum steer_bypass { BYPASS_DEVICE, BYPASS_PROTOCOL, BYPASS_BPF, BYPASS_RESERVE, BYPASS_REASONS };

static const char * const bypass_names[BYPASS_REASONS] = {
	[BYPASS_DEVICE] = "no device",
	[BYPASS_PROTOCOL] = "type or protocol is not served",
	[BYPASS_BPF] = "its control group has BPF programs",
	[BYPASS_RESERVE] = "the sockets that are left are kept for root",
};

static atomic_long_t bypassed[BYPASS_REASONS];

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
 * A network namespace isolates its sockets, and an outsourced socket would leave it for the host's
 * stack. So only a cgroup that is configured takes such sockets out.
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

#ifdef CONFIG_CGROUP_BPF
/*
 * Whether BPF programs are attached to the caller's cgroup, or to one above it, that an outsourced
 * socket would bypass. The types that the kernel runs for every protocol are left out: those at
 * socket(2), setsockopt(2) and getsockopt(2).
 */
static bool steer_has_bpf(void)
{
	static const enum cgroup_bpf_attach_type types[] = {
		CGROUP_INET_INGRESS, CGROUP_INET_EGRESS, CGROUP_INET_SOCK_RELEASE, CGROUP_SOCK_OPS,
		CGROUP_INET4_BIND, CGROUP_INET6_BIND, CGROUP_INET4_POST_BIND, CGROUP_INET6_POST_BIND,
		CGROUP_INET4_CONNECT, CGROUP_INET6_CONNECT, CGROUP_UDP4_SENDMSG, CGROUP_UDP6_SENDMSG,
		CGROUP_UDP4_RECVMSG, CGROUP_UDP6_RECVMSG, CGROUP_INET4_GETPEERNAME, CGROUP_INET6_GETPEERNAME,
		CGROUP_INET4_GETSOCKNAME, CGROUP_INET6_GETSOCKNAME,
	};
	bool found = false;
	unsigned int i;

	rcu_read_lock();
	for (i = 0; i < ARRAY_SIZE(types) && !found; i++) {
		struct bpf_prog_array *array = rcu_dereference(task_dfl_cgroup(current)->bpf.effective[types[i]]);

		found = array && READ_ONCE(array->items[0].prog);
	}
	rcu_read_unlock();
	return found;
}
#else
static bool steer_has_bpf(void)
{
	return false;
}
#endif

/*
 * Whether a socket may be made in this network namespace. A program may name the protocol itself,
 * past the hook; isolation counts for it as well.
 */
bool ontime_steer_may(const struct net *net)
{
	if (steer_has_bpf())
		return false;
	return net_eq(net, &init_net) || (READ_ONCE(steer_policy) == STEER_CGROUP && steer_in_list());
}

/*
 * MPTCP falls back to TCP if the peer does not support it, and host sockets do not: so its streams
 * become TCP.
 */
static bool steer_kind(int type, int protocol)
{
	switch (type & SOCK_TYPE_MASK) {
	case SOCK_STREAM:
		return protocol == 0 || protocol == IPPROTO_TCP || protocol == IPPROTO_MPTCP;
	case SOCK_DGRAM:
		return protocol == 0 || protocol == IPPROTO_UDP;
	default:
		return false;
	}
}

/*
 * Whether such a socket carries messages to other hosts. Raw and ping sockets are for the guest's
 * own network.
 */
static bool steer_carries(int type, int protocol)
{
	switch (type & SOCK_TYPE_MASK) {
	case SOCK_STREAM:
	case SOCK_SEQPACKET:
		return true;
	case SOCK_DGRAM:
		return protocol != IPPROTO_ICMP && protocol != IPPROTO_ICMPV6;
	default:
		return false;
	}
}

static void steer_bypass(enum steer_bypass reason, int type, int protocol)
{
	atomic_long_inc(&bypassed[reason]);
	pr_notice_ratelimited("%s[%d]: a socket of type %d, protocol %d stays with the guest's own stack: %s\n",
			      current->comm, task_tgid_nr(current), type & SOCK_TYPE_MASK, protocol,
			      bypass_names[reason]);
}

/* All that was counted, for the host, which shows it in `ontime sockets`. */
u32 ontime_steer_bypassed(void)
{
	unsigned long all = 0;
	unsigned int i;

	for (i = 0; i < BYPASS_REASONS; i++)
		all += atomic_long_read(&bypassed[i]);
	return all;
}

static void notrace steer_hook(unsigned long ip, unsigned long parent_ip, struct ftrace_ops *ops,
			       struct ftrace_regs *fregs)
{
	struct pt_regs *regs = ftrace_get_regs(fregs);
	int family, type, protocol;

	if (!regs)
		return;
	family = regs->di;
	type = regs->si;
	protocol = regs->dx;
	if ((family != AF_INET && family != AF_INET6) || protocol == ONTIME_PROTOCOL || !steer_wanted())
		return;
	if (!steer_kind(type, protocol)) {
		if (steer_carries(type, protocol))
			steer_bypass(BYPASS_PROTOCOL, type, protocol);
	} else if (!ontime_device_ready()) {
		steer_bypass(BYPASS_DEVICE, type, protocol);
	} else if (steer_has_bpf()) {
		steer_bypass(BYPASS_BPF, type, protocol);
	} else if (ontime_sock_reserved()) {
		steer_bypass(BYPASS_RESERVE, type, protocol);
	} else {
		regs->dx = ONTIME_PROTOCOL;
	}
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

/*
 * A comma-separated list of paths below the root of cgroup v2, for example
 * "/system.slice/memcached.service".
 */
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

static int bypassed_get(char *buffer, const struct kernel_param *param)
{
	int length = 0;
	unsigned int i;

	for (i = 0; i < BYPASS_REASONS; i++)
		length += sysfs_emit_at(buffer, length, "%ld %s\n", atomic_long_read(&bypassed[i]), bypass_names[i]);
	return length;
}

static const struct kernel_param_ops bypassed_param_ops = { .get = bypassed_get };

module_param_cb(bypassed, &bypassed_param_ops, NULL, 0444);
MODULE_PARM_DESC(bypassed, "read: how many sockets that `steer` names stayed with the guest's own stack, by reason");

/*
 * How many sockets have a port, of the protocol that the guest's own stack uses for this family and
 * type.
 */
static int steer_count(int family, int type)
{
	struct socket *sock;
	int count;

	if (sock_create_kern(&init_net, family, type, 0, &sock))
		return 0;
	count = sock_prot_inuse_get(&init_net, sock->sk->sk_prot);
	sock_release(sock);
	return count;
}

/*
 * Sockets that were made before stay with the guest's own stack, even if their descriptors are
 * passed on.
 */
static void steer_say_earlier(void)
{
	int count = steer_count(AF_INET, SOCK_STREAM) + steer_count(AF_INET6, SOCK_STREAM) +
		    steer_count(AF_INET, SOCK_DGRAM) + steer_count(AF_INET6, SOCK_DGRAM);

	if (count > 0)
		pr_notice("%d TCP and UDP sockets were bound before the module was there: they stay the guest's own\n",
			  count);
}

int ontime_steer_init(void)
{
	unsigned int i;
	int err = 0;

	for (i = 0; i < ARRAY_SIZE(steer_hooks) && !err; i++) {
		err = ftrace_set_filter(&steer_ops, (char *)steer_hooks[i], strlen(steer_hooks[i]), !i);
		if (err)
			pr_err("cannot find %s() to steer by: %d\n", steer_hooks[i], err);
	}
	if (!err) {
		err = register_ftrace_function(&steer_ops);
		if (err)
			pr_err("cannot attach to the functions to steer by (is kernel.ftrace_enabled 0?): %d\n", err);
	}
	if (err)
		ftrace_free_filter(&steer_ops);
	else
		steer_say_earlier();
	return err;
}

/*
 * Parameters are set before the module's init function and outlive its failure; so there is a
 * separate free function.
 */
void ontime_steer_exit(void)
{
	unregister_ftrace_function(&steer_ops);
	ftrace_free_filter(&steer_ops);
}

void ontime_steer_free(void)
{
	steer_list_replace(NULL);
}
