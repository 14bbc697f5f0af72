//! Exit statuses ([`ontime_cli`]), and the statuses of this program's own errors.

use std::error::Error;
use std::io;

use ontime_tenants::{ConfigError, remedy};

pub(crate) use ontime_cli::{CONFIG, CRITICAL, Exit, OK, UNKNOWN, USAGE, WARNING, chain, usage};

use crate::client::ClientError;

/// Adds to an error of the system what the program was doing, and a remedy.
pub(crate) trait Doing<T> {
    /// # Errors
    /// What was done on what, the system's error, and the remedy, in one message.
    fn doing(self, what: impl std::fmt::Display) -> anyhow::Result<T>;
}

impl<T, E: Into<io::Error>> Doing<T> for Result<T, E> {
    fn doing(self, what: impl std::fmt::Display) -> anyhow::Result<T> {
        self.map_err(|error| {
            let error = error.into();
            let message = format!("{what}: {error}; {}", remedy(&error));
            anyhow::Error::from(error).context(message)
        })
    }
}

/// The status of an error, if its type determines one.
pub(crate) fn status(cause: &(dyn Error + 'static)) -> Option<u8> {
    if let Some(error) = cause.downcast_ref::<ConfigError>() {
        return Some(of_config(error));
    }
    cause.downcast_ref::<ClientError>().map(|error| match error {
        ClientError::Refused { status: 400, .. } => USAGE,
        ClientError::Refused { status: 422, .. } => CONFIG,
        _ => UNKNOWN,
    })
}

/// A file that may not be read is not known to be wrong, so its status is `UNKNOWN`.
pub(crate) fn of_config(error: &ConfigError) -> u8 {
    match error {
        ConfigError::Read { source, .. } if source.kind() == io::ErrorKind::PermissionDenied => UNKNOWN,
        _ => CONFIG,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_refused_has_its_remedy_once() {
        for (number, wanted) in [
            (24, "/run/x: listening: Too many open files (os error 24); raise the limit of open files"),
            (28, "/run/x: listening: No space left on device (os error 28); make room on that file system"),
            (11, "/run/x: listening: Resource temporarily unavailable (os error 11); raise the limit of threads"),
        ] {
            let refused: Result<(), _> = Err(io::Error::from_raw_os_error(number));
            let said = chain(&refused.doing("/run/x: listening").unwrap_err().context("starting"));
            assert!(said.starts_with(&format!("starting: {wanted}")), "{said}");
            assert_eq!(said.matches("os error").count(), 1, "{said}");
        }
    }

    #[test]
    fn a_status_stands_for_one_kind_of_error() {
        let read = |kind: io::ErrorKind| ConfigError::Read { path: "/etc/ontime/x.toml".into(), source: kind.into() };
        let invalid = ontime_tenants::config::Text::new("x.toml", "a = 1\n").error(&(0..1), "unknown");
        let refused = |status| ClientError::Refused { status, message: "why".to_owned() };
        for (error, wanted) in [
            (anyhow::Error::from(invalid).context("starting"), CONFIG),
            (read(io::ErrorKind::NotFound).into(), CONFIG),
            (read(io::ErrorKind::PermissionDenied).into(), UNKNOWN),
            (refused(400).into(), USAGE),
            (refused(422).into(), CONFIG),
            (refused(403).into(), UNKNOWN),
            (refused(409).into(), UNKNOWN),
        ] {
            assert_eq!(ontime_cli::status(&error, status), wanted, "{error:#}");
        }
    }
}
