//! What the device process gives up before it meets the guest: other networks, privileges, system calls.

use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use ontime_tenants::remedy;
use rustix::process::{Resource, Rlimit};
use rustix::thread::{CapabilitySet, LinkNameSpaceType, move_into_link_name_space};
use thiserror::Error;

/// The filters: seccompiler's JSON, every system call with its reason. `PID` stands for the number of this process.
const FILTERS: &str = include_str!("seccomp.json");
/// Their names, in the order in which they come into force: a call that glibc can do without; calls that no fault and
/// no library makes, which end the process; the calls that the process makes, others get EPERM. Where two differ the
/// kernel takes the stricter one.
const NAMES: [&str; 3] = ["absent", "never", "device"];
/// Descriptors beside sockets: some 16 a channel, of which there are 64 at most.
const OTHER_DESCRIPTORS: u64 = 1024;

/// What to give up.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Options {
    /// Network namespace to enter (a file, as `ip netns` keeps them in /run/netns). None: stay, as the service manager
    /// may have set it.
    pub network: Option<PathBuf>,
    /// User and group to become. None: stay.
    pub user: Option<(u32, u32)>,
    /// The group that may connect to the device's sockets: QEMU's.
    pub group: Option<u32>,
    /// Leaves the system call filter out (for finding out what one lacks).
    pub unfiltered: bool,
    /// Serves as root, or with capabilities that a guest which takes the process over would have.
    pub allow_root: bool,
    /// Serves in the host's own network namespace, where the guest reaches what the host does.
    pub allow_host_network: bool,
}

/// Rights could not be given up.
#[derive(Debug, Error)]
pub enum SandboxError {
    /// No such namespace, or no right to enter it.
    #[error("network namespace {}: {source}; make it with `ip netns add`, and start as root or let systemd set \
        it", .path.display())]
    Network {
        /// Which.
        path: PathBuf,
        /// The kernel's word.
        source: std::io::Error,
    },
    /// It would be root.
    #[error(
        "this process is root or has capabilities, and a guest that takes it over would have them; start it as another \
         user (systemctl start ontime-device@VM, or --user UID:GID), or say --allow-root"
    )]
    Root,
    /// It would be in the host's network.
    #[error(
        "the VM's sockets would be in the host's own network namespace; give the VM its own (NetworkNamespacePath= in \
         the unit, or --netns NAME), or say --allow-host-network"
    )]
    HostNetwork,
    /// A system call failed.
    #[error("{what}: {source}; {}", remedy(source))]
    System {
        /// Doing what.
        what: &'static str,
        /// The kernel's word.
        source: std::io::Error,
    },
    /// The filter is wrong for this build.
    #[error(
        "the system call filter cannot be set: {0}; boot a kernel with CONFIG_SECCOMP_FILTER, or if this has it, \
         report it (`ontime report` collects what is needed)"
    )]
    Filter(#[from] seccompiler::Error),
}

/// Enters the VM's network namespace: its sockets are made in it. Refuses to go on in the host's, and as root. Before
/// any thread is started.
///
/// # Errors
/// [`SandboxError::Network`], [`SandboxError::HostNetwork`], [`SandboxError::Root`]
pub fn enter_network(options: &Options) -> Result<(), SandboxError> {
    if let Some(path) = &options.network {
        let failed = |source| SandboxError::Network { path: path.clone(), source };
        let namespace = std::fs::File::open(path).map_err(failed)?;
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(|error| failed(error.into()))?;
    }
    if in_the_hosts_network(Path::new("/proc/sys/net")) && !options.allow_host_network {
        return Err(SandboxError::HostNetwork);
    }
    if stays_privileged(options) && !options.allow_root {
        return Err(SandboxError::Root);
    }
    Ok(())
}

/// Whether this process is in the host's network namespace, by the sysctls that it sees below `/proc/sys/net`. Some
/// exist in the host's namespace alone. (An unprivileged process may not compare `/proc/1/ns/net`.) Where nothing can
/// be seen it counts as the host's.
fn in_the_hosts_network(sysctls: &Path) -> bool {
    let exists = |name: &str| sysctls.join(name).exists();
    exists("ipv4/tcp_mem") || exists("core/netdev_max_backlog") || !exists("ipv4")
}

/// Whether the process is root or has capabilities once it has become the user that it is to be. To bind ports below
/// 1024 is no more than the policy grants.
fn stays_privileged(options: &Options) -> bool {
    if let Some((user, _)) = options.user {
        return user == 0;
    }
    let harmless = CapabilitySet::NET_BIND_SERVICE;
    // Where the kernel does not tell, it may have them.
    let capable = rustix::thread::capabilities(None).map_or(true, |sets| !harmless.contains(sets.permitted));
    rustix::process::geteuid().is_root() || rustix::process::getuid().is_root() || capable
}

/// Gives up the rest, for this and all later threads. Before any thread is started.
///
/// # Errors
/// [`SandboxError`]
pub fn restrict(options: &Options, sockets: u32) -> Result<(), SandboxError> {
    let system = |what| move |source: rustix::io::Errno| SandboxError::System { what, source: source.into() };
    limits(sockets);
    if let Some((user, group)) = options.user {
        become_user(user, group)?;
    }
    rustix::thread::set_no_new_privs(true).map_err(system("giving up new privileges"))?;
    lock_memory();
    if !options.unfiltered {
        let arch = std::env::consts::ARCH.try_into().map_err(seccompiler::Error::Backend)?;
        let text = FILTERS.replace("\"PID\"", &std::process::id().to_string());
        let filters = seccompiler::compile_from_json(text.as_bytes(), arch)?;
        for filter in NAMES.iter().filter_map(|name| filters.get(*name)) {
            seccompiler::apply_filter_all_threads(filter)?;
        }
    }
    Ok(())
}

/// Keeps memory in RAM, as pages are touched: the guest's memory is mapped later and need not all be here.
fn lock_memory() {
    // With a limit, the guest's memory could not be mapped any more.
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

/// Raises what may be raised; what may not shows itself where it is needed.
fn limits(sockets: u32) {
    // Each socket, and as many again that are closed and not gone.
    let wanted = 2 * u64::from(sockets) + OTHER_DESCRIPTORS;
    for (resource, wanted) in
        [(Resource::Nofile, Some(wanted)), (Resource::Memlock, None), (Resource::Rtprio, Some(99))]
    {
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

/// Becomes another user for good, in every respect; libc's calls act on the whole process.
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
            (crate::peer::Refused::User(64055).to_string(), "run QEMU as that user"),
            (crate::peer::Refused::Process(9).to_string(), "a device process of its own"),
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
