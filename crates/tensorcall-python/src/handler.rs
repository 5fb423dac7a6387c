//! A request of another worker becomes one call into Python, on a pool thread.

use std::time::Duration;

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};
use tensorcall::body::{Body, Received};
use tensorcall::proto::wire::message::{Encoding, FailureKind};
use tensorcall::{Handler, InboundCall, Responder, ThreadHook};

use crate::gil::{self, inside, outside};
use crate::gil_wait;
use crate::later::Later;
use crate::tensor::{TensorWriter, read_tensors};
use crate::user_code;
use crate::value::{self, Plain};

/// Hands requests to the handler object of `rpc/_handler.py`.
pub(crate) struct PyHandler(pub(crate) Py<PyAny>);

/// What a reply carries.
pub(crate) enum Answer {
    Packed {
        raised: bool,
        encoding: Encoding,
        body: Body,
    },
    /// There is no such thing as an outcome, for this reason.
    Failed(String),
}

impl Answer {
    /// What was packed, or why that was not possible.
    pub(crate) fn of(py: Python<'_>, packed: PyResult<Self>) -> Self {
        packed.unwrap_or_else(|error| Self::Failed(describe(py, &error)))
    }

    /// Answers the caller.
    pub(crate) fn send(self, responder: Responder) {
        match self {
            Self::Packed { raised: false, encoding, body } => responder.returned(encoding, body),
            Self::Packed { raised: true, .. } if gil::is_closed() => {
                // Most likely it is our own interruption, which means nothing to the caller.
                responder.failed(FailureKind::ShuttingDown, "the worker's process ends".to_owned());
            }
            Self::Packed { raised: true, encoding, body } => responder.raised(encoding, body),
            Self::Failed(text) => responder.failed(FailureKind::Internal, text),
        }
    }
}

/// What a function came to when it returned.
enum Outcome {
    Now(Answer),
    Later(Py<Later>),
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
        let begin = gil_wait::begin();
        let now = inside(|py| {
            gil_wait::end(begin);
            match self.run(py, call) {
                Ok(Outcome::Later(later)) => {
                    later.get().owe(py, responder);
                    None
                }
                Ok(Outcome::Now(answer)) => Some((answer, responder)),
                Err(error) => Some((Answer::of(py, Err(error)), responder)),
            }
        });
        if let Some((answer, responder)) = now {
            answer.send(responder);
        }
    }
}

impl PyHandler {
    /// Calls a method of the handler object.
    pub(crate) fn call<'py>(
        &self,
        method: &Bound<'py, PyString>,
        args: impl IntoPyObject<'py, Target = PyTuple, Output = Bound<'py, PyTuple>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let method = self.0.bind(method.py()).getattr(method)?;
        user_code::call(&method, args)
    }

    fn run(&self, py: Python<'_>, call: InboundCall) -> PyResult<Outcome> {
        let InboundCall { caller, function, encoding, body } = call;
        let Received { payload, tensors, buffers } = body;
        let tensors = read_tensors(py, &tensors, buffers)?;
        let caller = caller.rank.get();
        if let (Some(name), Encoding::Value) = (function, encoding) {
            let arguments = value::decode(py, payload.as_ref(), &tensors)?;
            drop((payload, tensors));
            return self.run_plain(py, &name, &arguments, caller);
        }
        let payload = PyBytes::new(py, payload.as_ref());
        let tensors = PyList::new(py, tensors)?;
        let reply = self.call(intern!(py, "run_pickled"), (payload, tensors, caller))?;
        later_or(&reply, pickled)
    }

    /// Runs a function that was named, with arguments that were plain data.
    fn run_plain(
        &self,
        py: Python<'_>,
        name: &str,
        arguments: &Bound<'_, PyAny>,
        caller: u16,
    ) -> PyResult<Outcome> {
        let (args, kwargs): (Bound<'_, PyTuple>, Bound<'_, PyDict>) = arguments.extract()?;
        let result = self
            .call(intern!(py, "resolve"), (name,))
            .and_then(|function| self.call(intern!(py, "run_value"), (function, args, kwargs, caller)));
        match result {
            Ok(result) => later_or(&result, |result| self.pack(py, result)),
            Err(error) => {
                let error = error.into_value(py);
                self.pack_exception(py, error.bind(py)).map(Outcome::Now)
            }
        }
    }

    /// Packs a result: as plain data, or else as a pickle.
    pub(crate) fn pack(&self, py: Python<'_>, result: &Bound<'_, PyAny>) -> PyResult<Answer> {
        let mut writer = TensorWriter::new(py)?;
        let mut payload = Vec::new();
        if value::encode(result, &mut payload, &mut writer)? == Plain::No {
            return pickled(&self.call(intern!(py, "dump_result"), (result,))?);
        }
        let (tensors, buffers) = writer.finish()?;
        let body = Body { payload, tensors, buffers };
        Ok(Answer::Packed { raised: false, encoding: Encoding::Value, body })
    }

    /// Packs the exception of a function.
    pub(crate) fn pack_exception(&self, py: Python<'_>, error: &Bound<'_, PyAny>) -> PyResult<Answer> {
        pickled(&self.call(intern!(py, "dump_exception"), (error,))?)
    }
}

/// What stands for a result that comes later, or `now` of the result.
fn later_or<'py>(
    result: &Bound<'py, PyAny>,
    now: impl FnOnce(&Bound<'py, PyAny>) -> PyResult<Answer>,
) -> PyResult<Outcome> {
    match result.cast::<Later>() {
        Ok(later) => Ok(Outcome::Later(later.clone().unbind())),
        Err(_) => now(result).map(Outcome::Now),
    }
}

/// A reply that Python has packed: encoding, payload, tensors.
fn pickled(reply: &Bound<'_, PyAny>) -> PyResult<Answer> {
    let (kind, payload, tensors): (u8, Bound<'_, PyBytes>, Bound<'_, PyList>) = reply.extract()?;
    let body = pickled_body(&payload, &tensors)?;
    Ok(Answer::Packed { raised: kind == RAISED, encoding: Encoding::Pickle, body })
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
