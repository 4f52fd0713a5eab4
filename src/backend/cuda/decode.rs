//! Launches of steps of a few tokens: `cuda/common/decode.cuh`. They need alignment and copies that not every device has; what they cannot
//! take, the parallel form does.

use super::Cuda;
use super::choice::{COLUMNS, Choice, Device, MAX_KDA_TOKENS, MAX_TOKENS, Shape, Tuning};
use super::instances::{Key, Work};
use super::params::{Component, DeltaDecodeParams, DeltaParams, Mamba2DecodeParams, Mamba2Params};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::replay::config::{DeltaKind, Family, Format, PoolConfig, Readout, SlotsConfig};
use crate::replay::launch::{Batch, DeltaArgs, Exec, Mamba2Args, PoolView, SlotsView, Tensor};

/// The kernel that could take steps of so many tokens of a pool.
fn key(pool: &PoolConfig, tokens: i64) -> Option<Key> {
    any_key(pool, tokens).filter(|key| !key.kda || tokens <= MAX_KDA_TOKENS.into())
}

/// The same, without the pipeline's bound on tokens of decays per column.
pub(super) fn any_key(pool: &PoolConfig, tokens: i64) -> Option<Key> {
    let high = match (pool.readout, pool.format) {
        (Readout::High, Format::Split32 | Format::Bf16) => true,
        (Readout::Full, Format::Split32 | Format::F32) => false,
        _ => return None,
    };
    let (columns, rows, (single, several), kda) = match &pool.family {
        Family::Mamba2(dims) => (dims.dstate, dims.headdim, (Work::Mamba2Decode, Work::Mamba2Verify), false),
        Family::Delta(dims) => {
            // Records of u are as precise as the readout.
            let precise = pool.u_dtype == if high { Dtype::Bf16 } else { Dtype::F32 };
            if !precise {
                return None;
            }
            (dims.k, dims.v, (Work::DeltaDecode, Work::DeltaVerify), dims.kind == DeltaKind::Kda)
        }
        Family::Conv1d(_) => return None,
    };
    let fits = columns as i32 == COLUMNS && rows.is_multiple_of(8) && tokens <= MAX_TOKENS.into();
    let key = Key {
        work: if tokens > 1 { several } else { single },
        format: pool.format as u8,
        high,
        kda,
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

/// Whether all that a step of Mamba-2 brings by 16 bytes at a time does.
pub(super) fn mamba2_is_aligned(args: &Mamba2Args, family: &Mamba2Params) -> bool {
    let inputs = [Some(&args.x), Some(&args.b), Some(&args.c), args.z.as_ref()];
    let parts = [&family.state.checkpoint, &family.ring_x, &family.ring_b, &family.ring_dt];
    inputs.into_iter().flatten().all(is_aligned) && parts.into_iter().all(part_is_aligned)
}

/// The same of a delta rule. Decays per column are brought as values are.
pub(super) fn delta_is_aligned(args: &DeltaArgs, family: &DeltaParams, kda: bool) -> bool {
    let parts = [&family.state.checkpoint, &family.ring_k, &family.ring_v, &family.ring_u];
    let decays =
        || is_aligned(&args.g) && args.dt_bias.as_ref().is_none_or(is_aligned) && part_is_aligned(&family.ring_g);
    [&args.q, &args.k, &args.v].into_iter().all(is_aligned)
        && parts.into_iter().all(part_is_aligned)
        && (!kda || decays())
}

/// What a kernel and its shape come to on the device.
fn choose(cuda: &Cuda, key: Key, shape: &Shape) -> Option<Choice> {
    let device = Device {
        arch: cuda.device.arch,
        multiprocessors: cuda.device.multiprocessors as i32,
        shared_bytes: cuda.shared_limit(key) as i32,
    };
    Choice::of(shape, &device, &Tuning::of(device.arch, shape.tokens))
}

/// A launch in words, if a kernel can take a step whose tensors are aligned.
pub(super) fn in_words(cuda: &Cuda, slots: &SlotsConfig, pool: &PoolConfig, rows: i64, tokens: i64) -> Option<String> {
    let key = key(pool, tokens).filter(|&key| cuda.kernel(key).is_ok())?;
    let has_z = matches!(pool.family, Family::Mamba2(_));
    let choice = choose(cuda, key, &Shape::of(slots, pool, (rows, tokens), has_z)?)?;
    let Choice { blocks, blocks_each, threads, shared_bytes, pipeline } = choice;
    Some(format!(
        "{}{}, blocks of {threads} threads with {shared_bytes} bytes of shared memory: {blocks}, up to {blocks_each} on a multiprocessor; \
         {} at a time, {} under way",
        key.name(),
        if has_z { " (with a gate z)" } else { "" },
        match (pipeline.heads_per_item, pipeline.parts) {
            (1, 1) => "a head".to_owned(),
            (heads, 1) => format!("{heads} heads that share keys"),
            (1, 2) => "half a head".to_owned(),
            (1, _) => "a quarter of a head".to_owned(),
            (n, 2) => format!("{n} halves of heads"),
            (n, _) => format!("{n} quarters of heads"),
        },
        if pipeline.parts == 1 {
            format!("{} heads", pipeline.planes)
        } else {
            format!("{} of those", pipeline.planes)
        },
    ))
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
    if !mamba2_is_aligned(args, family) {
        return None;
    }
    let steps = (batch.n_rows, batch.max_tokens);
    let shape = Shape::of(&slots.config, &pool.config, steps, args.z.is_some())?;
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
    if !delta_is_aligned(args, family, key.kda) {
        return None;
    }
    let shape = Shape::of(&slots.config, &pool.config, (batch.n_rows, batch.max_tokens), false)?;
    let choice = choose(cuda, key, &shape)?;
    let params = DeltaDecodeParams { family: *family, pipeline: choice.pipeline };
    Some(cuda.launch(key, exec, choice.blocks, choice.threads, choice.shared_bytes, &params))
}
