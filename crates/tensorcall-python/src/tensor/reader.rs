//! [`read_tensors`]: torch tensors on the memory of a received message.

use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use tensorcall::engine::buffer::Buffer;
use tensorcall_proto::wire::tensor::{Device, DeviceKind, TensorDesc};

use super::torch::TorchApi;

/// Makes the tensors of a received message, in their order, without copying: the storages own the
/// buffers. Tensors in one buffer share one storage.
pub(crate) fn read_tensors<'py>(
    py: Python<'py>,
    descs: &[TensorDesc],
    buffers: Vec<Buffer>,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    if descs.is_empty() {
        return Ok(Vec::new());
    }
    read_tensors_by(TorchApi::get(py)?, py, descs, buffers)
}

/// The same by a certain way to torch.
pub(crate) fn read_tensors_by<'py>(
    api: &TorchApi,
    py: Python<'py>,
    descs: &[TensorDesc],
    buffers: Vec<Buffer>,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let one_each = descs.len() == buffers.len() && descs.iter().zip(0..).all(|(desc, i)| desc.buffer == i);
    if one_each {
        let build = |(desc, buffer)| finish(api.build(py, buffer, desc)?, desc);
        return descs.iter().zip(buffers).map(build).collect();
    }
    let mut tensors: Vec<Option<Bound<'py, PyAny>>> = descs.iter().map(|_| None).collect();
    for (members, buffer) in members_of(descs, buffers.len())?.into_iter().zip(buffers) {
        match members.as_slice() {
            [] => {}
            &[one] => tensors[one] = Some(finish(api.build(py, buffer, &descs[one])?, &descs[one])?),
            several => {
                let shared: Vec<&TensorDesc> = several.iter().map(|&member| &descs[member]).collect();
                for (&member, tensor) in several.iter().zip(api.build_shared(py, buffer, &shared)?) {
                    tensors[member] = Some(finish(tensor, &descs[member])?);
                }
            }
        }
    }
    let missing = || PyRuntimeError::new_err("a tensor lies in no buffer");
    tensors.into_iter().map(|tensor| tensor.ok_or_else(missing)).collect()
}

/// For each buffer the tensors that lie in it.
fn members_of(descs: &[TensorDesc], buffers: usize) -> PyResult<Vec<Vec<usize>>> {
    let mut members = vec![Vec::new(); buffers];
    for (index, desc) in descs.iter().enumerate() {
        let buffer = usize::try_from(desc.buffer)?;
        let missing = || PyRuntimeError::new_err("a tensor lies in a buffer that is not there");
        members.get_mut(buffer).ok_or_else(missing)?.push(index);
    }
    Ok(members)
}

/// Sets what is not in the memory: how to read the bits, and whether gradients are asked for.
fn finish<'py>(mut tensor: Bound<'py, PyAny>, desc: &TensorDesc) -> PyResult<Bound<'py, PyAny>> {
    let py = tensor.py();
    if desc.conj {
        tensor = tensor.call_method0(intern!(py, "conj"))?;
    }
    if desc.neg {
        tensor = tensor.call_method0(intern!(py, "_neg_view"))?;
    }
    if desc.requires_grad {
        tensor.call_method1(intern!(py, "requires_grad_"), (true,))?;
    }
    if desc.device == Device::CPU {
        return Ok(tensor);
    }
    let Device { kind: DeviceKind::Cuda, index } = desc.device else {
        return Err(PyRuntimeError::new_err("a tensor was sent to a kind of device that is not known here"));
    };
    let devices = py.import(intern!(py, "tensorcall.rpc._devices"))?;
    devices.call_method1(intern!(py, "arrive"), (tensor, format!("cuda:{index}")))
}
