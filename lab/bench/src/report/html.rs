//! The page: one self-contained HTML file, in the frame of [`ontime_figures::page`].
//!
//! In: a [`Report`]. Out: HTML. Text from the report is escaped by the template.

use maud::{Markup, html};
use ontime_figures::{number, page};

use super::charts::{TimeAxis, cdf, colour, histogram, stroke, tail};
use super::{Row, condition, experiment, groups, own, rows, timed, unfavourable};
use crate::experiments::rt_server::HOST_PROCESS;
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
            (figures(report))
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

/// The text with a capital letter.
fn capital(words: &str) -> String {
    let mut letters = words.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// For each flood, the comparison of vanilla with the method with a VM that has the least deviation, on the report's
/// own clock and kernel.
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

/// Rows of one clock and kernel series form a group; the paper's rows form another.
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

/// A short line in the method's colour.
fn key(result: &MethodResult) -> Markup {
    html! {
        svg.key viewBox="0 0 30 10" aria-hidden="true" {
            path class=(format!("{} {}", stroke(result), colour(&result.method))) d="M1 5L29 5" {}
        }
    }
}

/// The first cell of a result's row.
fn row_head(result: &MethodResult) -> Markup {
    html! { th scope="row" { (key(result)) (result.label) small { (condition(result)) } } }
}

/// The experiment's own figures.
fn figures(report: &Report) -> Markup {
    let tables = own(report, true);
    let meaning = experiment(report).map_or("", |experiment| experiment.meaning());
    html! {
        @if !tables.is_empty() {
            h2 { "The experiment's own figures" }
            @if !meaning.is_empty() { p { (meaning) } }
        }
        @for own in &tables {
            @let class = own.has_sentences.then_some("wrap");
            div.scroll tabindex="0" role="region" aria-label="Own figures" { table class=[class] {
                thead { tr {
                    th.left scope="col" { "method" }
                    @for (head, words) in own.heads.iter().zip(&own.words) {
                        th class=[words.then_some("left")] scope="col" { (head) }
                    }
                } }
                tbody { @for (result, cells) in &own.rows { tr {
                    (row_head(result))
                    @for (cell, words) in cells.iter().zip(&own.words) {
                        td class=[words.then_some("left")] { @if cell.is_empty() { "–" } @else { (cell) } }
                    }
                } } }
            } }
        }
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

/// Details of each run: losses, gaps between requests, time of the slowest.
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
