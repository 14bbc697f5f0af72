//! With bulk work that uses all remaining CPU time: two VMs that never idle get their reserved CPU time in every
//! period, and the time that an idle VM leaves of its reservation. A reservation that does not fit is refused, and the
//! report names its VM. After kill -9 of the daemon every vCPU continues to run, a new daemon enforces the reservations
//! again, and a reset restores every policy. `$BACKEND` enforces the reservations.

use std::fmt;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::thread::sleep;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::process::Signal;

use crate::inside::clock::{now, percent, sleep_until};
use crate::inside::command::{figures, program, run, spin, within};
use crate::inside::daemon::{Daemon, configure, reset, rt_tenant};
use crate::inside::knobs::{expect_same, of_threads, snapshot};
use crate::inside::reserved::{Look, refused, reservation, shown};
use crate::inside::thread::{Place, place, ran, set_own, thread};
use crate::inside::vm::Vm;

/// The period of all reservations.
const PERIOD: Duration = Duration::from_millis(20);

pub(crate) fn reservations() -> Result<()> {
    let backend = std::env::var("BACKEND").context("$BACKEND")?;
    // When its reservation is refused, b spins at real-time priority under its cap. The default cap would leave only
    // 5 % for the VMs and processes that this test measures.
    let tenants = [("a", "level = 0"), ("b", "level = 1\nruntime-cap = 0.3"), ("idle", "level = 0")];
    configure("tenants.toml", &tenants.map(|(name, settings)| rt_tenant(name, settings)).concat())?;
    reserve(&backend, "4ms")?;
    let [a, b] = [("a", "rt", "10.1.0.3"), ("b", "bulk", "10.2.0.3")].map(|(name, net, address)| -> Result<Vm> {
        let vm = Vm::start_small(name, "spin", net, address)?;
        vm.wait()?;
        // It would only make the others boot slowly.
        vm.signal(Signal::STOP).map(|()| vm)
    });
    let (a, b, idle) = (a?, b?, Vm::start_small("idle", "idle", "rt", "10.1.0.6")?);
    idle.wait()?;
    let (vcpu_a, vcpu_b, vcpu_idle) = (a.vcpu()?, b.vcpu()?, idle.vcpu()?);
    let before = of_threads(&snapshot()?, &["CPU 0/KVM"]);
    // Kernel threads of a newly booted guest, such as the self-tests of its cryptography, would use its reservation.
    within(120, "the idle guest has nothing to do", || {
        let earlier = ran(vcpu_idle)?;
        sleep(Duration::from_secs(1));
        Ok(ran(vcpu_idle)?.saturating_sub(earlier) < Duration::from_millis(20))
    })?;

    // Only an idle guest runs: the daemon checks the vCPUs rarely.
    idle.signal(Signal::STOP)?;
    let daemon = Daemon::start()?;
    within(40, "the reservation of a is kept", || Ok(Look::take()?.keeps("a")))?;
    sleep(Duration::from_secs(2));
    let (calm, later) = (Look::take_over("4")?, Look::take_over("4")?);
    let looks = (later.looks()?.saturating_sub(calm.looks()?) as f64 / later.time()?.as_secs_f64()).trunc();
    ensure!(looks <= 30.0, "{looks} looks a second at vCPUs that all sleep");
    // On each of the laboratory's kernels it does.
    ensure!(later.uncounted().is_none(), "the kernel does not count for the pacers: {:?}", later.uncounted());
    idle.signal(Signal::CONT)?;

    // Both VMs and the bulk work compete for the CPU.
    let bulk = spin()?;
    a.signal(Signal::CONT)?;
    b.signal(Signal::CONT)?;
    // One may have had to wait for the look that found the other spinning.
    sleep(Duration::from_secs(2));
    let of_both = |what: &str| -> Result<[f64; 2]> {
        let look = Look::take()?;
        Ok([look.value("a", what)?, look.value("b", what)?])
    };
    let misses = of_both("misses")?;
    let (beyond, beyond_since) = (of_both("beyond_seconds")?, now());
    let pacer = thread(daemon.pid(), "ontime-pace/*")?;
    let (pacer_ran, bulk_ran, start) = (ran(pacer)?, ran(bulk.pid())?, now());
    let [of_a, of_b, of_idle] = measure(200, [vcpu_a, vcpu_b, vcpu_idle])?;
    let took = now().saturating_sub(start);
    let tenths = percent(ran(pacer)?.saturating_sub(pacer_ran) * 10, took);
    let bulk_share = percent(ran(bulk.pid())?.saturating_sub(bulk_ran), took);
    let misses_later = of_both("misses")?;
    // CPU time beyond the reservation per period, in us: the SCHED_IDLE share of the unreserved time. The measured
    // times include it. They also include the delay of the daemon's first checks, which is compensated by the time that
    // the stopped VMs did not use (docs/design/sched.md).
    let ([beyond_a, beyond_b], [beyond_a_later, beyond_b_later]) = (beyond, of_both("beyond_seconds")?);
    let periods = now().saturating_sub(beyond_since).as_secs_f64() / PERIOD.as_secs_f64();
    let [beyond_a, beyond_b] =
        [beyond_a_later - beyond_a, beyond_b_later - beyond_b].map(|seconds| seconds * 1e6 / periods);
    println!("{}", shown()?);
    figures(format_args!(
        "6 ms of 20: {of_a}; 4 ms of 20: {of_b}; beyond, mean: {beyond_a:.0}, {beyond_b:.0}; idle: {of_idle}; bulk \
         {bulk_share} %, pacer {}.{} %; calm: {looks} looks/s",
        tenths / 10,
        tenths % 10
    ));
    ensure!(misses == misses_later, "misses of a and b: {misses:?}, later {misses_later:?}");
    kept("beside bulk", &of_a, &of_b)?;
    // These periods do not start where the daemon's slices start: the time that the idle VM uses in a slice moves the
    // slices of the others, and a slice may be split between two periods.
    let moved = of_idle.most;
    ensure!(
        of_a.least + moved >= 5880 && of_b.least + moved >= 3920,
        "a period with less than was reserved: {of_a}; {of_b}; idle: {of_idle}"
    );
    ensure!(bulk_share >= 30, "bulk had {bulk_share} %, and 40 % was nobody's");

    // Not with sched_ext: there an RT VM without a reservation stays real-time and runs before those that have one
    // (docs/design/sched.md).
    if backend != "sched_ext" {
        refused_by_name(&backend, &daemon)?;
    }

    // kill -9: every vCPU immediately gets the policy that it had before Ontime, and continues to run.
    daemon.dies()?;
    for (name, vcpu) in [("a", vcpu_a), ("b", vcpu_b), ("idle", vcpu_idle)] {
        let what = format!("{name} is SCHED_OTHER after the daemon's death");
        within(5, &what, || Ok(place(vcpu)? == Place::OTHER))?;
    }
    let (ran_a, ran_b) = (ran(vcpu_a)?, ran(vcpu_b)?);
    sleep(Duration::from_secs(1));
    for (name, vcpu, earlier) in [("a", vcpu_a, ran_a), ("b", vcpu_b, ran_b)] {
        let had = ran(vcpu)?.saturating_sub(earlier);
        ensure!(had >= Duration::from_millis(100), "{name} starves while no daemon runs: it ran {had:?} in a second");
    }

    // A new daemon enforces the reservations again.
    let daemon = Daemon::start()?;
    within(40, "the reservation of a is kept by the new daemon", || Ok(Look::take()?.keeps("a")))?;
    sleep(Duration::from_secs(1));
    let [of_a, of_b] = measure(50, [vcpu_a, vcpu_b])?;
    println!("after a restart: {of_a}; {of_b}");
    kept("after the restart", &of_a, &of_b)?;

    // A paced VM that ends does not disturb the others.
    b.stop()?;
    within(40, "b is not shown any more", || Ok(!shown()?.lines().any(is_row_of_b)))?;
    sleep(Duration::from_secs(1));
    let [of_a] = measure(50, [vcpu_a])?;
    println!("without b: {of_a}");
    near("mean of a without b, with what the idle one does not use", 8000, of_a.mean)?;

    bulk.end(Signal::TERM)?;
    reset()?;
    expect_same("vCPUs after the reset", &before, &of_threads(&snapshot()?, &["CPU 0/KVM"]))?;
    daemon.ends()
}

/// A reservation that does not fit is refused, and the report names its VM; the other VMs keep theirs.
fn refused_by_name(backend: &str, daemon: &Daemon) -> Result<()> {
    reserve(backend, "14ms")?;
    daemon.reload()?;
    within(40, "a reservation is refused", || Ok(refused()?.iter().any(|line| line.contains("CPUs asked"))))?;
    println!("{}", refused()?.join("\n"));
    reserve(backend, "4ms")?;
    daemon.reload()?;
    within(40, "no reservation is refused", || Ok(refused()?.is_empty()))
}

/// Configures the reservations. Only that of b is not always the same.
fn reserve(backend: &str, of_b: &str) -> Result<()> {
    let all = [("a", "6ms"), ("b", of_b), ("idle", "2ms")].map(|(vm, budget)| reservation(vm, budget));
    configure("sched.toml", &format!("backend = \"{backend}\"\n{}", all.concat()))
}

/// Fails unless each has its share, and both have the idle VM's as well, ahead of bulk.
fn kept(when: &str, of_a: &Periods, of_b: &Periods) -> Result<()> {
    ensure!(of_a.mean >= 5880 && of_b.mean >= 3920, "{when}: less than was reserved: {of_a}; {of_b}");
    near(&format!("{when}: what a and b have together"), 12_000, of_a.mean + of_b.mean)
}

fn near(what: &str, wanted: u64, found: u64) -> Result<()> {
    ensure!(found.abs_diff(wanted) * 100 <= wanted * 3, "{what}: {found} is not within 3 % of {wanted}");
    Ok(())
}

/// Whether `ontime top` shows a vCPU of b in this line.
fn is_row_of_b(line: &str) -> bool {
    line.starts_with(|letter: char| letter.is_ascii_uppercase()) && line.split_whitespace().nth(1) == Some("b")
}

/// CPU time of a thread in each period, us.
struct Periods {
    least: u64,
    most: u64,
    mean: u64,
}

impl fmt::Display for Periods {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "least {} us, most {}, mean {}", self.least, self.most, self.mean)
    }
}

/// Measures threads in so many periods.
fn measure<const N: usize>(count: u32, threads: [i32; N]) -> Result<[Periods; N]> {
    let arguments: Vec<String> =
        std::iter::once(count.to_string()).chain(threads.map(|thread| thread.to_string())).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let said = run(program("reserved_cpu_time_is_kept", "periods", &arguments)?)?;
    let of_thread = |line: &str| -> Result<Periods> {
        let numbers: Vec<u64> = line.split(' ').map_while(|number| number.parse().ok()).collect();
        let [least, most, mean] = numbers.as_slice() else { bail!("not three numbers: {line}") };
        Ok(Periods { least: *least, most: *most, mean: *mean })
    };
    let periods = said.lines().map(of_thread).collect::<Result<Vec<_>>>()?;
    periods.try_into().map_err(|_| anyhow!("not {N} threads: {said}"))
}

/// Program: CPU time of threads in each of so many periods, read at the ends of the periods at a priority above all
/// others. It prints for each thread the least, the most and the mean, us.
pub(crate) fn periods(arguments: &[String]) -> Result<()> {
    let (count, threads) = arguments.split_first().context("the number of periods is missing")?;
    let count: usize = count.parse().with_context(|| format!("{count} is no number of periods"))?;
    let mut threads = threads
        .iter()
        .map(|thread| -> Result<(File, Vec<u64>)> {
            let path = format!("/proc/{thread}/schedstat");
            Ok((File::open(&path).with_context(|| format!("opening {path}"))?, Vec::with_capacity(count + 1)))
        })
        .collect::<Result<Vec<_>>>()?;
    let gone_by = u32::try_from(now().as_nanos() / PERIOD.as_nanos()).context("the host's time")?;
    let mut at = PERIOD * (gone_by + 2);
    // Not while this program starts and ends, which takes long.
    set_own(Place::fifo(60))?;
    for _ in 0..=count {
        sleep_until(at)?;
        for (schedstat, times) in &mut threads {
            times.push(has_run(schedstat)?);
        }
        at += PERIOD;
    }
    set_own(Place::OTHER)?;
    for (_, times) in threads {
        let parts = times.iter().zip(times.iter().skip(1)).map(|(earlier, later)| later.saturating_sub(*earlier));
        let parts: Vec<u64> = parts.collect();
        let (least, most) = (parts.iter().min().copied(), parts.iter().max().copied());
        let mean = parts.iter().sum::<u64>().checked_div(parts.len() as u64);
        let (Some(least), Some(most), Some(mean)) = (least, most, mean) else { bail!("no period was measured") };
        println!("{} {} {}", least / 1000, most / 1000, mean / 1000);
    }
    Ok(())
}

/// CPU time of a thread so far, ns.
fn has_run(schedstat: &File) -> Result<u64> {
    let mut text = [0; 100];
    let length = schedstat.read_at(&mut text, 0).context("a vCPU has ended")?;
    let text = std::str::from_utf8(text.get(..length).unwrap_or_default()).context("schedstat")?;
    text.split(' ').next().and_then(|ran| ran.parse().ok()).context("a vCPU has ended")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vms_row_is_told_from_others() {
        assert!(is_row_of_b("B  b     0     4 ms / 20 ms"));
        for line in ["A  a     0     6 ms / 20 ms", "CPU 0   |AAABB|", "   VM  b", "not running: b", "refused: b: b "] {
            assert!(!is_row_of_b(line), "{line}");
        }
    }

    #[test]
    fn a_tolerance_is_three_percent_to_both_sides() {
        for found in [11_640, 12_000, 12_360] {
            near("it", 12_000, found).unwrap();
        }
        for found in [11_639, 12_361] {
            assert!(near("it", 12_000, found).is_err());
        }
    }
}
