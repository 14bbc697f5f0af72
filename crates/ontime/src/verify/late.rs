//! Delays beyond a limit, and their causes by cure.
//!
//! In: what the traces found, the limits, and what the programs measured. Out: [`Late`]s and [`ByCure`]s.

use std::collections::{BTreeMap, BTreeSet};

use ontime_figures::number;
use ontime_hostnet::{RULES, RuleId};
use ontime_trace::delay::{self, Delay, Part};
use serde::Serialize;

use super::causes::Found;
use super::limits::Test;
use super::outputs::{OfCpu, Slow};

/// The most late events that are listed of a measurement; all count by cure.
pub(super) const LISTED: usize = 100;
/// What the programs' figures may differ from the trace's: they are whole us of another clock, and read it later.
const ROUNDING_US: f64 = 2.0;
const ROUNDING: f64 = 1.001;

/// A delay beyond a limit: a request's, a wake-up's, or an interruption of oslat.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct Late {
    /// The measurement.
    pub test: Test,
    /// Whose request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tenant: Option<String>,
    /// The CPU of the thread that measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<u32>,
    /// The delay, us; of a request, the time from interrupt to NIC.
    pub total_us: f64,
    /// What delayed it, by the trace; empty where no cause was found.
    pub causes: Vec<String>,
}

impl Late {
    /// What was late, and by how much.
    pub(super) fn title(&self) -> String {
        let us = number::us(self.total_us);
        match (&self.tenant, self.cpu, self.test) {
            (Some(tenant), ..) => format!("a request of {tenant} took {us} us"),
            (None, Some(cpu), Test::Oslat) => format!("oslat was interrupted for {us} us on CPU {cpu}"),
            (None, Some(cpu), test) => format!("{} ran {us} us late on CPU {cpu}", test.name()),
            (None, None, test) => format!("{} was {us} us late", test.name()),
        }
    }
}

/// The causes of a measurement's late events that have one cure.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(super) struct ByCure {
    /// The measurement.
    pub test: Test,
    /// The rule of `ontime doctor`.
    pub rule: Option<RuleId>,
    /// What to do about them: the setting of the rule, or other advice.
    pub cure: String,
    /// How many late events had such a cause.
    pub times: u64,
    /// The time that all these causes took, us.
    pub total_us: f64,
    /// The longest time that such a cause took, us.
    pub max_us: f64,
    /// The longest cause.
    pub example: String,
}

/// A late event's cause.
#[derive(Clone)]
struct Cause {
    us: f64,
    words: String,
    rule: Option<RuleId>,
    cure: String,
}

impl Cause {
    fn of(cause: &delay::Cause) -> Self {
        let (rule, cure) = (cause.cure.rule, cause.cure.text().to_owned());
        Self { us: cause.ns as f64 / 1e3, words: cause.text(), rule, cure }
    }
}

/// Counts a cause with its cure: `total_us` in all. Returns the cure's place.
fn count(cures: &mut Vec<ByCure>, test: Test, cause: &Cause, total_us: f64) -> usize {
    let Cause { us, words, rule, cure } = cause;
    let place = cures.iter().position(|of| of.rule == *rule && of.cure == *cure);
    let place = place.unwrap_or_else(|| {
        let (rule, cure, example) = (*rule, cure.clone(), String::new());
        cures.push(ByCure { test, rule, cure, times: 0, total_us: 0.0, max_us: 0.0, example });
        cures.len() - 1
    });
    if let Some(of) = cures.get_mut(place) {
        of.total_us += total_us;
        if *us > of.max_us {
            (of.max_us, of.example) = (*us, words.clone());
        }
    }
    place
}

/// The longest delay that the program measured on a CPU, of which the trace shows nothing.
fn unseen(test: Test, of: &OfCpu) -> (Late, Vec<Cause>) {
    let words = format!("no probe shows what took these {} us", number::us(of.max_us));
    let cause = Cause { us: of.max_us, words: words.clone(), rule: None, cure: delay::UNSEEN.to_owned() };
    (Late { test, tenant: None, cpu: Some(of.cpu), total_us: of.max_us, causes: vec![words] }, vec![cause])
}

/// Late events by measurement, the latest first.
#[derive(Default)]
pub(super) struct Lates {
    pub listed: Vec<Late>,
    pub by_cure: Vec<ByCure>,
    /// How many there were, by measurement.
    pub total: BTreeMap<&'static str, u64>,
}

impl Lates {
    fn add(&mut self, test: Test, events: Vec<(Late, Vec<Cause>)>, others: &delay::Others) {
        let mut cures: Vec<ByCure> = Vec::new();
        for (_, causes) in &events {
            let mut seen = BTreeSet::new();
            for cause in causes {
                let place = count(&mut cures, test, cause, cause.us);
                if let Some(of) = cures.get_mut(place).filter(|_| seen.insert(place)) {
                    of.times += 1;
                }
            }
        }
        for of in &others.by_cure {
            let place = count(&mut cures, test, &Cause::of(&of.longest), of.ns as f64 / 1e3);
            if let Some(cure) = cures.get_mut(place) {
                cure.times += of.delays;
            }
        }
        let total = events.len() as u64 + others.delays;
        if total > 0 {
            self.total.insert(test.name(), total);
        }
        cures.sort_by(|a, b| b.total_us.total_cmp(&a.total_us));
        self.by_cure.extend(cures);
        self.listed.extend(events.into_iter().take(LISTED).map(|(late, _)| late));
    }

    /// Adds requests beyond a limit.
    pub(super) fn add_requests(&mut self, slow: Vec<Slow>, limit: Option<f64>) {
        let late = slow.into_iter().filter(|slow| limit.is_some_and(|limit| slow.total_us > limit));
        self.add(Test::Request, late.map(of_request).collect(), &delay::Others::default());
    }

    /// Adds delays of the program's threads beyond a limit. `measured` is what the program itself measured. If it has
    /// such a delay on a CPU where the trace, which ends a delay a little earlier, found none, this adds the longest of
    /// that CPU if it is near the limit, or else one by what no probe shows.
    pub(super) fn add_delays(&mut self, test: Test, found: &Found, limit: Option<f64>, measured: &[OfCpu]) {
        let Some(limit) = limit else { return };
        let events = found.delays.iter().filter_map(|delay| {
            let longest = measured.iter().find(|of| of.cpu == delay.cpu).map_or(f64::MAX, |of| of.max_us);
            of_delay(test, delay, longest)
        });
        let (mut events, near): (Vec<(Late, Vec<Cause>)>, Vec<_>) = events.partition(|(late, _)| late.total_us > limit);
        let is_whole = |cpu: u32| !found.lossy.contains(&cpu) && found.failure.is_none();
        for of in measured.iter().filter(|of| of.max_us > limit) {
            let is_of = |(late, _): &(Late, Vec<Cause>)| late.cpu == Some(of.cpu);
            if found.others.cpus.contains(&of.cpu) || events.iter().any(is_of) {
                continue;
            }
            match near.iter().find(|late| is_of(late) && late.0.total_us > limit - ROUNDING_US) {
                Some((late, causes)) => events.push((late.clone(), causes.clone())),
                None if is_whole(of.cpu) => events.push(unseen(test, of)),
                None => {}
            }
        }
        events.sort_by(|(a, _), (b, _)| b.total_us.total_cmp(&a.total_us));
        self.add(test, events, &found.others);
    }
}

fn of_request(slow: Slow) -> (Late, Vec<Cause>) {
    let causes = slow.inversions.iter().zip(&slow.words).map(|(inversion, words)| {
        let rule = RULES.iter().find(|rule| Some(rule.id) == inversion.cure.rule);
        let cure = rule.map_or_else(|| inversion.cure.text.clone(), |rule| rule.cure.to_owned());
        Cause { us: inversion.ns as f64 / 1e3, words: words.clone(), rule: inversion.cure.rule, cure }
    });
    let causes = causes.collect();
    let words = slow.words.into_iter().chain(slow.hint).collect();
    let (tenant, total_us) = (Some(slow.tenant), slow.total_us);
    (Late { test: Test::Request, tenant, cpu: None, total_us, causes: words }, causes)
}

/// `longest` is the longest delay that the program measured on this CPU, us: interruptions that would make a longer one
/// came after the program's reading of the clock. None if the delay came before or after the program's measurement.
fn of_delay(test: Test, delay: &Delay, longest: f64) -> Option<(Late, Vec<Cause>)> {
    let us = |ns: u64| ns as f64 / 1e3;
    let is_longer = |us: f64| us > longest * ROUNDING + ROUNDING_US;
    let after = is_longer(us(delay.ns()));
    let total_us = us(if after { delay.late() } else { delay.ns() });
    if is_longer(total_us) {
        return None;
    }
    let is_after = |part: Part| after && matches!(part, Part::Interrupted | Part::Unseen);
    let causes = delay.causes.iter().filter(|cause| !is_after(cause.part));
    let causes: Vec<Cause> = causes.map(Cause::of).collect();
    let words = causes.iter().map(|cause| cause.words.clone()).chain(delay.hint.clone()).collect();
    Some((Late { test, tenant: None, cpu: Some(delay.cpu), total_us, causes: words }, causes))
}

#[cfg(test)]
mod tests {
    use ontime_trace::event::{Event, EventKind, Task};
    use ontime_trace::{Watch, delay::Delays};

    use super::super::outputs::{Cure, Inversion};
    use super::*;

    /// Wake-ups of cyclictest on CPU 0: each waits this long for a thread of higher priority, and is interrupted for
    /// that long afterwards, us.
    fn found(wakeups: &[(u64, u64)], keep: usize) -> Found {
        let watch = Watch { program: Some("cyclictest".to_owned()), ..Watch::default() };
        let mut delays = Delays::new(watch, false, keep, Some(40_000));
        let [own, hog] =
            [(7, 4, "cyclictest"), (20, 0, "hog")].map(|(pid, prio, comm)| Task { pid, prio, comm: comm.into() });
        let switch = |prev: Task, preempted, next| EventKind::Switch { prev, preempted, next };
        let mut due = 0;
        for (waited, interrupted) in wakeups {
            due += 100_000;
            let ran = due + waited;
            for (us, pid, what) in [
                (due - 20, 7, EventKind::TimerStart { timer: 1, expires: due * 1_000 }),
                (due - 19, 7, switch(own, false, hog)),
                (due, 20, EventKind::TimerExpire { timer: 1 }),
                (due, 20, EventKind::Waking { pid: 7, prio: 4 }),
                (ran, 20, switch(hog, false, own)),
                (ran + 1, 7, switch(own, true, hog)),
                (ran + 1 + interrupted, 20, switch(hog, true, own)),
                (ran + 2 + interrupted, 7, switch(own, false, hog)),
            ] {
                delays.step(&Event { time: us * 1_000, cpu: 0, pid, what });
            }
        }
        Found { delays: delays.worst().to_vec(), others: delays.others().clone(), ..Found::default() }
    }

    fn lates(wakeups: &[(u64, u64)], limit: Option<f64>, max_us: f64) -> Lates {
        lates_kept(wakeups, limit, max_us, 1_000)
    }

    fn lates_kept(wakeups: &[(u64, u64)], limit: Option<f64>, max_us: f64, keep: usize) -> Lates {
        let mut lates = Lates::default();
        let measured = [OfCpu { cpu: 0, samples: Some(3), min_us: 1.0, avg_us: 2.0, max_us }];
        lates.add_delays(Test::Cyclictest, &found(wakeups, keep), limit, &measured);
        lates
    }

    fn us(lates: &Lates) -> Vec<f64> {
        lates.listed.iter().map(|late| late.total_us).collect()
    }

    #[test]
    fn late_wake_ups_are_those_beyond_the_limit_and_count_by_cure() {
        let all = lates(&[(30, 0), (70, 0), (41, 0), (40, 0)], Some(40.0), 70.0);
        assert_eq!(us(&all), [70.0, 41.0]);
        assert_eq!(all.listed[0].title(), "cyclictest ran 70.0 us late on CPU 0");
        assert_eq!(all.listed[0].causes, ["waited 70.0 us for hog (20, FIFO 99) in its own code"]);
        let [cure] = all.by_cure.as_slice() else { panic!("{:?}", all.by_cure) };
        assert_eq!((cure.times, cure.max_us, cure.total_us, cure.rule), (2, 70.0, 111.0, None));
        assert!(cure.cure.contains("outside Ontime's table") && cure.example == all.listed[0].causes[0], "{cure:?}");
        assert!(us(&lates(&[(70, 0)], None, 70.0)).is_empty(), "no limit is for it");
        // The program read its clock a little later than the trace says.
        assert_eq!(us(&lates(&[(39, 0), (12, 0)], Some(40.0), 41.0)), [39.0]);
        assert!(us(&lates(&[(39, 0)], Some(40.0), 40.0)).is_empty());
    }

    #[test]
    fn those_that_are_not_kept_count_too() {
        let all = [(70, 0), (60, 0), (50, 0), (45, 0), (40, 0), (30, 0)];
        for keep in [1, 2, 3, 4] {
            let some = lates_kept(&all, Some(40.0), 70.0, keep);
            assert_eq!(some.total, BTreeMap::from([("cyclictest", 4)]), "{keep}");
            let of = |lates: &Lates| lates.by_cure.iter().map(|of| (of.times, of.total_us, of.max_us)).next().unwrap();
            assert_eq!((some.listed.len(), of(&some)), (keep, (4, 225.0, 70.0)), "{keep}");
        }
    }

    #[test]
    fn a_cpu_whose_late_ones_are_not_kept_has_causes_and_the_longest_comes_first() {
        let of_cpu = |cpu, max_us| OfCpu { cpu, samples: Some(3), min_us: 1.0, avg_us: 2.0, max_us };
        let others = delay::Others { delays: 3, cpus: [1].into(), by_cure: Vec::new() };
        let mut lates = Lates::default();
        let found = Found { others, ..found(&[(70, 0)], 1) };
        lates.add_delays(Test::Cyclictest, &found, Some(40.0), &[of_cpu(0, 70.0), of_cpu(1, 60.0), of_cpu(2, 500.0)]);
        let listed: Vec<_> = lates.listed.iter().map(|late| (late.cpu, late.total_us)).collect();
        assert_eq!(listed, [(Some(2), 500.0), (Some(0), 70.0)]);
        assert_eq!(lates.total["cyclictest"], 5);
    }

    #[test]
    fn what_only_the_program_saw_is_told_unless_events_were_lost() {
        let all = lates(&[(9, 0)], Some(40.0), 55.0);
        assert_eq!((us(&all), all.by_cure[0].cure.as_str()), (vec![55.0], delay::UNSEEN));
        assert_eq!(all.listed[0].causes, ["no probe shows what took these 55.0 us"]);
        let measured = [OfCpu { cpu: 0, samples: Some(3), min_us: 1.0, avg_us: 2.0, max_us: 55.0 }];
        for (lossy, told) in [(0, vec![]), (3, vec![55.0])] {
            let mut lates = Lates::default();
            let found = Found { lost: 1, lossy: [lossy].into(), ..found(&[(9, 0)], 9) };
            lates.add_delays(Test::Cyclictest, &found, Some(40.0), &measured);
            assert_eq!(us(&lates), told, "lost on CPU {lossy}");
        }
    }

    #[test]
    fn an_interruption_counts_only_if_the_program_can_have_seen_it() {
        let seen = lates(&[(20, 50)], Some(40.0), 71.0);
        assert_eq!((us(&seen), seen.listed[0].causes.len()), (vec![70.0], 2));
        // With the interruption it would be longer than the longest that the program measured.
        let unseen = lates(&[(45, 50), (30, 50)], Some(40.0), 46.0);
        assert_eq!((us(&unseen), unseen.listed[0].causes.len()), (vec![45.0], 1));
        // Before the measurement.
        assert_eq!(us(&lates(&[(4_500, 0), (45, 0)], Some(40.0), 46.0)), [45.0]);
    }

    #[test]
    fn requests_have_the_cures_of_their_inversions() {
        let slow = |total_us: f64, rule: Option<RuleId>, text: &str| Slow {
            tenant: "plc".to_owned(),
            total_us,
            words: vec!["waited behind x".to_owned()],
            inversions: vec![Inversion { ns: 9_000, cure: Cure { rule, text: text.to_owned() } }],
            hint: None,
        };
        let mut lates = Lates::default();
        let rule = Some(RuleId::NapiThreaded);
        lates.add_requests(
            vec![slow(300.0, rule, ""), slow(280.0, None, "advice"), slow(260.0, rule, ""), slow(9.0, rule, "")],
            Some(250.0),
        );
        assert_eq!(us(&lates), [300.0, 280.0, 260.0]);
        let cures: Vec<_> = lates.by_cure.iter().map(|of| (of.rule, of.times, of.cure.is_empty())).collect();
        assert_eq!(cures, [(rule, 2, false), (None, 1, false)]);
    }
}
