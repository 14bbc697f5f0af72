//! A SIP proxy under the load of Access'18, IV-G 1 (Figure 14): Kamailio relays calls between two SIPp instances
//! ([`sipp`]), and the capture shows each message's delay in the proxy ([`wire`]).

pub mod sipp;
pub mod wire;

/// Messages of a call that the proxy forwards: INVITE, 180, 200, ACK, BYE, 200.
const MESSAGES: u64 = 6;

/// The number of calls that have at least this many forwarded messages.
pub fn calls(messages: u64) -> u64 {
    messages.div_ceil(MESSAGES)
}
