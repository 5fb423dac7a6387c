//! [`RpcFuture`]: the result of a call, to be awaited or waited for.

use std::fmt;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};

use tensorcall_proto::ids::{Rank, WorkerName};
use tensorcall_proto::wire::value::Exception;

use super::agent::Shared;
use super::convert::FromValue;
use super::message;
use crate::agent::{Inner, lend};
use crate::autograd::Outgoing;
use crate::error::{Error, ErrorKind, Result};
use crate::future::{Response, RpcFuture as EngineFuture};

/// The result of a call that is under way.
///
/// Await it under any runtime, or [`wait`](Self::wait) for it. The call runs either way; dropping the future
/// cancels it: the callee does not run it if it has not begun, and drops it if it is `async`. To let it run
/// and forget about its result, [`detach`](Self::detach) it.
#[must_use = "dropping the future cancels the call; `detach()` lets it run"]
pub struct RpcFuture<T> {
    state: State,
    result: PhantomData<fn() -> T>,
}

enum State {
    Pending(Pending),
    /// It failed before it began.
    Failed(Error),
    Over,
}

/// A call that was begun.
struct Pending {
    future: EngineFuture,
    call: Call,
}

/// What is known of a call.
pub(super) struct Call {
    pub(super) agent: Weak<Inner>,
    pub(super) shared: Arc<Shared>,
    pub(super) to: Rank,
    pub(super) worker: WorkerName,
    pub(super) function: Arc<str>,
    /// In an autograd context: until this is dropped, the context knows that the call is under way.
    pub(super) outgoing: Option<Outgoing>,
}

impl Pending {
    /// The outcome that has come. A function whose caller has no time left need not go on.
    fn read<T: FromValue>(&self, outcome: Option<Result<Response>>) -> Result<T> {
        let result = self.call.read(outcome);
        if let Err(error) = &result
            && error.kind() == ErrorKind::Timeout
            && let (Some(agent), Some(id)) = (self.call.agent.upgrade(), self.future.call())
        {
            agent.forget(self.call.to, id);
        }
        result
    }
}

impl<T> RpcFuture<T> {
    pub(super) fn new(begun: Result<(EngineFuture, Call)>) -> Self {
        let state = match begun {
            Ok((future, call)) => State::Pending(Pending { future, call }),
            Err(error) => State::Failed(error),
        };
        Self { state, result: PhantomData }
    }

    /// Whether the result is there, or the error.
    pub fn is_done(&self) -> bool {
        match &self.state {
            State::Pending(pending) => pending.future.is_done(),
            State::Failed(_) | State::Over => true,
        }
    }

    /// Gives up the call, as dropping the future does.
    pub fn cancel(self) {
        drop(self);
    }

    /// Lets the call run; nobody learns of its result.
    pub fn detach(mut self) {
        if let State::Pending(Pending { future, call }) = std::mem::replace(&mut self.state, State::Over) {
            call.let_go(&future);
        }
    }
}

impl<T: FromValue> RpcFuture<T> {
    /// Blocks until the result is there. A function that waits so lends its place to others meanwhile.
    ///
    /// # Errors
    ///
    /// What became of the call; [`ErrorKind::Timeout`](crate::ErrorKind::Timeout) if its time is over.
    pub fn wait(mut self) -> Result<T> {
        match std::mem::replace(&mut self.state, State::Over) {
            State::Pending(pending) => {
                if !pending.future.is_done() {
                    lend(Some(&pending.call.worker), || pending.future.wait_until(None));
                }
                pending.read(pending.future.take())
            }
            State::Failed(error) => Err(error),
            State::Over => Err(over()),
        }
    }
}

impl<T: FromValue> Future for RpcFuture<T> {
    type Output = Result<T>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<T>> {
        let outcome = match &mut self.state {
            State::Pending(pending) => {
                let Poll::Ready(outcome) = Pin::new(&mut pending.future).poll(context) else {
                    return Poll::Pending;
                };
                pending.read(Some(outcome))
            }
            State::Failed(error) => Err(error.clone()),
            State::Over => Err(over()),
        };
        self.state = State::Over;
        Poll::Ready(outcome)
    }
}

impl<T> Drop for RpcFuture<T> {
    fn drop(&mut self) {
        if let State::Pending(Pending { future, call }) = &self.state
            && !future.is_done()
            && let (Some(agent), Some(id)) = (call.agent.upgrade(), future.call())
        {
            agent.cancel(call.to, id);
        }
    }
}

impl Call {
    /// Nobody looks at the outcome; an autograd context waits for it all the same.
    pub(super) fn let_go(self, future: &EngineFuture) {
        if let Some(outgoing) = self.outgoing {
            future.on_done(move || outgoing.answered());
        }
    }

    /// From the answer to the result.
    fn read<T: FromValue>(&self, outcome: Option<Result<Response>>) -> Result<T> {
        let Response { raised, encoding, body } = outcome.ok_or_else(over)??;
        if let Some(outgoing) = &self.outgoing {
            outgoing.answered();
        }
        if raised {
            let unreadable = || Exception {
                message: "an exception that only Python can read".to_owned(),
                ..Exception::default()
            };
            let exception = message::unpack_exception(encoding, &body).unwrap_or_else(unreadable);
            return Err(Error::raised(&self.worker, &self.function, exception));
        }
        let value = message::unpack(encoding, body, &self.shared).and_then(T::from_value);
        value.map_err(|error| {
            let Self { worker, function, .. } = self;
            Error::usage(format!("the result of {function} on worker '{worker}': {error}"))
        })
    }
}

fn over() -> Error {
    Error::usage("the result of this call was taken before")
}

impl<T> fmt::Debug for RpcFuture<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RpcFuture").field("done", &self.is_done()).finish()
    }
}
