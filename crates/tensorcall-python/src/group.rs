//! A process group that Python implements, as the core uses it.
//!
//! The object has `rank`, `size` and `any_source`, and methods `send(memory, to, tag)`,
//! `receive(memory, source, tag)` and `abort()`, which mean what [`ProcessGroup`] says; `Group` in
//! `rpc/_groups.py` is its type. Memory is an object with the buffer protocol: the very bytes that a tensor
//! lies in, or that are to become one. Methods run on threads of the transport and let go of the interpreter
//! lock while they wait.

use std::time::Instant;

use pyo3::intern;
use pyo3::prelude::*;
use tensorcall::engine::buffer::{Region, Target};
use tensorcall::engine::transport::group::{GroupError, ProcessGroup};

use crate::gil::{PyOwner, inside, outside};
use crate::tensor::Exported;
use crate::user_code;

/// See the module.
pub(crate) struct PyGroup {
    rank: u32,
    size: u32,
    any_source: bool,
    send: Method,
    receive: Method,
    abort: Method,
}

/// A method that is let go where that may be done.
struct Method(Option<Py<PyAny>>);

impl Drop for Method {
    fn drop(&mut self) {
        if let Some(method) = self.0.take() {
            drop(PyOwner::new(method, 0));
        }
    }
}

impl PyGroup {
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<Self> {
        let py = object.py();
        let method = |name| object.getattr(name).map(|method| Method(Some(method.unbind())));
        Ok(Self {
            rank: object.getattr(intern!(py, "rank"))?.extract()?,
            size: object.getattr(intern!(py, "size"))?.extract()?,
            any_source: object.getattr(intern!(py, "any_source"))?.extract()?,
            send: method(intern!(py, "send"))?,
            receive: method(intern!(py, "receive"))?,
            abort: method(intern!(py, "abort"))?,
        })
    }
}

impl Method {
    fn call<'py>(
        &self,
        py: Python<'py>,
        args: impl IntoPyObject<'py, Target = pyo3::types::PyTuple, Output = Bound<'py, pyo3::types::PyTuple>>,
    ) -> Result<Bound<'py, PyAny>, GroupError> {
        let Some(method) = &self.0 else { return Err(GroupError("the group is gone".to_owned())) };
        user_code::call(method.bind(py), args).map_err(|error| in_words(py, &error))
    }
}

impl ProcessGroup for PyGroup {
    fn rank(&self) -> u32 {
        self.rank
    }

    fn size(&self) -> u32 {
        self.size
    }

    fn receives_from_any(&self) -> bool {
        self.any_source
    }

    fn send(&self, to: u32, tag: u32, bytes: &Region) -> Result<(), GroupError> {
        inside(|py| {
            let memory = Bound::new(py, Exported::of_region(bytes.clone()));
            let memory = memory.map_err(|error| in_words(py, &error))?;
            self.send.call(py, (memory, to, tag)).map(drop)
        })
    }

    fn receive(&self, from: Option<u32>, tag: u32, target: Target) -> Result<u32, GroupError> {
        inside(|py| {
            let memory = Bound::new(py, Exported::of_target(target));
            let memory = memory.map_err(|error| in_words(py, &error))?;
            let source = self.receive.call(py, (memory, from, tag))?;
            match from {
                Some(from) => Ok(from),
                None => source.extract().map_err(|error| in_words(py, &error)),
            }
        })
    }

    /// Python gathers by itself, before there is an agent.
    fn all_gather(&self, _: &[u8], _: Instant) -> Result<Vec<Vec<u8>>, GroupError> {
        Err(GroupError("groups of Python are for sending and receiving".to_owned()))
    }

    fn barrier(&self, _: Instant) -> Result<(), GroupError> {
        Err(GroupError("groups of Python are for sending and receiving".to_owned()))
    }

    fn abort(&self) {
        if let Err(error) = inside(|py| self.abort.call(py, ()).map(drop)) {
            tracing::error!(%error, "the process group could not be aborted");
        }
    }

    fn run_thread(&self, body: &mut (dyn FnMut() + Send)) {
        // The thread signs in once, for life: later entries cost next to nothing.
        inside(|py| outside(py, body));
    }
}

impl std::fmt::Debug for PyGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "rank {} of {}", self.rank, self.size)
    }
}

fn in_words(py: Python<'_>, error: &PyErr) -> GroupError {
    let text = error.value(py).to_string();
    GroupError(if text.is_empty() { error.to_string() } else { text })
}
