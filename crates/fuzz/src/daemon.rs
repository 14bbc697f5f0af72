//! Files of the crate `ontime`, which is a program and not a library.
#![allow(dead_code, reason = "the targets use a part of these files")]

use crate::cap;

#[path = "../../ontime/src/daemon/config.rs"]
pub(crate) mod config;
#[path = "../../ontime/src/daemon/guests/lines.rs"]
pub(crate) mod lines;
