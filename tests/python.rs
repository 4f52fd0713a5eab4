//! The Python adapters, by programs of their own.
// SPDX-License-Identifier: MIT OR Apache-2.0

#![cfg(target_os = "linux")]

#[path = "c/toolchain.rs"]
mod toolchain;

use std::process::Command;

use toolchain::{finish, installed, library, root, skipped, succeed, text};

/// A program of `tests/engines`, without PyTorch, on the library under test.
fn program(name: &str) -> Command {
    let mut command = Command::new("python3");
    command.arg(root().join("tests/engines").join(name)).arg(library());
    command
}

/// Runs a program, and again with each break: it must fail then, and say what it has seen.
fn hold(name: &str, last: &str, breaks: &[(&[&str], &str)]) {
    if !installed("python3") {
        return skipped("python3", "it is not installed");
    }
    let said = text(&succeed(&mut program(name)));
    assert!(said.ends_with(&format!("{last}: ok\n")), "{said}");
    println!("{said}");
    for (words, expected) in breaks {
        let broken = finish(program(name).args(*words));
        assert!(!broken.status.success(), "{name} {words:?} was not noticed");
        let said = String::from_utf8_lossy(&broken.stderr);
        assert!(said.contains(expected), "{name} {words:?}: {said}");
    }
}

#[test]
fn the_pytorch_adapter_agrees_with_fp64_and_its_descriptors_with_the_header() {
    hold("pytorch_adapter.py", "pytorch adapter", &[(&["--break"], "outputs are off by")]);
}

#[test]
fn sglangs_calls_agree_with_fp64() {
    let off = "has left a state that is off by";
    hold(
        "sglang_adapter.py",
        "sglang adapter",
        &[
            (&["--break", "rings"], off),
            (&["--break", "accepted"], off),
            (&["--break", "flush"], off),
            (&["--break", "bound"], off),
            (&["--break", "null"], "padding's outputs are not zero"),
            (&["--break", "track"], "the snapshot at 24 is off by"),
        ],
    );
}
