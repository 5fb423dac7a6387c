//! Requests that wait without a thread: for a value that is not there yet, or until the owners of the
//! references in their arguments know of them.

use std::time::Instant;

use tensorcall_proto::ids::RRefId;
use tensorcall_proto::rref::{RRefError, Wait};
use tensorcall_proto::serving::{CancelOutcome, RequestKey, Start};
use tensorcall_proto::wire::message::FailureKind;

use super::{Act, Inner, State, Stored, Waiter};
use crate::agent::serve::{Pending, Task};
use crate::clock::now;
use crate::error::{Error, ErrorKind};
use crate::rref::{Kept, RRef};
use crate::transport::LinkId;

/// What became of a request that may have to wait.
enum Turn {
    Starts(Pending, Option<Kept>),
    Fails(Pending, RRefError),
    /// It waits, until then.
    Held(Option<Instant>),
}

impl Inner {
    /// Starts a request as soon as what it needs is there.
    pub(in crate::agent) fn start_when_ready(&self, pending: Pending) {
        let turn = self.with_rrefs(|state| state.turn(pending));
        match turn {
            Turn::Starts(pending, kept) => self.start(pending, kept),
            Turn::Fails(pending, error) => {
                let error = Error::new(ErrorKind::RRef, self.describe(error));
                self.fail_held(pending, &error);
            }
            Turn::Held(deadline) => {
                if let Some(deadline) = deadline {
                    self.schedule(deadline);
                }
            }
        }
    }

    /// What a request waited for will never be.
    pub(super) fn fail_held(&self, pending: Pending, error: &Error) {
        let start = self.serving.lock().start(pending.key, now());
        match start {
            Start::Gone => self.never_created(pending.task, FailureKind::Cancelled, "cancelled"),
            Start::Expired(()) => self.expire_request(&pending),
            Start::Run(()) => {
                let text = match pending.task {
                    Task::Fetch(rref) => format!("there is no value for {rref}: {error}"),
                    Task::Call | Task::Create(_) => format!("an RRef in the arguments is of no use: {error}"),
                };
                pending.start(self.this.clone()).1.failed(FailureKind::Internal, text);
            }
        }
    }

    /// Answers held requests whose time is over, so that nobody counts on them any more.
    pub(super) fn expire_held(&self, now: Instant) {
        let (expired, next) = self.with_rrefs(|state| {
            let mut expired = Vec::new();
            while let Some(&(deadline, key)) = state.deadlines.first() {
                if deadline > now {
                    break;
                }
                state.deadlines.pop_first();
                expired.extend(state.forget(key));
            }
            (expired, state.deadlines.first().map(|&(deadline, _)| deadline))
        });
        if let Some(next) = next {
            self.schedule(next);
        }
        for pending in expired {
            let start = self.serving.lock().start(pending.key, now);
            match start {
                Start::Gone => self.never_created(pending.task, FailureKind::Cancelled, "cancelled"),
                Start::Expired(()) => self.expire_request(&pending),
                Start::Run(()) => {
                    let text = "its deadline passed before it ran".to_owned();
                    pending.start(self.this.clone()).1.failed(FailureKind::Expired, text);
                }
            }
        }
    }

    /// These requests wait no longer: they were cancelled, or their caller is gone.
    pub(in crate::agent) fn forget_held(&self, keys: &[RequestKey]) {
        let forgotten: Vec<_> =
            self.with_rrefs(|state| keys.iter().filter_map(|&key| state.forget(key)).collect());
        for pending in forgotten {
            self.never_created(pending.task, FailureKind::Cancelled, "cancelled before it ran");
        }
    }

    /// The answers of fetches that came on this link have nowhere to go.
    pub(in crate::agent) fn drop_fetches_on(&self, link: LinkId) {
        let is_dropped =
            |pending: &Pending| pending.link.id == link && matches!(pending.task, Task::Fetch(_));
        let keys: Vec<_> = {
            let state = self.rrefs.state.lock();
            state.held.values().filter(|pending| is_dropped(pending)).map(|pending| pending.key).collect()
        };
        for &key in &keys {
            let outcome = self.serving.lock().cancel(key);
            debug_assert!(!matches!(outcome, CancelOutcome::Running), "it was held");
        }
        self.forget_held(&keys);
    }
}

impl State {
    fn turn(&mut self, pending: Pending) -> Turn {
        let key = pending.key;
        match pending.task {
            Task::Fetch(rref) => match self.owner.wait(rref, Waiter::Request(key)) {
                Wait::Ready(_, stored) => Turn::Starts(pending, Some(stored.kept)),
                Wait::Gone(_, error) => Turn::Fails(pending, error),
                Wait::Waiting => self.keep(pending),
            },
            Task::Call | Task::Create(_) => {
                let users = pending.call.body.rrefs.iter().filter(|rref| !rref.is_owner());
                let forks: Vec<_> = users.map(RRef::fork_id).collect();
                match self.user.when_confirmed(&forks, Waiter::Request(key)) {
                    Some(_) => Turn::Starts(pending, None),
                    None => self.keep(pending),
                }
            }
        }
    }

    fn keep(&mut self, pending: Pending) -> Turn {
        let deadline = pending.deadline;
        self.deadlines.extend(deadline.map(|deadline| (deadline, pending.key)));
        self.held.insert(pending.key, pending);
        Turn::Held(deadline)
    }

    pub(super) fn take_held(&mut self, key: RequestKey) -> Option<Pending> {
        let pending = self.held.remove(&key)?;
        if let Some(deadline) = pending.deadline {
            self.deadlines.remove(&(deadline, key));
        }
        Some(pending)
    }

    /// Takes a held request whose wait has not ended.
    fn forget(&mut self, key: RequestKey) -> Option<Pending> {
        let pending = self.take_held(key)?;
        if let Task::Fetch(rref) = pending.task {
            self.owner.cancel_wait(rref, |waiter| *waiter == Waiter::Request(key));
        }
        Some(pending)
    }

    /// The wait of somebody for a value is over; what they do is returned.
    pub(super) fn waited(&mut self, waiter: Waiter, outcome: Result<Stored, RRefError>) -> Option<Act> {
        match waiter {
            Waiter::Local(rref) => self.local.remove(&rref).map(Act::Tell),
            Waiter::Request(key) => {
                let pending = self.take_held(key)?;
                Some(match outcome {
                    Ok(stored) => Act::Start(pending, Some(stored.kept)),
                    Err(error) => Act::Fail(pending, error),
                })
            }
        }
    }

    /// Everything that waits for something.
    pub(super) fn take_waits(&mut self) -> (Vec<Pending>, Vec<(RRefId, crate::future::Promise)>) {
        self.deadlines.clear();
        (self.held.drain().map(|(_, pending)| pending).collect(), self.local.drain().collect())
    }
}
