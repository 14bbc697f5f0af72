//! The repository's kernel modules for the lab's kernels. Each is built once per kernel and state of its sources, and
//! stored. The images do not contain them: the guest module is in an archive appended to the guests' initrd, the host
//! module is a file in `/lab`.

use std::fs;
use std::path::{Path, PathBuf};

use crate::cache;
use crate::error::{LabError, file};
use crate::lab;

/// A module: its sources, as of this program's build, and the script that builds it.
#[derive(Debug)]
pub struct Module {
    /// Its directory in the repository's `kernel`.
    folder: &'static str,
    /// The file that the build makes.
    file: &'static str,
    /// Paths in the repository, and texts.
    sources: &'static [(&'static str, &'static str)],
    /// The build script, with arguments OUT VERSION.
    script: (&'static str, &'static str),
}

/// Scripts that both build scripts use.
const SCRIPTS: [(&str, &str); 3] = [
    ("scripts/build-module.sh", include_str!("../../../scripts/build-module.sh")),
    ("scripts/debian.sh", include_str!("../../../scripts/debian.sh")),
    ("scripts/kernel-headers.sh", include_str!("../../../scripts/kernel-headers.sh")),
];

/// The guest module: outsourced sockets and deadlines.
pub const GUEST: Module = Module {
    folder: "guest",
    file: "ontime.ko",
    sources: &[
        ("kernel/abi/ontime_abi.h", include_str!("../../../kernel/abi/ontime_abi.h")),
        ("kernel/guest/Kbuild", include_str!("../../../kernel/guest/Kbuild")),
        ("kernel/guest/Makefile", include_str!("../../../kernel/guest/Makefile")),
        ("kernel/guest/ahead.c", include_str!("../../../kernel/guest/ahead.c")),
        ("kernel/guest/dev.c", include_str!("../../../kernel/guest/dev.c")),
        ("kernel/guest/dkms.conf", include_str!("../../../kernel/guest/dkms.conf")),
        ("kernel/guest/dl.c", include_str!("../../../kernel/guest/dl.c")),
        ("kernel/guest/dl.h", include_str!("../../../kernel/guest/dl.h")),
        ("kernel/guest/dl_host.c", include_str!("../../../kernel/guest/dl_host.c")),
        ("kernel/guest/dl_next.c", include_str!("../../../kernel/guest/dl_next.c")),
        ("kernel/guest/dl_stray.c", include_str!("../../../kernel/guest/dl_stray.c")),
        ("kernel/guest/filter.c", include_str!("../../../kernel/guest/filter.c")),
        ("kernel/guest/idle.c", include_str!("../../../kernel/guest/idle.c")),
        ("kernel/guest/io.c", include_str!("../../../kernel/guest/io.c")),
        ("kernel/guest/list.c", include_str!("../../../kernel/guest/list.c")),
        ("kernel/guest/main.c", include_str!("../../../kernel/guest/main.c")),
        ("kernel/guest/ontime.h", include_str!("../../../kernel/guest/ontime.h")),
        ("kernel/guest/opt.c", include_str!("../../../kernel/guest/opt.c")),
        ("kernel/guest/place.h", include_str!("../../../kernel/guest/place.h")),
        ("kernel/guest/proto.c", include_str!("../../../kernel/guest/proto.c")),
        ("kernel/guest/queue.c", include_str!("../../../kernel/guest/queue.c")),
        ("kernel/guest/ready.c", include_str!("../../../kernel/guest/ready.c")),
        ("kernel/guest/rpc.c", include_str!("../../../kernel/guest/rpc.c")),
        ("kernel/guest/sock.c", include_str!("../../../kernel/guest/sock.c")),
        ("kernel/guest/steal.c", include_str!("../../../kernel/guest/steal.c")),
        ("kernel/guest/steer.c", include_str!("../../../kernel/guest/steer.c")),
        ("kernel/guest/wake.c", include_str!("../../../kernel/guest/wake.c")),
        ("kernel/guest/watch.c", include_str!("../../../kernel/guest/watch.c")),
    ],
    script: ("scripts/guest-module.sh", include_str!("../../../scripts/guest-module.sh")),
};

/// The host module: NAPI weight and polling threads, for kernels that need it ([`crate::Kernel::takes_host_module`]).
pub const HOST: Module = Module {
    folder: "host",
    file: "ontime_napi.ko",
    sources: &[
        ("kernel/host/Kbuild", include_str!("../../../kernel/host/Kbuild")),
        ("kernel/host/Makefile", include_str!("../../../kernel/host/Makefile")),
        ("kernel/host/dkms.conf", include_str!("../../../kernel/host/dkms.conf")),
        ("kernel/host/main.c", include_str!("../../../kernel/host/main.c")),
        ("kernel/host/poll.c", include_str!("../../../kernel/host/poll.c")),
        ("kernel/host/ontime_napi.h", include_str!("../../../kernel/host/ontime_napi.h")),
        ("kernel/host/weight.c", include_str!("../../../kernel/host/weight.c")),
    ],
    script: ("scripts/host-module.sh", include_str!("../../../scripts/host-module.sh")),
};

/// First process of a guest with the module: it adds the module to those that the initrd's own first process loads. A
/// role comes after it.
const INIT: &str =
    "#!/bin/busybox sh\necho ontime.ko >> /modules\n[ ! -e /with-role ] || exec /with-role\nexec /init\n";

impl Module {
    /// The module for the kernel of this version (`uname -r`), built first if it is missing. `progress` gets a line per
    /// step.
    ///
    /// # Errors
    /// [`LabError::Command`] with the remedy if the build fails.
    pub fn ready(&self, version: &str, progress: &mut dyn FnMut(&str)) -> Result<PathBuf, LabError> {
        let files: Vec<(&str, &str)> = self.sources.iter().copied().chain(SCRIPTS).chain([self.script]).collect();
        let key: Vec<(&str, &str)> = files.iter().copied().chain([("version", version)]).collect();
        let dir = cache::entry(&cache::root(), &key);
        cache::once(&dir, progress, |dir, progress| {
            cache::write(dir, &files)?;
            let script = dir.join(self.script.0);
            progress(&format!("lab: the {} module for {version}", self.folder));
            if cache::script(&script, &[&dir.join("out").to_string_lossy(), version], progress)? {
                return Ok(());
            }
            let command = format!("{} for kernel {version}", script.display());
            let output = "the compiler's messages are above".into();
            let remedy = "correct what they name; where the kernel's headers are missing: `ontime-lab images`";
            Err(LabError::Command { command, output, remedy })
        })?;
        Ok(dir.join("out").join(version).join(self.file))
    }

    /// Copies the module, built first if it is missing, to a lab's directory: a file in `/lab` inside.
    ///
    /// # Errors
    /// As [`Self::ready`]; [`LabError::File`].
    pub fn bring(&self, version: &str, dir: &Path, progress: &mut dyn FnMut(&str)) -> Result<(), LabError> {
        let module = self.ready(version, progress)?;
        let files = dir.join("files");
        fs::create_dir_all(&files).map_err(file("make", &files))?;
        fs::copy(&module, files.join(self.file)).map_err(file("copy", &module)).map(drop)
    }
}

/// Writes the archive that is appended to a guest's initrd (`lab-vm`, NET `sockets:...`).
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
    fn every_source_that_a_module_is_made_of_is_brought_along() {
        for module in [GUEST, HOST] {
            let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernel").join(module.folder);
            for entry in fs::read_dir(folder).unwrap().flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                // Files left by a build (ontime.mod.c, ontime.o) do not count.
                if name.ends_with(".h") || name == "Kbuild" || (name.ends_with(".c") && !name.ends_with(".mod.c")) {
                    let path = format!("kernel/{}/{name}", module.folder);
                    assert!(module.sources.iter().any(|(known, _)| *known == path), "{path} is not among the sources");
                }
            }
        }
    }
    #[test]
    fn every_script_that_a_script_runs_is_brought_along() {
        for (name, text) in SCRIPTS.into_iter().chain([GUEST.script, HOST.script]) {
            let words = text.split(['"', ' ', '\n']).filter(|word| word.ends_with(".sh"));
            for (_, script) in words.filter_map(|word| word.rsplit_once('/')) {
                let path = format!("scripts/{script}");
                assert!(SCRIPTS.iter().any(|(known, _)| *known == path), "{name} runs {path}");
            }
        }
    }
}
