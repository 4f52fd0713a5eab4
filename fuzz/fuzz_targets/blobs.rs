//! Blobs from anywhere, to every call that reads one: see src/blobs.rs.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| replayssm_fuzz::blobs::run(data));
