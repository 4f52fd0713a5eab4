//! Launches of the delta rules: `cuda/delta`.

use super::Cuda;
use super::direct::{self, Turn};
use super::instances::{Key, Work};
use super::mamba2::columns_of;
use super::params::{
    Batch, CHUNK, Carve, Component, DeltaFoldParams, DeltaParams, Fold, GATES_BYTES, List, Place, Slots, State,
    StateTensor, TOKENS, Tensor, gate as numbers, mode as number,
};
use super::{decode, single};
use crate::error::{Error, Result};
use crate::replay::config::{DeltaDims, DeltaKind, Family, HeadMap, PoolConfig, Readout};
use crate::replay::launch::{self, DeltaArgs, Exec, Mode, PoolView, SlotsView};
use crate::replay::layout;
use crate::replay::plan::{MAX_PARALLEL, MAX_WARPS};
use crate::replay::position::Rule;
use crate::replay::step::MAX_BLOCKS;

/// Of the serial form, of the parallel one, of tails and of folds.
fn keys(pool: &PoolConfig, dims: &DeltaDims) -> [Key; 4] {
    let (columns, kda) = (columns_of(dims.k), dims.kind == DeltaKind::Kda);
    let key = |work, high| Key { work, format: pool.format as u8, high, kda, columns };
    let high = pool.readout == Readout::High;
    let tail = Key { work: Work::DeltaTail, format: 0, high: false, kda, columns };
    [key(Work::DeltaSerial, false), key(Work::DeltaParallel, high), tail, key(Work::DeltaFold, false)]
}

/// Arrays in shared memory, in the order of `cuda/delta/delta.cuh`.
fn carve(state: &State, kda: bool, parallel_tokens: usize) -> Carve {
    let mut carve = Carve::new(state.columns, state.warps);
    let is_parallel = parallel_tokens > 0;
    carve.columns(CHUNK); // keys
    carve.channels(CHUNK); // v
    carve.array(CHUNK * GATES_BYTES); // gates
    carve.columns(if is_parallel && !kda { TOKENS } else { CHUNK }); // queries
    carve.channels(if is_parallel { TOKENS } else { CHUNK }); // o
    match (kda, is_parallel) {
        (true, false) => carve.columns(CHUNK), // decays
        (true, true) => carve.same_as(3),
        (false, _) => carve.array(0),
    }
    carve.array(if kda { CHUNK * MAX_BLOCKS * 4 } else { 0 }); // which are slow
    if is_parallel {
        carve.columns(parallel_tokens); // own keys
        carve.columns(if kda { parallel_tokens } else { 0 }); // own log decays
        carve.channels(parallel_tokens); // own u
        carve.array(parallel_tokens * GATES_BYTES); // own gates
        carve.channels(TOKENS); // predictions
        carve.array((CHUNK + parallel_tokens) * TOKENS * 8); // weights
        if kda { carve.columns(1) } else { carve.array(MAX_WARPS * TOKENS * 4) } // what lies between
    }
    carve
}

/// Loads what a pool can need.
pub(super) fn prepare(cuda: &Cuda, pool: &PoolConfig) -> Result<()> {
    let Family::Delta(dims) = &pool.family else { return Ok(()) };
    let [serial, parallel, tail, fold] = keys(pool, dims);
    cuda.load(serial)?;
    cuda.load(tail)?;
    cuda.load(fold)?;
    if pool.readout != Readout::Exact {
        cuda.load(parallel)?;
    }
    single::prepare(cuda, pool)?;
    direct::prepare(cuda, pool)?;
    decode::prepare(cuda, pool)
}

/// What steps, extends and folds have in common.
fn params(slots: &SlotsView, pool: &PoolView, dims: &DeltaDims, state: State, layer: Option<i64>) -> DeltaParams {
    let ring = |component| Component::of(pool, component, layer);
    DeltaParams {
        slots: Slots::of(slots),
        place: Place { pool: pool.index, layer: layer.unwrap_or(0) as i32 },
        state,
        ring_k: ring(layout::Component::K),
        ring_norm: ring(layout::Component::KNorm),
        ring_v: ring(layout::Component::V),
        ring_g: ring(layout::Component::G),
        ring_beta: ring(layout::Component::Beta),
        ring_u: ring(layout::Component::U),
        io: pool.config.io as i32,
        u_dtype: pool.config.u_dtype as i32,
        ring_rows: Rule::new(&slots.config).rows() as i32,
        qk_heads: dims.qk_heads as i32,
        is_tiled: (dims.head_map == HeadMap::Tiled).into(),
        ..DeltaParams::default()
    }
}

fn of_pool(pool: &PoolView, layer: Option<i64>) -> Result<(&DeltaDims, State)> {
    match (&pool.config.family, State::of(pool, layer)) {
        (Family::Delta(dims), Some(state)) => Ok((dims, state)),
        _ => Err(Error::Internal("a delta rule's call on another family".into())),
    }
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
    args: &DeltaArgs,
    exec: &Exec,
) -> Result<()> {
    let (dims, state) = of_pool(pool, Some(layer))?;
    let [serial, parallel, tail, _] = keys(&pool.config, dims);
    let is_serial = mode == Mode::Extend || pool.config.readout == Readout::Exact || batch.max_tokens > MAX_PARALLEL;
    let own = if is_serial { 0 } else { batch.max_tokens as usize };
    let carve = carve(&state, dims.kind == DeltaKind::Kda, own);
    let (gate, lower_bound) = numbers(args.gate);
    let params = DeltaParams {
        batch: Batch::of(batch, exec),
        q: Tensor::from(&args.q),
        k: Tensor::from(&args.k),
        v: Tensor::from(&args.v),
        g: Tensor::from(&args.g),
        beta: Tensor::from(&args.beta),
        a_log: Tensor::from(&args.a_log),
        dt_bias: Tensor::from(&args.dt_bias),
        out: Tensor::from(&args.out),
        shared: carve.shared,
        gate,
        has_norm: args.l2norm.is_some().into(),
        beta_sigmoid: args.beta_sigmoid.into(),
        mode: number(mode),
        scale: args.scale,
        eps: args.l2norm.unwrap_or(0.0),
        lower_bound,
        ..params(slots, pool, dims, state, Some(layer))
    };
    let items = batch.n_rows.saturating_mul(i64::from(state.heads) * i64::from(state.parts));
    let threads = state.warps as u32 * 32;
    if let Some(done) = single::delta(cuda, &pool.config, mode, batch, args, &params, exec) {
        return done;
    }
    if !is_serial {
        let direct = |turn| direct::delta(cuda, slots, pool, batch, args, &params, exec, turn);
        let pipeline = || decode::delta(cuda, slots, pool, batch, args, &params, exec);
        if let Some(done) = direct(Turn::First).or_else(pipeline).or_else(|| direct(Turn::Last)) {
            return done;
        }
    }
    let key = if is_serial { serial } else { parallel };
    cuda.launch(key, exec, items, threads, carve.bytes(), &params)?;
    if mode == Mode::Extend && batch.keep_tail > 0 {
        // Records of the tail may overwrite history that another block has yet to read: they wait for all of them.
        cuda.launch(tail, &exec.after_own_launch(), items, threads, carve.bytes(), &params)?;
    }
    Ok(())
}

/// Enqueues a fold: states at held positions of a list's entries, or of a batch's rows.
#[allow(clippy::too_many_arguments, reason = "what a fold consists of")]
pub(super) fn fold(
    cuda: &Cuda,
    slots: &SlotsView,
    pool: &PoolView,
    list: List,
    batch: Option<Batch>,
    dst: StateTensor,
    fold: Fold,
    exec: &Exec,
) -> Result<()> {
    let (dims, state) = of_pool(pool, None)?;
    let [_, _, _, key] = keys(&pool.config, dims);
    let carve = carve(&state, dims.kind == DeltaKind::Kda, 0);
    let family = DeltaParams {
        batch: batch.unwrap_or_default(),
        shared: carve.shared,
        ..params(slots, pool, dims, state, None)
    };
    let threads = state.warps as u32 * 32;
    let units = i64::from(dst.n_layers) * i64::from(state.heads) * i64::from(state.parts);
    let items = match batch {
        Some(batch) => cuda.due_blocks(threads).min(batch.n_rows.saturating_mul(units)),
        None => cuda.list_blocks(list.n.saturating_mul(units)),
    };
    let params = DeltaFoldParams { family, list, dst, fold };
    cuda.launch(key, exec, items, threads, carve.bytes(), &params)
}
