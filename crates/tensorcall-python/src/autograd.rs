//! Distributed autograd, as Python sees it: the handler object is the local engine.
//!
//! Gradients travel as the tensors that there are, with a byte for each output that says whether it has one;
//! or as Python has packed them, if they are of a kind that only Python knows.

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use tensorcall::engine::ErrorKind;
use tensorcall::engine::autograd::{Arrived, Found, LocalEngine, PassError, Roots};
use tensorcall::engine::body::{Body, Received};
use tensorcall::engine::proto::autograd::{Pass, Plan, PlannedRecv};
use tensorcall::engine::proto::ids::Rank;
use tensorcall::engine::proto::wire::message::{AutogradRef, Encoding};
use tensorcall::engine::proto::wire::tensor::TensorDesc;

use crate::gil::inside;
use crate::handler::{PyHandler, pickled_body};
use crate::rref::KeptObject;
use crate::tensor::{TensorWriter, read_tensors};

/// An autograd context and, if tensors of the message require gradients, the number of the message.
pub(crate) type Place = (u64, Option<u64>);

pub(crate) fn to_ref((context, message): Place) -> AutogradRef {
    AutogradRef { context, message }
}

pub(crate) fn to_place(autograd: AutogradRef) -> Place {
    (autograd.context, autograd.message)
}

/// The tensors of a message with plain data that its sender has recorded in an autograd context.
pub(crate) fn recorded<'py>(
    autograd: Option<AutogradRef>,
    descs: &[TensorDesc],
    tensors: &[Bound<'py, PyAny>],
) -> Vec<Bound<'py, PyAny>> {
    if autograd.is_none_or(|autograd| autograd.message.is_none()) {
        return Vec::new();
    }
    let both = descs.iter().zip(tensors).filter(|(desc, _)| desc.requires_grad);
    both.map(|(_, tensor)| tensor.clone()).collect()
}

/// What the handler object finds: send functions, recv functions, and who knows the context.
type PyPlan = (Vec<(u64, u16)>, Vec<(u64, u16, Vec<usize>)>, Vec<u16>);
/// A payload, if Python has packed the gradients, and tensors; without a payload `None` where there is none.
type PyGradients<'py> = (Option<Bound<'py, PyBytes>>, Bound<'py, PyList>);

impl LocalEngine for PyHandler {
    fn plan(&self, pass: &Pass, roots: Option<Roots>) -> Result<Plan, PassError> {
        inside(|py| {
            let plan = self.ask_for_plan(py, pass, roots.as_ref());
            drop(roots);
            plan.map_err(|error| pass_error(py, &error))
        })
    }

    fn vjp(
        &self,
        pass: &Pass,
        arrived: Vec<Arrived>,
        wanted: &[u64],
        last: bool,
    ) -> Result<Vec<Found>, PassError> {
        inside(|py| {
            let found = self.ask_for_vjp(py, pass, arrived, wanted, last);
            found.map_err(|error| pass_error(py, &error))
        })
    }

    fn end(&self, pass: &Pass, error: Option<&PassError>) {
        inside(|py| {
            if let Err(error) = self.tell_end(py, pass, error) {
                crate::error::show(py, error);
            }
        });
    }
}

impl PyHandler {
    fn ask_for_plan(&self, py: Python<'_>, pass: &Pass, roots: Option<&Roots>) -> PyResult<Plan> {
        let object = roots.map(|roots| KeptObject::of(py, &**roots)).transpose()?;
        let plan = self.call(intern!(py, "autograd_plan"), (pass.context, pass_id(pass), object))?;
        let (sends, recvs, known): PyPlan = plan.extract()?;
        let send = |(message, to)| Ok((message, to_rank(to)?));
        let recv = |(message, from, reach)| Ok(PlannedRecv { message, from: to_rank(from)?, reach });
        Ok(Plan {
            sends: sends.into_iter().map(send).collect::<PyResult<_>>()?,
            roots: roots.is_some(),
            recvs: recvs.into_iter().map(recv).collect::<PyResult<_>>()?,
            known: known.into_iter().map(to_rank).collect::<PyResult<_>>()?,
        })
    }

    fn ask_for_vjp(
        &self,
        py: Python<'_>,
        pass: &Pass,
        arrived: Vec<Arrived>,
        wanted: &[u64],
        last: bool,
    ) -> PyResult<Vec<Found>> {
        let open = |Arrived { message, gradients }| {
            let gradients = gradients.map(|(encoding, body)| open(py, encoding, body)).transpose()?;
            PyResult::Ok((message, gradients))
        };
        let arrived = PyList::new(py, arrived.into_iter().map(open).collect::<PyResult<Vec<_>>>()?)?;
        let wanted = PyList::new(py, wanted)?;
        let arguments = (pass.context, pass_id(pass), arrived, wanted, last, pass.retain_graph);
        let found = self.call(intern!(py, "autograd_vjp"), arguments)?;
        let found: Vec<(u64, Option<PyGradients<'_>>)> = found.extract()?;
        let pack = |(message, gradients): (u64, Option<PyGradients<'_>>)| {
            let gradients = gradients.map(|gradients| pack(py, gradients)).transpose()?;
            Ok(Found { message, gradients })
        };
        found.into_iter().map(pack).collect()
    }

    fn tell_end(&self, py: Python<'_>, pass: &Pass, error: Option<&PassError>) -> PyResult<()> {
        let error = error.map(ToString::to_string);
        self.call(intern!(py, "autograd_end"), (pass.context, pass_id(pass), error))?;
        Ok(())
    }
}

/// What went wrong, for the workers of the pass, which are not all of Python: a text.
fn pass_error(py: Python<'_>, error: &PyErr) -> PassError {
    PassError::failed(ErrorKind::Autograd, error.value(py).to_string())
}

fn pass_id(pass: &Pass) -> (u16, u64) {
    (pass.id.creator.get(), pass.id.local)
}

fn to_rank(rank: u16) -> PyResult<Rank> {
    let wrong = |error: tensorcall::engine::proto::InvalidRank| {
        pyo3::exceptions::PyValueError::new_err(error.to_string())
    };
    Rank::try_from(rank).map_err(wrong)
}

/// Gradients as the handler object gets them.
fn open(py: Python<'_>, encoding: Encoding, body: Received) -> PyResult<PyGradients<'_>> {
    let Received { payload, tensors, buffers, .. } = body;
    let tensors = read_tensors(py, &tensors, buffers)?;
    if encoding == Encoding::Pickle {
        return Ok((Some(PyBytes::new(py, payload.as_ref())), PyList::new(py, tensors)?));
    }
    let list = PyList::empty(py);
    let mut tensors = tensors.into_iter();
    for &flag in payload.as_ref() {
        match if flag == 0 { None } else { tensors.next() } {
            Some(tensor) => list.append(tensor)?,
            None => list.append(py.None())?,
        }
    }
    Ok((None, list))
}

/// Gradients as they travel.
fn pack(py: Python<'_>, (payload, tensors): PyGradients<'_>) -> PyResult<(Encoding, Body)> {
    if let Some(payload) = payload {
        return Ok((Encoding::Pickle, pickled_body(&payload, &tensors, &PyList::empty(py), None)?));
    }
    let mut writer = TensorWriter::new(py)?;
    let mut flags = Vec::with_capacity(tensors.len());
    for tensor in &tensors {
        flags.push(u8::from(!tensor.is_none()));
        if !tensor.is_none() {
            writer.push_again(&tensor)?;
        }
    }
    let (tensors, buffers) = writer.finish()?;
    Ok((Encoding::Bytes, Body { payload: flags, tensors, buffers, ..Body::default() }))
}
