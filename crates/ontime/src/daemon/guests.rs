//! What guests' deadline tasks ask for: the daemon's end of the device processes' `deadlines.sock` (`ontime_sockets::deadlines`).
//!
//! The daemon connects, so that a device process needs no way to it, and only to VMs whose reservation allows it (`deadlines` in sched.toml).
//! A device process serves a VM that may be hostile, and is not trusted either: lines have a limit, whoever breaks the protocol or
//! does not take its answers is let go, and what it held is free again.
//!
//! In: lines with what all vCPUs of a VM need. Out: those, checked; answers.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;

use ontime_plan::Nanos;
use ontime_sched::GuestNeed;
use ontime_sockets::deadlines::{Answer, Asked};

use super::events::{Event, Events};

/// The longest line, bytes: 64 vCPUs.
const LINE_MAX: usize = 16 * 1024;
/// The most reads of one connection at a time; what is left is read in the next round of events.
const READS: usize = 4;
/// The longest reason in an answer, bytes; the device process takes lines of 4 KiB.
const WHY_MAX: usize = 1024;

/// A VM's question.
#[derive(Debug, PartialEq, Eq)]
pub struct Question {
    /// Which VM.
    pub vm: String,
    /// For the answer; None: the connection has ended, and nothing is needed any more.
    pub seq: Option<u64>,
    /// What its vCPUs need.
    pub needs: Vec<GuestNeed>,
}

/// See above.
#[derive(Debug, Default)]
pub struct Guests {
    links: BTreeMap<String, Link>,
}

#[derive(Debug)]
struct Link {
    stream: UnixStream,
    buffer: Vec<u8>,
}

impl Guests {
    /// Connects to these VMs' device processes, as far as they are there, and lets go of others. Returns who was let go.
    pub fn follow(&mut self, wanted: &BTreeSet<String>, run_dir: &Path, events: &Events) -> Vec<String> {
        let gone: Vec<String> = self.links.keys().filter(|vm| !wanted.contains(*vm)).cloned().collect();
        self.links.retain(|vm, _| wanted.contains(vm));
        for vm in wanted {
            if self.links.contains_key(vm) || crate::device::vm_name(vm).is_err() {
                continue;
            }
            let path = ontime_sockets::Paths::new(run_dir, vm).deadlines();
            // There is none yet, or none that serves deadlines.
            let Ok(stream) = UnixStream::connect(&path) else { continue };
            let added = stream.set_nonblocking(true).and_then(|()| events.add(&stream, Event::Guests));
            match added {
                Ok(()) => {
                    tracing::info!("{vm}: its guest may ask for bandwidth");
                    self.links.insert(vm.clone(), Link { stream, buffer: Vec::new() });
                }
                Err(error) => tracing::warn!("{}: {error}", path.display()),
            }
        }
        gone
    }

    /// What has come.
    pub fn take(&mut self) -> Vec<Question> {
        let mut questions = Vec::new();
        self.links.retain(|vm, link| match link.take() {
            Ok(asked) => {
                questions.extend(asked.into_iter().map(|asked| question(vm, &asked)));
                true
            }
            Err(error) => {
                tracing::info!("{vm}: its device process is gone, its guest holds no bandwidth: {error}");
                questions.push(Question { vm: vm.clone(), seq: None, needs: Vec::new() });
                false
            }
        });
        questions
    }

    /// Answers. Whoever does not take it is let go: true.
    pub fn answer(&mut self, vm: &str, seq: u64, refused: Option<&str>) -> bool {
        let refused = refused.map(|why| why.chars().take(WHY_MAX / 4).collect());
        let Some(link) = self.links.get_mut(vm) else { return false };
        let line = serde_json::to_vec(&Answer { seq, refused }).map(|mut line| {
            line.push(b'\n');
            line
        });
        let done = line.map_err(std::io::Error::other).and_then(|line| link.stream.write_all(&line));
        if let Err(error) = &done {
            tracing::warn!("{vm}: its device process does not take answers: {error}");
            self.links.remove(vm);
        }
        done.is_err()
    }
}

impl Link {
    fn take(&mut self) -> std::io::Result<Vec<Asked>> {
        let mut chunk = [0; 4096];
        for _ in 0..READS {
            match self.stream.read(&mut chunk) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => self.buffer.extend(chunk.iter().take(count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        lines(&mut self.buffer)
    }
}

/// Takes whole lines out of the buffer.
fn lines(buffer: &mut Vec<u8>) -> std::io::Result<Vec<Asked>> {
    let Some(end) = buffer.iter().rposition(|byte| *byte == b'\n') else {
        return if buffer.len() > LINE_MAX { Err(ErrorKind::InvalidData.into()) } else { Ok(Vec::new()) };
    };
    let rest = buffer.split_off(end + 1);
    let whole = std::mem::replace(buffer, rest);
    let lines = whole.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    lines.map(|line| serde_json::from_slice(line).map_err(std::io::Error::from)).collect()
}

fn question(vm: &str, asked: &Asked) -> Question {
    let need = |need: &ontime_sockets::deadlines::Need| GuestNeed {
        vcpu: need.vcpu,
        budget: Nanos(need.budget),
        period: Nanos(need.period),
    };
    Question { vm: vm.to_owned(), seq: Some(asked.seq), needs: asked.vcpus.iter().map(need).collect() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn guests() -> (Guests, UnixStream) {
        let (own, other) = UnixStream::pair().unwrap();
        own.set_nonblocking(true).unwrap();
        let links = BTreeMap::from([("a".to_owned(), Link { stream: own, buffer: Vec::new() })]);
        (Guests { links }, other)
    }

    #[test]
    fn questions_come_whole_and_the_end_gives_all_back() {
        let (mut guests, mut device) = guests();
        device.write_all(b"{\"seq\":1,\"vcpus\":[]}\n{\"seq\":2,\"vcp").unwrap();
        assert_eq!(guests.take(), [Question { vm: "a".to_owned(), seq: Some(1), needs: vec![] }]);
        device.write_all(b"us\":[{\"vcpu\":3,\"budget\":1000,\"period\":2000}]}\n").unwrap();
        let asked = guests.take();
        assert_eq!(asked[0].seq, Some(2));
        assert_eq!(asked[0].needs, [GuestNeed { vcpu: 3, budget: Nanos(1_000), period: Nanos(2_000) }]);
        assert!(!guests.answer("a", 2, Some("full")));
        let mut said = [0; 64];
        let count = device.read(&mut said).unwrap();
        assert_eq!(&said[..count], b"{\"seq\":2,\"refused\":\"full\"}\n");
        drop(device);
        assert_eq!(guests.take(), [Question { vm: "a".to_owned(), seq: None, needs: vec![] }]);
        assert!(guests.links.is_empty());
    }

    #[test]
    fn whoever_breaks_the_protocol_is_let_go() {
        for bad in [b"nonsense\n".to_vec(), b"{\"seq\":1}\n".to_vec(), vec![b'x'; LINE_MAX + 1]] {
            let (mut guests, mut device) = guests();
            device.set_nonblocking(true).unwrap();
            let mut sent = 0;
            let mut asked = Vec::new();
            while sent < bad.len() && asked.is_empty() {
                sent += device.write(&bad[sent..]).unwrap_or(0);
                asked = guests.take();
            }
            while asked.is_empty() && !guests.links.is_empty() {
                asked = guests.take();
            }
            assert_eq!(asked, [Question { vm: "a".to_owned(), seq: None, needs: vec![] }]);
        }
    }
}
