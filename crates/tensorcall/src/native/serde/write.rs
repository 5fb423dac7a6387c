//! [`Writer`]: from serde's data model to values.

use serde::ser::{
    self, Serialize, SerializeMap, SerializeSeq, SerializeStruct, SerializeStructVariant, SerializeTuple,
    SerializeTupleStruct, SerializeTupleVariant,
};

use crate::native::convert::IntoValue;
use crate::native::value::{ConversionError, Value};

type Result<T> = std::result::Result<T, ConversionError>;

/// Makes a value of what is serialized.
pub(super) struct Writer;

/// A sequence, of a variant if that has a name.
pub(super) struct Items {
    all: Vec<Value>,
    finish: fn(Vec<Value>) -> Value,
    variant: Option<&'static str>,
}

/// Pairs, of a variant if that has a name.
pub(super) struct Pairs {
    all: Vec<(Value, Value)>,
    key: Option<Value>,
    variant: Option<&'static str>,
}

fn write<T: ?Sized + Serialize>(item: &T) -> Result<Value> {
    item.serialize(Writer)
}

fn named(variant: Option<&'static str>, value: Value) -> Value {
    match variant {
        Some(name) => Value::Map(vec![(Value::Str(name.to_owned()), value)]),
        None => value,
    }
}

fn items(finish: fn(Vec<Value>) -> Value, len: usize, variant: Option<&'static str>) -> Items {
    Items { all: Vec::with_capacity(len.min(1024)), finish, variant }
}

fn pairs(len: usize, variant: Option<&'static str>) -> Pairs {
    Pairs { all: Vec::with_capacity(len.min(1024)), key: None, variant }
}

macro_rules! scalars {
    ($($method:ident: $type:ty;)*) => {$(
        fn $method(self, item: $type) -> Result<Value> {
            item.into_value()
        }
    )*};
}

impl ser::Serializer for Writer {
    type Ok = Value;
    type Error = ConversionError;
    type SerializeSeq = Items;
    type SerializeTuple = Items;
    type SerializeTupleStruct = Items;
    type SerializeTupleVariant = Items;
    type SerializeMap = Pairs;
    type SerializeStruct = Pairs;
    type SerializeStructVariant = Pairs;

    scalars! {
        serialize_bool: bool;
        serialize_i8: i8;
        serialize_i16: i16;
        serialize_i32: i32;
        serialize_i64: i64;
        serialize_u8: u8;
        serialize_u16: u16;
        serialize_u32: u32;
        serialize_u64: u64;
        serialize_f32: f32;
        serialize_f64: f64;
        serialize_char: char;
        serialize_str: &str;
        serialize_bytes: &[u8];
    }

    fn serialize_none(self) -> Result<Value> {
        Ok(Value::Nil)
    }

    fn serialize_some<T: ?Sized + Serialize>(self, item: &T) -> Result<Value> {
        write(item)
    }

    fn serialize_unit(self) -> Result<Value> {
        Ok(Value::Nil)
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<Value> {
        Ok(Value::Nil)
    }

    fn serialize_unit_variant(self, _: &'static str, _: u32, variant: &'static str) -> Result<Value> {
        Ok(Value::Str(variant.to_owned()))
    }

    fn serialize_newtype_struct<T: ?Sized + Serialize>(self, _: &'static str, item: &T) -> Result<Value> {
        write(item)
    }

    fn serialize_newtype_variant<T: ?Sized + Serialize>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        item: &T,
    ) -> Result<Value> {
        Ok(named(Some(variant), write(item)?))
    }

    fn serialize_seq(self, len: Option<usize>) -> Result<Items> {
        Ok(items(Value::List, len.unwrap_or(0), None))
    }

    fn serialize_tuple(self, len: usize) -> Result<Items> {
        Ok(items(Value::Tuple, len, None))
    }

    fn serialize_tuple_struct(self, _: &'static str, len: usize) -> Result<Items> {
        Ok(items(Value::Tuple, len, None))
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        len: usize,
    ) -> Result<Items> {
        Ok(items(Value::Tuple, len, Some(variant)))
    }

    fn serialize_map(self, len: Option<usize>) -> Result<Pairs> {
        Ok(pairs(len.unwrap_or(0), None))
    }

    fn serialize_struct(self, _: &'static str, len: usize) -> Result<Pairs> {
        Ok(pairs(len, None))
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        len: usize,
    ) -> Result<Pairs> {
        Ok(pairs(len, Some(variant)))
    }
}

impl Items {
    fn push<T: ?Sized + Serialize>(&mut self, item: &T) -> Result<()> {
        let index = self.all.len();
        self.all.push(write(item).map_err(|error| error.inside(index))?);
        Ok(())
    }

    fn finish(self) -> Value {
        named(self.variant, (self.finish)(self.all))
    }
}

macro_rules! sequences {
    ($($trait:ident::$method:ident;)*) => {$(
        impl $trait for Items {
            type Ok = Value;
            type Error = ConversionError;

            fn $method<T: ?Sized + Serialize>(&mut self, item: &T) -> Result<()> {
                self.push(item)
            }

            fn end(self) -> Result<Value> {
                Ok(self.finish())
            }
        }
    )*};
}

sequences! {
    SerializeSeq::serialize_element;
    SerializeTuple::serialize_element;
    SerializeTupleStruct::serialize_field;
    SerializeTupleVariant::serialize_field;
}

impl Pairs {
    fn finish(self) -> Value {
        named(self.variant, Value::Map(self.all))
    }
}

macro_rules! structs {
    ($($trait:ident;)*) => {$(
        impl $trait for Pairs {
            type Ok = Value;
            type Error = ConversionError;

            fn serialize_field<T: ?Sized + Serialize>(&mut self, name: &'static str, item: &T) -> Result<()> {
                let value = write(item).map_err(|error| error.inside(format!("{name:?}")))?;
                self.all.push((Value::Str(name.to_owned()), value));
                Ok(())
            }

            fn end(self) -> Result<Value> {
                Ok(self.finish())
            }
        }
    )*};
}

structs! {
    SerializeStruct;
    SerializeStructVariant;
}

impl SerializeMap for Pairs {
    type Ok = Value;
    type Error = ConversionError;

    fn serialize_key<T: ?Sized + Serialize>(&mut self, key: &T) -> Result<()> {
        self.key = Some(write(key)?);
        Ok(())
    }

    fn serialize_value<T: ?Sized + Serialize>(&mut self, item: &T) -> Result<()> {
        let key = self.key.take().ok_or_else(|| ConversionError::new("a map has a value without a key"))?;
        self.all.push((key, write(item)?));
        Ok(())
    }

    fn end(self) -> Result<Value> {
        Ok(self.finish())
    }
}
