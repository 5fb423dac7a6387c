//! Gradients over workers that compute with candle, compared with those of one process.
//!
//! The tolerance is 1e-9 of the larger number, or of 1: all is double precision, and sums are made in another
//! order.

#![expect(clippy::unwrap_used, reason = "a test stops where something is wrong")]

mod program;

use std::sync::Arc;
use std::time::{Duration, Instant};

use candle_core::{Tensor, Var};
use program::{Place, distance, expected, loss, run, variables};
use tensorcall::{Agent, AgentBuilder, Context, State};

const TOLERANCE: f64 = 1e-9;

/// A worker's variables, and the others over the network.
#[derive(Clone)]
struct Spread {
    workers: u64,
    own: Arc<Vec<Var>>,
}

struct Here<'a> {
    spread: &'a Spread,
    agent: &'a Agent,
}

impl Place for Here<'_> {
    fn workers(&self) -> u64 {
        self.spread.workers
    }

    fn variables(&self, worker: u64) -> &[Var] {
        assert_eq!(worker, u64::from(self.agent.rank()));
        &self.spread.own
    }

    fn call(&self, to: u64, seed: u64, depth: u64, inputs: Vec<Tensor>) -> candle_core::Result<Vec<Tensor>> {
        let name = format!("worker{to}");
        let outputs = self.agent.call_blocking(&name, "run", (seed, depth, inputs));
        outputs.map_err(candle_core::Error::wrap)
    }
}

fn run_here(
    State(spread): State<Spread>,
    agent: Agent,
    seed: u64,
    depth: u64,
    inputs: Vec<Tensor>,
) -> candle_core::Result<Vec<Tensor>> {
    run(&Here { spread: &spread, agent: &agent }, agent.rank().into(), seed, depth, inputs)
}

fn gradients(State(spread): State<Spread>, agent: Agent, context: u64) -> tensorcall::Result<Vec<Tensor>> {
    let store = Context::find(&agent, context)?.gradients();
    let gradient = |variable: &Var| match store.get(variable) {
        Some(gradient) => Ok(gradient.clone()),
        None => Ok(variable.zeros_like()?),
    };
    spread.own.iter().map(gradient).collect()
}

fn worker(number: u64, workers: u64) -> AgentBuilder {
    let spread = Spread { workers, own: Arc::new(variables(number)) };
    Agent::builder(format!("worker{number}"))
        .candle()
        .state(spread)
        .function("run", run_here)
        .function("gradients", gradients)
        .function("contexts", |agent: Agent| agent.autograd_contexts())
}

fn group(workers: u64) -> Vec<Agent> {
    Agent::start_together((0..workers).map(|number| worker(number, workers))).unwrap()
}

/// All workers leave together.
fn leave(agents: Vec<Agent>) {
    std::thread::scope(|scope| {
        for agent in &agents {
            scope.spawn(|| agent.shutdown_timeout(Duration::from_secs(30)).unwrap());
        }
    });
}

/// Runs a program and its backward passes, and compares what each worker has.
fn check(agents: &[Agent], seed: u64, depth: u64, passes: u32) {
    let workers = agents.len() as u64;
    let context = Context::begin(&agents[0]).unwrap();
    let outputs: Vec<Tensor> = {
        let _inside = context.enter();
        agents[0].call_blocking("worker0", "run", (seed, depth, Vec::<Tensor>::new())).unwrap()
    };
    let loss = loss(&outputs).unwrap();
    for _ in 0..passes {
        context.backward(std::slice::from_ref(&loss)).unwrap();
    }
    for (number, expected) in expected(workers, seed, depth).iter().enumerate() {
        let name = format!("worker{number}");
        let found = agents[0].call_blocking::<Vec<Tensor>>(&name, "gradients", (context.id(),));
        // A worker that no call came to does not know the context.
        let found = found.unwrap_or_else(|_| expected.iter().map(|e| e.zeros_like().unwrap()).collect());
        for (variable, (found, expected)) in found.iter().zip(expected).enumerate() {
            let expected = (expected * f64::from(passes)).unwrap();
            let off = distance(found, &expected);
            assert!(
                off <= TOLERANCE,
                "program {seed}, depth {depth}: variable {variable} of {name} is off by {off}:\n{found}\n{expected}"
            );
        }
    }
}

#[test]
fn gradients_of_random_programs_over_candle_workers_are_those_of_one_process() {
    for workers in 2..=4 {
        let agents = group(workers);
        for seed in 0..60 {
            check(&agents, seed * 7 + workers, 1 + seed % 4, 1 + u32::try_from(seed % 2).unwrap());
        }
        await_no_contexts(&agents);
        leave(agents);
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
