//! Backward passes and gradients, as programs ask for them.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context as TaskContext, Poll};
use std::time::Duration;

use candle_core::Tensor;
use candle_core::backprop::GradStore;

use super::engine::RootTensors;
use super::graph::Kept;
use crate::autograd::Context;
use crate::error::{Error, ErrorKind, Result};
use crate::future::{Response, RpcFuture};

/// How a backward pass is to go.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct BackwardOptions {
    /// Whether workers with torch keep their graphs for another pass. Default no.
    pub retain_graph: bool,
    /// The pass fails when nothing has happened for this long on a worker; `None` is never. Default 60 s.
    pub patience: Option<Duration>,
}

impl Default for BackwardOptions {
    fn default() -> Self {
        Self { retain_graph: false, patience: Some(Duration::from_mins(1)) }
    }
}

/// With the feature `candle`.
impl Context {
    /// Runs the backward pass from `roots`, numbers, through the graphs of all workers; returns when all
    /// gradients are there. They are added to those that the context has.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`] if a root is no number or depends on no variable, [`ErrorKind::Autograd`] if the
    /// pass failed on some worker: with the error of that worker. The context can be used again then.
    pub fn backward(&self, roots: &[Tensor]) -> Result<()> {
        self.begin_backward(roots, BackwardOptions::default())?.wait()
    }

    /// Begins such a pass; what is returned is a future, which can also be waited for.
    ///
    /// # Errors
    ///
    /// As [`Context::backward`].
    pub fn begin_backward(&self, roots: &[Tensor], options: BackwardOptions) -> Result<Backward> {
        if roots.is_empty() {
            return Err(Error::usage("a backward pass needs roots"));
        }
        for root in roots {
            check_root(root)?;
        }
        let agent = self.contexts().agent().ok_or_else(Error::shutting_down)?;
        let roots = Arc::new(RootTensors(roots.to_vec()));
        let BackwardOptions { retain_graph, patience } = options;
        agent.backward(self.id(), roots, retain_graph, patience).map(Backward)
    }

    /// The gradients that passes have brought to variables of this worker, as optimizers take them.
    pub fn gradients(&self) -> GradStore {
        self.tape().kept::<Kept>().store()
    }
}

fn check_root(root: &Tensor) -> Result<()> {
    if root.elem_count() != 1 {
        let shape = root.dims();
        return Err(Error::usage(format!("the root of shape {shape:?} is not a number, all roots must be")));
    }
    if !root.track_op() {
        return Err(Error::usage("a root depends on no variable, so there are no gradients"));
    }
    Ok(())
}

/// A backward pass under way.
#[derive(Debug)]
#[must_use = "whether a pass succeeds is known when it was waited for"]
pub struct Backward(RpcFuture);

impl Backward {
    /// Waits until all gradients are there.
    ///
    /// # Errors
    ///
    /// As [`Context::backward`].
    pub fn wait(self) -> Result<()> {
        crate::agent::lend(None, || self.0.wait_until(None));
        let missing = || Err(Error::usage("the outcome of this pass was taken before"));
        outcome(self.0.take().unwrap_or_else(missing))
    }
}

impl Future for Backward {
    type Output = Result<()>;

    fn poll(mut self: Pin<&mut Self>, task: &mut TaskContext<'_>) -> Poll<Result<()>> {
        Pin::new(&mut self.0).poll(task).map(outcome)
    }
}

fn outcome(response: Result<Response>) -> Result<()> {
    if response?.raised {
        let text = "a worker's local engine raised an exception that only Python can read";
        return Err(Error::new(ErrorKind::Autograd, text));
    }
    Ok(())
}
