//! Launches of steps of one token a row: `cuda/mamba2/decode.cu`. They need alignment and copies that not every device has; what they cannot
//! take, the parallel form does.

use super::Cuda;
use super::instances::{Key, Work};
use super::params::{Component, Mamba2DecodeParams, Mamba2Params};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::replay::config::{Family, Format, PoolConfig, Readout};
use crate::replay::launch::{Batch, Exec, Mamba2Args, PoolView, SlotsView, Tensor};

/// Four consumer warps, a producer and a planner.
const THREADS: u32 = 192;
/// Blocks that a multiprocessor is to hold.
const BLOCKS: u32 = 2;
/// Shared memory that a block takes beside what the launch asks for, and what the device keeps for itself.
const FIXED_BYTES: i32 = 14 << 10;
/// As the kernel has them.
const COLUMNS: i32 = 128;
const MAX_STAGES: i32 = 8;
const MAX_B: i32 = 2;
const MAX_HEADS: i32 = 4;
const MAX_CHANNELS: i32 = 128;
const HEADER_BYTES: i32 = 16;
/// A lane for each record and for the token.
const MAX_RECORDS: i32 = 31;

/// The next multiple.
const fn up(value: i32, to: i32) -> i32 {
    (value + to - 1) / to * to
}

/// The kernel that could decode for a pool.
pub(super) fn key(pool: &PoolConfig) -> Option<Key> {
    let Family::Mamba2(dims) = &pool.family else { return None };
    let high = match (pool.readout, pool.format) {
        (Readout::High, Format::Split32 | Format::Bf16) => true,
        (Readout::Full, Format::Split32 | Format::F32) => false,
        _ => return None,
    };
    let fits = dims.dstate as i32 == COLUMNS && dims.headdim as i32 <= MAX_CHANNELS && dims.headdim.is_multiple_of(8);
    let key = Key { work: Work::Mamba2Decode, format: pool.format as u8, high, kda: false, columns: COLUMNS as u16 };
    (fits && pool.io == Dtype::Bf16).then_some(key)
}

/// Loads the kernel if there is one for the device.
pub(super) fn prepare(cuda: &Cuda, pool: &PoolConfig) -> Result<()> {
    key(pool).filter(|&key| cuda.has(key)).map_or(Ok(()), |key| cuda.load(key))
}

/// Whether all vectors of a tensor begin at multiples of so many bytes.
pub(super) fn is_aligned(tensor: &Tensor, bytes: i64) -> bool {
    let strides = (tensor.row | tensor.token | tensor.head).wrapping_mul(tensor.dtype.size() as i64);
    (tensor.data.0 as i64 | strides) % bytes == 0
}

/// Whether the parts of a component do.
pub(super) fn part_is_aligned(component: &Component) -> bool {
    (component.base as i64 | component.stride) % 16 == 0
}

/// Enqueues a step, if the kernel can take it.
pub(super) fn run(
    cuda: &Cuda,
    slots: &SlotsView,
    pool: &PoolView,
    batch: &Batch,
    args: &Mamba2Args,
    family: &Mamba2Params,
    exec: &Exec,
) -> Option<Result<()>> {
    let key = key(&pool.config).filter(|&key| batch.max_tokens == 1 && cuda.kernel(key).is_ok())?;
    let aligned = [&args.x, &args.b, &args.c].into_iter().all(|tensor| is_aligned(tensor, 16))
        && [&family.state.checkpoint, &family.ring_x, &family.ring_b, &family.ring_dt].into_iter().all(part_is_aligned);
    let records = slots.config.window + slots.config.min_rewind;
    if !aligned || records > MAX_RECORDS {
        return None;
    }
    let rows = up(records + 1, 16);
    let plane_bytes = family.state.rows * COLUMNS * if key.high { 2 } else { 4 };
    let at_x = up(plane_bytes, 128);
    let at_gates = at_x + up((records + 1) * family.state.rows * 2, 16);
    let at_head = at_gates + up(records * 8, 16);
    let stage_bytes = up(at_head + HEADER_BYTES, 128);
    let b_bytes = (rows + 1) * COLUMNS * 2;
    let most = cuda.shared_limit(key) as i32;
    let stages_in = |bytes: i32| (bytes - MAX_B * b_bytes) / stage_bytes;
    let mut blocks = BLOCKS;
    let mut stages = stages_in(((most + FIXED_BYTES) / BLOCKS as i32 - FIXED_BYTES).min(most));
    if stages < 2 {
        (blocks, stages) = (1, stages_in(most));
    }
    if stages < 2 {
        return None;
    }
    let stages = stages.min(MAX_STAGES);
    let resident = i64::from(cuda.device.multiprocessors * blocks);
    // Heads of a group share B and C; but every block is to have several items.
    let heads = i64::from(family.state.heads);
    let mut heads_per_item = MAX_HEADS;
    while family.heads_per_group % heads_per_item != 0
        || (heads_per_item > 1 && batch.n_rows * heads < 8 * resident * i64::from(heads_per_item))
    {
        heads_per_item /= 2;
    }
    let has_pairs =
        args.out.dtype == Dtype::Bf16 && is_aligned(&args.out, 4) && args.z.as_ref().is_none_or(|z| is_aligned(z, 4));
    let params = Mamba2DecodeParams {
        family: *family,
        heads_per_item,
        stages,
        stage_bytes,
        plane_bytes,
        at_x,
        at_gates,
        at_head,
        b_bytes,
        rows,
        has_pairs: has_pairs.into(),
    };
    let items = batch.n_rows.saturating_mul(heads / i64::from(heads_per_item)).min(resident);
    let shared_bytes = (stages * stage_bytes + MAX_B * b_bytes) as u32;
    Some(cuda.launch(key, exec, items, THREADS, shared_bytes, &params))
}
