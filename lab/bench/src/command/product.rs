//! The program under test: the binary `ontime`, which is copied into the emulated host.

use std::path::{Path, PathBuf};

use anyhow::Context;
use ontime_cli::usage;
use ontime_lab::Programs;

/// Which binary.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct Product {
    /// The binary `ontime` for the emulated host (default: the one beside `ontime-lab`)
    #[arg(long, value_name = "FILE")]
    pub ontime: Option<PathBuf>,
}

impl Product {
    /// The two binaries that the emulated host needs.
    ///
    /// # Errors
    /// There is no file of that name.
    pub(crate) fn find(&self) -> anyhow::Result<Programs> {
        let lab = std::env::current_exe().context("finding the file of this program")?;
        Ok(Programs { ontime: find(self.ontime.as_deref(), &lab)?, lab })
    }
}

fn find(asked: Option<&Path>, lab: &Path) -> anyhow::Result<PathBuf> {
    let ontime = asked.map_or_else(|| lab.with_file_name("ontime"), Path::to_path_buf);
    if !ontime.is_file() {
        usage!(
            "the emulated host needs the binary `ontime`, and {} is no file: build it (`cargo build --release`), or \
             name it with --ontime",
            ontime.display()
        );
    }
    Ok(ontime)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_product_is_beside_the_laboratory_or_named() {
        let dir = tempfile::tempdir().unwrap();
        let [lab, beside, other] = ["ontime-lab", "ontime", "other"].map(|name| dir.path().join(name));
        let error = find(None, &lab).unwrap_err().to_string();
        assert!(error.contains(&*beside.to_string_lossy()) && error.contains("--ontime"), "{error}");
        std::fs::write(&beside, "").unwrap();
        assert_eq!(find(None, &lab).unwrap(), beside);
        // If the named file is missing, the one beside the program is not used instead.
        assert!(find(Some(&other), &lab).unwrap_err().to_string().contains("other"));
        std::fs::write(&other, "").unwrap();
        assert_eq!(find(Some(&other), &lab).unwrap(), other);
    }
}
