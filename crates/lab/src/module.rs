//! The guest's kernel module for the lab's own guests: built once for their kernel, kept by its sources, brought along by
//! an archive behind their initrd, so that the images need not know of it.

use std::fs;
use std::path::{Path, PathBuf};

use crate::cache;
use crate::error::{LabError, file};
use crate::images::Images;
use crate::lab;

/// What it is built of, as it was when this was built; and the script that builds it, where it looks for them.
const SOURCES: &[(&str, &str)] = &[
    ("abi/ontime_abi.h", include_str!("../../../abi/ontime_abi.h")),
    ("guest/Kbuild", include_str!("../../../guest/Kbuild")),
    ("guest/Makefile", include_str!("../../../guest/Makefile")),
    ("guest/ahead.c", include_str!("../../../guest/ahead.c")),
    ("guest/dev.c", include_str!("../../../guest/dev.c")),
    ("guest/dkms.conf", include_str!("../../../guest/dkms.conf")),
    ("guest/dl.c", include_str!("../../../guest/dl.c")),
    ("guest/idle.c", include_str!("../../../guest/idle.c")),
    ("guest/io.c", include_str!("../../../guest/io.c")),
    ("guest/main.c", include_str!("../../../guest/main.c")),
    ("guest/ontime.h", include_str!("../../../guest/ontime.h")),
    ("guest/opt.c", include_str!("../../../guest/opt.c")),
    ("guest/place.h", include_str!("../../../guest/place.h")),
    ("guest/proto.c", include_str!("../../../guest/proto.c")),
    ("guest/queue.c", include_str!("../../../guest/queue.c")),
    ("guest/ready.c", include_str!("../../../guest/ready.c")),
    ("guest/rpc.c", include_str!("../../../guest/rpc.c")),
    ("guest/sock.c", include_str!("../../../guest/sock.c")),
    ("guest/steal.c", include_str!("../../../guest/steal.c")),
    ("guest/steer.c", include_str!("../../../guest/steer.c")),
    ("guest/wake.c", include_str!("../../../guest/wake.c")),
    ("guest/watch.c", include_str!("../../../guest/watch.c")),
    ("scripts/guest-module.sh", include_str!("../../../scripts/guest-module.sh")),
];

/// First process of a guest that has the module: it is one more of those that the initrd's own first process loads.
const INIT: &str = "#!/bin/busybox sh\necho ontime.ko >> /modules\nexec /init\n";

/// The module for the guests' kernel, built first where it is missing; `progress` gets a line a step.
///
/// # Errors
/// [`LabError::Command`] where the build fails, with what to do.
pub fn ready(images: &Images, progress: &mut dyn FnMut(&str)) -> Result<PathBuf, LabError> {
    let version = images.guest_version()?;
    let key: Vec<(&str, &str)> = SOURCES.iter().copied().chain([("version", version.as_str())]).collect();
    let dir = cache::entry(&cache::root(), &key);
    cache::once(&dir, progress, |dir, progress| {
        let script = dir.join("scripts/guest-module.sh");
        cache::write(dir, SOURCES)?;
        progress(&format!("lab: the guest module for {version}"));
        if cache::script(&script, &[&dir.join("out").to_string_lossy(), &version], progress)? {
            return Ok(());
        }
        let command = format!("{} for the guests' kernel {version}", script.display());
        Err(LabError::Command { command, output: "what went wrong stands above".into() })
    })?;
    Ok(dir.join("out").join(version).join("ontime.ko"))
}

/// Writes the archive that goes behind a guest's initrd (`lab-vm`, NET `sockets:...`).
///
/// # Errors
/// [`LabError::File`].
pub fn write_archive(module: &Path, out: &Path) -> Result<(), LabError> {
    let module = fs::read(module).map_err(file("read", module))?;
    lab::write_archive(&[("ontime.ko", &module), ("with-module", INIT.as_bytes())], out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_source_that_the_module_is_made_of_is_brought_along() {
        let guest = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../guest");
        for entry in fs::read_dir(guest).unwrap().flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            // Not what a build leaves (ontime.mod.c, ontime.o).
            if name.ends_with(".h") || name == "Kbuild" || (name.ends_with(".c") && !name.ends_with(".mod.c")) {
                let path = format!("guest/{name}");
                assert!(SOURCES.iter().any(|(known, _)| *known == path), "{path} is not in SOURCES");
            }
        }
    }
}
