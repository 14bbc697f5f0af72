//! From captures to the page: everything in a report comes from the analysis, and every format shows it.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test fails by panic")]

mod common;

use common::{Capture, Format, T0, Tcp, US};
use ontime_bench::bulk::{self, BulkAnalysis, BulkFlows};
use ontime_bench::experiments;
use ontime_bench::goals;
use ontime_bench::paper::Figures;
use ontime_bench::report;
use ontime_bench::schema::{
    Clock, JOBS, LATE, LATE_OVER, Load, MISSED, MethodResult, Metric, REFUSED, Report, Run, SCHEMA_VERSION,
    SchemaError, Unit, json_schema,
};
use ontime_bench::wire::{self, RtFlow, WireAnalysis};
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// A synthetic server: most replies within `usual` us, and one in `rare` takes up to `slow` us more.
#[derive(Clone, Copy)]
struct Server {
    usual: (u64, u64),
    slow: u64,
    rare: u64,
}

fn rt_capture(server: Server, requests: u64, lost: u64) -> WireAnalysis {
    let mut random = ChaCha8Rng::seed_from_u64(7);
    let mut capture = Capture::new(Format::default());
    let mut at_us = 0;
    for n in 1..=requests + lost {
        at_us += random.random_range(1_000..=10_000);
        capture.request(T0 + at_us * US, n);
        if n % (requests / (lost + 1) + 2) == 0 && lost > 0 {
            continue;
        }
        at_us += random.random_range(server.usual.0..=server.usual.1);
        if random.random_range(0..server.rare) == 0 {
            at_us += random.random_range(0..=server.slow);
        }
        capture.reply(T0 + at_us * US, n);
    }
    wire::analyse(capture.file().path(), RtFlow::new(11_111)).unwrap()
}

fn bulk_capture(bytes: u32) -> BulkAnalysis {
    let mut capture = Capture::new(Format::default());
    for (step, vm) in [(0, "10.2.0.11:5201"), (1, "10.2.0.11:5201"), (0, "10.2.0.12:5201"), (1, "10.2.0.12:5201")] {
        let acknowledged = Some(1_000 + step * bytes);
        capture.tcp(T0 + u64::from(step) * 1_000_000 * US, vm, "10.2.0.1:4000", Tcp { acknowledged, ..Tcp::default() });
    }
    let window = Some((T0, T0 + 1_000_000 * US));
    bulk::analyse(capture.file().path(), BulkFlows { ports: vec![5_201], window }).unwrap()
}

const VANILLA: Server = Server { usual: (120, 1_500), slow: 5_000, rare: 20 };
const PARTITIONED: Server = Server { usual: (39, 70), slow: 50, rare: 50 };

#[allow(clippy::too_many_arguments, reason = "a table of runs reads best")]
fn result(
    method: &str,
    label: &str,
    kernel: &str,
    clock: Clock,
    load: Load,
    server: Server,
    requests: u64,
    bulk: u32,
) -> MethodResult {
    let wire = rt_capture(server, requests, u64::from(method == "rt-default") * 3);
    let bulk = bulk_capture(bulk);
    let (bulk, cpu_share) = ((load == Load::Tcp).then_some(&bulk), Some(if load.floods() { 0.97 } else { 0.04 }));
    let cpus = if clock == Clock::Real { 2 } else { 1 };
    MethodResult::new(&Run { method, label, kernel, clock, cpus, load, wire: &wire, bulk, cpu_share, late_ns: None })
}

fn a_report(requests: u64) -> Report {
    let (v, rt) = ("7.2.12-amd64", "7.2.12-rt-amd64");
    let rt_default = Server { usual: (300, 2_500), slow: 7_000, rare: 30 };
    let threaded = Server { usual: (100, 700), slow: 1_000, rare: 60 };
    let calm = Server { usual: (38, 62), slow: 70, rare: 60 };
    let old = Server { usual: (200, 600), slow: 9_000, rare: 40 };
    let old_vanilla = Server { usual: (150, 1_900), slow: 9_000, rare: 25 };
    let results = vec![
        result("vanilla", "Vanilla Linux", v, Clock::Virtual, Load::Tcp, VANILLA, requests, 6_000_000),
        result("rt-default", "RT kernel, defaults", rt, Clock::Virtual, Load::Tcp, rt_default, requests, 5_100_000),
        result("threaded", "Threaded interrupts", rt, Clock::Virtual, Load::Tcp, threaded, requests, 5_300_000),
        result("partitioned", "Partitioned", rt, Clock::Virtual, Load::Tcp, PARTITIONED, requests, 5_900_000),
        result("partitioned", "Partitioned", rt, Clock::Virtual, Load::None, calm, requests, 0),
        result("vanilla", "Vanilla Linux", "6.12.9-amd64", Clock::Virtual, Load::Tcp, old_vanilla, requests, 6_000_000),
        result("partitioned", "Partitioned", "6.12.9-rt-amd64", Clock::Virtual, Load::Tcp, old, requests, 4_000_000),
        result("vanilla", "Vanilla Linux", v, Clock::Real, Load::Tcp, VANILLA, requests / 10, 6_000_000),
        result("exclusive", "Exclusive CPU", rt, Clock::Real, Load::Tcp, threaded, requests / 10, 3_100_000),
    ];
    let goals = goals::evaluate(&experiments::goals_of("rt-server"), &results, Clock::Virtual, rt);
    Report {
        schema_version: SCHEMA_VERSION,
        experiment: "rt-server".to_string(),
        clock: Clock::Virtual,
        kernel: rt.to_string(),
        seed: 42,
        command: "ontime-lab bench rt-server --method vanilla,threaded,partitioned --seed 42 --requests 20000"
            .to_string(),
        created: "2026-11-20T10:00:00Z".to_string(),
        machine: "emulated host (QEMU 7.2, 1 CPU) on 2 x <Xeon> & friends".to_string(),
        results,
        paper: experiments::find("rt-server").unwrap().paper(&Figures::load().unwrap()),
        goals,
        notes: vec!["`exclusive` needs two CPUs: indicative only.".to_string()],
    }
}

#[test]
fn the_committed_schema_is_that_of_the_types() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/results/bench.schema.json");
    let generated = serde_json::to_string_pretty(&json_schema()).unwrap() + "\n";
    if std::env::var_os("ONTIME_BLESS").is_some() {
        std::fs::write(path, &generated).unwrap();
    }
    let committed = std::fs::read_to_string(path).unwrap();
    assert!(
        committed == generated,
        "docs/results/bench.schema.json is not that of src/schema; if the change is meant, raise SCHEMA_VERSION and \
         run this test with ONTIME_BLESS=1"
    );
}

#[test]
fn json_goes_round_and_other_versions_are_refused_clearly() {
    let report = a_report(200);
    let json = report.to_json().unwrap();
    assert!(Report::from_json(&json).unwrap() == report);

    let version = |number: u32| {
        json.replacen(&format!("\"schema_version\": {SCHEMA_VERSION}"), &format!("\"schema_version\": {number}"), 1)
    };
    let error = Report::from_json(&version(SCHEMA_VERSION + 1)).unwrap_err().to_string();
    assert!(error.contains(&format!("version {}", SCHEMA_VERSION + 1)) && error.contains("newer Ontime"), "{error}");
    assert!(Report::from_json(&version(0)).unwrap_err().to_string().contains("run the experiment again"));
    assert!(matches!(Report::from_json("{}"), Err(SchemaError::NoVersion)));
    assert!(matches!(Report::from_json("[1"), Err(SchemaError::Invalid(_))));
    let unknown = json.replacen("\"seed\"", "\"sead\"", 1);
    assert!(Report::from_json(&unknown).unwrap_err().to_string().contains("sead"));
}

#[test]
fn a_figure_that_is_no_number_is_never_written() {
    let mut report = a_report(200);
    report.results[0].bulk_gbps = Some(f64::NAN);
    // JSON has no NaN: it would be read back as "not measured", which is wrong.
    assert!(matches!(report.to_json(), Err(SchemaError::NotANumber)));
    report.results[0].bulk_gbps = None;
    assert!(report.to_json().is_ok());
    report.results[0].metrics = vec![Metric::number("cost", Unit::NsPerByte, f64::NAN)];
    assert!(matches!(report.to_json(), Err(SchemaError::NotANumber)));
    report.results[0].metrics.clear();
    report.results[0].duration_s = f64::INFINITY;
    assert!(matches!(report.to_json(), Err(SchemaError::NotANumber)));
}

#[test]
fn a_result_is_the_captures_own() {
    let result = result("vanilla", "V", "7.2.1", Clock::Virtual, Load::Tcp, VANILLA, 500, 1_000_000);
    let latency = result.latency_us.unwrap();
    assert_eq!((result.count, result.histogram.iter().map(|bin| bin.count).sum::<u64>()), (500, 500));
    assert!(latency.min >= 120.0 && latency.max <= 6_500.0 && latency.p50 < latency.p99, "{latency:?}");
    assert_eq!(result.bulk_gbps, Some(0.016));
    let gaps = result.interval_us.unwrap();
    assert!(gaps.min >= 1_000.0 && gaps.max <= 10_000.0, "{gaps:?}");
    assert!(latency.max_at_s.unwrap() <= result.duration_s);
}

#[test]
fn goals_are_judged_by_series_and_say_what_is_missing() {
    let report = a_report(500);
    let goal = |id: &str, series: &str| report.goals.iter().find(|g| g.id == id && g.kernel_series == series).unwrap();
    let p99 = |place: usize| report.results[place].latency_us.unwrap().p99;
    let vanilla = goal("p99-vs-vanilla-tcp", "7.2");
    assert_eq!(vanilla.actual, Some(p99(0) / p99(3)));
    assert_eq!((vanilla.met, vanilla.binding), (Some(true), true));
    assert_eq!(goal("p99-vs-vanilla-tcp", "6.12").met, Some(false));
    assert!(!goal("p99-vs-vanilla-tcp", "6.12").binding);
    assert_eq!(goal("bulk-vs-vanilla", "7.2").met, Some(true));
    let calm = goal("p99-vs-no-flood-tcp", "7.2");
    assert_eq!((calm.actual, calm.met), (Some(p99(3) / p99(4)), Some(true)));
    let mut worse = report.results.clone();
    if let Some(latency) = worse[3].latency_us.as_mut() {
        latency.p99 = p99(4) * 1.3;
    }
    let worse = goals::evaluate(&experiments::goals_of("rt-server"), &worse, Clock::Virtual, "7.2.12-rt-amd64");
    assert_eq!(worse.iter().find(|g| g.id == "p99-vs-no-flood-tcp" && g.binding).unwrap().met, Some(false));
    assert_eq!(goal("requests", "7.2").met, Some(false));
    let missing = goal("p99-vs-threaded-tcp", "6.12");
    assert_eq!((missing.met, missing.figures.as_str()), (None, "threaded (TCP flood) was not measured"));
    assert!(report.goals[0].binding, "the promised series comes first");
    // threaded in the place of partitioned: an SD compared with itself.
    let mut twins = report.results.clone();
    twins[3] = MethodResult { method: "outsourcing".to_owned(), ..twins[2].clone() };
    let twins = goals::evaluate(&experiments::goals_of("rt-server"), &twins, Clock::Virtual, "7.2.12-rt-amd64");
    let sd = twins.iter().find(|g| g.id == "sd-vs-threaded-tcp" && g.binding).unwrap();
    assert_eq!((sd.actual, sd.met), (Some(1.0), Some(false)));
    let nothing = goals::evaluate(&experiments::goals_of("rt-server"), &[], Clock::Virtual, "7.2.12-rt-amd64");
    assert!(nothing.len() == experiments::goals_of("rt-server").len() && nothing.iter().all(|goal| goal.met.is_none()));
}

#[test]
fn the_terminal_table_has_both_sides_and_what_is_unfavourable() {
    let report = a_report(500);
    let text = report::terminal(&report);
    let line =
        |start: &str| text.lines().find(|line| line.contains(start)).unwrap_or_else(|| panic!("{start}\n{text}"));
    assert!(line("vanilla       ").contains("225") && line("vanilla       ").contains("92.5"), "{text}");
    assert!(text.lines().any(|line| line.starts_with("outsourcing  ") && line.contains("46.8")), "{text}");
    assert!(text.contains("partitioned: Partitioned\n"), "what a method is: {text}");
    assert!(line("below vanilla, TCP").contains("met"), "{text}");
    assert!(line("at least 20,000 counted").contains("NOT MET"), "{text}");
    assert!(text.contains("requests were never answered"), "{text}");
    assert!(text.contains("virtual clock: ") && text.contains("real clock: "));
    assert!(text.replace(" \\\n    ", " ").contains(&format!("Again: {}\n", report.command)));
}

/// Maximum width of a table in a terminal, columns.
const COLUMNS: usize = 100;

/// Metrics of an experiment besides response times, with values of the usual size.
fn metrics(experiment: &str, place: usize) -> Vec<Metric> {
    let n = place as u64;
    let count = |key: &str, value: u64| Metric::count(key, value);
    let number = |key: &str, unit: Unit, value: f64| Metric::number(key, unit, value * (1.0 + place as f64 / 7.0));
    let late = || {
        vec![Metric::number(LATE_OVER, Unit::Us, 250.0), count(LATE, n * 731), number("late-share", Unit::Share, 0.01)]
    };
    let jobs = || {
        vec![
            count("applications", 100),
            count(REFUSED, n % 3),
            number("needed", Unit::Cpus, 1.234),
            number("slack", Unit::Cpus, 0.1234),
            number("reserved", Unit::Cpus, 1.4567),
            number("excess", Unit::Share, 0.0412),
            count(JOBS, 123_456 + n),
            count(MISSED, n * 1_234),
            count("with-misses", n),
            number("worst-missed", Unit::Share, 0.3),
            number("slowest-of-period", Unit::Share, 0.7),
        ]
    };
    match experiment {
        "segments" => {
            let whole = [
                count("traced", 150),
                number("traced-for", Unit::S, 12.3),
                count("not-named", 0),
                count("hindered", n),
            ];
            let parts = ["host receive", "guest", "host send", "in all"].into_iter().flat_map(|part| {
                let times = ["mean", "p50", "p99", "p99.9", "max", "sd"].map(|key| number(key, Unit::Us, 12_345.6));
                [count("requests", 150)].into_iter().chain(times).map(move |metric| metric.of(part)).collect::<Vec<_>>()
            });
            let behind = "the packet waited behind vhost-2345 (other), guest 10.2.0.11 [irq/33-virtio3-input.0]";
            whole.into_iter().chain(parts).chain([count("requests", 7).of(behind)]).collect()
        }
        "inversion" => vec![
            number("p99-by-all", Unit::Times, 1.02),
            Metric::text("doctor", Unit::Word, "warning"),
            Metric::text("found", Unit::Sentence, "2 of 2 not as wanted <napi/rt0>"),
        ],
        "kbp" => vec![
            Metric::number("frame", Unit::Bytes, 1_518.0),
            number("polled", Unit::S, 12.3),
            number("rested", Unit::S, 45.6),
            number("saved", Unit::Share, 0.5),
            number("no-loss", Unit::PerS, 123_456.0),
            number("lossy", Unit::PerS, 234_567.0),
            count("trials", 11 + n),
            count("frames-each", 10_000),
        ],
        "sampled-values" | "xen-arm" => late(),
        "rt-vms" => {
            let of_vm = |vm: u64| {
                let keys = ["p50", "p99", "sd", "max"];
                keys.map(|key| number(key, Unit::Us, 1_234.5).of(&format!("rt-{vm}")))
            };
            let worst = ["worst-p99", "worst-sd"].map(|key| number(key, Unit::Us, 12_345.6));
            worst.into_iter().chain((1..=100).flat_map(of_vm)).collect()
        }
        "memcached-slo" => late().into_iter().chain(jobs()).chain([number("paper-p99.9", Unit::Us, 450.0)]).collect(),
        "rta-periodic" | "rta-sporadic" | "rta-scale" | "video" => {
            let of =
                |part: &str| ["slice", "period", "worst"].map(|key| number(key, Unit::Us, 23_456.0).of(part)).to_vec();
            let a_job = ["a-job", "a-job-vcpus", "a-job-computes", "a-job-scheduling"];
            let a_job =
                a_job.map(|key| number(key, Unit::Us, 1_234.5)).into_iter().filter(|_| experiment == "rta-scale");
            let applications = (0..12).flat_map(|app| of(&format!("vm{app}, application {app}")));
            jobs().into_iter().chain(a_job).chain(applications).collect()
        }
        "guest-cyclictest" => {
            ["host-p99", "host-max", "ordinary-p99", "ordinary-max"].map(|key| number(key, Unit::Us, 12_345.6)).to_vec()
        }
        "duel" => {
            let frames = [count("frames", 4_000), count("late-frames", 123 + n), count("guest-wake-ups", 10_000 + n)];
            let own = [number("given-away", Unit::Cpus, 1.0), number("vhost-waited", Unit::Share, 0.1)];
            let guest = ["guest-p99", "guest-max"].map(|key| number(key, Unit::Us, 12_345.6));
            guest.into_iter().chain(frames).chain(own).collect()
        }
        "registration" => ["guest", "daemon", "host"].map(|key| number(key, Unit::Us, 1_234.5)).to_vec(),
        "bulk" => ["cost", "host", "guests", "user", "kernel"].map(|key| number(key, Unit::NsPerByte, 1.234)).to_vec(),
        "connections" => {
            vec![number("rate", Unit::PerS, 12_345.6), count("connections", 5_000 + n), count("clients", 8)]
        }
        _ => Vec::new(),
    }
}

/// A report with a result for every case of an experiment. The last one has no answers.
fn a_report_of(experiment: &dyn experiments::Experiment) -> Report {
    let base = a_report(200);
    let times = base.results[0].latency_us.unwrap();
    let mut report = Report { experiment: experiment.name().to_owned(), results: Vec::new(), ..base.clone() };
    for (place, (method, load)) in experiment.cases().into_iter().enumerate() {
        let scale = 1.0 + place as f64 * 13.7;
        let mut result = base.results[0].clone();
        result.kernel = if method == "vanilla" { "7.2.12-amd64" } else { "7.2.12-rt-amd64" }.to_owned();
        result.label =
            format!("what {method} is, in words that are too long for a table, as every method has; {method}");
        (result.method, result.load, result.lost) = (method, load, place as u64 * 1_234_567);
        result.count = 12_345_678 + place as u64;
        for time in [&mut times.clone()] {
            for figure in [&mut time.mean, &mut time.p50, &mut time.p99, &mut time.p99_9, &mut time.max, &mut time.sd] {
                *figure *= scale;
            }
            result.latency_us = experiment.has_response_times().then_some(*time);
        }
        result.metrics = metrics(experiment.name(), place);
        result.notes = vec![format!("a note of every case that is {}", "long ".repeat(40))];
        report.results.push(result);
    }
    if let Some(last) = report.results.last_mut().filter(|_| experiment.has_response_times()) {
        last.latency_us = None;
    }
    report.command = format!("{} {}", base.command, "--host-toml without=[napi-weight] ".repeat(9).trim());
    report.paper = experiment.paper(&Figures::load().unwrap());
    report.notes = experiment.remarks(&Figures::load().unwrap());
    report.notes.push(format!("exclusive on 7.2-rt: not measured: {}", "the emulated host or a VM failed ".repeat(5)));
    report.goals = goals::evaluate(&experiment.goals(), &report.results, Clock::Virtual, &report.kernel);
    report
}

/// The rows and the head of the last table, the one of the results as a whole.
fn last_table(terminal: &str) -> (String, Vec<&str>) {
    let lines: Vec<&str> = terminal.lines().collect();
    let rule = lines.iter().rposition(|line| line.starts_with('─')).unwrap_or_else(|| panic!("{terminal}"));
    let head = lines[..rule].iter().rposition(|line| line.is_empty()).unwrap();
    let rows = lines[rule + 1..]
        .iter()
        .take_while(|line| !["Verdict", "More columns"].iter().any(|word| line.starts_with(word)));
    (lines[head..rule].join(" "), rows.copied().collect())
}

#[test]
fn the_terminal_table_of_every_experiment_has_room_in_a_terminal() {
    let measured = experiments::EXPERIMENTS.iter().filter(|experiment| !experiment.cases().is_empty());
    for experiment in measured {
        let report = a_report_of(*experiment);
        let terminal = report::terminal(&report);
        let directory = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
        std::fs::write(directory.join(format!("table-{}.txt", experiment.name())), &terminal).unwrap();
        for line in terminal.lines() {
            assert!(textwrap::core::display_width(line) <= COLUMNS, "{}: {line}", experiment.name());
        }
        let again = &terminal[terminal.find("Again: ").unwrap()..].replace(" \\\n    ", " ");
        assert!(again.starts_with(&format!("Again: {}\n", report.command)), "it can be pasted: {again}");
        let (head, rows) = last_table(&terminal);
        assert_eq!(rows.len(), report.results.len(), "{}: {terminal}", experiment.name());
        let load = report.results[0].load;
        let have_loads = report.results.iter().any(|result| result.load != load);
        let words: Vec<&str> = head.split_whitespace().collect();
        let has = |word: &str| words.contains(&word);
        for (row, result) in rows.iter().zip(&report.results) {
            let cells: Vec<&str> = row.split_whitespace().collect();
            assert_eq!(cells[0], result.method, "{terminal}");
            assert!(!have_loads || cells[1] == result.load.name(), "{terminal}");
            if let Some(times) = result.latency_us {
                for figure in [times.p99, times.max] {
                    let figure = ontime_figures::number::us(figure);
                    assert!(has("p99") && has("max") && cells.contains(&figure.as_str()), "{figure}: {terminal}");
                }
            }
        }
        // Figures that a goal evaluates are in the table, or above it if they are the same in every case.
        let above = terminal.split("In every case: ").nth(1).unwrap_or_default().replace("\n  ", " ");
        let above = above.lines().next().unwrap_or_default();
        for goal in experiment.goals() {
            if let goals::Measure::Ratio(figure, ..) | goals::Measure::Only(figure, ..) = goal.measure {
                let name = figure.head().split(", ").next().unwrap().replace('-', " ");
                assert!(name.split(' ').all(has) || above.contains(&name), "{name}: {terminal}");
            }
        }
        assert_eq!(has("vanilla"), report.results.iter().any(|result| result.method == "vanilla"), "{terminal}");
        assert!(terminal.lines().rev().take(8).any(|line| line.starts_with("Verdict: ")), "{terminal}");
    }
}

#[test]
fn a_table_has_room_with_long_names_and_conditions_that_all_differ() {
    let mut report = a_report(200);
    for (place, result) in report.results.iter_mut().enumerate() {
        result.method = format!("{}-{place}", "a-method-with-a-very-long-name".repeat(3));
        result.kernel = format!("7.{place}.12+20261120-rt-amd64");
        if let Some(times) = result.latency_us.as_mut() {
            (times.p99, times.max) = (123_456_789_012.0 * (1.0 + place as f64), 1e300);
        }
        let parts = ["n".repeat(200), "µ — 中文 ".repeat(30)];
        let of = |part: &String| {
            [
                Metric::text("state", Unit::Word, "w".repeat(300)).of(part),
                Metric::number("cost", Unit::S, 1e-300).of(part),
            ]
        };
        result.metrics.extend(parts.iter().flat_map(of));
        result.metrics.extend((0..30).map(|key| Metric::number(&format!("own-figure-{key}"), Unit::Us, place as f64)));
    }
    let terminal = report::terminal(&report);
    let too_wide = terminal.lines().find(|line| textwrap::core::display_width(line) > COLUMNS);
    assert!(too_wide.is_none(), "{too_wide:?}\n{terminal}");
    assert!(terminal.contains("More columns (--csv, --html): "));
}

#[test]
fn what_is_the_same_in_every_case_is_told_once() {
    let mut report = a_report(200);
    report.results.truncate(3);
    for result in &mut report.results {
        (result.lost, result.cpu_share) = (0, Some(0.97));
        result.notes = vec!["requests came from there".to_owned()];
    }
    let terminal = report::terminal(&report);
    let (head, rows) = last_table(&terminal);
    let head: Vec<&str> = head.split("count 200").nth(1).unwrap().split_whitespace().collect();
    assert!(!["lost", "CPU", "load"].iter().any(|word| head.contains(word)) && rows.len() == 3, "{terminal}");
    let same = terminal.split("In every case: ").nth(1).unwrap().replace("\n  ", " ");
    let same = same.lines().next().unwrap();
    for said in [
        "TCP flood",
        "Linux 7.2.12-amd64 and 7.2.12-rt-amd64",
        "virtual clock",
        "1 CPU",
        "lost 0",
        "CPU 97 %",
        "count 200",
    ] {
        assert!(same.contains(said), "{said}: {same}");
    }
    assert_eq!(terminal.matches("requests came from there").count(), 1);
    assert!(terminal.contains("every case: requests came from there"));
    // Results of two runs of the same case are distinguished.
    report.results.push(report.results[1].clone());
    let terminal = report::terminal(&report);
    assert!(last_table(&terminal).1[3].starts_with("rt-default #2 "), "{terminal}");
}

#[test]
fn the_verdict_is_the_end_and_names_what_was_missed() {
    let report = a_report(500);
    let terminal = report::terminal(&report);
    let verdict = terminal.split("Verdict: ").nth(1).unwrap().replace("\n  ", " ");
    let count = |met| report.goals.iter().filter(|goal| goal.binding && goal.met == met).count();
    let binding = report.goals.iter().filter(|goal| goal.binding).count();
    assert!(verdict.starts_with(&format!("{} of {binding} goals met; NOT MET: ", count(Some(true)))), "{verdict}");
    assert!(
        verdict.contains("requests (500; goal: at least 20,000); not measured: ")
            && verdict.contains("and 6 more above"),
        "{verdict}"
    );
    let (_, rows) = last_table(&terminal);
    assert_eq!(rows.len(), report.results.len());
    let real = Report { goals: Vec::new(), ..report };
    assert!(report::terminal(&real).ends_with("Verdict: rt-server has no goals\n"));
}

#[test]
fn a_result_is_compared_with_its_like_only() {
    let mut report = a_report(200);
    let mut calm = report.results[0].clone();
    calm.load = Load::None;
    if let Some(latency) = calm.latency_us.as_mut() {
        latency.p99 /= 2.0;
    }
    report.results.push(calm);
    let rows = report::rows(&report);
    assert!(rows[0].paper.is_some() && rows[9].paper.is_none(), "the paper's vanilla was flooded");
    let p99 = |place: usize| report.results[place].latency_us.unwrap().p99;
    assert_eq!(rows[3].below_vanilla, Some(p99(0) / p99(3)));
    assert_eq!(rows[4].below_vanilla, Some(p99(9) / p99(4)), "both without flood");
    assert_eq!(rows[6].below_vanilla, Some(p99(5) / p99(6)), "both 6.12");
    assert_eq!(rows[8].below_vanilla, Some(p99(7) / p99(8)), "both on the real clock");
    assert!(p99(0) != p99(5) && p99(0) != p99(7));
    assert_eq!(rows[0].below_vanilla, None);
}

/// As where `show` puts the results of a host with one CPU and those of a host with two together.
#[test]
fn a_host_with_more_cpus_is_not_compared_with_a_vanilla_of_one() {
    let mut report = a_demo(150);
    report.results.retain(|result| result.load == Load::Tcp);
    let find = |report: &Report, method: &str| report.results.iter().position(|of| of.method == method).unwrap();
    let place = find(&report, "partitioned");
    report.results[place].cpus = 2;
    let below = |report: &Report| report::rows(report)[place].below_vanilla;
    assert_eq!(below(&report), None);
    assert!(
        !report::unfavourable(&report).iter().any(|said| said.starts_with("partitioned") && said.contains("vanilla"))
    );
    let page = report::html(&report);
    assert!(!page.contains("class=\"lead\""), "its sentence compares both");
    for id in ["bars0", "bars1"] {
        let chart = chart(&page, id);
        assert_eq!(chart.contains("vanilla"), !chart.contains("partitioned"), "{chart}");
        assert!(chart.contains("CPUs: "), "{chart}");
    }
    let mut beside = report.results[find(&report, "vanilla")].clone();
    beside.cpus = 2;
    let p99 = |of: &MethodResult| of.latency_us.unwrap().p99;
    let wanted = p99(&beside) / p99(&report.results[place]);
    report.results.push(beside);
    assert_eq!(below(&report), Some(wanted));
}

#[test]
fn csv_has_a_line_a_result_and_the_papers_alone() {
    let report = a_report(200);
    let text = report::csv(&report);
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let heads = reader.headers().unwrap().clone();
    let lines: Vec<csv::StringRecord> = reader.records().map(Result::unwrap).collect();
    assert_eq!(lines.len(), report.results.len() + 1, "and one for `outsourcing`, which only the paper has");
    let at = |line: usize, head: &str| lines[line][heads.iter().position(|h| h == head).unwrap()].to_string();
    assert_eq!(at(0, "label"), "Vanilla Linux");
    assert_eq!(at(0, "p99_us").parse::<f64>().unwrap(), report.results[0].latency_us.unwrap().p99);
    assert_eq!((at(0, "paper_p99_us"), at(4, "paper_p99_us")), ("225".to_string(), String::new()));
    assert_eq!(at(9, "method"), "outsourcing");
    assert_eq!(at(9, "paper_mean_us"), "32.9");
}

/// The cells of a column, by its head.
fn column(report: &Report, head: &str) -> Vec<String> {
    let text = report::csv(report);
    let mut reader = csv::Reader::from_reader(text.as_bytes());
    let place = reader.headers().unwrap().iter().position(|of| of == head);
    let place = place.unwrap_or_else(|| panic!("{head}: {text}"));
    reader.records().map(|line| line.unwrap()[place].to_owned()).collect()
}

#[test]
fn metrics_of_results_and_of_their_parts_are_in_every_form() {
    let mut report = a_report(200);
    report.experiment = "segments".to_owned();
    for (segment, max) in [("host receive", 1_234.0), ("guest", 77.0), ("in all", 1_400.0)] {
        let of = [Metric::count("requests", 200), Metric::number("max", Unit::Us, max)];
        report.results[1].metrics.extend(of.map(|metric| metric.of(segment)));
    }
    report.results[2].metrics = vec![
        Metric::text("doctor", Unit::Word, "warning"),
        Metric::text("found", Unit::Sentence, "2 of 2 not as wanted <napi/rt0>"),
    ];
    report.results[3].metrics = vec![Metric::number(LATE_OVER, Unit::Us, 250.0), Metric::count(LATE, 17)];
    assert!(Report::from_json(&report.to_json().unwrap()).unwrap() == report);
    let max = column(&report, "host_receive_max_us");
    assert_eq!((max[0].as_str(), max[1].as_str()), ("", "1234"));
    assert_eq!(column(&report, "found")[2], "2 of 2 not as wanted <napi/rt0>");
    assert_eq!(column(&report, "late")[2..4], [String::new(), "17".to_owned()]);
    let page = report::html(&report);
    assert!(page.contains("17 of 200 were answered late (over 250 µs)"));
    assert!(page.contains("Segments of the way") && page.contains("1,234") && page.contains("&lt;napi/rt0&gt;"));
    let terminal = report::terminal(&report);
    let line = |word: &str| terminal.lines().find(|line| line.contains(word)).unwrap_or_else(|| panic!("{terminal}"));
    assert!(line("host receive").contains("rt-default") && line("host receive").contains("1,234"));
    assert!(line("warning").contains("threaded") && !terminal.contains("napi/rt0"), "a sentence is for the page");
    // The page and the JSON show all parts of a result; a terminal does not.
    for number in 0..20 {
        report.results[1].metrics.push(Metric::count("requests", 1).of(&format!("inversion {number}")));
    }
    let terminal = report::terminal(&report);
    assert!(terminal.contains("inversion 4") && !terminal.contains("inversion 5 ") && terminal.contains("15 more"));
    assert!(report::html(&report).contains("inversion 19"));
}

#[test]
fn what_asking_costs_is_in_every_form_and_judged_by_what_asks_nobody() {
    let mut report = a_report(200);
    report.experiment = "registration".to_owned();
    report.results.truncate(3);
    for (result, (method, us)) in report.results.iter_mut().zip([("same", 16), ("change", 314), ("bare", 90)]) {
        (result.method, result.label, result.load) = (method.to_owned(), format!("call {method}"), Load::None);
        result.kernel = "7.2.12-rt-amd64".to_owned();
        result.timed(&[us * US; 100]);
    }
    for (place, daemon, host) in [(1, 129.0, 189.0), (2, 0.0, 30.0)] {
        report.results[place].metrics =
            vec![Metric::number("daemon", Unit::Us, daemon), Metric::number("host", Unit::Us, host)];
    }
    let specs = experiments::goals_of("registration");
    report.goals = goals::evaluate(&specs, &report.results, Clock::Virtual, "7.2.12-rt-amd64");
    let reached = |id: &str| report.goals.iter().find(|goal| goal.id == id).unwrap();
    assert_eq!((reached("host").actual, reached("host").met), (Some(159.0), Some(false)));
    assert_eq!((reached("guest").actual, reached("guest").met), (Some(208.0), Some(false)));
    assert_eq!((reached("guest-in-all").actual, reached("guest-in-all").met), (Some(224.0), Some(false)));
    assert_eq!(reached("guest-spare").met, None);
    assert!(Report::from_json(&report.to_json().unwrap()).unwrap() == report);
    assert_eq!(column(&report, "daemon_us")[..3], [String::new(), "129".to_owned(), "0".to_owned()]);
    let terminal = report::terminal(&report);
    let change: Vec<&str> =
        terminal.lines().find(|line| line.starts_with("change  ")).unwrap().split_whitespace().collect();
    assert_eq!(
        change[..7],
        ["change", "314", "314", "314", "314", "129", "189"],
        "mean to max, daemon, host: {terminal}"
    );
    let page = report::html(&report);
    assert!(page.contains("<h1>System call in the guest, method by method</h1>"));
    assert!(page.contains("<td data-head=\"host, µs\">189</td>"));
}

#[test]
fn deadlines_are_judged_where_every_application_did_a_job() {
    let mut report = a_report(200);
    report.experiment = "video".to_owned();
    report.results.truncate(1);
    report.results[0].method = "paced".to_owned();
    (report.results[0].load, report.results[0].kernel) = (Load::None, "7.2.12-rt-amd64".to_owned());
    let mut judged = |metrics: [(&str, u64); 3]| {
        report.results[0].metrics = metrics.map(|(key, value)| Metric::count(key, value)).to_vec();
        let goals =
            goals::evaluate(&experiments::goals_of("video"), &report.results, Clock::Virtual, "7.2.12-rt-amd64");
        let unfavourable = report::unfavourable(&report).join(" ");
        (goals[0].met, goals[0].figures.clone(), unfavourable.contains("2 of 90 deadlines were missed"))
    };
    assert_eq!(judged([(JOBS, 90), (MISSED, 0), (REFUSED, 0)]), (Some(true), "0 of 90 jobs, paced".to_owned(), false));
    assert_eq!(judged([(JOBS, 90), (MISSED, 2), (REFUSED, 0)]), (Some(false), "2 of 90 jobs, paced".to_owned(), true));
    let (met, figures, is_told) = judged([(JOBS, 90), (MISSED, 2), (REFUSED, 1)]);
    assert!(met.is_none() && figures.contains("did no job: 1") && is_told, "{figures}");
}

#[test]
fn nothing_counted_is_unfavourable_where_there_should_be_response_times() {
    let mut report = a_report(200);
    report.results.truncate(1);
    report.results[0].latency_us = None;
    let mut is_told = |experiment: &str, metrics: &[Metric]| {
        (report.experiment, report.results[0].metrics) = (experiment.to_owned(), metrics.to_vec());
        report::unfavourable(&report).iter().any(|sentence| sentence.contains("no request could be counted"))
    };
    assert!(is_told("sampled-values", &[Metric::count(LATE, 0)]));
    assert!(!is_told("bulk", &[Metric::number("cost", Unit::NsPerByte, 2.0)]) && is_told("bulk", &[]));
}

#[test]
fn a_column_is_named_by_part_key_and_unit() {
    let mut report = a_report(200);
    report.results[0].metrics = vec![
        Metric::number("late-share", Unit::Share, 0.5),
        Metric::count("requests", 7).of("the packet waited behind vhost-7 (other), guest [vnic-place]"),
    ];
    assert_eq!(column(&report, "late_share")[0], "0.5");
    assert_eq!(column(&report, "the_packet_waited_behind_vhost_7_other_guest_vnic_place_requests")[0], "7");
}

#[test]
fn a_goal_of_a_metric_is_judged_and_says_what_is_missing() {
    let mut report = a_report(200);
    report.experiment = "connections".to_owned();
    report.results.truncate(3);
    let methods = [("threaded", Some(2_893.4)), ("partitioned", None), ("outsourcing", Some(3_336.0))];
    for (result, (method, per_s)) in report.results.iter_mut().zip(methods) {
        (result.method, result.label, result.load) = (method.to_owned(), format!("by {method}"), Load::None);
        result.kernel = "7.2.12-rt-amd64".to_owned();
        result.metrics.extend(per_s.map(|per_s| Metric::number("rate", Unit::PerS, per_s)));
    }
    let specs = experiments::goals_of("connections");
    report.goals = goals::evaluate(&specs, &report.results, Clock::Virtual, "7.2.12-rt-amd64");
    assert_eq!(report.goals.iter().map(|goal| goal.met).collect::<Vec<_>>(), [Some(true), None]);
    assert!(report.goals[0].figures.contains("3,336 a second"), "{}", report.goals[0].figures);
    assert!(report.goals[1].figures.contains("partitioned (no flood) has no figure 'rate'"), "{:?}", report.goals[1]);
    assert_eq!(column(&report, "rate_per_s")[..3], ["2893.4", "", "3336"].map(str::to_owned));
    assert!(!report::html(&a_report(200)).contains("own figures"));
}

#[test]
fn the_page_is_self_contained_escaped_and_complete() {
    let mut report = a_report(if std::env::var_os("ONTIME_PAGE").is_some() { 20_000 } else { 500 });
    report.notes.push("<script>alert(1)</script>".to_string());
    let page = report::html(&report);
    let directory = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    std::fs::write(directory.join("page.html"), &page).unwrap();
    std::fs::write(directory.join("table.txt"), report::terminal(&report)).unwrap();
    assert!(!page.contains("<script") && page.contains("&lt;script&gt;"));
    for outside in ["http://", "https://", "src=", "href=", "@import", "url("] {
        assert!(!page.contains(outside), "the page refers to something outside: {outside}");
    }
    assert!(page.contains("prefers-color-scheme: dark"));
    // An unclosed SVG element would hide the following ones.
    for element in ["svg", "g", "line", "path", "rect", "circle", "text", "title", "desc"] {
        let open = page.matches(&format!("<{element}>")).count() + page.matches(&format!("<{element} ")).count();
        assert_eq!(open, page.matches(&format!("</{element}>")).count(), "{element}");
    }
    // Bars, a CDF and a tail for 7.2 virtual under TCP and without flood, 6.12 virtual and 7.2 real, and a histogram
    // per result.
    assert_eq!(page.matches("role=\"img\"").count(), 4 * 3 + report.results.len());
    assert!(page.contains(&report.command) && page.contains("&lt;Xeon&gt; &amp; friends"));
    for result in &report.results {
        assert!(page.contains(&result.label));
    }
    assert!(page.contains("never answered"), "unfavourable figures stay");
    assert!(!page.contains("NaN") && !page.contains(">inf") && !page.contains(" inf "), "a figure is no number");
}

/// Six methods under three loads.
fn a_demo(requests: u64) -> Report {
    let (v, rt) = ("7.2.12-amd64", "7.2.12-rt-amd64");
    let server = |low, high, slow| Server { usual: (low, high), slow, rare: 40 };
    let methods = [
        ("vanilla", "stock kernel without PREEMPT_RT, RT vCPU and vNIC threads at FIFO", v, VANILLA),
        ("rt-default", "PREEMPT_RT kernel with its defaults", rt, server(300, 2_500, 3_000)),
        ("threaded", "the paper's threaded interrupt handling", rt, server(100, 2_200, 900)),
        ("partitioned", "Ontime: every NAPI threaded, one priority table for the whole path", rt, PARTITIONED),
        ("outsourcing", "Ontime: as partitioned, and the VM's sockets are the host's", rt, server(52, 60, 15)),
        ("host-process", "the same server as a process of the host", rt, server(22, 39, 5)),
    ];
    let mut report = a_report(200);
    report.results.clear();
    for (method, label, kernel, of) in methods {
        for load in [Load::None, Load::SmallPackets, Load::Tcp] {
            let calm = Server { usual: (of.usual.0, of.usual.0 + 12), slow: 9, rare: 40 };
            let of = if load.floods() { of } else { calm };
            report.results.push(result(method, label, kernel, Clock::Virtual, load, of, requests, 5_000_000));
        }
    }
    report.goals = goals::evaluate(&experiments::goals_of("rt-server"), &report.results, Clock::Virtual, rt);
    report
}

/// An attribute of the first element of this text.
fn attribute<'a>(text: &'a str, name: &str) -> &'a str {
    let (_, rest) = text.split_once(&format!(" {name}=\"")).unwrap_or_else(|| panic!("{name}: {text}"));
    rest.split_once('"').unwrap().0
}

/// The chart with this name.
fn chart<'a>(page: &'a str, id: &str) -> &'a str {
    let (_, rest) = page.split_once(&format!("<title id=\"{id}-title\">")).unwrap_or_else(|| panic!("{id}: {page}"));
    rest.split_once("</svg>").unwrap().0
}

#[test]
fn the_first_screen_has_a_sentence_and_a_bar_for_each_method_on_a_logarithmic_axis() {
    let report = a_demo(150);
    let page = report::html(&report);
    let directory = std::path::Path::new(env!("CARGO_TARGET_TMPDIR"));
    std::fs::write(directory.join("demo.html"), &page).unwrap();
    std::fs::write(directory.join("demo.json"), report.to_json().unwrap()).unwrap();
    let of = |method: &str, load: Load| {
        let result = report.results.iter().find(|result| result.method == method && result.load == load);
        result.unwrap().latency_us.unwrap()
    };
    let us = ontime_figures::number::us;

    let leads: Vec<&str> = page.split("<p class=\"lead\">").skip(1).collect();
    let lead = leads[0].split_once("</p>").unwrap().0;
    let (own, vanilla) = (of("partitioned", Load::Tcp), of("vanilla", Load::Tcp));
    assert!(leads.len() == 1 && lead.ends_with("x lower.") && !lead.contains(". "), "one sentence: {lead}");
    for said in ["TCP flood", "(partitioned)", "slowest of 150", &us(own.p99), &us(own.max), &us(vanilla.p99)] {
        assert!(lead.contains(said), "{said}: {lead}");
    }
    let place = |text: &str| page.find(text).unwrap_or_else(|| panic!("{text}"));
    assert!(place("class=\"lead\"") < place("bars0-title") && place("bars2-title") < place("<table"));

    for (number, load) in [Load::Tcp, Load::SmallPackets, Load::None].into_iter().enumerate() {
        let chart = chart(&page, &format!("bars{number}"));
        assert!(chart.to_lowercase().contains(&load.description().to_lowercase()), "{chart}");
        let decades: Vec<(f64, f64)> = chart
            .split("<text class=\"decade\"")
            .skip(1)
            .map(|text| {
                let label = text.split_once('>').unwrap().1.split_once('<').unwrap().0.replace(',', "");
                (label.parse().unwrap(), attribute(text, "x").parse().unwrap())
            })
            .collect();
        let (low, high) = (decades[0], decades[decades.len() - 1]);
        let x = |us: f64| low.1 + (us / low.0).log10() / (high.0 / low.0).log10() * (high.1 - low.1);
        for (us, at) in &decades {
            assert!((x(*us) - at).abs() < 0.2, "the decades are not at equal distances: {decades:?}");
        }
        let bars: Vec<&str> = chart.split("<g class=\"bar ").skip(1).collect();
        assert_eq!(bars.len(), 6, "{chart}");
        for bar in bars {
            let (_, name) = bar.split_once("<text class=\"name\"").unwrap();
            let method = name.split_once('>').unwrap().1.split_once('<').unwrap().0;
            let end = |class: &str| -> f64 {
                let (_, rect) = bar.split_once(&format!("<rect class=\"{class}\"")).unwrap();
                let number = |name: &str| attribute(rect, name).parse::<f64>().unwrap();
                number("x") + number("width")
            };
            let latency = of(method, load);
            assert!((end("p99") - x(latency.p99)).abs() < 0.3, "{method}: {bar}");
            // A maximum that is the p99 is drawn, too.
            assert!((end("beyond") - x(latency.max)).abs() < 1.3, "{method}: {bar}");
            let ratio = match method {
                "vanilla" => "baseline".to_owned(),
                _ => ontime_figures::number::times(of("vanilla", load).p99 / latency.p99),
            };
            assert!(bar.contains(&ratio) && bar.contains(&us(latency.p99)) && bar.contains(&us(latency.max)), "{bar}");
        }
    }
}

#[test]
fn goals_and_unfavourable_figures_are_folded_and_complete() {
    let report = a_demo(150);
    let page = report::html(&report);
    let folded = |title: &str| {
        let start = format!("<details><summary><h2>{title}</h2>");
        let (_, rest) = page.split_once(&start).unwrap_or_else(|| panic!("{title}"));
        rest.split_once("</details>").unwrap().0
    };
    let goals = folded("Goals");
    assert!(report.goals.iter().all(|goal| goals.contains(&goal.text)), "{goals}");
    assert!(goals.contains(&format!("of {} met", report.goals.len())) && goals.contains("✗ not met"), "{goals}");
    let against = report::unfavourable(&report);
    assert!(!against.is_empty() && folded("Unfavourable figures").matches("<li>").count() == against.len());
}

#[test]
fn each_remark_is_on_the_page_once_with_its_cases() {
    let mut report = a_demo(150);
    for result in &mut report.results {
        result.notes = vec!["requests came from there".to_owned()];
    }
    report.results[4].notes.push("this flood was slow".to_owned());
    report.results[17].notes.push("this flood was slow".to_owned());
    report.notes = vec!["the machine was busy".to_owned()];
    let page = report::html(&report);
    for remark in ["requests came from there", "this flood was slow", "the machine was busy"] {
        assert_eq!(page.matches(remark).count(), 1, "{remark}");
    }
    assert!(page.contains("every case: requests came from there"));
    assert!(page.contains("rt-default, small-packet flood; host-process, TCP flood: this flood was slow"));
    // The long words for a method are there once; everywhere else is its name.
    for result in &report.results {
        assert_eq!(page.matches(&result.label).count(), 1, "{}", result.label);
    }
}

#[test]
fn a_percentile_of_too_few_samples_is_nowhere_on_the_page() {
    assert!(!report::html(&a_demo(150)).contains("p99.9"));
    assert!(!report::html(&a_demo(999)).contains("p99.9"));
    let mut report = a_report(1_000);
    let page = report::html(&report);
    let p99_9 = ontime_figures::number::us(report.results[0].latency_us.unwrap().p99_9);
    assert!(page.contains(&format!("<td data-head=\"p99.9, µs\">{p99_9}</td>")), "{page}");
    assert!(page.contains("<td data-head=\"p99.9, µs\">–</td>"), "the real clock has 100 requests");
    // The experiment's own table, too.
    report = a_report(200);
    report.experiment = "xen-arm".to_owned();
    let page = report::html(&report);
    assert!(page.contains("own figures") && !page.contains("p99.9"), "{page}");
}

/// The look of each method: the tag of the line beside its name.
fn styles(page: &str) -> std::collections::BTreeMap<String, String> {
    let keys = page.split("<th scope=\"row\"><svg class=\"key\"").skip(1);
    let style = |key: &str| {
        let (svg, rest) = key.split_once("</svg>").unwrap();
        let (_, line) = svg.split_once("<path ").unwrap();
        (rest.split_once('<').unwrap().0.to_owned(), line.split_once('>').unwrap().0.to_owned())
    };
    keys.map(style).collect()
}

#[test]
fn no_two_methods_of_a_page_look_the_same_and_no_table_is_wider_than_a_screen() {
    let measured = experiments::EXPERIMENTS.iter().filter(|experiment| !experiment.cases().is_empty());
    let mut reports: Vec<Report> = measured.map(|experiment| a_report_of(*experiment)).collect();
    // More methods than there are pairs of a colour and a dash in the first round.
    let mut many = a_demo(150);
    many.results.truncate(1);
    for number in 0..160 {
        many.results.push(MethodResult { method: format!("method-{number}"), ..many.results[0].clone() });
    }
    reports.push(many);
    for report in reports {
        let page = report::html(&report);
        let styles = styles(&page);
        let mut looks: Vec<&String> = styles.values().collect();
        looks.sort_unstable();
        looks.dedup();
        assert!(!styles.is_empty() && looks.len() == styles.len(), "{}: {styles:?}", report.experiment);
        // The name and ten figures; on a telephone a row is a card.
        for row in page.split("<tr>").skip(1) {
            let row = row.split_once("</tr>").unwrap().0;
            let cells = row.matches("<td").count() + row.matches("<th").count();
            assert!(cells <= 11, "{}: {row}", report.experiment);
        }
        assert_eq!(page.matches("<table").count(), page.matches("<table class=\"cards\"").count());
        // At 390 px, 362 px are left for a chart, whose text must have 11 px.
        for chart in page.split("<svg viewBox=\"0 0 ").skip(1) {
            let width: f64 = chart.split_once(' ').unwrap().0.parse().unwrap();
            assert!(13.5 * 362.0 / width >= 11.0, "{width}");
        }
    }
}

#[test]
fn a_report_without_results_is_still_a_report() {
    let mut report = a_report(200);
    let empty = WireAnalysis::default();
    report.results = vec![MethodResult::new(&Run {
        load: Load::Tcp,
        wire: &empty,
        cpu_share: Some(f64::NAN),
        ..Run::of("vanilla", "Vanilla", "7.2", Clock::Real)
    })];
    let page = report::html(&report);
    assert!(page.contains("No request was counted here"));
    assert!(report::terminal(&report).contains("no request could be counted"));
    assert_eq!(report::csv(&report).lines().count(), 1 + 1 + 3);
    report.results.clear();
    assert!(!report::html(&report).contains("NaN"));
    assert!(report.to_json().is_ok());
}

#[test]
fn histograms_for_other_tools_count_every_request() {
    let report = a_report(2_000);
    let text = report::rtla(&report);
    let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    let head = rows.iter().find(|row| row[0] == "Index").unwrap();
    let counts = rows.iter().find(|row| row[0] == "count:").unwrap();
    assert_eq!(head.len(), 1 + report.results.len());
    for (place, result) in report.results.iter().enumerate() {
        let place = place + 1;
        assert_eq!(head[place], report::case(result));
        let values = rows.iter().filter(|row| row[0].parse::<u64>().is_ok());
        let sum: u64 = values.map(|row| row[place].parse::<u64>().unwrap()).sum();
        assert_eq!((sum, counts[place]), (result.count, result.count.to_string().as_str()), "{text}");

        let text = report::hgrm(result).unwrap();
        let rows: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["Value", "Percentile", "TotalCount", "1/(1-Percentile)"]);
        let exact = result.latency_us.unwrap();
        let half = rows.iter().find(|row| row.get(1) == Some(&"0.500000000000")).unwrap();
        let value: f64 = half[0].parse().unwrap();
        assert!((value - exact.p50).abs() <= exact.p50 / 100.0, "{value} beside {}", exact.p50);
        let last = rows.iter().find(|row| row.get(1) == Some(&"1.000000000000")).unwrap();
        assert_eq!((last[0].parse::<f64>().unwrap(), last[2].parse::<u64>().unwrap()), (exact.max, result.count));
    }
    let mut odd = report.clone();
    odd.results.truncate(1);
    odd.results.push(odd.results[0].clone());
    odd.results.push(MethodResult { latency_us: None, ..odd.results[0].clone() });
    odd.results.push(MethodResult { method: "../x".to_owned(), ..odd.results[0].clone() });
    let case = report::case(&odd.results[0]);
    let names: Vec<String> = report::hgrm_files(&odd).into_iter().map(|(name, _)| name).collect();
    assert_eq!(names[..2], [format!("{case}.hgrm"), format!("{case}-2.hgrm")], "one does not take another's place");
    assert!(names.len() == 3 && !names[2].contains('/'), "{names:?}");
}
