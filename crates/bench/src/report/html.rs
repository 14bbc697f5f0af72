//! The page: one HTML file that needs nothing else, in the frame of [`ontime_figures::page`].
//!
//! In: a [`Report`]. Out: HTML. Text from the report is escaped by the template.

use maud::{Markup, html};
use ontime_figures::{number, page};

use super::charts::{TimeAxis, cdf, colour, histogram, stroke, tail};
use super::{Row, condition, groups, rows, timed, unfavourable};
use crate::rt_server::HOST_PROCESS;
use crate::schema::{Bound, Clock, Distribution, Goal, Load, MethodResult, Report};

/// The report as one self-contained page.
pub fn html(report: &Report) -> String {
    let title = format!("Ontime benchmark: {}", report.experiment);
    page(
        &title,
        "",
        &html! {
            (head(report))
            (comparison(report))
            (segments(report))
            (inversions(report))
            (rules(report))
            (throughput(report))
            (connections(report))
            (late(report))
            (deadlines(report))
            (host_time(report))
            (goal_table(report))
            (against(report))
            (distributions(report))
            (conditions(report))
            (definitions())
            (reproduce(report))
        },
    )
}

fn head(report: &Report) -> Markup {
    html! {
        h1 { (capital(timed(report))) ", method by method" }
        p.soft { "Ontime benchmark " code { (report.experiment) } ", " (report.created) ", seed " (report.seed) }
        @if let Some(sentence) = headline(report) { p.lead { (sentence) } }
    }
}

/// With a capital letter.
fn capital(words: &str) -> String {
    let mut letters = words.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// For each flood, the steadiest method with a VM beside vanilla, on the report's own clock and kernel.
fn headline(report: &Report) -> Option<String> {
    let sentences: Vec<String> =
        [Load::SmallPackets, Load::Tcp].iter().filter_map(|load| steadiest(report, *load)).collect();
    (!sentences.is_empty()).then(|| sentences.join(" "))
}

fn steadiest(report: &Report, load: Load) -> Option<String> {
    let series = crate::schema::kernel_series(&report.kernel);
    let on_topic = |result: &&MethodResult| {
        result.load == load
            && result.method != HOST_PROCESS
            && result.clock == report.clock
            && result.kernel_series() == series
            && result.latency_us.is_some()
    };
    let results: Vec<&MethodResult> = report.results.iter().filter(on_topic).collect();
    let p99 = |result: &MethodResult| result.latency_us.map_or(f64::INFINITY, |latency| latency.p99);
    let best = results.iter().copied().min_by(|a, b| p99(a).total_cmp(&p99(b)))?;
    let vanilla = results.iter().copied().find(|result| result.method == "vanilla")?;
    let (own, other) = (best.latency_us?, vanilla.latency_us?);
    if best.method == "vanilla" {
        return Some(format!(
            "No method had a lower p99 under {} than vanilla Linux ({} µs).",
            load.words(),
            number::us(other.p99)
        ));
    }
    Some(format!(
        "Under {}, {} answered 99 % of requests within {} µs and every one of the {} answered within {} µs; vanilla \
         Linux needed {} µs and {} µs. That is a p99 {} times lower, on the {} clock.",
        load.words(),
        best.label,
        number::us(own.p99),
        number::count(best.count),
        number::us(own.max),
        number::us(other.p99),
        number::us(other.max),
        number::significant(other.p99 / own.p99),
        best.clock.name(),
    ))
}

fn comparison(report: &Report) -> Markup {
    html! {
        h2 { "The paper's table, and ours" }
        div.scroll tabindex="0" role="region" aria-label="Comparison table" { table {
            caption { "Times in µs. An en dash was not measured, or the paper's text does not state it." }
            thead {
                tr {
                    th.left rowspan="2" scope="col" { "method" }
                    th.paper colspan="4" scope="colgroup" { "the paper" }
                    th colspan="10" scope="colgroup" { "ours" }
                }
                tr {
                    @for name in ["mean", "p99", "sd", "Gbit/s"] { th.paper scope="col" { (name) } }
                    @for name in ["count", "mean", "p50", "p99", "p99.9", "max", "sd", "Gbit/s", "CPU", "p99 vs vanilla"] {
                        th scope="col" { (name) }
                    }
                }
            }
            @for group in rows(report).chunk_by(|a, b| group_of(a) == group_of(b)) {
                tbody { @for row in group { (comparison_row(row)) } }
            }
        } }
    }
}

/// Rows of one clock and kernel series stand together; the paper's own stand apart.
fn group_of<'a>(row: &Row<'a>) -> Option<(Clock, &'a str)> {
    row.result.map(|result| (result.clock, result.kernel_series()))
}

fn comparison_row(row: &Row<'_>) -> Markup {
    let (result, paper) = (row.result, row.paper);
    let latency = result.and_then(|result| result.latency_us);
    let figures: [fn(&Distribution) -> f64; 6] = [|d| d.mean, |d| d.p50, |d| d.p99, |d| d.p99_9, |d| d.max, |d| d.sd];
    html! {
        tr {
            th scope="row" {
                @match (result, paper) {
                    (Some(result), _) => { (key(result)) (result.label) small { (condition(result)) } }
                    (None, Some(paper)) => { (paper.method) small { "the paper only" } }
                    (None, None) => {}
                }
            }
            td.paper { (cell(paper.map(|paper| paper.mean_us), number::us)) }
            td.paper { (cell(paper.map(|paper| paper.p99_us), number::us)) }
            td.paper { (cell(paper.map(|paper| paper.sd_us), number::us)) }
            td.paper { (cell(paper.map(|paper| paper.bulk_gbps), number::significant)) }
            td { (cell(result.map(|result| result.count), number::count)) }
            @for figure in figures { td { (cell(latency.as_ref().map(figure), number::us)) } }
            td { (cell(result.and_then(|result| result.bulk_gbps), number::significant)) }
            td { (cell(result.and_then(|result| result.cpu_share), number::percent)) }
            td { (cell(row.below_vanilla, number::times)) }
        }
    }
}

fn cell<T>(value: Option<T>, print: impl Fn(T) -> String) -> String {
    value.map_or_else(|| "–".to_string(), print)
}

/// A short stroke in the method's colour.
fn key(result: &MethodResult) -> Markup {
    html! {
        svg.key viewBox="0 0 30 10" aria-hidden="true" {
            path class=(format!("{} {}", stroke(result), colour(&result.method))) d="M1 5L29 5" {}
        }
    }
}

/// A result's row begins so.
fn row_head(result: &MethodResult) -> Markup {
    html! { th scope="row" { (key(result)) (result.label) small { (condition(result)) } } }
}

/// A table whose first `left` columns are text; of text alone, it is broken into lines.
fn table(label: &str, left: usize, heads: &[&str], body: Markup) -> Markup {
    html! {
        div.scroll tabindex="0" role="region" aria-label=(label) { table class=[(left == heads.len()).then_some("wrap")] {
            thead { tr { @for (place, name) in heads.iter().enumerate() {
                th class=[(place < left).then_some("left")] scope="col" { (name) }
            } } }
            (body)
        } }
    }
}

/// Where the requests' time went, where the host was traced.
fn segments(report: &Report) -> Markup {
    if report.results.iter().all(|result| result.segments.is_empty()) {
        return html! {};
    }
    html! {
        h2 { "Segments of the way" }
        p { "By the trace in the host, µs on its clock; the probes' own cost is in them." }
        (table("Segments", 2, &["method", "segment", "requests", "min", "mean", "p50", "p95", "p99", "p99.9", "max"], html! {
            @for result in &report.results {
                tbody { @for of in &result.segments { tr {
                    (row_head(result))
                    td.left { (of.segment) }
                    td { (number::count(of.count)) }
                    @for figure in [of.min_us, of.mean_us, of.p50_us, of.p95_us, of.p99_us, of.p99_9_us, of.max_us] {
                        td { (number::us(figure)) }
                    }
                } } }
            }
        }))
    }
}

/// Who was in the way, where the host was traced for that.
fn inversions(report: &Report) -> Markup {
    if report.results.iter().all(|result| result.inversions.is_none()) {
        return html! {};
    }
    html! {
        h2 { "Priority inversions" }
        @for (result, of) in report.results.iter().filter_map(|result| Some((result, result.inversions.as_ref()?))) {
            p {
                (result.method) ", " (result.load.words()) ": " (number::count(of.hindered)) " of " (number::count(of.requests)) " requests in "
                (number::significant(of.duration_s)) " s met \
                    one; " (number::count(of.unnamed)) " were too many to be named."
            }
        }
        (table("Inversions", 1, &["method", "inversion", "requests", "longest, µs"], html! {
            @for result in &report.results {
                tbody { @for row in result.inversions.iter().flat_map(|of| &of.rows) { tr {
                    (row_head(result))
                    td.left { (row.words()) }
                    td { (number::count(row.requests)) }
                    td { (number::us(row.max_us)) }
                } } }
            }
        }))
    }
}

/// Zero-loss throughput, and what adaptive polling saved.
fn throughput(report: &Report) -> Markup {
    if report.results.iter().all(|result| result.zero_loss.is_none() && result.polling.is_none()) {
        return html! {};
    }
    html! {
        h2 { "Throughput without loss" }
        p { "The highest rate at which every frame was answered, by a binary search (RFC 2544). On the virtual clock \
            it is a count of instructions." }
        (table("Throughput", 1, &["method", "frame, bytes", "frames/s without loss", "frames/s with loss", "trials", "frames each", "polled, s", "rested, s"], html! {
            tbody { @for result in report.results.iter().filter(|of| of.zero_loss.is_some() || of.polling.is_some()) { tr {
                (row_head(result))
                td { (cell(result.frame_bytes.map(u64::from), number::count)) }
                td { (cell(result.zero_loss.map(|of| of.frames_per_s), number::significant)) }
                td { (cell(result.zero_loss.and_then(|of| of.lossy_frames_per_s), number::significant)) }
                td { (cell(result.zero_loss.map(|of| u64::from(of.trials)), number::count)) }
                td { (cell(result.zero_loss.map(|of| of.frames_each), number::count)) }
                td { (cell(result.polling.map(|of| of.polled_s), number::significant)) }
                td { (cell(result.polling.map(|of| of.saved_s), number::significant)) }
            } } }
        }))
    }
}

/// Fresh connections a second, where they were counted.
fn connections(report: &Report) -> Markup {
    if report.results.iter().all(|result| result.connections.is_none()) {
        return html! {};
    }
    html! {
        h2 { "Fresh connections" }
        p { "TCP connections of one request each, answered and closed by both sides, at the NIC. On the virtual clock \
            a second is a count of instructions." }
        (table("Connections", 1, &["method", "a second", "connections", "clients at once", "CPU"], html! {
            tbody { @for (result, of) in report.results.iter().filter_map(|of| Some((of, of.connections?))) { tr {
                (row_head(result))
                td { (number::significant(of.per_s)) }
                td { (number::count(of.completed)) }
                td { (number::count(u64::from(of.clients))) }
                td { (cell(result.cpu_share, number::percent)) }
            } } }
        }))
    }
}

/// Answers that were late or lost, where there is a time for them.
fn late(report: &Report) -> Markup {
    if report.results.iter().all(|result| result.late.is_none()) {
        return html! {};
    }
    html! {
        h2 { "Late answers" }
        p { "Answered later than the limit; a lost one was never answered. Times in µs." }
        (table("Late answers", 1, &["method", "asked", "late over", "late", "lost", "p99.99", "max"], html! {
            tbody { @for (result, late) in report.results.iter().filter_map(|of| Some((of, of.late?))) { tr {
                (row_head(result))
                td { (number::count(result.count)) }
                td { (number::us(late.over_us)) }
                td { (number::count(late.frames)) }
                td { (number::count(result.lost)) }
                td { (cell(result.latency_us.map(|of| of.p99_99), number::us)) }
                td { (cell(result.latency_us.map(|of| of.max), number::us)) }
            } } }
        }))
    }
}

/// Deadlines of real-time applications, where there are any.
fn deadlines(report: &Report) -> Markup {
    if report.results.iter().all(|result| result.rtas.is_none()) {
        return html! {};
    }
    html! {
        h2 { "Deadlines" }
        p { "By what the applications log on their guests' clock. Needed: slices over periods; reserved: what the host \
            set aside for that. CPUs." }
        (table("Deadlines", 1, &["method", "needed", "slack", "reserved", "jobs", "missed"], html! {
            tbody { @for (result, rtas) in report.results.iter().filter_map(|of| Some((of, of.rtas.as_ref()?))) { tr {
                (row_head(result))
                td { (number::significant(rtas.needed_cpus)) }
                td { (number::significant(rtas.slack_cpus)) }
                td { (cell(rtas.reserved_cpus, number::significant)) }
                td { (number::count(result.count)) }
                td { (number::count(rtas.missed)) }
            } } }
        }))
    }
}

/// CPU time of the host for a guest that asks for bandwidth.
fn host_time(report: &Report) -> Markup {
    if report.results.iter().all(|result| result.host_time.is_none()) {
        return html! {};
    }
    html! {
        h2 { "What asking costs the host" }
        p { "CPU time of its processes a change of a guest's bandwidth, beyond what they use anyway, µs." }
        (table("Host time", 1, &["method", "changes", "device process", "daemon", "pacers", "together"], html! {
            tbody { @for (result, of) in report.results.iter().filter_map(|of| Some((of, of.host_time?))) { tr {
                (row_head(result))
                td { (number::count(result.count)) }
                @for figure in [of.device_us, of.daemon_us, of.pacers_us, of.sum_us()] { td { (number::us(figure)) } }
            } } }
        }))
    }
}

/// What the doctor says of rules that were switched off.
fn rules(report: &Report) -> Markup {
    if report.results.iter().all(|result| result.doctor.is_none()) {
        return html! {};
    }
    html! {
        h2 { "What ontime doctor says of each rule that is switched off" }
        (table("Doctor", 4, &["rule", "state", "found", "remedy"], html! {
            tbody { @for row in report.results.iter().filter_map(|result| result.doctor.as_ref()) { tr {
                th scope="row" { (row.rule) }
                td.left { (row.state) }
                td.left { (row.found) }
                td.left { (row.remedy) }
            } } }
        }))
    }
}

fn goal_table(report: &Report) -> Markup {
    if report.goals.is_empty() {
        return html! {};
    }
    html! {
        h2 { "Goals" }
        div.scroll tabindex="0" role="region" aria-label="Goals" { table.wrap {
            thead { tr {
                th.left scope="col" { "goal" }
                th.left scope="col" { "kernel" }
                th scope="col" { "target" }
                th scope="col" { "reached" }
                th.left scope="col" { "verdict" }
                th.left scope="col" { "from" }
            } }
            tbody { @for goal in &report.goals { (goal_row(goal)) } }
        } }
    }
}

fn goal_row(goal: &Goal) -> Markup {
    let bound = if goal.bound == Bound::AtLeast { "≥" } else { "≤" };
    let (class, verdict) = match (goal.met, goal.binding) {
        (Some(true), _) => ("good", "✓ met"),
        (Some(false), true) => ("bad", "✗ not met"),
        (Some(false), false) => ("soft", "✗ not met"),
        (None, _) => ("soft", "not measured"),
    };
    html! {
        tr {
            th scope="row" { (goal.text) }
            td.left { (goal.kernel_series) @if !goal.binding { small { "for information" } } }
            td { (bound) " " (number::significant(goal.target)) }
            td { (cell(goal.actual, number::significant)) }
            td class=(format!("left verdict {class}")) { (verdict) }
            td.left.soft { (goal.figures) }
        }
    }
}

fn against(report: &Report) -> Markup {
    let sentences = unfavourable(report);
    html! {
        h2 { "Unfavourable figures" }
        @if sentences.is_empty() {
            p { "None: no goal was missed, nothing was lost, and no figure is more than 5 % worse than vanilla's." }
        } @else {
            ul { @for sentence in sentences { li { (sentence) } } }
        }
    }
}

fn distributions(report: &Report) -> Markup {
    let time = TimeAxis::of(report.results.iter());
    html! {
        h2 { "Distributions" }
        p { "All charts share one logarithmic time axis. Dashed lines are without flood, dotted ones under small \
            packets. The dotted lines in a histogram are its p50, p99 and maximum." }
        @for (group, (clock, series, results)) in groups(report).into_iter().enumerate() {
            @let drawn: Vec<&MethodResult> = results.iter().copied().filter(|result| result.count > 0).collect();
            h3 { "Linux " (series) ", " (clock.name()) " clock" }
            @if drawn.is_empty() {
                p.empty { "No request was counted here." }
            } @else {
                (legend(&drawn))
                div.charts {
                    figure { (cdf(&format!("cdf{group}"), &drawn, time)) figcaption { "Share of requests answered within a time." } }
                    figure { (tail(&format!("tail{group}"), &drawn, time)) figcaption { "Share of requests slower than a time; a dot is the slowest request." } }
                }
                div.histograms {
                    @for (place, result) in drawn.iter().enumerate() {
                        figure {
                            figcaption { (key(result)) (result.label) ", " (result.load.words()) (spread(result)) }
                            (histogram(&format!("histogram{group}-{place}"), result, time))
                        }
                    }
                }
            }
        }
    }
}

fn spread(result: &MethodResult) -> String {
    result.latency_us.map_or_else(String::new, |latency| {
        let (p50, p99, max) = (number::us(latency.p50), number::us(latency.p99), number::us(latency.max));
        format!(": p50 {p50}, p99 {p99}, max {max} µs")
    })
}

fn legend(results: &[&MethodResult]) -> Markup {
    html! {
        ul.legend {
            @for result in results { li { (key(result)) (result.label) ", " (result.load.words()) } }
        }
    }
}

/// How each run went: what was lost, how requests arrived, when the slowest came.
fn conditions(report: &Report) -> Markup {
    html! {
        h2 { "How the runs went" }
        div.scroll tabindex="0" role="region" aria-label="Conditions of the runs" { table {
            caption { "Every request is counted in exactly one column from counted to warm-up. Gaps are from a reply \
                to the next request, at the NIC, in ms." }
            thead { tr {
                th.left scope="col" { "method" }
                @for name in ["length, s", "requests", "counted", "lost", "open at end", "batched", "duplicates", "warm-up", "gap min", "gap mean", "gap max", "arrival grid, µs", "p99, 95 % interval, µs", "beyond p99.9", "max at, s"] {
                    th scope="col" { (name) }
                }
            } }
            tbody { @for result in &report.results { (condition_row(result)) } }
        } }
        @for result in report.results.iter().filter(|result| !result.notes.is_empty()) {
            h3 { (result.label) " (" (condition(result)) ")" }
            ul { @for note in &result.notes { li { (note) } } }
        }
    }
}

fn condition_row(result: &MethodResult) -> Markup {
    let wire = &result.wire;
    let counts = [wire.requests, wire.counted, wire.lost, wire.open_at_end, wire.batched, wire.duplicates, wire.warmup];
    let gap = |pick: fn(&Distribution) -> f64| {
        cell(result.interval_us.as_ref().map(pick), |us| number::significant(us / 1e3))
    };
    let interval = |latency: Distribution| {
        let high = latency.p99_high.map_or_else(|| "unknown".to_string(), number::us);
        format!("{} to {high}", number::us(latency.p99_low))
    };
    html! {
        tr {
            (row_head(result))
            td { (number::significant(result.duration_s)) }
            @for count in counts { td { (number::count(count)) } }
            td { (gap(|d| d.min)) } td { (gap(|d| d.mean)) } td { (gap(|d| d.max)) }
            td { (cell(result.arrival_quantum_us, number::us)) }
            td { (cell(result.latency_us, interval)) }
            td { (cell(result.latency_us, |latency| number::count(latency.beyond_p99_9))) }
            td { (cell(result.latency_us.and_then(|latency| latency.max_at_s), number::significant)) }
        }
    }
}

fn definitions() -> Markup {
    html! {
        h2 { "What the figures are" }
        dl {
            dt { "Response time" } dd { "From the request's to the reply's passage of the host's NIC, stamped outside the host: no delay of the client is in it." }
            dt { "Percentiles" } dd { "Nearest rank: a sample that was measured. SD is the sample's (n - 1). All are exact, not taken from the histogram." }
            dt { "95 % interval" } dd { "Distribution-free, from order statistics; it supposes independent samples." }
            dt { "Closed loop" } dd { "One request is out at a time, as in the paper: a slow reply delays the requests after it." }
            dt { "Gbit/s" } dd { "TCP payload that the bulk VMs acknowledged between the first and the last RT request; 10⁹ bit." }
            dt { "CPU" } dd { "Busy share of all of the host's CPUs." }
            dt { "Batched" } dd { "The emulator released it in the same instant as a request before it, so it is not a measurement of its own." }
        }
    }
}

fn reproduce(report: &Report) -> Markup {
    let mut clocks: Vec<Clock> = report.results.iter().map(|result| result.clock).chain([report.clock]).collect();
    clocks.sort_unstable();
    clocks.dedup();
    html! {
        h2 { "Clock, limits, and how to repeat it" }
        @for clock in clocks { p { strong { (clock.name()) " clock. " } (clock.meaning()) } }
        @for conditions in paper_conditions(report) {
            p { strong { "The paper. " } (conditions) ". Its machine is not ours: compare ratios between methods, not microseconds." }
        }
        @if !report.notes.is_empty() { ul { @for note in &report.notes { li { (note) } } } }
        dl { dt { "Machine" } dd { (report.machine) } dt { "Kernel" } dd { (report.kernel) } dt { "Schema" } dd { "version " (report.schema_version) } }
        pre { code { (report.command) } }
    }
}

fn paper_conditions(report: &Report) -> Vec<String> {
    let mut all: Vec<String> =
        report.paper.iter().map(|paper| format!("{}: {}", paper.source, paper.conditions)).collect();
    all.dedup();
    all
}
