//! A real host under measurement: its owner's VMs, and a client at the other end of a cable.
//!
//! In: a [`Site`], a file of its owner. Out: a [`Target`], which runs commands on the host and has the captures that
//! its [`monitor`] makes. Nothing of the VMs is changed: who they are, and where they answer, the site says. What an
//! experiment switches is the host's method, by its daemon, and that it gives back.

mod capture;
pub mod monitor;
mod site;
mod target;

use std::io;
use std::path::PathBuf;

use thiserror::Error;

pub use self::site::Site;
pub use self::target::Target;

/// Why a real host cannot be measured.
#[derive(Debug, Error)]
pub enum HardwareError {
    /// The site's file.
    #[error("{path}: {what}", path = path.display())]
    Site {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
    /// The client's namespace.
    #[error(
        "network namespace '{name}' of the client cannot be entered: {source}; `ip netns list` names those there are, \
         and it takes root"
    )]
    Namespace {
        /// Which.
        name: String,
        /// The system's word.
        source: io::Error,
    },
    /// No such interface.
    #[error("there is no interface '{nic}' at the client{place}; `ip link` names those there are")]
    NoNic {
        /// Which.
        nic: String,
        /// In which namespace, in words.
        place: String,
    },
    /// It is down.
    #[error("interface '{nic}' of the client is down or has no carrier; `ip link set {nic} up`, and look at the cable")]
    Down {
        /// Which.
        nic: String,
    },
    /// Its monitor does not get on.
    #[error("the capture of '{nic}' lacks what passed {seconds} s ago: give the client's machine less other work")]
    Behind {
        /// Which.
        nic: String,
        /// For so long it was waited for.
        seconds: u64,
    },
    /// No right to capture.
    #[error("capturing on '{nic}' is not permitted: run it as root, or with CAP_NET_RAW and CAP_NET_ADMIN")]
    Permission {
        /// Where.
        nic: String,
    },
    /// No hardware stamps.
    #[error(
        "'{nic}' does not stamp every frame that it receives ({source}); `ethtool -T {nic}` says what it can, and \
         stamps = \"kernel\" takes the kernel's"
    )]
    NoStamps {
        /// Where.
        nic: String,
        /// The driver's word.
        source: io::Error,
    },
    /// The capture.
    #[error("capturing on '{nic}': {what}: {source}")]
    Capture {
        /// Where.
        nic: String,
        /// What was tried.
        what: &'static str,
        /// The system's word.
        source: io::Error,
    },
    /// A command on the host.
    #[error("on {host}, `{command}` failed: {said}")]
    Command {
        /// The host.
        host: String,
        /// What was run.
        command: String,
        /// Its words.
        said: String,
    },
    /// It takes too long.
    #[error("on {host}, `{command}` did not end in {seconds} s")]
    TooLong {
        /// The host.
        host: String,
        /// What was run.
        command: String,
        /// The limit.
        seconds: u64,
    },
    /// The host cannot be reached.
    #[error("{host} cannot be reached: {said}; `ssh -o BatchMode=yes {host} true` must work without a question")]
    Unreachable {
        /// The host.
        host: String,
        /// ssh's words.
        said: String,
    },
    /// A tenant is not what the site says.
    #[error(
        "tenant '{name}' is {found} on {host}, and the site has it as {wanted}; `ontime ps` there, and docs/tenants.md \
         for its class"
    )]
    Tenant {
        /// Its name.
        name: String,
        /// The host.
        host: String,
        /// Its class, or that it is not there.
        found: String,
        /// The class it should have.
        wanted: &'static str,
    },
    /// Something that only an emulated host has.
    #[error("{0}")]
    NotHere(String),
}
