//! Launches of Mamba-2: `cuda/mamba2`.

use super::Cuda;
use super::direct::{self, Turn};
use super::instances::{COLUMNS, Key, Work};
use super::params::{
    Batch, CHUNK, Carve, Component, Fold, GATES_BYTES, List, Mamba2FoldParams, Mamba2Params, Place, Slots, State,
    StateTensor, TOKENS, Tensor, mode as number,
};
use super::{decode, single};
use crate::error::{Error, Result};
use crate::replay::config::{Family, PoolConfig, Readout};
use crate::replay::launch::{self, Exec, Mamba2Args, Mode, PoolView, SlotsView};
use crate::replay::layout;
use crate::replay::plan::MAX_PARALLEL;
use crate::replay::position::Rule;

/// The tuned kernel's columns if the state has no more, else the generic one's.
pub(super) fn columns_of(columns: usize) -> u16 {
    COLUMNS.into_iter().find(|&most| columns <= most.into()).unwrap_or(0)
}

/// Of the serial form, of the parallel one, and of folds.
fn keys(pool: &PoolConfig, columns: usize) -> [Key; 3] {
    let key = |work, high| Key { work, format: pool.format as u8, high, kda: false, columns: columns_of(columns) };
    let high = pool.readout == Readout::High;
    [key(Work::Mamba2Serial, false), key(Work::Mamba2Parallel, high), key(Work::Mamba2Fold, false)]
}

/// Arrays in shared memory, in the order of `cuda/mamba2/mamba2.cuh`.
pub(super) fn carve(columns: i32, warps: i32, parallel_tokens: usize) -> Carve {
    let mut carve = Carve::new(columns, warps);
    carve.columns(CHUNK); // B
    carve.columns(CHUNK); // C
    carve.channels(CHUNK); // x
    carve.array(CHUNK * GATES_BYTES); // gates
    carve.channels(CHUNK); // y
    if parallel_tokens > 0 {
        carve.columns(parallel_tokens);
        carve.channels(parallel_tokens);
        carve.array(parallel_tokens * GATES_BYTES);
        carve.array(TOKENS * (CHUNK + MAX_PARALLEL as usize) * 4);
    }
    carve
}

/// Loads what a pool can need.
pub(super) fn prepare(cuda: &Cuda, pool: &PoolConfig) -> Result<()> {
    let Family::Mamba2(dims) = &pool.family else { return Ok(()) };
    let [serial, parallel, fold] = keys(pool, dims.dstate);
    cuda.load(serial)?;
    cuda.load(Key::single(Work::Mamba2Tail))?;
    cuda.load(fold)?;
    if pool.readout != Readout::Exact {
        cuda.load(parallel)?;
    }
    single::prepare(cuda, pool)?;
    direct::prepare(cuda, pool)?;
    decode::prepare(cuda, pool)
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
    args: &Mamba2Args,
    exec: &Exec,
) -> Result<()> {
    let (Family::Mamba2(dims), Some(state)) = (&pool.config.family, State::of(pool, Some(layer))) else {
        return Err(Error::Internal("a Mamba-2 call on another family".into()));
    };
    let [serial, parallel, _] = keys(&pool.config, dims.dstate);
    let is_serial = mode == Mode::Extend || pool.config.readout == Readout::Exact || batch.max_tokens > MAX_PARALLEL;
    let carve = carve(state.columns, state.warps, if is_serial { 0 } else { batch.max_tokens as usize });
    let ring = |component| Component::of(pool, component, Some(layer));
    let params = Mamba2Params {
        slots: Slots::of(slots),
        batch: Batch::of(batch, exec),
        place: Place { pool: pool.index, layer: layer as i32 },
        state,
        ring_x: ring(layout::Component::X),
        ring_b: ring(layout::Component::B),
        ring_dt: ring(layout::Component::Dt),
        x: Tensor::from(&args.x),
        b: Tensor::from(&args.b),
        c: Tensor::from(&args.c),
        dt: Tensor::from(&args.dt),
        a: Tensor::from(&args.a),
        dt_bias: Tensor::from(&args.dt_bias),
        d_skip: Tensor::from(&args.d_skip),
        z: Tensor::from(&args.z),
        out: Tensor::from(&args.out),
        shared: carve.shared,
        io: pool.config.io as i32,
        ring_rows: Rule::new(&slots.config).rows() as i32,
        heads_per_group: dims.heads_per_group() as i32,
        d_per_element: args.d_per_element.into(),
        softplus: args.dt_softplus.into(),
        mode: number(mode),
    };
    let items = batch.n_rows.saturating_mul(i64::from(state.heads) * i64::from(state.parts));
    let threads = state.warps as u32 * 32;
    if !is_serial {
        let direct = |turn| direct::mamba2(cuda, slots, pool, batch, args, &params, exec, turn);
        let pipeline = || decode::mamba2(cuda, slots, pool, batch, args, &params, exec);
        if let Some(done) = direct(Turn::First).or_else(pipeline).or_else(|| direct(Turn::Last)) {
            return done;
        }
    }
    if let Some(done) = single::mamba2(cuda, &pool.config, mode, batch, args, &params, exec) {
        return done;
    }
    let key = if is_serial { serial } else { parallel };
    cuda.launch(key, exec, items, threads, carve.bytes(), &params)?;
    if mode == Mode::Extend && batch.keep_tail > 0 {
        // Records of the tail may overwrite history that another block has yet to read: they wait for all of them.
        cuda.launch(Key::single(Work::Mamba2Tail), &exec.after_own_launch(), items, threads, carve.bytes(), &params)?;
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
    let (Family::Mamba2(dims), Some(state)) = (&pool.config.family, State::of(pool, None)) else {
        return Err(Error::Internal("a Mamba-2 call on another family".into()));
    };
    let [_, _, key] = keys(&pool.config, dims.dstate);
    let carve = carve(state.columns, state.warps, 0);
    let ring = |component| Component::of(pool, component, None);
    let family = Mamba2Params {
        slots: Slots::of(slots),
        batch: batch.unwrap_or_default(),
        place: Place { pool: pool.index, layer: 0 },
        state,
        ring_x: ring(layout::Component::X),
        ring_b: ring(layout::Component::B),
        ring_dt: ring(layout::Component::Dt),
        shared: carve.shared,
        io: pool.config.io as i32,
        ring_rows: Rule::new(&slots.config).rows() as i32,
        heads_per_group: dims.heads_per_group() as i32,
        ..Mamba2Params::default()
    };
    let threads = state.warps as u32 * 32;
    let units = i64::from(dst.n_layers) * i64::from(state.heads) * i64::from(state.parts);
    let items = match batch {
        Some(batch) => cuda.due_blocks(threads).min(batch.n_rows.saturating_mul(units)),
        None => cuda.list_blocks(list.n.saturating_mul(units)),
    };
    let params = Mamba2FoldParams { family, list, dst, fold };
    cuda.launch(key, exec, items, threads, carve.bytes(), &params)
}
