//! `Later`: stands for the result of a function that is not there yet when the function returns.
//!
//! The handler object returns one in the place of a result and keeps a reference to it. The pool
//! thread is then free; whoever gets to know the outcome answers the caller through it. Until then the
//! request counts as running, also for graceful shutdown (TERM-1).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use pyo3::prelude::*;
use tensorcall::Responder;
use tensorcall::fork::Home;
use tensorcall::sync::Mutex;

use crate::bell::{Bell, Shared};
use crate::gil::outside;
use crate::handler::{Answer, PyHandler};
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
    Known(Answer),
    Over,
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
        outside(py, || {
            let mut state = self.state.lock();
            match std::mem::replace(&mut *state, State::Over) {
                State::Known(answer) => {
                    drop(state);
                    answer.send(responder);
                }
                State::New => {
                    if let Some((bell, number)) = self.cancelled.lock().take() {
                        responder.on_cancelled(move || bell.ring(number));
                    }
                    *state = State::Owed(responder, Owed::new());
                }
                // It stood for the result of a call before. Dropping the responder says that there is no answer.
                before => *state = before,
            }
        });
    }

    fn answer(&self, py: Python<'_>, answer: Answer) -> bool {
        if !self.home.is_here() {
            return false;
        }
        outside(py, || {
            let mut state = self.state.lock();
            match std::mem::replace(&mut *state, State::Over) {
                State::Owed(responder, owed) => {
                    drop(state);
                    drop(owed);
                    answer.send(responder);
                    true
                }
                State::New => {
                    *state = State::Known(answer);
                    true
                }
                before => {
                    *state = before;
                    false
                }
            }
        })
    }
}

#[pymethods]
impl Later {
    #[new]
    fn new(handler: Py<PyAny>) -> Self {
        let state = Mutex::new(State::New);
        Self { handler: PyHandler(handler), home: Home::here(), state, cancelled: Mutex::default() }
    }

    /// The function's result is `result`. False if there was an outcome before.
    fn returned(&self, py: Python<'_>, result: &Bound<'_, PyAny>) -> bool {
        self.answer(py, Answer::of(py, self.handler.pack(py, result)))
    }

    /// The function failed with `error`. False if there was an outcome before.
    fn raised(&self, py: Python<'_>, error: &Bound<'_, PyAny>) -> bool {
        self.answer(py, Answer::of(py, self.handler.pack_exception(py, error)))
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
