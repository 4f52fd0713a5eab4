//! Several pools of states and one of convolutions on one slots handle, driven a row at a time.

use std::ptr::{null, null_mut};

use replayssm::ffi::*;

use super::{Array, BatchData, Outputs, Rig, Rng, Row, Spec, Token, device, encode, ok, tensor};
use crate::desc;

const CHANNELS: usize = 150;
const WIDTH: usize = 4;

/// Two pools of states and one of convolutions on one slots handle.
pub struct Model {
    pub rigs: Vec<Rig>,
    pub conv: *mut replayssm_layers,
    io: i32,
    weight: Array,
}

impl Drop for Model {
    fn drop(&mut self) {
        replayssm_layers_destroy(self.conv);
    }
}

/// Tokens of all layers of all pools, and of the convolution.
#[derive(Clone)]
pub struct Tokens {
    pub pools: Vec<Vec<Vec<Token>>>,
    pub conv: Vec<Vec<u32>>,
}

impl Model {
    pub fn new(spec: &Spec) -> Self {
        Self::on(device::backend(), spec)
    }

    pub fn on(backend: i32, spec: &Spec) -> Self {
        let first = Rig::on_backend(backend, spec.clone()).unwrap_or_else(|error| panic!("{error}"));
        let second = first.beside(Self::second(spec));
        Self::of(vec![first, second])
    }

    /// What the second pool is.
    pub fn second(spec: &Spec) -> Spec {
        Spec { layers: 1, headdim: 16, seed: spec.seed + 1, ..spec.clone() }
    }

    /// The same layers as those of [`Model::new`], two pools of them split in three: the first, those of the second, the rest.
    pub fn split(spec: &Spec) -> Self {
        let whole = Model::new(spec);
        let first = Rig::new(Spec { layers: 1, ..spec.clone() });
        let second = first.beside(Self::second(spec));
        let mut rest = first.beside(Spec { layers: spec.layers - 1, ..spec.clone() });
        rest.params = whole.rigs[0].params[1..].to_vec();
        Self::of(vec![first, second, rest])
    }

    /// Tokens of a model, for one that is split.
    pub fn split_tokens(tokens: &Tokens) -> Tokens {
        let of = |range: fn(&[Token]) -> &[Token]| tokens.pools[0].iter().map(|token| range(token).to_vec()).collect();
        Tokens { pools: vec![of(|t| &t[..1]), tokens.pools[1].clone(), of(|t| &t[1..])], conv: tokens.conv.clone() }
    }

    /// Pools on one slots handle, and one of convolutions beside them.
    pub fn of(rigs: Vec<Rig>) -> Self {
        let (spec, first) = (&rigs[0].spec, &rigs[0]);
        let p = desc!(replayssm_pool_desc {
            family: REPLAYSSM_FAMILY_CONV1D,
            n_layers: 2,
            io: spec.io,
            channels: CHANNELS as i32,
            width: WIDTH as i32,
        });
        let mut conv = null_mut();
        // SAFETY: the descriptor and the out-parameter are locals.
        ok(unsafe { replayssm_layers_create(first.slots, &p, null(), 0, &mut conv) });
        let mut rng = Rng(5);
        let mut weight = Array::poisoned(REPLAYSSM_DTYPE_F32, CHANNELS * WIDTH);
        (0..CHANNELS * WIDTH).for_each(|i| weight.set(i, encode(REPLAYSSM_DTYPE_F32, rng.normal())));
        let io = spec.io;
        Model { rigs, conv, io, weight }
    }

    pub fn tokens(&self, rng: &mut Rng, n: usize) -> Tokens {
        Tokens {
            pools: self.rigs.iter().map(|rig| rig.tokens(rng, n)).collect(),
            conv: (0..n).map(|_| (0..CHANNELS).map(|_| encode(self.io, rng.normal())).collect()).collect(),
        }
    }

    /// A step (or extend) of one row in all layers, without its commit; outputs of all of them.
    pub fn step(&self, slot: usize, ring: usize, tokens: &Tokens, extend: bool) -> Vec<Outputs> {
        let row = |pool: &[Vec<Token>]| [Row { ring: ring as i64, ..Row::new(slot, pool) }];
        let mut all = Vec::new();
        for (rig, tokens) in self.rigs.iter().zip(&tokens.pools) {
            let rows = row(tokens);
            all.extend((0..rig.spec.layers).map(|layer| rig.layer(layer, &rows, extend, 0)));
        }
        let n = tokens.conv.len();
        let batch = BatchData::new(&self.rigs[0], &row(&tokens.pools[0]), extend, 0);
        for layer in 0..2 {
            let mut x = Array::poisoned(self.io, n * CHANNELS);
            for (i, &bits) in tokens.conv.iter().flatten().enumerate() {
                x.set(i, bits);
            }
            let view = tensor(&x, 0, n * CHANNELS, CHANNELS, CHANNELS);
            let args =
                desc!(replayssm_conv1d_args { x: view, out: view, weight: tensor(&self.weight, 0, 0, 0, WIDTH) });
            let call = if extend { replayssm_conv1d_extend } else { replayssm_conv1d_step };
            // SAFETY: everything lives until the call returns.
            ok(unsafe { call(self.conv, layer, &batch.desc(), &args, &Rig::exec()) });
            all.push(vec![(0..n).map(|t| (0..CHANNELS).map(|c| x.get(t * CHANNELS + c)).collect()).collect()]);
        }
        all
    }

    pub fn commit(&self, slot: usize, ring: usize, tokens: &Tokens, accepted: i32) {
        let rows = [Row { ring: ring as i64, ..Row::new(slot, &tokens.pools[0]) }];
        self.rigs[0].commit(&rows, &[accepted]);
    }

    /// Steps of given lengths of which some tokens are accepted: all outputs.
    pub fn run(&self, slot: usize, ring: usize, steps: &[(Tokens, i32)]) -> Vec<Vec<Outputs>> {
        let mut all = Vec::new();
        for (tokens, accepted) in steps {
            all.push(self.step(slot, ring, tokens, false));
            self.commit(slot, ring, tokens, *accepted);
        }
        all
    }

    pub fn steps(&self, rng: &mut Rng, n: usize) -> Vec<(Tokens, i32)> {
        let t_max = self.rigs[0].spec.t_max;
        (0..n)
            .map(|_| {
                let t = 1 + rng.below(t_max);
                (self.tokens(rng, t), rng.below(t + 1) as i32)
            })
            .collect()
    }

    pub fn states(&self, slot: usize, ring: usize) -> Vec<Vec<u32>> {
        let of = |rig: &Rig| (0..rig.spec.layers).map(|layer| rig.export(layer, slot, ring, None)).collect::<Vec<_>>();
        self.rigs.iter().flat_map(of).collect()
    }
}
