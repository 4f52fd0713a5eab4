//! The documents say what is so: their code is compiled and run, their names are the header's, their links lead somewhere.
//!
//! A block of C or C++ in a document stands under a comment that names its source, `<!-- tests/snippets/step.c: batch -->`, and is the
//! text between `>>> batch` and `<<< batch` there.
// SPDX-License-Identifier: MIT OR Apache-2.0

#![cfg(target_os = "linux")]

#[path = "c/toolchain.rs"]
mod toolchain;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use toolchain::{
    Compiler, Language, Program, compilers, finish, installed, library, library_folder, root, scratch, skipped,
    succeed, system_compiler, text,
};

/// Documents whose code, names and links are checked.
const DOCUMENTS: [&str; 14] = [
    "README.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "docs/INTEGRATION.md",
    "docs/ABI.md",
    "docs/KERNELS.md",
    "docs/MEASUREMENTS.md",
    "examples-cpp/README.md",
    "examples-cpp/adapters/vllm/README.md",
    "examples-cpp/adapters/flashinfer/README.md",
    "examples-cpp/adapters/trtllm/README.md",
    "examples-cpp/adapters/onnxruntime_genai/README.md",
    "examples-cpp/adapters/ggml/README.md",
    "examples-cpp/adapters/pytorch/README.md",
];

/// Programs of `tests/snippets`, their languages, and the end of what they print.
const PROGRAMS: [(&str, &[Language], &str); 10] = [
    ("smallest.c", &[Language::C11], "5 of 8 tokens committed\n"),
    ("step.c", &Language::BOTH, "step: ok\n"),
    ("prompt.c", &Language::BOTH, "prompt: ok\n"),
    ("life.c", &Language::BOTH, "life: ok\n"),
    ("threads.c", &Language::BOTH, "threads: ok\n"),
    ("ask.c", &Language::BOTH, "ask: ok\n"),
    ("handover.c", &Language::BOTH, "handover: ok\n"),
    ("memory.c", &Language::BOTH, "memory: ok\n"),
    ("abi.c", &Language::BOTH, "abi: ok\n"),
    ("wrapper.cpp", &[Language::Cxx17], "wrapper: ok\n"),
];

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// What stands between a region's marks, without the indentation that its lines share.
fn region(source: &str, name: &str) -> Option<String> {
    let is_mark = |line: &str, mark: &str| line.split_whitespace().skip(1).take(2).eq([mark, name]);
    let mut lines = source.lines().skip_while(|line| !is_mark(line, ">>>"));
    lines.next()?;
    let inside: Vec<&str> = lines.by_ref().take_while(|line| !is_mark(line, "<<<")).collect();
    let indent = inside.iter().filter(|l| !l.trim().is_empty()).map(|l| l.len() - l.trim_start().len()).min()?;
    Some(inside.iter().map(|line| line.get(indent..).unwrap_or("").to_owned() + "\n").collect())
}

/// Names of the regions of a source.
fn regions(source: &str) -> Vec<&str> {
    source.lines().filter_map(|line| line.split_once(" >>> ")?.1.split_whitespace().next()).collect()
}

/// The blocks of code of a document: language, text, and the last line above them that is not empty.
fn blocks(document: &str) -> Vec<(&str, String, &str)> {
    let (mut list, mut above) = (Vec::new(), "");
    let mut lines = document.lines();
    while let Some(line) = lines.next() {
        if let Some(language) = line.strip_prefix("```") {
            let inside: String = lines.by_ref().take_while(|l| *l != "```").map(|l| l.to_owned() + "\n").collect();
            list.push((language, inside, above));
        } else if !line.trim().is_empty() {
            above = line;
        }
    }
    list
}

/// Sources and names of the regions that a document's C and C++ blocks are; an error names a block that differs from its region.
fn snippets(document: &str) -> Result<Vec<(String, String)>, String> {
    let mut found = Vec::new();
    for (language, code, above) in blocks(document) {
        if !matches!(language, "c" | "cpp") {
            continue;
        }
        let named = above.strip_prefix("<!-- ").and_then(|l| l.strip_suffix(" -->")).and_then(|l| l.split_once(": "));
        let (source, name) = named.ok_or_else(|| format!("a block of {language} without a source:\n{code}"))?;
        let wanted = region(&read(source), name).ok_or_else(|| format!("{source} has no region {name}"))?;
        if code != wanted {
            return Err(format!("{name} is not {source}'s:\n{code}--- there:\n{wanted}"));
        }
        found.push((source.to_owned(), name.to_owned()));
    }
    Ok(found)
}

/// A document whose blocks are their regions.
fn renewed(document: &str) -> String {
    let (mut out, mut above) = (String::new(), "");
    let mut lines = document.lines();
    while let Some(line) = lines.next() {
        out += &format!("{line}\n");
        if line.starts_with("```") {
            let inside: String = lines.by_ref().take_while(|l| *l != "```").map(|l| l.to_owned() + "\n").collect();
            let named =
                above.strip_prefix("<!-- ").and_then(|l| l.strip_suffix(" -->")).and_then(|l| l.split_once(": "));
            out += &named.and_then(|(source, name)| region(&read(source), name)).unwrap_or(inside);
            out += "```\n";
        } else if !line.trim().is_empty() {
            above = line;
        }
    }
    out
}

#[test]
fn code_in_documents_is_the_code_that_is_tested() {
    let mut used = BTreeSet::new();
    for document in DOCUMENTS {
        if std::env::var_os("REPLAYSSM_WRITE_SNIPPETS").is_some() {
            let text = read(document);
            if renewed(&text) != text {
                fs::write(root().join(document), renewed(&text)).expect("the document is writable");
            }
        }
        used.extend(snippets(&read(document)).unwrap_or_else(|e| panic!("{document}: {e}")));
    }
    let sources = fs::read_dir(root().join("tests/snippets")).expect("tests/snippets");
    let mut known = BTreeSet::new();
    for source in sources.map(|entry| format!("tests/snippets/{}", entry.expect("a file").file_name().display())) {
        let text = read(&source);
        for name in regions(&text) {
            assert!(known.insert((source.clone(), name.to_owned())), "{source} has two regions {name}");
        }
        let compiled = PROGRAMS.iter().any(|(program, ..)| source.ends_with(program)) || source.ends_with("/engine.h");
        assert!(compiled, "{source} is not compiled");
    }
    // An adapter's document shows the program that tests it.
    let adapter = "tests/engines/ggml_adapter.cpp";
    known.extend(regions(&read(adapter)).into_iter().map(|name| (adapter.to_owned(), name.to_owned())));
    assert_eq!(used, known, "regions in documents, and regions of what is compiled");
}

#[test]
fn a_changed_block_a_changed_source_and_a_block_without_source_are_noticed() {
    let document = read("docs/INTEGRATION.md");
    let known = snippets(&document).expect("blocks as they are");
    assert!(known.len() > 20);
    let mut changed = 0;
    for (at, _) in document.match_indices("```c").filter(|(at, _)| document[..*at].ends_with('\n')) {
        let code = at + document[at..].find('\n').expect("a line") + 1;
        let mut other = document.clone();
        other.insert(code, ' ');
        assert!(snippets(&other).is_err(), "a change at byte {code} is not noticed");
        changed += 1;
    }
    assert_eq!(changed, known.len());
    assert!(snippets(&document.replace("<!-- tests/snippets/step.c: batch -->", "")).is_err());
    assert!(snippets(&document.replace("step.c: batch", "step.c: packed")).is_err());
    assert!(snippets(&document.replace("step.c: batch", "step.c: nothing")).is_err());
    assert_eq!(region("  /* >>> a */\n    x\n\n      y\n  /* <<< a */\n", "a").as_deref(), Some("x\n\n  y\n"));
}

/// Builds and runs a program of `tests/snippets`; gives what it prints.
fn run(compiler: &Compiler, language: Language, source: &str, flags: &[&str]) -> String {
    let scratch = scratch(&format!("snippets-{source}-{}-{language:?}-{}", compiler.name, flags.len()));
    let links = library_folder(&scratch, &library());
    let program = Program {
        compiler,
        language,
        sources: &[&format!("snippets/{source}")],
        flags,
        library: &links,
        out: scratch.join("program"),
    };
    String::from_utf8(succeed(&mut Command::new(program.build())).stdout).expect("UTF-8")
}

#[test]
fn code_in_documents_compiles_and_does_what_it_says() {
    for compiler in compilers() {
        for (source, languages, last) in PROGRAMS {
            for &language in languages {
                let said = run(&compiler, language, source, &["-O1", "-Wshadow", "-Wconversion"]);
                assert!(said.ends_with(last), "{source}, {language:?}, {}: {said}", compiler.name);
            }
        }
    }
}

#[test]
fn code_in_documents_is_clean_under_address_and_undefined_behaviour_sanitizers() {
    let flags = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"];
    for (source, languages, last) in PROGRAMS {
        let said = run(&system_compiler(), languages[0], source, &flags);
        assert!(said.ends_with(last), "{source}: {said}");
    }
}

#[test]
fn the_readmes_program_does_not_compile_with_a_status_ignored() {
    let document = read("README.md");
    let [(source, name)] = &snippets(&document).expect("blocks as they are")[..] else { panic!("one program") };
    let program = region(&read(source), name).expect("the region");
    let folder = scratch("readme");
    let compile = |compiler: &Compiler, program: &str| {
        let file = folder.join("program.c");
        fs::write(&file, program).expect("a C file");
        let mut command = compiler.command(Language::C11);
        // GCC looks for ignored results only when it makes code.
        finish(command.args(["-Wshadow", "-Wconversion", "-c"]).arg(&file).arg("-o").arg(folder.join("program.o")))
    };
    for compiler in compilers() {
        let output = compile(&compiler, &program);
        assert!(output.status.success(), "{}", text(&output));
        let mut calls = 0;
        for (at, check) in program.match_indices("CHECK(replayssm_") {
            let call = &check["CHECK".len()..];
            let unchecked = format!("{}{call}{}", &program[..at], &program[at + check.len()..]);
            let said = text(&compile(&compiler, &unchecked));
            assert!(said.contains("unused-result"), "{}: {said}", compiler.name);
            calls += 1;
        }
        assert_eq!(calls, 6);
    }
}

/// Identifiers of a text that begin with `prefix`, without a trailing `_*` or `_`.
fn identifiers<'a>(text: &'a str, prefix: &str) -> BTreeSet<&'a str> {
    let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    words.filter(|word| word.starts_with(prefix)).map(|word| word.trim_end_matches('_')).collect()
}

#[test]
fn names_in_documents_are_the_headers() {
    let header = read("include/replayssm.h");
    let cmake = read("CMakeLists.txt");
    let ggml = ["replayssm_ggml.hpp", "replayssm_llama.hpp"].map(|name| format!("examples-cpp/adapters/ggml/{name}"));
    let python = ["pytorch_adapter.py", "sglang_adapter.py"].map(|name| format!("tests/engines/{name}"));
    let adapters: String = ggml.iter().chain(&python).map(|name| read(name)).collect();
    // Variables of the build.
    let build = read("build-support/kernels.rs") + &read("build-support/nvrtc.rs");
    for document in DOCUMENTS {
        let document_text = read(document);
        for prefix in ["replayssm_", "REPLAYSSM_"] {
            for name in identifiers(&document_text, prefix) {
                let of_tests = ["REPLAYSSM_WRITE_", "REPLAYSSM_TEST_", "REPLAYSSM_SOAK"]
                    .iter()
                    .any(|prefix| name.starts_with(prefix));
                let known = [&header, &cmake, &build, &adapters].iter().any(|text| text.contains(name)) || of_tests;
                assert!(known, "{document} speaks of {name}");
            }
        }
    }
}

#[test]
fn integration_says_what_to_do_on_every_status_and_fault() {
    let (header, document) = (read("include/replayssm.h"), read("docs/INTEGRATION.md"));
    let statuses = header.split("typedef int32_t replayssm_status;").nth(1).expect("statuses");
    let statuses = statuses.split("typedef").next().expect("statuses");
    let names = |text: &str, prefix: &str| -> Vec<String> {
        let lines = text.lines().filter_map(|line| line.strip_prefix("#define ")?.split_whitespace().next());
        lines.filter(|name| name.starts_with(prefix)).map(str::to_owned).collect()
    };
    let (statuses, faults) = (names(statuses, "REPLAYSSM_"), names(&header, "REPLAYSSM_FAULT_"));
    assert_eq!((statuses.len(), faults.len()), (15, 8));
    for name in statuses.iter().chain(&faults) {
        let name = name.trim_start_matches("REPLAYSSM_").trim_start_matches("ERROR_");
        assert!(document.contains(&format!("| `{name}` |")), "no line about {name} in a table of docs/INTEGRATION.md");
    }
}

#[test]
fn numbers_of_the_abi_document_are_the_headers() {
    let (header, document) = (read("include/replayssm.h"), read("docs/ABI.md"));
    let value = |name: &str| {
        header
            .lines()
            .find_map(|line| line.strip_prefix("#define ")?.strip_prefix(name)?.strip_prefix(' ')?.parse().ok())
    };
    let mut rows = 0;
    for line in document.lines() {
        // | `REPLAYSSM_NAME` | number | ...
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let Some(name) = cells.get(1).and_then(|cell| cell.strip_prefix('`')?.strip_suffix('`')) else { continue };
        if let (true, Ok(number)) = (name.starts_with("REPLAYSSM_"), cells[2].parse::<i64>()) {
            assert_eq!(value(name), Some(number), "{name}");
            rows += 1;
        }
    }
    assert_eq!(rows, 15, "statuses in docs/ABI.md");
    // Sizes of the frozen structs.
    let layout = read("tests/c/layout.inc");
    for name in ["replayssm_ids", "replayssm_tensor", "replayssm_cursor"] {
        let size = layout.lines().find_map(|l| l.strip_prefix(&format!("STRUCT({name}, "))?.strip_suffix(')'));
        let row = format!("| `{name}` | {} |", size.expect("a size"));
        assert!(document.contains(&row), "docs/ABI.md lacks {row}");
    }
}

/// A heading's anchor.
fn anchor(heading: &str) -> String {
    let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() }).collect()
}

#[test]
fn links_of_documents_lead_to_files_and_headings() {
    let mut links = 0;
    for document in DOCUMENTS {
        let document_text = read(document);
        let here = Path::new(document).parent().expect("a folder");
        let targets = document_text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        for target in targets.filter(|target| !target.starts_with("http")) {
            let (path, heading) =
                target.split_once('#').map_or((target, None), |(path, heading)| (path, Some(heading)));
            let path = if path.is_empty() { document.into() } else { here.join(path) };
            assert!(root().join(&path).exists(), "{document} links to {}", path.display());
            if let Some(heading) = heading {
                let there = fs::read_to_string(root().join(&path)).expect("a document");
                let known =
                    there.lines().filter(|l| l.starts_with('#')).map(|l| anchor(l.trim_start_matches('#').trim()));
                assert!(known.into_iter().any(|known| known == heading), "{document} links to {target}");
            }
            links += 1;
        }
    }
    assert!(links > 20, "{links} links");
}

#[test]
fn pictures_are_well_formed_and_their_text_is_text() {
    if !installed("python3") {
        return skipped("the pictures", "python3 is not installed");
    }
    for picture in ["docs/step.svg", "docs/slot.svg", "docs/drift.svg"] {
        let parse =
            "import sys, xml.dom.minidom as m; d = m.parse(sys.argv[1]); print(len(d.getElementsByTagName('text')))";
        let said = text(&succeed(Command::new("python3").args(["-c", parse]).arg(root().join(picture))));
        assert!(said.trim().parse::<u32>().expect("a number") > 10, "{picture} has little text");
        let svg = read(picture);
        for needed in ["prefers-color-scheme: dark", "<title", "<desc"] {
            assert!(svg.contains(needed), "{picture} lacks {needed}");
        }
    }
}
