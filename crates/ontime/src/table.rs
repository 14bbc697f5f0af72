//! Plain text: tables with columns as wide as necessary, and how other text is wrapped.

use std::io::{self, Write};

use textwrap::core::display_width;
use textwrap::{Options, WordSplitter};

/// Columns of wrapped text.
pub(crate) const WIDTH: usize = 80;

/// How text is wrapped. Lines do not break at hyphens within words, so that commands can be copied.
pub(crate) fn wrapping() -> Options<'static> {
    Options::new(WIDTH).word_splitter(WordSplitter::NoHyphenation)
}

/// Writes rows under a header, with columns padded with spaces. Control characters in foreign names are made visible.
///
/// # Errors
/// Those of `out`.
pub(crate) fn write<const N: usize>(out: &mut impl Write, head: [&str; N], rows: &[[String; N]]) -> io::Result<()> {
    let rows: Vec<[String; N]> = std::iter::once(head.map(str::to_owned))
        .chain(rows.iter().map(|row| row.clone().map(|cell| visible(&cell))))
        .collect();
    let mut widths = [0; N];
    for row in &rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(display_width(cell));
        }
    }
    for row in &rows {
        let line: Vec<String> = row.iter().zip(widths).map(|(cell, width)| padded(cell, width)).collect();
        writeln!(out, "{}", line.join("  ").trim_end())?;
    }
    Ok(())
}

/// The text, and spaces up to this many columns of a terminal. A character may take two columns, or none.
pub(crate) fn padded(text: &str, columns: usize) -> String {
    format!("{text}{}", " ".repeat(columns.saturating_sub(display_width(text))))
}

/// The part of the text that fits into this many columns of a terminal.
pub(crate) fn cut(text: &str, columns: usize) -> String {
    let (mut taken, mut letter) = (0, [0; 4]);
    let fits = |c: &char| {
        taken += display_width(c.encode_utf8(&mut letter));
        taken <= columns
    };
    text.chars().take_while(fits).collect()
}

/// Replaces characters that would control a terminal.
pub(crate) fn visible(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect()
}

/// The same for a text of several lines.
pub(crate) fn lines(text: &str) -> String {
    text.lines().map(visible).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_escapes_are_harmless() {
        let mut out = Vec::new();
        let rows = [["a".to_owned(), "1".to_owned()], ["long\x1b[2J".to_owned(), String::new()]];
        write(&mut out, ["NAME", "N"], &rows).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "NAME      N\na         1\nlong\u{fffd}[2J\n");
    }

    #[test]
    fn wide_characters_take_their_columns() {
        let mut out = Vec::new();
        let rows = [["制御盤".to_owned(), "1".to_owned()], ["plc-1".to_owned(), "2".to_owned()]];
        write(&mut out, ["NAME", "N"], &rows).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "NAME    N\n制御盤  1\nplc-1   2\n");
        let cuts = [(0, ""), (1, ""), (2, "制"), (3, "制"), (5, "制御"), (6, "制御盤"), (9, "制御盤")];
        assert!(cuts.iter().all(|(columns, wanted)| cut("制御盤", *columns) == *wanted));
        assert_eq!(cut("e\u{301}x", 1), "e\u{301}", "an accent takes no column");
    }
}
