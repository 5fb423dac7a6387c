//! What travels with a message: payload, tensor descriptions and the tensors' memory.

use tensorcall_proto::wire::tensor::TensorDesc;

use crate::buffer::{Buffer, OutOfMemory, Region};

/// The body of a message to send. Nothing is copied: the regions keep their owners alive.
#[derive(Debug, Default)]
pub struct Body {
    /// Encoded arguments or result.
    pub payload: Vec<u8>,
    /// Tensors in the order in which the payload counts them.
    pub tensors: Vec<TensorDesc>,
    /// Memory that the tensors point into ([`TensorDesc::buffer`]).
    pub buffers: Vec<Region>,
}

impl Body {
    /// A body without tensors.
    pub fn of(payload: Vec<u8>) -> Self {
        Self { payload, ..Self::default() }
    }

    /// Bytes of payload and buffers together.
    pub fn len(&self) -> u64 {
        self.payload.len() as u64 + self.buffers.iter().map(|b| b.len() as u64).sum::<u64>()
    }

    /// Whether there is nothing at all.
    pub fn is_empty(&self) -> bool {
        self.payload.is_empty() && self.tensors.is_empty()
    }

    /// What the receiver of this body would get, in memory of its own.
    pub fn receive(&self) -> Result<Received, OutOfMemory> {
        let copy = |region: &Region| {
            let mut buffer = Buffer::zeroed(region.len())?;
            region.copy_to(buffer.as_mut());
            Ok(buffer)
        };
        Ok(Received {
            payload: Buffer::copy_of(&self.payload)?,
            tensors: self.tensors.clone(),
            buffers: self.buffers.iter().map(copy).collect::<Result<_, _>>()?,
        })
    }
}

/// The body of a received message, in memory of its own.
#[derive(Debug)]
pub struct Received {
    /// Encoded arguments or result.
    pub payload: Buffer,
    /// Tensors in the order in which the payload counts them, checked against `buffers`.
    pub tensors: Vec<TensorDesc>,
    /// Memory that the tensors point into.
    pub buffers: Vec<Buffer>,
}

impl Received {
    /// Bytes of payload and buffers together.
    pub fn len(&self) -> u64 {
        self.payload.len() as u64 + self.buffers.iter().map(|b| b.len() as u64).sum::<u64>()
    }

    /// Whether there is nothing at all.
    pub fn is_empty(&self) -> bool {
        self.payload.is_empty() && self.tensors.is_empty()
    }
}
