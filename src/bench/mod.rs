//! The program `replayssm-bench`: what a step takes on this machine, for authors of inference engines and for us.
//!
//! It calls the library as an engine does ([`api`]), in model steps of many layers whose states leave the caches between steps ([`rig`]), over
//! whole flush cycles ([`cycle`]), and compares times with the bytes that cannot be avoided ([`floor`]) at the speed of the machine's memory
//! in the same process ([`streams`]). What is timed is checked against the plain update, and its outputs against fp64 ([`accuracy`]; over
//! long runs, [`drift`]).
// SPDX-License-Identifier: MIT OR Apache-2.0

pub mod accuracy;
pub mod api;
pub mod bookkeeping;
pub mod config;
pub mod cycle;
pub mod drift;
pub mod floor;
pub mod generator;
pub mod kernel;
pub mod machine;
pub mod model;
pub mod options;
pub mod oracle;
pub mod plan;
pub mod products;
pub mod rig;
pub mod shape;
pub mod streams;
pub mod stretch;
pub mod svg;
pub mod table;

use std::process::ExitCode;

use clap::Parser;

use self::options::{Command, Options};

/// What went wrong, in a sentence.
pub type Result<T> = std::result::Result<T, String>;

/// The program. Its exit status is 1 if a check has failed, and 2 if it could not do what was asked.
pub fn main() -> ExitCode {
    let options = Options::parse();
    let result = match &options.command {
        Command::Kernel(kernel) => kernel::run(&options.common, kernel),
        Command::Model(model) => model::run(&options.common, model),
        Command::Plan(plan) => plan::run(&options.common, plan),
        Command::Drift(drift) => drift::run(&options.common, drift),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(sentence) => {
            eprintln!("replayssm-bench: {sentence}");
            ExitCode::from(2)
        }
    }
}
