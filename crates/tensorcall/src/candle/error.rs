//! [`Problem`]: why a tensor, or the gradient of one, does not fit.

use tensorcall_proto::wire::tensor::DType;

use crate::autograd::PassError;
use crate::error::{Error, ErrorKind};

pub(crate) type Result<T, E = Problem> = std::result::Result<T, E>;

/// Why something cannot go from candle into a message, or from a message into candle.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// Candle itself says so.
    #[error("candle: {0}")]
    Candle(#[from] candle_core::Error),
    /// Messages have no such elements.
    #[error("tensors of candle's {0:?} cannot be sent")]
    DType(candle_core::DType),
    /// Candle has no such elements.
    #[error("candle has no tensors of {0}")]
    Unknown(DType),
    /// Complex conjugates, or negated on reading.
    #[error("candle has no tensors that are conjugated or negated on reading")]
    Flags,
    /// Its elements are not where it says.
    #[error("a tensor does not fit its memory")]
    Layout,
    /// It is on a device.
    #[error("a tensor is not in main memory")]
    NotInMemory,
    /// Gradients came in a form that only Python reads.
    #[error("gradients came pickled, which only Python workers can read")]
    Pickled,
    /// Gradients do not fit the tensors of their message.
    #[error("the gradients that came for message {message} do not fit its tensors: {why}")]
    Gradients {
        /// The message.
        message: u64,
        /// What is wrong.
        why: String,
    },
    /// There is no such pass.
    #[error("there is no backward pass {0} here")]
    NoPass(String),
    /// The roots are those of another tensor library.
    #[error("the roots of a backward pass are not candle's")]
    Roots,
    /// A thread was not to be had.
    #[error("no thread for a backward pass: {0}")]
    Thread(std::io::Error),
}

impl From<Problem> for Error {
    fn from(problem: Problem) -> Self {
        Self::new(ErrorKind::Autograd, problem.to_string())
    }
}

impl From<Problem> for PassError {
    fn from(problem: Problem) -> Self {
        Self::failed(ErrorKind::Autograd, problem.to_string())
    }
}
