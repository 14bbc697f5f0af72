//! The monitor of a real wire: the frames that pass an interface, with their time stamps, as a growing capture file.
//!
//! In: an interface in this thread's network namespace. Out: a pcap (stamps in ns), which a separate thread writes
//! until the value is dropped, and the number of missed frames. [`Monitor::description`] has the kind of time stamps
//! and the delays that they include.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::net::netdevice::name_to_index;
use rustix::net::{AddressFamily, SocketType, socket};

use super::HardwareError;
use super::capture::{LONGEST, Socket, StampConfig};
use super::site::Stamps;

/// Magic number of a classic pcap with stamps in ns, for Ethernet.
const MAGIC: u32 = 0xa1b2_3c4d;
/// How long the thread waits for a frame before it checks whether it must end, ms.
const LOOK_MS: i32 = 50;
/// More frames than the socket's buffer holds.
const QUEUED: usize = 1 << 18;
/// Real time that a busy machine may take to write its capture.
const PATIENCE: Duration = Duration::from_secs(30);

/// Parameters of a capture.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Watch<'a> {
    pub nic: &'a str,
    /// The interface's place, for messages.
    pub place: &'a str,
    /// Source of the time stamps.
    pub stamps: Stamps,
    /// Number of bytes kept of a frame.
    pub captured: usize,
    /// Keeps only one in 64 of the frames that are not TCP.
    pub thin: bool,
}

/// A growing capture.
#[derive(Debug)]
pub(crate) struct Monitor {
    file: PathBuf,
    shared: Arc<Shared>,
    writer: Option<JoinHandle<()>>,
    nic: String,
    stamps: Stamps,
    driver: String,
    device: bool,
}

#[derive(Debug, Default)]
struct Shared {
    stop: AtomicBool,
    /// Number of requests for a complete file, and the number of the last one served.
    asked: AtomicU64,
    written: AtomicU64,
    /// Frames for which there was no room, or which had no stamp.
    missed: AtomicU64,
    /// The capture ended early.
    failed: AtomicBool,
}

impl Monitor {
    /// Starts capturing into `file`.
    pub(crate) fn start(watch: Watch<'_>, file: &Path) -> Result<Self, HardwareError> {
        let Watch { nic, place, stamps, captured, thin } = watch;
        let failed = |what| {
            let nic = nic.to_owned();
            move |source: io::Error| match source.raw_os_error() {
                Some(libc::EPERM | libc::EACCES) => HardwareError::Permission { nic },
                _ => HardwareError::Capture { nic, what, source },
            }
        };
        let index = index(nic, place)?;
        let socket = Socket::open(index, stamps).map_err(failed("opening a packet socket"))?;
        let before = match stamps {
            Stamps::Kernel => None,
            Stamps::Nic => {
                Some(socket.stamp_all(nic).map_err(|source| HardwareError::NoStamps { nic: nic.to_owned(), source })?)
            }
        };
        if thin {
            socket.thin().map_err(failed("filtering"))?;
        }
        // An interface that reports no driver has no device either.
        let (driver, bus) = socket.driver(nic).unwrap_or_else(|_| ("no driver".to_owned(), String::new()));
        socket.bind(index).map_err(failed("binding the packet socket"))?;
        let create = || -> io::Result<BufWriter<File>> {
            let mut writer = BufWriter::with_capacity(1 << 20, File::create(file)?);
            for word in [MAGIC, 0x0004_0002, 0, 0, LONGEST as u32, 1] {
                writer.write_all(&word.to_le_bytes())?;
            }
            writer.flush()?;
            Ok(writer)
        };
        let out = create().map_err(|source| HardwareError::Capture {
            nic: nic.to_owned(),
            what: "writing the capture",
            source,
        })?;
        let shared = Arc::<Shared>::default();
        let capture = Capture {
            socket,
            out,
            captured: captured.min(LONGEST),
            shared: Arc::clone(&shared),
            nic: nic.to_owned(),
            before,
        };
        let writer = std::thread::Builder::new().name("monitor".to_owned()).spawn(move || capture.run());
        let writer = writer.map_err(failed("starting its thread"))?;
        let (nic, device) = (nic.to_owned(), !bus.is_empty());
        Ok(Self { file: file.to_owned(), shared, writer: Some(writer), nic, stamps, driver, device })
    }

    /// The path of the capture.
    pub(crate) fn file(&self) -> &Path {
        &self.file
    }

    /// Whether the interface has a hardware device.
    pub(crate) fn is_device(&self) -> bool {
        self.device
    }

    /// Frames that passed but are missing in the capture, so far.
    pub(crate) fn missed(&self) -> u64 {
        self.shared.missed.load(Ordering::Relaxed)
    }

    /// Waits until the capture contains all frames that have passed. The capturing thread has no priority over others.
    pub(crate) fn settle(&self) -> Result<(), HardwareError> {
        let asked = self.shared.asked.fetch_add(1, Ordering::AcqRel) + 1;
        let end = Instant::now() + PATIENCE;
        while self.shared.written.load(Ordering::Acquire) < asked {
            self.alive()?;
            if Instant::now() >= end {
                return Err(HardwareError::Behind { nic: self.nic.clone(), seconds: PATIENCE.as_secs() });
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    /// Checks that the capture still runs.
    pub(crate) fn alive(&self) -> Result<(), HardwareError> {
        if self.shared.failed.load(Ordering::Relaxed) {
            return Err(HardwareError::Down { nic: self.nic.clone() });
        }
        Ok(())
    }

    /// Source of the time stamps, and the delays that the times between them include.
    pub(crate) fn description(&self) -> String {
        let Self { nic, driver, .. } = self;
        let what = match (self.stamps, self.device) {
            (Stamps::Kernel, true) => {
                "the client's kernel, where a request is handed to the driver and where the driver hands on the reply: \
                 the client's own interrupt and NAPI are in every time"
            }
            (Stamps::Kernel, false) => {
                "the client's kernel; there is no device behind this interface, so no wire, no interrupt and no DMA \
                 are in the times"
            }
            (Stamps::Nic, _) => "the NIC, of both ways as it received them",
        };
        format!("time stamps at {nic} ({driver}) by {what}")
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::Relaxed);
        if let Some(writer) = self.writer.take() {
            let _ = writer.join();
        }
    }
}

/// The interface's index.
fn index(nic: &str, place: &str) -> Result<u32, HardwareError> {
    let none = || HardwareError::NoNic { nic: nic.to_owned(), place: place.to_owned() };
    let any = socket(AddressFamily::INET, SocketType::DGRAM, None).map_err(|_| none())?;
    name_to_index(&any, nic).map_err(|_| none())
}

/// The state of the capturing thread.
struct Capture {
    socket: Socket,
    out: BufWriter<File>,
    captured: usize,
    shared: Arc<Shared>,
    nic: String,
    before: Option<StampConfig>,
}

impl Capture {
    fn run(mut self) {
        let ended = self.copy();
        self.shared.failed.store(ended.is_err(), Ordering::Relaxed);
        if let Some(mut before) = self.before {
            // The NIC may have gone. There is nobody to report an error to.
            let _ = self.socket.set_stamps(&self.nic, &mut before);
        }
    }

    fn copy(&mut self) -> io::Result<()> {
        let mut buffer = vec![0; self.captured];
        let mut record = Vec::new();
        while !self.shared.stop.load(Ordering::Relaxed) {
            let asked = self.shared.asked.load(Ordering::Acquire);
            for _ in 0..QUEUED {
                let Some(frame) = self.socket.receive(&mut buffer)? else { break };
                let Some(at_ns) = frame.at_ns else {
                    self.shared.missed.fetch_add(1, Ordering::Relaxed);
                    continue;
                };
                let words = [at_ns / 1_000_000_000, at_ns % 1_000_000_000, frame.kept as u64, frame.length as u64];
                record.clear();
                record.extend(words.iter().flat_map(|word| (*word as u32).to_le_bytes()));
                record.extend_from_slice(buffer.get(..frame.kept).unwrap_or_default());
                // A reader of the growing file must see whole frames, so the buffer is flushed only between two frames.
                self.out.write_all(&record)?;
            }
            self.out.flush()?;
            self.shared.missed.fetch_add(self.socket.dropped()?, Ordering::Relaxed);
            self.shared.written.store(asked, Ordering::Release);
            self.socket.wait(LOOK_MS)?;
        }
        Ok(())
    }
}
