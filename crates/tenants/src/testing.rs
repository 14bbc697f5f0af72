//! Tenants and threads for tests of pure logic; sockets that linger.

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

use crate::class::{Class, Policy};
use crate::model::{ClassSource, Kind, LibvirtTuning, Tenant, TenantThread, ThreadRole};
use crate::thread::ThreadId;

pub(crate) fn tenant(name: &str, class: Class) -> Tenant {
    Tenant {
        name: name.to_owned(),
        uuid: None,
        kind: Kind::Qemu,
        owner: 0,
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
