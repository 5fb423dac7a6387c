//! [`DType`]: the element types of tensors, by wire code, name and size.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::error::WireError;

/// Defines [`DType`] from a table of variant, wire code, PyTorch's name and item size in bytes.
macro_rules! dtypes {
    ($($variant:ident = $code:literal, $name:literal, $size:literal;)*) => {
        /// An element type of PyTorch, as of release 2.15.
        ///
        /// The bytes of an item are opaque here; only its size matters. A type of less than a
        /// byte occupies a whole one, unless its name says that it packs several (`x2`, `x8`).
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(try_from = "u8", into = "u8")]
        #[repr(u8)]
        pub enum DType {
            $(
                #[doc = concat!("`", $name, "`, ", $size, " byte(s) an item.")]
                $variant = $code,
            )*
        }

        impl DType {
            /// Every dtype, ordered by wire code.
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// PyTorch's name of this dtype, without `torch.`.
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $name,)* }
            }

            /// Bytes of one item.
            pub const fn size(self) -> u64 {
                match self { $(Self::$variant => $size,)* }
            }

            /// The dtype that PyTorch calls `name` (without `torch.`).
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$variant),)* _ => None }
            }

            /// The dtype with this wire code.
            pub const fn from_code(code: u8) -> Option<Self> {
                match code { $($code => Some(Self::$variant),)* _ => None }
            }
        }
    };
}

// Codes are for ever: append, and never use one twice. 0 is no dtype; 192 to 255 are kept free for
// element types that are not PyTorch's.
dtypes! {
    Float32 = 1, "float32", 4;
    Float64 = 2, "float64", 8;
    Float16 = 3, "float16", 2;
    BFloat16 = 4, "bfloat16", 2;
    Int8 = 5, "int8", 1;
    Int16 = 6, "int16", 2;
    Int32 = 7, "int32", 4;
    Int64 = 8, "int64", 8;
    UInt8 = 9, "uint8", 1;
    UInt16 = 10, "uint16", 2;
    UInt32 = 11, "uint32", 4;
    UInt64 = 12, "uint64", 8;
    Bool = 13, "bool", 1;
    Complex32 = 14, "complex32", 4;
    Complex64 = 15, "complex64", 8;
    Complex128 = 16, "complex128", 16;
    BComplex32 = 17, "bcomplex32", 4;
    Float8E4m3fn = 18, "float8_e4m3fn", 1;
    Float8E4m3fnuz = 19, "float8_e4m3fnuz", 1;
    Float8E5m2 = 20, "float8_e5m2", 1;
    Float8E5m2fnuz = 21, "float8_e5m2fnuz", 1;
    Float8E8m0fnu = 22, "float8_e8m0fnu", 1;
    Float4E2m1fnX2 = 23, "float4_e2m1fn_x2", 1;
    QInt8 = 24, "qint8", 1;
    QUInt8 = 25, "quint8", 1;
    QInt32 = 26, "qint32", 4;
    QUInt4x2 = 27, "quint4x2", 1;
    QUInt2x4 = 28, "quint2x4", 1;
    Bits1x8 = 29, "bits1x8", 1;
    Bits2x4 = 30, "bits2x4", 1;
    Bits4x2 = 31, "bits4x2", 1;
    Bits8 = 32, "bits8", 1;
    Bits16 = 33, "bits16", 2;
    Int1 = 34, "int1", 1;
    Int2 = 35, "int2", 1;
    Int3 = 36, "int3", 1;
    Int4 = 37, "int4", 1;
    Int5 = 38, "int5", 1;
    Int6 = 39, "int6", 1;
    Int7 = 40, "int7", 1;
    UInt1 = 41, "uint1", 1;
    UInt2 = 42, "uint2", 1;
    UInt3 = 43, "uint3", 1;
    UInt4 = 44, "uint4", 1;
    UInt5 = 45, "uint5", 1;
    UInt6 = 46, "uint6", 1;
    UInt7 = 47, "uint7", 1;
}

impl DType {
    /// The number of this dtype on the wire.
    pub const fn code(self) -> u8 {
        self as u8
    }
}

impl From<DType> for u8 {
    fn from(dtype: DType) -> Self {
        dtype.code()
    }
}

impl TryFrom<u8> for DType {
    type Error = WireError;

    fn try_from(code: u8) -> Result<Self, WireError> {
        Self::from_code(code).ok_or(WireError::DType(code))
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_and_names_lead_back_to_their_dtype() {
        for &dtype in DType::ALL {
            assert_eq!(DType::from_code(dtype.code()), Some(dtype));
            assert_eq!(DType::from_name(dtype.name()), Some(dtype));
        }
    }

    #[test]
    fn codes_run_from_one_without_a_gap() {
        let codes: Vec<u8> = DType::ALL.iter().map(|dtype| dtype.code()).collect();

        assert_eq!(codes, (1..=47).collect::<Vec<u8>>());
    }

    #[test]
    fn sizes_are_powers_of_two_up_to_16() {
        for dtype in DType::ALL {
            assert!(dtype.size().is_power_of_two() && dtype.size() <= 16, "{dtype}");
        }
    }

    #[test]
    fn unknown_codes_and_names_are_no_dtype() {
        assert_eq!(DType::from_code(0), None);
        assert_eq!(DType::from_code(48), None);
        assert_eq!(DType::try_from(255), Err(WireError::DType(255)));
        assert_eq!(DType::from_name("torch.float32"), None);
        assert_eq!(DType::from_name("double"), None);
    }
}
