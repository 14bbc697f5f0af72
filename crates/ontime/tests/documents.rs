//! Checks of the documents: every link has a target, the summary lists every page, lines end at 120 columns, and the
//! figures of the README are those of the results.

#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test ends by panicking")]

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;
use std::fs;
use std::path::{Component, Path, PathBuf};

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

const COLUMNS: usize = 120;
/// The documentation stays short enough to be read; a token without a letter or digit (a table's bar) is no word.
const WORDS: usize = 25_000;

fn root() -> PathBuf {
    fs::canonicalize(concat!(env!("CARGO_MANIFEST_DIR"), "/../..")).unwrap()
}

/// Every file below a folder, relative to the repository, without build output.
fn files(folder: &str) -> Vec<PathBuf> {
    let root = root();
    let (mut found, mut folders) = (Vec::new(), vec![root.join(folder)]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap().map(Result::unwrap) {
            let name = entry.file_name();
            let kind = entry.file_type().unwrap();
            if kind.is_dir() && name != "target" && !name.to_string_lossy().starts_with('.') {
                folders.push(entry.path());
            } else if kind.is_file() {
                found.push(entry.path().strip_prefix(&root).unwrap().to_owned());
            }
        }
    }
    found.sort();
    found
}

fn has_ending(path: &Path, endings: &[&str]) -> bool {
    path.extension().is_some_and(|ending| endings.iter().any(|one| ending == *one))
}

fn is_markdown(path: &Path) -> bool {
    has_ending(path, &["md"])
}

/// README, ARCHITECTURE and similar files, and every page of docs.
fn documents() -> Vec<PathBuf> {
    let top = |path: &PathBuf| path.components().count() == 1 || path.starts_with("docs");
    files(".").into_iter().filter(|path| is_markdown(path) && top(path)).collect()
}

fn parser(text: &str) -> Parser<'_> {
    Parser::new_ext(text, Options::ENABLE_TABLES)
}

/// Destinations of all links and pictures.
fn links(text: &str) -> Vec<String> {
    let destination = |event| match event {
        Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => Some(dest_url.into_string()),
        _ => None,
    };
    parser(text).filter_map(destination).collect()
}

/// Anchors of the headings, as GitHub and mdBook make them.
fn anchors(text: &str) -> BTreeSet<String> {
    let (mut found, mut seen) = (BTreeSet::new(), HashMap::<String, usize>::new());
    let mut heading: Option<String> = None;
    for event in parser(text) {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::Text(words) | Event::Code(words) => {
                if let Some(heading) = &mut heading {
                    heading.push_str(&words);
                }
            }
            Event::End(TagEnd::Heading(_)) => {
                let anchor: String =
                    heading.take().unwrap_or_default().to_lowercase().chars().filter_map(kept).collect();
                let before = seen.entry(anchor.clone()).or_default();
                found.insert(if *before == 0 { anchor } else { format!("{anchor}-{before}") });
                *before += 1;
            }
            _ => {}
        }
    }
    found
}

fn kept(of: char) -> Option<char> {
    match of {
        ' ' => Some('-'),
        of if of.is_alphanumeric() || of == '-' || of == '_' => Some(of),
        _ => None,
    }
}

/// `docs/use/../README.md` as `docs/README.md`; None if the path leaves the repository.
fn resolved(path: &Path) -> Option<PathBuf> {
    let mut resolved = PathBuf::new();
    for component in path.components() {
        match component {
            Component::Normal(name) => resolved.push(name),
            Component::ParentDir => resolved.pop().then_some(())?,
            _ => return None,
        }
    }
    Some(resolved)
}

/// What is wrong with a link; None if nothing is.
fn fault(from: &Path, link: &str) -> Option<String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (path, anchor) = link.split_once('#').map_or((link, None), |(path, anchor)| (path, Some(anchor)));
    let target = if path.is_empty() { Some(from.to_owned()) } else { resolved(&from.parent()?.join(path)) };
    let there = target.filter(|target| root().join(target).exists());
    let Some(target) = there else { return Some(format!("{}: no file {link}", from.display())) };
    let known = |anchor: &str| {
        is_markdown(&target) && anchors(&fs::read_to_string(root().join(&target)).unwrap()).contains(anchor)
    };
    (!anchor.is_none_or(known)).then(|| format!("{}: no heading {link}", from.display()))
}

#[test]
fn every_link_leads_somewhere() {
    let (mut faults, mut checked) = (Vec::new(), 0);
    for document in documents() {
        for link in links(&fs::read_to_string(root().join(&document)).unwrap()) {
            checked += 1;
            faults.extend(fault(&document, &link));
        }
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
    assert!(checked > 100, "{checked} links");
}

fn words(text: &str) -> usize {
    text.split_whitespace().filter(|token| token.contains(char::is_alphanumeric)).count()
}

#[test]
fn the_documentation_is_short() {
    assert_eq!(words("| p99 | 82 us |\n|---|---|\n"), 3);
    let pages = documents().into_iter().filter(|page| page.starts_with("docs"));
    let counted: Vec<(usize, PathBuf)> =
        pages.map(|page| (words(&fs::read_to_string(root().join(&page)).unwrap()), page)).collect();
    let total: usize = counted.iter().map(|(words, _)| words).sum();
    assert!(total <= WORDS, "docs/ has {total} words, {WORDS} at most; by page: {counted:?}");
    assert!(total > WORDS / 2, "{total} words: pages are missing");
}

#[test]
fn links_that_lead_nowhere_are_found() {
    let from = Path::new("docs/results/bench/kbp.md");
    for good in
        ["../../README.md", "../../../README.md#install", "../bench.md", "https://example.org/#x", "../../examples"]
    {
        assert_eq!(fault(from, good), None, "{good}");
    }
    for bad in
        ["bench.md", "../../README.md#no-such-heading", "#no-such-heading", "../../../../etc/passwd", "/etc/passwd"]
    {
        assert!(fault(from, bad).is_some(), "{bad}");
    }
    let text = "# A `b`: c_d, e\n\n## Same\n\n## Same\n\n```\n# no heading [no](link)\n```\n| [yes](to) |\n|---|\n";
    let expected = ["a-b-c_d-e", "same", "same-1"].map(str::to_owned);
    assert_eq!(anchors(text), BTreeSet::from(expected));
    assert_eq!(links(text), ["to"]);
}

#[test]
fn the_summary_lists_every_page_once() {
    let summary = Path::new("docs/SUMMARY.md");
    let mut listed: Vec<PathBuf> = links(&fs::read_to_string(root().join(summary)).unwrap())
        .iter()
        .map(|link| resolved(&Path::new("docs").join(link)).unwrap())
        .collect();
    listed.sort();
    let pages = files("docs").into_iter().filter(|path| is_markdown(path) && path != summary);
    assert_eq!(listed, pages.collect::<Vec<_>>());
}

/// A kind of files, and how many of its lines are longer than 120 columns. More are not allowed, so that none is added.
struct Kind {
    name: &'static str,
    includes: fn(&Path) -> bool,
    long_lines: usize,
}

const KINDS: [Kind; 5] = [
    Kind { name: "Markdown", includes: is_markdown, long_lines: 0 },
    Kind {
        name: "packaging and Makefiles",
        // The dashboard is written by Grafana.
        includes: |path| (path.starts_with("packaging") && !has_ending(path, &["json"])) || path.ends_with("Makefile"),
        long_lines: 0,
    },
    Kind { name: "Rust", includes: |path| has_ending(path, &["rs"]), long_lines: 0 },
    Kind { name: "C", includes: |path| has_ending(path, &["c", "h"]), long_lines: 70 },
    // Programs in other languages inside scripts, and text that scripts print.
    Kind {
        name: "scripts",
        includes: |path| {
            (path.starts_with("scripts") || path.starts_with("lab/tests")) && !has_ending(path, &["rs", "toml"])
        },
        long_lines: 33,
    },
];

/// Whether a line is too long and can be broken. A row of a Markdown table cannot be broken, and neither can a long
/// word such as a link.
fn is_too_long(markdown: bool, line: &str) -> bool {
    let columns = line.chars().fold(0, |at, of| if of == '\t' { at / 8 * 8 + 8 } else { at + 1 });
    let words = line.trim_start().trim_start_matches(['-', '#', '>', ' ']);
    columns > COLUMNS && words.contains(' ') && !(markdown && line.starts_with('|'))
}

#[test]
fn lines_end_at_120_columns() {
    let files = files(".");
    for Kind { name, includes, long_lines } in KINDS {
        let (mut long, mut checked) = (Vec::new(), 0);
        for path in files.iter().filter(|path| includes(path)) {
            checked += 1;
            let text = fs::read_to_string(root().join(path)).unwrap();
            let too_long = text.lines().enumerate().filter(|(_, line)| is_too_long(is_markdown(path), line));
            long.extend(too_long.map(|(number, _)| format!("{}:{}", path.display(), number + 1)));
        }
        let found = long.len();
        assert!(found <= long_lines, "{name}: {found} lines are too long, at most {long_lines}:\n{}", long.join("\n"));
        assert!(checked > 10, "{name}: {checked} files");
    }
}

#[test]
fn long_lines_are_told_from_those_that_cannot_be_broken() {
    let words = "word ".repeat(25);
    let link = format!("- [{0}]({0})", "x".repeat(70));
    assert!(is_too_long(true, &words) && is_too_long(false, &words));
    assert!(is_too_long(false, &format!("\t\t{}", "word ".repeat(22))));
    assert!(!is_too_long(true, &format!("| {words} |")) && is_too_long(false, &format!("| {words} |")));
    assert!(!is_too_long(true, &link) && is_too_long(true, &format!("{link} and more")));
    assert!(!is_too_long(true, &"word ".repeat(24)));
}

/// A row of the README's table: the name of the method there, and its figures, us and Gbit/s.
struct Row {
    name: &'static str,
    p50: u64,
    p99: u64,
    max: u64,
    bulk: f64,
}

fn rows() -> Vec<Row> {
    let names = [
        ("vanilla", "stock kernel"),
        ("rt-default", "PREEMPT_RT (the real-time kernel), its defaults"),
        ("exclusive", "PREEMPT_RT, a CPU of its own"),
        ("partitioned", "**Ontime**"),
        ("outsourcing", "**Ontime with its guest module**"),
    ];
    let mut reader = csv::Reader::from_path(root().join("docs/results/rt-server.csv")).unwrap();
    let head = reader.headers().unwrap().clone();
    let records: Vec<_> = reader.records().map(Result::unwrap).collect();
    let column = |name: &str| head.iter().position(|of| of == name).unwrap();
    let row = |(method, name): (&str, &'static str)| {
        let is_it =
            |record: &&csv::StringRecord| &record[column("method")] == method && &record[column("load")] == "tcp";
        let record = records.iter().find(is_it).unwrap();
        let us = |name: &str| record[column(name)].parse::<f64>().unwrap().round() as u64;
        let bulk = record[column("bulk_gbps")].parse().unwrap();
        Row { name, p50: us("p50_us"), p99: us("p99_us"), max: us("max_us"), bulk }
    };
    names.map(row).into_iter().collect()
}

/// A number with a comma before the thousands.
fn number(of: u64) -> String {
    if of < 1000 { of.to_string() } else { format!("{},{:03}", of / 1000, of % 1000) }
}

/// The picture in the README: p99 and maximum on a logarithmic scale from 10 us to 10 ms.
fn picture(rows: &[Row]) -> String {
    let x = |us: u64| 210.0 + (us as f64 / 10.0).log10() * 140.0;
    let height = rows.len() * 44 + 44;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 720 {height}\" \
         font-family=\"sans-serif\" font-size=\"13\">\n\
         <style>\n\
         text {{ fill: #1f2328 }} line {{ stroke: #8886 }} .p99 {{ fill: #0969da }} .max {{ fill: #9a6700 }}\n\
         @media (prefers-color-scheme: dark) {{\n\
         text {{ fill: #e6edf3 }} .p99 {{ fill: #58a6ff }} .max {{ fill: #d29922 }}\n\
         }}\n\
         </style>\n"
    );
    for (us, label) in [(10, "10 us"), (100, "100 us"), (1000, "1 ms"), (10_000, "10 ms")] {
        let (at, low) = (x(us), height - 24);
        writeln!(svg, "<line x1=\"{at:.0}\" x2=\"{at:.0}\" y1=\"4\" y2=\"{low}\"/>").unwrap();
        writeln!(svg, "<text x=\"{at:.0}\" y=\"{}\" text-anchor=\"middle\">{label}</text>", height - 8).unwrap();
    }
    for (row, y) in rows.iter().zip((8..).step_by(44)) {
        let name = row.name.trim_matches('*').replace(" (the real-time kernel), its", ",");
        writeln!(svg, "<text x=\"200\" y=\"{}\" text-anchor=\"end\">{name}</text>", y + 20).unwrap();
        for (class, us, y) in [("p99", row.p99, y), ("max", row.max, y + 15)] {
            let width = x(us) - x(10);
            writeln!(svg, "<rect class=\"{class}\" x=\"210\" y=\"{y}\" width=\"{width:.0}\" height=\"13\"/>").unwrap();
            let (at, text) = (x(us) + 5.0, number(us));
            writeln!(svg, "<text x=\"{at:.0}\" y=\"{}\" font-size=\"11\">{class} {text}</text>", y + 11).unwrap();
        }
    }
    svg + "</svg>\n"
}

#[test]
fn the_readmes_figures_are_those_of_the_results() {
    let readme = fs::read_to_string(root().join("README.md")).unwrap();
    let rows = rows();
    for Row { name, p50, p99, max, bulk } in &rows {
        let line = format!("| {name} | {p50} | {} | {} | {bulk:.2} Gbit/s |", number(*p99), number(*max));
        assert!(readme.contains(&format!("\n{line}\n")), "README.md should have: {line}");
    }
    let path = root().join("docs/results/latency.svg");
    if std::env::var_os("ONTIME_BLESS").is_some() {
        fs::write(&path, picture(&rows)).unwrap();
    }
    let message =
        "docs/results/latency.svg is not of the results; ONTIME_BLESS=1 cargo test -p ontime --test documents";
    assert_eq!(fs::read_to_string(path).unwrap_or_default(), picture(&rows), "{message}");
}
