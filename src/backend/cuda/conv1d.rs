//! Launches of convolutions: `cuda/conv1d`.

use super::Cuda;
use super::instances::{Key, Work};
use super::params::{Batch, ConvParams, MAX_SECTIONS, Place, Slots, Tensor, Windows, mode as number};
use crate::error::{Error, Result};
use crate::replay::config::{CONV_TILE, Family, PoolConfig};
use crate::replay::launch::{self, ConvArgs, Exec, Mode, PoolView, SlotsView};

/// Refuses a pool with more sections than a launch can take along.
pub(super) fn supports(pool: &PoolConfig) -> Result<()> {
    let Family::Conv1d(dims) = &pool.family else { return Ok(()) };
    let sections = dims.section_starts.len() - 1;
    if sections <= MAX_SECTIONS {
        return Ok(());
    }
    Err(Error::unsupported("pool_desc.n_sections", sections, format!("up to {MAX_SECTIONS} on the CUDA backend")))
}

/// Loads what a pool can need.
pub(super) fn prepare(cuda: &Cuda, pool: &PoolConfig) -> Result<()> {
    supports(pool)?;
    if matches!(pool.family, Family::Conv1d(_)) {
        cuda.load(Key::single(Work::Conv1d))?;
        cuda.load(Key::single(Work::Window))?;
    }
    Ok(())
}

/// Enqueues a step or an extend.
#[allow(clippy::too_many_arguments, reason = "the backend trait's own arguments")]
pub(super) fn run(
    cuda: &Cuda,
    slots: &SlotsView,
    pool: &PoolView,
    layer: i64,
    mode: Mode,
    batch: &launch::Batch,
    args: &ConvArgs,
    exec: &Exec,
) -> Result<()> {
    let (Family::Conv1d(dims), Some(windows)) = (&pool.config.family, Windows::of(slots, pool, Some(layer))) else {
        return Err(Error::Internal("a convolution's call on another family".into()));
    };
    let mut params = ConvParams {
        slots: Slots::of(slots),
        batch: Batch::of(batch, exec),
        place: Place { pool: pool.index, layer: layer as i32 },
        windows,
        x: Tensor::from(&args.x),
        out: Tensor::from(&args.out),
        weight: Tensor::from(&args.weight),
        bias: Tensor::from(&args.bias),
        n_sections: dims.section_starts.len() as i32 - 1,
        silu: args.silu.into(),
        mode: number(mode),
        ..ConvParams::default()
    };
    for (to, &from) in params.section_starts.iter_mut().zip(&dims.section_starts) {
        *to = from as i32;
    }
    let items = batch.n_rows.saturating_mul(windows.tiles());
    cuda.launch(Key::single(Work::Conv1d), exec, items, CONV_TILE as u32, 0, &params)
}
