//! Three programs shaped like the engines that link this library. They end by comparing every live request with the plain
//! update, by bytes; told to break one token, they must see it.
// SPDX-License-Identifier: MIT OR Apache-2.0

#![cfg(target_os = "linux")]

#[path = "c/toolchain.rs"]
mod toolchain;

use std::process::Command;

use toolchain::{
    Language, Program, compilers, finish, installed, library, library_folder, scratch, skipped, succeed, text,
};

fn engine(name: &str) {
    for compiler in compilers() {
        let scratch = scratch(&format!("{name}-{}", compiler.name));
        let links = library_folder(&scratch, &library());
        let program = Program {
            compiler: &compiler,
            language: Language::Cxx17,
            sources: &[&format!("engines/{name}.cpp")],
            flags: &["-O1", "-g", "-Wshadow", "-Wconversion"],
            library: &links,
            out: scratch.join(name),
        };
        let program = program.build();
        let said = text(&succeed(&mut Command::new(&program)));
        assert!(said.starts_with(name), "{said}");
        println!("{}: {said}", compiler.name);
        let broken = finish(Command::new(&program).arg("break"));
        assert!(!broken.status.success(), "{name} did not notice a wrong token");
        assert_eq!(text(&broken), "a state differs from the plain update's\n");
    }
}

/// Uninitialised or foreign memory that the library reads or writes through an engine's pointers.
fn engine_under_valgrind(name: &str) {
    if !installed("valgrind") {
        return skipped("valgrind", "it is not installed");
    }
    let scratch = scratch(&format!("{name}-valgrind"));
    let links = library_folder(&scratch, &library());
    let compiler = toolchain::system_compiler();
    let program = Program {
        compiler: &compiler,
        language: Language::Cxx17,
        sources: &[&format!("engines/{name}.cpp")],
        flags: &["-O1", "-g"],
        library: &links,
        out: scratch.join(name),
    };
    let program = program.build();
    let mut command = Command::new("valgrind");
    command.args(["--quiet", "--error-exitcode=99", "--leak-check=full", "--fair-sched=yes"]);
    command.arg(format!("--suppressions={}", toolchain::root().join("tests/c/valgrind.supp").display()));
    succeed(command.arg(program).arg("short"));
}

#[test]
fn a_llama_cpp_shaped_memory_ends_with_the_plain_updates_bytes() {
    engine("llama_memory");
}

#[test]
fn a_vllm_shaped_scheduler_ends_with_the_plain_updates_bytes() {
    engine("vllm_scheduler");
}

#[test]
fn a_tensorrt_llm_shaped_call_ends_with_the_plain_updates_bytes() {
    engine("trtllm_call");
}

#[test]
fn the_packed_rows_and_pages_are_clean_under_valgrind() {
    engine_under_valgrind("trtllm_call");
}
