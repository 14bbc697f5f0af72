//! What is traced: the paths of the chosen tenants, and the classes of all other threads.
//!
//! Input: tenants, the inventory of NICs, interrupts and kernel threads, the intent (classes). Output: a [`Watch`] and
//! its kernel filters, so that events outside the paths cost as little as possible.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use ontime_hostnet::inventory::{KernelThread, KernelThreadKind, Nic};
use ontime_hostnet::rules::softirqs_share_a_lock;
use ontime_hostnet::{CpuSet, Intent, Inventory};
use ontime_tenants::{Class, Kind, Tenant, ThreadRole};
use serde::{Deserialize, Serialize};

use crate::event::Name;
use crate::format::Probe;

/// The role of a thread on a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum PathRole {
    /// The NIC's interrupt thread.
    Irq,
    /// The NIC's NAPI thread.
    Napi,
    /// Moves the virtual NIC's packets.
    Vhost,
    /// A virtual CPU.
    Vcpu,
    /// A thread of a container's process.
    App,
}

impl PathRole {
    /// As text.
    pub fn text(self) -> &'static str {
        match self {
            PathRole::Irq => "interrupt thread",
            PathRole::Napi => "NAPI thread",
            PathRole::Vhost => "vhost thread",
            PathRole::Vcpu => "vCPU",
            PathRole::App => "thread",
        }
    }
}

/// The path of one tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Path {
    /// The tenant's name, or the NIC's if no tenant is known.
    pub tenant: String,
    /// The class of the tenant: real-time with a level, or bulk.
    pub class: Class,
    /// Physical NICs.
    pub nics: BTreeSet<Name>,
    /// The host's side of its virtual NICs.
    pub vnics: BTreeSet<Name>,
    /// Whether packets are passed to a virtual NIC's driver on the host (tap, veth), where they can be traced.
    /// Otherwise (macvtap, macvlan, a process of the host) the receiver's wake-up is used instead.
    pub seen_at_vnic: bool,
    /// Threads, by number.
    pub threads: BTreeMap<i32, PathRole>,
    /// Interrupts of its NICs that may announce received packets.
    pub irqs: BTreeSet<u32>,
    /// Only the stations of requests are traced, not the waits: a few probes per request.
    #[serde(default)]
    pub segments_only: bool,
}

impl Path {
    /// Threads that are woken for packets and process them.
    pub fn receivers(&self) -> impl Iterator<Item = i32> + '_ {
        self.of(PathRole::App).chain(self.of(PathRole::Vhost))
    }

    /// Whether this is such a thread.
    pub fn receives(&self, pid: i32) -> bool {
        matches!(self.threads.get(&pid), Some(PathRole::App | PathRole::Vhost))
    }

    /// Threads of one role.
    pub fn of(&self, wanted: PathRole) -> impl Iterator<Item = i32> + '_ {
        self.threads.iter().filter(move |(_, role)| **role == wanted).map(|(pid, _)| *pid)
    }

    /// Whether it has threads of a role.
    pub fn has(&self, wanted: PathRole) -> bool {
        self.of(wanted).next().is_some()
    }
}

/// An invalid choice.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum PathError {
    /// No such tenant.
    #[error("there is no {kind} {name}; there are: {known} (see ontime ps)")]
    NoTenant {
        /// VM or container.
        kind: &'static str,
        /// The requested name.
        name: String,
        /// The existing names.
        known: String,
    },
    /// No such NIC.
    #[error("there is no interface {name}; there are: {known}")]
    NoNic {
        /// The requested name.
        name: String,
        /// The existing names.
        known: String,
    },
    /// Nothing to trace.
    #[error(
        "no RT tenant runs here: name one with --vm or --container, or a NIC with --nic, or give a tenant class rt in \
         tenants.toml"
    )]
    Nothing,
    /// A tenant without a NIC.
    #[error(
        "{tenant}: no NIC of this host is known to lead to its interfaces ({interfaces}), as behind NAT, a router or \
         Open vSwitch; name the NIC that its requests come by: --nic NIC ({known})"
    )]
    NoPath {
        /// The name of the tenant.
        tenant: String,
        /// The names of its interfaces, with commas between.
        interfaces: String,
        /// The host's NICs.
        known: String,
    },
}

/// The user's choice.
#[derive(Debug, Clone, Default)]
pub struct Choice {
    /// A VM's name.
    pub vm: Option<String>,
    /// A container's name.
    pub container: Option<String>,
    /// Physical NICs.
    pub nics: Vec<String>,
    /// Only segments, no inversions: with as few probes as possible.
    pub segments_only: bool,
}

/// All paths, and the classes of other threads.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Watch {
    /// One for each chosen tenant or NIC.
    pub paths: Vec<Path>,
    /// Classes of known threads: those of tenants, and interrupt and NAPI threads by their NIC.
    pub classes: HashMap<i32, Class>,
    /// Interfaces that carry only RT packets. The NAPI of any other interface is bulk.
    pub rt_nics: BTreeSet<Name>,
    /// NICs polled by a busy thread: too many polls to record.
    pub polled: BTreeSet<Name>,
    /// The CPUs that a path may use; all CPUs if none is known.
    pub cpus: Vec<u32>,
    /// Whether the softirqs of a CPU share a lock that bulk threads hold, too (PREEMPT_RT before 6.18). Missing in
    /// older recordings.
    #[serde(default)]
    pub shared_lock: bool,
    /// Instead of paths: the threads of a measuring program (`delay`), by their names. A final `*` stands for any rest.
    #[serde(default)]
    pub program: Option<String>,
}

impl Watch {
    /// The threads of a measuring program on these CPUs.
    pub fn of_program(program: &str, cpus: &CpuSet, inventory: &Inventory, intent: &Intent) -> Self {
        Self {
            classes: classes(inventory, intent),
            cpus: cpus.iter().collect(),
            shared_lock: softirqs_share_a_lock(inventory),
            program: Some(program.to_owned()),
            ..Self::default()
        }
    }

    /// Finds the paths. `affinity` returns the CPUs of a kernel thread.
    ///
    /// # Errors
    /// The chosen tenant or NIC does not exist.
    pub fn new(
        choice: &Choice,
        inventory: &Inventory,
        intent: &Intent,
        affinity: impl Fn(i32) -> Option<CpuSet>,
    ) -> Result<Self, PathError> {
        for name in &choice.nics {
            if inventory.nic(name).is_none() {
                let known = list(inventory.nics.iter().map(|nic| nic.id.name.as_str()));
                return Err(PathError::NoNic { name: name.clone(), known });
            }
        }
        let mut paths = Vec::new();
        for tenant in chosen(choice, &intent.tenants)? {
            let nics = nics_of(choice, inventory, intent, tenant);
            let asked = choice.vm.is_some() || choice.container.is_some();
            match (nics.is_empty(), asked) {
                (false, _) => paths.push(path(inventory, tenant, &nics)),
                (true, true) => return Err(no_path(inventory, tenant)),
                (true, false) => {}
            }
        }
        if paths.is_empty() && !choice.nics.is_empty() {
            let nics: Vec<&Nic> = choice.nics.iter().filter_map(|name| inventory.nic(name)).collect();
            paths.push(bare(inventory, intent, &nics));
        }
        if paths.is_empty() {
            return Err(PathError::Nothing);
        }
        paths.iter_mut().for_each(|path| path.segments_only = choice.segments_only);
        let cpus = cpus(&paths, inventory, &intent.tenants, affinity);
        let rt = |nic: &&Nic| intent.nic_class(inventory, nic) != Class::Bulk;
        let mut rt_nics: BTreeSet<Name> = inventory.nics.iter().filter(rt).map(name).collect();
        rt_nics.extend(paths.iter().flat_map(|path| path.nics.iter().chain(&path.vnics)));
        let polled = inventory.nics.iter().filter(|nic| polls(nic)).map(name).collect();
        let shared_lock = softirqs_share_a_lock(inventory);
        Ok(Self { classes: classes(inventory, intent), paths, rt_nics, polled, cpus, shared_lock, program: None })
    }

    /// The needed probes with their kernel filters; a probe without a filter records everything.
    pub fn filters(&self) -> Vec<(Probe, Option<String>)> {
        let light = self.paths.iter().all(|path| path.segments_only);
        Probe::ALL
            .into_iter()
            .chain(Probe::vectors())
            .filter_map(|probe| {
                let terms = match &self.program {
                    Some(program) => of_program(program, probe),
                    None if light => self.stations(probe),
                    None => self.everything(probe),
                }?;
                Some((probe, joined(terms)))
            })
            .collect()
    }

    /// For segments and inversions: everything on the path's CPUs that shows which thread ran.
    fn everything(&self, probe: Probe) -> Option<Vec<String>> {
        Some(match probe {
            Probe::IrqEntry | Probe::IrqExit | Probe::SoftirqEntry | Probe::SoftirqExit | Probe::Switch => vec![],
            Probe::NapiPoll => {
                let mut polls = self.polls();
                polls.push("work>0".to_owned());
                polls
            }
            Probe::Waking => some(pids("pid", self.paths.iter().flat_map(|path| path.threads.keys().copied())))?,
            other => self.packets(other)?,
        })
    }

    /// For segments only.
    fn stations(&self, probe: Probe) -> Option<Vec<String>> {
        match probe {
            Probe::IrqEntry => {
                some(pids("irq", self.paths.iter().flat_map(|path| path.irqs.iter().map(|irq| *irq as i32))))
            }
            Probe::IrqExit | Probe::SoftirqEntry | Probe::SoftirqExit => None,
            Probe::NapiPoll => some(self.polls()),
            // A container's entry is a switch; a VM's is not. If the hand-over of packets is not traced, switches show
            // which receivers are asleep.
            Probe::Switch => {
                let mut terms = pids("next_pid", self.threads(PathRole::App).chain(self.untraced_receivers()));
                terms.extend(pids("prev_pid", self.untraced_receivers()));
                some(terms)
            }
            Probe::Waking => some(pids("pid", self.untraced_receivers())),
            Probe::Queue if self.paths.iter().all(|path| path.seen_at_vnic && !path.has(PathRole::App)) => None,
            other => self.packets(other),
        }
    }

    /// Packets, VM entries and exits.
    fn packets(&self, probe: Probe) -> Option<Vec<String>> {
        let nics = self.paths.iter().flat_map(|path| &path.nics);
        let vnics = self.paths.iter().flat_map(|path| &path.vnics);
        match probe {
            Probe::Receive | Probe::StartXmit => some(named("name", nics.chain(vnics))),
            Probe::Xmit => some(named("name", nics)),
            Probe::Queue => {
                let mut terms = named("name", nics);
                terms.extend(pids("common_pid", self.threads(PathRole::App)));
                some(terms)
            }
            Probe::KvmEntry | Probe::KvmExit => some(pids("common_pid", self.threads(PathRole::Vcpu))),
            _ => None,
        }
    }

    /// Ends of polls of the paths' NICs, except those of polling threads, which are too many.
    fn polls(&self) -> Vec<String> {
        let nics = self.paths.iter().flat_map(|path| &path.nics);
        named("dev_name", nics.filter(|nic| !self.polled.contains(*nic)))
    }

    /// Receivers of packets whose hand-over is not traced.
    fn untraced_receivers(&self) -> impl Iterator<Item = i32> + '_ {
        self.paths.iter().filter(|path| !path.seen_at_vnic).flat_map(Path::receivers)
    }

    fn threads(&self, role: PathRole) -> impl Iterator<Item = i32> + '_ {
        self.paths.iter().flat_map(move |path| path.of(role))
    }
}

/// For a measuring program: everything that shows which thread ran, and the timers that wake the program's threads.
fn of_program(program: &str, probe: Probe) -> Option<Vec<String>> {
    match probe {
        Probe::IrqEntry | Probe::IrqExit | Probe::SoftirqEntry | Probe::SoftirqExit => Some(vec![]),
        Probe::Switch | Probe::TimerExpire | Probe::VectorEntry(_) | Probe::VectorExit(_) => Some(vec![]),
        Probe::NapiPoll => Some(vec!["work>0".to_owned()]),
        Probe::Waking => Some(vec![format!("comm~\"{program}\"")]),
        // The current thread's name: a field of each tracepoint.
        Probe::TimerStart => Some(vec![format!("COMM~\"{program}\"")]),
        _ => None,
    }
}

fn named<'a>(field: &str, names: impl Iterator<Item = &'a Name>) -> Vec<String> {
    names.map(|name| format!("{field}==\"{name}\"")).collect()
}

fn pids(field: &str, numbers: impl Iterator<Item = i32>) -> Vec<String> {
    numbers.map(|number| format!("{field}=={number}")).collect()
}

/// A filter that passes nothing means that the probe is not needed.
fn some(terms: Vec<String>) -> Option<Vec<String>> {
    (!terms.is_empty()).then_some(terms)
}

/// The kernel accepts less than a page of filter. With a longer one, the kernel passes everything and the analyser
/// selects.
fn joined(terms: Vec<String>) -> Option<String> {
    let text = terms.join("||");
    (!text.is_empty() && text.len() < 4_000).then_some(text)
}

fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<&str> = names.collect();
    if names.is_empty() { "none".to_owned() } else { names.join(", ") }
}

fn no_path(inventory: &Inventory, tenant: &Tenant) -> PathError {
    let own = tenant.vnics.iter().map(|vnic| vnic.ifname.as_str());
    let inside = tenant.attached.iter().map(|attached| attached.name.as_str());
    let physical = inventory.nics.iter().filter(|nic| nic.physical).map(|nic| nic.id.name.as_str());
    PathError::NoPath { tenant: tenant.name.clone(), interfaces: list(own.chain(inside)), known: list(physical) }
}

fn name(nic: &Nic) -> Name {
    Name::from(nic.id.name.as_str())
}

fn polls(nic: &Nic) -> bool {
    nic.threaded == Some(2) || nic.napis.iter().any(|napi| napi.threaded == Some(2))
}

fn chosen<'a>(choice: &Choice, tenants: &'a [Tenant]) -> Result<Vec<&'a Tenant>, PathError> {
    let is_container = |tenant: &&Tenant| tenant.kind == Kind::Container;
    let find = |kind: &'static str, wanted: &str, fits: &dyn Fn(&&Tenant) -> bool| {
        let found = tenants.iter().filter(|tenant| fits(tenant)).find(|tenant| tenant.name == wanted);
        found.map(|tenant| vec![tenant]).ok_or_else(|| PathError::NoTenant {
            kind,
            name: wanted.to_owned(),
            known: list(tenants.iter().filter(|tenant| fits(tenant)).map(|tenant| tenant.name.as_str())),
        })
    };
    match (&choice.vm, &choice.container) {
        (Some(vm), _) => find("VM", vm, &|tenant| !is_container(tenant)),
        (None, Some(container)) => find("container", container, &is_container),
        (None, None) => Ok(tenants.iter().filter(|tenant| tenant.class != Class::Bulk).collect()),
    }
}

/// The physical NICs of a tenant: those that the user named, if any, else those that its packets pass.
fn nics_of<'a>(choice: &Choice, inventory: &'a Inventory, intent: &Intent, tenant: &Tenant) -> Vec<&'a Nic> {
    let asked = choice.vm.is_some() || choice.container.is_some();
    let leads = |nic: &&Nic| intent.users(inventory, nic).any(|user| user.process == tenant.process);
    let is_called = |nic: &Nic, name: &str| inventory.nic(name).is_some_and(|one| one.id.ifindex == nic.id.ifindex);
    let named = |nic: &&Nic| choice.nics.is_empty() || choice.nics.iter().any(|name| is_called(nic, name));
    let own = |nic: &&Nic| !tenant.vnics.iter().any(|vnic| vnic.ifname == nic.id.name);
    let found: Vec<&Nic> = inventory.nics.iter().filter(own).filter(leads).filter(named).collect();
    if found.is_empty() && asked {
        return choice.nics.iter().filter_map(|name| inventory.nic(name)).collect();
    }
    found
}

fn path(inventory: &Inventory, tenant: &Tenant, nics: &[&Nic]) -> Path {
    let mut threads = kernel_threads(inventory, nics);
    for thread in &tenant.threads {
        let role = match thread.role {
            ThreadRole::Vcpu(_) => PathRole::Vcpu,
            ThreadRole::Vhost => PathRole::Vhost,
            ThreadRole::Container => PathRole::App,
            ThreadRole::Iothread | ThreadRole::Emulator | ThreadRole::KvmPit | ThreadRole::Device => continue,
        };
        threads.insert(thread.id.tid, role);
    }
    let kind = |ifname: &str| inventory.nic(ifname).and_then(|nic| nic.kind.as_deref());
    let direct = |ifname: &str| matches!(kind(ifname), Some("macvtap" | "macvlan" | "ipvlan" | "ipvtap"));
    Path {
        tenant: tenant.name.clone(),
        class: tenant.class,
        nics: nics.iter().map(|nic| name(nic)).collect(),
        vnics: tenant.vnics.iter().map(|vnic| Name::from(vnic.ifname.as_str())).collect(),
        seen_at_vnic: tenant.vnics.iter().any(|vnic| !direct(&vnic.ifname)),
        threads,
        irqs: nics.iter().flat_map(|nic| announcing(inventory, nic)).collect(),
        segments_only: false,
    }
}

/// A path of NICs without a known tenant: only arrival and departure of packets can be traced.
fn bare(inventory: &Inventory, intent: &Intent, nics: &[&Nic]) -> Path {
    let class = nics.iter().map(|nic| intent.nic_class(inventory, nic)).min().unwrap_or(Class::Bulk);
    let names: Vec<&str> = nics.iter().map(|nic| nic.id.name.as_str()).collect();
    Path {
        tenant: names.join("+"),
        class,
        nics: nics.iter().map(|nic| name(nic)).collect(),
        vnics: BTreeSet::new(),
        seen_at_vnic: false,
        threads: kernel_threads(inventory, nics),
        irqs: nics.iter().flat_map(|nic| announcing(inventory, nic)).collect(),
        segments_only: false,
    }
}

/// Interrupts of a NIC that may announce received packets: those of its NAPI instances if the driver reports them, else
/// all whose handler is not named for transmission (`eth0-tx-0`, `virtio2-output.0`). An interrupt that only completes
/// a transmission is not followed by a reception, and the next request would seem to begin with it.
fn announcing(inventory: &Inventory, nic: &Nic) -> Vec<u32> {
    let of_napi: Vec<u32> = nic.napis.iter().filter_map(|napi| napi.irq).collect();
    if !of_napi.is_empty() {
        return of_napi;
    }
    let sends = |irq: &u32| {
        let known = inventory.irqs.iter().find(|known| known.id.irq == *irq);
        known.is_some_and(|known| !known.actions.is_empty() && known.actions.iter().all(|action| only_sends(action)))
    };
    nic.irqs.iter().copied().filter(|irq| !sends(irq)).collect()
}

fn only_sends(action: &str) -> bool {
    let action = action.to_ascii_lowercase();
    let mut words = action.split(|c: char| !c.is_ascii_alphanumeric());
    words.any(|word| word == "tx" || word == "output")
}

fn kernel_threads(inventory: &Inventory, nics: &[&Nic]) -> BTreeMap<i32, PathRole> {
    let mut threads = BTreeMap::new();
    for thread in &inventory.threads {
        let role = match thread.kind {
            KernelThreadKind::Irq(_) => PathRole::Irq,
            KernelThreadKind::Napi(_) | KernelThreadKind::NapiCut | KernelThreadKind::NapiPoll(_) => PathRole::Napi,
            _ => continue,
        };
        if nics.iter().any(|nic| serves(thread, nic)) {
            threads.insert(thread.id.tid, role);
        }
    }
    threads
}

fn serves(thread: &KernelThread, nic: &Nic) -> bool {
    match thread.kind {
        KernelThreadKind::Irq(irq) => nic.irqs.contains(&irq),
        KernelThreadKind::NapiPoll(id) => nic.napis.iter().any(|napi| napi.id == id),
        KernelThreadKind::NapiCut => nic.napis.iter().any(|napi| napi.pid == Some(thread.id.tid)),
        KernelThreadKind::Napi(id) => nic.napis.iter().any(|napi| napi.id == id || napi.pid == Some(thread.id.tid)),
        _ => false,
    }
}

fn classes(inventory: &Inventory, intent: &Intent) -> HashMap<i32, Class> {
    let mut classes = HashMap::new();
    for thread in &inventory.threads {
        if let Some(nic) = inventory.nics.iter().find(|nic| serves(thread, nic)) {
            classes.insert(thread.id.tid, intent.nic_class(inventory, nic));
        }
    }
    for tenant in &intent.tenants {
        classes.extend(tenant.threads.iter().map(|thread| (thread.id.tid, tenant.class)));
    }
    classes
}

fn cpus(
    paths: &[Path],
    inventory: &Inventory,
    tenants: &[Tenant],
    affinity: impl Fn(i32) -> Option<CpuSet>,
) -> Vec<u32> {
    let mut found = BTreeSet::new();
    let of_tenants: HashMap<i32, &str> = tenants
        .iter()
        .flat_map(|tenant| tenant.threads.iter().map(|thread| (thread.id.tid, thread.affinity.as_str())))
        .collect();
    for path in paths {
        for pid in path.threads.keys() {
            let own = of_tenants.get(pid).and_then(|list| CpuSet::from_list(list).ok()).or_else(|| affinity(*pid));
            found.extend(own.into_iter().flat_map(|set| set.iter().collect::<Vec<_>>()));
        }
        for irq in inventory.irqs.iter().filter(|irq| path.irqs.contains(&irq.id.irq)) {
            found.extend(irq.affinity.iter());
        }
    }
    let online = &inventory.cpus.online;
    let known: Vec<u32> = found.into_iter().filter(|cpu| online.contains(*cpu)).collect();
    if known.is_empty() { online.iter().collect() } else { known }
}

#[cfg(test)]
#[path = "../../hostnet/tests/support/fleet.rs"]
mod fleet;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_nic_is_chosen_by_any_of_its_names_with_the_tenant_that_uses_it() {
        let (mut inventory, intent) = fleet::two_vms();
        inventory.nics[0].altnames = vec!["enp65s0f0np0".to_owned(), "uplink-of-the-press-line".to_owned()];
        let watch = |name: &str| {
            let choice = Choice { nics: vec![name.to_owned()], ..Choice::default() };
            Watch::new(&choice, &inventory, &intent, |_| None)
        };
        let by_name = watch("eth0").unwrap();
        let [path] = by_name.paths.as_slice() else { panic!("{:?}", by_name.paths) };
        assert_eq!(path.nics, [Name::from("eth0")].into());
        assert_eq!(path.vnics, [Name::from("tap1")].into(), "the tenant's, not the NIC alone");
        for altname in ["enp65s0f0np0", "uplink-of-the-press-line"] {
            assert_eq!(watch(altname).unwrap(), by_name, "{altname}");
        }
        for unknown in ["enp65s0f0", "uplink"] {
            assert!(watch(unknown).unwrap_err().to_string().contains("there are: eth0, eth1"), "{unknown}");
        }
    }

    #[test]
    fn a_handler_that_only_sends_is_known_by_its_name() {
        for sends in ["rt0-tx-0", "virtio2-output.0", "eth1-Tx-3"] {
            assert!(only_sends(sends), "{sends}");
        }
        for receives in ["rt0-rx-0", "rt0", "eth0-TxRx-3", "virtio2-input.0", "mlx5_comp0@pci", "iavf-eth0-TxRx-0"] {
            assert!(!only_sends(receives), "{receives}");
        }
    }
}
