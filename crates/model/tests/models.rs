//! Runs every model with a limit on preemptions, so that the tests take seconds; `make model-check` has a higher limit.

use loom::model::Builder;

/// Preemptions per run, unless the environment variable `LOOM_MAX_PREEMPTIONS` is set.
const PREEMPTIONS: usize = 2;

fn check(model: impl Fn() + Sync + Send + 'static) {
    check_up_to(PREEMPTIONS, model);
}

fn check_up_to(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound.get_or_insert(preemptions);
    builder.max_branches = 10_000;
    builder.check(model);
}

#[test]
fn a_ledger_is_read_whole_and_loses_no_claim() {
    check(|| ontime_model::ledger(1, 2, 1));
}

/// A reader that is preempted while it reads a table, and continues while that table is written the next time.
#[test]
fn a_ledger_is_read_whole_however_often_its_reader_is_preempted() {
    check_up_to(2 * PREEMPTIONS, || ontime_model::ledger(0, 1, 1));
    check_up_to(2 * PREEMPTIONS, || ontime_model::ledger(2, 1, 0));
}

#[test]
fn a_ledger_that_is_offered_again_and_again_loses_no_claim() {
    check(|| ontime_model::ledger(2, 0, 3));
}

#[test]
fn a_worker_that_waits_for_room_is_woken() {
    check(|| ontime_model::room(3));
}

#[test]
fn places_are_taken_once() {
    check(|| ontime_model::places(3, 1));
    check(|| ontime_model::places(2, 2));
}

#[test]
fn the_holder_of_a_socket_has_its_descriptor() {
    for id in ontime_model::IDS {
        check(move || ontime_model::table(id));
    }
}
