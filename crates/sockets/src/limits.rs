//! Sizes of the queues and of a call.

/// Largest size of a virtqueue, entries.
pub(crate) const QUEUE_MAX: usize = 256;
/// Most data of one call in each direction, bytes.
pub(crate) const DATA_MAX: u32 = 1 << 20;
/// Most descriptors of a call on main's queue, both directions together: 1,024 for data (IOV_MAX) and 4 for headers.
pub(crate) const SEGMENTS_MAIN: u32 = 1024 + 4;
/// Most descriptors of a call on a channel's queue.
pub(crate) const SEGMENTS_CHANNEL: u32 = 64;
