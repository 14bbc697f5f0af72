//! From the log's bytes to the document, with a recorded request, of which one line in three hundred is kept, and with
//! synthetic requests.

#![allow(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "a test fails by panic")]

use super::report::table;
use super::stages::{Phase, Stage};
use super::symbols::{Function, Maps, Mark, Sources, Symbols, Thread};
use super::window::{Cutter, Incomplete, Run};
use super::*;
use crate::baseline::Tolerance;
use crate::path::line::Level;

/// The emulator's log of a request under `partitioned`.
pub(super) const LOG: &str = include_str!("testdata/request.log");
/// The host's symbols of these functions. The guest sent no symbols.
const HOST: &str = include_str!("testdata/kallsyms");
/// The host's mappings.
const MAPS: &str = include_str!("testdata/maps");

pub(super) fn names() -> Names {
    Names::new(Sources {
        host_kernel: Symbols::kallsyms(HOST.lines()),
        host_maps: Maps::parse(MAPS.lines()),
        ..Sources::default()
    })
}

type Requests = Vec<Result<Vec<Run>, Incomplete>>;

/// What a host with two CPUs has executed.
fn recorded(log: &str) -> (Requests, Names) {
    let (mut cutter, mut names) = (Cutter::new(2), names());
    // In parts of arbitrary size, as from a pipe.
    log.as_bytes().chunks(777).for_each(|part| cutter.read(part, &mut names));
    (cutter.finish(&names), names)
}

fn request(log: &str) -> Request {
    let (requests, names) = recorded(log);
    let [Ok(runs)] = requests.as_slice() else { panic!("{} requests", requests.len()) };
    Request::of(runs, &names)
}

#[test]
fn a_recorded_request_goes_the_known_way() {
    let request = request(LOG);
    let stages: Vec<String> = request
        .stages
        .iter()
        .map(|(stage, _)| {
            format!("{}, {}, {}", stage.phase.description(), stage.thread.description(), stage.level.description())
        })
        .collect();
    assert_eq!(
        stages,
        [
            "host receive, interrupt, host kernel",
            "host receive, interrupt's thread, host kernel",
            "host receive, NAPI's thread, host kernel",
            "host receive, vhost, host kernel",
            "host receive, vCPU, host kernel",
            "server, vCPU, guest kernel",
            "server, vCPU, host kernel",
            "server, vCPU, guest user",
            "host send, vCPU, host kernel",
            "host send, vhost, host kernel",
        ]
    );
    let (first, last) = (request.steps.first().unwrap(), request.steps.last().unwrap());
    assert_eq!((first.function.as_str(), last.function.as_str()), ("irq_entries_start", "e1000_xmit_frame [e1000e]"));
}

#[test]
fn stages_and_functions_of_a_request_are_its_whole() {
    let request = request(LOG);
    let traced = LOG.lines().filter(|line| line.starts_with("Trace")).count() as u64;
    assert!(request.instructions > 100 && request.instructions < traced);
    assert_eq!(request.stages.iter().map(|(_, count)| count).sum::<u64>(), request.instructions);
    assert_eq!(request.functions.values().sum::<u64>(), request.instructions);
    assert_eq!(request.steps.iter().map(|step| step.count).sum::<u64>(), request.instructions);
    let (mut method, _) = Method::new(("partitioned", "P"), &[request], &BTreeMap::new()).unwrap();
    assert_eq!(method.check(), Ok(()));
    method.stages[0].slowest += 1;
    assert!(method.check().unwrap_err().to_string().contains("the slowest request's stages"));
    method.stages[0].slowest -= 1;
    method.functions.pop();
    assert!(method.check().unwrap_err().to_string().contains("the median request's functions"));
}

#[test]
fn a_trace_without_begin_or_end_is_no_request() {
    let lines: Vec<&str> = LOG.split_inclusive('\n').collect();
    assert_eq!(recorded(&lines[8..].concat()).0, [Err(Incomplete::NoBegin)]);
    assert_eq!(recorded(&lines[..3].concat()).0, []);
    assert_eq!(recorded(&lines[..lines.len() / 2].concat()).0, [Err(Incomplete::NoEnd)]);
    assert_eq!(recorded("").0, []);
}

#[test]
fn what_the_arrival_interrupts_is_no_part_of_the_request() {
    let one = recorded(LOG).0;
    assert_eq!(recorded(&LOG.repeat(3)).0, [one.clone(), one.clone(), one.clone()].concat());
    // The daemon runs, on a CPU that has not halted since the request before.
    let request: String = LOG.split_inclusive('\n').skip(3).collect();
    let daemon = LOG.lines().next().unwrap().replace("ffffffff99a00100/18d0c2b0", "0000000000402000/18d0c2b3") + "\n";
    let found = recorded(&[LOG, &daemon.repeat(500), &request].concat()).0;
    assert_eq!(found, [one.clone(), one].concat());
}

#[test]
fn a_request_begins_with_the_interrupt_that_wakes_its_handlers_thread() {
    let one = recorded(LOG).0;
    let lines: Vec<&str> = LOG.split_inclusive('\n').collect();
    // Behind the interrupt's first instructions: its handler, and a timer's interrupt before the thread runs.
    let wakes = "Trace 0: 0x7f3f07ea8400 [0000000000000000/ffffffff99a02000/18d0c290/ff020201] \n";
    let timer = "Trace 0: 0x7f3f07ea8400 [0000000000000000/ffffffff99a03000/18d0c290/ff020201] \n";
    let with = |added: &str| recorded(&[&lines[..9].concat(), added, &lines[9..].concat()].concat()).0;
    let length = |requests: &Requests| match requests.as_slice() {
        [Ok(runs)] => runs.iter().map(|run| run.count).sum::<u64>(),
        other => panic!("{} requests", other.len()),
    };
    let handled = length(&with(wakes));
    assert_eq!(handled, length(&one) + 1);
    assert_eq!(length(&with(&[wakes, timer].concat())), handled + 1);
    // A timer's interrupt in place of the handler: the beginning is unknown, and the later interrupt is taken for it.
    assert!(length(&with(timer)) < length(&one));
}

#[test]
fn another_interrupts_thread_is_no_part_of_the_request() {
    // Functions are numbered as they come: the runs' lengths tell requests apart.
    let runs = |log: &str| match recorded(log).0.as_slice() {
        [Ok(runs)] => runs.iter().map(|run| run.count).collect::<Vec<_>>(),
        other => panic!("{} requests", other.len()),
    };
    let one = runs(LOG);
    let lines: Vec<&str> = LOG.split_inclusive('\n').collect();
    let (halt, request) = (lines[..3].concat(), lines[3..].concat());
    let at = |address: &str| lines[3].replace("ffffffff99a00300", address);
    let other = lines[3..9].concat() + &at("ffffffff99a02000");
    let [switch, thread, daemon] = ["ffffffff99c9f6e0", "ffffffff99e340e0", "0000000000402000"].map(at);
    let ran = [switch.as_str(), &thread, &switch].concat();
    // The CPU halts behind it; or it goes on with other work, and its thread has run.
    assert_eq!(runs(&[other.as_str(), &halt, &request].concat()), one);
    assert_eq!(runs(&[other.as_str(), &ran, &daemon.repeat(500), &request].concat()), one);
    // Its thread has not run: nothing tells it from the thread of the request.
    assert_ne!(runs(&[other.as_str(), &request].concat()), one);
}

#[test]
fn an_arrival_without_a_reply_is_no_part_of_the_next_request() {
    let lines: Vec<&str> = LOG.split_inclusive('\n').collect();
    let unanswered = lines[..lines.len() / 2].concat();
    assert_eq!(recorded(&[unanswered.as_str(), LOG].concat()).0, recorded(LOG).0);
}

#[test]
fn a_request_has_the_instructions_of_all_cpus_of_the_host() {
    let whole = request(LOG);
    let lines: Vec<&str> = LOG.split_inclusive('\n').collect();
    // From the second switch on, the request goes on on the other CPU, which halted before.
    let switches = |line: &&&str| line.contains("/ffffffff99c9f6e0/");
    let from = lines.iter().enumerate().filter(|(_, line)| switches(line)).nth(1).unwrap().0 + 1;
    let other: String = lines[from..].iter().map(|line| line.replace("Trace 0:", "Trace 1:")).collect();
    let halt = lines[..3].concat().replace("Trace 0:", "Trace 1:");
    let moved = request(&[halt, lines[..from].concat(), other].concat());
    assert_eq!(moved.instructions, whole.instructions);
    assert_eq!(moved.functions, whole.functions);
    let cpus: Vec<usize> = moved.stages.iter().map(|(stage, _)| stage.cpu).collect();
    assert!(cpus.is_sorted() && cpus.first() == Some(&0) && cpus.last() == Some(&1), "{cpus:?}");
    // The clients' CPU is not the host's.
    let clients: String =
        lines.iter().map(|line| [line.replace("Trace 0:", "Trace 2:"), (*line).to_owned()].concat()).collect();
    assert_eq!(recorded(&clients).0, recorded(LOG).0);
}

#[test]
fn a_reply_ends_a_request_where_the_driver_returns() {
    let (requests, names) = recorded(LOG);
    let last = requests[0].as_ref().unwrap().last().unwrap();
    assert_eq!(names.get(last.function).unwrap().mark, Mark::Transmit);
    // The last line is the next interrupt's.
    let lines: Vec<&str> = LOG.split_inclusive('\n').collect();
    assert_eq!(recorded(&lines[..lines.len() - 1].concat()).0, [Err(Incomplete::NoEnd)]);
}

#[test]
fn odd_bytes_change_nothing() {
    let mut odd = vec![b'x'; 5_000];
    odd.extend_from_slice(b"\n\n\xff\xfe\nTrace 0: [\n");
    let (mut cutter, mut names) = (Cutter::new(2), names());
    for part in [&odd[..], LOG.as_bytes(), &odd] {
        cutter.read(part, &mut names);
    }
    assert_eq!(cutter.finish(&names), recorded(LOG).0);
}

#[test]
fn what_was_told_and_not_reached_is_taken_back() {
    let line = LOG.lines().nth(100).unwrap();
    let again = format!("{line}\nStopped execution of TB chain before 0x7f0000000000 [ffffffff814340e0] \n{line}\n");
    let doubled = LOG.replacen(&format!("{line}\n"), &again, 1);
    assert_eq!(recorded(&doubled).0, recorded(LOG).0);
}

/// A request of synthetic functions with these levels and marks.
fn made(functions: &[(Level, Mark, u64)]) -> Request {
    let mut names = Names::default();
    let run = |(at, (level, mark, count)): (usize, &(Level, Mark, u64))| {
        let function = Function { level: *level, name: format!("f{at}"), mark: mark.clone() };
        Run { cpu: 0, function: names.add(function), count: *count }
    };
    let runs: Vec<Run> = functions.iter().enumerate().map(run).collect();
    Request::of(&runs, &names)
}

#[test]
fn without_a_guest_the_last_program_is_the_server() {
    let (kernel, user) = (Level::HostKernel, Level::HostUser);
    let server = || Mark::Thread(Thread::Process("sockperf".into()));
    let request = made(&[
        (kernel, Mark::Interrupt, 3),
        (kernel, Mark::Switch, 4),
        (user, Mark::Thread(Thread::Process("ontime daemon".into())), 2),
        (kernel, Mark::Switch, 1),
        (kernel, Mark::None, 5),
        (kernel, Mark::Switch, 1),
        (kernel, Mark::None, 6),
        (user, server(), 7),
        (kernel, Mark::None, 8),
        (user, server(), 9),
        (kernel, Mark::Transmit, 10),
    ]);
    let stage = |phase, thread, level| Stage { phase, cpu: 0, thread, level };
    let [sockperf, daemon] = ["sockperf", "ontime daemon"].map(|name| move || Thread::Process(name.into()));
    assert_eq!(
        request.stages,
        [
            (stage(Phase::HostReceive, Thread::Interrupt, kernel), 7),
            (stage(Phase::HostReceive, daemon(), user), 2),
            (stage(Phase::HostReceive, daemon(), kernel), 1),
            (stage(Phase::HostReceive, Thread::Other, kernel), 6),
            (stage(Phase::HostReceive, sockperf(), kernel), 6),
            (stage(Phase::Server, sockperf(), user), 16),
            (stage(Phase::Server, sockperf(), kernel), 8),
            (stage(Phase::HostSend, sockperf(), kernel), 10),
        ]
    );
}

#[test]
fn median_and_slowest_stand_side_by_side() {
    let of = |count, more: &[(Level, Mark, u64)]| {
        let mut all = vec![(Level::HostKernel, Mark::Interrupt, count), (Level::HostKernel, Mark::Switch, 1)];
        all.extend_from_slice(more);
        all.push((Level::GuestKernel, Mark::Thread(Thread::Vcpu), 10));
        made(&all)
    };
    let slow =
        of(20, &[(Level::HostKernel, Mark::Thread(Thread::Softirq), 2_000), (Level::HostKernel, Mark::Switch, 1)]);
    let requests = [slow, of(20, &[]), of(21, &[]), of(19, &[])];
    let missed = BTreeMap::from([(Incomplete::NoEnd.to_string(), 2)]);
    let (method, median) = Method::new(("partitioned", "P"), &requests, &missed).unwrap();
    method.check().unwrap();
    assert_eq!((method.median, method.slowest, median.instructions), (31, 2_032, 31));
    assert_eq!(method.requests, [2_032, 31, 32, 30]);
    let threads: Vec<&str> = method.stages.iter().map(|row| row.thread.as_str()).collect();
    assert_eq!(threads, ["interrupt", "softirq's thread", "vCPU"]);
    assert_eq!((method.stages[1].median, method.stages[1].slowest), (0, 2_001));
    assert!(method.notes[0].starts_with("2 of them not: the NIC's driver sent no reply"), "{:?}", method.notes);
    let document = Document {
        path_version: PATH_VERSION,
        kernel: "7.2".into(),
        cpus: 1,
        command: "ontime-lab bench path".into(),
        created: "now".into(),
        methods: vec![method],
        notes: Vec::new(),
    };
    let json = serde_json::to_string(&document).unwrap();
    assert_eq!(serde_json::from_str::<Document>(&json).unwrap(), document);
    let text = table(&document);
    assert!(text.contains("median 31") && text.contains("slowest 2,032"), "{text}");
    assert!(sequence("partitioned", &median).contains("20\t1\thost receive\t0\tinterrupt\thost kernel\tf1\n"));
    assert!(matches!(Method::new(("m", "M"), &[], &missed), Err(ReportError::Nothing(_))));
}

#[test]
fn a_longer_request_is_told_with_its_stages_and_functions() {
    let document = |kernel: &str, napi: u64, guest: u64| {
        let request = made(&[
            (Level::HostKernel, Mark::Interrupt, 1_000),
            (Level::HostKernel, Mark::Switch, 100),
            (Level::HostKernel, Mark::Thread(Thread::Softirq), napi),
            (Level::HostKernel, Mark::Switch, 100),
            (Level::GuestKernel, Mark::Thread(Thread::Vcpu), guest),
            (Level::HostKernel, Mark::Transmit, 800),
        ]);
        let (method, _) = Method::new(("partitioned", "P"), &[request], &BTreeMap::new()).unwrap();
        Document {
            path_version: PATH_VERSION,
            kernel: kernel.into(),
            cpus: 1,
            command: String::new(),
            created: String::new(),
            methods: vec![method],
            notes: Vec::new(),
        }
    };
    let one: Tolerance = "1".parse().unwrap();
    let baseline = document("7.2", 20_000, 30_000);
    // 52,000 instructions: 500 more are within 1 %, 600 are not, wherever others were saved.
    for (napi, guest) in [(20_000, 30_000), (20_500, 30_000), (9_000, 30_000), (21_000, 29_000)] {
        let comparison = compare(&document("7.2", napi, guest), &baseline, one);
        assert_eq!((comparison.compared, comparison.regressions.len()), (1, 0), "{comparison:?}");
    }
    let found = compare(&document("7.2", 20_600, 30_000), &baseline, one).regressions;
    let stage = "host receive, softirq's thread, host kernel +600";
    assert_eq!(
        found,
        [format!(
            "partitioned: 52,600 instructions, 1.15 % above the baseline's 52,000; most in the stages {stage}; in the \
             functions f2 (host kernel) +600"
        )]
    );
    assert_eq!(compare(&document("7.2", 20_100, 30_000), &baseline, "0".parse().unwrap()).regressions.len(), 1);
    // More long requests are no regression while the median or the 40th percentile stays.
    let of = |requests: &[u64]| {
        let mut document = document("7.2", 20_000, 30_000);
        let mut sorted = requests.to_vec();
        sorted.sort_unstable();
        document.methods[0].median = sorted[(sorted.len() - 1) / 2];
        document.methods[0].requests = requests.to_vec();
        document
    };
    let usual = of(&[90_000, 50_000, 50_000, 50_000, 51_000]);
    for (requests, regressions) in [
        ([51_000, 51_000, 50_000, 51_000, 50_000], 0),
        ([50_000, 50_000, 51_000, 50_600, 90_000], 0),
        ([90_000, 50_600, 50_600, 50_600, 51_600], 1),
        ([90_000, 90_000, 50_000, 50_500, 90_000], 0),
        ([50_000, 51_000, 51_000, 51_000, 51_000], 1),
    ] {
        assert_eq!(compare(&of(&requests), &usual, one).regressions.len(), regressions, "{requests:?}");
    }
    // Neither another kernel, nor another number of CPUs, nor another method is compared.
    let mut two = document("7.2", 90_000, 30_000);
    two.cpus = 2;
    assert!(compare(&two, &baseline, one).left_out[0].contains("CPUs: 2; the baseline: Linux 7.2, CPUs: 1"));
    let other = compare(&document("7.3", 90_000, 30_000), &baseline, one);
    assert_eq!((other.compared, other.regressions.len()), (0, 0));
    assert!(other.left_out[0].contains("Linux 7.3, CPUs: 1; the baseline: Linux 7.2, CPUs: 1"), "{other:?}");
    let mut renamed = document("7.2", 90_000, 30_000);
    renamed.methods[0].method = "threaded".into();
    assert!(compare(&renamed, &baseline, one).left_out[0].contains("the baseline does not have it"));
}

#[test]
fn the_schema_in_the_documentation_is_that_of_the_code() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/results/bench/path.schema.json");
    let schema = serde_json::to_string_pretty(&schemars::schema_for!(Document)).unwrap() + "\n";
    if std::env::var_os("ONTIME_BLESS").is_some() {
        std::fs::write(path, &schema).unwrap();
    }
    let written = std::fs::read_to_string(path).unwrap();
    assert_eq!(written, schema, "raise PATH_VERSION, then see docs/results/bench/path.md");
}
