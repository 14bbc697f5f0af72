//! `rta-scale`, what one CPU holds of it: ten VMs with ten applications each (RTVirt, section 4.5, Table 5), slices
//! divided by [`SCALE`], on an emulated host. The paper's size is simulated by [`super::scale`]; the two are told apart
//! wherever they are shown.
//!
//! In: methods and how long. Out: a [`MethodResult`] of each method: deadlines missed by the applications' own logs,
//! what was reserved, and in the notes what the pacers took meanwhile.

use std::fmt::Write as _;

use ontime_figures::number;
use ontime_lab::images::Images;

use super::guests::{self, Guests, Log, Order, Releases, Reservations};
use super::{Rta, Setup, each_case, group, pacers, summarise, without_requests, words};
use crate::host::{Host, MeasureError, Site};
use crate::paper::Figures;
use crate::schema::MethodResult;

/// The methods, in the order in which they are measured, as for `rta-periodic`.
pub const METHODS: [&str; 5] = super::METHODS;
/// What the paper's slices are divided by: they need 14.2 CPUs.
pub const SCALE: u64 = 30;
/// Of an application's slice, how much a job computes, in percent: less than elsewhere, for rt-app's own calls and its
/// log, which count as its run time too, are not divided by [`SCALE`]. With 80 % of 200 to 700 us some jobs in a
/// hundred overran and were held until their next period by their own guest's kernel.
pub const WORK_PERCENT: u64 = 50;
/// Applications of a group, all in one VM.
pub const COPIES: usize = 10;
/// What each VM declares for its guest's kernel and slack, us in 20 ms: ten VMs hold a fifth of the CPU by it.
const DECLARED_US: u64 = 400;
/// From an application's start to its first release, us: meanwhile the others start, and are admitted.
const DELAY_US: u64 = 12_000_000;
/// Looks, half a second apart, until all are admitted.
const LOOKS: u32 = 60;

/// What to measure on one emulated host.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Of [`METHODS`].
    pub methods: Vec<String>,
    /// Applications, by [`groups`]: a VM each, with [`COPIES`] of it.
    pub groups: Vec<Rta>,
    /// How long each application has jobs, seconds of its guest's time.
    pub seconds: u32,
}

impl Plan {
    /// Gives the host room for the VMs.
    pub fn prepare(&self, site: Site) -> Site {
        site.with_room_for(self.groups.len() as u32)
    }
}

/// Boots the host and a VM for each group, and measures every method. One that fails is passed to `missing`, and the
/// rest is measured, as long as the host lives.
///
/// # Errors
/// The host or a VM does not come up.
pub fn measure(
    plan: &Plan,
    site: &Site,
    images: &Images,
    progress: &mut dyn FnMut(&str),
    missing: &mut dyn FnMut(&str, MeasureError),
) -> Result<Vec<MethodResult>, MeasureError> {
    each_case(
        Setup { site, images, vms: plan.groups.len(), declared_us: DECLARED_US },
        (&plan.methods, &[()]),
        |method, ()| method.to_owned(),
        progress,
        missing,
        |host, guests, method, ()| measure_method(host, guests, method, &plan.groups, plan.seconds),
    )
}

/// The applications of Table 5, a group a VM.
pub fn groups(figures: &Figures) -> Vec<Rta> {
    group::table5(figures, SCALE)
}

/// A VM's applications.
fn orders(method: &str, vm: usize, rta: Rta, seconds: u32) -> Vec<Order> {
    let order = |copy| Order {
        tag: format!("{method}-{vm}-{copy}"),
        rta,
        releases: Releases::Periodic(u64::from(seconds) * 1_000_000 / rta.period_us),
        delay_us: DELAY_US,
        work_percent: WORK_PERCENT,
    };
    (0..COPIES).map(order).collect()
}

fn measure_method(
    host: &mut Host,
    guests: &Guests,
    method: &str,
    groups: &[Rta],
    seconds: u32,
) -> Result<MethodResult, MeasureError> {
    let all: Vec<Vec<Order>> = groups.iter().enumerate().map(|(vm, rta)| orders(method, vm, *rta, seconds)).collect();
    let line = |orders: &Vec<Order>| orders.iter().map(Order::line).collect::<Vec<_>>().join("; ");
    guests.tell(host, &all.iter().map(line).collect::<Vec<_>>())?;
    let held = if method == "vanilla" { None } else { Some(admitted(host, guests, groups)?) };
    guests::bulk_threads(host, true)?;
    let mut run = || -> Result<_, MeasureError> {
        // All have begun by then, and none has ended.
        host.shell(&format!("sleep {}", DELAY_US / 1_000_000))?;
        let before = host.cpu_time()?;
        host.shell(&format!("sleep {}", (seconds / 2).max(1)))?;
        let after = host.cpu_time()?;
        let (mut rtas, mut logs) = (Vec::new(), Vec::<Log>::new());
        for (vm, orders) in all.iter().enumerate() {
            for order in orders {
                logs.push(guests.log(host, vm, &order.tag, order.rta)?);
                rtas.push(order.rta);
            }
        }
        Ok((before, after, rtas, logs))
    };
    let ran = run();
    guests::bulk_threads(host, false)?;
    let (before, after, rtas, logs) = ran?;
    let mut result = without_requests(host, method, words(method), after.share_since(&before, host.cpus));
    result.notes.extend(pacers(&before, &after, "while all applications had jobs"));
    summarise(&mut result, &rtas, &logs, held, guests.declared_cpus() * groups.len() as f64);
    Ok(result)
}

/// Waits until all that the applications ask for is reserved; what there was last, CPUs.
fn admitted(host: &mut Host, guests: &Guests, groups: &[Rta]) -> Result<f64, MeasureError> {
    let needed: f64 = groups.iter().map(|rta| rta.bandwidth() * COPIES as f64).sum();
    let mut held = 0.0;
    for _ in 0..LOOKS {
        held = Reservations::look(host)?.beyond_declared(guests);
        if held >= needed * 0.999 {
            break;
        }
        host.shell("sleep 0.5")?;
    }
    Ok(held)
}

/// Each method's applications.
pub fn table(results: &[MethodResult]) -> String {
    let mut text = String::from(
        "method       applications  refused   needed  reserved     jobs   missed  with misses   slowest, of its \
         period\n",
    );
    for (result, rtas) in results.iter().filter_map(|result| Some((result, result.rtas.as_ref()?))) {
        let slowest = rtas.rows.iter().filter_map(|row| Some(row.worst_us? / row.period_us)).fold(0.0, f64::max);
        let _ = writeln!(
            text,
            "{:<12} {:>12} {:>8} {:>8.3} {:>9} {:>8} {:>8} {:>12} {:>24}",
            result.method,
            rtas.rows.len(),
            rtas.rows.iter().filter(|row| row.jobs == 0).count(),
            rtas.needed_cpus,
            rtas.reserved_cpus.map_or_else(|| "-".to_owned(), |cpus| format!("{cpus:.3}")),
            number::count(result.count),
            number::count(rtas.missed),
            rtas.rows.iter().filter(|row| row.missed > 0).count(),
            number::percent(slowest)
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hundred_applications_fit_one_cpu_with_what_their_vms_declare() {
        let groups = groups(&Figures::load().unwrap());
        assert_eq!((groups.len(), groups[0]), (10, Rta { slice_us: 200, period_us: 75_000 }));
        let needed: f64 = groups.iter().map(|rta| rta.bandwidth() * COPIES as f64).sum();
        let declared = DECLARED_US as f64 / guests::DECLARED_PERIOD_US as f64 * groups.len() as f64;
        assert!((0.6..0.75).contains(&(needed + declared)), "{needed} {declared}");
        let orders = orders("paced", 3, groups[0], 10);
        assert_eq!(orders.len(), COPIES);
        assert_eq!(orders[9].line(), "rta paced-3-9 SCHED_DEADLINE 200 75000 100 133 12000000");
    }
}
