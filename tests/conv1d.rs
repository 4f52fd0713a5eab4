//! The short convolution: outputs against fp64, windows and outputs against `extend` by bytes, rollback, sections, in place.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use std::ptr::{null, null_mut};

use common::device::{backend, context, cuda};
use common::{ABSENT, Array, Rng, decode, encode, heap, ids64, message, ok, size_of_dtype, tensor};
use replayssm::ffi::*;

#[global_allocator]
static HEAP: common::device::Heap = common::device::Heap::ON_CUDA;

struct Conv {
    context: *mut replayssm_context,
    slots: *mut replayssm_slots,
    pool: *mut replayssm_layers,
    io: i32,
    channels: usize,
    width: usize,
    sections: Vec<i32>,
    weight: Array,
    bias: Option<Array>,
    silu: bool,
    parts: i32,
}

impl Drop for Conv {
    fn drop(&mut self) {
        replayssm_layers_destroy(self.pool);
        replayssm_slots_destroy(self.slots);
        replayssm_context_destroy(self.context);
    }
}

#[derive(Clone)]
struct Shape {
    io: i32,
    sections: Vec<i32>,
    width: usize,
    t_max: i32,
    keep: i32,
    bias: bool,
    silu: bool,
    threads: i32,
    parts: i32,
}

impl Default for Shape {
    fn default() -> Self {
        Shape {
            io: REPLAYSSM_DTYPE_BF16,
            sections: vec![150, 20, 7],
            width: 4,
            t_max: 4,
            keep: 0,
            bias: true,
            silu: true,
            threads: 1,
            parts: 1,
        }
    }
}

type Tokens = Vec<Vec<u32>>;

impl Conv {
    fn new(s: &Shape) -> Self {
        let channels = s.sections.iter().sum::<i32>() as usize;
        let context = context(backend(), s.threads).unwrap_or_else(|error| panic!("{error}"));
        let (mut slots, mut pool) = (null_mut(), null_mut());
        let d = desc!(replayssm_slots_desc { n_slots: 6, max_step_tokens: s.t_max, min_rewind: s.keep });
        let p = desc!(replayssm_pool_desc {
            family: REPLAYSSM_FAMILY_CONV1D,
            n_layers: 2,
            io: s.io,
            channels: channels as i32,
            width: s.width as i32,
            n_sections: s.sections.len() as i32,
            section_channels: s.sections.as_ptr(),
        });
        // SAFETY: descriptors and out-parameters are locals.
        unsafe {
            ok(replayssm_slots_create(context, &d, &mut slots));
            ok(replayssm_layers_create(slots, &p, null(), 0, &mut pool));
        }
        let mut rng = Rng(99);
        let mut weight = Array::poisoned(REPLAYSSM_DTYPE_F32, channels * 5);
        let mut bias = Array::poisoned(REPLAYSSM_DTYPE_F16, channels);
        for c in 0..channels {
            for k in 0..s.width {
                weight.set(c * 5 + k, encode(REPLAYSSM_DTYPE_F32, rng.normal()));
            }
            bias.set(c, encode(REPLAYSSM_DTYPE_F16, rng.normal()));
        }
        let bias = s.bias.then_some(bias);
        let (io, width, silu, parts) = (s.io, s.width, s.silu, if cuda() { 1 } else { s.parts });
        Conv { context, slots, pool, io, channels, width, sections: s.sections.clone(), weight, bias, silu, parts }
    }

    fn tokens(&self, rng: &mut Rng, n: usize) -> Tokens {
        (0..n).map(|_| (0..self.channels).map(|_| encode(self.io, rng.normal())).collect()).collect()
    }

    /// Distance of sections: the widest, and a gap.
    fn section(&self) -> usize {
        *self.sections.iter().max().unwrap() as usize + 3
    }

    fn places(&self) -> Vec<usize> {
        let mut places = Vec::new();
        for (s, &n) in self.sections.iter().enumerate() {
            places.extend((0..n as usize).map(|c| s * self.section() + c));
        }
        places
    }

    /// One layer's call on rows of (slot, tokens), packed. `in_place`: the output is the input.
    fn call(&self, layer: i32, rows: &[(i64, Tokens)], extend: bool, tail: i32, in_place: bool) -> Vec<Tokens> {
        let stride = self.section() * self.sections.len() + 1;
        let n: usize = rows.iter().map(|r| r.1.len()).sum();
        let mut x = Array::poisoned(self.io, n.max(1) * stride);
        for (t, token) in rows.iter().flat_map(|r| &r.1).enumerate() {
            for (&place, &bits) in self.places().iter().zip(token) {
                x.set(t * stride + place, bits);
            }
        }
        let out = Array::poisoned(self.io, n.max(1) * stride);
        let target = if in_place { &x } else { &out };
        let args = desc!(replayssm_conv1d_args {
            no_silu: i32::from(!self.silu),
            x: tensor(&x, 0, 0, stride, self.section()),
            out: tensor(target, 0, 0, stride, self.section()),
            weight: tensor(&self.weight, 0, 0, 0, 5),
            bias: self.bias.as_ref().map_or(ABSENT, |b| tensor(b, 0, 0, 0, 1)),
        });
        let batch = Batch::new(rows, extend, tail);
        for part in 0..self.parts {
            let exec = desc!(replayssm_exec { part: part, n_parts: self.parts });
            // SAFETY: everything lives until the call returns.
            ok(unsafe {
                if extend {
                    replayssm_conv1d_extend(self.pool, layer, &batch.desc(), &args, &exec)
                } else {
                    replayssm_conv1d_step(self.pool, layer, &batch.desc(), &args, &exec)
                }
            });
        }
        let mut t = 0;
        let mut result = Vec::new();
        for row in rows {
            let mut tokens = Vec::new();
            for _ in &row.1 {
                tokens.push(self.places().iter().map(|&p| target.get(t * stride + p)).collect());
                t += 1;
            }
            result.push(tokens);
        }
        result
    }

    fn commit(&self, rows: &[(i64, Tokens)], extend: bool, tail: i32, counts: Option<&[i32]>) {
        let batch = Batch::new(rows, extend, tail);
        let counts = counts.map(<[i32]>::to_vec);
        let args = desc!(replayssm_commit_args { counts: counts.as_ref().map_or(null(), |c| c.as_ptr()) });
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_commit(self.slots, &batch.desc(), &args, null()) });
    }

    /// The window of a slot, `[channels][width - 1]`.
    fn window(&self, layer: i32, slot: i64, at: Option<i64>) -> Vec<u32> {
        let n = self.channels * (self.width - 1);
        let data = Array::poisoned(self.io, n);
        let ids = heap([slot]);
        let list = desc!(replayssm_list { n: 1, slots: ids64(&ids), rings: ids64(&ids) });
        let dst = desc!(replayssm_state { dtype: self.io, layer: layer, data: data.at(0) });
        let at = at.map(|at| heap([at]));
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_export(self.pool, &list, at.as_ref().map_or(null(), |a| a.as_ptr()), &dst, null()) });
        (0..n).map(|i| data.get(i)).collect()
    }

    fn list(ids: &[i64]) -> replayssm_list {
        desc!(replayssm_list { n: ids.len() as i32, place: REPLAYSSM_WHERE_HOST, slots: ids64(ids), rings: ids64(ids) })
    }

    fn reset(&self, slot: i64) {
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_reset(self.slots, &Self::list(&[slot]), null(), null()) });
    }

    fn faults(&self) -> u32 {
        let mut report = desc!(replayssm_report {});
        // SAFETY: the report is a local.
        ok(unsafe { replayssm_check(self.slots, 1, &mut report) });
        report.bits
    }

    /// fp64, from the formula.
    fn oracle(&self, log: &Tokens) -> Vec<Vec<f64>> {
        (0..log.len())
            .map(|t| {
                (0..self.channels)
                    .map(|c| {
                        let mut y = self.bias.as_ref().map_or(0.0, |b| decode(REPLAYSSM_DTYPE_F16, b.get(c)));
                        for k in 0..self.width {
                            if let Some(p) = (t + k + 1).checked_sub(self.width) {
                                y += decode(REPLAYSSM_DTYPE_F32, self.weight.get(c * 5 + k))
                                    * decode(self.io, log[p][c]);
                            }
                        }
                        if self.silu { y / (1.0 + (-y).exp()) } else { y }
                    })
                    .collect()
            })
            .collect()
    }
}

struct Batch {
    ids: Vec<i64>,
    cu: Vec<i32>,
    extend: bool,
    tail: i32,
}

impl Batch {
    fn new(rows: &[(i64, Tokens)], extend: bool, tail: i32) -> Self {
        let mut cu = vec![0];
        rows.iter().for_each(|r| cu.push(cu.last().unwrap() + r.1.len() as i32));
        Batch { ids: rows.iter().map(|r| r.0).collect(), cu, extend, tail }
    }
    fn desc(&self) -> replayssm_batch {
        desc!(replayssm_batch {
            flags: if self.extend { REPLAYSSM_BATCH_EXTEND } else { 0 },
            n_rows: self.ids.len() as i32,
            cu_seqlens: self.cu.as_ptr(),
            n_tokens: i64::from(*self.cu.last().unwrap()),
            slots: ids64(&self.ids),
            rings: ids64(&self.ids),
            keep_tail: self.tail,
        })
    }
}

/// Half an ulp of the output dtype, and what an fp32 chain of four taps and a SiLU can lose.
fn tolerance(io: i32, y: f64) -> f64 {
    let half_ulp = match io {
        REPLAYSSM_DTYPE_BF16 => 2f64.powi(-8),
        REPLAYSSM_DTYPE_F16 => 2f64.powi(-11),
        _ => 2f64.powi(-24),
    };
    half_ulp * 1.01 * y.abs()
        + 8.0 * 2f64.powi(-24) * 4.0
        + if io == REPLAYSSM_DTYPE_F16 { 2f64.powi(-25) } else { 0.0 }
}

#[test]
fn outputs_are_the_convolution_and_windows_equal_extends() {
    let base = Shape::default();
    let shapes = [
        base.clone(),
        Shape { io: REPLAYSSM_DTYPE_F32, width: 2, bias: false, ..base.clone() },
        Shape { io: REPLAYSSM_DTYPE_F16, width: 3, silu: false, t_max: 7, keep: 3, ..base.clone() },
        Shape { sections: vec![300], t_max: 1, threads: 2, ..base.clone() },
        Shape { sections: vec![1], width: 2, t_max: 16, ..base.clone() },
        Shape { parts: 3, keep: 9, ..base },
    ];
    for shape in shapes {
        let conv = Conv::new(&shape);
        let mut rng = Rng(7);
        let mut log: Tokens = Vec::new();
        for round in 0..80 {
            let n = 1 + rng.below(shape.t_max as usize);
            let row = [(0i64, conv.tokens(&mut rng, n))];
            if rng.below(3) == 0 {
                conv.call(0, &[(0, conv.tokens(&mut rng, n))], false, 0, false);
            }
            let out: Vec<_> = (0..2).map(|layer| conv.call(layer, &row, false, 0, round % 2 == 0)).collect();
            assert!(out[0] == out[1]);
            let accepted = rng.below(n + 1);
            conv.commit(&row, false, 0, Some(&[accepted as i32]));
            log.extend(row[0].1[..accepted].iter().cloned());
            for (got, want) in out[0][0].iter().zip(conv.oracle(&log).iter().skip(log.len() - accepted)) {
                for (&g, &w) in got.iter().zip(want) {
                    let g = decode(shape.io, g);
                    assert!((g - w).abs() <= tolerance(shape.io, w), "{g} for {w}");
                }
            }
            if accepted > 0 {
                let twin = [(1i64, row[0].1[..accepted].to_vec())];
                let truth: Vec<_> = (0..2)
                    .map(|layer| conv.call(layer, &twin, true, (round % 3).min(accepted as i32), false))
                    .collect();
                assert_eq!(truth[0][0][..], out[0][0][..accepted], "a step's outputs differ from extend's");
                conv.commit(&twin, true, (round % 3).min(accepted as i32), None);
            }
            for layer in 0..2 {
                let window = conv.window(layer, 0, None);
                assert!(window == conv.window(layer, 1, None));
                // And the window is the last inputs, zeros before position 0.
                for (i, &bits) in window.iter().enumerate() {
                    let (c, back) = (i / (conv.width - 1), conv.width - 1 - i % (conv.width - 1));
                    let want = log.len().checked_sub(back).map_or(0, |p| log[p][c]);
                    assert_eq!(bits, want);
                }
            }
        }
        assert_eq!(conv.faults(), 0);
    }
}

#[test]
fn case_37_the_window_after_fewer_accepted_tokens_than_taps() {
    let conv = Conv::new(&Shape::default());
    let mut rng = Rng(8);
    let tokens = conv.tokens(&mut rng, 4);
    for accepted in 0..=4 {
        conv.reset(0);
        conv.reset(1);
        let row = [(0i64, tokens.clone())];
        conv.call(0, &row, false, 0, false);
        conv.commit(&row, false, 0, Some(&[accepted]));
        let twin = [(1i64, tokens[..accepted as usize].to_vec())];
        conv.call(0, &twin, true, 0, false);
        conv.commit(&twin, true, 0, None);
        assert!(conv.window(0, 0, None) == conv.window(0, 1, None), "{accepted} accepted");
    }
}

#[test]
fn a_rewind_restores_the_window_as_far_as_min_rewind_reaches() {
    let shape = Shape { keep: 5, t_max: 2, ..Shape::default() };
    let conv = Conv::new(&shape);
    let mut rng = Rng(9);
    let mut windows = vec![conv.window(0, 0, None)];
    for _ in 0..30 {
        let row = [(0i64, conv.tokens(&mut rng, 1))];
        (0..2).for_each(|layer| drop(conv.call(layer, &row, false, 0, false)));
        conv.commit(&row, false, 0, Some(&[1]));
        windows.push(conv.window(0, 0, None));
    }
    for at in 25..=30 {
        assert!(conv.window(0, 0, Some(at)) == windows[at as usize]);
    }
    // The ring has 3 + 5 + 2 rows: the window in front of token 23 is the oldest it holds.
    assert!(conv.window(0, 0, Some(23)) == windows[23]);
    assert_eq!(conv.faults(), 0);
    let refused = conv.window(0, 0, Some(22));
    assert!(refused.iter().all(|&b| b == Array::poisoned(conv.io, 1).get(0)), "a refused export wrote");
    assert_eq!(conv.faults(), REPLAYSSM_FAULT_POSITION);
    let (back, mut done) = ([5], heap([-1]));
    // SAFETY: everything lives until the call returns.
    ok(unsafe { replayssm_rewind(conv.slots, &Conv::list(&[0]), back.as_ptr(), done.as_mut_ptr(), null()) });
    assert_eq!(done, [1]);
    assert!(conv.window(0, 0, None) == windows[25]);
    // Deeper than any window that is held: with a host list and no `done`, an error that says what is held.
    let deep = [20];
    // SAFETY: everything lives until the call returns.
    let status = unsafe { replayssm_rewind(conv.slots, &Conv::list(&[0]), deep.as_ptr(), null_mut(), null()) };
    if cuda() {
        // What is held is device data: a fault, as with `done`.
        ok(status);
        assert_eq!(conv.faults(), REPLAYSSM_FAULT_REWIND);
    } else {
        assert_eq!(status, REPLAYSSM_ERROR_OUT_OF_RANGE);
        assert!(message().starts_with("n[0] is 20; there are positions 2"), "{}", message());
    }
    assert!(conv.window(0, 0, None) == windows[25]);
}

#[test]
fn an_imported_window_is_used_whatever_the_position() {
    let conv = Conv::new(&Shape::default());
    let mut rng = Rng(10);
    let log = conv.tokens(&mut rng, 5);
    let row = [(0i64, log.clone())];
    conv.call(0, &row, true, 0, false);
    conv.commit(&row, true, 0, None);
    let window = conv.window(0, 0, None);
    let next = conv.tokens(&mut rng, 3);
    let expected = conv.call(0, &[(0, next.clone())], false, 0, false);
    for position in [0i64, 1, 1000] {
        conv.reset(3);
        let mut data = Array::poisoned(conv.io, window.len());
        window.iter().enumerate().for_each(|(i, &b)| data.set(i, b));
        let src = desc!(replayssm_state { dtype: conv.io, layer: 0, data: data.at(0) });
        // SAFETY: everything lives until the call returns.
        ok(unsafe { replayssm_import(conv.pool, &Conv::list(&[3]), &position, &src, null()) });
        assert!(conv.call(0, &[(3, next.clone())], false, 0, false) == expected, "position {position}");
    }
    assert_eq!(size_of_dtype(conv.io), 2);
    assert_eq!(conv.faults(), 0);
}

/// A pool that joins slots whose positions have moved has no window there: a fault, until it is reset or imported.
#[test]
fn a_window_far_behind_the_position_is_a_fault() {
    let conv = Conv::new(&Shape::default());
    let mut rng = Rng(11);
    let row = [(0i64, conv.tokens(&mut rng, 40))];
    // Layer 0 alone moves on.
    conv.call(0, &row, true, 0, false);
    conv.commit(&row, true, 0, None);
    assert_eq!(conv.faults(), 0);
    let out = conv.call(1, &[(0, conv.tokens(&mut rng, 2))], false, 0, false);
    assert!(out[0].iter().flatten().all(|&b| b == 0), "zeros, not an invented window");
    assert_eq!(conv.faults(), REPLAYSSM_FAULT_POSITION);
    conv.window(1, 0, None);
    assert_eq!(conv.faults(), REPLAYSSM_FAULT_POSITION);
}

/// A convolution's part in flushes, snapshots and copies: live windows, and those of checkpoints without a ring.
#[test]
fn windows_are_copied_and_stored() {
    let shapes = [
        Shape::default(),
        Shape { io: REPLAYSSM_DTYPE_F32, width: 2, keep: 3, ..Shape::default() },
        Shape { io: REPLAYSSM_DTYPE_F16, width: 3, sections: vec![1], parts: 3, ..Shape::default() },
    ];
    for shape in shapes {
        let conv = Conv::new(&shape);
        let mut rng = Rng(12);
        let (mut position, ids) = (0i64, |slot: i64| heap([slot]));
        let copy = |kind: i32, from: i64, to: i64, position: Option<i64>| {
            let position = position.map(|at| heap([at]));
            let args =
                desc!(replayssm_copy_args { kind: kind, position: position.as_ref().map_or(null(), |at| at.as_ptr()) });
            let (from, to) = (ids(from), ids(to));
            for part in 0..conv.parts {
                let exec = desc!(replayssm_exec { part: part, n_parts: conv.parts });
                // SAFETY: everything lives until the call returns.
                ok(unsafe { replayssm_copy(conv.slots, &Conv::list(&from), &Conv::list(&to), &args, &exec) });
            }
        };
        let both = |rng: &mut Rng, a: i64, b: i64| {
            let tokens = conv.tokens(rng, 2);
            for layer in 0..2 {
                let out = conv.call(layer, &[(a, tokens.clone())], false, 0, false);
                assert!(out == conv.call(layer, &[(b, tokens.clone())], false, 0, false), "outputs differ");
            }
            for slot in [a, b] {
                conv.commit(&[(slot, tokens.clone())], false, 0, Some(&[2]));
            }
        };
        for round in 0..20 {
            let n = 1 + rng.below(4);
            let row = [(0i64, conv.tokens(&mut rng, n))];
            (0..2).for_each(|layer| drop(conv.call(layer, &row, false, 0, false)));
            let accepted = rng.below(n + 1) as i64;
            conv.commit(&row, false, 0, Some(&[accepted as i32]));
            // Slot 5 gets the window at each position that was reached; loaded, it is the one that was exported there.
            for at in position + 1..=position + accepted {
                let (wanted, dst, batch) = (heap([at]), ids(5), Batch::new(&row, false, 0));
                let args = desc!(replayssm_snapshot_args { at: wanted.as_ptr(), dst: ids64(&dst) });
                // SAFETY: everything lives until the call returns.
                ok(unsafe { replayssm_snapshot(conv.slots, &batch.desc(), &args, null()) });
                copy(REPLAYSSM_COPY_STORED, 5, 4, None);
                copy(REPLAYSSM_COPY_LOAD, 4, 1, Some(at));
                for layer in 0..2 {
                    assert!(conv.window(layer, 1, None) == conv.window(layer, 0, Some(at)), "round {round}");
                }
            }
            position += accepted;
            copy(REPLAYSSM_COPY_STORE, 0, 3, None);
            copy(REPLAYSSM_COPY_FORK, 0, 1, None);
            copy(REPLAYSSM_COPY_LOAD, 3, 2, Some(position));
            both(&mut rng, 1, 2);
            copy(REPLAYSSM_COPY_SWAP, 1, 0, None);
            copy(REPLAYSSM_COPY_MOVE, 1, 3, None);
            // Slot 2 is two tokens ahead of what was loaded, and slot 0 of what it was.
            both(&mut rng, 0, 2);
            for layer in 0..2 {
                assert!(conv.window(layer, 0, None) == conv.window(layer, 2, None));
                assert_eq!(conv.window(layer, 3, None).len(), conv.channels * (conv.width - 1));
            }
            position += 4;
        }
        assert_eq!(conv.faults(), 0);
        // A live slot holds no window to load, and one that does not stand at the position is none either.
        conv.reset(2);
        copy(REPLAYSSM_COPY_LOAD, 2, 1, Some(0));
        assert_eq!(conv.faults(), REPLAYSSM_FAULT_POSITION);
        let out = conv.call(0, &[(1, conv.tokens(&mut rng, 1))], false, 0, false);
        assert!(out[0].iter().flatten().all(|&b| b == 0));
        assert_eq!(conv.faults(), REPLAYSSM_FAULT_POSITION);
    }
}
