//! Torch's stable C interface, looked up in the `libtorch_cpu` that Python has loaded.
//!
//! All functions come from one table ([`Stable::look_up`]), and each is called in one place, with its
//! proof. Torch catches its exceptions and reports a status instead; it also logs them to stderr, so
//! that nothing is asked here which a tensor of an odd kind would refuse.
#![expect(unsafe_code, reason = "calls torch's C interface; each use carries its proof")]

use std::ffi::{CStr, CString, c_char, c_void};
use std::path::PathBuf;
use std::ptr::NonNull;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::{ffi, intern};
use tensorcall::engine::buffer::Buffer;
use tensorcall_proto::wire::tensor::{DType, TensorDesc};

use super::torch::{Facts, Plain, Unfit, is_complex, is_conj, is_neg, is_nested, requires_grad};

/// Opaque to us.
type RawTensor = *mut c_void;
/// 0 is success.
type Status = i32;
type Deleter = unsafe extern "C" fn(data: *mut c_void, context: *mut c_void);

/// Defines [`Stable`] from the signatures of the functions that it looks up.
macro_rules! stable_interface {
    ($($name:ident: fn($($arg:ty),*) -> $ret:ty;)*) => {
        /// Torch's stable C interface: the functions used here, from the loaded `libtorch_cpu`.
        pub(super) struct Stable {
            $($name: unsafe extern "C" fn($($arg),*) -> $ret,)*
            strided: i32,
            cpu: i32,
            /// Wire dtype by torch's number, and back.
            dtypes: Vec<Option<DType>>,
            numbers: Vec<Option<i32>>,
        }

        impl Stable {
            /// Looks the functions up in an open library; `None` if this torch lacks one.
            fn look_up(library: NonNull<c_void>) -> Option<Self> {
                $(
                    let name = CString::new(stringify!($name)).ok()?;
                    // SAFETY: `library` is an open handle that is never closed, `name` ends in a zero.
                    let symbol = unsafe { libc::dlsym(library.as_ptr(), name.as_ptr()) };
                    if symbol.is_null() {
                        return None;
                    }
                    // SAFETY: a function pointer is as wide as the symbol's address, and torch promises
                    // this signature for this name in every release that has it (torch/csrc/stable/c/shim.h
                    // and torch/csrc/inductor/aoti_torch/c/shim.h).
                    let $name = unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> $ret>(symbol)
                    };
                )*
                Some(Self { $($name,)* strided: -1, cpu: -1, dtypes: Vec::new(), numbers: Vec::new() })
            }
        }
    };
}

stable_interface! {
    torch_tensor_from_pyobject: fn(*mut ffi::PyObject, *mut RawTensor) -> Status;
    torch_tensor_to_pyobject: fn(RawTensor, *mut c_void, *mut *mut ffi::PyObject) -> Status;
    torch_dtype_from_pyobject: fn(*mut ffi::PyObject, *mut i32) -> Status;
    torch_from_blob: fn(
        *mut c_void, i64, *const i64, *const i64, i64, i32, i32, i32, *mut RawTensor, i32, *const u8, i64,
        Deleter, *mut c_void
    ) -> Status;
    torch_has_storage: fn(RawTensor, *mut bool) -> Status;
    torch_get_const_data_ptr: fn(RawTensor, *mut *const c_void) -> Status;
    aoti_torch_get_dim: fn(RawTensor, *mut i64) -> Status;
    aoti_torch_get_sizes: fn(RawTensor, *mut *const i64) -> Status;
    aoti_torch_get_strides: fn(RawTensor, *mut *const i64) -> Status;
    aoti_torch_get_dtype: fn(RawTensor, *mut i32) -> Status;
    aoti_torch_get_device_type: fn(RawTensor, *mut i32) -> Status;
    aoti_torch_get_layout: fn(RawTensor, *mut i32) -> Status;
    aoti_torch_delete_tensor_object: fn(RawTensor) -> Status;
    aoti_torch_layout_strided: fn() -> i32;
    aoti_torch_device_type_cpu: fn() -> i32;
    torch_exception_get_what_without_backtrace: fn() -> *const c_char;
}

/// A tensor of torch's C interface, released on drop.
struct Handle<'a> {
    raw: RawTensor,
    api: &'a Stable,
}

impl Drop for Handle<'_> {
    fn drop(&mut self) {
        // SAFETY: `raw` is a new reference that torch gave to this handle, released here only.
        let _ = unsafe { (self.api.aoti_torch_delete_tensor_object)(self.raw) };
    }
}

impl Stable {
    /// The interface of the torch that Python has loaded, if it has it.
    pub(super) fn find(py: Python<'_>) -> PyResult<Option<Self>> {
        let torch: PathBuf = py.import("torch")?.getattr("__file__")?.extract()?;
        let suffix = if cfg!(target_os = "macos") { "dylib" } else { "so" };
        let name = format!("libtorch_cpu.{suffix}");
        let beside = torch.parent().map(|folder| folder.join("lib").join(&name));
        let candidates = beside.iter().filter_map(|path| path.to_str()).chain([name.as_str()]);
        Ok(candidates.filter_map(loaded_library).find_map(Self::look_up))
    }

    /// Asks for torch's numbers of things. `objects` are its dtypes by wire code.
    pub(super) fn learn_numbers(mut self, objects: &[Option<Py<PyAny>>]) -> PyResult<Self> {
        // SAFETY: takes nothing and returns a constant.
        self.strided = unsafe { (self.aoti_torch_layout_strided)() };
        // SAFETY: takes nothing and returns a constant.
        self.cpu = unsafe { (self.aoti_torch_device_type_cpu)() };
        for &dtype in DType::ALL {
            let Some(object) = &objects[usize::from(dtype.code())] else {
                continue;
            };
            let mut number = -1;
            // SAFETY: `object` is a live `torch.dtype`, `number` is ours to write, and the caller of
            // `TorchApi::new` is inside Python.
            self.check(unsafe { (self.torch_dtype_from_pyobject)(object.as_ptr(), &raw mut number) })?;
            set(&mut self.dtypes, usize::try_from(number)?, dtype);
            set(&mut self.numbers, usize::from(dtype.code()), number);
        }
        Ok(self)
    }

    pub(super) fn read(&self, tensor: &Bound<'_, PyAny>) -> Facts<Plain> {
        let handle = self.handle(tensor)?;
        if self.get(&handle, self.aoti_torch_get_device_type)? != self.cpu {
            let device = tensor.getattr(intern!(tensor.py(), "device"))?.to_string();
            return Ok(Err(Unfit::Device(device)));
        }
        if self.get(&handle, self.aoti_torch_get_layout)? != self.strided {
            return Ok(Err(Unfit::Form(tensor.getattr(intern!(tensor.py(), "layout"))?.to_string())));
        }
        let number = self.get(&handle, self.aoti_torch_get_dtype)?;
        let Some(dtype) = usize::try_from(number).ok().and_then(|n| self.dtypes.get(n).copied().flatten())
        else {
            return Ok(Err(Unfit::Form(tensor.getattr(intern!(tensor.py(), "dtype"))?.to_string())));
        };
        // Asked first, because torch logs an error when the sizes of a nested tensor are asked for.
        if is_nested(tensor)? {
            return Ok(Err(Unfit::Form("nested".to_owned())));
        }
        if !self.get(&handle, self.torch_has_storage)? {
            return Ok(Err(Unfit::NoMemory));
        }
        let (sizes, strides) = self.dims(&handle)?;
        let start = self.get(&handle, self.torch_get_const_data_ptr)?.expose_provenance();
        if start == 0 && !sizes.contains(&0) {
            return Ok(Err(Unfit::NoMemory));
        }
        Ok(Ok(Plain {
            dtype,
            sizes,
            strides,
            start,
            requires_grad: requires_grad(tensor)?,
            conj: is_complex(dtype) && is_conj(tensor)?,
            neg: is_neg(tensor)?,
        }))
    }

    fn handle(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Handle<'_>> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: `tensor` is a live object and the interpreter lock is held, as `Bound` proves; torch
        // itself refuses what is no tensor. `raw` is ours to write.
        self.check(unsafe { (self.torch_tensor_from_pyobject)(tensor.as_ptr(), &raw mut raw) })?;
        Ok(Handle { raw, api: self })
    }

    /// Calls a getter that writes one value.
    fn get<T: Blank>(
        &self,
        handle: &Handle<'_>,
        getter: unsafe extern "C" fn(RawTensor, *mut T) -> Status,
    ) -> PyResult<T> {
        let mut value = T::NOTHING;
        // SAFETY: the handle is live, and every getter of this shape writes one `T` to its target.
        self.check(unsafe { getter(handle.raw, &raw mut value) })?;
        Ok(value)
    }

    fn dims(&self, handle: &Handle<'_>) -> PyResult<(Vec<u64>, Vec<u64>)> {
        let dims = usize::try_from(self.get(handle, self.aoti_torch_get_dim)?)?;
        let sizes = self.get(handle, self.aoti_torch_get_sizes)?;
        let strides = self.get(handle, self.aoti_torch_get_strides)?;
        // SAFETY: torch lends `dims` sizes, which live as long as the tensor and change only under the
        // interpreter lock, which is held.
        let sizes = unsafe { copy_dims(sizes, dims) };
        // SAFETY: as for the sizes.
        let strides = unsafe { copy_dims(strides, dims) };
        Ok((sizes, strides))
    }

    pub(super) fn build<'py>(
        &self,
        py: Python<'py>,
        buffer: Buffer,
        desc: &TensorDesc,
    ) -> PyResult<Bound<'py, PyAny>> {
        let handle = self.tensor_on(buffer, desc)?;
        let mut object = std::ptr::null_mut();
        // SAFETY: the handle is live, null asks for a plain `torch.Tensor`, `object` is ours to write
        // and `py` proves that the interpreter lock is held.
        self.check(unsafe {
            (self.torch_tensor_to_pyobject)(handle.raw, std::ptr::null_mut(), &raw mut object)
        })?;
        // SAFETY: torch returned success and with it a new reference (null would become an error).
        unsafe { Bound::from_owned_ptr_or_err(py, object) }
    }

    /// A tensor whose storage owns `buffer`. If torch refuses, the buffer is leaked: whether torch
    /// has called the deleter cannot be known then.
    fn tensor_on(&self, buffer: Buffer, desc: &TensorDesc) -> PyResult<Handle<'_>> {
        let offset = usize::try_from(desc.offset)?;
        let fits = desc.extent().ok().and_then(|extent| desc.offset.checked_add(extent));
        if fits.is_none_or(|end| end > buffer.len() as u64) {
            return Err(PyRuntimeError::new_err("a tensor exceeds its memory"));
        }
        let unknown = || PyRuntimeError::new_err(format!("this torch has no dtype {}", desc.dtype));
        let number = self.numbers.get(usize::from(desc.dtype.code())).copied().flatten();
        let number = number.ok_or_else(unknown)?;
        let dims = signed_dims(desc)?;
        let count = i64::try_from(desc.shape.len())?;
        let (sizes, strides) = dims.split_at(desc.shape.len());
        let data = buffer.as_ptr().wrapping_add(offset).cast();
        let context = Box::into_raw(Box::new(buffer)).cast();
        let mut raw = std::ptr::null_mut();
        // SAFETY: sizes and strides are as long as announced and copied by torch. The extent they span
        // from `data` on lies inside the buffer (checked above), which lives until the deleter frees
        // it, and nobody else has it. The deleter needs no interpreter and fits `context`. Index -1 is
        // the CPU without a number, the metadata is empty, `raw` is ours to write.
        self.check(unsafe {
            (self.torch_from_blob)(
                data,
                count,
                sizes.as_ptr(),
                strides.as_ptr(),
                0,
                number,
                self.cpu,
                -1,
                &raw mut raw,
                self.strided,
                std::ptr::null(),
                0,
                free_buffer,
                context,
            )
        })?;
        Ok(Handle { raw, api: self })
    }

    fn check(&self, status: Status) -> PyResult<()> {
        if status == 0 { Ok(()) } else { Err(self.error()) }
    }

    #[cold]
    fn error(&self) -> PyErr {
        // SAFETY: takes nothing; the text is lent until this thread's next exception.
        let text = unsafe { (self.torch_exception_get_what_without_backtrace)() };
        if text.is_null() {
            return PyRuntimeError::new_err("torch reported an error without a text");
        }
        // SAFETY: not null, and torch ends its texts in a zero.
        let text = unsafe { CStr::from_ptr(text) };
        PyRuntimeError::new_err(text.to_string_lossy().into_owned())
    }
}

/// A library that is already loaded, without loading it.
fn loaded_library(path: &str) -> Option<NonNull<c_void>> {
    let path = CString::new(path).ok()?;
    // SAFETY: the path ends in a zero; with `RTLD_NOLOAD` no foreign code runs.
    NonNull::new(unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) })
}

/// Frees the buffer of a tensor. Torch calls it once, on any thread, with or without the interpreter.
unsafe extern "C" fn free_buffer(_data: *mut c_void, context: *mut c_void) {
    // SAFETY: `context` is the box that `tensor_on` gave away, and torch hands it back once.
    drop(unsafe { Box::from_raw(context.cast::<Buffer>()) });
}

/// Copies `len` sizes or strides.
///
/// # Safety
///
/// `dims` must point to `len` numbers, or `len` be 0.
unsafe fn copy_dims(dims: *const i64, len: usize) -> Vec<u64> {
    if len == 0 {
        return Vec::new();
    }
    // SAFETY: the caller's promise.
    let dims = unsafe { std::slice::from_raw_parts(dims, len) };
    dims.iter().map(|&n| n.unsigned_abs()).collect()
}

/// All sizes, then all strides.
fn signed_dims(desc: &TensorDesc) -> PyResult<Vec<i64>> {
    let count = desc.shape.len();
    let mut dims = vec![1; 2 * count];
    for (to, &size) in dims.iter_mut().zip(&desc.shape) {
        *to = i64::try_from(size)?;
    }
    let mut next = 1;
    for index in (0..count).rev() {
        dims[count + index] = match &desc.strides {
            Some(strides) => i64::try_from(strides[index])?,
            None => next,
        };
        next *= dims[index].max(1);
    }
    Ok(dims)
}

fn set<T>(table: &mut Vec<Option<T>>, index: usize, value: T) {
    if table.len() <= index {
        table.resize_with(index + 1, || None);
    }
    table[index] = Some(value);
}

/// Initial values for getters (`Default` is not there for pointers).
trait Blank {
    const NOTHING: Self;
}

impl Blank for i32 {
    const NOTHING: Self = 0;
}

impl Blank for i64 {
    const NOTHING: Self = 0;
}

impl Blank for bool {
    const NOTHING: Self = false;
}

impl<T> Blank for *const T {
    const NOTHING: Self = std::ptr::null();
}
