//! The guest-host ABI, generated from `kernel/abi/ontime_abi.h`; docs/reference/device.md describes it.

use vm_memory::ByteValued;

mod generated {
    #![allow(missing_docs, non_camel_case_types, clippy::all, clippy::pedantic, clippy::restriction)]
    include!(concat!(env!("OUT_DIR"), "/abi.rs"));
}
pub use generated::*;

// SAFETY: plain integers and byte arrays without padding (the tests compile the header with -Wpadded); every bit
// pattern is valid.
unsafe impl ByteValued for ontime_call {}
// SAFETY: as above.
unsafe impl ByteValued for ontime_done {}
// SAFETY: as above.
unsafe impl ByteValued for ontime_event {}
// SAFETY: as above.
unsafe impl ByteValued for ontime_config {}
// SAFETY: as above.
unsafe impl ByteValued for ontime_bw {}

/// Length of the header of a call's readable part, bytes.
pub const CALL_LEN: usize = size_of::<ontime_call>();
/// Length of the header of a call's writable part, bytes.
pub const DONE_LEN: usize = size_of::<ontime_done>();
/// Length of an event, bytes.
pub const EVENT_LEN: usize = size_of::<ontime_event>();

/// A Linux errno (x86-64), positive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

impl Errno {
    /// The calling thread's last error.
    pub fn last() -> Self {
        Self(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    }

    /// The negative errno, as a call's result.
    pub fn result(self) -> i32 {
        -self.0
    }
}

impl std::fmt::Display for Errno {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

#[cfg(test)]
mod tests {
    /// Every byte of a struct belongs to a field, so no struct leaks this process's memory to the guest.
    #[test]
    fn no_struct_has_padding() {
        let header = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernel/abi/ontime_abi.h");
        let mut compiler = std::process::Command::new("cc");
        let compiled =
            compiler.args(["-x", "c", "-fsyntax-only", "-Wpadded", "-Werror"]).arg(&header).output().unwrap();
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    }
}
