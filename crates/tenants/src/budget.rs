//! Limits on the time that one discovery pass spends on other users' processes.
//!
//! A process decides how many descriptors and threads it has and how long its command line is. The amount that is read
//! is limited per process, per account (bulk tenants of one user or in one container, [`Account`]), and for all
//! accounts together. A small tenant is still read completely when the last limit is used up ([`Limits::least`]). Parts
//! that were not read are counted and reported once per account.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use crate::text::counted;

/// Kinds of data whose amount a process decides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Item {
    /// Processes that may be VMs. Beyond the limit, nothing of a process is read.
    Processes,
    /// Open descriptors, searched for virtual NICs and KVM's files.
    Descriptors,
    /// Threads.
    Threads,
    /// Threads of a new process of any program, searched for a vCPU.
    NewThreads,
    /// Command line, bytes.
    CommandLine,
    /// Interfaces in its network namespace.
    Links,
}

impl fmt::Display for Item {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Item::Processes => "everything",
            Item::Descriptors => "descriptors",
            Item::Threads => "threads",
            Item::NewThreads => "threads of new processes",
            Item::CommandLine => "command lines",
            Item::Links => "network interfaces",
        })
    }
}

/// Limits of an item in one pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// For one process, of any user.
    pub(crate) process: usize,
    /// For all processes of an account.
    pub(crate) account: usize,
    /// For all accounts.
    pub(crate) all: usize,
    /// Read of each process even if the other limits are used up.
    pub(crate) least: usize,
}

/// For comparison: a QEMU with 256 vCPUs and as many queues has about 2,000 descriptors, 600 threads and 20 KiB of
/// command line.
pub(crate) const fn limits(item: Item) -> Limits {
    match item {
        // Other accounts cannot use this up: a VM whose process is not read would not be a tenant.
        Item::Processes => Limits { process: 1, account: 1024, all: usize::MAX, least: 0 },
        Item::Descriptors => Limits { process: 4096, account: 1024, all: 16_384, least: 64 },
        Item::Threads => Limits { process: 4096, account: 1024, all: 16_384, least: 32 },
        // Without this a VM is found when its guest has run for a clock tick.
        Item::NewThreads => Limits { process: 16, account: 1024, all: 16_384, least: 0 },
        Item::CommandLine => Limits { process: 256 << 10, account: 256 << 10, all: 1 << 20, least: 4096 },
        Item::Links => Limits { process: 1024, account: 2048, all: 8192, least: 64 },
    }
}

/// The account that the reading is charged to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Account {
    /// The system and RT tenants, which the administrator chose: only the limits per process apply.
    System,
    /// A user's processes.
    User(u32),
    /// The processes in a container (its cgroup), of all its users.
    Container(String),
}

impl fmt::Display for Account {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Account::System => f.write_str("the system"),
            Account::User(user) => write!(f, "user {user}"),
            Account::Container(cgroup) => f.write_str(cgroup),
        }
    }
}

/// Time spent on each account. It differs in every pass and is ignored in comparisons.
#[derive(Debug, Clone, Default)]
pub struct Costs(pub BTreeMap<Account, Duration>);

impl PartialEq for Costs {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

/// What the current pass has read so far.
#[derive(Debug, Default)]
pub(crate) struct Budget {
    costs: Costs,
    /// When the item that is being read was allowed.
    since: Cell<Option<Instant>>,
    read: BTreeMap<(Account, Item), usize>,
    all: BTreeMap<Item, usize>,
    cut: BTreeMap<Account, BTreeMap<Item, usize>>,
}

impl Budget {
    /// How much of an item may be read of the next process. The time until [`Self::charge`] counts for the account.
    pub(crate) fn allowed(&self, account: &Account, item: Item) -> usize {
        self.since.set(Some(Instant::now()));
        let limits = limits(item);
        if *account == Account::System {
            return limits.process;
        }
        let read = self.read.get(&(account.clone(), item)).copied().unwrap_or(0);
        let all = self.all.get(&item).copied().unwrap_or(0);
        let left = limits.account.saturating_sub(read).min(limits.all.saturating_sub(all));
        left.max(limits.least).min(limits.process)
    }

    /// Whether a process that may be a VM is read.
    pub(crate) fn admits(&mut self, account: &Account) -> bool {
        let admitted = self.allowed(account, Item::Processes);
        self.charge(account, Item::Processes, admitted, admitted > 0);
        admitted > 0
    }

    /// Records that `count` units of an item were read of a process; `whole`: that was everything.
    pub(crate) fn charge(&mut self, account: &Account, item: Item, count: usize, whole: bool) {
        if let Some(since) = self.since.take() {
            *self.costs.0.entry(account.clone()).or_default() += since.elapsed();
        }
        if *account != Account::System {
            *self.read.entry((account.clone(), item)).or_default() += count;
            *self.all.entry(item).or_default() += count;
        }
        if !whole {
            *self.cut.entry(account.clone()).or_default().entry(item).or_default() += 1;
        }
    }

    /// Takes the time spent per account.
    pub(crate) fn costs(&mut self) -> Costs {
        std::mem::take(&mut self.costs)
    }

    /// For each account, a text that lists what was not read completely.
    pub(crate) fn unread(&self) -> impl Iterator<Item = (&Account, String)> {
        self.cut.iter().map(|(account, items)| {
            let told = |(item, processes): (&Item, &usize)| format!("{item} of {}", counted(*processes, "process"));
            let items: Vec<String> = items.iter().map(told).collect();
            (account, items.join(", "))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads processes that each have `has` units of an item; returns the total that was read.
    fn read(budget: &mut Budget, account: &Account, item: Item, processes: usize, has: usize) -> usize {
        let mut total = 0;
        for _ in 0..processes {
            let count = budget.allowed(account, item).min(has);
            budget.charge(account, item, count, count == has);
            total += count;
        }
        total
    }

    #[test]
    fn many_processes_of_one_user_cost_as_much_as_one() {
        for (item, has) in [(Item::Descriptors, 19_900), (Item::Threads, 30_000), (Item::CommandLine, 2 << 20)] {
            let mut budget = Budget::default();
            let limits = limits(item);
            let total = read(&mut budget, &Account::User(1000), item, 100, has);
            assert!(total <= limits.account + 100 * limits.least, "{item}: {total}");
            let unread: Vec<_> = budget.unread().collect();
            assert_eq!(unread, [(&Account::User(1000), format!("{item} of 100 processes"))]);
        }
    }

    #[test]
    fn processes_beyond_a_users_number_are_not_read_and_no_other_users_are() {
        let mut budget = Budget::default();
        let of = |budget: &mut Budget, account: &Account| (0..3_000).filter(|_| budget.admits(account)).count();
        for user in 1..20 {
            assert_eq!(of(&mut budget, &Account::User(user)), 1_024, "user {user}");
        }
        assert_eq!(of(&mut budget, &Account::System), 3_000);
        assert_eq!(budget.unread().count(), 19);
        assert!(budget.unread().all(|(_, what)| what == "everything of 1976 processes"));
    }

    #[test]
    fn many_accounts_share_a_limit_and_leave_the_system_its_own() {
        let (mut budget, item) = (Budget::default(), Item::Threads);
        let limits = limits(item);
        let accounts = (0..500).map(|number| Account::Container(format!("/docker-{number}.scope")));
        let total: usize = accounts.map(|account| read(&mut budget, &account, item, 1, 100_000)).sum();
        assert!(total <= limits.all + 500 * limits.least, "{total}");
        assert_eq!(read(&mut budget, &Account::User(5), item, 1, 30), 30, "a small one is read whole");
        assert_eq!(read(&mut budget, &Account::System, item, 20, 3000), 60_000);
        assert_eq!(budget.unread().count(), 500);
    }

    #[test]
    fn reading_is_charged_to_the_account_that_it_is_for() {
        let mut budget = Budget::default();
        let (user, container) = (Account::User(1000), Account::Container("/a.scope".to_owned()));
        for (account, wait) in [(&user, 2), (&container, 0), (&user, 2)] {
            budget.allowed(account, Item::Threads);
            std::thread::sleep(Duration::from_millis(wait));
            budget.charge(account, Item::Threads, 1, true);
        }
        // Not allowed before, so no time is charged.
        budget.charge(&Account::System, Item::Threads, 1, true);
        let Costs(costs) = budget.costs();
        assert!(costs.keys().eq([&user, &container]) && costs[&user] >= Duration::from_millis(4), "{costs:?}");
        assert!(budget.costs().0.is_empty());
    }

    #[test]
    fn what_is_read_whole_is_not_reported() {
        let mut budget = Budget::default();
        for user in 1..20 {
            read(&mut budget, &Account::User(user), Item::Descriptors, 3, 200);
        }
        assert_eq!(budget.unread().count(), 0);
    }
}
