//! `scripts/debug-reports.py` finds each report in the log of a debug kernel (`make debug-kernels`).

#![allow(clippy::unwrap_used, reason = "a test ends by panicking")]

use std::process::Command;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scripts/debug-reports.py");
/// What the log of a debug kernel has without any report.
const QUIET: &str = "\
[    0.000000] Linux version 6.12.117-debug-kasan-cloud-6.12
[    0.400000] kasan: KernelAddressSanitizer initialized
[    1.100000] Spectre V2 : WARNING: Unprivileged eBPF is enabled with eIBRS on
[    1.200000] clocksource: Marking clocksource 'tsc' as unstable because the skew is too large
[   20.000000] ontime: loading out-of-tree module taints kernel.
[   20.100000] INFO: NMI handler (perf_event_nmi_handler) took too long to run: 1.2 msecs
[   30.000000] kmemleak: 3 new suspected memory leaks (see /sys/kernel/debug/kmemleak)
";

/// Exit status and output for files that a guest left, and for the text of the file of explained reports.
fn judged(files: &[(&str, &str)], known: &str) -> (Option<i32>, String) {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files.iter().chain([&("known", known)]) {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    let mut command = Command::new("python3");
    let out = command.arg(SCRIPT).arg(dir.path().join("known")).arg(dir.path()).output().unwrap();
    (out.status.code(), String::from_utf8(out.stdout).unwrap() + &String::from_utf8(out.stderr).unwrap())
}

fn log(report: &str) -> String {
    let lines = report.lines().enumerate().map(|(at, line)| format!("[   40.00{at:04}] {line}\n"));
    QUIET.to_owned() + &lines.collect::<String>() + "[   50.000000] afterwards\n"
}

const RULER: &str = "==================================================================";
const CUT: &str = "------------[ cut here ]------------";

fn use_after_free() -> String {
    format!("{RULER}\nBUG: KASAN: slab-use-after-free in f\nCall Trace:\n </TASK>\nFreed by task 7\n{RULER}")
}

/// A data race: the functions that made its second access.
fn race(functions: &str) -> String {
    let access = |kind: &str| format!("{kind} to 0xffff888000000000 of 4 bytes by task 7 on cpu 0:\n");
    let accesses = format!("{} give+0x1/0x2\n\n{}{functions}", access("write"), access("read"));
    format!("{RULER}\nBUG: KCSAN: data-race in take / give\n\n{accesses}\n\nvalue changed: 0x1 -> 0x2\n{RULER}")
}

#[test]
fn each_kind_of_report_is_printed_whole() {
    for (report, part) in [
        (use_after_free(), "Freed by task 7"),
        (race(" take+0x1/0x2 [ontime]\n a+0x1/0x2"), "value changed"),
        (race(" a+0x1/0x2\n b+0x1/0x2\n take+0x1/0x2 [ontime_napi 0f1e2d3c]"), "value changed"),
        ("WARNING: possible recursive locking detected\n <TASK>\n lock+0x1\n </TASK>".into(), " lock+0x1"),
        ("BUG: sleeping function called from invalid context at a.c:1\n f+0x1\n </TASK>".into(), " f+0x1"),
        (
            format!("{CUT}\nrefcount_t: underflow\nWARNING: CPU: 0\n </TASK>\nirq 9\n---[ end trace 0 ]---"),
            "underflow\nWARNING: CPU: 0\n </TASK>\nirq 9\n",
        ),
        (format!("{CUT}\nUBSAN: array-index-out-of-bounds in a.c:1:2\nindex 9\n---[ end trace ]---"), "index 9"),
        (format!("{CUT}\nkernel BUG at a.c:1!\nOops: invalid opcode\nRIP: 1\n---[ end trace 0 ]---"), "RIP: 1"),
        (
            "BUG: unable to handle page fault\nOops: Oops: 0000\n </TASK>\nCR2: 0\n---[ end trace 0 ]---".into(),
            "CR2: 0",
        ),
        ("BUG: MAX_LOCKDEP_CHAINS too low!\n </TASK>".into(), "MAX_LOCKDEP_CHAINS"),
        ("watchdog: BUG: soft lockup - CPU#0 stuck for 121s!\n </TASK>".into(), "121s"),
        ("watchdog: CPU1: Watchdog detected hard LOCKUP on cpu 1\n f+0x1\n </TASK>".into(), " f+0x1"),
        ("rcu: INFO: rcu_preempt detected stalls on CPUs/tasks:\n </TASK>".into(), "stalls"),
        ("INFO: task python3:9 blocked for more than 120 seconds.\n </TASK>".into(), "python3:9"),
        ("kmemleak: Kernel memory leak detector disabled".into(), "detector disabled"),
    ] {
        let (status, said) = judged(&[("dmesg", &log(&report))], "");
        assert!(status == Some(1) && said.ends_with("\n1 reports without a reason\n"), "{report}\n---- gave\n{said}");
        assert!(said.contains(part) && !said.contains("40.00"), "'{part}' is to be there, but no times:\n{said}");
    }
}

#[test]
fn reports_with_a_reason_and_races_of_the_kernel_itself_do_not_count() {
    let text = log(&use_after_free());
    let (status, said) = judged(&[("dmesg", &text)], "# comment\nKASAN: slab-.* in f | it is harmless\n");
    assert!(status == Some(0) && said.contains("explained, 1 times: it is harmless"), "{said}");
    let (status, said) = judged(&[("dmesg", &text)], "KASAN: slab-.* in f\n");
    assert!(status == Some(1) && said.contains("gives no reason"), "{said}");
    // An interrupt met the module's function.
    for functions in [" a+0x1/0x2", " a+0x1/0x2\n b+0x1/0x2\n c+0x1/0x2\n take+0x1/0x2 [ontime]"] {
        let (status, said) = judged(&[("dmesg", &log(&race(functions)))], "");
        assert!(status == Some(0) && said.contains("1 data races of the kernel itself"), "{said}");
    }
}

#[test]
fn a_guest_that_died_is_judged_by_its_console() {
    let console = log(&use_after_free()).replace('\n', "\r\n");
    for name in ["console", "console-first"] {
        let (status, said) = judged(&[("dmesg", QUIET), (name, &console)], "");
        assert!(status == Some(1) && said.contains(&format!("---- {name}: BUG: KASAN")), "{said}");
    }
    // What is on the console and in the log is one report.
    let (_, said) = judged(&[("dmesg", &log(&use_after_free())), ("console", &console)], "");
    assert!(said.ends_with("\n1 reports without a reason\n"), "{said}");
}

#[test]
fn reports_that_follow_each_other_are_told_apart() {
    let two = format!(
        "{RULER}\nBUG: KASAN: one\na\nb\n{RULER}\n{RULER}\nBUG: KASAN: two\nc\nd\n{RULER}\nWARNING: three\n </TASK>"
    );
    let (status, said) = judged(&[("dmesg", &log(&two))], "two | known");
    assert!(status == Some(1) && said.contains("2 reports without a reason"), "{said}");
    assert!(
        said.contains("KASAN: one\na\nb\n") && said.contains("WARNING: three") && !said.contains("KASAN: two"),
        "{said}"
    );
}

#[test]
fn a_leak_has_the_name_that_its_function_had() {
    let quiet =
        QUIET.to_owned() + "[    0.5] kmemleak: Kernel memory leak detector initialized (mem pool available: 60000)\n";
    let leak = "unreferenced object 0xffff888001234500 (size 64):\n  comm \"python3\", pid 9, jiffies 4294900000\n  \
                hex dump (first 32 bytes):\n    00 01\n  backtrace (crc 12345678):\n    kmalloc_noprof+0x1/0x2\n    \
                0xffffffffc0201034\n    0xffffffffa0000000\n";
    let symbols = "ffffffffc0202000 t later\t[ontime]\nffffffffc0201000 t ontime_open\t[ontime]\n";
    let files = [("dmesg", &*quiet), ("kmemleak", leak), ("symbols", symbols)];
    let (status, said) = judged(&files, "");
    assert!(status == Some(1) && said.contains("    ontime_open+0x34 [ontime]\n    0xffffffffa0000000"), "{said}");
    assert_eq!(judged(&files, "ontime_open | known").0, Some(0));
    let (status, said) = judged(&[("dmesg", &quiet), ("kmemleak", "")], "");
    assert_eq!(status, Some(0), "{said}");
    let (status, said) = judged(&[("dmesg", &quiet)], "");
    assert!(status == Some(1) && said.contains("kmemleak was not asked"), "{said}");
}

#[test]
fn silence_counts_only_if_it_is_a_debug_kernels() {
    assert_eq!(judged(&[("dmesg", QUIET)], ""), (Some(0), "0 reports without a reason\n".to_owned()));
    let beginning_is_lost = QUIET.split_once("Spectre").unwrap().1;
    for files in [&[][..], &[("dmesg", beginning_is_lost)], &[("console", QUIET)]] {
        let (status, said) = judged(files, "");
        assert!(status == Some(1) && said.contains("did not come to its end"), "{said}");
    }
}
