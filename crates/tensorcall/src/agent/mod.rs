//! The agent: one worker's end of every call.
//!
//! - `mod.rs`: the public handle
//! - `calls.rs`: making a call, and the way to a peer
//! - `members.rs`: the workers of the group
//! - `peers.rs`: one of them: the way to it, and what is under way with it
//! - `cancels.rs`: who is told of a cancelled request
//! - `dispatch.rs`: from an event of a transport to what happens
//! - `faults.rs`: what tests let happen to messages on their way out
//! - `pool.rs`: threads that run functions
//! - `serve.rs`: a request on its way through the pool and back
//! - `autograd.rs`: backward passes, with the local engine
//! - `desk.rs`: what the thread that waits for a pass does for it
//! - `rrefs/`: references: who owns, holds and shares what, and requests that wait for them
//! - `shutdown.rs`: agreeing that the group is quiet, and closing
//!
//! Locks are held for moments and never while calling out (LOCK-1). The order, where two are held, is
//! a peer's state before the table of links or that of references.

mod autograd;
mod burst;
mod calls;
mod cancels;
mod desk;
mod dispatch;
mod faults;
mod members;
mod peers;
mod pool;
mod rrefs;
mod serve;
mod shutdown;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use tensorcall_proto::blocks::Terms;
use tensorcall_proto::ids::{Identity, Incarnation, MessageId, Rank, WorkerName};
use tensorcall_proto::in_flight::Window;
use tensorcall_proto::serving::Serving;
use tensorcall_proto::wire::message::{Message, Phase};

use self::autograd::Backward;
pub use self::calls::{CallError, Request};
use self::cancels::Cancels;
pub use self::desk::Desk;
use self::faults::FaultLine;
pub use self::faults::{Fault, Faults};
use self::members::{Admitted, GroupKind, Members};
use self::peers::Peer;
pub use self::peers::PeerInfo;
pub use self::pool::ThreadHook;
use self::pool::{Pool, PoolConfig};
use self::rrefs::RRefs;
pub(crate) use self::rrefs::Release;
pub use self::rrefs::{Leak, RRefCounts};
pub use self::serve::{Handler, InboundCall, Responder};
pub(crate) use self::serve::{Spawner, Watch};
use self::shutdown::Group;
use crate::buffer::BufferPool;
use crate::clock::now;
use crate::config::AgentConfig;
use crate::errands::Errands;
use crate::error::{Error, ErrorKind, Result};
use crate::fork::Home;
use crate::future::RpcFuture;
use crate::sync::Mutex;
use crate::transport::alarm::Alarm;
use crate::transport::group::{GroupTransport, ProcessGroup};
use crate::transport::memory::{Hub, MemoryTransport};
use crate::transport::proving::Credentials;
use crate::transport::reactor::Reactor;
use crate::transport::{Events, Link, LinkId, Outbound, Transport, socket};

/// A worker's agent. Cheap to clone; [`Agent::close`] ends it, and so does dropping the last clone.
#[derive(Clone)]
pub struct Agent {
    /// Before `inner`, which must still be there when the last clone's end comes.
    _end: Arc<EndOnDrop>,
    inner: Arc<Inner>,
}

struct EndOnDrop(Weak<Inner>);

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        let Some(inner) = self.0.upgrade() else { return };
        if inner.home.is_here() {
            inner.close(false, now());
        } else {
            // Its locks, threads and descriptors are not ours to end: it stays as it is (FORK-1).
            std::mem::forget(inner);
        }
    }
}

/// Numbers about an agent.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Metrics {
    /// Functions that may be at work at once.
    pub thread_pool_size: usize,
    /// Pool threads that have nothing to do.
    pub idle_threads: usize,
    /// Pool threads that exist.
    pub threads: usize,
    /// Calls made here that have no outcome yet.
    pub client_active_calls: usize,
    /// Requests of others that wait or run here.
    pub server_active_calls: usize,
    /// Calls ever made here.
    pub calls_sent: u64,
    /// Requests ever taken in here.
    pub calls_received: u64,
    /// Answers that came too late.
    pub late_replies: u64,
}

pub(crate) struct Inner {
    /// This very object, for requests that outlive a borrow.
    this: Weak<Self>,
    home: Home,
    /// What the handles of this agent have in common.
    end: OnceLock<Weak<EndOnDrop>>,
    me: Identity,
    config: AgentConfig,
    handler: Arc<dyn Handler>,
    pool: Pool,
    members: OnceLock<Members>,
    links: Mutex<FxHashMap<LinkId, LinkEntry>>,
    next_link: AtomicU64,
    serving: Mutex<Serving<()>>,
    cancels: Cancels,
    /// When slow requests are looked for next; `None` while there are no requests.
    look_at: Mutex<Option<Instant>>,
    rrefs: RRefs,
    backward: Backward,
    group: Group,
    transports: OnceLock<Transports>,
    /// When [`Events::tick`] has something to do.
    alarm: Arc<Alarm>,
    /// Outcomes that are being handed to their futures: part of what a wave counts.
    completing: AtomicU64,
    errands: Arc<Errands>,
    /// Only in tests.
    fault_line: Option<FaultLine>,
    /// No more calls are made or taken.
    closed: AtomicBool,
}

struct Transports {
    memory: MemoryTransport,
    group: Option<GroupTransport>,
    reactor: Reactor,
}

/// What a link is to the agent.
#[derive(Clone)]
enum LinkEntry {
    /// We call on it.
    Outgoing(Arc<Peer>),
    /// The peer calls on it.
    Accepted(Identity, Arc<dyn Link>),
}

impl Agent {
    /// Starts an agent: it listens and accepts connections, but runs nothing before [`Agent::open`].
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Io`] if it cannot listen or start its thread, [`ErrorKind::Usage`] for an address
    /// that this host does not have, or without a secret.
    pub fn start(config: AgentConfig, handler: Arc<dyn Handler>) -> Result<Self> {
        if config.secret.is_empty() {
            return Err(Error::usage(
                "an agent that others can reach needs a secret, which must not be empty",
            ));
        }
        let incarnation = Incarnation::new(random()?);
        let name = format!("tensorcall-{:016x}-{}", incarnation.get(), config.rank);
        let ip = config.listening()?.ip;
        let mut listeners = vec![socket::listen_tcp((ip, 0).into())?];
        if !config.tcp_only {
            listeners.insert(0, socket::listen_unix(&name)?);
        }
        Self::start_with(config, handler, incarnation, &Hub::new(), listeners, None)
    }

    /// Starts an agent that can be reached through `hub` alone. Many such agents live in one process.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Io`] if it cannot start its thread.
    pub fn start_in_memory(config: AgentConfig, handler: Arc<dyn Handler>, hub: &Arc<Hub>) -> Result<Self> {
        Self::start_with(config, handler, Incarnation::new(random()?), hub, Vec::new(), None)
    }

    /// Starts an agent that can be reached through `group` alone, and listens nowhere. Nobody else may use
    /// that group. Whoever is in it is of the job, so the secret may be empty.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`] if the ranks in `config` and `group` differ, [`ErrorKind::Io`] if it cannot
    /// start its thread.
    pub fn start_over_group(
        config: AgentConfig,
        handler: Arc<dyn Handler>,
        group: Arc<dyn ProcessGroup>,
    ) -> Result<Self> {
        if u32::from(config.rank.get()) != group.rank() {
            let (rank, other) = (config.rank, group.rank());
            return Err(Error::usage(format!(
                "the worker's rank is {rank}, but {other} in its process group"
            )));
        }
        let incarnation = Incarnation::new(random()?);
        Self::start_with(config, handler, incarnation, &Hub::new(), Vec::new(), Some(group))
    }

    /// Tells the other workers of the process group who this is, learns who they are, and opens this agent.
    /// All of them call it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`] if the agent has no process group or names repeat, [`ErrorKind::Timeout`] if
    /// not all come within `limit`.
    pub fn meet(&self, limit: Duration) -> Result<()> {
        self.inner.check_home()?;
        let transports = self.inner.transports.get();
        let Some(group) = transports.and_then(|transports| transports.group.as_ref()) else {
            return Err(Error::usage("the agent was not started over a process group"));
        };
        let (name, contact) = (self.identity().name.as_str(), self.contact());
        let text = serde_json::to_string(&(name, contact)).unwrap_or_default();
        let texts = group.group().all_gather(text.as_bytes(), now() + limit);
        let texts = texts.map_err(|error| {
            let text = format!("the workers of the process group did not all say who they are: {error}");
            Error::new(ErrorKind::Timeout, text)
        })?;
        let read = |(rank, text): (u32, Vec<u8>)| {
            let unreadable = |why: &dyn std::fmt::Display| {
                Error::usage(format!(
                    "what rank {rank} of the process group says of itself is invalid: {why}"
                ))
            };
            let (name, contact): (String, String) =
                serde_json::from_slice(&text).map_err(|error| unreadable(&error))?;
            let name = WorkerName::parse(&name).map_err(|error| unreadable(&error))?;
            let rank = Rank::new(rank).ok_or_else(|| unreadable(&"there is no such rank"))?;
            PeerInfo::from_contact(name, rank, &contact)
        };
        self.open((0..).zip(texts).map(read).collect::<Result<_>>()?)
    }

    fn start_with(
        config: AgentConfig,
        handler: Arc<dyn Handler>,
        incarnation: Incarnation,
        hub: &Arc<Hub>,
        listeners: Vec<socket::ListenSocket>,
        group: Option<Arc<dyn ProcessGroup>>,
    ) -> Result<Self> {
        config.check()?;
        let me = Identity { name: config.name.clone(), rank: config.rank, incarnation };
        let buffers = BufferPool::new(config.max_idle_memory);
        let pool = Pool::new(PoolConfig {
            places: config.num_worker_threads.get(),
            max_threads: config.max_threads.max(1),
            busy_poll: config.busy_poll,
            hook: Arc::clone(&handler) as Arc<dyn ThreadHook>,
        });
        let credentials =
            Credentials { me: me.clone(), job: config.job.clone(), secret: config.secret.clone() };
        let limits = config.limits;
        let alarm = Arc::new(Alarm::new(now()));
        let fault_line = config.faults.clone().map(FaultLine::new);
        let inner = Arc::new_cyclic(|this| Inner {
            this: this.clone(),
            home: Home::here(),
            end: OnceLock::new(),
            me: me.clone(),
            config,
            handler,
            pool,
            members: OnceLock::new(),
            links: Mutex::default(),
            next_link: AtomicU64::new(1),
            serving: Mutex::new(Serving::new()),
            cancels: Cancels::default(),
            look_at: Mutex::default(),
            rrefs: RRefs::new(me.life()),
            backward: Backward::new(me.life()),
            group: Group::default(),
            transports: OnceLock::new(),
            alarm: Arc::clone(&alarm),
            completing: AtomicU64::new(0),
            errands: Arc::default(),
            fault_line,
            closed: AtomicBool::new(false),
        });
        let weak = Arc::downgrade(&inner);
        let events: Weak<dyn Events> = weak.clone();
        let memory = hub.join(me, events.clone(), limits);
        let window = inner.config.group_threads.get();
        let reactor = {
            let (credentials, buffers) = (credentials.clone(), Arc::clone(&buffers));
            let terms = Terms {
                max_bytes: inner.config.max_shared_memory as u64,
                idle: inner.config.shared_memory_idle,
            };
            let busy_poll = inner.config.busy_poll;
            Reactor::start(events.clone(), alarm, credentials, listeners, limits, terms, buffers, busy_poll)?
        };
        let group =
            group.map(|group| GroupTransport::start(group, events, credentials, window, limits, buffers));
        if inner.transports.set(Transports { memory, group, reactor }).is_err() {
            return Err(Error::usage("an agent is started once"));
        }
        let end = Arc::new(EndOnDrop(weak));
        let _ = inner.end.set(Arc::downgrade(&end));
        Ok(Self { _end: end, inner })
    }

    /// Who this worker is.
    pub fn identity(&self) -> &Identity {
        &self.inner.me
    }

    /// This agent, for those who do not keep it alive.
    pub(crate) fn weak(&self) -> Weak<Inner> {
        self.inner.this.clone()
    }

    /// What the other workers need to reach this one.
    pub fn contact(&self) -> String {
        let addresses = self.inner.transports().flat_map(Transport::addresses).collect();
        let (identity, plain) = (self.inner.me.clone(), self.inner.config.plain);
        PeerInfo { identity, addresses, plain }.contact()
    }

    /// Tells who is in the group, this worker included, and starts to run requests. Nobody joins later.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`] if names or ranks repeat, or if this worker is missing.
    pub fn open(&self, group: Vec<PeerInfo>) -> Result<()> {
        self.inner.open(group, GroupKind::Static)
    }

    /// As [`Agent::open`], for a group that workers join and leave at run time: `group` has those that are
    /// there now. Such a worker leaves on its own: [`Agent::quiesce`] asks nobody else.
    ///
    /// # Errors
    ///
    /// As [`Agent::open`].
    pub fn open_dynamic(&self, group: Vec<PeerInfo>) -> Result<()> {
        self.inner.open(group, GroupKind::Dynamic)
    }

    /// Takes a worker that has joined into a dynamic group. An earlier life of it, under the same rank, is
    /// lost by that. Doing it again is harmless.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`] if the group is static, if another member has its name, or if this life of it
    /// is over.
    pub fn admit(&self, info: PeerInfo) -> Result<()> {
        self.inner.check_home()?;
        let members = self.inner.members()?;
        if let Admitted::Instead(earlier) = members.admit(info)? {
            self.inner.lose(&earlier, "it has joined again since");
        }
        self.inner.admitted_rrefs();
        Ok(())
    }

    /// The rank of the worker with this name.
    pub fn rank_of(&self, name: &WorkerName) -> Option<Rank> {
        self.inner.members.get()?.rank_of(name)
    }

    /// The name and rank of the worker with this name.
    pub(crate) fn find(&self, name: &str) -> Option<(WorkerName, Rank)> {
        self.inner.members.get()?.find(name)
    }

    /// The name of the worker of this rank.
    pub fn name_of(&self, rank: Rank) -> Option<WorkerName> {
        Some(self.inner.members.get()?.get(rank)?.name().clone())
    }

    /// Whether the worker of this rank reads plain data only: it needs functions that are named, with
    /// arguments that are values.
    pub fn is_plain(&self, rank: Rank) -> bool {
        self.inner.members.get().and_then(|members| members.get(rank)).is_some_and(|peer| peer.info.plain)
    }

    /// Calls a function of worker `to`, waiting for room if too much is under way to it already.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`] if there is no such worker, [`ErrorKind::ShuttingDown`] after
    /// [`Agent::close`], [`ErrorKind::PeerLost`] or [`ErrorKind::PeerLeft`] if it is known to be gone,
    /// [`ErrorKind::Timeout`] if there was no room in time. What goes wrong later comes through the
    /// future.
    pub fn call(&self, to: Rank, request: Request) -> Result<RpcFuture> {
        let mut request = request;
        let limit = request.start_time();
        loop {
            match self.try_call(to, request) {
                Ok(future) => return Ok(future),
                Err(CallError::Failed(error)) => return Err(error),
                Err(CallError::Full(full)) if self.wait_for_room(to, full.body.len(), limit)? => {
                    request = *full;
                }
                Err(CallError::Full(full)) => return Err(self.no_room(to, &full)),
            }
        }
    }

    /// As [`Agent::call`], but gives the request back instead of waiting for room.
    ///
    /// # Errors
    ///
    /// See [`CallError`] and [`Agent::call`].
    pub fn try_call(&self, to: Rank, request: Request) -> Result<RpcFuture, CallError> {
        self.inner.check_home().map_err(CallError::Failed)?;
        self.inner.call(to, request)
    }

    /// Waits until another call of `bytes` bytes to `to` may be made, or `limit`; tells which.
    ///
    /// # Errors
    ///
    /// As [`Agent::call`].
    pub fn wait_for_room(&self, to: Rank, bytes: u64, limit: Option<Instant>) -> Result<bool> {
        self.inner.check_home()?;
        let peer = self.inner.peer(to)?;
        let mut state = peer.state.lock();
        while state.gone.is_none() && !self.inner.is_closed() && !state.calls.has_room(bytes) {
            match limit {
                None => peer.room.wait(&mut state),
                Some(limit) => {
                    if peer.room.wait_until(&mut state, limit).timed_out() {
                        return Ok(state.calls.has_room(bytes));
                    }
                }
            }
        }
        Ok(true)
    }

    /// The error of a call that found no room within its time.
    pub fn no_room(&self, to: Rank, request: &Request) -> Error {
        let name =
            self.inner.peer(to).map_or_else(|_| self.inner.me.name.clone(), |peer| peer.name().clone());
        Error::timeout(&name, &request.label, request.timeout.unwrap_or_default(), Phase::Queued)
    }

    /// Gives up a call to `to`: its future fails, and the callee does not run it if it has not begun.
    /// Tells whether the call was still under way.
    pub fn cancel(&self, to: Rank, call: MessageId) -> bool {
        self.inner.cancel(to, call)
    }

    /// All workers of the group that are known, by rank; those that are gone too.
    pub fn workers(&self) -> Vec<(WorkerName, Rank)> {
        let mut workers: Vec<_> =
            self.inner.peers().iter().map(|peer| (peer.name().clone(), peer.rank())).collect();
        workers.sort_by_key(|(_, rank)| *rank);
        workers
    }

    /// Runs `task` on a pool thread that does not count as one of `num_worker_threads`.
    pub fn spawn(&self, task: impl FnOnce() + Send + 'static) {
        if self.is_here() {
            self.inner.pool.spawn(Box::new(task));
        } else {
            std::mem::forget(task);
        }
    }

    /// Runs `body`, which may take as long as the agent lives, on a thread of its own. It counts neither
    /// as a thread of the pool nor as something that [`Agent::quiesce`] waits for; calls that it makes
    /// are taken to be part of a request that this worker serves. Tells whether there is such a thread.
    pub fn run_apart(&self, body: impl FnOnce() + Send + 'static) -> bool {
        self.is_here() && self.inner.pool.run_apart(Box::new(body))
    }

    /// Workers that are gone: those that were lost, and those that said goodbye.
    pub fn gone(&self) -> Vec<Rank> {
        if !self.is_here() {
            return Vec::new();
        }
        let peers = self.inner.peers().into_iter();
        peers.filter(|peer| peer.state.lock().gone.is_some()).map(|peer| peer.rank()).collect()
    }

    /// Waits until nothing is under way in the whole group: every live worker has called this, and
    /// every request made before, or because of one made before, has been answered (TERM-1).
    /// `leaving` says that this worker will close next. `None` waits without limit.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Timeout`], naming those who were waited for.
    pub fn quiesce(&self, leaving: bool, limit: Option<Instant>) -> Result<()> {
        self.inner.check_home()?;
        self.inner.quiesce(leaving, limit)
    }

    /// Waits until every message of the whole group, and every one that was made because of it, has been
    /// processed: [`Agent::quiesce`] for an agent that goes on.
    ///
    /// # Errors
    ///
    /// As [`Agent::quiesce`].
    pub fn sync(&self, limit: Option<Instant>) -> Result<()> {
        self.quiesce(false, limit)
    }

    /// As [`Agent::sync`], for an agent that makes no further calls of its own and closes next.
    ///
    /// # Errors
    ///
    /// As [`Agent::quiesce`].
    pub fn join(&self, limit: Option<Instant>) -> Result<()> {
        self.quiesce(true, limit)
    }

    /// Ends the agent: calls under way fail, requests are no longer run, connections are closed. After
    /// [`Agent::quiesce`] nothing is lost by it. What is still queued to peers is sent until `limit`.
    /// Functions that run are not waited for. Doing it again is harmless.
    pub fn close(&self, graceful: bool, limit: Instant) {
        if self.is_here() {
            self.inner.close(graceful, limit);
        }
    }

    /// Says goodbye to the workers of the process group and ends all work on it, until `limit` at the latest;
    /// calls to them then wait for their deadlines. For a process that ends; nothing happens without a
    /// process group.
    pub fn leave_group(&self, limit: Instant) {
        if self.is_here() {
            self.inner.leave_group(limit);
        }
    }

    /// Waits until the pool's threads have ended, which they do once closed and idle; tells whether.
    pub fn wait_threads_ended(&self, limit: Instant) -> bool {
        !self.is_here() || self.inner.pool.wait_ended(limit)
    }

    /// Whether [`Agent::close`] was called, or this is a forked child of the agent's process.
    pub fn is_closed(&self) -> bool {
        self.inner.is_closed() || !self.is_here()
    }

    /// Whether this is the process that the agent was started in, and not a forked child of it. There its
    /// calls fail, closing it changes nothing, and it uses none of what it had in its parent (FORK-1).
    pub fn is_here(&self) -> bool {
        self.inner.home.is_here()
    }

    /// Numbers about this agent; all zero in a forked child.
    pub fn metrics(&self) -> Metrics {
        if self.is_here() { self.inner.metrics() } else { Metrics::default() }
    }
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Agent").field("identity", &self.inner.me).finish_non_exhaustive()
    }
}

/// Whether this thread runs a function or a callback for some agent: its calls are nested ones.
pub fn is_pool_thread() -> bool {
    pool::is_inside()
}

/// Waits for something that a call will bring about, lending this thread's place in the pool to others
/// meanwhile. On a thread that is not of a pool it just waits.
pub fn lend<R>(target: Option<&WorkerName>, wait: impl FnOnce() -> R) -> R {
    pool::lend(target, wait)
}

impl Inner {
    /// A handle, if there is one still.
    pub(crate) fn agent(self: &Arc<Self>) -> Option<Agent> {
        let end = self.end.get()?.upgrade()?;
        Some(Agent { _end: end, inner: Arc::clone(self) })
    }

    /// See [`Agent::cancel`].
    pub(crate) fn cancel(&self, to: Rank, call: MessageId) -> bool {
        let Ok(peer) = self.check_home().and_then(|()| self.peer(to)) else { return false };
        let mut state = peer.state.lock();
        let Some(ticket) = state.calls.abandon(call) else { return false };
        state.gives_up(call, &ticket);
        drop(state);
        let text = format!("the call of {} on worker '{}' was cancelled", ticket.function, peer.name());
        self.complete(|| Some((ticket, Err(Error::new(ErrorKind::Cancelled, text)))));
        self.post(&peer, Outbound::plain(Message::Cancel { id: call }));
        peer.room.notify_all();
        true
    }

    /// Tells `to` that nobody waits for a call of ours any more that is over here: its time was.
    pub(crate) fn forget(&self, to: Rank, call: MessageId) {
        if let Ok(peer) = self.check_home().and_then(|()| self.peer(to)) {
            self.post(&peer, Outbound::plain(Message::Cancel { id: call }));
        }
    }

    fn transports(&self) -> impl Iterator<Item = &dyn Transport> {
        let all = self.transports.get();
        all.into_iter().flat_map(|Transports { memory, group, reactor }| {
            let group = group.as_ref().map(|group| group as &dyn Transport);
            [Some(memory as &dyn Transport), group, Some(reactor)].into_iter().flatten()
        })
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// # Errors
    ///
    /// [`ErrorKind::Forked`] in a forked child.
    pub(crate) fn check_home(&self) -> Result<()> {
        if self.home.is_here() { Ok(()) } else { Err(Error::forked(Some(&self.me.name))) }
    }

    fn open(&self, group: Vec<PeerInfo>, kind: GroupKind) -> Result<()> {
        self.check_home()?;
        let window = Window {
            max_calls: self.config.max_outstanding_calls,
            max_bytes: self.config.max_outstanding_bytes,
        };
        if !group.iter().any(|info| info.identity == self.me) {
            return Err(Error::usage(format!("worker '{}' is not in its own group", self.me.name)));
        }
        let members = Members::new(group, window, kind)?;
        if self.members.set(members).is_err() {
            return Err(Error::usage("the group of an agent is set once"));
        }
        self.admitted_rrefs();
        self.start_group();
        if let Some(check) = self.pool.open() {
            self.schedule(check);
        }
        Ok(())
    }

    fn members(&self) -> Result<&Members> {
        self.members.get().ok_or_else(|| Error::usage("the group is not known yet"))
    }

    fn peer(&self, rank: Rank) -> Result<Arc<Peer>> {
        let peer = self.members()?.get(rank);
        peer.ok_or_else(|| Error::usage(format!("there is no worker of rank {rank}")))
    }

    /// All members; none while the group is not known.
    fn peers(&self) -> Vec<Arc<Peer>> {
        self.members.get().map(Members::all).unwrap_or_default()
    }

    fn schedule(&self, when: Instant) {
        if self.alarm.set(when)
            && let Some(transports) = self.transports.get()
        {
            transports.reactor.wake();
        }
    }

    fn metrics(&self) -> Metrics {
        let pool = self.pool.counts();
        let (mut active, mut sent, mut late) = (0, 0, 0);
        for peer in self.peers() {
            let state = peer.state.lock();
            active += state.calls.len();
            sent += state.calls.started();
            late += state.calls.late();
        }
        let serving = self.serving.lock();
        Metrics {
            thread_pool_size: self.config.num_worker_threads.get(),
            idle_threads: pool.idle,
            threads: pool.threads,
            client_active_calls: active,
            server_active_calls: serving.len(),
            calls_sent: sent,
            calls_received: serving.total(),
            late_replies: late,
        }
    }
}

/// A random number from the system.
fn random() -> Result<u64> {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).map_err(|error| Error::io("no random numbers", error))?;
    Ok(u64::from_le_bytes(bytes))
}
