//! `/etc/ontime/sched.toml` and `sched.conf.d`: CPU time declared for VMs.
//!
//! In: strict TOML. Out: a [`SchedConfig`], checked as far as the text allows; [`crate::admit`] checks whether it fits
//! this host. Without a file and without leases there are no reservations, and nothing of this crate runs.

use std::collections::BTreeSet;
use std::path::Path;

use ontime_plan::dpwrap::SLICE_MIN;
use ontime_plan::{Arrivals, Bandwidth, ModelError, Nanos, Rta, Vcpu};
use ontime_tenants::config::{self, ConfigError, Text, TextPosition};
use ontime_tenants::{CpuSet, Namer, Tenant, users};
use serde::Deserialize;
use toml::Spanned;

use crate::beside::{Beside, WATCHER_PPM};
use crate::lease::Lease;
use crate::model::{BackendKind, Beyond};

/// The shortest and longest period of a reservation. A period must hold two slices, each of which costs some changes of
/// policy.
pub const PERIODS: std::ops::RangeInclusive<Nanos> = Nanos(2 * SLICE_MIN.0)..=Nanos::from_millis(1_000);

/// Default for the shortest period that a guest may request (the declared period, if that is shorter).
const DEADLINE_PERIOD: Nanos = Nanos::from_millis(4);

/// Default for the part of each CPU that is never reserved, in millionths: what the kernel's own protections leave.
const RESERVE_PPM: u64 = 50_000;

/// A `[[reservation]]`: CPU time for each of some vCPUs of a VM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Declared {
    /// The VM's name.
    pub name: String,
    /// The user beside root whose VM it may be.
    pub user: Option<u32>,
    /// CPU time in each period, slack included.
    pub budget: Nanos,
    /// 500 us to 1 s.
    pub period: Nanos,
    /// Budget over period.
    pub bandwidth: Bandwidth,
    /// The numbers of the vCPUs; None: all.
    pub vcpus: Option<BTreeSet<u32>>,
    /// The most that the guest's deadline tasks may have of each vCPU in addition; None: the guest's requests are
    /// refused.
    pub deadlines: Option<Bandwidth>,
    /// The shortest period that these tasks may request. A short period means short slices for all vCPUs.
    pub deadline_period: Nanos,
    place: TextPosition,
}

impl Declared {
    /// Whether it is for this tenant: any user may give a VM any name.
    pub(crate) fn is_for(&self, tenant: &Tenant) -> bool {
        let by = [Some(0), self.user].into_iter().flatten().map(Namer::User);
        self.name == tenant.name && by.into_iter().any(|by| by == tenant.namer)
    }
}

/// The contents of all files.
#[derive(Debug, Clone, PartialEq)]
pub struct SchedConfig {
    /// How the shares are enforced.
    pub backend: BackendKind,
    /// The part of each CPU that is never reserved.
    pub reserve: Bandwidth,
    /// The part of each CPU that the runtime caps keep from real-time threads. No file of these has it.
    pub uncapped: Bandwidth,
    /// CPUs for reservations; None: all that are online.
    pub cpus: Option<CpuSet>,
    /// The policy of a vCPU that has used up its share.
    pub beyond: Beyond,
    /// In the order of the files.
    pub reservations: Vec<Declared>,
    /// What programs requested from the daemon. No file has these.
    pub leases: Vec<Lease>,
}

impl Default for SchedConfig {
    fn default() -> Self {
        Self {
            backend: BackendKind::default(),
            reserve: Bandwidth::ppm(RESERVE_PPM),
            uncapped: Bandwidth::ppm(RESERVE_PPM),
            cpus: None,
            beyond: Beyond::default(),
            reservations: Vec::new(),
            leases: Vec::new(),
        }
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    backend: Option<BackendKind>,
    reserve: Option<Spanned<f64>>,
    cpus: Option<Spanned<String>>,
    beyond: Option<Beyond>,
    slack: Option<Nanos>,
    #[serde(default)]
    reservation: Vec<Spanned<Entry>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Entry {
    name: String,
    user: Option<Spanned<User>>,
    budget: Spanned<Nanos>,
    period: Spanned<Nanos>,
    slack: Option<Spanned<Nanos>>,
    vcpus: Option<Spanned<BTreeSet<u32>>>,
    deadlines: Option<Spanned<f64>>,
    deadline_period: Option<Spanned<Nanos>>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a user's name or number")]
enum User {
    Number(u32),
    Name(String),
}

impl SchedConfig {
    /// Reads `DIRECTORY/sched.toml` and `DIRECTORY/sched.conf.d/*.toml`. For settings of the whole host, the last file
    /// wins. `slack` is for the reservations of its own file.
    ///
    /// # Errors
    /// [`ConfigError`], with the file, the line, the mistake, and the allowed values.
    pub fn load(directory: &Path) -> Result<Self, ConfigError> {
        let mut all = Self::default();
        for path in config::files(directory, "sched")? {
            all.add(&Text::read(&path)?)?;
        }
        Ok(all)
    }

    /// Adds the contents of one file.
    ///
    /// # Errors
    /// See [`Self::load`].
    pub fn add(&mut self, text: &Text) -> Result<(), ConfigError> {
        let file: File = text.parse()?;
        self.backend = file.backend.unwrap_or(self.backend);
        self.beyond = file.beyond.unwrap_or(self.beyond);
        if let Some(reserve) = file.reserve {
            self.reserve = checked_reserve(text, &reserve)?;
        }
        if let Some(cpus) = file.cpus {
            let list = cpus.get_ref().parse::<CpuSet>().map_err(|what| text.error(&cpus.span(), what))?;
            if list.is_empty() {
                return Err(text.error(&cpus.span(), "`cpus` names no CPU; leave it out for all"));
            }
            self.cpus = Some(list);
        }
        for entry in file.reservation {
            let declared = self.declared(text, &entry, file.slack.unwrap_or(Nanos::ZERO))?;
            self.reservations.push(declared);
        }
        Ok(())
    }

    /// The CPUs for reservations, of those that are online.
    pub fn cpus_of(&self, online: &CpuSet) -> Vec<u32> {
        online.iter().filter(|cpu| self.cpus.as_ref().is_none_or(|only| only.contains(*cpu))).collect()
    }

    /// What a new lease leaves of the CPUs: a container has its time only as far as the runtime caps allow.
    pub fn beside_leases(&self) -> Beside {
        Beside { reserve: self.reserve.max(self.uncapped), watcher: Bandwidth::ppm(WATCHER_PPM) }
    }

    /// Whether nothing is to be reserved.
    pub fn is_empty(&self) -> bool {
        self.reservations.is_empty() && self.leases.is_empty()
    }

    /// Whether a tenant has a reservation.
    pub(crate) fn is_for(&self, tenant: &Tenant) -> bool {
        self.reservations.iter().any(|declared| declared.is_for(tenant))
    }

    /// Whether a tenant of this name has a reservation.
    pub(crate) fn names(&self, tenant: &str) -> bool {
        self.reservations.iter().any(|declared| declared.name == tenant)
    }

    fn declared(&self, text: &Text, entry: &Spanned<Entry>, slack: Nanos) -> Result<Declared, ConfigError> {
        let refuse = |what: String| text.error(&entry.span(), what);
        let Entry { name, user, budget, period, slack: own, vcpus, deadlines, deadline_period } = entry.get_ref();
        let (period, period_at) = (*period.get_ref(), period.span());
        if !PERIODS.contains(&period) {
            let (least, most) = PERIODS.into_inner();
            let what = format!("`{name}`: a period of {period} is not between {least} and {most}");
            return Err(text.error(&period_at, what));
        }
        let (budget, budget_at) = (*budget.get_ref(), budget.span());
        if budget == Nanos::ZERO || budget > period {
            let what = format!("`{name}`: a budget of {budget} is not above 0 and at most the period, {period}");
            return Err(text.error(&budget_at, what));
        }
        if let Some(none) = vcpus.as_ref().filter(|vcpus| vcpus.get_ref().is_empty()) {
            return Err(text.error(&none.span(), format!("`{name}`: `vcpus` names none; leave it out for all")));
        }
        let vcpus = vcpus.as_ref().map(Spanned::get_ref);
        let rta = Rta::new(budget, period, Arrivals::Periodic).map_err(|error| refuse(format!("`{name}`: {error}")))?;
        let vcpu = Vcpu::new(vec![rta], own.as_ref().map_or(slack, |own| *own.get_ref()), None);
        let too_much_at = own.as_ref().map_or(budget_at, Spanned::span);
        let bandwidth = vcpu.map(|vcpu| vcpu.bandwidth()).map_err(|error| {
            let what = match error {
                ModelError::Overfull { bandwidth } => format!(
                    "budget and slack are {bandwidth} of a CPU for each vCPU, which is more than 1; lower `budget` or \
                     `slack`"
                ),
                error => error.to_string(),
            };
            text.error(&too_much_at, format!("`{name}`: {what}"))
        })?;
        if let Some(first) =
            self.reservations.iter().find(|first| first.name == *name && overlap(first.vcpus.as_ref(), vcpus))
        {
            return Err(refuse(format!(
                "`{name}` has a reservation for the same vCPUs at {}; give different `vcpus`, or one of the two",
                first.place
            )));
        }
        let deadlines = match deadlines {
            Some(most) if !(0.001..=1.0).contains(most.get_ref()) => {
                let what = format!("`{name}`: deadlines {} is not one of 0.001 to 1 (of each vCPU)", most.get_ref());
                return Err(text.error(&most.span(), what));
            }
            // Rounded to a millionth of a CPU; the range was checked.
            most => most.as_ref().map(|most| Bandwidth::ppm((most.get_ref() * 1e6).round() as u64)),
        };
        if let Some(wrong) = deadline_period.as_ref().filter(|period| !PERIODS.contains(period.get_ref())) {
            let ((least, most), period) = (PERIODS.into_inner(), wrong.get_ref());
            let what = format!("`{name}`: deadline-period {period} is not between {least} and {most}");
            return Err(text.error(&wrong.span(), what));
        }
        let usual = DEADLINE_PERIOD.min(period);
        let deadline_period = deadline_period.as_ref().map_or(usual, |period| *period.get_ref());
        Ok(Declared {
            name: name.clone(),
            user: user.as_ref().map(|user| number_of(text, user)).transpose()?,
            budget: bandwidth.of(period),
            period,
            bandwidth,
            vcpus: vcpus.cloned(),
            deadlines,
            deadline_period,
            place: text.place(entry.span().start),
        })
    }
}

fn number_of(text: &Text, user: &Spanned<User>) -> Result<u32, ConfigError> {
    match user.get_ref() {
        User::Number(number) => Ok(*number),
        User::Name(name) => users::number_of(name).map_err(|why| text.error(&user.span(), why)),
    }
}

fn overlap(one: Option<&BTreeSet<u32>>, other: Option<&BTreeSet<u32>>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => !one.is_disjoint(other),
        _ => true,
    }
}

fn checked_reserve(text: &Text, reserve: &Spanned<f64>) -> Result<Bandwidth, ConfigError> {
    let value = *reserve.get_ref();
    if (0.01..=0.9).contains(&value) {
        // Rounded up to a millionth of a CPU; the range was checked.
        return Ok(Bandwidth::ppm((value * 1e6).ceil() as u64));
    }
    let what = format!(
        "reserve {value} is not one of 0.01 to 0.9 (of each CPU, for the host and bulk tenants: without any they would \
         starve)"
    );
    Err(text.error(&reserve.span(), what))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<SchedConfig, String> {
        let mut config = SchedConfig::default();
        config.add(&Text::new("/etc/ontime/sched.toml", text)).map(|()| config).map_err(|error| error.to_string())
    }

    #[test]
    fn a_file_is_read_and_slack_is_part_of_the_budget() {
        let config = read(
            "backend = \"deadline\"\nreserve = 0.1\ncpus = \"0-3\"\nbeyond = \"other\"\nslack = \"500us\"\n\
             [[reservation]]\nname = \"a\"\nbudget = \"3ms\"\nperiod = \"10ms\"\nvcpus = [0, 2]\n\
             [[reservation]]\nname = \"a\"\nbudget = \"1ms\"\nperiod = \"10ms\"\nslack = \"0us\"\nvcpus = [1]\n",
        )
        .unwrap();
        assert_eq!((config.backend, config.beyond), (BackendKind::Deadline, Beyond::Other));
        assert_eq!(config.reserve, Bandwidth::ppm(100_000));
        let budgets: Vec<_> = config.reservations.iter().map(|one| one.budget.0 / 1_000).collect();
        assert_eq!(budgets, [3_500, 1_000]);
        assert_eq!(read("").unwrap(), SchedConfig::default());
        for kind in [BackendKind::Paced, BackendKind::DpWrap, BackendKind::SchedExt, BackendKind::Deadline] {
            assert_eq!(read(&format!("backend = \"{}\"", kind.name())).unwrap().backend, kind);
        }
    }

    #[test]
    fn the_file_of_the_documentation_is_read() {
        let page = include_str!("../../../docs/design/sched.md");
        let (_, rest) = page.split_once("```toml\n").unwrap();
        let config = read(rest.split_once("```").unwrap().0).unwrap();
        let [one] = config.reservations.as_slice() else { panic!("{config:?}") };
        assert_eq!((one.budget, one.deadlines), (Nanos::from_micros(3_100), Some(Bandwidth::ppm(500_000))));
        assert_eq!(config.reserve, SchedConfig::default().reserve);
        assert_eq!(one.deadline_period, DEADLINE_PERIOD);
    }

    #[test]
    fn what_is_not_allowed_is_refused_with_its_line() {
        let one = |rest: &str| format!("\n[[reservation]]\nname = \"a\"\n{rest}\n");
        let twice = format!(
            "{}{}",
            one("budget = \"1ms\"\nperiod = \"10ms\""),
            one("budget = \"1ms\"\nperiod = \"10ms\"\nvcpus = [1]")
        );
        for (text, line, word) in [
            ("reserve = 0.0\n".to_owned(), 1, "0.01 to 0.9"),
            ("reserve = nan\n".to_owned(), 1, "0.01 to 0.9"),
            ("backend = \"magic\"\n".to_owned(), 1, "paced"),
            ("cpus = \"\"\n".to_owned(), 1, "names no CPU"),
            ("backend = 3\n".to_owned(), 1, "one of the key's words in quotes"),
            (one("budget = \"3\"\nperiod = \"10ms\""), 4, "is no duration"),
            (one("budget = 3\nperiod = \"10ms\""), 4, "integer `3`, expected a duration in quotes, such as \"13.5ms\""),
            (one("budget = \"3ms\"\nperiod = 0.01"), 5, "`0.01`, expected a duration in quotes"),
            (
                one("budget = \"30ms\"\nperiod = \"10ms\""),
                4,
                "`a`: a budget of 30 ms is not above 0 and at most the period",
            ),
            (one("period = \"10ms\"\nbudget = \"0ms\""), 5, "a budget of 0 ms is not above 0"),
            (
                one("budget = \"10ms\"\nperiod = \"10ms\"\nslack = \"1ms\""),
                6,
                "1.100 of a CPU for each vCPU, which is more than 1; lower `budget` or `slack`",
            ),
            (one("budget = \"1us\"\nperiod = \"100us\""), 5, "not between 500 us and 1000 ms"),
            (one("budget = \"1ms\"\nperiod = \"10ms\"\nvcpus = []"), 6, "names none"),
            (one("budget = \"1ms\"\nperiod = \"10ms\"\ndeadlines = 1.5"), 6, "0.001 to 1"),
            (one("budget = \"1ms\"\nperiod = \"10ms\"\ndeadline-period = \"2us\""), 6, "deadline-period 2 us is not"),
            (one("budget = \"1ms\"\nperiod = \"10ms\"\nvcpu = [0]"), 6, "did you mean `vcpus`?"),
            (one("budget = \"1ms\"\nperiod = \"10ms\"\nuser = \"nobody here\""), 6, "not in /etc/passwd"),
            (one("budget = \"1ms\"\nperiod = \"10ms\"\nuser = -1"), 6, "a user's name or number"),
            (twice, 7, "sched.toml:2:1"),
        ] {
            let said = read(&text).unwrap_err();
            assert!(said.starts_with(&format!("/etc/ontime/sched.toml:{line}:")), "{said}");
            assert!(said.contains(word), "{said}\n{word}");
        }
    }
}
