//! Messages between agents of one process: for calls to oneself, and for tests.
//!
//! Tensor memory is copied, as by every transport: sender and receiver never share any. A message is
//! delivered by the thread that sends it; what the delivery sends in turn is delivered after it, not
//! inside it, so that agents that answer each other at once do not pile up on the stack.

use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tensorcall_proto::ids::Identity;
use tensorcall_proto::wire::limits::Limits;
use tensorcall_proto::wire::Descriptor;

use super::{Address, Closed, Events, Link, LinkId, Outbound, Transport};
use crate::body::{Body, Received};

/// Endpoints that can reach each other.
#[derive(Default)]
pub struct Hub {
    endpoints: Mutex<HashMap<u64, Endpoint>>,
    next: std::sync::atomic::AtomicU64,
}

struct Endpoint {
    identity: Identity,
    events: Weak<dyn Events>,
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

    /// A transport of the worker `me`, who hears of messages through `events`.
    pub(crate) fn join(self: &Arc<Self>, me: Identity, events: Weak<dyn Events>, limits: Limits) -> MemoryTransport {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        self.endpoints.lock().insert(number, Endpoint { identity: me.clone(), events });
        MemoryTransport { hub: Arc::clone(self), number, me, limits, links: Mutex::default() }
    }

    fn find(&self, candidates: &[Address], peer: &Identity) -> Option<Arc<dyn Events>> {
        let endpoints = self.endpoints.lock();
        candidates.iter().find_map(|address| match address {
            Address::Memory(number) => {
                let endpoint = endpoints.get(number).filter(|endpoint| endpoint.identity == *peer)?;
                endpoint.events.upgrade()
            }
            _ => None,
        })
    }
}

/// One worker's end of a [`Hub`].
#[derive(Debug)]
pub(crate) struct MemoryTransport {
    hub: Arc<Hub>,
    number: u64,
    me: Identity,
    limits: Limits,
    links: Mutex<Vec<Weak<Pair>>>,
}

/// A link and its two ends.
struct Pair {
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
        let own = self.hub.endpoints.lock().get(&self.number).map(|endpoint| endpoint.events.clone());
        let there = self.hub.find(&candidates, peer);
        let open = own.is_some() && there.is_some();
        let mine = End { link, events: own.clone().unwrap_or_else(nobody) };
        let theirs = match &there {
            Some(events) => End { link: events.next_link(), events: Arc::downgrade(events) },
            None => End { link, events: nobody() },
        };
        let pair = Arc::new(Pair { limits: self.limits, open: AtomicBool::new(open), ends: [mine, theirs] });
        self.links.lock().push(Arc::downgrade(&pair));
        if let Some(events) = there.filter(|_| open) {
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
        self.hub.endpoints.lock().remove(&self.number);
        let links = std::mem::take(&mut *self.links.lock());
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
                let (link, why) = (end.link, Closed { was_open: true, reason: "closed by the peer".to_owned() });
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
            Ok((descriptor, body)) => {
                if let Some(events) = there.events.upgrade() {
                    let link = there.link;
                    deliver(Box::new(move || events.received(link, descriptor.message, body)));
                }
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
fn transfer(message: Outbound, limits: &Limits) -> Result<(Descriptor, Received), Box<dyn std::error::Error>> {
    let (descriptor, payload, buffers) = message.describe();
    let descriptor = Descriptor::decode(&descriptor.encode(), limits)?;
    let body = Body { payload, tensors: descriptor.tensors.clone(), buffers }.receive()?;
    Ok((descriptor, body))
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
    fn received(&self, _: LinkId, _: tensorcall_proto::wire::message::Message, _: Received) {}
    fn sent(&self, _: LinkId, _: tensorcall_proto::ids::MessageId) {}
    fn closed(&self, _: LinkId, _: Closed) {}
    fn next_tick(&self) -> Option<Instant> {
        None
    }
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
