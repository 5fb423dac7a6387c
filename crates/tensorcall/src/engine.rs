//! What the native interface and other embedders, such as the Python package, are built on.
//!
//! An [`Agent`] here calls functions by whatever bytes name them, and a [`Handler`] runs those that come
//! in; types and their conversion are the embedder's. Programs in Rust want what is at the crate's root.
//! This interface follows the needs of its users in this repository and may change with any version.
//!
//! - [`Agent`]: calls, peers, the pool, graceful shutdown
//! - [`autograd`]: backward passes over the graphs of several workers
//! - [`transport`]: memory, Unix sockets and TCP behind one trait; [`over_group`]: a process group instead;
//!   [`over_hub`]: memory alone
//! - [`RpcFuture`]: outcomes that complete exactly once, awaitable under any runtime
//! - [`buffer`], [`body`]: memory of messages, never copied without need
//! - [`fork`], [`sync`]: what makes a forked child harmless
//! - [`proto`]: the wire format and every protocol, as state machines without I/O

use std::sync::Arc;

pub use tensorcall_proto as proto;

pub use crate::agent::{
    Agent, CallError, Desk, Fault, Faults, Handler, InboundCall, Leak, Metrics, PeerInfo, RRefCounts,
    Request, Responder, ThreadHook, is_pool_thread, lend,
};
pub use crate::config::AgentConfig;
pub use crate::error::{Error, ErrorKind, Result};
pub use crate::future::{Promise, Response, RpcFuture, promise};
pub use crate::gather::{Gathered, Gatherings};
pub use crate::membership::{Joining, Member, Roster, Start, join};
pub use crate::rref::{Kept, Packed, RRef, RRefState};
pub use crate::transport::host::Listening;

/// Makes a native worker a rank of a process group, which carries the workers' messages too: they listen nowhere
/// and need no store. The group is theirs alone. Whoever is in it is of the job.
pub fn over_group(
    builder: crate::AgentBuilder,
    group: Arc<dyn transport::group::ProcessGroup>,
) -> crate::AgentBuilder {
    builder.process_group(group)
}

/// Makes a native worker reachable through `hub` alone: for a job whose workers, however many, live in one process
/// and meet as others do.
pub fn over_hub(builder: crate::AgentBuilder, hub: Arc<transport::memory::Hub>) -> crate::AgentBuilder {
    builder.hub(hub)
}

/// Backward passes, and what a tensor library brings for them.
pub mod autograd {
    pub use crate::autograd::*;
}

/// What travels with a message: payload, tensor descriptions and the tensors' memory.
pub mod body {
    pub use crate::body::*;
}

/// Memory of messages: ours, or anybody's with its owner.
pub mod buffer {
    pub use crate::buffer::*;
}

/// What makes a forked child of a process with agents harmless.
pub mod fork {
    pub use crate::fork::*;
}

/// Locks that a forked child can abandon.
pub mod sync {
    pub use crate::sync::*;
}

/// Ways to move messages between workers.
pub mod transport {
    pub use crate::transport::*;
}
