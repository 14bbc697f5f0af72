//! The report in a terminal: redrawn by the live view, and printed at the end.
//!
//! Input: a [`Document`]. Output: lines.

use std::fmt::Write as _;

use ontime_figures::number;
use textwrap::core::display_width;

use crate::report::{Document, Figures, PathReport};
use crate::request::Segment;

/// Number of cures shown, and of inversions per cure; the rest is in the JSON.
const CURES: usize = 6;
const OF_CURE: usize = 3;
/// Columns per line.
const WIDTH: usize = 80;

/// The report as text, in lines of at most 80 columns.
pub fn text(document: &Document) -> String {
    let mut out = String::new();
    for path in &document.paths {
        of_path(&mut out, path);
    }
    inversions(&mut out, document);
    footer(&mut out, document);
    out.lines().map(wrapped).collect()
}

/// A line with its end, wrapped at 80 columns; continuation lines are indented by two more columns.
pub fn wrapped(line: &str) -> String {
    let own = line.chars().take_while(|c| *c == ' ').count().min(WIDTH / 2);
    let (first, rest) = (" ".repeat(own), " ".repeat(own + 2));
    let options = textwrap::Options::new(WIDTH).initial_indent(&first).subsequent_indent(&rest);
    let options = options.word_splitter(textwrap::WordSplitter::NoHyphenation);
    let mut text =
        if display_width(line) <= WIDTH { line.to_owned() } else { textwrap::fill(line.trim_start(), options) };
    text.push('\n');
    text
}

fn of_path(out: &mut String, path: &PathReport) {
    let counts = path.counts;
    let nics = path.nics.join(", ");
    let _ = writeln!(out, "{} ({}) by {nics}: {} requests", path.tenant, path.class, number::count(counts.requests));
    let mut not_told = Vec::new();
    for (count, words) in [
        (counts.unanswered, "without reply"),
        (counts.unasked, "packets that answered nothing"),
        (counts.dropped, "dropped with lost events"),
        (counts.inexact, "while the guest ran already"),
    ] {
        if count > 0 {
            not_told.push(format!("{} {words}", number::count(count)));
        }
    }
    if !not_told.is_empty() {
        let _ = writeln!(out, "  {}", not_told.join(", "));
    }
    if let Some(total) = &path.total {
        let head = ["min", "mean", "p50", "p95", "p99", "p99.9", "max"];
        let _ = writeln!(out, "  {:22}{}", "us", head.map(|name| format!("{name:>8}")).concat());
        for segment in Segment::ALL {
            if let Some(figures) = path.segments.get(segment.name()) {
                row(out, segment.name(), figures);
            }
        }
        row(out, "in all", total);
        if let Some(stolen) = &path.stolen {
            row(out, "runnable, not running", stolen);
        }
    }
}

fn row(out: &mut String, name: &str, figures: &Figures) {
    let Figures { min, mean, p50, p95, p99, p99_9, max, .. } = *figures;
    let cells = [min, mean, p50, p95, p99, p99_9, max].map(|value| format!("{:>8}", number::us(value))).concat();
    let _ = writeln!(out, "  {name:22}{cells}");
}

fn inversions(out: &mut String, document: &Document) {
    if document.inversions.is_empty() {
        let none =
            if document.inversions_looked_for { "no priority inversion" } else { "inversions were not looked for" };
        let _ = writeln!(out, "\n{none}");
        return;
    }
    let _ = writeln!(out, "\npriority inversions ({} requests hindered)", number::count(document.hindered));
    let cures = document.by_cure();
    let mut shown = 0;
    for of in cures.iter().take(CURES) {
        let rule = of.rule.map_or_else(|| "no rule".to_owned(), |rule| rule.to_string());
        let (times, max) = (number::count(of.times()), number::us(of.max_us()));
        let _ = writeln!(out, "  {times} x, max {max} us, cure [{rule}]: {}", of.cure);
        for inversion in of.inversions.iter().take(OF_CURE) {
            let (times, max) = (number::count(inversion.requests), number::us(inversion.max_us));
            let _ = writeln!(out, "    {times} x, max {max} us: {}", inversion.example);
            shown += 1;
        }
    }
    let more = document.inversions.len().saturating_sub(shown) as u64 + document.inversions_unnamed;
    if more > 0 {
        let _ = writeln!(out, "  and {more} more (--json has them)");
    }
}

fn footer(out: &mut String, document: &Document) {
    let tracing = &document.tracing;
    let events: u64 = tracing.events.values().sum();
    let _ = write!(out, "\n{} events in {:.1} s", number::count(events), document.duration_s);
    if let (Some(probe), Some(four)) = (tracing.probe_ns, tracing.four_probes_us) {
        let _ = write!(out, "; a probe costs {probe:.0} ns, four {four:.2} us");
    }
    if let Some(share) = tracing.cpu_share {
        let _ = write!(out, "; all together {} of the watched CPUs", number::percent(share));
    }
    out.push('\n');
    if document.lost() > 0 {
        let of_cpus: Vec<String> =
            tracing.lost.iter().map(|(cpu, count)| format!("CPU {cpu}: {}", number::count(*count))).collect();
        let _ = writeln!(
            out,
            "LOST at least {} events ({}): the ring was full; use a larger --ring",
            number::count(document.lost()),
            of_cpus.join(", ")
        );
    }
    if tracing.undecoded > 0 {
        let _ = writeln!(
            out,
            "{} records could not be read: their format is not this kernel's; report it (`ontime report`)",
            number::count(tracing.undecoded)
        );
    }
    for hint in document.hints.lines() {
        let _ = writeln!(out, "hint: {hint}");
    }
    for note in &document.notes {
        let _ = writeln!(out, "note: {note}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_with_wide_characters_have_at_most_80_columns() {
        // 66 characters, 106 columns.
        let line = format!("  {}", "制御盤の仮想計算機 waits ".repeat(4));
        assert!(line.chars().count() <= WIDTH && display_width(&line) > WIDTH);
        let text = wrapped(&line);
        assert!(text.lines().count() == 2 && text.lines().all(|line| display_width(line) <= WIDTH), "{text}");
        assert!(text.lines().all(|line| line.starts_with("  ")), "{text}");
        assert_eq!(wrapped("  制御盤"), "  制御盤\n");
    }
}
