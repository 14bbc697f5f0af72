//! The types of the daemon's HTTP/JSON API on `/run/ontime/ontime.sock`, and the source of
//! `docs/reference/openapi.json`.
//!
//! These types are the contract with users. They are separate from the crates' own types, so that those can change
//! without changing the API; the conversions are in `view.rs`.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The longest that a request waits for the daemon's main loop; then the answer has status 504.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// The same for a request that changes something. If RT work leaves only a twentieth of the host's only CPU to the
/// daemon, a pass takes that many times as long.
pub(crate) const PATIENCE_CHANGE: Duration = Duration::from_secs(120);

/// The version of the daemon's answers and of the output of `--json`.
pub(crate) const SCHEMA_VERSION: u32 = 1;

/// A document with its version: the output of `--json` where it is not an answer of the daemon.
#[derive(Debug, Serialize)]
pub(crate) struct Versioned<'a, T> {
    schema_version: u32,
    #[serde(flatten)]
    document: &'a T,
}

impl<'a, T> Versioned<'a, T> {
    /// This document with the present version.
    pub(crate) fn of(document: &'a T) -> Self {
        Self { schema_version: SCHEMA_VERSION, document }
    }
}

/// The tenants of this host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Tenants {
    /// The version of this document: a field that goes or changes its meaning raises it.
    #[serde(default)]
    pub schema_version: u32,
    /// The tenants.
    pub tenants: Vec<Tenant>,
    /// What could not be read, so that tenants may be missing.
    #[serde(default)]
    pub unseen: Vec<Problem>,
}

/// The network interfaces of this host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Nics {
    /// The version of this document: a field that goes or changes its meaning raises it.
    #[serde(default)]
    pub schema_version: u32,
    /// The interfaces.
    pub nics: Vec<Nic>,
    /// What was found about the packet path and belongs to none of them: a name in `host.toml` that no interface has, a
    /// network interrupt that no NIC claims.
    #[serde(default)]
    pub findings: Vec<Finding>,
    /// What could not be read, so that interfaces or their tenants may be missing.
    #[serde(default)]
    pub unseen: Vec<Problem>,
}

/// A virtual machine or container on this host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Tenant {
    /// The domain's, guest's or container's name.
    pub name: String,
    /// Its UUID, where it has one.
    pub uuid: Option<String>,
    /// `libvirt`, `qemu`, `vmm` or `container`.
    pub kind: String,
    /// `bulk`, or `rt` and a level, 0 the most urgent: `rt0` to `rt8`.
    pub class: String,
    /// What decided the class: `metadata`, `default`, a rule as FILE:LINE, or `reservation NAME`.
    pub source: String,
    /// Most CPU time a thread may take at real-time priority, as a fraction of one CPU.
    pub runtime_cap: f64,
    /// Its main process.
    pub pid: i32,
    /// Its cgroup, where it has one of its own.
    pub cgroup: Option<String>,
    /// Its threads.
    pub threads: Vec<Thread>,
    /// Its virtual NICs.
    pub nics: Vec<TenantNic>,
}

/// A thread of a tenant.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Thread {
    /// `vcpu0`, `vhost`, `iothread`, `emulator`, `kvm-pit`, `device` or `container`.
    pub role: String,
    /// Its name.
    pub comm: String,
    /// Its number.
    pub tid: i32,
    /// Its scheduling policy and priority: `FIFO 47`, `OTHER`.
    pub policy: String,
    /// The policy Ontime wants it to have; none where it leaves the thread alone.
    pub wanted: Option<String>,
    /// The CPUs it may run on, as `0-3,8`.
    pub affinity: String,
    /// The CPU it last ran on.
    pub last_cpu: u32,
}

/// A tenant's virtual NIC.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct TenantNic {
    /// The host's interface; of a container's macvlan, ipvlan or VLAN, which is none of the host's, its name in the
    /// container: `eth0 (inside)`.
    pub name: String,
    /// The physical NICs it reaches.
    pub lower: Vec<String>,
}

/// A network interface of the host.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Nic {
    /// Its name.
    pub name: String,
    /// Its alternative names (`ip link property add dev NIC altname NAME`).
    pub altnames: Vec<String>,
    /// Its index.
    pub ifindex: u32,
    /// Its kind (`veth`, `tun`) or driver.
    pub kind: String,
    /// Whether it is administratively up.
    pub up: bool,
    /// The class its interrupt and NAPI threads have.
    pub class: String,
    /// Why: `configured`, `derived` (from the tenants that use it), `mixed` (both classes use it), or `passes-on`: it
    /// has no interrupt and no NAPI, so its class decides nothing.
    pub class_by: String,
    /// Its NAPI instances.
    pub napis: Vec<Napi>,
    /// Its interrupts.
    pub irqs: Vec<Irq>,
    /// Names of the tenants whose packets pass it.
    pub tenants: Vec<String>,
    /// What is wanted of it, and of its tenants' vhost threads.
    pub knobs: Vec<KnobState>,
    /// What no knob of it cures.
    pub findings: Vec<Finding>,
}

/// A NAPI instance.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Napi {
    /// Its id.
    pub id: u32,
    /// Its thread, where it is threaded.
    pub thread: Option<KernelThread>,
}

/// An interrupt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Irq {
    /// Its number.
    pub irq: u32,
    /// The CPUs it may be delivered to.
    pub affinity: String,
    /// Its thread, where it is threaded.
    pub thread: Option<KernelThread>,
}

/// A kernel thread.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct KernelThread {
    /// Its number.
    pub tid: i32,
    /// Its policy.
    pub policy: String,
}

/// What the daemon is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum State {
    /// The method is applied and kept.
    Applied,
    /// Reset by request: nothing is applied until `ontime apply` or a restart.
    Reset,
    /// Mode `observe` (`daemon.toml`): everything is found and planned, and nothing is set.
    Observing,
}

/// What is wanted of this host, what is, and why they differ.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Status {
    /// The version of this document: a field that goes or changes its meaning raises it.
    #[serde(default)]
    pub schema_version: u32,
    /// Ontime's version.
    pub version: String,
    /// The daemon's process.
    pub pid: u32,
    /// The running kernel.
    pub kernel: String,
    /// What the daemon is doing.
    pub state: State,
    /// The method in force.
    pub method: String,
    /// What said so: `default`, `configuration` or `request`.
    pub method_by: String,
    /// Passes (discover, plan, apply) since the daemon's start.
    pub passes: u64,
    /// How long the last one took, seconds.
    pub last_pass_seconds: f64,
    /// Runtime caps.
    pub caps: Caps,
    /// NICs whose RT queues poll while packets come (method `busypoll`, `adaptive = true`).
    pub polling: Vec<Polling>,
    /// Every knob Ontime wants to have a value.
    pub knobs: Vec<KnobState>,
    /// How many of them have another value now.
    pub drift: usize,
    /// What no knob cures.
    pub findings: Vec<Finding>,
    /// What discovery could not do or did not like, and what went wrong in the daemon.
    pub problems: Vec<Problem>,
    /// Those of them because of which tenants or settings may be missing.
    #[serde(default)]
    pub unseen: Vec<Problem>,
    /// Configuration files that the daemon refused at its last reload; the former configuration is in force until a
    /// reload succeeds.
    #[serde(default)]
    pub refused_configuration: Option<RefusedConfiguration>,
    /// How many reservations programs requested.
    #[serde(default)]
    pub requested: usize,
}

/// A configuration that was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub(crate) struct RefusedConfiguration {
    /// The file.
    pub file: String,
    /// The line, from 1; none where the file could not be read.
    pub line: Option<u64>,
    /// What is wrong there, and what is allowed.
    pub reason: String,
}

impl std::fmt::Display for RefusedConfiguration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let line = self.line.map_or_else(String::new, |line| format!(":{line}"));
        write!(f, "{}{line}: {}", self.file, self.reason)
    }
}

/// Runtime caps.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Caps {
    /// Whether every thread at real-time priority is held to its cap.
    pub in_force: bool,
    /// Why not.
    pub why: Option<String>,
    /// Whether kernel protections (fair server, RT throttling) are off because of it.
    pub protections_off: bool,
    /// The watched threads.
    pub threads: Vec<CapThread>,
}

/// A NIC that polls while packets come.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Polling {
    /// Its name.
    pub nic: String,
    /// Whether it polls now.
    pub polling: bool,
    /// How long it polled, seconds.
    pub polled_seconds: f64,
    /// How long it waited for interrupts instead, seconds: the CPU time saved against polling always.
    pub saved_seconds: f64,
    /// Times it began to poll.
    pub starts: u64,
    /// Times it stopped because the bound was reached, while packets came.
    pub bounded: u64,
}

/// A thread that is held to a cap.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct CapThread {
    /// Its tenant, or the kernel thread's name.
    pub of: String,
    /// Its number.
    pub tid: i32,
    /// Whether it is watched: `yes`, or why it is not.
    pub watched: String,
    /// Whether it is off real-time priority this moment.
    pub paused: bool,
    /// Times it was taken off real-time priority.
    pub pauses: u64,
    /// How long it was off, seconds.
    pub paused_seconds: f64,
    /// CPU time seen at real-time priority, seconds.
    pub rt_seconds: f64,
    /// Times it was put ahead of its level because of a pending interrupt (method `interrupt-context`).
    pub raised: u64,
    /// CPU time that it took ahead, seconds.
    pub ahead_seconds: f64,
}

/// Reserved CPU time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Reservations {
    /// The version of this document: a field that goes or changes its meaning raises it.
    #[serde(default)]
    pub schema_version: u32,
    /// What keeps it: `paced`, `dp-wrap`, `sched_ext` or `deadline`.
    pub backend: String,
    /// Mode `observe`: nothing is reserved, and this is what would be.
    #[serde(default)]
    pub foreseen: bool,
    /// Why nothing is kept although it is configured.
    pub off: Option<String>,
    /// Why pacers read vCPUs' files instead of the kernel's counters, which takes more CPU time; null: they have
    /// counters, or there are no pacers.
    #[serde(default)]
    pub uncounted: Option<String>,
    /// The host's CPUs for reservations.
    pub cpus: Vec<u32>,
    /// What of each is kept for others, as a fraction.
    pub reserve: f64,
    /// What is reserved in all, in CPUs.
    pub reserved: f64,
    /// Whose.
    pub vcpus: Vec<ReservedVcpu>,
    /// VMs whose reservation does not hold, and why.
    pub refused: Vec<Problem>,
    /// Names with a reservation of which no VM runs.
    pub absent: Vec<String>,
    /// What programs requested with PUT, by name.
    #[serde(default)]
    pub requested: Vec<Requested>,
    /// What a program that adds up reservations may give out.
    #[serde(default)]
    pub capacity: Capacity,
    /// The present slice; none by `deadline`.
    pub slice: Option<Slice>,
}

/// What a program that adds up the bandwidth of reservations may give out, in millionths of a CPU, so that the daemon
/// admits all of it.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Capacity {
    /// Of each CPU for reservations that are not pinned. The sum over the CPUs may be given out, less
    /// `watcher_micro_cpus` once.
    pub unpinned_micro_cpus_per_cpu: u64,
    /// The most that one vCPU may have.
    pub largest_micro_cpus: u64,
    /// Of a CPU that only reservations pinned to it use, up to 64.
    pub pinned_micro_cpus_per_cpu: u64,
    /// What the cap watcher may take of all CPUs together.
    #[serde(default)]
    pub watcher_micro_cpus: u64,
    /// What VMs of sched.toml hold now, with their guests' deadline tasks.
    pub other_micro_cpus: u64,
    /// What the pacers of these VMs need of each CPU, by its number.
    pub pacers_micro_cpus: BTreeMap<u32, u64>,
    /// Whether the running kernel is PREEMPT_RT.
    pub preempt_rt: bool,
}

/// The tenants of a reservation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum ReservedFor {
    /// The VM of the Kubernetes pod with this UID, or else the pod's containers.
    Pod(String),
    /// The tenants in this cgroup (a path below the cgroup v2 mount), and in those below it.
    Cgroup(String),
    /// The VM of this name.
    Vm(String),
}

/// A reservation to create, renew or change. Its tenants have class `rt` while its lease lasts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReserveRequest {
    /// Its tenants.
    #[serde(rename = "for")]
    pub reserved_for: ReservedFor,
    /// CPU time in each period, us, 1 to the period. Only root may leave out it and the period, for a class alone.
    #[serde(default)]
    pub budget_us: Option<u64>,
    /// The period, us, 500 to 1000000.
    #[serde(default)]
    pub period_us: Option<u64>,
    /// How many vCPUs have the budget, from number 0 on, 1 to 256; default 1.
    #[serde(default)]
    pub count: Option<u32>,
    /// For each of them, the CPU that it is pinned to; without it they are not pinned.
    #[serde(default)]
    pub cpus: Option<Vec<u32>>,
    /// The level of the tenants, 0 (most urgent) to 8; default 0.
    #[serde(default)]
    pub level: u8,
    /// How long the reservation lasts from this request on, seconds, 10 to 86400.
    pub lease_seconds: u64,
    /// Whose it is, for lists: at most 64 characters of a name.
    #[serde(default)]
    pub owner: String,
}

/// A reservation that a program requested.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Requested {
    /// Its name.
    pub name: String,
    /// Whose it is, in the words of the request.
    pub owner: String,
    /// The user who requested it.
    pub uid: u32,
    /// Its tenants.
    #[serde(rename = "for")]
    pub reserved_for: ReservedFor,
    /// CPU time in each period, us; none if it gives a class only.
    pub budget_us: Option<u64>,
    /// The period, us.
    pub period_us: Option<u64>,
    /// How many vCPUs have the budget; 0 if it gives a class only.
    pub count: u32,
    /// The CPU of each, if they are pinned.
    pub cpus: Option<Vec<u32>>,
    /// The level of the tenants.
    pub level: u8,
    /// The bandwidth of all of them, in millionths of a CPU.
    pub micro_cpus: u64,
    /// How long its lease is, seconds.
    pub lease_seconds: u64,
    /// How much of that is left, seconds.
    pub left_seconds: f64,
    /// Whether the bandwidth is held.
    pub held: bool,
    /// `waiting` (its tenants do not run), `bound` (they run), or `refused`.
    pub state: String,
    /// The names of its tenants that run.
    pub tenants: Vec<String>,
    /// Why it is not held, or why its tenants do not have what is held.
    pub why: Option<String>,
}

/// A vCPU with reserved CPU time. What it has had is counted since it has the reservation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct ReservedVcpu {
    /// Its VM.
    pub vm: String,
    /// The VM's class.
    pub class: String,
    /// Its number in the VM.
    pub vcpu: u32,
    /// Its thread.
    pub tid: i32,
    /// CPU time reserved in each period, us, slack included.
    pub budget_us: f64,
    /// The period, us.
    pub period_us: f64,
    /// Budget over period.
    pub bandwidth: f64,
    /// What its guest's deadline tasks asked for; the reservation holds it beside what is declared.
    pub guest: Option<Guest>,
    /// Its guest's deadline tasks, as the guest publishes them, the earliest deadline first; empty where it does not,
    /// null where they cannot be read.
    pub tasks: Option<Vec<GuestTask>>,
    /// The CPU that the plan keeps it on; none where it may run on all.
    pub cpu: Option<u32>,
    /// Where it is this moment: `planned`, `entitled`, or `beyond` its share of the slice; none by `deadline`.
    pub place: Option<String>,
    /// From now to the end of its period, us.
    pub deadline_in_us: Option<f64>,
    /// CPU time within its shares, seconds; by `deadline`, all.
    pub ran_seconds: f64,
    /// CPU time beyond them, which nobody else wanted, seconds.
    pub beyond_seconds: f64,
    /// Times that it used up its share of a slice.
    pub overruns: u64,
    /// Periods.
    pub periods: u64,
    /// Periods in which it had less than its budget although it wanted it.
    pub misses: u64,
    /// Changes of its place.
    pub changes: u64,
    /// Changes that the kernel refused.
    pub refused: u64,
}

/// What the deadline tasks of a vCPU asked for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Guest {
    /// CPU time within each period, us.
    pub budget_us: f64,
    /// The period, us: the shortest of its tasks'.
    pub period_us: f64,
}

/// A deadline task of a guest: the guest's word, which decides where slices end and nothing else.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct GuestTask {
    /// Its period, us.
    pub period_us: f64,
    /// From now to its next deadline, us; of one that sleeps, to the earliest that its next release can have.
    pub deadline_in_us: f64,
    /// Whether it has run in its last two periods.
    pub active: bool,
}

/// The present slice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Slice {
    /// Nobody needs a plan: all vCPUs are nearly idle.
    pub calm: bool,
    /// Its length, us.
    pub length_us: f64,
    /// How much of it has gone by, us.
    pub elapsed_us: f64,
    /// Slices planned so far.
    pub slices: u64,
    /// Times a pacer has looked so far.
    pub looks: u64,
    /// Who is planned where and when; empty in calm times.
    pub plan: Vec<PlannedPart>,
}

/// A vCPU's part of a slice.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct PlannedPart {
    /// On which CPU.
    pub cpu: u32,
    /// The VM.
    pub vm: String,
    /// Its vCPU.
    pub vcpu: u32,
    /// From, us after the slice's start.
    pub start_us: f64,
    /// To.
    pub end_us: f64,
}

/// One knob: wanted and actual.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct KnobState {
    /// The rule that wants it; `reservation` for CPU time that `sched.toml` would reserve.
    pub rule: String,
    /// The knob.
    pub knob: String,
    /// The wanted value.
    pub wanted: String,
    /// The value it has; none where it cannot be read.
    pub actual: Option<String>,
    /// `ok`, `drifted`, `paused` (its thread is over its runtime cap this moment), `ahead` (a vCPU, because of an
    /// interrupt: method `interrupt-context`), `gone`, `unsupported` or `failed`; `not-applied` where no daemon runs,
    /// or after `ontime reset`; and `would-change` or `would-fail` in mode `observe`.
    pub state: String,
    /// Why, where it is not `ok`.
    pub why: Option<String>,
}

/// Something no knob cures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Finding {
    /// The rule it is about.
    pub rule: String,
    /// `info`, `warning` or `critical`.
    pub severity: String,
    /// What it is about.
    pub object: String,
    /// What was found.
    pub found: String,
    /// What to do about it.
    pub remedy: String,
}

/// Whether the class guarantee does not hold.
pub(crate) fn any_critical(findings: &[Finding]) -> bool {
    findings.iter().any(|finding| finding.severity == "critical")
}

/// Something that went wrong.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Problem {
    /// On which tenant, file or part.
    pub subject: String,
    /// What, and what to do.
    pub message: String,
}

/// A request to apply.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ApplyRequest {
    /// The method to switch to, until the daemon ends or is asked for another; without it, the one in force.
    #[serde(default)]
    pub method: Option<String>,
    /// Say what would change, and change nothing.
    #[serde(default)]
    pub dry_run: bool,
}

/// What an apply or reset did.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Report {
    /// The version of this document: a field that goes or changes its meaning raises it.
    #[serde(default)]
    pub schema_version: u32,
    /// The method.
    pub method: String,
    /// Whether nothing was changed because none was asked.
    pub dry_run: bool,
    /// Knobs that did not have the wanted value. Those that did are counted only.
    pub changes: Vec<Change>,
    /// Knobs that had it.
    pub unchanged: usize,
    /// What no knob cures.
    pub findings: Vec<Finding>,
}

/// What became of one knob.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Change {
    /// The rule that wanted it, or `reservation`; none where it was restored.
    pub rule: Option<String>,
    /// The knob.
    pub knob: String,
    /// What it was.
    pub from: Option<String>,
    /// What it was to become.
    pub to: String,
    /// `changed`, `restored`, `gone`, `unsupported`, `failed`; of a dry run, `would-change`, `would-restore`,
    /// `would-fail` (its cause is known beforehand), `gone`, `unsupported` or `unreadable`.
    pub outcome: String,
    /// Why, where it is neither changed nor restored.
    pub why: Option<String>,
}

/// Why a call was refused or failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub(crate) struct Error {
    /// What is wrong and what to do.
    pub error: String,
}
