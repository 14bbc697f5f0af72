//! Response times of Sampled Values: from a frame's passage of the RT NIC to its answer's.
//!
//! In: a capture. Out: a [`WireAnalysis`] whose requests are frames. `intervals_ns` are the times between frames,
//! because frames do not wait for answers.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;

use super::frame::{self, FrameDirection};
use crate::pcap::{PcapError, Record};
use crate::wire::{Monitor, Reader, RtFlow, WireAnalysis, analyse_by};

/// Represents the publisher and the subscriber, which have no IP addresses.
const NOBODY: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::UNSPECIFIED), 0);

/// Distinguishes frames and answers.
#[derive(Debug, Default)]
struct Frames {
    published: Vec<u64>,
}

impl Reader for Frames {
    fn record(&mut self, record: &Record<'_>, monitor: &mut Monitor) {
        match frame::read(record.data) {
            Some(Ok((FrameDirection::Published, number))) => {
                self.published.push(record.at_ns);
                monitor.request(record.at_ns, NOBODY, NOBODY, number);
            }
            Some(Ok((FrameDirection::Answered, number))) => monitor.reply(record.at_ns, NOBODY, NOBODY, number),
            Some(Err(())) => monitor.malformed(),
            None => {}
        }
    }
}

/// Analyses a capture. The first `warmup` frames do not count.
pub(crate) fn analyse(capture: &Path, warmup: u64) -> Result<WireAnalysis, PcapError> {
    let mut frames = Frames::default();
    let mut analysis = analyse_by(&mut frames, capture, RtFlow { warmup, ..RtFlow::new(0) })?;
    let counted = frames.published.get(usize::try_from(warmup).unwrap_or(usize::MAX)..).unwrap_or_default();
    let gaps = counted.iter().zip(counted.iter().skip(1));
    analysis.intervals_ns = gaps.filter_map(|(from, to)| to.checked_sub(*from)).collect();
    Ok(analysis)
}
