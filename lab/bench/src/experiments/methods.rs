//! The methods of an experiment.

use super::chosen;
use crate::host::AS_IS;
use crate::schema::Load;

/// The methods that an experiment compares, in the order of the report: the name on the command line, and words for the
/// report.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Methods(pub(crate) &'static [(&'static str, &'static str)]);

impl Methods {
    /// The names.
    pub(crate) fn iter(self) -> impl Iterator<Item = &'static str> {
        self.0.iter().map(|(name, _)| *name)
    }

    /// As [`Self::iter`].
    pub(crate) fn names(self) -> Vec<&'static str> {
        self.iter().collect()
    }

    /// The chosen names, or all.
    pub(crate) fn chosen(self, asked: &[String]) -> anyhow::Result<Vec<String>> {
        chosen("method", asked, &self.names())
    }

    /// The names that are in `wanted`, in the order of the report.
    pub(crate) fn in_order(self, wanted: &[String]) -> impl Iterator<Item = &'static str> {
        self.iter().filter(|method| wanted.iter().any(|wanted| wanted == method))
    }

    /// The words of a method, or of a real host's present state.
    pub(crate) fn words(self, method: &str) -> &str {
        let found = self.0.iter().find(|(name, _)| *name == method).map(|(_, words)| *words);
        found.unwrap_or(if method == AS_IS { "the host as it stands" } else { method })
    }

    /// Every method under each of these loads, as cases that have the methods' names.
    pub(crate) fn under(self, loads: &[Load]) -> Vec<(String, Load)> {
        self.iter().flat_map(|name| loads.iter().map(move |load| (name.to_owned(), *load))).collect()
    }
}
