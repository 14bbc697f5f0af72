//! What is wanted: the method, the priority table, and the class of every NIC and tenant.
//!
//! In: the host's configuration (`host_config`), the tenants found, whether runtime caps are in force. Out: an
//! [`Intent`] for the rules.

use std::collections::{BTreeMap, BTreeSet};

use ontime_tenants::{Attached, Class, Policy, PriorityTable, Tenant, ThreadId, Vnic};
use serde::Serialize;

use crate::host_config::{HostConfig, NicConfig};
use crate::inventory::{Inventory, Napi, Nic};
use crate::method::Method;
use crate::rule::RuleId;

/// What is wanted of this host.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Intent {
    /// The method.
    pub method: Method,
    /// The one priority table.
    pub table: PriorityTable,
    /// What the administrator said of NICs, by interface name.
    pub nics: BTreeMap<String, NicConfig>,
    /// Tenants found on this host.
    pub tenants: Vec<Tenant>,
    /// Whether the runtime cap of every RT tenant is in force: kernel protections go off only then.
    ///
    /// Caps are raised before an apply with `true`, and taken away only after an apply with `false`.
    pub caps_in_force: bool,
    /// The CPU kept for the RT group by [`Method::Exclusive`].
    pub exclusive_cpu: Option<u32>,
    /// At most how many packets a poll that RT packets may wait for takes ([`RuleId::NapiWeight`]), 1 to 64; where none
    /// is said, 4.
    pub bulk_napi_weight: Option<u32>,
    /// Rules of the method that are not in force all the same.
    pub without: BTreeSet<RuleId>,
    /// NICs whose RT queues are to wait for interrupts this moment although [`Method::Busypoll`] is in force: nothing
    /// comes by them, or polling has used up its bound ([`crate::adaptive`]). By interface index.
    pub resting: BTreeSet<u32>,
    /// vCPU threads with reserved CPU time, and the policy with which they are handed to who keeps it.
    #[serde(skip)]
    pub reserved: BTreeMap<ThreadId, Policy>,
}

/// How a NIC is used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum NicUse {
    /// The administrator said so in `host.toml`, of it or of all that stands on it and is used.
    Configured(Class),
    /// Only tenants of this class use it, or none does (bulk).
    Derived(Class),
    /// Both classes use it: bulk, with a queue of its own for RT packets (the highest level of its RT tenants).
    Mixed(Class),
}

impl NicUse {
    /// The class its interrupt and NAPI threads get.
    pub fn class(&self) -> Class {
        match self {
            NicUse::Configured(class) | NicUse::Derived(class) => *class,
            NicUse::Mixed(_) => Class::Bulk,
        }
    }
}

impl Intent {
    /// Whether a rule is in force.
    pub fn has(&self, rule: RuleId) -> bool {
        self.method.has(rule) && !self.without.contains(&rule)
    }

    /// What the configuration says, with these tenants.
    pub fn new(config: &HostConfig, table: PriorityTable, tenants: Vec<Tenant>, caps_in_force: bool) -> Self {
        Self {
            method: config.method.unwrap_or_default(),
            table,
            nics: config.nics.clone(),
            tenants,
            caps_in_force,
            exclusive_cpu: config.exclusive_cpu,
            bulk_napi_weight: config.bulk_napi_weight,
            without: config.without.clone(),
            resting: BTreeSet::new(),
            reserved: BTreeMap::new(),
        }
    }

    /// Whether a planner shares out the vCPUs' time: then the planned place is for who is in its plan, and every other
    /// RT vCPU stands at the entitled one.
    pub fn planner_runs(&self) -> bool {
        self.reserved.values().any(|policy| !matches!(policy, Policy::Deadline { .. }))
    }

    /// Whether the planned place is for some vCPUs at a time only: a planner's, or those with a pending interrupt.
    pub fn vcpus_change_places(&self) -> bool {
        self.planner_runs() || self.has(RuleId::InterruptContext)
    }

    /// How a NIC is used: as configured, else by the classes of the tenants whose packets pass it.
    ///
    /// A NIC that only RT tenants use has the highest of their levels.
    pub fn nic_use(&self, inventory: &Inventory, nic: &Nic) -> NicUse {
        if let Some(class) = self.config_of(nic).and_then(|config| config.class) {
            return NicUse::Configured(class);
        }
        let (said, used) = self.classes_of(inventory, nic);
        if let Some(class) = said.first().filter(|class| used.is_empty() && said.iter().all(|other| other == *class)) {
            return NicUse::Configured(*class);
        }
        let mut rt = None;
        let mut bulk = false;
        for class in said.into_iter().chain(used) {
            match class {
                Class::Rt(level) => rt = Some(rt.map_or(level, |best| level.min(best))),
                Class::Bulk => bulk = true,
            }
        }
        match (rt, bulk) {
            (Some(level), false) => NicUse::Derived(Class::Rt(level)),
            (Some(level), true) => NicUse::Mixed(Class::Rt(level)),
            (None, _) => NicUse::Derived(Class::Bulk),
        }
    }

    /// The class of a NIC's interrupt and NAPI threads.
    ///
    /// VATC's receive thread stands before every level's own thread, whoever its packets are for, so under that method
    /// a shared NIC's threads have the class of its most urgent tenant.
    pub fn nic_class(&self, inventory: &Inventory, nic: &Nic) -> Class {
        match self.nic_use(inventory, nic) {
            NicUse::Mixed(rt) if self.method == Method::Vatc => rt,
            used => used.class(),
        }
    }

    /// The classes of those whose packets pass a NIC: what the administrator gave to interfaces that stand on it (a
    /// port of a switch, the upper interface of a pair), whoever uses these; and its other tenants'.
    fn classes_of(&self, inventory: &Inventory, nic: &Nic) -> (Vec<Class>, Vec<Class>) {
        let said_of = |upper: &Nic| self.config_of(upper).and_then(|config| config.class);
        let senders = inventory.senders_by(nic);
        let said = senders.iter().filter_map(|upper| said_of(upper)).collect();
        let open: Vec<&Nic> = senders.into_iter().filter(|upper| said_of(upper).is_none()).collect();
        let tenants = self.tenants.iter().filter(|tenant| self.uses(inventory, tenant, nic, &open));
        (said, tenants.map(|tenant| tenant.class).collect())
    }

    /// What the administrator said of a NIC, by its name or an alternative one.
    pub fn config_of(&self, nic: &Nic) -> Option<&NicConfig> {
        std::iter::once(&nic.id.name).chain(&nic.altnames).find_map(|name| self.nics.get(name))
    }

    /// The tenants whose packets pass a NIC: as found, and as configured of it or of what stands on it by a device of
    /// its own.
    pub fn users<'a>(&'a self, inventory: &'a Inventory, nic: &'a Nic) -> impl Iterator<Item = &'a Tenant> {
        let senders = inventory.senders_by(nic);
        self.tenants.iter().filter(move |tenant| self.uses(inventory, tenant, nic, &senders))
    }

    /// Whether a tenant's packets pass a NIC by one of these interfaces that send by it.
    fn uses(&self, inventory: &Inventory, tenant: &Tenant, nic: &Nic, senders: &[&Nic]) -> bool {
        let names = |sender: &&Nic| self.config_of(sender).is_some_and(|config| config.tenants.contains(&tenant.name));
        // Any user may start a process with any name: one of class bulk has no part in a name that an RT tenant has.
        let means = || tenant.class != Class::Bulk || self.rt_tenants().all(|rt| rt.name != tenant.name);
        reaches_by(inventory, tenant, nic, senders) || senders.iter().any(names) && means()
    }

    /// The class of a NAPI instance, and so of its thread: the most urgent of the receive queues it serves. A queue
    /// that is not configured has the NIC's.
    pub fn napi_class(&self, inventory: &Inventory, nic: &Nic, napi: &Napi) -> Class {
        let whole = self.nic_class(inventory, nic);
        let Some(config) = self.config_of(nic).filter(|config| !config.queues.is_empty()) else { return whole };
        let of_queue = |queue: &u32| config.queues.get(queue).copied().unwrap_or(whole);
        napi.rx_queues.iter().map(of_queue).min().unwrap_or(whole)
    }

    /// The class of an interrupt of a NIC: the most urgent of the NAPI instances that it wakes, else the NIC's.
    pub fn irq_class(&self, inventory: &Inventory, nic: &Nic, irq: u32) -> Class {
        let woken = nic.napis.iter().filter(|napi| napi.irq == Some(irq));
        let class = woken.map(|napi| self.napi_class(inventory, nic, napi)).min();
        class.unwrap_or_else(|| self.nic_class(inventory, nic))
    }

    /// Tenants of RT class.
    pub fn rt_tenants(&self) -> impl Iterator<Item = &Tenant> {
        self.tenants.iter().filter(|tenant| tenant.class != Class::Bulk)
    }
}

/// Whether a tenant's packets pass a NIC: it is its own virtual NIC, or one that this leads to, or (where discovery
/// could not say) the lower device of it, or what an interface in its own network namespace stands on.
pub fn reaches(inventory: &Inventory, tenant: &Tenant, nic: &Nic) -> bool {
    reaches_by(inventory, tenant, nic, &inventory.senders_by(nic))
}

fn reaches_by(inventory: &Inventory, tenant: &Tenant, nic: &Nic, senders: &[&Nic]) -> bool {
    let is_sender = |name: &String| senders.iter().any(|sender| sender.id.name == *name);
    tenant
        .vnics
        .iter()
        .any(|vnic| is_sender(&vnic.ifname) || vnic.lower.iter().any(is_sender) || is_directly_on(inventory, vnic, nic))
        || tenant.attached.iter().any(|own| own.lower.iter().any(is_sender))
}

/// Where discovery could not say: the lower device that the kernel names is this NIC.
fn is_directly_on(inventory: &Inventory, vnic: &Vnic, nic: &Nic) -> bool {
    vnic.lower.is_empty()
        && nic.physical
        && inventory.nic(&vnic.ifname).is_some_and(|own| own.link == Some(nic.id.ifindex))
}

/// The interfaces in a tenant's own network namespace that send by this NIC.
pub fn attached_to<'a>(
    inventory: &'a Inventory,
    tenant: &'a Tenant,
    nic: &'a Nic,
) -> impl Iterator<Item = &'a Attached> {
    let senders = inventory.senders_by(nic);
    let is_sender = move |name: &String| senders.iter().any(|sender| sender.id.name == *name);
    tenant.attached.iter().filter(move |own| own.lower.iter().any(&is_sender))
}

/// Whether a virtual NIC is this NIC, or sends by it.
pub fn leads_to(inventory: &Inventory, vnic: &Vnic, nic: &Nic) -> bool {
    let senders = inventory.senders_by(nic);
    let is_sender = |name: &String| senders.iter().any(|sender| sender.id.name == *name);
    is_sender(&vnic.ifname) || vnic.lower.iter().any(is_sender) || is_directly_on(inventory, vnic, nic)
}
