//! `ontime top`: reserved CPU time, live: for each vCPU what it has reserved, used and missed, and the plan of the
//! present slice.

mod screen;
mod terminal;

use std::fmt::Write as _;
use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use serde::Serialize;

use self::screen::Screen;
use self::terminal::{Input, Terminal};
use crate::paths::Paths;
use crate::table::visible;
use crate::{api, client, table};

/// Columns of the picture of a slice.
const WIDTH: usize = 60;

/// `ontime top`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Seconds between two updates, over which use is measured: 0.1 to 60.
    #[arg(long, short, default_value = "1", value_parser = interval)]
    interval: Duration,
    /// Print one update, and exit.
    #[arg(long)]
    once: bool,
    /// Print JSON, one line per update: the answer of GET /v1/reservations, and the use since the last update.
    #[arg(long)]
    json: bool,
}

fn interval(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|_| format!("`{text}` is no number of seconds"))?;
    if (0.1..=60.0).contains(&seconds) { Ok(Duration::from_secs_f64(seconds)) } else { Err("0.1 to 60".to_owned()) }
}

/// The reservations at one time, and the CPU time used since the sample before.
#[derive(Debug, Serialize)]
struct Sample<'a> {
    /// Time since the sample before.
    seconds: f64,
    reservations: &'a api::Reservations,
    used: Vec<Used>,
}

/// A vCPU's use of one CPU, as fractions.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Used {
    vm: String,
    vcpu: u32,
    /// Within its reserved share.
    share: f64,
    /// Beyond its reserved share.
    beyond: f64,
    misses: u64,
    overruns: u64,
}

/// Shows reservations until interrupted, or once.
///
/// # Errors
/// Where no daemon answers, or standard output is closed.
pub(crate) fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    let read = || client::get::<api::Reservations>(&paths.socket(), "/v1/reservations");
    if !args.json && !args.once && std::io::stdout().is_terminal() && std::io::stdin().is_terminal() {
        return live(args.interval, read);
    }
    let (mut before, mut at) = (read()?, Instant::now());
    loop {
        std::thread::sleep(args.interval);
        let (now, seconds) = (read()?, at.elapsed().as_secs_f64());
        at = Instant::now();
        let used = used(&before, &now, seconds);
        let mut text = String::new();
        if args.json {
            let sample = Sample { seconds, reservations: &now, used };
            text = serde_json::to_string(&api::Versioned::of(&sample))?;
            text.push('\n');
        } else {
            show(&mut text, &now, &used)?;
        }
        let mut out = std::io::stdout().lock();
        out.write_all(text.as_bytes())?;
        out.flush()?;
        if args.once {
            return Ok(ExitCode::SUCCESS);
        }
        before = now;
    }
}

/// The live view, until `q`, Ctrl-C or a signal. It reacts to keys at once, and asks the daemon once per interval.
fn live(
    interval: Duration,
    read: impl Fn() -> Result<api::Reservations, client::ClientError>,
) -> anyhow::Result<ExitCode> {
    let mut view = View::new(read()?, interval);
    let mut terminal = Terminal::enter()?;
    let mut asked = Instant::now();
    loop {
        terminal.draw(&view.draw(terminal.size()))?;
        match terminal.key(interval.saturating_sub(asked.elapsed()))? {
            Input::End => return Ok(ExitCode::SUCCESS),
            Input::Key(key) if !view.screen.key(key) => return Ok(ExitCode::SUCCESS),
            Input::Key(_) | Input::Nothing => {}
        }
        if asked.elapsed() >= interval {
            view.take(read(), Instant::now());
            asked = Instant::now();
        }
    }
}

/// What the live view shows. An answer that fails, as while the daemon is upgraded, leaves the last figures.
struct View {
    screen: Screen,
    interval: Duration,
    /// The last answer, and when it came.
    last: (api::Reservations, Instant),
    /// The use between the last two answers.
    used: Option<Vec<Used>>,
    /// Why the last request failed.
    failed: Option<String>,
}

impl View {
    fn new(first: api::Reservations, interval: Duration) -> Self {
        Self { screen: Screen::default(), interval, last: (first, Instant::now()), used: None, failed: None }
    }

    fn take(&mut self, answer: Result<api::Reservations, impl std::fmt::Display>, at: Instant) {
        match answer {
            Ok(now) => {
                let seconds = at.saturating_duration_since(self.last.1).as_secs_f64();
                self.used = Some(used(&self.last.0, &now, seconds));
                (self.last, self.failed) = ((now, at), None);
            }
            Err(error) => self.failed = Some(error.to_string()),
        }
    }

    fn draw(&self, (width, height): (usize, usize)) -> String {
        match (&self.used, &self.failed) {
            (Some(used), failed) => self.screen.draw(&self.last.0, used, failed.as_deref(), (width, height)),
            (None, Some(why)) => table::cut(&visible(&format!("q: quit; no figures yet: {why}")), width) + "\n",
            (None, None) => format!("measuring for {} s; q: quit, ?: help\n", self.interval.as_secs_f64()),
        }
    }
}

fn used(before: &api::Reservations, now: &api::Reservations, seconds: f64) -> Vec<Used> {
    let of = |vcpu: &api::ReservedVcpu| {
        // A vCPU that is new since then starts at 0, and so does one that a back end has taken over again.
        let old = before.vcpus.iter().find(|old| old.tid == vcpu.tid && old.ran_seconds <= vcpu.ran_seconds);
        let rate = |new: f64, old: Option<f64>| (new - old.unwrap_or(0.0)).max(0.0) / seconds.max(1e-9);
        Used {
            vm: vcpu.vm.clone(),
            vcpu: vcpu.vcpu,
            share: rate(vcpu.ran_seconds, old.map(|old| old.ran_seconds)),
            beyond: rate(vcpu.beyond_seconds, old.map(|old| old.beyond_seconds)),
            misses: vcpu.misses.saturating_sub(old.map_or(0, |old| old.misses)),
            overruns: vcpu.overruns.saturating_sub(old.map_or(0, |old| old.overruns)),
        }
    };
    now.vcpus.iter().map(of).collect()
}

fn show(text: &mut String, now: &api::Reservations, used: &[Used]) -> anyhow::Result<()> {
    head(text, now)?;
    let rows: Vec<[String; COLUMNS]> =
        now.vcpus.iter().zip(used).enumerate().flat_map(|(index, (vcpu, used))| rows(index, vcpu, used)).collect();
    if rows.is_empty() {
        writeln!(text, "{}", none(now))?;
    } else {
        let mut out = Vec::new();
        table::write(&mut out, HEAD, &rows)?;
        text.push_str(&String::from_utf8_lossy(&out));
    }
    foot(text, now, WIDTH)?;
    Ok(())
}

/// Says why there is no row.
fn none(now: &api::Reservations) -> String {
    let why = if now.off.is_some() {
        "what reserves it does not run"
    } else if !now.refused.is_empty() || !now.requested.is_empty() {
        "none of the reservations below is in force"
    } else if !now.absent.is_empty() {
        "no VM of a reservation in sched.toml runs"
    } else {
        "neither sched.toml nor a program reserves any"
    };
    format!("no vCPU has reserved CPU time: {why}")
}

const COLUMNS: usize = 12;
const HEAD: [&str; COLUMNS] =
    ["", "VM", "VCPU", "BUDGET", "RESERVED", "GUEST", "USED", "BEYOND", "MISSES", "OVERRUNS", "PLACE", "DEADLINE IN"];

/// The lines above the table: totals, and the state of the slice.
fn head(text: &mut String, now: &api::Reservations) -> std::fmt::Result {
    let kept = now.reserve * now.cpus.len() as f64;
    write!(
        text,
        "{}: {:.3} CPUs {} of {}, {kept:.2} kept for others",
        now.backend,
        now.reserved,
        if now.foreseen { "would be reserved" } else { "reserved" },
        now.cpus.len()
    )?;
    match &now.slice {
        Some(slice) if slice.calm => writeln!(text, "; calm: no vCPU needs a plan ({} looks so far)", slice.looks)?,
        Some(slice) => {
            let (gone, length) = (slice.elapsed_us / 1e3, slice.length_us / 1e3);
            writeln!(text, "; slice {}: {gone:.1} of {length:.1} ms", slice.slices)?;
        }
        None => writeln!(text)?,
    }
    if let Some(why) = &now.off {
        writeln!(text, "NOT KEPT: {}", visible(why))?;
    }
    if let Some(why) = &now.uncounted {
        writeln!(text, "pacers take more CPU time than they could: {}", visible(why))?;
    }
    Ok(())
}

/// A vCPU's row, and one row for each deadline task that its guest publishes.
fn rows(index: usize, vcpu: &api::ReservedVcpu, used: &Used) -> Vec<[String; COLUMNS]> {
    let percent = |part: f64| format!("{:.1} %", part * 100.0);
    let millis = |us: f64| format!("{} ms", us / 1e3);
    let guest = vcpu.guest.as_ref();
    let guest = guest.map(|guest| format!("{} / {}", millis(guest.budget_us), millis(guest.period_us)));
    let whole = [
        letter(index).to_string(),
        vcpu.vm.clone(),
        vcpu.vcpu.to_string(),
        format!("{} / {}", millis(vcpu.budget_us), millis(vcpu.period_us)),
        percent(vcpu.bandwidth),
        guest.unwrap_or_else(|| "-".to_owned()),
        percent(used.share),
        percent(used.beyond),
        format!("{} (+{})", vcpu.misses, used.misses),
        format!("{} (+{})", vcpu.overruns, used.overruns),
        vcpu.place.clone().unwrap_or_else(|| "-".to_owned()),
        vcpu.deadline_in_us.map_or_else(|| "-".to_owned(), |us| format!("{:.1} ms", us / 1e3)),
    ];
    std::iter::once(whole).chain(tasks(vcpu)).collect()
}

/// The lines below the table: the picture of the slice, and the VMs without a reservation.
fn foot(text: &mut String, now: &api::Reservations, width: usize) -> std::fmt::Result {
    if let Some(slice) = now.slice.as_ref().filter(|slice| !slice.calm) {
        for cpu in &now.cpus {
            writeln!(text, "CPU {cpu:<3} |{}|", picture(now, slice, *cpu, width))?;
        }
    }
    for refused in &now.refused {
        writeln!(text, "refused: {}: {}", visible(&refused.subject), visible(&refused.message))?;
    }
    if !now.absent.is_empty() {
        writeln!(text, "not running: {}", visible(&now.absent.join(", ")))?;
    }
    now.requested.iter().try_for_each(|one| writeln!(text, "{}", requested(one)))
}

/// One line for a reservation that a program requested.
fn requested(one: &api::Requested) -> String {
    let (kind, of) = match &one.reserved_for {
        api::ReservedFor::Pod(uid) => ("pod", uid),
        api::ReservedFor::Cgroup(path) => ("cgroup", path),
        api::ReservedFor::Vm(name) => ("VM", name),
    };
    let what = match (one.budget_us, one.period_us) {
        (Some(budget), Some(period)) => {
            format!("{} x {} / {} ms", one.count, budget as f64 / 1e3, period as f64 / 1e3)
        }
        _ => "class only".to_owned(),
    };
    let cpus = one.cpus.as_ref().map_or_else(String::new, |cpus| {
        let cpus: Vec<String> = cpus.iter().map(u32::to_string).collect();
        format!(" on CPUs {}", cpus.join(","))
    });
    let owner = if one.owner.is_empty() { String::new() } else { format!("{}, ", one.owner) };
    let line = format!(
        "requested: {} ({owner}user {}) for {kind} {of}: {what}{cpus}, rt{}, {}, {:.0} s left",
        one.name, one.uid, one.level, one.state, one.left_seconds
    );
    visible(&line)
}

/// A row for each deadline task that the guest publishes, or one with question marks if they could not be read. The
/// host knows only the sum of a vCPU's tasks, so the budget of a single task is known only if it is the only one.
fn tasks(vcpu: &api::ReservedVcpu) -> Vec<[String; COLUMNS]> {
    let row = |guest: String, place: &str, deadline: String| {
        let mut row: [String; COLUMNS] = std::array::from_fn(|_| "-".to_owned());
        let cells = [
            (0, String::new()),
            (1, "  task".to_owned()),
            (2, vcpu.vcpu.to_string()),
            (5, guest),
            (10, place.to_owned()),
            (11, deadline),
        ];
        for (column, text) in cells {
            if let Some(cell) = row.get_mut(column) {
                *cell = text;
            }
        }
        row
    };
    let Some(tasks) = &vcpu.tasks else { return vec![row("?".to_owned(), "?", "?".to_owned())] };
    let budget = match (&vcpu.guest, tasks.len()) {
        (Some(guest), 1) => format!("{} ms", guest.budget_us / 1e3),
        _ => "?".to_owned(),
    };
    let known = |task: &api::GuestTask| {
        let guest = format!("{budget} / {} ms", task.period_us / 1e3);
        row(guest, if task.active { "active" } else { "asleep" }, format!("{:.1} ms", task.deadline_in_us / 1e3))
    };
    tasks.iter().map(known).collect()
}

/// The letter of a vCPU in the picture.
fn letter(index: usize) -> char {
    let letters = ('A'..='Z').chain('a'..='z');
    letters.cycle().nth(index).unwrap_or('?')
}

/// One CPU's row of the picture: a letter for each vCPU, a dot for time without one, `*` at the present time.
fn picture(now: &api::Reservations, slice: &api::Slice, cpu: u32, width: usize) -> String {
    // In range: the positions are fractions of the slice, limited to its columns.
    let column = |us: f64| ((us / slice.length_us.max(1.0) * width as f64).round() as usize).min(width);
    let mut row = vec!['.'; width];
    for part in slice.plan.iter().filter(|part| part.cpu == cpu) {
        let vcpu = now.vcpus.iter().position(|vcpu| vcpu.vm == part.vm && vcpu.vcpu == part.vcpu);
        let (from, to) = (column(part.start_us), column(part.end_us));
        for at in row.iter_mut().take(to).skip(from) {
            *at = vcpu.map_or('?', letter);
        }
    }
    if let Some(at) = row.get_mut(column(slice.elapsed_us).min(width.saturating_sub(1))) {
        *at = '*';
    }
    row.into_iter().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    pub(super) fn vcpu(vm: &str, tid: i32, ran: f64) -> api::ReservedVcpu {
        api::ReservedVcpu {
            vm: vm.to_owned(),
            class: "rt0".to_owned(),
            vcpu: 0,
            tid,
            budget_us: 3_000.0,
            period_us: 10_000.0,
            bandwidth: 0.3,
            guest: Some(api::Guest { budget_us: 1_250.0, period_us: 20_000.0 }),
            tasks: Some(vec![api::GuestTask { period_us: 20_000.0, deadline_in_us: 7_300.0, active: true }]),
            cpu: None,
            place: Some("planned".to_owned()),
            deadline_in_us: Some(4_000.0),
            ran_seconds: ran,
            beyond_seconds: ran / 2.0,
            overruns: 3,
            periods: 100,
            misses: 1,
            changes: 6,
            refused: 0,
        }
    }

    pub(super) fn reservations(vcpus: Vec<api::ReservedVcpu>) -> api::Reservations {
        let part =
            |vm: &str, start_us, end_us| api::PlannedPart { cpu: 0, vm: vm.to_owned(), vcpu: 0, start_us, end_us };
        api::Reservations {
            schema_version: api::SCHEMA_VERSION,
            backend: "paced".to_owned(),
            foreseen: false,
            off: None,
            uncounted: None,
            cpus: vec![0],
            reserve: 0.05,
            reserved: 0.6,
            vcpus,
            refused: vec![api::Problem { subject: "c\x1b[2J".to_owned(), message: "does not fit".to_owned() }],
            absent: vec!["d".to_owned()],
            requested: vec![api::Requested {
                name: "dra-1".to_owned(),
                owner: "driver".to_owned(),
                uid: 7,
                reserved_for: api::ReservedFor::Pod("7f0c".to_owned()),
                budget_us: Some(2_500),
                period_us: Some(10_000),
                count: 2,
                cpus: Some(vec![3, 4]),
                level: 1,
                micro_cpus: 500_000,
                lease_seconds: 60,
                left_seconds: 41.6,
                held: true,
                state: "waiting".to_owned(),
                tenants: vec![],
                why: None,
            }],
            capacity: api::Capacity::default(),
            slice: Some(api::Slice {
                calm: false,
                length_us: 10_000.0,
                elapsed_us: 6_000.0,
                slices: 7,
                looks: 70,
                plan: vec![part("a", 0.0, 3_000.0), part("b", 3_000.0, 6_000.0)],
            }),
        }
    }

    #[test]
    fn use_is_since_the_look_before_and_the_slice_is_drawn() {
        let before = reservations(vec![vcpu("a", 1, 1.0)]);
        let now = reservations(vec![vcpu("a", 1, 1.6), vcpu("b", 2, 0.4)]);
        let used = used(&before, &now, 2.0);
        let shares: Vec<(f64, u64)> = used.iter().map(|used| ((used.share * 100.0).round(), used.misses)).collect();
        assert_eq!(shares, [(30.0, 0), (20.0, 1)]);
        let mut text = String::new();
        show(&mut text, &now, &used).unwrap();
        assert!(text.contains(&format!("|{}{}*{}|", "A".repeat(18), "B".repeat(18), ".".repeat(23))), "{text}");
        assert!(text.contains("3 ms / 10 ms") && text.contains("30.0 %"), "{text}");
        assert_eq!(
            text.lines().filter(|line| line.contains("  task") && line.contains("1.25 ms / 20 ms")).count(),
            2,
            "{text}"
        );
        assert!(text.contains("7.3 ms") && text.contains("active"), "{text}");
        assert!(text.contains("not running: d") && !text.contains('\x1b'), "{text}");
        assert!(text.starts_with("paced: 0.600 CPUs reserved of 1, "), "{text}");
        let mut foreseen = String::new();
        head(&mut foreseen, &api::Reservations { foreseen: true, ..now }).unwrap();
        assert!(foreseen.starts_with("paced: 0.600 CPUs would be reserved of 1, "), "{foreseen}");
        let requested =
            "requested: dra-1 (driver, user 7) for pod 7f0c: 2 x 2.5 / 10 ms on CPUs 3,4, rt1, waiting, 42 s left\n";
        assert!(text.contains(requested), "{text}");
    }

    #[test]
    fn tasks_that_cannot_be_read_are_not_shown_as_none() {
        let shown = |tasks: Option<Vec<api::GuestTask>>| {
            let now = reservations(vec![api::ReservedVcpu { tasks, ..vcpu("a", 1, 1.0) }]);
            let mut text = String::new();
            show(&mut text, &now, &used(&now, &now, 1.0)).unwrap();
            let rows = text.lines().filter(|line| line.contains("  task"));
            let rows = rows.map(|row| row.split_whitespace().collect::<Vec<_>>().join(" ")).collect::<Vec<String>>();
            (rows, serde_json::to_value(&now).unwrap()["vcpus"][0]["tasks"].clone())
        };
        let (rows, json) = shown(None);
        assert_eq!(rows, ["task 0 - - ? - - - - ? ?"]);
        assert_eq!(json, serde_json::Value::Null);
        assert_eq!(shown(Some(Vec::new())), (Vec::new(), serde_json::json!([])));
    }

    /// In both views: no header without a row.
    #[test]
    fn where_no_vcpu_has_reserved_cpu_time_the_reason_is_said() {
        let all = reservations(vec![]);
        let nothing =
            api::Reservations { refused: vec![], absent: vec![], requested: vec![], slice: None, ..all.clone() };
        for (now, why) in [
            (nothing.clone(), "neither sched.toml nor a program reserves any"),
            (api::Reservations { absent: vec!["d".to_owned()], ..nothing.clone() }, "no VM of a reservation in sched"),
            (api::Reservations { refused: all.refused.clone(), ..nothing.clone() }, "none of the reservations below"),
            (api::Reservations { requested: all.requested.clone(), ..nothing.clone() }, "none of the reservations be"),
            (all.clone(), "none of the reservations below is in force"),
            (api::Reservations { off: Some("no BPF".to_owned()), ..all }, "what reserves it does not run"),
        ] {
            let mut once = String::new();
            show(&mut once, &now, &[]).unwrap();
            for text in [once, Screen::default().draw(&now, &[], None, (80, 24))] {
                assert!(text.contains(&format!("no vCPU has reserved CPU time: {why}")), "{text}");
                assert!(!text.contains("DEADLINE IN") && !text.contains("BUDGET"), "{text}");
                assert_eq!(text.contains("NOT KEPT: no BPF"), now.off.is_some(), "{text}");
            }
        }
    }

    /// As while the daemon is upgraded.
    #[test]
    fn a_daemon_that_does_not_answer_for_a_while_does_not_end_the_live_view() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut view = View::new(reservations(vec![vcpu("a", 1, 1.0)]), Duration::from_secs(1));
        view.last.1 = start;
        let none =
            || Err::<api::Reservations, _>("no daemon at /run/ontime/ontime.sock\x1b[2J: and more words than fit");
        let foot = |view: &View| view.draw((80, 24)).lines().last().unwrap().to_owned();
        view.take(none(), after(1));
        assert!(foot(&view).starts_with("q: quit; no figures yet: no daemon at "), "{}", foot(&view));
        view.take(Ok::<_, String>(reservations(vec![vcpu("a", 1, 1.5)])), after(2));
        assert!(foot(&view).ends_with("?: help, q: quit"), "{}", foot(&view));
        view.take(none(), after(3));
        let text = view.draw((80, 24));
        assert!(text.contains("25.0 %") && foot(&view).starts_with("q: quit; no new figures: no daemon at "), "{text}");
        assert!(text.lines().all(|line| line.chars().count() <= 80) && !text.contains('\x1b'), "{text}");
        assert!(view.screen.key(b'?') && !view.screen.key(b'q'));
        assert!(view.screen.key(b'?'));
        // Use is over the whole time since the last answer.
        view.take(Ok::<_, String>(reservations(vec![vcpu("a", 1, 1.9)])), after(6));
        assert!(view.draw((80, 24)).contains("10.0 %") && foot(&view).ends_with("q: quit"), "{}", view.draw((80, 24)));
    }

    #[test]
    fn intervals_have_a_range() {
        assert_eq!(interval("0.5"), Ok(Duration::from_millis(500)));
        for bad in ["0", "-1", "nan", "61", "x"] {
            assert!(interval(bad).is_err(), "{bad}");
        }
    }
}
