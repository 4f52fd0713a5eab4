//! Which slot, ring and tokens a batch row or a list entry means, and whether it may be believed.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::counters::{Counters, Place};
use super::raw;
use crate::error::{Error, Result};
use crate::replay::launch::Address;
use crate::replay::launch::{
    Batch, CopyKind, Ids, List, PoolLists, PoolView, SlotsView, Tensor, Tokens, Where, Which, fault,
};

/// Tokens of a row in the caller's tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    row: i64,
    first: i64,
    /// Number of tokens.
    pub(super) len: i64,
}

impl Span {
    /// Address of a head's vector of token `t` of this row.
    #[inline(always)]
    pub(super) fn at(&self, tensor: &Tensor, t: i64, head: i64) -> Address {
        tensor.at(self.row, self.first + t, head)
    }
}

/// A batch row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Row {
    /// Padding, or a row that a fault made so: its outputs are zero.
    Null(Span),
    /// A row to be worked on.
    Live {
        /// Its tokens.
        span: Span,
        /// Checkpoint.
        slot: i64,
        /// Ring.
        ring: i64,
    },
}

/// Slot and ring of entry `i`, or none: silently if one of them is negative or the slot is the null id; after `bad` if one is too large.
/// Ids that do not count are 0.
#[inline]
fn pair(
    slots: &SlotsView,
    ids: (Option<&Ids>, Option<&Ids>),
    i: i64,
    null_id: Option<i64>,
    mut bad: impl FnMut(i64),
) -> Option<(i64, i64)> {
    let at = |ids: Option<&Ids>| match ids {
        // SAFETY: i is below the row (entry) count, and the caller's arrays have that many elements.
        Some(ids) => unsafe { raw::id(ids, i) },
        None => 0,
    };
    let slot = at(ids.0);
    if slot < 0 || Some(slot) == null_id {
        return None;
    }
    let ring = at(ids.1);
    if ring < 0 {
        return None;
    }
    let too_large = [(slot, slots.config.n_slots), (ring, slots.config.n_rings)];
    if let Some((id, _)) = too_large.into_iter().find(|(id, count)| *id >= i64::from(*count)) {
        bad(id);
        return None;
    }
    Some((slot, ring))
}

/// Reads row `row` of a batch. Faults are recorded if `report` is set, so that only one of a row's work items does.
#[inline]
pub(super) fn resolve(slots: &SlotsView, batch: &Batch, row: i64, pool: i32, layer: i64, report: bool) -> Row {
    let fault = |bit, id| {
        if report {
            Counters::of(slots).fault(bit, Place { id, row, pool, layer });
        }
    };
    let mut fine = true;
    let span = match batch.tokens {
        Tokens::Dense(len) => Span { row, first: 0, len },
        Tokens::Packed(cu) => {
            // SAFETY: cu_seqlens has n_rows + 1 elements, and row is below n_rows.
            let begin = i64::from(unsafe { raw::read::<i32>(cu.offset(row * 4)) });
            // SAFETY: as above.
            let end = i64::from(unsafe { raw::read::<i32>(cu.offset(row * 4 + 4)) });
            let first = begin.clamp(0, batch.n_tokens);
            let last = end.clamp(first, batch.n_tokens);
            if (first, last) != (begin, end) || last - first > batch.max_tokens {
                fault(fault::LENGTH, row);
                fine = false;
            }
            Span { row: 0, first, len: last - first }
        }
    };
    match pair(slots, (Some(&batch.slots), Some(&batch.rings)), row, batch.null_id, |id| fault(fault::ID, id)) {
        Some((slot, ring)) if fine => Row::Live { span, slot, ring },
        _ => Row::Null(span),
    }
}

/// Whether a row's flush mask is set.
#[inline]
pub(super) fn flush_mask(batch: &Batch, row: i64) -> bool {
    // SAFETY: the mask has n_rows elements, and row is below n_rows.
    batch.flush.is_some_and(|mask| unsafe { raw::read::<u8>(mask.offset(row)) } != 0)
}

/// Slot and ring of a list entry; none if it is to be skipped.
pub(super) fn entry(slots: &SlotsView, list: &List, i: i64, pool: i32) -> Option<(i64, i64)> {
    let bad = |id| Counters::of(slots).fault(fault::ID, Place { id, row: i, pool, layer: -1 });
    pair(slots, (list.slot_ids(), list.ring_ids()), i, None, bad)
}

/// Element `i` of ids that count; 0 of others.
fn id_or_zero(ids: Option<&Ids>, i: i64) -> i64 {
    // SAFETY: the caller's arrays have n elements.
    ids.map_or(0, |ids| unsafe { raw::id(ids, i) })
}

/// Whether a list entry is to be skipped.
pub(in crate::backend) fn skipped(list: &List, i: i64) -> bool {
    id_or_zero(list.slot_ids(), i) < 0 || id_or_zero(list.ring_ids(), i) < 0
}

/// Refuses host lists with ids out of range before anything is done; with `unique` also a slot or ring that is named twice.
pub(in crate::backend) fn check_list(slots: &SlotsView, list: &List, name: &'static str, unique: bool) -> Result<()> {
    if list.place == Where::Device {
        return Ok(());
    }
    for i in (0..list.n).filter(|&i| !skipped(list, i)) {
        for (ids, kind, count) in
            [(list.slot_ids(), "slots", slots.config.n_slots), (list.ring_ids(), "rings", slots.config.n_rings)]
        {
            let Some(ids) = ids else { continue };
            // SAFETY: the caller's arrays have n elements.
            let id = unsafe { raw::id(ids, i) };
            if id >= i64::from(count) {
                return Err(Error::invalid(format!("{name}.{kind}[{i}]"), id, format!("less than {count}")));
            }
            // SAFETY: as above.
            let same = |j: &i64| !skipped(list, *j) && unsafe { raw::id(ids, *j) } == id;
            if let (true, Some(j)) = (unique, (0..i).find(same)) {
                return Err(Error::invalid(
                    format!("{name}.{kind}[{i}]"),
                    id,
                    format!("an id that entry {j} does not name"),
                ));
            }
        }
    }
    Ok(())
}

/// The same of every pool's list.
pub(in crate::backend) fn check_lists(
    slots: &SlotsView,
    pools: &[Arc<PoolView>],
    lists: &PoolLists,
    name: &'static str,
    unique: bool,
) -> Result<()> {
    if lists.has_own_ids() {
        check_list(slots, &lists.list, name, unique)?;
    }
    if !lists.named.is_empty() && lists.list.which == Which::Both {
        // Also of entries without a slot.
        check_list(slots, &lists.rings(), name, unique)?;
    }
    for pool in pools.iter().filter(|pool| lists.named.of(pool.index).is_some()) {
        check_list(slots, &lists.of(pool), name, unique)?;
    }
    Ok(())
}

/// Refuses host lists of a copy that cannot be made.
pub(in crate::backend) fn check_copy(
    slots: &SlotsView,
    pools: &[Arc<PoolView>],
    from: &PoolLists,
    to: &PoolLists,
    kind: CopyKind,
) -> Result<()> {
    check_lists(slots, pools, from, "src", matches!(kind, CopyKind::Move | CopyKind::Swap))?;
    check_lists(slots, pools, to, "dst", true)?;
    if from.has_own_ids() && to.has_own_ids() {
        check_disjoint(&from.rings(), &to.rings())?;
    }
    if from.named.is_empty() && to.named.is_empty() {
        return Ok(());
    }
    // Pools without slots of their own share a list.
    let is_named = |pool: &&Arc<PoolView>| from.named.of(pool.index).or(to.named.of(pool.index)).is_some();
    let first = pools.iter().find(|pool| !is_named(pool));
    first.into_iter().chain(pools.iter().filter(is_named)).try_for_each(|pool| {
        // Rings are those of the list above.
        check_disjoint(&from.of(pool), &to.of(pool))
    })
}

/// Refuses host lists of a copy that name a slot or ring as source and as target.
fn check_disjoint(from: &List, to: &List) -> Result<()> {
    if from.place == Where::Device {
        return Ok(());
    }
    let live = |i: &i64| !skipped(from, *i) && !skipped(to, *i);
    for (sources, targets, kind) in
        [(from.slot_ids(), to.slot_ids(), "slots"), (from.ring_ids(), to.ring_ids(), "rings")]
    {
        let (Some(sources), Some(targets)) = (sources, targets) else { continue };
        for i in (0..to.n).filter(live) {
            // SAFETY: the caller's arrays have n elements.
            let id = unsafe { raw::id(targets, i) };
            // SAFETY: as above.
            let same = |j: &i64| unsafe { raw::id(sources, *j) } == id;
            if let Some(j) = (0..from.n).filter(live).find(same) {
                return Err(Error::invalid(
                    format!("dst.{kind}[{i}]"),
                    id,
                    format!("an id that is not a source, as it is of entry {j}"),
                ));
            }
        }
    }
    Ok(())
}

/// The position of a ring.
pub(super) fn position(slots: &SlotsView, ring: i64) -> i64 {
    // SAFETY: ring ids are checked by `resolve` and `entry`.
    unsafe { raw::cursor(slots.cursors, ring) }.position.load(Relaxed)
}
