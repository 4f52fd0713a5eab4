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
