//! `ontime reload`: makes the daemon read `/etc/ontime` again, waits until that is applied, and shows the result.

use std::process::ExitCode;

use crate::paths::Paths;
use crate::{api, apply, client};

/// `ontime reload`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print JSON: the answer of POST /v1/reload.
    #[arg(long)]
    json: bool,
}

/// Asks the daemon to reload. The exit status is that of `ontime apply`, and 78 where a file is wrong: then the former
/// configuration stays in force.
///
/// # Errors
/// Where no daemon answers or it refuses the files.
pub(crate) fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    let report: api::Report = client::post(&paths.socket(), "/v1/reload", &())?;
    if !args.json {
        ontime_cli::print("the daemon has read its configuration again, and it is in force\n")?;
    }
    Ok(ExitCode::from(apply::show(&report, args.json, &["failed"])?))
}
