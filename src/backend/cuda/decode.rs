//! Launches of steps of a few tokens: `cuda/common/decode.cuh`. They need alignment and copies that not every device has; what they cannot
//! take, the parallel form does.

use super::Cuda;
use super::instances::{Key, Work};
use super::params::{Component, DeltaDecodeParams, DeltaParams, Mamba2DecodeParams, Mamba2Params, Pipeline};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::replay::config::{DeltaKind, Family, Format, PoolConfig, Readout};
use crate::replay::launch::{Batch, DeltaArgs, Exec, Mamba2Args, PoolView, SlotsView, Tensor};

/// As the kernels have them.
const COLUMNS: i32 = 128;
const ROW_BYTES: i32 = COLUMNS * 2;
const SERVICES: i32 = 3;
const MAX_STAGES: i32 = 8;
const MAX_KEYS: i32 = 4;
const MAX_HEADS: i32 = 4;
const MAX_TOKENS: i32 = 8;
const MAX_COLUMNS: i32 = 8;
const PLANS: i32 = 3;
const ITEMS: i32 = 4;
const WARP: i32 = 32;
const TILE: i32 = 16;
/// Records that a head can have: bits of three words.
const MAX_HISTORY: i32 = 96;
/// Warps of a block at most: two blocks of half as many fit a multiprocessor.
const MAX_WARPS: i32 = 16;
/// Shared memory that a block takes beside what the launch asks for, and what the device keeps for itself.
const FIXED_BYTES: i32 = 13 << 9;

/// The next multiple.
const fn up(value: i32, to: i32) -> i32 {
    (value + to - 1) / to * to
}

/// What a launch is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Rows of the batch.
    pub rows: i64,
    /// Tokens of a row at most.
    pub tokens: i32,
    /// Records of a head at most.
    pub history: i32,
    /// Heads of a layer, and how many share their keys.
    pub heads: i32,
    /// See `heads`.
    pub sharing: i32,
    /// Rows of a head's state.
    pub channels: i32,
    /// Bytes of an element of the checkpoint that readouts look at.
    pub element_bytes: i32,
    /// Bytes of an element of values.
    pub value_bytes: i32,
    /// Rows that a token brings beside its values.
    pub token_rows: i32,
    /// Columns of products at most, a multiple of eight.
    pub columns: i32,
    /// Whether folds take decoded keys.
    pub is_wide: bool,
    /// Columns where there is one token.
    pub single_columns: i32,
    /// Columns of which a consumer keeps sums.
    pub sum_columns: i32,
}

/// A device, as far as launches ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// Compute capability times ten.
    pub arch: u32,
    /// Multiprocessors.
    pub multiprocessors: i32,
    /// Dynamic shared memory that a block can have.
    pub shared_bytes: i32,
}

/// What was measured to be best on an architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// Blocks that a multiprocessor is to hold.
    pub blocks: i32,
    /// Consumers that a multiprocessor is to hold.
    pub consumers: i32,
    /// Heads of an item at most.
    pub heads_per_item: i32,
    /// Items per block, below which an item has fewer heads.
    pub items_per_block: i32,
}

impl Tuning {
    /// Of an architecture; that of sm_90, which was measured, where none was.
    pub fn of(_arch: u32) -> Tuning {
        #[allow(unused)]
        let env = |n: &str, d: i32| std::env::var(n).ok().and_then(|v| v.parse().ok()).unwrap_or(d); // EXPERIMENT
        Tuning {
            blocks: env("XB", 2),
            consumers: env("XC", 10),
            heads_per_item: env("XH", MAX_HEADS),
            items_per_block: env("XI", 8),
        }
    }
}

/// A launch: blocks, threads, shared memory, and what the kernel is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Blocks.
    pub blocks: i64,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// The rest.
    pub pipeline: Pipeline,
}

impl Choice {
    /// A pure function of the shape and the device; none where the shape is too large.
    pub fn of(shape: &Shape, device: &Device, tuning: &Tuning) -> Option<Choice> {
        if shape.tokens > MAX_TOKENS || shape.history > MAX_HISTORY || shape.channels % 8 != 0 {
            return None;
        }
        let records = shape.history + shape.tokens;
        let history = up(records, TILE);
        let consumers_of = |blocks: i32| (tuning.consumers / blocks).min(MAX_WARPS / blocks - SERVICES).min(MAX_STAGES);
        let products = history + 4;
        let value_stride = shape.channels * shape.value_bytes;
        let plane_bytes = shape.channels * COLUMNS * shape.element_bytes;
        let at_values = up(plane_bytes, 128);
        let at_z = at_values + records * value_stride;
        let at_gates = up(at_z + shape.token_rows * shape.tokens * value_stride, 16);
        let at_weights = up(at_gates + records * 8, 16);
        // Of one token there are no sums of its own: it is a record as any other, and its columns stand next to each other.
        let (columns, weights) =
            if shape.tokens == 1 { (0, shape.single_columns * history) } else { (shape.columns, history) };
        let weights = history + 4 + MAX_TOKENS + 4 + columns * MAX_TOKENS + weights;
        let stage_bytes = up(at_weights + weights * 4, 128);
        let at_queries = records * ROW_BYTES;
        let at_norms = at_queries + shape.tokens * ROW_BYTES;
        let at_products = up(at_norms + (history + 2 * MAX_TOKENS) * 4, 16);
        let key_bytes = up(at_products + shape.columns * products * 4, 128);
        let gates_bytes = up(PLANS * ITEMS * MAX_HEADS * shape.tokens * 8, 128);

        let wide_bytes = if shape.is_wide { records * COLUMNS * 4 } else { 0 };
        // Neighbouring columns of sums, of which a lane writes two, have no bank in common.
        let sums = shape.channels + 4;
        // In front of them what records bring, 16 bytes a lane for 16 of them.
        let brought = if shape.tokens > 1 && shape.value_bytes == 2 { history / TILE * WARP * 16 } else { 0 };
        let sum_columns = shape.sum_columns + (brought + sums * 4 - 1) / (sums * 4);
        let sums_bytes = |blocks: i32| up(consumers_of(blocks) * sum_columns * sums * 4, 128);
        let fit = |blocks: i32, heads_per_item: i32| {
            let bytes = ((device.shared_bytes + FIXED_BYTES) / blocks - FIXED_BYTES).min(device.shared_bytes)
                - gates_bytes
                - wide_bytes
                - sums_bytes(blocks);
            (2..=MAX_STAGES).rev().find_map(|stages| {
                let keys = (stages / heads_per_item + 1).clamp(2, MAX_KEYS);
                (stages * stage_bytes + keys * key_bytes <= bytes).then_some((stages, keys))
            })
        };
        // Several items for each block, so that it need not wait for the first bytes of more than one.
        let resident = i64::from(device.multiprocessors * tuning.blocks);
        let mut heads_per_item = tuning.heads_per_item.min(MAX_HEADS);
        while shape.sharing % heads_per_item != 0
            || (heads_per_item > 1
                && shape.rows * i64::from(shape.heads)
                    < i64::from(tuning.items_per_block) * resident * i64::from(heads_per_item))
        {
            heads_per_item /= 2;
        }
        let (blocks, (stages, keys)) =
            (1..=tuning.blocks).rev().find_map(|blocks| Some((blocks, fit(blocks, heads_per_item)?)))?;
        let items_per_row = shape.heads / heads_per_item;
        let n_items = shape.rows.saturating_mul(items_per_row.into());
        let at_own_gates = stages * stage_bytes + keys * key_bytes;
        let pipeline = Pipeline {
            n_items,
            items_per_row,
            heads_per_item,
            stages,
            keys,
            consumers: consumers_of(blocks),
            tokens: shape.tokens,
            history,
            columns,
            products,
            value_stride,
            plane_bytes,
            stage_bytes,
            at_values,
            at_z,
            at_gates,
            at_weights,
            at_keys: stages * stage_bytes,
            key_bytes,
            at_queries,
            at_norms,
            at_products,
            at_own_gates,
            at_sums: at_own_gates + gates_bytes,
            tokens_columns: sum_columns,
            sums,
            at_wide: at_own_gates + gates_bytes + sums_bytes(blocks),
        };
        Some(Choice {
            blocks: n_items.min(i64::from(device.multiprocessors * blocks)),
            threads: ((pipeline.consumers + SERVICES) * WARP) as u32,
            // Tiles of keys are read whole, whatever stands behind the last record.
            shared_bytes: (pipeline.at_wide + wide_bytes).max(at_own_gates - key_bytes + history * ROW_BYTES) as u32,
            pipeline,
        })
    }
}

/// The kernel that could take steps of so many tokens of a pool.
fn key(pool: &PoolConfig, tokens: i64) -> Option<Key> {
    let high = match (pool.readout, pool.format) {
        (Readout::High, Format::Split32 | Format::Bf16) => true,
        (Readout::Full, Format::Split32 | Format::F32) => false,
        _ => return None,
    };
    let (columns, rows, works) = match &pool.family {
        Family::Mamba2(dims) => (dims.dstate, dims.headdim, [Work::Mamba2Decode, Work::Mamba2Verify]),
        Family::Delta(dims) => {
            // Records of u are as precise as the readout.
            let precise = pool.u_dtype == if high { Dtype::Bf16 } else { Dtype::F32 };
            if dims.kind == DeltaKind::Kda || !precise {
                return None;
            }
            (dims.k, dims.v, [Work::DeltaDecode, Work::DeltaVerify])
        }
        Family::Conv1d(_) => return None,
    };
    let fits = columns as i32 == COLUMNS && rows.is_multiple_of(8) && tokens <= i64::from(MAX_TOKENS);
    let key = Key {
        work: works[usize::from(tokens > 1)],
        format: pool.format as u8,
        high,
        kda: false,
        columns: COLUMNS as u16,
    };
    (fits && pool.io == Dtype::Bf16).then_some(key)
}

/// Loads the kernels that there are for the device.
pub(super) fn prepare(cuda: &Cuda, pool: &PoolConfig) -> Result<()> {
    [1, 2]
        .into_iter()
        .filter_map(|tokens| key(pool, tokens))
        .filter(|&key| cuda.has(key))
        .try_for_each(|key| cuda.load(key))
}

/// Whether all vectors of a tensor begin at multiples of 16 bytes.
pub(super) fn is_aligned(tensor: &Tensor) -> bool {
    let strides = (tensor.row | tensor.token | tensor.head).wrapping_mul(tensor.dtype.size() as i64);
    (tensor.data.0 as i64 | strides) % 16 == 0
}

/// Whether the parts of a component do.
pub(super) fn part_is_aligned(component: &Component) -> bool {
    (component.base as i64 | component.stride) % 16 == 0
}

/// What a kernel and its shape come to on the device.
fn choose(cuda: &Cuda, key: Key, shape: &Shape) -> Option<Choice> {
    let device = Device {
        arch: cuda.device.arch,
        multiprocessors: cuda.device.multiprocessors as i32,
        shared_bytes: cuda.shared_limit(key) as i32,
    };
    Choice::of(shape, &device, &Tuning::of(device.arch))
}

/// Enqueues a step of Mamba-2, if a kernel can take it.
pub(super) fn mamba2(
    cuda: &Cuda,
    slots: &SlotsView,
    pool: &PoolView,
    batch: &Batch,
    args: &Mamba2Args,
    family: &Mamba2Params,
    exec: &Exec,
) -> Option<Result<()>> {
    let key = key(&pool.config, batch.max_tokens).filter(|&key| cuda.kernel(key).is_ok())?;
    let inputs = [Some(&args.x), Some(&args.b), Some(&args.c), args.z.as_ref()];
    let parts = [&family.state.checkpoint, &family.ring_x, &family.ring_b, &family.ring_dt];
    if !inputs.into_iter().flatten().all(is_aligned) || !parts.into_iter().all(part_is_aligned) {
        return None;
    }
    let shape = Shape {
        rows: batch.n_rows,
        tokens: batch.max_tokens as i32,
        history: slots.config.window + slots.config.min_rewind,
        heads: family.state.heads,
        sharing: family.heads_per_group,
        channels: family.state.rows,
        element_bytes: if key.high { 2 } else { 4 },
        value_bytes: 2,
        token_rows: i32::from(args.z.is_some()),
        columns: MAX_COLUMNS,
        is_wide: false,
        single_columns: 1,
        sum_columns: batch.max_tokens as i32,
    };
    let choice = choose(cuda, key, &shape)?;
    let params = Mamba2DecodeParams { family: *family, pipeline: choice.pipeline };
    Some(cuda.launch(key, exec, choice.blocks, choice.threads, choice.shared_bytes, &params))
}

/// Enqueues a step of a delta rule, if a kernel can take it.
pub(super) fn delta(
    cuda: &Cuda,
    slots: &SlotsView,
    pool: &PoolView,
    batch: &Batch,
    args: &DeltaArgs,
    family: &DeltaParams,
    exec: &Exec,
) -> Option<Result<()>> {
    let key = key(&pool.config, batch.max_tokens).filter(|&key| cuda.kernel(key).is_ok())?;
    let parts = [&family.state.checkpoint, &family.ring_k, &family.ring_v, &family.ring_u];
    if ![&args.q, &args.k, &args.v].into_iter().all(is_aligned) || !parts.into_iter().all(part_is_aligned) {
        return None;
    }
    let tokens = batch.max_tokens as i32;
    // Of k and q.
    let columns = if tokens <= MAX_COLUMNS / 2 { MAX_COLUMNS } else { 2 * MAX_COLUMNS };
    let shape = Shape {
        rows: batch.n_rows,
        tokens,
        history: slots.config.window + slots.config.min_rewind,
        heads: family.state.heads,
        sharing: family.state.heads / family.qk_heads,
        channels: family.state.rows,
        element_bytes: if key.high { 2 } else { 4 },
        value_bytes: if key.high { 2 } else { 4 },
        token_rows: 1,
        columns,
        is_wide: true,
        single_columns: 2,
        sum_columns: if tokens == 1 { 0 } else { columns },
    };
    let choice = choose(cuda, key, &shape)?;
    let params = DeltaDecodeParams { family: *family, pipeline: choice.pipeline };
    Some(cuda.launch(key, exec, choice.blocks, choice.threads, choice.shared_bytes, &params))
}
