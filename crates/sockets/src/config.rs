//! `/etc/ontime/sockets.toml` and `sockets.conf.d/*.toml`: one table per VM. docs/design/sockets.md describes the keys.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::RangeInclusive;
use std::path::Path;

use ontime_tenants::ConfigError;
use ontime_tenants::config::{self, Text};
use ontime_tenants::container::share_a_machine_name;
use ontime_tenants::users;
use serde::Deserialize;
use toml::Spanned;

use crate::abi::ONTIME_CHANNELS_MAX;
use crate::policy::{BUFFER_MIN, Limits, Mapped, Network, Policy, Ports, SOCKETS_MAX};
use crate::request::Protocol;

/// How a VM's channels wake their vCPU (`ontime_config.wake`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wake {
    /// Ends a halt without an interrupt.
    #[default]
    Idle,
    /// Sends an ordinary interrupt, for comparison.
    Interrupt,
}

/// The configuration of one VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vm {
    /// Network rules and limits.
    pub policy: Policy,
    /// Number of real-time channels beside the main one.
    pub channels: u32,
    /// How the channels wake their vCPUs.
    pub wake: Wake,
    /// SCHED_FIFO priority of the channels' threads: 1 to 98.
    pub priority: i32,
    /// Whether the guest's deadline tasks may request bandwidth from the host.
    pub deadlines: bool,
    /// The user that QEMU runs as. None: any user that the sockets' mode lets in.
    pub qemu_user: Option<u32>,
}

impl Default for Vm {
    /// For a VM that no file names: everything is denied.
    fn default() -> Self {
        let policy = Policy { bind: vec![], reach: vec![], map: vec![], limits: Limits::default() };
        Self { policy, channels: 0, wake: Wake::Idle, priority: 48, deadlines: false, qemu_user: None }
    }
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    vm: BTreeMap<Spanned<String>, Entry>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Entry {
    #[serde(default)]
    bind: Vec<Spanned<String>>,
    #[serde(default)]
    reach: Vec<Spanned<String>>,
    #[serde(default)]
    map: BTreeMap<Spanned<String>, u16>,
    sockets: Option<Spanned<i64>>,
    backlog: Option<Spanned<i64>>,
    buffer: Option<Spanned<i64>>,
    memory: Option<Spanned<i64>>,
    channels: Option<Spanned<i64>>,
    #[serde(default)]
    wake: Wake,
    priority: Option<Spanned<i64>>,
    #[serde(default)]
    deadlines: bool,
    qemu_user: Option<Spanned<User>>,
}

/// A user, as a number or a name.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum User {
    Number(u32),
    Name(String),
}

/// Reads the configuration of the VM `name` from the files in `directory`. None if no file names it.
///
/// # Errors
/// As [`load_all`].
pub fn load(directory: &Path, name: &str) -> Result<Option<Vm>, ConfigError> {
    Ok(load_all(directory)?.remove(name))
}

/// Reads the configuration of every VM, by name, from the files in `directory`.
///
/// # Errors
/// [`ConfigError`] for a file that cannot be read or has an invalid value, for a second table of a VM, or for the
/// tables of two VMs that libvirt's cgroups do not tell from each other.
pub fn load_all(directory: &Path) -> Result<BTreeMap<String, Vm>, ConfigError> {
    let mut found: BTreeMap<String, Vm> = BTreeMap::new();
    for path in config::files(directory, "sockets")? {
        let text = Text::read(&path)?;
        for (vm, entry) in parse(&text)? {
            let span = vm.span();
            let vm = vm.into_inner();
            if found.contains_key(&vm) {
                return Err(text.error(&span, format!("a second table for VM {vm}; keep one of them")));
            }
            let has_own_user = |other: &Vm| {
                let users = [entry.qemu_user, other.qemu_user];
                users.iter().all(Option::is_some) && entry.qemu_user != other.qemu_user
            };
            let is_like = |(name, other): &(&String, &Vm)| share_a_machine_name(name, &vm) && !has_own_user(other);
            if let Some((other, _)) = found.iter().find(is_like) {
                let what = format!(
                    "VM {vm} and VM {other} may have one name in libvirt's cgroups, which keep letters, digits, `.` \
                     and `-` only, so a QEMU of one could take the devices of the other; rename one of them, or run \
                     each QEMU as a user of its own and name both users as qemu-user"
                );
                return Err(text.error(&span, what));
            }
            found.insert(vm, entry);
        }
    }
    Ok(found)
}

/// Parses one file.
///
/// # Errors
/// [`ConfigError`] for an invalid value.
#[doc(hidden)]
pub fn parse(text: &Text) -> Result<Vec<(Spanned<String>, Vm)>, ConfigError> {
    let file: File = text.parse()?;
    file.vm.into_iter().map(|(vm, entry)| Ok((vm, check(text, entry)?))).collect()
}

fn check(text: &Text, entry: Entry) -> Result<Vm, ConfigError> {
    let default = Vm::default();
    let limits = default.policy.limits;
    let bind = entry.bind.iter().map(|item| of(text, item, ports, PORTS)).collect::<Result<_, _>>()?;
    let reach = entry.reach.iter().map(|item| of(text, item, network, NETWORK)).collect::<Result<_, _>>()?;
    let mut seen = BTreeSet::new();
    let map = entry.map.iter().map(|(item, host)| {
        if *host == 0 {
            return Err(text.error(&item.span(), format!("{:?}: the host's port is 1 to 65535", item.get_ref())));
        }
        let guest =
            of(text, item, |text| ports(text).filter(|ports| ports.first == ports.last && ports.first > 0), PORT)?;
        if !seen.insert((guest.protocol, guest.first)) {
            return Err(
                text.error(&item.span(), format!("{:?}: the port is mapped twice; keep one of them", item.get_ref()))
            );
        }
        Ok(Mapped { protocol: guest.protocol, guest: guest.first, host: *host })
    });
    let mut map: Vec<Mapped> = map.collect::<Result<_, ConfigError>>()?;
    // Two guest ports may share one host port. The guest is then told the first one, in an order independent of the
    // notation (`tcp/09`).
    map.sort_by_key(|mapped| (mapped.protocol == Protocol::Udp, mapped.guest));
    let sockets = number(text, entry.sockets, "sockets", 1..=i64::from(SOCKETS_MAX), i64::from(limits.sockets))? as u32;
    let memory = entry.memory.map(|memory| {
        let least = Limits::memory_min(sockets) as i64;
        let (span, given) = (memory.span(), *memory.get_ref());
        if given < least {
            let what = format!(
                "memory is {given}, {sockets} sockets need at least {least}; lower `sockets` or raise `memory`"
            );
            return Err(text.error(&span, what));
        }
        Ok(number(text, Some(memory), "memory", least..=1 << 50, least)? as u64)
    });
    let limits = Limits {
        sockets,
        memory: memory.transpose()?,
        backlog: number(text, entry.backlog, "backlog", 0..=65_535, i64::from(limits.backlog))? as i32,
        buffer: number(text, entry.buffer, "buffer", i64::from(BUFFER_MIN)..=1 << 30, i64::from(limits.buffer))? as i32,
    };
    Ok(Vm {
        policy: Policy { bind, reach, map, limits },
        channels: number(text, entry.channels, "channels", 0..=i64::from(ONTIME_CHANNELS_MAX) - 1, 0)? as u32,
        wake: entry.wake,
        priority: number(text, entry.priority, "priority", 1..=98, i64::from(default.priority))? as i32,
        deadlines: entry.deadlines,
        qemu_user: entry.qemu_user.map(|user| number_of(text, &user)).transpose()?,
    })
}

fn number_of(text: &Text, user: &Spanned<User>) -> Result<u32, ConfigError> {
    match user.get_ref() {
        User::Number(number) => Ok(*number),
        User::Name(name) => users::number_of(name).map_err(|why| text.error(&user.span(), why)),
    }
}

const PORTS: &str = "ports are written tcp/80, udp/5060-5070, or tcp/0 for any free port";
const PORT: &str = "a port is written tcp/80 or udp/53";
const NETWORK: &str = "a network is written 192.0.2.0/24 or 2001:db8::/32, with no bits set after the prefix";

fn of<T>(
    text: &Text,
    item: &Spanned<String>,
    parse: impl Fn(&str) -> Option<T>,
    allowed: &str,
) -> Result<T, ConfigError> {
    parse(item.get_ref()).ok_or_else(|| text.error(&item.span(), format!("{:?}: {allowed}", item.get_ref())))
}

fn number(
    text: &Text,
    given: Option<Spanned<i64>>,
    name: &str,
    allowed: RangeInclusive<i64>,
    default: i64,
) -> Result<i64, ConfigError> {
    match given {
        None => Ok(default),
        Some(number) if allowed.contains(number.get_ref()) => Ok(number.into_inner()),
        Some(number) => {
            let what = format!("{name} is {}, allowed are {} to {}", number.get_ref(), allowed.start(), allowed.end());
            Err(text.error(&number.span(), what))
        }
    }
}

fn ports(text: &str) -> Option<Ports> {
    let (protocol, range) = text.split_once('/')?;
    let protocol = match protocol {
        "tcp" => Protocol::Tcp,
        "udp" => Protocol::Udp,
        _ => return None,
    };
    let (first, last) = range.split_once('-').unwrap_or((range, range));
    let (first, last) = (first.parse().ok()?, last.parse().ok()?);
    (first <= last).then_some(Ports { protocol, first, last })
}

fn network(text: &str) -> Option<Network> {
    let (address, prefix) = text.split_once('/')?;
    Network::new(address.parse().ok()?, prefix.parse().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, vm: &str) -> Result<Option<Vm>, String> {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("sockets.toml"), text).unwrap();
        load(directory.path(), vm).map_err(|error| error.to_string())
    }

    #[test]
    fn a_vm_has_what_its_table_says() {
        let text = "[vm.web]\nbind = [\"tcp/80\", \"udp/5060-5070\"]\nreach = [\"192.0.2.0/24\"]\nmap = \
                    { \"tcp/80\" = 8080 }\nsockets = 7\nchannels = 2\nwake = \"interrupt\"\n";
        let vm = read(text, "web").unwrap().unwrap();
        assert_eq!(vm.policy.bind.len(), 2);
        assert_eq!(vm.policy.bind[1], Ports { protocol: Protocol::Udp, first: 5060, last: 5070 });
        assert_eq!(vm.policy.map, [Mapped { protocol: Protocol::Tcp, guest: 80, host: 8080 }]);
        assert_eq!((vm.policy.limits.sockets, vm.policy.limits.backlog), (7, 128));
        assert_eq!((vm.channels, vm.wake, vm.priority), (2, Wake::Interrupt, 48));
        assert_eq!((vm.qemu_user, vm.policy.limits.memory), (None, None));
        let limited = read("[vm.a]\nsockets = 8\nmemory = 4456448\n", "a").unwrap().unwrap();
        assert_eq!(limited.policy.limits.fixed_buffer(), Some(4_096));
        assert_eq!(read(text, "other").unwrap(), None);
        for (user, number) in [("\"root\"", 0), ("64055", 64055)] {
            let vm = read(&format!("[vm.a]\nqemu-user = {user}"), "a").unwrap().unwrap();
            assert_eq!(vm.qemu_user, Some(number));
        }
    }

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        for (text, at, word) in [
            ("[vm.a]\nbind = [\"tcp/80\", \"sctp/1\"]", ":2:19:", "tcp/80, udp/5060-5070"),
            ("[vm.a]\nreach = [\"192.0.2.1/24\"]", ":2:10:", "no bits set"),
            ("[vm.a]\nsockets = 60001", ":2:11:", "1 to 60000"),
            ("[vm.a]\nsockets = 8\nmemory = 4456447", ":3:10:", "8 sockets need at least 4456448"),
            ("[vm.a]\npriority = 99", ":2:12:", "1 to 98"),
            ("[vm.a]\nblind = []", ":2:1:", "did you mean `bind`"),
            ("[vm.a]\nmap = { \"tcp/80-81\" = 1 }", ":2:9:", "tcp/80 or udp/53"),
            ("[vm.a]\nmap = { \"tcp/80\" = 0 }", ":2:9:", "1 to 65535"),
            // The same port in two notations.
            ("[vm.a]\nmap = { \"tcp/80\" = 1, \"tcp/80-80\" = 2 }", ":2:23:", "mapped twice"),
            ("[vm.a]\nwake = \"never\"", ":2:8:", "`idle`"),
            ("[vm.a]\nqemu-user = \"nobody here\"", ":2:13:", "not in /etc/passwd"),
        ] {
            let error = read(text, "a").unwrap_err();
            assert!(error.contains(at) && error.contains(word), "{text:?}: {error}");
        }
    }

    #[test]
    fn vms_that_libvirts_cgroups_do_not_tell_apart_have_users_of_their_own() {
        let long = "x".repeat(50);
        for (one, other) in [("a_b", "ab"), ("a.", "a"), (&format!("{long}1"), &format!("{long}2"))] {
            let text = |first: &str, second: &str| format!("[vm.\"{one}\"]\n{first}[vm.\"{other}\"]\n{second}");
            for (first, second) in [("", ""), ("qemu-user = 1\n", ""), ("qemu-user = 1\n", "qemu-user = 1\n")] {
                let error = read(&text(first, second), "b").unwrap_err();
                assert!(error.contains(one) && error.contains(other) && error.contains("qemu-user"), "{error}");
            }
            assert_eq!(read(&text("qemu-user = 1\n", "qemu-user = 2\n"), "b"), Ok(None));
        }
        assert_eq!(read("[vm.a-b]\n[vm.ab]\n[vm.a1]\n", "b"), Ok(None));
    }

    #[test]
    fn two_tables_for_a_vm_are_one_too_many() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("sockets.toml"), "[vm.a]\n").unwrap();
        std::fs::create_dir(directory.path().join("sockets.conf.d")).unwrap();
        std::fs::write(directory.path().join("sockets.conf.d/a.toml"), "[vm.a]\n").unwrap();
        let error = load(directory.path(), "b").unwrap_err().to_string();
        assert!(error.contains("a.toml:1:") && error.contains("second table"), "{error}");
    }
}
