//! An experiment's own figures as tables: of each result as a whole, then of its parts.
//!
//! In: a [`Report`]. Out: [`FigureTable`]. The columns are the figures that the experiment names, then its metrics in
//! the order in which they first appear in the results.

use super::{experiment, printed};
use crate::goals::Figure;
use crate::schema::{MethodResult, Metric, Report, Unit};

/// A table of an experiment's own figures.
#[derive(Debug)]
pub struct FigureTable<'a> {
    /// Heads of the columns: the kind of row, and each figure.
    pub heads: Vec<String>,
    /// Whether each column contains words.
    pub words: Vec<bool>,
    /// A result and its cells. An empty cell was not measured.
    pub rows: Vec<(&'a MethodResult, Vec<String>)>,
}

/// The tables of a report; none if its experiment has only response times. Without `sentences`, metrics that are
/// sentences are left out.
pub fn figure_tables(report: &Report, sentences: bool) -> Vec<FigureTable<'_>> {
    let columns = experiment(report).map_or(&[][..], |experiment| experiment.columns());
    [Some(columns), None].into_iter().filter_map(|columns| table(report, sentences, columns)).collect()
}

/// The table of results as a whole, with these first columns, or the table of their parts.
pub(super) fn table<'a>(report: &'a Report, sentences: bool, columns: Option<&[Figure]>) -> Option<FigureTable<'a>> {
    let is_shown =
        |metric: &&Metric| metric.part.is_none() == columns.is_some() && (sentences || metric.unit != Unit::Sentence);
    let mut keys: Vec<&Metric> = Vec::new();
    for metric in report.results.iter().flat_map(|result| &result.metrics).filter(is_shown) {
        if !keys.iter().any(|key| key.key == metric.key) {
            keys.push(metric);
        }
    }
    if keys.is_empty() && columns.is_none_or(<[Figure]>::is_empty) {
        return None;
    }
    let (mut heads, mut words): (Vec<String>, Vec<bool>) = match columns {
        Some(columns) => columns.iter().map(|figure| (figure.head().to_owned(), false)).unzip(),
        None => (vec!["of".to_owned()], vec![true]),
    };
    heads.extend(keys.iter().map(|key| head(key)));
    words.extend(keys.iter().map(|key| matches!(key.unit, Unit::Word | Unit::Sentence)));
    let mut rows = Vec::new();
    for result in &report.results {
        let mut parts: Vec<&Option<String>> = result.metrics.iter().filter(is_shown).map(|of| &of.part).collect();
        parts.dedup();
        if parts.is_empty() && columns.is_some() {
            parts.push(&None);
        }
        for part in parts {
            let mut cells: Vec<String> = match columns {
                Some(columns) => columns.iter().map(|figure| printed(*figure, result).unwrap_or_default()).collect(),
                None => part.iter().cloned().collect(),
            };
            cells.extend(keys.iter().map(|key| {
                let found = result.metrics.iter().find(|metric| metric.part == *part && metric.key == key.key);
                found.map(Metric::print).unwrap_or_default()
            }));
            rows.push((result, cells));
        }
    }
    Some(FigureTable { heads, words, rows })
}

fn head(metric: &Metric) -> String {
    let name = metric.key.replace('-', " ");
    match metric.unit.description() {
        "" => name,
        unit => format!("{name}, {unit}"),
    }
}
