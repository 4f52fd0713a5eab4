//! What a step will do, before it does it: how its work is cut up, when it folds, and which bytes it moves.
//!
//! Pure functions of a pool's configuration. When records are folded is asked of [`Rule`], sizes of [`layout`](super::layout); how
//! often a record is read follows the CPU kernels' loops, and a test holds it against what they count.

use std::collections::{BTreeMap, HashMap};
use std::ops::{AddAssign, Range};

use super::config::{
    CONV_TILE, DeltaDims, DeltaKind, Family, Format, HeadMap, PoolConfig, Readout, Schedule, SlotsConfig,
};
use super::layout::{Component, StateLayout, components, conv_rows};
use super::position::{Rule, StepView};
use super::step::padded;
use crate::error::{Error, Result};

/// Longer steps are serial.
pub const MAX_PARALLEL: i64 = 16;
/// Tokens whose outputs the parallel form computes together.
pub const BLOCK: usize = 8;
/// Records that a tile takes in at once, and that heads with one B or k share.
pub const CHUNK: usize = 16;
/// Tiles that a block of a device works on at once at most, a warp each.
pub const MAX_WARPS: usize = 8;
/// Work on less state than this stays on the calling thread.
pub const SHARED_BYTES: i64 = 128 << 10;
/// State that a thread takes at once, at most.
pub const RANGE_BYTES: i64 = 256 << 10;
/// Ranges of work items that each thread finds at least.
pub const RANGES_PER_THREAD: i64 = 4;

/// How many of a call's items a thread takes at once. Short ranges even out what differs between items, folds above all; long
/// ones decode what neighbours share only once.
pub fn range_length(items: i64, item_bytes: i64, n_threads: i32) -> i64 {
    let longest = RANGE_BYTES / item_bytes.max(1);
    longest.min(items / (RANGES_PER_THREAD * i64::from(n_threads))).max(1)
}

/// Whether a pool can be had and can take steps of `max_tokens` tokens: the error that creating it on slots made for such steps gives.
pub fn supports(pool: &PoolConfig, max_tokens: i32) -> Result<()> {
    let slots = SlotsConfig::checked(1, 1, 0, max_tokens, 0, 0)?;
    components(&slots, pool)?.iter().try_for_each(|component| component.total(&slots, pool).map(drop))
}

/// Bytes that move. Those of the largest pool and batch do not fit 64 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// Of checkpoint, loaded.
    pub checkpoint_read: u128,
    /// Of checkpoint, stored.
    pub checkpoint_written: u128,
    /// Of ring records, loaded.
    pub ring_read: u128,
    /// Of ring records, stored.
    pub ring_written: u128,
}

impl Traffic {
    /// All of them.
    pub fn total(&self) -> u128 {
        self.checkpoint_read + self.checkpoint_written + self.ring_read + self.ring_written
    }

    fn times(self, n: u128) -> Self {
        Traffic {
            checkpoint_read: self.checkpoint_read * n,
            checkpoint_written: self.checkpoint_written * n,
            ring_read: self.ring_read * n,
            ring_written: self.ring_written * n,
        }
    }
}

impl AddAssign for Traffic {
    fn add_assign(&mut self, other: Self) {
        self.checkpoint_read += other.checkpoint_read;
        self.checkpoint_written += other.checkpoint_written;
        self.ring_read += other.ring_read;
        self.ring_written += other.ring_written;
    }
}

/// How a step's work is cut up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Work {
    /// Heads of rows, or channel tiles of rows.
    pub items: i64,
    /// State of an item, or what a channel tile moves.
    pub item_bytes: i64,
    /// Neighbouring items that a thread takes at once.
    pub length: i64,
    /// How often that is; the last time they may be fewer.
    pub ranges: i64,
    /// Threads that can take part.
    pub threads: i64,
}

/// What one step of a batch will do, every row bringing as many tokens and all of them being accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StepPlan {
    /// Whether outputs come from the parallel form.
    pub parallel: bool,
    /// How the work is cut up.
    pub work: Work,
    /// A flush cycle: for each of its steps, records behind the checkpoint and how many of them are folded. One step for a convolution.
    pub cycle: Vec<(i64, i64)>,
    /// What all rows move in a whole flush cycle, in one layer.
    pub cycle_traffic: Traffic,
    /// What the plain update (an extend) of these tokens moves, all rows once, in one layer.
    pub plain_traffic: Traffic,
}

impl StepPlan {
    /// The plan of a step of `rows` rows of `tokens` tokens with `n_threads` threads.
    pub fn new(slots: &SlotsConfig, pool: &PoolConfig, rows: i64, tokens: i64, n_threads: i32) -> Result<Self> {
        if rows < 1 {
            return Err(Error::invalid("batch", rows, "1 row or more"));
        }
        if !(1..=i64::from(slots.max_step_tokens)).contains(&tokens) {
            let expected = format!("1 to {}, the longest row that the slots handle takes", slots.max_step_tokens);
            return Err(Error::invalid("tokens", tokens, expected));
        }
        let work = Work::new(pool, rows, tokens, n_threads);
        let records = Records::of(slots, pool)?;
        let n = rows as u128;
        let Some(layout) = StateLayout::of(pool) else {
            let width = match &pool.family {
                Family::Conv1d(c) => c.width,
                _ => 1,
            };
            let step = Traffic {
                ring_read: (width as u128 - 1) * u128::from(records.own),
                ring_written: tokens as u128 * u128::from(records.own),
                ..Traffic::default()
            };
            let kept = (tokens as u128).min(conv_rows(slots, width) as u128);
            let plain = Traffic { ring_written: kept * u128::from(records.own), ..step };
            return Ok(StepPlan {
                parallel: false,
                work,
                cycle: vec![(0, 0)],
                cycle_traffic: step.times(n),
                plain_traffic: plain.times(n),
            });
        };
        let state = (layout.dims.heads * layout.head_bytes()) as u128;
        let parallel = pool.readout != Readout::Exact && tokens <= MAX_PARALLEL;
        let cycle = cycle(&Rule::new(slots), tokens);
        let runs = work.runs(shared_by(&pool.family));
        let mut cycle_traffic = Traffic::default();
        for &(history, folds) in &cycle {
            let step = Step {
                pool,
                records: &records,
                parallel,
                tiles: layout.dims.tiles(),
                history: history as usize,
                folds: folds as usize,
                tokens: tokens as usize,
            };
            cycle_traffic += step.checkpoint(state).times(n);
            let reads = GroupReads::new(&step);
            let ring_read = runs.iter().map(|(&heads, &n)| u128::from(n) * u128::from(reads.of(heads))).sum();
            let ring_written = tokens as u128 * n * u128::from(records.written(pool) + records.shared_written(pool));
            cycle_traffic += Traffic { ring_read, ring_written, ..Traffic::default() };
        }
        let plain = Traffic { checkpoint_read: state, checkpoint_written: state, ..Traffic::default() };
        Ok(StepPlan { parallel, work, cycle, cycle_traffic, plain_traffic: plain.times(n) })
    }
}

/// Histories and folds of the steps of a flush cycle, as the rule has them once a request has settled.
fn cycle(rule: &Rule, tokens: i64) -> Vec<(i64, i64)> {
    let by_position = rule.schedule == Schedule::ByPosition;
    let (mut position, mut tag) = (0i64, 0i64);
    let (mut seen, mut steps) = (HashMap::new(), Vec::new());
    loop {
        let phase = (position - tag, if by_position { position.rem_euclid(rule.period()) } else { 0 });
        if let Some(begin) = seen.insert(phase, steps.len()) {
            return steps.split_off(begin);
        }
        let folds = rule.folds(StepView { position, tag, tokens, flush_before: 0, flush: false });
        steps.push((position - tag, folds));
        tag += folds;
        position += tokens;
    }
}

/// Neighbouring heads that share one group's B or one key head's k.
fn shared_by(family: &Family) -> i64 {
    match family {
        Family::Mamba2(d) => d.heads_per_group() as i64,
        Family::Delta(DeltaDims { head_map: HeadMap::Tiled, qk_heads, .. }) if *qk_heads > 1 => 1,
        Family::Delta(d) => (d.v_heads / d.qk_heads) as i64,
        Family::Conv1d(_) => 1,
    }
}

impl Work {
    fn new(pool: &PoolConfig, rows: i64, tokens: i64, n_threads: i32) -> Self {
        let (per_row, item_bytes) = match (&pool.family, StateLayout::of(pool)) {
            (Family::Conv1d(c), _) => (c.tiles() as i64, (CONV_TILE * pool.io.size() * c.width) as i64 * tokens),
            (_, Some(layout)) => (layout.dims.heads as i64, layout.head_bytes() as i64),
            (_, None) => (0, 0),
        };
        let items = rows * per_row;
        let is_shared = n_threads > 1 && items > 1 && items.saturating_mul(item_bytes) >= SHARED_BYTES;
        let length = if is_shared { range_length(items, item_bytes, n_threads) } else { items.max(1) };
        let ranges = ((items + length - 1) / length).max(1);
        Work { items, item_bytes, length, ranges, threads: ranges.min(n_threads.into()) }
    }

    /// Runs of neighbouring items that share a cache of their group, of `per_group` items: how many there are of each length. A range's
    /// end cuts a run in two.
    fn runs(&self, per_group: i64) -> BTreeMap<u64, u64> {
        // A single range cuts nothing. Otherwise, groups and ranges begin together again after as many items.
        let length = if self.length >= self.items { per_group } else { self.length };
        let period = per_group / gcd(per_group, length) * length;
        let mut runs = BTreeMap::new();
        for (end, times) in [(period, self.items / period), (self.items % period, 1)] {
            let mut from = 0;
            while from < end && times > 0 {
                let next = |length: i64| from - from % length + length;
                let to = next(per_group).min(next(length)).min(end);
                *runs.entry((to - from) as u64).or_default() += times as u64;
                from = to;
            }
        }
        runs
    }
}

fn gcd(a: i64, b: i64) -> i64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Bytes of a token's records in a ring, per head (or group, key head; a convolution: all channels), as the layout has them.
#[derive(Debug, Default)]
struct Records {
    /// x or v, or a convolution's inputs.
    own: u64,
    /// dt and A dt, or the log decays.
    gates: u64,
    beta: u64,
    u: u64,
    /// B, or k and its norm.
    shared: u64,
}

impl Records {
    fn of(slots: &SlotsConfig, pool: &PoolConfig) -> Result<Self> {
        let rows = Rule::new(slots).rows() as u64;
        let (heads, groups) = match &pool.family {
            Family::Mamba2(d) => (d.nheads, d.ngroups),
            Family::Delta(d) => (d.v_heads, d.qk_heads),
            Family::Conv1d(_) => (1, 1),
        };
        let mut records = Records::default();
        for layout in components(slots, pool)? {
            let of_head = layout.bytes / (rows * heads as u64);
            let of_group = layout.bytes / (rows * groups as u64);
            match layout.component {
                Component::Checkpoint | Component::Tags | Component::Window | Component::WindowTags => {}
                Component::X | Component::V => records.own = of_head,
                Component::Dt | Component::G => records.gates = of_head,
                Component::Beta => records.beta = of_head,
                Component::U => records.u = of_head,
                Component::B | Component::K | Component::KNorm => records.shared += of_group,
                Component::Conv => {
                    if let Family::Conv1d(c) = &pool.family {
                        records.own = layout.bytes / conv_rows(slots, c.width) as u64;
                    }
                }
            }
        }
        Ok(records)
    }

    /// What a token writes in all heads of a row.
    fn written(&self, pool: &PoolConfig) -> u64 {
        pool.family.state().map_or(0, |s| s.heads as u64) * (self.own + self.gates + self.beta + self.u)
    }

    /// What a token writes in all groups or key heads of a row.
    fn shared_written(&self, pool: &PoolConfig) -> u64 {
        let groups = match &pool.family {
            Family::Mamba2(d) => d.ngroups,
            Family::Delta(d) => d.qk_heads,
            Family::Conv1d(_) => 0,
        };
        groups as u64 * self.shared
    }
}

/// A chunk of records that is held near: which, by index since the checkpoint.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Held(Range<usize>);

impl Held {
    /// Takes in a range chunk by chunk; counts the records of history that have to be loaded.
    fn take_in(&mut self, range: Range<usize>, history: usize) -> u64 {
        let (mut first, mut loaded) = (range.start, 0);
        while first < range.end {
            let chunk = first / CHUNK * CHUNK;
            let end = range.end.min(chunk + CHUNK);
            if self.0.start != chunk {
                self.0 = chunk..chunk;
            }
            loaded += end.min(history).saturating_sub(self.0.end) as u64;
            self.0.end = self.0.end.max(end);
            first = end;
        }
        loaded
    }
}

/// What the heads of a group share while one thread goes through them.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Shared {
    held: Held,
    block: usize,
    multiplied: bool,
}

impl Shared {
    fn see(&mut self, block: usize) {
        if self.block != block {
            (self.block, self.multiplied) = (block, false);
        }
    }

    /// Products of a block's tokens with all records before them.
    fn multiply(&mut self, end: usize, history: usize) -> u64 {
        if std::mem::replace(&mut self.multiplied, true) { 0 } else { self.held.take_in(0..end, history) }
    }
}

/// Ring bytes that the heads of a group load, one after the other, until what they share repeats itself.
struct GroupReads {
    heads: Vec<u64>,
    /// The head after the last one loads what this one does.
    repeats: usize,
}

impl GroupReads {
    fn new(step: &Step<'_>) -> Self {
        let mut shared = Shared::default();
        let (mut before, mut heads) = (Vec::new(), Vec::new());
        loop {
            if let Some(repeats) = before.iter().position(|state| *state == shared) {
                return GroupReads { heads, repeats };
            }
            before.push(shared.clone());
            heads.push(step.head(&mut shared));
        }
    }

    /// What the first `n` heads load together.
    fn of(&self, n: u64) -> u64 {
        let (first, again) = self.heads.split_at(self.repeats.min(self.heads.len()));
        let some = |heads: &[u64], n: u64| heads.iter().take(n as usize).sum::<u64>();
        let Some(left) = n.checked_sub(first.len() as u64) else { return some(first, n) };
        let period = again.len() as u64;
        some(first, n) + left / period * some(again, period) + some(again, left % period)
    }
}

/// One step of one row.
struct Step<'a> {
    pool: &'a PoolConfig,
    records: &'a Records,
    parallel: bool,
    tiles: usize,
    history: usize,
    folds: usize,
    tokens: usize,
}

impl Step<'_> {
    /// Blocks of tokens of the parallel form: first and number.
    fn blocks(&self) -> impl Iterator<Item = (usize, usize)> {
        (0..self.tokens).step_by(BLOCK).map(|first| (first, (self.tokens - first).min(BLOCK)))
    }

    /// Checkpoint bytes of a row whose state has `state` bytes.
    fn checkpoint(&self, state: u128) -> Traffic {
        let folds = u128::from(self.folds > 0);
        // A tile that was folded is still near when the first token reads it, and not counted again.
        let read = if self.parallel {
            let seen = match (self.pool.format, self.pool.readout) {
                (Format::Split32, Readout::High) => state / 2,
                _ => state,
            };
            folds * state + (self.blocks().count() as u128 - folds) * seen
        } else {
            state
        };
        Traffic { checkpoint_read: read, checkpoint_written: folds * state, ..Traffic::default() }
    }

    /// Ring bytes that the next head of a group loads.
    fn head(&self, shared: &mut Shared) -> u64 {
        let (history, folds, records) = (self.history, self.folds, self.records);
        let kept = (history - folds) as u64;
        let is_delta = matches!(self.pool.family, Family::Delta(_));
        let is_kda = matches!(&self.pool.family, Family::Delta(d) if d.kind == DeltaKind::Kda);
        // Gates (and betas) that a delta rule's tiles share; Mamba-2 loads all of a head's gates at its beginning.
        let (mut own, mut gates) = (Held::default(), 0);
        let mut loaded = 0;
        let mut bytes = if is_delta { 0 } else { history as u64 * records.gates };
        let mut take_in = |shared: &mut Shared, range: Range<usize>| {
            if is_delta {
                gates += own.take_in(range.clone(), history);
            }
            shared.held.take_in(range, history)
        };
        if self.parallel {
            for (block, n) in self.blocks() {
                shared.see(block);
                if is_delta && !is_kda {
                    loaded += shared.multiply(history + block + n, history);
                }
                if block == 0 && folds > 0 {
                    loaded += (0..self.tiles).map(|_| take_in(shared, 0..folds)).sum::<u64>();
                    bytes += folds as u64 * records.own;
                }
                if is_kda {
                    loaded += n as u64 * kept;
                    bytes += n as u64 * kept * records.gates;
                } else if is_delta {
                    bytes += kept * records.gates;
                } else {
                    loaded += shared.multiply(history + block + n, history);
                }
                bytes += kept * if is_delta { records.u } else { records.own };
            }
        } else {
            for _ in 0..self.tiles {
                if folds > 0 {
                    loaded += take_in(shared, 0..folds);
                }
                let mut from = folds;
                for t in 0..self.tokens {
                    if t < BLOCK {
                        shared.see(0);
                    }
                    loaded += take_in(shared, from..history + t + 1);
                    from = history + t + 1;
                }
            }
            bytes += history as u64 * records.own;
        }
        bytes + gates * (records.gates + records.beta) + loaded * records.shared
    }
}

/// What makes steps of this pool slower than they could be on the processor or on a device, a sentence each.
pub fn warnings(slots: &SlotsConfig, pool: &PoolConfig, on_device: bool) -> Vec<String> {
    let Some(state) = pool.family.state() else { return Vec::new() };
    let name = if matches!(pool.family, Family::Mamba2(_)) { "dstate" } else { "K" };
    let mut list = Vec::new();
    if on_device {
        if !state.columns.is_multiple_of(8) {
            list.push(format!(
                "{name} is {}, not a multiple of 8: rows of the checkpoint are not read 16 bytes at a time, which is slower.",
                state.columns
            ));
        }
    } else if padded(state.columns) != state.columns {
        list.push(format!(
            "{name} is {}, not a multiple of 32: the last block of each row is computed on a copy padded to 32 columns, which is slower.",
            state.columns
        ));
    }
    if pool.readout != Readout::Exact && i64::from(slots.max_step_tokens) > MAX_PARALLEL {
        list.push(format!(
            "max_step_tokens is {}: steps of more than {MAX_PARALLEL} tokens take them one after the other whatever the readout, which is slower.",
            slots.max_step_tokens
        ));
    }
    if slots.window < 2 * slots.max_step_tokens {
        list.push(format!(
            "window is {}, less than twice max_step_tokens, which is {}: steps of so many accepted tokens rewrite the checkpoint every time.",
            slots.window, slots.max_step_tokens
        ));
    }
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_are_cut_by_groups_and_by_ranges() {
        for (items, per_group, range) in
            [(12, 3, 12), (12, 3, 3), (12, 3, 5), (30, 5, 4), (10, 10, 3), (7, 1, 3), (40, 40, 7)]
        {
            let ranges = (items + range - 1) / range;
            let work = Work { items, item_bytes: 1, length: range, ranges, threads: 1 };
            let mut lengths = BTreeMap::new();
            let mut length = 0u64;
            for item in 0..items {
                length += 1;
                let cut = (item + 1) % range == 0 || item + 1 == items;
                if (item + 1) % per_group == 0 || cut {
                    *lengths.entry(length).or_insert(0u64) += 1;
                    length = 0;
                }
            }
            assert_eq!(work.runs(per_group), lengths, "{items} items, groups of {per_group}, ranges of {range}");
        }
    }

    #[test]
    fn the_largest_pool_and_batch_have_a_plan() {
        let slots = SlotsConfig::checked(1, 1, 256, 256, 256, 1).unwrap();
        let pool = crate::replay::config::PoolFields {
            family: 3,
            n_layers: 1 << 20,
            io: 1,
            format: 1,
            readout: 2,
            delta: [1, 1 << 20, 256, 256],
            ..Default::default()
        };
        let pool = PoolConfig::checked(&pool).unwrap();
        for (tokens, threads) in [(1, 1), (16, 1024), (256, 1024)] {
            let plan = StepPlan::new(&slots, &pool, i32::MAX.into(), tokens, threads).unwrap();
            assert!(plan.cycle_traffic.total() > u64::MAX.into());
        }
    }

    /// A million runs are counted once, and not again in each step of the cycle.
    #[test]
    fn groups_that_no_range_fits_have_a_plan_in_no_time() {
        let slots = SlotsConfig::checked(1, 1, 256, 1, 0, 0).unwrap();
        let pool = crate::replay::config::PoolFields {
            family: 1,
            n_layers: 1,
            io: 1,
            nheads: 1_048_573,
            headdim: 1,
            dstate: 1,
            ngroups: 1,
            ..Default::default()
        };
        let pool = PoolConfig::checked(&pool).unwrap();
        let begin = std::time::Instant::now();
        let plan = StepPlan::new(&slots, &pool, 1 << 30, 1, 2).unwrap();
        assert_eq!((plan.cycle.len(), plan.work.length), (256, 65536));
        assert!(begin.elapsed().as_secs() < 15, "{:?}", begin.elapsed());
    }

    #[test]
    fn warnings_are_true_of_the_backend() {
        let slots = SlotsConfig::checked(1, 1, 16, 1, 0, 0).unwrap();
        for (columns, on_cpu, on_device) in
            [(64, "", ""), (40, "padded to 32 columns", ""), (36, "padded to 32", "16 bytes")]
        {
            let pool = crate::replay::config::PoolFields {
                family: 3,
                n_layers: 1,
                io: 1,
                format: 1,
                readout: 2,
                delta: [1, 1, columns, 64],
                ..Default::default()
            };
            let pool = PoolConfig::checked(&pool).unwrap();
            for (said, is_device) in [(on_cpu, false), (on_device, true)] {
                let list = warnings(&slots, &pool, is_device).concat();
                assert_eq!(
                    (list.contains(said), list.is_empty()),
                    (true, said.is_empty()),
                    "{columns} columns: {list}"
                );
            }
        }
    }

    #[test]
    fn a_cycle_is_a_whole_number_of_windows() {
        let rule = |window, keep, max_step_tokens, schedule| Rule { window, keep, max_step_tokens, schedule };
        let folds = |rule: &Rule, tokens| {
            let cycle = cycle(rule, tokens);
            (cycle.len(), cycle.iter().filter(|(_, folds)| *folds > 0).count(), cycle.iter().map(|c| c.1).sum::<i64>())
        };
        assert_eq!(folds(&rule(16, 0, 1, Schedule::None), 1), (16, 1, 16));
        assert_eq!(folds(&rule(16, 3, 4, Schedule::Staggered), 3), (5, 1, 15));
        assert_eq!(folds(&rule(16, 0, 4, Schedule::ByPosition), 4), (13, 4, 52));
        assert_eq!(folds(&rule(4, 0, 4, Schedule::None), 4), (1, 1, 4));
    }
}
