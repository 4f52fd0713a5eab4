//! Launches of everything in a slot's life but the steps: `cuda/slots`, and exports.
//!
//! Lists in device memory are read by the kernels. Lists on the host are checked here, before anything is enqueued, and travel in the
//! launches' parameters, a part at a time.

use std::sync::Arc;

use super::Cuda;
use super::delta;
use super::instances::{Key, Work};
use super::mamba2;
use super::params::{
    Batch, CommitParams, Component, CursorParams, ImportParams, List, MAX_INLINE, MAX_POOLS, PoolTags, ReadParams,
    ResetParams, RewindParams, Slots, State, StateTensor, WindowParams, Windows,
};
use crate::backend::cpu::life::check_positions;
use crate::backend::cpu::raw;
use crate::backend::cpu::rows::check_list;
use crate::error::{Error, Result};
use crate::replay::config::{Family, Format};
use crate::replay::launch::{self, Address, CommitArgs, Cursor, Exec, PoolView, ResetArgs, SlotsView, Where};
use crate::replay::layout;

/// Threads of a block: of kernels with a thread per entry, and of those that move states.
const SMALL: u32 = 128;
const LARGE: u32 = 256;

/// Loads what every slots handle needs.
pub(super) fn prepare(cuda: &Cuda) -> Result<()> {
    [Work::Commit, Work::Reset, Work::Cursors, Work::Import, Work::Rewind, Work::ReadCursors]
        .into_iter()
        .try_for_each(|work| cuda.load(Key::single(work)))
}

/// A list in parts that fit a launch.
fn parts(list: &launch::List, position: Option<Address>) -> impl Iterator<Item = List> {
    let step = if list.place == Where::Device { usize::MAX } else { MAX_INLINE };
    let list = *list;
    (0..list.n).step_by(step).map(move |first| match list.place {
        Where::Device => List::device(&list, position),
        Where::Host => host_part(&list, position, first),
    })
}

/// Entries of a host list from `first` on.
fn host_part(list: &launch::List, position: Option<Address>, first: i64) -> List {
    let mut part = List {
        n: (list.n - first).min(MAX_INLINE as i64),
        first,
        is_inline: 1,
        has_position: position.is_some().into(),
        ..List::EMPTY
    };
    for (i, slot) in (first..list.n).zip(&mut part.inline_slots) {
        // SAFETY: the caller's host array has n elements.
        *slot = unsafe { raw::id(&list.slots, i) }.max(-1) as i32;
    }
    for (i, ring) in (first..list.n).zip(&mut part.inline_rings) {
        // SAFETY: the caller's host array has n elements.
        *ring = unsafe { raw::id(&list.rings, i) }.max(-1) as i32;
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
    let list = &lists.list;
    check_list(slots, list, "list", true)?;
    check_positions(list, args.position, "reset_args.position")?;
    let mut exec = *exec;
    for part in parts(list, args.position) {
        for pool in pools {
            reset_pool(cuda, slots, pool, part, args, &exec)?;
            exec = exec.after_own_launch();
        }
        let mut params = CursorParams {
            has_seed: args.seed.is_some().into(),
            has_generation: args.generation.is_some().into(),
            ..cursors(slots, part)
        };
        for (array, to) in [(args.seed, &mut params.seed), (args.generation, &mut params.generation)] {
            *to = array.map_or(0, |array| array.0 as u64);
        }
        if list.place == Where::Host {
            if let Some(seed) = args.seed {
                for (i, to) in (part.first..list.n).zip(&mut params.inline_seed) {
                    // SAFETY: the caller's host array has n elements.
                    *to = unsafe { raw::read(seed.offset(i * 8)) };
                }
            }
            if let Some(generation) = args.generation {
                for (i, to) in (part.first..list.n).zip(&mut params.inline_generation) {
                    // SAFETY: the caller's host array has n elements.
                    *to = unsafe { raw::read(generation.offset(i * 4)) };
                }
            }
        }
        cuda.launch(Key::single(Work::Cursors), &exec, blocks(part.n), SMALL, 0, &params)?;
        exec = exec.after_own_launch();
    }
    Ok(())
}

fn cursors(slots: &SlotsView, list: List) -> CursorParams {
    CursorParams {
        slots: Slots::of(slots),
        list,
        seed: 0,
        generation: 0,
        is_import: 0,
        has_seed: 0,
        has_generation: 0,
        reserved: 0,
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
    let (state, windows) = (State::of(pool), Windows::of(slots, pool));
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
    cuda.launch(Key::single(Work::Reset), exec, items, LARGE, shared_bytes, &params)
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
    let (state, windows) = (State::of(pool), Windows::of(slots, pool));
    let mut exec = *exec;
    for part in parts(list, position) {
        let src = StateTensor::of(src, pool.config.n_layers, part.first);
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
        cuda.launch(Key::single(Work::Import), &exec, items, LARGE, 0, &params)?;
        exec = exec.after_own_launch();
        let params = CursorParams { is_import: 1, ..cursors(slots, part) };
        cuda.launch(Key::single(Work::Cursors), &exec, blocks(part.n), SMALL, 0, &params)?;
    }
    Ok(())
}

/// Reads states at held positions. Nothing of the slot changes.
pub(super) fn export(
    cuda: &Cuda,
    slots: &SlotsView,
    pool: &PoolView,
    list: &launch::List,
    at: Option<Address>,
    dst: &launch::StateTensor,
    exec: &Exec,
) -> Result<()> {
    check_list(slots, list, "list", false)?;
    let mut exec = *exec;
    for part in parts(list, at) {
        let dst = StateTensor::of(dst, pool.config.n_layers, part.first);
        match &pool.config.family {
            Family::Mamba2(_) => mamba2::export(cuda, slots, pool, part, dst, &exec)?,
            Family::Delta(_) => delta::export(cuda, slots, pool, part, dst, &exec)?,
            Family::Conv1d(_) => {
                let windows = Windows::of(slots, pool).unwrap_or_default();
                let items = part.n.saturating_mul(dst.n_layers.into()).saturating_mul(windows.tiles());
                let params =
                    WindowParams { slots: Slots::of(slots), list: part, dst, windows, pool: pool.index, reserved: 0 };
                cuda.launch(Key::single(Work::Window), &exec, items, SMALL, 0, &params)?;
            }
        }
        exec = exec.after_own_launch();
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
    let list = &lists.list;
    check_list(slots, list, "list", true)?;
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
    if list.place == Where::Host {
        for i in 0..list.n {
            if wanted(i) < 0 && !crate::backend::cpu::rows::skipped(list, i) {
                return Err(Error::invalid(format!("n[{i}]"), wanted(i), "0 or more"));
            }
        }
    }
    let mut exec = *exec;
    for part in parts(list, None) {
        let mut params = RewindParams {
            slots: Slots::of(slots),
            list: part,
            n: n.0 as u64,
            done: done.map_or(0, |done| done.offset(part.first * 4).0 as u64),
            pools: [PoolTags::default(); MAX_POOLS],
            n_pools: pools.len() as i32,
            reserved: 0,
            inline_n: [0; MAX_INLINE],
        };
        for (pool, to) in pools.iter().zip(&mut params.pools) {
            let (count, per_ring) = pool.tag_count();
            *to = PoolTags {
                tags: Component::of(pool, layout::Component::Tags),
                n_layers: pool.config.n_layers as i32,
                count: count as i32,
                per_ring: per_ring.into(),
                reserved: 0,
            };
        }
        if list.place == Where::Host {
            for (i, to) in (part.first..list.n).zip(&mut params.inline_n) {
                *to = wanted(i);
            }
        }
        cuda.launch(Key::single(Work::Rewind), &exec, part.n, LARGE, 0, &params)?;
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
    for part in parts(list, None) {
        let dst = dst.offset(part.first * size_of::<Cursor>() as i64).0 as u64;
        let params = ReadParams { slots: Slots::of(slots), list: part, dst };
        let words = part.n * (size_of::<Cursor>() / 8) as i64;
        cuda.launch(Key::single(Work::ReadCursors), &exec, blocks(words), SMALL, 0, &params)?;
        exec = exec.after_own_launch();
    }
    Ok(())
}
