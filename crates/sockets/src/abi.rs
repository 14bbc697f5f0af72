//! The guest-host contract, generated from `abi/ontime_abi.h`; docs/device.md says what it means.

use vm_memory::ByteValued;

mod generated {
    #![allow(missing_docs, non_camel_case_types, clippy::all, clippy::pedantic, clippy::restriction)]
    include!(concat!(env!("OUT_DIR"), "/abi.rs"));
}
pub use generated::*;

// SAFETY: plain integers and byte arrays without padding (the header is compiled with -Wpadded in the tests); every
// pattern of bits is a value.
unsafe impl ByteValued for ontime_call {}
// SAFETY: as above.
unsafe impl ByteValued for ontime_done {}
// SAFETY: as above.
unsafe impl ByteValued for ontime_event {}
// SAFETY: as above.
unsafe impl ByteValued for ontime_config {}
// SAFETY: as above.
unsafe impl ByteValued for ontime_bw {}

/// Bytes of the header of a call's readable part.
pub const CALL_LEN: usize = size_of::<ontime_call>();
/// Bytes of the header of a call's writable part.
pub const DONE_LEN: usize = size_of::<ontime_done>();
/// Bytes of an event.
pub const EVENT_LEN: usize = size_of::<ontime_event>();

/// An error number of Linux (x86-64), positive.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

impl Errno {
    /// The calling thread's last error.
    pub fn last() -> Self {
        Self(std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO))
    }

    /// As a call's result.
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
    /// Every byte of a struct is a field's: none tells the guest what was in this process's memory.
    #[test]
    fn no_struct_has_padding() {
        let header = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../abi/ontime_abi.h");
        let mut compiler = std::process::Command::new("cc");
        let compiled =
            compiler.args(["-x", "c", "-fsyntax-only", "-Wpadded", "-Werror"]).arg(&header).output().unwrap();
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
    }
}
