//! Matrix products in front of layers: what an engine's kernel is for ours. They write the inputs that the layers read.
// SPDX-License-Identifier: MIT OR Apache-2.0

use super::Result;
use super::config::{Config, Io};
use super::generator::{Rng, decode};
use super::machine::{Buffer, Machine};
use crate::backend::cuda::bench::Product;

/// Different values that weights and activations are made of.
const VALUES: usize = 65_521;

/// Products of a batch's activations and the weights of each layer.
pub struct Products<'a> {
    machine: &'a Machine,
    sizes: Product,
    activations: Buffer,
    /// Of as many layers as do not fit a cache.
    weights: Vec<Buffer>,
    values: Vec<u8>,
}

impl<'a> Products<'a> {
    /// For a configuration: [batch, hidden] by [hidden, x | B | C].
    pub fn new(machine: &'a Machine, config: &Config, hidden: usize, layers: usize) -> Result<Self> {
        let n = config.shape.packed() + if config.gate { config.shape.heads * config.shape.rows } else { 0 };
        if config.io != Io::Bf16 || !n.is_multiple_of(16) {
            return Err(format!(
                "--pdl: the inputs are {} {} a token; expected bf16 ones, a multiple of 16",
                n,
                config.io.name()
            ));
        }
        let mut rng = Rng(1);
        let mut values = Vec::new();
        for _ in 0..VALUES {
            values.extend(half::bf16::from_f64(rng.normal() / (hidden as f64).sqrt().sqrt()).to_bits().to_ne_bytes());
        }
        let sizes = Product { batch: (config.batch * config.tokens) as u32, hidden: hidden as u32, n: n as u32 };
        let repeated = |elements: usize| values.iter().copied().cycle().take(2 * elements).collect::<Vec<u8>>();
        let activations = machine.buffer_of(&repeated(config.batch * config.tokens * hidden))?;
        let of_a_layer = repeated(hidden * n);
        let copies = machine.cold_bytes.div_ceil(of_a_layer.len()).clamp(1, layers);
        let weights = (0..copies).map(|_| machine.buffer_of(&of_a_layer)).collect::<Result<_>>()?;
        Ok(Products { machine, sizes, activations, weights, values })
    }

    /// Enqueues a layer's.
    pub fn enqueue(&self, layer: usize, out: &Buffer) -> Result<()> {
        let gpu = self.machine.gpu.as_ref().ok_or("expected a GPU")?;
        let weights = self.weights[layer % self.weights.len()].device()?;
        gpu.product(self.sizes, self.activations.device()?, weights, out.device()?).map_err(|why| why.to_string())
    }

    /// An error unless the last row of a product is right: within bf16's rounding, 2^-8, and that of fp32 sums of numbers of either sign.
    pub fn check(&self) -> Result<()> {
        let Product { batch, hidden, n } = self.sizes;
        let [batch, hidden, n] = [batch, hidden, n].map(|size| size as usize);
        let out = self.machine.buffer(2 * batch * n)?;
        self.enqueue(0, &out)?;
        self.machine.finish()?;
        let value = |element: usize| f64::from(decode(Io::Bf16, &self.values[2 * (element % VALUES)..]));
        let got = out.read()?;
        let row = batch - 1;
        for column in (0..n).step_by((n / 64).max(1)) {
            let terms = (0..hidden).map(|k| value(row * hidden + k) * value(column * hidden + k));
            let (truth, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
            let y = f64::from(decode(Io::Bf16, &got[2 * (row * n + column)..]));
            let bound = truth.abs() * 2f64.powi(-8) + size * 2f64.powi(-18);
            if (y - truth).is_nan() || (y - truth).abs() > bound {
                return Err(format!("--pdl: element {row}, {column} of a product is {y:.6}; expected {truth:.6}"));
            }
        }
        Ok(())
    }
}
