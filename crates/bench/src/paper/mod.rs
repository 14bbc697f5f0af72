//! The papers' own figures, for the column beside ours.
//!
//! In: `papers/figures.toml`, which holds what the papers' texts state and nothing read off a plot; it is compiled in.
//! Out: the rows of the paper's table that an experiment repeats. An unknown key is an error, so that a figure cannot
//! be there and go unread by a misspelling. `shape`: the file's keys; `notes`: what is told in sentences.

mod notes;
mod shape;

pub use self::shape::*;
use crate::schema::PaperRow;

/// The file, as it was when this was built.
pub const FIGURES: &str = include_str!("../../../../papers/figures.toml");

/// Why the papers' figures could not be read.
#[derive(Debug, thiserror::Error)]
pub enum PaperError {
    /// Not TOML, or not the keys that are known.
    #[error("papers/figures.toml: {0}")]
    Figures(#[from] toml::de::Error),
    /// No paper has such an experiment.
    #[error(
        "no paper's figures are known for experiment {0:?}; known are rt-server, ablation, segments, bulk, \
         connections, vatc, vatc-network, inversion, kbp, memcached, voip, sampled-values, rta-periodic, rta-sporadic, \
         rta-scale, memcached-slo, video, registration, xen-arm"
    )]
    Experiment(String),
}

impl Figures {
    /// Reads the compiled-in file.
    ///
    /// # Errors
    /// [`PaperError::Figures`], with line and key.
    pub fn load() -> Result<Self, PaperError> {
        Self::parse(FIGURES)
    }

    /// Reads such a file.
    ///
    /// # Errors
    /// [`PaperError::Figures`], with line and key.
    pub fn parse(text: &str) -> Result<Self, PaperError> {
        Ok(toml::from_str(text)?)
    }

    /// The paper's rows for an experiment of `ontime-lab bench`.
    ///
    /// # Errors
    /// [`PaperError::Experiment`] where there are none.
    pub fn rows(&self, experiment: &str) -> Result<Vec<PaperRow>, PaperError> {
        let Outsourcing { host, load, .. } = &self.outsourcing;
        let conditions = format!("{host}; {load}");
        let Methods { vanilla, threaded, exclusive, outsourcing } = self.outsourcing.table3;
        let all =
            [("vanilla", vanilla), ("threaded", threaded), ("exclusive", exclusive), ("outsourcing", outsourcing)];
        let rows = match experiment {
            "rt-server" => all.to_vec(),
            // Figure 9's own figures are plots; its a is Table 3's last line.
            "ablation" => vec![("outsourcing", outsourcing), ("threaded", threaded)],
            // Figures 14 and 15 are plots; the text states differences only (`Self::notes`).
            "memcached" | "voip" => Vec::new(),
            // Figure 11 is a plot; its load, and so the whole of its three segments, is Table 3's.
            "segments" => vec![("vanilla", vanilla), ("threaded", threaded)],
            // The text has ratios or no figure.
            "bulk" | "connections" | "vatc" | "vatc-network" | "inversion" | "kbp" | "xen-arm" => Vec::new(),
            // No paper has it.
            "sampled-values" => Vec::new(),
            // No response times, or of percentiles only.
            "rta-periodic" | "rta-sporadic" | "rta-scale" | "memcached-slo" | "video" | "registration" => Vec::new(),
            _ => return Err(PaperError::Experiment(experiment.to_string())),
        };
        Ok(rows.into_iter().map(|(method, line)| line.row(method, &conditions)).collect())
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

    #[test]
    fn the_compiled_in_figures_are_the_papers() {
        let rows = Figures::load().unwrap().rows("rt-server").unwrap();
        // Access'18, Table 3, first and last line; throughput from the text of IV-B.
        assert_eq!(rows.len(), 4);
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
            let notes = figures.notes(experiment);
            assert!(notes.len() == 1 && notes[0].contains(percent), "{notes:?}");
            assert!(figures.rows(experiment).unwrap().is_empty());
            let goal =
                crate::goals::of_experiment(experiment).iter().find(|goal| goal.id == "p99-vs-threaded").unwrap();
            assert!((goal.target - (1.0 + versus.vs_threaded / 100.0)).abs() < 1e-9, "{experiment}");
        }
        assert!(figures.notes("rt-server").is_empty());
        let xen_arm = figures.notes("xen-arm");
        assert!(xen_arm.len() == 1 && xen_arm[0].contains("16 %") && xen_arm[0].contains("60 ms"), "{xen_arm:?}");
        for experiment in
            ["bulk", "connections", "vatc", "vatc-network", "inversion", "kbp", "sampled-values", "xen-arm"]
        {
            assert!(figures.rows(experiment).unwrap().is_empty(), "{experiment}");
        }
    }

    #[test]
    fn rtvirts_figures_are_told() {
        let figures = Figures::load().unwrap();
        let notes = figures.notes("rta-periodic");
        assert!(notes[0].contains("2.11 (+4.5 %)") && notes[0].contains("39.4 % less"), "{notes:?}");
        assert!(figures.rows("rta-periodic").unwrap().is_empty());
    }

    #[test]
    fn a_misspelt_key_is_named_with_its_line() {
        let wrong = FIGURES.replace("bulk_gbps = 17.8", "bulk_gbit = 17.8");
        let error = Figures::parse(&wrong).unwrap_err().to_string();
        assert!(error.contains("bulk_gbit") && error.contains("line 9"), "{error}");
        assert!(Figures::load().unwrap().rows("table9").unwrap_err().to_string().contains("rt-server"));
    }
}
