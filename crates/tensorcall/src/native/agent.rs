//! [`Agent`]: a worker, and the calls that it makes.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use tensorcall_proto::ids::{Rank, WorkerName};
use tensorcall_proto::wire::Limits;
use tensorcall_proto::wire::Value as WireValue;
use tensorcall_proto::wire::message::{AutogradRef, Encoding, FunctionRef};
use tensorcall_proto::wire::tensor::TensorDesc;

use super::args::Arguments;
use super::builder::AgentBuilder;
use super::convert::FromValue;
use super::future::{Call, RpcFuture};
use super::message;
use super::rref::RRef;
use crate::agent::{Agent as EngineAgent, CallError, Request, lend};
use crate::autograd::{Contexts, Outgoing, Slot};
use crate::clock::now;
use crate::error::{Error, Result};
use crate::future::RpcFuture as EngineFuture;
use crate::gather::Gatherings;
use crate::membership::{Member, Roster};
use crate::rendezvous::Rendezvous;

/// A worker of a job: it calls functions of the others, and runs those that it has for them.
///
/// Cheap to clone. [`Agent::builder`] makes one; [`shutdown`](Self::shutdown) ends it in good order, and
/// dropping the last clone without that ends it at once.
///
/// Methods that block lend the place of a function that calls them to others meanwhile, so that calls may
/// nest as deep as they like. Dropping what a call returns cancels it.
#[derive(Clone)]
pub struct Agent {
    engine: EngineAgent,
    shared: Arc<Shared>,
    membership: Option<Arc<Membership>>,
}

/// What a worker keeps that met others.
pub(crate) struct Membership {
    member: Member,
    /// Others meet here as long as it is kept, if this worker hosts the store.
    _rendezvous: Arc<Rendezvous>,
}

/// What an agent, its functions and its references have in common.
#[derive(Default, Clone)]
pub(crate) struct Shared {
    pub(super) name: Arc<str>,
    /// How long calls may take; `None` is for ever.
    pub(super) timeout: Option<Duration>,
    pub(super) limits: Limits,
    pub(super) gatherings: Arc<Gatherings>,
    pub(super) roster: Arc<Roster>,
    /// Only handles keep it, for it keeps the agent.
    pub(super) membership: Arc<OnceLock<Weak<Membership>>>,
    /// Of a worker that takes part in backward passes.
    pub(super) contexts: Option<Arc<Contexts>>,
}

impl Shared {
    /// The tensors of a message that are in the graph of an autograd context, by their places.
    pub(super) fn slots(&self, mark: Option<AutogradRef>, tensors: &[TensorDesc]) -> HashMap<u32, Arc<Slot>> {
        let (Some(mark @ AutogradRef { message: Some(_), .. }), Some(contexts)) = (mark, &self.contexts)
        else {
            return HashMap::new();
        };
        let recorded = (0..).zip(tensors).filter(|(_, tensor)| tensor.requires_grad);
        let slots: Vec<(u32, Arc<Slot>)> =
            recorded.map(|(place, desc)| (place, contexts.slot(desc))).collect();
        if contexts.received(mark, slots.iter().map(|(_, slot)| Arc::clone(slot)).collect()) {
            slots.into_iter().collect()
        } else {
            HashMap::new()
        }
    }
}

/// A worker of the group.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct WorkerInfo {
    /// Its name.
    pub name: String,
    /// Its rank.
    pub rank: u32,
}

impl Agent {
    /// Begins to build the agent of worker `name`: 1 to 127 letters, digits, `-`, `_` or `:`.
    pub fn builder(name: impl Into<String>) -> AgentBuilder {
        AgentBuilder::new(name.into())
    }

    pub(super) fn new(engine: EngineAgent, shared: Arc<Shared>) -> Self {
        if let Some(contexts) = &shared.contexts {
            contexts.join(&engine);
        }
        let membership = shared.membership.get().and_then(Weak::upgrade);
        Self { engine, shared, membership }
    }

    /// The agent of a worker that has met others.
    pub(super) fn member(member: Member, shared: Arc<Shared>, rendezvous: Arc<Rendezvous>) -> Self {
        let engine = member.agent().clone();
        let membership = Arc::new(Membership { member, _rendezvous: rendezvous });
        let _ = shared.membership.set(Arc::downgrade(&membership));
        if let Some(contexts) = &shared.contexts {
            contexts.join(&engine);
        }
        Self { engine, shared, membership: Some(membership) }
    }

    pub(super) fn engine(&self) -> &EngineAgent {
        &self.engine
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// The autograd contexts of this worker.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) if it takes no part in backward passes.
    pub(crate) fn contexts(&self) -> Result<&Arc<Contexts>> {
        let missing = || {
            let name = self.name();
            Error::usage(format!("worker '{name}' takes no part in backward passes: build it with candle()"))
        };
        self.shared.contexts.as_ref().ok_or_else(missing)
    }

    /// How many autograd contexts there are on this worker: those that it began, and those that calls have
    /// brought here.
    #[cfg(feature = "candle")]
    pub fn autograd_contexts(&self) -> usize {
        self.shared.contexts.as_ref().map_or(0, |contexts| contexts.len())
    }

    /// This worker's name.
    pub fn name(&self) -> &str {
        self.engine.identity().name.as_str()
    }

    /// This worker's rank.
    pub fn rank(&self) -> u32 {
        self.engine.identity().rank.get().into()
    }

    /// The workers of the group, this one included, by rank. In a group that is fixed, those that are gone too.
    pub fn workers(&self) -> Vec<WorkerInfo> {
        let info = |(name, rank): (WorkerName, Rank)| WorkerInfo {
            name: name.as_str().to_owned(),
            rank: rank.get().into(),
        };
        let dynamic = self.membership.as_deref().is_some_and(|membership| membership.member.is_dynamic());
        let workers = if dynamic { self.shared.roster.workers() } else { self.engine.workers() };
        workers.into_iter().map(info).collect()
    }

    /// The same agent, whose calls may take this long, retries of reaching a worker included. Zero means
    /// without limit.
    ///
    /// ```no_run
    /// # use std::time::Duration;
    /// # fn example(agent: &tensorcall::Agent) -> tensorcall::Result<()> {
    /// let answer: u64 = agent.with_timeout(Duration::from_secs(1)).call_blocking("worker1", "answer", ())?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn with_timeout(&self, timeout: Duration) -> Self {
        let shared = Shared { timeout: limited(timeout), ..Shared::clone(&self.shared) };
        let membership = self.membership.clone();
        Self { engine: self.engine.clone(), shared: Arc::new(shared), membership }
    }

    /// Calls a function of worker `to`: it runs there at once, whatever becomes of this thread.
    ///
    /// What goes wrong comes through the future, also that there is no such worker. If 65 536 calls or 4 GiB
    /// to that worker are unanswered, this blocks until there is room.
    pub fn call<R: FromValue>(&self, to: &str, function: &str, arguments: impl Arguments) -> RpcFuture<R> {
        RpcFuture::new(self.find(to).and_then(|(worker, rank)| self.begin(worker, rank, function, arguments)))
    }

    /// Calls a function of worker `to` and waits for its result.
    ///
    /// # Errors
    ///
    /// What became of the call, by [`kind`](Error::kind): among others
    /// [`Raised`](crate::ErrorKind::Raised) if the function failed, [`Timeout`](crate::ErrorKind::Timeout),
    /// [`PeerLost`](crate::ErrorKind::PeerLost), and [`Usage`](crate::ErrorKind::Usage) if there is no such
    /// worker or function, or if it takes other arguments.
    pub fn call_blocking<R: FromValue>(
        &self,
        to: &str,
        function: &str,
        arguments: impl Arguments,
    ) -> Result<R> {
        self.call(to, function, arguments).wait()
    }

    /// Calls a function of worker `to` whose result stays there, and returns at once with a reference to that
    /// result. If the function fails, so does every [fetch](RRef::fetch).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) if there is no such worker, and whatever keeps the call
    /// from being made.
    pub fn remote<T>(&self, to: &str, function: &str, arguments: impl Arguments) -> Result<RRef<T>> {
        let (worker, rank) = self.find(to)?;
        let (mut request, outgoing) = self.request(rank, function, arguments)?;
        let rref = self.engine.new_rref(rank)?;
        request.creates = Some(rref.clone());
        let (future, call) = self.send(worker, rank, request, outgoing)?;
        call.let_go(&future);
        Ok(RRef::new(rref, Arc::clone(&self.shared)))
    }

    /// Waits until nothing is under way in the whole group: until every live worker has called this, and every
    /// call made before, or because of one made before, is answered. Zero means without limit.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout), naming those who were waited for.
    pub fn sync(&self, timeout: Duration) -> Result<()> {
        lend(None, || self.engine.sync(until(limited(timeout))))
    }

    /// As [`sync`](Self::sync), for a worker that makes no further calls of its own and [closes](Self::close)
    /// next. [`shutdown`](Self::shutdown) does both, and gives back references before that.
    ///
    /// # Errors
    ///
    /// As [`sync`](Self::sync).
    pub fn join(&self, timeout: Duration) -> Result<()> {
        lend(None, || self.engine.join(until(limited(timeout))))
    }

    /// Leaves together with all others: returns when every live worker has called this and nothing is under
    /// way anywhere, so that no call is lost. Until then this worker answers calls.
    ///
    /// # Errors
    ///
    /// As [`shutdown_timeout`](Self::shutdown_timeout), without the limit.
    pub fn shutdown(&self) -> Result<()> {
        self.shutdown_timeout(Duration::ZERO)
    }

    /// As [`shutdown`](Self::shutdown), for at most this long.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) if the others, which the error names, did not follow in
    /// time. The agent is closed all the same.
    pub fn shutdown_timeout(&self, timeout: Duration) -> Result<()> {
        let timeout = limited(timeout);
        let limit = until(timeout);
        let left = lend(None, || self.leave(timeout, limit));
        self.engine.close(left.is_ok(), now() + LAST_WORDS);
        left
    }

    fn leave(&self, timeout: Option<Duration>, limit: Option<Instant>) -> Result<()> {
        if let Some(Membership { member, .. }) = self.membership.as_deref()
            && member.is_dynamic()
        {
            return self.leave_alone(member, timeout, limit);
        }
        let names: BTreeSet<_> = self.engine.workers().into_iter().map(|(name, _)| name).collect();
        self.shared.gatherings.gather(&self.engine, &names, WireValue::Nil, timeout)?;
        self.delete_rrefs(limit, true);
        self.engine.quiesce(true, limit)
    }

    /// Leaves a group that goes on without this worker.
    fn leave_alone(&self, member: &Member, timeout: Option<Duration>, limit: Option<Instant>) -> Result<()> {
        self.delete_rrefs(limit, false);
        member.leave(timeout.unwrap_or(Duration::ZERO));
        self.engine.quiesce(true, limit)
    }

    /// Gives back all references of this worker and, with `others`, waits for those to its values.
    fn delete_rrefs(&self, limit: Option<Instant>, others: bool) {
        let deleting = now() + DELETING_LIMIT;
        let limit = Some(limit.map_or(deleting, |limit| limit.min(deleting)));
        self.engine.rrefs_settled(limit);
        self.engine.delete_all_rrefs();
        if !self.engine.rrefs_gone(others, limit) {
            tracing::warn!(worker = self.name(), "references were not all deleted in time");
        }
    }

    /// Ends this worker at once: its calls fail, and the others see it leave. Doing it again is harmless.
    pub fn close(&self) {
        self.engine.close(false, now() + LAST_WORDS);
    }

    /// Whether the agent was shut down or closed.
    pub fn is_closed(&self) -> bool {
        self.engine.is_closed()
    }

    fn find(&self, name: &str) -> Result<(WorkerName, Rank)> {
        self.engine.find(name).ok_or_else(|| {
            Error::usage(format!("there is no worker '{name}' in the group of '{}'", self.name()))
        })
    }

    /// Makes a call.
    pub(super) fn begin(
        &self,
        worker: WorkerName,
        rank: Rank,
        function: &str,
        arguments: impl Arguments,
    ) -> Result<(EngineFuture, Call)> {
        let (request, outgoing) = self.request(rank, function, arguments)?;
        self.send(worker, rank, request, outgoing)
    }

    /// The call of a function, and its part in the autograd context that is open.
    fn request(
        &self,
        to: Rank,
        function: &str,
        arguments: impl Arguments,
    ) -> Result<(Request, Option<Outgoing>)> {
        let about = |error: Error| error.about(&format!("call of '{function}'"));
        let arguments = arguments.into_values().map_err(|error| about(error.into()))?;
        let (mut body, graphs) = message::pack_arguments(&arguments, &self.shared.limits).map_err(about)?;
        let outgoing = match &self.shared.contexts {
            Some(contexts) => contexts.request(to, graphs)?,
            None => None,
        };
        body.autograd = outgoing.as_ref().map(Outgoing::mark);
        let label: Arc<str> = function.into();
        let request = Request {
            function: FunctionRef::Name(Arc::clone(&label)),
            label,
            encoding: Encoding::Value,
            body,
            timeout: self.shared.timeout,
            deadline: None,
            creates: None,
        };
        Ok((request, outgoing))
    }

    /// Sends a request, waiting for room if too much is under way to that worker.
    fn send(
        &self,
        worker: WorkerName,
        to: Rank,
        request: Request,
        outgoing: Option<Outgoing>,
    ) -> Result<(EngineFuture, Call)> {
        let function = Arc::clone(&request.label);
        let future = match self.engine.try_call(to, request) {
            Ok(future) => future,
            Err(CallError::Failed(error)) => return Err(error),
            Err(CallError::Full(request)) => lend(Some(&worker), || self.engine.call(to, *request))?,
        };
        let (agent, shared) = (self.engine.weak(), Arc::clone(&self.shared));
        Ok((future, Call { agent, shared, to, worker, function, outgoing }))
    }
}

impl fmt::Debug for Agent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Agent")
            .field("name", &self.name())
            .field("rank", &self.rank())
            .finish_non_exhaustive()
    }
}

/// A timeout of zero is none.
pub(super) fn limited(timeout: Duration) -> Option<Duration> {
    (!timeout.is_zero()).then_some(timeout)
}

fn until(timeout: Option<Duration>) -> Option<Instant> {
    timeout.map(|timeout| now() + timeout)
}

/// How long what was sent last may take to get out.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// How long references of others are waited for that keep values of this worker.
const DELETING_LIMIT: Duration = Duration::from_secs(100);
