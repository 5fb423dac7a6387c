//! Calls of the program's own functions, which may run for long: also beyond the interpreter's end.
//!
//! Before Python 3.14, a thread that wants the interpreter back during finalisation is ended by
//! `pthread_exit`, which unwinds it. Where that meets a call of `PyO3` with something to drop it aborts
//! the process; elsewhere it would drop Python references without the interpreter lock. The calls here
//! may be unwound, and the thread parks instead.
#![expect(unsafe_code, reason = "calls Python's C interface; each use carries its proof")]

use std::hint::black_box;

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::error;
use crate::visitors::park_for_ever;

unsafe extern "C-unwind" {
    fn PyObject_Call(
        callable: *mut ffi::PyObject,
        args: *mut ffi::PyObject,
        kwargs: *mut ffi::PyObject,
    ) -> *mut ffi::PyObject;
}

/// Calls `callable` with `args`, which are a tuple; never returns if the interpreter ends meanwhile.
pub(crate) fn call<'py>(
    callable: &Bound<'py, PyAny>,
    args: impl IntoPyObject<'py, Target = PyTuple, Output = Bound<'py, PyTuple>>,
) -> PyResult<Bound<'py, PyAny>> {
    let args = args.into_pyobject(callable.py()).map_err(Into::into)?;
    // PyO3 declares the same function as one that does not unwind, and where the compiler sees both it
    // believes that. Then there is nothing here that could stop the unwinding, and the process aborts.
    let function: unsafe extern "C-unwind" fn(_, _, _) -> _ = black_box(PyObject_Call);
    let result = surviving_exit(|| {
        // SAFETY: both are live objects, the second a tuple, and the interpreter lock is held, as
        // `Bound` proves. Null means no keywords.
        unsafe { function(callable.as_ptr(), args.as_ptr(), std::ptr::null_mut()) }
    });
    // SAFETY: a new reference, or null and an exception is set.
    unsafe { Bound::from_owned_ptr_or_err(callable.py(), result) }
}

/// Calls `callable`, whose result nobody wants and whose exception nobody can catch.
pub(crate) fn run(py: Python<'_>, callable: &Py<PyAny>) {
    if let Err(error) = call(callable.bind(py), ()) {
        error::show(py, error);
    }
}

/// Runs `f`, which calls into Python; if the interpreter ends meanwhile and this thread is unwound, it
/// parks. Around calls of `PyO3` that is a second line of defence, see the module.
pub(crate) fn surviving_exit<T>(f: impl FnOnce() -> T) -> T {
    let guard = ParkWhenUnwound;
    let result = f();
    std::mem::forget(guard);
    result
}

struct ParkWhenUnwound;

impl Drop for ParkWhenUnwound {
    fn drop(&mut self) {
        // A panic of ours unwinds too, and goes on.
        if !std::thread::panicking() {
            park_for_ever();
        }
    }
}
