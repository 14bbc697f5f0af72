//! The program `ontime-lab`. All of it is in the library.

use std::process::ExitCode;

/// What `ontime-lab --version` prints. Builds for packages add the commit and its date (`make dist`). The variable is
/// read in this file only, so a new commit compiles nothing else again.
const VERSION: &str = match option_env!("ONTIME_VERSION") {
    Some(version) => version,
    None => env!("CARGO_PKG_VERSION"),
};

fn main() -> ExitCode {
    ontime_bench::main(VERSION)
}
