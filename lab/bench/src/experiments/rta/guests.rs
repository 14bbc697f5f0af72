//! VMs that run rt-app on orders from their console (`ontime_lab::role::RTA`): boots them, sends orders, reads the
//! logs.
//!
//! In: applications and the release times of their jobs. Out: the response time of each job, from rt-app's own log on
//! its guest's clock. The bandwidth that the guests request and the daemon reserves is read from `ontime top`.

use std::fmt::Write as _;

use ontime_lab::images::Images;
use ontime_lab::module::GUEST;
use ontime_lab::role::RTA;
use serde::Deserialize;

use super::Rta;
use crate::error::MeasureError;
use crate::host::{Host, Site, Vm, boot_vm};
use crate::progress::progress;

/// The part of an application's slice that a job computes, percent. The rest is for its system calls and for ticks of
/// the guest's kernel, which count as its run time too.
pub(crate) const WORK_PERCENT: u64 = 80;
/// Declared bandwidth of each of a few VMs, for its guest's kernel and for slack: us per [`DECLARED_PERIOD_US`].
pub(crate) const DECLARED_US: u64 = 1_000;
pub(crate) const DECLARED_PERIOD_US: u64 = 20_000;
/// Share of its vCPU that a guest may request for its deadline tasks, in addition to the declared bandwidth.
const DEADLINES: f64 = 0.9;
/// Waiting for an application's end: `LOOKS` checks, 0.5 s apart, per command in the host, and `ROUNDS` commands.
const LOOKS: u32 = 10;
const ROUNDS: u32 = 80;
/// Host threads that always use the CPU.
pub(crate) const BULK_THREADS: usize = 4;

/// Release times of an application's jobs, on its guest's clock.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Releases {
    /// One job per period; the number of jobs.
    Periodic(u64),
    /// Times between releases, us; none is shorter than the period.
    Sporadic(Vec<u64>),
}

impl Releases {
    /// Number of jobs.
    fn jobs(&self) -> u64 {
        match self {
            Releases::Periodic(jobs) => *jobs,
            Releases::Sporadic(gaps) => gaps.len() as u64,
        }
    }
}

/// A run of an application.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Order {
    /// A unique name, which marks the run's lines in the console log.
    pub tag: String,
    /// The bandwidth that it requests, at SCHED_DEADLINE.
    pub rta: Rta,
    /// Release times of its jobs.
    pub releases: Releases,
    /// From its start to its first release, us.
    pub delay_us: u64,
    /// The part of its slice that a job computes, percent.
    pub work_percent: u64,
}

impl Order {
    /// The order as a line for the guest's init, which does not wait for the application.
    pub(crate) fn line(&self) -> String {
        format!("rta {}", self.description())
    }

    /// As [`Self::line`], but init waits until the application has ended.
    pub(crate) fn line_in_turn(&self) -> String {
        format!("run {}", self.description())
    }

    fn description(&self) -> String {
        let Rta { slice_us: slice, period_us: period } = self.rta;
        let (work, jobs) = (slice * self.work_percent / 100, self.releases.jobs());
        let mut line = format!("{} SCHED_DEADLINE {slice} {period} {work} {jobs} {}", self.tag, self.delay_us);
        if let Releases::Sporadic(gaps) = &self.releases {
            for gap in gaps {
                let _ = write!(line, " {gap}");
            }
        }
        line
    }
}

#[derive(Debug)]
pub(crate) struct Guests {
    names: Vec<String>,
    /// Declared bandwidth per VM, for the guest's kernel and slack: us per [`DECLARED_PERIOD_US`].
    declared_us: u64,
    module: bool,
}

impl Guests {
    /// Puts the role and the guest module into a host's files, before the host boots.
    pub(crate) fn bring(site: &Site, images: &Images) -> Result<(), MeasureError> {
        let module = GUEST.ready(&images.guest_version()?, &mut |line| progress(line))?;
        Ok(RTA.bring_with_module(&site.dir.join("files"), &module)?)
    }

    /// The VMs' rules for `tenants.toml`: all are RT.
    fn tenants(&self) -> String {
        self.names.iter().map(|vm| format!("[[tenant]]\nname = \"{vm}\"\nclass = \"rt\"\n")).collect()
    }

    /// The VMs' reservations for `sched.toml`: the declared bandwidth, and permission for guests to request more.
    pub(crate) fn reservations(&self) -> String {
        let period = DECLARED_PERIOD_US / 1_000;
        let one = |vm: &String| {
            format!(
                "[[reservation]]\nname = \"{vm}\"\nbudget = \"{}us\"\nperiod = \"{period}ms\"\ndeadlines = \
                 {DEADLINES}\n",
                self.declared_us
            )
        };
        self.names.iter().map(one).collect()
    }

    /// Boots `count` VMs with `declared_us` per `DECLARED_PERIOD_US` each, and adds their rules to `tenants.toml`. The
    /// settings of the daemon are reset first (`ontime reset`) and stay so until a method is applied.
    pub(crate) fn boot(host: &mut Host, count: usize, declared_us: u64) -> Result<Self, MeasureError> {
        let names = (1..=count).map(|number| format!("rta{number}")).collect();
        let guests = Self { names, declared_us, module: false };
        let tables: String = guests.names.iter().map(|vm| format!("[vm.{vm}]\ndeadlines = true\n")).collect();
        host.shell(&format!(
            "ontime reset > /dev/null; printf '%s' '{tables}' > /etc/ontime/sockets.toml; printf '%s' '{}' >> \
             /etc/ontime/tenants.toml",
            guests.tenants()
        ))?;
        for name in &guests.names {
            boot_vm(host.lab()?, &Vm { name, role: RTA.name, net: "none", address: "none" })?;
        }
        Ok(guests)
    }

    /// Names of the VMs.
    pub(crate) fn names(&self) -> &[String] {
        &self.names
    }

    /// Declared bandwidth of each VM, CPUs.
    pub(crate) fn declared_cpus(&self) -> f64 {
        self.declared_us as f64 / DECLARED_PERIOD_US as f64
    }

    /// Loads the guest module, through which the guests request bandwidth from the host. It cannot be undone.
    pub(crate) fn load_module(&mut self, host: &mut Host) -> Result<(), MeasureError> {
        if !self.module {
            for vm in &self.names {
                host.shell(&format!("lab-vm tell {vm} 'insmod /dev/role-ontime.ko steer=none'"))?;
            }
            self.module = true;
        }
        Ok(())
    }

    /// Gives all vCPUs the same FIFO priority.
    pub(crate) fn make_fifo(&self, host: &mut Host) -> Result<(), MeasureError> {
        host.shell(&self.each_vcpu("chrt --fifo --pid 47 ${task##*/}")).map(|_| ())
    }

    /// A shell command that does this for each vCPU, with `$task` as its directory in `/proc`.
    fn each_vcpu(&self, command: &str) -> String {
        format!(
            "for vm in {}; do for task in /proc/$(cat /run/lab-vm/$vm.pid)/task/*; do read -r name < $task/comm; case \
             $name in CPU*KVM) {command} ;; esac; done; done",
            self.names.join(" ")
        )
    }

    /// The CPU time so far of the vCPUs and of the bulk threads, which run.
    pub(crate) fn spent(&self, host: &mut Host) -> Result<CpuUse, MeasureError> {
        let add = "read -r ran rest < $task/schedstat; vcpus=$((vcpus + ran))";
        let said = host.shell(&format!(
            "vcpus=0; bulk=0; {}; for pid in $(cat /run/hogs); do read -r ran rest < /proc/$pid/schedstat; \
             bulk=$((bulk + ran)); done; read -r up rest < /proc/uptime; echo $vcpus $bulk $up",
            self.each_vcpu(add)
        ))?;
        CpuUse::parse(&said).ok_or(MeasureError::Accounting(said))
    }

    /// Sends one line to each VM's init, to all VMs at the same time.
    pub(crate) fn send_lines(&self, host: &mut Host, lines: &[String]) -> Result<(), MeasureError> {
        let all: String =
            self.names.iter().zip(lines).map(|(vm, line)| format!("lab-vm tell {vm} '{line}' & ")).collect();
        host.shell(&format!("{all} wait")).map(|_| ())
    }

    /// Waits for an application's end and reads its log.
    pub(crate) fn log(&self, host: &mut Host, vm: usize, tag: &str, rta: Rta) -> Result<Log, MeasureError> {
        let text = self.wait_line(host, vm, tag)?;
        let mut log = Log::parse(&text, rta.period_us)
            .ok_or_else(|| MeasureError::Program { program: format!("rt-app as {tag}"), said: text })?;
        let name = self.names.get(vm).map_or("", String::as_str);
        let late = host.shell(&format!("lab-vm log {name} | tr -d '\\r' | sed -n 's/^RTA-LATE {tag} //p'"))?;
        log.late = late.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        Ok(log)
    }

    /// Waits for the line that a guest prints at the end of run `tag`.
    pub(crate) fn wait_line(&self, host: &mut Host, vm: usize, tag: &str) -> Result<String, MeasureError> {
        let vm = self.names.get(vm).map_or("", String::as_str);
        let said = format!("lab-vm log {vm} | tr -d '\\r' | sed -n 's/^RTA {tag} \\(.*\\) end$/\\1/p'");
        let wait = format!("for look in $(seq {LOOKS}); do [ -z \"$({said})\" ] || break; sleep 0.5; done; {said}");
        for _ in 0..ROUNDS {
            let text = host.shell(&wait)?;
            if !text.trim().is_empty() {
                return Ok(text);
            }
        }
        Err(MeasureError::Program { program: format!("{tag} in {vm}"), said: "it does not end".to_owned() })
    }
}

/// CPU time of vCPUs and of bulk threads, and the host's uptime, s.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct CpuUse {
    vcpus: f64,
    bulk: f64,
    uptime: f64,
}

impl CpuUse {
    /// Parses nanoseconds of the vCPUs and of bulk, and seconds of uptime.
    fn parse(text: &str) -> Option<Self> {
        let mut words = text.split_whitespace().map(|word| word.parse::<f64>().ok());
        let (vcpus, bulk, uptime) = (words.next()??, words.next()??, words.next()??);
        Some(Self { vcpus: vcpus / 1e9, bulk: bulk / 1e9, uptime })
    }

    /// What each job of VMs took since an earlier reading, us: of the CPU, which bulk would have had otherwise; and of
    /// that, its vCPU. So many jobs came in a second. None if no time has passed.
    pub(crate) fn a_job_since(&self, before: &Self, jobs_a_second: f64, cpus: u16) -> Option<(f64, f64)> {
        let elapsed = self.uptime - before.uptime;
        let jobs = elapsed * jobs_a_second;
        let taken = elapsed * f64::from(cpus) - (self.bulk - before.bulk);
        (jobs > 0.0).then(|| (taken / jobs * 1e6, (self.vcpus - before.vcpus) / jobs * 1e6))
    }
}

/// Waits until the daemon has reservations for `vcpus` vCPUs, and until guest modules have found their devices.
pub(crate) fn wait_for_reservations(host: &mut Host, vcpus: usize) -> Result<(), MeasureError> {
    let held = format!("[ \"$(ontime top --once --json --interval 0.1 | grep -o '\"tid\":' | wc -l)\" -ge {vcpus} ]");
    host.shell(&format!("for try in $(seq 100); do {held} && break; sleep 0.3; done; {held}; sleep 5")).map(|_| ())
}

/// Starts the host threads that always use the CPU, or ends them.
pub(crate) fn bulk_threads(host: &mut Host, run: bool) -> Result<(), MeasureError> {
    let command = if run {
        format!(
            "rm -f /run/hogs; for n in $(seq {BULK_THREADS}); do \
             {{ sh -c 'while :; do :; done' & echo $! >> /run/hogs; }}; done > /dev/null 2>&1 < /dev/null"
        )
    } else {
        "[ ! -e /run/hogs ] || { kill $(cat /run/hogs); rm /run/hogs; }".to_owned()
    };
    host.shell(&command).map(|_| ())
}

/// The reservations in `ontime top --json` (docs/reference/openapi.json).
#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct Reservations {
    /// vCPUs with a reservation.
    pub vcpus: Vec<Vcpu>,
}

/// A vCPU with a reservation.
#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct Vcpu {
    /// Name of the VM.
    pub vm: String,
    /// Reserved bandwidth, CPUs.
    pub bandwidth: f64,
    /// The part that the guest's deadline tasks have requested.
    pub guest: Option<serde_json::Value>,
}

#[derive(Deserialize)]
struct Look {
    reservations: Reservations,
}

impl Reservations {
    /// Reads them from the daemon.
    pub(crate) fn look(host: &mut Host) -> Result<Self, MeasureError> {
        let text = host.shell("ontime top --once --json --interval 0.1")?;
        Self::parse(&text).ok_or(MeasureError::Accounting(text))
    }

    fn parse(text: &str) -> Option<Self> {
        serde_json::from_str(text).ok().map(|look: Look| look.reservations)
    }

    /// Bandwidth of these VMs above the declared one, CPUs.
    pub(crate) fn beyond_declared(&self, guests: &Guests) -> f64 {
        let of = self.vcpus.iter().filter(|vcpu| guests.names.contains(&vcpu.vm));
        of.map(|vcpu| (vcpu.bandwidth - guests.declared_cpus()).max(0.0)).sum()
    }

    /// Number of vCPUs that have bandwidth for their guests' tasks.
    pub(crate) fn asking(&self) -> usize {
        self.vcpus.iter().filter(|vcpu| vcpu.guest.is_some()).count()
    }

    /// Waits, at most `tries` times 0.4 s, until `asking` vCPUs have such bandwidth. Returns the last reading.
    pub(crate) fn wait(host: &mut Host, asking: usize, tries: u64) -> Result<Self, MeasureError> {
        for _ in 0..tries {
            let now = Self::look(host)?;
            if now.asking() >= asking {
                return Ok(now);
            }
            host.shell("sleep 0.3")?;
        }
        Self::look(host)
    }
}

/// An application's log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Log {
    /// rt-app's exit status; not 0 if its bandwidth was refused.
    pub status: i32,
    /// Time from release to end of each job, us. A time above the period is a deadline miss.
    pub response_us: Vec<u64>,
    /// rt-app's own lines on the first late jobs: number and measurements (docs/results/bench/rta.md).
    pub late: Vec<String>,
}

impl Log {
    /// Parses `STATUS SLACK...`. Slack is the time left of the period, us.
    fn parse(text: &str, period_us: u64) -> Option<Self> {
        let mut words = text.split_whitespace().map(str::parse::<i64>);
        let status = i32::try_from(words.next()?.ok()?).ok()?;
        let period = i64::try_from(period_us).ok()?;
        let response = |slack: Result<i64, _>| Some(u64::try_from(period.checked_sub(slack.ok()?)?).unwrap_or(0));
        Some(Self { status, response_us: words.map(response).collect::<Option<_>>()?, late: Vec::new() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RTA: Rta = Rta { slice_us: 5_000, period_us: 20_000 };

    #[test]
    fn a_log_is_read_by_its_slack() {
        let log = Log::parse("0 5000 -1 19999\n", 20_000).unwrap();
        assert_eq!(log, Log { status: 0, response_us: vec![15_000, 20_001, 1], late: Vec::new() });
        assert_eq!(Log::parse("1", 20_000).unwrap().response_us, Vec::<u64>::new());
        for bad in ["", "x", "0 5 y"] {
            assert_eq!(Log::parse(bad, 20_000), None, "{bad:?}");
        }
    }

    #[test]
    fn an_order_tells_every_release() {
        let order = |releases| Order { tag: "a".into(), rta: RTA, releases, delay_us: 7, work_percent: WORK_PERCENT };
        assert_eq!(order(Releases::Periodic(3)).line(), "rta a SCHED_DEADLINE 5000 20000 4000 3 7");
        let sporadic = order(Releases::Sporadic(vec![100_000, 20_000])).line();
        assert_eq!(order(Releases::Periodic(3)).line_in_turn(), "run a SCHED_DEADLINE 5000 20000 4000 3 7");
        assert_eq!(sporadic, "rta a SCHED_DEADLINE 5000 20000 4000 2 7 100000 20000");
    }

    #[test]
    fn what_bulk_does_not_get_is_divided_among_jobs() {
        let before = CpuUse::parse("1000000000 2000000000 100.0").unwrap();
        let after = CpuUse::parse("1400000000 6500000000 105.0\n").unwrap();
        // 0.5 s of 5 s, 0.4 s of them the vCPUs'; 1,000 jobs.
        let (taken, vcpus) = after.a_job_since(&before, 200.0, 1).unwrap();
        assert!((taken - 500.0).abs() < 1e-6 && (vcpus - 400.0).abs() < 1e-6, "{taken} {vcpus}");
        assert!(before.a_job_since(&before, 200.0, 1).is_none());
        for bad in ["", "1 2", "a b c"] {
            assert_eq!(CpuUse::parse(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn what_is_declared_is_not_counted_as_reserved_for_applications() {
        let text = r#"{"seconds":0.1,"reservations":{"backend":"paced","vcpus":[
            {"vm":"a","bandwidth":0.35,"guest":{"budget_us":1.0}},
                      {"vm":"b","bandwidth":0.05,"guest":null},{"vm":"rt","bandwidth":0.4}],"refused":[]}}"#;
        let look = Reservations::parse(text).unwrap();
        let guests = Guests { names: vec!["a".to_owned(), "b".to_owned()], declared_us: DECLARED_US, module: false };
        assert!((look.beyond_declared(&guests) - 0.3).abs() < 1e-9);
        assert_eq!(look.asking(), 1);
        assert!(Reservations::parse("no daemon").is_none());
    }
}
