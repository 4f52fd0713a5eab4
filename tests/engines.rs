//! Programs shaped like the engines that link this library. Three end by comparing every live request with the plain update, by
//! bytes; four compare the adapters of examples-cpp with fp64. Told to break one token, they must see it.
// SPDX-License-Identifier: MIT OR Apache-2.0

#![cfg(target_os = "linux")]

#[path = "c/toolchain.rs"]
mod toolchain;

use std::path::PathBuf;
use std::process::Command;

use toolchain::{
    Compiler, Language, Program, compilers, finish, installed, library, library_folder, scratch, skipped, succeed, text,
};

/// Warnings that these programs are compiled with; those under valgrind are the same sources.
const STRICT: &[&str] = &["-O1", "-g", "-Wshadow", "-Wconversion"];

fn build(name: &str, sources: &[&str], compiler: &Compiler, flags: &[&str]) -> PathBuf {
    let scratch = scratch(name);
    let links = library_folder(&scratch, &library());
    let out = scratch.join("program");
    Program { compiler, language: Language::Cxx17, sources, flags, library: &links, out }.build()
}

/// Whether the library is to run on CUDA, as where a device is emulated: one compiler's programs then, and no valgrind.
fn on_cuda() -> bool {
    std::env::var("REPLAYSSM_TEST_BACKEND").is_ok_and(|backend| backend == "cuda")
}

/// Runs a program of every compiler, then with each argument that must make it fail, and what it says then.
fn run(name: &str, sources: &[&str], breaks: &[(&str, &str)]) {
    let compilers = if on_cuda() { vec![toolchain::system_compiler()] } else { compilers() };
    for compiler in compilers {
        let program = build(&format!("{name}-{}", compiler.name), sources, &compiler, STRICT);
        let mut command = Command::new(&program);
        if on_cuda() {
            // A device that is emulated is slow. On a GPU the whole program runs, and its breaks.
            command.arg("short");
        }
        let said = text(&succeed(&mut command));
        assert!(said.starts_with(name), "{said}");
        println!("{}: {said}", compiler.name);
        if on_cuda() {
            continue;
        }
        for (how, what) in breaks {
            let broken = finish(Command::new(&program).arg(how));
            assert!(!broken.status.success(), "{name} did not notice {how}");
            assert_eq!(text(&broken), *what);
        }
    }
}

const WRONG_STATE: (&str, &str) = ("break", "a state differs from the plain update's\n");

fn engine(name: &str) {
    run(name, &[&format!("engines/{name}.cpp")], &[WRONG_STATE]);
}

/// An adapter of examples-cpp and the program that compares it with fp64.
fn adapter(name: &str, source: &str) {
    let sources = [&*format!("engines/{name}.cpp"), &*format!("../examples-cpp/adapters/{source}")];
    run(name, &sources, &[WRONG_STATE, ("break_output", "an output is further from fp64 than its bound\n")]);
    if !on_cuda() {
        under_valgrind(name, &sources);
    }
}

/// Uninitialised or foreign memory that the library reads or writes through an engine's pointers.
fn under_valgrind(name: &str, sources: &[&str]) {
    if !installed("valgrind") {
        return skipped("valgrind", "it is not installed");
    }
    let program = build(&format!("{name}-valgrind"), sources, &toolchain::system_compiler(), &["-O1", "-g"]);
    let mut command = Command::new("valgrind");
    command.args(["--quiet", "--error-exitcode=99", "--leak-check=full", "--fair-sched=yes"]);
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
    under_valgrind("trtllm_call", &["engines/trtllm_call.cpp"]);
}

#[test]
fn the_vllm_adapter_is_as_near_to_fp64_as_its_arithmetic_allows() {
    adapter("vllm_adapter", "vllm/selective_state_update.cpp");
}

#[test]
fn the_flashinfer_adapter_is_as_near_to_fp64_as_its_arithmetic_allows_and_folds_when_flashinfer_does() {
    adapter("flashinfer_adapter", "flashinfer/checkpointing_ssu.cpp");
}

#[test]
fn the_tensorrt_llm_adapter_is_as_near_to_fp64_as_its_arithmetic_allows() {
    adapter("trtllm_adapter", "trtllm/selective_scan_update.cpp");
}

#[test]
fn the_onnxruntime_genai_adapter_is_as_near_to_fp64_as_its_arithmetic_allows() {
    adapter("genai_adapter", "onnxruntime_genai/varlen_gated_delta_net.cpp");
}
