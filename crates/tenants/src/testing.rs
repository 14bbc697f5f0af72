//! Tenants, threads, a process and sockets that linger, for tests.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::class::{Class, Policy};
use crate::model::{ClassSource, Kind, LibvirtTuning, Tenant, TenantThread, ThreadRole};
use crate::rules::Namer;
use crate::thread::ThreadId;

pub(crate) fn tenant(name: &str, class: Class) -> Tenant {
    Tenant {
        name: name.to_owned(),
        uuid: None,
        kind: Kind::Qemu,
        owner: 0,
        namer: Namer::User(0),
        process: ThreadId { pid: 1, tid: 1, start_time: 1 },
        cgroup: None,
        class,
        class_source: ClassSource::Default,
        runtime_cap: 0.95,
        threads: Vec::new(),
        vnics: Vec::new(),
        attached: Vec::new(),
    }
}

pub(crate) fn thread(role: ThreadRole, policy: Policy) -> TenantThread {
    TenantThread {
        id: ThreadId { pid: 1, tid: 2, start_time: 3 },
        role,
        comm: format!("{role:?}"),
        policy,
        affinity: "0-3".to_owned(),
        last_cpu: 0,
        libvirt: LibvirtTuning::default(),
    }
}

/// A connection that lingers for a day when it is closed, because the other side reads nothing.
pub(crate) fn lingering(listener: &TcpListener) -> (TcpStream, TcpStream) {
    let mut near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let far = listener.accept().unwrap().0;
    near.set_nonblocking(true).unwrap();
    while near.write(&[0; 65_536]).is_ok() {}
    near.set_nonblocking(false).unwrap();
    rustix::net::sockopt::set_socket_linger(&near, Some(Duration::from_secs(24 * 3600))).unwrap();
    (near, far)
}

/// A child process, which ends when this is dropped.
pub(crate) struct Child(pub i32);

impl Drop for Child {
    fn drop(&mut self) {
        // SAFETY: ends a child of ours that was not waited for, so the number is still the child's.
        unsafe { libc::kill(self.0, libc::SIGKILL) };
        // SAFETY: waits for it; no status is stored.
        unsafe { libc::waitpid(self.0, std::ptr::null_mut(), 0) };
    }
}

/// A process whose main thread has ended while another thread lives.
pub(crate) fn without_main_thread() -> Child {
    // SAFETY: the child starts a thread that sleeps, and ends its own.
    let child = unsafe { libc::fork() };
    if child == 0 {
        std::thread::spawn(|| std::thread::sleep(Duration::from_secs(600)));
        // SAFETY: ends this thread alone.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
    assert!(child > 0);
    let child = Child(child);
    let has_ended = || {
        let text = std::fs::read(format!("/proc/{}/stat", child.0)).unwrap();
        crate::proc::parse_stat(&text).unwrap().has_ended()
    };
    let start = Instant::now();
    while !has_ended() {
        assert!(start.elapsed() < Duration::from_secs(60), "process {} has not ended its main thread", child.0);
        std::thread::sleep(Duration::from_millis(1));
    }
    child
}
