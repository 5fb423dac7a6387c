//! `Call`: one outcome, of an RPC under way or of something local.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use tensorcall::engine::proto::ids::{Rank, WorkerName};
use tensorcall::engine::proto::wire::message::Encoding;
use tensorcall::engine::{Desk, Error, ErrorKind, Promise, Response, RpcFuture};

use crate::autograd::{Place, recorded, to_place};
use crate::bell::Bell;
use crate::error::{self, to_python};
use crate::gil::{inside, outside};
use crate::handler::PyHandler;
use crate::rref::RRef;
use crate::tensor::read_tensors;
use crate::{spawner, time, user_code, value};

/// How long a thread waits before it looks whether a signal has come.
const SLICE: Duration = Duration::from_millis(100);

/// What [`Call::result`] returns first: how to read the payload.
const DECODED: u8 = 0;
const PICKLED_RESULT: u8 = 1;
const PICKLED_EXCEPTION: u8 = 2;
const PLAIN_EXCEPTION: u8 = 3;

/// Encoding, payload, tensors, references, and the autograd context that they belong to.
type RawResult<'py> = (u8, Bound<'py, PyAny>, Bound<'py, PyList>, Bound<'py, PyList>, Option<Place>);

/// One outcome: an RPC under way, or a local completion.
#[pyclass(frozen, module = "tensorcall._tensorcall")]
pub(crate) struct Call {
    future: RpcFuture,
    origin: Origin,
    /// If it is a backward pass, where the thread that waits finds this worker's part of it.
    desk: Option<Desk>,
    /// Nobody is told if it fails and nobody looks.
    disregarded: AtomicBool,
}

enum Origin {
    Local(Promise),
    Rpc(Route),
}

/// Where an RPC goes, and whose it is.
#[derive(Clone)]
pub(crate) struct Route {
    pub(crate) agent: tensorcall::engine::Agent,
    pub(crate) handler: Arc<PyHandler>,
    pub(crate) to: Rank,
    pub(crate) name: WorkerName,
    pub(crate) function: Arc<str>,
}

impl Call {
    pub(crate) fn of_rpc(future: RpcFuture, route: Route) -> Self {
        Self { future, origin: Origin::Rpc(route), desk: None, disregarded: AtomicBool::new(false) }
    }

    pub(crate) fn of_pass(desk: Desk, route: Route) -> Self {
        let future = desk.future().clone();
        let origin = Origin::Rpc(route);
        Self { future, origin, desk: Some(desk), disregarded: AtomicBool::new(false) }
    }

    fn target(&self) -> Option<&WorkerName> {
        match &self.origin {
            Origin::Local(_) => None,
            Origin::Rpc(route) => Some(&route.name),
        }
    }
}

/// The last chance to say that a call failed: nobody can look at its outcome any more.
impl Drop for Call {
    fn drop(&mut self) {
        let Origin::Rpc(route) = &self.origin else { return };
        if *self.disregarded.get_mut() || !route.agent.is_here() {
            return;
        }
        if !self.future.is_done() {
            let (future, route) = (self.future.clone(), route.clone());
            self.future.on_done(move || route.report_failure(&future));
        } else if let Some(failure) = self.future.take_failure() {
            route.report(failure);
        }
    }
}

impl Route {
    fn report_failure(&self, future: &RpcFuture) {
        if let Some(failure) = future.take_failure() {
            self.report(failure);
        }
    }

    /// Has a failure that nobody looked at logged, unless it was to be expected.
    fn report(&self, failure: tensorcall::engine::Result<Response>) {
        let expected = |error: &Error| matches!(error.kind(), ErrorKind::Cancelled | ErrorKind::ShuttingDown);
        if failure.as_ref().is_err_and(expected) || self.agent.is_closed() {
            return;
        }
        let route = self.clone();
        self.agent.spawn(move || {
            inside(|py| {
                if let Err(error) = route.log(py, failure) {
                    error::show(py, error);
                }
            });
        });
    }

    fn log(&self, py: Python<'_>, failure: tensorcall::engine::Result<Response>) -> PyResult<()> {
        let (function, worker) = (self.function.as_ref(), self.name.as_str());
        match failure {
            Ok(Response { body, encoding: Encoding::Value, .. }) => {
                let (_, message, origin) = value::decode_exception(body.payload.as_ref())?;
                let text = if origin.is_empty() { message } else { origin };
                self.handler.call(intern!(py, "unseen_error"), (function, worker, text))?;
            }
            Ok(Response { body, .. }) => {
                let payload = PyBytes::new(py, body.payload.as_ref());
                self.handler.call(intern!(py, "unseen_exception"), (function, worker, &payload))?;
            }
            Err(error) => {
                self.handler.call(intern!(py, "unseen_error"), (function, worker, error.to_string()))?;
            }
        }
        Ok(())
    }
}

#[pymethods]
impl Call {
    #[new]
    fn new() -> Self {
        let (promise, future) = tensorcall::engine::promise();
        Self { future, origin: Origin::Local(promise), desk: None, disregarded: AtomicBool::new(false) }
    }

    /// Completes a local one; false if it was done.
    fn complete(&self, py: Python<'_>) -> PyResult<bool> {
        match &self.origin {
            Origin::Local(promise) => Ok(outside(py, || promise.complete_empty())),
            Origin::Rpc(_) => Err(PyRuntimeError::new_err("an RPC is completed by its reply")),
        }
    }

    /// Waits until the outcome is there or `timeout` seconds have passed; tells which.
    #[pyo3(signature = (timeout))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        if self.future.is_done() {
            return Ok(true);
        }
        let limit = timeout.map(time::after);
        wait_in_slices(py, limit, |until| {
            tensorcall::engine::lend(self.target(), || match &self.desk {
                None => self.future.wait_until(until),
                Some(desk) => desk.work_until(until),
            })
        })
    }

    /// Whether the outcome is there.
    fn done(&self) -> bool {
        self.future.is_done()
    }

    /// The outcome of an RPC, once: encoding, payload, tensors, references, autograd context. Raises why
    /// there is none. The tensors of plain data are those that the sender has recorded.
    fn result<'py>(&self, py: Python<'py>) -> PyResult<RawResult<'py>> {
        let outcome = self.future.take();
        let outcome =
            outcome.ok_or_else(|| PyRuntimeError::new_err("this call has no result, or it was taken"))?;
        let Response { raised, encoding, body } = outcome.map_err(|error| to_python(&error))?;
        let tensors = read_tensors(py, &body.tensors, body.buffers)?;
        let payload = body.payload.as_ref();
        let autograd = body.autograd.map(to_place);
        if encoding == Encoding::Value {
            let (kind, object) = match &self.origin {
                // The answer to a call whose result stayed there.
                _ if payload.is_empty() => (DECODED, py.None().into_bound(py)),
                _ if raised => {
                    let parts = value::decode_exception(payload)?;
                    (PLAIN_EXCEPTION, parts.into_pyobject(py)?.into_any())
                }
                Origin::Rpc(Route { handler, .. }) => {
                    let rrefs = handler.python_rrefs(py, body.rrefs)?;
                    (DECODED, value::decode(py, payload, &tensors, &rrefs)?)
                }
                Origin::Local(_) => (DECODED, value::decode(py, payload, &tensors, &[])?),
            };
            let recorded = if raised { Vec::new() } else { recorded(body.autograd, &body.tensors, &tensors) };
            return Ok((kind, object, PyList::new(py, recorded)?, PyList::empty(py), autograd));
        }
        let kind = if raised { PICKLED_EXCEPTION } else { PICKLED_RESULT };
        let rrefs = match &self.origin {
            Origin::Rpc(route) => RRef::list(py, body.rrefs, &route.handler)?,
            Origin::Local(_) => PyList::empty(py),
        };
        Ok((kind, PyBytes::new(py, payload).into_any(), PyList::new(py, tensors)?, rrefs, autograd))
    }

    /// Calls `callback` once the outcome is there, on a thread that does not count as one of the
    /// agent's worker threads.
    fn on_done(&self, py: Python<'_>, callback: Py<PyAny>) {
        let run = move || inside(|py| user_code::run(py, &callback));
        match &self.origin {
            Origin::Local(_) => {
                let future = self.future.clone();
                outside(py, || future.on_done(move || spawner::spawn(run)));
            }
            Origin::Rpc(Route { agent, .. }) => {
                let (future, agent) = (self.future.clone(), agent.clone());
                outside(py, || future.on_done(move || agent.spawn(run)));
            }
        }
    }

    /// Rings `bell` with `number` once the outcome is there.
    fn ring(&self, py: Python<'_>, bell: &Bell, number: u64) {
        let bell = bell.shared();
        outside(py, || self.future.on_done(move || bell.ring(number)));
    }

    /// Says that nobody will look at the outcome, and that this is meant.
    fn disregard(&self) {
        self.disregarded.store(true, Ordering::Relaxed);
    }

    /// Gives an RPC up: its future fails, and the callee is told. A backward pass goes on without this thread.
    fn cancel(&self, py: Python<'_>) {
        if let Some(desk) = &self.desk {
            outside(py, || desk.close());
        }
        if let (Origin::Rpc(Route { agent, to, .. }), Some(id)) = (&self.origin, self.future.call()) {
            outside(py, || agent.cancel(*to, id));
        }
    }
}

/// Waits without the interpreter lock, returning to it now and then for signals. `wait` is given until
/// when to wait (`None` is for ever) and tells whether it has what it waited for.
pub(crate) fn wait_in_slices(
    py: Python<'_>,
    limit: Option<Instant>,
    wait: impl Fn(Option<Instant>) -> bool + Send + Sync,
) -> PyResult<bool> {
    if tensorcall::engine::is_pool_thread() {
        // Signals are not handled here, and a place is lent once, not in slices.
        return Ok(outside(py, || wait(limit)));
    }
    loop {
        let slice = time::now() + SLICE;
        let until = limit.map_or(slice, |limit| limit.min(slice));
        if outside(py, || wait(Some(until))) {
            return Ok(true);
        }
        py.check_signals()?;
        if limit.is_some_and(|limit| limit <= time::now()) {
            return Ok(false);
        }
    }
}
