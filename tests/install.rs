//! `make install`, and projects that use what it installed after it has been moved elsewhere.
// SPDX-License-Identifier: MIT OR Apache-2.0

#![cfg(target_os = "linux")]

#[path = "c/toolchain.rs"]
mod toolchain;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use toolchain::{Language, SONAME, finish, installed, root, scratch, skipped, succeed, system_compiler, text};

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
