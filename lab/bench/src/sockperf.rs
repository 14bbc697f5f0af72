//! The messages of a stock `sockperf server`.
//!
//! Source: sockperf's `src/message.h` and `src/server.h` (3.7 to 3.10), all fields in network byte order:
//!
//! ```text
//!  0        8       10        14
//!  +--------+--------+---------+--------------
//!  |sequence| flags  | length  | payload ...
//!  +--------+--------+---------+--------------
//! ```
//!
//! The server answers a datagram with the flags client and pong. It echoes the datagram with the client flag cleared.
//! It trusts `length`, which must be the length of the whole datagram.

/// Size of the header, and of the shortest message, bytes.
pub const HEADER: usize = 14;
/// The longest message for an untagged 1500-byte MTU over IPv4, bytes.
pub const LONGEST: usize = 1_472;
const CLIENT: u16 = 1;
const PONG: u16 = 2;

/// Writes a request into the first bytes of `message`, which is the whole datagram (at least [`HEADER`] long; a shorter
/// one stays unchanged, and no server answers it).
pub fn write_request(message: &mut [u8], sequence: u64) {
    let length = u32::try_from(message.len()).unwrap_or(u32::MAX);
    if let Some(header) = message.first_chunk_mut::<HEADER>() {
        let fields =
            sequence.to_be_bytes().into_iter().chain((CLIENT | PONG).to_be_bytes()).chain(length.to_be_bytes());
        for (byte, field) in header.iter_mut().zip(fields) {
            *byte = field;
        }
    }
}

/// The sequence number of a server's reply; `None` if the message is not a reply.
pub(crate) fn read_reply(message: &[u8]) -> Option<u64> {
    let (sequence, rest) = message.split_first_chunk::<8>()?;
    let (flags, rest) = rest.split_first_chunk::<2>()?;
    let length = u32::from_be_bytes(*rest.first_chunk::<4>()?);
    let is_reply = u16::from_be_bytes(*flags) & CLIENT == 0 && length as usize == message.len();
    is_reply.then(|| u64::from_be_bytes(*sequence))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_is_what_sockperf_puts_on_the_wire() {
        let mut message = [0_u8; 16];
        write_request(&mut message, 0x0102);
        assert_eq!(message, [0, 0, 0, 0, 0, 0, 1, 2, 0, 3, 0, 0, 0, 16, 0, 0]);
        assert_eq!(read_reply(&message), None, "a request is no reply");
        message[9] = 2;
        assert_eq!(read_reply(&message), Some(0x0102));
        assert_eq!(read_reply(&message[..15]), None, "cut short");
    }

    #[test]
    fn too_short_a_message_is_left_alone() {
        let mut message = [7_u8; 13];
        write_request(&mut message, 1);
        assert_eq!(message, [7; 13]);
    }
}
