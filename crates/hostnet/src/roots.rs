//! Where the host's files are, and how short ones are read.

use std::fs;
use std::path::{Path, PathBuf};

use ontime_base::files::note;

use crate::knob::Root;

/// Mount points of the host's file systems. Tests use other directories.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Roots {
    /// `/proc`.
    pub proc: PathBuf,
    /// `/sys`.
    pub sys: PathBuf,
    /// `/sys/kernel/debug`.
    pub debug: PathBuf,
    /// `/dev`.
    pub dev: PathBuf,
    /// `/`, for files of other programs.
    pub root: PathBuf,
}

impl Default for Roots {
    fn default() -> Self {
        Self {
            proc: "/proc".into(),
            sys: "/sys".into(),
            debug: "/sys/kernel/debug".into(),
            dev: "/dev".into(),
            root: "/".into(),
        }
    }
}

impl Roots {
    /// The path of a host-wide file.
    pub fn path(&self, root: Root, path: &str) -> PathBuf {
        match root {
            Root::Proc => self.proc.join(path),
            Root::Sys => self.sys.join(path),
            Root::Debug => self.debug.join(path),
        }
    }
}

/// A file's text without surrounding white space; `None` if the file cannot be read. A lack of descriptors or memory is
/// noted (`ontime_base::files::exhausted`).
pub(crate) fn read(path: &Path) -> Option<String> {
    let bytes = fs::read(path).inspect_err(note).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim().to_owned())
}

/// The entries of a directory; none if it cannot be listed, and the error noted as by [`read`].
pub(crate) fn entries(directory: &Path) -> impl Iterator<Item = fs::DirEntry> + use<> {
    let listed = fs::read_dir(directory).inspect_err(note).into_iter().flatten();
    listed.filter_map(|entry| entry.inspect_err(note).ok())
}

/// The number in a file.
pub(crate) fn read_number<T: std::str::FromStr>(path: &Path) -> Option<T> {
    read(path)?.parse().ok()
}

/// `6.12.48+deb13-rt-amd64` is 6.12.
pub(crate) fn parse_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}
