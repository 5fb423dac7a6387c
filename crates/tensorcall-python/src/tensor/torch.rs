//! Torch from Rust: the facts of a tensor, and tensors on our memory.
//!
//! Two ways to the same things, chosen once ([`TorchApi::get`]): torch's stable C interface
//! ([`Stable`], torch 2.15 and newer; nothing is linked), or Python attributes and
//! `torch.frombuffer` (any torch; two to six times as long).

use std::collections::HashMap;
use std::fmt;

use pyo3::exceptions::{PyNotImplementedError, PyRuntimeError, PyTypeError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyString, PyTuple, PyType};
use tensorcall::engine::buffer::Buffer;
use tensorcall_proto::wire::tensor::{DType, TensorDesc};

use super::layout::{self, Dims};
use super::memory::Exported;
use super::stable::Stable;

/// How torch is reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Path {
    /// The stable C interface.
    Stable,
    /// Python attributes and calls.
    Attributes,
}

/// Torch as this module uses it.
pub(crate) struct TorchApi {
    stable: Option<Stable>,
    tensor_type: Py<PyType>,
    parameter_type: Py<PyAny>,
    strided: Py<PyAny>,
    /// Torch's dtype objects by wire code; `None` where this torch has none.
    dtypes: Vec<Option<Py<PyAny>>>,
    /// Address of a dtype object to dtype; the objects are in `dtypes`, or live as long as torch.
    by_object: HashMap<usize, DType>,
    empty: Py<PyAny>,
    empty_strided: Py<PyAny>,
    frombuffer: Py<PyAny>,
}

/// Why a tensor cannot travel as memory.
#[derive(Debug)]
pub(crate) enum Unfit {
    /// Not of the exact type `torch.Tensor`.
    Type(String),
    /// Not in main memory.
    Device(String),
    /// Sparse, mkldnn, nested, quantized and the like: not one strided run of plain items.
    Form(String),
    /// Torch reports no memory: a wrapper of a functional transform, for one.
    NoMemory,
}

impl fmt::Display for Unfit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Type(name) => write!(f, "expected a plain torch.Tensor, found {name}"),
            // The beginning and the end are the text that programs look for.
            Self::Device(device) => write!(
                f,
                "TensorPipe RPC backend only supports CPU tensors by default, please move your tensors to CPU \
                 before sending them over RPC, or call `set_device_map` on `TensorPipeRpcBackendOptions` to \
                 map devices. There is no device map for this worker, but found tensor on device: {device}"
            ),
            Self::Form(form) => write!(f, "a {form} tensor cannot be sent as plain memory"),
            Self::NoMemory => write!(f, "the tensor has no memory that could be sent"),
        }
    }
}

impl From<Unfit> for PyErr {
    fn from(unfit: Unfit) -> Self {
        match unfit {
            Unfit::Type(_) => PyTypeError::new_err(unfit.to_string()),
            Unfit::Device(_) => PyRuntimeError::new_err(unfit.to_string()),
            // What torch raises for a tensor without storage.
            Unfit::Form(_) | Unfit::NoMemory => PyNotImplementedError::new_err(unfit.to_string()),
        }
    }
}

/// Reads a tensor: its facts, why it has none that are of use here, or an exception.
pub(super) type Facts<T> = PyResult<Result<T, Unfit>>;

/// What a plain tensor is made of.
pub(crate) struct Plain {
    pub(crate) dtype: DType,
    pub(crate) sizes: Vec<u64>,
    pub(crate) strides: Vec<u64>,
    /// Address of the first element.
    pub(crate) start: usize,
    pub(crate) requires_grad: bool,
    pub(crate) conj: bool,
    pub(crate) neg: bool,
}

impl Plain {
    /// Sizes, strides and item size.
    pub(crate) fn dims(&self) -> Dims<'_> {
        // No item is larger than 16 bytes.
        let item = usize::try_from(self.dtype.size()).unwrap_or(16);
        Dims { sizes: &self.sizes, strides: &self.strides, item }
    }
}

impl TorchApi {
    /// The best path that this torch offers. Imports torch at first use.
    pub(crate) fn get(py: Python<'_>) -> PyResult<&Self> {
        static BEST: PyOnceLock<TorchApi> = PyOnceLock::new();
        BEST.get_or_try_init(py, || {
            let stable = Stable::find(py)?;
            Self::new(py, stable)
        })
    }

    /// A certain path, for tests.
    pub(crate) fn by(py: Python<'_>, path: Path) -> PyResult<&Self> {
        static ATTRIBUTES: PyOnceLock<TorchApi> = PyOnceLock::new();
        match path {
            Path::Attributes => ATTRIBUTES.get_or_try_init(py, || Self::new(py, None)),
            Path::Stable => {
                let best = Self::get(py)?;
                let missing = || PyRuntimeError::new_err("this torch lacks the stable C interface");
                if best.path() == path { Ok(best) } else { Err(missing()) }
            }
        }
    }

    /// The path taken.
    pub(crate) fn path(&self) -> Path {
        if self.stable.is_some() { Path::Stable } else { Path::Attributes }
    }

    fn new(py: Python<'_>, stable: Option<Stable>) -> PyResult<Self> {
        let torch = py.import("torch")?;
        let mut dtypes: Vec<Option<Py<PyAny>>> = Vec::new();
        dtypes.resize_with(usize::from(u8::MAX), || None);
        let mut by_object = HashMap::new();
        for &dtype in DType::ALL.iter().filter(|dtype| !is_quantized(**dtype)) {
            let Some(object) = torch.getattr_opt(dtype.name())? else {
                continue;
            };
            by_object.insert(object.as_ptr() as usize, dtype);
            dtypes[usize::from(dtype.code())] = Some(object.unbind());
        }
        let stable = stable.map(|stable| stable.learn_numbers(&dtypes)).transpose()?;
        Ok(Self {
            stable,
            tensor_type: torch.getattr("Tensor")?.cast_into::<PyType>()?.unbind(),
            parameter_type: torch.getattr("nn")?.getattr("Parameter")?.unbind(),
            strided: torch.getattr("strided")?.unbind(),
            dtypes,
            by_object,
            empty: torch.getattr("empty")?.unbind(),
            empty_strided: torch.getattr("empty_strided")?.unbind(),
            frombuffer: torch.getattr("frombuffer")?.unbind(),
        })
    }

    /// Whether `object` is of the exact type `torch.Tensor`.
    pub(crate) fn is_exact_tensor(&self, object: &Bound<'_, PyAny>) -> bool {
        object.get_type_ptr().cast::<ffi::PyObject>() == self.tensor_type.as_ptr()
    }

    /// The plain tensor that a parameter of a module is, with the same place in the graph; `None` for others.
    pub(crate) fn tensor_of_parameter<'py>(
        &self,
        object: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = object.py();
        if object.get_type_ptr().cast::<ffi::PyObject>() != self.parameter_type.as_ptr() {
            return Ok(None);
        }
        object.call_method1(intern!(py, "as_subclass"), (&self.tensor_type,)).map(Some)
    }

    /// Reads what `tensor` is made of, if it is plain: of the exact type, dense, strided, on the CPU.
    pub(crate) fn read(&self, tensor: &Bound<'_, PyAny>) -> Facts<Plain> {
        if !self.is_exact_tensor(tensor) {
            let name = tensor.get_type().fully_qualified_name()?.to_string();
            return Ok(Err(Unfit::Type(name)));
        }
        match &self.stable {
            Some(stable) => stable.read(tensor),
            None => self.read_attributes(tensor),
        }
    }

    fn read_attributes(&self, tensor: &Bound<'_, PyAny>) -> Facts<Plain> {
        let py = tensor.py();
        let device = tensor.getattr(intern!(py, "device"))?;
        if device.getattr(intern!(py, "type"))?.cast::<PyString>()? != "cpu" {
            return Ok(Err(Unfit::Device(device.to_string())));
        }
        let layout = tensor.getattr(intern!(py, "layout"))?;
        if !layout.is(&self.strided) {
            return Ok(Err(Unfit::Form(layout.to_string())));
        }
        if is_nested(tensor)? {
            return Ok(Err(Unfit::Form("nested".to_owned())));
        }
        let dtype = tensor.getattr(intern!(py, "dtype"))?;
        let Some(&dtype) = self.by_object.get(&(dtype.as_ptr() as usize)) else {
            return Ok(Err(Unfit::Form(dtype.to_string())));
        };
        let sizes: Vec<u64> = tensor.getattr(intern!(py, "shape"))?.extract()?;
        // A wrapper without memory raises here.
        let Ok(start) = tensor.call_method0(intern!(py, "data_ptr")) else {
            return Ok(Err(Unfit::NoMemory));
        };
        let start = start.extract::<usize>()?;
        if start == 0 && !sizes.contains(&0) {
            return Ok(Err(Unfit::NoMemory));
        }
        Ok(Ok(Plain {
            dtype,
            sizes,
            strides: tensor.call_method0(intern!(py, "stride"))?.extract()?,
            start,
            requires_grad: requires_grad(tensor)?,
            conj: is_complex(dtype) && is_conj(tensor)?,
            neg: is_neg(tensor)?,
        }))
    }

    /// A tensor on `buffer`, which must hold what `desc` says ([`TensorDesc::check`]).
    pub(crate) fn build<'py>(
        &self,
        py: Python<'py>,
        buffer: Buffer,
        desc: &TensorDesc,
    ) -> PyResult<Bound<'py, PyAny>> {
        match &self.stable {
            Some(stable) => stable.build(py, buffer, desc),
            None if buffer.is_empty() => {
                let dims = (desc.shape.clone(), strides_of(desc));
                let kwargs = self.cpu_kwargs(py, desc.dtype)?;
                self.empty_strided.bind(py).call(dims, Some(&kwargs))
            }
            None => self.build_view(&self.storage(py, buffer)?, desc),
        }
    }

    /// Tensors on one storage over `buffer`, in the order of `descs`, each of which it must hold.
    pub(crate) fn build_shared<'py>(
        &self,
        py: Python<'py>,
        buffer: Buffer,
        descs: &[&TensorDesc],
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let storage = self.storage(py, buffer)?;
        descs.iter().map(|desc| self.build_view(&storage, desc)).collect()
    }

    /// An untyped storage over `buffer`.
    fn storage<'py>(&self, py: Python<'py>, buffer: Buffer) -> PyResult<Bound<'py, PyAny>> {
        let bytes = if let Some(stable) = &self.stable {
            let len = buffer.len() as u64;
            stable.build(py, buffer, &TensorDesc::contiguous(DType::UInt8, vec![len], 0))?
        } else if buffer.is_empty() {
            self.empty.bind(py).call((0,), Some(&self.cpu_kwargs(py, DType::UInt8)?))?
        } else {
            self.bytes_on(py, Exported::of_buffer(buffer))?
        };
        bytes.call_method0(intern!(py, "untyped_storage"))
    }

    /// A tensor of bytes on `memory`, which must not be empty.
    pub(super) fn bytes_on<'py>(&self, py: Python<'py>, memory: Exported) -> PyResult<Bound<'py, PyAny>> {
        let memory = Bound::new(py, memory)?;
        self.frombuffer.bind(py).call((memory,), Some(&self.dtype_kwargs(py, DType::UInt8)?))
    }

    fn build_view<'py>(&self, storage: &Bound<'py, PyAny>, desc: &TensorDesc) -> PyResult<Bound<'py, PyAny>> {
        let py = storage.py();
        let empty = self.empty.bind(py).call((0,), Some(&self.cpu_kwargs(py, desc.dtype)?))?;
        let offset = desc.offset / desc.dtype.size();
        let shape = PyTuple::new(py, &desc.shape)?;
        let strides = PyTuple::new(py, strides_of(desc))?;
        empty.call_method1(intern!(py, "set_"), (storage, offset, shape, strides))
    }

    fn dtype_kwargs<'py>(&self, py: Python<'py>, dtype: DType) -> PyResult<Bound<'py, PyDict>> {
        let unknown = || PyRuntimeError::new_err(format!("this torch has no dtype {dtype}"));
        let object = self.dtypes[usize::from(dtype.code())].as_ref().ok_or_else(unknown)?;
        let kwargs = PyDict::new(py);
        kwargs.set_item(intern!(py, "dtype"), object)?;
        Ok(kwargs)
    }

    /// The same for a function that would use the program's default device.
    fn cpu_kwargs<'py>(&self, py: Python<'py>, dtype: DType) -> PyResult<Bound<'py, PyDict>> {
        let kwargs = self.dtype_kwargs(py, dtype)?;
        kwargs.set_item(intern!(py, "device"), intern!(py, "cpu"))?;
        Ok(kwargs)
    }
}

/// A quantized tensor's scales are not in its memory; pickle knows how to send them.
fn is_quantized(dtype: DType) -> bool {
    matches!(dtype, DType::QInt8 | DType::QUInt8 | DType::QInt32 | DType::QUInt4x2 | DType::QUInt2x4)
}

pub(super) fn is_complex(dtype: DType) -> bool {
    matches!(dtype, DType::Complex32 | DType::Complex64 | DType::Complex128 | DType::BComplex32)
}

fn strides_of(desc: &TensorDesc) -> Vec<u64> {
    desc.strides.clone().unwrap_or_else(|| layout::row_major_strides(&desc.shape))
}

pub(super) fn requires_grad(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    tensor.getattr(intern!(tensor.py(), "requires_grad"))?.extract()
}

pub(super) fn is_nested(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    tensor.getattr(intern!(tensor.py(), "is_nested"))?.extract()
}

pub(super) fn is_conj(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    tensor.call_method0(intern!(tensor.py(), "is_conj"))?.extract()
}

pub(super) fn is_neg(tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
    tensor.call_method0(intern!(tensor.py(), "is_neg"))?.extract()
}
