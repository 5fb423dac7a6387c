//! [`Problem`]: why a tensor, or the gradient of one, does not fit.

use tensorcall_proto::wire::tensor::DType;

use crate::autograd::PassError;
use crate::error::{Error, ErrorKind};

pub(super) type Result<T, E = Problem> = std::result::Result<T, E>;

/// Why something cannot go from candle into a message or the other way round, or a pass not on.
#[derive(Debug, thiserror::Error)]
pub(super) enum Problem {
    #[error("candle: {0}")]
    Candle(#[from] candle_core::Error),
    #[error("{0}")]
    Own(#[from] Error),
    #[error("tensors of candle's {0:?} cannot be sent")]
    DType(candle_core::DType),
    #[error("candle has no tensors of {0}")]
    Unknown(DType),
    #[error("a tensor of candle is not where it says that it is")]
    Layout,
    #[error("the gradients that came for message {message} do not fit its tensors: {why}")]
    Gradients { message: u64, why: &'static str },
    #[error("there is no such backward pass here")]
    NoPass,
    #[error("the roots of a backward pass are not candle's")]
    Roots,
    #[error(
        "a tensor that was received in another autograd context, or that has ended, is part of the graph"
    )]
    Stranger,
    #[error("no thread for a backward pass: {0}")]
    Thread(std::io::Error),
}

impl From<Problem> for Error {
    fn from(problem: Problem) -> Self {
        match problem {
            Problem::Own(error) => error,
            Problem::DType(_) | Problem::Unknown(_) => Self::new(ErrorKind::Usage, problem.to_string()),
            other => Self::new(ErrorKind::Autograd, other.to_string()),
        }
    }
}

impl From<Problem> for PassError {
    fn from(problem: Problem) -> Self {
        Self::failed(ErrorKind::Autograd, problem.to_string())
    }
}
