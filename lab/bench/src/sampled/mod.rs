//! Frames of IEC 61850-9-2: encoding ([`frame`]), sending ([`publisher`]) and analysis of a capture ([`wire`]).

pub(crate) mod frame;
pub(crate) mod publisher;
pub(crate) mod wire;

/// A frame is late if its answer comes after the next frame.
pub(crate) const LATE_NS: u64 = frame::PERIOD_NS;
/// If the time between two frames is longer, a period passed without a frame.
pub(crate) const GAP_NS: u64 = frame::PERIOD_NS + frame::PERIOD_NS / 2;
