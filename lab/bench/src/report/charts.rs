//! Inline SVG: cumulative distributions, their tails, and a histogram per method, on one logarithmic time axis.
//!
//! In: results of one clock. Out: markup whose colours are CSS classes (`m0` to `m7`), so that the page decides on
//! light and dark. Curves are drawn from the report's bins, which are at most 0.8 % wide: less than a pixel.

use std::fmt::Write as _;

use maud::{Markup, html};
use ontime_figures::number;

use super::condition;
use crate::schema::{Distribution, Load, MethodResult};

const WIDTH: f64 = 720.0;
const HEIGHT: f64 = 320.0;
/// Room for the axes: left, right, top, bottom.
const ROOM: (f64, f64, f64, f64) = (72.0, 26.0, 12.0, 46.0);
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
        let (mut low, mut high) = (f64::INFINITY, 0.0_f64);
        for latency in results.filter_map(|result| result.latency_us) {
            low = low.min(latency.min.max(0.1));
            high = high.max(latency.max.max(0.1));
        }
        if !low.is_finite() {
            return Self { low: 1.0, high: 2.0 };
        }
        // The axis begins and ends at 1, 2 or 5 of a decade, so that close results fill it.
        let low = step_below(low);
        Self { low: low.log10(), high: step_above(high).max(low * 2.0).log10() }
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
    fn labels(self, most: usize) -> Vec<f64> {
        let ticks = self.ticks();
        if ticks.len() <= most {
            return ticks;
        }
        let is_decade = |tick: &f64| (tick.log10() - tick.log10().round()).abs() < 1e-9;
        ticks.into_iter().filter(is_decade).collect()
    }
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
    fn axes(self, levels: &[(f64, String)], y_title: &str, x_labels: usize) -> Markup {
        let (left, right) = (ROOM.0, self.width - ROOM.1);
        let (top, bottom) = (self.y(1.0), self.y(0.0));
        html! {
            g.grid {
                @for tick in self.time.ticks() { line x1=(px(self.x(tick))) x2=(px(self.x(tick))) y1=(px(top)) y2=(px(bottom)) {} }
                @for (level, _) in levels { line x1=(px(left)) x2=(px(right)) y1=(px(self.y(*level))) y2=(px(self.y(*level))) {} }
            }
            g.ticks {
                @for tick in self.time.labels(x_labels) {
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

/// The class of a method's colour. It is the same on every page.
pub(super) fn colour(method: &str) -> &'static str {
    match method {
        "vanilla" => "m0",
        "rt-default" => "m1",
        "threaded" => "m2",
        "exclusive" => "m3",
        "partitioned" => "m4",
        "vatc" => "m5",
        "busypoll" => "m6",
        _ => "m7",
    }
}

/// Dashed without flood; dotted under packets without congestion control.
pub(super) fn stroke(result: &MethodResult) -> &'static str {
    match result.load {
        Load::Tcp => "line",
        Load::None => "line calm",
        Load::SmallPackets | Load::LargePackets => "line small",
    }
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
pub(super) fn cdf(id: &str, results: &[&MethodResult], time: TimeAxis) -> Markup {
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
            (frame.axes(&levels, "requests answered", 14))
            @for result in results {
                path class=(format!("{} {}", stroke(result), colour(&result.method))) d=(curve(result)) {
                    title { (result.label) ", " (condition(result)) }
                }
            }
        },
    )
}

/// The tail: the share of requests that took longer than a time, on logarithmic axes. The dot is the slowest request.
pub(super) fn tail(id: &str, results: &[&MethodResult], time: TimeAxis) -> Markup {
    let frame = Frame { width: WIDTH, height: HEIGHT, time };
    let most = results.iter().map(|result| result.count).max().unwrap_or(1).max(10) as f64;
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
            (frame.axes(&levels, "requests slower", 14))
            @for result in results {
                @let name = format!("{}, {}", result.label, condition(result));
                path class=(format!("{} {}", stroke(result), colour(&result.method))) d=(curve(result)) { title { (name) } }
                @if let Some((x, y, max)) = slowest(result) {
                    circle class=(format!("dot {}", colour(&result.method))) cx=(px(x)) cy=(px(y)) r="4" {
                        title { (name) ": slowest " (number::us(max)) " µs" }
                    }
                }
            }
        },
    )
}

/// Number of columns of a histogram on the time axis.
const COLUMNS: usize = 72;

/// A method's histogram, as in the paper's Figure 6, with its median, p99 and maximum marked.
pub(super) fn histogram(id: &str, result: &MethodResult, time: TimeAxis) -> Markup {
    let frame = Frame { width: 460.0, height: 220.0, time };
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
        &format!("Histogram: {}, {}", result.label, condition(result)),
        &description,
        frame,
        html! {
            (frame.axes(&levels, "requests", 7))
            g class=(format!("bars {}", colour(&result.method))) {
                @for (column, count) in bars {
                    @let top = frame.y(*count as f64 / total / highest).min(frame.y(0.0) - 1.0);
                    rect x=(px(ROOM.0 + column as f64 * width)) y=(px(top)) width=(px((width - 0.6).max(0.5))) height=(px(frame.y(0.0) - top)) {
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
