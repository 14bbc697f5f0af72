//! User names to numbers, through the system's name service.

use std::ffi::{CStr, CString};
use std::io;

use crate::remedy;

/// The number of a user.
///
/// # Errors
/// A sentence with the reason and the remedy: the user does not exist, or the name service could not tell.
pub fn number_of(name: &str) -> Result<u32, String> {
    let absent = || format!("user `{name}` is not in /etc/passwd; give an existing name, or the number");
    let found = CString::new(name).map_or(Ok(None), |name| look_up(&name));
    found
        .map_err(|error| format!("user `{name}` could not be looked up: {error}; {}", remedy(&error)))?
        .ok_or_else(absent)
}

/// The user's number; none if the name service says that there is no such user.
fn look_up(name: &CStr) -> io::Result<Option<u32>> {
    let mut buffer = vec![0 as libc::c_char; 16 * 1024];
    let mut record = std::mem::MaybeUninit::<libc::passwd>::uninit();
    let mut found: *mut libc::passwd = std::ptr::null_mut();
    // SAFETY: all pointers are to live storage, the buffer's length is its own, and the name ends in a zero.
    let failed = unsafe {
        libc::getpwnam_r(name.as_ptr(), record.as_mut_ptr(), buffer.as_mut_ptr(), buffer.len(), &raw mut found)
    };
    if failed != 0 || found.is_null() {
        return without_record(failed);
    }
    // SAFETY: the call succeeded and `found` is not null, so it has filled the record.
    let record = unsafe { record.assume_init() };
    Ok(Some(record.pw_uid))
}

/// The meaning of a look-up without a record (`man getpwnam_r`: all of these may be returned for an absent user).
fn without_record(code: libc::c_int) -> io::Result<Option<u32>> {
    match code {
        0 | libc::ENOENT | libc::ESRCH | libc::EBADF | libc::EPERM => Ok(None),
        code => Err(io::Error::from_raw_os_error(code)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_is_zero_and_nobody_else_is_made_up() {
        assert_eq!(number_of("root"), Ok(0));
        for name in ["no such user", "zero\0byte"] {
            let why = number_of(name).unwrap_err();
            assert!(why.contains("is not in /etc/passwd"), "{why}");
        }
    }

    #[test]
    fn a_name_service_that_could_not_tell_does_not_deny_the_user() {
        for absent in [0, libc::ENOENT, libc::ESRCH] {
            assert_eq!(without_record(absent).unwrap(), None);
        }
        for failed in [libc::EMFILE, libc::EIO, libc::ERANGE] {
            assert_eq!(without_record(failed).unwrap_err().raw_os_error(), Some(failed));
        }
    }
}
