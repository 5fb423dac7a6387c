//! [`Tensor`]: typed elements in shared memory, in any strided layout.
//!
//! - `mod.rs`: the type, its constructors and what it tells of itself
//! - `element.rs`: which Rust types elements are read and written as
//! - `views.rs`: other shapes over the same memory
//! - `access.rs`: reading and writing elements
//! - `travel.rs`: as messages describe it
//! - `array.rs`: as arrays of `ndarray` (feature `ndarray`)

mod access;
#[cfg(feature = "ndarray")]
mod array;
mod element;
mod travel;
mod views;

use std::fmt;

pub use tensorcall_proto::wire::DType;

pub use self::element::Element;
use super::bytes::Bytes;
use crate::autograd::Graph;
use crate::error::{Error, Result};

/// An array of numbers: a type of elements, a shape, and memory that clones and views share.
///
/// Memory made or received by this crate is 64-byte aligned. A tensor is sent from where it lies, and only
/// the elements that it shows.
///
/// ```
/// use tensorcall::Tensor;
///
/// let matrix = Tensor::from_vec(vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0], &[2, 3])?;
/// let column = matrix.select(1, 2)?;
/// assert_eq!(column.shape(), [2]);
/// assert_eq!(column.to_vec::<f32>()?, [3.0, 6.0]);
/// # Ok::<(), tensorcall::Error>(())
/// ```
#[derive(Clone)]
pub struct Tensor {
    dtype: DType,
    shape: Vec<usize>,
    /// In elements.
    strides: Vec<usize>,
    /// From the first element that is shown to the last; all of them lie in it.
    bytes: Bytes,
    /// Where it is in the graphs of this worker, as long as it is as it was made or received.
    graph: Option<Graph>,
}

impl Tensor {
    /// A tensor of zeros.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) if so many elements cannot be counted,
    /// [`ErrorKind::Io`](crate::ErrorKind::Io) if there is no memory for them.
    pub fn zeros(dtype: DType, shape: &[usize]) -> Result<Self> {
        let bytes = Bytes::zeroed(byte_len(dtype, shape)?)?;
        Ok(Self { dtype, shape: shape.to_vec(), strides: contiguous(shape), bytes, graph: None })
    }

    /// A tensor with these elements, row after row, without copying them.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) if there are not as many as `shape` says.
    pub fn from_vec<T: Element>(elements: Vec<T>, shape: &[usize]) -> Result<Self> {
        check_count(elements.len(), shape)?;
        let bytes = Bytes::from_owner(element::Elements(elements));
        Ok(Self { dtype: T::DTYPE, shape: shape.to_vec(), strides: contiguous(shape), bytes, graph: None })
    }

    /// A tensor with a copy of these elements, row after row.
    ///
    /// # Errors
    ///
    /// As [`Tensor::from_vec`] and [`Tensor::zeros`].
    pub fn from_slice<T: Element>(elements: &[T], shape: &[usize]) -> Result<Self> {
        check_count(elements.len(), shape)?;
        let mut tensor = Self::zeros(T::DTYPE, shape)?;
        tensor.as_mut_slice::<T>()?.copy_from_slice(elements);
        Ok(tensor)
    }

    /// A tensor without dimensions: one element.
    pub fn scalar<T: Element>(element: T) -> Self {
        let bytes = Bytes::from_owner(element::Elements(vec![element]));
        Self { dtype: T::DTYPE, shape: Vec::new(), strides: Vec::new(), bytes, graph: None }
    }

    /// The elements that `bytes` are, row after row. They are copied only if they are not aligned as their
    /// type needs it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) if there are not as many bytes as `shape` says.
    pub fn from_bytes(dtype: DType, shape: &[usize], bytes: Bytes) -> Result<Self> {
        let expected = byte_len(dtype, shape)?;
        if bytes.len() != expected {
            let found = bytes.len();
            return Err(Error::usage(format!(
                "a tensor of shape {shape:?} and dtype {dtype} has {expected} bytes, not {found}"
            )));
        }
        let aligned = bytes.as_ptr().addr().is_multiple_of(item_size(dtype));
        let bytes = if aligned { bytes } else { bytes.copied()? };
        Ok(Self { dtype, shape: shape.to_vec(), strides: contiguous(shape), bytes, graph: None })
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// The size of each dimension.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// How many elements to step over for the next one in each dimension.
    pub fn strides(&self) -> &[usize] {
        &self.strides
    }

    /// The number of elements.
    pub fn len(&self) -> usize {
        self.shape.iter().product()
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Whether the elements lie row after row without gaps.
    pub fn is_contiguous(&self) -> bool {
        self.is_empty() || {
            let steps = self.shape.iter().zip(self.strides.iter().zip(contiguous(&self.shape)));
            steps.into_iter().all(|(&size, (&stride, expected))| size == 1 || stride == expected)
        }
    }

    /// The memory from the first element to the last. In a view that is not contiguous it has other bytes
    /// in between.
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }

    /// Where this tensor is in the graphs of this worker.
    pub(crate) fn graph(&self) -> Option<&Graph> {
        self.graph.as_ref()
    }

    /// Gives lent memory back, and has a copy of it from now on.
    #[cfg(feature = "candle")]
    pub(crate) fn settle(&mut self) -> Result<()> {
        self.bytes.settle()
    }

    /// The same tensor, which is there in the graphs of this worker.
    pub(crate) fn with_graph(self, graph: Graph) -> Self {
        Self { graph: Some(graph), ..self }
    }
}

impl fmt::Debug for Tensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tensor({}, {:?})", self.dtype, self.shape)
    }
}

/// Two tensors are equal if dtype, shape and the bytes of all elements are.
impl PartialEq for Tensor {
    fn eq(&self, other: &Self) -> bool {
        let bytes = |tensor: &Self| tensor.contiguous().map(|tensor| tensor.bytes);
        self.dtype == other.dtype && self.shape == other.shape && {
            matches!((bytes(self), bytes(other)), (Ok(one), Ok(another)) if one == another)
        }
    }
}

/// Bytes of one element. Those of all dtypes fit.
fn item_size(dtype: DType) -> usize {
    usize::try_from(dtype.size()).unwrap_or(usize::MAX)
}

/// Bytes of all elements.
fn byte_len(dtype: DType, shape: &[usize]) -> Result<usize> {
    // Sizes of zero count as one, so that strides fit too.
    let count = shape.iter().try_fold(1usize, |count, &size| count.checked_mul(size.max(1)));
    let len = count.and_then(|count| count.checked_mul(item_size(dtype)));
    match len.filter(|&len| isize::try_from(len).is_ok()) {
        Some(_) if shape.contains(&0) => Ok(0),
        Some(len) => Ok(len),
        None => Err(Error::usage(format!("a tensor of shape {shape:?} is too large to count its bytes"))),
    }
}

fn check_count(count: usize, shape: &[usize]) -> Result<()> {
    let expected = shape.iter().try_fold(1usize, |product, &size| product.checked_mul(size));
    if expected == Some(count) {
        return Ok(());
    }
    Err(Error::usage(format!("{count} elements do not make a tensor of shape {shape:?}")))
}

/// The strides of a tensor whose elements lie row after row.
fn contiguous(shape: &[usize]) -> Vec<usize> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim].max(1);
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vector_becomes_a_tensor_where_it_is() {
        let elements = vec![1i64, 2, 3];
        let address = elements.as_ptr().addr();

        let tensor = Tensor::from_vec(elements, &[3]).unwrap();

        assert_eq!(tensor.bytes().as_ptr().addr(), address);
        assert_eq!(tensor.dtype(), DType::Int64);
    }

    #[test]
    fn memory_of_ours_is_aligned_for_every_use() {
        let tensor = Tensor::from_slice(&[1u8, 2, 3], &[3]).unwrap();

        assert!(tensor.bytes().as_ptr().addr().is_multiple_of(crate::buffer::ALIGNMENT));
    }

    #[test]
    fn shapes_that_do_not_fit_are_refused() {
        assert!(Tensor::from_vec(vec![1.0f32; 5], &[2, 3]).is_err());
        assert!(Tensor::from_bytes(DType::Int16, &[2], Bytes::from(vec![0; 3])).is_err());
        assert!(Tensor::zeros(DType::Int8, &[usize::MAX, 2]).is_err());
        assert!(Tensor::zeros(DType::Int8, &[usize::MAX, 2, 0]).is_err());
        assert!(Tensor::zeros(DType::Float64, &[3, 0]).unwrap().is_empty());
    }

    #[test]
    fn bytes_out_of_line_are_copied_into_line() {
        let odd = Bytes::zeroed(9).unwrap().slice(1..9);

        let tensor = Tensor::from_bytes(DType::Float32, &[2], odd).unwrap();

        assert_eq!(tensor.as_slice::<f32>().unwrap(), [0.0, 0.0]);
    }

    #[test]
    fn tensors_are_equal_by_what_they_show() {
        let rows = Tensor::from_vec(vec![1u8, 2, 3, 4], &[2, 2]).unwrap();
        let columns = Tensor::from_vec(vec![1u8, 3, 2, 4], &[2, 2]).unwrap();

        assert_ne!(rows, columns);
        assert_eq!(rows, columns.transpose(0, 1).unwrap());
        assert_ne!(rows, rows.reshape(&[4]).unwrap());
    }
}
