//! A separate network namespace per test, with a sysfs that shows it. Everything in it ends with the test's thread.
#![allow(clippy::unwrap_used, clippy::indexing_slicing)] // a test that cannot go on fails

use std::path::Path;
use std::process::Command;

use ontime_hostnet::Roots;

/// Runs `test` in a thread with its own network and mount namespace. Prints a message and returns if it is not root.
pub(crate) fn in_namespace(test: impl FnOnce(&Roots) + Send) {
    if !rustix::process::geteuid().is_root() {
        println!("SKIPPED: network namespaces need root");
        return;
    }
    let sys = tempfile::tempdir().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            unshare();
            mount_sysfs(sys.path());
            let roots = Roots { sys: sys.path().to_owned(), ..Roots::default() };
            run("ip", "link set lo up");
            test(&roots);
        });
    });
}

/// Gives the calling thread its own namespaces.
pub(crate) fn unshare() {
    use rustix::thread::{UnshareFlags, unshare_unsafe};
    // SAFETY: only this thread, which belongs to the test, changes namespaces; memory and descriptors stay shared as
    // before.
    unsafe { unshare_unsafe(UnshareFlags::NEWNET | UnshareFlags::NEWNS) }.unwrap();
}

fn mount_sysfs(path: &Path) {
    use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};
    mount_change("/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC).unwrap();
    mount("sysfs", path, "sysfs", MountFlags::empty(), None).unwrap();
}

/// Runs a command. Its arguments are split at spaces.
pub(crate) fn run(program: &str, arguments: &str) {
    let output = Command::new(program).args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "{program} {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}
