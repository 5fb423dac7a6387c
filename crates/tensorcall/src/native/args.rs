//! [`Arguments`]: what a call passes.

use super::convert::IntoValue;
use super::value::{ConversionError, Value};

/// The arguments of a call: a tuple of up to twelve of them, or a vector of [`Value`]s where their number
/// is not known before.
///
/// One argument is a tuple too: `(x,)`.
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not the arguments of a call",
    note = "arguments are a tuple of up to 12 types that implement `IntoValue`: `()`, `(x,)`, `(x, y)`, ..."
)]
pub trait Arguments {
    /// The arguments in their order.
    ///
    /// # Errors
    ///
    /// If one of them is no value; the error says which.
    #[doc(hidden)]
    fn into_values(self) -> Result<Vec<Value>, ConversionError>;
}

impl Arguments for Vec<Value> {
    fn into_values(self) -> Result<Vec<Value>, ConversionError> {
        Ok(self)
    }
}

impl Arguments for () {
    fn into_values(self) -> Result<Vec<Value>, ConversionError> {
        Ok(Vec::new())
    }
}

macro_rules! arguments {
    ($(($($type:ident $index:tt),+);)*) => {$(
        impl<$($type: IntoValue),+> Arguments for ($($type,)+) {
            fn into_values(self) -> Result<Vec<Value>, ConversionError> {
                Ok(vec![$(self.$index.into_value().map_err(|error| numbered($index, &error))?),+])
            }
        }
    )*};
}

arguments! {
    (A 0);
    (A 0, B 1);
    (A 0, B 1, C 2);
    (A 0, B 1, C 2, D 3);
    (A 0, B 1, C 2, D 3, E 4);
    (A 0, B 1, C 2, D 3, E 4, F 5);
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6);
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7);
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8);
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9);
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9, K 10);
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9, K 10, L 11);
}

fn numbered(index: usize, error: &ConversionError) -> ConversionError {
    ConversionError::new(format!("argument {}: {error}", index + 1))
}
