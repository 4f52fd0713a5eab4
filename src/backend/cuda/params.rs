//! Parameters of launches, as `cuda/common/types.cuh` has them. `cuda/common/layout.inc` is made from here by a test, and checked by every
//! compilation of a kernel.

use crate::dtype::{Dtype, IndexType};
use crate::replay::config::{Format, PoolConfig, Readout, Schedule, TILE_ROWS};
use crate::replay::launch::{self, Address, PoolView, SlotsView};
use crate::replay::layout;

/// Sticky faults, in host memory that the device writes.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct Report {
    pub bits: u32,
    pub claimed: u32,
    pub count: u64,
    pub first_slot: i64,
    pub first_row: i64,
    pub first_pool: i32,
    pub first_layer: i32,
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
    pub reserved: i32,
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

/// Host bytes that may be copied to a kernel as its parameters.
pub trait Params: Copy + 'static {}
impl Params for Mamba2Params {}
impl Params for Stats {}

fn pointer(at: Option<Address>) -> u64 {
    at.map_or(0, |at| at.0 as u64)
}

fn dtype(dtype: Dtype) -> i32 {
    dtype as i32
}

impl From<&launch::Ids> for Ids {
    fn from(ids: &launch::Ids) -> Self {
        let index = match ids.index {
            IndexType::I32 => 16,
            IndexType::I64 => 17,
        };
        Ids { data: ids.data.0 as u64, stride: ids.stride, index, reserved: 0 }
    }
}

impl From<&launch::Tensor> for Tensor {
    fn from(t: &launch::Tensor) -> Self {
        Tensor { data: t.data.0 as u64, row: t.row, token: t.token, head: t.head, dtype: dtype(t.dtype), reserved: 0 }
    }
}

impl From<&Option<launch::Tensor>> for Tensor {
    fn from(t: &Option<launch::Tensor>) -> Self {
        t.as_ref().map_or_else(Tensor::default, Tensor::from)
    }
}

impl Component {
    /// A pool's component; nothing if the pool has none of the kind.
    pub fn of(pool: &PoolView, component: layout::Component) -> Self {
        pool.components.iter().find(|c| c.component == component).map_or_else(Component::default, |c| Component {
            base: c.base.0 as u64,
            layer_stride: c.layer_stride,
            stride: c.stride,
        })
    }
}

impl Slots {
    /// A slots handle whose counters are a [`super::Counters`].
    pub fn of(slots: &SlotsView, report: u64, stats: u64) -> Self {
        let c = &slots.config;
        let schedule = match c.schedule {
            Schedule::Staggered => 0,
            Schedule::ByPosition => 1,
            Schedule::None => 2,
        };
        Slots {
            cursors: slots.cursors.0 as u64,
            report,
            stats,
            n_slots: c.n_slots,
            n_rings: c.n_rings,
            window: c.window,
            keep: c.min_rewind,
            max_step_tokens: c.max_step_tokens,
            schedule,
        }
    }
}

impl From<&launch::Batch> for Batch {
    fn from(b: &launch::Batch) -> Self {
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
            reserved: 0,
        }
    }
}

/// Warps of a block at most, a tile each.
const MAX_WARPS: usize = 8;

impl State {
    /// A pool's states; none for a convolution.
    pub fn of(pool: &PoolView) -> Option<Self> {
        let config: &PoolConfig = &pool.config;
        let dims = config.family.state()?;
        let tiles = dims.rows.div_ceil(TILE_ROWS);
        let checkpoint = Component::of(pool, layout::Component::Checkpoint);
        // 16 bytes at a time: rows of whole chunks of eight elements, every one of them aligned.
        let bytes = (checkpoint.base as i64) | checkpoint.layer_stride | checkpoint.stride;
        let is_vector = dims.columns.is_multiple_of(8) && bytes % 16 == 0;
        let warps = tiles.min(MAX_WARPS);
        Some(State {
            checkpoint,
            tags: Component::of(pool, layout::Component::Tags),
            heads: dims.heads as i32,
            rows: dims.rows as i32,
            columns: dims.columns as i32,
            tiles: tiles as i32,
            format: match config.format {
                Format::Split32 => 1,
                Format::F32 => 2,
                Format::Bf16 => 3,
                Format::F16 => 4,
            },
            readout: match config.readout {
                Readout::High => 1,
                Readout::Full => 2,
                Readout::Exact => 3,
            },
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
        let shared = Shared { columns: (columns + 31) / 32 * 32 + 4, channels: warps * 16, ..Shared::default() };
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
    use crate::replay::launch::Cursor;
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

    /// `REPLAYSSM_WRITE_LAYOUT=1` renews the file.
    #[test]
    fn the_device_is_told_the_layout_of_parameters() {
        let mut text =
            "// Made by a test of src/backend/cuda/params.rs: sizes and offsets as the host has them.\n".to_owned();
        layout! { text:
            Cursor { position, flush_before, seed, generation, flags }
            Report { bits, claimed, count, first_slot, first_row, first_pool, first_layer }
            Stats {
                steps, rows, tokens, accepted, flushes, checkpoint_read, checkpoint_written, ring_read, ring_written,
            }
            Ids { data, stride, index }
            Tensor { data, row, token, head, dtype }
            Component { base, layer_stride, stride }
            Slots { cursors, report, stats, n_slots, n_rings, window, keep, max_step_tokens, schedule }
            Batch {
                n_rows, tokens, max_tokens, n_tokens, cu_seqlens, slots, rings, flush, generation, null_id, keep_tail,
                has_null_id, keep_null_outputs, extend,
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
        }
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/cuda/common/layout.inc");
        if std::env::var_os("REPLAYSSM_WRITE_LAYOUT").is_some() {
            std::fs::write(path, &text).unwrap();
        }
        assert!(std::fs::read_to_string(path).unwrap() == text, "run this test with REPLAYSSM_WRITE_LAYOUT=1");
    }
}
