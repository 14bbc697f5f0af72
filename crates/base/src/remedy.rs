//! Remedies for errors of the operating system, as the end of a message.

use std::io;

/// Cause and remedy of an error that means the same whatever was asked of the kernel: a limit is reached.
pub fn of_limits(error: &io::Error) -> Option<(&'static str, &'static str)> {
    Some(match error.raw_os_error()? {
        libc::EMFILE => (
            "this process has as many files open as it may",
            "raise the limit of open files (LimitNOFILE= of the unit, ulimit -n)",
        ),
        libc::ENFILE => {
            ("the host has too many files open", "raise the host's limit of open files (sysctl fs.file-max)")
        }
        libc::ENOMEM | libc::ENOBUFS => (
            "the kernel has no memory for it",
            "free memory on the host, or raise MemoryMax= and LimitMEMLOCK= of the unit",
        ),
        _ => return None,
    })
}

/// What to do about an OS error. If its errno is not conclusive, the remedy is to report it.
pub fn remedy(error: &io::Error) -> &'static str {
    remedy_for(error, rustix::process::geteuid().is_root())
}

fn remedy_for(error: &io::Error, root: bool) -> &'static str {
    if let Some((_, remedy)) = of_limits(error) {
        return remedy;
    }
    let of_kind = match error.kind() {
        io::ErrorKind::TimedOut | io::ErrorKind::WriteZero | io::ErrorKind::UnexpectedEof => Some("try again"),
        io::ErrorKind::InvalidData => Some("move the file away, or write it anew"),
        _ => None,
    };
    match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) if root => {
            "this is root without that right: run it on the host, not in a container, with the capabilities of \
             ontimed.service"
        }
        Some(libc::EPERM | libc::EACCES) => "run it as root, or as a user who has that right",
        Some(libc::EAGAIN) => "raise the limit of threads (TasksMax= of the unit, ulimit -u)",
        Some(libc::ENOSPC | libc::EDQUOT) => "make room on that file system, or choose another place",
        Some(libc::EROFS) => "choose a place that is not read-only (ReadWritePaths= of the unit)",
        Some(libc::ENOENT) => "make what is missing in that path, or correct the path",
        Some(libc::ENOTDIR) => "correct the path: a part of it that should be a directory is a file",
        Some(libc::EISDIR) => "name a file: a directory has that path",
        Some(libc::EEXIST) => "remove what has that path, or choose another",
        Some(libc::ENAMETOOLONG) => "choose a shorter path",
        Some(libc::EADDRINUSE) => "end the process that has that address (`ss -lp` names it), or choose another",
        Some(libc::EADDRNOTAVAIL) => "give an address that this host has",
        Some(libc::ENOSYS | libc::EOPNOTSUPP | libc::ENOPROTOOPT) => "boot a kernel that has this ability",
        _ => of_kind.unwrap_or("if it happens again, report it: `ontime report` collects what is needed"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_refusal_of_the_system_has_its_remedy() {
        for (number, root, wanted) in [
            (libc::EMFILE, true, "LimitNOFILE="),
            (libc::ENFILE, false, "fs.file-max"),
            (libc::EAGAIN, true, "TasksMax="),
            (libc::ENOMEM, true, "LimitMEMLOCK="),
            (libc::ENOBUFS, false, "free memory"),
            (libc::EDQUOT, true, "make room"),
            (libc::EROFS, true, "ReadWritePaths="),
            (libc::ENOTDIR, false, "is a file"),
            (libc::EADDRINUSE, true, "ss -lp"),
            (libc::EADDRNOTAVAIL, true, "that this host has"),
            (libc::EOPNOTSUPP, true, "boot a kernel"),
            (libc::EACCES, false, "run it as root"),
            (libc::EPERM, true, "not in a container"),
            (libc::EIO, true, "`ontime report`"),
        ] {
            let said = remedy_for(&io::Error::from_raw_os_error(number), root);
            assert!(said.contains(wanted), "error {number}: {said}");
            assert!(!root || !said.contains("as root"), "root is not told to become root: {said}");
        }
        assert_eq!(remedy_for(&io::ErrorKind::TimedOut.into(), true), "try again");
    }
}
