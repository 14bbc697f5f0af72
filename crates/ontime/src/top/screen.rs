//! The contents of the live view of `ontime top`: the table in the chosen order, in as many columns and lines as the
//! terminal has.
//!
//! In: the daemon's answer, keys, a size. Out: lines. No line is wider than the terminal.

use std::cmp::Ordering;

use textwrap::core::display_width;

use super::{COLUMNS, HEAD, Used, foot, head, none, rows};
use crate::api;
use crate::table::{cut, padded, visible};

/// An order of the rows, and the key that selects it.
#[derive(Debug, Clone, Copy)]
struct Order {
    key: u8,
    words: &'static str,
    /// Larger values first.
    down: bool,
    compare: fn(&Row<'_>, &Row<'_>) -> Ordering,
}

struct Row<'a> {
    index: usize,
    vcpu: &'a api::ReservedVcpu,
    used: &'a Used,
}

const ORDERS: [Order; 6] = [
    Order {
        key: b'n',
        words: "name",
        down: false,
        compare: |a, b| (&a.vcpu.vm, a.vcpu.vcpu).cmp(&(&b.vcpu.vm, b.vcpu.vcpu)),
    },
    Order { key: b'u', words: "use", down: true, compare: |a, b| a.total().total_cmp(&b.total()) },
    Order {
        key: b'b',
        words: "reserved bandwidth",
        down: true,
        compare: |a, b| a.vcpu.bandwidth.total_cmp(&b.vcpu.bandwidth),
    },
    Order {
        key: b'm',
        words: "misses",
        down: true,
        compare: |a, b| (a.used.misses, a.vcpu.misses).cmp(&(b.used.misses, b.vcpu.misses)),
    },
    Order {
        key: b'o',
        words: "overruns",
        down: true,
        compare: |a, b| (a.used.overruns, a.vcpu.overruns).cmp(&(b.used.overruns, b.vcpu.overruns)),
    },
    Order { key: b'd', words: "deadline", down: false, compare: |a, b| a.deadline().total_cmp(&b.deadline()) },
];

impl Row<'_> {
    fn total(&self) -> f64 {
        self.used.share + self.used.beyond
    }

    fn deadline(&self) -> f64 {
        self.vcpu.deadline_in_us.unwrap_or(f64::INFINITY)
    }
}

/// Columns that are left out, in this order, if the terminal is too narrow.
const LEAST: [usize; 9] = [5, 9, 4, 7, 10, 11, 3, 0, 8];

/// The column of names, which is cut where leaving columns out does not suffice, to this many characters at least.
const NAME: usize = 1;
const NAME_LEAST: usize = 8;

/// The view's state.
#[derive(Debug, Default)]
pub(super) struct Screen {
    /// None: the daemon's order.
    order: Option<Order>,
    reversed: bool,
    help: bool,
}

impl Screen {
    /// Handles a key. Returns false if it ends the view.
    pub(super) fn key(&mut self, key: u8) -> bool {
        match key {
            // Also Ctrl-C and Ctrl-D, for which the terminal sends no signals in this mode.
            b'q' | b'Q' | 3 | 4 => return false,
            b'?' | b'h' => self.help = !self.help,
            b'r' => self.reversed = !self.reversed,
            // Escape.
            0x1b => self.help = false,
            _ => {
                if let Some(order) = ORDERS.into_iter().find(|order| order.key == key) {
                    self.order = Some(order);
                }
            }
        }
        true
    }

    /// Draws the view in this many columns and lines. `failed`: why the last look at the reservations failed, so that
    /// these figures are older.
    pub(super) fn draw(
        &self,
        now: &api::Reservations,
        used: &[Used],
        failed: Option<&str>,
        (width, height): (usize, usize),
    ) -> String {
        let lines = if self.help { help() } else { self.lines(now, used, failed, (width, height)) };
        let mut text = String::new();
        for line in lines.iter().take(height) {
            text.push_str(&cut(&visible(line), width));
            text.push('\n');
        }
        text
    }

    fn lines(
        &self,
        now: &api::Reservations,
        used: &[Used],
        failed: Option<&str>,
        (width, height): (usize, usize),
    ) -> Vec<String> {
        let (mut above, mut below) = (String::new(), String::new());
        // Writing to a String cannot fail.
        let _ = head(&mut above, now);
        let _ = foot(&mut below, now, width.saturating_sub("CPU 0   ||".len()).max(1));
        let mut sorted: Vec<Row<'_>> =
            now.vcpus.iter().zip(used).enumerate().map(|(index, (vcpu, used))| Row { index, vcpu, used }).collect();
        if let Some(order) = self.order {
            sorted.sort_by(|a, b| if order.down { (order.compare)(b, a) } else { (order.compare)(a, b) });
        }
        if self.reversed {
            sorted.reverse();
        }
        let cells: Vec<[String; COLUMNS]> = sorted.iter().flat_map(|row| rows(row.index, row.vcpu, row.used)).collect();
        let mut lines: Vec<String> = above.lines().map(str::to_owned).collect();
        let below: Vec<String> = below.lines().map(str::to_owned).collect();
        let by = self.order.map_or("the daemon's order", |order| order.words);
        let foot = match failed {
            Some(why) => format!("q: quit; no new figures: {why}"),
            None => format!("by {by}{}; ?: help, q: quit", if self.reversed { ", reversed" } else { "" }),
        };
        // The last line has the keys, the one before it the number of rows that do not fit.
        let room = height.saturating_sub(lines.len() + below.len() + 3).max(1);
        if cells.is_empty() {
            lines.push(none(now));
        } else {
            let hidden = cells.len().saturating_sub(room);
            let shown = cells.get(..cells.len() - hidden).unwrap_or_default();
            lines.extend(table(shown, width));
            if hidden > 0 {
                lines.push(format!("and {hidden} more rows: a higher window shows them"));
            }
        }
        lines.extend(below);
        lines.truncate(height.saturating_sub(1));
        lines.push(foot);
        lines
    }
}

/// The rows under their header, in the columns that fit.
fn table(rows: &[[String; COLUMNS]], width: usize) -> Vec<String> {
    let head = HEAD.map(str::to_owned);
    let all = || std::iter::once(&head).chain(rows);
    let mut widths = [0; COLUMNS];
    for row in all() {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(display_width(&visible(cell)));
        }
    }
    let mut shown = [true; COLUMNS];
    let taken = |widths: [usize; COLUMNS], shown: &[bool; COLUMNS]| -> usize {
        let widths = widths.iter().zip(shown).filter(|(_, shown)| **shown).map(|(width, _)| width + 2);
        widths.sum::<usize>().saturating_sub(2)
    };
    for column in LEAST {
        if taken(widths, &shown) <= width {
            break;
        }
        if let Some(shown) = shown.get_mut(column) {
            *shown = false;
        }
    }
    let beyond = taken(widths, &shown).saturating_sub(width);
    let least = widths[NAME].min(NAME_LEAST);
    widths[NAME] = widths[NAME].saturating_sub(beyond).max(least);
    let line = |row: &[String; COLUMNS]| {
        let cells = row.iter().zip(widths).zip(shown).filter(|(_, shown)| *shown);
        let cells: Vec<String> = cells.map(|((cell, width), _)| padded(&cut(&visible(cell), width), width)).collect();
        cells.join("  ").trim_end().to_owned()
    };
    all().map(line).collect()
}

fn help() -> Vec<String> {
    let orders = ORDERS.iter().map(|order| format!("  {}      sort by {}", char::from(order.key), order.words));
    let before = ["ontime top: reserved CPU time, live", "", "  q      quit", "  ?      this help, and back"];
    let after = [
        "  r      the other way round",
        "",
        "USED and BEYOND are shares of one CPU since the last look. MISSES: periods with",
        "less than the budget. OVERRUNS: times a vCPU used up its share of a slice.",
        "A narrow window leaves columns out. docs/design/sched.md explains all of them.",
    ];
    before.into_iter().map(str::to_owned).chain(orders).chain(after.into_iter().map(str::to_owned)).collect()
}

#[cfg(test)]
mod tests {
    use super::super::tests::{reservations, vcpu};
    use super::*;

    fn used(vm: &str, share: f64, misses: u64) -> Used {
        Used { vm: vm.to_owned(), vcpu: 0, share, beyond: 0.0, misses, overruns: 0 }
    }

    fn scene() -> (api::Reservations, Vec<Used>) {
        let names = ["c", "a-vm-whose-name-is-very-long-長い名前の計算機", "b\x1b[2J"];
        let vcpus = names.iter().zip(1..).map(|(name, tid)| vcpu(name, tid, 1.0)).collect();
        (reservations(vcpus), vec![used("c", 0.1, 0), used("a", 0.3, 2), used("b", 0.2, 1)])
    }

    fn order_of(text: &str) -> Vec<char> {
        let is_row =
            |line: &&str| line.starts_with(|c: char| c.is_ascii_uppercase()) && line.chars().nth(1) == Some(' ');
        text.lines().filter(is_row).filter_map(|line| line.chars().next()).collect()
    }

    #[test]
    fn no_line_is_wider_and_no_view_higher_than_the_terminal() {
        let (now, used) = scene();
        for (width, height) in [(80, 24), (120, 50), (60, 10), (40, 12), (10, 4), (1, 1), (300, 100)] {
            for keys in ["", "?", "u", "nr"] {
                let mut screen = Screen::default();
                assert!(keys.bytes().all(|key| screen.key(key)));
                let text = screen.draw(&now, &used, None, (width, height));
                assert!(text.lines().count() <= height, "{width}x{height} {keys}:\n{text}");
                assert!(text.lines().all(|line| display_width(line) <= width), "{width}x{height} {keys}:\n{text}");
                assert!(!text.contains('\x1b'), "{text}");
            }
        }
        // At 80 columns name, use and misses are shown.
        let text = Screen::default().draw(&now, &used, None, (80, 24));
        let head = text.lines().find(|line| line.contains("VM")).unwrap();
        assert!(["VCPU", "USED", "MISSES"].iter().all(|name| head.contains(name)), "{text}");
        assert!(text.ends_with("?: help, q: quit\n"), "{text}");
        // A long name is cut, not the figures behind it.
        let narrow = Screen::default().draw(&now, &used, None, (40, 20));
        assert!(["USED", "30.0 %", "a-vm-whose"].iter().all(|part| narrow.contains(part)), "{narrow}");
        let low = Screen::default().draw(&now, &used, None, (80, 9));
        assert!(low.contains("more rows"), "{low}");
    }

    #[test]
    fn rows_are_sorted_and_keep_their_letters() {
        let (now, used) = scene();
        let drawn = |keys: &str| {
            let mut screen = Screen::default();
            assert!(keys.bytes().all(|key| screen.key(key)));
            order_of(&screen.draw(&now, &used, None, (200, 50)))
        };
        assert_eq!(drawn(""), ['A', 'B', 'C']);
        assert_eq!(drawn("r"), ['C', 'B', 'A']);
        assert_eq!(drawn("n"), ['B', 'C', 'A']);
        assert_eq!(drawn("u"), ['B', 'C', 'A']);
        assert_eq!(drawn("ur"), ['A', 'C', 'B']);
        assert_eq!(drawn("nm"), ['B', 'C', 'A']);
        assert_eq!(drawn("x"), ['A', 'B', 'C']);
    }

    #[test]
    fn help_comes_and_goes_and_q_ends() {
        let (now, used) = scene();
        let mut screen = Screen::default();
        assert!(screen.key(b'?'));
        let help = screen.draw(&now, &used, None, (80, 24));
        assert!(ORDERS.iter().all(|order| help.contains(order.words)) && help.contains("quit"), "{help}");
        assert!(screen.key(b'?') && screen.draw(&now, &used, None, (80, 24)).contains("CPUs reserved"));
        for end in [b'q', b'Q', 3, 4] {
            assert!(!screen.key(end));
        }
    }
}
