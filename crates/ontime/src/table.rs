//! Plain text: tables with columns as wide as necessary, and how other text is wrapped.

use std::io::{self, Write};

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
            *width = (*width).max(cell.chars().count());
        }
    }
    for row in &rows {
        let line: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:width$}")).collect();
        writeln!(out, "{}", line.join("  ").trim_end())?;
    }
    Ok(())
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
}
