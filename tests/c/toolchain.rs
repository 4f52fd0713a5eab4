//! Compilers, scratch folders and child processes of the tests that build C and C++ programs.
// SPDX-License-Identifier: MIT OR Apache-2.0

// Every test binary that includes this file uses a part of it.
#![allow(dead_code)]

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

/// A library exports the symbols of `tests/c/symbols.txt` and no other, and needs nothing newer than glibc 2.34.
pub(crate) fn check_symbols(library: &Path) {
    check_symbols_and_glibc(library, (2, 34));
}

/// The same, with another version of glibc.
pub(crate) fn check_symbols_and_glibc(library: &Path, floor: (u32, u32)) {
    if !installed("readelf") {
        return skipped("the symbols of the library", "readelf is not installed");
    }
    let readelf = |flag: &str| text(&succeed(Command::new("readelf").args(["--wide", flag]).arg(library)));
    let table = readelf("--dyn-syms");
    let mut exported = Vec::new();
    let mut newest = (0, 0);
    for line in table.lines() {
        // Num: Value Size Type Bind Vis Ndx Name
        let words: Vec<&str> = line.split_whitespace().collect();
        let (Some(place), Some(name)) = (words.get(6), words.get(7)) else { continue };
        if *place != "UND" && *place != "Ndx" {
            exported.push((*name).to_owned());
        }
        if let Some(version) = name.split("GLIBC_").nth(1).filter(|_| *place == "UND") {
            let mut parts = version.split('.').map_while(|part| part.parse::<u32>().ok());
            newest = newest.max((parts.next().unwrap_or(0), parts.next().unwrap_or(0)));
        }
    }
    exported.sort();
    let list = fs::read_to_string(root().join("tests/c/symbols.txt")).expect("symbols.txt");
    let wanted: Vec<&str> = list.lines().filter(|l| !l.starts_with('#') && !l.is_empty()).collect();
    assert_eq!(exported, wanted, "symbols that {} exports", library.display());

    let dynamic = readelf("--dynamic");
    let names = |tag: &str| -> Vec<String> {
        let lines = dynamic.lines().filter(|l| l.contains(tag));
        lines.filter_map(|l| Some(l.split_once('[')?.1.split_once(']')?.0.to_owned())).collect()
    };
    assert_eq!(names("(SONAME)"), [SONAME]);
    let needed = names("(NEEDED)");
    println!("{} needs {needed:?} and glibc {}.{}", library.display(), newest.0, newest.1);
    for name in &needed {
        let known = ["libc.so.6", "libm.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2"];
        assert!(known.contains(&name.as_str()) || name.starts_with("ld-linux"), "the library needs {name}");
    }
    assert!(newest > (2, 0) && newest <= floor, "the library needs glibc {}.{}", newest.0, newest.1);
}
