//! Where the lab keeps what it built, by content: `/var/cache/ontime/lab/KEY`, or below `$ONTIME_LAB_CACHE`.

use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

/// The cache's directory: `$ONTIME_LAB_CACHE`, else `/var/cache/ontime/lab`.
pub fn root() -> PathBuf {
    std::env::var_os("ONTIME_LAB_CACHE").map_or_else(|| PathBuf::from("/var/cache/ontime/lab"), PathBuf::from)
}

/// The directory of what `files` (name and text) make: the same texts, the same directory.
pub fn entry(root: &Path, files: &[(&str, &str)]) -> PathBuf {
    let mut hash = Sha256::new();
    for (name, text) in files {
        // Lengths first, so that no two lists of files read the same.
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(name);
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    }
    let key: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    root.join(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_decides_and_borders_count() {
        let root = Path::new("/c");
        let one = entry(root, &[("a", "bc")]);
        assert_eq!(one, entry(root, &[("a", "bc")]));
        assert_ne!(one, entry(root, &[("ab", "c")]));
        assert_ne!(one, entry(root, &[("a", "bd")]));
        assert!(one.starts_with("/c"));
    }
}
