//! The journal of original values. Each value is stored before its knob is changed, and kept until it is restored.
//!
//! In: a knob and the value it had before Ontime changed it. Out: the originals of this boot, in the order of storing.
//! The file is replaced as a whole (temporary file, fsync, rename) *before* the knobs of a batch are written. If the
//! process or the machine dies at any moment, the file on disk names every knob that may have changed. Only the first
//! original of a knob is kept; a later apply never replaces it.
//!
//! Knobs are kernel state and do not outlive the kernel. Entries of an earlier boot are therefore dropped, even if this
//! version cannot read their format. If another version wrote entries in this boot and this version does not understand
//! them completely, these entries are kept in the file but not used, and only a reset can continue beside them
//! ([`Journal::open_to_reset`]). One process at a time holds the journal (flock). Reading ([`Originals::read`]) needs
//! no lock.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Deref;
use std::path::{Path, PathBuf};

use ontime_base::lock_file;
use ontime_tenants::remedy::of_limits;
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize};
use serde_json::Value as Json;
use thiserror::Error;

use crate::knob::{Knob, Value};

/// The file in which the kernel shows the identifier of this boot.
pub(crate) const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

/// Default path of the journal.
pub const DEFAULT_PATH: &str = "/var/lib/ontime/originals";
const FORMAT: u32 = 1;
/// How often to try the lock. A process that is exiting, or a child between fork and exec, holds the lock a moment
/// longer: more than 200 ms on a busy machine.
const LOCK_TRIES: usize = 100;
const LOCK_PAUSE: std::time::Duration = std::time::Duration::from_millis(20);

/// A knob's value from before Ontime changed it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Original {
    /// The knob that was changed.
    pub knob: Knob,
    /// Its value before the first change in this boot.
    pub value: Value,
}

/// Original values of this boot.
#[derive(Debug, Default)]
pub struct Originals {
    entries: Vec<Original>,
    keys: BTreeSet<String>,
}

/// The open journal: the originals, and the lock that allows changing them.
#[derive(Debug)]
pub struct Journal {
    path: PathBuf,
    boot_id: String,
    originals: Originals,
    /// Lines that another version wrote, unchanged.
    foreign: Vec<String>,
    stale: usize,
    _lock: File,
}

impl Deref for Journal {
    type Target = Originals;
    fn deref(&self) -> &Originals {
        &self.originals
    }
}

/// Why the originals could not be read or kept.
#[derive(Debug, Error)]
pub enum JournalError {
    /// The directory or file could not be read or written.
    #[error("{path}: {what}: {source}; {effect}; {}", remedy(path, source))]
    Io {
        /// The journal or its directory.
        path: PathBuf,
        /// The operation that failed.
        what: &'static str,
        /// The kernel's error.
        source: io::Error,
        /// What Ontime does or leaves undone because of it.
        effect: &'static str,
    },
    /// Another process holds the lock.
    #[error(
        "{path}: another Ontime process holds the journal; let the daemon do the work (`ontime apply`, `ontime \
         reset`), or stop it first (systemctl stop ontimed)"
    )]
    Held {
        /// The journal or its directory.
        path: PathBuf,
    },
    /// Another version of Ontime wrote the file in this boot.
    #[error(
        "{path}: written in this boot by another version of Ontime ({why}); run `ontime reset` of that version, or \
         reboot, which restores the kernel's own values"
    )]
    OtherVersion {
        /// The journal or its directory.
        path: PathBuf,
        /// What this version cannot read.
        why: String,
    },
    /// The file is damaged.
    #[error(
        "{path}: damaged ({why}); the original values in it cannot be trusted; move the file away to go on (mv {path} \
         {path}.damaged): settings that it named keep their present values until the next boot, which restores the \
         kernel's own"
    )]
    Damaged {
        /// The journal or its directory.
        path: PathBuf,
        /// What is wrong with it.
        why: String,
    },
}

/// The part of the header that every version writes and reads.
#[derive(Deserialize)]
struct AnyHeader {
    format: u32,
    boot_id: String,
}

/// The content of a journal file for the running boot.
#[derive(Debug, Default, PartialEq, Eq)]
struct JournalContent {
    entries: Vec<Original>,
    /// Lines of this boot that another version wrote.
    foreign: Vec<String>,
    /// Why this version does not understand the first foreign line.
    why: Option<String>,
    /// Number of entries of an earlier boot. They are dropped unread.
    stale: usize,
}

impl JournalContent {
    /// Passes the content on, unless another version wrote a part of it.
    fn whole(self, path: &Path) -> Result<Self, JournalError> {
        match self.why {
            Some(why) => Err(JournalError::OtherVersion { path: path.to_owned(), why }),
            None => Ok(self),
        }
    }
}

#[derive(Serialize, Deserialize)]
struct Header {
    format: u32,
    boot_id: String,
    entries: usize,
    checksum: String,
}

impl Originals {
    /// Builds the set from these entries.
    fn new(entries: Vec<Original>) -> Self {
        let keys = entries.iter().map(|entry| entry.knob.key()).collect();
        Self { entries, keys }
    }

    /// Reads the journal without the lock, for callers that change nothing. The file is replaced as a whole, so reading
    /// is safe while another process holds the lock. A missing file means no originals.
    ///
    /// # Errors
    /// [`JournalError::Io`], [`JournalError::OtherVersion`], [`JournalError::Damaged`].
    pub fn read(path: &Path, boot_id: &str) -> Result<Self, JournalError> {
        let kept = load(path, boot_id, NOT_KNOWN)?;
        Ok(Self::new(kept.whole(path)?.entries))
    }

    /// Parses the bytes of a journal file for this boot.
    ///
    /// # Errors
    /// [`JournalError::OtherVersion`], [`JournalError::Damaged`].
    #[doc(hidden)]
    pub fn parse(bytes: &[u8], boot_id: &str) -> Result<Self, JournalError> {
        let path = Path::new(DEFAULT_PATH);
        Ok(Self::new(parse(path, bytes, boot_id)?.whole(path)?.entries))
    }

    /// The originals, in the order of storing.
    pub fn entries(&self) -> &[Original] {
        &self.entries
    }

    /// The original of a knob, if stored.
    pub fn original(&self, knob: &Knob) -> Option<&Value> {
        let key = knob.key();
        if !self.keys.contains(&key) {
            return None;
        }
        self.entries.iter().find(|entry| entry.knob.key() == key).map(|entry| &entry.value)
    }

    /// The originals by [`Knob::key`].
    pub fn by_key(&self) -> BTreeMap<String, &Value> {
        self.entries.iter().map(|entry| (entry.knob.key(), &entry.value)).collect()
    }

    /// Whether the journal has an original of this knob.
    pub fn has(&self, knob: &Knob) -> bool {
        self.keys.contains(&knob.key())
    }
}

impl Journal {
    /// Opens the journal for this boot (`/proc/sys/kernel/random/boot_id`). Makes its directory if needed; a missing
    /// file means no originals.
    ///
    /// # Errors
    /// See [`JournalError`].
    pub fn open(path: &Path, boot_id: &str) -> Result<Self, JournalError> {
        Self::open_if(path, boot_id, JournalContent::whole)
    }

    /// As [`Self::open`], for a reset only: originals that another version stored stay in the file ([`Self::foreign`]).
    ///
    /// # Errors
    /// See [`JournalError`].
    pub fn open_to_reset(path: &Path, boot_id: &str) -> Result<Self, JournalError> {
        Self::open_if(path, boot_id, |kept, _| Ok(kept))
    }

    fn open_if(
        path: &Path,
        boot_id: &str,
        accept: impl FnOnce(JournalContent, &Path) -> Result<JournalContent, JournalError>,
    ) -> Result<Self, JournalError> {
        if let Some(dir) = path.parent() {
            fs::create_dir_all(dir).map_err(|error| io_error(path, "making its directory", error, UNCHANGED))?;
        }
        let lock = lock(path)?;
        let kept = load(path, boot_id, UNCHANGED)?;
        let JournalContent { entries, foreign, stale, .. } = accept(kept, path)?;
        let originals = Originals::new(entries);
        Ok(Self { path: path.to_owned(), boot_id: boot_id.to_owned(), originals, foreign, stale, _lock: lock })
    }

    /// Originals of this boot that only the version that wrote them can restore, as lines of the file.
    pub fn foreign(&self) -> &[String] {
        &self.foreign
    }

    /// The path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How many entries of an earlier boot were dropped at opening.
    pub fn stale(&self) -> usize {
        self.stale
    }

    /// Stores originals durably. A knob that already has an original keeps it. Writes the file only for new entries.
    ///
    /// # Errors
    /// See [`JournalError`]. Nothing was stored then, and the caller must not change any knob.
    pub fn store(&mut self, originals: Vec<Original>) -> Result<(), JournalError> {
        let mut keys = self.keys.clone();
        let new: Vec<_> = originals.into_iter().filter(|original| keys.insert(original.knob.key())).collect();
        if new.is_empty() {
            return Ok(());
        }
        let mut entries = self.entries.clone();
        entries.extend(new);
        self.replace(entries, UNCHANGED)
    }

    /// Updates, durably, the process through which stored knobs are reached, from these knobs. Originals stay as they
    /// are.
    ///
    /// # Errors
    /// See [`JournalError`]. All entries stay as they were then.
    pub fn update_processes<'a>(&mut self, knobs: impl Iterator<Item = &'a Knob>) -> Result<(), JournalError> {
        let led_to = knobs.filter(|knob| knob.process().is_some() && self.has(knob));
        let now: BTreeMap<String, &Knob> = led_to.map(|knob| (knob.key(), knob)).collect();
        let mut entries = self.entries.clone();
        for knob in entries.iter_mut().map(|entry| &mut entry.knob).filter(|knob| knob.process().is_some()) {
            if let Some(by) = now.get(&knob.key()).filter(|by| by.process() != knob.process()) {
                *knob = (*by).clone();
            }
        }
        if entries == self.entries { Ok(()) } else { self.replace(entries, UNCHANGED) }
    }

    /// Removes the knobs with these keys, durably: they were restored, or no longer exist.
    ///
    /// # Errors
    /// See [`JournalError`]. All entries are still in the file then.
    pub fn remove(&mut self, keys: &BTreeSet<String>) -> Result<(), JournalError> {
        if keys.is_disjoint(&self.keys) {
            return Ok(());
        }
        let entries = self.entries.iter().filter(|entry| !keys.contains(&entry.knob.key())).cloned().collect();
        self.replace(entries, NOT_FORGOTTEN)
    }

    fn replace(&mut self, entries: Vec<Original>, effect: &'static str) -> Result<(), JournalError> {
        let text = format(&self.boot_id, &self.foreign, &entries)
            .map_err(|error| io_error(&self.path, "encoding", error.into(), effect))?;
        replace(&self.path, text.as_bytes()).map_err(|error| io_error(&self.path, "writing", error, effect))?;
        self.originals = Originals::new(entries);
        Ok(())
    }
}

/// Effect of a failure before any change.
const UNCHANGED: &str = "no setting was changed, because its original value could not be stored";
/// Effect of a failure after settings were restored.
const NOT_FORGOTTEN: &str = "settings that were restored stay in it, which does no harm";
/// Effect if the id of the running boot cannot be read.
const NO_BOOT: &str = "so original values are neither read nor stored, and no setting is changed";
/// Effect for a command that only reads.
const NOT_KNOWN: &str = "so what Ontime has set is shown as if the administrator had set it";

fn io_error(path: &Path, what: &'static str, source: io::Error, effect: &'static str) -> JournalError {
    JournalError::Io { path: path.to_owned(), what, source, effect }
}

/// The remedy for an I/O error at the journal's file.
fn remedy(path: &Path, source: &io::Error) -> String {
    if path == Path::new(BOOT_ID) {
        return "mount /proc: mount -t proc proc /proc".to_owned();
    }
    let dir = path.parent().unwrap_or(path).display();
    match source.raw_os_error() {
        Some(libc::ENOSPC | libc::EDQUOT) => format!("free some space there (df {dir}; df -i {dir}), then apply again"),
        Some(libc::EACCES) => "run it as root".to_owned(),
        Some(libc::EPERM) => format!("run it as root; lsattr -d {dir} shows whether it may be changed (chattr -i)"),
        Some(libc::EROFS) => format!("make {dir} writable: mount -o remount,rw, or in a unit StateDirectory=ontime"),
        Some(libc::ENOTDIR | libc::EEXIST | libc::EISDIR) => {
            format!("move away what stands in the place of a directory or file: ls -ld {dir} {}*", path.display())
        }
        Some(libc::EIO) => {
            "the disk or its file system fails: journalctl -k; another place is --state-dir DIR".to_owned()
        }
        _ => match of_limits(source) {
            Some((cause, remedy)) => format!("{cause}: {remedy}"),
            None => format!("see whether root may write there: ls -ld {dir}, df {dir}, journalctl -k"),
        },
    }
}

/// The id of the running boot.
///
/// # Errors
/// [`JournalError::Io`] where `/proc` cannot be read.
pub fn running_boot_id() -> Result<String, JournalError> {
    let text = fs::read_to_string(BOOT_ID).map_err(|error| io_error(Path::new(BOOT_ID), "reading", error, NO_BOOT))?;
    Ok(text.trim().to_owned())
}

/// Reads the file's content for this boot; empty if there is no file.
fn load(path: &Path, boot_id: &str, effect: &'static str) -> Result<JournalContent, JournalError> {
    match fs::read(path) {
        Ok(bytes) => parse(path, &bytes, boot_id),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(JournalContent::default()),
        Err(error) => Err(io_error(path, "reading", error, effect)),
    }
}

fn lock(path: &Path) -> Result<File, JournalError> {
    let path_of_lock = path.with_extension("lock");
    // The lock has its own file. The journal's file gets replaced, and a lock on it would stay with the old inode.
    let file = lock_file::open(&path_of_lock).map_err(|error| io_error(path, "opening its lock", error, UNCHANGED))?;
    for _ in 0..LOCK_TRIES {
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(file),
            Err(rustix::io::Errno::WOULDBLOCK) => std::thread::sleep(LOCK_PAUSE),
            Err(error) => return Err(io_error(path, "locking", error.into(), UNCHANGED)),
        }
    }
    Err(JournalError::Held { path: path.to_owned() })
}

fn replace(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let temporary = path.with_extension("new");
    let written = (|| {
        let mut file = File::create(&temporary)?;
        crash::point("journal-open");
        let half = bytes.len() / 2;
        file.write_all(bytes.get(..half).unwrap_or_default())?;
        crash::point("journal-half");
        file.write_all(bytes.get(half..).unwrap_or_default())?;
        // Without the sync, a power loss could leave a torn file, which would count as damaged. The directory entry
        // needs no sync: after a power loss any file is of an earlier boot, whose knobs are gone.
        file.sync_data()?;
        crash::point("journal-synced");
        fs::rename(&temporary, path)?;
        crash::point("journal-renamed");
        Ok(())
    })();
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written
}

fn damaged(path: &Path, why: impl ToString) -> JournalError {
    JournalError::Damaged { path: path.to_owned(), why: why.to_string() }
}

/// Formats a header line, then one line per entry, so that people can read the file and a torn or edited file is
/// detected. Entries of another version come first, because the restore order is reversed: that version restores them
/// last, over everything stored since.
///
/// # Errors
/// An entry could not be serialized.
#[doc(hidden)]
pub fn format(boot_id: &str, foreign: &[String], entries: &[Original]) -> Result<String, serde_json::Error> {
    let mut body: String = foreign.iter().flat_map(|line| [line, "\n"]).collect();
    for entry in entries {
        body.push_str(&serde_json::to_string(entry)?);
        body.push('\n');
    }
    let header = Header {
        format: FORMAT,
        boot_id: boot_id.to_owned(),
        entries: foreign.len() + entries.len(),
        checksum: checksum(boot_id, &body),
    };
    Ok(format!("{}\n{body}", serde_json::to_string(&header)?))
}

/// Parses a journal file. Checks the boot id first: entries of an earlier boot are dropped, in whatever format.
fn parse(path: &Path, bytes: &[u8], boot_id: &str) -> Result<JournalContent, JournalError> {
    if bytes.is_empty() {
        return Ok(JournalContent::default());
    }
    let newline = bytes.iter().position(|byte| *byte == b'\n').unwrap_or(bytes.len());
    let first = bytes.get(..newline).unwrap_or_default();
    let any: AnyHeader = serde_json::from_slice(first).map_err(|error| damaged(path, format!("line 1: {error}")))?;
    if is_other_boot(&any.boot_id, boot_id) {
        let lines = bytes.get(newline..).unwrap_or_default().split(|byte| *byte == b'\n');
        return Ok(JournalContent {
            stale: lines.filter(|line| !line.is_empty()).count(),
            ..JournalContent::default()
        });
    }
    let other = |why: String| JournalError::OtherVersion { path: path.to_owned(), why };
    if any.format != FORMAT {
        return Err(other(format!("its format is {}, this version's is {FORMAT}", any.format)));
    }
    let text = std::str::from_utf8(bytes).map_err(|_| damaged(path, "is not text"))?;
    let (first, body) = text.split_once('\n').ok_or_else(|| damaged(path, "it ends in its first line"))?;
    let header: Header = serde_json::from_str(first).map_err(|error| damaged(path, format!("line 1: {error}")))?;
    if header.checksum != checksum(&header.boot_id, body) {
        return Err(damaged(path, "its checksum does not match"));
    }
    if let Some(name) = unknown(&header, first) {
        return Err(other(format!("line 1: unknown field {name}")));
    }
    // The checksum matches, so an unreadable entry is a knob that only another version knows.
    let mut kept = JournalContent::default();
    for (line, number) in body.lines().zip(2..) {
        let entry = serde_json::from_str::<Original>(line).map_err(|error| error.to_string());
        match entry.and_then(|entry| match unknown(&entry, line) {
            Some(name) => Err(format!("unknown field {name}")),
            None => Ok(entry),
        }) {
            Ok(entry) => kept.entries.push(entry),
            Err(error) => {
                kept.foreign.push(line.to_owned());
                kept.why.get_or_insert(format!("line {number}: {error}"));
            }
        }
    }
    let lines = kept.entries.len() + kept.foreign.len();
    if lines != header.entries {
        return Err(damaged(path, format!("{lines} entries where {} are announced", header.entries)));
    }
    if header.boot_id != boot_id {
        return Ok(JournalContent { stale: lines, ..JournalContent::default() });
    }
    Ok(kept)
}

/// The first field of this JSON that the parsed value does not contain. An unknown field may change the meaning of the
/// other fields.
fn unknown(read: &impl Serialize, text: &str) -> Option<String> {
    fn beyond(found: &Json, read: Option<&Json>) -> Option<String> {
        match found {
            Json::Object(fields) => {
                fields.iter().find_map(|(name, value)| match read.and_then(|read| read.get(name)) {
                    None if !value.is_null() => Some(name.clone()),
                    read => beyond(value, read),
                })
            }
            Json::Array(items) => {
                items.iter().enumerate().find_map(|(at, value)| beyond(value, read.and_then(|read| read.get(at))))
            }
            _ => None,
        }
    }
    let found: Json = serde_json::from_str(text).ok()?;
    beyond(&found, serde_json::to_value(read).ok().as_ref())
}

/// Whether a boot id in a file is another boot's. Ids are random, so two ids differ in nearly every digit. An id that
/// differs from the running boot's in a few bytes only may be a damaged id of this boot; the checksum decides then.
fn is_other_boot(found: &str, running: &str) -> bool {
    let same = found.bytes().zip(running.bytes()).filter(|(one, other)| one == other).count();
    let longest = found.len().max(running.len());
    longest - same > longest / 4
}

/// FNV-1a, 64 bits, over boot id and entries. The checksum detects a torn, edited or corrupted file. It does not
/// protect against an attacker: root owns the file. It covers the boot id, because one flipped bit there would turn all
/// entries into those of another boot.
#[doc(hidden)]
pub fn checksum(boot_id: &str, body: &str) -> String {
    let bytes = boot_id.bytes().chain([b'\n']).chain(body.bytes());
    let hash =
        bytes.fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{hash:016x}")
}

pub(crate) mod crash {
    //! Points at which a test kills the process as `kill -9` would. They do nothing in other builds.

    #[cfg(not(test))]
    pub(crate) fn point(_name: &str) {}

    #[cfg(test)]
    pub(crate) use testing::point;

    #[cfg(test)]
    pub(crate) mod testing {
        use std::sync::atomic::{AtomicI64, Ordering};

        /// Number of points to pass before the crash; negative for no crash.
        static LEFT: AtomicI64 = AtomicI64::new(-1);

        pub(crate) fn arm(points: i64) {
            LEFT.store(points, Ordering::SeqCst);
        }

        pub(crate) fn point(_name: &str) {
            if LEFT.load(Ordering::SeqCst) >= 0 && LEFT.fetch_sub(1, Ordering::SeqCst) == 0 {
                let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    use crate::Root;

    proptest::proptest! {
        #[test]
        fn what_is_written_is_read_and_any_change_is_noticed(
            values in proptest::collection::vec("\\PC{0,20}", 1..8),
            at in 0usize..4096,
            byte in 0u8..128,
        ) {
            let entries: Vec<Original> = (0..).zip(&values).map(|(number, value): (u32, _)| Original {
                knob: Knob::HostFile { root: Root::Sys, path: format!("knob{number}") },
                value: Value::Text(value.clone()),
            }).collect();
            let path = Path::new("originals");
            let text = format("boot", &[], &entries).unwrap();
            let read = parse(path, text.as_bytes(), "boot").unwrap();
            proptest::prop_assert_eq!((&read.entries, read.stale), (&entries, 0));
            let mut bytes = text.clone().into_bytes();
            let at = at % bytes.len();
            if bytes[at].is_ascii() && bytes[at] != byte {
                bytes[at] = byte;
                // Only blanks between the header's fields may differ unnoticed.
                if let Ok(read) = parse(path, &bytes, "boot") {
                    proptest::prop_assert_eq!((read.entries, read.stale), (entries, 0));
                }
            }
        }

        #[test]
        fn any_text_is_a_journal_or_damaged(text in "\\PC{0,60}(\n\\PC{0,60}){0,3}") {
            match parse(Path::new("originals"), text.as_bytes(), "boot") {
                Ok(kept) => {
                    proptest::prop_assert!(kept == JournalContent::default() && text.is_empty());
                }
                Err(error) => {
                    let damaged = matches!(error, JournalError::Damaged { .. });
                    proptest::prop_assert!(damaged);
                }
            }
        }
    }

    /// Also in a directory that other users can list.
    #[test]
    fn no_other_user_can_hold_the_journals_lock() {
        let dir = tempfile::tempdir().unwrap();
        let _journal = Journal::open(&dir.path().join("originals"), THIS_BOOT).unwrap();
        let lock = fs::metadata(dir.path().join("originals.lock")).unwrap();
        assert_eq!(lock.permissions().mode() & 0o777, 0o600);
    }

    const THIS_BOOT: &str = "0f6d1f5a-8e55-4b8e-9d43-1f7c2a90be11";
    const EARLIER_BOOT: &str = "c2b7a9e4-31d0-4f6b-a5c8-64e09d1f7a32";

    fn halt_poll() -> Original {
        let knob = Knob::HostFile { root: Root::Sys, path: "module/kvm/parameters/halt_poll_ns".to_owned() };
        Original { knob, value: Value::Text("200000".to_owned()) }
    }

    /// Opens a journal whose file contains these bytes, in the running boot.
    fn opened(bytes: &[u8]) -> Result<(usize, usize), JournalError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("originals");
        fs::write(&path, bytes).unwrap();
        let mut journal = Journal::open(&path, THIS_BOOT)?;
        let found = (journal.entries().len(), journal.stale());
        assert_eq!(Originals::read(&path, THIS_BOOT).unwrap().entries(), journal.entries());
        // The journal is usable: a new original is found again after reopening.
        journal.store(vec![halt_poll()])?;
        drop(journal);
        assert!(Journal::open(&path, THIS_BOOT)?.has(&halt_poll().knob));
        Ok(found)
    }

    /// A file as a later version might write it: with a knob that this version does not know, and a valid checksum.
    fn with_knob_of_another_version(boot: &str) -> String {
        let body = "{\"knob\":{\"knob\":\"uclamp\",\"thread\":7},\"value\":{\"clamp\":[0,1024]}}\n";
        let sum = checksum(boot, body);
        format!("{{\"format\":{FORMAT},\"boot_id\":\"{boot}\",\"entries\":1,\"checksum\":\"{sum}\"}}\n{body}")
    }

    #[test]
    fn a_journal_of_an_earlier_boot_is_dropped_whatever_version_wrote_it() {
        let of_this_version = format(EARLIER_BOOT, &[], &[halt_poll()]).unwrap();
        let later = format!("{{\"boot_id\":\"{EARLIER_BOOT}\",\"format\":7,\"digest\":\"sha\"}}\n[1]\n[2]\n");
        let of_no_text = [later.as_bytes(), &[0xff, 0xfe, b'\n', 0, b'\n']].concat();
        let torn = of_this_version.get(..of_this_version.len() - 9).unwrap();
        for (written, stale) in [
            (of_this_version.as_bytes(), 1),
            (with_knob_of_another_version(EARLIER_BOOT).as_bytes(), 1),
            (later.as_bytes(), 2),
            (&of_no_text, 4),
            (torn.as_bytes(), 1),
        ] {
            assert_eq!(opened(written).unwrap(), (0, stale), "{}", String::from_utf8_lossy(written));
        }
    }

    #[test]
    fn a_journal_of_this_boot_by_another_version_says_which_version_resets_it() {
        assert_eq!(opened(format(THIS_BOOT, &[], &[halt_poll()]).unwrap().as_bytes()).unwrap(), (1, 0));
        let later = format!("{{\"boot_id\":\"{THIS_BOOT}\",\"format\":2,\"digest\":\"sha\"}}\n[1]\n");
        let older = later.replace("\"format\":2", "\"format\":0");
        for written in [later, older, with_knob_of_another_version(THIS_BOOT)] {
            let error = opened(written.as_bytes()).unwrap_err();
            assert!(matches!(error, JournalError::OtherVersion { .. }), "{error}");
            assert!(error.to_string().contains("`ontime reset` of that version"), "{error}");
        }
    }

    /// Three lines: an entry of this version, one with an unknown field, and one with an unknown knob.
    fn later_lines() -> [String; 3] {
        let own = serde_json::to_string(&halt_poll()).unwrap();
        let limited = own.replace("\"path\"", "\"cgroup\":\"rt.slice\",\"path\"").replace("halt_poll_ns", "avic");
        [own, limited, "{\"knob\":{\"knob\":\"uclamp\",\"thread\":7},\"value\":{\"clamp\":[0,1024]}}".to_owned()]
    }

    fn sealed(lines: &[String], more: &str) -> String {
        let body = lines.join("\n") + "\n";
        let (sum, entries) = (checksum(THIS_BOOT, &body), lines.len());
        let header = format!("\"format\":{FORMAT},\"boot_id\":\"{THIS_BOOT}\",\"entries\":{entries}");
        format!("{{{header},\"checksum\":\"{sum}\"{more}}}\n{body}")
    }

    #[test]
    fn what_a_later_version_kept_is_neither_misread_nor_lost_by_a_reset() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("originals");
        let [own, limited, clamp] = later_lines();
        let written = sealed(&[limited.clone(), own.clone(), clamp.clone()], "");
        fs::write(&path, &written).unwrap();
        for refused in [Journal::open(&path, THIS_BOOT).map(|_| ()), Originals::read(&path, THIS_BOOT).map(|_| ())] {
            let error = refused.unwrap_err();
            assert!(matches!(error, JournalError::OtherVersion { .. }), "{error}");
            assert!(error.to_string().contains("line 2: unknown field cgroup"), "{error}");
        }
        assert_eq!(fs::read_to_string(&path).unwrap(), written);
        let mut journal = Journal::open_to_reset(&path, THIS_BOOT).unwrap();
        assert_eq!(journal.entries(), [halt_poll()]);
        journal.remove(&BTreeSet::from([halt_poll().knob.key()])).unwrap();
        drop(journal);
        assert_eq!(fs::read_to_string(&path).unwrap(), sealed(&[limited.clone(), clamp.clone()], ""));
        let again = Journal::open_to_reset(&path, THIS_BOOT).unwrap();
        assert!(again.entries().is_empty() && again.foreign() == [limited, clamp]);
    }

    #[test]
    fn a_header_with_more_is_another_versions_not_damage() {
        let error = opened(sealed(&later_lines()[..1], ",\"order\":\"forward\"").as_bytes()).unwrap_err();
        assert!(matches!(error, JournalError::OtherVersion { .. }), "{error}");
        assert!(error.to_string().contains("line 1: unknown field order"), "{error}");
    }

    #[test]
    fn a_boot_id_that_lost_a_digit_is_damage_not_an_earlier_boot() {
        let near = THIS_BOOT.replacen('0', "1", 1);
        let written = format(THIS_BOOT, &[], &[halt_poll()]).unwrap().replace(THIS_BOOT, &near);
        assert!(matches!(opened(written.as_bytes()).unwrap_err(), JournalError::Damaged { .. }));
    }
}
