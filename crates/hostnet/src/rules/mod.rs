//! The rule table: one rule per row, in the order in which a packet meets them.
//!
//! In: facts and intent. Out: settings and findings. Each module below has the planning functions of related rows.
//! Figures: us as p50/p99/max. Where the source is [`PROBES`], UDP echo at FIFO 47 beside a saturating small-packet
//! flood on another NIC, stock kernels under emulation, virtual clock.

mod busy_poll;
mod device_irq;
mod exclusive;
mod host;
mod host_config;
mod interrupt_context;
mod moderation;
mod napi_weight;
mod nic_threads;
mod qdisc_bypass;
mod senders;
mod tap_batch;
mod tenant_threads;
mod threads;
mod tx_queue;
mod veth;

use crate::rule::{Cost, Rule, RuleId};

pub use busy_poll::polling_nics;
pub(crate) use napi_weight::NO_BH_LOCK;
pub use napi_weight::softirqs_share_a_lock;
pub use threads::NAPI_LISTED;

const PROBES: &str = "measured by hand: Debian 7.2-rt and 6.12-rt, emulated, virtual clock (docs/reference/hostnet.md)";
const INVERSION: &str = "`ontime-lab bench inversion --requests 1000`: Debian 7.2-rt, emulated, virtual clock, one \
    CPU, small packets (docs/results/bench/segments-inversion.md)";

/// The source of a row whose effect the experiment cannot show.
const NOT_SHOWN: &str = "no figure: in `ontime-lab bench inversion` (one CPU, UDP, a VM with tap and bridge) nothing \
                         waits for this (docs/results/bench/segments-inversion.md)";

/// All rules of this version.
pub static RULES: &[Rule] = &[
    Rule {
        id: RuleId::HostConfig,
        title: "NICs, queues and tenants that host.toml names exist",
        waits_behind: "bulk packets of its NIC or queue, which has no class: host.toml names a NIC or queue that does \
            not exist",
        cost: Cost { delay_us: 6_182, text: "that of row napi-threaded, at most", source: "" },
        cure: "correct /etc/ontime/host.toml",
        live_safe: "sets nothing; when a NIC appears, its link event starts a pass (net/core/dev.c, \
            register_netdevice)",
        plan: host_config::host_config,
    },
    Rule {
        id: RuleId::NapiThreaded,
        title: "every NAPI instance polled by its own thread",
        waits_behind: "any NAPI that is not threaded: a softirq moves its packets, on the thread that happens to run",
        cost: Cost {
            delay_us: 29_419,
            text: "7.2-rt: 1303/5323/6182 us by default, 584/1180/1680 with priorities only, 46/87/115 threaded; \
                   6.12-rt: 2230/18660/29419 by default, 351/656/666 threaded",
            source: PROBES,
        },
        cure: "thread the NAPI of every NIC (sysfs `threaded`, netlink NAPI_SET)",
        live_safe: "net/core/dev.c, netif_set_threaded: threads are made first, then a state bit is set; the next poll \
                    uses it, a running poll goes on, no packet is touched; ending threads waits for the interface to \
                    be up (6.17)",
        plan: nic_threads::napi_threaded,
    },
    Rule {
        id: RuleId::IrqThread,
        title: "interrupt threads placed by class",
        waits_behind: "interrupt threads of bulk NICs: PREEMPT_RT starts every one at FIFO 50",
        cost: Cost {
            delay_us: 6_182,
            text: "7.2-rt: 1303/5323/6182 us by default, 584/1180/1680 with Table 2's priorities; once NAPI is \
                   threaded, 1,000 requests of a VM show no difference",
            source: "measured by hand (docs/reference/hostnet.md); `ontime-lab bench inversion` \
                (docs/results/bench/segments-inversion.md); 7.2-rt, emulated, virtual clock",
        },
        cure: "FIFO 50-5l for a NIC of RT level l, SCHED_OTHER for a bulk one",
        live_safe: "kernel/irq/manage.c, irq_thread: an ordinary thread; sched_setattr only requeues it",
        plan: nic_threads::irq_thread,
    },
    Rule {
        id: RuleId::NapiThread,
        title: "NAPI threads placed by class",
        waits_behind: "bulk NAPI threads; and its own NAPI thread, which at SCHED_OTHER waits for bulk threads",
        cost: Cost {
            delay_us: 2_017,
            text: "a VM's p99 is 114 us without this rule, 83 with it; the slowest of 1,000 took 2,017 and 99 us",
            source: INVERSION,
        },
        cure: "FIFO 49-5l for a NIC of RT level l, SCHED_OTHER for a bulk one",
        live_safe: "net/core/dev.c, napi_threaded_poll: an ordinary thread; sched_setattr only requeues it",
        plan: nic_threads::napi_thread,
    },
    Rule {
        id: RuleId::NapiWeight,
        title: "short polls where softirqs share a lock on each CPU (PREEMPT_RT before 6.18)",
        waits_behind: "a bulk NIC's poll under way, 64 packets: it holds the lock that every softirq of the CPU takes",
        cost: Cost {
            delay_us: 666,
            text: "6.12-rt: threaded NAPI 351/656/666 us, 90/120/122 with the bulk NIC's weight cut to 4; 7.2-rt \
                46/87/115",
            source: PROBES,
        },
        cure: "at most 4 packets a poll: module ontime_napi for NICs, net.core.dev_weight for the backlog",
        live_safe: "net/core/dev.c, __napi_poll: a poll reads the weight once, so that a change is for the next one; \
                    process_backlog and __qdisc_run read theirs anew",
        plan: napi_weight::napi_weight,
    },
    Rule {
        id: RuleId::TapBatch,
        title: "packets of bulk VMs sent one by one where softirqs share a lock on each CPU (PREEMPT_RT before 6.18)",
        waits_behind: "a bulk VM's vhost thread that hands over up to 64 packets at once: it holds the lock that every \
            softirq of the CPU takes",
        cost: Cost {
            delay_us: 259,
            text: "a VM beside bulk VMs that receive TCP, p50/p99/max: 68/192/259 us, 67/97/121 with packets one by \
                one",
            source: "`ontime-lab bench rt-server --kernel 6.12-rt`: Debian 6.12-rt, emulated, virtual clock, one CPU, \
                     bulk VMs receive TCP (docs/results/bench/rt-server.md)",
        },
        cure: "the highest send buffer limit on bulk VMs' taps (TUNSETSNDBUF) in place of none: with a limit vhost \
            does not batch, and this one delays no packet",
        live_safe: "drivers/vhost/net.c, handle_tx_copy: whether to batch is looked up at each turn; a limit that \
            was set before stays",
        plan: tap_batch::tap_batch,
    },
    Rule {
        id: RuleId::Moderation,
        title: "receive interrupts of RT NICs not delayed by moderation",
        waits_behind: "its NIC's interrupt moderation, where a packet came a moment before",
        cost: Cost {
            delay_us: 250,
            text: "50 to 250 us between interrupts by default (Intel's dynamic conservative mode); VATC, Fig. 12: \
                latency grows with it",
            source: "the paper's hardware: Intel 1 Gb/s NIC",
        },
        cure: "ethtool -C: rx-usecs 0, adaptive-rx off, on NICs of RT tenants",
        live_safe: "drivers/net/ethernet/intel/e1000e/ethtool.c, e1000_set_coalesce, and those of igb, igc, i40e, ice \
                    and virtio_net: only the interval is written; drivers that may stop their queues for it are left \
                    alone, with a finding",
        plan: moderation::moderation,
    },
    Rule {
        id: RuleId::DeviceIrq,
        title: "interrupt threads of other devices below every RT thread",
        waits_behind: "interrupt threads of disks, consoles, USB: PREEMPT_RT starts them at FIFO 50, above its NIC's \
            NAPI thread",
        cost: Cost {
            delay_us: 100,
            text: "up to 0.1 ms for each thread while a disk or a console is busy (seen by `ontime trace`); beside a \
                disk that is read all the time, 1,000 requests of a VM show no difference",
            source: INVERSION,
        },
        cure: "SCHED_OTHER, nice -20, as for interrupt threads of bulk NICs",
        live_safe: "kernel/irq/manage.c, irq_thread: an ordinary thread; sched_setattr only requeues it",
        plan: device_irq::device_irq,
    },
    Rule {
        id: RuleId::BusyPoll,
        title: "a polling thread for each RT receive queue (method busypoll)",
        waits_behind: "its NIC's interrupt, the interrupt's thread and two wake-ups before the ring is looked at",
        cost: Cost {
            delay_us: 1_000,
            text: "KBP, Fig. 8: maximum round trip through a VM under 200 us with a polling thread, milliseconds with \
                NAPI",
            source: "the paper's hardware: IEICE'22, 10 Gb/s NIC, isolated CPUs",
        },
        cure: "NAPI_SET threaded=2 (6.19), before that the host module's busy_poll; the thread at FIFO 1, below every \
               vCPU, best on a CPU of its own (poll_cpu)",
        live_safe: "net/core/dev.c, napi_set_threaded: state bits of the instance; its thread goes on polling instead \
                    of waiting, and on the way back ends its poll as usual, which opens the interrupt. The module's: \
                    napi_busy_loop, as a socket's owner polls, ends by a poll as usual or by napi_watchdog",
        plan: busy_poll::busy_poll,
    },
    Rule {
        id: RuleId::Backlog,
        title: "the per-CPU backlog's threads below the vCPUs",
        waits_behind: "bulk threads, where its packets come by the per-CPU backlog shared by all: loopback, OVS \
            internal ports",
        cost: Cost {
            delay_us: 1_067,
            text: "not measured: a VM with tap and bridge has no packet there; for containers see rule veth",
            source: NOT_SHOWN,
        },
        cure: "backlog_napi/N at FIFO 2; macvtap or macvlan for RT tenants",
        live_safe: "net/core/dev.c, run_backlog_napi: an ordinary thread; sched_setattr only requeues it",
        plan: nic_threads::backlog,
    },
    Rule {
        id: RuleId::Veth,
        title: "RT containers' veth pairs off the per-CPU backlog",
        waits_behind: "the per-CPU backlog, which takes a veth pair's packets if the sending end has TSO or the \
            receiving end no GRO, as by default",
        cost: Cost {
            delay_us: 1_067,
            text: "containers on 7.2-rt: veth by default 357/1005/1067 us, veth with GRO and threads 74/101/110, \
                   macvlan 48/78/79",
            source: PROBES,
        },
        cure: "GRO on and TSO off at both ends, the container's too; or a macvlan, whose packets the NIC's NAPI thread \
            delivers",
        live_safe: "drivers/net/veth.c, veth_set_features: NAPI is made while packets pass; on reset it ends, and \
                    drops what is in its ring (veth_napi_del_range)",
        plan: veth::veth,
    },
    Rule {
        id: RuleId::SoftirqThreads,
        title: "ktimers, ksoftirqd and rcuc at low real-time priorities, below every vCPU",
        waits_behind: "timers (also TCP's) and RCU callbacks that a bulk thread keeps from running",
        cost: Cost {
            delay_us: 1_000,
            text: "not measured: a request by UDP waits for no timer, and requests by TCP were not tried",
            source: NOT_SHOWN,
        },
        cure: "ktimers and ksoftirqd at FIFO 2, rcuc at FIFO 4, as tuned's realtime profiles place them",
        live_safe: "kernel/softirq.c, smpboot threads: sched_setattr only requeues them",
        plan: host::softirq_threads,
    },
    Rule {
        id: RuleId::VnicPlace,
        title: "vhost and kvm-pit threads placed by their tenant's class",
        waits_behind: "its own vhost thread, which at SCHED_OTHER waits for bulk threads",
        cost: Cost { delay_us: 21_876, text: "a VM's p99 is 21,876 us without, 83 with this rule", source: INVERSION },
        cure: "FIFO 48-5l for an RT tenant of level l; a bulk tenant's never at an RT policy",
        live_safe: "drivers/vhost/vhost.c, kernel/vhost_task.c: an ordinary thread; sched_setattr only requeues it",
        plan: tenant_threads::vnic_place,
    },
    Rule {
        id: RuleId::VcpuPlace,
        title: "vCPU threads placed by their tenant's class",
        waits_behind: "its own vCPU, which at SCHED_OTHER waits for bulk threads",
        cost: Cost { delay_us: 31_408, text: "a VM's p99 is 31,408 us without, 83 with this rule", source: INVERSION },
        cure: "FIFO 47-5l for an RT tenant of level l, under its runtime cap; a bulk tenant's never at an RT policy",
        live_safe: "an ordinary thread of the VMM; sched_setattr only requeues it and moves it to no other CPU",
        plan: tenant_threads::vcpu_place,
    },
    Rule {
        id: RuleId::VmmPlace,
        title: "the main threads of RT VMs' monitors ahead of bulk",
        waits_behind: "bulk threads, if its vCPU leaves the guest for a device that QEMU emulates (a serial port, PCI \
                       configuration) while QEMU's main thread, at SCHED_OTHER, holds QEMU's lock to answer a \
                       management tool",
        cost: Cost {
            delay_us: 8_618,
            text: "7.2-rt, a guest's readings of a device that QEMU emulates, beside four busy threads and a tool that \
                   asks QEMU 50 times a second: slowest of 1,200 8,618 us without, 1,249 with",
            source: "`ontime-lab-tests a_vcpu_does_not_wait_for_its_vmm` (docs/reference/hostnet.md): \
                emulated, virtual clock",
        },
        cure: "FIFO 3, below every vCPU, under the tenant's runtime cap; or libvirt's <emulatorsched>, which is left \
            as it is",
        live_safe: "kernel/sched/syscalls.c: an ordinary thread of the VMM; sched_setattr only requeues it, and what \
            it starts does not inherit the place",
        plan: tenant_threads::vmm_place,
    },
    Rule {
        id: RuleId::InterruptContext,
        title: "vCPUs with a pending interrupt run before others of their level (method interrupt-context)",
        waits_behind: "a vCPU of another RT tenant of its level that computes",
        cost: Cost {
            delay_us: 10_923,
            text: "7.2-rt, an RT VM of the same level that computes for 20 or 60 % of the time: a request's p99 10,156 \
                   or 3,834 us, its slowest 10,923 or 4,197; with this method p99 155 or 152",
            source: "`ontime-lab bench xen-arm --beside rt` (docs/results/bench/xen-arm.md): emulated, virtual clock",
        },
        cure: "vCPUs at FIFO 46-5l, and at 47-5l while an interrupt is pending; irq_work/N, which reports the \
            interrupt to the daemon, at FIFO 55",
        live_safe: "kernel/irq_work.c, irq_workd: an ordinary thread; sched_setattr only requeues it. \
                    arch/x86/kvm/lapic.c, __apic_accept_irq: the tracepoint changes nothing",
        plan: interrupt_context::interrupt_context,
    },
    Rule {
        id: RuleId::ExclusiveCpu,
        title: "one CPU kept for the RT group",
        waits_behind: "bulk threads and interrupts of the same CPU",
        cost: Cost {
            delay_us: 203,
            text: "Access'18, Table 3: p99 202.9 us with priorities only, 96.0 us with a CPU of its own, at 10.4 of \
                18.8 Gb/s",
            source: "the paper's hardware: two CPUs, three 10 Gb/s NICs",
        },
        cure: "interrupts of RT NICs, vhost and vCPU threads of RT tenants on the RT CPU; all others on the rest",
        live_safe: "kernel/irq/manage.c, irq_set_affinity: the next interrupt goes to the new CPU; threads move by the \
                    scheduler's own migration. A vCPU moves once, as the method requires",
        plan: exclusive::exclusive_cpu,
    },
    Rule {
        id: RuleId::RtTxQueue,
        title: "a transmit queue of its own for RT packets on a shared NIC",
        waits_behind: "bulk packets in the same qdisc, BQL and ring",
        cost: Cost {
            delay_us: 2_545,
            text: "a qdisc shared between classes: 7.2-rt 55/2352/2545 us (fq_codel), 6.12-rt 44/111/122",
            source: PROBES,
        },
        cure: "the NIC's last transmit queue taken out of XPS for others, and a clsact egress filter that puts RT \
            packets on it",
        live_safe: "net/core/net-sysfs.c, xps_cpus_store: maps are replaced under RCU; net/sched/sch_ingress.c: clsact \
                    stands beside the root qdisc, which is never replaced",
        plan: tx_queue::rt_tx_queue,
    },
    Rule {
        id: RuleId::QdiscBypass,
        title: "no qdisc on a NIC that both classes send by with one queue; bulk VMs wait at their taps",
        waits_behind: "a bulk sender that is preempted in the qdisc: it also sends the packets that other threads \
            enqueue meanwhile, and inherits no priority (7.2)",
        cost: Cost {
            delay_us: 80,
            text: "four bulk VMs that send small packets, p95 of a request: 80 us with the qdisc (bulk senders at \
                   FIFO 1), 78 without; the VMs send 23,816 and 66,611 packets a second",
            source: "`ontime-lab bench vatc`: Debian 7.2-rt, emulated, virtual clock, one CPU \
                (docs/results/bench/vatc.md)",
        },
        cure: "root qdisc noqueue: senders take the queue's lock, whose owner inherits their priority; a send \
               buffer for each bulk VM's tap in place of BQL, so that the ring is never full",
        live_safe: "it drops what waits in the qdisc that the kernel chose, once (net/sched/sch_generic.c, \
            dev_deactivate)",
        plan: qdisc_bypass::qdisc_bypass,
    },
    Rule {
        id: RuleId::SkbDefer,
        title: "packet buffers freed on the CPU that used them",
        waits_behind: "skb_defer_free_flush: buffers of other CPUs freed in the RT NIC's poll",
        cost: Cost {
            delay_us: 10,
            text: "up to 64 buffers of other CPUs' sockets freed before an RT packet is polled; not measured: on \
                one CPU there are none",
            source: NOT_SHOWN,
        },
        cure: "net.core.skb_defer_max=0",
        live_safe: "net/core/skbuff.c, skb_attempt_defer_free: read anew for every buffer",
        plan: host::skb_defer,
    },
    Rule {
        id: RuleId::HaltPoll,
        title: "KVM does not poll after a vCPU's hlt",
        waits_behind: "a FIFO vCPU of another RT tenant that polls after its hlt",
        cost: Cost {
            delay_us: 200,
            text: "up to halt_poll_ns (200 us by default) of CPU after every hlt, at FIFO priority, where a vCPU is \
                   alone on its CPU; not measured: where all share one CPU it does not poll",
            source: NOT_SHOWN,
        },
        cure: "halt_poll_ns=0",
        live_safe: "virt/kvm/kvm_main.c, kvm_vcpu_max_halt_poll_ns: read anew at every hlt, of running VMs too",
        plan: host::halt_poll,
    },
    Rule {
        id: RuleId::RtProtections,
        title: "the kernel's protections against FIFO threads off while runtime caps replace them",
        waits_behind: "the fair server (and 7.2's ext server), which runs bulk threads for 50 ms a second before every \
            FIFO thread",
        cost: Cost {
            delay_us: 51_348,
            text: "polling on one CPU: 48/45606/51348 us with the fair server, 48/55/174 without",
            source: PROBES,
        },
        cure: "the servers' runtime 0, only while every RT tenant is under a runtime cap",
        live_safe: "kernel/sched/debug.c, sched_fair_server_write: the server of one run queue is stopped and started \
                    under its lock; restored before the caps go",
        plan: host::rt_protections,
    },
];

/// The rule of this name.
pub fn rule(id: RuleId) -> Option<&'static Rule> {
    RULES.iter().find(|rule| rule.id == id)
}
