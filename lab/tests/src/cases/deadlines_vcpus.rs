//! Deadline tasks of a guest with two vCPUs, on two CPUs. They are placed by best fit, and all of them are placed again
//! where the free bandwidth is fragmented. Bandwidth is released when a task forks a child without a guarantee, leaves
//! SCHED_DEADLINE, is demoted by its kernel, or when the module is unloaded. A replaced device process gets the
//! complete state again. A task that is moved takes its bandwidth along.

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;

use crate::inside::command::{expect, figures, within};
use crate::inside::daemon::{Daemon, configure};
use crate::inside::plc::{Guest, SPARE, has_debug_kernel, held, published, task};

pub(crate) fn deadlines_vcpus() -> Result<()> {
    configure(
        "sched.toml",
        "[[reservation]]\nname = \"plc\"\nbudget = \"0.5ms\"\nperiod = \"20ms\"\ndeadlines = 0.9\n",
    )?;
    let mut guest = Guest::boot(2)?;
    let daemon = Daemon::start()?;
    holds([None, None])?;
    placed(&guest)?;
    moved(&guest)?;
    let daemon = unserved(&guest, daemon)?;
    left(&guest)?;

    // A device process that is replaced while the tasks run gets the bandwidth that they hold.
    guest.replace_device()?;
    holds_within(120, [Some(12000), Some(8000)])?;
    guest.fits("g", 4000)?;
    on(&guest, "g", "0")?;
    holds([Some(16000), Some(8000)])?;

    unloaded(&guest)?;
    for name in ["b", "c", "d", "g", "h"] {
        guest.ends(name)?;
    }
    holds([None, None])?;
    guest.keep_reports()?;
    demoted(&guest)?;
    guest.vm.signal(Signal::TERM)?;
    daemon.ends()?;
    figures("placed by best fit, anew, forked, left, with a new device, without the module, demoted: as asked");
    Ok(())
}

/// Best fit: the fullest vCPU that has room. The other vCPU is used only when that one is full.
fn placed(guest: &Guest) -> Result<()> {
    guest.fits("a", 10000)?;
    runs(guest, "b", 8000)?;
    comes_to(guest, "b", "0")?;
    runs(guest, "c", 6000)?;
    comes_to(guest, "c", "1")?;
    guest.fits("d", 6000)?;
    on(guest, "a", "0")?;
    on(guest, "d", "1")?;
    holds([Some(18000), Some(12000)])?;
    // The free bandwidth suffices in total, but neither vCPU has room for 12 ms of 20: all tasks are placed again, the
    // largest first.
    guest.ends("a")?;
    holds([Some(8000), Some(12000)])?;
    guest.fits("e", 12000)?;
    for (name, vcpu) in [("e", "0"), ("b", "1"), ("c", "0"), ("d", "1")] {
        on(guest, name, vcpu)?;
    }
    holds([Some(18000), Some(14000)])?;
    expect("6 ms more than fit", "refused: EBUSY", guest.hold("f", "deadline", 6000)?)?;
    holds([Some(18000), Some(14000)])
}

/// Tasks that another process moves, or whose vCPU goes.
fn moved(guest: &Guest) -> Result<()> {
    // A task whose affinity another process widens is pinned to one vCPU again.
    guest.ask(&format!("taskset -p 3 {}", task("c")))?;
    comes_to(guest, "c", "0")?;
    let found = budgets()?;
    ensure!(found == [Some(18000), Some(14000)], "the host holds {found:?} for a task whose affinity was lifted");
    // Tasks of a vCPU that goes offline move to another vCPU with their bandwidth, and stay there. (The kernel takes a
    // CPU offline only where its deadline tasks fit on the others.)
    guest.ends("e")?;
    guest.ends("d")?;
    holds([Some(6000), Some(8000)])?;
    // The same for a task that sleeps on that vCPU.
    guest.fits("s", 2000)?;
    on(guest, "s", "1")?;
    set_vcpu1(guest, 0)?;
    holds([Some(16000), None])?;
    comes_to(guest, "b", "0")?;
    set_vcpu1(guest, 1)?;
    // A task that leaves SCHED_DEADLINE gets its former affinity again.
    guest.ask(&format!("/lab/rta leave {}", task("s")))?;
    on(guest, "s", "0-1")?;
    guest.ends("s")?;
    holds([Some(14000), None])?;
    runs(guest, "d", 6000)?;
    comes_to(guest, "d", "1")?;
    holds([Some(14000), Some(6000)])?;
    guest.ends("b")?;
    holds([Some(6000), Some(6000)])
}

/// Without a daemon that admits them, the tasks continue without a guarantee until a daemon runs again. Returns that
/// one.
fn unserved(guest: &Guest, daemon: Daemon) -> Result<Daemon> {
    daemon.ends()?;
    set_vcpu1(guest, 0)?;
    within(60, "a task has no guarantee", || Ok(guest.ask("dmesg | grep -c 'it has no guarantee'")? == "1"))?;
    expect("policy of a deadline task without a guarantee", 6, policy(guest, &task("d"))?)?;
    let daemon = Daemon::start()?;
    holds_within(120, [Some(12000), None])?;
    comes_to(guest, "d", "0")?;
    set_vcpu1(guest, 1)?;
    guest.fits("b", 8000)?;
    on(guest, "b", "1")?;
    holds([Some(12000), Some(8000)])?;
    Ok(daemon)
}

/// The child of a deadline task is no deadline task and may run anywhere. A task that leaves SCHED_DEADLINE releases
/// its bandwidth.
fn left(guest: &Guest) -> Result<()> {
    let said = guest.hold("f", "forks", 4000)?;
    let child = said.strip_prefix("holds, child ").with_context(|| format!("forks: {said}"))?;
    holds([Some(16000), Some(8000)])?;
    on(guest, "f", "0")?;
    // The module's worker widens the child's affinity, so this takes a moment.
    within(60, "the child may run anywhere", || Ok(vcpus(guest, child)? == "0-1"))?;
    expect("policy of the child of a deadline task", 0, policy(guest, child)?)?;
    expect("policy of a deadline task", 6, policy(guest, &task("f"))?)?;
    guest.ask(&format!("/lab/rta leave {}", task("f")))?;
    holds([Some(12000), Some(8000)])?;
    on(guest, "f", "0-1")?;
    guest.ask(&format!("kill -9 {child}"))?;
    guest.ends("f")
}

/// Without the module the tasks continue without a guarantee. With the module loaded again, new tasks are admitted by
/// the host.
fn unloaded(guest: &Guest) -> Result<()> {
    let said = guest.ask("rmmod ontime && echo unloaded")?;
    ensure!(said.contains("unloaded"), "the module does not go: {said}");
    holds([None, None])?;
    on(guest, "g", "0-1")?;
    expect("policy of a deadline task without the module", 6, policy(guest, &task("g"))?)?;
    let said = guest.ask("insmod /lab/ontime.ko && echo loaded")?;
    ensure!(said.contains("loaded"), "the module does not come back: {said}");
    let hooked = || Ok(guest.ask("dmesg | grep -c 'SCHED_DEADLINE is guaranteed'")? == "2");
    within(60, "the module takes deadline tasks again", hooked)?;
    // The host accepts a new runtime of a deadline task from before, but the guest's kernel refuses it (less than 1,024
    // ns). The task stays as it was, and may ask again.
    let change = |runtime: u32| guest.ask(&format!("/lab/rta change {} {runtime} 20000", task("g")));
    expect("1 us of 20 ms", "refused: Invalid argument", change(1)?)?;
    holds([None, None])?;
    on(guest, "g", "0-1")?;
    expect("policy of a deadline task whose change was refused", 6, policy(guest, &task("g"))?)?;
    guest.fits("h", 4000)?;
    holds([Some(4000), None])?;
    expect("6 ms of 20 for a deadline task from before", "changed", change(6000)?)?;
    on(guest, "g", "0")?;
    holds([Some(10000), None])
}

/// A task that the guest's kernel itself makes an ordinary one (SysRq n) releases its bandwidth while it runs on, is
/// published no more, and may run anywhere again. Linux 6.12 does not unlock `cpuset_mutex` after that: the next call
/// for a deadline task does not return, and neither does any later one. So this comes last, and not on a debug kernel,
/// which would report the lock. The call that hangs does not keep the module from its other work: it tells the host of
/// other bandwidth. The module cannot be removed before that call returns, and says so at once.
fn demoted(guest: &Guest) -> Result<()> {
    if has_debug_kernel() {
        return Ok(());
    }
    guest.fits("n", 6000)?;
    on(guest, "n", "0")?;
    holds([Some(6000), None])?;
    within(60, "the guest publishes its task", || Ok(published()? == [Some(1), Some(0)]))?;
    // The kernel writes to the console at once, so not beside what the shell prints.
    guest.ask("sleep 1; echo n > /proc/sysrq-trigger; sleep 1")?;
    holds([None, None])?;
    within(60, "the guest publishes no task", || Ok(published()? == [Some(0), Some(0)]))?;
    expect("policy of a task that the kernel has demoted", 0, policy(guest, &task("n"))?)?;
    on(guest, "n", "0-1")?;
    guest.ends("n")?;

    guest.ask("rm -f /tmp/o; /lab/rta deadline 6000 20000 0 0 > /tmp/o & echo $! > /tmp/o.pid")?;
    holds([Some(6000), None])?;
    guest.ask(&format!("echo 2000/20000 > {SPARE}"))?;
    holds([Some(8000), Some(2000)])?;
    guest.ask(&format!("echo 0 > {SPARE}"))?;
    holds([Some(6000), None])?;
    let mut said = String::new();
    within(60, "the request of o has returned or hangs", || {
        said = guest.ask(&format!("cat /tmp/o; sed 's/.*) //; s/ .*//' /proc/{}/stat", task("o")))?;
        Ok(said.starts_with("holds") || said == "D")
    })?;
    if said == "D" {
        let removed = guest.ask("rmmod ontime 2> /dev/null || echo refused")?;
        expect("rmmod while a call hangs", "refused", removed)?;
    }
    Ok(())
}

/// Takes vCPU 1 online (1) or offline (0).
fn set_vcpu1(guest: &Guest, online: u8) -> Result<()> {
    let said = guest.ask(&format!("echo {online} > /sys/devices/system/cpu/cpu1/online && echo set"))?;
    ensure!(said.contains("set"), "vCPU 1 does not go to {online}: {said}");
    Ok(())
}

/// Starts a task with jobs of 10 us.
fn runs(guest: &Guest, name: &str, runtime: u32) -> Result<()> {
    let line = format!("/lab/rta deadline {runtime} 20000 10 1000000 > /tmp/{name} & echo $! > /tmp/{name}.pid");
    guest.ask(&line).map(drop)
}

/// The vCPUs that a process of the guest may use.
fn vcpus(guest: &Guest, pid: &str) -> Result<String> {
    guest.ask(&format!("sed -n 's/^Cpus_allowed_list:.//p' /proc/{pid}/status"))
}

/// Waits until a task is on these vCPUs.
fn comes_to(guest: &Guest, name: &str, wanted: &str) -> Result<()> {
    within(60, &format!("{name} is on vCPU {wanted}"), || Ok(vcpus(guest, &task(name))? == wanted))
}

/// Fails unless a task is on these vCPUs.
fn on(guest: &Guest, name: &str, wanted: &str) -> Result<()> {
    expect(&format!("vCPU of {name}"), wanted, vcpus(guest, &task(name))?)
}

/// The policy of a process of the guest, field 41 of its `stat`.
fn policy(guest: &Guest, pid: &str) -> Result<String> {
    let fields = guest.ask(&format!("sed 's/.*) //' /proc/{pid}/stat"))?;
    fields.split(' ').nth(38).map(str::to_owned).with_context(|| format!("/proc/{pid}/stat: {fields}"))
}

/// What the host reserves for the guest's tasks on each vCPU, in whole us.
fn budgets() -> Result<Vec<Option<u64>>> {
    Ok(held()?.into_iter().map(|need| need.map(|(budget, _)| budget as u64)).collect())
}

/// Waits until the host reserves so many us of 20 ms on vCPU 0 and on vCPU 1.
fn holds(wanted: [Option<u64>; 2]) -> Result<()> {
    holds_within(60, wanted)
}

fn holds_within(seconds: u64, wanted: [Option<u64>; 2]) -> Result<()> {
    within(seconds, &format!("the host holds {wanted:?}"), || {
        let found = budgets()?;
        ensure!(found == wanted, "it holds {found:?}");
        Ok(true)
    })
}
