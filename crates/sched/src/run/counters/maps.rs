//! Where a process has mapped a part of a file: found in its `maps` by a thread of its own (`ontime-maps`,
//! SCHED_OTHER), because a process can keep a reader of that file waiting (its lock of the address space).

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::sync::mpsc::{Receiver, SyncSender, channel, sync_channel};

use ontime_tenants::ThreadId;

/// The most that is read of a process's `maps`, bytes: some 10,000 mappings.
const READ_MAX: u64 = 1 << 20;
/// The most questions that wait.
const WAITING: usize = 64;

/// A part of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Part {
    /// Device and inode.
    pub(crate) file: (u64, u64),
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// The thread that looks for addresses.
#[derive(Debug)]
pub(crate) struct Maps {
    ask: SyncSender<(ThreadId, Part)>,
    found: Receiver<(ThreadId, Part, u64)>,
}

impl Maps {
    /// # Errors
    /// The thread cannot be started.
    pub(crate) fn start() -> io::Result<Self> {
        let (ask, asked) = sync_channel::<(ThreadId, Part)>(WAITING);
        let (tell, found) = channel();
        std::thread::Builder::new().name("ontime-maps".to_owned()).stack_size(128 * 1024).spawn(move || {
            for (of, part) in asked {
                let maps = File::open(format!("/proc/{}/maps", of.pid)).map(|file| BufReader::new(file.take(READ_MAX)));
                let address = maps.ok().and_then(|maps| address(maps, part));
                // The thread still is there, so these were the mappings of its process.
                if let Some(address) = address.filter(|_| of.verify().is_ok()) {
                    if tell.send((of, part, address)).is_err() {
                        return;
                    }
                }
            }
        })?;
        Ok(Self { ask, found })
    }

    /// Asks where the process of this thread has this part. False: too many questions wait.
    pub(crate) fn ask(&self, of: ThreadId, part: Part) -> bool {
        self.ask.try_send((of, part)).is_ok()
    }

    /// What was found since the last call.
    pub(crate) fn found(&self) -> impl Iterator<Item = (ThreadId, Part, u64)> {
        self.found.try_iter()
    }
}

/// The address of a part in these mappings (proc_pid_maps(5)).
fn address(maps: impl BufRead, wanted: Part) -> Option<u64> {
    maps.split(b'\n').map_while(Result::ok).find_map(|line| address_in(std::str::from_utf8(&line).ok()?, wanted))
}

fn address_in(line: &str, wanted: Part) -> Option<u64> {
    let hex = |text: &str| u64::from_str_radix(text, 16).ok();
    let mut words = line.split_ascii_whitespace();
    let (start, end) = words.next()?.split_once('-')?;
    let (start, end) = (hex(start)?, hex(end)?);
    let access = words.next()?;
    let offset = hex(words.next()?)?;
    let (major, minor) = words.next()?.split_once(':')?;
    let [major, minor] = [major, minor].map(|number| u32::from_str_radix(number, 16).ok());
    let file = (rustix::fs::makedev(major?, minor?), words.next()?.parse().ok()?);
    let before = wanted.offset.checked_sub(offset)?;
    let within = before.checked_add(wanted.length)? <= end.checked_sub(start)?;
    let shared = access.starts_with('r') && access.ends_with('s');
    (shared && file == wanted.file && within).then(|| start + before)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "7f00-7f00 r--p 00000000 00:00 0\n\
        7fffe0000000-7fffe0100000 rw-p 00200000 00:01 1025                       /memfd:pc.ram (deleted)\n\
        7fffe8000000-7fffe8100000 ---s 00200000 00:01 1025                       /memfd:pc.ram (deleted)\n\
        7ffff0000000-7ffff0100000 rw-s 00200000 00:01 1025                       /memfd:pc.ram (deleted)\n\
        7ffff4000000-7ffff8000000 rw-s 00000000 103:1a 77                        /mnt/a b\n";

    #[test]
    fn a_part_is_found_where_it_is_mapped_whole() {
        let memory = (rustix::fs::makedev(0, 1), 1025);
        let huge = (rustix::fs::makedev(0x103, 0x1a), 77);
        let at = |file, offset, length| address(MAPS.as_bytes(), Part { file, offset, length });
        assert_eq!(at(memory, 0x20_0000, 128), Some(0x7fff_f000_0000));
        assert_eq!(at(memory, 0x20_1080, 128), Some(0x7fff_f000_1080));
        assert_eq!(at(huge, 0x1000, 128), Some(0x7fff_f400_1000));
        assert_eq!(at(memory, 0x2f_ff80, 128), Some(0x7fff_f00f_ff80));
        for none in [
            at(memory, 0x2f_ffc0, 128),
            at(memory, 0x1f_ff80, 128),
            at(memory, u64::MAX, 128),
            at(memory, 0x20_0000, u64::MAX),
            at((memory.0, 1026), 0x20_0000, 128),
            at((huge.0, memory.1), 0x20_0000, 128),
        ] {
            assert_eq!(none, None);
        }
    }

    #[test]
    fn lines_that_are_none_are_passed_over() {
        let maps =
            "\nx\n7f-\n7f-80 rw-s\n-1-2 r 0 0:0 0\n\u{fffd}\n80-7f r--s 0 00:01 5 a\nffffffffffffffff-0 r 0 0:1 5\n";
        let part = Part { file: (rustix::fs::makedev(0, 1), 5), offset: 0, length: 1 };
        assert_eq!(address(maps.as_bytes(), part), None);
        assert_eq!(address(&[0xff, 0xfe, b'\n'][..], part), None);
    }

    #[test]
    fn the_thread_finds_a_mapping_of_this_process() {
        let file = rustix::fs::memfd_create("part", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 0x3000).unwrap();
        let (access, flags) = (rustix::mm::ProtFlags::READ, rustix::mm::MapFlags::SHARED);
        // SAFETY: a new mapping, at an address that the kernel chooses, which stays.
        let at = unsafe { rustix::mm::mmap(std::ptr::null_mut(), 0x3000, access, flags, &file, 0) }.unwrap();
        let stat = rustix::fs::fstat(&file).unwrap();
        let part = Part { file: (stat.st_dev, stat.st_ino), offset: 0x1080, length: 128 };
        let pid = std::process::id() as i32;
        let own = ThreadId::of(pid, pid).unwrap();
        let maps = Maps::start().unwrap();
        assert!(maps.ask(own, part));
        let found = loop {
            if let Some(found) = maps.found().next() {
                break found;
            }
            std::thread::yield_now();
        };
        assert_eq!(found, (own, part, at.addr() as u64 + 0x1080));
    }
}
