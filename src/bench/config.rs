//! What is timed: a layer's shape, a batch, and how the states are kept and read.
// SPDX-License-Identifier: MIT OR Apache-2.0

use std::fmt;
use std::str::FromStr;

use super::shape::Shape;

macro_rules! choice {
    ($(#[$doc:meta])* $name:ident: $first:literal $(, $rest:literal)*; $($(#[$variant_doc:meta])* $variant:ident = $number:expr, $text:literal;)*) => {
        $(#[$doc])*
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum $name {
            $($(#[$variant_doc])* $variant,)*
        }

        impl $name {
            /// Its number in the C interface.
            pub fn number(self) -> i32 {
                match self {
                    $($name::$variant => $number,)*
                }
            }

            /// As options and tables name it.
            pub fn name(self) -> &'static str {
                match self {
                    $($name::$variant => $text,)*
                }
            }
        }

        impl FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                $(if text.eq_ignore_ascii_case($text) {
                    return Ok($name::$variant);
                })*
                Err(concat!("expected ", $first $(, ", ", $rest)*).to_owned())
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(self.name())
            }
        }
    };
}

choice! {
    /// Dtype of activations and outputs.
    Io: "bf16", "f16", "f32";
    /// bfloat16.
    Bf16 = crate::ffi::REPLAYSSM_DTYPE_BF16, "bf16";
    /// binary16.
    F16 = crate::ffi::REPLAYSSM_DTYPE_F16, "f16";
    /// binary32.
    F32 = crate::ffi::REPLAYSSM_DTYPE_F32, "f32";
}

choice! {
    /// How states are kept.
    Format: "split32", "f32", "bf16", "f16";
    /// Two planes of 16 bits.
    Split32 = crate::ffi::REPLAYSSM_FORMAT_SPLIT32, "SPLIT32";
    /// binary32.
    F32 = crate::ffi::REPLAYSSM_FORMAT_F32, "F32";
    /// bfloat16.
    Bf16 = crate::ffi::REPLAYSSM_FORMAT_BF16, "BF16";
    /// binary16.
    F16 = crate::ffi::REPLAYSSM_FORMAT_F16, "F16";
}

choice! {
    /// How outputs are computed.
    Readout: "high", "full", "exact";
    /// From a bfloat16 view.
    High = crate::ffi::REPLAYSSM_READOUT_HIGH, "HIGH";
    /// From the whole checkpoint.
    Full = crate::ffi::REPLAYSSM_READOUT_FULL, "FULL";
    /// By the plain update's arithmetic.
    Exact = crate::ffi::REPLAYSSM_READOUT_EXACT, "EXACT";
}

impl Io {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        if self == Io::F32 { 4 } else { 2 }
    }
}

impl Format {
    /// Bytes of an element.
    pub fn bytes(self) -> usize {
        if matches!(self, Format::Split32 | Format::F32) { 4 } else { 2 }
    }

    /// Whether a fp32 state survives.
    pub fn is_lossless(self) -> bool {
        self.bytes() == 4
    }

    /// Whether a readout is legal for it.
    pub fn has(self, readout: Readout) -> bool {
        readout != Readout::High || matches!(self, Format::Split32 | Format::Bf16)
    }

    /// The readout that the library takes for it if none is named.
    pub fn readout(self, io: Io) -> Readout {
        let high = self == Format::Bf16 || self == Format::Split32 && io == Io::Bf16;
        if high { Readout::High } else { Readout::Full }
    }
}

/// A row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Config {
    /// Of the layers.
    pub shape: Shape,
    /// Rows of the batch.
    pub batch: usize,
    /// Tokens of a row in a step.
    pub tokens: usize,
    /// Records that a checkpoint may lag behind.
    pub window: usize,
    /// Of the checkpoints.
    pub format: Format,
    /// Of the outputs.
    pub readout: Readout,
    /// Of the activations.
    pub io: Io,
    /// Mamba-2: outputs go through the gate z.
    pub gate: bool,
}

impl Config {
    /// The plain update beside it: the same shape and tokens on a fp32 state.
    pub fn plain(&self) -> Self {
        let window = usual_window(self.tokens);
        Config { window, format: Format::F32, readout: Readout::Exact, ..*self }
    }

    /// What its outputs' error depends on.
    pub fn without_batch(&self) -> Self {
        Config { batch: 1, ..*self }
    }
}

/// The library's default window.
pub fn usual_window(tokens: usize) -> usize {
    (8 * tokens).clamp(16, 256)
}
