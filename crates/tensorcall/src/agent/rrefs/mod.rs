//! Driving [`proto::rref`](tensorcall_proto::rref): who owns, holds and shares references (RREF-1).
//!
//! - `mod.rs`: both machines under one lock, what they are told and what they ask for
//! - `held.rs`: requests that wait for a value or for references to be confirmed, without a thread
//! - `handles.rs`: from handles to machines and back: making, sharing, receiving, reading
//! - `messages.rs`: what workers say to each other about references
//! - `releases.rs`: handles that are dropped
//! - `ending.rs`: deleting all at shutdown, and what is left over
//! - `api.rs`: what an agent offers of this
//!
//! The lock is held for moments, never while calling out (LOCK-1), and after a peer's state where both
//! are held. Handles that are dropped do not take it: they leave a note for the next look
//! ([`Releases`]).

mod api;
mod ending;
mod handles;
mod held;
mod messages;
mod releases;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use tensorcall_proto::ids::{ForkId, Life, RRefId};
use tensorcall_proto::rref::{Owner, OwnerEffect, RRefError, RRefMessage, User, UserEffect};
use tensorcall_proto::serving::RequestKey;

pub use self::ending::{Leak, RRefCounts};
pub(crate) use self::releases::Release;
use self::releases::Releases;
use super::Inner;
use super::serve::{CallerLink, Pending};
use crate::error::{Error, ErrorKind};
use crate::future::Promise;
use crate::rref::Kept;
use crate::sync::{Condvar, Mutex};

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
                    self.fail_held(pending, &error);
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
}
