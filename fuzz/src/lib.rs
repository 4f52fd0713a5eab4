//! What the fuzz targets run. tests/fuzz.rs runs the same on the kept inputs, without a fuzzer.

pub mod blobs;
pub mod calls;
#[path = "../../tests/common/mod.rs"]
mod common;
pub mod differential;
mod memory;
mod source;
