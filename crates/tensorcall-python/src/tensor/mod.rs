//! Torch tensors as `TensorDesc`s and memory, and back, without copying what is large.
//!
//! [`TensorWriter`] takes the tensors of one message, [`read_tensors`] makes those of a received one.
//!
//! | file | |
//! |---|---|
//! | `layout` | which bytes of a tensor travel; pure arithmetic |
//! | `writer`, `reader` | the tensors of one message, out and in |
//! | `torch` | what a tensor is made of, and tensors on our memory, by one of two ways |
//! | `stable` | the faster way: torch's C interface (unsafe) |
//! | `memory` | names for foreign memory (unsafe) |
//! | `bytes` | bytes of other Python objects as tensors, and back |
//!
//! What arrives is private and writable. Its storage cannot be resized, as with TensorPipe:
//! `resize_` within the storage works, beyond it torch says that the storage is not resizable.

mod bytes;
pub(crate) mod layout;
mod memory;
mod reader;
mod stable;
mod torch;
mod writer;

pub(crate) use bytes::add_to;
pub(crate) use memory::Exported;
pub(crate) use reader::{read_tensors, read_tensors_by};
pub(crate) use torch::{Path, TorchApi};
pub(crate) use writer::TensorWriter;
