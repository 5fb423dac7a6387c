//! How the workers of a job become a group: who is there, where, and with which secret.
//!
//! [`join`] does what the Python package does, with the same keys and texts in the store, so that workers of both
//! languages are in one group, whichever of them is rank 0 and hosts the store:
//!
//! - `meeting.rs`: a static group, whose size is given; rank 0 collects the entries of all and tells them
//! - `dynamic.rs`: a group that workers join and leave one after the other, each in its turn
//! - `secret.rs`: which job it is, and its secret
//! - `devices.rs`: what workers say of their devices, which those in Rust do not have
//! - `roster.rs`: the workers that can be named
//!
//! Keys carry the run and the restart of torchrun where it set them, since its store outlives a restart; and how
//! often this worker has joined a group at that place, so that one group after another may meet there. The job's
//! secret is the configuration's, or that of `TENSORCALL_SECRET` or `TENSORCALL_SECRET_FILE`, or else a random one
//! that the first worker leaves in the store. Every wait has the limit for calls, but 5 s at least, and its error
//! names the ranks that did not come.

mod devices;
mod dynamic;
mod meeting;
mod roster;
mod secret;

pub use roster::Roster;

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::agent::{Agent, Handler, PeerInfo};
use crate::clock::now;
use crate::config::{self, AgentConfig};
use crate::error::{Error, ErrorKind, Result};
use crate::rendezvous::{self, Rendezvous};
use crate::store::{PrefixStore, Store, StoreError};

/// Starts an agent: [`Agent::start`], or for instance [`Agent::start_in_memory`].
pub type Start<'a> = &'a dyn Fn(AgentConfig, Arc<dyn Handler>) -> Result<Agent>;

/// What a worker brings to [`join`].
pub struct Joining<'a> {
    /// Its name, and how its agent behaves. Rank, job, secret and where to listen come from the rendezvous; a secret
    /// that is there already counts.
    pub config: AgentConfig,
    /// Runs the functions that others call. It passes all calls through [`Roster::handle`] first.
    pub handler: Arc<dyn Handler>,
    /// The workers that can be named, an empty one that `handler` has as well.
    pub roster: Arc<Roster>,
    /// The limit for calls, and so for joining; [`Duration::ZERO`] is none.
    pub timeout: Duration,
    /// What starts the agent.
    pub start: Start<'a>,
}

/// A worker that is in a group.
#[derive(Debug)]
pub struct Member {
    agent: Agent,
    roster: Arc<Roster>,
    timeout: Duration,
    /// Where a dynamic group has its list.
    list: Option<PrefixStore>,
}

/// Meets the other workers and starts this one's agent. Returns when every worker of a static group serves, or when
/// every member of a dynamic one can call this one.
///
/// # Errors
///
/// [`ErrorKind::Usage`] if a name or rank is not unique, sizes or secrets differ, or something is left in the store
/// from an earlier job; [`ErrorKind::Timeout`] if somebody did not come; [`ErrorKind::Io`] if the store is lost. The
/// other workers of a static group are told the same. There is no agent then.
pub fn join(rendezvous: &Rendezvous, joining: Joining<'_>) -> Result<Member> {
    let (name, rank) = (joining.config.name.clone(), rendezvous.checked_rank());
    let joined = match rendezvous.world_size() {
        Some(size) => meeting::join(rendezvous, joining, size),
        None => dynamic::join(rendezvous, joining),
    };
    joined.map_err(|failure| match failure {
        Failure::Told(error) => error,
        Failure::Store(error) => {
            let text =
                format!("worker '{name}' (rank {rank}) lost the store in which the workers meet: {error}");
            Error::new(Error::from(error).kind(), text)
        }
    })
}

impl Member {
    /// The agent, which serves.
    pub fn agent(&self) -> &Agent {
        &self.agent
    }

    /// The workers that can be named.
    pub fn roster(&self) -> &Arc<Roster> {
        &self.roster
    }

    /// Whether workers join and leave this group at run time.
    pub fn is_dynamic(&self) -> bool {
        self.list.is_some()
    }

    /// Strikes this worker off a dynamic group's list and tells the others that it leaves, as it should before
    /// it ends its agent. If the store is gone, the others are told all the same. In a static group nothing
    /// happens. `timeout` is for the wait until it is this worker's turn; [`Duration::ZERO`] means the limit for
    /// calls.
    pub fn leave(&self, timeout: Duration) {
        if let Some(list) = &self.list {
            let limit = if timeout.is_zero() { self.timeout.max(rendezvous::MIN_PATIENCE) } else { timeout };
            dynamic::leave(self, list, Deadline::after(Some(limit)));
        }
    }
}

/// Why a worker did not join.
enum Failure {
    Told(Error),
    Store(StoreError),
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Self::Told(error)
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

/// A point in time that several waits share.
#[derive(Debug, Clone, Copy)]
struct Deadline {
    after: Duration,
    end: Option<Instant>,
}

impl Deadline {
    fn after(limit: Option<Duration>) -> Self {
        Self { after: limit.unwrap_or_default(), end: limit.map(|limit| now() + limit) }
    }

    /// The limit for meeting, given the limit for calls.
    fn of_rendezvous(timeout: Duration) -> Self {
        Self::after(rendezvous::patience(timeout))
    }

    fn is_over(self) -> bool {
        self.end.is_some_and(|end| now() >= end)
    }
}

/// The limit in seconds.
impl std::fmt::Display for Deadline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.after.as_secs_f64())
    }
}

/// An agent that is closed unless its worker becomes a member.
struct Candidate(Option<Agent>);

impl Candidate {
    fn agent(&self) -> Result<&Agent> {
        self.0.as_ref().ok_or_else(Error::shutting_down)
    }

    fn accept(mut self) -> Result<Agent> {
        self.0.take().ok_or_else(Error::shutting_down)
    }
}

impl Drop for Candidate {
    fn drop(&mut self) {
        if let Some(agent) = self.0.take() {
            agent.close(false, now());
        }
    }
}

/// Where a group has its keys in `store`.
fn keys_of(store: Arc<dyn Store>) -> PrefixStore {
    let variable = |name| config::variable(name).unwrap_or_default();
    let (run, restart) = (variable("TORCHELASTIC_RUN_ID"), variable("TORCHELASTIC_RESTART_COUNT"));
    PrefixStore::new(format!("tensorcall/{run}/{restart}"), store)
}

/// The part of the store for the groups that meet there, each in its turn.
fn next_group(rendezvous: &Rendezvous) -> PrefixStore {
    PrefixStore::new(format!("rpc_prefix_{}", rendezvous.next_group()), Arc::clone(rendezvous.store()))
}

/// What a member left in the store.
fn read_json<'de, T: serde::Deserialize<'de>>(key: &str, text: &'de [u8]) -> Result<T> {
    serde_json::from_slice(text).map_err(|error| {
        let text = format!("the store has something under {key:?} that no worker leaves there: {error}");
        Error::new(ErrorKind::Protocol, text)
    })
}

/// What this worker leaves in the store.
fn write_json(value: &impl serde::Serialize) -> Result<String> {
    serde_json::to_string(value).map_err(|error| Error::usage(error.to_string()))
}

/// What others know of this agent.
fn own_info(agent: &Agent) -> Result<PeerInfo> {
    let me = agent.identity();
    PeerInfo::from_contact(me.name.clone(), me.rank, &agent.contact())
}
