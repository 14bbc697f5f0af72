//! Frames of IEC 61850-9-2: encoding ([`frame`]), sending ([`publisher`]) and analysis of a capture ([`wire`]).

pub mod frame;
pub mod publisher;
pub mod wire;

/// A frame is late if its answer comes after the next frame.
pub const LATE_NS: u64 = frame::PERIOD_NS;
/// If the time between two frames is longer, a period passed without a frame.
pub const GAP_NS: u64 = frame::PERIOD_NS + frame::PERIOD_NS / 2;
