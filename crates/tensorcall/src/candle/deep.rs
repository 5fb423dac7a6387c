//! Room for candle's walks through graphs, which recurse as deep as a graph is.
//!
//! Threads of the pool have stacks of the usual size (2 MiB: graphs of some thousand operations in a row).

use super::error::{Problem, Result};

/// Address space, of which only what is used costs memory: graphs of some hundred thousand operations.
const STACK_BYTES: usize = 256 << 20;
/// A walk of so few nodes fits any stack.
const SHALLOW: usize = 256;

/// Runs `work` where there is room for graphs of any reasonable depth.
pub(super) fn run<R: Send>(work: impl FnOnce() -> R + Send) -> Result<R> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("tensorcall-deep".to_owned()).stack_size(STACK_BYTES);
        let thread = thread.spawn_scoped(scope, work).map_err(Problem::Thread)?;
        thread.join().map_err(|panic| std::panic::resume_unwind(panic))
    })
}

/// As [`run`], for a walk of so many nodes.
pub(super) fn run_if<R: Send>(nodes: usize, work: impl FnOnce() -> R + Send) -> Result<R> {
    if nodes <= SHALLOW { Ok(work()) } else { run(work) }
}
