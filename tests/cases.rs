//! Cases that broke other implementations of replay, rollback and state updates. Each test names its kind of fault.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use std::ptr::null;

use common::device::{backend, context, cuda, fill, peek, poke};
use common::oracle::{Oracle, relative};
use common::{
    ABSENT, Array, BatchData, FAMILIES, Inputs, Rig, Rng, Row, Skip, Spec, Token, address, assert_same_state, decode,
    decode_one, encode, heap, ids64, message, no_faults, ok, plain,
};
use replayssm::ffi::*;

#[global_allocator]
static HEAP: common::device::Heap = common::device::Heap::ON_CUDA;

#[test]
fn case_1_resume_after_preemption_restarts_at_the_import() {
    for family in FAMILIES {
        let rig = Rig::new(Spec { family, window: 4, t_max: 1, layers: 2, ..Spec::default() });
        let tokens = rig.tokens(&mut Rng(1), 9);
        let truth = plain(&rig, 1, &tokens);
        for token in &tokens[..6] {
            decode_one(&rig, 0, token);
        }
        let states: Vec<_> = (0..2).map(|layer| rig.export(layer, 0, 0, None)).collect();
        // The slot goes to someone else meanwhile; then the true state after six tokens comes back.
        rig.reset(0, 0, 0);
        for token in &tokens[2..5] {
            decode_one(&rig, 0, token);
        }
        rig.reset(0, 0, 6);
        for (layer, state) in states.iter().enumerate() {
            rig.import(layer, 0, 0, Some(6), state);
        }
        assert_eq!(rig.cursor(0).position, 6);
        for (t, token) in tokens.iter().enumerate().skip(6) {
            assert_eq!(decode_one(&rig, 0, token), truth[t], "token {t}");
        }
        assert_same_state(&rig, 0, 1);
        no_faults(&rig);
    }
}

#[test]
fn case_2_a_one_token_prompt_by_a_step_loses_nothing() {
    let rig = Rig::new(Spec { t_max: 1, ..Spec::default() });
    let tokens = rig.tokens(&mut Rng(2), 20);
    let truth = plain(&rig, 1, &tokens);
    for token in rig.tokens(&mut Rng(3), 5) {
        decode_one(&rig, 0, &token);
    }
    rig.reset(0, 0, 0);
    for (token, truth) in tokens.iter().zip(&truth) {
        assert_eq!(&decode_one(&rig, 0, token), truth);
    }
    assert_same_state(&rig, 0, 1);
}

#[test]
fn case_3_a_recycled_slot_is_independent_of_its_former_owner() {
    for family in FAMILIES {
        let rig = Rig::new(Spec { family, window: 8, t_max: 3, ..Spec::default() });
        let mut rng = Rng(4);
        let (mut id, mut generation) = ([-1], [0]);
        // SAFETY: the arrays have one element.
        ok(unsafe { replayssm_acquire(rig.slots, 1, id.as_mut_ptr(), generation.as_mut_ptr()) });
        let slot = id[0] as usize;
        for _ in 0..7 {
            let row = Row::new(slot, &rig.tokens(&mut rng, 3));
            rig.step(std::slice::from_ref(&row));
            rig.commit(&[row], &[2]);
        }
        // SAFETY: the array has one element.
        ok(unsafe { replayssm_release(rig.slots, 1, id.as_ptr()) });
        let (mut again, mut next) = ([-1], [0]);
        // SAFETY: the arrays have one element.
        ok(unsafe { replayssm_acquire(rig.slots, 1, again.as_mut_ptr(), next.as_mut_ptr()) });
        assert_eq!((again, next), (id, [generation[0] + 1]));
        let state: Vec<u32> = (0..4 * 20 * 40).map(|_| (rng.normal() as f32).to_bits()).collect();
        let token = rig.token(&mut rng);
        let mut results = Vec::new();
        for (slot, poison) in [(slot, true), (5, false)] {
            if poison {
                rig.poison_rings();
            }
            rig.reset(slot, slot, 100);
            rig.import(0, slot, slot, Some(100), &state);
            results.push((decode_one(&rig, slot, &token), rig.export(0, slot, slot, None)));
        }
        assert!(results[0] == results[1]);
        no_faults(&rig);
    }
}

#[test]
fn case_4_rows_that_need_no_flush_leave_their_checkpoint_alone() {
    for family in FAMILIES {
        let spec = Spec { family, t_max: 10, window: 16, schedule: REPLAYSSM_SCHEDULE_NONE, ..Spec::default() };
        let rig = Rig::new(spec);
        let mut rng = Rng(5);
        let slots = [1usize, 3, 0, 2];
        let histories = [0usize, 6, 7, 10];
        for (&slot, &n) in slots.iter().zip(&histories) {
            rig.reset(slot, slot, 0);
            if n > 0 {
                let row = Row::new(slot, &rig.tokens(&mut rng, n));
                rig.step(std::slice::from_ref(&row));
                rig.commit(&[row], &[n as i32]);
            }
        }
        let before: Vec<Vec<u8>> = slots.iter().map(|&s| rig.part(REPLAYSSM_COMPONENT_CHECKPOINT, 0, s)).collect();
        let states: Vec<_> = slots.iter().map(|&s| rig.export(0, s, s, None)).collect();
        let rows: Vec<Row> = slots.iter().map(|&s| Row::new(s, &rig.tokens(&mut rng, 10))).collect();
        rig.step(&rows);
        for (i, &slot) in slots.iter().enumerate() {
            let same = rig.part(REPLAYSSM_COMPONENT_CHECKPOINT, 0, slot) == before[i];
            // 6 + 10 fits a window of 16; 7 + 10 does not.
            assert_eq!(same, histories[i] <= 6, "history {}", histories[i]);
            assert!(rig.export(0, slot, slot, None) == states[i], "the committed state moved");
        }
    }
}

#[test]
fn case_5_without_a_schedule_a_fold_waits_until_it_must() {
    for (t_max, tokens, accept, every) in [(4, 4, 4, 4), (4, 4, 1, 13), (8, 1, 1, 16)] {
        let rig = Rig::new(Spec { t_max, window: 16, schedule: REPLAYSSM_SCHEDULE_NONE, ..Spec::default() });
        let mut rng = Rng(6);
        let mut folded = Vec::new();
        for step in 0..64 {
            let (before, position) = (rig.tags(0, 0)[0], rig.cursor(0).position);
            let row = Row::new(0, &rig.tokens(&mut rng, tokens));
            rig.step(std::slice::from_ref(&row));
            let after = rig.tags(0, 0)[0];
            if after != before {
                assert!(position - before + tokens as i64 > 16, "a fold while the step still fitted");
                folded.push(step);
            }
            assert!(position - after + tokens as i64 <= 16, "more than a window of history");
            rig.commit(&[row], &[accept]);
        }
        assert!(folded.windows(2).all(|w| w[1] - w[0] == every), "T {tokens}: folds at steps {folded:?}");
    }
}

#[test]
fn case_6_short_rounds_with_rejects_equal_the_plain_recurrence() {
    for family in FAMILIES {
        let rig = Rig::new(Spec { family, t_max: 4, ..Spec::default() });
        let mut rng = Rng(7);
        for round in [4usize, 2, 1, 4].iter().cycle().take(60) {
            let rows: Vec<Row> = (0..3).map(|slot| Row::new(slot, &rig.tokens(&mut rng, *round))).collect();
            let out = rig.step(&rows);
            let counts: Vec<i32> = rows.iter().map(|_| rng.below(round + 1) as i32).collect();
            rig.commit(&rows, &counts);
            for (slot, (row, &n)) in rows.iter().zip(&counts).enumerate() {
                if n > 0 {
                    let truth = rig.extend(&[Row::new(slot + 3, &row.tokens[..n as usize])], 0);
                    assert_eq!(out[slot][..n as usize], truth[0][..]);
                }
                assert_same_state(&rig, slot, slot + 3);
            }
        }
    }
}

#[test]
fn case_7_the_bonus_token_in_three_conventions() {
    let rig = Rig::new(Spec::default());
    let tokens = rig.tokens(&mut Rng(8), 4);
    for accepted in 1..=4 {
        for (slot, (convention, count)) in [
            (REPLAYSSM_COUNTS_ACCEPTED, accepted),
            (REPLAYSSM_COUNTS_ACCEPTED_DRAFTS, accepted - 1),
            (REPLAYSSM_COUNTS_REJECTED, 4 - accepted),
        ]
        .into_iter()
        .enumerate()
        {
            rig.reset(slot, slot, 0);
            let rows = [Row::new(slot, &tokens)];
            rig.step(&rows);
            let batch = BatchData::new(&rig, &rows, false, 0);
            let counts = heap([count]);
            let args = desc!(replayssm_commit_args { convention: convention, counts: counts.as_ptr() });
            // SAFETY: everything lives until the call returns.
            ok(unsafe { replayssm_commit(rig.slots, &batch.desc(), &args, null()) });
            assert_eq!(rig.cursor(slot).position, i64::from(accepted));
        }
        assert_same_state(&rig, 0, 1);
        assert_same_state(&rig, 0, 2);
    }
    no_faults(&rig);
}

#[test]
fn case_8_layers_move_nothing_and_positions_advance_once() {
    let rig = Rig::new(Spec { layers: 3, t_max: 3, window: 5, ..Spec::default() });
    let mut rng = Rng(9);
    for _ in 0..40 {
        let position = rig.cursor(0).position;
        let aborted = Row::new(0, &rig.tokens(&mut rng, 3));
        rig.layer(0, std::slice::from_ref(&aborted), false, 0);
        rig.step(&[aborted]);
        let row = Row::new(0, &rig.tokens(&mut rng, 2));
        rig.step(std::slice::from_ref(&row));
        rig.layer(1, std::slice::from_ref(&row), false, 0);
        assert_eq!(rig.cursor(0).position, position, "a layer call moved the position");
        rig.commit(std::slice::from_ref(&row), &[2]);
        assert_eq!(rig.cursor(0).position, position + 2);
        rig.extend(&[Row::new(1, &row.tokens)], 0);
        assert_same_state(&rig, 0, 1);
    }
}

#[test]
fn case_9_import_over_a_live_ring_resets_position_tags_and_history() {
    for family in FAMILIES {
        let rig = Rig::new(Spec { family, window: 8, t_max: 2, ..Spec::default() });
        let mut rng = Rng(10);
        for token in rig.tokens(&mut rng, 5) {
            decode_one(&rig, 0, &token);
        }
        let state: Vec<u32> = (0..4 * 20 * 40).map(|_| (rng.normal() as f32).to_bits()).collect();
        rig.import(0, 0, 0, Some(77), &state);
        assert_eq!(rig.cursor(0).position, 77);
        assert!(rig.tags(0, 0).iter().all(|&t| t == 77));
        assert!(rig.export(0, 0, 0, None) == state, "history survived the import");
        // A row of no tokens with a flush due: nothing happens.
        for token in rig.tokens(&mut rng, 3) {
            decode_one(&rig, 0, &token);
        }
        let before = rig.part(REPLAYSSM_COMPONENT_CHECKPOINT, 0, 0);
        let tags = rig.tags(0, 0);
        let row = Row { flush: true, ..Row::new(0, &[]) };
        rig.step(std::slice::from_ref(&row));
        rig.commit(&[row], &[1]);
        assert_eq!((rig.part(REPLAYSSM_COMPONENT_CHECKPOINT, 0, 0), rig.tags(0, 0)), (before, tags));
        assert_eq!(rig.cursor(0).position, 80);
        no_faults(&rig);
    }
}

#[test]
fn case_10_a_late_commit_for_a_freed_slot_does_nothing() {
    let rig = Rig::new(Spec::default());
    let mut rng = Rng(11);
    let rows = [Row::new(0, &rig.tokens(&mut rng, 3))];
    let old = heap([rig.cursor(0).generation]);
    rig.step(&rows);
    rig.reset(0, 0, 0);
    decode_one(&rig, 0, &rig.token(&mut rng));
    let state = rig.export(0, 0, 0, None);
    let data = BatchData::new(&rig, &rows, false, 0);
    let mut batch = data.desc();
    batch.generation = old.as_ptr();
    // SAFETY: everything lives until the call returns.
    ok(unsafe { replayssm_commit(rig.slots, &batch, null(), null()) });
    assert_eq!(rig.cursor(0).position, 1);
    assert!(rig.export(0, 0, 0, None) == state);
    // The same commit in the ring's own generation is done.
    let now = heap([rig.cursor(0).generation]);
    let rows = [Row::new(0, &rig.tokens(&mut rng, 3))];
    rig.step(&rows);
    batch.generation = now.as_ptr();
    // SAFETY: everything lives until the call returns.
    ok(unsafe { replayssm_commit(rig.slots, &batch, null(), null()) });
    assert_eq!(rig.cursor(0).position, 4);
}

/// Runs one layer with a descriptor of the test's own making.
fn raw_step(rig: &Rig, batch: &replayssm_batch, io: &Inputs) {
    ok(io.call(rig, 0, batch, false, null()));
}

#[test]
fn case_11_padded_rows_write_zeros_or_nothing_and_touch_no_slot() {
    for family in FAMILIES {
        let rig = Rig::new(Spec { family, layers: 1, gate: false, ..Spec::default() });
        let mut rng = Rng(12);
        for id in [0usize, 1, 7] {
            decode_one(&rig, id, &rig.token(&mut rng));
        }
        let rows: Vec<Row> = [-1i64, 0, 7, -5, 1, 8]
            .iter()
            .map(|&id| Row { slot: id, ring: id, ..Row::new(0, &rig.tokens(&mut rng, 2)) })
            .collect();
        for keep in [false, true] {
            let before: Vec<Vec<u8>> = (0..8).map(|s| rig.part(REPLAYSSM_COMPONENT_CHECKPOINT, 0, s)).collect();
            let data = BatchData::new(&rig, &rows, false, 0);
            let mut batch = data.desc();
            batch.flags |= REPLAYSSM_BATCH_NULL_ID | if keep { REPLAYSSM_BATCH_KEEP_NULL_OUTPUTS } else { 0 };
            batch.null_id = 7;
            let io = Inputs::new(&rig.spec, &rig.params[0], &rows, 0);
            raw_step(&rig, &batch, &io);
            let out = io.outputs(&rig.spec, &rows);
            let poison = Array::poisoned(rig.spec.out, 1).get(0);
            let empty = if keep { poison } else { 0 };
            for (i, row) in rows.iter().enumerate() {
                let live = row.slot == 0 || row.slot == 1;
                for token in &out[i] {
                    assert_eq!(token.iter().all(|&b| b == empty), !live, "row {i} of slot {}", row.slot);
                    assert!(!live || token.iter().all(|&b| b != poison));
                }
            }
            for slot in (0..8).filter(|s| *s > 1) {
                assert!(rig.part(REPLAYSSM_COMPONENT_CHECKPOINT, 0, slot) == before[slot], "slot {slot} was touched");
            }
            // Id 8 of 8 slots is padding, and a fault; the other padding is silent.
            let faults = rig.faults(true);
            assert_eq!((faults.bits, faults.first_slot, faults.first_row), (REPLAYSSM_FAULT_ID, 8, 5));
        }
    }
}

#[test]
fn case_13_high_slot_ids_in_a_small_batch() {
    let rig = Rig::new(Spec { slots: 902, heads: 2, groups: 1, headdim: 16, dstate: 16, ..Spec::default() });
    let mut rng = Rng(13);
    let tokens = rig.tokens(&mut rng, 40);
    for pair in tokens.chunks(2) {
        let rows = [Row::new(900, pair), Row::new(901, pair), Row::new(3, pair)];
        let out = rig.step(&rows);
        rig.commit(&rows, &[2, 2, 2]);
        assert!(out[0] == out[1] && out[0] == out[2]);
    }
    assert_same_state(&rig, 900, 3);
    assert_same_state(&rig, 901, 3);
}

#[test]
fn case_15_and_16_strided_slices_equal_dense_tensors() {
    for skip in [Skip::PerHead, Skip::PerElement] {
        let rig = Rig::new(Spec { layers: 1, skip, ..Spec::default() });
        let s = &rig.spec;
        let tokens = rig.tokens(&mut Rng(14), 3);
        let rows = [Row::new(0, &tokens)];
        // The rig's inputs: x, B, C, z in one packed row with gaps, a dt row stride that is not nheads, A with stride 2.
        let sliced = rig.step(&rows);
        // The same values, each tensor on its own and dense.
        let dense = |pick: fn(&Token) -> &Vec<u32>, dtype: i32| {
            let n = pick(&tokens[0][0]).len();
            let mut array = Array::poisoned(dtype, 3 * n);
            for (t, token) in tokens.iter().enumerate() {
                for (i, &bits) in pick(&token[0]).iter().enumerate() {
                    array.set(t * n + i, bits);
                }
            }
            (array, n)
        };
        let (x, hd) = dense(|t| &t.x, s.io);
        let (b, gn) = dense(|t| &t.b, s.io);
        let (c, _) = dense(|t| &t.c, s.io);
        let (z, _) = dense(|t| &t.z, s.io);
        let (dt, h) = dense(|t| &t.dt, s.dt_dtype);
        let mut a = Array::poisoned(REPLAYSSM_DTYPE_F32, h);
        (0..h).for_each(|i| a.set(i, rig.params[0].a.get(2 * i)));
        let out = Array::poisoned(s.out, 3 * hd);
        let packed = Inputs::new(s, &rig.params[0], &rows, 0);
        let mut args = packed.args(s);
        args.x = common::tensor(&x, 0, 3 * hd, hd, s.headdim);
        args.z = common::tensor(&z, 0, 3 * hd, hd, s.headdim);
        args.B = common::tensor(&b, 0, 3 * gn, gn, s.dstate);
        args.C = common::tensor(&c, 0, 3 * gn, gn, s.dstate);
        args.dt = common::tensor(&dt, 0, 3 * h, h, 1);
        args.A = common::tensor(&a, 0, 0, 0, 1);
        args.out = common::tensor(&out, 0, 3 * hd, hd, s.headdim);
        let data = BatchData::new(&rig, &rows, false, 0);
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_mamba2_step(rig.pool, 0, &data.desc(), &args, null()) });
        for (t, truth) in sliced[0].iter().enumerate() {
            let got: Vec<u32> = (0..hd).map(|i| out.get(t * hd + i)).collect();
            assert_eq!(&got, truth, "{skip:?}, token {t}");
        }
    }
}

#[test]
fn case_20_rows_outside_the_history_are_never_trusted() {
    for family in FAMILIES {
        // The rig starts with NaN rings; here everything outside the history is Inf, then NaN, before every step.
        for readout in [REPLAYSSM_READOUT_EXACT, REPLAYSSM_READOUT_FULL, REPLAYSSM_READOUT_HIGH] {
            // Without a schedule both slots fold in the same steps, so that FULL and HIGH agree by bytes too.
            let schedule = REPLAYSSM_SCHEDULE_NONE;
            let rig = Rig::new(Spec { family, readout, schedule, window: 7, t_max: 3, ..Spec::default() });
            let rows_of_ring = 7 + 3;
            let mut rng = Rng(15);
            for _ in 0..60 {
                let token = rig.tokens(&mut rng, 3);
                let rows = [Row::new(0, &token), Row::new(1, &token)];
                let (position, tag) = (rig.cursor(0).position, rig.tags(0, 0)[0]);
                for c in rig.components().iter().filter(|c| c.per_ring == 1) {
                    let shared = [REPLAYSSM_COMPONENT_B, REPLAYSSM_COMPONENT_K, REPLAYSSM_COMPONENT_KNORM];
                    let blocks = if shared.contains(&c.kind) { rig.spec.groups } else { rig.spec.heads };
                    let bytes = c.bytes as usize / blocks / rows_of_ring;
                    for block in 0..blocks {
                        for row in 0..rows_of_ring {
                            let live = (tag..position).any(|p| p as usize % rows_of_ring == row);
                            if !live {
                                let at = c.base as usize + (block * rows_of_ring + row) * bytes;
                                // FF80 repeated is an infinity in bf16 and a NaN in fp32; FFFF is a NaN in both.
                                let fill = if position % 2 == 0 { [0x80, 0xFF] } else { [0xFF, 0xFF] };
                                poke(at, &fill.repeat(bytes / 2));
                            }
                        }
                    }
                }
                let out = rig.step(&rows);
                assert!(out[0] == out[1], "slot 0 has a dirty ring, slot 1 a clean one");
                assert!(out[0].iter().flatten().all(|&b| decode(rig.spec.out, b).is_finite()));
                rig.commit(&rows, &[2, 2]);
            }
            assert_same_state(&rig, 0, 1);
        }
    }
}

#[test]
fn case_21_softplus_at_its_ends() {
    for dt_dtype in [REPLAYSSM_DTYPE_F32, REPLAYSSM_DTYPE_BF16] {
        let spec =
            Spec { layers: 1, bias: false, gate: false, skip: Skip::None, dt_dtype, t_max: 1, ..Spec::default() };
        let rig = Rig::new(spec.clone());
        for (value, expected) in [(100.0, 100.0), (1e4, 1e4), (-100.0, 3.78e-44)] {
            let mut token = rig.token(&mut Rng(16));
            token[0].dt.fill(encode(dt_dtype, value));
            let rounded = decode(dt_dtype, token[0].dt[0]);
            rig.reset(0, 0, 0);
            decode_one(&rig, 0, &token);
            // The record of token 0 of head 0.
            let records = rig.part(REPLAYSSM_COMPONENT_DT, 0, 0);
            let dt = f32::from_le_bytes(*records.first_chunk().unwrap());
            assert!(dt.is_finite());
            if value > 0.0 {
                assert_eq!(f64::from(dt), rounded, "the identity above 20");
            } else {
                assert!(dt > 0.0 && dt < f32::MIN_POSITIVE, "a subnormal positive, got {dt:e}");
                assert!((f64::from(dt) - expected).abs() < 3e-45, "{dt:e}");
            }
        }
        // dt = 1e4 every 13th token: what comes after stays at fp32 grade.
        for readout in [REPLAYSSM_READOUT_FULL, REPLAYSSM_READOUT_EXACT] {
            let rig = Rig::new(Spec { readout, window: 32, ..spec.clone() });
            let mut oracle = Oracle::new(&rig.spec, &rig.params[0]);
            let mut rng = Rng(17);
            for t in 0..200 {
                let mut token = rig.token(&mut rng);
                if t % 13 == 12 {
                    token[0].dt.fill(encode(dt_dtype, 1e4));
                }
                let got: Vec<f64> = decode_one(&rig, 0, &token).into_iter().map(|b| decode(rig.spec.out, b)).collect();
                let error = relative(&got, &oracle.token(&token[0]).0);
                // A few roundings of 2^-24 each, per token alone; 20 tokens of state in between.
                assert!(error < 3e-6, "token {t}: {error:.2e}");
            }
        }
    }
}

#[test]
fn case_22_garbage_behind_a_rows_tokens_changes_nothing() {
    for readout in [REPLAYSSM_READOUT_EXACT, REPLAYSSM_READOUT_FULL, REPLAYSSM_READOUT_HIGH] {
        let rig = Rig::new(Spec { readout, layers: 1, ..Spec::default() });
        let mut rng = Rng(18);
        let live = rig.tokens(&mut rng, 2);
        let clean = rig.step(&[Row::new(0, &live)]);
        // The tensors hold four tokens; the row has two, and behind them dt is huge, of either sign.
        let mut garbage = rig.tokens(&mut rng, 2);
        garbage[0][0].dt.fill(encode(rig.spec.dt_dtype, 3e38));
        garbage[1][0].dt.fill(encode(rig.spec.dt_dtype, -3e38));
        let all: Vec<_> = live.iter().chain(&garbage).cloned().collect();
        let rows = [Row::new(0, &all)];
        let io = Inputs::new(&rig.spec, &rig.params[0], &rows, 0);
        let cu = heap([0i32, 2]);
        let mut batch = BatchData::new(&rig, &rows, false, 0);
        let mut d = batch_desc(&mut batch);
        (d.tokens, d.cu_seqlens, d.n_tokens, d.max_tokens) = (0, cu.as_ptr(), 4, 4);
        raw_step(&rig, &d, &io);
        let out = io.outputs(&rig.spec, &rows);
        assert_eq!(out[0][..2], clean[0][..]);
        let poison = Array::poisoned(rig.spec.out, 1).get(0);
        assert!(out[0][2..].iter().flatten().all(|&b| b == poison), "outputs behind the row were written");
        no_faults(&rig);
    }
}

fn batch_desc(data: &mut BatchData) -> replayssm_batch {
    data.desc()
}

#[test]
fn case_25_a_fp32_state_under_bf16_activations_stays_at_fp32_grade() {
    let spec = Spec { layers: 1, softplus: false, bias: false, gate: false, ..Spec::default() };
    let mut rig = Rig::new(spec);
    for h in 0..4 {
        rig.params[0].a.set(2 * h, encode(REPLAYSSM_DTYPE_F32, -0.02));
    }
    let mut oracle = Oracle::new(&rig.spec, &rig.params[0]);
    let mut rng = Rng(19);
    for _ in 0..64 {
        let mut token = rig.token(&mut rng);
        token[0].dt.fill(encode(REPLAYSSM_DTYPE_F32, 0.05));
        oracle.token(&token[0]);
        decode_one(&rig, 0, &token);
    }
    let state: Vec<f64> = rig.export(0, 0, 0, None).into_iter().map(|b| f32::from_bits(b).into()).collect();
    let error = relative(&state, &oracle.state);
    assert!(error < 1e-5, "{error:.2e}");
}

#[test]
fn case_26_softplus_off_without_bias_skip_and_gate() {
    let spec = Spec { layers: 1, softplus: false, bias: false, gate: false, skip: Skip::None, ..Spec::default() };
    for readout in [REPLAYSSM_READOUT_EXACT, REPLAYSSM_READOUT_FULL] {
        let rig = Rig::new(Spec { readout, ..spec.clone() });
        let mut oracle = Oracle::new(&rig.spec, &rig.params[0]);
        let mut rng = Rng(20);
        for _ in 0..50 {
            let mut token = rig.token(&mut rng);
            token[0].dt.fill(encode(REPLAYSSM_DTYPE_F32, 0.1));
            let got: Vec<f64> = decode_one(&rig, 0, &token).into_iter().map(|b| decode(rig.spec.out, b)).collect();
            assert!(relative(&got, &oracle.token(&token[0]).0) < 2e-6);
        }
    }
}

/// Linear attention with a fixed decay: dt = 1 for all, broadcast by strides of 0.
#[test]
fn fixed_decay_by_a_broadcast_dt() {
    let spec = Spec { layers: 1, softplus: false, bias: false, gate: false, skip: Skip::None, ..Spec::default() };
    let rig = Rig::new(spec);
    let mut oracle = Oracle::new(&rig.spec, &rig.params[0]);
    let mut one = Array::poisoned(REPLAYSSM_DTYPE_F32, 1);
    one.set(0, 1f32.to_bits());
    let mut rng = Rng(21);
    for _ in 0..30 {
        let mut token = rig.token(&mut rng);
        token[0].dt.fill(1f32.to_bits());
        let rows = [Row::new(0, &[token.clone()])];
        let io = Inputs::new(&rig.spec, &rig.params[0], &rows, 0);
        let mut args = io.args(&rig.spec);
        args.dt = common::tensor(&one, 0, 0, 0, 0);
        let data = BatchData::new(&rig, &rows, false, 0);
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_mamba2_step(rig.pool, 0, &data.desc(), &args, null()) });
        let got: Vec<f64> = io.outputs(&rig.spec, &rows)[0][0].iter().map(|&b| decode(rig.spec.out, b)).collect();
        assert!(relative(&got, &oracle.token(&token[0]).0) < 2e-6);
        rig.commit(&rows, &[1]);
    }
}

#[test]
fn case_27_a_flush_with_nothing_to_fold_changes_no_byte() {
    for family in FAMILIES {
        for keep in [0usize, 3] {
            let rig = Rig::new(Spec { family, keep, ..Spec::default() });
            let mut rng = Rng(22);
            for token in rig.tokens(&mut rng, 9) {
                decode_one(&rig, 0, &token);
            }
            let row = |rng: &mut Rng| Row { flush: true, ..Row::new(0, &rig.tokens(rng, 1)) };
            rig.step(&[row(&mut rng)]);
            assert_eq!(rig.tags(0, 0)[0], 9 - keep as i64);
            let before = rig.part(REPLAYSSM_COMPONENT_CHECKPOINT, 0, 0);
            let written = rig.stats().checkpoint_bytes_written;
            rig.step(&[row(&mut rng)]);
            assert!(rig.part(REPLAYSSM_COMPONENT_CHECKPOINT, 0, 0) == before);
            assert_eq!(rig.stats().checkpoint_bytes_written, written);
        }
    }
}

/// The records that folds read, of ring 0.
fn records(rig: &Rig) -> Vec<u8> {
    let folded = |kind| kind != REPLAYSSM_COMPONENT_U;
    let rings: Vec<_> = rig.components().into_iter().filter(|c| c.per_ring == 1 && folded(c.kind)).collect();
    rings.iter().flat_map(|c| rig.part(c.kind, 0, 0)).collect()
}

#[test]
fn case_28_decode_and_verify_write_the_same_records() {
    for family in FAMILIES {
        let mut rings = Vec::new();
        for (readout, steps) in [
            (REPLAYSSM_READOUT_EXACT, 1),
            (REPLAYSSM_READOUT_EXACT, 4),
            (REPLAYSSM_READOUT_FULL, 4),
            (REPLAYSSM_READOUT_HIGH, 1),
        ] {
            let rig = Rig::new(Spec { family, readout, schedule: REPLAYSSM_SCHEDULE_NONE, ..Spec::default() });
            for tokens in rig.tokens(&mut Rng(23), 12).chunks(steps) {
                let row = Row::new(0, tokens);
                rig.step(std::slice::from_ref(&row));
                rig.commit(&[row], &[steps as i32]);
            }
            rings.push(records(&rig));
        }
        // And the tail of an extend.
        let rig = Rig::new(Spec { family, ..Spec::default() });
        rig.extend(&[Row::new(0, &rig.tokens(&mut Rng(23), 12))], 12);
        rings.push(records(&rig));
        assert!(rings.iter().all(|r| *r == rings[0]));
    }
}

#[test]
fn case_29_the_same_batch_of_99_rows_gives_one_hash() {
    for family in FAMILIES {
        let mut hashes = Vec::new();
        for run in 0..20 {
            let spec = Spec {
                family,
                slots: 99,
                heads: 16,
                headdim: 16,
                dstate: 32,
                threads: 1 + run % 3,
                window: 5,
                ..Spec::default()
            };
            let rig = Rig::new(Spec { readout: REPLAYSSM_READOUT_HIGH, t_max: 2, ..spec });
            let mut rng = Rng(24);
            let mut bits = Vec::new();
            for _ in 0..6 {
                let rows: Vec<Row> = (0..99).map(|slot| Row::new(slot, &rig.tokens(&mut rng, 2))).collect();
                bits.extend(rig.step(&rows).into_iter().flatten().flatten());
                rig.commit(&rows, &[2; 99]);
            }
            hashes.push(common::hash(bits));
        }
        assert!(hashes.iter().all(|h| *h == hashes[0]), "{hashes:x?}");
    }
}

#[test]
fn case_30_one_descriptor_serves_every_mix() {
    // What a captured graph does: the descriptors stay, the arrays behind them change.
    let rig = Rig::new(Spec { layers: 1, gate: false, ..Spec::default() });
    let mut rng = Rng(25);
    let capacity: Vec<Row> = (0..4).map(|slot| Row::new(slot, &rig.tokens(&mut rng, 4))).collect();
    let mut io = Inputs::new(&rig.spec, &rig.params[0], &capacity, 0);
    let args = io.args(&rig.spec);
    let (mut slots, mut cu, mut flush, mut counts) =
        (heap([0i64; 4]), heap([0i32; 5]), heap([0u8; 4]), heap([0i32; 4]));
    let batch = desc!(replayssm_batch {
        n_rows: 4,
        cu_seqlens: cu.as_ptr(),
        n_tokens: 16,
        slots: ids64(&slots),
        rings: ids64(&slots),
        flush: flush.as_ptr(),
    });
    let commit = desc!(replayssm_commit_args { counts: counts.as_ptr() });
    for _ in 0..120 {
        let mut ids: Vec<i64> = vec![0, 1, 2, 3, -1];
        for slot in &mut slots {
            *slot = ids.remove(rng.below(ids.len()));
        }
        let rows: Vec<Row> = slots
            .iter()
            .map(|&slot| {
                let n = rng.below(5);
                Row { slot, ring: slot, ..Row::new(0, &rig.tokens(&mut rng, n)) }
            })
            .collect();
        for (i, row) in rows.iter().enumerate() {
            cu[i + 1] = cu[i] + row.tokens.len() as i32;
            flush[i] = (rng.below(5) == 0).into();
            counts[i] = rng.below(row.tokens.len() + 1) as i32;
        }
        io.fill(&rows, 0);
        // SAFETY: everything lives until the calls return.
        ok(unsafe { replayssm_mamba2_step(rig.pool, 0, &batch, &args, null()) });
        // SAFETY: as above.
        ok(unsafe { replayssm_commit(rig.slots, &batch, &commit, null()) });
        for (row, &n) in rows.iter().zip(&counts) {
            if row.slot >= 0 && n > 0 {
                rig.extend(&[Row::new(row.slot as usize + 4, &row.tokens[..n as usize])], 0);
            }
        }
        (0..4).for_each(|slot| assert_same_state(&rig, slot, slot + 4));
    }
    no_faults(&rig);
}

#[test]
fn case_31_empty_batches_are_fine() {
    let rig = Rig::new(Spec::default());
    decode_one(&rig, 0, &rig.token(&mut Rng(26)));
    let (state, before) = (rig.export(0, 0, 0, None), rig.stats());
    rig.step(&[]);
    rig.commit(&[], &[]);
    let rows: Vec<Row> = (0..3).map(|slot| Row::new(slot, &[])).collect();
    rig.step(&rows);
    rig.commit(&rows, &[0, 0, 0]);
    let after = rig.stats();
    assert_eq!(
        (after.tokens, after.rows, after.ring_bytes_written),
        (before.tokens, before.rows, before.ring_bytes_written)
    );
    assert!(rig.export(0, 0, 0, None) == state);
    // Tensors may be absent when there is nothing to read.
    let mut args = desc!(replayssm_mamba2_args {});
    for t in [&mut args.x, &mut args.B, &mut args.C, &mut args.dt, &mut args.A, &mut args.out] {
        *t = replayssm_tensor { dtype: REPLAYSSM_DTYPE_BF16, ..ABSENT };
    }
    args.out.dtype = REPLAYSSM_DTYPE_F32;
    let ids = common::no_ids();
    let batch =
        desc!(replayssm_batch { slots: replayssm_ids { dtype: REPLAYSSM_DTYPE_I32, ..ids }, rings: ids, tokens: 1 });
    // SAFETY: everything lives until the call returns.
    ok(unsafe { replayssm_mamba2_step(rig.pool, 0, &batch, &args, null()) });
    no_faults(&rig);
}

#[test]
fn case_32_and_33_rows_and_lengths_within_declared_limits() {
    let rig = Rig::new(Spec { layers: 1, slots: 30, t_max: 6, ..Spec::default() });
    let mut rng = Rng(27);
    let capacity: Vec<Row> = (0..12).map(|slot| Row::new(slot, &rig.tokens(&mut rng, 1))).collect();
    let mut io = Inputs::new(&rig.spec, &rig.params[0], &capacity, 0);
    let args = io.args(&rig.spec);
    let (mut slots, mut cu) = (heap([0i64; 12]), heap([0i32; 13]));
    let batch = desc!(replayssm_batch {
        n_rows: 12,
        cu_seqlens: cu.as_ptr(),
        n_tokens: 12,
        max_tokens: 6,
        slots: ids64(&slots),
        rings: ids64(&slots),
    });
    // 12 rows of one token; 2 of 6 and 10 of none; 5 real rows and 7 of padding.
    for lengths in [[1; 12], [6, 6, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], [2, 1, 3, 1, 2, 0, 0, 0, 0, 0, 0, 0]] {
        let rows: Vec<Row> = lengths
            .iter()
            .enumerate()
            .map(|(i, &n)| {
                let slot = if i >= 5 && n == 0 { -1 } else { i as i64 };
                Row { slot, ring: slot, ..Row::new(0, &rig.tokens(&mut rng, n)) }
            })
            .collect();
        for (i, row) in rows.iter().enumerate() {
            slots[i] = row.slot;
            cu[i + 1] = cu[i] + row.tokens.len() as i32;
        }
        io.fill(&rows, 0);
        // SAFETY: everything lives until the calls return.
        ok(unsafe { replayssm_mamba2_step(rig.pool, 0, &batch, &args, null()) });
        // SAFETY: as above.
        ok(unsafe { replayssm_commit(rig.slots, &batch, null(), null()) });
        for row in rows.iter().filter(|r| !r.tokens.is_empty()) {
            let slot = row.slot as usize;
            let truth = rig.extend(&[Row::new(slot + 12, &row.tokens)], 0);
            let first = cu[row.slot as usize] as usize;
            for (t, truth) in truth[0].iter().enumerate() {
                assert_eq!(&io.output(&rig.spec, first + t), truth);
            }
            assert_same_state(&rig, slot, slot + 12);
        }
    }
    no_faults(&rig);
}

#[test]
fn case_34_what_cannot_be_is_refused_with_a_sentence() {
    let create_slots = |d: replayssm_slots_desc| {
        let (context, mut slots) = (context(backend(), 1).expect("a context"), std::ptr::null_mut());
        // SAFETY: the descriptor and the out-parameter are locals.
        unsafe {
            let status = replayssm_slots_create(context, &d, &mut slots);
            replayssm_slots_destroy(slots);
            replayssm_context_destroy(context);
            (status, message())
        }
    };
    let (status, text) = create_slots(desc!(replayssm_slots_desc { n_slots: 1, window: 3, max_step_tokens: 4 }));
    assert_eq!(status, REPLAYSSM_ERROR_INVALID_ARGUMENT);
    assert_eq!(text, "slots_desc.window is 3; expected at least max_step_tokens, which is 4");

    let rig = Rig::new(Spec::default());
    let create = |d: replayssm_pool_desc| {
        let mut pool = std::ptr::null_mut();
        // SAFETY: descriptors and out-parameters are locals.
        let status = unsafe { replayssm_layers_create(rig.slots, &d, null(), 0, &mut pool) };
        assert!(pool.is_null() || status == REPLAYSSM_OK);
        replayssm_layers_destroy(pool);
        (status, message())
    };
    let good = desc!(replayssm_pool_desc {
        family: REPLAYSSM_FAMILY_MAMBA2,
        n_layers: 1,
        io: REPLAYSSM_DTYPE_BF16,
        nheads: 6,
        headdim: 8,
        dstate: 8,
        ngroups: 3,
    });
    assert_eq!(create(good).0, REPLAYSSM_OK);
    for (d, field) in [
        (replayssm_pool_desc { ngroups: 4, ..good }, "pool_desc.ngroups"),
        (replayssm_pool_desc { nheads: 0, ..good }, "pool_desc.nheads"),
        (replayssm_pool_desc { headdim: 0, ..good }, "pool_desc.headdim"),
        (replayssm_pool_desc { dstate: -1, ..good }, "pool_desc.dstate"),
        (replayssm_pool_desc { dstate: i32::MAX, ..good }, "pool_desc.dstate"),
        (replayssm_pool_desc { K: 128, ..good }, "pool_desc.K"),
        (replayssm_pool_desc { width: 4, ..good }, "pool_desc.width"),
        (replayssm_pool_desc { family: 77, ..good }, "pool_desc.family"),
        (replayssm_pool_desc { family: REPLAYSSM_FAMILY_GDN, ..good }, "pool_desc.nheads"),
        (replayssm_pool_desc { family: 0, ..good }, "pool_desc.family"),
        (replayssm_pool_desc { io: 0, ..good }, "pool_desc.io"),
        (replayssm_pool_desc { format: 9, ..good }, "pool_desc.format"),
        (replayssm_pool_desc { readout: 9, ..good }, "pool_desc.readout"),
        (
            replayssm_pool_desc { readout: REPLAYSSM_READOUT_HIGH, format: REPLAYSSM_FORMAT_F32, ..good },
            "pool_desc.readout",
        ),
        (replayssm_pool_desc { n_layers: 0, ..good }, "pool_desc.n_layers"),
        (replayssm_pool_desc { stochastic_rounding: 1, ..good }, "pool_desc.stochastic_rounding"),
        (replayssm_pool_desc { reserved: 1, ..good }, "pool_desc.reserved"),
    ] {
        let (status, text) = create(d);
        assert!(
            status == REPLAYSSM_ERROR_INVALID_ARGUMENT || status == REPLAYSSM_ERROR_UNSUPPORTED,
            "{field}: {status}"
        );
        assert!(text.starts_with(field), "{text}");
    }
    // T over T_max: at the call where the host sees it, a sticky bit where only the device does.
    let rows = [Row::new(0, &rig.tokens(&mut Rng(28), 5))];
    let data = BatchData::new(&rig, &rows, false, 0);
    let io = Inputs::new(&rig.spec, &rig.params[0], &rows, 0);
    let args = io.args(&rig.spec);
    let mut batch = data.desc();
    // SAFETY: everything lives until the call returns.
    let status = unsafe { replayssm_mamba2_step(rig.pool, 0, &batch, &args, null()) };
    assert_eq!((status, &message()[..18]), (REPLAYSSM_ERROR_INVALID_ARGUMENT, "batch.tokens is 5;"));
    let cu = heap([0i32, 5]);
    (batch.tokens, batch.cu_seqlens, batch.n_tokens) = (0, cu.as_ptr(), 5);
    // SAFETY: everything lives until the calls return.
    ok(unsafe { replayssm_mamba2_step(rig.pool, 0, &batch, &args, null()) });
    assert_eq!(rig.faults(true).bits, REPLAYSSM_FAULT_LENGTH);
    assert!(io.outputs(&rig.spec, &rows)[0].iter().flatten().all(|&b| b == 0), "a refused row gives zeros");
    // SAFETY: as above.
    ok(unsafe { replayssm_commit(rig.slots, &batch, null(), null()) });
    assert_eq!(rig.cursor(0).position, 0, "a commit of a row that no step can have brought");
}

#[test]
fn case_35_counts_outside_the_row_are_clamped_and_flagged() {
    let rig = Rig::new(Spec::default());
    let mut rng = Rng(29);
    for (count, taken) in [(9, 3), (-2, 0), (i32::MAX, 3), (i32::MIN, 0)] {
        let before = rig.cursor(0).position;
        let rows = [Row::new(0, &rig.tokens(&mut rng, 3))];
        rig.step(&rows);
        rig.commit(&rows, &[count]);
        assert_eq!(rig.cursor(0).position, before + taken);
        assert_eq!(rig.faults(true).bits, REPLAYSSM_FAULT_COUNT, "{count}");
        if taken > 0 {
            rig.extend(&[Row::new(1, &rows[0].tokens)], 0);
        }
        assert_same_state(&rig, 0, 1);
    }
}

/// An extend that is not committed leaves tags past the position: every call there writes nothing and says so.
#[test]
fn between_an_extend_and_its_commit_everything_else_is_a_fault() {
    let rig = Rig::new(Spec { layers: 1, ..Spec::default() });
    let mut rng = Rng(30);
    let rows = [Row::new(0, &rig.tokens(&mut rng, 9))];
    rig.layer(0, &rows, true, 0);
    let bytes = rig.part(REPLAYSSM_COMPONENT_CHECKPOINT, 0, 0);
    let ring = rig.part(REPLAYSSM_COMPONENT_X, 0, 0);
    let out = rig.step(&[Row::new(0, &rig.tokens(&mut rng, 2))]);
    assert!(out[0].iter().flatten().all(|&b| b == 0));
    assert_eq!(rig.faults(true).bits, REPLAYSSM_FAULT_POSITION);
    rig.layer(0, &rows, true, 0);
    assert_eq!(rig.faults(true).bits, REPLAYSSM_FAULT_POSITION);
    let exported = rig.export(0, 0, 0, None);
    assert!(exported.iter().all(|&b| b == 0x7FC0_1234));
    assert_eq!(rig.faults(true).bits, REPLAYSSM_FAULT_POSITION);
    assert!(!rig.rewind(0, 0, 1));
    assert_eq!(rig.faults(true).bits, REPLAYSSM_FAULT_REWIND);
    assert!(rig.part(REPLAYSSM_COMPONENT_CHECKPOINT, 0, 0) == bytes);
    assert!(rig.part(REPLAYSSM_COMPONENT_X, 0, 0) == ring);
    rig.reset(0, 0, 0);
    decode_one(&rig, 0, &rig.token(&mut rng));
    no_faults(&rig);
}

/// Nor does an extend that is a fault leave its last tokens in the ring.
#[test]
fn a_faulty_extend_keeps_no_tail() {
    for family in FAMILIES {
        let rig = Rig::new(Spec { family, layers: 1, keep: 3, ..Spec::default() });
        let mut rng = Rng(130);
        let [first, second] = [0; 2].map(|_| [Row::new(0, &rig.tokens(&mut rng, 9))]);
        let records = || -> Vec<Vec<u8>> {
            let of_rings = rig.components().into_iter().filter(|c| c.per_ring == 1);
            of_rings.map(|c| rig.part(c.kind, 0, 0)).collect()
        };
        let empty = records();
        rig.layer(0, &first, true, 3);
        no_faults(&rig);
        let before = records();
        assert!(before != empty, "the first one keeps its tail");
        rig.layer(0, &second, true, 3);
        assert_eq!(rig.faults(true).bits, REPLAYSSM_FAULT_POSITION);
        assert!(records() == before, "family {family}");
    }
}

/// Imports of every dtype and orientation, and an in-place conversion, give the state that was meant.
#[test]
fn imports_and_exports_in_every_dtype_and_orientation() {
    for format in [REPLAYSSM_FORMAT_F32, REPLAYSSM_FORMAT_SPLIT32] {
        let rig = Rig::new(Spec { format, layers: 2, slots: 4, ..Spec::default() });
        let (h, d, n) = (4, 20, 40);
        let mut rng = Rng(31);
        for dtype in [REPLAYSSM_DTYPE_F32, REPLAYSSM_DTYPE_BF16, REPLAYSSM_DTYPE_F16] {
            for orientation in [REPLAYSSM_STATE_ROW_MAJOR, REPLAYSSM_STATE_COL_MAJOR] {
                // Two entries, both layers, gaps between heads.
                let head = d * n + 7;
                let values: Vec<u32> = (0..2 * 2 * h * head).map(|_| encode(dtype, rng.normal())).collect();
                let mut array = Array::poisoned(dtype, values.len());
                values.iter().enumerate().for_each(|(i, &v)| array.set(i, v));
                let (slots, rings) = (heap([3i64, 1]), heap([0i64, 2]));
                let list = desc!(replayssm_list { n: 2, slots: ids64(&slots), rings: ids64(&rings) });
                let position = heap([40i64, 50]);
                let state = desc!(replayssm_state {
                    dtype: dtype,
                    orientation: orientation,
                    layer: -1,
                    data: array.at(0),
                    stride_head: head as i64,
                });
                // SAFETY: everything lives until the call returns.
                ok(unsafe { replayssm_import(rig.pool, &list, position.as_ptr(), &state, null()) });
                for (entry, (slot, ring)) in [(3, 0), (1, 2)].into_iter().enumerate() {
                    assert_eq!(rig.cursor(ring).position, position[entry]);
                    for layer in 0..2 {
                        let got = rig.export(layer, slot, ring, None);
                        for (i, &bits) in got.iter().enumerate() {
                            let (hh, dd, nn) = (i / (d * n), i / n % d, i % n);
                            let inner = if orientation == 0 { dd * n + nn } else { nn * d + dd };
                            let source = values[((entry * 2 + layer) * h + hh) * head + inner];
                            assert_eq!(f64::from(f32::from_bits(bits)), decode(dtype, source));
                        }
                    }
                }
                // And back out in the same shape: the same bits, the gaps untouched.
                let out = Array::poisoned(dtype, values.len());
                let dst = replayssm_state { data: out.at(0), ..state };
                // SAFETY: everything lives until the call returns.
                ok(unsafe { replayssm_export(rig.pool, &list, null(), &dst, null()) });
                for (i, &value) in values.iter().enumerate() {
                    let gap = i % head >= d * n;
                    assert_eq!(out.get(i), if gap { Array::poisoned(dtype, 1).get(0) } else { value }, "element {i}");
                }
            }
        }
        // In place: the engine writes fp32 into the checkpoint itself.
        let c = rig.component(REPLAYSSM_COMPONENT_CHECKPOINT);
        let values: Vec<f32> = (0..h * d * n).map(|_| rng.normal() as f32).collect();
        for layer in 0..2 {
            poke(address(&c, layer, 2), &values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<_>>());
        }
        let (id, position) = ([2i64], [7i64]);
        let list = desc!(replayssm_list { n: 1, place: REPLAYSSM_WHERE_HOST, slots: ids64(&id), rings: ids64(&id) });
        let args = desc!(replayssm_reset_args { keep_checkpoint: 1, convert: 1, position: position.as_ptr() });
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_reset(rig.slots, &list, &args, null()) });
        for layer in 0..2 {
            let got = rig.export(layer, 2, 2, None);
            assert!(got.iter().zip(&values).all(|(g, v)| *g == v.to_bits()), "format {format}");
        }
        no_faults(&rig);
    }
}

/// int32 ids with a stride, rings of their own numbers.
#[test]
fn ids_of_both_widths_and_strides() {
    let rig = Rig::new(Spec { layers: 1, slots: 6, rings: 3, ..Spec::default() });
    let mut rng = Rng(32);
    let tokens = rig.tokens(&mut rng, 4);
    let rows = [Row { slot: 5, ring: 1, ..Row::new(0, &tokens) }, Row { slot: 2, ring: 0, ..Row::new(0, &tokens) }];
    let io = Inputs::new(&rig.spec, &rig.params[0], &rows, 0);
    let slots = heap([5i32, -9, 2, -9]);
    let rings = heap([1i64, 99, 99, 0, 99, 99]);
    let batch = desc!(replayssm_batch {
        n_rows: 2,
        tokens: 4,
        slots: replayssm_ids { data: slots.as_ptr().cast(), stride: 2, dtype: REPLAYSSM_DTYPE_I32, reserved: 0 },
        rings: replayssm_ids { data: rings.as_ptr().cast(), stride: 3, dtype: REPLAYSSM_DTYPE_I64, reserved: 0 },
    });
    raw_step(&rig, &batch, &io);
    // SAFETY: everything lives until the call returns.
    ok(unsafe { replayssm_commit(rig.slots, &batch, null(), null()) });
    let out = io.outputs(&rig.spec, &rows);
    assert!(out[0] == out[1] && out[0].iter().flatten().any(|&b| b != 0));
    assert_eq!([0, 1, 2].map(|ring| rig.cursor(ring).position), [4, 4, 0]);
    assert!(rig.export(0, 5, 1, None) == rig.export(0, 2, 0, None));
    no_faults(&rig);
}

/// Statistics count what is loaded and stored, where it is.
#[test]
fn statistics_are_the_bytes_that_moved() {
    for (format, readout, read) in [
        (REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_HIGH, 2u64),
        (REPLAYSSM_FORMAT_SPLIT32, REPLAYSSM_READOUT_FULL, 4),
        (REPLAYSSM_FORMAT_F32, REPLAYSSM_READOUT_EXACT, 4),
    ] {
        let spec = Spec { format, readout, window: 4, t_max: 2, schedule: REPLAYSSM_SCHEDULE_NONE, ..Spec::default() };
        let rig = Rig::new(spec);
        // x and gates per head, B per group: a record is read as it is written, once.
        let (elements, record) = (4 * 20 * 40u64, 4 * (20 * 2 + 8) + 2 * 40 * 2);
        let mut rng = Rng(33);
        let rows = |rng: &mut Rng, n| [Row::new(0, &rig.tokens(rng, n))];
        let mut before = rig.stats();
        let mut delta = || {
            let now = rig.stats();
            let d = [
                now.checkpoint_bytes_read - before.checkpoint_bytes_read,
                now.checkpoint_bytes_written - before.checkpoint_bytes_written,
                now.ring_bytes_written - before.ring_bytes_written,
                now.flushes - before.flushes,
            ];
            before = now;
            d
        };
        let first = rows(&mut rng, 2);
        rig.step(&first);
        assert_eq!(delta(), [elements * read, 0, 2 * record, 0], "two tokens, no history");
        rig.commit(&first, &[2]);
        let second = rows(&mut rng, 2);
        let ring_read = rig.stats().ring_bytes_read;
        rig.step(&second);
        // How often a record is loaded is a kernel's affair.
        let loaded = rig.stats().ring_bytes_read - ring_read;
        assert!(loaded == 2 * record || cuda() && loaded > 2 * record, "two records of history");
        rig.commit(&second, &[1]);
        assert_eq!(delta(), [elements * read, 0, 2 * record, 0], "2 + 2 fit the window");
        let third = rows(&mut rng, 2);
        rig.step(&third);
        // 3 + 2 do not: a fold reads and writes everything once, and the readout goes on from there.
        assert_eq!(delta(), [elements * 4, elements * 4, 2 * record, 4 * 2], "a fold");
        rig.commit(&third, &[0]);
        let stats = rig.stats();
        assert_eq!((stats.steps, stats.rows, stats.tokens, stats.accepted), (3, 3, 6, 3));
        rig.extend(&[Row::new(1, &rig.tokens(&mut rng, 3))], 0);
        assert_eq!(delta(), [elements * 4, elements * 4, 0, 0], "extend: one read and one write");
    }
}

/// Memory that was lent and never reset holds anything: tags of -1 among it.
#[test]
fn a_negative_tag_is_never_believed() {
    let rig = Rig::new(Spec { layers: 1, ..Spec::default() });
    let c = rig.component(REPLAYSSM_COMPONENT_TAGS);
    fill(address(&c, 0, 0), 0xFF, c.bytes as usize);
    let out = rig.step(&[Row::new(0, &rig.tokens(&mut Rng(40), 2))]);
    assert!(out[0].iter().flatten().all(|&b| b == 0));
    assert_eq!(rig.faults(true).bits, REPLAYSSM_FAULT_POSITION);
    assert!(rig.export(0, 0, 0, Some(-1)).iter().all(|&b| b == 0x7FC0_1234));
    assert_eq!(rig.faults(true).bits, REPLAYSSM_FAULT_POSITION);
}

/// The tiles of a head may stand at different positions, as after a fold that was cut short.
#[test]
fn tiles_of_a_head_may_stand_at_different_positions() {
    for (family, format) in common::FAMILIES.into_iter().zip([REPLAYSSM_FORMAT_F32; 3]) {
        for readout in [REPLAYSSM_READOUT_EXACT, REPLAYSSM_READOUT_FULL] {
            let spec = Spec { family, format, readout, schedule: REPLAYSSM_SCHEDULE_NONE, ..Spec::default() };
            let rig = Rig::new(spec.clone());
            let mut rng = Rng(41);
            let tokens = rig.tokens(&mut rng, 9);
            for pair in tokens.chunks(3) {
                let rows = [Row::new(0, pair), Row::new(1, pair)];
                rig.step(&rows);
                rig.commit(&rows, &[3, 3]);
            }
            // Slot 1 folds; its second tile of every head (rows 16 to 19) and that tile's tag move to slot 0.
            let last = rig.tokens(&mut rng, 3);
            rig.step(&[Row { flush: true, ..Row::new(1, &last) }]);
            let (states, tags) =
                (rig.component(REPLAYSSM_COMPONENT_CHECKPOINT), rig.component(REPLAYSSM_COMPONENT_TAGS));
            for head in 0..spec.heads {
                let row = spec.dstate * 4;
                let copies = [(states, (head * spec.headdim + 16) * row, 4 * row), (tags, (2 * head + 1) * 8, 8)];
                for (c, offset, bytes) in copies {
                    poke(address(&c, 0, 0) + offset, &peek(address(&c, 0, 1) + offset, bytes));
                }
            }
            assert_eq!(rig.tags(0, 0)[..2], [0, 9]);
            let rows = [Row::new(0, &last), Row::new(1, &last)];
            let out = rig.step(&rows);
            if readout == REPLAYSSM_READOUT_EXACT {
                assert!(out[0] == out[1], "family {family}");
            } else {
                let values = |o: &[Vec<u32>]| o.iter().flatten().map(|&b| decode(spec.out, b)).collect::<Vec<_>>();
                assert!(relative(&values(&out[0]), &values(&out[1])) < 2e-6, "family {family}");
            }
            rig.commit(&rows, &[3, 3]);
            assert_same_state(&rig, 0, 1);
            no_faults(&rig);
        }
    }
}

/// What overlaps, or is named twice, is refused before anything happens.
#[test]
fn overlaps_and_repetitions_are_refused() {
    let rig = Rig::new(Spec { layers: 1, ..Spec::default() });
    let rows = [Row::new(0, &rig.tokens(&mut Rng(42), 2)), Row::new(1, &rig.tokens(&mut Rng(43), 2))];
    let io = Inputs::new(&rig.spec, &rig.params[0], &rows, 0);
    let data = BatchData::new(&rig, &rows, false, 0);
    let mut args = io.args(&rig.spec);
    (args.out.stride_token, args.out.stride_head) = (20, 20);
    // SAFETY: everything lives until the call returns.
    let status = unsafe { replayssm_mamba2_step(rig.pool, 0, &data.desc(), &args, null()) };
    assert_eq!(status, REPLAYSSM_ERROR_INVALID_ARGUMENT);
    assert!(message().starts_with("args.out.stride_"), "{}", message());

    let ids = [2i64, -1, 2];
    let list = desc!(replayssm_list { n: 3, place: REPLAYSSM_WHERE_HOST, slots: ids64(&ids), rings: ids64(&ids) });
    let n = [1, -7, 1];
    // SAFETY: everything lives until the calls return.
    let statuses = unsafe {
        [
            replayssm_reset(rig.slots, &list, null(), null()),
            replayssm_rewind(rig.slots, &list, n.as_ptr(), std::ptr::null_mut(), null()),
        ]
    };
    assert_eq!(statuses, [REPLAYSSM_ERROR_INVALID_ARGUMENT; 2]);
    assert_eq!(message(), "list.slots[2] is 2; expected an id that entry 0 does not name");
    // A skipped entry's other values do not matter.
    let (ids, position) = ([2i64, -1], [5i64, -5]);
    let list = desc!(replayssm_list { n: 2, place: REPLAYSSM_WHERE_HOST, slots: ids64(&ids), rings: ids64(&ids) });
    let reset = desc!(replayssm_reset_args { position: position.as_ptr() });
    // SAFETY: everything lives until the call returns.
    ok(unsafe { replayssm_reset(rig.slots, &list, &reset, null()) });
    assert_eq!(rig.cursor(2).position, 5);

    // Lent memory in which a layer's slots and a slot's layers would share bytes.
    let mut memory = vec![0u64; 1 << 16];
    let pool = desc!(replayssm_pool_desc {
        family: REPLAYSSM_FAMILY_MAMBA2,
        n_layers: 3,
        io: REPLAYSSM_DTYPE_BF16,
        nheads: 1,
        headdim: 16,
        dstate: 16,
        ngroups: 1,
    });
    let base = (memory.as_mut_ptr() as usize).next_multiple_of(16) as *mut std::ffi::c_void;
    for (layer, slot, fits) in [(1024, 1024, false), (8192, 1024, true), (1024, 3072, true), (4096, 1024, false)] {
        let lent = desc!(replayssm_lent {
            kind: REPLAYSSM_COMPONENT_CHECKPOINT,
            base: base,
            layer_stride_bytes: layer,
            slot_stride_bytes: slot,
        });
        let mut handle = std::ptr::null_mut();
        // SAFETY: descriptors and out-parameters are locals; the memory outlives the pool.
        let status = unsafe { replayssm_layers_create(rig.slots, &pool, &lent, 1, &mut handle) };
        assert_eq!(status == REPLAYSSM_OK, fits, "layers {layer}, slots {slot}: {}", message());
        replayssm_layers_destroy(handle);
    }
}

/// A padding id may lie beyond every count, and the row's other id may be anything.
#[test]
fn null_rows_are_silent_whatever_their_other_id() {
    let rig = Rig::new(Spec { layers: 1, ..Spec::default() });
    let rows: Vec<Row> = [(1000, 1000), (-1, 5000), (5000, -1), (0, 0)]
        .iter()
        .map(|&(slot, ring)| Row { slot, ring, ..Row::new(0, &rig.tokens(&mut Rng(44), 1)) })
        .collect();
    let io = Inputs::new(&rig.spec, &rig.params[0], &rows, 0);
    let data = BatchData::new(&rig, &rows, false, 0);
    let mut batch = data.desc();
    (batch.flags, batch.null_id) = (REPLAYSSM_BATCH_NULL_ID, 1000);
    raw_step(&rig, &batch, &io);
    // SAFETY: everything lives until the call returns.
    ok(unsafe { replayssm_commit(rig.slots, &batch, null(), null()) });
    no_faults(&rig);
    assert_eq!(rig.cursor(0).position, 1);
}

/// Positions end at 2^60; a commit does not pass it.
#[test]
fn positions_end_where_the_header_says() {
    let rig = Rig::new(Spec { layers: 1, ..Spec::default() });
    rig.reset(0, 0, (1 << 60) - 1);
    decode_one(&rig, 0, &rig.token(&mut Rng(45)));
    assert_eq!((rig.cursor(0).position, rig.faults(true).bits), (1 << 60, 0));
    decode_one(&rig, 0, &rig.token(&mut Rng(46)));
    assert_eq!((rig.cursor(0).position, rig.faults(true).bits), (1 << 60, REPLAYSSM_FAULT_POSITION));
    decode_one(&rig, 0, &rig.token(&mut Rng(47)));
    assert_eq!(rig.faults(true).bits, REPLAYSSM_FAULT_POSITION, "and nothing else");
}
