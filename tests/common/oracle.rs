//! The recurrences in fp64, written from the formulas alone: nothing of the library is used.

use super::{Params, Skip, Spec, Token, decode};
use replayssm::ffi::{
    REPLAYSSM_DTYPE_BF16, REPLAYSSM_DTYPE_F16, REPLAYSSM_DTYPE_F32, REPLAYSSM_GATE_LOG_DECAY,
    REPLAYSSM_GATE_LOWER_BOUND,
};

pub struct Oracle {
    spec: Spec,
    params: Params,
    /// `[H][D][N]`.
    pub state: Vec<f64>,
    /// Of a delta rule's last token, `[HV][V]`.
    pub u: Vec<f64>,
}

impl Oracle {
    pub fn new(spec: &Spec, params: &Params) -> Self {
        Oracle {
            spec: spec.clone(),
            params: params.clone(),
            state: vec![0.0; spec.heads * spec.headdim * spec.dstate],
            u: vec![0.0; spec.heads * spec.headdim],
        }
    }

    /// Takes one token and returns its output `[H][D]` before and after the gate.
    pub fn token(&mut self, token: &Token) -> (Vec<f64>, Vec<f64>) {
        let s = &self.spec;
        if s.is_delta() {
            let o = self.delta(token);
            return (o.clone(), o);
        }
        let (mut plain, mut gated) = (Vec::new(), Vec::new());
        for h in 0..s.heads {
            let group = h / (s.heads / s.groups);
            let mut dt = decode(s.dt_dtype, token.dt[h]);
            if s.bias {
                dt += self.params.bias.value(h);
            }
            if s.softplus && dt <= 20.0 {
                dt = dt.exp().ln_1p();
            }
            let decay = (self.params.a.value(2 * h) * dt).exp();
            for i in 0..s.headdim {
                let x = decode(s.io, token.x[h * s.headdim + i]);
                let mut y = 0.0;
                for n in 0..s.dstate {
                    let b = decode(s.io, token.b[group * s.dstate + n]);
                    let c = decode(s.io, token.c[group * s.dstate + n]);
                    let state = &mut self.state[(h * s.headdim + i) * s.dstate + n];
                    *state = decay * *state + dt * x * b;
                    y += *state * c;
                }
                y += x * match s.skip {
                    Skip::None => 0.0,
                    Skip::PerHead => self.params.d.value(h * s.headdim),
                    Skip::PerElement => self.params.d.value(h * s.headdim + i),
                };
                plain.push(y);
                let z = decode(s.io, token.z[h * s.headdim + i]);
                gated.push(if s.gate { y * z / (1.0 + (-z).exp()) } else { y });
            }
        }
        (plain, gated)
    }
}

impl Oracle {
    /// Log decays of a delta rule's token, `[HV]` or `[HV][K]`.
    pub fn log_decays(s: &Spec, params: &Params, token: &Token) -> Vec<f64> {
        let gates = s.gates() / s.heads;
        (0..s.gates())
            .map(|i| {
                let raw = decode(s.dt_dtype, token.dt[i]);
                if s.gate_kind == REPLAYSSM_GATE_LOG_DECAY {
                    return raw;
                }
                let rate = params.a.value(2 * (i / gates)).exp();
                let a = raw + if s.bias { params.bias.value(i) } else { 0.0 };
                if s.gate_kind == REPLAYSSM_GATE_LOWER_BOUND {
                    f64::from(super::LOWER_BOUND) / (1.0 + (-rate * a).exp())
                } else {
                    -rate * if a > 20.0 { a } else { a.exp().ln_1p() }
                }
            })
            .collect()
    }

    /// A key or query head, normalised if the model does.
    pub fn key(s: &Spec, bits: &[u32], head: usize) -> Vec<f64> {
        let k: Vec<f64> = bits[head * s.dstate..][..s.dstate].iter().map(|&b| decode(s.io, b)).collect();
        let norm = if s.l2norm { (k.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt() } else { 1.0 };
        k.into_iter().map(|x| x / norm).collect()
    }

    pub fn beta(s: &Spec, token: &Token, head: usize) -> f64 {
        let b = decode(REPLAYSSM_DTYPE_F32, token.beta[head]);
        if s.beta_processed { b } else { 1.0 / (1.0 + (-b).exp()) }
    }

    pub fn scale(s: &Spec) -> f64 {
        if s.scale == 0.0 { 1.0 / (s.dstate as f64).sqrt() } else { s.scale.into() }
    }

    fn delta(&mut self, token: &Token) -> Vec<f64> {
        let s = &self.spec;
        let g = Self::log_decays(s, &self.params, token);
        let gates = s.gates() / s.heads;
        let mut out = Vec::new();
        for h in 0..s.heads {
            let (k, q) = (Self::key(s, &token.b, s.group(h)), Self::key(s, &token.c, s.group(h)));
            let beta = Self::beta(s, token, h);
            for i in 0..s.headdim {
                let row = &mut self.state[(h * s.headdim + i) * s.dstate..][..s.dstate];
                let mut predicted = 0.0;
                for (n, state) in row.iter_mut().enumerate() {
                    *state *= g[h * gates + n % gates].exp();
                    predicted += *state * k[n];
                }
                let u = beta * (decode(s.io, token.x[h * s.headdim + i]) - predicted);
                self.u[h * s.headdim + i] = u;
                let mut o = 0.0;
                for (n, state) in row.iter_mut().enumerate() {
                    *state += u * k[n];
                    o += *state * q[n];
                }
                out.push(o * Self::scale(s));
            }
        }
        out
    }
}

/// Relative L2 distance.
pub fn relative(got: &[f64], truth: &[f64]) -> f64 {
    let (mut error, mut norm) = (0.0, 0.0);
    for (g, t) in got.iter().zip(truth) {
        error += (g - t) * (g - t);
        norm += t * t;
    }
    (error / norm).sqrt()
}

/// The HIGH bound of a delta rule's last token.
pub fn delta_bound(spec: &Spec, s0: &[f64], tokens: &[Token], us: &[Vec<f64>]) -> Vec<f64> {
    let length = |v: &[f64]| v.iter().map(|x| x * x).sum::<f64>().sqrt();
    let last = tokens.last().unwrap();
    (0..spec.heads)
        .flat_map(|h| {
            let size = spec.headdim * spec.dstate;
            let window: f64 = tokens
                .iter()
                .zip(us)
                .map(|(t, u)| {
                    length(&u[h * spec.headdim..][..spec.headdim]) * length(&Oracle::key(spec, &t.b, spec.group(h)))
                })
                .sum();
            let q = length(&Oracle::key(spec, &last.c, spec.group(h)));
            let bound = 2f64.powi(-8) * Oracle::scale(spec).abs() * q * (length(&s0[h * size..][..size]) + window);
            vec![bound + 1e-30; spec.headdim]
        })
        .collect()
}

/// Rounding an output, with a few fp32 roundings before it.
pub fn unit(out: i32) -> f64 {
    match out {
        REPLAYSSM_DTYPE_BF16 => 2f64.powi(-8),
        REPLAYSSM_DTYPE_F16 => 2f64.powi(-10),
        _ => 2f64.powi(-20),
    }
}

/// The same for the smallest values.
fn tiny(out: i32) -> f64 {
    if out == REPLAYSSM_DTYPE_F16 { 2f64.powi(-24) } else { 0.0 }
}

/// `factor` times the HIGH bound of the last token of `tokens`, which start at the checkpoint `s0`, as its outputs are stored: behind the
/// gate, with the gate's and the output's rounding. `gated` is that token's output in fp64, `us` are the tokens' u's.
pub fn limits(
    factor: f64,
    spec: &Spec,
    params: &Params,
    s0: &[f64],
    tokens: &[Token],
    us: &[Vec<f64>],
    gated: &[f64],
) -> Vec<f64> {
    let bounds = if spec.is_delta() { delta_bound(spec, s0, tokens, us) } else { bound(spec, params, s0, tokens) };
    let last = tokens.last().unwrap();
    let slope = |i: usize| {
        let z = decode(spec.io, last.z[i]);
        if spec.gate { (z / (1.0 + (-z).exp())).abs() } else { 1.0 }
    };
    let limit = |(i, bound): (usize, f64)| {
        let slope = if spec.is_delta() { 1.0 } else { slope(i) };
        factor * bound * slope + unit(spec.out) * gated[i].abs() + tiny(spec.out)
    };
    bounds.into_iter().enumerate().map(limit).collect()
}

/// The HIGH bound of the last token of `tokens`, which start at the checkpoint `s0`.
pub fn bound(spec: &Spec, params: &Params, s0: &[f64], tokens: &[Token]) -> Vec<f64> {
    let last = tokens.last().unwrap();
    let mut bound = Vec::new();
    for h in 0..spec.heads {
        let group = h / (spec.heads / spec.groups);
        let vector = |v: &[u32], i: usize| decode(spec.io, v[group * spec.dstate + i]).abs();
        let dt = |t: &Token| {
            let dt = decode(spec.dt_dtype, t.dt[h]) + if spec.bias { params.bias.value(h) } else { 0.0 };
            if spec.softplus && dt <= 20.0 { dt.exp().ln_1p() } else { dt }
        };
        let a = params.a.value(2 * h);
        // Decay from each token to the last, and from the checkpoint.
        let mut since = 0f64;
        let mut weights = vec![0f64; tokens.len()];
        for (j, token) in tokens.iter().enumerate().rev() {
            let product: f64 = (0..spec.dstate).map(|i| vector(&token.b, i) * vector(&last.c, i)).sum();
            weights[j] = dt(token) * since.exp() * product;
            since += a * dt(token);
        }
        for i in 0..spec.headdim {
            let x = |t: &Token| decode(spec.io, t.x[h * spec.headdim + i]).abs();
            let row = &s0[(h * spec.headdim + i) * spec.dstate..][..spec.dstate];
            let checkpoint: f64 = row.iter().enumerate().map(|(n, s)| s.abs() * vector(&last.c, n)).sum();
            let ring: f64 = weights.iter().zip(tokens).map(|(w, t)| w * x(t)).sum();
            let skip = match spec.skip {
                Skip::None => 0.0,
                Skip::PerHead => params.d.value(h * spec.headdim).abs() * x(last),
                Skip::PerElement => params.d.value(h * spec.headdim + i).abs() * x(last),
            };
            bound.push(2f64.powi(-8) * since.exp() * checkpoint + 2f64.powi(-14) * (ring + skip) + 1e-30);
        }
    }
    bound
}
