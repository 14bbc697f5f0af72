//! Reads the symbols of the host's and the guest's kernels, and the mappings of their programs.
//!
//! In: a running host, and a guest with the role `ontime_lab::role::SYMBOLS`. Out: [`Sources`]. Both are read at run
//! time, so that modules and a randomised layout are included.

use std::fs;
use std::io::{ErrorKind, Read};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use ontime_lab::role::SYMBOLS_PORT;

use super::elf;
use super::symbols::{Maps, Sources, Symbols};
use crate::client::ClientError;
use crate::error::MeasureError;
use crate::host::Host;

/// Limit of the real time for a guest to send its symbols. Without them, its functions are shown as one.
const PATIENCE: Duration = Duration::from_secs(180);
/// Limit of the guest's text, bytes: ten times what a guest sends.
const LONGEST: u64 = 64 << 20;
/// The text's last line.
const END: &str = "end\n";

/// The socket on which guests send their symbols.
#[derive(Debug)]
pub(super) struct GuestSymbols(TcpListener);

impl GuestSymbols {
    /// Listens for guests, in the lab's network namespace.
    pub(super) fn listen() -> Result<Self, MeasureError> {
        let address = SocketAddr::from((Ipv4Addr::UNSPECIFIED, SYMBOLS_PORT));
        let failed = |what| move |source| ClientError::Socket { what, address, source };
        let listener = TcpListener::bind(address).map_err(failed("bind to"))?;
        listener.set_nonblocking(true).map_err(failed("use"))?;
        Ok(Self(listener))
    }

    /// The text of the guest that booted last; empty if none arrives.
    pub(super) fn receive(&self, host: &mut Host) -> Result<String, MeasureError> {
        let end = Instant::now() + PATIENCE;
        let mut last = String::new();
        while Instant::now() < end {
            host.alive()?;
            match self.0.accept() {
                // A guest that hung while it booted has sent nothing, or half of its text.
                Ok((stream, _)) => last = text_of(stream, host)?.filter(|text| text.ends_with(END)).unwrap_or(last),
                Err(_) if !last.is_empty() => return Ok(last),
                Err(_) => thread::sleep(Duration::from_millis(100)),
            }
        }
        Ok(last)
    }
}

/// The whole text of one guest; `None` if the guest stops sending.
fn text_of(mut stream: TcpStream, host: &mut Host) -> Result<Option<String>, MeasureError> {
    // The timeout allows a check of the host between reads.
    if stream.set_nonblocking(false).and_then(|()| stream.set_read_timeout(Some(Duration::from_millis(500)))).is_err() {
        return Ok(None);
    }
    let (mut bytes, mut buffer, mut news) = (Vec::new(), vec![0; 1 << 16], Instant::now());
    while bytes.len() as u64 <= LONGEST && news.elapsed() < PATIENCE {
        match stream.read(&mut buffer) {
            Ok(0) => return Ok(String::from_utf8(bytes).ok()),
            Ok(length) => {
                news = Instant::now();
                bytes.extend_from_slice(buffer.get(..length).unwrap_or_default());
            }
            Err(error)
                if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted) =>
            {
                host.alive()?;
            }
            Err(_) => return Ok(None),
        }
    }
    Ok(None)
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
    let said = |name: &str| {
        let path = host.dir.join("files").join(name);
        fs::read_to_string(&path).map_err(|source| MeasureError::File { path, source })
    };
    let guest = guest.unwrap_or_default();
    // Without the program file, its functions are shown as one.
    let program = fs::read(ontime).unwrap_or_default();
    Ok(Sources {
        host_kernel: Symbols::kallsyms(said("kallsyms")?.lines()),
        host_maps: Maps::parse(said("maps")?.lines()),
        guest_kernel: Symbols::kallsyms(guest.lines()),
        guest_maps: Maps::parse(guest.lines()),
        ontime: Symbols::new(elf::functions(&program)),
    })
}
