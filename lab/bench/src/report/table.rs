//! A report for a terminal: notes for the reader, the goals, then the table and the verdict.
//!
//! In: a [`Report`]. Out: lines of at most [`WIDTH`] columns. The table has a column for each figure that differs
//! between cases, as far as there is room. The order is: the figures by which every experiment is evaluated (ratio,
//! p99, maximum), the figures of its goals, the figures that the experiment names, its metrics, and the rest. A figure
//! that is the same in every case is stated once above the table. Columns without room are named below it.

use std::fmt::Write as _;

use comfy_table::presets::NOTHING;
use comfy_table::{Cell, CellAlignment, ContentArrangement, Table};
use ontime_figures::number;
use textwrap::core::display_width;
use textwrap::{Options, WordSplitter, fill};

use super::names::{Names, labels};
use super::own::{self, Own};
use super::{counted_goals, experiment, paper_below, printed, rows, timed, unfavourable};
use crate::goals::{Figure, Measure};
use crate::schema::{Bound, Goal, JOBS, LATE, MISSED, MethodResult, PaperRow, REFUSED, Report};

/// Maximum width of a report, columns.
pub(super) const WIDTH: usize = 100;
/// Space between two table columns.
const GAP: usize = 2;
/// Maximum width of a head's lines.
const HEAD: usize = 10;
/// Maximum width of a cell's lines, for numbers and for words.
const NUMBER: usize = 14;
const WORDS: usize = 40;
/// Maximum width of the name of a result's part.
const PART: usize = 24;
/// Minimum width of the columns that name the rows.
const NARROWEST: usize = 8;
/// Maximum of rows for a result's parts. The page and the JSON have all.
const PARTS: usize = 8;
/// Maximum of methods that are explained above the table. The page explains all.
const LEGEND: usize = 12;
/// Maximum of missed goals that the verdict names. All are listed above the table.
const GOALS: usize = 5;
const DASH: &str = "-";

/// The rank of a column: columns with a lower rank get room first. Columns of rank [`ALWAYS`] are never left out.
type Rank = usize;
const ALWAYS: Rank = 0;
const JUDGED: Rank = 1;
const NAMED: Rank = 2;
const METRIC: Rank = 3;
const REST: Rank = 4;

/// Figures of every result, in the order of the table. The experiment's metrics come between the two lists.
const TIMES: [Figure; 9] = [
    Figure::Mean,
    Figure::P50,
    Figure::P90,
    Figure::P95,
    Figure::P99,
    Figure::P99_9,
    Figure::P99_99,
    Figure::Max,
    Figure::Sd,
];
const OTHERS: [Figure; 4] = [Figure::Bulk, Figure::Cpu, Figure::Lost, Figure::Count];
/// Figures that a table has if there is room. Others are included only if the experiment or a goal names them.
const ROOM: [Figure; 8] =
    [Figure::P50, Figure::Bulk, Figure::Lost, Figure::P99_9, Figure::Cpu, Figure::Mean, Figure::Sd, Figure::Count];

/// The explanation of the clocks, notes, goals, unfavourable figures; then the paper's table, ours, and the verdict.
pub fn terminal(report: &Report) -> String {
    let mut text = String::new();
    let mut clocks: Vec<_> = report.results.iter().map(|result| result.clock).collect();
    clocks.sort_unstable();
    clocks.dedup();
    for clock in clocks {
        add_paragraph(&mut text, &format!("{} clock: {}", clock.name(), clock.meaning()));
    }
    for note in &report.notes {
        add_paragraph(&mut text, note);
    }
    let names = Names::of(report);
    for line in names.notes(report).into_iter().chain(legend(report)) {
        add_paragraph(&mut text, &line);
    }
    for line in goals(report).lines() {
        add_paragraph(&mut text, line);
    }
    let against = unfavourable(report);
    if !against.is_empty() {
        text.push_str("Unfavourable:\n");
        for sentence in against {
            add_paragraph(&mut text, &format!("- {sentence}"));
        }
    }
    let again = format!("Again: {}", report.command);
    let _ = writeln!(text, "{}", wrapped(&again, WIDTH - 6).join(" \\\n    "));
    text.push_str(&paper(report));
    text.push_str(&parts(report, &names));
    text.push_str(&ours(report, &names));
    add_paragraph(&mut text, &verdict(report));
    text
}

/// Wraps text to the width of a terminal.
pub(crate) fn fitted(text: &str) -> String {
    let options = Options::new(WIDTH).subsequent_indent("  ").word_splitter(WordSplitter::NoHyphenation);
    // Each line is filled separately, because `fill` indents every line but the very first.
    text.split('\n').map(|line| fill(line, &options)).collect::<Vec<_>>().join("\n")
}

/// Adds a paragraph, wrapped into lines.
fn add_paragraph(text: &mut String, paragraph: &str) {
    let _ = writeln!(text, "{}", fitted(paragraph));
}

/// Wraps text into lines of at most this width, unless a word is longer.
fn wrapped(text: &str, width: usize) -> Vec<String> {
    let options =
        Options::new(width).subsequent_indent("").break_words(false).word_splitter(WordSplitter::NoHyphenation);
    textwrap::wrap(text, options).into_iter().map(|line| line.into_owned()).collect()
}

/// Wraps a cell into lines of at most this width. Words are broken at hyphens first.
fn narrow(text: &str, width: usize) -> String {
    fill(text, Options::new(width).word_splitter(WordSplitter::HyphenSplitter))
}

/// The paper's figures; empty if its text states none.
fn paper(report: &Report) -> String {
    let Some(first) = report.paper.first() else { return String::new() };
    let mut text = String::from("\n");
    add_paragraph(&mut text, &format!("The paper's, {}: {}", first.source, first.conditions));
    let figure = |head: &str, print: &dyn Fn(&PaperRow) -> String| {
        Column::new(head, false, NAMED, report.paper.iter().map(print).collect())
    };
    let columns = vec![
        figure(BELOW, &|row| paper_below(report, row).map(number::significant).unwrap_or_default()),
        figure("mean, µs", &|row| number::us(row.mean_us)),
        figure("p99, µs", &|row| number::us(row.p99_us)),
        figure("sd, µs", &|row| number::us(row.sd_us)),
        figure("bulk, Gbit/s", &|row| number::significant(row.bulk_gbps)),
    ];
    let method = report.paper.iter().map(|row| row.method.clone()).collect();
    text + &draw(&[Column::new("method", true, ALWAYS, method)], &columns)
}

/// The column head of the ratio to `vanilla`.
const BELOW: &str = "p99 below vanilla, times";

/// The table of our results. Figures that are the same in every case are above it, columns without room below it.
fn ours(report: &Report, names: &Names) -> String {
    let mut ids = id_columns(names);
    let mut text = format!("\n{}: {}\n", report.experiment, timed(report));
    let (same, shown, left) = arrange(&mut ids, columns(report), report.results.len());
    let same: Vec<String> = names.same.iter().cloned().chain(same).collect();
    if !same.is_empty() {
        add_paragraph(&mut text, &format!("In every case: {}", same.join("; ")));
    }
    text.push_str(&draw(&ids, &shown));
    if !left.is_empty() {
        add_paragraph(&mut text, &format!("More columns (--csv, --html): {}", left.join(", ")));
    }
    text
}

/// Figures of the results' parts: segments, applications, inversions.
fn parts(report: &Report, names: &Names) -> String {
    let Some(own) = own::table(report, false, None) else { return String::new() };
    let place =
        |result: &MethodResult| report.results.iter().position(|of| std::ptr::eq(of, result)).unwrap_or_default();
    let mut rows: Vec<(usize, Vec<String>)> = Vec::new();
    for of in own.rows.chunk_by(|(one, _), (other, _)| std::ptr::eq(*one, *other)) {
        rows.extend(of.iter().take(PARTS).map(|(result, cells)| (place(result), cells.clone())));
        if let (Some((result, _)), more @ 1..) = (of.first(), of.len().saturating_sub(PARTS)) {
            rows.push((place(result), vec![format!("{more} more: --json")]));
        }
    }
    let cells = |column: usize| rows.iter().map(|(_, cells)| cells.get(column).cloned().unwrap_or_default()).collect();
    let named = |of: &Column| {
        let cells = rows.iter().map(|(place, _)| of.cells.get(*place).cloned().unwrap_or_default()).collect();
        Column { cells, ..of.clone() }
    };
    let mut ids: Vec<Column> = id_columns(names).iter().map(named).collect();
    let mut figures = Vec::new();
    for (column, (head, words)) in own.heads.iter().zip(&own.words).enumerate() {
        match column {
            0 => ids.push(Column { limit: PART, ..Column::new(head, true, ALWAYS, cells(column)) }),
            _ => figures.push(Column::metric(head, *words, &[], cells(column))),
        }
    }
    // A figure of every part is in the table, even if it is the same in all parts.
    let (_, shown, left) = arrange(&mut ids, figures, 0);
    let mut text = format!("\n{}", draw(&ids, &shown));
    if !left.is_empty() {
        add_paragraph(&mut text, &format!("More columns (--csv, --html): {}", left.join(", ")));
    }
    text
}

/// A column of a table.
#[derive(Debug, Clone)]
struct Column {
    /// Name, and after a comma the unit.
    head: String,
    words: bool,
    rank: Rank,
    /// Maximum width of its cells' lines.
    limit: usize,
    /// An empty cell means not measured.
    cells: Vec<String>,
}

impl Column {
    fn new(head: &str, words: bool, rank: Rank, cells: Vec<String>) -> Self {
        Self { head: head.to_owned(), words, rank, limit: if words { WORDS } else { NUMBER }, cells }
    }

    /// A column for an experiment's metric. Response times of a part have the rank of those of the whole.
    fn metric(head: &str, words: bool, judged: &[Figure], cells: Vec<String>) -> Self {
        let mut column = Self::new(head, words, METRIC, cells);
        let is_judged = |figure: &Figure| matches!(figure, Figure::Own(key) if key.replace('-', " ") == column.name());
        if [Figure::P99, Figure::Max].iter().any(|figure| figure.head() == head) {
            column.rank = ALWAYS;
        } else if judged.iter().any(is_judged) {
            column.rank = JUDGED;
        }
        column
    }

    /// The name without its unit.
    fn name(&self) -> &str {
        self.head.split_once(", ").map_or(self.head.as_str(), |(name, _)| name)
    }

    /// Lines of the head. The unit is the last line.
    fn head_lines(&self) -> Vec<String> {
        let mut lines = wrapped(self.name(), HEAD);
        lines.extend(self.head.split_once(", ").map(|(_, unit)| unit.to_owned()));
        lines
    }

    /// Width, including the space to the next column.
    fn width(&self) -> usize {
        let head = self.head_lines().iter().map(|line| display_width(line)).max().unwrap_or_default();
        let lines = |cell: &String| narrow(cell, self.limit).lines().map(display_width).max();
        let cells = self.cells.iter().filter_map(lines).max().unwrap_or_default();
        head.max(cells).max(DASH.len()) + GAP
    }

    /// The value, if every case has the same.
    fn same(&self) -> Option<String> {
        let first = self.cells.first()?;
        let is_same = self.cells.len() > 1 && !first.is_empty() && self.cells.iter().all(|cell| cell == first);
        let unit = self.head.split_once(", ").map_or_else(String::new, |(_, unit)| format!(" {unit}"));
        is_same.then(|| format!("{} {first}{unit}", self.name()))
    }
}

/// Figures that all of at least two `cases` have in common, columns that have room, and names of the other columns. If
/// there is no room for a column of rank [`ALWAYS`], or for any column, the columns that name the rows are made
/// narrower.
fn arrange(ids: &mut [Column], columns: Vec<Column>, cases: usize) -> (Vec<String>, Vec<Column>, Vec<String>) {
    let (mut same, mut differ) = (Vec::new(), Vec::new());
    for column in columns.into_iter().filter(|column| column.cells.iter().any(|cell| !cell.is_empty())) {
        match column.same().filter(|_| column.rank != ALWAYS && cases > 1) {
            Some(said) => same.push(said),
            None => differ.push(column),
        }
    }
    let always = differ.iter().filter(|column| column.rank == ALWAYS).map(Column::width).sum::<usize>();
    let least = differ.iter().map(Column::width).max().unwrap_or_default().max(always);
    while ids.iter().map(Column::width).sum::<usize>() + least > WIDTH {
        let Some(widest) = ids.iter_mut().filter(|id| id.limit > NARROWEST).max_by_key(|id| id.width()) else { break };
        widest.limit = (widest.width() - GAP).min(widest.limit).saturating_sub(1).max(NARROWEST);
    }
    let mut order: Vec<usize> = (0..differ.len()).collect();
    order.sort_by_key(|place| differ.get(*place).map(|column| column.rank));
    let mut room = WIDTH.saturating_sub(ids.iter().map(Column::width).sum());
    let mut has_room = vec![false; differ.len()];
    for place in order {
        if let (Some(column), Some(has_room)) = (differ.get(place), has_room.get_mut(place)) {
            if let Some(left) = room.checked_sub(column.width()) {
                (room, *has_room) = (left, true);
            }
        }
    }
    let (mut shown, mut left) = (Vec::new(), Vec::new());
    for (column, has_room) in differ.into_iter().zip(has_room) {
        if has_room {
            shown.push(column);
        } else {
            left.push(column.name().to_owned());
        }
    }
    (same, shown, left)
}

/// Draws the columns side by side; the last lines of the heads are directly above their cells.
fn draw(ids: &[Column], columns: &[Column]) -> String {
    let all: Vec<&Column> = ids.iter().chain(columns).collect();
    let heads: Vec<Vec<String>> = all.iter().map(|column| column.head_lines()).collect();
    let high = heads.iter().map(Vec::len).max().unwrap_or_default();
    let cell = |text: String, column: &Column| {
        Cell::new(text).set_alignment(if column.words { CellAlignment::Left } else { CellAlignment::Right })
    };
    let mut table = Table::new();
    table.load_preset(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(
        heads.iter().zip(&all).map(|(lines, column)| cell("\n".repeat(high - lines.len()) + &lines.join("\n"), column)),
    );
    let count = all.iter().map(|column| column.cells.len()).max().unwrap_or_default();
    for row in 0..count {
        table.add_row(all.iter().map(|column| {
            let text = column.cells.get(row).filter(|text| !text.is_empty());
            cell(text.map_or_else(|| DASH.to_owned(), |text| narrow(text, column.limit)), column)
        }));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, GAP as u16));
    }
    let text = table.to_string();
    let mut lines: Vec<String> = text.lines().map(|line| line.trim_end().to_owned()).collect();
    let rule = "─".repeat(lines.iter().map(|line| display_width(line)).max().unwrap_or_default());
    lines.insert(high.min(lines.len()), rule);
    lines.into_iter().map(|line| line + "\n").collect()
}

/// Every figure of our results, in the order of the table.
fn columns(report: &Report) -> Vec<Column> {
    let named = experiment(report).map_or(&[][..], |experiment| experiment.columns());
    let goals = experiment(report).map_or_else(Vec::new, |experiment| experiment.goals());
    let judged: Vec<Figure> = goals.into_iter().flat_map(|goal| judged(goal.measure)).collect();
    let rank = |figure: Figure| match figure {
        Figure::P99 | Figure::Max => Some(ALWAYS),
        _ if judged.contains(&figure) => Some(JUDGED),
        _ if named.contains(&figure) => Some(NAMED),
        _ => ROOM.iter().position(|of| *of == figure).map(|place| REST + place),
    };
    let figure = |figure: &Figure| {
        let cells = report.results.iter().map(|result| printed(*figure, result).unwrap_or_default()).collect();
        Some(Column::new(figure.head(), false, rank(*figure)?, cells))
    };
    let below = rows(report).into_iter().filter(|row| row.result.is_some());
    let below = below.map(|row| row.below_vanilla.map(number::significant).unwrap_or_default()).collect();
    let mut columns = vec![Column::new(BELOW, false, ALWAYS, below)];
    columns.extend(TIMES.iter().filter_map(figure));
    if let Some(Own { heads, words, rows, .. }) = own::table(report, false, Some(&[])) {
        for (place, (head, words)) in heads.iter().zip(words).enumerate() {
            let cells = rows.iter().map(|(_, cells)| cells.get(place).cloned().unwrap_or_default()).collect();
            columns.push(Column::metric(head, words, &judged, cells));
        }
    }
    columns.extend(OTHERS.iter().filter_map(figure));
    columns
}

/// The figures that a goal uses.
fn judged(measure: Measure) -> Vec<Figure> {
    match measure {
        Measure::Ratio(figure, ..) | Measure::Beyond(figure, ..) | Measure::Only(figure, _) => vec![figure],
        Measure::Late(_) => vec![Figure::Own(LATE), Figure::Lost],
        Measure::Missed(_) => [MISSED, JOBS, REFUSED].map(Figure::Own).to_vec(),
        Measure::LeastCount => Vec::new(),
    }
}

/// The columns that name the rows: the method, and each condition that is not the same in every case.
fn id_columns(names: &Names) -> Vec<Column> {
    let column = |head: &str, cells: &[String]| Column::new(head, true, ALWAYS, cells.to_vec());
    let conditions = names.conditions.iter().map(|condition| column(condition.head, &condition.cells));
    std::iter::once(column("method", &names.methods)).chain(conditions).collect()
}

/// A description of each method.
fn legend(report: &Report) -> Vec<String> {
    let all: Vec<String> = labels(report).iter().map(|(method, label)| format!("{method}: {label}")).collect();
    if all.len() > LEGEND { vec!["The cases in words: --html".to_owned()] } else { all }
}

/// The goals, one per line: met, NOT MET or not measured.
pub fn goals(report: &Report) -> String {
    let mut text = String::new();
    for goal in &report.goals {
        let information = if goal.binding { "" } else { ", for information" };
        let _ = writeln!(
            text,
            "[{:^12}] {} (Linux {}{information}): {} {} {}; {}",
            outcome(goal),
            goal.text,
            goal.kernel_series,
            actual(goal),
            if goal.bound == Bound::AtLeast { ">=" } else { "<=" },
            number::significant(goal.target),
            goal.figures
        );
    }
    text
}

fn outcome(goal: &Goal) -> &'static str {
    match (goal.met, goal.binding) {
        (Some(true), _) => "met",
        (Some(false), true) => "NOT MET",
        (Some(false), false) => "not met",
        (None, _) => "not measured",
    }
}

fn actual(goal: &Goal) -> String {
    goal.actual.map_or_else(|| DASH.to_string(), number::significant)
}

/// The number of goals met, and the names of those not met.
fn verdict(report: &Report) -> String {
    let (goals, binding) = counted_goals(report);
    if goals.is_empty() {
        return format!("Verdict: {} has no goals", report.experiment);
    }
    let met = goals.iter().filter(|goal| goal.met == Some(true)).count();
    let information = if binding { "" } else { ", for information" };
    let mut text = format!("Verdict: {met} of {} goals met{information}", goals.len());
    for (met, words) in [(Some(false), "NOT MET"), (None, "not measured")] {
        let of = goals.iter().filter(|goal| goal.met == met);
        let name = |goal: &&Goal| {
            let bound = if goal.bound == Bound::AtLeast { "at least" } else { "at most" };
            let figures = format!(" ({}; goal: {bound} {})", actual(goal), number::significant(goal.target));
            goal.id.clone() + if met.is_none() { "" } else { &figures }
        };
        let mut names: Vec<String> = of.map(name).collect();
        if let more @ 1.. = names.len().saturating_sub(GOALS) {
            names.truncate(GOALS);
            names.push(format!("and {more} more above"));
        }
        if !names.is_empty() {
            let _ = write!(text, "; {words}: {}", names.join(", "));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_that_have_room_stay_as_they_are() {
        let text = format!("head\n  {:<20} {:>9}\n{}\n", "a", 1, "long ".repeat(30).trim());
        let fitted = fitted(&text);
        let lines: Vec<&str> = fitted.split('\n').collect();
        assert_eq!(lines[..2], ["head", &format!("  {:<20} {:>9}", "a", 1)]);
        assert!(lines[2].len() <= WIDTH && lines[3].starts_with("  long") && lines[4..] == [""], "{lines:?}");
    }
}
