//! `ontime device`: the host side of one VM's outsourced sockets (run by ontime-device@VM.service).

use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use ontime_sockets::{Options, config, sandbox};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::paths::Paths;
use crate::{exit, log};

/// `ontime device`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// The VM: its table in sockets.toml, and its directory in /run/ontime/device.
    #[arg(long, value_name = "NAME", value_parser = vm_name)]
    vm: String,
    /// Network namespace of the VM's sockets: a name in /run/netns, or a file. Needs root; without it, the process
    /// stays where its service manager put it.
    #[arg(long, value_name = "NETNS")]
    netns: Option<PathBuf>,
    /// Change to this user and group after the steps that need root.
    #[arg(long, value_name = "UID:GID", value_parser = user)]
    user: Option<(u32, u32)>,
    /// The group that may connect to the sockets for QEMU: QEMU's own, such as 64055 for libvirt-qemu.
    #[arg(long, value_name = "GID")]
    group: Option<u32>,
    /// Serve as root, or with capabilities: a guest that takes this process over then has them. For tests.
    #[arg(long)]
    allow_root: bool,
    /// Serve in the host's own network namespace, where the guest reaches what the host does. For tests.
    #[arg(long)]
    allow_host_network: bool,
    /// Run without the system call filter, to find calls that it should allow.
    #[arg(long, hide = true)]
    unfiltered: bool,
}

/// Checks that a name is a single component of a path.
pub(crate) fn vm_name(text: &str) -> Result<String, String> {
    let fine = !text.is_empty() && text.len() <= 64 && !text.starts_with('.') && !text.contains(['/', '\0']);
    if fine {
        Ok(text.to_owned())
    } else {
        Err("a VM's name has 1 to 64 characters, no '/', and no '.' first".to_owned())
    }
}

/// Connects to a socket of a VM's device process. Its directory belongs to the process's user, who could put a link in
/// the socket's place: to another VM's device process, which takes root for the daemon, or to another program.
///
/// # Errors
/// The kernel's error, or InvalidInput where the file itself is no socket.
pub(crate) fn connect(path: &Path, flags: SocketFlags) -> io::Result<UnixStream> {
    let file = rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::Socket {
        let what = "a link or another file is in the place of its socket; remove it and restart the device process";
        return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
    }
    let flags = flags | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The file that was looked at.
    let path = format!("/proc/thread-self/fd/{}", file.as_raw_fd());
    rustix::net::connect(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(UnixStream::from(socket))
}

fn user(text: &str) -> Result<(u32, u32), String> {
    let numbers = text.split_once(':').and_then(|(user, group)| Some((user.parse().ok()?, group.parse().ok()?)));
    numbers.ok_or_else(|| "written UID:GID, both numbers".to_owned())
}

/// Serves the VM until QEMU disconnects.
///
/// # Errors
/// Where the configuration is wrong, or the process cannot serve.
pub(crate) fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    log::start();
    let vm = config::load(&paths.config_dir, &args.vm)?.unwrap_or_else(|| {
        tracing::warn!(
            vm = args.vm,
            "no table [vm.{}] in {}/sockets.toml, so everything is denied; write the table, or correct the \
             name behind --vm, and start the VM again",
            args.vm,
            paths.config_dir.display()
        );
        config::Vm::default()
    });
    let network = args
        .netns
        .as_ref()
        .map(|netns| if netns.is_absolute() { netns.clone() } else { PathBuf::from("/run/netns").join(netns) });
    let sandbox = sandbox::Options {
        network,
        user: args.user,
        group: args.group,
        unfiltered: args.unfiltered,
        allow_root: args.allow_root,
        allow_host_network: args.allow_host_network,
    };
    let device_paths = ontime_sockets::Paths::new(&paths.run_dir, &args.vm);
    ontime_sockets::run(&Options { name: args.vm.clone(), vm, paths: device_paths, sandbox })?;
    Ok(ExitCode::from(exit::OK))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_link_in_the_place_of_a_socket_leads_nowhere() {
        let dir = tempfile::tempdir().unwrap();
        let [own, link, file] = ["own.sock", "link.sock", "file.sock"].map(|name| dir.path().join(name));
        let listener = UnixListener::bind(&own).unwrap();
        listener.set_nonblocking(true).unwrap();
        std::os::unix::fs::symlink(&own, &link).unwrap();
        std::fs::write(&file, "").unwrap();
        for path in [&link, &file] {
            assert_eq!(connect(path, SocketFlags::empty()).unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
        assert!(listener.accept().is_err(), "nobody has connected");
        assert!(connect(&own, SocketFlags::empty()).is_ok() && listener.accept().is_ok());
    }

    #[test]
    fn names_stay_in_their_directory() {
        assert!(vm_name("web-1").is_ok());
        for name in ["", ".", "..", "a/b", "../a", ".hidden"] {
            assert!(vm_name(name).is_err(), "{name:?}");
        }
        assert_eq!(user("64055:108"), Ok((64055, 108)));
        assert!(user("root").is_err() && user("1").is_err());
    }
}
