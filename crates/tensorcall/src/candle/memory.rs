//! Tensors of candle as tensors of messages, and back.
//!
//! A contiguous tensor in main memory is **lent**: the message names its memory, and until it is sent the
//! storage is locked for reading, so that nobody writes to it or frees it meanwhile. A received tensor is
//! **copied** once, since storages of candle are vectors, which own their memory.
#![expect(unsafe_code, reason = "a lock outlives the borrow that it was taken by; the use carries its proof")]

use candle_core::op::BackpropOp;
use candle_core::{CpuStorage, Device, Storage, StorageRef};

use super::error::{Problem, Result};
use crate::native::{Bytes, DType, Tensor};

/// Below this size a copy costs less than to lock a storage and to name its memory.
const LENT_FROM: usize = 4096;

/// The same tensor, in the same memory if that is large. Only the values: of gradients it knows nothing.
pub(super) fn lend(tensor: &candle_core::Tensor) -> Result<Tensor> {
    let tensor = tensor.to_device(&Device::Cpu)?.contiguous()?.detach();
    let (dtype, shape) = (dtype_of(tensor.dtype())?, tensor.dims().to_vec());
    let lent = Lent::new(tensor)?;
    let bytes = if lent.len < LENT_FROM { Bytes::from(lent.as_ref().to_vec()) } else { Bytes::lent(lent) };
    Ok(Tensor::from_bytes(dtype, &shape, bytes)?)
}

/// The bytes of a contiguous tensor in main memory. As long as this lives nobody writes to them.
struct Lent {
    /// Before `tensor`, which has what it refers to.
    guard: StorageRef<'static>,
    tensor: candle_core::Tensor,
    len: usize,
}

impl Lent {
    fn new(tensor: candle_core::Tensor) -> Result<Self> {
        let (guard, _) = tensor.storage_and_layout();
        // SAFETY: the guard refers to a lock that `tensor` shares the ownership of. It is dropped before
        // `tensor`, nobody gets it out of here, and with parking_lot's `send_guard` any thread may drop it.
        let guard = unsafe { std::mem::transmute::<StorageRef<'_>, StorageRef<'static>>(guard) };
        let len = tensor.elem_count() * tensor.dtype().size_in_bytes();
        let lent = Self { guard, tensor, len };
        if lent.bytes().is_some() { Ok(lent) } else { Err(Problem::Layout) }
    }

    fn bytes(&self) -> Option<&[u8]> {
        let Storage::Cpu(storage) = &*self.guard else { return None };
        let all = match storage {
            CpuStorage::U8(items) => items,
            CpuStorage::U32(items) => bytemuck::cast_slice(items),
            CpuStorage::I16(items) => bytemuck::cast_slice(items),
            CpuStorage::I32(items) => bytemuck::cast_slice(items),
            CpuStorage::I64(items) => bytemuck::cast_slice(items),
            CpuStorage::BF16(items) => bytemuck::cast_slice(items),
            CpuStorage::F16(items) => bytemuck::cast_slice(items),
            CpuStorage::F32(items) => bytemuck::cast_slice(items),
            CpuStorage::F64(items) => bytemuck::cast_slice(items),
            _ => return None,
        };
        let start = self.tensor.layout().start_offset().checked_mul(self.tensor.dtype().size_in_bytes())?;
        all.get(start..start.checked_add(self.len)?)
    }
}

impl AsRef<[u8]> for Lent {
    fn as_ref(&self) -> &[u8] {
        self.bytes().unwrap_or_default()
    }
}

/// A copy of a tensor in memory of candle's own. As a variable it is where a graph begins.
pub(super) fn copy(tensor: &Tensor, is_variable: bool) -> Result<candle_core::Tensor> {
    let whole = tensor.contiguous()?;
    let bytes = whole.bytes();
    let storage = match whole.dtype() {
        DType::UInt8 | DType::Bool => CpuStorage::U8(bytes.to_vec()),
        DType::UInt32 => CpuStorage::U32(numbers(bytes)),
        DType::Int16 => CpuStorage::I16(numbers(bytes)),
        DType::Int32 => CpuStorage::I32(numbers(bytes)),
        DType::Int64 => CpuStorage::I64(numbers(bytes)),
        DType::BFloat16 => CpuStorage::BF16(numbers(bytes)),
        DType::Float16 => CpuStorage::F16(numbers(bytes)),
        DType::Float32 => CpuStorage::F32(numbers(bytes)),
        DType::Float64 => CpuStorage::F64(numbers(bytes)),
        other => return Err(Problem::Unknown(other)),
    };
    let storage = Storage::Cpu(storage);
    Ok(candle_core::Tensor::from_storage(storage, whole.shape(), BackpropOp::none(), is_variable))
}

/// Bytes as the numbers that they are; what is left over is left out.
fn numbers<T: bytemuck::Pod>(bytes: &[u8]) -> Vec<T> {
    let count = bytes.len() / size_of::<T>();
    let mut numbers = vec![T::zeroed(); count];
    bytemuck::cast_slice_mut(&mut numbers).copy_from_slice(&bytes[..count * size_of::<T>()]);
    numbers
}

/// A variable like a tensor that nobody has computed with.
pub(super) fn stand_in(dtype: DType, shape: &[u64]) -> Result<candle_core::Tensor> {
    let shape = shape.iter().map(|&dim| usize::try_from(dim)).collect::<Result<Vec<_>, _>>();
    copy(&Tensor::zeros(dtype, &shape.map_err(|_| Problem::Layout)?)?, true)
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

    fn counting(count: u32, dtype: candle_core::DType) -> candle_core::Tensor {
        candle_core::Tensor::arange(0, count, &Device::Cpu).unwrap().to_dtype(dtype).unwrap()
    }

    #[test]
    fn tensors_of_every_kind_come_back_as_they_were() {
        use candle_core::DType::{BF16, F16, F32, F64, I16, I32, I64, U8, U32};
        for dtype in [U8, U32, I16, I32, I64, BF16, F16, F32, F64] {
            for shape in [vec![], vec![0, 3], vec![2, 3], vec![5000]] {
                let count = shape.iter().product::<usize>();
                let tensor = counting(u32::try_from(count).unwrap(), dtype).reshape(shape.clone()).unwrap();

                let back = copy(&lend(&tensor).unwrap(), false).unwrap();

                assert_eq!((back.dtype(), back.dims()), (dtype, shape.as_slice()));
                let same = back.eq(&tensor).unwrap().flatten_all().unwrap().to_vec1::<u8>().unwrap();
                assert_eq!(same, vec![1; count]);
            }
        }
    }

    #[test]
    fn views_are_sent_as_they_look() {
        let tensor = counting(6000, candle_core::DType::F32).reshape((60, 100)).unwrap();
        let views =
            [tensor.t().unwrap(), tensor.narrow(0, 7, 50).unwrap(), tensor.narrow(1, 20, 30).unwrap()];

        for view in views {
            let back = copy(&lend(&view).unwrap(), false).unwrap();
            assert_eq!(back.to_vec2::<f32>().unwrap(), view.to_vec2::<f32>().unwrap());
        }
    }

    #[test]
    fn a_large_tensor_is_named_where_it_lies_and_a_small_one_is_copied() {
        for (count, is_lent) in [(4096, true), (16, false)] {
            let tensor = counting(count, candle_core::DType::F32);

            let lent = lend(&tensor).unwrap();

            let (storage, _) = tensor.storage_and_layout();
            let Storage::Cpu(storage) = &*storage else { panic!("not in main memory") };
            let place = storage.as_slice::<f32>().unwrap().as_ptr().cast::<u8>();
            assert_eq!(lent.bytes().as_ptr() == place, is_lent);
        }
    }

    #[test]
    fn what_is_lent_is_not_written_to_before_it_is_given_back() {
        let variable = Var::zeros(4096, candle_core::DType::F32, &Device::Cpu).unwrap();
        let lent = lend(&variable).unwrap();
        let writer = std::thread::spawn({
            let variable = variable.clone();
            move || variable.set(&variable.ones_like().unwrap()).unwrap()
        });

        assert!(lent.bytes().iter().all(|&byte| byte == 0));
        // On whatever thread.
        std::thread::spawn(move || drop(lent)).join().unwrap();
        writer.join().unwrap();

        assert_eq!(variable.to_vec1::<f32>().unwrap(), vec![1.0; 4096]);
    }

    #[test]
    fn tensors_in_any_layout_are_put_in_order() {
        let tensor = Tensor::from_vec((0..6).collect::<Vec<i64>>(), &[2, 3]).unwrap();

        let turned = copy(&tensor.transpose(0, 1).unwrap(), false).unwrap();

        assert_eq!(turned.to_vec2::<i64>().unwrap(), [[0, 3], [1, 4], [2, 5]]);
    }

    #[test]
    fn what_one_of_both_does_not_have_is_refused() {
        let complex = Tensor::zeros(DType::Complex64, &[2]).unwrap();
        assert!(matches!(copy(&complex, false), Err(Problem::Unknown(DType::Complex64))));
        let narrow = counting(4, candle_core::DType::F32).to_dtype(candle_core::DType::F8E4M3).unwrap();
        assert!(matches!(lend(&narrow), Err(Problem::DType(candle_core::DType::F8E4M3))));
    }
}
