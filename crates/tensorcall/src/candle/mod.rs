//! Tensors of [candle](https://docs.rs/candle-core) in calls, and gradients over several workers.
//!
//! A function takes and returns `candle_core::Tensor` like any other type. Large tensors are sent from where
//! they lie: their storage is locked for reading until then, so a `Var::set` waits that long. What arrives
//! is copied once, into a vector, as candle owns all memory of its tensors.
//!
//! With [`AgentBuilder::candle`](crate::AgentBuilder::candle) a worker also takes part in backward passes.
//! Calls that are made in a [`Context`] are recorded: tensors that depend on variables are part of one graph
//! wherever they go. The gradients are those of the same computation in one process, whether the other
//! workers compute with candle or, in Python, with torch.
//!
//! - A tensor that was received with a graph is a variable here (`is_variable()`), but it is nobody's leaf:
//!   its gradient goes on to its sender. It belongs to the context that it came in.
//! - A [`Tensor`](crate::Tensor) that was received and is sent on as it is, keeps its place in the graph; its
//!   views and copies have none.
//! - Candle keeps graphs as long as their tensors live, so `retain_graph` matters to torch workers only.
//!
//! The parts: `memory.rs` (lending and copying), `graph.rs` (messages and variables), `gradients.rs` (how they
//! travel), `seed.rs` (where candle begins), `pass.rs` and `engine.rs` (the local engine), `context.rs`
//! (what programs call), `deep.rs` (stacks for candle's recursion).

mod context;
mod convert;
mod deep;
mod engine;
mod error;
mod gradients;
mod graph;
mod memory;
mod pass;
mod seed;

use std::sync::Arc;

pub use context::{Backward, BackwardOptions};

#[cfg(doc)]
use crate::Context;
use crate::autograd::{Contexts, LocalEngine};

/// Candle as the local engine of the worker that has these contexts.
pub(crate) fn engine(contexts: &Arc<Contexts>) -> Arc<dyn LocalEngine> {
    Arc::new(engine::Candle::new(Arc::clone(contexts)))
}
