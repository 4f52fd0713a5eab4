//! What a call hands to a backend: checked, typed, without a pointer dereferenced.

use std::sync::atomic::{AtomicI64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use super::config::{DeltaKind, Family, PoolConfig, SlotsConfig};
use super::layout::{Component, ComponentLayout};
use super::numerics::rsqrt;
use super::position::{Convention, Rule};
use crate::dtype::{Dtype, IndexType};
use crate::error::{Error, Result};
use crate::memory::collected;

/// An address in the backend's memory. Only a backend turns it into a pointer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Address(pub usize);

impl Address {
    /// The address `bytes` further on (or back). Wraps like pointer arithmetic of the hardware.
    #[inline(always)]
    pub fn offset(self, bytes: i64) -> Address {
        Address(self.0.wrapping_add(bytes as usize))
    }
}

/// An index array.
#[derive(Debug, Clone, Copy)]
pub struct Ids {
    /// Element 0.
    pub data: Address,
    /// Distance of neighbours in elements.
    pub stride: i64,
    /// Element type.
    pub index: IndexType,
}

/// A strided tensor with the axes row, token and head; the last axis is contiguous. Strides are in elements.
#[derive(Debug, Clone, Copy)]
pub struct Tensor {
    /// Element 0.
    pub data: Address,
    /// Distance of rows; not used with packed tokens.
    pub row: i64,
    /// Distance of tokens.
    pub token: i64,
    /// Distance of heads, groups, sections or channels.
    pub head: i64,
    /// Element type.
    pub dtype: Dtype,
}

impl Tensor {
    /// Address of a head's vector.
    #[inline(always)]
    pub fn at(&self, row: i64, token: i64, head: i64) -> Address {
        let elements = row
            .wrapping_mul(self.row)
            .wrapping_add(token.wrapping_mul(self.token))
            .wrapping_add(head.wrapping_mul(self.head));
        self.data.offset(elements.wrapping_mul(self.dtype.size() as i64))
    }

    /// Checks dtype, alignment and reach of a tensor with the given extents; `inner` is the contiguous axis.
    fn check(&self, field: &'static str, extents: [i64; 3], inner: i64, io: Option<Dtype>) -> Result<()> {
        if let Some(io) = io.filter(|&io| io != self.dtype) {
            return Err(Error::invalid(
                format!("{field}.dtype"),
                format!("{:?}", self.dtype),
                format!("{io:?}, the pool's dtype for it"),
            ));
        }
        if !self.data.0.is_multiple_of(self.dtype.size()) {
            return Err(Error::invalid(
                format!("{field}.data"),
                format!("{:#x}", self.data.0),
                format!("an address aligned to {} bytes", self.dtype.size()),
            ));
        }
        let reach = [self.row, self.token, self.head]
            .iter()
            .zip(extents)
            .try_fold(inner, |sum, (stride, extent)| {
                let steps = (extent - 1).max(0);
                sum.checked_add(stride.checked_abs()?.checked_mul(steps)?)
            })
            .and_then(|elements| elements.checked_mul(self.dtype.size() as i64));
        match reach {
            Some(bytes) if bytes <= isize::MAX as i64 => Ok(()),
            _ => Err(Error::invalid(
                format!("{field}.stride"),
                format!("({}, {}, {})", self.row, self.token, self.head),
                "strides whose reach fits an address space",
            )),
        }
    }

    /// An output must not write one element twice.
    fn check_distinct(&self, field: &'static str, extents: [i64; 3], inner: i64) -> Result<()> {
        let [rows, tokens, heads] = extents;
        distinct(
            field,
            [("stride_row", self.row, rows), ("stride_token", self.token, tokens), ("stride_head", self.head, heads)],
            inner,
        )
    }
}

/// Checks that the elements of a tensor with these axes (name, stride, extent) and a contiguous inner axis have addresses of their
/// own: from the smallest stride up, each axis steps over the whole reach of those inside it.
fn distinct<const AXES: usize>(
    field: &'static str,
    mut axes: [(&'static str, i64, i64); AXES],
    inner: i64,
) -> Result<()> {
    if axes.iter().any(|(_, _, extent)| *extent == 0) {
        return Ok(());
    }
    axes.sort_by_key(|(_, stride, _)| stride.unsigned_abs());
    let mut reach = inner;
    for (name, stride, extent) in axes {
        if extent > 1 {
            if stride.unsigned_abs() < reach.unsigned_abs() {
                return Err(Error::invalid(
                    format!("{field}.{name}"),
                    stride,
                    format!("at least {reach} elements, so that elements do not overlap"),
                ));
            }
            reach = stride.saturating_abs().saturating_mul(extent - 1).saturating_add(reach);
        }
    }
    Ok(())
}

/// Lengths of a batch's rows.
#[derive(Debug, Clone, Copy)]
pub enum Tokens {
    /// Every row has this many.
    Dense(i64),
    /// int32 `[n_rows + 1]`: row r has tokens `[cu[r], cu[r + 1])` of the packed tensors.
    Packed(Address),
}

/// One batch of a model step.
#[derive(Debug, Clone, Copy)]
pub struct Batch {
    /// Rows, padding included.
    pub n_rows: i64,
    /// Lengths of rows.
    pub tokens: Tokens,
    /// No row is longer; filled in by [`Batch::checked`].
    pub max_tokens: i64,
    /// Token rows of packed tensors.
    pub n_tokens: i64,
    /// Checkpoint of each row.
    pub slots: Ids,
    /// Ring of each row.
    pub rings: Ids,
    /// uint8 `[n_rows]`.
    pub flush: Option<Address>,
    /// uint32 `[n_rows]`.
    pub generation: Option<Address>,
    /// An id that means padding, beside the negative ones.
    pub null_id: Option<i64>,
    /// Leave outputs of null rows alone instead of writing zeros.
    pub keep_null_outputs: bool,
    /// An extend batch: rows of any length, no rollback.
    pub extend: bool,
    /// Tokens at the end of each row of an extend that stay in the ring.
    pub keep_tail: i64,
}

impl Batch {
    /// Checks a batch against its slots handle and fills in `max_tokens`.
    pub fn checked(mut self, slots: &SlotsConfig) -> Result<Self> {
        let t_max = i64::from(slots.max_step_tokens);
        if self.n_rows < 0 {
            return Err(Error::invalid("batch.n_rows", self.n_rows, "0 or more"));
        }
        if self.keep_tail != 0 && !self.extend {
            return Err(Error::invalid("batch.keep_tail", self.keep_tail, "0 without REPLAYSSM_BATCH_EXTEND"));
        }
        if !(0..=i64::from(slots.window)).contains(&self.keep_tail) {
            return Err(Error::invalid(
                "batch.keep_tail",
                self.keep_tail,
                format!("0 to the window, which is {}", slots.window),
            ));
        }
        let limit = if self.extend { i64::from(i32::MAX) } else { t_max };
        match self.tokens {
            Tokens::Dense(t) => {
                if !(0..=limit).contains(&t) {
                    return Err(Error::invalid(
                        "batch.tokens",
                        t,
                        format!("0 to {limit}, the longest row that the slots handle takes"),
                    ));
                }
                if self.max_tokens != 0 && self.max_tokens < t {
                    return Err(Error::invalid(
                        "batch.max_tokens",
                        self.max_tokens,
                        format!("0 or at least tokens, which is {t}"),
                    ));
                }
                self.n_tokens = self.n_rows.saturating_mul(t);
                self.max_tokens = t;
            }
            Tokens::Packed(_) => {
                if self.n_tokens < 0 {
                    return Err(Error::invalid("batch.n_tokens", self.n_tokens, "0 or more"));
                }
                if !(0..=limit).contains(&self.max_tokens) {
                    return Err(Error::invalid(
                        "batch.max_tokens",
                        self.max_tokens,
                        format!("0 to {limit}, the longest row that the slots handle takes"),
                    ));
                }
                if self.max_tokens == 0 {
                    self.max_tokens = limit;
                }
            }
        }
        Ok(self)
    }

    /// Whether there is no token for sure, so that nothing is read and tensors may be absent.
    pub fn is_empty(&self) -> bool {
        let no_tokens = match self.tokens {
            Tokens::Dense(t) => t == 0,
            Tokens::Packed(_) => self.n_tokens == 0,
        };
        self.n_rows == 0 || no_tokens
    }

    /// Extents of the row and token axes of this batch's tensors.
    fn extents(&self) -> (i64, i64) {
        match self.tokens {
            Tokens::Dense(t) => (self.n_rows, t),
            Tokens::Packed(_) => (1, self.n_tokens),
        }
    }
}

/// Whether a call is a step or an extend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// Append behind the committed tokens; may be repeated or abandoned.
    Step,
    /// Fold everything into the checkpoint.
    Extend,
}

/// Inputs, parameters and output of a Mamba-2 call.
#[derive(Debug, Clone, Copy)]
pub struct Mamba2Args {
    /// io `[.., H, D]`.
    pub x: Tensor,
    /// io `[.., G, N]`.
    pub b: Tensor,
    /// io `[.., G, N]`.
    pub c: Tensor,
    /// Any dtype, `[.., H]`.
    pub dt: Tensor,
    /// `[H]`.
    pub a: Tensor,
    /// `[H]`.
    pub dt_bias: Option<Tensor>,
    /// `[H]` or `[H, D]`.
    pub d_skip: Option<Tensor>,
    /// Whether `d_skip` has an element per channel.
    pub d_per_element: bool,
    /// io `[.., H, D]`.
    pub z: Option<Tensor>,
    /// `[.., H, D]`.
    pub out: Tensor,
    /// Whether dt goes through softplus.
    pub dt_softplus: bool,
}

impl Mamba2Args {
    /// What is read.
    pub fn inputs(&self, pool: &PoolConfig) -> impl Iterator<Item = Input> {
        let (h, dim, g, n) = match &pool.family {
            Family::Mamba2(d) => (d.nheads as i64, d.headdim as i64, d.ngroups as i64, d.dstate as i64),
            _ => (0, 0, 0, 0),
        };
        let skip = if self.d_per_element { dim } else { 1 };
        [
            Some(Input::of_tokens(&self.x, h, dim)),
            Some(Input::of_tokens(&self.b, g, n)),
            Some(Input::of_tokens(&self.c, g, n)),
            Some(Input::of_tokens(&self.dt, h, 1)),
            self.z.as_ref().map(|z| Input::of_tokens(z, h, dim)),
            Some(Input::parameter(&self.a, h, 1)),
            self.dt_bias.as_ref().map(|bias| Input::parameter(bias, h, 1)),
            self.d_skip.as_ref().map(|d| Input::parameter(d, h, skip)),
        ]
        .into_iter()
        .flatten()
    }

    /// Checks every tensor against the pool and the batch.
    pub fn check(&self, pool: &PoolConfig, batch: &Batch) -> Result<()> {
        let Family::Mamba2(d) = &pool.family else {
            return Err(wrong_family("mamba2"));
        };
        let (rows, tokens) = batch.extents();
        let (h, dim, g, n) = (d.nheads as i64, d.headdim as i64, d.ngroups as i64, d.dstate as i64);
        self.x.check("args.x", [rows, tokens, h], dim, Some(pool.io))?;
        self.b.check("args.B", [rows, tokens, g], n, Some(pool.io))?;
        self.c.check("args.C", [rows, tokens, g], n, Some(pool.io))?;
        self.dt.check("args.dt", [rows, tokens, h], 1, None)?;
        self.a.check("args.A", [1, 1, h], 1, None)?;
        if let Some(bias) = &self.dt_bias {
            bias.check("args.dt_bias", [1, 1, h], 1, None)?;
        }
        if let Some(skip) = &self.d_skip {
            skip.check("args.D", [1, 1, h], if self.d_per_element { dim } else { 1 }, None)?;
        }
        if let Some(z) = &self.z {
            z.check("args.z", [rows, tokens, h], dim, Some(pool.io))?;
        }
        self.out.check("args.out", [rows, tokens, h], dim, Some(pool.out))?;
        self.out.check_distinct("args.out", [rows, tokens, h], dim)
    }
}

/// How a delta rule's log decay comes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Gate {
    /// g = -exp(A_log) softplus(a + dt_bias).
    Softplus,
    /// g = lower_bound sigmoid(exp(A_log) (a + dt_bias)).
    LowerBound(f32),
    /// g as it is.
    LogDecay,
}

/// Inputs, parameters and output of a delta-rule call.
#[derive(Debug, Clone, Copy)]
pub struct DeltaArgs {
    /// How g comes.
    pub gate: Gate,
    /// io `[.., H, K]`.
    pub q: Tensor,
    /// io `[.., H, K]`.
    pub k: Tensor,
    /// io `[.., HV, V]`.
    pub v: Tensor,
    /// Any dtype: GDN `[.., HV]`, KDA `[.., HV, K]`.
    pub g: Tensor,
    /// Any dtype, `[.., HV]`.
    pub beta: Tensor,
    /// `[HV]`; with raw gates.
    pub a_log: Option<Tensor>,
    /// GDN `[HV]`, KDA `[HV, K]`; with raw gates.
    pub dt_bias: Option<Tensor>,
    /// Factor of the output; 0 = 1 / sqrt(K).
    pub scale: f32,
    /// eps inside the root of the norms of q and k; none = they are used as they come.
    pub l2norm: Option<f32>,
    /// Whether beta is to go through the sigmoid.
    pub beta_sigmoid: bool,
    /// `[.., HV, V]`.
    pub out: Tensor,
}

impl DeltaArgs {
    /// What is read.
    pub fn inputs(&self, pool: &PoolConfig) -> impl Iterator<Item = Input> {
        let (h, hv, k, v, gates) = match &pool.family {
            Family::Delta(d) => (d.qk_heads as i64, d.v_heads as i64, d.k as i64, d.v as i64, d.gates() as i64),
            _ => (0, 0, 0, 0, 0),
        };
        [
            Some(Input::of_tokens(&self.q, h, k)),
            Some(Input::of_tokens(&self.k, h, k)),
            Some(Input::of_tokens(&self.v, hv, v)),
            Some(Input::of_tokens(&self.g, hv, gates)),
            Some(Input::of_tokens(&self.beta, hv, 1)),
            self.a_log.as_ref().map(|a| Input::parameter(a, hv, 1)),
            self.dt_bias.as_ref().map(|bias| Input::parameter(bias, hv, gates)),
        ]
        .into_iter()
        .flatten()
    }

    /// A scale of 0 is 1 / sqrt(K).
    pub fn with_default_scale(mut self, pool: &PoolConfig) -> Self {
        if let (true, Family::Delta(d)) = (self.scale == 0.0, &pool.family) {
            self.scale = rsqrt(d.k as f32);
        }
        self
    }

    /// Checks every tensor against the pool and the batch.
    pub fn check(&self, pool: &PoolConfig, batch: &Batch) -> Result<()> {
        let Family::Delta(d) = &pool.family else {
            return Err(wrong_family("delta"));
        };
        let (rows, tokens) = batch.extents();
        let (h, hv, k, v) = (d.qk_heads as i64, d.v_heads as i64, d.k as i64, d.v as i64);
        let gates = d.gates() as i64;
        self.q.check("args.q", [rows, tokens, h], k, Some(pool.io))?;
        self.k.check("args.k", [rows, tokens, h], k, Some(pool.io))?;
        self.v.check("args.v", [rows, tokens, hv], v, Some(pool.io))?;
        self.g.check("args.g", [rows, tokens, hv], gates, None)?;
        self.beta.check("args.beta", [rows, tokens, hv], 1, None)?;
        match (self.gate, &self.a_log) {
            (Gate::LogDecay, None) => {}
            (Gate::LogDecay, Some(_)) => {
                return Err(Error::invalid("args.A_log", "given", "absent with REPLAYSSM_GATE_LOG_DECAY"));
            }
            (_, Some(a)) => a.check("args.A_log", [1, 1, hv], 1, None)?,
            (_, None) => return Err(Error::invalid("args.A_log", "absent", "a tensor, because the gate is raw")),
        }
        if let Some(bias) = &self.dt_bias {
            if self.gate == Gate::LogDecay {
                return Err(Error::invalid("args.dt_bias", "given", "absent with REPLAYSSM_GATE_LOG_DECAY"));
            }
            bias.check("args.dt_bias", [1, 1, hv], gates, None)?;
        }
        if let Gate::LowerBound(bound) = self.gate {
            if d.kind != DeltaKind::Kda {
                return Err(Error::invalid("args.gate", "REPLAYSSM_GATE_LOWER_BOUND", "another gate for GDN"));
            }
            if !(f32::MIN..0.0).contains(&bound) {
                return Err(Error::invalid("args.lower_bound", bound, "a finite number below 0"));
            }
        }
        self.out.check("args.out", [rows, tokens, hv], v, Some(pool.out))?;
        self.out.check_distinct("args.out", [rows, tokens, hv], v)
    }
}

/// Inputs, parameters and output of a convolution call.
#[derive(Debug, Clone, Copy)]
pub struct ConvArgs {
    /// io; the head axis is the section.
    pub x: Tensor,
    /// Like `x`; may be the same memory.
    pub out: Tensor,
    /// `[channels, width]`, taps oldest first.
    pub weight: Tensor,
    /// `[channels]`.
    pub bias: Option<Tensor>,
    /// Whether SiLU follows.
    pub silu: bool,
}

impl ConvArgs {
    /// What is read: each section by itself, since their widths differ.
    pub fn inputs(&self, pool: &PoolConfig) -> impl Iterator<Item = Input> {
        let (starts, channels, width) = match &pool.family {
            Family::Conv1d(c) => (c.section_starts.as_slice(), c.channels as i64, c.width as i64),
            _ => ([].as_slice(), 0, 0),
        };
        let (x, overwritten) = (self.x, self.x.data == self.out.data);
        let sections = starts.windows(2).enumerate().map(move |(i, ends)| {
            let data = x.at(0, 0, i as i64);
            Input { overwritten, ..Input::of_tokens(&Tensor { data, ..x }, 1, (ends[1] - ends[0]) as i64) }
        });
        let bias = self.bias.as_ref().map(|bias| Input::parameter(bias, channels, 1));
        sections.chain([Input::parameter(&self.weight, channels, width)]).chain(bias)
    }

    /// Checks every tensor against the pool and the batch.
    pub fn check(&self, pool: &PoolConfig, batch: &Batch) -> Result<()> {
        let Family::Conv1d(c) = &pool.family else {
            return Err(wrong_family("conv1d"));
        };
        let (rows, tokens) = batch.extents();
        let sections = c.section_starts.len() as i64 - 1;
        let widest = c.section_starts.windows(2).map(|w| w[1] - w[0]).max().unwrap_or(0) as i64;
        self.x.check("args.x", [rows, tokens, sections], widest, Some(pool.io))?;
        self.out.check("args.out", [rows, tokens, sections], widest, Some(pool.out))?;
        if self.x.data == self.out.data && pool.out != pool.io {
            return Err(Error::invalid(
                "args.out",
                "args.x itself",
                "memory of its own, because the dtypes are not equal",
            ));
        }
        self.out.check_distinct("args.out", [rows, tokens, sections], widest)?;
        self.weight.check("args.weight", [1, 1, c.channels as i64], c.width as i64, None)?;
        match &self.bias {
            Some(bias) => bias.check("args.bias", [1, 1, c.channels as i64], 1, None),
            None => Ok(()),
        }
    }
}

fn wrong_family(expected: &'static str) -> Error {
    Error::InvalidHandle {
        argument: "layers".into(),
        expected: expected.into(),
        reason: "the pool is of another family".into(),
    }
}

/// Accepted tokens of a model step.
#[derive(Debug, Clone, Copy)]
pub struct CommitArgs {
    /// How counts are meant.
    pub convention: Convention,
    /// int32 `[n_rows]`, or none: all of each row's tokens.
    pub counts: Option<Address>,
    /// Distance of neighbours in elements.
    pub stride: i64,
}

/// Where the arrays of a list lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Where {
    /// In the backend's memory, read when the work runs: bad values set fault bits.
    Device,
    /// In host memory, read before the call returns: bad values are errors and nothing happens.
    Host,
}

/// Which ids of a list's entries count. Those that do not are 0.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum Which {
    /// Slots and rings.
    Both = 0,
    /// Slots alone.
    Slots = 1,
    /// Rings alone.
    Rings = 2,
}

/// A list of slots and rings.
#[derive(Debug, Clone, Copy)]
pub struct List {
    /// Entries.
    pub n: i64,
    /// Where ids and per-entry arrays lie.
    pub place: Where,
    /// Slot of each entry.
    pub slots: Ids,
    /// Ring of each entry.
    pub rings: Ids,
    /// Which of them count.
    pub which: Which,
}

impl List {
    /// Slot ids, where they count.
    pub fn slot_ids(&self) -> Option<&Ids> {
        (self.which != Which::Rings).then_some(&self.slots)
    }

    /// Ring ids, where they count.
    pub fn ring_ids(&self) -> Option<&Ids> {
        (self.which != Which::Slots).then_some(&self.rings)
    }
}

/// The most pools that a call may name.
pub const MAX_NAMED: usize = 64;

/// Slot ids of pools that have ids of their own.
#[derive(Debug, Clone, Copy)]
pub struct Named {
    n: usize,
    pools: [(i32, Ids); MAX_NAMED],
}

impl Named {
    /// No pool.
    pub const NONE: Self =
        Named { n: 0, pools: [(0, Ids { data: Address(0), stride: 0, index: IndexType::I32 }); MAX_NAMED] };

    /// Adds a pool by its index. False: it is there already, or there are too many.
    pub fn add(&mut self, pool: i32, ids: Ids) -> bool {
        if self.of(pool).is_some() {
            return false;
        }
        match self.pools.get_mut(self.n) {
            Some(place) => *place = (pool, ids),
            None => return false,
        }
        self.n += 1;
        true
    }

    /// All of them.
    pub fn iter(&self) -> impl Iterator<Item = &(i32, Ids)> {
        self.pools.iter().take(self.n)
    }

    /// Whether no pool is named.
    pub fn is_empty(&self) -> bool {
        self.n == 0
    }

    /// The ids of a pool, if it has its own.
    pub fn of(&self, pool: i32) -> Option<Ids> {
        self.pools.iter().take(self.n).find(|(index, _)| *index == pool).map(|(_, ids)| *ids)
    }
}

/// A list for several pools, some of which may have slot ids of their own.
#[derive(Debug, Clone, Copy)]
pub struct PoolLists {
    /// Of the rings, and of pools that are not named.
    pub list: List,
    /// Of the others.
    pub named: Named,
    /// Whether there are only those.
    pub all_named: bool,
}

impl PoolLists {
    /// What cursors go by, and whatever else is no pool's: where pools have slots of their own, the rings alone.
    pub fn rings(&self) -> List {
        match self.list.which {
            Which::Both if !self.named.is_empty() => List { which: Which::Rings, ..self.list },
            _ => self.list,
        }
    }

    /// Whether there are ids that are no pool's: not where slots alone count and all pools have their own.
    pub fn has_own_ids(&self) -> bool {
        !(self.all_named && self.list.which == Which::Slots)
    }

    /// A pool's list.
    pub fn of(&self, pool: &PoolView) -> List {
        match self.named.of(pool.index) {
            Some(slots) if self.list.which == Which::Rings => List { slots, which: Which::Both, ..self.list },
            Some(slots) => List { slots, ..self.list },
            None => self.list,
        }
    }
}

/// What a flush folds. Arrays have an element per list entry.
#[derive(Debug, Clone, Copy)]
pub struct FlushArgs {
    /// Only tells the next steps to fold.
    pub later: bool,
    /// int64; none = all but the tokens that are kept.
    pub position: Option<Address>,
}

/// What a copy makes of its target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(i32)]
pub enum CopyKind {
    /// What the source is.
    Fork = 0,
    /// The same, and the source is given up.
    Move = 1,
    /// Source and target change places.
    Swap = 2,
    /// A checkpoint without a ring: the source's state at a position.
    Store = 3,
    /// A live slot, from a checkpoint without a ring.
    Load = 4,
    /// A checkpoint without a ring, from another.
    Stored = 5,
}

/// How a copy is to be made. Arrays have an element per list entry.
#[derive(Debug, Clone, Copy)]
pub struct CopyArgs {
    /// What the target becomes.
    pub kind: CopyKind,
    /// int64, of Store and Load; none = all committed.
    pub position: Option<Address>,
    /// uint32, of Fork, Move and Load; none = one more than before.
    pub generation: Option<Address>,
}

impl CopyArgs {
    /// Checks that what is given has a meaning for the kind.
    pub fn check(&self) -> Result<()> {
        let takes_position = matches!(self.kind, CopyKind::Store | CopyKind::Load);
        if self.position.is_some() && !takes_position {
            return Err(Error::invalid(
                "copy_args.position",
                "not NULL",
                "NULL, unless the kind is REPLAYSSM_COPY_STORE or _LOAD",
            ));
        }
        if self.position.is_none() && self.kind == CopyKind::Load {
            return Err(Error::invalid(
                "copy_args.position",
                "NULL",
                "an array, because the kind is REPLAYSSM_COPY_LOAD",
            ));
        }
        let takes_generation = matches!(self.kind, CopyKind::Fork | CopyKind::Move | CopyKind::Load);
        if self.generation.is_some() && !takes_generation {
            return Err(Error::invalid(
                "copy_args.generation",
                "not NULL",
                "NULL, unless the kind is REPLAYSSM_COPY_FORK, _MOVE or _LOAD",
            ));
        }
        Ok(())
    }
}

impl CopyKind {
    /// Whether the source is a slot without a ring.
    pub fn from_slot(self) -> bool {
        matches!(self, CopyKind::Load | CopyKind::Stored)
    }

    /// Whether the target is one.
    pub fn to_slot(self) -> bool {
        matches!(self, CopyKind::Store | CopyKind::Stored)
    }
}

/// Which rows of a batch leave a state behind, and where.
#[derive(Debug, Clone, Copy)]
pub struct SnapshotArgs {
    /// int64 `[n_rows]`; negative: none.
    pub at: Address,
    /// `[n_rows]` slots; none if every pool has its own.
    pub to: Option<Ids>,
    /// Slots of the batch in pools that have ids of their own.
    pub pool_src: Named,
    /// Targets in those pools.
    pub pool_dst: Named,
}

impl SnapshotArgs {
    /// A batch as a pool sees it, and its targets.
    pub fn of(&self, batch: &Batch, pool: &PoolView) -> Option<(Batch, Ids)> {
        let slots = self.pool_src.of(pool.index).unwrap_or(batch.slots);
        Some((Batch { slots, ..*batch }, self.pool_dst.of(pool.index).or(self.to)?))
    }
}

/// The most entries that a list on the host may have: they travel by value in a launch.
pub const MAX_HOST_LIST: i64 = 256;

/// What a reset sets. Arrays have an element per list entry.
#[derive(Debug, Clone, Copy)]
pub struct ResetArgs {
    /// Leave the checkpoint as it is instead of zeroing it.
    pub keep_checkpoint: bool,
    /// What stands there is fp32 row-major: turn it into the pool's format.
    pub convert: bool,
    /// int64; none = 0.
    pub position: Option<Address>,
    /// uint32; none = one more than before.
    pub generation: Option<Address>,
    /// uint64; none = from the ring id.
    pub seed: Option<Address>,
}

/// A dense state outside the library: row i belongs to entry i of a list. Strides in elements.
#[derive(Debug, Clone, Copy)]
pub struct StateTensor {
    /// Element 0.
    pub data: Address,
    /// Element type.
    pub dtype: Dtype,
    /// `[N, D]` instead of `[D, N]` (`[width - 1, channels]` instead of `[channels, width - 1]`).
    pub transposed: bool,
    /// One layer, or all of them.
    pub layer: Option<usize>,
    /// Distance of entries.
    pub entry: i64,
    /// Distance of layers.
    pub layer_stride: i64,
    /// Distance of heads.
    pub head: i64,
    /// Distance of rows; the last axis is contiguous.
    pub row: i64,
}

/// How a pool's state looks from outside.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StateShape {
    /// Heads; 1 for a convolution.
    pub heads: i64,
    /// D, or channels.
    pub rows: i64,
    /// N, or width - 1.
    pub columns: i64,
}

impl StateShape {
    /// The shape of one layer's state of one slot.
    pub fn of(pool: &PoolConfig) -> Self {
        let (heads, rows, columns) = match (&pool.family, pool.family.state()) {
            (Family::Conv1d(c), _) => (1, c.channels, c.width - 1),
            (_, Some(s)) => (s.heads, s.rows, s.columns),
            (_, None) => (0, 0, 0),
        };
        StateShape { heads: heads as i64, rows: rows as i64, columns: columns as i64 }
    }
}

impl StateTensor {
    /// Replaces zero strides by those of a dense array and checks the rest.
    pub fn checked(mut self, pool: &PoolConfig, n: i64) -> Result<Self> {
        let shape = StateShape::of(pool);
        let (rows, columns) = if self.transposed { (shape.columns, shape.rows) } else { (shape.rows, shape.columns) };
        let layers = match self.layer {
            Some(layer) if layer >= pool.n_layers => {
                return Err(Error::invalid("state.layer", layer, format!("-1 to {}", pool.n_layers - 1)));
            }
            Some(_) => 1,
            None => pool.n_layers as i64,
        };
        let mut dense = columns;
        for (field, stride, extent) in [
            ("state.stride_row", &mut self.row, rows),
            ("state.stride_head", &mut self.head, shape.heads),
            ("state.stride_layer", &mut self.layer_stride, layers),
            ("state.stride_entry", &mut self.entry, n),
        ] {
            if *stride == 0 {
                *stride = dense;
            }
            if *stride < 0 {
                return Err(Error::invalid(field, *stride, "0 (dense) or more"));
            }
            dense = stride
                .checked_mul(extent.max(1))
                .filter(|d| d.checked_mul(4).is_some())
                .ok_or_else(|| Error::invalid(field, *stride, "a stride whose reach fits an address space"))?;
        }
        let axes = [
            ("stride_row", self.row, rows),
            ("stride_head", self.head, shape.heads),
            ("stride_layer", self.layer_stride, layers),
            ("stride_entry", self.entry, n),
        ];
        distinct("state", axes, columns)?;
        if !self.data.0.is_multiple_of(self.dtype.size()) {
            return Err(Error::invalid(
                "state.data",
                format!("{:#x}", self.data.0),
                format!("an address aligned to {} bytes", self.dtype.size()),
            ));
        }
        Ok(self)
    }

    /// Address of element (row, column) of a head's state.
    #[inline(always)]
    pub fn at(&self, entry: i64, layer: i64, head: i64, row: i64, column: i64) -> Address {
        let (outer, inner) = if self.transposed { (column, row) } else { (row, column) };
        let layer = if self.layer.is_some() { 0 } else { layer };
        let elements = entry * self.entry + layer * self.layer_stride + head * self.head + outer * self.row + inner;
        self.data.offset(elements * self.dtype.size() as i64)
    }
}

/// How a call is to run.
#[derive(Debug, Clone, Copy)]
pub struct Exec {
    /// Stream, 0 = default.
    pub stream: usize,
    /// This call does share `part` of `n_parts` on the calling thread.
    pub part: i64,
    /// 1 = the backend's own threads do everything.
    pub n_parts: i64,
    /// CUDA: the kernel may begin while the work in front of it ends (programmatic dependent launch); it waits before it reads.
    pub dependent: bool,
    /// CUDA: and it may bring checkpoints near before it waits.
    pub prefetch: bool,
}

impl Exec {
    /// Everything at once, on the default stream.
    pub const DEFAULT: Self = Exec { stream: 0, part: 0, n_parts: 1, dependent: false, prefetch: false };

    /// For a second launch of one call: behind the first, whole.
    pub fn after_own_launch(&self) -> Self {
        Exec { dependent: false, prefetch: false, ..*self }
    }

    /// The share `[begin, end)` of `items` that this call does.
    pub fn share(&self, items: i64) -> (i64, i64) {
        let cut = |part: i64| (i128::from(items) * i128::from(part) / i128::from(self.n_parts)) as i64;
        (cut(self.part), cut(self.part + 1))
    }
}

/// A ring's state: the whole of what the host could want to know, 32 bytes, readable as it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[repr(C)]
pub struct Cursor {
    /// Committed tokens, absolute.
    pub position: i64,
    /// A fold is wanted before this position is more than `keep` behind; 0 = none.
    pub flush_before: i64,
    /// Key of stochastic rounding.
    pub seed: u64,
    /// Counts resets and copies.
    pub generation: u32,
    /// Tokens that the last commit added.
    pub committed: u32,
}

impl Cursor {
    /// From how it lies in memory.
    pub fn from_bytes(bytes: &[u8; size_of::<Cursor>()]) -> Self {
        let mut words = [0u64; 4];
        for (word, from) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*from);
        }
        let [position, flush_before, seed, last] = words;
        Cursor {
            position: position as i64,
            flush_before: flush_before as i64,
            seed,
            generation: last as u32,
            committed: (last >> 32) as u32,
        }
    }

    /// As it lies in memory.
    pub fn to_bytes(&self) -> [u8; size_of::<Cursor>()] {
        let mut bytes = [0; size_of::<Cursor>()];
        let fields = [self.position as u64, self.flush_before as u64, self.seed];
        let last = u64::from(self.generation) | u64::from(self.committed) << 32;
        for (to, field) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(fields.into_iter().chain([last])) {
            *to = field.to_le_bytes();
        }
        bytes
    }
}

/// Where a component lies, as it was allocated or lent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Site {
    /// Slot 0 of each layer.
    pub bases: Vec<Address>,
    /// Bytes from layer to layer; none where layers lie anywhere.
    pub layer_stride: Option<i64>,
    /// Bytes from slot to slot.
    pub stride: i64,
}

impl Site {
    /// Layers at equal distances.
    pub fn strided(base: Address, layer_stride: i64, n_layers: usize, stride: i64) -> Result<Self> {
        let bases = (0..n_layers as i64).map(|layer| base.offset(layer * layer_stride));
        let bases = collected("the list of a pool's layers", n_layers, bases)?;
        Ok(Site { bases, layer_stride: Some(layer_stride), stride })
    }
}

/// One component of a pool in memory: layer l of slot (ring) s is at `base(l) + s * stride`.
///
/// A rebind changes it while nothing runs; it is made of atomics so that it needs no lock.
#[derive(Debug)]
pub struct ComponentView {
    /// Which.
    pub component: Component,
    /// Bytes of one part.
    pub bytes: i64,
    /// Indexed by ring instead of slot.
    pub per_ring: bool,
    /// Whether the rest of a stride is a guard.
    pub guarded: bool,
    bases: Box<[AtomicUsize]>,
    table: AtomicUsize,
    layer_stride: AtomicI64,
    stride: AtomicI64,
}

impl ComponentView {
    /// At a site. `table` is an array of the sites' bases in the backend's memory; 0 where layers lie at equal distances.
    pub fn new(layout: &ComponentLayout, site: &Site, table: Address, guarded: bool) -> Result<Self> {
        let bases = site.bases.iter().map(|_| AtomicUsize::new(0));
        let view = ComponentView {
            component: layout.component,
            bytes: layout.bytes as i64,
            per_ring: layout.per_ring,
            guarded,
            bases: collected("the list of a pool's layers", site.bases.len(), bases)?.into_boxed_slice(),
            table: AtomicUsize::new(0),
            layer_stride: AtomicI64::new(0),
            stride: AtomicI64::new(0),
        };
        view.move_to(site, table);
        Ok(view)
    }

    /// Goes to another site of as many layers. No work may be using it.
    pub fn move_to(&self, site: &Site, table: Address) {
        for (to, from) in self.bases.iter().zip(&site.bases) {
            to.store(from.0, Relaxed);
        }
        self.table.store(table.0, Relaxed);
        self.layer_stride.store(site.layer_stride.unwrap_or(0), Relaxed);
        self.stride.store(site.stride, Relaxed);
    }

    /// Slot 0 of a layer.
    #[inline(always)]
    pub fn base(&self, layer: i64) -> Address {
        Address(self.bases.get(layer as usize).map_or(0, |base| base.load(Relaxed)))
    }

    /// An array of all layers' bases in host memory, which stays where it is.
    pub fn bases(&self) -> *const usize {
        self.bases.as_ptr().cast()
    }

    /// An array of all layers' bases in the backend's memory; none where layers are [`ComponentView::layer_stride`] apart.
    pub fn table(&self) -> Option<Address> {
        Some(Address(self.table.load(Relaxed))).filter(|table| table.0 != 0)
    }

    /// Bytes from layer to layer; 0 with a table.
    pub fn layer_stride(&self) -> i64 {
        self.layer_stride.load(Relaxed)
    }

    /// Bytes from slot to slot.
    #[inline(always)]
    pub fn stride(&self) -> i64 {
        self.stride.load(Relaxed)
    }
}

/// A slots handle as a backend sees it.
#[derive(Debug, Clone)]
pub struct SlotsView {
    /// Sizes and rules.
    pub config: SlotsConfig,
    /// The same as integers of the rule.
    pub rule: Rule,
    /// `[n_rings]` of [`Cursor`].
    pub cursors: Address,
    /// One [`Report`] and one [`Stats`], written by the backend as work runs.
    pub counters: Address,
}

/// A pool as a backend sees it.
#[derive(Debug)]
pub struct PoolView {
    /// Family, dimensions, formats.
    pub config: PoolConfig,
    /// Number of the pool on its slots handle, for reports.
    pub index: i32,
    /// Memory, in the order of [`super::layout::components`].
    pub components: Vec<ComponentView>,
    /// What of it the library owns.
    pub memory: Blocks,
    /// Addresses of the layers of components whose layers lie anywhere.
    pub tables: Blocks,
}

impl PoolView {
    /// A component, if the pool has it.
    #[inline(always)]
    pub fn component(&self, component: Component) -> Option<&ComponentView> {
        self.components.iter().find(|c| c.component == component)
    }

    /// Address of one layer's part of a slot or ring in a component; address 0 if the pool has no such component.
    #[inline(always)]
    pub fn part(&self, component: Component, layer: i64, index: i64) -> Address {
        match self.component(component) {
            Some(c) => c.base(layer).offset(index * c.stride()),
            None => Address(0),
        }
    }
}

/// An input of a call that checks look at. With a token axis it is looked at for the tokens of live rows; without, once.
#[derive(Debug, Clone, Copy)]
pub struct Input {
    /// Where it lies.
    pub tensor: Tensor,
    /// Heads, groups, or channels of a parameter.
    pub heads: i64,
    /// Length of the contiguous axis.
    pub inner: i64,
    /// Whether it has an element per token.
    pub per_token: bool,
    /// Whether the call's output takes its place.
    pub overwritten: bool,
}

impl Input {
    fn of_tokens(tensor: &Tensor, heads: i64, inner: i64) -> Self {
        Input { tensor: *tensor, heads, inner, per_token: true, overwritten: false }
    }

    fn parameter(tensor: &Tensor, heads: i64, inner: i64) -> Self {
        Input { tensor: *tensor, heads, inner, per_token: false, overwritten: false }
    }
}

/// Fault bits.
pub mod fault {
    /// A slot or ring id at or above its count.
    pub const ID: u32 = 1;
    /// A commit count outside the row.
    pub const COUNT: u32 = 2;
    /// A row longer than declared, or `cu_seqlens` that falls.
    pub const LENGTH: u32 = 4;
    /// A tag outside the window, or a position that is not held.
    pub const POSITION: u32 = 8;
    /// Two rows of a batch on one slot or ring.
    pub const DUPLICATE: u32 = 16;
    /// A guard of a slot's or ring's memory was overwritten.
    pub const CANARY: u32 = 32;
    /// An infinity or a NaN in an input.
    pub const NOT_FINITE: u32 = 64;
    /// A rewind that went too far back.
    pub const REWIND: u32 = 128;
}

/// What went wrong on the device so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Report {
    /// [`fault`] bits, sticky.
    pub bits: u32,
    /// Faults seen.
    pub count: u64,
    /// Slot or ring id of the first.
    pub first_slot: i64,
    /// Batch row or list entry of the first.
    pub first_row: i64,
    /// Pool of the first; -1 where no pool was involved.
    pub first_pool: i32,
    /// Layer of the first; -1 where no layer was involved.
    pub first_layer: i32,
}

/// Counters of a slots handle, over all its pools.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Commits.
    pub steps: u64,
    /// Rows of one token or more that commits saw.
    pub rows: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Tokens that became committed.
    pub accepted: u64,
    /// Checkpoint tiles rewritten by steps.
    pub flushes: u64,
    /// Bytes of checkpoint loaded.
    pub checkpoint_bytes_read: u64,
    /// Bytes of checkpoint stored.
    pub checkpoint_bytes_written: u64,
    /// Bytes of ring records loaded.
    pub ring_bytes_read: u64,
    /// Bytes of ring records stored.
    pub ring_bytes_written: u64,
}

/// What a context runs on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackendInfo {
    /// Name of the device or of the instruction set.
    pub name: String,
    /// Threads that the backend keeps, the caller's included; 0 on a device.
    pub n_threads: i32,
    /// Ordinal of the device; none on the CPU.
    pub device: Option<i32>,
}

/// Memory of a backend, zeroed, freed when dropped.
pub trait Memory: Send + Sync {
    /// First byte.
    fn address(&self) -> Address;
}

/// Memory that is freed when all who may be using it are done.
pub struct Blocks(Mutex<Vec<Box<dyn Memory>>>);

impl Blocks {
    /// Keeps blocks.
    pub fn new(blocks: Vec<Box<dyn Memory>>) -> Self {
        Blocks(Mutex::new(blocks))
    }

    /// Keeps others instead. No work may be using those.
    pub fn replace(&self, blocks: Vec<Box<dyn Memory>>) {
        let _old = std::mem::replace(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), blocks);
    }
}

impl std::fmt::Debug for Blocks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Blocks")
    }
}

/// What a backend does. All arguments have been checked; what only the device can see is the backend's to check.
pub trait Backend: Send + Sync {
    /// Name and size.
    fn info(&self) -> BackendInfo;

    /// Refuses if its device has failed for good, as far as is known.
    fn check_alive(&self) -> Result<()> {
        Ok(())
    }

    /// Zeroed memory.
    fn allocate(&self, what: &'static str, bytes: u64) -> Result<Box<dyn Memory>>;
    /// Copies bytes into memory of this backend that no work uses yet.
    fn write(&self, to: Address, bytes: &[u8]) -> Result<()>;
    /// Refuses a stream on which the calls below cannot wait for their work, because it captures.
    fn check_wait(&self, _exec: &Exec) -> Result<()> {
        Ok(())
    }
    /// Copies runs of `bytes` bytes, `stride` apart, from this backend's memory to `into`, one behind the other, when the work on the
    /// stream is done; waits for it.
    fn read_runs(&self, from: Address, stride: i64, bytes: usize, into: &mut [u8], exec: &Exec) -> Result<()>;
    /// Copies from `from` to runs of `bytes` bytes, `stride` apart, in this backend's memory, when the work on the stream is done; waits.
    fn write_runs(&self, to: Address, stride: i64, bytes: usize, from: &[u8], exec: &Exec) -> Result<()>;
    /// Counters of a slots handle, zero.
    fn allocate_counters(&self) -> Result<Box<dyn Memory>>;
    /// Refuses a pool that this backend cannot have.
    fn supports(&self, _pool: &PoolConfig) -> Result<()> {
        Ok(())
    }
    /// Gets ready for all calls on a slots handle, or (with a pool's configuration) on a pool: nothing is loaded later.
    fn prepare(&self, _slots: &SlotsConfig, _pool: Option<&PoolConfig>) -> Result<()> {
        Ok(())
    }
    /// How a step of so many rows and tokens is launched if everything is aligned, in words; none where that makes no difference.
    fn aligned_launch(&self, _slots: &SlotsConfig, _pool: &PoolConfig, _rows: i64, _tokens: i64) -> Option<String> {
        None
    }
    /// Refuses a stream that the backend cannot use.
    fn check_exec(&self, exec: &Exec) -> Result<()>;
    /// Mamba-2 step or extend.
    #[allow(clippy::too_many_arguments, reason = "what a launch consists of")]
    fn mamba2(
        &self,
        slots: &SlotsView,
        pool: &PoolView,
        layer: i64,
        mode: Mode,
        batch: &Batch,
        args: &Mamba2Args,
        exec: &Exec,
    ) -> Result<()>;
    /// Gated DeltaNet or Kimi Delta Attention step or extend.
    #[allow(clippy::too_many_arguments, reason = "what a launch consists of")]
    fn delta(
        &self,
        slots: &SlotsView,
        pool: &PoolView,
        layer: i64,
        mode: Mode,
        batch: &Batch,
        args: &DeltaArgs,
        exec: &Exec,
    ) -> Result<()>;
    /// Convolution step or extend.
    #[allow(clippy::too_many_arguments, reason = "what a launch consists of")]
    fn conv1d(
        &self,
        slots: &SlotsView,
        pool: &PoolView,
        layer: i64,
        mode: Mode,
        batch: &Batch,
        args: &ConvArgs,
        exec: &Exec,
    ) -> Result<()>;
    /// Looks for misuse by a call that comes next: rows that share a slot or ring, inputs that are not finite, guards that were
    /// overwritten. Only with checks on.
    #[allow(clippy::too_many_arguments, reason = "what a launch consists of")]
    fn inspect(
        &self,
        slots: &SlotsView,
        pool: &PoolView,
        layer: i64,
        batch: &Batch,
        inputs: &mut dyn Iterator<Item = Input>,
        exec: &Exec,
    ) -> Result<()>;
    /// Writes the guards of a pool that no work uses yet.
    fn write_guards(&self, slots: &SlotsView, pool: &PoolView) -> Result<()>;
    /// Moves positions.
    fn commit(&self, slots: &SlotsView, batch: &Batch, args: &CommitArgs, exec: &Exec) -> Result<()>;
    /// Starts requests.
    fn reset(
        &self,
        slots: &SlotsView,
        pools: &[Arc<PoolView>],
        lists: &PoolLists,
        args: &ResetArgs,
        exec: &Exec,
    ) -> Result<()>;
    /// Writes checkpoints; `position` is int64 per entry, or none: the ring's own.
    fn import(
        &self,
        slots: &SlotsView,
        pool: &PoolView,
        list: &List,
        position: Option<Address>,
        src: &StateTensor,
        exec: &Exec,
    ) -> Result<()>;
    /// Reads states at a held position; `at` is int64 per entry, or none: all committed.
    fn export(
        &self,
        slots: &SlotsView,
        pool: &PoolView,
        list: &List,
        at: Option<Address>,
        dst: &StateTensor,
        exec: &Exec,
    ) -> Result<()>;
    /// Takes back committed tokens; `n` and `done` are int32 per entry.
    fn rewind(
        &self,
        slots: &SlotsView,
        pools: &[Arc<PoolView>],
        lists: &PoolLists,
        n: Address,
        done: Option<Address>,
        exec: &Exec,
    ) -> Result<()>;
    /// Folds history into checkpoints.
    fn flush(
        &self,
        slots: &SlotsView,
        pools: &[Arc<PoolView>],
        lists: &PoolLists,
        args: &FlushArgs,
        exec: &Exec,
    ) -> Result<()>;
    /// Stores the states that the rows of a committed batch have just reached.
    fn snapshot(
        &self,
        slots: &SlotsView,
        pools: &[Arc<PoolView>],
        batch: &Batch,
        args: &SnapshotArgs,
        exec: &Exec,
    ) -> Result<()>;
    /// Copies slots and rings.
    fn copy(
        &self,
        slots: &SlotsView,
        pools: &[Arc<PoolView>],
        from: &PoolLists,
        to: &PoolLists,
        args: &CopyArgs,
        exec: &Exec,
    ) -> Result<()>;
    /// Copies ring states to `dst`, an array of [`Cursor`].
    fn read_cursors(&self, slots: &SlotsView, list: &List, dst: Address, exec: &Exec) -> Result<()>;
    /// Faults so far, and forgets them if asked.
    fn report(&self, slots: &SlotsView, clear: bool) -> Report;
    /// Counters so far.
    fn stats(&self, slots: &SlotsView) -> Result<Stats>;
}
