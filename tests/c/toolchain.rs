//! Compilers, scratch folders and child processes of the tests that build C and C++ programs.
// SPDX-License-Identifier: MIT OR Apache-2.0

// Every test binary that includes this file uses a part of it.
#![allow(dead_code)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::{env, fs};

/// The name that programs record for the library.
pub(crate) const SONAME: &str = concat!("libreplayssm.so.", env!("REPLAYSSM_SOVERSION"));

/// All warnings are errors.
pub(crate) const STRICT: [&str; 4] = ["-Wall", "-Wextra", "-Wpedantic", "-Werror"];

/// The repository.
pub(crate) fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// A language and the standard that the interface promises for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Language {
    C11,
    Cxx17,
}

impl Language {
    pub(crate) const BOTH: [Language; 2] = [Language::C11, Language::Cxx17];

    pub(crate) fn flags(self) -> [&'static str; 3] {
        match self {
            Language::C11 => ["-std=c11", "-x", "c"],
            Language::Cxx17 => ["-std=c++17", "-x", "c++"],
        }
    }
}

/// A C compiler and its C++ companion.
#[derive(Debug, Clone)]
pub(crate) struct Compiler {
    pub(crate) name: String,
    c: PathBuf,
    cxx: PathBuf,
}

impl Compiler {
    pub(crate) fn command(&self, language: Language) -> Command {
        let mut command = Command::new(if language == Language::C11 { &self.c } else { &self.cxx });
        command.args(language.flags()).args(STRICT).arg("-I").arg(root().join("include"));
        command
    }

    pub(crate) fn path(&self, language: Language) -> &Path {
        if language == Language::C11 { &self.c } else { &self.cxx }
    }
}

/// The system's compiler as the `cc` crate finds it.
pub(crate) fn system_compiler() -> Compiler {
    let tool = |cpp| {
        let mut build = cc::Build::new();
        build.cargo_metadata(false).cargo_warnings(false).opt_level(1).cpp(cpp);
        build.target(env!("REPLAYSSM_TARGET")).host(env!("REPLAYSSM_TARGET")).get_compiler()
    };
    let (c, cxx) = (tool(false), tool(true));
    let name = if c.is_like_clang() { "clang" } else { "gcc" };
    Compiler { name: name.into(), c: c.path().into(), cxx: cxx.path().into() }
}

/// The system's compiler, and clang too where it is another one.
pub(crate) fn compilers() -> Vec<Compiler> {
    let mut list = vec![system_compiler()];
    if list[0].name == "clang" {
        skipped("gcc", "the system's compiler is clang");
    } else if let Some(clang) = clang() {
        list.push(clang);
    } else {
        skipped("clang", "clang and clang++ are not installed");
    }
    list
}

/// clang and clang++, if both are installed.
pub(crate) fn clang() -> Option<Compiler> {
    (installed("clang") && installed("clang++")).then(|| Compiler {
        name: "clang".into(),
        c: "clang".into(),
        cxx: "clang++".into(),
    })
}

/// Whether a program answers to `--version`.
pub(crate) fn installed(program: &str) -> bool {
    Command::new(program).arg("--version").output().is_ok_and(|output| output.status.success())
}

/// Says what a test left out.
pub(crate) fn skipped(what: &str, why: &str) {
    println!("skipped: {what} because {why}");
}

/// An empty folder of a test's own.
pub(crate) fn scratch(name: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    if folder.exists() {
        fs::remove_dir_all(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    }
    fs::create_dir_all(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    folder
}

/// The shared library that this test run was built with. Cargo leaves it beside the test binaries.
pub(crate) fn library() -> PathBuf {
    let path = env::current_exe().expect("a test binary").with_file_name("libreplayssm.so");
    assert!(path.is_file(), "{} is missing", path.display());
    path
}

/// A folder with the library under both names that linking and loading need.
pub(crate) fn library_folder(scratch: &Path, library: &Path) -> PathBuf {
    let folder = scratch.join("lib");
    fs::create_dir_all(&folder).expect("a folder for the library");
    for name in ["libreplayssm.so", SONAME] {
        std::os::unix::fs::symlink(library, folder.join(name)).expect("a link to the library");
    }
    folder
}

/// A program's source and how to build it.
pub(crate) struct Program<'a> {
    pub(crate) compiler: &'a Compiler,
    pub(crate) language: Language,
    /// Below `tests/`.
    pub(crate) sources: &'a [&'a str],
    pub(crate) flags: &'a [&'a str],
    /// A folder from [`library_folder`].
    pub(crate) library: &'a Path,
    pub(crate) out: PathBuf,
}

impl Program<'_> {
    /// Compiles and links against the shared library.
    pub(crate) fn build(self) -> PathBuf {
        let mut command = self.compiler.command(self.language);
        command.args(self.flags).args(self.sources.iter().map(|source| root().join("tests").join(source)));
        command.args(["-x", "none", "-pthread", "-ldl"]);
        command.arg("-L").arg(self.library).arg("-lreplayssm");
        command.arg(format!("-Wl,-rpath,{}", self.library.display())).arg("-o").arg(&self.out);
        succeed(&mut command);
        self.out
    }
}

/// Runs a command to its end; it must succeed.
pub(crate) fn succeed(command: &mut Command) -> Output {
    let output = finish(command);
    assert!(output.status.success(), "{command:?} ended with {}\n{}", output.status, text(&output));
    output
}

/// Runs a command to its end.
pub(crate) fn finish(command: &mut Command) -> Output {
    command.output().unwrap_or_else(|e| panic!("{command:?} did not start: {e}"))
}

/// Both output streams of a command.
pub(crate) fn text(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// What a shared library tells the dynamic loader: as readelf prints it.
#[derive(Clone, PartialEq)]
pub(crate) struct Elf {
    pub(crate) symbols: String,
    pub(crate) dynamic: String,
    pub(crate) segments: String,
}

impl Elf {
    pub(crate) fn of(library: &Path) -> Self {
        let readelf =
            |flag: &str| text(&succeed(Command::new("readelf").env("LC_ALL", "C").args(["--wide", flag]).arg(library)));
        Elf { symbols: readelf("--dyn-syms"), dynamic: readelf("--dynamic"), segments: readelf("--segments") }
    }

    /// Names of its own symbols, and of those that it needs with their versions.
    fn names(&self) -> (Vec<&str>, Vec<&str>) {
        let (mut own, mut needed) = (Vec::new(), Vec::new());
        for line in self.symbols.lines() {
            // Num: Value Size Type Bind Vis Ndx Name
            let words: Vec<&str> = line.split_whitespace().collect();
            match (words.get(6), words.get(7)) {
                (Some(&"UND"), Some(name)) => needed.push(*name),
                (Some(&place), Some(name)) if place != "Ndx" => own.push(*name),
                _ => (),
            }
        }
        own.sort_unstable();
        (own, needed)
    }

    /// Versions of other libraries' symbols.
    pub(crate) fn versions(&self) -> BTreeSet<&str> {
        self.names().1.iter().filter_map(|name| name.split('@').nth(1)).collect()
    }

    /// Names in brackets behind a tag of the dynamic section.
    pub(crate) fn tagged(&self, tag: &str) -> Vec<&str> {
        let lines = self.dynamic.lines().filter(|line| line.contains(tag));
        lines.filter_map(|line| Some(line.split_once('[')?.1.split_once(']')?.0)).collect()
    }

    /// What is wrong with it. `symbols` and `needed` are the lists of `tests/c`, `floor` the newest glibc that it may need.
    pub(crate) fn objections(&self, symbols: &str, needed: &str, floor: (u32, u32)) -> Vec<String> {
        let lines = |list: &'static str| {
            move |text: &str| {
                text.lines()
                    .filter_map(|l| {
                        Some(l.split('#').next()?.strip_prefix(list)?.trim().to_owned()).filter(|l| !l.is_empty())
                    })
                    .collect::<BTreeSet<String>>()
            }
        };
        let mut wrong = Vec::new();
        let own: Vec<String> = self.names().0.into_iter().map(str::to_owned).collect();
        if own.iter().cloned().collect::<BTreeSet<_>>() != lines("")(symbols) {
            wrong.push(format!("it exports {own:?}"));
        }
        let known = lines("library ")(needed);
        wrong.extend(self.tagged("(NEEDED)").iter().filter(|n| !known.contains(**n)).map(|n| format!("it needs {n}")));
        let known = lines("version ")(needed);
        let versions = self.versions();
        wrong.extend(versions.iter().filter(|v| !known.contains(**v)).map(|v| format!("it needs {v}")));
        let glibc = |version: &&str| {
            let mut parts = version.strip_prefix("GLIBC_")?.split('.').map_while(|part| part.parse::<u32>().ok());
            Some((parts.next()?, parts.next()?))
        };
        let newest = versions.iter().filter_map(glibc).max();
        if newest.is_none_or(|newest| newest > floor) {
            wrong.push(format!("it needs glibc {newest:?}"));
        }
        if self.tagged("(SONAME)") != [SONAME] {
            wrong.push(format!("its soname is {:?}", self.tagged("(SONAME)")));
        }
        // Code that the loader writes into; stacks that can be executed; tables of functions that can be written.
        if self.dynamic.contains("TEXTREL") {
            wrong.push("it has text relocations".into());
        }
        let segment = |name: &str| self.segments.lines().find(|line| line.trim_start().starts_with(name));
        if segment("GNU_STACK").is_none_or(|line| line.contains("RWE")) {
            wrong.push("its stack is executable".into());
        }
        if segment("GNU_RELRO").is_none() || !self.dynamic.contains("BIND_NOW") {
            wrong.push("it is not read-only after it is relocated".into());
        }
        let loads = self.segments.lines().filter(|line| line.trim_start().starts_with("LOAD"));
        if loads.clone().count() == 0 || loads.clone().any(|line| line.contains("RWE")) {
            wrong.push("a part of it can be written and executed".into());
        }
        // It opens nothing by a path of its own.
        if self.dynamic.contains("RPATH") || self.dynamic.contains("RUNPATH") {
            wrong.push("it has a run path".into());
        }
        wrong
    }
}

/// A library exports the symbols of `tests/c/symbols.txt` and no other, and needs what `tests/c/needed.txt` lists, nothing newer than
/// glibc 2.34.
pub(crate) fn check_symbols(library: &Path) {
    check_symbols_and_glibc(library, (2, 34));
}

/// The same, with another version of glibc.
pub(crate) fn check_symbols_and_glibc(library: &Path, floor: (u32, u32)) {
    if !installed("readelf") {
        return skipped("the symbols of the library", "readelf is not installed");
    }
    let elf = Elf::of(library);
    let list = |name: &str| fs::read_to_string(root().join("tests/c").join(name)).expect("a list of tests/c");
    println!("{} needs {:?} and {:?}", library.display(), elf.tagged("(NEEDED)"), elf.versions());
    let objections = elf.objections(&list("symbols.txt"), &list("needed.txt"), floor);
    assert_eq!(objections, Vec::<String>::new(), "{}", library.display());
}
