//! Plain data that describes itself, readable from Python and Rust alike.
//!
//! A value is a tag byte and what the tag calls for; containers announce how many items follow.
//! [`ValueWriter`] and [`ValueReader`] go item by item without building anything, which is how
//! the Python extension uses them. [`Value`] is the same as a tree, for Rust.

mod reader;
mod writer;

pub use reader::{Event, ValueReader};
pub use writer::ValueWriter;

use super::error::WireError;
use super::limits::Limits;

/// The tag bytes. Numbers are for ever.
mod tag {
    pub(super) const NIL: u8 = 0;
    pub(super) const FALSE: u8 = 1;
    pub(super) const TRUE: u8 = 2;
    pub(super) const INT: u8 = 3;
    pub(super) const FLOAT: u8 = 4;
    pub(super) const STR: u8 = 5;
    pub(super) const BYTES: u8 = 6;
    pub(super) const LIST: u8 = 7;
    pub(super) const TUPLE: u8 = 8;
    pub(super) const MAP: u8 = 9;
    pub(super) const TENSOR: u8 = 10;
    pub(super) const RREF: u8 = 11;
    pub(super) const EXCEPTION: u8 = 12;
    pub(super) const PICKLE: u8 = 13;
}

/// Plain data as a tree.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Nothing; Python's `None`.
    Nil,
    /// A truth value.
    Bool(bool),
    /// A whole number of 64 bits.
    Int(i64),
    /// A number of IEEE 754 double precision.
    Float(f64),
    /// Text.
    Str(String),
    /// Bytes.
    Bytes(Vec<u8>),
    /// A sequence that Python sees as a `list`.
    List(Vec<Self>),
    /// A sequence that Python sees as a `tuple`.
    Tuple(Vec<Self>),
    /// Pairs of key and value in insertion order; Python's `dict`.
    Map(Vec<(Self, Self)>),
    /// A tensor of the same message, by its place in the descriptor's table.
    Tensor(u32),
    /// A remote reference of the same message, by its place in the descriptor's table.
    RRef(u32),
    /// What a function raised.
    Exception(Box<Exception>),
    /// A Python pickle, opaque to this crate.
    Pickle(Vec<u8>),
}

/// What a function raised, as plain data: for who cannot read the exception itself, or has none.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Exception {
    /// Its class and those that it derives from, each as `module:qualified.name`, parted by spaces, the most
    /// special one first. A receiver takes the first that it knows.
    pub classes: String,
    /// What it says.
    pub message: String,
    /// Where it was raised, for people: worker, function and, as far as it is known, the traceback.
    pub origin: String,
}

impl Value {
    /// The encoded value.
    ///
    /// # Errors
    ///
    /// [`WireError::ValueDepth`] or [`WireError::ValueItems`] if a receiver with these `limits`
    /// would refuse it.
    pub fn encode(&self, limits: &Limits) -> Result<Vec<u8>, WireError> {
        let mut out = Vec::new();
        let mut writer = ValueWriter::new(&mut out);
        let mut todo = vec![(self, 0)];
        while let Some((value, depth)) = todo.pop() {
            if value.is_container() && depth >= limits.max_depth {
                return Err(WireError::ValueDepth { limit: limits.max_depth });
            }
            value.write_head(&mut writer);
            if writer.items() > limits.max_items.into() {
                return Err(WireError::ValueItems { limit: limits.max_items });
            }
            match value {
                Self::List(items) | Self::Tuple(items) => {
                    todo.extend(items.iter().rev().map(|item| (item, depth + 1)));
                }
                Self::Map(pairs) => {
                    todo.extend(pairs.iter().rev().flat_map(|(k, v)| [(v, depth + 1), (k, depth + 1)]));
                }
                _ => {}
            }
        }
        Ok(out)
    }

    /// Reads one value that takes up all of `bytes`.
    ///
    /// # Errors
    ///
    /// The [`WireError`] names the first thing that is wrong.
    pub fn decode(bytes: &[u8], limits: &Limits) -> Result<Self, WireError> {
        let mut reader = ValueReader::new(bytes, limits);
        let mut open: Vec<Partial> = Vec::new();
        loop {
            let mut done = match Partial::begin(reader.next()?) {
                Ok(value) => Some(value),
                Err(partial) => {
                    open.push(partial);
                    None
                }
            };
            // A finished value completes its container, which may complete the next, and so on.
            loop {
                if let Some(value) = done.take() {
                    match open.last_mut() {
                        Some(parent) => parent.items.push(value),
                        None => return reader.finish().map(|()| value),
                    }
                }
                match open.pop_if(|partial| partial.items.len() == partial.len) {
                    Some(full) => done = Some(full.finish()),
                    None => break,
                }
            }
        }
    }

    const fn is_container(&self) -> bool {
        matches!(self, Self::List(_) | Self::Tuple(_) | Self::Map(_))
    }

    /// Writes this value, of a container only what comes before its items.
    fn write_head(&self, writer: &mut ValueWriter<'_>) {
        match self {
            Self::Nil => writer.nil(),
            Self::Bool(value) => writer.bool(*value),
            Self::Int(value) => writer.int(*value),
            Self::Float(value) => writer.float(*value),
            Self::Str(text) => writer.str(text),
            Self::Bytes(bytes) => writer.bytes(bytes),
            Self::List(items) => writer.list(items.len()),
            Self::Tuple(items) => writer.tuple(items.len()),
            Self::Map(pairs) => writer.map(pairs.len()),
            Self::Tensor(index) => writer.tensor(*index),
            Self::RRef(index) => writer.rref(*index),
            Self::Exception(raised) => writer.exception(&raised.classes, &raised.message, &raised.origin),
            Self::Pickle(bytes) => writer.pickle(bytes),
        }
    }
}

/// A container whose items are still being read.
struct Partial {
    kind: Kind,
    items: Vec<Value>,
    /// How many items there will be; keys and values of a map count apart.
    len: usize,
}

#[derive(Clone, Copy)]
enum Kind {
    List,
    Tuple,
    Map,
}

impl Partial {
    /// A leaf is `Ok`, a container that waits for its items is `Err`.
    fn begin(event: Event<'_>) -> Result<Value, Self> {
        let (kind, len) = match event {
            Event::Nil => return Ok(Value::Nil),
            Event::Bool(value) => return Ok(Value::Bool(value)),
            Event::Int(value) => return Ok(Value::Int(value)),
            Event::Float(value) => return Ok(Value::Float(value)),
            Event::Str(text) => return Ok(Value::Str(text.to_owned())),
            Event::Bytes(bytes) => return Ok(Value::Bytes(bytes.to_vec())),
            Event::Tensor(index) => return Ok(Value::Tensor(index)),
            Event::RRef(index) => return Ok(Value::RRef(index)),
            Event::Exception { classes, message, origin } => {
                let [classes, message, origin] = [classes, message, origin].map(str::to_owned);
                return Ok(Value::Exception(Box::new(Exception { classes, message, origin })));
            }
            Event::Pickle(bytes) => return Ok(Value::Pickle(bytes.to_vec())),
            Event::List(len) => (Kind::List, len),
            Event::Tuple(len) => (Kind::Tuple, len),
            Event::Map(len) => (Kind::Map, 2 * len),
        };
        // The reader bounds what all containers announce together by the input, but an item takes
        // 32 times the memory that its shortest encoding does: beyond some, let it grow.
        Err(Self { kind, items: Vec::with_capacity(len.min(1024)), len })
    }

    fn finish(self) -> Value {
        match self.kind {
            Kind::List => Value::List(self.items),
            Kind::Tuple => Value::Tuple(self.items),
            Kind::Map => {
                let mut items = self.items.into_iter();
                let pairs = std::iter::from_fn(|| items.next().zip(items.next()));
                Value::Map(pairs.collect())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Value {
        Value::Tuple(vec![
            Value::Nil,
            Value::List(vec![Value::Bool(true), Value::Int(-5), Value::List(vec![])]),
            Value::Map(vec![
                (Value::Str("x".into()), Value::Float(1.5)),
                (Value::Int(1), Value::Map(vec![])),
            ]),
            Value::Bytes(vec![1, 2]),
            Value::Tensor(3),
            Value::RRef(7),
            Value::Exception(Box::new(Exception {
                classes: "a:E builtins:ValueError".into(),
                message: "n\u{f6}".into(),
                origin: String::new(),
            })),
            Value::Pickle(vec![0x80]),
        ])
    }

    /// `depth` lists around nothing.
    fn nested(depth: usize) -> Value {
        (0..depth).fold(Value::Nil, |inner, _| Value::List(vec![inner]))
    }

    #[test]
    fn tree_survives_the_round_trip() {
        let limits = Limits::default();

        let bytes = sample().encode(&limits).unwrap();

        assert_eq!(Value::decode(&bytes, &limits), Ok(sample()));
    }

    #[test]
    fn bits_of_a_nan_are_kept() {
        let bits = 0x7ff8_0000_dead_beef;
        let limits = Limits::default();

        let bytes = Value::Float(f64::from_bits(bits)).encode(&limits).unwrap();

        let Ok(Value::Float(back)) = Value::decode(&bytes, &limits) else { panic!("no float") };
        assert_eq!(back.to_bits(), bits);
    }

    #[test]
    fn sender_and_receiver_stop_at_the_same_depth() {
        let limits = Limits { max_depth: 8, ..Limits::default() };
        let deep = nested(9).encode(&Limits::default()).unwrap();

        assert!(nested(8).encode(&limits).is_ok());
        assert_eq!(nested(9).encode(&limits), Err(WireError::ValueDepth { limit: 8 }));
        assert_eq!(Value::decode(&deep, &limits), Err(WireError::ValueDepth { limit: 8 }));
    }

    #[test]
    fn sender_and_receiver_stop_at_the_same_number_of_items() {
        let bytes = sample().encode(&Limits::default()).unwrap();

        for max_items in 0..40 {
            let limits = Limits { max_items, ..Limits::default() };
            assert_eq!(
                sample().encode(&limits).is_ok(),
                Value::decode(&bytes, &limits).is_ok(),
                "{max_items}"
            );
        }
    }

    #[test]
    fn bytes_after_the_value_are_refused() {
        assert_eq!(
            Value::decode(&[7, 0, 0], &Limits::default()),
            Err(WireError::Trailing { what: "value", len: 1 })
        );
    }

    #[test]
    fn no_bytes_are_no_value() {
        assert_eq!(Value::decode(&[], &Limits::default()), Err(WireError::ValueTruncated));
    }
}
