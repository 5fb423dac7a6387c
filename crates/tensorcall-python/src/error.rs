//! Which exception Python sees.

use pyo3::PyErr;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use tensorcall::{Error, ErrorKind};

/// The exception that torch raises in this case: a `RuntimeError` for all that can go wrong with a
/// call; programs test for it.
pub(crate) fn to_python(error: &Error) -> PyErr {
    match error.kind() {
        ErrorKind::Usage => PyValueError::new_err(error.to_string()),
        _ => PyRuntimeError::new_err(error.to_string()),
    }
}
