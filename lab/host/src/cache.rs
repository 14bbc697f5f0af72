//! The cache of the lab's builds, by content: `/var/cache/ontime/lab/KEY`, or below `$ONTIME_LAB_CACHE`.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::{FlockOperation, flock};
use sha2::{Digest, Sha256};

use crate::error::{LabError, file};
use crate::isolate;

/// The cache's directory: `$ONTIME_LAB_CACHE`, or else `/var/cache/ontime/lab`.
pub fn root() -> PathBuf {
    std::env::var_os("ONTIME_LAB_CACHE").map_or_else(|| PathBuf::from("/var/cache/ontime/lab"), PathBuf::from)
}

/// The cache directory for a build from `files` (name and text). The same texts give the same directory.
pub fn entry(root: &Path, files: &[(&str, &str)]) -> PathBuf {
    let mut hash = Sha256::new();
    for (name, text) in files {
        // The lengths come first, so that two different lists never hash the same bytes.
        hash.update((name.len() as u64).to_le_bytes());
        hash.update(name);
        hash.update((text.len() as u64).to_le_bytes());
        hash.update(text);
    }
    let key: String = hash.finalize().iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    root.join(key)
}

/// Runs `build` once to fill a directory of the cache. All callers get the same, complete directory; a second caller
/// waits for the first. A directory that was left incomplete is removed first.
///
/// # Errors
/// The error of `build`; the directory or its lock cannot be made.
pub fn once(
    dir: &Path,
    progress: &mut dyn FnMut(&str),
    build: impl FnOnce(&Path, &mut dyn FnMut(&str)) -> Result<(), LabError>,
) -> Result<(), LabError> {
    let (lock_path, complete) = (dir.with_extension("lock"), dir.join("complete"));
    if let Some(root) = dir.parent() {
        fs::create_dir_all(root).map_err(file("make", root))?;
    }
    let lock = File::create(&lock_path).map_err(file("make", &lock_path))?;
    if flock(&lock, FlockOperation::NonBlockingLockExclusive).is_err() {
        progress("the lab: waiting for another build");
        flock(&lock, FlockOperation::LockExclusive).map_err(|error| file("lock", &lock_path)(error.into()))?;
    }
    if complete.exists() {
        return Ok(());
    }
    if dir.exists() {
        fs::remove_dir_all(dir).map_err(file("remove half-built", dir))?;
    }
    fs::create_dir_all(dir).map_err(file("make", dir))?;
    build(dir, progress)?;
    File::create(&complete).map_err(file("write", &complete)).map(drop)
}

/// Writes files (path below `dir`, and text). Scripts are made executable.
///
/// # Errors
/// [`LabError::File`].
pub fn write(dir: &Path, files: &[(&str, &str)]) -> Result<(), LabError> {
    for (name, text) in files {
        let path = dir.join(name);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).map_err(file("make", parent))?;
        }
        let mut out = File::create(&path).map_err(file("write", &path))?;
        out.write_all(text.as_bytes()).map_err(file("write", &path))?;
        let mode = if name.ends_with(".sh") { 0o755 } else { 0o644 };
        out.set_permissions(fs::Permissions::from_mode(mode)).map_err(file("write", &path))?;
    }
    Ok(())
}

/// Runs a build script, and reports each line of its output as progress. Returns whether it succeeded. Of an
/// interrupted build no process and no mount stays (as root).
///
/// # Errors
/// There is no shell.
pub fn script(path: &Path, arguments: &[&str], progress: &mut dyn FnMut(&str)) -> Result<bool, LabError> {
    let mut sh = if isolate::possible().is_ok() { isolate::in_namespaces(&[], "sh") } else { Command::new("sh") };
    let mut child = sh
        .arg(path)
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .map_err(|source| LabError::Program {
            program: "sh".into(),
            source,
            remedy: "install a POSIX shell and util-linux",
        })?;
    if let Some(stdout) = child.stdout.take() {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            progress(&line);
        }
    }
    Ok(child.wait().map_err(file("wait for", path))?.success())
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

    #[test]
    fn what_is_complete_is_built_once_and_what_is_not_anew() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("entry");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("half"), "").unwrap();
        let mut builds = 0;
        for _ in 0..2 {
            let build = |dir: &Path, _: &mut dyn FnMut(&str)| {
                builds += 1;
                write(dir, &[("below/run.sh", "echo line; echo $1")])
            };
            once(&dir, &mut |_| (), build).unwrap();
        }
        assert_eq!((builds, dir.join("half").exists()), (1, false));
        let mut lines = Vec::new();
        assert!(script(&dir.join("below/run.sh"), &["word"], &mut |line| lines.push(line.to_owned())).unwrap());
        assert_eq!(lines, ["line", "word"]);
    }
}
