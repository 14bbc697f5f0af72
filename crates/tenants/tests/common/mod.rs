//! A fake host: a directory tree for special cases and for the benchmark.
#![allow(dead_code, missing_docs, clippy::unwrap_used)]

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use ontime_tenants::Sources;

pub(crate) const PF_KTHREAD: u32 = 0x0020_0000;
pub(crate) const PF_USER_WORKER: u32 = 0x0000_4000;

pub(crate) struct Host(pub tempfile::TempDir);

impl Default for Host {
    fn default() -> Self {
        Self::new()
    }
}

impl Host {
    pub(crate) fn new() -> Self {
        // /proc is not on a disk, so the tree should not be either.
        let host = Self(tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap());
        for dir in ["proc", "run/libvirt/qemu", "sys/class/net"] {
            fs::create_dir_all(host.0.path().join(dir)).unwrap();
        }
        host
    }

    pub(crate) fn path(&self, below: &str) -> PathBuf {
        self.0.path().join(below)
    }

    pub(crate) fn sources(&self) -> Sources {
        Sources::below(self.0.path())
    }

    pub(crate) fn process(&self, pid: i32, executable: &str, cgroup: &str, uid: u32, arguments: &[&str]) {
        let dir = self.path(&format!("proc/{pid}"));
        fs::create_dir_all(dir.join("fd")).unwrap();
        fs::create_dir_all(dir.join("fdinfo")).unwrap();
        symlink(executable, dir.join("exe")).unwrap();
        fs::write(dir.join("cgroup"), format!("1:name=systemd:/x\n0::{cgroup}\n")).unwrap();
        fs::write(dir.join("status"), format!("Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\n")).unwrap();
        fs::write(dir.join("cmdline"), arguments.join("\0") + "\0").unwrap();
        let comm = executable.rsplit('/').next().unwrap();
        self.thread(pid, pid, &comm[..comm.len().min(15)], 0);
    }

    pub(crate) fn thread(&self, pid: i32, tid: i32, comm: &str, flags: u32) {
        self.thread_at(pid, tid, comm, flags, (0, 0), "0-3");
    }

    /// `policy`: the kernel's policy number and the real-time priority.
    pub(crate) fn thread_at(&self, pid: i32, tid: i32, comm: &str, flags: u32, policy: (u32, u32), cpus: &str) {
        let dir = self.path(&format!("proc/{pid}/task/{tid}"));
        fs::create_dir_all(&dir).unwrap();
        let stat = stat_line(tid, comm, flags, policy);
        fs::write(dir.join("stat"), &stat).unwrap();
        fs::write(dir.join("status"), format!("Name:\t{comm}\nCpus_allowed_list:\t{cpus}\n")).unwrap();
        if pid == tid {
            fs::write(self.path(&format!("proc/{pid}/stat")), stat).unwrap();
        }
    }

    /// Changes a process's main thread: parent process and guest time.
    pub(crate) fn alter(&self, pid: i32, parent: i32, guest_time: u32) {
        let path = self.path(&format!("proc/{pid}/task/{pid}/stat"));
        let line = fs::read_to_string(&path).unwrap().replace(") S 1 ", &format!(") S {parent} "));
        // Field 43, guest time, is the second field after the three policy fields.
        let line = line.replace(" 0 0 0 0 0 0 0 0 0 0 0 0\n", &format!(" 0 0 {guest_time} 0 0 0 0 0 0 0 0 0\n"));
        fs::write(&path, &line).unwrap();
        fs::write(self.path(&format!("proc/{pid}/stat")), line).unwrap();
    }

    /// Ends a process's main thread while another thread lives, which then alone has what the process has.
    pub(crate) fn end_main_thread(&self, pid: i32, living: i32) {
        let dir = self.path(&format!("proc/{pid}"));
        let thread = dir.join(format!("task/{living}"));
        for own in ["exe", "cmdline", "fd", "fdinfo"] {
            fs::rename(dir.join(own), thread.join(own)).unwrap();
        }
        fs::copy(dir.join("cgroup"), thread.join("cgroup")).unwrap();
        fs::write(dir.join("cmdline"), "").unwrap();
        fs::create_dir(dir.join("fd")).unwrap();
        for stat in [dir.join("stat"), dir.join(format!("task/{pid}/stat"))] {
            fs::write(&stat, fs::read_to_string(&stat).unwrap().replacen(") S ", ") Z ", 1)).unwrap();
        }
    }

    /// machined's record of a unit.
    pub(crate) fn machine(&self, unit: &str, name: &str, class: &str) {
        let machines = self.path("run/systemd/machines");
        fs::create_dir_all(&machines).unwrap();
        symlink(name, machines.join(format!("unit:{unit}"))).unwrap();
        let scope = unit.replace('\\', r"\\");
        let record = format!("# private\nNAME={name}\nSCOPE={scope}\nCLASS={class}\nLEADER=7\n");
        fs::write(machines.join(name), record).unwrap();
    }

    /// A process of this user with another number in its own PID namespace.
    pub(crate) fn in_namespace(&self, pid: i32, uid: u32, inner: i32) {
        let status = format!("Name:\tx\nUid:\t{uid}\t{uid}\t{uid}\t{uid}\nNSpid:\t{pid}\t{inner}\n");
        fs::write(self.path(&format!("proc/{pid}/status")), status).unwrap();
    }

    /// Gives a process a mount namespace.
    pub(crate) fn mounts(&self, pid: i32, number: u32) {
        let namespaces = self.path(&format!("proc/{pid}/ns"));
        fs::create_dir_all(&namespaces).unwrap();
        symlink(format!("mnt:[{number}]"), namespaces.join("mnt")).unwrap();
    }

    /// Creates a cgroup's directory, owned by this user. False: this process may not do so.
    pub(crate) fn cgroup(&self, path: &str, uid: u32) -> bool {
        let mount = self.path("sys/fs/cgroup");
        let directory = mount.join(path.trim_start_matches('/'));
        fs::create_dir_all(&directory).unwrap();
        fs::write(mount.join("cgroup.controllers"), "cpu\n").unwrap();
        std::os::unix::fs::chown(&directory, Some(uid), None).is_ok()
    }

    pub(crate) fn kernel_thread(&self, pid: i32, comm: &str) {
        self.thread(pid, pid, comm, PF_KTHREAD);
    }

    pub(crate) fn open_file(&self, pid: i32, fd: u32, target: &str, info: &str) {
        symlink(target, self.path(&format!("proc/{pid}/fd/{fd}"))).unwrap();
        fs::write(self.path(&format!("proc/{pid}/fdinfo/{fd}")), info).unwrap();
    }

    pub(crate) fn domain(&self, name: &str, pid: i32, uuid: &str, inside: &str) {
        let xml = format!(
            "<domstatus state='running' pid='{pid}'><vcpus/><domain type='kvm'><name>{name}</name><uuid>{uuid}</uuid>\
             {inside}</domain></domstatus>"
        );
        fs::write(self.path(&format!("run/libvirt/qemu/{name}.xml")), xml).unwrap();
    }

    pub(crate) fn interface(&self, name: &str, index: u32) {
        let dir = self.path(&format!("sys/class/net/{name}"));
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("ifindex"), format!("{index}\n")).unwrap();
        fs::write(dir.join("iflink"), format!("{index}\n")).unwrap();
    }

    /// A complete VM: two vCPUs, an iothread, a vhost worker, RCU and pool threads, a tap.
    pub(crate) fn vm(&self, pid: i32, name: &str, cgroup: &str) {
        let guest = format!("guest={name},debug-threads=on");
        self.process(pid, "/usr/bin/qemu-system-x86_64", cgroup, 0, &["qemu-system-x86_64", "-name", &guest]);
        for (n, comm) in
            ["CPU 0/KVM", "CPU 1/KVM", "IO iothread1", "IO mon_iothread", "call_rcu", "worker"].iter().enumerate()
        {
            self.thread(pid, pid + 1 + i32::try_from(n).unwrap(), comm, 0);
        }
        self.thread(pid, pid + 8, &format!("vhost-{pid}"), PF_USER_WORKER);
        let tap = format!("tap{pid}");
        self.interface(&tap, u32::try_from(pid).unwrap());
        for fd in 0..30 {
            let (target, info) = match fd {
                20 => (
                    "/dev/net/tun".to_owned(),
                    format!("pos:\t0\nflags:\t0104002\nmnt_id:\t25\nino:\t9\niff:\t{tap}\n"),
                ),
                _ => (format!("anon_inode:[eventfd{fd}]"), String::new()),
            };
            self.open_file(pid, fd, &target, &info);
        }
    }
}

fn stat_line(tid: i32, comm: &str, flags: u32, (policy, priority): (u32, u32)) -> String {
    format!(
        "{tid} ({comm}) S 1 {tid} {tid} 0 -1 {flags} 22 0 0 0 5 6 0 0 20 0 5 0 {} 1000 20 18446744073709551615 1 1 0 0 \
         0 0 0 0 0 0 0 0 -1 3 {priority} {policy} 0 0 0 0 0 0 0 0 0 0 0\n",
        tid + 1_000_000
    )
}

/// Whether a program is installed.
pub(crate) fn has(program: &str) -> bool {
    ["/usr/bin", "/bin", "/usr/sbin", "/sbin"].iter().any(|dir| Path::new(dir).join(program).exists())
}
