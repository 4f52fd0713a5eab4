//! The kept inputs of the fuzz targets, run as ordinary tests: without a fuzzer and without a sanitizer. tests/fuzz.sh has both, and goes on
//! from these inputs.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

#[path = "../fuzz/src/blobs.rs"]
mod blobs;
#[path = "../fuzz/src/calls.rs"]
mod calls;
mod common;
#[path = "../fuzz/src/differential.rs"]
mod differential;
#[path = "../fuzz/src/memory.rs"]
mod memory;
#[path = "../fuzz/src/source.rs"]
mod source;

use std::path::Path;

/// Runs every kept input of a target, in the order of their names.
fn replay(target: &str, run: fn(&[u8])) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(target);
    let files = std::fs::read_dir(&folder).expect("a folder of inputs").map(|file| file.expect("a file").path());
    let mut files: Vec<_> = files.collect();
    files.sort();
    for file in &files {
        // The last one named is what failed.
        println!("{}", file.display());
        run(&std::fs::read(file).expect("an input"));
    }
    assert!(files.len() >= 20, "{} inputs in {}", files.len(), folder.display());
}

#[test]
fn kept_inputs_of_blobs() {
    replay("blobs", blobs::run);
}

#[test]
fn kept_inputs_of_differential() {
    replay("differential", differential::run);
}

#[test]
fn kept_inputs_of_calls() {
    replay("calls", calls::run);
}
