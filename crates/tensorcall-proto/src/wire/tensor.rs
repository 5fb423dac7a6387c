//! Tensors without their bytes: where each lies in the buffers of a message, and of what shape.
//!
//! A message has *buffers*, runs of bytes, and *tensors*, each a strided view into one buffer.
//! Two tensors that share memory at the sender name the same buffer and share memory again at
//! the receiver. Nothing here trusts its numbers: [`TensorDesc::check`] proves with checked
//! arithmetic that every element of a tensor lies inside its buffer (NET-2).

use std::fmt;

use serde::{Deserialize, Deserializer, Serialize, de};

pub use super::dtype::DType;
use super::error::WireError;

/// The most dimensions a tensor may have.
pub const MAX_DIMS: usize = 1024;

/// Sizes, strides and element counts must fit PyTorch's signed 64-bit numbers.
const MAX_SIZE: u64 = i64::MAX.unsigned_abs();

/// What kind of memory a tensor lives in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DeviceKind {
    /// Main memory.
    Cpu,
    /// A CUDA device.
    Cuda,
    /// Any other kind, by a number that sender and receiver agree on.
    Other(u8),
}

/// The device on which the receiver is to place a tensor. Its bytes travel the same way whatever
/// the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Device {
    /// What kind of device.
    pub kind: DeviceKind,
    /// Which of that kind, in the receiver's numbering; 0 for the CPU.
    pub index: u16,
}

impl Device {
    /// Main memory.
    pub const CPU: Self = Self { kind: DeviceKind::Cpu, index: 0 };
}

/// Where the bytes of a buffer are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Place {
    /// In the message's body, after the payload and the buffers before this one.
    Body,
    /// In a block of memory that both workers map. Reserved: refused unless
    /// [`Limits::blocks`](super::Limits::blocks) is set.
    Block {
        /// Number of the shared segment.
        segment: u64,
        /// First byte within it.
        offset: u64,
    },
}

/// A run of bytes that tensors lie in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct BufferDesc {
    /// Length in bytes.
    pub len: u64,
    /// Where the bytes are.
    pub place: Place,
}

impl BufferDesc {
    /// A buffer of `len` bytes in the message's body.
    pub const fn body(len: u64) -> Self {
        Self { len, place: Place::Body }
    }

    /// Bytes that this buffer takes up in the message's body.
    pub const fn body_len(&self) -> u64 {
        match self.place {
            Place::Body => self.len,
            Place::Block { .. } => 0,
        }
    }
}

/// A tensor without its bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TensorDesc {
    /// Type of the elements.
    pub dtype: DType,
    /// Size of each dimension in elements.
    #[serde(deserialize_with = "dims")]
    pub shape: Vec<u64>,
    /// Step of each dimension in elements; `None` if the tensor is contiguous in row-major order.
    #[serde(deserialize_with = "optional_dims")]
    pub strides: Option<Vec<u64>>,
    /// Index of the buffer that the tensor lies in.
    pub buffer: u32,
    /// First byte of the tensor within the buffer; a multiple of the item size.
    pub offset: u64,
    /// Where the receiver is to place the tensor.
    pub device: Device,
    /// Whether the tensor asks for gradients.
    pub requires_grad: bool,
    /// Whether the elements are to be read as their complex conjugates.
    pub conj: bool,
    /// Whether the elements are to be read negated.
    pub neg: bool,
}

impl TensorDesc {
    /// A contiguous tensor on the CPU at the start of `buffer`, with all flags clear.
    pub const fn contiguous(dtype: DType, shape: Vec<u64>, buffer: u32) -> Self {
        Self {
            dtype,
            shape,
            strides: None,
            buffer,
            offset: 0,
            device: Device::CPU,
            requires_grad: false,
            conj: false,
            neg: false,
        }
    }

    /// The number of elements.
    ///
    /// # Errors
    ///
    /// [`WireError::TensorOverflow`] if the product of all sizes does not fit an `i64`. Sizes of
    /// zero count as one in that product, because PyTorch computes strides from it.
    pub fn elements(&self) -> Result<u64, WireError> {
        self.shape
            .iter()
            .try_fold(1u64, |count, &size| count.checked_mul(size.max(1)))
            .filter(|&count| count <= MAX_SIZE && self.shape.iter().all(|&size| size <= MAX_SIZE))
            .map(|count| if self.shape.contains(&0) { 0 } else { count })
            .ok_or(WireError::TensorOverflow)
    }

    /// Bytes from the tensor's first to one past its last element; 0 if it has none.
    ///
    /// # Errors
    ///
    /// [`WireError::TensorOverflow`] if that does not fit an `i64`, [`WireError::TensorDims`] if
    /// there are too many dimensions or not as many strides.
    pub fn extent(&self) -> Result<u64, WireError> {
        let dims = self.shape.len();
        let strides = self.strides.as_ref().map_or(dims, Vec::len);
        if dims > MAX_DIMS || strides != dims {
            return Err(WireError::TensorDims { dims, strides });
        }
        let elements = self.elements()?;
        let reach = match &self.strides {
            Some(strides) => self.strided_reach(strides)?,
            None => elements,
        };
        let reach = if elements == 0 { 0 } else { reach };
        reach
            .checked_mul(self.dtype.size())
            .filter(|&bytes| bytes <= MAX_SIZE)
            .ok_or(WireError::TensorOverflow)
    }

    /// Elements from the first to one past the farthest, given that there are any.
    fn strided_reach(&self, strides: &[u64]) -> Result<u64, WireError> {
        self.shape
            .iter()
            .zip(strides)
            .try_fold(1u64, |reach, (&size, &stride)| {
                let step = size.saturating_sub(1).checked_mul(stride)?;
                reach.checked_add(step).filter(|_| stride <= MAX_SIZE)
            })
            .ok_or(WireError::TensorOverflow)
    }

    /// Whether every element of this tensor lies inside its buffer.
    ///
    /// # Errors
    ///
    /// The [`WireError`] names what is wrong: dimensions, an overflow, an unknown buffer, an
    /// offset between items, or an end beyond the buffer's.
    pub fn check(&self, buffers: &[BufferDesc]) -> Result<(), WireError> {
        let extent = self.extent()?;
        let buffer = usize::try_from(self.buffer)
            .ok()
            .and_then(|index| buffers.get(index))
            .ok_or(WireError::TensorBuffer { buffer: self.buffer, count: buffers.len() })?;
        let item = self.dtype.size();
        if !self.offset.is_multiple_of(item) {
            return Err(WireError::TensorOffset { offset: self.offset, item });
        }
        let end = self.offset.checked_add(extent).ok_or(WireError::TensorOverflow)?;
        if end <= buffer.len { Ok(()) } else { Err(WireError::TensorExtent { end, len: buffer.len }) }
    }
}

/// Reads at most [`MAX_DIMS`] sizes; an announced count reserves no more than that.
fn dims<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u64>, D::Error> {
    deserializer.deserialize_seq(DimsVisitor)
}

fn optional_dims<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Vec<u64>>, D::Error> {
    let dims = Option::<Dims>::deserialize(deserializer)?;
    Ok(dims.map(|Dims(dims)| dims))
}

struct Dims(Vec<u64>);

impl<'de> Deserialize<'de> for Dims {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        dims(deserializer).map(Self)
    }
}

struct DimsVisitor;

impl<'de> de::Visitor<'de> for DimsVisitor {
    type Value = Vec<u64>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "at most {MAX_DIMS} dimensions")
    }

    fn visit_seq<A: de::SeqAccess<'de>>(self, mut seq: A) -> Result<Vec<u64>, A::Error> {
        let announced = seq.size_hint().unwrap_or(0);
        if announced > MAX_DIMS {
            return Err(de::Error::invalid_length(announced, &self));
        }
        let mut dims = Vec::with_capacity(announced);
        while let Some(size) = seq.next_element()? {
            if dims.len() == MAX_DIMS {
                return Err(de::Error::invalid_length(dims.len() + 1, &self));
            }
            dims.push(size);
        }
        Ok(dims)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tensor(shape: &[u64], strides: Option<&[u64]>) -> TensorDesc {
        TensorDesc {
            strides: strides.map(<[u64]>::to_vec),
            ..TensorDesc::contiguous(DType::Float32, shape.to_vec(), 0)
        }
    }

    #[test]
    fn contiguous_tensor_spans_all_its_items() {
        assert_eq!(tensor(&[2, 3], None).extent(), Ok(24));
        assert_eq!(tensor(&[], None).extent(), Ok(4));
    }

    #[test]
    fn strided_tensor_spans_up_to_its_farthest_item() {
        assert_eq!(tensor(&[2, 3], Some(&[1, 2])).extent(), Ok(24));
        assert_eq!(tensor(&[2, 3], Some(&[10, 1])).extent(), Ok((10 + 2 + 1) * 4));
        assert_eq!(tensor(&[1 << 40], Some(&[0])).extent(), Ok(4));
    }

    #[test]
    fn empty_tensor_spans_nothing_whatever_its_strides() {
        assert_eq!(tensor(&[0, 5], None).extent(), Ok(0));
        assert_eq!(tensor(&[0, 5], Some(&[7, 9])).extent(), Ok(0));
        assert_eq!(tensor(&[0], None).check(&[BufferDesc::body(0)]), Ok(()));
    }

    #[test]
    fn sizes_that_overflow_are_refused() {
        for desc in [
            tensor(&[u64::MAX], None),
            tensor(&[1 << 32, 1 << 32], None),
            tensor(&[1 << 62, 1 << 62, 0], None),
            tensor(&[u64::MAX, 0], None),
            tensor(&[1 << 61], None),
            tensor(&[2], Some(&[u64::MAX])),
            tensor(&[1], Some(&[u64::MAX])),
            tensor(&[3, 3], Some(&[1 << 62, 1 << 62])),
        ] {
            assert_eq!(desc.extent(), Err(WireError::TensorOverflow), "{desc:?}");
        }
    }

    #[test]
    fn each_dimension_has_one_stride_and_there_are_not_too_many() {
        let short = tensor(&[2, 3], Some(&[1]));
        let many = tensor(&[1; MAX_DIMS + 1], None);

        assert_eq!(short.extent(), Err(WireError::TensorDims { dims: 2, strides: 1 }));
        assert_eq!(many.extent(), Err(WireError::TensorDims { dims: 1025, strides: 1025 }));
    }

    #[test]
    fn tensor_must_end_inside_its_buffer() {
        let desc = TensorDesc { offset: 8, ..tensor(&[4], None) };

        assert_eq!(desc.check(&[BufferDesc::body(24)]), Ok(()));
        assert_eq!(desc.check(&[BufferDesc::body(23)]), Err(WireError::TensorExtent { end: 24, len: 23 }));
        assert_eq!(desc.check(&[]), Err(WireError::TensorBuffer { buffer: 0, count: 0 }));
    }

    #[test]
    fn offset_is_a_multiple_of_the_item_size() {
        let desc = TensorDesc { offset: 6, ..tensor(&[1], None) };

        assert_eq!(desc.check(&[BufferDesc::body(64)]), Err(WireError::TensorOffset { offset: 6, item: 4 }));
    }

    #[test]
    fn offset_that_overflows_is_refused() {
        let desc = TensorDesc { offset: u64::MAX - 3, ..tensor(&[4], None) };

        assert_eq!(desc.check(&[BufferDesc::body(u64::MAX)]), Err(WireError::TensorOverflow));
    }

    #[test]
    fn more_dimensions_than_allowed_are_refused_while_reading() {
        let most = postcard::to_allocvec(&tensor(&[1; MAX_DIMS], None)).unwrap();
        let many = postcard::to_allocvec(&tensor(&[1; MAX_DIMS + 1], None)).unwrap();
        let many_strides = postcard::to_allocvec(&tensor(&[1], Some(&[1; MAX_DIMS + 1]))).unwrap();

        assert!(postcard::from_bytes::<TensorDesc>(&most).is_ok());
        assert!(postcard::from_bytes::<TensorDesc>(&many).is_err());
        assert!(postcard::from_bytes::<TensorDesc>(&many_strides).is_err());
    }
}
