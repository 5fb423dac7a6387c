//! From handles to machines and back: making references, sharing, receiving and reading them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tensorcall_proto::ids::{ForkId, Identity, Life, RRefId, Rank};
use tensorcall_proto::rref::{Created, Found, NewRRef, RRefDesc, RRefError, Wait};
use tensorcall_proto::wire::message::{Encoding, FailureKind, FunctionRef};

use super::{Inner, State, Stored, Waiter};
use crate::agent::serve::Task;
use crate::agent::{CallError, Request};
use crate::body::Body;
use crate::error::{Error, ErrorKind, Result};
use crate::future::{Response, RpcFuture, promise};
use crate::rref::{Kept, RRef, RRefState, Role};

/// What PyTorch says of a creation that was not answered in time; programs match it.
const CREATION_TIMED_OUT: &str = "RRef creation via rpc.remote() timed out, and it is possible that the RRef \
     on the owner node does not exist.";

impl Inner {
    /// A handle for what a call to `to` will create. It means nothing until that call is made.
    pub(in crate::agent) fn new_rref(&self, to: Rank) -> Result<RRef> {
        let peer = self.peer(to)?;
        let (me, owner) = (self.me.life(), peer.life());
        let local = self.rrefs.next_local();
        // The owner's own reference needs no fork.
        let (fork, role) =
            if owner == me { (local, Role::Owner) } else { (self.rrefs.next_local(), Role::User) };
        let (rref, fork) = (RRefId::new(me, local), ForkId::new(me, fork));
        Ok(RRef::new(self.this.clone(), rref, fork, owner, Some(peer.name().clone()), role))
    }

    /// A reference to a value of this worker. It enters the table when it is first shared.
    pub(in crate::agent) fn local_rref(&self, kept: Kept, label: &str) -> RRef {
        let (me, local) = (self.me.life(), self.rrefs.next_local());
        let role = Role::Local { kept, label: label.into(), shared: AtomicBool::new(false) };
        let (rref, fork) = (RRefId::new(me, local), ForkId::new(me, local));
        RRef::new(self.this.clone(), rref, fork, me, Some(self.me.name.clone()), role)
    }

    /// The creating call is about to be sent. May be called with a peer's state locked.
    pub(in crate::agent) fn begin_creation(&self, rref: &RRef) -> NewRRef {
        let new = NewRRef { rref: rref.id(), fork: rref.fork_id() };
        // Neither has effects, so nothing is left to do.
        let mut state = self.rrefs.state.lock();
        if rref.is_owner() {
            state.owner.create_pending(new.rref);
        } else {
            state.user.create(new, rref.owner());
        }
        new
    }

    /// The creating call has its outcome.
    pub(in crate::agent) fn end_creation(&self, rref: &RRef, outcome: &Result<Response>) {
        let fork = rref.fork_id();
        let waiting = self.with_rrefs(|state| match outcome {
            Ok(_) if rref.is_owner() => None,
            Ok(_) => {
                // Raised or not: the owner knows the fork.
                state.user.creation_done(fork, rref.owner());
                None
            }
            Err(error) => {
                let text = match error.kind() {
                    ErrorKind::Timeout => CREATION_TIMED_OUT.to_owned(),
                    _ => {
                        format!("RRef creation via rpc.remote() failed: {rref} could not be created: {error}")
                    }
                };
                state.failures.insert(fork, Error::new(ErrorKind::RRef, text));
                if !rref.is_owner() {
                    state.user.creation_failed(fork);
                    return None;
                }
                if error.kind() == ErrorKind::Io {
                    // The call was never sent.
                    state.owner.abandon(rref.id());
                }
                state.local.remove(&rref.id())
            }
        });
        if let Some(waiting) = waiting {
            waiting.complete_empty();
        }
    }

    /// The answer of a creating call came after the call was given up: its owner counts the fork.
    pub(in crate::agent) fn late_creation(&self, fork: ForkId, owner: Life) {
        self.with_rrefs(|state| state.user.creation_done(fork, owner));
    }

    /// A worker asks to keep the result of a call. Tells whether the call is to run.
    pub(in crate::agent) fn create(&self, new: NewRRef, caller: &Identity, function: Option<&str>) -> bool {
        let holder = caller.life();
        let label = function.unwrap_or("a pickled function");
        self.with_rrefs(|state| {
            let runs = match state.owner.create(new.rref, new.fork, holder) {
                Created::New => true,
                // Of this worker's own creations it knew before.
                Created::Again => holder == self.me.life(),
                Created::Refused => false,
            };
            if runs {
                state.creating.insert(new.rref, label.into());
            }
            runs
        })
    }

    /// The result of a call that creates is there.
    pub(in crate::agent) fn resolve(&self, rref: RRefId, kept: Kept) {
        self.with_rrefs(|state| {
            let label = state.creating.remove(&rref).unwrap_or_else(|| "".into());
            state.owner.resolve(rref, Stored { kept, label });
        });
    }

    /// A request that was to create something is over without having run.
    pub(in crate::agent) fn never_created(&self, task: Task, kind: FailureKind, text: &str) {
        if let Task::Create(rref) = task {
            self.resolve(rref, Kept::failed(kind, text));
        }
    }

    /// Shares references with `to`, in a message that is about to be sent.
    ///
    /// # Errors
    ///
    /// Says which of them cannot be shared; then none is.
    pub(in crate::agent) fn fork_all(&self, rrefs: &[RRef], to: Life) -> Result<Vec<RRefDesc>> {
        if rrefs.is_empty() {
            return Ok(Vec::new());
        }
        let me = self.me.life();
        self.with_rrefs(|state| {
            let mut forks = Vec::with_capacity(rrefs.len());
            for rref in rrefs {
                let fork = ForkId::new(me, self.rrefs.next_local());
                let forked = if rref.is_of(&self.this) {
                    let forked = match rref.role() {
                        Role::User => state.user.fork_out(rref.fork_id(), fork, to),
                        role => {
                            state.share(rref, role);
                            state.owner.fork_out(rref.id(), fork, to)
                        }
                    };
                    forked.map_err(|error| self.rref_error(state, rref, error, "call fork an UserRRef"))
                } else {
                    Err(Error::usage(format!("{rref} belongs to another agent")))
                };
                match forked {
                    Ok(desc) => forks.push(desc),
                    Err(error) => {
                        state.unsent(&forks);
                        return Err(error);
                    }
                }
            }
            Ok(forks)
        })
    }

    /// The message with these forks was never sent.
    pub(in crate::agent) fn forks_unsent(&self, forks: &[RRefDesc]) {
        if !forks.is_empty() {
            self.with_rrefs(|state| state.unsent(forks));
        }
    }

    /// References arrive in a message of `from`.
    pub(in crate::agent) fn receive_rrefs(&self, from: Life, rrefs: Vec<RRefDesc>) -> Vec<RRef> {
        let me = self.me.life();
        let descs = rrefs.clone();
        self.with_rrefs(|state| {
            state.activity += 1;
            for desc in descs {
                if desc.owner == me {
                    state.owner.received_back(desc, from);
                } else {
                    state.user.receive(desc, from);
                }
            }
        });
        let name_of = |life: Life| {
            let peer = self.members.get()?.get(life.rank).filter(|peer| peer.life() == life)?;
            Some(peer.name().clone())
        };
        let handle = |RRefDesc { rref, owner, fork }| {
            let role = if owner == me { Role::Owner } else { Role::User };
            RRef::new(self.this.clone(), rref, fork, owner, name_of(owner), role)
        };
        rrefs.into_iter().map(handle).collect()
    }

    pub(crate) fn is_confirmed(&self, rref: &RRef) -> bool {
        let standing = self.rrefs.state.lock().user.standing(rref.fork_id());
        standing.is_some_and(|standing| standing.confirmed)
    }

    pub(crate) fn rref_state(&self, rref: &RRef) -> RRefState {
        if rref.is_owner() {
            let failed = self.rrefs.state.lock().failures.contains_key(&rref.fork_id());
            return if failed { RRefState::Failed } else { RRefState::Alive };
        }
        match self.rrefs.state.lock().user.standing(rref.fork_id()).map(|standing| standing.error) {
            Some(None) => RRefState::Alive,
            None | Some(Some(RRefError::Deleted)) => RRefState::Deleted,
            Some(Some(_)) => RRefState::Failed,
        }
    }

    /// The value of a reference whose owner is this worker, if it is there yet.
    pub(crate) fn kept(&self, rref: &RRef) -> Result<Option<Kept>> {
        let state = self.rrefs.state.lock();
        if let Some(failure) = state.failures.get(&rref.fork_id()) {
            return Err(failure.clone());
        }
        match state.owner.lookup(rref.id()) {
            Found::Ready(stored) => Ok(Some(stored.kept)),
            Found::Waiting if state.closed => Err(Error::shutting_down()),
            Found::Waiting => Ok(None),
            Found::Gone(error) => Err(self.rref_error(&state, rref, error, "call local_value() on it")),
        }
    }

    /// Completes when [`kept`](Self::kept) has something to say. All who wait for a value share one future.
    pub(crate) fn when_kept(&self, rref: &RRef) -> RpcFuture {
        let id = rref.id();
        self.with_rrefs(|state| {
            if let Some(promise) = state.local.get(&id) {
                return promise.future();
            }
            let (promise, future) = promise();
            match state.owner.wait(id, Waiter::Local(id)) {
                Wait::Waiting if !state.closed => {
                    state.local.insert(id, promise);
                }
                _ => {
                    promise.complete_empty();
                }
            }
            future
        })
    }

    /// Asks the owner for a copy of the value.
    pub(crate) fn fetch(&self, rref: &RRef, label: &str, timeout: Option<Duration>) -> Result<RpcFuture> {
        self.prepare_fetch(rref)?;
        let request = Request {
            function: FunctionRef::Fetch(rref.id()),
            label: label.into(),
            encoding: Encoding::Value,
            body: Body::default(),
            timeout,
            deadline: None,
            creates: None,
        };
        let future = self.call(rref.owner().rank, request).map_err(|error| match error {
            CallError::Failed(error) => error,
            CallError::Full(_) => Error::usage("a fetch is never held back"),
        })?;
        // The value must stay until the answer is there.
        let kept = rref.clone();
        future.on_done(move || drop(kept));
        Ok(future)
    }

    /// Whether a reference can be passed on; if not, why.
    pub(crate) fn check_usable(&self, rref: &RRef) -> Result<()> {
        let what = "call fork an UserRRef";
        let state = self.rrefs.state.lock();
        if rref.is_owner() {
            return state.failures.get(&rref.fork_id()).map_or(Ok(()), |failure| Err(failure.clone()));
        }
        match state.user.standing(rref.fork_id()).map(|standing| standing.error) {
            Some(None) => Ok(()),
            Some(Some(error)) => Err(self.rref_error(&state, rref, error, what)),
            None => Err(rref.deleted(what)),
        }
    }

    fn prepare_fetch(&self, rref: &RRef) -> Result<()> {
        let what = "call to_here() on it";
        let mut state = self.rrefs.state.lock();
        match rref.role() {
            Role::User => match state.user.standing(rref.fork_id()).map(|standing| standing.error) {
                Some(None) => Ok(()),
                Some(Some(error)) => Err(self.rref_error(&state, rref, error, what)),
                None => Err(rref.deleted(what)),
            },
            role => {
                state.share(rref, role);
                Ok(())
            }
        }
    }

    /// Why `what` cannot be done with a reference, for a person.
    fn rref_error(&self, state: &State, rref: &RRef, error: RRefError, what: &str) -> Error {
        let text = match error {
            RRefError::Deleted => return rref.deleted(what),
            RRefError::CreationFailed => match state.failures.get(&rref.fork_id()) {
                Some(failure) => return failure.clone(),
                None => format!("{rref} could not be created"),
            },
            error => format!("{rref} cannot be used: {}", self.describe(error)),
        };
        Error::new(ErrorKind::RRef, text)
    }

    /// What went wrong, with the names of workers.
    pub(super) fn describe(&self, error: RRefError) -> String {
        match error {
            RRefError::OwnerLost(life) => match self.members.get().and_then(|members| members.get(life.rank))
            {
                Some(peer) if peer.life() == life => {
                    format!("its owner, worker '{}' (rank {}), is lost or has left", peer.name(), life.rank)
                }
                _ => format!("its owner, an earlier worker of rank {}, is lost", life.rank),
            },
            error => error.to_string(),
        }
    }
}

impl State {
    /// Enters a value that was made here into the table, when it is first shared.
    fn share(&mut self, rref: &RRef, role: &Role) {
        if let Role::Local { kept, label, shared } = role
            && !shared.swap(true, Ordering::Relaxed)
        {
            let stored = Stored { kept: kept.clone(), label: Arc::clone(label) };
            self.owner.create_local(rref.id(), stored);
        }
    }

    fn unsent(&mut self, forks: &[RRefDesc]) {
        for desc in forks {
            self.user.unsent(desc.fork);
            self.owner.unsent(desc.fork);
        }
    }
}
