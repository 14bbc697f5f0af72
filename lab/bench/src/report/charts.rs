//! Inline SVG: bars of p99 and maximum, cumulative distributions, their tails, and a histogram per method, on
//! logarithmic time axes.
//!
//! In: results of one clock. Out: markup whose colours are CSS classes (`m0` to `m7`), so that the page decides on
//! light and dark. Curves are drawn from the report's bins, which are at most 0.8 % wide: less than a pixel. The charts
//! are about as wide as a telephone, so that their text is legible there; on a wide screen they are side by side.

use std::fmt::Write as _;

use maud::{Markup, html};
use ontime_figures::number;

use crate::schema::{Distribution, MethodResult, Report};

const WIDTH: f64 = 440.0;
const HEIGHT: f64 = 300.0;
/// Room for the axes: left, right, top, bottom.
const ROOM: (f64, f64, f64, f64) = (72.0, 26.0, 12.0, 46.0);
/// Maximum number of labels at steps of 1, 2 and 5; with more, only the decades have labels.
const LABELS: usize = 7;
/// Points that are closer than this on both axes are merged.
const PIXEL: f64 = 0.4;

/// The time axis of a page. It is logarithmic.
#[derive(Debug, Clone, Copy)]
pub(super) struct TimeAxis {
    low: f64,
    high: f64,
}

impl TimeAxis {
    /// The axis that covers all results; a default range if there are none.
    pub(super) fn of<'a>(results: impl Iterator<Item = &'a MethodResult>) -> Self {
        let Some((low, high)) = range(results, |latency| latency.min) else { return Self { low: 0.0, high: 1.0 } };
        // The axis begins and ends at 1, 2 or 5 of a decade, so that close results fill it.
        let low = step_below(low);
        Self { low: low.log10(), high: step_above(high).max(low * 2.0).log10() }
    }

    /// The axis of whole decades that covers p99 and maximum of all results.
    pub(super) fn decades<'a>(results: impl Iterator<Item = &'a MethodResult>) -> Self {
        let Some((low, high)) = range(results, |latency| latency.p99) else { return Self { low: 0.0, high: 1.0 } };
        let low = low.log10().floor();
        Self { low, high: high.log10().ceil().max(low + 1.0) }
    }

    /// Position of a time between the ends, 0 to 1.
    fn place(self, us: f64) -> f64 {
        ((us.max(1e-3).log10() - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }

    /// 1, 2 and 5 of every decade on the axis, us.
    fn ticks(self) -> Vec<f64> {
        let decades = self.low.floor() as i32..=self.high.ceil() as i32;
        let steps = decades.flat_map(|decade| [1.0, 2.0, 5.0].map(|step| step * 10_f64.powi(decade)));
        steps.filter(|tick| (self.low - 1e-9..=self.high + 1e-9).contains(&tick.log10())).collect()
    }

    /// The ticks with labels: all if there are few, otherwise the decades.
    fn labels(self) -> Vec<f64> {
        let ticks = self.ticks();
        if ticks.len() <= LABELS {
            return ticks;
        }
        let is_decade = |tick: &f64| (tick.log10() - tick.log10().round()).abs() < 1e-9;
        ticks.into_iter().filter(is_decade).collect()
    }
}

/// The least of these figures and the largest maximum, us, both at least 0.1.
fn range<'a>(results: impl Iterator<Item = &'a MethodResult>, figure: fn(&Distribution) -> f64) -> Option<(f64, f64)> {
    let (mut low, mut high) = (f64::INFINITY, 0.0_f64);
    for latency in results.filter_map(|result| result.latency_us) {
        low = low.min(figure(&latency).max(0.1));
        high = high.max(latency.max.max(0.1));
    }
    low.is_finite().then_some((low, high))
}

fn step_below(us: f64) -> f64 {
    let decade = 10_f64.powf(us.log10().floor());
    let steps = [5.0, 2.0, 1.0].map(|step| step * decade);
    steps.into_iter().find(|step| *step <= us).unwrap_or(decade)
}

fn step_above(us: f64) -> f64 {
    let decade = 10_f64.powf(us.log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|step| step * decade);
    steps.into_iter().find(|step| *step >= us).unwrap_or(decade * 10.0)
}

/// A time in a suitable unit.
fn time_label(us: f64) -> String {
    if us >= 1e6 {
        format!("{} s", us / 1e6)
    } else if us >= 1e3 {
        format!("{} ms", us / 1e3)
    } else {
        format!("{} µs", (us * 1e3).round() / 1e3)
    }
}

/// 10 to the minus `decade`, as a percentage.
fn share_label(decade: i32) -> String {
    format!(
        "{} %",
        if decade <= 2 { 10_f64.powi(2 - decade).round() } else { (10_f64.powi(2 - decade) * 1e9).round() / 1e9 }
    )
}

/// A frame into which a chart is drawn.
#[derive(Debug, Clone, Copy)]
struct Frame {
    width: f64,
    height: f64,
    time: TimeAxis,
}

impl Frame {
    fn x(self, us: f64) -> f64 {
        ROOM.0 + self.time.place(us) * (self.width - ROOM.0 - ROOM.1)
    }
    /// `share` 0 is the bottom, 1 the top.
    fn y(self, share: f64) -> f64 {
        self.height - ROOM.3 - share.clamp(0.0, 1.0) * (self.height - ROOM.2 - ROOM.3)
    }

    /// Grid, ticks and titles. `levels` are positions on the y axis, 0 to 1, with their labels.
    fn axes(self, levels: &[(f64, String)], y_title: &str) -> Markup {
        let (left, right) = (ROOM.0, self.width - ROOM.1);
        let (top, bottom) = (self.y(1.0), self.y(0.0));
        html! {
            g.grid {
                @for tick in self.time.ticks() {
                    line x1=(px(self.x(tick))) x2=(px(self.x(tick))) y1=(px(top)) y2=(px(bottom)) {}
                }
                @for (level, _) in levels {
                    line x1=(px(left)) x2=(px(right)) y1=(px(self.y(*level))) y2=(px(self.y(*level))) {}
                }
            }
            g.ticks {
                @for tick in self.time.labels() {
                    text x=(px(self.x(tick))) y=(px(bottom + 17.0)) text-anchor="middle" { (time_label(tick)) }
                }
                @for (level, label) in levels {
                    text x=(px(left - 6.0)) y=(px(self.y(*level) + 4.0)) text-anchor="end" { (label) }
                }
                text x=(px((left + right) / 2.0)) y=(px(self.height - 6.0)) text-anchor="middle" { "response time" }
                text transform=(format!("translate(12 {}) \
                    rotate(-90)", px((top + bottom) / 2.0))) text-anchor="middle" { (y_title) }
            }
            line.axis x1=(px(left)) x2=(px(right)) y1=(px(bottom)) y2=(px(bottom)) {}
        }
    }
}

fn px(value: f64) -> String {
    format!("{value:.1}")
}

/// A path through points, without points that would not be visible.
fn path(points: impl Iterator<Item = (f64, f64)>) -> String {
    let mut text = String::new();
    let mut last: Option<(f64, f64)> = None;
    let mut skipped = None;
    for (x, y) in points {
        let near = last.is_some_and(|(a, b)| (x - a).abs() < PIXEL && (y - b).abs() < PIXEL);
        if near {
            skipped = Some((x, y));
            continue;
        }
        let _ = write!(text, "{}{} {}", if last.is_none() { "M" } else { "L" }, px(x), px(y));
        (last, skipped) = (Some((x, y)), None);
    }
    if let Some((x, y)) = skipped {
        let _ = write!(text, "L{} {}", px(x), px(y));
    }
    text
}

/// Methods with a fixed place among the styles, so that they look the same on every page.
const KNOWN: [&str; 8] =
    ["vanilla", "rt-default", "threaded", "exclusive", "partitioned", "host-process", "busypoll", "outsourcing"];
/// The number of colours: the classes `m0` to `m7` of the page.
const COLOURS: usize = 8;
/// Lengths of dashes and gaps; empty for a solid line. Their number and [`COLOURS`] have no common divisor, so that the
/// first 72 places are different pairs, and the first 8 differ in both.
const DASHES: [&str; 9] = ["9 3", "3 3", "14 3 3 3", "6 3", "", "1.5 3", "16 5", "9 3 3 3 3 3", "5 8"];

/// The look of a method on a page.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Style {
    /// Class of the colour.
    colour: String,
    /// Value of `stroke-dasharray`; none for a solid line.
    dash: Option<String>,
}

impl Style {
    fn of_place(place: usize) -> Self {
        let round = place / (COLOURS * DASHES.len());
        let first = DASHES.get(place % DASHES.len()).copied().unwrap_or_default();
        let first = if first.is_empty() && round > 0 { "40 4" } else { first };
        let dash = (!first.is_empty()).then(|| first.to_owned() + &" 1 4".repeat(round));
        Self { colour: format!("m{}", place % COLOURS), dash }
    }
}

/// The styles of a report's methods. No two methods have the same colour and dash.
#[derive(Debug)]
pub(super) struct Styles<'a>(Vec<(&'a str, usize)>);

impl<'a> Styles<'a> {
    pub(super) fn of(report: &'a Report) -> Self {
        let mut methods: Vec<&str> = Vec::new();
        for result in &report.results {
            if !methods.contains(&result.method.as_str()) {
                methods.push(&result.method);
            }
        }
        let known = |method: &str| KNOWN.iter().position(|known| *known == method);
        let taken: Vec<usize> = methods.iter().filter_map(|method| known(method)).collect();
        let mut free = (0..).filter(|place| !taken.contains(place));
        let mut places = Vec::new();
        for method in methods {
            if let Some(place) = known(method).or_else(|| free.next()) {
                places.push((method, place));
            }
        }
        Self(places)
    }

    pub(super) fn style(&self, method: &str) -> Style {
        let place = self.0.iter().find(|(of, _)| *of == method).map_or(0, |(_, place)| *place);
        Style::of_place(place)
    }
}

/// A result as the page shows it.
#[derive(Debug)]
pub(super) struct Drawn<'a> {
    pub(super) result: &'a MethodResult,
    /// Name of the method.
    pub(super) method: String,
    /// The conditions that are not the same in every case; may be empty.
    pub(super) condition: String,
    pub(super) words: String,
    pub(super) style: Style,
    /// p99 of `vanilla` divided by this result's.
    pub(super) below_vanilla: Option<f64>,
}

impl Drawn<'_> {
    /// A curve in the method's style.
    fn curve(&self, path: &str, title: Option<&str>) -> Markup {
        html! {
            path class=(format!("line {}", self.style.colour)) stroke-dasharray=[self.style.dash.as_deref()] d=(path) {
                @if let Some(title) = title { title { (title) } }
            }
        }
    }

    /// A short line in the method's style, for a legend.
    pub(super) fn key(&self) -> Markup {
        html! { svg.key viewBox="0 0 38 10" aria-hidden="true" { (self.curve("M1 5L37 5", None)) } }
    }
}

/// Height of a method's row in the bar chart.
const BAR_ROW: f64 = 40.0;
/// Room beside the bars: left, and right for the ratio to `vanilla`.
const BAR_ROOM: (f64, f64) = (20.0, 92.0);
/// Maximum length of a name in the bar chart, characters.
const BAR_NAME: usize = 28;
/// Maximum number of labelled decades.
const BAR_LABELS: f64 = 7.0;

/// p99 and maximum of each method as one horizontal bar: solid up to p99, lighter up to the maximum, and at its end the
/// ratio to `vanilla`.
pub(super) fn bars(id: &str, title: &str, drawn: &[&Drawn<'_>], time: TimeAxis) -> Markup {
    let counted: Vec<(&Drawn<'_>, Distribution)> =
        drawn.iter().filter_map(|drawn| Some((*drawn, drawn.result.latency_us?))).collect();
    let (left, right) = (BAR_ROOM.0, WIDTH - BAR_ROOM.1);
    let bottom = counted.len() as f64 * BAR_ROW + 4.0;
    let frame = Frame { width: WIDTH, height: bottom + 42.0, time };
    let x = |us: f64| left + time.place(us) * (right - left);
    let step = ((time.high - time.low) / BAR_LABELS).ceil().max(1.0) as usize;
    let decades = (time.low as i32..=time.high as i32).step_by(step);
    let rows = counted.iter().enumerate().map(|(row, (drawn, latency))| (row as f64 * BAR_ROW, drawn, latency));
    figure(
        id,
        title,
        "One bar a method: solid up to the p99, lighter up to the slowest request. The axis is logarithmic: each line \
        is ten times the one before.",
        frame,
        html! {
            @for decade in decades {
                @let x = px(x(10_f64.powi(decade)));
                g.grid { line x1=(x) x2=(x) y1="0" y2=(px(bottom)) {} }
                text.decade x=(x) y=(px(bottom + 16.0)) text-anchor="middle" { (decade_label(decade)) }
            }
            text x=(px((left + right) / 2.0)) y=(px(bottom + 34.0)) text-anchor="middle" { "µs, logarithmic" }
            line.axis x1=(px(left)) x2=(px(right)) y1=(px(bottom)) y2=(px(bottom)) {}
            @for (top, drawn, latency) in rows {
                @let (p99, max) = (x(latency.p99), x(latency.max));
                @let figures = format!("p99 {}, max {} µs", number::us(latency.p99), number::us(latency.max));
                g class=(format!("bar {}", drawn.style.colour)) {
                    title { (drawn.words) ": " (figures) }
                    text.name x="2" y=(px(top + 16.0)) { (shortened(&drawn.method, BAR_NAME)) }
                    text x=(px(WIDTH - 2.0)) y=(px(top + 16.0)) text-anchor="end" { (figures) }
                    rect.p99 x=(px(left)) y=(px(top + 22.0)) width=(px((p99 - left).max(1.0))) height="13" {}
                    rect.beyond x=(px(p99)) y=(px(top + 22.0)) width=(px((max - p99).max(1.0))) height="13" {}
                    text x=(px(max + 6.0)) y=(px(top + 33.0)) { (ratio(drawn)) }
                }
            }
        },
    )
}

/// 10 to the power of `decade`, us.
fn decade_label(decade: i32) -> String {
    let us = 10_f64.powi(decade);
    if decade >= 0 { number::count(us as u64) } else { us.to_string() }
}

fn ratio(drawn: &Drawn<'_>) -> String {
    match drawn.below_vanilla {
        Some(below) => number::times(below),
        None if drawn.result.method == "vanilla" => "baseline".to_owned(),
        None => String::new(),
    }
}

/// The text with at most this number of characters.
fn shortened(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most.saturating_sub(1)).chain(['…']).collect()
}

/// (upper edge of a bin in us, number of samples up to it), ascending.
fn cumulative(result: &MethodResult) -> Vec<(f64, u64)> {
    let mut sum = 0;
    let add = |bin: &crate::schema::HistogramBin| {
        sum += bin.count;
        (bin.high_us, sum)
    };
    result.histogram.iter().map(add).collect()
}

/// Cumulative distribution: the share of requests that were answered within a time.
pub(super) fn cdf(id: &str, drawn: &[&Drawn<'_>], time: TimeAxis) -> Markup {
    let frame = Frame { width: WIDTH, height: HEIGHT, time };
    let levels: Vec<_> =
        [0, 25, 50, 75, 100].map(|percent| (f64::from(percent) / 100.0, format!("{percent} %"))).into();
    let curve = |result: &MethodResult| {
        let total = result.count.max(1) as f64;
        let start = result.latency_us.map(|latency| (frame.x(latency.min), frame.y(0.0)));
        let rest = cumulative(result).into_iter().map(|(us, sum)| (frame.x(us), frame.y(sum as f64 / total)));
        path(start.into_iter().chain(rest))
    };
    let description = "Share of requests answered within a time; a curve further left is faster.";
    figure(
        id,
        "Cumulative distribution of response times",
        description,
        frame,
        html! {
            (frame.axes(&levels, "requests answered"))
            @for drawn in drawn { (drawn.curve(&curve(drawn.result), Some(drawn.words.as_str()))) }
        },
    )
}

/// The tail: the share of requests that took longer than a time, on logarithmic axes. The dot is the slowest request.
pub(super) fn tail(id: &str, drawn: &[&Drawn<'_>], time: TimeAxis) -> Markup {
    let frame = Frame { width: WIDTH, height: HEIGHT, time };
    let most = drawn.iter().map(|drawn| drawn.result.count).max().unwrap_or(1).max(10) as f64;
    let decades = most.log10().ceil();
    let level = |share: f64| 1.0 + share.max(1e-12).log10() / decades;
    let levels: Vec<_> =
        (0..=decades as i32).map(|decade| (1.0 - f64::from(decade) / decades, share_label(decade))).collect();
    let slowest = |result: &MethodResult| {
        let max = result.latency_us?.max;
        Some((frame.x(max), frame.y(level(1.0 / result.count.max(1) as f64)), max))
    };
    let curve = |result: &MethodResult| {
        let total = result.count.max(1) as f64;
        let start = result.latency_us.map(|latency| (frame.x(latency.min), frame.y(1.0)));
        let slower = cumulative(result).into_iter().filter(|(_, sum)| *sum < result.count);
        let rest = slower.map(|(us, sum)| (frame.x(us), frame.y(level((total - sum as f64) / total))));
        path(start.into_iter().chain(rest).chain(slowest(result).map(|(x, y, _)| (x, y))))
    };
    let description = "Share of requests slower than a time, both axes logarithmic; a dot is the slowest request.";
    figure(
        id,
        "Tail of the response times",
        description,
        frame,
        html! {
            (frame.axes(&levels, "requests slower"))
            @for drawn in drawn {
                (drawn.curve(&curve(drawn.result), Some(drawn.words.as_str())))
                @if let Some((x, y, max)) = slowest(drawn.result) {
                    circle class=(format!("dot {}", drawn.style.colour)) cx=(px(x)) cy=(px(y)) r="4" {
                        title { (drawn.words) ": slowest " (number::us(max)) " µs" }
                    }
                }
            }
        },
    )
}

/// Number of columns of a histogram on the time axis.
const COLUMNS: usize = 72;

/// A method's histogram, as in the paper's Figure 6, with its median, p99 and maximum marked.
pub(super) fn histogram(id: &str, drawn: &Drawn<'_>, time: TimeAxis) -> Markup {
    let result = drawn.result;
    let frame = Frame { width: WIDTH, height: 220.0, time };
    let mut columns = [0_u64; COLUMNS];
    for bin in &result.histogram {
        let middle = (bin.low_us.max(1e-3) * bin.high_us.max(1e-3)).sqrt();
        let column = ((time.place(middle) * COLUMNS as f64) as usize).min(COLUMNS - 1);
        if let Some(count) = columns.get_mut(column) {
            *count += bin.count;
        }
    }
    let total = result.count.max(1) as f64;
    let highest = columns.iter().max().copied().unwrap_or(0).max(1) as f64 / total;
    let levels = vec![(0.0, "0 %".to_string()), (0.5, number::percent(highest / 2.0)), (1.0, number::percent(highest))];
    let width = (frame.width - ROOM.0 - ROOM.1) / COLUMNS as f64;
    let bars = columns.iter().enumerate().filter(|(_, count)| **count > 0);
    let description = result.latency_us.map_or_else(
        || "No request was counted.".to_string(),
        |latency| {
            format!(
                "Median {}, p99 {}, maximum {} µs.",
                number::us(latency.p50),
                number::us(latency.p99),
                number::us(latency.max)
            )
        },
    );
    figure(
        id,
        &format!("Histogram: {}", drawn.words),
        &description,
        frame,
        html! {
            (frame.axes(&levels, "requests"))
            g class=(format!("bars {}", drawn.style.colour)) {
                @for (column, count) in bars {
                    @let top = frame.y(*count as f64 / total / highest).min(frame.y(0.0) - 1.0);
                    rect x=(px(ROOM.0 + column as f64 * width)) y=(px(top))
                        width=(px((width - 0.6).max(0.5))) height=(px(frame.y(0.0) - top)) {
                        title { (number::count(*count)) " requests" }
                    }
                }
            }
            @if let Some(latency) = result.latency_us { (marks(frame, &latency)) }
        },
    )
}

fn marks(frame: Frame, latency: &Distribution) -> Markup {
    let marks = [("p50", latency.p50), ("p99", latency.p99), ("max", latency.max)];
    html! {
        g.marks {
            @for (name, us) in marks {
                line x1=(px(frame.x(us))) x2=(px(frame.x(us))) y1=(px(frame.y(1.0))) y2=(px(frame.y(0.0))) {
                    title { (name) " " (number::us(us)) " µs" }
                }
            }
        }
    }
}

fn figure(id: &str, title: &str, description: &str, frame: Frame, content: Markup) -> Markup {
    let view = format!("0 0 {} {}", frame.width, frame.height);
    let (title_id, description_id) = (format!("{id}-title"), format!("{id}-description"));
    html! {
        svg viewBox=(view) role="img" aria-labelledby=(format!("{title_id} {description_id}")) {
            title id=(title_id) { (title) }
            desc id=(description_id) { (description) }
            (content)
        }
    }
}
