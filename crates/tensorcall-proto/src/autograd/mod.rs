//! Distributed autograd: a backward pass over the graphs of several workers (GRAD-1).
//!
//! [`Passes`] is one worker's part in all backward passes, without tensors, threads or a clock. It knows of
//! a graph only its **plan**: *sources*, where gradients come in (the tensors that this worker sent, and
//! the roots), *recv functions*, where they go out again, and which sources reach which of these. The
//! gradients themselves are tokens, and the local engine that computes with them is the driver's.
//!
//! - `message.rs`: what workers say to each other
//! - `passes.rs`: all passes of a worker, those that are over included
//! - `pass.rs`: one of them
//! - `reach.rs`: sets of sources
//!
//! `docs/autograd.md` tells the protocol.

mod error;
mod message;
mod pass;
mod passes;
mod reach;
#[cfg(test)]
mod tests;

pub use error::AutogradError;
pub use message::{AutogradCall, Pass, Step};
pub use passes::Passes;

use crate::ids::{PassId, Rank};

/// What the local engine finds in a context's graphs on one worker.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Plan {
    /// The send functions: autograd message, and who received it. These are the first sources.
    pub sends: Vec<(u64, Rank)>,
    /// Whether the roots are here, as the last source.
    pub roots: bool,
    /// The recv functions.
    pub recvs: Vec<PlannedRecv>,
    /// Other workers that know the context.
    pub known: Vec<Rank>,
}

/// A recv function in a [`Plan`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedRecv {
    /// The autograd message.
    pub message: u64,
    /// Who sent it.
    pub from: Rank,
    /// The sources whose gradients flow into it, by index.
    pub reach: Vec<usize>,
}

/// What the local engine is to do, on a thread that may take its time. One thing at a time per pass.
#[derive(Debug, Clone, PartialEq)]
pub enum Work<G, E> {
    /// Find the plan: [`Passes::handle_planned`].
    Plan,
    /// Run a vector-Jacobian product: [`Passes::handle_vjp_done`].
    Vjp {
        /// The sources that are run, each once per pass; those without a gradient are left out. `None` is
        /// the roots, whose gradient is theirs to know.
        arrived: Vec<(Option<u64>, Option<G>)>,
        /// The recv functions whose gradients are complete by this, from all that was run in this pass.
        wanted: Vec<u64>,
        /// Whether no sources are left. If there are, the graphs are still needed. The last of several
        /// products may have nothing to run: it says that the gradients of the leaves are complete.
        last: bool,
    },
    /// The pass is over: [`Passes::handle_ended`].
    End(Result<(), E>),
}

/// What comes or goes with a [`Step`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Content<G, E> {
    /// Nothing.
    Nothing,
    /// With [`Step::Gradient`].
    Gradient(G),
    /// With [`Step::Abort`].
    Error(E),
}

/// What the driver of [`Passes`] is to do.
#[derive(Debug)]
pub enum Effect<G, E, A> {
    /// Let some thread call [`Passes::take_work`]. The longer it takes the more there is to do at once.
    Work(Pass),
    /// Make this call, and report its answer to [`Passes::handle_answer`].
    Call {
        /// The pass.
        pass: Pass,
        /// The callee, which may be this worker.
        to: Rank,
        /// What to say.
        step: Step,
        /// What goes with it.
        content: Content<G, E>,
    },
    /// Answer a call of another worker.
    Answer(A, Result<(), E>),
    /// A pass that began here is over, everywhere if it succeeded.
    Ended(PassId, Result<(), E>),
}
