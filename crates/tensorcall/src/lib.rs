//! Tensor RPC: call a function on another process, with tensors as arguments and results.
//!
//! A *job* is a group of *workers*, each a process with a unique name. Any worker calls functions of any other,
//! or of itself: for a result, for a future, or for a reference to a result that stays there.
//!
//! ```
//! use tensorcall::{Agent, RpcFuture, Tensor};
//!
//! fn double(mut tensor: Tensor) -> tensorcall::Result<Tensor> {
//!     tensor.as_mut_slice::<f32>()?.iter_mut().for_each(|element| *element *= 2.0);
//!     Ok(tensor)
//! }
//!
//! // Two workers in this process; others meet over TCP, files or a launcher.
//! let workers = Agent::start_together([
//!     Agent::builder("alice"),
//!     Agent::builder("bob").function("double", double),
//! ])?;
//!
//! let tensor = Tensor::from_vec(vec![1.0f32, 2.0], &[2])?;
//! let doubled: RpcFuture<Tensor> = workers[0].call("bob", "double", (tensor,));
//! assert_eq!(doubled.wait()?.as_slice::<f32>()?, [2.0, 4.0]);
//! # Ok::<(), tensorcall::Error>(())
//! ```
#![cfg_attr(doc, doc = "")]
#![cfg_attr(doc, doc = "The [`guide`] goes from here to many hosts.")]
//!
//! - [`Agent`], [`AgentBuilder`]: a worker, its functions and its calls
//! - [`Function`], [`State`], [`Caller`], [`Keep`]: what others can call
//! - [`RpcFuture`], [`RRef`]: what calls return
//! - [`Tensor`], [`Bytes`]: memory that is sent from where it lies
//! - [`IntoValue`], [`FromValue`], [`Value`], [`Serde`]: which types travel, and how
//! - [`Error`], [`ErrorKind`]: what can go wrong
//! - [`rendezvous`], [`store`]: where workers meet
//! - [`engine`]: what all this is built on, for embedders such as the Python package
//!
//! | feature | what it adds |
//! |---|---|
//! | `candle` | candle's tensors as arguments and results, and backward passes over several workers |
//! | `ndarray` | tensors as arrays of `ndarray` and the other way round, without copying |

mod agent;
mod autograd;
mod body;
mod buffer;
#[cfg(feature = "candle")]
pub mod candle;
mod clock;
mod config;
pub mod engine;
mod errands;
mod error;
mod fork;
mod future;
mod gather;
#[cfg(any(doc, doctest))]
pub mod guide;
mod held;
mod membership;
mod native;
mod plain;
pub mod rendezvous;
mod rref;
mod shared;
mod spin;
pub mod store;
mod sync;
mod transport;
mod wakes;

#[cfg(feature = "candle")]
pub use autograd::{Context, Entered, Within};
pub use error::{Error, ErrorKind, RemoteError, Result};
pub use native::{
    Agent, AgentBuilder, Argument, Arguments, Bytes, Caller, ConversionError, DType, Element, FromValue,
    Function, IntoValue, Keep, Output, RRef, RpcFuture, Serde, State, Success, Tensor, Value, WorkerInfo,
};

/// The Rust in the pages of the repository, to be tested.
#[cfg(doctest)]
mod pages {
    #[doc = include_str!("../../../README.md")]
    mod readme {}
    #[doc = include_str!("../../../docs/mixed-jobs.md")]
    mod mixed_jobs {}
}
