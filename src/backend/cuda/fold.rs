//! States at held positions: exports, flushes, snapshots, and checkpoints that a copy stores. One launch per pool, or per part of a list on
//! the host.

use std::sync::Arc;

use super::Cuda;
use super::delta;
use super::instances::{Key, Work};
use super::life::{SMALL, cursors, inline_ids, launch_cursors, part, parts};
use super::mamba2;
use super::params::{
    Batch, CursorParams, Fold, FoldKind, Ids, List, Slots, StateTensor, WindowParams, Windows, cursors as kinds,
};
use crate::backend::cpu::life::check_positions;
use crate::backend::cpu::rows::{check_list, check_lists};
use crate::error::Result;
use crate::replay::config::Family;
use crate::replay::launch::{self, Address, Exec, FlushArgs, PoolLists, PoolView, SlotsView, SnapshotArgs, Where};

/// Enqueues a fold of a pool.
#[allow(clippy::too_many_arguments, reason = "what a fold consists of")]
fn fold(
    cuda: &Cuda,
    slots: &SlotsView,
    pool: &PoolView,
    list: List,
    batch: Option<Batch>,
    dst: StateTensor,
    fold: Fold,
    exec: &Exec,
) -> Result<()> {
    match &pool.config.family {
        Family::Mamba2(_) => mamba2::fold(cuda, slots, pool, list, batch, dst, fold, exec),
        Family::Delta(_) => delta::fold(cuda, slots, pool, list, batch, dst, fold, exec),
        Family::Conv1d(_) => {
            let windows = Windows::of(slots, pool, None).unwrap_or_default();
            let units = i64::from(dst.n_layers).saturating_mul(windows.tiles());
            let items = match batch {
                Some(batch) => cuda.due_blocks(SMALL).min(batch.n_rows.saturating_mul(units)),
                None => cuda.list_blocks(list.n.saturating_mul(units)),
            };
            let (slots, batch, pool) = (Slots::of(slots), batch.unwrap_or_default(), pool.index);
            let params = WindowParams { slots, batch, list, dst, fold, windows, pool, reserved: 0 };
            cuda.launch(Key::single(Work::Window), exec, items, SMALL, 0, &params)
        }
    }
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
    for first in parts(list) {
        let dst = StateTensor::of(dst, pool.config.n_layers, first);
        fold(cuda, slots, pool, part(list, at, first), None, dst, Fold::of_list(FoldKind::Export), &exec)?;
        exec = exec.after_own_launch();
    }
    Ok(())
}

/// Folds history into checkpoints, or tells later steps to.
pub(super) fn flush(
    cuda: &Cuda,
    slots: &SlotsView,
    pools: &[Arc<PoolView>],
    lists: &PoolLists,
    args: &FlushArgs,
    exec: &Exec,
) -> Result<()> {
    check_lists(slots, pools, lists, "list", true)?;
    check_positions(&lists.list, args.position, "flush_args.position")?;
    let mut exec = *exec;
    for first in parts(&lists.list) {
        if args.later {
            let list = part(&lists.list, args.position, first);
            launch_cursors(cuda, &exec, &CursorParams { kind: kinds::FLUSH_LATER, ..cursors(slots, list) })?;
            exec = exec.after_own_launch();
            continue;
        }
        for pool in pools.iter().filter(|pool| pool.config.family.state().is_some()) {
            let (list, layers) =
                (part(&lists.of(pool), args.position, first), StateTensor::layers(pool.config.n_layers));
            fold(cuda, slots, pool, list, None, layers, Fold::of_list(FoldKind::Flush), &exec)?;
            exec = exec.after_own_launch();
        }
    }
    Ok(())
}

/// Stores exact states as checkpoints without a ring.
pub(super) fn store(
    cuda: &Cuda,
    slots: &SlotsView,
    pools: &[Arc<PoolView>],
    from: &PoolLists,
    to: &PoolLists,
    at: Option<Address>,
    exec: &Exec,
) -> Result<()> {
    let mut exec = *exec;
    for first in parts(&from.list) {
        for pool in pools {
            let (list, targets) = (part(&from.of(pool), at, first), to.of(pool));
            let mut stored = Fold { slots: Ids::from(&targets.slots), ..Fold::of_list(FoldKind::Store) };
            if targets.place == Where::Host {
                inline_ids(&targets.slots, first, targets.n, &mut stored.inline_slots);
            }
            fold(cuda, slots, pool, list, None, StateTensor::layers(pool.config.n_layers), stored, &exec)?;
            exec = exec.after_own_launch();
        }
    }
    Ok(())
}

/// Stores the states that rows of a committed batch have just reached.
pub(super) fn snapshot(
    cuda: &Cuda,
    slots: &SlotsView,
    pools: &[Arc<PoolView>],
    batch: &launch::Batch,
    args: &SnapshotArgs,
    exec: &Exec,
) -> Result<()> {
    let mut exec = *exec;
    for pool in pools {
        let Some((batch, to)) = args.of(batch, pool) else { continue };
        let (batch, layers) = (Batch::of(&batch, &exec), StateTensor::layers(pool.config.n_layers));
        fold(cuda, slots, pool, List::EMPTY, Some(batch), layers, Fold::of_batch(args.at, &to), &exec)?;
        exec = exec.after_own_launch();
    }
    Ok(())
}
