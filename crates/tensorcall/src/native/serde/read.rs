//! [`Reader`]: from values to serde's data model.

use serde::de::value::{MapDeserializer, SeqDeserializer};
use serde::de::{
    self, DeserializeSeed, EnumAccess, Error as _, IntoDeserializer, Unexpected, VariantAccess, Visitor,
};
use serde::forward_to_deserialize_any;

use crate::native::value::{ConversionError, Value};

type Result<T> = std::result::Result<T, ConversionError>;

/// Reads a value as whatever it is.
pub(super) struct Reader(pub(super) Value);

impl<'de> de::Deserializer<'de> for Reader {
    type Error = ConversionError;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        match self.0 {
            Value::Nil => visitor.visit_unit(),
            Value::Bool(truth) => visitor.visit_bool(truth),
            Value::Int(number) => visitor.visit_i64(number),
            Value::Float(number) => visitor.visit_f64(number),
            Value::Str(text) => visitor.visit_string(text),
            Value::Bytes(bytes) => visitor.visit_byte_buf(bytes.to_vec()),
            Value::List(items) | Value::Tuple(items) => {
                let mut items = SeqDeserializer::new(items.into_iter().map(Reader));
                let result = visitor.visit_seq(&mut items)?;
                items.end().map(|()| result)
            }
            Value::Map(pairs) => {
                let pairs = pairs.into_iter().map(|(key, value)| (Reader(key), Reader(value)));
                let mut pairs = MapDeserializer::new(pairs);
                let result = visitor.visit_map(&mut pairs)?;
                pairs.end().map(|()| result)
            }
            other @ (Value::Tensor(_) | Value::RRef(_)) => {
                Err(ConversionError::new(format!("a {} cannot be part of a serde type", other.kind())))
            }
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value> {
        match self.0 {
            Value::Nil => visitor.visit_none(),
            other => visitor.visit_some(Reader(other)),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(self, _: &'static str, visitor: V) -> Result<V::Value> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value> {
        match self.0 {
            name @ Value::Str(_) => visitor.visit_enum(Variant { name, content: None }),
            Value::Map(mut pairs) if pairs.len() == 1 => match pairs.pop() {
                Some((name, content)) => visitor.visit_enum(Variant { name, content: Some(content) }),
                None => Err(ConversionError::new("expected an enum, found nothing")),
            },
            other => Err(ConversionError::expected("an enum", &other)),
        }
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct
        seq tuple tuple_struct map struct identifier ignored_any
    }
}

impl IntoDeserializer<'_, ConversionError> for Reader {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

/// A variant of an enum, with what it holds.
struct Variant {
    name: Value,
    content: Option<Value>,
}

impl<'de> EnumAccess<'de> for Variant {
    type Error = ConversionError;
    type Variant = Content;

    fn variant_seed<V: DeserializeSeed<'de>>(self, seed: V) -> Result<(V::Value, Content)> {
        Ok((seed.deserialize(Reader(self.name))?, Content(self.content)))
    }
}

struct Content(Option<Value>);

impl Content {
    fn expect(self) -> Result<Reader> {
        let missing =
            || ConversionError::invalid_type(Unexpected::UnitVariant, &"a variant that holds something");
        self.0.map(Reader).ok_or_else(missing)
    }
}

impl<'de> VariantAccess<'de> for Content {
    type Error = ConversionError;

    fn unit_variant(self) -> Result<()> {
        match self.0 {
            None | Some(Value::Nil) => Ok(()),
            Some(other) => Err(ConversionError::expected("nothing in this variant", &other)),
        }
    }

    fn newtype_variant_seed<T: DeserializeSeed<'de>>(self, seed: T) -> Result<T::Value> {
        seed.deserialize(self.expect()?)
    }

    fn tuple_variant<V: Visitor<'de>>(self, _: usize, visitor: V) -> Result<V::Value> {
        de::Deserializer::deserialize_any(self.expect()?, visitor)
    }

    fn struct_variant<V: Visitor<'de>>(self, _: &'static [&'static str], visitor: V) -> Result<V::Value> {
        de::Deserializer::deserialize_any(self.expect()?, visitor)
    }
}
