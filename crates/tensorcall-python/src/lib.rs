//! The Python extension module `tensorcall._tensorcall`. Importing it has no side effects.

mod agent;
mod call;
mod error;
mod gil;
mod handler;
mod log;
mod spawner;
mod tensor;
mod testing;
mod time;
mod value;

use std::time::Duration;

use pyo3::prelude::*;

/// Keeps all threads of ours out of the interpreter from now on, because it is about to end, and waits
/// up to `limit` seconds for those inside to leave. Returns how many have not. For `atexit`.
#[pyfunction]
fn stop_entering(py: Python<'_>, limit: f64) -> usize {
    gil::stop_entering(py, Duration::try_from_secs_f64(limit).unwrap_or_default())
}

#[pymodule]
fn _tensorcall(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<agent::Agent>()?;
    module.add_class::<call::Call>()?;
    module.add_function(wrap_pyfunction!(stop_entering, module)?)?;
    testing::add_to(module)
}
