//! The Python extension module `tensorcall._tensorcall`. Importing it has no side effects.

mod agent;
mod autograd;
mod bell;
mod call;
mod error;
mod faults;
mod gil;
mod gil_wait;
mod group;
mod handler;
mod later;
mod log;
mod rref;
mod spawner;
mod tensor;
mod testing;
mod thread_state;
mod time;
mod unfit;
mod user_code;
mod value;
mod visitors;

use std::time::Duration;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

/// Keeps all threads of ours out of the interpreter from now on, because it is about to end, and waits
/// up to `limit` seconds for those inside to leave; functions that still run after half of it are
/// interrupted. Returns how many have not left. For `atexit`.
#[pyfunction]
fn stop_entering(py: Python<'_>, limit: f64) -> usize {
    gil::stop_entering(py, Duration::try_from_secs_f64(limit).unwrap_or_default())
}

/// Where an agent would listen whose workers meet at `host`, and why there. Raises if that cannot be.
#[pyfunction]
fn listening(py: Python<'_>, host: Option<String>) -> PyResult<(String, String)> {
    agent::listening(py, host)
}

/// To be run in a forked child, which has no thread but the one that forked. `inherited` is kept for ever:
/// what belongs to the parent is not to be ended here, by no finalizer (FORK-1).
#[pyfunction]
fn after_fork_in_child(py: Python<'_>, inherited: Py<PyAny>) {
    gil::after_fork_in_child(py);
    std::mem::forget(inherited);
}

/// Calls `body`, which may take as long as the agent lives, on a thread that is none of the agent's worker
/// threads; the RPCs that it makes count as part of a call that this worker runs.
#[pyfunction]
fn run_apart(py: Python<'_>, body: Py<PyAny>) -> PyResult<()> {
    let run = move || {
        gil::inside(|py| {
            user_code::run(py, &body);
            drop(body);
        });
    };
    if gil::outside(py, || spawner::run_apart(run)) {
        Ok(())
    } else {
        Err(PyRuntimeError::new_err("there is no agent, or no thread could be started"))
    }
}

/// Whether to measure how long requests wait for the interpreter lock, for the metrics.
#[pyfunction]
fn measure_gil_waits(flag: bool) {
    gil_wait::measure(flag);
}

/// Whether results with tensors are all packed by Python, since some caller's device map moves tensors that
/// are in main memory.
#[pyfunction]
fn place_tensors(flag: bool) {
    handler::place_tensors(flag);
}

#[pymodule]
fn _tensorcall(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<agent::Agent>()?;
    module.add_class::<bell::Bell>()?;
    module.add_class::<call::Call>()?;
    module.add_class::<later::Later>()?;
    module.add_class::<rref::RRef>()?;
    module.add_function(wrap_pyfunction!(run_apart, module)?)?;
    module.add_function(wrap_pyfunction!(stop_entering, module)?)?;
    module.add_function(wrap_pyfunction!(listening, module)?)?;
    module.add_function(wrap_pyfunction!(after_fork_in_child, module)?)?;
    module.add_function(wrap_pyfunction!(measure_gil_waits, module)?)?;
    module.add_function(wrap_pyfunction!(place_tensors, module)?)?;
    tensor::add_to(module)?;
    testing::add_to(module)
}
