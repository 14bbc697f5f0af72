//! The page: one self-contained HTML file, in the frame of [`ontime_figures::page`].
//!
//! In: a [`Report`]. Out: HTML. Text from the report is escaped by the template. The first screen has one sentence
//! about the default method and the bars of all methods. Goals, unfavourable figures and the details of the runs are
//! folded.

use maud::{Markup, html};
use ontime_figures::{number, page};
use ontime_hostnet::Method;

use super::charts::{Drawn, Styles, TimeAxis, bars, cdf, histogram, tail};
use super::names::{Names, labels};
use super::{
    FigureTable, below_vanilla, counted_goals, experiment, figure_tables, paper_below, printed, timed, unfavourable,
    vanilla,
};
use crate::goals::Figure;
use crate::schema::{Bound, Clock, Distribution, Goal, Load, MethodResult, PaperRow, Report, kernel_series};

/// Maximum of figures in a table; more are in further tables below it, so that none is beyond the edge of a screen.
const COLUMNS: usize = 10;

/// Figures of the comparison, after the ratio to `vanilla`.
const FIGURES: [Figure; 9] = [
    Figure::P99,
    Figure::Max,
    Figure::P50,
    Figure::P99_9,
    Figure::Mean,
    Figure::Sd,
    Figure::Count,
    Figure::Bulk,
    Figure::Cpu,
];

/// The report as one self-contained page.
pub fn html(report: &Report) -> String {
    let title = format!("Ontime benchmark: {}", report.experiment);
    let names = Names::of(report);
    let styles = Styles::of(report);
    let results = report.results.iter().enumerate().map(|(place, result)| Drawn {
        result,
        method: names.method(place).to_owned(),
        condition: names.condition(place),
        words: names.description(place),
        style: styles.style(&result.method),
        below_vanilla: below_vanilla(report, result),
    });
    let drawn: Vec<Drawn<'_>> = results.collect();
    let groups = groups(report, &drawn);
    page(
        &title,
        "",
        &html! {
            (head(report, &groups))
            (overview(&groups))
            (comparison(report, &names, &drawn))
            (figures(report, &drawn))
            (goal_table(report))
            (against(report))
            (distributions(&groups))
            (remarks(report, &names))
            (conditions(&drawn))
            (definitions())
            (reproduce(report))
        },
    )
}

/// Results of one clock, kernel series, number of CPUs and load, which share a chart.
type Group<'d, 'a> = Vec<&'d Drawn<'a>>;

/// The order of the loads on the page. The first is the paper's.
const LOADS: [Load; 4] = [Load::Tcp, Load::SmallPackets, Load::LargePackets, Load::None];

/// The groups: first those on the report's own clock and kernel series, in the order of [`LOADS`].
fn groups<'d, 'a>(report: &Report, drawn: &'d [Drawn<'a>]) -> Vec<Group<'d, 'a>> {
    let key = |of: &Drawn<'_>| (of.result.clock, of.result.kernel_series().to_owned(), of.result.cpus, of.result.load);
    let mut groups: Vec<Group<'d, 'a>> = Vec::new();
    for of in drawn {
        match groups.iter_mut().find(|group| group.first().is_some_and(|first| key(first) == key(of))) {
            Some(group) => group.push(of),
            None => groups.push(vec![of]),
        }
    }
    groups.sort_by_key(|group| {
        let place = |result: &MethodResult| LOADS.iter().position(|load| *load == result.load);
        group.first().map(|first| (!is_on_topic(report, first.result), place(first.result)))
    });
    groups
}

/// Whether a result is on the report's own clock and kernel series.
fn is_on_topic(report: &Report, result: &MethodResult) -> bool {
    result.clock == report.clock && result.kernel_series() == kernel_series(&report.kernel)
}

fn is_measured(group: &[&Drawn<'_>]) -> bool {
    group.iter().any(|of| of.result.latency_us.is_some())
}

/// The title of a group; kernel, clock and CPUs are in it if the groups differ in them.
fn group_title(group: &[&Drawn<'_>], groups: &[Group<'_, '_>]) -> String {
    let Some(first) = group.first() else { return String::new() };
    let load = capital(first.result.load.description());
    let host = |of: &MethodResult| (of.clock, of.kernel_series().to_owned(), of.cpus);
    let (clock, series, cpus) = host(first.result);
    let is_same = |is_it: &dyn Fn(&MethodResult) -> bool| groups.iter().flatten().all(|other| is_it(other.result));
    if is_same(&|other| host(other) == host(first.result)) {
        return load;
    }
    let of_cpus = if is_same(&|other| other.cpus == cpus) { String::new() } else { format!(", CPUs: {cpus}") };
    format!("{load}, Linux {series}, {} clock{of_cpus}", clock.name())
}

fn head(report: &Report, groups: &[Group<'_, '_>]) -> Markup {
    html! {
        h1 { (capital(timed(report))) ", method by method" }
        p.soft {
            "Ontime benchmark " code { (report.experiment) } ", Linux " (kernel_series(&report.kernel)) ", "
            (report.clock.name()) " clock, " (report.created) ", seed " (report.seed)
        }
        @if let Some(sentence) = headline(report, groups) { p.lead { (sentence) } }
    }
}

/// The text with a capital letter.
fn capital(words: &str) -> String {
    let mut letters = words.chars();
    letters.next().map_or_else(String::new, |first| first.to_uppercase().chain(letters).collect())
}

/// The comparison of the default method with `vanilla`, on the report's own clock and kernel, under the first load that
/// both were measured under.
fn headline(report: &Report, groups: &[Group<'_, '_>]) -> Option<String> {
    let default = Method::default().name();
    let (of, own, other) = groups.iter().find_map(|group| {
        let of = group.iter().find(|of| of.result.method == default && is_on_topic(report, of.result))?;
        Some((*of, of.result.latency_us?, vanilla(report, of.result)?.latency_us?))
    })?;
    let load = of.result.load;
    let under = if load.floods() { format!("Under a {}", load.description()) } else { "Without a flood".to_owned() };
    let ratio = of.below_vanilla.map(|below| format!(": the p99 is {}", number::times(below)));
    let ratio = ratio.unwrap_or_default();
    Some(format!(
        "{under}, Ontime's default method ({default}) answered 99 % of requests within {} µs and the slowest of {} \
         within {} µs; vanilla Linux needed {} µs and {} µs{ratio}.",
        number::us(own.p99),
        number::count(of.result.count),
        number::us(own.max),
        number::us(other.p99),
        number::us(other.max),
    ))
}

/// The bars of all groups, on one axis.
fn overview(groups: &[Group<'_, '_>]) -> Markup {
    let time = TimeAxis::decades(groups.iter().flatten().map(|of| of.result));
    html! {
        @if groups.iter().any(|group| is_measured(group)) {
            div.charts {
                @for (place, group) in groups.iter().enumerate().filter(|(_, group)| is_measured(group)) {
                    @let title = group_title(group, groups);
                    figure {
                        figcaption { strong { (title) } }
                        (bars(&format!("bars{place}"), &format!("p99 and slowest request: {title}"), group, time))
                    }
                }
            }
            ul.legend {
                li { (swatch("p99")) "up to the p99: 99 % of requests took at most this time" }
                li { (swatch("beyond")) "up to the slowest request" }
                li { "At the end of a bar: vanilla's p99 divided by the method's." }
            }
        }
    }
}

/// A piece of a bar, for the legend.
fn swatch(class: &str) -> Markup {
    html! {
        svg.key viewBox="0 0 38 10" aria-hidden="true" {
            g class="bar m0" { rect class=(class) x="1" y="1" width="36" height="8" {} }
        }
    }
}

/// A column of a table. A cell without content was not measured.
struct Field {
    head: String,
    /// Whether it has words, which are wrapped.
    words: bool,
    cells: Vec<Option<Markup>>,
}

/// A column with a figure of each result.
fn field(head: &str, drawn: &[Drawn<'_>], print: impl Fn(&Drawn<'_>) -> Option<String>) -> Field {
    let cells = drawn.iter().map(|of| print(of).map(text)).collect();
    Field { head: head.to_owned(), words: false, cells }
}

fn text(words: String) -> Markup {
    html! { (words) }
}

/// A table with a row for each head. Columns without content are left out; there are at most [`COLUMNS`] side by side.
/// On a narrow screen each row is a card, with the column's head above each figure.
fn table(label: &str, first: &str, heads: &[Markup], fields: Vec<Field>) -> Markup {
    let is_measured = |field: &Field| field.cells.iter().any(Option::is_some);
    let fields: Vec<Field> = fields.into_iter().filter(is_measured).collect();
    html! {
        @for fields in fields.chunks(COLUMNS) {
            div.scroll tabindex="0" role="region" aria-label=(label) { table.cards {
                thead { tr {
                    th.left scope="col" { (first) }
                    @for field in fields { th class=[field.words.then_some("left")] scope="col" { (field.head) } }
                } }
                tbody { @for (row, head) in heads.iter().enumerate() { tr {
                    th scope="row" { (head) }
                    @for field in fields {
                        td class=[field.words.then_some("left")] data-head=(field.head) {
                            @if let Some(cell) = field.cells.get(row).and_then(Option::as_ref) { (cell) } @else { "–" }
                        }
                    }
                } } }
            } }
        }
    }
}

/// The first cell of a result's row.
fn row_head(drawn: &Drawn<'_>) -> Markup {
    html! {
        (drawn.key()) (drawn.method)
        @if !drawn.condition.is_empty() { small { (drawn.condition) } }
    }
}

fn row_heads(drawn: &[Drawn<'_>]) -> Vec<Markup> {
    drawn.iter().map(row_head).collect()
}

fn comparison(report: &Report, names: &Names, drawn: &[Drawn<'_>]) -> Markup {
    let figure = |figure: &Figure| field(figure.head(), drawn, |of| printed(*figure, of.result));
    let mut fields = vec![field("p99 vs vanilla", drawn, |of| of.below_vanilla.map(number::times))];
    fields.extend(FIGURES.iter().map(figure));
    html! {
        h2 { "The methods compared" }
        @if !names.same.is_empty() { p.soft { "In every case: " (names.same.join("; ")) "." } }
        (table("Comparison", "method", &row_heads(drawn), fields))
        dl.names { @for (method, label) in labels(report) { dt { (method) } dd { (label) } } }
        (paper(report))
    }
}

/// The paper's figures.
fn paper(report: &Report) -> Markup {
    let field = |head: &str, print: &dyn Fn(&PaperRow) -> Option<String>| Field {
        head: head.to_owned(),
        words: false,
        cells: report.paper.iter().map(|row| print(row).map(text)).collect(),
    };
    let fields = vec![
        field("p99 vs vanilla", &|row| paper_below(report, row).map(number::times)),
        field("p99, µs", &|row| Some(number::us(row.p99_us))),
        field("mean, µs", &|row| Some(number::us(row.mean_us))),
        field("sd, µs", &|row| Some(number::us(row.sd_us))),
        field("bulk, Gbit/s", &|row| Some(number::significant(row.bulk_gbps))),
    ];
    let heads: Vec<Markup> = report.paper.iter().map(|row| text(row.method.clone())).collect();
    html! {
        @if !report.paper.is_empty() {
            h3 { "The paper's figures" }
            (table("The paper's figures", "method", &heads, fields))
        }
    }
}

/// The experiment's own figures.
fn figures(report: &Report, drawn: &[Drawn<'_>]) -> Markup {
    let tables = figure_tables(report, true);
    let meaning = experiment(report).map_or("", |experiment| experiment.meaning());
    let head = |result: &MethodResult| {
        drawn.iter().find(|of| std::ptr::eq(of.result, result)).map_or_else(|| text(String::new()), row_head)
    };
    html! {
        @if !tables.is_empty() {
            h2 { "The experiment's own figures" }
            @if !meaning.is_empty() { p { (meaning) } }
        }
        @for own in &tables {
            @let heads: Vec<Markup> = own.rows.iter().map(|(result, _)| head(result)).collect();
            (table("Own figures", "method", &heads, own_fields(own)))
        }
    }
}

fn own_fields(own: &FigureTable<'_>) -> Vec<Field> {
    let cells = |column: usize| -> Vec<Option<Markup>> {
        let of = own.rows.iter().map(|(_, cells)| cells.get(column).filter(|cell| !cell.is_empty()).cloned());
        of.map(|cell| cell.map(text)).collect()
    };
    let columns = own.heads.iter().zip(&own.words).enumerate();
    columns.map(|(column, (head, words))| Field { head: head.clone(), words: *words, cells: cells(column) }).collect()
}

/// A folded part of the page.
fn folded(title: &str, summary: &str, content: &Markup) -> Markup {
    html! {
        details {
            summary { h2 { (title) } @if !summary.is_empty() { " " span.soft { (summary) } } }
            (content)
        }
    }
}

fn goal_table(report: &Report) -> Markup {
    if report.goals.is_empty() {
        return html! {};
    }
    let (goals, binding) = counted_goals(report);
    let met = goals.iter().filter(|goal| goal.met == Some(true)).count();
    let summary = format!("{met} of {} met{}", goals.len(), if binding { "" } else { ", for information" });
    let field = |head: &str, words: bool, print: &dyn Fn(&Goal) -> Option<Markup>| Field {
        head: head.to_owned(),
        words,
        cells: report.goals.iter().map(print).collect(),
    };
    let fields = vec![
        field("verdict", true, &|goal| Some(verdict(goal))),
        field("reached", false, &|goal| goal.actual.map(number::significant).map(text)),
        field("target", false, &|goal| {
            let bound = if goal.bound == Bound::AtLeast { "≥" } else { "≤" };
            Some(text(format!("{bound} {}", number::significant(goal.target))))
        }),
        field("Linux", true, &|goal| {
            Some(html! { (goal.kernel_series) @if !goal.binding { small { "for information" } } })
        }),
        field("from", true, &|goal| Some(text(goal.figures.clone()))),
    ];
    let heads: Vec<Markup> = report.goals.iter().map(|goal| text(goal.text.clone())).collect();
    folded("Goals", &summary, &table("Goals", "goal", &heads, fields))
}

fn verdict(goal: &Goal) -> Markup {
    let (class, verdict) = match (goal.met, goal.binding) {
        (Some(true), _) => ("good", "✓ met"),
        (Some(false), true) => ("bad", "✗ not met"),
        (Some(false), false) => ("soft", "✗ not met"),
        (None, _) => ("soft", "not measured"),
    };
    html! { span class=(format!("verdict {class}")) { (verdict) } }
}

fn against(report: &Report) -> Markup {
    let sentences = unfavourable(report);
    if sentences.is_empty() {
        return html! {
            h2 { "Unfavourable figures" }
            p { "None: no goal was missed, nothing was lost, and no figure is more than 5 % worse than vanilla's." }
        };
    }
    let list = html! { ul { @for sentence in &sentences { li { (sentence) } } } };
    folded("Unfavourable figures", &sentences.len().to_string(), &list)
}

fn distributions(groups: &[Group<'_, '_>]) -> Markup {
    let time = TimeAxis::of(groups.iter().flatten().map(|of| of.result));
    html! {
        h2 { "Distributions" }
        p { "All charts share one logarithmic time axis. A method has the same colour and dash in all of them. The \
            dotted lines in a histogram are its p50, p99 and maximum." }
        @for (place, group) in groups.iter().enumerate() {
            @let drawn: Vec<&Drawn<'_>> = group.iter().copied().filter(|of| of.result.count > 0).collect();
            h3 { (group_title(group, groups)) }
            @if drawn.is_empty() {
                p.empty { "No request was counted here." }
            } @else {
                ul.legend { @for of in &drawn { li { (of.key()) (of.method) } } }
                div.charts {
                    figure {
                        (cdf(&format!("cdf{place}"), &drawn, time))
                        figcaption { "Share of requests answered within a time." }
                    }
                    figure {
                        (tail(&format!("tail{place}"), &drawn, time))
                        figcaption { "Share of requests slower than a time; a dot is the slowest request." }
                    }
                    @for (number, of) in drawn.iter().enumerate() {
                        figure {
                            (histogram(&format!("histogram{place}-{number}"), of, time))
                            figcaption { (of.key()) (of.method) (spread(of.result)) }
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

/// The notes of the results, each once, then those of the report.
fn remarks(report: &Report, names: &Names) -> Markup {
    let notes: Vec<String> = names.notes(report).into_iter().chain(report.notes.iter().cloned()).collect();
    html! {
        @if !notes.is_empty() {
            h2 { "Remarks" }
            ul { @for note in &notes { li { (note) } } }
        }
    }
}

/// Details of each run: losses, gaps between requests, time of the slowest.
fn conditions(drawn: &[Drawn<'_>]) -> Markup {
    let count =
        |head: &str, of: fn(&MethodResult) -> u64| field(head, drawn, |drawn| Some(number::count(of(drawn.result))));
    let gap = |head: &str, of: fn(&Distribution) -> f64| {
        let gap = |result: &MethodResult| Some(number::significant(of(result.interval_us.as_ref()?) / 1e3));
        field(head, drawn, |drawn| gap(drawn.result))
    };
    let interval = |latency: Distribution| {
        let high = latency.p99_high.map_or_else(|| "unknown".to_string(), number::us);
        format!("{} to {high}", number::us(latency.p99_low))
    };
    let beyond = |result: &MethodResult| {
        let latency = result.latency_us.filter(|_| result.count >= Figure::P99_9.least_count())?;
        Some(number::count(latency.beyond_p99_9))
    };
    let requests = vec![
        field("length, s", drawn, |of| Some(number::significant(of.result.duration_s))),
        count("requests", |of| of.wire.requests),
        count("counted", |of| of.wire.counted),
        count("lost", |of| of.wire.lost),
        count("open at end", |of| of.wire.open_at_end),
        count("duplicates", |of| of.wire.duplicates),
        count("warm-up", |of| of.wire.warmup),
    ];
    let times = vec![
        gap("gap min, ms", |of| of.min),
        gap("gap mean, ms", |of| of.mean),
        gap("gap max, ms", |of| of.max),
        field("p99, 95 % interval, µs", drawn, |of| of.result.latency_us.map(interval)),
        field("beyond p99.9", drawn, |of| beyond(of.result)),
        field("max at, s", drawn, |of| of.result.latency_us?.max_at_s.map(number::significant)),
    ];
    let heads = row_heads(drawn);
    let content = html! {
        p { "Every request is counted in exactly one column from counted to warm-up. Gaps are from a reply to the next \
            request, at the NIC." }
        (table("Requests of the runs", "method", &heads, requests))
        (table("Times of the runs", "method", &heads, times))
    };
    folded("How the runs went", "", &content)
}

fn definitions() -> Markup {
    html! {
        h2 { "What the figures are" }
        dl {
            dt { "Response time" }
            dd {
                "From the request's to the reply's passage of the host's NIC, stamped outside the host: no delay of "
                "the client is in it."
            }
            dt { "Percentiles" }
            dd {
                "Nearest rank: a sample that was measured. SD is the sample's (n - 1). All are exact, not taken from "
                "the histogram."
            }
            dt { "95 % interval" } dd { "Distribution-free, from order statistics; it supposes independent samples." }
            dt { "Closed loop" }
            dd { "One request is out at a time, as in the paper: a slow reply delays the requests after it." }
            dt { "Gbit/s" }
            dd { "TCP payload that the bulk VMs acknowledged between the first and the last RT request; 10⁹ bit." }
            dt { "CPU" } dd { "Busy share of all of the host's CPUs." }
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
            p {
                strong { "The paper. " } (conditions)
                ". Its machine is not ours: compare ratios between methods, not microseconds."
            }
        }
        dl {
            dt { "Machine" } dd { (report.machine) }
            dt { "Kernel" } dd { (report.kernel) }
            dt { "Schema" } dd { "version " (report.schema_version) }
        }
        pre { code { (report.command) } }
    }
}

fn paper_conditions(report: &Report) -> Vec<String> {
    let mut all: Vec<String> =
        report.paper.iter().map(|paper| format!("{}: {}", paper.source, paper.conditions)).collect();
    all.dedup();
    all
}
