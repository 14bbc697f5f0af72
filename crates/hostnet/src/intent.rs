//! The intent: the method, the priority table, and the class of every NIC and tenant.
//!
//! In: the host's configuration (`host_config`), the tenants found, and whether runtime caps are in force. Out: an
//! [`Intent`] for the rules.

use std::collections::{BTreeMap, BTreeSet};

use ontime_tenants::{Attached, Class, Policy, PriorityTable, Tenant, ThreadId, Vnic};
use serde::Serialize;

use crate::host_config::{HostConfig, NicConfig};
use crate::inventory::{Inventory, Napi, Nic};
use crate::method::Method;
use crate::rule_id::RuleId;

/// The intent for this host.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Intent {
    /// The method, which decides the rules in force.
    pub method: Method,
    /// The priority table.
    pub table: PriorityTable,
    /// Configuration of NICs, by interface name.
    pub nics: BTreeMap<String, NicConfig>,
    /// Tenants found on this host.
    pub tenants: Vec<Tenant>,
    /// Whether the runtime cap of every RT tenant is in force. Kernel protections are switched off only then.
    ///
    /// Caps are set before an apply with `true`, and removed only after an apply with `false`.
    pub caps_in_force: bool,
    /// The CPU kept for the RT group by [`Method::Exclusive`].
    pub exclusive_cpu: Option<u32>,
    /// Packet limit of polls that RT packets may wait for ([`RuleId::NapiWeight`]), 1 to 64; 4 if not configured.
    pub bulk_napi_weight: Option<u32>,
    /// Rules of the method that the administrator switched off.
    pub without: BTreeSet<RuleId>,
    /// NICs whose RT queues use interrupts for now although [`Method::Busypoll`] is in force: they receive no packets,
    /// or polling has used up its CPU time ([`crate::adaptive`]). By interface index.
    pub resting: BTreeSet<u32>,
    /// vCPU threads with reserved CPU time, and the policy that they get before the planner manages them.
    #[serde(skip)]
    pub reserved: BTreeMap<ThreadId, Policy>,
    /// Whether `sched.toml` has back end `deadline`: the kernel's SCHED_DEADLINE keeps vCPUs' budgets.
    #[serde(skip)]
    pub deadline_backend: bool,
}

/// How a NIC is used.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum NicUse {
    /// `host.toml` sets the class, of the NIC itself or of all used interfaces above it.
    Configured(Class),
    /// Only tenants of this class use the NIC. Bulk if no tenant uses it.
    Derived(Class),
    /// Both classes use it. The NIC is bulk, with a separate queue for RT packets (the highest level of its RT
    /// tenants).
    Mixed(Class),
}

impl NicUse {
    /// The class of the NIC's interrupt and NAPI threads.
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

    /// Builds the intent from the configuration and these tenants.
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
            deadline_backend: false,
        }
    }

    /// Whether a planner distributes the vCPUs' time. Then only the vCPUs in its current plan have the planned place,
    /// and every other RT vCPU has the entitled place.
    pub fn planner_runs(&self) -> bool {
        self.reserved.values().any(|policy| !matches!(policy, Policy::Deadline { .. }))
    }

    /// Whether only some vCPUs have the planned place at a time: those in a planner's plan, or those with a pending
    /// interrupt.
    pub(crate) fn vcpus_change_places(&self) -> bool {
        self.planner_runs() || self.has(RuleId::InterruptContext)
    }

    /// How a NIC is used: as configured, otherwise by the classes of the tenants whose packets pass through it.
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
    /// VATC's receive thread runs before the threads of all levels, for packets of any tenant. Under that method the
    /// threads of a shared NIC therefore have the class of its most urgent tenant.
    pub fn nic_class(&self, inventory: &Inventory, nic: &Nic) -> Class {
        match self.nic_use(inventory, nic) {
            NicUse::Mixed(rt) if self.method == Method::Vatc => rt,
            used => used.class(),
        }
    }

    /// Two lists of classes for a NIC. The first has the configured classes of interfaces that send through it (ports
    /// of a switch, the upper interface of a pair), whether or not a tenant uses them. The second has the classes of
    /// its other tenants.
    fn classes_of(&self, inventory: &Inventory, nic: &Nic) -> (Vec<Class>, Vec<Class>) {
        let said_of = |upper: &Nic| self.config_of(upper).and_then(|config| config.class);
        let senders = inventory.senders_by(nic);
        let said = senders.iter().filter_map(|upper| said_of(upper)).collect();
        let open: Vec<&Nic> = senders.into_iter().filter(|upper| said_of(upper).is_none()).collect();
        let tenants = self.tenants.iter().filter(|tenant| self.uses(inventory, tenant, nic, &open));
        (said, tenants.map(|tenant| tenant.class).collect())
    }

    /// The configuration of a NIC, by its name or an alternative name.
    pub fn config_of(&self, nic: &Nic) -> Option<&NicConfig> {
        std::iter::once(&nic.id.name).chain(&nic.altnames).find_map(|name| self.nics.get(name))
    }

    /// The table of `host.toml` for a NIC, without brackets: of the name by which it is configured, else of its own.
    pub fn table_of(&self, nic: &Nic) -> String {
        let names = || std::iter::once(&nic.id.name).chain(&nic.altnames);
        let name = names().find(|name| self.nics.contains_key(*name)).unwrap_or(&nic.id.name);
        let bare = name.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_'));
        if bare { format!("nic.{name}") } else { format!("nic.{}", toml::Value::from(name.as_str())) }
    }

    /// The tenants whose packets pass through a NIC: those that discovery found, and those configured for the NIC or
    /// for an interface above it that has a device.
    pub fn users<'a>(&'a self, inventory: &'a Inventory, nic: &'a Nic) -> impl Iterator<Item = &'a Tenant> {
        let senders = inventory.senders_by(nic);
        self.tenants.iter().filter(move |tenant| self.uses(inventory, tenant, nic, &senders))
    }

    /// Whether a tenant's packets pass through a NIC by way of one of these sending interfaces.
    fn uses(&self, inventory: &Inventory, tenant: &Tenant, nic: &Nic, senders: &[&Nic]) -> bool {
        let names = |sender: &&Nic| self.config_of(sender).is_some_and(|config| config.tenants.contains(&tenant.name));
        // Any user may start a process with any name. A bulk tenant therefore cannot match a name that an RT tenant
        // has.
        let means = || tenant.class != Class::Bulk || self.rt_tenants().all(|rt| rt.name != tenant.name);
        reaches_by(inventory, tenant, nic, senders) || senders.iter().any(names) && means()
    }

    /// The class of a NAPI instance and of its thread: the most urgent class of its receive queues. A queue without
    /// configuration has the NIC's class.
    pub(crate) fn napi_class(&self, inventory: &Inventory, nic: &Nic, napi: &Napi) -> Class {
        let whole = self.nic_class(inventory, nic);
        let Some(config) = self.config_of(nic).filter(|config| !config.queues.is_empty()) else { return whole };
        let of_queue = |queue: &u32| config.queues.get(queue).copied().unwrap_or(whole);
        napi.rx_queues.iter().map(of_queue).min().unwrap_or(whole)
    }

    /// The class of a NIC's interrupt: the most urgent class of the NAPI instances that it wakes, otherwise the NIC's.
    pub(crate) fn irq_class(&self, inventory: &Inventory, nic: &Nic, irq: u32) -> Class {
        let woken = nic.napis.iter().filter(|napi| napi.irq == Some(irq));
        let class = woken.map(|napi| self.napi_class(inventory, nic, napi)).min();
        class.unwrap_or_else(|| self.nic_class(inventory, nic))
    }

    /// The tenants of class RT.
    pub(crate) fn rt_tenants(&self) -> impl Iterator<Item = &Tenant> {
        self.tenants.iter().filter(|tenant| tenant.class != Class::Bulk)
    }
}

/// Whether a tenant's packets pass through a NIC. The NIC is the tenant's virtual NIC, or below that; or (where
/// discovery found nothing) its lower device; or below an interface in the tenant's network namespace.
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

/// For virtual NICs whose way discovery did not find: whether the kernel names this NIC as the lower device.
fn is_directly_on(inventory: &Inventory, vnic: &Vnic, nic: &Nic) -> bool {
    vnic.lower.is_empty()
        && nic.physical
        && inventory.nic(&vnic.ifname).is_some_and(|own| own.link == Some(nic.id.ifindex))
}

/// The interfaces in a tenant's network namespace that send through this NIC.
pub(crate) fn attached_to<'a>(
    inventory: &'a Inventory,
    tenant: &'a Tenant,
    nic: &'a Nic,
) -> impl Iterator<Item = &'a Attached> {
    let senders = inventory.senders_by(nic);
    let is_sender = move |name: &String| senders.iter().any(|sender| sender.id.name == *name);
    tenant.attached.iter().filter(move |own| own.lower.iter().any(&is_sender))
}

/// Whether a virtual NIC is this NIC, or sends through it.
pub(crate) fn leads_to(inventory: &Inventory, vnic: &Vnic, nic: &Nic) -> bool {
    let senders = inventory.senders_by(nic);
    let is_sender = |name: &String| senders.iter().any(|sender| sender.id.name == *name);
    is_sender(&vnic.ifname) || vnic.lower.iter().any(is_sender) || is_directly_on(inventory, vnic, nic)
}
