//! Roles of the lab's guests that are not on their disk: each has its own first process, in an archive appended to the
//! guests' initrd, so that the images do not contain it.

use std::fs;
use std::path::Path;

use crate::error::{LabError, file};
use crate::lab::write_archive;

/// A subscriber of Sampled Values that answers each frame (`lab-vm`, ROLE `sampled-values`).
pub const SAMPLED_VALUES: Role = Role {
    name: "sampled-values",
    init: include_str!("guest/sampled-values.sh"),
    more: &[("role-subscriber.pl", include_bytes!("../../../docs/examples/subscriber.pl"))],
};

/// Real-time applications by stock rt-app, on orders from the console (`lab-vm tell`).
pub const RTA: Role = Role { name: "rta", init: include_str!("guest/rta.sh"), more: &[] };

/// An RT server with its own CPU load, which a datagram sets (`lab-vm`, ROLE `loaded`).
pub const LOADED: Role = Role { name: "loaded", init: include_str!("guest/loaded.sh"), more: &[] };

/// The RT server of the guest's disk, and a process that sends the kernel's symbols and the programs' mappings once to
/// the client's address, TCP port [`SYMBOLS_PORT`] (`lab-vm`, ROLE `rt`).
pub const SYMBOLS: Role = Role { name: "rt", init: include_str!("guest/symbols.sh"), more: &[] };
/// The port to which [`SYMBOLS`] sends them.
pub const SYMBOLS_PORT: u16 = 11_113;

/// First process of the initrd: it makes the initrd's own first process copy `/role*` to a place where the guest, whose
/// root is read-only, can run it.
const INIT: &str = "#!/bin/busybox sh\n\
                    /bin/busybox sed -i 's|^exec .*switch_root|/bin/busybox cp /role* /root/dev/; &|' /init\n\
                    exec /init\n";

/// A role.
#[derive(Debug, Clone, Copy)]
pub struct Role {
    /// Name of the role; `/lab/role-NAME.cpio` is its archive.
    pub name: &'static str,
    init: &'static str,
    /// Further files, in the guest as `/dev/role-*`.
    more: &'static [(&'static str, &'static [u8])],
}

impl Role {
    /// A role whose first process is a script.
    pub const fn new(name: &'static str, init: &'static str) -> Self {
        Self { name, init, more: &[] }
    }

    /// Writes the archive into a host's files; `files` is its `/lab`.
    ///
    /// # Errors
    /// [`LabError::File`].
    pub fn bring(self, files: &Path) -> Result<(), LabError> {
        self.bring_with(files, &[])
    }

    /// As [`Self::bring`], with the guest module as `/dev/role-ontime.ko` in the guest. The module is not loaded.
    ///
    /// # Errors
    /// [`LabError::File`].
    pub fn bring_with_module(self, files: &Path, module: &Path) -> Result<(), LabError> {
        let module = fs::read(module).map_err(file("read", module))?;
        self.bring_with(files, &[("role-ontime.ko", &module)])
    }

    /// As [`Self::bring`], with more files. Their names begin with `role-`; in the guest they are in `/dev` and
    /// executable.
    ///
    /// # Errors
    /// [`LabError::File`].
    pub fn bring_with(self, files: &Path, more: &[(&str, &[u8])]) -> Result<(), LabError> {
        let mut entries = vec![("role", self.init.as_bytes()), ("with-role", INIT.as_bytes())];
        entries.extend_from_slice(self.more);
        entries.extend_from_slice(more);
        write_archive(&entries, &files.join(format!("role-{}.cpio", self.name)))
    }
}
