//! Records what a command that reads the host itself, without the daemon, could not see.
//!
//! Such a command shows what it saw, prints on standard error what it could not see, and ends with [`exit::UNKNOWN`]:
//! an empty table for a user without the necessary rights would be misleading.

use ontime_tenants::{Problem, ProblemKind};

use crate::exit;
use crate::table::visible;

/// The reasons why something could not be seen, one line each.
#[derive(Debug, Default)]
pub struct Missed(Vec<String>);

impl Missed {
    /// What this process cannot see because it lacks rights, before it reads anything.
    pub fn rights() -> Self {
        let own = rustix::process::geteuid();
        Self::of_user(own.as_raw())
    }

    fn of_user(uid: u32) -> Self {
        let why = || {
            format!("user {uid} sees neither other users' processes nor all of the kernel's settings; run this as root")
        };
        Self((uid != 0).then(why).into_iter().collect())
    }

    /// Adds what discovery could not read.
    pub fn and(mut self, problems: &[Problem]) -> Self {
        let unread = problems.iter().filter(|problem| matches!(problem.kind, ProblemKind::Unreadable(_)));
        self.0.extend(unread.map(ToString::to_string));
        self
    }

    /// Adds a reason.
    pub fn also(mut self, why: impl ToString) -> Self {
        self.0.push(why.to_string());
        self
    }

    /// Whether everything could be seen.
    pub fn is_none(&self) -> bool {
        self.0.is_empty()
    }

    /// Prints the reasons on standard error. Returns `status` if there are none, else [`exit::UNKNOWN`].
    pub fn tell(&self, status: u8) -> u8 {
        for why in &self.0 {
            eprintln!("ontime: not seen: {}", visible(why));
        }
        if self.is_none() { status } else { exit::UNKNOWN }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_that_missed_something_is_unknown_whatever_it_found() {
        assert!(Missed::of_user(0).is_none());
        assert_eq!(Missed::of_user(0).tell(exit::CRITICAL), exit::CRITICAL);
        for uid in [1, 65_534] {
            let missed = Missed::of_user(uid);
            assert!(missed.0.iter().any(|why| why.contains(&format!("user {uid}")) && why.contains("as root")));
            for status in [exit::OK, exit::WARNING, exit::CRITICAL] {
                assert_eq!(missed.tell(status), exit::UNKNOWN);
            }
        }
        let problem = |kind| Problem { subject: "/proc".to_owned(), kind };
        let same_name = problem(ProblemKind::SameName);
        assert!(Missed::default().and(std::slice::from_ref(&same_name)).is_none());
        let unread = problem(ProblemKind::Unreadable("permission denied".to_owned()));
        assert!(!Missed::default().and(&[same_name, unread]).is_none());
        assert!(!Missed::default().also("no daemon").is_none());
    }
}
