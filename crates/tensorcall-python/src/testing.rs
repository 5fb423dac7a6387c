//! `tensorcall._tensorcall._testing`: what tests need to see without two processes. Private.

use std::time::Instant;

use pyo3::exceptions::{PyMemoryError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};
use tensorcall::engine::body::{Body, Received};
use tensorcall_proto::wire::TensorDesc;

use crate::tensor::{Path, TensorWriter, TorchApi, read_tensors_by};
use crate::value::{self, Plain};
use crate::{gil, log, user_code};

/// Adds the submodule to the extension.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let testing = PyModule::new(module.py(), "_testing")?;
    testing.add_function(wrap_pyfunction!(roundtrip, &testing)?)?;
    testing.add_function(wrap_pyfunction!(decode, &testing)?)?;
    testing.add_function(wrap_pyfunction!(describe, &testing)?)?;
    testing.add_function(wrap_pyfunction!(path, &testing)?)?;
    testing.add_function(wrap_pyfunction!(owner_dropped_outside, &testing)?)?;
    testing.add_function(wrap_pyfunction!(nanoseconds, &testing)?)?;
    testing.add_function(wrap_pyfunction!(call_from_thread, &testing)?)?;
    testing.add_function(wrap_pyfunction!(call_on_thread, &testing)?)?;
    testing.add_function(wrap_pyfunction!(warn, &testing)?)?;
    module.add_submodule(&testing)
}

fn api<'py>(py: Python<'py>, path: Option<&str>) -> PyResult<&'py TorchApi> {
    match path {
        None => TorchApi::get(py),
        Some("stable") => TorchApi::by(py, Path::Stable),
        Some("attributes") => TorchApi::by(py, Path::Attributes),
        Some(other) => Err(PyValueError::new_err(format!("no path to torch is called {other}"))),
    }
}

fn send<'py>(object: &Bound<'py, PyAny>, api: &'py TorchApi) -> PyResult<Body> {
    let mut payload = Vec::new();
    let mut writer = TensorWriter::with(object.py(), api);
    if value::encode(object, &mut payload, &mut writer, &mut Vec::new())? == Plain::No {
        return Err(PyTypeError::new_err("not plain"));
    }
    let (tensors, buffers) = writer.finish()?;
    Ok(Body { payload, tensors, buffers, ..Body::default() })
}

fn receive<'py>(py: Python<'py>, received: Received, api: &TorchApi) -> PyResult<Bound<'py, PyAny>> {
    let Received { payload, tensors, buffers, .. } = received;
    let tensors = read_tensors_by(api, py, &tensors, buffers)?;
    value::decode(py, payload.as_ref(), &tensors, &[])
}

fn transfer(body: &Body) -> PyResult<Received> {
    body.receive().map_err(|error| PyMemoryError::new_err(error.to_string()))
}

/// Sends `object` to ourselves as a plain value; `TypeError` if it is not plain.
#[pyfunction]
#[pyo3(signature = (object, path=None))]
fn roundtrip<'py>(object: &Bound<'py, PyAny>, path: Option<&str>) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let api = api(py, path)?;
    receive(py, transfer(&send(object, api)?)?, api)
}

/// Decodes bytes as a value without tensors.
#[pyfunction]
fn decode<'py>(py: Python<'py>, bytes: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    value::decode(py, bytes, &[], &[])
}

type Buffers = Vec<Vec<u8>>;

/// How tensors would travel: their descriptions and the bytes of the buffers.
#[pyfunction]
#[pyo3(signature = (tensors, path=None))]
fn describe<'py>(
    py: Python<'py>,
    tensors: &Bound<'py, PyList>,
    path: Option<&str>,
) -> PyResult<(Vec<Bound<'py, PyDict>>, Buffers)> {
    let mut writer = TensorWriter::with(py, api(py, path)?);
    for tensor in tensors {
        writer.push(&tensor)?;
    }
    let (tensors, buffers) = writer.finish()?;
    let received = transfer(&Body { tensors, buffers, ..Body::default() })?;
    let bytes = received.buffers.iter().map(|buffer| buffer.as_ref().to_vec()).collect();
    let descs = received.tensors.iter().map(|desc| as_dict(py, desc)).collect::<PyResult<_>>()?;
    Ok((descs, bytes))
}

fn as_dict<'py>(py: Python<'py>, desc: &TensorDesc) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("dtype", desc.dtype.name())?;
    dict.set_item("shape", &desc.shape)?;
    dict.set_item("strides", &desc.strides)?;
    dict.set_item("buffer", desc.buffer)?;
    dict.set_item("offset", desc.offset)?;
    dict.set_item("flags", (desc.requires_grad, desc.conj, desc.neg))?;
    Ok(dict)
}

/// The path to torch that is taken when none is asked for.
#[pyfunction]
fn path(py: Python<'_>) -> PyResult<&'static str> {
    Ok(match TorchApi::get(py)?.path() {
        Path::Stable => "stable",
        Path::Attributes => "attributes",
    })
}

/// Sends `object`, runs `meanwhile` while the message is alive, then lets it go on a thread that
/// never enters Python; returns what arrived.
#[pyfunction]
fn owner_dropped_outside<'py>(
    object: &Bound<'py, PyAny>,
    meanwhile: &Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = object.py();
    let api = TorchApi::get(py)?;
    let body = send(object, api)?;
    meanwhile.call0()?;
    let received = transfer(&body)?;
    gil::outside(py, || {
        let reactor = std::thread::spawn(move || drop(body));
        reactor.join()
    })
    .map_err(|_| PyValueError::new_err("the thread panicked"))?;
    receive(py, received, api)
}

/// Nanoseconds that writing and reading `object` take, the least of `rounds` rounds of 100 each, so
/// that what else the machine does counts little.
#[pyfunction]
#[pyo3(signature = (object, rounds, path=None))]
fn nanoseconds(object: &Bound<'_, PyAny>, rounds: u32, path: Option<&str>) -> PyResult<(u128, u128)> {
    const TIMES: usize = 100;
    let py = object.py();
    let api = api(py, path)?;
    let (mut writing, mut reading) = (u128::MAX, u128::MAX);
    for _ in 0..rounds {
        let start = now();
        let bodies = (0..TIMES).map(|_| send(object, api)).collect::<PyResult<Vec<_>>>()?;
        writing = writing.min(start.elapsed().as_nanos() / TIMES as u128);
        let arrived = bodies.iter().map(transfer).collect::<PyResult<Vec<_>>>()?;
        let start = now();
        for received in arrived {
            drop(receive(py, received, api)?);
        }
        reading = reading.min(start.elapsed().as_nanos() / TIMES as u128);
    }
    Ok((writing, reading))
}

#[expect(clippy::disallowed_methods, reason = "measures time")]
fn now() -> Instant {
    Instant::now()
}

/// Calls `function` again and again from a new thread of ours, which waits outside in between,
/// until it returns something true. The thread is not waited for.
#[pyfunction]
fn call_from_thread(function: Py<PyAny>) {
    std::thread::spawn(move || {
        gil::inside(|py| {
            let call = || user_code::call(function.bind(py), ());
            let done = || call().and_then(|answer| answer.is_truthy()).unwrap_or(true);
            while !done() {
                gil::outside(py, std::thread::yield_now);
            }
        });
    });
}

/// Calls `function` once, on a new thread of ours, and waits until that thread has ended.
#[pyfunction]
fn call_on_thread(py: Python<'_>, function: Py<PyAny>) -> PyResult<Py<PyAny>> {
    let call = move || gil::inside(|py| user_code::call(function.bind(py), ()).map(Bound::unbind));
    gil::outside(py, || std::thread::spawn(call).join())
        .map_err(|_| PyValueError::new_err("the thread panicked"))?
}

/// Has the Rust side warn `count` times, without leaving Python: nothing is taken from the queue meanwhile.
#[pyfunction]
fn warn(count: u32) {
    log::install();
    for number in 0..count {
        tracing::warn!(number, "a warning of {}%", 100);
    }
}
