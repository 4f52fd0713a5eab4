//! From C descriptors to the checked types of `replay::launch`.

use super::handles::pin;
use super::read::{array, optional_pointer, required};
use super::types::{
    REPLAYSSM_BATCH_EXTEND, REPLAYSSM_BATCH_KEEP_NULL_OUTPUTS, REPLAYSSM_BATCH_NULL_ID, REPLAYSSM_EXEC_PDL,
    REPLAYSSM_EXEC_PDL_PREFETCH, REPLAYSSM_LOG_INFO, REPLAYSSM_LOG_NONE, REPLAYSSM_LOG_WARNING, REPLAYSSM_SAVE_LIVE,
    REPLAYSSM_SAVE_PORTABLE, REPLAYSSM_SAVE_STORED, REPLAYSSM_SLOTS_CHECKS, replayssm_batch, replayssm_commit_args,
    replayssm_component, replayssm_context_desc, replayssm_conv1d_args, replayssm_copy_args, replayssm_delta_args,
    replayssm_exec, replayssm_flush_args, replayssm_ids, replayssm_layers, replayssm_lent, replayssm_list,
    replayssm_mamba2_args, replayssm_plan_args, replayssm_plan_info, replayssm_pool_desc, replayssm_report,
    replayssm_reset_args, replayssm_slots_desc, replayssm_snapshot_args, replayssm_state, replayssm_stats,
    replayssm_tensor,
};
use std::borrow::Cow;
use std::ffi::{CString, c_void};

use crate::dtype::{Dtype, IndexType};
use crate::error::{Error, Result};
use crate::log::{Level, Log};
use crate::memory::collected;
use crate::replay::blob::Kind;
use crate::replay::capacity::{ModelPlan, Question};
use crate::replay::config::{MAX_COUNT, PoolFields, SlotsConfig};
use crate::replay::launch::{
    Address, Batch, CommitArgs, ComponentView, ConvArgs, CopyArgs, CopyKind, DeltaArgs, Exec, FlushArgs, Gate, Ids,
    List, MAX_NAMED, Mamba2Args, Named, PoolLists, Report, ResetArgs, SnapshotArgs, StateTensor, Stats, Tensor, Tokens,
    Where, Which,
};
use crate::replay::layout::{Component, ComponentLayout};
use crate::replay::position::Convention;
use crate::replay::save::Pair;
use crate::replay::slots::{Layers, Lent, Slots};

/// A field's part, as "batch.slots" and ".dtype"; made into text only for an error.
#[derive(Clone, Copy)]
pub(super) struct Part(&'static str, &'static str);

impl From<Part> for Cow<'static, str> {
    fn from(part: Part) -> Self {
        format!("{}{}", part.0, part.1).into()
    }
}

pub(super) fn zero(field: impl Into<Cow<'static, str>>, value: u32) -> Result<()> {
    if value == 0 { Ok(()) } else { Err(Error::unsupported(field, value, "0")) }
}

pub(super) fn switch(field: &'static str, value: i32) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Error::unsupported(field, other, "0 and 1")),
    }
}

pub(super) fn slots(d: &replayssm_slots_desc) -> Result<SlotsConfig> {
    zero("slots_desc.flags", d.flags & !REPLAYSSM_SLOTS_CHECKS)?;
    let config = SlotsConfig::checked(d.n_slots, d.n_rings, d.window, d.max_step_tokens, d.min_rewind, d.schedule)?;
    Ok(SlotsConfig { checks: d.flags & REPLAYSSM_SLOTS_CHECKS != 0, ..config })
}

fn address(at: usize) -> Address {
    Address(at)
}

fn ids(from: &replayssm_ids, field: &'static str, n: i64) -> Result<Ids> {
    zero(Part(field, ".reserved"), from.reserved)?;
    let index = match (n, from.dtype) {
        (0, 0) => IndexType::I32,
        (_, raw) => IndexType::from_raw(raw, Part(field, ".dtype"))?,
    };
    let stride = if from.stride == 0 { 1 } else { from.stride };
    let reach = stride.checked_abs().and_then(|s| s.checked_mul(n.max(1))).and_then(|s| s.checked_mul(8));
    if reach.is_none() {
        return Err(Error::invalid(Part(field, ".stride"), from.stride, "a stride whose reach fits an address space"));
    }
    let data = match n {
        0 => optional_pointer(from.data, Part(field, ".data"), index.size())?.unwrap_or(0),
        _ => required(from.data, Part(field, ".data"), index.size())?,
    };
    Ok(Ids { data: address(data), stride, index })
}

/// Whether an array that need not be given is not. Its reserved field is looked at all the same.
fn is_absent(from: &replayssm_ids, field: &'static str) -> Result<bool> {
    zero(Part(field, ".reserved"), from.reserved)?;
    Ok(from.data.is_null())
}

/// Slots and rings of a batch or list; rings default to slots.
fn id_pair(slots: &replayssm_ids, rings: &replayssm_ids, names: [&'static str; 2], n: i64) -> Result<(Ids, Ids)> {
    let [slot_name, ring_name] = names;
    let slots = ids(slots, slot_name, n)?;
    let rings = if is_absent(rings, ring_name)? { slots } else { ids(rings, ring_name, n)? };
    Ok((slots, rings))
}

fn tensor(from: &replayssm_tensor, field: &'static str, idle: bool) -> Result<Tensor> {
    match optional_tensor(from, field)? {
        Some(tensor) => Ok(tensor),
        None if idle => Ok(Tensor {
            data: address(0),
            row: from.stride_row,
            token: from.stride_token,
            head: from.stride_head,
            dtype: Dtype::F32,
        }),
        None => Err(Error::invalid(field, "absent (data is NULL)", "a tensor")),
    }
}

fn optional_tensor(from: &replayssm_tensor, field: &'static str) -> Result<Option<Tensor>> {
    zero(Part(field, ".reserved"), from.reserved)?;
    if from.data.is_null() {
        return Ok(None);
    }
    Ok(Some(Tensor {
        data: address(from.data as usize),
        row: from.stride_row,
        token: from.stride_token,
        head: from.stride_head,
        dtype: Dtype::from_raw(from.dtype, Part(field, ".dtype"))?,
    }))
}

/// What log lines are handed with.
struct User(*mut c_void);

// SAFETY: an address that the library does not follow; the header tells its owner on which threads the hook runs.
unsafe impl Send for User {}
// SAFETY: as for Send.
unsafe impl Sync for User {}

impl User {
    fn pointer(&self) -> *mut c_void {
        self.0
    }
}

pub(super) fn log(from: &replayssm_context_desc) -> Result<Log> {
    zero("context_desc.log_reserved", from.log_reserved)?;
    let level = match from.log_level {
        REPLAYSSM_LOG_NONE => return Ok(Log::default()),
        REPLAYSSM_LOG_WARNING => Level::Warning,
        REPLAYSSM_LOG_INFO => Level::Info,
        other => {
            return Err(Error::unsupported("context_desc.log_level", other, "REPLAYSSM_LOG_NONE, _WARNING and _INFO"));
        }
    };
    let Some(hook) = from.log else {
        return Err(Error::invalid("context_desc.log", "NULL", "a function, because log_level asks for lines"));
    };
    let user = User(from.log_user);
    Ok(Log::new(
        level,
        Box::new(move |level, text| {
            let text = CString::new(text).unwrap_or_default();
            // SAFETY: the header asks for a function that can be called like this until the context and all on it are gone.
            unsafe { hook(user.pointer(), level as i32, text.as_ptr()) };
        }),
    ))
}

pub(super) fn exec(from: &replayssm_exec) -> Result<Exec> {
    zero("exec.flags", from.flags & !(REPLAYSSM_EXEC_PDL | REPLAYSSM_EXEC_PDL_PREFETCH))?;
    let n_parts = if from.n_parts == 0 { 1 } else { from.n_parts };
    if n_parts < 1 {
        return Err(Error::invalid("exec.n_parts", n_parts, "0 or more"));
    }
    if !(0..n_parts).contains(&from.part) {
        return Err(Error::invalid("exec.part", from.part, format!("0 to {}", n_parts - 1)));
    }
    let dependent = from.flags & REPLAYSSM_EXEC_PDL != 0;
    let prefetch = from.flags & REPLAYSSM_EXEC_PDL_PREFETCH != 0;
    if prefetch && !dependent {
        return Err(Error::invalid("exec.flags", from.flags, "REPLAYSSM_EXEC_PDL with REPLAYSSM_EXEC_PDL_PREFETCH"));
    }
    Ok(Exec { stream: from.stream as usize, part: from.part.into(), n_parts: n_parts.into(), dependent, prefetch })
}

pub(super) fn batch(from: &replayssm_batch) -> Result<Batch> {
    let known = REPLAYSSM_BATCH_NULL_ID | REPLAYSSM_BATCH_KEEP_NULL_OUTPUTS | REPLAYSSM_BATCH_EXTEND;
    if from.flags & !known != 0 {
        return Err(Error::unsupported("batch.flags", format!("{:#x}", from.flags), "the bits REPLAYSSM_BATCH_*"));
    }
    zero("batch.reserved", from.reserved)?;
    let n = i64::from(from.n_rows);
    let (slots, rings) = id_pair(&from.slots, &from.rings, ["batch.slots", "batch.rings"], n)?;
    let tokens = match optional_pointer(from.cu_seqlens.cast(), "batch.cu_seqlens", 4)? {
        Some(_) if from.tokens != 0 => {
            return Err(Error::invalid("batch.tokens", from.tokens, "0 with cu_seqlens"));
        }
        Some(cu) => Tokens::Packed(address(cu)),
        None => Tokens::Dense(from.tokens.into()),
    };
    Ok(Batch {
        n_rows: n,
        tokens,
        max_tokens: from.max_tokens.into(),
        n_tokens: from.n_tokens,
        slots,
        rings,
        flush: optional_pointer(from.flush.cast(), "batch.flush", 1)?.map(address),
        generation: optional_pointer(from.generation.cast(), "batch.generation", 4)?.map(address),
        null_id: (from.flags & REPLAYSSM_BATCH_NULL_ID != 0).then_some(from.null_id.into()),
        keep_null_outputs: from.flags & REPLAYSSM_BATCH_KEEP_NULL_OUTPUTS != 0,
        extend: from.flags & REPLAYSSM_BATCH_EXTEND != 0,
        keep_tail: from.keep_tail.into(),
    })
}

pub(super) fn mamba2(from: &replayssm_mamba2_args, batch: &Batch) -> Result<Mamba2Args> {
    zero("args.reserved", from.reserved)?;
    let idle = batch.is_empty();
    Ok(Mamba2Args {
        x: tensor(&from.x, "args.x", idle)?,
        b: tensor(&from.B, "args.B", idle)?,
        c: tensor(&from.C, "args.C", idle)?,
        dt: tensor(&from.dt, "args.dt", idle)?,
        a: tensor(&from.A, "args.A", idle)?,
        dt_bias: optional_tensor(&from.dt_bias, "args.dt_bias")?,
        d_skip: optional_tensor(&from.D, "args.D")?,
        d_per_element: switch("args.D_per_element", from.D_per_element)?,
        z: optional_tensor(&from.z, "args.z")?,
        out: tensor(&from.out, "args.out", idle)?,
        dt_softplus: !switch("args.no_softplus", from.no_softplus)?,
    })
}

pub(super) fn delta(from: &replayssm_delta_args, batch: &Batch) -> Result<DeltaArgs> {
    zero("args.reserved", from.reserved)?;
    let idle = batch.is_empty();
    let gate = match from.gate {
        0 => Gate::Softplus,
        1 => Gate::LowerBound(from.lower_bound),
        2 => Gate::LogDecay,
        other => return Err(Error::unsupported("args.gate", other, "REPLAYSSM_GATE_*")),
    };
    if !matches!(gate, Gate::LowerBound(_)) && from.lower_bound != 0.0 {
        return Err(Error::invalid("args.lower_bound", from.lower_bound, "0 without REPLAYSSM_GATE_LOWER_BOUND"));
    }
    if !from.scale.is_finite() {
        return Err(Error::invalid("args.scale", from.scale, "a finite number"));
    }
    if !(0.0..=f32::MAX).contains(&from.l2norm_eps) {
        return Err(Error::invalid("args.l2norm_eps", from.l2norm_eps, "0 or a finite number above"));
    }
    if from.no_l2norm != 0 && from.l2norm_eps != 0.0 {
        return Err(Error::invalid("args.l2norm_eps", from.l2norm_eps, "0 with no_l2norm"));
    }
    let eps = if from.l2norm_eps == 0.0 { 1e-6 } else { from.l2norm_eps };
    Ok(DeltaArgs {
        gate,
        q: tensor(&from.q, "args.q", idle)?,
        k: tensor(&from.k, "args.k", idle)?,
        v: tensor(&from.v, "args.v", idle)?,
        g: tensor(&from.g, "args.g", idle)?,
        beta: tensor(&from.beta, "args.beta", idle)?,
        a_log: optional_tensor(&from.A_log, "args.A_log")?,
        dt_bias: optional_tensor(&from.dt_bias, "args.dt_bias")?,
        scale: from.scale,
        l2norm: (!switch("args.no_l2norm", from.no_l2norm)?).then_some(eps),
        beta_sigmoid: !switch("args.beta_processed", from.beta_processed)?,
        out: tensor(&from.out, "args.out", idle)?,
    })
}

pub(super) fn conv1d(from: &replayssm_conv1d_args, batch: &Batch) -> Result<ConvArgs> {
    let idle = batch.is_empty();
    Ok(ConvArgs {
        x: tensor(&from.x, "args.x", idle)?,
        out: tensor(&from.out, "args.out", idle)?,
        weight: tensor(&from.weight, "args.weight", idle)?,
        bias: optional_tensor(&from.bias, "args.bias")?,
        silu: !switch("args.no_silu", from.no_silu)?,
    })
}

pub(super) fn commit(from: &replayssm_commit_args, batch: &Batch) -> Result<CommitArgs> {
    let stride = if from.counts_stride == 0 { 1 } else { from.counts_stride };
    let reach = stride.checked_abs().and_then(|s| s.checked_mul(batch.n_rows.max(1))).and_then(|s| s.checked_mul(4));
    if reach.is_none() {
        return Err(Error::invalid("commit_args.counts_stride", stride, "a stride whose reach fits an address space"));
    }
    Ok(CommitArgs {
        convention: match from.convention {
            0 => Convention::Accepted,
            1 => Convention::AcceptedDrafts,
            2 => Convention::Rejected,
            other => {
                return Err(Error::unsupported(
                    "commit_args.convention",
                    other,
                    "REPLAYSSM_COUNTS_ACCEPTED, REPLAYSSM_COUNTS_ACCEPTED_DRAFTS and REPLAYSSM_COUNTS_REJECTED",
                ));
            }
        },
        counts: optional_pointer(from.counts.cast(), "commit_args.counts", 4)?.map(address),
        stride,
    })
}

/// Names of a list and of its id arrays.
type ListNames = [&'static str; 5];
const LIST: ListNames = ["list", "list.slots", "list.rings", "list.pools", "list.pool_slots"];
const SRC: ListNames = ["src", "src.slots", "src.rings", "src.pools", "src.pool_slots"];
const DST: ListNames = ["dst", "dst.slots", "dst.rings", "dst.pools", "dst.pool_slots"];

fn place_of(from: &replayssm_list, name: &'static str) -> Result<(i64, Where)> {
    zero(Part(name, ".reserved"), from.reserved)?;
    zero(Part(name, ".pools_reserved"), from.pools_reserved)?;
    let place = match from.place {
        0 => Where::Device,
        1 => Where::Host,
        other => {
            return Err(Error::unsupported(
                Part(name, ".place"),
                other,
                "REPLAYSSM_WHERE_DEVICE and REPLAYSSM_WHERE_HOST",
            ));
        }
    };
    match i64::from(from.n) {
        n if n < 0 => Err(Error::invalid(Part(name, ".n"), n, "0 or more")),
        n => Ok((n, place)),
    }
}

/// The list of a call on one pool, or on none.
pub(super) fn list(from: &replayssm_list) -> Result<List> {
    let (n, place) = place_of(from, "list")?;
    if from.n_pools != 0 {
        return Err(Error::invalid("list.n_pools", from.n_pools, "0 in this call"));
    }
    let (slots, rings) = id_pair(&from.slots, &from.rings, ["list.slots", "list.rings"], n)?;
    Ok(List { n, place, slots, rings, which: Which::Both })
}

/// The list of a call on all pools of a slots handle.
///
/// # Safety
/// Its host arrays have `n_pools` elements.
pub(super) unsafe fn lists(from: &replayssm_list, slots: &Slots) -> Result<PoolLists> {
    // SAFETY: the caller promises as much.
    unsafe { named_list(from, slots, LIST, Which::Both) }
}

/// Source and target of a copy.
///
/// # Safety
/// As [`lists`], of both.
pub(super) unsafe fn copy_lists(
    src: &replayssm_list,
    dst: &replayssm_list,
    kind: CopyKind,
    slots: &Slots,
) -> Result<(PoolLists, PoolLists)> {
    let which = |slots_alone| if slots_alone { Which::Slots } else { Which::Both };
    // SAFETY: the caller promises as much.
    let from = unsafe { named_list(src, slots, SRC, which(kind.from_slot())) }?;
    // SAFETY: the caller promises as much.
    Ok((from, unsafe { named_list(dst, slots, DST, which(kind.to_slot())) }?))
}

/// # Safety
/// As [`lists`].
unsafe fn named_list(from: &replayssm_list, slots: &Slots, names: ListNames, which: Which) -> Result<PoolLists> {
    let [name, slots_name, rings_name, pools_name, ids_name] = names;
    let (n, place) = place_of(from, name)?;
    // SAFETY: the caller promises as much.
    let [named] = unsafe { named(from.n_pools, from.pools, [from.pool_slots], slots, [pools_name, ids_name], n) }?;
    let all_named = is_absent(&from.slots, slots_name)? && from.n_pools > 0;
    is_absent(&from.rings, rings_name)?;
    let none = Ids { data: address(0), stride: 0, index: IndexType::I32 };
    let (slots, rings, which) = match (all_named, which) {
        (true, Which::Slots) => (none, none, which),
        (true, _) => (none, ids(&from.rings, rings_name, n)?, Which::Rings),
        (false, Which::Slots) => (ids(&from.slots, slots_name, n)?, none, which),
        (false, _) => {
            let (slots, rings) = id_pair(&from.slots, &from.rings, [slots_name, rings_name], n)?;
            (slots, rings, which)
        }
    };
    Ok(PoolLists { list: List { n, place, slots, rings, which }, named, all_named })
}

/// Pools that have slot ids of their own, with `ARRAYS` of them each.
///
/// # Safety
/// The host arrays have `n_pools` elements.
unsafe fn named<const ARRAYS: usize>(
    n_pools: i32,
    pools: *const *const replayssm_layers,
    slot_ids: [*const replayssm_ids; ARRAYS],
    slots: &Slots,
    names: [&'static str; 2],
    n: i64,
) -> Result<[Named; ARRAYS]> {
    let [pools_name, ids_name] = names;
    let count = usize::try_from(n_pools)
        .ok()
        .filter(|&count| count <= MAX_NAMED)
        .ok_or_else(|| Error::invalid(format!("the number of {pools_name}"), n_pools, format!("0 to {MAX_NAMED}")))?;
    // SAFETY: the caller promises as much.
    let pools = unsafe { array(pools, count, pools_name) }?;
    let mut all = [Named::NONE; ARRAYS];
    for (named, slot_ids) in all.iter_mut().zip(slot_ids) {
        // SAFETY: the caller promises as much.
        let slot_ids = unsafe { array(slot_ids, count, ids_name) }?;
        for (i, (pool, of_pool)) in pools.iter().zip(slot_ids).enumerate() {
            let pool = pin::<Layers, _>(*pool, pools_name)?;
            pool.name_in(named, slots, pools_name, i, ids(of_pool, ids_name, n)?)?;
        }
    }
    Ok(all)
}

pub(super) fn flush(from: &replayssm_flush_args) -> Result<FlushArgs> {
    Ok(FlushArgs {
        later: switch("flush_args.later", from.later)?,
        position: optional_pointer(from.position.cast(), "flush_args.position", 8)?.map(address),
    })
}

pub(super) fn copy(from: &replayssm_copy_args) -> Result<CopyArgs> {
    Ok(CopyArgs {
        kind: match from.kind {
            0 => CopyKind::Fork,
            1 => CopyKind::Move,
            2 => CopyKind::Swap,
            3 => CopyKind::Store,
            4 => CopyKind::Load,
            5 => CopyKind::Stored,
            other => return Err(Error::unsupported("copy_args.kind", other, "REPLAYSSM_COPY_*")),
        },
        position: optional_pointer(from.position.cast(), "copy_args.position", 8)?.map(address),
        generation: optional_pointer(from.generation.cast(), "copy_args.generation", 4)?.map(address),
    })
}

/// # Safety
/// The host arrays have `n_pools` elements.
pub(super) unsafe fn snapshot(from: &replayssm_snapshot_args, batch: &Batch, slots: &Slots) -> Result<SnapshotArgs> {
    let n = batch.n_rows;
    let (arrays, names) = ([from.pool_src, from.pool_dst], ["snapshot_args.pools", "snapshot_args.pool_src or _dst"]);
    // SAFETY: the caller promises as much.
    let [pool_src, pool_dst] = unsafe { named(from.n_pools, from.pools, arrays, slots, names, n) }?;
    let at = match n {
        0 => optional_pointer(from.at.cast(), "snapshot_args.at", 8)?.unwrap_or(0),
        _ => required(from.at.cast(), "snapshot_args.at", 8)?,
    };
    let to = match is_absent(&from.dst, "snapshot_args.dst")? && from.n_pools > 0 {
        true => None,
        false => Some(ids(&from.dst, "snapshot_args.dst", n)?),
    };
    Ok(SnapshotArgs { at: address(at), to, pool_src, pool_dst })
}

pub(super) fn reset(from: &replayssm_reset_args) -> Result<ResetArgs> {
    zero("reset_args.reserved", from.reserved)?;
    Ok(ResetArgs {
        keep_checkpoint: switch("reset_args.keep_checkpoint", from.keep_checkpoint)?,
        convert: switch("reset_args.convert", from.convert)?,
        position: optional_pointer(from.position.cast(), "reset_args.position", 8)?.map(address),
        generation: optional_pointer(from.generation.cast(), "reset_args.generation", 4)?.map(address),
        seed: optional_pointer(from.seed.cast(), "reset_args.seed", 8)?.map(address),
    })
}

pub(super) fn state(from: &replayssm_state, n: i64) -> Result<StateTensor> {
    let dtype = Dtype::from_raw(from.dtype, "state.dtype")?;
    let data = match n {
        0 => optional_pointer(from.data, "state.data", dtype.size())?.unwrap_or(0),
        _ => required(from.data, "state.data", dtype.size())?,
    };
    Ok(StateTensor {
        data: address(data),
        dtype,
        transposed: match from.orientation {
            0 => false,
            1 => true,
            other => {
                return Err(Error::unsupported(
                    "state.orientation",
                    other,
                    "REPLAYSSM_STATE_ROW_MAJOR and REPLAYSSM_STATE_COL_MAJOR",
                ));
            }
        },
        layer: match from.layer {
            -1 => None,
            layer => Some(usize::try_from(layer).map_err(|_| Error::invalid("state.layer", layer, "-1 or a layer"))?),
        },
        entry: from.stride_entry,
        layer_stride: from.stride_layer,
        head: from.stride_head,
        row: from.stride_row,
    })
}

pub(super) fn pool(from: &replayssm_pool_desc, sections: &[i32]) -> Result<PoolFields> {
    zero("pool_desc.reserved", from.reserved)?;
    Ok(PoolFields {
        family: from.family,
        n_layers: from.n_layers,
        io: from.io,
        out: from.out,
        format: from.format,
        readout: from.readout,
        stochastic_rounding: from.stochastic_rounding,
        nheads: from.nheads,
        headdim: from.headdim,
        dstate: from.dstate,
        ngroups: from.ngroups,
        delta: [from.H, from.HV, from.K, from.V],
        delta_options: [from.head_map, from.u_dtype],
        channels: from.channels,
        width: from.width,
        sections: collected("the list of sections", sections.len(), sections.iter().copied())?,
    })
}

pub(super) fn lent(from: &replayssm_lent, layer_bases: Option<Vec<Address>>) -> Result<Lent> {
    let component = match from.kind {
        1 => Component::Checkpoint,
        2 => Component::Tags,
        3 => Component::X,
        4 => Component::B,
        5 => Component::Dt,
        6 => Component::K,
        7 => Component::KNorm,
        8 => Component::V,
        9 => Component::G,
        10 => Component::Beta,
        11 => Component::U,
        12 => Component::Conv,
        13 => Component::Window,
        14 => Component::WindowTags,
        other => return Err(Error::unsupported("lent.kind", other, "REPLAYSSM_COMPONENT_*")),
    };
    Ok(Lent {
        component,
        base: address(from.base as usize),
        layer_bases,
        offset: from.offset_bytes,
        layer_stride: from.layer_stride_bytes,
        slot_stride: from.slot_stride_bytes,
    })
}

pub(super) fn save_kind(from: i32) -> Result<Kind> {
    match from {
        REPLAYSSM_SAVE_LIVE => Ok(Kind::Live),
        REPLAYSSM_SAVE_PORTABLE => Ok(Kind::Portable),
        REPLAYSSM_SAVE_STORED => Ok(Kind::Stored),
        other => Err(Error::unsupported("kind", other, "REPLAYSSM_SAVE_LIVE, _PORTABLE and _STORED")),
    }
}

/// The one slot and ring that a list on the host names. `id` reads an element.
///
/// # Safety
/// As [`lists`].
pub(super) unsafe fn pair(from: &replayssm_list, slots: &Slots, kind: Kind, id: impl Fn(&Ids) -> i64) -> Result<Pair> {
    let which = if kind == Kind::Stored { Which::Slots } else { Which::Both };
    // SAFETY: the caller promises as much.
    let PoolLists { list, named, all_named } = unsafe { named_list(from, slots, LIST, which) }?;
    if list.place != Where::Host {
        return Err(Error::invalid("list.place", "REPLAYSSM_WHERE_DEVICE", "REPLAYSSM_WHERE_HOST"));
    }
    if list.n != 1 {
        return Err(Error::invalid("list.n", list.n, "1"));
    }
    Ok(Pair {
        slot: (!all_named).then(|| id(&list.slots)),
        ring: (kind != Kind::Stored).then(|| id(&list.rings)),
        named: named.iter().map(|(pool, ids)| (*pool, id(ids))).collect(),
    })
}

/// How a call that waits is to run: as a whole.
pub(super) fn whole(exec: Exec) -> Result<Exec> {
    if exec.n_parts != 1 {
        return Err(Error::invalid("exec.n_parts", exec.n_parts, "0 or 1 in a call that waits for its work"));
    }
    Ok(exec)
}

pub(super) fn question(from: &replayssm_plan_args, slots: &SlotsConfig) -> Result<Question> {
    zero("plan_args.reserved", from.reserved)?;
    let number = |field: &'static str, value: i32, most: i32, default: i32| match value {
        0 => Ok(default),
        1.. if value <= most => Ok(value),
        _ => Err(Error::invalid(field, value, format!("0 to {most}"))),
    };
    let t_max = slots.max_step_tokens;
    Ok(Question {
        batch: number("plan_args.batch", from.batch, MAX_COUNT, 1)?.into(),
        tokens: number("plan_args.tokens", from.tokens, t_max, t_max)?.into(),
        budget: (from.budget_bytes != 0).then_some(from.budget_bytes),
    })
}

pub(super) fn plan(from: &ModelPlan) -> replayssm_plan_info {
    replayssm_plan_info {
        struct_size: 0,
        recommended_window: from.recommended_window,
        checkpoint_bytes: from.checkpoint_bytes,
        ring_bytes: from.ring_bytes,
        fixed_bytes: from.fixed_bytes,
        total_bytes: from.total_bytes,
        slots_in_budget: from.slots_in_budget.unwrap_or(-1),
        state_per_draft_bytes: from.state_per_draft_bytes,
        slots_in_budget_state_per_draft: from.slots_in_budget_state_per_draft.unwrap_or(-1),
        step_bytes: from.step_bytes,
        plain_step_bytes: from.plain_step_bytes,
        flush_share: from.flush_share,
    }
}

/// A component of a pool that exists.
pub(super) fn component(layout: &ComponentLayout, view: &ComponentView) -> replayssm_component {
    replayssm_component {
        struct_size: 0,
        kind: layout.component as i32,
        per_ring: layout.per_ring.into(),
        reserved: 0,
        bytes: layout.bytes,
        base: view.base(0).0 as *mut c_void,
        slot_stride_bytes: view.stride(),
        layer_stride_bytes: view.layer_stride(),
        layer_bases: view.bases().cast(),
    }
}

/// A component as it will be where the library owns it.
pub(super) fn planned_component(layout: &ComponentLayout, slots: &SlotsConfig) -> replayssm_component {
    replayssm_component {
        struct_size: 0,
        kind: layout.component as i32,
        per_ring: layout.per_ring.into(),
        reserved: 0,
        bytes: layout.bytes,
        base: std::ptr::null_mut(),
        slot_stride_bytes: layout.stride as i64,
        layer_stride_bytes: layout.layer_stride(slots),
        layer_bases: std::ptr::null(),
    }
}

pub(super) fn report(from: &Report) -> replayssm_report {
    replayssm_report {
        struct_size: 0,
        bits: from.bits,
        count: from.count,
        first_slot: from.first_slot,
        first_row: from.first_row,
        first_pool: from.first_pool,
        first_layer: from.first_layer,
    }
}

pub(super) fn stats(from: &Stats) -> replayssm_stats {
    replayssm_stats {
        struct_size: 0,
        reserved: 0,
        steps: from.steps,
        rows: from.rows,
        tokens: from.tokens,
        accepted: from.accepted,
        flushes: from.flushes,
        checkpoint_bytes_read: from.checkpoint_bytes_read,
        checkpoint_bytes_written: from.checkpoint_bytes_written,
        ring_bytes_read: from.ring_bytes_read,
        ring_bytes_written: from.ring_bytes_written,
    }
}
