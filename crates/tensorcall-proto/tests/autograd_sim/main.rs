//! Whole jobs under virtual time: random programs of a toy tensor library on several workers, and backward
//! passes over them, while messages are delayed, reordered and repeated, local engines raise and workers die.
//!
//! - *Gradients*: those of every leaf are what one run over the whole graph gives, exactly (GRAD-1).
//! - *Once*: where there is no cycle between workers, every node runs once.
//! - *Every pass ends*, everywhere, in time: with an error if something went wrong, and then the next pass on
//!   the same machines is right again.
//! - *One at a time*: a local engine is told one thing at a time, and the end last.
//!
//! A run depends on its family and seed alone. `TENSORCALL_SIM_SEEDS=100000` runs more seeds, and
//! [`one_seed`] runs one again, with a trace. Planted faults ([`fault::Fault`]) prove that the simulator
//! would notice.

#![expect(clippy::expect_used, reason = "a test stops where something is wrong")]

mod fault;
mod graph;
mod local;
#[path = "../sim/rng.rs"]
mod rng;
mod scenario;
#[path = "../common/settings.rs"]
mod settings;
mod world;

use fault::Fault;
use scenario::Family;
use settings::{seeds, setting};
use world::{Summary, Violation, World};

#[test]
fn without_cycles_between_workers_every_node_runs_once() {
    let total = survey(Family::Row, seeds(1_500));

    assert!(total.products > 1_000 && total.probes > 0 && total.failed == 0, "{total:?}");
}

#[test]
fn gradients_are_exact_whatever_cycles_there_are() {
    let total = survey(Family::Cycles, seeds(2_000));

    assert!(total.products > 10_000 && total.probes > 0 && total.failed == 0, "{total:?}");
}

#[test]
fn messages_that_nobody_read_hold_no_pass_up() {
    let total = survey(Family::Unread, seeds(500));

    assert!(total.asks > 100 && total.failed == 0, "{total:?}");
}

#[test]
fn an_error_ends_the_pass_everywhere_and_the_next_one_is_right() {
    let total = survey(Family::Errors, seeds(600));

    assert!(total.failed > 100, "{total:?}");
}

#[test]
fn a_lost_worker_ends_the_pass_everywhere_and_the_next_one_is_right() {
    let total = survey(Family::Losses, seeds(600));

    assert!(total.failed > 100, "{total:?}");
}

#[test]
fn gradients_that_never_come_end_the_pass_when_patience_is_over() {
    let total = survey(Family::Silence, seeds(200));

    assert!(total.failed > 50, "{total:?}");
}

/// Runs one seed again and shows what happened:
/// `TENSORCALL_SIM_SEED=row:17 cargo test -p tensorcall-proto --test autograd_sim one_seed -- --ignored --nocapture`
#[test]
#[ignore = "runs the seed in TENSORCALL_SIM_SEED"]
fn one_seed() {
    let wanted = setting("TENSORCALL_SIM_SEED").unwrap();
    let (name, seed) = wanted.split_once(':').unwrap();
    let family = Family::ALL.into_iter().find(|family| family.name() == name).unwrap();
    let mut world = World::new(family, seed.parse().unwrap(), None).with_trace();

    let result = world.run();

    eprintln!("{}", world.into_trace());
    result.map_err(|violation| violation.text).unwrap();
}

#[test]
fn a_plan_that_forgets_what_reaches_a_recv_function_is_found() {
    find(Fault::ReachForgotten, Family::Cycles, &["gradients"]);
}

#[test]
fn parts_of_a_gradient_that_are_forgotten_are_found() {
    find(Fault::PartsForgotten, Family::Cycles, &["gradients"]);
}

#[test]
fn gradients_that_are_swallowed_are_found() {
    find(Fault::GradientSwallowed, Family::Cycles, &["no error without cause", "ends in time"]);
}

#[test]
fn a_worker_that_says_too_early_that_it_is_done_is_found() {
    find(Fault::DoneAtOnce, Family::Row, &["ends everywhere"]);
}

#[test]
fn a_failure_that_is_not_passed_on_is_found() {
    find(Fault::AbortSwallowed, Family::Errors, &["ends in time", "no error without cause"]);
}

#[test]
fn questions_that_nobody_answers_are_found() {
    find(Fault::AskSwallowed, Family::Unread, &["no error without cause", "ends in time"]);
}

#[test]
fn cycles_that_nobody_notices_are_found() {
    find(Fault::ProbeSwallowed, Family::Cycles, &["no error without cause", "ends in time"]);
}

#[test]
fn workers_that_do_not_wait_for_all_sources_are_found() {
    find(Fault::NeverWaits, Family::Row, &["once"]);
}

#[test]
fn an_error_that_is_not_told_is_found() {
    find(Fault::ErrorNotTold, Family::Errors, &["errors arrive", "gradients", "ends in time"]);
}

/// Runs seeds until one breaks an invariant.
fn survey(family: Family, seeds: u64) -> Summary {
    let mut total = Summary::default();
    for seed in 0..seeds {
        match World::new(family, seed, None).run() {
            Ok(summary) => total.add(summary),
            Err(violation) => panic!("{}", report(family, seed, &violation)),
        }
    }
    eprintln!("{}: {total:?}", family.name());
    total
}

/// Workers that have a fault must be caught by one of `invariants`.
fn find(fault: Fault, family: Family, invariants: &[&str]) {
    let finds = |&seed: &u64| {
        let result = World::new(family, seed, Some(fault)).run();
        result.is_err_and(|violation| invariants.contains(&violation.invariant))
    };
    let found = (0..SEEDS_TO_FIND_A_FAULT).find(finds);

    assert!(found.is_some(), "{fault:?} was not found in {SEEDS_TO_FIND_A_FAULT} seeds");
    eprintln!("{fault:?} found by seed {found:?}");
}

fn report(family: Family, seed: u64, violation: &Violation) -> String {
    let mut world = World::new(family, seed, None).with_trace();
    // The same violation again, with its history.
    let _ = world.run();
    let name = family.name();
    format!(
        "{}\nseed {seed} of {name} breaks {}: {}\nagain: TENSORCALL_SIM_SEED={name}:{seed} cargo test -p \
         tensorcall-proto --test autograd_sim one_seed -- --ignored --nocapture",
        world.into_trace(),
        violation.invariant,
        violation.text,
    )
}

impl Summary {
    fn add(&mut self, other: Self) {
        self.events += other.events;
        self.passes += other.passes;
        self.failed += other.failed;
        self.products += other.products;
        self.probes += other.probes;
        self.asks += other.asks;
    }
}

/// More than any planted fault needs.
const SEEDS_TO_FIND_A_FAULT: u64 = 500;
