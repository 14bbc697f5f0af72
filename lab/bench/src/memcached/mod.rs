//! memcached, its client ([`client`]), and the analysis of the capture ([`wire`]), under the load of Access'18, IV-G 2
//! (Figure 15), and of RTVirt, section 4.4.
//!
//! The papers' clients are memaslap, changed to send at random rates, and Mutilate. This client sends the same requests
//! ([`Traffic`]) and checks the answers. Keys and values are fixed, so that every answer is known in advance.

pub mod client;
pub mod wire;

use serde::{Deserialize, Serialize};

/// Number of keys. All have values before the measurement, so that every GET is a hit.
pub(crate) const KEYS: u16 = 100;
/// The answer to a SET.
const STORED: &[u8] = b"STORED\r\n";

/// The requests and their timing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    /// Length of a key, bytes.
    pub key_bytes: usize,
    /// Length of a value, bytes.
    pub value_bytes: usize,
    /// One of this many requests is a SET; `None` for no SETs.
    pub set_of: Option<u64>,
    /// Time from an answer to the next request, us: minimum and maximum.
    pub gaps_us: (u64, u64),
    /// Whether the gaps are normally distributed ([`crate::client::ClientConfig::normal_gaps`]) instead of uniformly.
    pub normal_gaps: bool,
    /// Time after which an answer is late, ns; `None` for never.
    pub late_ns: Option<u64>,
}

/// Access'18: 100 to 1,000 requests per second.
pub const ACCESS: Traffic = Traffic {
    key_bytes: 64,
    value_bytes: 1_024,
    set_of: Some(10),
    gaps_us: (1_000, 10_000),
    normal_gaps: false,
    late_ns: None,
};
/// RTVirt, after Facebook's: 100 requests per second, with an objective of 500 us.
pub const RTVIRT: Traffic = Traffic {
    key_bytes: 30,
    value_bytes: 200,
    set_of: None,
    gaps_us: (0, 20_000),
    normal_gaps: true,
    late_ns: Some(500_000),
};

impl Traffic {
    /// Number of requests for `gets` GETs: whole tens if one of ten is a SET.
    pub fn requests(&self, gets: u64) -> u64 {
        self.set_of.map_or(gets, |of| gets.div_ceil(of.saturating_sub(1).max(1)).saturating_mul(of))
    }

    /// Length of the answer to a GET, bytes: a line, the value, `END`.
    pub fn answer_bytes(&self) -> usize {
        self.get_answer(0).len()
    }

    fn key(&self, number: u16) -> String {
        format!("{number:k<length$}", length = self.key_bytes)
    }

    fn value(&self, number: u16) -> Vec<u8> {
        vec![b'a' + (number % 26) as u8; self.value_bytes]
    }

    fn get(&self, number: u16) -> Vec<u8> {
        format!("get {}\r\n", self.key(number)).into_bytes()
    }

    fn get_answer(&self, number: u16) -> Vec<u8> {
        let line = format!("VALUE {} 0 {}\r\n", self.key(number), self.value_bytes);
        [line.as_bytes(), &self.value(number), b"\r\nEND\r\n"].concat()
    }

    fn set(&self, number: u16) -> Vec<u8> {
        let line = format!("set {} 0 0 {}\r\n", self.key(number), self.value_bytes);
        [line.as_bytes(), &self.value(number), b"\r\n"].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_have_the_papers_sizes() {
        for number in [0, 7, KEYS - 1] {
            assert_eq!((ACCESS.key(number).len(), ACCESS.get_answer(number).len()), (64, ACCESS.answer_bytes()));
            assert_eq!(ACCESS.set(number).len(), "set  0 0 1024\r\n".len() + 64 + 1_024 + 2);
            assert_eq!(RTVIRT.get(number).len(), "get \r\n".len() + 30);
            assert_eq!(RTVIRT.get_answer(number).len(), "VALUE  0 200\r\n".len() + 30 + 200 + "\r\nEND\r\n".len());
        }
        assert_ne!(ACCESS.key(1), ACCESS.key(11));
        assert_ne!(RTVIRT.key(1), RTVIRT.key(10));
        assert_eq!((ACCESS.requests(9), ACCESS.requests(10), ACCESS.requests(0)), (10, 20, 0));
        assert_eq!(RTVIRT.requests(7), 7);
    }
}
