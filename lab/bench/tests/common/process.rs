//! Real programs that run beside tests.

use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// A process that ends with the test.
pub(crate) struct Background(Child);

impl Drop for Background {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a program. If it is not installed, prints a message and returns `None`.
pub(crate) fn start(program: &str, arguments: &[&str]) -> Option<Background> {
    match Command::new(program).args(arguments).stdout(Stdio::null()).stderr(Stdio::null()).spawn() {
        Ok(child) => Some(Background(child)),
        Err(error) => {
            println!("SKIPPED: {program} cannot be started ({error}); install it to run this test");
            None
        }
    }
}

/// Captures packets on loopback that pass `filter`, with this many bytes per frame. If that is not permitted, prints a
/// message and returns `None`.
pub(crate) fn tcpdump(filter: &str, bytes: u32, file: &Path) -> Option<Background> {
    // SAFETY: geteuid has no preconditions.
    if unsafe { libc::geteuid() } != 0 {
        println!("SKIPPED: capturing needs root");
        return None;
    }
    let (bytes, path) = (bytes.to_string(), file.to_str().unwrap());
    let arguments = ["-i", "lo", "-U", "--immediate-mode", "-s", &bytes, "-Z", "root", "-w", path, filter];
    let dump = start("tcpdump", &arguments)?;
    wait_for_header(file);
    Some(dump)
}

/// Waits until a capture has a file header.
pub(crate) fn wait_for_header(capture: &Path) {
    let begun = Instant::now();
    while std::fs::metadata(capture).map_or(0, |meta| meta.len()) < 24 {
        assert!(begun.elapsed() < Duration::from_secs(30), "{} has no file header", capture.display());
        std::thread::sleep(Duration::from_millis(20));
    }
}
