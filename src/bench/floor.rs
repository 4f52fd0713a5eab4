//! The floor of a step: the fewest bytes that it must move, over what a read stream moves in a second.
//!
//! Per row, step and layer, on average over a flush cycle: what the readout needs of the checkpoint; for the rows that fold, the rest of it
//! and all of it written; each record behind the checkpoint read once; the step's records written; inputs read and outputs written once.
//! Positions, tags and ids, some hundred bytes a row, are left out. Every byte counts as one of a read stream, so that writes have no
//! price of their own: no kernel can be faster, and one that writes cannot quite be as fast.
// SPDX-License-Identifier: MIT OR Apache-2.0

use super::config::{Config, Format, Io, Readout};
use super::cycle::Cycle;
use super::shape::{Family, Shape};

/// Bytes of a row's step in one layer.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Bytes {
    /// Of the checkpoint, read by every step.
    pub checkpoint: f64,
    /// Of the checkpoint, read or written for folds alone.
    pub folds: f64,
    /// Records, read.
    pub history: f64,
    /// Records, written.
    pub records: f64,
    /// Activations and gates, read.
    pub inputs: f64,
    /// Outputs, written.
    pub outputs: f64,
}

impl Bytes {
    /// All of them.
    pub fn total(&self) -> f64 {
        self.checkpoint + self.folds + self.history + self.records + self.inputs + self.outputs
    }
}

/// Bytes of a token's records in a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Records {
    /// What a fold needs.
    pub fold: usize,
    /// What a readout needs.
    pub readout: usize,
    /// All of them.
    pub all: usize,
}

impl Records {
    /// Of a layer.
    pub fn of(shape: &Shape, io: Io, readout: Readout) -> Self {
        let Shape { heads, rows, columns, groups, .. } = *shape;
        let io_bytes = io.bytes();
        if shape.family == Family::Mamba2 {
            // x, B, dt and A dt.
            let all = (heads * rows + groups * columns) * io_bytes + heads * 8;
            return Records { fold: all, readout: all, all };
        }
        let keys = groups * (columns * io_bytes + 4);
        let decays = shape.gates() * 4;
        let fold = keys + decays + heads * rows * io_bytes + heads * 4;
        if readout == Readout::Exact {
            return Records { fold, readout: fold, all: fold };
        }
        // A readout takes u for v and beta.
        let u = heads * rows * if readout == Readout::High && io == Io::Bf16 { 2 } else { 4 };
        Records { fold, readout: keys + decays + u, all: fold + u }
    }
}

/// Bytes of a token's inputs and of its outputs.
fn tokens(config: &Config) -> (usize, usize) {
    let Config { shape, io, .. } = config;
    let out = shape.heads * shape.rows * io.bytes();
    let gates = 4 * (shape.gates() + if shape.is_delta() { shape.heads } else { 0 });
    (shape.packed() * io.bytes() + gates + if config.gate { out } else { 0 }, out)
}

/// What a step of replay must move.
pub fn replay(config: &Config, cycle: &Cycle) -> Bytes {
    let state = (config.shape.state() * config.format.bytes()) as f64;
    let needed = if (config.format, config.readout) == (Format::Split32, Readout::High) { state / 2.0 } else { state };
    let records = Records::of(&config.shape, config.io, config.readout);
    let (inputs, outputs) = tokens(config);
    let t = config.tokens as f64;
    Bytes {
        checkpoint: needed,
        folds: cycle.folding() * (state - needed + state),
        history: cycle.folded() * records.fold as f64 + cycle.history() * records.readout as f64,
        records: t * records.all as f64,
        inputs: t * inputs as f64,
        outputs: t * outputs as f64,
    }
}

/// What the plain update of as many tokens must move, with a fp32 state.
pub fn plain(config: &Config) -> Bytes {
    let state = (config.shape.state() * 4) as f64;
    let (inputs, outputs) = tokens(config);
    let t = config.tokens as f64;
    Bytes {
        checkpoint: state,
        folds: state,
        inputs: t * inputs as f64,
        outputs: t * outputs as f64,
        ..Bytes::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::config::tests::config;
    use crate::bench::cycle::{Acceptance, Simulation};
    use crate::bench::shape::USUAL;
    use crate::replay::config::Schedule;
    use crate::replay::position::Rule;

    fn cycle(config: &Config) -> Cycle {
        let rule = Rule {
            window: config.window as i64,
            keep: 0,
            max_step_tokens: config.tokens as i64,
            schedule: Schedule::Staggered,
        };
        Cycle::find(Simulation::new(rule, config.batch, config.tokens, Acceptance::of(config.tokens), true))
    }

    /// Mamba-2, 128 heads of 64 x 128, 8 groups, T 1, W 16, counted by hand.
    #[test]
    fn a_mamba2_step_of_one_token() {
        let state = 4_194_304.0; // 128 * 64 * 128 * 4
        let record = 19_456.0; // (128 * 64 + 8 * 128) * 2 + 128 * 8
        let inputs = 20_992.0; // (128 * 64 + 2 * 8 * 128) * 2 + 128 * 4
        let outputs = 16_384.0; // 128 * 64 * 2
        let high = config(USUAL[0], Format::Split32, Readout::High);
        let bytes = replay(&high, &cycle(&high));
        assert_eq!(bytes.checkpoint, state / 2.0);
        // One step in 16 reads the low plane and writes both.
        assert_eq!(bytes.folds, 1.5 * state / 16.0);
        // 1 to 15 records in 15 steps, and 16 in the one that folds.
        assert_eq!(bytes.history, 136.0 / 16.0 * record);
        assert_eq!((bytes.records, bytes.inputs, bytes.outputs), (record, inputs, outputs));
        assert_eq!(bytes.total(), 2_712_576.0);
        let full = config(USUAL[0], Format::F32, Readout::Full);
        let bytes = replay(&full, &cycle(&full));
        assert_eq!((bytes.checkpoint, bytes.folds), (state, state / 16.0));
        assert_eq!(bytes.total(), 4_678_656.0);
        assert_eq!(plain(&full).total(), 2.0 * state + inputs + outputs);
    }

    /// GDN, 16 key and 64 value heads of 128 x 128, T 1, W 16: readouts read u and no v, folds v and no u.
    #[test]
    fn a_gdn_step_of_one_token() {
        let high = config(USUAL[1], Format::Split32, Readout::High);
        let keys = 16.0 * (128.0 * 2.0 + 4.0);
        let (v, u) = (64.0 * 128.0 * 2.0, 64.0 * 128.0 * 2.0);
        let (g, beta) = (64.0 * 4.0, 64.0 * 4.0);
        let bytes = replay(&high, &cycle(&high));
        assert_eq!(bytes.records, keys + v + u + g + beta);
        assert_eq!(bytes.history, 7.5 * (keys + u + g) + 1.0 * (keys + v + g + beta));
        let exact = Config { readout: Readout::Exact, ..high };
        assert_eq!(replay(&exact, &cycle(&exact)).history, 8.5 * (keys + v + g + beta));
    }
}
