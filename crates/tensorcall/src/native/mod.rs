//! The native interface: typed functions, calls, tensors and references over the engine.
//!
//! - `agent.rs`, `builder.rs`: a worker, and the calls that it makes
//! - `function.rs`, `states.rs`, `context.rs`: what others can call, and what functions get
//! - `handler.rs`, `task.rs`, `answer.rs`: a call on its way through a function and back
//! - `future.rs`, `rref.rs`: what calls return
//! - `value.rs`, `convert.rs`, `args.rs`, `serde/`: Rust types and plain data
//! - `message.rs`: plain data and messages
//! - `autograd.rs`: autograd contexts of a worker
//! - `bytes.rs`, `tensor/`: memory

mod agent;
mod answer;
mod args;
mod autograd;
mod builder;
mod bytes;
mod context;
mod convert;
mod function;
mod future;
mod handler;
mod message;
mod rref;
mod serde;
mod states;
mod task;
mod tensor;
mod value;

pub use agent::{Agent, WorkerInfo};
pub use args::Arguments;
pub use builder::AgentBuilder;
pub use bytes::Bytes;
pub use context::Caller;
pub use convert::{FromValue, IntoValue};
pub use function::{Argument, Function, Keep, Output, State, Success};
pub use future::RpcFuture;
pub use rref::RRef;
pub use serde::Serde;
pub use tensor::{DType, Element, Tensor};
pub use value::{ConversionError, Value};
