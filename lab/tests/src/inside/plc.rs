//! The VM plc, class rt, for the tests of deadlines. Its guest has the module and requests the CPU time of its deadline
//! tasks from the host. `/lab/extra.cpio` has its first process (`lab/tests/deadlines-init.sh`), the module and the
//! application (`kernel/guest/tests/rta.c`). If `/lab` has a debug kernel (`vmlinuz` and `initrd`), the guest has that,
//! with `$GUEST_MB` of memory and `$GUEST_APPEND` on its command line.

use std::cell::Cell;
use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use rustix::process::Signal;
use serde_json::Value;

use super::command::{Running, expect, read, run, sh, start_to, tail, within, write};
use super::daemon::{configure, json, rt_tenant};
use crate::emulated::variable;

/// What the guest's console has printed. It is kept with the test's files.
const CONSOLE: &str = "/lab/console";
const QEMU_LOG: &str = "/lab/qemu.log";
const DEVICE_LOG: &str = "/lab/device.log";
const DEBUG_KERNEL: &str = "/lab/vmlinuz";
/// The module's parameter for bandwidth that is reserved before any task needs it.
pub(crate) const SPARE: &str = "/sys/module/ontime/parameters/deadline_spare";

/// The VM, its guest, and its device process.
#[derive(Debug)]
pub(crate) struct Guest {
    pub(crate) vm: Running,
    pub(crate) device: Running,
    /// What is written here, the guest's first process executes, line by line.
    input: File,
    asked: Cell<u32>,
}

impl Guest {
    /// Starts the device process and the VM, and waits until the guest is up and its module takes deadline tasks.
    pub(crate) fn boot(vcpus: u32) -> Result<Self> {
        configure("tenants.toml", &rt_tenant("plc", ""))?;
        configure("sockets.toml", "[vm.plc]\ndeadlines = true\n")?;
        let (kernel, initrd, memory, pages) = if has_debug_kernel() {
            (DEBUG_KERNEL, "/lab/initrd", variable("GUEST_MB", "512"), "hugetlb=off")
        } else {
            ("/boot/vmlinux-guest", "/boot/initrd-guest", "128".to_owned(), "hugetlb=on,prealloc=on")
        };
        fs::create_dir_all("/run/vm").context("making /run/vm")?;
        run(sh(&format!("cat {initrd} /lab/extra.cpio > /run/vm/initrd")))?;
        run("mkfifo /run/vm/console.in /run/vm/console.out")?;
        let device = start_device()?;
        write(CONSOLE, "")?;
        // It ends with QEMU.
        start_to("cat /run/vm/console.out", CONSOLE)?;
        let mut qemu = Command::new("qemu-system-x86_64");
        let options = format!(
            "-name guest=plc,debug-threads=on -m {memory} -machine q35,accel=kvm,memory-backend=ram,hpet=off \
             -object memory-backend-memfd,id=ram,size={memory}M,share=on,{pages} -smp {vcpus} \
             -cpu qemu64,+x2apic,+rdrand,-cx16 -no-reboot -no-user-config -nodefaults -display none \
             -kernel {kernel} -initrd /run/vm/initrd -qmp unix:/run/vm/qmp,server=on,wait=off \
             -serial pipe:/run/vm/console"
        );
        // The self-tests of the guest's cryptography would compute for some 20 s, and keep deadline tasks from running
        // for milliseconds, as its kernel cannot be preempted everywhere.
        let append =
            format!("console=ttyS0 quiet panic=-1 no_timer_check cryptomgr.notests {}", variable("GUEST_APPEND", ""));
        qemu.args(options.split_whitespace()).args(["-append", &append]);
        let attachment = run("ontime attach plc")?;
        let of_devices = attachment.lines().filter(|line| line.starts_with("-chardev") || line.starts_with("-device"));
        qemu.args(of_devices.flat_map(|line| line.trim_end_matches('\\').split_whitespace()));
        let vm = start_to(qemu, QEMU_LOG)?;
        // Opened for reading, too, so that it does not wait for QEMU.
        let input = OpenOptions::new().read(true).write(true).open("/run/vm/console.in").context("the console")?;
        within(120, "the guest is up", || Ok(read(CONSOLE)?.contains("GUEST-UP"))).inspect_err(|_| show_logs())?;
        ensure!(read(CONSOLE)?.contains("HOOKED"), "the module does not take deadline tasks");
        Ok(Self { vm, device, input, asked: Cell::new(0) })
    }

    /// What a command of the guest's shell prints, without empty lines and the kernel's messages.
    pub(crate) fn ask(&self, command: &str) -> Result<String> {
        let number = self.asked.get() + 1;
        self.asked.set(number);
        let line = format!("echo ASK-{number}; {command}; echo; echo ASKED-{number}\n");
        (&self.input).write_all(line.as_bytes()).context("writing to the guest's console")?;
        let mut answer = None;
        within(120, &format!("the guest has done '{command}'"), || {
            answer = answer_in(&read(CONSOLE)?, number);
            Ok(answer.is_some())
        })?;
        answer.context("the guest does not answer")
    }

    /// Starts a task that reserves so many us in 20 ms, and holds them. What it says, however long that takes. `policy`
    /// is a word of rta.c.
    pub(crate) fn hold(&self, name: &str, policy: &str, runtime: u32) -> Result<String> {
        self.ask(&format!(
            "rm -f /tmp/{name}; /lab/rta {policy} {runtime} 20000 0 0 > /tmp/{name} & echo $! > /tmp/{name}.pid; \
             until [ -s /tmp/{name} ] || ! kill -0 $! 2> /dev/null; do sleep 0.1; done; cat /tmp/{name}"
        ))
    }

    /// As [`Self::hold`], of a deadline task, which must get what it asks for.
    pub(crate) fn fits(&self, name: &str, runtime: u32) -> Result<()> {
        expect(&format!("{name} asks for {runtime} us of 20 ms"), "holds", self.hold(name, "deadline", runtime)?)
    }

    /// Kills a task.
    pub(crate) fn ends(&self, name: &str) -> Result<()> {
        self.ask(&format!("kill -9 {}", task(name))).map(drop)
    }

    /// Kills the device process, and connects the running VM to another one.
    pub(crate) fn replace_device(&mut self) -> Result<()> {
        self.device.signal(Signal::KILL)?;
        within(10, "the device process has ended", || self.device.is_over())?;
        self.device = start_device()?;
        run("timeout 120 ontime attach --qmp /run/vm/qmp plc").context("the device is not replaced").map(drop)
    }

    /// Keeps what a debug kernel reports, and the memory that nothing refers to (`/lab/dmesg`, `/lab/kmemleak`).
    pub(crate) fn keep_reports(&self) -> Result<()> {
        if !has_debug_kernel() {
            return Ok(());
        }
        self.ask("mount -t debugfs debugfs /sys/kernel/debug; cd /sys/kernel/debug")?;
        self.ask("[ ! -e kmemleak ] || for _ in 1 2 3; do sleep 6; echo scan > kmemleak; done")?;
        write("/lab/kmemleak", self.ask("[ ! -e kmemleak ] || cat kmemleak")?)?;
        write("/lab/dmesg", self.ask("dmesg | sed 's/^/ /'")?)
    }
}

/// Whether the guest has a debug kernel, whose reports are faults.
pub(crate) fn has_debug_kernel() -> bool {
    Path::new(DEBUG_KERNEL).exists()
}

/// The number of a task's process, as a word of the guest's shell.
pub(crate) fn task(name: &str) -> String {
    format!("$(cat /tmp/{name}.pid)")
}

/// What the host holds for the deadline tasks of each vCPU of plc: CPU time and period, us. Nothing if it has no
/// reservation.
pub(crate) fn held() -> Result<Vec<Option<(f64, f64)>>> {
    held_in(&json("ontime top --once --json --interval 0.1")?)
}

/// How many deadline tasks the guest publishes for each vCPU of plc. None if they cannot be read.
pub(crate) fn published() -> Result<Vec<Option<usize>>> {
    let count = |vcpu: &Value| vcpu.get("tasks").and_then(Value::as_array).map(Vec::len);
    of_vcpus(&json("ontime top --once --json --interval 0.1")?, count)
}

fn held_in(top: &Value) -> Result<Vec<Option<(f64, f64)>>> {
    of_vcpus(top, |vcpu| {
        let value = |name: &str| -> Option<f64> { vcpu.get("guest")?.get(name)?.as_f64() };
        value("budget_us").zip(value("period_us"))
    })
}

/// A value of each vCPU of plc that has a reservation, in the order of their numbers.
fn of_vcpus<T>(top: &Value, value_of: impl Fn(&Value) -> T) -> Result<Vec<T>> {
    let vcpus = top.pointer("/reservations/vcpus").and_then(Value::as_array);
    let vcpus = vcpus.with_context(|| format!("ontime top shows no vCPUs: {top}"))?;
    let of_plc = vcpus.iter().filter(|vcpu| vcpu.get("vm").and_then(Value::as_str) == Some("plc"));
    let mut values: Vec<_> = of_plc.map(|vcpu| (vcpu.get("vcpu").and_then(Value::as_u64), value_of(vcpu))).collect();
    values.sort_by_key(|(number, _)| *number);
    Ok(values.into_iter().map(|(_, value)| value).collect())
}

fn start_device() -> Result<Running> {
    run("rm -rf /run/ontime/device/plc")?;
    let device = start_to("ontime device --vm plc --allow-root --allow-host-network", DEVICE_LOG)?;
    within(40, "the device process takes deadline tasks", || {
        let socket = fs::metadata("/run/ontime/device/plc/deadlines.sock").context("deadlines.sock")?;
        Ok(socket.file_type().is_socket())
    })?;
    Ok(device)
}

/// Prints the last lines of what may say why the guest does not boot.
fn show_logs() {
    for path in [CONSOLE, QEMU_LOG, DEVICE_LOG] {
        print!("{path}:\n{}", tail(&read(path).unwrap_or_default(), 30));
    }
}

/// The answer to a question, if the console has all of it.
fn answer_in(console: &str, number: u32) -> Option<String> {
    let (ask, asked) = (format!("ASK-{number}"), format!("ASKED-{number}"));
    let console = console.replace('\r', "");
    let mut lines = console.lines().skip_while(|line| *line != ask).skip(1);
    let mut answer = Vec::new();
    loop {
        let line = lines.next()?;
        if line == asked {
            return Some(answer.join("\n"));
        }
        if !line.is_empty() && !line.starts_with('[') {
            answer.push(line);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_complete_and_without_the_kernels_messages() {
        let console =
            "GUEST-UP\r\nASK-1\r\nold\r\n\r\nASKED-1\r\nASK-2\r\n[    9.31] clocksource: a\r\none\r\ntwo\r\n\r\n";
        assert_eq!(answer_in(console, 1).as_deref(), Some("old"));
        assert_eq!(answer_in(console, 2), None);
        assert_eq!(answer_in(&format!("{console}ASKED-2\r\n"), 2).as_deref(), Some("one\ntwo"));
        assert_eq!(answer_in(console, 3), None);
    }

    #[test]
    fn what_is_held_is_that_of_the_vm_in_the_order_of_its_vcpus() {
        let top = r#"{"reservations": {"vcpus": [
            {"vm": "plc", "vcpu": 1, "budget_us": 1.0, "guest": {"budget_us": 6000.0, "period_us": 20000.0}},
            {"vm": "other", "vcpu": 0, "guest": {"budget_us": 1.0, "period_us": 2.0}},
            {"vm": "plc", "vcpu": 0, "budget_us": 1.0, "guest": null}]}}"#;
        let held = held_in(&serde_json::from_str(top).unwrap()).unwrap();
        assert_eq!(held, [None, Some((6000.0, 20000.0))]);
        assert!(held_in(&serde_json::from_str("{}").unwrap()).is_err());
    }
}
