//! Reservations that programs requested over the socket: the list, who may change it, its limits, and its file.
//!
//! In: requests, each with the user who made it, and the time. Out: the leases that `ontime_sched` admits, the classes
//! that `ontime_tenants` gives to their tenants, and a file from which the next daemon of this boot takes them over.
//!
//! Time is CLOCK_BOOTTIME, so that a lease ends on time whatever sets the host's clock, and also while the host sleeps.
//! The file has no times: while no daemon ran, no owner could renew, so a new daemon begins each lease anew.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use ontime_plan::Nanos;
use ontime_sched::{Lease, LeaseState, PERIODS};
use ontime_tenants::rules::{Grant, ReservedFor};
use ontime_tenants::{Level, RuntimeCap, remedy};
use serde::{Deserialize, Serialize};

use super::config::DaemonConfig;
use super::held;
use crate::api;

/// The most reservations, and the most of all users but root.
const MOST: usize = 512;
const MOST_OF_USERS: usize = 384;
/// The most vCPUs of a reservation.
const COUNT_MAX: u32 = 256;
/// How long a lease may be, seconds.
const LEASES: std::ops::RangeInclusive<u64> = 10..=86_400;
/// The longest name of a reservation, of an owner, of a VM, and the longest cgroup path and pod UID, bytes.
const NAME_MAX: usize = 128;
const OWNER_MAX: usize = 64;
const VM_MAX: usize = 255;
const CGROUP_MAX: usize = 1024;
const UID_MAX: usize = 64;
/// The largest file that is read, bytes: more than [`MOST`] of the longest entries.
const FILE_MAX: u64 = 4 << 20;

/// Why a request changed nothing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Unreserved {
    /// The request is wrong, and would be at any time.
    #[error("{0}")]
    Wrong(String),
    /// This user may not make it.
    #[error("{0}")]
    Forbidden(String),
    /// It cannot be had now.
    #[error("{0}")]
    Refused(String),
    /// A limit on the number of reservations, or on their sum, is reached.
    #[error("{0}")]
    TooMany(String),
}

fn wrong<T>(what: String) -> Result<T, Unreserved> {
    Err(Unreserved::Wrong(what))
}

/// Whether a text has only the characters of a name, and begins with a letter or digit.
fn is_name(text: &str, most: usize) -> bool {
    let may_be = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    text.len() <= most && text.starts_with(|first: char| first.is_ascii_alphanumeric()) && text.bytes().all(may_be)
}

/// Refuses a text that is no name of a reservation.
///
/// # Errors
/// What is allowed.
pub(super) fn check_name(name: &str) -> Result<(), Unreserved> {
    if is_name(name, NAME_MAX) {
        return Ok(());
    }
    wrong(format!(
        "this is no name of a reservation: take 1 to {NAME_MAX} letters, digits, `.`, `_` or `-`, of which the first \
         is a letter or digit"
    ))
}

/// Refuses a request with a value that is not allowed.
///
/// # Errors
/// The field, its value, and what is allowed.
fn check(request: &api::ReserveRequest) -> Result<(), Unreserved> {
    check_for(&request.reserved_for)?;
    if !LEASES.contains(&request.lease_seconds) {
        let (least, most) = LEASES.into_inner();
        return wrong(format!("lease_seconds {} is not one of {least} to {most}", request.lease_seconds));
    }
    if !request.owner.is_empty() && !is_name(&request.owner, OWNER_MAX) {
        return wrong(format!("owner has other characters than a name may have, or more than {OWNER_MAX}"));
    }
    if let Err(what) = Level::try_from(request.level) {
        return wrong(what);
    }
    let (budget, period) = match (request.budget_us, request.period_us) {
        (Some(budget), Some(period)) => (budget, period),
        (None, None) if request.count.is_none() && request.cpus.is_none() => return Ok(()),
        _ => {
            return wrong(
                "give both budget_us and period_us, or none of them and neither count nor cpus for a class without \
                 reserved CPU time"
                    .to_owned(),
            );
        }
    };
    if !PERIODS.contains(&Nanos::from_micros(period)) {
        let (least, most) = PERIODS.into_inner();
        return wrong(format!("period_us {period} is not one of {} to {}", least.0 / 1_000, most.0 / 1_000));
    }
    if budget == 0 || budget > period {
        return wrong(format!("budget_us {budget} is not above 0 and at most period_us, {period}"));
    }
    let count = count(request);
    if !(1..=COUNT_MAX).contains(&count) {
        return wrong(format!("count {count} is not one of 1 to {COUNT_MAX}"));
    }
    match &request.cpus {
        Some(cpus) if cpus.len() != count as usize => {
            wrong(format!("cpus has {} numbers: give one for each of count, {count}, or leave it out", cpus.len()))
        }
        _ => Ok(()),
    }
}

fn check_for(reserved_for: &api::ReservedFor) -> Result<(), Unreserved> {
    let is_text =
        |text: &str, most: usize| !text.is_empty() && text.len() <= most && !text.chars().any(char::is_control);
    match reserved_for {
        api::ReservedFor::Pod(uid) => {
            let may_be = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
            if uid.is_empty() || uid.len() > UID_MAX || !uid.bytes().all(may_be) {
                return wrong(format!(
                    "for.pod is no UID of a pod: take the pod's metadata.uid, 1 to {UID_MAX} letters, digits and `-`"
                ));
            }
        }
        api::ReservedFor::Cgroup(path) => {
            let mut parts = path.split('/');
            let is_absolute = parts.next() == Some("");
            if !is_absolute || !is_text(path, CGROUP_MAX) || parts.any(|part| matches!(part, "" | "." | "..")) {
                return wrong(format!(
                    "for.cgroup is not the path of a cgroup below the cgroup v2 mount, such as /rt.slice/cell.service: \
                     at most {CGROUP_MAX} bytes"
                ));
            }
        }
        api::ReservedFor::Vm(name) => {
            if !is_text(name, VM_MAX) {
                return wrong(format!(
                    "for.vm is no name of a VM: take the one in `ontime ps`, at most {VM_MAX} bytes"
                ));
            }
        }
    }
    Ok(())
}

/// What a reservation is for, as in `reservations.for`.
fn written(reserved_for: &api::ReservedFor) -> String {
    match reserved_for {
        api::ReservedFor::Pod(uid) => format!("pod:{uid}"),
        api::ReservedFor::Cgroup(path) => format!("cgroup:{path}"),
        api::ReservedFor::Vm(name) => format!("vm:{name}"),
    }
}

/// How many vCPUs have the budget.
fn count(request: &api::ReserveRequest) -> u32 {
    request.count.unwrap_or(1)
}

/// The bandwidth of one vCPU, in whole millionths of a CPU; None: only a class is requested.
fn ppm(request: &api::ReserveRequest) -> Option<u64> {
    let (budget, period) = request.budget_us.zip(request.period_us)?;
    Some(budget.saturating_mul(1_000_000).div_ceil(period.max(1)))
}

/// The bandwidth of all vCPUs, in whole millionths of a CPU.
fn cost(request: &api::ReserveRequest) -> u64 {
    ppm(request).unwrap_or(0).saturating_mul(u64::from(count(request)))
}

/// What the admission gets of a request; None: only a class is requested.
pub(super) fn lease(name: &str, request: &api::ReserveRequest, admitted: bool) -> Option<Lease> {
    Some(Lease {
        name: name.to_owned(),
        ppm: ppm(request)?,
        period: Nanos::from_micros(request.period_us?),
        count: count(request),
        cpus: request.cpus.clone(),
        admitted,
    })
}

fn grant(name: &str, request: &api::ReserveRequest) -> Option<Grant> {
    let to = match request.reserved_for.clone() {
        api::ReservedFor::Pod(uid) => ReservedFor::Pod(uid),
        api::ReservedFor::Cgroup(path) => ReservedFor::Cgroup(path),
        api::ReservedFor::Vm(name) => ReservedFor::Vm(name),
    };
    // The cap holds the threads of containers, and of VMs that do not have what is reserved for them.
    let cap = ppm(request).and_then(|ppm| RuntimeCap::try_from(ppm as f64 / 1e6).ok());
    let level = Level::try_from(request.level).ok()?;
    let vcpus = cap.map_or(0, |_| count(request));
    Some(Grant { reservation: name.to_owned(), to, level, runtime_cap: cap, vcpus })
}

/// A reservation and its owner.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct Entry {
    /// The user who requested it last.
    uid: u32,
    /// Its place among all, the one that has its tenants for the longest first.
    #[serde(default)]
    order: u64,
    request: api::ReserveRequest,
    /// When its lease ends.
    #[serde(skip)]
    until: Duration,
}

/// The file's content. When it is read, a reservation is first any value: that of another version of Ontime may have
/// fields that this one does not know.
#[derive(Debug, Serialize, Deserialize)]
struct Record<Reservation> {
    boot_id: String,
    reservations: BTreeMap<String, Reservation>,
}

/// What a request does to the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// The reservation is new.
    Create,
    /// It has other content than before, and must be admitted anew.
    Change,
    /// Only its lease begins anew.
    Renew,
}

/// All requested reservations.
#[derive(Debug)]
pub(super) struct Requested {
    path: PathBuf,
    boot_id: String,
    entries: BTreeMap<String, Entry>,
    /// What is wrong with the file.
    fault: Option<String>,
}

impl Requested {
    /// Reads what an earlier daemon of this boot has stored. Their leases begin anew.
    pub(super) fn open(path: PathBuf, boot_id: &str, now: Duration) -> Self {
        let mut fault = None;
        let record = read(&path).unwrap_or_else(|error| {
            fault = Some(format!(
                "{}: the reservations that programs requested are not known: {error}; {}; their owners must request \
                 them again",
                path.display(),
                remedy(&error)
            ));
            None
        });
        let stored = record.filter(|record| record.boot_id == boot_id).map(|record| record.reservations);
        let stored = stored.unwrap_or_default();
        let before = stored.len();
        let understood = |(name, value): (String, serde_json::Value)| {
            let entry: Entry = serde_json::from_value(value).ok()?;
            check_name(&name).and_then(|()| check(&entry.request)).ok()?;
            Some((name, entry))
        };
        let mut entries: BTreeMap<String, Entry> = stored.into_iter().filter_map(understood).collect();
        if entries.len() < before {
            let lost = before - entries.len();
            fault = Some(format!("{}: {lost} reservations in it are wrong, and were left out", path.display()));
        }
        if entries.len() > MOST {
            let more = entries.len() - MOST;
            let what = format!("{}: {more} reservations in it are more than {MOST}, and were left out", path.display());
            fault = Some(fault.into_iter().chain([what]).collect::<Vec<String>>().join("; "));
            while entries.len() > MOST {
                entries.pop_last();
            }
        }
        for entry in entries.values_mut() {
            entry.until = now + Duration::from_secs(entry.request.lease_seconds);
        }
        if let Some(fault) = &fault {
            tracing::warn!("{fault}");
        }
        Self { path, boot_id: boot_id.to_owned(), entries, fault }
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// What is wrong with the file, until it is written again.
    pub(super) fn fault(&self) -> Option<&str> {
        self.fault.as_deref()
    }

    /// Who makes a request, and what it would do if it is admitted.
    ///
    /// # Errors
    /// The value that is not allowed, the missing right, or the limit.
    pub(super) fn judge(
        &self,
        name: &str,
        request: &api::ReserveRequest,
        uid: Option<u32>,
        config: &DaemonConfig,
    ) -> Result<(u32, Step), Unreserved> {
        let uid = self.authorise(name, uid, config)?;
        check(request)?;
        let reserved_for = written(&request.reserved_for);
        if uid != 0 && !config.may_reserve_for(&reserved_for) {
            return Err(Unreserved::Forbidden(format!(
                "users beside root may not reserve for {reserved_for}; add it to `reservations.for` in daemon.toml"
            )));
        }
        // Such a class has the default cap, on each thread and CPU, beside `reservations.cpus-per-user`.
        if uid != 0 && ppm(request).is_none() {
            return Err(Unreserved::Forbidden(
                "users beside root may not request a class without reserved CPU time; give budget_us and period_us, \
                 or have root request the class"
                    .to_owned(),
            ));
        }
        let step = self.step(name, request);
        if step != Step::Renew {
            self.within_limits(name, request, uid, config)?;
        }
        Ok((uid, step))
    }

    /// Refuses a user who may not change this reservation. root may change all.
    ///
    /// # Errors
    /// What the user may do, and who may change that.
    pub(super) fn authorise(&self, name: &str, uid: Option<u32>, config: &DaemonConfig) -> Result<u32, Unreserved> {
        check_name(name)?;
        let uid = match uid {
            Some(uid) if uid == 0 || config.reserving_users.contains(&uid) => uid,
            _ => {
                return Err(Unreserved::Forbidden(
                    "only root, and users of `reservations.users` in daemon.toml, may reserve CPU time; run the \
                     program as one of them, or add its user there"
                        .to_owned(),
                ));
            }
        };
        match self.entries.get(name) {
            Some(entry) if uid != 0 && entry.uid != uid => {
                Err(Unreserved::Forbidden(format!("{name} is a reservation of another user; take another name")))
            }
            _ => Ok(uid),
        }
    }

    /// What this request would do.
    fn step(&self, name: &str, request: &api::ReserveRequest) -> Step {
        let Some(Entry { request: old, .. }) = self.entries.get(name) else { return Step::Create };
        let same = (&old.reserved_for, old.budget_us, old.period_us, count(old), &old.cpus, old.level)
            == (
                &request.reserved_for,
                request.budget_us,
                request.period_us,
                count(request),
                &request.cpus,
                request.level,
            );
        if same { Step::Renew } else { Step::Change }
    }

    /// Refuses a request beyond a limit.
    ///
    /// # Errors
    /// The limit.
    fn within_limits(
        &self,
        name: &str,
        request: &api::ReserveRequest,
        uid: u32,
        config: &DaemonConfig,
    ) -> Result<(), Unreserved> {
        let others = || self.entries.iter().filter(|(own, _)| *own != name).map(|(_, entry)| entry);
        let too_many = |most: usize, whose: &str| {
            let what = format!("there are {most} reservations{whose}, the most that the daemon keeps; delete some");
            Err(Unreserved::TooMany(what))
        };
        if others().count() >= MOST {
            return too_many(MOST, "");
        }
        if uid == 0 {
            return Ok(());
        }
        if others().filter(|entry| entry.uid != 0).count() >= MOST_OF_USERS {
            return too_many(MOST_OF_USERS, " of users other than root");
        }
        let own = || others().filter(|entry| entry.uid == uid);
        let (most, cpus) = (config.reservations_per_user, config.reserved_ppm_per_user);
        if own().count() >= most {
            return Err(Unreserved::TooMany(format!(
                "user {uid} has {most} reservations, the most allowed; delete some, or raise `reservations.per-user` \
                 in daemon.toml"
            )));
        }
        let sum = own().fold(cost(request), |sum, entry| sum.saturating_add(cost(&entry.request)));
        if sum > cpus {
            return Err(Unreserved::TooMany(format!(
                "user {uid} would hold {:.3} CPUs, more than the {:.3} allowed; ask for less, or raise \
                 `reservations.cpus-per-user` in daemon.toml",
                sum as f64 / 1e6,
                cpus as f64 / 1e6
            )));
        }
        Ok(())
    }

    /// The leases to be admitted, with this one new or in place of the one of its name.
    pub(super) fn leases_with(&self, new: Lease) -> Vec<Lease> {
        let mut leases = self.leases();
        leases.retain(|lease| lease.name != new.name);
        leases.push(new);
        leases
    }

    /// The leases, each of which was admitted.
    pub(super) fn leases(&self) -> Vec<Lease> {
        self.entries.iter().filter_map(|(name, entry)| lease(name, &entry.request, true)).collect()
    }

    /// The classes of their tenants. Among those for one tenant the first counts, so root's come first, then the
    /// oldest: nobody takes a tenant from another's reservation.
    pub(super) fn grants(&self) -> Vec<Grant> {
        let mut entries: Vec<(&String, &Entry)> = self.entries.iter().collect();
        entries.sort_by_key(|(_, entry)| (entry.uid != 0, entry.order));
        entries.into_iter().filter_map(|(name, entry)| grant(name, &entry.request)).collect()
    }

    /// Puts a reservation into the list and the file, and begins its lease.
    ///
    /// # Errors
    /// The file cannot be written; then the list stays as it was.
    pub(super) fn put(
        &mut self,
        name: &str,
        request: api::ReserveRequest,
        uid: u32,
        now: Duration,
    ) -> Result<(), Unreserved> {
        let until = now + Duration::from_secs(request.lease_seconds);
        let last = || self.entries.values().map(|entry| entry.order).max().unwrap_or(0);
        let old = self.entries.get(name).filter(|old| old.request.reserved_for == request.reserved_for);
        let order = old.map_or_else(|| last().saturating_add(1), |old| old.order);
        let new = Entry { uid, order, request, until };
        // What is stored does not change with each renewal.
        if let Some(old) = self.entries.get_mut(name).filter(|old| (old.uid, &old.request) == (uid, &new.request)) {
            old.until = until;
            return Ok(());
        }
        let before = self.entries.insert(name.to_owned(), new);
        self.store().map_err(|error| {
            match before {
                Some(before) => self.entries.insert(name.to_owned(), before),
                None => self.entries.remove(name),
            };
            Unreserved::Refused(format!(
                "{}: the reservation cannot be kept over a restart: {error}; {}",
                self.path.display(),
                remedy(&error)
            ))
        })
    }

    /// Removes a reservation. Returns whether there was one.
    pub(super) fn remove(&mut self, name: &str) -> bool {
        let removed = self.entries.remove(name).is_some();
        if removed {
            self.store_or_tell();
        }
        removed
    }

    /// Removes the reservations whose leases have ended, and returns their names and users.
    pub(super) fn end(&mut self, now: Duration) -> Vec<(String, u32)> {
        let ended = self.entries.iter().filter(|(_, entry)| entry.until <= now);
        let ended: Vec<(String, u32)> = ended.map(|(name, entry)| (name.clone(), entry.uid)).collect();
        if !ended.is_empty() {
            self.entries.retain(|_, entry| entry.until > now);
            self.store_or_tell();
        }
        ended
    }

    /// The time until the next lease ends.
    pub(super) fn ends_in(&self, now: Duration) -> Option<Duration> {
        self.entries.values().map(|entry| entry.until.saturating_sub(now)).min()
    }

    /// A removed reservation that stays in the file lasts for one lease more after a restart.
    fn store_or_tell(&mut self) {
        if let Err(error) = self.store() {
            let (path, advice) = (self.path.display(), remedy(&error));
            let fault = format!(
                "{path}: the removal of a reservation cannot be stored: {error}; {advice}; until then a daemon that is \
                 restarted holds it for one more lease"
            );
            tracing::warn!("{fault}");
            self.fault = Some(fault);
        }
    }

    fn store(&mut self) -> io::Result<()> {
        let record = Record { boot_id: self.boot_id.clone(), reservations: self.entries.clone() };
        held::write(&self.path, &serde_json::to_vec(&record)?)?;
        self.fault = None;
        Ok(())
    }

    /// All reservations, for the API. `states` are those of the leases; `off`: why nothing is reserved.
    pub(super) fn show(
        &self,
        states: &BTreeMap<String, LeaseState>,
        tenants: impl Fn(&str) -> Vec<String>,
        off: Option<&str>,
        now: Duration,
    ) -> Vec<api::Requested> {
        let shown = |(name, entry): (&String, &Entry)| {
            let request = &entry.request;
            let bandwidth = cost(request);
            let state = states.get(name);
            let names = tenants(name);
            let is_held = bandwidth == 0 || state.is_none_or(|state| state.held);
            let why = off.map(str::to_owned).or_else(|| state.and_then(|state| state.why.clone()));
            api::Requested {
                name: name.clone(),
                owner: request.owner.clone(),
                uid: entry.uid,
                reserved_for: request.reserved_for.clone(),
                budget_us: request.budget_us,
                period_us: request.period_us,
                count: if bandwidth == 0 { 0 } else { count(request) },
                cpus: request.cpus.clone(),
                level: request.level,
                micro_cpus: bandwidth,
                lease_seconds: request.lease_seconds,
                left_seconds: entry.until.saturating_sub(now).as_secs_f64(),
                held: is_held && off.is_none(),
                state: match (&why, names.is_empty()) {
                    (Some(_), _) => "refused".to_owned(),
                    (None, true) => "waiting".to_owned(),
                    (None, false) => "bound".to_owned(),
                },
                tenants: names,
                why,
            }
        };
        self.entries.iter().map(shown).collect()
    }
}

/// None: there is no file.
fn read(path: &Path) -> io::Result<Option<Record<serde_json::Value>>> {
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut text = Vec::new();
    file.take(FILE_MAX + 1).read_to_end(&mut text)?;
    if text.len() as u64 > FILE_MAX {
        return Err(io::Error::other(format!("it has more than {FILE_MAX} bytes")));
    }
    Ok(Some(serde_json::from_slice(&text)?))
}

/// The time since the host's boot.
pub(super) fn boot_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    Duration::new(seconds, u32::try_from(time.tv_nsec).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: Duration = Duration::from_secs(1_000);

    fn request(text: &str) -> Result<api::ReserveRequest, String> {
        let request: api::ReserveRequest = serde_json::from_str(text).map_err(|error| error.to_string())?;
        check(&request).map(|()| request).map_err(|error| error.to_string())
    }

    fn simple(more: &str) -> api::ReserveRequest {
        let text =
            format!(r#"{{"for": {{"vm": "a"}}, "budget_us": 3000, "period_us": 10000, "lease_seconds": 60{more}}}"#);
        request(&text).unwrap()
    }

    fn config() -> DaemonConfig {
        DaemonConfig { reserving_users: [7, 8].into(), ..DaemonConfig::default() }
    }

    fn empty(dir: &tempfile::TempDir) -> Requested {
        Requested::open(dir.path().join("requested"), "boot", START)
    }

    #[test]
    fn every_value_of_a_request_has_bounds_and_the_message_names_the_field() {
        let base =
            [("for", r#"{"pod": "7f0c-1"}"#), ("budget_us", "3000"), ("period_us", "10000"), ("lease_seconds", "60")];
        let with = |field: &str, value: &str| {
            let kept =
                base.iter().filter(|(name, _)| *name != field).map(|(name, value)| format!("\"{name}\": {value}"));
            let own = (!value.is_empty()).then(|| format!("\"{field}\": {value}"));
            request(&format!("{{{}}}", kept.chain(own).collect::<Vec<_>>().join(", ")))
        };
        let long = |many: usize| format!(r#"{{"vm": "{}"}}"#, "x".repeat(many));
        let deep = |many: usize| format!(r#"{{"cgroup": "{}"}}"#, "/x".repeat(many));
        for (field, good) in [
            ("for", r#"{"vm": "plc 1/\u00e4"}"#.to_owned()),
            ("for", r#"{"cgroup": "/rt.slice/a"}"#.to_owned()),
            ("for", long(VM_MAX)),
            ("for", deep(CGROUP_MAX / 2)),
            ("budget_us", "1".to_owned()),
            ("budget_us", "10000".to_owned()),
            ("period_us", "1000000".to_owned()),
            ("count", "256".to_owned()),
            ("cpus", "[4294967295]".to_owned()),
            ("cpus", "null".to_owned()),
            ("level", "8".to_owned()),
            ("lease_seconds", "10".to_owned()),
            ("lease_seconds", "86400".to_owned()),
            ("owner", "\"ontime-dra\"".to_owned()),
        ] {
            assert!(with(field, &good).is_ok(), "{field} {good}: {:?}", with(field, &good));
        }
        for (field, bad, word) in [
            ("for", String::new(), "for"),
            ("for", "{}".to_owned(), ""),
            ("for", r#"{"pod": "a", "vm": "b"}"#.to_owned(), ""),
            ("for", r#"{"node": "a"}"#.to_owned(), "pod"),
            ("for", r#"{"pod": ""}"#.to_owned(), "for.pod"),
            ("for", r#"{"pod": "../x"}"#.to_owned(), "for.pod"),
            ("for", r#"{"pod": "a_b"}"#.to_owned(), "for.pod"),
            ("for", format!(r#"{{"pod": "{}"}}"#, "a".repeat(UID_MAX + 1)), "for.pod"),
            ("for", r#"{"cgroup": "rt.slice"}"#.to_owned(), "for.cgroup"),
            ("for", r#"{"cgroup": "/"}"#.to_owned(), "for.cgroup"),
            ("for", r#"{"cgroup": "/a/../b"}"#.to_owned(), "for.cgroup"),
            ("for", r#"{"cgroup": "/a//b"}"#.to_owned(), "for.cgroup"),
            ("for", r#"{"cgroup": "/a\n"}"#.to_owned(), "for.cgroup"),
            ("for", deep(CGROUP_MAX / 2 + 1), "for.cgroup"),
            ("for", r#"{"vm": ""}"#.to_owned(), "for.vm"),
            ("for", r#"{"vm": "a\u001b[2J"}"#.to_owned(), "for.vm"),
            ("for", long(VM_MAX + 1), "for.vm"),
            ("budget_us", String::new(), "budget_us"),
            ("budget_us", "0".to_owned(), "budget_us 0"),
            ("budget_us", "-1".to_owned(), "-1"),
            ("budget_us", "1.5".to_owned(), "1.5"),
            ("budget_us", "10001".to_owned(), "budget_us 10001"),
            ("budget_us", "18446744073709551615".to_owned(), "budget_us 1844"),
            ("budget_us", "18446744073709551616".to_owned(), ""),
            ("period_us", String::new(), "period_us"),
            ("period_us", "0".to_owned(), "period_us 0"),
            ("period_us", "499".to_owned(), "500 to 1000000"),
            ("period_us", "1000001".to_owned(), "500 to 1000000"),
            ("period_us", "18446744073709551615".to_owned(), "500 to 1000000"),
            ("count", "0".to_owned(), "count 0"),
            ("count", "257".to_owned(), "count 257"),
            ("count", "4294967296".to_owned(), ""),
            ("cpus", "[]".to_owned(), "cpus has 0"),
            ("cpus", "[1, 2]".to_owned(), "cpus has 2"),
            ("cpus", "[-1]".to_owned(), ""),
            ("cpus", "\"1-2\"".to_owned(), ""),
            ("level", "9".to_owned(), "level 9"),
            ("level", "256".to_owned(), ""),
            ("lease_seconds", String::new(), "lease_seconds"),
            ("lease_seconds", "9".to_owned(), "lease_seconds 9"),
            ("lease_seconds", "86401".to_owned(), "10 to 86400"),
            ("owner", "\"a b\"".to_owned(), "owner"),
            ("owner", format!("\"{}\"", "a".repeat(OWNER_MAX + 1)), "owner"),
            ("more", "1".to_owned(), "more"),
        ] {
            let said = with(field, &bad).expect_err(&format!("{field} {bad}"));
            assert!(said.contains(word), "{field} {bad}: {said}");
        }
        let class_only = r#"{"for": {"pod": "a"}, "lease_seconds": 60"#;
        assert!(request(&format!("{class_only}, \"level\": 3}}")).is_ok());
        assert!(request(&format!("{class_only}, \"count\": 1}}")).is_err());
        for (name, is_good) in
            [("a", true), ("dra-7f0c.1_x", true), ("", false), ("-a", false), ("a/b", false), ("\u{e4}", false)]
        {
            assert_eq!(check_name(name).is_ok(), is_good, "{name}");
        }
        assert!(check_name(&"a".repeat(NAME_MAX)).is_ok() && check_name(&"a".repeat(NAME_MAX + 1)).is_err());
    }

    #[test]
    fn bandwidth_is_in_whole_millionths_rounded_up() {
        for (budget, period, ppm) in
            [(3_000, 10_000, 300_000), (1, 1_000_000, 1), (1, 3_000, 334), (500, 500, 1_000_000)]
        {
            let request = api::ReserveRequest { budget_us: Some(budget), period_us: Some(period), ..simple("") };
            assert_eq!(super::ppm(&request), Some(ppm), "{budget} in {period}");
            assert_eq!(cost(&api::ReserveRequest { count: Some(3), ..request }), 3 * ppm);
        }
    }

    #[test]
    fn users_change_only_their_own_and_within_their_limits() {
        let dir = tempfile::tempdir().unwrap();
        let mut all = empty(&dir);
        let mut config = config();
        for (uid, is_allowed) in [(Some(0), true), (Some(7), true), (Some(9), false), (None, false)] {
            assert_eq!(all.authorise("a", uid, &config).is_ok(), is_allowed, "{uid:?}");
        }
        all.put("a", simple(""), 7, START).unwrap();
        assert!(matches!(all.authorise("a", Some(8), &config), Err(Unreserved::Forbidden(_))));
        assert_eq!((all.authorise("a", Some(7), &config), all.authorise("a", Some(0), &config)), (Ok(7), Ok(0)));
        // 0.3 of the one CPU that a user may hold by default are taken.
        let large = |count: u32| api::ReserveRequest { count: Some(count), ..simple("") };
        assert_eq!(all.within_limits("b", &large(2), 7, &config), Ok(()));
        let Err(Unreserved::TooMany(why)) = all.within_limits("b", &large(3), 7, &config) else { panic!() };
        assert!(why.contains("1.200 CPUs") && why.contains("cpus-per-user"), "{why}");
        assert_eq!(all.within_limits("a", &large(3), 7, &config), Ok(()), "in place of the former one");
        assert_eq!(all.within_limits("b", &large(256), 0, &config), Ok(()));
        config.reservations_per_user = 1;
        let Err(Unreserved::TooMany(why)) = all.within_limits("b", &large(1), 7, &config) else { panic!() };
        assert!(why.contains("per-user"), "{why}");
        assert_eq!(all.within_limits("b", &large(1), 8, &config), Ok(()));
        // A user who is no longer listed may not even renew.
        config.reserving_users.clear();
        assert!(all.authorise("a", Some(7), &config).is_err());
        config.reserving_users.insert(8);
        for n in 1..MOST_OF_USERS {
            all.entries.insert(format!("n{n}"), all.entries["a"].clone());
        }
        // Users leave room for root's.
        let Err(Unreserved::TooMany(why)) = all.within_limits("b", &large(1), 8, &config) else { panic!() };
        assert!(why.contains("other than root"), "{why}");
        assert_eq!(all.within_limits("b", &large(1), 0, &config), Ok(()));
        for n in MOST_OF_USERS..MOST {
            all.entries.insert(format!("n{n}"), Entry { uid: 0, ..all.entries["a"].clone() });
        }
        assert_eq!(all.within_limits("a", &large(1), 0, &config), Ok(()));
        assert!(matches!(all.within_limits("b", &large(1), 0, &config), Err(Unreserved::TooMany(_))));
    }

    /// Its threads would have the default cap, each of them and on every CPU.
    #[test]
    fn users_request_no_class_without_reserved_time() {
        let dir = tempfile::tempdir().unwrap();
        let mut all = empty(&dir);
        let config = DaemonConfig { reservable: vec!["cgroup:/rt.slice/x".to_owned()], ..config() };
        let class = request(r#"{"for": {"cgroup": "/rt.slice/x"}, "level": 0, "lease_seconds": 86400}"#).unwrap();
        let timed = api::ReserveRequest { budget_us: Some(100), period_us: Some(10_000), ..class.clone() };
        for _ in 0..2 {
            let Err(Unreserved::Forbidden(why)) = all.judge("a", &class, Some(7), &config) else { panic!() };
            assert!(why.contains("budget_us"), "{why}");
            // What an earlier daemon has stored is not renewed.
            all.put("a", class.clone(), 7, START).unwrap();
        }
        assert_eq!(all.judge("a", &timed, Some(7), &config), Ok((7, Step::Change)));
        assert_eq!(all.judge("a", &class, Some(0), &config), Ok((0, Step::Renew)));
    }

    #[test]
    fn users_reserve_only_for_what_the_administrator_lists() {
        let dir = tempfile::tempdir().unwrap();
        let mut all = empty(&dir);
        let rest = r#""budget_us": 100, "period_us": 10000, "lease_seconds": 60"#;
        let of = |text: &str| request(&format!(r#"{{"for": {text}, {rest}}}"#)).unwrap();
        let judge = |all: &Requested, text: &str, uid: u32, config: &DaemonConfig| {
            all.judge("a", &of(text), Some(uid), config).map(|(_, step)| step)
        };
        let unlisted = DaemonConfig { reserving_users: [7].into(), ..DaemonConfig::default() };
        for text in [r#"{"cgroup": "/system.slice/sshd.service"}"#, r#"{"vm": "a"}"#, r#"{"pod": "7f0c-1"}"#] {
            let Err(Unreserved::Forbidden(why)) = judge(&all, text, 7, &unlisted) else { panic!("{text}") };
            assert!(why.contains("`reservations.for`"), "{why}");
            assert_eq!(judge(&all, text, 0, &unlisted), Ok(Step::Create), "root reserves for every tenant");
        }
        all.put("a", of(r#"{"vm": "a"}"#), 7, START).unwrap();
        assert!(judge(&all, r#"{"vm": "a"}"#, 7, &unlisted).is_err(), "nor is it renewed");
        assert_eq!(all.authorise("a", Some(7), &unlisted), Ok(7), "but its user may end it");
        let listed = DaemonConfig { reservable: vec!["vm:a".to_owned()], ..unlisted };
        assert_eq!(judge(&all, r#"{"vm": "a"}"#, 7, &listed), Ok(Step::Renew));
        assert!(judge(&all, r#"{"cgroup": "/a"}"#, 7, &listed).is_err());
    }

    #[test]
    fn nobody_takes_a_tenant_from_another_users_reservation() {
        let dir = tempfile::tempdir().unwrap();
        let mut all = empty(&dir);
        all.put("m", simple(""), 7, START).unwrap();
        all.put("a", simple(""), 8, START).unwrap();
        let order = |all: &Requested| all.grants().into_iter().map(|grant| grant.reservation).collect::<Vec<_>>();
        assert_eq!(order(&all), ["m", "a"]);
        all.put("z", simple(""), 0, START).unwrap();
        all.put("m", simple(r#", "level": 3"#), 7, START).unwrap();
        assert_eq!(order(&all), ["z", "m", "a"], "root's first, and a change keeps the place");
        assert_eq!(order(&Requested::open(dir.path().join("requested"), "boot", START)), ["z", "m", "a"]);
        let other = api::ReserveRequest { reserved_for: api::ReservedFor::Vm("b".to_owned()), ..simple("") };
        all.put("m", other, 7, START).unwrap();
        all.put("m", simple(""), 7, START).unwrap();
        assert_eq!(order(&all), ["z", "a", "m"], "who asks for another tenant comes last");
    }

    #[test]
    fn a_lease_ends_unless_it_is_renewed_and_only_other_content_is_a_change() {
        let dir = tempfile::tempdir().unwrap();
        let mut all = empty(&dir);
        let after = |seconds: u64| START + Duration::from_secs(seconds);
        assert_eq!((all.step("a", &simple("")), all.ends_in(START)), (Step::Create, None));
        all.put("a", simple(""), 0, START).unwrap();
        all.put("b", simple(r#", "owner": "x", "cpus": [1]"#), 0, after(5)).unwrap();
        assert_eq!(all.step("a", &simple(r#", "count": 1, "owner": "y""#)), Step::Renew);
        assert_eq!(all.step("a", &simple(r#", "count": 2"#)), Step::Change);
        assert_eq!(all.step("b", &simple(r#", "cpus": [2]"#)), Step::Change);
        assert_eq!(all.ends_in(after(10)), Some(Duration::from_secs(50)));
        all.put("a", simple(""), 0, after(30)).unwrap();
        assert!(all.end(after(64)).is_empty());
        assert_eq!(
            (all.end(after(65)), all.ends_in(after(65))),
            (vec![("b".to_owned(), 0)], Some(Duration::from_secs(25)))
        );
        let shown = all.show(&BTreeMap::new(), |_| Vec::new(), None, after(70));
        assert_eq!((shown.len(), shown[0].left_seconds, shown[0].state.as_str()), (1, 20.0, "waiting"));
        assert!(all.remove("a") && !all.remove("a") && all.leases().is_empty() && all.grants().is_empty());
    }

    #[test]
    fn a_file_with_too_many_reservations_is_a_fault() {
        let dir = tempfile::tempdir().unwrap();
        let mut all = empty(&dir);
        all.put("a", simple(""), 0, START).unwrap();
        for n in 0..MOST + 2 {
            all.entries.insert(format!("n{n}"), all.entries["a"].clone());
        }
        all.store().unwrap();
        let next = Requested::open(dir.path().join("requested"), "boot", START);
        let fault = next.fault().unwrap_or_default();
        assert!(next.len() == MOST && fault.contains("3 reservations in it are more than 512"), "{fault}");
    }

    #[test]
    fn the_file_is_of_this_boot_and_damage_is_told_and_loses_no_more_than_itself() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("requested");
        let mut all = empty(&dir);
        all.put("a", simple(r#", "owner": "x""#), 7, START).unwrap();
        all.put("b", simple(r#", "count": 2, "cpus": [1, 2], "level": 3"#), 0, START).unwrap();
        let later = Duration::from_secs(9_000);
        let next = Requested::open(path.clone(), "boot", later);
        assert_eq!((next.leases(), next.grants(), next.fault()), (all.leases(), all.grants(), None));
        assert_eq!((next.entries["a"].uid, next.ends_in(later)), (7, Some(Duration::from_secs(60))));
        assert!(Requested::open(path.clone(), "another", later).leases().is_empty());
        let whole = std::fs::read_to_string(&path).unwrap();
        // One entry is wrong, or of a later version of Ontime: the other stays.
        for (field, other) in [("3000", "30000000"), ("\"level\"", "\"colour\":1,\"level\""), ("{\"vm\"", "{\"node\"")]
        {
            assert!(whole.contains(field), "{whole}");
            std::fs::write(&path, whole.replacen(field, other, 1)).unwrap();
            let next = Requested::open(path.clone(), "boot", later);
            assert_eq!((next.entries.len(), next.fault().is_some()), (1, true), "{other}");
        }
        for damaged in ["", "{", "[]", "null", &whole[..whole.len() / 2], " ".repeat(5 << 20).as_str()] {
            std::fs::write(&path, damaged).unwrap();
            let mut next = Requested::open(path.clone(), "boot", later);
            let fault = next.fault().unwrap().to_owned();
            assert!(next.leases().is_empty() && fault.contains("requested"), "{fault}");
            // Writing it anew mends it.
            next.put("c", simple(""), 0, later).unwrap();
            assert_eq!((next.fault(), Requested::open(path.clone(), "boot", later).leases().len()), (None, 1));
        }
        // A file that cannot be written leaves the list as it was.
        std::fs::create_dir(path.with_extension("new")).unwrap();
        let mut next = Requested::open(path, "boot", later);
        assert!(matches!(next.put("d", simple(""), 0, later), Err(Unreserved::Refused(_))));
        assert!(matches!(next.put("c", simple(r#", "count": 2"#), 0, later), Err(Unreserved::Refused(_))));
        assert_eq!((next.leases().len(), next.leases()[0].count), (1, 1));
        assert!(next.remove("c") && next.fault().is_some());
    }
}
