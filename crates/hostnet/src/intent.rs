//! What is wanted: the method, the priority table, and the class of every NIC and tenant.
//!
//! In: `/etc/ontime/host.toml` and `host.conf.d`, the tenants found, whether runtime caps are in force. Out: an [`Intent`] for
//! the rules.

use std::collections::BTreeMap;
use std::path::Path;

use ontime_tenants::config::{self, ConfigError};
use ontime_tenants::{Class, Level, PriorityTable, Tenant};
use serde::{Deserialize, Serialize};
use toml::Spanned;

use crate::inventory::{Inventory, Nic};
use crate::method::Method;

/// What the administrator says of this host (`/etc/ontime/host.toml`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostConfig {
    /// The method; where none is said, [`Method::Partitioned`].
    pub method: Option<Method>,
    /// The CPU kept for the RT group by [`Method::Exclusive`].
    pub exclusive_cpu: Option<u32>,
    /// Classes of NICs, by interface name.
    pub nics: BTreeMap<String, Class>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
struct File {
    method: Option<Method>,
    exclusive_cpu: Option<Spanned<u32>>,
    #[serde(default)]
    nic: BTreeMap<String, Spanned<NicEntry>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct NicEntry {
    class: ClassName,
    level: Option<Level>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ClassName {
    Rt,
    Bulk,
}

impl HostConfig {
    /// Reads `DIRECTORY/host.toml` and `DIRECTORY/host.conf.d/*.toml`; a later file has the last word on what it names.
    ///
    /// # Errors
    /// [`ConfigError`], with file, line, what is wrong and what is allowed.
    pub fn load(directory: &Path) -> Result<Self, ConfigError> {
        let mut all = Self::default();
        for path in config::files(directory, "host")? {
            all.add(&config::Text::read(&path)?)?;
        }
        Ok(all)
    }

    /// Adds what one file says.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn add(&mut self, text: &config::Text) -> Result<(), ConfigError> {
        let file: File = text.parse()?;
        if let Some(cpu) = &file.exclusive_cpu {
            if *cpu.get_ref() > crate::CpuSet::MAX {
                let what = format!("CPU {} is not one of 0 to {}", cpu.get_ref(), crate::CpuSet::MAX);
                return Err(text.error(&cpu.span(), what));
            }
            self.exclusive_cpu = Some(*cpu.get_ref());
        }
        self.method = file.method.or(self.method);
        for (name, entry) in file.nic {
            let span = entry.span();
            if !is_ifname(&name) {
                return Err(
                    text.error(&span, format!("`{name}` is not an interface name: 1 to 15 bytes, no space, no `/`"))
                );
            }
            let entry = entry.into_inner();
            let class = match (entry.class, entry.level) {
                (ClassName::Rt, level) => Class::Rt(level.unwrap_or(Level::HIGHEST)),
                (ClassName::Bulk, None) => Class::Bulk,
                (ClassName::Bulk, Some(_)) => {
                    return Err(text.error(&span, "a level is for class = \"rt\" only; bulk has none"));
                }
            };
            self.nics.insert(name, class);
        }
        Ok(())
    }
}

/// `net/core/dev.c`, `dev_valid_name`.
fn is_ifname(name: &str) -> bool {
    (1..=15).contains(&name.len())
        && name != "."
        && name != ".."
        && !name.contains(|c: char| c == '/' || c == ':' || c.is_ascii_whitespace())
}

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

/// How a NIC is used.
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
    /// What the configuration says, with these tenants.
    pub fn new(config: &HostConfig, table: PriorityTable, tenants: Vec<Tenant>, caps_in_force: bool) -> Self {
        Self {
            method: config.method.unwrap_or_default(),
            table,
            nic_classes: config.nics.clone(),
            tenants,
            caps_in_force,
            exclusive_cpu: config.exclusive_cpu,
        }
    }

    /// How a NIC is used: as configured, else by the classes of the tenants whose packets pass it.
    ///
    /// A NIC that only RT tenants use has the highest of their levels.
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

/// Whether a tenant's packets pass a NIC: it is its own virtual NIC, or one that this leads to, or (where discovery could
/// not say) the lower device of it.
pub fn reaches(inventory: &Inventory, tenant: &Tenant, nic: &Nic) -> bool {
    tenant.vnics.iter().any(|vnic| {
        vnic.ifname == nic.id.name
            || vnic.lower.contains(&nic.id.name)
            || (vnic.lower.is_empty()
                && nic.physical
                && inventory.nic(&vnic.ifname).is_some_and(|own| own.link == Some(nic.id.ifindex)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<HostConfig, ConfigError> {
        let mut config = HostConfig::default();
        config.add(&config::Text::new("/etc/ontime/host.toml", text)).map(|()| config)
    }

    #[test]
    fn a_host_file_is_read() {
        let text = "method = \"exclusive\"\nexclusive_cpu = 1\n[nic.eth0]\nclass = \"rt\"\nlevel = 2\n[nic.eth1]\nclass = \"bulk\"\n";
        let config = read(text).unwrap();
        assert_eq!(config.method, Some(Method::Exclusive));
        assert_eq!(config.exclusive_cpu, Some(1));
        assert_eq!(config.nics["eth0"], Class::Rt(Level::try_from(2u8).unwrap()));
        assert_eq!(config.nics["eth1"], Class::Bulk);
    }

    #[test]
    fn what_is_not_allowed_is_refused_with_its_line() {
        for (text, line, word) in [
            ("[nic.eth0]\nclas = \"rt\"\n", 2, "clas"),
            ("[nic.eth0]\nclass = \"fast\"\n", 2, "bulk"),
            ("[nic.eth0]\nclass = \"rt\"\nlevel = 9\n", 3, "to 8"),
            ("[nic.eth0]\nclass = \"bulk\"\nlevel = 1\n", 1, "level"),
            ("[nic.\"a/b\"]\nclass = \"rt\"\n", 1, "interface name"),
            ("method = \"vatc\"\n", 1, "not in this version"),
            ("method = \"best\"\n", 1, "vanilla"),
            ("exclusive_cpu = 9000\n", 1, "8191"),
            ("exclusive_cpu = -1\n", 1, ""),
            ("what = 1\n", 1, "what"),
        ] {
            let message = read(text).unwrap_err().to_string();
            assert!(message.starts_with(&format!("/etc/ontime/host.toml:{line}:")), "{text}: {message}");
            assert!(message.contains(word), "{text}: {message}");
        }
    }
}
