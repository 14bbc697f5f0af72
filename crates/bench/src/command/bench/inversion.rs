//! `ontime-lab bench inversion`: each rule of hostnet's table switched off alone.

use std::process::ExitCode;

use ontime_hostnet::{Method, RULES, RuleId};

use super::{Emulated, Measured, Output, chosen, noted, say};
use crate::inversion;

#[derive(Debug, clap::Args)]
pub struct Inversion {
    /// Rules to switch off, one after the other; default: all of method partitioned
    #[arg(long = "rule", value_name = "RULE", value_delimiter = ',')]
    rules: Vec<String>,
    #[command(flatten)]
    emulated: Emulated,
    /// Counted requests a case
    #[arg(long, default_value_t = 300)]
    requests: u64,
    /// Seed of the gaps between requests
    #[arg(long, default_value_t = 1)]
    seed: u64,
    #[command(flatten)]
    output: Output,
}

/// Measures with every rule, and without each of them, on one emulated host.
pub fn run(args: &Inversion) -> anyhow::Result<ExitCode> {
    let all = rules();
    let rules = chosen("rule", &args.rules, &all.iter().map(String::as_str).collect::<Vec<_>>())?;
    let mut missing = Vec::new();
    let plan = inversion::Plan { rules, requests: args.requests, seed: args.seed };
    let results = args
        .emulated
        .measure(false, |site, images| inversion::measure(&plan, &site, images, &mut say, &mut noted(&mut missing)))?;
    let notes = vec![
        "a row's cost here is that of this set-up: two NICs, each of one class, one CPU; a note says which rows it \
         cannot show"
            .to_owned(),
    ];
    let measured = Measured { experiment: "inversion", seed: args.seed, results, missing, notes };
    measured.report(&args.output)
}

/// What can be switched off: the rules of `partitioned` that set something.
fn rules() -> Vec<String> {
    let rows = RULES.iter().map(|rule| rule.id);
    rows.filter(|id| Method::Partitioned.has(*id) && *id != RuleId::HostConfig).map(|id| id.to_string()).collect()
}

#[cfg(test)]
mod tests {
    use ontime_lab::Kernel;

    use super::*;

    #[test]
    fn every_row_is_switched_off_as_host_toml_allows_it() {
        let rules = rules();
        assert!(rules.len() >= 12 && rules.iter().any(|rule| rule == "device-irq"), "{rules:?}");
        let dir = tempfile::tempdir().unwrap();
        for rule in &rules {
            std::fs::write(dir.path().join("host.toml"), format!("without = [\"{rule}\"]\n")).unwrap();
            let config = ontime_hostnet::HostConfig::load(dir.path()).unwrap();
            assert_eq!(config.without.iter().map(ToString::to_string).collect::<Vec<_>>(), std::slice::from_ref(rule));
        }
    }

    #[test]
    fn what_the_set_up_cannot_show_are_rows_of_the_table() {
        let rules = rules();
        let shown = rules.iter().filter(|rule| inversion::lacks(rule, Kernel::Rt72).is_none()).count();
        assert_eq!(rules.len() - shown, 11, "a rule was renamed, or a new one cannot be shown");
    }
}
