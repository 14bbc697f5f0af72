//! Calculates the report of `ontime plan`. Bandwidths are exact inside; the shown figures are rounded.

use std::collections::HashMap;

use ontime_plan::compositional::{self, Task};
use ontime_plan::simulate::{Options, Outcome, simulate};
use ontime_plan::{Admission, Admitted, Bandwidth, Filling, Nanos, Refusal, Reservation, Tenant, Vcpu};
use ontime_sched::{Beside, fit_beside};
use serde::Serialize;

use super::file::{PlanFile, Reserve};

/// MPR and DMPR interfaces are searched only where vCPUs times the shortest period (in units) is at most this; beyond,
/// the search takes minutes.
const MULTI_MAX: u64 = 200;

/// The whole report.
#[derive(Debug, Serialize)]
pub(super) struct Report {
    /// Whether every tenant has a place.
    pub fits: bool,
    /// CPUs of each host.
    pub cpus_per_host: u32,
    /// CPUs kept on each host for bulk and, beside requests, for the cap watcher.
    pub bulk_reserve_cpus: f64,
    /// What all RTAs need, in CPUs.
    pub needed_cpus: f64,
    /// What Ontime reserves, slack included, in CPUs.
    pub reserved_cpus: f64,
    /// One entry per host.
    pub hosts: Vec<HostReport>,
    /// Tenants that have no place, and why.
    pub refused: Vec<RefusedTenant>,
    /// One entry per tenant.
    pub tenants: Vec<TenantReport>,
    /// What compositional analysis would reserve, with all tenants on one host.
    pub compositional: Compositional,
    /// Remarks for the user.
    pub notes: Vec<String>,
}

/// A host and its tenants.
#[derive(Debug, Serialize)]
pub(super) struct HostReport {
    /// Names of its tenants.
    pub tenants: Vec<String>,
    /// What Ontime reserves on it, in CPUs.
    pub reserved_cpus: f64,
    /// Left for more RT tenants, in CPUs.
    pub free_cpus: f64,
    /// The result of the simulation, if requested.
    pub simulation: Option<Simulation>,
}

/// A tenant without a place.
#[derive(Debug, Serialize)]
pub(super) struct RefusedTenant {
    pub tenant: String,
    /// Why the emptiest host refuses it.
    pub why: String,
}

/// A tenant's bandwidths.
#[derive(Debug, Serialize)]
pub(super) struct TenantReport {
    pub name: String,
    /// What its RTAs need, without slack, in CPUs.
    pub needed_cpus: f64,
    /// Under Ontime, in CPUs.
    pub reserved_cpus: f64,
    /// Under PRM, in CPUs; none if there is no such interface.
    pub prm_cpus: Option<f64>,
    /// The time unit of its PRM interfaces, ns.
    pub prm_unit_ns: u64,
    /// One entry per vCPU.
    pub vcpus: Vec<VcpuReport>,
}

/// A vCPU's budget and interface, as (time, period).
#[derive(Debug, Serialize)]
pub(super) struct VcpuReport {
    /// How many RTAs it has.
    pub rtas: usize,
    /// Under Ontime, in ns.
    pub budget_ns: (u64, u64),
    /// What has to be reserved where the host runs vCPUs in the order of deadlines, in ns, if that is not `budget_ns`:
    /// jobs of one of the RTAs arrive at any time beside others.
    pub covering_ns: Option<Covering>,
    /// Under PRM, in ns; none if there is no such interface.
    pub prm_ns: Option<(u64, u64)>,
}

/// What keeps the deadlines of jobs that arrive at any time beside others of their vCPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Covering {
    /// This (time, period), in ns.
    Budget(u64, u64),
    /// No budget.
    Nothing,
}

/// The results of compositional analysis, as in RT-Xen.
#[derive(Debug, Serialize)]
pub(super) struct Compositional {
    /// The unit in which the host is analysed, in ns.
    pub unit_ns: u64,
    /// The sum of all PRM interfaces, in CPUs ("allocated").
    pub prm_cpus: Option<f64>,
    /// Whole CPUs to set aside so that gEDF provably serves these interfaces ("claimed").
    pub claimed_cpus: Option<u64>,
    /// The DMPR of least bandwidth over the PRM interfaces, in CPUs.
    pub dmpr_cpus: Option<f64>,
    /// The MPR of least bandwidth over the PRM interfaces, in CPUs.
    pub mpr_cpus: Option<f64>,
}

/// The result of a simulation. Nothing here is measured.
#[derive(Debug, Serialize)]
pub(super) struct Simulation {
    /// Seconds simulated.
    pub seconds: f64,
    /// Jobs whose deadline was reached in the simulated time.
    pub jobs: u64,
    /// Deadlines missed.
    pub missed: u64,
    /// The largest lateness, us.
    pub late_max_us: f64,
    /// Slices planned, per simulated second.
    pub slices_per_second: f64,
    /// Plans made again in the middle of a slice, per simulated second.
    pub replans_per_second: f64,
    /// vCPUs moved to another CPU, per simulated second.
    pub migrations_per_second: f64,
    /// vCPUs switched to, per simulated second.
    pub switches_per_second: f64,
    /// CPU time used by RTAs, in CPUs.
    pub used_cpus: f64,
}

/// Tenants on one host, as admitted.
pub(super) struct Placed {
    /// Indices of its tenants.
    pub tenants: Vec<usize>,
    /// Their vCPUs, each with the index of its tenant.
    pub vcpus: Vec<(usize, Vcpu)>,
    /// The CPUs on which they run.
    pub admitted: Admitted,
}

/// A host while tenants are assigned to it.
struct Filled {
    tenants: Vec<usize>,
    vcpus: Vec<(usize, Vcpu)>,
    cpus: Cpus,
}

/// A host's admission, by what is kept for bulk tenants.
enum Cpus {
    Host(Filling),
    EachCpu { kept: Beside, admitted: Admitted },
}

impl Filled {
    /// A host without tenants.
    fn empty(plan: &PlanFile) -> Option<Self> {
        let cpus = match plan.reserve {
            Reserve::Host(kept) => Cpus::Host(Filling::new(Admission::new(plan.cpus, kept))),
            Reserve::EachCpu(kept) => Cpus::EachCpu { kept, admitted: beside_reserves(plan, kept, &[]).ok()? },
        };
        Some(Self { tenants: Vec::new(), vcpus: Vec::new(), cpus })
    }

    fn total(&self) -> Bandwidth {
        match &self.cpus {
            Cpus::Host(filling) => filling.admitted().total,
            Cpus::EachCpu { admitted, .. } => admitted.total,
        }
    }

    /// Puts a tenant on the host, if all its vCPUs are admitted there.
    fn add(&mut self, plan: &PlanFile, index: usize, tenant: &Tenant) -> Result<(), String> {
        match &mut self.cpus {
            Cpus::Host(filling) => {
                let asked: Vec<Reservation> = tenant.vcpus.iter().map(Reservation::from).collect();
                filling.add(&asked).map_err(|refusal| refusal_text(plan, &self.vcpus, refusal))?;
            }
            Cpus::EachCpu { kept, admitted } => {
                let there = self.vcpus.iter().map(|(of, vcpu)| (*of, vcpu));
                let all: Vec<(usize, &Vcpu)> = there.chain(tenant.vcpus.iter().map(|vcpu| (index, vcpu))).collect();
                *admitted = beside_reserves(plan, *kept, &all)?;
            }
        }
        self.vcpus.extend(tenant.vcpus.iter().map(|vcpu| (index, vcpu.clone())));
        self.tenants.push(index);
        Ok(())
    }
}

impl From<Filled> for Placed {
    fn from(filled: Filled) -> Self {
        let Filled { tenants, vcpus, cpus } = filled;
        let admitted = match cpus {
            Cpus::Host(filling) => filling.into_admitted(),
            Cpus::EachCpu { admitted, .. } => admitted,
        };
        Self { tenants, vcpus, admitted }
    }
}

/// Assigns each tenant to a host. Those that the file puts on a host come first. The others come by size, the largest
/// first, each on the fullest host that admits it, and in the result the fullest host is the first. `in_order`: all
/// come in the order of the file, those without a host each on the emptiest one. Then, and where the file has hosts,
/// these keep their numbers.
pub(super) fn place(plan: &PlanFile, hosts: usize, in_order: bool) -> (Vec<Placed>, Vec<RefusedTenant>) {
    let mut filled: Vec<Filled> = (0..hosts).filter_map(|_| Filled::empty(plan)).collect();
    let mut refused = Vec::new();
    let mut refuse = |tenant: &Tenant, why: String| refused.push(RefusedTenant { tenant: tenant.name.clone(), why });
    let mut order: Vec<(usize, (&Tenant, &Option<u32>))> = plan.tenants.iter().zip(&plan.hosts).enumerate().collect();
    if !in_order {
        order.sort_by_cached_key(|(_, (tenant, host))| host.is_none().then(|| std::cmp::Reverse(tenant.bandwidth())));
    }
    for (index, (tenant, host)) in order {
        if let Some(on) = host.and_then(|host| filled.get_mut((host as usize).checked_sub(1)?)) {
            if let Err(why) = on.add(plan, index, tenant) {
                refuse(tenant, why);
            }
            continue;
        }
        let mut by_room: Vec<&mut Filled> = filled.iter_mut().collect();
        by_room.sort_by_key(|on| on.total());
        if !in_order {
            by_room.reverse();
        }
        let mut refusals = Vec::new();
        let is_placed = by_room.into_iter().any(|on| match on.add(plan, index, tenant) {
            Ok(()) => true,
            Err(why) => {
                refusals.push(why);
                false
            }
        });
        if !is_placed {
            // The reason of the emptiest host.
            let why = if in_order { refusals.into_iter().next() } else { refusals.pop() };
            refuse(tenant, why.unwrap_or_else(|| "there is no host".to_owned()));
        }
    }
    if !in_order && plan.hosts.iter().all(Option::is_none) {
        filled.sort_by_key(|on| std::cmp::Reverse(on.total()));
    }
    (filled.into_iter().map(Placed::from).collect(), refused)
}

/// The admission of these vCPUs, each with the index of its tenant, beside what is kept on each CPU.
fn beside_reserves(plan: &PlanFile, kept: Beside, vcpus: &[(usize, &Vcpu)]) -> Result<Admitted, String> {
    let whole = |ask: Reservation| Reservation { bandwidth: Bandwidth::ppm(ask.bandwidth.whole_ppm()), ..ask };
    let asked: Vec<Reservation> = vcpus.iter().map(|(_, vcpu)| whole(Reservation::from(*vcpu))).collect();
    let total = asked.iter().map(|ask| ask.bandwidth).sum();
    let cpus: Vec<u32> = (0..plan.cpus).collect();
    let owners: Vec<usize> = vcpus.iter().map(|(of, _)| *of).collect();
    let name =
        |at: usize| vcpu_name(plan, &owners, at).map_or_else(String::new, |(vcpu, of)| format!("vCPU {vcpu} of {of}"));
    let Admitted { home, shared, .. } = fit_beside(kept, &cpus, asked, |_| true, |_| true, name)?;
    Ok(Admitted { home: home.into_iter().skip(cpus.len()).take(vcpus.len()).collect(), shared, total })
}

/// The number of a vCPU in its tenant, and the tenant's name. `owners`: for each vCPU, the index of its tenant.
fn vcpu_name<'a>(plan: &'a PlanFile, owners: &[usize], at: usize) -> Option<(usize, &'a str)> {
    let of = owners.get(at)?;
    let number = owners.iter().take(at).filter(|other| *other == of).count();
    Some((number, &plan.tenants.get(*of)?.name))
}

/// Why a tenant was refused, with vCPUs numbered as in their tenant. The vCPUs of the new tenant come after those that
/// are on the host.
fn refusal_text(plan: &PlanFile, there: &[(usize, Vcpu)], refusal: Refusal) -> String {
    let Refusal::Affinity { vcpu: place, bandwidth } = refusal else { return refusal.to_string() };
    let owners: Vec<usize> = there.iter().map(|(of, _)| *of).collect();
    match vcpu_name(plan, &owners, place) {
        Some((vcpu, name)) => format!(
            "beside it no CPU of its affinity would have room for the {bandwidth} of vCPU {vcpu} of {name}; widen the \
             affinity of either"
        ),
        None => Refusal::Affinity { vcpu: place.saturating_sub(there.len()), bandwidth }.to_string(),
    }
}

/// The whole report without simulations.
pub(super) fn report(plan: &PlanFile, placed: &[Placed], refused: Vec<RefusedTenant>) -> Report {
    let mut known = Known::default();
    let tenants: Vec<TenantReport> = plan.tenants.iter().map(|tenant| tenant_report(tenant, &mut known)).collect();
    let name = |index: usize| plan.tenants.get(index).map_or_else(String::new, |tenant| tenant.name.clone());
    let reserve = plan.kept().as_f64();
    let host = |on: &Placed| HostReport {
        tenants: on.tenants.iter().map(|index| name(*index)).collect(),
        reserved_cpus: on.admitted.total.as_f64(),
        free_cpus: f64::from(plan.cpus) - reserve - on.admitted.total.as_f64(),
        simulation: None,
    };
    Report {
        fits: refused.is_empty(),
        cpus_per_host: plan.cpus,
        bulk_reserve_cpus: reserve,
        needed_cpus: plan.tenants.iter().map(Tenant::need).sum::<Bandwidth>().as_f64(),
        reserved_cpus: plan.tenants.iter().map(Tenant::bandwidth).sum::<Bandwidth>().as_f64(),
        hosts: placed.iter().map(host).collect(),
        refused,
        compositional: compositional(&tenants, unit(&plan.tenants)),
        notes: notes(plan).into_iter().chain(not_covered(&tenants)).collect(),
        tenants,
    }
}

/// The largest of 1 ms, 100 us, 10 us, 1 us and 1 ns of which all times are multiples.
fn unit(tenants: &[Tenant]) -> Nanos {
    let times =
        || tenants.iter().flat_map(|t| &t.vcpus).flat_map(Vcpu::rtas).flat_map(|rta| [rta.slice(), rta.period()]);
    let units = [1_000_000, 100_000, 10_000, 1_000];
    Nanos(units.into_iter().find(|unit| times().all(|time| time.0 % unit == 0)).unwrap_or(1))
}

/// What was found so far: copies of a tenant have the same.
#[derive(Default)]
struct Known {
    /// The PRM interfaces, by the vCPU's tasks.
    interfaces: HashMap<Vec<Task>, Option<Task>>,
    /// What covers jobs that arrive at any time, by slice and period of the vCPU's RTAs, and its slack.
    covering: HashMap<(Vec<(Nanos, Nanos)>, Nanos), Covering>,
}

impl Known {
    /// None where the budget is enough.
    fn covering(&mut self, vcpu: &Vcpu) -> Option<Covering> {
        if vcpu.rtas().len() < 2 || !vcpu.sporadic() {
            return None;
        }
        let rtas = vcpu.rtas().iter().map(|rta| (rta.slice(), rta.period())).collect();
        let find = || vcpu.covering_budget().map_or(Covering::Nothing, |(time, of)| Covering::Budget(time.0, of.0));
        Some(*self.covering.entry((rtas, vcpu.slack())).or_insert_with(find))
    }
}

fn tenant_report(tenant: &Tenant, known: &mut Known) -> TenantReport {
    let unit = unit(std::slice::from_ref(tenant));
    let vcpus: Vec<VcpuReport> = tenant.vcpus.iter().map(|vcpu| vcpu_report(vcpu, unit, known)).collect();
    TenantReport {
        name: tenant.name.clone(),
        prm_unit_ns: unit.0,
        needed_cpus: tenant.need().as_f64(),
        reserved_cpus: tenant.bandwidth().as_f64(),
        prm_cpus: vcpus.iter().map(|vcpu| vcpu.prm_ns.map(|(q, p)| q as f64 / p as f64)).sum(),
        vcpus,
    }
}

fn vcpu_report(vcpu: &Vcpu, unit: Nanos, known: &mut Known) -> VcpuReport {
    let tasks: Vec<Task> = vcpu
        .rtas()
        .iter()
        .map(|rta| Task { budget: rta.slice().0 / unit.0, period: rta.period().0 / unit.0 })
        .collect();
    let (budget, period) = vcpu.budget().unwrap_or_default();
    let rtas = tasks.len();
    let found = *known.interfaces.entry(tasks).or_insert_with_key(|tasks| compositional::prm(tasks));
    VcpuReport {
        rtas,
        budget_ns: (budget.0, period.0),
        covering_ns: known.covering(vcpu),
        prm_ns: found.map(|found| (found.budget * unit.0, found.period * unit.0)),
    }
}

fn compositional(tenants: &[TenantReport], unit: Nanos) -> Compositional {
    let interfaces = tenants.iter().flat_map(|tenant| &tenant.vcpus).map(|vcpu| vcpu.prm_ns);
    let tasks: Option<Vec<Task>> =
        interfaces.map(|one| one.map(|(q, p)| Task { budget: q / unit.0, period: p / unit.0 })).collect();
    let work = |tasks: &[Task]| tasks.iter().map(|task| task.period).min().unwrap_or(0) * tasks.len() as u64;
    let few = tasks.as_deref().filter(|tasks| work(tasks) <= MULTI_MAX);
    Compositional {
        unit_ns: unit.0,
        prm_cpus: tasks.as_ref().map(|tasks| tasks.iter().map(|t| t.bandwidth()).sum::<Bandwidth>().as_f64()),
        claimed_cpus: tasks.as_deref().and_then(compositional::whole_cpus),
        dmpr_cpus: few.and_then(compositional::dmpr).map(|multi| multi.dmpr_bandwidth().as_f64()),
        mpr_cpus: few.and_then(compositional::mpr).map(|multi| multi.mpr_bandwidth().as_f64()),
    }
}

/// Notes about tenants whose slack does not cover deadlines that are close together.
fn notes(plan: &PlanFile) -> Vec<String> {
    let thin = |tenant: &&Tenant| {
        let short = |vcpu: &Vcpu| vcpu.slack_for_all().is_none_or(|enough| vcpu.slack() < enough);
        tenant.vcpus.iter().any(short)
    };
    let bound = plan.tenants.iter().filter(thin).flat_map(|tenant| &tenant.vcpus).map(Vcpu::late_bound).max();
    let mut tenants = plan.tenants.iter().filter(thin);
    let Some(first) = tenants.next() else { return Vec::new() };
    let others = tenants.count();
    let enough = first.vcpus.iter().map(Vcpu::slack_for_all).collect::<Option<Vec<_>>>();
    let enough = enough.and_then(|all| all.into_iter().max());
    let whose = if others == 0 { first.name.clone() } else { format!("{} and {others} more", first.name) };
    let remedy = enough.map_or_else(
        || format!("a period of {} is too short for any slack to cover that", first.name),
        |enough| format!("a slack of {enough} covers that for {}", first.name),
    );
    let bound = bound.unwrap_or_default();
    vec![format!("{whose}: a deadline less than 250 us from another's may be missed, by less than {bound}; {remedy}")]
}

/// A note about the first vCPU whose budget does not keep all deadlines, because jobs arrive at any time beside others.
fn not_covered(tenants: &[TenantReport]) -> Option<String> {
    let vcpus = tenants
        .iter()
        .flat_map(|tenant| (0_u32..).zip(&tenant.vcpus).map(move |(number, vcpu)| (tenant, number, vcpu)));
    let mut lacking = vcpus.filter_map(|(tenant, number, vcpu)| Some((tenant, number, vcpu, vcpu.covering_ns?)));
    let (tenant, number, vcpu, covering) = lacking.next()?;
    let pair = |(us, period): (u64, u64)| format!("{} in each {}", Nanos::from_micros(us), Nanos(period));
    let (budget, of) = vcpu.budget_ns;
    let cpus = |(time, period): (u64, u64)| time as f64 / period as f64;
    let remedy = match covering {
        Covering::Budget(time, period) => format!(
            "to keep them, reserve {} ({:.3} CPUs in place of {:.3}), or give each such RTA a vCPU of its own",
            pair((time.div_ceil(1_000), period)),
            cpus((time, period)),
            cpus(vcpu.budget_ns)
        ),
        Covering::Nothing => "no budget keeps them: give each such RTA a vCPU of its own".to_owned(),
    };
    let more = match lacking.count() {
        0 => String::new(),
        more => format!(" (more such vCPUs: {more}; see `covering_ns` in --json)"),
    };
    Some(format!(
        "{}, vCPU {number}: jobs of a sporadic RTA come at any time beside those of other RTAs, so with {} some of \
         their deadlines may be missed; {remedy}{more}",
        tenant.name,
        pair((budget / 1_000, of))
    ))
}

/// Simulates a host.
pub(super) fn run(on: &Placed, options: &Options) -> (Simulation, Outcome) {
    let vcpus: Vec<Vcpu> = on.vcpus.iter().map(|(_, vcpu)| vcpu.clone()).collect();
    let outcome = simulate(&vcpus, &on.admitted, options);
    let seconds = options.duration.0 as f64 / 1e9;
    let each = |count: u64| count as f64 / seconds;
    let simulation = Simulation {
        seconds,
        jobs: outcome.jobs(),
        missed: outcome.missed(),
        late_max_us: outcome.rtas.iter().map(|rta| rta.late_max.0).max().unwrap_or(0) as f64 / 1e3,
        slices_per_second: each(outcome.slices),
        replans_per_second: each(outcome.replans),
        migrations_per_second: each(outcome.migrations),
        switches_per_second: each(outcome.switches),
        used_cpus: outcome.used.0 as f64 / 1e9 / seconds,
    };
    (simulation, outcome)
}

#[cfg(test)]
mod tests {
    use ontime_plan::{Arrivals, Rta};
    use ontime_sched::{Capacity, Lease, SchedConfig, Settled, settle};
    use proptest::prelude::*;

    use super::*;

    /// A budget and a period, us.
    type Share = (u64, u64);

    fn shares() -> impl Strategy<Value = Share> {
        (1u64..970, 500u64..100_000).prop_map(|(thousandths, period)| ((period * thousandths / 1_000).max(1), period))
    }

    /// Tenants, each of some vCPUs with this share, on some CPU or on all.
    fn plan(cpus: u32, tenants: &[(Share, usize, Option<u32>)]) -> PlanFile {
        let tenant = |(number, ((budget, period), vcpus, cpu)): (usize, &(Share, usize, Option<u32>))| {
            let (budget, period) = (Nanos::from_micros(*budget), Nanos::from_micros(*period));
            let rta = Rta::new(budget, period, Arrivals::Periodic).unwrap();
            let affinity = cpu.map(|cpu| [cpu % cpus].into());
            let vcpu = Vcpu::new(vec![rta], Nanos::ZERO, affinity).unwrap();
            Tenant { name: format!("t{number}"), vcpus: vec![vcpu; *vcpus] }
        };
        PlanFile {
            cpus,
            reserve: Reserve::EachCpu(SchedConfig::default().beside_leases()),
            tenants: tenants.iter().enumerate().map(tenant).collect(),
            hosts: vec![None; tenants.len()],
        }
    }

    /// For each tenant, its host.
    fn hosts(placed: &[Placed], tenants: usize) -> Vec<Option<usize>> {
        (0..tenants).map(|tenant| placed.iter().position(|on| on.tenants.contains(&tenant))).collect()
    }

    /// The daemon's admission of these tenants of a plan, one after the other.
    fn daemon(plan: &PlanFile, tenants: &[usize]) -> Settled {
        let lease = |index: &usize| {
            let tenant = &plan.tenants[*index];
            let vcpu = &tenant.vcpus[0];
            let pinned = vcpu.affinity().and_then(|cpus| cpus.first().copied());
            Lease {
                name: tenant.name.clone(),
                ppm: vcpu.bandwidth().whole_ppm(),
                period: vcpu.period().unwrap(),
                count: u32::try_from(tenant.vcpus.len()).unwrap(),
                cpus: pinned.map(|cpu| vec![cpu; tenant.vcpus.len()]),
                admitted: false,
            }
        };
        let config = SchedConfig { leases: tenants.iter().map(lease).collect(), ..SchedConfig::default() };
        settle(&config, &[], &(0..plan.cpus).collect(), &Settled::default(), &ontime_sched::Asks::new())
    }

    /// A scheduler that refuses what would fit is found out, although later tenants have the room in the end.
    #[test]
    fn in_order_tenants_that_have_a_host_take_no_room_from_those_before_them() {
        let half = ((500_000, 1_000_000), 1, None);
        let plan = PlanFile { hosts: vec![None, Some(1)], ..plan(1, &[half, half]) };
        let refused = |in_order| place(&plan, 1, in_order).1.into_iter().map(|one| one.tenant).collect::<Vec<_>>();
        assert_eq!((refused(true), refused(false)), (vec!["t1".to_owned()], vec!["t0".to_owned()]));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(10_000))]

        /// Kubernetes' scheduler adds up what pods ask for on each node. (`make test-kubernetes` asks its own
        /// allocator.)
        #[test]
        fn without_affinities_tenants_are_placed_as_a_scheduler_that_adds_up_places_them(
            tenants in proptest::collection::vec((shares(), 1usize..4), 0..24),
            cpus in 1u32..5,
            nodes in 1usize..4,
        ) {
            let tenants: Vec<_> = tenants.iter().map(|(share, vcpus)| (*share, *vcpus, None)).collect();
            let plan = plan(cpus, &tenants);
            let capacity = Capacity::beside(SchedConfig::default().beside_leases());
            let mut taken = vec![0_u64; nodes];
            let scheduled: Vec<Option<usize>> = tenants.iter().map(|((budget, period), vcpus, _)| {
                let each = (budget * 1_000_000).div_ceil(*period);
                let asked = each * *vcpus as u64;
                let fits = |node: &usize| {
                    let all = u64::from(cpus) * capacity.unpinned - capacity.watcher;
                    each <= capacity.largest && taken[*node] + asked <= all
                };
                let node = (0..nodes).filter(fits).min_by_key(|node| taken[*node])?;
                taken[node] += asked;
                Some(node)
            }).collect();
            let (placed, refused) = place(&plan, nodes, true);
            prop_assert_eq!(&hosts(&placed, tenants.len()), &scheduled);
            prop_assert_eq!(refused.len(), scheduled.iter().filter(|node| node.is_none()).count());
            // And what was scheduled is what the file would say.
            let numbers = scheduled.iter().map(|node| node.map(|node| u32::try_from(node + 1).unwrap())).collect();
            let (again, refused) = place(&PlanFile { hosts: numbers, ..plan }, nodes, true);
            prop_assert_eq!(hosts(&again, tenants.len()), scheduled.clone());
            prop_assert_eq!(refused.len(), scheduled.iter().filter(|node| node.is_none()).count());
        }
    }

    proptest! {
        #[test]
        fn what_is_placed_on_a_host_its_daemon_admits_and_what_is_refused_it_refuses(
            tenants in proptest::collection::vec((shares(), 1usize..3, proptest::option::of(0u32..4)), 0..16),
            cpus in 1u32..5,
            nodes in 1usize..3,
            in_order in proptest::bool::ANY,
        ) {
            let plan = plan(cpus, &tenants);
            let (placed, refused) = place(&plan, nodes, in_order);
            for on in &placed {
                let settled = daemon(&plan, &on.tenants);
                prop_assert!(settled.refused.is_empty(), "{:?}: {:?}", plan, settled.refused);
                for refused in refused.iter().filter(|_| in_order) {
                    let index = plan.tenants.iter().position(|tenant| tenant.name == refused.tenant).unwrap();
                    let before = on.tenants.iter().copied().filter(|other| *other < index);
                    let settled = daemon(&plan, &before.chain([index]).collect::<Vec<_>>());
                    prop_assert!(!settled.leases[&refused.tenant].held, "{:?}: {}", plan, refused.why);
                }
            }
        }
    }
}
