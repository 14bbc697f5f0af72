//! What is measured, and limits by name: how long the longest delay of each measurement may be.
//!
//! In: the built-in sets, and a TOML file with the operator's own. Out: [`Set`]s.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use clap::ValueEnum;
use ontime_tenants::config::{ConfigError, Text};
use serde::{Deserialize, Serialize};
use toml::Spanned;

use crate::exit::Exit;

/// The largest limit, us.
const LIMIT_MAX_US: f64 = 1e9;

/// A measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Test {
    /// cyclictest: from a timer's expiry until the thread runs that it wakes
    Cyclictest,
    /// rtla timerlat: the same, measured by the kernel
    Timerlat,
    /// oslat: interruptions of a thread that polls on an isolated CPU
    Oslat,
    /// ontime trace: requests to RT tenants, from the interrupt to the network card
    Request,
}

impl Test {
    /// All of them, in the order in which they run.
    pub(super) const ALL: [Self; 4] = [Self::Cyclictest, Self::Timerlat, Self::Oslat, Self::Request];

    /// The name on the command line, in files and in the report.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Cyclictest => "cyclictest",
            Self::Timerlat => "timerlat",
            Self::Oslat => "oslat",
            Self::Request => "request",
        }
    }

    /// The program, and Debian's package that has it; none for what this program does itself.
    pub(super) fn program(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Cyclictest => Some(("cyclictest", "rt-tests")),
            Self::Timerlat => Some(("rtla", "rtla")),
            Self::Oslat => Some(("oslat", "rt-tests")),
            Self::Request => None,
        }
    }
}

/// Limits under one name.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Set {
    pub name: String,
    /// Who states these limits: a publisher, or the file.
    pub source: String,
    /// The longest allowed delay, us. Measurements without a limit are not judged.
    pub limits: BTreeMap<Test, f64>,
}

/// The sets that need no file.
pub(super) fn built_in() -> Vec<Set> {
    let set = |name: &str, source: &str, limits: &[(Test, f64)]| Set {
        name: name.to_owned(),
        source: source.to_owned(),
        limits: limits.iter().copied().collect(),
    };
    vec![
        set(
            "rhel",
            "Red Hat's acceptance of hosts and guests of KVM-RT",
            &[(Test::Cyclictest, 40.0), (Test::Timerlat, 40.0), (Test::Oslat, 20.0)],
        ),
        set(
            "vmware",
            "VMware's acceptance of hosts for virtual protection relays",
            &[(Test::Cyclictest, 120.0), (Test::Timerlat, 120.0)],
        ),
        set(
            "iec61850",
            "IEC 61850-9-2: the interval of sampled values at 4,000 a second",
            &[(Test::Cyclictest, 250.0), (Test::Timerlat, 250.0), (Test::Request, 250.0)],
        ),
    ]
}

/// The smallest limit of each measurement among the chosen sets, us.
pub(super) fn smallest(sets: &[Set], chosen: &[String]) -> BTreeMap<Test, f64> {
    let mut smallest = BTreeMap::new();
    let limits = sets.iter().filter(|set| chosen.contains(&set.name)).flat_map(|set| &set.limits);
    for (test, limit) in limits {
        let least = smallest.entry(*test).or_insert(*limit);
        *least = limit.min(*least);
    }
    smallest
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    limits: BTreeMap<String, Spanned<Entry>>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct Entry {
    cyclictest_us: Option<f64>,
    timerlat_us: Option<f64>,
    oslat_us: Option<f64>,
    request_us: Option<f64>,
}

/// Reads the operator's own sets.
///
/// # Errors
/// [`ConfigError`], with file and line.
pub(super) fn load(path: &Path) -> Result<Vec<Set>, ConfigError> {
    parse(&Text::read(path)?, &path.display().to_string())
}

/// Parses and checks the text of the operator's own sets, which come from `source`.
///
/// # Errors
/// [`ConfigError`], with file and line.
pub(crate) fn parse(text: &Text, source: &str) -> Result<Vec<Set>, ConfigError> {
    let file: File = text.parse()?;
    let known: BTreeSet<String> = built_in().into_iter().map(|set| set.name).collect();
    let mut sets = Vec::new();
    for (name, entry) in file.limits {
        let refuse = |what: String| text.error(&entry.span(), what);
        if known.contains(&name) {
            return Err(refuse(format!("`{name}` is the name of built-in limits; give these another name")));
        }
        let Entry { cyclictest_us, timerlat_us, oslat_us, request_us } = *entry.get_ref();
        let values = [cyclictest_us, timerlat_us, oslat_us, request_us];
        let limits: BTreeMap<Test, f64> =
            Test::ALL.into_iter().zip(values).filter_map(|(test, limit)| Some((test, limit?))).collect();
        if limits.is_empty() {
            return Err(refuse(format!("`{name}` has no limit; give it one, such as cyclictest-us = 50")));
        }
        if let Some((test, limit)) = limits.iter().find(|(_, limit)| !(**limit > 0.0 && **limit <= LIMIT_MAX_US)) {
            let key = test.name();
            return Err(refuse(format!("`{name}`: {key}-us = {limit} is not above 0 and at most {LIMIT_MAX_US}")));
        }
        sets.push(Set { name, source: source.to_owned(), limits });
    }
    Ok(sets)
}

/// Checks that each chosen name is the name of a set.
///
/// # Errors
/// A usage error with the names that exist.
pub(super) fn check(sets: &[Set], chosen: &[String]) -> Result<(), Exit> {
    let Some(unknown) = chosen.iter().find(|name| !sets.iter().any(|set| set.name == **name)) else { return Ok(()) };
    let known: Vec<&str> = sets.iter().map(|set| set.name.as_str()).collect();
    Err(Exit::usage(format!(
        "there are no limits `{unknown}` (--limits); there are: {}; --limits-file adds your own",
        known.join(", ")
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Vec<Set>, String> {
        parse(&Text::new("own.toml", text), "own.toml").map_err(|error| error.to_string())
    }

    #[test]
    fn own_limits_are_read_and_names_without_a_test_are_not_judged() {
        let sets =
            read("[limits.relay]\ncyclictest-us = 55\nrequest-us = 180.5\n[limits.soft]\noslat-us = 1\n").unwrap();
        let of = |name: &str| sets.iter().find(|set| set.name == name).unwrap().limits.clone();
        assert_eq!(of("relay"), BTreeMap::from([(Test::Cyclictest, 55.0), (Test::Request, 180.5)]));
        assert_eq!(of("soft"), BTreeMap::from([(Test::Oslat, 1.0)]));
    }

    #[test]
    fn what_is_wrong_in_the_file_is_said_with_its_place() {
        for (text, want) in [
            ("[limits.a]\n", "`a` has no limit"),
            ("[limits.rhel]\noslat-us = 9\n", "`rhel` is the name of built-in limits"),
            ("\n[limits.a]\ncyclictest-us = 0\n", "own.toml:2:"),
            ("[limits.a]\ntimerlat-us = inf\n", "`a`: timerlat-us = inf is not above 0"),
            ("[limits.a]\nrequest-us = nan\n", "`a`: request-us = NaN is not above 0"),
            ("[limits.a]\ncyclictest = 9\n", "did you mean `cyclictest-us`?"),
            ("[limits.a]\ncyclictest-us = \"9\"\n", "expected a number"),
            ("[limit.a]\ncyclictest-us = 9\n", "own.toml:1:"),
        ] {
            let said = read(text).unwrap_err();
            assert!(said.contains(want), "{text}: {said}");
        }
    }

    #[test]
    fn a_name_without_limits_is_a_usage_error_that_lists_the_names() {
        let sets = built_in();
        assert!(check(&sets, &["vmware".to_owned(), "rhel".to_owned()]).is_ok());
        let said = check(&sets, &["rhel".to_owned(), "esx".to_owned()]).unwrap_err();
        assert_eq!(said.status, crate::exit::USAGE);
        assert!(said.message.contains("`esx`") && said.message.contains("rhel, vmware, iec61850"), "{}", said.message);
    }

    #[test]
    fn each_name_on_the_command_line_is_the_name_in_the_report() {
        for test in Test::ALL {
            assert_eq!(test.to_possible_value().unwrap().get_name(), test.name());
            assert_eq!(serde_json::to_value(test).unwrap(), test.name());
        }
    }
}
