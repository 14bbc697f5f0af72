// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * /proc/net/ontime: the outsourced sockets of a network namespace, one line each, readable by every
 * user like /proc/net/tcp. ontime-ss shows them as ss(8) shows the guest's own sockets.
 *
 * States, names and queues are those of the host. Each is queried when its line is read, by MAIN's
 * queue: a reader takes no time of a channel's thread.
 */
#include <linux/proc_fs.h>
#include <linux/seq_file.h>
#include <linux/sock_diag.h>
#include <linux/user_namespace.h>
#include <net/net_namespace.h>
#include <net/tcp_states.h>

#include "ontime.h"

/*
 * What the guest knows of a socket. If the socket is closed meanwhile, its id is not valid: the
 * host answers -EBADF.
 */
struct list_row {
	u32 id, chan, unread;
	u16 type, family;
	kuid_t uid;
	u64 inode;
};

struct list_reader {
	struct seq_net_private net;	/* must be the first member: seq_file_net() */
	struct ontime_dev *dev;
	struct list_row row;
};

static const char * const list_states[] = {
	[TCP_ESTABLISHED] = "ESTAB",
	[TCP_SYN_SENT] = "SYN-SENT",
	[TCP_SYN_RECV] = "SYN-RECV",
	[TCP_FIN_WAIT1] = "FIN-WAIT-1",
	[TCP_FIN_WAIT2] = "FIN-WAIT-2",
	[TCP_TIME_WAIT] = "TIME-WAIT",
	[TCP_CLOSE] = "UNCONN",
	[TCP_CLOSE_WAIT] = "CLOSE-WAIT",
	[TCP_LAST_ACK] = "LAST-ACK",
	[TCP_LISTEN] = "LISTEN",
	[TCP_CLOSING] = "CLOSING",
};

/* ---- Queries to the host ---- */

/* Runs a call about the socket. Returns the call, which the caller puts, or its error. */
static struct ontime_rpc *list_ask(struct list_reader *reader, u16 op, u32 arg0, u32 arg1, u32 room)
{
	struct ontime_rpc *rpc = ontime_rpc_new(reader->dev, 0, op, reader->row.id);
	int result;

	if (IS_ERR(rpc))
		return rpc;
	rpc->out.call.arg[0] = cpu_to_le32(arg0);
	rpc->out.call.arg[1] = cpu_to_le32(arg1);
	rpc->in_small = room;
	result = ontime_rpc_run(rpc);
	if (result >= 0)
		return rpc;
	ontime_rpc_put(rpc);
	return ERR_PTR(result);
}

static u32 list_query(struct list_reader *reader, u32 which)
{
	struct ontime_rpc *rpc = list_ask(reader, ONTIME_OP_QUERY, which, 0, 0);
	u32 number;

	if (IS_ERR(rpc))
		return 0;
	number = rpc->result;
	ontime_rpc_put(rpc);
	return number;
}

/* Reads an option as far as the host returns it; the rest of @value is zeroed. */
static void list_option(struct list_reader *reader, int level, int name, void *value, u32 size)
{
	struct ontime_rpc *rpc = list_ask(reader, ONTIME_OP_GETOPT, level, name, size);

	memset(value, 0, size);
	if (IS_ERR(rpc))
		return;
	memcpy(value, rpc->in->body, min_t(u32, rpc->result, size));
	ontime_rpc_put(rpc);
}

/*
 * Gets a name; without one, the unspecified address. False if the host returns an error, also for a
 * closed socket.
 */
static bool list_name(struct list_reader *reader, u32 which, struct sockaddr_storage *name)
{
	struct ontime_rpc *rpc = list_ask(reader, ONTIME_OP_NAME, which, 0, 0);

	memset(name, 0, sizeof(*name));
	name->ss_family = reader->row.family;
	if (IS_ERR(rpc))
		return false;
	ontime_addr_out(&rpc->in->done, name);
	ontime_rpc_put(rpc);
	return true;
}

static void list_show(struct seq_file *seq, struct list_reader *reader)
{
	struct list_row *row = &reader->row;
	bool stream = row->type == SOCK_STREAM;
	struct sockaddr_storage local, peer;
	u32 received, sent, only = 0, memory[SK_MEMINFO_VARS];
	struct tcp_info info;
	unsigned int state;

	if (!list_name(reader, ONTIME_NAME_LOCAL, &local))
		return;
	if (row->family == AF_INET6)
		list_option(reader, SOL_IPV6, IPV6_V6ONLY, &only, sizeof(only));
	if (stream)
		list_option(reader, SOL_TCP, TCP_INFO, &info, sizeof(info));
	if (stream && info.tcpi_state == TCP_LISTEN) {
		/* Connections that wait to be accepted, and the limit of these. */
		state = TCP_LISTEN;
		received = info.tcpi_unacked;
		sent = info.tcpi_sacked;
		memset(&peer, 0, sizeof(peer));
		peer.ss_family = row->family;
	} else if (stream) {
		state = info.tcpi_state;
		list_name(reader, ONTIME_NAME_PEER, &peer);
		received = list_query(reader, ONTIME_QUERY_INQ) + row->unread;
		sent = list_query(reader, ONTIME_QUERY_OUTQ);
	} else {
		state = list_name(reader, ONTIME_NAME_PEER, &peer) ? TCP_ESTABLISHED : TCP_CLOSE;
		list_option(reader, SOL_SOCKET, SO_MEMINFO, memory, sizeof(memory));
		received = memory[SK_MEMINFO_RMEM_ALLOC] + row->unread;
		sent = memory[SK_MEMINFO_WMEM_ALLOC];
	}
	seq_printf(seq, "%s %s %u %u %pISpc %pISpc %u %llu %u %u\n", stream ? "tcp" : "udp",
		   state < ARRAY_SIZE(list_states) && list_states[state] ? list_states[state] : "?", received, sent,
		   &local, &peer, from_kuid_munged(seq_user_ns(seq), row->uid), row->inode, row->chan, only);
}

/* ---- The file ---- */

/*
 * The next socket of the file's network namespace with an index of at least @index; NULL if there
 * is none.
 */
static struct list_reader *list_find(struct seq_file *seq, unsigned long index, loff_t *pos)
{
	struct list_reader *reader = seq->private;
	struct list_row *row = &reader->row;
	struct ontime_sock *os;
	struct sock *sk = NULL;

	if (!reader->dev)
		return NULL;
	rcu_read_lock();
	for (os = xa_find(&reader->dev->socks, &index, ULONG_MAX, XA_PRESENT); os;
	     os = xa_find_after(&reader->dev->socks, &index, ULONG_MAX, XA_PRESENT)) {
		sk = (struct sock *)os;
		if (net_eq(sock_net(sk), seq_file_net(seq)) && refcount_inc_not_zero(&sk->sk_refcnt))
			break;
	}
	rcu_read_unlock();
	*pos = index + 1;
	if (!os)
		return NULL;
	row->id = os->id;
	row->chan = READ_ONCE(os->chan);
	row->type = sk->sk_type;
	row->family = sk->sk_family;
	row->uid = READ_ONCE(sk->sk_uid);
	row->inode = sock_i_ino(sk);
	row->unread = ontime_ahead_unread(os);
	sock_put(sk);
	return reader;
}

static void *list_start(struct seq_file *seq, loff_t *pos)
{
	struct list_reader *reader = seq->private;

	reader->dev = ontime_dev_get();
	return *pos ? list_find(seq, *pos - 1, pos) : SEQ_START_TOKEN;
}

static void *list_next(struct seq_file *seq, void *at, loff_t *pos)
{
	return list_find(seq, *pos, pos);
}

static void list_stop(struct seq_file *seq, void *at)
{
	struct list_reader *reader = seq->private;

	if (reader->dev)
		ontime_dev_put(reader->dev);
	reader->dev = NULL;
}

static int list_line(struct seq_file *seq, void *at)
{
	if (at == SEQ_START_TOKEN)
		seq_puts(seq, "protocol state recv-q send-q local peer uid inode channel v6only\n");
	else
		list_show(seq, at);
	return 0;
}

static const struct seq_operations list_ops = {
	.start = list_start,
	.next = list_next,
	.stop = list_stop,
	.show = list_line,
};

static int __net_init list_net_init(struct net *net)
{
	return proc_create_net("ontime", 0444, net->proc_net, &list_ops, sizeof(struct list_reader)) ? 0 : -ENOMEM;
}

static void __net_exit list_net_exit(struct net *net)
{
	remove_proc_entry("ontime", net->proc_net);
}

static struct pernet_operations list_net_ops = { .init = list_net_init, .exit = list_net_exit };

int ontime_list_init(void)
{
	return register_pernet_subsys(&list_net_ops);
}

void ontime_list_exit(void)
{
	unregister_pernet_subsys(&list_net_ops);
}
