//! Reads a packet capture that may still be growing.
//!
//! In: bytes of a classic pcap file (microsecond or nanosecond stamps, either byte order), as written by QEMU's
//! `filter-dump` and tcpdump. Out: one [`Record`] per packet. A record that is cut off at the end is not an error,
//! because a capture looks like that while it is being written. [`Decoder::pending`] returns the number of its bytes.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use pcap_parser::nom::Err as NomErr;
use pcap_parser::{PcapHeader, parse_pcap_frame, parse_pcap_frame_be, parse_pcap_frame_modified, parse_pcap_header};

/// Maximum length of a captured packet that counts as valid, bytes: libpcap's MAXIMUM_SNAPLEN.
pub(crate) const MAX_CAPTURED: u32 = 262_144;
/// LINKTYPE_ETHERNET of the pcap format.
const LINKTYPE_ETHERNET: i32 = 1;
/// Size of the file's header, bytes.
pub const HEADER: usize = 24;
/// Number of bytes per read.
const CHUNK: usize = 1 << 18;

/// Why a capture could not be read.
#[derive(Debug, thiserror::Error)]
pub enum PcapError {
    /// A system call failed.
    #[error("cannot {what} capture {path}: {source}; check that the monitor was started and the file is readable")]
    Io {
        /// The operation that failed.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// The file does not begin like a pcap file.
    #[error(
        "not a pcap file (it begins with {start:02x?}); pcapng is not read, write classic pcap (filter-dump, tcpdump \
         -w)"
    )]
    NotPcap {
        /// The file's first bytes, at most four.
        start: Vec<u8>,
    },
    /// The file does not contain Ethernet frames.
    #[error(
        "the capture has link type {linktype}, only Ethernet (1) is read; capture on an Ethernet interface, not on \
         `any`"
    )]
    LinkType {
        /// The pcap link type.
        linktype: i32,
    },
    /// The length of a record is impossible.
    #[error(
        "the capture is damaged at byte {offset}: a packet of {captured} bytes (at most {MAX_CAPTURED} are possible); \
         measure again, with room on its file system"
    )]
    Damaged {
        /// Offset of the record in the file, bytes.
        offset: u64,
        /// The stated length, bytes.
        captured: u32,
    },
}

/// One captured packet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record<'a> {
    /// Time at which it passed the monitor, ns on the monitor's clock.
    pub at_ns: u64,
    /// Length on the wire, bytes. `data` is shorter if the monitor cuts packets.
    pub wire_len: u32,
    /// The captured bytes.
    pub data: &'a [u8],
}

/// Decodes a growing sequence of bytes into packets. Does no I/O.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    start: usize,
    offset: u64,
    header: Option<PcapHeader>,
}

impl Decoder {
    /// Appends bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// Number of bytes that do not form a whole packet yet.
    pub fn pending(&self) -> usize {
        self.buffer.len() - self.start
    }

    /// Resolution of the time stamps, ns: 1,000 or 1; `None` before the file's header has been read.
    pub fn resolution_ns(&self) -> Option<u64> {
        self.header.as_ref().map(|header| if header.is_nanosecond_precision() { 1 } else { 1_000 })
    }

    /// The next whole packet, or `None` until more bytes are appended.
    ///
    /// # Errors
    /// [`PcapError::NotPcap`], [`PcapError::LinkType`], [`PcapError::Damaged`]. After an error the same error is
    /// returned again: nothing after the damage can be trusted.
    pub fn next_record(&mut self) -> Result<Option<Record<'_>>, PcapError> {
        if self.header.is_none() && !self.read_header()? {
            return Ok(None);
        }
        let Some(header) = &self.header else { return Ok(None) };
        let rest = self.buffer.get(self.start..).unwrap_or_default();
        check_length(header, rest, self.offset)?;
        let parsed = if header.is_bigendian() {
            parse_pcap_frame_be(rest)
        } else if header.is_modified_format() {
            parse_pcap_frame_modified(rest)
        } else {
            parse_pcap_frame(rest)
        };
        let Ok((left, block)) = parsed else { return Ok(None) };
        let used = rest.len() - left.len();
        self.start += used;
        self.offset += used as u64;
        let unit = if header.is_nanosecond_precision() { 1 } else { 1_000 };
        let at_ns = u64::from(block.ts_sec) * 1_000_000_000 + u64::from(block.ts_usec) * unit;
        Ok(Some(Record { at_ns, wire_len: block.origlen, data: block.data }))
    }

    fn read_header(&mut self) -> Result<bool, PcapError> {
        let rest = self.buffer.get(self.start..).unwrap_or_default();
        match parse_pcap_header(rest) {
            Ok((left, header)) => {
                if header.network.0 != LINKTYPE_ETHERNET {
                    return Err(PcapError::LinkType { linktype: header.network.0 });
                }
                let used = rest.len() - left.len();
                self.start += used;
                self.offset += used as u64;
                self.header = Some(header);
                Ok(true)
            }
            Err(NomErr::Incomplete(_)) => Ok(false),
            Err(_) => Err(PcapError::NotPcap { start: rest.iter().take(4).copied().collect() }),
        }
    }
}

/// Refuses a record with an impossible length, before anything waits for that many bytes.
fn check_length(header: &PcapHeader, record: &[u8], offset: u64) -> Result<(), PcapError> {
    let Some(field) = record.get(8..12).and_then(|bytes| <[u8; 4]>::try_from(bytes).ok()) else { return Ok(()) };
    let captured = if header.is_bigendian() { u32::from_be_bytes(field) } else { u32::from_le_bytes(field) };
    if captured > MAX_CAPTURED { Err(PcapError::Damaged { offset, captured }) } else { Ok(()) }
}

/// A capture file. Each read continues where the last one ended.
#[derive(Debug)]
pub struct Tail {
    path: PathBuf,
    file: File,
    decoder: Decoder,
    chunk: Vec<u8>,
}

impl Tail {
    /// Opens a capture at its beginning.
    ///
    /// # Errors
    /// [`PcapError::Io`] if it cannot be opened.
    pub fn open(path: &Path) -> Result<Self, PcapError> {
        let file =
            File::open(path).map_err(|source| PcapError::Io { what: "open", path: path.to_path_buf(), source })?;
        Ok(Self { path: path.to_path_buf(), file, decoder: Decoder::default(), chunk: vec![0; CHUNK] })
    }

    /// Opens a capture at its present end. The writer must append whole records.
    ///
    /// # Errors
    /// As [`Self::open`]; or the file is not a capture, or its header is incomplete.
    pub fn open_at_end(path: &Path) -> Result<Self, PcapError> {
        let mut tail = Self::open(path)?;
        let failed = |source| PcapError::Io { what: "read", path: path.to_path_buf(), source };
        let mut header = [0; HEADER];
        tail.file.read_exact(&mut header).map_err(failed)?;
        tail.decoder.push(&header);
        tail.decoder.next_record()?;
        tail.decoder.offset = tail.file.seek(SeekFrom::End(0)).map_err(failed)?;
        Ok(tail)
    }

    /// Reads the data written since the last call and passes on every whole packet. Returns the number of packets.
    ///
    /// # Errors
    /// Those of [`Decoder::next_record`], and [`PcapError::Io`].
    pub(crate) fn read_new(&mut self, mut each: impl FnMut(Record<'_>)) -> Result<usize, PcapError> {
        let mut packets = 0;
        loop {
            let read = match self.file.read(&mut self.chunk) {
                Ok(read) => read,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                Err(source) => return Err(PcapError::Io { what: "read", path: self.path.clone(), source }),
            };
            if read == 0 {
                return Ok(packets);
            }
            self.decoder.push(self.chunk.get(..read).unwrap_or_default());
            while let Some(record) = self.decoder.next_record()? {
                each(record);
                packets += 1;
            }
        }
    }

    /// See [`Decoder::pending`].
    pub fn pending(&self) -> usize {
        self.decoder.pending()
    }

    /// See [`Decoder::resolution_ns`].
    pub fn resolution_ns(&self) -> Option<u64> {
        self.decoder.resolution_ns()
    }
}

/// A classic capture of these frames: time stamp in us, bytes.
#[cfg(test)]
pub(crate) fn crafted(frames: &[(u32, Vec<u8>)]) -> Vec<u8> {
    let mut file = vec![0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0];
    for (us, bytes) in frames {
        for word in [us / 1_000_000, us % 1_000_000, bytes.len() as u32, bytes.len() as u32] {
            file.extend(word.to_le_bytes());
        }
        file.extend(bytes);
    }
    file
}
