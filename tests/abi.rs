//! The interface against the ones that are kept in `abi/`, one folder for each version: within a soname it grows, and that is all it does.
//!
//! What a version's folder has, `make baseline` writes: the header, `layout.inc` and `symbols.txt` as they were, and `replayssm.abi`, which is
//! abidw's description of a library of empty functions made from the header. The library itself has no description of C types inside; that its
//! types, layouts and symbols are the header's, `tests/header.rs` and `tests/c_programs.rs` hold.
// SPDX-License-Identifier: MIT OR Apache-2.0

#![cfg(target_os = "linux")]

#[path = "c/prototypes.rs"]
mod prototypes;
#[path = "c/toolchain.rs"]
mod toolchain;

use std::ffi::CString;
use std::fmt;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use prototypes::{Function, functions};
use toolchain::{
    Language, SONAME, compilers, finish, installed, library, library_folder, root, scratch, skipped, succeed,
    system_compiler, text,
};

// ---- Which kept interfaces a version must keep to: the rule, pure ----

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Version {
    major: u32,
    minor: u32,
    patch: u32,
}

impl Version {
    fn parse(text: &str) -> Option<Self> {
        let numbers: Vec<u32> = text.split('.').map(str::parse).collect::<Result<_, _>>().ok()?;
        let [major, minor, patch] = numbers[..] else { return None };
        Some(Version { major, minor, patch })
    }

    /// What the soname ends with: versions with the same one are compatible.
    fn series(self) -> String {
        if self.major == 0 { format!("0.{}", self.minor) } else { self.major.to_string() }
    }

    /// The first version that may break this one.
    fn breaking(self) -> Self {
        match self.major {
            0 => Version { minor: self.minor + 1, patch: 0, ..self },
            major => Version { major: major + 1, minor: 0, patch: 0 },
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

/// The kept interfaces that this version has to be compatible with, oldest first: those of its soname, of which there is one at least.
fn kept_to(version: Version, kept: &[Version]) -> Result<Vec<Version>, String> {
    if let Some(newer) = kept.iter().find(|&&k| k > version) {
        return Err(format!("abi/{newer} is kept, and this is {version}"));
    }
    let mut same: Vec<Version> = kept.iter().copied().filter(|k| k.series() == version.series()).collect();
    same.sort_unstable();
    if same.is_empty() {
        return Err(format!(
            "no interface is kept for libreplayssm.so.{}: `make baseline` writes it",
            version.series()
        ));
    }
    Ok(same)
}

#[test]
fn a_version_keeps_to_what_is_kept_of_its_soname_and_a_breaking_one_has_its_own() {
    let v = |text: &str| Version::parse(text).expect("a version");
    let rule = |version: &str, kept: &[&str]| {
        let kept: Vec<Version> = kept.iter().map(|k| v(k)).collect();
        kept_to(v(version), &kept).map(|list| list.iter().map(Version::to_string).collect::<Vec<_>>().join(" "))
    };
    for (version, kept, wanted) in [
        ("0.1.0", &["0.1.0"][..], Ok("0.1.0")),
        ("0.1.7", &["0.1.0"], Ok("0.1.0")),
        ("0.1.7", &["0.1.3", "0.1.0"], Ok("0.1.0 0.1.3")),
        ("0.1.10", &["0.1.9"], Ok("0.1.9")),
        // Says that it breaks: then what it is from now on has to be there.
        ("0.2.0", &["0.1.0"], Err("libreplayssm.so.0.2")),
        ("0.2.0", &["0.1.0", "0.2.0"], Ok("0.2.0")),
        ("0.2.4", &["0.1.0", "0.2.1"], Ok("0.2.1")),
        ("1.0.0", &["0.1.0", "0.2.0"], Err("libreplayssm.so.1:")),
        // From 1.0 on a minor version breaks nothing.
        ("1.3.0", &["0.2.0", "1.0.0"], Ok("1.0.0")),
        ("1.3.0", &["1.0.0", "1.2.0", "1.1.5"], Ok("1.0.0 1.1.5 1.2.0")),
        ("2.0.0", &["1.0.0"], Err("libreplayssm.so.2:")),
        ("2.0.1", &["1.0.0", "2.0.0"], Ok("2.0.0")),
        ("0.1.0", &[], Err("libreplayssm.so.0.1")),
        // Back to an earlier number.
        ("0.1.0", &["0.1.0", "0.2.0"], Err("abi/0.2.0 is kept")),
        ("0.1.1", &["0.1.2"], Err("abi/0.1.2 is kept")),
    ] {
        match (rule(version, kept), wanted) {
            (Ok(found), Ok(wanted)) => assert_eq!(found, wanted, "{version} of {kept:?}"),
            (Err(found), Err(wanted)) => assert!(found.contains(wanted), "{version} of {kept:?}: {found}"),
            (found, wanted) => panic!("{version} of {kept:?}: {found:?}, not {wanted:?}"),
        }
    }
    for (from, to) in [("0.1.3", "0.2.0"), ("1.2.3", "2.0.0")] {
        assert_eq!(v(from).breaking(), v(to));
        assert_ne!(v(from).series(), v(to).series());
    }
    for text in ["", "1", "0.1", "0.1.x", "0.1.0.1", "v0.1.0"] {
        assert_eq!(Version::parse(text), None, "{text}");
    }
    assert_eq!(SONAME, format!("libreplayssm.so.{}", this_version().series()), "the soname of build.rs");
}

fn this_version() -> Version {
    Version::parse(env!("CARGO_PKG_VERSION")).expect("a version")
}

/// Folders of the kept interfaces that this version must keep to, oldest first.
fn kept_folders() -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join("abi")).expect("abi/");
    let names = entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned());
    let kept: Vec<Version> =
        names.map(|name| Version::parse(&name).unwrap_or_else(|| panic!("abi/{name} is no version"))).collect();
    let list = kept_to(this_version(), &kept).unwrap_or_else(|error| panic!("{error}"));
    list.iter().map(|version| root().join("abi").join(version.to_string())).collect()
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.as_ref().display()))
}

fn header_of_today() -> String {
    read(root().join("include/replayssm.h"))
}

// ---- Headers as text: what they declare, and copies that have grown, shrunk or changed ----

/// Structs without `struct_size`, which never change.
const FROZEN: [&str; 3] = ["replayssm_ids", "replayssm_tensor", "replayssm_cursor"];

/// A struct's fields: type and name, an array's brackets with the type.
struct Struct {
    name: String,
    fields: Vec<(String, String)>,
}

struct Declared {
    /// Names and values of the numbers.
    constants: Vec<(String, String)>,
    /// Names of all macros.
    macros: Vec<String>,
    /// Names, and declarators with a `*` where the name stands: the type of a pointer to it.
    typedefs: Vec<(String, String)>,
    structs: Vec<Struct>,
    functions: Vec<Function>,
}

fn field_of(line: &str) -> Option<(String, String)> {
    let code = line.trim().strip_suffix(';').filter(|code| !code.starts_with(['/', '*', '}']))?;
    let (declarator, brackets) = code.find('[').map_or((code, ""), |at| code.split_at(at));
    let at = declarator.rfind([' ', '*'])? + 1;
    let (kind, name) = declarator.split_at(at);
    Some((format!("{}{brackets}", kind.trim()), name.into()))
}

fn declared(header: &str) -> Declared {
    let mut d =
        Declared { constants: vec![], macros: vec![], typedefs: vec![], structs: vec![], functions: functions(header) };
    let mut inside = false;
    for line in header.lines() {
        if let Some(words) = line.strip_prefix("#define ") {
            let name = words.split([' ', '(']).next().unwrap_or_default();
            let value = words[name.len()..].trim();
            d.macros.push(name.into());
            if value.starts_with(|c: char| c.is_ascii_digit() || c == '-') {
                d.constants.push((name.into(), value.into()));
            }
        } else if let Some(name) = line.strip_prefix("typedef struct ").and_then(|l| l.strip_suffix(" {")) {
            d.structs.push(Struct { name: name.into(), fields: vec![] });
            inside = true;
        } else if inside && line.starts_with('}') {
            inside = false;
        } else if inside {
            d.structs.last_mut().expect("a struct").fields.extend(field_of(line));
        } else if let Some(code) = line.strip_prefix("typedef ").and_then(|l| l.strip_suffix(';')) {
            let name = match code.split_once("(*") {
                Some((_, rest)) => rest.split(')').next(),
                None => code.rsplit([' ', '*']).next(),
            };
            let name = name.unwrap_or_else(|| panic!("no name in {line}"));
            let at = code.rfind(name).filter(|_| !code.contains("(*")).or_else(|| code.find(name)).expect("its place");
            d.typedefs.push((name.into(), format!("{}*{}", &code[..at], &code[at + name.len()..])));
        }
    }
    d
}

/// A header without the fields that a kept one does not know, at the ends of its structs.
fn as_known_to(kept: &Declared, header: &str) -> String {
    let (mut out, mut left) = (String::new(), usize::MAX);
    for line in header.lines() {
        if let Some(name) = line.strip_prefix("typedef struct ").and_then(|l| l.strip_suffix(" {")) {
            let known = kept.structs.iter().find(|s| s.name == name && !FROZEN.contains(&name));
            left = known.map_or(usize::MAX, |s| s.fields.len());
        } else if line.starts_with('}') {
            left = usize::MAX;
        } else if left != usize::MAX && field_of(line).is_some() {
            if left == 0 {
                continue;
            }
            left -= 1;
        }
        out += &format!("{line}\n");
    }
    out
}

/// A header of a later version: every struct that may grow has two words more, and the program says of itself that it is NEWER.
fn grown(header: &str, version: Version) -> String {
    let mut out = String::new();
    for line in header.lines() {
        if let Some(name) = line.strip_prefix("} ").and_then(|l| l.strip_suffix(';'))
            && !FROZEN.contains(&name)
        {
            out += "  uint32_t added_later[2];\n";
        }
        out += &format!("{line}\n");
    }
    let Version { major, minor, patch } = this_version();
    for (name, from, to) in
        [("MAJOR", major, version.major), ("MINOR", minor, version.minor), ("PATCH", patch, version.patch)]
    {
        let line = |value: u32| format!("#define REPLAYSSM_VERSION_{name} {value}\n");
        assert!(out.contains(&line(from)));
        out = out.replace(&line(from), &line(to));
    }
    out.replace("#include <stddef.h>\n", "#include <stddef.h>\n#define NEWER 1\n")
}

// ---- Header against header, by the C compiler ----

/// A C program that does not compile if a header has lost or changed anything of a kept one.
fn assertions(kept: &Declared) -> String {
    let mut out = String::from(
        "#include \"replayssm.h\"\n#define SAME(type, value) _Generic((value), type: 1, default: 0)\n\
         #define STRUCT(name, size) STRUCT_##name(size)\n\
         #define FIELD(name, field, offset, size) \\\n  \
         _Static_assert(offsetof(name, field) == (offset), \"offset of \" #name \".\" #field); \\\n  \
         _Static_assert(sizeof(((name *)0)->field) == (size), \"size of \" #name \".\" #field);\n",
    );
    for Struct { name, .. } in &kept.structs {
        // A struct grows, unless it is frozen; without padding, what it has grown by is behind what it had.
        let relation = if FROZEN.contains(&&**name) { "==" } else { ">=" };
        out += &format!(
            "#define STRUCT_{name}(size) _Static_assert(sizeof({name}) {relation} (size), \"size of {name}\");\n"
        );
    }
    out += "#include \"layout.inc\"\n";
    let mut same = |kind: &str, value: &str, what: &str| {
        out += &format!("_Static_assert(SAME({kind}, {value}), \"type of {what}\");\n");
    };
    for (name, kind) in &kept.typedefs {
        same(kind, &format!("({name} *)0"), name);
    }
    for Struct { name, fields } in &kept.structs {
        same(&format!("struct {name} *"), &format!("({name} *)0"), name);
        for (kind, field) in fields {
            let pointer =
                kind.find('[').map_or(format!("{kind} *"), |at| format!("{} (*){}", &kind[..at], &kind[at..]));
            same(&pointer, &format!("&(({name} *)0)->{field}"), &format!("{name}.{field}"));
        }
    }
    for Function { name, returns, parameters, .. } in &kept.functions {
        let parameters = if parameters.is_empty() { "void".into() } else { parameters.join(", ") };
        same(&format!("{returns} (*)({parameters})"), &format!("&{name}"), name);
    }
    for name in &kept.macros {
        out += &format!("#ifndef {name}\n#error {name} is gone\n#endif\n");
    }
    for (name, value) in &kept.constants {
        // Within a soname these two rise.
        if !matches!(&**name, "REPLAYSSM_VERSION_MINOR" | "REPLAYSSM_VERSION_PATCH") {
            out += &format!("_Static_assert({name} == ({value}), \"value of {name}\");\n");
        }
    }
    out
}

/// What a header has lost or changed of the interface that is kept in a folder: the compiler's errors. `name` is that of its scratch folder.
fn lost(kept: &Path, header: &str, name: &str) -> Vec<String> {
    let folder = scratch(name);
    fs::write(folder.join("replayssm.h"), header).expect("a header");
    fs::write(folder.join("kept.c"), assertions(&declared(&read(kept.join("replayssm.h"))))).expect("a C file");
    let mut errors = Vec::new();
    for compiler in compilers() {
        let mut command = Command::new(compiler.path(Language::C11));
        command.args(Language::C11.flags()).args(toolchain::STRICT).args(["-Wpadded", "-fsyntax-only"]);
        // GCC would stop at the first unknown type.
        let output = finish(command.arg("-I").arg(&folder).arg("-I").arg(kept).arg(folder.join("kept.c")));
        let said = text(&output);
        let lines = said.lines().filter(|line| line.contains("error: "));
        errors.extend(lines.map(|line| line.split_once("error: ").expect("an error").1.to_owned()));
        assert_eq!(output.status.success(), said.is_empty(), "{said}");
        assert!(output.status.success() || !errors.is_empty(), "{said}");
    }
    errors
}

/// An edit of a header, by its text.
type Edit = fn(&str) -> String;

fn replaced(header: &str, from: &str, to: &str) -> String {
    assert!(header.contains(from), "the header has no {from:?}");
    header.replacen(from, to, 1)
}

/// A change inside a struct.
fn in_struct(header: &str, name: &str, change: impl Fn(&str) -> String) -> String {
    let begin = header.find(&format!("typedef struct {name} {{")).expect("the struct");
    let end = begin + header[begin..].find(&format!("}} {name};")).expect("its end");
    format!("{}{}{}", &header[..begin], change(&header[begin..end]), &header[end..])
}

/// A field at the end of a struct.
fn with_field(header: &str, name: &str, field: &str) -> String {
    in_struct(header, name, |inside| format!("{inside}  {field}\n"))
}

/// Whether abidiff sees a break too: macros and names are none of its business, nor is what a pointer may be used for.
#[derive(Clone, Copy, PartialEq)]
enum Abidiff {
    Sees,
    DoesNotSee,
}
use Abidiff::{DoesNotSee, Sees};

/// What breaks the interface: what the compiler's error names, and how. Each keeps sizes where it can, so that nothing else would tell.
const BREAKS: [(&str, Abidiff, Edit); 15] = [
    ("replayssm_version", Sees, |h| replaced(h, "REPLAYSSM_API uint32_t replayssm_version(void);", "")),
    ("offset of replayssm_exec.part", Sees, |h| {
        in_struct(h, "replayssm_exec", |s| {
            s.replace("int32_t part;", "int32_t X;").replace("n_parts;", "part;").replace("X;", "n_parts;")
        })
    }),
    ("n_parts", DoesNotSee, |h| in_struct(h, "replayssm_exec", |s| s.replace(" n_parts;", " of_parts;"))),
    ("type of replayssm_exec.part", Sees, |h| {
        in_struct(h, "replayssm_exec", |s| s.replace("int32_t part;", "uint32_t part;"))
    }),
    ("type of replayssm_delta_args.scale", Sees, |h| {
        in_struct(h, "replayssm_delta_args", |s| s.replace("float scale", "int32_t scale"))
    }),
    ("offset of replayssm_batch.n_rows", Sees, |h| {
        in_struct(h, "replayssm_batch", |s| {
            s.replace("  int32_t n_rows;", "  int32_t more, n_more;\n  int32_t n_rows;")
        })
    }),
    ("size of replayssm_commit_args", Sees, |h| {
        in_struct(h, "replayssm_commit_args", |s| s.replace("  int64_t counts_stride;\n", ""))
    }),
    ("size of replayssm_cursor", Sees, |h| with_field(h, "replayssm_cursor", "uint64_t more;")),
    ("value of REPLAYSSM_FAULT_LENGTH", DoesNotSee, |h| {
        replaced(h, "REPLAYSSM_FAULT_LENGTH 4", "REPLAYSSM_FAULT_LENGTH 256")
    }),
    ("REPLAYSSM_COPY_STORED is gone", DoesNotSee, |h| replaced(h, "#define REPLAYSSM_COPY_STORED 5\n", "")),
    ("REPLAYSSM_INIT is gone", DoesNotSee, |h| h.replace("REPLAYSSM_INIT(T)", "REPLAYSSM_NEW(T)")),
    ("type of replayssm_dtype", Sees, |h| {
        replaced(h, "typedef int32_t replayssm_dtype;", "typedef uint32_t replayssm_dtype;")
    }),
    ("type of replayssm_log", DoesNotSee, |h| {
        replaced(h, "(*replayssm_log)(void *user,", "(*replayssm_log)(const void *user,")
    }),
    ("type of replayssm_save", Sees, |h| replaced(h, "uint64_t capacity,", "int64_t capacity,")),
    ("type of replayssm_stats_read", DoesNotSee, |h| {
        replaced(h, "replayssm_stats_read(const struct", "replayssm_stats_read(struct")
    }),
];

/// What lets it grow.
const GROWTH: [Edit; 5] = [
    |h| with_field(h, "replayssm_exec", "uint32_t more, even_more;"),
    |h| with_field(h, "replayssm_component", "void *more;"),
    |h| {
        replaced(
            h,
            "#define REPLAYSSM_DTYPE_I32 16\n",
            "#define REPLAYSSM_DTYPE_I32 16\n#define REPLAYSSM_DTYPE_I8 18\n",
        )
    },
    |h| {
        let one = "REPLAYSSM_API uint32_t replayssm_version(void);";
        replaced(h, one, &format!("{one}\nREPLAYSSM_API uint32_t replayssm_more(const struct replayssm_slots *slots);"))
    },
    |h| grown(h, Version { patch: this_version().patch + 1, ..this_version() }),
];

#[test]
fn the_header_has_lost_and_changed_nothing_of_what_is_kept() {
    let today = header_of_today();
    for kept in kept_folders() {
        let found = lost(&kept, &today, "abi-header");
        assert!(
            found.is_empty(),
            "the interface of {} is broken, and {} does not say so (docs/ABI.md):\n{}",
            kept.display(),
            this_version(),
            found.join("\n")
        );
    }
}

#[test]
fn what_breaks_a_header_is_noticed_and_what_lets_it_grow_is_not() {
    let kept = kept_folders().remove(0);
    let today = read(kept.join("replayssm.h"));
    let d = declared(&today);
    assert!(d.constants.len() > 60 && d.macros.len() > d.constants.len() && d.functions.len() >= 40, "of the parser");
    assert_eq!(
        d.structs.iter().map(|s| s.fields.len()).sum::<usize>(),
        read(kept.join("layout.inc")).matches("\nFIELD(").count()
    );
    for (name, _, edit) in BREAKS {
        let found = lost(&kept, &edit(&today), "abi-edited");
        assert!(found.iter().any(|error| error.contains(name)), "{name}: {found:?}");
    }
    for (i, edit) in GROWTH.iter().enumerate() {
        assert_eq!(lost(&kept, &edit(&today), "abi-edited"), Vec::<String>::new(), "growth {i}");
    }
}

// ---- Symbols of the library ----

/// Symbols that a library lacks, as the dynamic loader sees it.
fn missing_symbols<'a>(library: &Path, symbols: &'a str) -> Vec<&'a str> {
    let path = CString::new(library.as_os_str().as_bytes()).expect("a path");
    // SAFETY: the library starts nothing when it is loaded.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    assert!(!handle.is_null(), "{} cannot be loaded", library.display());
    let names = symbols.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let lacks = |name: &&str| {
        let name = CString::new(*name).expect("a name");
        // SAFETY: the handle is open, the name ends with a zero.
        unsafe { libc::dlsym(handle, name.as_ptr()) }.is_null()
    };
    names.filter(lacks).collect()
}

#[test]
fn the_library_exports_every_symbol_that_is_kept() {
    let library = library();
    for kept in kept_folders() {
        let symbols = read(kept.join("symbols.txt"));
        assert!(symbols.matches("\nreplayssm_").count() >= 40);
        assert_eq!(missing_symbols(&library, &symbols), Vec::<&str>::new(), "of {}", kept.display());
        let more = symbols + "replayssm_not_there\n";
        assert_eq!(missing_symbols(&library, &more), ["replayssm_not_there"]);
    }
}

// ---- Programs of other versions ----

/// A library of empty functions, as a header declares them, with debug information.
fn empty_library(folder: &Path, header: &str, soname: &str) -> PathBuf {
    fs::write(folder.join("replayssm.h"), header).expect("a header");
    let mut source = String::from("#include \"replayssm.h\"\n");
    for Function { name, returns, parameters, .. } in functions(header) {
        let parameters = if parameters.is_empty() { "void".into() } else { parameters.join(", ") };
        source += &format!("{returns} {name}({parameters}) {{ __builtin_trap(); }}\n");
    }
    fs::write(folder.join("replayssm.c"), source).expect("a C file");
    let mut command = Command::new(system_compiler().path(Language::C11));
    // Relative names, which the description has.
    command.current_dir(folder).args(["-std=c11", "-g", "-O0", "-fPIC", "-shared", "-I.", "replayssm.c"]);
    succeed(command.arg(format!("-Wl,-soname,{soname}")).args(["-o", "libreplayssm.so"]));
    folder.join("libreplayssm.so")
}

/// Compiles a program of `tests/` with the header in a folder.
fn program(source: &str, headers: &[&Path], links: &Path, out: PathBuf) -> PathBuf {
    let mut command = Command::new(system_compiler().path(Language::C11));
    command.args(Language::C11.flags()).args(toolchain::STRICT).args(["-O1", "-g"]);
    for folder in headers {
        command.arg("-I").arg(folder);
    }
    command.arg(root().join("tests").join(source)).args(["-x", "none"]).arg("-L").arg(links).arg("-lreplayssm");
    succeed(command.arg("-o").arg(&out));
    out
}

fn run(program: &Path, libraries: &Path) -> std::process::Output {
    finish(Command::new(program).env("LD_LIBRARY_PATH", libraries))
}

#[test]
fn a_program_of_every_kept_header_lives_with_todays_library() {
    let scratch = scratch("abi-older");
    let links = library_folder(&scratch, &library());
    let kept = kept_folders();
    for folder in &kept {
        // Sizes below those of the oldest are refused.
        let sizes = scratch.join("sizes");
        fs::create_dir_all(&sizes).expect("a folder");
        fs::copy(kept[0].join("layout.inc"), sizes.join("layout.inc")).expect("a copy");
        let output = run(&program("abi/life.c", &[&sizes, folder], &links, scratch.join("program")), &links);
        let said = text(&output);
        let version = format!("a program of {}\n", folder.file_name().expect("a name").display());
        assert!(output.status.success() && said.ends_with(&version), "{said}");
    }
    // A whole life loses nothing, and reads nothing that was not written.
    if !installed("valgrind") {
        return skipped("valgrind", "it is not installed");
    }
    let mut command = Command::new("valgrind");
    command.args(["--quiet", "--error-exitcode=99", "--leak-check=full"]).arg(scratch.join("program"));
    succeed(command.env("LD_LIBRARY_PATH", &links));
}

#[test]
fn a_program_of_a_newer_header_lives_unless_it_asks_for_what_is_not_known() {
    let scratch = scratch("abi-newer");
    let links = library_folder(&scratch, &library());
    let newer = Version { patch: this_version().patch + 1, ..this_version() };
    let header = grown(&header_of_today(), newer);
    assert!(header.matches("added_later").count() == declared(&header).structs.len() - FROZEN.len());
    fs::write(scratch.join("replayssm.h"), &header).expect("a header");
    let built = program("abi/life.c", &[&scratch, &kept_folders()[0]], &links, scratch.join("program"));
    let output = run(&built, &links);
    assert!(
        output.status.success() && text(&output).ends_with(&format!("a program of {newer}\n")),
        "{}",
        text(&output)
    );
}

#[test]
fn a_program_of_another_soname_is_refused_before_it_runs_and_by_the_version_check() {
    let scratch = scratch("abi-breaking");
    let links = library_folder(&scratch, &library());
    let breaking = this_version().breaking();
    let soname = format!("libreplayssm.so.{}", breaking.series());
    let header = grown(&header_of_today(), breaking);

    // By the loader, which finds no library of that soname.
    let its_own = scratch.join("its-own");
    fs::create_dir(&its_own).expect("a folder");
    empty_library(&its_own, &header, &soname);
    let kept = kept_folders().remove(0);
    let built = program("abi/life.c", &[&its_own, &kept], &its_own, scratch.join("program"));
    let output = run(&built, &links);
    assert_eq!(output.status.code(), Some(127), "{}", text(&output));
    assert!(text(&output).contains(&soname) && output.stdout.is_empty(), "{}", text(&output));

    // By the lines of docs/ABI.md, where it loads this library by hand: here, it is linked with it.
    let built = program("snippets/abi.c", &[&its_own], &links, scratch.join("program"));
    let output = run(&built, &links);
    assert_eq!(output.status.code(), Some(1));
    let wanted = format!(
        "built for replayssm {}.{}, found replayssm {}, ",
        breaking.major,
        breaking.minor,
        env!("CARGO_PKG_VERSION")
    );
    assert!(text(&output).starts_with(&wanted), "{}", text(&output));
}

// ---- Descriptions by abidw ----

/// abidw and abidiff: the machine's, or those of Debian's packages below a root of their own.
struct Abigail(Option<PathBuf>);

impl Abigail {
    fn find() -> Result<Self, String> {
        if !cfg!(target_arch = "x86_64") {
            return Err("skipped: abidiff because the descriptions are of x86-64".into());
        }
        if installed("abidw") && installed("abidiff") {
            return Ok(Abigail(None));
        }
        let said = text(&succeed(&mut Command::new(root().join("tests/abigail.sh"))));
        let last = said.lines().last().unwrap_or_default();
        if last.starts_with("skipped: ") { Err(last.into()) } else { Ok(Abigail(Some(last.into()))) }
    }

    fn command(&self, name: &str) -> Command {
        let Some(root) = &self.0 else { return Command::new(name) };
        let mut command = Command::new(root.join("usr/bin").join(name));
        command.env("LD_LIBRARY_PATH", root.join("usr/lib/x86_64-linux-gnu"));
        command
    }

    /// The description of an empty library: no paths, and the same bytes for the same library.
    fn describe(&self, library: &Path) -> String {
        let mut command = self.command("abidw");
        command.args(["--no-comp-dir-path", "--no-corpus-path", "--no-show-locs", "--no-architecture"]);
        let output = succeed(command.args(["--no-parameter-names", "--type-id-style", "hash"]).arg(library));
        String::from_utf8(output.stdout).expect("UTF-8")
    }

    /// What abidiff says of a header against a kept description; nothing if they agree. Fields at the ends of structs, which the kept
    /// header does not know, and new functions are left out: abidiff calls both a change, and its rule to pass over members at an end
    /// (has_data_member_inserted_at) passes over members that have moved, too.
    fn differences(&self, kept: &Path, header: &str) -> Option<String> {
        let folder = scratch("abi-diff");
        let known = as_known_to(&declared(&read(kept.join("replayssm.h"))), header);
        let library = empty_library(&folder, &known, SONAME);
        let mut command = self.command("abidiff");
        command.args(["--no-added-syms", "--no-architecture", "--no-show-locs"]);
        let output = finish(command.arg(kept.join("replayssm.abi")).arg(library));
        (!output.status.success()).then(|| text(&output))
    }
}

#[test]
fn abidiff_finds_no_difference_but_growth() {
    let abigail = match Abigail::find() {
        Ok(abigail) => abigail,
        Err(reason) => return println!("{reason}"),
    };
    for kept in kept_folders() {
        let found = abigail.differences(&kept, &header_of_today());
        assert_eq!(found, None, "of {}", kept.display());
    }
    let kept = kept_folders().remove(0);
    let header = read(kept.join("replayssm.h"));
    for (name, seen, edit) in BREAKS {
        let found = abigail.differences(&kept, &edit(&header));
        assert_eq!(found.is_some(), seen == Sees, "{name}: {found:?}");
    }
    for (i, edit) in GROWTH.iter().enumerate() {
        assert_eq!(abigail.differences(&kept, &edit(&header)), None, "growth {i}");
    }
}

/// Writes `abi/VERSION` where REPLAYSSM_WRITE_BASELINE is set (`make baseline`). Else: what would be written names no folder of this machine
/// and is the same from two folders.
#[test]
fn a_kept_interface_is_written_by_one_command_and_names_no_folder() {
    let abigail = match Abigail::find() {
        Ok(abigail) => abigail,
        Err(reason) => {
            assert!(std::env::var_os("REPLAYSSM_WRITE_BASELINE").is_none(), "{reason}");
            return println!("{reason}");
        }
    };
    let header = header_of_today();
    let descriptions = ["abi-written", "abi-written-elsewhere"]
        .map(|name| abigail.describe(&empty_library(&scratch(name), &header, SONAME)));
    assert!(descriptions[0] == descriptions[1], "two descriptions of one header differ");
    let files = [
        ("replayssm.h", header),
        ("layout.inc", read(root().join("tests/c/layout.inc"))),
        ("symbols.txt", read(root().join("tests/c/symbols.txt"))),
        ("replayssm.abi", descriptions[0].clone()),
    ];
    for (name, contents) in &files {
        let scratch = Path::new(env!("CARGO_TARGET_TMPDIR"));
        for folder in [root(), scratch] {
            assert!(!contents.contains(&folder.display().to_string()), "{name} names {}", folder.display());
        }
    }
    if std::env::var_os("REPLAYSSM_WRITE_BASELINE").is_some() {
        let folder = root().join("abi").join(env!("CARGO_PKG_VERSION"));
        assert!(!folder.exists(), "{} is there; only what was never released is removed", folder.display());
        fs::create_dir_all(&folder).expect("abi/");
        for (name, contents) in &files {
            fs::write(folder.join(name), contents).expect("abi/ is writable");
        }
        println!("abi/{}", env!("CARGO_PKG_VERSION"));
    }
    // What is kept is whole.
    for kept in kept_folders() {
        for (name, _) in &files {
            assert!(read(kept.join(name)).len() > 500, "{}/{name}", kept.display());
        }
    }
}
