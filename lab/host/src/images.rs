//! The lab's images. `recipe/build.sh` builds them once from Debian's packages.

use std::fs;
use std::path::{Path, PathBuf};

use crate::cache;
use crate::emulator::Emulator;
use crate::error::{LabError, file, tail};
use crate::kernel::Kernel;

/// The recipe. Its content determines the images' key.
const RECIPE: &[(&str, &str)] = &[
    ("backports.pref", include_str!("recipe/backports.pref")),
    ("build.sh", include_str!("recipe/build.sh")),
    ("guest-init.sh", include_str!("recipe/guest-init.sh")),
    ("guest.packages", include_str!("recipe/guest.packages")),
    ("host.packages", include_str!("recipe/host.packages")),
    ("initrd-init.sh", include_str!("recipe/initrd-init.sh")),
    ("kamailio.cfg", include_str!("recipe/kamailio.cfg")),
    ("unpack-kernel.py", include_str!("recipe/unpack-kernel.py")),
];

/// Scripts that are copied to the host's `/usr/local/bin` at each boot, so that changing them needs no new images.
pub(crate) const OVERLAY: &[(&str, &str)] = &[
    ("lab-client", include_str!("overlay/lab-client.sh")),
    ("lab-init", include_str!("overlay/lab-init.sh")),
    ("lab-libvirt", include_str!("overlay/lab-libvirt.sh")),
    ("lab-netns", include_str!("overlay/lab-netns.sh")),
    ("lab-vm", include_str!("overlay/lab-vm.sh")),
];

/// The images, ready to boot.
#[derive(Debug, Clone)]
pub struct Images {
    dir: PathBuf,
    emulator: Emulator,
}

impl Images {
    /// The images for this version of the recipe, and their emulator, built and tested first if they are missing.
    /// `progress` gets a line per step. A second caller waits for the first.
    ///
    /// # Errors
    /// [`LabError::Images`] with the log's end if a step fails; [`LabError::Emulator`] if the emulator cannot be built,
    /// or fails its self-test. An incomplete directory is not used later.
    pub fn ready(progress: &mut dyn FnMut(&str)) -> Result<Self, LabError> {
        let dir = cache::entry(&cache::root(), RECIPE);
        cache::once(&dir, progress, build)?;
        let emulator = Emulator::ready(progress)?;
        emulator.tested(&dir, progress)?;
        Ok(Self { dir, emulator })
    }

    /// Images in this directory, whether they exist or not.
    #[cfg(test)]
    pub(crate) fn at(dir: &str) -> Self {
        Self { dir: dir.into(), emulator: Emulator::at(dir) }
    }

    /// The emulator's program and first arguments.
    pub(crate) fn emulator(&self) -> Vec<String> {
        self.emulator.command()
    }

    /// The image of a host kernel.
    pub fn kernel(&self, kernel: Kernel) -> String {
        self.path(&format!("vmlinuz-{kernel}"))
    }

    /// The initrd of a host kernel.
    pub(crate) fn initrd(&self, kernel: Kernel) -> String {
        self.path(&format!("initrd-{kernel}"))
    }

    /// The full version of a host kernel, as printed by `uname -r`.
    ///
    /// # Errors
    /// The images are damaged.
    pub fn kernel_version(&self, kernel: Kernel) -> Result<String, LabError> {
        self.version(&kernel.to_string())
    }

    /// The full version of the guests' kernel.
    ///
    /// # Errors
    /// As [`Self::kernel_version`].
    pub fn guest_version(&self) -> Result<String, LabError> {
        self.version("guest")
    }

    fn version(&self, label: &str) -> Result<String, LabError> {
        let path = self.dir.join(format!("version-{label}"));
        Ok(fs::read_to_string(&path).map_err(file("read", &path))?.trim().to_owned())
    }

    /// The host's disk, ext4. It is never written to.
    pub(crate) fn host_disk(&self) -> String {
        self.path("host.img")
    }

    /// The guests' disk, ext4, read-only.
    pub(crate) fn guest_disk(&self) -> String {
        self.path("guest.img")
    }

    fn path(&self, name: &str) -> String {
        self.dir.join(name).to_string_lossy().into_owned()
    }
}

fn build(dir: &Path, progress: &mut dyn FnMut(&str)) -> Result<(), LabError> {
    let recipe = dir.join("recipe");
    cache::write(&recipe, RECIPE)?;
    if cache::script(&recipe.join("build.sh"), &[&dir.to_string_lossy()], progress)? {
        return Ok(());
    }
    let log = dir.join("build.log");
    let text = fs::read_to_string(&log).unwrap_or_default();
    Err(LabError::Images { tail: tail(&text, 15), log })
}
