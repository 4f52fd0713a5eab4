//! Launches of `cuda/slots/inspect.cu`: checks before a call, and guards of a new pool.

use super::Cuda;
use super::instances::{Key, Work};
use super::params::{Batch, Guard, Input, InspectParams, Place, Slots, fill};
use crate::error::Result;
use crate::replay::config::SlotsConfig;
use crate::replay::launch::{self, Exec, PoolView, SlotsView};

/// Threads of a block.
const THREADS: u32 = 128;

/// Loads the kernel if it will be needed.
pub(super) fn prepare(cuda: &Cuda, slots: &SlotsConfig) -> Result<()> {
    if slots.checks { cuda.load(Key::single(Work::Inspect)) } else { Ok(()) }
}

fn params(slots: &SlotsView, pool: &PoolView) -> Result<InspectParams> {
    let mut params = InspectParams {
        slots: Slots::of(slots),
        place: Place { pool: pool.index, layer: 0 },
        n_layers: pool.config.n_layers as i32,
        ..InspectParams::default()
    };
    params.n_guards = fill(&mut params.guards, Guard::all(pool))?;
    Ok(params)
}

/// Enqueues the checks of a call.
pub(super) fn inspect(
    cuda: &Cuda,
    slots: &SlotsView,
    pool: &PoolView,
    layer: i64,
    batch: &launch::Batch,
    inputs: &mut dyn Iterator<Item = launch::Input>,
    exec: &Exec,
) -> Result<()> {
    let mut params = params(slots, pool)?;
    params.batch = Batch::of(batch, exec);
    params.place.layer = layer as i32;
    params.n_inputs = fill(&mut params.inputs, inputs.map(|input| Input::of(&input)))?;
    cuda.launch(Key::single(Work::Inspect), exec, batch.n_rows + 1, THREADS, 0, &params)
}

/// Writes guards before anything else can use the pool.
pub(super) fn write_guards(cuda: &Cuda, slots: &SlotsView, pool: &PoolView) -> Result<()> {
    let params = InspectParams { writes_guards: 1, ..params(slots, pool)? };
    let parts = i64::from(slots.config.n_slots.max(slots.config.n_rings)).saturating_mul(pool.config.n_layers as i64);
    let exec = Exec { stream: cuda.device.side(), ..Exec::DEFAULT };
    cuda.launch(Key::single(Work::Inspect), &exec, parts, THREADS, 0, &params)?;
    cuda.device.wait_for_side()
}
