//! Applies a plan, undoes it, and finds drift.
//!
//! In: a [`Host`], a [`Plan`], the [`Journal`]. Out: a [`Report`]. Every original is in the journal, durably, before
//! its knob is written. Applying a plan twice changes nothing the second time. A knob that an earlier plan changed and
//! this plan does not contain gets its original value back.

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;
use thiserror::Error;

use crate::journal::{Journal, JournalError, Original, crash};
use crate::knob::{Host, Knob, KnobError, Value};
use crate::plan::Plan;
use crate::rule::{Finding, RuleId, Setting, Stage};

/// The outcome for one knob.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", tag = "outcome", content = "why")]
pub enum Done {
    /// The knob had another value and has the planned value now.
    Changed,
    /// The knob already had the planned value.
    Already,
    /// The knob has its original value again.
    Restored,
    /// The thread has ended, or the NIC or queue no longer exists: nothing to do.
    Gone,
    /// This kernel or device has no such knob, or another program holds it: cause and remedy. On reset, its original
    /// stays in the journal.
    Unsupported(String),
    /// The kernel refused: cause and remedy. On reset, its original stays in the journal.
    Failed(String),
}

/// One knob of a report.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Item {
    /// The rule that planned it; none for a restored knob.
    pub rule: Option<RuleId>,
    /// The knob that was to be set or restored.
    pub knob: Knob,
    /// The value before, if it could be read.
    pub from: Option<Value>,
    /// The planned value, or the original.
    pub to: Value,
    /// Whether it was changed, was right already, or why it could not be changed.
    pub done: Done,
}

/// The result of an apply or a reset.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// Every knob that was read.
    pub items: Vec<Item>,
    /// Problems that no knob removes.
    pub findings: Vec<Finding>,
}

/// Number of knobs per outcome.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    /// Knobs with [`Done::Changed`].
    pub changed: usize,
    /// Knobs with [`Done::Already`].
    pub already: usize,
    /// Knobs with [`Done::Restored`].
    pub restored: usize,
    /// Knobs with [`Done::Gone`].
    pub gone: usize,
    /// Knobs with [`Done::Unsupported`].
    pub unsupported: usize,
    /// Knobs with [`Done::Failed`].
    pub failed: usize,
}

impl Report {
    /// Counts the knobs per outcome.
    pub fn counts(&self) -> Counts {
        let mut counts = Counts::default();
        for item in &self.items {
            let count = match item.done {
                Done::Changed => &mut counts.changed,
                Done::Already => &mut counts.already,
                Done::Restored => &mut counts.restored,
                Done::Gone => &mut counts.gone,
                Done::Unsupported(_) => &mut counts.unsupported,
                Done::Failed(_) => &mut counts.failed,
            };
            *count += 1;
        }
        counts
    }

    fn add(&mut self, rule: Option<RuleId>, knob: &Knob, from: Option<Value>, to: &Value, done: Done) {
        self.items.push(Item { rule, knob: knob.clone(), from, to: to.clone(), done });
    }

    /// Whether a changed knob must be written once more soon ([`Setting::needs_second_write`]).
    pub fn needs_second_write(&self, plan: &Plan) -> bool {
        let second: BTreeSet<_> =
            plan.settings.iter().filter(|set| set.needs_second_write).map(|set| set.knob.key()).collect();
        self.items.iter().any(|item| item.done == Done::Changed && second.contains(&item.knob.key()))
    }

    /// Whether a changed knob creates threads that this report's plan did not know.
    fn reveals_threads(&self, plan: &Plan) -> bool {
        let revealing: BTreeSet<_> =
            plan.settings.iter().filter(|setting| setting.stage == Stage::Thread).map(|s| s.knob.key()).collect();
        self.items.iter().any(|item| item.done == Done::Changed && revealing.contains(&item.knob.key()))
    }
}

/// A knob whose value is not the planned one.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Drift {
    /// The planned setting.
    pub setting: Setting,
    /// The value found.
    pub found: Value,
    /// Whether Ontime had set the knob, so that another program changed it later.
    pub was_applied: bool,
}

/// Why [`converge`] stopped.
#[derive(Debug, Error)]
pub enum ConvergeError<E: std::error::Error + 'static> {
    /// The host's facts could not be read.
    #[error(transparent)]
    Look(E),
    /// The originals could not be stored.
    #[error(transparent)]
    Journal(#[from] JournalError),
}

/// Upper limit of [`converge`]'s passes: one creates threads, one places them, one is for threads that appeared
/// meanwhile.
const PASSES: usize = 3;

/// Plans and applies until a pass creates no new threads. `look` reads the host again and plans.
///
/// # Errors
/// Those of `look`, and [`JournalError`]. Settings that were already applied stay applied and in the journal.
pub fn converge<E: std::error::Error + 'static>(
    host: &dyn Host,
    journal: &mut Journal,
    mut look: impl FnMut(&Journal) -> Result<Plan, E>,
) -> Result<Report, ConvergeError<E>> {
    let mut total = Report::default();
    for _ in 0..PASSES {
        let plan = look(journal).map_err(ConvergeError::Look)?;
        let report = apply(host, &plan, journal)?;
        let again = report.reveals_threads(&plan);
        total = merge(total, report);
        if !again {
            break;
        }
    }
    Ok(total)
}

/// Merges two reports into the later one. A knob that the earlier pass changed still counts as changed.
fn merge(earlier: Report, mut later: Report) -> Report {
    let mut before: BTreeMap<String, Item> = earlier.items.into_iter().map(|item| (item.knob.key(), item)).collect();
    for item in &mut later.items {
        if let Some(old) = before.remove(&item.knob.key()) {
            if item.done == Done::Already && old.done == Done::Changed {
                *item = old;
            }
        }
    }
    let mut items: Vec<_> =
        before.into_values().filter(|item| matches!(item.done, Done::Changed | Done::Restored)).collect();
    items.append(&mut later.items);
    Report { items, findings: later.findings }
}

/// Makes one pass: stores the originals of the knobs that it will change, restores knobs that the plan no longer
/// contains, then makes the settings stage by stage.
///
/// # Errors
/// [`JournalError`] if the originals could not be stored; then nothing was changed. A knob that cannot be set is not an
/// error of the pass, but an item of the report.
pub fn apply(host: &dyn Host, plan: &Plan, journal: &mut Journal) -> Result<Report, JournalError> {
    let report = set(host, &plan.settings, journal, true)?;
    Ok(Report { findings: plan.findings.clone(), ..report })
}

/// Makes these settings beside those that are in force, as [`apply`] does, and restores no knob.
///
/// # Errors
/// [`JournalError`], as [`apply`].
pub fn add(host: &dyn Host, settings: &[Setting], journal: &mut Journal) -> Result<Report, JournalError> {
    set(host, settings, journal, false)
}

/// `whole`: stored knobs that are not in these settings are restored.
fn set(host: &dyn Host, settings: &[Setting], journal: &mut Journal, whole: bool) -> Result<Report, JournalError> {
    journal.update_processes(settings.iter().map(|setting| &setting.knob))?;
    let mut report = Report::default();
    let mut pending: Vec<(&Setting, Value)> = Vec::new();
    let mut originals = Vec::new();
    // A knob that this pass restores counts as missing for its dependents, as a knob that cannot be set does.
    let wanted = wanted(settings.iter());
    let unwanted = journal.entries().iter().map(|entry| entry.knob.key()).filter(|key| !wanted.contains(key));
    let mut missing: BTreeSet<String> = unwanted.filter(|_| whole).collect();
    for setting in settings {
        match host.read(&setting.knob) {
            Ok(found) => {
                let as_wanted = found == setting.value;
                if (!as_wanted || setting.handed_on) && !journal.has(&setting.knob) {
                    match overwritten(host, setting) {
                        Ok(overwritten) => originals.extend(overwritten),
                        Err(error) => {
                            missing.insert(setting.knob.key());
                            let done = not_set(setting, &error);
                            report.add(Some(setting.rule), &setting.knob, Some(found), &setting.value, done);
                            continue;
                        }
                    }
                    let value = setting.original.as_ref().unwrap_or(&found).clone();
                    originals.push(Original { knob: setting.knob.clone(), value });
                }
                if as_wanted {
                    let written =
                        if setting.needs_second_write { host.write(&setting.knob, &setting.value) } else { Ok(()) };
                    let done = written.map_or_else(|error| not_set(setting, &error), |()| Done::Already);
                    report.add(Some(setting.rule), &setting.knob, Some(found), &setting.value, done);
                } else {
                    pending.push((setting, found));
                }
            }
            Err(error) => {
                let done = not_set(setting, &error);
                missing.extend((done != Done::Gone).then(|| setting.knob.key()));
                report.add(Some(setting.rule), &setting.knob, None, &setting.value, done);
            }
        }
    }
    let kept_now: BTreeSet<String> = originals.iter().map(|original| original.knob.key()).collect();
    journal.store(originals)?;
    if whole {
        let stands = settings.iter().filter(|set| set.lacks(&missing).is_none() || kept_now.contains(&set.knob.key()));
        release(host, stands, journal, &mut report)?;
    }
    let mut refused = BTreeSet::new();
    for (setting, found) in pending {
        let done = match setting.lacks(&missing) {
            Some(lacks) => Done::Unsupported(format!(
                "it needs {lacks}, which could not be set: end the cause that stands there, and both are set{}",
                accepting(setting)
            )),
            None => {
                let written = host.write(&setting.knob, &setting.value);
                written.map_or_else(|error| not_set(setting, &error), |()| Done::Changed)
            }
        };
        missing.extend(matches!(done, Done::Unsupported(_) | Done::Failed(_)).then(|| setting.knob.key()));
        crash::point("knob-written");
        if matches!(done, Done::Unsupported(_)) && kept_now.contains(&setting.knob.key()) {
            refused.insert(setting.knob.key());
        }
        report.add(Some(setting.rule), &setting.knob, Some(found), &setting.value, done);
    }
    // These knobs were never changed, so another value there is not drift: remove their originals again.
    journal.remove(&refused)?;
    Ok(report)
}

/// The originals of the knobs that a setting overwrites. A knob that does not exist has none.
///
/// # Errors
/// If a knob exists and cannot be read: without its original, it could not be restored.
fn overwritten(host: &dyn Host, setting: &Setting) -> Result<Vec<Original>, KnobError> {
    let original = |knob: &Knob| match host.read(knob) {
        Ok(value) => Some(Ok(Original { knob: knob.clone(), value })),
        Err(KnobError::Gone(_) | KnobError::Unsupported { .. }) => None,
        Err(error) => Some(Err(error)),
    };
    setting.overwrites.iter().filter_map(original).collect()
}

/// Stores the originals that differ from the values found ([`Setting::original`]), and the processes through which
/// knobs are reached now. Changes no knob. Called before a reset, so that the reset restores these originals too.
///
/// # Errors
/// [`JournalError`].
pub fn adopt(plan: &Plan, journal: &mut Journal) -> Result<(), JournalError> {
    journal.update_processes(plan.settings.iter().map(|setting| &setting.knob))?;
    let original = |setting: &Setting| Some(Original { knob: setting.knob.clone(), value: setting.original.clone()? });
    journal.store(plan.settings.iter().filter_map(original).collect())
}

/// The keys of the knobs that these settings set and overwrite.
fn wanted<'a>(settings: impl Iterator<Item = &'a Setting>) -> BTreeSet<String> {
    settings.flat_map(|setting| std::iter::once(&setting.knob).chain(&setting.overwrites)).map(Knob::key).collect()
}

/// Restores every stored knob that is not in these settings, in reverse order of storing.
fn release<'a>(
    host: &dyn Host,
    settings: impl Iterator<Item = &'a Setting>,
    journal: &mut Journal,
    report: &mut Report,
) -> Result<(), JournalError> {
    let wanted = wanted(settings);
    let unwanted: Vec<Original> =
        journal.entries().iter().filter(|entry| !wanted.contains(&entry.knob.key())).cloned().collect();
    let finished = restore(host, &unwanted, report, NEXT_PASS);
    journal.remove(&finished)
}

/// Restores every original, and removes from the journal those that are restored or no longer exist.
///
/// # Errors
/// [`JournalError`] if the journal could not be rewritten. All originals are restored then, and still stored.
pub fn reset(host: &dyn Host, journal: &mut Journal) -> Result<Report, JournalError> {
    let mut report = Report::default();
    let all = journal.entries().to_vec();
    let finished = restore(host, &all, &mut report, NEXT_RESET);
    journal.remove(&finished)?;
    Ok(report)
}

/// Restores the originals of some knobs at once, in reverse order of storing, and keeps them in the journal. This is
/// for knobs that must not wait for a pass or a whole reset, such as the kernel's protections when runtime caps fail.
/// The order matters: kernel 6.12 accepts its RT limit again only after its fair servers.
pub fn give_back(host: &dyn Host, journal: &Journal, which: impl Fn(&Knob) -> bool) -> Report {
    let mut report = Report::default();
    let chosen: Vec<Original> = journal.entries().iter().filter(|entry| which(&entry.knob)).cloned().collect();
    restore(host, &chosen, &mut report, NEXT_RESET);
    report
}

/// When a knob that failed is tried again.
const NEXT_PASS: &str = "the next pass tries again";
const NEXT_RESET: &str = "its original value stays in the journal, and `ontime reset` tries again";

/// The outcome of a failed read or write during restoring.
fn not_given_back(error: &KnobError, when: &str) -> Done {
    match outcome(error) {
        Done::Failed(why) => Done::Failed(format!("{why}; {when}")),
        Done::Unsupported(why) => Done::Unsupported(format!("{why}; {when}")),
        done => done,
    }
}

/// The outcome of a failed read or write of a setting.
fn not_set(setting: &Setting, error: &KnobError) -> Done {
    match outcome(error) {
        Done::Failed(why) => Done::Failed(format!("{why}; {NEXT_PASS}")),
        Done::Unsupported(why) => Done::Unsupported(why + &accepting(setting)),
        done => done,
    }
}

/// Restores in reverse order. Returns the keys that need no further restoring.
fn restore(host: &dyn Host, originals: &[Original], report: &mut Report, when: &str) -> BTreeSet<String> {
    let mut finished = BTreeSet::new();
    for original in originals.iter().rev() {
        let found = host.read(&original.knob);
        let done = match &found {
            Ok(value) if *value == original.value => Done::Already,
            Ok(_) => match host.write(&original.knob, &original.value) {
                Ok(()) => Done::Restored,
                Err(error) => not_given_back(&error, when),
            },
            Err(error) => not_given_back(error, when),
        };
        crash::point("knob-restored");
        if matches!(done, Done::Already | Done::Restored | Done::Gone) {
            finished.insert(original.knob.key());
        }
        report.add(None, &original.knob, found.ok(), &original.value, done);
    }
    finished
}

/// The knobs whose value is not the planned one. Knobs that no longer exist or are unsupported are left out.
pub fn drift(host: &dyn Host, plan: &Plan, journal: &Journal) -> Vec<Drift> {
    plan.settings
        .iter()
        .filter_map(|setting| {
            let found = host.read(&setting.knob).ok().filter(|found| *found != setting.value)?;
            Some(Drift { setting: setting.clone(), found, was_applied: journal.has(&setting.knob) })
        })
        .collect()
}

/// How to accept a value that cannot be set, as the end of a sentence. Empty if the rule may not be left out, and for
/// a thread: leaving out its place leaves out that of every other thread.
pub fn accepting(setting: &Setting) -> String {
    let whole = match &setting.knob {
        _ if !setting.rule.may_be_left_out() => return String::new(),
        Knob::ThreadPolicy { .. } | Knob::ThreadAffinity { .. } => return String::new(),
        Knob::HostFile { .. } | Knob::HostCpus { .. } => "",
        Knob::IrqAffinity { .. } => ", for every interrupt of this rule",
        Knob::TapBatch { .. } | Knob::SendBuffer { .. } => ", for every tap",
        _ => ", for every NIC",
    };
    format!("; to accept it as it is{whole}: without = [\"{}\"] in /etc/ontime/host.toml", setting.rule)
}

fn outcome(error: &KnobError) -> Done {
    match error {
        KnobError::Gone(_) => Done::Gone,
        KnobError::Unsupported { .. } => Done::Unsupported(error.why()),
        KnobError::Os { .. } | KnobError::Refused { .. } | KnobError::Value { .. } => Done::Failed(error.why()),
    }
}
