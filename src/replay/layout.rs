//! The one source of sizes and strides: where every byte of a slot and of a ring lies.
//!
//! A pool's memory consists of components. Each is an array over layers and over slots (or rings); the part of one layer
//! and one slot is contiguous and laid out as follows, `rows` being the rows of a ring:
//!
//! | component | per | contents of one part |
//! |---|---|---|
//! | `Checkpoint` | slot | `F32`, `BF16`, `F16`: `[H][D][N]`; `SPLIT32`: per head a bf16 plane `[D][N]`, then an int16 plane `[D][N]` |
//! | `Tags` | slot | int64 `[H][tiles]`: the position at which each 16-row tile stands |
//! | `X` | ring | Mamba-2: io `[H][rows][D]` |
//! | `B` | ring | Mamba-2: io `[G][rows][N]` |
//! | `Dt` | ring | Mamba-2: fp32 `[H][rows][2]`: dt and g = A dt, processed |
//! | `K` | ring | delta rules: io `[H][rows][K]`, raw |
//! | `KNorm` | ring | delta rules: fp32 `[H][rows]`: reciprocal norms of k |
//! | `V` | ring | delta rules: io `[HV][rows][V]` |
//! | `G` | ring | GDN: fp32 `[HV][rows]`, KDA: fp32 `[HV][rows][K]`: processed log decays |
//! | `Beta` | ring | delta rules: fp32 `[HV][rows]`, processed |
//! | `U` | ring | delta rules, not EXACT: bf16 or fp32 `[HV][rows][V]` |
//! | `Conv` | ring | io `[width - 1 + keep + T_max][channels]`: raw inputs |
//! | `Tags` | ring | of a convolution: int64 `[tiles]`: the lowest position whose window is still held, per 128 channels |
//! | `Window` | slot | of a convolution: io `[width - 1][channels]`: the window of a checkpoint without a ring, oldest first |
//! | `WindowTags` | slot | of a convolution: int64 `[tiles]`: the position of that window, per 128 channels; -1: there is none |
//!
//! For a delta rule, the state's H is HV, its D is V and its N is K.

use super::config::{Family, Format, PoolConfig, Readout, SlotsConfig, StateDims};
use super::launch::{Address, Site};
use super::position::Rule;
use crate::error::{Error, Result};

/// Alignment of each slot's part of a component, in bytes.
pub const ALIGNMENT: u64 = 128;

/// Bytes of a slots handle's counters in the backend's memory.
pub const COUNTER_BYTES: u64 = 256;
/// With checks on, at least so many bytes lie between neighbouring parts of owned memory, and hold [`GUARD`].
const GUARD_BYTES: u64 = 64;
/// What they hold.
pub const GUARD: u8 = 0xC5;

/// A component of a pool's memory. The numbers are those of the C interface.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(i32)]
pub enum Component {
    /// The states.
    Checkpoint = 1,
    /// Positions of checkpoint tiles, or of convolution windows.
    Tags = 2,
    /// Mamba-2 inputs x.
    X = 3,
    /// Mamba-2 inputs B.
    B = 4,
    /// Mamba-2 gates dt and A dt.
    Dt = 5,
    /// Keys as they came.
    K = 6,
    /// Reciprocal norms of keys.
    KNorm = 7,
    /// Values.
    V = 8,
    /// Log decays.
    G = 9,
    /// Update strengths.
    Beta = 10,
    /// What each token adds to the state along its key; for readouts alone.
    U = 11,
    /// Convolution inputs.
    Conv = 12,
    /// Windows of checkpoints without a ring.
    Window = 13,
    /// Their positions.
    WindowTags = 14,
}

/// Size and indexing of one component.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ComponentLayout {
    /// Which.
    pub component: Component,
    /// Indexed by ring instead of slot.
    pub per_ring: bool,
    /// Bytes of one layer's part of one slot or ring.
    pub bytes: u64,
    /// Distance of neighbouring slots (or rings) in owned memory.
    pub stride: u64,
}

/// The components of a pool, in a fixed order.
pub fn components(slots: &SlotsConfig, pool: &PoolConfig) -> Result<Vec<ComponentLayout>> {
    let rows = Rule::new(slots).rows() as u64;
    let io = pool.io.size() as u64;
    let mut list: Vec<(Component, bool, Option<u64>)> = Vec::new();
    if let Some(s) = pool.family.state() {
        let (heads, dim, columns) = (s.heads as u64, s.rows as u64, s.columns as u64);
        list.push((Component::Checkpoint, false, product(&[heads, dim, columns, pool.format.size() as u64])));
        list.push((Component::Tags, false, product(&[heads, s.tiles() as u64, 8])));
    }
    match &pool.family {
        Family::Mamba2(d) => {
            let (h, dim, n, g) = (d.nheads as u64, d.headdim as u64, d.dstate as u64, d.ngroups as u64);
            list.extend([
                (Component::X, true, product(&[h, rows, dim, io])),
                (Component::B, true, product(&[g, rows, n, io])),
                (Component::Dt, true, product(&[h, rows, 8])),
            ]);
        }
        Family::Delta(d) => {
            let (h, hv, k, v) = (d.qk_heads as u64, d.v_heads as u64, d.k as u64, d.v as u64);
            list.extend([
                (Component::K, true, product(&[h, rows, k, io])),
                (Component::KNorm, true, product(&[h, rows, 4])),
                (Component::V, true, product(&[hv, rows, v, io])),
                (Component::G, true, product(&[hv, rows, d.gates() as u64, 4])),
                (Component::Beta, true, product(&[hv, rows, 4])),
            ]);
            if pool.readout != Readout::Exact {
                list.push((Component::U, true, product(&[hv, rows, v, pool.u_dtype.size() as u64])));
            }
        }
        Family::Conv1d(c) => list.extend([
            (Component::Conv, true, product(&[conv_rows(slots, c.width) as u64, c.channels as u64, io])),
            (Component::Tags, true, product(&[c.tiles() as u64, 8])),
            (Component::Window, false, product(&[c.width as u64 - 1, c.channels as u64, io])),
            (Component::WindowTags, false, product(&[c.tiles() as u64, 8])),
        ]),
    }
    list.into_iter()
        .map(|(component, per_ring, bytes)| {
            let bytes = bytes.ok_or_else(|| too_large(component))?;
            let guard = if slots.checks { GUARD_BYTES } else { 0 };
            let stride = bytes.checked_add(guard).and_then(|bytes| bytes.checked_next_multiple_of(ALIGNMENT));
            let stride = stride.ok_or_else(|| too_large(component))?;
            Ok(ComponentLayout { component, per_ring, bytes, stride })
        })
        .collect()
}

impl ComponentLayout {
    /// Where owned memory that begins at an address has it.
    pub fn site(&self, slots: &SlotsConfig, pool: &PoolConfig, base: Address) -> Result<Site> {
        Site::strided(base, self.layer_stride(slots), pool.n_layers, self.stride as i64)
    }

    /// Bytes from layer to layer of owned memory.
    pub fn layer_stride(&self, slots: &SlotsConfig) -> i64 {
        self.stride as i64 * i64::from(if self.per_ring { slots.n_rings } else { slots.n_slots })
    }

    /// Bytes of the whole component in owned memory.
    pub fn total(&self, slots: &SlotsConfig, pool: &PoolConfig) -> Result<u64> {
        let n = if self.per_ring { slots.n_rings } else { slots.n_slots };
        product(&[self.stride, n as u64, pool.n_layers as u64])
            .filter(|&bytes| bytes <= isize::MAX as u64)
            .ok_or_else(|| too_large(self.component))
    }
}

fn product(factors: &[u64]) -> Option<u64> {
    factors.iter().try_fold(1u64, |a, &b| a.checked_mul(b))
}

fn too_large(component: Component) -> Error {
    Error::unsupported(
        format!("the size of component {component:?}"),
        "more than an address space",
        "components below 2^63 bytes",
    )
}

/// Blocks (heads, groups) and rows of a component per ring that consists of records, one of each block for each row. None for others.
pub fn records(component: Component, slots: &SlotsConfig, pool: &PoolConfig) -> Option<(usize, usize)> {
    let rows = Rule::new(slots).rows() as usize;
    match (&pool.family, component) {
        (Family::Mamba2(d), Component::X | Component::Dt) => Some((d.nheads, rows)),
        (Family::Mamba2(d), Component::B) => Some((d.ngroups, rows)),
        (Family::Delta(d), Component::K | Component::KNorm) => Some((d.qk_heads, rows)),
        (Family::Delta(d), Component::V | Component::G | Component::Beta | Component::U) => Some((d.v_heads, rows)),
        (Family::Conv1d(c), Component::Conv) => Some((1, conv_rows(slots, c.width))),
        _ => None,
    }
}

/// Rows of a convolution ring: `width - 1 + keep + T_max`.
pub fn conv_rows(slots: &SlotsConfig, width: usize) -> usize {
    width - 1 + slots.min_rewind as usize + slots.max_step_tokens as usize
}

/// Byte offsets inside one layer's part of a slot: the checkpoint and its tags.
#[derive(Debug, Clone, Copy)]
pub struct StateLayout {
    /// Dimensions.
    pub dims: StateDims,
    /// Checkpoint format.
    pub format: Format,
}

impl StateLayout {
    /// The layout of a pool's checkpoints; none for a convolution.
    pub fn of(pool: &PoolConfig) -> Option<Self> {
        Some(StateLayout { dims: pool.family.state()?, format: pool.format })
    }

    /// Number of an element within a layer's state.
    #[inline(always)]
    pub fn element(&self, head: usize, row: usize) -> usize {
        (head * self.dims.rows + row) * self.dims.columns
    }

    /// First byte of a state row where a row is contiguous (all formats but SPLIT32).
    #[inline(always)]
    pub fn row(&self, head: usize, row: usize) -> usize {
        self.element(head, row) * self.format.size()
    }

    /// First bytes of a state row's high plane and of its low plane in SPLIT32 format.
    #[inline(always)]
    pub fn planes(&self, head: usize, row: usize) -> (usize, usize) {
        let plane = self.dims.rows * self.dims.columns * 2;
        let high = head * 2 * plane + row * self.dims.columns * 2;
        (high, high + plane)
    }

    /// First byte of a head's state.
    pub fn head(&self, head: usize) -> usize {
        self.row(head, 0)
    }

    /// Bytes of a head's state.
    pub fn head_bytes(&self) -> usize {
        self.dims.rows * self.dims.columns * self.format.size()
    }

    /// First byte of a tile's tag.
    #[inline(always)]
    pub fn tag(&self, head: usize, tile: usize) -> usize {
        (head * self.dims.tiles() + tile) * 8
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::replay::config::{PoolConfig, PoolFields};

    #[test]
    fn sizes_of_a_real_layer() {
        // Nemotron-3-Super: 128 heads of 64 x 128, 8 groups, bf16, W 16, T_max 1.
        let slots = SlotsConfig::checked(4, 2, 16, 1, 0, 0).unwrap();
        let pool = PoolConfig::checked(&PoolFields {
            family: 1,
            n_layers: 3,
            io: 2,
            nheads: 128,
            headdim: 64,
            dstate: 128,
            ngroups: 8,
            ..Default::default()
        })
        .unwrap();
        let list = components(&slots, &pool).unwrap();
        let bytes: Vec<_> = list.iter().map(|c| (c.component, c.bytes)).collect();
        assert_eq!(
            bytes,
            [
                (Component::Checkpoint, 128 * 64 * 128 * 4),
                (Component::Tags, 128 * 4 * 8),
                (Component::X, 128 * 17 * 64 * 2),
                (Component::B, 8 * 17 * 128 * 2),
                (Component::Dt, 128 * 17 * 8),
            ]
        );
        assert_eq!(list[0].total(&slots, &pool).unwrap(), 128 * 64 * 128 * 4 * 4 * 3);
        assert_eq!(list[2].total(&slots, &pool).unwrap(), 128 * 17 * 64 * 2 * 2 * 3);
    }

    #[test]
    fn a_size_beyond_an_address_space_is_refused() {
        let slots = SlotsConfig::checked(i32::MAX, 4, 256, 256, 256, 0).unwrap();
        let pool = PoolConfig::checked(&PoolFields {
            family: 1,
            n_layers: 1 << 20,
            io: 1,
            nheads: 1 << 20,
            headdim: 256,
            dstate: 256,
            ngroups: 1 << 20,
            ..Default::default()
        })
        .unwrap();
        let first = components(&slots, &pool).unwrap()[0];
        assert!(first.total(&slots, &pool).is_err());
    }

    #[test]
    fn headdim_80_has_five_tiles_and_24_has_two() {
        let dims = |rows| StateDims { heads: 1, rows, columns: 1 };
        assert_eq!((dims(80).tiles(), dims(24).tiles(), dims(1).tiles()), (5, 2, 1));
    }
}
