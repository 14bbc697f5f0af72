//! The rules of `/etc/ontime/tenants.toml`: which tenant has which class.
//!
//! Input: the rule files and a tenant's properties. Output: a [`Decision`].
//!
//! Precedence: a rule with `override = true`, then a reservation that a program requested ([`Grant`]), then libvirt's
//! `<metadata>`, then the other rules, then bulk. Among rules the first match wins; the main file comes before its
//! drop-ins. Metadata precedes ordinary rules because it was written for one domain and moves with it. Only users who
//! may define domains can write metadata, never the guest. With `override` the host's administrator has the final
//! decision.

use std::path::Path;

use globset::{GlobBuilder, GlobMatcher};
use serde::Deserialize;
use toml::Spanned;

use crate::class::{Class, Level, PriorityTable};
use crate::config::{self, ConfigError, Loaded, Text, TextPosition};
pub use crate::model::Namer;
use crate::model::{ClassSource, Kind};
use crate::vmm::is_uuid;

/// The default runtime cap of an RT tenant, as a fraction of one CPU: what the kernel's real-time throttling leaves by
/// default (`sched_rt_runtime_us` / `sched_rt_period_us`).
pub const RUNTIME_CAP: f64 = 0.95;

/// The class in rules and metadata.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum RuleClass {
    /// Latency matters.
    Rt,
    /// Throughput matters.
    Bulk,
}

/// Most CPU time that a vCPU thread may take at RT priority: [`RuntimeCap::LEAST`] to 1.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Deserialize)]
#[serde(try_from = "f64")]
pub struct RuntimeCap(f64);

impl RuntimeCap {
    /// The least runtime cap, as a fraction of one CPU: one millionth.
    pub const LEAST: f64 = 0.000_001;

    /// The fraction of one CPU.
    pub fn get(self) -> f64 {
        self.0
    }
}

impl TryFrom<f64> for RuntimeCap {
    type Error = String;
    fn try_from(value: f64) -> Result<Self, String> {
        if (Self::LEAST..=1.0).contains(&value) {
            Ok(Self(value))
        } else {
            Err(format!("runtime-cap {value} is not a fraction of one CPU from {} to 1", Self::LEAST))
        }
    }
}

/// The properties of a tenant that decide its class.
#[derive(Debug, Clone, Copy)]
pub struct Subject<'a> {
    /// The name that a rule's `name` is compared with.
    pub name: &'a str,
    /// The Kubernetes namespace of its pod, if a runtime has recorded that.
    pub namespace: Option<&'a str>,
    /// Its UUID, if any.
    pub uuid: Option<&'a str>,
    /// Its own cgroup, if any.
    pub cgroup: Option<&'a str>,
    /// The user who chose that cgroup's path.
    pub cgroup_owner: u32,
    /// The kind that a rule's `kind` is compared with.
    pub kind: Kind,
    /// The user who controls it.
    pub owner: u32,
    /// The user or container that chose its name, UUID and kind.
    pub namer: Namer,
    /// Its processes run beside a VM's monitor in the same container (such as KubeVirt's virt-launcher). They are the
    /// VM's helpers, unless a rule names the container or its kind.
    pub beside_vm: bool,
    /// A VM runs in its Kubernetes pod, in whatever container. A reservation for the pod is the VM's then.
    pub in_pod_of_vm: bool,
}

/// The tenants that a reservation is for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReservedFor {
    /// The VM of the Kubernetes pod with this UID, or else the pod's containers.
    Pod(String),
    /// The tenants in this cgroup, and in those below it.
    Cgroup(String),
    /// The VM of this name.
    Vm(String),
}

/// The class that a reservation gives to its tenants until its lease ends.
#[derive(Debug, Clone, PartialEq)]
pub struct Grant {
    /// The name of the reservation.
    pub reservation: String,
    /// The tenants that it is for.
    pub to: ReservedFor,
    /// The RT level that they have meanwhile.
    pub level: Level,
    /// Their runtime cap, if the reservation decides it.
    pub runtime_cap: Option<RuntimeCap>,
    /// How many vCPUs it is for.
    pub vcpus: u32,
}

impl Grant {
    /// `pod` is the pod of the subject's cgroup. What an unprivileged user chose does not count, neither the name of a
    /// VM nor the path of a cgroup.
    fn fits(&self, subject: &Subject<'_>, pod: Option<&str>) -> bool {
        let by_system = subject.cgroup_owner == 0 && !subject.beside_vm;
        match &self.to {
            ReservedFor::Pod(uid) => {
                let is_vms = subject.kind == Kind::Container && subject.in_pod_of_vm;
                by_system && !is_vms && pod == Some(uid.as_str())
            }
            ReservedFor::Cgroup(path) => {
                let own = subject.cgroup.filter(|_| by_system);
                own.is_some_and(|own| crate::container::ancestors(own).any(|part| part == path))
            }
            ReservedFor::Vm(name) => {
                subject.kind != Kind::Container && subject.name == name && subject.namer == Namer::User(0)
            }
        }
    }
}

/// A class from a rule or from metadata.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Verdict {
    /// Real-time with a level, or bulk.
    pub class: Class,
    /// The runtime cap, if given.
    pub runtime_cap: Option<RuntimeCap>,
}

/// A tenant's class and its source.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// Real-time with a level, or bulk.
    pub class: Class,
    /// The source of the class.
    pub source: ClassSource,
    /// As a fraction of one CPU, 0 to 1; 1 for bulk.
    pub runtime_cap: f64,
    /// An RT rule (`FILE:LINE`) that matches only a name that an unprivileged user chose.
    pub withheld: Option<String>,
}

/// A cgroup pattern also covers all cgroups below a match.
fn covers(glob: &GlobMatcher, path: &str) -> bool {
    crate::container::ancestors(path).any(|part| glob.is_match(part))
}

#[derive(Debug, Clone)]
struct Rule {
    place: TextPosition,
    name: Option<GlobMatcher>,
    uuid: Option<String>,
    cgroup: Option<GlobMatcher>,
    kind: Option<Kind>,
    user: Option<u32>,
    verdict: Verdict,
    overrides: bool,
}

/// A condition of a rule.
#[derive(Clone, Copy)]
enum Condition<'a> {
    Name(&'a GlobMatcher),
    Uuid(&'a str),
    Cgroup(&'a GlobMatcher),
    Kind(Kind),
    User(u32),
}

impl Condition<'_> {
    fn fits(self, subject: &Subject<'_>) -> bool {
        match self {
            Condition::Name(glob) => {
                let in_namespace = |namespace| glob.is_match(format!("{namespace}/{}", subject.name));
                glob.is_match(subject.name) || names_namespace(glob) && subject.namespace.is_some_and(in_namespace)
            }
            Condition::Uuid(uuid) => subject.uuid.is_some_and(|own| own.eq_ignore_ascii_case(uuid)),
            Condition::Cgroup(glob) => subject.cgroup.is_some_and(|own| covers(glob, own)),
            Condition::Kind(kind) => kind == subject.kind,
            Condition::User(user) => user == subject.owner,
        }
    }

    /// What a tenant of the rule does, for "no tenant ...".
    fn holds(self) -> String {
        match self {
            Condition::Name(glob) => format!("has a name like `{}`", glob.glob().glob()),
            Condition::Uuid(uuid) => format!("has the UUID {uuid}"),
            Condition::Cgroup(glob) => format!("is in a cgroup like `{}`", glob.glob().glob()),
            Condition::Kind(kind) => format!("is of kind `{kind}`"),
            Condition::User(user) => format!("is of user {user}"),
        }
    }

    /// How a tenant fails the condition.
    fn fails(self) -> String {
        match self {
            Condition::Name(glob) => format!("has no name like `{}`", glob.glob().glob()),
            Condition::Uuid(uuid) => format!("has not the UUID {uuid}"),
            Condition::Cgroup(glob) => format!("is in no cgroup like `{}`", glob.glob().glob()),
            Condition::Kind(kind) => format!("is not of kind `{kind}`"),
            Condition::User(user) => format!("is not of user {user}"),
        }
    }
}

/// Whether a pattern for names has three parts: NAMESPACE/POD/CONTAINER. Patterns of fewer parts mean POD/CONTAINER or
/// the name of another tenant; a namespace of Kubernetes does not make a tenant fit them.
fn names_namespace(glob: &GlobMatcher) -> bool {
    glob.glob().glob().matches('/').count() >= 2
}

/// A rule that no tenant fits although it can decide about real-time priority ([`Rules::unused`]).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Unused {
    /// The rule (`FILE:LINE`).
    pub place: String,
    /// What no tenant does, or how the nearest one fails the rule.
    pub what: String,
    /// Whether no tenant fits the rule's `name`.
    pub by_name: bool,
}

enum Match {
    Yes,
    No,
    /// Matches, but only by what an unprivileged user chose.
    Withheld,
}

impl Rule {
    fn place(&self) -> String {
        format!("{}:{}", self.place.path.display(), self.place.line)
    }

    fn conditions(&self) -> impl Iterator<Item = Condition<'_>> {
        let conditions = [
            self.name.as_ref().map(Condition::Name),
            self.uuid.as_deref().map(Condition::Uuid),
            self.cgroup.as_ref().map(Condition::Cgroup),
            self.kind.map(Condition::Kind),
            self.user.map(Condition::User),
        ];
        conditions.into_iter().flatten()
    }

    /// Why no tenant fits the rule: a condition that none fits, else those that the nearest tenant fails. `None` if one
    /// fits.
    fn unused(&self, subjects: &[Subject<'_>]) -> Option<Unused> {
        let failed = |subject: &Subject<'_>| self.conditions().filter(|one| !one.fits(subject)).count();
        let nearest = subjects.iter().map(|subject| (failed(subject), subject)).min_by_key(|(failed, _)| *failed);
        if nearest.is_some_and(|(failed, _)| failed == 0) {
            return None;
        }
        let by_none = self.conditions().find(|one| !subjects.iter().any(|subject| one.fits(subject)));
        let what = match (by_none, nearest) {
            (None, Some((_, nearest))) => {
                let fails: Vec<String> =
                    self.conditions().filter(|one| !one.fits(nearest)).map(Condition::fails).collect();
                format!("fits all of its conditions: `{}` {}", nearest.name, fails.join(" and "))
            }
            (condition, _) => condition.map(Condition::holds)?,
        };
        Some(Unused { place: self.place(), what, by_name: matches!(by_none, Some(Condition::Name(_))) })
    }

    fn matches(&self, subject: &Subject<'_>) -> Match {
        let fits = self.conditions().all(|condition| condition.fits(subject));
        let for_helpers = subject.beside_vm && self.verdict.class != Class::Bulk;
        if !fits || for_helpers && self.name.is_none() && self.kind.is_none() {
            return Match::No;
        }
        // The system created the cgroup: a rule that names it means everything in it.
        let by_place = self.cgroup.is_some() && subject.cgroup.is_some() && subject.cgroup_owner == 0;
        let trusted = match subject.namer {
            Namer::User(user) => user == 0 || self.user.is_some() || by_place,
            Namer::Container => by_place,
        };
        if trusted || self.verdict.class == Class::Bulk { Match::Yes } else { Match::Withheld }
    }
}

/// All rules of a host, and its priority table.
#[derive(Debug, Clone, Default)]
pub struct Rules {
    rules: Vec<Rule>,
    grants: Vec<Grant>,
    table: PriorityTable,
    default_cap: Option<RuntimeCap>,
}

impl Rules {
    /// Reads `DIRECTORY/tenants.toml` and its drop-ins. Missing files are no error.
    ///
    /// # Errors
    /// [`ConfigError`] for the first fault.
    pub fn load(directory: &Path) -> Result<Self, ConfigError> {
        let mut texts = Vec::new();
        for path in config::files(directory, "tenants")? {
            texts.push(Text::read(&path)?);
        }
        Self::parse(&texts)
    }

    /// Parses rules from texts, in order.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`].
    pub fn parse(texts: &[Text]) -> Result<Self, ConfigError> {
        let mut all = Self::default();
        let mut base_at: Option<TextPosition> = None;
        let mut cap_at: Option<TextPosition> = None;
        for text in texts {
            let file = Loaded { value: text.parse::<File>()?, text: text.clone() };
            if let Some(base) = &file.value.priorities.base {
                once(text, base, &mut base_at, "priorities.base")?;
                let number = u8::try_from(*base.get_ref()).unwrap_or(u8::MAX);
                all.table = PriorityTable::with_base(number)
                    .map_err(|_| text.error(&base.span(), base_range(*base.get_ref())))?;
            }
            if let Some(cap) = &file.value.defaults.runtime_cap {
                once(text, cap, &mut cap_at, "defaults.runtime-cap")?;
                all.default_cap = Some(*cap.get_ref());
            }
            for raw in file.value.tenant {
                all.rules.push(raw.check(text)?);
            }
        }
        Ok(all)
    }

    /// The host's priority table.
    pub fn table(&self) -> PriorityTable {
        self.table
    }

    /// Replaces the classes that reservations give. Among those for one tenant the first counts.
    pub fn set_grants(&mut self, grants: Vec<Grant>) {
        self.grants = grants;
    }

    /// Whether a rule or a reservation makes this cgroup a tenant although no runtime or monitor does.
    ///
    /// A rule with a name, a UUID or a VM kind is about tenants that are found in other ways.
    pub fn names_cgroup(&self, path: &str) -> bool {
        let is_granted = |grant: &Grant| matches!(&grant.to, ReservedFor::Cgroup(own) if own == path);
        self.grants.iter().any(is_granted)
            || self.rules.iter().any(|rule| {
                rule.name.is_none()
                    && rule.uuid.is_none()
                    && rule.kind.is_none_or(|kind| kind == Kind::Container)
                    && rule.cgroup.as_ref().is_some_and(|glob| glob.is_match(path))
            })
    }

    /// The rules that can decide about real-time priority and that none of these tenants fits: those with class `rt` or
    /// with `override`, and `bulk` rules before an `rt` rule, from which they except tenants. A tenant whose `bulk`
    /// rule is misspelt has real-time priority.
    pub fn unused(&self, tenants: &[Subject<'_>]) -> Vec<Unused> {
        let last_rt = self.rules.iter().rposition(|rule| !rule.overrides && rule.verdict.class != Class::Bulk);
        let told = self.rules.iter().enumerate().filter(|(position, rule)| {
            rule.verdict.class != Class::Bulk || rule.overrides || Some(*position) < last_rt
        });
        told.filter_map(|(_, rule)| rule.unused(tenants)).collect()
    }

    /// Whether a rule's `name` has three parts: NAMESPACE/POD/CONTAINER.
    pub fn name_namespaces(&self) -> bool {
        self.rules.iter().filter_map(|rule| rule.name.as_ref()).any(names_namespace)
    }

    /// The class of a tenant. `metadata` comes from libvirt's domain.
    pub fn decide(&self, subject: &Subject<'_>, metadata: Option<Verdict>) -> Decision {
        let mut withheld = None;
        let (verdict, source) = self
            .first(subject, true, &mut withheld)
            .or_else(|| self.granted(subject))
            .or_else(|| metadata.map(|verdict| (verdict, ClassSource::Metadata)))
            .or_else(|| self.first(subject, false, &mut withheld))
            .unwrap_or((Verdict { class: Class::Bulk, runtime_cap: None }, ClassSource::Default));
        let runtime_cap = match verdict.class {
            Class::Bulk => 1.0,
            Class::Rt(_) => verdict.runtime_cap.or(self.default_cap).map_or(RUNTIME_CAP, RuntimeCap::get),
        };
        Decision { class: verdict.class, source, runtime_cap, withheld }
    }

    fn granted(&self, subject: &Subject<'_>) -> Option<(Verdict, ClassSource)> {
        if self.grants.is_empty() {
            return None;
        }
        let pod = subject.cgroup.and_then(crate::container::pod_of);
        let grant = self.grants.iter().find(|grant| grant.fits(subject, pod.as_deref()))?;
        let verdict = Verdict { class: Class::Rt(grant.level), runtime_cap: grant.runtime_cap };
        Some((verdict, ClassSource::Reservation { name: grant.reservation.clone(), vcpus: grant.vcpus }))
    }

    fn first(
        &self,
        subject: &Subject<'_>,
        overrides: bool,
        withheld: &mut Option<String>,
    ) -> Option<(Verdict, ClassSource)> {
        for rule in self.rules.iter().filter(|rule| rule.overrides == overrides) {
            match rule.matches(subject) {
                Match::Yes => return Some((rule.verdict, ClassSource::Rule(rule.place()))),
                Match::Withheld => {
                    withheld.get_or_insert_with(|| rule.place());
                }
                Match::No => {}
            }
        }
        None
    }
}

fn base_range(base: i64) -> String {
    format!("base {base} is not one of {} to {}", PriorityTable::BASE_MIN, PriorityTable::BASE_MAX)
}

/// Refuses a second value of a setting that the host has only once.
fn once<T>(text: &Text, value: &Spanned<T>, first: &mut Option<TextPosition>, key: &str) -> Result<(), ConfigError> {
    if let Some(first) = first {
        return Err(text.error(&value.span(), format!("`{key}` was already set at {first}; set it in one place")));
    }
    *first = Some(text.place(value.span().start));
    Ok(())
}

/// A rule file.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct File {
    #[serde(default)]
    priorities: Priorities,
    #[serde(default)]
    defaults: Defaults,
    #[serde(default)]
    tenant: Vec<RawRule>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Priorities {
    base: Option<Spanned<i64>>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Defaults {
    runtime_cap: Option<Spanned<RuntimeCap>>,
}

/// A `[[tenant]]` table as written.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RawRule {
    name: Option<Spanned<String>>,
    uuid: Option<Spanned<String>>,
    cgroup: Option<Spanned<String>>,
    kind: Option<Kind>,
    user: Option<Spanned<User>>,
    class: Spanned<RuleClass>,
    level: Option<Spanned<Level>>,
    runtime_cap: Option<Spanned<RuntimeCap>>,
    #[serde(default, rename = "override")]
    overrides: bool,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "a user's name or number")]
enum User {
    Number(u32),
    Name(String),
}

impl RawRule {
    fn check(self, text: &Text) -> Result<Rule, ConfigError> {
        let at = self.class.span();
        if self.name.is_none()
            && self.uuid.is_none()
            && self.cgroup.is_none()
            && self.kind.is_none()
            && self.user.is_none()
        {
            let what = "this rule matches nothing: give at least one of `name`, `uuid`, `cgroup`, `kind`, `user`";
            return Err(text.error(&at, what));
        }
        let class = match (self.class.get_ref(), &self.level, &self.runtime_cap) {
            (RuleClass::Rt, level, _) => Class::Rt(level.as_ref().map_or(Level::HIGHEST, |level| *level.get_ref())),
            (RuleClass::Bulk, None, None) => Class::Bulk,
            (RuleClass::Bulk, Some(level), _) => {
                return Err(text.error(
                    &level.span(),
                    "`level` is for class = \"rt\" only; bulk has no levels; remove it, or set class = \"rt\"",
                ));
            }
            (RuleClass::Bulk, None, Some(cap)) => {
                return Err(text.error(
                    &cap.span(),
                    "`runtime-cap` is for class = \"rt\" only; bulk is not capped; remove it, or set class = \"rt\"",
                ));
            }
        };
        Ok(Rule {
            place: text.place(at.start),
            name: self.name.map(|name| glob(text, &name, false)).transpose()?,
            uuid: self.uuid.map(|uuid| checked_uuid(text, &uuid)).transpose()?,
            cgroup: self.cgroup.map(|cgroup| checked_cgroup(text, &cgroup)).transpose()?,
            kind: self.kind,
            user: self.user.map(|user| checked_user(text, &user)).transpose()?,
            verdict: Verdict { class, runtime_cap: self.runtime_cap.map(Spanned::into_inner) },
            overrides: self.overrides,
        })
    }
}

fn glob(text: &Text, pattern: &Spanned<String>, path: bool) -> Result<GlobMatcher, ConfigError> {
    // A backslash is no escape, because systemd writes `\x2d` into names of scopes. `[*]` is a plain star.
    GlobBuilder::new(pattern.get_ref())
        .literal_separator(path)
        .backslash_escape(false)
        .build()
        .map(|glob| glob.compile_matcher())
        .map_err(|error| {
            let what = format!("{}; allowed are `*`, `?`, `[abc]`, `{{a,b}}`", error.kind());
            text.error(&pattern.span(), what)
        })
}

fn checked_cgroup(text: &Text, pattern: &Spanned<String>) -> Result<GlobMatcher, ConfigError> {
    if !pattern.get_ref().starts_with('/') || pattern.get_ref().trim_matches(['/', '*']).is_empty() {
        let what = "`cgroup` is a path below the cgroup v2 mount, starts with `/` and names something (`/rt.slice`, \
                    `/machine.slice/*`, `**` for any depth)";
        return Err(text.error(&pattern.span(), what));
    }
    glob(text, pattern, true)
}

fn checked_uuid(text: &Text, uuid: &Spanned<String>) -> Result<String, ConfigError> {
    let value = uuid.get_ref();
    if is_uuid(value) {
        return Ok(value.to_ascii_lowercase());
    }
    let what = format!("`{value}` is not a UUID (like 3f1c9a52-0d52-4c1b-9e0a-6f4b7f1d2c33)");
    Err(text.error(&uuid.span(), what))
}

fn checked_user(text: &Text, user: &Spanned<User>) -> Result<u32, ConfigError> {
    match user.get_ref() {
        User::Number(number) => Ok(*number),
        User::Name(name) => crate::users::number_of(name).map_err(|why| text.error(&user.span(), why)),
    }
}
