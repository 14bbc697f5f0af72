//! Tests with a tiny guest whether `/dev/kvm` can run guests.
//!
//! In: `/dev/kvm`. Out: a [`KvmProbe`]. A real-mode guest proves nothing: on a host with paravirtual nested KVM it runs
//! to its end, although every ordinary kernel hangs or fails at its first exception. This guest therefore runs in long
//! mode with paging, takes an exception through its own IDT, returns, writes a control register and an MSR, and counts.
//! At each step it writes to a port. The VM has one vCPU and 64 KiB and is destroyed afterwards; the host is not
//! changed.

use std::path::Path;
use std::sync::mpsc;
use std::time::Duration;

use kvm_bindings::{KVM_MAX_CPUID_ENTRIES, kvm_segment, kvm_userspace_memory_region};
use kvm_ioctls::{Kvm, VcpuExit, VcpuFd, VmFd};
use ontime_tenants::remedy::{of_limits, remedy};
use serde::Serialize;
use vmm_sys_util::signal::{Killable, SIGRTMIN, register_signal_handler};

/// Limit of the guest's run time. On hardware it takes much less than 1 ms, under emulation some ms.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(2);

/// The result of the probe.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "state", content = "why")]
pub enum KvmProbe {
    /// The guest ran to its end.
    Works,
    /// There is no `/dev/kvm`, or it has no driver.
    Absent(String),
    /// The guest stopped before its end. Ordinary guests will stop too.
    Broken(String),
    /// The guest did not end in time.
    Hangs(String),
    /// There is no probe guest for this processor architecture, or this user may not open `/dev/kvm`.
    Unknown(String),
}

/// The values that the guest writes to [`PORT`], step by step.
const STEPS: [(u8, &str); 6] = [
    (1, "start in long mode"),
    (2, "write CR3"),
    (3, "take an exception"),
    (4, "return from the exception"),
    (5, "write EFER"),
    (6, "count to 100,000"),
];
const PORT: u16 = 0x10;

const PML4: usize = 0x1000;
const PDPT: usize = 0x2000;
const PD: usize = 0x3000;
const GDT: usize = 0x4000;
const IDT: usize = 0x5000;
const CODE: usize = 0x6000;
const HANDLER: usize = 0x7000;
const STACK: usize = 0x9000;
const MEMORY: usize = 0x10000;

#[rustfmt::skip]
const CODE_BYTES: &[u8] = &[
    0xb0, 1, 0xe6, 0x10,                        // mov al, 1; out 0x10, al
    0x0f, 0x20, 0xd8, 0x0f, 0x22, 0xd8,         // mov rax, cr3; mov cr3, rax
    0xb0, 2, 0xe6, 0x10,
    0xcc,                                       // int3
    0xb0, 4, 0xe6, 0x10,
    0xb9, 0x80, 0x00, 0x00, 0xc0,               // mov ecx, 0xc0000080 (EFER)
    0x0f, 0x32, 0x0f, 0x30,                     // rdmsr; wrmsr
    0xb0, 5, 0xe6, 0x10,
    0xb9, 0xa0, 0x86, 0x01, 0x00,               // mov ecx, 100000
    0xff, 0xc9, 0x75, 0xfc,                     // dec ecx; jnz -4
    0xb0, 6, 0xe6, 0x10,
    0xf4,                                       // hlt
];
const HANDLER_BYTES: &[u8] = &[0xb0, 3, 0xe6, 0x10, 0x48, 0xcf]; // out 3; iretq

/// Runs the guest for at most [`TIMEOUT`]. Installs a handler without effect for this process's `SIGRTMIN`.
pub fn probe(device: &Path) -> KvmProbe {
    if !cfg!(target_arch = "x86_64") {
        return KvmProbe::Unknown("there is no probe guest for this architecture".to_owned());
    }
    if !device.exists() {
        return KvmProbe::Absent(format!("{} does not exist", device.display()));
    }
    extern "C" fn ignore(_: libc::c_int, _: *mut libc::siginfo_t, _: *mut libc::c_void) {}
    if let Err(error) = register_signal_handler(SIGRTMIN(), ignore) {
        return KvmProbe::Unknown(format!("cannot set a signal handler: {error}"));
    }
    let (sender, receiver) = mpsc::channel();
    let path = device.to_owned();
    let runner = std::thread::Builder::new().name("kvm-probe".to_owned()).spawn(move || {
        // The receiver is gone if it timed out.
        let _ = sender.send(run(&path));
    });
    let runner = match runner {
        Ok(runner) => runner,
        Err(error) => return KvmProbe::Unknown(format!("cannot start a thread: {error}")),
    };
    match receiver.recv_timeout(TIMEOUT) {
        Ok(result) => result,
        Err(_) => {
            // The signal ends KVM_RUN with EINTR. A guest that does not stop even then ends with the process.
            let _ = runner.kill(0);
            match receiver.recv_timeout(TIMEOUT) {
                Ok(KvmProbe::Hangs(at)) => KvmProbe::Hangs(at),
                _ => KvmProbe::Hangs("KVM_RUN does not come back".to_owned()),
            }
        }
    }
}

fn run(device: &Path) -> KvmProbe {
    let Ok(path) = std::ffi::CString::new(device.as_os_str().as_encoded_bytes()) else {
        return KvmProbe::Absent(format!("{} is no name of a file", device.display()));
    };
    let kvm = match Kvm::new_with_path(path) {
        Ok(kvm) => kvm,
        Err(error) => return unopened(device, &std::io::Error::from_raw_os_error(error.errno())),
    };
    let guest = match ProbeGuest::new(&kvm) {
        Ok(guest) => guest,
        Err(error) => return unmade(&std::io::Error::from_raw_os_error(error.errno())),
    };
    guest.run()
}

fn unopened(device: &Path, error: &std::io::Error) -> KvmProbe {
    let why = format!("{}: {error}", device.display());
    let remedy = match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => return KvmProbe::Absent(why),
        // Root is not told to become root: the devices of its cgroup are limited.
        Some(libc::EPERM | libc::EACCES) => match rustix::process::geteuid().is_root() {
            true => "let root open it: outside a container, by DeviceAllow= in a unit",
            false => "run as root",
        },
        _ => remedy(error),
    };
    KvmProbe::Unknown(format!("{why}: not tried; {remedy}"))
}

fn unmade(error: &std::io::Error) -> KvmProbe {
    let why = format!("no VM can be made: {error}");
    match of_limits(error) {
        Some((_, remedy)) => KvmProbe::Unknown(format!("{why}: not tried; {remedy}")),
        None => KvmProbe::Broken(why),
    }
}

struct ProbeGuest {
    // Dropped in this order: the memory must outlive the VM that maps it.
    vcpu: VcpuFd,
    _vm: VmFd,
    _memory: Box<Memory>,
}

#[repr(align(4096))]
struct Memory([u8; MEMORY]);

impl Memory {
    fn put(&mut self, at: usize, bytes: &[u8]) {
        if let Some(place) = self.0.get_mut(at..at + bytes.len()) {
            place.copy_from_slice(bytes);
        }
    }

    fn put_u64(&mut self, at: usize, value: u64) {
        self.put(at, &value.to_le_bytes());
    }

    /// Tables for long mode: the first 2 MiB mapped one to one, code and data segments, a handler for #BP.
    fn image() -> Box<Self> {
        let mut memory = Box::new(Self([0; MEMORY]));
        memory.put_u64(PML4, PDPT as u64 | 3);
        memory.put_u64(PDPT, PD as u64 | 3);
        memory.put_u64(PD, 0x83);
        memory.put_u64(GDT + 8, 0x00af_9b00_0000_ffff);
        memory.put_u64(GDT + 16, 0x00cf_9300_0000_ffff);
        // Interrupt gate 3: selector 8, present, type 14; the handler lies below 64 KiB.
        memory.put_u64(IDT + 3 * 16, HANDLER as u64 | 8 << 16 | 0x8e << 40);
        memory.put(CODE, CODE_BYTES);
        memory.put(HANDLER, HANDLER_BYTES);
        memory
    }
}

impl ProbeGuest {
    fn new(kvm: &Kvm) -> Result<Self, kvm_ioctls::Error> {
        let vm = kvm.create_vm()?;
        let mut memory = Memory::image();
        let region = kvm_userspace_memory_region {
            slot: 0,
            flags: 0,
            guest_phys_addr: 0,
            memory_size: MEMORY as u64,
            userspace_addr: memory.0.as_mut_ptr() as u64,
        };
        // SAFETY: the region is the whole of `memory`, page-aligned; `ProbeGuest` frees it only after it closed the VM.
        unsafe { vm.set_user_memory_region(region) }?;
        let vcpu = vm.create_vcpu(0)?;
        vcpu.set_cpuid2(&kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES)?)?;
        let mut special = vcpu.get_sregs()?;
        let code =
            kvm_segment { limit: u32::MAX, selector: 8, type_: 11, present: 1, s: 1, l: 1, g: 1, ..Default::default() };
        let data = kvm_segment {
            limit: u32::MAX,
            selector: 16,
            type_: 3,
            present: 1,
            db: 1,
            s: 1,
            g: 1,
            ..Default::default()
        };
        special.cs = code;
        (special.ds, special.es, special.ss, special.fs, special.gs) = (data, data, data, data, data);
        (special.gdt.base, special.gdt.limit) = (GDT as u64, 23);
        (special.idt.base, special.idt.limit) = (IDT as u64, 0xfff);
        // Paging, write protection, protected mode; physical address extension; long mode enabled and active.
        (special.cr0, special.cr3, special.cr4, special.efer) = (0x8005_0033, PML4 as u64, 0x20, 0x500);
        vcpu.set_sregs(&special)?;
        let mut registers = vcpu.get_regs()?;
        (registers.rip, registers.rsp, registers.rflags) = (CODE as u64, STACK as u64, 2);
        vcpu.set_regs(&registers)?;
        Ok(Self { vcpu, _vm: vm, _memory: memory })
    }

    fn run(mut self) -> KvmProbe {
        let mut steps = STEPS.iter();
        let mut next = steps.next();
        loop {
            let doing = next.map_or("halt", |(_, name)| *name);
            let failed = |how: &str| KvmProbe::Broken(format!("the probe guest could not {doing}: {how}"));
            match self.vcpu.run() {
                Ok(VcpuExit::IoOut(PORT, [value])) => match next {
                    Some((expected, _)) if expected == value => next = steps.next(),
                    _ => return failed(&format!("it wrote {value}")),
                },
                Ok(VcpuExit::Hlt) if next.is_none() => return KvmProbe::Works,
                Ok(other) => return failed(&format!("KVM gave {other:?}")),
                Err(error) if error.errno() == libc::EINTR => {
                    return KvmProbe::Hangs(format!("the probe guest hung where it should {doing}"));
                }
                Err(error) => return failed(&error.to_string()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_without_kvm_says_so() {
        assert!(matches!(probe(Path::new("/nonexistent/kvm")), KvmProbe::Absent(_)));
        // A device that is not KVM.
        assert!(matches!(probe(Path::new("/dev/null")), KvmProbe::Absent(_) | KvmProbe::Broken(_)));
    }

    #[test]
    fn a_user_without_rights_does_not_learn_that_there_is_no_kvm() {
        let found = |code| unopened(Path::new("/dev/kvm"), &std::io::Error::from_raw_os_error(code));
        let is_root = rustix::process::geteuid().is_root();
        for code in [libc::EACCES, libc::EPERM] {
            let KvmProbe::Unknown(why) = found(code) else { panic!("{:?}", found(code)) };
            assert!(why.starts_with("/dev/kvm: "), "{why}");
            assert_eq!((why.ends_with("run as root"), why.contains("let root open it")), (!is_root, is_root), "{why}");
        }
        assert!(matches!(found(libc::ENODEV), KvmProbe::Absent(_)));
    }

    #[test]
    fn a_lack_of_descriptors_is_no_lack_of_kvm() {
        let error = |code| std::io::Error::from_raw_os_error(code);
        let full = error(libc::EMFILE);
        for found in [unopened(Path::new("/dev/kvm"), &full), unmade(&full)] {
            assert!(matches!(&found, KvmProbe::Unknown(why) if why.contains("LimitNOFILE=")), "{found:?}");
        }
        assert!(matches!(unmade(&error(libc::ENOTTY)), KvmProbe::Broken(_)));
    }

    #[test]
    fn the_probe_of_this_host_ends_in_time() {
        let start = std::time::Instant::now();
        let found = probe(Path::new("/dev/kvm"));
        println!("{found:?} after {:?}", start.elapsed());
        assert!(start.elapsed() < 2 * TIMEOUT + Duration::from_secs(60), "the probe has no end of its own");
    }
}
