//! Requests and replies of the store in which workers meet.
//!
//! It is the protocol of PyTorch's `TCPStore`, as seen on its wire, so that either side may be the other's.
//! A request is one byte that says which, then its fields; a reply is fields alone, and which fields depends
//! on the request. Nothing has a length of its own and nothing an id: replies come in the order of requests,
//! except that those to [`Request::Wait`] and [`Request::Barrier`] come when they come. Numbers are
//! little-endian; a text is a `u64` length and that many bytes; a list is a `u64` count and its items.
//!
//! [`RequestDecoder`] and [`ReplyDecoder`] take bytes in any split, each byte once, and keep no more than
//! has come and the [`StoreLimits`] allow (NET-2).

mod fields;

use std::mem;

use self::fields::{Fields, Part};

/// What a client says first: it speaks this protocol.
pub const MAGIC: u32 = 0x3c85_f7ce;

/// What [`Request::Wait`] and [`Request::Barrier`] are answered when what they wait for is there.
pub const READY: u8 = 0;

/// What [`Request::Check`] is answered when a key is missing.
pub const MISSING: u8 = 1;

/// What [`Request::CancelWait`] is answered, and no other request.
pub const CANCELLED: u8 = 1;

/// What a client asks of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Request {
    /// Says with [`MAGIC`] that the client speaks this protocol. First of all, once, not answered.
    Validate(u32),
    /// Lets a key have a value. Not answered.
    Set(Vec<u8>, Vec<u8>),
    /// Lets a key have the second value if it has the first, or is missing and the first is empty. The answer
    /// is what it has then; for a missing key the first value.
    CompareSet(Vec<u8>, Vec<u8>, Vec<u8>),
    /// Asks for the value of a key, which is empty if there is none.
    Get(Vec<u8>),
    /// Adds to a number that is kept as decimal text. The answer is the sum.
    Add(Vec<u8>, i64),
    /// Asks whether all keys are there: [`READY`] or [`MISSING`].
    Check(Vec<Vec<u8>>),
    /// Is answered with [`READY`] when all keys are there.
    Wait(Vec<Vec<u8>>),
    /// Asks how many keys there are.
    NumKeys,
    /// Removes a key. The answer is 1 if it was there.
    Delete(Vec<u8>),
    /// Adds bytes to the end of a value. Not answered.
    Append(Vec<u8>, Vec<u8>),
    /// Asks for several values.
    MultiGet(Vec<Vec<u8>>),
    /// Sets several values. Not answered.
    MultiSet(Vec<(Vec<u8>, Vec<u8>)>),
    /// Gives up what the client waits for, if anything. Is answered with [`CANCELLED`] in any case.
    CancelWait,
    /// Is answered with the same number.
    Ping(u32),
    /// Adds to the end of a queue. Not answered.
    QueuePush(Vec<u8>, Vec<u8>),
    /// Takes from the front of a queue.
    QueuePop(Vec<u8>),
    /// Asks how long a queue is.
    QueueLen(Vec<u8>),
    /// Asks for all keys.
    ListKeys,
    /// Is answered with [`READY`] when so many clients have asked for it.
    Barrier(Vec<u8>, u64),
}

/// What a server answers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reply {
    /// Bytes.
    Value(Vec<u8>),
    /// As many as were asked for.
    Values(Vec<Vec<u8>>),
    /// However many there are.
    Keys(Vec<Vec<u8>>),
    /// A number.
    Number(i64),
    /// [`READY`], [`MISSING`] or [`CANCELLED`].
    Flag(u8),
    /// That of a ping.
    Nonce(u32),
    /// What was in front of the queue.
    Popped(Option<Vec<u8>>),
}

/// What the reply to a request is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyShape {
    /// [`Reply::Value`].
    Value,
    /// [`Reply::Values`], so many.
    Values(usize),
    /// [`Reply::Keys`].
    Keys,
    /// [`Reply::Number`].
    Number,
    /// [`Reply::Flag`].
    Flag,
    /// [`Reply::Nonce`].
    Nonce,
    /// [`Reply::Popped`].
    Popped,
}

/// What is accepted from the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StoreLimits {
    /// Longest key, in bytes. 8 KiB, as in PyTorch.
    pub max_key: usize,
    /// Longest value, in bytes. 8 MiB, as in PyTorch.
    pub max_value: usize,
    /// Most keys of one request or reply. 128 Ki.
    pub max_keys: u64,
    /// Largest request or reply, in bytes, with [`TEXT_COST`] for each text in it. 64 MiB.
    pub max_message: usize,
}

impl Default for StoreLimits {
    fn default() -> Self {
        Self { max_key: 8 << 10, max_value: 8 << 20, max_keys: 128 << 10, max_message: 64 << 20 }
    }
}

/// What a text costs beside its bytes: about what keeping it does.
pub const TEXT_COST: usize = 32;

/// Why bytes are not a request or a reply of a store.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StoreWireError {
    /// No request has this number.
    #[error("store request {0} is unknown")]
    UnknownRequest(u8),
    /// A text is longer than its kind may be.
    #[error("text of {len} bytes exceeds the limit of {limit}")]
    TextTooLong {
        /// Its length.
        len: u64,
        /// The limit.
        limit: usize,
    },
    /// A list has too many items.
    #[error("{count} keys exceed the limit of {limit}")]
    TooManyKeys {
        /// How many.
        count: u64,
        /// The limit.
        limit: u64,
    },
    /// The parts are small enough, the whole is not.
    #[error("store message exceeds the limit of {limit} bytes")]
    MessageTooLarge {
        /// The limit.
        limit: usize,
    },
}

impl Request {
    /// Appends the request to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        out.push(self.opcode());
        match self {
            Self::Validate(number) | Self::Ping(number) => out.extend(number.to_le_bytes()),
            Self::NumKeys | Self::CancelWait | Self::ListKeys => {}
            Self::Get(key) | Self::Delete(key) | Self::QueuePop(key) | Self::QueueLen(key) => put(out, key),
            Self::Set(key, value) | Self::Append(key, value) | Self::QueuePush(key, value) => {
                put(out, key);
                put(out, value);
            }
            Self::CompareSet(key, expected, desired) => {
                put(out, key);
                put(out, expected);
                put(out, desired);
            }
            Self::Add(key, delta) => {
                put(out, key);
                out.extend(delta.to_le_bytes());
            }
            Self::Barrier(key, size) => {
                put(out, key);
                out.extend(size.to_le_bytes());
            }
            Self::Check(keys) | Self::Wait(keys) | Self::MultiGet(keys) => put_list(out, keys),
            Self::MultiSet(pairs) => {
                out.extend((pairs.len() as u64).to_le_bytes());
                for (key, value) in pairs {
                    put(out, key);
                    put(out, value);
                }
            }
        }
    }

    /// What the reply is made of; `None` if there is none.
    pub fn reply_shape(&self) -> Option<ReplyShape> {
        match self {
            Self::Validate(_)
            | Self::Set(..)
            | Self::Append(..)
            | Self::MultiSet(_)
            | Self::QueuePush(..) => None,
            Self::CompareSet(..) | Self::Get(_) => Some(ReplyShape::Value),
            Self::Add(..) | Self::NumKeys | Self::Delete(_) | Self::QueueLen(_) => Some(ReplyShape::Number),
            Self::Check(_) | Self::Wait(_) | Self::CancelWait | Self::Barrier(..) => Some(ReplyShape::Flag),
            Self::MultiGet(keys) => Some(ReplyShape::Values(keys.len())),
            Self::Ping(_) => Some(ReplyShape::Nonce),
            Self::QueuePop(_) => Some(ReplyShape::Popped),
            Self::ListKeys => Some(ReplyShape::Keys),
        }
    }

    fn opcode(&self) -> u8 {
        match self {
            Self::Validate(_) => 0,
            Self::Set(..) => 1,
            Self::CompareSet(..) => 2,
            Self::Get(_) => 3,
            Self::Add(..) => 4,
            Self::Check(_) => 5,
            Self::Wait(_) => 6,
            Self::NumKeys => 7,
            Self::Delete(_) => 8,
            Self::Append(..) => 9,
            Self::MultiGet(_) => 10,
            Self::MultiSet(_) => 11,
            Self::CancelWait => 12,
            Self::Ping(_) => 13,
            Self::QueuePush(..) => 14,
            Self::QueuePop(_) => 15,
            Self::QueueLen(_) => 16,
            Self::ListKeys => 17,
            Self::Barrier(..) => 18,
        }
    }

    /// The request of this number made of these fields; `None` for a number that [`plan`] does not know.
    fn from_fields(opcode: u8, fields: Fields) -> Option<Self> {
        let Fields { numbers, texts, .. } = fields;
        let number = numbers.first().copied().unwrap_or_default();
        if matches!(opcode, 5 | 6 | 10) {
            return Some(match opcode {
                5 => Self::Check(texts),
                6 => Self::Wait(texts),
                _ => Self::MultiGet(texts),
            });
        }
        let mut texts = texts.into_iter();
        if opcode == 11 {
            let mut pairs = Vec::with_capacity(texts.len() / 2);
            while let (Some(key), Some(value)) = (texts.next(), texts.next()) {
                pairs.push((key, value));
            }
            return Some(Self::MultiSet(pairs));
        }
        let mut next = || texts.next().unwrap_or_default();
        Some(match opcode {
            0 => Self::Validate(low_half(number)),
            1 => Self::Set(next(), next()),
            2 => Self::CompareSet(next(), next(), next()),
            3 => Self::Get(next()),
            4 => Self::Add(next(), number.cast_signed()),
            7 => Self::NumKeys,
            8 => Self::Delete(next()),
            9 => Self::Append(next(), next()),
            12 => Self::CancelWait,
            13 => Self::Ping(low_half(number)),
            14 => Self::QueuePush(next(), next()),
            15 => Self::QueuePop(next()),
            16 => Self::QueueLen(next()),
            17 => Self::ListKeys,
            18 => Self::Barrier(next(), number),
            _ => return None,
        })
    }
}

/// The fields of the request of this number.
fn plan(opcode: u8) -> Option<&'static [Part]> {
    use Part::{Key, Keys, Long, Pairs, Short, Value};
    Some(match opcode {
        0 | 13 => &[Short],
        1 | 9 | 14 => &[Key, Value],
        2 => &[Key, Value, Value],
        3 | 8 | 15 | 16 => &[Key],
        4 | 18 => &[Key, Long],
        5 | 6 | 10 => &[Keys],
        7 | 12 | 17 => &[],
        11 => &[Pairs],
        _ => return None,
    })
}

impl Reply {
    /// Appends the reply to `out`.
    pub fn encode(&self, out: &mut Vec<u8>) {
        match self {
            Self::Value(value) => put(out, value),
            Self::Values(values) => {
                for value in values {
                    put(out, value);
                }
            }
            Self::Keys(keys) => put_list(out, keys),
            Self::Number(number) => out.extend(number.to_le_bytes()),
            Self::Flag(flag) => out.push(*flag),
            Self::Nonce(nonce) => out.extend(nonce.to_le_bytes()),
            Self::Popped(None) => out.extend(0i64.to_le_bytes()),
            Self::Popped(Some(value)) => {
                out.extend(1i64.to_le_bytes());
                put(out, value);
            }
        }
    }
}

/// Cuts what clients send into requests.
#[derive(Debug, Default)]
pub struct RequestDecoder {
    limits: StoreLimits,
    under_way: Option<(u8, Fields)>,
}

impl RequestDecoder {
    /// A decoder at the start of a connection.
    pub fn new(limits: StoreLimits) -> Self {
        Self { limits, under_way: None }
    }

    /// Bytes of a request that has not come whole.
    pub fn kept(&self) -> usize {
        self.under_way.as_ref().map_or(0, |(_, fields)| fields.kept())
    }

    /// Takes from `input` what the next request needs, and returns it when it is whole.
    pub fn next(&mut self, input: &mut &[u8]) -> Result<Option<Request>, StoreWireError> {
        let (opcode, mut fields) = if let Some(under_way) = self.under_way.take() {
            under_way
        } else {
            let Some((&opcode, rest)) = input.split_first() else { return Ok(None) };
            *input = rest;
            let plan = plan(opcode).ok_or(StoreWireError::UnknownRequest(opcode))?;
            (opcode, Fields::new(plan, None))
        };
        if !fields.read(input, &self.limits)? {
            self.under_way = Some((opcode, fields));
            return Ok(None);
        }
        Request::from_fields(opcode, fields).map(Some).ok_or(StoreWireError::UnknownRequest(opcode))
    }
}

/// Reads one reply.
#[derive(Debug)]
pub struct ReplyDecoder {
    limits: StoreLimits,
    shape: ReplyShape,
    fields: Fields,
}

impl ReplyDecoder {
    /// A decoder of one reply of this shape.
    pub fn new(shape: ReplyShape, limits: StoreLimits) -> Self {
        let (plan, count): (&[Part], _) = match shape {
            ReplyShape::Value => (&[Part::Value], None),
            ReplyShape::Values(count) => (&[Part::Values], Some(count as u64)),
            ReplyShape::Keys => (&[Part::Keys], None),
            ReplyShape::Number | ReplyShape::Popped => (&[Part::Long], None),
            ReplyShape::Flag => (&[Part::Byte], None),
            ReplyShape::Nonce => (&[Part::Short], None),
        };
        Self { limits, shape, fields: Fields::new(plan, count) }
    }

    /// Takes from `input` what the reply needs, and returns it when it is whole.
    pub fn next(&mut self, input: &mut &[u8]) -> Result<Option<Reply>, StoreWireError> {
        if !self.fields.read(input, &self.limits)? {
            return Ok(None);
        }
        let number = self.fields.numbers.first().copied().unwrap_or_default();
        if self.shape == ReplyShape::Popped && number != 0 && self.fields.texts.is_empty() {
            self.fields.then(&[Part::Value]);
            return self.next(input);
        }
        let mut texts = mem::take(&mut self.fields.texts);
        Ok(Some(match self.shape {
            ReplyShape::Value => Reply::Value(texts.pop().unwrap_or_default()),
            ReplyShape::Values(_) => Reply::Values(texts),
            ReplyShape::Keys => Reply::Keys(texts),
            ReplyShape::Number => Reply::Number(number.cast_signed()),
            ReplyShape::Flag => Reply::Flag(number.to_le_bytes()[0]),
            ReplyShape::Nonce => Reply::Nonce(low_half(number)),
            ReplyShape::Popped => Reply::Popped(texts.pop()),
        }))
    }
}

fn put(out: &mut Vec<u8>, text: &[u8]) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text);
}

fn put_list(out: &mut Vec<u8>, texts: &[Vec<u8>]) {
    out.extend((texts.len() as u64).to_le_bytes());
    for text in texts {
        put(out, text);
    }
}

/// Of a field of four bytes, which has no others.
fn low_half(number: u64) -> u32 {
    let [a, b, c, d, ..] = number.to_le_bytes();
    u32::from_le_bytes([a, b, c, d])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn requests() -> Vec<Request> {
        let text = |text: &str| text.as_bytes().to_vec();
        vec![
            Request::Validate(MAGIC),
            Request::Set(text("k"), text("v")),
            Request::CompareSet(text("k"), text(""), text("w")),
            Request::Get(text("k")),
            Request::Add(text("n"), -3),
            Request::Check(vec![text("a"), text("b")]),
            Request::Wait(vec![]),
            Request::NumKeys,
            Request::Delete(text("k")),
            Request::Append(text("k"), text("!")),
            Request::MultiGet(vec![text("a")]),
            Request::MultiSet(vec![(text("a"), text("1")), (text(""), text(""))]),
            Request::CancelWait,
            Request::Ping(7),
            Request::QueuePush(text("q"), text("v")),
            Request::QueuePop(text("q")),
            Request::QueueLen(text("q")),
            Request::ListKeys,
            Request::Barrier(text("b"), 2),
        ]
    }

    fn decode(bytes: &[u8], step: usize) -> Result<Vec<Request>, StoreWireError> {
        let mut decoder = RequestDecoder::default();
        let mut found = Vec::new();
        for mut part in bytes.chunks(step) {
            while let Some(request) = decoder.next(&mut part)? {
                found.push(request);
            }
            assert!(part.is_empty());
        }
        Ok(found)
    }

    #[test]
    fn requests_read_as_they_are_written_in_any_split() {
        let mut bytes = Vec::new();
        for request in requests() {
            request.encode(&mut bytes);
        }

        for step in 1..=bytes.len() {
            assert_eq!(decode(&bytes, step).unwrap(), requests());
        }
    }

    #[test]
    fn what_is_kept_is_what_has_come_of_a_request() {
        let mut bytes = Vec::new();
        Request::Set(b"key".to_vec(), vec![0; 1000]).encode(&mut bytes);
        let mut decoder = RequestDecoder::default();

        decoder.next(&mut &bytes[..100]).unwrap();
        let partly = decoder.kept();
        decoder.next(&mut &bytes[100..]).unwrap();

        assert_eq!(partly, 100 - 1 - 8 - 8 + 2 * TEXT_COST);
        assert_eq!(decoder.kept(), 0);
    }

    #[test]
    fn replies_read_as_they_are_written_in_any_split() {
        for (shape, reply) in [
            (ReplyShape::Value, Reply::Value(b"value".to_vec())),
            (ReplyShape::Values(2), Reply::Values(vec![b"a".to_vec(), vec![]])),
            (ReplyShape::Values(0), Reply::Values(vec![])),
            (ReplyShape::Keys, Reply::Keys(vec![b"k".to_vec()])),
            (ReplyShape::Number, Reply::Number(-1)),
            (ReplyShape::Flag, Reply::Flag(READY)),
            (ReplyShape::Nonce, Reply::Nonce(u32::MAX)),
            (ReplyShape::Popped, Reply::Popped(None)),
            (ReplyShape::Popped, Reply::Popped(Some(vec![]))),
        ] {
            let mut bytes = Vec::new();
            reply.encode(&mut bytes);
            for step in 1..=bytes.len().max(1) {
                let mut decoder = ReplyDecoder::new(shape, StoreLimits::default());
                let mut read = if bytes.is_empty() { decoder.next(&mut &[][..]).unwrap() } else { None };
                for mut part in bytes.chunks(step) {
                    assert_eq!(read, None);
                    read = decoder.next(&mut part).unwrap();
                }
                assert_eq!(read.as_ref(), Some(&reply));
            }
        }
    }

    /// As observed on the wire of PyTorch 2.15.
    #[test]
    fn the_bytes_are_those_of_pytorch() {
        let mut bytes = Vec::new();
        Request::Validate(MAGIC).encode(&mut bytes);
        Request::Ping(0x6f70).encode(&mut bytes);
        Request::Add(b"init/".to_vec(), 1).encode(&mut bytes);

        let seen = b"\0\xce\xf7\x85<\rpo\0\0\x04\x05\0\0\0\0\0\0\0init/\x01\0\0\0\0\0\0\0";
        assert_eq!(bytes, seen);
    }

    #[test]
    fn what_is_too_long_or_unknown_is_an_error_before_it_has_come() {
        let mut long = vec![3];
        long.extend((8193u64).to_le_bytes());
        let mut many = vec![6];
        many.extend(u64::MAX.to_le_bytes());
        let mut pairs = vec![11];
        pairs.extend((128u64 << 10).to_le_bytes());
        for _ in 0..10 {
            put(&mut pairs, b"");
            put(&mut pairs, &vec![0; 8 << 20]);
        }

        assert_eq!(decode(&[19], 1), Err(StoreWireError::UnknownRequest(19)));
        assert_eq!(decode(&long, 99), Err(StoreWireError::TextTooLong { len: 8193, limit: 8192 }));
        let count = u64::MAX;
        assert_eq!(decode(&many, 99), Err(StoreWireError::TooManyKeys { count, limit: 128 << 10 }));
        let limit = 64 << 20;
        assert_eq!(decode(&pairs, pairs.len()), Err(StoreWireError::MessageTooLarge { limit }));
    }
}
