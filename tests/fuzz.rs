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
fn kept_inputs_of_calls_have_every_call_accepted_and_refused() {
    replay("calls", calls::run);
    let tally = calls::TALLY.lock().expect("no panic");
    println!("refused and accepted: {tally:?}");
    // All that can fail; releases of handles are made too, and say nothing.
    let symbols = include_str!("c/symbols.txt").lines().filter(|line| line.starts_with("replayssm_"));
    let says_nothing = ["_destroy", "_string", "_message", "_error", "_version", "_info"];
    for name in symbols.filter(|name| !says_nothing.iter().any(|end| name.ends_with(end))) {
        let [refused, accepted] = tally.get(name).copied().unwrap_or_default();
        assert!(refused > 0 && accepted > 0, "{name}: {refused} refused, {accepted} accepted");
    }
}
