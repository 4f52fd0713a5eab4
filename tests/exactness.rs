//! Equality by bytes: the exported state equals that of `extend` over the accepted tokens, and EXACT outputs equal its outputs, whatever the
//! window, the step sizes, the acceptance, the repeats and the aborts. `extend` itself is compared with fp64.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use common::device;
use common::oracle::{Oracle, relative};
use common::{FAMILIES, Outputs, Rig, Rng, Row, Skip, Spec, decode, hash};
use replayssm::backend::cpu::isa::Isa;
use replayssm::ffi::*;

#[global_allocator]
static HEAP: common::device::Heap = common::device::Heap::ON_CUDA;

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
    // On a device every call is waited for: as many tokens as fold a few times are enough there.
    let tokens = if device::cuda() { tokens.min(3 * spec.window + 40) } else { tokens };
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

fn grid(family: i32, io: i32) {
    for (window, t_max) in windows_and_steps() {
        for keep in [0, 5] {
            for format in [REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_FORMAT_F32] {
                for readout in [REPLAYSSM_READOUT_EXACT, REPLAYSSM_READOUT_FULL] {
                    let spec = Spec { family, io, format, readout, window, t_max, keep, layers: 2, ..Spec::default() };
                    let small = Spec { heads: 2, groups: 1, headdim: 17, dstate: 33, ..spec.clone() };
                    // Every ring is gone round several times: it has at most window + 13 rows.
                    run(if family == REPLAYSSM_FAMILY_MAMBA2 { spec } else { small }, 4 * window + 100);
                }
            }
        }
    }
}

#[test]
fn mamba2_bf16_equals_extend_by_bytes() {
    grid(REPLAYSSM_FAMILY_MAMBA2, REPLAYSSM_DTYPE_BF16);
}

#[test]
fn mamba2_f16_equals_extend_by_bytes() {
    grid(REPLAYSSM_FAMILY_MAMBA2, REPLAYSSM_DTYPE_F16);
}

#[test]
fn mamba2_f32_equals_extend_by_bytes() {
    grid(REPLAYSSM_FAMILY_MAMBA2, REPLAYSSM_DTYPE_F32);
}

#[test]
fn gdn_bf16_equals_extend_by_bytes() {
    grid(REPLAYSSM_FAMILY_GDN, REPLAYSSM_DTYPE_BF16);
}

#[test]
fn gdn_f16_equals_extend_by_bytes() {
    grid(REPLAYSSM_FAMILY_GDN, REPLAYSSM_DTYPE_F16);
}

#[test]
fn gdn_f32_equals_extend_by_bytes() {
    grid(REPLAYSSM_FAMILY_GDN, REPLAYSSM_DTYPE_F32);
}

#[test]
fn kda_bf16_equals_extend_by_bytes() {
    grid(REPLAYSSM_FAMILY_KDA, REPLAYSSM_DTYPE_BF16);
}

#[test]
fn kda_f16_equals_extend_by_bytes() {
    grid(REPLAYSSM_FAMILY_KDA, REPLAYSSM_DTYPE_F16);
}

#[test]
fn kda_f32_equals_extend_by_bytes() {
    grid(REPLAYSSM_FAMILY_KDA, REPLAYSSM_DTYPE_F32);
}

#[test]
fn high_readout_leaves_the_state_exact() {
    for family in FAMILIES {
        for schedule in [REPLAYSSM_SCHEDULE_STAGGERED, REPLAYSSM_SCHEDULE_BY_POSITION, REPLAYSSM_SCHEDULE_NONE] {
            for (window, t_max) in [(1, 1), (7, 3), (16, 8), (32, 5)] {
                let readout = REPLAYSSM_READOUT_HIGH;
                run(Spec { family, readout, window, t_max, keep: 3, schedule, ..Spec::default() }, 600);
            }
        }
    }
}

#[test]
fn long_steps_equal_extend_by_bytes() {
    for family in FAMILIES {
        let exact = REPLAYSSM_READOUT_EXACT;
        for (t_max, readout) in [(16, exact), (40, exact), (40, REPLAYSSM_READOUT_FULL), (256, exact)] {
            run(Spec { family, t_max, readout, window: 256.min(2 * t_max), ..Spec::default() }, 1000);
        }
    }
}

#[test]
fn options_and_real_shapes_equal_extend_by_bytes() {
    let base = Spec { layers: 1, t_max: 4, ..Spec::default() };
    for skip in [Skip::None, Skip::PerHead, Skip::PerElement] {
        for (softplus, bias, gate) in
            [(true, true, false), (false, false, true), (false, true, false), (true, false, true)]
        {
            for dt_dtype in [REPLAYSSM_DTYPE_F32, REPLAYSSM_DTYPE_BF16] {
                run(Spec { skip, softplus, bias, gate, dt_dtype, ..base.clone() }, 200);
            }
        }
    }
    for family in FAMILIES {
        for (headdim, dstate) in [(80, 128), (64, 128), (128, 128), (24, 96), (1, 1), (16, 256), (256, 16), (17, 33)] {
            run(Spec { family, headdim, dstate, out: REPLAYSSM_DTYPE_BF16, ..base.clone() }, 120);
        }
    }
}

#[test]
fn options_of_the_delta_rules_equal_extend_by_bytes() {
    let base = Spec { layers: 1, t_max: 4, heads: 6, ..Spec::default() };
    for family in [REPLAYSSM_FAMILY_GDN, REPLAYSSM_FAMILY_KDA] {
        for head_map in [REPLAYSSM_HEAD_MAP_GROUPED, REPLAYSSM_HEAD_MAP_TILED] {
            for (gate_kind, bias, l2norm, beta_processed, scale) in delta_options(family) {
                for readout in [REPLAYSSM_READOUT_EXACT, REPLAYSSM_READOUT_FULL] {
                    let spec =
                        Spec { family, head_map, gate_kind, bias, l2norm, beta_processed, scale, ..base.clone() };
                    run(Spec { readout, ..spec }, 200);
                }
            }
        }
    }
}

fn delta_options(family: i32) -> Vec<(i32, bool, bool, bool, f32)> {
    let mut options = vec![
        (REPLAYSSM_GATE_SOFTPLUS, true, true, false, 0.0),
        (REPLAYSSM_GATE_SOFTPLUS, false, false, true, 0.5),
        (REPLAYSSM_GATE_LOG_DECAY, false, true, true, 0.0),
        (REPLAYSSM_GATE_LOG_DECAY, false, false, false, -1.5),
    ];
    if family == REPLAYSSM_FAMILY_KDA {
        options.push((REPLAYSSM_GATE_LOWER_BOUND, true, true, false, 0.0));
        options.push((REPLAYSSM_GATE_LOWER_BOUND, false, false, true, 1.0));
    }
    options
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
    // All that folds or copies outside of a step: with the positions that a commit has reached, and those that are held.
    let rows: Vec<Row> = (0..6).map(|slot| Row::new(slot, &rig.tokens(&mut rng, 2))).collect();
    rig.step(&rows);
    rig.commit(&rows, &[2; 6]);
    let at: Vec<i64> = (0..6).map(|ring| rig.cursor(ring).position - 1).collect();
    rig.snapshot(&rows, false, None, &at, &[6, -1, -1, -1, -1, -1]);
    rig.flush(1, 1, None);
    rig.flush(2, 2, Some(at[2]));
    rig.copy(REPLAYSSM_COPY_SWAP, (3, 3), (4, 4), None);
    rig.copy(REPLAYSSM_COPY_STORE, (5, 5), (7, 7), None);
    for slot in 0..8 {
        bits.extend(rig.bytes_of(slot, false).as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)));
    }
    rig.copy(REPLAYSSM_COPY_LOAD, (7, 7), (5, 5), Some(at[5] + 1));
    rig.copy(REPLAYSSM_COPY_MOVE, (1, 1), (7, 7), None);
    for slot in [2, 3, 4, 5, 7] {
        bits.extend(rig.export(0, slot, slot, None));
    }
    assert_eq!(rig.faults(false).bits, 0);
    bits.extend(rig.extend(&[Row::new(6, &rig.tokens(&mut rng, 50))], 3).into_iter().flatten().flatten());
    bits.extend(rig.export(0, 6, 6, None));
    hash(bits)
}

/// What the hashes are taken of: every family and format, each activation dtype and readout of bytes.
fn hashed() -> impl Iterator<Item = Spec> {
    let exact = REPLAYSSM_READOUT_EXACT;
    FAMILIES.into_iter().flat_map(move |family| {
        [
            (REPLAYSSM_DTYPE_BF16, REPLAYSSM_FORMAT_SPLIT32, exact, false),
            (REPLAYSSM_DTYPE_F16, REPLAYSSM_FORMAT_F32, exact, false),
            (REPLAYSSM_DTYPE_F32, REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_FULL, false),
            (REPLAYSSM_DTYPE_BF16, REPLAYSSM_FORMAT_BF16, exact, true),
            (REPLAYSSM_DTYPE_F32, REPLAYSSM_FORMAT_F16, exact, false),
        ]
        .map(|(io, format, readout, stochastic)| Spec {
            family,
            io,
            format,
            readout,
            stochastic,
            keep: 2,
            ..Spec::default()
        })
    })
}

fn assert_one_hash(hashes: &[(String, u64)]) {
    println!("{hashes:x?}");
    assert!(hashes.iter().all(|(_, h)| *h == hashes[0].1), "{hashes:x?}");
}

#[test]
fn instruction_sets_give_one_hash() {
    cpu_only!();
    // Short last tiles and blocks; small, since other processors are emulated.
    for spec in hashed().map(|spec| Spec { heads: 2, groups: 1, headdim: 24, dstate: 72, ..spec }) {
        let mut hashes = Vec::new();
        for isa in Isa::available() {
            Isa::force(Some(isa));
            hashes.push((format!("{isa:?}"), fingerprint(spec.clone())));
        }
        Isa::force(None);
        assert_one_hash(&hashes);
    }
}

#[test]
fn threads_and_parts_give_one_hash() {
    cpu_only!();
    // Small work stays on the calling thread, if nobody says otherwise.
    replayssm::backend::cpu::share_all();
    for spec in hashed().map(|spec| Spec { headdim: 40, dstate: 96, ..spec }) {
        let mut hashes = Vec::new();
        for (threads, parts) in [(1, 1), (2, 1), (3, 1), (1, 2), (1, 7)] {
            let hash = fingerprint(Spec { threads, parts, ..spec.clone() });
            hashes.push((format!("{threads} threads, {parts} parts"), hash));
        }
        assert_one_hash(&hashes);
    }
}

/// Runs `extend` in pieces beside the oracle and compares outputs and the state, relative L2.
fn against_fp64(spec: &Spec) -> (f64, f64) {
    let rig = Rig::new(spec.clone());
    let mut rng = Rng(5);
    let mut oracle = Oracle::new(spec, &rig.params[0]);
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
    (relative(&got, &truth), relative(&state, &oracle.state))
}

/// `extend` against fp64. An fp32 recurrence rounds each element a few times per token; the errors decay with the state, so
/// they stay near 2^-24 times a small factor. 2e-6 is ten times what the named generator gives.
#[test]
fn extend_is_the_recurrence() {
    for io in [REPLAYSSM_DTYPE_BF16, REPLAYSSM_DTYPE_F16, REPLAYSSM_DTYPE_F32] {
        for skip in [Skip::None, Skip::PerHead, Skip::PerElement] {
            for (softplus, bias, gate) in [(true, true, true), (false, false, false)] {
                let spec = Spec { io, skip, softplus, bias, gate, layers: 1, ..Spec::default() };
                let (y, s) = against_fp64(&spec);
                assert!(y < 2e-6 && s < 2e-6, "io {io} {skip:?}: outputs {y:.2e}, state {s:.2e}");
            }
        }
    }
}

/// As above for the delta rules. Each token's u is a difference of v and a prediction, which carries the state's error back into
/// the state, so a few times more than Mamba-2's; gates in fp32 go through exp twice. 5e-6 is five times what is measured.
#[test]
fn extend_is_the_delta_rule() {
    let mut worst = 0f64;
    for family in [REPLAYSSM_FAMILY_GDN, REPLAYSSM_FAMILY_KDA] {
        for io in [REPLAYSSM_DTYPE_BF16, REPLAYSSM_DTYPE_F16, REPLAYSSM_DTYPE_F32] {
            for head_map in [REPLAYSSM_HEAD_MAP_GROUPED, REPLAYSSM_HEAD_MAP_TILED] {
                for (gate_kind, bias, l2norm, beta_processed, scale) in delta_options(family) {
                    let spec = Spec {
                        family,
                        io,
                        head_map,
                        gate_kind,
                        bias,
                        l2norm,
                        beta_processed,
                        scale,
                        heads: 6,
                        ..Spec::default()
                    };
                    let (o, s) = against_fp64(&spec);
                    worst = worst.max(o).max(s);
                    assert!(o < 5e-6 && s < 5e-6, "{spec:?}: outputs {o:.2e}, state {s:.2e}");
                }
            }
        }
    }
    println!("worst {worst:.2e}");
}

/// 16-bit states are the fp32 recurrence from the checkpoint as stored, rounded at every fold: to nearest even, or up and down by the
/// words that the position, the layer and the element draw.
#[test]
fn sixteen_bit_states_are_rounded_once_per_fold() {
    use replayssm::replay::numerics::{
        from_bf16, from_f16, rounding_words, to_bf16, to_bf16_stochastic, to_f16, to_f16_stochastic,
    };
    for family in FAMILIES {
        for format in [REPLAYSSM_FORMAT_BF16, REPLAYSSM_FORMAT_F16] {
            for (stochastic, keep, readout) in [
                (false, 0, REPLAYSSM_READOUT_EXACT),
                (true, 0, REPLAYSSM_READOUT_FULL),
                (true, 3, REPLAYSSM_READOUT_EXACT),
            ] {
                let spec = Spec { family, format, stochastic, keep, readout, window: 6, t_max: 3, ..Spec::default() };
                let rig = Rig::new(spec.clone());
                let shadow = Rig::new(Spec { format: REPLAYSSM_FORMAT_F32, stochastic: false, ..spec.clone() });
                let seed = rig.cursor(0).seed;
                let mut rng = Rng(6);
                let mut log: Vec<Vec<common::Token>> = Vec::new();
                let mut folds = 0;
                for _ in 0..60 {
                    let tag = rig.tags(0, 0)[0];
                    // The checkpoint as stored, in the shadow's slot 0; the tokens since then come from the log.
                    let stored = rig.export(0, 0, 0, Some(tag));
                    let from_stored = |to: usize| {
                        shadow.reset(0, 0, 0);
                        shadow.import(0, 0, 0, Some(tag), &stored);
                        if to > tag as usize {
                            shadow.extend(&[Row::new(0, &log[tag as usize..to])], 0);
                        }
                        shadow.export(0, 0, 0, None)
                    };
                    assert!(rig.export(0, 0, 0, None) == from_stored(log.len()), "the state between folds");
                    let row = Row::new(0, &rig.tokens(&mut rng, 3));
                    let out = rig.step(std::slice::from_ref(&row));
                    let now = rig.tags(0, 0)[0];
                    if now > tag {
                        folds += 1;
                        let exact = from_stored(now as usize);
                        let rounded: Vec<u32> = exact
                            .iter()
                            .enumerate()
                            .map(|(i, &bits)| {
                                let x = f32::from_bits(bits);
                                let word = rounding_words(seed, now, 0, (i / 4) as u32)[i % 4];
                                let value = match (format, stochastic) {
                                    (REPLAYSSM_FORMAT_BF16, false) => from_bf16(to_bf16(x)),
                                    (REPLAYSSM_FORMAT_BF16, true) => from_bf16(to_bf16_stochastic(x, word)),
                                    (_, false) => from_f16(to_f16(x)),
                                    (_, true) => from_f16(to_f16_stochastic(x, word)),
                                };
                                value.to_bits()
                            })
                            .collect();
                        let stored = rig.export(0, 0, 0, Some(now));
                        assert!(stored == rounded, "format {format}, stochastic {stochastic}: the fold at {now}");
                        // A flushing step reads its output from the checkpoint as it is stored.
                        if readout == REPLAYSSM_READOUT_EXACT {
                            shadow.import(0, 0, 0, Some(now), &stored);
                            let all: Vec<_> = log[now as usize..].iter().chain(&row.tokens).cloned().collect();
                            let truth = shadow.extend(&[Row::new(0, &all)], 0).remove(0);
                            assert_eq!(out[0][..], truth[log.len() - now as usize..]);
                        }
                    }
                    let accepted = rng.below(4);
                    rig.commit(std::slice::from_ref(&row), &[accepted as i32]);
                    log.extend(row.tokens[..accepted].iter().cloned());
                }
                assert!(folds > 10);
                assert_eq!(rig.faults(false).bits, 0);
            }
        }
    }
}

/// The bytes are a promise between backends, instruction sets and versions: they change only with the order of operations that
/// docs/KERNELS.md states. Inputs are made of integer draws alone, so that no math library has a say.
#[test]
fn golden_bytes_of_extend() {
    let mut found = Vec::new();
    for (family, io, format) in FAMILIES.into_iter().flat_map(|family| {
        [
            (family, REPLAYSSM_DTYPE_BF16, REPLAYSSM_FORMAT_SPLIT32),
            (family, REPLAYSSM_DTYPE_F16, REPLAYSSM_FORMAT_F32),
            (family, REPLAYSSM_DTYPE_F32, REPLAYSSM_FORMAT_BF16),
        ]
    }) {
        let stochastic = format == REPLAYSSM_FORMAT_BF16;
        let mut rig = Rig::new(Spec { family, io, format, stochastic, headdim: 24, dstate: 80, ..Spec::default() });
        let gates = rig.spec.gates();
        let mut rng = Rng(2024);
        let mut draw = move || (rng.below(4001) as f64 - 2000.0) / 1024.0;
        for h in 0..4 {
            rig.params[0].a.set(2 * h, ((-1.0 - h as f32) / 2.0).to_bits());
            (h * gates / 4..(h + 1) * gates / 4)
                .for_each(|i| rig.params[0].bias.set(i, common::encode(REPLAYSSM_DTYPE_BF16, draw())));
            (0..24).for_each(|i| rig.params[0].d.set(h * 24 + i, (draw() as f32).to_bits()));
        }
        let betas = if rig.spec.is_delta() { 4 } else { 0 };
        let tokens: Vec<Vec<common::Token>> = (0..60)
            .map(|_| {
                let mut values =
                    |n: usize, dtype: i32| (0..n).map(|_| common::encode(dtype, draw())).collect::<Vec<_>>();
                vec![common::Token {
                    x: values(96, io),
                    b: values(160, io),
                    c: values(160, io),
                    dt: values(gates, REPLAYSSM_DTYPE_F32),
                    z: values(96, io),
                    beta: values(betas, REPLAYSSM_DTYPE_F32),
                }]
            })
            .collect();
        let out = rig.extend(&[Row::new(0, &tokens)], 0);
        let state = rig.export(0, 0, 0, None);
        found.push((hash(out.into_iter().flatten().flatten()), hash(state)));
    }
    let golden = [
        // Mamba-2
        (0xb5b0dca8f4c44a74, 0x35c40ade68215b7e),
        (0x8c492e9e9add9cc1, 0xf71cd72ce917bea1),
        (0x8c492e9e9add9cc1, 0x944050ffc6377b25),
        // GDN
        (0xbb3f190c411d1687, 0x371a3c1a3088fd06),
        (0x1a5f6457987a65f, 0x13a3e6cb58c9b38d),
        (0x1a5f6457987a65f, 0x272e26e369897b25),
        // KDA
        (0x388ee6ef0c7923db, 0xf7d8bc370a6e3b30),
        (0x83946fea0900c595, 0xab47acbf2b0f59ff),
        (0x83946fea0900c595, 0x7610cc5f9a867b25),
    ];
    assert_eq!(found[..], golden[..], "{found:#x?}");
}
