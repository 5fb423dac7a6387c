//! [`RpcFuture`]: the outcome of a call, which completes exactly once (CALL-1).
//!
//! A [`Promise`] is the other end. Whoever completes it runs no code of users: callbacks given to
//! [`RpcFuture::on_done`] must not block, and they hand real work to a thread.

use std::cell::Cell;
use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crate::sync::{Condvar, Mutex, MutexGuard};
use tensorcall_proto::ids::MessageId;
use tensorcall_proto::wire::message::Encoding;

use crate::body::Received;
use crate::clock::now;
use crate::errands::Errands;
use crate::error::{Error, Result};
use crate::fork::Home;
use crate::spin::{self, Spin};
use crate::wakes::Wakers;

/// What a function on another worker came to.
#[derive(Debug)]
pub struct Response {
    /// Whether the function raised: then the payload is its exception.
    pub raised: bool,
    /// How the payload is encoded.
    pub encoding: Encoding,
    /// The payload and its tensors.
    pub body: Received,
}

/// The outcome of a call. Cheap to clone; the response itself is taken once.
#[derive(Clone)]
pub struct RpcFuture(Arc<Core>);

/// The end of a future that completes it.
pub struct Promise(Arc<Core>);

struct Core {
    state: Mutex<State>,
    done: Condvar,
    /// Which call this is the outcome of; 0, which is no call, if of none.
    call: AtomicU64,
    /// Where the outcome comes. It does not come to a forked child.
    home: Home,
    /// Whether the outcome may come so soon that looking for it beats sleeping.
    soon: AtomicBool,
    /// Those of the agent, if it is the outcome of a call.
    errands: Option<Arc<Errands>>,
    /// Microseconds that are left to look for it busily, of all waits together.
    busy: AtomicU32,
}

enum State {
    Pending {
        callbacks: Vec<Callback>,
        wakers: Wakers,
    },
    Done(Result<Response>),
    /// Completed without a response, or the response was taken.
    Spent,
}

type Callback = Box<dyn FnOnce() + Send>;

thread_local! {
    static SPIN: Cell<Spin> = const { Cell::new(Spin::NEW) };
}

/// Looks for a moment for something that may come soon, then sleeps; tells whether it came.
pub(crate) fn look_or(
    limit: Option<Instant>,
    there: impl FnMut() -> bool,
    sleep: impl FnOnce() -> bool,
) -> bool {
    let mut spin = SPIN.get();
    let found = spin.look(limit, there);
    let start = now();
    let came = found || sleep();
    if came && !found {
        spin.encourage(start.elapsed());
    }
    SPIN.set(spin);
    came
}

/// A future and the promise to complete it.
pub fn promise() -> (Promise, RpcFuture) {
    make(None)
}

/// As [`promise`]; those who wait for the outcome see to `errands`.
pub(crate) fn promise_in(errands: &Arc<Errands>) -> (Promise, RpcFuture) {
    make(Some(Arc::clone(errands)))
}

fn make(errands: Option<Arc<Errands>>) -> (Promise, RpcFuture) {
    let pending = State::Pending { callbacks: Vec::new(), wakers: Wakers::default() };
    let core = Arc::new(Core {
        state: Mutex::new(pending),
        done: Condvar::new(),
        call: AtomicU64::new(0),
        home: Home::here(),
        soon: AtomicBool::new(false),
        errands,
        busy: AtomicU32::new(0),
    });
    (Promise(Arc::clone(&core)), RpcFuture(core))
}

impl Core {
    fn errands(&self) -> Option<&Errands> {
        self.errands.as_deref().filter(|_| self.home.is_here())
    }

    /// What there is now. `None` in a forked child if the outcome has not come before the fork.
    fn look(&self) -> Option<MutexGuard<'_, State>> {
        if self.home.is_here() {
            return Some(self.state.lock());
        }
        // A thread that this process does not have may hold the lock.
        self.state.try_lock().filter(|state| !matches!(**state, State::Pending { .. }))
    }
}

impl Promise {
    /// Completes the future. Returns false, and changes nothing, if that has happened before.
    pub fn complete(&self, outcome: Result<Response>) -> bool {
        self.finish(State::Done(outcome)).map(Wakes::wake).is_some()
    }

    /// As [`complete`](Self::complete), but leaves those who wait asleep. `None` if nothing was changed.
    pub(crate) fn complete_quietly(&self, outcome: Result<Response>) -> Option<Wakes> {
        self.finish(State::Done(outcome))
    }

    /// Completes a future that stands for a local event and has no response.
    pub fn complete_empty(&self) -> bool {
        self.finish(State::Spent).map(Wakes::wake).is_some()
    }

    /// A future of this promise.
    pub fn future(&self) -> RpcFuture {
        RpcFuture(Arc::clone(&self.0))
    }

    fn finish(&self, last: State) -> Option<Wakes> {
        let mut state = self.0.look()?;
        let State::Pending { callbacks, wakers } = &mut *state else { return None };
        let (callbacks, wakers) = (std::mem::take(callbacks), std::mem::take(wakers));
        *state = last;
        drop(state);
        Some(Wakes { core: Arc::clone(&self.0), callbacks, wakers })
    }
}

/// Who is to be told that a future is complete.
#[must_use]
pub(crate) struct Wakes {
    core: Arc<Core>,
    callbacks: Vec<Callback>,
    wakers: Wakers,
}

impl Wakes {
    pub(crate) fn wake(self) {
        self.wake_threads().into_iter().for_each(Waker::wake);
    }

    /// Wakes all but tasks, which are left to the caller.
    pub(crate) fn wake_threads(self) -> Wakers {
        self.core.done.notify_all();
        for callback in self.callbacks {
            callback();
        }
        self.wakers
    }
}

impl RpcFuture {
    /// The call that this is the outcome of; `None` if it stands for a local event.
    pub fn call(&self) -> Option<MessageId> {
        let call = self.0.call.load(Ordering::Relaxed);
        (call != 0).then(|| MessageId::new(call))
    }

    /// Says which call this is the outcome of, and whether no other was under way to the same worker:
    /// then its answer is the next thing that comes.
    pub(crate) fn is_of(&self, call: MessageId, alone: bool) {
        self.0.call.store(call.get(), Ordering::Relaxed);
        self.0.soon.store(alone, Ordering::Relaxed);
    }

    /// Lets whoever waits look busily for so long before it sleeps.
    pub(crate) fn look_for(&self, time: Duration) {
        self.0.busy.store(u32::try_from(time.as_micros()).unwrap_or(u32::MAX), Ordering::Relaxed);
    }

    /// Whether the outcome is there. In a forked child of the process where this future is to complete the
    /// outcome is an error, unless another one came before the fork.
    pub fn is_done(&self) -> bool {
        self.0.look().is_none_or(|state| !matches!(*state, State::Pending { .. }))
    }

    /// Waits until the outcome is there or `limit` has come; tells which. `None` waits for ever.
    pub fn wait_until(&self, limit: Option<Instant>) -> bool {
        if let Some(errands) = self.0.errands() {
            errands.calls.flush();
        }
        if self.0.busy.load(Ordering::Relaxed) > 0 && self.poll_until(limit) {
            return true;
        }
        if !self.0.soon.load(Ordering::Relaxed) {
            return self.sleep_until(limit);
        }
        look_or(limit, || self.is_done(), || self.sleep_until(limit))
    }

    /// Looks busily, if nobody else does, as long as that is wanted; tells whether the outcome is there.
    fn poll_until(&self, limit: Option<Instant>) -> bool {
        let left = Duration::from_micros(self.0.busy.swap(0, Ordering::Relaxed).into());
        let start = now();
        let end = limit.map_or(start + left, |limit| limit.min(start + left));
        let there = spin::poll(end, |_| self.is_done());
        self.look_for(left.saturating_sub(start.elapsed()));
        there
    }

    fn sleep_until(&self, limit: Option<Instant>) -> bool {
        let Some(mut state) = self.0.look() else { return true };
        while matches!(*state, State::Pending { .. }) {
            match limit {
                None => self.0.done.wait(&mut state),
                Some(limit) => {
                    if self.0.done.wait_until(&mut state, limit).timed_out() {
                        return !matches!(*state, State::Pending { .. });
                    }
                }
            }
        }
        true
    }

    /// Takes the outcome. `None` if there is none (any more).
    pub fn take(&self) -> Option<Result<Response>> {
        let Some(mut state) = self.0.look() else { return Some(Err(Error::forked(None))) };
        match std::mem::replace(&mut *state, State::Spent) {
            State::Done(outcome) => Some(outcome),
            State::Spent => None,
            pending @ State::Pending { .. } => {
                *state = pending;
                None
            }
        }
    }

    /// Takes the outcome if it is there and is a failure: an error, or an exception of the function.
    pub fn take_failure(&self) -> Option<Result<Response>> {
        let mut state = self.0.look()?;
        match &*state {
            State::Done(Ok(Response { raised: false, .. })) | State::Spent | State::Pending { .. } => None,
            State::Done(_) => match std::mem::replace(&mut *state, State::Spent) {
                State::Done(outcome) => Some(outcome),
                _ => None,
            },
        }
    }

    /// Runs `callback` once the outcome is there: on the completing thread, or at once on this one.
    ///
    /// It must neither block nor call back into the agent.
    pub fn on_done(&self, callback: impl FnOnce() + Send + 'static) {
        let mut state = self.0.look();
        if let Some(State::Pending { callbacks, .. }) = state.as_deref_mut() {
            callbacks.push(Box::new(callback));
            drop(state);
            if let Some(errands) = self.0.errands() {
                errands.calls.flush();
            }
        } else {
            drop(state);
            callback();
        }
    }
}

impl Future for RpcFuture {
    type Output = Result<Response>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        {
            let mut state = self.0.look();
            if let Some(State::Pending { wakers, .. }) = state.as_deref_mut() {
                wakers.add(context.waker());
                return Poll::Pending;
            }
        }
        if let Some(errands) = self.0.errands() {
            errands.tasks.wake_rest();
        }
        Poll::Ready(
            self.take().unwrap_or_else(|| Err(Error::usage("the outcome of this call was taken before"))),
        )
    }
}

impl fmt::Debug for RpcFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RpcFuture").field("done", &self.is_done()).finish()
    }
}

impl fmt::Debug for Promise {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Promise").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    #[test]
    fn a_future_completes_once_and_gives_its_outcome_once() {
        let (promise, future) = promise();

        assert!(promise.complete(Err(Error::usage("first"))));
        assert!(!promise.complete(Err(Error::usage("second"))));

        assert_eq!(future.take().unwrap().unwrap_err().to_string(), "first");
        assert!(future.take().is_none());
        assert!(future.is_done());
    }

    #[test]
    fn only_a_failure_is_taken_as_one() {
        let (promise, future) = promise();
        assert!(future.take_failure().is_none());
        promise.complete(Err(Error::usage("failed")));

        assert!(future.take_failure().is_some());

        assert!(future.take_failure().is_none());
        assert!(future.take().is_none());
    }

    #[test]
    fn a_wait_ends_at_its_limit_or_with_the_outcome() {
        let (promise, future) = promise();
        assert!(!future.wait_until(Some(now() + Duration::from_millis(5))));

        let waiter = std::thread::spawn({
            let future = future.clone();
            move || future.wait_until(Some(now() + Duration::from_secs(20)))
        });
        promise.complete_empty();

        assert!(waiter.join().unwrap());
    }

    #[test]
    fn callbacks_run_once_before_or_after_completion() {
        let (promise, future) = promise();
        let runs = Arc::new(AtomicUsize::new(0));
        let count = |runs: &Arc<AtomicUsize>| {
            let runs = Arc::clone(runs);
            move || {
                runs.fetch_add(1, Ordering::SeqCst);
            }
        };

        future.on_done(count(&runs));
        promise.complete_empty();
        future.on_done(count(&runs));

        assert_eq!(runs.load(Ordering::SeqCst), 2);
    }

    #[test]
    fn a_future_can_be_awaited_without_any_runtime() {
        let (promise, future) = promise();
        let mut pinned = std::pin::pin!(future);
        let mut context = Context::from_waker(Waker::noop());
        assert!(pinned.as_mut().poll(&mut context).is_pending());

        promise.complete(Err(Error::usage("done")));

        assert!(pinned.as_mut().poll(&mut context).is_ready());
    }
}
