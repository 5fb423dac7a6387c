//! A request of another worker becomes one call into Python, on a pool thread.

use std::time::Duration;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};
use tensorcall::body::{Body, Received};
use tensorcall::proto::wire::message::{Encoding, FailureKind};
use tensorcall::{Handler, InboundCall, Responder, ThreadHook};

use crate::gil::{inside, outside};
use crate::tensor::{TensorWriter, read_tensors};
use crate::value::{self, Plain};

/// Hands requests to the handler object of `rpc/_handler.py`.
pub(crate) struct PyHandler(pub(crate) Py<PyAny>);

/// What a reply carries.
struct Answer {
    raised: bool,
    encoding: Encoding,
    body: Body,
}

/// Encodings as the handler object numbers them.
const RAISED: u8 = 2;

impl ThreadHook for PyHandler {
    fn run(&self, body: &mut (dyn FnMut() + Send)) {
        // The thread signs in once, for life: later entries cost next to nothing.
        inside(|py| outside(py, body));
    }

    fn patience(&self) -> Duration {
        // Threads that run Python take turns anyway: a function as short as this is better run by the
        // thread that is at it than by one that has to be woken and then waits for its turn.
        Duration::from_micros(100)
    }
}

impl Handler for PyHandler {
    fn handle(&self, call: InboundCall, responder: Responder) {
        let result = inside(|py| self.run(py, call).map_err(|error| describe(py, &error)));
        match result {
            Ok(Answer { raised: false, encoding, body }) => responder.returned(encoding, body),
            Ok(Answer { raised: true, encoding, body }) => responder.raised(encoding, body),
            Err(text) => responder.failed(FailureKind::Internal, text),
        }
    }
}

impl PyHandler {
    fn run(&self, py: Python<'_>, call: InboundCall) -> PyResult<Answer> {
        let InboundCall { caller, function, encoding, body } = call;
        let Received { payload, tensors, buffers } = body;
        let tensors = read_tensors(py, &tensors, buffers)?;
        let caller = caller.rank.get();
        match (function, encoding) {
            (Some(name), Encoding::Value) => {
                let arguments = value::decode(py, payload.as_ref(), &tensors)?;
                drop((payload, tensors));
                self.run_plain(py, &name, &arguments, caller)
            }
            _ => {
                let payload = PyBytes::new(py, payload.as_ref());
                let tensors = PyList::new(py, tensors)?;
                let reply =
                    self.0.bind(py).call_method1(intern!(py, "run_pickled"), (payload, tensors, caller))?;
                pickled(&reply)
            }
        }
    }

    /// Runs a function that was named, with arguments that were plain data.
    fn run_plain(
        &self,
        py: Python<'_>,
        name: &str,
        arguments: &Bound<'_, PyAny>,
        caller: u16,
    ) -> PyResult<Answer> {
        let handler = self.0.bind(py);
        let (args, kwargs): (Bound<'_, PyTuple>, Bound<'_, PyDict>) = arguments.extract()?;
        let result = handler.call_method1(intern!(py, "resolve"), (name,)).and_then(|function| {
            handler.call_method1(intern!(py, "run_value"), (function, args, kwargs, caller))
        });
        let result = match result {
            Ok(result) => result,
            Err(error) => {
                let reply = handler.call_method1(intern!(py, "dump_exception"), (error.into_value(py),))?;
                return pickled(&reply);
            }
        };
        let mut writer = TensorWriter::new(py)?;
        let mut payload = Vec::new();
        if value::encode(&result, &mut payload, &mut writer)? == Plain::No {
            return pickled(&handler.call_method1(intern!(py, "dump_result"), (result,))?);
        }
        let (tensors, buffers) = writer.finish()?;
        Ok(Answer { raised: false, encoding: Encoding::Value, body: Body { payload, tensors, buffers } })
    }
}

/// A reply that Python has packed: encoding, payload, tensors.
fn pickled(reply: &Bound<'_, PyAny>) -> PyResult<Answer> {
    let (kind, payload, tensors): (u8, Bound<'_, PyBytes>, Bound<'_, PyList>) = reply.extract()?;
    let body = pickled_body(&payload, &tensors)?;
    Ok(Answer { raised: kind == RAISED, encoding: Encoding::Pickle, body })
}

/// A pickle and its table of tensors.
pub(crate) fn pickled_body(payload: &Bound<'_, PyBytes>, tensors: &Bound<'_, PyList>) -> PyResult<Body> {
    let payload = payload.as_bytes().to_vec();
    if tensors.is_empty() {
        return Ok(Body::of(payload));
    }
    let mut writer = TensorWriter::new(tensors.py())?;
    for tensor in tensors {
        // The pickle counts every occurrence, so that one object twice has two places.
        writer.push_again(&tensor)?;
    }
    let (tensors, buffers) = writer.finish()?;
    Ok(Body { payload, tensors, buffers })
}

fn describe(py: Python<'_>, error: &PyErr) -> String {
    let traceback = error.traceback(py).and_then(|traceback| traceback.format().ok()).unwrap_or_default();
    format!("the request could not be run: {error}\n{traceback}")
}
