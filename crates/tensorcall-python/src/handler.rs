//! A request of another worker becomes one call into Python, on a pool thread.

use std::any::Any;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyString, PyTuple};
use tensorcall::engine::autograd::LocalEngine;
use tensorcall::engine::body::{Body, Received};
use tensorcall::engine::proto::wire::message::{Encoding, FailureKind};
use tensorcall::engine::proto::wire::tensor::{Device, DeviceKind};
use tensorcall::engine::{Handler, InboundCall, Packed, Responder, ThreadHook};

use crate::autograd::{Place, recorded, to_place, to_ref};
use crate::gil::{self, inside, outside};
use crate::gil_wait;
use crate::later::Later;
use crate::rref::{self, KeptObject, RRef};
use crate::tensor::{TensorWriter, read_tensors};
use crate::unfit;
use crate::user_code;
use crate::value::{self, Plain};

/// Hands requests to the handler object of `rpc/_handler.py`.
pub(crate) struct PyHandler(pub(crate) Py<PyAny>);

/// Who a result is for, and in which autograd context.
#[derive(Clone, Copy)]
pub(crate) struct Asker {
    rank: u16,
    autograd: Option<Place>,
    /// It reads plain data only.
    plain: bool,
}

impl Asker {
    pub(crate) fn of(responder: &Responder) -> Self {
        let (rank, plain) = (responder.caller().get(), responder.plain());
        Self { rank, autograd: responder.autograd().map(to_place), plain }
    }
}

/// What a reply carries.
pub(crate) enum Answer {
    Packed {
        raised: bool,
        encoding: Encoding,
        body: Body,
    },
    /// This object, which stays here.
    Kept(Py<PyAny>),
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
            Self::Kept(object) => responder.keep(KeptObject::keep(object)),
            Self::Failed(text) => responder.failed(FailureKind::Internal, text),
        }
    }
}

/// What a function came to when it returned.
enum Outcome {
    Now(Answer),
    Later(Py<Later>),
}

/// Some caller's device map moves tensors that are in main memory: only Python knows whose and where to.
static PLACES_TENSORS: AtomicBool = AtomicBool::new(false);

/// Whether results with tensors are all packed by Python, which places them on devices.
pub(crate) fn place_tensors(flag: bool) {
    PLACES_TENSORS.store(flag, Ordering::Relaxed);
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
            match self.run(py, call, Asker::of(&responder)) {
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

    fn local_engine(&self) -> Option<&dyn LocalEngine> {
        Some(self)
    }

    fn fetch(&self, value: Arc<dyn Any + Send + Sync>, _: InboundCall, responder: Responder) {
        let asker = Asker::of(&responder);
        let answer = inside(|py| {
            let packed = KeptObject::of(py, &*value).and_then(|object| self.pack(py, &object, asker, None));
            drop(value);
            Answer::of(py, packed)
        });
        answer.send(responder);
    }

    fn fetch_packed(&self, packed: &Packed, _: InboundCall, responder: Responder) {
        let asker = Asker::of(&responder);
        let answer = inside(|py| {
            let packed = self.pack_anew(py, packed, asker);
            Answer::of(py, packed)
        });
        answer.send(responder);
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

    fn run(&self, py: Python<'_>, call: InboundCall, asker: Asker) -> PyResult<Outcome> {
        let InboundCall { function, encoding, body, creates, .. } = call;
        let Received { payload, tensors: descs, buffers, rrefs, autograd } = body;
        let tensors = read_tensors(py, &descs, buffers)?;
        if let (Some(name), Encoding::Value) = (function, encoding) {
            let rrefs = self.python_rrefs(py, rrefs)?;
            let arguments = value::decode(py, payload.as_ref(), &tensors, &rrefs)?;
            let recorded = recorded(autograd, &descs, &tensors);
            drop((payload, tensors, rrefs));
            let result = self.run_named(py, &name, arguments, recorded, asker);
            return self.plain_outcome(py, &name, result, asker, creates);
        }
        let payload = PyBytes::new(py, payload.as_ref());
        let tensors = PyList::new(py, tensors)?;
        let rrefs = self.rref_list(py, rrefs)?;
        let arguments = (payload, tensors, rrefs, asker.rank, asker.autograd);
        if creates {
            return self.kept_outcome(py, self.call(intern!(py, "run_pickled_here"), arguments), asker);
        }
        let reply = self.call(intern!(py, "run_pickled"), arguments)?;
        later_or(&reply, pickled)
    }

    /// Runs a function that was named, with arguments that were plain data. Its caller has recorded some of
    /// their tensors.
    fn run_named<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        arguments: Bound<'py, PyAny>,
        recorded: Vec<Bound<'py, PyAny>>,
        asker: Asker,
    ) -> PyResult<Bound<'py, PyAny>> {
        let (args, kwargs): (Bound<'_, PyTuple>, Bound<'_, PyDict>) = arguments.extract()?;
        drop(arguments);
        let function = self.call(intern!(py, "resolve"), (name,))?;
        match asker.autograd {
            None => self.call(intern!(py, "run_value"), (function, args, kwargs, asker.rank)),
            Some(place) => {
                let arguments = (function, args, kwargs, asker.rank, place, recorded);
                self.call(intern!(py, "run_recorded"), arguments)
            }
        }
    }

    /// What becomes of the result of a function that was named.
    fn plain_outcome(
        &self,
        py: Python<'_>,
        name: &str,
        result: PyResult<Bound<'_, PyAny>>,
        asker: Asker,
        creates: bool,
    ) -> PyResult<Outcome> {
        if creates {
            return self.kept_outcome(py, result, asker);
        }
        match result {
            Ok(result) => later_or(&result, |result| self.pack(py, result, asker, Some(name))),
            Err(error) => self.raised(py, error, asker),
        }
    }

    /// The outcome of a function whose result stays here.
    fn kept_outcome(
        &self,
        py: Python<'_>,
        result: PyResult<Bound<'_, PyAny>>,
        asker: Asker,
    ) -> PyResult<Outcome> {
        match result {
            Ok(result) => later_or(&result, |result| Ok(Answer::Kept(result.clone().unbind()))),
            Err(error) => self.raised(py, error, asker),
        }
    }

    fn raised(&self, py: Python<'_>, error: PyErr, asker: Asker) -> PyResult<Outcome> {
        let error = error.into_value(py);
        self.pack_exception(py, error.bind(py), asker).map(Outcome::Now)
    }

    /// References that came in plain data, as Python sees them.
    pub(crate) fn python_rrefs<'py>(
        &self,
        py: Python<'py>,
        rrefs: Vec<tensorcall::engine::RRef>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        if rrefs.is_empty() {
            return Ok(Vec::new());
        }
        let wrap = |native| self.call(intern!(py, "wrap_rref"), (native,));
        self.rref_list(py, rrefs)?.iter().map(wrap).collect()
    }

    /// The exception that plain data stands for.
    pub(crate) fn plain_exception(&self, py: Python<'_>, payload: &[u8]) -> PyResult<PyErr> {
        let parts = value::decode_exception(payload)?;
        self.call(intern!(py, "load_plain_exception"), parts).map(PyErr::from_value)
    }

    fn rref_list<'py>(
        &self,
        py: Python<'py>,
        rrefs: Vec<tensorcall::engine::RRef>,
    ) -> PyResult<Bound<'py, PyList>> {
        if rrefs.is_empty() {
            return Ok(PyList::empty(py));
        }
        RRef::list(py, rrefs, &Arc::new(Self(self.0.clone_ref(py))))
    }

    /// Packs a result for whoever asked: as plain data, or else as a pickle.
    ///
    /// `function` is what returned it, for an error.
    pub(crate) fn pack(
        &self,
        py: Python<'_>,
        result: &Bound<'_, PyAny>,
        to: Asker,
        function: Option<&str>,
    ) -> PyResult<Answer> {
        if to.plain {
            return self.pack_plain(py, result, to, function);
        }
        let (mut writer, mut payload, mut rrefs) = (TensorWriter::new(py)?, Vec::new(), Vec::new());
        let plain = value::encode(result, &mut payload, &mut writer, &mut rrefs)?;
        if plain == Plain::No || (!writer.is_empty() && PLACES_TENSORS.load(Ordering::Relaxed)) {
            return self.pickle(py, result, to);
        }
        self.written(py, payload, writer, rrefs, to)
    }

    /// The answer with a result that was written as plain data. Its tensors that need gradients are recorded, if
    /// it is for an autograd context.
    fn written<'py>(
        &self,
        py: Python<'py>,
        payload: Vec<u8>,
        writer: TensorWriter<'py>,
        rrefs: Vec<tensorcall::engine::RRef>,
        to: Asker,
    ) -> PyResult<Answer> {
        let recording = to.autograd.map(|place| (place, writer.recorded()));
        let (tensors, buffers) = writer.finish()?;
        let autograd = match recording {
            Some((place, tensors)) if !tensors.is_empty() => self
                .call(intern!(py, "record_result"), (tensors, place, to.rank))?
                .extract::<Option<Place>>()?,
            _ => None,
        };
        let autograd = autograd.map(to_ref);
        let body = Body { payload, tensors, buffers, rrefs, autograd, ..Body::default() };
        Ok(Answer::Packed { raised: false, encoding: Encoding::Value, body })
    }

    fn pickle(&self, py: Python<'_>, result: &Bound<'_, PyAny>, to: Asker) -> PyResult<Answer> {
        pickled(&self.call(intern!(py, "dump_result"), (result, to.autograd, to.rank))?)
    }

    /// Packs a result for somebody who is no Python program. That it is not plain data is an exception.
    fn pack_plain(
        &self,
        py: Python<'_>,
        result: &Bound<'_, PyAny>,
        to: Asker,
        function: Option<&str>,
    ) -> PyResult<Answer> {
        let (mut writer, mut payload, mut rrefs) = (TensorWriter::new(py)?, Vec::new(), Vec::new());
        let packed = match value::encode_plain(result, &mut payload, &mut writer, &mut rrefs) {
            Ok(Plain::Yes) => self.written(py, payload, writer, rrefs, to),
            Ok(Plain::No) => {
                let what = function.map_or("the value".into(), |name| format!("the result of {name}"));
                Err(unfit::error(&what, result))
            }
            Err(error) => Err(error),
        };
        packed.or_else(|error| self.pack_exception(py, error.into_value(py).bind(py), to))
    }

    /// Packs in plain data what was pickled.
    fn pack_anew(&self, py: Python<'_>, packed: &Packed, to: Asker) -> PyResult<Answer> {
        let method = if packed.raised { intern!(py, "describe_packed") } else { intern!(py, "load_result") };
        let (payload, tensors, rrefs) = rref::pickle_of(py, packed, &Arc::new(Self(self.0.clone_ref(py))))?;
        let found = self.call(method, (payload, tensors, rrefs))?;
        if packed.raised { plainly_raised(&found) } else { self.pack(py, &found, to, None) }
    }

    /// Packs the exception of a function for another Python program.
    pub(crate) fn pickle_exception(&self, py: Python<'_>, error: &Bound<'_, PyAny>) -> PyResult<Answer> {
        pickled(&self.call(intern!(py, "dump_exception"), (error,))?)
    }

    /// Packs the exception of a function.
    pub(crate) fn pack_exception(
        &self,
        py: Python<'_>,
        error: &Bound<'_, PyAny>,
        to: Asker,
    ) -> PyResult<Answer> {
        if !to.plain {
            return self.pickle_exception(py, error);
        }
        plainly_raised(&self.call(intern!(py, "describe_exception"), (error,))?)
    }
}

/// The answer that a function raised an exception, of which this is told: classes, message and origin.
fn plainly_raised(told: &Bound<'_, PyAny>) -> PyResult<Answer> {
    let (classes, message, origin): (String, String, String) = told.extract()?;
    let payload = value::encode_exception((&classes, &message, &origin));
    Ok(Answer::Packed { raised: true, encoding: Encoding::Value, body: Body::of(payload) })
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

/// A reply that Python has packed: encoding, payload, tensors, references, autograd context.
fn pickled(reply: &Bound<'_, PyAny>) -> PyResult<Answer> {
    type Reply<'py> = (u8, Bound<'py, PyBytes>, Bound<'py, PyList>, Bound<'py, PyList>, Option<Place>);
    let (kind, payload, tensors, rrefs, autograd): Reply<'_> = reply.extract()?;
    let body = pickled_body(&payload, &tensors, &rrefs, autograd)?;
    Ok(Answer::Packed { raised: kind == RAISED, encoding: Encoding::Pickle, body })
}

/// A pickle and its tables of tensors and references.
pub(crate) fn pickled_body(
    payload: &Bound<'_, PyBytes>,
    tensors: &Bound<'_, PyList>,
    rrefs: &Bound<'_, PyList>,
    autograd: Option<Place>,
) -> PyResult<Body> {
    let autograd = autograd.map(to_ref);
    let payload = payload.as_bytes().to_vec();
    let rrefs = RRef::all_of(rrefs)?;
    if tensors.is_empty() {
        return Ok(Body { payload, rrefs, autograd, ..Body::default() });
    }
    let mut writer = TensorWriter::new(tensors.py())?;
    let mut places = Vec::new();
    for tensor in tensors {
        // One that is not to stay in main memory comes with the device where it is to be.
        let (tensor, place) = match tensor.cast_exact::<PyTuple>() {
            Ok(pair) => pair.extract::<(Bound<'_, PyAny>, String)>()?,
            Err(_) => (tensor, String::new()),
        };
        // The pickle counts every occurrence, so that one object twice has two places.
        writer.push_again(&tensor)?;
        places.push(place);
    }
    let (mut tensors, buffers) = writer.finish()?;
    for (desc, place) in tensors.iter_mut().zip(places).filter(|(_, place)| !place.is_empty()) {
        desc.device = device_named(&place)?;
    }
    Ok(Body { payload, tensors, buffers, rrefs, autograd, ..Body::default() })
}

/// A device by torch's name for it.
fn device_named(place: &str) -> PyResult<Device> {
    let index = place.strip_prefix("cuda").and_then(|rest| match rest.strip_prefix(':') {
        Some(index) => index.parse().ok(),
        None => rest.is_empty().then_some(0),
    });
    match index {
        Some(index) => Ok(Device { kind: DeviceKind::Cuda, index }),
        None if place == "cpu" => Ok(Device::CPU),
        None => Err(PyValueError::new_err(format!("tensors cannot be sent to {place}"))),
    }
}

fn describe(py: Python<'_>, error: &PyErr) -> String {
    let traceback = error.traceback(py).and_then(|traceback| traceback.format().ok()).unwrap_or_default();
    format!("the request could not be run: {error}\n{traceback}")
}
