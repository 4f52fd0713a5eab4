//! What a slots handle and a pool are, checked once at create time.

use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::memory::collected;

/// Largest window, step and rewind that a slots handle takes.
pub const MAX_WINDOW: i32 = 256;
/// Largest number of tokens of one step.
pub const MAX_STEP_TOKENS: i32 = 256;
/// Largest number of committed tokens that can be kept back from folding.
pub const MAX_MIN_REWIND: i32 = 256;
/// Largest headdim and dstate.
pub const MAX_DIM: i32 = 256;
/// Largest number of heads, layers, channels and rings.
pub const MAX_COUNT: i32 = 1 << 20;
/// Rows of a checkpoint tile: the unit that has a tag of its own.
pub const TILE_ROWS: usize = 16;
/// Channels of a convolution that share a tag.
pub const CONV_TILE: usize = 128;
/// Longest window of a convolution, with the token itself.
pub const MAX_WIDTH: i32 = 4;

/// When checkpoints are folded before the window forces it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Schedule {
    /// First folds are spread over a window by ring id, so that rows which start together do not all fold in one step.
    Staggered = 0,
    /// Folds end at multiples of `W - T_max + 1`: a request folds at the same tokens whatever else runs.
    ByPosition = 1,
    /// Only when the window is full.
    None = 2,
}

/// Sizes and rules of a slots handle.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotsConfig {
    /// Checkpoints.
    pub n_slots: i32,
    /// Rings: requests that can run at once.
    pub n_rings: i32,
    /// W.
    pub window: i32,
    /// T_max.
    pub max_step_tokens: i32,
    /// Committed tokens that a rewind may always take back.
    pub min_rewind: i32,
    /// Fold schedule.
    pub schedule: Schedule,
    /// Whether calls look for misuse, and memory has guards.
    pub checks: bool,
}

fn range(field: &'static str, value: i32, low: i32, high: i32) -> Result<i32> {
    if (low..=high).contains(&value) {
        Ok(value)
    } else if value < low {
        Err(Error::invalid(field, value, format!("{low} to {high}")))
    } else {
        Err(Error::unsupported(field, value, format!("{low} to {high}")))
    }
}

impl SlotsConfig {
    /// Fills in defaults (zero in a field) and checks every field.
    pub fn checked(
        n_slots: i32,
        n_rings: i32,
        window: i32,
        max_step_tokens: i32,
        min_rewind: i32,
        schedule: i32,
    ) -> Result<Self> {
        range("slots_desc.n_slots", n_slots, 1, i32::MAX)?;
        let n_rings = if n_rings == 0 { n_slots } else { n_rings };
        // Positions are written at create: a wild number must not touch gigabytes.
        range("slots_desc.n_rings", n_rings, 1, MAX_COUNT)?;
        let max_step_tokens = match max_step_tokens {
            0 => 1,
            t => range("slots_desc.max_step_tokens", t, 1, MAX_STEP_TOKENS)?,
        };
        let window = match window {
            0 => (8 * max_step_tokens).clamp(16, MAX_WINDOW),
            w => range("slots_desc.window", w, 1, MAX_WINDOW)?,
        };
        if window < max_step_tokens {
            return Err(Error::invalid(
                "slots_desc.window",
                window,
                format!("at least max_step_tokens, which is {max_step_tokens}"),
            ));
        }
        let min_rewind = range("slots_desc.min_rewind", min_rewind, 0, MAX_MIN_REWIND)?;
        let schedule = match schedule {
            0 => Schedule::Staggered,
            1 => Schedule::ByPosition,
            2 => Schedule::None,
            other => {
                return Err(Error::unsupported(
                    "slots_desc.schedule",
                    other,
                    "REPLAYSSM_SCHEDULE_STAGGERED, _BY_POSITION and _NONE",
                ));
            }
        };
        Ok(SlotsConfig { n_slots, n_rings, window, max_step_tokens, min_rewind, schedule, checks: false })
    }
}

/// How a state lies in its checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Format {
    /// A fp32 state as a bf16 plane and a plane of 16-bit corrections.
    Split32 = 1,
    /// A fp32 state.
    F32 = 2,
    /// A bf16 state: rounded whenever it is stored.
    Bf16 = 3,
    /// A binary16 state: rounded whenever it is stored.
    F16 = 4,
}

impl Format {
    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            Format::Split32 | Format::F32 => 4,
            Format::Bf16 | Format::F16 => 2,
        }
    }

    /// Whether a store keeps every bit of a fp32 state.
    pub const fn is_lossless(self) -> bool {
        matches!(self, Format::Split32 | Format::F32)
    }
}

/// How a step computes its outputs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Readout {
    /// Parallel form from the high plane.
    High = 1,
    /// Parallel form from the whole checkpoint.
    Full = 2,
    /// The plain update's own arithmetic and bytes.
    Exact = 3,
}

/// Dimensions of a Mamba-2 layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mamba2Dims {
    /// H.
    pub nheads: usize,
    /// D, rows of a head's state.
    pub headdim: usize,
    /// N, columns of a head's state.
    pub dstate: usize,
    /// G; heads of one group share B and C.
    pub ngroups: usize,
}

impl Mamba2Dims {
    /// Heads that share one group's B and C.
    pub fn heads_per_group(&self) -> usize {
        self.nheads / self.ngroups
    }
}

/// The two delta rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DeltaKind {
    /// Gated DeltaNet: one log decay per head.
    Gdn,
    /// Kimi Delta Attention: one log decay per head and key channel.
    Kda,
}

/// Which query and key head a value head uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum HeadMap {
    /// hv / (HV / H): neighbours share.
    Grouped = 0,
    /// hv % H.
    Tiled = 1,
}

/// Dimensions of a delta-rule layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeltaDims {
    /// Which rule.
    pub kind: DeltaKind,
    /// H, query and key heads.
    pub qk_heads: usize,
    /// HV, value heads: the heads of the state.
    pub v_heads: usize,
    /// K, columns of a head's state.
    pub k: usize,
    /// V, rows of a head's state.
    pub v: usize,
    /// Which query and key head a value head uses.
    pub head_map: HeadMap,
}

impl DeltaDims {
    /// The query and key head of a value head.
    #[inline(always)]
    pub fn qk_head(&self, v_head: usize) -> usize {
        match self.head_map {
            HeadMap::Grouped => v_head / (self.v_heads / self.qk_heads),
            HeadMap::Tiled => v_head % self.qk_heads,
        }
    }

    /// Whether this value head is the first of those that share its query and key head.
    #[inline(always)]
    pub fn leads(&self, v_head: usize) -> bool {
        match self.head_map {
            HeadMap::Grouped => v_head.is_multiple_of(self.v_heads / self.qk_heads),
            HeadMap::Tiled => v_head < self.qk_heads,
        }
    }

    /// Log decays of a token and head.
    pub fn gates(&self) -> usize {
        match self.kind {
            DeltaKind::Gdn => 1,
            DeltaKind::Kda => self.k,
        }
    }
}

/// Dimensions of a depthwise causal convolution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConvDims {
    /// All channels.
    pub channels: usize,
    /// Taps, 2 to 4.
    pub width: usize,
    /// First channel of each section, and the number of channels at the end.
    pub section_starts: Vec<usize>,
}

impl ConvDims {
    /// Groups of channels that share a tag.
    pub fn tiles(&self) -> usize {
        self.channels.div_ceil(CONV_TILE)
    }
}

/// The family of a pool with its dimensions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Family {
    /// Mamba-2 (state-space duality), and linear attention with a fixed decay.
    Mamba2(Mamba2Dims),
    /// Gated DeltaNet or Kimi Delta Attention.
    Delta(DeltaDims),
    /// The short convolution in front of a layer.
    Conv1d(ConvDims),
}

/// A pool: equal layers of one family.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PoolConfig {
    /// Family and dimensions.
    pub family: Family,
    /// Layers.
    pub n_layers: usize,
    /// Activation dtype.
    pub io: Dtype,
    /// Output dtype.
    pub out: Dtype,
    /// Checkpoint format; for a convolution, windows are kept as they came.
    pub format: Format,
    /// Readout; for a convolution there is but one.
    pub readout: Readout,
    /// Whether 16-bit states are rounded stochastically.
    pub stochastic: bool,
    /// Dtype of the u records of a delta rule.
    pub u_dtype: Dtype,
}

/// The fields of a pool description that have a meaning today, as they crossed the C boundary.
#[derive(Debug, Clone, Default)]
pub struct PoolFields {
    /// REPLAYSSM_FAMILY_MAMBA2, ...
    pub family: i32,
    /// Layers.
    pub n_layers: i32,
    /// Activation dtype.
    pub io: i32,
    /// Output dtype, 0 = io.
    pub out: i32,
    /// Checkpoint format, 0 = default.
    pub format: i32,
    /// Readout, 0 = default.
    pub readout: i32,
    /// Stochastic rounding of 16-bit formats.
    pub stochastic_rounding: i32,
    /// Mamba-2: H, D, N, G.
    pub nheads: i32,
    /// Mamba-2 D.
    pub headdim: i32,
    /// Mamba-2 N.
    pub dstate: i32,
    /// Mamba-2 G.
    pub ngroups: i32,
    /// Gated DeltaNet and Kimi Delta Attention: H, HV, K, V.
    pub delta: [i32; 4],
    /// Their head map and readout dtype.
    pub delta_options: [i32; 2],
    /// Convolution channels.
    pub channels: i32,
    /// Convolution taps.
    pub width: i32,
    /// Convolution section widths; empty = one section.
    pub sections: Vec<i32>,
}

fn unused(family: &str, fields: &[(&'static str, i32)]) -> Result<()> {
    match fields.iter().find(|(_, value)| *value != 0) {
        None => Ok(()),
        Some((field, value)) => {
            Err(Error::invalid(*field, value, format!("0, because a {family} pool does not use it")))
        }
    }
}

impl PoolFields {
    /// Format, readout and stochastic rounding, which mean the same in every family with a state.
    fn format_and_readout(&self, io: Dtype) -> Result<(Format, Readout, bool)> {
        let format = match self.format {
            0 | 1 => Format::Split32,
            2 => Format::F32,
            3 => Format::Bf16,
            4 => Format::F16,
            other => {
                return Err(Error::unsupported(
                    "pool_desc.format",
                    other,
                    "REPLAYSSM_FORMAT_SPLIT32, _F32, _BF16 and _F16",
                ));
            }
        };
        let readout = match (self.readout, format) {
            (0, Format::Bf16) => Readout::High,
            (0, Format::Split32) if io == Dtype::Bf16 => Readout::High,
            (0, _) => Readout::Full,
            (1, Format::Split32 | Format::Bf16) => Readout::High,
            (1, Format::F32 | Format::F16) => {
                return Err(Error::invalid(
                    "pool_desc.readout",
                    "REPLAYSSM_READOUT_HIGH",
                    "FULL or EXACT, because the format has no bf16 plane",
                ));
            }
            (2, _) => Readout::Full,
            (3, _) => Readout::Exact,
            (other, _) => {
                return Err(Error::unsupported("pool_desc.readout", other, "REPLAYSSM_READOUT_HIGH, _FULL and _EXACT"));
            }
        };
        let stochastic = match (self.stochastic_rounding, format) {
            (0, _) => false,
            (1, Format::Bf16 | Format::F16) => true,
            (1, _) => {
                return Err(Error::invalid(
                    "pool_desc.stochastic_rounding",
                    1,
                    "0 with the formats SPLIT32 and F32, which round nothing",
                ));
            }
            (other, _) => return Err(Error::unsupported("pool_desc.stochastic_rounding", other, "0 and 1")),
        };
        Ok((format, readout, stochastic))
    }
}

/// Heads, rows and columns of a family's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateDims {
    /// H or HV.
    pub heads: usize,
    /// D or V.
    pub rows: usize,
    /// N or K.
    pub columns: usize,
}

impl StateDims {
    /// Checkpoint tiles of a head.
    pub fn tiles(&self) -> usize {
        self.rows.div_ceil(TILE_ROWS)
    }
}

impl Family {
    /// The matrix-valued state; none for a convolution.
    pub fn state(&self) -> Option<StateDims> {
        match self {
            Family::Mamba2(d) => Some(StateDims { heads: d.nheads, rows: d.headdim, columns: d.dstate }),
            Family::Delta(d) => Some(StateDims { heads: d.v_heads, rows: d.v, columns: d.k }),
            Family::Conv1d(_) => None,
        }
    }
}

impl PoolConfig {
    /// Fills in defaults (zero in a field) and checks every field, those of other families included.
    pub fn checked(f: &PoolFields) -> Result<Self> {
        let mamba2_fields = [
            ("pool_desc.nheads", f.nheads),
            ("pool_desc.headdim", f.headdim),
            ("pool_desc.dstate", f.dstate),
            ("pool_desc.ngroups", f.ngroups),
        ];
        let delta_fields = [
            ("pool_desc.H", f.delta[0]),
            ("pool_desc.HV", f.delta[1]),
            ("pool_desc.K", f.delta[2]),
            ("pool_desc.V", f.delta[3]),
            ("pool_desc.head_map", f.delta_options[0]),
            ("pool_desc.u_dtype", f.delta_options[1]),
        ];
        let conv_fields = [
            ("pool_desc.channels", f.channels),
            ("pool_desc.width", f.width),
            ("pool_desc.n_sections", f.sections.len() as i32),
        ];
        let io = Dtype::from_raw(f.io, "pool_desc.io")?;
        let out = match f.out {
            0 => io,
            raw => Dtype::from_raw(raw, "pool_desc.out")?,
        };
        let n_layers = range("pool_desc.n_layers", f.n_layers, 1, MAX_COUNT)? as usize;
        match f.family {
            1 => {
                unused("Mamba-2", &delta_fields)?;
                unused("Mamba-2", &conv_fields)?;
                let dims = Mamba2Dims {
                    nheads: range("pool_desc.nheads", f.nheads, 1, MAX_COUNT)? as usize,
                    headdim: range("pool_desc.headdim", f.headdim, 1, MAX_DIM)? as usize,
                    dstate: range("pool_desc.dstate", f.dstate, 1, MAX_DIM)? as usize,
                    ngroups: range("pool_desc.ngroups", f.ngroups, 1, MAX_COUNT)? as usize,
                };
                if !dims.nheads.is_multiple_of(dims.ngroups) {
                    return Err(Error::invalid(
                        "pool_desc.ngroups",
                        dims.ngroups,
                        format!("a divisor of nheads, which is {}", dims.nheads),
                    ));
                }
                let (format, readout, stochastic) = f.format_and_readout(io)?;
                Ok(PoolConfig {
                    family: Family::Mamba2(dims),
                    n_layers,
                    io,
                    out,
                    format,
                    readout,
                    stochastic,
                    u_dtype: io,
                })
            }
            kind @ (2 | 3) => {
                unused("delta-rule", &mamba2_fields)?;
                unused("delta-rule", &conv_fields)?;
                let [h, hv, k, v] = f.delta;
                let dims = DeltaDims {
                    kind: if kind == 2 { DeltaKind::Gdn } else { DeltaKind::Kda },
                    qk_heads: range("pool_desc.H", h, 1, MAX_COUNT)? as usize,
                    v_heads: range("pool_desc.HV", hv, 1, MAX_COUNT)? as usize,
                    k: range("pool_desc.K", k, 1, MAX_DIM)? as usize,
                    v: range("pool_desc.V", v, 1, MAX_DIM)? as usize,
                    head_map: match f.delta_options[0] {
                        0 => HeadMap::Grouped,
                        1 => HeadMap::Tiled,
                        other => {
                            return Err(Error::unsupported(
                                "pool_desc.head_map",
                                other,
                                "REPLAYSSM_HEAD_MAP_GROUPED and REPLAYSSM_HEAD_MAP_TILED",
                            ));
                        }
                    },
                };
                if !dims.v_heads.is_multiple_of(dims.qk_heads) {
                    return Err(Error::invalid("pool_desc.HV", hv, format!("a multiple of H, which is {h}")));
                }
                let (format, readout, stochastic) = f.format_and_readout(io)?;
                let u_dtype = match f.delta_options[1] {
                    0 if readout == Readout::High && io == Dtype::Bf16 => Dtype::Bf16,
                    0 => Dtype::F32,
                    raw => match Dtype::from_raw(raw, "pool_desc.u_dtype")? {
                        Dtype::F16 => {
                            return Err(Error::unsupported(
                                "pool_desc.u_dtype",
                                raw,
                                "REPLAYSSM_DTYPE_F32 and REPLAYSSM_DTYPE_BF16: u can overflow a binary16",
                            ));
                        }
                        dtype => dtype,
                    },
                };
                if readout == Readout::Exact && f.delta_options[1] != 0 {
                    return Err(Error::invalid(
                        "pool_desc.u_dtype",
                        f.delta_options[1],
                        "0, because EXACT keeps no u records",
                    ));
                }
                if readout == Readout::Full && u_dtype == Dtype::Bf16 {
                    return Err(Error::invalid(
                        "pool_desc.u_dtype",
                        "REPLAYSSM_DTYPE_BF16",
                        "REPLAYSSM_DTYPE_F32, because FULL outputs are of fp32 grade",
                    ));
                }
                Ok(PoolConfig { family: Family::Delta(dims), n_layers, io, out, format, readout, stochastic, u_dtype })
            }
            4 => {
                unused("convolution", &mamba2_fields)?;
                unused("convolution", &delta_fields)?;
                unused(
                    "convolution",
                    &[
                        ("pool_desc.format", f.format),
                        ("pool_desc.readout", f.readout),
                        ("pool_desc.stochastic_rounding", f.stochastic_rounding),
                    ],
                )?;
                let channels = range("pool_desc.channels", f.channels, 1, MAX_COUNT)? as usize;
                let width = range("pool_desc.width", f.width, 2, MAX_WIDTH)? as usize;
                let n_starts = f.sections.len().max(1) + 1;
                let mut section_starts = collected("the list of sections", n_starts, std::iter::once(0))?;
                let mut end = 0usize;
                for (i, &section) in f.sections.iter().enumerate() {
                    if section < 1 {
                        return Err(Error::invalid(format!("pool_desc.section_channels[{i}]"), section, "at least 1"));
                    }
                    end += section as usize;
                    section_starts.push(end);
                }
                if f.sections.is_empty() {
                    section_starts.push(channels);
                } else if end != channels {
                    return Err(Error::invalid(
                        "pool_desc.channels",
                        channels,
                        format!("the sum of section_channels, which is {end}"),
                    ));
                }
                Ok(PoolConfig {
                    family: Family::Conv1d(ConvDims { channels, width, section_starts }),
                    n_layers,
                    io,
                    out,
                    format: Format::F32,
                    readout: Readout::Exact,
                    stochastic: false,
                    u_dtype: io,
                })
            }
            0 => Err(Error::invalid("pool_desc.family", 0, "REPLAYSSM_FAMILY_MAMBA2, _GDN, _KDA or _CONV1D")),
            other => {
                Err(Error::unsupported("pool_desc.family", other, "REPLAYSSM_FAMILY_MAMBA2, _GDN, _KDA and _CONV1D"))
            }
        }
    }
}
