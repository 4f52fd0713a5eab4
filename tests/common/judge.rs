//! What a slot's checkpoint and a step's outputs must be, from the checkpoint before and the tokens since: by bytes where the recurrence on
//! a fp32 pool gives them, within the bounds of KERNELS.md around fp64 elsewhere.

use super::oracle::{Oracle, limits};
use super::{Rig, Row, Spec, Token, decode};
use replayssm::ffi::*;
use replayssm::replay::numerics::{
    from_bf16, from_f16, rounding_words, to_bf16, to_bf16_stochastic, to_f16, to_f16_stochastic,
};

/// A checkpoint as it is stored.
#[derive(Clone)]
pub struct Stored {
    pub tag: usize,
    pub state: Vec<u32>,
}

pub struct Judge {
    /// One slot of a fp32 pool with the same parameters, for the recurrence from a given checkpoint.
    shadow: Rig,
    /// What is looked at.
    pub layer: usize,
    /// Of step outputs: ours, the recurrence's and fp64's.
    pub outputs: [Vec<f64>; 3],
    pub folds: usize,
}

/// Whether a format keeps every bit of a fp32 state.
pub fn is_lossless(spec: &Spec) -> bool {
    matches!(spec.format, REPLAYSSM_FORMAT_SPLIT32 | REPLAYSSM_FORMAT_F32)
}

/// Where a fold rounds the checkpoint and leaves history behind it, a delta rule's u records stay those from the checkpoint before:
/// off by that rounding, which is what the bound of HIGH allows, twice that if it is stochastic.
pub fn is_mixed(spec: &Spec) -> bool {
    spec.is_delta() && !is_lossless(spec) && spec.readout == REPLAYSSM_READOUT_FULL
}

impl Judge {
    /// Of the last layer of a rig of a spec.
    pub fn new(spec: &Spec) -> Self {
        let shadow = Spec {
            format: REPLAYSSM_FORMAT_F32,
            readout: REPLAYSSM_READOUT_EXACT,
            stochastic: false,
            u_dtype: 0,
            rings: 0,
            slots: 1,
            threads: 1,
            parts: 1,
            ..spec.clone()
        };
        Judge { shadow: Rig::new(shadow), layer: spec.layers - 1, outputs: Default::default(), folds: 0 }
    }

    pub fn stored(&self, rig: &Rig, slot: usize, ring: usize) -> Stored {
        let tags = rig.tags(self.layer, slot);
        assert!(tags.iter().all(|t| *t == tags[0]), "tiles stand apart: {tags:?}");
        let state = rig.export(self.layer, slot, ring, Some(tags[0]));
        Stored { tag: tags[0] as usize, state }
    }

    /// The recurrence from a checkpoint over the log up to `to`: outputs and state.
    pub fn recurrence(&self, from: &Stored, log: &[Vec<Token>], to: usize) -> (Vec<Vec<u32>>, Vec<u32>) {
        self.shadow.reset(0, 0, from.tag as i64);
        self.shadow.import(self.layer, 0, 0, None, &from.state);
        if to == from.tag {
            return (vec![], from.state.clone());
        }
        let outputs = self.shadow.extend(&[Row::new(0, &log[from.tag..to])], 0).remove(0);
        (outputs, self.shadow.export(self.layer, 0, 0, None))
    }

    /// A state as the format stores it at a position.
    pub fn rounded(&self, rig: &Rig, ring: usize, position: usize, state: &[u32]) -> Vec<u32> {
        let s = &rig.spec;
        let seed = rig.cursor(ring).seed;
        let round = |(i, &bits): (usize, &u32)| {
            let x = f32::from_bits(bits);
            let word = rounding_words(seed, position as i64, self.layer as u32, (i / 4) as u32)[i % 4];
            match (s.format, s.stochastic) {
                (REPLAYSSM_FORMAT_BF16, false) => from_bf16(to_bf16(x)).to_bits(),
                (REPLAYSSM_FORMAT_BF16, true) => from_bf16(to_bf16_stochastic(x, word)).to_bits(),
                (REPLAYSSM_FORMAT_F16, false) => from_f16(to_f16(x)).to_bits(),
                (REPLAYSSM_FORMAT_F16, true) => from_f16(to_f16_stochastic(x, word)).to_bits(),
                _ => bits,
            }
        };
        state.iter().enumerate().map(round).collect()
    }

    /// A state as the format stores it when it is imported: to nearest.
    pub fn imported(spec: &Spec, state: &[u32]) -> Vec<u32> {
        let round = |&bits: &u32| match spec.format {
            REPLAYSSM_FORMAT_BF16 => from_bf16(to_bf16(f32::from_bits(bits))).to_bits(),
            REPLAYSSM_FORMAT_F16 => from_f16(to_f16(f32::from_bits(bits))).to_bits(),
            _ => bits,
        };
        state.iter().map(round).collect()
    }

    /// The checkpoint of a request, after a check that it came from the one before by the recurrence.
    pub fn moved(&mut self, rig: &Rig, slot: usize, ring: usize, before: &Stored, log: &[Vec<Token>]) -> Stored {
        let now = self.stored(rig, slot, ring);
        if now.tag != before.tag {
            let (_, exact) = self.recurrence(before, log, now.tag);
            assert!(now.state == self.rounded(rig, ring, now.tag, &exact), "the checkpoint folded to {}", now.tag);
            self.folds += 1;
        }
        now
    }

    /// A step's outputs of a row whose checkpoint stands at `from`; the row's tokens are the last of the log.
    pub fn check_outputs(&mut self, rig: &Rig, from: &Stored, log: &[Vec<Token>], outputs: &[Vec<u32>]) {
        let s = rig.spec.clone();
        let (recurrence, _) = self.recurrence(from, log, log.len());
        let first = recurrence.len() - outputs.len();
        if s.readout == REPLAYSSM_READOUT_EXACT {
            assert!(outputs == &recurrence[first..], "EXACT outputs are not the recurrence's");
        }
        let params = &rig.params[self.layer];
        let mut oracle = Oracle::new(&s, params);
        let s0: Vec<f64> = from.state.iter().map(|&b| f32::from_bits(b).into()).collect();
        oracle.state.clone_from(&s0);
        let tokens: Vec<_> = log[from.tag..].iter().map(|t| t[self.layer].clone()).collect();
        let mut us = Vec::new();
        for (t, token) in tokens.iter().enumerate() {
            let (plain, gated) = oracle.token(token);
            us.push(oracle.u.clone());
            let Some(out) = t.checked_sub(first).map(|t| &outputs[t]) else { continue };
            let values = |bits: &[u32]| bits.iter().map(|&b| decode(s.out, b)).collect::<Vec<_>>();
            let got = values(out);
            let factor = match s.readout {
                REPLAYSSM_READOUT_HIGH => 1.0,
                _ if is_mixed(&s) && s.stochastic => 2.0,
                _ if is_mixed(&s) => 1.0,
                // fp32's 2^-24 for the 2^-14 that the bound has for the ring's terms, and 2^4 for sums.
                _ => 2f64.powi(-6),
            };
            let limits = limits(factor, &s, params, &s0, &tokens[..=t], &us, &gated);
            for (i, limit) in limits.into_iter().enumerate() {
                let error = (got[i] - gated[i]).abs();
                assert!(error <= limit, "output: {:.2} of the bound, plain {:.2e}", error / limit, plain[i]);
            }
            self.outputs[0].extend(got);
            self.outputs[1].extend(values(&recurrence[t]));
            self.outputs[2].extend(gated);
        }
    }
}
