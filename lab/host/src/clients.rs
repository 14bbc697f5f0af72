//! What runs on the clients' CPU ([`crate::Clients::Inside`]).
//!
//! In: what [`READ`] prints in the emulated host before and after a stretch of time. Out: threads that ran on that CPU
//! and belong elsewhere, and the interrupts that clients and host took for each other. A thread counts if it last ran
//! there. A process that began and ended between the two readings is not seen.

use std::collections::BTreeMap;

/// A shell command for [`Reading::parse`].
pub const READ: &str = "cd /proc; grep -s . [0-9]*/task/[0-9]*/schedstat; \
    cat [0-9]*/task/[0-9]*/stat 2> /dev/null; cat interrupts";

/// Most interrupts of a stretch on the other side's CPU: a vector moves at its first interrupt, which still arrives on
/// the former CPU.
pub const ASTRAY: u64 = 6;

/// Beginnings of the names of the clients' processes, and of the kernel's threads of a CPU.
const AT_HOME: [&str; 15] = [
    "ontime-lab",
    "iperf3",
    "sipp",
    "lab-client",
    "cpuhp",
    "migration",
    "idle_inject",
    "ksoftirqd",
    "kworker",
    "irq/",
    "rcu",
    "ktimers",
    "irq_work",
    "backlog_napi",
    "napi",
];

/// The state at one moment.
#[derive(Debug, Default)]
pub struct Reading {
    /// Names of the threads on the clients' CPU that belong elsewhere, and how often they have run, by number.
    strangers: BTreeMap<u32, (String, u64)>,
    /// Interrupts of the host's NICs (`rt0`, `bulk0`) on the clients' CPU, and of the clients' (`rt`, `bulk`) on the
    /// host's.
    astray: u64,
}

impl Reading {
    /// `cpu`: the clients'.
    pub fn parse(text: &str, cpu: u16) -> Self {
        let (mut runs, mut reading) = (BTreeMap::new(), Self::default());
        for line in text.lines() {
            if let Some((thread, count)) = runs_of(line) {
                runs.insert(thread, count);
            } else if let Some((thread, name, at)) = thread_of(line) {
                if at == u32::from(cpu) && !AT_HOME.iter().any(|of| name.starts_with(of)) {
                    let count = runs.get(&thread).copied().unwrap_or(0);
                    reading.strangers.insert(thread, (name.to_owned(), count));
                }
            } else {
                reading.astray += astray(line, cpu.into()).unwrap_or(0);
            }
        }
        reading
    }

    /// What is wrong about the stretch between an earlier reading and this one.
    pub fn complaints(&self, before: &Self) -> Vec<String> {
        let ran = |(thread, (_, count)): &(&u32, &(String, u64))| {
            before.strangers.get(thread).is_none_or(|(_, earlier)| earlier < count)
        };
        let strangers: Vec<&str> = self.strangers.iter().filter(ran).map(|(_, (name, _))| name.as_str()).collect();
        let strangers = strangers.join(", ");
        let astray = self.astray.saturating_sub(before.astray);
        let ran = (!strangers.is_empty()).then(|| format!("on the clients' CPU ran, too: {strangers}"));
        let moved = (astray > ASTRAY).then(|| {
            format!(
                "{astray} interrupts of the clients' NICs and the host's were \
             on the other side's CPU, more than {ASTRAY}"
            )
        });
        ran.into_iter().chain(moved).collect()
    }
}

/// Thread and count of "PID/task/TID/schedstat:RUN WAIT COUNT".
fn runs_of(line: &str) -> Option<(u32, u64)> {
    let (path, numbers) = line.split_once("/schedstat:")?;
    Some((path.rsplit('/').next()?.parse().ok()?, numbers.split_whitespace().nth(2)?.parse().ok()?))
}

/// Thread, name and last CPU of a line of `/proc/PID/task/TID/stat`.
fn thread_of(line: &str) -> Option<(u32, &str, u32)> {
    let ((thread, name), rest) = line.rsplit_once(") ").and_then(|(of, rest)| Some((of.split_once(" (")?, rest)))?;
    Some((thread.parse().ok()?, name, rest.split_whitespace().nth(36)?.parse().ok()?))
}

/// Interrupts of a line of `/proc/interrupts` on the other side's CPU. The clients' CPU is the last one.
fn astray(line: &str, clients: usize) -> Option<u64> {
    let name = line.split_whitespace().next_back()?;
    let rest = name.strip_prefix("rt").or_else(|| name.strip_prefix("bulk"))?;
    let (is_hosts, rest) = rest.strip_prefix('0').map_or((false, rest), |rest| (true, rest));
    let counts = line.split_whitespace().skip(1).take(clients + 1).enumerate();
    let others = counts.filter(|(cpu, _)| is_hosts == (*cpu == clients));
    let sum = others.filter_map(|(_, count)| count.parse::<u64>().ok()).sum();
    (rest.is_empty() || rest.starts_with('-')).then_some(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(daemon_runs: u64, on: u32, interrupts: u64) -> Reading {
        let stat = |tid: u32, name: &str, cpu: u32| {
            let zeros = "0 ".repeat(35);
            format!("{tid} ({name}) S {zeros}{cpu} 0 0\n")
        };
        let text = format!(
            "1/task/1/schedstat:5 6 7\n30/task/31/schedstat:9 9 {daemon_runs}\n40/task/40/schedstat:9 9 {daemon_runs}\n\
             {}{}{}           CPU0       CPU1\n 24:      900          {interrupts}  PCI-MSIX-0000:00:02.0   0-edge   \
             rt0-rx-0\n 25:          1        800  PCI-MSIX-0000:00:03.0   0-edge      bulk\n 26:  5  5 x rtc0\n",
            stat(1, "init", 0),
            stat(31, "a (b) c", on),
            stat(40, "iperf3", 1),
        );
        Reading::parse(&text, 1)
    }

    #[test]
    fn what_ran_on_the_clients_cpu_in_the_stretch_is_told() {
        let before = reading(3, 1, 2);
        assert_eq!((before.strangers.len(), before.astray), (1, 3));
        assert!(reading(3, 1, 2).complaints(&before).is_empty());
        assert_eq!(reading(4, 1, 2).complaints(&before), ["on the clients' CPU ran, too: a (b) c"]);
        // It came there in the stretch; it is on another CPU.
        assert_eq!(reading(4, 1, 2).complaints(&reading(3, 0, 2)).len(), 1);
        assert!(reading(4, 0, 2).complaints(&before).is_empty());
        assert!(reading(3, 1, 2 + ASTRAY).complaints(&before).is_empty());
        assert!(reading(3, 1, 3 + ASTRAY).complaints(&before)[0].starts_with("7 interrupts of"));
    }
}
