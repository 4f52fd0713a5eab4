//! The adapter for ggml beside ggml itself, which `tests/ggml.sh` fetches and builds: the same outputs and states for the same inputs, in
//! graphs that ggml's threads compute. Told to keep one rejected draft, the program must see it.
// SPDX-License-Identifier: MIT OR Apache-2.0

#![cfg(target_os = "linux")]

#[path = "c/toolchain.rs"]
mod toolchain;

use std::path::{Path, PathBuf};
use std::process::Command;

use toolchain::{Compiler, Language, compilers, finish, library, library_folder, root, scratch, succeed, text};

/// ggml's headers and library, or nothing where they cannot be had; then the script has said why.
fn ggml() -> Option<(PathBuf, PathBuf)> {
    let said = text(&succeed(&mut Command::new(root().join("tests/ggml.sh"))));
    print!("{said}");
    let folder = root().join("build/ggml");
    (!said.contains("skipped: ")).then(|| (folder.join("source/include"), folder.join("libggml.a")))
}

fn build(compiler: &Compiler, headers: &Path, archive: &Path) -> PathBuf {
    let scratch = scratch(&format!("ggml-{}", compiler.name));
    let links = library_folder(&scratch, &library());
    let out = scratch.join("ggml_adapter");
    let mut command = compiler.command(Language::Cxx17);
    command.args(["-O1", "-g", "-Wshadow", "-Wconversion", "-isystem"]).arg(headers);
    command.arg("-I").arg(root().join("examples-cpp/adapters/ggml"));
    command.arg(root().join("tests/engines/ggml_adapter.cpp")).args(["-x", "none"]).arg(archive);
    command.args(["-pthread", "-ldl", "-lm", "-L"]).arg(&links).arg("-lreplayssm");
    command.arg(format!("-Wl,-rpath,{}", links.display())).arg("-o").arg(&out);
    succeed(&mut command);
    out
}

#[test]
fn the_adapter_gives_what_ggmls_own_operators_give() {
    let Some((headers, archive)) = ggml() else { return };
    let programs: Vec<PathBuf> = compilers().iter().map(|compiler| build(compiler, &headers, &archive)).collect();
    let said = text(&succeed(&mut Command::new(&programs[0])));
    assert!(said.starts_with("ggml_adapter: "), "{said}");
    println!("{said}");
    let broken = finish(Command::new(&programs[0]).arg("break"));
    assert!(!broken.status.success(), "a draft that stayed although it was rejected was not noticed");
    assert_eq!(text(&broken), "an output differs from ggml's\n");
}
