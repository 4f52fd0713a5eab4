//! A stretch of tokens of one row, which pools take in: what errors are measured on.
// SPDX-License-Identifier: MIT OR Apache-2.0

use super::Result;
use super::api::{Pool, Rows, Tensors};
use super::config::Io;
use super::cycle::{Acceptance, PHASES};
use super::generator::{Generator, Token, decode, encode};
use super::machine::{Buffer, Machine};
use super::shape::Shape;

/// Tokens in a machine's memory.
pub struct Stretch<'a> {
    machine: &'a Machine,
    shape: Shape,
    io: Io,
    n: usize,
    packed: Buffer,
    gates: Buffer,
    beta: Buffer,
    params: Buffer,
    out: Buffer,
    ids: Buffer,
    /// How many tokens of a step stay: 1, 2, ...
    counts: Vec<Buffer>,
}

impl<'a> Stretch<'a> {
    /// Tokens of a generator, for steps of up to `longest`.
    pub fn new(machine: &'a Machine, generator: &Generator, io: Io, tokens: &[Token], longest: usize) -> Result<Self> {
        let (mut packed, mut gates, mut beta) = (Vec::new(), Vec::new(), Vec::new());
        // Behind the end, where the last step's drafts are, the first tokens come again.
        for token in tokens.iter().chain(tokens.iter().cycle().take(longest - 1)) {
            token.x.iter().chain(&token.b).chain(&token.c).for_each(|&value| encode(io, value, &mut packed));
            gates.extend(&token.gate);
            beta.extend(&token.beta);
        }
        let (shape, n) = (generator.shape, tokens.len());
        Ok(Stretch {
            machine,
            shape,
            io,
            n,
            packed: machine.buffer_of(&packed)?,
            gates: machine.buffer_of_f32(gates.into_iter())?,
            beta: machine.buffer_of_f32(beta.into_iter())?,
            params: machine.buffer_of_f32(generator.a.iter().chain(&generator.bias).copied())?,
            out: machine.buffer((n + longest - 1) * shape.heads * shape.rows * 4)?,
            ids: machine.buffer_of_i32(std::iter::once(0))?,
            counts: (1..=longest as i32)
                .map(|count| machine.buffer_of_i32(std::iter::once(count)))
                .collect::<Result<_>>()?,
        })
    }

    /// The row that takes them.
    pub fn rows(&self, tokens: usize, extend: bool) -> Rows<'_> {
        Rows { ids: &self.ids, n: 1, tokens, extend }
    }

    /// Takes them through a pool, by steps of which [`Acceptance`] says how many tokens stay, or by extends; gives the outputs.
    pub fn run(&self, pool: &Pool, tokens: usize, extend: bool) -> Result<Vec<f64>> {
        let (rows, exec) = (self.rows(tokens, extend), self.machine.exec());
        let (acceptance, mut first, mut step) = (Acceptance::of(tokens), 0, 0);
        while first < self.n {
            let tensors = Tensors {
                shape: self.shape,
                io: self.io,
                out_io: Io::F32,
                gate: false,
                packed: &self.packed,
                gates: &self.gates,
                beta: &self.beta,
                params: &self.params,
                out: &self.out,
                row_tokens: self.n,
                first,
                row_step: 1,
            };
            pool.step(0, &rows, &tensors, &exec)?;
            let count = (acceptance.count(step % PHASES, 0, true) as usize).min(self.n - first);
            pool.commit(&rows, if extend { None } else { Some(&self.counts[count - 1]) }, &exec)?;
            first += count;
            step += 1;
        }
        self.machine.finish()?;
        pool.check()?;
        let outputs = self.n * self.shape.heads * self.shape.rows;
        Ok(floats(&self.out.read()?).take(outputs).collect())
    }
}

/// Numbers that are in memory as fp32.
pub fn floats(bytes: &[u8]) -> impl Iterator<Item = f64> {
    bytes.chunks_exact(4).map(|bytes| f64::from(decode(Io::F32, bytes)))
}
