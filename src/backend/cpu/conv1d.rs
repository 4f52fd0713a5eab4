//! The depthwise causal convolution in front of a recurrent layer: step and extend.
//!
//! `out_t = silu(bias + sum_i w_i x_{t - width + 1 + i})`, an fma chain from the bias, oldest tap first. The ring keeps raw inputs, so
//! a window at any held position is just `width - 1` of its rows, and taking tokens back costs nothing.
//!
//! A work item is 128 channels of a row, which have a tag of their own: the lowest position whose window the ring still
//! holds.

use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use super::Cpu;
use super::counters::{Counters, Place, Tally};
use super::isa::dispatch;
use super::raw;
use super::rows::{Row, Span, position, resolve};
use crate::replay::config::{CONV_TILE, ConvDims, Family};
use crate::replay::launch::{Address, Batch, ConvArgs, Exec, Mode, PoolView, SlotsView, Tensor, fault};
use crate::replay::layout::{Component, conv_rows};
use crate::replay::numerics::silu;

/// The ring of one layer of a convolution.
#[derive(Clone, Copy)]
pub(super) struct ConvRing<'a> {
    pub(super) dims: &'a ConvDims,
    rows: i64,
    io: usize,
    data: Address,
    tags: Address,
}

impl<'a> ConvRing<'a> {
    pub(super) fn new(slots: &SlotsView, pool: &'a PoolView, dims: &'a ConvDims, layer: i64, ring: i64) -> Self {
        ConvRing {
            dims,
            rows: conv_rows(&slots.config, dims.width) as i64,
            io: pool.config.io.size(),
            data: pool.part(Component::Conv, layer, ring),
            tags: pool.part(Component::Tags, layer, ring),
        }
    }

    /// Channels of a tile.
    pub(super) fn tile(&self, tile: usize) -> Range<usize> {
        tile * CONV_TILE..((tile + 1) * CONV_TILE).min(self.dims.channels)
    }

    /// Address of channel `channel` of the record of token `position`.
    #[inline(always)]
    pub(super) fn at(&self, position: i64, channel: usize) -> Address {
        let row = position.rem_euclid(self.rows) as usize;
        self.data.offset(((row * self.dims.channels + channel) * self.io) as i64)
    }

    pub(super) fn tag(&self, tile: usize) -> i64 {
        // SAFETY: the tags of this layer and ring have one per tile.
        unsafe { raw::tag(self.tags.offset(tile as i64 * 8)) }.load(Relaxed)
    }

    pub(super) fn set_tag(&self, tile: usize, tag: i64) {
        // SAFETY: the tags of this layer and ring have one per tile.
        unsafe { raw::tag(self.tags.offset(tile as i64 * 8)) }.store(tag, Relaxed);
    }
}

/// Tag of a slot that holds no window.
pub(super) const NO_WINDOW: i64 = -1;

/// The window of a checkpoint without a ring: of one layer and slot.
#[derive(Clone, Copy)]
pub(super) struct StoredWindow {
    channels: usize,
    io: usize,
    data: Address,
    tags: Address,
}

impl StoredWindow {
    pub(super) fn new(pool: &PoolView, dims: &ConvDims, layer: i64, slot: i64) -> Self {
        StoredWindow {
            channels: dims.channels,
            io: pool.config.io.size(),
            data: pool.part(Component::Window, layer, slot),
            tags: pool.part(Component::WindowTags, layer, slot),
        }
    }

    /// Address of a channel of tap `tap`, of which 0 is the oldest.
    pub(super) fn at(&self, tap: usize, channel: usize) -> Address {
        self.data.offset(((tap * self.channels + channel) * self.io) as i64)
    }

    pub(super) fn tag(&self, tile: usize) -> i64 {
        // SAFETY: the tags of this layer and slot have one per tile.
        unsafe { raw::tag(self.tags.offset(tile as i64 * 8)) }.load(Relaxed)
    }

    pub(super) fn set_tag(&self, tile: usize, tag: i64) {
        // SAFETY: the tags of this layer and slot have one per tile.
        unsafe { raw::tag(self.tags.offset(tile as i64 * 8)) }.store(tag, Relaxed);
    }
}

struct Kernel<'a> {
    slots: &'a SlotsView,
    pool: &'a PoolView,
    dims: &'a ConvDims,
    layer: i64,
    mode: Mode,
    batch: &'a Batch,
    args: &'a ConvArgs,
}

/// Runs a call's share.
#[allow(clippy::too_many_arguments, reason = "the backend trait's own arguments")]
pub(super) fn run(
    cpu: &Cpu,
    slots: &SlotsView,
    pool: &PoolView,
    layer: i64,
    mode: Mode,
    batch: &Batch,
    args: &ConvArgs,
    exec: &Exec,
) {
    let Family::Conv1d(dims) = &pool.config.family else { return };
    let kernel = &Kernel { slots, pool, dims, layer, mode, batch, args };
    let tiles = dims.tiles() as i64;
    let bytes = (CONV_TILE * pool.config.io.size() * dims.width) as i64 * batch.max_tokens.min(1 << 20);
    cpu.for_each(exec, batch.n_rows * tiles, bytes, |item| {
        let (row, tile) = (item / tiles, (item % tiles) as usize);
        dispatch!(cpu.isa, work; kernel: &Kernel<'_>, row: i64, tile: usize);
    });
}

#[inline(always)]
fn work(kernel: &Kernel<'_>, row: i64, tile: usize) {
    let mut tally = Tally::default();
    kernel.tile(row, tile, &mut tally);
    Counters::of(kernel.slots).add(&tally);
}

impl Kernel<'_> {
    /// Runs of a channel range that lie in one section: section and channels.
    fn pieces(&self, channels: Range<usize>) -> impl Iterator<Item = (usize, Range<usize>)> + '_ {
        self.dims.section_starts.windows(2).enumerate().filter_map(move |(section, ends)| {
            let (&begin, &end) = (ends.first()?, ends.last()?);
            let piece = channels.start.max(begin)..channels.end.min(end);
            (!piece.is_empty()).then_some((section, piece))
        })
    }

    /// Address of a piece of a token's channels in a caller's tensor.
    #[inline(always)]
    fn at(&self, tensor: &Tensor, span: &Span, t: i64, section: usize, channel: usize) -> Address {
        let begin = self.dims.section_starts.get(section).copied().unwrap_or(0);
        span.at(tensor, t, section as i64).offset(((channel - begin) * tensor.dtype.size()) as i64)
    }

    fn zero_outputs(&self, span: &Span, channels: Range<usize>) {
        let zeros = [0f32; CONV_TILE];
        for t in 0..span.len {
            for (section, piece) in self.pieces(channels.clone()) {
                let to = self.at(&self.args.out, span, t, section, piece.start);
                if let Some(zeros) = zeros.get(..piece.len()) {
                    // SAFETY: a part of the caller's out, inside the extents that were checked.
                    unsafe { raw::store(to, self.args.out.dtype, zeros) };
                }
            }
        }
    }

    #[inline(always)]
    fn tile(&self, row: i64, tile: usize, tally: &mut Tally) {
        let (slots, batch, args) = (self.slots, self.batch, self.args);
        let io = self.pool.config.io;
        let channels = tile * CONV_TILE..((tile + 1) * CONV_TILE).min(self.dims.channels);
        let (span, ring_id) = match resolve(slots, batch, row, self.pool.index, self.layer, tile == 0) {
            Row::Null(span) => {
                if !batch.keep_null_outputs {
                    self.zero_outputs(&span, channels);
                }
                return;
            }
            Row::Live { span, ring, .. } => (span, ring),
        };
        if span.len == 0 {
            return;
        }
        let position = position(slots, ring_id);
        let ring = ConvRing::new(slots, self.pool, self.dims, self.layer, ring_id);
        let tag = ring.tag(tile);
        if !slots.rule.conv_tag_is_valid(position, tag) {
            let place = Place { id: ring_id, row, pool: self.pool.index, layer: self.layer };
            Counters::of(slots).fault(fault::POSITION, place);
            self.zero_outputs(&span, channels);
            return;
        }
        let width = self.dims.width;
        let n = channels.len();
        // Taps of this tile, tap-major.
        let mut taps = [[0f32; CONV_TILE]; 4];
        let mut bias = [0f32; CONV_TILE];
        for (i, channel) in channels.clone().enumerate() {
            let mut w = [0f32; 4];
            if let Some(w) = w.get_mut(..width) {
                // SAFETY: a row of the caller's weight [channels, width].
                unsafe { raw::load(args.weight.at(0, 0, channel as i64), args.weight.dtype, w) };
            }
            for (tap, &w) in taps.iter_mut().zip(&w) {
                if let Some(tap) = tap.get_mut(i) {
                    *tap = w;
                }
            }
            if let (Some(b), Some(source)) = (bias.get_mut(i), &args.bias) {
                // SAFETY: an element of the caller's bias [channels].
                *b = unsafe { raw::load_one(source.at(0, 0, channel as i64), source.dtype) };
            }
        }
        // The window slides through registers: entry width - 1 is the token at hand.
        let mut window = [[0f32; CONV_TILE]; 4];
        for (i, entry) in window.iter_mut().enumerate().take(width - 1) {
            let p = position - (width as i64 - 1) + i as i64;
            tally.ring_read += (n * ring.io) as u64;
            if let Some(entry) = entry.get_mut(..n) {
                // SAFETY: a part of a ring row.
                unsafe { raw::load(ring.at(p, channels.start), io, entry) };
            }
        }
        let first_kept = match self.mode {
            Mode::Step => 0,
            // Older tokens would be overwritten by newer ones of this very call.
            Mode::Extend => span.len - ring.rows.min(span.len),
        };
        for t in 0..span.len {
            for (section, piece) in self.pieces(channels.clone()) {
                let offset = piece.start - channels.start;
                let from = self.at(&args.x, &span, t, section, piece.start);
                if let Some(entry) = window.get_mut(width - 1).and_then(|w| w.get_mut(offset..offset + piece.len())) {
                    // SAFETY: a part of the caller's x, inside the extents that were checked.
                    unsafe { raw::load(from, io, entry) };
                }
                if t >= first_kept {
                    let bytes = piece.len() * ring.io;
                    tally.ring_written += bytes as u64;
                    // SAFETY: from the caller's x into a ring row that no held window needs.
                    unsafe { raw::copy(from, ring.at(position + t, piece.start), bytes) };
                }
            }
            let mut y = bias;
            for (entry, taps) in window.iter().zip(&taps).take(width) {
                for ((y, &x), &w) in y.iter_mut().zip(entry).zip(taps) {
                    *y = w.mul_add(x, *y);
                }
            }
            if args.silu {
                for y in &mut y {
                    *y = silu(*y);
                }
            }
            for (section, piece) in self.pieces(channels.clone()) {
                let offset = piece.start - channels.start;
                let to = self.at(&args.out, &span, t, section, piece.start);
                if let Some(y) = y.get(offset..offset + piece.len()) {
                    // SAFETY: a part of the caller's out, inside the extents that were checked; it may be the x that
                    // was just read.
                    unsafe { raw::store(to, args.out.dtype, y) };
                }
            }
            if let Some(window) = window.get_mut(..width) {
                window.rotate_left(1);
            }
        }
        let held = match self.mode {
            Mode::Step => slots.rule.conv_held_from(position, span.len),
            Mode::Extend => {
                // An extend cannot be taken back, but for the tail, and that as far as the ring reaches.
                let reach = slots.rule.keep + slots.rule.max_step_tokens;
                position + span.len - batch.keep_tail.min(span.len).min(reach)
            }
        };
        ring.set_tag(tile, held.max(tag));
    }
}
