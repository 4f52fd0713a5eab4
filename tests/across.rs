//! The CUDA backend beside the CPU's in one process: the same calls on a rig of each, and what must be equal by bytes is.
//!
//! Equal by bytes, for every family and format: outputs of extends, of EXACT steps, of steps above 16 tokens and of convolutions; all records
//! of live ring rows, except those of u, which readouts alone use; checkpoints and tags; exported states, flushed, stored and copied ones;
//! what a rewind says; cursors; fault bits. FULL and HIGH outputs of each backend are within their bounds around fp64.
//!
//! `REPLAYSSM_ACROSS=n` limits the random models to n, and the named ones too. Where there is no CUDA backend, the comparison is made
//! between two CPU rigs of different threads alone.

#![allow(clippy::multiple_unsafe_ops_per_block, reason = "a test's calls share one promise")]

mod common;

use std::fmt::Display;
use std::ptr::{null, null_mut};

use common::device::{self, peek, poke};
use common::model::Model as SavedModel;
use common::oracle::{Oracle, limits, relative, unit};
use common::{
    ABSENT, Array, BatchData, FAMILIES, Rig, Rng, Row, Skip, Spec, Token, address, components, decode, encode, ids64,
    message, ok, size_of_dtype, tensor,
};
use replayssm::ffi::*;
use replayssm::replay::plan::MAX_PARALLEL;

#[global_allocator]
static HEAP: device::Heap = device::Heap::ALWAYS;

/// A convolution on each rig's slots.
#[derive(Clone, Debug)]
struct Shape {
    io: i32,
    sections: Vec<i32>,
    width: usize,
    bias: bool,
    silu: bool,
    in_place: bool,
}

impl Shape {
    fn channels(&self) -> usize {
        self.sections.iter().sum::<i32>() as usize
    }

    /// Distance of sections: the widest, and a gap.
    fn section(&self) -> usize {
        *self.sections.iter().max().unwrap() as usize + 3
    }

    /// Elements of a token.
    fn stride(&self) -> usize {
        self.section() * self.sections.len() + 1
    }

    fn places(&self) -> impl Iterator<Item = usize> {
        let sections = self.sections.iter().enumerate();
        sections.flat_map(move |(s, &n)| (0..n as usize).map(move |c| s * self.section() + c))
    }
}

/// Slots of checkpoints without a ring.
const STORED: [usize; 3] = [0, 2, 3];

/// A request: slot, ring, and its tokens since the last reset or import.
#[derive(Clone)]
struct Request {
    slot: usize,
    ring: usize,
    origin: usize,
    log: Vec<Vec<Token>>,
}

impl Request {
    fn position(&self) -> usize {
        self.origin + self.log.len()
    }
}

/// A pool of one of the rigs: its handle, and how long a state's axes are: layers, heads, rows, columns.
#[derive(Clone, Copy)]
struct Pool {
    handle: *mut replayssm_layers,
    axes: [usize; 4],
}

/// The rigs: the CPU's, and what is compared with it.
struct Both {
    name: String,
    rigs: [Rig; 2],
    shape: Shape,
    convs: [*mut replayssm_layers; 2],
    weight: Array,
    bias: Array,
    rng: Rng,
    requests: Vec<Request>,
    /// Slots and rings that no request is on.
    spare: Vec<(usize, usize)>,
    round: usize,
    /// Of FULL steps, per rig.
    full: [Vec<f64>; 2],
}

impl Drop for Both {
    fn drop(&mut self) {
        self.convs.iter().for_each(|&conv| replayssm_layers_destroy(conv));
    }
}

fn values(dtype: i32, bits: &[u32]) -> Vec<f64> {
    bits.iter().map(|&bits| decode(dtype, bits)).collect()
}

impl Both {
    fn new(name: String, rigs: [Rig; 2], shape: Shape, seed: u64) -> Self {
        let convs = [&rigs[0], &rigs[1]].map(|rig| {
            let p = desc!(replayssm_pool_desc {
                family: REPLAYSSM_FAMILY_CONV1D,
                n_layers: 1,
                io: shape.io,
                channels: shape.channels() as i32,
                width: shape.width as i32,
                n_sections: shape.sections.len() as i32,
                section_channels: shape.sections.as_ptr(),
            });
            let mut pool = null_mut();
            // SAFETY: the descriptor and the out-parameter are locals.
            ok(unsafe { replayssm_layers_create(rig.slots, &p, null(), 0, &mut pool) });
            pool
        });
        let mut rng = Rng(seed ^ 0xAC2055);
        let mut weight = Array::poisoned(REPLAYSSM_DTYPE_F32, shape.channels() * 5);
        let mut bias = Array::poisoned(REPLAYSSM_DTYPE_F16, shape.channels());
        for c in 0..shape.channels() {
            (0..shape.width).for_each(|k| weight.set(c * 5 + k, encode(REPLAYSSM_DTYPE_F32, rng.normal())));
            bias.set(c, encode(REPLAYSSM_DTYPE_F16, rng.normal()));
        }
        let rings = rigs[0].spec.rings;
        let request = |slot: usize| {
            let ring = if rings == 0 { slot } else { (slot * 5 + 3) % rings };
            Request { slot, ring, origin: 0, log: vec![] }
        };
        let requests = [1, 4, 6].map(request).into();
        let spare = [5, 7].map(|slot| (slot, request(slot).ring)).into();
        Both { name, rigs, shape, convs, weight, bias, rng, requests, spare, round: 0, full: Default::default() }
    }

    fn spec(&self) -> &Spec {
        &self.rigs[0].spec
    }

    /// Equality by bytes of arrays of one dtype (of integers: none); `place` says which element an index is.
    fn same_bytes(&self, dtype: i32, [one, other]: [&[u8]; 2], place: impl Fn(usize) -> String) {
        if one == other {
            return;
        }
        assert_eq!(one.len(), other.len(), "{}, round {}: lengths", self.name, self.round);
        let size = match dtype {
            REPLAYSSM_DTYPE_I64 => 8,
            _ => size_of_dtype(dtype),
        };
        let differs: Vec<usize> =
            (0..one.len() / size).filter(|i| one[i * size..][..size] != other[i * size..][..size]).collect();
        let show = |bytes: &[u8]| {
            let mut wide = [0; 8];
            wide[..size].copy_from_slice(&bytes[differs[0] * size..][..size]);
            let bits = u64::from_le_bytes(wide);
            match dtype {
                REPLAYSSM_DTYPE_I64 => format!("{}", bits as i64),
                _ => format!("{bits:#x} ({:e})", decode(dtype, bits as u32)),
            }
        };
        panic!(
            "{}, round {}: {}: {} on the CPU, {} on the other; {} of {} elements differ",
            self.name,
            self.round,
            place(differs[0]),
            show(one),
            show(other),
            differs.len(),
            one.len() / size
        );
    }

    fn same_bits(&self, dtype: i32, bits: [&[u32]; 2], place: impl Fn(usize) -> String) {
        let bytes = bits.map(|bits| {
            bits.iter().flat_map(|b| b.to_le_bytes()[..size_of_dtype(dtype)].to_vec()).collect::<Vec<u8>>()
        });
        self.same_bytes(dtype, [&bytes[0], &bytes[1]], place);
    }

    fn same<T: PartialEq + std::fmt::Debug>(&self, what: impl Display, [one, other]: [T; 2]) -> T {
        assert_eq!(one, other, "{}, round {}: {what}: the CPU's left", self.name, self.round);
        one
    }

    /// The pools of a rig: layers, and the convolution.
    fn pools(&self, i: usize) -> [Pool; 2] {
        let s = self.spec();
        [
            Pool { handle: self.rigs[i].pool, axes: [s.layers, s.heads, s.headdim, s.dstate] },
            Pool { handle: self.convs[i], axes: [1, 1, self.shape.channels(), self.shape.width - 1] },
        ]
    }

    // ---- What is compared after a call ----

    fn part(pool: *const replayssm_layers, kind: i32, layer: usize, index: usize) -> Option<Vec<u8>> {
        let c = components(pool).into_iter().find(|c| c.kind == kind)?;
        Some(peek(address(&c, layer, index), c.bytes as usize))
    }

    /// Checkpoints, tags, and the records of live rows: those from the checkpoint to `ahead` behind the position.
    fn compare_memory(&self, request: &Request, ahead: usize) {
        let s = self.spec();
        for pool in 0..2 {
            let [one, other] = [self.pools(0)[pool], self.pools(1)[pool]];
            let both = |kind, layer, index| {
                Self::part(one.handle, kind, layer, index).zip(Self::part(other.handle, kind, layer, index))
            };
            for layer in 0..one.axes[0] {
                let at = |kind: &str| format!("{kind} of pool {pool}, layer {layer}, slot {}", request.slot);
                let index = if pool == 0 { request.slot } else { request.ring };
                let (tags, others) = both(REPLAYSSM_COMPONENT_TAGS, layer, index).expect("tags");
                self.same_bytes(REPLAYSSM_DTYPE_I64, [&tags, &others], |i| format!("{}, tile {i}", at("tag")));
                let tag = tags.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).min().expect("a tile");
                if let Some((a, b)) = both(REPLAYSSM_COMPONENT_CHECKPOINT, layer, request.slot) {
                    let dtype = match s.format {
                        REPLAYSSM_FORMAT_F32 => REPLAYSSM_DTYPE_F32,
                        REPLAYSSM_FORMAT_F16 => REPLAYSSM_DTYPE_F16,
                        _ => REPLAYSSM_DTYPE_BF16,
                    };
                    self.same_bytes(dtype, [&a, &b], |i| format!("{}, element {i}", at("checkpoint")));
                }
                self.compare_rings([one.handle, other.handle], layer, request, tag, ahead);
            }
        }
    }

    /// Checkpoints without a ring, and windows.
    fn compare_stored(&self) {
        for pool in 0..2 {
            let [one, other] = [self.pools(0)[pool], self.pools(1)[pool]];
            for c in components(one.handle).iter().filter(|c| c.per_ring == 0) {
                for (layer, slot) in (0..one.axes[0]).flat_map(|layer| STORED.map(|slot| (layer, slot))) {
                    let [a, b] =
                        [one, other].map(|p| Self::part(p.handle, c.kind, layer, slot).expect("the same component"));
                    assert!(
                        a == b,
                        "{}, round {}: component {} of pool {pool}, layer {layer}, slot {slot}",
                        self.name,
                        self.round,
                        c.kind
                    );
                }
            }
        }
    }

    fn compare_rings(
        &self,
        handles: [*mut replayssm_layers; 2],
        layer: usize,
        request: &Request,
        tag: i64,
        ahead: usize,
    ) {
        let s = self.spec();
        let (keep, t_max) = (s.keep, s.t_max);
        for c in components(handles[0]).iter().filter(|c| c.per_ring == 1) {
            let (blocks, rows, dtype) = match c.kind {
                REPLAYSSM_COMPONENT_TAGS | REPLAYSSM_COMPONENT_U => continue,
                REPLAYSSM_COMPONENT_CONV => (1, self.shape.width - 1 + keep + t_max, self.shape.io),
                kind => {
                    let shared = [REPLAYSSM_COMPONENT_B, REPLAYSSM_COMPONENT_K, REPLAYSSM_COMPONENT_KNORM];
                    let io =
                        [REPLAYSSM_COMPONENT_X, REPLAYSSM_COMPONENT_B, REPLAYSSM_COMPONENT_K, REPLAYSSM_COMPONENT_V];
                    let blocks = if shared.contains(&kind) { s.groups } else { s.heads };
                    (blocks, s.window + keep + t_max, if io.contains(&kind) { s.io } else { REPLAYSSM_DTYPE_F32 })
                }
            };
            let first = if c.kind == REPLAYSSM_COMPONENT_CONV { tag - (self.shape.width as i64 - 1) } else { tag };
            let end = (request.position() + ahead) as i64;
            let [a, b] =
                handles.map(|handle| Self::part(handle, c.kind, layer, request.ring).expect("the same component"));
            let record = a.len() / blocks / rows;
            for block in 0..blocks {
                for position in first.max(end - rows as i64)..end {
                    let at = (block * rows + position.rem_euclid(rows as i64) as usize) * record;
                    self.same_bytes(dtype, [&a[at..][..record], &b[at..][..record]], |i| {
                        let (kind, ring) = (c.kind, request.ring);
                        format!("record of component {kind}, layer {layer}, ring {ring}, block {block}, token {position}, element {i}")
                    });
                }
            }
        }
    }

    /// Everything that a caller can see of the requests, and the memory behind it.
    fn compare(&mut self) {
        self.compare_stored();
        for request in &self.requests {
            self.compare_memory(request, 0);
            let cursors = [0, 1].map(|i| {
                let c = self.rigs[i].cursor(request.ring);
                (c.position, c.flush_before, c.seed, c.generation, c.committed)
            });
            let cursor = self.same(format!("cursor of ring {}", request.ring), cursors);
            assert_eq!(cursor.0, request.position() as i64, "{}, round {}: position", self.name, self.round);
        }
        self.same("fault bits", [0, 1].map(|i| self.rigs[i].faults(true).bits));
        self.same(
            "commits, rows, tokens, accepted tokens and flushes",
            [0, 1].map(|i| {
                let s = self.rigs[i].stats();
                [s.steps, s.rows, s.tokens, s.accepted, s.flushes]
            }),
        );
    }

    // ---- Calls ----

    /// A row for each request of up to `most` tokens, all of one length or each of its own, and perhaps a null row.
    fn rows(&mut self, most: usize) -> Vec<Row> {
        let (packed, same) = (self.rng.below(2) == 0, 1 + self.rng.below(most));
        let mut rows = Vec::new();
        for i in 0..=self.requests.len() {
            let n = if packed { self.rng.below(most + 1) } else { same };
            let tokens = self.rigs[0].tokens(&mut self.rng, n);
            let flush = self.rng.below(8) == 0;
            if let Some(request) = self.requests.get(i) {
                rows.push(Row { slot: request.slot as i64, ring: request.ring as i64, tokens, flush });
            } else if self.rng.below(2) == 0 {
                rows.insert(self.rng.below(rows.len() + 1), Row { slot: -1, ring: -1, tokens, flush });
            }
        }
        rows
    }

    /// The request of a row.
    fn of(&self, row: &Row) -> Option<usize> {
        self.requests.iter().position(|r| r.slot as i64 == row.slot)
    }

    /// All layers and the convolution on both rigs.
    fn layers(&mut self, rows: &[Row], extend: bool, tail: i32, last: usize) {
        let s = self.spec().clone();
        let longest = rows.iter().map(|r| r.tokens.len()).max().unwrap_or(0);
        let dense = rows.iter().all(|r| r.tokens.len() == longest) && longest > 0;
        let most = if dense { longest } else { s.t_max };
        let exact = extend || s.readout == REPLAYSSM_READOUT_EXACT || most > MAX_PARALLEL as usize;
        for layer in 0..=last {
            let outputs = [0, 1].map(|i| self.rigs[i].layer(layer, rows, extend, tail));
            for (r, row) in rows.iter().enumerate() {
                let request = self.of(row);
                for (t, (one, other)) in outputs[0][r].iter().zip(&outputs[1][r]).enumerate() {
                    let place = |i: usize| {
                        let call = if extend { "extend" } else { "step" };
                        let (h, d) = (i / s.headdim, i % s.headdim);
                        format!("output of {call}, layer {layer}, slot {}, token {t}, head {h}, channel {d}", row.slot)
                    };
                    if exact || request.is_none() {
                        self.same_bits(s.out, [one, other], place);
                    }
                }
                if let Some(request) = request.filter(|_| !exact && !row.tokens.is_empty()) {
                    self.near(layer, request, row, [&outputs[0][r], &outputs[1][r]]);
                }
            }
        }
        self.conv(rows, extend, tail);
        for row in rows {
            if let Some(i) = self.of(row) {
                // An extend leaves in the ring what its commit makes the history.
                self.compare_memory(&self.requests[i], if last + 1 == s.layers { row.tokens.len() } else { 0 });
            }
        }
    }

    /// FULL and HIGH: both are within the bound of HIGH around fp64.
    fn near(&mut self, layer: usize, request: usize, row: &Row, outputs: [&Vec<Vec<u32>>; 2]) {
        let s = self.spec().clone();
        let (rig, request) = (&self.rigs[0], &self.requests[request]);
        let tag = rig.tags(layer, request.slot)[0];
        let s0: Vec<f64> = values(REPLAYSSM_DTYPE_F32, &rig.export(layer, request.slot, request.ring, Some(tag)));
        let all = request.log[tag as usize - request.origin..].iter().chain(&row.tokens);
        let tokens: Vec<Token> = all.map(|t| t[layer].clone()).collect();
        let first = tokens.len() - row.tokens.len();
        let mut oracle = Oracle::new(&s, &rig.params[layer]);
        oracle.state.clone_from(&s0);
        let lossless = matches!(s.format, REPLAYSSM_FORMAT_F32 | REPLAYSSM_FORMAT_SPLIT32);
        // Records of u from before a checkpoint was rounded: as in pairwise.rs.
        let mixed = s.is_delta() && !lossless && s.readout == REPLAYSSM_READOUT_FULL;
        let factor = if mixed && s.stochastic { 2.0 } else { 1.0 };
        let (mut us, mut both) = (Vec::new(), [vec![], vec![]]);
        for (t, token) in tokens.iter().enumerate() {
            let (_, gated) = oracle.token(token);
            us.push(oracle.u.clone());
            let Some(t_row) = t.checked_sub(first) else { continue };
            let got = outputs.map(|o| values(s.out, &o[t_row]));
            let limits = limits(factor, &s, &rig.params[layer], &s0, &tokens[..=t], &us, &gated);
            for (i, limit) in limits.into_iter().enumerate() {
                let (a, b, truth) = (got[0][i], got[1][i], gated[i]);
                let (slot, h, d) = (request.slot, i / s.headdim, i % s.headdim);
                assert!(
                    (a - truth).abs() <= limit && (b - truth).abs() <= limit,
                    "{}, round {}: output of step, layer {layer}, slot {slot}, token {t_row}, head {h}, channel {d}: {a:e} on \
                     the CPU, {b:e} on the other, {truth:e} in fp64, from which they may differ by {limit:e}",
                    self.name,
                    self.round,
                );
            }
            (0..2).for_each(|i| both[i].extend(&got[i]));
        }
        if s.readout == REPLAYSSM_READOUT_FULL && !mixed {
            (0..2).for_each(|i| self.full[i].append(&mut both[i]));
        }
    }

    /// The convolution of a batch, equal by bytes.
    fn conv(&mut self, rows: &[Row], extend: bool, tail: i32) {
        let shape = self.shape.clone();
        let (stride, n) = (shape.stride(), rows.iter().map(|r| r.tokens.len()).sum::<usize>().max(1));
        let mut x = Array::poisoned(shape.io, n * stride);
        for t in 0..n {
            for place in shape.places() {
                x.set(t * stride + place, encode(shape.io, self.rng.normal()));
            }
        }
        let dense = rows[0].tokens.len();
        let results = [0, 1].map(|i| {
            let (x, out) = (x.clone(), Array::poisoned(shape.io, n * stride));
            let target = if shape.in_place { &x } else { &out };
            let args = desc!(replayssm_conv1d_args {
                no_silu: i32::from(!shape.silu),
                x: tensor(&x, 0, dense * stride, stride, shape.section()),
                out: tensor(target, 0, dense * stride, stride, shape.section()),
                weight: tensor(&self.weight, 0, 0, 0, 5),
                bias: if shape.bias { tensor(&self.bias, 0, 0, 0, 1) } else { ABSENT },
            });
            let data = BatchData::new(&self.rigs[i], rows, extend, tail);
            let call = if extend { replayssm_conv1d_extend } else { replayssm_conv1d_step };
            // SAFETY: everything lives until the call returns.
            ok(unsafe { call(self.convs[i], 0, &data.desc(), &args, null()) });
            target.bytes.clone()
        });
        self.same_bytes(shape.io, [&results[0], &results[1]], |i| {
            format!("output of the convolution, token {} of all, element {} of {stride}", i / stride, i % stride)
        });
    }

    fn commit(&mut self, rows: &[Row], extend: bool, tail: i32, counts: Option<&[i32]>) {
        for rig in &self.rigs {
            rig.commit_batch(rows, extend, tail, counts);
        }
        for (r, row) in rows.iter().enumerate() {
            if let Some(i) = self.of(row) {
                let n = counts.map_or(row.tokens.len(), |counts| counts[r] as usize);
                self.requests[i].log.extend_from_slice(&row.tokens[..n]);
            }
        }
    }

    fn step(&mut self) {
        let last = self.spec().layers - 1;
        let t_max = self.spec().t_max;
        if self.rng.below(4) == 0 {
            // Never committed, or dead between layers.
            let rows = self.rows(t_max);
            let last = if self.rng.below(2) == 0 { last } else { 0 };
            self.layers(&rows, false, 0, last);
        }
        let rows = self.rows(t_max);
        self.layers(&rows, false, 0, last);
        if self.rng.below(5) == 0 {
            self.layers(&rows, false, 0, last);
        }
        let counts: Vec<i32> = rows.iter().map(|r| self.rng.below(r.tokens.len() + 1) as i32).collect();
        self.commit(&rows, false, 0, Some(&counts));
        self.snapshot(&rows, false, 0);
    }

    /// Behind a commit: states that it has reached, or not.
    fn snapshot(&mut self, rows: &[Row], extend: bool, tail: i32) {
        let at: Vec<i64> = rows
            .iter()
            .map(|row| match self.of(row) {
                Some(i) => self.requests[i].position() as i64 - self.rng.below(5) as i64 + 1,
                None => self.rng.below(9) as i64,
            })
            .collect();
        let first = self.rng.below(3);
        let mut n = 0;
        let dst: Vec<i64> = rows
            .iter()
            .map(|row| {
                n += usize::from(self.of(row).is_some());
                if self.rng.below(5) == 0 { [-1, 99][self.rng.below(2)] } else { STORED[(first + n) % 3] as i64 }
            })
            .collect();
        for rig in &self.rigs {
            let batch = BatchData::new(rig, rows, extend, tail);
            let args = desc!(replayssm_snapshot_args { at: at.as_ptr(), dst: ids64(&dst) });
            // SAFETY: everything lives until the call returns.
            ok(unsafe { replayssm_snapshot(rig.slots, &batch.desc(), &args, null()) });
        }
    }

    /// Folds now, as far as a mask would or up to a position, or leaves it to later steps.
    fn flush(&mut self) {
        let entries = self.chosen();
        let (ids, place) = (self.ids(&entries), self.place());
        let mut position = Vec::new();
        for entry in &entries {
            let at = entry.map_or(3, |i| self.requests[i].position()) + self.rng.below(5);
            position.push(at.saturating_sub(3) as i64);
        }
        let later = self.rng.below(3) == 0;
        let given = later || self.rng.below(2) == 0;
        let args = desc!(replayssm_flush_args {
            later: later.into(),
            position: if given { position.as_ptr() } else { null() },
        });
        for rig in &self.rigs {
            // SAFETY: everything lives until the call returns.
            ok(unsafe { replayssm_flush(rig.slots, &Self::list(&ids, place), &args, null()) });
        }
    }

    fn copy_between(&mut self, kind: i32, from: &[Vec<i64>; 2], to: &[Vec<i64>; 2], position: Option<&[i64]>) {
        let place = self.place();
        let args = desc!(replayssm_copy_args { kind: kind, position: position.map_or(null(), <[i64]>::as_ptr) });
        for rig in &self.rigs {
            let (from, to) = (Self::list(from, place), Self::list(to, place));
            // SAFETY: everything lives until the call returns.
            ok(unsafe { replayssm_copy(rig.slots, &from, &to, &args, null()) });
        }
    }

    /// Requests go on elsewhere, change places, or leave a checkpoint behind and go on from it.
    fn copy(&mut self) {
        let (i, j) = (self.rng.below(3), self.rng.below(2));
        let one = |(slot, ring): (usize, usize)| [vec![slot as i64], vec![ring as i64]];
        let (here, there) = ((self.requests[i].slot, self.requests[i].ring), self.spare[j]);
        match self.rng.below(4) {
            0 => {
                let kind = [REPLAYSSM_COPY_FORK, REPLAYSSM_COPY_MOVE][self.rng.below(2)];
                self.copy_between(kind, &one(here), &one(there), None);
                (self.requests[i].slot, self.requests[i].ring) = there;
                self.spare[j] = here;
            }
            1 => {
                let other = (i + 1) % 3;
                let place = (self.requests[other].slot, self.requests[other].ring);
                self.copy_between(REPLAYSSM_COPY_SWAP, &one(here), &one(place), None);
                (self.requests[i].slot, self.requests[i].ring) = place;
                (self.requests[other].slot, self.requests[other].ring) = here;
            }
            2 => {
                let (from, to) = (STORED[i], STORED[(i + 1) % 3]);
                self.copy_between(REPLAYSSM_COPY_STORED, &one((from, 99)), &one((to, 99)), None);
            }
            _ => {
                let position = self.requests[i].position();
                let at = position + 1 - self.rng.below(4).min(self.requests[i].log.len() + 1);
                let given = vec![at as i64];
                self.copy_between(REPLAYSSM_COPY_STORE, &one(here), &one((STORED[j], 99)), Some(&given));
                let faults = [0, 1].map(|i| self.rigs[i].faults(true).bits);
                if self.same("fault bits", faults) == 0 {
                    self.copy_between(REPLAYSSM_COPY_LOAD, &one((STORED[j], 99)), &one(there), Some(&given));
                    let log = &mut self.requests[i].log;
                    log.truncate(log.len() + at - position);
                    (self.requests[i].slot, self.requests[i].ring) = there;
                    self.spare[j] = here;
                }
            }
        }
    }

    fn extend(&mut self) {
        let rows = self.rows(2 * self.spec().window.min(12));
        let tail = if self.rng.below(2) == 0 { 0 } else { self.rng.below(self.spec().window + 1) as i32 };
        self.layers(&rows, true, tail, self.spec().layers - 1);
        self.commit(&rows, true, tail, None);
        self.snapshot(&rows, true, tail);
    }

    /// Some of the requests, and an entry to be skipped between them.
    fn chosen(&mut self) -> Vec<Option<usize>> {
        let mut entries: Vec<_> = (0..self.requests.len()).filter(|_| self.rng.below(3) > 0).map(Some).collect();
        if self.rng.below(3) == 0 {
            entries.insert(self.rng.below(entries.len() + 1), None);
        }
        entries
    }

    /// Ids of entries: slots and rings.
    fn ids(&self, entries: &[Option<usize>]) -> [Vec<i64>; 2] {
        let id = |pick: fn(&Request) -> usize| {
            entries.iter().map(|e| e.map_or(-1, |i| pick(&self.requests[i]) as i64)).collect()
        };
        [id(|r| r.slot), id(|r| r.ring)]
    }

    fn list([slots, rings]: &[Vec<i64>; 2], place: i32) -> replayssm_list {
        desc!(replayssm_list { n: slots.len() as i32, place: place, slots: ids64(slots), rings: ids64(rings) })
    }

    fn place(&mut self) -> i32 {
        if self.rng.below(2) == 0 { REPLAYSSM_WHERE_HOST } else { REPLAYSSM_WHERE_DEVICE }
    }

    /// A dense state of `n` entries of a pool in some dtype and orientation, with gaps, and how it is described.
    fn state(&mut self, pool: Pool, n: usize) -> (Array, replayssm_state) {
        let dtype = [REPLAYSSM_DTYPE_F32, REPLAYSSM_DTYPE_BF16, REPLAYSSM_DTYPE_F16][self.rng.below(3)];
        let orientation = [REPLAYSSM_STATE_ROW_MAJOR, REPLAYSSM_STATE_COL_MAJOR][self.rng.below(2)];
        let [layers, heads, rows, columns] = pool.axes;
        let gap = self.rng.below(2) * 3;
        let (outer, inner) = if orientation == REPLAYSSM_STATE_ROW_MAJOR { (rows, columns) } else { (columns, rows) };
        let row = inner + gap;
        let head = outer * row + gap;
        let (layer, entry) = (heads * head, layers * heads * head + gap);
        let mut array = Array::poisoned(dtype, n.max(1) * entry);
        for i in 0..n.max(1) * entry {
            array.set(i, encode(dtype, self.rng.normal()));
        }
        let state = desc!(replayssm_state {
            dtype: dtype,
            orientation: orientation,
            layer: -1,
            stride_entry: entry as i64,
            stride_layer: layer as i64,
            stride_head: head as i64,
            stride_row: row as i64,
        });
        (array, state)
    }

    fn reset(&mut self) {
        let entries = self.chosen();
        let (ids, place) = (self.ids(&entries), self.place());
        let position: Vec<i64> = entries.iter().map(|_| self.rng.below(500) as i64).collect();
        let seed: Vec<u64> = entries.iter().map(|_| self.rng.next()).collect();
        let own = self.rng.below(2) == 0;
        let args =
            desc!(replayssm_reset_args { position: position.as_ptr(), seed: if own { seed.as_ptr() } else { null() } });
        for rig in &self.rigs {
            // SAFETY: everything lives until the call returns.
            ok(unsafe { replayssm_reset(rig.slots, &Self::list(&ids, place), &args, null()) });
        }
        self.restart(&entries, &position);
    }

    fn restart(&mut self, entries: &[Option<usize>], position: &[i64]) {
        for (entry, &position) in entries.iter().zip(position) {
            if let Some(i) = *entry {
                self.requests[i].log.clear();
                self.requests[i].origin = position as usize;
            }
        }
    }

    /// A state for all pools at some position.
    fn import(&mut self) {
        let entries = self.chosen();
        let (ids, place) = (self.ids(&entries), self.place());
        let stay = self.rng.below(3) == 0;
        let position: Vec<i64> = entries
            .iter()
            .map(|e| match e {
                Some(i) if stay => self.requests[*i].position() as i64,
                _ => self.rng.below(1000) as i64,
            })
            .collect();
        for pool in 0..2 {
            let (array, mut src) = self.state(self.pools(0)[pool], entries.len());
            src.data = array.at(0);
            for i in 0..2 {
                let at = if stay { null() } else { position.as_ptr() };
                let handle = self.pools(i)[pool].handle;
                // SAFETY: everything lives until the call returns.
                ok(unsafe { replayssm_import(handle, &Self::list(&ids, place), at, &src, null()) });
            }
        }
        self.restart(&entries, &position);
    }

    /// States at positions, of which some may not be held: those are left alone.
    fn export(&mut self) {
        let entries = self.chosen();
        let (ids, place) = (self.ids(&entries), self.place());
        for pool in 0..2 {
            let mut at = Vec::new();
            for entry in &entries {
                let position = entry.map_or(0, |i| self.requests[i].position() as i64);
                at.push((position - self.rng.below(6) as i64).max(0));
            }
            let committed = self.rng.below(3) == 0;
            let (array, dst) = self.state(self.pools(0)[pool], entries.len());
            let results = [0, 1].map(|i| {
                let out = array.clone();
                let dst = replayssm_state { data: out.at(0), ..dst };
                let at = if committed { null() } else { at.as_ptr() };
                let handle = self.pools(i)[pool].handle;
                // SAFETY: everything lives until the call returns.
                ok(unsafe { replayssm_export(handle, &Self::list(&ids, place), at, &dst, null()) });
                out.bytes
            });
            self.same_bytes(dst.dtype, [&results[0], &results[1]], |i| {
                let entry = dst.stride_entry as usize;
                format!("export of pool {pool} at {at:?}, entry {}, element {} of {entry}", i / entry, i % entry)
            });
        }
    }

    fn rewind(&mut self) {
        let entries = self.chosen();
        let (ids, place) = (self.ids(&entries), self.place());
        let mut n: Vec<i32> = Vec::new();
        for entry in &entries {
            let most = entry.map_or(3, |i| self.requests[i].log.len());
            n.push(self.rng.below(6).min(most) as i32);
        }
        let done = [0, 1].map(|i| {
            let mut done = vec![-1; entries.len()];
            let list = Self::list(&ids, place);
            // SAFETY: everything lives until the call returns.
            ok(unsafe { replayssm_rewind(self.rigs[i].slots, &list, n.as_ptr(), done.as_mut_ptr(), null()) });
            done
        });
        let done = self.same(format!("rewind of {n:?} of rings {:?}", ids[1]), done);
        for (i, entry) in entries.iter().enumerate() {
            if let Some(request) = entry.filter(|_| done[i] == 1) {
                let log = &mut self.requests[request].log;
                log.truncate(log.len() - n[i] as usize);
            }
        }
    }

    fn run(mut self, rounds: usize) {
        // Pools start at position 0; every ring has a first step before anything is taken back.
        self.compare();
        for round in 1..=rounds {
            self.round = round;
            match self.rng.below(20) {
                0 | 1 => self.extend(),
                2 => self.rewind(),
                3 => self.import(),
                4 => self.reset(),
                5 | 6 => self.export(),
                7 | 8 => self.flush(),
                9 | 10 => self.copy(),
                _ => self.step(),
            }
            self.compare();
        }
        if !self.full[0].is_empty() {
            // FULL is within 2 plain + 1e-6 of fp64, and plain within what exactness.rs has for it, plus the output's rounding.
            let s = self.spec();
            let plain =
                if s.is_delta() { 5e-6 } else { 2e-6 } + if s.out == REPLAYSSM_DTYPE_F32 { 0.0 } else { unit(s.out) };
            let (apart, allowed) = (relative(&self.full[1], &self.full[0]), 2.0 * (2.0 * plain + 1e-6));
            assert!(apart <= allowed, "{}: FULL outputs are {apart:.2e} apart; {allowed:.2e} are allowed", self.name);
        }
    }
}

// ---- The models ----

fn choose<T: Copy>(rng: &mut Rng, values: &[T]) -> T {
    values[rng.below(values.len())]
}

const DTYPES: [i32; 3] = [REPLAYSSM_DTYPE_BF16, REPLAYSSM_DTYPE_F16, REPLAYSSM_DTYPE_F32];

const FORMATS: [(i32, &[i32]); 4] = [
    (REPLAYSSM_FORMAT_SPLIT32, &[REPLAYSSM_READOUT_EXACT, REPLAYSSM_READOUT_FULL, REPLAYSSM_READOUT_HIGH]),
    (REPLAYSSM_FORMAT_F32, &[REPLAYSSM_READOUT_EXACT, REPLAYSSM_READOUT_FULL]),
    (REPLAYSSM_FORMAT_BF16, &[REPLAYSSM_READOUT_EXACT, REPLAYSSM_READOUT_FULL, REPLAYSSM_READOUT_HIGH]),
    (REPLAYSSM_FORMAT_F16, &[REPLAYSSM_READOUT_EXACT, REPLAYSSM_READOUT_FULL]),
];

fn random_shape(rng: &mut Rng) -> Shape {
    let n = 1 + rng.below(3);
    let most = choose(rng, &[7, 100, 200]);
    Shape {
        io: choose(rng, &DTYPES),
        sections: (0..n).map(|_| 1 + rng.below(most) as i32).collect(),
        width: 2 + rng.below(3),
        bias: rng.below(2) == 0,
        silu: rng.below(2) == 0,
        in_place: rng.below(2) == 0,
    }
}

/// Options that neither dims nor arithmetic hang on.
fn random_spec(rng: &mut Rng, family: i32) -> Spec {
    let (format, readouts) = choose(rng, &FORMATS);
    let t_max = choose(rng, &[1, 2, 3, 4, 5, 8, 9, 13, 16, 20]);
    let readout = choose(rng, readouts);
    let groups = choose(rng, &[1, 2]);
    let spec = Spec {
        family,
        format,
        readout,
        groups,
        t_max,
        heads: groups * choose(rng, &[1, 2]),
        headdim: choose(rng, &[5, 16, 17, 20, 24, 40]),
        dstate: choose(rng, &[7, 32, 33, 40, 64, 80]),
        layers: 1 + rng.below(2),
        io: choose(rng, &DTYPES),
        out: choose(rng, &DTYPES),
        dt_dtype: choose(rng, &DTYPES),
        param_dtype: choose(rng, &[0, REPLAYSSM_DTYPE_BF16, REPLAYSSM_DTYPE_F16, REPLAYSSM_DTYPE_F32]),
        window: choose(rng, &[1, 3, 7, 16, 17, 32, 40]).max(t_max),
        keep: choose(rng, &[0, 0, 1, 3, 6]),
        schedule: choose(rng, &[REPLAYSSM_SCHEDULE_STAGGERED, REPLAYSSM_SCHEDULE_BY_POSITION, REPLAYSSM_SCHEDULE_NONE]),
        stochastic: matches!(format, REPLAYSSM_FORMAT_BF16 | REPLAYSSM_FORMAT_F16) && rng.below(2) == 0,
        rings: choose(rng, &[0, 13]),
        softplus: rng.below(4) > 0,
        bias: rng.below(2) == 0,
        skip: choose(rng, &[Skip::None, Skip::PerHead, Skip::PerElement]),
        gate: rng.below(2) == 0,
        l2norm: rng.below(3) > 0,
        beta_processed: rng.below(2) == 0,
        head_map: choose(rng, &[REPLAYSSM_HEAD_MAP_GROUPED, REPLAYSSM_HEAD_MAP_TILED]),
        scale: choose(rng, &[0.0, 0.5]),
        ids: choose(rng, &[REPLAYSSM_DTYPE_I64, REPLAYSSM_DTYPE_I32]),
        contiguous: rng.below(2) == 0,
        seed: rng.next(),
        ..Spec::default()
    };
    let kinds = [REPLAYSSM_GATE_SOFTPLUS, REPLAYSSM_GATE_LOG_DECAY, REPLAYSSM_GATE_LOWER_BOUND];
    let gate_kind = choose(rng, if family == REPLAYSSM_FAMILY_KDA { &kinds } else { &kinds[..2] });
    // A processed gate takes no bias: it would change its sign.
    let raw = if spec.is_delta() { gate_kind != REPLAYSSM_GATE_LOG_DECAY } else { spec.softplus };
    let u_dtype = match readout {
        REPLAYSSM_READOUT_EXACT => 0,
        REPLAYSSM_READOUT_FULL => choose(rng, &[0, REPLAYSSM_DTYPE_F32]),
        _ => choose(rng, &[0, REPLAYSSM_DTYPE_F32, REPLAYSSM_DTYPE_BF16]),
    };
    Spec { gate_kind, bias: spec.bias && raw, u_dtype: if spec.is_delta() { u_dtype } else { 0 }, ..spec }
}

/// Dims of real models and awkward ones: rows and columns of a head's state.
fn named() -> Vec<(i32, usize, usize)> {
    let mamba = [(20, 40), (24, 80), (64, 96), (64, 128), (80, 128), (80, 256), (20, 256), (24, 128)];
    let delta = [(64, 64), (128, 128), (64, 128), (128, 64), (256, 64), (64, 256), (256, 256), (96, 192)];
    let mut named: Vec<_> = mamba.map(|(rows, columns)| (REPLAYSSM_FAMILY_MAMBA2, rows, columns)).into();
    for family in [REPLAYSSM_FAMILY_GDN, REPLAYSSM_FAMILY_KDA] {
        named.extend(delta.map(|(rows, columns)| (family, rows, columns)));
    }
    named
}

/// Every model: a name, options, a convolution and rounds.
fn models() -> Vec<Model> {
    let mut models = Vec::new();
    for seed in 0..150u64 {
        let mut rng = Rng(seed * 7919 + 5);
        let spec = random_spec(&mut rng, FAMILIES[seed as usize % 3]);
        models.push((format!("random model {seed}: {spec:?}"), spec, random_shape(&mut rng), seed, 16));
    }
    for (i, (family, headdim, dstate)) in named().into_iter().enumerate() {
        for (j, (format, readouts)) in FORMATS.into_iter().enumerate() {
            for (k, &readout) in readouts.iter().enumerate() {
                let seed = 1000 + (i * 100 + j * 10 + k) as u64;
                let mut rng = Rng(seed);
                let spec = random_spec(&mut rng, family);
                let u_dtype = if readout == spec.readout { spec.u_dtype } else { 0 };
                let stochastic = spec.stochastic && j >= 2;
                let spec = Spec { headdim, dstate, format, readout, u_dtype, stochastic, ..spec };
                let spec = Spec { heads: 2, groups: 1, layers: 1, ..spec };
                let name = format!("model {headdim} x {dstate}, seed {seed}: {spec:?}");
                models.push((name, spec, random_shape(&mut rng), seed, 5));
            }
        }
    }
    if let Some(most) = std::env::var("REPLAYSSM_ACROSS").ok().and_then(|n| n.parse().ok()) {
        // As many random ones, and as many named ones, far apart.
        let random: Vec<_> = models.drain(..150).step_by(150usize.div_ceil(most).max(1)).collect();
        // Formats and readouts repeat after ten models: the step has no factor in common with that.
        let mut step = models.len().div_ceil(most).max(1);
        while step % 2 == 0 || step % 5 == 0 {
            step -= 1;
        }
        return random.into_iter().chain(models.into_iter().step_by(step)).collect();
    }
    models
}

type Model = (String, Spec, Shape, u64, usize);

/// Runs models on both backends.
fn on_both(models: impl IntoIterator<Item = Model>) {
    let probe = device::context(REPLAYSSM_BACKEND_CUDA, 0);
    let probe = match probe {
        Err(why) => return println!("skipped: across because {why}"),
        Ok(context) => context,
    };
    for (name, spec, shape, seed, rounds) in models {
        println!("{name}, {shape:?}");
        let rigs = [REPLAYSSM_BACKEND_CPU, REPLAYSSM_BACKEND_CUDA]
            .map(|backend| Rig::on_backend(backend, spec.clone()).unwrap_or_else(|error| panic!("{name}: {error}")));
        Both::new(name, rigs, shape, seed).run(rounds);
    }
    replayssm_context_destroy(probe);
}

/// Runs one of `of` shares of the models.
fn share(number: usize, of: usize) {
    on_both(models().into_iter().skip(number).step_by(of));
}

#[test]
fn cuda_equals_the_cpu_first_share() {
    share(0, 3);
}

#[test]
fn cuda_equals_the_cpu_second_share() {
    share(1, 3);
}

#[test]
fn cuda_equals_the_cpu_third_share() {
    share(2, 3);
}

/// A slot that one backend saved goes on on the other, there and back, and blobs of the same requests are the same.
#[test]
fn cuda_equals_the_cpu_in_saved_slots() {
    let probe = match device::context(REPLAYSSM_BACKEND_CUDA, 0) {
        Err(why) => return println!("skipped: across because {why}"),
        Ok(context) => context,
    };
    for family in FAMILIES {
        for (format, stochastic) in [
            (REPLAYSSM_FORMAT_SPLIT32, false),
            (REPLAYSSM_FORMAT_F32, false),
            (REPLAYSSM_FORMAT_BF16, true),
            (REPLAYSSM_FORMAT_F16, false),
        ] {
            let spec = Spec {
                family,
                format,
                stochastic,
                layers: 2,
                window: 7,
                t_max: 3,
                keep: 2,
                slots: 4,
                rings: 3,
                ..Spec::default()
            };
            let backends = [REPLAYSSM_BACKEND_CPU, REPLAYSSM_BACKEND_CUDA];
            let models = backends.map(|backend| SavedModel::on(backend, &spec));
            let mut rng = Rng(11);
            // Empty, full, wrapped, and with a step that is not committed.
            for moment in [0, 5, 17] {
                let steps = models[0].steps(&mut rng, moment);
                let lost = models[0].tokens(&mut rng, 2);
                for model in &models {
                    model.rigs[0].reset(1, 2, 0);
                    model.run(1, 2, &steps);
                    model.step(1, 2, &lost, false);
                }
                let next = models[0].steps(&mut rng, 6);
                let wanted = models[0].rigs[0].save(REPLAYSSM_SAVE_PORTABLE, 1, 2);
                for kind in [REPLAYSSM_SAVE_LIVE, REPLAYSSM_SAVE_PORTABLE] {
                    let blobs = models.each_ref().map(|model| model.rigs[0].save(kind, 1, 2));
                    assert!(blobs[0] == blobs[1], "{spec:?}, after {moment} steps, kind {kind}");
                    // Back and forth between backends.
                    for model in &models {
                        assert_eq!(model.rigs[0].restore(3, 0, &blobs[0]), REPLAYSSM_OK, "{}", message());
                    }
                    let outputs = models.each_ref().map(|model| model.run(3, 0, &next));
                    assert!(outputs[0] == outputs[1], "{spec:?}, after {moment} steps, kind {kind}");
                    let ends = models.each_ref().map(|model| model.rigs[0].save(kind, 3, 0));
                    assert!(ends[0] == ends[1], "{spec:?}, after {moment} steps, kind {kind}");
                    assert_eq!(models[0].rigs[0].restore(2, 1, &ends[1]), REPLAYSSM_OK, "{}", message());
                    // What a portable blob brings to a 16-bit state is rounded then.
                    let rounds = kind == REPLAYSSM_SAVE_PORTABLE && format >= REPLAYSSM_FORMAT_BF16;
                    assert!(rounds || models[0].states(2, 1) == models[1].states(3, 0), "{spec:?}");
                }
                assert!(models[1].rigs[0].save(REPLAYSSM_SAVE_PORTABLE, 1, 2) == wanted);
            }
            for model in &models {
                assert_eq!(model.rigs[0].faults(false).bits, 0);
            }
        }
    }
    replayssm_context_destroy(probe);
}

/// Models of one family that differ in little and live long: for breaks of device code, which are to be found with few kernels.
fn few(family: i32, readout: i32) {
    let models =
        [(1, 12, REPLAYSSM_SCHEDULE_STAGGERED), (4, 20, REPLAYSSM_SCHEDULE_NONE), (18, 40, REPLAYSSM_SCHEDULE_NONE)];
    on_both(models.map(|(t_max, window, schedule)| {
        let seed = 77 + t_max as u64;
        let spec = Spec {
            family,
            readout,
            format: REPLAYSSM_FORMAT_SPLIT32,
            groups: 2,
            heads: 4,
            headdim: 24,
            dstate: 40,
            layers: 2,
            io: REPLAYSSM_DTYPE_BF16,
            out: REPLAYSSM_DTYPE_F32,
            t_max,
            window,
            keep: 3,
            schedule,
            rings: 13,
            seed,
            ..Spec::default()
        };
        let mut rng = Rng(seed);
        (format!("{t_max} tokens: {spec:?}"), spec, random_shape(&mut rng), seed, 40)
    }));
}

#[test]
fn few_models_of_mamba2() {
    few(REPLAYSSM_FAMILY_MAMBA2, REPLAYSSM_READOUT_EXACT);
    few(REPLAYSSM_FAMILY_MAMBA2, REPLAYSSM_READOUT_FULL);
}

#[test]
fn few_models_of_gdn() {
    few(REPLAYSSM_FAMILY_GDN, REPLAYSSM_READOUT_EXACT);
    few(REPLAYSSM_FAMILY_GDN, REPLAYSSM_READOUT_FULL);
}

#[test]
fn few_models_of_kda() {
    few(REPLAYSSM_FAMILY_KDA, REPLAYSSM_READOUT_EXACT);
    few(REPLAYSSM_FAMILY_KDA, REPLAYSSM_READOUT_FULL);
}

/// One thread beside three.
fn two_of_the_cpu(spec: &Spec) -> [Rig; 2] {
    [1, 3].map(|threads| Rig::on_backend(REPLAYSSM_BACKEND_CPU, Spec { threads, ..spec.clone() }).expect("a CPU rig"))
}

/// The comparison finds nothing where there is nothing: two CPU rigs.
#[test]
fn the_cpu_equals_itself() {
    for (name, spec, shape, seed, rounds) in models().into_iter().step_by(7) {
        Both::new(name, two_of_the_cpu(&spec), shape, seed).run(rounds);
    }
}

/// And it finds one byte.
#[test]
fn a_byte_that_differs_is_found_and_named() {
    // The first byte of a tile, an element, or a token's record.
    let found = |kind: i32, pool: usize, request: usize, byte: &dyn Fn(&Both, usize) -> usize| {
        let (_, spec, shape, seed, _) = models().swap_remove(0);
        let spec = Spec { rings: 0, layers: 1, headdim: 20, schedule: REPLAYSSM_SCHEDULE_NONE, window: 32, ..spec };
        let mut both = Both::new("this model".into(), two_of_the_cpu(&spec), shape, seed);
        both.step();
        both.step();
        both.requests.iter().for_each(|request| assert!(request.position() > 0));
        both.compare();
        let c = *components(both.pools(1)[pool].handle).iter().find(|c| c.kind == kind).expect("the component");
        let at = address(&c, 0, both.requests[request].slot) + byte(&both, c.bytes as usize);
        poke(at, &[peek(at, 1)[0] ^ 1]);
        let panic =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| both.compare())).expect_err("a difference");
        panic.downcast_ref::<String>().expect("a sentence").clone()
    };
    let text = found(REPLAYSSM_COMPONENT_CHECKPOINT, 0, 1, &|_, _| 2);
    assert!(text.starts_with("this model, round 0: checkpoint of pool 0, layer 0, slot 4, element "), "{text}");
    assert!(text.contains("; 1 of "), "{text}");
    let text = found(REPLAYSSM_COMPONENT_X, 0, 0, &|_, _| 0);
    assert!(text.contains("record of component 3, layer 0, ring 1, block 0, token 0, element 0: "), "{text}");
    let text = found(REPLAYSSM_COMPONENT_CONV, 1, 2, &|both, bytes| {
        let rows = both.shape.width - 1 + both.spec().keep + both.spec().t_max;
        (both.requests[2].position() - 1) % rows * (bytes / rows)
    });
    assert!(text.contains("record of component 12, layer 0, ring 6, block 0, token "), "{text}");
    let text = found(REPLAYSSM_COMPONENT_TAGS, 0, 2, &|_, _| 8);
    assert!(text.contains("tag of pool 0, layer 0, slot 6, tile 1: 0 on the CPU, 1 on the other"), "{text}");
}
