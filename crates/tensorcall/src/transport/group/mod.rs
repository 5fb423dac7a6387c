//! Messages over a process group: whatever a collective library runs on, calls run on.
//!
//! A [`ProcessGroup`] is what is needed of such a library, gloo or MPI for example: bytes from rank to rank,
//! with tags, in blocking calls. The transport makes these calls on threads of its own and opens no socket.
//! The protocol is [`tensorcall_proto::group`]'s.
//!
//! - `mod.rs`: the trait, and the transport's handle
//! - `driver.rs`: the threads' work: sending and receiving
//! - `links.rs`: opening and ending links, and what happens on them
//! - `peer.rs`: another rank, and one link with it
//! - `threads.rs`: threads that grow in number with what blocks
//! - `memory.rs`: a group within one process, for tests
//!
//! *No thread waits for another.* A rank that receives nothing holds up those who send to it and nobody
//! else: every rank has a sending thread of its own while there is something to send, and every piece has a
//! thread. Receiving threads never send.
//!
//! *Ending.* Agents that end tell each other, so that nothing is on its way when the group is aborted, but
//! wait for no answer longer than their limit. [`ProcessGroup::abort`] then ends every blocking call,
//! whether peers are there or not.

mod driver;
mod links;
mod memory;
mod peer;
mod threads;

use std::fmt;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tensorcall_proto::ids::Identity;
use tensorcall_proto::wire::limits::Limits;

use self::driver::Shared;
pub use self::memory::{Fabric, MemoryGroup};
use super::proving::Credentials;
use super::{Address, Events, Link, LinkId, Transport};
use crate::buffer::{BufferPool, Region, Target};

/// How long the end of the threads is waited for, after [`ProcessGroup::abort`].
const THREADS_END: Duration = Duration::from_secs(2);

/// Ranks that can send bytes to each other.
///
/// The transport calls from several threads at once, but never sends twice at once to one rank with one tag,
/// nor receives so. What is sent from one rank to another with one tag arrives in order. Tags are from 1 to
/// 16,385. The group is the transport's alone: nobody else sends on it.
pub trait ProcessGroup: Send + Sync + fmt::Debug {
    /// This process's rank.
    fn rank(&self) -> u32;

    /// How many ranks there are.
    fn size(&self) -> u32;

    /// Whether [`receive`](Self::receive) can be called for whoever sends first. If not, it is called on a
    /// thread for each rank.
    fn receives_from_any(&self) -> bool {
        true
    }

    /// Sends `bytes` to rank `to`; returns when their memory is not needed any more.
    ///
    /// # Errors
    ///
    /// The rank is lost, or the group was [aborted](Self::abort).
    fn send(&self, to: u32, tag: u32, bytes: &Region) -> Result<(), GroupError>;

    /// Receives what rank `from`, or any rank, sends with `tag`; returns who it was. It may be shorter than
    /// `target`, but never is longer.
    ///
    /// # Errors
    ///
    /// That rank is lost, or the group was [aborted](Self::abort). An error that is about any rank means
    /// that the whole group is lost.
    fn receive(&self, from: Option<u32>, tag: u32, target: Target) -> Result<u32, GroupError>;

    /// Gives every rank the bytes of all ranks, in order. All ranks call it.
    ///
    /// # Errors
    ///
    /// Not all did before `limit`, or the group was [aborted](Self::abort).
    fn all_gather(&self, bytes: &[u8], limit: Instant) -> Result<Vec<Vec<u8>>, GroupError>;

    /// Returns when all ranks have called it.
    ///
    /// # Errors
    ///
    /// Not all did before `limit`, or the group was [aborted](Self::abort).
    fn barrier(&self, limit: Instant) -> Result<(), GroupError>;

    /// Makes all calls that wait fail within a moment, and all later ones. No peer has to do anything for
    /// that.
    fn abort(&self);

    /// Runs a thread of the transport, from its start to its end.
    fn run_thread(&self, body: &mut (dyn FnMut() + Send)) {
        body();
    }
}

/// Why a call of a [`ProcessGroup`] failed, for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct GroupError(pub String);

/// A worker's transport over a process group.
#[derive(Debug)]
pub(crate) struct GroupTransport(Arc<Shared>);

impl GroupTransport {
    /// Starts to receive. At most `window` pieces of large tensors are on their way to one rank at once.
    pub(crate) fn start(
        group: Arc<dyn ProcessGroup>,
        events: Weak<dyn Events>,
        credentials: Credentials,
        window: usize,
        limits: Limits,
        pool: Arc<BufferPool>,
    ) -> Self {
        let shared = Shared::new(group, events, credentials, window, limits, pool);
        shared.start_receiving();
        Self(shared)
    }

    /// The group itself.
    pub(crate) fn group(&self) -> &Arc<dyn ProcessGroup> {
        &self.0.group
    }
}

impl Transport for GroupTransport {
    fn addresses(&self) -> Vec<Address> {
        vec![Address::Group(self.0.group.rank())]
    }

    fn reaches(&self, _peer: &Identity, address: &Address) -> bool {
        matches!(address, Address::Group(rank) if self.0.peer(*rank).is_some())
    }

    fn connect(&self, link: LinkId, peer: &Identity, candidates: Vec<Address>) -> Arc<dyn Link> {
        let rank = candidates.iter().find_map(|address| match address {
            Address::Group(rank) => Some(*rank),
            _ => None,
        });
        self.0.connect(link, peer, rank.unwrap_or(u32::MAX))
    }

    fn stop(&self, limit: Instant) {
        if !self.0.say_goodbye(limit) {
            return;
        }
        self.0.group.abort();
        self.0.end_all();
        if !self.0.threads.wait_ended(crate::clock::now() + THREADS_END) {
            tracing::error!("the process group does not end calls after it was aborted; its threads stay");
        }
    }
}
