//! Maps an address to its function, its program, and its part in a request's path.
//!
//! In: `/proc/kallsyms` and `/proc/PID/maps` of the host and of the guest, as text, and the program file of `ontime`.
//! Out: a [`Function`] for an instruction's address and level, as a small number ([`Names::of`]).

use std::collections::HashMap;

use super::line::Level;

/// Limit of cached addresses. When it is reached, the cache is emptied.
const REMEMBERED: usize = 1 << 20;
/// The kernel's functions that halt an idle CPU (Linux 6.12 and 7.2): each executes `hlt`, or calls the next.
const HALTS: [&str; 3] = ["acpi_safe_halt", "default_idle", "pv_native_safe_halt"];

/// The meaning of a function for the path.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Mark {
    /// No meaning.
    None,
    /// The CPU is about to halt: the first instruction of a function that halts it.
    Halt,
    /// An interrupt begins.
    Interrupt,
    /// An interrupt wakes the thread of its handler.
    WakesHandler,
    /// The NIC's driver begins to handle arrivals.
    Receive,
    /// The NIC's driver sends.
    Transmit,
    /// Another thread begins to run.
    Switch,
    /// The running thread is of this kind.
    Thread(Thread),
}

/// Kinds of threads.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Thread {
    /// An interrupt on top of the idle process, until the first switch.
    Interrupt,
    /// An interrupt's thread.
    Irq,
    /// A NAPI's thread.
    Napi,
    /// A kernel thread that runs softirqs or timers.
    Softirq,
    /// A vhost thread.
    Vhost,
    Vcpu,
    /// A thread of a program, by the program's name.
    Process(String),
    /// The idle process: in the middle of the request the CPU had no other thread to run.
    Idle,
    /// A thread that ran no known function.
    Other,
}

impl Thread {
    /// The name in tables.
    pub(crate) fn description(&self) -> &str {
        match self {
            Thread::Interrupt => "interrupt",
            Thread::Irq => "interrupt's thread",
            Thread::Napi => "NAPI's thread",
            Thread::Softirq => "softirq's thread",
            Thread::Vhost => "vhost",
            Thread::Vcpu => "vCPU",
            Thread::Process(name) => name,
            Thread::Idle => "idle",
            Thread::Other => "another",
        }
    }
}

/// The kind of a thread, from the main functions of kernel threads (Linux 6.12 and 7.2), to which each returns after a
/// wait, and from functions that only vCPU threads run when switched to.
fn thread(function: &str) -> Option<Thread> {
    Some(match function {
        "irq_thread" | "irq_thread_fn" | "irq_forced_thread_fn" => Thread::Irq,
        "napi_threaded_poll" | "napi_threaded_poll_loop" => Thread::Napi,
        "run_ksoftirqd" | "smpboot_thread_fn" | "run_ktimerd" => Thread::Softirq,
        "vhost_task_fn" | "vhost_run_work_list" => Thread::Vhost,
        "do_idle" => Thread::Idle,
        "kvm_sched_in"
        | "kvm_arch_vcpu_ioctl_run"
        | "kvm_vcpu_ioctl"
        | "kvm_vcpu_block"
        | "kvm_vcpu_halt"
        | "svm_vcpu_run" => Thread::Vcpu,
        _ => return None,
    })
}

/// A function and its origin. The same library function is a different [`Function`] in each program.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Function {
    /// Kernel or program, host or guest.
    pub level: Level,
    /// The name, with its module or program. For a program without symbols, the program's file.
    pub name: String,
    /// The meaning for the path.
    pub mark: Mark,
}

/// Functions of a kernel, by address.
#[derive(Debug, Default)]
pub(crate) struct Symbols(Vec<(u64, String)>);

impl Symbols {
    /// Reads `/proc/kallsyms`. Lines that are not text symbols are skipped.
    pub(crate) fn kallsyms<'a>(lines: impl Iterator<Item = &'a str>) -> Self {
        let symbol = |line: &str| {
            let mut words = line.split_whitespace();
            let address = u64::from_str_radix(words.next()?, 16).ok().filter(|address| *address != 0)?;
            let (kind, name) = (words.next()?, words.next()?);
            // Padding before a function is not a function.
            let is_text = matches!(kind, "t" | "T" | "w" | "W") && !name.starts_with("__pfx_");
            is_text
                .then(|| (address, words.next().map_or_else(|| name.to_owned(), |module| format!("{name} {module}"))))
        };
        Self::new(lines.filter_map(symbol).collect())
    }

    /// Builds the table from symbols in any order. If an address has several names, a name that is not the linker's
    /// (`__irqentry_text_start`) is used.
    pub(crate) fn new(mut symbols: Vec<(u64, String)>) -> Self {
        symbols.sort_by_key(|(address, name)| (*address, !name.starts_with("__")));
        Self(symbols)
    }

    /// Whether the table is empty.
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The last function that begins at or before `address`: where it begins, and its name.
    pub(crate) fn at(&self, address: u64) -> Option<(u64, &str)> {
        let behind = self.0.partition_point(|(start, _)| *start <= address);
        self.0.get(behind.checked_sub(1)?).map(|(start, name)| (*start, name.as_str()))
    }
}

/// An executable mapping of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Mapping {
    start: u64,
    end: u64,
    offset: u64,
    /// File name without directories.
    file: String,
    process: String,
}

/// Executable mappings of processes.
#[derive(Debug, Default)]
pub(crate) struct Maps(Vec<Mapping>);

impl Maps {
    /// Reads, for each process, a line `process PID NAME` and its lines of `/proc/PID/maps`; other lines are skipped.
    pub(crate) fn parse<'a>(lines: impl Iterator<Item = &'a str>) -> Self {
        let (mut found, mut process) = (Vec::new(), String::new());
        for line in lines {
            if let Some(rest) = line.strip_prefix("process ") {
                process = rest.split_once(' ').map_or("", |(_, name)| name.trim()).to_owned();
            } else {
                found.extend(Self::mapping(line, &process));
            }
        }
        Self(found)
    }

    fn mapping(line: &str, process: &str) -> Option<Mapping> {
        let mut words = line.split_whitespace();
        let (start, end) = words.next()?.split_once('-')?;
        let (rights, offset) = (words.next()?, words.next()?);
        let hexadecimal = |text| u64::from_str_radix(text, 16).ok();
        let file = words.nth(2).unwrap_or("memory without a file");
        let file = file.rsplit('/').next().unwrap_or(file).to_owned();
        let (start, end, offset) = (hexadecimal(start)?, hexadecimal(end)?, hexadecimal(offset)?);
        rights.contains('x').then(|| Mapping { start, end, offset, file, process: process.to_owned() })
    }

    fn at(&self, address: u64) -> Option<&Mapping> {
        self.0.iter().find(|of| (of.start..of.end).contains(&address))
    }

    /// Names of the processes.
    #[cfg(test)]
    fn processes(&self) -> Vec<&str> {
        self.0.iter().map(|of| of.process.as_str()).collect()
    }
}

/// All tables for the addresses of one host and its guest.
#[derive(Debug, Default)]
pub(crate) struct Sources {
    /// The host's kernel.
    pub host_kernel: Symbols,
    /// The host's processes.
    pub host_maps: Maps,
    /// The guest's kernel; empty if the guest did not send its symbols.
    pub guest_kernel: Symbols,
    /// The guest's processes.
    pub guest_maps: Maps,
    /// Functions of the program `ontime`, by offset in its file.
    pub ontime: Symbols,
}

/// Functions, numbered.
#[derive(Debug, Default)]
pub(crate) struct Names {
    sources: Sources,
    functions: Vec<Function>,
    numbers: HashMap<Function, u32>,
    seen: HashMap<(u64, Level), u32>,
}

impl Names {
    /// Builds the table from these sources.
    pub(crate) fn new(sources: Sources) -> Self {
        Self { sources, ..Self::default() }
    }

    /// The number of the function that has this address.
    pub(crate) fn of(&mut self, address: u64, level: Level) -> u32 {
        if let Some(number) = self.seen.get(&(address, level)) {
            return *number;
        }
        let function = self.function(address, level);
        let number = self.add(function);
        if self.seen.len() >= REMEMBERED {
            self.seen.clear();
        }
        self.seen.insert((address, level), number);
        number
    }

    /// The number of this function.
    pub(super) fn add(&mut self, function: Function) -> u32 {
        let next = self.functions.len() as u32;
        *self.numbers.entry(function).or_insert_with_key(|function| {
            self.functions.push(function.clone());
            next
        })
    }

    /// The function of a number that [`Names::of`] gave.
    pub(crate) fn get(&self, number: u32) -> Option<&Function> {
        self.functions.get(number as usize)
    }

    fn function(&self, address: u64, level: Level) -> Function {
        let Sources { host_kernel, host_maps, guest_kernel, guest_maps, ontime } = &self.sources;
        let (name, mark) = match level {
            Level::HostKernel => {
                let (start, name) = host_kernel.at(address).unwrap_or((0, "unknown"));
                (name.to_owned(), mark(name, address == start))
            }
            Level::GuestKernel => {
                let name = guest_kernel.at(address).map_or("guest kernel", |(_, name)| name);
                (name.to_owned(), Mark::Thread(Thread::Vcpu))
            }
            Level::GuestUser => {
                let file = guest_maps.at(address).map_or("guest user", |of| of.file.as_str());
                (file.to_owned(), Mark::Thread(Thread::Vcpu))
            }
            Level::HostUser => match host_maps.at(address) {
                Some(of) => {
                    let symbol = if of.file == "ontime" { ontime.at(address - of.start + of.offset) } else { None };
                    let name = symbol.map_or_else(|| of.file.clone(), |(_, symbol)| format!("{symbol} [{}]", of.file));
                    (name, Mark::Thread(Thread::Process(of.process.clone())))
                }
                None => ("unknown program".to_owned(), Mark::None),
            },
        };
        Function { level, name, mark }
    }
}

/// The meaning of an instruction of the host's kernel in this function; `is_first`: the function's first instruction.
/// Parts that the compiler split off (`.isra.0`) count as the whole function.
fn mark(name: &str, is_first: bool) -> Mark {
    let plain = name.split([' ', '.']).next().unwrap_or(name);
    match plain {
        _ if is_first && HALTS.contains(&plain) => Mark::Halt,
        "e1000_intr_msix_rx" if is_first => Mark::Receive,
        "e1000_xmit_frame" => Mark::Transmit,
        "__switch_to_asm" => Mark::Switch,
        // Interrupts of devices begin here, and others with the first instruction of their function, which also ends
        // them.
        "irq_entries_start" => Mark::Interrupt,
        _ if is_first && plain.starts_with("asm_sysvec_") => Mark::Interrupt,
        // Of interrupts whose handlers run in threads (kernel/irq/manage.c).
        "irq_default_primary_handler" => Mark::WakesHandler,
        _ => thread(plain).map_or(Mark::None, Mark::Thread),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KALLSYMS: &str = "ffffffff81000000 T startup_64\n0000000000000000 A fixed\nffffffff81000000 T \
        __text\nffffffff8129f6e0 T __switch_to_asm\nffffffff8129f6d0 t __pfx_x\nffffffff8129f700 D \
        data\nffffffff81300000 t pv_native_safe_halt\nffffffffc04b9f20 t \
        e1000_intr_msix_rx.isra.0\t[e1000e]\nodd\nzz T x\n";
    const MAPS: &str = "process 12 ontime device\n55d000001000-55d000003000 r-xp 00001000 fe:00 12 \
        /usr/local/bin/ontime\n7f0000000000-7f0000001000 r-xp 00000000 fe:00 9 \
        /usr/lib/libc.so.6\n7f0000001000-7f0000002000 rw-p 00000000 00:00 0\nprocess 3 sockperf\n00401000-00402000 \
        r-xp 00001000 fe:00 1 /usr/bin/sockperf\nodd\n";

    fn names() -> Names {
        Names::new(Sources {
            host_kernel: Symbols::kallsyms(KALLSYMS.lines()),
            host_maps: Maps::parse(MAPS.lines()),
            ontime: Symbols::new(vec![(0x1800, "serve".into()), (0x1000, "main".into())]),
            ..Sources::default()
        })
    }

    #[test]
    fn addresses_have_names_and_parts() {
        let mut names = names();
        let mut of = |address, level| {
            let number = names.of(address, level);
            assert_eq!(names.of(address, level), number);
            let function = names.get(number).unwrap();
            (function.name.clone(), function.mark.clone())
        };
        assert_eq!(of(0xffff_ffff_8129_f6e4, Level::HostKernel), ("__switch_to_asm".into(), Mark::Switch));
        assert_eq!(
            of(0xffff_ffff_c04b_9f20, Level::HostKernel),
            ("e1000_intr_msix_rx.isra.0 [e1000e]".into(), Mark::Receive)
        );
        assert_eq!(of(0xffff_ffff_8100_0001, Level::HostKernel).0, "startup_64");
        assert_eq!(of(0x1000, Level::HostKernel).0, "unknown");
        let device = Mark::Thread(Thread::Process("ontime device".into()));
        assert_eq!(of(0x55d0_0000_1900, Level::HostUser), ("serve [ontime]".into(), device.clone()));
        assert_eq!(of(0x7f00_0000_0010, Level::HostUser), ("libc.so.6".into(), device));
        assert_eq!(of(0xffff_ffff_8130_0000, Level::HostKernel), ("pv_native_safe_halt".into(), Mark::Halt));
        assert_eq!(of(0xffff_ffff_8130_0002, Level::HostKernel), ("pv_native_safe_halt".into(), Mark::None));
        assert_eq!(of(0x9999, Level::HostUser), ("unknown program".into(), Mark::None));
        // The same address in a guest is another function. This guest has sent no symbols.
        assert_eq!(of(0xffff_ffff_8129_f6e4, Level::GuestKernel).0, "guest kernel");
        assert_eq!(of(0x40_1000, Level::GuestUser).0, "guest user");
    }

    #[test]
    fn only_what_is_executable_is_kept() {
        assert_eq!(Maps::parse(MAPS.lines()).processes(), ["ontime device", "ontime device", "sockperf"]);
        assert!(Symbols::kallsyms("".lines()).is_empty() && Symbols::default().at(u64::MAX).is_none());
    }
}
