//! The HTML report: times, inversions with their cures, and a timeline of each of the worst requests.
//!
//! Input: an [`Analyser`] and its [`Document`]. Output: one HTML file in light and dark, without scripts or network
//! access; its layout is that of the bench report. The browser shows a bar's details as a tooltip (`<title>`).

use maud::{Markup, html};
use ontime_figures::number;
use ontime_figures::page;

use crate::analyser::{Analyser, Detail};
use crate::event::policy;
use crate::path::{Path, Watch};
use crate::report::{Document, Figures};
use crate::request::Segment;
use crate::timeline::{CpuContext, Slice};

const STYLE: &str = include_str!("page.css");
/// Width of the drawing, pixels.
const WIDTH: f64 = 1_280.0;
/// Width of the names left of the bars, pixels.
const NAMES: f64 = 190.0;
/// Height of a row, pixels.
const ROW: f64 = 22.0;

/// The report as one self-contained page.
pub fn html(analyser: &Analyser, document: &Document) -> String {
    let tenants: Vec<&str> = document.paths.iter().map(|path| path.tenant.as_str()).collect();
    let title = format!("Ontime trace: {}", tenants.join(", "));
    page(
        &title,
        STYLE,
        &html! {
            h1 { "Where requests spent their time" }
            p.soft { "Ontime trace of " (tenants.join(", ")) ", kernel " (document.kernel) ", "
                (number::significant(document.duration_s)) " s" }
            (summary_lines(document))
            (worst(analyser, document))
            (inversions(document))
            (segments(document))
            (tracing(document))
        },
    )
}

fn summary_lines(document: &Document) -> Markup {
    let requests: u64 = document.paths.iter().map(|path| path.counts.requests).sum();
    html! {
        @if !document.inversions_looked_for {
            p.lead { (number::count(requests)) " requests; inversions were not looked for." }
        } @else if document.inversions.is_empty() {
            p.lead { "No priority inversion in " (number::count(requests)) " requests." }
        } @else {
            p.lead {
                (number::count(document.hindered)) " of " (number::count(requests))
                " requests met a priority inversion."
            }
        }
        @if document.lost() > 0 {
            p.bad-news {
                "At least " (number::count(document.lost()))
                " events were lost; requests of those moments are not counted."
            }
        }
        @for note in &document.notes { p.soft { (note) } }
    }
}

fn segments(document: &Document) -> Markup {
    html! {
        h2 { "Segments" }
        div.scroll tabindex="0" role="region" aria-label="Segments" { table {
            caption { "Times in µs, as Access'18, IV-D, divides the path: from the interrupt to the VM entry, to the \
                VM exit that sends, to the NIC." }
            thead { tr {
                th.left scope="col" { "tenant" } th.left scope="col" { "segment" }
                @for name in ["count", "min", "mean", "p50", "p95", "p99", "p99.9", "max"] { th scope="col" { (name) } }
            } }
            @for path in &document.paths {
                tbody {
                    @for segment in Segment::ALL {
                        @if let Some(figures) = path.segments.get(segment.name()) {
                            (row(&path.tenant, segment.name(), figures))
                        }
                    }
                    @if let Some(figures) = &path.total { (row(&path.tenant, "in all", figures)) }
                    @if let Some(figures) = &path.stolen { (row(&path.tenant, "runnable, not running", figures)) }
                }
            }
        } }
        @for path in &document.paths {
            p.soft { (path.tenant) ": " (path.counts.unanswered) " requests without reply, " (path.counts.unasked)
                " packets that answered nothing, " (path.counts.dropped) " requests dropped with lost events, "
                (path.counts.inexact)
                " while the guest ran already." }
        }
    }
}

fn row(tenant: &str, name: &str, figures: &Figures) -> Markup {
    let Figures { count, min, mean, p50, p95, p99, p99_9, max } = *figures;
    html! { tr {
        th scope="row" { (tenant) } td.left { (name) } td { (number::count(count)) }
        @for value in [min, mean, p50, p95, p99, p99_9, max] { td { (number::us(value)) } }
    } }
}

fn inversions(document: &Document) -> Markup {
    html! {
        h2 { "Priority inversions" }
        @if document.inversions.is_empty() {
            p { @if document.inversions_looked_for { "None." } @else { "Not looked for." } }
        } @else {
            div.scroll tabindex="0" role="region" aria-label="Priority inversions" { table.wrap {
                caption { "By the time they took in all, µs. The cure is the rule \
                    of " code { "ontime doctor" } " and docs/reference/hostnet.md." }
                thead { tr {
                    th.left scope="col" { "cure, and below the longest of each inversion" }
                    th scope="col" { "requests" }
                    th scope="col" { "in all" } th scope="col" { "max" }
                } }
                @for of in document.by_cure() { tbody {
                    tr {
                        th.left scope="rowgroup" {
                            @match of.rule { Some(rule) => { code { (rule) } ": " } None => {} } (of.cure)
                        }
                        td { (number::count(of.times())) } td { (number::us(of.total_us())) }
                        td { (number::us(of.max_us())) }
                    }
                    @for inversion in &of.inversions { tr {
                        td.left { (inversion.example) small { (inversion.tenant) } }
                        td { (number::count(inversion.requests)) } td { (number::us(inversion.total_us)) }
                        td { (number::us(inversion.max_us)) }
                    } }
                } }
            } }
        }
        @if document.inversions_unnamed > 0 { p { (document.inversions_unnamed) " more, by too many names to tell \
            apart." } }
    }
}

const LEGEND: [(&str, &str); 8] = [
    ("host-receive", "host receive"),
    ("guest", "guest"),
    ("host-send", "host send"),
    ("wait", "runnable, waiting"),
    ("own", "the path's threads"),
    ("rt", "other RT"),
    ("way", "bulk packets, others' softirqs"),
    ("other", "everything else"),
];

fn worst(analyser: &Analyser, document: &Document) -> Markup {
    html! {
        h2 { "The worst requests" }
        ul.key {
            @for (class, words) in LEGEND {
                li {
                    svg viewBox="0 0 12 12" aria-hidden="true" { rect class=(class) width="12" height="12" {} } (words)
                }
            }
        }
        @for (detail, told) in analyser.findings().worst.iter().zip(&document.worst) {
            h3 { (told.tenant) ": " (number::us(told.total_us)) " µs" }
            @if !told.words.is_empty() { ol.words { @for words in &told.words { li { (words) } } } }
            @if let Some(hint) = &told.hint { p { "Hint: " (hint) } }
            @if detail.left_out > 0 { p.soft { (detail.left_out) " of the shortest slices are not drawn." } }
            figure { (drawing(analyser.watch(), detail)) }
        }
    }
}

/// A bar of the timeline.
struct Bar {
    start: u64,
    end: u64,
    class: &'static str,
    /// Text inside the bar if it fits.
    label: String,
    words: String,
}

fn drawing(watch: &Watch, detail: &Detail) -> Markup {
    let request = &detail.request;
    let mut rows: Vec<(String, Vec<Bar>)> = Vec::new();
    let borders = [request.begin, request.entered, request.left, request.done];
    let classes = ["host-receive", "guest", "host-send"];
    let bars =
        Segment::ALL.into_iter().zip(classes).zip(borders.windows(2)).filter_map(|((segment, class), border)| {
            let [start, end] = border else { return None };
            Some(Bar {
                start: *start,
                end: *end,
                class,
                label: segment.name().to_owned(),
                words: segment.name().to_owned(),
            })
        });
    rows.push(("request".to_owned(), bars.collect()));
    for wait in &detail.waits {
        let name = format!("{} ({})", wait.task.comm, wait.task.pid);
        let words = format!("{name}, {}: runnable on CPU {}", wait.task.policy(), wait.cpu);
        let bar = Bar { start: wait.start, end: wait.end, class: "wait", label: String::new(), words };
        match rows.iter_mut().find(|(known, _)| *known == name) {
            Some((_, bars)) => bars.push(bar),
            None => rows.push((name, vec![bar])),
        }
    }
    let path = watch.paths.get(request.path);
    for (cpu, slices) in &detail.cpus {
        let busy = slices.iter().filter(|slice| slice.task.pid != 0 || slice.place != CpuContext::Thread);
        rows.push((format!("CPU {cpu}"), busy.map(|slice| bar(watch, path, slice)).collect()));
    }
    svg(request.begin, request.done, &rows)
}

fn bar(watch: &Watch, path: Option<&Path>, slice: &Slice) -> Bar {
    let own = path.is_some_and(|path| path.threads.contains_key(&slice.task.pid));
    let bulk = matches!(slice.place, CpuContext::Napi(dev) if !watch.rt_nics.contains(&dev));
    let class = match slice.place {
        _ if bulk => "way",
        CpuContext::Softirq(_) if !own => "way",
        _ if own => "own",
        _ if slice.task.is_rt() => "rt",
        _ => "other",
    };
    let words =
        format!("{} ({}, {}): {}", slice.task.comm, slice.task.pid, policy(slice.task.prio), slice.place.text());
    Bar { start: slice.start, end: slice.end, class, label: slice.task.comm.text(), words }
}

fn svg(from: u64, to: u64, rows: &[(String, Vec<Bar>)]) -> Markup {
    let scale = (WIDTH - NAMES - 10.0) / (to - from).max(1) as f64;
    let x = |time: u64| NAMES + time.saturating_sub(from) as f64 * scale;
    let axis = ROW * rows.len() as f64;
    html! {
        svg.rows viewBox=(format!("0 0 {WIDTH} {}", axis + 26.0)) role="img" aria-label="Timeline of the request" {
            @for (index, (name, bars)) in rows.iter().enumerate() {
                @let y = index as f64 * ROW;
                text x=(NAMES - 8.0) y=(y + 15.0) text-anchor="end" { (name) }
                @for bar in bars {
                    rect class=(bar.class) x=(format!("{:.2}", x(bar.start))) y=(y + 3.0) height=(ROW - 6.0)
                        width=(format!("{:.2}", ((bar.end - bar.start) as f64 * scale).max(0.6))) {
                        title { (bar.words) ", " (number::us((bar.end - bar.start) as f64 / 1e3)) " µs from "
                            (number::us(bar.start.saturating_sub(from) as f64 / 1e3)) }
                    }
                    @if (bar.end - bar.start) as f64 * scale > 8.0 * bar.label.len() as f64 {
                        text.in x=(format!("{:.2}", x(bar.start) + 4.0)) y=(y + 15.0) { (bar.label) }
                    }
                }
            }
            line.axis x1=(NAMES) y1=(axis) x2=(WIDTH - 10.0) y2=(axis) {}
            @for tick in 0..=4_u64 {
                @let time = from + (to - from) * tick / 4;
                text x=(format!("{:.1}", x(time))) y=(axis + 17.0)
                    text-anchor=(if tick == 4 { "end" } else { "middle" }) {
                    (number::us((time - from) as f64 / 1e3)) @if tick == 4 { " µs" }
                }
            }
        }
    }
}

fn tracing(document: &Document) -> Markup {
    let (tracing, hints) = (&document.tracing, &document.hints);
    let probe = tracing.probe_ns.map_or_else(
        || "not measured".to_owned(),
        |ns| format!("{ns:.0} ns, so {:.2} µs for four (Access'18, IV-D: under 0.5 µs)", ns * 4.0 / 1e3),
    );
    let all = tracing
        .cpu_share
        .map_or_else(|| "not measured".to_owned(), |share| format!("{} of the watched CPUs", number::percent(share)));
    let smis = hints.smis.map_or_else(
        || format!("not counted: {}", hints.smis_unknown.as_deref().unwrap_or("unknown")),
        |smis| smis.to_string(),
    );
    html! {
        h2 { "What the trace cost, and what it did not see" }
        dl {
            dt { "A probe" } dd { (probe) }
            dt { "All probes" } dd { (all) }
            dt { "Events" }
            dd { @for (probe, count) in &tracing.events { code { (probe) } " " (number::count(*count)) " " } }
            dt { "Lost" } dd {
                @if tracing.lost.is_empty() { "none" }
                @for (cpu, count) in &tracing.lost { "CPU " (cpu) ": " (number::count(*count)) " " }
            }
            dt { "Stolen" } dd { (format!("{:.2}", hints.stolen_s)) " s by a hypervisor below this host" }
            dt { "SMIs" } dd { (smis) }
        }
    }
}
