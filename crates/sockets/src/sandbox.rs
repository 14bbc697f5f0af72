//! What the device process gives up before it meets the guest: other networks, privileges, system calls.

use std::os::fd::AsFd;
use std::path::PathBuf;

use rustix::process::{Resource, Rlimit};
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use thiserror::Error;

/// The filter: seccompiler's JSON, every system call with its reason.
const FILTER: &str = include_str!("seccomp.json");
/// The filter's name in it.
const FILTER_NAME: &str = "device";
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
}

/// Rights could not be given up.
#[derive(Debug, Error)]
pub enum SandboxError {
    /// No such namespace, or no right to enter it.
    #[error("network namespace {}: {source}; make it with `ip netns add`, and start as root or let systemd set it", .path.display())]
    Network {
        /// Which.
        path: PathBuf,
        /// The kernel's word.
        source: std::io::Error,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// Doing what.
        what: &'static str,
        /// The kernel's word.
        source: std::io::Error,
    },
    /// The filter is wrong for this build.
    #[error("the system call filter: {0}")]
    Filter(#[from] seccompiler::Error),
}

/// Enters the VM's network namespace: its sockets are made in it. Before any thread is started.
///
/// # Errors
/// [`SandboxError::Network`]
pub fn enter_network(options: &Options) -> Result<(), SandboxError> {
    if let Some(path) = &options.network {
        let failed = |source| SandboxError::Network { path: path.clone(), source };
        let namespace = std::fs::File::open(path).map_err(failed)?;
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
            .map_err(|error| failed(error.into()))?;
    } else if in_the_hosts_network() {
        tracing::warn!(
            "the VM's sockets are in the host's own network namespace; give the VM one of its own (--netns)"
        );
    }
    Ok(())
}

fn in_the_hosts_network() -> bool {
    let network = |process: &str| std::fs::read_link(format!("/proc/{process}/ns/net")).ok();
    network("1").is_some_and(|host| Some(host) == network("self"))
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
        let filters = seccompiler::compile_from_json(FILTER.as_bytes(), arch)?;
        if let Some(filter) = filters.get(FILTER_NAME) {
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
        tracing::warn!("memory is not locked: {}", std::io::Error::last_os_error());
    }
}

/// Raises what may be raised; what may not shows itself where it is needed.
fn limits(sockets: u32) {
    let wanted = u64::from(sockets) + OTHER_DESCRIPTORS;
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
                tracing::warn!("only {:?} descriptors are allowed, {wanted:?} wanted; raise LimitNOFILE=", now.maximum);
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

    #[test]
    fn the_filter_compiles_and_every_call_has_its_reason() {
        let arch = std::env::consts::ARCH.try_into().unwrap();
        let filters = seccompiler::compile_from_json(FILTER.as_bytes(), arch).unwrap();
        assert!(filters.contains_key(FILTER_NAME));
        let json: serde_json::Value = serde_json::from_str(FILTER).unwrap();
        for rule in json[FILTER_NAME]["filter"].as_array().unwrap() {
            assert!(rule["comment"].as_str().is_some_and(|reason| reason.len() > 10), "{rule}: no reason");
        }
    }
}
