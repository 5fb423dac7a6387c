//! [`Serde`]: types that implement serde's traits, as plain data.

mod read;
mod write;

use std::fmt;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::convert::{FromValue, IntoValue};
use super::value::{ConversionError, Value};

/// An argument or result of any type that implements serde's traits.
///
/// It travels as plain data: structs and maps as maps, sequences as lists, tuples as tuples, an enum's
/// variant as its name, or as a map from that name to what it holds. Python sees `dict`, `list`, `tuple` and
/// so on. Tensors and references are not of these types; pass them beside.
///
/// ```
/// use serde::{Deserialize, Serialize};
/// use tensorcall::{Agent, Serde};
///
/// #[derive(Serialize, Deserialize)]
/// struct Settings {
///     rate: f64,
///     name: String,
/// }
///
/// fn describe(Serde(settings): Serde<Settings>) -> String {
///     format!("{} at {}", settings.name, settings.rate)
/// }
///
/// let workers = Agent::start_together([Agent::builder("worker").function("describe", describe)])?;
/// let settings = Settings { rate: 0.5, name: "sgd".into() };
/// let text: String = workers[0].call_blocking("worker", "describe", (Serde(settings),))?;
/// assert_eq!(text, "sgd at 0.5");
/// # Ok::<(), tensorcall::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Serde<T>(pub T);

impl<T: Serialize> IntoValue for Serde<T> {
    fn into_value(self) -> Result<Value, ConversionError> {
        self.0.serialize(write::Writer)
    }
}

impl<T: DeserializeOwned> FromValue for Serde<T> {
    fn from_value(value: Value) -> Result<Self, ConversionError> {
        T::deserialize(read::Reader(value)).map(Self)
    }
}

impl serde::ser::Error for ConversionError {
    fn custom<T: fmt::Display>(text: T) -> Self {
        Self::new(text.to_string())
    }
}

impl serde::de::Error for ConversionError {
    fn custom<T: fmt::Display>(text: T) -> Self {
        Self::new(text.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    use serde::{Deserialize, Serialize};

    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    enum Shape {
        Point,
        Circle(f32),
        Line(i8, i8),
        Rectangle { width: u16, height: Option<u16> },
    }

    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    struct Everything {
        nothing: (),
        truth: bool,
        numbers: (i64, u64, f64, char),
        text: String,
        list: Vec<Shape>,
        map: BTreeMap<u8, String>,
        wrapped: Wrapped,
    }

    #[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
    struct Wrapped(i32);

    fn everything() -> Everything {
        Everything {
            nothing: (),
            truth: true,
            numbers: (-1, 2, 0.5, 'x'),
            text: "text".into(),
            list: vec![
                Shape::Point,
                Shape::Circle(1.0),
                Shape::Line(-1, 1),
                Shape::Rectangle { width: 1, height: None },
                Shape::Rectangle { width: 1, height: Some(2) },
            ],
            map: BTreeMap::from([(1, "one".into())]),
            wrapped: Wrapped(7),
        }
    }

    #[test]
    fn whatever_serde_knows_survives_the_trip() {
        let value = Serde(everything()).into_value().unwrap();

        assert_eq!(Serde::<Everything>::from_value(value).unwrap().0, everything());
    }

    #[test]
    fn python_sees_dicts_and_lists() {
        let value = Serde(Shape::Rectangle { width: 1, height: None }).into_value().unwrap();
        let Value::Map(variant) = value else { panic!("no map") };
        let [(Value::Str(name), Value::Map(fields))] = &variant[..] else { panic!("no variant") };

        assert_eq!((name.as_str(), fields.len()), ("Rectangle", 2));
        assert!(matches!(Serde(Shape::Point).into_value().unwrap(), Value::Str(name) if name == "Point"));
        assert!(matches!(Serde(vec![1]).into_value().unwrap(), Value::List(_)));
    }

    #[test]
    fn data_of_another_form_is_refused() {
        let text = |value: Value| Serde::<Shape>::from_value(value).unwrap_err().to_string();

        assert!(text(Value::Str("Square".into())).contains("Square"));
        assert!(text(Value::Int(1)).contains("enum"));
        assert!(Serde(u64::MAX).into_value().is_err());
    }
}
