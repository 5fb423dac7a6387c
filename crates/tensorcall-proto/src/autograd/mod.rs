//! Distributed autograd: a backward pass over the graphs of several workers (GRAD-1).

mod message;

pub use message::{AutogradCall, Pass, Step};
