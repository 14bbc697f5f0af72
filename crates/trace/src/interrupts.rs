//! Interrupts of guests, told as they become pending: for the thread that puts their vCPUs ahead.
//!
//! KVM's own tracepoint `kvm_apic_accept_irq` (`arch/x86/kvm/lapic.c`, `__apic_accept_irq`) says which vCPU of a VM,
//! and the current thread whose VM that is: the VM's vhost thread, its device process's, VMM thread, or vCPU itself.
//! Whatever another thread injects (a kworker where irqfd cannot do it at once, an interrupt thread of a passed-through
//! device) is not told. One half of this makes and filters the probe and is the planner's ([`Interrupts`]); the other
//! reads ([`Rings`]): at any priority, without allocating, and never for longer than a page takes.

use std::fs::{self, File, OpenOptions};
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use ontime_hostnet::CpuSet;

use crate::event::What;
use crate::format::{Decoder, Format, Probe};
use crate::page::Page;
use crate::tracefs::{Instance, TraceError, failed, page_size};

/// A CPU's ring, KiB: some hundred interrupts. What is lost is a hint lost.
const RING_KIB: u32 = 16;
/// The longest filter that the kernel takes is a page.
const FILTER_MAX: usize = 4_000;

/// An interrupt became pending.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Interrupt {
    /// By this thread.
    pub by: i32,
    /// For this vCPU of its VM.
    pub vcpu: u32,
    /// When, ns of CLOCK_MONOTONIC.
    pub at: u64,
}

/// The probe; gone when dropped, for which its [`Rings`] must be closed before.
#[derive(Debug)]
pub struct Interrupts {
    instance: Instance,
    threads: Vec<i32>,
}

/// What the probe says, a ring a CPU.
#[derive(Debug)]
pub struct Rings {
    files: Vec<File>,
    page: Vec<u8>,
    decoder: Decoder,
}

impl Interrupts {
    /// The probe on these CPUs, for no thread yet.
    ///
    /// # Errors
    /// tracefs is not to be had, or KVM is not there.
    pub fn start(root: &Path, cpus: &[u32]) -> Result<(Self, Rings), TraceError> {
        let instance = Instance::create(Instance::place(root, "daemon")?)?;
        instance.write("tracing_cpumask", &cpus.iter().copied().collect::<CpuSet>().to_mask())?;
        instance.write("buffer_size_kb", &RING_KIB.to_string())?;
        // Readers are woken by the first record, not when a half of the ring is full.
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
        // The kernel makes what a reader needs at the first reading.
        for ring in 0..rings.files.len() {
            let _ = rings.read(ring, |_| ());
        }
        Ok((Self { instance, threads: Vec::new() }, rings))
    }

    /// Tells of interrupts that these threads make pending, and of no others.
    ///
    /// # Errors
    /// Those of the kernel; too many threads for a filter ([`TraceError::Io`]): then of none.
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

    /// What [`crate::tracefs::remove`] takes away, should nobody be left who drops this.
    pub fn dir(&self) -> PathBuf {
        self.instance.dir().to_owned()
    }
}

impl Rings {
    /// To be waited for: readable where there is something to read. In the order of the CPUs.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.files.iter().map(AsFd::as_fd)
    }

    /// Reads what a ring has, a page at most; whether there was anything.
    ///
    /// # Errors
    /// The kernel's, but for EAGAIN.
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
            if let Some((by, What::Interrupt { vcpu })) = event.map(|event| (event.pid, event.what)) {
                each(Interrupt { by, vcpu, at: time });
            }
        }
        Ok(true)
    }
}
