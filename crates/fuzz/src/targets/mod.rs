//! The targets, by the source of the bytes.

pub mod api;
pub mod files;
pub mod guest;
pub mod host;
pub mod kernel;
pub mod shared;
