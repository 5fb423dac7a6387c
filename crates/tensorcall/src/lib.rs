//! Tensor RPC: call a function on another process, with tensors as arguments and results.
//!
//! What is public so far is the [`engine`], which the Python package is built on.

mod agent;
mod autograd;
mod body;
mod buffer;
#[cfg(feature = "candle")]
pub mod candle;
mod clock;
mod config;
pub mod engine;
mod error;
mod fork;
mod future;
mod gather;
mod membership;
mod native;
mod plain;
pub mod rendezvous;
mod rref;
mod spin;
pub mod store;
mod sync;
mod transport;

pub use autograd::{Context, Entered, Within};
pub use error::{Error, ErrorKind, RemoteError, Result};
pub use native::{
    Agent, AgentBuilder, Argument, Arguments, Bytes, Caller, ConversionError, DType, Element, FromValue,
    Function, IntoValue, Keep, Output, RRef, RpcFuture, Serde, State, Success, Tensor, Value, WorkerInfo,
};
