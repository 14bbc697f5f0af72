//! The fuzzer's binary, with libFuzzer's arguments: files are run, directories are the corpus. The environment variable
//! `FUZZ_TARGET` selects the target.

#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;
use ontime_fuzz::Target;

static TARGET: OnceLock<Target> = OnceLock::new();

fn choose() {
    match std::env::var("FUZZ_TARGET").ok().and_then(|name| ontime_fuzz::target(&name)) {
        Some(target) => drop(TARGET.set(target)),
        None => {
            eprintln!("FUZZ_TARGET must be one of: {}", ontime_fuzz::TARGETS.map(|(name, _)| name).join(" "));
            std::process::exit(2);
        }
    }
}

// A panic ends the process, and libFuzzer keeps the input.
fuzz_target!(init: choose(), |input: &[u8]| {
    if let Some(target) = TARGET.get() {
        target(input);
    }
});
