//! Fuzz targets: one function for each kind of bytes that a guest, a container or a local user chooses.
//!
//! In: any bytes. Out: nothing, or a panic where the product's own code panics, or breaks the property that the
//! target's comment names. Targets call the code of the product, and no copy of it.
//! [docs/fuzzing.md](../../../docs/fuzzing.md) has how they are run. The test `corpus` runs every target over its
//! corpus and over mutations of the corpus.
//!
//! | file | |
//! |---|---|
//! | `targets::guest` | a guest's memory: rings, calls, the control queue |
//! | `targets::shared` | memory and lines of a device process: ledger, published deadlines, needs |
//! | `targets::host` | `/proc`, command lines, cgroups, libvirt's files, monitors |
//! | `targets::kernel` | what the kernel tells: trace rings, netlink; the journal |
//! | `targets::files` | every TOML file |
//! | `daemon`, `cap` | files of the crate `ontime`, a program, compiled here, too |

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a target ends by panicking"
)]

mod cap;
mod daemon;
mod input;
pub mod targets;

/// Runs a target on an input.
pub type Target = fn(&[u8]);

/// Every target, by name.
pub const TARGETS: [(&str, Target); 20] = [
    ("ring", targets::guest::ring),
    ("call", targets::guest::call),
    ("control", targets::guest::control),
    ("ledger", targets::shared::ledger),
    ("published", targets::shared::published),
    ("asks", targets::shared::asks),
    ("proc", targets::host::proc),
    ("cmdline", targets::host::cmdline),
    ("cgroup", targets::host::cgroup),
    ("libvirt", targets::host::libvirt),
    ("qmp", targets::host::qmp),
    ("trace", targets::kernel::trace),
    ("analysis", targets::kernel::analysis),
    ("netlink", targets::kernel::netlink),
    ("journal", targets::kernel::journal),
    ("tenants_toml", targets::files::tenants_toml),
    ("host_toml", targets::files::host_toml),
    ("daemon_toml", targets::files::daemon_toml),
    ("sched_toml", targets::files::sched_toml),
    ("sockets_toml", targets::files::sockets_toml),
];

/// The target of a name.
pub fn target(name: &str) -> Option<Target> {
    TARGETS.iter().find(|(known, _)| *known == name).map(|(_, target)| *target)
}
