//! Whole models in llama.cpp, which `tests/llama.sh` fetches and builds in part: as it is, and with the patch of
//! `examples-cpp/adapters/ggml` that gives its recurrent layers to the library. The same tokens, without drafts and with drafts of which
//! some are rejected. Told to keep one rejected draft, the program must see it.
// SPDX-License-Identifier: MIT OR Apache-2.0

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::toolchain::{Compiler, Language, compilers, finish, library, library_folder, root, scratch, succeed, text};

/// The folder of llama.cpp's and ggml's headers and archives, or nothing where they cannot be had; then the script has said why.
fn llama() -> Option<PathBuf> {
    let said = text(&succeed(&mut Command::new(root().join("tests/llama.sh"))));
    print!("{said}");
    (!said.contains("skipped: ")).then(|| root().join("build/ggml"))
}

/// The program with llama.cpp as it is, and with the patched one.
fn build(compiler: &Compiler, llama: &Path, scratch: &Path) -> [PathBuf; 2] {
    let links = library_folder(scratch, &library());
    let object = scratch.join("llama_model.o");
    let mut command = compiler.command(Language::Cxx17);
    command.args(["-O1", "-g", "-Wshadow", "-Wconversion"]);
    for headers in ["source/include", "source/llama/include"] {
        command.arg("-isystem").arg(llama.join(headers));
    }
    command.arg("-I").arg(root().join("examples-cpp/adapters/ggml"));
    command.arg("-c").arg(root().join("tests/engines/llama_model.cpp")).arg("-o").arg(&object);
    succeed(&mut command);
    ["stock", "patched"].map(|name| {
        let out = scratch.join(name);
        let mut command = Command::new(compiler.path(Language::Cxx17));
        command.arg(&object);
        if name == "patched" {
            // All of its members, in the place of those that come next.
            command.arg("-Wl,--whole-archive").arg(llama.join("libllama-patched.a")).arg("-Wl,--no-whole-archive");
        }
        command.args(["libllama.a", "libggml.a"].map(|archive| llama.join(archive)));
        command.args(["-pthread", "-ldl", "-lm", "-L"]).arg(&links).arg("-lreplayssm");
        command.arg(format!("-Wl,-rpath,{}", links.display())).arg("-o").arg(&out);
        succeed(&mut command);
        out
    })
}

#[test]
fn models_say_in_llama_cpp_with_the_library_what_they_say_without() {
    let Some(llama) = llama() else { return };
    for compiler in compilers() {
        let scratch = scratch(&format!("llama-{}", compiler.name));
        let [stock, patched] = build(&compiler, &llama, &scratch);
        for architecture in ["nemotron_h", "qwen35"] {
            let run = |program: &Path, mode: &str| -> Output {
                let mut command = Command::new(program);
                command.args([architecture, mode]);
                finish(
                    command.args(["model.gguf", "record"].map(|name| scratch.join(format!("{architecture}-{name}")))),
                )
            };
            for (program, mode) in [(&stock, "write"), (&stock, "stock"), (&patched, "library")] {
                let output = run(program, mode);
                let said = text(&output);
                assert!(output.status.success(), "{}: {architecture}, {mode}: {said}", compiler.name);
                assert_eq!(said.matches("llama_model: ").count(), if mode == "library" { 2 } else { 0 }, "{said}");
                print!("{said}");
            }
            let broken = run(&patched, "break");
            assert!(
                !broken.status.success(),
                "{}: {architecture}: a rejected draft that stayed was not noticed",
                compiler.name
            );
            assert!(text(&broken).contains("tokens with drafts are not those without\n"), "{}", text(&broken));
        }
    }
}
