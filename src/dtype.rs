//! Element types of tensors and of index arrays.

use std::borrow::Cow;

use crate::error::{Error, Result};

/// A floating-point element type. The numbers are those of the C interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Dtype {
    /// IEEE binary32.
    F32 = 1,
    /// bfloat16: the upper half of a binary32.
    Bf16 = 2,
    /// IEEE binary16.
    F16 = 3,
}

impl Dtype {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Dtype::F32 => 4,
            Dtype::Bf16 | Dtype::F16 => 2,
        }
    }

    /// Reads the C interface's number; `field` is named in the error.
    pub fn from_raw(raw: i32, field: impl Into<Cow<'static, str>>) -> Result<Self> {
        match raw {
            1 => Ok(Dtype::F32),
            2 => Ok(Dtype::Bf16),
            3 => Ok(Dtype::F16),
            0 | 16 | 17 => {
                Err(Error::invalid(field, raw, "REPLAYSSM_DTYPE_F32, REPLAYSSM_DTYPE_BF16 or REPLAYSSM_DTYPE_F16"))
            }
            _ => {
                Err(Error::unsupported(field, raw, "REPLAYSSM_DTYPE_F32, REPLAYSSM_DTYPE_BF16 and REPLAYSSM_DTYPE_F16"))
            }
        }
    }
}

/// Element type of an index array.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum IndexType {
    /// 32-bit signed.
    I32 = 16,
    /// 64-bit signed.
    I64 = 17,
}

impl IndexType {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            IndexType::I32 => 4,
            IndexType::I64 => 8,
        }
    }

    /// Reads the C interface's number; `field` is named in the error.
    pub fn from_raw(raw: i32, field: impl Into<Cow<'static, str>>) -> Result<Self> {
        match raw {
            16 => Ok(IndexType::I32),
            17 => Ok(IndexType::I64),
            0..=3 => Err(Error::invalid(field, raw, "REPLAYSSM_DTYPE_I32 or REPLAYSSM_DTYPE_I64")),
            _ => Err(Error::unsupported(field, raw, "REPLAYSSM_DTYPE_I32 and REPLAYSSM_DTYPE_I64")),
        }
    }
}
