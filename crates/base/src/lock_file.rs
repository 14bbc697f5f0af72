//! Lock files. Every process that can open a file can lock it (`flock(2)`), also if it may only read it. So a lock file
//! that other users can read lets each of them keep a program of root's from starting.

use std::fs::{File, Permissions};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Opens a lock file, or makes it, for this process's user alone, whatever the umask. One that is there already is
/// closed to other users.
///
/// # Errors
/// The kernel's error.
pub fn open(path: &Path) -> io::Result<File> {
    let file = File::options().read(true).write(true).create(true).truncate(false).mode(0o600).open(path)?;
    file.set_permissions(Permissions::from_mode(0o600))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_other_user_can_open_and_so_hold_a_lock_file() {
        let dir = tempfile::tempdir().unwrap();
        for (name, was) in [("new", None), ("readable", Some(0o644)), ("writable", Some(0o666))] {
            let path = dir.path().join(name);
            if let Some(mode) = was {
                std::fs::write(&path, "77\n").unwrap();
                std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            }
            let file = open(&path).unwrap();
            assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o600, "{name}");
            assert_eq!(std::fs::read_to_string(&path).unwrap().is_empty(), was.is_none(), "{name}: it is not emptied");
        }
    }
}
