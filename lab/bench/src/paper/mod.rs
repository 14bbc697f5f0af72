//! The papers' own figures, which are shown beside ours.
//!
//! In: `lab/papers/figures.toml`, which contains only figures that the papers' texts state, and none read from a plot.
//! It is compiled in. Out: the figures that experiments quote ([`crate::experiments::Experiment::paper`]). An unknown
//! key is an error, so that a misspelt figure cannot go unnoticed. `shape` has the file's keys, `notes` the statements
//! in sentences.

mod notes;
mod shape;

pub use self::shape::*;
use crate::schema::PaperRow;

/// The file, as of this program's build.
pub(crate) const FIGURES: &str = include_str!("../../../papers/figures.toml");

/// Why the papers' figures could not be read.
#[derive(Debug, thiserror::Error)]
pub enum PaperError {
    /// The text is not TOML, or has an unknown key.
    #[error("lab/papers/figures.toml: {0}")]
    Figures(#[from] toml::de::Error),
}

impl Figures {
    /// Parses the compiled-in file.
    ///
    /// # Errors
    /// [`PaperError::Figures`], with line and key.
    pub fn load() -> Result<Self, PaperError> {
        Self::parse(FIGURES)
    }

    /// Parses such a file.
    ///
    /// # Errors
    /// [`PaperError::Figures`], with line and key.
    pub fn parse(text: &str) -> Result<Self, PaperError> {
        Ok(toml::from_str(text)?)
    }

    /// Access'18's Table 3 for these methods.
    pub(crate) fn table3(&self, methods: &[&str]) -> Vec<PaperRow> {
        let Outsourcing { host, load, .. } = &self.outsourcing;
        let conditions = format!("{host}; {load}");
        let Methods { vanilla, threaded, exclusive, outsourcing } = self.outsourcing.table3;
        let all =
            [("vanilla", vanilla), ("threaded", threaded), ("exclusive", exclusive), ("outsourcing", outsourcing)];
        let wanted = all.into_iter().filter(|(method, _)| methods.contains(method));
        wanted.map(|(method, line)| line.row(method, &conditions)).collect()
    }
}

impl Table3 {
    fn row(self, method: &str, conditions: &str) -> PaperRow {
        PaperRow {
            method: method.to_string(),
            source: "Access'18, Table 3 and section IV-B".to_string(),
            conditions: conditions.to_string(),
            mean_us: self.mean,
            p99_us: self.p99,
            sd_us: self.sd,
            bulk_gbps: self.bulk_gbps,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows and sentences that an experiment quotes.
    fn quoted(experiment: &str) -> (Vec<PaperRow>, Vec<String>) {
        let (figures, of) = (Figures::load().unwrap(), crate::experiments::find(experiment).unwrap());
        (of.paper(&figures), of.remarks(&figures))
    }

    #[test]
    fn the_compiled_in_figures_are_the_papers() {
        let (rows, remarks) = quoted("rt-server");
        // Access'18, Table 3, first and last line; throughput from the text of IV-B.
        assert_eq!((rows.len(), remarks.len()), (4, 0));
        assert_eq!((rows[0].mean_us, rows[0].p99_us, rows[0].sd_us, rows[0].bulk_gbps), (92.5, 225.0, 29.2, 18.8));
        assert_eq!((rows[3].mean_us, rows[3].p99_us, rows[3].sd_us, rows[3].bulk_gbps), (32.9, 46.8, 4.3, 18.8));
    }

    #[test]
    fn differences_are_told_and_are_what_the_goals_ask_for() {
        let figures = Figures::load().unwrap();
        for (experiment, percent, versus) in [
            ("voip", "63 %", figures.outsourcing.relative.voip_p99_percent),
            ("memcached", "67 %", figures.outsourcing.relative.memcached_p99_percent),
        ] {
            let (rows, remarks) = quoted(experiment);
            assert!(rows.is_empty() && remarks.len() == 1 && remarks[0].contains(percent), "{remarks:?}");
            let goals = crate::experiments::goals_of(experiment);
            let goal = goals.iter().find(|goal| goal.id == "p99-vs-threaded").unwrap();
            assert!((goal.target - (1.0 + versus.vs_threaded / 100.0)).abs() < 1e-9, "{experiment}");
        }
        let (_, xen_arm) = quoted("xen-arm");
        assert!(xen_arm.len() == 1 && xen_arm[0].contains("16 %") && xen_arm[0].contains("60 ms"), "{xen_arm:?}");
        let (_, pvsched) = quoted("guest-cyclictest");
        assert!(pvsched.len() == 1 && pvsched[0].contains("216,835") && pvsched[0].contains("27,104"), "{pvsched:?}");
        let (rows, rtvirt) = quoted("rta-periodic");
        assert!(rows.is_empty());
        assert!(rtvirt[0].contains("2.11 (+4.5 %)") && rtvirt[0].contains("39.4 % less"), "{rtvirt:?}");
    }

    #[test]
    fn a_misspelt_key_is_named_with_its_line() {
        let wrong = FIGURES.replace("bulk_gbps = 17.8", "bulk_gbit = 17.8");
        let error = Figures::parse(&wrong).unwrap_err().to_string();
        assert!(error.contains("bulk_gbit") && error.contains("line 9"), "{error}");
    }
}
