//! Foreign memory: what objects of the program lie in, and memory as Python sees it.
#![expect(unsafe_code, reason = "names and copies memory of torch; each use carries its proof")]

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::sync::Arc;

use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::{ffi, intern};
use tensorcall::engine::buffer::{Buffer, Region, Target};

use crate::gil::PyOwner;

/// Memory of tensors, as long as their storages live.
///
/// `start..start + len` must be inside the storages of `tensors`, as `TorchApi::read` reports them.
/// Holding the storage and not the tensor keeps the memory through `set_()` and assignments to
/// `.data`. What nobody can prevent is `resize_` of the storage itself under a call in flight, which
/// frees memory that torch's own RPC would read as well: docs/tensors.md forbids it.
pub(crate) fn region_of<'a, 'py: 'a>(
    tensors: impl Iterator<Item = &'a Bound<'py, PyAny>>,
    start: usize,
    len: usize,
) -> PyResult<Region> {
    let own = |tensor: &Bound<'py, PyAny>| {
        let storage = tensor.call_method0(intern!(tensor.py(), "untyped_storage"))?;
        Ok(PyOwner::new(storage.unbind(), len))
    };
    let owners = tensors.map(own).collect::<PyResult<Vec<_>>>()?;
    let start = std::ptr::with_exposed_provenance(start);
    // SAFETY: the run lies in the storages that `owners` keep alive (see above), whose memory stays
    // in place unless the program resizes a storage under way, which it must not.
    Ok(unsafe { Region::new(start, len, Arc::new(owners)) })
}

/// A borrowed run of memory that Python may write to: it can be copied from, nothing else (MEM-1).
pub(crate) struct Memory<'a> {
    start: *const u8,
    len: usize,
    owner: PhantomData<&'a ()>,
}

// SAFETY: the memory is only read, through `copy`, which works on any thread; `'a` outlives the use.
unsafe impl Sync for Memory<'_> {}

impl<'a> Memory<'a> {
    /// Memory of tensors, for as long as `holder` that holds them is borrowed: cheaper than
    /// [`region_of`] for what is copied before the interpreter lock is released. `start..start + len`
    /// must be theirs as there.
    pub(crate) fn of<T: ?Sized>(_holder: &'a T, start: usize, len: usize) -> Self {
        Self { start: std::ptr::with_exposed_provenance(start), len, owner: PhantomData }
    }

    /// The memory of a region.
    pub(crate) fn of_region(region: &'a Region) -> Self {
        Self { start: region.as_ptr(), len: region.len(), owner: PhantomData }
    }

    /// Copies `target.len()` bytes from offset `from` on. If Python writes to them meanwhile, what is
    /// copied is unspecified.
    ///
    /// # Panics
    ///
    /// If they are not all inside the run.
    pub(crate) fn copy(&self, from: usize, target: &mut [u8]) {
        let end = from.checked_add(target.len());
        assert!(end.is_some_and(|end| end <= self.len), "a block lies in its memory");
        if target.is_empty() {
            return;
        }
        // SAFETY: `from` is inside the run by the assertion, and a run is one allocation.
        let source = unsafe { self.start.add(from) };
        // SAFETY: `target.len()` bytes at `source` are inside the run by the assertion, and the owner
        // that `'a` borrows keeps them readable. `target` is exclusively ours, so the two do not
        // overlap. No reference to the source is formed.
        unsafe { std::ptr::copy_nonoverlapping(source, target.as_mut_ptr(), target.len()) }
    }
}

/// Memory as an object with Python's buffer protocol.
#[pyclass(frozen, name = "_Memory", module = "tensorcall._tensorcall")]
pub(crate) struct Exported {
    start: usize,
    len: usize,
    /// Keeps the memory in place.
    _owner: Owner,
}

enum Owner {
    Buffer(#[expect(dead_code, reason = "kept, not used")] Buffer),
    Storage(#[expect(dead_code, reason = "kept, not used")] Py<PyAny>),
    Foreign(#[expect(dead_code, reason = "kept, not used")] PyBuffer<u8>),
    Region(#[expect(dead_code, reason = "kept, not used")] Region),
    Target(#[expect(dead_code, reason = "kept, not used")] Target),
}

impl Exported {
    /// Memory to be sent. Who gets it must not write to it.
    pub(crate) fn of_region(region: Region) -> Self {
        Self { start: region.as_ptr().expose_provenance(), len: region.len(), _owner: Owner::Region(region) }
    }

    /// Memory to be received into, by whoever gets it and nobody else.
    pub(crate) fn of_target(target: Target) -> Self {
        Self { start: target.as_ptr().expose_provenance(), len: target.len(), _owner: Owner::Target(target) }
    }

    /// The memory of a message, given away.
    pub(super) fn of_buffer(buffer: Buffer) -> Self {
        Self { start: buffer.as_ptr().expose_provenance(), len: buffer.len(), _owner: Owner::Buffer(buffer) }
    }

    /// `len` bytes at `start` in the storage of `tensor`, as `TorchApi::read` reports them.
    pub(super) fn of_tensor(tensor: &Bound<'_, PyAny>, start: usize, len: usize) -> PyResult<Self> {
        let storage = tensor.call_method0(intern!(tensor.py(), "untyped_storage"))?;
        Ok(Self { start, len, _owner: Owner::Storage(storage.unbind()) })
    }

    /// What another object exports, without gaps. Who gets it must not write to it: it may be read-only.
    pub(super) fn of_foreign(memory: &Bound<'_, PyAny>) -> PyResult<Self> {
        let buffer = PyBuffer::<u8>::get(memory)?;
        if !buffer.is_c_contiguous() {
            return Err(PyBufferError::new_err("the memory has gaps"));
        }
        let (start, len) = (buffer.buf_ptr().expose_provenance(), buffer.len_bytes());
        Ok(Self { start, len, _owner: Owner::Foreign(buffer) })
    }
}

#[pymethods]
impl Exported {
    /// Gives the memory to a consumer, writable.
    ///
    /// # Safety
    ///
    /// As Python's protocol has it: `view` is null or a view to be filled.
    #[expect(clippy::needless_pass_by_value, reason = "as PyO3 calls it")]
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        if view.is_null() {
            return Err(PyBufferError::new_err("no view to fill"));
        }
        let exported = slf.get();
        let len = isize::try_from(exported.len)?;
        let memory = std::ptr::with_exposed_provenance_mut::<c_void>(exported.start);
        // SAFETY: Python passes a view to fill (not null, checked). The memory is `len` bytes long and
        // its owner lives as long as `slf`, of which the view takes a reference. A message's buffer is
        // ours to give away, a tensor may be written to by whom its storage is given, and for the
        // memory of another object or of a message to be sent `of_foreign` and `of_region` tell their callers
        // not to. A target is its owner's alone.
        let rc = unsafe { ffi::PyBuffer_FillInfo(view, slf.as_ptr(), memory, len, 0, flags) };
        if rc == 0 { Ok(()) } else { Err(PyErr::fetch(slf.py())) }
    }
}
