//! `ontime names`: prints names, one a line, for the shells' completions (crates/manuals).
//!
//! Guests and users choose the names of tenants and interfaces, and bash expands once more the words that a completion
//! offers. So only names without special characters are printed.

use std::io::Write;
use std::process::ExitCode;

use clap::ValueEnum;
use ontime_hostnet::Method;
use ontime_sockets::config;
use ontime_tenants::{Sources, discover};

use crate::daemon::config::Config;
use crate::daemon::view;
use crate::paths::Paths;
use crate::{api, client, exit};

/// What is named.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Kind {
    /// Virtual machines
    Vms,
    /// Virtual machines that sockets.toml gives outsourced sockets, running or not
    SocketVms,
    /// Containers
    Containers,
    /// Network interfaces
    Nics,
    /// Methods of the packet path
    Methods,
}

/// `ontime names`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// What is named.
    #[arg(value_enum)]
    kind: Kind,
}

/// Prints what can be seen; nothing where nothing can.
///
/// # Errors
/// Where standard output is closed.
pub(crate) fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    let of_tenants = |is_container: bool| {
        let tenants = tenants(paths).into_iter().filter(|tenant| (tenant.kind == "container") == is_container);
        tenants.map(|tenant| tenant.name).collect()
    };
    let names: Vec<String> = match args.kind {
        Kind::Vms => of_tenants(false),
        Kind::SocketVms => config::load_all(&paths.config_dir).unwrap_or_default().into_keys().collect(),
        Kind::Containers => of_tenants(true),
        Kind::Nics => nics(),
        Kind::Methods => Method::ALL.iter().map(|method| method.name().to_owned()).collect(),
    };
    let mut out = std::io::stdout().lock();
    names.iter().filter(|name| is_plain(name)).try_for_each(|name| writeln!(out, "{name}"))?;
    Ok(ExitCode::from(exit::OK))
}

fn tenants(paths: &Paths) -> Vec<api::Tenant> {
    if let Ok(answer) = client::get::<api::Tenants>(&paths.socket(), "/v1/tenants") {
        return answer.tenants;
    }
    let Ok(config) = Config::load(&paths.config_dir) else { return Vec::new() };
    let found = discover(&Sources::host(), &config.rules);
    found.tenants.iter().map(|tenant| view::tenant(tenant, config.rules.table())).collect()
}

fn nics() -> Vec<String> {
    let entries = std::fs::read_dir("/sys/class/net").into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// Whether no shell gives a character of the name a meaning, and no program takes the name for an option.
fn is_plain(name: &str) -> bool {
    let plain = |of: char| of.is_ascii_alphanumeric() || matches!(of, '.' | '_' | '-' | ':' | '@' | '+' | ',' | '/');
    !name.is_empty() && !name.starts_with('-') && name.chars().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_a_meaning_in_a_shell_are_not_offered() {
        for plain in ["plc-1", "web.example.org", "k8s_pod/app:0", "eth0@if7", "a,b+c"] {
            assert!(is_plain(plain), "{plain}");
        }
        for special in
            ["", "-rf", "a b", "$(id)", "`id`", "a;b", "a'b", "a\"b", "a\\b", "~root", "a*", "a\nb", "x\u{1b}[2J", "ä"]
        {
            assert!(!is_plain(special), "{special}");
        }
    }
}
