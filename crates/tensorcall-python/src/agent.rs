//! `Agent`: the agent of this process, as Python drives it.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};
use tensorcall::engine::body::Body;
use tensorcall::engine::proto::ids::{Rank, WorkerName};
use tensorcall::engine::proto::wire::message::{Encoding, FunctionRef};
use tensorcall::engine::{
    AgentConfig, CallError, ErrorKind, Faults, Handler, Listening, PeerInfo, Request, RpcFuture,
};

use crate::autograd::{Place, to_ref};
use crate::call::{Call, Route, wait_in_slices};
use crate::error::to_python;
use crate::faults::{NamedFaults, Spec};
use crate::gil::{self, outside};
use crate::group::PyGroup;
use crate::handler::{PyHandler, pickled_body};
use crate::rref::{self, KeptObject, RRef};
use crate::tensor::TensorWriter;
use crate::value::{self, Plain};
use crate::{gil_wait, later, log, spawner, time, unfit};

/// Two ids, a rank and the origin of a value.
type LeakTuple = ((u16, u64), (u16, u64), u16, String);

/// How long closing may take to send what is queued.
const FLUSH: Duration = Duration::from_secs(1);
/// How long closing waits for threads whose functions have ended.
const THREADS_END: Duration = Duration::from_millis(500);
/// The same, when functions may still run and nobody waits for them.
const THREADS_END_FORCED: Duration = Duration::from_millis(100);

/// Sends, receives and runs calls for one worker.
#[pyclass(frozen, module = "tensorcall._tensorcall")]
pub(crate) struct Agent {
    agent: tensorcall::engine::Agent,
    handler: Arc<PyHandler>,
}

#[pymethods]
impl Agent {
    /// Listens, unless there is a process `group` to use instead; runs nothing before `open`. `plain` says that
    /// this worker reads plain data only, as those do that are no Python programs: for tests.
    #[new]
    #[pyo3(signature = (name, rank, *, job, secret, num_worker_threads, host, handler, faults=None, plain=false,
                        group=None, group_threads=4))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of Python")]
    fn new(
        py: Python<'_>,
        name: &str,
        rank: u32,
        job: String,
        secret: Vec<u8>,
        num_worker_threads: usize,
        host: Option<String>,
        handler: Py<PyAny>,
        faults: Option<Spec>,
        plain: bool,
        group: Option<Bound<'_, PyAny>>,
        group_threads: usize,
    ) -> PyResult<Self> {
        log::install();
        let name = WorkerName::parse(name).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let mut config = AgentConfig::new(name, to_rank(rank)?);
        config.job = job;
        config.secret = secret;
        config.rendezvous_host = host;
        config.plain = plain;
        config.faults = faults.map(|spec| Arc::new(NamedFaults::new(spec)) as Arc<dyn Faults>);
        config.num_worker_threads = NonZeroUsize::new(num_worker_threads)
            .ok_or_else(|| PyValueError::new_err("num_worker_threads must be positive"))?;
        config.group_threads = NonZeroUsize::new(group_threads)
            .ok_or_else(|| PyValueError::new_err("group_threads must be positive"))?;
        let group = group.map(|group| PyGroup::new(&group)).transpose()?;
        let config = config.with_environment().map_err(|error| to_python(&error))?;
        let handler = Arc::new(PyHandler(handler));
        let agent = outside(py, || {
            let handler = Arc::clone(&handler) as Arc<dyn Handler>;
            match group {
                Some(group) => tensorcall::engine::Agent::start_over_group(config, handler, Arc::new(group)),
                None => tensorcall::engine::Agent::start(config, handler),
            }
        });
        let agent = agent.map_err(|error| to_python(&error))?;
        spawner::lend(&agent);
        gil::on_large_burial(|| spawner::spawn(|| gil::inside(gil::drain)));
        Ok(Self { agent, handler })
    }

    #[getter]
    fn name(&self) -> &str {
        self.agent.identity().name.as_str()
    }

    #[getter]
    fn rank(&self) -> u16 {
        self.agent.identity().rank.get()
    }

    /// What peers need to reach this worker, as JSON text.
    fn contact(&self) -> String {
        self.agent.contact()
    }

    /// Says who is in the group, this worker included: name, rank and contact of each. Starts serving.
    /// Others may join a `dynamic` group later.
    fn open(&self, py: Python<'_>, roster: Vec<(String, u32, String)>, dynamic: bool) -> PyResult<()> {
        let infos = roster.into_iter().map(|(name, rank, contact)| peer_info(&name, rank, &contact));
        let infos = infos.collect::<PyResult<_>>()?;
        let open =
            if dynamic { tensorcall::engine::Agent::open_dynamic } else { tensorcall::engine::Agent::open };
        outside(py, || open(&self.agent, infos)).map_err(|error| to_python(&error))
    }

    /// Takes in a worker that has joined the dynamic group. Doing it again is harmless.
    fn admit(&self, py: Python<'_>, name: &str, rank: u32, contact: &str) -> PyResult<()> {
        let info = peer_info(name, rank, contact)?;
        outside(py, || self.agent.admit(info)).map_err(|error| to_python(&error))
    }

    /// Calls the function `name` with plain data. `None` if the arguments are not plain: pickle them. `label`
    /// names the call in errors in the place of `name`, and `record` is as for `call_named`.
    #[pyo3(signature = (to, name, args, kwargs, timeout, label=None, record=None))]
    #[expect(clippy::too_many_arguments, reason = "arguments of Python")]
    fn call(
        &self,
        py: Python<'_>,
        to: u32,
        name: &str,
        args: Bound<'_, PyTuple>,
        kwargs: Bound<'_, PyDict>,
        timeout: f64,
        label: Option<&str>,
        record: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Option<Call>> {
        let request = plain_request(py, (name, label.unwrap_or(name)), (args, kwargs), timeout, record)?;
        request.map(|request| self.start(py, to, request)).transpose()
    }

    /// Whether a worker takes functions by name and plain data only: it runs no Python.
    fn is_plain(&self, rank: u32) -> PyResult<bool> {
        Ok(self.agent.is_plain(to_rank(rank)?))
    }

    /// Calls the function that `to` knows by `name`, in whatever language it is, with plain data. `record` is
    /// given the tensors that need gradients, and returns the autograd context that the call belongs to, if any.
    #[pyo3(signature = (to, name, args, kwargs, timeout, record=None))]
    #[expect(clippy::too_many_arguments, reason = "arguments of Python")]
    fn call_named(
        &self,
        py: Python<'_>,
        to: u32,
        name: &str,
        args: Bound<'_, PyTuple>,
        kwargs: Bound<'_, PyDict>,
        timeout: f64,
        record: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Call> {
        let request = self.named_request(py, to, name, (args, kwargs), timeout, record)?;
        self.start(py, to, request)
    }

    /// Calls what the pickle says. `label` names it in errors, `autograd` the autograd context that it
    /// belongs to.
    #[pyo3(signature = (to, label, payload, tensors, rrefs, timeout, autograd=None))]
    #[expect(clippy::too_many_arguments, reason = "arguments of Python")]
    fn call_pickled(
        &self,
        py: Python<'_>,
        to: u32,
        label: &str,
        payload: &Bound<'_, PyBytes>,
        tensors: &Bound<'_, PyList>,
        rrefs: &Bound<'_, PyList>,
        timeout: f64,
        autograd: Option<Place>,
    ) -> PyResult<Call> {
        let request = pickled_request(label, pickled_body(payload, tensors, rrefs, autograd)?, timeout);
        self.start(py, to, request)
    }

    /// As `call`, but the result stays with `to`: a reference to it, and the call or why there is none.
    #[pyo3(signature = (to, name, args, kwargs, timeout, label=None, record=None))]
    #[expect(clippy::too_many_arguments, reason = "arguments of Python")]
    fn remote(
        &self,
        py: Python<'_>,
        to: u32,
        name: &str,
        args: Bound<'_, PyTuple>,
        kwargs: Bound<'_, PyDict>,
        timeout: f64,
        label: Option<&str>,
        record: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Option<(RRef, Py<PyAny>)>> {
        let request = plain_request(py, (name, label.unwrap_or(name)), (args, kwargs), timeout, record)?;
        request.map(|request| self.start_remote(py, to, request)).transpose()
    }

    /// As `call_named`, but the result stays with `to`: a reference to it, and the call or why there is none.
    #[pyo3(signature = (to, name, args, kwargs, timeout, record=None))]
    #[expect(clippy::too_many_arguments, reason = "arguments of Python")]
    fn remote_named(
        &self,
        py: Python<'_>,
        to: u32,
        name: &str,
        args: Bound<'_, PyTuple>,
        kwargs: Bound<'_, PyDict>,
        timeout: f64,
        record: Option<Bound<'_, PyAny>>,
    ) -> PyResult<(RRef, Py<PyAny>)> {
        let request = self.named_request(py, to, name, (args, kwargs), timeout, record)?;
        self.start_remote(py, to, request)
    }

    /// As `call_pickled`, but the result stays with `to`: a reference to it, and the call.
    #[pyo3(signature = (to, label, payload, tensors, rrefs, timeout, autograd=None))]
    #[expect(clippy::too_many_arguments, reason = "arguments of Python")]
    fn remote_pickled(
        &self,
        py: Python<'_>,
        to: u32,
        label: &str,
        payload: &Bound<'_, PyBytes>,
        tensors: &Bound<'_, PyList>,
        rrefs: &Bound<'_, PyList>,
        timeout: f64,
        autograd: Option<Place>,
    ) -> PyResult<(RRef, Py<PyAny>)> {
        let request = pickled_request(label, pickled_body(payload, tensors, rrefs, autograd)?, timeout);
        self.start_remote(py, to, request)
    }

    /// Begins a backward pass from `roots`, which the handler object knows what to do with. The call is done
    /// when all gradients are where they belong, on all workers; the thread that waits for it does this worker's
    /// part. `timeout` is how many seconds there may be no progress; 0 means no limit.
    fn backward(
        &self,
        py: Python<'_>,
        context: u64,
        roots: Py<PyAny>,
        retain_graph: bool,
        timeout: f64,
    ) -> PyResult<Call> {
        let (roots, patience) = (KeptObject::keep(roots), time::limit(timeout));
        let desk = outside(py, || self.agent.begin_backward(context, roots, retain_graph, patience));
        let desk = desk.map_err(|error| to_python(&error))?;
        Ok(Call::of_pass(desk, self.route(self.agent.identity().rank, "backward".into())))
    }

    /// How many backward passes this worker takes part in.
    fn current_passes(&self, py: Python<'_>) -> usize {
        outside(py, || self.agent.current_passes())
    }

    /// A reference to `value`, which this worker owns. `label` says in reports of leaks where it is from.
    #[pyo3(signature = (value, label=""))]
    fn make_rref(&self, value: Py<PyAny>, label: &str) -> RRef {
        let rref = self.agent.make_rref(KeptObject::keep(value), label);
        RRef::new(rref, Arc::clone(&self.handler))
    }

    /// The next number of the counter that ids of references are made with.
    fn next_local_id(&self) -> u64 {
        self.agent.next_local_id()
    }

    /// How many references there are, by the names that torch gives the figures.
    fn rref_counts<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let counts = outside(py, || self.agent.rref_counts());
        let dict = PyDict::new(py);
        dict.set_item("num_owner_rrefs", counts.owners)?;
        dict.set_item("num_pending_users", counts.pending_users)?;
        dict.set_item("num_pending_futures", counts.pending_futures)?;
        dict.set_item("num_forks", counts.forks)?;
        Ok(dict)
    }

    /// Deletes all references of this worker to values of others, once those owners know of all that was
    /// shared. Then waits until they are gone, and with `others` those that others have to values of this
    /// worker. False if that took more than `timeout` seconds; 0 means no limit.
    #[pyo3(signature = (timeout, *, others=true))]
    fn delete_rrefs(&self, py: Python<'_>, timeout: f64, others: bool) -> PyResult<bool> {
        let limit = time::limit(timeout).map(|limit| time::now() + limit);
        wait_in_slices(py, limit, |until| self.agent.rrefs_settled(until))?;
        outside(py, || self.agent.delete_all_rrefs());
        wait_in_slices(py, limit, |until| self.agent.rrefs_gone(others, until))
    }

    /// References that others have to values of this worker: the ids of value and reference, who has it,
    /// and where the value is from.
    fn leaks(&self, py: Python<'_>) -> Vec<LeakTuple> {
        let leaks = outside(py, || self.agent.rref_leaks()).into_iter();
        let tuple = |leak: tensorcall::engine::Leak| {
            (
                rref::rref_id(leak.rref),
                rref::fork_id(leak.fork),
                leak.holder.rank.get(),
                leak.label.to_string(),
            )
        };
        leaks.map(tuple).collect()
    }

    /// Ranks of the workers that died or left.
    fn lost_workers(&self, py: Python<'_>) -> Vec<u16> {
        outside(py, || self.agent.gone()).into_iter().map(Rank::get).collect()
    }

    /// Waits until nothing is under way in the whole group; every worker has to call this. `leaving`
    /// says that this one closes next. Raises after `timeout` seconds; 0 means no limit.
    fn join(&self, py: Python<'_>, timeout: f64, leaving: bool) -> PyResult<()> {
        let failure = tensorcall::engine::sync::Mutex::new(None);
        let quiet = wait_in_slices(py, time::limit(timeout).map(|limit| time::now() + limit), |until| {
            let result = self.agent.quiesce(leaving, until);
            let over = result.as_ref().err().is_none_or(|error| error.kind() != ErrorKind::Timeout);
            *failure.lock() = result.err();
            over
        })?;
        let failure = failure.into_inner();
        debug_assert!(quiet || failure.is_some());
        failure.map_or(Ok(()), |error| Err(to_python(&error)))
    }

    /// Ends the agent. Calls under way fail; functions that run are not waited for. Doing it again is
    /// harmless.
    fn close(&self, py: Python<'_>, graceful: bool) {
        outside(py, || {
            spawner::forget(&self.agent);
            self.agent.close(graceful, time::now() + FLUSH);
            if !gil::is_closed() {
                let patience = if graceful { THREADS_END } else { THREADS_END_FORCED };
                self.agent.wait_threads_ended(time::now() + patience);
            }
        });
    }

    /// Ends what this agent has on its process group, if it has one, and returns when its threads have left
    /// Python. To be called before the door is closed at exit.
    fn leave_group(&self, py: Python<'_>) {
        outside(py, || self.agent.leave_group(time::now() + FLUSH));
    }

    /// Figures by name.
    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let metrics = outside(py, || self.agent.metrics());
        let dict = PyDict::new(py);
        dict.set_item("agent.thread_pool_size", metrics.thread_pool_size)?;
        dict.set_item("agent.num_idle_threads", metrics.idle_threads)?;
        dict.set_item("agent.num_threads", metrics.threads)?;
        dict.set_item("agent.client_active_calls", metrics.client_active_calls)?;
        dict.set_item("agent.server_active_calls", metrics.server_active_calls)?;
        dict.set_item("agent.server_active_async_calls", later::owed())?;
        dict.set_item("agent.gil_average_wait_time_us", gil_wait::average())?;
        dict.set_item("agent.calls_sent", metrics.calls_sent)?;
        dict.set_item("agent.calls_received", metrics.calls_received)?;
        dict.set_item("agent.late_replies", metrics.late_replies)?;
        Ok(dict)
    }

    /// How many calls this agent has made.
    fn calls_sent(&self, py: Python<'_>) -> u64 {
        outside(py, || self.agent.metrics().calls_sent)
    }
}

impl Agent {
    fn start_remote(&self, py: Python<'_>, to: u32, request: Request) -> PyResult<(RRef, Py<PyAny>)> {
        let rref = self.agent.new_rref(to_rank(to)?).map_err(|error| to_python(&error))?;
        let call = match self.start(py, to, Request { creates: Some(rref.clone()), ..request }) {
            Ok(call) => Py::new(py, call)?.into_any(),
            // That there was no call is what becomes of the reference.
            Err(error) if error.is_instance_of::<PyRuntimeError>(py) => error.into_value(py).into_any(),
            Err(error) => return Err(error),
        };
        Ok((RRef::new(rref, Arc::clone(&self.handler)), call))
    }

    /// The call of a function by name, which takes plain data and nothing else.
    fn named_request(
        &self,
        py: Python<'_>,
        to: u32,
        name: &str,
        (args, kwargs): (Bound<'_, PyTuple>, Bound<'_, PyDict>),
        timeout: f64,
        record: Option<Bound<'_, PyAny>>,
    ) -> PyResult<Request> {
        let (mut writer, mut payload, mut rrefs) = (TensorWriter::new(py)?, Vec::new(), Vec::new());
        let arguments = PyTuple::new(py, [args.as_any(), kwargs.as_any()])?;
        if value::encode_plain(&arguments, &mut payload, &mut writer, &mut rrefs)? == Plain::No {
            let worker = to_rank(to).ok().and_then(|rank| self.agent.name_of(rank));
            let worker = worker.map_or_else(|| format!("of rank {to}"), |name| format!("'{name}'"));
            let (which, object) = unfit::argument(&args, &kwargs)?
                .unwrap_or_else(|| ("what is passed".to_owned(), arguments.into_any()));
            return Err(unfit::error(&format!("{which} of {name} on worker {worker}"), &object));
        }
        request_by_name((name, name), payload, writer, rrefs, timeout, record)
    }

    fn start(&self, py: Python<'_>, to: u32, request: Request) -> PyResult<Call> {
        let rank = to_rank(to)?;
        let mut request = request;
        let until = request.start_time();
        let function = Arc::clone(&request.label);
        loop {
            match outside(py, || self.agent.try_call(rank, request)) {
                Ok(future) => return Ok(self.wrap(future, rank, function)),
                Err(CallError::Failed(error)) => return Err(to_python(&error)),
                Err(CallError::Full(full)) => request = *full,
            }
            // Held back: too much is under way to that worker.
            let failure = tensorcall::engine::sync::Mutex::new(None);
            let bytes = request.body.len();
            let room =
                wait_in_slices(py, until, |slice| match self.agent.wait_for_room(rank, bytes, slice) {
                    Ok(room) => room,
                    Err(error) => {
                        *failure.lock() = Some(error);
                        true
                    }
                })?;
            if let Some(error) = failure.into_inner() {
                return Err(to_python(&error));
            }
            if !room {
                return Err(to_python(&self.agent.no_room(rank, &request)));
            }
        }
    }

    fn wrap(&self, future: RpcFuture, to: Rank, function: Arc<str>) -> Call {
        Call::of_rpc(future, self.route(to, function))
    }

    fn route(&self, to: Rank, function: Arc<str>) -> Route {
        let name = self.agent.name_of(to).unwrap_or_else(|| self.agent.identity().name.clone());
        let (agent, handler) = (self.agent.clone(), Arc::clone(&self.handler));
        Route { agent, handler, to, name, function }
    }
}

fn peer_info(name: &str, rank: u32, contact: &str) -> PyResult<PeerInfo> {
    let name = WorkerName::parse(name).map_err(|error| PyValueError::new_err(error.to_string()))?;
    PeerInfo::from_contact(name, to_rank(rank)?, contact).map_err(|error| to_python(&error))
}

/// Where an agent would listen whose workers meet at `host`, and why there.
pub(crate) fn listening(py: Python<'_>, host: Option<String>) -> PyResult<(String, String)> {
    let choose = || {
        let name = WorkerName::parse("nobody").map_err(|error| error.to_string())?;
        let rank = Rank::new(0).ok_or("0 is not a rank")?;
        let mut config = AgentConfig::new(name, rank);
        config.rendezvous_host = host;
        config.with_environment().and_then(|config| config.listening()).map_err(|error| error.to_string())
    };
    let Listening { ip, why } = outside(py, choose).map_err(PyRuntimeError::new_err)?;
    Ok((ip.to_string(), why))
}

fn to_rank(rank: u32) -> PyResult<Rank> {
    Rank::new(rank).ok_or_else(|| PyValueError::new_err(format!("{rank} is not a rank")))
}

/// The call of a function by name; `None` if the arguments are not plain data.
fn plain_request(
    py: Python<'_>,
    names: (&str, &str),
    (args, kwargs): (Bound<'_, PyTuple>, Bound<'_, PyDict>),
    timeout: f64,
    record: Option<Bound<'_, PyAny>>,
) -> PyResult<Option<Request>> {
    let (mut writer, mut rrefs) = (TensorWriter::new(py)?, Vec::new());
    let mut payload = Vec::with_capacity(64);
    let arguments = PyTuple::new(py, [args.into_any(), kwargs.into_any()])?;
    if value::encode(&arguments, &mut payload, &mut writer, &mut rrefs)? == Plain::No {
        return Ok(None);
    }
    request_by_name(names, payload, writer, rrefs, timeout, record).map(Some)
}

/// The call of a function by its name, with the plain data that was written; errors call it by its label.
fn request_by_name<'py>(
    (name, label): (&str, &str),
    payload: Vec<u8>,
    writer: TensorWriter<'py>,
    rrefs: Vec<tensorcall::engine::RRef>,
    timeout: f64,
    record: Option<Bound<'py, PyAny>>,
) -> PyResult<Request> {
    let recording = record.map(|record| (record, writer.recorded()));
    let (tensors, buffers) = writer.finish()?;
    let place = match recording {
        Some((record, tensors)) => record.call1((tensors,))?.extract::<Option<Place>>()?,
        None => None,
    };
    let called: Arc<str> = name.into();
    let label = if label == name { Arc::clone(&called) } else { label.into() };
    Ok(Request {
        function: FunctionRef::Name(called),
        label,
        encoding: Encoding::Value,
        body: Body { payload, tensors, buffers, rrefs, autograd: place.map(to_ref), ..Body::default() },
        timeout: time::limit(timeout),
        deadline: None,
        creates: None,
    })
}

/// The call of what a pickle says.
fn pickled_request(label: &str, body: Body, timeout: f64) -> Request {
    Request {
        function: FunctionRef::InPayload,
        label: label.into(),
        encoding: Encoding::Pickle,
        body,
        timeout: time::limit(timeout),
        deadline: None,
        creates: None,
    }
}
