//! The atomics of files that the crate `ontime-model` compiles, too, with the model checker's.

pub use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
