//! The Python adapter, by a program of its own.
// SPDX-License-Identifier: MIT OR Apache-2.0

#![cfg(target_os = "linux")]

#[path = "c/toolchain.rs"]
mod toolchain;

use std::process::Command;

use toolchain::{finish, installed, library, root, skipped, succeed, text};

/// The program, without PyTorch, on the library under test.
fn program() -> Command {
    let mut command = Command::new("python3");
    command.arg(root().join("tests/engines/pytorch_adapter.py")).arg(library());
    command
}

#[test]
fn the_pytorch_adapter_agrees_with_fp64_and_its_descriptors_with_the_header() {
    if !installed("python3") {
        return skipped("python3", "it is not installed");
    }
    let said = text(&succeed(&mut program()));
    assert!(said.ends_with("pytorch adapter: ok\n"), "{said}");
    println!("{said}");
    let broken = finish(program().arg("--break"));
    assert!(!broken.status.success(), "a wrong count was not noticed");
    let said = String::from_utf8_lossy(&broken.stderr);
    assert!(said.contains("outputs are off by"), "{said}");
}
