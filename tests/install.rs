//! `make install`, and projects that use what it installed after it has been moved elsewhere.
// SPDX-License-Identifier: MIT OR Apache-2.0

#![cfg(target_os = "linux")]

#[path = "c/toolchain.rs"]
mod toolchain;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use toolchain::{
    Language, Program, SONAME, finish, installed, library_folder, root, scratch, skipped, succeed, system_compiler,
    text,
};

/// A child without what `make`, `cargo test` and tests/run.sh put into the environment. RUSTC_BOOTSTRAP would make cargo build
/// everything anew.
fn command(program: &str) -> Command {
    let mut command = Command::new(program);
    for name in ["MAKEFLAGS", "MAKELEVEL", "MFLAGS", "LD_LIBRARY_PATH", "DESTDIR", "PREFIX", "RUSTC_BOOTSTRAP"] {
        command.env_remove(name);
    }
    command
}

/// Where this test run's cargo builds.
fn target_dir() -> PathBuf {
    let test = std::env::current_exe().expect("a test binary");
    test.ancestors().nth(3).expect("target/debug/deps").into()
}

fn make(goal: &str, variables: &[(&str, &Path)]) {
    let mut make = command("make");
    make.arg("--no-print-directory").arg("-C").arg(root()).arg(goal);
    make.arg(format!("CARGO_TARGET={}", target_dir().display()));
    for (name, value) in variables {
        make.arg(format!("{name}={}", value.display()));
    }
    succeed(&mut make);
}

/// Configures, builds and runs the consumer project.
fn consume_with_cmake(build: &Path, options: &[String]) -> String {
    let mut configure = command("cmake");
    configure.arg("-S").arg(root().join("tests/consumer")).arg("-B").arg(build).args(options);
    if installed("ninja") {
        configure.args(["-G", "Ninja"]);
    }
    succeed(configure.args(["-Wdev", "-Werror=dev", "-DCMAKE_BUILD_TYPE=Release"]));
    succeed(command("cmake").arg("--build").arg(build));
    let programs = ["consumer_c", "consumer_cpp"].map(|name| build.join(name));
    programs.iter().map(|program| text(&succeed(&mut command(&program.display().to_string())))).collect()
}

fn files_below(folder: &Path) -> Vec<PathBuf> {
    let mut list = Vec::new();
    for entry in fs::read_dir(folder).expect("a folder").map(|entry| entry.expect("an entry").path()) {
        if entry.is_dir() && !entry.is_symlink() {
            list.extend(files_below(&entry));
        } else {
            list.push(entry);
        }
    }
    list.sort();
    list
}

/// The commands that are missing here, if any.
fn missing(programs: &[&str]) -> Option<String> {
    let missing: Vec<&str> = programs.iter().copied().filter(|program| !installed(program)).collect();
    (!missing.is_empty()).then(|| format!("{} is not installed", missing.join(", ")))
}

#[test]
fn an_installed_and_moved_library_serves_cmake_and_pkg_config() {
    if let Some(why) = missing(&["make"]) {
        return skipped("the installation", &why);
    }
    let scratch = scratch("install");
    let stage = scratch.join("stage");
    let prefix = Path::new("/opt/some where/replayssm");
    make("install", &[("DESTDIR", &stage), ("PREFIX", prefix)]);
    // No trace of the place that it was made for.
    let moved = scratch.join("moved");
    fs::rename(stage.join("opt/some where/replayssm"), &moved).expect("the installed tree");
    fs::remove_dir_all(&stage).expect("the stage");

    let version = env!("CARGO_PKG_VERSION");
    let library = moved.join(format!("lib/libreplayssm.so.{version}"));
    assert_eq!(fs::canonicalize(moved.join("lib").join(SONAME)).expect("the soname"), library);
    assert_eq!(fs::canonicalize(moved.join("lib/libreplayssm.so")).expect("the link for linking"), library);
    toolchain::check_symbols(&library);
    assert!(!has_debug_information(&library));
    for name in ["LICENSE-MIT", "LICENSE-APACHE"] {
        assert_eq!(root().join(name).exists(), moved.join("share/doc/replayssm").join(name).exists(), "{name}");
    }
    for file in files_below(&moved).iter().filter(|file| !file.starts_with(moved.join("lib/libreplayssm"))) {
        let contents = fs::read(file).expect("an installed file");
        let text = String::from_utf8_lossy(&contents);
        if !file.to_string_lossy().contains(".so") {
            assert!(!text.contains("some where") && !text.contains("@VERSION@"), "{}", file.display());
        }
    }

    match missing(&["cmake"]) {
        Some(why) => skipped("the CMake package", &why),
        None => {
            let prefix_path = format!("-DCMAKE_PREFIX_PATH={}", moved.display());
            for wanted in ["", version] {
                let options = [prefix_path.clone(), format!("-DREPLAYSSM_WANTED={wanted}")];
                let said = consume_with_cmake(&scratch.join(format!("cmake-{wanted}")), &options);
                assert_eq!(said.matches("consumer: ").count(), 2, "{said}");
                assert!(said.contains("release"), "{said}");
            }
            accepts_versions(&moved.join("lib/cmake/replayssm/replayssm-config-version.cmake"), version);
        }
    }

    match missing(&["pkg-config"]) {
        Some(why) => skipped("replayssm.pc", &why),
        None => {
            let ask = |option: &str| -> Vec<String> {
                let mut ask = command("pkg-config");
                ask.env("PKG_CONFIG_PATH", moved.join("lib/pkgconfig")).args([option, "replayssm"]);
                text(&succeed(&mut ask)).split_whitespace().map(str::to_owned).collect()
            };
            assert_eq!(ask("--modversion"), [version]);
            for (language, source) in [(Language::C11, "main.c"), (Language::Cxx17, "main.cpp")] {
                let out = scratch.join(source).with_extension("pkg-config");
                let mut compile = command(&system_compiler().path(language).display().to_string());
                compile.args(&language.flags()[..1]).args(toolchain::STRICT).args(ask("--cflags"));
                compile.arg(root().join("tests/consumer").join(source)).args(ask("--libs")).arg("-o").arg(&out);
                succeed(&mut compile);
                let mut run = command(&out.display().to_string());
                let said = text(&succeed(run.env("LD_LIBRARY_PATH", moved.join("lib"))));
                assert!(said.starts_with("consumer: "), "{said}");
            }
        }
    }

    if missing(&["cmake"]).is_none() {
        // Without its library the package is not found, and says why.
        fs::remove_file(&library).expect("the library");
        let mut configure = command("cmake");
        configure.arg("-S").arg(root().join("tests/consumer")).arg("-B").arg(scratch.join("without-library"));
        let output = finish(configure.arg(format!("-DCMAKE_PREFIX_PATH={}", moved.display())));
        assert!(!output.status.success());
        // CMake wraps its messages where the path's length makes it.
        let said = text(&output).split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(said.contains("is missing"), "{said}");
    }
    make("uninstall", &[("PREFIX", &moved)]);
    assert_eq!(files_below(&moved), Vec::<PathBuf>::new(), "left behind by make uninstall");
}

/// Whether a library has more than its symbols: DWARF sections.
fn has_debug_information(library: &Path) -> bool {
    text(&succeed(Command::new("readelf").args(["--wide", "--sections"]).arg(library))).contains(".debug_")
}

/// Asks a version file of this version for others.
fn accepts_versions(file: &Path, version: &str) {
    let mut script = command("cmake");
    script.arg(format!("-DFILE={}", file.display()));
    for (name, value) in ["MAJOR", "MINOR", "PATCH"].iter().zip(version.split('.')) {
        script.arg(format!("-D{name}={value}"));
    }
    succeed(script.arg("-P").arg(root().join("tests/consumer/versions.cmake")));
}

/// Where this machine's own folders are, as a library or file must not name them.
fn own_folders() -> Vec<String> {
    let home = std::env::var("HOME").unwrap_or_default();
    let cargo = std::env::var("CARGO_HOME").unwrap_or_else(|_| format!("{home}/.cargo"));
    vec![format!("{}/", root().display()), format!("{cargo}/")]
}

fn contains(bytes: &[u8], part: &str) -> bool {
    bytes.windows(part.len()).any(|window| window == part.as_bytes())
}

#[test]
fn a_release_tarball_is_reproducible_names_no_folder_of_its_maker_and_serves_elsewhere() {
    if let Some(why) = missing(&["make", "tar", "gzip", "strip"]) {
        return skipped("the release tarball", &why);
    }
    let name = concat!("replayssm-", env!("CARGO_PKG_VERSION"), "-", env!("REPLAYSSM_TARGET"));
    let tarball = root().join("build/dist").join(name).with_added_extension("tar.gz");
    let mut contents = Vec::new();
    // Under another umask, and at another time, which is that of the file's making.
    for umask in ["022", "077"] {
        let _ = fs::remove_file(&tarball);
        succeed(
            command("sh").args(["-c", &format!("umask {umask} && make --no-print-directory dist")]).current_dir(root()),
        );
        contents.push(fs::read(&tarball).expect("the tarball"));
    }
    assert!(contents[0] == contents[1], "two tarballs of the same sources differ");

    let scratch = scratch("dist").join("some where");
    fs::create_dir(&scratch).expect("a folder");
    succeed(command("tar").arg("-xzf").arg(&tarball).arg("-C").arg(&scratch));
    let unpacked = scratch.join(name);
    let docs = unpacked.join("share/doc/replayssm");
    for name in ["LICENSE-MIT", "LICENSE-APACHE", "THIRD_PARTY.txt", "README.md", "CHANGELOG.md"] {
        assert_eq!(fs::read(docs.join(name)).expect(name), fs::read(root().join(name)).expect(name), "{name}");
    }
    let library = unpacked.join(concat!("lib/libreplayssm.so.", env!("CARGO_PKG_VERSION")));
    toolchain::check_symbols(&library);
    assert!(!has_debug_information(&library));
    for file in files_below(&unpacked) {
        let bytes = fs::read(&file).expect("a file");
        for folder in own_folders() {
            assert!(!contains(&bytes, &folder), "{} names {folder}", file.display());
        }
    }
    match missing(&["cmake"]) {
        Some(why) => skipped("the unpacked CMake package", &why),
        None => {
            let options = [format!("-DCMAKE_PREFIX_PATH={}", unpacked.display())];
            let said = consume_with_cmake(&scratch.join("build"), &options);
            assert_eq!(said.matches("consumer: ").count(), 2, "{said}");
        }
    }
}

/// What is released has a reserve for small allocations, which builds with assertions lack.
#[test]
fn every_allocation_of_a_released_library_may_fail() {
    if !cfg!(target_env = "gnu") {
        return skipped("allocations that fail", "the program is for glibc, whose allocator it replaces");
    }
    if let Some(why) = missing(&["make"]) {
        return skipped("allocations that fail", &why);
    }
    make("lib", &[]);
    let scratch = scratch("no-memory");
    let links = library_folder(&scratch, &target_dir().join("release/libreplayssm.so"));
    let (out, compiler) = (scratch.join("program"), system_compiler());
    let (sources, flags) = (["c/no_memory.c"].as_slice(), ["-O1"].as_slice());
    let program = Program { compiler: &compiler, language: Language::C11, sources, flags, library: &links, out };
    let said = text(&succeed(&mut command(&program.build().display().to_string())));
    let cases: u32 =
        said.trim().strip_prefix("no memory: ").and_then(|said| said.split(' ').next()?.parse().ok()).expect(&said);
    assert!(cases > 300, "{said}");
    println!("{said}");
}

/// Only where Zig has been fetched before: a test does not download it.
#[test]
fn a_library_for_glibc_2_28_needs_no_newer_one_and_works() {
    if !root().join("build/zig").exists() {
        return skipped("the library for glibc 2.28", "Zig is not there; `make lib-glibc228` fetches it");
    }
    if let Some(why) = missing(&["make", "cmake"]) {
        return skipped("the library for glibc 2.28", &why);
    }
    let scratch = scratch("glibc228");
    let prefix = scratch.join("prefix");
    let library = root().join("build/glibc2.28/release/libreplayssm.so");
    make("lib-glibc228", &[]);
    toolchain::check_symbols_and_glibc(&library, (2, 28));
    make("install", &[("LIB", &library), ("PREFIX", &prefix)]);
    let options = [format!("-DCMAKE_PREFIX_PATH={}", prefix.display())];
    let said = consume_with_cmake(&scratch.join("build"), &options);
    assert_eq!(said.matches("consumer: ").count(), 2, "{said}");
}

#[test]
fn third_party_notices_name_every_crate_whose_code_is_linked() {
    let notices = fs::read_to_string(root().join("THIRD_PARTY.txt")).expect("THIRD_PARTY.txt");
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let mut tree = command(&cargo);
    tree.args(["tree", "--locked", "--edges", "normal,no-proc-macro", "--prefix", "none", "--format", "{p}: {l}"]);
    let mut crates = 0;
    for line in String::from_utf8_lossy(&succeed(tree.current_dir(root())).stdout).lines().skip(1) {
        let mut line = line.trim_end_matches(" (*)").replacen(" v", " ", 1);
        line = line.replace('/', " OR ");
        let name = line.split(':').next().expect("a name and a version");
        assert!(notices.contains(&format!("       {line}\n")), "THIRD_PARTY.txt does not list {line}");
        assert!(notices.contains(&format!("=\n{name}\n=")), "THIRD_PARTY.txt has no notice of {name}");
        crates += 1;
    }
    assert!(crates >= 5, "{crates} crates");
    // Crates of the standard library that are the work of others.
    let mut rustc = command("rustc");
    let libraries = text(&succeed(rustc.args(["--print", "target-libdir"]).current_dir(root())));
    let ours = [
        "alloc",
        "core",
        "std",
        "std_detect",
        "sysroot",
        "test",
        "proc_macro",
        "profiler_builtins",
        "rustc_literal_escaper",
    ];
    let (mut seen, mut rlibs) = (0, 0);
    for file in files_below(Path::new(libraries.trim())) {
        let file = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some((name, _)) =
            file.strip_prefix("lib").filter(|f| f.ends_with(".rlib")).and_then(|f| f.rsplit_once('-'))
        else {
            continue;
        };
        rlibs += 1;
        // getopts serves tests only; cfg-if and libc are listed above.
        let known = ours.contains(&name) || name.starts_with("rustc_std_workspace") || name == "getopts";
        let name = match name {
            "rustc_demangle" => "rustc-demangle",
            "cfg_if" => "cfg-if",
            "panic_abort" => "panic_unwind",
            other => other,
        };
        assert!(
            known
                || notices.contains(&format!("{name}:"))
                || notices.contains(&format!("{name} "))
                || notices.contains(&format!("{name},")),
            "{name}"
        );
        seen += usize::from(!known);
    }
    assert!(rlibs == 0 || seen >= 10, "{seen} of {rlibs}");
}

#[test]
fn version_files_follow_the_soname_before_and_after_1_0() {
    if let Some(why) = missing(&["cmake"]) {
        return skipped("the version file", &why);
    }
    let template = fs::read_to_string(root().join("cmake/replayssm-config-version.cmake.in")).expect("the template");
    let file = scratch("versions").join("replayssm-config-version.cmake");
    for (version, soversion) in [("0.7.3", "0.7"), ("1.4.2", "1"), ("12.3.0", "12")] {
        fs::write(&file, template.replace("@VERSION@", version).replace("@SOVERSION@", soversion)).expect("a file");
        accepts_versions(&file, version);
    }
}

#[test]
fn another_libdir_with_debug_information_and_without_cargo() {
    if let Some(why) = missing(&["make"]) {
        return skipped("the installation in another LIBDIR", &why);
    }
    make("lib", &[]);
    let scratch = scratch("libdir");
    let prefix = scratch.join("prefix");
    let libdir = Path::new("lib/some-triplet");
    // What is built needs no cargo to be installed.
    let variables =
        [("PREFIX", &*prefix), ("LIBDIR", libdir), ("STRIP", Path::new("0")), ("CARGO", Path::new("false"))];
    make("install", &variables);
    let library = prefix.join(libdir).join(concat!("libreplayssm.so.", env!("CARGO_PKG_VERSION")));
    assert!(has_debug_information(&library));
    match missing(&["cmake"]) {
        Some(why) => skipped("the CMake package in another LIBDIR", &why),
        None => {
            let package = prefix.join(libdir).join("cmake/replayssm");
            let said = consume_with_cmake(&scratch.join("cmake"), &[format!("-Dreplayssm_DIR={}", package.display())]);
            assert_eq!(said.matches("consumer: ").count(), 2, "{said}");
        }
    }
    match missing(&["pkg-config"]) {
        Some(why) => skipped("replayssm.pc in another LIBDIR", &why),
        None => {
            for (variable, folder) in [("libdir", prefix.join(libdir)), ("includedir", prefix.join("include"))] {
                let mut ask = command("pkg-config");
                ask.env("PKG_CONFIG_PATH", prefix.join(libdir).join("pkgconfig"));
                let said = text(&succeed(ask.arg(format!("--variable={variable}")).arg("replayssm")));
                assert_eq!(
                    fs::canonicalize(said.trim()).expect("a folder"),
                    fs::canonicalize(folder).expect("a folder")
                );
            }
        }
    }
    make("uninstall", &variables);
    assert_eq!(files_below(&prefix), Vec::<PathBuf>::new(), "left behind by make uninstall");
}

#[test]
fn an_engine_can_add_the_repository_as_a_subdirectory() {
    if let Some(why) = missing(&["cmake"]) {
        return skipped("add_subdirectory", &why);
    }
    let scratch = scratch("subdirectory");
    // The profile of this test run, which has been built already.
    let options = [
        format!("-DREPLAYSSM_SOURCE_DIR={}", root().display()),
        format!("-DREPLAYSSM_CARGO_TARGET_DIR={}", target_dir().display()),
        "-DREPLAYSSM_CARGO_PROFILE=dev".to_owned(),
    ];
    let said = consume_with_cmake(&scratch.join("build"), &options);
    assert_eq!(said.matches("consumer: ").count(), 2, "{said}");
}
