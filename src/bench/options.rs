//! The command line.
// SPDX-License-Identifier: MIT OR Apache-2.0

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};

use super::Result;
use super::config::{Config, Format, Io, Readout, usual_window};
use super::machine::Machine;
use super::rig::Repeats;
use super::shape::{Family, MODELS, Model, Shape, TINY, USUAL};
use crate::backend::cuda::bench::Tuning;

/// Times steps of recurrent layers by libreplayssm beside the plain update, and both beside what the machine's memory can do.
#[derive(Debug, Parser)]
#[command(name = "replayssm-bench", version, max_term_width = 120)]
pub struct Options {
    /// What is asked of every command.
    #[command(flatten)]
    pub common: Common,
    /// What is to be timed.
    #[command(subcommand)]
    pub command: Command,
}

/// What is to be timed.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Steps of one shape after the other, by batch, tokens, window, format and readout
    Kernel(Kernel),
    /// The recurrent layers of whole models, one model step after the other
    Model(ModelOptions),
    /// The window: bytes by window, times at several, and which is best here
    Plan(Plan),
    /// Errors over long runs: outputs and states against fp64, by format, readout and rounding; times nothing
    Drift(Drift),
}

/// Where to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Backend {
    /// The processor.
    Cpu,
    /// An NVIDIA GPU.
    Cuda,
}

/// Kernels of steps of a few tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Kernels {
    /// Those that bring heads ahead.
    Pipeline,
    /// A block for each head.
    Direct,
}

/// Options of every command.
#[derive(Debug, Args)]
pub struct Common {
    /// Where to run; by default on the GPU if there is one
    #[arg(long, global = true)]
    pub backend: Option<Backend>,
    /// Number of the GPU
    #[arg(long, global = true, default_value_t = 0, value_parser = clap::value_parser!(i32).range(0..))]
    pub device: i32,
    /// Threads of the CPU backend; 0: all that the process may use
    #[arg(long, global = true, default_value_t = 0, value_parser = whole(0, 1024))]
    pub threads: usize,
    /// Times whole flush cycles this often, and takes the median of each step; by default 3 to 5 times
    #[arg(long, global = true, value_parser = whole(1, 1000))]
    pub cycles: Option<usize>,
    /// Tiny sizes, for tests: seconds, and times that mean nothing
    #[arg(long, global = true)]
    pub quick: bool,
    /// Also writes everything that was measured to this file
    #[arg(long, global = true, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Also draws times and floors into this file
    #[arg(long, global = true, value_name = "FILE")]
    pub svg: Option<PathBuf>,
}

impl Common {
    /// The machine that they name.
    pub fn machine(&self) -> Result<Machine> {
        let cuda = || Machine::cuda(self.device, self.quick);
        match self.backend {
            Some(Backend::Cpu) => Machine::cpu(self.threads, self.quick),
            Some(Backend::Cuda) => cuda().map_err(|why| format!("--backend is cuda: {why}")),
            None => cuda().or_else(|why| {
                eprintln!("replayssm-bench: on the CPU, because {why}");
                Machine::cpu(self.threads, self.quick)
            }),
        }
    }

    /// How often a flush cycle is repeated.
    pub fn repeats(&self, machine: &Machine) -> Repeats {
        let exactly = |times| Repeats { usual: times, least: times, steps: 0, most_us: 0 };
        match (self.cycles, self.quick, machine.is_cuda()) {
            (Some(cycles), ..) => exactly(cycles),
            (None, true, _) => exactly(1),
            (None, false, true) => Repeats { usual: 5, least: 3, steps: 64, most_us: 1_000_000 },
            (None, false, false) => Repeats { usual: 3, least: 3, steps: 16, most_us: 3_000_000 },
        }
    }
}

/// Options of `kernel`.
#[derive(Debug, Args)]
pub struct Kernel {
    /// Shapes of these models; `--model help` lists them
    #[arg(long, value_delimiter = ',', value_name = "NAME,..")]
    pub model: Vec<Model>,
    /// The shapes of all models, and more batches
    #[arg(long, conflicts_with_all = ["model", "family"])]
    pub all: bool,
    /// A shape by its numbers: mamba2, gdn or kda, with --dims
    #[arg(long, requires = "dims")]
    pub family: Option<Family>,
    /// mamba2: heads,headdim,dstate,groups; gdn: H,HV,K,V; kda: H,K,V
    #[arg(long, value_delimiter = ',', requires = "family", value_name = "N,..", value_parser = whole(1, 1 << 20))]
    pub dims: Vec<usize>,
    /// Rows of a step
    #[arg(long, value_delimiter = ',', value_name = "N,..", value_parser = whole(1, 1 << 20))]
    pub batch: Vec<usize>,
    /// T: tokens of a row in a step; three quarters are accepted on average, at 1 all
    #[arg(long, value_delimiter = ',', value_name = "N,..", value_parser = whole(1, 256))]
    pub tokens: Vec<usize>,
    /// W; by default the library's, max(16, min(256, 8 T))
    #[arg(long, value_delimiter = ',', value_name = "N,..", value_parser = whole(1, 256))]
    pub window: Vec<usize>,
    /// split32, f32, bf16, f16; without a readout, with the default one
    #[arg(long, value_delimiter = ',', value_name = "NAME,..")]
    pub format: Vec<Format>,
    /// high, full, exact: those that the formats have
    #[arg(long, value_delimiter = ',', value_name = "NAME,..")]
    pub readout: Vec<Readout>,
    /// Dtype of activations and outputs: bf16, f16, f32
    #[arg(long, default_value = "bf16")]
    pub io: Io,
    /// Mamba-2: outputs go through a gate z
    #[arg(long)]
    pub gate: bool,
    /// Tokens of the sequence whose outputs are compared with fp64; 0: no comparison
    #[arg(long, default_value_t = 4096, value_name = "N", value_parser = whole(0, 1 << 20))]
    pub accuracy_tokens: usize,
    /// GPU: also times each layer behind a matrix product that writes its inputs: without flags, with PDL, with PDL and PREFETCH
    #[arg(long)]
    pub pdl: bool,
    /// Elements of an activation of that product, a multiple of 32
    #[arg(long, default_value_t = 4096, value_name = "N", value_parser = hidden)]
    pub hidden: usize,
    /// Also times a commit, and a snapshot with nothing due
    #[arg(long)]
    pub bookkeeping: bool,
    /// GPU: which kernels take steps of a few tokens, where several can
    #[arg(long, value_enum)]
    pub kernels: Option<Kernels>,
    /// GPU: launches steps of a few tokens by these numbers, for experiments: blocks=2,consumers=8,folders=8,heads-per-item=4
    #[arg(long, value_name = "NAME=N,..", value_parser = Tuning::parse)]
    pub tuning: Option<Tuning>,
}

/// What `model` and `plan` have in common.
#[derive(Debug, Args)]
pub struct Steps {
    /// Rows of a step
    #[arg(long, value_delimiter = ',', value_name = "N,..", value_parser = whole(1, 1 << 20))]
    pub batch: Vec<usize>,
    /// T: tokens of a row in a step; three quarters are accepted on average, at 1 all
    #[arg(long, value_delimiter = ',', value_name = "N,..", value_parser = whole(1, 256))]
    pub tokens: Vec<usize>,
    /// split32, f32, bf16 or f16
    #[arg(long, default_value = "split32", value_name = "NAME")]
    pub format: Format,
    /// high, full or exact; by default that of the format
    #[arg(long, value_name = "NAME")]
    pub readout: Option<Readout>,
    /// Dtype of activations and outputs: bf16, f16, f32
    #[arg(long, default_value = "bf16")]
    pub io: Io,
    /// Mamba-2: outputs go through a gate z
    #[arg(long)]
    pub gate: bool,
}

impl Steps {
    /// A configuration.
    pub fn config(&self, shape: Shape, batch: usize, tokens: usize, window: usize) -> Result<Config> {
        let (format, io) = (self.format, self.io);
        let readout = self.readout.unwrap_or(format.readout(io));
        if !format.has(readout) {
            return Err(format!("--readout is high and --format {format}; expected split32 or bf16 for it"));
        }
        let gate = self.gate && !shape.is_delta();
        Ok(Config { shape, batch, tokens, window, format, readout, io, gate })
    }

    /// Batches and tokens, or the usual ones.
    pub fn sizes(&self, machine: &Machine, quick: bool) -> (Vec<usize>, Vec<usize>) {
        let batches: &[usize] = match (quick, machine.is_cuda()) {
            (true, _) => &[2],
            (false, true) => &[1, 8, 32, 128],
            (false, false) => &[1, 4],
        };
        (given_or(&self.batch, batches), given_or(&self.tokens, &[1]))
    }
}

/// Options of `model`.
#[derive(Debug, Args)]
pub struct ModelOptions {
    /// These models; by default all whose layers are known
    #[arg(long, value_delimiter = ',', value_name = "NAME,..")]
    pub model: Vec<Model>,
    /// Recurrent layers of the model; by default those of its public configuration
    #[arg(long, value_name = "N", value_parser = whole(1, 4096))]
    pub layers: Option<usize>,
    /// W; by default the library's, max(16, min(256, 8 T))
    #[arg(long, value_name = "N", value_parser = whole(1, 256))]
    pub window: Option<usize>,
    /// Steps.
    #[command(flatten)]
    pub steps: Steps,
}

/// Options of `plan`.
#[derive(Debug, Args)]
pub struct Plan {
    /// Shapes of these models
    #[arg(long, value_delimiter = ',', value_name = "NAME,..")]
    pub model: Vec<Model>,
    /// Windows that are timed
    #[arg(long, value_delimiter = ',', value_name = "N,..", value_parser = whole(1, 256))]
    pub window: Vec<usize>,
    /// Steps.
    #[command(flatten)]
    pub steps: Steps,
}

/// Options of `drift`.
#[derive(Debug, Args)]
pub struct Drift {
    /// Tokens of each sequence, a multiple of 100; by default 100000
    #[arg(long, value_name = "N", value_parser = hundreds)]
    pub tokens: Option<usize>,
    /// These families; by default mamba2, gdn and kda
    #[arg(long, value_delimiter = ',', value_name = "NAME,..")]
    pub family: Vec<Family>,
    /// Dtype of activations: bf16, f16, f32
    #[arg(long, default_value = "bf16")]
    pub io: Io,
}

fn hundreds(text: &str) -> Result<usize> {
    let number = text.parse().ok().filter(|n: &usize| (100..=100_000_000).contains(n) && n.is_multiple_of(100));
    number.ok_or_else(|| "expected a multiple of 100 up to 100000000".to_owned())
}

fn hidden(text: &str) -> Result<usize> {
    let number = text.parse().ok().filter(|n: &usize| (32..=1 << 16).contains(n) && n.is_multiple_of(32));
    number.ok_or_else(|| "expected a multiple of 32 up to 65536".to_owned())
}

/// What an option has, or else what is usual.
pub fn given_or(given: &[usize], usual: &[usize]) -> Vec<usize> {
    if given.is_empty() { usual.to_vec() } else { given.to_vec() }
}

/// A whole number from a range; else a sentence.
fn whole(least: usize, most: usize) -> impl Fn(&str) -> Result<usize> + Clone {
    move |text| {
        let number = text.parse().ok().filter(|number| (least..=most).contains(number));
        number.ok_or_else(|| format!("expected a whole number from {least} to {most}"))
    }
}

impl Kernel {
    fn shapes(&self, quick: bool) -> Result<Vec<Shape>> {
        if let Some(family) = self.family {
            let shape = Shape::parse(family, &self.dims).map_err(|expected| {
                let numbers: Vec<_> = self.dims.iter().map(usize::to_string).collect();
                format!("--dims is {}; {expected}", numbers.join(","))
            })?;
            return Ok(vec![shape]);
        }
        if self.all {
            return Ok(MODELS.iter().map(|model| model.shape).collect());
        }
        if self.model.is_empty() {
            return Ok(if quick { TINY } else { USUAL }.to_vec());
        }
        Ok(self.model.iter().map(|model| model.shape).collect())
    }

    /// Formats and readouts for steps of one token, or of more.
    fn ways(&self, tokens: usize) -> Result<Vec<(Format, Readout)>> {
        let formats = match (&self.format[..], &self.readout[..]) {
            ([], []) => {
                let mut ways = vec![(Format::Split32, self.io_readout(Format::Split32)), (Format::F32, Readout::Full)];
                if tokens == 1 {
                    ways.push((Format::F32, Readout::Exact));
                    ways.push((Format::Bf16, Readout::High));
                }
                return Ok(ways);
            }
            (formats, []) => return Ok(formats.iter().map(|&format| (format, self.io_readout(format))).collect()),
            ([], _) => vec![Format::Split32],
            (formats, _) => formats.to_vec(),
        };
        let all = formats.iter().flat_map(|&format| self.readout.iter().map(move |&readout| (format, readout)));
        let legal: Vec<_> = all.filter(|(format, readout)| format.has(*readout)).collect();
        if legal.is_empty() {
            let names: Vec<_> = formats.iter().map(|format| format.name()).collect();
            return Err(format!("--readout is high and --format {}; expected split32 or bf16 for it", names.join(",")));
        }
        Ok(legal)
    }

    fn io_readout(&self, format: Format) -> Readout {
        format.readout(self.io)
    }

    /// Everything that is to be timed, plain updates apart.
    pub fn configs(&self, machine: &Machine, quick: bool) -> Result<Vec<Config>> {
        let batches: &[usize] = match (quick, self.all, machine.is_cuda()) {
            (true, ..) => &[1, 3],
            (_, true, true) => &[1, 8, 32, 128, 256, 512],
            (_, false, true) => &[1, 32, 256],
            (_, true, false) => &[1, 16],
            (_, false, false) => &[1, 4, 16],
        };
        let tokens: &[usize] = match (quick, machine.is_cuda()) {
            (true, _) => &[1, 4],
            (false, true) => &[1, 4, 8],
            (false, false) => &[1],
        };
        let mut configs = Vec::new();
        for shape in self.shapes(quick)? {
            for &batch in &given_or(&self.batch, batches) {
                for &tokens in &given_or(&self.tokens, tokens) {
                    for &window in &given_or(&self.window, &[usual_window(tokens)]) {
                        if window < tokens {
                            return Err(format!("--window is {window}; expected at least --tokens, {tokens}"));
                        }
                        for (format, readout) in self.ways(tokens)? {
                            let (io, gate) = (self.io, self.gate && !shape.is_delta());
                            configs.push(Config { shape, batch, tokens, window, format, readout, io, gate });
                        }
                    }
                }
            }
        }
        Ok(configs)
    }
}
