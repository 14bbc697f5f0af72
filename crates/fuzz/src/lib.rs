//! Fuzz targets: one function per kind of bytes that a guest, a container or a local user can choose.
//!
//! Input: any bytes. Output: nothing, or a panic if the product's code panics or violates the property in the target's
//! comment. Targets call the product's code, not a copy of it. [CONTRIBUTING.md](../../../CONTRIBUTING.md) describes
//! how to run them. The test `corpus` runs every target with its corpus and with mutations of the corpus.
//!
//! | file | |
//! |---|---|
//! | `targets::guest` | a guest's memory: rings, calls, the control queue |
//! | `targets::shared` | memory and lines of a device process: ledger, published deadlines, needs |
//! | `targets::api` | requests on the daemon's socket |
//! | `targets::host` | `/proc`, command lines, cgroups, libvirt's files, monitors |
//! | `targets::kernel` | data from the kernel: trace rings, netlink; the journal |
//! | `targets::files` | every TOML file |

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    reason = "a target ends by panicking"
)]

mod input;
pub mod targets;

/// A target, run with an input.
pub type Target = fn(&[u8]);

/// Every target, by name.
pub const TARGETS: [(&str, Target); 23] = [
    ("ring", targets::guest::ring),
    ("call", targets::guest::call),
    ("control", targets::guest::control),
    ("ledger", targets::shared::ledger),
    ("published", targets::shared::published),
    ("asks", targets::shared::asks),
    ("api", targets::api::api),
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
    ("plan_toml", targets::files::plan_toml),
    ("limits_toml", targets::files::limits_toml),
];

/// The target with this name.
pub fn target(name: &str) -> Option<Target> {
    TARGETS.iter().find(|(known, _)| *known == name).map(|(_, target)| *target)
}
