//! A synthetic host with many VMs and queues, for tests and benchmarks of planning.
#![allow(dead_code)] // each takes what it needs

use std::collections::BTreeMap;

use ontime_hostnet::inventory::{
    Cpus, Inventory, Irq, Kernel, KernelThread, KernelThreadKind, Kvm, Napi, Nic, Protections, TxQueue,
};
use ontime_hostnet::{CpuSet, Intent, IrqId, Knob, NicId, Plan, Refusal, RuleId, Value};
use ontime_tenants::{
    Class, ClassSource, Kind, Level, LibvirtTuning, Namer, Policy, Tenant, TenantThread, ThreadId, ThreadRole, Vnic,
};

/// CPUs of the synthetic host.
pub(super) const CPUS: u32 = 64;

fn id(tid: i32) -> ThreadId {
    ThreadId { pid: tid, tid, start_time: 1000 + u64::from(tid.unsigned_abs()) }
}

fn kernel_thread(tid: i32, kind: KernelThreadKind, comm: String, policy: Policy) -> KernelThread {
    KernelThread { id: id(tid), kind, comm, policy }
}

/// A PREEMPT_RT 7.2 host whose physical NICs `eth0`, `eth1`, ... have `queues` queues each, with NAPI threaded or not.
pub(super) fn host(nics: u32, queues: u32, threaded: bool) -> Inventory {
    let online: CpuSet = (0..CPUS).collect();
    let mut inventory = Inventory {
        kernel: Kernel {
            release: "7.2.12-rt-amd64".to_owned(),
            version: (7, 2),
            realtime: true,
            threaded_irqs: true,
            ..Kernel::default()
        },
        cpus: Cpus { online: online.clone(), ..Cpus::default() },
        kvm: Kvm { device: true, halt_poll_ns: Some(200_000), ..Kvm::default() },
        protections: Protections {
            readable: true,
            servers: ["fair_server", "ext_server"]
                .map(|server| (server.to_owned(), (0..CPUS).map(|cpu| (cpu, 50_000_000)).collect()))
                .into(),
            rt_runtime_us: Some(950_000),
        },
        sysctls: BTreeMap::from([("net/core/skb_defer_max".to_owned(), "64".to_owned())]),
        ..Inventory::default()
    };
    for cpu in 0..CPUS {
        for (at, name, kind) in [
            (10_000, "ksoftirqd", KernelThreadKind::Ksoftirqd(cpu)),
            (20_000, "ktimers", KernelThreadKind::Ktimers(cpu)),
            (30_000, "rcuc", KernelThreadKind::Rcuc(cpu)),
            (40_000, "backlog_napi", KernelThreadKind::BacklogNapi(cpu)),
        ] {
            let tid = at + i32::try_from(cpu).unwrap();
            inventory.threads.push(kernel_thread(tid, kind, format!("{name}/{cpu}"), Policy::Fifo(1)));
        }
    }
    for number in 0..nics {
        nic(&mut inventory, number, queues, threaded, &online);
    }
    inventory
}

fn nic(inventory: &mut Inventory, number: u32, queues: u32, threaded: bool, online: &CpuSet) {
    let name = format!("eth{number}");
    let base = number * 1000;
    let napi = |queue: u32| Napi {
        id: 8193 + base + queue,
        irq: Some(100 + base + queue),
        pid: threaded.then(|| i32::try_from(60_000 + base + queue).unwrap()),
        threaded: Some(u32::from(threaded)),
        rx_queues: vec![queue],
        tx_queues: vec![queue],
    };
    for queue in 0..queues {
        let irq = 100 + base + queue;
        inventory.irqs.push(Irq {
            id: IrqId { irq, chip: format!("PCI-MSIX-0000:0{number}:00.0"), hwirq: queue.to_string() },
            actions: vec![format!("{name}-TxRx-{queue}")],
            affinity: online.clone(),
            settable: true,
            device: Some(format!("0000:0{number}:00.0")),
            network: true,
            virtual_of: None,
            elsewhere: None,
        });
        let tid = i32::try_from(50_000 + base + queue).unwrap();
        let comm = format!("irq/{irq}-{name}-TxRx-{queue}");
        inventory.threads.push(kernel_thread(tid, KernelThreadKind::Irq(irq), comm, Policy::Fifo(50)));
        if let Some(pid) = napi(queue).pid {
            let comm = format!("napi/{name}-{}", napi(queue).id);
            inventory.threads.push(kernel_thread(pid, KernelThreadKind::Napi(napi(queue).id), comm, Policy::BULK));
        }
    }
    inventory.nics.push(Nic {
        id: NicId { ifindex: 2 + number, name },
        physical: true,
        driver: Some("ixgbe".to_owned()),
        up: true,
        carrier: true,
        qdisc: Some("mq".to_owned()),
        rx_queues: queues,
        tx_queues: (0..queues)
            .map(|queue| TxQueue { xps_cpus: Some(CpuSet::from_iter([queue % CPUS])), bql_limit_max: Some(1 << 20) })
            .collect(),
        threaded: Some(u32::from(threaded)),
        napis: (0..queues).map(napi).collect(),
        irqs: (0..queues).map(|queue| 100 + base + queue).collect(),
        ..Nic::default()
    });
}

/// A VM of a class with `vcpus` vCPUs, a vhost and a kvm-pit thread. Its tap leads to a NIC, and is added to the host.
pub(super) fn vm(inventory: &mut Inventory, number: i32, class: Class, vcpus: u32, lower: &str) -> Tenant {
    let pid = 1_000_000 + number * 100;
    let tap = format!("tap{number}");
    let thread = |at: i32, role: ThreadRole, comm: String| TenantThread {
        id: ThreadId { pid, tid: pid + at, start_time: 5000 },
        role,
        comm,
        policy: Policy::BULK,
        affinity: format!("0-{}", CPUS - 1),
        last_cpu: 0,
        libvirt: LibvirtTuning::default(),
    };
    let mut threads = vec![thread(0, ThreadRole::Emulator, "qemu-system-x86".to_owned())];
    threads.extend(
        (0..vcpus)
            .map(|vcpu| thread(1 + i32::try_from(vcpu).unwrap(), ThreadRole::Vcpu(vcpu), format!("CPU {vcpu}/KVM"))),
    );
    threads.push(thread(50, ThreadRole::Vhost, format!("vhost-{pid}")));
    threads.push(thread(51, ThreadRole::KvmPit, format!("kvm-pit/{pid}")));
    inventory.nics.push(Nic {
        id: NicId { ifindex: 1000 + number.unsigned_abs(), name: tap.clone() },
        kind: Some("tun".to_owned()),
        up: true,
        threaded: Some(0),
        ..Nic::default()
    });
    Tenant {
        name: format!("vm{number}"),
        uuid: None,
        kind: Kind::Qemu,
        owner: 0,
        namer: Namer::User(0),
        process: ThreadId { pid, tid: pid, start_time: 5000 },
        cgroup: None,
        class,
        class_source: ClassSource::Default,
        runtime_cap: 0.9,
        threads,
        vnics: vec![Vnic { ifname: tap, lower: vec![lower.to_owned()], below: Vec::new() }],
        attached: Vec::new(),
    }
}

/// An RT class.
pub(super) fn rt(level: u8) -> Class {
    Class::Rt(Level::try_from(level).unwrap())
}

/// A large host: 100 VMs, every tenth of them RT, on an RT and a bulk NIC with 64 queues in all.
pub(super) fn hundred_vms() -> (Inventory, Intent) {
    let mut inventory = host(2, 32, true);
    let tenants = (0..100)
        .map(|number| {
            let (class, nic) = if number % 10 == 0 { (rt(0), "eth0") } else { (Class::Bulk, "eth1") };
            vm(&mut inventory, number, class, 4, nic)
        })
        .collect();
    let intent = Intent { tenants, caps_in_force: true, ..Intent::default() };
    (inventory, intent)
}

/// Policies by thread name.
pub(super) fn policies(plan: &Plan) -> BTreeMap<String, Policy> {
    plan.settings
        .iter()
        .filter_map(|setting| match (&setting.knob, &setting.value) {
            (Knob::ThreadPolicy { comm, .. }, Value::Policy(policy)) => Some((comm.clone(), *policy)),
            _ => None,
        })
        .collect()
}

pub(super) fn of_rule(plan: &Plan, rule: RuleId) -> Vec<(String, String)> {
    let of = plan.settings.iter().filter(|setting| setting.rule == rule);
    of.map(|setting| (setting.knob.to_string(), setting.value.to_string())).collect()
}

pub(super) fn refusals(plan: &Plan, rule: RuleId) -> Vec<Refusal> {
    plan.findings.iter().filter(|finding| finding.rule == rule).filter_map(|finding| finding.refusal).collect()
}

/// An RT VM (level 1) on eth0, a bulk VM on eth1.
pub(super) fn two_vms() -> (Inventory, Intent) {
    let mut inventory = host(2, 2, true);
    let tenants = vec![vm(&mut inventory, 1, rt(1), 2, "eth0"), vm(&mut inventory, 2, Class::Bulk, 1, "eth1")];
    (inventory, Intent { tenants, caps_in_force: true, ..Intent::default() })
}

/// An RT and a bulk VM on the same NIC.
pub(super) fn mixed(queues: u32) -> (Inventory, Intent) {
    let mut inventory = host(1, queues, true);
    let tenants = vec![vm(&mut inventory, 1, rt(0), 1, "eth0"), vm(&mut inventory, 2, Class::Bulk, 1, "eth0")];
    (inventory, Intent { tenants, ..Intent::default() })
}
