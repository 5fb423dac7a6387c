//! Messages between agents of one process: for calls to oneself, and for tests.
//!
//! Tensor memory is copied, as by every transport: sender and receiver never share any. A message is
//! delivered by the thread that sends it; what the delivery sends in turn is delivered after it, not
//! inside it, so that agents that answer each other at once do not pile up on the stack.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use crate::sync::Mutex;
use tensorcall_proto::ids::Identity;
use tensorcall_proto::wire::Descriptor;
use tensorcall_proto::wire::limits::Limits;

use super::{Address, Closed, Events, Inbound, Link, LinkId, Outbound, Transport};
use crate::body::Body;

/// Endpoints that can reach each other.
#[derive(Default)]
pub struct Hub {
    endpoints: Mutex<HashMap<u64, Endpoint>>,
    next: AtomicU64,
    messages: AtomicU64,
}

struct Endpoint {
    identity: Identity,
    events: Weak<dyn Events>,
    /// Links that this endpoint is an end of. Under one lock with the endpoint itself, so that none is
    /// made to an endpoint that has just closed all of its links.
    links: Vec<Weak<Pair>>,
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hub").field("endpoints", &self.endpoints.lock().len()).finish_non_exhaustive()
    }
}

impl Hub {
    /// A hub without endpoints.
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Messages that endpoints have sent each other, or themselves, so far.
    pub fn messages(&self) -> u64 {
        self.messages.load(Ordering::Relaxed)
    }

    /// A transport of the worker `me`, who hears of messages through `events`.
    pub(crate) fn join(
        self: &Arc<Self>,
        me: Identity,
        events: Weak<dyn Events>,
        limits: Limits,
    ) -> MemoryTransport {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.endpoints.lock().insert(number, Endpoint { identity: me.clone(), events, links: Vec::new() });
        MemoryTransport { hub: Arc::clone(self), number, me, limits }
    }
}

/// The first of `candidates` that is `peer` and lives.
fn find(
    endpoints: &HashMap<u64, Endpoint>,
    candidates: &[Address],
    peer: &Identity,
) -> Option<(u64, Arc<dyn Events>)> {
    candidates.iter().find_map(|address| match address {
        Address::Memory(number) => {
            let endpoint = endpoints.get(number).filter(|endpoint| endpoint.identity == *peer)?;
            Some((*number, endpoint.events.upgrade()?))
        }
        _ => None,
    })
}

impl Endpoint {
    fn add(&mut self, pair: &Arc<Pair>) {
        self.links.retain(|link| link.strong_count() > 0);
        self.links.push(Arc::downgrade(pair));
    }
}

/// One worker's end of a [`Hub`].
#[derive(Debug)]
pub(crate) struct MemoryTransport {
    hub: Arc<Hub>,
    number: u64,
    me: Identity,
    limits: Limits,
}

/// A link and its two ends.
struct Pair {
    hub: Arc<Hub>,
    limits: Limits,
    open: AtomicBool,
    ends: [End; 2],
}

struct End {
    link: LinkId,
    events: Weak<dyn Events>,
}

/// The end `side` of a pair.
struct MemoryLink {
    pair: Arc<Pair>,
    side: usize,
}

impl std::fmt::Debug for Pair {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pair").field("open", &self.open).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for MemoryLink {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryLink").field("link", &self.pair.ends[self.side].link).finish_non_exhaustive()
    }
}

impl Transport for MemoryTransport {
    fn addresses(&self) -> Vec<Address> {
        vec![Address::Memory(self.number)]
    }

    fn reaches(&self, peer: &Identity, address: &Address) -> bool {
        // Numbers repeat in other processes; lives do not.
        let Address::Memory(number) = address else { return false };
        self.hub.endpoints.lock().get(number).is_some_and(|endpoint| endpoint.identity == *peer)
    }

    fn connect(&self, link: LinkId, peer: &Identity, candidates: Vec<Address>) -> Arc<dyn Link> {
        let mut endpoints = self.hub.endpoints.lock();
        let own = endpoints.get(&self.number).map(|endpoint| endpoint.events.clone());
        let there = find(&endpoints, &candidates, peer);
        let open = own.is_some() && there.is_some();
        let mine = End { link, events: own.clone().unwrap_or_else(nobody) };
        let theirs = match &there {
            Some((_, events)) => End { link: events.next_link(), events: Arc::downgrade(events) },
            None => End { link, events: nobody() },
        };
        let (hub, limits) = (Arc::clone(&self.hub), self.limits);
        let pair = Arc::new(Pair { hub, limits, open: AtomicBool::new(open), ends: [mine, theirs] });
        for number in there.iter().map(|&(number, _)| number).chain([self.number]) {
            endpoints.get_mut(&number).into_iter().for_each(|endpoint| endpoint.add(&pair));
        }
        drop(endpoints);
        if let Some((_, events)) = there.filter(|_| open) {
            let handle = Arc::new(MemoryLink { pair: Arc::clone(&pair), side: 1 });
            let (number, me) = (pair.ends[1].link, self.me.clone());
            deliver(Box::new(move || events.accepted(number, me, handle)));
        }
        if let Some(events) = own.and_then(|events| events.upgrade()) {
            let why = Closed { was_open: false, reason: "no such endpoint in this process".to_owned() };
            deliver(Box::new(move || if open { events.opened(link) } else { events.closed(link, why) }));
        }
        Arc::new(MemoryLink { pair, side: 0 })
    }

    fn stop(&self, _limit: Instant) {
        let endpoint = self.hub.endpoints.lock().remove(&self.number);
        let links = endpoint.map(|endpoint| endpoint.links).unwrap_or_default();
        for pair in links.iter().filter_map(Weak::upgrade) {
            pair.close();
        }
    }
}

impl Pair {
    fn close(&self) {
        if !self.open.swap(false, Ordering::AcqRel) {
            return;
        }
        for end in &self.ends {
            if let Some(events) = end.events.upgrade() {
                let (link, why) =
                    (end.link, Closed { was_open: true, reason: "closed by the peer".to_owned() });
                deliver(Box::new(move || events.closed(link, why)));
            }
        }
    }
}

impl Link for MemoryLink {
    fn send(&self, message: Outbound) -> bool {
        if !self.pair.open.load(Ordering::Acquire) {
            return false;
        }
        let there = &self.pair.ends[1 - self.side];
        match transfer(message, &self.pair.limits) {
            Ok(inbound) => {
                let Some(events) = there.events.upgrade() else {
                    self.pair.close();
                    return false;
                };
                let link = there.link;
                self.pair.hub.messages.fetch_add(1, Ordering::Relaxed);
                deliver(Box::new(move || events.received(link, &mut vec![inbound])));
                true
            }
            Err(error) => {
                tracing::error!(%error, "message in memory not delivered");
                self.pair.close();
                false
            }
        }
    }

    fn keep_alive(&self, _now: Instant, _limit: Duration) {}

    fn close(&self, _limit: Instant) {
        self.pair.close();
    }
}

/// The message as the other side gets it: written, read and checked as on every transport.
fn transfer(message: Outbound, limits: &Limits) -> Result<Inbound, Box<dyn std::error::Error>> {
    let (descriptor, payload, buffers) = message.describe();
    let descriptor = Descriptor::decode(&descriptor.encode(), limits)?;
    let Descriptor { message, tensors, rrefs, .. } = descriptor;
    let body = Body { payload, tensors, buffers, ..Body::default() }.receive()?;
    Ok(Inbound { message, body, rrefs })
}

fn nobody() -> Weak<dyn Events> {
    Weak::<Nobody>::new()
}

/// Stands for an end that is gone.
struct Nobody;

impl Events for Nobody {
    fn next_link(&self) -> LinkId {
        LinkId(0)
    }
    fn accepted(&self, _: LinkId, _: Identity, _: Arc<dyn Link>) {}
    fn opened(&self, _: LinkId) {}
    fn received(&self, _: LinkId, _: &mut Vec<Inbound>) {}
    fn sent(&self, _: LinkId, _: tensorcall_proto::ids::MessageId) {}
    fn closed(&self, _: LinkId, _: Closed) {}
    fn tick(&self, _: Instant) {}
}

type Delivery = Box<dyn FnOnce()>;

thread_local! {
    static PENDING: RefCell<VecDeque<Delivery>> = const { RefCell::new(VecDeque::new()) };
    static DELIVERING: Cell<bool> = const { Cell::new(false) };
}

/// Makes a delivery now, or after the one that this thread is making.
fn deliver(delivery: Delivery) {
    PENDING.with_borrow_mut(|pending| pending.push_back(delivery));
    if DELIVERING.replace(true) {
        return;
    }
    while let Some(next) = PENDING.with_borrow_mut(VecDeque::pop_front) {
        next();
    }
    DELIVERING.set(false);
}
