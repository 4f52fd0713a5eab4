//! Where the library's parts come from: crates by Cargo.lock and under licences that deny.toml names, tools by version and hash, and the same
//! bytes from the same sources. `third_party_notices_name_every_crate_whose_code_is_linked` is in `tests/install.rs`, what the library
//! needs at run time in `tests/c/needed.txt`.
// SPDX-License-Identifier: MIT OR Apache-2.0

#![cfg(target_os = "linux")]

#[path = "c/toolchain.rs"]
mod toolchain;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use toolchain::{finish, installed, root, skipped, succeed, text};

fn cargo() -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).env_remove("RUSTC_BOOTSTRAP");
    command
}

/// Files of the repository, by their paths in it: what cargo and the scripts build into is not looked at.
fn files() -> Vec<String> {
    fn below(folder: &Path, list: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry")) {
            let name = entry.file_name();
            let built = folder == root() && (name == "target" || name == "build");
            if built || name.to_string_lossy().starts_with('.') {
                continue;
            }
            match entry.file_type().expect("a type") {
                kind if kind.is_dir() => below(&entry.path(), list),
                kind if kind.is_file() => list.push(entry.path()),
                _ => (),
            }
        }
    }
    let mut list = Vec::new();
    below(root(), &mut list);
    let mut list: Vec<String> =
        list.iter().map(|path| path.strip_prefix(root()).expect("below the root").display().to_string()).collect();
    list.sort();
    list
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

// ---- Crates ----

const CRATES_IO: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Packages of a lock file, but for this one, that do not come from crates.io by their checksum; and how many do.
fn unpinned(lock: &str) -> (Vec<String>, usize) {
    let (mut wrong, mut right) = (Vec::new(), 0);
    for package in lock.split("[[package]]\n").skip(1) {
        let value = |key: &str| {
            let line = package.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = \""));
            line.map(|line| line.trim_end_matches('"').to_owned())
        };
        let name = value("name").unwrap_or_default();
        let has_sum =
            value("checksum").is_some_and(|sum| sum.len() == 64 && sum.bytes().all(|b| b.is_ascii_hexdigit()));
        match value("source") {
            None if name == "replayssm" => (),
            Some(source) if source == CRATES_IO && has_sum => right += 1,
            source => wrong.push(format!("{name} of {source:?}, checksum: {has_sum}")),
        }
    }
    (wrong, right)
}

#[test]
fn every_crate_of_every_lock_file_comes_from_crates_io_by_its_checksum() {
    let locks: Vec<String> = files().into_iter().filter(|path| path.ends_with("Cargo.lock")).collect();
    assert!(locks.contains(&"Cargo.lock".into()));
    for lock in locks {
        let (wrong, right) = unpinned(&read(&lock));
        assert_eq!(wrong, Vec::<String>::new(), "{lock}");
        assert!(right > 10, "{right} crates in {lock}");
    }
    let lock = read("Cargo.lock");
    let libc = &lock[lock.find("name = \"libc\"").expect("libc")..];
    let sum = libc.lines().find(|line| line.starts_with("checksum")).expect("its checksum");
    for changed in [
        lock.replace(&format!("{sum}\n"), ""),
        lock.replace(sum, "checksum = \"abc\""),
        lock.replacen(CRATES_IO, "registry+https://example.org/index", 1),
        lock.replacen(CRATES_IO, "git+https://example.org/crate#0123456789", 1),
        lock.replacen(&format!("source = \"{CRATES_IO}\"\n"), "", 1),
    ] {
        assert_eq!(unpinned(&changed).0.len(), 1);
    }
}

// ---- Licences ----

/// Whether an expression of SPDX can be met with the allowed licences alone: OR offers, AND asks for all, WITH adds to a licence.
fn may_be_used(expression: &str, allowed: &BTreeSet<String>) -> bool {
    fn any(words: &mut std::iter::Peekable<std::slice::Iter<'_, String>>, allowed: &BTreeSet<String>) -> bool {
        let mut result = false;
        loop {
            let mut all = true;
            loop {
                let word = words.next().map_or("", |word| word);
                let one = if word == "(" {
                    let inside = any(words, allowed);
                    words.next();
                    inside
                } else if words.next_if(|next| *next == "WITH").is_some() {
                    allowed.contains(&format!("{word} WITH {}", words.next().map_or("", |word| word)))
                } else {
                    allowed.contains(word)
                };
                all &= one;
                if words.next_if(|next| *next == "AND").is_none() {
                    break;
                }
            }
            result |= all;
            if words.next_if(|next| *next == "OR").is_none() {
                return result;
            }
        }
    }
    let spaced = expression.replace('(', " ( ").replace(')', " ) ").replace('/', " OR ");
    let words: Vec<String> = spaced.split_whitespace().map(str::to_owned).collect();
    any(&mut words.iter().peekable(), allowed)
}

/// Licences that deny.toml allows: for every crate, and for some crates beside these.
fn allowed(deny: &str) -> (BTreeSet<String>, BTreeMap<String, BTreeSet<String>>) {
    let list = |line: &str| -> Option<BTreeSet<String>> {
        let inside = line.strip_prefix("allow = [")?.strip_suffix(']')?;
        Some(inside.split(',').map(|word| word.trim().trim_matches('"').to_owned()).collect())
    };
    let sections = |name: &str| -> Vec<&str> {
        let head = format!("{name}]");
        deny.split("\n[").filter(|part| part.starts_with(&head)).collect()
    };
    let all = sections("licenses").first().and_then(|part| part.lines().find_map(list)).expect("allow in [licenses]");
    let one = |part: &str| {
        let name = part.lines().find_map(|line| line.strip_prefix("crate = \"")?.split('"').next()).expect("a crate");
        (name.to_owned(), part.lines().find_map(list).expect("its licences"))
    };
    (all, sections("[licenses.exceptions]").into_iter().map(one).collect())
}

/// Names and licences of crates, with the given edges and features.
fn crates(arguments: &[&str]) -> BTreeMap<String, String> {
    let mut tree = cargo();
    tree.args(["tree", "--locked", "--offline", "--prefix", "none", "--format", "{p}|{l}"]).args(arguments);
    let output = succeed(&mut tree);
    let text = String::from_utf8(output.stdout).expect("UTF-8");
    let line = |line: &str| {
        let (package, licence) = line.trim_end_matches(" (*)").split_once('|')?;
        Some((package.split(' ').next()?.to_owned(), licence.to_owned()))
    };
    text.lines().filter_map(line).collect()
}

#[test]
fn licences_of_what_is_in_the_library_are_those_that_deny_toml_allows() {
    let (all, exceptions) = allowed(&read("deny.toml"));
    let linked = crates(&["--edges", "normal,no-proc-macro"]);
    assert!(linked.len() >= 10 && linked.contains_key("replayssm"), "{linked:?}");
    for (name, licence) in &linked {
        assert!(may_be_used(licence, &all), "{name} is under {licence}; deny.toml allows {all:?}");
        assert!(!exceptions.contains_key(name), "{name} is in the library, and has an exception in deny.toml");
    }
    // What builds and tests it, and the program that measures.
    let others = crates(&["--edges", "normal,build,dev", "--all-features"]);
    assert!(others.len() > linked.len() + 10);
    let mut unused: BTreeSet<&String> = exceptions.keys().collect();
    for (name, licence) in &others {
        let with_exceptions = all.union(exceptions.get(name).unwrap_or(&BTreeSet::new())).cloned().collect();
        assert!(may_be_used(licence, &with_exceptions), "{name} is under {licence}");
        if !may_be_used(licence, &all) {
            unused.remove(name);
        }
    }
    assert!(unused.is_empty(), "exceptions in deny.toml that nothing needs: {unused:?}");
}

#[test]
fn a_licence_that_is_not_allowed_is_noticed() {
    let allowed: BTreeSet<String> = ["MIT", "ISC", "Apache-2.0 WITH LLVM-exception"].map(str::to_owned).into();
    for (expression, wanted) in [
        ("MIT", true),
        ("GPL-3.0-only", false),
        ("MIT OR GPL-3.0-only", true),
        ("GPL-3.0-only OR Apache-2.0", false),
        ("GPL-3.0-only/MIT", true),
        ("MIT AND ISC", true),
        ("MIT AND Unicode-3.0", false),
        ("(MIT OR Apache-2.0) AND Unicode-3.0", false),
        ("(GPL-3.0-only OR ISC) AND MIT", true),
        ("Unicode-3.0 AND (MIT OR ISC)", false),
        ("Apache-2.0 WITH LLVM-exception OR GPL-3.0-only", true),
        ("Apache-2.0", false),
        ("MIT WITH LLVM-exception", false),
        ("", false),
    ] {
        assert_eq!(may_be_used(expression, &allowed), wanted, "{expression:?}");
    }
}

#[test]
fn cargo_deny_finds_nothing() {
    if !installed("cargo-deny") {
        return skipped("cargo-deny", "it is not installed");
    }
    succeed(cargo().args(["deny", "--locked", "check", "licenses", "bans", "sources"]));
    let output = finish(cargo().args(["deny", "--locked", "check", "advisories"]));
    let said = text(&output);
    if said.contains("failed to fetch advisory database") {
        return skipped("cargo-deny's advisories", "their database cannot be fetched");
    }
    assert!(output.status.success(), "{said}");
}

// ---- What scripts fetch ----

/// Lines of a script, those that a backslash ends joined with the next.
fn logical_lines(text: &str) -> Vec<String> {
    let joined = text.replace("\\\n", " ");
    joined.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect()
}

/// Requirements of a list of pip's that are not one version with hashes.
fn unpinned_requirements(list: &str) -> Vec<String> {
    let is_hash = |word: &str| {
        let digits = word.strip_prefix("--hash=sha256:").unwrap_or_default();
        digits.len() == 64 && digits.bytes().all(|b| b.is_ascii_hexdigit())
    };
    let pinned = |line: &String| {
        let words: Vec<&str> = line.split(' ').collect();
        let (name, version) = words[0].split_once("==").unwrap_or_default();
        let hashes = words.iter().filter(|word| word.starts_with("--hash")).collect::<Vec<_>>();
        let exact = !name.is_empty() && version.starts_with(|c: char| c.is_ascii_digit()) && !version.contains('*');
        exact && !hashes.is_empty() && hashes.into_iter().all(|hash| is_hash(hash))
    };
    let lines = logical_lines(list).into_iter().filter(|line| !line.is_empty() && !line.starts_with('#'));
    lines.filter(|line| !pinned(line)).collect()
}

/// Where Debian's packages are fetched: tools of tests, of which apt checks the distribution's signatures; and a comment that tells
/// where a text comes from that lies here.
const APT: [&str; 3] = ["tests/aarch64.sh", "tests/abigail.sh", "examples-cpp/demo/train/text.py"];

/// Lines of a script that fetch something without a pin.
fn unpinned_fetches(path: &str, script: &str) -> Vec<String> {
    let wrong = |line: &String| {
        let has = |words: &[&str]| words.iter().any(|word| line.contains(word));
        let downloads =
            ["curl ", "wget ", "git clone", "urlopen", "urlretrieve", "requests.get", "FetchContent", "file(DOWNLOAD"];
        let more =
            ["ExternalProject", "npm ", "cargo install", "rustup component", "rustup toolchain", "rustup target add"];
        let pip = has(&["pip ", "pip[@]", "pip3 "]) && has(&[" install ", " download "]);
        // By a list of packaging/, which is looked at by itself; `backend` holds such lists.
        let pinned = has(&["--require-hashes"]) && has(&["-r packaging/", "\"${backend[@]}\""]);
        let apt = has(&["apt-get ", "apt "]) && has(&[" install", " download"]) && !APT.contains(&path);
        // Crates are pinned by Cargo.lock as long as cargo may not change it.
        let cargo = has(&["cargo", "CARGO)"]) && has(&[" build ", " test ", " run ", " rustc ", " fetch ", " clippy "]);
        let runs = cargo && has(&["cargo\" ", "cargo test", "cargo run", "cargo build", "$(CARGO) "]);
        // A part of the toolchain that rust-toolchain.toml pins: rustup has its hash.
        let of_toolchain = path == "tests/tsan.sh" && has(&["rustup component add rust-src"]);
        has(&downloads) || (has(&more) && !of_toolchain) || (pip && !pinned) || apt || (runs && !has(&["--locked"]))
    };
    let is_code = |line: &String| !line.starts_with('#') && !line.starts_with("echo ");
    logical_lines(script).into_iter().filter(|line| is_code(line) && wrong(line)).collect()
}

#[test]
fn what_scripts_fetch_is_pinned_by_version_and_hash() {
    let (mut lists, mut scripts) = (0, 0);
    for path in files() {
        let name = path.rsplit('/').next().expect("a name");
        if path.starts_with("packaging/") && name.ends_with(".txt") {
            assert_eq!(unpinned_requirements(&read(&path)), Vec::<String>::new(), "{path}");
            lists += 1;
        }
        let is_script =
            [".sh", ".py", ".cmake", ".in", "-cc", "Makefile", "CMakeLists.txt"].iter().any(|end| name.ends_with(end));
        if is_script {
            assert_eq!(unpinned_fetches(&path, &read(&path)), Vec::<String>::new(), "{path}");
            scripts += 1;
        }
    }
    assert!(lists >= 5 && scripts >= 20, "{lists} lists, {scripts} scripts");
    let toolchain = read("rust-toolchain.toml");
    let channel = toolchain.lines().find_map(|line| line.strip_prefix("channel = \"")).expect("a channel");
    assert_eq!(channel.split('.').count(), 3, "the compiler's version is {channel}");
}

#[test]
fn what_is_fetched_without_a_pin_is_noticed() {
    let list = read("packaging/nvrtc.txt");
    assert_eq!(unpinned_requirements(&list), Vec::<String>::new());
    for (from, to) in [
        ("==", ">="),
        ("==12.9.86", "==12.*"),
        ("==12.9.86", ""),
        ("sha256", "md5"),
        ("--hash", "--no-hash"),
        ("210cf05", "210cf0"),
    ] {
        assert!(list.contains(from));
        assert_eq!(unpinned_requirements(&list.replace(from, to)).len(), 1, "{from} as {to}");
    }
    for line in [
        "curl -O https://example.org/tool.tar.gz",
        "wget https://example.org/tool.tar.gz",
        "git clone https://example.org/tool",
        "python3 -m pip install tool",
        "build/venv/bin/pip install -r packaging/cmake.txt",
        "build/venv/bin/pip install --require-hashes tool==1.0",
        "build/venv/bin/pip download --quiet \\\n  tool",
        "apt-get install tool",
        "cargo install tool",
        "\"$cargo\" build --release",
        "\t$(CARGO) test --test header",
        "  FetchContent_Declare(tool URL https://example.org/tool.zip)",
        "rustup component add tool",
    ] {
        assert_eq!(unpinned_fetches("tests/new.sh", &format!("set -e\n{line}\n")).len(), 1, "{line}");
    }
    for line in [
        "# curl is not used",
        "apt-get install tool",
        "build/venv/bin/pip install --require-hashes -r packaging/cmake.txt",
        "\"$cargo\" build --locked",
    ] {
        assert_eq!(unpinned_fetches("tests/aarch64.sh", line), Vec::<String>::new(), "{line}");
    }
}

// ---- The same bytes ----

/// Quickly: not optimised, without kernels. The whole one, as it is released, is a step of releasing.
#[test]
fn two_builds_in_two_folders_give_one_library() {
    let mut script = Command::new(root().join("packaging/reproduce.sh"));
    for name in ["RUSTC_BOOTSTRAP", "CARGO_TARGET_DIR", "CARGO_BUILD_TARGET_DIR", "MAKEFLAGS", "LD_LIBRARY_PATH"] {
        script.env_remove(name);
    }
    let output = succeed(script.env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "0").env("REPLAYSSM_CUDA", "off"));
    let said = String::from_utf8(output.stdout).expect("UTF-8");
    let hash = said.trim();
    assert!(hash.len() == 64 && hash.bytes().all(|b| b.is_ascii_hexdigit()), "{said}");
}
