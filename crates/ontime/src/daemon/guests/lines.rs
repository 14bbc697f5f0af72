//! Parses the lines that a device process sends, which is not trusted (pure).

use ontime_sockets::deadlines::BandwidthRequest;

/// The longest line, bytes: 64 vCPUs.
pub(crate) const LINE_MAX: usize = 16 * 1024;

/// Takes whole lines out of the buffer.
///
/// # Errors
/// A line is too long, or is not a valid request: each line is one request.
pub fn take(buffer: &mut Vec<u8>) -> std::io::Result<Vec<BandwidthRequest>> {
    let Some(end) = buffer.iter().rposition(|byte| *byte == b'\n') else {
        return if buffer.len() > LINE_MAX { Err(std::io::ErrorKind::InvalidData.into()) } else { Ok(Vec::new()) };
    };
    let rest = buffer.split_off(end + 1);
    let whole = std::mem::replace(buffer, rest);
    let lines = whole.split_inclusive(|byte| *byte == b'\n');
    lines.map(|line| serde_json::from_slice(line).map_err(std::io::Error::from)).collect()
}
