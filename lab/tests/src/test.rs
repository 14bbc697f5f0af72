//! What a test is.

use anyhow::Result;

use crate::emulated::{HOST, Host};
use crate::outside::Outside;

/// A program of a test: a process of its own for what measures at real-time priority in the emulated host
/// ([`crate::inside::command::program`]), or for the clients' side.
pub(crate) type Program = fn(&[String]) -> Result<()>;

#[derive(Clone, Copy)]
pub(crate) struct Test {
    pub(crate) name: &'static str,
    /// Whether no other test may run meanwhile.
    pub(crate) alone: bool,
    pub(crate) host: Host,
    /// The inner half, which `ontime-lab-tests inside NAME` runs in the emulated host. Tests of `ontime-lab` itself and
    /// those that run a script have none.
    pub(crate) inside: Option<fn() -> Result<()>>,
    /// By name. `ontime-lab-tests program TEST NAME ARGUMENTS...` runs one.
    pub(crate) programs: &'static [(&'static str, Program)],
    /// Everything that runs on this machine. Most tests only run their inner half.
    pub(crate) outside: fn(&Outside) -> Result<()>,
}

/// A test that others differ from: `Test { name: "...", inside: ..., ..TEST }`.
pub(crate) const TEST: Test =
    Test { name: "", alone: false, host: HOST, inside: None, programs: &[], outside: Outside::inside };
