//! Parsers for the files of `/proc` (pure). A hostile process may have influenced the bytes.
//!
//! Source: `Documentation/filesystems/proc.rst`, `fs/proc/array.c`.

use crate::policy::Policy;
use crate::sched;

/// A kernel thread (`include/linux/sched.h`).
const PF_KTHREAD: u32 = 0x0020_0000;
/// A kernel thread that lives inside a user process, such as a vhost worker since 6.4.
const PF_USER_WORKER: u32 = 0x0000_4000;

/// The longest path of a cgroup, bytes: paths of nested slices have several hundred characters.
const PATH_MAX: usize = 4096;
/// Directories of a cgroup's path that are looked at. Containers in containers have some 20.
const DEPTH: usize = 64;

/// Fields of `/proc/PID/task/TID/stat`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stat {
    /// Thread number (field 1).
    pub tid: i32,
    /// Name (field 2), with control characters replaced.
    pub comm: String,
    /// State letter (field 3): `Z` and `X` mean ended.
    pub state: char,
    /// Parent process (field 4).
    pub ppid: i32,
    /// Task flags (field 9).
    pub flags: u32,
    /// Start time in clock ticks since boot (field 22).
    pub start_time: u64,
    /// The CPU it last ran on (field 39).
    pub last_cpu: u32,
    /// Guest time in clock ticks (field 43): above 0 only for KVM's vCPU threads.
    pub guest_time: u64,
    /// Scheduling policy (fields 19, 40, 41). SCHED_DEADLINE's parameters are missing here and are 0.
    pub policy: Policy,
}

impl Stat {
    /// Whether this is a kernel thread of its own.
    pub fn is_kthread(&self) -> bool {
        self.flags & PF_KTHREAD != 0
    }

    /// Whether the kernel runs this thread inside a user process. Unlike a name, user space cannot forge this.
    pub fn is_user_worker(&self) -> bool {
        self.flags & PF_USER_WORKER != 0
    }

    /// Whether the thread has ended and only waits to be reaped.
    pub fn has_ended(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }
}

/// Parses a `stat` line. The name may contain spaces and parentheses: it ends at the last `)`.
pub fn parse_stat(line: &[u8]) -> Option<Stat> {
    let open = line.iter().position(|byte| *byte == b'(')?;
    let close = line.iter().rposition(|byte| *byte == b')')?;
    let tid = std::str::from_utf8(line.get(..open)?).ok()?.trim().parse().ok()?;
    let comm = printable(line.get(open + 1..close)?);
    let rest = std::str::from_utf8(line.get(close + 1..)?).ok()?;
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    // The first field after the name is number 3.
    let field = |number: usize| fields.get(number.checked_sub(3)?).copied();
    let nice: i64 = field(19)?.parse().ok()?;
    Some(Stat {
        tid,
        comm,
        state: field(3)?.chars().next()?,
        ppid: field(4)?.parse().ok()?,
        flags: field(9)?.parse().ok()?,
        start_time: field(22)?.parse().ok()?,
        last_cpu: field(39)?.parse().ok()?,
        guest_time: field(43)?.parse().ok()?,
        policy: sched::policy_from(field(41)?.parse().ok()?, nice, field(40)?.parse().ok()?)?,
    })
}

/// The cgroup v2 path from `/proc/PID/cgroup` (the line `0::PATH`), if any; of a deep one the topmost 64 directories.
pub fn parse_cgroup(text: &[u8]) -> Option<String> {
    let line = text.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"0::"))?;
    let path = printable_up_to(line, PATH_MAX);
    // The kernel marks a removed cgroup; its last processes are exiting.
    let path = path.strip_suffix(" (deleted)").unwrap_or(&path);
    path.starts_with('/').then(|| topmost(path).to_owned())
}

/// The part of a cgroup's path that is looked at: its topmost [`DEPTH`] directories. Who may create cgroups can nest
/// 2,000, and each process there would cost the time for all of them. A container is identified far above.
fn topmost(path: &str) -> &str {
    path.match_indices('/').nth(DEPTH).and_then(|(end, _)| path.get(..end)).unwrap_or(path)
}

/// The paths in cgroup v1 hierarchies from `/proc/PID/cgroup` (lines `NUMBER:CONTROLLERS:PATH`).
pub fn parse_cgroup_v1(text: &[u8]) -> Vec<String> {
    let lines = text.split(|byte| *byte == b'\n').filter(|line| !line.starts_with(b"0::"));
    let paths = lines.filter_map(|line| line.splitn(3, |byte| *byte == b':').nth(2));
    paths.map(|path| topmost(&printable_up_to(path, PATH_MAX)).to_owned()).filter(|path| path.len() > 1).collect()
}

/// A process's or thread's number in its innermost PID namespace, from `/proc/PID/status`.
pub fn parse_inner_pid(status: &[u8]) -> Option<i32> {
    status_value(status, "NSpid")?.split_ascii_whitespace().next_back()?.parse().ok()
}

/// The host's boot time in seconds since 1970, from `/proc/stat`.
pub fn parse_boot_time(stat: &[u8]) -> Option<u64> {
    let line = stat.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"btime "))?;
    std::str::from_utf8(line).ok()?.trim().parse().ok()
}

/// The value of a line `KEY:<tab>VALUE` in `/proc/PID/status` or `fdinfo`.
pub fn status_value<'a>(text: &'a [u8], key: &str) -> Option<&'a str> {
    text.split(|byte| *byte == b'\n').find_map(|line| {
        let value = line.strip_prefix(key.as_bytes())?.strip_prefix(b":")?;
        std::str::from_utf8(value).ok().map(str::trim)
    })
}

/// The real and the effective user from `/proc/PID/status`.
pub fn parse_uids(status: &[u8]) -> Option<(u32, u32)> {
    let mut ids = status_value(status, "Uid")?.split_ascii_whitespace();
    Some((ids.next()?.parse().ok()?, ids.next()?.parse().ok()?))
}

/// The arguments from `/proc/PID/cmdline`.
pub fn parse_cmdline(bytes: &[u8]) -> Vec<String> {
    let bytes = bytes.strip_suffix(b"\0").unwrap_or(bytes);
    if bytes.is_empty() {
        return Vec::new();
    }
    bytes.split(|byte| *byte == 0).map(|argument| String::from_utf8_lossy(argument).into_owned()).collect()
}

/// Time on a CPU, and time runnable without running, in ns: the first two fields of `schedstat`.
pub fn parse_schedstat(text: &[u8]) -> Option<(u64, u64)> {
    let mut fields = std::str::from_utf8(text).ok()?.split_ascii_whitespace();
    Some((fields.next()?.parse().ok()?, fields.next()?.parse().ok()?))
}

/// Makes external text fit for a terminal and a log: control characters become `?`, at most 255 characters.
pub fn printable(bytes: &[u8]) -> String {
    printable_up_to(bytes, 255)
}

fn printable_up_to(bytes: &[u8], characters: usize) -> String {
    String::from_utf8_lossy(bytes).chars().take(characters).map(|c| if c.is_control() { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LINE: &[u8] = b"4242 (CPU 0/KVM) S 1 4242 4242 0 -1 138412096 22 0 0 0 5 6 0 0 20 0 5 0 987654 1000 20 \
        18446744073709551615 1 1 0 0 0 0 0 0 0 0 0 0 -1 3 47 1 0 0 0 0 0 0 0 0 0 0 0\n";

    #[test]
    fn a_stat_line_is_read_field_by_field() {
        let stat = parse_stat(LINE).unwrap();
        assert_eq!((stat.tid, stat.comm.as_str(), stat.state, stat.ppid), (4242, "CPU 0/KVM", 'S', 1));
        assert_eq!((stat.start_time, stat.last_cpu), (987_654, 3));
        assert_eq!(stat.policy, Policy::Fifo(47));
        assert!(!stat.is_kthread() && !stat.is_user_worker() && !stat.has_ended());
    }

    #[test]
    fn names_with_spaces_parentheses_and_terminal_escapes_do_not_shift_the_fields() {
        for name in ["a) S 1 (b", "((", ")", "", "x) Z 0 0 0", "tab\there", "esc\u{1b}[2J"] {
            let line = String::from_utf8(LINE.to_vec()).unwrap().replace("CPU 0/KVM", name);
            let stat = parse_stat(line.as_bytes()).unwrap();
            assert_eq!((stat.state, stat.start_time), ('S', 987_654), "name {name:?}");
            assert!(!stat.comm.contains(char::is_control));
        }
    }

    #[test]
    fn worker_flags_tell_kernel_threads_from_names() {
        let with_flags = |flags: u32| {
            parse_stat(String::from_utf8(LINE.to_vec()).unwrap().replace("138412096", &flags.to_string()).as_bytes())
                .unwrap()
        };
        assert!(with_flags(2_129_984).is_kthread());
        assert!(with_flags(0x4000 | 0x40).is_user_worker());
    }

    #[test]
    fn this_processs_own_files_are_read() {
        let stat = parse_stat(&std::fs::read("/proc/self/stat").unwrap()).unwrap();
        assert_eq!(u32::try_from(stat.tid).unwrap(), std::process::id());
        let (real, effective) = parse_uids(&std::fs::read("/proc/self/status").unwrap()).unwrap();
        assert_eq!(real, rustix::process::getuid().as_raw());
        assert_eq!(effective, rustix::process::geteuid().as_raw());
        assert!(!parse_cmdline(&std::fs::read("/proc/self/cmdline").unwrap()).is_empty());
    }

    #[test]
    fn cgroup_v2_is_found_among_v1_lines() {
        let text = b"4:memory:/a\n1:name=systemd:/b\n0::/machine.slice/libpod-1.scope\n";
        assert_eq!(parse_cgroup(text).as_deref(), Some("/machine.slice/libpod-1.scope"));
        assert_eq!(parse_cgroup(b"0::/x (deleted)\n").as_deref(), Some("/x"));
        assert_eq!(parse_cgroup(b"1:cpu:/a\n"), None);
        assert_eq!(parse_cgroup(b""), None);
        assert_eq!(parse_cgroup_v1(text), ["/a", "/b"]);
        assert_eq!(parse_cgroup_v1(b"3:cpu:/\n:\nx\n0::/y\n"), Vec::<String>::new());
    }

    #[test]
    fn long_paths_of_cgroups_come_whole() {
        let path = "/kubelet.slice/kubelet-kubepods.slice".repeat(20);
        assert_eq!(parse_cgroup(format!("0::{path}\n").as_bytes()), Some(path));
    }

    #[test]
    fn of_a_deep_path_the_topmost_part_is_looked_at() {
        let deep = |depth: usize| "/a".repeat(depth);
        for (depth, kept) in [(1, 1), (DEPTH - 1, DEPTH - 1), (DEPTH, DEPTH), (DEPTH + 1, DEPTH), (2047, DEPTH)] {
            assert_eq!(parse_cgroup(format!("0::{}\n", deep(depth)).as_bytes()), Some(deep(kept)), "{depth}");
            assert_eq!(parse_cgroup_v1(format!("3:cpu:{}\n", deep(depth)).as_bytes()), [deep(kept)], "{depth}");
        }
    }

    #[test]
    fn numbers_inside_namespaces_and_the_boot_time_are_read() {
        assert_eq!(parse_inner_pid(b"Name:\tx\nNSpid:\t3900100\t67\n"), Some(67));
        assert_eq!(parse_inner_pid(b"NSpid:\t12\n"), Some(12));
        assert_eq!(parse_inner_pid(b"NSpid:\t\n"), None);
        assert_eq!(parse_boot_time(b"cpu 1 2\nbtime 1700000000\nprocesses 5\n"), Some(1_700_000_000));
        assert_eq!(parse_boot_time(b"cpu 1 2\n"), None);
    }

    proptest! {
        #[test]
        fn no_bytes_make_a_parser_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = parse_stat(&bytes);
            let _ = parse_cgroup(&bytes);
            let _ = parse_cgroup_v1(&bytes);
            let _ = parse_inner_pid(&bytes);
            let _ = parse_boot_time(&bytes);
            let _ = parse_uids(&bytes);
            let _ = parse_cmdline(&bytes);
            let _ = parse_schedstat(&bytes);
            let _ = status_value(&bytes, "iff");
        }

        #[test]
        fn any_name_is_carried_through(name in "[^\u{0}\u{7f}\n]{0,15}") {
            let line = String::from_utf8(LINE.to_vec()).unwrap().replace("CPU 0/KVM", &name);
            let stat = parse_stat(line.as_bytes()).unwrap();
            prop_assert_eq!(stat.start_time, 987_654);
            prop_assert_eq!(stat.comm, printable(name.as_bytes()));
        }
    }
}
