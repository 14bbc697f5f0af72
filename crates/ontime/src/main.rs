//! The program `ontime`. All of it is in the library.

use std::process::ExitCode;

/// What `ontime --version` prints. Package builds add the commit and its date (`make dist`). Only this file reads the
/// variable, so a new commit recompiles nothing else.
const VERSION: &str = match option_env!("ONTIME_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

fn main() -> ExitCode {
    ontime::main(VERSION)
}
