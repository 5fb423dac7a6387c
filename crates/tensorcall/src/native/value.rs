//! [`Value`]: plain data as it crosses between workers, whatever their language.

use std::fmt;

use super::bytes::Bytes;
use super::rref::RRef;
use super::tensor::Tensor;

/// Plain data that describes itself: what arguments and results are while they travel.
///
/// Functions usually take and return types of their own, which [`IntoValue`](crate::IntoValue) and
/// [`FromValue`](crate::FromValue) convert. A function that takes or returns a `Value` accepts anything.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Value {
    /// Nothing; Python's `None`.
    Nil,
    /// A truth value.
    Bool(bool),
    /// A whole number of 64 bits.
    Int(i64),
    /// A number of double precision.
    Float(f64),
    /// Text.
    Str(String),
    /// Bytes.
    Bytes(Bytes),
    /// A sequence that Python sees as a `list`.
    List(Vec<Self>),
    /// A sequence that Python sees as a `tuple`.
    Tuple(Vec<Self>),
    /// Pairs of key and value; Python's `dict`.
    Map(Vec<(Self, Self)>),
    /// A tensor.
    Tensor(Tensor),
    /// A reference to a value on some worker.
    RRef(RRef<Self>),
}

impl Value {
    /// The same value, for one that stays here: with copies of memory that was only lent.
    #[cfg(feature = "candle")]
    pub(crate) fn settled(mut self) -> crate::Result<Self> {
        self.settle()?;
        Ok(self)
    }

    #[cfg(feature = "candle")]
    fn settle(&mut self) -> crate::Result<()> {
        match self {
            Self::Tensor(tensor) => tensor.settle(),
            Self::List(items) | Self::Tuple(items) => items.iter_mut().try_for_each(Self::settle),
            Self::Map(pairs) => {
                pairs.iter_mut().flat_map(|(key, value)| [key, value]).try_for_each(Self::settle)
            }
            Self::Bytes(bytes) => bytes.settle(),
            _ => Ok(()),
        }
    }

    /// What kind of value this is, for people.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Nil => "nil",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) => "str",
            Self::Bytes(_) => "bytes",
            Self::List(_) => "list",
            Self::Tuple(_) => "tuple",
            Self::Map(_) => "map",
            Self::Tensor(_) => "tensor",
            Self::RRef(_) => "rref",
        }
    }
}

/// A value that does not fit a type, or the other way round; says where in a nested value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConversionError {
    text: String,
    /// From the inside out.
    path: Vec<String>,
}

impl ConversionError {
    /// An error that says `text`.
    pub fn new(text: impl Into<String>) -> Self {
        Self { text: text.into(), path: Vec::new() }
    }

    /// There was `found` where `expected` should be.
    pub fn expected(expected: impl fmt::Display, found: &Value) -> Self {
        Self::new(format!("expected {expected}, found {}", found.kind()))
    }

    /// The same error, which happened inside an item: `[3]` or `["key"]`.
    #[must_use]
    pub fn inside(mut self, item: impl fmt::Display) -> Self {
        self.path.push(format!("[{item}]"));
        self
    }
}

impl fmt::Display for ConversionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)?;
        if self.path.is_empty() {
            return Ok(());
        }
        f.write_str(", at ")?;
        self.path.iter().rev().try_for_each(|step| f.write_str(step))
    }
}

impl std::error::Error for ConversionError {}
