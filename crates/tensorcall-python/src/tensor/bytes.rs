//! Bytes of other Python objects as tensors, and back, so that they travel as tensors do: not copied
//! into a pickle, and used where they were received.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tensorcall_proto::wire::tensor::DType;

use super::memory::Exported;
use super::torch::TorchApi;

/// Adds the functions to the extension.
pub(crate) fn add_to(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(tensor_on, module)?)?;
    module.add_function(wrap_pyfunction!(memory_of, module)?)
}

/// A tensor of the bytes that `memory` exports, which it keeps alive. It must only be read: nothing
/// says so to torch if the memory is read-only.
#[pyfunction]
fn tensor_on<'py>(memory: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let py = memory.py();
    TorchApi::get(py)?.bytes_on(py, Exported::of_foreign(memory)?)
}

/// The memory of a contiguous tensor of bytes as a writable buffer, which keeps it alive.
#[pyfunction]
fn memory_of(tensor: &Bound<'_, PyAny>) -> PyResult<Exported> {
    let plain = TorchApi::get(tensor.py())?.read(tensor)??;
    let unfit = || PyValueError::new_err("expected a contiguous tensor of bytes");
    match plain.sizes.as_slice() {
        &[len] if plain.dtype == DType::UInt8 && (plain.strides == [1] || len <= 1) => {
            Exported::of_tensor(tensor, plain.start, usize::try_from(len)?)
        }
        _ => Err(unfit()),
    }
}
