//! Parameters of launches, as `cuda/common/types.cuh` has them. `cuda/common/layout.inc` is made from here by a test, and checked by every
//! compilation of a kernel.

use crate::backend::report::Report;
use crate::error::{Error, Result};
use crate::replay::config::{CONV_TILE, Family, PoolConfig, TILE_ROWS};
use crate::replay::launch::{self, Address, Gate, Mode, PoolView, SlotsView};
use crate::replay::layout;
use crate::replay::plan::MAX_WARPS;

/// Records that are in shared memory at a time.
pub const CHUNK: usize = 16;
/// Tokens whose readouts are computed at a time.
pub const TOKENS: usize = 8;
/// Bytes of a token's gates in shared memory.
pub const GATES_BYTES: usize = 16;

// What a call of a family is to do, and gates of a delta rule, by number.
pub const MODE_STEP: i32 = 0;
pub const MODE_EXTEND: i32 = 1;
pub const GATE_SOFTPLUS: i32 = 0;
pub const GATE_LOWER_BOUND: i32 = 1;
pub const GATE_LOG_DECAY: i32 = 2;

/// The number of a mode.
pub fn mode(mode: Mode) -> i32 {
    match mode {
        Mode::Step => MODE_STEP,
        Mode::Extend => MODE_EXTEND,
    }
}

/// The number of a gate, and its lower bound.
pub fn gate(gate: Gate) -> (i32, f32) {
    match gate {
        Gate::Softplus => (GATE_SOFTPLUS, 0.0),
        Gate::LowerBound(bound) => (GATE_LOWER_BOUND, bound),
        Gate::LogDecay => (GATE_LOG_DECAY, 0.0),
    }
}

/// Counters, in device memory.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Stats {
    pub steps: u64,
    pub rows: u64,
    pub tokens: u64,
    pub accepted: u64,
    pub flushes: u64,
    pub checkpoint_read: u64,
    pub checkpoint_written: u64,
    pub ring_read: u64,
    pub ring_written: u64,
}

/// Of a slots handle, in host memory: faults, and where its statistics are.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Counters {
    pub report: Report,
    pub stats: u64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Ids {
    pub data: u64,
    pub stride: i64,
    pub index: i32,
    pub reserved: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Tensor {
    pub data: u64,
    pub row: i64,
    pub token: i64,
    pub head: i64,
    pub dtype: i32,
    pub reserved: i32,
}

/// In place of a layer stride: the base is that of a table with the address of each layer.
pub const LAYER_TABLE: i64 = i64::MIN;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Component {
    pub base: u64,
    pub layer_stride: i64,
    pub stride: i64,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Slots {
    pub cursors: u64,
    pub report: u64,
    pub stats: u64,
    pub n_slots: i32,
    pub n_rings: i32,
    pub window: i32,
    pub keep: i32,
    pub max_step_tokens: i32,
    pub schedule: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Batch {
    pub n_rows: i64,
    pub tokens: i64,
    pub max_tokens: i64,
    pub n_tokens: i64,
    pub cu_seqlens: u64,
    pub slots: Ids,
    pub rings: Ids,
    pub flush: u64,
    pub generation: u64,
    pub null_id: i64,
    pub keep_tail: i64,
    pub has_null_id: i32,
    pub keep_null_outputs: i32,
    pub extend: i32,
    pub prefetch: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Place {
    pub pool: i32,
    pub layer: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct State {
    pub checkpoint: Component,
    pub tags: Component,
    pub heads: i32,
    pub rows: i32,
    pub columns: i32,
    pub tiles: i32,
    pub format: i32,
    pub readout: i32,
    pub stochastic: i32,
    pub warps: i32,
    pub parts: i32,
    pub is_vector: i32,
}

/// Offsets of arrays in shared memory, and lengths of their rows.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Shared {
    pub columns: i32,
    pub channels: i32,
    pub at: [i32; 14],
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Mamba2Params {
    pub slots: Slots,
    pub batch: Batch,
    pub place: Place,
    pub state: State,
    pub ring_x: Component,
    pub ring_b: Component,
    pub ring_dt: Component,
    pub x: Tensor,
    pub b: Tensor,
    pub c: Tensor,
    pub dt: Tensor,
    pub a: Tensor,
    pub dt_bias: Tensor,
    pub d_skip: Tensor,
    pub z: Tensor,
    pub out: Tensor,
    pub shared: Shared,
    pub io: i32,
    pub ring_rows: i32,
    pub heads_per_group: i32,
    pub d_per_element: i32,
    pub softplus: i32,
    pub mode: i32,
}

/// How steps of a few tokens share out shared memory and warps: see `cuda/common/types.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pipeline {
    pub n_items: i64,
    pub items_per_row: i32,
    pub heads_per_item: i32,
    pub planes: i32,
    pub stages: i32,
    pub keys: i32,
    pub producers: i32,
    pub consumers: i32,
    pub folders: i32,
    pub tokens: i32,
    pub history: i32,
    pub columns: i32,
    pub products: i32,
    pub value_stride: i32,
    pub plane_bytes: i32,
    pub plane_stride: i32,
    pub stage_bytes: i32,
    pub at_stages: i32,
    pub at_z: i32,
    pub at_gates: i32,
    pub at_weights: i32,
    pub at_keys: i32,
    pub key_bytes: i32,
    pub at_queries: i32,
    pub at_norms: i32,
    pub at_products: i32,
    pub at_own_gates: i32,
    pub at_sums: i32,
    pub sum_columns: i32,
    pub sums: i32,
    pub at_wide: i32,
    pub at_units: i32,
    pub parts: i32,
    pub channels: i32,
    pub tiles: i32,
}

/// Where each head has a block of its own in steps of a few tokens: see `cuda/common/types.cuh`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Direct {
    pub rows: i32,
    pub columns: i32,
    pub product_stride: i32,
    pub brings_all: i32,
    pub value_stride: i32,
    pub other_stride: i32,
    pub at_values: i32,
    pub at_queries: i32,
    pub at_others: i32,
    pub at_gates: i32,
    pub at_weights: i32,
    pub at_factors: i32,
    pub at_products: i32,
    pub at_brought: i32,
    pub at_sums: i32,
    pub at_norms: i32,
    pub at_own: i32,
    pub at_logs: i32,
    pub at_columns: i32,
    pub at_reached: i32,
    pub at_elapsed: i32,
}

/// Of steps of a few tokens, a block a head.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Mamba2DirectParams {
    pub family: Mamba2Params,
    pub direct: Direct,
}

/// Of steps of a few tokens.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Mamba2DecodeParams {
    pub family: Mamba2Params,
    pub pipeline: Pipeline,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct DeltaParams {
    pub slots: Slots,
    pub batch: Batch,
    pub place: Place,
    pub state: State,
    pub ring_k: Component,
    pub ring_norm: Component,
    pub ring_v: Component,
    pub ring_g: Component,
    pub ring_beta: Component,
    pub ring_u: Component,
    pub q: Tensor,
    pub k: Tensor,
    pub v: Tensor,
    pub g: Tensor,
    pub beta: Tensor,
    pub a_log: Tensor,
    pub dt_bias: Tensor,
    pub out: Tensor,
    pub shared: Shared,
    pub io: i32,
    pub u_dtype: i32,
    pub ring_rows: i32,
    pub qk_heads: i32,
    pub is_tiled: i32,
    pub gate: i32,
    pub has_norm: i32,
    pub beta_sigmoid: i32,
    pub mode: i32,
    pub scale: f32,
    pub eps: f32,
    pub lower_bound: f32,
}

/// Of steps of a few tokens.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct DeltaDecodeParams {
    pub family: DeltaParams,
    pub pipeline: Pipeline,
}

/// Of steps of a few tokens, a block a head.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct DeltaDirectParams {
    pub family: DeltaParams,
    pub direct: Direct,
}

/// A dense state outside the library.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct StateTensor {
    pub data: u64,
    pub entry: i64,
    pub layer_stride: i64,
    pub head: i64,
    pub row: i64,
    pub dtype: i32,
    pub is_transposed: i32,
    pub layer: i32,
    pub n_layers: i32,
}

/// The most entries of a list that travel in a launch.
pub const MAX_INLINE: usize = 64;

/// A list of slots and rings in device memory, or in the parameters themselves.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct List {
    pub n: i64,
    pub first: i64,
    pub slots: Ids,
    pub rings: Ids,
    pub position: u64,
    pub is_inline: i32,
    pub has_position: i32,
    pub which: i32,
    pub reserved: i32,
    pub inline_slots: [i32; MAX_INLINE],
    pub inline_rings: [i32; MAX_INLINE],
    pub inline_position: [i64; MAX_INLINE],
}

/// What becomes of states at held positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum FoldKind {
    Export = 0,
    Flush = 1,
    Store = 2,
}

/// Whose states, and where they go.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Fold {
    pub at: u64,
    pub slots: Ids,
    pub kind: i32,
    pub is_batch: i32,
    pub inline_slots: [i32; MAX_INLINE],
}

/// The windows of a convolution.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Windows {
    pub ring: Component,
    pub tags: Component,
    pub stored: Component,
    pub stored_tags: Component,
    pub channels: i32,
    pub width: i32,
    pub rows: i32,
    pub io: i32,
}

/// The most sections of a convolution's input.
pub const MAX_SECTIONS: usize = 16;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct ConvParams {
    pub slots: Slots,
    pub batch: Batch,
    pub place: Place,
    pub windows: Windows,
    pub x: Tensor,
    pub out: Tensor,
    pub weight: Tensor,
    pub bias: Tensor,
    pub section_starts: [i32; MAX_SECTIONS],
    pub n_sections: i32,
    pub silu: i32,
    pub mode: i32,
    pub reserved: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct CommitParams {
    pub slots: Slots,
    pub batch: Batch,
    pub counts: u64,
    pub stride: i64,
    pub convention: i32,
    pub reserved: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ResetParams {
    pub slots: Slots,
    pub list: List,
    pub state: State,
    pub windows: Windows,
    pub pool: i32,
    pub n_layers: i32,
    pub is_window: i32,
    pub keep_checkpoint: i32,
    pub convert: i32,
    pub shared_bytes: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CursorParams {
    pub slots: Slots,
    pub list: List,
    pub from: List,
    pub seed: u64,
    pub generation: u64,
    pub kind: i32,
    pub has_from: i32,
    pub has_seed: i32,
    pub has_generation: i32,
    pub inline_seed: [u64; MAX_INLINE],
    pub inline_generation: [u32; MAX_INLINE],
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ImportParams {
    pub slots: Slots,
    pub list: List,
    pub src: StateTensor,
    pub state: State,
    pub windows: Windows,
    pub pool: i32,
    pub is_window: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct WindowParams {
    pub slots: Slots,
    pub batch: Batch,
    pub list: List,
    pub dst: StateTensor,
    pub fold: Fold,
    pub windows: Windows,
    pub pool: i32,
    pub reserved: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Mamba2FoldParams {
    pub family: Mamba2Params,
    pub list: List,
    pub dst: StateTensor,
    pub fold: Fold,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct DeltaFoldParams {
    pub family: DeltaParams,
    pub list: List,
    pub dst: StateTensor,
    pub fold: Fold,
}

/// The most components of a pool.
pub const MAX_COMPONENTS: usize = 12;

/// Bytes of a chunk that a block copies.
pub const COPY_BYTES: i64 = 16384;

/// What sets cursors; copies are numbered from the last one on.
pub mod cursors {
    pub const RESET: i32 = 0;
    pub const IMPORT: i32 = 1;
    pub const FLUSH_LATER: i32 = 2;
    pub const COPY: i32 = 16;
}

/// A part of a pool's memory that is copied.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct CopiedComponent {
    pub at: Component,
    pub bytes: i64,
    pub first_chunk: i64,
    pub kind: i32,
    pub per_ring: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CopyParams {
    pub slots: Slots,
    pub from: List,
    pub to: List,
    pub windows: Windows,
    pub components: [CopiedComponent; MAX_COMPONENTS],
    pub n_chunks: i64,
    pub n_components: i32,
    pub n_layers: i32,
    pub kind: i32,
    pub pool: i32,
    pub is_window: i32,
    pub reserved: i32,
}

/// The most pools whose tags travel in a launch.
pub const MAX_POOLS: usize = 40;

/// The tags of a pool.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct PoolTags {
    pub tags: Component,
    pub slots: Ids,
    pub n_layers: i32,
    pub count: i32,
    pub per_ring: i32,
    pub group: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct RewindParams {
    pub slots: Slots,
    pub list: List,
    pub n: u64,
    pub done: u64,
    pub pools: [PoolTags; MAX_POOLS],
    pub n_pools: i32,
    pub reserved: i32,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ReadParams {
    pub slots: Slots,
    pub list: List,
    pub dst: u64,
}

/// An input that checks look at.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Input {
    pub tensor: Tensor,
    pub heads: i64,
    pub inner: i64,
    pub per_token: i32,
    pub reserved: i32,
}

/// A component of owned memory whose parts have guards behind them.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Guard {
    pub component: Component,
    pub bytes: i64,
    pub per_ring: i32,
    pub reserved: i32,
}

/// The most inputs of a call: a convolution's sections and two parameters.
pub const MAX_INPUTS: usize = MAX_SECTIONS + 2;

#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct InspectParams {
    pub slots: Slots,
    pub batch: Batch,
    pub place: Place,
    pub inputs: [Input; MAX_INPUTS],
    pub guards: [Guard; MAX_COMPONENTS],
    pub n_inputs: i32,
    pub n_guards: i32,
    pub n_layers: i32,
    pub writes_guards: i32,
}

/// Plain values, which may be copied to a kernel as its parameters, or from the device.
pub trait Params: Copy + 'static {}
macro_rules! params {
    ($($ty:ident),*) => { $(impl Params for $ty {})* };
}
params!(
    Stats,
    Mamba2Params,
    Mamba2DecodeParams,
    Mamba2DirectParams,
    DeltaParams,
    DeltaDecodeParams,
    DeltaDirectParams,
    ConvParams,
    CommitParams,
    ResetParams,
    CursorParams,
    ImportParams,
    WindowParams,
    Mamba2FoldParams,
    DeltaFoldParams,
    CopyParams,
    RewindParams,
    InspectParams,
    ReadParams
);

/// Puts items into an array of parameters; how many there were.
pub fn fill<T>(to: &mut [T], items: impl Iterator<Item = T>) -> Result<i32> {
    let mut n = 0;
    for item in items {
        let place = to.get_mut(n).ok_or_else(|| Error::Internal("more than a launch can take along".into()))?;
        *place = item;
        n += 1;
    }
    Ok(n as i32)
}

fn pointer(at: Option<Address>) -> u64 {
    at.map_or(0, |at| at.0 as u64)
}

impl From<&launch::Ids> for Ids {
    fn from(ids: &launch::Ids) -> Self {
        Ids { data: ids.data.0 as u64, stride: ids.stride, index: ids.index as i32, reserved: 0 }
    }
}

impl From<&launch::Tensor> for Tensor {
    fn from(t: &launch::Tensor) -> Self {
        Tensor { data: t.data.0 as u64, row: t.row, token: t.token, head: t.head, dtype: t.dtype as i32, reserved: 0 }
    }
}

impl From<&Option<launch::Tensor>> for Tensor {
    fn from(t: &Option<launch::Tensor>) -> Self {
        t.as_ref().map_or_else(Tensor::default, Tensor::from)
    }
}

impl Component {
    /// A pool's component, for a kernel that works on one layer, or (none) on all of them; nothing if the pool has none of the kind.
    pub fn of(pool: &PoolView, component: layout::Component, layer: Option<i64>) -> Self {
        pool.component(component).map_or_else(Component::default, |c| {
            let (base, layer_stride) = match (layer, c.table()) {
                (Some(layer), _) => (c.base(layer), 0),
                (None, Some(table)) => (table, LAYER_TABLE),
                (None, None) => (c.base(0), c.layer_stride()),
            };
            Component { base: base.0 as u64, layer_stride, stride: c.stride() }
        })
    }
}

impl Input {
    /// As checks have it.
    pub fn of(input: &launch::Input) -> Self {
        let tensor = Tensor::from(&input.tensor);
        Input { tensor, heads: input.heads, inner: input.inner, per_token: input.per_token.into(), reserved: 0 }
    }
}

impl Guard {
    /// Those of a pool.
    pub fn all(pool: &PoolView) -> impl Iterator<Item = Self> {
        pool.components.iter().filter(|c| c.guarded).map(|c| Guard {
            component: Component::of(pool, c.component, None),
            bytes: c.bytes,
            per_ring: c.per_ring.into(),
            reserved: 0,
        })
    }
}

impl Slots {
    /// A slots handle whose counters are [`Counters`].
    pub fn of(slots: &SlotsView) -> Self {
        let c = &slots.config;
        let counters = slots.counters.0 as *const Counters;
        // SAFETY: counters of this backend, alive as long as the slots handle; nothing writes the field.
        let stats = unsafe { (*counters).stats };
        Slots {
            cursors: slots.cursors.0 as u64,
            report: slots.counters.0 as u64,
            stats,
            n_slots: c.n_slots,
            n_rings: c.n_rings,
            window: c.window,
            keep: c.min_rewind,
            max_step_tokens: c.max_step_tokens,
            schedule: c.schedule as i32,
        }
    }
}

impl Batch {
    /// A call's batch.
    pub fn of(b: &launch::Batch, exec: &launch::Exec) -> Self {
        let (tokens, cu_seqlens) = match b.tokens {
            launch::Tokens::Dense(t) => (t, 0),
            launch::Tokens::Packed(cu) => (-1, cu.0 as u64),
        };
        Batch {
            n_rows: b.n_rows,
            tokens,
            max_tokens: b.max_tokens,
            n_tokens: b.n_tokens,
            cu_seqlens,
            slots: Ids::from(&b.slots),
            rings: Ids::from(&b.rings),
            flush: pointer(b.flush),
            generation: pointer(b.generation),
            null_id: b.null_id.unwrap_or(0),
            keep_tail: b.keep_tail,
            has_null_id: b.null_id.is_some().into(),
            keep_null_outputs: b.keep_null_outputs.into(),
            extend: b.extend.into(),
            prefetch: exec.prefetch.into(),
        }
    }
}

impl List {
    /// A list in device memory.
    pub fn device(list: &launch::List, position: Option<Address>) -> Self {
        List {
            n: list.n,
            slots: Ids::from(&list.slots),
            rings: Ids::from(&list.rings),
            position: pointer(position),
            has_position: position.is_some().into(),
            which: list.which as i32,
            ..List::EMPTY
        }
    }

    /// No entries.
    pub const EMPTY: Self = List {
        n: 0,
        first: 0,
        slots: Ids { data: 0, stride: 0, index: 0, reserved: 0 },
        rings: Ids { data: 0, stride: 0, index: 0, reserved: 0 },
        position: 0,
        is_inline: 0,
        has_position: 0,
        which: 0,
        reserved: 0,
        inline_slots: [0; MAX_INLINE],
        inline_rings: [0; MAX_INLINE],
        inline_position: [0; MAX_INLINE],
    };
}

impl Fold {
    /// Of a list's entries.
    pub const fn of_list(kind: FoldKind) -> Self {
        Fold { at: 0, slots: List::EMPTY.slots, kind: kind as i32, is_batch: 0, inline_slots: [0; MAX_INLINE] }
    }

    /// Of the rows of a batch that reach a position, to these slots.
    pub fn of_batch(at: Address, slots: &launch::Ids) -> Self {
        Fold { at: at.0 as u64, slots: Ids::from(slots), is_batch: 1, ..Fold::of_list(FoldKind::Store) }
    }
}

impl StateTensor {
    /// No buffer: all layers of a pool.
    pub fn layers(n_layers: usize) -> Self {
        StateTensor { layer: -1, n_layers: n_layers as i32, ..StateTensor::default() }
    }

    /// Of a pool with so many layers, from entry `first` on.
    pub fn of(t: &launch::StateTensor, n_layers: usize, first: i64) -> Self {
        StateTensor {
            data: t.data.offset(first * t.entry * t.dtype.size() as i64).0 as u64,
            entry: t.entry,
            layer_stride: t.layer_stride,
            head: t.head,
            row: t.row,
            dtype: t.dtype as i32,
            is_transposed: t.transposed.into(),
            layer: t.layer.map_or(-1, |layer| layer as i32),
            n_layers: t.layer.map_or(n_layers as i32, |_| 1),
        }
    }
}

impl Windows {
    /// A convolution's; none of another family.
    pub fn of(slots: &SlotsView, pool: &PoolView, layer: Option<i64>) -> Option<Self> {
        let Family::Conv1d(dims) = &pool.config.family else { return None };
        Some(Windows {
            ring: Component::of(pool, layout::Component::Conv, layer),
            tags: Component::of(pool, layout::Component::Tags, layer),
            stored: Component::of(pool, layout::Component::Window, layer),
            stored_tags: Component::of(pool, layout::Component::WindowTags, layer),
            channels: dims.channels as i32,
            width: dims.width as i32,
            rows: layout::conv_rows(&slots.config, dims.width) as i32,
            io: pool.config.io as i32,
        })
    }

    /// Groups of channels that have a tag each.
    pub fn tiles(&self) -> i64 {
        i64::from(self.channels).div_euclid(CONV_TILE as i64)
            + i64::from(i64::from(self.channels) % CONV_TILE as i64 != 0)
    }
}

impl State {
    /// A pool's states; none for a convolution.
    pub fn of(pool: &PoolView, layer: Option<i64>) -> Option<Self> {
        let config: &PoolConfig = &pool.config;
        let dims = config.family.state()?;
        let tiles = dims.rows.div_ceil(TILE_ROWS);
        let checkpoint = Component::of(pool, layout::Component::Checkpoint, layer);
        // 16 bytes at a time: rows of whole chunks of eight elements. Checkpoints are aligned, lent ones too.
        let is_vector = dims.columns.is_multiple_of(8);
        let warps = tiles.min(MAX_WARPS);
        Some(State {
            checkpoint,
            tags: Component::of(pool, layout::Component::Tags, layer),
            heads: dims.heads as i32,
            rows: dims.rows as i32,
            columns: dims.columns as i32,
            tiles: tiles as i32,
            format: config.format as i32,
            readout: config.readout as i32,
            stochastic: config.stochastic.into(),
            warps: warps as i32,
            parts: tiles.div_ceil(warps) as i32,
            is_vector: is_vector.into(),
        })
    }
}

/// Places arrays in shared memory, one behind the other.
#[derive(Default)]
pub struct Carve {
    pub shared: Shared,
    next: usize,
    bytes: usize,
}

impl Carve {
    /// Rows of `columns` columns, padded, and of `warps` tiles' channels.
    pub fn new(columns: i32, warps: i32) -> Self {
        // Four floats more: eight rows that a warp reads at once lie in different banks.
        let shared =
            Shared { columns: (columns + 31) / 32 * 32 + 4, channels: warps * TILE_ROWS as i32, ..Shared::default() };
        Carve { shared, ..Carve::default() }
    }

    /// The next array, of so many bytes.
    pub fn array(&mut self, bytes: usize) {
        if let Some(at) = self.shared.at.get_mut(self.next) {
            *at = self.bytes as i32;
        }
        self.next += 1;
        self.bytes += bytes.next_multiple_of(16);
    }

    /// The next array, in the place of another.
    pub fn same_as(&mut self, array: usize) {
        let place = self.shared.at.get(array).copied().unwrap_or(0);
        if let Some(at) = self.shared.at.get_mut(self.next) {
            *at = place;
        }
        self.next += 1;
    }

    /// The next array, of `rows` rows of columns.
    pub fn columns(&mut self, rows: usize) {
        self.array(rows * self.shared.columns as usize * 4);
    }

    /// The next array, of `rows` rows of channels.
    pub fn channels(&mut self, rows: usize) {
        self.array(rows * self.shared.channels as usize * 4);
    }

    /// Bytes of all arrays.
    pub fn bytes(&self) -> u32 {
        self.bytes as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cuda::instances::{COLUMNS, FORMATS};
    use crate::backend::report;
    use crate::dtype::{Dtype, IndexType};
    use crate::replay::config::{Format, MAX_DIM, MAX_WIDTH, Readout, Schedule};
    use crate::replay::lanes::BLOCK;
    use crate::replay::launch::{CopyKind, Cursor, Which, fault};
    use crate::replay::plan::MAX_PARALLEL;
    use crate::replay::position::{Convention, MAX_POSITION};
    use crate::replay::step::MAX_BLOCKS;
    use std::fmt::Write as _;
    use std::mem::offset_of;

    macro_rules! layout {
        ($text:ident: $($ty:ident { $($field:ident),* $(,)? })*) => {$(
            writeln!($text, "static_assert(sizeof({}) == {}, \"{0}\");", stringify!($ty), size_of::<$ty>()).unwrap();
            $(writeln!(
                $text,
                "static_assert(OFFSET_OF({}, {}) == {}, \"{0}.{1}\");",
                stringify!($ty), stringify!($field), offset_of!($ty, $field)
            ).unwrap();)*
        )*};
    }

    macro_rules! constants {
        ($text:ident: $($name:ident = $value:expr,)*) => {$(
            writeln!($text, "static_assert({} == {}, \"{0}\");", stringify!($name), $value).unwrap();
        )*};
    }

    /// `REPLAYSSM_WRITE_LAYOUT=1` renews the file.
    #[test]
    fn the_device_is_told_the_layout_of_parameters() {
        let mut text =
            "// Made by a test of src/backend/cuda/params.rs: numbers, sizes and offsets as the host has them.\n"
                .to_owned();
        constants! { text:
            F32 = Dtype::F32 as i32,
            BF16 = Dtype::Bf16 as i32,
            F16 = Dtype::F16 as i32,
            I32 = IndexType::I32 as i32,
            I64 = IndexType::I64 as i32,
            FORMAT_SPLIT32 = Format::Split32 as i32,
            FORMAT_F32 = Format::F32 as i32,
            FORMAT_BF16 = Format::Bf16 as i32,
            FORMAT_F16 = Format::F16 as i32,
            READOUT_HIGH = Readout::High as i32,
            READOUT_FULL = Readout::Full as i32,
            READOUT_EXACT = Readout::Exact as i32,
            SCHEDULE_STAGGERED = Schedule::Staggered as i32,
            SCHEDULE_BY_POSITION = Schedule::ByPosition as i32,
            COUNT_ACCEPTED = Convention::Accepted as i32,
            COUNT_ACCEPTED_DRAFTS = Convention::AcceptedDrafts as i32,
            COUNT_REJECTED = Convention::Rejected as i32,
            FAULT_ID = fault::ID,
            FAULT_COUNT = fault::COUNT,
            FAULT_LENGTH = fault::LENGTH,
            FAULT_POSITION = fault::POSITION,
            FAULT_DUPLICATE = fault::DUPLICATE,
            FAULT_CANARY = fault::CANARY,
            FAULT_NOT_FINITE = fault::NOT_FINITE,
            FAULT_REWIND = fault::REWIND,
            PLACE_NONE = report::PLACE_NONE,
            PLACE_CLAIMED = report::PLACE_CLAIMED,
            PLACE_WRITTEN = report::PLACE_WRITTEN,
            MODE_STEP = MODE_STEP,
            MODE_EXTEND = MODE_EXTEND,
            GATE_SOFTPLUS = GATE_SOFTPLUS,
            GATE_LOWER_BOUND = GATE_LOWER_BOUND,
            GATE_LOG_DECAY = GATE_LOG_DECAY,
            MAX_POSITION = MAX_POSITION,
            // C++ has no number for the least one.
            LAYER_TABLE = format!("{} - 1", LAYER_TABLE + 1),
            GUARD_BYTE = layout::GUARD,
            MAX_DIM = MAX_DIM,
            MAX_WIDTH = MAX_WIDTH,
            TILE = TILE_ROWS,
            BLOCK = BLOCK,
            MAX_BLOCKS = MAX_BLOCKS,
            CONV_TILE = CONV_TILE,
            CHUNK = CHUNK,
            TOKENS = TOKENS,
            MAX_PARALLEL = MAX_PARALLEL,
            MAX_WARPS = MAX_WARPS,
            GATES_BYTES = GATES_BYTES,
            MAX_INLINE = MAX_INLINE,
            MAX_SECTIONS = MAX_SECTIONS,
            MAX_POOLS = MAX_POOLS,
            MAX_INPUTS = MAX_INPUTS,
            IDS_BOTH = Which::Both as i32,
            IDS_SLOTS = Which::Slots as i32,
            IDS_RINGS = Which::Rings as i32,
            FOLD_EXPORT = FoldKind::Export as i32,
            FOLD_FLUSH = FoldKind::Flush as i32,
            FOLD_STORE = FoldKind::Store as i32,
            COPY_FORK = CopyKind::Fork as i32,
            COPY_MOVE = CopyKind::Move as i32,
            COPY_SWAP = CopyKind::Swap as i32,
            COPY_STORE = CopyKind::Store as i32,
            COPY_LOAD = CopyKind::Load as i32,
            COPY_STORED = CopyKind::Stored as i32,
            CURSORS_RESET = cursors::RESET,
            CURSORS_IMPORT = cursors::IMPORT,
            CURSORS_FLUSH_LATER = cursors::FLUSH_LATER,
            CURSORS_COPY = cursors::COPY,
            COMPONENT_TAGS = layout::Component::Tags as i32,
            COMPONENT_WINDOW_TAGS = layout::Component::WindowTags as i32,
            MAX_COMPONENTS = MAX_COMPONENTS,
            COPY_BYTES = COPY_BYTES,
        }
        layout! { text:
            Cursor { position, flush_before, seed, generation, committed }
            Report { bits, place, count, first_slot, first_row, first_pool, first_layer, clears }
            Stats {
                steps, rows, tokens, accepted, flushes, checkpoint_read, checkpoint_written, ring_read, ring_written,
            }
            Ids { data, stride, index }
            Tensor { data, row, token, head, dtype }
            Component { base, layer_stride, stride }
            Slots { cursors, report, stats, n_slots, n_rings, window, keep, max_step_tokens, schedule }
            Batch {
                n_rows, tokens, max_tokens, n_tokens, cu_seqlens, slots, rings, flush, generation, null_id, keep_tail,
                has_null_id, keep_null_outputs, extend, prefetch,
            }
            Place { pool, layer }
            State {
                checkpoint, tags, heads, rows, columns, tiles, format, readout, stochastic, warps, parts, is_vector,
            }
            Shared { columns, channels, at }
            Mamba2Params {
                slots, batch, place, state, ring_x, ring_b, ring_dt, x, b, c, dt, a, dt_bias, d_skip, z, out, shared, io,
                ring_rows, heads_per_group, d_per_element, softplus, mode,
            }
            Pipeline {
                n_items, items_per_row, heads_per_item, planes, stages, keys, producers, consumers, folders, tokens, history, columns, products, value_stride,
                plane_bytes, plane_stride, stage_bytes, at_stages, at_z, at_gates, at_weights, at_keys, key_bytes,
                at_queries, at_norms, at_products, at_own_gates, at_sums, sum_columns, sums, at_wide, at_units, parts, channels, tiles,
            }
            Mamba2DecodeParams { family, pipeline }
            Direct {
                rows, columns, product_stride, brings_all, value_stride, other_stride, at_values, at_queries, at_others, at_gates, at_weights,
                at_factors, at_products, at_brought, at_sums, at_norms, at_own, at_logs, at_columns, at_reached, at_elapsed,
            }
            Mamba2DirectParams { family, direct }
            DeltaParams {
                slots, batch, place, state, ring_k, ring_norm, ring_v, ring_g, ring_beta, ring_u, q, k, v, g, beta, a_log,
                dt_bias, out, shared, io, u_dtype, ring_rows, qk_heads, is_tiled, gate, has_norm, beta_sigmoid, mode,
                scale, eps, lower_bound,
            }
            DeltaDecodeParams { family, pipeline }
            DeltaDirectParams { family, direct }
            StateTensor { data, entry, layer_stride, head, row, dtype, is_transposed, layer, n_layers }
            List {
                n, first, slots, rings, position, is_inline, has_position, which, inline_slots, inline_rings,
                inline_position,
            }
            Fold { at, slots, kind, is_batch, inline_slots }
            Windows { ring, tags, stored, stored_tags, channels, width, rows, io }
            ConvParams {
                slots, batch, place, windows, x, out, weight, bias, section_starts, n_sections, silu, mode,
            }
            CommitParams { slots, batch, counts, stride, convention }
            ResetParams {
                slots, list, state, windows, pool, n_layers, is_window, keep_checkpoint, convert, shared_bytes,
            }
            CursorParams {
                slots, list, from, seed, generation, kind, has_from, has_seed, has_generation, inline_seed, inline_generation,
            }
            ImportParams { slots, list, src, state, windows, pool, is_window }
            WindowParams { slots, batch, list, dst, fold, windows, pool }
            Mamba2FoldParams { family, list, dst, fold }
            DeltaFoldParams { family, list, dst, fold }
            CopiedComponent { at, bytes, first_chunk, kind, per_ring }
            CopyParams {
                slots, from, to, windows, components, n_chunks, n_components, n_layers, kind, pool, is_window,
            }
            PoolTags { tags, slots, n_layers, count, per_ring, group }
            RewindParams { slots, list, n, done, pools, n_pools }
            Input { tensor, heads, inner, per_token }
            Guard { component, bytes, per_ring }
            InspectParams { slots, batch, place, inputs, guards, n_inputs, n_guards, n_layers, writes_guards }
            ReadParams { slots, list, dst }
        }
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/cuda/common/layout.inc");
        if std::env::var_os("REPLAYSSM_WRITE_LAYOUT").is_some() {
            std::fs::write(path, &text).unwrap();
        }
        assert!(std::fs::read_to_string(path).unwrap() == text, "run this test with REPLAYSSM_WRITE_LAYOUT=1");
    }

    /// The list of kernels is shared with the build, which has none of these.
    #[test]
    fn the_list_of_kernels_has_all_formats_and_columns() {
        let formats = [Format::Split32, Format::F32, Format::Bf16, Format::F16];
        assert_eq!(FORMATS.map(|(number, _)| number), formats.map(|format| format as u8));
        assert_eq!(COLUMNS[1], MAX_DIM as u16);
    }
}
