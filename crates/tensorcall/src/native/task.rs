//! [`Task`]: an `async` function on its way, polled by pool threads and waiting without one.
//!
//! It is polled first by the thread that the request has got, and after each wake-up by a pool thread beyond
//! the number of places: as for a function that waits for a call, there is no queueing for a place to go
//! on. If nobody wants the answer any more the future is dropped, on a pool thread too.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};

use super::answer::Answer;
use super::function::{Failure, Outcome};
use crate::agent::Spawner;
use crate::sync::Mutex;

type BoxFuture = Pin<Box<dyn Future<Output = Outcome> + Send>>;

/// See the module.
pub(super) struct Task {
    state: Mutex<State>,
    spawner: Spawner,
}

struct State {
    /// `None` while it is polled, and once it is over.
    future: Option<BoxFuture>,
    /// `None` once it is over.
    answer: Option<Answer>,
    /// It is being polled, or somebody is about to.
    busy: bool,
    /// It was woken while it was busy.
    woken: bool,
}

impl Task {
    /// Polls `future` until it waits for something; goes on when that has come.
    pub(super) fn start(future: BoxFuture, answer: Answer) {
        let spawner = answer.responder().spawner();
        let state = State { future: Some(future), answer: Some(answer), busy: true, woken: false };
        let task = Arc::new(Self { state: Mutex::new(state), spawner });
        Arc::clone(&task).poll();
        if let Some(answer) = &task.state.lock().answer {
            let (spawner, task) = (task.spawner.clone(), Arc::clone(&task));
            // Until it is answered the agent keeps it by this, also if nobody else is left to wake it.
            answer.responder().on_cancelled(move || spawner.spawn(move || task.give_up()));
        }
    }

    /// Polls it; the caller has set `busy`.
    fn poll(self: Arc<Self>) {
        let waker = Waker::from(Arc::clone(&self));
        let mut context = Context::from_waker(&waker);
        let Some(mut future) = self.state.lock().future.take() else { return };
        loop {
            let polled = catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(&mut context)));
            let outcome = match polled {
                Ok(Poll::Ready(outcome)) => outcome,
                Ok(Poll::Pending) => {
                    let mut state = self.state.lock();
                    if std::mem::take(&mut state.woken) && state.answer.is_some() {
                        continue;
                    }
                    if state.answer.is_some() {
                        state.future = Some(future);
                        state.busy = false;
                    }
                    return;
                }
                Err(panic) => Err(Failure::panicked(&*panic)),
            };
            // What it holds is let go before the answer tells that it is over.
            drop(future);
            let answer = self.state.lock().answer.take();
            if let Some(answer) = answer {
                answer.give(outcome);
            }
            return;
        }
    }

    /// Nobody wants the answer.
    fn give_up(&self) {
        let (future, answer) = {
            let mut state = self.state.lock();
            (state.future.take(), state.answer.take())
        };
        drop(future);
        drop(answer);
    }
}

impl Wake for Task {
    fn wake(self: Arc<Self>) {
        let mut state = self.state.lock();
        if state.answer.is_none() {
            return;
        }
        if std::mem::replace(&mut state.busy, true) {
            state.woken = true;
            return;
        }
        drop(state);
        let spawner = self.spawner.clone();
        spawner.spawn(move || self.poll());
    }
}
