//! Candle's tensors as arguments and results.

use candle_core::{Tensor, Var};

use super::error::{Problem, Result};
use super::{graph, memory};
use crate::error::Error;
use crate::native::{self, ConversionError, FromValue, IntoValue, Value};

impl IntoValue for Tensor {
    fn into_value(self) -> Result<Value, ConversionError> {
        (&self).into_value()
    }
}

impl IntoValue for &Tensor {
    fn into_value(self) -> Result<Value, ConversionError> {
        graph::to_message(self).map(Value::Tensor).map_err(unfit)
    }
}

impl IntoValue for &Var {
    fn into_value(self) -> Result<Value, ConversionError> {
        self.as_tensor().into_value()
    }
}

impl FromValue for Tensor {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        match value {
            Value::Tensor(tensor) => graph::tensor_of(&tensor).map_err(unfit),
            other => Err(ConversionError::expected("tensor", &other)),
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "a function for `map_err`")]
fn unfit(problem: Problem) -> ConversionError {
    ConversionError::new(problem.to_string())
}

/// A copy. With a graph if a call has brought the tensor, and this is what it brought.
impl TryFrom<&native::Tensor> for Tensor {
    type Error = Error;

    fn try_from(tensor: &native::Tensor) -> Result<Self, Error> {
        graph::tensor_of(tensor).map_err(Error::from)
    }
}

/// The same memory if it is contiguous and large, which is locked for reading as long as the result or a
/// clone of it lives; that of a variable is copied. Only the values, without the graph.
impl TryFrom<&Tensor> for native::Tensor {
    type Error = Error;

    fn try_from(tensor: &Tensor) -> Result<Self, Error> {
        let tensor = if tensor.is_variable() { tensor.copy()? } else { tensor.clone() };
        memory::lend(&tensor).map_err(Error::from)
    }
}

impl From<candle_core::Error> for Error {
    fn from(error: candle_core::Error) -> Self {
        Problem::from(error).into()
    }
}
