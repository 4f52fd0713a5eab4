//! How far outputs are from a fp64 recurrence after thousands of tokens: what a format and a readout cost.
// SPDX-License-Identifier: MIT OR Apache-2.0

use std::collections::HashMap;

use super::Result;
use super::api::{Pool, PoolDesc, Rows, Tensors};
use super::config::{Config, Io};
use super::cycle::{Acceptance, PHASES};
use super::generator::{Generator, SEED, Token, decode, encode};
use super::machine::Machine;
use super::oracle::{Oracle, relative};
use super::shape::Shape;

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
        let got = self.run(machine, config, plain)?;
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

impl Truth {
    /// Outputs of a sequence: by steps, or by extends of one token.
    fn run(&self, machine: &Machine, config: &Config, extend: bool) -> Result<Vec<f64>> {
        let Config { shape, tokens, window, format, readout, io, .. } = *config;
        let n = self.tokens.len();
        let desc = PoolDesc {
            shape,
            layers: 1,
            slots: 1,
            window,
            tokens,
            staggered: true,
            format,
            readout,
            stochastic: false,
            io,
            out: Io::F32,
        };
        let (mut packed, mut gates, mut beta) = (Vec::new(), Vec::new(), Vec::new());
        // Behind the end, where the last step's drafts are, the first tokens come again.
        for token in self.tokens.iter().chain(self.tokens.iter().cycle().take(tokens)) {
            token.x.iter().chain(&token.b).chain(&token.c).for_each(|&value| encode(io, value, &mut packed));
            gates.extend(&token.gate);
            beta.extend(&token.beta);
        }
        let packed = machine.buffer_of(&packed)?;
        let (gates, beta) = (machine.buffer_of_f32(gates.into_iter())?, machine.buffer_of_f32(beta.into_iter())?);
        let params = machine.buffer_of_f32(self.generator.a.iter().chain(&self.generator.bias).copied())?;
        let (width, ids) = (shape.heads * shape.rows, machine.buffer_of_i32(std::iter::once(0))?);
        let out = machine.buffer((n + tokens) * width * 4)?;
        let acceptance = Acceptance::of(tokens);
        let counts = (0..PHASES)
            .map(|phase| machine.buffer_of_i32(std::iter::once(acceptance.count(phase, 0, true))))
            .collect::<Result<Vec<_>>>()?;
        let (pool, exec) = (Pool::new(&machine.context, &desc)?, machine.exec());
        let rows = Rows { ids: &ids, n: 1, tokens: if extend { 1 } else { tokens }, extend };
        pool.reset(&rows, None, &exec)?;
        let (mut first, mut step) = (0, 0);
        while first < n {
            let tensors = Tensors {
                shape,
                io,
                out_io: Io::F32,
                gate: false,
                packed: &packed,
                gates: &gates,
                beta: &beta,
                params: &params,
                out: &out,
                row_tokens: n,
                first,
                row_step: 1,
            };
            pool.step(0, &rows, &tensors, &exec)?;
            let phase = step % PHASES;
            pool.commit(&rows, if extend { None } else { Some(&counts[phase]) }, &exec)?;
            first += if extend { 1 } else { acceptance.count(phase, 0, true) as usize };
            step += 1;
        }
        machine.finish()?;
        pool.check()?;
        let all = out.read()?;
        Ok(all[..n * width * 4].chunks_exact(4).map(|bytes| f64::from(decode(Io::F32, bytes))).collect())
    }
}
