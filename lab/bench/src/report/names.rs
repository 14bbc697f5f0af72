//! Short names of a report's results, which the terminal and the page use.
//!
//! In: a [`Report`]. Out: [`Names`]: the method of each result, and the conditions that are not the same in every case;
//! remarks, each once; the meaning of each method, once ([`labels`]).

use crate::schema::{MethodResult, Report};

/// A condition that is not the same in every case. Both lists have an entry for each result.
#[derive(Debug)]
pub(super) struct Condition {
    /// Head of its column.
    pub(super) head: &'static str,
    /// Text for a column with that head.
    pub(super) cells: Vec<String>,
    /// Text that needs no head.
    words: Vec<String>,
}

/// How a report's cases are distinguished.
#[derive(Debug)]
pub(super) struct Names {
    /// The method of each result; a result with the same method and conditions as an earlier one has a number.
    pub(super) methods: Vec<String>,
    /// The conditions that are not the same in every case.
    pub(super) conditions: Vec<Condition>,
    /// The conditions that are the same in every case, in words.
    pub(super) same: Vec<String>,
}

impl Names {
    pub(super) fn of(report: &Report) -> Self {
        let of = |print: fn(&MethodResult) -> String| report.results.iter().map(print).collect::<Vec<String>>();
        let mut methods = of(|result| result.method.clone());
        let releases = of(|result| result.kernel.clone());
        let mut kernels = releases.clone();
        kernels.sort_unstable();
        kernels.dedup();
        let linux = |cells: Vec<String>| Condition {
            head: "Linux",
            words: cells.iter().map(|cell| format!("Linux {cell}")).collect(),
            cells,
        };
        let cpus =
            |result: &MethodResult| if result.cpus == 1 { "1 CPU".to_owned() } else { format!("{} CPUs", result.cpus) };
        let all = [
            Condition {
                head: "load",
                cells: of(|result| result.load.name().to_owned()),
                words: of(|result| result.load.description().to_owned()),
            },
            linux(of(|result| result.kernel_series().to_owned())),
            Condition {
                head: "clock",
                cells: of(|result| result.clock.name().to_owned()),
                words: of(|result| format!("{} clock", result.clock.name())),
            },
            Condition { head: "CPUs", cells: of(|result| result.cpus.to_string()), words: of(cpus) },
        ];
        let differs =
            |condition: &Condition| condition.cells.windows(2).any(|pair| matches!(pair, [one, other] if one != other));
        let (mut conditions, alike): (Vec<Condition>, Vec<Condition>) = all.into_iter().partition(differs);
        let said = |condition: &Condition| match condition.head {
            "Linux" => (!kernels.is_empty()).then(|| format!("Linux {}", kernels.join(" and "))),
            _ => condition.words.first().cloned(),
        };
        let same = alike.iter().filter_map(said).collect();
        if repetitions(&methods, &conditions).iter().any(|before| *before > 0) && kernels.len() > 1 {
            conditions.retain(|condition| condition.head != "Linux");
            conditions.push(linux(releases));
        }
        let repeated = repetitions(&methods, &conditions);
        for (method, before) in methods.iter_mut().zip(repeated).filter(|(_, before)| *before > 0) {
            *method = format!("{method} #{}", before + 1);
        }
        Self { methods, conditions, same }
    }

    /// The name of a result's method.
    pub(super) fn method(&self, place: usize) -> &str {
        self.methods.get(place).map_or("", String::as_str)
    }

    /// The conditions of a result that are not the same in every case, in words; empty if there are none.
    pub(super) fn condition(&self, place: usize) -> String {
        let words = self.conditions.iter().filter_map(|condition| condition.words.get(place));
        words.cloned().collect::<Vec<_>>().join(", ")
    }

    /// A result's name in words: its method and [`Names::condition`].
    pub(super) fn description(&self, place: usize) -> String {
        match (self.method(place), self.condition(place)) {
            (method, condition) if condition.is_empty() => method.to_owned(),
            (method, condition) => format!("{method}, {condition}"),
        }
    }

    /// The results' notes, each once, with the cases that have it.
    pub(super) fn notes(&self, report: &Report) -> Vec<String> {
        let mut all: Vec<(&str, Vec<usize>)> = Vec::new();
        for (place, result) in report.results.iter().enumerate() {
            for note in &result.notes {
                match all.iter_mut().find(|(known, _)| *known == note.as_str()) {
                    Some((_, places)) => places.push(place),
                    None => all.push((note.as_str(), vec![place])),
                }
            }
        }
        let name = |(note, mut places): (&str, Vec<usize>)| {
            places.dedup();
            if places.len() == report.results.len() && places.len() > 1 {
                return format!("every case: {note}");
            }
            let names: Vec<String> = places.into_iter().map(|place| self.description(place)).collect();
            format!("{}: {note}", names.join("; "))
        };
        all.into_iter().map(name).collect()
    }
}

/// For each result, the number of results before it with the same method and conditions.
fn repetitions(methods: &[String], conditions: &[Condition]) -> Vec<usize> {
    let is_same = |one: usize, other: usize| {
        methods.get(one) == methods.get(other)
            && conditions.iter().all(|condition| condition.cells.get(one) == condition.cells.get(other))
    };
    let before = |place: usize| (0..place).filter(|other| is_same(place, *other)).count();
    (0..methods.len()).map(before).collect()
}

/// Each method with its meaning in words, once.
pub(super) fn labels(report: &Report) -> Vec<(&str, &str)> {
    let mut all: Vec<(&str, &str)> = Vec::new();
    for result in &report.results {
        let label = (result.method.as_str(), result.label.as_str());
        if !all.contains(&label) {
            all.push(label);
        }
    }
    all
}
