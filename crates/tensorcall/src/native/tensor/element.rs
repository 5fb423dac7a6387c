//! [`Element`]: the Rust types that elements of tensors are read and written as.

use super::DType;

/// A Rust type of elements.
///
/// `bool` is not one, since memory that was received may hold other bytes than 0 and 1; elements of
/// [`DType::Bool`] can be read as bytes by [`Tensor::bytes`](super::Tensor::bytes).
pub trait Element: bytemuck::Pod + Send + Sync + sealed::Sealed {
    /// What it is called on the wire.
    const DTYPE: DType;
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! elements {
    ($($type:ty = $dtype:ident;)*) => {$(
        impl sealed::Sealed for $type {}

        impl Element for $type {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

elements! {
    f32 = Float32;
    f64 = Float64;
    i8 = Int8;
    i16 = Int16;
    i32 = Int32;
    i64 = Int64;
    u8 = UInt8;
    u16 = UInt16;
    u32 = UInt32;
    u64 = UInt64;
}

/// A vector seen as bytes.
pub(super) struct Elements<T>(pub(super) Vec<T>);

impl<T: Element> AsRef<[u8]> for Elements<T> {
    fn as_ref(&self) -> &[u8] {
        bytemuck::cast_slice(&self.0)
    }
}
