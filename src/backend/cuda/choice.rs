//! How steps of a few tokens are launched: blocks, warps, and what lies where in shared memory. Pure: what a step is like and what the device
//! has decide, and nothing that was measured while running.

use super::params::Pipeline;
use crate::replay::config::{DeltaKind, Family, PoolConfig, Readout, SlotsConfig};

// As `cuda/common/decode.cuh` has them; a test compares.
pub(super) const COLUMNS: i32 = 128;
const ROW_BYTES: i32 = COLUMNS * 2;
const SERVICES: i32 = 2;
const MAX_STAGES: i32 = 16;
const MAX_PLANES: i32 = 8;
const MAX_KEYS: i32 = 4;
pub(super) const MAX_HEADS: i32 = 4;
pub(super) const MAX_TOKENS: i32 = 8;
/// Parts of a head at most.
const MAX_PARTS: i32 = 4;
pub(super) const MAX_COLUMNS: i32 = 8;
/// Tokens of a step of Kimi Delta Attention: k and q of all of them are columns of one product.
pub(super) const MAX_KDA_TOKENS: i32 = MAX_COLUMNS / 2;
const PLANS: i32 = 3;
/// Items that are planned at a time, of steps of one token and of several.
const ITEMS_OF_SINGLE: i32 = 8;
const ITEMS_OF_SEVERAL: i32 = 4;
const WARP: i32 = 32;
const TILE: i32 = 16;
/// Records that a head can have.
pub(super) const MAX_HISTORY: i32 = 96;
/// Folders that a multiprocessor holds at least.
const LEAST_FOLDERS: i32 = 4;
/// Records that a folder takes at a time, and floats of one.
const FOLD_RECORDS: i32 = WARP;
const FOLD_STRIDE: i32 = 18;
/// Warps of a block at most: two blocks of half as many fit a multiprocessor.
const MAX_WARPS: i32 = 16;
/// Shared memory that a block takes beside what the launch asks for, and what the device keeps for itself.
const FIXED_BYTES: i32 = 97 << 7;

/// The next multiple.
pub(super) const fn up(value: i32, to: i32) -> i32 {
    (value + to - 1) / to * to
}

/// What a launch is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    /// Rows of the batch.
    pub rows: i64,
    /// Tokens of a row at most.
    pub tokens: i32,
    /// Records of a head at most.
    pub history: i32,
    /// Heads of a layer, and how many share their keys.
    pub heads: i32,
    /// See `heads`.
    pub sharing: i32,
    /// Rows of a head's state.
    pub channels: i32,
    /// Parts that a head may be worked on in, at most.
    pub parts: i32,
    /// Bytes of an element of the checkpoint that readouts look at.
    pub element_bytes: i32,
    /// Bytes of an element of values.
    pub value_bytes: i32,
    /// Rows that a token brings beside its values.
    pub token_rows: i32,
    /// Columns of products at most, a multiple of eight.
    pub columns: i32,
    /// Columns where there is one token.
    pub single_columns: i32,
    /// Columns of which a consumer keeps sums.
    pub sum_columns: i32,
    /// Whether decays are per column.
    pub kda: bool,
}

impl Shape {
    /// Of a step of up to `tokens` tokens in each of `rows` rows; has_z: outputs go through a gate. None where nothing is made for the family
    /// or for so many tokens.
    pub fn of(slots: &SlotsConfig, pool: &PoolConfig, (rows, tokens): (i64, i64), has_z: bool) -> Option<Shape> {
        let tokens = i32::try_from(tokens).ok().filter(|tokens| (1..=MAX_TOKENS).contains(tokens))?;
        let high = pool.readout == Readout::High;
        let state = pool.family.state()?;
        let shape = Shape {
            rows,
            tokens,
            history: slots.window + slots.min_rewind,
            heads: state.heads as i32,
            sharing: 1,
            channels: state.rows as i32,
            parts: 1,
            element_bytes: if high { 2 } else { 4 },
            value_bytes: 2,
            token_rows: i32::from(has_z),
            columns: MAX_COLUMNS,
            single_columns: 1,
            sum_columns: tokens,
            kda: false,
        };
        match &pool.family {
            Family::Mamba2(dims) => Some(Shape { sharing: dims.heads_per_group() as i32, ..shape }),
            Family::Delta(dims) => {
                let kda = dims.kind == DeltaKind::Kda;
                // Of k and q.
                let columns = if tokens <= MAX_COLUMNS / 2 { MAX_COLUMNS } else { 2 * MAX_COLUMNS };
                Some(Shape {
                    // Whole tiles. Of one token a head's records are few. With decays per column each part weighs its records anew: quarters of F32
                    // FULL took 1376 us where halves took 814 (H200, batch 256, four tokens, window 32).
                    parts: [MAX_PARTS, 2]
                        .into_iter()
                        .find(|parts| tokens > 1 && shape.channels % (parts * TILE) == 0 && !(kda && *parts > 2))
                        .unwrap_or(1),
                    // With decays of its own a head has products of its own.
                    sharing: if kda { 1 } else { (dims.v_heads / dims.qk_heads) as i32 },
                    // u is as precise as the readout; v comes with the token.
                    value_bytes: if high { 2 } else { 4 },
                    token_rows: 1,
                    columns,
                    single_columns: 2,
                    sum_columns: if tokens == 1 { 0 } else { columns },
                    kda,
                    ..shape
                })
            }
            Family::Conv1d(_) => None,
        }
    }

    /// Records that there is space for: those of a head, and the step's tokens.
    fn records(&self) -> i32 {
        self.history + self.tokens
    }

    /// Records that a stage has space for. With decays per column they are large, and the step's tokens are not among them.
    fn staged(&self) -> i32 {
        if self.kda { self.history } else { self.records() }
    }

    /// Bytes of a record's gates: its two, or the log decays of all columns.
    fn gate_bytes(&self) -> i32 {
        if self.kda { COLUMNS * 4 } else { 8 }
    }

    /// Bytes of what a checkpoint is read with, where that is not keys and queries as they came: of one token two parts of each column as precise
    /// as the readout; of several 32 bits of each element.
    fn part_bytes(&self) -> i32 {
        match (self.kda, self.tokens) {
            (false, _) => 0,
            (true, 1) => 2 * self.single_columns * COLUMNS * self.element_bytes,
            (true, _) => self.columns * COLUMNS * 4,
        }
    }

    /// Bytes of the products of an item's keys with its queries; or the log decays of its tokens, and the biases that they are made with.
    fn product_bytes(&self, products: i32) -> i32 {
        // A lane of a product has two columns.
        let columns = if self.tokens == 1 { 2 } else { self.columns };
        if self.kda { (self.tokens + 1) * COLUMNS * 4 } else { columns * products * 4 }
    }

    /// Bytes of a record that folders have decoded: its key, and where decays are per column factors and a bit for each.
    fn wide_bytes(&self) -> i32 {
        if self.kda { 2 * COLUMNS * 4 + COLUMNS / 8 } else { COLUMNS * 4 }
    }
}

/// A device, as far as launches ask.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Device {
    /// Compute capability times ten.
    pub arch: u32,
    /// Multiprocessors.
    pub multiprocessors: i32,
    /// Dynamic shared memory that a block can have.
    pub shared_bytes: i32,
}

/// What differs between architectures.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// Blocks that a multiprocessor is to hold.
    pub blocks: i32,
    /// Producers of a block, at most.
    pub producers: i32,
    /// Consumers that a multiprocessor is to hold, at most.
    pub consumers: i32,
    /// Folders that a multiprocessor is to hold, at most.
    pub folders: i32,
    /// Bytes of planes that are enough for a block, if there can be as many places for keys with them.
    pub plane_bytes: i32,
    /// See `plane_bytes`.
    pub keys: i32,
    /// Heads of an item at most.
    pub heads_per_item: i32,
    /// Items of two heads that a block is to have at least: otherwise items are of one. Where folds are long, `LONG_FOLDS` times as many.
    pub items_of_two: i32,
    /// The same of four heads.
    pub items_of_four: i32,
    /// Checkpoints that a block is to have space for, or heads are taken in halves or quarters, if they may be. They are, too, where each
    /// part can have a multiprocessor.
    pub whole_planes: i32,
}

/// Best on sm_90 of all that was tried there, for steps of one token and of several.
const SM_90: Tuning = Tuning {
    blocks: 1,
    producers: 2,
    consumers: 8,
    folders: 8,
    plane_bytes: 128 << 10,
    keys: 4,
    heads_per_item: MAX_HEADS,
    items_of_two: 4,
    items_of_four: 16,
    whole_planes: 3,
};
const SM_90_SEVERAL: Tuning = Tuning { consumers: 6, items_of_two: 8, items_of_four: 8, ..SM_90 };

/// A step of one token of a head with more channels than this, half of whose checkpoint is read, takes much longer where it folds: items are small for
/// longer, so that blocks have equally many that do.
const SHORT_FOLDS: i32 = 96;
const LONG_FOLDS: i32 = 6;

/// Checkpoints that a block is to have space for, if it can; those that each of several blocks of a multiprocessor is to have space for.
const PLANES: i32 = 4;
const SHARED_PLANES: i32 = 3;

/// Consumers that are at what follows a checkpoint, while others are at one: more than these wait (GDN with four checkpoints under way, SPLIT32 HIGH,
/// batch 256: six consumers 248 us, five 229).
const WAITING: i32 = 1;

/// Architectures that were measured, for steps of one token and of several.
const MEASURED: [(u32, [Tuning; 2]); 1] = [(90, [SM_90, SM_90_SEVERAL])];

/// Of all others, where nothing was measured: the numbers of sm_90.
const UNMEASURED: Tuning = SM_90;

#[cfg(feature = "bench")]
static EXPERIMENT: std::sync::OnceLock<Tuning> = std::sync::OnceLock::new();

impl Tuning {
    /// Of an architecture and steps of so many tokens.
    pub fn of(arch: u32, tokens: i32) -> Tuning {
        #[cfg(feature = "bench")]
        if let Some(tuning) = EXPERIMENT.get() {
            return *tuning;
        }
        MEASURED
            .iter()
            .find(|(measured, _)| *measured == arch)
            .map_or(UNMEASURED, |(_, [single, several])| if tokens == 1 { *single } else { *several })
    }
}

/// Experiments of `replayssm-bench`.
#[cfg(feature = "bench")]
impl Tuning {
    /// Takes the place of the table's for all launches of the process, once; the sentence says what is wrong with the numbers.
    pub fn try_out(self) -> Result<(), String> {
        self.check()?;
        EXPERIMENT.set(self).map_err(|_| "a process tries out one tuning".to_owned())
    }

    /// Numbers by name, as `blocks=2,consumers=8,heads-per-item=4,items-of-four=8`; those that are not named are sm_90's.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut tuning = SM_90;
        for part in text.split(',') {
            let (name, number) =
                part.split_once('=').ok_or_else(|| format!("{part} has no number; expected as blocks=2"))?;
            let place = match name {
                "blocks" => &mut tuning.blocks,
                "producers" => &mut tuning.producers,
                "consumers" => &mut tuning.consumers,
                "folders" => &mut tuning.folders,
                "plane-bytes" => &mut tuning.plane_bytes,
                "keys" => &mut tuning.keys,
                "heads-per-item" => &mut tuning.heads_per_item,
                "items-of-two" => &mut tuning.items_of_two,
                "items-of-four" => &mut tuning.items_of_four,
                "whole-planes" => &mut tuning.whole_planes,
                _ => {
                    return Err(format!(
                        "{name} is unknown; expected blocks, producers, consumers, folders, plane-bytes, keys, heads-per-item, \
                         items-of-two, items-of-four or whole-planes"
                    ));
                }
            };
            *place = number.parse().map_err(|_| format!("{name} is {number}; expected a whole number"))?;
        }
        tuning.check().map(|()| tuning)
    }

    fn check(&self) -> Result<(), String> {
        let within = |name: &str, number: i32, least: i32, most: i32| {
            let expected = || format!("{name} is {number}; expected a whole number from {least} to {most}");
            (least..=most).contains(&number).then_some(()).ok_or_else(expected)
        };
        within("blocks", self.blocks, 1, 2)?;
        within("producers", self.producers, 1, 2)?;
        within("consumers", self.consumers, self.blocks, MAX_STAGES)?;
        within("folders", self.folders, LEAST_FOLDERS, MAX_WARPS)?;
        within("plane-bytes", self.plane_bytes, 0, 1 << 18)?;
        within("keys", self.keys, 2, MAX_KEYS)?;
        within("items-of-two", self.items_of_two, 0, 1 << 16)?;
        within("items-of-four", self.items_of_four, 0, 1 << 16)?;
        within("whole-planes", self.whole_planes, 0, MAX_PLANES + 1)?;
        // Halves of it are tried.
        within("heads-per-item", self.heads_per_item, 1, MAX_HEADS)?;
        if !(self.heads_per_item as u32).is_power_of_two() {
            return Err(format!("heads-per-item is {}; expected 1, 2 or {MAX_HEADS}", self.heads_per_item));
        }
        Ok(())
    }
}

/// A launch: blocks, threads, shared memory, and what the kernel is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Choice {
    /// Blocks.
    pub blocks: i64,
    /// Blocks that share a multiprocessor, where there are so many.
    pub blocks_each: i32,
    /// Threads of a block.
    pub threads: u32,
    /// Dynamic shared memory of a block.
    pub shared_bytes: u32,
    /// The rest.
    pub pipeline: Pipeline,
}

impl Choice {
    /// A pure function of the shape and the device; none where the shape is too large.
    pub fn of(shape: &Shape, device: &Device, tuning: &Tuning) -> Option<Choice> {
        let mut chosen = None;
        for parts in [1, 2, MAX_PARTS].into_iter().filter(|&parts| parts <= shape.parts) {
            let of_parts = Shape {
                heads: parts * shape.heads,
                sharing: parts * shape.sharing,
                channels: shape.channels / parts,
                ..*shape
            };
            let choice = Choice::in_parts(&of_parts, parts, device, tuning);
            chosen = choice.or(chosen);
            // As few parts as suit, or else as many as there may be; more of them where each can have a multiprocessor.
            let items = shape.rows.saturating_mul(of_parts.heads.into());
            let suits = |choice: Choice| {
                choice.pipeline.planes >= tuning.whole_planes && items.saturating_mul(2) > device.multiprocessors.into()
            };
            if choice.is_some_and(suits) {
                break;
            }
        }
        chosen
    }

    /// The same of a shape whose heads are parts of heads.
    fn in_parts(shape: &Shape, parts: i32, device: &Device, tuning: &Tuning) -> Option<Choice> {
        let most = if shape.kda { MAX_KDA_TOKENS } else { MAX_TOKENS };
        if !(1..=most).contains(&shape.tokens) || shape.history > MAX_HISTORY || shape.channels % 8 != 0 {
            return None;
        }
        let records = shape.records();
        let history = up(records, TILE);
        let products = history + 4;
        let value_stride = shape.channels * shape.value_bytes;
        let plane_bytes = shape.channels * COLUMNS * shape.element_bytes;
        let plane_stride = up(plane_bytes, 128);
        let at_z = shape.staged() * value_stride;
        let at_gates = up(at_z + shape.token_rows * shape.tokens * value_stride, 16);
        let at_weights = up(at_gates + shape.staged() * shape.gate_bytes(), 16);
        // Of one token nothing is its own: it is a record as any other, and its columns stand next to each other.
        let is_single = shape.tokens == 1;
        let (columns, weights) = match (is_single, shape.kda) {
            (true, _) => (0, shape.single_columns * history),
            (false, false) => (shape.columns, history),
            // What records bring to columns are no products of two numbers.
            (false, true) => (shape.columns, shape.columns * history),
        };
        let weights = history + 4 + MAX_TOKENS + columns * MAX_TOKENS + weights;
        let stage_bytes = up(at_weights + weights * 4 + shape.part_bytes(), 128);
        let at_queries = records * ROW_BYTES;
        let at_norms = at_queries + shape.tokens * ROW_BYTES;
        let at_products = up(at_norms + (history + 2 * MAX_TOKENS) * 4, 16);
        let key_bytes = up(at_products + shape.product_bytes(products), 128);
        let items = if is_single { ITEMS_OF_SINGLE } else { ITEMS_OF_SEVERAL };
        let gates_bytes = up(PLANS * items * MAX_HEADS * shape.tokens * 8, 128);
        let wide_bytes = up(shape.history * shape.wide_bytes(), 16);
        let unit_bytes = FOLD_RECORDS * FOLD_STRIDE * 4;

        // Neighbouring columns of sums, of which a lane writes two, have no bank in common.
        let sums = up(shape.channels, TILE) + 4;
        let sum_columns = if is_single { shape.single_columns } else { shape.sum_columns };
        let sums_bytes = |consumers: i32| up(consumers * sum_columns * sums * 4, 128);
        // What stands behind the last item's keys; tiles of these are read whole, whatever that is.
        let behind_keys = |consumers: i32, folders: i32| {
            (gates_bytes + sums_bytes(consumers) + wide_bytes + folders * unit_bytes)
                .max(history * ROW_BYTES - key_bytes)
        };
        let fit = |blocks: i32, consumers: i32, folders: i32| {
            let bytes = ((device.shared_bytes + FIXED_BYTES) / blocks - FIXED_BYTES).min(device.shared_bytes)
                - behind_keys(consumers, folders);
            // Of one token a checkpoint is read before anything else: there is more space for the rest, of which each consumer has as many places.
            let planes = |stages: i32, keys: i32| {
                let planes = (bytes - stages * stage_bytes - keys * key_bytes) / plane_stride;
                let most = if is_single { stages.min(MAX_PLANES) } else { stages };
                if is_single || planes >= stages { planes.min(most) } else { 0 }
            };
            // Several places for keys, whose heads are at work or on their way: with two of them producers wait most of the time. More planes than
            // enough are worth less than these.
            let enough = (tuning.plane_bytes / plane_stride).clamp(2, MAX_PLANES);
            [2, 1]
                .into_iter()
                .map(|each| each * consumers)
                .filter(|&stages| stages <= if is_single { MAX_STAGES } else { MAX_PLANES })
                .flat_map(|stages| (2..=MAX_KEYS).map(move |keys| (stages, keys)))
                .map(|(stages, keys)| (planes(stages, keys), stages, keys))
                .filter(|&(planes, ..)| planes > 0)
                .max_by_key(|&(planes, stages, keys)| (planes.min(enough), keys.min(tuning.keys), stages, planes))
        };
        // Several items for each block, so that it need not wait for the first bytes of more than one.
        let resident = i64::from(device.multiprocessors * tuning.blocks);
        let mut heads_per_item = tuning.heads_per_item.min(MAX_HEADS);
        let long_folds = is_single && shape.element_bytes == 2 && shape.channels > SHORT_FOLDS;
        let items_of = |heads: i32| match heads {
            2 => tuning.items_of_two * if long_folds { LONG_FOLDS } else { 1 },
            _ => tuning.items_of_four,
        };
        let n_heads = shape.rows.saturating_mul(shape.heads.into());
        let fewer = |heads: i32| n_heads < i64::from(items_of(heads)) * resident * i64::from(heads);
        // Parts of a head share its keys in a block, unless each can have a multiprocessor.
        let least = if n_heads <= device.multiprocessors.into() { 1 } else { parts };
        heads_per_item = heads_per_item.max(least);
        while shape.sharing % heads_per_item != 0 || (heads_per_item > least && fewer(heads_per_item)) {
            heads_per_item /= 2;
        }
        // As many consumers as there can be with several planes; folders are the rest.
        let (blocks, producers, consumers, folders, (planes, stages, keys)) =
            (1..=tuning.blocks).rev().find_map(|blocks| {
                let warps = MAX_WARPS / blocks - SERVICES;
                let (most, least) = ((tuning.consumers / blocks).min(MAX_STAGES), LEAST_FOLDERS / blocks);
                let choose = |enough: i32, consumers: i32, producers: i32| {
                    let others = (tuning.folders / blocks).min(warps - producers - consumers);
                    (least..=others).rev().find_map(|folders| {
                        let places = fit(blocks, consumers, folders)?;
                        let (planes, stages, keys) = places;
                        // Planes, stages and places of keys of one producer are never another's.
                        let is_even = [planes, stages].iter().all(|n| n % (2 * heads_per_item) == 0) && keys % 2 == 0;
                        let suits = planes >= enough && consumers <= planes + WAITING && (producers == 1 || is_even);
                        suits.then_some((blocks, producers, consumers, folders, places))
                    })
                };
                let wanted = if blocks > 1 { SHARED_PLANES..=SHARED_PLANES } else { 1..=PLANES };
                wanted.rev().find_map(|enough| {
                    (1..=most).rev().find_map(|consumers| {
                        (1..=tuning.producers).rev().find_map(|producers| choose(enough, consumers, producers))
                    })
                })
            })?;
        let items_per_row = shape.heads / heads_per_item;
        let n_items = shape.rows.saturating_mul(items_per_row.into());
        let at_keys = planes * plane_stride + stages * stage_bytes;
        let at_own_gates = at_keys + keys * key_bytes;
        let at_sums = at_own_gates + gates_bytes;
        let at_wide = at_sums + sums_bytes(consumers);
        let pipeline = Pipeline {
            n_items,
            items_per_row,
            heads_per_item,
            planes,
            stages,
            keys,
            producers,
            consumers,
            folders,
            tokens: shape.tokens,
            history,
            columns,
            products,
            value_stride,
            plane_bytes,
            plane_stride,
            stage_bytes,
            at_stages: planes * plane_stride,
            at_z,
            at_gates,
            at_weights,
            at_keys,
            key_bytes,
            at_queries,
            at_norms,
            at_products,
            at_own_gates,
            at_sums,
            sum_columns,
            sums,
            at_wide,
            at_units: at_wide + wide_bytes,
            parts,
            channels: shape.channels,
            tiles: up(shape.channels, TILE) / TILE,
        };
        Some(Choice {
            blocks_each: blocks,
            blocks: n_items.min(i64::from(device.multiprocessors * blocks)),
            threads: ((consumers + folders + producers + SERVICES) * WARP) as u32,
            shared_bytes: (at_own_gates + behind_keys(consumers, folders)) as u32,
            pipeline,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;
    use crate::dtype::Dtype;
    use crate::replay::config::{DeltaDims, Format, HeadMap, Mamba2Dims, Schedule};

    /// Of the device's own words, and of the tests' shapes.
    const DECODE: &str = include_str!("../../../cuda/common/decode.cuh");
    const SOURCES: [&str; 2] =
        [include_str!("../../../cuda/mamba2/decode.cu"), include_str!("../../../cuda/delta/decode.cu")];

    /// Shared memory of a multiprocessor is that of a block and a KB more.
    const DEVICES: [(Device, i32); 2] = [
        (Device { arch: 90, multiprocessors: 132, shared_bytes: (228 << 10) - FIXED_BYTES }, 228 << 10),
        (Device { arch: 120, multiprocessors: 84, shared_bytes: (100 << 10) - FIXED_BYTES }, 100 << 10),
    ];

    /// Formats and readouts that there are kernels for.
    const WAYS: [(Format, Readout); 4] = [
        (Format::Split32, Readout::High),
        (Format::Bf16, Readout::High),
        (Format::Split32, Readout::Full),
        (Format::F32, Readout::Full),
    ];

    const fn mamba2(nheads: usize, headdim: usize, ngroups: usize) -> Family {
        Family::Mamba2(Mamba2Dims { nheads, headdim, dstate: 128, ngroups })
    }

    const fn delta(kind: DeltaKind, qk_heads: usize, v_heads: usize) -> Family {
        Family::Delta(DeltaDims { kind, qk_heads, v_heads, k: 128, v: 128, head_map: HeadMap::Grouped })
    }

    /// Of published models.
    const FAMILIES: [Family; 7] = [
        mamba2(96, 80, 8),
        mamba2(128, 64, 8),
        mamba2(256, 64, 8),
        mamba2(80, 64, 1),
        delta(DeltaKind::Gdn, 16, 32),
        delta(DeltaKind::Gdn, 16, 64),
        KDA,
    ];

    const KDA: Family = delta(DeltaKind::Kda, 32, 32);

    fn pool(family: &Family, (format, readout): (Format, Readout)) -> PoolConfig {
        let u_dtype = if readout == Readout::High { Dtype::Bf16 } else { Dtype::F32 };
        let (io, out) = (Dtype::Bf16, Dtype::Bf16);
        PoolConfig { family: family.clone(), n_layers: 1, io, out, format, readout, stochastic: false, u_dtype }
    }

    fn slots(window: i32, min_rewind: i32) -> SlotsConfig {
        let (n_slots, n_rings, max_step_tokens) = (1, 1, 256);
        SlotsConfig { n_slots, n_rings, window, max_step_tokens, min_rewind, schedule: Schedule::None, checks: false }
    }

    /// What a step comes to on a device.
    fn choice(
        family: &Family,
        way: (Format, Readout),
        rows: i64,
        tokens: i64,
        window: i32,
        device: &Device,
    ) -> Option<Choice> {
        let shape =
            Shape::of(&slots(window, 0), &pool(family, way), (rows, tokens), matches!(family, Family::Mamba2(_)))?;
        Choice::of(&shape, device, &Tuning::of(device.arch, shape.tokens))
    }

    /// All shapes, sizes and devices, of which a few do not fit the smaller one; calls `f` with those that do, and counts them.
    fn all(mut f: impl FnMut(&Family, &Shape, &Choice, i32)) -> [usize; 2] {
        let mut counts = [0; 2];
        for (family, way) in FAMILIES.iter().flat_map(|family| WAYS.map(|way| (family, way))) {
            for (rows, tokens) in [1, 8, 32, 128, 256, 512].into_iter().flat_map(|rows| [1, 4, 8].map(|t| (rows, t))) {
                for (window, has_z) in [(16, false), (32, true), (32, false), (64, true)] {
                    for (number, (device, on_multiprocessor)) in DEVICES.iter().enumerate() {
                        let shape = Shape::of(&slots(window, 0), &pool(family, way), (rows, tokens), has_z).unwrap();
                        let Some(choice) = Choice::of(&shape, device, &Tuning::of(device.arch, shape.tokens)) else {
                            continue;
                        };
                        assert!(*family != KDA || tokens <= MAX_KDA_TOKENS.into());
                        counts[number] += 1;
                        f(family, &shape, &choice, *on_multiprocessor);
                    }
                }
            }
        }
        counts
    }

    #[test]
    fn everything_fits_the_larger_device_and_the_kernels_limits() {
        let counts = all(|_, shape, choice, on_multiprocessor| {
            let Choice { blocks, blocks_each, threads, shared_bytes, pipeline: p } = *choice;
            assert!((1..=2).contains(&blocks_each) && blocks >= 1, "{choice:?}");
            assert!(blocks_each * (shared_bytes as i32 + FIXED_BYTES) <= on_multiprocessor, "{shape:?}: {choice:?}");
            assert!((1..=MAX_STAGES).contains(&p.stages) && (2..=MAX_KEYS).contains(&p.keys), "{choice:?}");
            // A plan's items are all that keys are there for.
            assert!(p.keys <= ITEMS_OF_SEVERAL);
            assert!((1..=MAX_STAGES).contains(&p.consumers), "{choice:?}");
            let is_even = [p.planes, p.stages].iter().all(|n| n % (2 * p.heads_per_item) == 0) && p.keys % 2 == 0;
            assert!(p.producers == 1 || is_even, "{choice:?}");
            assert!((1..=MAX_PLANES).contains(&p.planes) && p.planes <= p.stages, "{choice:?}");
            // Each consumer has stages of its own, as many as any other.
            assert!(p.stages % p.consumers == 0 && p.folders >= 1, "{choice:?}");
            assert_eq!(threads as i32, (p.producers + p.consumers + p.folders + SERVICES) * WARP);
            assert!(blocks_each * threads as i32 <= MAX_WARPS * WARP, "{choice:?}");
            assert!(p.heads_per_item <= MAX_HEADS && shape.sharing * p.parts % p.heads_per_item == 0, "{choice:?}");
            assert!(p.history >= shape.history + shape.tokens && p.history % TILE == 0);
            assert!(shape.history <= MAX_HISTORY);
        });
        assert!(counts[0] > counts[1] && counts[1] > 0, "{counts:?}");
    }

    /// With the library's own windows, on the larger device.
    #[test]
    fn usual_windows_fit() {
        let (device, _) = DEVICES[0];
        for (family, way) in FAMILIES.iter().flat_map(|family| WAYS.map(|way| (family, way))) {
            for (tokens, window) in [(1, 16), (4, 32), (8, 64)] {
                assert!(
                    choice(family, way, 8, tokens, window, &device).is_some() || (*family == KDA && tokens == 8),
                    "{family:?} {way:?}, {tokens} tokens"
                );
            }
        }
        // A head is brought while another is at work.
        let high = (Format::Split32, Readout::High);
        for (way, tokens, window) in
            [(high, 1, 16), (high, 1, 32), (high, 4, 32), ((Format::F32, Readout::Full), 1, 16)]
        {
            let choice = choice(&KDA, way, 256, tokens, window, &device).unwrap();
            assert!(choice.pipeline.planes >= 2, "{way:?}, {tokens} tokens: {choice:?}");
        }
    }

    #[test]
    fn nothing_in_shared_memory_overlaps() {
        all(|family, shape, choice, _| {
            let p = &choice.pipeline;
            let in_order = |what: &str, parts: &[(i32, i32, i32)], end: i32| {
                let mut before = 0;
                for &(at, bytes, alignment) in parts {
                    assert!(at >= before && at % alignment == 0, "{what} at {at}: {shape:?}: {p:?}");
                    before = at + bytes;
                }
                assert!(before <= end, "{what}: {shape:?}: {p:?}");
            };
            let is_delta = matches!(family, Family::Delta(_));
            let items = if shape.tokens == 1 { ITEMS_OF_SINGLE } else { ITEMS_OF_SEVERAL };
            let records = shape.history + shape.tokens;
            let staged = if shape.kda { shape.history } else { records };
            assert_eq!((p.value_stride % 16, p.stage_bytes % 128, p.key_bytes % 128), (0, 0, 0));
            // Elapsed: of each record, and 1 behind the last, four at a time; decays; what the step's tokens bring; what records weigh.
            let before = p.history + 4 + MAX_TOKENS;
            let brought = match (shape.tokens, shape.kda) {
                (1, _) => records * if is_delta { 2 } else { 1 } * 4,
                (_, false) => (shape.columns * MAX_TOKENS + p.history) * 4,
                (_, true) => (shape.columns * MAX_TOKENS + p.history * MAX_COLUMNS) * 4,
            };
            // Of decays per column: logs of records and of tokens, biases, factors and a word of bits for 32 of them; two parts of k and q.
            let [gates, token_gates, factors, parts] = match (shape.kda, shape.tokens) {
                (false, 1) => [records * 8, 2 * p.products * 4, 0, 0],
                (false, _) => [records * 8, shape.columns * p.products * 4, 0, 0],
                (true, 1) => [staged, 2, staged, shape.element_bytes].map(|rows| rows * COLUMNS * 4),
                (true, _) => [staged, shape.tokens + 1, staged, MAX_COLUMNS].map(|rows| rows * COLUMNS * 4),
            };
            let token_bytes = shape.token_rows * shape.tokens * p.value_stride;
            in_order(
                "a stage",
                &[
                    (0, staged * p.value_stride, 128),
                    (p.at_z, token_bytes, 16),
                    (p.at_gates, gates, 16),
                    (p.at_weights, before * 4 + brought + parts, 16),
                ],
                p.stage_bytes,
            );
            // Pairs of floats.
            assert_eq!((before % 2, p.products % 2), (0, 0));
            in_order(
                "keys",
                &[
                    (0, records * ROW_BYTES, 128),
                    (p.at_queries, shape.tokens * ROW_BYTES, 16),
                    (p.at_norms, (p.history + MAX_TOKENS) * 4, 4),
                    (p.at_products, token_gates, 16),
                ],
                p.key_bytes,
            );
            let columns = match (is_delta, shape.tokens) {
                (true, 1) => 2,
                (true, 2..=4) => MAX_COLUMNS,
                (true, _) => 2 * MAX_COLUMNS,
                (false, tokens) => tokens,
            };
            assert!(p.sum_columns >= columns);
            // Tiles of keys are read whole.
            assert!(p.at_keys + (p.keys - 1) * p.key_bytes + p.history * ROW_BYTES <= choice.shared_bytes as i32);
            // Tiles of sums are written whole.
            assert!(p.sums >= up(p.channels, TILE) && p.sums % 4 == 0);
            // Parts are whole tiles, and stand next to each other.
            assert!(p.parts * p.channels == shape.channels && (p.parts == 1 || p.channels % TILE == 0), "{choice:?}");
            assert!(p.tiles == up(p.channels, TILE) / TILE, "{choice:?}");
            in_order(
                "a block",
                &[
                    (0, p.planes * p.plane_stride, 128),
                    (p.at_stages, p.stages * p.stage_bytes, 128),
                    (p.at_keys, p.keys * p.key_bytes, 128),
                    (p.at_own_gates, PLANS * items * MAX_HEADS * shape.tokens * 8, 16),
                    (p.at_sums, p.consumers * p.sum_columns * p.sums * 4, 16),
                    (p.at_wide, shape.history * COLUMNS * 4 + factors + factors / 32, 16),
                    (p.at_units, p.folders * FOLD_RECORDS * FOLD_STRIDE * 4, 16),
                ],
                choice.shared_bytes as i32,
            );
        });
    }

    #[test]
    fn every_head_of_every_row_is_in_one_item_of_one_block() {
        all(|_, shape, choice, _| {
            let p = &choice.pipeline;
            assert_eq!(p.n_items, shape.rows * i64::from(p.items_per_row));
            assert_eq!(p.items_per_row * p.heads_per_item, shape.heads * p.parts);
            // As items_of_block counts them.
            let of_block = |block: i64| (p.n_items - block + choice.blocks - 1) / choice.blocks;
            assert_eq!((0..choice.blocks).map(of_block).sum::<i64>(), p.n_items);
            assert!(of_block(choice.blocks - 1) >= 1, "a block without work: {choice:?}");
            // As a delta rule's kernel numbers heads, tiled and not; Mamba-2's are in order.
            let key_heads = shape.heads / shape.sharing;
            let items_per_key = p.items_per_row / key_heads;
            for is_tiled in [false, true] {
                let mut seen = vec![0; shape.heads as usize];
                for (item, h) in (0..p.items_per_row).flat_map(|item| (0..p.heads_per_item).map(move |h| (item, h))) {
                    let (key, within) = (item / items_per_key, (item % items_per_key * p.heads_per_item + h) / p.parts);
                    let head = if is_tiled { key + within * key_heads } else { key * shape.sharing + within };
                    let part = item * p.heads_per_item + h;
                    assert!(is_tiled || head == part / p.parts);
                    seen[head as usize] += 1;
                }
                assert!(seen.iter().all(|&n| n == p.parts), "{seen:?}");
            }
        });
    }

    #[test]
    fn what_is_too_large_is_left_to_others() {
        let (device, _) = DEVICES[0];
        let high = (Format::Split32, Readout::High);
        let takes = |family: &Family, tokens, window| choice(family, high, 8, tokens, window, &device).is_some();
        let usual = &FAMILIES[1];
        assert!(takes(usual, 1, 16) && takes(usual, 8, MAX_HISTORY));
        assert!(!takes(usual, 0, 16) && !takes(usual, 9, 16), "tokens");
        assert!(!takes(usual, 1, MAX_HISTORY + 1), "history");
        assert!(takes(&mamba2(4, 24, 1), 1, 16) && !takes(&mamba2(4, 20, 1), 1, 16), "channels");
        assert!(takes(&KDA, 4, 16) && !takes(&KDA, 5, 16), "tokens of Kimi Delta Attention");
        let small = Device { shared_bytes: 16 << 10, ..device };
        assert!(choice(usual, high, 8, 1, 16, &small).is_none(), "shared memory");
        // Kept tokens are history as those of the window are.
        let shape = |min_rewind| Shape::of(&slots(64, min_rewind), &pool(usual, high), (8, 1), false).unwrap();
        let fits = |min_rewind| Choice::of(&shape(min_rewind), &device, &SM_90).is_some();
        assert!(fits(32) && !fits(33));
    }

    /// Blocks, threads, shared memory; planes, stages and keys; producers, consumers and folders; heads of an item: a change is meant, and measured.
    #[test]
    fn choices_of_real_shapes() {
        let [split, full] = [(Format::Split32, Readout::High), (Format::F32, Readout::Full)];
        let ((h, _), (b, _)) = (DEVICES[0], DEVICES[1]);
        let families = FAMILIES;
        let [nemotron_4b, nemotron_120b, qwen_122b, kimi] = [0, 1, 5, 6].map(|i| &families[i]);
        for (name, family, way, rows, tokens, window, device, wanted) in [
            ("120B, batch 256", nemotron_120b, split, 256, 1, 16, h, ([132, 512, 216960], [8, 16, 4], [2, 8, 4], 4)),
            (
                "120B, batch 256, F32 FULL",
                nemotron_120b,
                full,
                256,
                1,
                16,
                h,
                ([132, 512, 208512], [4, 10, 4], [1, 5, 8], 4),
            ),
            ("120B, batch 1", nemotron_120b, split, 1, 1, 16, h, ([128, 512, 216960], [8, 16, 4], [2, 8, 4], 1)),
            (
                "4B, batch 32, four tokens",
                nemotron_4b,
                split,
                32,
                4,
                32,
                h,
                ([132, 512, 219136], [5, 5, 3], [1, 5, 8], 2),
            ),
            (
                "122B, batch 128, four tokens",
                qwen_122b,
                split,
                128,
                4,
                32,
                h,
                ([132, 448, 217600], [3, 3, 3], [1, 3, 8], 4),
            ),
            (
                "122B, batch 256, four tokens, F32 FULL",
                qwen_122b,
                full,
                256,
                4,
                32,
                h,
                ([132, 448, 211456], [3, 3, 3], [1, 3, 8], 4),
            ),
            (
                "122B, batch 1, four tokens",
                qwen_122b,
                split,
                1,
                4,
                32,
                h,
                ([128, 512, 218752], [6, 6, 3], [1, 6, 7], 1),
            ),
            ("122B, batch 256", qwen_122b, split, 256, 1, 16, h, ([132, 512, 210560], [4, 5, 4], [1, 5, 8], 4)),
            ("120B, batch 64", nemotron_120b, split, 64, 1, 16, h, ([132, 512, 216960], [8, 16, 4], [2, 8, 4], 2)),
            ("122B, batch 64", qwen_122b, split, 64, 1, 16, h, ([132, 512, 210560], [4, 5, 4], [1, 5, 8], 1)),
            ("48B of Kimi, batch 256", kimi, split, 256, 1, 16, h, ([132, 480, 218240], [3, 4, 4], [1, 4, 8], 1)),
            (
                "120B, batch 256, a smaller device",
                nemotron_120b,
                split,
                256,
                1,
                16,
                b,
                ([84, 352, 89984], [3, 4, 2], [1, 4, 4], 4),
            ),
        ] {
            let c = choice(family, way, rows, tokens, window, &device).unwrap();
            let p = &c.pipeline;
            let [blocks, threads, shared] = [c.blocks, c.threads.into(), c.shared_bytes.into()];
            let places = [p.planes, p.stages, p.keys].map(i64::from);
            let warps = [p.producers, p.consumers, p.folders].map(i64::from);
            let found = ([blocks, threads, shared], places, warps, i64::from(p.heads_per_item));
            assert_eq!(found, wanted, "{name}");
        }
    }

    /// An architecture that nothing was measured on goes by the numbers of one.
    #[test]
    fn architectures_that_were_not_measured_have_a_tuning() {
        for (arch, tokens) in [(100, 1), (103, 8), (120, 1), (0, 4)] {
            assert_eq!(Tuning::of(arch, tokens), UNMEASURED);
        }
        assert_eq!(Tuning::of(90, 1), SM_90);
    }

    /// Constants of the kernels by name; those that are made of others are worked out.
    fn constants() -> HashMap<&'static str, i32> {
        let mut all = HashMap::from([("WARP", WARP), ("BLOCK", 32), ("TILE", TILE)]);
        let list = DECODE.split("enum : i32 {").nth(1).and_then(|rest| rest.split("};").next()).unwrap();
        for line in list.lines() {
            let Some((name, value)) =
                line.split("//").next().unwrap_or("").trim().trim_end_matches(',').split_once(" = ")
            else {
                continue;
            };
            let number = |word: &str| word.parse().ok().or_else(|| all.get(word).copied()).unwrap();
            let value = match value.split(' ').collect::<Vec<_>>()[..] {
                [one] => number(one),
                [left, "*", right] => number(left) * number(right),
                [left, "/", right] => number(left) / number(right),
                _ => panic!("{line}"),
            };
            all.insert(name, value);
        }
        all
    }

    #[test]
    fn the_kernels_have_the_same_limits() {
        let device = constants();
        for (name, here) in [
            ("COLUMNS", COLUMNS),
            ("ROW_BYTES", ROW_BYTES),
            ("SERVICES", SERVICES),
            ("MAX_STAGES", MAX_STAGES),
            ("MAX_PLANES", MAX_PLANES),
            ("MAX_KEYS", MAX_KEYS),
            ("MAX_HEADS", MAX_HEADS),
            ("ITEMS_OF_SINGLE", ITEMS_OF_SINGLE),
            ("ITEMS_OF_SEVERAL", ITEMS_OF_SEVERAL),
            ("PLANS", PLANS),
            ("MAX_TOKENS", MAX_TOKENS),
            ("MAX_COLUMNS", MAX_COLUMNS),
            ("MAX_HISTORY", MAX_HISTORY),
            ("FOLD_RECORDS", FOLD_RECORDS),
            ("FOLD_STRIDE", FOLD_STRIDE),
        ] {
            assert_eq!(device.get(name), Some(&here), "{name}");
        }
        let bounds = format!("__launch_bounds__({}, 1) replayssm_kernel", MAX_WARPS * WARP);
        assert!(SOURCES.iter().all(|source| source.contains(&bounds)), "{bounds}");
    }

    #[cfg(feature = "bench")]
    #[test]
    fn a_tuning_that_is_tried_out_is_checked() {
        let text = "blocks=1,producers=1,consumers=6,folders=5,plane-bytes=65536,keys=3,heads-per-item=2,items-of-two=3,items-of-four=4,\
                    whole-planes=2";
        let tuning = Tuning {
            blocks: 1,
            producers: 1,
            consumers: 6,
            folders: 5,
            plane_bytes: 1 << 16,
            keys: 3,
            heads_per_item: 2,
            items_of_two: 3,
            items_of_four: 4,
            whole_planes: 2,
        };
        assert_eq!(Tuning::parse(text), Ok(tuning));
        assert_eq!(Tuning::parse("blocks=1"), Ok(Tuning { blocks: 1, ..SM_90 }));
        for (text, sentence) in [
            ("blocks", "blocks has no number; expected as blocks=2"),
            ("blocks=many", "blocks is many; expected a whole number"),
            (
                "warps=4",
                "warps is unknown; expected blocks, producers, consumers, folders, plane-bytes, keys, heads-per-item, items-of-two, \
                 items-of-four or whole-planes",
            ),
            ("blocks=3", "blocks is 3; expected a whole number from 1 to 2"),
            ("producers=3", "producers is 3; expected a whole number from 1 to 2"),
            ("blocks=2,consumers=1", "consumers is 1; expected a whole number from 2 to 16"),
            ("folders=3", "folders is 3; expected a whole number from 4 to 16"),
            ("plane-bytes=-1", "plane-bytes is -1; expected a whole number from 0 to 262144"),
            ("keys=5", "keys is 5; expected a whole number from 2 to 4"),
            ("heads-per-item=3", "heads-per-item is 3; expected 1, 2 or 4"),
            ("items-of-two=-1", "items-of-two is -1; expected a whole number from 0 to 65536"),
            ("whole-planes=-1", "whole-planes is -1; expected a whole number from 0 to 9"),
        ] {
            assert_eq!(Tuning::parse(text), Err(sentence.to_owned()));
        }
    }
}
