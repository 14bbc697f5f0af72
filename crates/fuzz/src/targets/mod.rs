//! The targets, by who chooses the bytes.

pub mod files;
pub mod guest;
pub mod host;
pub mod kernel;
pub mod shared;
