//! Whole jobs under virtual time: many workers make references, pass them on, fetch and drop them, while
//! messages are delayed, reordered and repeated, links break and workers crash and come back.
//!
//! - *Early free*: an owner drops no value that a live worker holds or is being sent, and no holder is told
//!   that there is no value (RREF-1), but for the limit that `docs/rref.md` names.
//! - *Leak*: when every program has dropped all it had and nothing is under way, both machines of every
//!   live worker are empty, and nothing is unacknowledged (TERM-1).
//! - *Quiet*: when every worker reports that nothing is under way, nothing is (TERM-1).
//! - *Confirmed before run*: a function runs when the owners know its arguments, or not at all.
//! - *Nothing hangs*: every request is answered, every value that is waited for comes or fails.
//!
//! A run depends on its family and seed alone. `TENSORCALL_SIM_SEEDS=100000` runs more seeds, and
//! [`one_seed`] runs one again, with a trace. Planted faults ([`fault::Fault`]) prove that the
//! simulator would notice.

mod fault;
mod ledger;
mod network;
mod program;
#[path = "../sim/rng.rs"]
mod rng;
mod scenario;
#[path = "../common/settings.rs"]
mod settings;
mod worker;
mod world;

use fault::Fault;
use ledger::Violation;
use scenario::Family;
use settings::{seeds, setting};
use world::{Summary, World};

#[test]
fn references_are_freed_when_nobody_has_them_and_not_before() {
    let total = survey(Family::Calm, seeds(2_000));

    assert!(total.forks > 10 * total.crashes, "{total:?}");
}

#[test]
fn links_that_break_lose_no_reference() {
    let total = survey(Family::Links, seeds(2_000));

    assert!(total.cuts > 0 && total.crashes == 0, "{total:?}");
}

#[test]
fn workers_that_die_hold_nothing_and_their_next_lives_are_others() {
    let total = survey(Family::Lives, seeds(2_000));

    assert!(total.crashes > 0, "{total:?}");
}

#[test]
fn hundreds_of_workers_end_with_empty_tables() {
    let total = survey(Family::Hundreds, seeds(2_000).div_ceil(200));

    assert!(total.rrefs > 1_000, "{total:?}");
}

/// Runs one seed again and shows what happened:
/// `TENSORCALL_SIM_SEED=links:17 cargo test -p tensorcall-proto --test rref_sim one_seed -- --ignored --nocapture`
#[test]
#[ignore = "runs the seed in TENSORCALL_SIM_SEED"]
fn one_seed() {
    let wanted = setting("TENSORCALL_SIM_SEED").unwrap();
    let (name, seed) = wanted.split_once(':').unwrap();
    let family = Family::ALL.into_iter().find(|family| family.name() == name).unwrap();
    let mut world = World::new(family, seed.parse().unwrap(), None).with_trace();

    let result = world.run();

    eprintln!("{}", world.into_trace());
    result.unwrap();
}

#[test]
fn a_delete_before_its_own_confirmation_is_found() {
    find(Fault::DeleteBeforeConfirmation, Family::Calm, &["leak"]);
}

#[test]
fn an_accept_before_the_owner_knows_is_found() {
    find(Fault::AcceptBeforeConfirmation, Family::Calm, &["early free", "confirmed before run"]);
}

#[test]
fn a_delete_while_a_child_is_pending_is_found() {
    find(Fault::DeleteWithPendingChild, Family::Calm, &["early free"]);
}

#[test]
fn an_ack_that_is_lost_and_not_said_again_is_found() {
    find(Fault::NotSaidAgain, Family::Links, &["leak"]);
}

#[test]
fn a_child_that_is_not_asked_after_is_found() {
    find(Fault::NotRescinded, Family::Links, &["leak"]);
}

#[test]
fn sharing_without_counting_is_found() {
    find(Fault::SharedButNotCounted, Family::Calm, &["early free"]);
}

#[test]
fn a_late_fork_that_is_ignored_is_found() {
    find(Fault::ForkNotCounted, Family::Calm, &["early free"]);
}

#[test]
fn a_fork_that_is_counted_twice_is_found() {
    find(Fault::ForkCountedTwice, Family::Links, &["leak"]);
}

#[test]
fn a_tombstone_that_is_forgotten_is_found() {
    find(Fault::TombstoneForgotten, Family::Calm, &["leak"]);
}

#[test]
fn a_count_of_a_fork_that_is_no_more_and_is_ignored_is_found() {
    find(Fault::StrayCountIgnored, Family::Links, &["leak"]);
}

#[test]
fn a_lost_workers_forks_that_are_kept_are_found() {
    find(Fault::LostForksKept, Family::Lives, &["leak"]);
}

#[test]
fn children_of_a_lost_worker_that_are_kept_are_found() {
    find(Fault::LostChildrenKept, Family::Lives, &["leak"]);
}

#[test]
fn confusing_the_lives_of_a_worker_is_found() {
    find(Fault::LivesConfused, Family::Lives, &["early free"]);
}

#[test]
fn an_owner_that_forgets_its_own_hold_is_found() {
    find(Fault::HoldForgotten, Family::Calm, &["early free"]);
}

#[test]
fn forks_of_a_message_that_was_not_sent_are_found() {
    find(Fault::UnsentNotTold, Family::Calm, &["leak"]);
}

#[test]
fn forks_of_a_message_that_was_not_read_are_found() {
    find(Fault::UnreadNotRegistered, Family::Calm, &["leak"]);
}

#[test]
fn a_creation_that_never_runs_and_is_kept_is_found() {
    find(Fault::AbandonedNotTold, Family::Lives, &["leak", "nothing hangs"]);
}

#[test]
fn messages_under_way_that_are_not_reported_are_found() {
    find(Fault::NothingReported, Family::Calm, &["quiet"]);
}

#[test]
fn a_function_that_runs_before_its_arguments_are_confirmed_is_found() {
    find(Fault::RunsUnconfirmed, Family::Calm, &["confirmed before run"]);
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
    total
}

/// Workers that have a fault must be caught by one of `invariants`. Some faults break others as well.
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
         tensorcall-proto --test rref_sim one_seed -- --ignored --nocapture",
        world.into_trace(),
        violation.invariant,
        violation.text,
    )
}

impl Summary {
    fn add(&mut self, other: Self) {
        self.events += other.events;
        self.rrefs += other.rrefs;
        self.forks += other.forks;
        self.crashes += other.crashes;
        self.cuts += other.cuts;
    }
}

/// Every planted fault shows within a fifth of this.
const SEEDS_TO_FIND_A_FAULT: u64 = 5_000;
