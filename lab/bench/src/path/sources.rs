//! Reads the symbols of the host's and the guest's kernels, and the mappings of their programs.
//!
//! In: a running host, and a guest with the role `ontime_lab::role::SYMBOLS`. Out: [`Sources`]. Both are read at run
//! time, so that modules and a randomised layout are included.

use std::fs;
use std::path::Path;

use super::elf;
use super::symbols::{Maps, Sources, Symbols};
use crate::client_side::Order;
use crate::error::MeasureError;
use crate::host::Host;

/// The file in `/lab` with what a guest has sent.
const GUEST: &str = "guest-symbols";
/// The text's last line.
const END: &str = "end\n";

/// The text of the guest that booted last; empty if it sends none or half of it.
pub(super) fn guest_symbols(host: &mut Host) -> Result<String, MeasureError> {
    Order::GuestSymbols { file: format!("/lab/{GUEST}").into() }.run(host.lab()?, &mut |_| {})?;
    let text = said(host, GUEST)?;
    Ok(if text.ends_with(END) { text } else { String::new() })
}

/// What was written to this file in `/lab`.
fn said(host: &Host, name: &str) -> Result<String, MeasureError> {
    let path = host.dir.join("files").join(name);
    fs::read_to_string(&path).map_err(|source| MeasureError::File { path, source })
}

/// Reads the host's symbols and mappings, and parses the guest's text.
pub(super) fn gather(host: &mut Host, ontime: &Path, guest: Option<&str>) -> Result<Sources, MeasureError> {
    host.shell(
        "grep ' [tTwW] ' /proc/kallsyms > /lab/kallsyms; \
         for maps in /proc/[0-9]*/maps; do of=${maps%/maps}; \
         name=$(tr '\\0' '\\n' < $of/cmdline 2> /dev/null | head -n 2 | tr '\\n' ' '); name=${name##*/}; \
         case $name in ontime*) ;; *) name=$(cat $of/comm 2> /dev/null) ;; esac; \
         echo \"process ${of#/proc/} $name\"; grep ' ..x' $maps 2> /dev/null; done > /lab/maps; true",
    )?;
    let guest = guest.unwrap_or_default();
    // Without the program file, its functions are shown as one.
    let program = fs::read(ontime).unwrap_or_default();
    Ok(Sources {
        host_kernel: Symbols::kallsyms(said(host, "kallsyms")?.lines()),
        host_maps: Maps::parse(said(host, "maps")?.lines()),
        guest_kernel: Symbols::kallsyms(guest.lines()),
        guest_maps: Maps::parse(guest.lines()),
        ontime: Symbols::new(elf::functions(&program)),
    })
}
