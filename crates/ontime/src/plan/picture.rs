//! The simulated schedule as a picture: a row a CPU, a colour or letter a tenant.

use std::fmt::Write;

use ontime_plan::simulate::Run;
use ontime_plan::{Nanos, Vcpu};

/// Widths of the drawing, in pixels.
const WIDTH: u64 = 1_000;
const LEFT: u64 = 70;
const ROW: u64 = 26;
/// Columns in a terminal.
const COLUMNS: u64 = 100;
const LETTERS: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";

/// A vCPU of the schedule, as its tenant counts.
#[derive(Debug, Clone, Copy, Default)]
pub struct Place {
    /// Its tenant's index.
    tenant: usize,
    /// Its number there.
    number: usize,
    /// Its first RTA, as [`Run::rta`] counts.
    first_rta: usize,
}

/// Places of a host's vCPUs, each with the index of its tenant.
pub fn places(vcpus: &[(usize, Vcpu)]) -> Vec<Place> {
    let mut rtas = 0;
    let place = |(at, (tenant, vcpu)): (usize, &(usize, Vcpu))| {
        let number = vcpus.iter().take(at).filter(|(other, _)| other == tenant).count();
        let first_rta = rtas;
        rtas += vcpu.rtas().len();
        Place { tenant: *tenant, number, first_rta }
    };
    vcpus.iter().enumerate().map(place).collect()
}

/// A schedule to draw.
pub struct Picture<'a> {
    /// The runs, by CPU and time.
    pub runs: &'a [Run],
    /// Of each vCPU.
    pub places: Vec<Place>,
    /// Names of all tenants.
    pub names: Vec<&'a str>,
    /// How many CPUs.
    pub cpus: u32,
    /// From 0 to here.
    pub span: Nanos,
}

impl Picture<'_> {
    fn place(&self, run: &Run) -> Place {
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

    /// For a terminal: in each column, who ran longest; `.` if none did.
    pub fn text(&self) -> String {
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

    /// As SVG, each run with its tenant, RTA and times as a tooltip.
    pub fn svg(&self) -> String {
        let used = self.used();
        let (span, rows) = (self.span.0.max(1), u64::from(self.cpus));
        let at = |time: Nanos| LEFT as f64 + WIDTH as f64 * time.0.min(span) as f64 / span as f64;
        let height = rows * ROW + 60 + ROW * (used.len() as u64).div_ceil(5);
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {} {height}\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <title>Simulation: the first {} of the schedule</title>\n<rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n",
            LEFT + WIDTH + 20,
            self.span,
        );
        for cpu in 0..self.cpus {
            let y = u64::from(cpu) * ROW + 10;
            let _ = writeln!(out, "<text x=\"8\" y=\"{}\">CPU {cpu}</text>", y + 15);
            let _ = writeln!(out, "<rect x=\"{LEFT}\" y=\"{y}\" width=\"{WIDTH}\" height=\"20\" fill=\"#f2f2f2\"/>");
        }
        for run in self.runs.iter().filter(|run| run.start < self.span) {
            let (from, to) = (at(run.start), at(run.end));
            let Place { tenant, number, first_rta } = self.place(run);
            let name = escape(self.names.get(tenant).copied().unwrap_or_default());
            let (y, colour) = (u64::from(run.cpu) * ROW + 10, colour(&used, tenant));
            let _ = writeln!(
                out,
                "<rect x=\"{from:.2}\" y=\"{y}\" width=\"{:.2}\" height=\"20\" fill=\"{colour}\" stroke=\"white\" stroke-width=\"0.3\">\
                 <title>{name}, vCPU {number}, RTA {}: {} to {}</title></rect>",
                to - from,
                run.rta.saturating_sub(first_rta),
                run.start,
                run.end,
            );
        }
        self.axis(&mut out, rows * ROW + 10);
        for (place, tenant) in (0_u64..).zip(&used) {
            let (x, y) = (LEFT + place % 5 * 200, rows * ROW + 50 + place / 5 * ROW);
            let name = escape(self.names.get(*tenant).copied().unwrap_or_default());
            let colour = colour(&used, *tenant);
            let _ = writeln!(out, "<rect x=\"{x}\" y=\"{y}\" width=\"14\" height=\"14\" fill=\"{colour}\"/>");
            let _ = writeln!(out, "<text x=\"{}\" y=\"{}\">{name}</text>", x + 20, y + 12);
        }
        out.push_str("</svg>\n");
        out
    }

    fn axis(&self, out: &mut String, y: u64) {
        for tick in 0..=10_u64 {
            let time = Nanos(self.span.0 / 10 * tick);
            let x = LEFT + WIDTH * tick / 10;
            let _ = writeln!(
                out,
                "<line x1=\"{x}\" y1=\"10\" x2=\"{x}\" y2=\"{y}\" stroke=\"#999\" stroke-width=\"0.4\"/>"
            );
            let _ = writeln!(out, "<text x=\"{x}\" y=\"{}\" text-anchor=\"middle\">{time}</text>", y + 14);
        }
    }
}

fn place(used: &[usize], tenant: usize) -> usize {
    used.iter().position(|one| *one == tenant).unwrap_or(0)
}

fn letter(used: &[usize], tenant: usize) -> char {
    LETTERS.chars().nth(place(used, tenant)).unwrap_or('#')
}

/// Hues that stay apart for any number of tenants (steps of the golden angle).
fn colour(used: &[usize], tenant: usize) -> String {
    let place = place(used, tenant);
    let light = [45, 60, 35].get(place / 12 % 3).copied().unwrap_or(45);
    format!("hsl({},60%,{light}%)", place * 137_508 / 1_000 % 360)
}

fn escape(text: &str) -> String {
    let text = crate::table::visible(text);
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(cpu: u32, vcpu: usize, start: u64, end: u64) -> Run {
        Run { cpu, vcpu, rta: vcpu, start: Nanos(start), end: Nanos(end) }
    }

    #[test]
    fn rows_columns_and_names_are_right() {
        let runs = [run(0, 0, 0, 50), run(0, 1, 50, 100), run(1, 1, 0, 25)];
        let place = |tenant| Place { tenant, number: 0, first_rta: tenant };
        let places = vec![place(0), place(1)];
        let picture = Picture { runs: &runs, places, names: vec!["first", "<b>\x1b"], cpus: 4, span: Nanos(100) };
        let text = picture.text();
        let rows: Vec<&str> = text.lines().collect();
        assert_eq!(rows[0], format!("CPU 0   {}{}", "A".repeat(50), "B".repeat(50)));
        assert_eq!(rows[1], format!("CPU 1   {}{}", "B".repeat(25), ".".repeat(75)));
        assert_eq!(rows[3], "  CPUs 2 to 3 have no RTA.");
        assert!(rows[5].ends_with("B <b>\u{fffd}"), "{text}");
        let svg = picture.svg();
        assert!(svg.contains("&lt;b&gt;") && !svg.contains('\x1b'));
        assert!(roxmltree::Document::parse(&svg).is_ok());
    }
}
