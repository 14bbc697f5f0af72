//! Roles of the lab's guests that their disk does not know: a first process of their own, brought along behind their initrd, so that the images
//! need not know of it.

use std::path::Path;

use crate::error::LabError;
use crate::lab::write_archive;

/// A subscriber of Sampled Values that answers each frame (`lab-vm`, ROLE `sampled-values`).
pub const SAMPLED_VALUES: Role = Role { name: "sampled-values", init: include_str!("guest/sampled-values.sh") };

/// An RT server with a CPU load of its own, which a datagram sets (`lab-vm`, ROLE `loaded`).
pub const LOADED: Role = Role { name: "loaded", init: include_str!("guest/loaded.sh") };

/// First process of the initrd: has its own one put `/role` where the guest's root, which is read-only, can run it.
const INIT: &str = "#!/bin/busybox sh\n\
                    /bin/busybox sed -i 's|^exec .*switch_root|/bin/busybox cp /role /root/dev/role; &|' /init\n\
                    exec /init\n";

/// A role.
#[derive(Debug, Clone, Copy)]
pub struct Role {
    /// Its name: `/lab/role-NAME.cpio` is its archive.
    pub name: &'static str,
    init: &'static str,
}

impl Role {
    /// Gives it to a host; `files` is its `/lab`.
    ///
    /// # Errors
    /// [`LabError::File`].
    pub fn bring(self, files: &Path) -> Result<(), LabError> {
        let out = files.join(format!("role-{}.cpio", self.name));
        write_archive(&[("role", self.init.as_bytes()), ("with-role", INIT.as_bytes())], &out)
    }
}
