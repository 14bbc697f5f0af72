//! The link between each NIC of the emulated host and the clients inside: rate, delay and a finite queue, in the host's
//! time. The emulator's object `filter-link` carries the frames of one direction.

use std::fmt;
use std::fs;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use crate::error::{LabError, file};

/// Units of a rate, bits per second, the largest first.
const RATES: [(&str, u64); 4] = [("gbit", 1_000_000_000), ("mbit", 1_000_000), ("kbit", 1_000), ("bit", 1)];
/// Units of a delay, ns, the largest first. A text ends with `s` in all of them.
const DELAYS: [(&str, u64); 4] = [("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000), ("ns", 1)];
/// Slowest and fastest rate, bits per second. The emulator sends a frame in a whole number of ns: faster links would be
/// faster than stated by more than 0.3 %.
const RATE: std::ops::RangeInclusive<u64> = 1_000..=10_000_000_000;
/// Longest delay, ns.
const LONGEST_NS: u64 = 1_000_000_000;
/// Range of [`Link::packets`]; the largest is the emulator's own limit of a queue.
const PACKETS: std::ops::RangeInclusive<u32> = 1..=10_000;

/// A link, the same in both directions. Its text is `RATE,DELAY,PACKETS`, such as `1gbit,5us,256`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// Bits per second, with preamble, check sequence and gap of each frame.
    pub rate: u64,
    /// Time from the end of a frame at one side to its arrival at the other.
    pub delay: Duration,
    /// Maximum of frames that wait or are being sent. More are dropped.
    pub packets: u32,
}

/// Direction of frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// From the clients to the host.
    ToHost,
    /// From the host to the clients.
    ToClients,
}

impl Way {
    /// Both directions.
    pub const ALL: [Self; 2] = [Self::ToHost, Self::ToClients];

    /// The direction in words, for messages.
    pub fn description(self) -> &'static str {
        match self {
            Self::ToHost => "to the host",
            Self::ToClients => "to the clients",
        }
    }

    /// The emulator's name of the direction, as seen from the clients' side of the hub.
    fn queue(self) -> &'static str {
        match self {
            Self::ToHost => "tx",
            Self::ToClients => "rx",
        }
    }
}

impl Default for Link {
    /// A NIC of 10 Gbit/s, and a switch. Without a rate, a burst that the sender's NIC segments would reach the host at
    /// one instant, overflow its NIC's ring of 256, and TCP's recovery would decide the throughput.
    fn default() -> Self {
        Self { rate: 10_000_000_000, delay: Duration::from_micros(5), packets: 1000 }
    }
}

impl Link {
    /// Options of the emulator's object for one direction of a NIC's link, whose counts go to a file in `dir`.
    pub(crate) fn options(&self, nic: &str, way: Way, dir: &Path) -> String {
        let (id, queue, delay_ns) = (object(nic, way), way.queue(), self.delay.as_nanos());
        let Self { rate, packets, .. } = self;
        // The emulator takes two commas for one of the path.
        let counts = dir.join(&id).to_string_lossy().replace(',', ",,");
        format!(
            "filter-link,id={id},netdev={nic},queue={queue},rate={rate},delay={delay_ns},packets={packets},\
             counts={counts}"
        )
    }
}

/// Name of the emulator's object for one direction of a NIC's link, and of the file with its counts.
fn object(nic: &str, way: Way) -> String {
    format!("link-{nic}-{}", way.queue())
}

/// Number of frames that one direction of a NIC's link has dropped, from the file in `dir`: frames passed, frames
/// dropped.
pub(crate) fn dropped(nic: &str, way: Way, dir: &Path) -> Result<u64, LabError> {
    let path = dir.join(object(nic, way));
    let counts = fs::read(&path).map_err(file("read", &path))?;
    let field = counts.get(8..16).and_then(|bytes| bytes.try_into().ok());
    field.map(u64::from_ne_bytes).ok_or_else(|| LabError::Protocol(format!("{} has no counts", path.display())))
}

impl FromStr for Link {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!(
                "'{text}' is no RATE,DELAY,PACKETS such as 1gbit,5us,256: 1kbit to 10gbit, 0us to 1s, {} to {} \
                 packets",
                PACKETS.start(),
                PACKETS.end()
            )
        };
        let mut parts = text.split(',');
        let (Some(rate), Some(delay), Some(packets), None) = (parts.next(), parts.next(), parts.next(), parts.next())
        else {
            return Err(wrong());
        };
        let rate = quantity(rate, &RATES).filter(|rate| RATE.contains(rate)).ok_or_else(wrong)?;
        let delay_ns = quantity(delay, &DELAYS).filter(|delay| *delay <= LONGEST_NS).ok_or_else(wrong)?;
        let packets = packets.parse().ok().filter(|packets| PACKETS.contains(packets)).ok_or_else(wrong)?;
        Ok(Self { rate, delay: Duration::from_nanos(delay_ns), packets })
    }
}

/// A whole number and one of these units.
fn quantity(text: &str, units: &[(&str, u64)]) -> Option<u64> {
    let end = text.find(|c: char| !c.is_ascii_digit())?;
    let (number, unit) = text.split_at(end);
    let (_, factor) = units.iter().find(|(name, _)| *name == unit)?;
    number.parse::<u64>().ok()?.checked_mul(*factor)
}

/// In the largest unit that has no fraction.
fn in_words(value: u64, units: &[(&str, u64)]) -> String {
    let whole = units.iter().find(|(_, factor)| value > 0 && value % factor == 0);
    let (name, factor) = whole.or(units.last()).copied().unwrap_or(("", 1));
    format!("{}{name}", value / factor)
}

impl fmt::Display for Link {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let delay_ns = u64::try_from(self.delay.as_nanos()).unwrap_or(u64::MAX);
        write!(out, "{},{},{}", in_words(self.rate, &RATES), in_words(delay_ns, &DELAYS), self.packets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_is_read_and_printed_in_the_same_words() {
        for text in ["1gbit,5us,256", "100mbit,1ms,1", "2500mbit,0ns,10000", "1kbit,1s,64", "1500bit,1500ns,9"] {
            assert_eq!(text.parse::<Link>().unwrap().to_string(), text);
        }
        assert_eq!(Link::default().to_string(), "10gbit,5us,1000");
        let link: Link = "1gbit,5us,256".parse().unwrap();
        assert_eq!((link.rate, link.delay, link.packets), (1_000_000_000, Duration::from_micros(5), 256));
        assert_eq!(
            link.options("rt", Way::ToHost, Path::new("/a,b")),
            "filter-link,id=link-rt-tx,netdev=rt,queue=tx,rate=1000000000,delay=5000,packets=256,\
             counts=/a,,b/link-rt-tx"
        );
    }

    #[test]
    fn counts_are_read_from_the_emulators_file() {
        let dir = tempfile::tempdir().unwrap();
        let counts: Vec<u8> = [700_u64, 9].iter().flat_map(|count| count.to_ne_bytes()).collect();
        fs::write(dir.path().join("link-bulk-rx"), &counts).unwrap();
        fs::write(dir.path().join("link-bulk-tx"), &counts[..9]).unwrap();
        let read = |way| dropped("bulk", way, dir.path());
        assert_eq!(read(Way::ToClients).unwrap(), 9);
        assert!(read(Way::ToHost).unwrap_err().to_string().contains("no counts"));
    }

    #[test]
    fn a_link_that_cannot_be_is_told_with_an_example() {
        for text in [
            "",
            "1gbit",
            "1gbit,5us",
            "1gbit,5us,256,1",
            "0gbit,5us,256",
            "999bit,5us,256",
            "11gbit,5us,256",
            "gbit,5us,256",
            "1tbit,5us,256",
            "1,5us,256",
            "1gbit,5,256",
            "1gbit,2s,256",
            "1gbit,-5us,256",
            "1gbit,5us,0",
            "1gbit,5us,10001",
            "1gbit,5us,x",
            "99999999999999999999gbit,5us,256",
        ] {
            let error = text.parse::<Link>().unwrap_err();
            assert!(error.contains("1gbit,5us,256") && error.contains("10000"), "{text}: {error}");
        }
    }
}
