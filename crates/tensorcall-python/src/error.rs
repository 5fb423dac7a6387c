//! Which exception Python sees.

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use tensorcall::engine::{Error, ErrorKind};

use crate::gil;

/// The exception that torch raises in this case: a `RuntimeError` for all that can go wrong with a
/// call; programs test for it.
pub(crate) fn to_python(error: &Error) -> PyErr {
    match error.kind() {
        ErrorKind::Usage => PyValueError::new_err(error.to_string()),
        _ => PyRuntimeError::new_err(error.to_string()),
    }
}

/// Shows an exception that nobody can catch as Python shows those; not while the interpreter ends, when
/// it was most likely our doing.
pub(crate) fn show(py: Python<'_>, error: PyErr) {
    if !gil::is_closed() {
        error.write_unraisable(py, None);
    }
}
