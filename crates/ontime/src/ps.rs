//! `ontime ps`: shows tenants, their class, and the CPUs and priority of each of their threads.

use std::io::Write;
use std::process::ExitCode;

use ontime_tenants::{Sources, discover};

use crate::client::{self, ClientError};
use crate::daemon::config::Config;
use crate::daemon::view;
use crate::paths::Paths;
use crate::unseen::Unseen;
use crate::{api, exit, table};

/// `ontime ps`
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print JSON: the answer of GET /v1/tenants.
    #[arg(long)]
    json: bool,
}

/// Shows the tenants, and their problems on standard error. Asks the daemon, or reads the host itself where no daemon
/// runs. Exit status 3 where tenants may be missing.
///
/// # Errors
/// Where the configuration is wrong, or standard output is closed.
pub(crate) fn run(args: &Args, paths: &Paths) -> anyhow::Result<ExitCode> {
    let (answer, problems, missed) = match client::get::<api::Tenants>(&paths.socket(), "/v1/tenants") {
        Ok(answer) => with_last_problems(answer, paths),
        Err(ClientError::NoDaemon { .. }) => look(paths, Unseen::rights())?,
        Err(error @ ClientError::Denied { .. }) => look(paths, Unseen::rights().also(error))?,
        Err(error) => return Err(error.into()),
    };
    for problem in problems {
        ontime_cli::print_stderr(table::visible(&format!("ontime: {}: {}", problem.subject, problem.message)));
    }
    let mut out = std::io::stdout().lock();
    if args.json {
        serde_json::to_writer_pretty(&mut out, &answer)?;
        writeln!(out)?;
    } else if answer.tenants.is_empty() {
        let seen = if missed.is_none() { "runs on this host" } else { "is among what could be seen" };
        writeln!(out, "no tenant: no VM and no container {seen}")?;
    } else {
        let head = ["NAME", "KIND", "CLASS", "SOURCE", "THREAD", "COMM", "TID", "POLICY", "CPUS", "LAST"];
        let rows: Vec<[String; 10]> = answer.tenants.iter().flat_map(rows).collect();
        table::write(&mut out, head, &rows)?;
    }
    Ok(ExitCode::from(missed.print(exit::OK)))
}

/// Adds the problems that the daemon's last pass found.
fn with_last_problems(answer: api::Tenants, paths: &Paths) -> (api::Tenants, Vec<api::Problem>, Unseen) {
    let missed = Unseen::default().and(&answer.unseen);
    match client::get::<api::Status>(&paths.socket(), "/v1/status") {
        Ok(status) => {
            let is_said = |problem: &api::Problem| answer.unseen.contains(problem);
            let others = status.problems.into_iter().filter(|problem| !is_said(problem)).collect();
            (answer, others, missed)
        }
        Err(error) => (answer, Vec::new(), missed.also(error)),
    }
}

fn look(paths: &Paths, missed: Unseen) -> anyhow::Result<(api::Tenants, Vec<api::Problem>, Unseen)> {
    let config = Config::load(&paths.config_dir)?;
    let found = discover(&Sources::host(), &config.rules);
    let tenants = found.tenants.iter().map(|tenant| view::tenant(tenant, config.rules.table())).collect();
    let answer = api::Tenants { schema_version: api::SCHEMA_VERSION, tenants, unseen: view::unseen(&found) };
    let missed = missed.and(&answer.unseen);
    let others = found.problems.iter().filter(|problem| !problem.hides_tenants());
    Ok((answer, others.map(view::problem).collect(), missed))
}

/// One row per thread. The tenant's own columns are filled in the first row only.
fn rows(tenant: &api::Tenant) -> Vec<[String; 10]> {
    let of_tenant = [tenant.name.clone(), tenant.kind.clone(), tenant.class.clone(), tenant.source.clone()];
    let blank = [const { String::new() }; 4];
    if tenant.threads.is_empty() {
        let [name, kind, class, source] = of_tenant;
        let none = || "-".to_owned();
        return vec![[name, kind, class, source, none(), none(), none(), none(), none(), none()]];
    }
    tenant
        .threads
        .iter()
        .enumerate()
        .map(|(index, thread)| {
            let [name, kind, class, source] = if index == 0 { of_tenant.clone() } else { blank.clone() };
            let policy = match &thread.wanted {
                Some(wanted) if *wanted != thread.policy => format!("{} (wanted {wanted})", thread.policy),
                _ => thread.policy.clone(),
            };
            let tid = thread.tid.to_string();
            let last = thread.last_cpu.to_string();
            let (role, comm, cpus) = (thread.role.clone(), thread.comm.clone(), thread.affinity.clone());
            [name, kind, class, source, role, comm, tid, policy, cpus, last]
        })
        .collect()
}
