//! [`IntoValue`] and [`FromValue`]: which types arguments and results may have.
//!
//! | Rust | travels as | Python sees |
//! |---|---|---|
//! | `()`, `None` | nil | `None` |
//! | `bool` | bool | `bool` |
//! | `i8`..`i64`, `u8`..`u64`, `isize`, `usize` | int, if it fits 64 bits with sign | `int` |
//! | `f32`, `f64` | float | `float` |
//! | `String`, `&str`, `char` | str | `str` |
//! | [`Bytes`], `Vec<u8>`, `&[u8]`, `[u8; N]` | bytes | `bytes` |
//! | `Vec<T>`, `VecDeque<T>`, `&[T]`, `[T; N]` | list | `list` |
//! | tuples of 1 to 12 items | tuple | `tuple` |
//! | `HashMap`, `BTreeMap` | map | `dict` |
//! | `Option<T>`, `Box<T>`, `Arc<T>` | as `T` | |
//! | [`Tensor`] | tensor | `torch.Tensor` |
//! | [`RRef<T>`](crate::RRef) | reference | `RRef` |
//! | [`Value`] | as it is | |
//! | [`Serde<T>`](crate::Serde) | maps, lists and plain values | `dict`, `list`, ... |

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::hash::{BuildHasher, Hash};
use std::sync::Arc;

use super::bytes::Bytes;
use super::tensor::Tensor;
use super::value::{ConversionError, Value};

type Result<T> = std::result::Result<T, ConversionError>;

/// A type that arguments and results may have on their way out.
///
/// Implement it for a type of your own in terms of one that is there, or wrap it in
/// [`Serde`](crate::Serde).
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be sent to another worker",
    note = "wrap types that implement `serde::Serialize` in `tensorcall::Serde`, results that are to stay on \
            their worker in `tensorcall::Keep`, or implement `IntoValue`"
)]
pub trait IntoValue: Sized {
    /// This as a value.
    ///
    /// # Errors
    ///
    /// If a value cannot express it, such as a number beyond 64 bits.
    fn into_value(self) -> Result<Value>;

    /// Several of these. A list, but bytes are `bytes`.
    #[doc(hidden)]
    fn many_into_value(items: impl ExactSizeIterator<Item = Self>) -> Result<Value> {
        let item = |(index, item): (usize, Self)| item.into_value().map_err(|error| error.inside(index));
        items.enumerate().map(item).collect::<Result<_>>().map(Value::List)
    }
}

/// A type that arguments and results may have on their way in.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be received from another worker",
    note = "wrap types that implement `serde::de::DeserializeOwned` in `tensorcall::Serde`, or implement \
            `FromValue`; references are not received, take an owned type"
)]
pub trait FromValue: Sized {
    /// The value as this type.
    ///
    /// # Errors
    ///
    /// If the value does not fit.
    fn from_value(value: Value) -> Result<Self>;

    /// Several of these.
    #[doc(hidden)]
    fn many_from_value(value: Value) -> Result<Vec<Self>> {
        let item = |(index, item)| Self::from_value(item).map_err(|error| error.inside(index));
        match value {
            Value::List(items) | Value::Tuple(items) => items.into_iter().enumerate().map(item).collect(),
            other => Err(ConversionError::expected("list", &other)),
        }
    }
}

impl IntoValue for Value {
    fn into_value(self) -> Result<Value> {
        Ok(self)
    }
}

impl FromValue for Value {
    fn from_value(value: Value) -> Result<Self> {
        Ok(value)
    }
}

/// Types that are one variant of a value.
macro_rules! variants {
    ($($type:ty, $name:literal: $variant:ident;)*) => {$(
        impl IntoValue for $type {
            fn into_value(self) -> Result<Value> {
                Ok(Value::$variant(self))
            }
        }

        impl FromValue for $type {
            fn from_value(value: Value) -> Result<Self> {
                match value {
                    Value::$variant(inner) => Ok(inner),
                    other => Err(ConversionError::expected($name, &other)),
                }
            }
        }
    )*};
}

variants! {
    bool, "bool": Bool;
    String, "str": Str;
    Tensor, "tensor": Tensor;
}

impl IntoValue for () {
    fn into_value(self) -> Result<Value> {
        Ok(Value::Nil)
    }
}

impl FromValue for () {
    fn from_value(value: Value) -> Result<Self> {
        match value {
            Value::Nil => Ok(()),
            other => Err(ConversionError::expected("nil", &other)),
        }
    }
}

macro_rules! integers {
    ($($type:ident)*) => {$(
        impl IntoValue for $type {
            fn into_value(self) -> Result<Value> {
                let number = i64::try_from(self);
                number.map(Value::Int).map_err(|_| ConversionError::new(format!("{self} does not fit 64 bits with sign")))
            }
        }

        impl FromValue for $type {
            fn from_value(value: Value) -> Result<Self> {
                integer(&value, stringify!($type))
            }
        }
    )*};
}

integers! { i8 i16 i32 i64 isize u16 u32 u64 usize }

fn integer<T: TryFrom<i64>>(value: &Value, name: &str) -> Result<T> {
    let &Value::Int(number) = value else {
        return Err(ConversionError::expected(format_args!("int ({name})"), value));
    };
    number.try_into().map_err(|_| ConversionError::new(format!("{number} is out of range for {name}")))
}

impl IntoValue for u8 {
    fn into_value(self) -> Result<Value> {
        Ok(Value::Int(self.into()))
    }

    fn many_into_value(items: impl ExactSizeIterator<Item = Self>) -> Result<Value> {
        Ok(Value::Bytes(items.collect::<Vec<u8>>().into()))
    }
}

impl FromValue for u8 {
    fn from_value(value: Value) -> Result<Self> {
        integer(&value, "u8")
    }

    fn many_from_value(value: Value) -> Result<Vec<Self>> {
        match value {
            Value::Bytes(bytes) => Ok(bytes.to_vec()),
            other => Err(ConversionError::expected("bytes", &other)),
        }
    }
}

impl IntoValue for f64 {
    fn into_value(self) -> Result<Value> {
        Ok(Value::Float(self))
    }
}

/// Whole numbers count too, as in Python.
impl FromValue for f64 {
    fn from_value(value: Value) -> Result<Self> {
        match value {
            Value::Float(number) => Ok(number),
            #[expect(clippy::cast_precision_loss, reason = "as Python's float(int)")]
            Value::Int(number) => Ok(number as Self),
            other => Err(ConversionError::expected("float", &other)),
        }
    }
}

impl IntoValue for f32 {
    fn into_value(self) -> Result<Value> {
        Ok(Value::Float(self.into()))
    }
}

impl FromValue for f32 {
    #[expect(clippy::cast_possible_truncation, reason = "numbers travel in double precision")]
    fn from_value(value: Value) -> Result<Self> {
        f64::from_value(value).map(|number| number as Self)
    }
}

impl IntoValue for char {
    fn into_value(self) -> Result<Value> {
        Ok(Value::Str(self.into()))
    }
}

impl FromValue for char {
    fn from_value(value: Value) -> Result<Self> {
        let text = String::from_value(value)?;
        text.parse().map_err(|_| ConversionError::new(format!("{text:?} is not one character")))
    }
}

impl IntoValue for &str {
    fn into_value(self) -> Result<Value> {
        Ok(Value::Str(self.to_owned()))
    }
}

impl IntoValue for &String {
    fn into_value(self) -> Result<Value> {
        Ok(Value::Str(self.clone()))
    }
}

impl IntoValue for &Tensor {
    fn into_value(self) -> Result<Value> {
        Ok(Value::Tensor(self.clone()))
    }
}

impl IntoValue for &Bytes {
    fn into_value(self) -> Result<Value> {
        Ok(Value::Bytes(self.clone()))
    }
}

impl IntoValue for Bytes {
    fn into_value(self) -> Result<Value> {
        Ok(Value::Bytes(self))
    }
}

impl FromValue for Bytes {
    fn from_value(value: Value) -> Result<Self> {
        match value {
            Value::Bytes(bytes) => Ok(bytes),
            other => Err(ConversionError::expected("bytes", &other)),
        }
    }
}

impl<T: IntoValue> IntoValue for Option<T> {
    fn into_value(self) -> Result<Value> {
        self.map_or(Ok(Value::Nil), T::into_value)
    }
}

impl<T: FromValue> FromValue for Option<T> {
    fn from_value(value: Value) -> Result<Self> {
        if let Value::Nil = value { Ok(None) } else { T::from_value(value).map(Some) }
    }
}

impl<T: IntoValue> IntoValue for Box<T> {
    fn into_value(self) -> Result<Value> {
        (*self).into_value()
    }
}

impl<T: FromValue> FromValue for Box<T> {
    fn from_value(value: Value) -> Result<Self> {
        T::from_value(value).map(Self::new)
    }
}

impl<T: IntoValue + Clone> IntoValue for Arc<T> {
    fn into_value(self) -> Result<Value> {
        Self::unwrap_or_clone(self).into_value()
    }
}

impl<T: FromValue> FromValue for Arc<T> {
    fn from_value(value: Value) -> Result<Self> {
        T::from_value(value).map(Self::new)
    }
}

impl<T: IntoValue> IntoValue for Vec<T> {
    fn into_value(self) -> Result<Value> {
        T::many_into_value(self.into_iter())
    }
}

impl<T: FromValue> FromValue for Vec<T> {
    fn from_value(value: Value) -> Result<Self> {
        T::many_from_value(value)
    }
}

impl<T: IntoValue> IntoValue for VecDeque<T> {
    fn into_value(self) -> Result<Value> {
        T::many_into_value(self.into_iter())
    }
}

impl<T: FromValue> FromValue for VecDeque<T> {
    fn from_value(value: Value) -> Result<Self> {
        T::many_from_value(value).map(Self::from)
    }
}

impl<T: IntoValue + Clone> IntoValue for &[T] {
    fn into_value(self) -> Result<Value> {
        T::many_into_value(self.iter().cloned())
    }
}

impl<T: IntoValue + Clone> IntoValue for &Vec<T> {
    fn into_value(self) -> Result<Value> {
        self.as_slice().into_value()
    }
}

impl<T: IntoValue + Clone, const N: usize> IntoValue for &[T; N] {
    fn into_value(self) -> Result<Value> {
        self.as_slice().into_value()
    }
}

impl<T: IntoValue, const N: usize> IntoValue for [T; N] {
    fn into_value(self) -> Result<Value> {
        T::many_into_value(self.into_iter())
    }
}

impl<T: FromValue, const N: usize> FromValue for [T; N] {
    fn from_value(value: Value) -> Result<Self> {
        let items = T::many_from_value(value)?;
        let wrong =
            |items: Vec<T>| ConversionError::new(format!("expected {N} items, found {}", items.len()));
        items.try_into().map_err(wrong)
    }
}

fn pairs_into_value<K: IntoValue, V: IntoValue>(pairs: impl Iterator<Item = (K, V)>) -> Result<Value> {
    let pair = |(key, value): (K, V)| {
        let key = key.into_value()?;
        let value = value.into_value().map_err(|error| error.inside(key_name(&key)))?;
        Ok((key, value))
    };
    pairs.map(pair).collect::<Result<_>>().map(Value::Map)
}

fn pairs_from_value<M: FromIterator<(K, V)>, K: FromValue, V: FromValue>(value: Value) -> Result<M> {
    let Value::Map(pairs) = value else { return Err(ConversionError::expected("map", &value)) };
    let pair = |(key, value)| {
        let name = key_name(&key);
        let key = K::from_value(key).map_err(|error| error.inside("key"))?;
        Ok((key, V::from_value(value).map_err(|error| error.inside(name))?))
    };
    pairs.into_iter().map(pair).collect()
}

/// How errors name the item under a key.
fn key_name(key: &Value) -> String {
    match key {
        Value::Str(text) => format!("{text:?}"),
        Value::Int(number) => number.to_string(),
        other => format!("a {}", other.kind()),
    }
}

impl<K: IntoValue, V: IntoValue, S> IntoValue for HashMap<K, V, S> {
    fn into_value(self) -> Result<Value> {
        pairs_into_value(self.into_iter())
    }
}

impl<K: FromValue + Eq + Hash, V: FromValue, S: BuildHasher + Default> FromValue for HashMap<K, V, S> {
    fn from_value(value: Value) -> Result<Self> {
        pairs_from_value(value)
    }
}

impl<K: IntoValue, V: IntoValue> IntoValue for BTreeMap<K, V> {
    fn into_value(self) -> Result<Value> {
        pairs_into_value(self.into_iter())
    }
}

impl<K: FromValue + Ord, V: FromValue> FromValue for BTreeMap<K, V> {
    fn from_value(value: Value) -> Result<Self> {
        pairs_from_value(value)
    }
}

macro_rules! tuples {
    ($($count:literal: $($type:ident $index:tt),+;)*) => {$(
        impl<$($type: IntoValue),+> IntoValue for ($($type,)+) {
            fn into_value(self) -> Result<Value> {
                Ok(Value::Tuple(vec![$(self.$index.into_value().map_err(|error| error.inside($index))?),+]))
            }
        }

        impl<$($type: FromValue),+> FromValue for ($($type,)+) {
            fn from_value(value: Value) -> Result<Self> {
                let items = match value {
                    Value::Tuple(items) | Value::List(items) => items,
                    other => return Err(ConversionError::expected(concat!("tuple of ", $count), &other)),
                };
                if items.len() != $count {
                    let text = format!(concat!("expected a tuple of ", $count, ", found one of {}"), items.len());
                    return Err(ConversionError::new(text));
                }
                let mut items = items.into_iter();
                let mut next = || items.next().unwrap_or(Value::Nil);
                Ok(($($type::from_value(next()).map_err(|error| error.inside($index))?,)+))
            }
        }
    )*};
}

tuples! {
    1: A 0;
    2: A 0, B 1;
    3: A 0, B 1, C 2;
    4: A 0, B 1, C 2, D 3;
    5: A 0, B 1, C 2, D 3, E 4;
    6: A 0, B 1, C 2, D 3, E 4, F 5;
    7: A 0, B 1, C 2, D 3, E 4, F 5, G 6;
    8: A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7;
    9: A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8;
    10: A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9;
    11: A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9, K 10;
    12: A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9, K 10, L 11;
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fmt::Debug;

    fn survives<T: IntoValue + FromValue + Clone + PartialEq + Debug>(item: T) {
        let copy = item.clone();
        let value = item.into_value().unwrap();
        assert_eq!(T::from_value(value).unwrap(), copy);
    }

    fn refusal<T: FromValue + Debug>(value: impl IntoValue) -> String {
        T::from_value(value.into_value().unwrap()).unwrap_err().to_string()
    }

    #[test]
    fn plain_types_survive_the_trip() {
        survives(());
        survives(true);
        survives((i64::MIN, u8::MAX, -3i16, usize::MIN));
        survives(('x', "text".to_owned(), 1.5f32, f64::MIN));
        survives((Some(3), None::<bool>));
        survives(vec![vec![1, 2], vec![]]);
        survives([Box::new(1), Box::new(2)]);
        survives(VecDeque::from([String::new()]));
        survives(HashMap::from([("a".to_owned(), 1), ("b".to_owned(), 2)]));
        survives(BTreeMap::from([(1, [1.0]), (2, [2.0])]));
        survives((1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12));
    }

    #[test]
    fn bytes_are_bytes_in_whatever_they_come() {
        survives(vec![1u8, 2]);
        survives([1u8, 2]);
        survives(Bytes::from(vec![3]));
        for value in [vec![1u8].into_value(), [1u8].as_slice().into_value(), [1u8].into_value()] {
            assert!(matches!(value, Ok(Value::Bytes(_))));
        }
    }

    #[test]
    fn numbers_fit_or_are_refused() {
        assert_eq!(refusal::<u8>(256), "256 is out of range for u8");
        assert_eq!(refusal::<u8>("x"), "expected int (u8), found str");
        assert_eq!(refusal::<u32>(-1), "-1 is out of range for u32");
        assert!(u64::MAX.into_value().is_err());
        assert!((f64::from_value(Value::Int(3)).unwrap() - 3.0).abs() < f64::EPSILON);
        assert_eq!(refusal::<i32>(1.0), "expected int (i32), found float");
    }

    #[test]
    fn an_error_says_what_was_found_and_where() {
        assert_eq!(refusal::<Vec<bool>>(vec![1]), "expected bool, found int, at [0]");
        let nested = BTreeMap::from([("key", (1, vec![2.0, 3.0]))]);
        assert_eq!(
            refusal::<BTreeMap<String, (u8, Vec<bool>)>>(nested),
            "expected bool, found float, at [\"key\"][1][0]"
        );
        assert_eq!(refusal::<(u8, u8)>((1,)), "expected a tuple of 2, found one of 1");
        assert_eq!(refusal::<[u8; 2]>([1u8]), "expected 2 items, found 1");
    }
}
