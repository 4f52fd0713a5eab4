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

use super::counters::{Counters, Place, Tally};
use super::isa::{Isa, dispatch};
use super::raw;
use super::rows::{Row, Span, flush_mask, position, resolve};
use super::tiles::{Checkpoint, MAX_HISTORY, MAX_PARALLEL, Records};
use super::{Cpu, Ranges};
use crate::dtype::Dtype;
use crate::replay::config::{Family, MAX_DIM, Mamba2Dims, Readout, TILE_ROWS};
use crate::replay::launch::{Batch, Exec, Mamba2Args, Mode, PoolView, SlotsView, Tensor, fault};
use crate::replay::layout::{Component, StateLayout};
use crate::replay::numerics::{Decay, exp, silu, softplus};
use crate::replay::plan::{BLOCK, CHUNK};
use crate::replay::position::StepView;
use crate::replay::step::{Columns, MAX_COLUMNS, Mamba2Tokens, Output, Source, Target, Tile, dot, padded};
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
    fn load_gates(&self, records: Range<i64>, into: &mut Gates, tally: &mut Tally) {
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

    /// Begins to work on tiles whose history starts at `tag`; `key` names the row (or list entry).
    #[inline(always)]
    pub(super) fn begin(&self, key: i64, tag: i64, position: i64, scratch: &mut Scratch) {
        scratch.tag = tag;
        scratch.cache.begin((key, self.group(), tag));
        self.load_gates(tag..position, &mut scratch.gates, &mut scratch.tally);
    }

    /// Takes records, and tokens behind them, into a tile (`tokens` is none where there are only records). A checkpoint that is
    /// stored stands at the end of the range. Returns what `output` asks of the last state.
    #[allow(clippy::too_many_arguments, reason = "a tile, where it is and what it takes in")]
    #[inline(always)]
    pub(super) fn take_in(
        &self,
        isa: Isa,
        tile: usize,
        range: Range<i64>,
        tokens: Option<&Tokens<'_>>,
        from: Source,
        to: Target,
        output: Output<'_>,
        scratch: &mut Scratch,
    ) -> [f32; TILE_ROWS] {
        let state = self;
        dispatch!(isa, HeadState::take_in_compiled; state: &HeadState<'_>, isa: Isa, tile: usize, range: Range<i64>, tokens: Option<&Tokens<'_>>, from: Source, to: Target, output: Output<'_>, scratch: &mut Scratch => [f32; TILE_ROWS])
    }

    #[allow(clippy::too_many_arguments, reason = "a tile, where it is and what it takes in")]
    #[inline(always)]
    fn take_in_compiled(
        &self,
        isa: Isa,
        tile: usize,
        range: Range<i64>,
        tokens: Option<&Tokens<'_>>,
        mut from: Source,
        to: Target,
        output: Output<'_>,
        scratch: &mut Scratch,
    ) -> [f32; TILE_ROWS] {
        let Scratch { tally, cache, tile: state, gates, decays, xd, tag, .. } = scratch;
        let rows = self.checkpoint.rows(tile);
        let mut first = range.start;
        loop {
            // Chunks begin at multiples of their size after the tag, as the cache holds B.
            let index = (first - *tag) as usize;
            let end = range.end.min(first + (CHUNK - index % CHUNK) as i64);
            for ((p, decay), xd) in (first..end).zip(decays.iter_mut()).zip(xd.iter_mut()) {
                let (dt, g) = match tokens {
                    Some(tokens) if p >= tokens.position => {
                        tokens.x(p, rows.clone(), xd);
                        tokens.gates(p)
                    }
                    _ => {
                        self.record_x(p, rows.clone(), xd, tally);
                        gates.get((p - *tag) as usize).copied().unwrap_or((0.0, 0.0))
                    }
                };
                *decay = Decay::new(g);
                if let Some(xd) = xd.get_mut(..rows.len()) {
                    vector::scale(xd, dt);
                }
            }
            let n = (end - first) as usize;
            let b = cache.b(self, tokens, *tag, index, n, tally);
            let (Some(decays), Some(xd)) = (decays.get(..n), xd.get(..n)) else { return [0.0; TILE_ROWS] };
            let taken = Mamba2Tokens { decays, b, xd };
            let last = end == range.end;
            let (to, output) = if last { (to, output) } else { (Target::Tile, Output::None) };
            let out = self.checkpoint.mamba2(isa, tile, state, from, to, range.end, taken, output, tally);
            if last {
                return out;
            }
            (from, first) = (Source::Tile, end);
        }
    }
}

/// dt and g of records.
type Gates = [(f32, f32); MAX_HISTORY];

const LOOKBACK: usize = MAX_HISTORY + MAX_PARALLEL;

/// What the heads of one group of one row share. Filled as it is needed.
struct GroupCache {
    /// Row (or list entry), group and first record.
    key: Option<(i64, usize, i64)>,
    /// B of records and tokens: index of the first since the tag, and how many.
    b: [Columns; CHUNK],
    held: Range<usize>,
    /// C of a block of tokens: the first, and how many.
    c: [Columns; BLOCK],
    tokens: Range<usize>,
    /// Their products with B of all records and tokens up to them, if they are there.
    products: [[f32; LOOKBACK]; BLOCK],
    multiplied: bool,
}

impl GroupCache {
    const EMPTY: Self = GroupCache {
        key: None,
        b: [const { Columns([0.0; MAX_COLUMNS]) }; CHUNK],
        held: 0..0,
        c: [const { Columns([0.0; MAX_COLUMNS]) }; BLOCK],
        tokens: 0..0,
        products: [[0.0; LOOKBACK]; BLOCK],
        multiplied: false,
    };

    /// Forgets everything unless it is of the same row, group and first record.
    #[inline(always)]
    fn begin(&mut self, key: (i64, usize, i64)) {
        if self.key != Some(key) {
            self.key = Some(key);
            (self.held, self.tokens, self.multiplied) = (0..0, 0..0, false);
        }
    }

    /// B of `n` records and tokens from index `first` on, which lie in one chunk.
    #[inline(always)]
    fn b(
        &mut self,
        state: &HeadState<'_>,
        tokens: Option<&Tokens<'_>>,
        tag: i64,
        first: usize,
        n: usize,
        tally: &mut Tally,
    ) -> &[Columns] {
        let chunk = first / CHUNK * CHUNK;
        if self.held.start != chunk {
            self.held = chunk..chunk;
        }
        let missing = self.held.end..first + n;
        for i in missing {
            let p = tag + i as i64;
            let Some(b) = self.b.get_mut(i - chunk) else { break };
            match tokens {
                Some(tokens) if p >= tokens.position => tokens.b(p, b),
                _ => state.record_b(p, b, tally),
            }
            self.held.end = i + 1;
        }
        self.b.get(first - chunk..first - chunk + n).unwrap_or_default()
    }

    /// C of token `t` of the block that begins with `first`.
    #[inline(always)]
    fn c(&mut self, tokens: &Tokens<'_>, first: usize, t: usize) -> &Columns {
        if self.tokens.start != first {
            (self.tokens, self.multiplied) = (first..first, false);
        }
        while self.tokens.end <= t {
            if let Some(c) = self.c.get_mut(self.tokens.end - first) {
                tokens.c(self.tokens.end, c);
            }
            self.tokens.end += 1;
        }
        self.c.get(t - first).unwrap_or(&ZERO)
    }

    /// Computes the products of a block of `n` tokens from `first` on; `history` records lie before the step.
    #[allow(clippy::too_many_arguments, reason = "what the readout of a block consists of")]
    #[inline(always)]
    fn multiply(
        &mut self,
        state: &HeadState<'_>,
        tokens: &Tokens<'_>,
        tag: i64,
        history: usize,
        first: usize,
        n: usize,
        tally: &mut Tally,
    ) {
        let cache = self;
        dispatch!(tokens.kernel.isa, GroupCache::multiply_compiled; cache: &mut GroupCache, state: &HeadState<'_>, tokens: &Tokens<'_>, tag: i64, history: usize, first: usize, n: usize, tally: &mut Tally);
    }

    #[allow(clippy::too_many_arguments, reason = "what the readout of a block consists of")]
    #[inline(always)]
    fn multiply_compiled(
        &mut self,
        state: &HeadState<'_>,
        tokens: &Tokens<'_>,
        tag: i64,
        history: usize,
        first: usize,
        n: usize,
        tally: &mut Tally,
    ) {
        self.c(tokens, first, first + n - 1);
        if self.multiplied {
            return;
        }
        let width = padded(state.dims.dstate);
        let end = history + first + n;
        let mut chunk = 0;
        while chunk < end {
            let held = CHUNK.min(end - chunk);
            self.b(state, Some(tokens), tag, chunk, held, tally);
            for (i, b) in self.b.iter().enumerate().take(held) {
                for (t, (c, products)) in self.c.iter().zip(&mut self.products).enumerate().take(n) {
                    if chunk + i > history + first + t {
                        continue;
                    }
                    if let (Some(b), Some(c), Some(product)) =
                        (b.0.get(..width), c.0.get(..width), products.get_mut(chunk + i))
                    {
                        *product = dot(b, c);
                    }
                }
            }
            chunk += held;
        }
        self.multiplied = true;
    }
}

static ZERO: Columns = Columns([0.0; MAX_COLUMNS]);

/// What a thread needs while it goes through work items; made once for many of them.
pub(super) struct Scratch {
    pub(super) tally: Tally,
    pub(super) tile: Tile,
    cache: GroupCache,
    /// Where the history begins.
    tag: i64,
    /// Of the history.
    gates: Gates,
    decays: [Decay; CHUNK],
    xd: [[f32; TILE_ROWS]; CHUNK],
    y: [[f32; MAX_DIM as usize]; BLOCK],
}

impl Scratch {
    /// All zero, so that making one is one pass over its memory.
    const EMPTY: Self = Scratch {
        tally: Tally::ZERO,
        tile: Tile::EMPTY,
        cache: GroupCache::EMPTY,
        tag: 0,
        gates: [(0.0, 0.0); MAX_HISTORY],
        decays: [Decay { factor: 0.0, slow: false }; CHUNK],
        xd: [[0.0; TILE_ROWS]; CHUNK],
        y: [[0.0; MAX_DIM as usize]; BLOCK],
    };

    /// For states of so many columns.
    #[inline(always)]
    pub(super) fn new(columns: usize) -> Self {
        let mut scratch = Self::EMPTY;
        scratch.tile.begin(columns);
        scratch
    }
}

/// The tokens of one head of a live row.
pub(super) struct Tokens<'a> {
    kernel: &'a Kernel<'a>,
    span: Span,
    head: usize,
    /// The first one's position.
    position: i64,
    /// dt and g of the first ones.
    own: [(f32, f32); MAX_PARALLEL],
}

impl Tokens<'_> {
    #[inline(always)]
    fn gates(&self, p: i64) -> (f32, f32) {
        let t = p - self.position;
        match self.own.get(t as usize) {
            Some(&gates) => gates,
            None => self.kernel.gates(&self.span, t, self.head),
        }
    }

    #[inline(always)]
    fn x(&self, p: i64, rows: Range<usize>, into: &mut [f32]) {
        self.kernel.channels(&self.kernel.args.x, &self.span, p - self.position, self.head, rows, into);
    }

    #[inline(always)]
    fn b(&self, p: i64, into: &mut Columns) {
        self.kernel.columns(&self.kernel.args.b, &self.span, p - self.position, self.head, into);
    }

    #[inline(always)]
    fn c(&self, t: usize, into: &mut Columns) {
        self.kernel.columns(&self.kernel.args.c, &self.span, t as i64, self.head, into);
    }
}

struct Kernel<'a> {
    isa: Isa,
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
    let kernel = &Kernel { isa: cpu.isa, slots, pool, dims, layout, layer, mode, batch, args };
    let by_group = batch.keep_tail > 0;
    let per_row = if by_group { dims.ngroups } else { dims.nheads } as i64;
    let bytes = layout.head_bytes() as i64 * dims.nheads as i64 / per_row;
    cpu.share_out(exec, batch.n_rows * per_row, bytes, |next| {
        dispatch!(cpu.isa, work; kernel: &Kernel<'_>, per_row: i64, next: Ranges<'_>);
    });
}

#[inline(always)]
fn work(kernel: &Kernel<'_>, per_row: i64, next: Ranges<'_>) {
    let Some(mut items) = next() else { return };
    let mut scratch = Scratch::new(kernel.dims.dstate);
    loop {
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
        match next() {
            // What the heads of a group share is decoded once in each range, so that every run moves as many bytes.
            Some(more) => (items, scratch.cache.key) = (more, None),
            None => break,
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
        let kernel = self;
        dispatch!(self.isa, Kernel::finish_compiled; kernel: &Kernel<'_>, span: &Span, t: i64, head: usize, rows: Range<usize>, y: &mut [f32]);
    }

    #[inline(always)]
    fn finish_compiled(&self, span: &Span, t: i64, head: usize, rows: Range<usize>, y: &mut [f32]) {
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
        let mut tokens = Tokens { kernel: self, span, head, position, own: [(0.0, 0.0); MAX_PARALLEL] };
        for (t, own) in (0..span.len).zip(&mut tokens.own) {
            *own = self.gates(&span, t, head);
        }
        // All tiles of a head stand at one position, unless a fold was cut short; each run of equals is worked on as one.
        let mut first = 0;
        for run in tags.chunk_by(|a, b| a == b) {
            let tiles = first..first + run.len();
            first = tiles.end;
            let Some(&tag) = run.first() else { continue };
            state.begin(row, tag, position, scratch);
            match self.mode {
                Mode::Extend => {
                    let stop = position + self.tail_of(&at).start;
                    for tile in tiles {
                        self.serial(&at, &tokens, tile, stop, scratch);
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
                            self.serial(&at, &tokens, tile, tag + folds, scratch);
                        }
                    } else {
                        self.parallel(&at, &tokens, tiles, folds, scratch);
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
            self.write_record(&at, t, tokens.gates(position + t), &mut scratch.tally);
            if writes_b {
                self.write_b(&state, &at, t, &mut scratch.tally);
            }
        }
        Some(at)
    }

    /// History and tokens one by one, the plain update's outputs; the checkpoint is stored as it stands at `stop`.
    #[inline(always)]
    fn serial(&self, at: &Live<'_>, tokens: &Tokens<'_>, tile: usize, stop: i64, scratch: &mut Scratch) {
        let kernel = self;
        dispatch!(self.isa, Kernel::serial_compiled; kernel: &Kernel<'_>, at: &Live<'_>, tokens: &Tokens<'_>, tile: usize, stop: i64, scratch: &mut Scratch);
    }

    #[inline(always)]
    fn serial_compiled(&self, at: &Live<'_>, tokens: &Tokens<'_>, tile: usize, stop: i64, scratch: &mut Scratch) {
        let (state, tag) = (&at.state, scratch.tag);
        let rows = state.checkpoint.rows(tile);
        let (mut from, mut source) = (tag, Source::Memory);
        if tag < stop && stop <= at.position {
            state.take_in(self.isa, tile, tag..stop, None, Source::Memory, Target::Memory, Output::None, scratch);
            (from, source) = (stop, Source::Stored);
        }
        let mut c = Columns::zero();
        for t in 0..at.span.len {
            let end = at.position + t + 1;
            let to = match t + 1 {
                _ if end == stop => Target::Memory,
                last if last == at.span.len => Target::Nowhere,
                _ => Target::Tile,
            };
            // Only the first tokens are worth sharing: a group's heads come one after the other.
            let c = if t < BLOCK as i64 {
                c.clone_from(scratch.cache.c(tokens, 0, t as usize));
                &c
            } else {
                tokens.c(t as usize, &mut c);
                &c
            };
            let mut y = state.take_in(self.isa, tile, from..end, Some(tokens), source, to, Output::Value(c), scratch);
            if let Some(y) = y.get_mut(..rows.len()) {
                self.finish(&at.span, t, state.head(), rows.clone(), y);
            }
            (from, source) = (end, if to == Target::Memory { Source::Stored } else { Source::Tile });
        }
    }

    /// The parallel form for tiles that stand at one tag, of which the first `folds` records are folded on the way.
    #[inline(always)]
    fn parallel(&self, at: &Live<'_>, tokens: &Tokens<'_>, tiles: Range<usize>, folds: i64, scratch: &mut Scratch) {
        let kernel = self;
        dispatch!(self.isa, Kernel::parallel_compiled; kernel: &Kernel<'_>, at: &Live<'_>, tokens: &Tokens<'_>, tiles: Range<usize>, folds: i64, scratch: &mut Scratch);
    }

    #[inline(always)]
    fn parallel_compiled(
        &self,
        at: &Live<'_>,
        tokens: &Tokens<'_>,
        tiles: Range<usize>,
        folds: i64,
        scratch: &mut Scratch,
    ) {
        let (state, tag) = (&at.state, scratch.tag);
        let checkpoint = &state.checkpoint;
        let rows = checkpoint.rows(tiles.start).start..checkpoint.rows(tiles.end - 1).end;
        let high = self.pool.config.readout == Readout::High;
        let length = (at.position - tag) as usize;
        let history = folds as usize..length;
        let count = at.span.len as usize;
        // For each record, the log decay from it to the committed position; then for all of the history.
        let mut since = [0f32; MAX_HISTORY];
        let mut whole = 0f32;
        for j in history.clone().rev() {
            if let (Some(since), Some((_, g))) = (since.get_mut(j), scratch.gates.get(j)) {
                *since = whole;
                whole += g;
            }
        }
        let mut before = 0f32;
        let mut x = [0f32; MAX_DIM as usize];
        for block in (0..count).step_by(BLOCK) {
            let n = (count - block).min(BLOCK);
            // Checkpoint terms; a tile that is folded is read out on its way if there is one token.
            let c = if n == 1 && folds > 0 && block == 0 { Some(scratch.cache.c(tokens, 0, 0).clone()) } else { None };
            for tile in tiles.clone() {
                let offset = checkpoint.rows(tile).start - rows.start;
                let mut dots = [[0f32; TILE_ROWS]; BLOCK];
                if block == 0 && folds > 0 {
                    let output = match &c {
                        Some(c) => checkpoint.readout(high, c),
                        None => Output::None,
                    };
                    let range = tag..tag + folds;
                    let (from, to) = (Source::Memory, Target::Memory);
                    let y = state.take_in(self.isa, tile, range, None, from, to, output, scratch);
                    let [first, ..] = &mut dots;
                    *first = y;
                }
                if c.is_none() {
                    scratch.cache.c(tokens, block, block + n - 1);
                    let Scratch { cache, tile: state, tally, .. } = scratch;
                    let vectors: [&Columns; BLOCK] = std::array::from_fn(|i| cache.c.get(i).unwrap_or(&ZERO));
                    if let (Some(vectors), Some(dots)) = (vectors.get(..n), dots.get_mut(..n)) {
                        checkpoint.dots(self.isa, tile, state, high, block == 0 && folds > 0, vectors, dots, tally);
                    }
                }
                for (y, dots) in scratch.y.iter_mut().zip(&dots).take(n) {
                    if let Some(y) = y.get_mut(offset..) {
                        vector::copy(y, dots);
                    }
                }
            }
            scratch.cache.multiply(state, tokens, tag, length, block, n, &mut scratch.tally);
            let Scratch { tally, cache, gates, y: all_y, .. } = scratch;
            // Log decay from the committed position up to and including each token.
            let mut elapsed = [0f32; BLOCK];
            for (i, (y, elapsed)) in all_y.iter_mut().zip(&mut elapsed).enumerate().take(n) {
                before += tokens.own.get(block + i).map_or(0.0, |(_, g)| *g);
                *elapsed = before;
                if let Some(y) = y.get_mut(..rows.len()) {
                    vector::scale(y, exp(whole + before));
                }
            }
            // History, oldest first; each x is read once for all tokens.
            let mut first = history.start;
            while first < history.end {
                let records = first..history.end.min(first + CHUNK);
                let mut weights = [[0f32; CHUNK]; BLOCK];
                for (((weights, elapsed), products), _) in
                    weights.iter_mut().zip(&elapsed).zip(&cache.products).zip(0..n)
                {
                    let (Some(gates), Some(since), Some(products)) =
                        (gates.get(records.clone()), since.get(records.clone()), products.get(records.clone()))
                    else {
                        return;
                    };
                    let inputs = gates.iter().zip(since).zip(products);
                    for (weight, (((dt, _), since), product)) in weights.iter_mut().zip(inputs) {
                        *weight = dt * exp(since + elapsed) * product;
                    }
                }
                for (j, p) in records.clone().enumerate() {
                    state.record_x(tag + p as i64, rows.clone(), &mut x, tally);
                    for (y, weights) in all_y.iter_mut().zip(&weights).take(n) {
                        if let (Some(y), Some(&weight)) = (y.get_mut(..rows.len()), weights.get(j)) {
                            vector::axpy(y, weight, &x);
                        }
                    }
                }
                first = records.end;
            }
            for (i, (y, products)) in all_y.iter_mut().zip(&cache.products).enumerate().take(n) {
                let t = block + i;
                let Some(y) = y.get_mut(..rows.len()) else { return };
                // The step's own tokens, newest first.
                let mut between = 0f32;
                for (s, &(dt, g)) in tokens.own.iter().enumerate().take(t + 1).rev() {
                    tokens.x(at.position + s as i64, rows.clone(), &mut x);
                    let product = products.get(length + s).copied().unwrap_or(0.0);
                    vector::axpy(y, dt * exp(between) * product, &x);
                    between += g;
                }
                self.finish(&at.span, t as i64, state.head(), rows.clone(), y);
            }
        }
    }
}
