//! `ontime-fuzz TARGET` below afl-fuzz fuzzes a target; `ontime-fuzz TARGET FILE...` runs a target on files.

use std::process::ExitCode;

fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let Some(target) = arguments.next().and_then(|name| ontime_fuzz::target(&name)) else {
        eprintln!("ontime-fuzz TARGET [FILE...]; targets: {}", ontime_fuzz::TARGETS.map(|(name, _)| name).join(" "));
        return ExitCode::from(2);
    };
    let files: Vec<String> = arguments.collect();
    if files.is_empty() {
        // Each panic ends the process, as afl-fuzz expects of a crash.
        afl::fuzz(true, target);
        return ExitCode::SUCCESS;
    }
    for file in files {
        match std::fs::read(&file) {
            Ok(bytes) => target(&bytes),
            Err(error) => {
                eprintln!("{file}: {error}");
                return ExitCode::from(2);
            }
        }
    }
    ExitCode::SUCCESS
}
