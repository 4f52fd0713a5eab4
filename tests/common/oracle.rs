//! The Mamba-2 recurrence in fp64, written from the formulas alone: nothing of the library is used.

use super::{Params, Skip, Spec, Token, decode};
use replayssm::ffi::{REPLAYSSM_BF16, REPLAYSSM_F32};

pub struct Oracle {
    spec: Spec,
    params: Params,
    /// `[H][D][N]`.
    pub state: Vec<f64>,
}

impl Oracle {
    pub fn new(spec: &Spec, params: &Params) -> Self {
        Oracle { spec: spec.clone(), params: params.clone(), state: vec![0.0; spec.heads * spec.headdim * spec.dstate] }
    }

    /// Takes one token and returns its output `[H][D]` before and after the gate.
    pub fn token(&mut self, token: &Token) -> (Vec<f64>, Vec<f64>) {
        let s = &self.spec;
        let (mut plain, mut gated) = (Vec::new(), Vec::new());
        for h in 0..s.heads {
            let group = h / (s.heads / s.groups);
            let mut dt = decode(s.dt_dtype, token.dt[h]);
            if s.bias {
                dt += decode(REPLAYSSM_BF16, self.params.bias.get(h));
            }
            if s.softplus && dt <= 20.0 {
                dt = dt.exp().ln_1p();
            }
            let decay = (decode(REPLAYSSM_F32, self.params.a.get(2 * h)) * dt).exp();
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
                    Skip::PerHead => decode(REPLAYSSM_F32, self.params.d.get(h * s.headdim)),
                    Skip::PerElement => decode(REPLAYSSM_F32, self.params.d.get(h * s.headdim + i)),
                };
                plain.push(y);
                let z = decode(s.io, token.z[h * s.headdim + i]);
                gated.push(if s.gate { y * z / (1.0 + (-z).exp()) } else { y });
            }
        }
        (plain, gated)
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
