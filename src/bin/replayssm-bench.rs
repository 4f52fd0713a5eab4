//! `replayssm-bench`: times what the library does on this machine, against the machine's own limits. `--help` says how.
// SPDX-License-Identifier: MIT OR Apache-2.0

use std::process::ExitCode;

fn main() -> ExitCode {
    replayssm::bench::main()
}
