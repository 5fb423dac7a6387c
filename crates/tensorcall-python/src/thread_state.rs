//! What Python keeps of a thread, its *thread state*, as far as the doors have to know.
#![expect(unsafe_code, reason = "calls Python's C interface; each use carries its proof")]

use std::ffi::{c_long, c_ulong};

use pyo3::exceptions::PySystemExit;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Destructors may leave new thread-local variables behind; they are asked this often to stop.
const ROUNDS: usize = 16;

/// A thread as Python counts them (`threading.get_ident`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ThreadIdent(c_ulong);

/// Whether Python has a state of this thread: it made the thread, or the thread is inside already.
pub(crate) fn exists() -> bool {
    // SAFETY: reads a thread-local variable; may be called on any thread.
    !unsafe { ffi::PyGILState_GetThisThreadState() }.is_null()
}

/// This thread.
pub(crate) fn ident(_py: Python<'_>) -> ThreadIdent {
    // SAFETY: asks the system for the thread's number.
    ThreadIdent(unsafe { ffi::PyThread_get_thread_ident() })
}

/// Lets go of what hangs on the state of this thread, its thread-local and context variables. To be
/// called right before its outermost release, which deletes the state.
///
/// That release does the same. But before Python 3.12.4 a destructor that enters and leaves the
/// interpreter then deletes the state, and the release deletes it again: SIGSEGV in
/// `tstate_delete_common` (python/cpython#119585). Torch has such destructors wherever C++ owns a
/// tensor that Python has seen, as in a sparse CSR tensor. Here they run while the entry still counts.
pub(crate) fn clear(py: Python<'_>) {
    if py.version_info() >= (3, 12, 4) {
        return;
    }
    for _ in 0..ROUNDS {
        // SAFETY: `py` proves that this thread has a state.
        let state = unsafe { ffi::PyThreadState_Get() };
        // SAFETY: the state is this thread's own and in use. Python code may run on it afterwards, as
        // destructors do while Python itself clears a state, and it may be cleared again.
        unsafe { ffi::PyThreadState_Clear(state) };
        if variables(py).is_none_or(|variables| variables.is_empty()) {
            return;
        }
    }
}

/// The thread-local variables of this thread.
fn variables(py: Python<'_>) -> Option<Bound<'_, PyDict>> {
    // SAFETY: `py` proves that this thread has a state. Null means that there was no memory.
    let dict = unsafe { ffi::PyThreadState_GetDict() };
    // SAFETY: a borrowed reference or null, and the state keeps it alive meanwhile.
    let dict = unsafe { Bound::from_borrowed_ptr_or_opt(py, dict) };
    dict.and_then(|dict| dict.cast_into().ok())
}

/// Has `SystemExit` raised in `thread` when it next runs Python code.
pub(crate) fn interrupt(py: Python<'_>, thread: ThreadIdent) {
    let exit = py.get_type::<PySystemExit>();
    // The number is as wide as Python's parameter, whose sign differs between its versions.
    let ident = c_long::from_ne_bytes(thread.0.to_ne_bytes());
    // SAFETY: the interpreter lock is held, `exit` is an exception class, and Python looks itself for
    // a thread of that number.
    unsafe { ffi::PyThreadState_SetAsyncExc(ident, exit.as_ptr()) };
}
