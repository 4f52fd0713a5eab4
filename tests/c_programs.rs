//! The C side of the interface, seen by C and C++ compilers: header, layout, symbols, and programs that misuse it.
// SPDX-License-Identifier: MIT OR Apache-2.0

#![cfg(target_os = "linux")]

#[path = "c/toolchain.rs"]
mod toolchain;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use toolchain::{
    Compiler, Elf, Language, Program, clang, compilers, installed, library, library_folder, root, scratch, skipped,
    succeed, system_compiler, text,
};

fn source(name: &str) -> PathBuf {
    root().join("tests/c").join(name)
}

fn check_syntax(compiler: &Compiler, language: Language, name: &str, flags: &[&str]) {
    succeed(compiler.command(language).args(flags).arg("-fsyntax-only").arg(source(name)));
}

#[test]
fn the_header_stands_alone_and_twice_in_c11_and_cxx17() {
    for compiler in compilers() {
        for language in Language::BOTH {
            check_syntax(&compiler, language, "header.c", &["-Wshadow", "-Wconversion"]);
            // `-x` makes the header a translation unit of its own.
            succeed(compiler.command(language).args(["-Wpadded", "-fsyntax-only"]).arg(source("padding.c")));
        }
        if root().join("include/replayssm.hpp").exists() {
            check_syntax(&compiler, Language::Cxx17, "wrapper.cpp", &["-Wshadow", "-Wconversion"]);
        } else {
            skipped("replayssm.hpp", "include/replayssm.hpp is not there");
        }
    }
}

#[test]
fn the_header_parses_for_msvc() {
    let Some(clang) = clang() else {
        return skipped("the MSVC target", "clang and clang++ are not installed");
    };
    for language in Language::BOTH {
        for name in ["header.c", "padding.c", "layout.c"] {
            // Freestanding: clang's own stddef.h and stdint.h, since there is no Windows SDK.
            check_syntax(&clang, language, name, &["--target=x86_64-pc-windows-msvc", "-ffreestanding", "-nostdinc++"]);
        }
    }
}

macro_rules! layouts {
    ($($name:ident { $($field:ident),* })*) => {{
        let mut lines = Vec::new();
        $(
            lines.push(format!("STRUCT({}, {})", stringify!($name), size_of::<replayssm::ffi::$name>()));
            $(lines.push(format!(
                "FIELD({}, {}, {}, {})",
                stringify!($name),
                stringify!($field),
                std::mem::offset_of!(replayssm::ffi::$name, $field),
                field_size(|s: &replayssm::ffi::$name| &raw const s.$field),
            ));)*
        )*
        lines
    }};
}

fn field_size<S, F>(_: fn(&S) -> *const F) -> usize {
    size_of::<F>()
}

#[test]
fn struct_layouts_are_the_same_numbers_in_c_cxx_and_rust() {
    let list = fs::read_to_string(source("layout.inc")).expect("layout.inc");
    let wanted: Vec<&str> = list.lines().filter(|l| l.starts_with("STRUCT(") || l.starts_with("FIELD(")).collect();
    let found = layouts! {
        replayssm_ids { data, stride, dtype, reserved }
        replayssm_tensor { data, stride_row, stride_token, stride_head, dtype, reserved }
        replayssm_context_desc { struct_size, backend, device, n_threads, flags, reserved, log, log_user, log_level, log_reserved }
        replayssm_context_info { struct_size, backend, device, n_threads, name }
        replayssm_slots_desc { struct_size, n_slots, n_rings, window, max_step_tokens, min_rewind, schedule, flags }
        replayssm_pool_desc { struct_size, family, n_layers, io, out, format, readout, stochastic_rounding, nheads, headdim, dstate, ngroups, H, HV, K, V, head_map, u_dtype, channels, width, n_sections, reserved, section_channels }
        replayssm_lent { struct_size, kind, base, layer_stride_bytes, slot_stride_bytes, layer_bases, offset_bytes }
        replayssm_component { struct_size, kind, per_ring, reserved, bytes, base, slot_stride_bytes, layer_stride_bytes, layer_bases }
        replayssm_plan_args { struct_size, batch, tokens, reserved, budget_bytes }
        replayssm_plan_info { struct_size, recommended_window, checkpoint_bytes, ring_bytes, fixed_bytes, total_bytes, slots_in_budget, state_per_draft_bytes, slots_in_budget_state_per_draft, step_bytes, plain_step_bytes, flush_share }
        replayssm_restore_args { struct_size, reserved, generation }
        replayssm_exec { struct_size, flags, stream, part, n_parts }
        replayssm_batch { struct_size, flags, n_rows, tokens, max_tokens, null_id, keep_tail, reserved, n_tokens, slots, rings, cu_seqlens, flush, generation }
        replayssm_mamba2_args { struct_size, no_softplus, x, B, C, dt, A, dt_bias, D, D_per_element, reserved, z, out }
        replayssm_delta_args { struct_size, gate, q, k, v, g, beta, A_log, dt_bias, lower_bound, scale, l2norm_eps, no_l2norm, beta_processed, reserved, out }
        replayssm_conv1d_args { struct_size, no_silu, x, out, weight, bias }
        replayssm_commit_args { struct_size, convention, counts, counts_stride }
        replayssm_list { struct_size, n, place, reserved, slots, rings, n_pools, pools_reserved, pools, pool_slots }
        replayssm_flush_args { struct_size, later, position }
        replayssm_snapshot_args { struct_size, n_pools, at, dst, pools, pool_src, pool_dst }
        replayssm_copy_args { struct_size, kind, position, generation }
        replayssm_reset_args { struct_size, keep_checkpoint, convert, reserved, position, generation, seed }
        replayssm_state { struct_size, dtype, orientation, layer, data, stride_entry, stride_layer, stride_head, stride_row }
        replayssm_cursor { position, flush_before, seed, generation, committed }
        replayssm_report { struct_size, bits, count, first_slot, first_row, first_pool, first_layer }
        replayssm_stats { struct_size, reserved, steps, rows, tokens, accepted, flushes, checkpoint_bytes_read, checkpoint_bytes_written, ring_bytes_read, ring_bytes_written }
    };
    assert_eq!(found, wanted, "Rust against tests/c/layout.inc");

    // Every struct of the header is in the list, with every field.
    let header = fs::read_to_string(root().join("include/replayssm.h")).expect("the header");
    let (mut structs, mut fields, mut inside) = (0, 0, false);
    for line in header.lines() {
        let code = line.trim();
        if code.starts_with("typedef struct ") && code.ends_with('{') {
            (structs, inside) = (structs + 1, true);
        } else if inside && code.starts_with('}') {
            inside = false;
        } else if inside && code.ends_with(';') && !code.starts_with(['/', '*']) {
            fields += 1;
        }
    }
    assert_eq!(structs, wanted.iter().filter(|l| l.starts_with("STRUCT")).count(), "structs of the header");
    assert_eq!(fields, wanted.iter().filter(|l| l.starts_with("FIELD")).count(), "fields of the header");

    for compiler in compilers() {
        for language in Language::BOTH {
            check_syntax(&compiler, language, "layout.c", &[]);
        }
    }
}

#[test]
fn exported_symbols_are_the_committed_list() {
    toolchain::check_symbols(&library());
}

#[test]
fn what_a_library_must_not_have_is_noticed() {
    if !installed("readelf") {
        return skipped("the symbols of the library", "readelf is not installed");
    }
    let good = Elf::of(&library());
    let list = |name: &str| fs::read_to_string(source(name)).expect("a list");
    let (symbols, needed) = (list("symbols.txt"), list("needed.txt"));
    let objections = |elf: &Elf| elf.objections(&symbols, &needed, (2, 34));
    assert_eq!(objections(&good), Vec::<String>::new());
    let dynamic = |from: &str, to: &str| Elf { dynamic: good.dynamic.replace(from, to), ..good.clone() };
    let symbol = |from: &str, to: &str| Elf { symbols: good.symbols.replace(from, to), ..good.clone() };
    let segment = |from: &str, to: &str| Elf { segments: good.segments.replace(from, to), ..good.clone() };
    for (wanted, elf) in [
        ("it needs libnew.so.1", dynamic("libc.so.6", "libnew.so.1")),
        ("its soname is", dynamic("Library soname: [lib", "Library soname: [other")),
        ("it has text relocations", dynamic("BIND_NOW", "BIND_NOW TEXTREL")),
        ("it is not read-only", dynamic("BIND_NOW", "")),
        ("it has a run path", dynamic("(NEEDED) ", "(RUNPATH) ")),
        ("it exports", symbol("replayssm_save_bytes", "replayssm_more_bytes")),
        ("it needs GLIBC_2.99", symbol("GLIBC_2.14", "GLIBC_2.99")),
        ("it needs glibc Some((2, 99))", symbol("GLIBC_2.14", "GLIBC_2.99")),
        ("it needs GCC_99", symbol("GCC_3.0", "GCC_99")),
        ("it needs glibc None", symbol("GLIBC_", "MUSL_")),
        ("its stack is executable", segment("RW  0", "RWE 0")),
        ("its stack is executable", segment("GNU_STACK", "GNU_OTHER")),
        ("it is not read-only", segment("GNU_RELRO", "GNU_OTHER")),
        ("a part of it can be written", segment("R E 0x", "RWE 0x")),
    ] {
        let found = objections(&elf);
        assert!(elf != good, "{wanted}: nothing was changed");
        assert!(found.iter().any(|o| o.starts_with(wanted)), "{wanted}: {found:?}");
    }
    // On the machines that the list is written for, nothing is in it that nothing needs.
    if cfg!(target_arch = "x86_64") && good.versions().contains("GLIBC_2.34") {
        let listed = needed.lines().filter_map(|line| line.strip_prefix("version ")?.split_whitespace().next());
        let unused: Vec<&str> = listed.filter(|v| *v != "GLIBC_2.17" && !good.versions().contains(v)).collect();
        assert_eq!(unused, Vec::<&str>::new(), "in tests/c/needed.txt");
    }
}

const MISUSE: [&str; 5] =
    ["c/misuse/misuse.c", "c/misuse/handles.c", "c/misuse/descriptors.c", "c/misuse/calls.c", "c/misuse/threads.c"];

/// Builds a C program in a scratch folder of its own.
fn build(folder: &str, compiler: &Compiler, sources: &[&str], flags: &[&str], library: &Path) -> PathBuf {
    let scratch = scratch(folder);
    let links = library_folder(&scratch, library);
    let out = scratch.join("program");
    let cxx = sources.iter().any(|source| source.ends_with(".cpp"));
    let language = if cxx { Language::Cxx17 } else { Language::C11 };
    Program { compiler, language, sources, flags, library: &links, out }.build()
}

/// Runs a program; it must succeed and print its last line, which starts with its name.
fn run(command: &mut Command, name: &str) {
    let output = succeed(command);
    let text = text(&output);
    let last = text.lines().rev().find(|l| l.starts_with(name)).unwrap_or_else(|| panic!("no result in:\n{text}"));
    println!("{last}");
}

#[test]
fn misuse_gives_a_status_and_a_sentence() {
    for compiler in compilers() {
        let program = build(&format!("misuse-{}", compiler.name), &compiler, &MISUSE, &["-O0"], &library());
        run(&mut Command::new(program), "misuse:");
    }
}

#[test]
fn misuse_is_clean_under_address_and_undefined_behaviour_sanitizers() {
    let flags = ["-g", "-O0", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
    let program = build("misuse-asan", &system_compiler(), &MISUSE, &flags, &library());
    run(Command::new(program).env("ASAN_OPTIONS", "detect_leaks=1:allocator_may_return_null=1"), "misuse:");
}

#[test]
fn misuse_is_clean_under_valgrind() {
    if !installed("valgrind") {
        return skipped("valgrind", "it is not installed");
    }
    let program = build("misuse-valgrind", &system_compiler(), &MISUSE, &["-g", "-O0"], &library());
    let mut command = Command::new("valgrind");
    command.args(["--quiet", "--error-exitcode=99", "--leak-check=full", "--fair-sched=yes"]);
    run(command.arg(program).arg("short"), "misuse:");
}

/// Builds the library with `fault-injection` in a target folder of its own, since both builds have one file name.
fn faulty_library() -> PathBuf {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).join("fault-injection");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--quiet", "--locked", "--lib", "--features", "fault-injection"]);
    command.arg("--manifest-path").arg(root().join("Cargo.toml")).arg("--target-dir").arg(&target);
    // The switch is nothing to kernels.
    succeed(command.env("CARGO_PROFILE_DEV_OPT_LEVEL", "0").env("REPLAYSSM_CUDA", "off").env_remove("RUSTC_BOOTSTRAP"));
    target.join("debug/libreplayssm.so")
}

#[test]
fn a_failing_call_at_thread_exit_does_not_abort_and_no_environment_is_read() {
    let program = build("thread-exit", &system_compiler(), &["c/thread_exit.cpp"], &["-pthread"], &library());
    let output = succeed(&mut Command::new(program));
    assert_eq!(text(&output), "thread exit: ok\n");
}

#[test]
fn a_panic_arrives_as_internal_and_prints_nothing() {
    let program = build("panic", &system_compiler(), &["c/panic.c"], &[], &faulty_library());
    for backtrace in [None, Some("1"), Some("full")] {
        let mut command = Command::new(&program);
        command.env_remove("RUST_BACKTRACE").envs(backtrace.map(|value| ("RUST_BACKTRACE", value)));
        let output = succeed(&mut command);
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "RUST_BACKTRACE={backtrace:?}");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "panic: ok\n", "RUST_BACKTRACE={backtrace:?}");
    }
    // The library that users get has no such switch.
    let program = build("no-panic", &system_compiler(), &["c/panic.c"], &[], &library());
    let output = succeed(Command::new(&program).arg("released"));
    assert_eq!(text(&output), "panic: refused\n");
}

#[test]
fn flush_to_zero_in_the_callers_thread_changes_no_byte() {
    if !cfg!(any(target_arch = "x86_64", target_arch = "aarch64")) {
        return skipped("flush-to-zero", "the program knows x86-64 and aarch64");
    }
    for compiler in compilers() {
        let program = build(&format!("ftz-{}", compiler.name), &compiler, &["c/ftz.c"], &["-O1"], &library());
        run(&mut Command::new(program), "ftz:");
    }
}

#[test]
fn the_environment_does_not_choose_the_number_of_threads() {
    let program = build("threads", &system_compiler(), &["c/threads.c"], &[], &library());
    let mut seen = BTreeSet::new();
    for value in [None, Some("1"), Some("7")] {
        let mut command = Command::new(&program);
        for name in ["RAYON_NUM_THREADS", "OMP_NUM_THREADS"] {
            command.env_remove(name).envs(value.map(|value| (name, value)));
        }
        seen.insert(text(&succeed(&mut command)));
    }
    assert_eq!(seen.len(), 1, "{seen:?}");
    println!("{}", seen.first().expect("a run"));
}

#[test]
fn a_host_may_unload_the_library() {
    let program = build("unload", &system_compiler(), &["c/unload.c"], &[], &library());
    run(Command::new(program).arg(library()), "unload:");
}

#[test]
fn a_context_says_what_is_created_and_destroyed_and_nothing_else() {
    for compiler in compilers() {
        let program = build(&format!("log-{}", compiler.name), &compiler, &["c/log.c"], &["-O1"], &library());
        run(&mut Command::new(program), "log:");
    }
}

#[test]
fn build_info_names_version_target_compiler_backends_and_features() {
    // SAFETY: a static string.
    let info = unsafe { std::ffi::CStr::from_ptr(replayssm::ffi::replayssm_build_info()) }.to_str().expect("ASCII");
    println!("{info}");
    let version = concat!("replayssm ", env!("CARGO_PKG_VERSION"), ", ");
    assert!(info.is_ascii() && info.starts_with(version), "{info}");
    for part in [env!("REPLAYSSM_TARGET"), "rustc 1.", "backends: CPU (", "CUDA (", "features: none"] {
        assert!(info.contains(part), "{info} lacks {part}");
    }
    assert!(!info.contains(['/', '\\', '\n']), "no path and one line: {info}");
}
