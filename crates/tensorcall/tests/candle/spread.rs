//! A worker that runs programs, with the others over the network.

use std::sync::Arc;

use candle_core::{Tensor, Var};
use tensorcall::{Agent, AgentBuilder, Context, Result, State};

use super::program::{Place, loss, run, variables};

/// A worker's variables.
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
        assert_eq!(worker, u64::from(self.agent.rank()), "programs run where their variables are");
        &self.spread.own
    }

    fn call(&self, to: u64, seed: u64, depth: u64, inputs: Vec<Tensor>) -> candle_core::Result<Vec<Tensor>> {
        let outputs = self.agent.call_blocking(&name(to), "run", (seed, depth, inputs));
        outputs.map_err(candle_core::Error::wrap)
    }
}

/// The name of a worker.
pub(crate) fn name(worker: u64) -> String {
    format!("w{worker}")
}

/// A worker that runs programs when it is called.
pub(crate) fn worker(number: u64, workers: u64) -> AgentBuilder {
    let spread = Spread { workers, own: Arc::new(variables(number)) };
    Agent::builder(name(number))
        .candle()
        .state(spread)
        .function("run", run_here)
        .function("drive", drive)
        .function("gradients", gradients)
        .function("pass_through", pass_through)
        .function("multiply", multiply)
        .function("multiply_later", multiply_later)
        .function("fail_backward", fail_backward)
        .function("contexts", |agent: Agent| agent.autograd_contexts())
}

#[expect(clippy::needless_pass_by_value, reason = "as functions of workers take their arguments")]
fn run_here(
    State(spread): State<Spread>,
    agent: Agent,
    seed: u64,
    depth: u64,
    inputs: Vec<Tensor>,
) -> candle_core::Result<Vec<Tensor>> {
    run(&Here { spread: &spread, agent: &agent }, agent.rank().into(), seed, depth, inputs)
}

/// Runs a program in a context of this worker's own, and `passes` backward passes; returns the gradients of
/// all workers.
#[expect(clippy::needless_pass_by_value, reason = "as functions of workers take their arguments")]
fn drive(
    State(spread): State<Spread>,
    agent: Agent,
    seed: u64,
    depth: u64,
    passes: u64,
) -> Result<Vec<Vec<Tensor>>> {
    let context = Context::begin(&agent)?;
    let outputs = {
        let _inside = context.enter();
        run(&Here { spread: &spread, agent: &agent }, agent.rank().into(), seed, depth, Vec::new())?
    };
    let loss = loss(&outputs)?;
    for pass in 1..=passes {
        let mut options = tensorcall::candle::BackwardOptions::default();
        options.retain_graph = pass < passes;
        context.begin_backward(std::slice::from_ref(&loss), options)?.wait()?;
    }
    let of = |worker| agent.call_blocking(&name(worker), "gradients", (context.id(),));
    (0..spread.workers).map(of).collect()
}

/// The gradients of this worker's variables; zeros where there are none.
#[expect(clippy::needless_pass_by_value, reason = "as functions of workers take their arguments")]
fn gradients(State(spread): State<Spread>, agent: Agent, context: u64) -> Result<Vec<Tensor>> {
    // A worker that no call came to does not know the context.
    let store = Context::find(&agent, context).map(|context| context.gradients()).unwrap_or_default();
    let gradient = |variable: &Var| match store.get(variable) {
        Some(gradient) => Ok(gradient.clone()),
        None => Ok(variable.zeros_like()?),
    };
    spread.own.iter().map(gradient).collect()
}

/// The gradient of a variable that went through `function` of another worker.
#[expect(clippy::needless_pass_by_value, reason = "as functions of workers take their arguments")]
fn pass_through(State(spread): State<Spread>, agent: Agent, to: String, function: String) -> Result<Tensor> {
    let context = Context::begin(&agent)?;
    let variable = &spread.own[0];
    let output: Tensor = {
        let _inside = context.enter();
        agent.call_blocking(&to, &function, (variable,))?
    };
    // It may depend on nothing but itself.
    let loss = (output.to_dtype(candle_core::DType::F64)?.sum_all()? + (variable.sum_all()? * 0.0)?)?;
    context.backward(&[loss])?;
    let gradient = context.gradients().remove(variable);
    gradient.map_or_else(|| Ok(variable.zeros_like()?), Ok)
}

fn multiply(State(spread): State<Spread>, input: Tensor) -> candle_core::Result<Tensor> {
    input * spread.own[0].as_tensor()
}

async fn multiply_later(agent: Agent, to: String, input: Tensor) -> Result<Tensor> {
    agent.call(&to, "multiply", (input,)).await
}

/// Candle cannot go back through this.
#[expect(clippy::needless_pass_by_value, reason = "as functions of workers take their arguments")]
fn fail_backward(input: Tensor) -> candle_core::Result<Tensor> {
    input.reshape((1, 1, 3, 3))?.upsample_bilinear2d(6, 6, false)
}
