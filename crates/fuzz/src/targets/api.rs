//! Requests on the daemon's Unix socket.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::OnceLock;

use ontime::fuzzing::{Api, Asking};
use ontime_plan::Bandwidth;
use ontime_sched::{Asks, SchedConfig, Settled, settle};
use serde_json::Value;

/// The users of `reservations.users`, and how many reservations each may have.
const USERS: [u32; 2] = [7, 8];
const PER_USER: usize = 3;
/// The statuses that the description has, but those for a main loop that does not answer in time. 404: no such path;
/// 405: a path that is not asked that way.
const STATUSES: [u16; 10] = [200, 201, 204, 400, 403, 404, 405, 409, 429, 503];

/// The list's file. A run ends before the next one, so that one file is enough for a process.
fn file() -> &'static PathBuf {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    FILE.get_or_init(|| {
        let shared = std::path::Path::new("/dev/shm");
        let folder = if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
        folder.join(format!("ontime-fuzz-{}", std::process::id()))
    })
}

/// Requests one after another. Input: requests with a zero byte between them, each a user's digit (0 is root, 7 and 8
/// are listed, 9 is not; otherwise the kernel does not know the user), verb, path, and Accept, a line's end, the body.
///
/// Property: an answer has a status of the description, and an error says what is wrong; a user changes only the
/// reservations of that user, no more than the limits allow, and a user who is not listed none; a refused request
/// changes nothing; the next daemon reads the list as it is; the admission gives no more than the host has.
pub fn api(data: &[u8]) {
    let _ = std::fs::remove_file(file());
    let mut api = Api::new(file().clone(), &USERS, PER_USER).unwrap();
    let mut before = by_name(&api.requested());
    for part in data.split(|byte| *byte == 0).take(16) {
        let (head, body) = part.split_at(part.iter().position(|byte| *byte == b'\n').unwrap_or(part.len()));
        let Ok(head) = std::str::from_utf8(head) else { continue };
        let mut words = head.splitn(3, ' ');
        let mut word = || words.next().unwrap_or_default();
        let (first, path, accept) = (word(), word(), word());
        let uid = first.chars().next().and_then(|digit| digit.to_digit(10)).filter(|uid| [0, 7, 8, 9].contains(uid));
        let verb = first.trim_start_matches(|c: char| c.is_ascii_digit());
        let Some((status, answer)) = api.ask(&Asking { uid, verb, path, accept, body }) else { continue };
        assert!(STATUSES.contains(&status), "{status}");
        // A request with HEAD is answered without a body.
        if status >= 400 && verb != "HEAD" {
            let said: Value = serde_json::from_slice(&answer).unwrap();
            assert!(said["error"].as_str().is_some_and(|error| !error.is_empty() && error.len() < 8192), "{said}");
        }
        let now = by_name(&api.requested());
        changed(uid, status, &before, &now);
        before = now;
    }
    assert_eq!(api.reread(), api.requested());
    let mut config = SchedConfig { leases: api.leases(), ..SchedConfig::default() };
    let settled = settle(&config, &[], &(0..2).collect(), &Settled::default(), &Asks::new());
    assert!(settled.total() <= Bandwidth::cpus(2), "{settled:?}");
    // What was admitted stays.
    config.leases.retain(|lease| settled.leases[&lease.name].held);
    let again = settle(&config, &[], &(0..2).collect(), &settled, &Asks::new());
    assert!(config.leases.iter().all(|lease| again.leases[&lease.name].held), "{again:?}");
    let _ = std::fs::remove_file(file());
}

/// What there is of a user, and what it holds.
fn of_user(all: &BTreeMap<String, Value>, uid: u32) -> (usize, u64) {
    let own = all.values().filter(|one| one["uid"] == uid);
    own.fold((0, 0), |(count, sum), one| (count + 1, sum + one["micro_cpus"].as_u64().unwrap()))
}

fn changed(uid: Option<u32>, status: u16, before: &BTreeMap<String, Value>, now: &BTreeMap<String, Value>) {
    if before == now {
        return;
    }
    assert!(status < 300, "{status} has changed {before:?} to {now:?}");
    let uid = uid.filter(|uid| *uid == 0 || USERS.contains(uid)).expect("a user who may");
    for (name, one) in before.iter().chain(now) {
        if uid != 0 && (before.get(name), now.get(name)) != (Some(one), Some(one)) {
            assert_eq!(one["uid"], uid, "user {uid} has changed {one}");
        }
    }
    let (count, sum) = of_user(now, uid);
    assert!(uid == 0 || count <= PER_USER && sum <= 1_000_000, "user {uid} has {count}: {sum}");
    assert!(count <= 512 && sum <= count as u64 * 256_000_000);
    for one in now.values() {
        let text = |field: &str| one[field].as_str().unwrap_or_default();
        assert!(!text("name").is_empty() && !one.to_string().contains(char::is_control));
        assert!(text("name").len() <= 128 && text("owner").len() <= 64);
        assert!(one["left_seconds"].as_f64().unwrap() <= 86_400.0, "{one}");
    }
}

fn by_name(all: &Value) -> BTreeMap<String, Value> {
    all.as_array().unwrap().iter().map(|one| (one["name"].as_str().unwrap().to_owned(), one.clone())).collect()
}
