//! User names to numbers, through the system's name service.

use std::ffi::CString;

/// The number of a user. `None` if the user does not exist or the name service does not answer.
pub fn number_of(name: &str) -> Option<u32> {
    let name = CString::new(name).ok()?;
    let mut buffer = vec![0 as libc::c_char; 16 * 1024];
    let mut record = std::mem::MaybeUninit::<libc::passwd>::uninit();
    let mut found: *mut libc::passwd = std::ptr::null_mut();
    // SAFETY: all pointers are to live storage, the buffer's length is its own, and the name ends in a zero.
    let failed = unsafe {
        libc::getpwnam_r(name.as_ptr(), record.as_mut_ptr(), buffer.as_mut_ptr(), buffer.len(), &raw mut found)
    };
    if failed != 0 || found.is_null() {
        return None;
    }
    // SAFETY: the call succeeded and `found` is not null, so it has filled the record.
    let record = unsafe { record.assume_init() };
    Some(record.pw_uid)
}

#[cfg(test)]
mod tests {
    #[test]
    fn root_is_zero_and_nobody_else_is_made_up() {
        assert_eq!(super::number_of("root"), Some(0));
        assert_eq!(super::number_of("no such user"), None);
        assert_eq!(super::number_of("zero\0byte"), None);
    }
}
