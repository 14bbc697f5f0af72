//! Ontime's directories and files. All subcommands use the same directories; tests use their own.

use std::ffi::OsString;
use std::path::PathBuf;

use ontime_hostnet::{Journal, JournalError, Originals, Roots, journal};

/// Where the configuration usually is.
pub(crate) const CONFIG_DIR: &str = "/etc/ontime";

/// Directories, from the command line.
#[derive(Debug, Clone, clap::Args)]
pub(crate) struct Paths {
    /// Sockets and locks of the running daemon.
    #[arg(long, global = true, default_value = "/run/ontime", value_name = "DIR", help_heading = "Directories")]
    pub run_dir: PathBuf,
    /// Original values of what Ontime changed.
    #[arg(long, global = true, default_value = "/var/lib/ontime", value_name = "DIR", help_heading = "Directories")]
    pub state_dir: PathBuf,
    /// Configuration.
    #[arg(long, global = true, default_value = CONFIG_DIR, value_name = "DIR", help_heading = "Directories")]
    pub config_dir: PathBuf,
    /// Where debugfs is mounted.
    #[arg(
        long,
        global = true,
        default_value = "/sys/kernel/debug",
        value_name = "DIR",
        help_heading = "Directories",
        hide = true
    )]
    pub debugfs: PathBuf,
}

impl Paths {
    /// The options that give another run of this program the same directories.
    pub(crate) fn arguments(&self) -> Vec<OsString> {
        let directories = [
            ("--run-dir", &self.run_dir),
            ("--state-dir", &self.state_dir),
            ("--config-dir", &self.config_dir),
            ("--debugfs", &self.debugfs),
        ];
        directories.into_iter().flat_map(|(flag, of)| [flag.into(), of.clone().into_os_string()]).collect()
    }

    /// The daemon's HTTP socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.run_dir.join("ontime.sock")
    }

    /// Locked (flock) by the running daemon; contains its process number.
    pub(crate) fn lock(&self) -> PathBuf {
        self.run_dir.join("daemon.lock")
    }

    /// Locked (flock) by the running daemon's guardian, even after the daemon has died.
    pub(crate) fn guardian_lock(&self) -> PathBuf {
        self.run_dir.join("guardian.lock")
    }

    /// Hooks touch this file when tenants change.
    pub(crate) fn poke(&self) -> PathBuf {
        self.run_dir.join("poke")
    }

    /// The reserved CPU time that vCPUs hold, for the next daemon.
    pub(crate) fn held(&self) -> PathBuf {
        self.run_dir.join("reservations")
    }

    /// The reservations that programs requested, for the next daemon.
    pub(crate) fn requested(&self) -> PathBuf {
        self.run_dir.join("requested")
    }

    /// Threads beyond their tenant's quota, for the next daemon.
    pub(crate) fn demoted(&self) -> PathBuf {
        self.run_dir.join("demoted")
    }

    /// The host's file systems.
    pub(crate) fn roots(&self) -> Roots {
        Roots { debug: self.debugfs.clone(), ..Roots::default() }
    }

    /// Opens the journal of original values.
    ///
    /// # Errors
    /// See [`JournalError`].
    pub(crate) fn journal(&self) -> Result<Journal, JournalError> {
        Journal::open(&self.kept(), &journal::running_boot_id()?)
    }

    /// Opens the journal in order to restore the entries that this version understands.
    ///
    /// # Errors
    /// See [`JournalError`].
    pub(crate) fn journal_to_reset(&self) -> Result<Journal, JournalError> {
        Journal::open_to_reset(&self.kept(), &journal::running_boot_id()?)
    }

    /// Reads original values, even while a daemon holds the journal. Creates and changes nothing.
    ///
    /// # Errors
    /// See [`JournalError`].
    pub(crate) fn originals(&self) -> Result<Originals, JournalError> {
        let path = self.kept();
        Originals::read(&path, &journal::running_boot_id()?)
    }

    fn kept(&self) -> PathBuf {
        self.state_dir.join("originals")
    }
}
