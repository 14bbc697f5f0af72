//! A frame of Sampled Values: IEC 61850-9-2, in the layout of its guideline for merging units ("9-2LE"), with one ASDU
//! per frame.
//!
//! ```text
//! Ethernet: group, publisher, 0x88BA | APPID, length, 4 reserved | savPdu { noASDU, seqASDU { ASDU { svID, smpCnt,
//! confRev, smpSynch, data } } }
//! ```
//! Numbers are big-endian; the savPdu is BER. The data are eight values of 4 bytes with 4 bytes of quality. Here the
//! first value is the frame's number, because smpCnt restarts every second.

/// Frames per second (80 samples per period of 50 Hz): one every 250 us.
pub(crate) const RATE: u64 = 4_000;
/// Time between two frames, ns.
pub(crate) const PERIOD_NS: u64 = 1_000_000_000 / RATE;
/// The multicast address that 9-2LE recommends.
pub(crate) const GROUP: [u8; 6] = [0x01, 0x0c, 0xcd, 0x04, 0x00, 0x01];
/// The publisher's address.
pub(crate) const PUBLISHER: [u8; 6] = [0x52, 0x54, 0x00, 0x02, 0x00, 0x01];
const TYPE: [u8; 2] = [0x88, 0xba];
const APPID: u16 = 0x4000;
const SV_ID: &[u8; 10] = b"ONTIME0001";
/// Offset of the data.
const DATA_AT: usize = 58;
const DATA_BYTES: usize = 64;

/// Direction of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FrameDirection {
    /// From the publisher.
    Published,
    /// Back to the publisher.
    Answered,
}

/// Makes frame `number`, counted from 0.
pub(crate) fn write(number: u64) -> Vec<u8> {
    let mut data = [0; DATA_BYTES];
    for (byte, of) in data.iter_mut().zip(number.to_be_bytes()) {
        *byte = of;
    }
    let count = ((number % RATE) as u16).to_be_bytes();
    let fields: [(u8, &[u8]); 5] = [(0x80, SV_ID), (0x82, &count), (0x83, &[0, 0, 0, 1]), (0x85, &[2]), (0x87, &data)];
    let asdu = fields.iter().flat_map(|(tag, value)| element(*tag, value)).collect::<Vec<_>>();
    let pdu = element(0x60, &[element(0x80, &[1]), element(0xa2, &element(0x30, &asdu))].concat());
    let length = (8 + pdu.len()) as u16;
    [&GROUP[..], &PUBLISHER, &TYPE, &APPID.to_be_bytes(), &length.to_be_bytes(), &[0; 4], &pdu].concat()
}

/// A BER element. None of the elements here is longer than 127 bytes.
fn element(tag: u8, value: &[u8]) -> Vec<u8> {
    [&[tag, value.len() as u8], value].concat()
}

/// Direction and number of a captured frame; `None` for a frame of another type, an error for a damaged one.
pub(crate) fn read(frame: &[u8]) -> Option<Result<(FrameDirection, u64), ()>> {
    if frame.get(12..14) != Some(&TYPE) {
        return None;
    }
    let way = match (frame.get(..6), frame.get(6..12)) {
        (Some(to), _) if to == PUBLISHER => FrameDirection::Answered,
        (Some(to), Some(from)) if to == GROUP && from == PUBLISHER => FrameDirection::Published,
        _ => return Some(Err(())),
    };
    let number = frame.get(DATA_AT..DATA_AT + 8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_be_bytes);
    Some(number.map(|number| (way, number)).ok_or(()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_laid_out_as_9_2_le_says() {
        let frame = write(4_001);
        assert_eq!(frame.len(), DATA_AT + DATA_BYTES);
        assert_eq!(frame[12..22], [0x88, 0xba, 0x40, 0x00, 0, 108, 0, 0, 0, 0]);
        // savPdu of 98 bytes, one ASDU.
        assert_eq!(frame[22..31], [0x60, 98, 0x80, 1, 1, 0xa2, 93, 0x30, 91]);
        // The sample count restarts every second.
        assert_eq!(frame[43..47], [0x82, 2, 0, 1]);
        assert_eq!(frame[56..58], [0x87, 64]);
    }

    #[test]
    fn ways_and_numbers_are_read_back_also_from_a_cut_capture() {
        let mut frame = write(123_456_789);
        frame.truncate(96);
        assert_eq!(read(&frame), Some(Ok((FrameDirection::Published, 123_456_789))));
        frame.copy_within(6..12, 0);
        assert_eq!(read(&frame), Some(Ok((FrameDirection::Answered, 123_456_789))));
        assert_eq!(read(&frame[..60]), Some(Err(())));
        frame[0] ^= 2;
        assert_eq!(read(&frame), Some(Err(())));
        frame[13] = 0xb8;
        assert_eq!(read(&frame), None);
    }
}
