//! The two doors between Rust and Python, and what must happen at them.
//!
//! [`outside`] leaves the interpreter to wait or to take a lock (LOCK-1), [`inside`] enters it from
//! a thread of ours. Nothing else attaches or detaches.
//!
//! *Exit (EXIT-1).* Once [`stop_entering`] was called, no thread but its caller comes in: it parks
//! for ever at the door, because from then on the interpreter may vanish at any moment.
//!
//! *Burial (MEM-2).* A message's memory may be owned by Python objects and let go on the reactor,
//! which never enters Python (NET-1). [`PyOwner`] sends such references to a lock-free graveyard
//! that [`drain`] empties on a thread that is inside; `outside` does so on its way back.

use std::cell::Cell;
use std::sync::OnceLock;
use std::time::Duration;

use crossbeam_queue::SegQueue;
use pyo3::prelude::*;
use tensorcall::engine::fork::PerProcess;

use crate::user_code::surviving_exit;
use crate::visitors::VISITORS;
use crate::{thread_state, time};

/// How often functions that do not end at exit are interrupted again.
const INTERRUPT_EVERY: Duration = Duration::from_millis(50);

/// Objects that own more than this are worth waking a thread to free.
const LARGE_BYTES: usize = 1 << 20;

/// Where a thread knows itself to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    /// It came through no door: a thread of ours that never entered, or one of Python's that called.
    Unknown,
    Inside,
    Outside,
}

thread_local! {
    static PLACE: Cell<Place> = const { Cell::new(Place::Unknown) };
}

/// Runs `f` without the interpreter lock. Python may run meanwhile.
///
/// Parks for ever instead of returning if the interpreter is closing ([`stop_entering`]).
#[expect(clippy::disallowed_methods, reason = "this is the door")]
pub(crate) fn outside<T: Send>(py: Python<'_>, f: impl FnOnce() -> T + Send) -> T {
    let result = py.detach(|| {
        let _back = Away::go();
        f()
    });
    drain(py);
    result
}

/// Makes good what [`outside`] changed, also when its closure panics.
struct Away {
    before: Place,
}

impl Away {
    fn go() -> Self {
        let before = PLACE.replace(Place::Outside);
        if before == Place::Inside {
            VISITORS.leave();
        }
        Self { before }
    }
}

impl Drop for Away {
    fn drop(&mut self) {
        PLACE.set(self.before);
        if self.before == Place::Inside {
            VISITORS.enter();
        } else {
            VISITORS.park_if_closed();
        }
    }
}

/// Runs `f` with the interpreter lock, which it waits for.
///
/// Costs 0.05 us on a thread that is in an outer `inside` and an `outside` within it, so that Python
/// keeps its state of the thread, and far more elsewhere: pool threads enter once, for life.
/// Parks for ever if the interpreter is closing ([`stop_entering`]).
#[expect(clippy::disallowed_methods, reason = "this is the door")]
pub(crate) fn inside<T>(f: impl for<'py> FnOnce(Python<'py>) -> T) -> T {
    if PLACE.get() == Place::Inside {
        return Python::attach(f);
    }
    VISITORS.enter();
    let before = PLACE.replace(Place::Inside);
    let _leave = Leave(before);
    let is_first = before == Place::Unknown && !thread_state::exists();
    Python::attach(|py| {
        surviving_exit(|| {
            drain(py);
            if is_first { for_life(py, f) } else { f(py) }
        })
    })
}

/// Runs `f` on a thread that Python does not know, and forgets when `f` returns.
fn for_life<'py, T>(py: Python<'py>, f: impl FnOnce(Python<'py>) -> T) -> T {
    let _signed_in = VISITORS.sign_in(py);
    let result = f(py);
    thread_state::clear(py);
    result
}

/// Undoes the entry of [`inside`], also when its closure panics.
struct Leave(Place);

impl Drop for Leave {
    fn drop(&mut self) {
        PLACE.set(self.0);
        VISITORS.leave();
    }
}

/// Closes the interpreter to all threads but this one, for ever (EXIT-1), and waits until those of
/// ours that are inside have left, for `limit` at most. When half of it has passed, the functions that
/// run are interrupted by `SystemExit`: a thread that comes back from torch's C++ code while the
/// interpreter ends would abort the process. Returns how many are inside still; they park when their
/// functions end.
///
/// To be called from an `atexit` function: later is too late.
pub(crate) fn stop_entering(py: Python<'_>, limit: Duration) -> usize {
    VISITORS.close();
    let mut until = time::now() + limit / 2;
    let end = until + limit / 2;
    loop {
        let inside = outside(py, || VISITORS.wait_until_gone(until));
        let now = time::now();
        if inside == 0 || now >= end {
            return inside;
        }
        VISITORS.interrupt(py);
        until = end.min(now + INTERRUPT_EVERY);
    }
}

/// Whether [`stop_entering`] was called: nobody is there any more to whom something could be told.
pub(crate) fn is_closed() -> bool {
    VISITORS.is_closed()
}

/// Forgets the threads that a forked child does not have. For `os.register_at_fork`: else the child
/// would wait at its end for threads of its parent.
pub(crate) fn after_fork_in_child(py: Python<'_>) {
    VISITORS.forget_others(py, PLACE.get() == Place::Inside);
}

/// Whether this thread came in by one of the doors and has not left since.
pub(crate) fn is_inside() -> bool {
    PLACE.get() == Place::Inside
}

/// A Python reference that may be dropped on any thread.
///
/// Dropped inside, it is let go at once; elsewhere it is buried until the next [`drain`].
pub(crate) struct PyOwner {
    object: Option<Py<PyAny>>,
    bytes: usize,
}

impl PyOwner {
    /// Owns `object`, which keeps about `bytes` of memory alive.
    pub(crate) fn new(object: Py<PyAny>, bytes: usize) -> Self {
        Self { object: Some(object), bytes }
    }
}

impl Drop for PyOwner {
    fn drop(&mut self) {
        let Some(object) = self.object.take() else { return };
        if PLACE.get() == Place::Inside {
            drop(object);
        } else {
            bury(object, self.bytes);
        }
    }
}

static GRAVEYARD: PerProcess<SegQueue<Py<PyAny>>> = PerProcess::new();
static ON_LARGE_BURIAL: OnceLock<Box<dyn Fn() + Send + Sync>> = OnceLock::new();

/// Leaves `object`, which keeps about `bytes` alive, to be let go by the next [`drain`].
pub(crate) fn bury(object: Py<PyAny>, bytes: usize) {
    GRAVEYARD.get_or_init(SegQueue::new).push(object);
    if bytes > LARGE_BYTES
        && let Some(hook) = ON_LARGE_BURIAL.get()
    {
        hook();
    }
}

/// Sets what is run, on the thread that buries, when more than 1 MiB was buried: it should have
/// some other thread call [`drain`] soon, and must not enter Python itself. The first one stays.
pub(crate) fn on_large_burial(hook: impl Fn() + Send + Sync + 'static) {
    let _ = ON_LARGE_BURIAL.set(Box::new(hook));
}

/// Lets go of what was buried. One atomic load if that is nothing.
pub(crate) fn drain(_py: Python<'_>) {
    let graveyard = GRAVEYARD.get_or_init(SegQueue::new);
    while let Some(object) = graveyard.pop() {
        drop(object);
    }
}
