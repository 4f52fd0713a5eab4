//! The C interface and nothing else: guard, handles, descriptors, status. `include/replayssm.h` is generated from here.
//!
//! Functions check, call safe code and write the output; they compute nothing.

mod calls;
mod convert;
mod guard;
mod handles;
mod read;
mod types;

pub use calls::*;
pub use types::*;
