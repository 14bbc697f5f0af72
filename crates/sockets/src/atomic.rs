//! Atomics for the files that the crate `ontime-model` also compiles, there with the model checker's types.

pub(crate) use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU8, AtomicU32, AtomicU64, Ordering, fence};
