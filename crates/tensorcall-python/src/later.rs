//! `Later`: stands for the result of a function that is not there yet when the function returns.
//!
//! The handler object returns one in the place of a result and keeps a reference to it. The pool
//! thread is then free; whoever gets to know the outcome answers the caller through it. Until then the
//! request counts as running, also for graceful shutdown (TERM-1).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pyo3::prelude::*;
use tensorcall::engine::Responder;
use tensorcall::engine::fork::Home;
use tensorcall::engine::sync::Mutex;

use crate::bell::{Bell, Shared};
use crate::gil::outside;
use crate::handler::{Answer, Asker, PyHandler};
use crate::spawner;

/// An answer that comes later.
#[pyclass(frozen, module = "tensorcall._tensorcall")]
pub(crate) struct Later {
    handler: PyHandler,
    home: Home,
    state: Mutex<State>,
    /// To be rung with this number if the call is cancelled; until the function has returned.
    cancelled: Mutex<Option<(Arc<Shared>, u64)>>,
}

enum State {
    /// The function has not returned and there is no outcome.
    New,
    /// The function has returned: the caller waits.
    Owed(Responder, Owed),
    /// The outcome was there before the function returned.
    Known(Outcome),
    Over,
}

/// An outcome of which it is not known yet whether it goes to the caller or stays here.
enum Outcome {
    Returned(Py<PyAny>),
    Raised(Py<PyAny>),
}

/// Counts answers that are owed, as long as it lives.
struct Owed;

static OWED: AtomicUsize = AtomicUsize::new(0);

impl Owed {
    fn new() -> Self {
        OWED.fetch_add(1, Ordering::Relaxed);
        Self
    }
}

impl Drop for Owed {
    fn drop(&mut self) {
        OWED.fetch_sub(1, Ordering::Relaxed);
    }
}

/// How many callers wait for an answer that comes later.
pub(crate) fn owed() -> usize {
    OWED.load(Ordering::Relaxed)
}

impl Later {
    /// The function has returned this as its result: the answer goes through `responder`.
    pub(crate) fn owe(&self, py: Python<'_>, responder: Responder) {
        let known = outside(py, || {
            let mut state = self.state.lock();
            match std::mem::replace(&mut *state, State::Over) {
                State::Known(outcome) => Some((outcome, responder)),
                State::New => {
                    if let Some((bell, number)) = self.cancelled.lock().take() {
                        responder.on_cancelled(move || bell.ring(number));
                    }
                    *state = State::Owed(responder, Owed::new());
                    None
                }
                // It stood for the result of a call before. Dropping the responder says that there is no answer.
                before => {
                    *state = before;
                    None
                }
            }
        });
        if let Some((outcome, responder)) = known {
            self.send(py, outcome, responder);
        }
    }

    fn answer(&self, py: Python<'_>, outcome: Outcome) -> bool {
        if !self.home.is_here() {
            return false;
        }
        let owed = outside(py, || {
            let mut state = self.state.lock();
            match std::mem::replace(&mut *state, State::Over) {
                State::Owed(responder, _) => Ok(Some((outcome, responder))),
                State::New => {
                    *state = State::Known(outcome);
                    Ok(None)
                }
                before => {
                    *state = before;
                    // Not dropped under the lock: it may be the last of its object.
                    Err(outcome)
                }
            }
        });
        match owed {
            Ok(Some((outcome, responder))) => self.send(py, outcome, responder),
            Ok(None) => {}
            Err(_) => return false,
        }
        true
    }

    fn send(&self, py: Python<'_>, outcome: Outcome, responder: Responder) {
        let answer = match outcome {
            Outcome::Returned(result) if responder.creates() => Answer::Kept(result),
            Outcome::Returned(result) => {
                Answer::of(py, self.handler.pack(py, result.bind(py), Asker::of(&responder), None))
            }
            Outcome::Raised(error) => {
                Answer::of(py, self.handler.pack_exception(py, error.bind(py), Asker::of(&responder)))
            }
        };
        outside(py, || answer.send(responder));
    }
}

#[pymethods]
impl Later {
    #[new]
    fn new(handler: Py<PyAny>) -> Self {
        let state = Mutex::new(State::New);
        Self { handler: PyHandler(handler), home: Home::here(), state, cancelled: Mutex::default() }
    }

    /// The function's result is `result`, which goes to the caller or, if it is for references, stays here.
    /// False if there was an outcome before.
    fn returned(&self, py: Python<'_>, result: &Bound<'_, PyAny>) -> bool {
        self.answer(py, Outcome::Returned(result.clone().unbind()))
    }

    /// The function failed with `error`. False if there was an outcome before.
    fn raised(&self, py: Python<'_>, error: &Bound<'_, PyAny>) -> bool {
        self.answer(py, Outcome::Raised(error.clone().unbind()))
    }

    /// Rings `bell` with `number` once nobody waits for the answer any more, unless it is given before.
    fn ring_when_cancelled(&self, py: Python<'_>, bell: &Bell, number: u64) {
        let bell = bell.shared();
        outside(py, || match &*self.state.lock() {
            State::New => *self.cancelled.lock() = Some((bell, number)),
            State::Owed(responder, _) => responder.on_cancelled(move || bell.ring(number)),
            State::Known(_) | State::Over => {}
        });
    }

    /// Whether nobody waits for the answer any more: the caller cancelled the call or is gone.
    fn is_cancelled(&self) -> bool {
        !self.home.is_here()
            || matches!(&*self.state.lock(), State::Owed(responder, _) if responder.is_cancelled())
    }
}

impl Drop for Later {
    fn drop(&mut self) {
        if !self.home.is_here() {
            return;
        }
        if let State::Owed(responder, _) = std::mem::replace(self.state.get_mut(), State::Over) {
            // Nobody can answer any more. Saying so may have to wait for locks: not here (LOCK-1).
            spawner::spawn(move || drop(responder));
        }
    }
}
