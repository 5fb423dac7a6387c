//! Tensors of candle as memory of messages, and back.
//!
//! A contiguous tensor in main memory is **lent**: the message names its memory, and until it is sent the
//! storage is locked for reading, so that nobody writes to it or frees it meanwhile. A received tensor is
//! **copied** once, since storages of candle are vectors and own their memory.
#![expect(unsafe_code, reason = "storages are read in place and filled at once; each use carries its proof")]

use std::sync::Arc;

use candle_core::backend::BackendStorage;
use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, Device, Storage, StorageRef, Tensor};
use tensorcall_proto::wire::tensor::{DType, TensorDesc};

use super::error::{Problem, Result};
use crate::buffer::Region;

/// Below this size a copy costs less than to lock a storage and to name its memory.
const LENT_FROM: usize = 4096;

/// A tensor as it goes into a message: what it is like, in a buffer of its own, and its memory.
pub(crate) fn lend(tensor: &Tensor) -> Result<(TensorDesc, Region)> {
    let tensor = tensor.to_device(&Device::Cpu)?.contiguous()?.detach();
    let dtype = dtype_of(tensor.dtype())?;
    let shape = tensor.dims().iter().map(|&dim| dim as u64).collect();
    let desc = TensorDesc::contiguous(dtype, shape, 0);
    let size = tensor.elem_count() * tensor.dtype().size_in_bytes();
    let lent = Lent::new(tensor);
    let (start, len) = lent.bytes(size)?;
    if size < LENT_FROM {
        let mut copy = vec![0; size];
        // SAFETY: `Lent::bytes` has checked that `len == size` readable bytes are at `start`, which `lent`
        // keeps there and unchanged; the vector is new and has as many.
        unsafe { std::ptr::copy_nonoverlapping(start, copy.as_mut_ptr(), len) };
        return Ok((desc, Region::from_vec(copy)));
    }
    // SAFETY: the bytes are those of a storage that `lent` keeps alive and locked for reading, so that they
    // stay where they are.
    Ok((desc, unsafe { Region::new(start, len, Arc::new(lent)) }))
}

/// A tensor whose storage nobody writes to.
struct Lent {
    /// Before `tensor`, which has what it refers to.
    guard: StorageRef<'static>,
    tensor: Tensor,
}

impl Lent {
    fn new(tensor: Tensor) -> Self {
        let (guard, _) = tensor.storage_and_layout();
        // SAFETY: the guard refers to the lock in the storage that `tensor` shares the ownership of. It is
        // dropped before `tensor`, and nobody gets it out of here. With parking_lot's `send_guard` it may be
        // dropped on any thread.
        let guard = unsafe { std::mem::transmute::<StorageRef<'_>, StorageRef<'static>>(guard) };
        Self { guard, tensor }
    }

    /// Where the `size` bytes of the tensor are, which is contiguous and in main memory.
    fn bytes(&self, size: usize) -> Result<(*const u8, usize)> {
        let Storage::Cpu(storage) = &*self.guard else { return Err(Problem::NotInMemory) };
        let (start, len) = match storage {
            CpuStorage::U8(items) => span(items),
            CpuStorage::U32(items) => span(items),
            CpuStorage::I16(items) => span(items),
            CpuStorage::I32(items) => span(items),
            CpuStorage::I64(items) => span(items),
            CpuStorage::BF16(items) => span(items),
            CpuStorage::F16(items) => span(items),
            CpuStorage::F32(items) => span(items),
            CpuStorage::F64(items) => span(items),
            other => return Err(Problem::DType(other.dtype())),
        };
        let offset = self.tensor.layout().start_offset() * self.tensor.dtype().size_in_bytes();
        if offset.checked_add(size).is_none_or(|end| end > len) {
            return Err(Problem::Layout);
        }
        Ok((start.wrapping_add(offset), size))
    }
}

fn span<T>(items: &[T]) -> (*const u8, usize) {
    (items.as_ptr().cast(), size_of_val(items))
}

/// A tensor that was received, in memory of its own. As a variable it is where a graph begins.
pub(crate) fn receive(desc: &TensorDesc, buffer: &[u8], is_variable: bool) -> Result<Tensor> {
    if desc.conj || desc.neg {
        return Err(Problem::Flags);
    }
    let dims = desc.shape.iter().map(|&dim| usize::try_from(dim));
    let dims: Vec<usize> = dims.collect::<Result<_, _>>().map_err(|_| Problem::Layout)?;
    let size = usize::try_from(desc.dtype.size()).map_err(|_| Problem::Layout)?;
    let offset = usize::try_from(desc.offset).map_err(|_| Problem::Layout)?;
    let count = dims.iter().try_fold(1usize, |count, &dim| count.checked_mul(dim)).ok_or(Problem::Layout)?;
    let len = count.checked_mul(size).ok_or(Problem::Layout)?;
    let bytes = buffer.get(offset..).ok_or(Problem::Layout)?;
    let gathered;
    let bytes = match &desc.strides {
        Some(strides) if count > 0 => {
            gathered = gather(bytes, &dims, strides, size, len)?;
            &gathered
        }
        _ => bytes.get(..len).ok_or(Problem::Layout)?,
    };
    let storage = Storage::Cpu(storage_of(desc.dtype, bytes)?);
    Ok(Tensor::from_storage(storage, dims, BackpropOp::none(), is_variable))
}

/// The elements of a strided tensor in row-major order.
fn gather(bytes: &[u8], dims: &[usize], strides: &[u64], size: usize, len: usize) -> Result<Vec<u8>> {
    let steps = strides.iter().map(|&stride| usize::try_from(stride).ok()?.checked_mul(size));
    let steps: Vec<usize> = steps.collect::<Option<_>>().ok_or(Problem::Layout)?;
    if steps.len() != dims.len() {
        return Err(Problem::Layout);
    }
    let mut out = Vec::with_capacity(len);
    let mut place = vec![0; dims.len()];
    let mut at = 0usize;
    loop {
        out.extend_from_slice(at.checked_add(size).and_then(|end| bytes.get(at..end)).ok_or(Problem::Layout)?);
        // To the next element, as a counter with one digit per dimension.
        let Some(dim) = (0..dims.len()).rev().find(|&dim| place[dim] + 1 < dims[dim]) else { return Ok(out) };
        place[dim] += 1;
        at = at.checked_add(steps[dim]).ok_or(Problem::Layout)?;
        for later in dim + 1..dims.len() {
            at -= place[later] * steps[later];
            place[later] = 0;
        }
    }
}

fn storage_of(dtype: DType, bytes: &[u8]) -> Result<CpuStorage> {
    // SAFETY, for each: these are numbers, for which all bits are valid.
    Ok(match dtype {
        DType::UInt8 | DType::Bool => CpuStorage::U8(bytes.to_vec()),
        DType::UInt32 => CpuStorage::U32(unsafe { items(bytes) }),
        DType::Int16 => CpuStorage::I16(unsafe { items(bytes) }),
        DType::Int32 => CpuStorage::I32(unsafe { items(bytes) }),
        DType::Int64 => CpuStorage::I64(unsafe { items(bytes) }),
        DType::BFloat16 => CpuStorage::BF16(unsafe { items(bytes) }),
        DType::Float16 => CpuStorage::F16(unsafe { items(bytes) }),
        DType::Float32 => CpuStorage::F32(unsafe { items(bytes) }),
        DType::Float64 => CpuStorage::F64(unsafe { items(bytes) }),
        other => return Err(Problem::Unknown(other)),
    })
}

/// Bytes as the numbers that they are; what is left over is left out.
///
/// # Safety
///
/// All bits must be valid for a `T`.
unsafe fn items<T: Copy>(bytes: &[u8]) -> Vec<T> {
    let count = bytes.len() / size_of::<T>();
    let mut items = Vec::<T>::with_capacity(count);
    // SAFETY: the vector has room for `count` items, the slice has their bytes, and the two do not overlap.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), items.as_mut_ptr().cast(), count * size_of::<T>()) };
    // SAFETY: they have just been written, and any bits are valid.
    unsafe { items.set_len(count) };
    items
}

fn dtype_of(dtype: candle_core::DType) -> Result<DType> {
    Ok(match dtype {
        candle_core::DType::U8 => DType::UInt8,
        candle_core::DType::U32 => DType::UInt32,
        candle_core::DType::I16 => DType::Int16,
        candle_core::DType::I32 => DType::Int32,
        candle_core::DType::I64 => DType::Int64,
        candle_core::DType::BF16 => DType::BFloat16,
        candle_core::DType::F16 => DType::Float16,
        candle_core::DType::F32 => DType::Float32,
        candle_core::DType::F64 => DType::Float64,
        other => return Err(Problem::DType(other)),
    })
}

#[cfg(test)]
mod tests {
    use candle_core::Var;

    use super::*;

    fn round_trip(tensor: &Tensor) -> Tensor {
        let (desc, region) = lend(tensor).unwrap();
        let mut bytes = vec![0; region.len()];
        region.copy_to(&mut bytes);
        receive(&desc, &bytes, false).unwrap()
    }

    #[test]
    fn tensors_of_every_kind_come_back_as_they_were() {
        use candle_core::DType::{BF16, F16, F32, F64, I16, I32, I64, U8, U32};
        for dtype in [U8, U32, I16, I32, I64, BF16, F16, F32, F64] {
            for shape in [vec![], vec![0, 3], vec![2, 3], vec![3000]] {
                let count: usize = shape.iter().product();
                let tensor = Tensor::arange(0f64, count as f64, &Device::Cpu).unwrap();
                let tensor = tensor.to_dtype(dtype).unwrap().reshape(shape.clone()).unwrap();

                let back = round_trip(&tensor);

                assert_eq!((back.dtype(), back.dims()), (dtype, shape.as_slice()));
                assert_eq!(format!("{back}"), format!("{tensor}"));
            }
        }
    }

    #[test]
    fn views_are_sent_as_they_look() {
        let tensor = Tensor::arange(0f32, 6000f32, &Device::Cpu).unwrap().reshape((60, 100)).unwrap();
        let views =
            [tensor.t().unwrap(), tensor.narrow(0, 7, 50).unwrap(), tensor.narrow(1, 20, 30).unwrap()];

        for view in views {
            assert_eq!(round_trip(&view).to_vec2::<f32>().unwrap(), view.to_vec2::<f32>().unwrap());
        }
    }

    #[test]
    fn a_large_tensor_is_named_where_it_lies_and_a_small_one_is_copied() {
        let place = |tensor: &Tensor| {
            let (storage, _) = tensor.storage_and_layout();
            let Storage::Cpu(storage) = &*storage else { panic!("not in main memory") };
            storage.as_slice::<f32>().unwrap().as_ptr().cast::<u8>()
        };
        for (count, lent) in [(4096, true), (16, false)] {
            let tensor = Tensor::zeros(count, candle_core::DType::F32, &Device::Cpu).unwrap();

            let (_, region) = lend(&tensor).unwrap();

            assert_eq!(region.as_ptr() == place(&tensor), lent);
        }
    }

    #[test]
    fn what_is_lent_is_not_written_to_before_it_is_given_back() {
        let before = Var::zeros(4096, candle_core::DType::F32, &Device::Cpu).unwrap();
        let (_, region) = lend(&before).unwrap();
        let writer = std::thread::spawn({
            let before = before.clone();
            move || before.set(&before.ones_like().unwrap()).unwrap()
        });

        let mut bytes = vec![1; region.len()];
        region.copy_to(&mut bytes);
        assert!(bytes.iter().all(|&byte| byte == 0));
        // On whatever thread.
        std::thread::spawn(move || drop(region)).join().unwrap();
        writer.join().unwrap();

        assert_eq!(before.sum_all().unwrap().to_scalar::<f32>().unwrap(), 4096.0);
    }

    #[test]
    fn strided_tensors_of_other_libraries_are_put_in_order() {
        let bytes: Vec<u8> = (0..6i64).flat_map(i64::to_le_bytes).collect();
        let transposed = TensorDesc {
            strides: Some(vec![1, 3]),
            ..TensorDesc::contiguous(DType::Int64, vec![3, 2], 0)
        };
        let spread = TensorDesc {
            strides: Some(vec![0, 2]),
            offset: 8,
            ..TensorDesc::contiguous(DType::Int64, vec![2, 2], 0)
        };

        let rows = |desc| receive(&desc, &bytes, false).unwrap().to_vec2::<i64>().unwrap();

        assert_eq!(rows(transposed), [[0, 3], [1, 4], [2, 5]]);
        assert_eq!(rows(spread), [[1, 3], [1, 3]]);
    }

    #[test]
    fn what_does_not_fit_is_an_error() {
        let desc = TensorDesc::contiguous(DType::Float32, vec![4], 0);
        let outside = TensorDesc { strides: Some(vec![7]), ..desc.clone() };
        let complex = TensorDesc::contiguous(DType::Complex64, vec![1], 0);

        for (desc, len) in [(desc, 15), (outside, 16), (complex, 8)] {
            assert!(receive(&desc, &vec![0; len], false).is_err(), "{desc:?}");
        }
    }
}
