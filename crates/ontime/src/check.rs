//! `ontime check`: checks all configuration files before a daemon reads them.

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ontime_hostnet::HostConfig;
use ontime_sched::SchedConfig;
use ontime_tenants::Rules;
use ontime_tenants::config::{self, ConfigError, Text};

use crate::daemon::config::DaemonConfig;
use crate::exit;
use crate::paths::{CONFIG_DIR, Paths};
use crate::table::{lines, visible};

/// `ontime check`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {}

/// A part of the configuration: `NAME.toml` and `NAME.conf.d/*.toml`.
struct Part {
    name: &'static str,
    /// Reads one file by itself, so that an error in one file does not hide errors in others.
    one: fn(&Text) -> Result<(), ConfigError>,
    /// Reads all files together, as the daemon does.
    all: fn(&Path) -> Result<(), ConfigError>,
}

const PARTS: [Part; 5] = [
    Part {
        name: "tenants",
        one: |text| Rules::parse(std::slice::from_ref(text)).map(drop),
        all: |dir| Rules::load(dir).map(drop),
    },
    Part { name: "host", one: |text| HostConfig::default().add(text), all: |dir| HostConfig::load(dir).map(drop) },
    Part {
        name: "daemon",
        one: |text| DaemonConfig::default().add(text),
        all: |dir| DaemonConfig::load(dir).map(drop),
    },
    Part { name: "sched", one: |text| SchedConfig::default().add(text), all: |dir| SchedConfig::load(dir).map(drop) },
    // `load` reads the table of every VM, whatever name is given.
    Part {
        name: "sockets",
        one: |text| ontime_sockets::config::parse(text).map(drop),
        all: |dir| ontime_sockets::config::load_all(dir).map(drop),
    },
];

/// Checks the files. Exit status 78 where one is wrong, 3 where one may not be read, 1 where a file has a name that
/// Ontime does not read or the directory that was given does not exist.
///
/// # Errors
/// Where standard output is closed.
pub(crate) fn run(_: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    let found = Found::in_directory(&paths.config_dir);
    let mut out = io::stdout().lock();
    let name = |path: &Path| visible(&path.display().to_string());
    for path in &found.files {
        let verdict = match found.errors.iter().find(|error| path_of(error) == path) {
            Some(error) if exit::of_config(error) == exit::UNKNOWN => "unknown",
            Some(_) => "WRONG",
            None => "ok",
        };
        writeln!(out, "{verdict:8}  {}", name(path))?;
    }
    for path in &found.unread {
        writeln!(out, "not read  {}: Ontime reads no file of this name; rename or remove it", name(path))?;
    }
    let directory = name(&paths.config_dir);
    if found.missing {
        writeln!(out, "{directory} does not exist: every setting has its default")?;
    } else if found.files.is_empty() && found.errors.is_empty() {
        writeln!(out, "no file in {directory}: every setting has its default")?;
    }
    out.flush()?;
    for error in &found.errors {
        ontime_cli::print_stderr(format_args!("ontime: {}", lines(&error.to_string())));
    }
    // The usual directory is missing where nothing is configured; any other one was given by hand.
    let misspelt = found.missing && paths.config_dir != Path::new(CONFIG_DIR);
    let least = if found.unread.is_empty() && !misspelt { exit::OK } else { exit::WARNING };
    Ok(ExitCode::from(found.errors.iter().map(exit::of_config).max().unwrap_or(least)))
}

/// The configuration files that Ontime reads, and why those of a part cannot be listed.
pub(crate) fn files(directory: &Path) -> (Vec<PathBuf>, Vec<ConfigError>) {
    let (mut found, mut errors) = (Vec::new(), Vec::new());
    for part in PARTS {
        match config::files(directory, part.name) {
            Ok(files) => found.extend(files),
            Err(error) => errors.push(error),
        }
    }
    (found, errors)
}

/// The contents of a configuration directory.
#[derive(Debug, Default)]
struct Found {
    /// The files that Ontime reads.
    files: Vec<PathBuf>,
    errors: Vec<ConfigError>,
    /// Files that Ontime does not read.
    unread: Vec<PathBuf>,
    /// The directory does not exist.
    missing: bool,
}

impl Found {
    fn in_directory(directory: &Path) -> Self {
        let mut found = Self::default();
        match std::fs::read_dir(directory) {
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Self { missing: true, ..found },
            // One error, not one for each part.
            Err(source) => {
                found.errors.push(ConfigError::Read { path: directory.to_owned(), source });
                return found;
            }
        }
        for part in PARTS {
            match config::files(directory, part.name) {
                Ok(files) => {
                    found.errors.extend(
                        files.iter().filter_map(|file| Text::read(file).and_then(|text| (part.one)(&text)).err()),
                    );
                    found.files.extend(files);
                }
                Err(error) => found.errors.push(error),
            }
            let together = (part.all)(directory).err();
            let known = |error: &ConfigError| found.errors.iter().any(|known| known.to_string() == error.to_string());
            found.errors.extend(together.filter(|error| !known(error)));
        }
        found.unread = unread(directory);
        found
    }
}

/// The file or directory that an error is about.
pub(crate) fn path_of(error: &ConfigError) -> &Path {
    match error {
        ConfigError::Read { path, .. } => path,
        ConfigError::Invalid { place, .. } => &place.path,
    }
}

/// Files and drop-in directories that look like configuration but belong to no part, in the directory itself and in the
/// drop-in directories. Usually the name is misspelt.
fn unread(directory: &Path) -> Vec<PathBuf> {
    let is_ours = |name: &str| {
        PARTS.iter().any(|part| name.strip_prefix(part.name).is_some_and(|end| matches!(end, ".toml" | ".conf.d")))
    };
    let looks_like_ours = |name: &str| {
        name.contains(".toml") || PARTS.iter().any(|part| name.starts_with(part.name)) || name.ends_with(".d")
    };
    let drop_ins = PARTS.iter().map(|part| directory.join(format!("{}.conf.d", part.name)));
    let mut unread = names(directory, |name| looks_like_ours(name) && !is_ours(name));
    unread.extend(drop_ins.flat_map(|drop_ins| names(&drop_ins, |name| !name.ends_with(".toml"))));
    unread.sort();
    unread
}

/// The entries of a directory whose name passes, but no hidden files, notes, and files that editors, package managers
/// and administrators leave beside the one that is read.
fn names(directory: &Path, passes: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let left = |name: &str| {
        name.starts_with('.')
            || name.starts_with("README")
            || name.ends_with('~')
            || name.rsplit('.').next().is_some_and(|ending| {
                matches!(ending, "bak" | "old" | "orig" | "save" | "disabled" | "off" | "example" | "sample")
                    || ["dpkg-", "ucf-", "rpm"].iter().any(|manager| ending.starts_with(manager))
            })
    };
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let named = entries.filter(|entry| {
        let name = entry.file_name();
        let name = name.to_string_lossy();
        !left(&name) && passes(&name)
    });
    named.map(|entry| entry.path()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_is_checked_and_misspelt_names_are_told() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write("tenants.toml", "[[tenant]]\nname = \"a\"\nclass = \"rt\"\n");
        write("host.toml", "method = \"quick\"\n");
        write("host.conf.d/10.toml", "[nic.eth0]\nclass = 1\n");
        write("host.conf.d/20.toml", "method = \"vanilla\"\n");
        write("sched.toml", "reserve = -1\n");
        write("sockets.conf.d/web.toml", "[vm.web]\nchannel = 1\n");
        write("sockets.conf.d/zone.toml", "[vm.zone]\nbind = 7\n");
        write("tenant.toml", "");
        write("daemon.d/10.toml", "");
        write("README", "");
        // What its writer believes to be in force.
        write("daemon.conf.d/10-enforce.conf", "mode = \"enforce\"\n");
        write("tenants.conf.d/plc.toml.txt", "");
        write("sched.conf", "");
        // What editors, package managers and administrators leave.
        write("host.conf.d/10.toml~", "");
        write("host.conf.d/10.toml.dpkg-old", "");
        write("host.conf.d/README", "");
        write("host.conf.d/.10.toml.swp", "");
        write("host.toml.rpmnew", "");
        let found = Found::in_directory(dir.path());
        let names = |paths: &[PathBuf]| -> Vec<String> {
            paths.iter().map(|path| path.strip_prefix(dir.path()).unwrap().display().to_string()).collect()
        };
        let unread =
            ["daemon.conf.d/10-enforce.conf", "daemon.d", "sched.conf", "tenant.toml", "tenants.conf.d/plc.toml.txt"];
        assert_eq!(names(&found.unread), unread);
        assert_eq!(found.files.len(), 7);
        let wrong: Vec<PathBuf> = found.errors.iter().map(|error| path_of(error).to_owned()).collect();
        let wanted =
            ["host.toml", "host.conf.d/10.toml", "sched.toml", "sockets.conf.d/web.toml", "sockets.conf.d/zone.toml"];
        assert_eq!(names(&wrong), wanted, "{:?}", found.errors);
    }

    #[test]
    fn what_is_wrong_only_with_files_together_is_found() {
        let dir = tempfile::tempdir().unwrap();
        let reservation = "[[reservation]]\nname = \"a\"\nbudget = \"1ms\"\nperiod = \"10ms\"\n";
        std::fs::create_dir(dir.path().join("sched.conf.d")).unwrap();
        for name in ["10.toml", "20.toml"] {
            std::fs::write(dir.path().join("sched.conf.d").join(name), reservation).unwrap();
        }
        let errors = Found::in_directory(dir.path()).errors;
        assert_eq!(errors.len(), 1, "{errors:?}");
        assert!(path_of(&errors[0]).ends_with("sched.conf.d/20.toml"), "{errors:?}");
    }

    #[test]
    fn what_is_missing_or_leads_nowhere_is_said() {
        let dir = tempfile::tempdir().unwrap();
        let missing = Found::in_directory(&dir.path().join("ontme"));
        assert!(missing.missing && missing.errors.is_empty());
        assert!(!Found::in_directory(dir.path()).missing);
        std::os::unix::fs::symlink("/nowhere/sockets.toml", dir.path().join("sockets.toml")).unwrap();
        std::fs::write(dir.path().join("sched.conf.d"), "a file in place of a directory").unwrap();
        let found = Found::in_directory(dir.path());
        assert_eq!(found.files.len(), 1, "{:?}", found.files);
        let wrong: Vec<_> = found.errors.iter().map(|error| path_of(error).file_name().unwrap()).collect();
        assert_eq!(wrong, ["sched.conf.d", "sockets.toml"], "{:?}", found.errors);
        let file = Found::in_directory(&dir.path().join("sched.conf.d"));
        assert_eq!(file.errors.len(), 1, "{:?}", file.errors);
    }
}
