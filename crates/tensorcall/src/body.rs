//! What travels with a message: payload, tensor descriptions and the tensors' memory.

use tensorcall_proto::wire::message::{AutogradRef, GoodbyeReason, Message};
use tensorcall_proto::wire::tensor::{BufferDesc, TensorDesc};
use tensorcall_proto::wire::{Descriptor, Limits, WireError};

use crate::buffer::{Buffer, OutOfMemory, Region};
use crate::rref::RRef;

/// The body of a message to send. Nothing is copied: the regions keep their owners alive.
#[derive(Debug, Default, Clone)]
pub struct Body {
    /// Encoded arguments or result.
    pub payload: Vec<u8>,
    /// Tensors in the order in which the payload counts them.
    pub tensors: Vec<TensorDesc>,
    /// Memory that the tensors point into ([`TensorDesc::buffer`]).
    pub buffers: Vec<Region>,
    /// References to values, in the order in which the payload counts them. Each sending forks them.
    pub rrefs: Vec<RRef>,
    /// The autograd context that this belongs to, if to one.
    pub autograd: Option<AutogradRef>,
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
        self.payload.is_empty() && self.tensors.is_empty() && self.rrefs.is_empty()
    }

    /// Whether a peer with these limits accepts a message with this body and `text` bytes of names. One
    /// that it does not accept would cost the connection, and every other call on it.
    pub(crate) fn check(&self, text: usize, limits: &Limits) -> Result<(), WireError> {
        for (what, count, limit) in [
            ("buffers", self.buffers.len(), limits.max_tensors),
            ("tensors", self.tensors.len(), limits.max_tensors),
            ("references", self.rrefs.len(), limits.max_rrefs),
        ] {
            if count > limit as usize {
                return Err(WireError::TooMany { what, count: count as u64, limit });
            }
        }
        if self.len() > limits.max_message {
            return Err(WireError::BodyTooLarge { len: self.len(), limit: limits.max_message });
        }
        // Numbers take at most ten bytes each, and what is not counted here less than 128 in all.
        let dims = |tensor: &TensorDesc| tensor.shape.len() + tensor.strides.as_ref().map_or(0, Vec::len);
        let tensors: usize = self.tensors.iter().map(|tensor| 64 + 10 * dims(tensor)).sum();
        let bound = 128 + text + 32 * self.buffers.len() + tensors + RREF_BYTES * self.rrefs.len();
        if bound <= limits.max_control as usize {
            return Ok(());
        }
        let len = 128
            + text
            + RREF_BYTES * self.rrefs.len()
            + self.describe(Message::Goodbye { reason: GoodbyeReason::Forced }).encode().len();
        if len <= limits.max_control as usize {
            return Ok(());
        }
        Err(WireError::ControlTooLarge { len: len as u64, limit: limits.max_control })
    }

    /// The descriptor of `message` with this body.
    fn describe(&self, message: Message) -> Descriptor {
        Descriptor {
            message,
            payload_len: self.payload.len() as u64,
            buffers: self.buffers.iter().map(|region| BufferDesc::body(region.len() as u64)).collect(),
            tensors: self.tensors.clone(),
            rrefs: Vec::new(),
        }
    }

    /// What the receiver of this body would get, in memory of its own; references aside, which only an
    /// agent can fork.
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
            rrefs: Vec::new(),
            autograd: self.autograd,
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
    /// References to values, in the order in which the payload counts them.
    pub rrefs: Vec<RRef>,
    /// The autograd context that this belongs to, if to one.
    pub autograd: Option<AutogradRef>,
}

impl Received {
    /// Bytes of payload and buffers together.
    pub fn len(&self) -> u64 {
        self.payload.len() as u64 + self.buffers.iter().map(|b| b.len() as u64).sum::<u64>()
    }

    /// Whether there is nothing at all.
    pub fn is_empty(&self) -> bool {
        self.payload.is_empty() && self.tensors.is_empty() && self.rrefs.is_empty()
    }
}

/// Most bytes that one reference takes in a descriptor: eight numbers.
const RREF_BYTES: usize = 80;

#[cfg(test)]
mod tests {
    use super::*;
    use tensorcall_proto::wire::tensor::DType;

    fn with_tensors(count: usize) -> Body {
        let tensor = TensorDesc::contiguous(DType::Float32, vec![1, 2, 3], 0);
        let buffers = vec![Region::from_vec(vec![0; 24])];
        Body { tensors: vec![tensor; count], buffers, ..Body::default() }
    }

    #[test]
    fn a_body_that_peers_would_refuse_is_found_before_it_is_sent() {
        let limits = Limits::default();

        assert_eq!(with_tensors(10).check(10, &limits), Ok(()));
        assert!(matches!(with_tensors(65_537).check(10, &limits), Err(WireError::TooMany { .. })));
        assert!(matches!(Body::default().check(1 << 20, &limits), Err(WireError::ControlTooLarge { .. })));
        let small = Limits { max_message: 23, ..limits };
        assert!(matches!(with_tensors(1).check(10, &small), Err(WireError::BodyTooLarge { .. })));
    }

    #[test]
    fn many_small_tensors_fit_if_their_descriptions_do() {
        let limits = Limits::default();

        // 94 bytes each by the quick bound, 13 in truth.
        assert_eq!(with_tensors(40_000).check(10, &limits), Ok(()));
    }
}
