//! Checkpoint tiles: loading, storing and their tags, the same for every family with a state.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use super::counters::Tally;
use super::isa::Isa;
use super::lanes::on_lanes;
use super::raw;
use crate::dtype::Dtype;
use crate::replay::config::{Format, MAX_DIM, MAX_MIN_REWIND, MAX_WINDOW, StateDims, TILE_ROWS};
use crate::replay::launch::{Address, PoolView, SlotsView};
use crate::replay::layout::{Component, StateLayout};
use crate::replay::numerics::{rounding_words, to_bf16_stochastic, to_f16, to_f16_stochastic};
use crate::replay::plan;
use crate::replay::step::{
    self, Bf16Rows, Columns, DeltaTokens, F32Rows, Mamba2Tokens, Memory, NoMemory, Output, PlaneRows, Size, Source,
    Target, Tile,
};
use crate::replay::vector;

/// Tiles of a head at most.
pub(super) const MAX_TILES: usize = MAX_DIM as usize / TILE_ROWS;
/// Records that a history holds at most: W + keep.
pub(super) const MAX_HISTORY: usize = (MAX_WINDOW + MAX_MIN_REWIND) as usize;
/// Longer steps are serial.
pub(super) const MAX_PARALLEL: usize = plan::MAX_PARALLEL as usize;

/// One layer's checkpoint of one slot, one head.
#[derive(Clone, Copy)]
pub(super) struct Checkpoint<'a> {
    pub(super) layout: &'a StateLayout,
    pub(super) head: usize,
    data: Address,
    tags: Address,
    /// Key and layer of stochastic rounding.
    stochastic: Option<(u64, u32)>,
}

impl<'a> Checkpoint<'a> {
    /// The ring is that whose seed rounds.
    #[inline(always)]
    pub(super) fn new(
        slots: &SlotsView,
        pool: &PoolView,
        layout: &'a StateLayout,
        layer: i64,
        slot: i64,
        ring: i64,
        head: usize,
    ) -> Self {
        Checkpoint {
            layout,
            head,
            data: pool.part(Component::Checkpoint, layer, slot),
            tags: pool.part(Component::Tags, layer, slot),
            stochastic: pool.config.stochastic.then(|| {
                // SAFETY: ring ids are checked before any work is done.
                (unsafe { raw::cursor(slots.cursors, ring) }.seed.load(Relaxed), layer as u32)
            }),
        }
    }

    /// The same, rounding to nearest even: for values that come from outside.
    pub(super) fn nearest(self) -> Self {
        Checkpoint { stochastic: None, ..self }
    }

    /// The same head of another slot, for the same ring.
    #[inline(always)]
    pub(super) fn of_slot(self, pool: &PoolView, layer: i64, slot: i64) -> Self {
        let (data, tags) = (pool.part(Component::Checkpoint, layer, slot), pool.part(Component::Tags, layer, slot));
        Checkpoint { data, tags, ..self }
    }

    /// Tags of the head's tiles; none if one of them cannot be trusted at this position.
    #[inline(always)]
    pub(super) fn valid_tags(&self, slots: &SlotsView, position: i64) -> Option<[i64; MAX_TILES]> {
        let mut tags = [0i64; MAX_TILES];
        for (tile, tag) in tags.iter_mut().enumerate().take(self.layout.dims.tiles()) {
            *tag = self.tag(tile);
            if !slots.rule.tag_is_valid(position, *tag) {
                return None;
            }
        }
        Some(tags)
    }

    /// Rows of a tile within the head.
    #[inline(always)]
    pub(super) fn rows(&self, tile: usize) -> Range<usize> {
        let first = tile * TILE_ROWS;
        first..(first + TILE_ROWS).min(self.layout.dims.rows)
    }

    #[inline(always)]
    pub(super) fn tag(&self, tile: usize) -> i64 {
        // SAFETY: the layout gives the place of this tile's tag in the slot's tags.
        unsafe { raw::tag(self.tags.offset(self.layout.tag(self.head, tile) as i64)) }.load(Relaxed)
    }

    #[inline(always)]
    pub(super) fn set_tag(&self, tile: usize, tag: i64) {
        // SAFETY: the layout gives the place of this tile's tag in the slot's tags.
        unsafe { raw::tag(self.tags.offset(self.layout.tag(self.head, tile) as i64)) }.store(tag, Relaxed);
    }

    /// First byte of the head's state.
    pub(super) fn address(&self) -> Address {
        self.data.offset(self.layout.head(self.head) as i64)
    }

    #[inline(always)]
    fn row(&self, row: usize) -> Address {
        self.data.offset(self.layout.row(self.head, row) as i64)
    }

    #[inline(always)]
    fn planes(&self, row: usize) -> (Address, Address) {
        let (high, low) = self.layout.planes(self.head, row);
        (self.data.offset(high as i64), self.data.offset(low as i64))
    }

    /// Loads a tile, losslessly.
    #[inline(always)]
    pub(super) fn load(&self, tile: usize, into: &mut Tile, tally: &mut Tally) {
        let rows = self.rows(tile);
        let n = self.layout.dims.columns;
        into.reshape(rows.len());
        tally.checkpoint_read += (rows.len() * n * self.layout.format.size()) as u64;
        for (i, row) in rows.enumerate() {
            let target = into.row_mut(i);
            match self.layout.format {
                // SAFETY: a state row of the checkpoint, which only this item touches.
                Format::F32 => unsafe { raw::load(self.row(row), Dtype::F32, target) },
                // SAFETY: a state row of the checkpoint, which only this item touches.
                Format::Bf16 => unsafe { raw::load(self.row(row), Dtype::Bf16, target) },
                // SAFETY: a state row of the checkpoint, which only this item touches.
                Format::F16 => unsafe { raw::load(self.row(row), Dtype::F16, target) },
                Format::Split32 => {
                    let (high, low) = self.planes(row);
                    // SAFETY: a row of the high plane, which only this item touches.
                    let high = unsafe { raw::slice::<u16>(high, n) };
                    // SAFETY: a row of the low plane, which only this item touches.
                    let low = unsafe { raw::slice::<i16>(low, n) };
                    vector::load_planes(target, high, low);
                }
            }
        }
    }

    /// Stores a tile as it stands at `position`, and its tag. 16-bit formats round, and the tile becomes what was stored.
    #[inline(always)]
    pub(super) fn store(&self, tile: usize, from: &mut Tile, position: i64, tally: &mut Tally) {
        let rows = self.rows(tile);
        let n = self.layout.dims.columns;
        tally.checkpoint_written += (rows.len() * n * self.layout.format.size()) as u64;
        for (i, row) in rows.enumerate() {
            let source = from.row_mut(i);
            match self.layout.format {
                Format::F32 => {
                    // SAFETY: a state row of the checkpoint, which only this item touches.
                    let target = unsafe { raw::slice_mut::<f32>(self.row(row), n) };
                    vector::store_f32(target, source);
                }
                Format::Split32 => {
                    let (high, low) = self.planes(row);
                    // SAFETY: a row of the high plane, which only this item touches.
                    let high = unsafe { raw::slice_mut::<u16>(high, n) };
                    // SAFETY: a row of the low plane, which only this item touches; the planes do not overlap.
                    let low = unsafe { raw::slice_mut::<i16>(low, n) };
                    vector::store_planes(high, low, source);
                }
                Format::Bf16 | Format::F16 => {
                    // SAFETY: a state row of the checkpoint, which only this item touches.
                    let target = unsafe { raw::slice_mut::<u16>(self.row(row), n) };
                    self.round(row, position, source, target);
                    // SAFETY: the row that was just written.
                    unsafe { raw::load(self.row(row), self.dtype(), source) };
                }
            }
        }
        self.set_tag(tile, position);
    }

    /// The tile's rows in memory.
    #[inline(always)]
    fn f32_rows(&self, tile: usize) -> F32Rows<'_> {
        let (rows, columns) = (self.rows(tile), self.layout.dims.columns);
        // SAFETY: state rows of the checkpoint, one behind the other, which only this item touches.
        F32Rows { data: unsafe { raw::slice_mut(self.row(rows.start), rows.len() * columns) } }
    }

    /// The tile's rows in memory.
    #[inline(always)]
    fn plane_rows(&self, tile: usize) -> PlaneRows<'_> {
        let (rows, columns) = (self.rows(tile), self.layout.dims.columns);
        let (high, low) = self.planes(rows.start);
        let n = rows.len() * columns;
        // SAFETY: rows of the high plane, one behind the other, which only this item touches.
        let high = unsafe { raw::slice_mut(high, n) };
        // SAFETY: the same rows of the low plane; the planes do not overlap.
        PlaneRows { high, low: unsafe { raw::slice_mut(low, n) } }
    }

    /// The rows of a high plane, or of a bf16 state.
    #[inline(always)]
    fn bf16_rows(&self, tile: usize) -> Bf16Rows<'_> {
        let (rows, columns) = (self.rows(tile), self.layout.dims.columns);
        let at = match self.layout.format {
            Format::Split32 => self.planes(rows.start).0,
            _ => self.row(rows.start),
        };
        // SAFETY: rows of the high plane or of a bf16 checkpoint, one behind the other, which only this item touches.
        Bf16Rows { data: unsafe { raw::slice(at, rows.len() * columns) }, ahead: self.ahead(tile) }
    }

    /// Elements from a tile's rows in the high plane to the next tile's, in the order in which heads are worked on; 0 behind the
    /// last. A processor's own prefetching follows a whole state well, but loses a plane where the other one is left out.
    #[inline(always)]
    fn ahead(&self, tile: usize) -> usize {
        let StateDims { heads, rows, columns } = self.layout.dims;
        match self.layout.format {
            Format::Split32 if (tile + 1) * TILE_ROWS < rows => TILE_ROWS * columns,
            Format::Split32 if self.head + 1 < heads => (self.rows(tile).len() + rows) * columns,
            _ => 0,
        }
    }

    #[inline(always)]
    fn size(&self, tile: usize) -> Size {
        Size { rows: self.rows(tile).len(), columns: self.layout.dims.columns }
    }

    /// Counts a pass and, where it stores a checkpoint, sets its tag. What was stored just before is not counted as read again.
    #[inline(always)]
    fn passed(&self, tile: usize, from: Source, to: Target, position: i64, tally: &mut Tally) {
        let size = self.size(tile);
        let bytes = (size.rows * size.columns * self.layout.format.size()) as u64;
        if from == Source::Memory {
            tally.checkpoint_read += bytes;
        }
        if to == Target::Memory {
            tally.checkpoint_written += bytes;
            self.set_tag(tile, position);
        }
    }

    /// [`step::mamba2`] on a tile; a checkpoint that is stored stands at `position`.
    #[allow(clippy::too_many_arguments, reason = "a tile, where it is and what it takes in")]
    #[inline(always)]
    pub(super) fn mamba2(
        &self,
        isa: Isa,
        tile: usize,
        state: &mut Tile,
        from: Source,
        to: Target,
        position: i64,
        tokens: Mamba2Tokens<'_>,
        output: Output<'_>,
        tally: &mut Tally,
    ) -> [f32; TILE_ROWS] {
        let size = self.size(tile);
        state.reshape(size.rows);
        match self.layout.format {
            Format::F32 => {
                let out = mamba2_tile(isa, size, &mut self.f32_rows(tile), state, from, to, tokens, output);
                self.passed(tile, from, to, position, tally);
                out
            }
            Format::Split32 => {
                let out = mamba2_tile(isa, size, &mut self.plane_rows(tile), state, from, to, tokens, output);
                self.passed(tile, from, to, position, tally);
                out
            }
            Format::Bf16 | Format::F16 => {
                if from == Source::Memory {
                    self.load(tile, state, tally);
                }
                let mut none = NoMemory;
                let kept = if to == Target::Memory { Target::Tile } else { to };
                let out = mamba2_tile(isa, size, &mut none, state, Source::Tile, kept, tokens, output.unrounded());
                if to == Target::Memory {
                    self.store(tile, state, position, tally);
                }
                rounded_output(isa, size, state, output).unwrap_or(out)
            }
        }
    }

    /// [`step::delta`] on a tile; a checkpoint that is stored stands at `position`.
    #[allow(clippy::too_many_arguments, reason = "a tile, where it is and what it takes in")]
    #[inline(always)]
    pub(super) fn delta(
        &self,
        isa: Isa,
        tile: usize,
        state: &mut Tile,
        from: Source,
        to: Target,
        position: i64,
        tokens: DeltaTokens<'_>,
        output: Output<'_>,
        tally: &mut Tally,
    ) -> ([f32; TILE_ROWS], [f32; TILE_ROWS]) {
        let size = self.size(tile);
        state.reshape(size.rows);
        match self.layout.format {
            Format::F32 => {
                let out = delta_tile(isa, size, &mut self.f32_rows(tile), state, from, to, tokens, output);
                self.passed(tile, from, to, position, tally);
                out
            }
            Format::Split32 => {
                let out = delta_tile(isa, size, &mut self.plane_rows(tile), state, from, to, tokens, output);
                self.passed(tile, from, to, position, tally);
                out
            }
            Format::Bf16 | Format::F16 => {
                if from == Source::Memory {
                    self.load(tile, state, tally);
                }
                let mut none = NoMemory;
                let kept = if to == Target::Memory { Target::Tile } else { to };
                let (u, out) = delta_tile(isa, size, &mut none, state, Source::Tile, kept, tokens, output.unrounded());
                if to == Target::Memory {
                    self.store(tile, state, position, tally);
                }
                (u, rounded_output(isa, size, state, output).unwrap_or(out))
            }
        }
    }

    /// Asks for the product with `c` of what a readout of this checkpoint sees once it is stored.
    #[inline(always)]
    pub(super) fn readout<'c>(&self, high: bool, c: &'c Columns) -> Output<'c> {
        match self.layout.format {
            Format::F32 => Output::Value(c),
            Format::Split32 if !high => Output::Value(c),
            _ => Output::High(c),
        }
    }

    /// Dot products of a tile's rows with vectors, as the checkpoint stands in memory; of its bf16 view if `high`. A tile
    /// that was stored just before is still in the nearest cache, and is not counted as read again.
    #[allow(clippy::too_many_arguments, reason = "a tile, where it is and what is asked of it")]
    #[inline(always)]
    pub(super) fn dots(
        &self,
        isa: Isa,
        tile: usize,
        state: &mut Tile,
        high: bool,
        just_stored: bool,
        vectors: &[&Columns],
        out: &mut [[f32; TILE_ROWS]],
        tally: &mut Tally,
    ) {
        let size = self.size(tile);
        let mut uncounted = Tally::default();
        let read = |bytes: usize| if just_stored { 0 } else { (size.rows * size.columns * bytes) as u64 };
        match self.layout.format {
            Format::F32 => {
                tally.checkpoint_read += read(4);
                tile_dots(isa, size, &mut self.f32_rows(tile), vectors, out);
            }
            Format::Split32 if !high => {
                tally.checkpoint_read += read(4);
                tile_dots(isa, size, &mut self.plane_rows(tile), vectors, out);
            }
            Format::Split32 | Format::Bf16 => {
                tally.checkpoint_read += read(2);
                tile_dots(isa, size, &mut self.bf16_rows(tile), vectors, out);
            }
            Format::F16 => {
                self.load(tile, state, if just_stored { &mut uncounted } else { tally });
                tile_dots(isa, size, state, vectors, out);
            }
        }
    }

    fn dtype(&self) -> Dtype {
        match self.layout.format {
            Format::Bf16 => Dtype::Bf16,
            Format::F16 => Dtype::F16,
            Format::F32 | Format::Split32 => Dtype::F32,
        }
    }

    /// Rounds a row to 16 bits.
    #[inline(always)]
    fn round(&self, row: usize, position: i64, source: &[f32], target: &mut [u16]) {
        let bf16 = self.layout.format == Format::Bf16;
        let Some((seed, layer)) = self.stochastic else {
            if bf16 {
                vector::store_bf16(target, source);
            } else {
                for (t, &s) in target.iter_mut().zip(source) {
                    *t = to_f16(s);
                }
            }
            return;
        };
        let first = self.layout.element(self.head, row);
        let mut words = ([0u32; 4], usize::MAX);
        for (i, (t, &s)) in target.iter_mut().zip(source).enumerate() {
            let element = first + i;
            if words.1 != element / 4 {
                words = (rounding_words(seed, position, layer, (element / 4) as u32), element / 4);
            }
            let word = words.0.get(element % 4).copied().unwrap_or(0);
            *t = if bf16 { to_bf16_stochastic(s, word) } else { to_f16_stochastic(s, word) };
        }
    }
}

on_lanes! {
    fn mamba2_tile<M: Memory>(
        l;
        size: Size,
        memory: &mut M,
        tile: &mut Tile,
        from: Source,
        to: Target,
        tokens: Mamba2Tokens<'_>,
        output: Output<'_>,
    ) -> [f32; TILE_ROWS] {
        step::mamba2(l, size, memory, tile, from, to, tokens, output)
    }
}

on_lanes! {
    fn delta_tile<M: Memory>(
        l;
        size: Size,
        memory: &mut M,
        tile: &mut Tile,
        from: Source,
        to: Target,
        tokens: DeltaTokens<'_>,
        output: Output<'_>,
    ) -> ([f32; TILE_ROWS], [f32; TILE_ROWS]) {
        step::delta(l, size, memory, tile, from, to, tokens, output)
    }
}

on_lanes! {
    fn tile_dots<M: Memory>(l; size: Size, rows: &mut M, vectors: &[&Columns], out: &mut [[f32; TILE_ROWS]]) -> () {
        step::dots(l, size, rows, vectors, out);
    }
}

/// What [`Output::High`] asks of a tile that was rounded as it was stored: a 16-bit state is its own high plane.
#[inline(always)]
fn rounded_output(isa: Isa, size: Size, tile: &mut Tile, output: Output<'_>) -> Option<[f32; TILE_ROWS]> {
    let Output::High(c) = output else { return None };
    let mut out = [[0f32; TILE_ROWS]];
    tile_dots(isa, size, tile, &[c], &mut out);
    let [out] = out;
    Some(out)
}

/// One component of a ring of one layer: records of `bytes` each, `blocks` (heads or groups) times `rows` of them.
#[derive(Clone, Copy)]
pub(super) struct Records {
    base: Address,
    rows: usize,
    bytes: usize,
}

impl Records {
    #[inline(always)]
    pub(super) fn new(
        slots: &SlotsView,
        pool: &PoolView,
        component: Component,
        layer: i64,
        ring: i64,
        bytes: usize,
    ) -> Self {
        Records { base: pool.part(component, layer, ring), rows: slots.rule.rows() as usize, bytes }
    }

    /// Address of a block's record in a ring row.
    #[inline(always)]
    pub(super) fn at(&self, block: usize, row: usize) -> Address {
        self.base.offset(((block * self.rows + row) * self.bytes) as i64)
    }

    /// Bytes of a record.
    #[inline(always)]
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}
