//! Wire format and protocol state machines of tensorcall.
//!
//! Everything here is a function of bytes, events and time: no sockets, no threads, no clock, no
//! Python. The `tensorcall` crate drives it; simulations and fuzzers drive it just as well.
//!
//! | module | what it is |
//! |---|---|
//! | [`ids`] | ranks, names, lives and ids of messages and references, checked where they enter |
//! | [`wire`] | the bytes: frame headers, descriptors, tensors, plain values, limits |
//! | [`handshake`] | how two workers prove to each other who they are |
//! | [`connection`] | order of sending, chunks of large messages, assembly at the receiver |
//! | [`group`] | the same over a process group, which knows ranks and no connections |
//! | [`blocks`] | memory that two workers of one host share: who has which part of it |
//! | [`in_flight`] | a caller's outstanding calls, each completed exactly once (CALL-1) |
//! | [`serving`] | the calls that a worker has accepted, waiting or running |
//! | [`store`] | keys and who waits for them, in the store where workers meet |
//! | [`rref`] | who owns, holds and shares a remote reference (RREF-1) |
//! | [`autograd`] | a backward pass over the graphs of several workers (GRAD-1) |
//! | [`termination`] | when a group is quiet and it is safe to leave (TERM-1) |
//!
//! Every state machine has the same shape: `handle_*` for what happened, `poll_*` for what to do
//! next, `next_deadline` for when to look again. `docs/wire-format.md` is the normative text.
#![forbid(unsafe_code)]

pub mod autograd;
pub mod blocks;
pub mod connection;
pub mod group;
pub mod handshake;
pub mod ids;
pub mod in_flight;
pub mod rref;
pub mod serving;
pub mod store;
pub mod termination;
pub mod wire;

pub use ids::{
    ForkId, Identity, Incarnation, InvalidName, InvalidRank, Life, MessageId, PassId, RRefId, Rank,
    WorkerName,
};
pub use wire::{Limits, WireError};
