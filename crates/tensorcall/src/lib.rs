//! Tensor RPC: call a function on another process, with tensors as arguments and results.
//!
//! What is public so far is the [`engine`], which the Python package is built on.

mod agent;
mod autograd;
mod body;
mod buffer;
mod clock;
mod config;
pub mod engine;
mod error;
mod fork;
mod future;
mod rref;
mod spin;
mod sync;
mod transport;

pub use error::{Error, ErrorKind, Result};
