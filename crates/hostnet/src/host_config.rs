//! The administrator's configuration of this host's packet path: `/etc/ontime/host.toml` and `host.conf.d`.
//!
//! In: strict TOML. Out: a [`HostConfig`], checked as far as the text allows. Whether the host has the objects that the
//! file names is checked later, by rule `host-config`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use ontime_tenants::config::{self, ConfigError, Text};
use ontime_tenants::{Class, Level};
use serde::{Deserialize, Serialize};
use toml::Spanned;

use crate::CpuSet;
use crate::adaptive;
use crate::method::Method;
use crate::rule_id::RuleId;

/// Upper limit of packets per poll (`include/linux/netdevice.h`), and the value that drivers use.
const NAPI_POLL_WEIGHT: u32 = 64;

/// The configuration of this host.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct HostConfig {
    /// The method; [`Method::Partitioned`] if not configured.
    pub method: Option<Method>,
    /// The CPU kept for the RT group by [`Method::Exclusive`].
    pub exclusive_cpu: Option<u32>,
    /// Packet limit of polls that RT packets may wait for, on kernels where it matters ([`RuleId::NapiWeight`]).
    pub bulk_napi_weight: Option<u32>,
    /// Rules that are switched off under every method. Ontime leaves their knobs to other programs.
    pub without: BTreeSet<RuleId>,
    /// NICs, by interface name.
    pub nics: BTreeMap<String, NicConfig>,
    /// Settings for [`Method::Busypoll`] that polls only while packets arrive. `None`: it polls always.
    pub adaptive: Option<adaptive::Settings>,
}

/// The configuration of a NIC. Every part is optional.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct NicConfig {
    /// The class; if not configured, that of the tenants that use the NIC.
    pub class: Option<Class>,
    /// Classes of single receive queues, by number.
    pub queues: BTreeMap<u32, Class>,
    /// Names of tenants whose packets pass through the NIC, in addition to those that discovery finds: tenants behind a
    /// router, NAT, a VRF or Open vSwitch.
    pub tenants: Vec<String>,
    /// The CPU for its polling threads ([`Method::Busypoll`]).
    pub poll_cpu: Option<u32>,
    /// Whether only VMs send through the NIC, so that packets may bypass its qdisc ([`RuleId::QdiscBypass`]).
    pub qdisc_bypass: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
struct File {
    method: Option<Method>,
    exclusive_cpu: Option<Spanned<u32>>,
    bulk_napi_weight: Option<Spanned<u32>>,
    #[serde(default)]
    without: Vec<Spanned<RuleId>>,
    #[serde(default)]
    nic: BTreeMap<String, Spanned<NicEntry>>,
    busypoll: Option<BusypollEntry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
struct BusypollEntry {
    #[serde(default)]
    adaptive: bool,
    bound: Option<Spanned<f64>>,
    linger_ms: Option<Spanned<u64>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "snake_case")]
struct NicEntry {
    class: Option<ClassName>,
    level: Option<Level>,
    #[serde(default)]
    queue: BTreeMap<String, Spanned<QueueEntry>>,
    tenants: Option<Vec<String>>,
    poll_cpu: Option<Spanned<u32>>,
    #[serde(default)]
    qdisc_bypass: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct QueueEntry {
    class: ClassName,
    level: Option<Level>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ClassName {
    Rt,
    Bulk,
}

impl ClassName {
    fn with(self, level: Option<Level>) -> Result<Class, &'static str> {
        match (self, level) {
            (ClassName::Rt, level) => Ok(Class::Rt(level.unwrap_or(Level::HIGHEST))),
            (ClassName::Bulk, None) => Ok(Class::Bulk),
            (ClassName::Bulk, Some(_)) => Err("a level is for class = \"rt\" only; bulk has none"),
        }
    }
}

impl HostConfig {
    /// Reads `DIRECTORY/host.toml` and `DIRECTORY/host.conf.d/*.toml`. A later file overrides an earlier one.
    ///
    /// # Errors
    /// [`ConfigError`], with file, line, the error and the allowed values.
    pub fn load(directory: &Path) -> Result<Self, ConfigError> {
        let mut all = Self::default();
        for path in config::files(directory, "host")? {
            all.add(&Text::read(&path)?)?;
        }
        Ok(all)
    }

    /// Adds the content of one file.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn add(&mut self, text: &Text) -> Result<(), ConfigError> {
        let file: File = text.parse().map_err(|error| dotted_name(text, error))?;
        if let Some(cpu) = &file.exclusive_cpu {
            self.exclusive_cpu = Some(one_cpu(text, cpu)?);
        }
        if let Some(weight) = &file.bulk_napi_weight {
            if !(1..=NAPI_POLL_WEIGHT).contains(weight.get_ref()) {
                let what = format!("bulk_napi_weight {} is not one of 1 to {NAPI_POLL_WEIGHT}", weight.get_ref());
                return Err(text.error(&weight.span(), what));
            }
            self.bulk_napi_weight = Some(*weight.get_ref());
        }
        self.method = file.method.or(self.method);
        for rule in file.without {
            let id = *rule.get_ref();
            if !id.may_be_left_out() {
                let what =
                    format!("rule {id} cannot be switched off: it is checked always, or what a method is made of");
                return Err(text.error(&rule.span(), what));
            }
            self.without.insert(id);
        }
        if let Some(entry) = file.busypoll {
            self.adaptive = busypoll(text, &entry)?;
        }
        for (name, entry) in file.nic {
            let config = nic(text, &name, entry)?;
            self.nics.insert(name, config);
        }
        Ok(())
    }
}

fn one_cpu(text: &Text, cpu: &Spanned<u32>) -> Result<u32, ConfigError> {
    if *cpu.get_ref() > CpuSet::MAX {
        return Err(text.error(&cpu.span(), format!("CPU {} is not one of 0 to {}", cpu.get_ref(), CpuSet::MAX)));
    }
    Ok(*cpu.get_ref())
}

fn busypoll(text: &Text, entry: &BusypollEntry) -> Result<Option<adaptive::Settings>, ConfigError> {
    let mut settings = adaptive::Settings::default();
    if let Some(bound) = &entry.bound {
        let value = *bound.get_ref();
        if !(value > 0.0 && value <= 1.0) {
            let what = format!("bound {value} is not over 0 and at most 1 (a fraction of one CPU)");
            return Err(text.error(&bound.span(), what));
        }
        settings.bound = value;
    }
    if let Some(linger) = &entry.linger_ms {
        let value = *linger.get_ref();
        if !(10..=60_000).contains(&value) {
            return Err(text.error(&linger.span(), format!("linger_ms {value} is not one of 10 to 60000")));
        }
        settings.linger = std::time::Duration::from_millis(value);
    }
    match (entry.adaptive, entry.bound.as_ref().map(Spanned::span).or(entry.linger_ms.as_ref().map(Spanned::span))) {
        (true, _) => Ok(Some(settings)),
        (false, None) => Ok(None),
        (false, Some(span)) => Err(text.error(&span, "bound and linger_ms are for adaptive = true only")),
    }
}

fn nic(text: &Text, name: &str, entry: Spanned<NicEntry>) -> Result<NicConfig, ConfigError> {
    let span = entry.span();
    if !is_ifname(name) {
        let what = format!(
            "`{name}` is not an interface name (1 to 15 bytes) or an alternative one (to 127): no space, `/` or `:`"
        );
        return Err(text.error(&span, what));
    }
    let entry = entry.into_inner();
    let tenants = entry.tenants.unwrap_or_default();
    let mut config = NicConfig { tenants, qdisc_bypass: entry.qdisc_bypass, ..NicConfig::default() };
    config.poll_cpu = entry.poll_cpu.as_ref().map(|cpu| one_cpu(text, cpu)).transpose()?;
    match (entry.class, entry.level) {
        (Some(class), level) => config.class = Some(class.with(level).map_err(|what| text.error(&span, what))?),
        (None, Some(_)) => return Err(text.error(&span, "a level needs class = \"rt\" beside it")),
        (None, None) => {}
    }
    for (number, queue) in entry.queue {
        let span = queue.span();
        let at: u32 = number
            .parse()
            .map_err(|_| text.error(&span, format!("`{number}` is not a receive queue's number: 0, 1, ...")))?;
        let queue = queue.into_inner();
        let class = queue.class.with(queue.level).map_err(|what| text.error(&span, what))?;
        if config.queues.insert(at, class).is_some() {
            return Err(text.error(&span, format!("queue {at} is named twice")));
        }
    }
    if config == NicConfig::default() {
        return Err(text.error(
            &span,
            format!("nothing is said of `{name}`: give class, queue, tenants, poll_cpu or qdisc_bypass"),
        ));
    }
    Ok(config)
}

/// The keys of a NIC's table.
const OF_NIC: [&str; 6] = ["class", "level", "queue", "tenants", "poll_cpu", "qdisc_bypass"];

/// Explains the error for an unquoted name with a dot: TOML reads `[nic.enp1s0.100]` as key `100` of `enp1s0`.
fn dotted_name(text: &Text, error: ConfigError) -> ConfigError {
    let nics = text.parse::<toml::Table>().ok().and_then(|mut file| file.remove("nic"));
    let Some(name) = nics.as_ref().and_then(toml::Value::as_table).and_then(with_dots) else {
        return unquoted_name(error);
    };
    let unquoted: Vec<&str> = name.split('.').collect();
    let what = format!(
        "a name with a dot stands in quotes: [nic.\"{name}\"]; without them it is `{}` of interface `{}`",
        unquoted.get(1..).unwrap_or_default().join("."),
        unquoted.first().unwrap_or(&"")
    );
    match error {
        ConfigError::Invalid { place, snippet, .. } => ConfigError::Invalid { place, what, snippet, hint: None },
        unread @ ConfigError::Read { .. } => unread,
    }
}

/// Explains the error for an unquoted name with a sign that TOML takes in quotes only (`[nic.br0@if3]`).
fn unquoted_name(error: ConfigError) -> ConfigError {
    let named = |header: &str| {
        let header = header.trim_start().strip_prefix("[nic.")?.split(']').next()?;
        let name = header.split_once(".queue.").map_or(header, |(name, _)| name);
        let is_bare = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        let is_cut = is_ifname(name) && !name.contains(['"', '\'']) && !name.chars().all(is_bare);
        is_cut.then(|| {
            format!("a name with other signs than letters, digits, `-` and `_` stands in quotes: [nic.\"{name}\"]")
        })
    };
    match error {
        ConfigError::Invalid { place, what, snippet, hint } => match named(&snippet) {
            Some(what) => ConfigError::Invalid { place, what, snippet, hint: None },
            None => ConfigError::Invalid { place, what, snippet, hint },
        },
        unread @ ConfigError::Read { .. } => unread,
    }
}

/// The first name that TOML cut at its dots: a path through nested tables, none of which is a key of a NIC's table,
/// down to a table that has such keys, or whose name is a number: a VLAN's.
fn with_dots(nics: &toml::Table) -> Option<String> {
    fn below(path: &str, table: &toml::Table) -> Option<String> {
        let inner = table.iter().filter(|(key, _)| !OF_NIC.contains(&key.as_str()));
        inner.filter_map(|(key, value)| Some((format!("{path}.{key}"), value.as_table()?))).find_map(|(path, inner)| {
            let is_vlan = path.rsplit('.').next().is_some_and(|end| end.parse::<u16>().is_ok());
            let is_nics = is_vlan || inner.keys().any(|key| OF_NIC.contains(&key.as_str()));
            below(&path, inner).or_else(|| is_nics.then_some(path))
        })
    }
    nics.iter().find_map(|(name, value)| below(name, value.as_table()?))
}

/// `net/core/dev.c`, `dev_valid_name`; an alternative name is shorter than ALTIFNAMSIZ, 128.
fn is_ifname(name: &str) -> bool {
    (1..=127).contains(&name.len())
        && name != "."
        && name != ".."
        && !name.contains(|c: char| c == '/' || c == ':' || c.is_ascii_whitespace())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<HostConfig, ConfigError> {
        let mut config = HostConfig::default();
        config.add(&Text::new("/etc/ontime/host.toml", text)).map(|()| config)
    }

    fn rt(level: u8) -> Class {
        Class::Rt(Level::try_from(level).unwrap())
    }

    #[test]
    fn a_host_file_is_read() {
        let text = "method = \"exclusive\"\nexclusive_cpu = 1\n[nic.eth0]\nclass = \"rt\"\nlevel = \
                    2\n[nic.eth1]\nclass = \"bulk\"\ntenants = [\"web\"]\n[nic.eth1.queue.3]\nclass = \"rt\"\nlevel = \
                    1\n";
        let config = read(text).unwrap();
        assert_eq!(config.method, Some(Method::Exclusive));
        assert_eq!(config.exclusive_cpu, Some(1));
        assert_eq!(config.nics["eth0"], NicConfig { class: Some(rt(2)), ..NicConfig::default() });
        let eth1 = &config.nics["eth1"];
        assert_eq!(eth1.class, Some(Class::Bulk));
        assert_eq!(eth1.queues, BTreeMap::from([(3, rt(1))]));
        assert_eq!(eth1.tenants, ["web"]);
        let polling = read("[nic.eth0]\npoll_cpu = 2\n[busypoll]\nadaptive = true\nbound = 0.3\n").unwrap();
        assert_eq!(polling.nics["eth0"].poll_cpu, Some(2));
        assert_eq!(polling.adaptive, Some(adaptive::Settings { bound: 0.3, ..adaptive::Settings::default() }));
        assert_eq!(read("[busypoll]\nadaptive = false\n").unwrap().adaptive, None);
        assert_eq!(read("bulk_napi_weight = 8\n").unwrap().bulk_napi_weight, Some(8));
        let without = read("without = [\"halt-poll\", \"device-irq\"]\n").unwrap().without;
        assert_eq!(without, BTreeSet::from([RuleId::HaltPoll, RuleId::DeviceIrq]));
        let bypass = read("[nic.eth0]\nqdisc_bypass = true\n").unwrap();
        assert_eq!(bypass.nics["eth0"], NicConfig { qdisc_bypass: true, ..NicConfig::default() });
        assert!(read("[nic.eth0]\nqdisc_bypass = false\n").is_err(), "it says nothing");
        let long = "a-name-of-an-interface-as-udev-gives-it";
        assert!(read(&format!("[nic.{long}]\nclass = \"rt\"\n")).unwrap().nics.contains_key(long));
        assert!(read(&format!("[nic.{}]\nclass = \"rt\"\n", "x".repeat(128))).is_err());
        let only_tenants = read("[nic.eth0]\ntenants = [\"plc\"]\n").unwrap();
        assert_eq!(only_tenants.nics["eth0"].class, None);
    }

    #[test]
    fn what_is_not_allowed_is_refused_with_its_line() {
        for (text, line, word) in [
            ("[nic.eth0]\nclas = \"rt\"\n", 2, "clas"),
            ("[nic.eth0]\nclass = \"fast\"\n", 2, "bulk"),
            ("[nic.eth0]\nclass = \"rt\"\nlevel = 9\n", 3, "to 8"),
            ("[nic.eth0]\nclass = \"bulk\"\nlevel = 1\n", 1, "level"),
            ("[nic.eth0]\nlevel = 1\n", 1, "class"),
            ("[nic.eth0]\n", 1, "nothing is said"),
            ("[nic.\"a/b\"]\nclass = \"rt\"\n", 1, "interface name"),
            ("[nic.br0]\nclass = \"rt\"\n[nic.br0.7]\nclass = \"bulk\"\n", 3, "[nic.\"br0.7\"]"),
            ("[nic.bond1.20.300]\nclass = \"rt\"\n", 1, "[nic.\"bond1.20.300\"]"),
            ("[nic.lan.2.queue.1]\nclass = \"rt\"\n", 1, "[nic.\"lan.2\"]"),
            ("[nic.eth0.5]\nclas = \"rt\"\n", 1, "[nic.\"eth0.5\"]"),
            ("[nic.bond1.20]\n", 1, "[nic.\"bond1.20\"]"),
            ("[nic.br-ex@if3]\nclass = \"rt\"\n", 1, "[nic.\"br-ex@if3\"]"),
            ("method = \"vanilla\"\n[nic.ap+7.queue.1]\nclass = \"rt\"\n", 2, "[nic.\"ap+7\"]"),
            ("[nic.\"eth0@\"]\nclas = \"rt\"\n", 2, "unknown field `clas`"),
            ("[nic.eth0.quue]\n", 1, "unknown field `quue`"),
            ("[nic.eth0.queue.a]\nclass = \"rt\"\n", 1, "queue's number"),
            ("[nic.eth0.queue.1]\nlevel = 1\n", 1, "class"),
            ("[nic.eth0.queue.1]\nclass = \"bulk\"\nlevel = 1\n", 1, "level"),
            ("[nic.eth0.queue.1]\nclass = \"rt\"\n[nic.eth0.queue.01]\nclass = \"bulk\"\n", 0, "twice"),
            ("[nic.eth0]\npoll_cpu = 9000\n", 2, "8191"),
            ("[busypoll]\nadaptive = true\nbound = 0\n", 3, "at most 1"),
            ("[busypoll]\nadaptive = true\nbound = nan\n", 3, "at most 1"),
            ("[busypoll]\nadaptive = true\nlinger_ms = 1\n", 3, "10 to 60000"),
            ("[busypoll]\nbound = 0.5\n", 2, "adaptive = true"),
            ("method = \"outsourcing\"\n", 1, "`ontime device`"),
            ("method = \"best\"\n", 1, "vanilla"),
            ("exclusive_cpu = 9000\n", 1, "8191"),
            ("exclusive_cpu = -1\n", 1, ""),
            ("bulk_napi_weight = 0\n", 1, "1 to 64"),
            ("bulk_napi_weight = 65\n", 1, "1 to 64"),
            ("what = 1\n", 1, "what"),
            ("without = [\"napi\"]\n", 1, "napi-threaded"),
            ("without = [\"host-config\"]\n", 1, "cannot be switched off"),
            ("without = [\"busy-poll\"]\n", 1, "cannot be switched off"),
        ] {
            let message = read(text).unwrap_err().to_string();
            let place = if line == 0 { String::new() } else { format!("{line}:") };
            assert!(message.starts_with(&format!("/etc/ontime/host.toml:{place}")), "{text}: {message}");
            assert!(message.contains(word), "{text}: {message}");
        }
    }
}
