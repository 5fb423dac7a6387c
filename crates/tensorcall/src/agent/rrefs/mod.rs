//! Driving [`proto::rref`](tensorcall_proto::rref): who owns, holds and shares references (RREF-1).
//!
//! - `mod.rs`: both machines under one lock, what they are told and what they ask for
//! - `held.rs`: requests that wait for a value or for references to be confirmed, without a thread
//! - `handles.rs`: from handles to machines and back: making, sharing, receiving, reading
//! - `ending.rs`: deleting all at shutdown, and what is left over
//! - `api.rs`: what an agent offers of this
//!
//! The lock is held for moments, never while calling out (LOCK-1), and after a peer's state where both
//! are held. Handles that are dropped do not take it: they leave a note for the next look (see
//! [`Releases`]).

mod api;
mod ending;
mod handles;
mod held;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crossbeam_queue::SegQueue;
use tensorcall_proto::ids::{ForkId, Life, RRefId};
use tensorcall_proto::rref::{Owner, OwnerEffect, RRefDesc, RRefError, RRefMessage, User, UserEffect};
use tensorcall_proto::serving::RequestKey;
use tensorcall_proto::wire::message::Message;

pub use self::ending::{Leak, RRefCounts};
use super::peers::Way;
use super::serve::{CallerLink, Pending};
use super::{Inner, LinkEntry};
use crate::clock::now;
use crate::error::{Error, ErrorKind};
use crate::future::Promise;
use crate::rref::Kept;
use crate::sync::{Condvar, Mutex};
use crate::transport::{Link, LinkId, Outbound};

/// How long a dropped handle, or an answer that nobody waits for, may wait for others: many make one
/// wake-up, and none comes between a call and its answer.
const GATHER: Duration = Duration::from_millis(1);

/// This worker's references.
pub(super) struct RRefs {
    state: Mutex<State>,
    /// Something happened that [`Inner::delete_rrefs`] may wait for.
    changed: Condvar,
    releases: Releases,
    next_local: AtomicU64,
}

struct State {
    owner: Owner<Stored, Waiter>,
    user: User<Waiter>,
    held: HashMap<RequestKey, Pending>,
    /// Of those in `held` that have one.
    deadlines: BTreeSet<(Instant, RequestKey)>,
    /// Who waits here for values of this worker.
    local: HashMap<RRefId, Promise>,
    /// Why the creation of a fork failed, in words.
    failures: HashMap<ForkId, Error>,
    /// Where the values come from whose creation runs, for the report of leaks.
    creating: HashMap<RRefId, Arc<str>>,
    /// Messages that go with the next ones of their kind.
    unhurried: Vec<(Life, RRefMessage)>,
    /// Messages to workers that are not known yet.
    early: Vec<(Life, RRefMessage)>,
    /// Messages sent and handled, and handles dropped: activity of a wave (TERM-1).
    activity: u64,
    /// References that workers took with them when they left.
    left: Vec<Leak>,
    /// Threads that wait for `changed`.
    watched: usize,
    closed: bool,
}

/// A value in the table.
#[derive(Clone)]
struct Stored {
    kept: Kept,
    /// Where it comes from.
    label: Arc<str>,
}

/// What waits for a machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Waiter {
    /// A held request.
    Request(RequestKey),
    /// Threads of this worker, for this value.
    Local(RRefId),
}

/// What to do once the lock is released.
enum Act {
    Send(Life, RRefMessage),
    Start(Pending, Option<Kept>),
    Fail(Pending, RRefError),
    Tell(Promise),
}

/// Handles that were dropped and whose machines have not been told.
///
/// Pushing is lock-free, and the first of a bunch has the reactor wake up a little later. So a handle may be
/// dropped by a finalizer, under any lock, on any thread.
#[derive(Default)]
struct Releases {
    queue: SegQueue<Release>,
    /// The reactor will look.
    asked: AtomicBool,
}

/// A handle is gone.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Release {
    /// One of another worker's value.
    Fork(ForkId),
    /// One of a value in this worker's table.
    Hold(RRefId),
}

impl RRefs {
    pub(super) fn new(me: Life) -> Self {
        let state = State {
            owner: Owner::new(me),
            user: User::new(me),
            held: HashMap::new(),
            deadlines: BTreeSet::new(),
            local: HashMap::new(),
            failures: HashMap::new(),
            creating: HashMap::new(),
            unhurried: Vec::new(),
            early: Vec::new(),
            activity: 0,
            left: Vec::new(),
            watched: 0,
            closed: false,
        };
        Self {
            state: Mutex::new(state),
            changed: Condvar::new(),
            releases: Releases::default(),
            next_local: AtomicU64::new(0),
        }
    }

    /// The next number for an id that this worker gives.
    pub(super) fn next_local(&self) -> u64 {
        self.next_local.fetch_add(1, Ordering::Relaxed)
    }
}

impl Inner {
    /// Tells the machines something, then does what they ask for.
    fn with_rrefs<R>(&self, tell: impl FnOnce(&mut State) -> R) -> R {
        self.with_rrefs_via(None, tell)
    }

    /// As [`with_rrefs`](Self::with_rrefs); what is for the worker whose message came over a link goes back
    /// that way.
    fn with_rrefs_via<R>(&self, via: Option<(Life, &CallerLink)>, tell: impl FnOnce(&mut State) -> R) -> R {
        // In sight of the waves until all that follows from it is (TERM-1).
        self.completing.fetch_add(1, Ordering::SeqCst);
        let mut state = self.rrefs.state.lock();
        let result = tell(&mut state);
        let (acts, dropped) = state.take_effects();
        if state.watched > 0 {
            self.rrefs.changed.notify_all();
        }
        let is_unhurried = !state.unhurried.is_empty();
        drop(state);
        if is_unhurried {
            self.look_soon();
        }
        if !dropped.is_empty() {
            self.pool.spawn(Box::new(move || drop(dropped)));
        }
        let mut lost = Vec::new();
        for act in acts {
            match act {
                Act::Send(to, message) => {
                    if !self.send_rref(to, message, via) && !lost.contains(&to) {
                        lost.push(to);
                    }
                }
                Act::Start(pending, kept) => self.start(pending, kept),
                Act::Fail(pending, error) => {
                    let error = Error::new(ErrorKind::RRef, self.describe(error));
                    self.fail_held(&pending, &error);
                }
                Act::Tell(promise) => {
                    promise.complete_empty();
                }
            }
        }
        for life in lost {
            self.rref_lost(life);
        }
        self.completing.fetch_sub(1, Ordering::SeqCst);
        result
    }

    /// Sends a message about references; false if that life of a worker is not there any more.
    fn send_rref(&self, to: Life, message: RRefMessage, via: Option<(Life, &CallerLink)>) -> bool {
        if self.is_closed() {
            // Who leaves says so, and that says it all.
            return true;
        }
        let mut outbound = Outbound::plain(Message::RRef(message));
        if self.fault_line.is_some()
            && let Some(peer) = self.members.get().and_then(|members| members.get(to.rank))
            && peer.life() == to
        {
            match self.hurt(&peer, outbound, 0) {
                Some(unhurt) => outbound = unhurt,
                None => return true,
            }
        }
        if let Some((_, link)) = via.filter(|(life, _)| *life == to) {
            link.handle.send(outbound);
            return true;
        }
        let peer = {
            // Under the lock, so that `admitted_rrefs` finds what is left for later.
            let mut rrefs = self.rrefs.state.lock();
            let peer = self.members.get().and_then(|members| members.get(to.rank));
            match peer.filter(|peer| peer.life() == to) {
                Some(peer) => peer,
                None if self.members.get().is_none_or(|members| members.may_come(to)) => {
                    rrefs.early.push((to, message));
                    return true;
                }
                None => return false,
            }
        };
        let state = peer.state.lock();
        if state.gone.is_some() {
            return false;
        }
        let has_way = !matches!(state.ways[0], Way::None);
        drop(state);
        // A worker that only answers others needs no link of its own.
        let link = if has_way { None } else { self.latest_link_of(to) };
        match link {
            Some(link) => link.send(outbound),
            None => self.post_now(&peer, outbound),
        };
        true
    }

    /// The link that a worker calls on, if it does: the youngest, since older ones may be broken.
    fn latest_link_of(&self, life: Life) -> Option<Arc<dyn Link>> {
        let links = self.links.lock();
        let of_life = links.iter().filter_map(|(id, entry)| match entry {
            LinkEntry::Accepted(peer, link) if peer.life() == life => Some((id, link)),
            _ => None,
        });
        of_life.max_by_key(|(id, _)| **id).map(|(_, link)| Arc::clone(link))
    }

    /// The group is known, or a worker has joined it.
    pub(super) fn admitted_rrefs(&self) {
        let early = std::mem::take(&mut self.rrefs.state.lock().early);
        self.send_rrefs(early);
    }

    fn send_rrefs(&self, messages: Vec<(Life, RRefMessage)>) {
        for (to, message) in messages {
            if !self.send_rref(to, message, None) {
                self.rref_lost(to);
            }
        }
    }

    /// A worker said something about references, over a link that it calls on or over ours.
    pub(super) fn rref_message(&self, from: Life, message: RRefMessage, via: Option<&CallerLink>) {
        self.with_rrefs_via(via.map(|link| (from, link)), |state| {
            state.activity += 1;
            if !state.user.handle_message(from, message) {
                state.owner.handle_message(from, message);
            }
        });
        self.became_idle();
    }

    /// These forks are in a request that takes this link of ours. Called with the peer's state locked: so it
    /// is not known yet that the link broke, if it did, and nothing follows now.
    pub(super) fn forks_take(&self, link: LinkId, forks: &[RRefDesc]) {
        if !forks.is_empty() {
            self.rrefs.state.lock().sent(link, forks);
        }
    }

    /// These forks are in a reply that takes this link.
    pub(super) fn forks_return(&self, link: LinkId, forks: &[RRefDesc]) {
        if !forks.is_empty() {
            self.with_rrefs(|state| state.sent(link, forks));
        }
    }

    /// A link with a worker broke: what was said on it may be lost.
    pub(super) fn rref_link_broken(&self, life: Life, link: LinkId) {
        if !self.is_closed() {
            self.with_rrefs(|state| {
                state.user.handle_link_broken(life, link.0);
                state.owner.handle_link_broken(life, link.0);
            });
        }
    }

    /// A worker leaves in good order.
    pub(super) fn rref_left(&self, life: Life) {
        self.rrefs.state.lock().note_left(life);
        self.rref_lost(life);
    }

    /// A life of a worker is gone for ever.
    pub(super) fn rref_lost(&self, life: Life) {
        self.with_rrefs(|state| {
            state.user.handle_lost(life);
            state.owner.handle_lost(life);
        });
        self.became_idle();
    }

    /// Notes that a handle was dropped. Takes no lock and never waits.
    pub(crate) fn release(&self, release: Release) {
        if !self.home.is_here() {
            return;
        }
        let releases = &self.rrefs.releases;
        releases.queue.push(release);
        if self.is_closed() {
            // The reactor looks no more.
            if let Some(mut state) = self.rrefs.state.try_lock() {
                state.take_releases(releases);
                let (_, dropped) = state.take_effects();
                drop(state);
                drop(dropped);
            }
        } else {
            self.look_soon();
        }
    }

    /// Has the reactor look after a while, if it is not about to.
    fn look_soon(&self) {
        if !self.rrefs.releases.asked.swap(true, Ordering::SeqCst) {
            self.schedule(now() + GATHER);
        }
    }

    /// Tells the machines of handles that were dropped.
    fn drain_releases(&self) {
        if !self.rrefs.releases.queue.is_empty() {
            self.with_rrefs(|state| state.take_releases(&self.rrefs.releases));
        }
    }

    /// Deadlines of held requests, and handles that were dropped.
    pub(super) fn tick_rrefs(&self, now: Instant) {
        if self.rrefs.releases.asked.swap(false, Ordering::SeqCst) {
            self.drain_releases();
            let unhurried = std::mem::take(&mut self.rrefs.state.lock().unhurried);
            self.send_rrefs(unhurried);
        }
        self.expire_held(now);
    }

    /// Messages about references that are not answered: outstanding, for a wave (TERM-1).
    pub(super) fn rrefs_outstanding(&self) -> usize {
        self.drain_releases();
        let state = self.rrefs.state.lock();
        state.user.counts().unacknowledged + state.owner.counts().unacknowledged
    }

    /// What ever happened to references: activity, for a wave (TERM-1).
    pub(super) fn rref_activity(&self) -> u64 {
        self.rrefs.state.lock().activity
    }

    /// A value that is not needed here, but may be the last of its kind.
    pub(super) fn bury(&self, kept: Option<Kept>) {
        if let Some(Kept::Value(value)) = kept {
            self.pool.spawn(Box::new(move || drop(value)));
        }
    }
}

impl State {
    /// What is to be done, and values to drop: on a pool thread, where user code may run (MEM-2).
    fn take_effects(&mut self) -> (Vec<Act>, Vec<Stored>) {
        let (mut acts, mut dropped) = (Vec::new(), Vec::new());
        while let Some(effect) = self.owner.poll_effect() {
            match effect {
                OwnerEffect::Send(to, message) => acts.extend(self.sends(to, message)),
                OwnerEffect::Ready(waiter, stored) => acts.extend(self.waited(waiter, Ok(stored))),
                OwnerEffect::Failed(waiter, error) => acts.extend(self.waited(waiter, Err(error))),
                OwnerEffect::Drop(stored) => dropped.push(stored),
            }
        }
        while let Some(effect) = self.user.poll_effect() {
            match effect {
                UserEffect::Send(to, message) => acts.extend(self.sends(to, message)),
                UserEffect::Confirmed(Waiter::Request(key)) => {
                    acts.extend(self.take_held(key).map(|pending| Act::Start(pending, None)));
                }
                UserEffect::Unconfirmed(Waiter::Request(key), _, error) => {
                    acts.extend(self.take_held(key).map(|pending| Act::Fail(pending, error)));
                }
                UserEffect::Confirmed(Waiter::Local(_)) | UserEffect::Unconfirmed(Waiter::Local(_), ..) => {}
            }
        }
        (acts, dropped)
    }

    fn sent(&mut self, link: LinkId, forks: &[RRefDesc]) {
        for desc in forks {
            self.user.sent(desc.fork, link.0);
            self.owner.sent(desc.fork, link.0);
        }
    }

    fn take_releases(&mut self, releases: &Releases) {
        while let Some(release) = releases.queue.pop() {
            self.activity += 1;
            match release {
                Release::Fork(fork) => {
                    self.failures.remove(&fork);
                    self.user.release(fork);
                }
                Release::Hold(rref) => {
                    self.failures.remove(&ForkId {
                        creator: rref.creator,
                        incarnation: rref.incarnation,
                        local: rref.local,
                    });
                    self.owner.release(rref);
                }
            }
        }
    }

    /// What is to be sent now. Nobody waits for the rest.
    fn sends(&mut self, to: Life, message: RRefMessage) -> Option<Act> {
        self.activity += 1;
        match message {
            RRefMessage::Accept { .. } | RRefMessage::Accepted { .. } | RRefMessage::Deleted { .. } => {
                self.unhurried.push((to, message));
                None
            }
            _ => Some(Act::Send(to, message)),
        }
    }
}
