//! Tensor RPC: call a function on another process, with tensors as arguments and results.
//!
//! An [`Agent`] is one worker of a job: it listens, connects to its peers, sends calls and runs those
//! that come in on a pool of threads, in parallel and whatever the rest of the process does. What runs
//! them is a [`Handler`]; the Python package brings one that runs Python functions.
//!
//! - [`agent`]: calls, peers, the pool, graceful shutdown
//! - [`transport`]: memory, Unix sockets and TCP behind one trait
//! - [`future`]: outcomes that complete exactly once, awaitable under any runtime
//! - [`buffer`], [`body`]: memory of messages, never copied without need
//! - [`fork`], [`sync`]: what makes a forked child harmless
//!
//! The wire format and every protocol are in [`proto`], as state machines without I/O.

pub mod agent;
pub mod body;
pub mod buffer;
mod clock;
pub mod config;
mod error;
pub mod fork;
pub mod future;
mod rref;
mod spin;
pub mod sync;
pub mod transport;

pub use agent::{
    Agent, CallError, Fault, Faults, Handler, InboundCall, Leak, Metrics, PeerInfo, RRefCounts, Request,
    Responder, ThreadHook, is_pool_thread, lend,
};
pub use config::AgentConfig;
pub use error::{Error, ErrorKind, Result};
pub use future::{Promise, Response, RpcFuture, promise};
pub use rref::{Kept, Packed, RRef, RRefState};
pub use tensorcall_proto as proto;
pub use transport::host::Listening;
