//! Gives the shared library its soname: `libreplayssm.so.0.MINOR` before 1.0, `libreplayssm.so.MAJOR` after.
//! Before 1.0 a minor version may break the ABI, and then the soname changes with it.

use std::env;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let part = |name: &str| env::var(name).unwrap_or_else(|_| panic!("cargo sets {name}"));
    let (major, minor) = (part("CARGO_PKG_VERSION_MAJOR"), part("CARGO_PKG_VERSION_MINOR"));
    let suffix = if major == "0" { format!("0.{minor}") } else { major };
    if part("CARGO_CFG_TARGET_OS") == "linux" {
        println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libreplayssm.so.{suffix}");
    }
    println!("cargo::rustc-env=REPLAYSSM_SOVERSION={suffix}");
    println!("cargo::rustc-env=REPLAYSSM_TARGET={}", part("TARGET"));
    println!("cargo::rustc-env=REPLAYSSM_PROFILE={}", part("PROFILE"));
}
