//! Layers of a model step on a machine: made, run, timed over whole flush cycles, and compared with the plain update.
// SPDX-License-Identifier: MIT OR Apache-2.0

use super::Result;
use super::api::{Pool, PoolDesc, Rows, Tensors};
use super::config::{Config, Format, Io, Readout};
use super::cycle::{Acceptance, Cycle, PHASES, Simulation};
use super::generator::{Generator, SEED, decode, encode};
use super::machine::{Buffer, Exec, Machine};
use super::oracle::relative;
use super::products::Products;
use super::shape::Shape;
use crate::replay::config::Schedule;
use crate::replay::position::Rule;

/// Different tokens that inputs are made of. Drawing more would take longer than what is timed.
const TOKENS: usize = 64;

/// Of a phase.
#[derive(Debug)]
struct Inputs {
    packed: Buffer,
    gates: Buffer,
    beta: Buffer,
}

/// Inputs of a batch's steps, and a layer's parameters. All layers have the same: a layer's inputs come from the kernel in front of it,
/// and are near.
#[derive(Debug)]
pub struct InputSet {
    shape: Shape,
    batch: usize,
    tokens: usize,
    io: Io,
    gate: bool,
    phases: Vec<Inputs>,
    params: Buffer,
}

impl InputSet {
    /// Whether it serves a configuration.
    pub fn is_for(&self, config: &Config) -> bool {
        let Config { shape, batch, tokens, io, gate, .. } = *config;
        (self.shape, self.batch, self.tokens, self.io, self.gate) == (shape, batch, tokens, io, gate)
    }

    /// Draws them.
    pub fn new(machine: &Machine, config: &Config) -> Result<Self> {
        let Config { shape, batch, tokens, io, gate, .. } = *config;
        let mut generator = Generator::new(shape, io, SEED);
        let of_tokens: Vec<_> = (0..TOKENS.min(batch * tokens * PHASES))
            .map(|_| {
                let token = generator.token();
                let mut packed = Vec::new();
                let z = if gate { &token.z[..] } else { &[] };
                let values = token.x.iter().chain(&token.b).chain(&token.c).chain(z);
                values.for_each(|&value| encode(io, value, &mut packed));
                let bytes = |values: &[f32]| values.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<_>>();
                [packed, bytes(&token.gate), bytes(&token.beta)]
            })
            .collect();
        let all = |part: usize, phase: usize| -> Vec<u8> {
            let mut bytes = Vec::with_capacity(batch * tokens * of_tokens[0][part].len());
            for i in 0..batch * tokens {
                // Another beginning in each phase.
                bytes.extend_from_slice(&of_tokens[(i + phase * (TOKENS / PHASES + 1)) % of_tokens.len()][part]);
            }
            bytes
        };
        let phase = |phase| -> Result<Inputs> {
            let buffer = |part| machine.buffer_of(&all(part, phase));
            Ok(Inputs { packed: buffer(0)?, gates: buffer(1)?, beta: buffer(2)? })
        };
        let phases = (0..PHASES).map(phase).collect::<Result<_>>()?;
        let params = machine.buffer_of_f32(generator.a.iter().chain(&generator.bias).copied())?;
        Ok(InputSet { shape, batch, tokens, io, gate, phases, params })
    }

    fn tensors<'a>(&'a self, phase: usize, out: &'a Buffer) -> Tensors<'a> {
        let Inputs { packed, gates, beta } = &self.phases[phase];
        Tensors {
            shape: self.shape,
            io: self.io,
            out_io: self.io,
            gate: self.gate,
            packed,
            gates,
            beta,
            params: &self.params,
            out,
            row_tokens: self.tokens,
            first: 0,
            row_step: 1,
        }
    }
}

/// How steps are to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Steps of replay, first folds spread over a window.
    Staggered,
    /// Steps of replay, all rows in the same place, so that all fold in one step.
    Aligned,
    /// The plain update.
    Plain,
}

/// What was measured.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Timed {
    /// Microseconds per layer and step, the commit's share included: the mean over a cycle's steps, of each the median of its repeats.
    pub us: f64,
    /// The mean of all.
    pub mean_us: f64,
    /// The slowest step of a cycle (the median of its repeats), over the average step.
    pub peak: f64,
    /// Steps of the cycle.
    pub steps: usize,
    /// Repeats of the cycle.
    pub repeats: usize,
    /// Layers of a step.
    pub layers: usize,
    /// Bytes of checkpoints and rings per row, step and layer, as the library has counted them meanwhile.
    pub moved: f64,
}

/// How often a flush cycle is timed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Repeats {
    /// Times, if not fewer are wanted for long cycles.
    pub usual: usize,
    /// Times at least.
    pub least: usize,
    /// Steps at least: short cycles are repeated more often.
    pub steps: usize,
    /// Microseconds that more than the least may take.
    pub most_us: u64,
}

impl Repeats {
    /// Of a cycle of steps that take so many microseconds each.
    fn of_cycle(self, steps: usize, us: f64) -> usize {
        let wanted = self.usual.max(self.steps.div_ceil(steps));
        let affordable = self.most_us as f64 / (us * steps as f64).max(1.0);
        wanted.min(affordable as usize).max(self.least)
    }
}

/// The layers of a model step.
pub struct Rig<'a> {
    machine: &'a Machine,
    inputs: &'a InputSet,
    config: Config,
    way: Way,
    pool: Pool,
    layers: usize,
    ids: Buffer,
    out: Buffer,
    /// Of each phase.
    counts: Vec<Buffer>,
    /// What its rows do.
    pub cycle: Cycle,
}

impl Config {
    /// What its rows do, from a reset on.
    pub fn simulation(&self, spread: bool) -> Simulation {
        let rule = Rule {
            window: self.window as i64,
            keep: 0,
            max_step_tokens: self.tokens as i64,
            schedule: if spread { Schedule::Staggered } else { Schedule::None },
        };
        Simulation::new(rule, self.batch, self.tokens, Acceptance::of(self.tokens), spread)
    }
}

impl<'a> Rig<'a> {
    /// Makes it: empty states at position 0.
    pub fn new(machine: &'a Machine, inputs: &'a InputSet, config: &Config, way: Way, layers: usize) -> Result<Self> {
        let Config { shape, batch, tokens, io, .. } = *config;
        let staggered = way == Way::Staggered;
        let desc = PoolDesc { layers, staggered, ..PoolDesc::of(config) };
        let acceptance = Acceptance::of(tokens);
        let counts = |phase| machine.buffer_of_i32((0..batch).map(|row| acceptance.count(phase, row, staggered)));
        let rig = Rig {
            machine,
            inputs,
            config: *config,
            way,
            pool: Pool::new(&machine.context, &desc)?,
            layers,
            ids: machine.buffer_of_i32(0..batch as i32)?,
            out: machine.buffer(batch * tokens * shape.heads * shape.rows * io.bytes())?,
            counts: (0..PHASES).map(counts).collect::<Result<_>>()?,
            cycle: Cycle::find(config.simulation(staggered)),
        };
        rig.pool.reset(&rig.rows(), None, &machine.exec())?;
        Ok(rig)
    }

    fn rows(&self) -> Rows<'_> {
        let Config { batch, tokens, .. } = self.config;
        Rows { ids: &self.ids, n: batch, tokens, extend: self.way == Way::Plain }
    }

    /// All layers, each behind a product if there is one, and the commit.
    fn model_step(&self, phase: usize, step: &Exec, commit: &Exec, product: Option<&Products>) -> Result<()> {
        let (rows, tensors) = (self.rows(), self.inputs.tensors(phase, &self.out));
        for layer in 0..self.layers {
            if let Some(product) = product {
                product.enqueue(layer, &self.inputs.phases[phase].packed)?;
            }
            self.pool.step(layer, &rows, &tensors, step)?;
        }
        let counts = if self.way == Way::Plain { None } else { Some(&self.counts[phase]) };
        self.pool.commit(&rows, counts, commit)
    }

    /// Times layers behind matrix products that write their inputs: with these flags of steps each, and the products alone.
    pub fn time_behind_products(
        &self,
        products: &Products,
        flags: &[u32],
        repeats: Repeats,
    ) -> Result<(Vec<Timed>, f64)> {
        let commit = self.machine.exec();
        let time = |&flags: &u32| {
            let step = commit.with(flags);
            self.time_work(repeats, |phase| self.model_step(phase, &step, &commit, Some(products)))
        };
        let pairs = flags.iter().map(time).collect::<Result<Vec<_>>>()?;
        let alone = || {
            let inputs = &self.inputs.phases[0].packed;
            (0..self.layers).try_for_each(|layer| products.enqueue(layer, inputs))
        };
        let recordings = [self.machine.record(alone)?];
        let times = self.machine.time(&recordings, std::iter::repeat_n(0, self.cycle.steps.len()))?;
        self.machine.finish()?;
        self.pool.check()?;
        Ok((pairs, median(times) / self.layers as f64))
    }

    /// Times whole cycles.
    pub fn time(&self, repeats: Repeats) -> Result<Timed> {
        let exec = self.machine.exec();
        self.time_work(repeats, |phase| self.model_step(phase, &exec, &exec, None))
    }

    fn time_work(&self, repeats: Repeats, work: impl Fn(usize) -> Result<()>) -> Result<Timed> {
        let work = &work;
        let record = |phase| self.machine.record(move || work(phase));
        let recordings = (0..PHASES).map(record).collect::<Result<Vec<_>>>()?;
        // The plain update has no cycle but that of its inputs.
        let (warm_up, cycle) =
            if self.way == Way::Plain { (PHASES, PHASES) } else { (self.cycle.warm_up, self.cycle.steps.len()) };
        let times = self.machine.time(&recordings, (0..warm_up).map(|step| step % PHASES))?;
        let repeats = repeats.of_cycle(cycle, times.iter().sum::<f64>() / times.len() as f64);
        let before = self.pool.stats()?.bytes;
        let times = self.machine.time(&recordings, (0..cycle * repeats).map(|step| step % PHASES))?;
        self.machine.finish()?;
        let moved = (self.pool.stats()?.bytes - before) as f64 / (times.len() * self.config.batch * self.layers) as f64;
        let of_step = |step| median(times.iter().skip(step).step_by(cycle).copied().collect());
        let of_steps: Vec<f64> = (0..cycle).map(of_step).collect();
        let mean = of_steps.iter().sum::<f64>() / cycle as f64;
        Ok(Timed {
            us: mean / self.layers as f64,
            mean_us: times.iter().sum::<f64>() / times.len() as f64 / self.layers as f64,
            peak: of_steps.iter().copied().fold(0.0, f64::max) / mean,
            steps: cycle,
            repeats,
            layers: self.layers,
            moved,
        })
    }

    /// Takes steps one after the other, from a reset on, and says how many tiles of checkpoints each rewrote.
    pub fn flushes(&self, steps: usize) -> Result<Vec<u64>> {
        let (exec, mut before) = (self.machine.exec(), self.pool.stats()?.flushes);
        let step = |step| {
            self.model_step(step % PHASES, &exec, &exec, None)?;
            self.machine.finish()?;
            let now = self.pool.stats()?.flushes;
            Ok(now - std::mem::replace(&mut before, now))
        };
        (0..steps).map(step).collect()
    }

    /// Outputs of the last step in dense rows and tokens.
    fn outputs(&self, of: &Buffer) -> Result<Vec<f32>> {
        self.machine.finish()?;
        Ok(of.read()?.chunks_exact(self.config.io.bytes()).map(|bytes| decode(self.config.io, bytes)).collect())
    }

    /// Whether what was timed is right. It ends the rig: only one layer goes on.
    ///
    /// The states of some rows, wherever their rings stand by now, are exported and imported into a pool of plain updates; both then take
    /// the same steps, all tokens accepted, and their outputs are compared.
    pub fn check(self) -> Result<Check> {
        let Config { shape, batch, tokens, .. } = self.config;
        let (machine, exec) = (self.machine, self.machine.exec());
        let is_finite = self.outputs(&self.out)?.iter().all(|y| y.is_finite());
        let n = batch.min(4);
        let row_step = batch / n;
        let (layer, sampled) = (self.layers - 1, machine.buffer_of_i32((0..n).map(|i| (i * row_step) as i32))?);
        let states = machine.buffer(n * shape.state() * 4)?;
        self.pool.export(layer, &Rows { ids: &sampled, n, tokens: 0, extend: false }, &states, &exec)?;
        let plain = Config { batch: n, format: Format::F32, readout: Readout::Exact, ..self.config };
        let desc = PoolDesc { staggered: false, ..PoolDesc::of(&plain) };
        let plain = Pool::new(&machine.context, &desc)?;
        let out = machine.buffer(self.out.bytes())?;
        let rows = Rows { ids: &self.ids, n, tokens, extend: true };
        plain.reset(&rows, None, &exec)?;
        plain.import(0, &rows, &states, &exec)?;
        let width = tokens * shape.heads * shape.rows;
        let pick = |all: Vec<f32>| -> Vec<f64> {
            (0..n).flat_map(|i| all[i * row_step * width..][..width].to_vec()).map(f64::from).collect()
        };
        let (mut error, mut allowed) = (0f64, bound(&self.config));
        for phase in 0..3 {
            self.pool.step(layer, &self.rows(), &self.inputs.tensors(phase, &self.out), &exec)?;
            plain.step(0, &rows, &Tensors { row_step, ..self.inputs.tensors(phase, &out) }, &exec)?;
            let (got, truth) = (pick(self.outputs(&self.out)?), pick(self.outputs(&out)?));
            let limit = bound(&self.config) + unit_of_largest(&self.config, &truth);
            let found = relative(got.into_iter(), truth.into_iter());
            // That of the worst phase; a NaN is the worst.
            if found.is_nan() || found - limit > error - allowed {
                (error, allowed) = (found, limit);
            }
            self.pool.commit(&self.rows(), None, &exec)?;
            plain.commit(&rows, None, &exec)?;
        }
        machine.finish()?;
        let faults = self.pool.check().and(plain.check()).err();
        Ok(Check { is_finite, error, bound: allowed, faults })
    }
}

/// What a check has found.
#[derive(Debug, Clone, PartialEq)]
pub struct Check {
    /// Whether all outputs of the last timed step are numbers.
    pub is_finite: bool,
    /// Relative L2 distance of outputs from the plain update's, from equal states on equal inputs.
    pub error: f64,
    /// What it may be.
    pub bound: f64,
    /// What `replayssm_check` says, if there was something.
    pub faults: Option<String>,
}

impl Check {
    /// What is wrong, in a sentence.
    pub fn failure(&self) -> Option<String> {
        if let Some(faults) = &self.faults {
            return Some(faults.clone());
        }
        if !self.is_finite {
            return Some("outputs are not finite".into());
        }
        // A NaN is no error within a bound.
        if self.error <= self.bound {
            return None;
        }
        Some(format!("outputs are {:.1e} from the plain update's; expected at most {:.1e}", self.error, self.bound))
    }
}

/// The relative L2 distance that outputs may have from the plain update's, both rounded to `io`.
///
/// EXACT is the plain update, by bytes. For the others, in the mean square over many outputs:
/// - Rounding to bf16 is off by 2^-8 / sqrt(3) of a value just above a power of two and by half of that just below the next, 1.7e-3 over
///   mantissas of every size, to f16 2.1e-4, and is done to both sides, independently where they differ by more than a unit of the last place.
/// - HIGH is within 2e-3 on the named generator, 2.4e-3 where keys repeat as they do here: sqrt(2.4^2 + 2 * 1.7^2) = 3.4e-3.
/// - FULL is within twice the plain update's own error of 1e-6 at most plus 1e-6: two values that are d = 3e-6 apart are rounded to
///   different sides in a share of d / unit of all cases, and are then a unit, 2^-7 at most, apart: sqrt(d * 2^-7) = 1.5e-4.
/// - A 16-bit state may be rounded by a fold between the export and the last step: as one more rounding to bf16, or f16.
///
/// Half as much again is for the few thousand outputs that are looked at.
fn bound(config: &Config) -> f64 {
    let rounding = |bf16: bool| if bf16 { 1.7e-3f64 } else { 2.1e-4 };
    let state = match config.format {
        Format::Bf16 => rounding(true),
        Format::F16 => rounding(false),
        _ => 0.0,
    };
    let outputs = if config.io == Io::F32 { 0.0 } else { 2f64.sqrt() * rounding(config.io == Io::Bf16) };
    let readout = match (config.readout, config.format.is_lossless()) {
        (Readout::Exact, true) => return 0.0,
        (Readout::Full, true) => match config.io {
            Io::Bf16 => return 1.5 * 1.5e-4,
            Io::F16 => return 1.5 * (3e-6 * 2f64.powi(-10)).sqrt(),
            Io::F32 => 3e-6,
        },
        (Readout::High, _) => 2.4e-3,
        _ => 3e-6,
    };
    1.5 * (state * state + outputs * outputs + readout * readout).sqrt()
}

/// What one output adds, where two values close to each other are rounded to different sides: a unit of its last place, 2^-7 of it at most for
/// bf16 and 2^-10 for f16, as a share of all outputs. `bound` is a mean over many outputs, which a single large one is not.
fn unit_of_largest(config: &Config, truth: &[f64]) -> f64 {
    let unit = match (config.readout, config.io) {
        (Readout::Exact, _) | (_, Io::F32) => return 0.0,
        (_, Io::Bf16) => 2f64.powi(-7),
        (_, Io::F16) => 2f64.powi(-10),
    };
    let norm = truth.iter().map(|y| y * y).sum::<f64>().sqrt();
    let largest = truth.iter().fold(0.0, |most: f64, y| most.max(y.abs()));
    if norm > 0.0 { unit * largest / norm } else { 0.0 }
}

/// The middle one.
pub fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}
