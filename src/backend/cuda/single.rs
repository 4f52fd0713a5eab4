//! Launches of extends and EXACT steps of one token a row: `cuda/mamba2/single.cu` and `cuda/delta/single.cu`. They need
//! alignment; what they cannot take, the serial form does, with the same bytes.

use std::cell::Cell;

use super::Cuda;
use super::decode::{is_aligned, part_is_aligned};
use super::instances::{COLUMNS, Key, Work};
use super::params::{DeltaParams, Mamba2Params, Params, State};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::replay::config::{DeltaKind, Family, Format, PoolConfig, Readout};
use crate::replay::launch::{Batch, DeltaArgs, Exec, Mamba2Args, Mode};

/// Ring rows at most: positions are taken modulo their number in 32 bits.
const MAX_RING_ROWS: i32 = 1 << 15;
/// What a 16-byte load brings of bfloat16.
const UNIT: usize = 8;
/// Warps of a block, but for heads of five tiles.
const MOST_WARPS: i32 = 4;

thread_local! {
    /// For tests, which are to know that these kernels are what they compare.
    static LAUNCHES: Cell<u64> = const { Cell::new(0) };
}

/// Launches by this thread so far.
pub fn launches() -> u64 {
    LAUNCHES.get()
}

/// The kernel that could serve a pool.
pub(super) fn key(pool: &PoolConfig) -> Option<Key> {
    let (work, kda) = match &pool.family {
        Family::Mamba2(_) => (Work::Mamba2Single, false),
        Family::Delta(dims) => (Work::DeltaSingle, dims.kind == DeltaKind::Kda),
        Family::Conv1d(_) => return None,
    };
    let dims = pool.family.state()?;
    let fits = dims.columns == usize::from(COLUMNS[0]) && dims.rows.is_multiple_of(UNIT) && pool.io == Dtype::Bf16;
    let key = Key { work, format: pool.format as u8, high: false, kda, columns: COLUMNS[0] };
    let format = match pool.format {
        Format::Split32 | Format::F32 => true,
        Format::Bf16 => !pool.stochastic,
        Format::F16 => false,
    };
    (fits && format).then_some(key)
}

/// Loads it.
pub(super) fn prepare(cuda: &Cuda, pool: &PoolConfig) -> Result<()> {
    key(pool).filter(|&key| cuda.has(key)).map_or(Ok(()), |key| cuda.load(key))
}

/// Whether a call is what these kernels do: a token a row at most, serially, whose record or state is final at once.
fn takes(mode: Mode, readout: Readout, max_tokens: i64, keep_tail: i64) -> bool {
    let serial = match mode {
        Mode::Extend => keep_tail == 0,
        Mode::Step => readout == Readout::Exact,
    };
    serial && max_tokens == 1
}

/// How many tiles, and warps, a block has. Blocks are at different points of their work, and four on a multiprocessor keep it busier than two
/// twice as large ones; but what they do for all of their tiles is done more often. Where there are few, they are smaller, so that each
/// multiprocessor gets one.
fn warps_of(tiles: i32, heads: i32, n_rows: i64, multiprocessors: u32) -> i32 {
    let mut parts = (tiles + MOST_WARPS - 1) / MOST_WARPS;
    // A short last block would have idle warps; so one of five may be.
    if tiles == MOST_WARPS + 1 {
        parts = 1;
    }
    in_parts(tiles, parts, heads, n_rows, multiprocessors)
}

/// Tiles of a block where heads are in so many parts, or in more of them, where each multiprocessor would not get a block otherwise.
pub(super) fn in_parts(tiles: i32, mut parts: i32, heads: i32, n_rows: i64, multiprocessors: u32) -> i32 {
    while parts < tiles && n_rows.saturating_mul((heads * parts).into()) * 2 <= multiprocessors.into() {
        parts *= 2;
    }
    (tiles + parts - 1) / parts
}

/// A call's states as blocks of the kernel share them.
fn shared_out(cuda: &Cuda, state: &State, n_rows: i64) -> State {
    let warps = warps_of(state.tiles, state.heads, n_rows, cuda.device.multiprocessors);
    State { warps, parts: (state.tiles + warps - 1) / warps, ..*state }
}

/// Enqueues a call if the kernel can take it: a block for each head (or part of one) of a row, a warp for each of its tiles.
fn launch<P: Params>(cuda: &Cuda, key: Key, exec: &Exec, n_rows: i64, state: &State, params: &P) -> Option<Result<()>> {
    let blocks = n_rows.checked_mul(i64::from(state.heads) * i64::from(state.parts))?;
    if blocks > i64::from(i32::MAX) || cuda.kernel(key).is_err() {
        return None;
    }
    LAUNCHES.set(LAUNCHES.get() + 1);
    Some(cuda.launch(key, exec, blocks, state.warps as u32 * 32, 0, params))
}

/// Enqueues a step or extend of Mamba-2, if the kernel can take it.
pub(super) fn mamba2(
    cuda: &Cuda,
    pool: &PoolConfig,
    mode: Mode,
    batch: &Batch,
    args: &Mamba2Args,
    params: &Mamba2Params,
    exec: &Exec,
) -> Option<Result<()>> {
    let key = key(pool).filter(|_| takes(mode, pool.readout, batch.max_tokens, batch.keep_tail))?;
    let aligned = [&args.x, &args.b, &args.c].into_iter().all(is_aligned)
        && [&params.state.checkpoint, &params.ring_x, &params.ring_b, &params.ring_dt].into_iter().all(part_is_aligned);
    if !aligned || params.ring_rows > MAX_RING_ROWS {
        return None;
    }
    let state = shared_out(cuda, &params.state, batch.n_rows);
    launch(cuda, key, exec, batch.n_rows, &state, &Mamba2Params { state, ..*params })
}

/// Enqueues a step or extend of a delta rule, if the kernel can take it.
pub(super) fn delta(
    cuda: &Cuda,
    pool: &PoolConfig,
    mode: Mode,
    batch: &Batch,
    args: &DeltaArgs,
    params: &DeltaParams,
    exec: &Exec,
) -> Option<Result<()>> {
    let key = key(pool).filter(|_| takes(mode, pool.readout, batch.max_tokens, batch.keep_tail))?;
    let aligned = [&args.q, &args.k, &args.v].into_iter().all(is_aligned)
        && [&params.state.checkpoint, &params.ring_k, &params.ring_v].into_iter().all(part_is_aligned);
    if !aligned || params.ring_rows > MAX_RING_ROWS {
        return None;
    }
    let state = shared_out(cuda, &params.state, batch.n_rows);
    launch(cuda, key, exec, batch.n_rows, &state, &DeltaParams { state, ..*params })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_have_four_tiles_unless_there_are_few_of_them() {
        // Tiles, heads, rows: warps of a block on 132 multiprocessors.
        for (tiles, heads, rows, warps) in [
            (4, 128, 256, 4),
            (4, 128, 1, 4),
            (8, 64, 256, 4),
            (8, 64, 1, 4),
            (8, 32, 1, 2),
            (8, 8, 1, 1),
            (5, 96, 256, 5),
            (5, 96, 1, 5),
            (6, 96, 8, 3),
            (9, 96, 8, 3),
            (16, 96, 8, 4),
            (1, 2, 1, 1),
        ] {
            assert_eq!(warps_of(tiles, heads, rows, 132), warps, "{tiles} tiles of {heads} heads, {rows} rows");
        }
    }

    #[test]
    fn single_tokens_are_taken_whose_arithmetic_is_serial() {
        assert!(takes(Mode::Extend, Readout::High, 1, 0));
        assert!(!takes(Mode::Extend, Readout::Exact, 1, 1));
        assert!(!takes(Mode::Extend, Readout::Exact, 2, 0));
        assert!(takes(Mode::Step, Readout::Exact, 1, 0));
        assert!(!takes(Mode::Step, Readout::Exact, 3, 0));
        assert!(!takes(Mode::Step, Readout::Full, 1, 0));
    }
}
