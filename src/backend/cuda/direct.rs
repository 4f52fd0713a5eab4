//! Launches of steps of a few tokens where each head has a block of its own: `cuda/common/direct.cuh`. What they cannot take, the pipeline or the
//! parallel form does.

use std::cell::Cell;

use super::choice::{COLUMNS, MAX_COLUMNS, MAX_TOKENS, Shape, up};
use super::decode::{self, delta_is_aligned, mamba2_is_aligned};
use super::instances::{Key, Work};
use super::params::{DeltaDirectParams, DeltaParams, Direct, Mamba2DirectParams, Mamba2Params, Params, State};
use super::{Cuda, single};
use crate::error::Result;
use crate::replay::config::{Family, PoolConfig, SlotsConfig};
use crate::replay::launch::{Batch, DeltaArgs, Exec, Mamba2Args, PoolView, SlotsView};
use crate::replay::plan::MAX_WARPS;
use crate::replay::position::Rule;

// As `cuda/common/direct.cuh` has them; a test compares.
const KEY_STRIDE: i32 = COLUMNS * 2 + 16;
const SUM_STRIDE: i32 = TILE + 4;
const TILE: i32 = 16;
const WARP: i32 = 32;
/// Tokens of which k and q are columns of one product, and warps of a block where there are no more.
const FEW_TOKENS: i32 = 4;
const FEW_WARPS: i32 = 5;
/// Warps of a block, at least, where decays are per column: what it does once for all of its tiles is most of its work.
const KDA_WARPS: i32 = 4;
const LOG_STRIDE: i32 = COLUMNS * 4 + 16;
/// Rows of a ring.
const MAX_ROWS: i32 = 8 * TILE;

/// Which kernels are to take steps of a few tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preferred {
    /// Those that are faster on the device.
    Faster,
    /// The pipeline, wherever it can.
    Pipeline,
    /// A block a head, wherever it can.
    Direct,
    /// The same, which waits until it knows which rows of a ring it needs.
    DirectLate,
}

/// Tiles of all rows, at most, where all of a ring is brought before it is known what is needed of it.
const RING_TILES: i64 = 8192;

/// Tiles of all rows up to which a block a head is faster than the pipeline. Measured on an H200 (Mamba-2 128 heads of 64 x 128, GDN 16/64 and
/// 16/32 heads of 128 x 128, batches of 1 to 256); these numbers stand for other devices.
fn most_tiles(shape: &Shape) -> i64 {
    match (shape.tokens, shape.element_bytes) {
        (1, _) => 2048,
        (2, _) | (3..=4, 2) => 16384,
        // Of several tokens FULL has few heads in flight in a pipeline, and so has everything with more tokens.
        _ => i64::MAX,
    }
}

thread_local! {
    /// For tests, which are to see all of them at work.
    static PREFERRED: Cell<Preferred> = const { Cell::new(Preferred::Faster) };
    static LAUNCHES: Cell<u64> = const { Cell::new(0) };
}

/// What the calling thread's launches are to prefer.
pub fn prefer(preferred: Preferred) {
    PREFERRED.set(preferred);
}

/// Launches by this thread so far.
pub fn launches() -> u64 {
    LAUNCHES.get()
}

/// The kernel that could serve steps of so many tokens of a pool.
fn key(pool: &PoolConfig, tokens: i64) -> Option<Key> {
    let key = decode::any_key(pool, tokens).filter(|_| !pool.stochastic)?;
    let work = match key.work {
        Work::Mamba2Decode | Work::Mamba2Verify => Work::Mamba2Direct,
        _ => Work::DeltaDirect,
    };
    Some(Key { work, ..key })
}

/// Loads it.
pub(super) fn prepare(cuda: &Cuda, pool: &PoolConfig) -> Result<()> {
    key(pool, 1).filter(|&key| cuda.has(key)).map_or(Ok(()), |key| cuda.load(key))
}

/// A launch: tiles of a head that a block has, blocks of a head, and its shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Choice {
    warps: i32,
    parts: i32,
    shared_bytes: i32,
    direct: Direct,
}

impl Choice {
    /// A pure function of the shape, a ring's rows and the device, but for what tests prefer; none where a ring is too long.
    fn of(shape: &Shape, ring_rows: i32, multiprocessors: u32) -> Option<Choice> {
        if ring_rows > MAX_ROWS {
            return None;
        }
        let head_tiles = up(shape.channels, TILE) / TILE;
        // What a block does once for all of its tiles is half of its work where tokens are many. With few of them, smaller blocks, which are at
        // different points of theirs, keep a multiprocessor busier.
        let most = if shape.tokens > FEW_TOKENS || shape.kda { MAX_WARPS as i32 } else { FEW_WARPS };
        let parts = (head_tiles + most - 1) / most;
        let least = if shape.kda { KDA_WARPS.min(head_tiles) } else { 1 };
        let warps = single::in_parts(head_tiles, parts, shape.heads, shape.rows, multiprocessors).max(least);
        let is_delta = shape.single_columns > 1;
        let channels = (warps * TILE).min(shape.channels);
        let (all_rows, ring_tiles) = (ring_rows + MAX_TOKENS, up(ring_rows, TILE));
        // Products with keys of the step's tokens are of whole tiles, too; where decays are per column there are none.
        let rows = if shape.kda { all_rows.max(ring_tiles) } else { up(all_rows, TILE) };
        let product_rows = if shape.kda { ring_tiles } else { rows };
        let value_rows = if is_delta { ring_tiles } else { rows };
        let columns = if is_delta { shape.columns } else { shape.tokens };
        // Of each 16 rows of a ring, in each pass; of Mamba-2's tokens.
        let passes = (columns + MAX_COLUMNS - 1) / MAX_COLUMNS;
        let places = ring_tiles / TILE * passes + i32::from(!is_delta);
        // Two parts of two words, of values that are fp32 of four; three parts of FULL's bfloat16 values.
        let words = match (shape.value_bytes, shape.element_bytes) {
            (4, _) => 8,
            (_, 2) => 4,
            _ => 6,
        };
        // Rows next to each other have no bank in common.
        let value_stride = channels * shape.value_bytes + if shape.value_bytes == 4 { 32 } else { 16 };
        let other_stride = channels * 2 + 16;
        let product_stride = product_rows + 4;
        let mut shared_bytes = rows * KEY_STRIDE;
        let mut take = |bytes: i32| {
            let at = shared_bytes;
            shared_bytes = up(at + bytes, 16);
            at
        };
        // With decays per column: 16 bytes of bits for a ring's row; rows of log decays, which are spent when sums are made; rows of columns, of many
        // tokens twice in one place.
        let factor_bytes = if shape.kda { 16 } else { 8 };
        let column_bytes = if shape.kda { 2 * shape.tokens * LOG_STRIDE } else { 0 };
        let sum_bytes = warps * columns * SUM_STRIDE * 4;
        let at_logs = take(if shape.kda { rows * LOG_STRIDE } else { 0 });
        let at_columns = take(column_bytes);
        let at_reached = if shape.tokens > FEW_TOKENS { at_columns } else { take(column_bytes) };
        let logs_take_sums = shape.kda && sum_bytes <= ring_rows * LOG_STRIDE;
        let direct = Direct {
            rows,
            columns,
            product_stride,
            brings_all: (tiles_of(shape) <= RING_TILES && PREFERRED.get() != Preferred::DirectLate).into(),
            value_stride,
            other_stride,
            at_values: take(value_rows * value_stride),
            at_queries: take(shape.tokens * KEY_STRIDE),
            at_others: take(shape.token_rows * shape.tokens * other_stride),
            at_gates: take(ring_rows * 8),
            at_weights: take(ring_rows * 8),
            at_factors: take(ring_rows * factor_bytes),
            at_products: take(columns * product_stride * 4),
            at_brought: take(places * WARP * words * 4),
            at_sums: if logs_take_sums { at_logs } else { take(sum_bytes) },
            at_norms: take(if is_delta { (rows + MAX_TOKENS) * 4 } else { 0 }),
            at_own: take(if is_delta { columns * MAX_TOKENS * 4 } else { 0 }),
            at_logs,
            at_columns,
            at_reached,
            at_elapsed: take(if shape.kda { COLUMNS * 4 } else { 0 }),
        };
        Some(Choice { warps, parts: (head_tiles + warps - 1) / warps, shared_bytes, direct })
    }
}

/// Tiles of all rows.
fn tiles_of(shape: &Shape) -> i64 {
    shape.rows.saturating_mul((shape.heads * up(shape.channels, TILE) / TILE).into())
}

/// Whether the pipeline is yet to be asked, or cannot take the step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    First,
    Last,
}

/// What a step whose tensors are aligned comes to, if the kernel can take it and is to.
fn choose(cuda: &Cuda, key: Key, shape: &Shape, ring_rows: i32, turn: Turn) -> Option<Choice> {
    let is_to = match PREFERRED.get() {
        _ if turn == Turn::Last => !shape.kda,
        // Not measured yet: only where it is asked for.
        Preferred::Faster if shape.kda => false,
        Preferred::Faster => tiles_of(shape) <= most_tiles(shape),
        Preferred::Pipeline => false,
        Preferred::Direct | Preferred::DirectLate => true,
    };
    let choice = Choice::of(shape, ring_rows, cuda.device.multiprocessors).filter(|_| is_to)?;
    (choice.shared_bytes <= cuda.shared_limit(key) as i32).then_some(choice)
}

/// A launch in words, if the kernel takes a step whose tensors are aligned.
pub(super) fn in_words(
    cuda: &Cuda,
    slots: &SlotsConfig,
    pool: &PoolConfig,
    (rows, tokens): (i64, i64),
    turn: Turn,
) -> Option<String> {
    let key = key(pool, tokens).filter(|&key| cuda.kernel(key).is_ok())?;
    let has_z = matches!(pool.family, Family::Mamba2(_));
    let shape = Shape::of(slots, pool, (rows, tokens), has_z)?;
    let Choice { warps, parts, shared_bytes, .. } = choose(cuda, key, &shape, Rule::new(slots).rows() as i32, turn)?;
    Some(format!(
        "{}{}, blocks of {} threads with {shared_bytes} bytes of shared memory: {}, {} each",
        key.name(),
        if has_z { " (with a gate z)" } else { "" },
        warps * WARP,
        rows.saturating_mul((shape.heads * parts).into()),
        if parts == 1 { "a head".to_owned() } else { format!("one of {parts} parts of a head") },
    ))
}

/// A call's states as blocks share them.
fn shared_out(state: &State, choice: &Choice) -> State {
    State { warps: choice.warps, parts: choice.parts, ..*state }
}

/// Enqueues it: a block for each head (or part of one) of a row, a warp for each of its tiles.
fn launch<P: Params>(
    cuda: &Cuda,
    key: Key,
    choice: &Choice,
    exec: &Exec,
    shape: &Shape,
    params: &P,
) -> Option<Result<()>> {
    let blocks = shape.rows.checked_mul((shape.heads * choice.parts).into()).filter(|&n| n <= i64::from(i32::MAX))?;
    LAUNCHES.set(LAUNCHES.get() + 1);
    Some(cuda.launch(key, exec, blocks, (choice.warps * WARP) as u32, choice.shared_bytes as u32, params))
}

/// Enqueues a step of Mamba-2, if the kernel can take it and is to.
#[allow(clippy::too_many_arguments, reason = "what a step consists of")]
pub(super) fn mamba2(
    cuda: &Cuda,
    slots: &SlotsView,
    pool: &PoolView,
    batch: &Batch,
    args: &Mamba2Args,
    family: &Mamba2Params,
    exec: &Exec,
    turn: Turn,
) -> Option<Result<()>> {
    let key = key(&pool.config, batch.max_tokens).filter(|&key| cuda.kernel(key).is_ok())?;
    if !mamba2_is_aligned(args, family) {
        return None;
    }
    let shape = Shape::of(&slots.config, &pool.config, (batch.n_rows, batch.max_tokens), args.z.is_some())?;
    let choice = choose(cuda, key, &shape, family.ring_rows, turn)?;
    let family = Mamba2Params { state: shared_out(&family.state, &choice), ..*family };
    launch(cuda, key, &choice, exec, &shape, &Mamba2DirectParams { family, direct: choice.direct })
}

/// Enqueues a step of Gated DeltaNet, if the kernel can take it and is to.
#[allow(clippy::too_many_arguments, reason = "what a step consists of")]
pub(super) fn delta(
    cuda: &Cuda,
    slots: &SlotsView,
    pool: &PoolView,
    batch: &Batch,
    args: &DeltaArgs,
    family: &DeltaParams,
    exec: &Exec,
    turn: Turn,
) -> Option<Result<()>> {
    let key = key(&pool.config, batch.max_tokens).filter(|&key| cuda.kernel(key).is_ok())?;
    if !delta_is_aligned(args, family, key.kda) {
        return None;
    }
    let shape = Shape::of(&slots.config, &pool.config, (batch.n_rows, batch.max_tokens), false)?;
    let choice = choose(cuda, key, &shape, family.ring_rows, turn)?;
    let family = DeltaParams { state: shared_out(&family.state, &choice), ..*family };
    launch(cuda, key, &choice, exec, &shape, &DeltaDirectParams { family, direct: choice.direct })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::Dtype;
    use crate::replay::config::{DeltaDims, DeltaKind, Format, HeadMap, Mamba2Dims, Readout, Schedule};

    const DIRECT: &str = include_str!("../../../cuda/common/direct.cuh");
    const DIRECT_KDA: &str = include_str!("../../../cuda/delta/direct_kda.cuh");

    fn shape(family: &Family, high: bool, (rows, tokens): (i64, i64), window: i32) -> (Shape, i32) {
        let (n_slots, n_rings, max_step_tokens, min_rewind) = (1, 1, tokens as i32, 2);
        let slots = SlotsConfig {
            n_slots,
            n_rings,
            window,
            max_step_tokens,
            min_rewind,
            schedule: Schedule::None,
            checks: false,
        };
        let (format, readout) = if high { (Format::Split32, Readout::High) } else { (Format::F32, Readout::Full) };
        let u_dtype = if high { Dtype::Bf16 } else { Dtype::F32 };
        let (io, out) = (Dtype::Bf16, Dtype::Bf16);
        let pool =
            PoolConfig { family: family.clone(), n_layers: 1, io, out, format, readout, stochastic: false, u_dtype };
        let has_z = matches!(family, Family::Mamba2(_));
        (Shape::of(&slots, &pool, (rows, tokens), has_z).unwrap(), Rule::new(&slots).rows() as i32)
    }

    fn families() -> Vec<Family> {
        let mamba2 = |nheads, headdim, ngroups| Family::Mamba2(Mamba2Dims { nheads, headdim, dstate: 128, ngroups });
        let gdn = |qk_heads, v_heads, v| {
            Family::Delta(DeltaDims { kind: DeltaKind::Gdn, qk_heads, v_heads, k: 128, v, head_map: HeadMap::Grouped })
        };
        let kda = |heads, v| {
            Family::Delta(DeltaDims {
                kind: DeltaKind::Kda,
                qk_heads: heads,
                v_heads: heads,
                k: 128,
                v,
                head_map: HeadMap::Grouped,
            })
        };
        vec![
            mamba2(96, 80, 8),
            mamba2(128, 64, 8),
            mamba2(4, 24, 1),
            gdn(16, 32, 128),
            gdn(16, 64, 128),
            gdn(2, 4, 256),
            kda(32, 128),
            kda(2, 40),
        ]
    }

    #[test]
    fn everything_fits_and_nothing_in_shared_memory_overlaps() {
        for (family, high) in families().iter().flat_map(|family| [(family, true), (family, false)]) {
            for (tokens, window) in [(1, 4), (1, 16), (2, 16), (4, 32), (8, 64)] {
                for rows in [1, 8, 256] {
                    let (shape, ring_rows) = shape(family, high, (rows, tokens), window);
                    let choice = Choice::of(&shape, ring_rows, 132).unwrap();
                    let Choice { warps, parts, shared_bytes, direct: d } = choice;
                    let what = format!("{shape:?}: {choice:?}");
                    let head_tiles = up(shape.channels, TILE) / TILE;
                    assert!((1..=MAX_WARPS as i32).contains(&warps) && warps * parts >= head_tiles, "{what}");
                    assert!(warps * (parts - 1) < head_tiles, "a block without tiles: {what}");
                    // A multiprocessor of sm_80 has 164 KB, and one of sm_90 holds two blocks, but of many tokens' fp32 values with log decays of all
                    // columns.
                    let is_large = shape.kda && !high && tokens > 4;
                    assert!(shared_bytes <= if is_large { 163 << 10 } else { 112 << 10 }, "{what}");
                    // Products are of whole tiles of rows, and eight tokens stand behind a ring's rows.
                    let ring_tiles = up(ring_rows, TILE);
                    assert!(d.rows >= ring_tiles.max(ring_rows + MAX_TOKENS), "{what}");
                    assert!(d.rows % TILE == 0 || shape.kda, "{what}");
                    assert!(d.product_stride > if shape.kda { ring_tiles } else { d.rows }, "{what}");
                    assert!(d.value_stride % 16 == 0 && d.other_stride % 16 == 0, "{what}");
                    let is_delta = matches!(family, Family::Delta(_));
                    let columns = match (is_delta, tokens) {
                        (false, _) => tokens as i32,
                        (true, ..=4) => 8,
                        (true, _) => 16,
                    };
                    assert_eq!(d.columns, columns);
                    let places = up(ring_rows, TILE) / TILE * if columns > 8 { 2 } else { 1 } + i32::from(!is_delta);
                    let lane_words = if high {
                        4
                    } else if is_delta {
                        8
                    } else {
                        6
                    };
                    let of_kda = |bytes| if shape.kda { bytes } else { 0 };
                    let (column_bytes, sum_bytes) =
                        (of_kda(2 * tokens as i32 * LOG_STRIDE), warps * columns * SUM_STRIDE * 4);
                    let mut taken = vec![
                        (0, d.rows * KEY_STRIDE),
                        (d.at_values, if is_delta { ring_tiles } else { d.rows } * d.value_stride),
                        (d.at_queries, tokens as i32 * KEY_STRIDE),
                        (d.at_others, shape.token_rows * tokens as i32 * d.other_stride),
                        (d.at_gates, ring_rows * 8),
                        (d.at_weights, ring_rows * 8),
                        (d.at_factors, ring_rows * if shape.kda { 16 } else { 8 }),
                        (d.at_products, columns * d.product_stride * 4),
                        (d.at_brought, places * WARP * lane_words * 4),
                        (d.at_norms, if is_delta { (d.rows + 8) * 4 } else { 0 }),
                        (d.at_own, if is_delta { columns * 8 * 4 } else { 0 }),
                        (d.at_logs, of_kda(d.rows * LOG_STRIDE)),
                        (d.at_columns, column_bytes),
                        (d.at_elapsed, of_kda(COLUMNS * 4)),
                    ];
                    // Sums may lie where log decays of records were, and the step's columns where they were before.
                    if shape.kda && d.at_sums == d.at_logs {
                        assert!(sum_bytes <= ring_rows * LOG_STRIDE, "{what}");
                    } else {
                        taken.push((d.at_sums, sum_bytes));
                    }
                    if d.at_reached != d.at_columns {
                        taken.push((d.at_reached, column_bytes));
                    }
                    taken.retain(|&(_, bytes)| bytes > 0);
                    taken.sort_unstable();
                    let mut before = 0;
                    for (at, bytes) in taken {
                        assert!(at >= before && at % 16 == 0, "{at} behind {before}: {what}");
                        before = at + bytes;
                    }
                    assert!(before <= shared_bytes, "{what}");
                }
            }
        }
    }

    #[test]
    fn few_heads_get_a_block_each_and_many_go_through_the_pipeline() {
        let [_, mamba2, _, _, gdn, ..] = &families()[..] else { unreachable!() };
        for (family, high, rows, tokens, is_direct) in [
            (mamba2, true, 1, 1, true),
            (mamba2, false, 4, 1, true),
            (mamba2, true, 8, 1, false),
            (gdn, true, 4, 1, true),
            (gdn, false, 8, 1, false),
            (mamba2, true, 32, 4, true),
            (mamba2, true, 256, 4, false),
            (mamba2, false, 256, 4, true),
            (gdn, true, 64, 4, false),
            (gdn, false, 512, 4, true),
            (gdn, true, 512, 8, true),
        ] {
            let (shape, _) = shape(family, high, (rows, tokens), 32);
            assert_eq!(tiles_of(&shape) <= most_tiles(&shape), is_direct, "{rows} rows of {tokens} tokens, {shape:?}");
        }
    }

    #[test]
    fn blocks_are_smaller_where_there_are_few_of_them_and_for_few_tokens() {
        let [five, four, _, _, eight, sixteen, kda, _] = &families()[..] else { unreachable!() };
        for (family, rows, tokens, warps) in [
            (four, 1, 1, 4),
            (four, 256, 8, 4),
            (five, 256, 1, 5),
            (eight, 1, 1, 4),
            (eight, 256, 1, 4),
            (eight, 256, 8, 8),
            (eight, 1, 8, 4),
            (sixteen, 256, 8, 8),
            (kda, 256, 1, 8),
            (kda, 1, 1, 4),
            (kda, 1, 8, 4),
        ] {
            let (shape, ring_rows) = shape(family, true, (rows, tokens), 32);
            assert_eq!(Choice::of(&shape, ring_rows, 132).unwrap().warps, warps, "{shape:?}");
        }
    }

    #[test]
    fn a_ring_that_is_too_long_is_left_to_others() {
        let (shape, _) = shape(&families()[1], true, (1, 1), 16);
        assert!(Choice::of(&shape, MAX_ROWS, 132).is_some() && Choice::of(&shape, MAX_ROWS + 1, 132).is_none());
    }

    #[test]
    fn the_kernels_have_the_same_numbers() {
        for text in [
            format!("MAX_TOKENS = {MAX_TOKENS},"),
            format!("MAX_COLUMNS = {MAX_COLUMNS},"),
            format!("MAX_TILES = {},", MAX_ROWS / TILE),
            "ROW_BYTES = COLUMNS * 2,".to_owned(),
            "KEY_STRIDE = ROW_BYTES + 16,".to_owned(),
            "SUM_STRIDE = TILE + 4,".to_owned(),
        ] {
            assert!(DIRECT.contains(&text), "cuda/common/direct.cuh has no '{text}'");
        }
        for text in ["LOG_BYTES = COLUMNS * 4,", "LOG_STRIDE = LOG_BYTES + 16,"] {
            assert!(DIRECT_KDA.contains(text), "cuda/delta/direct_kda.cuh has no '{text}'");
        }
        assert_eq!(LOG_STRIDE, COLUMNS * 4 + 16);
        assert_eq!((KEY_STRIDE, SUM_STRIDE), (COLUMNS * 2 + 16, TILE + 4));
    }
}
