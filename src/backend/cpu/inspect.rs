//! Checks for finding defects, with `REPLAYSSM_SLOTS_CHECKS`: they look at what a call is about to work with, and report faults.

use super::Cpu;
use super::counters::{Counters, Place};
use super::raw;
use super::rows::{Row, Span, resolve};
use crate::replay::launch::{Address, Batch, ComponentView, Exec, Input, PoolView, SlotsView, fault};
use crate::replay::layout::GUARD;

/// Elements that are looked at together.
const CHUNK: i64 = 256;

/// Looks at a batch of one layer before its call does. Part 0 of a call that is done in parts looks at all of it, but for inputs in whose
/// place other parts may be writing outputs already.
pub(super) fn inspect(
    cpu: &Cpu,
    slots: &SlotsView,
    pool: &PoolView,
    layer: i64,
    batch: &Batch,
    inputs: &mut dyn Iterator<Item = Input>,
    exec: &Exec,
) {
    if exec.part != 0 {
        return;
    }
    let is_alone = exec.n_parts == 1;
    let exec = &Exec { part: 0, n_parts: 1, ..*exec };
    let report = |bit, id, row| Counters::of(slots).fault(bit, Place { id, row, pool: pool.index, layer });
    let live = |row| match resolve(slots, batch, row, pool.index, layer, false) {
        Row::Live { span, slot, ring } => Some((span, slot, ring)),
        Row::Null(_) => None,
    };
    cpu.for_each(exec, batch.n_rows, CHUNK, |row| {
        let Some((_, slot, ring)) = live(row) else { return };
        if (0..row).filter_map(live).any(|(_, other, _)| other == slot) {
            report(fault::DUPLICATE, slot, row);
        } else if (0..row).filter_map(live).any(|(_, _, other)| other == ring) {
            report(fault::DUPLICATE, ring, row);
        }
        for component in pool.components.iter().filter(|c| c.guarded) {
            let id = if component.per_ring { ring } else { slot };
            if !is_guarded(component, layer, id) {
                report(fault::CANARY, id, row);
            }
        }
    });
    for input in inputs.filter(|input| is_alone || !input.overwritten) {
        if !input.per_token {
            if !(0..input.heads).all(|head| is_finite(&input, input.tensor.at(0, 0, head))) {
                report(fault::NOT_FINITE, -1, -1);
            }
            continue;
        }
        cpu.for_each(exec, batch.n_rows, CHUNK, |row| {
            let Some((span, slot, _)) = live(row) else { return };
            let token = |t| (0..input.heads).all(|head| is_finite(&input, Span::at(&span, &input.tensor, t, head)));
            if !(0..span.len).all(token) {
                report(fault::NOT_FINITE, slot, row);
            }
        });
    }
}

/// Whether all elements of a vector of an input are finite.
fn is_finite(input: &Input, at: Address) -> bool {
    let size = input.tensor.dtype.size() as i64;
    (0..input.inner).all(|i| {
        // SAFETY: an element of the caller's tensor, inside the extents that were checked.
        unsafe { raw::load_one(at.offset(i * size), input.tensor.dtype) }.is_finite()
    })
}

/// The guard behind part `index` of a layer.
fn guard(c: &ComponentView, layer: i64, index: i64) -> (Address, usize) {
    let part = c.base(layer).offset(index * c.stride());
    (part.offset(c.bytes), (c.stride() - c.bytes) as usize)
}

/// Whether the guards behind a part and before it are as they were written. There is none before the first part of all.
fn is_guarded(c: &ComponentView, layer: i64, index: i64) -> bool {
    let (behind, bytes) = guard(c, layer, index);
    let before = behind.offset(-c.stride());
    let whole = |at| {
        // SAFETY: guards lie inside the component's memory, and nothing but a stray write changes them.
        unsafe { raw::slice::<u8>(at, bytes) }.iter().all(|&byte| byte == GUARD)
    };
    whole(behind) && ((layer, index) == (0, 0) || whole(before))
}

/// Writes the guards of a pool.
pub(super) fn write_guards(slots: &SlotsView, pool: &PoolView) {
    for c in pool.components.iter().filter(|c| c.guarded) {
        let n = if c.per_ring { slots.config.n_rings } else { slots.config.n_slots };
        for layer in 0..pool.config.n_layers as i64 {
            for index in 0..i64::from(n) {
                let (at, bytes) = guard(c, layer, index);
                // SAFETY: guards lie inside the component's memory, which no work uses yet.
                unsafe { raw::slice_mut::<u8>(at, bytes) }.fill(GUARD);
            }
        }
    }
}
