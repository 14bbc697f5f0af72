//! The simulated schedule as a picture: one row per CPU, one colour or letter per tenant.

use std::fmt::Write;

use ontime_plan::simulate::Run;
use ontime_plan::{Nanos, Vcpu};

/// Dimensions of the drawing, pixels: least and largest width without margins, width per millisecond, row height,
/// margin above, gap between the rows of CPUs and of tenants, margin on the right for half of the last time label.
const WIDTH: u64 = 1_000;
const WIDTH_MAX: u64 = 20_000;
const MILLISECOND: u64 = 12;
const ROW: u64 = 26;
const TOP: u64 = 10;
const GAP: u64 = 16;
const RIGHT: u64 = 60;
/// The width of a character, pixels, and the length of the longest name.
const CHARACTER: u64 = 8;
const NAME_MAX: usize = 40;
/// Columns of the terminal picture.
const COLUMNS: u64 = 100;
const LETTERS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";

/// A vCPU of the schedule, numbered as in its tenant.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct PlacedVcpu {
    /// The index of its tenant.
    tenant: usize,
    /// Its number in the tenant.
    number: usize,
    /// The index of its first RTA, as in [`Run::rta`].
    first_rta: usize,
}

/// The tenants and numbers of a host's vCPUs. Each vCPU comes with the index of its tenant.
pub(super) fn places(vcpus: &[(usize, Vcpu)]) -> Vec<PlacedVcpu> {
    let mut rtas = 0;
    let place = |(at, (tenant, vcpu)): (usize, &(usize, Vcpu))| {
        let number = vcpus.iter().take(at).filter(|(other, _)| other == tenant).count();
        let first_rta = rtas;
        rtas += vcpu.rtas().len();
        PlacedVcpu { tenant: *tenant, number, first_rta }
    };
    vcpus.iter().enumerate().map(place).collect()
}

/// A schedule to draw.
pub(super) struct Picture<'a> {
    /// The runs, sorted by CPU and time.
    pub runs: &'a [Run],
    /// The deadlines: index of the RTA, and time.
    pub deadlines: &'a [(usize, Nanos)],
    /// One entry per vCPU.
    pub places: Vec<PlacedVcpu>,
    /// Names of all tenants.
    pub names: Vec<&'a str>,
    /// The number of CPUs.
    pub cpus: u32,
    /// The picture shows the time from 0 to this.
    pub span: Nanos,
}

impl Picture<'_> {
    fn place(&self, run: &Run) -> PlacedVcpu {
        self.places.get(run.vcpu).copied().unwrap_or_default()
    }

    fn tenant(&self, run: &Run) -> usize {
        self.place(run).tenant
    }

    fn used(&self) -> Vec<usize> {
        let mut used: Vec<usize> = self.runs.iter().map(|run| self.tenant(run)).collect();
        used.sort_unstable();
        used.dedup();
        used
    }

    /// The picture for a terminal. Each column has the letter of the tenant that ran longest in it, or `.` if tenants
    /// ran for less than half of the column's time.
    pub(super) fn text(&self) -> String {
        let mut out = String::new();
        let (span, used) = (self.span.0.max(1), self.used());
        let busy = self.runs.last().map_or(0, |run| run.cpu + 1);
        for cpu in 0..busy {
            let _ = write!(out, "CPU {cpu:<4}");
            for column in 0..COLUMNS {
                let (from, to) = (span * column / COLUMNS, span * (column + 1) / COLUMNS);
                out.push(self.longest(cpu, from, to).map_or('.', |tenant| letter(&used, tenant)));
            }
            out.push('\n');
        }
        let _ = writeln!(out, "        0{:>width$}", self.span.to_string(), width = COLUMNS as usize - 1);
        if busy < self.cpus {
            let _ = writeln!(out, "  CPUs {busy} to {} have no RTA.", self.cpus - 1);
        }
        for tenant in used.iter().take(LETTERS.len()) {
            let name = self.names.get(*tenant).copied().unwrap_or_default();
            let _ = writeln!(out, "  {} {}", letter(&used, *tenant), crate::table::visible(name));
        }
        if let Some(others) = used.len().checked_sub(LETTERS.len()).filter(|others| *others > 0) {
            let _ = writeln!(out, "  # {others} others");
        }
        out
    }

    fn longest(&self, cpu: u32, from: u64, to: u64) -> Option<usize> {
        let mut times: Vec<(usize, u64)> = Vec::new();
        let first = self.runs.partition_point(|run| (run.cpu, run.end.0) <= (cpu, from));
        for run in self.runs.iter().skip(first).take_while(|run| run.cpu == cpu && run.start.0 < to) {
            let time = run.end.0.min(to).saturating_sub(run.start.0.max(from));
            match times.iter_mut().find(|(tenant, _)| *tenant == self.tenant(run)) {
                Some((_, sum)) => *sum += time,
                None => times.push((self.tenant(run), time)),
            }
        }
        let ran: u64 = times.iter().map(|(_, time)| time).sum();
        let (tenant, _) = times.into_iter().max_by_key(|(_, time)| *time)?;
        (ran * 2 >= to - from).then_some(tenant)
    }

    /// The picture as SVG: one row per CPU, and below one row per tenant with a mark at each of its deadlines. Each run
    /// has a tooltip with its tenant, RTA and times. The width depends on the time span, the left margin on the longest
    /// name.
    pub(super) fn svg(&self) -> String {
        let used = self.used();
        let span = self.span.0.max(1);
        let names: Vec<String> = used.iter().map(|tenant| self.name(*tenant)).collect();
        let longest = names.iter().map(|name| name.chars().count()).max().unwrap_or(0).max("CPU 1023".len());
        let left = longest as u64 * CHARACTER + 20;
        let width = (span.div_ceil(1_000_000) * MILLISECOND).clamp(WIDTH, WIDTH_MAX);
        let at = |time: Nanos| left as f64 + width as f64 * time.0.min(span) as f64 / span as f64;
        let cpus_end = TOP + u64::from(self.cpus) * ROW;
        let tenants_top = cpus_end + GAP;
        let end = tenants_top + used.len() as u64 * ROW;
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" \
             font-family=\"monospace\" font-size=\"12\">\n<title>Simulation: the first {2} of the schedule; a mark is \
             a deadline</title>\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
            left + width + RIGHT,
            end + 2 * GAP,
            self.span,
        );
        let lane = |out: &mut String, y: u64, name: &str| {
            let _ = writeln!(out, "<text x=\"8\" y=\"{}\">{name}</text>", y + 15);
            let _ = writeln!(out, "<rect x=\"{left}\" y=\"{y}\" width=\"{width}\" height=\"20\" fill=\"#f2f2f2\"/>");
        };
        for cpu in 0..self.cpus {
            lane(&mut out, TOP + u64::from(cpu) * ROW, &format!("CPU {cpu}"));
        }
        for (index, name) in (0..).zip(&names) {
            lane(&mut out, tenants_top + index * ROW, name);
        }
        axis(&mut out, (left, width), (TOP, end), self.span);
        for run in self.runs.iter().filter(|run| run.start < self.span) {
            let (from, to) = (at(run.start), at(run.end));
            let PlacedVcpu { tenant, number, first_rta } = self.place(run);
            let (name, colour) = (self.name(tenant), colour(&used, tenant));
            let own = tenants_top + place(&used, tenant) as u64 * ROW;
            for y in [TOP + u64::from(run.cpu) * ROW, own] {
                let _ = writeln!(
                    out,
                    "<rect x=\"{from:.2}\" y=\"{y}\" width=\"{:.2}\" height=\"20\" fill=\"{colour}\">\
                     <title>{name}, vCPU {number}, RTA {}, CPU {}: {} to {}</title></rect>",
                    (to - from).max(0.5),
                    run.rta.saturating_sub(first_rta),
                    run.cpu,
                    run.start,
                    run.end,
                );
            }
        }
        for (rta, deadline) in self.deadlines.iter().filter(|(_, deadline)| *deadline <= self.span) {
            let owner = self.places.iter().rev().find(|place| place.first_rta <= *rta);
            let Some(row) = owner.and_then(|place| used.iter().position(|tenant| *tenant == place.tenant)) else {
                continue;
            };
            let (x, y) = (at(*deadline), tenants_top + row as u64 * ROW);
            let _ = writeln!(
                out,
                "<path class=\"deadline\" d=\"M{x:.2} {}v24m-3 -24h6l-3 5z\" stroke=\"black\" stroke-width=\"0.8\">\
                 <title>{}: deadline {deadline}</title></path>",
                y - 2,
                names.get(row).map_or("", String::as_str),
            );
        }
        out.push_str("</svg>\n");
        out
    }

    /// A tenant's name for the drawing, shortened if it is longer than the margin allows.
    fn name(&self, tenant: usize) -> String {
        let name = crate::table::visible(self.names.get(tenant).copied().unwrap_or_default());
        if name.chars().count() <= NAME_MAX {
            return escape(&name);
        }
        escape(&name.chars().take(NAME_MAX - 1).chain(['\u{2026}']).collect::<String>())
    }
}

/// A line and a time label at each tenth of the span.
fn axis(out: &mut String, (left, width): (u64, u64), (top, end): (u64, u64), span: Nanos) {
    for tick in 0..=10_u64 {
        let (time, x) = (Nanos(span.0 / 10 * tick), left + width * tick / 10);
        let _ = writeln!(
            out,
            "<line x1=\"{x}\" y1=\"{top}\" x2=\"{x}\" y2=\"{end}\" stroke=\"#999\" stroke-width=\"0.4\"/>"
        );
        let _ = writeln!(out, "<text x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{time}</text>", end + 16);
    }
}

fn place(used: &[usize], tenant: usize) -> usize {
    used.iter().position(|one| *one == tenant).unwrap_or(0)
}

fn letter(used: &[usize], tenant: usize) -> char {
    LETTERS.chars().nth(place(used, tenant)).unwrap_or('#')
}

/// Hues that are distinct for any number of tenants (steps of the golden angle), with a saturation of 60 %. As RGB,
/// because SVG 1.1 has no hsl().
fn colour(used: &[usize], tenant: usize) -> String {
    let place = place(used, tenant);
    let light: f64 = [0.45, 0.6, 0.35].get(place / 12 % 3).copied().unwrap_or(0.45);
    let hue = (place * 137_508 / 1_000 % 360) as f64;
    let channel = |offset: f64| {
        let at = (offset + hue / 30.0) % 12.0;
        let part = (at - 3.0).min(9.0 - at).clamp(-1.0, 1.0);
        // In range: a fraction of 255.
        ((light - 0.6 * light.min(1.0 - light) * part) * 255.0).round() as u8
    };
    format!("#{:02x}{:02x}{:02x}", channel(0.0), channel(8.0), channel(4.0))
}

fn escape(text: &str) -> String {
    let text = crate::table::visible(text);
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_colour_is_one_of_svg_1_1() {
        // hsl(0, 60 %, 45 %) and hsl(137, 60 %, 45 %)
        assert_eq!([0, 1].map(|tenant| colour(&[0, 1], tenant)), ["#b82e2e", "#2eb855"]);
    }

    fn run(cpu: u32, vcpu: usize, start: u64, end: u64) -> Run {
        Run { cpu, vcpu, rta: vcpu, start: Nanos(start), end: Nanos(end) }
    }

    #[test]
    fn rows_columns_and_names_are_right() {
        let runs = [run(0, 0, 0, 50), run(0, 1, 50, 100), run(1, 1, 0, 25)];
        let place = |tenant| PlacedVcpu { tenant, number: 0, first_rta: tenant };
        let places = vec![place(0), place(1)];
        let deadlines = [(0, Nanos(60)), (1, Nanos(100)), (1, Nanos(170))];
        let names = vec!["first", "<b>\x1b"];
        let picture = Picture { runs: &runs, deadlines: &deadlines, places, names, cpus: 4, span: Nanos(100) };
        let text = picture.text();
        let rows: Vec<&str> = text.lines().collect();
        assert_eq!(rows[0], format!("CPU 0   {}{}", "A".repeat(50), "B".repeat(50)));
        assert_eq!(rows[1], format!("CPU 1   {}{}", "B".repeat(25), ".".repeat(75)));
        assert_eq!(rows[3], "  CPUs 2 to 3 have no RTA.");
        assert!(rows[5].ends_with("B <b>\u{fffd}"), "{text}");
        let svg = picture.svg();
        assert!(svg.contains("&lt;b&gt;") && !svg.contains('\x1b'));
        let svg = roxmltree::Document::parse(&svg).unwrap();
        let marks = svg.descendants().filter(|node| node.attribute("class") == Some("deadline"));
        let marks: Vec<&str> = marks.filter_map(|mark| mark.first_element_child()?.text()).collect();
        assert_eq!(marks, ["first: deadline 60 ns", "<b>\u{fffd}: deadline 100 ns"]);
    }

    #[test]
    fn no_label_is_cut_and_no_run_is_out_of_sight() {
        let names: Vec<String> =
            (0..15).map(|index| format!("{}-{index}", "a-vm-of-a-long-name".repeat(index))).collect();
        let step = 2_000_000;
        let runs: Vec<Run> = (0..1_500)
            .map(|index| {
                run(index % 15, index as usize % 15, u64::from(index / 15) * step, u64::from(index / 15 + 1) * step)
            })
            .collect();
        let places = (0..15).map(|tenant| PlacedVcpu { tenant, number: 0, first_rta: tenant }).collect();
        let names = names.iter().map(String::as_str).collect();
        let span = Nanos::from_millis(200);
        let picture = Picture { runs: &runs, deadlines: &[(14, span)], places, names, cpus: 15, span };
        let text = picture.svg();
        let svg = roxmltree::Document::parse(&text).unwrap();
        let number =
            |node: &roxmltree::Node<'_, '_>, name: &str| -> f64 { node.attribute(name).unwrap().parse().unwrap() };
        let root = svg.root_element();
        let (width, height) = (number(&root, "width"), number(&root, "height"));
        let lanes: Vec<f64> = root
            .children()
            .filter(|node| node.attribute("fill") == Some("#f2f2f2"))
            .map(|lane| number(&lane, "x"))
            .collect();
        assert_eq!(lanes.len(), 30);
        for label in root.children().filter(|node| node.has_tag_name("text")) {
            let length = label.text().unwrap().chars().count() as f64 * CHARACTER as f64;
            let x = number(&label, "x");
            let (from, to) = if label.attribute("text-anchor").is_some() {
                (x - length / 2.0, x + length / 2.0)
            } else {
                (x, x + length)
            };
            let end = if label.attribute("text-anchor").is_some() { width } else { lanes[0] };
            assert!(from >= 0.0 && to <= end && number(&label, "y") < height, "{label:?} from {from} to {to}");
        }
        // A run of 2 ms is wide enough to be visible.
        let is_bar = |node: &roxmltree::Node<'_, '_>| node.has_tag_name("rect") && node.has_children();
        let bars: Vec<_> = root.children().filter(is_bar).collect();
        assert_eq!(bars.len(), 3_000);
        assert!(
            bars.iter().all(|bar| number(bar, "width") >= 20.0 && number(bar, "x") + number(bar, "width") <= width)
        );
    }
}
