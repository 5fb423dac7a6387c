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
    /// What belongs into the payload without having been copied there, each behind so many bytes of it. In order.
    pub inserted: Vec<(usize, Region)>,
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
        self.payload_len() + self.buffers.iter().map(|b| b.len() as u64).sum::<u64>()
    }

    /// Bytes of the payload, with those that are inserted.
    pub(crate) fn payload_len(&self) -> u64 {
        self.payload.len() as u64 + self.inserted.iter().map(|(_, region)| region.len() as u64).sum::<u64>()
    }

    /// Copies what is inserted into the payload.
    pub(crate) fn flatten(&mut self) {
        if self.inserted.is_empty() {
            return;
        }
        let mut whole = Vec::with_capacity(usize::try_from(self.payload_len()).unwrap_or(0));
        let mut done = 0;
        for (behind, region) in std::mem::take(&mut self.inserted) {
            whole.extend_from_slice(&self.payload[done..behind]);
            done = behind;
            let start = whole.len();
            whole.resize(start + region.len(), 0);
            region.copy_to(&mut whole[start..]);
        }
        whole.extend_from_slice(&self.payload[done..]);
        self.payload = whole;
    }

    /// The payload in pieces: what comes before the first that is inserted, and all that follows.
    pub(crate) fn take_pieces(&mut self) -> (Vec<u8>, Vec<Region>) {
        let payload = std::mem::take(&mut self.payload);
        let inserted = std::mem::take(&mut self.inserted);
        let Some((first, _)) = inserted.first() else { return (payload, Vec::new()) };
        let (head, mut done) = (payload[..*first].to_vec(), *first);
        let whole = Region::from_vec(payload);
        let mut pieces = Vec::with_capacity(2 * inserted.len());
        for (behind, region) in inserted {
            if behind > done {
                pieces.push(whole.slice(done..behind));
                done = behind;
            }
            pieces.push(region);
        }
        if whole.len() > done {
            pieces.push(whole.slice(done..whole.len()));
        }
        (head, pieces)
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
            payload_len: self.payload_len(),
            buffers: self.buffers.iter().map(|region| BufferDesc::body(region.len() as u64)).collect(),
            tensors: self.tensors.clone(),
            rrefs: Vec::new(),
        }
    }

    fn receive_payload(&self) -> Result<Buffer, OutOfMemory> {
        if self.inserted.is_empty() {
            return Buffer::copy_of(&self.payload);
        }
        let mut buffer = Buffer::zeroed(usize::try_from(self.payload_len()).unwrap_or(usize::MAX))?;
        let (mut target, mut done) = (buffer.as_mut(), 0);
        for (behind, region) in &self.inserted {
            let (own, rest) = target.split_at_mut(behind - done);
            own.copy_from_slice(&self.payload[done..*behind]);
            let (theirs, rest) = rest.split_at_mut(region.len());
            region.copy_to(theirs);
            (target, done) = (rest, *behind);
        }
        target.copy_from_slice(&self.payload[done..]);
        Ok(buffer)
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
            payload: self.receive_payload()?,
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
    fn what_is_inserted_stands_where_it_belongs() {
        let region = |text: &str| Region::from_vec(text.as_bytes().to_vec());
        for (payload, inserted, whole) in [
            ("", vec![(0, region("abc"))], "abc"),
            ("xyz", vec![(0, region("a"))], "axyz"),
            ("xyz", vec![(1, region("abc")), (1, region("d")), (3, region("e"))], "xabcdyze"),
        ] {
            let mut body = Body { payload: payload.into(), inserted, ..Body::default() };

            assert_eq!(body.len(), whole.len() as u64);
            assert_eq!(body.receive().unwrap().payload.as_ref(), whole.as_bytes());
            let (mut head, pieces) = body.clone().take_pieces();
            for piece in pieces {
                let start = head.len();
                head.resize(start + piece.len(), 0);
                piece.copy_to(&mut head[start..]);
            }
            assert_eq!(head, whole.as_bytes());
            body.flatten();
            assert_eq!(body.payload, whole.as_bytes());
        }
    }

    #[test]
    fn many_small_tensors_fit_if_their_descriptions_do() {
        let limits = Limits::default();

        // 94 bytes each by the quick bound, 13 in truth.
        assert_eq!(with_tensors(40_000).check(10, &limits), Ok(()));
    }
}
