//! Any calls of the C interface: see src/calls.rs.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| replayssm_fuzz::calls::run(data));
