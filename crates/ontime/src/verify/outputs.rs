//! Reads what the measuring programs write.
//!
//! In: the JSON of cyclictest and oslat (rt-tests), the text of `rtla timerlat hist`, the JSON of `ontime trace`. Out:
//! figures by CPU, and slow requests. An output that cannot be read is an error in words, never a figure.

use std::collections::BTreeMap;

use ontime_hostnet::{CpuSet, RuleId};
use serde::{Deserialize, Serialize};

/// The delays of a CPU, us.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(super) struct OfCpu {
    pub cpu: u32,
    /// How many were measured; none for oslat, which does not count.
    pub samples: Option<u64>,
    pub min_us: f64,
    /// Arithmetic mean.
    pub avg_us: f64,
    pub max_us: f64,
}

/// What a program of rt-tests, or rtla, wrote.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RtTests {
    /// The program's version.
    pub version: Option<String>,
    pub cpus: Vec<OfCpu>,
}

#[derive(Deserialize)]
struct Document {
    // Some versions write the key with a colon.
    #[serde(alias = "rt_test_version:")]
    rt_test_version: Option<String>,
    /// 1 if times are ns.
    #[serde(default)]
    resolution_in_ns: u32,
    thread: BTreeMap<String, Thread>,
}

#[derive(Deserialize)]
struct Thread {
    cpu: i64,
    cycles: Option<u64>,
    min: f64,
    avg: f64,
    max: f64,
}

/// Reads the JSON of cyclictest or oslat.
///
/// # Errors
/// Where it is not such a document, or a thread measured nothing.
pub(super) fn rt_tests(json: &[u8]) -> Result<RtTests, String> {
    let document: Document = serde_json::from_slice(json).map_err(|error| format!("no result in its JSON: {error}"))?;
    let unit = if document.resolution_in_ns == 1 { 1e3 } else { 1.0 };
    let mut cpus = Vec::new();
    for (number, thread) in &document.thread {
        // A thread that may run on every CPU has CPU -1.
        let cpu = u32::try_from(thread.cpu).ok().or_else(|| number.parse().ok());
        let cpu = cpu.ok_or_else(|| format!("its JSON names no CPU for thread {number}"))?;
        if thread.cycles == Some(0) {
            return Err(format!("its thread on CPU {cpu} measured nothing: it did not run"));
        }
        cpus.push(OfCpu {
            cpu,
            samples: thread.cycles,
            min_us: thread.min / unit,
            avg_us: thread.avg / unit,
            max_us: thread.max / unit,
        });
    }
    if cpus.is_empty() {
        return Err("its JSON has no thread".to_owned());
    }
    cpus.sort_by_key(|of| of.cpu);
    Ok(RtTests { version: document.rt_test_version, cpus })
}

/// Reads the latencies of timerlat's threads from the text of `rtla timerlat hist`.
///
/// The line `Index` names the columns (`IRQ-003`, `Thr-003`, in some versions `Usr-003`), the lines `count:`, `min:`,
/// `avg:` and `max:` have their summaries, `-` where there is none. The totals after `ALL:` are not read.
///
/// # Errors
/// Where a line is missing, or a thread measured nothing.
pub(super) fn timerlat(text: &str) -> Result<Vec<OfCpu>, String> {
    let words = |line: &str| line.split_ascii_whitespace().map(str::to_owned).collect::<Vec<_>>();
    let mut lines = text.lines().map(words).filter(|words| !words.is_empty());
    let first = |words: &[String], name: &str| words.first().is_some_and(|word| word == name);
    let head = lines.find(|words| first(words, "Index")).ok_or("its output has no line `Index`")?;
    let summaries: Vec<Vec<String>> = lines.take_while(|words| !first(words, "ALL:")).collect();
    let line = |name: &str| {
        let found = summaries.iter().find(|words| first(words, name));
        found.filter(|words| words.len() == head.len()).ok_or_else(|| {
            format!("its output has no line `{name}` with a value for each of {} columns", head.len().saturating_sub(1))
        })
    };
    let (counts, mins, avgs, maxes) = (line("count:")?, line("min:")?, line("avg:")?, line("max:")?);
    let mut cpus = Vec::new();
    for ((((column, count), min), avg), max) in head.iter().zip(counts).zip(mins).zip(avgs).zip(maxes) {
        let Some(cpu) = column.strip_prefix("Thr-") else { continue };
        let cpu: u32 = cpu.parse().map_err(|_| format!("its column `{column}` names no CPU"))?;
        let samples: u64 = count.parse().map_err(|_| format!("CPU {cpu}: `{count}` is no count"))?;
        if samples == 0 {
            return Err(format!("its thread on CPU {cpu} measured nothing: it did not run"));
        }
        let us = |word: &str| word.parse::<f64>().map_err(|_| format!("CPU {cpu}: `{word}` is no time"));
        cpus.push(OfCpu { cpu, samples: Some(samples), min_us: us(min)?, avg_us: us(avg)?, max_us: us(max)? });
    }
    if cpus.is_empty() {
        return Err("its output has no column of a thread: it measured nothing".to_owned());
    }
    Ok(cpus)
}

/// The word before the CPUs that are online in a guest.
pub(super) const ONLINE: &str = "online:";

/// Reads what a guest printed: the line [`ONLINE`] with its CPUs, the text of `rtla --help`, and that of
/// `rtla timerlat hist`.
///
/// # Errors
/// As [`timerlat`] and [`complete`]; or where the guest names no CPU.
pub(super) fn guests_timerlat(text: &str) -> Result<RtTests, String> {
    let online = text.lines().find_map(|line| CpuSet::from_list(line.strip_prefix(ONLINE)?.trim()).ok());
    let online = online.filter(|cpus| !cpus.is_empty()).ok_or("the guest did not say which of its CPUs are online")?;
    Ok(RtTests { version: rtla_version(text), cpus: complete(timerlat(text)?, &online)? })
}

/// The figures, if every asked CPU has some: rtla leaves out the columns of a CPU where it measured nothing.
///
/// # Errors
/// Names the CPUs without figures.
pub(super) fn complete(cpus: Vec<OfCpu>, asked: &CpuSet) -> Result<Vec<OfCpu>, String> {
    let left: CpuSet = asked.iter().filter(|cpu| !cpus.iter().any(|of| of.cpu == *cpu)).collect();
    if left.is_empty() {
        return Ok(cpus);
    }
    Err(format!("it measured nothing on CPUs {left}: its threads there did not run"))
}

/// What `ontime trace` reports.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Trace {
    /// One tenant's path each.
    pub paths: Vec<Path>,
    /// The slowest requests, the slowest first.
    pub worst: Vec<Slow>,
    /// Losses.
    pub tracing: Tracing,
}

/// Losses of the trace itself.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub(super) struct Tracing {
    /// Lost events, at least, by CPU.
    pub lost: BTreeMap<String, u64>,
}

/// A tenant's requests.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Path {
    pub tenant: String,
    /// Times from interrupt to NIC; none without requests.
    pub total: Option<Total>,
    /// The slowest of all.
    pub max_us: f64,
}

/// The distribution of a path's requests, us.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
pub(super) struct Total {
    /// Requests.
    pub count: u64,
    pub min: f64,
    /// Arithmetic mean.
    pub mean: f64,
}

/// A slow request, and why it was slow.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct Slow {
    pub tenant: String,
    /// From interrupt to NIC, us.
    pub total_us: f64,
    /// Its priority inversions in words.
    pub words: Vec<String>,
    /// The same.
    #[serde(default)]
    pub inversions: Vec<Inversion>,
    /// Steal time or SMIs at that time.
    pub hint: Option<String>,
}

/// A priority inversion of a request.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub(super) struct Inversion {
    /// Its duration.
    pub ns: u64,
    pub cure: Cure,
}

/// What to do about a cause.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Deserialize)]
pub(super) struct Cure {
    /// A rule of `ontime doctor`.
    pub rule: Option<RuleId>,
    /// Advice where there is no rule.
    pub text: String,
}

/// Reads the JSON of `ontime trace`.
///
/// # Errors
/// Where it is no such document.
pub(super) fn trace(json: &[u8]) -> Result<Trace, String> {
    serde_json::from_slice(json).map_err(|error| format!("no report in its JSON: {error}"))
}

/// The version that `rtla --help` prints.
pub(super) fn rtla_version(help: &str) -> Option<String> {
    let mut words = help.split_ascii_whitespace().skip_while(|word| *word != "version");
    words.nth(1).map(|word| word.trim_start_matches('v').to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CYCLICTEST: &str = include_str!("testdata/cyclictest.json");
    const OSLAT: &str = include_str!("testdata/oslat.json");
    const TIMERLAT: &str = include_str!("testdata/timerlat-hist.txt");

    #[test]
    fn cyclictest_is_read_by_cpu() {
        let read = rt_tests(CYCLICTEST.as_bytes()).unwrap();
        assert_eq!(read.version.as_deref(), Some("2.80"));
        assert_eq!(
            read.cpus,
            [
                OfCpu { cpu: 2, samples: Some(4998), min_us: 3.0, avg_us: 4.61, max_us: 38.0 },
                OfCpu { cpu: 10, samples: Some(4997), min_us: 2.0, avg_us: 5.02, max_us: 141.0 },
            ]
        );
        // Without the colon that some versions write into the key, in ns, and of a thread on any CPU.
        let other = CYCLICTEST.replace("rt_test_version\"", "rt_test_version:\"").replace("_in_ns\": 0", "_in_ns\": 1");
        let read = rt_tests(other.replace("\"cpu\": 10", "\"cpu\": -1").as_bytes()).unwrap();
        assert_eq!(read.version.as_deref(), Some("2.80"));
        assert_eq!(read.cpus.iter().map(|of| (of.cpu, of.max_us)).collect::<Vec<_>>(), [(0, 0.141), (2, 0.038)]);
    }

    /// As Debian 12's cyclictest wrote it: with a colon in the key, and an empty histogram.
    #[test]
    fn an_older_cyclictest_is_read() {
        let read = rt_tests(include_bytes!("testdata/cyclictest-2.40.json")).unwrap();
        assert_eq!(read.version.as_deref(), Some("2.40"));
        let of = |cpu, samples, min_us, avg_us, max_us| OfCpu { cpu, samples: Some(samples), min_us, avg_us, max_us };
        assert_eq!(read.cpus, [of(0, 998, 13.0, 32.18, 1587.0), of(1, 1000, 12.0, 23.86, 872.0)]);
    }

    #[test]
    fn oslat_is_read_by_cpu() {
        let read = rt_tests(OSLAT.as_bytes()).unwrap();
        let cpus: Vec<_> = read.cpus.iter().map(|of| (of.cpu, of.samples, of.min_us, of.max_us)).collect();
        assert_eq!(cpus, [(1, None, 1.0, 17.0), (3, None, 1.0, 23.0)]);
    }

    #[test]
    fn what_rt_tests_did_not_measure_is_no_figure() {
        for (json, want) in [
            (String::new(), "no result in its JSON"),
            (CYCLICTEST.replace("\"cycles\": 4998", "\"cycles\": 0"), "CPU 2 measured nothing"),
            // Without a sample, some versions write a mean that is not JSON.
            (CYCLICTEST.replace("\"avg\": 4.61", "\"avg\": -nan"), "no result in its JSON"),
            ("{\"file_version\": 1, \"thread\": {}}".to_owned(), "no thread"),
            (CYCLICTEST.chars().take(400).collect(), "no result in its JSON"),
        ] {
            let said = rt_tests(json.as_bytes()).unwrap_err();
            assert!(said.contains(want), "{said}");
        }
    }

    #[test]
    fn timerlat_is_read_with_and_without_user_threads() {
        let wanted = [
            OfCpu { cpu: 1, samples: Some(1000), min_us: 3.0, avg_us: 7.0, max_us: 21.0 },
            OfCpu { cpu: 12, samples: Some(999), min_us: 2.0, avg_us: 3.0, max_us: 311.0 },
        ];
        assert_eq!(timerlat(TIMERLAT).unwrap(), wanted);
        // As older versions write it: no column of user threads, no totals.
        let keep = |line: &str| {
            let words: Vec<&str> = line.split_ascii_whitespace().collect();
            let kept = words.iter().enumerate().filter(|(at, _)| *at == 0 || at % 3 != 0);
            kept.map(|(_, word)| (*word).to_owned()).collect::<Vec<_>>().join("  ")
        };
        let (before, _) = TIMERLAT.split_once("ALL:").unwrap();
        let comments_stay = |line: &str| if line.starts_with('#') { line.to_owned() } else { keep(line) };
        let old: String = before.lines().map(|line| comments_stay(line) + "\n").collect();
        assert!(old.contains("Index  IRQ-001  Thr-001  IRQ-012  Thr-012\n"), "{old}");
        assert_eq!(timerlat(&old).unwrap(), wanted);
    }

    #[test]
    fn a_cpu_without_a_column_is_missed() {
        let asked = |list| complete(timerlat(TIMERLAT).unwrap(), &CpuSet::from_list(list).unwrap());
        assert_eq!(asked("1,12"), timerlat(TIMERLAT));
        assert_eq!(
            asked("1,3,7-8,12").unwrap_err(),
            "it measured nothing on CPUs 3,7-8: its threads there did not run"
        );
    }

    #[test]
    fn a_cpu_of_a_guest_without_a_column_is_missed() {
        let read = |online: &str| guests_timerlat(&format!("Welcome\n{online}\nrtla version 6.12.57\n{TIMERLAT}"));
        let (version, cpus) = (Some("6.12.57".to_owned()), timerlat(TIMERLAT).unwrap());
        assert_eq!(read("online: 1,12"), Ok(RtTests { version, cpus }));
        assert_eq!(
            read("online: 1-3,12").unwrap_err(),
            "it measured nothing on CPUs 2-3: its threads there did not run"
        );
        for unknown in ["", "online: ", "online: all"] {
            assert!(read(unknown).unwrap_err().contains("did not say"), "{unknown}");
        }
    }

    #[test]
    fn a_cut_or_empty_output_of_timerlat_is_no_figure() {
        for (text, want) in [
            (String::new(), "no line `Index`"),
            ("Failed to set thread priority\n".to_owned(), "no line `Index`"),
            (TIMERLAT.split_once("max:").unwrap().0.to_owned(), "no line `max:`"),
            (TIMERLAT.replace("count:     1000      1000", "count:     1000         0"), "CPU 1 measured nothing"),
            ("Index\nover:\ncount:\nmin:\navg:\nmax:\nALL:  IRQ Thr\n".to_owned(), "no column of a thread"),
            (TIMERLAT.replace("max:          7        21        24", "max:          7        21"), "no line `max:`"),
        ] {
            let said = timerlat(&text).unwrap_err();
            assert!(said.contains(want), "{said}");
        }
    }

    #[test]
    fn the_report_of_a_trace_is_read() {
        let json = r#"{"schema_version": 1, "kernel": "6.12", "paths": [
            {"tenant": "plc", "class": "rt0", "max_us": 301.5,
             "total": {"count": 9, "min": 1.0, "mean": 2.0, "p50": 2.0, "p95": 3, "p99": 3, "p99_9": 3, "max": 301.5}},
            {"tenant": "idle", "class": "rt1", "max_us": 0.0, "total": null}],
            "worst": [{"tenant": "plc", "total_us": 301.5, "words": ["thread a waited behind b"], "hint": null}],
            "tracing": {"events": {"irq": 9}, "undecoded": 0, "lost": {"3": 12, "10": 1}, "probe_ns": null}}"#;
        let read = trace(json.as_bytes()).unwrap();
        assert_eq!(read.paths.len(), 2);
        assert_eq!((read.paths[0].total.unwrap().count, read.paths[1].total), (9, None));
        assert_eq!(read.worst[0].words, ["thread a waited behind b"]);
        assert_eq!(read.tracing.lost.values().sum::<u64>(), 13);
        assert!(trace(b"{}").is_err());
    }

    #[test]
    fn the_version_of_rtla_is_found_in_its_help() {
        let help = "\nrtla version 6.12.57\n\n  usage: rtla COMMAND ...\n\n  commands:\n     osnoise  - gives...\n";
        assert_eq!(rtla_version(help).as_deref(), Some("6.12.57"));
        assert_eq!(rtla_version("usage: rtla\n"), None);
    }
}
