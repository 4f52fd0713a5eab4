//! Launches of everything in a slot's life but steps, states at held positions and copies: `cuda/slots`.
//!
//! Lists in device memory are read by the kernels. Lists on the host are checked here, before anything is enqueued, and travel in the
//! launches' parameters, a part at a time.

use std::sync::Arc;

use super::Cuda;
use super::instances::{Key, Work};
use super::params::{
    Batch, CommitParams, Component, CursorParams, Ids, ImportParams, List, MAX_INLINE, MAX_POOLS, PoolTags, ReadParams,
    ResetParams, RewindParams, Slots, State, StateTensor, Windows, cursors as kinds,
};
use crate::backend::cpu::life::check_positions;
use crate::backend::cpu::raw;
use crate::backend::cpu::rows::{check_list, check_lists};
use crate::error::{Error, Result};
use crate::replay::config::Format;
use crate::replay::launch::{self, Address, CommitArgs, Cursor, Exec, PoolView, ResetArgs, SlotsView, Where};
use crate::replay::layout;

/// Threads of a block: of kernels with a thread per entry, and of those that move states.
pub(super) const SMALL: u32 = 128;
pub(super) const LARGE: u32 = 256;

/// Loads what every slots handle needs.
pub(super) fn prepare(cuda: &Cuda) -> Result<()> {
    [Work::Commit, Work::Reset, Work::Cursors, Work::Import, Work::Rewind, Work::Copy, Work::ReadCursors]
        .into_iter()
        .try_for_each(|work| cuda.load(Key::single(work)))
}

/// Where the parts of a list that fit a launch begin.
pub(super) fn parts(list: &launch::List) -> impl Iterator<Item = i64> + use<> {
    (0..list.n).step_by(if list.place == Where::Device { usize::MAX } else { MAX_INLINE })
}

/// The part of a list that begins with an entry.
pub(super) fn part(list: &launch::List, position: Option<Address>, first: i64) -> List {
    match list.place {
        Where::Device => List::device(list, position),
        Where::Host => host_part(list, position, first),
    }
}

/// Ids of a host list from `first` on, as many as fit.
pub(super) fn inline_ids(ids: &launch::Ids, first: i64, n: i64, to: &mut [i32]) {
    for (i, to) in (first..n).zip(to) {
        // SAFETY: the caller's host array has n elements.
        *to = unsafe { raw::id(ids, i) }.max(-1) as i32;
    }
}

/// Entries of a host list from `first` on.
fn host_part(list: &launch::List, position: Option<Address>, first: i64) -> List {
    let mut part = List {
        n: (list.n - first).min(MAX_INLINE as i64),
        first,
        is_inline: 1,
        has_position: position.is_some().into(),
        which: list.which as i32,
        ..List::EMPTY
    };
    if let Some(slots) = list.slot_ids() {
        inline_ids(slots, first, list.n, &mut part.inline_slots);
    }
    if let Some(rings) = list.ring_ids() {
        inline_ids(rings, first, list.n, &mut part.inline_rings);
    }
    if let Some(array) = position {
        for (i, position) in (first..list.n).zip(&mut part.inline_position) {
            // SAFETY: the caller's host array has n elements.
            *position = unsafe { raw::read(array.offset(i * 8)) };
        }
    }
    part
}

/// Blocks of a kernel with a thread per item.
fn blocks(items: i64) -> i64 {
    (items + i64::from(SMALL) - 1) / i64::from(SMALL)
}

/// Work items of one layer and entry: heads, or groups of channels.
fn units(state: &Option<State>, windows: &Option<Windows>) -> i64 {
    match (state, windows) {
        (Some(state), _) => state.heads.into(),
        (None, Some(windows)) => windows.tiles(),
        (None, None) => 0,
    }
}

/// Moves the positions of a batch's rows.
pub(super) fn commit(
    cuda: &Cuda,
    slots: &SlotsView,
    batch: &launch::Batch,
    args: &CommitArgs,
    exec: &Exec,
) -> Result<()> {
    let params = CommitParams {
        slots: Slots::of(slots),
        batch: Batch::of(batch, exec),
        counts: args.counts.map_or(0, |counts| counts.0 as u64),
        stride: args.stride,
        convention: args.convention as i32,
        reserved: 0,
    };
    // A batch without rows is a step all the same.
    cuda.launch(Key::single(Work::Commit), exec, blocks(batch.n_rows).max(1), SMALL, 0, &params)
}

/// Starts requests.
pub(super) fn reset(
    cuda: &Cuda,
    slots: &SlotsView,
    pools: &[Arc<PoolView>],
    lists: &launch::PoolLists,
    args: &ResetArgs,
    exec: &Exec,
) -> Result<()> {
    check_lists(slots, pools, lists, "list", true)?;
    let list = &lists.list;
    check_positions(list, args.position, "reset_args.position")?;
    let mut exec = *exec;
    for first in parts(list) {
        for pool in pools {
            reset_pool(cuda, slots, pool, part(&lists.of(pool), args.position, first), args, &exec)?;
            exec = exec.after_own_launch();
        }
        let mut params =
            CursorParams { has_seed: args.seed.is_some().into(), ..cursors(slots, part(list, args.position, first)) };
        set_generations(&mut params, list, args.generation);
        if let Some(seed) = args.seed {
            params.seed = seed.0 as u64;
            if list.place == Where::Host {
                for (i, to) in (first..list.n).zip(&mut params.inline_seed) {
                    // SAFETY: the caller's host array has n elements.
                    *to = unsafe { raw::read(seed.offset(i * 8)) };
                }
            }
        }
        launch_cursors(cuda, &exec, &params)?;
        exec = exec.after_own_launch();
    }
    Ok(())
}

/// Enqueues what sets cursors.
pub(super) fn launch_cursors(cuda: &Cuda, exec: &Exec, params: &CursorParams) -> Result<()> {
    cuda.launch(Key::single(Work::Cursors), exec, blocks(params.list.n), SMALL, 0, params)
}

/// Generations that are given for a list, of which the launch has a part.
pub(super) fn set_generations(params: &mut CursorParams, list: &launch::List, generation: Option<Address>) {
    let Some(generation) = generation else { return };
    (params.generation, params.has_generation) = (generation.0 as u64, 1);
    if list.place == Where::Host {
        for (i, to) in (params.list.first..list.n).zip(&mut params.inline_generation) {
            // SAFETY: the caller's host array has n elements.
            *to = unsafe { raw::read(generation.offset(i * 4)) };
        }
    }
}

/// Cursors of a reset.
pub(super) fn cursors(slots: &SlotsView, list: List) -> CursorParams {
    CursorParams {
        slots: Slots::of(slots),
        list,
        from: List::EMPTY,
        seed: 0,
        generation: 0,
        kind: kinds::RESET,
        has_from: 0,
        has_seed: 0,
        has_generation: 0,
        inline_seed: [0; MAX_INLINE],
        inline_generation: [0; MAX_INLINE],
    }
}

fn reset_pool(
    cuda: &Cuda,
    slots: &SlotsView,
    pool: &PoolView,
    list: List,
    args: &ResetArgs,
    exec: &Exec,
) -> Result<()> {
    let (state, windows) = (State::of(pool, None), Windows::of(slots, pool, None));
    let convert = args.convert && pool.config.format == Format::Split32 && state.is_some();
    // A head in shared memory where it fits; else as much of it as there is.
    let head = state.map_or(0, |s| i64::from(s.rows) * i64::from(s.columns) * 4);
    let shared_bytes = if convert { head.min(cuda.shared_limit(Key::single(Work::Reset)).into()) as u32 } else { 0 };
    let items = list.n.saturating_mul(pool.config.n_layers as i64).saturating_mul(units(&state, &windows));
    let params = ResetParams {
        slots: Slots::of(slots),
        list,
        state: state.unwrap_or_default(),
        windows: windows.unwrap_or_default(),
        pool: pool.index,
        n_layers: pool.config.n_layers as i32,
        is_window: windows.is_some().into(),
        keep_checkpoint: args.keep_checkpoint.into(),
        convert: convert.into(),
        shared_bytes: shared_bytes as i32,
    };
    cuda.launch(Key::single(Work::Reset), exec, cuda.list_blocks(items), LARGE, shared_bytes, &params)
}

/// Writes checkpoints from a dense state, and moves position and schedule of the rings if positions are given.
pub(super) fn import(
    cuda: &Cuda,
    slots: &SlotsView,
    pool: &PoolView,
    list: &launch::List,
    position: Option<Address>,
    src: &launch::StateTensor,
    exec: &Exec,
) -> Result<()> {
    check_list(slots, list, "list", true)?;
    check_positions(list, position, "position")?;
    let (state, windows) = (State::of(pool, None), Windows::of(slots, pool, None));
    let mut exec = *exec;
    for first in parts(list) {
        let (part, src) = (part(list, position, first), StateTensor::of(src, pool.config.n_layers, first));
        let items = part.n.saturating_mul(src.n_layers.into()).saturating_mul(units(&state, &windows));
        let params = ImportParams {
            slots: Slots::of(slots),
            list: part,
            src,
            state: state.unwrap_or_default(),
            windows: windows.unwrap_or_default(),
            pool: pool.index,
            is_window: windows.is_some().into(),
        };
        cuda.launch(Key::single(Work::Import), &exec, cuda.list_blocks(items), LARGE, 0, &params)?;
        exec = exec.after_own_launch();
        let params = CursorParams { kind: kinds::IMPORT, ..cursors(slots, part) };
        launch_cursors(cuda, &exec, &params)?;
    }
    Ok(())
}

/// Takes back committed tokens, down to the newest tag of all pools.
pub(super) fn rewind(
    cuda: &Cuda,
    slots: &SlotsView,
    pools: &[Arc<PoolView>],
    lists: &launch::PoolLists,
    n: Address,
    done: Option<Address>,
    exec: &Exec,
) -> Result<()> {
    check_lists(slots, pools, lists, "list", true)?;
    let list = &lists.list;
    if pools.len() > MAX_POOLS {
        return Err(Error::unsupported(
            "slots",
            format!("a handle with {} pools", pools.len()),
            format!("rewinds of up to {MAX_POOLS} pools on the CUDA backend"),
        ));
    }
    let wanted = |i: i64| {
        // SAFETY: the caller's host array has n elements.
        unsafe { raw::read::<i32>(n.offset(i * 4)) }
    };
    let is_inline = list.place == Where::Host;
    if is_inline {
        for i in 0..list.n {
            if wanted(i) < 0 && !crate::backend::cpu::rows::skipped(list, i) {
                return Err(Error::invalid(format!("n[{i}]"), wanted(i), "0 or more"));
            }
        }
    }
    // Groups of slot ids share the place of one list: the more there are, the fewer entries has a launch.
    let named = pools.iter().filter(|pool| lists.named.of(pool.index).is_some()).count();
    let step = if is_inline { MAX_INLINE / (named + 1) } else { i64::MAX as usize };
    let mut exec = *exec;
    for first in (0..list.n).step_by(step) {
        let mut params = RewindParams {
            slots: Slots::of(slots),
            list: part(list, None, first),
            n: n.0 as u64,
            done: done.map_or(0, |done| done.offset(first * 4).0 as u64),
            pools: [PoolTags::default(); MAX_POOLS],
            n_pools: pools.len() as i32,
            reserved: 0,
        };
        let entries = params.list.n.min(step as i64);
        params.list.n = entries;
        let mut groups = 0;
        for (pool, to) in pools.iter().zip(&mut params.pools) {
            let (count, per_ring) = pool.tag_count();
            let own = lists.named.of(pool.index);
            groups += i32::from(own.is_some());
            *to = PoolTags {
                tags: Component::of(pool, layout::Component::Tags, None),
                slots: own.as_ref().map_or(List::EMPTY.slots, Ids::from),
                n_layers: pool.config.n_layers as i32,
                count: count as i32,
                per_ring: per_ring.into(),
                group: if own.is_some() { groups } else { 0 },
            };
            if let (true, Some(own)) = (is_inline, own) {
                let begin = groups as usize * entries as usize;
                let ids = params.list.inline_slots.get_mut(begin..).unwrap_or_default();
                inline_ids(&own, first, first + entries, ids);
            }
        }
        if is_inline {
            for (i, to) in (first..first + entries).zip(&mut params.list.inline_position) {
                *to = wanted(i).into();
            }
        }
        cuda.launch(Key::single(Work::Rewind), &exec, entries, LARGE, 0, &params)?;
        exec = exec.after_own_launch();
    }
    Ok(())
}

/// Copies ring states. Skipped entries are zero.
pub(super) fn read_cursors(
    cuda: &Cuda,
    slots: &SlotsView,
    list: &launch::List,
    dst: Address,
    exec: &Exec,
) -> Result<()> {
    check_list(slots, list, "list", false)?;
    let mut exec = *exec;
    for first in parts(list) {
        let part = part(list, None, first);
        let dst = dst.offset(first * size_of::<Cursor>() as i64).0 as u64;
        let params = ReadParams { slots: Slots::of(slots), list: part, dst };
        let words = part.n * (size_of::<Cursor>() / 8) as i64;
        cuda.launch(Key::single(Work::ReadCursors), &exec, blocks(words), SMALL, 0, &params)?;
        exec = exec.after_own_launch();
    }
    Ok(())
}
