//! Gated DeltaNet and Kimi Delta Attention: step and extend of one layer.
//!
//! A work item is a value head of a row (with `keep_tail`, all value heads that share a key head: the tail's k records may
//! overwrite history that the others have yet to read). Within an item, checkpoint tiles are independent.
//!
//! ```text
//! serial    kh = k rk;  u = beta (v - S' . kh);  S = fma(u, kh, S');  o = scale (S . qh)
//! parallel  u_t = beta_t (v_t - S0 (e^{G_t} kh_t) - sum_{j<t} u_j (e^{G(j,t)} kh_j) . kh_t)
//!           o_t = scale (S0 (e^{G_t} qh_t) + sum_{j<=t} u_j (e^{G(j,t)} kh_j) . qh_t)
//! ```
//! G(j,t) is summed from the per-token log decays between the two tokens, going back from t; for KDA per key channel. The
//! parallel form needs every record's u, which steps and the tail of an extend keep in the ring; u never enters a state.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use super::Cpu;
use super::counters::{Counters, Place, Tally};
use super::isa::dispatch;
use super::raw;
use super::rows::{Row, Span, flush_mask, position, resolve};
use super::tiles::{Checkpoint, MAX_HISTORY, MAX_PARALLEL, Records};
use crate::dtype::Dtype;
use crate::replay::config::{DeltaDims, DeltaKind, Family, MAX_DIM, Readout, TILE_ROWS};
use crate::replay::launch::{Batch, DeltaArgs, Exec, Gate, Mode, PoolView, SlotsView, Tensor, fault};
use crate::replay::layout::{Component, StateLayout};
use crate::replay::numerics::{Decay, exp, rsqrt, sigmoid, softplus};
use crate::replay::position::StepView;
use crate::replay::step::{Columns, Decays, Tile, dot, padded};
use crate::replay::vector;

/// Tokens for which the parallel readout loads a checkpoint tile once.
const TOKEN_BLOCK: usize = 4;
const MAX: usize = MAX_DIM as usize;

/// One layer's memory of one slot and ring, of one value head.
#[derive(Clone, Copy)]
pub(super) struct HeadState<'a> {
    pub(super) checkpoint: Checkpoint<'a>,
    slots: &'a SlotsView,
    dims: &'a DeltaDims,
    io: Dtype,
    u_dtype: Dtype,
    k: Records,
    norm: Records,
    v: Records,
    g: Records,
    beta: Records,
    u: Records,
}

impl<'a> HeadState<'a> {
    #[allow(clippy::too_many_arguments, reason = "one place of a pool, spelled out")]
    #[inline(always)]
    pub(super) fn new(
        slots: &'a SlotsView,
        pool: &PoolView,
        dims: &'a DeltaDims,
        layout: &'a StateLayout,
        layer: i64,
        slot: i64,
        ring: i64,
        head: usize,
    ) -> Self {
        let (io, u_dtype) = (pool.config.io, pool.config.u_dtype);
        let records = |component, bytes| Records::new(slots, pool, component, layer, ring, bytes);
        HeadState {
            checkpoint: Checkpoint::new(slots, pool, layout, layer, slot, ring, head),
            slots,
            dims,
            io,
            u_dtype,
            k: records(Component::K, dims.k * io.size()),
            norm: records(Component::KNorm, 4),
            v: records(Component::V, dims.v * io.size()),
            g: records(Component::G, dims.gates() * 4),
            beta: records(Component::Beta, 4),
            u: records(Component::U, dims.v * u_dtype.size()),
        }
    }

    #[inline(always)]
    fn head(&self) -> usize {
        self.checkpoint.head
    }

    #[inline(always)]
    fn qk_head(&self) -> usize {
        self.dims.qk_head(self.head())
    }

    #[inline(always)]
    fn row(&self, position: i64) -> usize {
        self.slots.rule.row(position) as usize
    }

    /// The normalised key of a record.
    #[inline(always)]
    fn record_k(&self, position: i64, into: &mut Columns, tally: &mut Tally) {
        let row = self.row(position);
        tally.ring_read += (self.k.bytes() + 4) as u64;
        if let Some(target) = into.0.get_mut(..self.dims.k) {
            // SAFETY: a record of this key head in the ring; no item writes rows of history.
            unsafe { raw::load(self.k.at(self.qk_head(), row), self.io, target) };
            // SAFETY: as above.
            let norm = unsafe { raw::load_one(self.norm.at(self.qk_head(), row), Dtype::F32) };
            vector::scale(target, norm);
        }
    }

    /// The log decays of a record: one, or one per column.
    #[inline(always)]
    fn record_g(&self, position: i64, into: &mut Columns, tally: &mut Tally) {
        tally.ring_read += self.g.bytes() as u64;
        if let Some(target) = into.0.get_mut(..self.dims.gates()) {
            // SAFETY: a record of this head in the ring.
            unsafe { raw::load(self.g.at(self.head(), self.row(position)), Dtype::F32, target) };
        }
    }

    #[inline(always)]
    fn record_beta(&self, position: i64, tally: &mut Tally) -> f32 {
        tally.ring_read += 4;
        // SAFETY: a record of this head in the ring.
        unsafe { raw::load_one(self.beta.at(self.head(), self.row(position)), Dtype::F32) }
    }

    #[inline(always)]
    fn record_v(&self, position: i64, rows: Range<usize>, into: &mut [f32], tally: &mut Tally) {
        tally.ring_read += (rows.len() * self.io.size()) as u64;
        let at = self.v.at(self.head(), self.row(position)).offset((rows.start * self.io.size()) as i64);
        if let Some(target) = into.get_mut(..rows.len()) {
            // SAFETY: a record of this head in the ring.
            unsafe { raw::load(at, self.io, target) };
        }
    }

    #[inline(always)]
    fn record_u(&self, position: i64, rows: Range<usize>, into: &mut [f32], tally: &mut Tally) {
        tally.ring_read += (rows.len() * self.u_dtype.size()) as u64;
        let at = self.u.at(self.head(), self.row(position)).offset((rows.start * self.u_dtype.size()) as i64);
        if let Some(target) = into.get_mut(..rows.len()) {
            // SAFETY: a record of this head in the ring.
            unsafe { raw::load(at, self.u_dtype, target) };
        }
    }

    #[inline(always)]
    fn write_u(&self, position: i64, rows: Range<usize>, u: &[f32], tally: &mut Tally) {
        tally.ring_written += (rows.len() * self.u_dtype.size()) as u64;
        let at = self.u.at(self.head(), self.row(position)).offset((rows.start * self.u_dtype.size()) as i64);
        if let Some(u) = u.get(..rows.len()) {
            // SAFETY: a record of this head in the ring, in a row that holds no history.
            unsafe { raw::store(at, self.u_dtype, u) };
        }
    }

    /// What the log decays of a token do to a tile.
    #[inline(always)]
    fn decays(&self, g: &Columns) -> Decays {
        match self.dims.kind {
            DeltaKind::Gdn => Decays::Head(Decay::new(g.0.first().copied().unwrap_or(0.0))),
            DeltaKind::Kda => Decays::columns(g, self.dims.k),
        }
    }

    /// Replays records on a tile.
    #[inline(always)]
    pub(super) fn replay(&self, tile: usize, range: Range<i64>, state: &mut Tile, tally: &mut Tally) {
        let (mut k, mut g) = (Columns::zero(), Columns::zero());
        let mut v = [0f32; TILE_ROWS];
        for p in range {
            self.record_k(p, &mut k, tally);
            self.record_g(p, &mut g, tally);
            self.record_v(p, self.checkpoint.rows(tile), &mut v, tally);
            let beta = self.record_beta(p, tally);
            state.delta(&self.decays(&g), &k, beta, &v);
        }
    }
}

struct Kernel<'a> {
    slots: &'a SlotsView,
    pool: &'a PoolView,
    dims: &'a DeltaDims,
    layout: StateLayout,
    layer: i64,
    mode: Mode,
    batch: &'a Batch,
    args: &'a DeltaArgs,
}

/// Runs a call's share.
#[allow(clippy::too_many_arguments, reason = "the backend trait's own arguments")]
pub(super) fn run(
    cpu: &Cpu,
    slots: &SlotsView,
    pool: &PoolView,
    layer: i64,
    mode: Mode,
    batch: &Batch,
    args: &DeltaArgs,
    exec: &Exec,
) {
    let (Family::Delta(dims), Some(layout)) = (&pool.config.family, StateLayout::of(&pool.config)) else { return };
    let kernel = &Kernel { slots, pool, dims, layout, layer, mode, batch, args };
    let by_key_head = batch.keep_tail > 0;
    let per_row = if by_key_head { dims.qk_heads } else { dims.v_heads } as i64;
    let bytes = layout.head_bytes() as i64 * dims.v_heads as i64 / per_row;
    cpu.for_each(exec, batch.n_rows * per_row, bytes, |item| {
        let (row, unit) = (item / per_row, (item % per_row) as usize);
        dispatch!(cpu.isa, work(kernel: &Kernel<'_>, row: i64, unit: usize));
    });
}

#[inline(always)]
fn work(kernel: &Kernel<'_>, row: i64, unit: usize) {
    let mut tally = Tally::default();
    if kernel.batch.keep_tail > 0 {
        let mut any = None;
        for head in (0..kernel.dims.v_heads).filter(|&head| kernel.dims.qk_head(head) == unit) {
            any = kernel.head(row, head, &mut tally).or(any);
        }
        if let Some(at) = any {
            for t in kernel.tail_of(&at) {
                kernel.write_k(&at, t, &mut tally);
            }
        }
    } else {
        kernel.head(row, unit, &mut tally);
    }
    Counters::of(kernel.slots).add(&tally);
}

/// A live row as one head's work sees it.
#[derive(Clone, Copy)]
struct Live<'a> {
    span: Span,
    position: i64,
    state: HeadState<'a>,
}

impl<'a> Kernel<'a> {
    /// Tokens of an extend that stay in the ring.
    #[inline(always)]
    fn tail_of(&self, at: &Live<'_>) -> Range<i64> {
        let len = at.span.len;
        len - self.batch.keep_tail.min(len)..len
    }

    /// A key or query as it came, and its reciprocal norm.
    #[inline(always)]
    fn raw_key(&self, tensor: &Tensor, at: &Live<'_>, t: i64, into: &mut Columns) -> f32 {
        let n = self.dims.k;
        if let Some(target) = into.0.get_mut(..n) {
            let from = at.span.at(tensor, t, at.state.qk_head() as i64);
            // SAFETY: a row of the caller's q or k, inside the extents that were checked.
            unsafe { raw::load(from, tensor.dtype, target) };
        }
        match (self.args.l2norm, into.0.get(..padded(n))) {
            (Some(eps), Some(k)) => rsqrt(dot(k, k) + eps),
            _ => 1.0,
        }
    }

    /// A normalised key or query.
    #[inline(always)]
    fn key(&self, tensor: &Tensor, at: &Live<'_>, t: i64, into: &mut Columns) {
        let norm = self.raw_key(tensor, at, t, into);
        if let Some(k) = into.0.get_mut(..self.dims.k) {
            vector::scale(k, norm);
        }
    }

    /// The log decays of an input token.
    #[inline(always)]
    fn gates(&self, at: &Live<'_>, t: i64, into: &mut Columns) {
        let head = at.state.head() as i64;
        let args = self.args;
        let Some(g) = into.0.get_mut(..self.dims.gates()) else { return };
        // SAFETY: a part of the caller's g, inside the extents that were checked.
        unsafe { raw::load(at.span.at(&args.g, t, head), args.g.dtype, g) };
        let Some(a_log) = &args.a_log else { return };
        // SAFETY: an element of the caller's A_log, which has one per head.
        let a = exp(unsafe { raw::load_one(a_log.at(0, 0, head), a_log.dtype) });
        if let Some(bias) = &args.dt_bias {
            let mut buffer = [0f32; MAX];
            if let Some(target) = buffer.get_mut(..g.len()) {
                // SAFETY: a row of the caller's dt_bias.
                unsafe { raw::load(bias.at(0, 0, head), bias.dtype, target) };
                vector::add(g, target);
            }
        }
        match args.gate {
            Gate::Softplus => {
                for g in g {
                    *g = -(a * softplus(*g));
                }
            }
            Gate::LowerBound(bound) => {
                for g in g {
                    *g = bound * sigmoid(a * *g);
                }
            }
            Gate::LogDecay => {}
        }
    }

    #[inline(always)]
    fn beta(&self, at: &Live<'_>, t: i64) -> f32 {
        let beta = &self.args.beta;
        // SAFETY: an element of the caller's beta, inside the extents that were checked.
        let value = unsafe { raw::load_one(at.span.at(beta, t, at.state.head() as i64), beta.dtype) };
        if self.args.beta_sigmoid { sigmoid(value) } else { value }
    }

    #[inline(always)]
    fn values(&self, at: &Live<'_>, t: i64, rows: Range<usize>, into: &mut [f32]) {
        let v = &self.args.v;
        let from = at.span.at(v, t, at.state.head() as i64).offset((rows.start * v.dtype.size()) as i64);
        if let Some(target) = into.get_mut(..rows.len()) {
            // SAFETY: a part of a row of the caller's v, inside the extents that were checked.
            unsafe { raw::load(from, v.dtype, target) };
        }
    }

    #[inline(always)]
    fn write_out(&self, span: &Span, t: i64, head: usize, rows: Range<usize>, o: &[f32]) {
        let out = &self.args.out;
        let at = span.at(out, t, head as i64).offset((rows.start * out.dtype.size()) as i64);
        if let Some(o) = o.get(..rows.len()) {
            // SAFETY: a part of a row of the caller's out, inside the extents that were checked; outputs do not overlap.
            unsafe { raw::store(at, out.dtype, o) };
        }
    }

    fn zero_outputs(&self, span: &Span, head: usize) {
        let zeros = [0f32; MAX];
        for t in 0..span.len {
            self.write_out(span, t, head, 0..self.dims.v, &zeros);
        }
    }

    /// Records v, g and beta of input token `t`.
    #[inline(always)]
    fn write_record(&self, at: &Live<'_>, t: i64, tally: &mut Tally) {
        let (state, head) = (&at.state, at.state.head());
        let row = state.row(at.position + t);
        let from = at.span.at(&self.args.v, t, head as i64);
        // SAFETY: from the caller's v into a record of this head in the ring, in a row that holds no history.
        unsafe { raw::copy(from, state.v.at(head, row), state.v.bytes()) };
        let mut g = Columns::zero();
        self.gates(at, t, &mut g);
        if let Some(g) = g.0.get(..self.dims.gates()) {
            // SAFETY: as above, of g.
            unsafe { raw::store(state.g.at(head, row), Dtype::F32, g) };
        }
        // SAFETY: as above, of beta.
        unsafe { raw::store(state.beta.at(head, row), Dtype::F32, &[self.beta(at, t)]) };
        tally.ring_written += (state.v.bytes() + state.g.bytes() + 4) as u64;
    }

    /// Records k and its reciprocal norm of input token `t`, once per key head.
    #[inline(always)]
    fn write_k(&self, at: &Live<'_>, t: i64, tally: &mut Tally) {
        let (state, head) = (&at.state, at.state.qk_head());
        let row = state.row(at.position + t);
        let norm = self.raw_key(&self.args.k, at, t, &mut Columns::zero());
        let from = at.span.at(&self.args.k, t, head as i64);
        // SAFETY: from the caller's k into a record of this key head in the ring, in a row that holds no history.
        unsafe { raw::copy(from, state.k.at(head, row), state.k.bytes()) };
        // SAFETY: as above, of the norm.
        unsafe { raw::store(state.norm.at(head, row), Dtype::F32, &[norm]) };
        tally.ring_written += (state.k.bytes() + 4) as u64;
    }

    fn keeps_u(&self) -> bool {
        self.pool.config.readout != Readout::Exact
    }

    /// Everything that one head of one row does. None if the row was null, empty or faulty.
    #[inline(always)]
    fn head(&self, row: i64, head: usize, tally: &mut Tally) -> Option<Live<'_>> {
        let (slots, batch) = (self.slots, self.batch);
        let (span, slot, ring) = match resolve(slots, batch, row, self.pool.index, self.layer, head == 0) {
            Row::Null(span) => {
                if !batch.keep_null_outputs {
                    self.zero_outputs(&span, head);
                }
                return None;
            }
            Row::Live { span, slot, ring } => (span, slot, ring),
        };
        if span.len == 0 {
            return None;
        }
        let position = position(slots, ring);
        let state = HeadState::new(slots, self.pool, self.dims, &self.layout, self.layer, slot, ring, head);
        let at = Live { span, position, state };
        let Some(mut tags) = state.checkpoint.valid_tags(slots, position) else {
            let place = Place { id: slot, row, pool: self.pool.index, layer: self.layer };
            Counters::of(slots).fault(fault::POSITION, place);
            self.zero_outputs(&span, head);
            return None;
        };
        let tags = tags.get_mut(..self.layout.dims.tiles())?;
        match self.mode {
            Mode::Extend => {
                let tail = self.tail_of(&at);
                for (tile, tag) in tags.iter().enumerate() {
                    self.serial(&at, tile, *tag, position + tail.start, tail.clone(), tally);
                }
                for t in tail {
                    self.write_record(&at, t, tally);
                }
            }
            Mode::Step => {
                for t in 0..span.len {
                    self.write_record(&at, t, tally);
                    if self.dims.leads(head) {
                        self.write_k(&at, t, tally);
                    }
                }
                // SAFETY: ring ids are checked by `resolve`.
                let flush_before = unsafe { raw::cursor(slots.cursors, ring) }.flush_before.load(Relaxed);
                let flush = flush_mask(batch, row);
                let serial = self.pool.config.readout == Readout::Exact || batch.max_tokens > MAX_PARALLEL as i64;
                for (tile, tag) in tags.iter_mut().enumerate() {
                    let folds =
                        slots.rule.folds(StepView { position, tag: *tag, tokens: span.len, flush_before, flush });
                    tally.flushes += u64::from(folds > 0);
                    if serial {
                        self.serial(&at, tile, *tag, *tag + folds, 0..span.len, tally);
                    } else if folds > 0 {
                        self.fold(&at, tile, *tag, folds, tally);
                    }
                    *tag += folds;
                }
                if !serial {
                    self.parallel(&at, tags, tally);
                }
            }
        }
        Some(at)
    }

    /// Folds the first `folds` records of a tile's history.
    #[inline(always)]
    fn fold(&self, at: &Live<'_>, tile: usize, tag: i64, folds: i64, tally: &mut Tally) {
        let checkpoint = &at.state.checkpoint;
        let mut state = Tile::zero(checkpoint.rows(tile).len(), self.dims.k);
        checkpoint.load(tile, &mut state, tally);
        at.state.replay(tile, tag..tag + folds, &mut state, tally);
        checkpoint.store(tile, &mut state, tag + folds, tally);
    }

    /// History and tokens one by one, the plain update's outputs; the checkpoint is stored as it stands at `stop`, and u
    /// of the tokens `kept` is recorded if a later readout needs it.
    #[inline(always)]
    fn serial(&self, at: &Live<'_>, tile: usize, tag: i64, stop: i64, kept: Range<i64>, tally: &mut Tally) {
        let (checkpoint, head) = (&at.state.checkpoint, at.state.head());
        let rows = checkpoint.rows(tile);
        let mut state = Tile::zero(rows.len(), self.dims.k);
        checkpoint.load(tile, &mut state, tally);
        let committed = stop.min(at.position);
        at.state.replay(tile, tag..committed, &mut state, tally);
        if stop <= at.position {
            if stop > tag {
                checkpoint.store(tile, &mut state, stop, tally);
            }
            at.state.replay(tile, committed..at.position, &mut state, tally);
        }
        let (mut k, mut q, mut g) = (Columns::zero(), Columns::zero(), Columns::zero());
        let mut v = [0f32; TILE_ROWS];
        for t in 0..at.span.len {
            self.key(&self.args.k, at, t, &mut k);
            self.key(&self.args.q, at, t, &mut q);
            self.gates(at, t, &mut g);
            self.values(at, t, rows.clone(), &mut v);
            let u = state.delta(&at.state.decays(&g), &k, self.beta(at, t), &v);
            let mut o = state.dot(&q);
            vector::scale(&mut o, self.args.scale);
            self.write_out(&at.span, t, head, rows.clone(), &o);
            if self.keeps_u() && kept.contains(&t) {
                at.state.write_u(at.position + t, rows.clone(), &u, tally);
            }
            if at.position + t + 1 == stop {
                checkpoint.store(tile, &mut state, stop, tally);
            }
        }
    }

    /// The parallel form over runs of tiles that stand at one position.
    #[inline(always)]
    fn parallel(&self, at: &Live<'_>, tags: &[i64], tally: &mut Tally) {
        let mut first = 0;
        for run in tags.chunk_by(|a, b| a == b) {
            if let Some(&tag) = run.first() {
                self.parallel_run(at, first..first + run.len(), tag, tally);
            }
            first += run.len();
        }
    }

    #[inline(always)]
    fn parallel_run(&self, at: &Live<'_>, tiles: Range<usize>, tag: i64, tally: &mut Tally) {
        let state = &at.state;
        let checkpoint = &state.checkpoint;
        let rows = checkpoint.rows(tiles.start).start..checkpoint.rows(tiles.end - 1).end;
        let mut tile_state = Tile::zero(TILE_ROWS, self.dims.k);
        let mut own_u = [[0f32; MAX]; MAX_PARALLEL];
        let mut block = 0;
        while block < at.span.len {
            let tokens = (at.span.len - block).min(TOKEN_BLOCK as i64) as usize;
            // Per token: k and q as the checkpoint sees them, and the products with every earlier record, oldest first.
            let mut k: [Columns; TOKEN_BLOCK] = std::array::from_fn(|_| Columns::zero());
            let mut q: [Columns; TOKEN_BLOCK] = std::array::from_fn(|_| Columns::zero());
            let mut with_k = [[0f32; MAX_HISTORY + MAX_PARALLEL]; TOKEN_BLOCK];
            let mut with_q = [[0f32; MAX_HISTORY + MAX_PARALLEL]; TOKEN_BLOCK];
            for (i, ((k, q), (with_k, with_q))) in
                k.iter_mut().zip(&mut q).zip(with_k.iter_mut().zip(&mut with_q)).enumerate().take(tokens)
            {
                self.products(at, tag, block + i as i64, k, q, with_k, with_q, tally);
            }
            // Checkpoint terms.
            let mut from_k = [[0f32; MAX]; TOKEN_BLOCK];
            let mut from_q = [[0f32; MAX]; TOKEN_BLOCK];
            for tile in tiles.clone() {
                match self.pool.config.readout {
                    Readout::High => checkpoint.load_high(tile, &mut tile_state, tally),
                    _ => checkpoint.load(tile, &mut tile_state, tally),
                }
                let offset = checkpoint.rows(tile).start - rows.start;
                for ((k, q), (from_k, from_q)) in k.iter().zip(&q).zip(from_k.iter_mut().zip(&mut from_q)).take(tokens)
                {
                    let (dots_k, dots_q) = (tile_state.dot(k), tile_state.dot(q));
                    let to = from_k.iter_mut().zip(from_q.iter_mut()).skip(offset).take(tile_state.rows());
                    for ((from_k, from_q), (&k, &q)) in to.zip(dots_k.iter().zip(&dots_q)) {
                        (*from_k, *from_q) = (k, q);
                    }
                }
            }
            let terms = with_k.iter().zip(&with_q).zip(from_k.iter().zip(&from_q)).take(tokens);
            for (i, ((with_k, with_q), (from_k, from_q))) in terms.enumerate() {
                let t = block + i as i64;
                let (u, o) = self.combine(at, tag, t, rows.clone(), [with_k, with_q], [from_k, from_q], &own_u, tally);
                state.write_u(at.position + t, rows.clone(), &u, tally);
                self.write_out(&at.span, t, state.head(), rows.clone(), &o);
                if let Some(own) = own_u.get_mut(t as usize) {
                    *own = u;
                }
            }
            block += tokens as i64;
        }
    }

    /// For token `t`: `e^{G_t} k_t`, `e^{G_t} q_t`, and `(e^{G(j,t)} k_j) . k_t` and `. q_t` for every record and token j up to
    /// it, at index j - tag. Goes back from t, adding up log decays on the way.
    #[allow(clippy::too_many_arguments, reason = "what the readout of a token consists of")]
    #[inline(always)]
    fn products(
        &self,
        at: &Live<'_>,
        tag: i64,
        t: i64,
        k: &mut Columns,
        q: &mut Columns,
        with_k: &mut [f32],
        with_q: &mut [f32],
        tally: &mut Tally,
    ) {
        let state = &at.state;
        let per_column = self.dims.kind == DeltaKind::Kda;
        self.key(&self.args.k, at, t, k);
        self.key(&self.args.q, at, t, q);
        let n = padded(self.dims.k);
        let (Some(this_k), Some(this_q)) = (k.0.get(..n), q.0.get(..n)) else { return };
        let (mut earlier, mut g, mut elapsed) = (Columns::zero(), Columns::zero(), Columns::zero());
        for p in (tag..=at.position + t).rev() {
            let own = p - at.position;
            if own >= 0 {
                self.key(&self.args.k, at, own, &mut earlier);
                self.gates(at, own, &mut g);
            } else {
                state.record_k(p, &mut earlier, tally);
                state.record_g(p, &mut g, tally);
            }
            let factor = if per_column {
                for (k, &e) in earlier.0.iter_mut().zip(&elapsed.0).take(self.dims.k) {
                    *k *= exp(e);
                }
                1.0
            } else {
                exp(elapsed.0.first().copied().unwrap_or(0.0))
            };
            let index = (p - tag) as usize;
            let Some(that) = earlier.0.get(..n) else { return };
            if let (Some(with_k), Some(with_q)) = (with_k.get_mut(index), with_q.get_mut(index)) {
                *with_k = factor * dot(that, this_k);
                *with_q = factor * dot(that, this_q);
            }
            if let Some(g) = g.0.get(..self.dims.gates()) {
                vector::add(&mut elapsed.0, g);
            }
        }
        // The checkpoint's view: all decays up to and including t's.
        let whole = exp(elapsed.0.first().copied().unwrap_or(0.0));
        for ((k, q), &e) in k.0.iter_mut().zip(&mut q.0).zip(&elapsed.0).take(self.dims.k) {
            let factor = if per_column { exp(e) } else { whole };
            *k *= factor;
            *q *= factor;
        }
    }

    /// u and the output of token `t` from the products and the checkpoint's terms.
    #[allow(clippy::too_many_arguments, reason = "what the readout of a token consists of")]
    #[inline(always)]
    fn combine(
        &self,
        at: &Live<'_>,
        tag: i64,
        t: i64,
        rows: Range<usize>,
        [with_k, with_q]: [&[f32; MAX_HISTORY + MAX_PARALLEL]; 2],
        [from_k, from_q]: [&[f32; MAX]; 2],
        own_u: &[[f32; MAX]; MAX_PARALLEL],
        tally: &mut Tally,
    ) -> ([f32; MAX], [f32; MAX]) {
        let (mut predicted, mut o) = (*from_k, *from_q);
        let mut earlier = [0f32; MAX];
        for (p, (&a, &b)) in (tag..at.position + t).zip(with_k.iter().zip(with_q)) {
            let own = p - at.position;
            let u = match own_u.get(own as usize) {
                Some(u) if own >= 0 => u,
                _ => {
                    at.state.record_u(p, rows.clone(), &mut earlier, tally);
                    &earlier
                }
            };
            if let Some(u) = u.get(..rows.len()) {
                vector::axpy(&mut predicted, a, u);
                vector::axpy(&mut o, b, u);
            }
        }
        let beta = self.beta(at, t);
        let mut u = [0f32; MAX];
        self.values(at, t, rows.clone(), &mut u);
        let with_itself = with_q.get((at.position + t - tag) as usize).copied().unwrap_or(0.0);
        for ((u, &predicted), o) in u.iter_mut().zip(&predicted).zip(&mut o).take(rows.len()) {
            *u = beta * (*u - predicted);
            *o = self.args.scale * with_itself.mul_add(*u, *o);
        }
        (u, o)
    }
}
