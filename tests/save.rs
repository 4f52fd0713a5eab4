//! Slots saved to blobs and restored: in other slots, on other handles, in other processes.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use std::ptr::{null, null_mut};

use common::{Array, BatchData, FAMILIES, Outputs, Rig, Rng, Row, Spec, Token, encode, message, no_faults, ok, tensor};
use replayssm::ffi::*;

#[global_allocator]
static HEAP: common::device::Heap = common::device::Heap::ON_CUDA;

const CHANNELS: usize = 150;
const WIDTH: usize = 4;

/// Two pools of states and one of convolutions on one slots handle.
struct Model {
    rigs: Vec<Rig>,
    conv: *mut replayssm_layers,
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
struct Tokens {
    pools: Vec<Vec<Vec<Token>>>,
    conv: Vec<Vec<u32>>,
}

impl Model {
    fn new(spec: &Spec) -> Self {
        Self::on(common::device::backend(), spec)
    }

    fn on(backend: i32, spec: &Spec) -> Self {
        let first = Rig::on_backend(backend, spec.clone()).unwrap_or_else(|error| panic!("{error}"));
        let second = first.beside(Spec { layers: 1, headdim: 16, seed: spec.seed + 1, ..spec.clone() });
        let p = desc!(replayssm_pool_desc {
            family: REPLAYSSM_CONV1D,
            n_layers: 2,
            io: spec.io,
            channels: CHANNELS as i32,
            width: WIDTH as i32,
        });
        let mut conv = null_mut();
        // SAFETY: the descriptor and the out-parameter are locals.
        ok(unsafe { replayssm_layers_create(first.slots, &p, null(), 0, &mut conv) });
        let mut rng = Rng(5);
        let mut weight = Array::poisoned(REPLAYSSM_F32, CHANNELS * WIDTH);
        (0..CHANNELS * WIDTH).for_each(|i| weight.set(i, encode(REPLAYSSM_F32, rng.normal())));
        Model { rigs: vec![first, second], conv, io: spec.io, weight }
    }

    fn tokens(&self, rng: &mut Rng, n: usize) -> Tokens {
        Tokens {
            pools: self.rigs.iter().map(|rig| rig.tokens(rng, n)).collect(),
            conv: (0..n).map(|_| (0..CHANNELS).map(|_| encode(self.io, rng.normal())).collect()).collect(),
        }
    }

    /// A step (or extend) of one row in all layers, without its commit; outputs of all of them.
    fn step(&self, slot: usize, ring: usize, tokens: &Tokens, extend: bool) -> Vec<Outputs> {
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
            ok(unsafe { call(self.conv, layer, &batch.desc(), &args, null()) });
            all.push(vec![(0..n).map(|t| (0..CHANNELS).map(|c| x.get(t * CHANNELS + c)).collect()).collect()]);
        }
        all
    }

    fn commit(&self, slot: usize, ring: usize, tokens: &Tokens, accepted: i32) {
        let rows = [Row { ring: ring as i64, ..Row::new(slot, &tokens.pools[0]) }];
        self.rigs[0].commit(&rows, &[accepted]);
    }

    /// Steps of given lengths of which some tokens are accepted: all outputs.
    fn run(&self, slot: usize, ring: usize, steps: &[(Tokens, i32)]) -> Vec<Vec<Outputs>> {
        let mut all = Vec::new();
        for (tokens, accepted) in steps {
            all.push(self.step(slot, ring, tokens, false));
            self.commit(slot, ring, tokens, *accepted);
        }
        all
    }

    fn steps(&self, rng: &mut Rng, n: usize) -> Vec<(Tokens, i32)> {
        let t_max = self.rigs[0].spec.t_max;
        (0..n)
            .map(|_| {
                let t = 1 + rng.below(t_max);
                (self.tokens(rng, t), rng.below(t + 1) as i32)
            })
            .collect()
    }

    fn states(&self, slot: usize, ring: usize) -> Vec<Vec<u32>> {
        let of = |rig: &Rig| (0..rig.spec.layers).map(|layer| rig.export(layer, slot, ring, None)).collect::<Vec<_>>();
        self.rigs.iter().flat_map(of).collect()
    }
}

/// What a head of a blob says of its ring's generation.
fn without_generation(mut blob: Vec<u8>) -> Vec<u8> {
    blob[48..52].fill(0);
    let end = blob.len() - 4;
    blob[end..].fill(0);
    blob
}

fn specs() -> Vec<Spec> {
    let mut specs = Vec::new();
    for family in FAMILIES {
        for (format, readout) in [
            (REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_HIGH),
            (REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_EXACT),
            (REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_FULL),
            (REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_EXACT),
            (REPLAYSSM_FORMAT_BF16, REPLAYSSM_READOUT_HIGH),
            (REPLAYSSM_FORMAT_F16, REPLAYSSM_READOUT_EXACT),
        ] {
            let stochastic = matches!(format, REPLAYSSM_FORMAT_BF16 | REPLAYSSM_FORMAT_F16);
            specs.push(Spec {
                family,
                format,
                readout,
                stochastic,
                layers: 2,
                window: 7,
                t_max: 3,
                keep: 2,
                slots: 4,
                rings: 3,
                ..Spec::default()
            });
        }
    }
    specs
}

/// Steps after which rings are empty, hold one step, are in the middle of a window, full and about to flush, and wrapped.
const MOMENTS: [usize; 7] = [0, 1, 3, 5, 6, 9, 23];

#[test]
fn a_live_blob_goes_on_bit_for_bit() {
    for spec in specs() {
        let (from, to) = (Model::new(&spec), Model::new(&spec));
        for moment in MOMENTS {
            let mut rng = Rng(moment as u64 + 100);
            from.rigs[0].reset(1, 2, 0);
            from.run(1, 2, &from.steps(&mut rng, moment));
            let blob = from.rigs[0].save(REPLAYSSM_SAVE_LIVE, 1, 2);
            let generation = to.rigs[0].cursor(0).generation;
            assert_eq!(to.rigs[0].restore(3, 0, &blob), REPLAYSSM_OK, "{}", message());
            assert_eq!(to.rigs[0].cursor(0).generation, generation + 1);
            assert!(without_generation(to.rigs[0].save(REPLAYSSM_SAVE_LIVE, 3, 0)) == without_generation(blob.clone()));
            // A step that is not committed, of other tokens, is not in a blob; folds that were due may have happened.
            let lost = from.tokens(&mut rng, 3);
            from.step(1, 2, &lost, false);
            to.step(3, 0, &lost, false);
            let between = from.rigs[0].save(REPLAYSSM_SAVE_LIVE, 1, 2);
            assert_eq!(to.rigs[0].restore(2, 1, &between), REPLAYSSM_OK, "{}", message());
            let next = from.steps(&mut rng, 12);
            let wanted = from.run(1, 2, &next);
            assert!(to.run(3, 0, &next) == wanted, "{spec:?}, after {moment} steps");
            assert!(to.run(2, 1, &next) == wanted, "{spec:?}, after {moment} steps and one without its commit");
            assert!(to.states(3, 0) == from.states(1, 2));
            let end = from.rigs[0].save(REPLAYSSM_SAVE_LIVE, 1, 2);
            assert!(without_generation(to.rigs[0].save(REPLAYSSM_SAVE_LIVE, 3, 0)) == without_generation(end));
        }
        no_faults(&from.rigs[0]);
        no_faults(&to.rigs[0]);
    }
}
