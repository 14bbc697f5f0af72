//! The emulator: Debian 12's QEMU with the lab's patches, built once from Debian's source and tested before its first
//! use.
//!
//! Each patch in `emulator/patches` says what it changes and why. `emulator/version` is the source that the patches
//! were checked with. The build refuses any other source, since another emulator may give other figures.

use std::fs;
use std::path::{Path, PathBuf};

use crate::cache;
use crate::error::{LabError, tail};

/// The emulated CPU. `erms` and `fsrm` are off because the kernel would otherwise copy with `rep movsb`, one byte per
/// instruction, and instructions are time. `cx16` is off because of a bug of TCG: CMPXCHG16B takes the flags from a
/// stale condition code (translate.c, case 0x1c7, does not store the current code before its helper). If the
/// instruction budget ends right after it, RFLAGS stays wrong. The guest's next VM exit saves that value, and the guest
/// crashes. Kernels work without the feature.
pub(crate) const CPU: &str = "max,-erms,-fsrm,-cx16";
/// Mean number of instructions per turn, if several CPUs take turns on the virtual clock. Another CPU sees an event
/// within one round, which takes the virtual time of one turn: 1 us at 1 ns per instruction. A wake-up of a thread on
/// another CPU costs 5 us of instructions. Shorter turns make the emulation slower.
pub(crate) const TURN: u32 = 1000;
/// The build: what it holds decides the emulator's key.
const BUILD: &[(&str, &str)] = &[
    ("bootstrap.sh", include_str!("recipe/bootstrap.sh")),
    ("build.sh", include_str!("emulator/build.sh")),
    ("debian.sh", include_str!("../../../scripts/debian.sh")),
    ("devices.mak", include_str!("emulator/devices.mak")),
    ("packages", include_str!("emulator/packages")),
    ("patches/0001-svm-interrupt-once.patch", include_str!("emulator/patches/0001-svm-interrupt-once.patch")),
    ("patches/0002-svm-clear-eventinj.patch", include_str!("emulator/patches/0002-svm-clear-eventinj.patch")),
    ("patches/0003-svm-next-rip.patch", include_str!("emulator/patches/0003-svm-next-rip.patch")),
    ("patches/0004-e1000e-interrupt-once.patch", include_str!("emulator/patches/0004-e1000e-interrupt-once.patch")),
    ("patches/0005-e1000e-moderation.patch", include_str!("emulator/patches/0005-e1000e-moderation.patch")),
    ("patches/0006-icount-turns.patch", include_str!("emulator/patches/0006-icount-turns.patch")),
    (
        "patches/0007-virtio-before-the-cpu-continues.patch",
        include_str!("emulator/patches/0007-virtio-before-the-cpu-continues.patch"),
    ),
    ("patches/0008-serial-port-stops.patch", include_str!("emulator/patches/0008-serial-port-stops.patch")),
    ("patches/0009-icount-log.patch", include_str!("emulator/patches/0009-icount-log.patch")),
    ("patches/0010-dump-nanoseconds.patch", include_str!("emulator/patches/0010-dump-nanoseconds.patch")),
    ("patches/0011-e1000e-missed-packets.patch", include_str!("emulator/patches/0011-e1000e-missed-packets.patch")),
    ("patches/0012-filter-link.patch", include_str!("emulator/patches/0012-filter-link.patch")),
    ("patches/0013-jump-cache-ages.patch", include_str!("emulator/patches/0013-jump-cache-ages.patch")),
    ("patches/0014-x86-translations-stay.patch", include_str!("emulator/patches/0014-x86-translations-stay.patch")),
    ("patches/0015-tcp-segmentation.patch", include_str!("emulator/patches/0015-tcp-segmentation.patch")),
    ("version", include_str!("emulator/version")),
];

/// The self-test.
const TEST: &[(&str, &str)] =
    &[("test.c", include_str!("emulator/test.c")), ("test.sh", include_str!("emulator/test.sh"))];

/// The emulator, ready to run.
#[derive(Debug, Clone)]
pub(crate) struct Emulator {
    dir: PathBuf,
}

impl Emulator {
    /// This version's emulator, built first where it is missing; `progress` gets a line a step.
    ///
    /// # Errors
    /// [`LabError::Emulator`] where its source is not the one that the patches were checked with, or a step fails.
    pub(crate) fn ready(progress: &mut dyn FnMut(&str)) -> Result<Self, LabError> {
        let dir = cache::entry(&cache::root(), BUILD);
        cache::once(&dir, progress, |dir, progress| {
            let recipe = dir.join("recipe");
            cache::write(&recipe, BUILD)?;
            if cache::script(&recipe.join("build.sh"), &[&dir.to_string_lossy()], progress)? {
                return Ok(());
            }
            let log = dir.join("build.log");
            let said = tail(&fs::read_to_string(&log).unwrap_or_default(), 15);
            Err(LabError::Emulator { what: "built", said, files: log })
        })?;
        Ok(Self { dir })
    }

    /// An emulator in this directory, whether it exists or not.
    #[cfg(test)]
    pub(crate) fn at(dir: &str) -> Self {
        Self { dir: dir.into() }
    }

    /// Tests it with the kernel of these images, once.
    ///
    /// # Errors
    /// [`LabError::Emulator`] with the figures that are out of their bounds.
    pub(crate) fn tested(&self, images: &Path, progress: &mut dyn FnMut(&str)) -> Result<(), LabError> {
        let turn = TURN.to_string();
        let (with, of) = (self.dir.to_string_lossy(), images.to_string_lossy());
        let conditions = [("emulator", &*with), ("images", &*of), ("cpu", CPU), ("turn", &turn)];
        let key: Vec<(&str, &str)> = TEST.iter().copied().chain(conditions).collect();
        cache::once(&cache::entry(&cache::root(), &key), progress, |dir, progress| {
            progress("lab emulator: its self-test, on 1, 2, 4 and 8 CPUs");
            cache::write(dir, TEST)?;
            let command = self.command();
            let out = dir.to_string_lossy();
            let arguments: Vec<&str> =
                [&*out, &*of, CPU, &turn].into_iter().chain(command.iter().map(String::as_str)).collect();
            if cache::script(&dir.join("test.sh"), &arguments, progress)? {
                return Ok(());
            }
            let said = fs::read_to_string(dir.join("refused")).unwrap_or_default().trim().to_owned();
            Err(LabError::Emulator { what: "used", said, files: dir.to_path_buf() })
        })
    }

    /// Its program, the loader first: it runs on any distribution, with the libraries it came with.
    pub(crate) fn command(&self) -> Vec<String> {
        let at = |path: &str| self.dir.join(path).to_string_lossy().into_owned();
        vec![
            at("lib/ld-linux-x86-64.so.2"),
            "--library-path".into(),
            at("lib"),
            at("bin/qemu-system-x86_64"),
            "-L".into(),
            at("share"),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_file_of_the_emulator_is_part_of_its_key() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/emulator");
        let patches = fs::read_dir(folder.join("patches")).unwrap().flatten().map(|it| ("patches/", it));
        let names: Vec<String> = fs::read_dir(&folder)
            .unwrap()
            .flatten()
            .filter(|entry| entry.path().is_file())
            .map(|it| ("", it))
            .chain(patches)
            .map(|(below, entry)| format!("{below}{}", entry.file_name().to_string_lossy()))
            .collect();
        assert!(names.len() > 8, "{names:?}");
        for name in names {
            assert!(BUILD.iter().chain(TEST).any(|(known, _)| *known == name), "{name}");
        }
    }

    /// A patch that names no file is applied by nobody, and one without a reason says nothing.
    #[test]
    fn patches_are_complete_and_say_why() {
        for (name, text) in BUILD.iter().filter(|(name, _)| name.ends_with(".patch")) {
            let (why, diff) = text.split_once("\n---\n").unwrap_or_else(|| panic!("{name} has no message"));
            assert!(why.lines().count() >= 3, "{name}");
            assert!(diff.contains("\n+++ b/") && diff.contains("\n@@ "), "{name}");
        }
    }

    /// Runs the build's first steps against a mirror that has another source.
    #[test]
    fn a_source_of_another_version_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let recipe = dir.path().join("recipe");
        cache::write(&recipe, BUILD).unwrap();
        // The system's apt, as far as the script asks it before it looks at the version.
        let apt = "keyring=k\nmirror=m\nsrc() { echo \"deb $1\"; }\n\
                   own_apt() {\n\
                   [ \"$1\" != apt-cache ] || printf 'Package: qemu\\nVersion: 1:7.2+dfsg-7+deb12u99\\n'\n\
                   }\n";
        fs::write(recipe.join("debian.sh"), apt).unwrap();
        let out = dir.path().to_string_lossy().into_owned();
        let mut lines = Vec::new();
        let built = cache::script(&recipe.join("build.sh"), &[&out], &mut |line| lines.push(line.to_owned())).unwrap();
        let log = fs::read_to_string(dir.path().join("build.log")).unwrap();
        assert!(!built);
        assert!(log.contains("deb12u99") && log.contains("deb12u18"), "{log}");
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(!dir.path().join("work").exists());
    }
}
