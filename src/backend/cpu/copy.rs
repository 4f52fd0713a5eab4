//! Copies of slots and rings: fork, move, swap, and checkpoints without a ring.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::Cpu;
use super::conv1d::{ConvRing, NO_WINDOW, StoredWindow};
use super::counters::{Counters, Place};
use super::fold;
use super::life::{check_positions, placed};
use super::raw;
use super::rows::{check_copy, entry, position};
use crate::error::Result;
use crate::replay::config::{ConvDims, Family};
use crate::replay::launch::{
    Address, ComponentView, CopyArgs, CopyKind, Exec, List, PoolLists, PoolView, SlotsView, fault,
};
use crate::replay::layout::Component;
use crate::replay::position::default_seed;

/// Runs a call's share: memory first, then cursors, which copies of memory never read where they are written.
pub(super) fn run(
    cpu: &Cpu,
    slots: &SlotsView,
    pools: &[Arc<PoolView>],
    from: &PoolLists,
    to: &PoolLists,
    args: &CopyArgs,
    exec: &Exec,
) -> Result<()> {
    check_copy(slots, pools, from, to, args.kind)?;
    if args.kind == CopyKind::Store {
        check_positions(&from.list, args.position, "copy_args.position")?;
        fold::store(cpu, slots, pools, from, to, args.position, exec);
        return Ok(());
    }
    check_positions(&to.list, args.position, "copy_args.position")?;
    for pool in pools {
        let copy = &Copy { slots, pool, from: from.of(pool), to: to.of(pool), args };
        let (layers, components) = (pool.config.n_layers as i64, pool.components.len() as i64);
        let bytes = pool.components.iter().map(|c| c.bytes).sum::<i64>() / components.max(1);
        cpu.for_each(exec, copy.to.n * layers * components, bytes, |item| {
            let (i, layer) = (item / (layers * components), item / components % layers);
            if let Some(component) = pool.components.get((item % components) as usize) {
                copy.component(i, layer, component);
            }
        });
    }
    if exec.part == 0 && args.kind != CopyKind::Stored {
        for i in 0..to.list.n {
            copy_cursor(slots, from, &to.list, args, i);
        }
    }
    Ok(())
}

struct Copy<'a> {
    slots: &'a SlotsView,
    pool: &'a PoolView,
    from: List,
    to: List,
    args: &'a CopyArgs,
}

impl Copy<'_> {
    fn component(&self, i: i64, layer: i64, c: &ComponentView) {
        let (slots, pool, kind) = (self.slots, self.pool, self.args.kind);
        let Some((from_slot, from_ring)) = entry(slots, &self.from, i, pool.index) else { return };
        let Some((to_slot, to_ring)) = entry(slots, &self.to, i, pool.index) else { return };
        let part = |index: i64| c.base(layer).offset(index * c.stride());
        let (from, to) = if c.per_ring { (part(from_ring), part(to_ring)) } else { (part(from_slot), part(to_slot)) };
        if from == to {
            return;
        }
        let is_tags = matches!(c.component, Component::Tags | Component::WindowTags);
        match kind {
            CopyKind::Stored if c.per_ring => {}
            CopyKind::Load if c.per_ring => {}
            CopyKind::Load => {
                let Some((_, _, position)) = placed(slots, &self.to, i, self.args.position, |_| -1, pool.index) else {
                    return;
                };
                let bad = match (&pool.config.family, c.component) {
                    (Family::Conv1d(dims), Component::WindowTags) => {
                        self.load_window(dims, layer, [from_slot, to_slot, to_ring], position)
                    }
                    (_, Component::Tags) => load_tags(from, to, c.bytes / 8, position),
                    (_, Component::Checkpoint) => {
                        // SAFETY: the parts of two slots, which do not overlap.
                        unsafe { raw::copy(from, to, c.bytes as usize) };
                        false
                    }
                    _ => false,
                };
                if bad {
                    self.fault(to_slot, i, layer);
                }
            }
            CopyKind::Swap if is_tags => {
                for k in 0..c.bytes / 8 {
                    // SAFETY: one of a part's tags.
                    let a = unsafe { raw::tag(from.offset(k * 8)) };
                    // SAFETY: as above.
                    let b = unsafe { raw::tag(to.offset(k * 8)) };
                    let kept = b.load(Relaxed);
                    b.store(a.load(Relaxed), Relaxed);
                    a.store(kept, Relaxed);
                }
            }
            CopyKind::Swap => {
                // SAFETY: the parts of two slots or rings, which do not overlap and which only this item touches.
                let a = unsafe { raw::slice_mut::<u16>(from, c.bytes as usize / 2) };
                // SAFETY: as above.
                a.swap_with_slice(unsafe { raw::slice_mut::<u16>(to, c.bytes as usize / 2) });
            }
            CopyKind::Fork | CopyKind::Move | CopyKind::Store | CopyKind::Stored => {
                if is_tags {
                    copy_tags(from, to, c.bytes / 8);
                } else {
                    // SAFETY: the parts of two slots or rings, which do not overlap.
                    unsafe { raw::copy(from, to, c.bytes as usize) };
                }
                if kind != CopyKind::Stored && c.component == Component::Tags {
                    self.check_tags(from_slot, from, c.bytes / 8, position(slots, from_ring), i, layer);
                }
            }
        }
    }

    fn fault(&self, id: i64, row: i64, layer: i64) {
        Counters::of(self.slots).fault(fault::POSITION, Place { id, row, pool: self.pool.index, layer });
    }

    /// Reports a source that cannot be trusted, whose target cannot be trusted either.
    fn check_tags(&self, slot: i64, tags: Address, n: i64, position: i64, i: i64, layer: i64) {
        let is_window = matches!(self.pool.config.family, Family::Conv1d(_));
        let rule = &self.slots.rule;
        let is_valid = |k: i64| {
            // SAFETY: one of a part's tags.
            let tag = unsafe { raw::tag(tags.offset(k * 8)) }.load(Relaxed);
            if is_window { rule.conv_tag_is_valid(position, tag) } else { rule.tag_is_valid(position, tag) }
        };
        if !(0..n).all(is_valid) {
            self.fault(slot, i, layer);
        }
    }

    /// Puts stored windows into a ring. True: one of them does not stand at the position.
    fn load_window(&self, dims: &ConvDims, layer: i64, places: [i64; 3], position: i64) -> bool {
        let [from_slot, to_slot, ring] = places;
        let from = StoredWindow::new(self.pool, dims, layer, from_slot);
        let ring = ConvRing::new(self.slots, self.pool, dims, layer, ring);
        let mut bad = false;
        for tile in 0..dims.tiles() {
            let channels = ring.tile(tile);
            let stands = from.tag(tile) == position;
            if stands {
                for tap in 0..dims.width - 1 {
                    let p = position - (dims.width as i64 - 1) + tap as i64;
                    let bytes = channels.len() * self.pool.config.io.size();
                    // SAFETY: a part of a stored window, and as much of a ring row.
                    unsafe { raw::copy(from.at(tap, channels.start), ring.at(p, channels.start), bytes) };
                }
            }
            ring.set_tag(tile, if stands { position } else { NO_WINDOW });
            StoredWindow::new(self.pool, dims, layer, to_slot).set_tag(tile, NO_WINDOW);
            bad |= !stands;
        }
        bad
    }
}

/// Copies tags.
fn copy_tags(from: Address, to: Address, n: i64) {
    for k in 0..n {
        // SAFETY: one of a part's tags.
        let tag = unsafe { raw::tag(from.offset(k * 8)) }.load(Relaxed);
        // SAFETY: as above.
        unsafe { raw::tag(to.offset(k * 8)) }.store(tag, Relaxed);
    }
}

/// Tags of a checkpoint that is to stand at a position. True: a tile does not.
fn load_tags(from: Address, to: Address, n: i64, position: i64) -> bool {
    let mut bad = false;
    for k in 0..n {
        // SAFETY: one of a part's tags.
        let tag = unsafe { raw::tag(from.offset(k * 8)) }.load(Relaxed);
        bad |= tag != position;
        // SAFETY: as above.
        unsafe { raw::tag(to.offset(k * 8)) }.store(if tag == position { tag } else { -1 }, Relaxed);
    }
    bad
}

fn copy_cursor(slots: &SlotsView, from: &PoolLists, to: &List, args: &CopyArgs, i: i64) {
    let Some((_, to_ring)) = entry(slots, to, i, -1) else { return };
    let from_ring = match from.all_named && args.kind.from_slot() {
        // What is loaded has no ring, and slots of pools alone.
        true => to_ring,
        false => match entry(slots, &from.list, i, -1) {
            Some((_, ring)) => ring,
            None => return,
        },
    };
    // SAFETY: ring ids are checked by `entry`.
    let target = unsafe { raw::cursor(slots.cursors, to_ring) };
    // SAFETY: as above; not used where the source has no ring.
    let source = unsafe { raw::cursor(slots.cursors, from_ring) };
    let (position, seed) = match args.kind {
        CopyKind::Load => match placed(slots, to, i, args.position, |_| -1, -1) {
            Some((_, _, position)) => (position, default_seed(to_ring)),
            None => return,
        },
        _ => (source.position.load(Relaxed), source.seed.load(Relaxed)),
    };
    if args.kind == CopyKind::Swap {
        for (a, b) in [(&source.position, &target.position), (&source.flush_before, &target.flush_before)] {
            let kept = b.load(Relaxed);
            b.store(a.load(Relaxed), Relaxed);
            a.store(kept, Relaxed);
        }
        source.seed.store(target.seed.load(Relaxed), Relaxed);
        target.seed.store(seed, Relaxed);
        source.committed.store(0, Relaxed);
        source.generation.store(source.generation.load(Relaxed).wrapping_add(1), Relaxed);
    } else {
        target.position.store(position, Relaxed);
        target.seed.store(seed, Relaxed);
        target.flush_before.store(slots.rule.flush_before(position, to_ring), Relaxed);
    }
    if args.kind == CopyKind::Move {
        source.generation.store(source.generation.load(Relaxed).wrapping_add(1), Relaxed);
    }
    target.committed.store(0, Relaxed);
    let generation = match args.generation {
        // SAFETY: per-entry arrays have as many elements as their list.
        Some(array) => unsafe { raw::read::<u32>(array.offset(i * 4)) },
        None => target.generation.load(Relaxed).wrapping_add(1),
    };
    target.generation.store(generation, Relaxed);
}
