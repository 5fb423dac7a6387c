//! [`Descriptor`]: a message without its bytes.
//!
//! It travels first, so that the receiver can check every number in it and have its memory ready
//! before the body arrives. The body is the payload, then each [`Place::Body`] buffer in order,
//! with nothing between them.

use postcard::ser_flavors::Flavor;
use serde::{Deserialize, Serialize};

use super::error::WireError;
use super::frame::Priority;
use super::function::{MAX_SLOT_NAME, MAX_SLOTS};
use super::limits::Limits;
use super::message::{Call, FunctionRef, Message};
use super::tensor::{BufferDesc, Place, TensorDesc};
use crate::rref::RRefDesc;

/// A message without its bytes: enough to check it and to allocate.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Descriptor {
    /// What is said.
    pub message: Message,
    /// Length of the payload in bytes.
    pub payload_len: u64,
    /// Runs of bytes that the tensors lie in.
    pub buffers: Vec<BufferDesc>,
    /// The tensors, in the order in which the payload numbers them.
    pub tensors: Vec<TensorDesc>,
    /// The references that the sender shares, in the order in which the payload numbers them.
    pub rrefs: Vec<RRefDesc>,
}

impl Descriptor {
    /// A message without a body.
    pub const fn plain(message: Message) -> Self {
        Self::with_payload(message, 0)
    }

    /// A message whose body is a payload alone.
    pub const fn with_payload(message: Message, payload_len: u64) -> Self {
        Self { message, payload_len, buffers: Vec::new(), tensors: Vec::new(), rrefs: Vec::new() }
    }

    /// Appends the encoded descriptor to `out`.
    #[expect(clippy::expect_used, reason = "every type here has a known length and the sink takes all")]
    pub fn encode_into(&self, out: &mut Vec<u8>) {
        postcard::serialize_with_flavor(self, Append(out)).expect("descriptors always serialise");
    }

    /// The encoded descriptor.
    pub fn encode(&self) -> Vec<u8> {
        let tables = 32 * self.tensors.len() + 8 * self.buffers.len() + 48 * self.rrefs.len();
        let mut out = Vec::with_capacity(48 + tables);
        self.encode_into(&mut out);
        out
    }

    /// Reads a descriptor and checks all of it: every count against `limits` before anything is
    /// allocated for it, every tensor against its buffer, and the length of the whole body.
    ///
    /// # Errors
    ///
    /// The [`WireError`] names the first thing that is wrong.
    pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Self, WireError> {
        if bytes.len() as u64 > limits.max_control.into() {
            return Err(WireError::ControlTooLarge { len: bytes.len() as u64, limit: limits.max_control });
        }
        let mut parts = Parts { rest: bytes };
        let descriptor = Self {
            message: parts.take("message")?,
            payload_len: parts.take("payload length")?,
            buffers: parts.table("buffers", limits.max_tensors)?,
            tensors: parts.table("tensors", limits.max_tensors)?,
            rrefs: parts.table("references", limits.max_rrefs)?,
        };
        if !parts.rest.is_empty() {
            return Err(WireError::Trailing { what: "descriptor", len: parts.rest.len() });
        }
        descriptor.check(limits).map(|()| descriptor)
    }

    /// Whether a receiver with these `limits` accepts this descriptor, its encoded length apart.
    ///
    /// # Errors
    ///
    /// The same as [`Descriptor::decode`].
    pub fn check(&self, limits: &Limits) -> Result<(), WireError> {
        for (what, count) in [("buffers", self.buffers.len()), ("tensors", self.tensors.len())] {
            within(what, count as u64, limits.max_tensors)?;
        }
        within("references", self.rrefs.len() as u64, limits.max_rrefs)?;
        if let Message::Call(Call { function: FunctionRef::Define { slot, name }, .. }) = &self.message {
            within("function slots", u64::from(*slot) + 1, MAX_SLOTS)?;
            within("bytes of a function's name", name.len() as u64, MAX_SLOT_NAME)?;
        }
        self.check_buffers(limits)?;
        self.tensors.iter().try_for_each(|tensor| tensor.check(&self.buffers))
    }

    fn check_buffers(&self, limits: &Limits) -> Result<(), WireError> {
        let has_body = self.payload_len > 0
            || !(self.buffers.is_empty() && self.tensors.is_empty() && self.rrefs.is_empty());
        if has_body && !self.message.may_have_body() {
            return Err(WireError::UnexpectedBody);
        }
        for (index, buffer) in self.buffers.iter().enumerate() {
            if let Place::Block { offset, .. } = buffer.place
                && !(limits.blocks && offset.checked_add(buffer.len).is_some())
            {
                return Err(WireError::Block { index });
            }
        }
        let len = self.body_len().unwrap_or(u64::MAX);
        let limit = limits.max_message;
        if len <= limit { Ok(()) } else { Err(WireError::BodyTooLarge { len, limit }) }
    }

    /// Length of the body in bytes: the payload and every buffer that lies in the body.
    ///
    /// # Errors
    ///
    /// [`WireError::BodyTooLarge`] if the sum does not fit a `u64`.
    pub fn body_len(&self) -> Result<u64, WireError> {
        self.buffers
            .iter()
            .try_fold(self.payload_len, |sum, buffer| sum.checked_add(buffer.body_len()))
            .ok_or(WireError::BodyTooLarge { len: u64::MAX, limit: u64::MAX })
    }

    /// The priority at which this message is sent.
    pub fn priority(&self) -> Priority {
        self.message.priority(self.body_len().unwrap_or(u64::MAX))
    }
}

fn within(what: &'static str, count: u64, limit: u32) -> Result<(), WireError> {
    if count <= limit.into() { Ok(()) } else { Err(WireError::TooMany { what, count, limit }) }
}

/// Takes the parts of a descriptor one after the other, so that each count can be checked before
/// its table is allocated.
struct Parts<'a> {
    rest: &'a [u8],
}

impl<'a> Parts<'a> {
    fn take<T: Deserialize<'a>>(&mut self, part: &'static str) -> Result<T, WireError> {
        let (value, rest) =
            postcard::take_from_bytes(self.rest).map_err(|_| WireError::Malformed { part })?;
        self.rest = rest;
        Ok(value)
    }

    fn table<T: Deserialize<'a>>(&mut self, what: &'static str, limit: u32) -> Result<Vec<T>, WireError> {
        let count: u64 = self.take(what)?;
        within(what, count, limit)?;
        // An entry takes at least a byte, so what is left bounds the count as well.
        let count = usize::try_from(count).ok().filter(|&count| count <= self.rest.len());
        let count = count.ok_or(WireError::Malformed { part: what })?;
        let mut table = Vec::with_capacity(count);
        for _ in 0..count {
            table.push(self.take(what)?);
        }
        Ok(table)
    }
}

/// Lets postcard append to a vector that already exists.
struct Append<'a>(&'a mut Vec<u8>);

impl Flavor for Append<'_> {
    type Output = ();

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.0.push(byte);
        Ok(())
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::{ForkId, Incarnation, Life, MessageId, RRefId, Rank};
    use crate::rref::RRefMessage;
    use crate::wire::message::{Encoding, FailureKind, GoodbyeReason, Outcome, Phase, Reply};
    use crate::wire::tensor::DType;

    fn call(function: FunctionRef) -> Message {
        Message::Call(Call {
            id: MessageId::new(1),
            function,
            encoding: Encoding::Value,
            timeout_us: Some(60_000_000),
            nested: false,
            plain: false,
            autograd: None,
            creates: None,
        })
    }

    fn rref(local: u64) -> RRefDesc {
        let life = |rank| Life { rank: Rank::new(rank).unwrap(), incarnation: Incarnation::new(u64::MAX) };
        let (rref, fork) = (RRefId::new(life(1), local), ForkId::new(life(2), local + 1));
        RRefDesc { rref, owner: life(0), fork }
    }

    /// A call with a reference, and two tensors that share the first of two buffers.
    fn sample() -> Descriptor {
        Descriptor {
            message: call(FunctionRef::Name("f".into())),
            payload_len: 10,
            buffers: vec![BufferDesc::body(64), BufferDesc::body(16)],
            tensors: vec![
                TensorDesc::contiguous(DType::Float32, vec![4, 4], 0),
                TensorDesc {
                    strides: Some(vec![4]),
                    offset: 4,
                    ..TensorDesc::contiguous(DType::Float32, vec![4], 0)
                },
                TensorDesc::contiguous(DType::Int64, vec![2], 1),
            ],
            rrefs: vec![rref(1)],
        }
    }

    fn decode(descriptor: &Descriptor) -> Result<Descriptor, WireError> {
        Descriptor::decode(&descriptor.encode(), &Limits::default())
    }

    #[test]
    fn descriptor_survives_the_round_trip() {
        assert_eq!(decode(&sample()), Ok(sample()));
        assert_eq!(sample().body_len(), Ok(90));
    }

    #[test]
    fn encoding_appends_to_what_is_there() {
        let mut out = vec![1, 2, 3];

        sample().encode_into(&mut out);

        assert_eq!(out[..3], [1, 2, 3]);
        assert_eq!(out[3..], sample().encode());
    }

    #[test]
    fn every_cut_of_a_descriptor_is_refused() {
        let bytes = sample().encode();

        for cut in 0..bytes.len() {
            let result = Descriptor::decode(&bytes[..cut], &Limits::default());
            assert!(matches!(result, Err(WireError::Malformed { .. })), "cut at {cut}: {result:?}");
        }
    }

    #[test]
    fn bytes_after_a_descriptor_are_refused() {
        let mut bytes = sample().encode();
        bytes.push(0);

        let result = Descriptor::decode(&bytes, &Limits::default());

        assert_eq!(result, Err(WireError::Trailing { what: "descriptor", len: 1 }));
    }

    #[test]
    fn long_descriptors_are_refused_unread() {
        let limits = Limits { max_control: 3, ..Limits::default() };

        let result = Descriptor::decode(&[0xff; 4], &limits);

        assert_eq!(result, Err(WireError::ControlTooLarge { len: 4, limit: 3 }));
    }

    #[test]
    fn tables_longer_than_the_limit_are_refused_by_their_count() {
        let limits = Limits { max_tensors: 2, ..Limits::default() };
        let result = Descriptor::decode(&sample().encode(), &limits);
        assert_eq!(result, Err(WireError::TooMany { what: "tensors", count: 3, limit: 2 }));

        let limits = Limits { max_rrefs: 1, ..Limits::default() };
        let two = Descriptor { rrefs: vec![rref(1), rref(2)], ..sample() };
        let result = Descriptor::decode(&two.encode(), &limits);
        assert_eq!(result, Err(WireError::TooMany { what: "references", count: 2, limit: 1 }));

        let mut bytes = Descriptor::plain(call(FunctionRef::InPayload)).encode();
        bytes.truncate(bytes.len() - 3);
        bytes.extend([0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]);
        let result = Descriptor::decode(&bytes, &Limits::default());
        assert_eq!(result, Err(WireError::TooMany { what: "buffers", count: u64::MAX, limit: 65_536 }));
    }

    #[test]
    fn tables_longer_than_the_bytes_left_are_refused_by_their_count() {
        let mut bytes = Descriptor::plain(call(FunctionRef::InPayload)).encode();
        bytes.truncate(bytes.len() - 2);
        bytes.extend([0xff, 0x7f, 0, 0]);
        let result = Descriptor::decode(&bytes, &Limits::default());
        assert_eq!(result, Err(WireError::Malformed { part: "tensors" }));

        bytes.truncate(bytes.len() - 4);
        bytes.extend([0, 0xff, 0x7f, 0, 0]);
        let result = Descriptor::decode(&bytes, &Limits::default());
        assert_eq!(result, Err(WireError::Malformed { part: "references" }));
    }

    #[test]
    fn body_longer_than_the_limit_is_refused() {
        let limits = Limits { max_message: 89, ..Limits::default() };

        let result = Descriptor::decode(&sample().encode(), &limits);

        assert_eq!(result, Err(WireError::BodyTooLarge { len: 90, limit: 89 }));
    }

    #[test]
    fn body_whose_length_overflows_is_refused() {
        let mut descriptor = sample();
        descriptor.buffers[1].len = u64::MAX;

        let limit = Limits::default().max_message;
        assert_eq!(decode(&descriptor), Err(WireError::BodyTooLarge { len: u64::MAX, limit }));
    }

    #[test]
    fn tensors_are_checked_against_their_buffers() {
        let mut descriptor = sample();
        descriptor.tensors[2].buffer = 2;

        assert_eq!(decode(&descriptor), Err(WireError::TensorBuffer { buffer: 2, count: 2 }));
    }

    #[test]
    fn shared_memory_is_refused_unless_enabled() {
        let mut descriptor = sample();
        descriptor.buffers[1].place = Place::Block { segment: 1, offset: 128 };
        let limits = Limits { blocks: true, ..Limits::default() };

        assert_eq!(decode(&descriptor), Err(WireError::Block { index: 1 }));
        assert_eq!(Descriptor::decode(&descriptor.encode(), &limits), Ok(descriptor.clone()));
        assert_eq!(descriptor.body_len(), Ok(74));

        descriptor.buffers[1].place = Place::Block { segment: 1, offset: u64::MAX };
        let result = Descriptor::decode(&descriptor.encode(), &limits);
        assert_eq!(result, Err(WireError::Block { index: 1 }));
    }

    #[test]
    fn function_slots_and_their_names_stay_within_their_limits() {
        let define =
            |slot, name: &str| Descriptor::plain(call(FunctionRef::Define { slot, name: name.into() }));
        let refused = |what, count, limit| Err(WireError::TooMany { what, count, limit });
        let (longest, too_long) = ("f".repeat(256), "f".repeat(257));

        assert!(decode(&define(4095, &longest)).is_ok());
        assert_eq!(decode(&define(4096, "f")), refused("function slots", 4097, 4096));
        assert_eq!(decode(&define(0, &too_long)), refused("bytes of a function's name", 257, 256));
    }

    #[test]
    fn bookkeeping_messages_have_no_body() {
        let id = MessageId::new(7);
        let outcome = Outcome::Failed { kind: FailureKind::Expired, text: "late".into() };
        for message in [
            Message::Cancel { id },
            Message::Progress { id, phase: Phase::Running },
            Message::Goodbye { reason: GoodbyeReason::Forced },
            Message::RRef(RRefMessage::Rescind { fork: rref(1).fork }),
            Message::Reply(Reply { id, outcome }),
        ] {
            assert!(decode(&Descriptor::plain(message.clone())).is_ok());
            let with_payload = Descriptor::with_payload(message.clone(), 1);
            assert_eq!(decode(&with_payload), Err(WireError::UnexpectedBody), "{with_payload:?}");
            let with_rref = Descriptor { rrefs: vec![rref(1)], ..Descriptor::plain(message) };
            assert_eq!(decode(&with_rref), Err(WireError::UnexpectedBody), "{with_rref:?}");
        }
    }

    #[test]
    fn small_call_has_a_small_descriptor() {
        let descriptor = Descriptor::with_payload(call(FunctionRef::Slot(3)), 20);

        assert!(descriptor.encode().len() <= 18, "{} bytes", descriptor.encode().len());
    }
}
