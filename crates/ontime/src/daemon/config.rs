//! The daemon's configuration: its own file, the tenants' rules and the host's. If one file is wrong, none is used.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::Path;
use std::time::Duration;

use globset::Glob;
use ontime_hostnet::HostConfig;
use ontime_sched::{Lease, SchedConfig};
use ontime_tenants::config::{self, ConfigError, Text};
use ontime_tenants::rules::Grant;
use ontime_tenants::{PriorityTable, Rules, RuntimeCap};
use serde::Deserialize;
use toml::Spanned;

use super::cap::{self, Share};

/// All files of `/etc/ontime`.
#[derive(Debug, Clone)]
pub(crate) struct Config {
    /// `tenants.toml`: classes and priorities.
    pub rules: Rules,
    /// `host.toml`: method and classes of NICs.
    pub host: HostConfig,
    /// `daemon.toml`.
    pub daemon: DaemonConfig,
    /// `sched.toml`: reserved CPU time.
    pub sched: SchedConfig,
}

/// Descriptors that a capped thread takes (two in `cap::reading`, one in `cap::place`).
const DESCRIPTORS_EACH: usize = 3;
/// Descriptors for everything else: sockets of clients and device processes, trace rings, files that a pass reads.
const DESCRIPTORS: usize = 4096;
/// The allowed range of `cap.threads`. The unit's LimitNOFILE is sufficient for the maximum.
const CAP_THREADS: RangeInclusive<u64> = 16..=16_384;

/// Descriptors that the maximum of `cap.threads` needs.
pub(crate) const DESCRIPTORS_MOST: usize = DESCRIPTORS + DESCRIPTORS_EACH * 16_384;

/// Whether the daemon sets what it plans.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Mode {
    /// It discovers and plans, and sets nothing. A fresh installation has this mode (`packaging/ontime/daemon.toml`).
    Observe,
    /// It sets what it plans, and keeps it set. This is the default where no file names a mode, so that a host does not
    /// lose its guarantees by an upgrade.
    #[default]
    Enforce,
}

/// `daemon.toml`: how the daemon itself works.
#[derive(Debug, Clone, PartialEq)]
pub struct DaemonConfig {
    /// Whether it sets anything.
    pub mode: Mode,
    /// The longest time between two passes. A pass without an event finds changes that cause none, such as a sysctl
    /// that another program has changed.
    pub rescan: Duration,
    /// The period of runtime caps.
    pub cap_period: Duration,
    /// The most that all threads at real-time priority together may take of one CPU.
    pub cap_cpu_share: Share,
    /// The most threads watched.
    pub cap_threads: usize,
    /// The most threads watched of one tenant.
    pub cap_threads_per_tenant: usize,
    /// Cgroups whose real-time threads need no cap.
    pub cap_uncapped: Vec<String>,
    /// The TCP port of metrics; None: not served over TCP.
    pub metrics_port: Option<u16>,
    /// The address of that port.
    pub metrics_address: IpAddr,
    /// Users beside root who may reserve CPU time over the socket.
    pub reserving_users: BTreeSet<u32>,
    /// For what they may reserve ([`Self::may_reserve_for`]).
    pub reservable: Vec<String>,
    /// The most reservations of each of them.
    pub reservations_per_user: usize,
    /// The most bandwidth that each of them holds, in millionths of a CPU.
    pub reserved_ppm_per_user: u64,
}

impl Default for DaemonConfig {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            rescan: Duration::from_secs(30),
            cap_period: Duration::from_millis(2),
            cap_cpu_share: Share::NINETY_FIVE,
            cap_threads: 4096,
            cap_threads_per_tenant: 1024,
            cap_uncapped: Vec::new(),
            metrics_port: None,
            metrics_address: IpAddr::V4(Ipv4Addr::LOCALHOST),
            reserving_users: BTreeSet::new(),
            reservable: Vec::new(),
            reservations_per_user: 64,
            reserved_ppm_per_user: 1_000_000,
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    mode: Option<Mode>,
    rescan_seconds: Option<Spanned<u64>>,
    #[serde(default)]
    cap: CapFile,
    #[serde(default)]
    metrics: MetricsFile,
    #[serde(default)]
    reservations: ReservationsFile,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ReservationsFile {
    #[serde(default)]
    users: BTreeSet<u32>,
    #[serde(default, rename = "for")]
    reserved_for: Vec<Spanned<String>>,
    per_user: Option<Spanned<u64>>,
    cpus_per_user: Option<Spanned<f64>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct MetricsFile {
    port: Option<Spanned<u64>>,
    address: Option<Spanned<String>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct CapFile {
    period_ms: Option<Spanned<u64>>,
    cpu_share: Option<Spanned<f64>>,
    threads: Option<Spanned<u64>>,
    threads_per_tenant: Option<Spanned<u64>>,
    #[serde(default)]
    uncapped: Vec<Spanned<String>>,
}

impl DaemonConfig {
    /// Reads `DIRECTORY/daemon.toml` and `DIRECTORY/daemon.conf.d/*.toml`.
    ///
    /// # Errors
    /// [`ConfigError`], with file, line, what is wrong and what is allowed.
    pub(crate) fn load(directory: &Path) -> Result<Self, ConfigError> {
        let mut all = Self::default();
        for path in config::files(directory, "daemon")? {
            all.add(&Text::read(&path)?)?;
        }
        if !all.reserving_users.is_empty() && all.reservable.is_empty() {
            tracing::warn!(
                "reservations.users in daemon.toml may reserve for nothing: list patterns such as \"pod:*\" in \
                 reservations.for"
            );
        }
        Ok(all)
    }

    /// Whether users beside root may reserve for this, such as `vm:a`. A `*` also stands for `/`.
    pub(super) fn may_reserve_for(&self, reserved_for: &str) -> bool {
        let fits =
            |pattern: &String| Glob::new(pattern).is_ok_and(|glob| glob.compile_matcher().is_match(reserved_for));
        self.reservable.iter().any(fits)
    }

    /// Adds the content of one file. Later files override earlier ones; lists add up.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn add(&mut self, text: &Text) -> Result<(), ConfigError> {
        let file: File = text.parse()?;
        self.mode = file.mode.unwrap_or(self.mode);
        if let Some(seconds) = within(text, "rescan-seconds", file.rescan_seconds, 1..=3600)? {
            self.rescan = Duration::from_secs(seconds);
        }
        if let Some(ms) = within(text, "cap.period-ms", file.cap.period_ms, 1..=100)? {
            self.cap_period = Duration::from_millis(ms);
        }
        if let Some(threads) = within(text, "cap.threads", file.cap.threads, CAP_THREADS)? {
            self.cap_threads = usize::try_from(threads).unwrap_or(usize::MAX);
        }
        if let Some(threads) = within(text, "cap.threads-per-tenant", file.cap.threads_per_tenant, CAP_THREADS)? {
            self.cap_threads_per_tenant = usize::try_from(threads).unwrap_or(usize::MAX);
        }
        if let Some(port) = within(text, "metrics.port", file.metrics.port, 1..=65535)? {
            self.metrics_port = u16::try_from(port).ok();
        }
        if let Some(address) = file.metrics.address {
            self.metrics_address = address.get_ref().parse().map_err(|_| {
                let what =
                    format!("metrics.address `{}` is no IP address, such as 127.0.0.1 or ::1", address.get_ref());
                text.error(&address.span(), what)
            })?;
        }
        self.reserving_users.extend(file.reservations.users);
        for pattern in file.reservations.reserved_for {
            let may_be = ["pod:", "cgroup:/", "vm:"].iter().any(|kind| pattern.get_ref().starts_with(kind));
            if !may_be || Glob::new(pattern.get_ref()).is_err() {
                let what = format!(
                    "reservations.for `{}` is not a pattern such as pod:*, cgroup:/rt.slice/* or vm:cell-*",
                    pattern.get_ref()
                );
                return Err(text.error(&pattern.span(), what));
            }
            self.reservable.push(pattern.into_inner());
        }
        if let Some(most) = within(text, "reservations.per-user", file.reservations.per_user, 1..=512)? {
            self.reservations_per_user = usize::try_from(most).unwrap_or(usize::MAX);
        }
        if let Some(cpus) = file.reservations.cpus_per_user {
            let most = *cpus.get_ref();
            if !(0.001..=1024.0).contains(&most) {
                let what = format!("reservations.cpus-per-user {most} is not a number of CPUs from 0.001 to 1024");
                return Err(text.error(&cpus.span(), what));
            }
            // The range was checked.
            self.reserved_ppm_per_user = (most * 1e6).round() as u64;
        }
        for cgroup in file.cap.uncapped {
            let path = cgroup.get_ref();
            let mut parts = path.split('/');
            let odd = parts.next() != Some("") || parts.any(|part| matches!(part, "" | "." | ".."));
            if odd && path != "/" {
                let what =
                    format!("cap.uncapped `{path}` is not the path of a cgroup, such as `/system.slice/a.service`");
                return Err(text.error(&cgroup.span(), what));
            }
            self.cap_uncapped.push(cgroup.into_inner());
        }
        if let Some(share) = file.cap.cpu_share {
            self.cap_cpu_share = Share::new(*share.get_ref()).filter(|share| !share.is_whole()).ok_or_else(|| {
                let (least, given) = (RuntimeCap::LEAST, share.get_ref());
                let what = format!("cap.cpu-share {given} is not at least {least} and below 1 (a fraction of one CPU)");
                text.error(&share.span(), what)
            })?;
        }
        Ok(())
    }

    /// The number of descriptors that the daemon must be allowed to have open.
    pub(crate) fn descriptors(&self) -> usize {
        DESCRIPTORS + DESCRIPTORS_EACH * self.cap_threads
    }

    /// The most real-time threads of the host that a census reads: twice as many as can be capped.
    pub(crate) fn census(&self) -> usize {
        2 * self.cap_threads
    }

    /// Where metrics are served over TCP.
    pub(crate) fn metrics(&self) -> Option<SocketAddr> {
        self.metrics_port.map(|port| SocketAddr::new(self.metrics_address, port))
    }

    /// The most tenants' threads that are capped. The rest is for interrupt and NAPI threads.
    pub fn pool(&self) -> usize {
        self.cap_threads - self.cap_threads / 4
    }

    /// Settings of the cap watcher, which runs above every thread of this table.
    pub(crate) fn caps(&self, table: PriorityTable) -> cap::Settings {
        cap::Settings {
            period: self.cap_period,
            cpu_share: self.cap_cpu_share,
            watcher: table.watcher(),
            capacity: self.cap_threads,
            descriptors: self.descriptors(),
        }
    }
}

fn within(
    text: &Text,
    name: &str,
    value: Option<Spanned<u64>>,
    range: RangeInclusive<u64>,
) -> Result<Option<u64>, ConfigError> {
    let Some(value) = value else { return Ok(None) };
    if range.contains(value.get_ref()) {
        return Ok(Some(*value.get_ref()));
    }
    let what = format!("{name} {} is not one of {} to {}", value.get_ref(), range.start(), range.end());
    Err(text.error(&value.span(), what))
}

impl Config {
    /// Replaces what programs requested: the reservations, and the classes of their tenants.
    pub(crate) fn set_requested(&mut self, leases: Vec<Lease>, grants: Vec<Grant>) {
        self.sched.leases = leases;
        self.rules.set_grants(grants);
    }

    /// Reads a configuration directory.
    ///
    /// # Errors
    /// [`ConfigError`] for the first error, with file, line and what is allowed.
    pub(crate) fn load(directory: &Path) -> Result<Self, ConfigError> {
        let daemon = DaemonConfig::load(directory)?;
        let uncapped = daemon.cap_cpu_share.rest();
        let (rules, host) = (Rules::load(directory)?, HostConfig::load(directory)?);
        Ok(Self { rules, host, daemon, sched: SchedConfig { uncapped, ..SchedConfig::load(directory)? } })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<DaemonConfig, ConfigError> {
        let mut config = DaemonConfig::default();
        config.add(&Text::new("/etc/ontime/daemon.toml", text)).map(|()| config)
    }

    #[test]
    fn a_daemon_file_is_read() {
        let config =
            read("mode = \"observe\"\nrescan-seconds = 5\n[cap]\nperiod-ms = 10\ncpu-share = 0.8\nthreads = 64\n")
                .unwrap();
        assert_eq!(config.mode, Mode::Observe);
        assert_eq!(config.rescan, Duration::from_secs(5));
        assert_eq!(config.cap_period, Duration::from_millis(10));
        assert_eq!(config.cap_cpu_share, Share::new(0.8).unwrap());
        assert_eq!(config.cap_threads, 64);
        assert_eq!(read("").unwrap(), DaemonConfig::default());
    }

    #[test]
    fn metrics_are_served_over_tcp_only_where_a_port_is_named_and_then_locally() {
        let at = |text: &str| read(text).unwrap().metrics().map(|address| address.to_string());
        assert_eq!(at(""), None);
        assert_eq!(at("[metrics]\naddress = \"0.0.0.0\"\n"), None);
        assert_eq!(at("[metrics]\nport = 9745\n"), Some("127.0.0.1:9745".to_owned()));
        assert_eq!(at("[metrics]\nport = 9745\naddress = \"::1\"\n"), Some("[::1]:9745".to_owned()));
    }

    #[test]
    fn lists_of_uncapped_cgroups_add_up_over_files() {
        let mut config = DaemonConfig::default();
        for text in [
            "[cap]\nuncapped = [\"/system.slice/chronyd.service\"]\n",
            "[cap]\nuncapped = [\"/user.slice/user-1000.slice\"]\nthreads-per-tenant = 32\n",
        ] {
            config.add(&Text::new("/etc/ontime/daemon.toml", text)).unwrap();
        }
        assert_eq!(config.cap_uncapped, ["/system.slice/chronyd.service", "/user.slice/user-1000.slice"]);
        assert_eq!(config.cap_threads_per_tenant, 32);
    }

    #[test]
    fn a_fresh_installation_observes_and_a_later_file_may_enforce() {
        let packaged = include_str!("../../../../packaging/ontime/daemon.toml");
        assert_eq!(read(packaged).unwrap(), DaemonConfig { mode: Mode::Observe, ..DaemonConfig::default() });
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("daemon.toml"), packaged).unwrap();
        std::fs::create_dir(dir.path().join("daemon.conf.d")).unwrap();
        std::fs::write(dir.path().join("daemon.conf.d/10-site.toml"), "mode = \"enforce\"\n").unwrap();
        assert_eq!(DaemonConfig::load(dir.path()).unwrap().mode, Mode::Enforce);
    }

    #[test]
    fn users_who_may_reserve_are_named_by_number_and_have_limits() {
        let mut config = DaemonConfig::default();
        for text in [
            "[reservations]\nusers = [1001, 7]\nper-user = 3\nfor = [\"vm:cell-*\", \"pod:*\"]\n",
            "[reservations]\nusers = [8]\nfor = [\"cgroup:/rt.slice/*\"]\ncpus-per-user = 2.5\n",
        ] {
            config.add(&Text::new("/etc/ontime/daemon.toml", text)).unwrap();
        }
        assert_eq!(config.reserving_users, [7, 8, 1001].into());
        assert_eq!((config.reservations_per_user, config.reserved_ppm_per_user), (3, 2_500_000));
        for may in ["vm:cell-1", "pod:7f0c", "cgroup:/rt.slice/a.slice/b"] {
            assert!(config.may_reserve_for(may), "{may}");
        }
        for may_not in ["vm:db", "vm:a/cell-1", "cgroup:/rt.slice", "cgroup:/a/rt.slice/b", "cgroup:/system.slice"] {
            assert!(!config.may_reserve_for(may_not), "{may_not}");
        }
    }

    /// The unit's LimitNOFILE is sufficient for the maximum of `cap.threads`.
    #[test]
    fn the_unit_may_open_what_the_most_threads_need() {
        let most = DaemonConfig { cap_threads: 16_384, ..DaemonConfig::default() };
        assert_eq!(most.descriptors(), DESCRIPTORS_MOST);
        assert!(CAP_THREADS.contains(&16_384) && !CAP_THREADS.contains(&16_385));
        let unit = include_str!("../../../../packaging/systemd/ontimed.service");
        let limit = unit.lines().find_map(|line| line.strip_prefix("LimitNOFILE=")).unwrap();
        assert!(most.descriptors() <= limit.parse().unwrap(), "{} of {limit}", most.descriptors());
        // And a census reads all of them, and as many that are not capped.
        assert!(most.census() >= 2 * most.cap_threads);
    }

    #[test]
    fn what_is_not_allowed_is_refused_with_its_line() {
        for (text, line, word) in [
            ("rescan-seconds = 0\n", 1, "1 to 3600"),
            ("\nrescan-second = 1\n", 2, "rescan-seconds"),
            ("mode = \"watch\"\n", 1, "`observe` or `enforce`"),
            ("[cap]\ncpu-share = 1.0\n", 2, "below 1"),
            ("[cap]\ncpu-share = 9e-7\n", 2, "cap.cpu-share 0.0000009 is not at least 0.000001 and below 1"),
            ("[cap]\ncpu-share = nan\n", 2, "below 1"),
            ("[cap]\nperiod-ms = 1000\n", 2, "1 to 100"),
            ("[cap]\nthreads = -1\n", 2, ""),
            ("[cap]\nthreads = 20000\n", 2, "16 to 16384"),
            ("[cap]\nthreads-per-tenant = 1\n", 2, "16 to 16384"),
            ("[cap]\nuncapped = [\"system.slice\"]\n", 2, "not the path of a cgroup"),
            ("[metrics]\nport = 0\n", 2, "1 to 65535"),
            ("[metrics]\nport = 70000\n", 2, "1 to 65535"),
            ("[metrics]\naddress = \"localhost\"\n", 2, "no IP address"),
            ("[reservations]\nusers = [-1]\n", 2, ""),
            ("[reservations]\nusers = [\"root\"]\n", 2, ""),
            ("[reservations]\nper-user = 0\n", 2, "1 to 512"),
            ("[reservations]\nfor = [\"/rt.slice\"]\n", 2, "vm:cell-*"),
            ("[reservations]\nfor = [\"vm:[\"]\n", 2, "vm:cell-*"),
            ("[reservations]\ncpus-per-user = nan\n", 2, "0.001 to 1024"),
            ("[reservations]\ncpus-per-user = 0.0\n", 2, "0.001 to 1024"),
            ("[cap]\nuncapped = [\"/a/\"]\n", 2, "not the path of a cgroup"),
            ("[cap]\nuncapped = [\"/a/../b\"]\n", 2, "not the path of a cgroup"),
        ] {
            let message = read(text).unwrap_err().to_string();
            assert!(message.starts_with(&format!("/etc/ontime/daemon.toml:{line}:")), "{message}");
            assert!(message.contains(word), "{message}");
        }
    }
}
