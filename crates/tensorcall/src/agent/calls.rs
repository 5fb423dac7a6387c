//! Making a call: a place in the window, a deadline, and the way to the peer.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tensorcall_proto::ids::Rank;
use tensorcall_proto::wire::frame::Priority;
use tensorcall_proto::wire::message::{Call, Encoding, FunctionRef, Message, Phase};

use super::peers::{self, Lane, Peer, PeerInfo, Ticket, Way};
use super::{Inner, LinkEntry, pool};
use crate::body::Body;
use crate::clock::now;
use crate::error::{Error, Result};
use crate::future::{Response, RpcFuture, Wakes, promise_in};
use crate::rref::RRef;
use crate::transport::{Address, Events, Link, Outbound, Sent, Transport};

/// A call to be made.
#[derive(Debug)]
pub struct Request {
    /// Which function.
    pub function: FunctionRef,
    /// How errors name the function.
    pub label: Arc<str>,
    /// How the payload is encoded.
    pub encoding: Encoding,
    /// The arguments.
    pub body: Body,
    /// How long the caller waits for the answer; `None` is for ever.
    pub timeout: Option<Duration>,
    /// When that time is over, if it began before this call is made; else it begins then.
    pub deadline: Option<Instant>,
    /// The reference that the result is for, from [`Agent::new_rref`](super::Agent::new_rref): the result
    /// stays with the callee.
    pub creates: Option<RRef>,
}

impl Request {
    /// Lets the time for the answer begin now, unless it has begun; returns when it is over.
    pub fn start_time(&mut self) -> Option<Instant> {
        if self.deadline.is_none() {
            self.deadline = self.timeout.map(|timeout| now() + timeout);
        }
        self.deadline
    }
}

/// Why [`Agent::try_call`](super::Agent::try_call) made no call.
#[derive(Debug)]
pub enum CallError {
    /// Too much is under way to that worker: wait for room, then try again with this request.
    Full(Box<Request>),
    /// The call cannot be made.
    Failed(Error),
}

impl Inner {
    pub(super) fn call(&self, to: Rank, mut request: Request) -> Result<RpcFuture, CallError> {
        let peer = self.peer(to).map_err(CallError::Failed)?;
        let start = now();
        let deadline = request.deadline.or(request.timeout.map(|timeout| start + timeout));
        let nested = pool::is_inside();
        let bytes = request.body.len();
        let text = match &request.function {
            FunctionRef::Name(name) | FunctionRef::Define { name, .. } => name.len(),
            FunctionRef::InPayload
            | FunctionRef::Slot(_)
            | FunctionRef::Fetch(_)
            | FunctionRef::Autograd(_) => 0,
        };
        if let Err(error) = request.body.check(text, &self.config.limits) {
            let text = format!("the call of {} on worker '{}': {error}", request.label, peer.name());
            return Err(CallError::Failed(Error::usage(text)));
        }
        if let Some(rref) = &request.creates
            && !(rref.is_of(&self.this) && rref.owner() == peer.life())
        {
            let text = format!("{rref} was not made for a call to worker '{}'", peer.name());
            return Err(CallError::Failed(Error::usage(text)));
        }
        // Before the message exists, so that whatever becomes of it, the forks in it are known of.
        let forks = self.fork_all(&request.body.rrefs, peer.life()).map_err(CallError::Failed)?;
        let fetches = matches!(request.function, FunctionRef::Fetch(_));
        let (promise, future) = promise_in(&self.errands);
        let mut state = peer.state.lock();
        let refusal = if self.is_closed() {
            Some(Error::shutting_down())
        } else {
            state.gone.as_ref().map(|gone| peer.error(gone, &request.label, Phase::Queued))
        };
        if let Some(error) = refusal {
            drop(state);
            self.forks_unsent(&forks);
            return Err(CallError::Failed(error));
        }
        let ticket = Ticket {
            promise,
            function: Arc::clone(&request.label),
            timeout: request.timeout.unwrap_or_default(),
            rref: request.creates.clone(),
            fetches,
        };
        // References and backward passes are never held back.
        let passes = nested || fetches || matches!(request.function, FunctionRef::Autograd(_));
        let Ok(id) = state.calls.try_start(deadline, bytes, passes, ticket) else {
            drop(state);
            self.forks_unsent(&forks);
            return Err(CallError::Full(Box::new(request)));
        };
        let creates = request.creates.as_ref().map(|rref| self.begin_creation(rref));
        // The call that makes the value does not come between a fetch and its answer.
        future.is_of(id, state.calls.len() <= 1 + usize::from(fetches));
        future.look_for(self.config.busy_poll);
        let keep_alive = *state.keep_alive_at.get_or_insert(start + self.config.keepalive);
        let _handles = std::mem::take(&mut request.body.rrefs);
        let message = Outbound {
            message: Message::Call(Call {
                id,
                function: request.function,
                encoding: request.encoding,
                timeout_us: deadline.map(|deadline| micros(deadline.saturating_duration_since(start))),
                nested,
                plain: self.config.plain,
                autograd: request.body.autograd,
                creates: creates.map(Box::new),
            }),
            body: request.body,
            rrefs: forks,
            id: Some(id),
        };
        let fault = self.fault_line.as_ref().and_then(|line| line.of_call(&message, &request.label));
        if let Some(fault) = fault {
            drop(state);
            self.hurt_call(&peer, id, message, fault);
        } else if self.post_locked(&peer, state, message) {
            peer.state.lock().calls.set_phase(id, Phase::Sent);
        }
        self.schedule(deadline.map_or(keep_alive, |deadline| deadline.min(keep_alive)));
        Ok(future)
    }

    /// Sends a message to a peer, opening the way if there is none. Tells whether it is all out.
    pub(super) fn post(&self, peer: &Arc<Peer>, message: Outbound) -> bool {
        match self.hurt(peer, message, 0) {
            Some(message) => self.post_now(peer, message),
            None => false,
        }
    }

    /// As [`post`](Self::post), whatever faults are injected.
    pub(super) fn post_now(&self, peer: &Arc<Peer>, message: Outbound) -> bool {
        let state = peer.state.lock();
        if state.gone.is_some() {
            return false;
        }
        self.post_locked(peer, state, message)
    }

    fn post_locked(
        &self,
        peer: &Arc<Peer>,
        mut state: crate::sync::MutexGuard<'_, peers::PeerState>,
        message: Outbound,
    ) -> bool {
        let (lane, narrow) = self.lane(peer, &state.ways, &message);
        match &mut state.ways[lane as usize] {
            Way::Link { id, handle } => {
                let handle = Arc::clone(handle);
                self.forks_take(*id, &message.rrefs);
                let alone = state.calls.len() <= 1;
                drop(state);
                let sent = if alone { handle.send(message).into() } else { handle.send_along(message) };
                if sent == Sent::Held {
                    self.errands.calls.note(&handle);
                }
                if let Some(narrow) = narrow {
                    narrow.make_room();
                }
                sent != Sent::Later
            }
            Way::Opening { id, backlog } => {
                self.forks_take(*id, &message.rrefs);
                backlog.push(message);
                false
            }
            Way::None => {
                self.open_way(peer, state, lane, vec![message]);
                false
            }
        }
    }

    /// Which link a message takes; and the one that it would have taken with more shared memory.
    fn lane(&self, peer: &Peer, ways: &[Way; 2], message: &Outbound) -> (Lane, Option<Arc<dyn Link>>) {
        let PeerInfo { identity, addresses, .. } = &peer.info;
        let is_large = || message.message.priority(message.body.len()) == Priority::Bulk;
        let mut local = addresses.iter().filter(|address| matches!(address, Address::Unix { .. }));
        let mut is_local = || {
            *identity != self.me
                && local.any(|address| self.transports().any(|by| by.reaches(identity, address)))
        };
        if !(matches!(message.message, Message::Call(_)) && is_large() && is_local()) {
            return (Lane::Talk, None);
        }
        // Only buffers go through shared memory.
        let payload_is_large = message.message.priority(message.body.payload_len()) == Priority::Bulk;
        match &ways[Lane::Talk as usize] {
            _ if payload_is_large || self.config.max_shared_memory == 0 => (Lane::Bulk, None),
            Way::Link { handle, .. } if handle.has_room_for(&message.body) => (Lane::Talk, None),
            Way::Link { handle, .. } => (Lane::Bulk, Some(Arc::clone(handle))),
            // Memory is shared over this one.
            Way::None | Way::Opening { .. } => (Lane::Talk, None),
        }
    }

    /// Makes sure that there is a way to a peer, or that it turns out that there is none.
    pub(super) fn reach(&self, peer: &Arc<Peer>) {
        let state = peer.state.lock();
        if state.gone.is_none() && matches!(state.ways[Lane::Talk as usize], Way::None) {
            self.open_way(peer, state, Lane::Talk, Vec::new());
        }
    }

    /// Opens a link, then sends what has been kept for it. The lock is not held meanwhile (LOCK-1).
    fn open_way(
        &self,
        peer: &Arc<Peer>,
        mut state: crate::sync::MutexGuard<'_, peers::PeerState>,
        lane: Lane,
        backlog: Vec<Outbound>,
    ) {
        let link = self.next_link();
        for message in &backlog {
            self.forks_take(link, &message.rrefs);
        }
        state.ways[lane as usize] = Way::Opening { id: link, backlog };
        drop(state);
        self.links.lock().insert(link, LinkEntry::Outgoing(Arc::clone(peer)));
        let PeerInfo { identity, addresses, .. } = &peer.info;
        let reaches =
            |transport: &&dyn Transport| addresses.iter().any(|address| transport.reaches(identity, address));
        // All addresses of one kind are tried by its transport; memory, which is this process, comes first.
        let Some(transport) = self.transports().find(reaches) else {
            let tried: Vec<_> = addresses.iter().map(ToString::to_string).collect();
            let reason = format!("no transport reaches any of its addresses ({})", tried.join(", "));
            self.closed(link, crate::transport::Closed { was_open: false, reason });
            return;
        };
        let mut candidates = addresses.clone();
        candidates.sort_by_key(|address| matches!(address, Address::Unix { .. }) != (lane == Lane::Talk));
        let handle = transport.connect(link, identity, candidates);
        loop {
            let mut state = peer.state.lock();
            let Way::Opening { id, backlog } = &mut state.ways[lane as usize] else { return };
            if *id != link {
                return;
            }
            let kept = std::mem::take(backlog);
            if kept.is_empty() {
                state.ways[lane as usize] = Way::Link { id: link, handle };
                return;
            }
            drop(state);
            for message in kept {
                let id = message.id;
                if handle.send(message)
                    && let Some(id) = id
                {
                    peer.state.lock().calls.set_phase(id, Phase::Sent);
                }
            }
        }
    }

    /// Completes a call, in sight of the waves (see [`shutdown`]).
    pub(super) fn complete(&self, take: impl FnOnce() -> Option<(Ticket, Result<Response>)>) {
        self.completing.fetch_add(1, Ordering::SeqCst);
        if let Some((ticket, outcome)) = take() {
            self.settle(ticket, outcome);
        }
        self.completing.fetch_sub(1, Ordering::SeqCst);
    }

    /// Tells whom it concerns that a call has its outcome. Call without holding a lock.
    pub(super) fn settle(&self, ticket: Ticket, outcome: Result<Response>) {
        if let Some(wakes) = self.settle_quietly(ticket, outcome) {
            wakes.wake();
        }
    }

    /// As [`settle`](Self::settle); whoever is to be woken is left to the caller.
    pub(super) fn settle_quietly(&self, ticket: Ticket, outcome: Result<Response>) -> Option<Wakes> {
        let Ticket { promise, rref, .. } = ticket;
        if let Some(rref) = rref {
            self.end_creation(&rref, &outcome);
        }
        promise.complete_quietly(outcome)
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
