//! A request on its way: admitted, run on the pool, answered.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use tensorcall_proto::ids::{Identity, Incarnation, MessageId, Rank};
use tensorcall_proto::serving::{CancelOutcome, RequestKey, Start};
use tensorcall_proto::wire::message::{Call, Encoding, FailureKind, FunctionRef, Message, Outcome, Reply};

use super::pool::{Refusal, ThreadHook};
use super::{Inner, LinkEntry};
use crate::body::{Body, Received};
use crate::clock::now;
use crate::transport::{Link, Outbound};

/// Callers of requests that take longer than this are told how far they have come.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Runs the functions that other workers call.
pub trait Handler: ThreadHook {
    /// Runs one request on a pool thread and answers through `responder`, at once or later. Dropping
    /// the responder answers that the function failed.
    fn handle(&self, call: InboundCall, responder: Responder);
}

/// A request of another worker.
#[derive(Debug)]
pub struct InboundCall {
    /// Who calls.
    pub caller: Identity,
    /// Which function; `None` if the payload says so.
    pub function: Option<String>,
    /// How the payload is encoded.
    pub encoding: Encoding,
    /// The arguments.
    pub body: Received,
}

/// Answers one request, once.
pub struct Responder {
    agent: Weak<Inner>,
    link: Arc<dyn Link>,
    key: RequestKey,
    answered: bool,
}

impl Responder {
    /// The function returned this.
    pub fn returned(self, encoding: Encoding, body: Body) {
        self.answer(Outcome::Returned { encoding }, body);
    }

    /// The function raised this.
    pub fn raised(self, encoding: Encoding, body: Body) {
        self.answer(Outcome::Raised { encoding }, body);
    }

    /// The function could not be run.
    pub fn failed(self, kind: FailureKind, text: String) {
        self.answer(Outcome::Failed { kind, text }, Body::default());
    }

    /// Whether nobody wants the answer any more: the caller cancelled the call or is gone. A function
    /// that takes long may look now and then.
    pub fn is_cancelled(&self) -> bool {
        let agent = self.agent.upgrade().filter(|agent| agent.home.is_here());
        agent.is_none_or(|agent| agent.serving.lock().is_cancelled(self.key))
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
        self.answered = true;
        self.send(outcome, body);
    }

    fn send(&self, mut outcome: Outcome, mut body: Body) {
        let Some(agent) = self.agent.upgrade().filter(|agent| agent.home.is_here()) else { return };
        let text = if let Outcome::Failed { text, .. } = &outcome { text.len() } else { 0 };
        if let Err(error) = body.check(text, &agent.config.limits) {
            let text = format!("the result cannot be sent: {error}");
            (outcome, body) = (Outcome::Failed { kind: FailureKind::Usage, text }, Body::default());
        }
        agent.cancels.forget(self.key);
        // Finished before it is sent: until the answer arrives the caller counts it as outstanding.
        if agent.serving.lock().finish(self.key) {
            let reply = Message::Reply(Reply { id: self.key.id, outcome });
            self.link.send(Outbound { message: reply, body, id: None });
        }
        agent.became_idle();
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        if !self.answered {
            let how = if std::thread::panicking() { "panicked" } else { "ended without an answer" };
            let text = format!("the function {how}");
            self.send(Outcome::Failed { kind: FailureKind::Internal, text }, Body::default());
        }
    }
}

impl std::fmt::Debug for Responder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Responder").field("key", &self.key).finish_non_exhaustive()
    }
}

impl Inner {
    /// Takes in a request and queues it for the pool.
    pub(super) fn admit(self: &Arc<Self>, caller: Identity, link: Arc<dyn Link>, call: Call, body: Received) {
        let key = RequestKey { peer: caller.rank, incarnation: caller.incarnation, id: call.id };
        let deadline = call.timeout_us.map(|micros| now() + Duration::from_micros(micros));
        if self.is_closed() {
            return refuse(&*link, key, FailureKind::ShuttingDown, "the worker is shutting down".to_owned());
        }
        let function = match call.function {
            FunctionRef::InPayload => None,
            FunctionRef::Name(name) => Some(name),
            FunctionRef::Define { .. } | FunctionRef::Slot(_) => {
                let text = "function slots are reserved in this version of the wire format".to_owned();
                return refuse(&*link, key, FailureKind::Protocol, text);
            }
        };
        if let Err(duplicate) = self.serving.lock().admit(key, deadline, ()) {
            tracing::warn!(peer = %caller, message_id = %key.id, kind = "call", %duplicate, "request ignored");
            return;
        }
        self.look_for_slow_requests();
        let (agent, nested, encoding) = (Arc::downgrade(self), call.nested, call.encoding);
        let request = InboundCall { caller, function, encoding, body };
        let job = Box::new(move |refused| run(&agent, link, key, request, refused));
        if let Some(check) = self.pool.submit(nested, job) {
            self.schedule(check);
        }
    }

    /// The caller no longer wants an answer.
    pub(super) fn cancel_request(&self, caller: &Identity, link: &dyn Link, id: MessageId) {
        let key = RequestKey { peer: caller.rank, incarnation: caller.incarnation, id };
        let outcome = self.serving.lock().cancel(key);
        match outcome {
            CancelOutcome::Waiting(()) => {
                refuse(link, key, FailureKind::Cancelled, "cancelled before it ran".to_owned());
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

/// The turn of a request has come, on a pool thread; or it never will, because it was `refused`.
fn run(
    agent: &Weak<Inner>,
    link: Arc<dyn Link>,
    key: RequestKey,
    request: InboundCall,
    refused: Option<Refusal>,
) {
    let Some(inner) = agent.upgrade() else { return };
    let start = inner.serving.lock().start(key, now());
    match start {
        Start::Gone => inner.became_idle(),
        Start::Expired(()) => {
            refuse(&*link, key, FailureKind::Expired, "its deadline passed before it ran".to_owned());
            inner.became_idle();
        }
        Start::Run(()) => {
            let responder = Responder { agent: agent.clone(), link, key, answered: false };
            match refused {
                None => {
                    let handler = Arc::clone(&inner.handler);
                    drop(inner);
                    handler.handle(request, responder);
                }
                Some(Refusal { kind, text }) => responder.failed(kind, text),
            }
        }
    }
}

fn refuse(link: &dyn Link, key: RequestKey, kind: FailureKind, text: String) {
    let reply = Message::Reply(Reply { id: key.id, outcome: Outcome::Failed { kind, text } });
    link.send(Outbound::plain(reply));
}
