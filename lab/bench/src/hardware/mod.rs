//! A real host under test: with VMs of its owner, and a client at the other end of a cable.
//!
//! In: a [`Site`], a file that the owner writes. Out: a [`Target`], which runs commands on the host and has the
//! captures of its [`monitor`]. The VMs are not changed: the site describes their names and addresses. An experiment
//! switches only the host's method, through its daemon, and restores it at the end.

mod capture;
pub(crate) mod monitor;
mod site;
mod target;

use std::io;
use std::path::PathBuf;

use thiserror::Error;

pub(crate) use self::site::Site;
pub(crate) use self::target::Target;

/// The beginning of the line by which `ontime apply` reports that method `exclusive` has no CPU for the RT group.
/// Nothing moves then, and the figures would be those of `threaded`.
pub(crate) const NO_EXCLUSIVE_CPU: &str = "critical: exclusive_cpu: ";

/// Why a real host cannot be measured.
#[derive(Debug, Error)]
pub enum HardwareError {
    /// The site's file is invalid.
    #[error("{path}: {what}", path = path.display())]
    Site {
        /// The path.
        path: PathBuf,
        /// The error.
        what: String,
    },
    /// The client's namespace cannot be entered.
    #[error(
        "network namespace '{name}' of the client cannot be entered: {source}; `ip netns list` names those there are, \
         and it takes root"
    )]
    Namespace {
        /// The namespace.
        name: String,
        /// The system's error.
        source: io::Error,
    },
    /// The interface does not exist.
    #[error("there is no interface '{nic}' at the client{place}; `ip link` names those there are")]
    NoNic {
        /// The interface.
        nic: String,
        /// Its namespace, in words.
        place: String,
    },
    /// The interface is down.
    #[error("interface '{nic}' of the client is down or has no carrier; `ip link set {nic} up`, and look at the cable")]
    Down {
        /// The interface.
        nic: String,
    },
    /// The interface's monitor does not keep up.
    #[error("the capture of '{nic}' lacks what passed {seconds} s ago: give the client's machine less other work")]
    Behind {
        /// The interface.
        nic: String,
        /// Time that was waited, s.
        seconds: u64,
    },
    /// Missing privilege to capture.
    #[error("capturing on '{nic}' is not permitted: run it as root, or with CAP_NET_RAW and CAP_NET_ADMIN")]
    Permission {
        /// The interface.
        nic: String,
    },
    /// The interface has no hardware time stamps for all frames.
    #[error(
        "'{nic}' does not stamp every frame that it receives ({source}); `ethtool -T {nic}` says what it can, and \
         stamps = \"kernel\" takes the kernel's"
    )]
    NoStamps {
        /// The interface.
        nic: String,
        /// The driver's error.
        source: io::Error,
    },
    /// The capture failed.
    #[error("capturing on '{nic}': {what}: {source}")]
    Capture {
        /// The interface.
        nic: String,
        /// The operation that failed.
        what: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// A command on the host failed.
    #[error("on {host}, `{command}` failed: {said}")]
    Command {
        /// The host.
        host: String,
        /// The command.
        command: String,
        /// The command's output.
        said: String,
    },
    /// A command on the host exceeded its time limit.
    #[error("on {host}, `{command}` did not end in {seconds} s; run it there by hand to see why")]
    TooLong {
        /// The host.
        host: String,
        /// The command.
        command: String,
        /// The limit.
        seconds: u64,
    },
    /// The host cannot be reached.
    #[error("{host} cannot be reached: {said}; `ssh -o BatchMode=yes {host} true` must work without a question")]
    Unreachable {
        /// The host.
        host: String,
        /// ssh's output.
        said: String,
    },
    /// A tenant does not match the site.
    #[error(
        "tenant '{name}' is {found} on {host}, and the site has it as {wanted}; `ontime ps` there, and \
         docs/use/tenants.md for its class"
    )]
    Tenant {
        /// Its name.
        name: String,
        /// The host.
        host: String,
        /// Its class, or that it does not exist.
        found: String,
        /// The class it should have.
        wanted: &'static str,
    },
    /// An operation that only an emulated host allows.
    #[error("{0}")]
    NotHere(String),
}
