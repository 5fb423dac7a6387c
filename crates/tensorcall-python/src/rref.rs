//! `RRef`: a handle on a reference, and what this worker keeps for others.

use std::any::Any;
use std::sync::Arc;

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyList, PyType};
use tensorcall::engine::body::Received;
use tensorcall::engine::proto::ids::{ForkId, RRefId};
use tensorcall::engine::proto::wire::message::Encoding;
use tensorcall::engine::{Kept, Packed, RRefState};

use crate::autograd::{Place, to_ref};
use crate::call::{Call, Route, wait_in_slices};
use crate::error::to_python;
use crate::gil::{self, inside, outside};
use crate::handler::PyHandler;
use crate::tensor::read_tensors;
use crate::{time, value};

/// A reference to a value on some worker. The owner is told when the last handle on it is gone.
#[pyclass(frozen, module = "tensorcall._tensorcall")]
pub(crate) struct RRef {
    rref: tensorcall::engine::RRef,
    handler: Arc<PyHandler>,
}

/// A value that this worker keeps. It may be dropped on any thread, and is let go where Python may run.
pub(crate) struct KeptObject(Option<Py<PyAny>>);

impl KeptObject {
    pub(crate) fn keep(object: Py<PyAny>) -> Arc<dyn Any + Send + Sync> {
        Arc::new(Self(Some(object)))
    }

    /// What [`Handler::fetch`](tensorcall::engine::Handler::fetch) or a reference of this agent has.
    pub(crate) fn of<'py>(py: Python<'py>, kept: &(dyn Any + Send + Sync)) -> PyResult<Bound<'py, PyAny>> {
        let object = kept.downcast_ref::<Self>().and_then(|kept| kept.0.as_ref());
        let object =
            object.ok_or_else(|| PyRuntimeError::new_err("what is kept here is no Python object"))?;
        Ok(object.bind(py).clone())
    }
}

impl Drop for KeptObject {
    fn drop(&mut self) {
        let Some(object) = self.0.take() else { return };
        if gil::is_inside() {
            drop(object);
        } else if tensorcall::engine::is_pool_thread() {
            inside(|_| drop(object));
        } else {
            // Nobody knows how much hangs on it: as if it were large.
            gil::bury(object, usize::MAX);
        }
    }
}

/// Whether an object is a Python `RRef`.
pub(crate) fn is_rref(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    object.is_instance(CLASS.import(object.py(), "tensorcall.rpc._rref", "PyRRef")?)
}

/// The reference that a Python `RRef` is.
///
/// # Errors
///
/// It can no longer be passed on.
pub(crate) fn of_python(object: &Bound<'_, PyAny>) -> PyResult<tensorcall::engine::RRef> {
    let py = object.py();
    object.call_method0(intern!(py, "_check_usable"))?;
    let native = object.getattr(intern!(py, "_native"))?;
    Ok(native.cast::<RRef>()?.get().rref.clone())
}

/// The pickle of an answer, with its tables of tensors and references.
type Pickle<'py> = (Bound<'py, PyBytes>, Bound<'py, PyList>, Bound<'py, PyList>);

/// What Python reads an answer from that was pickled.
pub(crate) fn pickle_of<'py>(
    py: Python<'py>,
    packed: &Packed,
    handler: &Arc<PyHandler>,
) -> PyResult<Pickle<'py>> {
    let received = receive(packed)?;
    let tensors = PyList::new(py, read_tensors(py, &received.tensors, received.buffers)?)?;
    let rrefs = RRef::list(py, packed.body.rrefs.clone(), handler)?;
    Ok((PyBytes::new(py, received.payload.as_ref()), tensors, rrefs))
}

/// The object or exception that an answer in plain data stands for.
fn plain_of<'py>(py: Python<'py>, packed: &Packed, handler: &PyHandler) -> PyResult<Bound<'py, PyAny>> {
    let received = receive(packed)?;
    if packed.raised {
        return Err(handler.plain_exception(py, received.payload.as_ref())?);
    }
    let tensors = read_tensors(py, &received.tensors, received.buffers)?;
    let rrefs = handler.python_rrefs(py, packed.body.rrefs.clone())?;
    value::decode(py, received.payload.as_ref(), &tensors, &rrefs)
}

fn receive(packed: &Packed) -> PyResult<Received> {
    packed.body.receive().map_err(|error| PyRuntimeError::new_err(error.to_string()))
}

impl RRef {
    pub(crate) fn new(rref: tensorcall::engine::RRef, handler: Arc<PyHandler>) -> Self {
        Self { rref, handler }
    }

    /// The references of a list that Python made.
    pub(crate) fn all_of(list: &Bound<'_, PyList>) -> PyResult<Vec<tensorcall::engine::RRef>> {
        let inner = |item: Bound<'_, PyAny>| match item.cast::<Self>() {
            Ok(rref) => Ok(rref.get().rref.clone()),
            Err(_) => Err(PyTypeError::new_err("the table of references holds something else")),
        };
        list.iter().map(inner).collect()
    }

    /// A list of references for Python.
    pub(crate) fn list<'py>(
        py: Python<'py>,
        rrefs: Vec<tensorcall::engine::RRef>,
        handler: &Arc<PyHandler>,
    ) -> PyResult<Bound<'py, PyList>> {
        let wrapped = rrefs.into_iter().map(|rref| Bound::new(py, Self::new(rref, Arc::clone(handler))));
        PyList::new(py, wrapped.collect::<PyResult<Vec<_>>>()?)
    }

    /// The object that is kept, or the exception that is kept in its place.
    fn open<'py>(&self, py: Python<'py>, kept: &Kept) -> PyResult<Bound<'py, PyAny>> {
        match kept {
            Kept::Value(value) => KeptObject::of(py, &**value),
            Kept::Failed { text, .. } => Err(PyRuntimeError::new_err(text.to_string())),
            Kept::Packed(packed) if packed.encoding == Encoding::Value => plain_of(py, packed, &self.handler),
            Kept::Packed(packed) => {
                let pickle = pickle_of(py, packed, &self.handler)?;
                if packed.raised {
                    let error = self.handler.call(intern!(py, "load_exception"), pickle)?;
                    return Err(PyErr::from_value(error));
                }
                self.handler.call(intern!(py, "load_result"), pickle)
            }
        }
    }
}

#[pymethods]
impl RRef {
    /// Whether the value is on this worker.
    fn is_owner(&self) -> bool {
        self.rref.is_owner()
    }

    /// The rank of the worker that has the value.
    fn owner(&self) -> u16 {
        self.rref.owner().rank.get()
    }

    /// That worker's name; `None` if no such worker was known when the reference came.
    fn owner_name(&self) -> Option<&str> {
        self.rref.owner_name().map(tensorcall::engine::proto::ids::WorkerName::as_str)
    }

    /// Whether the owner knows of this reference.
    fn confirmed(&self, py: Python<'_>) -> bool {
        outside(py, || self.rref.confirmed())
    }

    /// Names the value: the worker that made the name, and its number there.
    fn rref_id(&self) -> (u16, u64) {
        rref_id(self.rref.id())
    }

    /// Names this reference, likewise.
    fn fork_id(&self) -> (u16, u64) {
        fork_id(self.rref.fork_id())
    }

    /// `"ok"`, `"failed"` (never created, or the owner is lost) or `"deleted"`.
    fn state(&self, py: Python<'_>) -> &'static str {
        match outside(py, || self.rref.state()) {
            RRefState::Alive => "ok",
            RRefState::Failed => "failed",
            RRefState::Deleted => "deleted",
        }
    }

    /// Raises if it cannot be passed on any more.
    fn check(&self, py: Python<'_>) -> PyResult<()> {
        outside(py, || self.rref.check()).map_err(|error| to_python(&error))
    }

    /// The value, on the worker that owns it, once it is there; raises what its function raised. Waits
    /// `timeout` seconds at most; `None` is for ever.
    #[pyo3(signature = (timeout))]
    fn local_value<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Bound<'py, PyAny>> {
        let there = |py| outside(py, || self.rref.local_value()).map_err(|error| to_python(&error));
        if let Some(kept) = there(py)? {
            return self.open(py, &kept);
        }
        let limit = timeout.map(time::after);
        let future = outside(py, || self.rref.when_local()).map_err(|error| to_python(&error))?;
        wait_in_slices(py, limit, |until| tensorcall::engine::lend(None, || future.wait_until(until)))?;
        match there(py)? {
            Some(kept) => self.open(py, &kept),
            None => Err(PyRuntimeError::new_err(format!(
                "RPC ran for more than set timeout ({} ms) and will now be marked with an error: the function \
                 that makes the value of {} has not returned",
                time::duration(timeout.unwrap_or_default()).as_millis(),
                self.rref
            ))),
        }
    }

    /// Whether the value, on the worker that owns it, is there.
    fn has_value(&self, py: Python<'_>) -> bool {
        matches!(outside(py, || self.rref.local_value()), Ok(Some(_)))
    }

    /// Asks the owner for a copy of the value; 0 seconds means no limit. `label` names the call in errors.
    /// `autograd` names the autograd context that it is asked in.
    #[pyo3(signature = (timeout, label="to_here", autograd=None))]
    fn fetch(&self, py: Python<'_>, timeout: f64, label: &str, autograd: Option<Place>) -> PyResult<Call> {
        let agent = self.rref.belongs_to();
        let future = outside(py, || self.rref.fetch_in(autograd.map(to_ref), label, time::limit(timeout)));
        let future = future.map_err(|error| to_python(&error))?;
        let agent = agent.ok_or_else(|| PyRuntimeError::new_err("the agent of this RRef is gone"))?;
        let to = self.rref.owner().rank;
        let name = agent.name_of(to).unwrap_or_else(|| agent.identity().name.clone());
        let handler = Arc::clone(&self.handler);
        Ok(Call::of_rpc(future, Route { agent, handler, to, name, function: label.into() }))
    }

    fn __repr__(&self) -> String {
        self.rref.to_string()
    }
}

pub(crate) fn rref_id(id: RRefId) -> (u16, u64) {
    (id.creator.get(), id.local)
}

pub(crate) fn fork_id(id: ForkId) -> (u16, u64) {
    (id.creator.get(), id.local)
}
