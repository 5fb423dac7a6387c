//! Reading and writing the elements of a tensor.

use super::{Element, Tensor, contiguous, item_size};
use crate::error::{Error, Result};

impl Tensor {
    /// The elements, row after row, where they lie.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) if they are of another type, or not contiguous.
    pub fn as_slice<T: Element>(&self) -> Result<&[T]> {
        self.check_type::<T>()?;
        if !self.is_contiguous() {
            let text = "a view that is not contiguous has no slice; call contiguous() first, or to_vec()";
            return Err(Error::usage(text));
        }
        self.cast(&self.bytes)
    }

    /// The elements, row after row, to be written. Memory that others use too, or that is not of this crate,
    /// is copied first, so that nobody else sees what is written.
    ///
    /// # Errors
    ///
    /// As [`Tensor::as_slice`], and [`ErrorKind::Io`](crate::ErrorKind::Io) if there is no memory for a copy.
    pub fn as_mut_slice<T: Element>(&mut self) -> Result<&mut [T]> {
        self.check_type::<T>()?;
        if !self.is_contiguous() {
            *self = self.contiguous()?;
        }
        if self.bytes.get_mut().is_none() {
            self.bytes = self.bytes.copied()?;
        }
        self.graph = None;
        let bytes = self.bytes.get_mut().unwrap_or_default();
        bytemuck::try_cast_slice_mut(bytes)
            .map_err(|error| Error::usage(format!("a tensor's memory: {error}")))
    }

    /// A copy of the elements, row after row, in whatever layout they are.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) if they are of another type.
    pub fn to_vec<T: Element>(&self) -> Result<Vec<T>> {
        self.check_type::<T>()?;
        if self.is_contiguous() {
            return self.as_slice().map(<[T]>::to_vec);
        }
        let all: &[T] = self.cast(&self.bytes)?;
        Ok(self.offsets().map(|offset| all[offset]).collect())
    }

    /// One element.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) if it is of another type or `index` is out of bounds.
    pub fn get<T: Element>(&self, index: &[usize]) -> Result<T> {
        self.check_type::<T>()?;
        let within =
            index.len() == self.shape.len() && index.iter().zip(&self.shape).all(|(at, size)| at < size);
        if !within {
            let shape = &self.shape;
            return Err(Error::usage(format!(
                "index {index:?} is out of bounds of a tensor of shape {shape:?}"
            )));
        }
        let offset: usize = index.iter().zip(&self.strides).map(|(at, stride)| at * stride).sum();
        self.cast(&self.bytes).map(|all: &[T]| all[offset])
    }

    /// The only element.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Usage`](crate::ErrorKind::Usage) if it is of another type or there is not exactly one.
    pub fn item<T: Element>(&self) -> Result<T> {
        if self.len() != 1 {
            return Err(Error::usage(format!("a tensor of shape {:?} has not one element", self.shape)));
        }
        self.get(&vec![0; self.shape.len()])
    }

    /// The same elements, row after row: this very tensor if they lie so, else a copy.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Io`](crate::ErrorKind::Io) if there is no memory for a copy.
    pub fn contiguous(&self) -> Result<Self> {
        if self.is_contiguous() {
            return Ok(self.clone());
        }
        let mut copy = Self::zeros(self.dtype, &self.shape)?;
        let size = item_size(self.dtype);
        let target = copy.bytes.get_mut().unwrap_or_default();
        for (item, offset) in target.chunks_exact_mut(size).zip(self.offsets()) {
            item.copy_from_slice(&self.bytes[offset * size..][..size]);
        }
        Ok(copy)
    }

    /// How far from the first each element lies, row after row.
    fn offsets(&self) -> impl Iterator<Item = usize> + '_ {
        let rows = contiguous(&self.shape);
        let offset = move |number: usize| {
            let dims = self.shape.iter().zip(&self.strides).zip(&rows);
            dims.map(|((&size, &stride), &row)| (number / row) % size * stride).sum()
        };
        (0..self.len()).map(offset)
    }

    pub(super) fn check_type<T: Element>(&self) -> Result<()> {
        if self.dtype == T::DTYPE {
            return Ok(());
        }
        Err(Error::usage(format!("the elements of this tensor are {}, not {}", self.dtype, T::DTYPE)))
    }

    pub(super) fn cast<'a, T: Element>(&self, bytes: &'a [u8]) -> Result<&'a [T]> {
        let dtype = self.dtype;
        bytemuck::try_cast_slice(bytes).map_err(|error| Error::usage(format!("memory of {dtype}: {error}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::native::tensor::DType;

    fn counted() -> Tensor {
        Tensor::from_vec((0..6).collect::<Vec<i32>>(), &[2, 3]).unwrap()
    }

    #[test]
    fn elements_are_read_in_any_layout() {
        let turned = counted().transpose(0, 1).unwrap();

        assert_eq!(counted().as_slice::<i32>().unwrap(), [0, 1, 2, 3, 4, 5]);
        assert_eq!(turned.to_vec::<i32>().unwrap(), [0, 3, 1, 4, 2, 5]);
        assert_eq!(turned.contiguous().unwrap().as_slice::<i32>().unwrap(), [0, 3, 1, 4, 2, 5]);
        assert_eq!(turned.get::<i32>(&[2, 1]).unwrap(), 5);
        assert_eq!(Tensor::scalar(15u64).item::<u64>().unwrap(), 15);
    }

    #[test]
    fn what_is_written_is_seen_by_nobody_else() {
        let mut tensor = Tensor::zeros(DType::Int32, &[2]).unwrap();
        let before = tensor.clone();

        tensor.as_mut_slice::<i32>().unwrap()[0] = 5;

        assert_eq!(tensor.to_vec::<i32>().unwrap(), [5, 0]);
        assert_eq!(before.to_vec::<i32>().unwrap(), [0, 0]);
    }

    #[test]
    fn memory_of_a_single_user_is_written_in_place() {
        let mut tensor = Tensor::zeros(DType::Int32, &[2]).unwrap();
        let address = tensor.bytes().as_ptr();

        tensor.as_mut_slice::<i32>().unwrap()[1] = 5;

        assert_eq!(tensor.bytes().as_ptr(), address);
    }

    #[test]
    fn wrong_types_layouts_and_indices_are_refused() {
        let text = |error: Error| error.to_string();
        assert_eq!(
            text(counted().as_slice::<f32>().unwrap_err()),
            "the elements of this tensor are int32, not float32"
        );
        assert!(counted().transpose(0, 1).unwrap().as_slice::<i32>().is_err());
        assert!(counted().get::<i32>(&[2, 0]).is_err());
        assert!(counted().get::<i32>(&[0]).is_err());
        assert!(counted().item::<i32>().is_err());
    }
}
