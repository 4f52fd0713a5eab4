//! Gives the shared library its soname: `libreplayssm.so.0.MINOR` before 1.0, `libreplayssm.so.MAJOR` after.
//! Before 1.0 a minor version may break the ABI, and then the soname changes with it. Compiles the kernels of `cuda/`.

use std::env;
use std::path::Path;
use std::process::Command;

#[path = "src/backend/cuda/instances.rs"]
mod instances;
#[path = "build-support/kernels.rs"]
mod kernels;
#[path = "build-support/nvrtc.rs"]
mod nvrtc;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-changed=build-support");
    let part = |name: &str| env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"));
    let (major, minor) = (part("CARGO_PKG_VERSION_MAJOR"), part("CARGO_PKG_VERSION_MINOR"));
    let suffix = if major == "0" { format!("0.{minor}") } else { major };
    if part("CARGO_CFG_TARGET_OS") == "linux" {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libreplayssm.so.{suffix}");
    }
    println!("cargo::rustc-env=REPLAYSSM_SOVERSION={suffix}");
    println!("cargo::rustc-env=REPLAYSSM_TARGET={}", part("TARGET"));
    println!("cargo::rustc-env=REPLAYSSM_PROFILE={}", part("PROFILE"));
    println!("cargo::rustc-env=REPLAYSSM_COMPILER={}", compiler(&part("RUSTC")));
    let sets = match part("CARGO_CFG_TARGET_ARCH").as_str() {
        "x86_64" => "baseline, AVX2, AVX-512",
        "aarch64" => "NEON",
        _ => "baseline",
    };
    println!("cargo::rustc-env=REPLAYSSM_INSTRUCTION_SETS={sets}");
    let mut features: Vec<String> = env::vars()
        .filter_map(|(name, _)| Some(name.strip_prefix("CARGO_FEATURE_")?.to_lowercase().replace('_', "-")))
        .collect();
    features.sort();
    let features = if features.is_empty() { "none".to_owned() } else { features.join(" ") };
    println!("cargo::rustc-env=REPLAYSSM_FEATURES={features}");
    kernels::build(Path::new(&part("CARGO_MANIFEST_DIR")), Path::new(&part("OUT_DIR")));
}

/// What the compiler calls itself, as "rustc 1.95.0 (59807616e 2026-04-14)".
fn compiler(rustc: &str) -> String {
    let output = Command::new(rustc).arg("--version").output().expect("cargo's rustc runs");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}
