//! What the fuzz targets run. tests/fuzz.rs runs the same on the kept inputs, without a fuzzer.

pub mod blobs;
pub mod calls;
#[path = "../../tests/common/mod.rs"]
pub mod common;
pub mod differential;
pub mod memory;
pub mod source;
