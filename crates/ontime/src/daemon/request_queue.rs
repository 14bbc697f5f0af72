//! Which request the main loop answers next: users take turns, and each has a part of the loop's time. Pure, but for
//! the counts of waiting requests, which the HTTP thread and the main loop share, and of open connections.
//!
//! In: requests with their user, and how long each answer took. Out: the next request, or when there is one. A request
//! may cost a pass, so without this a user who may only read could keep all others waiting. Root is trusted.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ontime_tenants::turns::Turns;

/// The most requests that wait: of one user; of users who have one waiting already; of all users but root; of root.
const OWN: usize = 8;
const SHARED: usize = 32;
const MOST: usize = 56;
const ROOTS: usize = 32;
/// For each request that may wait, this many connections may be open.
const CONNECTIONS: usize = 4;
/// The most requests that wait.
pub(super) const BACKLOG: usize = MOST + ROOTS;
/// Answers to a user take at most one part in this of the time, once they have taken [`BURST`].
const PART: u32 = 4;
const BURST: Duration = Duration::from_secs(2);

/// The client's user. None: the kernel does not know it, or it is a client of the metrics' TCP port.
pub(super) type User = Option<u32>;

const ROOT: User = Some(0);

/// How many requests of each user wait, or how many connections of each user are open.
#[derive(Debug, Clone)]
pub(super) struct UserCounts {
    all: Arc<Mutex<BTreeMap<User, usize>>>,
    /// How many count as one.
    each: usize,
}

/// A request or connection counts until this is dropped.
#[derive(Debug)]
pub(crate) struct UserGuard {
    counts: UserCounts,
    user: User,
}

impl UserCounts {
    /// Counts requests that wait.
    pub(super) fn of_requests() -> Self {
        Self { all: Arc::default(), each: 1 }
    }

    /// Counts open connections.
    pub(super) fn of_connections() -> Self {
        Self { each: CONNECTIONS, ..Self::of_requests() }
    }

    /// Counts one more. None: there are too many.
    pub(super) fn take(&self, user: User) -> Option<UserGuard> {
        let mut all = self.all.lock().unwrap_or_else(PoisonError::into_inner);
        let own = all.get(&user).copied().unwrap_or(0);
        let others: usize = all.iter().filter(|(other, _)| **other != ROOT).map(|(_, count)| count).sum();
        let fits = match own {
            _ if user == ROOT => own < ROOTS * self.each,
            0 => others < MOST * self.each,
            _ => own < OWN * self.each && others < SHARED * self.each,
        };
        fits.then(|| {
            *all.entry(user).or_default() += 1;
            UserGuard { counts: self.clone(), user }
        })
    }
}

impl Drop for UserGuard {
    fn drop(&mut self) {
        let mut all = self.counts.all.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = all.get_mut(&self.user) {
            *count -= 1;
        }
        all.retain(|_, count| *count > 0);
    }
}

/// Waiting requests, and the time that answers took.
pub(super) type RequestQueue<Request> = Turns<User, Request>;

/// Nothing waits.
pub(super) fn request_queue<Request>() -> RequestQueue<Request> {
    Turns::new(PART, BURST, Some(ROOT))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;

    #[test]
    fn a_user_with_many_requests_delays_another_users_by_one() {
        let (mut queue, now) = (request_queue(), Instant::now());
        for number in 0..20 {
            queue.push(Some(1000), number);
        }
        queue.push(Some(1001), 100);
        queue.push(None, 200);
        queue.push(ROOT, 300);
        let order: Vec<i32> = std::iter::from_fn(|| queue.next(now).map(|(_, request)| request)).collect();
        assert_eq!(order[..6], [0, 100, 200, 300, 1, 2]);
        assert!(order.len() == 23 && queue.due_in(now).is_none());
    }

    /// Four users and root always have a request; each answer takes as long as a pass on a busy host.
    #[test]
    fn no_user_has_more_than_a_part_of_the_loops_time() {
        let answer = Duration::from_millis(100);
        let served = |users: &[User]| {
            let (mut queue, start) = (request_queue(), Instant::now());
            let (mut now, mut served) = (start, BTreeMap::<User, u32>::new());
            users.iter().for_each(|user| queue.push(*user, ()));
            while now < start + Duration::from_secs(100) {
                match queue.next(now) {
                    Some((user, ())) => {
                        now += answer;
                        queue.charge(user, answer, now);
                        *served.entry(user).or_default() += 1;
                        queue.push(user, ());
                    }
                    None => now += queue.due_in(now).unwrap().max(Duration::from_nanos(1)),
                }
            }
            served
        };
        let alone = served(&[Some(1000)])[&Some(1000)];
        assert!((250..=280).contains(&alone), "{alone} answers in 100 s");
        assert_eq!(served(&[ROOT])[&ROOT], 1000);
        let together = served(&[Some(1000), Some(1001), None, Some(1002), ROOT]);
        assert!(together.values().all(|count| (190..=280).contains(count)), "{together:?}");
    }

    #[test]
    fn users_with_many_requests_leave_a_place_for_every_other_user() {
        let counts = UserCounts::of_requests();
        let mut kept = Vec::new();
        for user in 1..=4 {
            kept.extend((0..OWN + 3).filter_map(|_| counts.take(Some(user))));
        }
        assert_eq!(kept.len(), 4 * OWN);
        for user in (1000..).take(MOST - SHARED) {
            kept.push(counts.take(Some(user)).unwrap());
            assert!(counts.take(Some(user)).is_none(), "a second one");
        }
        assert!(counts.take(None).is_none());
        kept.extend((0..ROOTS).map(|_| counts.take(ROOT).unwrap()));
        assert!(counts.take(ROOT).is_none() && kept.len() == BACKLOG);
        kept.clear();
        assert!(counts.all.lock().unwrap().is_empty() && counts.take(Some(7)).is_some());
    }
}
