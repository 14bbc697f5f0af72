//! Checks of kernel, processor and other services, which no rule sets.

use ontime_tenants::{Kind, proc::printable};

use super::upkeep::{pinned, rt_cpus};
use super::{Check, ENDLESS, State};
use crate::cpus::CpuSet;
use crate::intent::Intent;
use crate::inventory::{Conflict, IdleState, Inventory, Lockdown};
use crate::kvm::KvmProbe;
use crate::rules::{NAPI_LISTED, NO_BH_LOCK};

/// The first kernel that can thread NAPI.
const THREADED_NAPI: (u32, u32) = (5, 12);
/// An idle state with a longer exit latency causes a warning, us: a fifth of a request's response time without load.
const IDLE_LATENCY_US: u64 = 10;
/// What a busy sibling adds to a request, us: half of its response time without load.
const SIBLING_US: u32 = 25;

pub(super) fn kernel(inventory: &Inventory) -> Check {
    let kernel = &inventory.kernel;
    let title = "kernel version";
    let source = "measured by hand: Debian kernels, emulated, virtual clock (docs/reference/hostnet.md)";
    let found = |what: &str| format!("{}: {what}", kernel.release);
    if kernel.version < THREADED_NAPI {
        Check::new("kernel", title, State::Critical, found("cannot thread NAPI"))
            .costs(1_680, "7.2-rt without threaded NAPI: 584/1180/1680 us, with it 46/87/115", source)
            .remedy("boot a kernel of 6.18 or later with PREEMPT_RT")
    } else if kernel.version < NO_BH_LOCK {
        let listed = if kernel.version < NAPI_LISTED { ", and NAPI threads are known by name only (6.8)" } else { "" };
        let what = format!("softirqs of a CPU still share one lock on PREEMPT_RT{listed}");
        // The probe measures a host's thread, the bench a VM: their figures cannot be compared.
        let (delay, cost, source) = if inventory.nics.iter().any(|nic| nic.napi_weight.is_some()) {
            (
                170,
                "what remains with polls of 4 packets (napi-weight) and bulk VMs' packets one by one (tap-batch): \
                 20,000 requests of a VM, p99/p99.9/max 105/120/170 us under small packets and 98/113/147 under TCP, \
                 where 7.2-rt has 82/90/127 and 82/97/121",
                "`ontime-lab bench rt-server`: Debian 6.12-rt and 7.2-rt, emulated, virtual clock, one CPU \
                 (docs/results/bench/rt-server.md)",
            )
        } else {
            (
                666,
                "6.12-rt: 351/656/666 us with threaded NAPI, where 7.2-rt has 46/87/115; row napi-weight \
                 shows what remains with the host module",
                source,
            )
        };
        Check::new("kernel", title, State::Warning, found(&what))
            .costs(delay, cost, source)
            .remedy("boot a kernel of 6.18 or later (Debian: from backports)")
    } else {
        Check::new("kernel", title, State::Ok, found("has every feature that the core rules use"))
    }
}

pub(super) fn preempt_rt(inventory: &Inventory) -> Check {
    let title = "PREEMPT_RT";
    if inventory.kernel.realtime {
        return Check::new("preempt-rt", title, State::Ok, "the kernel is PREEMPT_RT");
    }
    let found = if inventory.kernel.threaded_irqs {
        "not PREEMPT_RT; interrupts are threaded by threadirqs, but softirqs and spinlocks still keep RT threads from \
        running"
    } else {
        "not PREEMPT_RT: interrupt handlers and softirqs run before every RT thread"
    };
    Check::new("preempt-rt", title, State::Critical, found)
        .costs(
            225,
            "Access'18, Table 3: p99 225.0 us on a stock kernel, 202.9 us with PREEMPT_RT and priorities alone",
            "the paper's hardware",
        )
        .remedy("boot a PREEMPT_RT kernel (Debian: apt install linux-image-rt-amd64)")
}

pub(super) fn kvm(inventory: &Inventory, probe: &KvmProbe) -> Check {
    let title = "KVM can run guests";
    let nested = if inventory.kernel.hypervisor { " (this host is itself a guest)" } else { "" };
    let cost = "VMs do not start, or run without KVM, some tens of times slower";
    let lab = "use hardware with virtualization on, or `ontime-lab`, which emulates a host";
    match probe {
        KvmProbe::Works => Check::new("kvm", title, State::Ok, format!("a probe guest ran to its end{nested}")),
        KvmProbe::Absent(why) => Check::new("kvm", title, State::Critical, format!("{why}{nested}"))
            .costs(ENDLESS, cost, "")
            .remedy("load kvm_intel or kvm_amd, with virtualization on in the firmware"),
        KvmProbe::Broken(why) | KvmProbe::Hangs(why) => {
            Check::new("kvm", title, State::Critical, format!("{why}{nested}; ordinary guests fail or hang"))
                .costs(ENDLESS, cost, "")
                .remedy(lab)
        }
        KvmProbe::Unknown(why) => Check::new("kvm", title, State::Unknown, why.clone())
            .costs(ENDLESS, cost, "")
            .remedy("start a guest to test KVM"),
    }
}

pub(super) fn idle_states(inventory: &Inventory) -> Check {
    let (id, title) = ("idle-states", "C-states");
    let cpus = &inventory.cpus;
    let whole = cpus.dma_latency_us.and_then(|limit| u64::try_from(limit).ok()).unwrap_or(u64::MAX);
    let limit = |cpu| cpus.latency_limits_us.get(&cpu).copied().unwrap_or(u64::MAX).min(whole);
    let slow: Vec<(&IdleState, u64, CpuSet)> = cpus
        .idle_states
        .iter()
        .filter_map(|state| Some((state, state.latency_us.filter(|us| *us > IDLE_LATENCY_US)?)))
        .map(|(state, us)| (state, us, state.enabled_on.iter().filter(|cpu| us <= limit(*cpu)).collect::<CpuSet>()))
        .filter(|(_, _, open)| !open.is_empty())
        .collect();
    let unread = cpus.idle_states.iter().filter(|state| state.latency_us.is_none());
    let unread = unread.flat_map(|state| state.enabled_on.iter()).filter(|cpu| limit(*cpu) > IDLE_LATENCY_US);
    let unread: CpuSet = unread.collect();
    if cpus.idle_states.is_empty() {
        return Check::new(id, title, State::Ok, "the kernel has no idle states to choose from");
    }
    let mut told: Vec<String> =
        slow.iter().map(|(state, us, open)| format!("{} ({us} us) on CPUs {open}", state.name)).collect();
    if !unread.is_empty() {
        told.push(format!("states of CPUs {unread} whose latency cannot be read"));
    }
    let state = match (slow.is_empty(), unread.is_empty()) {
        (false, _) => State::Warning,
        (true, false) => State::Unknown,
        (true, true) => {
            let found = format!("none that takes longer than {IDLE_LATENCY_US} us to leave");
            return Check::new(id, title, State::Ok, found);
        }
    };
    let longest = slow.iter().map(|(_, us, _)| *us).max().and_then(|us| u32::try_from(us).ok());
    Check::new(id, title, state, format!("may be entered: {}", told.join(", ")))
        .costs(
            longest.unwrap_or(ENDLESS),
            "the state's exit latency, added to the first packet after a pause",
            "the states' own figures",
        )
        .remedy(
            "cpupower idle-set -D 10, or keep /dev/cpu_dma_latency open with a limit of 10 us or less; of single CPUs: \
             echo 10 > /sys/devices/system/cpu/cpuN/power/pm_qos_resume_latency_us",
        )
}

pub(super) fn governor(inventory: &Inventory) -> Check {
    let (id, title) = ("governor", "CPU frequency governor");
    let governors = &inventory.cpus.governors;
    if governors.is_empty() {
        return Check::new(id, title, State::Ok, "the kernel does not scale frequencies here");
    }
    let other: Vec<String> = governors
        .iter()
        .filter(|(name, _)| name.as_str() != "performance")
        .map(|(name, cpus)| format!("{name} on CPUs {cpus}"))
        .collect();
    if other.is_empty() {
        return Check::new(id, title, State::Ok, "performance on all CPUs");
    }
    Check::new(id, title, State::Warning, other.join(", "))
        .costs(100, "the first requests after a pause run at a lower clock", "")
        .remedy("cpupower frequency-set -g performance")
}

pub(super) fn clocksource(inventory: &Inventory) -> Check {
    let (id, title) = ("clocksource", "clock source");
    match inventory.cpus.clocksource.as_str() {
        "" => Check::new(id, title, State::Unknown, "cannot be read")
            .costs(5, "about 1 us a reading, several readings a packet, where it is not the TSC", "")
            .remedy("mount sysfs, and look at /sys/devices/system/clocksource/clocksource0/current_clocksource"),
        name if READ_AT_ONCE.contains(&name) => Check::new(id, title, State::Ok, name),
        "tsc-early" => Check::new(id, title, State::Warning, "tsc-early: the kernel still measures the TSC")
            .costs(1, "none now; about 1 us a reading if it gives the TSC up", "")
            .remedy("look again some seconds after the boot"),
        name => Check::new(id, title, State::Warning, format!("{name}: not known to have fast readings"))
            .costs(5, "where a reading leaves the CPU (hpet, acpi_pm) about 1 us, several readings a packet", "")
            .remedy(other_clock(inventory, name)),
    }
}

/// Clock sources that are read from a register or a shared page: the TSC, paravirtual clocks based on it, and the
/// counters of ARM, Power, s390, RISC-V and LoongArch.
const READ_AT_ONCE: [&str; 10] = [
    "tsc",
    "kvm-clock",
    "xen",
    "hyperv_clocksource_tsc_page",
    "arch_sys_counter",
    "timebase",
    "tod",
    "riscv_clocksource",
    "Constant",
    "vmware-clock",
];
/// Clock sources that an x86 kernel uses if it does not trust the TSC.
const INSTEAD_OF_TSC: [&str; 5] = ["hpet", "acpi_pm", "pit", "refined-jiffies", "hyperv_clocksource_msr"];

fn other_clock(inventory: &Inventory, name: &str) -> &'static str {
    if inventory.cpus.has_tsc {
        "echo tsc > /sys/devices/system/clocksource/clocksource0/current_clocksource, and find out what chose another \
         (clocksource= at boot)"
    } else if INSTEAD_OF_TSC.contains(&name) {
        "find out why the TSC was given up (dmesg | grep -i tsc); tsc=reliable where it is known to be good"
    } else {
        "choose another of /sys/devices/system/clocksource/clocksource0/available_clocksource, where there is one"
    }
}

pub(super) fn smt(inventory: &Inventory) -> Check {
    let (id, title) = ("smt", "hyper-threads");
    let cost = "a bulk thread on a sibling slows an RT thread, by up to half";
    let cpus = &inventory.cpus;
    match cpus.smt_active {
        Some(false) => Check::new(id, title, State::Ok, "no two CPUs share a core"),
        None => Check::new(id, title, State::Unknown, "the kernel does not say")
            .costs(SIBLING_US, cost, "")
            .remedy("mount sysfs, and look whether lscpu has more than one thread a core"),
        Some(true) => {
            let cores: Vec<String> = cpus.siblings.iter().map(|core| format!("CPUs {core}")).collect();
            let in_cores: usize = cpus.siblings.iter().map(CpuSet::len).sum();
            let found = match cores.as_slice() {
                [] => "CPUs share cores".to_owned(),
                _ if in_cores < cpus.online.len() => {
                    format!("some cores are shared ({}); every other CPU has its own", named(&cores, "; "))
                }
                _ => format!("every core is shared ({})", named(&cores, "; ")),
            };
            Check::new(id, title, State::Warning, found).costs(SIBLING_US, cost, "").remedy(
                "echo off > /sys/devices/system/cpu/smt/control, or boot with nosmt; or keep bulk threads off the \
                 CPUs that share a core with an RT thread's CPU",
            )
        }
    }
}

/// Maximum of names in a list.
const NAMED: usize = 8;

fn named(all: &[String], between: &str) -> String {
    let first = all.get(..NAMED).unwrap_or(all).join(between);
    if all.len() > NAMED { format!("{first}{between}and {} more", all.len() - NAMED) } else { first }
}

pub(super) fn guest_memory(inventory: &Inventory) -> Check {
    let (id, title) = ("guest-memory", "the kernel's background work on guests' memory");
    let memory = &inventory.memory;
    let mut found = Vec::new();
    let mut remedies = Vec::new();
    if memory.merged {
        found.push("equal pages are merged (KSM)".to_owned());
        remedies.push("echo 2 > /sys/kernel/mm/ksm/run (and stop ksmtuned)");
    }
    if let Some(word) = &memory.collapsed {
        found.push(format!("pages are moved together into huge ones (transparent_hugepage {word})"));
        remedies.push("echo never > /sys/kernel/mm/transparent_hugepage/enabled");
    }
    if memory.balanced {
        found.push("pages are unmapped to see which node uses them (NUMA balancing)".to_owned());
        remedies.push("sysctl kernel.numa_balancing=0");
    }
    if found.is_empty() {
        return Check::new(id, title, State::Ok, "it neither merges nor moves pages");
    }
    Check::new(id, title, State::Warning, found.join("; "))
        .costs(1_000, "a vCPU that touches such a page leaves its guest and waits for it", "")
        .remedy(format!(
            "lock the memory of RT VMs (libvirt: <memoryBacking> with <hugepages/> and <locked/>); or {}",
            remedies.join(", ")
        ))
}

pub(super) fn kvm_upkeep(inventory: &Inventory) -> Check {
    let (id, title) = ("kvm-upkeep", "KVM's background work that stops vCPUs");
    let mut found = Vec::new();
    let mut options = Vec::new();
    if inventory.kvm.clock_sync {
        found.push("it corrects all vCPUs' clocks every 300 s (kvmclock_periodic_sync)");
        options.push("kvmclock_periodic_sync=0");
    }
    if inventory.kvm.page_recovery {
        found.push("it recovers split huge pages every minute (nx_huge_pages)");
        options.push("nx_huge_pages_recovery_ratio=0");
    }
    if found.is_empty() {
        return Check::new(id, title, State::Ok, "nothing");
    }
    Check::new(id, title, State::Warning, found.join("; "))
        .costs(50, "it stops every vCPU of every guest", "")
        .remedy(format!("echo 'options kvm {}' > /etc/modprobe.d/kvm-rt.conf, and reload kvm", options.join(" ")))
}

pub(super) fn pressure(inventory: &Inventory) -> Check {
    let (id, title) = ("pressure", "pressure stall information (PSI)");
    if !inventory.kernel.pressure {
        return Check::new(id, title, State::Ok, "the kernel does not keep it");
    }
    let found = "on: the kernel counts each wake-up and each thread switch, once for each level of the thread's cgroup";
    Check::new(id, title, State::Warning, found)
        .costs(
            1,
            "2,452 of the 53,334 instructions of an outsourced request, 1,507 of the 23,397 of a host process's, with \
             one level",
            "`ontime-lab bench path` (docs/results/bench/path.md): Debian 7.2-rt, emulated, virtual clock",
        )
        .remedy("boot with psi=0, where no program reads it (systemd-oomd does)")
}

/// Where back end `deadline` keeps budgets.
pub(super) fn budget_timer(inventory: &Inventory, intent: &Intent) -> Check {
    let (id, title) = ("budget-timer", "a timer ends the budgets of back end `deadline`");
    let (state, found, remedy) = match inventory.kernel.hrtick_dl {
        _ if !intent.deadline_backend => return Check::new(id, title, State::Ok, "sched.toml has another back end"),
        Some(true) => return Check::new(id, title, State::Ok, "HRTICK_DL is on"),
        Some(false) => (
            State::Warning,
            "HRTICK_DL is off: the budget of a SCHED_DEADLINE thread ends at a tick, too early or too late",
            "echo HRTICK_DL > /sys/kernel/debug/sched/features, after each boot; or choose backend = \"paced\" in \
             /etc/ontime/sched.toml",
        ),
        None => (
            State::Unknown,
            "/sys/kernel/debug/sched/features could not be read, or does not have HRTICK_DL",
            "mount debugfs (mount -t debugfs debugfs /sys/kernel/debug) and run this as root; where the kernel denies \
             or lacks it, choose backend = \"paced\" in /etc/ontime/sched.toml",
        ),
    };
    Check::new(id, title, state, found)
        .costs(
            3_686,
            "a budget of 3 ms ended after 692 to 6,686 us; with HRTICK_DL after 2,996.5 to 2,997.2 us",
            "Debian 7.2-rt, emulated, virtual clock",
        )
        .remedy(remedy)
}

pub(super) fn lockdown(inventory: &Inventory) -> Check {
    let (id, title) = ("lockdown", "kernel lockdown");
    match inventory.kernel.lockdown {
        Lockdown::None => Check::new(id, title, State::Ok, "not in force"),
        Lockdown::Integrity | Lockdown::Confidentiality => {
            Check::new(id, title, State::Warning, "in force: debugfs is denied, so the fair server stays on")
                .costs(51_348, "see rt-protections", "")
                .remedy("boot without Secure Boot, or run RT tenants on nohz_full and rcu_nocbs CPUs")
        }
    }
}

/// How kubelet sets containers' CPUs, and the remedy; none if its CPU manager is off.
fn cpu_manager(inventory: &Inventory, intent: &Intent) -> Option<(String, String)> {
    let Some(manager) = &inventory.cpu_manager else {
        let remedy = "leave containers' CPUs to it, or set cpuManagerPolicy: none";
        return Some(("where its CPU manager is static, sets containers' CPUs again every 10 s".into(), remedy.into()));
    };
    if manager.policy == "none" {
        return None;
    }
    let (policy, shared) = (printable(manager.policy.as_bytes()), &manager.shared);
    let mut told = format!("sets containers' CPUs again every 10 s (CPU manager {policy}: CPUs {shared} for all");
    if !manager.exclusive.is_empty() {
        told.push_str(&format!(", CPUs {} for single ones", manager.exclusive));
    }
    told.push(')');
    let mut remedy = "leave containers' CPUs to it, or set cpuManagerPolicy: none".to_owned();
    let vms = intent.rt_tenants().filter(|tenant| tenant.kind != Kind::Container);
    let both: CpuSet = vms.flat_map(|vm| pinned(inventory, vm).iter().collect::<Vec<_>>()).collect();
    let both: CpuSet = both.iter().filter(|cpu| shared.contains(*cpu) || manager.exclusive.contains(*cpu)).collect();
    if !both.is_empty() {
        told.push_str(&format!(", of which RT VMs have CPUs {both}"));
        remedy.push_str(&format!("; keep RT VMs' CPUs from it (kubelet: reservedSystemCPUs with {both})"));
    }
    Some((told, remedy))
}

/// What is wrong where a polling thread of Open vSwitch may run on an RT tenant's CPU, and the remedy.
fn polled(inventory: &Inventory, intent: &Intent) -> Option<(String, String)> {
    let rt = rt_cpus(inventory, intent);
    let shared = |(_, cpus): &&(String, CpuSet)| cpus.iter().any(|cpu| rt.contains(cpu));
    let (thread, cpus) = inventory.pollers.iter().find(shared)?;
    let what = format!(
        "its thread {thread} polls on CPU {cpus}, to which an RT tenant is kept: it forwards no packet while the \
         tenant runs"
    );
    let remedy = format!(
        "leave CPU {cpus} out of Open vSwitch's mask (ovs-vsctl set Open_vSwitch . other_config:pmd-cpu-mask=...), or \
         pin the RT tenant to other CPUs"
    );
    Some((what, remedy))
}

/// Services that set the same knobs as Ontime, or related ones, as far as that matters on this host.
pub(super) fn conflicts(inventory: &Inventory, intent: &Intent) -> Check {
    let (id, title) = ("conflicts", "services that set the same knobs");
    let at_stake = intent.rt_tenants().next().is_some();
    let mut told = Vec::new();
    let mut remedies = Vec::new();
    for Conflict { service, pid } in &inventory.conflicts {
        let (what, remedy) = match service.as_str() {
            "kubelet" | "kubelite" | "k3s-server" | "k3s-agent" if at_stake => match cpu_manager(inventory, intent) {
                Some(told) => told,
                None => continue,
            },
            "ovs-vswitchd" if at_stake && !inventory.pollers.is_empty() => match polled(inventory, intent) {
                Some(told) => told,
                None => continue,
            },
            "ovs-vswitchd" if at_stake => (
                "handles the first packet of each flow, at normal priority".to_owned(),
                "keep RT tenants off Open vSwitch, or give their flows by ovs-ofctl and a max-idle without \
                 end"
                .to_owned(),
            ),
            "scx_loader" => (
                "loads BPF schedulers, beside which Ontime's own cannot be loaded".to_owned(),
                "systemctl disable --now \
                    scx_loader"
                    .to_owned(),
            ),
            "irqbalance" | "tuned" => (
                "moves interrupts and threads, or changes their priority".to_owned(),
                format!("systemctl disable --now {service}"),
            ),
            _ => continue,
        };
        told.push(format!("{service} (process {pid}) {what}"));
        remedies.push(remedy);
    }
    if let Some(scheduler) = inventory.cpus.bpf_scheduler.as_deref().filter(|name| !name.contains("ontime")) {
        told.push(format!("BPF scheduler {} is loaded", printable(scheduler.as_bytes())));
        remedies.push(
            "end the program that loaded it, where Ontime is to keep reserved CPU time by \
            sched_ext"
                .to_owned(),
        );
    }
    if told.is_empty() {
        return Check::new(id, title, State::Ok, "none of those that are known runs");
    }
    Check::new(id, title, State::Warning, format!("running: {}", told.join("; ")))
        .costs(6_182, "interrupts and threads move or change priority until Ontime's next pass corrects them", "")
        .remedy(remedies.join("; "))
}
