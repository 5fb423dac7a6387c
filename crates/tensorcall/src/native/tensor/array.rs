//! Tensors as arrays of `ndarray`, and the other way round, without copying.

use ndarray::{ArrayBase, ArrayViewD, Data, Dimension, IxDyn, OwnedRepr, ShapeBuilder};

use super::element::Elements;
use super::{Element, Tensor, item_size};
use crate::error::{Error, Result};
use crate::native::bytes::Bytes;

impl Tensor {
    /// A view of this tensor as an array.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) if the elements are of another type.
    pub fn as_array<T: Element>(&self) -> Result<ArrayViewD<'_, T>> {
        self.check_type::<T>()?;
        let shape = IxDyn(&self.shape).strides(IxDyn(&self.strides));
        ArrayViewD::from_shape(shape, self.cast(&self.bytes)?)
            .map_err(|error| Error::usage(format!("a tensor as an array: {error}")))
    }

    /// A copy of an array or of a view.
    ///
    /// # Errors
    ///
    /// As [`Tensor::zeros`].
    pub fn copy_array<T, S, D>(array: &ArrayBase<S, D>) -> Result<Self>
    where
        T: Element,
        S: Data<Elem = T>,
        D: Dimension,
    {
        let mut tensor = Self::zeros(T::DTYPE, array.shape())?;
        for (target, element) in tensor.as_mut_slice::<T>()?.iter_mut().zip(array.iter()) {
            *target = *element;
        }
        Ok(tensor)
    }
}

/// Takes the memory of an array; copies it only if the array runs backwards or has gaps.
impl<T: Element, D: Dimension> TryFrom<ArrayBase<OwnedRepr<T>, D>> for Tensor {
    type Error = Error;

    fn try_from(array: ArrayBase<OwnedRepr<T>, D>) -> Result<Self> {
        let strides = array.strides().iter().map(|&stride| usize::try_from(stride).ok());
        let strides: Option<Vec<usize>> = strides.collect();
        let dense = array.as_slice_memory_order().is_some();
        let Some(strides) = strides.filter(|_| dense) else { return Self::copy_array(&array) };
        let shape = array.shape().to_vec();
        let size = item_size(T::DTYPE);
        let len = array.len() * size;
        let (elements, first) = array.into_raw_vec_and_offset();
        let start = first.unwrap_or(0) * size;
        let bytes = Bytes::from_owner(Elements(elements)).slice(start..start + len);
        Ok(Self { dtype: T::DTYPE, shape, strides, bytes, graph: None })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{Array2, arr2, s};

    #[test]
    fn arrays_become_tensors_where_they_are() {
        let array = Array2::from_shape_fn((2, 3), |(row, column)| row * 3 + column)
            .mapv(|number| u16::try_from(number).unwrap());
        let address = array.as_ptr().addr();

        let tensor = Tensor::try_from(array.reversed_axes()).unwrap();

        assert_eq!(tensor.bytes().as_ptr().addr(), address);
        assert_eq!(tensor.shape(), [3, 2]);
        assert_eq!(tensor.to_vec::<u16>().unwrap(), [0, 3, 1, 4, 2, 5]);
    }

    #[test]
    fn arrays_with_gaps_or_backwards_are_copied() {
        let array = arr2(&[[1, 2, 3, 4], [5, 6, 7, 8]]);

        let gaps = Tensor::try_from(array.slice(s![.., ..;2]).to_owned()).unwrap();
        let backwards = Tensor::copy_array(&array.slice(s![.., ..;-1])).unwrap();

        assert_eq!(gaps.to_vec::<i32>().unwrap(), [1, 3, 5, 7]);
        assert_eq!(backwards.to_vec::<i32>().unwrap(), [4, 3, 2, 1, 8, 7, 6, 5]);
    }

    #[test]
    fn tensors_are_seen_as_arrays_in_any_layout() {
        let tensor =
            Tensor::from_vec((0..6).collect::<Vec<i64>>(), &[2, 3]).unwrap().transpose(0, 1).unwrap();

        let array = tensor.as_array::<i64>().unwrap();

        assert_eq!(array.as_ptr().cast::<u8>(), tensor.bytes().as_ptr());
        assert_eq!(array[[2, 1]], 5);
        assert!(tensor.as_array::<f32>().is_err());
    }
}
