//! A request on its way: admitted, run on the pool, answered.

use std::any::Any;
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tensorcall_proto::autograd::AutogradCall;
use tensorcall_proto::ids::{Identity, Incarnation, Life, MessageId, RRefId, Rank};
use tensorcall_proto::serving::{CancelOutcome, RequestKey, Start};
use tensorcall_proto::wire::message::{
    AutogradRef, Call, Encoding, FailureKind, FunctionRef, Message, Outcome, Reply,
};

use super::burst::Burst;
use super::pool::{Job, Refusal, Run, ThreadHook};
use super::{Agent, Inner, LinkEntry};
use crate::autograd::LocalEngine;
use crate::body::{Body, Received};
use crate::clock::now;
use crate::rref::{Kept, Packed};
use crate::transport::{Link, LinkId, Outbound};

/// Callers of requests that take longer than this are told how far they have come.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Runs the functions that other workers call.
pub trait Handler: ThreadHook {
    /// Runs one request on a pool thread and answers through `responder`, at once or later. Dropping
    /// the responder answers that the function failed.
    fn handle(&self, call: InboundCall, responder: Responder);

    /// Packs a value that [`Responder::keep`] or [`Agent::make_rref`](crate::engine::Agent::make_rref) was given
    /// for somebody who asks for it, on a pool thread. `call` has neither function nor arguments.
    fn fetch(&self, value: Arc<dyn Any + Send + Sync>, call: InboundCall, responder: Responder) {
        drop((value, call));
        responder.failed(FailureKind::Usage, "this worker cannot send the values that it keeps".to_owned());
    }

    /// As [`Handler::fetch`], for an answer that was packed in a way that this caller cannot read: `call` is
    /// [plain](InboundCall::plain), and `packed` is not a value.
    fn fetch_packed(&self, packed: &Packed, call: InboundCall, responder: Responder) {
        drop(call);
        packed.send(responder);
    }

    /// What computes gradients here. A worker without it takes no part in backward passes.
    fn local_engine(&self) -> Option<&dyn LocalEngine> {
        None
    }
}

/// A request of another worker.
#[derive(Debug)]
pub struct InboundCall {
    /// Who calls.
    pub caller: Identity,
    /// Which function; `None` if the payload says so.
    pub function: Option<Arc<str>>,
    /// How the payload is encoded.
    pub encoding: Encoding,
    /// The arguments.
    pub body: Received,
    /// Whether the caller reads plain data only: it needs an answer that is a
    /// [`Value`](tensorcall_proto::wire::Value), or an error that says what is not plain.
    pub plain: bool,
    /// Whether the result is to stay here, for references to it: [`Responder::keep`] takes it.
    pub creates: bool,
}

/// Answers one request, once.
pub struct Responder {
    agent: Weak<Inner>,
    link: CallerLink,
    key: RequestKey,
    creates: Option<RRefId>,
    autograd: Option<AutogradRef>,
    plain: bool,
    answered: bool,
}

/// Whether the answer to a request is still wanted.
#[derive(Debug, Clone)]
pub(crate) struct Watch {
    agent: Weak<Inner>,
    key: RequestKey,
}

impl Watch {
    /// Whether the caller cancelled the call or is gone.
    pub(crate) fn is_cancelled(&self) -> bool {
        let agent = self.agent.upgrade().filter(|agent| agent.home.is_here());
        agent.is_none_or(|agent| agent.serving.lock().is_cancelled(self.key))
    }
}

/// Runs what a request leaves to be done later.
#[derive(Debug, Clone)]
pub(crate) struct Spawner(Weak<Inner>);

impl Spawner {
    /// Runs `task` on a pool thread that takes no place; never, if the agent is gone.
    pub(crate) fn spawn(&self, task: impl FnOnce() + Send + 'static) {
        match self.0.upgrade() {
            Some(agent) if agent.home.is_here() => agent.pool.spawn(Box::new(task)),
            _ => std::mem::forget(task),
        }
    }
}

/// The link that a request came on and its answer goes to.
#[derive(Debug, Clone)]
pub(super) struct CallerLink {
    pub(super) id: LinkId,
    pub(super) handle: Arc<dyn Link>,
}

/// A request that has been admitted and has not started.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) key: RequestKey,
    pub(super) link: CallerLink,
    pub(super) nested: bool,
    pub(super) deadline: Option<Instant>,
    pub(super) call: InboundCall,
    pub(super) task: Task,
}

/// What a request is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Task {
    /// A function whose result goes back to the caller.
    Call,
    /// A function whose result stays here.
    Create(RRefId),
    /// A copy of a value that is here, or will be.
    Fetch(RRefId),
}

impl Responder {
    /// The function returned this. If the result is to stay here it is kept as it is, packed.
    pub fn returned(self, encoding: Encoding, body: Body) {
        self.answer(returned(encoding, &body), body);
    }

    /// The function raised this. If the result was to stay here, everybody who asks for it gets this.
    pub fn raised(self, encoding: Encoding, body: Body) {
        self.answer(Outcome::Raised { encoding }, body);
    }

    /// The function could not be run.
    pub fn failed(self, kind: FailureKind, text: String) {
        self.answer(Outcome::Failed { kind, text }, Body::default());
    }

    /// The function returned `value`, which stays here. For a request with [`InboundCall::creates`];
    /// another one fails by it.
    pub fn keep(mut self, value: Arc<dyn Any + Send + Sync>) {
        let Some(rref) = self.creates.take() else {
            let text = "the function kept a result that its caller waits for".to_owned();
            return self.failed(FailureKind::Internal, text);
        };
        self.answered = true;
        let Some(agent) = self.agent.upgrade().filter(|agent| agent.home.is_here()) else { return };
        agent.resolve(rref, Kept::Value(value));
        self.send(&agent, NOTHING, Body::default());
    }

    /// The agent that was asked, if somebody has a handle of it still.
    pub(crate) fn agent(&self) -> Option<Agent> {
        self.agent.upgrade()?.agent()
    }

    /// Whether the result is to stay here, see [`InboundCall::creates`].
    pub fn creates(&self) -> bool {
        self.creates.is_some()
    }

    /// The autograd context that the request belongs to, if to one.
    pub fn autograd(&self) -> Option<AutogradRef> {
        self.autograd
    }

    /// Whether the caller reads plain data only, see [`InboundCall::plain`].
    pub fn plain(&self) -> bool {
        self.plain
    }

    /// Who asked.
    pub fn caller(&self) -> Rank {
        self.key.peer
    }

    /// Looks whether the answer is still wanted, also after it was given.
    pub(crate) fn watch(&self) -> Watch {
        Watch { agent: self.agent.clone(), key: self.key }
    }

    /// Runs `task` on a pool thread that takes no place of the pool.
    pub(crate) fn spawner(&self) -> Spawner {
        Spawner(self.agent.clone())
    }

    /// Whether nobody wants the answer any more: the caller cancelled the call or is gone. A function
    /// that takes long may look now and then.
    pub fn is_cancelled(&self) -> bool {
        self.watch().is_cancelled()
    }

    /// Whether this is the process that was asked, and not a forked child of it: the answer of that is
    /// forgotten.
    pub fn is_here(&self) -> bool {
        self.agent.upgrade().is_none_or(|agent| agent.home.is_here())
    }

    /// Calls `told` once nobody wants the answer any more, unless it is given before. That may be at once
    /// or on any thread, the reactor's included: `told` must neither take long nor wait (NET-1).
    pub fn on_cancelled(&self, told: impl FnOnce() + Send + 'static) {
        let Some(agent) = self.agent.upgrade() else { return told() };
        agent.cancels.expect(self.key, Box::new(told));
        // It may have been cancelled just before.
        if agent.serving.lock().is_cancelled(self.key) {
            agent.cancels.tell(self.key);
        }
    }

    fn answer(mut self, outcome: Outcome, body: Body) {
        self.finish(outcome, body);
    }

    fn finish(&mut self, mut outcome: Outcome, mut body: Body) {
        self.answered = true;
        let Some(agent) = self.agent.upgrade().filter(|agent| agent.home.is_here()) else { return };
        if let Some(rref) = self.creates.take() {
            // What becomes of it is for those who ask; the caller only learns that it is known here.
            let kept;
            (kept, outcome, body) = keep_answer(outcome, body);
            agent.resolve(rref, kept);
        }
        self.send(&agent, outcome, body);
    }

    fn send(&self, agent: &Arc<Inner>, mut outcome: Outcome, mut body: Body) {
        let text = if let Outcome::Failed { text, .. } = &outcome { text.len() } else { 0 };
        let caller = Life { rank: self.key.peer, incarnation: self.key.incarnation };
        let checked = body.check(text, &agent.config.limits).map_err(|error| error.to_string());
        let forks = checked.and_then(|()| agent.fork_all(&body.rrefs, caller).map_err(|e| e.to_string()));
        let forks = forks.unwrap_or_else(|error| {
            let text = format!("the result cannot be sent: {error}");
            (outcome, body) = (Outcome::Failed { kind: FailureKind::Usage, text }, Body::default());
            Vec::new()
        });
        let _handles = std::mem::take(&mut body.rrefs);
        agent.cancels.forget(self.key);
        // Finished before it is sent: until the answer arrives the caller counts it as outstanding.
        if agent.serving.lock().finish(self.key) {
            let message = Message::Reply(Reply { id: self.key.id, outcome });
            agent.forks_return(self.link.id, &forks);
            agent.pool.answer(&self.link.handle, Outbound { message, body, rrefs: forks, id: None });
        } else {
            agent.forks_unsent(&forks);
        }
        agent.became_idle();
    }
}

/// What the caller of a function is told whose result stays here.
const NOTHING: Outcome = Outcome::Returned { encoding: Encoding::Value, autograd: None };

fn returned(encoding: Encoding, body: &Body) -> Outcome {
    Outcome::Returned { encoding, autograd: body.autograd }
}

/// Takes apart what a function that was to leave its result here came to: what is kept, and what the
/// caller is told.
fn keep_answer(outcome: Outcome, body: Body) -> (Kept, Outcome, Body) {
    match outcome {
        Outcome::Returned { encoding, .. } => {
            // Whoever fetches it does so in a context of its own.
            let kept = Kept::packed(false, encoding, Body { autograd: None, ..body });
            (kept, NOTHING, Body::default())
        }
        Outcome::Raised { encoding } => {
            let kept = Kept::packed(true, encoding, body.clone());
            (kept, Outcome::Raised { encoding }, body)
        }
        Outcome::Failed { kind, text } => (Kept::failed(kind, &text), Outcome::Failed { kind, text }, body),
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if !self.answered {
            let how = if std::thread::panicking() { "panicked" } else { "ended without an answer" };
            let text = format!("the function {how}");
            self.finish(Outcome::Failed { kind: FailureKind::Internal, text }, Body::default());
        }
    }
}

impl std::fmt::Debug for Responder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Responder").field("key", &self.key).finish_non_exhaustive()
    }
}

impl Pending {
    /// The call, and what answers it, once it was started.
    pub(super) fn start(self, agent: Weak<Inner>) -> (InboundCall, Responder) {
        let Self { key, link, call, task, .. } = self;
        let creates = if let Task::Create(rref) = task { Some(rref) } else { None };
        let (autograd, plain) = (call.body.autograd, call.plain);
        (call, Responder { agent, link, key, creates, autograd, plain, answered: false })
    }

    /// Answers without having run it.
    pub(super) fn refuse(&self, kind: FailureKind, text: String) {
        refuse(&*self.link.handle, self.key, kind, text);
    }
}

impl Inner {
    /// Takes in a request: what can start at once is left in `burst`.
    pub(super) fn admit(
        &self,
        caller: &Identity,
        link: &CallerLink,
        call: Call,
        body: Received,
        burst: &mut Burst,
    ) {
        let body = Received { autograd: call.autograd, ..body };
        let key = RequestKey { peer: caller.rank, incarnation: caller.incarnation, id: call.id };
        let deadline = call.timeout_us.map(|micros| now() + Duration::from_micros(micros));
        if self.is_closed() {
            let text = "the worker is shutting down".to_owned();
            return refuse(&*link.handle, key, FailureKind::ShuttingDown, text);
        }
        let task = call.creates.as_ref().map_or(Task::Call, |new| Task::Create(new.rref));
        let (function, task, step) = match call.function {
            FunctionRef::InPayload => (None, task, None),
            FunctionRef::Name(name) => (Some(name), task, None),
            FunctionRef::Fetch(rref) => (None, Task::Fetch(rref), None),
            FunctionRef::Autograd(step) => (None, Task::Call, Some(step)),
            FunctionRef::Define { .. } | FunctionRef::Slot(_) => {
                let text = "function slots mean something on one connection only".to_owned();
                return refuse(&*link.handle, key, FailureKind::Protocol, text);
            }
        };
        if let Err(duplicate) = self.serving.lock().admit(key, deadline, ()) {
            tracing::warn!(peer = %caller, message_id = %key.id, kind = "call", %duplicate, "request ignored");
            return;
        }
        self.look_for_slow_requests();
        if let Some(new) = call.creates.as_deref()
            && !self.create(*new, caller, function.as_deref())
        {
            return self.cancel_request(caller, &*link.handle, call.id);
        }
        let creates = call.creates.is_some();
        let (encoding, plain) = (call.encoding, call.plain);
        let (caller, link) = (caller.clone(), link.clone());
        let call_in = InboundCall { caller, function, encoding, body, plain, creates };
        let pending = Pending { key, link, nested: call.nested, deadline, call: call_in, task };
        if step.is_none() && pending.call.body.rrefs.is_empty() && !matches!(task, Task::Fetch(_)) {
            return burst.jobs.push(self.job(pending, None));
        }
        // In its turn.
        self.finish_burst(burst, None);
        match step {
            Some(step) => self.start_backward(*step, pending),
            None => self.start_when_ready(pending),
        }
    }

    /// Hands over what is part of a backward pass. It needs no thread.
    fn start_backward(&self, step: AutogradCall, pending: Pending) {
        let started = self.serving.lock().start(pending.key, now());
        if let Start::Run(()) = started {
            let (InboundCall { encoding, body, .. }, responder) = pending.start(self.this.clone());
            self.autograd_call(step, encoding, body, responder);
        }
    }

    /// The turn of a request at the pool has come; `kept` is what a fetch is answered with.
    pub(super) fn start(&self, pending: Pending, kept: Option<Kept>) {
        let needs_thread = match &kept {
            None | Some(Kept::Value(_)) => true,
            Some(Kept::Packed(packed)) => packed.is_foreign_to(&pending.call) || packed.is_large(),
            // No thread is needed for what is packed already.
            Some(Kept::Failed { .. }) => false,
        };
        if needs_thread {
            if let Some(check) = self.pool.submit([self.job(pending, kept)]) {
                self.schedule(check);
            }
        } else {
            Box::new(Queued { agent: self.this.clone(), pending, kept }).run(None);
        }
    }

    /// A request as the pool runs it, and whether it is nested.
    fn job(&self, pending: Pending, kept: Option<Kept>) -> (bool, Job) {
        (pending.nested, Box::new(Queued { agent: self.this.clone(), pending, kept }))
    }

    /// The caller no longer wants an answer.
    pub(super) fn cancel_request(&self, caller: &Identity, link: &dyn Link, id: MessageId) {
        let key = RequestKey { peer: caller.rank, incarnation: caller.incarnation, id };
        let outcome = self.serving.lock().cancel(key);
        match outcome {
            CancelOutcome::Waiting(()) => {
                refuse(link, key, FailureKind::Cancelled, CANCELLED.to_owned());
                self.forget_held(&[key]);
                self.became_idle();
            }
            CancelOutcome::Running => self.cancels.tell(key),
            CancelOutcome::Unknown => {}
        }
    }

    fn look_for_slow_requests(&self) {
        let mut look_at = self.look_at.lock();
        if look_at.is_none() {
            let at = *look_at.insert(now() + LOOK_EVERY);
            drop(look_at);
            self.schedule(at);
        }
    }

    /// Tells callers how far their requests have come, so that a time-out can say so.
    pub(super) fn tick_requests(&self, now: Instant) {
        let mut look_at = self.look_at.lock();
        let Some(at) = *look_at else { return };
        if at > now {
            drop(look_at);
            return self.schedule(at);
        }
        // Still under the lock: a request that is admitted meanwhile finds a next look, or that there is none.
        let (overdue, any) = {
            let mut serving = self.serving.lock();
            (serving.overdue(), !serving.is_empty())
        };
        let next = any.then(|| now + LOOK_EVERY);
        *look_at = next;
        drop(look_at);
        if let Some(next) = next {
            self.schedule(next);
        }
        if overdue.is_empty() {
            return;
        }
        let links = self.links_of_callers();
        for (key, phase) in overdue {
            if let Some(link) = links.get(&(key.peer, key.incarnation)) {
                link.send(Outbound::plain(Message::Progress { id: key.id, phase }));
            }
        }
    }

    fn links_of_callers(&self) -> HashMap<(Rank, Incarnation), Arc<dyn Link>> {
        let links = self.links.lock();
        let accepted = links.values().filter_map(|entry| match entry {
            LinkEntry::Accepted(peer, link) => Some(((peer.rank, peer.incarnation), Arc::clone(link))),
            LinkEntry::Outgoing(_) => None,
        });
        accepted.collect()
    }
}

const CANCELLED: &str = "cancelled before it ran";

/// A request that waits for its turn at the pool.
struct Queued {
    agent: Weak<Inner>,
    pending: Pending,
    /// What a fetch is answered with.
    kept: Option<Kept>,
}

impl Run for Queued {
    /// The turn has come, on a pool thread; or it never will, because it was `refused`. An answer that is packed
    /// already may be given on any thread.
    fn run(self: Box<Self>, refused: Option<Refusal>) {
        let Some(inner) = self.agent.upgrade() else { return };
        let start = inner.serving.lock().start(self.pending.key, now());
        let Self { agent, pending, kept } = *self;
        match start {
            Start::Gone => {
                inner.never_created(pending.task, FailureKind::Cancelled, CANCELLED);
                inner.bury(kept);
                inner.became_idle();
            }
            Start::Expired(()) => {
                inner.bury(kept);
                inner.expire_request(&pending);
            }
            Start::Run(()) => {
                if let Some(Refusal { kind, text }) = refused {
                    inner.bury(kept);
                    return pending.start(agent).1.failed(kind, text);
                }
                let handler = Arc::clone(&inner.handler);
                drop(inner);
                let (call, responder) = pending.start(agent);
                match kept {
                    None => handler.handle(call, responder),
                    Some(Kept::Value(value)) => handler.fetch(value, call, responder),
                    Some(Kept::Packed(packed)) if packed.is_foreign_to(&call) => {
                        handler.fetch_packed(&packed, call, responder);
                    }
                    Some(Kept::Packed(packed)) => packed.send(responder),
                    Some(Kept::Failed { kind, text }) => responder.failed(kind, text.to_string()),
                }
            }
        }
    }
}

impl Inner {
    /// Answers a request that serving has found too late.
    pub(super) fn expire_request(&self, pending: &Pending) {
        let text = "its deadline passed before it ran";
        pending.refuse(FailureKind::Expired, text.to_owned());
        self.never_created(pending.task, FailureKind::Expired, text);
        self.became_idle();
    }
}

fn refuse(link: &dyn Link, key: RequestKey, kind: FailureKind, text: String) {
    let reply = Message::Reply(Reply { id: key.id, outcome: Outcome::Failed { kind, text } });
    link.send(Outbound::plain(reply));
}
