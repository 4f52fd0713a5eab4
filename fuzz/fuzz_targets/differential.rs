//! Any model and any order of operations, against the recurrence: see src/differential.rs.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| replayssm_fuzz::differential::run(data));
