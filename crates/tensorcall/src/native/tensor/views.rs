//! Other shapes over the same memory.

use std::ops::Range;

use super::{Tensor, contiguous, item_size};
use crate::error::{Error, Result};

impl Tensor {
    /// The same elements in another shape. Copies them if they are not contiguous.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) if the shape has another number of elements.
    pub fn reshape(&self, shape: &[usize]) -> Result<Self> {
        super::check_count(self.len(), shape)?;
        let mut tensor = self.contiguous()?;
        tensor.strides = contiguous(shape);
        tensor.shape = shape.to_vec();
        tensor.graph = None;
        Ok(tensor)
    }

    /// A view with two dimensions exchanged.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) if there is no such dimension.
    pub fn transpose(&self, one: usize, other: usize) -> Result<Self> {
        self.check_dim(one)?;
        self.check_dim(other)?;
        let mut view = self.clone();
        view.shape.swap(one, other);
        view.strides.swap(one, other);
        view.graph = None;
        Ok(view)
    }

    /// A view of the part of a dimension that is in `range`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) if there is no such dimension or it is shorter.
    pub fn narrow(&self, dim: usize, range: Range<usize>) -> Result<Self> {
        self.check_dim(dim)?;
        let size = self.shape[dim];
        if range.start > range.end || range.end > size {
            return Err(Error::usage(format!("{range:?} is not within 0..{size}, which dimension {dim} is")));
        }
        let mut shape = self.shape.clone();
        shape[dim] = range.len();
        Ok(self.view(shape, self.strides.clone(), range.start * self.strides[dim]))
    }

    /// A view of the elements at `index` of a dimension, without that dimension.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) if there is no such dimension or it is shorter.
    pub fn select(&self, dim: usize, index: usize) -> Result<Self> {
        let end = index.checked_add(1).ok_or_else(|| Error::usage("an index is out of bounds"))?;
        let mut view = self.narrow(dim, index..end)?;
        view.shape.remove(dim);
        view.strides.remove(dim);
        Ok(view)
    }

    /// The view that begins `start` elements after this one. All its elements are ones of this.
    fn view(&self, shape: Vec<usize>, strides: Vec<usize>, start: usize) -> Self {
        let size = item_size(self.dtype);
        let dims = shape.iter().zip(&strides);
        let last: usize = dims.map(|(&size, &stride)| size.saturating_sub(1) * stride).sum();
        let range = if shape.contains(&0) { 0..0 } else { start * size..(start + last + 1) * size };
        Self { dtype: self.dtype, shape, strides, bytes: self.bytes.slice(range), graph: None }
    }

    fn check_dim(&self, dim: usize) -> Result<()> {
        if dim < self.shape.len() {
            return Ok(());
        }
        Err(Error::usage(format!("a tensor of shape {:?} has no dimension {dim}", self.shape)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted() -> Tensor {
        Tensor::from_vec((0..12).collect::<Vec<u16>>(), &[3, 4]).unwrap()
    }

    #[test]
    fn views_show_their_part_of_the_same_memory() {
        let whole = counted();
        let block = whole.narrow(0, 1..3).unwrap().narrow(1, 1..3).unwrap();

        assert_eq!(block.to_vec::<u16>().unwrap(), [5, 6, 9, 10]);
        assert_eq!(block.bytes().as_ptr(), whole.bytes()[10..].as_ptr());
        assert_eq!(block.bytes().len(), 12);
        assert_eq!(whole.select(0, 2).unwrap().to_vec::<u16>().unwrap(), [8, 9, 10, 11]);
        assert_eq!(whole.select(1, 3).unwrap().to_vec::<u16>().unwrap(), [3, 7, 11]);
        assert!(whole.narrow(0, 1..1).unwrap().is_empty());
    }

    #[test]
    fn another_shape_has_the_same_elements() {
        let turned = counted().transpose(0, 1).unwrap();

        assert_eq!(counted().reshape(&[2, 6]).unwrap().get::<u16>(&[1, 0]).unwrap(), 6);
        assert_eq!(turned.reshape(&[12]).unwrap().to_vec::<u16>().unwrap()[..4], [0, 4, 8, 1]);
        assert!(counted().reshape(&[5]).is_err());
    }

    #[test]
    fn parts_that_are_not_there_are_refused() {
        assert!(counted().narrow(0, 2..4).is_err());
        assert!(counted().narrow(2, 0..1).is_err());
        assert!(counted().select(1, 4).is_err());
        assert!(counted().select(0, usize::MAX).is_err());
        assert!(counted().transpose(0, 2).is_err());
    }
}
