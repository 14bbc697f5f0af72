//! Frames of IEC 61850-9-2: how they are written ([`frame`]), sent ([`publisher`]) and found in a capture ([`wire`]).

pub mod frame;
pub mod publisher;
pub mod wire;

/// A frame is late when its answer takes longer than until the next frame.
pub const LATE_NS: u64 = frame::PERIOD_NS;
