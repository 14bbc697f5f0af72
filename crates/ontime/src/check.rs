//! `ontime check`: checks all configuration files before a daemon reads them.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ontime_hostnet::HostConfig;
use ontime_sched::SchedConfig;
use ontime_tenants::Rules;
use ontime_tenants::config::{self, ConfigError, Text};

use crate::daemon::config::DaemonConfig;
use crate::exit;
use crate::paths::Paths;
use crate::table::{lines, visible};

/// `ontime check`
#[derive(Debug, clap::Args)]
pub struct Args {}

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
    // This reads the table of every VM, whatever name is given.
    Part { name: "sockets", one: |_| Ok(()), all: |dir| ontime_sockets::config::load(dir, "").map(drop) },
];

/// Checks the files. Exit status 78 where one is wrong, 1 where a file has a name that Ontime does not read.
///
/// # Errors
/// Where standard output is closed.
pub fn run(_: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    let found = Found::in_directory(&paths.config_dir);
    let mut out = std::io::stdout().lock();
    let name = |path: &Path| visible(&path.display().to_string());
    for path in &found.files {
        let verdict = if found.errors.iter().any(|error| path_of(error) == path) { "WRONG" } else { "ok" };
        writeln!(out, "{verdict:8}  {}", name(path))?;
    }
    for path in &found.unread {
        writeln!(out, "not read  {}: Ontime reads no file of this name; rename or remove it", name(path))?;
    }
    if found.files.is_empty() {
        writeln!(out, "no file in {}: every setting has its default", name(&paths.config_dir))?;
    }
    out.flush()?;
    for error in &found.errors {
        eprintln!("ontime: {}", lines(&error.to_string()));
    }
    let unread = if found.unread.is_empty() { exit::OK } else { exit::WARNING };
    Ok(ExitCode::from(found.errors.iter().map(exit::of_config).max().unwrap_or(unread)))
}

/// The configuration files that Ontime reads.
pub fn files(directory: &Path) -> Vec<PathBuf> {
    PARTS.iter().flat_map(|part| config::files(directory, part.name).unwrap_or_default()).collect()
}

/// The contents of a configuration directory.
#[derive(Debug, Default)]
struct Found {
    /// The files that Ontime reads.
    files: Vec<PathBuf>,
    errors: Vec<ConfigError>,
    /// Files that Ontime does not read.
    unread: Vec<PathBuf>,
}

impl Found {
    fn in_directory(directory: &Path) -> Self {
        let mut found = Self::default();
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

fn path_of(error: &ConfigError) -> &Path {
    match error {
        ConfigError::Read { path, .. } => path,
        ConfigError::Invalid { place, .. } => &place.path,
    }
}

/// Files and drop-in directories that belong to no part. Usually the name is misspelt.
fn unread(directory: &Path) -> Vec<PathBuf> {
    let is_ours = |name: &str| {
        PARTS.iter().any(|part| name.strip_prefix(part.name).is_some_and(|end| matches!(end, ".toml" | ".conf.d")))
    };
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    let mut unread: Vec<PathBuf> = entries
        .filter(|entry| {
            let name = entry.file_name();
            let name = name.to_string_lossy();
            !name.starts_with('.') && (name.ends_with(".toml") || name.ends_with(".d")) && !is_ours(&name)
        })
        .map(|entry| entry.path())
        .collect();
    unread.sort();
    unread
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
        write("tenant.toml", "");
        write("daemon.d/10.toml", "");
        write("README", "");
        let found = Found::in_directory(dir.path());
        let names = |paths: &[PathBuf]| -> Vec<String> {
            paths.iter().map(|path| path.strip_prefix(dir.path()).unwrap().display().to_string()).collect()
        };
        assert_eq!(names(&found.unread), ["daemon.d", "tenant.toml"]);
        assert_eq!(found.files.len(), 6);
        let wrong: Vec<PathBuf> = found.errors.iter().map(|error| path_of(error).to_owned()).collect();
        let wanted = ["host.toml", "host.conf.d/10.toml", "sched.toml", "sockets.conf.d/web.toml"];
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
}
