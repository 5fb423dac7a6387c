//! Tensors as messages describe them.

use tensorcall_proto::wire::tensor::{Device, TensorDesc};

use super::{Tensor, contiguous, item_size};
use crate::error::{Error, Result};
use crate::native::bytes::Bytes;
use crate::native::value::ConversionError;

impl Tensor {
    /// What to send: the description of this tensor in buffer `index`, and the bytes of that buffer. Only
    /// elements that are shown travel; those of a view with gaps are moved together first.
    pub(crate) fn describe(&self, index: u32) -> Result<(TensorDesc, Bytes)> {
        let dense = self.bytes.len() == self.len() * item_size(self.dtype);
        let tensor = if dense { self.clone() } else { self.contiguous()? };
        let dims = |sizes: &[usize]| sizes.iter().map(|&size| size as u64).collect();
        let mut desc = TensorDesc::contiguous(tensor.dtype, dims(&tensor.shape), index);
        if !tensor.is_contiguous() {
            desc.strides = Some(dims(&tensor.strides));
        }
        Ok((desc, tensor.bytes))
    }

    /// The tensor that `desc`, which was checked, describes in the bytes of its buffer.
    pub(crate) fn received(desc: &TensorDesc, buffer: &Bytes) -> Result<Self, ConversionError> {
        if desc.device != Device::CPU {
            return Err(ConversionError::new(
                "a tensor is meant for a device, which native workers do not use",
            ));
        }
        if desc.conj || desc.neg {
            let text = "a tensor is a lazy conjugate or negative: call resolve_conj() or resolve_neg() on it";
            return Err(ConversionError::new(text));
        }
        let wrong = |_| ConversionError::new("a tensor is too large for this machine");
        let size = |number: u64| usize::try_from(number).map_err(wrong);
        let sizes =
            |numbers: &[u64]| numbers.iter().map(|&number| size(number)).collect::<Result<Vec<_>, _>>();
        let shape = sizes(&desc.shape)?;
        let strides = desc.strides.as_deref().map_or_else(|| Ok(contiguous(&shape)), sizes)?;
        let extent = desc.extent().map_err(|error| ConversionError::new(error.to_string()))?;
        let start = size(desc.offset)?;
        let end = start.checked_add(size(extent)?).filter(|&end| end <= buffer.len());
        let end = end.ok_or_else(|| ConversionError::new("a tensor ends beyond its memory"))?;
        Ok(Self { dtype: desc.dtype, shape, strides, bytes: buffer.slice(start..end), graph: None })
    }
}

impl From<ConversionError> for Error {
    fn from(error: ConversionError) -> Self {
        Self::usage(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::native::tensor::DType;

    fn trip(tensor: &Tensor) -> (Tensor, usize) {
        let (desc, bytes) = tensor.describe(0).unwrap();
        (Tensor::received(&desc, &bytes).unwrap(), bytes.len())
    }

    #[test]
    fn only_the_elements_that_a_view_shows_travel() {
        let whole = Tensor::from_vec((0..100).collect::<Vec<u8>>(), &[10, 10]).unwrap();
        let turned = whole.transpose(0, 1).unwrap();
        let block = whole.narrow(1, 2..4).unwrap();
        let row = whole.select(0, 3).unwrap();

        assert_eq!(trip(&turned), (turned, 100));
        assert_eq!(trip(&block), (block, 20));
        assert_eq!(trip(&row), (row, 10));
        assert_eq!(trip(&Tensor::scalar(1.0f32)).1, 4);
        assert_eq!(trip(&whole.narrow(0, 3..3).unwrap()).1, 0);
    }

    #[test]
    fn memory_of_any_owner_is_sent_from_where_it_lies() {
        struct Mapped(Box<[u64]>);

        impl AsRef<[u8]> for Mapped {
            fn as_ref(&self) -> &[u8] {
                bytemuck::cast_slice(&self.0)
            }
        }
        let owner = Mapped(vec![1; 6].into());
        let place = owner.0.as_ptr().addr();

        let tensor = Tensor::from_bytes(DType::Int64, &[2, 3], Bytes::from_owner(owner)).unwrap();
        let (desc, bytes) = tensor.transpose(0, 1).unwrap().describe(0).unwrap();

        assert_eq!((desc.shape, bytes.as_ptr().addr(), bytes.len()), (vec![3, 2], place, 48));
    }

    #[test]
    fn what_a_native_worker_cannot_hold_is_refused() {
        let (desc, bytes) = Tensor::scalar(1.0f32).describe(0).unwrap();

        for desc in [TensorDesc { conj: true, ..desc.clone() }, TensorDesc { neg: true, ..desc.clone() }] {
            assert!(Tensor::received(&desc, &bytes).unwrap_err().to_string().contains("resolve"));
        }
        assert!(Tensor::received(&TensorDesc { offset: 4, ..desc }, &bytes).is_err());
    }
}
