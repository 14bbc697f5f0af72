//! Calculates the report of `ontime plan`. Bandwidths are exact inside; the shown figures are rounded.

use std::collections::HashMap;

use ontime_plan::compositional::{self, Task};
use ontime_plan::simulate::{Options, Outcome, simulate};
use ontime_plan::{Admission, Admitted, Bandwidth, Filling, Nanos, Refusal, Reservation, Tenant, Vcpu};
use serde::Serialize;

use super::file::Plan;

/// MPR and DMPR interfaces are searched only where vCPUs times the shortest period (in units) is at most this; beyond,
/// the search takes minutes.
const MULTI_MAX: u64 = 200;

/// The whole report.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Whether every tenant has a place.
    pub fits: bool,
    /// CPUs of each host.
    pub cpus_per_host: u32,
    /// CPUs kept for bulk on each host.
    pub bulk_reserve_cpus: f64,
    /// What all RTAs need, in CPUs.
    pub needed_cpus: f64,
    /// What Ontime reserves, slack included, in CPUs.
    pub reserved_cpus: f64,
    /// One entry per host.
    pub hosts: Vec<HostReport>,
    /// Tenants that have no place, and why.
    pub refused: Vec<Refused>,
    /// One entry per tenant.
    pub tenants: Vec<TenantReport>,
    /// What compositional analysis would reserve, with all tenants on one host.
    pub compositional: Compositional,
    /// Remarks for the user.
    pub notes: Vec<String>,
}

/// A host and its tenants.
#[derive(Debug, Serialize)]
pub struct HostReport {
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
pub struct Refused {
    /// Its name.
    pub tenant: String,
    /// Why the emptiest host refuses it.
    pub why: String,
}

/// A tenant's bandwidths.
#[derive(Debug, Serialize)]
pub struct TenantReport {
    /// Its name.
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
pub struct VcpuReport {
    /// How many RTAs it has.
    pub rtas: usize,
    /// Under Ontime, in ns.
    pub budget_ns: (u64, u64),
    /// Under PRM, in ns; none if there is no such interface.
    pub prm_ns: Option<(u64, u64)>,
}

/// The results of compositional analysis, as in RT-Xen.
#[derive(Debug, Serialize)]
pub struct Compositional {
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
pub struct Simulation {
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
pub struct Placed {
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
    cpus: Filling,
}

/// Assigns each tenant to a host: the largest tenant first, each to the fullest host that admits it. In the result, the
/// fullest host is the first.
pub fn place(plan: &Plan, hosts: usize) -> (Vec<Placed>, Vec<Refused>) {
    let empty = Filling::new(Admission::new(plan.cpus, plan.reserve));
    let mut filled: Vec<Filled> =
        (0..hosts).map(|_| Filled { tenants: Vec::new(), vcpus: Vec::new(), cpus: empty.clone() }).collect();
    let mut order: Vec<(usize, &Tenant)> = plan.tenants.iter().enumerate().collect();
    order.sort_by_cached_key(|(_, tenant)| std::cmp::Reverse(tenant.bandwidth()));
    let fullest_first = |filled: &mut Vec<Filled>| filled.sort_by_key(|on| std::cmp::Reverse(on.cpus.admitted().total));
    let mut refused = Vec::new();
    for (index, tenant) in order {
        fullest_first(&mut filled);
        let asked: Vec<Reservation> = tenant.vcpus.iter().map(Reservation::from).collect();
        let mut why = None;
        let on = filled.iter_mut().find_map(|on| match on.cpus.add(&asked) {
            Ok(()) => Some(on),
            Err(refusal) => {
                why = Some(refusal);
                None
            }
        });
        match (on, why) {
            (Some(on), _) => {
                on.tenants.push(index);
                on.vcpus.extend(tenant.vcpus.iter().map(|vcpu| (index, vcpu.clone())));
            }
            (None, why) => {
                let why = why.zip(filled.last()).map(|(why, emptiest)| told(plan, &emptiest.vcpus, why));
                let why = why.unwrap_or_else(|| "there is no host".to_owned());
                refused.push(Refused { tenant: tenant.name.clone(), why });
            }
        }
    }
    fullest_first(&mut filled);
    let placed = |on: Filled| Placed { tenants: on.tenants, vcpus: on.vcpus, admitted: on.cpus.into_admitted() };
    (filled.into_iter().map(placed).collect(), refused)
}

/// Why a tenant was refused, with vCPUs numbered as in their tenant. The new tenant's vCPUs come after all vCPUs on the
/// host.
fn told(plan: &Plan, there: &[(usize, Vcpu)], refusal: Refusal) -> String {
    let Refusal::Affinity { vcpu: place, bandwidth } = refusal else { return refusal.to_string() };
    let Some((of, _)) = there.get(place) else {
        return Refusal::Affinity { vcpu: place.saturating_sub(there.len()), bandwidth }.to_string();
    };
    let vcpu = there.iter().take(place).filter(|(other, _)| other == of).count();
    let name = plan.tenants.get(*of).map_or("", |tenant| &tenant.name);
    format!(
        "beside it no CPU of its affinity would have room for the {bandwidth} of vCPU {vcpu} of {name}; widen the \
         affinity of either"
    )
}

/// The whole report without simulations.
pub fn report(plan: &Plan, placed: &[Placed], refused: Vec<Refused>) -> Report {
    let mut known = Interfaces::new();
    let tenants: Vec<TenantReport> = plan.tenants.iter().map(|tenant| tenant_report(tenant, &mut known)).collect();
    let name = |index: usize| plan.tenants.get(index).map_or_else(String::new, |tenant| tenant.name.clone());
    let reserve = plan.reserve.as_f64();
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
        notes: notes(plan),
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

/// The PRM interfaces found so far, by the vCPU's tasks: copies of a tenant have the same.
type Interfaces = HashMap<Vec<Task>, Option<Task>>;

fn tenant_report(tenant: &Tenant, known: &mut Interfaces) -> TenantReport {
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

fn vcpu_report(vcpu: &Vcpu, unit: Nanos, known: &mut Interfaces) -> VcpuReport {
    let tasks: Vec<Task> = vcpu
        .rtas()
        .iter()
        .map(|rta| Task { budget: rta.slice().0 / unit.0, period: rta.period().0 / unit.0 })
        .collect();
    let (budget, period) = vcpu.budget().unwrap_or_default();
    let rtas = tasks.len();
    let found = *known.entry(tasks).or_insert_with_key(|tasks| compositional::prm(tasks));
    VcpuReport {
        rtas,
        budget_ns: (budget.0, period.0),
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
fn notes(plan: &Plan) -> Vec<String> {
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

/// Simulates a host.
pub fn run(on: &Placed, options: &Options) -> (Simulation, Outcome) {
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
