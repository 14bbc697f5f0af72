//! Bandwidth that the guest requests (RTVirt's hypercall). This process forwards the requests to the daemon.
//!
//! This process is unprivileged and does not decide on admission. The daemon connects to the VM's `deadlines.sock`
//! (only root may) and admits or refuses. Each message to the daemon is a JSON line ([`BandwidthRequest`]) with the
//! needs of *all* vCPUs; the daemon replies with a line ([`BandwidthAnswer`]). No message depends on an earlier one: a
//! restarted daemon connects and receives what the guest holds. When this process ends with the VM, the connection
//! closes and the daemon frees the bandwidth. Two files are passed (SCM_RIGHTS) with the line that lists them: the
//! guest memory in which the guest publishes its next deadlines, and the [`Ledger`].
//!
//! The daemon and this process may have different versions, because a device process lives as long as its VM. Each
//! ignores fields and files that it does not know. A later version may add some, but must not change the meaning of
//! existing ones.
//!
//! **Claims within the offer need no message.** In the ledger the daemon offers free bandwidth in advance. A change
//! within the offer is claimed in the ledger, and the guest is answered at once. Pacers and the daemon read the claim
//! from the ledger when they need it.
//!
//! Input: calls from the control queue's thread. Output: admitted or refused. Without a daemon, an increase is refused;
//! a decrease is always accepted.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ontime_base::Bucket;
use ontime_sched::ledger::{Budget, Ledger, NOTHING};
use ontime_tenants::Repeats;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg};
use serde::{Deserialize, Serialize};

use crate::abi::{
    Errno, ONTIME_BW_ENTRIES_MAX, ONTIME_BW_PERIOD_MAX, ONTIME_BW_PERIOD_MIN, ONTIME_CTL_DEC_BW, ONTIME_CTL_INC_BW,
    ONTIME_CTL_INC_DEC_BW, ONTIME_VCPUS_MAX, ontime_bw,
};
use crate::accepting::connections;

/// Timeout for the daemon's answer: longer than a daemon pass over a busy host, shorter than the guest's own timeout.
const PATIENCE: Duration = Duration::from_secs(3);
/// The longest answer that is accepted, bytes.
const ANSWER_MAX: u64 = 4096;

/// Allowed periods, ns.
const PERIODS: std::ops::RangeInclusive<u64> = ONTIME_BW_PERIOD_MIN as u64..=ONTIME_BW_PERIOD_MAX as u64;

/// Bandwidth that one vCPU needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Need {
    /// The vCPU's number.
    pub vcpu: u32,
    /// CPU time within each period, ns.
    pub budget: u64,
    /// The period, ns.
    pub period: u64,
}

/// Message to the daemon: the bandwidth that the guest holds or requests.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BandwidthRequest {
    /// Sequence number, repeated in the answer.
    pub seq: u64,
    /// The vCPUs with reserved bandwidth. vCPUs that are not listed have none.
    pub vcpus: Vec<Need>,
    /// Offset in the memory file at which the guest publishes its next deadlines (`ontime_next_vcpu`). None: the guest
    /// does not publish them.
    #[serde(default)]
    pub next: Option<u64>,
    /// The ledger generation at the last claim; this message is at least as new.
    #[serde(default)]
    pub generation: u64,
    /// The files that are passed with this message, in this order.
    #[serde(default)]
    pub files: Vec<AttachedFile>,
}

/// A file that is passed with a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum AttachedFile {
    /// The guest's memory.
    Memory,
    /// The bandwidth ledger: what the guest may claim without a request, and what it has claimed. A ledger with another
    /// layout gets another name.
    Ledger,
    /// A file kind that only later versions send.
    #[serde(other)]
    Other,
}

/// The location at which a guest publishes its next deadlines.
#[derive(Debug)]
pub struct DeadlinePage {
    /// The file of the guest's memory.
    pub file: File,
    /// Offset in that file, bytes.
    pub offset: u64,
}

/// Answer from the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BandwidthAnswer {
    /// The sequence number of the message that this answers.
    pub seq: u64,
    /// Reason for a refusal. None: admitted.
    pub refused: Option<String>,
}

/// (budget, period) by vCPU, ns.
type Table = BTreeMap<u32, (u64, u64)>;

/// The guest's bandwidth and the connection to the daemon.
#[derive(Debug)]
pub struct Deadlines {
    state: Mutex<State>,
    /// The control queue's thread sleeps with this lock, and never takes it with `state` locked: a guest that floods
    /// its control queue does not keep the daemon or a status request waiting.
    bucket: Mutex<Bucket>,
}

#[derive(Debug)]
struct State {
    held: Table,
    place: Option<DeadlinePage>,
    ledger: Option<Ledger>,
    /// The ledger generation at the last claim, or since the daemon connected.
    generation: u64,
    /// Files to pass with the next message.
    unsent_files: Vec<AttachedFile>,
    daemon: Option<BufReader<UnixStream>>,
    seq: u64,
    /// For log lines that the guest causes.
    repeats: Repeats,
}

impl Deadlines {
    /// Without a ledger, each increase is sent to the daemon.
    pub fn new(ledger: Option<Ledger>) -> Self {
        let state = State {
            held: Table::new(),
            place: None,
            ledger,
            generation: 0,
            unsent_files: Vec::new(),
            daemon: None,
            seq: 0,
            repeats: Repeats::default(),
        };
        Self { state: Mutex::new(state), bucket: Mutex::default() }
    }

    /// Executes a bandwidth call of the control queue.
    ///
    /// # Errors
    /// EINVAL for an invalid request. EBUSY if the daemon refuses or does not answer; then the held bandwidth is
    /// unchanged.
    pub fn change(&self, op: u32, entries: &[ontime_bw]) -> Result<(), Errno> {
        let changes = |held: &Table| {
            changed(held, op, entries).map(|(next, less)| Some((next, less)).filter(|(next, _)| next != held))
        };
        // An invalid request and one that changes nothing need no token.
        if changes(&self.state().held)?.is_none() {
            return Ok(());
        }
        self.wait_for_token();
        let mut state = self.state();
        let Some((next, less)) = changes(&state.held)? else { return Ok(()) };
        if state.claims(&next) {
            state.held = next;
            return Ok(());
        }
        match state.ask(&next) {
            Ok(None) => state.held = next,
            // The daemon receives the new table when it connects again.
            Ok(Some(_)) | Err(_) if less => state.held = next,
            Ok(Some(why)) => {
                state.repeats.warn_of("refused", &format!("the guest's deadlines are refused: {why}"));
                return Err(Errno(libc::EBUSY));
            }
            Err(error) => {
                let why = format!("no daemon answers: {error}; start it: systemctl start ontimed");
                state.repeats.warn_of("no daemon", &format!("the guest's deadlines are refused: {why}"));
                return Err(Errno(libc::EBUSY));
            }
        }
        Ok(())
    }

    /// Sets the location at which the guest publishes its next deadlines. None: the guest no longer publishes them.
    ///
    /// # Errors
    /// EBUSY if the daemon does not admit the held bandwidth with this location; then nothing has changed.
    pub fn publish(&self, place: Option<DeadlinePage>) -> Result<(), Errno> {
        self.wait_for_token();
        let mut state = self.state();
        let before = std::mem::replace(&mut state.place, place);
        state.bring_memory();
        let held = state.held.clone();
        let answer = state.ask(&held);
        // If the guest holds nothing, no agreement is needed: what the daemon offers later takes the location into
        // account.
        if held.is_empty() || matches!(answer, Ok(None)) {
            return Ok(());
        }
        state.place = before;
        state.bring_memory();
        Err(Errno(libc::EBUSY))
    }

    /// Drops all bandwidth: the driver was reset or the VM restarted.
    pub fn forget(&self) {
        let mut state = self.state();
        // The page at the published location may be reused for anything now.
        let published = state.place.take().is_some();
        state.bring_memory();
        if published || !state.held.is_empty() {
            state.held.clear();
            let _ = state.ask(&Table::new());
        }
    }

    /// The bandwidth that the guest holds.
    pub fn held(&self) -> Vec<Need> {
        needs(&self.state().held)
    }

    /// Accepts connections of daemons, one at a time. Runs on its own thread.
    pub fn serve(&self, listener: &UnixListener) {
        let mut repeats = Repeats::default();
        for stream in connections(listener) {
            if let Err(error) = self.connect(stream) {
                repeats.warn(&format!("a daemon that wants to admit the guest's deadlines is refused: {error}"));
            }
        }
    }

    /// Accepts a daemon's connection and sends it what the guest holds.
    ///
    /// # Errors
    /// The peer is neither root nor this process's user, or has disconnected.
    pub fn connect(&self, stream: UnixStream) -> std::io::Result<()> {
        let peer = rustix::net::sockopt::socket_peercred(&stream)?;
        // The peer's decisions affect the CPU time of all tenants.
        if !peer.uid.is_root() && peer.uid != rustix::process::geteuid() {
            return Err(std::io::Error::other(format!("user {} may not: run the daemon as root", peer.uid.as_raw())));
        }
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut state = self.state();
        tracing::info!(fd = stream.as_raw_fd(), "deadlines: a daemon is there");
        state.daemon = Some(BufReader::new(stream));
        // Offers of an earlier daemon are void from here on, so the table sent below is complete.
        state.generation = state.ledger.as_ref().map_or(0, Ledger::withdraw);
        state.unsent_files = state.ledger.iter().map(|_| AttachedFile::Ledger).collect();
        state.bring_memory();
        let held = state.held.clone();
        // `answer` skips the reply to this message while it waits for the next one.
        state.send_needs(&held).map(drop)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for_token(&self) {
        self.bucket.lock().unwrap_or_else(PoisonError::into_inner).wait();
    }
}

impl State {
    /// Passes the guest's memory with the next message if a location is published.
    fn bring_memory(&mut self) {
        self.unsent_files.retain(|file| *file != AttachedFile::Memory);
        self.unsent_files.extend(self.place.iter().map(|_| AttachedFile::Memory));
    }

    /// Claims this table from the offered bandwidth. Claims nothing while no daemon is connected.
    fn claims(&mut self, table: &Table) -> bool {
        if !self.is_connected() {
            return false;
        }
        let mut held = NOTHING;
        for (vcpu, (budget, period)) in table {
            // The ledger has no entry for higher vCPU numbers.
            let Some(place) = held.get_mut(*vcpu as usize) else { return false };
            *place = Budget { budget: *budget, period: *period };
        }
        let claimed = self.ledger.as_ref().and_then(|ledger| ledger.claim(&held));
        self.generation = claimed.unwrap_or(self.generation);
        claimed.is_some()
    }

    /// Whether the daemon is still connected.
    fn is_connected(&self) -> bool {
        let Some(daemon) = &self.daemon else { return false };
        match recv(daemon.get_ref(), &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
            Ok((_, count)) => count > 0,
            Err(error) => error == rustix::io::Errno::AGAIN,
        }
    }

    fn send_needs(&mut self, table: &Table) -> std::io::Result<u64> {
        self.seq += 1;
        let next = self.place.as_ref().map(|place| place.offset);
        let (seq, generation) = (self.seq, self.generation);
        let files = std::mem::take(&mut self.unsent_files);
        let file = |file: &AttachedFile| match file {
            AttachedFile::Memory => self.place.as_ref().map(|place| place.file.as_fd()),
            AttachedFile::Ledger => self.ledger.as_ref().map(Ledger::file),
            AttachedFile::Other => None,
        };
        let attached: Vec<BorrowedFd<'_>> = files.iter().filter_map(file).collect();
        let asked = BandwidthRequest { seq, vcpus: needs(table), next, generation, files: files.clone() };
        let mut line = serde_json::to_vec(&asked)?;
        line.push(b'\n');
        let daemon = self.daemon.as_mut().ok_or(std::io::ErrorKind::NotConnected)?;
        let told = send(daemon.get_mut(), &line, &attached);
        if told.is_err() {
            self.daemon = None;
        }
        told.map(|()| seq)
    }

    /// Sends the table and returns the daemon's reason for refusal. None: admitted.
    fn ask(&mut self, table: &Table) -> std::io::Result<Option<String>> {
        let seq = self.send_needs(table)?;
        let answer = self.answer(seq);
        if answer.is_err() {
            // It is unknown which table the daemon has now. It drops its table when the connection closes and receives
            // a new one when it reconnects.
            self.daemon = None;
        }
        answer
    }

    fn answer(&mut self, seq: u64) -> std::io::Result<Option<String>> {
        let daemon = self.daemon.as_mut().ok_or(std::io::ErrorKind::NotConnected)?;
        loop {
            let mut line = Vec::new();
            daemon.by_ref().take(ANSWER_MAX).read_until(b'\n', &mut line)?;
            if line.last() != Some(&b'\n') {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            let answer: BandwidthAnswer = serde_json::from_slice(&line)?;
            match answer.refused {
                refused if answer.seq == seq => return Ok(refused),
                Some(why) => tracing::warn!(
                    "the daemon does not keep what the guest held: {why}; its tasks run without that bandwidth until \
                     they set their policy again (`ontime top` has the reservations)"
                ),
                None => {}
            }
        }
    }
}

/// Sends a line, and the files that it lists with the line's first byte.
fn send(daemon: &mut UnixStream, line: &[u8], files: &[BorrowedFd<'_>]) -> std::io::Result<()> {
    if files.is_empty() {
        return daemon.write_all(line);
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !control.push(SendAncillaryMessage::ScmRights(files)) {
        return Err(std::io::ErrorKind::OutOfMemory.into());
    }
    let sent = sendmsg(&*daemon, &[IoSlice::new(line)], &mut control, SendFlags::NOSIGNAL)?;
    daemon.write_all(line.get(sent..).unwrap_or_default())
}

fn needs(table: &Table) -> Vec<Need> {
    table.iter().map(|(&vcpu, &(budget, period))| Need { vcpu, budget, period }).collect()
}

/// The table after a call, and whether no vCPU has more bandwidth than before.
fn changed(held: &Table, op: u32, entries: &[ontime_bw]) -> Result<(Table, bool), Errno> {
    let invalid = Errno(libc::EINVAL);
    let count = entries.len();
    let fits = match op {
        ONTIME_CTL_INC_BW | ONTIME_CTL_DEC_BW => count == 1,
        ONTIME_CTL_INC_DEC_BW => (1..=ONTIME_BW_ENTRIES_MAX as usize).contains(&count),
        _ => return Err(Errno(libc::EOPNOTSUPP)),
    };
    let mut seen = 0u64;
    let mut next = held.clone();
    let mut less = true;
    for entry in entries {
        let nothing = entry.budget == 0 && entry.period == 0;
        let something = entry.budget > 0 && entry.budget <= entry.period && PERIODS.contains(&entry.period);
        if entry.reserved != 0 || entry.vcpu >= ONTIME_VCPUS_MAX || !(nothing || something) {
            return Err(invalid);
        }
        let bit = 1u64 << entry.vcpu;
        if seen & bit != 0 {
            return Err(invalid);
        }
        seen |= bit;
        let (budget, period) = held.get(&entry.vcpu).copied().unwrap_or((0, 1));
        // Exact: both products are below 2^64 because of the limits above.
        less &= nothing
            || (u128::from(entry.budget) * u128::from(period) <= u128::from(budget) * u128::from(entry.period)
                && entry.period >= period);
        if nothing {
            next.remove(&entry.vcpu);
        } else {
            next.insert(entry.vcpu, (entry.budget, entry.period));
        }
    }
    if !fits {
        return Err(invalid);
    }
    if op == ONTIME_CTL_DEC_BW && !less {
        // Less bandwidth with a shorter period needs admission like an increase: it may cost more.
        let (budget, period) = entries.first().map_or((0, 1), |entry| (entry.budget, entry.period));
        let (had, of) = entries.first().and_then(|entry| held.get(&entry.vcpu)).copied().unwrap_or((0, 1));
        if u128::from(budget) * u128::from(of) > u128::from(had) * u128::from(period) {
            return Err(invalid);
        }
    }
    Ok((next, less))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use proptest::prelude::*;

    use super::*;
    use crate::log_lines::count_lines;
    use ontime_base::bucket::{BURST, REFILL};

    const MS: u64 = 1_000_000;

    fn entry(vcpu: u32, budget: u64, period: u64) -> ontime_bw {
        ontime_bw { vcpu, reserved: 0, budget, period }
    }

    /// A daemon that admits up to this many vCPUs; returns the messages that it received.
    fn daemon(stream: UnixStream, most: usize) -> std::thread::JoinHandle<Vec<BandwidthRequest>> {
        std::thread::spawn(move || {
            let mut asked = Vec::new();
            let mut out = stream.try_clone().unwrap();
            for line in BufReader::new(stream).lines() {
                let one: BandwidthRequest = serde_json::from_str(&line.unwrap()).unwrap();
                let refused = (one.vcpus.len() > most).then(|| "full".to_owned());
                let mut answer = serde_json::to_vec(&BandwidthAnswer { seq: one.seq, refused }).unwrap();
                answer.push(b'\n');
                out.write_all(&answer).unwrap();
                asked.push(one);
            }
            asked
        })
    }

    /// A guest may ask again and again, and the reason may be another one each time.
    #[test]
    fn refused_bandwidth_is_logged_once_a_minute() {
        let deadlines = Deadlines::new(None);
        let ask = |budget: u64| {
            let refused = deadlines.change(ONTIME_CTL_INC_BW, &[entry(0, budget * MS, 10 * MS)]);
            assert_eq!(refused, Err(Errno(libc::EBUSY)));
        };
        assert_eq!(count_lines(|| (1..9).for_each(ask)), 1, "no daemon");
        let (own, mut other) = UnixStream::pair().unwrap();
        deadlines.connect(own).unwrap();
        let refuses = std::thread::spawn(move || {
            for line in BufReader::new(other.try_clone().unwrap()).lines() {
                let one: BandwidthRequest = serde_json::from_str(&line.unwrap()).unwrap();
                let refused = one.vcpus.first().map(|need| format!("{} ns are too much", need.budget));
                let answer = BandwidthAnswer { seq: one.seq, refused };
                writeln!(other, "{}", serde_json::to_string(&answer).unwrap()).unwrap();
            }
        });
        assert_eq!(count_lines(|| (1..9).for_each(ask)), 1, "refused for eight reasons");
        drop(deadlines);
        refuses.join().unwrap();
    }

    #[test]
    fn admitted_refused_given_back_and_told_again_to_the_next_daemon() {
        let deadlines = Deadlines::new(None);
        let busy = Err(Errno(libc::EBUSY));
        assert_eq!(deadlines.change(ONTIME_CTL_INC_BW, &[entry(0, MS, 10 * MS)]), busy, "no daemon, no guarantee");
        let (own, other) = UnixStream::pair().unwrap();
        deadlines.connect(own).unwrap();
        let first = daemon(other, 1);
        assert_eq!(deadlines.change(ONTIME_CTL_INC_BW, &[entry(0, MS, 10 * MS)]), Ok(()));
        assert_eq!(deadlines.change(ONTIME_CTL_INC_BW, &[entry(1, MS, 10 * MS)]), busy);
        // Both changes or neither: one reservation moves from vCPU 0 to vCPU 1.
        let moved = [entry(0, 0, 0), entry(1, MS, 10 * MS)];
        assert_eq!(deadlines.change(ONTIME_CTL_INC_DEC_BW, &moved), Ok(()));
        let held = vec![Need { vcpu: 1, budget: MS, period: 10 * MS }];
        assert_eq!(deadlines.held(), held);
        let (own, other) = UnixStream::pair().unwrap();
        deadlines.connect(own).unwrap();
        let seen: Vec<usize> = first.join().unwrap().iter().map(|asked| asked.vcpus.len()).collect();
        assert_eq!(seen, [0, 1, 2, 1]);
        let second = daemon(other, 1);
        assert_eq!(deadlines.change(ONTIME_CTL_DEC_BW, &[entry(1, 0, 0)]), Ok(()));
        drop(deadlines);
        let seen = second.join().unwrap();
        assert_eq!((seen[0].vcpus.clone(), seen[1].vcpus.len()), (held, 0), "a new daemon learns what is held");
    }

    /// Offered bandwidth is claimed without the daemon. Requests beyond the offer go to the daemon.
    #[test]
    fn what_is_offered_is_taken_at_once() {
        let ledger = Ledger::create().unwrap();
        let deadlines = Deadlines::new(Some(ledger.clone()));
        let mut offers = NOTHING;
        offers[0] = Budget { budget: 4 * MS, period: 10 * MS };
        let before = ledger.offer(&offers, &NOTHING);
        let claim = |budget| deadlines.change(ONTIME_CTL_INC_BW, &[entry(0, budget, 10 * MS)]);
        assert_eq!(claim(MS), Err(Errno(libc::EBUSY)), "no daemon hears of it");
        let (own, other) = UnixStream::pair().unwrap();
        deadlines.connect(own).unwrap();
        assert_eq!(ledger.claim(&NOTHING), None, "another daemon offered it");
        let opened = ledger.offer(&offers, &NOTHING);
        // The daemon does not answer.
        assert_eq!(claim(2 * MS), Ok(()));
        assert_eq!(claim(3 * MS), Ok(()));
        assert_eq!(deadlines.held()[0].budget, 3 * MS);
        assert_eq!(ledger.table(ledger.generation())[0].budget, 3 * MS);
        let daemon = daemon(other.try_clone().unwrap(), 0);
        assert_eq!(claim(5 * MS), Err(Errno(libc::EBUSY)), "beyond");
        ledger.withdraw();
        assert_eq!(claim(4 * MS), Err(Errno(libc::EBUSY)), "withdrawn: asked for");
        drop((deadlines, other));
        let asked = daemon.join().unwrap();
        let seen: Vec<_> = asked.iter().map(|asked| asked.generation).collect();
        assert_eq!(seen, [before, opened + 2, opened + 2], "{asked:?}");
        assert_eq!((asked[0].files.clone(), asked[1].files.len()), (vec![AttachedFile::Ledger], 0));
        let deadlines = Deadlines::new(Some(ledger.clone()));
        let (own, other) = UnixStream::pair().unwrap();
        deadlines.connect(own).unwrap();
        drop(other);
        ledger.offer(&offers, &NOTHING);
        let lost = deadlines.change(ONTIME_CTL_INC_BW, &[entry(0, MS, 10 * MS)]);
        assert_eq!(lost, Err(Errno(libc::EBUSY)), "the daemon is gone");
    }

    /// After a driver reset, the page in which the driver published may hold anything.
    #[test]
    fn the_end_of_a_driver_that_held_nothing_is_told_too() {
        let deadlines = Deadlines::new(None);
        let file = || File::from(rustix::fs::memfd_create("vm", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
        let (own, other) = UnixStream::pair().unwrap();
        deadlines.connect(own).unwrap();
        let daemon = daemon(other, 1);
        deadlines.publish(Some(DeadlinePage { file: file(), offset: 0 })).unwrap();
        deadlines.forget();
        deadlines.forget();
        drop(deadlines);
        let next: Vec<_> = daemon.join().unwrap().iter().map(|asked| asked.next).collect();
        assert_eq!(next, [None, Some(0), None]);
    }

    #[test]
    fn who_floods_the_host_with_registrations_is_slowed_down_and_loses_none() {
        let deadlines = Deadlines::new(None);
        let (own, other) = UnixStream::pair().unwrap();
        deadlines.connect(own).unwrap();
        let daemon = daemon(other, 1);
        let (more, start) = (12, Instant::now());
        for turn in 0..BURST + more {
            let entry = entry(0, MS + u64::from(turn), 10 * MS);
            assert_eq!(deadlines.change(ONTIME_CTL_INC_DEC_BW, &[entry]), Ok(()));
        }
        let took = start.elapsed();
        // The bucket gains a token every 20 ms, perhaps the first one immediately.
        assert!(took >= REFILL * (more - 2), "{more} beyond the burst took {took:?}");
        // The daemon never sees invalid requests.
        let nonsense = Instant::now();
        for _ in 0..1000 {
            assert_eq!(deadlines.change(ONTIME_CTL_INC_BW, &[entry(0, 2, 1)]), Err(Errno(libc::EINVAL)));
        }
        assert!(nonsense.elapsed() < REFILL * 1000 / 4, "refused by waiting");
        assert_eq!(deadlines.held()[0].budget, MS + u64::from(BURST + more) - 1);
        drop(deadlines);
        let count = u32::try_from(daemon.join().unwrap().len()).unwrap();
        assert_eq!(count, BURST + more + 1, "the daemon's own first question among them");
    }

    /// The test has the lock of the bucket, as a call that sleeps for a token has.
    #[test]
    fn a_call_that_waits_for_a_token_keeps_no_other_thread_waiting() {
        let deadlines = Deadlines::new(None);
        let no_place = || deadlines.publish(None);
        let less = || deadlines.change(ONTIME_CTL_DEC_BW, &[entry(0, 0, 0)]);
        let calls: [&(dyn Fn() -> Result<(), Errno> + Sync); 2] = [&no_place, &less];
        for call in calls {
            deadlines.state().held = Table::from([(0, (MS, 10 * MS))]);
            let bucket = deadlines.bucket.lock().unwrap();
            let (tell, told) = std::sync::mpsc::channel();
            std::thread::scope(|scope| {
                scope.spawn(move || {
                    tell.send(rustix::thread::gettid().as_raw_pid()).unwrap();
                    call()
                });
                let stat = format!("/proc/self/task/{}/stat", told.recv().unwrap());
                // The bucket's lock is all that the thread can sleep for.
                while !std::fs::read_to_string(&stat).unwrap().contains(") S ") {
                    std::thread::yield_now();
                }
                assert!(deadlines.state.try_lock().is_ok());
                drop(bucket);
            });
        }
        assert!(deadlines.held().is_empty(), "the call was carried out after its wait");
    }

    #[test]
    fn less_is_never_refused_and_needs_no_daemon() {
        let deadlines = Deadlines::new(None);
        let (own, other) = UnixStream::pair().unwrap();
        deadlines.connect(own).unwrap();
        let daemon = daemon(other, 1);
        assert_eq!(deadlines.change(ONTIME_CTL_INC_BW, &[entry(0, 5 * MS, 10 * MS)]), Ok(()));
        deadlines.state.lock().unwrap().daemon = None;
        daemon.join().unwrap();
        assert_eq!(deadlines.change(ONTIME_CTL_DEC_BW, &[entry(0, 2 * MS, 10 * MS)]), Ok(()));
        assert_eq!(deadlines.held()[0].budget, 2 * MS);
        assert_eq!(deadlines.change(ONTIME_CTL_DEC_BW, &[entry(0, 3 * MS, 10 * MS)]), Err(Errno(libc::EINVAL)));
        deadlines.forget();
        assert!(deadlines.held().is_empty());
    }

    #[test]
    fn what_no_driver_may_ask_is_refused() {
        let held = Table::from([(0, (MS, 10 * MS))]);
        let inc = |entry| changed(&held, ONTIME_CTL_INC_BW, &[entry]).unwrap_err();
        for bad in [
            entry(ONTIME_VCPUS_MAX, MS, 10 * MS),
            entry(0, 11 * MS, 10 * MS),
            entry(0, 0, 10 * MS),
            entry(0, 1, 1),
            entry(0, u64::MAX, u64::MAX),
            ontime_bw { reserved: 1, ..entry(0, MS, 10 * MS) },
        ] {
            assert_eq!(inc(bad), Errno(libc::EINVAL), "{bad:?}");
        }
        let twice = [entry(0, MS, 10 * MS), entry(0, 0, 0)];
        assert_eq!(changed(&held, ONTIME_CTL_INC_DEC_BW, &twice).unwrap_err(), Errno(libc::EINVAL));
        assert_eq!(changed(&held, ONTIME_CTL_INC_BW, &twice).unwrap_err(), Errno(libc::EINVAL));
        assert_eq!(changed(&held, ONTIME_CTL_INC_DEC_BW, &[]).unwrap_err(), Errno(libc::EINVAL));
    }

    /// Task placement by the guest and the resulting requests: `kernel/guest/place.h`, as a program with random task
    /// sets.
    #[test]
    fn the_guests_placement_keeps_its_promises() {
        let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join("place");
        let mut compile = std::process::Command::new("cc");
        compile.args(["-O2", "-Wall", "-Wextra", "-Werror", "-I"]).arg(root.join("kernel/abi"));
        let compiled = compile.arg("-o").arg(&program).arg(root.join("kernel/guest/tests/place.c")).output().unwrap();
        assert!(compiled.status.success(), "{}", String::from_utf8_lossy(&compiled.stderr));
        let run = std::process::Command::new(&program).output().unwrap();
        assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stdout));
    }

    proptest! {
        /// No request makes the table exceed the limits or causes a panic.
        #[test]
        fn tables_stay_within_limits(
            op in ONTIME_CTL_INC_BW..=ONTIME_CTL_INC_DEC_BW + 1,
            asked in proptest::collection::vec((0u32..70, any::<u64>(), any::<u64>(), any::<bool>()), 0..70),
        ) {
            let entries: Vec<ontime_bw> = asked
                .into_iter()
                .map(|(vcpu, budget, period, sane)| {
                    let period = if sane { period % PERIODS.end() } else { period };
                    entry(vcpu, if sane { budget % (period + 1) } else { budget }, period)
                })
                .collect();
            if let Ok((table, _)) = changed(&Table::new(), op, &entries) {
                for (vcpu, (budget, period)) in table {
                    prop_assert!(vcpu < ONTIME_VCPUS_MAX && budget > 0);
                    prop_assert!(budget <= period && PERIODS.contains(&period));
                }
            }
        }
    }
}
