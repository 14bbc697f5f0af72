//! The targets, by the source of the bytes.

pub mod files;
pub mod guest;
pub mod host;
pub mod kernel;
pub mod shared;
