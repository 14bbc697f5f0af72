//! `duel`: other ways to protect an RT VM, on the same host with the same VMs and the same load.
//!
//! In: rivals. Out: a [`MethodResult`] for each, beside bulk VMs that receive TCP: the response times of the RT server.
//! As metrics: the maximum of a cyclictest in a guest, frames of Sampled Values that came late or never, the CPUs that
//! other work cannot use, and the share of time that the RT VM's vhost thread waited for a CPU. The three loads follow
//! each other, and each runs beside the bulk load. A host is booted for each rival, with the clients on a CPU of their
//! own.
//!
//! The VM `rt` has the RT server and the subscriber; the VM `rta1` has no NIC and runs cyclictest
//! ([`super::guest_cyclictest`]).

use std::path::PathBuf;
use std::process::ExitCode;

use ontime_cli::usage;
use ontime_lab::images::Images;
use ontime_lab::isolate;
use ontime_lab::role::Role;

use super::guest_cyclictest::{self, Latencies};
use super::inversion;
use super::rta::guests::{DECLARED_US, Guests};
use super::{Emulated, Experiment, Measured, Methods, Output, chosen, command};
use crate::error::MeasureError;
use crate::goals::Figure::{self, Bulk, Max, Own, P99};
use crate::goals::{GoalSpec, goal, tcp};
use crate::host::{BULK_VMS, Host, RT_VM, Site, Vm, boot_vm};
use crate::progress::progress;
use crate::schema::{LATE, Load, MethodResult, Metric, Unit};
use crate::server;
use crate::trial::{self, CaseResults, Requests, Trial};
use crate::workload::{SOCKPERF, Workload};

/// The rivals, in the order of the report.
const RIVALS: Methods = Methods(&[
    ("stock", "Linux as it is, nothing applied"),
    (ISOLATED, "main settings of tuned's realtime-virtual-host, RT vCPUs at FIFO 1 on an isolated CPU"),
    (BUSYPOLL, "the kernel's polling thread on a CPU of its own, nothing else"),
    ("partitioned", "every NAPI threaded, one priority table for the whole path, no CPU of its own"),
]);
/// tuned's profile `realtime-virtual-host`, with the last CPU isolated for the RT VMs' vCPUs.
const ISOLATED: &str = "isolated";
/// The kernel's own polling thread, on the last CPU, and nothing else of Ontime's.
const BUSYPOLL: &str = "busypoll";
/// The traffic of the bulk VMs.
const LOAD: Load = Load::Tcp;
/// Requests and frames at the start of each case that do not count.
const WARM_UP: u64 = 100;
/// The first process of the RT VM, and a program that it needs.
const SERVERS: Role = Role::new("servers", include_str!("duel.sh"));
const SUBSCRIBER: &[u8] = include_bytes!("../../../../docs/examples/subscriber.pl");

/// Keys of the metrics.
const GUEST_MAX: &str = "guest-max";
const LATE_FRAMES: &str = "late-frames";
const VHOST_WAITED: &str = "vhost-waited";

/// A shell command that prints how long each vhost thread of the RT VM has waited for a CPU, ns; then the uptime, s.
const VHOST: &str = "for task in /proc/$(cat /run/lab-vm/rt.pid)/task/*; do read -r name < $task/comm; \
                     case $name in vhost-*) read -r ran waited rest < $task/schedstat; echo $waited ;; esac; done; \
                     read -r up idle < /proc/uptime; echo $up";

/// Parses the output of [`VHOST`]: the sum of the times, ns, and the uptime, s.
fn waited(text: &str) -> Option<(f64, f64)> {
    let numbers: Vec<f64> = text.split_whitespace().map(|word| word.parse().ok()).collect::<Option<_>>()?;
    let (uptime, threads) = numbers.split_last()?;
    (!threads.is_empty()).then(|| (threads.iter().sum(), *uptime))
}

fn vhost(host: &mut Host) -> Result<(f64, f64), MeasureError> {
    let text = host.ask(VHOST)?;
    waited(&text).ok_or(MeasureError::Accounting(text))
}

/// Number of CPUs that a rival takes from all other work.
fn given_away(rival: &str) -> u8 {
    u8::from(rival == ISOLATED || rival == BUSYPOLL)
}

/// Kernel words of tuned's profile besides those of [`ontime_lab::Machine::isolated_cpus`]. The clients' CPU, which
/// comes after the isolated one, has them too: the kernel takes one list.
fn kernel_words(cpus: u8) -> Vec<String> {
    vec![format!("nohz_full={}-{cpus}", cpus.saturating_sub(1)), "nohz=on".to_owned(), "nosoftlockup".to_owned()]
}

/// A shell command that does what the profile does after boot, and places the vCPUs as a libvirt domain for it does
/// (`vcpupin`, `vcpusched`: FIFO 1). QEMU's other threads and vhost stay on the other CPUs, as the kernel places them.
fn isolate_cpu(cpu: u16) -> String {
    let others = (1_u32 << cpu) - 1;
    format!(
        "sysctl -qw kernel.sched_rt_runtime_us=-1 || exit; \
         for mask in /sys/devices/virtual/workqueue/cpumask /sys/devices/virtual/workqueue/*/cpumask; do \
         [ ! -e $mask ] || echo {others:x} > $mask || exit; done; \
         for task in /proc/[0-9]*; do read -r name < $task/comm || continue; case $name in ksoftirqd/*) level=2 ;; \
         ktimers/*) level=3 ;; rcuc/*|rcub/*) level=4 ;; *) continue ;; esac; chrt -f -p $level ${{task#/proc/}} || \
         exit; done; \
         for vm in rt rta1; do for task in /proc/$(cat /run/lab-vm/$vm.pid)/task/*; do read -r name < $task/comm; \
         [ \"$name\" != 'CPU 0/KVM' ] || {{ taskset -pc {cpu} ${{task##*/}} && chrt -f -p 1 ${{task##*/}}; }} || exit; \
         done; done"
    )
}

/// Sets the host up. The daemon runs on each, with nothing applied except where a method is.
fn set_up(host: &mut Host, rival: &str) -> Result<(), MeasureError> {
    let last = host.cpus.saturating_sub(1);
    let nics: String = server::CONFIG.iter().map(|(_, text)| *text).collect();
    match rival {
        ISOLATED => {
            host.shell(&isolate_cpu(last))?;
        }
        BUSYPOLL => {
            host.configure(&format!("without = {:?}\n{nics}poll_cpu = {last}\n", inversion::rules()))?;
            host.apply("busypoll")?;
        }
        "partitioned" => {
            // The daemon reads the rule of the VM that was booted after it, too.
            host.configure(&nics)?;
            host.apply("partitioned")?;
        }
        _ => {}
    }
    host.settle()
}

/// Runs cyclictest in the guest, beside the bulk load.
fn cyclictest(host: &mut Host, guests: &Guests, seconds: u32, rival: &str) -> Result<Latencies, MeasureError> {
    let flood = trial::flood(LOAD, &host.bulk(), host)?;
    let ran = guest_cyclictest::in_guest(host, guests, seconds, rival);
    if let Some(flood) = flood {
        flood.stop(host)?;
    }
    ran
}

fn measure_rival(
    args: &Options,
    rival: &'static str,
    site: &Site,
    images: &Images,
) -> Result<MethodResult, MeasureError> {
    let mut site = Site { dir: site.dir.join(rival), ..site.clone() };
    if rival == ISOLATED {
        site.machine.isolated_cpus = 1;
        site.machine.kernel_arguments = kernel_words(site.machine.cpus);
    }
    let files = site.dir.join("files");
    guest_cyclictest::bring(&args.cyclictest, &files)?;
    SERVERS.bring_with(&files, &[("role-subscriber.pl", SUBSCRIBER)])?;
    let mut host = Host::start(&site, images, &BULK_VMS, &server::CONFIG)?;
    boot_vm(host.lab()?, &Vm { role: SERVERS.name, ..RT_VM })?;
    let guests = Guests::boot(&mut host, 1, DECLARED_US)?;
    progress(format_args!("{rival}: setting up"));
    set_up(&mut host, rival)?;
    let requests = Trial {
        method: rival,
        label: RIVALS.description(rival),
        load: LOAD,
        requests: Requests::Client { workload: SOCKPERF, count: args.requests + WARM_UP, seed: args.seed },
        warmup: WARM_UP,
    };
    let before = vhost(&mut host)?;
    let mut result = requests.run(&mut host)?;
    let after = vhost(&mut host)?;
    let (workload, count) = (Workload::SampledValues, args.frames + WARM_UP);
    let name = format!("{rival}-frames");
    let frames = Trial { method: &name, requests: Requests::Client { workload, count, seed: args.seed }, ..requests };
    let frames = frames.run(&mut host)?;
    progress(format_args!("{rival}: cyclictest"));
    let guest = cyclictest(&mut host, &guests, args.seconds, rival)?;
    let late = frames
        .number(LATE)
        .ok_or_else(|| MeasureError::Program { program: name.clone(), said: format!("no figure {LATE}") })?;
    let elapsed_ns = (after.1 - before.1).max(1e-9) * 1e9;
    result.metrics.extend(guest.metrics());
    result.metrics.extend([
        Metric::count("frames", frames.count + frames.lost),
        Metric::number(LATE_FRAMES, Unit::Count, late + frames.lost as f64),
        Metric::number("given-away", Unit::Cpus, f64::from(given_away(rival))),
        Metric::number(VHOST_WAITED, Unit::Share, (after.0 - before.0).max(0.0) / elapsed_ns),
    ]);
    result.notes.extend(guest.note());
    Ok(result)
}

/// Measures every rival on a host of its own. The remaining rivals are measured if one fails.
fn measure(args: &Options, site: &Site, images: &Images) -> CaseResults {
    let mut found = CaseResults::default();
    for rival in RIVALS.in_order(&args.rivals) {
        match measure_rival(args, rival, site, images) {
            Ok(result) => found.results.push(result),
            Err(error) => {
                // The error message may name the console log.
                isolate::keep(&site.dir);
                found.lacks(rival, error);
            }
        }
    }
    found
}

#[derive(Debug, Clone, clap::Args)]
struct Options {
    /// Rivals: stock, isolated (tuned's realtime-virtual-host), busypoll (the kernel's), partitioned; default: all
    #[arg(long = "rival", value_name = "RIVAL", value_delimiter = ',')]
    rivals: Vec<String>,
    /// Counted requests to the RT server
    #[arg(long, default_value_t = 1_000, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    requests: u64,
    /// Counted frames of Sampled Values: 4,000 are a second of the host's time
    #[arg(long, default_value_t = 4_000, value_parser = clap::value_parser!(u64).range(1..=10_000_000))]
    frames: u64,
    /// Seconds of cyclictest in the host's time
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=600))]
    seconds: u32,
    /// Seed of the gaps between requests
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// The program cyclictest (Debian: rt-tests), which is copied into the guest
    #[arg(long, value_name = "FILE", default_value = guest_cyclictest::PROGRAM)]
    cyclictest: PathBuf,
    #[command(flatten)]
    emulated: Emulated,
    #[command(flatten)]
    output: Output,
}

impl Options {
    /// The options with everything that this experiment always has. Refuses what it cannot have.
    fn checked(&self) -> anyhow::Result<Self> {
        let rivals = chosen("rival", &self.rivals, &RIVALS.names())?;
        guest_cyclictest::check(&self.cyclictest)?;
        let cpus = self.emulated.cpus.unwrap_or(2);
        let emulated = Emulated { cpus: Some(cpus), ..self.emulated.clone() };
        emulated.refuse_real_clock("duel")?;
        if cpus < 2 {
            usage!("isolated and busypoll keep a CPU for themselves, and all rivals have the same host: --cpus 2 to 7");
        }
        emulated.machine().check()?;
        Ok(Self { rivals, emulated, ..self.clone() })
    }
}

/// Measures every rival.
fn execute(args: &Options) -> anyhow::Result<ExitCode> {
    let args = &args.checked()?;
    let found = args.emulated.measure(false, |site, images| Ok(measure(args, &site, images)))?;
    Measured { experiment: "duel", seed: args.seed, found, notes: Vec::new() }.report(&args.output)
}

/// Rivals on the same host.
#[derive(Debug)]
pub(super) struct Duel;

impl Experiment for Duel {
    command!(
        "duel",
        "Other ways to protect an RT VM on the same host: tuned's isolated CPUs, the kernel's polling thread",
        Options,
        execute
    );

    fn cases(&self) -> Vec<(String, Load)> {
        RIVALS.under(&[LOAD])
    }

    fn columns(&self) -> &'static [Figure] {
        &[Figure::P50, P99, Max, Bulk]
    }

    fn meaning(&self) -> &'static str {
        "Response times of the RT server. guest: a cyclictest in a guest; late-frames: frames of Sampled Values that \
         came over 250 us late or never; given-away: CPUs that other work cannot use; vhost-waited: share of time that \
         the RT VM's vhost thread waited for a CPU."
    }

    fn goals(&self) -> Vec<GoalSpec> {
        vec![
            goal("p99", "partitioned: the RT server's p99 at most that of isolated")
                .of(P99, tcp("partitioned"), tcp(ISOLATED))
                .at_most(1.0),
            goal("max", "partitioned: the RT server's maximum at most that of isolated")
                .of(Max, tcp("partitioned"), tcp(ISOLATED))
                .at_most(1.0),
            goal("guest", "partitioned: cyclictest's maximum in the guest at most that of isolated")
                .of(Own(GUEST_MAX), tcp("partitioned"), tcp(ISOLATED))
                .at_most(1.0),
            goal("frames", "partitioned: no frame of Sampled Values late or lost")
                .only(Own(LATE_FRAMES), tcp("partitioned"))
                .at_most(0.0),
            goal("bulk", "partitioned: bulk throughput at least 0.95 of that of the stock host")
                .of(Bulk, tcp("partitioned"), tcp("stock"))
                .at_least(0.95),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::experiments::options_of;

    fn options(words: &[&str]) -> Result<Options, String> {
        // A file that is there, in place of cyclictest.
        let words = [&["--cyclictest", "/bin/sh"][..], words].concat();
        let options: Options = options_of(&words).map_err(|error| error.to_string())?;
        options.checked().map_err(|error| error.to_string())
    }

    #[test]
    fn every_rival_has_the_same_machine_of_two_cpus_and_the_clients() {
        let machine = options(&[]).unwrap().emulated.machine();
        assert_eq!((machine.cpus, machine.has_client_cpu(), machine.isolated_cpus), (2, true, 0));
        assert_eq!(kernel_words(machine.cpus)[0], "nohz_full=1-2");
        assert!(isolate_cpu(1).contains("echo 1 > $mask") && isolate_cpu(3).contains("echo 7 > $mask"));
        for (words, said) in [
            (vec!["--rival", "vanilla"], "not one of stock, isolated"),
            (vec!["--cpus", "1"], "--cpus 2 to 7"),
            (vec!["--cpus", "8"], "1 to 7 CPUs, beside that of clients inside"),
            (vec!["--clock", "real"], "leave out --clock real"),
            (vec!["--frames", "0"], "1..=10000000"),
        ] {
            let error = options(&words).unwrap_err();
            assert!(error.contains(said), "{words:?}: {error}");
        }
    }

    #[test]
    fn a_host_without_a_vhost_thread_has_no_waiting_time() {
        assert_eq!(waited("5000\n7000\n12.5\n"), Some((12_000.0, 12.5)));
        for text in ["12.5\n", "", "x\n12.5\n"] {
            assert_eq!(waited(text), None, "{text:?}");
        }
    }

    #[test]
    fn the_rules_of_ontime_are_switched_off_beside_the_kernels_polling() {
        let rules = inversion::rules();
        assert!(rules.len() > 10 && !rules.iter().any(|rule| rule == "busy-poll"), "{rules:?}");
        let text = format!("without = {rules:?}\n{}poll_cpu = 1\n", server::CONFIG[0].1);
        let mut config = ontime_hostnet::HostConfig::default();
        config.add(&ontime_tenants::config::Text::new("host.toml", text.as_str())).unwrap();
        assert_eq!((config.without.len(), config.nics["rt0"].poll_cpu), (rules.len(), Some(1)));
    }
}
