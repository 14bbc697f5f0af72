//! The lab's images: built once by `recipe/build.sh` from Debian's packages, then kept.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;

use crate::cache;
use crate::emulator::Emulator;
use crate::error::{LabError, file};
use crate::qemu::Kernel;

/// The recipe: what it holds decides the images' key.
const RECIPE: &[(&str, &str)] = &[
    ("backports.pref", include_str!("recipe/backports.pref")),
    ("bootstrap.sh", include_str!("recipe/bootstrap.sh")),
    ("build.sh", include_str!("recipe/build.sh")),
    ("debian.sh", include_str!("../../../scripts/debian.sh")),
    ("guest-init.sh", include_str!("recipe/guest-init.sh")),
    ("guest.packages", include_str!("recipe/guest.packages")),
    ("host.packages", include_str!("recipe/host.packages")),
    ("initrd-init.sh", include_str!("recipe/initrd-init.sh")),
    ("kamailio.cfg", include_str!("recipe/kamailio.cfg")),
    ("spin.c", include_str!("recipe/spin.c")),
    ("unpack-kernel.py", include_str!("recipe/unpack-kernel.py")),
];

/// Scripts that go into `/usr/local/bin` of the host at each boot, so that a change of theirs needs no new images.
pub(crate) const OVERLAY: &[(&str, &str)] = &[
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
    /// The images of this version of the recipe and the emulator, built first where they are missing. They are built
    /// side by side: the images wait for the network and the disk, the emulator for the processor. `progress` gets a
    /// line a step. A second caller waits for the first.
    ///
    /// # Errors
    /// [`LabError::Images`] with the log's end where a step fails; the half-built directory is not used later.
    /// [`LabError::Emulator`] where the emulator cannot be built, or fails its self-test.
    pub fn ready(progress: &mut dyn FnMut(&str)) -> Result<Self, LabError> {
        let dir = cache::entry(&cache::root(), RECIPE);
        let (lines, said) = mpsc::channel::<String>();
        let (images, emulator) = thread::scope(|scope| {
            let (of_images, of_emulator, dir) = (lines.clone(), lines, &dir);
            // A line cannot be sent only where this thread is gone, and then nobody waits for it.
            let images =
                scope.spawn(move || cache::once(dir, &mut |line| drop(of_images.send(line.to_owned())), build));
            let emulator = scope.spawn(move || Emulator::ready(&mut |line| drop(of_emulator.send(line.to_owned()))));
            said.iter().for_each(|line| progress(&line));
            (joined(images), joined(emulator))
        });
        images?;
        let emulator = emulator?;
        emulator.tested(&dir, progress)?;
        Ok(Self { dir, emulator })
    }

    /// The emulator's program and first arguments.
    pub fn emulator(&self) -> Vec<String> {
        self.emulator.command()
    }

    /// A host kernel's image.
    pub fn kernel(&self, kernel: Kernel) -> String {
        self.path(&format!("vmlinuz-{kernel}"))
    }

    /// A host kernel's first user land.
    pub fn initrd(&self, kernel: Kernel) -> String {
        self.path(&format!("initrd-{kernel}"))
    }

    /// The host kernel's full version, as `uname -r` prints it.
    ///
    /// # Errors
    /// The images are damaged.
    pub fn kernel_version(&self, kernel: Kernel) -> Result<String, LabError> {
        self.version(&kernel.to_string())
    }

    /// The guests' kernel's full version.
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

    /// The host's disk, ext4; never written to.
    pub fn host_disk(&self) -> String {
        self.path("host.img")
    }

    /// The guests' disk, ext4, read-only.
    pub fn guest_disk(&self) -> String {
        self.path("guest.img")
    }

    fn path(&self, name: &str) -> String {
        self.dir.join(name).to_string_lossy().into_owned()
    }
}

fn joined<T>(thread: thread::ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
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

/// The last `lines` lines of a log.
pub(crate) fn tail(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all.get(all.len().saturating_sub(lines)..).unwrap_or_default().join("\n")
}
