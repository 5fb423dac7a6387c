//! [`RRef`]: a reference to a value that stays on the worker that owns it.
//!
//! A handle is cheap to clone, and its clones are one reference: when the last is dropped, the owner is
//! told. That never blocks and takes no lock, so it may happen anywhere: in a finalizer, under a lock of
//! the program's own, on the I/O thread. Who counts what is in `proto::rref`; `agent/rrefs` drives it.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use tensorcall_proto::blocks::MIN_BLOCK;
use tensorcall_proto::ids::{ForkId, Life, RRefId, WorkerName};
use tensorcall_proto::wire::message::{AutogradRef, Encoding, FailureKind};

use crate::agent::{Agent, InboundCall, Inner, Release, Responder};
use crate::body::Body;
use crate::error::{Error, ErrorKind, Result};
use crate::future::RpcFuture;

/// A reference to a value on some worker.
#[derive(Clone)]
pub struct RRef(Arc<Handle>);

/// What the clones of a reference share.
struct Handle {
    agent: Weak<Inner>,
    rref: RRefId,
    fork: ForkId,
    owner: Life,
    owner_name: Option<WorkerName>,
    role: Role,
}

/// What a reference is at the worker that holds it.
pub(crate) enum Role {
    /// The value is on another worker, or this is a copy that came back from a user.
    User,
    /// The value is in this worker's table, or will be; the handle holds the entry.
    Owner,
    /// The value was made here. It enters the table when the reference is first passed on.
    Local {
        kept: Kept,
        /// Where it comes from.
        label: Arc<str>,
        shared: AtomicBool,
    },
}

/// How a reference is doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RRefState {
    /// As it should.
    Alive,
    /// Its creation failed or timed out, or its owner is lost.
    Failed,
    /// It was deleted by [`Agent::delete_rrefs`], or the agent is closed.
    Deleted,
}

/// What an owner keeps for those who refer to it. Cheap to clone.
#[derive(Clone)]
pub enum Kept {
    /// A value; [`Handler::fetch`](crate::engine::Handler::fetch) packs it whenever it is asked for.
    Value(Arc<dyn Any + Send + Sync>),
    /// An answer that is packed already, of a function that returned or raised.
    Packed(Arc<Packed>),
    /// There is no value, for this reason.
    Failed {
        /// What went wrong, for programs.
        kind: FailureKind,
        /// What went wrong, for people.
        text: Arc<str>,
    },
}

/// An answer as it goes to whoever asks.
#[derive(Debug)]
pub struct Packed {
    /// Whether the function raised: then this is its exception.
    pub raised: bool,
    /// How the payload is encoded.
    pub encoding: Encoding,
    /// Payload, tensors and references.
    pub body: Body,
}

impl RRef {
    pub(crate) fn new(
        agent: Weak<Inner>,
        rref: RRefId,
        fork: ForkId,
        owner: Life,
        owner_name: Option<WorkerName>,
        role: Role,
    ) -> Self {
        Self(Arc::new(Handle { agent, rref, fork, owner, owner_name, role }))
    }

    /// Names the value.
    pub fn id(&self) -> RRefId {
        self.0.rref
    }

    /// Names this reference to it; the owner's own are named like the value.
    pub fn fork_id(&self) -> ForkId {
        self.0.fork
    }

    /// Which life of which worker has the value.
    pub fn owner(&self) -> Life {
        self.0.owner
    }

    /// The name of that worker; `None` if no such worker was known when the reference came.
    pub fn owner_name(&self) -> Option<&WorkerName> {
        self.0.owner_name.as_ref()
    }

    /// Whether the value is on this worker.
    pub fn is_owner(&self) -> bool {
        !matches!(self.0.role, Role::User)
    }

    /// Whether the owner knows of this reference. One that came as an argument is known before the
    /// function starts.
    pub fn confirmed(&self) -> bool {
        self.is_owner() || self.here().is_some_and(|agent| agent.is_confirmed(self))
    }

    /// Whether it can still be used.
    pub fn state(&self) -> RRefState {
        match self.here() {
            Some(agent) => agent.rref_state(self),
            None if self.is_owner() => RRefState::Alive,
            None => RRefState::Deleted,
        }
    }

    /// Looks whether it can be passed on to other workers.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::RRef`] says why it cannot.
    pub fn check(&self) -> Result<()> {
        match self.here() {
            Some(agent) => agent.check_usable(self),
            None if self.is_owner() => Ok(()),
            None => Err(self.deleted("call fork an UserRRef")),
        }
    }

    /// The value, at its owner; `None` while the function that makes it runs.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::RRef`] if this worker is not the owner or the value is gone,
    /// [`ErrorKind::ShuttingDown`] if it will not come any more because the agent is closed.
    pub fn local_value(&self) -> Result<Option<Kept>> {
        match &self.0.role {
            Role::Local { kept, .. } => Ok(Some(kept.clone())),
            Role::Owner => self.agent()?.kept(self),
            Role::User => Err(self.not_owner()),
        }
    }

    /// Completes, without a response, when [`RRef::local_value`] has something to say.
    ///
    /// # Errors
    ///
    /// As [`RRef::local_value`].
    pub fn when_local(&self) -> Result<RpcFuture> {
        match &self.0.role {
            Role::Local { .. } => Ok(done()),
            Role::Owner => Ok(self.agent()?.when_kept(self)),
            Role::User => Err(self.not_owner()),
        }
    }

    /// Asks the owner for a copy of the value. `label` names the call in errors; `timeout` `None` waits
    /// for ever. It may be asked before the value is there, and by the owner itself.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::RRef`] if the reference is deleted or its creation failed, and as [`Agent::call`].
    pub fn fetch(&self, label: &str, timeout: Option<Duration>) -> Result<RpcFuture> {
        self.fetch_in(None, label, timeout)
    }

    /// As [`RRef::fetch`], in an autograd context, if there is one.
    ///
    /// # Errors
    ///
    /// As [`RRef::fetch`].
    pub fn fetch_in(
        &self,
        autograd: Option<AutogradRef>,
        label: &str,
        timeout: Option<Duration>,
    ) -> Result<RpcFuture> {
        self.agent()?.fetch(self, label, timeout, autograd)
    }

    /// The agent that this reference belongs to, if that is still there.
    pub fn belongs_to(&self) -> Option<Agent> {
        self.here()?.agent()
    }

    pub(crate) fn is_of(&self, agent: &Weak<Inner>) -> bool {
        self.0.agent.ptr_eq(agent)
    }

    pub(crate) fn role(&self) -> &Role {
        &self.0.role
    }

    /// The agent, unless it is gone or this is a forked child of its process (FORK-1).
    fn here(&self) -> Option<Arc<Inner>> {
        self.0.agent.upgrade().filter(|agent| agent.check_home().is_ok())
    }

    fn agent(&self) -> Result<Arc<Inner>> {
        let agent = self.0.agent.upgrade().ok_or_else(|| self.deleted("call to_here() on it"))?;
        agent.check_home().map(|()| agent)
    }

    fn not_owner(&self) -> Error {
        let text = format!("{self} is not the owner of its value, worker of rank {} is", self.0.owner.rank);
        Error::new(ErrorKind::RRef, text)
    }

    /// The error of doing `what` with a reference that was deleted. Programs written for PyTorch match it.
    pub(crate) fn deleted(&self, what: &str) -> Error {
        Error::new(ErrorKind::RRef, format!("{self} has been deleted. Cannot {what} after deletion."))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let release = match &self.role {
            Role::User => Release::Fork(self.fork),
            Role::Owner => Release::Hold(self.rref),
            Role::Local { shared, .. } if shared.load(Ordering::Relaxed) => Release::Hold(self.rref),
            Role::Local { .. } => return,
        };
        if let Some(agent) = self.agent.upgrade() {
            agent.release(release);
        }
    }
}

/// As PyTorch prints them.
impl fmt::Display for RRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_owner() {
            write!(f, "OwnerRRef({})", self.0.rref)
        } else {
            write!(f, "UserRRef(RRefId = {}, ForkId = {})", self.0.rref, self.0.fork)
        }
    }
}

impl fmt::Debug for RRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl Packed {
    /// Answers with a copy.
    pub fn send(&self, responder: Responder) {
        let answer = if self.raised { Responder::raised } else { Responder::returned };
        answer(responder, self.encoding, self.body.clone());
    }

    /// Whether sending it may take a while: large buffers are copied then (ADR 23).
    pub(crate) fn is_large(&self) -> bool {
        self.body.buffers.iter().any(|region| region.len() as u64 >= MIN_BLOCK)
    }

    /// Whether the caller cannot read it.
    pub(crate) fn is_foreign_to(&self, call: &InboundCall) -> bool {
        call.plain && self.encoding != Encoding::Value
    }
}

impl Kept {
    /// Something went wrong that is no exception of a function.
    pub(crate) fn failed(kind: FailureKind, text: &str) -> Self {
        Self::Failed { kind, text: text.into() }
    }

    /// An answer to keep.
    pub(crate) fn packed(raised: bool, encoding: Encoding, body: Body) -> Self {
        Self::Packed(Arc::new(Packed { raised, encoding, body }))
    }
}

impl fmt::Debug for Kept {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Value(_) => f.write_str("Value(..)"),
            Self::Packed(packed) => packed.fmt(f),
            Self::Failed { kind, text } => write!(f, "Failed({kind:?}, {text})"),
        }
    }
}

fn done() -> RpcFuture {
    let (promise, future) = crate::future::promise();
    promise.complete_empty();
    future
}
