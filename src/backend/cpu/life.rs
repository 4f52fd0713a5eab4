//! Everything in a slot's life but the step, states at held positions (`fold`) and copies: commit, reset, import, rewind, reading
//! positions.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::Cpu;
use super::conv1d::{ConvRing, NO_WINDOW, StoredWindow};
use super::counters::{Counters, Place, Tally};
use super::raw;
use super::rows::{Row, check_list, check_lists, entry, position, resolve, skipped};
use super::tiles::Checkpoint;
use crate::error::{Error, Result};
use crate::replay::config::{CONV_TILE, Family, Format};
use crate::replay::launch::{
    Address, Batch, CommitArgs, Cursor, Exec, List, PoolLists, PoolView, ResetArgs, SlotsView, StateTensor, Where,
    Which, fault,
};
use crate::replay::layout::{Component, StateLayout};
use crate::replay::numerics::{canonical, split};
use crate::replay::position::{MAX_POSITION, accepted, default_seed};
use crate::replay::step::Tile;

/// Moves the positions of a batch's rows.
pub(super) fn commit(slots: &SlotsView, batch: &Batch, args: &CommitArgs, exec: &Exec) {
    let counters = Counters::of(slots);
    if exec.part == 0 {
        counters.step();
    }
    let (begin, end) = exec.share(batch.n_rows);
    for row in begin..end {
        // The steps of this batch have reported its ids and lengths already; here they only decide what moves.
        let Row::Live { span, ring, .. } = resolve(slots, batch, row, -1, -1, false) else { continue };
        // SAFETY: ring ids are checked by `resolve`.
        let cursor = unsafe { raw::cursor(slots.cursors, ring) };
        if let Some(generation) = batch.generation {
            // SAFETY: the array has n_rows elements.
            if unsafe { raw::read::<u32>(generation.offset(row * 4)) } != cursor.generation.load(Relaxed) {
                continue;
            }
        }
        if span.len == 0 {
            cursor.committed.store(0, Relaxed);
            continue;
        }
        let count = match args.counts {
            Some(counts) => {
                // SAFETY: the array has n_rows elements at this stride.
                let count = unsafe { raw::read::<i32>(counts.offset(row * args.stride * 4)) };
                let (taken, clamped) = accepted(args.convention, count.into(), span.len);
                if clamped {
                    counters.fault(fault::COUNT, Place { id: ring, row, pool: -1, layer: -1 });
                }
                taken
            }
            None => span.len,
        };
        let position = cursor.position.load(Relaxed) + count;
        if position > MAX_POSITION {
            counters.fault(fault::POSITION, Place { id: ring, row, pool: -1, layer: -1 });
            cursor.committed.store(0, Relaxed);
            continue;
        }
        cursor.position.store(position, Relaxed);
        cursor.committed.store(count as u32, Relaxed);
        if batch.extend {
            cursor.flush_before.store(slots.rule.flush_before(position, ring), Relaxed);
        }
        counters.committed(span.len, count);
    }
}

/// Element `i` of a per-entry int64 array.
pub(super) fn at_i64(array: Address, i: i64) -> i64 {
    // SAFETY: per-entry arrays have as many elements as their list.
    unsafe { raw::read::<i64>(array.offset(i * 8)) }
}

/// Whether every live entry of a host list has a position in range.
pub(in crate::backend) fn check_positions(list: &List, position: Option<Address>, field: &'static str) -> Result<()> {
    if let (Where::Host, Some(array)) = (list.place, position) {
        for i in (0..list.n).filter(|&i| !skipped(list, i)) {
            let value = at_i64(array, i);
            if !(0..=MAX_POSITION).contains(&value) {
                return Err(Error::invalid(format!("{field}[{i}]"), value, format!("0 to {MAX_POSITION}")));
            }
        }
    }
    Ok(())
}

/// A list entry with a position: what reset and import work on.
pub(super) fn placed(
    slots: &SlotsView,
    list: &List,
    i: i64,
    position_of: Option<Address>,
    none: impl Fn(i64) -> i64,
    pool: i32,
) -> Option<(i64, i64, i64)> {
    let (slot, ring) = entry(slots, list, i, pool)?;
    let position = position_of.map_or_else(|| none(ring), |array| at_i64(array, i));
    if (0..=MAX_POSITION).contains(&position) {
        Some((slot, ring, position))
    } else {
        Counters::of(slots).fault(fault::POSITION, Place { id: ring, row: i, pool, layer: -1 });
        None
    }
}

/// Starts requests.
pub(super) fn reset(
    cpu: &Cpu,
    slots: &SlotsView,
    pools: &[Arc<PoolView>],
    lists: &PoolLists,
    args: &ResetArgs,
    exec: &Exec,
) -> Result<()> {
    check_lists(slots, pools, lists, "list", true)?;
    check_positions(&lists.rings(), args.position, "reset_args.position")?;
    for pool in pools {
        let list = &lists.of(pool);
        let layers = pool.config.n_layers as i64;
        let units = units_of(pool);
        cpu.for_each(exec, list.n * layers * units, bytes_of(pool), |item| {
            let (i, layer, unit) = (item / (layers * units), item / units % layers, (item % units) as usize);
            let Some((slot, ring, position)) = placed(slots, list, i, args.position, |_| 0, pool.index) else { return };
            match &pool.config.family {
                Family::Mamba2(_) | Family::Delta(_) => {
                    if let Some(layout) = StateLayout::of(&pool.config) {
                        let checkpoint = Checkpoint::new(slots, pool, &layout, layer, slot, ring, unit);
                        reset_head(&checkpoint, position, args);
                    }
                }
                Family::Conv1d(dims) => {
                    let ring = ConvRing::new(slots, pool, dims, layer, ring);
                    StoredWindow::new(pool, dims, layer, slot).set_tag(unit, NO_WINDOW);
                    if !args.keep_checkpoint {
                        let channels = ring.tile(unit);
                        for back in 1..dims.width as i64 {
                            // SAFETY: a part of a ring row.
                            unsafe {
                                raw::zero(
                                    ring.at(position - back, channels.start),
                                    channels.len() * pool.config.io.size(),
                                )
                            };
                        }
                    }
                    ring.set_tag(unit, position);
                }
            }
        });
    }
    if exec.part != 0 {
        return Ok(());
    }
    let list = &lists.rings();
    for i in 0..list.n {
        let Some((_, ring, position)) = placed(slots, list, i, args.position, |_| 0, -1) else { continue };
        // SAFETY: ring ids are checked by `entry`.
        let cursor = unsafe { raw::cursor(slots.cursors, ring) };
        cursor.position.store(position, Relaxed);
        cursor.committed.store(0, Relaxed);
        cursor.flush_before.store(slots.rule.flush_before(position, ring), Relaxed);
        let seed = match args.seed {
            // SAFETY: per-entry arrays have as many elements as their list.
            Some(array) => unsafe { raw::read::<u64>(array.offset(i * 8)) },
            None => default_seed(ring),
        };
        cursor.seed.store(seed, Relaxed);
        let generation = match args.generation {
            // SAFETY: per-entry arrays have as many elements as their list.
            Some(array) => unsafe { raw::read::<u32>(array.offset(i * 4)) },
            None => cursor.generation.load(Relaxed).wrapping_add(1),
        };
        cursor.generation.store(generation, Relaxed);
    }
    Ok(())
}

/// About what a work item of [`units_of`] moves.
pub(super) fn bytes_of(pool: &PoolView) -> i64 {
    StateLayout::of(&pool.config).map_or(CONV_TILE * 4, |layout| layout.head_bytes()) as i64
}

/// Work items of one layer and entry: heads, or channel tiles.
pub(super) fn units_of(pool: &PoolView) -> i64 {
    match &pool.config.family {
        Family::Conv1d(c) => c.tiles() as i64,
        family => family.state().map_or(0, |s| s.heads as i64),
    }
}

fn reset_head(checkpoint: &Checkpoint<'_>, position: i64, args: &ResetArgs) {
    let layout = checkpoint.layout;
    if !args.keep_checkpoint {
        // SAFETY: the bytes of one head's state.
        unsafe { raw::zero(checkpoint.address(), layout.head_bytes()) };
    } else if args.convert && layout.format == Format::Split32 {
        // SAFETY: the bytes of one head's state, which only this item touches.
        to_planes(unsafe { raw::slice_mut::<u16>(checkpoint.address(), layout.head_bytes() / 2) });
    }
    for tile in 0..layout.dims.tiles() {
        checkpoint.set_tag(tile, position);
    }
}

/// Turns fp32 values, seen as pairs of 16-bit words, into a high plane followed by a low plane, in place.
fn to_planes(words: &mut [u16]) {
    for pair in words.as_chunks_mut::<2>().0 {
        let [low, high] = *pair;
        let (high, low) = split(canonical(f32::from_bits(u32::from(high) << 16 | u32::from(low))));
        *pair = [high, low as u16];
    }
    unzip(words);
}

/// Puts the even words first, then the odd ones, each in order.
fn unzip(words: &mut [u16]) {
    const SMALL: usize = 2048;
    if words.len() <= SMALL {
        let mut odd = [0u16; SMALL / 2];
        let half = words.len() / 2;
        for i in 0..half {
            let (Some(&even), Some(&rest)) = (words.get(2 * i), words.get(2 * i + 1)) else { return };
            if let Some(slot) = words.get_mut(i) {
                *slot = even;
            }
            if let Some(slot) = odd.get_mut(i) {
                *slot = rest;
            }
        }
        if let (Some(target), Some(odd)) = (words.get_mut(half..), odd.get(..half)) {
            target.copy_from_slice(odd);
        }
        return;
    }
    let left = words.len() / 4 * 2;
    let (a, b) = words.split_at_mut(left);
    unzip(a);
    unzip(b);
    let right = words.len() - left;
    if let Some(middle) = words.get_mut(left / 2..left + right / 2) {
        middle.rotate_left(left / 2);
    }
}

/// Writes checkpoints from a dense state, and moves position and schedule of the rings if positions are given.
pub(super) fn import(
    cpu: &Cpu,
    slots: &SlotsView,
    pool: &PoolView,
    list: &List,
    positions: Option<Address>,
    src: &StateTensor,
    exec: &Exec,
) -> Result<()> {
    check_list(slots, list, "list", true)?;
    check_positions(list, positions, "position")?;
    let layers = src.layer.map_or(pool.config.n_layers as i64, |_| 1);
    let units = units_of(pool);
    cpu.for_each(exec, list.n * layers * units, bytes_of(pool), |item| {
        let (i, index, unit) = (item / (layers * units), item / units % layers, (item % units) as usize);
        let layer = src.layer.map_or(index, |l| l as i64);
        let current = |ring| position(slots, ring);
        let Some((slot, ring, position)) = placed(slots, list, i, positions, current, pool.index) else { return };
        match &pool.config.family {
            Family::Mamba2(_) | Family::Delta(_) => {
                let Some(layout) = StateLayout::of(&pool.config) else { return };
                let checkpoint = Checkpoint::new(slots, pool, &layout, layer, slot, ring, unit).nearest();
                let mut tally = Tally::default();
                for tile in 0..layout.dims.tiles() {
                    let rows = checkpoint.rows(tile);
                    let mut values = Tile::zero(rows.len(), layout.dims.columns);
                    for (r, row) in rows.enumerate() {
                        load_row(src, i, index, unit as i64, row as i64, values.row_mut(r));
                    }
                    checkpoint.store(tile, &mut values, position, &mut tally);
                }
                Counters::of(slots).add(&tally);
            }
            Family::Conv1d(dims) => {
                let ring = ConvRing::new(slots, pool, dims, layer, ring);
                for channel in ring.tile(unit) {
                    let mut window = [0f32; 3];
                    let Some(window) = window.get_mut(..dims.width - 1) else { return };
                    load_row(src, i, index, 0, channel as i64, window);
                    for (tap, &value) in window.iter().enumerate() {
                        let p = position - (dims.width as i64 - 1) + tap as i64;
                        // SAFETY: an element of a ring row.
                        unsafe { raw::store(ring.at(p, channel), pool.config.io, &[value]) };
                    }
                }
                ring.set_tag(unit, position);
                StoredWindow::new(pool, dims, layer, slot).set_tag(unit, NO_WINDOW);
            }
        }
    });
    if exec.part == 0 {
        for i in 0..list.n {
            let current = |ring| position(slots, ring);
            let Some((_, ring, position)) = placed(slots, list, i, positions, current, -1) else { continue };
            // SAFETY: ring ids are checked by `entry`.
            let cursor = unsafe { raw::cursor(slots.cursors, ring) };
            cursor.position.store(position, Relaxed);
            cursor.committed.store(0, Relaxed);
            cursor.flush_before.store(slots.rule.flush_before(position, ring), Relaxed);
        }
    }
    Ok(())
}

/// A row of a dense state as fp32.
fn load_row(src: &StateTensor, entry: i64, layer: i64, head: i64, row: i64, into: &mut [f32]) {
    if src.transposed {
        for (column, value) in into.iter_mut().enumerate() {
            // SAFETY: an element of the caller's state, inside the extents that were checked.
            *value = unsafe { raw::load_one(src.at(entry, layer, head, row, column as i64), src.dtype) };
        }
    } else {
        // SAFETY: a row of the caller's state, inside the extents that were checked.
        unsafe { raw::load(src.at(entry, layer, head, row, 0), src.dtype, into) };
    }
}

/// Takes back committed tokens, down to the newest tag of all pools.
pub(super) fn rewind(
    slots: &SlotsView,
    pools: &[Arc<PoolView>],
    lists: &PoolLists,
    n: Address,
    done: Option<Address>,
    exec: &Exec,
) -> Result<()> {
    check_lists(slots, pools, lists, "list", true)?;
    let list = &lists.rings();
    if exec.part != 0 {
        // All or none: one part looks at every entry before it moves any.
        return Ok(());
    }
    // SAFETY: per-entry arrays have as many elements as their list.
    let wanted = |i: i64| i64::from(unsafe { raw::read::<i32>(n.offset(i * 4)) });
    let newest = |i: i64| {
        let mut newest = 0;
        for pool in pools {
            // A slot that is out of range has been reported, or is skipped, in this pool alone.
            let Some((slot, ring)) = entry(slots, &lists.of(pool), i, pool.index) else { continue };
            let (count, per_ring) = pool.tag_count();
            for layer in 0..pool.config.n_layers as i64 {
                let tags = pool.part(Component::Tags, layer, if per_ring { ring } else { slot });
                for tag in 0..count as i64 {
                    // SAFETY: the layout gives this many tags to a layer's part.
                    newest = newest.max(unsafe { raw::tag(tags.offset(tag * 8)) }.load(Relaxed));
                }
            }
        }
        newest
    };
    let possible = |i: i64, ring: i64| {
        let n = wanted(i);
        n >= 0 && position(slots, ring) - n >= newest(i)
    };
    if list.place == Where::Host {
        for i in (0..list.n).filter(|&i| !skipped(list, i)) {
            if wanted(i) < 0 {
                return Err(Error::invalid(format!("n[{i}]"), wanted(i), "0 or more"));
            }
            let Some((_, ring)) = entry(slots, list, i, -1) else { continue };
            if done.is_none() && !possible(i, ring) {
                return Err(Error::OutOfRange {
                    field: format!("n[{i}]").into(),
                    value: wanted(i).to_string(),
                    expected: format!("positions {} to {}, and nothing was rewound", newest(i), position(slots, ring)),
                });
            }
        }
    }
    for i in 0..list.n {
        let ok = match entry(slots, list, i, -1) {
            None => false,
            Some((_, ring)) if possible(i, ring) => {
                // SAFETY: ring ids are checked by `entry`.
                let cursor = unsafe { raw::cursor(slots.cursors, ring) };
                cursor.position.fetch_sub(wanted(i), Relaxed);
                cursor.committed.store(0, Relaxed);
                true
            }
            Some((slot, ring)) => {
                let id = if list.which == Which::Rings { ring } else { slot };
                Counters::of(slots).fault(fault::REWIND, Place { id, row: i, pool: -1, layer: -1 });
                false
            }
        };
        if let Some(done) = done {
            // SAFETY: per-entry arrays have as many elements as their list.
            unsafe { raw::write::<i32>(done.offset(i * 4), ok.into()) };
        }
    }
    Ok(())
}

/// Copies ring states. Skipped entries are zero.
pub(super) fn read_cursors(slots: &SlotsView, list: &List, dst: Address, exec: &Exec) -> Result<()> {
    check_list(slots, list, "list", false)?;
    let (begin, end) = exec.share(list.n);
    for i in begin..end {
        let to = dst.offset(i * size_of::<Cursor>() as i64);
        match entry(slots, list, i, -1) {
            Some((_, ring)) => {
                let from = slots.cursors.offset(ring * size_of::<Cursor>() as i64);
                // SAFETY: a ring's state into the caller's array, which has an element per entry.
                unsafe { raw::copy(from, to, size_of::<Cursor>()) };
            }
            // SAFETY: an element of the caller's array.
            None => unsafe { raw::zero(to, size_of::<Cursor>()) },
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_place_conversion_gives_the_planes() {
        for n in [1, 2, 7, 1024, 1025, 64 * 128, 80 * 128 + 3, 65536] {
            let values: Vec<u32> = (0..n as u32).map(|i| i.wrapping_mul(0x9E37_79B1)).collect();
            let mut words: Vec<u16> = values.iter().flat_map(|v| [*v as u16, (*v >> 16) as u16]).collect();
            to_planes(&mut words);
            for (i, v) in values.iter().enumerate() {
                let (high, low) = split(canonical(f32::from_bits(*v)));
                assert_eq!((words[i], words[n + i] as i16), (high, low), "element {i} of {n}");
            }
        }
    }
}
