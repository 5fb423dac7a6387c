//! Whole jobs under virtual time: the caller's, the callee's and the shutdown's state machines of many
//! workers, with delay, reordering, repetition, crashes and lost connections, checked after each event.
//!
//! - CALL-1: each call completes exactly once.
//! - LIFE-1: no reply reaches another life than the caller's; no request runs twice.
//! - TERM-1: nobody is told that the group is quiet while something is under way between live members.
//! - Nothing hangs: in the end every call has its outcome and every live worker has left.
//!
//! A run depends on its family and seed alone. `TENSORCALL_SIM_SEEDS=100000` runs more seeds, and
//! [`one_seed`] runs one again, with a trace. Planted faults ([`fault::Fault`]) prove that the
//! simulator would notice.

mod fault;
mod ledger;
mod network;
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
fn small_jobs_keep_every_invariant() {
    survey(Family::Small, seeds(4_000));
}

#[test]
fn jobs_whose_workers_restart_keep_lives_apart() {
    survey(Family::Restarts, seeds(1_000));
}

#[test]
fn work_that_is_handed_around_is_waited_for() {
    survey(Family::Relay, seeds(4_000) / 8);
}

#[test]
fn a_hundred_workers_and_more_shut_down() {
    survey(Family::Hundred, seeds(4_000) / 400);
}

#[test]
fn a_thousand_workers_shut_down_with_messages_in_proportion() {
    let jobs = seeds(4_000).div_ceil(4_000);

    let summary = survey(Family::Thousand, jobs);

    // Arrive, two waves with their reports, quiet: 6 per member, and a few more where a crash or work
    // under way made a wave necessary.
    assert!(summary.termination_messages < jobs * 30 * 1_000, "{summary:?}");
}

/// Runs one seed again and shows what happened:
/// `TENSORCALL_SIM_SEED=small:17 cargo test -p tensorcall-proto --test sim one_seed -- --ignored --nocapture`
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
fn one_wave_instead_of_two_is_found() {
    find(Fault::OneWave, Family::Relay, &["TERM-1"]);
}

#[test]
fn a_frozen_activity_counter_is_found() {
    find(Fault::FrozenActivity, Family::Relay, &["TERM-1"]);
}

#[test]
fn unreported_processing_is_found() {
    find(Fault::ProcessingNotReported, Family::Small, &["TERM-1"]);
}

#[test]
fn an_abandoned_call_that_is_not_reported_is_found() {
    find(Fault::AbandonedNotReported, Family::Small, &["TERM-1"]);
}

#[test]
fn completing_twice_after_a_loss_is_found() {
    find(Fault::LossCompletesTwice, Family::Small, &["CALL-1"]);
}

#[test]
fn delivering_a_late_reply_is_found() {
    find(Fault::LateReplyDelivered, Family::Small, &["CALL-1"]);
}

#[test]
fn running_an_expired_request_is_found() {
    find(Fault::ExpiredRequestRuns, Family::Small, &["deadline"]);
}

#[test]
fn running_requests_of_a_lost_worker_is_found() {
    find(Fault::LostPeersRequestsRun, Family::Small, &["lost caller"]);
}

#[test]
fn not_telling_of_a_loss_is_found() {
    find(Fault::LossNotTold, Family::Small, &["nothing hangs"]);
}

#[test]
fn a_report_that_counts_for_a_later_wave_is_found() {
    find(Fault::StaleReportAccepted, Family::Relay, &["TERM-1"]);
}

#[test]
fn a_quiet_that_counts_for_a_later_round_is_found() {
    find(Fault::StaleQuietAccepted, Family::Small, &["TERM-1"]);
}

#[test]
fn listening_to_members_that_the_coordinator_says_are_gone_is_found() {
    find(Fault::GoneIgnored, Family::Small, &["TERM-1"]);
}

#[test]
fn not_telling_a_new_coordinator_what_is_over_is_found() {
    find(Fault::QuietNotPassedOn, Family::Small, &["nothing hangs"]);
}

#[test]
fn not_arriving_at_a_new_coordinator_is_found() {
    find(Fault::TakeoverIgnored, Family::Small, &["nothing hangs"]);
}

#[test]
fn confusing_the_lives_of_a_worker_is_found() {
    find(Fault::IncarnationIgnored, Family::Restarts, &["LIFE-1", "run once", "CALL-1", "lost caller"]);
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
}

fn report(family: Family, seed: u64, violation: &Violation) -> String {
    let mut world = World::new(family, seed, None).with_trace();
    // The same violation again, with its history.
    let _ = world.run();
    let name = family.name();
    format!(
        "{}\nseed {seed} of {name} breaks {}: {}\nagain: TENSORCALL_SIM_SEED={name}:{seed} cargo test -p \
         tensorcall-proto --test sim one_seed -- --ignored --nocapture",
        world.into_trace(),
        violation.invariant,
        violation.text,
    )
}

impl Summary {
    fn add(&mut self, other: Self) {
        self.events += other.events;
        self.calls += other.calls;
        self.crashes += other.crashes;
        self.termination_messages += other.termination_messages;
        self.took = self.took.max(other.took);
    }
}

/// Every planted fault shows within a fifth of this.
const SEEDS_TO_FIND_A_FAULT: u64 = 5_000;
