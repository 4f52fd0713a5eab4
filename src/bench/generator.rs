//! The named generator of docs/KERNELS.md: inputs that layers of real models resemble, the same on every machine.
// SPDX-License-Identifier: MIT OR Apache-2.0

use super::config::Io;
use super::shape::{Family, Shape};

/// What figures are measured with.
pub const SEED: u64 = 0xFEED;

/// SplitMix64.
#[derive(Debug, Clone)]
pub struct Rng(pub u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in (0, 1).
    pub fn unit(&mut self) -> f64 {
        ((self.next() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Standard normal, by Box and Muller.
    pub fn normal(&mut self) -> f64 {
        (-2.0 * self.unit().ln()).sqrt() * (std::f64::consts::TAU * self.unit()).cos()
    }
}

/// The nearest value of an activation dtype.
fn rounded(io: Io, value: f64) -> f32 {
    match io {
        Io::Bf16 => half::bf16::from_f64(value).to_f32(),
        Io::F16 => half::f16::from_f64(value).to_f32(),
        Io::F32 => value as f32,
    }
}

/// Appends a value that has been rounded to an activation dtype.
pub fn encode(io: Io, value: f32, to: &mut Vec<u8>) {
    match io {
        Io::Bf16 => to.extend(half::bf16::from_f32(value).to_bits().to_ne_bytes()),
        Io::F16 => to.extend(half::f16::from_f32(value).to_bits().to_ne_bytes()),
        Io::F32 => to.extend(value.to_ne_bytes()),
    }
}

/// A value of a dtype at the begin of its bytes.
pub fn decode(io: Io, bytes: &[u8]) -> f32 {
    let two = u16::from_ne_bytes([bytes[0], bytes[1]]);
    match io {
        Io::Bf16 => half::bf16::from_bits(two).to_f32(),
        Io::F16 => half::f16::from_bits(two).to_f32(),
        Io::F32 => f32::from_ne_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
    }
}

fn silu(x: f64) -> f64 {
    x / (1.0 + (-x).exp())
}

fn normalised(mut v: Vec<f64>) -> Vec<f64> {
    let norm = v.iter().map(|x| x * x).sum::<f64>().sqrt();
    v.iter_mut().for_each(|x| *x /= norm);
    v
}

/// Inputs of one token, as the library gets them.
#[derive(Debug, Clone)]
pub struct Token {
    /// x, [heads, rows] (delta rules: v).
    pub x: Vec<f32>,
    /// B, [groups, columns] (delta rules: k).
    pub b: Vec<f32>,
    /// C, [groups, columns] (delta rules: q).
    pub c: Vec<f32>,
    /// Mamba-2: z, [heads, rows].
    pub z: Vec<f32>,
    /// Raw dt, [heads] (delta rules: raw a, [HV] or [HV, K]).
    pub gate: Vec<f32>,
    /// Delta rules: raw b, [HV].
    pub beta: Vec<f32>,
}

/// A layer's parameters and its tokens, one after the other.
#[derive(Debug, Clone)]
pub struct Generator {
    /// Of the layer.
    pub shape: Shape,
    io: Io,
    /// A, [heads] (delta rules: A_log).
    pub a: Vec<f32>,
    /// Added to the gates before their softplus, as many as there are gates.
    pub bias: Vec<f32>,
    mean: Vec<f64>,
    decays: Vec<f64>,
    rng: Rng,
}

impl Generator {
    /// Of a layer. One seed gives one sequence.
    pub fn new(shape: Shape, io: Io, seed: u64) -> Self {
        let mut rng = Rng(seed);
        let rates: Vec<f64> = (0..shape.heads).map(|_| 1.0 + 15.0 * rng.unit()).collect();
        let a = rates.iter().map(|&rate| if shape.is_delta() { rate.ln() } else { -rate } as f32).collect();
        let bias = (0..shape.gates()).map(|_| (0.3 * rng.normal()) as f32).collect();
        // Log-uniform in [0.9, 0.9999].
        let (slow, fast) = (1e-4f64, -0.9f64.ln());
        let decays = (0..shape.gates()).map(|_| -(slow.ln() + rng.unit() * (fast.ln() - slow.ln())).exp()).collect();
        let mean = (0..shape.groups)
            .flat_map(|_| normalised((0..shape.columns).map(|_| rng.normal()).collect::<Vec<_>>()))
            .collect();
        Generator { shape, io, a, bias, mean, decays, rng }
    }

    fn key(&mut self) -> Vec<f32> {
        let columns = self.shape.columns;
        let mut all = Vec::new();
        for head in 0..self.shape.groups {
            let noise = normalised((0..columns).map(|_| self.rng.normal()).collect());
            let mean = &self.mean[head * columns..][..columns];
            let both = mean.iter().zip(&noise).map(|(m, n)| 0.25f64.sqrt() * m + 0.75f64.sqrt() * n).collect();
            all.extend(normalised(both).into_iter().map(|k| rounded(self.io, k)));
        }
        all
    }

    /// The next token.
    pub fn token(&mut self) -> Token {
        let Shape { heads, rows, columns, groups, .. } = self.shape;
        let io = self.io;
        let x = (0..heads * rows).map(|_| rounded(io, silu(self.rng.normal()))).collect();
        if self.shape.family == Family::Mamba2 {
            let mut draw = || (0..groups * columns).map(|_| rounded(io, silu(self.rng.normal()))).collect();
            let (b, c) = (draw(), draw());
            let z = (0..heads * rows).map(|_| rounded(io, self.rng.normal())).collect();
            // Log-normal around 0.05, behind the softplus.
            let dt = (0..heads).map(|_| (0.05f64.ln() + 0.5 * self.rng.normal()).exp());
            let gate = dt.map(|dt| dt.exp_m1().ln() as f32).collect();
            return Token { x, b, c, z, gate, beta: Vec::new() };
        }
        let (b, c) = (self.key(), self.key());
        let per_head = self.shape.gates() / heads;
        let gate = |i: usize| {
            let rate = f64::from(self.a[i / per_head]).exp();
            ((-self.decays[i] / rate).exp_m1().ln() - f64::from(self.bias[i])) as f32
        };
        let gate = (0..self.shape.gates()).map(gate).collect();
        let beta = (0..heads).map(|_| self.rng.normal() as f32).collect();
        Token { x, b, c, z: Vec::new(), gate, beta }
    }
}
