//! `ontime metrics`: prints the daemon's metrics, or writes them to a file for node_exporter's textfile collector.

use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crate::client;
use crate::exit::Doing;
use crate::paths::Paths;

/// `ontime metrics`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Write the metrics to this file by a rename, so that a reader finds the old or the new text, never a part.
    #[arg(long, value_name = "FILE")]
    textfile: Option<PathBuf>,
}

/// Prints or writes the metrics, in the classic text format.
///
/// # Errors
/// Where no daemon answers, or the file cannot be written. Then an older file stays as it is.
pub(crate) fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    let text = client::get_text(&paths.socket(), "/metrics")?;
    match &args.textfile {
        Some(file) => write(file, &text).doing(format_args!("{}: writing metrics (--textfile)", file.display()))?,
        None => std::io::stdout().lock().write_all(text.as_bytes())?,
    }
    Ok(ExitCode::SUCCESS)
}

/// Replaces `file`. Everybody may read the new file, because the collector runs as another user.
pub(crate) fn write(file: &Path, text: &str) -> std::io::Result<()> {
    let directory = file.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    // The collector reads `*.prom` only, so the temporary file has another name.
    let mut new = tempfile::Builder::new().prefix(".ontime-").suffix(".new").tempfile_in(directory)?;
    new.write_all(text.as_bytes())?;
    new.as_file().set_permissions(std::fs::Permissions::from_mode(0o644))?;
    new.as_file().sync_all()?;
    new.persist(file).map(drop).map_err(|error| error.error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_replaced_as_a_whole_and_nothing_else_is_left() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("ontime.prom");
        for text in ["ontime_tenants 1\n", "ontime_tenants 2\n"] {
            write(&file, text).unwrap();
            assert_eq!(std::fs::read_to_string(&file).unwrap(), text);
        }
        assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o644);
        // A symbolic link of this name is replaced, and its target is not changed.
        let other = dir.path().join("other");
        std::fs::write(&other, "untouched").unwrap();
        std::fs::remove_file(&file).unwrap();
        std::os::unix::fs::symlink(&other, &file).unwrap();
        write(&file, "x 1\n").unwrap();
        assert_eq!(std::fs::read_to_string(&other).unwrap(), "untouched");
        assert!(!std::fs::symlink_metadata(&file).unwrap().is_symlink());
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 2);
        assert!(write(&dir.path().join("none/ontime.prom"), "").is_err());
    }
}
