//! memcached under the load of Access'18, IV-G 2 (Figure 15): what is asked ([`client`]), and what the wire says ([`wire`]).
//!
//! The paper's client is memaslap changed to send at random rates; this one asks the same (64-byte keys, 1,024-byte values, nine
//! GETs to a SET) and checks what is answered. Keys and values are fixed, so that every answer is known beforehand.

pub mod client;
pub mod wire;

/// Length of a key, bytes.
pub const KEY_BYTES: usize = 64;
/// Length of a value, bytes.
pub const VALUE_BYTES: usize = 1_024;
/// Different keys; all of them have values before anything is measured, so that every GET is a hit.
pub const KEYS: u16 = 100;
/// One of so many requests is a SET.
pub const OF: u64 = 10;
/// Length of the answer to a GET, bytes: a line, the value, `END`.
pub const GET_ANSWER: usize = "VALUE  0 1024\r\n".len() + KEY_BYTES + VALUE_BYTES + "\r\nEND\r\n".len();
/// The answer to a SET.
const STORED: &[u8] = b"STORED\r\n";

/// Requests to make for `gets` GETs: whole tens.
pub fn requests(gets: u64) -> u64 {
    gets.div_ceil(OF - 1).saturating_mul(OF)
}

fn key(number: u16) -> String {
    format!("{number:k<KEY_BYTES$}")
}

fn value(number: u16) -> [u8; VALUE_BYTES] {
    [b'a' + (number % 26) as u8; VALUE_BYTES]
}

fn get(number: u16) -> Vec<u8> {
    format!("get {}\r\n", key(number)).into_bytes()
}

fn get_answer(number: u16) -> Vec<u8> {
    let line = format!("VALUE {} 0 {VALUE_BYTES}\r\n", key(number));
    [line.as_bytes(), &value(number), b"\r\nEND\r\n"].concat()
}

fn set(number: u16) -> Vec<u8> {
    let line = format!("set {} 0 0 {VALUE_BYTES}\r\n", key(number));
    [line.as_bytes(), &value(number), b"\r\n"].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_the_papers_sizes() {
        for number in [0, 7, KEYS - 1] {
            assert_eq!((key(number).len(), get_answer(number).len()), (64, GET_ANSWER));
            assert_eq!(set(number).len(), "set  0 0 1024\r\n".len() + 64 + 1_024 + 2);
        }
        assert_ne!(key(1), key(11));
        assert_ne!(key(1), key(10));
        assert_eq!((requests(9), requests(10), requests(0)), (10, 20, 0));
    }
}
