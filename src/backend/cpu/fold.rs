//! States at held positions: the checkpoint with history taken in by the update's own arithmetic. They go to a dense buffer (export), back
//! to their slot (flush), or to another slot as a checkpoint without a ring (snapshot, store).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::Cpu;
use super::conv1d::{ConvRing, StoredWindow};
use super::counters::{Counters, Place, Tally};
use super::delta;
use super::isa::{Isa, dispatch};
use super::life::{at_i64, bytes_of, check_positions, units_of};
use super::mamba2;
use super::raw;
use super::rows::{Row, check_list, check_lists, entry, position, resolve};
use super::tiles::Checkpoint;
use crate::error::Result;
use crate::replay::config::{ConvDims, Family};
use crate::replay::launch::{
    Address, Batch, Exec, FlushArgs, List, PoolLists, PoolView, SlotsView, SnapshotArgs, StateTensor, fault,
};
use crate::replay::layout::StateLayout;
use crate::replay::position::MAX_POSITION;
use crate::replay::step::{Output, Source, Target, Tile};

/// Where states go.
#[derive(Clone, Copy)]
enum To<'a> {
    /// A buffer of the caller's.
    Dense(&'a StateTensor),
    /// The slot that they are of.
    Own,
    /// Another slot of the pool.
    Slot,
}

struct Job<'a> {
    isa: Isa,
    slots: &'a SlotsView,
    pool: &'a PoolView,
    to: To<'a>,
}

/// One state that is asked for.
#[derive(Clone, Copy)]
struct Held {
    /// Row of a batch, or entry of a list.
    entry: i64,
    /// Its layer, counted in a dense buffer and in the pool.
    index: i64,
    layer: i64,
    slot: i64,
    ring: i64,
    /// With [`To::Slot`].
    target: i64,
    at: i64,
}

/// Runs a head (or 128 channels) of one state.
fn run(job: &Job<'_>, held: Held, unit: usize) {
    dispatch!(job.isa, fold_unit; job: &Job<'_>, held: Held, unit: usize);
}

/// Reads states at held positions into a dense buffer. Nothing of the slot changes.
pub(super) fn export(
    cpu: &Cpu,
    slots: &SlotsView,
    pool: &PoolView,
    list: &List,
    at: Option<Address>,
    dst: &StateTensor,
    exec: &Exec,
) -> Result<()> {
    check_list(slots, list, "list", false)?;
    let layers = dst.layer.map_or(pool.config.n_layers as i64, |_| 1);
    let units = units_of(pool);
    let job = &Job { isa: cpu.isa, slots, pool, to: To::Dense(dst) };
    cpu.for_each(exec, list.n * layers * units, bytes_of(pool), |item| {
        let (i, index, unit) = (item / (layers * units), item / units % layers, (item % units) as usize);
        let Some((slot, ring)) = entry(slots, list, i, pool.index) else { return };
        let at = at.map_or_else(|| position(slots, ring), |array| at_i64(array, i));
        let layer = dst.layer.map_or(index, |l| l as i64);
        run(job, Held { entry: i, index, layer, slot, ring, target: slot, at }, unit);
    });
    Ok(())
}

/// Folds history into checkpoints, or tells later steps to.
pub(super) fn flush(
    cpu: &Cpu,
    slots: &SlotsView,
    pools: &[Arc<PoolView>],
    lists: &PoolLists,
    args: &FlushArgs,
    exec: &Exec,
) -> Result<()> {
    check_lists(slots, pools, lists, "list", true)?;
    check_positions(&lists.rings(), args.position, "flush_args.position")?;
    if args.later {
        if exec.part == 0 {
            flush_later(slots, &lists.rings(), args);
        }
        return Ok(());
    }
    for pool in pools.iter().filter(|pool| pool.config.family.state().is_some()) {
        let (list, layers, units) = (&lists.of(pool), pool.config.n_layers as i64, units_of(pool));
        let job = &Job { isa: cpu.isa, slots, pool, to: To::Own };
        cpu.for_each(exec, list.n * layers * units, bytes_of(pool), |item| {
            let (i, layer, unit) = (item / (layers * units), item / units % layers, (item % units) as usize);
            let Some((slot, ring)) = entry(slots, list, i, pool.index) else { return };
            let at = match args.position {
                Some(array) if at_i64(array, i) < 0 => i64::MAX,
                Some(array) => at_i64(array, i),
                None => position(slots, ring) - slots.rule.keep,
            };
            run(job, Held { entry: i, index: layer, layer, slot, ring, target: slot, at }, unit);
        });
    }
    Ok(())
}

/// Leaves word for the next steps.
fn flush_later(slots: &SlotsView, list: &List, args: &FlushArgs) {
    for i in 0..list.n {
        let Some((_, ring)) = entry(slots, list, i, -1) else { continue };
        let Some(at) = args.position.map(|array| at_i64(array, i)) else { continue };
        if (0..=MAX_POSITION).contains(&at) {
            // SAFETY: ring ids are checked by `entry`.
            unsafe { raw::cursor(slots.cursors, ring) }.flush_before.store(at, Relaxed);
        } else {
            Counters::of(slots).fault(fault::POSITION, Place { id: ring, row: i, pool: -1, layer: -1 });
        }
    }
}

/// Stores exact states as checkpoints without a ring.
#[allow(clippy::too_many_arguments, reason = "the backend trait's own arguments")]
pub(super) fn store(
    cpu: &Cpu,
    slots: &SlotsView,
    pools: &[Arc<PoolView>],
    from: &PoolLists,
    to: &PoolLists,
    at: Option<Address>,
    exec: &Exec,
) {
    for pool in pools {
        let (from, to) = (&from.of(pool), &to.of(pool));
        let (layers, units) = (pool.config.n_layers as i64, units_of(pool));
        let job = &Job { isa: cpu.isa, slots, pool, to: To::Slot };
        cpu.for_each(exec, from.n * layers * units, bytes_of(pool), |item| {
            let (i, layer, unit) = (item / (layers * units), item / units % layers, (item % units) as usize);
            let Some((slot, ring)) = entry(slots, from, i, pool.index) else { return };
            let Some((target, _)) = entry(slots, to, i, pool.index) else { return };
            let at = at.map_or_else(|| position(slots, ring), |array| at_i64(array, i));
            run(job, Held { entry: i, index: layer, layer, slot, ring, target, at }, unit);
        });
    }
}

/// Stores the states that rows of a committed batch have just reached.
pub(super) fn snapshot(
    cpu: &Cpu,
    slots: &SlotsView,
    pools: &[Arc<PoolView>],
    batch: &Batch,
    args: &SnapshotArgs,
    exec: &Exec,
) {
    // Hardly ever is a row due, so rows are looked at here, once for all pools, and only the due ones are shared out.
    for (row, at) in (0..batch.n_rows).filter_map(|row| due(slots, batch, args, row).map(|at| (row, at))) {
        for pool in pools {
            let Some((batch, to)) = args.of(batch, pool) else { continue };
            let (layers, units) = (pool.config.n_layers as i64, units_of(pool));
            let job = &Job { isa: cpu.isa, slots, pool, to: To::Slot };
            // The steps of this batch have reported its ids and lengths already.
            let Row::Live { slot, ring, .. } = resolve(slots, &batch, row, -1, -1, false) else { continue };
            // SAFETY: the array has n_rows elements.
            let target = unsafe { raw::id(&to, row) };
            if target < 0 {
                continue;
            }
            if target >= i64::from(slots.config.n_slots) {
                if exec.part == 0 {
                    Counters::of(slots).fault(fault::ID, Place { id: target, row, pool: pool.index, layer: -1 });
                }
                continue;
            }
            cpu.for_each(exec, layers * units, bytes_of(pool), |item| {
                let layer = item / units;
                run(job, Held { entry: row, index: layer, layer, slot, ring, target, at }, (item % units) as usize);
            });
        }
    }
}

/// The position that is asked for of a row, if the last commit on its ring reached it. The row's slots are the pools' business.
fn due(slots: &SlotsView, batch: &Batch, args: &SnapshotArgs, row: i64) -> Option<i64> {
    let at = at_i64(args.at, row);
    if at < 0 {
        return None;
    }
    // SAFETY: the array has n_rows elements.
    let ring = unsafe { raw::id(&batch.rings, row) };
    if !(0..i64::from(slots.config.n_rings)).contains(&ring) {
        return None;
    }
    // SAFETY: the ring is one of the handle's.
    let cursor = unsafe { raw::cursor(slots.cursors, ring) };
    if let Some(generation) = batch.generation {
        // SAFETY: the array has n_rows elements.
        if unsafe { raw::read::<u32>(generation.offset(row * 4)) } != cursor.generation.load(Relaxed) {
            return None;
        }
    }
    let position = cursor.position.load(Relaxed);
    let before = position - i64::from(cursor.committed.load(Relaxed));
    (before < at && at <= position).then_some(at)
}

#[inline(always)]
fn fold_unit(job: &Job<'_>, held: Held, unit: usize) {
    let (slots, pool) = (job.slots, job.pool);
    let (layer, slot, ring) = (held.layer, held.slot, held.ring);
    match &pool.config.family {
        Family::Mamba2(dims) => {
            let Some(layout) = StateLayout::of(&pool.config) else { return };
            let state = mamba2::HeadState::new(slots, pool, dims, &layout, layer, slot, ring, unit);
            let scratch = mamba2::Scratch::new(dims.dstate);
            let mut source = Mamba2Source { isa: job.isa, key: held.entry, state, scratch };
            fold_head(job, &held, &state.checkpoint, &mut source);
        }
        Family::Delta(dims) => {
            let Some(layout) = StateLayout::of(&pool.config) else { return };
            let state = delta::HeadState::new(slots, pool, dims, &layout, layer, slot, ring, unit);
            let scratch = delta::Scratch::new(dims.k);
            let mut source = DeltaSource { isa: job.isa, key: held.entry, state, scratch };
            fold_head(job, &held, &state.checkpoint, &mut source);
        }
        Family::Conv1d(dims) => copy_window(job, &held, dims, unit),
    }
}

/// Says that a position is not held.
fn not_held(job: &Job<'_>, held: &Held) {
    let place = Place { id: held.slot, row: held.entry, pool: job.pool.index, layer: held.layer };
    Counters::of(job.slots).fault(fault::POSITION, place);
}

/// A head's state with some of its history taken in.
trait Replayed {
    /// A tile with the records of a range taken in.
    fn tile(&mut self, tile: usize, range: Range<i64>) -> &mut Tile;
    /// What that has moved.
    fn tally(&self) -> &Tally;
}

struct Mamba2Source<'a> {
    isa: Isa,
    key: i64,
    state: mamba2::HeadState<'a>,
    scratch: mamba2::Scratch,
}

impl Replayed for Mamba2Source<'_> {
    #[inline(always)]
    fn tile(&mut self, tile: usize, range: Range<i64>) -> &mut Tile {
        let Self { isa, key, state, scratch } = self;
        if range.is_empty() {
            state.checkpoint.load(tile, &mut scratch.tile, &mut scratch.tally);
        } else {
            state.begin(*key, range.start, range.end, scratch);
            state.take_in(*isa, tile, range, None, Source::Memory, Target::Tile, Output::None, scratch);
        }
        &mut scratch.tile
    }

    fn tally(&self) -> &Tally {
        &self.scratch.tally
    }
}

struct DeltaSource<'a> {
    isa: Isa,
    key: i64,
    state: delta::HeadState<'a>,
    scratch: delta::Scratch,
}

impl Replayed for DeltaSource<'_> {
    #[inline(always)]
    fn tile(&mut self, tile: usize, range: Range<i64>) -> &mut Tile {
        let Self { isa, key, state, scratch } = self;
        if range.is_empty() {
            state.checkpoint.load(tile, &mut scratch.tile, &mut scratch.tally);
        } else {
            state.begin(*key, range.start, scratch);
            state.take_in(*isa, tile, range, None, Source::Memory, Target::Tile, Output::None, scratch);
        }
        &mut scratch.tile
    }

    fn tally(&self) -> &Tally {
        &self.scratch.tally
    }
}

/// A head's state at a held position, tile by tile on the stack, and from there to where it is to go.
#[inline(always)]
fn fold_head(job: &Job<'_>, held: &Held, checkpoint: &Checkpoint<'_>, source: &mut impl Replayed) {
    let (dims, committed) = (checkpoint.layout.dims, position(job.slots, held.ring));
    let is_own = matches!(job.to, To::Own);
    let tags = checkpoint.valid_tags(job.slots, committed);
    let reaches = |tags: &[i64; _]| is_own || tags.iter().take(dims.tiles()).all(|&tag| held.at >= tag);
    let Some(tags) = tags.filter(|tags| held.at <= committed && reaches(tags)) else {
        not_held(job, held);
        return;
    };
    let target = checkpoint.of_slot(job.pool, held.layer, held.target);
    let mut stored = Tally::ZERO;
    for (tile, &tag) in tags.iter().enumerate().take(dims.tiles()) {
        if is_own && tag >= held.at {
            continue;
        }
        let values = source.tile(tile, tag..held.at);
        match job.to {
            To::Dense(dst) => {
                for (r, row) in checkpoint.rows(tile).enumerate() {
                    store_row(dst, held.entry, held.index, checkpoint.head as i64, row as i64, values.row(r));
                }
            }
            To::Own | To::Slot => {
                target.store(tile, values, held.at, &mut stored);
                stored.flushes += u64::from(is_own);
            }
        }
    }
    Counters::of(job.slots).add(source.tally());
    Counters::of(job.slots).add(&stored);
}

/// Writes a row of a dense state.
fn store_row(dst: &StateTensor, entry: i64, layer: i64, head: i64, row: i64, from: &[f32]) {
    if dst.transposed {
        for (column, &value) in from.iter().enumerate() {
            // SAFETY: an element of the caller's state, inside the extents that were checked.
            unsafe { raw::store(dst.at(entry, layer, head, row, column as i64), dst.dtype, &[value]) };
        }
    } else {
        // SAFETY: a row of the caller's state, inside the extents that were checked.
        unsafe { raw::store(dst.at(entry, layer, head, row, 0), dst.dtype, from) };
    }
}

/// 128 channels of a convolution's window at a held position.
#[inline(always)]
fn copy_window(job: &Job<'_>, held: &Held, dims: &ConvDims, unit: usize) {
    let io = job.pool.config.io;
    let committed = position(job.slots, held.ring);
    let ring = ConvRing::new(job.slots, job.pool, dims, held.layer, held.ring);
    let tag = ring.tag(unit);
    if held.at > committed || held.at < tag || !job.slots.rule.conv_tag_is_valid(committed, tag) {
        not_held(job, held);
        return;
    }
    let (channels, first) = (ring.tile(unit), held.at - (dims.width as i64 - 1));
    match job.to {
        To::Own => {}
        To::Dense(dst) => {
            for channel in channels {
                let mut window = [0f32; 3];
                let Some(window) = window.get_mut(..dims.width - 1) else { return };
                for (tap, value) in window.iter_mut().enumerate() {
                    // SAFETY: an element of a ring row.
                    *value = unsafe { raw::load_one(ring.at(first + tap as i64, channel), io) };
                }
                store_row(dst, held.entry, held.index, 0, channel as i64, window);
            }
        }
        To::Slot => {
            let stored = StoredWindow::new(job.pool, dims, held.layer, held.target);
            for tap in 0..dims.width - 1 {
                let (from, to) = (ring.at(first + tap as i64, channels.start), stored.at(tap, channels.start));
                // SAFETY: a part of a ring row, and as much of a stored window.
                unsafe { raw::copy(from, to, channels.len() * io.size()) };
            }
            stored.set_tag(unit, held.at);
        }
    }
}
