//! Progress messages on standard error.

use std::fmt::Display;
use std::sync::OnceLock;

use ontime_cli::print_stderr;

/// What each message begins with.
static BEGINNING: OnceLock<String> = OnceLock::new();

/// Makes all further messages begin with this text, which tells processes apart that measure at the same time.
pub(crate) fn begin_messages_with(text: String) {
    // A process sets it once, before its first message.
    let _ = BEGINNING.set(text);
}

/// Prints a progress message.
pub(crate) fn progress(message: impl Display) {
    print_stderr(format_args!("{}{message}", BEGINNING.get().map_or("", String::as_str)));
}
