//! Deleting all references at shutdown, and what is left over.

use std::sync::Arc;
use std::time::Instant;

use tensorcall_proto::ids::{ForkId, Life, RRefId};
use tensorcall_proto::rref::Found;
use tensorcall_proto::wire::message::FailureKind;

use super::{Inner, State};

/// How many references an agent has, as PyTorch counts them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RRefCounts {
    /// Values here that others refer to, or whose functions have not returned.
    pub owners: usize,
    /// References to values of others that their owners do not know of yet.
    pub pending_users: usize,
    /// Messages about references that are not answered.
    pub pending_futures: usize,
    /// References that others have to values of this worker.
    pub forks: usize,
}

/// A reference that is left over at the end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Leak {
    /// The value.
    pub rref: RRefId,
    /// The reference to it.
    pub fork: ForkId,
    /// Who has it.
    pub holder: Life,
    /// Where the value comes from.
    pub label: Arc<str>,
}

impl Inner {
    /// Numbers about references.
    pub(in crate::agent) fn rref_counts(&self) -> RRefCounts {
        self.drain_releases();
        let state = self.rrefs.state.lock();
        let (owner, user) = (state.owner.counts(), state.user.counts());
        RRefCounts {
            owners: state.owner.shared(),
            pending_users: user.pending_users,
            pending_futures: user.unacknowledged + owner.unacknowledged,
            forks: owner.forks,
        }
    }

    /// Waits until `limit` for every reference and everything shared to be known to its owner; tells
    /// whether it is.
    pub(in crate::agent) fn rrefs_settled(&self, limit: Option<Instant>) -> bool {
        self.watch_rrefs(limit, |state| {
            let user = state.user.counts();
            user.pending_users == 0 && user.pending_children == 0 && state.owner.counts().unacknowledged == 0
        })
    }

    /// Deletes all references that this worker has to values of others, whoever has a handle still.
    pub(in crate::agent) fn delete_all_rrefs(&self) {
        self.with_rrefs(|state| state.user.delete_all());
    }

    /// Waits until `limit` for all references of this worker to be gone and, if `others` says so, for those
    /// that others have to its values; tells whether they are.
    pub(in crate::agent) fn rrefs_gone(&self, others: bool, limit: Option<Instant>) -> bool {
        self.watch_rrefs(limit, |state| {
            let user = state.user.counts();
            user.users == 0 && user.unacknowledged == 0 && !(others && state.owner.counts().forks > 0)
        })
    }

    /// References of others to values of this worker, also of those that have left since with references.
    pub(in crate::agent) fn rref_leaks(&self) -> Vec<Leak> {
        let state = self.rrefs.state.lock();
        let mut leaks = state.left.clone();
        leaks.extend(state.owner.forks().map(|fork| state.leak(fork)));
        leaks.sort_unstable_by_key(|leak| (leak.rref, leak.fork));
        leaks
    }

    /// The agent is closed: nothing comes any more that something could wait for. Handles stay readable.
    pub(in crate::agent) fn close_rrefs(&self) {
        let others: Vec<_> = self.peers().iter().map(|peer| peer.life()).collect();
        let mut state = self.rrefs.state.lock();
        state.closed = true;
        let (held, waits) = state.take_waits();
        state.user.delete_all();
        for life in others.into_iter().filter(|life| *life != self.me.life()) {
            state.user.handle_lost(life);
            state.owner.handle_lost(life);
        }
        state.take_releases(&self.rrefs.releases);
        let (_, dropped) = state.take_effects();
        self.rrefs.changed.notify_all();
        drop(state);
        if !dropped.is_empty() {
            self.pool.spawn(Box::new(move || drop(dropped)));
        }
        for (_, promise) in waits {
            promise.complete_empty();
        }
        for pending in held {
            pending.refuse(FailureKind::ShuttingDown, "the worker is shutting down".to_owned());
        }
    }

    fn watch_rrefs(&self, limit: Option<Instant>, is_so: impl Fn(&State) -> bool) -> bool {
        self.drain_releases();
        let mut state = self.rrefs.state.lock();
        state.watched += 1;
        let mut there = is_so(&state);
        while !there && !state.closed {
            let timed_out = match limit {
                None => {
                    self.rrefs.changed.wait(&mut state);
                    false
                }
                Some(limit) => self.rrefs.changed.wait_until(&mut state, limit).timed_out(),
            };
            there = is_so(&state);
            if timed_out {
                break;
            }
        }
        state.watched -= 1;
        there
    }
}

impl State {
    fn leak(&self, (rref, fork, holder): (RRefId, ForkId, Life)) -> Leak {
        Leak { rref, fork, holder, label: self.label(rref) }
    }

    /// A worker leaves in good order: what it still has, it should have given back.
    pub(super) fn note_left(&mut self, life: Life) {
        let leaks: Vec<_> =
            self.owner.forks().filter(|(.., holder)| *holder == life).map(|fork| self.leak(fork)).collect();
        self.left.extend(leaks);
    }

    fn label(&self, rref: RRefId) -> Arc<str> {
        match self.owner.lookup(rref) {
            Found::Ready(stored) => stored.label,
            _ => self.creating.get(&rref).cloned().unwrap_or_else(|| "".into()),
        }
    }
}
