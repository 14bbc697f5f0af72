//! Without feature `sched-ext` there is no scheduler to load.

use std::os::fd::BorrowedFd;

use ontime_tenants::ThreadId;

use crate::model::{Beyond, PacerError};

/// Cannot exist.
#[derive(Debug)]
pub(crate) enum Scheduler {}

impl Scheduler {
    /// # Errors
    /// Always.
    pub(crate) fn load(_: Beyond) -> Result<Self, PacerError> {
        Err(PacerError::Ext(
            "this ontime is built without it; build it with --features sched-ext, or use backend = \"paced\""
                .to_owned(),
        ))
    }

    pub(crate) fn places(&self) -> Result<BorrowedFd<'_>, PacerError> {
        match *self {}
    }

    pub(crate) fn assign(&self, _: ThreadId, _: usize) -> Result<(), PacerError> {
        match *self {}
    }

    pub(crate) fn remove(&self, _: ThreadId) {
        match *self {}
    }

    pub(crate) fn ended(&self) -> Option<String> {
        match *self {}
    }
}
