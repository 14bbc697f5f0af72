//! A SIP proxy under the load of Access'18, IV-G 1 (Figure 14): Kamailio relays calls between two SIPp instances
//! ([`sipp`]), and the wire says how long each message took through it ([`wire`]).

pub mod sipp;
pub mod wire;

/// Messages of a call that the proxy forwards: INVITE, 180, 200, ACK, BYE, 200.
const MESSAGES: u64 = 6;

/// So many calls have at least so many forwarded messages.
pub fn calls(messages: u64) -> u64 {
    messages.div_ceil(MESSAGES)
}
