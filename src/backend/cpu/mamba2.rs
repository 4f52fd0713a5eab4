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

    /// dt and g of the records `[from, to)`, oldest first.
    #[inline(always)]
    pub(super) fn load_gates(&self, records: Range<i64>, into: &mut Gates, tally: &mut Tally) {
        for (p, gates) in records.zip(into.iter_mut()) {
            tally.ring_read += 8;
            let mut pair = [0f32; 2];
            // SAFETY: a record of this head in the ring.
            unsafe { raw::load(self.dt.at(self.head(), self.row(p)), Dtype::F32, &mut pair) };
            let [dt, g] = pair;
            *gates = (dt, g);
        }
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

    /// Replays records on a tile whose history begins at `tag`; `gates` are those of the records from there on.
    #[allow(clippy::too_many_arguments, reason = "a tile, its records and what was decoded of them")]
    #[inline(always)]
    pub(super) fn replay(
        &self,
        tile: usize,
        tag: i64,
        range: Range<i64>,
        gates: &Gates,
        state: &mut Tile,
        cache: &mut GroupCache,
        tally: &mut Tally,
    ) {
        let mut x = [0f32; TILE_ROWS];
        for p in range {
            let (dt, g) = gates.get((p - tag) as usize).copied().unwrap_or((0.0, 0.0));
            self.record_x(p, self.checkpoint.rows(tile), &mut x, tally);
            let b = cache.record(self, tag, p, tally);
            state.update(Decay::new(g), &x.map(|x| dt * x), b);
        }
    }
}

/// dt and g of records or tokens.
pub(super) type Gates = [(f32, f32); MAX_HISTORY];

/// Records and tokens whose B (and C) a group's heads share are decoded once: the first of a history, and of a step.
const CACHED_RECORDS: usize = 16;
const CACHED_TOKENS: usize = 8;

/// What the heads of one group of one row share. Filled as it is needed.
pub(super) struct GroupCache {
    /// Row (or list entry), group and first record.
    key: Option<(i64, usize, i64)>,
    records: usize,
    tokens: usize,
    products: bool,
    b: [Columns; CACHED_RECORDS],
    own_b: [Columns; CACHED_TOKENS],
    own_c: [Columns; CACHED_TOKENS],
    /// B . C of each token with the records, then with the tokens up to it.
    with_records: [[f32; CACHED_RECORDS]; CACHED_TOKENS],
    with_tokens: [[f32; CACHED_TOKENS]; CACHED_TOKENS],
    spare: Columns,
}

impl GroupCache {
    pub(super) fn new() -> Self {
        GroupCache {
            key: None,
            records: 0,
            tokens: 0,
            products: false,
            b: std::array::from_fn(|_| Columns::zero()),
            own_b: std::array::from_fn(|_| Columns::zero()),
            own_c: std::array::from_fn(|_| Columns::zero()),
            with_records: [[0.0; CACHED_RECORDS]; CACHED_TOKENS],
            with_tokens: [[0.0; CACHED_TOKENS]; CACHED_TOKENS],
            spare: Columns::zero(),
        }
    }

    /// Forgets everything unless it is for this row, group and first record.
    #[inline(always)]
    pub(super) fn begin(&mut self, row: i64, group: usize, tag: i64) {
        if self.key != Some((row, group, tag)) {
            self.key = Some((row, group, tag));
            (self.records, self.tokens, self.products) = (0, 0, false);
        }
    }

    /// B of the record of token `p`.
    #[inline(always)]
    fn record(&mut self, state: &HeadState<'_>, tag: i64, p: i64, tally: &mut Tally) -> &Columns {
        let index = (p - tag) as usize;
        while self.records <= index && self.records < CACHED_RECORDS {
            if let Some(b) = self.b.get_mut(self.records) {
                state.record_b(tag + self.records as i64, b, tally);
            }
            self.records += 1;
        }
        match self.b.get(index) {
            Some(b) => b,
            None => {
                state.record_b(p, &mut self.spare, tally);
                &self.spare
            }
        }
    }
}

/// What a thread needs while it goes through work items; made once for many of them.
struct Scratch {
    tally: Tally,
    cache: GroupCache,
    tile: Tile,
    /// Of the history, then of a step's first tokens.
    gates: Gates,
    own: [(f32, f32); MAX_PARALLEL],
    y: [[f32; MAX_DIM as usize]; CACHED_TOKENS],
    x: [f32; MAX_DIM as usize],
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
    let bytes = layout.head_bytes() as i64 * dims.nheads as i64 / per_row;
    cpu.for_ranges(exec, batch.n_rows * per_row, bytes, |items| {
        dispatch!(cpu.isa, work(kernel: &Kernel<'_>, per_row: i64, items: Range<i64>));
    });
}

#[inline(always)]
fn work(kernel: &Kernel<'_>, per_row: i64, items: Range<i64>) {
    let mut scratch = Scratch {
        tally: Tally::default(),
        cache: GroupCache::new(),
        tile: Tile::zero(TILE_ROWS, kernel.dims.dstate),
        gates: [(0.0, 0.0); MAX_HISTORY],
        own: [(0.0, 0.0); MAX_PARALLEL],
        y: [[0.0; MAX_DIM as usize]; CACHED_TOKENS],
        x: [0.0; MAX_DIM as usize],
    };
    for item in items {
        let (row, unit) = (item / per_row, (item % per_row) as usize);
        if kernel.batch.keep_tail == 0 {
            kernel.head(row, unit, &mut scratch);
            continue;
        }
        let per_group = kernel.dims.heads_per_group();
        let mut any = None;
        for head in unit * per_group..(unit + 1) * per_group {
            any = kernel.head(row, head, &mut scratch).or(any);
        }
        if let Some(at) = any {
            for t in kernel.tail_of(&at) {
                kernel.write_b(&at.state, &at, t, &mut scratch.tally);
            }
        }
    }
    Counters::of(kernel.slots).add(&scratch.tally);
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

    /// `y = fma(D, x, y)`, the gate, and the store; 32 rows at a time.
    #[inline(always)]
    fn finish(&self, span: &Span, t: i64, head: usize, rows: Range<usize>, y: &mut [f32]) {
        const CHUNK: usize = 32;
        let args = self.args;
        for (i, y) in y.chunks_mut(CHUNK).enumerate() {
            let first = rows.start + i * CHUNK;
            let rows = first..(first + y.len()).min(rows.end);
            if let Some(skip) = &args.d_skip {
                let (mut x, mut d) = ([0f32; CHUNK], [0f32; CHUNK]);
                self.channels(&args.x, span, t, head, rows.clone(), &mut x);
                if args.d_per_element {
                    let at = skip.at(0, 0, head as i64).offset((rows.start * skip.dtype.size()) as i64);
                    if let Some(target) = d.get_mut(..rows.len()) {
                        // SAFETY: a part of the caller's D [H, D].
                        unsafe { raw::load(at, skip.dtype, target) };
                    }
                } else {
                    // SAFETY: an element of the caller's D [H].
                    d.fill(unsafe { raw::load_one(skip.at(0, 0, head as i64), skip.dtype) });
                }
                for ((y, &x), &d) in y.iter_mut().zip(&x).zip(&d) {
                    *y = d.mul_add(x, *y);
                }
            }
            if let Some(z) = &args.z {
                let mut gate = [0f32; CHUNK];
                self.channels(z, span, t, head, rows.clone(), &mut gate);
                for (y, &z) in y.iter_mut().zip(&gate) {
                    *y *= silu(z);
                }
            }
            self.write_out(span, t, head, rows, y);
        }
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
    fn write_record(&self, at: &Live<'_>, t: i64, (dt, g): (f32, f32), tally: &mut Tally) {
        let (state, head) = (&at.state, at.state.head());
        let row = self.slots.rule.row(at.position + t) as usize;
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
    fn head(&self, row: i64, head: usize, scratch: &mut Scratch) -> Option<Live<'_>> {
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
        let Some(tags) = state.checkpoint.valid_tags(slots, position) else {
            let place = Place { id: slot, row, pool: self.pool.index, layer: self.layer };
            Counters::of(slots).fault(fault::POSITION, place);
            self.zero_outputs(&span, head);
            return None;
        };
        let tags = tags.get(..self.layout.dims.tiles())?;
        for (t, own) in (0..span.len).zip(&mut scratch.own) {
            *own = self.gates(&span, t, head);
        }
        // All tiles of a head stand at one position, unless a fold was cut short; each run of equals is worked on as one.
        let mut first = 0;
        for run in tags.chunk_by(|a, b| a == b) {
            let tiles = first..first + run.len();
            first = tiles.end;
            let Some(&tag) = run.first() else { continue };
            scratch.cache.begin(row, state.group(), tag);
            state.load_gates(tag..position, &mut scratch.gates, &mut scratch.tally);
            match self.mode {
                Mode::Extend => {
                    let stop = position + self.tail_of(&at).start;
                    for tile in tiles {
                        self.serial(&at, tile, tag, stop, scratch);
                    }
                }
                Mode::Step => {
                    // SAFETY: ring ids are checked by `resolve`.
                    let flush_before = unsafe { raw::cursor(slots.cursors, ring) }.flush_before.load(Relaxed);
                    let flush = flush_mask(batch, row);
                    let folds = slots.rule.folds(StepView { position, tag, tokens: span.len, flush_before, flush });
                    if folds > 0 {
                        scratch.tally.flushes += tiles.len() as u64;
                    }
                    if self.pool.config.readout == Readout::Exact || batch.max_tokens > MAX_PARALLEL as i64 {
                        for tile in tiles {
                            self.serial(&at, tile, tag, tag + folds, scratch);
                        }
                    } else {
                        self.parallel(&at, tiles, tag, folds, scratch);
                    }
                }
            }
        }
        let recorded = match self.mode {
            Mode::Extend => self.tail_of(&at),
            Mode::Step => 0..span.len,
        };
        let writes_b = self.mode == Mode::Step && head.is_multiple_of(self.dims.heads_per_group());
        for t in recorded {
            self.write_record(&at, t, self.own_gates(&at, t, scratch), &mut scratch.tally);
            if writes_b {
                self.write_b(&state, &at, t, &mut scratch.tally);
            }
        }
        Some(at)
    }

    /// dt and g of an input token.
    #[inline(always)]
    fn own_gates(&self, at: &Live<'_>, t: i64, scratch: &Scratch) -> (f32, f32) {
        match scratch.own.get(t as usize) {
            Some(&gates) => gates,
            None => self.gates(&at.span, t, at.state.head()),
        }
    }

    /// Decodes B and C of the first tokens, once per group.
    #[inline(always)]
    fn cache_tokens(&self, at: &Live<'_>, cache: &mut GroupCache) {
        let n = (at.span.len as usize).min(CACHED_TOKENS);
        while cache.tokens < n {
            let (t, head) = (cache.tokens, at.state.head());
            if let (Some(b), Some(c)) = (cache.own_b.get_mut(t), cache.own_c.get_mut(t)) {
                self.columns(&self.args.b, &at.span, t as i64, head, b);
                self.columns(&self.args.c, &at.span, t as i64, head, c);
            }
            cache.tokens += 1;
        }
    }

    /// History and tokens one by one, the plain update's outputs; the checkpoint is stored as it stands at `stop`.
    #[inline(always)]
    fn serial(&self, at: &Live<'_>, tile: usize, tag: i64, stop: i64, scratch: &mut Scratch) {
        self.cache_tokens(at, &mut scratch.cache);
        let Scratch { tally, cache, tile: state, gates, own, .. } = scratch;
        let (checkpoint, head) = (&at.state.checkpoint, at.state.head());
        let rows = checkpoint.rows(tile);
        checkpoint.load(tile, state, tally);
        let committed = stop.min(at.position);
        at.state.replay(tile, tag, tag..committed, gates, state, cache, tally);
        if stop <= at.position {
            if stop > tag {
                checkpoint.store(tile, state, stop, tally);
            }
            at.state.replay(tile, tag, committed..at.position, gates, state, cache, tally);
        }
        let (mut b, mut c) = (Columns::zero(), Columns::zero());
        let mut x = [0f32; TILE_ROWS];
        for t in 0..at.span.len {
            let (dt, g) = match own.get(t as usize) {
                Some(&gates) => gates,
                None => self.gates(&at.span, t, head),
            };
            self.channels(&self.args.x, &at.span, t, head, rows.clone(), &mut x);
            let xd = x.map(|x| dt * x);
            let mut y = match (cache.own_b.get(t as usize), cache.own_c.get(t as usize)) {
                (Some(b), Some(c)) => state.update_dot(Decay::new(g), &xd, b, c),
                _ => {
                    self.columns(&self.args.b, &at.span, t, head, &mut b);
                    self.columns(&self.args.c, &at.span, t, head, &mut c);
                    state.update_dot(Decay::new(g), &xd, &b, &c)
                }
            };
            if let Some(y) = y.get_mut(..rows.len()) {
                self.finish(&at.span, t, head, rows.clone(), y);
            }
            if at.position + t + 1 == stop {
                checkpoint.store(tile, state, stop, tally);
            }
        }
    }

    /// The parallel form for tiles that stand at `tag`, of which the first `folds` records are folded on the way.
    #[inline(always)]
    fn parallel(&self, at: &Live<'_>, tiles: Range<usize>, tag: i64, folds: i64, scratch: &mut Scratch) {
        self.cache_tokens(at, &mut scratch.cache);
        let Scratch { tally, cache, tile: tile_state, gates, own, y: all_y, x } = scratch;
        let (state, head) = (&at.state, at.state.head());
        let checkpoint = &state.checkpoint;
        let rows = checkpoint.rows(tiles.start).start..checkpoint.rows(tiles.end - 1).end;
        let high = self.pool.config.readout == Readout::High;
        let history = folds as usize..(at.position - tag) as usize;
        self.cache_products(at, tag, history.end, cache, tally);
        // For each record, the log decay from it to the committed position; then for all of the history.
        let mut since = [0f32; MAX_HISTORY];
        let mut whole = 0f32;
        for j in history.clone().rev() {
            if let (Some(since), Some((_, g))) = (since.get_mut(j), gates.get(j)) {
                *since = whole;
                whole += g;
            }
        }
        let mut before = 0f32;
        let mut block = 0usize;
        while block < at.span.len as usize {
            let tokens = (at.span.len as usize - block).min(CACHED_TOKENS);
            // Checkpoint terms.
            for tile in tiles.clone() {
                if block == 0 && folds > 0 {
                    checkpoint.load(tile, tile_state, tally);
                    state.replay(tile, tag, tag..tag + folds, gates, tile_state, cache, tally);
                    checkpoint.store(tile, tile_state, tag + folds, tally);
                    if high {
                        tile_state.to_high();
                    }
                } else if high {
                    checkpoint.load_high(tile, tile_state, tally);
                } else {
                    checkpoint.load(tile, tile_state, tally);
                }
                let offset = checkpoint.rows(tile).start - rows.start;
                for (i, y) in all_y.iter_mut().enumerate().take(tokens) {
                    // No closures around heavy work: they may be compiled out of line, for the baseline.
                    let c = match cache.own_c.get(i) {
                        Some(c) if block == 0 => c,
                        _ => {
                            self.columns(&self.args.c, &at.span, (block + i) as i64, head, &mut cache.spare);
                            &cache.spare
                        }
                    };
                    let dots = tile_state.dot(c);
                    for (y, &d) in y.iter_mut().skip(offset).zip(&dots).take(tile_state.rows()) {
                        *y = d;
                    }
                }
            }
            // Log decay from the committed position up to and including each token.
            let mut elapsed = [0f32; CACHED_TOKENS];
            for (i, (y, elapsed)) in all_y.iter_mut().zip(&mut elapsed).enumerate().take(tokens) {
                before += own.get(block + i).map_or(0.0, |(_, g)| *g);
                *elapsed = before;
                if let Some(y) = y.get_mut(..rows.len()) {
                    vector::scale(y, exp(whole + before));
                }
            }
            // History, oldest first; each x is read once for all tokens.
            for j in history.clone() {
                let (Some((dt, _)), Some(since)) = (gates.get(j), since.get(j)) else { return };
                state.record_x(tag + j as i64, rows.clone(), x, tally);
                for (i, (y, elapsed)) in all_y.iter_mut().zip(&elapsed).enumerate().take(tokens) {
                    let product = self.product(at, tag, block + i, Earlier::Record(j), cache, tally);
                    if let Some(y) = y.get_mut(..rows.len()) {
                        vector::axpy(y, dt * exp(since + elapsed) * product, x);
                    }
                }
            }
            for (i, y) in all_y.iter_mut().enumerate().take(tokens) {
                let t = block + i;
                let Some(y) = y.get_mut(..rows.len()) else { return };
                // The step's own tokens, newest first.
                let mut between = 0f32;
                for (s, &(dt, g)) in own.iter().enumerate().take(t + 1).rev() {
                    self.channels(&self.args.x, &at.span, s as i64, head, rows.clone(), x);
                    let product = self.product(at, tag, t, Earlier::Token(s), cache, tally);
                    vector::axpy(y, dt * exp(between) * product, x);
                    between += g;
                }
                self.finish(&at.span, t as i64, head, rows.clone(), y);
            }
            block += tokens;
        }
    }

    /// B . C of the first tokens with the first records and with one another, once per group.
    #[inline(always)]
    fn cache_products(&self, at: &Live<'_>, tag: i64, history: usize, cache: &mut GroupCache, tally: &mut Tally) {
        if cache.products {
            return;
        }
        let n = padded(self.dims.dstate);
        let cached = history.min(CACHED_RECORDS) as i64;
        if cached > 0 {
            cache.record(&at.state, tag, tag + cached - 1, tally);
        }
        let GroupCache { b, own_b, own_c, with_records, with_tokens, .. } = cache;
        for ((t, c), (with_records, with_tokens)) in
            own_c.iter().enumerate().zip(with_records.iter_mut().zip(with_tokens)).take(at.span.len as usize)
        {
            let Some(c) = c.0.get(..n) else { return };
            for (b, product) in b.iter().zip(with_records).take(history) {
                let Some(b) = b.0.get(..n) else { return };
                *product = dot(b, c);
            }
            for (b, product) in own_b.iter().zip(with_tokens).take(t + 1) {
                let Some(b) = b.0.get(..n) else { return };
                *product = dot(b, c);
            }
        }
        cache.products = true;
    }

    /// B of an earlier record or token, times C of token `t`.
    #[inline(always)]
    fn product(
        &self,
        at: &Live<'_>,
        tag: i64,
        t: usize,
        earlier: Earlier,
        cache: &mut GroupCache,
        tally: &mut Tally,
    ) -> f32 {
        let cached = match earlier {
            Earlier::Record(j) => cache.with_records.get(t).and_then(|row| row.get(j)),
            Earlier::Token(s) => cache.with_tokens.get(t).and_then(|row| row.get(s)),
        };
        if let Some(&product) = cached {
            return product;
        }
        let (mut b, mut c) = (Columns::zero(), Columns::zero());
        match earlier {
            Earlier::Record(j) => at.state.record_b(tag + j as i64, &mut b, tally),
            Earlier::Token(s) => self.columns(&self.args.b, &at.span, s as i64, at.state.head(), &mut b),
        }
        self.columns(&self.args.c, &at.span, t as i64, at.state.head(), &mut c);
        let n = padded(self.dims.dstate);
        match (b.0.get(..n), c.0.get(..n)) {
            (Some(b), Some(c)) => dot(b, c),
            _ => 0.0,
        }
    }
}

/// What a token's output looks back at.
#[derive(Clone, Copy)]
enum Earlier {
    Record(usize),
    Token(usize),
}
