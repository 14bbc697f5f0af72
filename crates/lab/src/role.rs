//! Roles of the lab's guests that their disk does not know: a first process of their own, brought along behind their
//! initrd, so that the images need not know of it.

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

/// Real-time applications by stock rt-app, at the word of its console (`lab-vm tell`).
pub const RTA: Role = Role { name: "rta", init: include_str!("guest/rta.sh"), more: &[] };

/// An RT server with a CPU load of its own, which a datagram sets (`lab-vm`, ROLE `loaded`).
pub const LOADED: Role = Role { name: "loaded", init: include_str!("guest/loaded.sh"), more: &[] };

/// The RT server of the guest's own disk, and a process that once tells this kernel's symbols and the programs'
/// mappings to the client's address, TCP port [`SYMBOLS_PORT`] (`lab-vm`, ROLE `rt`).
pub const SYMBOLS: Role = Role { name: "rt", init: include_str!("guest/symbols.sh"), more: &[] };
/// Where [`SYMBOLS`] tells them.
pub const SYMBOLS_PORT: u16 = 11_113;

/// First process of the initrd: has its own one put `/role` and what else is called so where the guest's root, which is
/// read-only, can run it.
const INIT: &str = "#!/bin/busybox sh\n\
                    /bin/busybox sed -i 's|^exec .*switch_root|/bin/busybox cp /role* /root/dev/; &|' /init\n\
                    exec /init\n";

/// A role.
#[derive(Debug, Clone, Copy)]
pub struct Role {
    /// Its name: `/lab/role-NAME.cpio` is its archive.
    pub name: &'static str,
    init: &'static str,
    /// What it needs besides, as `/dev/role-*` of the guest.
    more: &'static [(&'static str, &'static [u8])],
}

impl Role {
    /// Gives it to a host; `files` is its `/lab`.
    ///
    /// # Errors
    /// [`LabError::File`].
    pub fn bring(self, files: &Path) -> Result<(), LabError> {
        self.archive(files, &[])
    }

    /// The same with the guest module, as `/dev/role-ontime.ko` of the guest; it is not loaded.
    ///
    /// # Errors
    /// [`LabError::File`].
    pub fn bring_with_module(self, files: &Path, module: &Path) -> Result<(), LabError> {
        let module = fs::read(module).map_err(file("read", module))?;
        self.archive(files, &[("role-ontime.ko", &module)])
    }

    fn archive(self, files: &Path, more: &[(&str, &[u8])]) -> Result<(), LabError> {
        let mut entries = vec![("role", self.init.as_bytes()), ("with-role", INIT.as_bytes())];
        entries.extend_from_slice(self.more);
        entries.extend_from_slice(more);
        write_archive(&entries, &files.join(format!("role-{}.cpio", self.name)))
    }
}
