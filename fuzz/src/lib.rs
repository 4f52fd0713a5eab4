//! What the fuzz targets run. tests/fuzz.rs runs the same on the kept inputs, without a fuzzer.

pub mod blobs;
#[path = "../../tests/common/mod.rs"]
pub mod common;
pub mod source;
