//! Mamba-2: step and extend of one layer.
//!
//! A work item is a head of a row (with `keep_tail`, all heads of a group: the tail's B records may overwrite history
//! that the group's other heads have yet to read). Within an item, checkpoint tiles are independent.
//!
//! ```text
//! serial    S = fma(dt x, B, S'), y = fma(D, x, S . C)                        fold, extend and the EXACT readout
//! parallel  y_t = e^{c_t} S0 C_t + sum_{j<=t} dt_j e^{c(j,t)} (B_j . C_t) x_j   FULL and HIGH
//! ```
//! c(j,t) is summed from the per-token log decays between the two tokens, never as a difference of prefix sums.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use super::Cpu;
use super::counters::{Counters, Place, Tally};
use super::isa::dispatch;
use super::raw;
use super::rows::{Row, Span, flush_mask, position, resolve};
use super::tiles::{Checkpoint, MAX_HISTORY, MAX_PARALLEL, Records};
use crate::dtype::Dtype;
use crate::replay::config::{Family, MAX_DIM, Mamba2Dims, Readout, TILE_ROWS};
use crate::replay::launch::{Batch, Exec, Mamba2Args, Mode, PoolView, SlotsView, Tensor, fault};
use crate::replay::layout::{Component, StateLayout};
use crate::replay::numerics::{Decay, exp, silu, softplus};
use crate::replay::position::StepView;
use crate::replay::step::{Columns, Tile, dot, padded};
use crate::replay::vector;

/// Tokens for which the parallel readout loads a checkpoint tile once.
const TOKEN_BLOCK: usize = 8;

/// One layer's memory of one slot and ring, of one head.
#[derive(Clone, Copy)]
pub(super) struct HeadState<'a> {
    pub(super) checkpoint: Checkpoint<'a>,
    slots: &'a SlotsView,
    dims: &'a Mamba2Dims,
    io: Dtype,
    x: Records,
    b: Records,
    dt: Records,
}

impl<'a> HeadState<'a> {
    #[allow(clippy::too_many_arguments, reason = "one place of a pool, spelled out")]
    #[inline(always)]
    pub(super) fn new(
        slots: &'a SlotsView,
        pool: &PoolView,
        dims: &'a Mamba2Dims,
        layout: &'a StateLayout,
        layer: i64,
        slot: i64,
        ring: i64,
        head: usize,
    ) -> Self {
        let io = pool.config.io;
        let records = |component, bytes| Records::new(slots, pool, component, layer, ring, bytes);
        HeadState {
            checkpoint: Checkpoint::new(slots, pool, layout, layer, slot, ring, head),
            slots,
            dims,
            io,
            x: records(Component::X, dims.headdim * io.size()),
            b: records(Component::B, dims.dstate * io.size()),
            dt: records(Component::Dt, 8),
        }
    }

    #[inline(always)]
    fn head(&self) -> usize {
        self.checkpoint.head
    }

    #[inline(always)]
    fn group(&self) -> usize {
        self.head() / self.dims.heads_per_group()
    }

    #[inline(always)]
    fn row(&self, position: i64) -> usize {
        self.slots.rule.row(position) as usize
    }

    /// dt and g of the record of token `position`.
    #[inline(always)]
    fn record_gates(&self, position: i64, tally: &mut Tally) -> (f32, f32) {
        tally.ring_read += 8;
        let mut pair = [0f32; 2];
        // SAFETY: a record of this head in the ring.
        unsafe { raw::load(self.dt.at(self.head(), self.row(position)), Dtype::F32, &mut pair) };
        let [dt, g] = pair;
        (dt, g)
    }

    /// B of the record of token `position`.
    #[inline(always)]
    fn record_b(&self, position: i64, into: &mut Columns, tally: &mut Tally) {
        tally.ring_read += self.b.bytes() as u64;
        if let Some(target) = into.0.get_mut(..self.dims.dstate) {
            // SAFETY: a record of this group in the ring; no item writes rows of history.
            unsafe { raw::load(self.b.at(self.group(), self.row(position)), self.io, target) };
        }
    }

    /// x of the record of token `position`, state rows `rows`.
    #[inline(always)]
    fn record_x(&self, position: i64, rows: Range<usize>, into: &mut [f32], tally: &mut Tally) {
        tally.ring_read += (rows.len() * self.io.size()) as u64;
        let at = self.x.at(self.head(), self.row(position)).offset((rows.start * self.io.size()) as i64);
        if let Some(target) = into.get_mut(..rows.len()) {
            // SAFETY: a record of this head in the ring.
            unsafe { raw::load(at, self.io, target) };
        }
    }

    /// Replays records on a tile.
    #[inline(always)]
    pub(super) fn replay(&self, tile: usize, range: Range<i64>, state: &mut Tile, tally: &mut Tally) {
        let mut b = Columns::zero();
        let mut x = [0f32; TILE_ROWS];
        for p in range {
            let (dt, g) = self.record_gates(p, tally);
            self.record_b(p, &mut b, tally);
            self.record_x(p, self.checkpoint.rows(tile), &mut x, tally);
            state.update(Decay::new(g), &x.map(|x| dt * x), &b);
        }
    }
}

struct Kernel<'a> {
    slots: &'a SlotsView,
    pool: &'a PoolView,
    dims: &'a Mamba2Dims,
    layout: StateLayout,
    layer: i64,
    mode: Mode,
    batch: &'a Batch,
    args: &'a Mamba2Args,
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
    args: &Mamba2Args,
    exec: &Exec,
) {
    let (Family::Mamba2(dims), Some(layout)) = (&pool.config.family, StateLayout::of(&pool.config)) else { return };
    let kernel = &Kernel { slots, pool, dims, layout, layer, mode, batch, args };
    let by_group = batch.keep_tail > 0;
    let per_row = if by_group { dims.ngroups } else { dims.nheads } as i64;
    cpu.for_each(exec, batch.n_rows * per_row, |item| {
        let (row, unit) = (item / per_row, (item % per_row) as usize);
        dispatch!(cpu.isa, work(kernel: &Kernel<'_>, row: i64, unit: usize));
    });
}

#[inline(always)]
fn work(kernel: &Kernel<'_>, row: i64, unit: usize) {
    let mut tally = Tally::default();
    if kernel.batch.keep_tail > 0 {
        let per_group = kernel.dims.heads_per_group();
        let mut any = None;
        for head in unit * per_group..(unit + 1) * per_group {
            any = kernel.head(row, head, &mut tally).or(any);
        }
        if let Some(at) = any {
            let head = unit * per_group;
            for t in kernel.tail_of(&at) {
                kernel.write_b(&at.state_of(head), &at, t, &mut tally);
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

impl<'a> Live<'a> {
    fn state_of(&self, head: usize) -> HeadState<'a> {
        HeadState { checkpoint: self.state.checkpoint.on_head(head), ..self.state }
    }
}

impl<'a> Kernel<'a> {
    /// Tokens of an extend that stay in the ring.
    #[inline(always)]
    fn tail_of(&self, at: &Live<'_>) -> Range<i64> {
        let len = at.span.len;
        len - self.batch.keep_tail.min(len)..len
    }

    /// dt and g of an input token.
    #[inline(always)]
    fn gates(&self, span: &Span, t: i64, head: usize) -> (f32, f32) {
        let head = head as i64;
        let args = self.args;
        // SAFETY: an element of the caller's dt, inside the extents that were checked.
        let raw_dt = unsafe { raw::load_one(span.at(&args.dt, t, head), args.dt.dtype) };
        let biased = match &args.dt_bias {
            // SAFETY: an element of the caller's dt_bias, which has one per head.
            Some(bias) => raw_dt + unsafe { raw::load_one(bias.at(0, 0, head), bias.dtype) },
            None => raw_dt,
        };
        let dt = if args.dt_softplus { softplus(biased) } else { biased };
        // SAFETY: an element of the caller's A, which has one per head.
        let a = unsafe { raw::load_one(args.a.at(0, 0, head), args.a.dtype) };
        (dt, a * dt)
    }

    /// B or C of an input token.
    #[inline(always)]
    fn columns(&self, tensor: &Tensor, span: &Span, t: i64, head: usize, into: &mut Columns) {
        let group = (head / self.dims.heads_per_group()) as i64;
        if let Some(target) = into.0.get_mut(..self.dims.dstate) {
            // SAFETY: a row of the caller's B or C, inside the extents that were checked.
            unsafe { raw::load(span.at(tensor, t, group), tensor.dtype, target) };
        }
    }

    /// x or z of an input token, state rows `rows`.
    #[inline(always)]
    fn channels(&self, tensor: &Tensor, span: &Span, t: i64, head: usize, rows: Range<usize>, into: &mut [f32]) {
        let at = span.at(tensor, t, head as i64).offset((rows.start * tensor.dtype.size()) as i64);
        if let Some(target) = into.get_mut(..rows.len()) {
            // SAFETY: a part of a row of the caller's x or z, inside the extents that were checked.
            unsafe { raw::load(at, tensor.dtype, target) };
        }
    }

    /// `y = fma(D, x, y)`, the gate, and the store.
    #[inline(always)]
    fn finish(&self, span: &Span, t: i64, head: usize, rows: Range<usize>, y: &mut [f32]) {
        let args = self.args;
        let n = rows.len();
        let mut buffer = [0f32; MAX_DIM as usize];
        if let Some(skip) = &args.d_skip {
            let mut x = [0f32; MAX_DIM as usize];
            self.channels(&args.x, span, t, head, rows.clone(), &mut x);
            if args.d_per_element {
                let at = skip.at(0, 0, head as i64).offset((rows.start * skip.dtype.size()) as i64);
                if let Some(target) = buffer.get_mut(..n) {
                    // SAFETY: a part of the caller's D [H, D].
                    unsafe { raw::load(at, skip.dtype, target) };
                }
            } else {
                // SAFETY: an element of the caller's D [H].
                buffer.fill(unsafe { raw::load_one(skip.at(0, 0, head as i64), skip.dtype) });
            }
            for ((y, &x), &d) in y.iter_mut().zip(&x).zip(&buffer).take(n) {
                *y = d.mul_add(x, *y);
            }
        }
        if let Some(z) = &args.z {
            self.channels(z, span, t, head, rows.clone(), &mut buffer);
            for (y, &z) in y.iter_mut().zip(&buffer).take(n) {
                *y *= silu(z);
            }
        }
        self.write_out(span, t, head, rows, y);
    }

    #[inline(always)]
    fn write_out(&self, span: &Span, t: i64, head: usize, rows: Range<usize>, y: &[f32]) {
        let out = &self.args.out;
        let at = span.at(out, t, head as i64).offset((rows.start * out.dtype.size()) as i64);
        if let Some(y) = y.get(..rows.len()) {
            // SAFETY: a part of a row of the caller's out, inside the extents that were checked; outputs of different
            // rows, tokens and heads do not overlap (checked), so only this item writes here.
            unsafe { raw::store(at, out.dtype, y) };
        }
    }

    fn zero_outputs(&self, span: &Span, head: usize) {
        let zeros = [0f32; MAX_DIM as usize];
        for t in 0..span.len {
            self.write_out(span, t, head, 0..self.dims.headdim, &zeros);
        }
    }

    /// Records dt, g and x of input token `t`.
    #[inline(always)]
    fn write_record(&self, at: &Live<'_>, t: i64, tally: &mut Tally) {
        let (state, head) = (&at.state, at.state.head());
        let row = self.slots.rule.row(at.position + t) as usize;
        let (dt, g) = self.gates(&at.span, t, head);
        // SAFETY: a record of this head in the ring, in a row that holds no history.
        unsafe { raw::store(state.dt.at(head, row), Dtype::F32, &[dt, g]) };
        let from = at.span.at(&self.args.x, t, head as i64);
        // SAFETY: from the caller's x into a record of this head in the ring.
        unsafe { raw::copy(from, state.x.at(head, row), state.x.bytes()) };
        tally.ring_written += (state.x.bytes() + 8) as u64;
    }

    /// Records B of input token `t`, once per group.
    #[inline(always)]
    fn write_b(&self, state: &HeadState<'_>, at: &Live<'_>, t: i64, tally: &mut Tally) {
        let row = self.slots.rule.row(at.position + t) as usize;
        let from = at.span.at(&self.args.b, t, state.group() as i64);
        // SAFETY: from the caller's B into a record of this group in the ring, in a row that holds no history.
        unsafe { raw::copy(from, state.b.at(state.group(), row), state.b.bytes()) };
        tally.ring_written += state.b.bytes() as u64;
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
                let stop = position + self.tail_of(&at).start;
                for (tile, tag) in tags.iter().enumerate() {
                    self.serial(&at, tile, *tag, stop, tally);
                }
                for t in self.tail_of(&at) {
                    self.write_record(&at, t, tally);
                }
            }
            Mode::Step => {
                for t in 0..span.len {
                    self.write_record(&at, t, tally);
                    if head.is_multiple_of(self.dims.heads_per_group()) {
                        self.write_b(&state, &at, t, tally);
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
                        self.serial(&at, tile, *tag, *tag + folds, tally);
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
        let mut state = Tile::zero(checkpoint.rows(tile).len(), self.dims.dstate);
        checkpoint.load(tile, &mut state, tally);
        at.state.replay(tile, tag..tag + folds, &mut state, tally);
        checkpoint.store(tile, &mut state, tag + folds, tally);
    }

    /// History and tokens one by one, the plain update's outputs; the checkpoint is stored as it stands at `stop`.
    #[inline(always)]
    fn serial(&self, at: &Live<'_>, tile: usize, tag: i64, stop: i64, tally: &mut Tally) {
        let (checkpoint, head) = (&at.state.checkpoint, at.state.head());
        let rows = checkpoint.rows(tile);
        let mut state = Tile::zero(rows.len(), self.dims.dstate);
        checkpoint.load(tile, &mut state, tally);
        let committed = stop.min(at.position);
        at.state.replay(tile, tag..committed, &mut state, tally);
        if stop <= at.position {
            if stop > tag {
                checkpoint.store(tile, &mut state, stop, tally);
            }
            at.state.replay(tile, committed..at.position, &mut state, tally);
        }
        let (mut b, mut c) = (Columns::zero(), Columns::zero());
        let mut x = [0f32; TILE_ROWS];
        for t in 0..at.span.len {
            let (dt, g) = self.gates(&at.span, t, head);
            self.columns(&self.args.b, &at.span, t, head, &mut b);
            self.columns(&self.args.c, &at.span, t, head, &mut c);
            self.channels(&self.args.x, &at.span, t, head, rows.clone(), &mut x);
            let mut y = state.update_dot(Decay::new(g), &x.map(|x| dt * x), &b, &c);
            self.finish(&at.span, t, head, rows.clone(), &mut y);
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
        let (state, head) = (&at.state, at.state.head());
        let checkpoint = &state.checkpoint;
        let rows = checkpoint.rows(tiles.start).start..checkpoint.rows(tiles.end - 1).end;
        // Gates of the history with, for each record, the log decay from it to the committed position.
        let mut old = [(0f32, 0f32); MAX_HISTORY];
        let history = (at.position - tag) as usize;
        let mut since = 0f32;
        for (j, gates) in old.iter_mut().enumerate().take(history).rev() {
            let (dt, g) = state.record_gates(tag + j as i64, tally);
            *gates = (dt, since);
            since += g;
        }
        let mut own = [(0f32, 0f32); MAX_PARALLEL];
        for (t, gates) in own.iter_mut().enumerate().take(at.span.len as usize) {
            *gates = self.gates(&at.span, t as i64, head);
        }
        let (mut b, mut x) = (Columns::zero(), [0f32; MAX_DIM as usize]);
        let mut tile_state = Tile::zero(TILE_ROWS, self.dims.dstate);
        let mut elapsed = 0f32;
        let mut block = 0i64;
        while block < at.span.len {
            let tokens = (at.span.len - block).min(TOKEN_BLOCK as i64) as usize;
            let mut c: [Columns; TOKEN_BLOCK] = std::array::from_fn(|_| Columns::zero());
            for (t, c) in c.iter_mut().enumerate().take(tokens) {
                self.columns(&self.args.c, &at.span, block + t as i64, head, c);
            }
            // Checkpoint terms.
            let mut y = [[0f32; MAX_DIM as usize]; TOKEN_BLOCK];
            for tile in tiles.clone() {
                match self.pool.config.readout {
                    Readout::High => checkpoint.load_high(tile, &mut tile_state, tally),
                    _ => checkpoint.load(tile, &mut tile_state, tally),
                }
                let offset = checkpoint.rows(tile).start - rows.start;
                for (c, y) in c.iter().zip(&mut y).take(tokens) {
                    let dots = tile_state.dot(c);
                    for (y, &d) in y.iter_mut().skip(offset).zip(&dots).take(tile_state.rows()) {
                        *y = d;
                    }
                }
            }
            for ((i, c), y) in c.iter().enumerate().zip(&mut y).take(tokens) {
                let t = block as usize + i;
                elapsed += own.get(t).map_or(0.0, |(_, g)| *g);
                let from_checkpoint = exp(since + elapsed);
                let y = &mut y[..];
                let Some(y) = y.get_mut(..rows.len()) else { return };
                vector::scale(y, from_checkpoint);
                // History, oldest first.
                for (j, &(dt, since)) in old.iter().enumerate().take(history) {
                    let p = tag + j as i64;
                    state.record_b(p, &mut b, tally);
                    state.record_x(p, rows.clone(), &mut x, tally);
                    let w = dt * exp(since + elapsed) * self.product(&b, c);
                    vector::axpy(y, w, &x);
                }
                // The step's own tokens, newest first.
                let mut between = 0f32;
                for (s, &(dt, g)) in own.iter().enumerate().take(t + 1).rev() {
                    self.columns(&self.args.b, &at.span, s as i64, head, &mut b);
                    self.channels(&self.args.x, &at.span, s as i64, head, rows.clone(), &mut x);
                    let w = dt * exp(between) * self.product(&b, c);
                    vector::axpy(y, w, &x);
                    between += g;
                }
                self.finish(&at.span, t as i64, head, rows.clone(), y);
            }
            block += tokens as i64;
        }
    }

    #[inline(always)]
    fn product(&self, b: &Columns, c: &Columns) -> f32 {
        let n = padded(self.dims.dstate);
        match (b.0.get(..n), c.0.get(..n)) {
            (Some(b), Some(c)) => dot(b, c),
            _ => 0.0,
        }
    }
}
