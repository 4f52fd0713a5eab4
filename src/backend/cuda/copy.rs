//! Copies of slots and rings: a launch per pool that moves memory, and one that sets cursors.

use std::sync::Arc;

use super::Cuda;
use super::fold;
use super::instances::{Key, Work};
use super::life::{LARGE, cursors, launch_cursors, part, parts, set_generations};
use super::params::{
    COPY_BYTES, Component, CopiedComponent, CopyParams, CursorParams, List, MAX_COMPONENTS, Slots, Windows,
    cursors as kinds, fill,
};
use crate::backend::cpu::life::check_positions;
use crate::backend::cpu::rows::check_copy;
use crate::error::Result;
use crate::replay::launch::{CopyArgs, CopyKind, Exec, PoolLists, PoolView, SlotsView};

/// Enqueues a copy.
pub(super) fn run(
    cuda: &Cuda,
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
        return fold::store(cuda, slots, pools, from, to, args.position, exec);
    }
    check_positions(&to.list, args.position, "copy_args.position")?;
    let mut exec = *exec;
    for first in parts(&to.list) {
        for pool in pools {
            let lists = [part(&from.of(pool), None, first), part(&to.of(pool), args.position, first)];
            copy_pool(cuda, slots, pool, lists, args.kind, &exec)?;
            exec = exec.after_own_launch();
        }
        if args.kind == CopyKind::Stored {
            continue;
        }
        // What is loaded has no ring, and perhaps slots of pools alone.
        let has_from = !(from.all_named && args.kind.from_slot());
        let mut params = CursorParams {
            kind: kinds::COPY + args.kind as i32,
            has_from: has_from.into(),
            from: if has_from { part(&from.list, None, first) } else { List::EMPTY },
            ..cursors(slots, part(&to.list, args.position, first))
        };
        set_generations(&mut params, &to.list, args.generation);
        launch_cursors(cuda, &exec, &params)?;
        exec = exec.after_own_launch();
    }
    Ok(())
}

fn copy_pool(
    cuda: &Cuda,
    slots: &SlotsView,
    pool: &PoolView,
    [from, to]: [List; 2],
    kind: CopyKind,
    exec: &Exec,
) -> Result<()> {
    let windows = Windows::of(slots, pool, None);
    let mut components = [CopiedComponent::default(); MAX_COMPONENTS];
    let mut n_chunks = 0;
    let copied = pool.components.iter().map(|c| {
        let first_chunk = n_chunks;
        n_chunks += (c.bytes + COPY_BYTES - 1) / COPY_BYTES;
        CopiedComponent {
            at: Component::of(pool, c.component, None),
            bytes: c.bytes,
            first_chunk,
            kind: c.component as i32,
            per_ring: c.per_ring.into(),
        }
    });
    let n_components = fill(&mut components, copied)?;
    let items = to.n.saturating_mul(pool.config.n_layers as i64).saturating_mul(n_chunks);
    let params = CopyParams {
        slots: Slots::of(slots),
        from,
        to,
        windows: windows.unwrap_or_default(),
        components,
        n_chunks,
        n_components,
        n_layers: pool.config.n_layers as i32,
        kind: kind as i32,
        pool: pool.index,
        is_window: windows.is_some().into(),
        reserved: 0,
    };
    cuda.launch(Key::single(Work::Copy), exec, cuda.list_blocks(items), LARGE, 0, &params)
}
