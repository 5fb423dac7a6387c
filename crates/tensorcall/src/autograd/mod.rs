//! Backward passes over the graphs of several workers.
//!
//! Messages join the graphs of two workers: the tensors that one sent are inputs of a **send function** there,
//! and on the other worker they are outputs of a **recv function**. `proto::autograd` says which worker does
//! what when; a [`LocalEngine`] does the arithmetic of one worker. The first of them is torch's, whose
//! contexts are in Python; what is here of contexts is for engines in Rust, such as that of candle.
//!
//! - `engine.rs`: what a tensor library supplies, and how passes fail
//! - `tape.rs`: what one worker has of a context
//! - `contexts.rs`: all contexts of a worker, what messages do to them, and how they end
//! - `context.rs`: a context as programs see it
//! - `scope.rs`: which context is that of a thread or task

mod context;
mod contexts;
mod engine;
mod scope;
mod tape;

pub use context::Context;
pub use contexts::{Contexts, Outgoing, RELEASE};
pub(crate) use engine::NO_ENGINE;
pub use engine::{Arrived, Found, LocalEngine, PassError, Roots};
pub use scope::{Entered, Within};
pub use tape::{Graph, Node, Receipt, Sending, Slot, Tape};
