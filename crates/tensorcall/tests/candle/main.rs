//! Gradients over workers that compute with candle, compared with those of one process.
//!
//! The tolerance is 1e-9 of the larger number, or of 1: all is double precision, and sums are made in another
//! order.

#![expect(clippy::unwrap_used, reason = "a test stops where something is wrong")]

mod program;
mod spread;

use std::time::{Duration, Instant};

use candle_core::Tensor;
use program::{distance, expected};
use spread::{name, worker};
use tensorcall::Agent;

const TOLERANCE: f64 = 1e-9;

fn group(workers: u64) -> Vec<Agent> {
    Agent::start_together((0..workers).map(|number| worker(number, workers))).unwrap()
}

/// All workers leave together.
fn leave(agents: &[Agent]) {
    std::thread::scope(|scope| {
        for agent in agents {
            scope.spawn(|| agent.shutdown_timeout(Duration::from_secs(30)).unwrap());
        }
    });
}

/// Runs a program and its backward passes from worker `first`, and compares what each worker has. Tells on
/// how many of them there are gradients.
fn check(agents: &[Agent], first: u64, seed: u64, depth: u64, passes: u32) -> usize {
    let workers = agents.len() as u64;
    let found = agents[0].call_blocking(&name(first), "drive", (seed, depth, passes));
    let found: Vec<Vec<Tensor>> = found.unwrap();
    let expected = expected(workers, first, seed, depth);
    for (worker, (found, expected)) in found.iter().zip(&expected).enumerate() {
        for (variable, (found, expected)) in found.iter().zip(expected).enumerate() {
            let expected = (expected * f64::from(passes)).unwrap();
            let off = distance(found, &expected);
            assert!(
                off <= TOLERANCE,
                "program {seed} of {first}, depth {depth}: variable {variable} of worker {worker} is off by {off}:\n\
                 {found}\n{expected}"
            );
        }
    }
    let is_zero = |tensor: &Tensor| distance(tensor, &tensor.zeros_like().unwrap()) == 0.0;
    expected.iter().filter(|gradients| !gradients.iter().all(is_zero)).count()
}

#[test]
fn gradients_of_random_programs_over_candle_workers_are_those_of_one_process() {
    for workers in 2..=4 {
        let agents = group(workers);
        let mut spread = 0;
        for seed in 0..60 {
            let passes = 1 + u32::try_from(seed % 2).unwrap();
            spread += check(&agents, seed % workers, seed * 7 + workers, 1 + seed % 3, passes);
        }
        // The programs are not such that one worker does all.
        assert!(spread > 60 * 3 / 2, "{spread} workers had gradients");
        await_no_contexts(&agents);
        leave(&agents);
    }
}

fn await_no_contexts(agents: &[Agent]) {
    let limit = now() + Duration::from_secs(20);
    for agent in agents {
        while agent.autograd_contexts() > 0 {
            assert!(now() < limit, "{} still has a context", agent.name());
            std::thread::park_timeout(Duration::from_millis(1));
        }
    }
}

#[allow(clippy::disallowed_methods, reason = "tests have their own clock")]
fn now() -> Instant {
    Instant::now()
}
