/* SPDX-License-Identifier: (GPL-2.0-or-later WITH Linux-syscall-note) OR BSD-3-Clause */
/*
 * The contract between a guest and its `ontime device` process: outsourced sockets, deadlines.
 *
 * This is its only definition. The guest module includes it; the Rust side is generated from it
 * (crates/sockets/build.rs). What the fields mean, and which side writes them when: docs/reference/device.md.
 *
 *   guest                                        device process (host)
 *   -----                                        ---------------------
 *   call queue   : ontime_call [control] [data] ------> checks, runs it on the host socket
 *                <------ ontime_done [control] [data]   now, or later if ONTIME_CALL_WAIT
 *   event queue  : empty buffers                ------>
 *                <------ ontime_event                   a socket's readiness changed
 *   control queue: ontime_call                  ------> channels, deadlines
 *   ontime_vcpu  : {HALTING | RUN(priority)}    ------> notify by waking, by interrupt, or not at all
 *
 * All integers are little endian, except where a sockaddr has network byte order. Reserved fields are written as 0; the
 * device refuses a call in which one is not 0. Every struct has its natural alignment and no hidden padding.
 */
#ifndef ONTIME_ABI_H
#define ONTIME_ABI_H

#include <linux/types.h>

/* ---- Identity: docs/reference/device.md, "Device identity" ---- */
#define ONTIME_VIRTIO_ID 38
#define ONTIME_MAGIC 0x4d544e4f /* "ONTM" */
#define ONTIME_VERSION 1

/* Feature bits (virtio's device-specific range). VIRTIO_F_VERSION_1 is required. */
#define ONTIME_F_SOCKETS 0  /* calls on sockets are served */
#define ONTIME_F_CHANNELS 1 /* ontime_vcpu is used; ontime_config.channels: number of channels */
#define ONTIME_F_DEADLINE 2 /* MAIN: ONTIME_CTL_*_BW are served */
#define ONTIME_F_HINTS 3    /* ONTIME_CALL_BLIND, ONTIME_CALL_AHEAD are used */
#define ONTIME_F_LOCAL 4    /* MAIN: ONTIME_CTL_PING has an argument */

/* Virtqueues. Every device has the first two; role MAIN also has the third. */
#define ONTIME_VQ_CALL 0
#define ONTIME_VQ_EVENT 1
#define ONTIME_VQ_CONTROL 2
#define ONTIME_VQS_MAIN 3
#define ONTIME_VQS_CHANNEL 2

#define ONTIME_ROLE_MAIN 0
#define ONTIME_ROLE_CHANNEL 1

#define ONTIME_WAKE_INTERRUPT 0 /* the notification is an ordinary interrupt */
#define ONTIME_WAKE_IDLE 1      /* may be made an MSI of delivery mode 3: ends a halt, injects nothing */

struct ontime_config {
	__le32 magic;         /* ONTIME_MAGIC */
	__le32 version;       /* ONTIME_VERSION */
	__le64 generation;    /* differs after a restart of the device process; the same in all devices of one VM */
	__le32 role;          /* ONTIME_ROLE_* */
	__le32 channel;       /* this device's channel; 0: MAIN's */
	__le32 channels;      /* the VM's number of channels, including MAIN's: 1 to ONTIME_CHANNELS_MAX */
	__le32 wake;          /* ONTIME_WAKE_*: set by the host's administrator */
	__le32 sockets_max;   /* most sockets open at once; a socket id has an index below it */
	__le32 calls_max;     /* most calls of this device in flight at once */
	__le32 segments_max;  /* most descriptors of a call, in both directions together, with control and headers */
	__le32 data_max;      /* most data bytes of a call, in each direction */
	__le32 reserved[4];
};

/* ---- Limits ---- */
#define ONTIME_CHANNELS_MAX 64
#define ONTIME_SOCKETS_MAX 0x100000 /* a socket id is index (20 bits) | generation << 20 */
#define ONTIME_SOCK_INDEX_BITS 20
#define ONTIME_SOCK_NONE 0xffffffff
#define ONTIME_CONTROL_MAX 1024 /* bytes of control messages of a call, in each direction */
#define ONTIME_OPTION_MAX 4096  /* bytes of a socket option's value */
#define ONTIME_ADDR_MAX 28      /* bytes: sizeof(struct sockaddr_in6) */

/*
 * ---- Calls ----
 * Readable part:  ontime_call | control (control_len bytes) | data (the rest)
 * Writable part:  ontime_done | control (control_len bytes of room) | data (the rest)
 * The borders of descriptors have no meaning.
 */
struct ontime_call {
	__le16 op;          /* ONTIME_OP_* or ONTIME_CTL_* */
	__le16 flags;       /* ONTIME_CALL_* */
	__le32 sock;        /* the socket; in SOCKET: the id of the new one */
	__le64 id;          /* chosen by the guest, unique among this queue's calls in flight */
	__le32 arg[4];      /* depends on op, see below */
	__le16 prio;        /* of the waiting thread: 0 a normal thread, 1 to 99 a real-time priority */
	__le16 addr_len;    /* bytes used in addr: 0 to ONTIME_ADDR_MAX */
	__le16 control_len; /* bytes of control messages in the readable part: 0 to ONTIME_CONTROL_MAX */
	__le16 control_room;/* bytes of room for control messages in the writable part: 0 to ONTIME_CONTROL_MAX */
	__u8 addr[28];      /* struct sockaddr_in or sockaddr_in6, in Linux' layout */
	__le32 reserved;
};

struct ontime_done {
	__le64 id;          /* the call's id */
	__le32 result;      /* 0 or more: the call's result; below: -errno (Linux' numbers, x86-64) */
	__le32 ready;       /* ONTIME_READY_* of the socket just after the call */
	__le32 seq;         /* number of the socket's report, from 1: apply ready only if newer; 0: no report */
	__le32 msg_flags;   /* RECV: Linux' msg_flags, ONTIME_MSG_* */
	__le16 addr_len;    /* bytes used in addr */
	__le16 control_len; /* bytes of control messages written */
	__u8 addr[28];
};

#define ONTIME_CALL_WAIT 0x1 /* RECV, SEND, ACCEPT: complete when there is a result; CANCEL ends it earlier */
#define ONTIME_CALL_BLIND 0x2 /* RECV: the socket is not polled; until a POLL, reports may say IN without data */
#define ONTIME_CALL_AHEAD 0x4 /* RECV: no caller waits yet; ends with -ECANCELED before it would pass urgent data */

/* Not among Linux' own flags. */
#define ONTIME_MSG_WAITED 0x80000000 /* RECV: the message came after the call */
#define ONTIME_MSG_ERROR 0x1000000   /* RECV of the error queue, ACCEPT: the errno below is pending, 0: none */
#define ONTIME_MSG_ERRNO_MASK 0xff0000
#define ONTIME_MSG_ERRNO_SHIFT 16

/* A channel's call queue takes the calls marked c; MAIN's takes all. */
#define ONTIME_OP_SOCKET 1   /*   arg: family, type (SOCK_STREAM or SOCK_DGRAM), protocol, channel */
#define ONTIME_OP_BIND 2     /*   addr; done.addr: the bound name */
#define ONTIME_OP_LISTEN 3   /*   arg: backlog; done.addr: the bound name */
#define ONTIME_OP_CONNECT 4  /*   addr (family AF_UNSPEC dissolves); 0 or -EINPROGRESS; done.addr: the local name */
#define ONTIME_OP_ACCEPT 5   /* c arg: the new socket's id, on the same channel; done.addr: the peer */
#define ONTIME_OP_SEND 6     /* c arg: msg flags; addr, control, data; result: bytes sent; done.control: SO_ERROR */
#define ONTIME_OP_RECV 7     /* c arg: msg flags; result: bytes received; done.addr, control, data, msg_flags */
#define ONTIME_OP_SHUTDOWN 8 /* c arg: how (0 read, 1 write, 2 both) */
#define ONTIME_OP_SETOPT 9   /*   arg: level, name; readable data: the value */
#define ONTIME_OP_GETOPT 10  /*   arg: level, name; readable data: value passed in; writable: value; result: its length */
#define ONTIME_OP_NAME 11    /* c arg: ONTIME_NAME_*; done.addr */
#define ONTIME_OP_QUERY 12   /* c arg: ONTIME_QUERY_*; result: the number */
#define ONTIME_OP_CLOSE 13   /* c arg: ONTIME_CLOSE_*; first ends waiting calls; a channel closes accepted ones only */
#define ONTIME_OP_CANCEL 14  /* c arg: low, high half of the id of a waiting call of this queue */
#define ONTIME_OP_CHANNEL 15 /*   arg: channel; moves the socket there; -EBUSY while calls wait on it */
#define ONTIME_OP_POLL 16    /* c only reports ready and seq */

#define ONTIME_NAME_LOCAL 0
#define ONTIME_NAME_PEER 1

#define ONTIME_QUERY_INQ 0    /* FIONREAD: bytes to read (STREAM), bytes of the next datagram (DGRAM) */
#define ONTIME_QUERY_OUTQ 1   /* SIOCOUTQ: bytes not yet acknowledged or sent */
#define ONTIME_QUERY_ATMARK 2 /* SIOCATMARK */
#define ONTIME_QUERY_OUTQNSD 3 /* SIOCOUTQNSD: bytes not yet sent (STREAM) */

#define ONTIME_CLOSE_GRACEFUL 0 /* sent data is still delivered */
#define ONTIME_CLOSE_ABORT 1    /* STREAM: reset (close with SO_LINGER of 0 seconds) */

/*
 * A control message: struct cmsghdr of 64-bit Linux. The next one begins at the next multiple of 8. RECV has those of
 * the message. With room for it, ACCEPT, and CONNECT of a connection that stands already, have SOL_SOCKET, SO_SNDBUF
 * (__le32): the size that the kernel has chosen for the connection.
 */
struct ontime_control {
	__le64 len;   /* bytes, including this header */
	__le32 level;
	__le32 type;
	/* data */
};

/* ---- Events ---- */
struct ontime_event {
	__le16 type;   /* ONTIME_EVENT_* */
	__le16 error;  /* READY: an errno that was pending on the host socket (SO_ERROR) and was taken, or 0 */
	__le32 sock;   /* READY: the socket */
	__le32 ready;  /* READY: ONTIME_READY_* */
	__le32 seq;    /* READY: as in ontime_done */
	__le64 generation; /* START: ontime_config.generation */
};

#define ONTIME_EVENT_READY 1 /* a socket's readiness changed */
#define ONTIME_EVENT_START 2 /* first event after the queue was started: sockets of another generation are gone */

/* Linux' EPOLL* values */
#define ONTIME_READY_IN 0x1
#define ONTIME_READY_PRI 0x2
#define ONTIME_READY_OUT 0x4
#define ONTIME_READY_ERR 0x8 /* the socket's error queue is not empty */
#define ONTIME_READY_HUP 0x10
#define ONTIME_READY_RDHUP 0x2000
#define ONTIME_READY_END 0x10000 /* for a stream, beside RDHUP: all data was received, and each RECV returns 0 */

/*
 * ---- Shared page: an ontime_vcpu for each channel, in guest memory, 64 bytes aligned, named by ONTIME_CTL_VCPU ----
 * `state` is written by the guest. The host changes it only from HALTING to WOKEN, by an atomic exchange.
 */
struct ontime_vcpu {
	__le32 state;     /* ONTIME_VCPU_*, and the priority in RUN */
	__le32 attention; /* the host sets 1 before it interrupts by MAIN for this channel; the guest clears it */
	__le32 wakes;     /* host: wake-ups that were sent, of all channels */
	__le32 attentions;/* host: interrupts that were sent by MAIN, of all channels */
	__le64 deadline;  /* not used: see ONTIME_CTL_NEXT */
	__le64 reserved[5];
};

#define ONTIME_VCPU_RUN 0x0     /* | priority << 8: 0 a normal thread, 1 to 99 a real-time one */
#define ONTIME_VCPU_HALTING 0x1 /* about to halt, or halted */
#define ONTIME_VCPU_WOKEN 0x2   /* the host has sent the wake-up; the guest has not continued yet */
#define ONTIME_VCPU_LOOKING 0x3 /* will check its queues before it halts or runs a thread: needs no notification */
#define ONTIME_VCPU_STATE_MASK 0xff
#define ONTIME_VCPU_PRIO_SHIFT 8

/* ---- Control queue: ontime_call and ontime_done with these ops ---- */
#define ONTIME_CTL_VCPU 0x100 /* arg: channel, vCPU; data: le64 guest-physical address of ontime_vcpu; 0: release */
/*
 * An answer is a sign of life. arg (ONTIME_F_LOCAL): how many sockets that were to be outsourced stayed with the
 * guest's own stack, for whatever reason; modulo 2^32.
 */
#define ONTIME_CTL_PING 0x101
/*
 * ONTIME_F_DEADLINE (RTVirt's hypercall). Readable data: one ontime_bw, for INC_DEC_BW up to ONTIME_BW_ENTRIES_MAX.
 * Each states a vCPU's whole need from now on. Result: 0, or -EBUSY if the host cannot guarantee it: then nothing has
 * changed.
 */
#define ONTIME_CTL_INC_BW 0x110
#define ONTIME_CTL_DEC_BW 0x111     /* no more bandwidth, or -EINVAL; not refused if the period is not shorter */
#define ONTIME_CTL_INC_DEC_BW 0x112 /* several vCPUs, each once: all or none */

/*
 * Where the driver publishes next deadlines. Readable data: le64 guest-physical address of ONTIME_VCPUS_MAX
 * ontime_next_vcpu, a multiple of ONTIME_NEXT_ALIGN; 0: release. If the host refuses, the driver continues without
 * publishing.
 */
#define ONTIME_CTL_NEXT 0x113

struct ontime_bw {
	__le32 vcpu;     /* its number, below ONTIME_VCPUS_MAX */
	__le32 reserved;
	__le64 budget;   /* ns of CPU time in each period, at most the period; 0 with period 0: none */
	__le64 period;   /* ns: ONTIME_BW_PERIOD_MIN to ONTIME_BW_PERIOD_MAX */
};

/*
 * A deadline task's next deadline. `deadline` is the host's CLOCK_REALTIME, ns, as in KVM_HC_CLOCK_PAIRING; 0: no task.
 * After it has passed, the next one is a `period` (ns) later.
 */
struct ontime_next {
	__le64 deadline;
	__le64 period;
};

#define ONTIME_NEXT_TASKS 7
#define ONTIME_NEXT_ALIGN 4096

/* The deadlines of a vCPU, by its number. The host reads them whenever it plans. */
struct ontime_next_vcpu {
	__le64 paired;   /* how often the driver has read the host's clock; 0: never, and the entries are not valid */
	__le64 reserved;
	struct ontime_next next[ONTIME_NEXT_TASKS]; /* the earliest, in any order */
};

#define ONTIME_VCPUS_MAX 64
#define ONTIME_BW_ENTRIES_MAX 64
#define ONTIME_BW_PERIOD_MIN 100000
#define ONTIME_BW_PERIOD_MAX 4000000000

#endif
