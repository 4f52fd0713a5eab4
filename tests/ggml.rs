//! The adapter for ggml beside ggml itself, which `tests/ggml.sh` fetches and builds: the same outputs and states for the same inputs, in
//! graphs that ggml's threads compute. With operands exchanged, or a rejected draft kept, the program must see it.
// SPDX-License-Identifier: MIT OR Apache-2.0

#![cfg(target_os = "linux")]

#[path = "ggml/llama.rs"]
mod llama;
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
    for compiler in compilers() {
        let program = build(&compiler, &headers, &archive);
        let said = text(&succeed(&mut Command::new(&program)));
        assert!(said.starts_with("ggml_adapter: "), "{said}");
        println!("{}: {said}", compiler.name);
        for what in ["ssm_scan", "gated_delta_net", "drafts_of_ssm_scan", "drafts_of_gated_delta_net"] {
            let broken = finish(Command::new(&program).args(["break", what]));
            assert!(!broken.status.success(), "{}: a break was not noticed: {what}", compiler.name);
            assert_eq!(text(&broken), "an output differs from ggml's\n", "{what}");
        }
    }
}
