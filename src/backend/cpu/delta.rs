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

use super::counters::{Counters, Place, Tally};
use super::isa::{Isa, dispatch};
use super::raw;
use super::rows::{Row, Span, flush_mask, position, resolve};
use super::tiles::{Checkpoint, MAX_HISTORY, MAX_PARALLEL, Records};
use super::{Cpu, Ranges};
use crate::dtype::Dtype;
use crate::replay::config::{DeltaDims, DeltaKind, Family, MAX_DIM, Readout, TILE_ROWS};
use crate::replay::launch::{Batch, DeltaArgs, Exec, Gate, Mode, PoolView, SlotsView, Tensor, fault};
use crate::replay::layout::{Component, StateLayout};
use crate::replay::numerics::{Decay, exp, rsqrt, sigmoid, softplus};
use crate::replay::plan::{BLOCK, CHUNK};
use crate::replay::position::StepView;
use crate::replay::step::{Columns, Decays, DeltaTokens, MAX_COLUMNS, Output, Source, Target, Tile, dot, padded};
use crate::replay::vector;

const MAX: usize = MAX_DIM as usize;
const LOOKBACK: usize = MAX_HISTORY + MAX_PARALLEL;

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
    fn record_g(&self, position: i64, into: &mut [f32], tally: &mut Tally) {
        tally.ring_read += self.g.bytes() as u64;
        if let Some(target) = into.get_mut(..self.dims.gates()) {
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

    /// Begins to work on tiles whose history starts at `tag`; `key` names the row (or list entry).
    #[inline(always)]
    pub(super) fn begin(&self, key: i64, tag: i64, scratch: &mut Scratch) {
        scratch.tag = tag;
        scratch.held = 0..0;
        scratch.cache.begin((key, self.qk_head(), tag));
    }

    /// Takes records, and tokens behind them, into a tile (`tokens` is none where there are only records). A checkpoint that is
    /// stored stands at the end of the range. Returns u of the last token, and what `output` asks of the last state.
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
    ) -> ([f32; TILE_ROWS], [f32; TILE_ROWS]) {
        let state = self;
        dispatch!(isa, HeadState::take_in_compiled; state: &HeadState<'_>, isa: Isa, tile: usize, range: Range<i64>, tokens: Option<&Tokens<'_>>, from: Source, to: Target, output: Output<'_>, scratch: &mut Scratch => ([f32; TILE_ROWS], [f32; TILE_ROWS]))
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
    ) -> ([f32; TILE_ROWS], [f32; TILE_ROWS]) {
        let rows = self.checkpoint.rows(tile);
        let tag = scratch.tag;
        let mut first = range.start;
        loop {
            // Chunks begin at multiples of their size after the tag, as the cache holds k.
            let index = (first - tag) as usize;
            let end = range.end.min(first + (CHUNK - index % CHUNK) as i64);
            let n = (end - first) as usize;
            scratch.hold(self, tokens, index, n);
            let Scratch { tally, cache, tile: state, decays, beta, v, .. } = scratch;
            for (p, v) in (first..end).zip(v.iter_mut()) {
                match tokens {
                    Some(tokens) if p >= tokens.position => tokens.v(p, rows.clone(), v),
                    _ => self.record_v(p, rows.clone(), v, tally),
                }
            }
            let k = cache.k(self, tokens, tag, index, n, tally);
            let held = index % CHUNK..index % CHUNK + n;
            let (Some(decays), Some(beta), Some(v)) = (decays.get(held.clone()), beta.get(held), v.get(..n)) else {
                return ([0.0; TILE_ROWS], [0.0; TILE_ROWS]);
            };
            let taken = DeltaTokens { decays, k, beta, v };
            let last = end == range.end;
            let (to, output) = if last { (to, output) } else { (Target::Tile, Output::None) };
            let out = self.checkpoint.delta(isa, tile, state, from, to, range.end, taken, output, tally);
            if last {
                return out;
            }
            (from, first) = (Source::Tile, end);
        }
    }
}

/// What the value heads of one key head of one row share. Filled as it is needed.
struct KeyCache {
    /// Row (or list entry), key head and first record.
    key: Option<(i64, usize, i64)>,
    /// Normalised keys of records and tokens: index of the first since the tag, and how many.
    k: [Columns; CHUNK],
    held: Range<usize>,
    /// Normalised keys and queries of a block of tokens: the first, and how many.
    own_k: [Columns; BLOCK],
    own_q: [Columns; BLOCK],
    tokens: Range<usize>,
    /// Their products with the keys of all records and tokens up to them, if they are there.
    with_k: [[f32; LOOKBACK]; BLOCK],
    with_q: [[f32; LOOKBACK]; BLOCK],
    multiplied: bool,
}

impl KeyCache {
    const EMPTY: Self = KeyCache {
        key: None,
        k: [const { Columns([0.0; MAX_COLUMNS]) }; CHUNK],
        held: 0..0,
        own_k: [const { Columns([0.0; MAX_COLUMNS]) }; BLOCK],
        own_q: [const { Columns([0.0; MAX_COLUMNS]) }; BLOCK],
        tokens: 0..0,
        with_k: [[0.0; LOOKBACK]; BLOCK],
        with_q: [[0.0; LOOKBACK]; BLOCK],
        multiplied: false,
    };

    /// Forgets everything unless it is of the same row, key head and first record.
    #[inline(always)]
    fn begin(&mut self, key: (i64, usize, i64)) {
        if self.key != Some(key) {
            self.key = Some(key);
            (self.held, self.tokens, self.multiplied) = (0..0, 0..0, false);
        }
    }

    /// Keys of `n` records and tokens from index `first` on, which lie in one chunk.
    #[inline(always)]
    fn k(
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
            let Some(k) = self.k.get_mut(i - chunk) else { break };
            match tokens {
                Some(tokens) if p >= tokens.position => tokens.k(p - tokens.position, k),
                _ => state.record_k(p, k, tally),
            }
            self.held.end = i + 1;
        }
        self.k.get(first - chunk..first - chunk + n).unwrap_or_default()
    }

    /// Sees to the keys and queries of tokens up to `t` of the block that begins with `first`.
    #[inline(always)]
    fn hold(&mut self, tokens: &Tokens<'_>, first: usize, t: usize) {
        if self.tokens.start != first {
            (self.tokens, self.multiplied) = (first..first, false);
        }
        while self.tokens.end <= t {
            let index = self.tokens.end - first;
            if let (Some(k), Some(q)) = (self.own_k.get_mut(index), self.own_q.get_mut(index)) {
                tokens.k(self.tokens.end as i64, k);
                tokens.q(self.tokens.end as i64, q);
            }
            self.tokens.end += 1;
        }
    }

    /// Computes the products of a block of `n` tokens from `first` on, without decays; `history` records lie before the step.
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
        dispatch!(tokens.kernel.isa, KeyCache::multiply_compiled; cache: &mut KeyCache, state: &HeadState<'_>, tokens: &Tokens<'_>, tag: i64, history: usize, first: usize, n: usize, tally: &mut Tally);
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
        if self.multiplied {
            return;
        }
        let width = padded(state.dims.k);
        let end = history + first + n;
        let mut chunk = 0;
        while chunk < end {
            let held = CHUNK.min(end - chunk);
            self.k(state, Some(tokens), tag, chunk, held, tally);
            for (i, earlier) in self.k.iter().enumerate().take(held) {
                let own = self.own_k.iter().zip(&self.own_q);
                let products = self.with_k.iter_mut().zip(&mut self.with_q);
                for (t, ((k, q), (with_k, with_q))) in own.zip(products).enumerate().take(n) {
                    if chunk + i > history + first + t {
                        continue;
                    }
                    let (Some(earlier), Some(k), Some(q)) =
                        (earlier.0.get(..width), k.0.get(..width), q.0.get(..width))
                    else {
                        return;
                    };
                    if let (Some(with_k), Some(with_q)) = (with_k.get_mut(chunk + i), with_q.get_mut(chunk + i)) {
                        *with_k = dot(earlier, k);
                        *with_q = dot(earlier, q);
                    }
                }
            }
            chunk += held;
        }
        self.multiplied = true;
    }
}

/// What a thread needs while it goes through work items; made once for many of them.
pub(super) struct Scratch {
    pub(super) tally: Tally,
    pub(super) tile: Tile,
    cache: KeyCache,
    /// Where the history begins.
    tag: i64,
    /// Decays and betas of the head's records and tokens: index of the first since the tag, and how many.
    decays: [Decays; CHUNK],
    beta: [f32; CHUNK],
    held: Range<usize>,
    v: [[f32; TILE_ROWS]; CHUNK],
    /// Of a block of tokens: predictions, then outputs.
    predicted: [[f32; MAX]; BLOCK],
    o: [[f32; MAX]; BLOCK],
    /// u of a step's tokens.
    u: [[f32; MAX]; MAX_PARALLEL],
}

impl Scratch {
    /// All zero, so that making one is one pass over its memory.
    const EMPTY: Self = Scratch {
        tally: Tally::ZERO,
        tile: Tile::EMPTY,
        cache: KeyCache::EMPTY,
        tag: 0,
        decays: [const { Decays::Head(Decay { factor: 0.0, slow: false }) }; CHUNK],
        beta: [0.0; CHUNK],
        held: 0..0,
        v: [[0.0; TILE_ROWS]; CHUNK],
        predicted: [[0.0; MAX]; BLOCK],
        o: [[0.0; MAX]; BLOCK],
        u: [[0.0; MAX]; MAX_PARALLEL],
    };

    /// For states of so many columns.
    #[inline(always)]
    pub(super) fn new(columns: usize) -> Self {
        let mut scratch = Self::EMPTY;
        scratch.tile.begin(columns);
        scratch
    }

    /// Sees to the decays and betas of `n` records and tokens from index `first` on, which lie in one chunk.
    #[inline(always)]
    fn hold(&mut self, state: &HeadState<'_>, tokens: Option<&Tokens<'_>>, first: usize, n: usize) {
        let chunk = first / CHUNK * CHUNK;
        if self.held.start != chunk {
            self.held = chunk..chunk;
        }
        let missing = self.held.end..first + n;
        let mut g = [0f32; MAX];
        for i in missing {
            let p = self.tag + i as i64;
            let (Some(decays), Some(beta)) = (self.decays.get_mut(i - chunk), self.beta.get_mut(i - chunk)) else {
                break;
            };
            *beta = match tokens {
                Some(tokens) if p >= tokens.position => {
                    tokens.g(p - tokens.position, &mut g);
                    tokens.beta(p - tokens.position)
                }
                _ => {
                    state.record_g(p, &mut g, &mut self.tally);
                    state.record_beta(p, &mut self.tally)
                }
            };
            match state.dims.kind {
                DeltaKind::Gdn => *decays = Decays::Head(Decay::new(g.first().copied().unwrap_or(0.0))),
                DeltaKind::Kda => decays.set_columns(g.get(..state.dims.k).unwrap_or_default()),
            }
            self.held.end = i + 1;
        }
    }
}

/// The tokens of one head of a live row.
pub(super) struct Tokens<'a> {
    kernel: &'a Kernel<'a>,
    at: &'a Live<'a>,
    /// The first one's position.
    position: i64,
}

impl Tokens<'_> {
    #[inline(always)]
    fn k(&self, t: i64, into: &mut Columns) {
        self.kernel.key(&self.kernel.args.k, self.at, t, into);
    }

    #[inline(always)]
    fn q(&self, t: i64, into: &mut Columns) {
        self.kernel.key(&self.kernel.args.q, self.at, t, into);
    }

    #[inline(always)]
    fn g(&self, t: i64, into: &mut [f32]) {
        self.kernel.gates(self.at, t, into);
    }

    #[inline(always)]
    fn beta(&self, t: i64) -> f32 {
        self.kernel.beta(self.at, t)
    }

    #[inline(always)]
    fn v(&self, p: i64, rows: Range<usize>, into: &mut [f32]) {
        self.kernel.values(self.at, p - self.position, rows, into);
    }
}

struct Kernel<'a> {
    isa: Isa,
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
    let kernel = &Kernel { isa: cpu.isa, slots, pool, dims, layout, layer, mode, batch, args };
    let by_key_head = batch.keep_tail > 0;
    let per_row = if by_key_head { dims.qk_heads } else { dims.v_heads } as i64;
    let bytes = layout.head_bytes() as i64 * dims.v_heads as i64 / per_row;
    cpu.share_out(exec, batch.n_rows * per_row, bytes, |next| {
        dispatch!(cpu.isa, work; kernel: &Kernel<'_>, per_row: i64, next: Ranges<'_>);
    });
}

#[inline(always)]
fn work(kernel: &Kernel<'_>, per_row: i64, next: Ranges<'_>) {
    let Some(mut items) = next() else { return };
    let (mut scratch, mut seen) = (Scratch::new(kernel.dims.k), Seen::EMPTY);
    loop {
        for item in items {
            let (row, unit) = (item / per_row, (item % per_row) as usize);
            if kernel.batch.keep_tail == 0 {
                kernel.head(row, unit, &mut scratch, &mut seen);
                continue;
            }
            let mut any = None;
            for head in 0..kernel.dims.v_heads {
                if kernel.dims.qk_head(head) == unit {
                    any = kernel.head(row, head, &mut scratch, &mut seen).or(any);
                }
            }
            if let Some(at) = any {
                for t in kernel.tail_of(&at) {
                    kernel.write_k(&at, t, &mut scratch.tally);
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
        let kernel = self;
        dispatch!(self.isa, Kernel::key_compiled; kernel: &Kernel<'_>, tensor: &Tensor, at: &Live<'_>, t: i64, into: &mut Columns);
    }

    #[inline(always)]
    fn key_compiled(&self, tensor: &Tensor, at: &Live<'_>, t: i64, into: &mut Columns) {
        let norm = self.raw_key(tensor, at, t, into);
        if let Some(k) = into.0.get_mut(..self.dims.k) {
            vector::scale(k, norm);
        }
    }

    /// The log decays of an input token.
    #[inline(always)]
    fn gates(&self, at: &Live<'_>, t: i64, into: &mut [f32]) {
        let kernel = self;
        dispatch!(self.isa, Kernel::gates_compiled; kernel: &Kernel<'_>, at: &Live<'_>, t: i64, into: &mut [f32]);
    }

    #[inline(always)]
    fn gates_compiled(&self, at: &Live<'_>, t: i64, into: &mut [f32]) {
        let head = at.state.head() as i64;
        let args = self.args;
        let Some(g) = into.get_mut(..self.dims.gates()) else { return };
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
        let mut g = [0f32; MAX];
        self.gates(at, t, &mut g);
        if let Some(g) = g.get(..self.dims.gates()) {
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
    fn head(&self, row: i64, head: usize, scratch: &mut Scratch, seen: &mut Seen) -> Option<Live<'_>> {
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
        let tokens = Tokens { kernel: self, at: &at, position };
        // All tiles of a head stand at one position, unless a fold was cut short; each run of equals is worked on as one.
        let mut first = 0;
        for run in tags.chunk_by(|a, b| a == b) {
            let tiles = first..first + run.len();
            first = tiles.end;
            let Some(&tag) = run.first() else { continue };
            state.begin(row, tag, scratch);
            match self.mode {
                Mode::Extend => {
                    let tail = self.tail_of(&at);
                    for tile in tiles {
                        self.serial(&tokens, tile, position + tail.start, tail.clone(), scratch);
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
                            self.serial(&tokens, tile, tag + folds, 0..span.len, scratch);
                        }
                    } else {
                        self.parallel(&tokens, tiles, folds, scratch, seen);
                    }
                }
            }
        }
        let recorded = match self.mode {
            Mode::Extend => self.tail_of(&at),
            Mode::Step => 0..span.len,
        };
        let writes_k = self.mode == Mode::Step && self.dims.leads(head);
        for t in recorded {
            self.write_record(&at, t, &mut scratch.tally);
            if writes_k {
                self.write_k(&at, t, &mut scratch.tally);
            }
        }
        Some(at)
    }

    /// History and tokens one by one, the plain update's outputs; the checkpoint is stored as it stands at `stop`, and u
    /// of the tokens `kept` is recorded if a later readout needs it.
    #[inline(always)]
    fn serial(&self, tokens: &Tokens<'_>, tile: usize, stop: i64, kept: Range<i64>, scratch: &mut Scratch) {
        let kernel = self;
        dispatch!(self.isa, Kernel::serial_compiled; kernel: &Kernel<'_>, tokens: &Tokens<'_>, tile: usize, stop: i64, kept: Range<i64>, scratch: &mut Scratch);
    }

    #[inline(always)]
    fn serial_compiled(&self, tokens: &Tokens<'_>, tile: usize, stop: i64, kept: Range<i64>, scratch: &mut Scratch) {
        let (at, tag) = (tokens.at, scratch.tag);
        let state = &at.state;
        let rows = state.checkpoint.rows(tile);
        let (mut from, mut source) = (tag, Source::Memory);
        if tag < stop && stop <= at.position {
            let to = Target::Memory;
            state.take_in(self.isa, tile, tag..stop, None, source, to, Output::None, scratch);
            (from, source) = (stop, Source::Stored);
        }
        let mut q = Columns::zero();
        for t in 0..at.span.len {
            let end = at.position + t + 1;
            let to = match t + 1 {
                _ if end == stop => Target::Memory,
                last if last == at.span.len => Target::Nowhere,
                _ => Target::Tile,
            };
            // Only the first tokens are worth sharing: a key head's value heads come one after the other.
            if t < BLOCK as i64 {
                scratch.cache.hold(tokens, 0, t as usize);
                q.clone_from(scratch.cache.own_q.get(t as usize).unwrap_or(&ZERO));
            } else {
                tokens.q(t, &mut q);
            }
            let output = Output::Value(&q);
            let (u, mut o) = state.take_in(self.isa, tile, from..end, Some(tokens), source, to, output, scratch);
            vector::scale(&mut o, self.args.scale);
            self.write_out(&at.span, t, state.head(), rows.clone(), &o);
            if self.keeps_u() && kept.contains(&t) {
                state.write_u(at.position + t, rows.clone(), &u, &mut scratch.tally);
            }
            (from, source) = (end, if to == Target::Memory { Source::Stored } else { Source::Tile });
        }
    }

    /// The parallel form for tiles that stand at one tag, of which the first `folds` records are folded first.
    #[inline(always)]
    fn parallel(&self, tokens: &Tokens<'_>, tiles: Range<usize>, folds: i64, scratch: &mut Scratch, seen: &mut Seen) {
        let kernel = self;
        dispatch!(self.isa, Kernel::parallel_compiled; kernel: &Kernel<'_>, tokens: &Tokens<'_>, tiles: Range<usize>, folds: i64, scratch: &mut Scratch, seen: &mut Seen);
    }

    #[inline(always)]
    fn parallel_compiled(
        &self,
        tokens: &Tokens<'_>,
        tiles: Range<usize>,
        folds: i64,
        scratch: &mut Scratch,
        seen: &mut Seen,
    ) {
        let (at, tag) = (tokens.at, scratch.tag);
        let state = &at.state;
        let checkpoint = &state.checkpoint;
        let rows = checkpoint.rows(tiles.start).start..checkpoint.rows(tiles.end - 1).end;
        let high = self.pool.config.readout == Readout::High;
        let length = (at.position - tag) as usize;
        let count = at.span.len as usize;
        for block in (0..count).step_by(BLOCK) {
            let n = (count - block).min(BLOCK);
            // Per token: k and q as the checkpoint sees them, and the weights of every record and token up to it.
            scratch.cache.hold(tokens, block, block + n - 1);
            match self.dims.kind {
                DeltaKind::Gdn => self.weigh_by_head(tokens, folds as usize, length, block, n, seen, scratch),
                DeltaKind::Kda => self.weigh_by_column(tokens, folds as usize, length, block, n, seen, scratch),
            }
            // Checkpoint terms.
            for tile in tiles.clone() {
                let offset = checkpoint.rows(tile).start - rows.start;
                if block == 0 && folds > 0 {
                    let (range, from, to) = (tag..tag + folds, Source::Memory, Target::Memory);
                    state.take_in(self.isa, tile, range, None, from, to, Output::None, scratch);
                }
                let Scratch { cache, tile: state, tally, predicted, o, .. } = scratch;
                let mut vectors = [&ZERO; 2 * BLOCK];
                for (t, pair) in vectors.as_chunks_mut::<2>().0.iter_mut().enumerate().take(n) {
                    let own = match self.dims.kind {
                        DeltaKind::Gdn => (cache.own_k.get(t), cache.own_q.get(t)),
                        DeltaKind::Kda => (seen.k.get(t), seen.q.get(t)),
                    };
                    if let (Some(k), Some(q)) = own {
                        *pair = [k, q];
                    }
                }
                let mut dots = [[0f32; TILE_ROWS]; 2 * BLOCK];
                if let (Some(vectors), Some(dots)) = (vectors.get(..2 * n), dots.get_mut(..2 * n)) {
                    checkpoint.dots(self.isa, tile, state, high, block == 0 && folds > 0, vectors, dots, tally);
                }
                let to = predicted.iter_mut().zip(o.iter_mut());
                for ((predicted, o), [with_k, with_q]) in to.zip(dots.as_chunks::<2>().0).take(n) {
                    if let (Some(predicted), Some(o)) = (predicted.get_mut(offset..), o.get_mut(offset..)) {
                        vector::copy(predicted, with_k);
                        vector::copy(o, with_q);
                    }
                }
            }
            let Scratch { tally, predicted, o, u, .. } = scratch;
            for ((predicted, o), &factor) in predicted.iter_mut().zip(o.iter_mut()).zip(&seen.factor).take(n) {
                if let (Some(predicted), Some(o)) = (predicted.get_mut(..rows.len()), o.get_mut(..rows.len())) {
                    vector::scale(predicted, factor);
                    vector::scale(o, factor);
                }
            }
            // Earlier u, oldest first; each is read once for all tokens.
            let mut earlier = [0f32; MAX];
            for j in folds as usize..length + block {
                let u = match j.checked_sub(length).and_then(|own| u.get(own)) {
                    Some(u) => u,
                    None => {
                        state.record_u(tag + j as i64, rows.clone(), &mut earlier, tally);
                        &earlier
                    }
                };
                let weights = seen.with_k.iter().zip(&seen.with_q);
                for ((predicted, o), (with_k, with_q)) in predicted.iter_mut().zip(o.iter_mut()).zip(weights).take(n) {
                    add_weighted(predicted, o, rows.len(), with_k.get(j), with_q.get(j), u);
                }
            }
            for i in 0..n {
                let t = block + i;
                let (Some(predicted), Some(o)) = (predicted.get_mut(i), o.get_mut(i)) else { return };
                let (Some(with_k), Some(with_q)) = (seen.with_k.get(i), seen.with_q.get(i)) else { return };
                let (before, this) = u.split_at_mut(t);
                for (s, u) in before.iter().enumerate().skip(block) {
                    add_weighted(predicted, o, rows.len(), with_k.get(length + s), with_q.get(length + s), u);
                }
                let Some(u) = this.first_mut() else { return };
                let beta = tokens.beta(t as i64);
                tokens.v(at.position + t as i64, rows.clone(), u);
                let with_itself = with_q.get(length + t).copied().unwrap_or(0.0);
                for ((u, &predicted), o) in u.iter_mut().zip(&*predicted).zip(o.iter_mut()).take(rows.len()) {
                    *u = beta * (*u - predicted);
                    *o = self.args.scale * with_itself.mul_add(*u, *o);
                }
                state.write_u(at.position + t as i64, rows.clone(), u, tally);
                self.write_out(&at.span, t as i64, state.head(), rows.clone(), o);
            }
        }
    }

    /// GDN: products of the key head, times what the head decays between the two tokens.
    #[allow(clippy::too_many_arguments, reason = "what the readout of a block consists of")]
    #[inline(always)]
    fn weigh_by_head(
        &self,
        tokens: &Tokens<'_>,
        folds: usize,
        length: usize,
        block: usize,
        n: usize,
        seen: &mut Seen,
        scratch: &mut Scratch,
    ) {
        let kernel = self;
        dispatch!(self.isa, Kernel::weigh_by_head_compiled; kernel: &Kernel<'_>, tokens: &Tokens<'_>, folds: usize, length: usize, block: usize, n: usize, seen: &mut Seen, scratch: &mut Scratch);
    }

    #[allow(clippy::too_many_arguments, reason = "what the readout of a block consists of")]
    #[inline(always)]
    fn weigh_by_head_compiled(
        &self,
        tokens: &Tokens<'_>,
        folds: usize,
        length: usize,
        block: usize,
        n: usize,
        seen: &mut Seen,
        scratch: &mut Scratch,
    ) {
        let (state, tag) = (&tokens.at.state, scratch.tag);
        scratch.cache.multiply(state, tokens, tag, length, block, n, &mut scratch.tally);
        let Scratch { tally, cache, .. } = scratch;
        // Log decays of records and tokens.
        let mut g = [0f32; LOOKBACK];
        for (j, g) in g.iter_mut().enumerate().take(length + block + n).skip(folds) {
            let mut one = [0f32];
            match j.checked_sub(length) {
                Some(own) => tokens.g(own as i64, &mut one),
                None => state.record_g(tag + j as i64, &mut one, tally),
            }
            [*g] = one;
        }
        let own = cache.with_k.iter().zip(&cache.with_q);
        let to = seen.with_k.iter_mut().zip(&mut seen.with_q).zip(&mut seen.factor);
        for (i, ((with_k, with_q), ((to_k, to_q), factor))) in own.zip(to).enumerate().take(n) {
            let range = folds..length + block + i + 1;
            let (Some(g), Some(with_k), Some(with_q), Some(to_k), Some(to_q)) = (
                g.get(range.clone()),
                with_k.get(range.clone()),
                with_q.get(range.clone()),
                to_k.get_mut(range.clone()),
                to_q.get_mut(range),
            ) else {
                return;
            };
            // Going back from the token: the log decay behind each record.
            let mut elapsed = 0f32;
            for (to, g) in to_k.iter_mut().zip(g).rev() {
                *to = elapsed;
                elapsed += g;
            }
            for ((to_k, to_q), (with_k, with_q)) in to_k.iter_mut().zip(to_q).zip(with_k.iter().zip(with_q)) {
                let decay = exp(*to_k);
                *to_k = decay * with_k;
                *to_q = decay * with_q;
            }
            *factor = exp(elapsed);
        }
    }

    /// KDA: the keys decay column by column before they are multiplied.
    #[allow(clippy::too_many_arguments, reason = "what the readout of a block consists of")]
    #[inline(always)]
    fn weigh_by_column(
        &self,
        tokens: &Tokens<'_>,
        folds: usize,
        length: usize,
        block: usize,
        n: usize,
        seen: &mut Seen,
        scratch: &mut Scratch,
    ) {
        let kernel = self;
        dispatch!(self.isa, Kernel::weigh_by_column_compiled; kernel: &Kernel<'_>, tokens: &Tokens<'_>, folds: usize, length: usize, block: usize, n: usize, seen: &mut Seen, scratch: &mut Scratch);
    }

    #[allow(clippy::too_many_arguments, reason = "what the readout of a block consists of")]
    #[inline(always)]
    fn weigh_by_column_compiled(
        &self,
        tokens: &Tokens<'_>,
        folds: usize,
        length: usize,
        block: usize,
        n: usize,
        seen: &mut Seen,
        scratch: &mut Scratch,
    ) {
        let (state, tag) = (&tokens.at.state, scratch.tag);
        let Scratch { tally, cache, .. } = scratch;
        let (columns, width) = (self.dims.k, padded(self.dims.k));
        let mut g = [0f32; MAX];
        for i in 0..n {
            let (mut earlier, mut elapsed) = (Columns::zero(), Columns::zero());
            let (Some(k), Some(q)) = (cache.own_k.get(i), cache.own_q.get(i)) else { return };
            let (Some(this_k), Some(this_q)) = (k.0.get(..width), q.0.get(..width)) else { return };
            for j in (folds..=length + block + i).rev() {
                match j.checked_sub(length) {
                    Some(own) => {
                        tokens.k(own as i64, &mut earlier);
                        tokens.g(own as i64, &mut g);
                    }
                    None => {
                        state.record_k(tag + j as i64, &mut earlier, tally);
                        state.record_g(tag + j as i64, &mut g, tally);
                    }
                }
                let (Some(key), Some(since)) = (earlier.0.get_mut(..columns), elapsed.0.get_mut(..columns)) else {
                    return;
                };
                for (k, e) in key.iter_mut().zip(&*since) {
                    *k *= exp(*e);
                }
                vector::add(since, &g);
                let Some(earlier) = earlier.0.get(..width) else { return };
                let to = (
                    seen.with_k.get_mut(i).and_then(|row| row.get_mut(j)),
                    seen.with_q.get_mut(i).and_then(|row| row.get_mut(j)),
                );
                if let (Some(with_k), Some(with_q)) = to {
                    *with_k = dot(earlier, this_k);
                    *with_q = dot(earlier, this_q);
                }
            }
            // The checkpoint's view: all decays up to and including the token's.
            let (Some(seen_k), Some(seen_q)) = (seen.k.get_mut(i), seen.q.get_mut(i)) else { return };
            for ((seen_k, seen_q), ((k, q), e)) in
                seen_k.0.iter_mut().zip(&mut seen_q.0).zip(k.0.iter().zip(&q.0).zip(&elapsed.0)).take(columns)
            {
                let decay = exp(*e);
                *seen_k = decay * k;
                *seen_q = decay * q;
            }
            if let Some(factor) = seen.factor.get_mut(i) {
                *factor = 1.0;
            }
        }
    }
}

/// What a block of tokens sees: of the checkpoint, and of every record and token up to it (by index since the tag).
struct Seen {
    /// KDA: keys and queries with all decays since the checkpoint.
    k: [Columns; BLOCK],
    q: [Columns; BLOCK],
    /// What the checkpoint's products are still to be multiplied with.
    factor: [f32; BLOCK],
    with_k: [[f32; LOOKBACK]; BLOCK],
    with_q: [[f32; LOOKBACK]; BLOCK],
}

impl Seen {
    const EMPTY: Self = Seen {
        k: [const { Columns([0.0; MAX_COLUMNS]) }; BLOCK],
        q: [const { Columns([0.0; MAX_COLUMNS]) }; BLOCK],
        factor: [0.0; BLOCK],
        with_k: [[0.0; LOOKBACK]; BLOCK],
        with_q: [[0.0; LOOKBACK]; BLOCK],
    };
}

static ZERO: Columns = Columns([0.0; MAX_COLUMNS]);

/// `predicted += a u`, `o += b u`.
#[inline(always)]
fn add_weighted(
    predicted: &mut [f32; MAX],
    o: &mut [f32; MAX],
    rows: usize,
    a: Option<&f32>,
    b: Option<&f32>,
    u: &[f32; MAX],
) {
    if let (Some(&a), Some(&b), Some(predicted), Some(o)) = (a, b, predicted.get_mut(..rows), o.get_mut(..rows)) {
        vector::axpy(predicted, a, u);
        vector::axpy(o, b, u);
    }
}
