//! Cases that broke other implementations, of the delta rules alone and of models that mix families. Each test names its kind of
//! fault; those that every family shares are in cases.rs.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use std::ptr::{null, null_mut};

use common::oracle::{Oracle, relative};
use common::{
    ABSENT, Array, BatchData, Rig, Rng, Row, Spec, Token, assert_same_state, decode, decode_one, encode, heap, ids64,
    no_faults, ok, tensor,
};
use replayssm::ffi::*;

#[global_allocator]
static HEAP: common::device::Heap = common::device::Heap::ON_CUDA;

const DELTA_RULES: [i32; 2] = [REPLAYSSM_FAMILY_GDN, REPLAYSSM_FAMILY_KDA];

fn state_of(rig: &Rig, slot: usize) -> Vec<f64> {
    rig.export(0, slot, slot, None).into_iter().map(|b| f32::from_bits(b).into()).collect()
}

fn values(rig: &Rig, out: &[u32]) -> Vec<f64> {
    out.iter().map(|&b| decode(rig.spec.out, b)).collect()
}

/// A convolution of 10 channels, 4 wide, on a rig's slots.
struct Conv<'a> {
    rig: &'a Rig,
    pool: *mut replayssm_layers,
    weight: Array,
}

impl Drop for Conv<'_> {
    fn drop(&mut self) {
        replayssm_layers_destroy(self.pool);
    }
}

impl<'a> Conv<'a> {
    fn beside(rig: &'a Rig) -> Self {
        let desc = desc!(replayssm_pool_desc {
            family: REPLAYSSM_FAMILY_CONV1D,
            n_layers: 1,
            io: REPLAYSSM_DTYPE_F32,
            channels: 10,
            width: 4,
        });
        let mut pool = null_mut();
        // SAFETY: the descriptor and the out-parameter are locals.
        ok(unsafe { replayssm_layers_create(rig.slots, &desc, null(), 0, &mut pool) });
        let mut weight = Array::poisoned(REPLAYSSM_DTYPE_F32, 40);
        let mut rng = Rng(7);
        (0..40).for_each(|i| weight.set(i, encode(REPLAYSSM_DTYPE_F32, rng.normal())));
        Conv { rig, pool, weight }
    }

    fn call(&self, row: &Row, x: &[f64], extend: bool) -> Vec<u32> {
        let mut input = Array::poisoned(REPLAYSSM_DTYPE_F32, x.len());
        x.iter().enumerate().for_each(|(i, &x)| input.set(i, encode(REPLAYSSM_DTYPE_F32, x)));
        let out = Array::poisoned(REPLAYSSM_DTYPE_F32, x.len());
        let args = desc!(replayssm_conv1d_args {
            x: tensor(&input, 0, x.len(), 10, 0),
            out: tensor(&out, 0, x.len(), 10, 0),
            weight: tensor(&self.weight, 0, 0, 0, 4),
            bias: ABSENT,
        });
        let data = BatchData::new(self.rig, std::slice::from_ref(row), extend, 0);
        let batch = data.desc();
        // SAFETY: everything lives until the call returns.
        ok(unsafe {
            match extend {
                true => replayssm_conv1d_extend(self.pool, 0, &batch, &args, null()),
                false => replayssm_conv1d_step(self.pool, 0, &batch, &args, null()),
            }
        });
        (0..x.len()).map(|i| out.get(i)).collect()
    }

    fn window(&self, slot: usize) -> Vec<u32> {
        let mut window = heap([0x7FC0_1234u32; 30]);
        let id = [slot as i64];
        let list = desc!(replayssm_list { n: 1, place: REPLAYSSM_WHERE_HOST, slots: ids64(&id), rings: ids64(&id) });
        let dst = desc!(replayssm_state { dtype: REPLAYSSM_DTYPE_F32, data: window.as_mut_ptr().cast() });
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_export(self.pool, &list, null(), &dst, null()) });
        window
    }
}

#[test]
fn case_8_four_families_on_one_slots_handle_advance_once() {
    let mamba = Rig::new(Spec { layers: 2, t_max: 3, window: 5, ..Spec::default() });
    let spec = |family, heads| Spec { family, heads, headdim: 17, dstate: 24, layers: 2, seed: 5, ..Spec::default() };
    let gdn = mamba.beside(spec(REPLAYSSM_FAMILY_GDN, 4));
    let kda = mamba.beside(spec(REPLAYSSM_FAMILY_KDA, 2));
    let rigs = [&mamba, &gdn, &kda];
    let conv = Conv::beside(&mamba);
    let mut rng = Rng(9);
    let mut position = 0;
    for round in 0..60 {
        let rows = |rng: &mut Rng, n| rigs.map(|rig| [Row::new(0, &rig.tokens(rng, n))]);
        let inputs = |rng: &mut Rng, n: usize| (0..10 * n).map(|_| rng.normal()).collect::<Vec<f64>>();
        // A step that dies after the first layer of the first family, or of the second.
        let aborted = rows(&mut rng, 3);
        mamba.layer(0, &aborted[0], false, 0);
        if round % 2 == 0 {
            mamba.layer(1, &aborted[0], false, 0);
            gdn.layer(0, &aborted[1], false, 0);
            conv.call(&aborted[0][0], &inputs(&mut rng, 3), false);
        }
        // A whole one that is never committed.
        if round % 5 == 0 {
            let never = rows(&mut rng, 1);
            rigs.iter().zip(&never).for_each(|(rig, row)| drop(rig.step(row)));
        }
        let n = 1 + round % 3;
        let (step, x) = (rows(&mut rng, n), inputs(&mut rng, n));
        let mut outputs: Vec<_> = rigs.iter().zip(&step).map(|(rig, row)| rig.step(row)).collect();
        conv.call(&step[0][0], &x, false);
        let convolved = conv.call(&step[0][0], &x, false);
        // Layers run twice write the same.
        kda.layer(0, &step[2], false, 0);
        outputs[1] = gdn.step(&step[1]);
        assert_eq!(mamba.cursor(0).position, position, "a layer call moved the position");
        let accepted = rng.below(n + 1);
        mamba.commit(&step[0], &[accepted as i32]);
        position += accepted as i64;
        assert_eq!(mamba.cursor(0).position, position);
        if accepted > 0 {
            for ((rig, step), outputs) in rigs.iter().zip(&step).zip(&outputs) {
                let twin = [Row::new(1, &step[0].tokens[..accepted])];
                rig.layer(0, &twin, true, 0);
                let truth = rig.layer(1, &twin, true, 0);
                assert_eq!(outputs[0][..accepted], truth[0][..]);
            }
            let twin = [Row::new(1, &step[0][0].tokens[..accepted])];
            assert_eq!(convolved[..10 * accepted], conv.call(&twin[0], &x[..10 * accepted], true));
            mamba.commit_batch(&twin, true, 0, None);
        }
        rigs.iter().for_each(|rig| assert_same_state(rig, 0, 1));
        assert!(conv.window(0) == conv.window(1), "windows differ");
    }
    assert!(position > 30);
    no_faults(&mamba);
}

#[test]
fn case_17_head_maps_and_one_record_per_key_head() {
    for family in DELTA_RULES {
        for readout in [REPLAYSSM_READOUT_EXACT, REPLAYSSM_READOUT_FULL] {
            let spec = Spec { family, readout, heads: 6, groups: 2, ..Spec::default() };
            for head_map in [REPLAYSSM_HEAD_MAP_GROUPED, REPLAYSSM_HEAD_MAP_TILED] {
                let rig = Rig::new(Spec { head_map, ..spec.clone() });
                let s = &rig.spec;
                let other = REPLAYSSM_HEAD_MAP_TILED - head_map;
                let mut oracle = Oracle::new(s, &rig.params[0]);
                let mut wrong = Oracle::new(&Spec { head_map: other, ..s.clone() }, &rig.params[0]);
                let mut rng = Rng(40);
                let (mut got, mut truth, mut not) = (vec![], vec![], vec![]);
                for token in rig.tokens(&mut rng, 40) {
                    got.extend(values(&rig, &decode_one(&rig, 0, &token)));
                    truth.extend(oracle.token(&token[0]).0);
                    not.extend(wrong.token(&token[0]).0);
                }
                // As extend_is_the_delta_rule, and twice that for FULL; the other map is another model.
                assert!(relative(&got, &truth) < 1e-5, "outputs, head map {head_map}");
                assert!(relative(&state_of(&rig, 0), &oracle.state) < 5e-6, "state, head map {head_map}");
                assert!(relative(&not, &truth) > 0.1);

                // A k ring has H heads, and each record is written once, by steps and by the tail of an extend.
                let (k, rows) = (2 * 40, 16 + 4);
                assert_eq!(rig.part(REPLAYSSM_COMPONENT_K, 0, 0).len(), 2 * rows * k);
                assert_eq!(rig.part(REPLAYSSM_COMPONENT_KNORM, 0, 0).len(), 2 * rows * 4);
                let u = if readout == REPLAYSSM_READOUT_EXACT { 0 } else { 20 * 4 };
                let record = 2 * (k + 4) + 6 * (20 * 2 + s.gates() / 6 * 4 + 4 + u);
                let written = |call: &dyn Fn()| {
                    let before = rig.stats().ring_bytes_written;
                    call();
                    (rig.stats().ring_bytes_written - before) as usize
                };
                let tokens = rig.tokens(&mut rng, 3);
                rig.reset(1, 1, 0);
                assert_eq!(written(&|| drop(rig.step(&[Row::new(1, &tokens)]))), 3 * record, "a step");
                let by_step = rig.part(REPLAYSSM_COMPONENT_K, 0, 1);
                rig.reset(2, 2, 0);
                assert_eq!(written(&|| drop(rig.extend(&[Row::new(2, &tokens)], 3))), 3 * record, "an extend");
                for (bytes, name) in [(by_step, "step"), (rig.part(REPLAYSSM_COMPONENT_K, 0, 2), "extend")] {
                    for (i, pair) in bytes.as_chunks::<2>().0.iter().enumerate() {
                        let (head, row, column) = (i / (rows * 40), i / 40 % rows, i % 40);
                        let wanted = tokens.get(row).map_or(0xFFFF, |token| token[0].b[head * 40 + column]);
                        assert_eq!(u32::from(u16::from_le_bytes(*pair)), wanted, "{name}: head {head}, row {row}");
                    }
                }
                no_faults(&rig);
            }
        }
    }
}

#[test]
fn case_23_a_long_run_near_beta_1_and_g_0_is_the_plain_kernels() {
    for family in DELTA_RULES {
        for (format, readout) in [
            (REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_EXACT),
            (REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_FULL),
            (REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_HIGH),
        ] {
            let spec = Spec {
                family,
                format,
                readout,
                heads: 2,
                groups: 1,
                headdim: 20,
                dstate: 32,
                gate_kind: REPLAYSSM_GATE_LOG_DECAY,
                bias: false,
                beta_processed: true,
                ..Spec::default()
            };
            let rig = Rig::new(spec);
            let mut oracle = Oracle::new(&rig.spec, &rig.params[0]);
            let mut rng = Rng(41);
            let mut committed = 0;
            for step in 0..2000 {
                let mut tokens = rig.tokens(&mut rng, 4);
                for token in tokens.iter_mut().flatten() {
                    token.beta.iter_mut().for_each(|b| *b = encode(REPLAYSSM_DTYPE_F32, 1.0 - 1e-3 * rng.unit()));
                    token.dt.iter_mut().for_each(|g| *g = encode(REPLAYSSM_DTYPE_F32, -1e-5 * rng.unit()));
                }
                let row = Row::new(0, &tokens);
                rig.step(std::slice::from_ref(&row));
                let accepted = rng.below(5);
                rig.commit(&[row], &[accepted as i32]);
                committed += accepted;
                if accepted > 0 {
                    rig.extend(&[Row::new(1, &tokens[..accepted])], 0);
                    tokens[..accepted].iter().for_each(|token| drop(oracle.token(&token[0])));
                }
                if step % 100 == 99 {
                    assert_same_state(&rig, 0, 1);
                    let errors = [0, 1].map(|slot| relative(&state_of(&rig, slot), &oracle.state));
                    assert!(errors[0] <= errors[1], "after {committed} tokens: {errors:?}");
                    // fp32 grade: the same as for extend, though nothing decays.
                    assert!(errors[1] < 5e-6, "after {committed} tokens: {errors:?}");
                }
            }
            assert!(committed > 3500);
            no_faults(&rig);
        }
    }
}

/// 4096 tokens through the ring, one a step, against fp64 and against fp64 with one thing changed: the library is near the first, and
/// the second shows how far away it would be.
fn against(spec: &Spec, other: &Spec, fill: impl Fn(&mut Token), change: impl Fn(&mut Token)) {
    let rig = Rig::new(spec.clone());
    let mut truth = Oracle::new(spec, &rig.params[0]);
    let mut changed = Oracle::new(other, &rig.params[0]);
    let mut rng = Rng(42);
    for _ in 0..4096 {
        let mut token = rig.token(&mut rng);
        fill(&mut token[0]);
        decode_one(&rig, 0, &token);
        truth.token(&token[0]);
        change(&mut token[0]);
        changed.token(&token[0]);
    }
    let error = relative(&state_of(&rig, 0), &truth.state);
    let visible = relative(&changed.state, &truth.state);
    println!("{}: error {error:.2e}, rounded to bf16 {visible:.2e}", spec.family);
    assert!(error < 1e-5, "{error:.2e}");
    assert!(visible > 3e-5, "rounding would hide below the limit: {visible:.2e}");
    no_faults(&rig);
}

fn rounded(value: f64) -> f64 {
    decode(REPLAYSSM_DTYPE_BF16, encode(REPLAYSSM_DTYPE_BF16, value))
}

#[test]
fn case_24_neither_beta_nor_g_is_rounded_to_16_bits() {
    for family in DELTA_RULES {
        let spec = Spec { family, heads: 2, groups: 1, headdim: 20, dstate: 32, t_max: 1, ..Spec::default() };
        // beta = sigmoid(2.3), neither of which is a bf16.
        let beta = 1.0 / (1.0 + (-2.3f64).exp());
        assert!(rounded(2.3) != 2.3 && rounded(beta) != beta);
        let processed = Spec { beta_processed: true, ..spec.clone() };
        against(
            &spec,
            &processed,
            |token| token.beta.fill(encode(REPLAYSSM_DTYPE_F32, 2.3)),
            |token| token.beta.fill(encode(REPLAYSSM_DTYPE_F32, rounded(beta))),
        );
        against(
            &spec,
            &spec,
            |token| token.beta.fill(encode(REPLAYSSM_DTYPE_F32, 2.3)),
            |token| token.beta.fill(encode(REPLAYSSM_DTYPE_F32, rounded(2.3))),
        );
        // g = -1e-4, with a small beta, so that the state remembers its sum over many tokens.
        let spec = Spec { gate_kind: REPLAYSSM_GATE_LOG_DECAY, bias: false, ..processed };
        let fill = |token: &mut Token| {
            token.beta.fill(encode(REPLAYSSM_DTYPE_F32, 0.01));
            token.dt.fill(encode(REPLAYSSM_DTYPE_F32, -1e-4));
        };
        against(&spec, &spec, fill, |token| token.dt.fill(encode(REPLAYSSM_DTYPE_F32, rounded(-1e-4))));
    }
}
