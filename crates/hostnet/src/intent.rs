//! What is wanted: the method, the priority table, and the class of every NIC and tenant.
//!
//! In: `/etc/ontime/host.toml`, the tenants found, whether runtime caps are in force. Out: an [`Intent`] for the rules.

use std::collections::BTreeMap;

use ontime_tenants::{Class, PriorityTable, Tenant};
use serde::Serialize;

use crate::inventory::{Inventory, Nic};
use crate::method::Method;

/// What is wanted of this host.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Intent {
    /// The method.
    pub method: Method,
    /// The one priority table.
    pub table: PriorityTable,
    /// Classes of NICs that the administrator gave, by interface name.
    pub nic_classes: BTreeMap<String, Class>,
    /// Tenants found on this host.
    pub tenants: Vec<Tenant>,
    /// Whether the runtime cap of every RT tenant is in force: kernel protections go off only then.
    ///
    /// Caps are raised before an apply with `true`, and taken away only after an apply with `false`.
    pub caps_in_force: bool,
    /// The CPU kept for the RT group by [`Method::Exclusive`].
    pub exclusive_cpu: Option<u32>,
}

/// What decided a NIC's class.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum NicUse {
    /// The administrator said so in `host.toml`.
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
    /// How a NIC is used: as configured, else by the classes of the tenants whose packets pass it.
    ///
    /// A NIC that only RT tenants use has the highest of their levels. A tenant reaches a NIC as its own virtual NIC,
    /// as the lower device of that, or as a port of the same bridge.
    pub fn nic_use(&self, inventory: &Inventory, nic: &Nic) -> NicUse {
        if let Some(class) = self.nic_classes.get(&nic.id.name) {
            return NicUse::Configured(*class);
        }
        let mut rt = None;
        let mut bulk = false;
        for tenant in self.tenants.iter().filter(|tenant| reaches(inventory, tenant, nic)) {
            match tenant.class {
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

    /// Tenants of RT class.
    pub fn rt_tenants(&self) -> impl Iterator<Item = &Tenant> {
        self.tenants.iter().filter(|tenant| tenant.class != Class::Bulk)
    }
}

fn reaches(inventory: &Inventory, tenant: &Tenant, nic: &Nic) -> bool {
    tenant.vnics.iter().any(|vnic| {
        if vnic.ifname == nic.id.name || vnic.lower.as_deref() == Some(nic.id.name.as_str()) {
            return true;
        }
        let Some(own) = inventory.nic(&vnic.ifname) else { return false };
        own.link == Some(nic.id.ifindex)
            || (own.controller.is_some() && own.controller == nic.controller && nic.physical)
    })
}
