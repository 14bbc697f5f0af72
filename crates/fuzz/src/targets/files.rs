//! Every TOML file that the administrator writes.
//!
//! Properties of each file: parsing twice gives the same value; an error names a position in the text, and a suggestion
//! is an allowed word; values are within their documented ranges; and a parsed value, written as a file, is parsed as
//! the same value (for `tenants.toml`, whose rules are private: decisions respect the users' rights).

use std::fmt::{Debug, Write};
use std::net::IpAddr;

use ontime::fuzzing::{self, DaemonConfig, Mode};
use ontime_hostnet::HostConfig;
use ontime_plan::Bandwidth;
use ontime_sched::{Beyond, SchedConfig};
use ontime_sockets::config::{self as sockets, Vm, Wake};
use ontime_sockets::request::Protocol;
use ontime_tenants::config::{ConfigError, Text};
use ontime_tenants::rules::{Namer, Subject};
use ontime_tenants::{Class, Kind, Policy, Rules};

/// Parses a text twice. None if the text is refused.
fn read<T: Debug>(data: &[u8], parse: impl Fn(&Text) -> Result<T, ConfigError>) -> Option<T> {
    // A file that is no text is refused before parsing.
    let text = std::str::from_utf8(data).ok()?;
    let file = Text::new("/etc/ontime/fuzz.toml", text);
    let (first, second) = (parse(&file), parse(&file));
    assert_eq!(format!("{first:?}"), format!("{second:?}"), "read twice");
    match first {
        Ok(value) => Some(value),
        Err(error) => {
            refused(text, &error);
            None
        }
    }
}

fn refused(text: &str, error: &ConfigError) {
    let said = error.to_string();
    let ConfigError::Invalid { place, what, snippet, hint } = error else { panic!("nothing is read here: {said}") };
    assert!(said.starts_with("/etc/ontime/fuzz.toml:") && !what.is_empty());
    let lines = text.matches('\n').count() + 1;
    assert!((1..=lines).contains(&place.line) && place.column >= 1, "{said}");
    assert!(snippet.is_empty() || text.contains(snippet.as_str()), "{said}");
    assert!(place.column <= text.split('\n').nth(place.line - 1).unwrap().chars().count() + 1, "{said}");
    if let Some(hint) = hint {
        let is_word = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '_');
        assert!(!hint.is_empty() && hint.chars().all(is_word), "{said}");
    }
}

/// Parses the written form of a value.
fn reread<T>(text: &str, parse: impl Fn(&Text) -> Result<T, ConfigError>) -> T {
    parse(&Text::new("again.toml", text)).unwrap_or_else(|error| panic!("{error}\n{text}"))
}

/// A string or a key on one line of TOML.
fn quoted(text: &str) -> String {
    let escaped = text.chars().map(|c| match c {
        '"' | '\\' => format!("\\{c}"),
        c if c.is_control() => format!("\\U{:08x}", u32::from(c)),
        c => c.to_string(),
    });
    format!("\"{}\"", escaped.collect::<String>())
}

/// A TOML list of strings.
fn list(texts: &[String]) -> String {
    format!("[{}]", texts.iter().map(|text| quoted(text)).collect::<Vec<_>>().join(", "))
}

/// `tenants.toml`. Properties: those of each file (module comment); a tenant whose name a container or an unprivileged
/// user chose is RT only because of a rule that names a user; caps and priorities are within their ranges.
pub fn tenants_toml(data: &[u8]) {
    let Some(rules) = read(data, |text| Rules::parse(std::slice::from_ref(text))) else { return };
    let table = rules.table();
    let top = [table.watcher(), table.pacer(), table.teller()];
    assert!(top.iter().all(|policy| matches!(policy, Policy::Fifo(1..=99))));
    let names_users = data.windows(4).any(|word| word == b"user") || data.contains(&b'\\');
    let namers = [Namer::User(0), Namer::User(1000), Namer::Container];
    for (namer, name) in namers.into_iter().flat_map(|namer| ["web", "plc-0/loop", ""].map(|name| (namer, name))) {
        let owner = if namer == Namer::User(0) { 0 } else { 1000 };
        for (cgroup, cgroup_owner) in [(None, 0), (Some("/rt.slice/a.scope"), 0), (Some("/user.slice/a"), 1000)] {
            let uuid = Some("3f1c9a52-0d52-4c1b-9e0a-6f4b7f1d2c33");
            let subject = Subject {
                name,
                namespace: Some("plant"),
                uuid,
                cgroup,
                cgroup_owner,
                kind: Kind::Container,
                owner,
                namer,
                beside_vm: false,
                in_pod_of_vm: false,
            };
            let _ = rules.unused(&[subject]);
            let decision = rules.decide(&subject, None);
            assert!((1e-6..=1.0).contains(&decision.runtime_cap), "{decision:?}");
            if let Class::Rt(level) = decision.class {
                assert!(level.get() <= 8);
                let has_authority = namer == Namer::User(0) || names_users || cgroup.is_some() && cgroup_owner == 0;
                assert!(has_authority, "{subject:?}: {decision:?}");
            }
        }
    }
    let _ = (rules.names_cgroup("/rt.slice"), rules.unused(&[]));
}

/// `host.toml`. Properties: those of each file (module comment).
pub fn host_toml(data: &[u8]) {
    let parse = |text: &Text| {
        let mut config = HostConfig::default();
        config.add(text).map(|()| config)
    };
    let Some(config) = read(data, parse) else { return };
    assert!(config.bulk_napi_weight.is_none_or(|weight| (1..=64).contains(&weight)));
    assert!(config.without.iter().all(|rule| rule.may_be_left_out()));
    assert_eq!(reread(&host_text(&config), parse), config);
}

fn class_text(class: Class) -> String {
    match class {
        Class::Rt(level) => format!("class = \"rt\"\nlevel = {}\n", level.get()),
        Class::Bulk => "class = \"bulk\"\n".to_owned(),
    }
}

fn host_text(config: &HostConfig) -> String {
    let mut text = String::new();
    let numbers = [("exclusive_cpu", config.exclusive_cpu), ("bulk_napi_weight", config.bulk_napi_weight)];
    for (key, number) in numbers {
        number.iter().for_each(|number| writeln!(text, "{key} = {number}").unwrap());
    }
    config.method.iter().for_each(|method| writeln!(text, "method = \"{method}\"").unwrap());
    let without: Vec<String> = config.without.iter().map(ToString::to_string).collect();
    writeln!(text, "without = {}", list(&without)).unwrap();
    if let Some(adaptive) = &config.adaptive {
        let linger = adaptive.linger.as_millis();
        writeln!(text, "[busypoll]\nadaptive = true\nbound = {:?}\nlinger_ms = {linger}", adaptive.bound).unwrap();
    }
    for (name, nic) in &config.nics {
        let name = quoted(name);
        writeln!(text, "[nic.{name}]\nqdisc_bypass = {}\ntenants = {}", nic.qdisc_bypass, list(&nic.tenants)).unwrap();
        nic.class.iter().for_each(|class| text += &class_text(*class));
        nic.poll_cpu.iter().for_each(|cpu| writeln!(text, "poll_cpu = {cpu}").unwrap());
        for (queue, class) in &nic.queues {
            write!(text, "[nic.{name}.queue.{queue}]\n{}", class_text(*class)).unwrap();
        }
    }
    text
}

/// `daemon.toml`. Properties: those of each file (module comment).
pub fn daemon_toml(data: &[u8]) {
    let parse = |text: &Text| {
        let mut config = DaemonConfig::default();
        config.add(text).map(|()| config)
    };
    let Some(config) = read(data, parse) else { return };
    assert!((1..=3600).contains(&config.rescan.as_secs()) && (1..=100).contains(&config.cap_period.as_millis()));
    assert!((16..=65_536).contains(&config.cap_threads) && (16..=65_536).contains(&config.cap_threads_per_tenant));
    assert!(config.pool() > 0 && config.pool() < config.cap_threads);
    let fraction = config.cap_cpu_share.fraction();
    assert!(fraction > 0.0 && fraction < 1.0, "{fraction}");
    let mode = if config.mode == Mode::Observe { "observe" } else { "enforce" };
    let text = format!(
        "mode = \"{mode}\"\nrescan-seconds = {}\n[cap]\nperiod-ms = {}\ncpu-share = {fraction:?}\nthreads = {}\n\
         threads-per-tenant = {}\nuncapped = {}\n",
        config.rescan.as_secs(),
        config.cap_period.as_millis(),
        config.cap_threads,
        config.cap_threads_per_tenant,
        list(&config.cap_uncapped),
    );
    assert_eq!(reread(&text, parse), config);
}

/// `sched.toml`. Properties: those of each file (module comment).
pub fn sched_toml(data: &[u8]) {
    let parse = |text: &Text| {
        let mut config = SchedConfig::default();
        config.add(text).map(|()| config)
    };
    let Some(config) = read(data, parse) else { return };
    assert!(config.cpus.as_ref().is_none_or(|cpus| !cpus.is_empty()));
    let reserve = config.reserve.as_f64();
    assert!((0.01..=0.900_001).contains(&reserve), "{reserve}");
    for one in &config.reservations {
        assert!((500_000..=1_000_000_000).contains(&one.period.0), "{one:?}");
        assert!(one.budget.0 > 0 && one.budget <= one.period, "{one:?}");
        assert!(one.bandwidth.as_f64() <= 1.0 && one.vcpus.as_ref().is_none_or(|vcpus| !vcpus.is_empty()));
        assert!(one.deadlines.is_none_or(|most| most.as_f64() <= 1.0), "{one:?}");
    }
    let again = reread(&sched_text(&config), parse);
    assert_eq!((again.backend, again.beyond, &again.cpus), (config.backend, config.beyond, &config.cpus));
    // Rounded up to the millionth of a CPU each time.
    assert!((again.reserve.as_f64() - reserve).abs() <= 1.1e-6, "{reserve}");
    assert_eq!(again.reservations.len(), config.reservations.len());
    for (one, other) in again.reservations.iter().zip(&config.reservations) {
        assert_eq!((&one.name, one.budget, one.period), (&other.name, other.budget, other.period));
        assert_eq!(
            (&one.vcpus, one.deadlines, one.deadline_period),
            (&other.vcpus, other.deadlines, other.deadline_period)
        );
    }
}

fn sched_text(config: &SchedConfig) -> String {
    let beyond = if config.beyond == Beyond::Idle { "idle" } else { "other" };
    let mut text = format!(
        "backend = \"{}\"\nbeyond = \"{beyond}\"\nreserve = {:?}\n",
        config.backend.name(),
        config.reserve.as_f64().min(0.9)
    );
    config.cpus.iter().for_each(|cpus| writeln!(text, "cpus = \"{cpus}\"").unwrap());
    for one in &config.reservations {
        let name = quoted(&one.name);
        let (budget, period, shortest) = (one.budget.0, one.period.0, one.deadline_period.0);
        writeln!(text, "[[reservation]]\nname = {name}\nbudget = \"{budget}ns\"\nperiod = \"{period}ns\"").unwrap();
        writeln!(text, "deadline-period = \"{shortest}ns\"").unwrap();
        one.vcpus.iter().for_each(|vcpus| writeln!(text, "vcpus = {:?}", vcpus.iter().collect::<Vec<_>>()).unwrap());
        one.deadlines.iter().for_each(|most| writeln!(text, "deadlines = {:?}", most.as_f64()).unwrap());
    }
    text
}

/// `sockets.toml`. Properties: those of each file (module comment); a special address is reachable only if a network
/// within its range is named.
pub fn sockets_toml(data: &[u8]) {
    let parse = |text: &Text| -> Result<Vec<(String, Vm)>, ConfigError> {
        let vms = sockets::parse(text)?;
        Ok(vms.into_iter().map(|(name, vm)| (name.into_inner(), vm)).collect())
    };
    let Some(vms) = read(data, parse) else { return };
    for (_, vm) in &vms {
        let limits = vm.policy.limits;
        assert!((1..=60_000).contains(&limits.sockets) && (0..=65_535).contains(&limits.backlog));
        let all = u64::from(limits.sockets) * limits.fixed_buffer().map_or(0, |size| size as u64);
        assert!(all <= limits.memory.unwrap_or(0), "{all} bytes of {:?}", limits.memory);
        assert!((4096..=1 << 30).contains(&limits.buffer) && vm.channels <= 63 && (1..=98).contains(&vm.priority));
        reaches(vm);
    }
    let again = reread(&sockets_text(&vms), parse);
    assert_eq!(again, vms);
}

/// The file of `ontime plan`. Properties: those of each file (module comment), except that it is not written again;
/// each vCPU needs a part of one CPU, and its applications end in their periods.
pub fn plan_toml(data: &[u8]) {
    let Some((cpus, tenants)) = read(data, fuzzing::plan_toml) else { return };
    assert!((1..=1024).contains(&cpus) && tenants.len() <= 10_000);
    for vcpu in tenants.iter().flat_map(|tenant| &tenant.vcpus) {
        assert!(vcpu.bandwidth() > Bandwidth::ZERO && vcpu.bandwidth() <= Bandwidth::ONE, "{vcpu:?}");
        assert!(vcpu.affinity().is_none_or(|allowed| allowed.iter().all(|cpu| *cpu < cpus)), "{vcpu:?}");
    }
}

/// The file of `ontime verify --limits-file`. Properties: those of each file (module comment).
pub fn limits_toml(data: &[u8]) {
    let Some(sets) = read(data, fuzzing::limits_toml) else { return };
    let keys = ["cyclictest-us", "timerlat-us", "oslat-us", "request-us"];
    let mut text = "[limits]\n".to_owned();
    for (name, limits) in &sets {
        assert!(!limits.is_empty() && limits.iter().all(|limit| *limit > 0.0 && *limit <= 1e9), "{limits:?}");
        writeln!(text, "[limits.{}]", quoted(name)).unwrap();
        keys.iter().zip(limits).for_each(|(key, limit)| writeln!(text, "{key} = {limit:?}").unwrap());
    }
    assert_eq!(reread(&text, fuzzing::limits_toml), sets);
}

fn reaches(vm: &Vm) {
    let special = [
        ("127.0.0.1", 8),
        ("169.254.169.254", 16),
        ("100.100.100.200", 32),
        ("224.0.0.1", 4),
        ("::1", 128),
        ("fd00:ec2::254", 128),
        ("64:ff9b::169.254.169.254", 112),
    ];
    for (address, range) in special.map(|(address, range)| (address.parse::<IpAddr>().unwrap(), range)) {
        let prefix = |network: &String| network.rsplit_once('/').unwrap().1.parse::<u32>().unwrap();
        let named = vm.policy.reach.iter().map(ToString::to_string).any(|network| prefix(&network) >= range);
        let reached = vm.policy.reach(Protocol::Udp, (address, 53).into());
        assert!(reached.is_err() || named, "{address} is reached by {:?}", vm.policy.reach);
    }
}

fn sockets_text(vms: &[(String, Vm)]) -> String {
    let mut text = String::new();
    for (name, vm) in vms {
        let protocol = |protocol| if protocol == Protocol::Tcp { "tcp" } else { "udp" };
        let ports = |ports: &ontime_sockets::policy::Ports| {
            format!("{}/{}-{}", protocol(ports.protocol), ports.first, ports.last)
        };
        let policy = &vm.policy;
        let bind: Vec<String> = policy.bind.iter().map(ports).collect();
        let reach: Vec<String> = policy.reach.iter().map(ToString::to_string).collect();
        let mut map: Vec<String> = Vec::new();
        for mapped in &policy.map {
            map.push(format!(
                "{} = {}",
                quoted(&format!("{}/{}", protocol(mapped.protocol), mapped.guest)),
                mapped.host
            ));
        }
        let wake = if vm.wake == Wake::Idle { "idle" } else { "interrupt" };
        let limits = policy.limits;
        writeln!(
            text,
            "[vm.{}]\nbind = {}\nreach = {}\nmap = {{ {} }}\nsockets = {}\nbacklog = {}\nbuffer = {}\nchannels = {}\n\
             wake = \"{wake}\"\npriority = {}\ndeadlines = {}",
            quoted(name),
            list(&bind),
            list(&reach),
            map.join(", "),
            limits.sockets,
            limits.backlog,
            limits.buffer,
            vm.channels,
            vm.priority,
            vm.deadlines,
        )
        .unwrap();
        limits.memory.iter().for_each(|memory| writeln!(text, "memory = {memory}").unwrap());
        vm.qemu_user.iter().for_each(|user| writeln!(text, "qemu-user = {user}").unwrap());
    }
    text
}
