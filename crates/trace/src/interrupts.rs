//! Reports guests' interrupts when they become pending, for the thread that lets their vCPUs run earlier.
//!
//! KVM's tracepoint `kvm_apic_accept_irq` (`arch/x86/kvm/lapic.c`, `__apic_accept_irq`) has the vCPU's number; the
//! current thread identifies the VM: its vhost thread, its device process's thread, a VMM thread or a vCPU. Interrupts
//! that other threads inject are not reported (a kworker if irqfd cannot inject at once, an interrupt thread of a
//! passed-through device). [`Interrupts`] creates and filters the probe; the planner's thread uses it. [`Rings`] reads
//! the records: at any priority, without allocating, at most one page per call.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use ontime_hostnet::CpuSet;

use crate::event::EventKind;
use crate::format::{Decoder, Format, Probe};
use crate::page::Page;
use crate::tracefs::{Instance, TraceError, failed, page_size};

/// Size of a CPU's ring, KiB: a few hundred interrupts. A lost record only loses a hint.
const RING_KIB: u32 = 16;
/// The kernel's filters are limited to one page, bytes.
const FILTER_MAX: usize = 4_000;

/// A pending interrupt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interrupt {
    /// The thread that injected it.
    pub by: i32,
    /// The vCPU's number in its VM.
    pub vcpu: u32,
    /// Time, CLOCK_MONOTONIC, ns.
    pub at: u64,
}

/// The probe. Dropping it removes the instance; close its [`Rings`] before.
#[derive(Debug)]
pub struct Interrupts {
    instance: Instance,
    threads: Vec<i32>,
}

/// The probe's records, one ring per CPU.
#[derive(Debug)]
pub struct Rings {
    files: Vec<File>,
    page: Vec<u8>,
    decoder: Decoder,
}

impl Interrupts {
    /// Creates the probe on these CPUs, without any followed thread.
    ///
    /// # Errors
    /// If tracefs cannot be used or KVM is missing.
    pub fn start(root: &Path, cpus: &[u32]) -> Result<(Self, Rings), TraceError> {
        let instance = Instance::create(Instance::place(root, "daemon")?)?;
        instance.write("tracing_cpumask", &cpus.iter().copied().collect::<CpuSet>().to_mask())?;
        instance.write("buffer_size_kb", &RING_KIB.to_string())?;
        // Wake readers at the first record, not when half of the ring is full.
        instance.write("buffer_percent", "0")?;
        let path = instance.dir().join("events").join(Probe::Interrupt.path()).join("format");
        let format = match fs::read_to_string(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => Err(TraceError::NoProbe(Probe::Interrupt.path())),
            read => read.map_err(failed("reading", &path)),
        }?;
        let decoder = Decoder::new([Format::parse(Probe::Interrupt, &format)?]);
        let open = |cpu: &u32| {
            let path = instance.dir().join(format!("per_cpu/cpu{cpu}/trace_pipe_raw"));
            let nonblocking = rustix::fs::OFlags::NONBLOCK.bits() as i32;
            OpenOptions::new().read(true).custom_flags(nonblocking).open(&path).map_err(failed("opening", &path))
        };
        let files = cpus.iter().map(open).collect::<Result<_, _>>()?;
        let mut rings = Rings { files, page: vec![0; page_size(root)], decoder };
        // The kernel allocates what a reader needs at the first read.
        for ring in 0..rings.files.len() {
            let _ = rings.read(ring, |_| ());
        }
        Ok((Self { instance, threads: Vec::new() }, rings))
    }

    /// Reports only interrupts that these threads inject.
    ///
    /// # Errors
    /// Errors of the kernel. Too many threads for a filter ([`TraceError::Io`]): then no thread is followed.
    pub fn follow(&mut self, threads: &[i32]) -> Result<(), TraceError> {
        if threads == self.threads {
            return Ok(());
        }
        let event = format!("events/{}", Probe::Interrupt.path());
        let terms: Vec<String> = threads.iter().map(|thread| format!("common_pid=={thread}")).collect();
        let filter = terms.join("||");
        self.threads.clear();
        if filter.is_empty() || filter.len() > FILTER_MAX {
            self.instance.write(&format!("{event}/enable"), "0")?;
            let what = format!(
                "{} threads are more than a filter takes; use another method than interrupt-context, or fewer RT vCPUs",
                threads.len()
            );
            let full = || TraceError::Io {
                what: "filtering interrupts in",
                path: self.instance.dir().to_owned(),
                source: io::Error::other(what),
            };
            return if filter.is_empty() { Ok(()) } else { Err(full()) };
        }
        self.instance.write(&format!("{event}/filter"), &filter)?;
        self.instance.write(&format!("{event}/enable"), "1")?;
        self.threads = threads.to_vec();
        Ok(())
    }

    /// The directory for [`crate::tracefs::remove`], in case this value is never dropped.
    pub fn dir(&self) -> PathBuf {
        self.instance.dir().to_owned()
    }
}

impl Rings {
    /// Descriptors to wait for: readable if there are records. In the order of the CPUs.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.files.iter().map(AsFd::as_fd)
    }

    /// Reads at most one page of a ring. Returns whether there was any record.
    ///
    /// # Errors
    /// The error of read(2), except EAGAIN.
    pub fn read(&mut self, ring: usize, mut each: impl FnMut(Interrupt)) -> io::Result<bool> {
        let Self { files, page, decoder } = self;
        let Some(mut file) = files.get(ring) else { return Ok(false) };
        let length = match file.read(page) {
            Ok(0) => return Ok(false),
            Ok(length) => length,
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
            Err(error) => return Err(error),
        };
        for (time, record) in page.get(..length).and_then(Page::new).into_iter().flatten() {
            let event = decoder.decode(time, 0, record);
            if let Some((by, EventKind::Interrupt { vcpu })) = event.map(|event| (event.pid, event.what)) {
                each(Interrupt { by, vcpu, at: time });
            }
        }
        Ok(true)
    }
}
