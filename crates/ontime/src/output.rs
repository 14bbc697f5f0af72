//! Files that a command writes its result to. They are made before the work begins, so that a wrong path does not waste
//! it. An error names the file.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

use crate::exit::Doing;

/// A file, or standard output.
pub(crate) struct Output {
    name: String,
    to: BufWriter<Box<dyn Write>>,
}

impl Output {
    /// Makes a file.
    ///
    /// # Errors
    /// Where it cannot be made.
    pub(crate) fn create(path: &Path) -> anyhow::Result<Self> {
        let name = path.display().to_string();
        let file: Box<dyn Write> = Box::new(File::create(path).doing(format_args!("{name}: making the file"))?);
        Ok(Self { name, to: BufWriter::new(file) })
    }

    pub(crate) fn standard() -> Self {
        let out: Box<dyn Write> = Box::new(io::stdout());
        Self { name: "standard output".to_owned(), to: BufWriter::new(out) }
    }

    /// Writes a part of the file. [`Self::finish`] must follow.
    ///
    /// # Errors
    /// Where this or an earlier part cannot be written.
    pub(crate) fn write(&mut self, part: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> anyhow::Result<()> {
        part(&mut self.to).doing(format_args!("{}: writing the result", self.name))
    }

    /// Writes what is still in the buffer.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub(crate) fn finish(mut self) -> anyhow::Result<()> {
        self.to.flush().doing(format_args!("{}: writing the result", self.name))
    }

    /// Writes the whole file.
    ///
    /// # Errors
    /// Where it cannot be written.
    pub(crate) fn put(mut self, whole: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> anyhow::Result<()> {
        self.write(whole)?;
        self.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::exit::chain;

    #[test]
    fn a_full_disk_is_told_with_the_file_and_the_remedy() {
        let full = || Output::create(Path::new("/dev/full")).unwrap();
        for size in [1, 100_000] {
            let whole = full().put(|out| out.write_all(&vec![b'x'; size]));
            let mut parts = full();
            let written = parts.write(|out| out.write_all(&vec![b'x'; size])).and_then(|()| parts.finish());
            for error in [whole.unwrap_err(), written.unwrap_err()] {
                let said = chain(&error);
                assert!(said.starts_with("/dev/full: writing the result: No space left on device"), "{said}");
                assert!(said.contains("make room on that file system"), "{said}");
            }
        }
    }

    #[test]
    fn what_is_written_in_parts_is_whole() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("result");
        let mut output = Output::create(&path).unwrap();
        for part in ["one ", "two"] {
            output.write(|out| out.write_all(part.as_bytes())).unwrap();
        }
        output.finish().unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "one two");
        assert!(Output::create(&dir.path().join("none/result")).is_err());
    }
}
