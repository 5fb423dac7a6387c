//! The wire format: what two agents write to each other, byte by byte.
//!
//! Three layers, each of which can be read alone:
//!
//! - [`frame`]: a fixed header in front of everything; streams of frames may alternate.
//! - [`descriptor`]: what a [`message`] is and how large its parts are, so that the receiver has
//!   memory ready before the body arrives. [`tensor`] and [`dtype`] describe tensors there.
//! - [`value`]: the payload of calls with plain arguments, readable from Python and Rust.
//!
//! [`store`] is apart: what workers say to the store in which they meet, which is PyTorch's protocol.
//!
//! `docs/wire-format.md` is the normative text, with examples that the golden tests check.
//! [`limits`] bounds everything a peer can announce, and [`error`] names all that can be wrong:
//! no byte from the network can panic, recurse, or take more memory than configured (NET-2).

pub mod descriptor;
pub mod dtype;
pub mod error;
pub mod frame;
pub mod function;
pub mod limits;
pub mod message;
pub mod store;
pub mod tensor;
pub mod value;

pub use crate::blocks::BlockMessage;
pub use crate::rref::{NewRRef, RRefDesc, RRefMessage};
pub use descriptor::Descriptor;
pub use error::WireError;
pub use frame::{FrameHeader, FrameKind, HEADER_LEN, Priority, VERSION};
pub use limits::Limits;
pub use message::{
    AutogradRef, Call, Encoding, FailureKind, FunctionRef, GoodbyeReason, Message, Outcome, Phase, Reply,
};
pub use tensor::{BufferDesc, DType, Device, DeviceKind, MAX_DIMS, Place, TensorDesc};
pub use value::{Event, Exception, Value, ValueReader, ValueWriter};
