//! What the device process gives up before it serves the guest: other networks, privileges, system calls.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use ontime_tenants::remedy;
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CapabilitySet, LinkNameSpaceType, move_into_link_name_space};
use seccompiler::BpfProgram;
use thiserror::Error;

use crate::config::Vm;

/// The filters in seccompiler's JSON, with a reason per system call. `PID` stands for this process's number.
const FILTERS: &str = include_str!("seccomp.json");
/// The filters' names, in the order in which they are installed: a call that glibc can do without; calls that neither a
/// fault nor a library makes, which end the process; the calls that the process makes, while all others get EPERM. If
/// two filters differ, the kernel applies the stricter result.
const NAMES: [&str; 3] = ["absent", "never", "device"];
/// Descriptors beside sockets: about 16 per channel, with 64 channels at most.
const OTHER_DESCRIPTORS: u64 = 1024;

/// The privileges to give up.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// Network namespace to enter (a file, as `ip netns` keeps them in /run/netns). None: stay in the current one,
    /// which the service manager may have set.
    pub network: Option<PathBuf>,
    /// User and group to change to. None: no change.
    pub user: Option<(u32, u32)>,
    /// QEMU's group, which may connect to the device's sockets.
    pub group: Option<u32>,
    /// Omits the system call filter (to find out which calls it lacks).
    pub unfiltered: bool,
    /// Allows root or capabilities, which a guest that takes over the process would have.
    pub allow_root: bool,
    /// Allows the host's own network namespace, in which the guest reaches what the host reaches.
    pub allow_host_network: bool,
}

/// Why privileges cannot be given up.
#[derive(Debug, Error)]
pub enum SandboxError {
    /// The namespace does not exist, or this process may not enter it.
    #[error("network namespace {}: {source}; make it with `ip netns add`, and start as root or let systemd set \
        it", .path.display())]
    Network {
        /// The namespace's file.
        path: PathBuf,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The process would run as root.
    #[error(
        "this process is root or has capabilities, and a guest that takes it over would have them; start it as another \
         user (systemctl start ontime-device@VM, or --user UID:GID), or say --allow-root"
    )]
    Root,
    /// The process would be in the host's network namespace.
    #[error(
        "the VM's sockets would be in the host's own network namespace; give the VM its own (NetworkNamespacePath= in \
         the unit, or --netns NAME), or say --allow-host-network"
    )]
    HostNetwork,
    /// A system call failed.
    #[error("{what}: {source}; {}", remedy(source))]
    System {
        /// What the process tried to do.
        what: &'static str,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// The filter cannot be compiled or installed.
    #[error(
        "the system call filter cannot be set: {0}; boot a kernel with CONFIG_SECCOMP_FILTER, or if this has it, \
         report it (`ontime report` collects what is needed)"
    )]
    Filter(#[from] seccompiler::Error),
}

/// Enters the VM's network namespace, in which its sockets are then created. Fails in the host's namespace and as root,
/// unless allowed. Returns whether it is the host's. Call this before any thread is started.
///
/// # Errors
/// [`SandboxError::Network`], [`SandboxError::HostNetwork`], [`SandboxError::Root`]
pub(crate) fn enter_network(options: &Options) -> Result<bool, SandboxError> {
    if let Some(path) = &options.network {
        let failed = |source| SandboxError::Network { path: path.clone(), source };
        let namespace = std::fs::File::open(path).map_err(failed)?;
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(|error| failed(error.into()))?;
    }
    let host_network = in_the_hosts_network(Path::new("/proc/sys/net"));
    if host_network && !options.allow_host_network {
        return Err(SandboxError::HostNetwork);
    }
    if stays_privileged(options) && !options.allow_root {
        return Err(SandboxError::Root);
    }
    Ok(host_network)
}

/// Whether this process is in the host's network namespace. Some sysctls below `/proc/sys/net` exist only there. (An
/// unprivileged process may not compare `/proc/1/ns/net`.) If the directory shows nothing, the namespace counts as the
/// host's.
fn in_the_hosts_network(sysctls: &Path) -> bool {
    let exists = |name: &str| sysctls.join(name).exists();
    exists("ipv4/tcp_mem") || exists("core/netdev_max_backlog") || !exists("ipv4")
}

/// Whether the process is root or has capabilities after it has changed its user. CAP_NET_BIND_SERVICE is allowed: the
/// policy decides about ports anyway.
fn stays_privileged(options: &Options) -> bool {
    if let Some((user, _)) = options.user {
        return user == 0;
    }
    let harmless = CapabilitySet::NET_BIND_SERVICE;
    // If the kernel does not report them, assume capabilities.
    let capable = rustix::thread::capabilities(None).map_or(true, |sets| !harmless.contains(sets.permitted));
    rustix::process::geteuid().is_root() || rustix::process::getuid().is_root() || capable
}

/// The system call filters.
#[must_use = "until they are installed every system call is allowed"]
#[derive(Debug, Default)]
pub struct Filters(Vec<BpfProgram>);

impl Filters {
    /// Installs them in all threads.
    ///
    /// # Errors
    /// [`SandboxError::Filter`]
    pub fn install(&self) -> Result<(), SandboxError> {
        Ok(self.0.iter().try_for_each(|filter| seccompiler::apply_filter_all_threads(filter))?)
    }
}

/// Gives up all other privileges, for this and all later threads. System calls are restricted when the caller installs
/// the returned filters. Call this before any thread is started.
///
/// # Errors
/// [`SandboxError`]
pub fn restrict(options: &Options, vm: &Vm) -> Result<Filters, SandboxError> {
    let system = |what| move |source: rustix::io::Errno| SandboxError::System { what, source: source.into() };
    limits(vm.policy.limits.sockets);
    limit_priority(vm.priority.unsigned_abs().into());
    if let Some((user, group)) = options.user {
        become_user(user, group)?;
    }
    rustix::thread::set_no_new_privs(true).map_err(system("giving up new privileges"))?;
    lock_memory();
    if options.unfiltered {
        return Ok(Filters::default());
    }
    let arch = std::env::consts::ARCH.try_into().map_err(seccompiler::Error::Backend)?;
    let text = FILTERS.replace("\"PID\"", &std::process::id().to_string());
    let mut filters = seccompiler::compile_from_json(text.as_bytes(), arch)?;
    Ok(Filters(NAMES.iter().filter_map(|name| filters.remove(*name)).collect()))
}

/// Locks pages into RAM when they are touched: the guest's memory is mapped later and need not all be resident.
fn lock_memory() {
    // With a limit, mapping the guest's memory would fail.
    if rustix::process::getrlimit(Resource::Memlock).current.is_some() {
        tracing::warn!("memory is not locked: RLIMIT_MEMLOCK is finite; raise it (LimitMEMLOCK=infinity)");
        return;
    }
    // SAFETY: no memory is passed.
    if unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) } != 0 {
        let error = std::io::Error::last_os_error();
        tracing::warn!("memory is not locked: {error}; {}", remedy(&error));
    }
}

/// Raises the resource limits. A limit that cannot be raised causes an error when it is reached.
fn limits(sockets: u32) {
    // Each socket, and as many again for closed connections.
    let wanted = 2 * u64::from(sockets) + OTHER_DESCRIPTORS;
    for (resource, wanted) in [(Resource::Nofile, Some(wanted)), (Resource::Memlock, None)] {
        let now = rustix::process::getrlimit(resource);
        let enough =
            |have: Option<u64>| have.is_none() || wanted.is_some_and(|wanted| have.is_some_and(|have| have >= wanted));
        if enough(now.current) {
            continue;
        }
        let raised = Rlimit { current: wanted, maximum: if enough(now.maximum) { now.maximum } else { wanted } };
        if rustix::process::setrlimit(resource, raised).is_err() {
            let most = Rlimit { current: now.maximum, maximum: now.maximum };
            let _ = rustix::process::setrlimit(resource, most);
            if resource == Resource::Nofile {
                tracing::warn!(
                    "the VM may have fewer sockets than sockets.toml says: {:?} descriptors are allowed, {wanted:?} \
                     are needed; raise LimitNOFILE= of the unit, or lower `sockets`",
                    now.maximum
                );
            }
        }
    }
}

/// Lets no thread of this process have a real-time priority above that of the channels' threads, so that a guest
/// that takes the process over cannot get above the daemon's watcher, which keeps the VM within its runtime cap. A
/// limit that is lower already stays.
fn limit_priority(priority: u64) {
    let highest = |most| Rlimit { current: most, maximum: most };
    if rustix::process::setrlimit(Resource::Rtprio, highest(Some(priority))).is_err() {
        let allowed = rustix::process::getrlimit(Resource::Rtprio).maximum;
        let _ = rustix::process::setrlimit(Resource::Rtprio, highest(allowed));
    }
}

/// Changes user and group permanently; libc's functions act on all threads.
fn become_user(user: u32, group: u32) -> Result<(), SandboxError> {
    let done = |what, result: libc::c_int| {
        if result == 0 { Ok(()) } else { Err(SandboxError::System { what, source: std::io::Error::last_os_error() }) }
    };
    // SAFETY: an empty list.
    done("leaving groups", unsafe { libc::setgroups(0, std::ptr::null()) })?;
    // SAFETY: no memory is passed.
    done("changing the group", unsafe { libc::setresgid(group, group, group) })?;
    // SAFETY: no memory is passed.
    done("changing the user", unsafe { libc::setresuid(user, user, user) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::process::ProcessError;

    #[test]
    fn what_keeps_the_process_from_serving_has_a_remedy() {
        let system = |number| std::io::Error::from_raw_os_error(number);
        let process = |what, number| ProcessError::System { what, source: system(number) };
        let path = |number| ProcessError::Path { path: "/run/x".into(), what: "listening", source: system(number) };
        let filter = seccompiler::Error::ThreadSync(7);
        for (said, wanted) in [
            (process("making event descriptors", libc::EMFILE).to_string(), "LimitNOFILE="),
            (process("starting a thread", libc::EAGAIN).to_string(), "TasksMax="),
            (path(libc::EACCES).to_string(), "belongs to this user"),
            (path(libc::ENOSPC).to_string(), "make room"),
            (SandboxError::System { what: "becoming the user", source: system(libc::EINVAL) }.to_string(), "report"),
            (SandboxError::Filter(filter).to_string(), "CONFIG_SECCOMP_FILTER"),
            (ProcessError::Vhost { channel: 1, reason: "no".to_owned() }.to_string(), "ontime attach VM --qmp"),
            (crate::peer::PeerError::User(64055).to_string(), "run QEMU as that user"),
            (crate::peer::PeerError::Process(9).to_string(), "a device process of its own"),
            (crate::peer::PeerError::Vm("b".to_owned()).to_string(), "as libvirt names its VM"),
            (crate::peer::PeerError::Unknown(system(libc::ENOENT)).to_string(), "a device process of its own"),
        ] {
            assert!(said.split_once("; ").is_some_and(|(_, remedy)| remedy.contains(wanted)), "{said}");
        }
    }

    #[test]
    fn the_filters_compile_and_every_call_has_its_reason() {
        let arch = std::env::consts::ARCH.try_into().unwrap();
        let filters = seccompiler::compile_from_json(FILTERS.replace("\"PID\"", "1").as_bytes(), arch).unwrap();
        let json: serde_json::Value = serde_json::from_str(FILTERS).unwrap();
        for name in NAMES {
            assert!(filters.contains_key(name));
            for rule in json[name]["filter"].as_array().unwrap() {
                assert!(rule["comment"].as_str().is_some_and(|reason| reason.len() > 10), "{rule}: no reason");
            }
        }
        assert_eq!(filters.len(), NAMES.len());
    }

    #[test]
    fn the_hosts_network_is_known_by_its_sysctls() {
        let directory = tempfile::tempdir().unwrap();
        let sysctls = |names: &[&str]| {
            let place = tempfile::tempdir_in(directory.path()).unwrap();
            for name in names {
                std::fs::create_dir_all(place.path().join(name).parent().unwrap()).unwrap();
                std::fs::write(place.path().join(name), "").unwrap();
            }
            in_the_hosts_network(place.path())
        };
        assert!(!sysctls(&["ipv4/ip_forward", "core/somaxconn"]));
        assert!(sysctls(&["ipv4/ip_forward", "ipv4/tcp_mem"]));
        assert!(sysctls(&["ipv4/ip_forward", "core/netdev_max_backlog"]));
        assert!(sysctls(&[]), "nothing can be seen");
    }

    #[test]
    fn root_is_what_the_process_would_be_in_the_end() {
        let as_user = |user| stays_privileged(&Options { user: Some((user, 9)), ..Options::default() });
        assert!(as_user(0) && !as_user(64055));
    }
}
