//! The `ontime` command: one file a subcommand.

fn main() {}
