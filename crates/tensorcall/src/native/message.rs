//! Values into messages and out of them.

use std::collections::HashMap;
use std::sync::Arc;

use tensorcall_proto::wire::message::Encoding;
use tensorcall_proto::wire::tensor::TensorDesc;
use tensorcall_proto::wire::value::Exception;
use tensorcall_proto::wire::{Event, Limits, ValueReader, ValueWriter, WireError};

use super::agent::Shared;
use super::bytes::Bytes;
use super::rref::RRef;
use super::tensor::Tensor;
use super::value::{ConversionError, Value};
use crate::autograd::{Graph, Slot};
use crate::body::{Body, Received};
use crate::buffer::Buffer;
use crate::error::{Error, Result};

/// The arguments of a call: a tuple of them, and no keywords.
pub(crate) fn pack_arguments(arguments: &[Value], limits: &Limits) -> Result<Packed> {
    pack_with(limits, |packer| {
        packer.tuple(2)?;
        packer.tuple(arguments.len())?;
        for (number, argument) in arguments.iter().enumerate() {
            packer.value(argument, 2).map_err(|error| error.about(&format!("argument {}", number + 1)))?;
        }
        packer.writer().map(0);
        packer.check_items()
    })
}

/// A result.
pub(crate) fn pack(value: &Value, limits: &Limits) -> Result<Packed> {
    pack_with(limits, |packer| packer.value(value, 0))
}

/// An error of a function.
pub(crate) fn pack_exception(exception: &Exception) -> Body {
    let mut payload = Vec::new();
    let Exception { classes, message, origin } = exception;
    ValueWriter::new(&mut payload).exception(classes, message, origin);
    Body::of(payload)
}

/// A message, and where those of its tensors are in graphs that are there, in their order.
pub(crate) type Packed = (Body, Vec<Graph>);

/// Room for a few plain arguments.
const USUAL_PAYLOAD: usize = 64;

fn pack_with(limits: &Limits, write: impl FnOnce(&mut Packer<'_>) -> Result<()>) -> Result<Packed> {
    let body = Body::of(Vec::with_capacity(USUAL_PAYLOAD));
    let mut packer = Packer { limits, items: 0, body, graphs: Vec::new() };
    write(&mut packer)?;
    Ok((packer.body, packer.graphs))
}

struct Packer<'a> {
    limits: &'a Limits,
    items: u64,
    body: Body,
    graphs: Vec<Graph>,
}

impl Packer<'_> {
    /// Writes one value. Recurses as deep as receivers let containers nest.
    fn value(&mut self, value: &Value, depth: u16) -> Result<()> {
        match value {
            Value::Nil => self.writer().nil(),
            Value::Bool(truth) => self.writer().bool(*truth),
            Value::Int(number) => self.writer().int(*number),
            Value::Float(number) => self.writer().float(*number),
            Value::Str(text) => self.writer().str(text),
            Value::Bytes(bytes) if bytes.len() >= INSERTED_FROM => {
                self.writer().begin_bytes(bytes.len());
                self.body.inserted.push((self.body.payload.len(), bytes.to_region()));
            }
            Value::Bytes(bytes) => self.writer().bytes(bytes),
            Value::Tensor(tensor) => self.tensor(tensor)?,
            Value::RRef(rref) => self.rref(rref)?,
            Value::Tuple(items) => {
                self.tuple(items.len())?;
                return self.items(items, depth);
            }
            Value::List(items) => {
                self.writer().list(items.len());
                return self.items(items, depth);
            }
            Value::Map(pairs) => {
                self.writer().map(pairs.len());
                return self.items(pairs.iter().flat_map(|(key, value)| [key, value]), depth);
            }
        }
        self.check_items()
    }

    fn items<'v>(&mut self, items: impl IntoIterator<Item = &'v Value>, depth: u16) -> Result<()> {
        if depth >= self.limits.max_depth {
            return Err(unfit(&WireError::ValueDepth { limit: self.limits.max_depth }));
        }
        items.into_iter().try_for_each(|item| self.value(item, depth + 1))?;
        self.check_items()
    }

    fn tuple(&mut self, len: usize) -> Result<()> {
        self.writer().tuple(len);
        self.check_items()
    }

    fn tensor(&mut self, tensor: &Tensor) -> Result<()> {
        let index = place(self.body.tensors.len())?;
        let (mut desc, bytes) = tensor.describe(place(self.body.buffers.len())?)?;
        if let Some(graph) = tensor.graph() {
            desc.requires_grad = true;
            self.graphs.push(graph.clone());
        }
        self.body.tensors.push(desc);
        self.body.buffers.push(bytes.to_region());
        self.writer().tensor(index);
        Ok(())
    }

    fn rref(&mut self, rref: &RRef<Value>) -> Result<()> {
        let index = place(self.body.rrefs.len())?;
        self.body.rrefs.push(rref.engine().clone());
        self.writer().rref(index);
        Ok(())
    }

    /// Each item is written by a writer of its own, so that they are counted here.
    fn writer(&mut self) -> ValueWriter<'_> {
        self.items += 1;
        ValueWriter::new(&mut self.body.payload)
    }

    fn check_items(&self) -> Result<()> {
        let limit = self.limits.max_items;
        if self.items <= limit.into() { Ok(()) } else { Err(unfit(&WireError::ValueItems { limit })) }
    }
}

fn place(index: usize) -> Result<u32> {
    u32::try_from(index).map_err(|_| Error::usage("a message has too many tensors or references"))
}

fn unfit(error: &WireError) -> Error {
    Error::usage(format!("a value cannot be sent: {error}"))
}

/// The arguments that a call brought.
pub(crate) fn unpack_arguments(
    encoding: Encoding,
    body: Received,
    shared: &Arc<Shared>,
) -> Result<Vec<Value>, ConversionError> {
    unpack_with(encoding, body, shared, |unpacker| {
        let no_arguments = || ConversionError::new("the payload is not arguments");
        let Event::Tuple(2) = unpacker.next()? else { return Err(no_arguments()) };
        let Event::Tuple(count) = unpacker.next()? else { return Err(no_arguments()) };
        let arguments = unpacker.values(count)?;
        match unpacker.next()? {
            Event::Map(0) => Ok(arguments),
            Event::Map(_) => {
                Err(ConversionError::new("functions of native workers have no keyword arguments"))
            }
            _ => Err(no_arguments()),
        }
    })
}

/// The value that a message brought.
pub(crate) fn unpack(
    encoding: Encoding,
    body: Received,
    shared: &Arc<Shared>,
) -> Result<Value, ConversionError> {
    #[expect(
        clippy::redundant_closure_for_method_calls,
        reason = "the method is of one lifetime, not of all"
    )]
    unpack_with(encoding, body, shared, |unpacker| unpacker.value())
}

fn unpack_with<T>(
    encoding: Encoding,
    body: Received,
    shared: &Arc<Shared>,
    read: impl FnOnce(&mut Unpacker<'_>) -> Result<T, ConversionError>,
) -> Result<T, ConversionError> {
    if encoding != Encoding::Value {
        return Err(ConversionError::new("it is pickled, which only Python reads"));
    }
    let Received { payload, tensors, buffers, rrefs, autograd } = body;
    let slots = shared.slots(autograd, &tensors);
    let payload = Payload::of(payload);
    let buffers = buffers.into_iter().map(Bytes::from_buffer).collect();
    let count = |len: usize| u32::try_from(len).unwrap_or(u32::MAX);
    let reader = ValueReader::new(payload.bytes(), &shared.limits)
        .with_tensors(count(tensors.len()))
        .with_rrefs(count(rrefs.len()));
    let parts = Parts { payload: &payload, tensors, slots, buffers, rrefs, shared };
    let mut unpacker = Unpacker { reader, parts };
    let value = read(&mut unpacker)?;
    unpacker.reader.finish().map_err(|error| malformed(&error))?;
    Ok(value)
}

/// The exception that a reply brought, if it is one that can be read.
pub(crate) fn unpack_exception(encoding: Encoding, body: &Received) -> Option<Exception> {
    if encoding != Encoding::Value {
        return None;
    }
    let mut reader = ValueReader::new(body.payload.as_ref(), &Limits::default());
    let Ok(Event::Exception { classes, message, origin }) = reader.next() else { return None };
    Some(Exception { classes: classes.to_owned(), message: message.to_owned(), origin: origin.to_owned() })
}

/// What a payload lies in.
enum Payload {
    /// No part of it is worth keeping it for.
    Small(Buffer),
    Large(Arc<Buffer>),
}

impl Payload {
    fn of(buffer: Buffer) -> Self {
        if buffer.len() < SHARED_FROM { Self::Small(buffer) } else { Self::Large(Arc::new(buffer)) }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Small(buffer) => buffer.as_ref(),
            Self::Large(buffer) => (**buffer).as_ref(),
        }
    }
}

struct Unpacker<'a> {
    reader: ValueReader<'a>,
    parts: Parts<'a>,
}

struct Parts<'a> {
    payload: &'a Payload,
    tensors: Vec<TensorDesc>,
    /// Of those that are in a graph, by their place in the table.
    slots: HashMap<u32, Arc<Slot>>,
    buffers: Vec<Bytes>,
    rrefs: Vec<crate::rref::RRef>,
    shared: &'a Arc<Shared>,
}

impl<'a> Unpacker<'a> {
    /// Reads one value. Recurses as deep as the reader lets containers nest, and reserves by announced
    /// lengths, whose sum the reader bounds by the input (NET-2).
    fn value(&mut self) -> Result<Value, ConversionError> {
        Ok(match self.next()? {
            Event::Nil => Value::Nil,
            Event::Bool(truth) => Value::Bool(truth),
            Event::Int(number) => Value::Int(number),
            Event::Float(number) => Value::Float(number),
            Event::Str(text) => Value::Str(text.to_owned()),
            Event::Bytes(bytes) => Value::Bytes(self.parts.bytes(bytes)),
            Event::List(len) => Value::List(self.values(len)?),
            Event::Tuple(len) => Value::Tuple(self.values(len)?),
            Event::Map(len) => Value::Map(self.pairs(len)?),
            Event::Tensor(index) => Value::Tensor(self.parts.tensor(index)?),
            Event::RRef(index) => Value::RRef(self.parts.rref(index)?),
            Event::Exception { classes, message, .. } => {
                let text = format!("an exception is no argument or result: {classes}: {message}");
                return Err(ConversionError::new(text));
            }
            Event::Pickle(_) => {
                return Err(ConversionError::new("a part is pickled, which only Python reads"));
            }
        })
    }

    fn next(&mut self) -> Result<Event<'a>, ConversionError> {
        self.reader.next().map_err(|error| malformed(&error))
    }

    fn values(&mut self, len: usize) -> Result<Vec<Value>, ConversionError> {
        // An item takes many times the memory of its shortest encoding: beyond some, let it grow.
        let mut values = Vec::with_capacity(len.min(1024));
        for _ in 0..len {
            values.push(self.value()?);
        }
        Ok(values)
    }

    fn pairs(&mut self, len: usize) -> Result<Vec<(Value, Value)>, ConversionError> {
        let mut pairs = Vec::with_capacity(len.min(1024));
        for _ in 0..len {
            pairs.push((self.value()?, self.value()?));
        }
        Ok(pairs)
    }
}

impl Parts<'_> {
    /// Bytes stay where they are if they are most of what came; keeping a few does not keep all.
    fn bytes(&self, bytes: &[u8]) -> Bytes {
        let all = self.payload.bytes();
        let Payload::Large(payload) = self.payload else { return Bytes::from(bytes.to_vec()) };
        if bytes.len() < SHARED_FROM || bytes.len() < all.len() / 2 {
            return Bytes::from(bytes.to_vec());
        }
        let start = bytes.as_ptr().addr() - all.as_ptr().addr();
        Bytes::from_shared(payload).slice(start..start + bytes.len())
    }

    fn tensor(&self, index: u32) -> Result<Tensor, ConversionError> {
        let desc = usize::try_from(index).ok().and_then(|index| self.tensors.get(index));
        let place = desc.and_then(|desc| usize::try_from(desc.buffer).ok());
        let buffer = place.and_then(|place| self.buffers.get(place));
        let (Some(desc), Some(buffer)) = (desc, buffer) else {
            return Err(ConversionError::new("a value names a tensor that is not there"));
        };
        let tensor = Tensor::received(desc, buffer)?;
        Ok(match self.slots.get(&index) {
            Some(slot) => tensor.with_graph(Graph::Received(Arc::clone(slot))),
            None => tensor,
        })
    }

    fn rref(&self, index: u32) -> Result<RRef<Value>, ConversionError> {
        let rref = usize::try_from(index).ok().and_then(|index| self.rrefs.get(index));
        let missing = || ConversionError::new("a value names a reference that is not there");
        rref.map(|rref| RRef::new(rref.clone(), Arc::clone(self.shared))).ok_or_else(missing)
    }
}

fn malformed(error: &WireError) -> ConversionError {
    ConversionError::new(format!("malformed value: {error}"))
}

/// Bytes below this length are copied into the message: a copy costs less than one more piece to send.
const INSERTED_FROM: usize = 16 << 10;
/// Bytes below this length are copied out of the message that brought them.
const SHARED_FROM: usize = 4096;

impl Error {
    /// The same error, about `what`.
    pub(crate) fn about(&self, what: &str) -> Self {
        Self::new(self.kind(), format!("{what}: {self}"))
    }
}

/// What a body looks like to whoever receives it, in memory of its own: for values that stay.
#[cfg(test)]
fn received(body: &Body) -> Received {
    body.receive().unwrap()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::native::convert::IntoValue;

    fn shared() -> Arc<Shared> {
        Arc::new(Shared::default())
    }

    fn trip(value: impl IntoValue) -> Value {
        let (body, _) = pack(&value.into_value().unwrap(), &Limits::default()).unwrap();
        unpack(Encoding::Value, received(&body), &shared()).unwrap()
    }

    #[test]
    fn values_arrive_as_they_were() {
        let tensor = Tensor::from_vec(vec![1.0f32, 2.0], &[2]).unwrap();
        let value = (1, "two", vec![3.0], Some([4u8]), tensor);

        let debug = format!("{:?}", value.clone().into_value().unwrap());

        assert_eq!(format!("{:?}", trip(value)), debug);
    }

    #[test]
    fn large_bytes_stay_where_they_were_received() {
        let (body, _) = pack(&vec![7u8; 10_000].into_value().unwrap(), &Limits::default()).unwrap();
        let received = received(&body);
        let (start, len) = (received.payload.as_ptr().addr(), received.payload.len());

        let Ok(Value::Bytes(bytes)) = unpack(Encoding::Value, received, &shared()) else { panic!() };

        assert!((start..start + len).contains(&bytes.as_ptr().addr()));
        assert_eq!(bytes.len(), 10_000);
    }

    #[test]
    fn what_a_receiver_would_refuse_is_not_sent() {
        let deep = (0..64).fold(Value::Nil, |inner, _| Value::List(vec![inner]));
        let limits = Limits { max_items: 3, ..Limits::default() };

        assert!(pack(&deep, &Limits::default()).is_ok());
        assert!(pack(&Value::List(vec![deep]), &Limits::default()).is_err());
        assert!(pack(&vec![1, 2].into_value().unwrap(), &limits).is_ok());
        assert!(pack(&vec![1, 2, 3].into_value().unwrap(), &limits).is_err());
    }

    #[test]
    fn pickles_and_keywords_are_refused_by_name() {
        let text = |error: ConversionError| error.to_string();
        let pickle = received(&Body::of(vec![0x80]));
        assert!(text(unpack(Encoding::Pickle, pickle, &shared()).unwrap_err()).contains("pickled"));

        let keywords = Value::Map(vec![(Value::Str("x".into()), Value::Int(1))]);
        let call = Value::Tuple(vec![Value::Tuple(vec![]), keywords]);
        let (body, _) = pack(&call, &Limits::default()).unwrap();
        let error = unpack_arguments(Encoding::Value, received(&body), &shared()).unwrap_err();
        assert!(text(error).contains("keyword"));
    }
}
