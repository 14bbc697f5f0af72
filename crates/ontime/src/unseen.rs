//! Records what a command, or the daemon that it asked, could not see.
//!
//! Such a command shows what was seen, prints on standard error what was not, and ends with [`exit::UNKNOWN`]: an empty
//! table for a user without the necessary rights would be misleading.

use ontime_cli::print_stderr;
use textwrap::fill;

use crate::table::{visible, wrapping};
use crate::{api, exit};

/// The reasons why something could not be seen, one line each.
#[derive(Debug, Default)]
pub(crate) struct Unseen(Vec<String>);

impl Unseen {
    /// What this process cannot see because it lacks rights, before it reads anything.
    pub(crate) fn rights() -> Self {
        let own = rustix::process::geteuid();
        Self::of_user(own.as_raw())
    }

    fn of_user(uid: u32) -> Self {
        let why = || {
            format!("user {uid} sees neither other users' processes nor all of the kernel's settings; run this as root")
        };
        Self((uid != 0).then(why).into_iter().collect())
    }

    /// Adds what discovery could not see (`view::unseen`).
    pub(crate) fn and(self, unseen: &[api::Problem]) -> Self {
        unseen.iter().fold(self, |missed, one| missed.also(format!("{}: {}", one.subject, one.message)))
    }

    /// Adds a reason.
    pub(crate) fn also(mut self, why: impl ToString) -> Self {
        let why = why.to_string();
        if !self.0.contains(&why) {
            self.0.push(why);
        }
        self
    }

    /// Whether everything could be seen.
    pub(crate) fn is_none(&self) -> bool {
        self.0.is_empty()
    }

    /// Prints the reasons on standard error. Returns `status` if there are none, else [`exit::UNKNOWN`].
    pub(crate) fn print(&self, status: u8) -> u8 {
        if self.is_none() {
            return status;
        }
        print_stderr(self.text().trim_end());
        exit::UNKNOWN
    }

    /// The reasons, wrapped. A long path stays whole, on the line that it begins.
    fn text(&self) -> String {
        let options = wrapping().break_words(false).initial_indent("ontime: not seen: ").subsequent_indent("  ");
        self.0.iter().map(|why| fill(&visible(why), &options) + "\n").collect()
    }
}

#[cfg(test)]
mod tests {
    use ontime_tenants::{Discovery, Problem, ProblemKind};

    use super::*;
    use crate::daemon::view::unseen;
    use crate::table::WIDTH;

    #[test]
    fn a_look_that_missed_something_is_unknown_whatever_it_found() {
        assert!(Unseen::of_user(0).is_none());
        assert_eq!(Unseen::of_user(0).print(exit::CRITICAL), exit::CRITICAL);
        for uid in [1, 65_534] {
            let missed = Unseen::of_user(uid);
            assert!(missed.0.iter().any(|why| why.contains(&format!("user {uid}")) && why.contains("as root")));
            for status in [exit::OK, exit::WARNING, exit::CRITICAL] {
                assert_eq!(missed.print(status), exit::UNKNOWN);
            }
        }
        assert!(!Unseen::default().also("no daemon").is_none());
    }

    #[test]
    fn a_long_reason_is_wrapped_and_a_path_is_not() {
        let text = Unseen::of_user(1000).text();
        assert_eq!(text.lines().count(), 2, "{text}");
        assert!(text.lines().all(|line| line.len() <= WIDTH), "{text}");
        let path = format!("/docker/{}", "7f".repeat(32));
        let text = Unseen::default().also(format!("{path}: one process\u{1b}[2J of a container by cgroup v1")).text();
        let wanted = format!("ontime: not seen: {path}:\n  one process\u{fffd}[2J of a container by cgroup v1\n");
        assert_eq!(text, wanted);
        let both = Unseen::of_user(7).also("short").text();
        assert!(both.ends_with("\nontime: not seen: short\n"), "{both}");
    }

    #[test]
    fn what_hides_tenants_is_missed_and_no_other_problem() {
        let found = |kinds: &[ProblemKind], incomplete: Option<&str>| {
            let problem = |kind: &ProblemKind| Problem { subject: "/docker/7".to_owned(), kind: kind.clone() };
            let problems = kinds.iter().map(problem).collect();
            Discovery { problems, incomplete: incomplete.map(str::to_owned), ..Discovery::default() }
        };
        let unread = ProblemKind::Unreadable("permission denied".to_owned());
        for (kinds, incomplete, words) in [
            (&[ProblemKind::SameName][..], None, &[][..]),
            (&[ProblemKind::RuntimeUnknown, ProblemKind::StaleDomain(7)], None, &[]),
            (std::slice::from_ref(&unread), None, &["/docker/7: permission denied"]),
            (&[ProblemKind::SameName, ProblemKind::CgroupV1(3)], None, &["/docker/7: 3 processes"]),
            (&[unread.clone(), ProblemKind::CgroupV1(1)], Some("x"), &["permission denied", "/docker/7: 1 process"]),
            (&[ProblemKind::NoOwnCgroup("/plc/x".to_owned())], None, &["/docker/7: this container is no tenant"]),
            (&[ProblemKind::CgroupV1(3)], Some("x"), &["/docker/7: 3 processes", "host: x"]),
            (&[], Some("/proc: Too many open files"), &["host: /proc: Too many open files"]),
        ] {
            let missed = Unseen::default().and(&unseen(&found(kinds, incomplete)));
            assert_eq!(missed.0.len(), words.len(), "{missed:?}");
            assert!(missed.0.iter().zip(words).all(|(said, words)| said.contains(words)), "{missed:?}");
            assert!(missed.text().lines().all(|line| line.len() <= WIDTH), "{}", missed.text());
            assert_eq!(missed.print(exit::WARNING), if words.is_empty() { exit::WARNING } else { exit::UNKNOWN });
        }
    }
}
