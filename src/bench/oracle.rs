//! The recurrences in fp64, from their formulas (docs/KERNELS.md): what outputs are compared with. Nothing of the library is used.
// SPDX-License-Identifier: MIT OR Apache-2.0

use super::generator::{Generator, Token};
use super::shape::{Family, Shape};

/// A layer of one sequence.
#[derive(Debug, Clone)]
pub struct Oracle {
    shape: Shape,
    a: Vec<f64>,
    bias: Vec<f64>,
    /// [heads, rows, columns].
    state: Vec<f64>,
}

fn softplus(x: f64) -> f64 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

impl Oracle {
    /// An empty state, and a generator's parameters.
    pub fn new(generator: &Generator) -> Self {
        let wide = |values: &[f32]| values.iter().map(|&x| f64::from(x)).collect();
        let shape = generator.shape;
        Oracle { shape, a: wide(&generator.a), bias: wide(&generator.bias), state: vec![0.0; shape.state()] }
    }

    /// [heads, rows, columns].
    pub fn state(&self) -> &[f64] {
        &self.state
    }

    /// Takes a token in and appends its outputs, [heads, rows], without gate and skip.
    pub fn token(&mut self, token: &Token, out: &mut Vec<f64>) {
        if self.shape.family == Family::Mamba2 { self.mamba2(token, out) } else { self.delta(token, out) }
    }

    fn mamba2(&mut self, token: &Token, out: &mut Vec<f64>) {
        let Shape { heads, rows, columns, groups, .. } = self.shape;
        for head in 0..heads {
            let group = head / (heads / groups);
            let dt = softplus(f64::from(token.gate[head]) + self.bias[head]);
            let decay = (self.a[head] * dt).exp();
            let (b, c) = (&token.b[group * columns..][..columns], &token.c[group * columns..][..columns]);
            for row in 0..rows {
                let at = head * rows + row;
                let xd = dt * f64::from(token.x[at]);
                let mut y = 0.0;
                for ((s, &b), &c) in self.state[at * columns..][..columns].iter_mut().zip(b).zip(c) {
                    *s = decay * *s + xd * f64::from(b);
                    y += *s * f64::from(c);
                }
                out.push(y);
            }
        }
    }

    fn delta(&mut self, token: &Token, out: &mut Vec<f64>) {
        let Shape { heads, rows, columns, groups, .. } = self.shape;
        let per_head = self.shape.gates() / heads;
        let scale = 1.0 / (columns as f64).sqrt();
        for head in 0..heads {
            let group = head / (heads / groups);
            let unit = |v: &[f32]| -> Vec<f64> {
                let v: Vec<f64> = v[group * columns..][..columns].iter().map(|&x| f64::from(x)).collect();
                let norm = (v.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
                v.into_iter().map(|x| x / norm).collect()
            };
            let (k, q) = (unit(&token.b), unit(&token.c));
            let decay: Vec<f64> = (head * per_head..(head + 1) * per_head)
                .map(|i| (-self.a[head].exp() * softplus(f64::from(token.gate[i]) + self.bias[i])).exp())
                .collect();
            let beta = sigmoid(f64::from(token.beta[head]));
            for row in 0..rows {
                let at = head * rows + row;
                let state = &mut self.state[at * columns..][..columns];
                let mut predicted = 0.0;
                for (i, (s, k)) in state.iter_mut().zip(&k).enumerate() {
                    *s *= decay[i % per_head];
                    predicted += *s * k;
                }
                let u = beta * (f64::from(token.x[at]) - predicted);
                let mut o = 0.0;
                for ((s, k), q) in state.iter_mut().zip(&k).zip(&q) {
                    *s += u * k;
                    o += *s * q;
                }
                out.push(scale * o);
            }
        }
    }
}

/// Relative L2 distance.
pub fn relative(got: impl Iterator<Item = f64>, truth: impl Iterator<Item = f64>) -> f64 {
    let (mut error, mut norm) = (0.0, 0.0);
    for (got, truth) in got.zip(truth) {
        error += (got - truth) * (got - truth);
        norm += truth * truth;
    }
    if error == 0.0 { 0.0 } else { (error / norm).sqrt() }
}
