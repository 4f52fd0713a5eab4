//! Equality by bytes: the exported state equals that of `extend` over the accepted tokens, and EXACT outputs equal its outputs, whatever the
//! window, the step sizes, the acceptance, the repeats and the aborts. `extend` itself is compared with fp64.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use common::oracle::{Oracle, relative};
use common::{Outputs, Rig, Rng, Row, Skip, Spec, decode, hash};
use replayssm::backend::cpu::isa::Isa;
use replayssm::ffi::*;

/// A request on slot `slot`, and a twin on slot `slot + 1` that takes the same accepted tokens by `extend`.
struct Pair<'a> {
    rig: &'a Rig,
    slot: usize,
    committed: usize,
}

impl Pair<'_> {
    /// Steps with repeats and aborts, then a commit of some tokens. Returns the outputs of the accepted ones.
    fn round(&mut self, rng: &mut Rng, exact: bool) {
        let mut row = Row::new(self.slot, &[]);
        row.flush = rng.below(13) == 0;
        match rng.below(6) {
            // A step that is never committed, of another length.
            0 => {
                row.tokens = self.fresh(rng);
                self.rig.step(std::slice::from_ref(&row));
            }
            // A step that dies between layers.
            1 => {
                row.tokens = self.fresh(rng);
                self.rig.layer(0, std::slice::from_ref(&row), false, 0);
            }
            _ => {}
        }
        row.tokens = self.fresh(rng);
        let mut outputs = self.rig.step(std::slice::from_ref(&row));
        if rng.below(4) == 0 {
            let again = self.rig.step(std::slice::from_ref(&row));
            if exact {
                assert_eq!(outputs, again, "a repeated step gives other outputs");
            }
            outputs = again;
        }
        let accepted = rng.below(row.tokens.len() + 1);
        self.rig.commit(std::slice::from_ref(&row), &[accepted as i32]);
        self.committed += accepted;
        if accepted > 0 {
            let truth = self.extend(&row.tokens[..accepted]);
            if exact {
                assert_eq!(outputs[0][..accepted], truth[0][..], "EXACT outputs differ from extend's");
            }
        }
    }

    /// A step's tokens: one to T_max.
    fn fresh(&self, rng: &mut Rng) -> Vec<Vec<common::Token>> {
        let n = 1 + rng.below(self.rig.spec.t_max);
        self.rig.tokens(rng, n)
    }

    fn extend(&self, tokens: &[Vec<common::Token>]) -> Outputs {
        self.rig.extend(&[Row::new(self.slot + 1, tokens)], 0)
    }

    fn compare(&self) {
        for layer in 0..self.rig.spec.layers {
            let got = self.rig.export(layer, self.slot, self.slot, None);
            let truth = self.rig.export(layer, self.slot + 1, self.slot + 1, None);
            assert!(got == truth, "layer {layer}: states differ after {} tokens", self.committed);
        }
        let faults = self.rig.faults(false);
        assert_eq!((faults.bits, faults.count), (0, 0));
        assert_eq!(self.rig.cursor(self.slot).position, self.committed as i64);
    }
}

fn run(spec: Spec, tokens: usize) {
    let exact = spec.readout == REPLAYSSM_READOUT_EXACT;
    let text = format!("{spec:?}");
    let rig = Rig::new(spec);
    let mut rng = Rng(hash(text.bytes().map(u32::from)));
    let mut pair = Pair { rig: &rig, slot: 2, committed: 0 };
    let mut rounds = 0;
    while pair.committed < tokens {
        pair.round(&mut rng, exact);
        rounds += 1;
        if rounds % 7 == 0 {
            pair.compare();
        }
    }
    pair.compare();
}

fn windows_and_steps() -> impl Iterator<Item = (usize, usize)> {
    [1, 4, 7, 16, 32].into_iter().flat_map(|w| (1..=8).filter(move |t| *t <= w).map(move |t| (w, t)))
}

fn grid(io: i32, format: i32) {
    for (window, t_max) in windows_and_steps() {
        for keep in [0, 5] {
            for readout in [REPLAYSSM_READOUT_EXACT, REPLAYSSM_READOUT_FULL] {
                let spec = Spec { io, format, readout, window, t_max, keep, layers: 2, ..Spec::default() };
                run(spec, 500);
            }
        }
    }
}

#[test]
fn bf16_split32_equals_extend_by_bytes() {
    grid(REPLAYSSM_BF16, REPLAYSSM_FORMAT_SPLIT32);
}

#[test]
fn bf16_f32_equals_extend_by_bytes() {
    grid(REPLAYSSM_BF16, REPLAYSSM_FORMAT_F32);
}

#[test]
fn f16_split32_equals_extend_by_bytes() {
    grid(REPLAYSSM_F16, REPLAYSSM_FORMAT_SPLIT32);
}

#[test]
fn f16_f32_equals_extend_by_bytes() {
    grid(REPLAYSSM_F16, REPLAYSSM_FORMAT_F32);
}

#[test]
fn f32_split32_equals_extend_by_bytes() {
    grid(REPLAYSSM_F32, REPLAYSSM_FORMAT_SPLIT32);
}

#[test]
fn f32_f32_equals_extend_by_bytes() {
    grid(REPLAYSSM_F32, REPLAYSSM_FORMAT_F32);
}

#[test]
fn high_readout_leaves_the_state_exact() {
    for schedule in [REPLAYSSM_SCHEDULE_STAGGERED, REPLAYSSM_SCHEDULE_BY_POSITION, REPLAYSSM_SCHEDULE_NONE] {
        for (window, t_max) in [(1, 1), (7, 3), (16, 8), (32, 5)] {
            let readout = REPLAYSSM_READOUT_HIGH;
            run(Spec { readout, window, t_max, keep: 3, schedule, ..Spec::default() }, 600);
        }
    }
}

#[test]
fn long_steps_equal_extend_by_bytes() {
    for (t_max, readout) in [
        (16, REPLAYSSM_READOUT_EXACT),
        (40, REPLAYSSM_READOUT_EXACT),
        (40, REPLAYSSM_READOUT_FULL),
        (256, REPLAYSSM_READOUT_EXACT),
    ] {
        run(Spec { t_max, readout, window: 256.min(2 * t_max), ..Spec::default() }, 1000);
    }
}

#[test]
fn options_and_real_shapes_equal_extend_by_bytes() {
    let base = Spec { layers: 1, t_max: 4, ..Spec::default() };
    for skip in [Skip::None, Skip::PerHead, Skip::PerElement] {
        for (softplus, bias, gate) in
            [(true, true, false), (false, false, true), (false, true, false), (true, false, true)]
        {
            for dt_dtype in [REPLAYSSM_F32, REPLAYSSM_BF16] {
                run(Spec { skip, softplus, bias, gate, dt_dtype, ..base.clone() }, 200);
            }
        }
    }
    for (headdim, dstate) in [(80, 128), (64, 128), (64, 64), (24, 96), (1, 1), (16, 256), (256, 16), (17, 33)] {
        run(Spec { headdim, dstate, out: REPLAYSSM_BF16, ..base.clone() }, 120);
    }
}

/// Everything that a run leaves behind, as one number.
fn fingerprint(spec: Spec) -> u64 {
    let rig = Rig::new(spec);
    let mut rng = Rng(77);
    let mut bits = Vec::new();
    for _ in 0..40 {
        let rows: Vec<Row> = (0..6)
            .map(|slot| {
                let n = rng.below(rig.spec.t_max + 1);
                Row::new(slot, &rig.tokens(&mut rng, n))
            })
            .collect();
        let exact = rig.spec.readout == REPLAYSSM_READOUT_EXACT;
        let outputs = rig.step(&rows);
        if exact {
            bits.extend(outputs.into_iter().flatten().flatten());
        }
        let counts: Vec<i32> = rows.iter().map(|r| rng.below(r.tokens.len() + 1) as i32).collect();
        rig.commit(&rows, &counts);
    }
    for slot in 0..6 {
        bits.extend(rig.export(0, slot, slot, None));
        let checkpoint = rig.part(REPLAYSSM_COMPONENT_CHECKPOINT, 0, slot);
        bits.extend(checkpoint.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)));
    }
    bits.extend(rig.extend(&[Row::new(6, &rig.tokens(&mut rng, 50))], 3).into_iter().flatten().flatten());
    bits.extend(rig.export(0, 6, 6, None));
    hash(bits)
}

#[test]
fn instruction_sets_threads_and_parts_give_one_hash() {
    for (io, format, readout) in [
        (REPLAYSSM_BF16, REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_EXACT),
        (REPLAYSSM_F16, REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_EXACT),
        (REPLAYSSM_F32, REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_FULL),
    ] {
        let spec = Spec { io, format, readout, keep: 2, ..Spec::default() };
        let mut hashes = Vec::new();
        for isa in Isa::available() {
            Isa::force(Some(isa));
            hashes.push((format!("{isa:?}"), fingerprint(spec.clone())));
        }
        Isa::force(None);
        for threads in [2, 3] {
            hashes.push((format!("{threads} threads"), fingerprint(Spec { threads, ..spec.clone() })));
        }
        for parts in [2, 7] {
            hashes.push((format!("{parts} parts"), fingerprint(Spec { parts, ..spec.clone() })));
        }
        println!("{hashes:x?}");
        assert!(hashes.iter().all(|(_, h)| *h == hashes[0].1), "{hashes:x?}");
    }
}

/// `extend` against fp64. An fp32 recurrence rounds each element a few times per token; the errors decay with the state, so
/// they stay near 2^-24 times a small factor. 2e-6 is ten times what the named generator gives.
#[test]
fn extend_is_the_recurrence() {
    for io in [REPLAYSSM_BF16, REPLAYSSM_F16, REPLAYSSM_F32] {
        for skip in [Skip::None, Skip::PerHead, Skip::PerElement] {
            for (softplus, bias, gate) in [(true, true, true), (false, false, false)] {
                let spec = Spec { io, skip, softplus, bias, gate, layers: 1, ..Spec::default() };
                let rig = Rig::new(spec.clone());
                let mut rng = Rng(5);
                let mut oracle = Oracle::new(&spec, &rig.params[0]);
                let (mut got, mut truth) = (Vec::new(), Vec::new());
                for round in 0..20 {
                    let tokens = rig.tokens(&mut rng, 1 + round * 3);
                    for token in &tokens {
                        truth.extend(oracle.token(&token[0]).1);
                    }
                    let out = rig.extend(&[Row::new(1, &tokens)], (round % 4) as i32);
                    got.extend(out.into_iter().flatten().flatten().map(|b| decode(spec.out, b)));
                }
                let state: Vec<f64> = rig.export(0, 1, 1, None).into_iter().map(|b| f32::from_bits(b).into()).collect();
                let (y, s) = (relative(&got, &truth), relative(&state, &oracle.state));
                assert!(y < 2e-6 && s < 2e-6, "io {io} {skip:?}: outputs {y:.2e}, state {s:.2e}");
            }
        }
    }
}

/// The bytes are a promise between backends, instruction sets and versions: they change only with the order of operations that
/// docs/KERNELS.md states. Inputs are made of integer draws alone, so that no math library has a say.
#[test]
fn golden_bytes_of_extend() {
    let mut found = Vec::new();
    for (io, format) in [
        (REPLAYSSM_BF16, REPLAYSSM_FORMAT_SPLIT32),
        (REPLAYSSM_F16, REPLAYSSM_FORMAT_F32),
        (REPLAYSSM_F32, REPLAYSSM_FORMAT_F32),
    ] {
        let mut rig = Rig::new(Spec { io, format, headdim: 24, dstate: 80, ..Spec::default() });
        let mut rng = Rng(2024);
        let mut draw = move || (rng.below(4001) as f64 - 2000.0) / 1024.0;
        for h in 0..4 {
            rig.params[0].a.set(2 * h, ((-1.0 - h as f32) / 2.0).to_bits());
            rig.params[0].bias.set(h, common::encode(REPLAYSSM_BF16, draw()));
            (0..24).for_each(|i| rig.params[0].d.set(h * 24 + i, (draw() as f32).to_bits()));
        }
        let tokens: Vec<Vec<common::Token>> = (0..60)
            .map(|_| {
                let mut values =
                    |n: usize, dtype: i32| (0..n).map(|_| common::encode(dtype, draw())).collect::<Vec<_>>();
                vec![common::Token {
                    x: values(96, io),
                    b: values(160, io),
                    c: values(160, io),
                    dt: values(4, REPLAYSSM_F32),
                    z: values(96, io),
                }]
            })
            .collect();
        let out = rig.extend(&[Row::new(0, &tokens)], 0);
        let state = rig.export(0, 0, 0, None);
        found.push((hash(out.into_iter().flatten().flatten()), hash(state)));
    }
    // Every draw is a binary16, so the last two agree.
    let f16 = (0x8C492E9E9ADD9CC1, 0xF71CD72CE917BEA1);
    let golden = [(0xB5B0DCA8F4C44A74, 0x35C40ADE68215B7E), f16, f16];
    assert_eq!(found[..], golden[..], "{found:#x?}");
}
