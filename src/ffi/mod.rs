//! The C interface and nothing else: guard, handles, descriptors, status. `include/replayssm.h` is generated from here.
//!
//! Functions check, call safe code and write the output; they compute nothing.

#![deny(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing)]
#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, clippy::indexing_slicing))]

mod calls;
mod convert;
mod guard;
mod handles;
mod read;
// Builds with assertions leave it out: test programs have allocators of their own.
#[cfg(any(test, not(debug_assertions)))]
mod reserve;
mod types;

pub use calls::*;
pub use types::*;
