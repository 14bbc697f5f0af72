//! Why reservations are not enforced.

use std::io;

use ontime_tenants::remedy;
use thiserror::Error;

/// Why reservations are not enforced.
#[derive(Debug, Error)]
pub enum PacerError {
    /// The pacers could not be set up.
    #[error("reservations are not kept: {what}: {source}; {}", remedy(source))]
    Setup {
        /// The step that failed.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
    },
    /// The sched_ext scheduler could not be started, or has ended.
    #[error("reservations are not kept: sched_ext: {0}")]
    Ext(String),
    /// The pacers do not answer or have ended.
    #[error(
        "reservations are not kept any more: the pacer threads have ended or do not answer; collect what is needed \
         with `ontime report` and report it"
    )]
    Lost,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn why_reservations_are_not_kept_has_a_remedy() {
        let setup = |what, number| PacerError::Setup { what, source: io::Error::from_raw_os_error(number) };
        for (error, wanted) in [
            (setup("starting a pacer thread", libc::EAGAIN), "; raise the limit of threads (TasksMax= of the unit"),
            (setup("locking memory", libc::ENOMEM), "; free memory on the host, or raise MemoryMax= and LimitMEMLOCK="),
            (PacerError::Lost, "`ontime report`"),
        ] {
            let said = error.to_string();
            assert!(said.starts_with("reservations are not kept") && said.contains(wanted), "{said}");
        }
    }
}
