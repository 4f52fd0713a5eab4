//! How far outputs are from a fp64 recurrence after thousands of tokens: what a format and a readout cost.
// SPDX-License-Identifier: MIT OR Apache-2.0

use std::collections::HashMap;

use super::Result;
use super::api::{Pool, PoolDesc};
use super::config::{Config, Io};
use super::generator::{Generator, SEED, Token};
use super::machine::Machine;
use super::oracle::{Oracle, relative};
use super::shape::Shape;
use super::stretch::Stretch;

/// A sequence and its outputs in fp64.
pub struct Truth {
    generator: Generator,
    tokens: Vec<Token>,
    outputs: Vec<f64>,
}

impl Truth {
    /// So many tokens of a layer.
    pub fn new(shape: Shape, io: Io, n_tokens: usize) -> Self {
        let mut generator = Generator::new(shape, io, SEED);
        let tokens: Vec<_> = (0..n_tokens).map(|_| generator.token()).collect();
        let (mut oracle, mut outputs) = (Oracle::new(&generator), Vec::new());
        tokens.iter().for_each(|token| oracle.token(token, &mut outputs));
        Truth { generator, tokens, outputs }
    }

    /// The relative L2 error of a configuration's steps, or of the plain update, one token at a time.
    pub fn error(&self, machine: &Machine, config: &Config, plain: bool) -> Result<f64> {
        let tokens = if plain { 1 } else { config.tokens };
        let stretch = Stretch::new(machine, &self.generator, config.io, &self.tokens, tokens)?;
        let pool = Pool::new(&machine.context, &PoolDesc { slots: 1, out: Io::F32, ..PoolDesc::of(config) })?;
        let got = stretch.run(&pool, tokens, plain)?;
        Ok(relative(got.into_iter(), self.outputs.iter().copied()))
    }
}

/// Errors by configuration, each measured once.
#[derive(Default)]
pub struct Accuracy {
    truths: HashMap<(Shape, Io), Truth>,
    errors: HashMap<Config, f64>,
}

impl Accuracy {
    /// The relative L2 error of fp32 outputs, without gate and skip, over a sequence of so many tokens on a few heads of the shape: steps of
    /// the configuration's tokens, window, format and readout, of which as many are accepted as when it is timed.
    pub fn error(&mut self, machine: &Machine, config: &Config, n_tokens: usize) -> Result<f64> {
        let key = Config { gate: false, ..config.without_batch() };
        if let Some(&error) = self.errors.get(&key) {
            return Ok(error);
        }
        let shape = config.shape.few();
        let truth = self.truths.entry((shape, config.io)).or_insert_with(|| Truth::new(shape, config.io, n_tokens));
        let error = truth.error(machine, &Config { shape, ..key }, false)?;
        self.errors.insert(key, error);
        Ok(error)
    }
}
